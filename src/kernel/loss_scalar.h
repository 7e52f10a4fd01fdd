#ifndef XDI_KERNEL_LOSS_SCALAR_H
#define XDI_KERNEL_LOSS_SCALAR_H

#include "base/scalar.h"
#include "kernel/loss.h"

/* What losses over rows compute from the few values of a row, in double; kernel/loss.h has the formulas. `hard` and
 * `soft`: the losses that a call has. */

/* ---- references ---- */

/* The references before the first shard. */
XD_SCALAR void xd_loss_no_reference(double *ref) {
    ref[XD_LOSS_MAX] = -(double)INFINITY;
    ref[XD_LOSS_ARG] = -1.0;
    ref[XD_LOSS_TEACHER_AT_ARG] = -(double)INFINITY;
    ref[XD_LOSS_TEACHER_MAX] = -(double)INFINITY;
}

/* Merges one shard's references into those of the shards before it. */
XD_SCALAR void xd_loss_join_reference(double *ref, const double *shard) {
    const bool wins =
        shard[XD_LOSS_ARG] >= 0.0 && (ref[XD_LOSS_ARG] < 0.0 || shard[XD_LOSS_MAX] > ref[XD_LOSS_MAX]);
    const bool broken = isnan(ref[XD_LOSS_MAX]) || isnan(shard[XD_LOSS_MAX]);
    if (wins) {
        ref[XD_LOSS_MAX] = shard[XD_LOSS_MAX];
        ref[XD_LOSS_ARG] = shard[XD_LOSS_ARG];
        ref[XD_LOSS_TEACHER_AT_ARG] = shard[XD_LOSS_TEACHER_AT_ARG];
    }
    if (broken) ref[XD_LOSS_MAX] = (double)NAN;
    if (isnan(shard[XD_LOSS_TEACHER_MAX]) || shard[XD_LOSS_TEACHER_MAX] > ref[XD_LOSS_TEACHER_MAX])
        ref[XD_LOSS_TEACHER_MAX] = shard[XD_LOSS_TEACHER_MAX];
}

/* ---- sums ---- */

/* Adds one shard's sums, which are relative to its own references, to those relative to the row's. A shard whose
 * factor is 0 adds nothing; its sums may be infinite. */
XD_SCALAR void xd_loss_rescale(const xd_loss_args *a, const double *ref, const double *own,
                               const double *sums, int64_t columns, double *total) {
    const double shift = xd_sub(own[XD_LOSS_MAX], ref[XD_LOSS_MAX]), z = shift / a->temperature;
    const double teacher_shift = xd_sub(own[XD_LOSS_TEACHER_MAX], ref[XD_LOSS_TEACHER_MAX]) / a->temperature;
    const double f = exp(z), g = exp(teacher_shift);
    double along = 0.0; /* change of CROSS per unit of the sum that weights it */
    total[XD_LOSS_BAD] = xd_add(total[XD_LOSS_BAD], sums[XD_LOSS_BAD]);
    if (columns == 0) return;
    total[XD_LOSS_HARD] = xd_add(total[XD_LOSS_HARD], xd_mul(exp(shift), sums[XD_LOSS_HARD]));
    if (a->uniform_weight != 0.0) along = xd_mul((double)columns, shift);
    total[XD_LOSS_LINEAR] = xd_add(total[XD_LOSS_LINEAR], xd_add(sums[XD_LOSS_LINEAR], along));
    if (f > 0.0) total[XD_LOSS_SOFT] = xd_add(total[XD_LOSS_SOFT], xd_mul(f, sums[XD_LOSS_SOFT]));
    if (g > 0.0) total[XD_LOSS_TEACHER] = xd_add(total[XD_LOSS_TEACHER], xd_mul(g, sums[XD_LOSS_TEACHER]));
    const bool reverse = a->divergence == XD_KL_REVERSE;
    const double factor = reverse ? f : g, mass = sums[reverse ? XD_LOSS_SOFT : XD_LOSS_TEACHER];
    if (a->divergence == XD_JSD || !(factor > 0.0)) return;
    along = z;
    if (a->divergence == XD_KL_FORWARD) along = xd_sub(teacher_shift, z);
    if (reverse)
        along = xd_sub(z, xd_sub(own[XD_LOSS_TEACHER_AT_ARG], ref[XD_LOSS_TEACHER_AT_ARG]) / a->temperature);
    total[XD_LOSS_CROSS] =
        xd_add(total[XD_LOSS_CROSS], xd_mul(factor, xd_add(sums[XD_LOSS_CROSS], xd_mul(mass, along))));
}

