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
 * Collective over comm: one all-reduce of four integers. Allocates nothing. The sums are exact, with the same
 * bits for every split: weights are summed as integers. Errors: DTYPE of labels, on the rank that passed them (the other
 * ranks find a refused batch); ARGUMENT for negative counts and for weights that are negative, not finite or too large
 * (2^22, or 2^25 those of a rank together). On a GPU such weights are reported in out->refused, and the losses then count
 * nothing. */
XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out);

#endif
