/* Losses across tokenizers whose chunks each have their own list of columns. */

#include "kernel/cpu/xtoken.h"

#include <math.h>
#include <string.h>

/* Cell i += scale (p M) of one teacher id, of this shard's columns. */
static void xdi_cpu_xtoken_list_add(const xd_xtoken_list_args *a, int64_t row, int32_t id, double scale,
                                    int64_t i) {
    const xd_xtoken_projection *m = &a->lists.projection;
    const xd_xtoken_rows *x = &a->x;
    const int64_t end = x->first + x->columns;
    if (!m->column_begin) {
        if (id >= x->first && id < end)
            xdi_cells_add(a->fixed, a->cells, i, scale * xdi_cpu_xtoken_p(x, row, id - x->first));
        return;
    }
    for (int64_t e = m->column_begin[id]; e < m->column_begin[id + 1]; e++) {
        const int64_t v = m->student_id[e];
        if (v >= x->first && v < end)
            xdi_cells_add(a->fixed, a->cells, i,
                          (double)m->column_weight[e] * scale * xdi_cpu_xtoken_p(x, row, v - x->first));
    }
}

static void xdi_cpu_xtoken_list_project_rows(const xd_launch *launch, const void *args, int64_t begin,
                                             int64_t end, int slot) {
    const xd_xtoken_list_args *a = (const xd_xtoken_list_args *)args;
    const xd_xtoken_rows *x = &a->x;
    const int64_t *offset = a->lists.offset, last = xdi_xtoken_first_row(x, end);
    (void)launch, (void)slot;
    for (int64_t r = xdi_xtoken_first_row(x, begin); r < last; r++)
        for (int64_t i = offset[x->places[r]]; i < offset[x->places[r] + 1]; i++)
            xdi_cpu_xtoken_list_add(a, x->rows[r], a->lists.ids[i], 1.0, i);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_list_project(const xd_launch *launch, const xd_xtoken_list_args *a) {
    return xdi_spread_rows(launch, a->lists.count, a->x.columns, xdi_cpu_xtoken_list_project_rows, a);
}

/* d(c), and in q its derivative. */
static double xdi_cpu_xtoken_list_value(double *q, const double *a, int64_t n, bool reverse) {
    double inside = 0.0, target = 0.0, value = 0.0, slope;
    for (int64_t i = 0; i < n; i++) {
        inside += q[i];
        target += a[i];
        value += xd_xtoken_list_term(q[i], a[i], reverse, &q[i]);
    }
    const double outside = 1.0 - inside;
    value += xd_xtoken_list_rest(outside, target, reverse, &slope);
    for (int64_t i = 0; i < n; i++) q[i] = xd_xtoken_list_slope(q[i], outside, slope);
    return value;
}

static void xdi_cpu_xtoken_list_divergence_rows(const xd_launch *launch, const void *args, int64_t begin,
                                                int64_t end, int slot) {
    const xd_xtoken_list_args *a = (const xd_xtoken_list_args *)args;
    (void)launch, (void)slot;
    for (int64_t c = begin; c < end; c++) {
        xd_xtoken_chunk *chunk = &a->chunks[c];
        const int64_t n = a->lists.offset[c + 1] - a->lists.offset[c];
        double *q = a->student + a->lists.offset[c];
        const double *target = a->teacher + a->lists.offset[c];
        if (n == 0) continue;
        for (int64_t i = 0; i < n; i++) q[i] /= chunk->student;
        chunk->agree = xdi_cpu_xtoken_argmax(q, n) == xdi_cpu_xtoken_argmax(target, n);
        chunk->value = xdi_cpu_xtoken_list_value(q, target, n, a->reverse);
        xdi_xtoken_scale_slopes(chunk, q, n);
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_list_divergence(const xd_launch *launch, const xd_xtoken_list_args *a) {
    return xdi_spread_rows(launch, a->lists.count,
                           a->lists.entries / (a->lists.count > 0 ? a->lists.count : 1),
                           xdi_cpu_xtoken_list_divergence_rows, a);
}

static void xdi_cpu_xtoken_list_delta_rows(const xd_launch *launch, const void *args, int64_t begin,
                                           int64_t end, int slot) {
    const xd_xtoken_list_args *a = (const xd_xtoken_list_args *)args;
    const xd_xtoken_rows *x = &a->x;
    const int64_t *offset = a->lists.offset;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++)
        for (int64_t i = offset[x->places[r]]; i < offset[x->places[r] + 1]; i++)
            if (a->student[i] != 0.0)
                xdi_cpu_xtoken_list_add(a, x->rows[r], a->lists.ids[i],
                                        a->student[i] / a->chunks[x->places[r]].largest, r);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_list_delta(const xd_launch *launch, const xd_xtoken_list_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->x.columns, xdi_cpu_xtoken_list_delta_rows, a);
}

/* [columns] of a row: sums of doubles, which are zero between uses, followed by slopes. */
XD_PRIVATE size_t xdi_cpu_xtoken_list_bytes(int64_t columns, const xd_xtoken_lists *lists) {
    (void)lists;
    return (size_t)columns * (sizeof(double) + sizeof(float));
}

/* What is done to the columns that a chunk's list comes from. */
typedef enum xdi_xtoken_visit {
    XDI_XTOKEN_VISIT_ADD,
    XDI_XTOKEN_VISIT_USE,
    XDI_XTOKEN_VISIT_CLEAR
} xdi_xtoken_visit;

/* h += weight dy, then slope = p h / temperature, then h is zero again. */
static void xdi_cpu_xtoken_list_visit(const xd_xtoken_rows *x, int64_t row, double *h, float *slope,
                                      int64_t v, double term, xdi_xtoken_visit visit) {
    if (v < 0 || v >= x->columns) return;
    if (visit == XDI_XTOKEN_VISIT_ADD) h[v] += term;
    if (visit == XDI_XTOKEN_VISIT_USE)
        slope[v] = (float)(xdi_cpu_xtoken_p(x, row, v) * h[v] / x->temperature);
    if (visit == XDI_XTOKEN_VISIT_CLEAR) h[v] = 0.0;
}

/* slope = p M dy / temperature of rows[r]. */
static void xdi_cpu_xtoken_list_slopes(const xd_xtoken_list_gradient_args *a, int64_t r, double *h,
                                       float *slope) {
    const xd_xtoken_projection *m = &a->lists.projection;
    const xd_xtoken_rows *x = &a->to.x;
    const int64_t begin = a->lists.offset[x->places[r]], end = a->lists.offset[x->places[r] + 1];
    memset(slope, 0, (size_t)x->columns * sizeof *slope);
    for (int visit = XDI_XTOKEN_VISIT_ADD; visit <= XDI_XTOKEN_VISIT_CLEAR; visit++)
        for (int64_t i = begin; i < end; i++) {
            const int32_t id = a->lists.ids[i];
            if (!m->column_begin)
                xdi_cpu_xtoken_list_visit(x, x->rows[r], h, slope, id - x->first, a->dy[i],
                                          (xdi_xtoken_visit)visit);
            for (int64_t e = m->column_begin ? m->column_begin[id] : 0;
                 m->column_begin && e < m->column_begin[id + 1]; e++)
                xdi_cpu_xtoken_list_visit(x, x->rows[r], h, slope, m->student_id[e] - x->first,
                                          (double)m->column_weight[e] * a->dy[i], (xdi_xtoken_visit)visit);
        }
}

static void xdi_cpu_xtoken_list_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xdi_cpu_writer *w = (const xdi_cpu_writer *)args;
    const xd_xtoken_list_gradient_args *a = (const xd_xtoken_list_gradient_args *)w->args;
    const xd_xtoken_rows *x = &a->to.x;
    double *h = (double *)xdi_spread_room(launch, a->scratch, slot);
    float *slope = (float *)(void *)(h + x->columns);
    xd_xtoken_gradient one = a->to;
    xdi_xtoken_form f = xdi_xtoken_form_of(&one);
    f.u = slope;
    one.x.count = 1;
    memset(h, 0, (size_t)x->columns * sizeof *h);
    for (int64_t r = begin; r < end; r++) {
        const double delta = a->delta[r] / x->temperature;
        if (a->chunks[x->places[r]].largest == 0.0) continue;
        xdi_cpu_xtoken_list_slopes(a, r, h, slope);
        one.x.rows = x->rows + r;
        f.delta = &delta;
        xdi_cpu_xtoken_whole_row(launch, w, &f, 0);
    }
}

XD_PRIVATE xd_result xdi_xtoken_list_gradient(const xd_launch *launch, const xd_xtoken_list_gradient_args *a,
                                              xdi_xtoken_row_writer write) {
    const xdi_cpu_writer w = { a, write };
    return xdi_spread_rooms(launch, a->to.x.count, a->to.x.columns,
                            xdi_cpu_xtoken_list_bytes(a->to.x.columns, &a->lists), xdi_cpu_xtoken_list_rows,
                            &w);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_list_gradient(const xd_launch *launch,
                                                  const xd_xtoken_list_gradient_args *a) {
    return xdi_xtoken_list_gradient(launch, a, xdi_cpu_xtoken_write);
}
