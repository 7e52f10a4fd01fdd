/* Losses across tokenizers: plain loops, double inside. What the files of each part share, sums and products. */

#include "kernel/cpu/xtoken.h"

#include <math.h>
#include <string.h>

/* ---- rows and chunks ---- */

XD_PRIVATE double xdi_cpu_xtoken_p(const xd_xtoken_rows *x, int64_t row, int64_t column) {
    return exp(xdi_loss_load(&x->logits, row, column) / x->temperature - x->lse[row]);
}

XD_PRIVATE int64_t xdi_xtoken_first_row(const xd_xtoken_rows *x, int64_t place) {
    return xdi_lower_bound(x->places, x->count, place);
}

/* ln sum e^x; NaN propagates. */
XD_PRIVATE double xdi_cpu_xtoken_lse(const double *x, int64_t n) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        if (!(x[i] <= max)) max = x[i];
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}

/* The same of a row at the columns `ids`, or at all columns when ids is NULL. */
XD_PRIVATE double xdi_cpu_xtoken_row_lse(const xd_xtoken_rows *x, int64_t row, const int64_t *ids,
                                         int64_t n) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double z = xdi_loss_load(&x->logits, row, ids ? ids[i] : i) / x->temperature;
        if (!(z <= max)) max = z;
    }
    for (int64_t i = 0; i < n; i++)
        sum += exp(xdi_loss_load(&x->logits, row, ids ? ids[i] : i) / x->temperature - max);
    return max + log(sum);
}

XD_PRIVATE int64_t xdi_cpu_xtoken_argmax(const double *x, int64_t k) {
    int64_t best = 0;
    for (int64_t j = 1; j < k; j++)
        if (x[j] > x[best]) best = j;
    return best;
}

XD_PRIVATE void xdi_xtoken_scale_slopes(xd_xtoken_chunk *c, double *q, int64_t k) {
    const double factor = xd_xtoken_chunk_factor(c, c->value);
    c->largest = 0.0;
    c->delta *= factor * c->student; /* dy = factor dq / n, and n q are the sums */
    for (int64_t j = 0; j < k; j++) {
        q[j] = xd_xtoken_scaled(q[j], factor);
        if (fabs(q[j]) > c->largest) c->largest = fabs(q[j]);
    }
}

/* ---- the matrix in J ---- */

/* Upper bound on the entries of this shard's rows. */
static int64_t xdi_cpu_xtoken_entries(const xd_xtoken_matrix *m) {
    const int64_t *begin = m->projection.row_begin;
    return begin[m->first + m->columns] - begin[m->first];
}

XD_PRIVATE size_t xdi_cpu_xtoken_matrix_bytes(const xd_xtoken_matrix *m) {
    return (size_t)(m->columns + 1) * sizeof(int64_t) +
           (size_t)xdi_cpu_xtoken_entries(m) * (2 * sizeof(int32_t) + sizeof(float)) +
           (size_t)m->projection.teacher_size * sizeof(int32_t);
}

/* The entries in J, followed by the index in J of every teacher id, which is needed to find them. */
XD_PRIVATE xdi_xtoken_entries xdi_xtoken_entries_of(const xd_xtoken_matrix *m) {
    const int64_t entries = xdi_cpu_xtoken_entries(m);
    xdi_xtoken_entries e;
    e.begin = (int64_t *)m->prepared;
    e.student = (int32_t *)(void *)(e.begin + m->columns + 1);
    e.slot = e.student + entries;
    e.weight = (float *)(void *)(e.slot + entries);
    e.places = (int32_t *)(void *)(e.weight + entries);
    return e;
}

XD_PRIVATE int64_t xdi_cpu_xtoken_project_scratch(int64_t k, bool fixed) {
    (void)k, (void)fixed;
    return 0;
}

XD_PRIVATE int64_t xdi_cpu_xtoken_pick_scratch(int64_t columns) {
    return columns;
}

XD_PRIVATE xd_result xdi_cpu_xtoken_prepare(const xd_launch *launch, const xd_xtoken_matrix *m) {
    const xd_xtoken_projection *p = &m->projection;
    const xdi_xtoken_entries out = xdi_xtoken_entries_of(m);
    int64_t n = 0;
    (void)launch;
    for (int64_t id = 0; id < p->teacher_size; id++) out.places[id] = -1;
    for (int64_t j = 0; j < m->k; j++) out.places[m->ids[j]] = (int32_t)j;
    for (int64_t v = 0; v < m->columns; v++) {
        out.begin[v] = n;
        for (int64_t e = p->row_begin[m->first + v]; e < p->row_begin[m->first + v + 1]; e++) {
            const int32_t at = out.places[p->teacher_id[e]];
            if (at < 0) continue;
            out.student[n] = (int32_t)v;
            out.slot[n] = at;
            out.weight[n++] = p->weight[e];
        }
    }
    out.begin[m->columns] = n;
    return XD_OK;
}

XD_PRIVATE double xdi_cpu_xtoken_back(const xdi_xtoken_entries *m, int64_t v, const double *dy) {
    double sum = 0.0;
    for (int64_t e = m->begin[v]; e < m->begin[v + 1]; e++) sum += (double)m->weight[e] * dy[m->slot[e]];
    return sum;
}

