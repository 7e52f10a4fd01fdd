#ifndef XDI_TENSOR_HALO_H
#define XDI_TENSOR_HALO_H

#include "tensor/exchange.h"
#include "tensor/tensor.h"

/* Halos: operators that look at neighbours, convolutions above all, on tensors that are cut in space. Each rank holds a box of the
 * tensor; the exchange gives it the box with `before` and `after` more indices in each dimension, from as many ranks as hold them,
 * and beyond the ends of the tensor by a rule. An operator without padding of its own then computes this rank's part of the
 * result.
 *
 * The cut is a layout: any number of mesh axes over any dimensions, chunks or offsets, ranks without elements; ranks of axes
 * that do not cut exchange among themselves. Halos are legal in dimensions that nobody cuts. Parts, with and without halo,
 * are dense. A rank without elements has none with its halo either; it sends and receives nothing, and calls like the others.
 *
 *     xd_halo_exchange(halo, x, wide);                 x [C, 5, 9] -> wide [C, 1 + 5 + 1, 1 + 9 + 1]
 *     your convolution: wide -> y [C', 5, 9]
 *     its backward:     d_y -> d_wide
 *     xd_halo_exchange_backward(halo, d_wide, d_x);
 *
 * Bits. The exchange copies: they are those of one rank for every cut. Its backward adds what ranks have found for an
 * element, in a fixed order: first that of the rank which holds it, then the other ranks', ascending, then the images beyond
 * the ends in the order of their places (before comes ahead of after, later dimensions change first), each by ascending
 * ranks; F32, BF16 and F16 add in f32 and round once.
 *   XD_HALO_PARTIAL    the same bits on every run of one cut. Another cut agrees to rounding, because the operator of one rank
 *                      would have added the same terms in another order
 *   XD_HALO_COMPLETE   the bits of one rank for every cut, if the operator's are, element by element. What was found of an
 *                      element is not added over ranks at all, only its images beyond the ends are
 * A backward for COMPLETE needs the output gradient with a halo too, so it has a second exchange, with before and after
 * swapped and ZERO:
 *     xd_halo_exchange(of_gradient, d_y, wide_d_y);    then d_wide is computed from wide_d_y, and is complete where it counts */

/* What lies beyond the first and the last index of a dimension of extent n. */
typedef enum xd_halo_boundary {
    XD_HALO_ZERO = 0, /* zeros, any number of them */
    XD_HALO_PERIODIC, /* -1 is n - 1, n is 0; at most n indices */
    XD_HALO_REFLECT,  /* -1 is 1, n is n - 2: the ends are not repeated; at most n - 1 */
    /* -1 is 0 and n is n - 1, each at the opposite longitude: rows across a pole of the earth, as CREDIT pads them. Longitude j is
     * taken from j - floor(m / 2), modulo the extent m; at most n. One dimension may have this rule */
    XD_HALO_POLE
} xd_halo_boundary;

/* What the gradient given to the backward is. */
typedef enum xd_halo_gradient {
    XD_HALO_PARTIAL = 0, /* a term of every element with halo: of this rank's outputs */
    XD_HALO_COMPLETE /* whole in this rank's own part, and beyond each end of the tensor that its part touches; the rest is not read */
} xd_halo_gradient;

/* What to plan an exchange from. Read during the call only. */
typedef struct xd_halo_desc {
    const xd_layout *layout;                /* required; on ranks of the communicator */
    xd_dtype dtype;                         /* any; the backward needs one that has sums */
    int64_t before[XD_DIMS_MAX];            /* [ndim] indices below this rank's first one */
    int64_t after[XD_DIMS_MAX];             /* [ndim] indices above its last one */
    xd_halo_boundary boundary[XD_DIMS_MAX]; /* [ndim] */
    int longitude; /* the dimension that POLE turns by half, another one than that with POLE; negative counts from the end */
    xd_halo_gradient gradient;
} xd_halo_desc;

/* An exchange as planned for one rank, with its buffers. Belongs to its context. */
typedef struct xd_halo xd_halo;

/* Plans an exchange and compares it over the ranks.
 *
 *   comm   outlives *out; the layout's ranks are numbers of its ranks
 *
 * Collective over comm. Memory: what xd_halo_bytes says, buffers in memory of the context's device, and lists that are freed
 * again. Errors, the same on every rank: ARGUMENT (no layout; unknown boundary or gradient; negative widths, or in dimensions
 * that the tensor lacks; two POLE; longitude), DTYPE, SHAPE (wider than the boundary's rule allows; more than 2^62 elements),
 * TOPOLOGY (ranks outside comm), UNSUPPORTED (a layout with partial axes, or with several intervals in a dimension), MISMATCH
 * (ranks plan differently), MEMORY. */
XD_API xd_result xd_halo_create(xd_comm *comm, const xd_halo_desc *desc, xd_halo **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_halo_destroy(xd_halo *halo);

/* What an exchange takes on a rank of a communicator of `ranks` ranks, which need not exist. Local; takes and frees lists.
 * Errors: those of xd_halo_create that one rank finds; ARGUMENT for a rank that is none of `ranks`. */
XD_API xd_result xd_halo_bytes(xd_ctx *ctx, const xd_halo_desc *desc, int ranks, int rank,
                               xd_exchange_bytes *out);

/* Extents of this rank's part with its halo, [ndim]; 0 in a dimension of which it holds nothing. Local. */
XD_API void xd_halo_shape(const xd_halo *halo, int64_t *shape);

/* Fills this rank's part with its halo.
 *
 *   part   this rank's box, dense; may be NULL when empty
 *   wide   xd_halo_shape, dense; every element is written. No overlap with part
 *
 * Both in memory of the context's device, whose stream orders the work. Rows of the first dimension are sent and received in
 * place; other boxes are packed. Collective over comm, if it has several ranks and there is a halo. Allocates nothing.
 * Errors: ARGUMENT for NULL, and those of xd_collective_run. */
XD_API xd_result xd_halo_exchange(xd_halo *halo, const void *part, void *wide);

/* The gradient of this rank's part from that with halo: the transpose of the exchange. The head of this file says what is added in
 * which order.
 *
 *   wide   the gradient with halo, dense; no overlap with part
 *   part   every element is written
 *
 * Collective over comm as above. Allocates nothing. Errors: ARGUMENT for NULL; DTYPE for one without sums; UNSUPPORTED for a
 * floating-point PARTIAL gradient in INVARIANT mode, whose bits would depend on the cut; those of xd_collective_run. */
XD_API xd_result xd_halo_exchange_backward(xd_halo *halo, const void *wide, void *part);

#endif
