#ifndef XDI_KERNEL_TYPES_H
#define XDI_KERNEL_TYPES_H

#include "base/context.h"
#include "base/dtype.h"

/* What calls take and return besides plain arrays. With a GPU, the structs that hold results are in its memory. */

/* A borrowed matrix of rows: element (r, c) is data[r * stride + c]. */
typedef struct xd_rows {
    void *data;
    xd_dtype dtype; /* XD_DTYPE_F32 or XD_DTYPE_BF16 for logits */
    int64_t rows, cols;
    int64_t stride; /* elements between rows; 0 -> cols */
} xd_rows;

/* A sum of two numbers or tensors, c0 p + c1 q: the forward process, a conversion between predictions, guidance. Its derivative
 * by p is c0, by q c1. */
typedef struct xd_mix {
    double c0, c1;
} xd_mix;

/* out = c0 p + c1 q on rows of samples, each row with its own factors. Rows are samples, or the frames or channels of samples
 * whose factors are repeated. */
typedef struct xd_mix_desc {
    xd_rows p;         /* [rows, columns] F32, F16, BF16 or F64 */
    xd_rows q;         /* the same shape, of any of these types; data NULL -> out = c0 p */
    xd_rows out;       /* the same shape, of any of these types; may be p or q itself: same memory, type and
                        * stride */
    const xd_mix *mix; /* [rows], in memory of the context's device */
} xd_mix_desc;

/* Borrowed token ids, which are columns of the vocabulary: labels, targets, the ids of a list. Losses read
 * them in place, at either width. {labels} is an initialiser for 64 bits. */
typedef struct xd_ids {
    const void *data;
    xd_dtype dtype; /* XD_DTYPE_I32 or XD_DTYPE_I64; NONE -> I64. Calls refuse others with DTYPE */
} xd_ids;

/* First data error of an operation and the number of errors of each kind. In memory of the tensors' device; sent along
 * with the losses' own exchanges, so that all ranks agree. All zero: no error. */
typedef struct xd_status {
    int64_t label_out_of_range; /* rows */
    int64_t not_finite;         /* rows with non-finite logits, or gradient elements that are not finite */
    int64_t nothing_counted;    /* losses whose denominator was zero */
    int64_t overflow;           /* integer accumulators of INVARIANT mode that overflowed */
    int64_t first_row;          /* row of the first error, global where the operation knows it */
    double first_value;         /* and its value */
    int64_t large_norms;        /* norms of gradients above xd_gradient_norm_desc.refuse_above */
} xd_status;

/* Copies results (xd_loss_values, a norm, a status) from memory of the context's device to the host and waits for
 * them and for all work launched before. Local. Errors: TIMEOUT after timeout_seconds. */
XD_API xd_result xd_read(xd_ctx *ctx, void *to, const void *from, size_t bytes);

/* `rows` rows of `columns` elements, back to back. Pure. */
XD_API xd_rows xd_rows_of(const void *data, xd_dtype dtype, int64_t rows, int64_t columns);

/* Ids of a dtype as a value, for languages without struct initialisers; data NULL -> no ids. Pure. */
XD_API xd_ids xd_ids_of(const void *data, xd_dtype dtype);

/* Id i; the caller has checked the dtype and that there are ids. Pure; kernels of a device call it too. */
static XDI_ON_DEVICE inline int64_t xd_id_at(xd_ids ids, int64_t i) {
    return ids.dtype == XD_DTYPE_I32 ? (int64_t)((const int32_t *)ids.data)[i]
                                     : ((const int64_t *)ids.data)[i];
}

/* to[i] = from[i], [count] both, in memory of the context's device, without overlap: between floats of any width (F16 BF16
 * F32 F64; rounded to nearest even, from F64 to F16 and BF16 by way of F32, as xd_store_f64), from integers to floats (by way
 * of F64, which is exact to 2^53), and from integers (BOOL U8 I32 I64) to integers at least as wide, for example labels of 32
 * bits to 64. Local; does not wait for a GPU. Errors, with nothing written: DTYPE for other pairs, ARGUMENT for a negative
 * count. */
