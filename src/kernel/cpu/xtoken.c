/* Losses across tokenizers: plain loops, double inside. */

#include "kernel/cpu/internal.h"

#include <math.h>
#include <string.h>

/* ---- the matrix in J ---- */

/* Upper bound on the entries of this shard's rows. */
static int64_t xdi_cpu_xtoken_entries(const xd_xtoken_matrix *m) {
    const int64_t *begin = m->projection.row_begin;
    return begin[m->first + m->columns] - begin[m->first];
}

static size_t xdi_cpu_xtoken_matrix_bytes(const xd_xtoken_matrix *m) {
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

static int64_t xdi_cpu_xtoken_project_scratch(int64_t k, bool fixed) {
    (void)k, (void)fixed;
    return 0;
}

static int64_t xdi_cpu_xtoken_pick_scratch(int64_t columns) {
    return columns;
}

static xd_result xdi_cpu_xtoken_prepare(const xd_launch *launch, const xd_xtoken_matrix *m) {
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

/* ---- projected chunks ---- */

static double xdi_cpu_xtoken_p(const xd_xtoken_rows *x, int64_t row, int64_t column) {
    return exp(xdi_loss_load(&x->logits, row, column) / x->temperature - x->lse[row]);
}

XD_PRIVATE int64_t xdi_xtoken_first_row(const xd_xtoken_rows *x, int64_t place) {
    return xdi_lower_bound(x->places, x->count, place);
}

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

static xd_result xdi_cpu_xtoken_project(const xd_launch *launch, const xd_xtoken_project_args *a) {
    return xdi_spread_rows(launch, a->place_count, a->x.columns, xdi_cpu_xtoken_project_places, a);
}

/* ln sum e^x; NaN propagates. */
static double xdi_cpu_xtoken_lse(const double *x, int64_t n) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        if (!(x[i] <= max)) max = x[i];
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}

/* The same of a row at the columns `ids`, or at all columns when ids is NULL. */
static double xdi_cpu_xtoken_row_lse(const xd_xtoken_rows *x, int64_t row, const int64_t *ids, int64_t n) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double z = xdi_loss_load(&x->logits, row, ids ? ids[i] : i) / x->temperature;
        if (!(z <= max)) max = z;
    }
    for (int64_t i = 0; i < n; i++)
        sum += exp(xdi_loss_load(&x->logits, row, ids ? ids[i] : i) / x->temperature - max);
    return max + log(sum);
}

static void xdi_cpu_xtoken_target_places(const xd_launch *launch, const void *args, int64_t begin,
                                         int64_t end, int slot) {
    const xd_xtoken_target_args *a = (const xd_xtoken_target_args *)args;
    const xd_xtoken_rows *x = &a->x;
    const int64_t last = xdi_xtoken_first_row(x, end);
    (void)launch, (void)slot;
    for (int64_t i = xdi_xtoken_first_row(x, begin); i < last; i++) {
        const int64_t row = x->rows[i];
        const double lse = xdi_cpu_xtoken_row_lse(x, row, a->ids, a->k);
        for (int64_t j = 0; j < a->k; j++)
            xdi_cells_add(a->fixed, a->cells, x->places[i] * a->k + j,
                          xdi_loss_load(&x->logits, row, a->ids[j]) / x->temperature - lse);
    }
}

static xd_result xdi_cpu_xtoken_target(const xd_launch *launch, const xd_xtoken_target_args *a) {
    return xdi_spread_rows(launch, a->place_count, a->k, xdi_cpu_xtoken_target_places, a);
}

static int64_t xdi_cpu_xtoken_argmax(const double *x, int64_t k) {
    int64_t best = 0;
    for (int64_t j = 1; j < k; j++)
        if (x[j] > x[best]) best = j;
    return best;
}

/* Returns d(c) and replaces q by the derivative d d(c) / d q, where r = q / Z and s = ln(r + epsilon):
 *   ds = -e^a (forward) or e^s (s - a + 1) (reverse),  dr = ds / (r + epsilon),  dq = (dr - sum dr r) / Z
 * delta is sum q dq. */
