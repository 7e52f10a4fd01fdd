/* Sums of integers in place of floating point: the same whatever their order. */

#include "kernel/fixed.h"

#include <math.h>

/* floor and rint of what is below 2^52 and, to be rounded, not negative: without a call, and without a branch
 * that no processor could foresee. */
static inline int64_t xdi_fixed_floor(double x) {
    const int64_t whole = (int64_t)x;
    return whole - ((double)whole > x ? 1 : 0);
}

static inline int64_t xdi_fixed_nearest(double x) {
    const int64_t below = (int64_t)x;
    const double rest = x - (double)below;
    const int up = rest > 0.5, tie = rest == 0.5;
    return below + (up | (tie & (int)(below & 1)));
}

XD_API bool xd_fixed_add(xd_fixed *sum, double term) {
    if (!(fabs(term) < 4194304.0)) return false; /* also NaN */
    const double scaled = term * 1073741824.0;   /* 2^30: exact */
    const int64_t high = xdi_fixed_floor(scaled);
    const int64_t next = sum->high + high;
    if (next >= (int64_t)1 << 55 || next <= -((int64_t)1 << 55)) return false;
    sum->high = next;
    sum->low += xdi_fixed_nearest((scaled - (double)high) * 1099511627776.0); /* 2^40 */
    return true;
}

XD_API double xd_fixed_value(xd_fixed sum) {
    const int64_t carry =
        sum.low >> 40; /* whole units of the high limb: the value decides the bits, not the split */
    const int64_t rest = sum.low - carry * ((int64_t)1 << 40);
    return (double)(sum.high + carry) * (1.0 / 1073741824.0) +
           (double)rest * (1.0 / 1073741824.0 / 1099511627776.0);
}
