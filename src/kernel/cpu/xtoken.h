#ifndef XDI_KERNEL_CPU_XTOKEN_H
#define XDI_KERNEL_CPU_XTOKEN_H

#include "kernel/cpu/internal.h"
#include "kernel/xtoken_scalar.h"

/* xtoken_table.c: the plain table, the specification of the others. */
XD_PRIVATE const xd_xtoken_kernels *xdi_xtoken_kernels_plain(void);

/* xtoken.c: the form of a matrix that `prepare` writes: the entries in J of this shard's rows, ascending by column, then
 * slot. */
typedef struct xdi_xtoken_entries {
    int64_t *begin;          /* [columns + 1] */
    int32_t *student, *slot; /* [begin[columns]] column of the shard, and index in J */
    float *weight;
    int32_t *places; /* [teacher_size] index of each id in J; -1: not in J */
} xdi_xtoken_entries;
XD_PRIVATE xdi_xtoken_entries xdi_xtoken_entries_of(const xd_xtoken_matrix *m);

/* xtoken_gradient.c: the form of a gradient: p (M dy - delta) / temperature with dy, or scale u - p delta with u, minus
 * slopes (softmax(z) - one at the label). */
typedef struct xdi_xtoken_form {
    const xd_xtoken_gradient *to;
    xdi_xtoken_entries matrix;
    const double *dy; /* [chunks, k] or NULL */
    int64_t k;
    const float *u; /* [columns] or NULL */
    double scale;
    const double *delta, *slopes; /* [rows at work]; NULL -> 0 */
} xdi_xtoken_form;
XD_PRIVATE xdi_xtoken_form xdi_xtoken_form_of(const xd_xtoken_gradient *to);
XD_PRIVATE xdi_xtoken_form xdi_xtoken_project_form(const xd_xtoken_project_gradient_args *a);
/* The gradient at column v of rows[i], where h = M dy; of columns [begin, end) of that row; of the whole row; and the row's
 * padding, which also marks it as written. */
XD_PRIVATE double xdi_xtoken_gradient_at(const xdi_xtoken_form *f, int64_t i, int64_t v, double h);
XD_PRIVATE void xdi_xtoken_gradient_piece(const xdi_xtoken_form *f, int64_t i, int64_t begin, int64_t end);
XD_PRIVATE void xdi_xtoken_gradient_row(const xdi_xtoken_form *f, int64_t i);
XD_PRIVATE void xdi_xtoken_gradient_end(const xd_xtoken_gradient *to, int64_t row);
/* The entries mean_gradient, pick_gradient, list_gradient and rest_gradient with a writer of columns [begin, end) of
 * rows[i], which is called on any thread. */
typedef void (*xdi_xtoken_row_writer)(const xd_launch *launch, const xdi_xtoken_form *f, int64_t i,
                                      int64_t begin, int64_t end);
XD_PRIVATE xd_result xdi_xtoken_mean_gradient(const xd_launch *launch, const xd_xtoken_mean_gradient_args *a,
                                              xdi_xtoken_row_writer write);
XD_PRIVATE xd_result xdi_xtoken_pick_gradient(const xd_launch *launch, const xd_xtoken_pick_gradient_args *a,
                                              xdi_xtoken_row_writer write);
XD_PRIVATE xd_result xdi_xtoken_list_gradient(const xd_launch *launch, const xd_xtoken_list_gradient_args *a,
                                              xdi_xtoken_row_writer write);
XD_PRIVATE xd_result xdi_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to,
                                              xdi_xtoken_row_writer write);

/* xtoken.c: the first of the rows of the call whose chunk index is at least `place`. */
XD_PRIVATE int64_t xdi_xtoken_first_row(const xd_xtoken_rows *x, int64_t place);

/* Columns of a row in one piece: rows of a chunk are few, and long. */
enum { XDI_CPU_COLUMNS = 16384 };

/* Columns [begin, end), and whether the cells have sums of other rows already. */
typedef struct xdi_log_probs_cut {
    int64_t begin, end;
    bool more;
} xdi_log_probs_cut;

/* xtoken_gold.c: the two steps of the entry log_probs, called on any thread: a row's log-sum-exp; and rows[i] added to the
 * cells of columns [begin, end), or written there when they are the first. Then the plain steps. */
typedef struct xdi_log_probs_steps {
    double (*lse)(const xd_launch *launch, const xd_xtoken_rows *x, int64_t row);
    void (*add)(const xd_launch *launch, const xd_xtoken_log_probs_args *a, int64_t i, double lse,
                const xdi_log_probs_cut *cut);
} xdi_log_probs_steps;
XD_PRIVATE xd_result xdi_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a,
                                          const xdi_log_probs_steps *steps);
XD_PRIVATE double xdi_xtoken_row_lse(const xd_xtoken_rows *x, int64_t row);
XD_PRIVATE void xdi_xtoken_log_probs_piece(const xd_xtoken_log_probs_args *a, int64_t i, double lse,
                                           const xdi_log_probs_cut *cut);

/* xtoken_gold.c: writes the indices of the most likely pairs; selects the entries of a tail by `select`: indices in the
 * list, from `first` on, and logarithms, which become ids and probabilities. */
XD_PRIVATE void xdi_xtoken_best(const xd_xtoken_pair_args *a, int64_t best, int64_t other);
XD_PRIVATE xd_result xdi_xtoken_tail_select(const xd_launch *launch, const xd_xtoken_tail *t,
                                            xdi_select select, int64_t *first);
XD_PRIVATE xd_result xdi_xtoken_tail_finish(const xd_xtoken_tail *t, int64_t first);

