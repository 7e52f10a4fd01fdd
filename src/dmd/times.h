#ifndef XDI_DMD_TIMES_H
#define XDI_DMD_TIMES_H

#include "base/philox.h"
#include "dmd/noise_schedule.h"

/* Diffusion times as pure functions of draws: the caller's (xd_dmd_draws) or Philox's (xd_times_draw), so any rank can
 * compute any sample's. Host arithmetic in double; nothing is collective or allocates. A failed call leaves its output
 * untouched. */

/* The distributions. */
typedef enum xd_time_kind {
    /* The draw U is uniform in [0, 1]: */
    XD_TIME_UNIFORM = 0, /* U (max_t - min_t) + min_t */
    XD_TIME_SHIFTED,     /* u = U (max_t - min_t) + min_t;  shift u / (u (shift - 1) + 1) */
    XD_TIME_LOG_NORMAL,  /* exp of a normal (mean, deviation), truncated to [ln min_t, ln max_t] */
    XD_TIME_LOG_T,       /* the same of mean + deviation * Student's t of `freedom` degrees */
    /* The draw Z is a standard normal: */
    XD_TIME_LOGIT_NORMAL, /* sigmoid(Z deviation + mean) (max_t - min_t) + min_t */
    /* The draw is an index in [first, last]: */
    XD_TIME_GRID, /* time `index` of the grid of `count`: docs/diffusion.md */
    XD_TIME_LIST, /* list[index] */
    XD_TIME_STEP  /* index / count, rounded up so that trunc(t count) is index */
} xd_time_kind;

/* A distribution with its settings. */
typedef struct xd_time_sampler {
    xd_time_kind kind;
    double min_t, max_t;    /* 0 <= min_t < max_t; clamp all but LIST, STEP; LOG: ln(max(min_t, 1e-12)) */
    double shift;           /* SHIFTED: >= 1 */
    double mean, deviation; /* of the normal and t kinds; deviation > 0 */
    double freedom;         /* LOG_T: > 0 */
    const double *list;     /* LIST: [list_count] >= 2 times, falling from at most max_t to 0; borrowed */
    int64_t list_count;
    bool list_to_end;    /* LIST: with the last index; false -> [0, list_count - 2] */
    int64_t first, last; /* GRID and STEP: indices, both included */
    int64_t count;       /* of grid or steps, at most 2^53 */
    int64_t chunk;       /* xd_times_draw: frames that share a time; 0 -> a time for each sample */
    xd_noise_kind grid;  /* GRID: EDM or FLOW (even steps) */
    xd_dtype dtype;      /* NONE, F64 -> double; F32: f32s in the range */
} xd_time_sampler;

/* Whose recipe. */
typedef enum xd_dmd_recipe {
    XD_DMD_MODELOPT = 0, /* NVIDIA Model-Optimizer */
    XD_DMD_FASTGEN,      /* NVlabs FastGen */
    XD_DMD_ORIGINAL      /* DMD2 by its authors */
} xd_dmd_recipe;

/* Returns a recipe's sampler, with all kinds' fields set, so `kind` can change alone. Pure.
 *   MODELOPT   SHIFTED by 5 in [0.001, 0.999], mean 0, deviation 1, f32; GRID: FLOW, 1000, [0, 999]
 *   FASTGEN    UNIFORM in [0.002, 80] (reduce it to the schedule's), mean -1.1, deviation 2, shift 5, freedom 0.01, double;
 *              GRID: EDM, 1000, [2, 998]
 *   ORIGINAL   STEP in [20, 980] of 1000, range [0, 1] */
XD_API xd_time_sampler xd_times_defaults(xd_dmd_recipe recipe);

/* Fills times [count]. Local.
 *
 *   chunk 0   samples from random->sample on, the number in the step on any mesh. A sample uses its block 0; normals invert the
 *             distribution of a uniform
 *   chunk c   frames of one sample, as FastGen's CausVid (its lists: list_to_end). Chunks have c frames, the first also the
 *             remainder; chunk k uses block k
 *
 * Errors: ARGUMENT (a setting; count < 0, samples past 2^32 - 1; unless 0 <= chunk <= count), DTYPE (not NONE, F32 or F64). */
XD_API xd_result xd_times_draw(xd_ctx *ctx, const xd_time_sampler *sampler, const xd_philox *random,
                               int64_t count, double *times);

/* Returns an index in [0, count), count >= 1, from block `block`: a rung, for example. Sample 0 gives all ranks one without a
 * broadcast. Pure. */
XD_API int64_t xd_draw_index(const xd_philox *random, int64_t block, int64_t count);

#endif
