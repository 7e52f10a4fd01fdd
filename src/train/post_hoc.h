#ifndef XDI_TRAIN_POST_HOC_H
#define XDI_TRAIN_POST_HOC_H

#include "base/context.h"
#include "train/param.h"

/* Averages of any length after training, from snapshots of a few: docs/questions.md. Source: Karras and others 2024, section
 * 3, appendix C. */

/* An XD_EMA_POWER average at an iteration t; weighs iteration u <= t by (g + 1) u^g / t^(g + 1), g = gamma. */
typedef struct xd_post_hoc_profile {
    int64_t iteration; /* of the last update; at least 1 */
    double gamma;      /* above -1/2 */
    /* Relative width sqrt(g + 1) / ((g + 2) sqrt(g + 3)), at most 1 / sqrt(12); 0 -> gamma. */
    double sigma_rel;
} xd_post_hoc_profile;

/* Reads this rank's elements of targets[tensor] into device memory, ordered on the context's stream. A result other than
 * XD_OK ends the sum. */
typedef xd_result (*xd_post_hoc_read)(void *user, int64_t snapshot, int64_t tensor, void *to);

/* Snapshots and the average to form. */
typedef struct xd_post_hoc_desc {
    /* [snapshot_count] different, in any order; not read with `coefficients`. */
    const xd_post_hoc_profile *snapshots;
    int64_t snapshot_count;     /* at least 1 */
    xd_post_hoc_profile target; /* not after the latest snapshot; iteration 0 -> that of the latest */
    const double *coefficients; /* [snapshot_count] finite; NULL -> for the target */
    const xd_param *targets;    /* [target_count] to fill */
    int64_t target_count;       /* 0 -> only coefficients and error */
    xd_dtype dtype;             /* of parameters read: F32 BF16 F16 F64; NONE -> F32 */
    xd_post_hoc_read read;      /* required with targets; buffers in their dtype */
    void *user;
} xd_post_hoc_desc;

/* Fills parameters with the sum of snapshots whose profile is closest to the target's, in mean square over iterations. Adds
 * f32 coefficients times snapshots in order, by fused multiply-adds from f32 0; reads none with coefficient 0. Buffers are
 * those of the last entry of the list.
 *
 *    coefficients   out: [snapshot_count], sum about 1; may be NULL
 *    error          out: distance over the target profile's norm, 0 with desc->coefficients; may be NULL
 *
 * Local. Coefficients take 2 n^2 + 9 n doubles and n^3 time, targets the largest parameter in f32 and the read dtype.
 * Equal coefficients give the same bits on every device and split.
 * Errors, nothing written: ARGUMENT (profile, coefficients, targets), DTYPE, MEMORY; of `read` (earlier tensors are
 * complete, later unchanged). */
XD_API xd_result xd_post_hoc_average(xd_ctx *ctx, const xd_post_hoc_desc *desc, double *coefficients,
                                     double *error);

#endif
