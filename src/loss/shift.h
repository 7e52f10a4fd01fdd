#ifndef XDI_LOSS_SHIFT_H
#define XDI_LOSS_SHIFT_H

#include "comm/collective.h"

/* Makes labels: the label of position t is the id at t + 1; the last of a sequence has none. Logits do not move. A rank
 * lists its positions in any order, contiguous or load-balanced. */
typedef struct xd_shift_desc {
    int64_t sequences;        /* B */
    int64_t length;           /* positions of a whole sequence */
    const int64_t *positions; /* [held] this rank's global positions, in the order of its logits rows */
    int64_t held;             /* with comm each position is on one rank; else any, in any number */
    xd_ids ids;               /* [B, length] without comm; [B, held] with comm */
    const uint8_t *mask;      /* shape as ids: 0 -> this token is no label; NULL -> all are */
    bool has_ignore_index;    /* false -> ignore_index is XD_IGNORE_INDEX */
    int64_t ignore_index;     /* label of positions without one */
    xd_comm *comm;            /* ranks that together hold each position once; NULL -> ids has all */
} xd_shift_desc;

/* Writes labels [B, held] for xd_loss_common.labels, in the dtype of ids. Arrays are host memory. With comm: collective over
 * it, one exchange, temporary memory; else local.
 * Errors: ARGUMENT (position outside the sequence; ignore_index above 32-bit labels), DTYPE, SHAPE (position on two ranks or
 * none), MISMATCH (sequences or length differ), MEMORY. */
XD_API xd_result xd_next_token_labels(xd_ctx *ctx, const xd_shift_desc *desc, void *labels);

/* Lists load-balanced positions: rank r of n holds blocks r and 2n-1-r of 2n equal blocks. positions: [length / n], host,
 * ascending. Local; allocates nothing. Errors: ARGUMENT (rank, ranks), SHAPE (length not a multiple of 2n; for n = 1 any is
 * legal). */
XD_API xd_result xd_load_balanced_positions(xd_ctx *ctx, int64_t length, int rank, int ranks,
                                            int64_t *positions);

#endif