static double xdi_cpu_xtoken_slopes(double *q, const double *a, int64_t k, bool reverse, double *delta) {
    double z = XD_XTOKEN_EPSILON, value = 0.0, dot = 0.0;
    for (int64_t j = 0; j < k; j++) z += q[j];
    for (int64_t j = 0; j < k; j++) {
        const double r = q[j] / z, s = log(r + XD_XTOKEN_EPSILON), target = exp(a[j]);
        const double ds = reverse ? exp(s) * (s - a[j] + 1.0) : -target;
        if (reverse)
            value += exp(s) * (s - a[j]);
        else if (target != 0.0)
            value += target * (a[j] - s); /* NaN passes, a column of no probability does not count */
        q[j] = ds / (r + XD_XTOKEN_EPSILON);
        dot += q[j] * r;
    }
    for (int64_t j = 0; j < k; j++) q[j] = (q[j] - dot) / z;
    *delta = dot * XD_XTOKEN_EPSILON / z; /* sum q = z - epsilon */
    return value;
}

static void xdi_xtoken_scale_slopes(xd_xtoken_chunk *c, double *q, int64_t k) {
    const double factor = isfinite(c->value) ? c->factor : 0.0;
    c->largest = 0.0;
    c->delta *= factor * c->student; /* dy = factor dq / n, and n q are the sums */
    for (int64_t j = 0; j < k; j++) {
        q[j] = factor != 0.0 ? q[j] * factor : 0.0;
        if (fabs(q[j]) > c->largest) c->largest = fabs(q[j]);
    }
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

static xd_result xdi_cpu_xtoken_divergence(const xd_launch *launch, const xd_xtoken_divergence_args *a) {
    return xdi_spread_rows(launch, a->place_count, a->k, xdi_cpu_xtoken_divergence_places, a);
}

/* (M dy)_v */
static double xdi_cpu_xtoken_back(const xdi_xtoken_entries *m, int64_t v, const double *dy) {
    double sum = 0.0;
    for (int64_t e = m->begin[v]; e < m->begin[v + 1]; e++) sum += (double)m->weight[e] * dy[m->slot[e]];
    return sum;
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

static xd_result xdi_cpu_xtoken_delta(const xd_launch *launch, const xd_xtoken_delta_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->x.columns, xdi_cpu_xtoken_delta_rows, a);
}

static xd_result xdi_cpu_xtoken_row_deltas(const xd_launch *launch, const xd_xtoken_row_deltas_args *a) {
    (void)launch;
    for (int64_t i = 0; i < a->count; i++) {
        const xd_xtoken_chunk *c = &a->chunks[a->places[i]];
        const double delta = c->alone ? c->delta : xdi_cells_value(a->fixed, a->cells, i) * c->largest;
        a->out[i] = c->largest == 0.0 ? 0.0 : delta;
    }
    return XD_OK;
}

/* ---- gradients ---- */

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
        g += ce * (exp(z - to->lse_one[row]) - (v == xd_id_at(to->labels, row) - x->first ? 1.0 : 0.0));
    if (f->dy) return g + p * (h - delta) / x->temperature;
    return f->u ? g + ((double)f->u[v] * f->scale - p * delta) : g;
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

static xd_result xdi_cpu_xtoken_project_gradient(const xd_launch *launch,
                                                 const xd_xtoken_project_gradient_args *a) {
    return xdi_spread_rows(launch, a->to.x.count, a->to.x.columns, xdi_cpu_xtoken_project_gradient_rows, a);
}

/* Columns of a row in one piece: rows of a chunk are few, and long. */
enum { XDI_CPU_COLUMNS = 16384 };

static int64_t xdi_cpu_xtoken_pieces(int64_t columns) {
    return (columns + XDI_CPU_COLUMNS - 1) / XDI_CPU_COLUMNS;
}

/* An entry's arguments, and what writes its rows. */
typedef struct xdi_cpu_writer {
    const void *args;
    xdi_xtoken_row_writer write;
} xdi_cpu_writer;

static void xdi_cpu_xtoken_whole_row(const xd_launch *launch, const xdi_cpu_writer *w,
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

static void xdi_cpu_xtoken_write(const xd_launch *launch, const xdi_xtoken_form *f, int64_t i, int64_t begin,
                                 int64_t end) {
    (void)launch;
    xdi_xtoken_gradient_piece(f, i, begin, end);
}

static xd_result xdi_cpu_xtoken_mean_gradient(const xd_launch *launch,
                                              const xd_xtoken_mean_gradient_args *a) {
    return xdi_xtoken_mean_gradient(launch, a, xdi_cpu_xtoken_write);
}

static xd_result xdi_cpu_xtoken_pick_gradient(const xd_launch *launch,
                                              const xd_xtoken_pick_gradient_args *a) {
    return xdi_xtoken_pick_gradient(launch, a, xdi_cpu_xtoken_write);
}

static xd_result xdi_cpu_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to) {
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

static xd_result xdi_cpu_xtoken_label_gradient(const xd_launch *launch,
                                               const xd_xtoken_label_gradient_args *a) {
    return xdi_spread_rows(launch, a->to.x.count, a->to.x.columns, xdi_cpu_xtoken_label_rows, a);
}

/* ---- means over the whole vocabulary ---- */

XD_PRIVATE double xdi_xtoken_row_lse(const xd_xtoken_rows *x, int64_t row) {
    return x->lse ? x->lse[row] : xdi_cpu_xtoken_row_lse(x, row, NULL, x->columns);
}

XD_PRIVATE void xdi_xtoken_log_probs_piece(const xd_xtoken_log_probs_args *a, int64_t i, double lse,
                                           const xdi_log_probs_cut *cut) {
    const size_t size = a->fixed ? sizeof(xd_fixed) : sizeof *a->cells;
    const xd_xtoken_rows *x = &a->x;
    if (!cut->more)
        memset((char *)a->cells + (size_t)cut->begin * size, 0, (size_t)(cut->end - cut->begin) * size);
    for (int64_t v = cut->begin; v < cut->end; v++)
        xdi_cells_add(a->fixed, a->cells, v,
                      (xdi_loss_load(&x->logits, x->rows[i], v) / x->temperature - lse) * a->scale);
}

/* First the rows' log-sum-exps, then the columns, for as many rows at a time as fit in the scratch. */
typedef struct xdi_log_probs {
    xd_xtoken_log_probs_args a; /* of these rows */
    bool more;                  /* other rows came before */
    double *lse;
    const xdi_log_probs_steps *steps;
} xdi_log_probs;

static void xdi_cpu_log_probs_lses(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xdi_log_probs *p = (const xdi_log_probs *)args;
    (void)slot;
    for (int64_t i = begin; i < end; i++) p->lse[i] = p->steps->lse(launch, &p->a.x, p->a.x.rows[i]);
}

static void xdi_cpu_log_probs_columns(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xdi_log_probs *p = (const xdi_log_probs *)args;
    const int64_t size = XDI_CPU_COLUMNS / 4, columns = p->a.x.columns;
    (void)slot;
    for (int64_t v = begin * size; v < end * size && v < columns; v += size)
        for (int64_t i = 0; i < p->a.x.count; i++) {
            const xdi_log_probs_cut cut = { v, columns - v < size ? columns : v + size, p->more || i > 0 };
            p->steps->add(launch, &p->a, i, p->lse[i], &cut);
        }
}

XD_PRIVATE xd_result xdi_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a,
                                          const xdi_log_probs_steps *steps) {
    const int64_t most = XD_XTOKEN_SCRATCH / 2, size = XDI_CPU_COLUMNS / 4;
    xdi_log_probs p = { *a, false, (double *)(void *)a->scratch, steps };
    if (a->x.count == 0)
        memset(a->cells, 0, (size_t)a->x.columns * (a->fixed ? sizeof(xd_fixed) : sizeof *a->cells));
    for (int64_t at = 0; at < a->x.count; at += most, p.more = true) {
        p.a.x.rows = a->x.rows + at;
        p.a.x.count = a->x.count - at < most ? a->x.count - at : most;
        XD_TRY(xdi_spread_rows(launch, p.a.x.count, a->x.columns, xdi_cpu_log_probs_lses, &p));
        XD_TRY(xdi_spread_items(launch, (a->x.columns + size - 1) / size, 4, xdi_cpu_log_probs_columns, &p));
    }
    return XD_OK;
}

static double xdi_cpu_log_probs_lse(const xd_launch *launch, const xd_xtoken_rows *x, int64_t row) {
    (void)launch;
    return xdi_xtoken_row_lse(x, row);
}

static void xdi_cpu_log_probs_add(const xd_launch *launch, const xd_xtoken_log_probs_args *a, int64_t i,
                                  double lse, const xdi_log_probs_cut *cut) {
    (void)launch;
    xdi_xtoken_log_probs_piece(a, i, lse, cut);
}

static xd_result xdi_cpu_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a) {
    static const xdi_log_probs_steps steps = { xdi_cpu_log_probs_lse, xdi_cpu_log_probs_add };
    return xdi_xtoken_log_probs(launch, a, &steps);
}