/* ---- the scalars of a row ---- */

/* ln(student/mixture) and ln(teacher/mixture) from d, the logarithm of teacher/student, without cancellation
 * when d is small. */
XD_SCALAR void xd_log_ratios(double d, double beta, double *student, double *teacher) {
    const double rest = xd_sub(1.0, beta);
    if (fabs(d) < 1.0) {
        *student = -log1p(xd_mul(beta, expm1(d)));
        *teacher = -log1p(xd_mul(rest, expm1(-d)));
    } else if (d > 0.0) {
        *teacher = -log(xd_add(beta, xd_mul(rest, exp(-d))));
        *student = xd_sub(*teacher, d);
    } else {
        *student = -log(xd_add(rest, xd_mul(beta, exp(d))));
        *teacher = xd_add(*student, d);
    }
}

XD_SCALAR void xd_loss_soft_scalars(const xd_loss_args *a, const double *total, xd_loss_row *row) {
    const double top_gap = xd_sub(row->teacher_max, row->teacher_at_arg) / a->temperature;
    const double soft = total[XD_LOSS_SOFT], teacher = total[XD_LOSS_TEACHER], cross = total[XD_LOSS_CROSS];
    double unused;
    row->soft_log = log(soft);
    row->teacher_log = log(teacher);
    switch (a->divergence) {
    case XD_KL_FORWARD: row->soft = xd_add(cross / teacher, log(soft / teacher)); break;
    case XD_SOFT_CE: row->soft = xd_sub(row->soft_log, cross / teacher); break;
    case XD_KL_REVERSE:
        row->mean = cross / soft;
        row->soft = xd_add(row->mean, xd_add(log(teacher / soft), top_gap));
        break;
    default:
        xd_log_ratios(xd_sub(xd_sub(-top_gap, row->teacher_log), -row->soft_log), a->beta, &row->top,
                      &unused);
        break;
    }
}

XD_SCALAR void xd_loss_take_references(const double *ref, xd_loss_row *row) {
    row->max = ref[XD_LOSS_MAX];
    row->teacher_max = ref[XD_LOSS_TEACHER_MAX];
    row->teacher_at_arg = ref[XD_LOSS_TEACHER_AT_ARG];
    row->argmax = ref[XD_LOSS_ARG];
}

/* From the sums of the whole row, of `size` columns; its references are set already. */
XD_SCALAR void xd_loss_scalars(const xd_loss_args *a, bool hard, bool soft, int64_t size, const double *total,
                               xd_loss_row *row) {
    if (!a->fixed && !(total[XD_LOSS_BAD] == 0.0)) row->finding = (int)XD_ROW_NOT_FINITE;
    if (hard) {
        row->hard_log = log(total[XD_LOSS_HARD]);
        row->hard = xd_mul(a->target_weight, xd_sub(row->hard_log, total[XD_LOSS_TARGET]));
    }
    if (hard && a->uniform_weight != 0.0) {
        const double all = xd_sub(xd_mul((double)size, row->hard_log), total[XD_LOSS_LINEAR]);
        row->hard = xd_add(row->hard, xd_mul(a->uniform_weight, all));
    }
    if (soft) xd_loss_soft_scalars(a, total, row);
    if (row->finding == (int)XD_ROW_FINE &&
        !(isfinite(row->hard) && isfinite(row->soft) && isfinite(row->max)))
        row->finding = (int)XD_ROW_NOT_FINITE;
}

/* ---- what f32 and xd_fixed can hold ---- */

/* Largest loss of a row and element of its gradient, which callers get as f32 or bf16. */
#define XD_ROW_LARGEST 3.38e38

/* The row's finding when its loss, or an element of its gradient, which is at most `slope`, is larger. */
XD_SCALAR int xd_row_judge(double loss, double slope) {
    return fabs(loss) <= XD_ROW_LARGEST && slope <= XD_ROW_LARGEST ? (int)XD_ROW_FINE
                                                                   : (int)XD_ROW_NOT_FINITE;
}

/* Whether the row's term of a total is one that the total can take. */
XD_SCALAR bool xd_row_fits(bool fixed, const float *row_weight, int64_t r, double loss) {
    const double term = xd_mul(row_weight ? (double)row_weight[r] : 1.0, loss);
    return !fixed || fabs(term) < XD_FIXED_LARGEST;
}

/* What the status tells of a row whose numbers are not finite: the largest logit of the side where that is the reason, else
 * infinity, for a loss or a gradient that is too large. */
