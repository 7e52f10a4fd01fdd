#ifndef XDI_KERNEL_TYPES_H
#define XDI_KERNEL_TYPES_H

#include "base/context.h"
#include "base/dtype.h"

/* With a GPU, results are in its memory. */

/* A borrowed matrix: element (r, c) is data[r * stride + c]. */
typedef struct xd_rows {
    void *data;
    xd_dtype dtype; /* logits: F32 or BF16 */
    int64_t rows, cols;
    int64_t stride; /* elements; 0 -> cols */
} xd_rows;

/* c0 p + c1 q. d/dp = c0, d/dq = c1. */
typedef struct xd_mix {
    double c0, c1;
} xd_mix;

/* out = c0 p + c1 q. A row is a sample, or a frame or channel that repeats its factors. */
typedef struct xd_mix_desc {
    xd_rows p;         /* [rows, columns] F32, F16, BF16 or F64 */
    xd_rows q;         /* any such dtype; data NULL -> out = c0 p */
    xd_rows out;       /* as q; may be p or q: same memory, dtype and stride */
    const xd_mix *mix; /* [rows], on the device */
} xd_mix_desc;

/* Borrowed ids: labels, targets, lists. Losses read them in place. The initialiser {labels} means 64 bits. */
typedef struct xd_ids {
    const void *data;
    xd_dtype dtype; /* I32 or I64; NONE -> I64; others: DTYPE */
} xd_ids;

/* First data error and counts of each kind, on the tensors' device; the same on all ranks. All zero: none. */
typedef struct xd_status {
    int64_t label_out_of_range; /* rows */
    int64_t not_finite;         /* logit rows or gradient elements */
    int64_t nothing_counted;    /* losses, denominator 0 */
    int64_t overflow;           /* of INVARIANT integers */
    int64_t first_row;          /* global if known */
    double first_value;         /* at first_row */
    int64_t large_norms;        /* above xd_gradient_norm_desc.refuse_above */
} xd_status;

/* Copies results to the host after all device work launched before. Local. Errors: TIMEOUT (timeout_seconds). */
XD_API xd_result xd_read(xd_ctx *ctx, void *to, const void *from, size_t bytes);

/* Returns contiguous rows. Pure. */
XD_API xd_rows xd_rows_of(const void *data, xd_dtype dtype, int64_t rows, int64_t columns);

/* Returns ids; data NULL -> none. Pure. */
XD_API xd_ids xd_ids_of(const void *data, xd_dtype dtype);

/* Converts [count] elements on the device, without overlap.
 *
 *   float -> float       F16 BF16 F32 F64, to nearest even; F64 to F16 and BF16 through F32
 *   integer -> float     through F64, exact to 2^53
 *   integer -> integer   BOOL U8 I32 I64, not to a narrower one
 *
 * Local; does not wait for a GPU. Errors: DTYPE (other pairs), ARGUMENT (count < 0). */
XD_API xd_result xd_cast(xd_ctx *ctx, void *to, xd_dtype to_dtype, const void *from, xd_dtype from_dtype,
                         int64_t count);

/* Reduction over ranks. */
typedef enum xd_reduce_op {
    XD_SUM = 0,
    XD_MAX, /* NaN in, NaN out */
    XD_MIN, /* NaN in, NaN out */
    XD_AVG  /* sum times 1/n, in the accumulation type */
} xd_reduce_op;

/* Leaves [first, first + count) of the step's `total` (micro-batches) in a gradient sum. total 0 -> none. The canonical
 * tree's shape depends on `total` alone: docs/decisions.md. */
typedef struct xd_leaves {
    int64_t first, count, total;
} xd_leaves;

/* Default label of uncounted rows. */
#define XD_IGNORE_INDEX (-100)

/* A rank's positions of a micro-batch. One counts if its label is not ignore_index and its mask is not 0; missing arrays
 * exclude none. Its weight is 1 or weights[i]. */
typedef struct xd_positions {
    int64_t count;
    xd_ids labels;         /* [count] or none */
    bool has_ignore_index; /* false -> XD_IGNORE_INDEX */
    int64_t ignore_index;
    const uint8_t *mask;  /* [count] or NULL */
    const float *weights; /* [count] or NULL; finite, not negative */
} xd_positions;

