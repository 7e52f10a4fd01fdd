#ifndef XDI_KERNEL_INTERNAL_H
#define XDI_KERNEL_INTERNAL_H

#include <math.h>

#include "base/half.h"
#include "base/internal.h"
#include "kernel/fixed.h"
#include "kernel/loss.h"
#include "kernel/matmul.h"
#include "kernel/mft.h"
#include "kernel/rows.h"
#include "kernel/softmax.h"
#include "kernel/uld.h"
#include "kernel/xtoken.h"

/* Elements of logits and gradients; f32 is the common case. */
static inline double xdi_loss_load(const xd_rows *x, int64_t row, int64_t column) {
    const int64_t i = row * (x->stride ? x->stride : x->cols) + column;
    if (x->dtype == XD_DTYPE_F32) return (double)((const float *)x->data)[i];
    return xd_load_f64(x->data, x->dtype, i);
}

static inline void xdi_loss_store(const xd_rows *x, int64_t row, int64_t column, double value) {
    const int64_t i = row * (x->stride ? x->stride : x->cols) + column;
    if (x->dtype == XD_DTYPE_F32)
        ((float *)x->data)[i] = (float)value;
    else
        xd_store_f64(x->data, x->dtype, i, value);
}

/* x - reference, where a shard of only -infinity has -infinity as its reference. */
static inline double xdi_loss_minus(double x, double reference) {
    return reference == -INFINITY ? -INFINITY : x - reference;
}

/* What a loss has, and how wide its shard is. */
static inline int64_t xdi_loss_columns(const xd_loss_args *a) {
    return a->offsets[a->shard + 1] - a->offsets[a->shard];
}

static inline bool xdi_loss_has_soft(const xd_loss_args *a) {
    return a->teacher.data && a->soft_weight != 0.0;
}

static inline bool xdi_loss_has_hard(const xd_loss_args *a) {
    return a->labels && a->hard_weight != 0.0;
}

/* The sums of one row, in either representation. */
typedef struct xdi_loss_sums {
    bool fixed;
    double plain[XD_LOSS_SUMS];
    xd_fixed exact[XD_LOSS_SUMS];
} xdi_loss_sums;

/* Adds all columns of row r to its sums; `state` is the sweep's own, `ref` is NULL for mixtures. */
typedef void (*xdi_loss_sweep)(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                               xdi_loss_sums *sums);

/* loss_cpu.c: the entries stats and mixture with a sweep for the columns, and the plain sweeps' columns
 * [begin, end). */
XD_PRIVATE void xdi_loss_stats_rows(const xd_loss_args *a, xdi_loss_sweep sweep, const void *state);
XD_PRIVATE void xdi_loss_mixture_rows(const xd_loss_args *a, xdi_loss_sweep sweep, const void *state);
XD_PRIVATE void xdi_loss_stats_columns(const xd_loss_args *a, int64_t r, int64_t begin, int64_t end,
                                       const double *ref, xdi_loss_sums *sums);
XD_PRIVATE void xdi_loss_mixture_columns(const xd_loss_args *a, int64_t r, int64_t begin, int64_t end,
                                         xdi_loss_sums *sums);

/* The same for the sums outside a row's ids: columns [begin, end) of the shard, none of which is an id. */
typedef struct xdi_topk_sums {
    double plain[XD_TOPK_SUMS];
    xd_fixed exact[XD_TOPK_SUMS];
} xdi_topk_sums;
typedef void (*xdi_topk_sweep)(const void *state, const xd_topk_args *a, int64_t r, int64_t begin,
                               int64_t end, xdi_topk_sums *sums);

/* topk_cpu.c: the entry topk_stats with a sweep for the columns, and the plain sweep. */
XD_PRIVATE void xdi_topk_stats_rows(const xd_topk_args *a, xdi_topk_sweep sweep, const void *state);
XD_PRIVATE void xdi_topk_stats_columns(const void *state, const xd_topk_args *a, int64_t r, int64_t begin,
                                       int64_t end, xdi_topk_sums *sums);

/* exact_simd.c: terms of sums in fixed point, the same bits on every level: e^x, x at most 700; q ln(q/m) and
 * p (ln(p/m) - top) of log-probabilities s of p and t of q, m = beta q + (1 - beta) p, 0 for p or q of 0. */
