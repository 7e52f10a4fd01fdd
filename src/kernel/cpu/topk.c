/* Top-k losses and selection. A row is treated as k + 1 entries: its ids, and all other columns as one. */

#include "kernel/cpu/exact.h"
#include "kernel/cpu/internal.h"
#include "kernel/ids.h"
#include "kernel/topk_scalar.h"

#include <math.h>
#include <string.h>

static void xdi_cpu_topk_maxima_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_topk_args *a = (const xd_topk_args *)args;
    const int64_t columns = a->vocab.end - a->vocab.begin;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        int64_t unused;
        a->maxima[r] = a->row_scale[r] != 0.0 ? xdi_loss_row_max(&a->logits, r, columns, &unused) : 0.0;
    }
}

static xd_result xdi_cpu_topk_maxima(const xd_launch *launch, const xd_topk_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_cpu_topk_maxima_rows,
                           a);
}

/* Shell sort: k is small and the ids are mostly in random order. */
XD_PRIVATE int64_t xdi_topk_order(const int64_t *ids, int64_t k, int64_t begin, int64_t end, int64_t *order) {
    int64_t n = 0;
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= begin && ids[j] < end) order[n++] = j;
    for (int64_t gap = n / 2; gap > 0; gap /= 2)
        for (int64_t i = gap; i < n; i++) {
            const int64_t slot = order[i];
            int64_t at = i;
            for (; at >= gap && ids[order[at - gap]] > ids[slot]; at -= gap) order[at] = order[at - gap];
            order[at] = slot;
        }
    return n;
}

/* Adds to a double or to a fixed sum. BAD counts terms that a fixed sum cannot take: high the non-finite ones, low the
 * large ones. */
static inline void xdi_topk_add(const xd_topk_args *a, xdi_topk_sums *sums, int which, double term) {
    if (!a->fixed)
        sums->plain[which] += term;
    else if (!xdi_fixed_add(&sums->exact[which], term)) {
        if (isfinite(term))
            sums->exact[XD_TOPK_BAD].low++;
        else
            sums->exact[XD_TOPK_BAD].high++;
    }
}

/* Evaluated as written, like the columns of cpu/loss.c. */
XDI_SIMD_AS_WRITTEN
XD_PRIVATE void xdi_topk_stats_columns(const void *state, const xd_topk_args *a, int64_t r, int64_t begin,
                                       int64_t end, xdi_topk_sums *sums) {
    const double scale = 1.0 / a->temperature;
    (void)state;
    for (int64_t c = begin; c < end; c++) {
        const double z = xdi_loss_minus(xdi_loss_load(&a->logits, r, c), a->maxima[r]) * scale;
        const double e = a->fixed ? xdi_exact_exp(z) : exp(z);
        xdi_topk_add(a, sums, XD_TOPK_OUTSIDE, e);
        if (e > 0.0) xdi_topk_add(a, sums, XD_TOPK_ENTROPY, e * z);
    }
}

/* Calls the sweep for the columns between the row's ids. */
static void xdi_topk_stats_row(const xd_topk_args *a, int64_t r, xdi_topk_sweep sweep, const void *state,
                               int64_t *order, xdi_topk_sums *sums) {
    const int64_t begin = a->vocab.begin, end = a->vocab.end;
    const int64_t *ids = a->ids + r * a->k;
    const int64_t inside = xdi_topk_order(ids, a->k, begin, end, order);
    int64_t next = 0;
    sums->plain[XD_TOPK_MAX] = a->maxima[r];
    for (int64_t j = 0; j < inside; j++)
        a->values[r * a->k + order[j]] = xdi_loss_load(&a->logits, r, ids[order[j]] - begin);
    if (!a->outside) return;
    for (int64_t j = 0; j < inside; j++) {
        const int64_t column = ids[order[j]] - begin;
        if (next < column) sweep(state, a, r, next, column, sums);
        next = column + 1; /* an id that occurs twice is left out once */
    }
    if (next < end - begin) sweep(state, a, r, next, end - begin, sums);
}

