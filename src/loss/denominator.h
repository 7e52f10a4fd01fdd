#ifndef XDI_LOSS_DENOMINATOR_H
#define XDI_LOSS_DENOMINATOR_H

#include "comm/collective.h"
#include "kernel/types.h"

/* Counts positions over all micro-batches of a step and all ranks of the data and sequence axes.
 *
 *   comm    those axes as one group; NULL -> this rank alone. Never the vocabulary axis: it holds copies.
 *   batches [batch_count] the micro-batches of this rank; the count may differ between ranks and be 0
 *
 *   out     in memory of the tensors' device
 *
 * Collective over comm: one all-reduce of four integers. Allocates nothing. Exact and the same bits for every split:
 * weights are summed as integers. Errors: DTYPE of labels, on the rank that gave them (the others find a batch
 * refused); ARGUMENT for negative counts and weights that are negative, not finite or too large; on a GPU the latter
 * are seen in out->refused, and the losses find nothing counted. */
XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out);

#endif
