#ifndef XDI_DMD_DENOISE_H
#define XDI_DMD_DENOISE_H

#include "dmd/convert.h"
#include "dmd/samples.h"

/* Weight of a sample; ratio = (alpha/sigma)^2. */
typedef enum xd_denoise_weight {
    XD_DENOISE_UNIFORM = 0, /* 1 (Model-Optimizer, FastGen) */
    XD_DENOISE_EDM,         /* ratio + sigma_data^-2, in X0 */
    XD_DENOISE_SNR_MIN,     /* min(ratio, gamma), in X0 */
    XD_DENOISE_USER         /* `user` */
} xd_denoise_weight;

/* The network predicts `native`; the loss compares in `space`. */
typedef struct xd_denoise_form {
    xd_prediction native;
    xd_prediction space;
    xd_denoise_weight weight;
    double sigma_data;      /* EDM; > 0 */
    double gamma;           /* SNR_MIN; > 0 */
    double user;            /* USER; finite, >= 0 */
    bool v_is_flow;         /* of xd_conversion */
    bool v_of_any_schedule; /* compat: docs/diffusion.md */
} xd_denoise_form;

/* Computes a sample's term at t. Local. Errors: those of xd_prediction_mix; ARGUMENT (weight, space, native). */
XD_API xd_result xd_denoise_term_at(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                    const xd_denoise_form *form, double t, xd_denoise_term *term);

/* The denoising loss of output p at x_t = alpha x + sigma eps. Rows have p's shape. */
typedef struct xd_denoise_desc {
    xd_rows prediction;           /* p [samples, elements] */
    xd_rows clean;                /* x, a constant */
    xd_rows noise;                /* eps */
    xd_rows gradient;             /* as in xd_vsd_desc; data NULL -> none */
    const uint8_t *mask;          /* as in xd_vsd_desc */
    const xd_denoise_term *terms; /* [samples], device memory */
    xd_sample_common common;      /* N: elements */
} xd_denoise_desc;

/* Returns weight 1 and zeros. Pure. */
XD_API xd_denoise_desc xd_denoise_defaults(void);

/* Computes loss and gradient. Collective; all else as of xd_vsd_loss. */
XD_API xd_result xd_denoise_loss(xd_ctx *ctx, const xd_denoise_desc *desc, xd_sample_values *out);

#endif
