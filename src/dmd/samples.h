#ifndef XDI_DMD_SAMPLES_H
#define XDI_DMD_SAMPLES_H

#include "comm/collective.h"
#include "kernel/dmd_types.h"

/* Common fields of losses over samples. Tensors are [samples, elements] of F32, BF16 or F16, one row a sample. Ranks of `split`
 * hold parts of the same samples, of any sizes, also 0; ranks of `comm` hold other samples. Without such ranks they are NULL.
 *
 *   loss = weight scale / N * sum over all samples of their losses
 *
 * A sample with a non-finite element or factor is a finding: loss and gradient 0, still in N, no effect on others. */
typedef struct xd_sample_common {
    double weight;                     /* > 0, for value and gradient */
    const double *scale;               /* in device memory: loss scaler, 1 / accumulation; NULL -> 1 */
    const xd_denominator *denominator; /* N of the whole step; NULL -> denominator_value */
    double denominator_value;          /* N; 0 -> counted over split and comm: the mean */
    xd_comm *split;                    /* tensor or context parallel axes that cut samples; NULL -> none */
    xd_comm *comm;                     /* data axes that sum results; NULL -> this rank's samples only */
    double *sample_loss; /* [samples] losses of whole samples without weight, scale and N; or NULL */
    xd_status *status;   /* receives findings; NULL -> the call returns DATA */
    void *workspace;     /* NULL -> the device's allocator, for this call */
    size_t workspace_bytes;
} xd_sample_common;

#endif
