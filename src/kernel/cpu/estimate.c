/* Estimates from log-probabilities: a plain loop. */

#include "kernel/cpu/internal.h"
#include "kernel/estimate_scalar.h"

XD_PRIVATE xd_result xdi_cpu_estimate(const xd_launch *launch, const xd_estimate_args *a) {
    xd_flagged_sum sum = { 0.0, -1 };
    (void)launch;
    for (int64_t i = 0; i < a->count; i++) xd_estimate_one(a, i, &sum);
    *a->out = sum;
    return XD_OK;
}
