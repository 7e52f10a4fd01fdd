#ifndef XDI_KERNEL_REDUCE_H
#define XDI_KERNEL_REDUCE_H

#include "base/context.h"
#include "base/dtype.h"
#include "kernel/types.h"

/* Sums over ranks. Every transport collects the unreduced arrays of the ranks and calls these functions, so that the
 * order of the additions, and with it every bit, is decided here and nowhere else. */

/* Leaves in the first node of the forest of [first, end): the largest power of two that divides first and
 * fits. Pure. */
XD_API int64_t xd_leaves_node_size(int64_t first, int64_t end);

/* Nodes in the forest of [first, first + count): 0 for an empty range, 1 for an aligned block. Pure. */
XD_API int64_t xd_leaves_nodes(int64_t first, int64_t count);

/* True for the dtypes that have arithmetic: F32 F64 BF16 F16 I32 I64 U8. AVG and leaves allow fewer. */
XD_API bool xd_reduce_supports(xd_dtype dtype, xd_reduce_op op);

/* out[i] = op over pieces[0][i], pieces[1][i], ... in that order.
 *
 *   out      [count]; may be one of the pieces
 *   pieces   `ranks` pointers to [count] elements
 *
 * F32, BF16 and F16 add in f32 and round once at the end, F64 in f64, integers wrap. Local, allocates
 * nothing, same bits everywhere. Errors: DTYPE when xd_reduce_supports is false. */
XD_API xd_result xd_reduce_pieces(xd_ctx *ctx, void *out, const void *const *pieces, int ranks, int64_t count,
                                  xd_dtype dtype, xd_reduce_op op);

/* out[i] = root of the canonical leaf tree over all ranks' forests; XD_AVG multiplies the root by 1/total.
 *
 *   out       [count]; may be the first node of a forest
 *   forests   `ranks` pointers; node k of rank r begins at element k * stride
 *   leaves    [ranks]; ranges in rank order that cover [0, total) without a gap; not checked here
 *
 * Local, allocates nothing, same bits everywhere. Errors: DTYPE unless F32 or F64, ARGUMENT unless SUM or
 * AVG. */
XD_API xd_result xd_reduce_leaves(xd_ctx *ctx, void *out, const void *const *forests, const xd_leaves *leaves,
                                  int ranks, int64_t stride, int64_t count, xd_dtype dtype, xd_reduce_op op);

/* The two as entries of the table, for transports: on launch->stream; dtype and operation have been checked. The lists
 * of pointers are read during the call. */
typedef struct xd_reduce_kernels {
    xd_result (*pieces)(const xd_launch *launch, void *out, const void *const *pieces, int ranks,
                        int64_t count, xd_dtype dtype, xd_reduce_op op);
    xd_result (*leaves)(const xd_launch *launch, void *out, const void *const *forests,
                        const xd_leaves *leaves, int ranks, int64_t stride, int64_t count, xd_dtype dtype,
                        xd_reduce_op op);
} xd_reduce_kernels;

#endif
