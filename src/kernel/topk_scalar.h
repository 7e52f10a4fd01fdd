#ifndef XDI_KERNEL_TOPK_SCALAR_H
#define XDI_KERNEL_TOPK_SCALAR_H

#include "kernel/loss_scalar.h"
#include "kernel/topk.h"

/* What top-k losses compute from one entry and from the few values of a row, in double. s and t are the logarithms of the
 * student's and the teacher's probability of an entry. */

/* Smallest tail: 1 - e^-1e-7. Below it the tail is a constant. */
XD_SCALAR double xd_topk_floor(void) {
    return -expm1(-1e-7);
}

/* Adds one shard's sums, relative to its own maximum, to a side whose max is the row's. */
XD_SCALAR void xd_topk_rescale(xd_topk_side *side, double temperature, double max, double outside,
                               double entropy) {
    const double shift = xd_sub(max, side->max) / temperature, f = exp(shift);
    if (!(f > 0.0)) return;
    side->outside = xd_add(side->outside, xd_mul(f, outside));
    side->entropy = xd_add(side->entropy, xd_mul(f, xd_add(entropy, xd_mul(outside, shift))));
}

/* How the student's probability is distributed. */
typedef struct xd_topk_masses {
    double log;                           /* of its sum over all columns */
    double inside;                        /* of the ids */
    double outside_mass, outside_entropy; /* sum of p and of p ln p outside */
    double tail;                          /* logarithm of the outside as an entry */
    bool tail_flows;                      /* it has a gradient: its mass is above the floor */
} xd_topk_masses;

/* `inside`: sum over the ids of powers relative to side->max; `tail`: the outside is an entry of the divergence. */
XD_SCALAR xd_topk_masses xd_topk_student_masses(double inside, const xd_topk_side *side, bool tail) {
    const double total = xd_add(inside, side->outside);
    xd_topk_masses m;
    m.log = log(total);
    m.inside = inside / total;
    m.outside_mass = side->outside / total;
    m.outside_entropy = xd_sub(side->entropy / total, xd_mul(m.log, m.outside_mass));
    m.tail_flows = tail && m.outside_mass >= xd_topk_floor();
    m.tail = log(tail && !m.tail_flows ? xd_topk_floor() : m.outside_mass);
    return m;
}

/* The teacher's: from the logarithm of its sum over the ids, and its side (NULL: `whole` is given) at a temperature. */
typedef struct xd_topk_teacher {
    double whole; /* logarithm of its sum over all columns */
    double mass;  /* of the ids */
    double tail;  /* logarithm of the outside */
} xd_topk_teacher;

XD_SCALAR xd_topk_teacher xd_topk_teacher_masses(double sum, const xd_topk_side *side, double temperature,
                                                 double whole) {
    xd_topk_teacher t;
    double outside = 0.0;
    t.whole = whole;
    if (side) {
        const double max = side->max / temperature, inside = exp(xd_sub(sum, max));
        const double total = xd_add(inside, side->outside);
        t.whole = xd_add(max, log(total));
        outside = side->outside / total;
    }
    t.mass = isfinite(t.whole) ? exp(xd_sub(sum, t.whole)) : (double)NAN;
    if (!side) outside = -expm1(xd_sub(sum, t.whole));
    t.tail = log(outside < xd_topk_floor() ? xd_topk_floor() : outside);
    return t;
}

/* The beta of a divergence: the forward and the reverse KL are its limits 0 and 1. */
XD_SCALAR double xd_topk_beta(xd_divergence divergence, double beta) {
    if (divergence == XD_KL_FORWARD) return 0.0;
    return divergence == XD_KL_REVERSE ? 1.0 : beta;
}

/* An entry of the forward KL, sum T (t - s), gradient S sum(T) - T: returns its part of the loss and adds to *gradient. */
XD_SCALAR double xd_topk_forward(double s, double t, double weight, double mass, double *gradient) {
    const double q = exp(t);
    *gradient = xd_add(*gradient, xd_mul(weight, xd_sub(xd_mul(exp(s), mass), q)));
    return q > 0.0 ? xd_mul(xd_mul(weight, q), xd_sub(t, s)) : 0.0;
}

/* The gradient of the forward KL outside; `mass`: of its entries, including the tail's `tail` when tail_flows. */
XD_SCALAR double xd_topk_forward_outside(const xd_topk_masses *m, double weight, double mass, double tail) {
    return xd_mul(weight, m->tail_flows ? xd_sub(mass, tail / m->outside_mass) : mass);
}

