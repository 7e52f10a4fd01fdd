#include <math.h>

XD_API bool xd_fixed_add(xd_fixed *sum, double term) {
    if (!(fabs(term) < 4194304.0)) return false; /* also NaN */
    const double scaled = term * 1073741824.0;   /* 2^30: exact */
    const double high = floor(scaled);
    const int64_t next = sum->high + (int64_t)high;
    if (next >= (int64_t)1 << 55 || next <= -((int64_t)1 << 55)) return false;
    sum->high = next;
    sum->low += (int64_t)rint((scaled - high) * 1099511627776.0); /* 2^40 */
    return true;
}

XD_API double xd_fixed_value(xd_fixed sum) {
    const int64_t carry =
        sum.low >> 40; /* whole units of the high limb: the value decides the bits, not the split */
    const int64_t rest = sum.low - carry * ((int64_t)1 << 40);
    return (double)(sum.high + carry) * (1.0 / 1073741824.0) +
           (double)rest * (1.0 / 1073741824.0 / 1099511627776.0);
}
