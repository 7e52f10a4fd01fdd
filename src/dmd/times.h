#ifndef XDI_DMD_TIMES_H
#define XDI_DMD_TIMES_H

#include "base/philox.h"
#include "dmd/noise_schedule.h"

/* Times of samples, drawn from the distributions that trainers of diffusion models use. A time is a pure function of one number,
 * its draw, which the caller gives (xd_time_of_draw) or which comes from Philox by seed, stream, step and sample (xd_times_draw):
 * any rank can compute any sample's. Host arithmetic in double; nothing is collective or allocates. */

/* The distributions, by what a draw is. */
typedef enum xd_time_kind {
    /* The draw is uniform in [0, 1]: */
    XD_TIME_UNIFORM = 0, /* U (max_t - min_t) + min_t */
    XD_TIME_SHIFTED,     /* u = U (max_t - min_t) + min_t;  shift u / (u (shift - 1) + 1) */
    XD_TIME_LOG_NORMAL,  /* exp of a normal (mean, deviation), truncated to [ln min_t, ln max_t] */
    XD_TIME_LOG_T, /* the same of Student's t with `freedom` degrees of freedom, times deviation, plus mean */
    /* The draw is a normal number of mean 0 and deviation 1: */
    XD_TIME_LOGIT_NORMAL, /* sigmoid(Z deviation + mean) (max_t - min_t) + min_t */
    /* The draw is an index in [first, last]: */
    XD_TIME_GRID, /* time of the index in a grid of `count` times (xd_noise_grid_time; EDM's is its polynomial one) */
    XD_TIME_LIST, /* list[index] */
    XD_TIME_STEP /* index / count, rounded up where trunc(t count) would be less: trainers with integer times */
} xd_time_kind;

/* A distribution with its settings: a plain value, from xd_times_defaults or by hand. */
typedef struct xd_time_sampler {
    xd_time_kind kind;
    double min_t, max_t;    /* 0 <= min_t < max_t; times of all kinds but LIST and STEP are clamped to
                             * them. The LOG kinds take ln(max(min_t, 1e-12)) */
    double shift;           /* SHIFTED: >= 1 */
    double mean, deviation; /* of the normal and t kinds; deviation > 0 */
    double freedom;         /* LOG_T: > 0 */
    const double *list;     /* LIST: [list_count] >= 2 times, descending from at most max_t, the last 0;
                             * borrowed */
    int64_t list_count;
    bool list_to_end; /* LIST: indices include the last, so the time can be 0; false -> [0, list_count - 2] */
    int64_t first, last; /* GRID and STEP: indices, both included */
    int64_t count;       /* of the grid, or the steps: at most 2^53 */
    int64_t chunk;       /* xd_times_draw_frames: frames that share a time */
    xd_noise_kind grid;  /* GRID: EDM or FLOW (even steps) */
    xd_dtype dtype;      /* of the times: NONE or F64 -> double; F32: each is an f32, and they are clamped to
                          * those f32s in the range that are nearest to its ends */
} xd_time_sampler;

/* Whose recipe. */
typedef enum xd_dmd_recipe {
    XD_DMD_MODELOPT = 0, /* NVIDIA Model-Optimizer */
    XD_DMD_FASTGEN,      /* NVlabs FastGen */
    XD_DMD_ORIGINAL      /* DMD2 by its authors */
} xd_dmd_recipe;

/* Model-Optimizer: SHIFTED by 5 in [0.001, 0.999] of mean 0 and deviation 1, f32. FastGen: UNIFORM in [0.002, 80] (narrow it:
 * xd_times_narrow), mean -1.1, deviation 2, shift 5, freedom 0.01, double. Original: STEP in [20, 980] of 1000, range [0, 1].
 * Fields that the kind does not use are filled, so that the kind can be changed alone; GRID: count 1000, and the indices [0,
 * 999] of FLOW (Model-Optimizer) or [2, 998] of EDM (FastGen). Pure. */
XD_API xd_time_sampler xd_times_defaults(xd_dmd_recipe recipe);

/* Intersects the sampler's range with the schedule's. Pure. */
XD_API void xd_times_narrow(xd_time_sampler *sampler, const xd_noise_schedule *schedule);

/* Checks a sampler; with a schedule (NULL: none), also that no time can lie outside its range. Local. Errors: ARGUMENT for a
 * field that does not fit the description above, with the numbers; DTYPE for a type other than NONE, F32 and F64. */
XD_API xd_result xd_times_check(xd_ctx *ctx, const xd_time_sampler *sampler,
                                const xd_noise_schedule *schedule);

/* The time of one draw. Local. Errors, with *out untouched: those of xd_times_check without a schedule; ARGUMENT for a draw outside
 * [0, 1], an index outside [first, last] or with a fraction, or a NaN. */
XD_API xd_result xd_time_of_draw(xd_ctx *ctx, const xd_time_sampler *sampler, double draw, double *out);

/* Times of `count` samples from random->sample on, into times [count]: sample i has block 0 of the numbers of random with sample i.
 * Its number is the global one in the step, so the times do not depend on the mesh. Normals are the inverse distribution of the
 * uniform. Local. Errors, with nothing written: those of xd_times_check; ARGUMENT for a negative count, or samples past 2^32
 * - 1. */
XD_API xd_result xd_times_draw(xd_ctx *ctx, const xd_time_sampler *sampler, const xd_philox *random,
                               int64_t count, double *times);

/* Times of the frames of one sample, one draw a chunk (inhomogeneous: FastGen's CausVid): frames [0, frames) are chunks of
 * sampler->chunk frames, the first of which also has the remainder; chunk k has block k of the numbers of `random`, whose
 * sample is the sample's. CausVid's lists include the final 0: list_to_end. Local. Errors, with nothing written: those of
 * xd_times_check; ARGUMENT unless 1 <= sampler->chunk <= frames. */
XD_API xd_result xd_times_draw_frames(xd_ctx *ctx, const xd_time_sampler *sampler, const xd_philox *random,
                                      int64_t frames, double *times);

/* An index in [0, count), from block `block` of the numbers: rungs of a list of steps. A rung that all ranks share takes sample 0,
 * so that nothing has to be broadcast. Pure; count >= 1. */
XD_API int64_t xd_draw_index(const xd_philox *random, int64_t block, int64_t count);

#endif
