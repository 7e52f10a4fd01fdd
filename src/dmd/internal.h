#ifndef XDI_DMD_INTERNAL_H
#define XDI_DMD_INTERNAL_H

#include "base/fail.h"
#include "base/half.h"
#include "dmd/convert.h"
#include "dmd/times.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

/* noise_schedule.c: the schedule's lower bound on divisors; a divisor with it. */
XD_PRIVATE double xdi_noise_clamp_min(const xd_noise_schedule *schedule);
XD_PRIVATE double xdi_noise_divisor(const xd_noise_schedule *schedule, double divisor);

/* noise_schedule.c: xdi_noise_check without a look at the table's values. */
XD_PRIVATE xd_result xdi_noise_check_range(xd_ctx *ctx, const xd_noise_schedule *schedule);

/* noise_schedule.c: checks a schedule and its table. Errors: ARGUMENT. */
XD_PRIVATE xd_result xdi_noise_check(xd_ctx *ctx, const xd_noise_schedule *schedule);

/* noise_schedule.c: alpha, sigma and rates at t, which may exceed the range by one f32. Errors: ARGUMENT (no range, table or
 * function; t; alpha or sigma of CUSTOM not finite). */
XD_PRIVATE xd_result xdi_noise_level_at(xd_ctx *ctx, const xd_noise_schedule *schedule, double t,
                                        xd_noise_level *out);

/* noise_schedule.c: alpha / max(sigma, least), the root of the signal-to-noise ratio, and the time of a ratio: exact for FLOW,
 * EDM, TRIG. VP: the step of the sigma nearest to 1 / sqrt(1 + ratio^2); with missing_root to 1 / (1 + ratio^2), as FastGen.
 * CUSTOM: by bisection, for ratios that fall with t. */
XD_PRIVATE xd_result xdi_noise_ratio(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, double *out);
XD_PRIVATE xd_result xdi_noise_time_of_ratio(xd_ctx *ctx, const xd_noise_schedule *schedule, double ratio,
                                             bool missing_root, double *out);

/* noise_schedule.c: time `index` of an ascending grid, and the lowest index whose sigma is nearest to `sigma`:
 *   EDM       (b + j/(count - 1) (a - b))^7 with a = min_t^(1/7), b = max_t^(1/7), j = count - 1 - index
 *   VP        index / count, or a few units in the last place more, so its step is index; count = table_count
 *   others    even steps from min_t to max_t, both included
 * Errors: ARGUMENT (count < 2, index, count of VP). */
XD_PRIVATE xd_result xdi_noise_grid_time(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count,
                                         int64_t index, double *out);
XD_PRIVATE xd_result xdi_noise_nearest(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count,
                                       double sigma, int64_t *index);

/* noise_schedule.c: ARGUMENT unless a list has steps + 1 falling times from at most max_t to 0. */
XD_PRIVATE xd_result xdi_noise_check_steps(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps,
                                           const double *list, int64_t count);

/* noise_schedule.c: a network's time input: f32(t) f32(scale) rounded to F32, F16 or BF16; F64: t scale. Scale 0 leaves t. NaN for
 * other types. And the scale of FastGen's networks: 1000 for FLOW and VP, else 1. */
XD_PRIVATE double xdi_noise_network_time(double t, double scale, xd_dtype dtype);
XD_PRIVATE double xdi_noise_network_scale(const xd_noise_schedule *schedule);

/* times.c: a sampler, with a schedule (NULL: none) also its range; its range becomes at most the schedule's; the time of one
 * draw. Errors: ARGUMENT (a setting; draw outside [0, 1], index outside [first, last] or fractional, NaN), DTYPE. */
XD_PRIVATE xd_result xdi_times_check(xd_ctx *ctx, const xd_time_sampler *sampler,
                                     const xd_noise_schedule *schedule);
XD_PRIVATE void xdi_times_narrow(xd_time_sampler *sampler, const xd_noise_schedule *schedule);
XD_PRIVATE xd_result xdi_time_of_draw(xd_ctx *ctx, const xd_time_sampler *sampler, double draw, double *out);

/* convert.c: whether this type trains over the whole range: converts to x0 and back; for EPS and SCORE, alpha(max_t) > `least`. */
XD_PRIVATE xd_result xdi_prediction_check(xd_ctx *ctx, const xd_noise_schedule *schedule, xd_prediction type,
                                          bool v_is_flow);

/* convert.c: the factors of a target c0 x0 + c1 eps of type conversion->to; reads v_is_flow too. */
XD_PRIVATE xd_result xdi_target_mix(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                    const xd_conversion *conversion, double t, xd_mix *out);

/* convert.c: c0 conditional + c1 unconditional = unconditional + scale (conditional - unconditional). */
XD_PRIVATE xd_mix xdi_guidance_mix(double scale);

/* noise_schedule.c: times descend from at most max_t to 0, at least two of them. */
XD_PRIVATE xd_result xdi_noise_check_list(xd_ctx *ctx, const double *list, int64_t count, double max_t);

/* noise_schedule.c: ARGUMENT where neighbours of a list that descends are one time when they are rounded to f32. */
XD_PRIVATE xd_result xdi_noise_check_list_f32(xd_ctx *ctx, const double *list, int64_t count);

/* noise_schedule.c: number i of `count` >= 2 even steps from a to b; both ends are exact. */
XD_PRIVATE double xdi_even_step(double a, double b, int64_t count, int64_t i);

/* noise_schedule.c: the time of step `index` of `count`: index / count, or as little above that as makes trunc(t count) the index
 * again. */
XD_PRIVATE double xdi_step_time(int64_t count, int64_t index, bool f32);

/* noise_schedule.c: time `index` of EDM's grid. */
XD_PRIVATE double xdi_edm_time(double min_t, double max_t, int64_t count, int64_t index);

/* convert.c: a matrix of floating elements with the shape of `out`. Sets a stride of 0 to the number of columns. */
XD_PRIVATE xd_result xdi_mix_check_rows(xd_ctx *ctx, const xd_rows *out, const char *name, xd_rows *x);

#endif
