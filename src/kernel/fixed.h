#ifndef XDI_KERNEL_FIXED_H
#define XDI_KERNEL_FIXED_H

#include "base/scalar.h"

/* Terms of an xd_fixed are below this. */
#define XD_FIXED_LARGEST 4194304.0

/* A sum that does not depend on the order of its terms or on how they are split over ranks: every term is
 * rounded once to a multiple of 2^-70 and added as integers, value = high * 2^-30 + low * 2^-70. Two sums are
 * combined by adding the limbs, so any integer all-reduce combines them too. Limits: 2^22 for a term, 2^21 terms
 * per rank, 128 ranks. */
typedef struct xd_fixed {
    int64_t high, low;
} xd_fixed;

/* Adds one term. False when the term is not finite or too large, or the sum overflows; the sum is then unchanged. */
XD_SCALAR bool xd_fixed_put(xd_fixed *sum, double term) {
    if (!(fabs(term) < XD_FIXED_LARGEST)) return false;     /* also NaN */
    const double scaled = xd_mul_exact(term, 1073741824.0); /* 2^30 */
    const int64_t high = xd_floor_i64(scaled);
    const int64_t next = sum->high + high;
    if (next >= (int64_t)1 << 55 || next <= -((int64_t)1 << 55)) return false;
    sum->high = next;
    sum->low += xd_nearest_i64(xd_mul_exact(xd_sub(scaled, (double)high), 1099511627776.0)); /* 2^40 */
    return true;
}

/* The sum as a double. The bits depend only on the value, not on how it is split over the limbs. */
XD_SCALAR double xd_fixed_read(xd_fixed sum) {
    const int64_t carry =
        sum.low >> 40; /* whole units of the high limb: the value decides the bits, not the split */
    const int64_t rest = sum.low - carry * ((int64_t)1 << 40);
    return xd_add(xd_mul_exact((double)(sum.high + carry), 1.0 / 1073741824.0),
                  xd_mul_exact((double)rest, 1.0 / 1073741824.0 / 1099511627776.0));
}

/* Adds `other` to *sum. */
XD_SCALAR void xd_fixed_join(xd_fixed *sum, xd_fixed other) {
    sum->high += other.high;
    sum->low += other.low;
}

/* ---- totals ---- */

/* A sum of xd_fixed terms that cannot overflow: whole multiples of 8 are counted, and what is left of a term is below 8 and has
 * its sign. Totals are combined by adding the three words. */
typedef struct xd_total {
    xd_fixed rest;
    int64_t eights;
} xd_total;

/* Adds one term. False when it is not finite or too large; the total is then unchanged. */
XD_SCALAR bool xd_total_put(xd_total *total, double term) {
    if (!(fabs(term) < XD_FIXED_LARGEST)) return false;
    const int64_t eights = (int64_t)xd_mul_exact(term, 0.125); /* towards 0 */
    total->eights += eights;
    return xd_fixed_put(&total->rest, xd_sub(term, xd_mul_exact((double)eights, 8.0)));
}

/* The value: that of an xd_fixed with the same terms, to the bit, where one holds it. */
XD_SCALAR double xd_total_read(xd_total total) {
    const int64_t most = (int64_t)1 << 28;
    if (total.eights > -most && total.eights < most) {
        total.rest.high += total.eights * ((int64_t)1 << 33);
        return xd_fixed_read(total.rest);
    }
    return xd_add(xd_mul_exact((double)total.eights, 8.0), xd_fixed_read(total.rest));
}

/* ---- cells ---- */

/* A cell in fixed point: -infinity is represented by a number below all sums of log-probabilities, NaN by one that
 * stays above every sum, even when the cells of up to 63 ranks are added. */
#define XD_CELL_MINUS_INFINITY (-2097152.0)
#define XD_CELL_NAN ((int64_t)1 << 57)

/* Adds a term to a cell. -infinity is a legal term; NaN and what does not fit make the cell NaN. */
XD_SCALAR void xd_cell_put(xd_fixed *cell, double term) {
    const bool none = term == -(double)INFINITY;
    if (cell->high >= XD_CELL_NAN / 2 || (none && xd_fixed_read(*cell) < XD_CELL_MINUS_INFINITY / 2.0))
        return;
    if (!xd_fixed_put(cell, none ? XD_CELL_MINUS_INFINITY : term)) cell->high = XD_CELL_NAN;
}

/* The value of a cell, NaN or -infinity where it represents them. */
XD_SCALAR double xd_cell_read(xd_fixed cell) {
    const double value = xd_fixed_read(cell);
    if (cell.high >= XD_CELL_NAN / 2) return (double)NAN;
    return value < XD_CELL_MINUS_INFINITY / 2.0 ? -(double)INFINITY : value;
}

#endif