XD_SCALAR double xd_row_reason(double student, double teacher) {
    return !isfinite(student) ? student : !isfinite(teacher) ? teacher : (double)INFINITY;
}

/* The loss of a row that callers see, from its two losses and their weights. */
XD_SCALAR double xd_loss_of_row(double hard_weight, double hard, double soft_weight, double soft) {
    return xd_add(xd_mul(hard_weight, hard), xd_mul(soft_weight, soft));
}

/* Bounds the gradient of row r from its losses: a probability is at most 1, and p ln(p/q) at most the divergence and 1/e. */
XD_SCALAR double xd_loss_slope(const xd_loss_args *a, int64_t r, const xd_loss_row *row) {
    const double hard = xd_mul(3.0, fabs(a->hard_weight));
    const double soft =
        xd_mul(fabs(a->soft_weight) / a->temperature, xd_add(2.0, xd_mul(2.0, fabs(row->soft))));
    return xd_mul(fabs(a->row_scale[r]), xd_add(hard, soft));
}

/* Judges row r once its losses are known. A row with a finding has no loss. */
XD_SCALAR void xd_loss_settle(const xd_loss_args *a, int64_t r, xd_loss_row *row) {
    if (row->finding == (int)XD_ROW_FINE)
        row->finding = xd_row_judge(xd_loss_of_row(a->hard_weight, row->hard, a->soft_weight, row->soft),
                                    xd_loss_slope(a, r, row));
    if (row->finding == (int)XD_ROW_FINE && !(xd_row_fits(a->fixed, a->row_weight, r, row->hard) &&
                                              xd_row_fits(a->fixed, a->row_weight, r, row->soft)))
        row->finding = (int)XD_ROW_OVERFLOW;
    if (row->finding == (int)XD_ROW_FINE) return;
    row->hard = 0.0;
    row->soft = 0.0;
}

/* A finding that was made after the row's loss. */
XD_SCALAR void xd_loss_reject(xd_loss_row *row) {
    row->finding = (int)XD_ROW_NOT_FINITE;
    row->max = (double)INFINITY;
    row->hard = 0.0;
    row->soft = 0.0;
}

/* JSD: from the two sums of mixture over the whole row. */
XD_SCALAR void xd_loss_mixture_scalars(const xd_loss_args *a, int64_t r, double teacher, double student,
                                       xd_loss_row *row) {
    row->mean = student;
    row->soft = xd_add(xd_mul(a->beta, teacher), xd_mul(xd_sub(1.0, a->beta), xd_add(student, row->top)));
    if (!isfinite(row->soft)) row->finding = (int)XD_ROW_NOT_FINITE;
    xd_loss_settle(a, r, row);
}

/* ---- the gradient at one column, whose logits are x and y ---- */

/* d soft / d (x / tau). */
XD_SCALAR double xd_loss_soft_gradient(const xd_loss_args *a, const xd_loss_row *row, double x, double y) {
    const double z = xd_sub(x, row->max) / a->temperature, s = xd_sub(z, row->soft_log), p = exp(s);
    double student, teacher;
    if (a->divergence == XD_KL_REVERSE) {
        const double u = xd_sub(y, row->teacher_at_arg) / a->temperature;
        return p > 0.0 ? xd_mul(p, xd_sub(xd_sub(z, u), row->mean)) : 0.0;
    }
    const double t = xd_sub(xd_sub(y, row->teacher_max) / a->temperature, row->teacher_log);
    if (a->divergence != XD_JSD) return xd_sub(p, exp(t));
    if (p == 0.0) return 0.0;
    xd_log_ratios(xd_sub(t, s), a->beta, &student, &teacher);
    return xd_mul(xd_mul(p, xd_sub(1.0, a->beta)), xd_sub(xd_sub(student, row->top), row->mean));
}

/* With the weights of the losses; `target`: the column is the label's. */
XD_SCALAR double xd_loss_hard_gradient(const xd_loss_args *a, const xd_loss_row *row, double x, bool target) {
    const double p = exp(xd_sub(xd_sub(x, row->max), row->hard_log));
    return xd_mul(a->hard_weight, xd_sub(xd_sub(p, target ? a->target_weight : 0.0), a->uniform_weight));
}

/* What a row's scale multiplies. */
XD_SCALAR double xd_loss_add_soft(const xd_loss_args *a, double hard, double soft) {
    return xd_add(hard, xd_mul(a->soft_weight / a->temperature, soft));
}

#endif