/* The arguments of the entry and the sweep over a row's columns. */
typedef struct xdi_topk_swept {
    const xd_topk_args *a;
    xdi_topk_sweep sweep;
    const void *state;
} xdi_topk_swept;

static void xdi_topk_stats_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                 int slot) {
    const xdi_topk_swept *s = (const xdi_topk_swept *)args;
    const xd_topk_args *a = s->a;
    (void)launch;
    for (int64_t r = begin; r < end; r++) {
        xdi_topk_sums sums;
        memset(&sums, 0, sizeof sums);
        for (int64_t j = 0; j < a->k; j++) a->values[r * a->k + j] = 0.0;
        if (isnan(a->maxima[r])) {
            sums.plain[XD_TOPK_BAD] = 1.0;
            sums.exact[XD_TOPK_BAD].high = 1;
        } else if (a->row_scale[r] != 0.0) {
            xdi_topk_stats_row(a, r, s->sweep, s->state, a->order + slot * a->k, &sums);
        }
        if (a->fixed)
            memcpy((xd_fixed *)a->sums + r * XD_TOPK_SUMS, sums.exact, sizeof sums.exact);
        else
            memcpy((double *)a->sums + r * XD_TOPK_SUMS, sums.plain, sizeof sums.plain);
    }
}

XD_PRIVATE xd_result xdi_topk_stats_rows(const xd_launch *launch, const xd_topk_args *a, xdi_topk_sweep sweep,
                                         const void *state) {
    const int64_t columns = a->vocab.end - a->vocab.begin;
    const xdi_topk_swept s = { a, sweep, state };
    return xdi_spread_rows(launch, a->logits.rows, columns, xdi_topk_stats_piece, &s);
}

static xd_result xdi_cpu_topk_stats(const xd_launch *launch, const xd_topk_args *a) {
    return xdi_topk_stats_rows(launch, a, xdi_topk_stats_columns, NULL);
}

static void xdi_topk_merge_fixed(const xd_topk_args *a, int64_t r, xd_topk_side *side) {
    xd_fixed sum[XD_TOPK_SUMS];
    memset(sum, 0, sizeof sum);
    for (int i = 0; i < a->vocab.shards; i++)
        for (int which = 0; which < XD_TOPK_SUMS; which++) {
            const int64_t *part = a->all + i * a->all_stride + (r * XD_TOPK_SUMS + which) * 2;
            sum[which].high += part[0];
            sum[which].low += part[1];
        }
    side->max = a->maxima[r];
    side->outside = xdi_fixed_value(sum[XD_TOPK_OUTSIDE]);
    side->entropy = xdi_fixed_value(sum[XD_TOPK_ENTROPY]);
    if (sum[XD_TOPK_BAD].low > 0) side->finding = (int)XD_ROW_OVERFLOW;
    if (sum[XD_TOPK_BAD].high > 0) side->finding = (int)XD_ROW_NOT_FINITE;
}

static void xdi_topk_merge_plain(const xd_topk_args *a, int64_t r, xd_topk_side *side) {
    side->max = -INFINITY;
    for (int i = 0; i < a->vocab.shards; i++) {
        const double *part = (const double *)(const void *)(a->all + i * a->all_stride) + r * XD_TOPK_SUMS;
        if (part[XD_TOPK_BAD] != 0.0) side->finding = (int)XD_ROW_NOT_FINITE;
        if (part[XD_TOPK_MAX] > side->max) side->max = part[XD_TOPK_MAX];
    }
    if (side->finding != (int)XD_ROW_FINE) side->max = NAN;
    for (int i = 0; i < a->vocab.shards; i++) {
        const double *part = (const double *)(const void *)(a->all + i * a->all_stride) + r * XD_TOPK_SUMS;
        xd_topk_rescale(side, a->temperature, part[XD_TOPK_MAX], part[XD_TOPK_OUTSIDE],
                        part[XD_TOPK_ENTROPY]);
    }
}

