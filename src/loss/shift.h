#ifndef XDI_LOSS_SHIFT_H
#define XDI_LOSS_SHIFT_H

#include "comm/collective.h"

/* Position t's label is the id at t + 1; a sequence's last has none. Positions have any order. */
typedef struct xd_shift_desc {
    int64_t sequences;        /* B */
    int64_t length;           /* of a whole sequence */
    const int64_t *positions; /* [held] global, in logits order */
    int64_t held;             /* with comm each position is on one rank; else any */
    xd_ids ids;               /* [B, length], with comm [B, held] */
    const uint8_t *mask;      /* as ids: 0 -> no label; NULL -> all are */
    bool has_ignore_index;    /* false -> XD_IGNORE_INDEX */
    int64_t ignore_index;     /* for positions without one */
    xd_comm *comm;            /* ranks that together hold each position once; NULL -> ids has all */
} xd_shift_desc;

/* Writes labels [B, held], as ids; host memory. With comm: collective over it, one exchange, temporary memory; else local.
 * Errors: ARGUMENT (position outside the sequence; ignore_index above 32-bit labels), DTYPE, SHAPE (position on two ranks
 * or none), MISMATCH (sequences, length), MEMORY. */
XD_API xd_result xd_next_token_labels(xd_ctx *ctx, const xd_shift_desc *desc, void *labels);

/* Lists blocks r and 2n-1-r of 2n equal blocks, for rank r of n. positions: [length / n], host, ascending. Local; allocates
 * nothing. Errors: ARGUMENT (rank, ranks), SHAPE (length not a multiple of 2n; n = 1: any). */
XD_API xd_result xd_load_balanced_positions(xd_ctx *ctx, int64_t length, int rank, int ranks,
                                            int64_t *positions);

#endif