/* The most likely pairs, by index. */
XD_PRIVATE void xdi_xtoken_best(const xd_xtoken_pair_args *a, int64_t best, int64_t other) {
    a->best[XD_XTOKEN_BEST_MEAN] = best < 0 ? -INFINITY : a->means[a->pair[best] - a->first];
    a->best[XD_XTOKEN_BEST_PAIR] = (double)best;
    a->best[XD_XTOKEN_BEST_OTHER] = (double)other;
}

static xd_result xdi_cpu_xtoken_pair(const xd_launch *launch, const xd_xtoken_pair_args *a) {
    int64_t best = -1, other = -1;
    (void)launch;
    memset(a->slope, 0, (size_t)a->columns * sizeof *a->slope);
    for (int64_t i = 0; i < a->pairs; i++) {
        const int64_t v = a->pair[i] - a->first;
        const double beta = a->others[a->other[i]];
        if (other < 0 || beta > a->others[a->other[other]]) other = i;
        if (v < 0 || v >= a->columns) continue;
        const double alpha = a->means[v], p = exp(a->reverse ? alpha : beta);
        if (p != 0.0) xdi_cells_add(a->fixed, a->cells, 0, p * (a->reverse ? alpha - beta : beta - alpha));
        if (p != 0.0) a->slope[v] = (float)(a->reverse ? p * (alpha - beta + 1.0) : -p);
        if (best < 0 || alpha > a->means[a->pair[best] - a->first]) best = i;
    }
    xdi_xtoken_best(a, best, other);
    return XD_OK;
}

