#ifndef XDI_LOSS_MFT_H
#define XDI_LOSS_MFT_H

#include "loss/loss.h"

/* Minimal fine-tuning (NVIDIA Model-Optimizer, MFTLoss): the forward KL from a teacher that is corrected just
 * enough to predict the label. q = (1 - mu) softmax(y/tau) + mu onehot(label), mu the smallest value that puts the label
 * `threshold` above the teacher's argmax or, where the label is the argmax, raises it by `threshold`. */
typedef struct xd_mft_desc {
    /* As for xd_loss; labels and teacher are required. Of the fields that choose the loss only soft_weight,
     * temperature and temperature_factor (tau^2 by default) are used; labels also say which rows count. */
    xd_loss_desc loss;
    double threshold; /* in [0, 1] */
    /* Output, shape of the student's logits, f32: tau^2 q ln(q/p) of each entry, not summed, as the reference's reduction
     * "none"; 0 in rows that do not count; data NULL -> none. */
    xd_rows terms;
} xd_mft_desc;

/* A desc with the reference's numbers: threshold 0.2, soft_weight 1. Pure. */
XD_API xd_mft_desc xd_mft_defaults(void);

/* Value and gradient; everything else as xd_loss, including a GPU, INVARIANT mode and the workspace:
 * xd_loss_workspace_bytes(&desc->loss). Collective over the vocabulary's group (two exchanges; INVARIANT: three) and
 * over comm. */
XD_API xd_result xd_mft_loss(xd_ctx *ctx, const xd_mft_desc *desc, xd_loss_values *out);

/* soft_weight times the sum over counted rows of 1 - cos(x, y), divided by the denominator (Liger-Kernel, cosine
 * similarity loss). All else as xd_loss: student and teacher are required, labels only say which rows
 * count; an infinite logit of either sign is a data error. A row whose norm is below 1e-12 has no direction: its gradient is
 * 0, and the loss of a row of zeros is 1.
 * Collective over the vocabulary's group (one exchange; INVARIANT: two) and over comm. In INVARIANT mode value and gradient
 * have the same bits on every CPU and GPU, too. */
XD_API xd_result xd_cosine_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

#endif
