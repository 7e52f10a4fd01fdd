#ifndef XDI_TENSOR_HALO_H
#define XDI_TENSOR_HALO_H

#include "tensor/tensor.h"

/* Exchanges halos of sharded dimensions for operators with neighbours: docs/questions.md. A rank's box grows by
 * `before` and `after` indices a dimension, from any number of ranks or by a boundary rule.
 *
 * Parts are dense. A rank without elements has no halo and still calls. */

/* Indices beyond extent n. */
typedef enum xd_halo_boundary {
    XD_HALO_ZERO = 0, /* zeros, any width */
    XD_HALO_PERIODIC, /* -1 is n - 1, n is 0; at most n indices */
    XD_HALO_REFLECT,  /* -1 is 1, n is n - 2; at most n - 1 indices */
    /* -1 is 0, n is n - 1; at most n indices, in one dimension only. There longitude j, of extent m, is taken at (j -
     * floor(m / 2)) modulo m. */
    XD_HALO_POLE
} xd_halo_boundary;

/* The gradient given to the backward; order of its sums: docs/questions.md.
 *
 *    PARTIAL    a term of every element with halo, from this rank's outputs. Fixed bits for one cut; cuts differ by rounding
 *    COMPLETE   whole on this rank's part and beyond the ends of the tensor that it touches; the rest is not read. Has the
 *               bits of one rank for every cut, if the operator has. The operator then needs d_y with halo: a second
 *               exchange, with before and after swapped and boundary ZERO
 *
 * The forward has the bits of one rank. Sums of F32, BF16 and F16 are formed in f32 and rounded once. */
typedef enum xd_halo_gradient {
    XD_HALO_PARTIAL = 0, /* see above */
    XD_HALO_COMPLETE
} xd_halo_gradient;

/* Describes an exchange. */
typedef struct xd_halo_desc {
    const xd_layout *layout;                /* required; on ranks of the communicator */
    xd_dtype dtype;                         /* any; the backward needs sums */
    int64_t before[XD_DIMS_MAX];            /* [ndim] below the first */
    int64_t after[XD_DIMS_MAX];             /* [ndim] above the last */
    xd_halo_boundary boundary[XD_DIMS_MAX]; /* [ndim] */
    int longitude; /* dimension that POLE turns, not POLE's; negative counts from the end */
    xd_halo_gradient gradient;
} xd_halo_desc;

/* One rank's plan and buffers. Belongs to its context. */
typedef struct xd_halo xd_halo;

/* Plans an exchange and compares it over comm, which outlives *out and has the layout's ranks. Collective over comm.
 * Needs temporary lists.
 * Errors: ARGUMENT (layout, boundary, gradient, width negative or beyond ndim, two POLE, longitude), DTYPE, SHAPE
 * (width above the boundary's limit; more than 2^62 elements), TOPOLOGY (ranks outside comm), UNSUPPORTED (partial
 * axes; several intervals in a dimension), MISMATCH (plans differ), MEMORY. */
XD_API xd_result xd_halo_create(xd_comm *comm, const xd_halo_desc *desc, xd_halo **out);

/* Frees it. Local. */
XD_API void xd_halo_destroy(xd_halo *halo);

/* Extents with halo, [ndim]; 0 when empty. Local. */
XD_API void xd_halo_shape(const xd_halo *halo, int64_t *shape);

/* Fills this rank's part with halo.
 *
 *    part   this rank's box, dense; may be NULL when empty
 *    wide   xd_halo_shape, dense, wholly written; no overlap
 *
 * Device memory, ordered on the context's stream. Collective over comm with several ranks and a halo. Allocates
 * nothing. Errors: ARGUMENT (NULL), those of xd_collective_run. */
XD_API xd_result xd_halo_exchange(xd_halo *halo, const void *part, void *wide);

/* Computes the gradient of this rank's part: the transpose of xd_halo_exchange.
 *
 *    wide   gradient with halo, dense; no overlap
 *    part   wholly written
 *
 * Collective as above. Allocates nothing. Errors: ARGUMENT (NULL), DTYPE (no sums), UNSUPPORTED (floating PARTIAL in
 * INVARIANT mode), those of xd_collective_run. */
XD_API xd_result xd_halo_exchange_backward(xd_halo *halo, const void *wide, void *part);

#endif
