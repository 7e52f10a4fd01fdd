/* Projected losses across tokenizers, and averages of chunks. */

#include "kernel/cpu/xtoken.h"

#include <math.h>
#include <string.h>

/* ---- projected chunks ---- */

static void xdi_cpu_xtoken_project_places(const xd_launch *launch, const void *args, int64_t begin,
                                          int64_t end, int slot) {
    const xd_xtoken_project_args *a = (const xd_xtoken_project_args *)args;
    const xdi_xtoken_entries m = xdi_xtoken_entries_of(&a->matrix);
    const xd_xtoken_rows *x = &a->x;
    const int64_t last = xdi_xtoken_first_row(x, end);
    (void)launch, (void)slot;
    for (int64_t i = xdi_xtoken_first_row(x, begin); i < last; i++)
        for (int64_t v = 0; v < x->columns; v++) {
            if (m.begin[v] == m.begin[v + 1]) continue;
            const double p = xdi_cpu_xtoken_p(x, x->rows[i], v);
            for (int64_t e = m.begin[v]; e < m.begin[v + 1]; e++)
                xdi_cells_add(a->fixed, a->cells, x->places[i] * a->matrix.k + m.slot[e],
                              (double)m.weight[e] * p);
        }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_project(const xd_launch *launch, const xd_xtoken_project_args *a) {
    return xdi_spread_rows(launch, a->place_count, a->x.columns, xdi_cpu_xtoken_project_places, a);
}

static void xdi_cpu_xtoken_target_places(const xd_launch *launch, const void *args, int64_t begin,
                                         int64_t end, int slot) {
    const xd_xtoken_target_args *a = (const xd_xtoken_target_args *)args;
    const xd_xtoken_rows *x = &a->x;
    const int64_t last = xdi_xtoken_first_row(x, end);
    (void)launch, (void)slot;
    for (int64_t i = xdi_xtoken_first_row(x, begin); i < last; i++) {
        const int64_t row = x->rows[i];
        const double lse =
            x->finite && !x->finite[row] ? (double)NAN : xdi_cpu_xtoken_row_lse(x, row, a->ids, a->k);
        for (int64_t j = 0; j < a->k; j++)
            xdi_cells_add(a->fixed, a->cells, x->places[i] * a->k + j,
                          xdi_loss_load(&x->logits, row, a->ids[j]) / x->temperature - lse);
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_target(const xd_launch *launch, const xd_xtoken_target_args *a) {
    return xdi_spread_rows(launch, a->place_count, a->k, xdi_cpu_xtoken_target_places, a);
}

/* Returns d(c) and replaces q by the derivative d d(c) / d q; delta is sum q dq. */
static double xdi_cpu_xtoken_slopes(double *q, const double *a, int64_t k, bool reverse, double *delta) {
    double z = XD_XTOKEN_EPSILON, value = 0.0, dot = 0.0;
    for (int64_t j = 0; j < k; j++) z += q[j];
    for (int64_t j = 0; j < k; j++) xd_xtoken_slope(&q[j], a[j], z, reverse, &value, &dot);
    for (int64_t j = 0; j < k; j++) q[j] = xd_xtoken_slope_of_mean(q[j], dot, z);
    *delta = xd_xtoken_slope_delta(dot, z);
    return value;
}

static void xdi_cpu_xtoken_chunk(const xd_xtoken_divergence_args *args, xd_xtoken_chunk *c, double *q,
                                 double *a) {
    const int64_t k = args->k;
    for (int64_t j = 0; j < k; j++) q[j] /= c->student;
    for (int64_t j = 0; j < k; j++) a[j] /= c->teacher;
    const double lse = args->normalise ? xdi_cpu_xtoken_lse(a, k) : 0.0;
    for (int64_t j = 0; j < k; j++) a[j] -= lse;
    c->agree = xdi_cpu_xtoken_argmax(q, k) == xdi_cpu_xtoken_argmax(a, k);
    c->value = xdi_cpu_xtoken_slopes(q, a, k, args->reverse, &c->delta);
    xdi_xtoken_scale_slopes(c, q, k);
}

static void xdi_cpu_xtoken_divergence_places(const xd_launch *launch, const void *args, int64_t begin,
                                             int64_t end, int slot) {
    const xd_xtoken_divergence_args *a = (const xd_xtoken_divergence_args *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        double *q = a->student + i * a->k;
        if (a->chunks[i].compared)
            xdi_cpu_xtoken_chunk(a, &a->chunks[i], q, a->teacher + i * a->k);
        else
            memset(q, 0, (size_t)a->k * sizeof *q);
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_divergence(const xd_launch *launch, const xd_xtoken_divergence_args *a) {
    return xdi_spread_rows(launch, a->place_count, a->k, xdi_cpu_xtoken_divergence_places, a);
}

static void xdi_cpu_xtoken_delta_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xd_xtoken_delta_args *a = (const xd_xtoken_delta_args *)args;
    const xdi_xtoken_entries m = xdi_xtoken_entries_of(&a->matrix);
    const xd_xtoken_rows *x = &a->x;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        const xd_xtoken_chunk *c = &a->chunks[x->places[i]];
        const double *dy = a->dy + x->places[i] * a->matrix.k;
        for (int64_t v = 0; v < x->columns && c->largest != 0.0 && !c->alone; v++)
            if (m.begin[v] != m.begin[v + 1])
                xdi_cells_add(a->fixed, a->cells, i,
                              xdi_cpu_xtoken_back(&m, v, dy) / c->largest *
                                  xdi_cpu_xtoken_p(x, x->rows[i], v));
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_delta(const xd_launch *launch, const xd_xtoken_delta_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->x.columns, xdi_cpu_xtoken_delta_rows, a);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_row_deltas(const xd_launch *launch, const xd_xtoken_row_deltas_args *a) {
    (void)launch;
    for (int64_t i = 0; i < a->count; i++) {
        a->out[i] = xd_xtoken_row_delta(&a->chunks[a->places[i]], xdi_cells_value(a->fixed, a->cells, i));
    }
    return XD_OK;
}

/* ---- averages of chunks ---- */

XD_PRIVATE xd_result xdi_cpu_chunk_sums(const xd_launch *launch, const xd_chunk_args *a) {
    const int64_t n = a->rows.cols;
    (void)launch;
    for (int64_t row = 0; row < a->rows.rows; row++) {
        const int64_t chunk = xd_chunk_of_row(a, row);
        for (int64_t i = 0; i < n && chunk >= 0; i++)
            xdi_cells_add(a->fixed, a->out, chunk * n + i, xdi_loss_load(&a->rows, row, i));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_cpu_chunk_averages(const xd_launch *launch, const xd_chunk_args *a) {
    const int64_t n = a->rows.cols;
    (void)launch;
    for (int64_t i = 0; i < a->count * n; i++) a->out[i] = xd_chunk_average(a->sums[i], a->sizes[i / n]);
    return XD_OK;
}

static void xdi_cpu_chunk_spread_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xd_chunk_args *a = (const xd_chunk_args *)args;
    const int64_t n = a->rows.cols;
    (void)launch, (void)slot;
    for (int64_t row = begin; row < end; row++) {
        const int64_t chunk = xd_chunk_of_row(a, row);
        for (int64_t i = 0; i < n; i++)
            xdi_loss_store(&a->rows, row, i,
                           chunk < 0 ? 0.0 : a->weight[chunk * n + i] / (double)a->sizes[chunk]);
    }
}

XD_PRIVATE xd_result xdi_cpu_chunk_spread(const xd_launch *launch, const xd_chunk_args *a) {
    return xdi_spread_rows(launch, a->rows.rows, a->rows.cols, xdi_cpu_chunk_spread_rows, a);
}
