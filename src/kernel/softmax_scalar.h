#ifndef XDI_KERNEL_SOFTMAX_SCALAR_H
#define XDI_KERNEL_SOFTMAX_SCALAR_H

#include "base/scalar.h"
#include "kernel/softmax.h"

/* The sum of a partial, relative to this maximum. */
XD_SCALAR double xd_softmax_part(const xd_softmax_args *a, const double *part, double max) {
    return xd_mul(part[XD_SOFTMAX_SUM], exp(xd_sub(part[XD_SOFTMAX_MAX], max) / a->temperature));
}

/* Merges a row's partials in rank order. The result's sum is relative to its max; NaN propagates. */
XD_SCALAR void xd_softmax_join(const xd_softmax_args *a, int64_t row, double *whole) {
    whole[XD_SOFTMAX_MAX] = -(double)INFINITY;
    whole[XD_SOFTMAX_ARG] = -1.0;
    whole[XD_SOFTMAX_SUM] = 0.0;
    for (int i = 0; i < a->vocab.shards; i++) {
        const double *part = a->all + i * a->all_stride + row * XD_SOFTMAX_PARTS;
        const bool first = whole[XD_SOFTMAX_ARG] < 0.0 && part[XD_SOFTMAX_ARG] >= 0.0;
        if (!first && !(part[XD_SOFTMAX_MAX] > whole[XD_SOFTMAX_MAX])) continue;
        whole[XD_SOFTMAX_MAX] = part[XD_SOFTMAX_MAX];
        whole[XD_SOFTMAX_ARG] = part[XD_SOFTMAX_ARG];
    }
    for (int i = 0; i < a->vocab.shards; i++) {
        const double *part = a->all + i * a->all_stride + row * XD_SOFTMAX_PARTS;
        if (isnan(part[XD_SOFTMAX_MAX])) whole[XD_SOFTMAX_SUM] = (double)NAN;
        if (part[XD_SOFTMAX_MAX] > -(double)INFINITY)
            whole[XD_SOFTMAX_SUM] =
                xd_add(whole[XD_SOFTMAX_SUM], xd_softmax_part(a, part, whole[XD_SOFTMAX_MAX]));
    }
}

/* The log-sum-exp of such a row. */
XD_SCALAR double xd_softmax_log_sum_exp(const double *whole, double temperature) {
    return xd_add(whole[XD_SOFTMAX_MAX] / temperature, log(whole[XD_SOFTMAX_SUM]));
}

#endif
