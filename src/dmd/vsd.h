#ifndef XDI_DMD_VSD_H
#define XDI_DMD_VSD_H

#include "dmd/samples.h"

/* The student's term of distribution matching (variational score distillation):
 *
 *   m_b  = mean over the counted elements of |x - T|
 *   w_b  = sample_scale_b / (m_b + 1e-6)                                (see xd_vsd_normaliser)
 *   g    = w_b (F - T)
 *   loss = weight scale / (2 N) * sum g^2,      d loss / d prediction = weight scale / N * chain_b g
 *
 * x is what the student generated, T and F the clean samples that teacher and fake score predict from its noised form; all
 * three are constants but for the first power of x, so a step against the gradient moves x towards T and away from F. */
typedef struct xd_vsd_desc {
    xd_rows generated;   /* required; [samples, elements] x, F32, BF16 or F16 */
    xd_rows teacher;     /* required; T, of x's shape; after guidance */
    xd_rows fake;        /* required; F, of x's shape */
    xd_rows gradient;    /* of x's shape, F32, BF16 or F16; over one of the three: its dtype and stride; data
                          * NULL -> none */
    const uint8_t *mask; /* [samples, elements] without gaps; 0 -> the element does not count; NULL -> all
                          * do. Masked elements are not read and get gradient 0; a sample without counted
                          * elements has loss 0 */
    const double *sample_scale; /* [samples], as from xd_fdistill_weights; not negative; NULL -> 1 */
    const double *chain; /* [samples] d x / d prediction, so that the gradient is that of the student's own
                          * output: c0 of the conversion to X0 (xd_prediction_mix). NULL -> 1: the gradient
                          * by x */
    xd_vsd_normaliser normaliser;
    xd_vsd_form form;
    xd_sample_common common; /* N: elements; weight 0 is an error */
    double *distance; /* [samples] out: m_b, of a sample with a finding any number; NULL -> not wanted */
} xd_vsd_desc;

/* Weight 1, everything else zero: mean normaliser, exact form. Pure. */
XD_API xd_vsd_desc xd_vsd_defaults(void);

/* Bytes of workspace that xd_vsd_loss takes for this desc: a few words for 16384 elements. 0 for an invalid desc, and when the
 * bytes do not fit into a size_t. Local. */
XD_API size_t xd_vsd_workspace_bytes(xd_ctx *ctx, const xd_vsd_desc *desc);

/* Value and gradient, in two passes over memory; a GPU that has samples whole, of up to 16384 elements, makes one. Gradients
 * are those of the global loss: sum them over data ranks, do not average.
 *
 * Collective over split and comm; the same bits on all their ranks. One small exchange over split for all samples together
 * (COMPAT: two), one over comm. Allocates nothing when workspace is given. Deterministic: one bit pattern on every CPU level
 * and for every number of threads; in INVARIANT mode also for every split of samples and of the batch.
 * With split, numbers of samples agree on its ranks while elements may differ.
 * Errors, the same on every rank, outputs untouched: ARGUMENT (weight not above 0, negative N, no data, small workspace), SHAPE,
 * DTYPE. Findings, by sample, counted in status.not_finite: NaN or infinity in a counted element of x, T or F, x - T or F - T
 * beyond f32, a scale or chain that is not finite or a scale that is negative, a loss or weight that is infinite, in COMPAT form
 * also a weight that overflows in x's dtype (F16 with m_b below 1.5e-5). N of 0, counted or given: everything is zero and status
 * reports it. A gradient beyond its own dtype is stored as infinity, for the gradient norm to find. Without a status the call
 * returns DATA on every rank; the gradient is still written.
 *
 * With a GPU every array, scale, distance, denominator, status and out are device memory; the host reads nothing and does not
 * wait, so a status is required (ARGUMENT without). xd_read copies out to the host. */
XD_API xd_result xd_vsd_loss(xd_ctx *ctx, const xd_vsd_desc *desc, xd_sample_values *out);

#endif