/* The factor r in A = S r of the reverse KL (beta 1) and the JSD, and the entry's part of the loss. */
XD_SCALAR double xd_topk_ratio(double s, double t, double beta, double *loss) {
    const double p = exp(s), q = exp(t), rest = xd_sub(1.0, beta);
    double student, teacher;
    *loss = 0.0;
    if (beta == 1.0) {
        if (p > 0.0) *loss = xd_mul(p, xd_sub(s, t));
        return p > 0.0 ? xd_sub(s, t) : 0.0;
    }
    if (p == 0.0 && q == 0.0) return 0.0;
    xd_log_ratios(xd_sub(t, s), beta, &student, &teacher);
    if (q > 0.0) *loss = xd_mul(xd_mul(beta, q), teacher);
    if (p > 0.0) *loss = xd_add(*loss, xd_mul(xd_mul(rest, p), student));
    return p > 0.0 ? xd_mul(rest, student) : 0.0;
}

/* The part of the outside in the mean of r - offset; `outside`: its r. */
XD_SCALAR double xd_topk_outside_mean(const xd_topk_masses *m, double outside, double offset,
                                      bool zero_outside) {
    return xd_add(xd_mul(xd_sub(outside, offset), m->outside_mass), zero_outside ? m->outside_entropy : 0.0);
}

/* The gradient of an entry with the ratio r. */
XD_SCALAR double xd_topk_backward(double s, double weight, double r, double offset, double mean) {
    return xd_mul(xd_mul(weight, exp(s)), xd_sub(xd_sub(r, offset), mean));
}

/* Adds the outside to a row when all columns outside count, with -100 as the teacher's log-probability. */
XD_SCALAR void xd_topk_zero_outside(const xd_topk_masses *m, double weight, xd_topk_row *row) {
    row->entropy = xd_add(row->entropy, weight);
    row->loss = xd_add(row->loss, xd_mul(weight, xd_add(m->outside_entropy, xd_mul(100.0, m->outside_mass))));
}

/* Log-probabilities that were rounded may add up to more than 1, but not to more than this. */
#define XD_TOPK_MOST 1.1

/* The masses of row r, which has entries. `teacher_mass` is NaN when one of the teacher's values is no number. */
XD_SCALAR void xd_topk_close(const xd_topk_kl_args *a, int64_t r, const xd_topk_masses *m,
                             double teacher_mass, xd_topk_row *row) {
    row->max = a->side[r].max;
    row->log = m->log;
    row->student_mass = m->inside;
    row->teacher_mass = a->unnormalised ? 1.0 : teacher_mass;
    if (!isnan(teacher_mass) && row->teacher_mass <= XD_TOPK_MOST) return;
    row->finding = (int)XD_ROW_NOT_FINITE;
    row->max = teacher_mass;
}

/* What the status tells of row r before its entries are looked at. */
XD_SCALAR double xd_topk_reason(const xd_topk_kl_args *a, int64_t r) {
    return xd_row_reason(a->side[r].max, a->teacher_side ? a->teacher_side[r].max : 0.0);
}

/* Bounds the gradient of row r from its loss: as xd_loss_slope, with 100 for a term of ZERO_OUTSIDE. */
XD_SCALAR double xd_topk_slope(const xd_topk_kl_args *a, int64_t r, const xd_topk_row *row) {
    const double bound = xd_add(256.0, xd_mul(2.0, fabs(row->loss)));
    return xd_mul(xd_mul(fabs(a->row_scale[r]), fabs(a->weight) / a->temperature), bound);
}

/* Judges row r once its loss is known. A row with a finding has neither loss nor masses. */
XD_SCALAR void xd_topk_settle(const xd_topk_kl_args *a, int64_t r, xd_topk_row *row) {
    if (row->finding == (int)XD_ROW_FINE) {
        row->finding = xd_row_judge(xd_mul(a->weight, row->loss), xd_topk_slope(a, r, row));
        if (row->finding != (int)XD_ROW_FINE) row->max = (double)INFINITY;
    }
    if (row->finding == (int)XD_ROW_FINE && !xd_row_fits(a->fixed, a->row_weight, r, row->loss))
        row->finding = (int)XD_ROW_OVERFLOW;
    if (row->finding == (int)XD_ROW_FINE) return;
    row->loss = 0.0;
    row->student_mass = 0.0;
    row->teacher_mass = 0.0;
}

#endif
