/* Conversions between predictions, as factors of two tensors.
 *
 * Every type is a sum of x0 and eps, (a, b); x_t is (alpha, sigma). A prediction and x_t are two equations for x0 and eps, and any
 * other type follows from those: with D(type) = a sigma - b alpha, the determinant of type and x_t,
 *
 *     to = D(to) / D(from) from + (b_to a_from - a_to b_from) / D(from) x_t
 *
 * D is sigma for x0, -alpha for eps, and exactly -1 for flow under FLOW, EDM and TRIG and for v, so nothing cancels. The score is
 * eps over -sigma. */

#include "dmd/internal.h"

#include <math.h>

/* A type as a sum of x0 and eps, and its determinant. */
typedef struct xdi_type {
    double a, b, determinant;
} xdi_type;

static const char *xdi_prediction_name(xd_prediction type) {
    static const char *const names[] = { "x0", "eps", "v", "flow", "score" };
    return names[type];
}

static bool xdi_prediction_known(xd_prediction type) {
    return type >= XD_PREDICT_X0 && type <= XD_PREDICT_SCORE;
}

/* The score is eps too, over -sigma. */
static bool xdi_is_eps(xd_prediction type) {
    return type == XD_PREDICT_EPS || type == XD_PREDICT_SCORE;
}

/* alpha^2 + sigma^2 */
static double xdi_square(const xd_noise_level *level) {
    return level->alpha * level->alpha + level->sigma * level->sigma;
}

static const char *xdi_noise_name(xd_noise_kind kind) {
    static const char *const names[] = { "FLOW", "EDM", "VP", "TRIG", "CUSTOM" };
    return names[kind];
}

/* Replaces V by FLOW where that is what it means. */
static xd_result xdi_prediction_meant(xd_ctx *ctx, const xd_noise_schedule *s, bool v_is_flow,
                                      xd_prediction *type) {
    XD_REQUIRE(ctx, xdi_prediction_known(*type), XD_ERROR_ARGUMENT, "prediction %d is unknown", (int)*type);
    XD_REQUIRE(ctx, !v_is_flow || s->kind == XD_NOISE_FLOW, XD_ERROR_ARGUMENT,
               "v_is_flow is of FLOW schedules, not of %s", xdi_noise_name(s->kind));
    if (*type == XD_PREDICT_V && v_is_flow) *type = XD_PREDICT_FLOW;
    return XD_OK;
}

/* The score is seen as eps. */
static xd_result xdi_type_of(xd_ctx *ctx, const xd_noise_schedule *s, xd_prediction type,
                             const xd_noise_level *level, xdi_type *out) {
    const bool exact = s->kind != XD_NOISE_CUSTOM;
    const xdi_type x0 = { 1.0, 0.0, level->sigma }, eps = { 0.0, 1.0, -level->alpha };
    const xdi_type v = { -level->sigma, level->alpha, exact ? -1.0 : -xdi_square(level) };
    const xdi_type flow = { level->alpha_rate, level->sigma_rate,
                            exact ? -1.0
                                  : level->alpha_rate * level->sigma - level->sigma_rate * level->alpha };
    if (type == XD_PREDICT_V)
        XD_REQUIRE(
            ctx, s->kind != XD_NOISE_FLOW && s->kind != XD_NOISE_EDM && fabs(xdi_square(level) - 1.0) <= 1e-2,
            XD_ERROR_ARGUMENT,
            "v has no meaning under a %s schedule with alpha %g and sigma %g: it needs alpha^2 + "
            "sigma^2 = 1",
            xdi_noise_name(s->kind), level->alpha, level->sigma);
    if (type == XD_PREDICT_FLOW)
        XD_REQUIRE(ctx, isfinite(level->alpha_rate) && isfinite(level->sigma_rate), XD_ERROR_ARGUMENT,
                   "flow has no meaning under a %s schedule whose rates are %g and %g",
                   xdi_noise_name(s->kind), level->alpha_rate, level->sigma_rate);
    *out = type == XD_PREDICT_X0 ? x0 : type == XD_PREDICT_V ? v : type == XD_PREDICT_FLOW ? flow : eps;
    return XD_OK;
}

/* At a level; the caller has replaced V and given two known types. */
static xd_result xdi_prediction_direct(xd_ctx *ctx, const xd_noise_schedule *s, xd_prediction from,
                                       xd_prediction to, const xd_noise_level *level, xd_mix *out) {
    const double sigma = xdi_noise_divisor(s, level->sigma);
    xdi_type p = { 0.0, 0.0, 0.0 }, q = { 0.0, 0.0, 0.0 };
    XD_TRY(xdi_type_of(ctx, s, from, level, &p));
    XD_TRY(xdi_type_of(ctx, s, to, level, &q));
    /* Where it is 0, it has the sign that it has at other times: that of sigma, or of -alpha. */
    const double determinant =
        from == XD_PREDICT_X0 ? xdi_noise_divisor(s, p.determinant) : -xdi_noise_divisor(s, -p.determinant);
    out->c0 = xdi_is_eps(from) && xdi_is_eps(to) ? 1.0 : q.determinant / determinant;
    out->c1 = (q.b * p.a - q.a * p.b) / determinant;
    if (from == XD_PREDICT_SCORE) out->c0 *= -level->sigma;
    if (to == XD_PREDICT_SCORE) out->c0 /= -sigma, out->c1 /= -sigma;
    return XD_OK;
}

