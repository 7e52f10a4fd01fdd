#ifndef XDI_KERNEL_XTOKEN_SCALAR_H
#define XDI_KERNEL_XTOKEN_SCALAR_H

#include "kernel/xtoken.h"

/* Formulas of kernel/xtoken.h that CPU and CUDA share. Their roundings are spelled out, so no compiler joins a product to a sum. */

/* ---- chunks ---- */

/* Is this divergence of the chunk finite? Else its gradient is 0. */
XD_SCALAR bool xd_xtoken_chunk_takes(const xd_xtoken_chunk *chunk, double value) {
    return isfinite(value) && (chunk->limit == 0.0 || fabs(value) < chunk->limit);
}

/* The factor of the derivatives of a chunk with this divergence. */
XD_SCALAR double xd_xtoken_chunk_factor(const xd_xtoken_chunk *chunk, double value) {
    return xd_xtoken_chunk_takes(chunk, value) ? chunk->factor : 0.0;
}

/* A derivative times that factor; 0 whatever it is when the factor is. */
XD_SCALAR double xd_xtoken_scaled(double slope, double factor) {
    return factor != 0.0 ? xd_mul(slope, factor) : 0.0;
}

/* One column of d(c), where r = q / z and s = ln(r + epsilon); z: epsilon and the sum of q. Replaces q by dr, adds to
 * *value and adds dr r to *dot:
 *   ds = -e^a (forward) or e^s (s - a + 1) (reverse),  dr = ds / (r + epsilon)
 * NaN passes, a column of no probability does not count. */
XD_SCALAR void xd_xtoken_slope(double *q, double a, double z, bool reverse, double *value, double *dot) {
    const double r = *q / z, shifted = xd_add(r, XD_XTOKEN_EPSILON), s = log(shifted), target = exp(a);
    const double ds = reverse ? xd_mul(exp(s), xd_add(xd_sub(s, a), 1.0)) : -target;
    if (reverse)
        *value = xd_add(*value, xd_mul(exp(s), xd_sub(s, a)));
    else if (target != 0.0)
        *value = xd_add(*value, xd_mul(target, xd_sub(a, s)));
    *q = ds / shifted;
    *dot = xd_add(*dot, xd_mul(*q, r));
}

/* dq from dr; dot: sum dr r. */
XD_SCALAR double xd_xtoken_slope_of_mean(double slope, double dot, double z) {
    return xd_sub(slope, dot) / z;
}

/* The sum of q dq; the sum of q is z - epsilon. */
XD_SCALAR double xd_xtoken_slope_delta(double dot, double z) {
    return xd_mul(dot, XD_XTOKEN_EPSILON) / z;
}

/* delta of a row of the chunk, from its cell. */
XD_SCALAR double xd_xtoken_row_delta(const xd_xtoken_chunk *chunk, double cell) {
    const double delta = xd_mul(cell, chunk->largest);
    return chunk->largest == 0.0 ? 0.0 : chunk->alone ? chunk->delta : delta;
}

/* ---- chunks with lists ---- */

/* One term of d, and its derivative with respect to q; the logarithms have a floor. */
XD_SCALAR double xd_xtoken_list_term(double q, double a, bool reverse, double *slope) {
    const double shifted = xd_add(q, XD_XTOKEN_EPSILON);
    const double difference = xd_sub(log(shifted), log(xd_add(a, XD_XTOKEN_EPSILON)));
    *slope = reverse ? xd_add(difference, q / shifted) : -a / shifted;
    return xd_mul(reverse ? q : -a, difference);
}

/* The term of the mass outside the list, 1 minus the sum inside it. Rows of M with a sum above 1 can make it negative. */
XD_SCALAR double xd_xtoken_list_rest(double outside, double target, bool reverse, double *slope) {
    return xd_xtoken_list_term(outside < 0.0 ? 0.0 : outside, target < 1.0 ? xd_sub(1.0, target) : 0.0,
                               reverse, slope);
}

/* Each q also has the slope of the mass outside with a minus sign, unless that mass is negative. */
XD_SCALAR double xd_xtoken_list_slope(double slope, double outside, double rest) {
    return outside < 0.0 ? slope : xd_sub(slope, rest);
}

/* ---- averages of chunks ---- */

/* The chunk of a row among all, or -1. */
XD_SCALAR int64_t xd_chunk_of_row(const xd_chunk_args *a, int64_t row) {
    return a->ids[row] < 0 ? -1 : row / a->held * a->chunks + a->ids[row];
}

XD_SCALAR double xd_chunk_average(double sum, int64_t size) {
    return size > 0 ? sum / (double)size : 0.0;
}

/* ---- pairs and tails ---- */

