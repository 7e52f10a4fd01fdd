#ifndef XDI_LOSS_DENOMINATOR_H
#define XDI_LOSS_DENOMINATOR_H

#include "comm/collective.h"
#include "kernel/types.h"

/* Counts positions over a step's micro-batches and all data and sequence ranks.
 *
 *    comm      those axes, never the vocabulary's; NULL -> this rank
 *    batches   [batch_count]; counts may differ between ranks and be 0
 *    out       device memory
 *
 * Collective over comm: one all-reduce of four integers. Allocates nothing. The same bits for every split.
 * Errors: DTYPE (labels; other ranks return ARGUMENT), ARGUMENT (negative counts; weights negative, not finite, above
 * 2^22, or above 2^25 in total on a rank). A GPU reports refused weights in out->refused, and losses then count
 * nothing. */
XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out);

#endif