/* Divisor of a loss mean, once per optimizer step, on the tensors' device. */
typedef struct xd_denominator {
    double value;      /* counted weights over micro-batches and ranks */
    double inverse;    /* 1 / value; 0 if nothing counted or a weight was refused */
    int64_t positions; /* counted */
    int64_t refused;   /* weights negative, not finite, too large, or counts < 0; value is 0 */
} xd_denominator;

/* Sums over comm, divided by D, times scale. loss = hard_weight hard + soft_weight tau^2 soft. */
typedef struct xd_loss_values {
    double loss, hard, soft;
    int64_t counted; /* rows */
} xd_loss_values;

/* For one device allocation and one xd_read, the only call that waits. Losses may share a status and add to it; zero it
 * first and after a read. Example: docs/tutorial.md. */
typedef struct xd_loss_report {
    xd_loss_values values;
    xd_status status;
} xd_loss_report;

/* Distance of student and teacher. */
typedef enum xd_divergence {
    XD_KL_FORWARD = 0, /* KL(teacher || student) */
    XD_KL_REVERSE,     /* KL(student || teacher) */
    XD_JSD, /* beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student */
    XD_SOFT_CE,  /* -sum teacher ln student */
    XD_KL_MIXED, /* (1 - beta) forward + beta reverse; top-k only */
    /* xd_loss only, without cross entropy (docs/questions.md): */
    XD_MFT,   /* forward KL from a corrected teacher */
    XD_COSINE /* 1 - cos(student, teacher), logits */
} xd_divergence;

/* What a loss does with probability outside the k ids; all but ZERO_OUTSIDE use only its total. Optima:
 * docs/questions.md. */
typedef enum xd_topk_mode {
    /* Default: one more entry with the mass outside, on both sides. */
    XD_TOPK_TAIL = 0,
    /* Renormalises both; the gradient is inside, the mass outside is free. */
    XD_TOPK_RENORMALISE,
    /* Sums true probabilities over the ids. */
    XD_TOPK_TRUNCATE,
    /* Renormalises the teacher, with log-probability -100 outside (NeMo-RL); no JSD. */
    XD_TOPK_ZERO_OUTSIDE
} xd_topk_mode;

/* Order of a norm. */
typedef enum xd_norm_type {
    XD_NORM_L2 = 0, /* default: sqrt(sum of squares) */
    XD_NORM_L1,     /* sum |x| */
    XD_NORM_MAX     /* max |x| */
} xd_norm_type;

/* Gradient factor; c = max_norm / (norm + 1e-6). */
typedef enum xd_clip_form {
    XD_CLIP_ABOVE = 0,  /* default: c if < 1; 1 for a non-finite norm, whose step is skipped */
    XD_CLIP_ABOVE_NEMO, /* c if < 1: infinite norm 0, NaN norm 1 */
    XD_CLIP_ALWAYS      /* PyTorch, FastGen: min(1, c), NaN for NaN; multiplies even by 1 */
} xd_clip_form;

/* Limb k of an exact sum has units of 2^(32 k - 320). 2^63 squares of f32 add exactly, in any order. */
#define XD_NORM_LIMBS 20

/* A rank's part of a norm, over finite elements. */
typedef struct xd_norm_sum {
    /* sum |x|^p unless exact, in array order or vector lanes; BF16 may use f32 lanes: relative error <= 2^-19 */
    double sum;
    double largest;               /* |x| */
    int64_t not_finite;           /* infinities, NaNs */
    int64_t nan;                  /* NaNs */
    int64_t limbs[XD_NORM_LIMBS]; /* if exact; carries propagated: 2^31 ranks can add */
} xd_norm_sum;

/* Maximum dimensions of a tensor. */
#define XD_DIMS_MAX 8

/* Distribution of first values. */
typedef enum xd_init_kind {
    XD_INIT_ZERO = 0,
    XD_INIT_CONSTANT, /* center */
    XD_INIT_NORMAL,   /* center + scale z, z normal: mean 0, variance 1 */
    XD_INIT_UNIFORM   /* center + scale u, u in (-1, 1) */
} xd_init_kind;

/* In f32, rounded to the element type. */
typedef struct xd_init {
    xd_init_kind kind;
    float center, scale;
} xd_init;

/* Arguments of every kernel. */
typedef struct xd_launch {
    xd_ctx *ctx;
    void *stream;    /* NULL on the CPU */
    void *workspace; /* device memory; size: its _workspace query */
    size_t workspace_bytes;
    xd_status *status; /* may be NULL */
} xd_launch;

#endif