/* Collects the logits at all ids, and finds ids that are out of range or twice in the row. */
static void xdi_topk_merge_values(const xd_topk_args *a, int64_t r, xd_topk_side *side) {
    const int64_t *ids = a->ids + r * a->k;
    const int64_t valid = xdi_topk_order(ids, a->k, 0, a->vocab.size, a->order);
    const int64_t sums = a->logits.rows * XD_TOPK_SUMS * (a->fixed ? 2 : 1); /* words before the values */
    int64_t given = 0;
    int shard = 0;
    for (int64_t j = 0; j < a->k; j++) given += ids[j] >= 0 ? 1 : 0;
    if (given != valid) side->finding = (int)XD_ROW_LABEL;
    for (int64_t i = 0; i < valid; i++) {
        const int64_t j = a->order[i];
        while (ids[j] >= a->vocab.offsets[shard + 1]) shard++;
        memcpy(a->values + r * a->k + j, a->all + shard * a->all_stride + sums + r * a->k + j,
               sizeof(double));
        if (i > 0 && ids[a->order[i - 1]] == ids[j]) side->finding = (int)XD_ROW_LABEL;
    }
}

static xd_result xdi_cpu_topk_merge(const xd_launch *launch, const xd_topk_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        xd_topk_side *side = a->side + r;
        memset(side, 0, sizeof *side);
        if (a->row_scale[r] == 0.0) continue;
        if (a->fixed)
            xdi_topk_merge_fixed(a, r, side);
        else
            xdi_topk_merge_plain(a, r, side);
        xdi_topk_merge_values(a, r, side);
        if (side->max == -INFINITY) side->finding = (int)XD_ROW_NOT_FINITE;
    }
    return XD_OK;
}

/* One row in the form of the divergence: entries j < k are the ids, entry k is the outside. */
typedef struct xdi_topk_entries {
    double *s, *t; /* [k + 1] logarithms; an entry that is absent has valid[j] false */
    double *g;     /* [k + 1] gradient with respect to the entries' logits */
    const int64_t *ids;
    int64_t k;
    bool tail; /* the outside is an entry of the divergence */
    xd_topk_masses at;
    double teacher_mass;
} xdi_topk_entries;

/* values[] / temperature, normalised over the row's own entries. Returns ln of the sum, -infinity without
 * entries. */
static double xdi_topk_normalise(const double *values, const int64_t *ids, int64_t k, double temperature,
                                 double *out) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= 0 && values[j] > max) max = values[j];
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= 0 && max > -INFINITY) sum += exp((values[j] - max) / temperature);
    const double log_sum = log(sum);
    for (int64_t j = 0; j < k; j++)
        out[j] = ids[j] >= 0 ? (values[j] - max) / temperature - log_sum : -INFINITY;
    return max / temperature + log_sum;
}

static double xdi_topk_mass(const double *logs, const int64_t *ids, int64_t k) {
    double sum = 0.0;
    for (int64_t j = 0; j < k; j++) sum += ids[j] >= 0 ? exp(logs[j]) : 0.0;
    return sum;
}

static void xdi_topk_student_entries(const xd_topk_kl_args *a, int64_t r, xdi_topk_entries *e) {
    const double *values = a->values + r * a->k;
    const xd_topk_side *side = a->side + r;
    double inside = 0.0;
    for (int64_t j = 0; j < a->k; j++)
        if (e->ids[j] >= 0) inside += exp((values[j] - side->max) / a->temperature);
    e->at = xd_topk_student_masses(inside, side, e->tail);
    if (a->mode == XD_TOPK_RENORMALISE) {
        xdi_topk_normalise(values, e->ids, a->k, a->temperature, e->s);
    } else {
        for (int64_t j = 0; j < a->k; j++)
            e->s[j] = e->ids[j] >= 0 ? (values[j] - side->max) / a->temperature - e->at.log : -INFINITY;
    }
    e->s[a->k] = e->at.tail;
}

