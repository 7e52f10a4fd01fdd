#ifndef XDI_LOSS_LOSS_H
#define XDI_LOSS_LOSS_H

#include "loss/common.h"
#include "loss/denominator.h"
#include "loss/vocab.h"
#include "kernel/types.h"

/* Who gets the smoothed probability. */
typedef enum xd_smoothing {
    XD_SMOOTHING_TORCH = 0, /* epsilon / V: every class */
    XD_SMOOTHING_MEGATRON   /* epsilon / (V - 1): every other class */
} xd_smoothing;

/* Whether tau^2 multiplies the divergence, which makes the gradient's size independent of tau. */
typedef enum xd_temperature_factor {
    XD_TEMPERATURE_FACTOR_DEFAULT = 0, /* forward and reverse KL: SQUARED; others: ONE */
    XD_TEMPERATURE_FACTOR_SQUARED,
    XD_TEMPERATURE_FACTOR_ONE
} xd_temperature_factor;

/* Cross entropy with labels (hard), a divergence from a teacher (soft), or both:
 *
 *    loss = scale / D * sum over counted rows of
 *           w_row (hard_weight CE(x, label) + soft_weight tau^2 d(x/tau, y/tau))
 *
 * [T, V/tp]: T positions, the same on every rank of tp, by this rank's columns. Without columns teacher.data is not
 * NULL either.
 *
 * A data error gives its row loss and gradient 0. It counts in status, with the bad side's largest logit or infinity:
 * - label outside the vocabulary; NaN, +infinity or only -infinity in logits; weight or scale not finite
 * - loss, or loss with gradient, above 3.38e38; INVARIANT: weighted loss from 2^22 */
typedef struct xd_loss_desc {
    xd_rows student;          /* required; [T, V/tp], f32 or bf16 */
    xd_rows teacher;          /* as student, constant; data NULL -> hard loss only */
    const xd_vocab *vocab;    /* required */
    double hard_weight;       /* 0: none. One weight is not 0 */
    double soft_weight;       /* 0: none */
    double temperature;       /* soft loss; 0 -> 1 */
    xd_divergence divergence; /* 0 -> XD_KL_FORWARD */
    double beta;              /* XD_JSD: teacher's share; 0: forward KL, 1: reverse */
    xd_temperature_factor temperature_factor;
    double label_smoothing; /* epsilon in [0, 1] */
    xd_smoothing smoothing;
    /* labels NULL -> soft only; row_loss is the weighted sum. On a GPU its pointers and out are device memory. */
    xd_loss_common common;
    double mft_threshold; /* MFT: in [0, 1]; reference 0.2 */
    /* MFT: output as student, f32: tau^2 q ln(q/p) by entry; uncounted rows 0; data NULL -> none */
    xd_rows mft_terms;
} xd_loss_desc;

/* MFT requires labels and teacher; COSINE requires a teacher. For COSINE labels only select rows, infinite logits are
 * data errors, and temperature is not used. Formulas: docs/questions.md. */

/* Computes value and gradient of the global loss; sum gradients over data ranks.
 *
 * Collective over the vocabulary's group and comm; the same bits on all ranks. One exchange over the vocabulary (JSD,
 * MFT: two; INVARIANT: one more), one over comm. Allocates nothing with a workspace, but a CPU context retains up to
 * 512 KB after a bf16 forward KL. Deterministic for a fixed mesh; INVARIANT: for every split. Data errors change no
 * other row. Without counted rows all is zero and status reports it. Does not wait for a GPU.
 * Errors: ARGUMENT (weights, temperature, beta, smoothing, no input, workspace; GPU without status), SHAPE, DTYPE,
 * UNSUPPORTED (divergence), MEMORY. DATA (no status): gradient written. */
XD_API xd_result xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

#endif
