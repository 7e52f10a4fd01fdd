#ifndef XDI_DMD_SAMPLES_H
#define XDI_DMD_SAMPLES_H

#include "comm/collective.h"
#include "kernel/dmd_types.h"

/* Common fields of losses over samples. A loss is weight * scale / N * the sum of its samples' losses. Tensors are
 * [samples, elements] of F32, BF16 or F16. A sample with a non-finite element or factor is a finding: loss and gradient
 * 0, still in N. */
typedef struct xd_sample_common {
    double weight;                     /* > 0 */
    const double *scale;               /* device memory; a loss scaler; NULL -> 1 */
    const xd_denominator *denominator; /* N of the step; NULL -> denominator_value */
    double denominator_value;          /* N; 0 -> counted over split and comm */
    xd_comm *split;      /* ranks with parts of these samples, of any sizes, also 0; NULL -> none */
    xd_comm *comm;       /* ranks with other samples; NULL -> none */
    double *sample_loss; /* out [samples], of whole samples, without weight, scale, N; NULL -> none */
    xd_status *status;   /* of findings; NULL -> the call returns DATA */
    void *workspace;     /* NULL -> the device's allocator */
    size_t workspace_bytes;
} xd_sample_common;

#endif