static void xdi_topk_teacher_entries(const xd_topk_kl_args *a, int64_t r, xdi_topk_entries *e) {
    const double *values = a->teacher_values + r * a->k;
    const double tau = a->teacher_temperature;
    const double sum = xdi_topk_normalise(values, e->ids, a->k, tau, e->t);
    const xd_topk_teacher teacher =
        xd_topk_teacher_masses(sum, a->teacher_side ? a->teacher_side + r : NULL, tau,
                               !a->teacher_side && a->teacher_log ? a->teacher_log[r] : 0.0);
    for (int64_t j = 0; j < a->k && a->mode != XD_TOPK_RENORMALISE && a->mode != XD_TOPK_ZERO_OUTSIDE; j++)
        e->t[j] = e->ids[j] >= 0 ? values[j] / tau - teacher.whole : -INFINITY;
    e->teacher_mass = teacher.mass;
    e->t[a->k] = teacher.tail;
}

/* Forward KL of the entries: sum T (t - s), gradient S sum(T) - T. */
static void xdi_topk_forward(xdi_topk_entries *e, double weight, xd_topk_row *row) {
    const int64_t n = e->k + (e->tail ? 1 : 0);
    double mass = xdi_topk_mass(e->t, e->ids, e->k);
    if (e->at.tail_flows) mass += exp(e->t[e->k]);
    for (int64_t j = 0; j < n; j++)
        if (j == e->k || e->ids[j] >= 0)
            row->loss += xd_topk_forward(e->s[j], e->t[j], weight, mass, &e->g[j]);
    row->outside += xd_topk_forward_outside(&e->at, weight, mass, exp(e->t[e->k]));
}

/* Reverse KL and JSD: A = S r, gradient S ((r - c) - sum S (r - c)), with c the r of the entry with most
 * mass, so that nothing cancels on nearly one-hot rows. Columns that are not an entry have A = 0: their r is 0, that of
 * the entries r + 1. */
static void xdi_topk_backward(xdi_topk_entries *e, bool zero_outside, bool renormalised, double beta,
                              double weight, xd_topk_row *row) {
    const double one = beta == 1.0 && !zero_outside && !renormalised ? 1.0 : 0.0;
    double loss, outside = zero_outside ? 100.0 : 0.0, offset = outside, most = e->at.outside_mass, mean;
    if (e->tail) {
        const double r = xd_topk_ratio(e->s[e->k], e->t[e->k], beta, &loss);
        row->loss += weight * loss;
        if (e->at.tail_flows) offset = outside = r + one;
    }
    if (renormalised) most = -1.0;
    for (int64_t j = 0; j < e->k; j++) {
        if (e->ids[j] < 0 || !(exp(e->s[j]) > most)) continue;
        most = exp(e->s[j]);
        offset = xd_topk_ratio(e->s[j], e->t[j], beta, &loss) + one;
    }
    mean = renormalised ? 0.0 : xd_topk_outside_mean(&e->at, outside, offset, zero_outside);
    for (int64_t j = 0; j < e->k; j++) {
        if (e->ids[j] < 0) continue;
        const double r = xd_topk_ratio(e->s[j], e->t[j], beta, &loss) + one;
        row->loss += weight * loss;
        if (e->s[j] > -INFINITY) mean += exp(e->s[j]) * (r - offset);
    }
    for (int64_t j = 0; j < e->k; j++)
        if (e->ids[j] >= 0)
            e->g[j] += xd_topk_backward(e->s[j], weight, xd_topk_ratio(e->s[j], e->t[j], beta, &loss) + one,
                                        offset, mean);
    row->outside += renormalised ? 0.0 : weight * (outside - offset - mean);
    if (zero_outside) xd_topk_zero_outside(&e->at, weight, row);
}

