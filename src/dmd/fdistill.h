#ifndef XDI_DMD_FDISTILL_H
#define XDI_DMD_FDISTILL_H

#include "comm/collective.h"
#include "kernel/dmd_types.h"

/* Weights of samples for a distribution-matching loss that minimises another f-divergence (f-distill). The discriminator's
 * logits of generated samples estimate the density ratio; with z [samples, heads]:
 *
 *   rho_b = clamp(exp(clamp(mean over heads of z, -10, 10)), lower, upper)
 *   bins > 0:  k = bin of t_b;  bin_k <- rate bin_k + (1 - rate) sum_k / (count_k + 1e-6), sums and counts over all ranks, bins
 *              without samples as they were;  rho_b <- rho_b / (bin_k + 1e-6)
 *   weight_b = h(rho_b) / (mean over all samples of all ranks of h + 1e-6)
 *
 * t_b falls into bin floor((t_b - min_t) / ((max_t - min_t) / bins)), clamped to the first and last one. */
typedef struct xd_fdistill_desc {
    xd_rows logits; /* required; [samples, heads] F32, BF16 or F16; heads >= 1 */
    xd_f_divergence divergence;
    double lower, upper; /* of the ratio; 0 < lower <= upper */
    int bins;            /* 0 -> ratios are not normalised; at most XD_FDISTILL_BINS_MAX */
    double rate;         /* of the bins' average, in [0, 1]; 0: they are the means of this call */
    double min_t, max_t; /* min_t < max_t */
    const double *times; /* [samples]; read when bins > 0 */
    double *bin_values;  /* [bins] state that the caller keeps and saves, all 1 at first; in memory of the
                          * device */
    xd_comm *comm; /* data axes only, so that every sample counts once; NULL -> this rank's samples only */
    xd_status *status; /* findings; NULL -> they are returned as DATA */
    void *workspace;   /* NULL -> taken from the device's allocator for this call */
    size_t workspace_bytes;
} xd_fdistill_desc;

/* FastGen's recipe: JS, ratios in [0.1, 20], 10 bins with rate 0, times of rectified flow in [0, 0.999]. Pure. */
XD_API xd_fdistill_desc xd_fdistill_defaults(void);

/* h of one ratio; NaN for a divergence that is unknown. Pure. */
XD_API double xd_f_weight(xd_f_divergence divergence, double ratio);

/* Bytes of workspace of xd_fdistill_weights; 0 for an invalid desc. Local. */
XD_API size_t xd_fdistill_workspace_bytes(xd_ctx *ctx, const xd_fdistill_desc *desc);

/* weights [samples], for sample_scale of xd_vsd_desc; and the bins' next values.
 *
 * Collective over comm: two small exchanges, the same bits of bins on all ranks. Allocates nothing when workspace is given.
 * Deterministic; in INVARIANT mode the same bits for every split of the batch.
 * A sample whose mean logit or whose time is not finite is a finding (status.not_finite): its weight is 0 and it counts in no
 * sum. With a finding on some rank, or one already in status, no bin changes.
 * Errors, the same on every rank, nothing written: ARGUMENT (a number out of its range, missing times, bins or weights, small
 * workspace), SHAPE, DTYPE. Without a status findings are DATA on every rank; the weights are still written. On a GPU a status
 * is required, and all arrays are its memory. */
XD_API xd_result xd_fdistill_weights(xd_ctx *ctx, const xd_fdistill_desc *desc, double *weights);

#endif
