#ifndef XDI_KERNEL_ESTIMATE_H
#define XDI_KERNEL_ESTIMATE_H

#include "kernel/types.h"

/* A sum, and the first element whose term was not finite; -1: none. */
typedef struct xd_flagged_sum {
    double value;
    int64_t bad;
} xd_flagged_sum;

/* Number of sums in memory that an entry needs: the first is its result, the others are scratch. */
enum { XD_FLAGGED_SUMS = 257 };

/* Estimates of KL(student || reference), as in loss/estimator.h. */
typedef struct xd_estimate_args {
    const float *logprobs, *reference, *weight; /* [count]; weight NULL -> 1 */
    int64_t count;
    int kind; /* 0, 1, 2: k1, k2, k3 */
    double input_clamp, output_clamp;
    float *values, *gradient; /* [count] or NULL */
    xd_flagged_sum *out;      /* [XD_FLAGGED_SUMS] */
} xd_estimate_args;

#endif
