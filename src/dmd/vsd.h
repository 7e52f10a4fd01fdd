#ifndef XDI_DMD_VSD_H
#define XDI_DMD_VSD_H

#include "dmd/samples.h"

/* The student's term of distribution matching (docs/diffusion.md):
 *
 *     loss = weight scale / (2 N) * sum (w_b (F - T))^2,   w_b = sample_scale_b / (mean |x - T| + 1e-6)
 *
 * x is generated; teacher and fake score predict T and F. */
typedef struct xd_vsd_desc {
    xd_rows generated; /* x [samples, elements], F32, BF16 or F16 */
    xd_rows teacher;   /* T after guidance, x's shape */
    xd_rows fake;      /* F, x's shape */
    xd_rows gradient;  /* x's shape, F32, BF16 or F16; over an input: its dtype, stride; data NULL -> none */
    const uint8_t *mask;        /* [samples, elements] dense; 0 -> not read, gradient 0; NULL -> all count */
    const double *sample_scale; /* [samples] >= 0, for example of f-distill; NULL -> 1 */
    const double *chain;        /* [samples] d x / d prediction: c0 of xd_prediction_mix to X0; NULL -> 1 */
    xd_vsd_normaliser normaliser;
    xd_vsd_form form;
    xd_sample_common common; /* N: elements; weight > 0 */
    double *distance;        /* out [samples]: mean |x - T|, undefined after a finding; NULL -> none */
} xd_vsd_desc;

/* Returns weight 1 and zeros: mean normaliser, exact form. Pure. */
XD_API xd_vsd_desc xd_vsd_defaults(void);

/* Computes loss and gradient of the global loss: sum gradients over data ranks, do not average.
 *
 * Collective over split and comm; the same bits on all ranks. Ranks of split pass equally many samples. Allocates nothing when
 * workspace is given. Deterministic on every CPU level and number of threads; INVARIANT: for every split. status.not_finite
 * counts findings. On a GPU all arrays and out are device memory; the host does not wait.
 * Errors, outputs untouched: ARGUMENT (weight, N, data, workspace, no status on a GPU), SHAPE, DTYPE; DATA (a finding without a
 * status; the gradient is written). */
XD_API xd_result xd_vsd_loss(xd_ctx *ctx, const xd_vsd_desc *desc, xd_sample_values *out);

#endif