XD_API xd_result xd_cast(xd_ctx *ctx, void *to, xd_dtype to_dtype, const void *from, xd_dtype from_dtype,
                         int64_t count);

/* How elements of several ranks become one. */
typedef enum xd_reduce_op {
    XD_SUM = 0,
    XD_MAX, /* NaN in, NaN out */
    XD_MIN, /* NaN in, NaN out */
    XD_AVG  /* sum, then one multiplication by 1/n in the accumulation type */
} xd_reduce_op;

/* Gradient leaves in one rank's part of a sum: the step has `total` leaves (micro-batches) and this
 * rank owns [first, first + count). total 0 -> no leaves given.
 *
 * The canonical tree over leaves [lo, hi) splits at lo + m, m the largest power of two below hi - lo, and
 * adds left to right; its shape depends on `total` alone, so neither the number of ranks nor the
 * accumulation steps change a bit. A rank's range is cut into aligned power-of-two blocks, each a node of
 * that tree: its forest. */
typedef struct xd_leaves {
    int64_t first, count, total;
} xd_leaves;

/* The label of rows that do not count, unless has_ignore_index selects another. */
#define XD_IGNORE_INDEX (-100)

/* Positions of one micro-batch on one rank. A position counts when its label is not ignore_index and its mask
 * is not 0; an array that is not given excludes nothing. A counted position has weight 1, or weights[i]. */
typedef struct xd_positions {
    int64_t count;
    xd_ids labels;         /* [count] or none */
    bool has_ignore_index; /* false -> ignore_index is XD_IGNORE_INDEX, whatever the next field holds */
    int64_t ignore_index;
    const uint8_t *mask;  /* [count] or NULL */
    const float *weights; /* [count] or NULL; finite, not negative */
} xd_positions;

/* What the mean of a loss divides by: made once per optimizer step, so that the loss and its gradient are
 * those of one rank with the whole batch, however it was split. A plain value in memory of the tensors'
 * device; `inverse` is what kernels read. */
typedef struct xd_denominator {
    double value;      /* sum of the weights of counted positions, all micro-batches, all ranks */
    double inverse;    /* 1 / value; 0 when nothing counted or a weight was refused */
    int64_t positions; /* how many positions counted */
    int64_t refused;   /* weights negative, not finite or too large, or negative counts: then value is 0 */
} xd_denominator;

/* Sums over all ranks of comm, divided by D and scaled. `loss` = hard_weight hard + soft_weight tau^2
 * soft. */
typedef struct xd_loss_values {
    double loss, hard, soft;
    int64_t counted; /* rows */
} xd_loss_values;

/* Values and status of a loss together, for programs on a GPU: one allocation of its memory, all zero before the step, and
 * one read.
 *
 *     xd_loss_report *there, here;                                  (sizeof *there bytes of the device)
 *     desc.common.status = &there->status;
 *     xd_loss(ctx, &desc, &there->values);                          (any number of losses share a status)
 *     xd_read(ctx, &here, there, sizeof here), xd_status_check(ctx, &here.status);
 *
 * Nothing waits before xd_read, which waits for the loss too. Losses add to the status, so set it to zero once it has
 * been read. */
typedef struct xd_loss_report {
    xd_loss_values values;
    xd_status status;
} xd_loss_report;

/* How far the student is from the teacher. */
typedef enum xd_divergence {
    XD_KL_FORWARD = 0, /* KL(teacher || student) */
    XD_KL_REVERSE,     /* KL(student || teacher) */
    XD_JSD, /* beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student */
    XD_SOFT_CE, /* -sum teacher ln student: the forward KL plus the teacher's entropy */
    XD_KL_MIXED /* (1 - beta) forward + beta reverse; top-k losses only */
} xd_divergence;

/* What happens to the probability outside the k ids. How the student divides it among the columns outside is free in all of
 * these but ZERO_OUTSIDE; how much of it there is, is held as follows. */
