#ifndef XDI_TENSOR_CROSSING_H
#define XDI_TENSOR_CROSSING_H

#include "comm/collective.h"
#include "tensor/exchange.h"

/* Where activations enter or leave a region whose ranks share the work: tensor parallelism (columns of activations are cut)
 * and sequence parallelism (positions are). Each crossing is a forward and the backward that belongs to it, so that gradients
 * are those of the loss of all ranks. A part is what xd_chunk gives: dimensions need not divide, and parts may be empty.
 *
 *   kind             forward: in -> out                      backward: gradient of out -> gradient of in
 *   COPY             whole, itself                           summed over the ranks
 *   REDUCE           whole, summed over the ranks            itself
 *   SCATTER          whole -> part                           parts -> whole
 *   GATHER           parts -> whole                          whole -> part: every rank has the complete gradient
 *   ALL_GATHER       parts -> whole                          summed, -> part: every rank has its own term of the gradient
 *   REDUCE_SCATTER   summed, -> part                         parts -> whole
 *   ALL_TO_ALL       part of dim -> part of other_dim        part of other_dim -> part of dim
 *
 * A column-parallel matrix product begins with COPY and a row-parallel one ends with REDUCE; with sequence parallelism these
 * are ALL_GATHER and REDUCE_SCATTER along the positions. */
typedef enum xd_crossing_kind {
    XD_CROSSING_COPY = 0,
    XD_CROSSING_REDUCE,
    XD_CROSSING_SCATTER,
    XD_CROSSING_GATHER,
    XD_CROSSING_ALL_GATHER,
    XD_CROSSING_REDUCE_SCATTER,
    XD_CROSSING_ALL_TO_ALL
} xd_crossing_kind;

/* What to plan a crossing from. Read during the call only. */
typedef struct xd_crossing_desc {
    xd_crossing_kind kind;
    xd_dtype dtype;
    int ndim;
    int64_t shape[XD_DIMS_MAX]; /* of the whole activation; 0 from ndim on */
    int dim;       /* that is cut; negative counts from the end. COPY and REDUCE do not read it */
    int other_dim; /* ALL_TO_ALL: that is cut afterwards */
    /* Of this rank, with sums in INVARIANT mode: a matrix product whose contraction is split at fixed places has one leaf for each
     * of them. What is summed is then this rank's forest, [nodes, ...]. total 0 -> none, one term a rank */
    xd_leaves leaves;
} xd_crossing_desc;

/* A crossing as planned for one rank, with its buffers. Belongs to its context. */
typedef struct xd_crossing xd_crossing;

/* Plans a crossing and compares it over the ranks.
 *
 *   comm   the ranks of the region; outlives *out
 *
 * Collective over comm. Memory: what xd_crossing_bytes says; buffers in memory of the context's device. Errors, the same on
 * every rank: ARGUMENT (unknown kind; dimensions; dim and other_dim the same; leaves), SHAPE (negative extents; more than
 * 2^56 elements), DTYPE (no such; no sums of it, or leaves of another than F32 and F64), UNSUPPORTED (floating-point sums in
 * INVARIANT mode without leaves), MISMATCH, MEMORY. */
XD_API xd_result xd_crossing_create(xd_comm *comm, const xd_crossing_desc *desc, xd_crossing **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_crossing_destroy(xd_crossing *crossing);

/* What a crossing takes on a rank of a communicator of `ranks` ranks, which need not exist. Local, allocates nothing. Errors: those
 * of xd_crossing_create that one rank finds; ARGUMENT for a rank that is none of `ranks`. */
XD_API xd_result xd_crossing_bytes(xd_ctx *ctx, const xd_crossing_desc *desc, int ranks, int rank,
                                   xd_exchange_bytes *out);

/* Extents of this rank's input and output, [ndim] each; a forest's nodes are not among them. Local. */
XD_API void xd_crossing_shape(const xd_crossing *crossing, int64_t *in, int64_t *out);

/* The activation across, and its gradient back.
 *
 *   forward    in -> out
 *   backward   d_out -> d_in
 *
 * Dense, in memory of the context's device, whose stream orders the work; NULL where empty. The two arrays of COPY and of
 * REDUCE may be one, without leaves; no other overlap. Along the first dimension data is sent and received in place, along
 * others it is packed.
 * Collective over comm, but for the direction of COPY, REDUCE, SCATTER and GATHER that only copies. Allocates nothing. Sums follow
 * the context's mode: in rank order, natively in FAST, along the tree of leaves in INVARIANT. Errors: ARGUMENT for NULL; those of
 * xd_collective_run. */
XD_API xd_result xd_crossing_forward(xd_crossing *crossing, const void *in, void *out);
XD_API xd_result xd_crossing_backward(xd_crossing *crossing, const void *d_out, void *d_in);

#endif
