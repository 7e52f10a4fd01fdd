/* Noise schedules: levels, ratios, grids, lists of steps. */

#include "dmd/internal.h"

#include <math.h>
#include <string.h>

#define XDI_HALF_PI 1.5707963267948966

/* EDM's grid has equal steps of t^(1/7). The few steps of a student are between two of its 1000 times. */
static const double xdi_edm_power = 7.0;
enum { XDI_EDM_TIMES = 1000, XDI_EDM_FIRST = 2, XDI_EDM_LAST = 998 };

XD_API xd_noise_schedule xd_noise_defaults(xd_noise_kind kind) {
    xd_noise_schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = kind;
    schedule.max_t = 0.999;
    if (kind == XD_NOISE_EDM) schedule.min_t = 0.002, schedule.max_t = 80.0;
    if (kind == XD_NOISE_TRIG) schedule.max_t = XDI_HALF_PI;
    if (kind == XD_NOISE_CUSTOM) schedule.max_t = 1.0;
    return schedule;
}

XD_PRIVATE double xdi_noise_clamp_min(const xd_noise_schedule *schedule) {
    return schedule->clamp_min > 0.0 ? schedule->clamp_min : 1e-6;
}

XD_PRIVATE double xdi_noise_divisor(const xd_noise_schedule *schedule, double divisor) {
    const double least = xdi_noise_clamp_min(schedule);
    if (divisor >= 0.0) return divisor > least ? divisor : least;
    return divisor < -least ? divisor : -least;
}

/* ---- checks ---- */

static double xdi_noise_end(xd_noise_kind kind) {
    if (kind == XD_NOISE_FLOW || kind == XD_NOISE_VP) return 1.0;
    if (kind == XD_NOISE_TRIG) return XDI_HALF_PI;
    return HUGE_VAL;
}

/* All but the table's values. */
XD_PRIVATE xd_result xdi_noise_check_range(xd_ctx *ctx, const xd_noise_schedule *s) {
    XD_REQUIRE(ctx, s, XD_ERROR_ARGUMENT, "no noise schedule is given");
    XD_REQUIRE(ctx, s->kind >= XD_NOISE_FLOW && s->kind <= XD_NOISE_CUSTOM, XD_ERROR_ARGUMENT,
               "kind %d is no noise schedule", (int)s->kind);
    XD_REQUIRE(ctx, s->min_t >= 0.0 && s->min_t < s->max_t && isfinite(s->max_t), XD_ERROR_ARGUMENT,
               "a schedule of times from min_t %g to max_t %g: 0 <= min_t < max_t is needed", s->min_t,
               s->max_t);
    XD_REQUIRE(ctx, s->max_t <= xdi_noise_end(s->kind), XD_ERROR_ARGUMENT,
               "max_t %.17g is past the schedule's end, %.17g", s->max_t, xdi_noise_end(s->kind));
    XD_REQUIRE(ctx, s->clamp_min >= 0.0 && isfinite(s->clamp_min), XD_ERROR_ARGUMENT,
               "clamp_min, the bound on divisors, is %g", s->clamp_min);
    XD_REQUIRE(ctx, s->kind != XD_NOISE_VP || (s->table && s->table_count >= 1), XD_ERROR_ARGUMENT,
               "a VP schedule with %s of %lld steps", s->table ? "a table" : "no table",
               (long long)s->table_count);
    XD_REQUIRE(ctx, s->kind != XD_NOISE_CUSTOM || s->custom, XD_ERROR_ARGUMENT,
               "a CUSTOM schedule without a function");
    return XD_OK;
}

XD_PRIVATE xd_result xdi_noise_check(xd_ctx *ctx, const xd_noise_schedule *s) {
    XD_TRY(xdi_noise_check_range(ctx, s));
    for (int64_t k = 0; s->kind == XD_NOISE_VP && k < s->table_count; k++) {
        XD_REQUIRE(ctx, s->table[k] > 0.0 && s->table[k] <= 1.0, XD_ERROR_ARGUMENT,
                   "step %lld of the table is %g: above 0 and at most 1 is needed", (long long)k,
                   s->table[k]);
        XD_REQUIRE(ctx, k == 0 || s->table[k] <= s->table[k - 1], XD_ERROR_ARGUMENT,
                   "the table rises from %g to %g at step %lld", s->table[k - 1], s->table[k], (long long)k);
    }
    return XD_OK;
}

/* One f32 of slack at each end. */
static xd_result xdi_noise_check_time(xd_ctx *ctx, const xd_noise_schedule *s, double t) {
    XD_TRY(xdi_noise_check_range(ctx, s));
    const double low = (double)nextafterf((float)s->min_t, -HUGE_VALF);
    const double high = (double)nextafterf((float)s->max_t, HUGE_VALF);
    XD_REQUIRE(ctx, t >= low && t <= high, XD_ERROR_ARGUMENT,
               "t %.9g is outside the schedule's times, %.9g to %.9g", t, s->min_t, s->max_t);
    return XD_OK;
}

