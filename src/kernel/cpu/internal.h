#ifndef XDI_KERNEL_CPU_INTERNAL_H
#define XDI_KERNEL_CPU_INTERNAL_H

#include "kernel/cells.h"
#include "kernel/estimate.h"
#include "kernel/fill.h"
#include "kernel/internal.h"
#include "kernel/optimizer.h"
#include "kernel/reduce.h"
#include "kernel/topk.h"

/* The plain entries of the table, the specification of the others. Losses are double inside, gradients rounded once. */
XD_PRIVATE const xd_row_kernels *xdi_row_kernels_cpu(void);
XD_PRIVATE const xd_softmax_kernels *xdi_softmax_kernels_cpu(void);
XD_PRIVATE const xd_loss_kernels *xdi_loss_kernels_cpu_plain(void);
XD_PRIVATE const xd_topk_kernels *xdi_topk_kernels_cpu(void);
XD_PRIVATE const xd_mft_kernels *xdi_mft_kernels_cpu(void);
XD_PRIVATE const xd_reduce_kernels *xdi_reduce_kernels_cpu(void);

/* clip.c and fill.c: the entries clip and fill of every CPU level. */
XD_PRIVATE xd_result xdi_clip_cpu(const xd_launch *launch, const xd_clip_args *args);
XD_PRIVATE xd_result xdi_fill_cpu(const xd_launch *launch, const xd_fill_args *args);

/* The sums of one row, in either representation. */
typedef struct xdi_loss_sums {
    bool fixed;
    double plain[XD_LOSS_SUMS];
    xd_fixed exact[XD_LOSS_SUMS];
} xdi_loss_sums;

/* Adds all columns of row r to its sums; `state` is private to the sweep, `ref` is NULL for mixtures. */
typedef void (*xdi_loss_sweep)(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                               xdi_loss_sums *sums);

/* loss.c: the entries stats and mixture with a sweep for the columns, and the plain sweeps' columns
 * [begin, end). */
XD_PRIVATE xd_result xdi_loss_stats_rows(const xd_launch *launch, const xd_loss_args *a, xdi_loss_sweep sweep,
                                         const void *state);
XD_PRIVATE xd_result xdi_loss_mixture_rows(const xd_launch *launch, const xd_loss_args *a,
                                           xdi_loss_sweep sweep, const void *state);
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

/* topk.c: the entry topk_stats with a sweep for the columns, and the plain sweep. */
XD_PRIVATE xd_result xdi_topk_stats_rows(const xd_launch *launch, const xd_topk_args *a, xdi_topk_sweep sweep,
                                         const void *state);
XD_PRIVATE void xdi_topk_stats_columns(const void *state, const xd_topk_args *a, int64_t r, int64_t begin,
                                       int64_t end, xdi_topk_sums *sums);

/* loss.c: largest element of the row's first `columns`, and the lowest column that has it; NaN when the
 * row has a NaN or +infinity. */
XD_PRIVATE double xdi_loss_row_max(const xd_rows *x, int64_t row, int64_t columns, int64_t *column);

/* loss.c: the gradient at column c of the shard, whose logits were x and y. */
XD_PRIVATE double xdi_loss_gradient_at(const xd_loss_args *a, int64_t r, int64_t c, double x, double y);

/* mft.c: the number of columns of a row that have a gradient; the others, and their terms, are set to zero. */
XD_PRIVATE int64_t xdi_mft_begin_row(const xd_mft_args *a, int64_t r);
/* mft.c: term and gradient of minimal fine-tuning at column c of the shard, whose logits were x and y; and those of
 * a row's first `columns`. */
XD_PRIVATE void xdi_mft_write_at(const xd_mft_args *a, int64_t r, int64_t c, double x, double y);
XD_PRIVATE void xdi_mft_write_row(const xd_mft_args *a, int64_t r, int64_t columns);

/* The products of one row, in either representation. */
typedef struct xdi_cosine_sums {
    double plain[XD_COSINE_SUMS];
    xd_fixed exact[XD_COSINE_SUMS];
} xdi_cosine_sums;
/* Adds the products of all columns of row r, its logits times the scales; `state` is private to the sweep. */
typedef void (*xdi_cosine_sweep)(const void *state, const xd_mft_args *a, int64_t r, double x_scale,
                                 double y_scale, xdi_cosine_sums *sums);
/* mft.c: the entry products with a sweep for the columns. */
XD_PRIVATE xd_result xdi_cosine_products_rows(const xd_launch *launch, const xd_mft_args *a,
                                              xdi_cosine_sweep sweep, const void *state);

/* topk.c: inserts a value into a descending list of n entries, after equal ones; when the list has k entries
 * already, the last one is removed. Returns the new length. */
XD_PRIVATE int64_t xdi_select_insert(double *values, int64_t *ids, int64_t n, int64_t k, double value,
                                     int64_t id);

/* topk.c: writes the slots whose id is in [begin, end) to order[], by ascending id; returns their number. */
XD_PRIVATE int64_t xdi_topk_order(const int64_t *ids, int64_t k, int64_t begin, int64_t end, int64_t *order);

/* topk.c: the entry select. */
typedef xd_result (*xdi_select)(const xd_launch *launch, const xd_select_args *args);
XD_PRIVATE xd_result xdi_cpu_select(const xd_launch *launch, const xd_select_args *a);

/* estimate.c: the entry estimate. */
XD_PRIVATE xd_result xdi_cpu_estimate(const xd_launch *launch, const xd_estimate_args *a);

#endif
