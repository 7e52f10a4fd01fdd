#ifndef XDI_KERNEL_DMD_TYPES_H
#define XDI_KERNEL_DMD_TYPES_H

#include "base/philox.h"
#include "kernel/types.h"

/* Samples, or consecutive elements of them. */
typedef struct xd_draw_desc {
    xd_philox random;    /* row r: `sample` + r */
    const int64_t *step; /* device; added to random.step, so graph replays differ; NULL -> 0 */
    int64_t first;       /* column 0's element */
    bool uniform;        /* in (0, 1); else normal */
    xd_rows out;         /* F32, BF16, F16 or F64 */
} xd_draw_desc;

/* Losses. */

/* On a GPU in device memory. */
typedef struct xd_sample_values {
    double loss;        /* over ranks; weight, scale, N */
    double denominator; /* N */
    int64_t counted;    /* elements or logits, over ranks */
} xd_sample_values;

/* Divisor of the student's term; m: mean |x - T|. */
typedef enum xd_vsd_normaliser {
    XD_VSD_MEAN = 0, /* m + 1e-6, by sample (Model-Optimizer, FastGen) */
    XD_VSD_ORIGINAL, /* m, by sample (DMD2); m = 0: no contribution */
    XD_VSD_NONE      /* 1 */
} xd_vsd_normaliser;

/* Rounding: docs/diffusion.md. */
typedef enum xd_vsd_form {
    XD_VSD_EXACT = 0, /* F - T to f32, the rest double, the gradient once */
    XD_VSD_COMPAT     /* to x's dtype, as references; one more pass */
} xd_vsd_form;

/* r = prediction p + clean x + noise eps; factors in f32. */
typedef struct xd_denoise_term {
    double prediction, clean, noise;
    double weight; /* of r^2; >= 0 */
} xd_denoise_term;

/* Adversarial terms. */
typedef enum xd_gan_role { XD_GAN_GENERATOR = 0, XD_GAN_DISCRIMINATOR, XD_GAN_R1 } xd_gan_role;

/* Adversarial losses. */
typedef enum xd_gan_kind { XD_GAN_SOFTPLUS = 0, XD_GAN_HINGE } xd_gan_kind;

/* Divergences by weight h(rho). */
typedef enum xd_f_divergence {
    XD_F_JS = 0, /* 1 - 1 / (1 + rho) */
    XD_F_RKL,    /* 1: plain distribution matching */
    XD_F_KL,     /* rho */
    XD_F_SF,     /* 1 / (1 + rho) */
    XD_F_SH,     /* sqrt(rho) */
    XD_F_JF,     /* 1 + rho */
    XD_F_NEYMAN  /* 1 / max(rho, 1e-8) */
} xd_f_divergence;

/* f-distill. */
#define XD_FDISTILL_BINS_MAX 4096

#endif
