#ifndef XDI_KERNEL_DMD_TYPES_H
#define XDI_KERNEL_DMD_TYPES_H

#include "base/philox.h"
#include "kernel/types.h"

/* Random numbers for rows of samples, each row one sample or a part of one whose elements follow each other. */
typedef struct xd_draw_desc {
    xd_philox random;    /* `sample` is that of row 0; row r has the one r further */
    const int64_t *step; /* in memory of the device: added to random.step, so that a captured graph draws
                          * other numbers when it runs again; NULL -> 0 */
    int64_t first;       /* element of the whole sample that column 0 is */
    bool uniform;        /* in (0, 1); else normal, of mean 0 and variance 1 */
    xd_rows out;         /* F32, BF16, F16 or F64 */
} xd_draw_desc;

/* What losses over samples take and return: [samples, elements], each row one sample or this rank's part of it. */

/* What a loss over samples returns; on a GPU in its memory. */
typedef struct xd_sample_values {
    double loss;        /* over all ranks, with weight, scale and N */
    double denominator; /* N */
    int64_t counted;    /* elements, or logits, over all ranks */
} xd_sample_values;

/* What the student's term divides by, m the mean of |x - T|. */
typedef enum xd_vsd_normaliser {
    XD_VSD_MEAN = 0, /* m + 1e-6, by sample (Model-Optimizer, FastGen) */
    XD_VSD_ORIGINAL, /* m, by sample (DMD2's own code); a sample whose m is 0 contributes nothing */
    XD_VSD_NONE      /* 1 */
} xd_vsd_normaliser;

/* Where the student's term is rounded. */
typedef enum xd_vsd_form {
    XD_VSD_EXACT = 0, /* F - T to f32, the rest in double, the gradient once */
    XD_VSD_COMPAT /* as the references, whose tensors are of x's dtype: w to f32 and then to x's dtype, F - T, g, x - g and
                       * x - (x - g) to x's dtype, and the gradient made from the last. One more pass */
} xd_vsd_form;

/* The residual of a denoising loss, r = prediction p + clean x + noise eps, and what multiplies its square. The three factors
 * are rounded to f32 where r is formed: then no product has a rounding error. */
typedef struct xd_denoise_term {
    double prediction, clean, noise;
    double weight; /* not negative */
} xd_denoise_term;

/* Whose term it is. */
typedef enum xd_gan_role { XD_GAN_GENERATOR = 0, XD_GAN_DISCRIMINATOR, XD_GAN_R1 } xd_gan_role;

/* Form of the adversarial loss. */
typedef enum xd_gan_kind { XD_GAN_SOFTPLUS = 0, XD_GAN_HINGE } xd_gan_kind;

/* Which divergence a weight h(rho) of samples minimises. */
typedef enum xd_f_divergence {
    XD_F_JS = 0, /* 1 - 1 / (1 + rho) */
    XD_F_RKL,    /* 1: plain distribution matching */
    XD_F_KL,     /* rho */
    XD_F_SF,     /* 1 / (1 + rho) */
    XD_F_SH,     /* sqrt(rho) */
    XD_F_JF,     /* 1 + rho */
    XD_F_NEYMAN  /* 1 / max(rho, 1e-8) */
} xd_f_divergence;

/* Most bins of f-distill. */
#define XD_FDISTILL_BINS_MAX 4096

#endif
