#ifndef XDI_DMD_DENOISE_H
#define XDI_DMD_DENOISE_H

#include "dmd/convert.h"
#include "dmd/samples.h"

/* What multiplies the mean square of a sample, as a function of its signal-to-noise ratio (alpha / sigma)^2. */
typedef enum xd_denoise_weight {
    XD_DENOISE_UNIFORM = 0, /* 1, in every space (Model-Optimizer, FastGen) */
    XD_DENOISE_EDM,         /* ratio + 1 / sigma_data^2, of the residual in x0 */
    XD_DENOISE_SNR_MIN,     /* min(ratio, gamma), of the residual in x0 */
    XD_DENOISE_USER         /* `user`, in every space */
} xd_denoise_weight;

/* Which residual a denoising loss takes: the network's output is of type `native`, and is compared in `space`. */
typedef struct xd_denoise_form {
    xd_prediction native;
    xd_prediction space;
    xd_denoise_weight weight;
    double sigma_data;      /* EDM; > 0 */
    double gamma;           /* SNR_MIN; > 0 */
    double user;            /* USER; finite, not negative */
    bool v_is_flow;         /* as in xd_conversion */
    bool v_of_any_schedule; /* compat: V is compared with alpha eps - sigma x0 even where alpha^2 +
                             * sigma^2 is not 1, as Model-Optimizer does under rectified flow. No
                             * conversion reads such a V: space is V, and native too, but with v_is_flow
                             * another native is made FLOW first, as there */
} xd_denoise_form;

/* The term of a sample at time t. Every space is a linear map of the prediction and x_t, and x_t of x0 and eps, so these factors
 * are all that the loss needs to know of the schedule and the spaces. Local. Errors, with *term untouched: those of
 * xd_prediction_mix and xd_target_mix; ARGUMENT for weights out of range, EDM or SNR_MIN in another space than X0, and
 * v_of_any_schedule in another space than V, or of another native without v_is_flow. */
XD_API xd_result xd_denoise_term_at(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                    const xd_denoise_form *form, double t, xd_denoise_term *term);

/* The fake score's term, and plain diffusion training: with r = a p + b x + c eps (a, b, c of its term) rounded to f32,
 *
 *   loss = weight scale / N * sum over b of term_b.weight sum over counted elements of r^2
 *   d loss / d p = weight scale / N * 2 term_b.weight a r
 *
 * p is the network's own output at x_t = alpha x + sigma eps. x_t itself is not read: where it was rounded to a narrow type, r
 * is that of the x_t before. */
typedef struct xd_denoise_desc {
    xd_rows prediction;           /* required; [samples, elements] p, F32, BF16 or F16 */
    xd_rows clean;                /* required; x, of p's shape: what the student generated, a constant */
    xd_rows noise;                /* required; eps, of p's shape */
    xd_rows gradient;             /* d loss / d p, of p's shape; as in xd_vsd_desc; data NULL -> none */
    const uint8_t *mask;          /* as in xd_vsd_desc */
    const xd_denoise_term *terms; /* [samples] required; in memory of the device */
    xd_sample_common common;      /* N: elements; weight 0 is an error */
} xd_denoise_desc;

/* Weight 1, everything else zero. Pure. */
XD_API xd_denoise_desc xd_denoise_defaults(void);

/* As xd_vsd_workspace_bytes. Local. */
XD_API size_t xd_denoise_workspace_bytes(xd_ctx *ctx, const xd_denoise_desc *desc);

/* Value and gradient, as xd_vsd_loss: collective over split and comm, one small exchange over each, the same promises about
 * bits, memory, errors and GPUs. Findings: NaN or infinity in a counted element, r beyond f32, a term that is not finite or has
 * a negative weight, a loss that is infinite. */
XD_API xd_result xd_denoise_loss(xd_ctx *ctx, const xd_denoise_desc *desc, xd_sample_values *out);

#endif
