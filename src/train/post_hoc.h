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
 *     two averages, exponents xd_post_hoc_gamma of 0.05 and 0.10, exported now and then
 *     xd_post_hoc_coefficients   once for each target
 *     xd_post_hoc_sum            reads and adds the snapshots, one tensor at a time */

/* Returns the exponent for a relative width, sqrt(g + 1) / ((g + 2) sqrt(g + 3)): the profile's standard deviation over its
 * length.
 *
 *    sigma_rel   above 0, at most 1 / sqrt(12) (plain mean, exponent 0)
 *
 * Local, allocates nothing. Errors: ARGUMENT. */
XD_API xd_result xd_post_hoc_gamma(xd_ctx *ctx, double sigma_rel, double *gamma);

/* Returns the relative width of an exponent above -1. Local, allocates nothing. Errors: ARGUMENT. */
XD_API xd_result xd_post_hoc_sigma_rel(xd_ctx *ctx, double gamma, double *sigma_rel);

/* An XD_EMA_POWER average at an iteration. */
typedef struct xd_post_hoc_profile {
    int64_t iteration; /* of its last update; at least 1 */
    double gamma;      /* above -1/2: others have no finite square */
} xd_post_hoc_profile;

/* Snapshots and target. */
typedef struct xd_post_hoc_desc {
    const xd_post_hoc_profile *snapshots; /* [snapshot_count] required, no two equal, in any order */
    int64_t snapshot_count;
    xd_post_hoc_profile target; /* not after the last snapshot; iteration 0 -> the last snapshot's */
} xd_post_hoc_desc;

/* Returns the coefficients whose sum of profiles is closest to the target's, in mean square over iterations.
 *
 *    coefficients   out, [snapshot_count], in snapshot order, sum about 1; 0 for linearly dependent snapshots: no read
 *    error          out: distance over the target profile's norm, to about 1e-8; may be NULL
 *
 * Local. Takes 2 n^2 + 5 n numbers and n^3 time, in double: pivoted Cholesky of normalized inner products, then refinement.
 * Bits depend on the math library's powers.
 * Errors, nothing written: ARGUMENT (no snapshots; iteration or exponent out of range; two equal; target after the last),
 * MEMORY. */
XD_API xd_result xd_post_hoc_coefficients(xd_ctx *ctx, const xd_post_hoc_desc *desc, double *coefficients,
                                          double *error);

/* Reads this rank's elements of targets[tensor] from a snapshot into `to`, device memory, ordered on the context's stream.
 * Any result but XD_OK ends the sum. */
typedef xd_result (*xd_post_hoc_read)(void *user, int64_t snapshot, int64_t tensor, void *to);

/* The snapshots to add. */
typedef struct xd_post_hoc_sum_desc {
    const double *coefficients; /* [snapshot_count] required, finite */
    int64_t snapshot_count;
    xd_dtype dtype;        /* of parameters that `read` returns: F32 BF16 F16 F64; NONE -> F32 */
    xd_post_hoc_read read; /* required; buffers in their own dtype */
    void *user;
} xd_post_hoc_sum_desc;

/* Fills parameters and buffers with the weighted sum of snapshots. Parameters start at f32 0; in snapshot order each adds
 * one fused multiply-add with its f32 coefficient; the result is rounded to the target's dtype. Snapshots with coefficient 0
 * are not read. Buffers are the last snapshot's. The sum of a shard has the bits of the shard of the sum.
 *
 *    targets   [count]; `read` is called target by target, snapshots in order
 *
 * Local. Takes the largest parameter in f32 and in the read dtype. The same bits on every device.
 * Errors, nothing written: ARGUMENT (no snapshots; coefficient not finite; target without name or elements), DTYPE, MEMORY.
 * After an error of `read`, earlier tensors are complete, later ones unchanged. */
XD_API xd_result xd_post_hoc_sum(xd_ctx *ctx, const xd_post_hoc_sum_desc *desc, const xd_param *targets,
                                 int64_t count);

#endif
