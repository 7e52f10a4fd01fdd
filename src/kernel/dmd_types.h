#ifndef XDI_KERNEL_DMD_TYPES_H
#define XDI_KERNEL_DMD_TYPES_H

#include "base/philox.h"
#include "kernel/types.h"

/* Random numbers for rows: samples, or consecutive elements of them. */
typedef struct xd_draw_desc {
    xd_philox random;    /* row r has `sample` + r */
    const int64_t *step; /* device memory; added to random.step, so graph replays differ; NULL -> 0 */
    int64_t first;       /* column 0's element of the sample */
    bool uniform;        /* in (0, 1); else normal with mean 0, variance 1 */
    xd_rows out;         /* F32, BF16, F16 or F64 */
} xd_draw_desc;

/* Losses over samples. */

/* The result of a loss; on a GPU in device memory. */
typedef struct xd_sample_values {
    double loss;        /* over all ranks, with weight, scale and N */
    double denominator; /* N */
    int64_t counted;    /* elements or logits, over all ranks */
} xd_sample_values;

/* Divisor of the student's term; m is the mean |x - T|. */
typedef enum xd_vsd_normaliser {
    XD_VSD_MEAN = 0, /* m + 1e-6, by sample (Model-Optimizer, FastGen) */
    XD_VSD_ORIGINAL, /* m, by sample (DMD2's code); m = 0: no contribution */
    XD_VSD_NONE      /* 1 */
} xd_vsd_normaliser;

/* Rounding of the student's term: docs/diffusion.md. */
typedef enum xd_vsd_form {
    XD_VSD_EXACT = 0, /* F - T to f32, the rest in double, the gradient once */
    XD_VSD_COMPAT     /* to x's dtype, as the references; one more pass */
} xd_vsd_form;

/* A residual r = prediction p + clean x + noise eps; the loss rounds the factors to f32. */
typedef struct xd_denoise_term {
    double prediction, clean, noise;
    double weight; /* of r^2; not negative */
} xd_denoise_term;

/* Adversarial terms. */
typedef enum xd_gan_role { XD_GAN_GENERATOR = 0, XD_GAN_DISCRIMINATOR, XD_GAN_R1 } xd_gan_role;

/* Adversarial losses. */
typedef enum xd_gan_kind { XD_GAN_SOFTPLUS = 0, XD_GAN_HINGE } xd_gan_kind;

/* Divergences, by their weight h(rho). */
typedef enum xd_f_divergence {
    XD_F_JS = 0, /* 1 - 1 / (1 + rho) */
    XD_F_RKL,    /* 1: plain distribution matching */
    XD_F_KL,     /* rho */
    XD_F_SF,     /* 1 / (1 + rho) */
    XD_F_SH,     /* sqrt(rho) */
    XD_F_JF,     /* 1 + rho */
    XD_F_NEYMAN  /* 1 / max(rho, 1e-8) */
} xd_f_divergence;

/* Maximum bins of f-distill. */
#define XD_FDISTILL_BINS_MAX 4096

#endif
