#ifndef XDI_DISTILL_DENOMINATOR_H
#define XDI_DISTILL_DENOMINATOR_H

#include "comm/collective.h"

/* The default of ignore_index fields: rows with this label do not count. */
#define XD_IGNORE_INDEX (-100)

/* Positions of one micro-batch on one rank. A position counts when its label is not ignore_index and its mask
 * is not 0; what is not given does not exclude. A counted position weighs 1, or weights[i]. */
typedef struct xd_positions {
    int64_t count;
    const int64_t *labels; /* [count] or NULL */
    int64_t ignore_index;  /* 0 -> XD_IGNORE_INDEX; to leave out id 0 use the mask */
    const uint8_t *mask;   /* [count] or NULL */
    const float *weights;  /* [count] or NULL; finite, not negative */
} xd_positions;

/* What the mean of a loss divides by: made once per optimizer step, so that the loss and its gradient are
 * those of one rank with the whole batch, however it was split. A plain value; `inverse` is what kernels
 * read. */
typedef struct xd_denominator {
    double value;      /* sum of the weights of counted positions, all micro-batches, all ranks */
    double inverse;    /* 1 / value; 0 when nothing counted */
    int64_t positions; /* how many positions counted */
} xd_denominator;

/* Counts positions over all micro-batches of a step and all ranks of the data and sequence axes.
 *
 *   comm    those axes as one group; NULL -> this rank alone. Never the vocabulary axis: it holds copies.
 *   batches [batch_count] the micro-batches of this rank; the count may differ between ranks and be 0
 *
 * Collective over comm: one all-reduce of five integers. Allocates nothing. Exact and the same bits for every
 * split: weights are summed as integers. Errors: ARGUMENT for negative counts and weights that are negative,
 * not finite or too large. */
XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out);

#endif
