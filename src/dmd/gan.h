#ifndef XDI_DMD_GAN_H
#define XDI_DMD_GAN_H

#include "dmd/samples.h"

/* A term on logits [samples, heads] of a discriminator, with N = samples * heads:
 *
 *   GENERATOR      softplus  sum softplus(-fake) / N                        hinge  -sum fake / N
 *   DISCRIMINATOR  softplus  sum (softplus(fake) + softplus(-real)) / N     hinge  sum (max(0, 1 + fake) + max(0, 1 - real)) / N
 *   R1                       sum (real - fake)^2 / N
 *
 * softplus(u) is log(1 + e^u), and u itself for u > 20. R1 is the approximate penalty: `real` are logits of real samples as the
 * discriminator sees them, noised, and `fake` those of the same noised samples after a small perturbation. (The references
 * perturb the clean sample and do not noise it again: their two inputs differ by the whole noise. What is perturbed is the
 * caller's choice; the formula is the same.) Its gradient goes through both. */
typedef struct xd_gan_desc {
    xd_gan_role role;
    xd_gan_kind kind; /* not read by R1 */
    xd_rows fake;     /* required; [samples, heads] F32, BF16 or F16; R1: logits of the perturbed samples */
    xd_rows real;     /* DISCRIMINATOR and R1: required, of the same shape; GENERATOR: data NULL */
    xd_rows fake_gradient;   /* d loss / d fake, of the same shape, F32, BF16 or F16; may be fake itself, of
                              * the same dtype and stride; data NULL -> none */
    xd_rows real_gradient;   /* d loss / d real; data NULL -> none, and for GENERATOR */
    xd_sample_common common; /* N: logits, samples * heads; weight 0 is an error; split is not used: ranks
                              * that share a sample have all of its logits, and those of comm must have
                              * other samples */
} xd_gan_desc;

/* Weight 1, everything else zero: the generator's term with softplus. Pure. */
XD_API xd_gan_desc xd_gan_defaults(void);

/* As xd_vsd_workspace_bytes. Local. */
XD_API size_t xd_gan_workspace_bytes(xd_ctx *ctx, const xd_gan_desc *desc);

/* Value and gradients. Collective over comm, one small exchange; the promises of xd_vsd_loss about bits (in INVARIANT mode for
 * every split of the batch), memory, errors and GPUs. Further errors: ARGUMENT for a role or kind out of range, `real` with a
 * GENERATOR or a `split`. Findings: a sample with a logit, or a difference of R1's, that is not finite in f32. */
XD_API xd_result xd_gan_loss(xd_ctx *ctx, const xd_gan_desc *desc, xd_sample_values *out);

#endif
