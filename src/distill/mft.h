#ifndef XDI_DISTILL_MFT_H
#define XDI_DISTILL_MFT_H

#include "distill/loss.h"

/* Minimal fine-tuning (NVIDIA Model-Optimizer, MFTLoss): the forward KL from a teacher that is corrected just
 * enough to be right. q = (1 - mu) softmax(y/tau) + mu onehot(label), mu the least that puts the label ahead
 * of the teacher's favourite by `threshold`, or, where it is ahead already, raises it by that much. */
typedef struct xd_mft_desc {
    /* As for xd_loss; labels and teacher are required. Of the fields that say which loss it is, temperature
     * and temperature_factor count (tau^2 by default); labels also say which rows count. */
    xd_loss_desc loss;
    double threshold; /* in [0, 1]; 0 -> 0.2 */
    xd_rows terms; /* as the student's logits, f32: tau^2 q ln(q/p) of each entry, unsummed, as the reference's reduction
                      "none"; 0 in rows that do not count; data NULL -> none */
} xd_mft_desc;

/* Value and gradient; everything else as xd_loss. Collective over the vocabulary's group (two exchanges) and
 * over comm. On the CPU only, and not in INVARIANT mode: UNSUPPORTED. */
XD_API xd_result xd_mft_loss(xd_ctx *ctx, const xd_mft_desc *desc, xd_loss_values *out);

/* soft_weight (0 -> 1) times the sum over counted rows of 1 - cos(x, y), by the denominator (Liger-Kernel, cosine
 * similarity loss). desc as for xd_loss: student and teacher are required, labels only say which rows count.
 * A row of zeros has no direction: its loss is 1 and its gradient 0. Collective and limits as xd_mft_loss, with
 * one exchange over the vocabulary. */
XD_API xd_result xd_cosine_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

#endif
