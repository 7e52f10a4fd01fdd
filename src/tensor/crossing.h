#ifndef XDI_TENSOR_CROSSING_H
#define XDI_TENSOR_CROSSING_H

#include "comm/collective.h"

/* Moves activations into or out of tensor or sequence parallelism: docs/questions.md. Gradients are those of the loss
 * of all ranks. Parts are those of xd_chunk, and may be empty.
 *
 *    kind             forward: in -> out                      backward: d_out -> d_in
 *    COPY             whole                                   whole, summed
 *    REDUCE           whole, summed                           whole
 *    SCATTER          whole -> part                           parts -> whole
 *    GATHER           parts -> whole                          whole -> part: complete on every rank
 *    ALL_GATHER       parts -> whole                          summed -> part: a term on every rank
 *    REDUCE_SCATTER   summed -> part                          parts -> whole
 *    ALL_TO_ALL       parts of dim -> parts of other_dim      parts of other_dim -> parts of dim */
typedef enum xd_crossing_kind {
    XD_CROSSING_COPY = 0,
    XD_CROSSING_REDUCE,
    XD_CROSSING_SCATTER,
    XD_CROSSING_GATHER,
    XD_CROSSING_ALL_GATHER,
    XD_CROSSING_REDUCE_SCATTER,
    XD_CROSSING_ALL_TO_ALL
} xd_crossing_kind;

/* Describes a crossing. */
typedef struct xd_crossing_desc {
    xd_crossing_kind kind;
    xd_dtype dtype;
    int ndim;
    int64_t shape[XD_DIMS_MAX]; /* whole; 0 from ndim on */
    int dim;                    /* split dimension, negative counts from the end; COPY, REDUCE ignore it */
    int other_dim;              /* ALL_TO_ALL: that of the output */
    /* Leaves for sums in INVARIANT mode, one for each fixed split of a contraction. The summed input is then this
     * rank's forest, [nodes, ...]. total 0 -> one term a rank. */
    xd_leaves leaves;
} xd_crossing_desc;

/* One rank's plan and buffers. Belongs to its context. */
typedef struct xd_crossing xd_crossing;

/* Plans a crossing over comm, which outlives *out, and compares it. Collective.
 * Errors: ARGUMENT (kind, dimensions, dim equals other_dim, leaves), SHAPE (negative extents; more than 2^56
 * elements), DTYPE (unknown; no sums; leaves not F32 or F64), UNSUPPORTED (floating sums in INVARIANT mode without
 * leaves), MISMATCH, MEMORY. */
XD_API xd_result xd_crossing_create(xd_comm *comm, const xd_crossing_desc *desc, xd_crossing **out);

/* Frees it. Local. */
XD_API void xd_crossing_destroy(xd_crossing *crossing);

/* Extents of input and output, [ndim] each, without forest nodes. Local. */
XD_API void xd_crossing_shape(const xd_crossing *crossing, int64_t *in, int64_t *out);

/* Moves the activation, or its gradient backward.
 *
 * Dense device memory, ordered on the context's stream; NULL where empty. COPY and REDUCE without leaves may be in
 * place; no other overlap. Sums follow rank order, in FAST mode the transport's, in INVARIANT mode the tree of leaves.
 * Collective over comm, except directions of COPY, REDUCE, SCATTER and GATHER that only copy. Allocates nothing.
 * Errors: ARGUMENT (NULL), those of xd_collective_run. */
XD_API xd_result xd_crossing_forward(xd_crossing *crossing, const void *in, void *out);
XD_API xd_result xd_crossing_backward(xd_crossing *crossing, const void *d_out, void *d_in);

#endif
