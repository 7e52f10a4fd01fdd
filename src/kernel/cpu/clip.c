/* The factor that clips gradients. */

#include "kernel/optimizer.h"

#include <math.h>

static double xdi_clip_norm(const xd_norm_sum *sum, xd_norm_type type, bool exact) {
    if (sum->nan > 0) return (double)NAN;
    if (sum->not_finite > 0) return (double)INFINITY;
    if (type == XD_NORM_MAX) return sum->largest;
    const double total = exact ? xd_norm_limbs_value(sum->limbs) : sum->sum;
    return type == XD_NORM_L2 ? sqrt(total) : total;
}

XD_API float xd_clip_coefficient(xd_clip_form form, double max_norm, double norm) {
    const double c = max_norm / (norm + 1e-6);
    if (form == XD_CLIP_ALWAYS) return isnan(c) ? NAN : (float)(c < 1.0 ? c : 1.0);
    if (form == XD_CLIP_ABOVE && !isfinite(norm)) return 1.0f;
    return c < 1.0 ? (float)c : 1.0f;
}

/* clip: the norm, the factor, the finding, from the sum of all ranks. */
XD_API xd_result xd_clip_cpu(const xd_launch *launch, const xd_clip_args *args) {
    (void)launch;
    *args->norm = xdi_clip_norm(args->sum, args->type, args->exact);
    *args->not_finite = args->sum->not_finite;
    *args->coefficient =
        args->max_norm > 0.0 ? xd_clip_coefficient(args->form, args->max_norm, *args->norm) : 1.0f;
    if (args->status) args->status->not_finite += args->sum->not_finite;
    return XD_OK;
}
