#ifndef XDI_LOSS_MFT_H
#define XDI_LOSS_MFT_H

#include "loss/loss.h"

/* Minimal fine-tuning (NVIDIA Model-Optimizer, MFTLoss): forward KL from a corrected teacher.
 *
 *     q = (1 - mu) softmax(y/tau) + mu onehot(label)
 *
 * mu is the smallest value that puts the label `threshold` above the argmax. If the label is the argmax, mu raises it by
 * `threshold`. */
typedef struct xd_mft_desc {
    /* As for xd_loss; labels and teacher are required; labels also select rows. Only soft_weight, temperature and
     * temperature_factor (default tau^2) are used. */
    xd_loss_desc loss;
    double threshold; /* in [0, 1] */
    /* Output, the student's shape, f32: tau^2 q ln(q/p) of each entry (reference: reduction "none"). 0 in rows that do not
     * count; data NULL -> none. */
    xd_rows terms;
} xd_mft_desc;

/* Returns the reference's numbers: threshold 0.2, soft_weight 1. Pure. */
XD_API xd_mft_desc xd_mft_defaults(void);

/* Computes value and gradient. All else as xd_loss, with GPU and INVARIANT mode.
 * Collective over the vocabulary's group (two exchanges; INVARIANT: three) and comm. */
XD_API xd_result xd_mft_loss(xd_ctx *ctx, const xd_mft_desc *desc, xd_loss_values *out);

/* Computes soft_weight / D times the sum over counted rows of 1 - cos(x, y) (Liger-Kernel). All else as xd_loss: student and
 * teacher are required, labels only select rows; infinite logits are data errors. Below norm 1e-12 a row has gradient 0; a
 * row of zeros has loss 1.
 *
 * Collective over the vocabulary's group (one exchange; INVARIANT: two) and comm. In INVARIANT mode the bits are the same on
 * every CPU and GPU. */
XD_API xd_result xd_cosine_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

#endif
