#ifndef XDI_TRAIN_POST_HOC_H
#define XDI_TRAIN_POST_HOC_H

#include "base/context.h"
#include "train/param.h"

/* Averages of any length, formed after training from snapshots of a few that were kept (Karras, Aittala, Lehtinen, Hellsten, Aila,
 * Laine 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and appendix C).
 *
 * The average of XD_EMA_POWER with the exponent g at iteration t contains the weights of iteration u <= t in the proportion
 * (g + 1) u^g / t^(g + 1): its profile. Profiles of snapshots, added with the right coefficients, come close to any other one;
 * the same coefficients then add the snapshots to the average that would have had it.
 *
 *     two averages, exponents xd_post_hoc_gamma of 0.05 and 0.10, followed in training and exported now and then
 *     xd_post_hoc_coefficients   once for each average that is wanted
 *     xd_post_hoc_sum            reads the snapshots, a tensor at a time, and adds them */

/* The exponent of a relative width: the standard deviation of the profile divided by its length, which is
 * sqrt(g + 1) / ((g + 2) sqrt(g + 3)).
 *
 *   sigma_rel   above 0 and at most 1 / sqrt(12), which is that of the plain mean, exponent 0
 *
 * Local, allocates nothing. Errors: ARGUMENT. */
XD_API xd_result xd_post_hoc_gamma(xd_ctx *ctx, double sigma_rel, double *gamma);

/* The relative width of an exponent above -1. Local, allocates nothing. Errors: ARGUMENT. */
XD_API xd_result xd_post_hoc_sigma_rel(xd_ctx *ctx, double gamma, double *sigma_rel);

/* An average of XD_EMA_POWER at a moment. */
typedef struct xd_post_hoc_profile {
    int64_t iteration; /* of its last update; at least 1 */
    double gamma;      /* above -1/2: others have no finite square */
} xd_post_hoc_profile;

/* What there is and what is wanted. */
typedef struct xd_post_hoc_desc {
    const xd_post_hoc_profile *snapshots; /* [snapshot_count] required, no two equal, in any order */
    int64_t snapshot_count;
    xd_post_hoc_profile target; /* not after the last snapshot; iteration 0 -> that of the last snapshot */
} xd_post_hoc_desc;

/* The coefficients with which the profiles of the snapshots come closest to the target's, in the mean square over iterations.
 *
 *   coefficients   out, [snapshot_count], in the order of the snapshots. Snapshots whose profiles are, to the rounding of double,
 *                  sums of others have 0 and need not be read. They add up to about 1
 *   error          out: the distance to the target's profile, divided by the length of that, to about 1e-8; may be NULL
 *
 * Local, memory of 2 n^2 + 5 n numbers while it runs, time n^3. All in double: a pivoted Cholesky factor of the matrix of inner
 * products of profiles of length 1, and steps of refinement. The same on every rank of a kind of machine: its powers are the math
 * library's.
 * Errors, with nothing written: ARGUMENT (no snapshots; an iteration or an exponent out of range; two that are equal; a target
 * after the last snapshot), MEMORY. */
XD_API xd_result xd_post_hoc_coefficients(xd_ctx *ctx, const xd_post_hoc_desc *desc, double *coefficients,
                                          double *error);

/* Brings the elements that this rank has of tensor number `tensor` of the targets from a snapshot to `to`, which is memory of the
 * context's device, ordered on its stream. Whatever is not XD_OK ends the sum. */
typedef xd_result (*xd_post_hoc_read)(void *user, int64_t snapshot, int64_t tensor, void *to);

/* Snapshots to add. */
typedef struct xd_post_hoc_sum_desc {
    const double *coefficients; /* [snapshot_count] required, finite */
    int64_t snapshot_count;
    xd_dtype dtype;        /* of parameters that `read` brings: F32 BF16 F16 F64; NONE -> F32 */
    xd_post_hoc_read read; /* required; buffers come in their own dtype */
    void *user;
} xd_post_hoc_sum_desc;

/* Fills a list of parameters and buffers with the sum of snapshots. Parameters: in f32, from 0, snapshot after snapshot in
 * the order of the coefficients, each by one fused multiply-add with the coefficient rounded to f32; then rounded to the
 * dtype of the target. Snapshots whose coefficient is 0 are not read. Buffers, which are not averaged, are those of the last
 * snapshot of the list. Elements are independent, so the sum of a shard has the bits of the shard of the sum, for every
 * placement.
 *
 *   targets   [count]; one after the other, and of each the snapshots in their order: so are the calls of `read`
 *
 * Local. Memory while it runs: the largest parameter in f32, and in the dtype that is read. Deterministic, the same bits on every
 * device.
 * Errors: ARGUMENT (no snapshots; a coefficient that is not finite; a target without name or elements), DTYPE, MEMORY: nothing is
 * written then. What `read` returned: the tensors before that one are complete, the later ones as before. */
XD_API xd_result xd_post_hoc_sum(xd_ctx *ctx, const xd_post_hoc_sum_desc *desc, const xd_param *targets,
                                 int64_t count);

#endif
