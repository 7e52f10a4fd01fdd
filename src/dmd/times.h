#ifndef XDI_DMD_TIMES_H
#define XDI_DMD_TIMES_H

#include "base/philox.h"
#include "dmd/noise_schedule.h"

/* Diffusion times as pure functions of draws: docs/diffusion.md. */

/* The distributions. */
typedef enum xd_time_kind {
    /* U is uniform in [0, 1]: */
    XD_TIME_UNIFORM = 0, /* U (max_t - min_t) + min_t */
    XD_TIME_SHIFTED,     /* of UNIFORM's u: shift u / (u (shift - 1) + 1) */
    XD_TIME_LOG_NORMAL,  /* exp of a normal (mean, deviation), truncated to [ln min_t, ln max_t] */
    XD_TIME_LOG_T,       /* the same of mean + deviation * Student's t of `freedom` degrees */
    /* Z is a standard normal: */
    XD_TIME_LOGIT_NORMAL, /* UNIFORM's of U = sigmoid(Z deviation + mean) */
    /* index is in [first, last]: */
    XD_TIME_GRID, /* time `index` of a grid of `count` */
    XD_TIME_LIST, /* list[index] */
    XD_TIME_STEP  /* index / count, rounded up: trunc(t count) = index */
} xd_time_kind;

/* A distribution. */
typedef struct xd_time_sampler {
    xd_time_kind kind;
    double min_t, max_t;    /* 0 <= min_t < max_t; clamp all but LIST, STEP; LOG_*: ln(max(min_t, 1e-12)) */
    double shift;           /* SHIFTED: >= 1 */
    double mean, deviation; /* normal and t kinds; deviation > 0 */
    double freedom;         /* LOG_T: > 0 */
    const double *list;     /* LIST: [list_count], from at most max_t down to 0; borrowed */
    int64_t list_count;     /* >= 2 */
    bool list_to_end;       /* LIST: draws the last index too */
    int64_t first, last;    /* GRID, STEP: both included */
    int64_t count;          /* GRID, STEP: at most 2^53 */
    int64_t chunk;          /* frames that share a time; 0 -> one a sample */
    xd_noise_kind grid;     /* GRID: EDM or FLOW */
    xd_dtype dtype;         /* NONE, F64: double; F32: f32s in range */
} xd_time_sampler;

/* Recipes of references. */
typedef enum xd_dmd_recipe {
    XD_DMD_MODELOPT = 0, /* NVIDIA's Model-Optimizer */
    XD_DMD_FASTGEN,      /* NVlabs FastGen */
    XD_DMD_ORIGINAL,     /* DMD2's authors */
    XD_DMD_DATA_FREE     /* ours, without data */
} xd_dmd_recipe;

/* Returns a recipe's sampler. `kind` can change alone. Pure.
 *   MODELOPT   SHIFTED by 5 in [0.001, 0.999], mean 0, deviation 1, f32; GRID: FLOW, 1000, [0, 999]
 *   FASTGEN    UNIFORM in [0.002, 80], mean -1.1, deviation 2, shift 5, freedom 0.01, double; GRID: EDM, 1000, [2, 998]
 *   ORIGINAL   STEP in [20, 980] of 1000, range [0, 1]
 *   DATA_FREE  FASTGEN's in [0.02, 0.98] */
XD_API xd_time_sampler xd_times_defaults(xd_dmd_recipe recipe);

/* Fills times [count]. chunk 0: of the samples from random->sample on, each from its block 0. Otherwise of one sample's
 * frames, chunk k from block k; the first chunk also has the remainder. Local.
 *
 * Errors: ARGUMENT (a setting; count < 0; samples past 2^32 - 1; chunk not in [0, count]), DTYPE (not NONE, F32 or
 * F64). */
XD_API xd_result xd_times_draw(xd_ctx *ctx, const xd_time_sampler *sampler, const xd_philox *random,
                               int64_t count, double *times);

/* Returns an index in [0, count), count >= 1, from block `block`. Pure. */
XD_API int64_t xd_draw_index(const xd_philox *random, int64_t block, int64_t count);

#endif
