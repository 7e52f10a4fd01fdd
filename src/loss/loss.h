#ifndef XDI_LOSS_LOSS_H
#define XDI_LOSS_LOSS_H

#include "loss/common.h"
#include "loss/denominator.h"
#include "loss/vocab.h"
#include "kernel/types.h"

/* Who shares the smoothed probability. */
typedef enum xd_smoothing {
    XD_SMOOTHING_TORCH = 0, /* epsilon / V to every class, the target included */
    XD_SMOOTHING_MEGATRON   /* epsilon / (V - 1) to every other class */
} xd_smoothing;

/* Whether the divergence is multiplied by tau^2, which keeps its gradient's size as the temperature grows. */
typedef enum xd_temperature_factor {
    XD_TEMPERATURE_FACTOR_DEFAULT = 0, /* SQUARED for forward and reverse KL, ONE for the others */
    XD_TEMPERATURE_FACTOR_SQUARED,
    XD_TEMPERATURE_FACTOR_ONE
} xd_temperature_factor;

/* Cross entropy against labels (hard), a divergence from a teacher (soft), or both with one gradient write:
 *
 *   loss = scale / D * sum over counted rows of
 *          w_row (hard_weight CE(x, label) + soft_weight tau^2 d(x/tau, y/tau))
 *
 * [T, V/tp]: T positions, this rank's columns of the vocabulary. Labels, mask, weights and row_loss are for
 * the same T positions on every rank of tp; which positions of the batch they are does not matter. A rank
 * without columns still passes data that is not NULL. */
typedef struct xd_loss_desc {
    xd_rows student;       /* required; [T, >= end - begin], f32 or bf16 */
    xd_rows teacher;       /* [T, >= end - begin], f32 or bf16; data NULL -> hard loss only. Constant. */
    const xd_vocab *vocab; /* required */
    double hard_weight;    /* of the cross entropy; 0: it is left out. At least one of the two weights is not
                            * 0 */
    double soft_weight;    /* of the divergence */
    double temperature;    /* of the soft loss; 0 -> 1 */
    xd_divergence divergence; /* 0 -> XD_KL_FORWARD */
    double beta; /* XD_JSD: weight of the teacher in the mixture; 0 is the forward KL and 1 the reverse
                  * (GKD) */
    xd_temperature_factor temperature_factor;
    double label_smoothing; /* epsilon in [0, 1] */
    xd_smoothing smoothing;
    xd_loss_common common; /* labels NULL -> soft loss only; row_loss is hard and soft, weighted */
} xd_loss_desc;

/* Bytes of workspace that xd_loss takes for this desc: [T, tp] partial results, never [T, V]. 0 for an invalid desc,
 * and when the bytes do not fit into a size_t. Local. */
XD_API size_t xd_loss_workspace_bytes(const xd_loss_desc *desc);

/* Value and gradient. Gradients are those of the global loss: sum them over data ranks, do not average.
 *
 * Collective over the vocabulary's group and over comm; the same bits on all their ranks. One packed exchange
 * over the vocabulary (JSD: two; INVARIANT: one more, of the maxima) and one over comm. Allocates nothing
 * when workspace is given, except for at most 512 KB that a context on a CPU retains after its first forward KL
 * of bf16 logits. Deterministic for a fixed mesh; in INVARIANT mode value and gradient have the same bits for every split of
 * vocabulary and positions.
 * Errors, the same on every rank, outputs untouched: ARGUMENT (weights, temperature, beta, smoothing, no
 * input, small workspace), SHAPE, DTYPE. Data errors: a label outside the vocabulary that is not
 * ignore_index; NaN or +infinity among the logits of a counted row, a row of only -infinity, a weight or scale that is not
 * finite, a loss that is infinite or, with its gradient, larger than f32 can hold (3.38e38); in INVARIANT mode also a weight
 * times a loss of 2^22 and above, whatever their total: the row's loss and gradient are zero and status counts it, the same
 * on all ranks; the value that status tells is the largest logit of the side that is not finite, else infinity. Rows are
 * apart from each other: what such a row, or one that does not count, holds changes no bit of any other's results. No counted
 * row: everything is zero and status reports it. Without a status the call returns DATA on every rank; the gradient is still
 * written.
 *
 * With a GPU (xd_cuda_create) every array, scale, denominator, status and out are device memory; the host
 * reads nothing and does not wait, so a status is required (ARGUMENT without). xd_read copies out to the host. */
XD_API xd_result xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

#endif
