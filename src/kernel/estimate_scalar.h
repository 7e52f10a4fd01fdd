#ifndef XDI_KERNEL_ESTIMATE_SCALAR_H
#define XDI_KERNEL_ESTIMATE_SCALAR_H

#include "kernel/estimate.h"
#include "kernel/loss_scalar.h"

/* Estimates of KL from log-probabilities. */

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
XD_SCALAR void xd_estimate_one(const xd_estimate_args *a, int64_t i, xd_flagged_sum *sum) {
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