/* ---- sums ---- */

typedef struct xdi_cpu_cells {
    const double *cells;
    double *out;
} xdi_cpu_cells;

static void xdi_cpu_xtoken_settle_items(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xdi_cpu_cells *c = (const xdi_cpu_cells *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) c->out[i] = xdi_cells_value(true, c->cells, i);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_settle(const xd_launch *launch, const double *cells, int64_t count,
                                           double *out) {
    const xdi_cpu_cells c = { cells, out };
    return xdi_spread_rows(launch, count, 1, xdi_cpu_xtoken_settle_items, &c);
}

static void xdi_cpu_xtoken_row_sums_rows(const xd_launch *launch, const void *args, int64_t begin,
                                         int64_t end, int slot) {
    const xd_xtoken_row_sums_args *a = (const xd_xtoken_row_sums_args *)args;
    (void)launch, (void)slot;
    for (int64_t row = begin; row < end; row++) {
        const double largest = a->lse[row] / a->temperature;
        for (int64_t v = 0; v < a->columns; v++)
            xdi_cells_add(true, a->cells, row,
                          exp(xdi_loss_load(&a->logits, row, v) / a->temperature - largest));
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_row_sums(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->columns, xdi_cpu_xtoken_row_sums_rows, a);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_row_logs(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    (void)launch;
    for (int64_t row = 0; row < a->logits.rows; row++)
        a->lse[row] = xd_xtoken_row_log(a->lse[row], a->temperature, xdi_cells_value(true, a->cells, row));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_cpu_xtoken_close(const xd_launch *launch, const xd_xtoken_close_args *a) {
    const double value = xdi_cells_value(a->fixed, a->cells, 0);
    const double sum = xdi_cells_value(a->fixed, a->cells, 1);
    (void)launch;
    for (int64_t i = 0; i < a->count; i++) a->out[i] = sum * a->scale;
    xd_xtoken_close_chunk(a, value, sum);
    return XD_OK;
}

/* ---- products with a projection ---- */

/* Cells are independent of each other, even within a row. */
static void xdi_cpu_xtoken_product_cell(const xd_xtoken_product_args *a, int64_t i) {
    const xd_xtoken_projection *m = &a->projection;
    const int64_t row = i / a->k, column = a->ids ? a->ids[i % a->k] : i % a->k;
    if (column < 0 || column >= m->teacher_size) return;
    for (int64_t e = m->column_begin[column]; e < m->column_begin[column + 1]; e++) {
        const int64_t v = m->student_id[e] - a->first;
        if (v < 0 || v >= a->columns) continue;
        xdi_cells_add(a->fixed, a->cells, i, (double)m->column_weight[e] * xdi_loss_load(&a->rows, row, v));
    }
}

static void xdi_cpu_xtoken_product_cells(const xd_launch *launch, const void *args, int64_t begin,
                                         int64_t end, int slot) {
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++)
        xdi_cpu_xtoken_product_cell((const xd_xtoken_product_args *)args, i);
}

/* Assumed entries of a cell or a column, as a number of arrays for xdi_spread_elements. */
enum { XDI_XTOKEN_PRODUCT_WORK = 8 };

XD_PRIVATE xd_result xdi_cpu_xtoken_product(const xd_launch *launch, const xd_xtoken_product_args *a) {
    return xdi_spread_elements(launch, a->rows.rows * a->k, XDI_XTOKEN_PRODUCT_WORK,
                               xdi_cpu_xtoken_product_cells, a);
}

/* The index of a teacher id among the columns; -1 when it is not one of them. */
static int64_t xdi_cpu_xtoken_place(const int64_t *columns, int64_t k, int64_t id) {
    if (!columns) return id;
    const int64_t at = xdi_lower_bound(columns, k, id);
    return at < k && columns[at] == id ? at : -1;
}

static void xdi_cpu_xtoken_product_at(const xd_xtoken_product_args *a, int64_t row, int64_t v) {
    const xd_xtoken_projection *m = &a->projection;
    const int64_t *begin = m->row_begin + a->first;
    double sum = 0.0;
    for (int64_t e = v < a->columns ? begin[v] : 0; v < a->columns && e < begin[v + 1]; e++) {
        const int64_t j = xdi_cpu_xtoken_place(a->ids, a->k, m->teacher_id[e]);
        if (j >= 0) sum += (double)m->weight[e] * a->weight[row * a->k + j];
    }
    xdi_loss_store(&a->rows, row, v, sum);
}

static void xdi_cpu_xtoken_product_columns(const xd_launch *launch, const void *args, int64_t begin,
                                           int64_t end, int slot) {
    const xd_xtoken_product_args *a = (const xd_xtoken_product_args *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) xdi_cpu_xtoken_product_at(a, i / a->rows.cols, i % a->rows.cols);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_product_back(const xd_launch *launch, const xd_xtoken_product_args *a) {
    return xdi_spread_elements(launch, a->rows.rows * a->rows.cols, XDI_XTOKEN_PRODUCT_WORK,
                               xdi_cpu_xtoken_product_columns, a);
}
