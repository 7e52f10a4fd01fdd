/* The factor that clips gradients. */

#include "kernel/optimizer_scalar.h"

XD_API float xd_clip_coefficient(xd_clip_form form, double max_norm, double norm) {
    return xd_clip_factor(form, max_norm, norm);
}

/* clip: the norm, the factor, the finding, from the sum of all ranks. */
XD_API xd_result xd_clip_cpu(const xd_launch *launch, const xd_clip_args *args) {
    (void)launch;
    xd_clip_write(args);
    return XD_OK;
}
