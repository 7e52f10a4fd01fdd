#ifndef XDI_KERNEL_MFT_SCALAR_H
#define XDI_KERNEL_MFT_SCALAR_H

#include "kernel/loss_scalar.h"
#include "kernel/mft.h"

/* What minimal fine-tuning and the cosine compute from the few values of a row, in double; kernel/mft.h has the
 * formulas. */

/* Judges row r once its loss is known; `slope` bounds its gradient where the row's factor is 1. A loss with a finding is 0. */
XD_SCALAR void xd_mft_settle(const xd_mft_args *a, int64_t r, double slope, xd_loss_row *row) {
    const double factor = fabs(xd_mul(a->row_scale[r], a->weight));
    row->finding = xd_row_judge(xd_mul(a->weight, row->soft), xd_mul(factor, slope));
    if (row->finding == (int)XD_ROW_FINE && !xd_row_fits(a->fixed, a->row_weight, r, row->soft))
        row->finding = (int)XD_ROW_OVERFLOW;
    if (row->finding != (int)XD_ROW_FINE) row->soft = 0.0;
}

/* How far the teacher is moved towards the label: until the label's probability is above the favourite's (the largest
 * one) by the threshold or, where the label is the favourite, until it has increased by that much. */
XD_SCALAR double xd_mft_share(double favourite, double label, bool right, double threshold) {
    if (!right)
        return xd_add(xd_sub(favourite, label), threshold) /
               xd_add(xd_sub(xd_add(1.0, favourite), label), 1e-7);
    const double wanted = label > xd_sub(1.0, threshold) ? 1.0 : xd_add(label, threshold);
    return xd_sub(wanted, favourite) / xd_add(xd_sub(1.0, favourite), 1e-7);
}

/* p ln p, 0 at 0. */
XD_SCALAR double xd_mft_entropy(double p) {
    return p > 0.0 ? xd_mul(p, log(p)) : 0.0;
}

/* The loss entries had the teacher as the student. Sums include the 1 of the largest element but, computed in f32, may
 * still be below 1; then a favourite would have a probability above 1, for which mu is meaningless. */
XD_SCALAR void xd_mft_change_sides(xd_loss_row *row) {
    const double max = row->max, log_sum = row->soft_log;
    row->max = row->teacher_max;
    row->teacher_max = max;
    row->soft_log = fmax(row->teacher_log, 0.0);
    row->teacher_log = fmax(log_sum, 0.0);
}

/* The row from the logits x and y at the label l, `right` where that is the teacher's favourite:
 *   sum q ln(q/p) = (1 - mu) (KL(t || p) - t_l ln t_l) + (1 - t_l) (1 - mu) ln(1 - mu) + q_l ln q_l - mu ln p_l. */
XD_SCALAR void xd_mft_correct(const xd_mft_args *a, int64_t r, double x, double y, bool right,
                              xd_loss_row *row) {
    const double log_p = xd_sub(xd_sub(x, row->max) / a->temperature, row->soft_log);
    const double label = exp(xd_sub(xd_sub(y, row->teacher_max) / a->temperature, row->teacher_log));
    const double mu = xd_mft_share(exp(-row->teacher_log), label, right, a->threshold),
                 rest = xd_sub(1.0, mu);
    row->mean = mu;
    row->soft = xd_add(xd_mul(rest, xd_sub(row->soft, xd_mft_entropy(label))),
                       xd_mul(xd_mft_entropy(rest), xd_sub(1.0, label)));
    row->soft = xd_add(row->soft, xd_mft_entropy(xd_add(xd_mul(rest, label), mu)));
    row->soft = xd_sub(row->soft, xd_mul(mu, log_p));
    xd_mft_settle(a, r, 3.0 / a->temperature, row);
}

/* The term and the gradient of the column whose logits are x and y; `label`: it is the label's. */
XD_SCALAR void xd_mft_column(const xd_mft_args *a, int64_t r, double x, double y, bool label, double *term,
                             double *gradient) {
    const xd_loss_row *row = a->row + r;
    const double log_p = xd_sub(xd_sub(x, row->max) / a->temperature, row->soft_log);
    const double log_t = xd_sub(xd_sub(y, row->teacher_max) / a->temperature, row->teacher_log);
    const double q = xd_add(xd_mul(xd_sub(1.0, row->mean), exp(log_t)), label ? row->mean : 0.0);
    *term = q > 0.0 ? xd_mul(xd_mul(a->weight, q), xd_sub(log(q), log_p)) : 0.0;
    *gradient = xd_mul(xd_mul(a->row_scale[r], a->weight) / a->temperature, xd_sub(exp(log_p), q));
}

/* ---- cosine ---- */

/* The power of two above the largest magnitude of a side; false when it is not finite. */
XD_SCALAR bool xd_cosine_exponent(double largest, int *exponent) {
    *exponent = 0;
    if (!isfinite(largest)) return false;
    frexp(largest, exponent);
    return true;
}

/* The row from its sums, by XD_COSINE_STUDENT and so on, of sides over 2^exponents; `fits`: these are finite. */
XD_SCALAR void xd_cosine_row(const xd_mft_args *a, int64_t r, const double *sums, const int *exponents,
                             bool fits, xd_loss_row *row) {
    const int x = exponents[XD_MFT_STUDENT], y = exponents[XD_MFT_TEACHER];
    const double both = ldexp(sums[XD_COSINE_BOTH], x + y);
    row->max = ldexp(sqrt(sums[XD_COSINE_STUDENT]), x);
    row->teacher_max = ldexp(sqrt(sums[XD_COSINE_TEACHER]), y);
    row->mean = both / xd_mul(fmax(row->max, XD_COSINE_LEAST), fmax(row->teacher_max, XD_COSINE_LEAST));
    row->soft = fits ? xd_sub(1.0, row->mean) : (double)NAN;
    xd_mft_settle(a, r, 3.0 / fmax(row->max, XD_COSINE_LEAST), row);
}

/* What x and y are multiplied by in the gradient, d cos / d x = (y/|y| - cos x/|x|) / |x|; nothing where x has no
 * direction. */
XD_SCALAR void xd_cosine_slope(const xd_mft_args *a, int64_t r, double *of_x, double *of_y) {
    const xd_loss_row *row = a->row + r;
    const double scale = xd_mul(a->row_scale[r], a->weight);
    *of_x = *of_y = 0.0;
    if (row->max < XD_COSINE_LEAST) return;
    *of_x = xd_mul(scale, row->mean) / row->max / row->max;
    *of_y = -scale / row->max / fmax(row->teacher_max, XD_COSINE_LEAST);
}

#endif
