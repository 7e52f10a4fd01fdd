#ifndef XDI_TENSOR_HALO_H
#define XDI_TENSOR_HALO_H

#include "tensor/tensor.h"

/* Exchanges halos for operators with neighbours, such as convolutions, on spatially sharded tensors. A rank's box grows by
 * `before` and `after` indices a dimension, from any number of ranks or by a boundary rule. The operator then needs no
 * padding.
 *
 *     xd_halo_exchange(halo, x, wide);                 x [C, 5, 9] -> wide [C, 1 + 5 + 1, 1 + 9 + 1]
 *     your convolution: wide -> y [C', 5, 9]
 *     its backward:     d_y -> d_wide
 *     xd_halo_exchange_backward(halo, d_wide, d_x);
 *
 * Any mesh axes may split any dimensions by chunks or offsets; other axes exchange among themselves. Unsplit dimensions may
 * have halos. Parts are dense. A rank without elements has no halo and still calls. */

/* Indices beyond a dimension of extent n. */
typedef enum xd_halo_boundary {
    XD_HALO_ZERO = 0, /* zeros, any width */
    XD_HALO_PERIODIC, /* -1 is n - 1, n is 0; at most n indices */
    XD_HALO_REFLECT,  /* -1 is 1, n is n - 2; at most n - 1 indices */
    /* -1 is 0, n is n - 1, as CREDIT pads rows across a pole. Longitude j is taken at j - floor(m / 2) modulo its extent m.
     * At most n indices. One dimension only. */
    XD_HALO_POLE
} xd_halo_boundary;

/* The gradient given to the backward.
 *
 *    PARTIAL    a term of every element with halo, from this rank's outputs. Fixed bits for one cut; cuts differ by rounding
 *    COMPLETE   whole on this rank's part and beyond the tensor ends it touches; the rest is not read. Bits of one rank for
 *               every cut if the operator's are. It needs d_y with halo: a second exchange, before and after swapped, ZERO
 *
 * The forward has the bits of one rank. The backward adds the holder's term, other ranks' ascending, then images beyond the
 * ends: before ahead of after, later dimensions first, ranks ascending. COMPLETE adds images only. F32, BF16 and F16 add in
 * f32 and round once. */
typedef enum xd_halo_gradient {
    XD_HALO_PARTIAL = 0, /* see above */
    XD_HALO_COMPLETE     /* see above */
} xd_halo_gradient;

/* Describes an exchange. Read during the call only. */
typedef struct xd_halo_desc {
    const xd_layout *layout;                /* required; on ranks of the communicator */
    xd_dtype dtype;                         /* any; the backward needs sums */
    int64_t before[XD_DIMS_MAX];            /* [ndim] indices below the first */
    int64_t after[XD_DIMS_MAX];             /* [ndim] indices above the last */
    xd_halo_boundary boundary[XD_DIMS_MAX]; /* [ndim] */
    int longitude; /* dimension that POLE turns, not the one with POLE; negative counts from the end */
    xd_halo_gradient gradient;
} xd_halo_desc;

/* One rank's planned exchange with buffers. Belongs to its context. */
typedef struct xd_halo xd_halo;

/* Plans an exchange and compares it over the ranks.
 *
 *    comm   outlives *out; layout ranks are its ranks
 *
 * Collective over comm. Needs temporary lists. A plan tells memory and bytes to send, also of ranks that do not exist
 * (xd_plan_begin).
 * Errors: ARGUMENT (layout, boundary, gradient, width negative or beyond ndim, two POLE, longitude), DTYPE, SHAPE (width
 * above the boundary's limit; more than 2^62 elements), TOPOLOGY (ranks outside comm), UNSUPPORTED (partial axes; several
 * intervals in a dimension), MISMATCH (plans differ), MEMORY. */
XD_API xd_result xd_halo_create(xd_comm *comm, const xd_halo_desc *desc, xd_halo **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_halo_destroy(xd_halo *halo);

/* Extents of this rank's part with halo, [ndim]; 0 where it holds nothing. Local. */
XD_API void xd_halo_shape(const xd_halo *halo, int64_t *shape);

/* Fills this rank's part with halo.
 *
 *    part   this rank's box, dense; may be NULL when empty
 *    wide   xd_halo_shape, dense, wholly written; no overlap with part
 *
 * Both in device memory, ordered on the context's stream. Rows of dimension 0 move in place; other boxes are packed.
 * Collective over comm with several ranks and a halo. Allocates nothing. Errors: ARGUMENT (NULL), those of
 * xd_collective_run. */
XD_API xd_result xd_halo_exchange(xd_halo *halo, const void *part, void *wide);

/* Computes the gradient of this rank's part: the transpose of xd_halo_exchange.
 *
 *    wide   gradient with halo, dense; no overlap with part
 *    part   wholly written
 *
 * Collective over comm as above. Allocates nothing. Errors: ARGUMENT (NULL), DTYPE (no sums), UNSUPPORTED (floating PARTIAL
 * in INVARIANT mode), those of xd_collective_run. */
XD_API xd_result xd_halo_exchange_backward(xd_halo *halo, const void *wide, void *part);

#endif