static xd_result xdi_cpu_xtoken_total(const xd_launch *launch, const xd_xtoken_total_args *a) {
    (void)launch;
    for (int64_t v = 0; v < a->columns; v++) xdi_cells_add(a->fixed, a->cells, 0, (double)a->u[v]);
    return XD_OK;
}

/* ---- single positions ---- */

static void xdi_cpu_xtoken_moments_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xd_xtoken_moments_args *a = (const xd_xtoken_moments_args *)args;
    const xd_xtoken_rows *x = &a->x;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = x->rows[i], label = a->labels.data ? xd_id_at(a->labels, row) : -1;
        double *out = a->moments + i * XD_XTOKEN_MOMENTS, max = -INFINITY, sum = 0.0, entropy = 0.0;
        for (int64_t v = 0; v < x->columns; v++) {
            const double z = xdi_loss_load(&x->logits, row, v);
            if (!(z <= max)) max = z;
        }
        for (int64_t v = 0; v < x->columns; v++) sum += exp(xdi_loss_load(&x->logits, row, v) - max);
        const double lse = max + log(sum);
        for (int64_t v = 0; v < x->columns && a->entropy; v++) {
            const double p = exp(xdi_loss_load(&x->logits, row, v) - lse);
            entropy -= p * log(p + XD_XTOKEN_EPSILON);
        }
        out[XD_XTOKEN_LARGEST] = max;
        out[XD_XTOKEN_LOG_SUM] = log(sum);
        out[XD_XTOKEN_ENTROPY] = entropy;
        out[XD_XTOKEN_LABEL] =
            label >= 0 && label < x->columns ? xdi_loss_load(&x->logits, row, label) : (double)NAN;
    }
}

