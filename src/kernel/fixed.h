#ifndef XDI_KERNEL_FIXED_H
#define XDI_KERNEL_FIXED_H

#include "base/config.h"

/* A sum that does not depend on the order of its terms or on how they are cut over ranks: every term is
 * rounded once to a multiple of 2^-70 and added as integers, value = high * 2^-30 + low * 2^-70. Two sums are
 * joined by adding the limbs, so any integer all-reduce joins them too. Room: 2^22 a term, 2^21 terms a rank,
 * 128 ranks. */
typedef struct xd_fixed {
    int64_t high, low;
} xd_fixed;

/* Adds one term. False when the term is not finite or the sum runs over; the sum is then unchanged. */
XD_API bool xd_fixed_add(xd_fixed *sum, double term);

/* The sum as a double, rounded the same way for the same limbs' value. */
XD_API double xd_fixed_value(xd_fixed sum);

#endif