XD_PRIVATE double xdi_exact_exp(double x);
XD_PRIVATE void xdi_exact_mixture(double s, double t, double beta, double top, double *teacher,
                                  double *student);

/* exact_simd.c: the entries stats, mixture and topk_stats for sums in fixed point, on vectors. */
XD_PRIVATE xd_result xdi_exact_stats(const xd_launch *launch, const xd_loss_args *a);
XD_PRIVATE xd_result xdi_exact_mixtures(const xd_launch *launch, const xd_loss_args *a);
XD_PRIVATE xd_result xdi_exact_topk_stats(const xd_launch *launch, const xd_topk_args *a);

/* loss_cpu.c: largest element of the row's first `columns`, and the lowest column that has it; NaN when the
 * row has a NaN or +infinity. */
XD_PRIVATE double xdi_loss_row_max(const xd_rows *x, int64_t row, int64_t columns, int64_t *column);

/* loss_cpu.c: ln(student/mixture) and ln(teacher/mixture) from the two logarithms, without cancellation when
 * they are close. */
XD_PRIVATE void xdi_loss_log_ratios(double s, double t, double beta, double *student, double *teacher);

/* loss_cpu.c: the gradient at column c of the shard, whose logits were x and y. */
XD_PRIVATE double xdi_loss_gradient_at(const xd_loss_args *a, int64_t r, int64_t c, double x, double y);

/* mft_cpu.c: how many columns of a row have a gradient; the others, and their terms, are set to zero. */
XD_PRIVATE int64_t xdi_mft_begin_row(const xd_mft_args *a, int64_t r);
/* mft_cpu.c: term and gradient of minimal fine-tuning at column c of the shard, whose logits were x and y; and those of
 * a row's first `columns`. */
XD_PRIVATE void xdi_mft_write_at(const xd_mft_args *a, int64_t r, int64_t c, double x, double y);
XD_PRIVATE void xdi_mft_write_row(const xd_mft_args *a, int64_t r, int64_t columns);

/* The products of one row, in either representation. */
typedef struct xdi_cosine_sums {
    double plain[XD_COSINE_SUMS];
    xd_fixed exact[XD_COSINE_SUMS];
} xdi_cosine_sums;
/* Adds the products of all columns of row r, its logits times the scales; `state` is the sweep's own. */
typedef void (*xdi_cosine_sweep)(const void *state, const xd_mft_args *a, int64_t r, double x_scale,
                                 double y_scale, xdi_cosine_sums *sums);
/* mft_cpu.c: the entry products with a sweep for the columns; the power of two above the largest magnitude of a side,
 * 0 where sums are not fixed, false when it is not finite; the factors of x and y in the gradient of a row. */
XD_PRIVATE void xdi_cosine_products_rows(const xd_mft_args *a, xdi_cosine_sweep sweep, const void *state);
XD_PRIVATE bool xdi_cosine_exponent(const xd_mft_args *a, int64_t r, int side, int *exponent);
XD_PRIVATE void xdi_cosine_slope(const xd_mft_args *a, int64_t r, double *of_x, double *of_y);

/* optimizer_cpu.c: true when some operation of this step found bad data, so that the step must not happen. NULL is
 * fine. */
XD_PRIVATE bool xdi_status_refuses(const xd_status *status);

/* topk_cpu.c: puts a value into a descending list of n entries, behind its equals; when the list is full, at
 * k, the last one falls out. Returns the new length. */
XD_PRIVATE int64_t xdi_select_insert(double *values, int64_t *ids, int64_t n, int64_t k, double value,
                                     int64_t id);

/* topk_cpu.c: writes the slots whose id lies in [begin, end) to order[], by ascending id; returns how many. */
XD_PRIVATE int64_t xdi_topk_order(const int64_t *ids, int64_t k, int64_t begin, int64_t end, int64_t *order);

/* topk_cpu.c: its entries of the plain table; loss_cpu.c fills the others. */
XD_PRIVATE void xdi_topk_kernels_fill(xd_loss_kernels *kernels);

