#ifndef XDI_LOSS_COMMON_H
#define XDI_LOSS_COMMON_H

#include "comm/collective.h"
#include "kernel/types.h"

/* Fields of every loss over rows of logits: which of the T rows count, the divisor, the outputs. Labels, mask, weights and
 * row_loss are for the same T positions on every rank of the vocabulary. */
typedef struct xd_loss_common {
    xd_ids labels;                     /* [T] next-token ids, from xd_next_token_labels; none -> {NULL} */
    bool has_ignore_index;             /* false -> ignore_index is XD_IGNORE_INDEX */
    int64_t ignore_index;              /* rows with this label do not count, in soft losses too */
    const uint8_t *mask;               /* [T] 0 -> the row does not count; NULL -> all do */
    const float *row_weight;           /* [T]; NULL -> 1 */
    const double *scale;               /* one factor on loss and gradient; NULL -> 1 */
    const xd_denominator *denominator; /* D of the whole step; NULL -> denominator_value */
    double denominator_value;          /* D itself; 0 -> counted rows over comm, one more exchange */
    xd_comm *comm;                     /* data and sequence axes, to sum results; NULL -> this rank */
    xd_rows gradient;  /* d loss / d student, f32 or bf16, may be the student; data NULL -> none */
    float *row_loss;   /* [T] without row_weight, scale, D; 0 where not counted; or NULL */
    xd_status *status; /* data errors are added; NULL -> they are returned as DATA */
    void *workspace;   /* NULL -> allocated on the device for this call */
    size_t workspace_bytes;
} xd_loss_common;

#endif
