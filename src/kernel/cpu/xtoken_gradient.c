/* Gradients of losses across tokenizers: one form for all kinds. */

#include "kernel/cpu/xtoken.h"
#include "kernel/ids.h"

#include <math.h>
#include <string.h>

XD_PRIVATE double xdi_xtoken_gradient_at(const xdi_xtoken_form *f, int64_t i, int64_t v, double h) {
    const xd_xtoken_gradient *to = f->to;
    const xd_xtoken_rows *x = &to->x;
    const int64_t row = x->rows[i];
    const double z = xdi_loss_load(&x->logits, row, v), delta = f->delta ? f->delta[i] : 0.0;
    const double p = f->dy || delta != 0.0 ? exp(z / x->temperature - x->lse[row]) : 0.0;
    const double first = to->written[row] || !to->ce_factor ? 0.0 : to->ce_factor[row] * to->ce_weight;
    const double ce = first - (f->slopes ? f->slopes[i] : 0.0);
    double g = to->written[row] ? xdi_loss_load(&to->rows, row, v) : 0.0;
    if (ce != 0.0)
        g += xd_xtoken_ce_part(ce, exp(z - to->lse_one[row]), v == xd_id_at(to->labels, row) - x->first);
    if (f->dy) return g + xd_xtoken_project_part(p, h, delta, x->temperature);
    return f->u ? g + xd_xtoken_mean_part((double)f->u[v], f->scale, p, delta) : g;
}

XD_PRIVATE void xdi_xtoken_gradient_end(const xd_xtoken_gradient *to, int64_t row) {
    for (int64_t v = to->x.columns; v < to->rows.cols && !to->written[row]; v++)
        xdi_loss_store(&to->rows, row, v, 0.0);
    to->written[row] = 1;
}

XD_PRIVATE void xdi_xtoken_gradient_piece(const xdi_xtoken_form *f, int64_t i, int64_t begin, int64_t end) {
    const xd_xtoken_rows *x = &f->to->x;
    const double *dy = f->dy ? f->dy + x->places[i] * f->k : NULL;
    for (int64_t v = begin; v < end; v++) {
        const double h = dy ? xdi_cpu_xtoken_back(&f->matrix, v, dy) : 0.0;
        xdi_loss_store(&f->to->rows, x->rows[i], v, xdi_xtoken_gradient_at(f, i, v, h));
    }
}

XD_PRIVATE void xdi_xtoken_gradient_row(const xdi_xtoken_form *f, int64_t i) {
    xdi_xtoken_gradient_piece(f, i, 0, f->to->x.columns);
    xdi_xtoken_gradient_end(f->to, f->to->x.rows[i]);
}

XD_PRIVATE xdi_xtoken_form xdi_xtoken_form_of(const xd_xtoken_gradient *to) {
    xdi_xtoken_form f;
    memset(&f, 0, sizeof f);
    f.to = to;
    f.scale = 1.0;
    return f;
}

XD_PRIVATE xdi_xtoken_form xdi_xtoken_project_form(const xd_xtoken_project_gradient_args *a) {
    xdi_xtoken_form f = xdi_xtoken_form_of(&a->to);
    f.matrix = xdi_xtoken_entries_of(&a->matrix);
    f.dy = a->dy;
    f.k = a->matrix.k;
    f.delta = a->delta;
    return f;
}

static void xdi_cpu_xtoken_project_gradient_rows(const xd_launch *launch, const void *args, int64_t begin,
                                                 int64_t end, int slot) {
    const xd_xtoken_project_gradient_args *a = (const xd_xtoken_project_gradient_args *)args;
    const xdi_xtoken_form f = xdi_xtoken_project_form(a);
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++)
        if (a->chunks[a->to.x.places[i]].largest != 0.0) xdi_xtoken_gradient_row(&f, i);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_project_gradient(const xd_launch *launch,
                                                     const xd_xtoken_project_gradient_args *a) {
    return xdi_spread_rows(launch, a->to.x.count, a->to.x.columns, xdi_cpu_xtoken_project_gradient_rows, a);
}

static int64_t xdi_cpu_xtoken_pieces(int64_t columns) {
    return (columns + XDI_CPU_COLUMNS - 1) / XDI_CPU_COLUMNS;
}

XD_PRIVATE void xdi_cpu_xtoken_whole_row(const xd_launch *launch, const xdi_cpu_writer *w,
                                         const xdi_xtoken_form *f, int64_t i) {
    w->write(launch, f, i, 0, f->to->x.columns);
    xdi_xtoken_gradient_end(f->to, f->to->x.rows[i]);
}