/* ---- levels ---- */

static xd_noise_level xdi_noise_level_of(double alpha, double sigma, double alpha_rate, double sigma_rate) {
    const xd_noise_level level = { alpha, sigma, alpha_rate, sigma_rate };
    return level;
}

/* The first step is clamped too: t may be a little below 0. */
static xd_noise_level xdi_noise_of_step(const xd_noise_schedule *s, int64_t step) {
    const int64_t last = s->table_count - 1, k = step < 0 ? 0 : step > last ? last : step;
    return xdi_noise_level_of(sqrt(s->table[k]), sqrt(1.0 - s->table[k]), (double)NAN, (double)NAN);
}

static xd_noise_level xdi_noise_at(const xd_noise_schedule *s, double t) {
    xd_noise_level level;
    switch (s->kind) {
    case XD_NOISE_FLOW: return xdi_noise_level_of(1.0 - t, t, -1.0, 1.0);
    case XD_NOISE_EDM: return xdi_noise_level_of(1.0, t, 0.0, 1.0);
    case XD_NOISE_VP: return xdi_noise_of_step(s, (int64_t)(t * (double)s->table_count));
    case XD_NOISE_TRIG: return xdi_noise_level_of(cos(t), sin(t), -sin(t), cos(t));
    default: break;
    }
    level = xdi_noise_level_of((double)NAN, (double)NAN, (double)NAN, (double)NAN);
    s->custom(s->user, t, &level);
    return level;
}

XD_PRIVATE xd_result xdi_noise_level_at(xd_ctx *ctx, const xd_noise_schedule *schedule, double t,
                                        xd_noise_level *out) {
    XD_TRY(xdi_noise_check_time(ctx, schedule, t));
    const xd_noise_level level = xdi_noise_at(schedule, t);
    XD_REQUIRE(ctx, isfinite(level.alpha) && isfinite(level.sigma), XD_ERROR_ARGUMENT,
               "the schedule's alpha is %g and its sigma %g at t %.9g", level.alpha, level.sigma, t);
    *out = level;
    return XD_OK;
}

/* ---- signal to noise ---- */

static double xdi_noise_ratio_of(const xd_noise_schedule *s, xd_noise_level level) {
    return level.alpha / xdi_noise_divisor(s, level.sigma);
}

XD_PRIVATE xd_result xdi_noise_ratio(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, double *out) {
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    XD_TRY(xdi_noise_level_at(ctx, schedule, t, &level));
    *out = xdi_noise_ratio_of(schedule, level);
    return XD_OK;
}

