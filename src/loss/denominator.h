#ifndef XDI_LOSS_DENOMINATOR_H
#define XDI_LOSS_DENOMINATOR_H

#include "comm/collective.h"
#include "kernel/types.h"

/* Counts positions over all micro-batches of a step and all data and sequence ranks.
 *
 *    comm    those axes as one group, never the vocabulary's; NULL -> this rank alone
 *    batches [batch_count] this rank's micro-batches; counts may differ and be 0
 *    out     device memory
 *
 * Collective over comm: one all-reduce of four integers. Allocates nothing. Weights add as integers, so sums are exact, with
 * the same bits for every split.
 * Errors: DTYPE (labels; other ranks find a refused batch), ARGUMENT (negative counts; weights negative, not finite, above
 * 2^22, or above 2^25 in total on a rank). A GPU reports such weights in out->refused; losses then count nothing. */
XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out);

#endif
