/* Numbers drawn for tests of INVARIANT mode's sums, and sums as they compare. */
#ifndef EXACT_NUMBERS_H
#define EXACT_NUMBERS_H

#include "xdistill.h"

static inline uint64_t random_bits(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state ^ (*state >> 29);
}

static inline double uniform(uint64_t *state) { /* in [0, 1) */
    return (double)(random_bits(state) >> 11) / 9007199254740992.0;
}

/* The value in units of 2^-70: high above, low within [0, 2^40). */
static inline xd_fixed normal(xd_fixed sum) {
    const int64_t unit = (int64_t)1 << 40;
    int64_t carry = sum.low / unit;
    if (sum.low % unit < 0) carry--;
    sum.high += carry;
    sum.low -= carry * unit;
    return sum;
}

#endif
