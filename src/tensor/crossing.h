#ifndef XDI_TENSOR_CROSSING_H
#define XDI_TENSOR_CROSSING_H

#include "comm/collective.h"

/* Moves activations into or out of a region of tensor parallelism (columns split) or sequence parallelism (positions split).
 * Gradients are those of all ranks' loss. Parts are those of xd_chunk, also empty.
 *
 *    kind             forward: in -> out                      backward: d_out -> d_in
 *    COPY             whole                                   whole, summed
 *    REDUCE           whole, summed                           whole
 *    SCATTER          whole -> part                           parts -> whole
 *    GATHER           parts -> whole                          whole -> part: complete on every rank
 *    ALL_GATHER       parts -> whole                          summed -> part: a term on every rank
 *    REDUCE_SCATTER   summed -> part                          parts -> whole
 *    ALL_TO_ALL       part of dim -> part of other_dim        part of other_dim -> part of dim
 *
 * Column-parallel products begin with COPY, row-parallel ones end with REDUCE. Sequence parallelism uses ALL_GATHER and
 * REDUCE_SCATTER along positions. */
typedef enum xd_crossing_kind {
    XD_CROSSING_COPY = 0,
    XD_CROSSING_REDUCE,
    XD_CROSSING_SCATTER,
    XD_CROSSING_GATHER,
    XD_CROSSING_ALL_GATHER,
    XD_CROSSING_REDUCE_SCATTER,
    XD_CROSSING_ALL_TO_ALL
} xd_crossing_kind;

/* Describes a crossing. Read during the call only. */
typedef struct xd_crossing_desc {
    xd_crossing_kind kind;
    xd_dtype dtype;
    int ndim;
    int64_t shape[XD_DIMS_MAX]; /* of the whole activation; 0 from ndim on */
    int dim;                    /* split dimension, negative counts from the end; COPY and REDUCE ignore it */
    int other_dim;              /* ALL_TO_ALL: split dimension of the output */
    /* This rank's leaves for sums in INVARIANT mode: one for each fixed split of a matrix product's contraction. The summed
     * input is then this rank's forest, [nodes, ...]. total 0 -> none, one term a rank. */
    xd_leaves leaves;
} xd_crossing_desc;

/* One rank's planned crossing with buffers. Belongs to its context. */
typedef struct xd_crossing xd_crossing;

/* Plans a crossing and compares it over the ranks.
 *
 *    comm   ranks of the region; outlives *out
 *
 * Collective over comm. A plan tells memory and bytes to send, also of ranks that do not exist (xd_plan_begin).
 * Errors: ARGUMENT (kind, dimensions, dim equals other_dim, leaves), SHAPE (negative extents; more than 2^56 elements),
 * DTYPE (unknown; no sums; leaves not F32 or F64), UNSUPPORTED (floating sums in INVARIANT mode without leaves), MISMATCH,
 * MEMORY. */
XD_API xd_result xd_crossing_create(xd_comm *comm, const xd_crossing_desc *desc, xd_crossing **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_crossing_destroy(xd_crossing *crossing);

/* Extents of this rank's input and output, [ndim] each, without forest nodes. Local. */
XD_API void xd_crossing_shape(const xd_crossing *crossing, int64_t *in, int64_t *out);

/* Moves the activation forward, or its gradient backward.
 *
 *    forward    in -> out
 *    backward   d_out -> d_in
 *
 * Dense device memory, ordered on the context's stream; NULL where empty. COPY and REDUCE without leaves may be in place; no
 * other overlap. Dimension 0 moves in place, others are packed. Sums: rank order; native in FAST; the tree of leaves in
 * INVARIANT. Collective over comm, except directions of COPY, REDUCE, SCATTER and GATHER that only copy. Allocates nothing.
 * Errors: ARGUMENT (NULL), those of xd_collective_run. */
XD_API xd_result xd_crossing_forward(xd_crossing *crossing, const void *in, void *out);
XD_API xd_result xd_crossing_backward(xd_crossing *crossing, const void *d_out, void *d_in);

#endif