static void xdi_topk_divergence_row(const xd_topk_kl_args *a, int64_t r, xdi_topk_entries *e,
                                    xd_topk_row *row) {
    const bool renormalised = a->mode == XD_TOPK_RENORMALISE, zero = a->mode == XD_TOPK_ZERO_OUTSIDE;
    const double beta = xd_topk_beta(a->divergence, a->beta);
    xdi_topk_student_entries(a, r, e);
    xdi_topk_teacher_entries(a, r, e);
    if (a->divergence == XD_JSD) {
        xdi_topk_backward(e, false, renormalised, beta, 1.0, row);
    } else {
        if (beta != 1.0) xdi_topk_forward(e, 1.0 - beta, row);
        if (beta != 0.0) xdi_topk_backward(e, zero, renormalised, 1.0, beta, row);
    }
    if (renormalised) row->outside = 0.0;
    xd_topk_close(a, r, &e->at, e->teacher_mass, row);
}

static bool xdi_topk_has_entries(const int64_t *ids, int64_t k) {
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= 0) return true;
    return false;
}

static void xdi_cpu_topk_divergence_rows(const xd_launch *launch, const void *args, int64_t begin,
                                         int64_t end, int slot) {
    const xd_topk_kl_args *a = (const xd_topk_kl_args *)args;
    (void)launch;
    for (int64_t r = begin; r < end; r++) {
        xd_topk_row *row = a->row + r;
        xdi_topk_entries e;
        memset(row, 0, sizeof *row);
        memset(&e, 0, sizeof e);
        e.s = a->scratch + slot * 3 * (a->k + 1);
        e.t = e.s + a->k + 1;
        e.g = e.t + a->k + 1;
        e.ids = a->ids + r * a->k;
        e.k = a->k;
        e.tail = a->mode == XD_TOPK_TAIL;
        for (int64_t j = 0; j <= a->k; j++) e.g[j] = 0.0;
        for (int64_t j = 0; j <= a->k; j++) e.s[j] = -INFINITY;
        row->finding = a->side[r].finding;
        if (a->teacher_side && row->finding == (int)XD_ROW_FINE) row->finding = a->teacher_side[r].finding;
        if (row->finding == (int)XD_ROW_NOT_FINITE) row->max = xd_topk_reason(a, r);
        if (a->row_scale[r] != 0.0 && row->finding == (int)XD_ROW_FINE && xdi_topk_has_entries(e.ids, a->k))
            xdi_topk_divergence_row(a, r, &e, row);
        if (a->row_scale[r] != 0.0) xd_topk_settle(a, r, row);
        for (int64_t j = 0; j < a->k && row->finding != (int)XD_ROW_FINE; j++) e.s[j] = -INFINITY;
        memcpy(a->slots + r * a->k, e.g, (size_t)a->k * sizeof *e.g);
        for (int64_t j = 0; a->log_probs && j < a->k; j++) a->log_probs[r * a->k + j] = (float)e.s[j];
    }
}

static xd_result xdi_cpu_topk_divergence(const xd_launch *launch, const xd_topk_kl_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, 4 * a->k, xdi_cpu_topk_divergence_rows, a);
}

static void xdi_topk_grad_row(const xd_topk_kl_args *a, int64_t r, double scale) {
    const int64_t begin = a->vocab.begin, end = a->vocab.end;
    const xd_topk_row *row = a->row + r;
    const int64_t *ids = a->ids + r * a->k;
    for (int64_t c = begin; c < end; c++) {
        double g = 0.0;
        if (row->outside != 0.0 || row->entropy != 0.0) {
            const double log_p =
                (xdi_loss_load(&a->logits, r, c - begin) - row->max) / a->temperature - row->log;
            const double p = exp(log_p);
            g = p > 0.0 ? p * (row->outside + (row->entropy != 0.0 ? row->entropy * log_p : 0.0)) : 0.0;
        }
        xdi_loss_store(&a->gradient, r, c - begin, scale * g);
    }
    for (int64_t j = 0; j < a->k; j++)
        if (ids[j] >= begin && ids[j] < end)
            xdi_loss_store(&a->gradient, r, ids[j] - begin, scale * a->slots[r * a->k + j]);
}