static xd_result xdi_cpu_xtoken_moments(const xd_launch *launch, const xd_xtoken_moments_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->x.columns, xdi_cpu_xtoken_moments_rows, a);
}

static void xdi_cpu_xtoken_pick_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_xtoken_pick_args *a = (const xd_xtoken_pick_args *)args;
    const xd_xtoken_rows *x = &a->x;
    (void)launch, (void)slot;
    for (int64_t i = begin * a->k; i < end * a->k; i++) {
        const int64_t v = a->ids[i % a->k] - x->first;
        const double before = a->add ? a->out[i] : 0.0;
        a->out[i] = v >= 0 && v < x->columns
                        ? before + a->scale * xdi_loss_load(&x->logits, x->rows[i / a->k], v)
                        : -INFINITY;
    }
}

static xd_result xdi_cpu_xtoken_pick(const xd_launch *launch, const xd_xtoken_pick_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->k, xdi_cpu_xtoken_pick_rows, a);
}

static void xdi_cpu_xtoken_log_softmax(double *x, int64_t k) {
    const double lse = xdi_cpu_xtoken_lse(x, k);
    for (int64_t j = 0; j < k; j++) x[j] -= lse;
}

/* KL of log-probabilities, and in s its derivative with respect to the logits. */
static double xdi_cpu_xtoken_kl(double *s, const double *t, int64_t k, bool reverse) {
    double value = 0.0;
    for (int64_t j = 0; j < k; j++) {
        const double p = reverse ? exp(s[j]) : exp(t[j]), difference = reverse ? s[j] - t[j] : t[j] - s[j];
        if (p != 0.0) value += p * difference;
    }
    for (int64_t j = 0; j < k; j++) {
        const double p = exp(s[j]);
        if (!reverse)
            s[j] = p - exp(t[j]);
        else
            s[j] = p != 0.0 ? p * (s[j] - t[j] - value) : 0.0;
    }
    return value;
}

static void xdi_cpu_xtoken_compare_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xd_xtoken_compare_args *a = (const xd_xtoken_compare_args *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        double *s = a->student + i * a->k, *t = a->teacher + i * a->k;
        if (!a->chunks[i].compared) continue;
        for (int64_t j = 0; j < a->k; j++) s[j] /= a->temperature;
        for (int64_t j = 0; j < a->k; j++) t[j] = t[j] / a->divisor / a->temperature;
        a->chunks[i].agree = xdi_cpu_xtoken_argmax(s, a->k) == xdi_cpu_xtoken_argmax(t, a->k);
        xdi_cpu_xtoken_log_softmax(s, a->k);
        xdi_cpu_xtoken_log_softmax(t, a->k);
        a->chunks[i].value = xdi_cpu_xtoken_kl(s, t, a->k, a->reverse);
        a->chunks[i].largest = isfinite(a->chunks[i].value) ? 1.0 : 0.0;
    }
}

static xd_result xdi_cpu_xtoken_compare(const xd_launch *launch, const xd_xtoken_compare_args *a) {
    return xdi_spread_rows(launch, a->count, a->k, xdi_cpu_xtoken_compare_rows, a);
}