/* xtoken.c: the probability of a column of a row whose log-sum-exp is known. */
XD_PRIVATE double xdi_cpu_xtoken_p(const xd_xtoken_rows *x, int64_t row, int64_t column);
/* ln sum e^x, of an array and of a row at the columns `ids`, or at all columns when ids is NULL; NaN propagates. */
XD_PRIVATE double xdi_cpu_xtoken_lse(const double *x, int64_t n);
XD_PRIVATE double xdi_cpu_xtoken_row_lse(const xd_xtoken_rows *x, int64_t row, const int64_t *ids, int64_t n);
XD_PRIVATE int64_t xdi_cpu_xtoken_argmax(const double *x, int64_t k);
/* (M dy) of column v. */
XD_PRIVATE double xdi_cpu_xtoken_back(const xdi_xtoken_entries *m, int64_t v, const double *dy);
/* From derivatives of a chunk's divergence by its means to those by its sums; all 0 when the divergence is not finite. */
XD_PRIVATE void xdi_xtoken_scale_slopes(xd_xtoken_chunk *c, double *q, int64_t k);

/* xtoken_gradient.c: an entry's arguments, and what writes its rows; a whole row with its padding; the plain writer. */
typedef struct xdi_cpu_writer {
    const void *args;
    xdi_xtoken_row_writer write;
} xdi_cpu_writer;
XD_PRIVATE void xdi_cpu_xtoken_whole_row(const xd_launch *launch, const xdi_cpu_writer *w,
                                         const xdi_xtoken_form *f, int64_t i);
XD_PRIVATE void xdi_cpu_xtoken_write(const xd_launch *launch, const xdi_xtoken_form *f, int64_t i,
                                     int64_t begin, int64_t end);

/* ---- entries of the table ---- */

/* xtoken.c */
XD_PRIVATE size_t xdi_cpu_xtoken_matrix_bytes(const xd_xtoken_matrix *m);
XD_PRIVATE int64_t xdi_cpu_xtoken_project_scratch(int64_t k, bool fixed);
XD_PRIVATE xd_result xdi_cpu_xtoken_prepare(const xd_launch *launch, const xd_xtoken_matrix *m);
XD_PRIVATE xd_result xdi_cpu_xtoken_close(const xd_launch *launch, const xd_xtoken_close_args *a);
XD_PRIVATE int64_t xdi_cpu_xtoken_pick_scratch(int64_t columns);
XD_PRIVATE xd_result xdi_cpu_xtoken_settle(const xd_launch *launch, const double *cells, int64_t count,
                                           double *out);
XD_PRIVATE xd_result xdi_cpu_xtoken_row_sums(const xd_launch *launch, const xd_xtoken_row_sums_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_row_logs(const xd_launch *launch, const xd_xtoken_row_sums_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_product(const xd_launch *launch, const xd_xtoken_product_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_product_back(const xd_launch *launch, const xd_xtoken_product_args *a);

/* xtoken_chunks.c */
XD_PRIVATE xd_result xdi_cpu_xtoken_project(const xd_launch *launch, const xd_xtoken_project_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_target(const xd_launch *launch, const xd_xtoken_target_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_divergence(const xd_launch *launch, const xd_xtoken_divergence_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_delta(const xd_launch *launch, const xd_xtoken_delta_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_row_deltas(const xd_launch *launch, const xd_xtoken_row_deltas_args *a);
XD_PRIVATE xd_result xdi_cpu_chunk_sums(const xd_launch *launch, const xd_chunk_args *a);
XD_PRIVATE xd_result xdi_cpu_chunk_averages(const xd_launch *launch, const xd_chunk_args *a);
XD_PRIVATE xd_result xdi_cpu_chunk_spread(const xd_launch *launch, const xd_chunk_args *a);

/* xtoken_gold.c */
XD_PRIVATE xd_result xdi_cpu_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_pair(const xd_launch *launch, const xd_xtoken_pair_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_total(const xd_launch *launch, const xd_xtoken_total_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_tail(const xd_launch *launch, const xd_xtoken_tail *t);
XD_PRIVATE xd_result xdi_cpu_xtoken_merge(const xd_launch *launch, const xd_xtoken_merge *m);

/* xtoken_rows.c */
XD_PRIVATE xd_result xdi_cpu_xtoken_moments(const xd_launch *launch, const xd_xtoken_moments_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_pick(const xd_launch *launch, const xd_xtoken_pick_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_compare(const xd_launch *launch, const xd_xtoken_compare_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_slots(const xd_launch *launch, const xd_xtoken_slots_args *a);

/* xtoken_lists.c */
XD_PRIVATE xd_result xdi_cpu_xtoken_list_project(const xd_launch *launch, const xd_xtoken_list_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_list_divergence(const xd_launch *launch, const xd_xtoken_list_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_list_delta(const xd_launch *launch, const xd_xtoken_list_args *a);
XD_PRIVATE size_t xdi_cpu_xtoken_list_bytes(int64_t columns, const xd_xtoken_lists *lists);
XD_PRIVATE xd_result xdi_cpu_xtoken_list_gradient(const xd_launch *launch,
                                                  const xd_xtoken_list_gradient_args *a);

/* xtoken_gradient.c */
XD_PRIVATE xd_result xdi_cpu_xtoken_project_gradient(const xd_launch *launch,
                                                     const xd_xtoken_project_gradient_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_mean_gradient(const xd_launch *launch,
                                                  const xd_xtoken_mean_gradient_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_pick_gradient(const xd_launch *launch,
                                                  const xd_xtoken_pick_gradient_args *a);
XD_PRIVATE xd_result xdi_cpu_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to);
XD_PRIVATE xd_result xdi_cpu_xtoken_label_gradient(const xd_launch *launch,
                                                   const xd_xtoken_label_gradient_args *a);

#endif
