#ifndef XDI_DMD_NOISE_SCHEDULE_H
#define XDI_DMD_NOISE_SCHEDULE_H

#include "kernel/types.h"

/* Noise schedules: x_t = alpha x0 + sigma eps. Formulas: docs/diffusion.md. Host doubles; nothing allocates. */

/* Kinds, by alpha and sigma at t. */
typedef enum xd_noise_kind {
    XD_NOISE_FLOW = 0, /* rectified flow: 1 - t, t */
    XD_NOISE_EDM,      /* 1, t */
    XD_NOISE_VP,       /* variance preserving: sqrt(a), sqrt(1 - a) of a table */
    XD_NOISE_TRIG,     /* cos t, sin t */
    XD_NOISE_CUSTOM    /* the caller's function */
} xd_noise_kind;

/* A level of noise. Rates (alpha', sigma') are derivatives by t; NaN where there are none, as in VP. */
typedef struct xd_noise_level {
    double alpha, sigma, alpha_rate, sigma_rate;
} xd_noise_level;

/* A schedule. Calls borrow its pointers. */
typedef struct xd_noise_schedule {
    xd_noise_kind kind;
    double min_t, max_t; /* 0 <= min_t < max_t; max_t <= 1 (FLOW, VP), pi/2 (TRIG) */
    double clamp_min;    /* of divisors in xd_prediction_mix; 0 -> 1e-6 */
    /* VP: [table_count] in (0, 1], never increasing; read at trunc(t table_count), clamped. */
    const double *table;
    int64_t table_count;
    /* CUSTOM: fills *level, unknown rates with NaN; pure. */
    void (*custom)(void *user, double t, xd_noise_level *level);
    void *user;
} xd_noise_schedule;

/* Returns FastGen's range: FLOW, VP [0, 0.999], EDM [0.002, 80], TRIG [0, pi/2], CUSTOM [0, 1]; no table or function.
 * Pure. */
XD_API xd_noise_schedule xd_noise_defaults(xd_noise_kind kind);

/* Fills list [steps + 1] with falling times of a few-step student, the last 0. EDM: times of a grid; others: even steps
 * from max_t. Local. Errors: ARGUMENT (steps < 1 or > 996, no range). */
XD_API xd_result xd_noise_steps(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps, double *list);

/* Factors of an EDM network, whose input is `input` x_t. */
typedef struct xd_edm_scales {
    double input, label; /* label: the network's input for t */
    xd_mix denoised;     /* x0 = c0 output + c1 x_t */
} xd_edm_scales;

/* Settings of an EDM network. */
typedef struct xd_edm_desc {
    double sigma_data;  /* > 0; 0 -> 0.5 */
    double sigma_shift; /* added to t first, as FastGen's evaluation; 0 -> none */
    double min_t;       /* in the label; 0 -> 1e-6 */
} xd_edm_desc;

/* Returns these factors. Local. Errors: ARGUMENT (fields or shifted t negative or not finite; sigma_shift may be
 * negative). */
XD_API xd_result xd_edm_scales_at(xd_ctx *ctx, const xd_edm_desc *desc, double t, xd_edm_scales *out);

#endif
