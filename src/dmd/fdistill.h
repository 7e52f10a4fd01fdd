#ifndef XDI_DMD_FDISTILL_H
#define XDI_DMD_FDISTILL_H

#include "base/internal.h"
#include "comm/collective.h"
#include "kernel/dmd_types.h"

/* f-distill: sample weights that minimise another f-divergence, by the discriminator's ratios: docs/diffusion.md. xd_dmd calls
 * these by xd_dmd_desc.gan.fdistill. */
typedef struct xdi_fdistill_desc {
    xd_rows logits; /* [samples, heads >= 1] of generated samples; F32, BF16 or F16 */
    xd_f_divergence divergence;
    double lower, upper; /* of the ratio; 0 < lower <= upper */
    int bins;            /* 0 -> ratios are not normalised; at most XD_FDISTILL_BINS_MAX */
    double rate;         /* of the bins' average, in [0, 1]; 0: means of this call */
    double min_t, max_t; /* min_t < max_t */
    const double *times; /* [samples]; read when bins > 0 */
    double *bin_values;  /* [bins] the caller's state in device memory, initially 1 */
    xd_comm *comm;       /* data axes; NULL -> this rank's samples only */
    xd_status *status;   /* findings; NULL -> they are returned as DATA */
    void *workspace;     /* NULL -> from the device's allocator */
    size_t workspace_bytes;
} xdi_fdistill_desc;

/* Returns FastGen's recipe: docs/diffusion.md. Pure. */
XD_PRIVATE xdi_fdistill_desc xdi_fdistill_defaults(void);

/* Returns h; NaN for an unknown divergence. Pure. */
XD_PRIVATE double xdi_f_weight(xd_f_divergence divergence, double ratio);

/* Returns xdi_fdistill_weights's workspace bytes; 0 for an invalid desc. Local. */
XD_PRIVATE size_t xdi_fdistill_workspace_bytes(const xdi_fdistill_desc *desc);

/* Computes weights [samples], for sample_scale of xd_vsd_desc, and the next bins.
 *
 * Collective over comm; the same bins on all ranks. Allocates nothing when workspace is given. Deterministic; INVARIANT: for
 * every split. After a finding (status.not_finite) no bin changes. On a GPU all arrays are device memory.
 * Errors, nothing written: ARGUMENT (numbers, missing times, bins, weights, workspace, no status on a GPU), SHAPE, DTYPE; DATA
 * (a finding without a status; weights are written). */
XD_PRIVATE xd_result xdi_fdistill_weights(xd_ctx *ctx, const xdi_fdistill_desc *desc, double *weights);

#endif
