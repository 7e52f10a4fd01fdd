#ifndef XDI_KERNEL_ULD_SCALAR_H
#define XDI_KERNEL_ULD_SCALAR_H

#include "kernel/loss_scalar.h"
#include "kernel/uld.h"

/* A probability of at least the floor. */
XD_SCALAR double xd_uld_floored(double p) {
    return p > XD_ULD_FLOOR ? p : XD_ULD_FLOOR;
}

/* A term of the generalised JSD of probabilities, and its derivative with respect to u; u and v are raised to the floor
 * first. */
XD_SCALAR double xd_jsd_entry(double u, double v, double beta, double *slope) {
    const double p = xd_uld_floored(u), q = xd_uld_floored(v);
    const double s = log(p), t = log(q), rest = xd_sub(1.0, beta);
    double student, teacher, value;
    if (beta == 0.0) {
        value = xd_mul(q, xd_sub(t, s));
        *slope = -q / p;
    } else if (beta == 1.0) {
        value = xd_mul(p, xd_sub(s, t));
        *slope = xd_add(xd_sub(s, t), 1.0);
    } else {
        xd_log_ratios(xd_sub(t, s), beta, &student, &teacher);
        value = xd_add(xd_mul(xd_mul(beta, q), teacher), xd_mul(xd_mul(rest, p), student));
        *slope = xd_mul(rest, student);
    }
    if (!(u >= XD_ULD_FLOOR)) *slope = 0.0;
    return value;
}

/* ---- chunks ---- */

/* The derivative of weight |u - v| with respect to u. */
XD_SCALAR double xd_uld_sign(double weight, double u, double v) {
    return weight * (double)((u > v) - (u < v));
}

/* The mean slope of a chunk from its sum, weighted by values that have the factor. */
XD_SCALAR double xd_uld_mean(double sum, double factor) {
    return factor > 0.0 ? sum / factor : 0.0;
}

/* ---- estimates ---- */

XD_SCALAR double xd_estimate_value(int kind, double rho) {
    if (kind == 0) return -rho;
    return kind == 1 ? xd_mul(xd_mul(0.5, rho), rho) : xd_sub(expm1(rho), rho);
}

/* With respect to the student's log-probability, which enters rho with a minus sign. */
XD_SCALAR double xd_estimate_slope(int kind, double rho) {
    if (kind == 0) return 1.0;
    return kind == 1 ? -rho : -expm1(rho);
}

/* Adds element i to the sum, and writes its value and slope where they are requested. */
XD_SCALAR void xd_estimate_one(const xd_estimate_args *a, int64_t i, xd_uld_sum *sum) {
    const double free_rho = xd_sub((double)a->reference[i], (double)a->logprobs[i]);
    const double rho = fmax(-a->input_clamp, fmin(a->input_clamp, free_rho));
    const double weight = a->weight ? (double)a->weight[i] : 1.0;
    double value = isnan(free_rho) ? free_rho : xd_estimate_value(a->kind, rho);
    double slope = rho == free_rho ? xd_estimate_slope(a->kind, rho) : 0.0;
    if (a->output_clamp != 0.0 && fabs(value) > a->output_clamp) {
        value = value > 0.0 ? a->output_clamp : -a->output_clamp;
        slope = 0.0;
    }
    const double term = xd_mul(weight, value), gradient = xd_mul(weight, slope);
    const bool fine =
        fabs(value) <= XD_ROW_LARGEST && fabs(term) <= XD_ROW_LARGEST && fabs(gradient) <= XD_ROW_LARGEST;
    const bool counts = weight != 0.0; /* NaN counts */
    if (counts && !fine && sum->bad < 0) sum->bad = i;
    if (counts && fine) sum->value = xd_add(sum->value, term);
    if (a->values) a->values[i] = (counts ? fine : fabs(value) <= XD_ROW_LARGEST) ? (float)value : 0.0f;
    if (a->gradient) a->gradient[i] = counts && fine ? (float)gradient : 0.0f;
}

#endif
