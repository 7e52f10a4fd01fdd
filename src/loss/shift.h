#ifndef XDI_LOSS_SHIFT_H
#define XDI_LOSS_SHIFT_H

#include "comm/collective.h"

/* The label of position t is the id at t + 1; the last position of a sequence has none. Logits never move: a
 * rank passes the list of positions it holds, in any order (contiguous, or the load-balanced blocks r and
 * 2n-1-r). */
typedef struct xd_shift_desc {
    int64_t sequences;        /* B */
    int64_t length;           /* positions of a whole sequence */
    const int64_t *positions; /* [held] global positions of this rank, in the order of its logits rows */
    int64_t held;          /* without comm any of them, in any number; with comm each is held by one rank */
    xd_ids ids;            /* [B, length] when every rank has them all; [B, held] with comm */
    const uint8_t *mask;   /* shape as ids: 0 -> this token is no position's label; NULL -> all are */
    bool has_ignore_index; /* false -> ignore_index is XD_IGNORE_INDEX, whatever the next field holds */
    int64_t ignore_index;  /* label of positions without one */
    xd_comm *comm;         /* ranks that together hold each position once; NULL -> ids has all positions */
} xd_shift_desc;

/* Writes labels [B, held] for this rank's positions, with the dtype of desc->ids, as xd_loss_common.labels takes them. All
 * arrays are host memory, also on a context with a GPU. With comm: collective over it, one exchange of ids and positions,
 * memory from the context's allocator; else local. Errors, with comm the same on every rank: ARGUMENT (a position outside
 * the sequence, an ignore_index that 32-bit labels cannot hold), DTYPE, SHAPE (a position that two ranks hold, or no rank,
 * with its number), MISMATCH (other sequences or another length than rank 0, naming the rank), MEMORY. */
XD_API xd_result xd_next_token_labels(xd_ctx *ctx, const xd_shift_desc *desc, void *labels);

/* The load-balanced order: rank r of n holds blocks r and 2n-1-r of 2n equal blocks. positions [length / n], on the
 * host, ascending, as xd_shift_desc takes them. Local; allocates nothing. Errors: ARGUMENT (rank, ranks); SHAPE when
 * length is not a multiple of 2n. For n = 1 any length. */
XD_API xd_result xd_load_balanced_positions(xd_ctx *ctx, int64_t length, int rank, int ranks,
                                            int64_t *positions);

#endif
