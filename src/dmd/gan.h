#ifndef XDI_DMD_GAN_H
#define XDI_DMD_GAN_H

#include "dmd/samples.h"

/* A mean over a discriminator's logits [samples, heads]: docs/diffusion.md. */
typedef struct xd_gan_desc {
    xd_gan_role role;
    xd_gan_kind kind;        /* not of R1 */
    xd_rows fake;            /* R1: of perturbed real samples */
    xd_rows real;            /* fake's shape; GENERATOR: data NULL */
    xd_rows fake_gradient;   /* if it replaces fake: its dtype, stride; data NULL -> none */
    xd_rows real_gradient;   /* as fake_gradient; GENERATOR: data NULL */
    xd_sample_common common; /* N: logits; no split */
} xd_gan_desc;

/* Returns weight 1 and zeros: the generator's softplus term. Pure. */
XD_API xd_gan_desc xd_gan_defaults(void);

/* Computes loss and gradients. Collective over comm. All else as of xd_vsd_loss. Errors: also ARGUMENT (role, kind,
 * `real` of a GENERATOR, a gradient over the other logits, split). */
XD_API xd_result xd_gan_loss(xd_ctx *ctx, const xd_gan_desc *desc, xd_sample_values *out);

#endif
