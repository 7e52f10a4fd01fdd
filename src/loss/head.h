#ifndef XDI_LOSS_HEAD_H
#define XDI_LOSS_HEAD_H

#include "loss/loss.h"

/* logits = hidden weight^T + bias. */
typedef struct xd_head {
    xd_rows hidden;    /* [T, H], f32 or bf16 */
    xd_rows weight;    /* [V/tp, H], f32 or bf16 */
    const float *bias; /* [V/tp]; NULL -> none */
} xd_head;

/* xd_loss from hidden states; logits exist for one chunk of rows at a time. */
typedef struct xd_head_loss_desc {
    /* student, common.gradient and common.workspace stay zero. The teacher: logits here, the head below, or none. T: rows
     * of student.hidden. */
    xd_loss_desc loss;
    xd_head student; /* required */
    xd_head teacher; /* constant, own H; hidden.data NULL -> none */
    /* [T, H], f32 or bf16, dense, overwritten; data NULL -> none */
    xd_rows hidden_gradient;
    float *weight_gradient; /* [V/tp, H], added to; NULL -> none */
    float *bias_gradient;   /* [V/tp], added to; NULL -> none */
    /* Multiple of 256; 0 -> 256 on the CPU; on a GPU what the workspace holds, at most 2048; without one, of logits 256
     * MiB. Ranks of the vocabulary then take the fewest of any; in a capture 256. */
    int64_t chunk_rows;
    /* Round factors to bf16 where faster; on a GPU logits too, if both factors are bf16 without bias. */
    bool bf16;
    /* About chunk_rows (V/tp (1, or 2 with a teacher's head) logits + H floats) and 640 KiB; NULL -> allocated on the
     * device. */
    void *workspace;
    size_t workspace_bytes;
} xd_head_loss_desc;

/* Columns of a tile. */
enum { XD_HEAD_TILE = 64 };

/* Computes value and gradients. Sum weight_gradient and bias_gradient over data ranks; hidden_gradient is complete on
 * every rank of the vocabulary.
 *
 * Collective as xd_loss; a hidden_gradient on several ranks takes one more exchange a chunk. Deterministic; chunk_rows
 * changes no weight or bias gradient, except cuBLASLt's last bits. INVARIANT: hidden_gradient sums tiles of
 * XD_HEAD_TILE columns in the canonical tree, the same for every split at multiples of that.
 *
 * Data errors as xd_loss, and hidden_gradient not finite. Uncounted and bad rows add nothing.
 * Errors: as xd_loss; SHAPE, DTYPE (heads), ARGUMENT (chunk_rows), UNSUPPORTED (hidden_gradient in INVARIANT mode:
 * other splits, GPU), MEMORY. */
XD_API xd_result xd_head_loss(xd_ctx *ctx, const xd_head_loss_desc *desc, xd_loss_values *out);

#endif
