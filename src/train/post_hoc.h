#ifndef XDI_TRAIN_POST_HOC_H
#define XDI_TRAIN_POST_HOC_H

#include "base/context.h"
#include "train/param.h"

/* Forms averages of any length after training, from snapshots of a few. Source: Karras, Aittala, Lehtinen, Hellsten, Aila,
 * Laine 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and appendix C.
 *
 * The XD_EMA_POWER average with exponent g at iteration t weighs iteration u <= t by (g + 1) u^g / t^(g + 1): its profile.
 * Linear combinations of snapshots' profiles approximate any other; their coefficients combine the snapshots.
 *
 *     two averages with sigma_rel 0.05 and 0.10 (xd_ema_desc), saved now and then
 *     xd_post_hoc_average   once for each target: reads and adds the snapshots, one tensor at a time */

/* An XD_EMA_POWER average at an iteration. */
typedef struct xd_post_hoc_profile {
    int64_t iteration; /* of its last update; at least 1 */
    double gamma;      /* above -1/2: others have no finite square */
    /* The relative width sqrt(g + 1) / ((g + 2) sqrt(g + 3)) instead of gamma: the profile's standard deviation over its
     * length. At most 1 / sqrt(12) (plain mean, exponent 0); 0 -> gamma. */
    double sigma_rel;
} xd_post_hoc_profile;

/* Reads this rank's elements of targets[tensor] from a snapshot into `to`, device memory, ordered on the context's stream.
 * Any result but XD_OK ends the sum. */
typedef xd_result (*xd_post_hoc_read)(void *user, int64_t snapshot, int64_t tensor, void *to);

/* Snapshots, the average that they shall give, and where it goes. */
typedef struct xd_post_hoc_desc {
    const xd_post_hoc_profile
        *snapshots;         /* [snapshot_count] no two equal, in any order; not read with `coefficients` */
    int64_t snapshot_count; /* at least 1 */
    xd_post_hoc_profile target; /* not after the last snapshot; iteration 0 -> the last snapshot's */
    const double
        *coefficients;       /* [snapshot_count] finite, instead of those for the target; NULL -> computed */
    const xd_param *targets; /* [target_count] parameters and buffers to fill */
    int64_t target_count;    /* 0 -> only coefficients and error are computed */
    xd_dtype dtype;          /* of parameters that `read` returns: F32 BF16 F16 F64; NONE -> F32 */
    xd_post_hoc_read read;   /* required with targets; buffers in their own dtype */
    void *user;
} xd_post_hoc_desc;

/* Fills parameters with the sum of snapshots whose profile is closest to the target's, in mean square over iterations. Each
 * snapshot in order adds one fused multiply-add with its f32 coefficient to f32 0. Snapshots with coefficient 0 are not read.
 * Buffers are the last snapshot's.
 *
 *    coefficients   out, [snapshot_count], sum about 1; may be NULL
 *    error          out: distance over the target profile's norm, 0 with desc->coefficients; may be NULL
 *
 * Local. Takes 2 n^2 + 6 n doubles, n^3 time, and the largest parameter in f32 and in the read dtype. With equal coefficients
 * the same bits on every device and for every split.
 * Errors, nothing written: ARGUMENT (a profile; a coefficient; a target), DTYPE, MEMORY. After an error of `read`, earlier
 * tensors are complete, later ones unchanged. */
XD_API xd_result xd_post_hoc_average(xd_ctx *ctx, const xd_post_hoc_desc *desc, double *coefficients,
                                     double *error);

#endif
