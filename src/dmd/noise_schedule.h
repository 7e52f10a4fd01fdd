#ifndef XDI_DMD_NOISE_SCHEDULE_H
#define XDI_DMD_NOISE_SCHEDULE_H

#include "kernel/types.h"

/* How a diffusion model mixes data and noise: x_t = alpha(t) x0 + sigma(t) eps, with rates alpha' and sigma' by t. All of it is
 * host arithmetic in double, with the bits of the C library's functions; nothing here is collective or allocates. */

/* The families of schedules. */
typedef enum xd_noise_kind {
    XD_NOISE_FLOW = 0, /* rectified flow: alpha = 1 - t, sigma = t */
    XD_NOISE_EDM,      /* alpha = 1, sigma = t */
    XD_NOISE_VP, /* variance preserving, by a table (Stable Diffusion): alpha = sqrt(a), sigma = sqrt(1 - a) */
    XD_NOISE_TRIG,  /* alpha = cos t, sigma = sin t */
    XD_NOISE_CUSTOM /* the caller's function */
} xd_noise_kind;

/* alpha, sigma and their derivatives by t; the rates are NaN where the schedule has none (a VP table). */
typedef struct xd_noise_level {
    double alpha, sigma, alpha_rate, sigma_rate;
} xd_noise_level;

/* A schedule: a plain value, from xd_noise_defaults or by hand. What it points to is borrowed by every call. */
typedef struct xd_noise_schedule {
    xd_noise_kind kind;
    double min_t, max_t; /* 0 <= min_t < max_t; FLOW: max_t <= 1, VP: max_t <= 1, TRIG: max_t <= pi / 2 */
    double least;        /* bound on divisors, see xd_prediction_mix; 0 -> 1e-6 */
    const double *table; /* VP: [table_count] a = alpha^2 of step k, above 0 and at most 1, never
                          * increasing; step k = trunc(t table_count) within the table, without
                          * interpolation */
    int64_t table_count;
    /* CUSTOM: fills *level, which comes with rates of NaN for functions that know none. Must be pure. */
    void (*custom)(void *user, double t, xd_noise_level *level);
    void *user;
    /* compat, VP: the inverse of the ratio looks 1 / (1 + snr) up, sigma squared, as FastGen does: not an inverse */
    bool missing_root;
} xd_noise_schedule;

/* A kind with the range of FastGen: FLOW [0, 0.999], EDM [0.002, 80], VP [0, 0.999] (table still to be given), TRIG
 * [0, pi / 2], CUSTOM [0, 1] (function still to be given). Pure. */
XD_API xd_noise_schedule xd_noise_defaults(xd_noise_kind kind);

/* Checks a schedule, its whole table included. Local. Errors: ARGUMENT for a kind, range, bound, table or function that does not
 * fit the description above. The other calls check no table. */
XD_API xd_result xd_noise_check(xd_ctx *ctx, const xd_noise_schedule *schedule);

/* alpha, sigma and rates at t. t may be one f32 beyond an end of the range, since ends are often rounded to f32. Local.
 * Errors, with *out untouched: ARGUMENT for a schedule that has no range, table or function, a t outside (NaN included), or a
 * custom level whose alpha or sigma is not finite. */
XD_API xd_result xd_noise_level_at(xd_ctx *ctx, const xd_noise_schedule *schedule, double t,
                                   xd_noise_level *out);

/* The root of the signal-to-noise ratio, alpha / sigma with sigma at least `least`; and the time at which it has a value,
 * within the schedule's range: exact for FLOW, EDM and TRIG; VP: the step whose sigma is nearest to 1 / sqrt(1 + ratio^2);
 * CUSTOM: by bisection, so the ratio must fall with t. Local. Errors, with *out untouched: those of xd_noise_level_at;
 * ARGUMENT for a ratio that is negative or NaN. */
XD_API xd_result xd_noise_ratio(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, double *out);
XD_API xd_result xd_noise_time_of_ratio(xd_ctx *ctx, const xd_noise_schedule *schedule, double ratio,
                                        double *out);

/* Time `index` of a grid of `count` times, ascending:
 *   EDM       (b + j/(count - 1) (a - b))^7 with a = min_t^(1/7), b = max_t^(1/7), j = count - 1 - index
 *   VP        index / count, the times of the table's steps, at most a few units in the last place above that, so that the step at
 *             the time is the index; count must be table_count
 *   others    even steps from min_t to max_t, both included
 * Local. Errors, with *out untouched: ARGUMENT for count < 2, an index outside, a VP grid of another length. */
XD_API xd_result xd_noise_grid_time(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count,
                                    int64_t index, double *out);

/* The index of the time of that grid whose sigma is nearest to `sigma`; of equally near ones the lowest. Looks at all of the
 * grid. Local. Errors, with *index untouched: those of xd_noise_grid_time and xd_noise_level_at; ARGUMENT for a NaN. */
XD_API xd_result xd_noise_nearest(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count, double sigma,
                                  int64_t *index);

/* The times of a student of few steps, from most noise to none, list [steps + 1]:
 *   EDM       of the grid of 1000 times, the indices trunc(998 - i 996 / steps), then 0; in double and, of the second half, from the
 *             other end, as torch.linspace: where 996 i / steps is whole the index may be one less
 *   others    even steps from max_t down to 0
 * The student starts from noise times sigma(list[0]). Local. Errors, with the list untouched: ARGUMENT for steps < 1 or > 996,
 * or a schedule without a range. */
XD_API xd_result xd_noise_steps(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps, double *list);

/* Checks a caller's list against the steps and the schedule. Local. Errors: ARGUMENT unless it has steps + 1 times, each below
 * the one before it, the first at most max_t, the last 0. */
XD_API xd_result xd_noise_steps_check(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps,
                                      const double *list, int64_t count);

/* What a network is told of t, as the exact value of the given type: t in f32, times `scale` in f32, rounded to the type (F32,
 * F16, BF16); F64: t times scale in double. A scale of 0 leaves t as it is. Narrow types merge times: 0.999 is 1 in BF16, and
 * 1000 with scale 1000. The library computes with t itself. Pure; NaN for other types. */
XD_API double xd_noise_network_time(double t, double scale, xd_dtype dtype);

/* The scale that FastGen's networks have: 1000 for FLOW and VP, else 1. Pure. */
XD_API double xd_noise_network_scale(const xd_noise_schedule *schedule);

/* The factors of a network in the manner of EDM: its input is `input` x_t, its label of noise `label`, and
 *   x0 = denoised.c0 net + denoised.c1 x_t                        with s = sigma_data, t as shifted:
 *   input = 1 / sqrt(s^2 + t^2)    label = ln(max(t, least)) / 4  c0 = t s / sqrt(s^2 + t^2)    c1 = s^2 / (s^2 + t^2) */
typedef struct xd_edm_scales {
    double input, label;
    xd_mix denoised;
} xd_edm_scales;

/* sigma_shift is added to t first; FastGen does so when it evaluates. */
typedef struct xd_edm_desc {
    double sigma_data;  /* > 0; 0 -> 0.5 */
    double sigma_shift; /* 0 -> none */
    double least;       /* 0 -> 1e-6 */
} xd_edm_desc;

/* Local. Errors, with *out untouched: ARGUMENT for a field that is negative (but sigma_shift), infinite or NaN, or a shifted
 * t that is. */
XD_API xd_result xd_edm_scales_at(xd_ctx *ctx, const xd_edm_desc *desc, double t, xd_edm_scales *out);

#endif