static void xdi_cpu_topk_grad_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xd_topk_kl_args *a = (const xd_topk_kl_args *)args;
    const int64_t columns = a->vocab.end - a->vocab.begin;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const bool counts = a->row_scale[r] != 0.0 && a->row[r].finding == (int)XD_ROW_FINE;
        if (counts) xdi_topk_grad_row(a, r, a->weight * a->row_scale[r] / a->temperature);
        for (int64_t c = counts ? columns : 0; c < a->gradient.cols; c++)
            xdi_loss_store(&a->gradient, r, c, 0.0);
    }
}

static xd_result xdi_cpu_topk_grad(const xd_launch *launch, const xd_topk_kl_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_cpu_topk_grad_rows, a);
}

XD_PRIVATE int64_t xdi_select_insert(double *values, int64_t *ids, int64_t n, int64_t k, double value,
                                     int64_t id) {
    int64_t at = n < k ? n : k - 1;
    for (; at > 0 && value > values[at - 1]; at--) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
    return n < k ? n + 1 : k;
}

static void xdi_cpu_select_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                int slot) {
    const xd_select_args *a = (const xd_select_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        double *values = a->values + r * a->k;
        int64_t *ids = a->ids + r * a->k, n = 0;
        for (int64_t c = 0; c < a->columns; c++) {
            double value = xdi_loss_load(&a->logits, r, c);
            if (isnan(value)) value = -INFINITY;
            if (n < a->k || value > values[a->k - 1])
                n = xdi_select_insert(values, ids, n, a->k, value, a->first + c);
        }
        for (; n < a->k; n++) {
            values[n] = -INFINITY;
            ids[n] = -1;
        }
    }
}

XD_PRIVATE xd_result xdi_cpu_select(const xd_launch *launch, const xd_select_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->columns, xdi_cpu_select_rows, a);
}

/* The k largest of all shards' candidates. Shards are in the order of their columns, so among equals the lowest id is
 * first. */
static xd_result xdi_cpu_select_merge(const xd_launch *launch, const xd_select_args *a) {
    const int64_t candidates = a->logits.rows * a->k;
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        double *values = a->values + r * a->k;
        int64_t n = 0;
        for (int i = 0; i < a->shards; i++)
            for (int64_t j = r * a->k; j < (r + 1) * a->k; j++) {
                const int64_t *word = a->all + i * a->all_stride + j, id = word[candidates];
                double value;
                memcpy(&value, word, sizeof value);
                if (id >= 0 && (n < a->k || value > values[a->k - 1]))
                    n = xdi_select_insert(values, a->ids + r * a->k, n, a->k, value, id);
            }
    }
    return XD_OK;
}

/* The ids in the form that the other entries of the table read, and the teacher's values widened. */
static xd_result xdi_cpu_topk_entries(const xd_launch *launch, const xd_topk_entries_args *a) {
    (void)launch;
    for (int64_t i = 0; i < a->count; i++) {
        const bool absent = a->values && a->values[i] == -INFINITY;
        const int64_t id = a->ids.data ? xd_id_at(a->ids, i) : 0;
        if (a->ids.data) a->entry_ids[i] = absent ? -1 : id < 0 || id > a->size ? a->size : id;
        a->entry_values[i] = a->values ? (double)a->values[i] : 0.0;
    }
    return XD_OK;
}

XD_PRIVATE const xd_topk_kernels *xdi_topk_kernels_cpu(void) {
    static const xd_topk_kernels kernels = {
        xdi_cpu_topk_maxima,     xdi_cpu_topk_stats,   xdi_cpu_topk_merge,
        xdi_cpu_topk_divergence, xdi_cpu_topk_grad,    xdi_cpu_topk_entries,
        xdi_cpu_select,          xdi_cpu_select_merge, false,
    };
    return &kernels;
}
