#ifndef XDI_DMD_VSD_H
#define XDI_DMD_VSD_H

#include "dmd/samples.h"

/* The student's term of distribution matching: docs/diffusion.md. Rows have x's shape. */
typedef struct xd_vsd_desc {
    xd_rows generated;          /* x [samples, elements] */
    xd_rows teacher;            /* T, after guidance */
    xd_rows fake;               /* F */
    xd_rows gradient;           /* if it replaces an input: its dtype, stride; data NULL -> none */
    const uint8_t *mask;        /* x's shape, dense; 0 -> not read, gradient 0; NULL -> all count */
    const double *sample_scale; /* [samples] >= 0; NULL -> 1 */
    const double *chain;        /* [samples] c0 of xd_prediction_mix to X0; NULL -> 1 */
    xd_vsd_normaliser normaliser;
    xd_vsd_form form;
    xd_sample_common common; /* N: elements */
    double *distance;        /* out [samples]: mean |x - T|, undefined after a finding; NULL -> none */
} xd_vsd_desc;

/* Returns weight 1 and zeros: mean normaliser, exact form. Pure. */
XD_API xd_vsd_desc xd_vsd_defaults(void);

/* Computes the global loss and its gradient: sum gradients over data ranks, do not average. Collective over split,
 * whose ranks pass equally many samples, and comm. Allocates nothing with a workspace. The same bits on all ranks, CPU
 * levels and thread counts; INVARIANT: for every split. status.not_finite counts findings. GPU: arrays and out are
 * device memory; does not wait.
 * Errors: ARGUMENT (weight, N, data, workspace, no status on a GPU), SHAPE, DTYPE; DATA (a finding without a status;
 * the gradient is written). */
XD_API xd_result xd_vsd_loss(xd_ctx *ctx, const xd_vsd_desc *desc, xd_sample_values *out);

#endif