/* The halves of the range go down to neighbouring doubles. */
static xd_result xdi_noise_bisect(xd_ctx *ctx, const xd_noise_schedule *s, double ratio, double *out) {
    double low = s->min_t, high = s->max_t;
    for (;;) {
        const double middle = low + 0.5 * (high - low);
        double there = 0.0;
        if (middle <= low || middle >= high) break;
        XD_TRY(xdi_noise_ratio(ctx, s, middle, &there));
        if (there > ratio)
            low = middle;
        else
            high = middle;
    }
    *out = high;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_noise_time_of_ratio(xd_ctx *ctx, const xd_noise_schedule *s, double ratio,
                                             bool missing_root, double *out) {
    double t = 0.0;
    int64_t index = 0;
    XD_TRY(xdi_noise_check_range(ctx, s));
    XD_REQUIRE(ctx, ratio >= 0.0, XD_ERROR_ARGUMENT,
               "%g is no ratio of signal to noise: at least 0 is needed", ratio);
    if (s->kind == XD_NOISE_FLOW) t = 1.0 / (1.0 + ratio);
    if (s->kind == XD_NOISE_EDM) t = 1.0 / ratio;
    if (s->kind == XD_NOISE_TRIG) t = atan2(1.0, ratio);
    if (s->kind == XD_NOISE_CUSTOM) XD_TRY(xdi_noise_bisect(ctx, s, ratio, &t));
    if (s->kind == XD_NOISE_VP) {
        const double square = 1.0 / (1.0 + ratio * ratio);
        XD_TRY(xdi_noise_nearest(ctx, s, s->table_count, missing_root ? square : sqrt(square), &index));
        t = xdi_step_time(s->table_count, index, false);
    }
    *out = t < s->min_t ? s->min_t : t > s->max_t ? s->max_t : t;
    return XD_OK;
}

/* ---- grids ---- */

/* Each half from its own end. */
XD_PRIVATE double xdi_even_step(double a, double b, int64_t count, int64_t i) {
    const double step = (b - a) / (double)(count - 1);
    return i < count / 2 ? a + step * (double)i : b - step * (double)(count - 1 - i);
}

XD_PRIVATE double xdi_edm_time(double min_t, double max_t, int64_t count, int64_t index) {
    const double a = pow(min_t, 1.0 / xdi_edm_power), b = pow(max_t, 1.0 / xdi_edm_power);
    const double share = (double)(count - 1 - index) / (double)(count - 1);
    return pow(b + share * (a - b), xdi_edm_power);
}

XD_PRIVATE double xdi_step_time(int64_t count, int64_t index, bool f32) {
    const double n = (double)count, exact = (double)index / n;
    double t = f32 ? (double)(float)exact : exact;
    while ((int64_t)(t * n) < index)
        t = f32 ? (double)nextafterf((float)t, HUGE_VALF) : nextafter(t, HUGE_VAL);
    return t;
}

static xd_result xdi_noise_check_grid(xd_ctx *ctx, const xd_noise_schedule *s, int64_t count) {
    XD_TRY(xdi_noise_check_range(ctx, s));
    XD_REQUIRE(ctx, count >= 2 || s->kind == XD_NOISE_VP, XD_ERROR_ARGUMENT,
               "a grid of %lld times: at least 2 are needed", (long long)count);
    XD_REQUIRE(ctx, s->kind != XD_NOISE_VP || count == s->table_count, XD_ERROR_ARGUMENT,
               "a grid of %lld times of a table of %lld steps", (long long)count, (long long)s->table_count);
    return XD_OK;
}

static double xdi_noise_grid_at(const xd_noise_schedule *s, int64_t count, int64_t index) {
    if (s->kind == XD_NOISE_EDM) return xdi_edm_time(s->min_t, s->max_t, count, index);
    if (s->kind == XD_NOISE_VP) return xdi_step_time(count, index, false);
    return xdi_even_step(s->min_t, s->max_t, count, index);
}

XD_PRIVATE xd_result xdi_noise_grid_time(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count,
                                         int64_t index, double *out) {
    XD_TRY(xdi_noise_check_grid(ctx, schedule, count));
    XD_REQUIRE(ctx, index >= 0 && index < count, XD_ERROR_ARGUMENT, "time %lld of a grid of %lld",
               (long long)index, (long long)count);
    *out = xdi_noise_grid_at(schedule, count, index);
    return XD_OK;
}

/* A step of the table is looked up by its number: its time times table_count may be a little less. */
static xd_result xdi_noise_grid_sigma(xd_ctx *ctx, const xd_noise_schedule *s, int64_t count, int64_t index,
                                      double *out) {
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    if (s->kind == XD_NOISE_VP) {
        *out = xdi_noise_of_step(s, index).sigma;
        return XD_OK;
    }
    XD_TRY(xdi_noise_level_at(ctx, s, xdi_noise_grid_at(s, count, index), &level));
    *out = level.sigma;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_noise_nearest(xd_ctx *ctx, const xd_noise_schedule *schedule, int64_t count,
                                       double sigma, int64_t *index) {
    int64_t best = 0;
    double least = HUGE_VAL;
    XD_TRY(xdi_noise_check_grid(ctx, schedule, count));
    XD_REQUIRE(ctx, !isnan(sigma), XD_ERROR_ARGUMENT, "no sigma is nearest to %g", sigma);
    for (int64_t i = 0; i < count; i++) {
        double there = 0.0;
        XD_TRY(xdi_noise_grid_sigma(ctx, schedule, count, i, &there));
        if (fabs(there - sigma) < least) {
            least = fabs(there - sigma);
            best = i;
        }
    }
    *index = best;
    return XD_OK;
}

/* ---- lists of few steps ---- */

XD_API xd_result xd_noise_steps(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps, double *list) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, schedule, list);
    XD_TRY(xdi_noise_check_range(ctx, schedule));
    XD_REQUIRE(ctx, steps >= 1 && steps <= XDI_EDM_LAST - XDI_EDM_FIRST, XD_ERROR_ARGUMENT,
               "%d steps: 1 to %d are possible", steps, XDI_EDM_LAST - XDI_EDM_FIRST);
    for (int i = 0; i < steps; i++) {
        list[i] = xdi_even_step(schedule->max_t, 0.0, steps + 1, i);
        if (schedule->kind == XD_NOISE_EDM)
            list[i] = xdi_edm_time(schedule->min_t, schedule->max_t, XDI_EDM_TIMES,
                                   (int64_t)xdi_even_step(XDI_EDM_LAST, XDI_EDM_FIRST, steps + 1, i));
    }
    list[steps] = 0.0;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_noise_check_list(xd_ctx *ctx, const double *list, int64_t count, double max_t) {
    XD_REQUIRE(ctx, list && count >= 2, XD_ERROR_ARGUMENT, "%s of %lld times: at least 2 are needed",
               list ? "a list" : "no list", (long long)count);
    XD_REQUIRE(ctx, list[0] <= max_t, XD_ERROR_ARGUMENT, "the list begins at %.16g, above max_t %.16g",
               list[0], max_t);
    for (int64_t i = 1; i < count; i++)
        XD_REQUIRE(ctx, list[i] < list[i - 1], XD_ERROR_ARGUMENT,
                   "the list does not descend: %.9g comes after %.9g, as time %lld", list[i], list[i - 1],
                   (long long)i);
    XD_REQUIRE(ctx, list[count - 1] == 0.0, XD_ERROR_ARGUMENT, "the list ends in %.9g, not in 0",
               list[count - 1]);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_noise_check_list_f32(xd_ctx *ctx, const double *list, int64_t count) {
    for (int64_t i = 1; i < count; i++)
        XD_REQUIRE(ctx, (float)list[i] < (float)list[i - 1], XD_ERROR_ARGUMENT,
                   "times %lld and %lld of the list, %.16g and %.16g, are one f32", (long long)i - 1,
                   (long long)i, list[i - 1], list[i]);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_noise_check_steps(xd_ctx *ctx, const xd_noise_schedule *schedule, int steps,
                                           const double *list, int64_t count) {
    XD_TRY(xdi_noise_check_range(ctx, schedule));
    XD_REQUIRE(ctx, steps >= 1, XD_ERROR_ARGUMENT, "a student of %d steps", steps);
    XD_REQUIRE(ctx, list && count == (int64_t)steps + 1, XD_ERROR_ARGUMENT,
               "%s of %lld times for %d steps: %d are needed", list ? "a list" : "no list", (long long)count,
               steps, steps + 1);
    return xdi_noise_check_list(ctx, list, count, schedule->max_t);
}

/* ---- what networks see ---- */

XD_PRIVATE double xdi_noise_network_time(double t, double scale, xd_dtype dtype) {
    if (dtype == XD_DTYPE_F64) return scale != 0.0 ? t * scale : t;
    float seen = (float)t;
    if (scale != 0.0) seen *= (float)scale;
    if (dtype == XD_DTYPE_F32) return (double)seen;
    if (dtype == XD_DTYPE_BF16) return (double)xd_f32_from_bf16(xd_bf16_from_f32(seen));
    if (dtype == XD_DTYPE_F16) return (double)xd_f32_from_f16(xdi_f16_from_f32(seen));
    return (double)NAN;
}

XD_PRIVATE double xdi_noise_network_scale(const xd_noise_schedule *schedule) {
    return schedule->kind == XD_NOISE_FLOW || schedule->kind == XD_NOISE_VP ? 1000.0 : 1.0;
}

/* ---- EDM's network ---- */

XD_API xd_result xd_edm_scales_at(xd_ctx *ctx, const xd_edm_desc *desc, double t, xd_edm_scales *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc, out);
    const double s = desc->sigma_data != 0.0 ? desc->sigma_data : 0.5;
    const double min_t = desc->min_t != 0.0 ? desc->min_t : 1e-6, shifted = t + desc->sigma_shift;
    XD_REQUIRE(ctx, s > 0.0 && isfinite(s), XD_ERROR_ARGUMENT, "sigma_data is %g", s);
    XD_REQUIRE(ctx, min_t > 0.0 && isfinite(min_t), XD_ERROR_ARGUMENT, "min_t is %g", min_t);
    XD_REQUIRE(ctx, shifted >= 0.0 && isfinite(shifted), XD_ERROR_ARGUMENT,
               "t %g shifted by %g is %g: at least 0 is needed", t, desc->sigma_shift, shifted);
    int power = 0; /* the larger is divided by 2^power: squares neither overflow nor vanish, the bits stay */
    (void)frexp(s > shifted ? s : shifted, &power);
    const double a = ldexp(s, -power), b = ldexp(shifted, -power);
    const double square = a * a + b * b, root = sqrt(square), input = ldexp(1.0 / root, -power);
    XD_REQUIRE(
        ctx, isfinite(input), XD_ERROR_ARGUMENT,
        "sigma_data %g and shifted t %g are too small: 1 / sqrt of the sum of their squares is infinite", s,
        shifted);
    out->input = input;
    out->label = log(shifted > min_t ? shifted : min_t) / 4.0;
    out->denoised.c0 = (s > shifted ? shifted * a : s * b) / root;
    out->denoised.c1 = a * a / square;
    return XD_OK;
}
