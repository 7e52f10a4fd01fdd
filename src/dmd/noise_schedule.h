#ifndef XDI_DMD_NOISE_SCHEDULE_H
#define XDI_DMD_NOISE_SCHEDULE_H

#include "kernel/types.h"

/* Noise schedules: x_t = alpha(t) x0 + sigma(t) eps, with rates alpha' and sigma' by t. Host arithmetic in double. Nothing is
 * collective or allocates. A failed call leaves its output untouched. */

/* The kinds of schedules. */
typedef enum xd_noise_kind {
    XD_NOISE_FLOW = 0, /* rectified flow: alpha = 1 - t, sigma = t */
    XD_NOISE_EDM,      /* alpha = 1, sigma = t */
    XD_NOISE_VP,       /* variance preserving: alpha = sqrt(a), sigma = sqrt(1 - a), a from a table */
    XD_NOISE_TRIG,     /* alpha = cos t, sigma = sin t */
    XD_NOISE_CUSTOM    /* the caller's function */
} xd_noise_kind;

/* The rates are derivatives by t, NaN if the schedule has none, as VP. */
typedef struct xd_noise_level {
    double alpha, sigma, alpha_rate, sigma_rate;
} xd_noise_level;

/* A schedule. Calls borrow its pointers. */
typedef struct xd_noise_schedule {
    xd_noise_kind kind;
    double min_t, max_t; /* 0 <= min_t < max_t; FLOW: max_t <= 1, VP: max_t <= 1, TRIG: max_t <= pi / 2 */
    double least;        /* least divisor, see xd_prediction_mix; 0 -> 1e-6 */
    /* VP: [table_count] a in (0, 1], never increasing. Step of t: trunc(t table_count), clamped, not interpolated. */
    const double *table;
    int64_t table_count;
    /* CUSTOM: fills *level; unknown rates are NaN. Must be pure. */
    void (*custom)(void *user, double t, xd_noise_level *level);
    void *user;
    /* compat, VP: xd_noise_time_of_ratio looks 1 / (1 + snr) up, as FastGen; not an inverse */
    bool missing_root;
} xd_noise_schedule;

/* Returns FastGen's range: FLOW, VP [0, 0.999], EDM [0.002, 80], TRIG [0, pi / 2], CUSTOM [0, 1]. VP still needs its table,
 * CUSTOM its function. Pure. */
XD_API xd_noise_schedule xd_noise_defaults(xd_noise_kind kind);

/* Checks a schedule and its table, which no other call checks. Local. Errors: ARGUMENT. */
XD_API xd_result xd_noise_check(xd_ctx *ctx, const xd_noise_schedule *schedule);

/* Returns alpha, sigma and rates at t, which may exceed the range by one f32. Local. Errors: ARGUMENT (no range, table or
 * function; t; alpha or sigma of CUSTOM not finite). */
XD_API xd_result xd_noise_level_at(xd_ctx *ctx, const xd_noise_schedule *schedule, double t,
                                   xd_noise_level *out);

/* Return alpha / max(sigma, least), the root of the signal-to-noise ratio, and the time of a ratio: exact for FLOW, EDM, TRIG.
 * VP: the step of the sigma nearest to 1 / sqrt(1 + ratio^2). CUSTOM: by bisection, for ratios that fall with t. Local.
 * Errors: those of xd_noise_level_at; ARGUMENT (ratio). */
XD_API xd_result xd_noise_ratio(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, double *out);
XD_API xd_result xd_noise_time_of_ratio(xd_ctx *ctx, const xd_noise_schedule *schedule, double ratio,
                                        double *out);

/* Returns time `index` of an ascending grid:
 *   EDM       (b + j/(count - 1) (a - b))^7 with a = min_t^(1/7), b = max_t^(1/7), j = count - 1 - index
 *   VP        index / count, or a few units in the last place more, so its step is index; count = table_count
 *   others    even steps from min_t to max_t, both included
 * Local. Errors: ARGUMENT (count < 2, index, count of VP). */
XD_API xd_result xd_noise_grid_time(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count,
                                    int64_t index, double *out);

/* Searches that grid for the sigma nearest to `sigma`; returns the lowest such index. Local. Errors: those of
 * xd_noise_grid_time and xd_noise_level_at; ARGUMENT (NaN). */
XD_API xd_result xd_noise_nearest(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count, double sigma,
                                  int64_t *index);

/* Fills list [steps + 1] with the falling times of a few-step student, which starts from noise sigma(list[0]):
 *   EDM       times trunc(998 - i 996 / steps) in the grid of 1000, then 0; the second half from its end as in
 *             torch.linspace: one index less is possible if 996 i / steps is whole
 *   others    even steps from max_t to 0
 * Local. Errors: ARGUMENT (steps < 1 or > 996, no range). */
XD_API xd_result xd_noise_steps(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps, double *list);

/* Checks a caller's list. Local. Errors: ARGUMENT unless it has steps + 1 falling times from at most max_t to 0. */
XD_API xd_result xd_noise_steps_check(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps,
                                      const double *list, int64_t count);

/* Returns a network's time input: f32(t) f32(scale) rounded to F32, F16 or BF16; F64: t scale. Scale 0 leaves t. Narrow types
 * merge times: 0.999 is 1 in BF16. Pure; NaN for other types. */
XD_API double xd_noise_network_time(double t, double scale, xd_dtype dtype);

/* Returns the scale of FastGen's networks: 1000 for FLOW and VP, else 1. Pure. */
XD_API double xd_noise_network_scale(const xd_noise_schedule *schedule);

/* Factors of an EDM network with input `input` x_t and noise label `label`; s = sigma_data, t shifted:
 *   x0 = denoised.c0 net + denoised.c1 x_t
 *   input = 1 / sqrt(s^2 + t^2)    label = ln(max(t, least)) / 4  c0 = t s / sqrt(s^2 + t^2)    c1 = s^2 / (s^2 + t^2) */
typedef struct xd_edm_scales {
    double input, label;
    xd_mix denoised;
} xd_edm_scales;

/* FastGen's evaluation adds sigma_shift to t first. */
typedef struct xd_edm_desc {
    double sigma_data;  /* > 0; 0 -> 0.5 */
    double sigma_shift; /* 0 -> none */
    double least;       /* 0 -> 1e-6 */
} xd_edm_desc;

/* Returns these factors. Local.
 * Errors: ARGUMENT (negative, infinite or NaN fields or shifted t; sigma_shift may be below 0). */
XD_API xd_result xd_edm_scales_at(xd_ctx *ctx, const xd_edm_desc *desc, double t, xd_edm_scales *out);

#endif