/* loss_simd.c, topk_simd.c, rows_simd.c, xtoken_simd.c, mft_simd.c: the entries that vectors do better, over those of
 * the plain table. */
XD_PRIVATE void xdi_fast_loss_fill(xd_loss_kernels *kernels);
XD_PRIVATE void xdi_fast_topk_fill(xd_loss_kernels *kernels);
XD_PRIVATE void xdi_fast_rows_fill(xd_row_kernels *rows, xd_softmax_kernels *softmax);
XD_PRIVATE void xdi_fast_xtoken_fill(xd_xtoken_kernels *kernels);
XD_PRIVATE void xdi_fast_mft_fill(xd_mft_kernels *kernels);

/* xtoken_cpu.c: cells are doubles or, when fixed, xd_fixed in the same memory, which has room for either.
 * -infinity is a legal term; NaN, and in fixed point what does not fit, makes the cell NaN. settle makes
 * doubles of fixed ones. */
XD_PRIVATE void xdi_cells_add(bool fixed, double *cells, int64_t i, double term);
XD_PRIVATE void xdi_cells_settle(double *cells, int64_t count);

/* xtoken_cpu.c: parts of the entries of losses across tokenizers that every level has: dq becomes dy; the
 * gradient at column v of rows[i], and all of that row; the log-probabilities of rows[i] are added to the
 * cells; a tail's places in its list, from `first` on, and their logarithms, which become ids and
 * probabilities. */
XD_PRIVATE void xdi_xtoken_scale_slopes(xd_xtoken_chunk *c, double *q, int64_t k);
XD_PRIVATE double xdi_xtoken_gradient_at(const xd_xtoken_args *a, int64_t i, int64_t v, double h);
XD_PRIVATE void xdi_xtoken_gradient_row(const xd_xtoken_args *a, int64_t i);
XD_PRIVATE void xdi_xtoken_log_probs_row(const xd_xtoken_args *a, int64_t i);
XD_PRIVATE xd_result xdi_xtoken_tail_select(const xd_launch *launch, const xd_xtoken_tail *t, int64_t *first);
XD_PRIVATE int64_t xdi_cpu_xtoken_argmax(const double *x, int64_t k); /* the first of the largest */
XD_PRIVATE void xdi_xtoken_best(const xd_xtoken_args *a, int64_t best, int64_t other); /* numbers of pairs */
XD_PRIVATE xd_result xdi_xtoken_tail_finish(const xd_xtoken_tail *t, int64_t first);

/* uld_cpu.c: what the entry gradient makes of a row of a chunk: scale p (d - mean), where d is the slope or, with `only`
 * not negative, 1 there and 0 elsewhere. */
typedef struct xdi_uld_scale {
    double scale, mean;
    int64_t only;
} xdi_uld_scale;
typedef void (*xdi_uld_row_writer)(const xd_launch *launch, const xd_uld_args *a, int64_t row);

/* uld_cpu.c: the entry compare for one chunk; the entry gradient with a writer of the rows of chunks, and the plain
 * one. uld_simd.c: the entries that vectors do better. */
XD_PRIVATE void xdi_uld_compare_chunk(const xd_uld_args *a, int64_t i);
XD_PRIVATE xdi_uld_scale xdi_uld_row_scale(const xd_uld_args *a, const xd_uld_chunk *chunk, int64_t row);
XD_PRIVATE void xdi_uld_gradient_row(const xd_uld_args *a, int64_t row);
XD_PRIVATE void xdi_uld_gradient_rows(const xd_launch *launch, const xd_uld_args *a,
                                      xdi_uld_row_writer writer);
XD_PRIVATE void xdi_fast_uld_fill(xd_uld_kernels *kernels);

/* kernels.c: memory of the context's device for the length of a call, not zero; on a CPU kept for the next. */
XD_PRIVATE void *xdi_call_memory(xd_ctx *ctx, size_t bytes);
XD_PRIVATE void xdi_call_memory_done(xd_ctx *ctx, void *memory);

/* matmul_cpu.c: the product on the level of the context; launch->workspace holds XD_MATMUL_WORKSPACE_BYTES. */
XD_PRIVATE xd_result xdi_matmul_cpu(const xd_launch *launch, const xd_matmul_args *args);

#endif
