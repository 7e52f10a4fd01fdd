#ifndef XDI_LOSS_LOSS_H
#define XDI_LOSS_LOSS_H

#include "loss/common.h"
#include "loss/denominator.h"
#include "loss/vocab.h"
#include "kernel/types.h"

/* Which classes get the smoothed probability. */
typedef enum xd_smoothing {
    XD_SMOOTHING_TORCH = 0, /* epsilon / V to every class, with the target */
    XD_SMOOTHING_MEGATRON   /* epsilon / (V - 1) to every other class */
} xd_smoothing;

/* Whether tau^2 multiplies the divergence, so that the gradient's size does not depend on tau. */
typedef enum xd_temperature_factor {
    XD_TEMPERATURE_FACTOR_DEFAULT = 0, /* SQUARED for forward and reverse KL, ONE for the others */
    XD_TEMPERATURE_FACTOR_SQUARED,
    XD_TEMPERATURE_FACTOR_ONE
} xd_temperature_factor;

/* Cross entropy with labels (hard), a divergence from a teacher (soft), or both with one gradient write:
 *
 *    loss = scale / D * sum over counted rows of
 *           w_row (hard_weight CE(x, label) + soft_weight tau^2 d(x/tau, y/tau))
 *
 * [T, V/tp]: T positions, the same on every rank of tp, by this rank's columns. A rank without columns passes data that is
 * not NULL.
 *
 * Data errors zero a row's loss and gradient and count in status, with the bad side's largest logit or infinity:
 * - a label outside the vocabulary; NaN, +infinity or only -infinity in logits; a weight or scale that is not finite
 * - a loss, or loss with gradient, above 3.38e38; INVARIANT: a weighted loss from 2^22 */
typedef struct xd_loss_desc {
    xd_rows student;          /* required; [T, >= end - begin], f32 or bf16 */
    xd_rows teacher;          /* [T, >= end - begin], f32 or bf16, constant; data NULL -> hard loss only */
    const xd_vocab *vocab;    /* required */
    double hard_weight;       /* of the cross entropy; 0: none. One weight is not 0 */
    double soft_weight;       /* of the divergence */
    double temperature;       /* of the soft loss; 0 -> 1 */
    xd_divergence divergence; /* 0 -> XD_KL_FORWARD */
    double beta;              /* XD_JSD: teacher's weight in the mixture; 0: forward KL, 1: reverse (GKD) */
    xd_temperature_factor temperature_factor;
    double label_smoothing; /* epsilon in [0, 1] */
    xd_smoothing smoothing;
    /* labels NULL -> soft loss only; row_loss is the weighted sum. On a GPU its pointers and out are device memory, also
     * scale, denominator and status. */
    xd_loss_common common;
    double mft_threshold; /* MFT: in [0, 1]; the reference: 0.2 */
    /* MFT: output of the student's shape, f32: tau^2 q ln(q/p) of each entry; 0 in rows that do not count; data NULL -> none */
    xd_rows mft_terms;
} xd_loss_desc;

/* MFT (NVIDIA Model-Optimizer, MFTLoss) requires labels and teacher. Its teacher is
 *
 *     q = (1 - mu) softmax(y/tau) + mu onehot(label)
 *
 * mu is the smallest value that puts the label mft_threshold above the argmax. If the label is the argmax, mu raises it by that.
 *
 * COSINE (Liger-Kernel) requires a teacher; labels only select rows, infinite logits are data errors, temperature is not used.
 * Below norm 1e-12 a row has gradient 0; a row of zeros has loss 1. In INVARIANT mode the bits are the same on every CPU and GPU.
 */

/* Computes value and gradient. Gradients are of the global loss: sum them over data ranks.
 *
 * Collective over the vocabulary's group and comm; the same bits on all ranks. One exchange over the vocabulary (JSD, MFT:
 * two; INVARIANT: one more, of maxima), one over comm. Allocates nothing with a workspace, except at most 512 KB that a CPU
 * context retains after a bf16 forward KL. Deterministic for a fixed mesh, in INVARIANT mode for every split. Data errors
 * change no other row. Without counted rows all is zero and status reports it. A GPU does not wait; xd_read copies out.
 * Errors, outputs untouched: ARGUMENT (weights, temperature, beta, smoothing, no input, workspace; GPU without status),
 * SHAPE, DTYPE. DATA (no status): gradient written. */
XD_API xd_result xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

#endif