static xd_result xdi_cpu_xtoken_slots(const xd_launch *launch, const xd_xtoken_slots_args *a) {
    (void)launch;
    for (int64_t id = 0; id < a->size; id++) a->slots[id] = -1;
    for (int64_t j = 0; j < a->k; j++) a->slots[a->ids[j]] = (int32_t)j;
    return XD_OK;
}

/* ---- chunks with lists of their own ---- */

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

static xd_result xdi_cpu_xtoken_list_project(const xd_launch *launch, const xd_xtoken_list_args *a) {
    return xdi_spread_rows(launch, a->lists.count, a->x.columns, xdi_cpu_xtoken_list_project_rows, a);
}

/* One term of d, and its derivative with respect to q; the logarithms have a floor. */
static double xdi_cpu_xtoken_list_term(double q, double a, bool reverse, double *slope) {
    const double difference = log(q + XD_XTOKEN_EPSILON) - log(a + XD_XTOKEN_EPSILON);
    *slope = reverse ? difference + q / (q + XD_XTOKEN_EPSILON) : -a / (q + XD_XTOKEN_EPSILON);
    return reverse ? q * difference : -a * difference;
}

/* d(c), and in q its derivative. The mass outside the list is 1 minus the sum, so each q also has the slope of that mass
 * with a minus sign, unless the sum is above 1, as rows of M with a sum above 1 can make it. */
