#ifndef XDI_LOSS_HEAD_H
#define XDI_LOSS_HEAD_H

#include "loss/loss.h"

/* The last layer of a model: logits = hidden weight^T + bias. */
typedef struct xd_head {
    xd_rows hidden;    /* [T, H], f32 or bf16 */
    xd_rows weight;    /* [V/tp, H], f32 or bf16: the rows of this rank's columns of the vocabulary */
    const float *bias; /* [V/tp]; NULL -> none */
} xd_head;

/* The loss of xd_loss from hidden states and the head instead of logits. Logits exist for one chunk of rows at a
 * time, so memory does not grow with T times V. */
typedef struct xd_head_loss_desc {
    /* All of xd_loss_desc except student, common.gradient and common.workspace, which stay zero. The teacher may be logits
     * here, or the head below, or absent. T is the number of rows of student.hidden. */
    xd_loss_desc loss;
    xd_head student;         /* required */
    xd_head teacher;         /* hidden.data NULL -> none. Its H may differ. Constant. */
    xd_rows hidden_gradient; /* d loss / d student.hidden, [T, H], f32 or bf16, overwritten; data NULL ->
                              * none */
    float *weight_gradient;  /* [V/tp, H]: d loss / d student.weight is added; NULL -> none */
    float *bias_gradient;    /* [V/tp]: d loss / d student.bias is added; NULL -> none */
    int64_t chunk_rows;      /* a multiple of 256; 0 -> 256 */
    bool bf16;       /* multiply in bf16 where the backend does that faster: both factors are rounded first */
    void *workspace; /* NULL -> taken from the device's allocator for this call */
    size_t workspace_bytes;
} xd_head_loss_desc;

/* Columns of the vocabulary in one tile of INVARIANT mode's sums. */
enum { XD_HEAD_TILE = 64 };

/* Bytes of workspace of xd_head_loss: about chunk_rows (V/tp (1, or 2 with a teacher's head) + H) floats. 0
 * for an invalid desc. Local. */
XD_API size_t xd_head_loss_workspace_bytes(const xd_head_loss_desc *desc);

/* Value and gradients. weight_gradient and bias_gradient are this rank's share: sum them over data ranks;
 * hidden_gradient is complete on every rank of the vocabulary's group.
 *
 * Collective as xd_loss; with a hidden_gradient on more than one rank, one more exchange over the
 * vocabulary a chunk. Deterministic; weight and bias gradients do not depend on chunk_rows, except for their
 * last bits where cuBLASLt multiplies (xd_cuda_desc.cublas). In INVARIANT mode
 * hidden_gradient is summed over tiles of XD_HEAD_TILE columns in the canonical tree, so it has the same bits
 * for every split at a multiple of XD_HEAD_TILE. Other splits, and a GPU, are UNSUPPORTED in that mode.
 * Data errors as xd_loss, and a hidden_gradient that is not finite. Rows that do not count or have a data error add nothing to
 * weight_gradient and bias_gradient, whatever their hidden states hold.
 * Errors, the same on every rank, outputs untouched: those of xd_loss; SHAPE and DTYPE of the heads, ARGUMENT
 * for chunk_rows that is not a multiple of 256, MEMORY. */
XD_API xd_result xd_head_loss(xd_ctx *ctx, const xd_head_loss_desc *desc, xd_loss_values *out);

#endif