static void xdi_cpu_xtoken_mean_pieces(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                       int slot) {
    const xdi_cpu_writer *w = (const xdi_cpu_writer *)args;
    const xd_xtoken_mean_gradient_args *a = (const xd_xtoken_mean_gradient_args *)w->args;
    const int64_t columns = a->to.x.columns, pieces = xdi_cpu_xtoken_pieces(columns);
    xdi_xtoken_form f = xdi_xtoken_form_of(&a->to);
    (void)slot;
    f.u = a->u;
    f.scale = a->scale;
    f.delta = a->delta;
    for (int64_t at = begin; at < end; at++) {
        const int64_t from = at % pieces * XDI_CPU_COLUMNS, end_of_piece = from + XDI_CPU_COLUMNS;
        w->write(launch, &f, at / pieces, from, end_of_piece < columns ? end_of_piece : columns);
    }
}

XD_PRIVATE xd_result xdi_xtoken_mean_gradient(const xd_launch *launch, const xd_xtoken_mean_gradient_args *a,
                                              xdi_xtoken_row_writer write) {
    const xd_xtoken_rows *x = &a->to.x;
    const xdi_cpu_writer w = { a, write };
    if (a->chunk->largest == 0.0) return XD_OK;
    XD_TRY(xdi_spread_items(launch, x->count * xdi_cpu_xtoken_pieces(x->columns), 1,
                            xdi_cpu_xtoken_mean_pieces, &w));
    for (int64_t i = 0; i < x->count; i++) xdi_xtoken_gradient_end(&a->to, x->rows[i]);
    return XD_OK;
}

static void xdi_cpu_pick_gradient_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                       int slot) {
    const xdi_cpu_writer *w = (const xdi_cpu_writer *)args;
    const xd_xtoken_pick_gradient_args *a = (const xd_xtoken_pick_gradient_args *)w->args;
    const xd_xtoken_rows *x = &a->to.x;
    float *u = (float *)xdi_spread_room(launch, a->scratch, slot);
    xdi_xtoken_form f = xdi_xtoken_form_of(&a->to);
    f.u = u;
    for (int64_t i = begin; i < end; i++) {
        const double *dy = a->dy + i * a->k;
        if (a->chunks[i].largest == 0.0) continue;
        memset(u, 0, (size_t)x->columns * sizeof *u);
        for (int64_t j = 0; j < a->k; j++) {
            const int64_t v = a->ids[j] - x->first;
            if (v >= 0 && v < x->columns) u[v] = (float)(a->chunks[i].factor * dy[j]);
        }
        xdi_cpu_xtoken_whole_row(launch, w, &f, i);
    }
}

XD_PRIVATE xd_result xdi_xtoken_pick_gradient(const xd_launch *launch, const xd_xtoken_pick_gradient_args *a,
                                              xdi_xtoken_row_writer write) {
    const xdi_cpu_writer w = { a, write };
    return xdi_spread_rooms(launch, a->to.x.count, a->to.x.columns,
                            (size_t)a->to.x.columns * sizeof *a->scratch, xdi_cpu_pick_gradient_rows, &w);
}

static void xdi_cpu_xtoken_rest_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xdi_cpu_writer *w = (const xdi_cpu_writer *)args;
    xd_xtoken_gradient one = *(const xd_xtoken_gradient *)w->args;
    const xdi_xtoken_form f = xdi_xtoken_form_of(&one);
    (void)slot;
    one.x.count = 1;
    for (int64_t row = begin; row < end; row++) {
        one.x.rows = &row;
        if (!one.written[row]) xdi_cpu_xtoken_whole_row(launch, w, &f, 0);
    }
}

XD_PRIVATE xd_result xdi_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to,
                                              xdi_xtoken_row_writer write) {
    const xdi_cpu_writer w = { to, write };
    return xdi_spread_rows(launch, to->x.logits.rows, to->x.columns, xdi_cpu_xtoken_rest_rows, &w);
}

XD_PRIVATE void xdi_cpu_xtoken_write(const xd_launch *launch, const xdi_xtoken_form *f, int64_t i,
                                     int64_t begin, int64_t end) {
    (void)launch;
    xdi_xtoken_gradient_piece(f, i, begin, end);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_mean_gradient(const xd_launch *launch,
                                                  const xd_xtoken_mean_gradient_args *a) {
    return xdi_xtoken_mean_gradient(launch, a, xdi_cpu_xtoken_write);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_pick_gradient(const xd_launch *launch,
                                                  const xd_xtoken_pick_gradient_args *a) {
    return xdi_xtoken_pick_gradient(launch, a, xdi_cpu_xtoken_write);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to) {
    return xdi_xtoken_rest_gradient(launch, to, xdi_cpu_xtoken_write);
}

static void xdi_cpu_xtoken_label_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xd_xtoken_label_gradient_args *a = (const xd_xtoken_label_gradient_args *)args;
    xdi_xtoken_form f = xdi_xtoken_form_of(&a->to);
    (void)launch, (void)slot;
    f.slopes = a->slopes;
    for (int64_t i = begin; i < end; i++) xdi_xtoken_gradient_row(&f, i);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_label_gradient(const xd_launch *launch,
                                                   const xd_xtoken_label_gradient_args *a) {
    return xdi_spread_rows(launch, a->to.x.count, a->to.x.columns, xdi_cpu_xtoken_label_rows, a);
}