static double xdi_cpu_xtoken_list_value(double *q, const double *a, int64_t n, bool reverse) {
    double inside = 0.0, target = 0.0, value = 0.0, slope;
    for (int64_t i = 0; i < n; i++) {
        inside += q[i];
        target += a[i];
        value += xdi_cpu_xtoken_list_term(q[i], a[i], reverse, &q[i]);
    }
    const double outside = 1.0 - inside;
    value += xdi_cpu_xtoken_list_term(outside < 0.0 ? 0.0 : outside, target < 1.0 ? 1.0 - target : 0.0,
                                      reverse, &slope);
    for (int64_t i = 0; i < n && !(outside < 0.0); i++) q[i] -= slope;
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

static xd_result xdi_cpu_xtoken_list_divergence(const xd_launch *launch, const xd_xtoken_list_args *a) {
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

static xd_result xdi_cpu_xtoken_list_delta(const xd_launch *launch, const xd_xtoken_list_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->x.columns, xdi_cpu_xtoken_list_delta_rows, a);
}

/* [columns] of a row: sums of doubles, which are zero between uses, followed by slopes. */
static size_t xdi_cpu_xtoken_list_bytes(int64_t columns, const xd_xtoken_lists *lists) {
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

static xd_result xdi_cpu_xtoken_list_gradient(const xd_launch *launch,
                                              const xd_xtoken_list_gradient_args *a) {
    return xdi_xtoken_list_gradient(launch, a, xdi_cpu_xtoken_write);
}

/* ---- tails ---- */

/* Entries of the list on this shard are sorted by their log-probabilities rounded to f32. */
XD_PRIVATE xd_result xdi_xtoken_tail_select(const xd_launch *launch, const xd_xtoken_tail *t,
                                            xdi_select select, int64_t *first) {
    xd_select_args s;
    memset(&s, 0, sizeof s);
    *first = 0;
    while (*first < t->count && t->ids[*first] < t->begin) ++*first;
    for (; *first + s.columns < t->count && t->ids[*first + s.columns] < t->end; s.columns++)
        t->scratch[s.columns] = (float)t->means[t->ids[*first + s.columns] - t->begin];
    s.logits.data = t->scratch;
    s.logits.dtype = XD_DTYPE_F32;
    s.logits.rows = 1;
    s.logits.cols = s.columns;
    s.k = t->k;
    s.values = t->values;
    s.ids = t->found;
    return select(launch, &s);
}

XD_PRIVATE xd_result xdi_xtoken_tail_finish(const xd_xtoken_tail *t, int64_t first) {
    for (int64_t i = 0; i < t->k; i++) {
        if (t->found[i] >= 0) t->found[i] = t->ids[first + t->found[i]] - t->begin;
        t->values[i] = t->found[i] >= 0 ? exp(t->means[t->found[i]]) : -1.0;
    }
    return XD_OK;
}

static xd_result xdi_cpu_xtoken_tail(const xd_launch *launch, const xd_xtoken_tail *t) {
    int64_t first;
    XD_TRY(xdi_xtoken_tail_select(launch, t, xdi_cpu_select, &first));
    return xdi_xtoken_tail_finish(t, first);
}

/* Whether the most likely pair of all shards is the teacher's. */
static bool xdi_cpu_xtoken_agree(const xd_xtoken_merge *m) {
    double best = -INFINITY, pair = -1.0;
    for (int r = 0; r < m->shards; r++) {
        const double *one = m->all + r * m->stride;
        const double mean = one[XD_XTOKEN_BEST_MEAN], at = one[XD_XTOKEN_BEST_PAIR];
        if (at < 0.0 || (pair >= 0.0 && (mean < best || (mean == best && at > pair)))) continue;
        best = mean;
        pair = at;
    }
    return pair >= 0.0 && pair == m->all[XD_XTOKEN_BEST_OTHER];
}

static xd_result xdi_cpu_xtoken_merge(const xd_launch *launch, const xd_xtoken_merge *m) {
    double sum = 0.0;
    (void)launch;
    memset(m->places, 0, (size_t)m->shards * sizeof *m->places);
    for (int64_t i = 0; i < m->k; i++) {
        int owner = 0;
        double largest = -2.0;
        for (int r = 0; r < m->shards; r++) {
            const double *tail = m->all + r * m->stride + XD_XTOKEN_BEST_WORDS;
            const double value = m->places[r] < m->k ? tail[m->places[r]] : -2.0;
            if (value <= largest) continue; /* a NaN is taken */
            largest = value;
            owner = r;
        }
        const double y = m->others[i];
        const int64_t mine = m->places[owner]++;
        sum += fabs(largest - y);
        if (owner != m->shard || m->found[mine] < 0) continue;
        m->slope[m->found[mine]] = (float)((largest > y ? 1.0 : largest < y ? -1.0 : 0.0) * largest);
    }
    m->out[0] = sum;
    m->out[1] = xdi_cpu_xtoken_agree(m) ? 1.0 : 0.0;
    return XD_OK;
}

/* ---- averages of chunks ---- */

/* The chunk of a row among all, or -1. */
static int64_t xdi_cpu_chunk_of(const xd_chunk_args *a, int64_t row) {
    return a->ids[row] < 0 ? -1 : row / a->held * a->chunks + a->ids[row];
}

static xd_result xdi_cpu_chunk_sums(const xd_launch *launch, const xd_chunk_args *a) {
    const int64_t n = a->rows.cols;
    (void)launch;
    for (int64_t row = 0; row < a->rows.rows; row++) {
        const int64_t chunk = xdi_cpu_chunk_of(a, row);
        for (int64_t i = 0; i < n && chunk >= 0; i++)
            xdi_cells_add(a->fixed, a->out, chunk * n + i, xdi_loss_load(&a->rows, row, i));
    }
    return XD_OK;
}

static xd_result xdi_cpu_chunk_averages(const xd_launch *launch, const xd_chunk_args *a) {
    const int64_t n = a->rows.cols;
    (void)launch;
    for (int64_t i = 0; i < a->count * n; i++)
        a->out[i] = a->sizes[i / n] > 0 ? a->sums[i] / (double)a->sizes[i / n] : 0.0;
    return XD_OK;
}

static void xdi_cpu_chunk_spread_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xd_chunk_args *a = (const xd_chunk_args *)args;
    const int64_t n = a->rows.cols;
    (void)launch, (void)slot;
    for (int64_t row = begin; row < end; row++) {
        const int64_t chunk = xdi_cpu_chunk_of(a, row);
        for (int64_t i = 0; i < n; i++)
            xdi_loss_store(&a->rows, row, i,
                           chunk < 0 ? 0.0 : a->weight[chunk * n + i] / (double)a->sizes[chunk]);
    }
}

static xd_result xdi_cpu_chunk_spread(const xd_launch *launch, const xd_chunk_args *a) {
    return xdi_spread_rows(launch, a->rows.rows, a->rows.cols, xdi_cpu_chunk_spread_rows, a);
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

static xd_result xdi_cpu_xtoken_settle(const xd_launch *launch, const double *cells, int64_t count,
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

static xd_result xdi_cpu_xtoken_row_sums(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->columns, xdi_cpu_xtoken_row_sums_rows, a);
}

static xd_result xdi_cpu_xtoken_row_logs(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    (void)launch;
    for (int64_t row = 0; row < a->logits.rows; row++)
        a->lse[row] = a->lse[row] / a->temperature + log(xdi_cells_value(true, a->cells, row));
    return XD_OK;
}

static xd_result xdi_cpu_xtoken_close(const xd_launch *launch, const xd_xtoken_close_args *a) {
    const double value = xdi_cells_value(a->fixed, a->cells, 0);
    const double sum = xdi_cells_value(a->fixed, a->cells, 1);
    (void)launch;
    for (int64_t i = 0; i < a->count; i++) a->out[i] = sum * a->scale;
    a->chunk->value = value;
    a->chunk->delta = a->merged[0];
    a->chunk->agree = a->merged[1] != 0.0;
    a->chunk->largest = isfinite(value + a->merged[0]) ? 1.0 : 0.0;
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

static xd_result xdi_cpu_xtoken_product(const xd_launch *launch, const xd_xtoken_product_args *a) {
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

static xd_result xdi_cpu_xtoken_product_back(const xd_launch *launch, const xd_xtoken_product_args *a) {
    return xdi_spread_elements(launch, a->rows.rows * a->rows.cols, XDI_XTOKEN_PRODUCT_WORK,
                               xdi_cpu_xtoken_product_columns, a);
}

XD_API const xd_xtoken_kernels *xd_xtoken_kernels_cpu(void) {
    static const xd_xtoken_kernels kernels = {
        xdi_cpu_xtoken_matrix_bytes,  xdi_cpu_xtoken_project_scratch,
        xdi_cpu_xtoken_prepare,       xdi_cpu_xtoken_project,
        xdi_cpu_xtoken_target,        xdi_cpu_xtoken_divergence,
        xdi_cpu_xtoken_delta,         xdi_cpu_xtoken_row_deltas,
        xdi_cpu_xtoken_log_probs,     xdi_cpu_xtoken_pair,
        xdi_cpu_xtoken_tail,          xdi_cpu_xtoken_merge,
        xdi_cpu_xtoken_total,         xdi_cpu_xtoken_close,
        xdi_cpu_xtoken_moments,       xdi_cpu_xtoken_pick,
        xdi_cpu_xtoken_compare,       xdi_cpu_xtoken_slots,
        xdi_cpu_xtoken_list_project,  xdi_cpu_xtoken_list_divergence,
        xdi_cpu_xtoken_list_delta,    xdi_cpu_xtoken_pick_scratch,
        xdi_cpu_xtoken_list_bytes,    xdi_cpu_xtoken_project_gradient,
        xdi_cpu_xtoken_mean_gradient, xdi_cpu_xtoken_pick_gradient,
        xdi_cpu_xtoken_list_gradient, xdi_cpu_xtoken_label_gradient,
        xdi_cpu_xtoken_rest_gradient, xdi_cpu_chunk_sums,
        xdi_cpu_chunk_averages,       xdi_cpu_chunk_spread,
        xdi_cpu_xtoken_settle,        xdi_cpu_xtoken_row_sums,
        xdi_cpu_xtoken_row_logs,      xdi_cpu_xtoken_product,
        xdi_cpu_xtoken_product_back,
    };
    return &kernels;
}
