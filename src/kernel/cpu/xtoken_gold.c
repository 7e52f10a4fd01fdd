/* Losses over common and uncommon ids of two tokenizers. */

#include "kernel/cpu/xtoken.h"

#include <math.h>
#include <string.h>

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
        xdi_cells_add(
            a->fixed, a->cells, v,
            xd_xtoken_log_prob(xdi_loss_load(&x->logits, x->rows[i], v), x->temperature, lse, a->scale));
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

XD_PRIVATE xd_result xdi_cpu_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a) {
    static const xdi_log_probs_steps steps = { xdi_cpu_log_probs_lse, xdi_cpu_log_probs_add };
    return xdi_xtoken_log_probs(launch, a, &steps);
}

/* The most likely pairs, by index. */
XD_PRIVATE void xdi_xtoken_best(const xd_xtoken_pair_args *a, int64_t best, int64_t other) {
    a->best[XD_XTOKEN_BEST_MEAN] = best < 0 ? -INFINITY : a->means[a->pair[best] - a->first];
    a->best[XD_XTOKEN_BEST_PAIR] = (double)best;
    a->best[XD_XTOKEN_BEST_OTHER] = (double)other;
}

XD_PRIVATE xd_result xdi_cpu_xtoken_pair(const xd_launch *launch, const xd_xtoken_pair_args *a) {
    int64_t best = -1, other = -1;
    (void)launch;
    memset(a->slope, 0, (size_t)a->columns * sizeof *a->slope);
    for (int64_t i = 0; i < a->pairs; i++) {
        const int64_t v = a->pair[i] - a->first;
        const double beta = a->others[a->other[i]];
        if (other < 0 || beta > a->others[a->other[other]]) other = i;
        if (v < 0 || v >= a->columns) continue;
        const double alpha = a->means[v];
        double term;
        if (xd_xtoken_pair_term(alpha, beta, a->reverse, &term, &a->slope[v]))
            xdi_cells_add(a->fixed, a->cells, 0, term);
        if (best < 0 || alpha > a->means[a->pair[best] - a->first]) best = i;
    }
    xdi_xtoken_best(a, best, other);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_cpu_xtoken_total(const xd_launch *launch, const xd_xtoken_total_args *a) {
    (void)launch;
    for (int64_t v = 0; v < a->columns; v++) xdi_cells_add(a->fixed, a->cells, 0, (double)a->u[v]);
    return XD_OK;
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

XD_PRIVATE xd_result xdi_cpu_xtoken_tail(const xd_launch *launch, const xd_xtoken_tail *t) {
    int64_t first;
    XD_TRY(xdi_xtoken_tail_select(launch, t, xdi_cpu_select, &first));
    return xdi_xtoken_tail_finish(t, first);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_merge(const xd_launch *launch, const xd_xtoken_merge *m) {
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
        m->slope[m->found[mine]] = xd_xtoken_tail_slope(largest, y);
    }
    m->out[0] = sum;
    m->out[1] = xd_xtoken_agree(m) ? 1.0 : 0.0;
    return XD_OK;
}
