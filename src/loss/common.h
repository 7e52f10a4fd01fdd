#ifndef XDI_LOSS_COMMON_H
#define XDI_LOSS_COMMON_H

#include "comm/collective.h"
#include "kernel/types.h"

/* Fields of every loss over [T] rows. Labels, mask, weights and row_loss are for the same positions on every rank of the
 * vocabulary. */
typedef struct xd_loss_common {
    xd_ids labels;                     /* [T], from xd_next_token_labels; none -> {NULL} */
    bool has_ignore_index;             /* false -> XD_IGNORE_INDEX */
    int64_t ignore_index;              /* not counted, in soft losses too */
    const uint8_t *mask;               /* [T] 0 -> not counted; NULL -> all */
    const float *row_weight;           /* [T]; NULL -> 1 */
    const double *scale;               /* of loss and gradient; NULL -> 1 */
    const xd_denominator *denominator; /* D of the step; NULL -> denominator_value */
    double denominator_value;          /* D; 0 -> counted rows over comm, one more exchange */
    xd_comm *comm;                     /* data and sequence axes; NULL -> this rank */
    xd_rows gradient;  /* d loss / d student, f32 or bf16, may be the student; data NULL -> none */
    float *row_loss;   /* [T] without row_weight, scale, D; uncounted 0; or NULL */
    xd_status *status; /* data errors add up; NULL -> DATA */
    void *workspace;   /* NULL -> allocated on the device */
    size_t workspace_bytes;
} xd_loss_common;

#endif