XD_API xd_result xd_prediction_mix(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                   const xd_conversion *conversion, double t, xd_mix *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, schedule, conversion, out);
    xd_prediction from = conversion->from, to = conversion->to;
    const xd_mix same = { 1.0, 0.0 };
    xd_mix mix = same, second = same;
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    XD_TRY(xdi_noise_level_at(ctx, schedule, t, &level));
    if (from != to) {
        XD_TRY(xdi_prediction_meant(ctx, schedule, conversion->v_is_flow, &from));
        XD_TRY(xdi_prediction_meant(ctx, schedule, conversion->v_is_flow, &to));
    }
    if (conversion->from != conversion->to && conversion->through_x0) {
        if (from != XD_PREDICT_X0)
            XD_TRY(xdi_prediction_direct(ctx, schedule, from, XD_PREDICT_X0, &level, &mix));
        if (to != XD_PREDICT_X0)
            XD_TRY(xdi_prediction_direct(ctx, schedule, XD_PREDICT_X0, to, &level, &second));
        mix.c0 = second.c0 * mix.c0;
        mix.c1 = second.c0 * mix.c1 + second.c1;
    } else if (from != to) {
        XD_TRY(xdi_prediction_direct(ctx, schedule, from, to, &level, &mix));
    }
    *out = mix;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_prediction_check(xd_ctx *ctx, const xd_noise_schedule *schedule, xd_prediction type,
                                          bool v_is_flow) {
    xd_conversion conversion = { type, XD_PREDICT_X0, v_is_flow, false };
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    xd_mix mix = { 0.0, 0.0 };
    XD_TRY(xdi_noise_check(ctx, schedule));
    XD_TRY(xdi_noise_level_at(ctx, schedule, schedule->max_t, &level));
    XD_TRY(xd_prediction_mix(ctx, schedule, &conversion, schedule->max_t, &mix));
    XD_TRY(xd_prediction_mix(ctx, schedule, &conversion, schedule->min_t, &mix));
    XD_REQUIRE(ctx, !xdi_is_eps(type) || fabs(level.alpha) > xdi_noise_clamp_min(schedule), XD_ERROR_ARGUMENT,
               "%s says nothing of x0 at max_t %.9g: alpha is %g there, and has to be above %g",
               xdi_prediction_name(type), schedule->max_t, level.alpha, xdi_noise_clamp_min(schedule));
    return XD_OK;
}

XD_API xd_result xd_noise_mix(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, xd_mix *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, schedule, out);
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    XD_TRY(xdi_noise_level_at(ctx, schedule, t, &level));
    out->c0 = level.alpha;
    out->c1 = level.sigma;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_target_mix(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                    const xd_conversion *conversion, double t, xd_mix *out) {
    xd_prediction type = conversion->to;
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    xdi_type target = { 0.0, 0.0, 0.0 };
    XD_TRY(xdi_noise_level_at(ctx, schedule, t, &level));
    XD_TRY(xdi_prediction_meant(ctx, schedule, conversion->v_is_flow, &type));
    XD_TRY(xdi_type_of(ctx, schedule, type, &level, &target));
    out->c0 = target.a;
    out->c1 = type == XD_PREDICT_SCORE ? -1.0 / xdi_noise_divisor(schedule, level.sigma) : target.b;
    return XD_OK;
}

XD_PRIVATE xd_mix xdi_guidance_mix(double scale) {
    const xd_mix mix = { scale, 1.0 - scale };
    return mix;
}

/* ---- rows ---- */

static bool xdi_mix_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_F16 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F64;
}

XD_PRIVATE xd_result xdi_mix_check_rows(xd_ctx *ctx, const xd_rows *out, const char *name, xd_rows *x) {
    if (x->stride == 0) x->stride = x->cols;
    XD_REQUIRE(ctx, x->rows >= 0 && x->cols >= 0 && x->stride >= x->cols, XD_ERROR_SHAPE,
               "%s has %lld rows of %lld elements, %lld apart", name, (long long)x->rows, (long long)x->cols,
               (long long)x->stride);
    XD_REQUIRE(ctx, x->rows == out->rows && x->cols == out->cols, XD_ERROR_SHAPE,
               "%s is %lld x %lld and out %lld x %lld", name, (long long)x->rows, (long long)x->cols,
               (long long)out->rows, (long long)out->cols);
    XD_REQUIRE(ctx, xdi_mix_takes(x->dtype), XD_ERROR_DTYPE, "%s is %s: F32, F16, BF16 or F64 is needed",
               name, xd_dtype_name(x->dtype));
    XD_REQUIRE(ctx, x->data || x->rows == 0 || x->cols == 0, XD_ERROR_ARGUMENT, "%s has no memory", name);
    return XD_OK;
}

XD_API xd_result xd_mix_rows(xd_ctx *ctx, const xd_mix_desc *desc) {
    XDI_GIVEN(ctx, ctx, desc);
    xd_mix_desc d = *desc;
    const xd_launch launch = xd_ctx_launch(ctx);
    XD_TRY(xdi_mix_check_rows(ctx, &d.out, "out", &d.out));
    XD_TRY(xdi_mix_check_rows(ctx, &d.out, "p", &d.p));
    if (d.q.data) XD_TRY(xdi_mix_check_rows(ctx, &d.out, "q", &d.q));
    if (d.out.rows == 0 || d.out.cols == 0) return XD_OK;
    XDI_GIVEN(ctx, d.mix);
    return xd_ctx_kernels(ctx)->dmd.mix(&launch, &d);
}
