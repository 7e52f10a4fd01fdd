#ifndef XDI_LOSS_HEAD_H
#define XDI_LOSS_HEAD_H

#include "loss/loss.h"

/* The last layer of a model: logits = hidden weight^T + bias. */
typedef struct xd_head {
    xd_rows hidden;    /* [T, H], f32 or bf16 */
    xd_rows weight;    /* [V/tp, H], f32 or bf16: this rank's vocabulary */
    const float *bias; /* [V/tp]; NULL -> none */
} xd_head;

/* xd_loss from hidden states and the head. Logits exist for one chunk of rows at a time. */
typedef struct xd_head_loss_desc {
    /* As xd_loss_desc; student, common.gradient and common.workspace stay zero. The teacher is logits here, the head below,
     * or absent. T is the rows of student.hidden. */
    xd_loss_desc loss;
    xd_head student; /* required */
    xd_head teacher; /* constant, H may differ; hidden.data NULL -> none */
    /* d loss / d student.hidden, [T, H], f32 or bf16, overwritten; data NULL -> none */
    xd_rows hidden_gradient;
    float *weight_gradient; /* [V/tp, H], d loss / d student.weight is added; NULL -> none */
    float *bias_gradient;   /* [V/tp], d loss / d student.bias is added; NULL -> none */
    int64_t chunk_rows;     /* a multiple of 256; 0 -> 256 */
    bool bf16;              /* round both factors to bf16 where that is faster */
    /* About chunk_rows (V/tp (1, or 2 with a teacher's head) + H) floats; NULL -> allocated on the device for this call. */
    void *workspace;
    size_t workspace_bytes;
} xd_head_loss_desc;

/* Columns of one tile of INVARIANT sums. */
enum { XD_HEAD_TILE = 64 };

/* Computes value and gradients. Sum weight_gradient and bias_gradient over data ranks; hidden_gradient is complete on every
 * rank of the vocabulary.
 *
 * Collective as xd_loss; with a hidden_gradient on several ranks, one more exchange a chunk. Deterministic; chunk_rows
 * changes no weight or bias gradient, except last bits of cuBLASLt (xd_cuda_desc.cublas). In INVARIANT mode hidden_gradient
 * sums tiles of XD_HEAD_TILE columns in the canonical tree, the same for every split at their multiples.
 *
 * Data errors as xd_loss, and hidden_gradient not finite. Rows that do not count or have errors add nothing.
 * Errors, outputs untouched: those of xd_loss; SHAPE, DTYPE (heads), ARGUMENT (chunk_rows), UNSUPPORTED (INVARIANT mode:
 * other splits, a GPU), MEMORY. */
XD_API xd_result xd_head_loss(xd_ctx *ctx, const xd_head_loss_desc *desc, xd_loss_values *out);

#endif
