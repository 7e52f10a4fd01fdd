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
    return xd_mul(weight, (double)((u > v) - (u < v)));
}

/* The mean slope of a chunk from its sum, weighted by values that have the factor. */
XD_SCALAR double xd_uld_mean(double sum, double factor) {
    return factor > 0.0 ? sum / factor : 0.0;
}

#endif
