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

/* A level of noise. The rates are derivatives by t, NaN if the schedule has none, as VP. */
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
} xd_noise_schedule;

/* Returns FastGen's range: FLOW, VP [0, 0.999], EDM [0.002, 80], TRIG [0, pi / 2], CUSTOM [0, 1]. VP still needs its table,
 * CUSTOM its function. Pure. */
XD_API xd_noise_schedule xd_noise_defaults(xd_noise_kind kind);

/* Fills list [steps + 1] with the falling times of a few-step student, which starts from noise sigma(list[0]):
 *   EDM       times trunc(998 - i 996 / steps) in the grid of 1000, then 0; the second half from its end as in
 *             torch.linspace: one index less is possible if 996 i / steps is whole
 *   others    even steps from max_t to 0
 * Local. Errors: ARGUMENT (steps < 1 or > 996, no range). */
XD_API xd_result xd_noise_steps(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps, double *list);

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