/* A row's log-probability of one column, times a scale. */
XD_SCALAR double xd_xtoken_log_prob(double logit, double temperature, double lse, double scale) {
    return xd_mul(xd_sub(logit / temperature, lse), scale);
}

/* The term of a pair with these means, and its derivative with respect to alpha; false when it has no probability. */
XD_SCALAR bool xd_xtoken_pair_term(double alpha, double beta, bool reverse, double *term, float *slope) {
    const double p = exp(reverse ? alpha : beta);
    if (p == 0.0) return false;
    *term = xd_mul(p, reverse ? xd_sub(alpha, beta) : xd_sub(beta, alpha));
    *slope = (float)(reverse ? xd_mul(p, xd_add(xd_sub(alpha, beta), 1.0)) : -p);
    return true;
}

/* The derivative of |x - y| with respect to the logarithm of x. */
XD_SCALAR float xd_xtoken_tail_slope(double x, double y) {
    return (float)xd_mul(x > y ? 1.0 : x < y ? -1.0 : 0.0, x);
}

/* Whether the most likely pair of all shards is the teacher's. */
XD_SCALAR bool xd_xtoken_agree(const xd_xtoken_merge *m) {
    double best = -(double)INFINITY, pair = -1.0;
    for (int r = 0; r < m->shards; r++) {
        const double *one = m->all + r * m->stride;
        const double mean = one[XD_XTOKEN_BEST_MEAN], at = one[XD_XTOKEN_BEST_PAIR];
        if (at < 0.0 || (pair >= 0.0 && (mean < best || (mean == best && at > pair)))) continue;
        best = mean;
        pair = at;
    }
    return pair >= 0.0 && pair == m->all[XD_XTOKEN_BEST_OTHER];
}

/* The chunk from the sums of `pair` and of `total`. Without a gradient there is no loss. */
XD_SCALAR void xd_xtoken_close_chunk(const xd_xtoken_close_args *a, double value, double sum) {
    a->chunk->value = isfinite(sum) ? value : (double)NAN;
    a->chunk->delta = a->merged[0];
    a->chunk->agree = a->merged[1] != 0.0;
    a->chunk->largest =
        isfinite(sum) && xd_xtoken_chunk_takes(a->chunk, xd_add(value, a->merged[0])) ? 1.0 : 0.0;
}

/* ---- rows ---- */

/* A term of the entropy. */
XD_SCALAR double xd_xtoken_entropy_term(double p) {
    return xd_mul(-p, log(xd_add(p, XD_XTOKEN_EPSILON)));
}

/* Does the row hold a number that is NaN or infinity, perhaps in a column that nobody picks, or on another shard? */
XD_SCALAR bool xd_xtoken_row_is_bad(const xd_xtoken_rows *x, int64_t row) {
    return (x->finite && !x->finite[row]) || (x->lse && !(x->lse[row] < (double)INFINITY));
}

/* A picked logit, added to what is there. */
XD_SCALAR double xd_xtoken_picked(double before, double scale, double logit) {
    return xd_add(before, xd_mul(scale, logit));
}

/* Adds a term of the KL of log-probabilities. */
XD_SCALAR void xd_xtoken_add_kl(double s, double t, bool reverse, double *value) {
    const double p = exp(reverse ? s : t);
    if (p != 0.0) *value = xd_add(*value, xd_mul(p, reverse ? xd_sub(s, t) : xd_sub(t, s)));
}

/* Its derivative with respect to the logit; value: the KL. */
XD_SCALAR double xd_xtoken_kl_slope(double s, double t, bool reverse, double value) {
    const double p = exp(s);
    if (!reverse) return xd_sub(p, exp(t));
    return p != 0.0 ? xd_mul(p, xd_sub(xd_sub(s, t), value)) : 0.0;
}

/* The log-sum-exp of a row, from its largest logit and the sum of powers relative to it. */
XD_SCALAR double xd_xtoken_row_log(double largest, double temperature, double sum) {
    return xd_add(largest / temperature, log(sum));
}

/* ---- parts of an element of a gradient ---- */

/* Cross entropy with a factor; p: the probability at temperature 1. */
XD_SCALAR double xd_xtoken_ce_part(double factor, double p, bool label) {
    return xd_mul(factor, xd_sub(p, label ? 1.0 : 0.0));
}

/* h: (M dy) of the column. */
XD_SCALAR double xd_xtoken_project_part(double p, double h, double delta, double temperature) {
    return xd_mul(p, xd_sub(h, delta)) / temperature;
}

XD_SCALAR double xd_xtoken_mean_part(double u, double scale, double p, double delta) {
    return xd_sub(xd_mul(u, scale), xd_mul(p, delta));
}

#endif