typedef enum xd_topk_mode {
    /* The default: one more entry with the mass outside, on both sides. The optimum has the teacher's mass outside. */
    XD_TOPK_TAIL = 0,
    /* Both distributions are renormalised over the ids; gradient inside them only. The mass outside is free: value and
     * gradient are the same wherever it is, so a student that has this term alone may put everything outside. */
    XD_TOPK_RENORMALISE,
    /* True probabilities, the entries outside are left out of the sum. The optimum of the forward KL has no mass outside,
     * that of the JSD the teacher's; that of the reverse KL has 1/e of the teacher's on the ids and the rest outside. */
    XD_TOPK_TRUNCATE,
    /* The teacher renormalised, its log -100 outside (NeMo-RL); no JSD. The optimum has no mass outside. */
    XD_TOPK_ZERO_OUTSIDE
} xd_topk_mode;

/* Order of a norm. */
typedef enum xd_norm_type {
    XD_NORM_L2 = 0, /* the default: square root of the sum of squares */
    XD_NORM_L1,     /* sum of magnitudes */
    XD_NORM_MAX     /* largest magnitude */
} xd_norm_type;

/* How a total norm becomes the factor on the gradients; c = max_norm / (norm + 1e-6). */
typedef enum xd_clip_form {
    XD_CLIP_ABOVE = 0,  /* the default: c when c < 1; 1 for a norm that is not finite: that step is skipped */
    XD_CLIP_ABOVE_NEMO, /* c when c < 1: an infinite norm gives 0, a NaN norm 1 */
    XD_CLIP_ALWAYS      /* PyTorch, FastGen: min(1, c), NaN for a NaN norm; multiplies even by 1 */
} xd_clip_form;

/* Limbs of an exact sum: limb k holds units of 2^(32 k - 320). The square of every f32 is a multiple of
 * 2^-298 and below 2^256, so the sum of up to 2^63 of them is exact: integer additions, whose result depends
 * neither on their order nor on how the array is split. */
#define XD_NORM_LIMBS 20

/* What one rank adds to a norm. Finite elements only; the others are counted. */
typedef struct xd_norm_sum {
    double sum;     /* of |x|^p, unused when exact: in array order, or in vector lanes where the CPU level has
                     * them; BF16 may use f32 lanes, with a relative error of at most 2^-19 */
    double largest; /* |x| */
    int64_t not_finite;           /* infinities and NaNs */
    int64_t nan;                  /* NaNs among them */
    int64_t limbs[XD_NORM_LIMBS]; /* when exact: carries propagated, so that 2^31 ranks can be added */
} xd_norm_sum;

/* Maximum number of dimensions of a tensor. */
#define XD_DIMS_MAX 8

/* One strided block: extent[i] steps of src_stride[i] and dst_stride[i] elements. Neighbouring dimensions
 * that are contiguous on both sides are folded, so a contiguous block has ndim 1 and strides 1. */
typedef struct xd_copy {
    int ndim;
    int64_t src_offset, dst_offset; /* elements */
    int64_t extent[XD_DIMS_MAX], src_stride[XD_DIMS_MAX], dst_stride[XD_DIMS_MAX];
} xd_copy;

/* How first values are formed. */
typedef enum xd_init_kind {
    XD_INIT_ZERO = 0,
    XD_INIT_CONSTANT, /* center */
    XD_INIT_NORMAL,   /* center + scale z, z of mean 0 and variance 1 */
    XD_INIT_UNIFORM   /* center + scale u, u in (-1, 1) */
} xd_init_kind;

/* First values, formed in f32 and rounded to the type of the elements. */
typedef struct xd_init {
    xd_init_kind kind;
    float center, scale;
} xd_init;

/* How every kernel is called. */
typedef struct xd_launch {
    xd_ctx *ctx;
    void *stream;    /* NULL on the CPU */
    void *workspace; /* device memory for the operation's partial results; size from its _workspace query */
    size_t workspace_bytes;
    xd_status *status; /* may be NULL */
} xd_launch;

#endif
