#ifndef XDI_LOSS_COMMON_H
#define XDI_LOSS_COMMON_H

#include "comm/collective.h"
#include "kernel/types.h"

/* What every loss over rows of logits takes besides the logits: which of the T rows count, what divides their sum, where
 * results go. Labels, mask, weights and row_loss are for the same T positions on every rank that shares the vocabulary. */
typedef struct xd_loss_common {
    xd_ids labels;           /* [T] ids of the next token (see xd_next_token_labels); none -> {NULL} */
    bool has_ignore_index;   /* false -> ignore_index is XD_IGNORE_INDEX, whatever the next field holds */
    int64_t ignore_index;    /* rows with this label do not count, for a soft loss too */
    const uint8_t *mask;     /* [T] 0 -> the row does not count; NULL -> all do */
    const float *row_weight; /* [T]; NULL -> 1 */
    const double *scale;     /* one value that multiplies loss and gradient; NULL -> 1 */
    const xd_denominator *denominator; /* D of the whole step; NULL -> denominator_value */
    double denominator_value; /* D itself; 0 -> counted rows of this call over comm, one more exchange */
    xd_comm *comm; /* data and sequence axes: results are summed over them; NULL -> this rank's rows only */
    xd_rows gradient;  /* d loss / d student, f32 or bf16, may be the student's memory; data NULL -> none */
    float *row_loss;   /* [T] without row_weight, scale and D; 0 where not counted; or NULL */
    xd_status *status; /* data errors are added here; NULL -> they are returned as an error */
    void *workspace;   /* NULL -> taken from the device's allocator for this call */
    size_t workspace_bytes;
} xd_loss_common;

#endif
