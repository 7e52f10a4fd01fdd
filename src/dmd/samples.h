#ifndef XDI_DMD_SAMPLES_H
#define XDI_DMD_SAMPLES_H

#include "comm/collective.h"
#include "kernel/dmd_types.h"

/* What every loss over samples takes besides its tensors. Tensors are rows: [samples, elements], one row a sample or this
 * rank's part of it, F32, BF16 or F16. Ranks of `split` hold parts of the same samples, of any sizes, also none; ranks of
 * `comm` hold other samples. In a pure data-parallel run split is NULL, with one data rank comm is.
 *
 *   loss = weight scale / N * sum over all samples of their losses
 *
 * A sample with a finding (something in it, or in its factors, is not finite) has loss and gradient zero and changes no bit of
 * any other's; it still counts in N. */
typedef struct xd_sample_common {
    double weight;       /* > 0: of this loss in the caller's total, in value and gradient */
    const double *scale; /* one more factor, in memory of the device: of a loss scaler, or 1 / accumulation;
                          * NULL -> 1 */
    const xd_denominator *denominator; /* N of the whole step; NULL -> denominator_value */
    double denominator_value; /* N itself; 0 -> what this call counts over split and comm, which makes it
                               * the mean */
    xd_comm *split;           /* axes over which samples are cut (tensor or context parallel); NULL -> none */
    xd_comm *comm;            /* data axes: results are summed over them; NULL -> this rank's samples only */
    double *sample_loss;      /* [samples] losses without weight, scale and N, whole samples; or NULL */
    xd_status *status;        /* findings are added here; NULL -> they are returned as DATA */
    void *workspace;          /* NULL -> taken from the device's allocator for this call */
    size_t workspace_bytes;
} xd_sample_common;

#endif
