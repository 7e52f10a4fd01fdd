/* The denoising term of fake score and diffusion training. */

#include "dmd/denoise.h"
#include "dmd/internal.h"
#include "dmd/losses.h"

#include <math.h>
#include <string.h>

/* ---- terms ---- */

static xd_result xdi_denoise_check_form(xd_ctx *ctx, const xd_denoise_form *f) {
    XD_REQUIRE(ctx, (int)f->weight >= 0 && f->weight <= XD_DENOISE_USER, XD_ERROR_ARGUMENT,
               "denoising weight %d is unknown", (int)f->weight);
    const bool of_x0 = f->weight == XD_DENOISE_EDM || f->weight == XD_DENOISE_SNR_MIN;
    XD_REQUIRE(ctx, !of_x0 || f->space == XD_PREDICT_X0, XD_ERROR_ARGUMENT,
               "denoising weight %d is of the residual in x0, not in space %d", (int)f->weight,
               (int)f->space);
    XD_REQUIRE(ctx, f->weight != XD_DENOISE_EDM || (isfinite(f->sigma_data) && f->sigma_data > 0.0),
               XD_ERROR_ARGUMENT, "sigma_data %g must be finite and above 0", f->sigma_data);
    XD_REQUIRE(ctx, f->weight != XD_DENOISE_SNR_MIN || (isfinite(f->gamma) && f->gamma > 0.0),
               XD_ERROR_ARGUMENT, "gamma %g must be finite and above 0", f->gamma);
    XD_REQUIRE(ctx, f->weight != XD_DENOISE_USER || (isfinite(f->user) && f->user >= 0.0), XD_ERROR_ARGUMENT,
               "the caller's weight %g must be finite and not negative", f->user);
    XD_REQUIRE(ctx,
               !f->v_of_any_schedule ||
                   (f->space == XD_PREDICT_V && (f->native == XD_PREDICT_V || f->v_is_flow)),
               XD_ERROR_ARGUMENT,
               "v_of_any_schedule compares V with V, not type %d in space %d: another type needs v_is_flow",
               (int)f->native, (int)f->space);
    return XD_OK;
}

/* The weight of a ratio whose root is given. */
static double xdi_denoise_weight_of(const xd_denoise_form *f, double root) {
    const double ratio = root * root;
    switch (f->weight) {
    case XD_DENOISE_EDM: return ratio + 1.0 / (f->sigma_data * f->sigma_data);
    case XD_DENOISE_SNR_MIN: return ratio < f->gamma ? ratio : f->gamma;
    case XD_DENOISE_USER: return f->user;
    default: return 1.0;
    }
}

XD_API xd_result xd_denoise_term_at(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                    const xd_denoise_form *form, double t, xd_denoise_term *term) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, schedule, form, term);
    xd_conversion conversion;
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    xd_mix of = { 0.0, 0.0 }, target = { 0.0, 0.0 };
    double root = 0.0;
    memset(&conversion, 0, sizeof conversion);
    conversion.from = form->native;
    conversion.to = form->space;
    conversion.v_is_flow = form->v_is_flow;
    XD_TRY(xdi_denoise_check_form(ctx, form));
    XD_TRY(xdi_noise_level_at(ctx, schedule, t, &level));
    if (form->v_of_any_schedule) {
        target.c0 = -level.sigma;
        target.c1 = level.alpha;
    } else {
        XD_TRY(xdi_target_mix(ctx, schedule, &conversion, t, &target));
    }
    XD_TRY(xd_prediction_mix(ctx, schedule, &conversion, t, &of));
    if (form->weight == XD_DENOISE_EDM || form->weight == XD_DENOISE_SNR_MIN)
        XD_TRY(xdi_noise_ratio(ctx, schedule, t, &root));
    term->prediction = of.c0;
    term->clean = of.c1 * level.alpha - target.c0;
    term->noise = of.c1 * level.sigma - target.c1;
    term->weight = xdi_denoise_weight_of(form, root);
    return XD_OK;
}

/* ---- the loss ---- */

XD_API xd_denoise_desc xd_denoise_defaults(void) {
    xd_denoise_desc d;
    memset(&d, 0, sizeof d);
    d.common.weight = 1.0;
    return d;
}

static xdi_sample_call xdi_denoise_call_of(xd_ctx *ctx, const xd_denoise_desc *d, xd_denoise_args *a) {
    xdi_sample_call call;
    memset(&call, 0, sizeof call);
    memset(a, 0, sizeof *a);
    a->base.samples = d->prediction.rows;
    a->base.elements = d->prediction.cols;
    a->base.mask = d->mask;
    a->prediction = d->prediction;
    a->clean = d->clean;
    a->noise = d->noise;
    a->gradient = d->gradient;
    a->terms = d->terms;
    call.ctx = ctx;
    call.kernels = &xd_ctx_kernels(ctx)->dmd_loss;
    call.common = &d->common;
    call.args = &a->base;
    call.measured = true;
    return call;
}

static xd_result xdi_denoise_validate(xd_ctx *ctx, const xd_denoise_desc *d) {
    const xd_rows *const inputs[3] = { &d->prediction, &d->clean, &d->noise };
    const char *const names[3] = { "prediction", "clean", "noise" };
    for (int i = 0; i < 3; i++)
        XD_TRY(xdi_sample_check_rows(ctx, names[i], inputs[i], d->prediction.rows, d->prediction.cols));
    XD_TRY(xdi_sample_check_gradient(ctx, "gradient", &d->gradient, inputs, 3));
    XD_REQUIRE(ctx, d->terms || d->prediction.rows == 0, XD_ERROR_ARGUMENT, "no terms for %lld samples",
               (long long)d->prediction.rows);
    return xdi_sample_check_common(ctx, &d->common);
}

XD_PRIVATE size_t xdi_denoise_workspace(xd_ctx *ctx, const xd_denoise_desc *desc) {
    xd_denoise_args a;
    xdi_sample_call call = xdi_denoise_call_of(ctx, desc, &a);
    return xdi_sample_bytes(&call);
}

static xd_result xdi_denoise_samples(const xd_launch *launch, xdi_sample_call *call,
                                     const xd_denoise_args *a) {
    XD_TRY(call->kernels->denoise_measure(launch, a));
    XD_TRY(xdi_sample_exchange(launch, call));
    return call->kernels->denoise_weigh(launch, a);
}

static xd_result xdi_denoise_gradient(const xd_launch *launch, const void *args) {
    const xd_denoise_args *a = (const xd_denoise_args *)args;
    return a->gradient.data ? xd_ctx_kernels(launch->ctx)->dmd_loss.denoise_slope(launch, a) : XD_OK;
}

XD_API xd_result xd_denoise_loss(xd_ctx *ctx, const xd_denoise_desc *desc, xd_sample_values *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_denoise_args a;
    xdi_sample_call call = xdi_denoise_call_of(ctx, desc, &a);
    xd_result result = XDI_CHECK_GIVEN_AS(ctx, true, out);
    if (result == XD_OK) result = xdi_denoise_validate(ctx, desc);
    if (xdi_plan_is_open(ctx)) return xdi_sample_plan(&call, result);
    result = xdi_sample_open(&call, result);
    const bool alone = result == XD_OK && xdi_sample_goes_alone(&call, call.kernels->denoise_at_once);
    if (result == XD_OK)
        result =
            alone ? call.kernels->denoise_by_sample(&launch, &a) : xdi_denoise_samples(&launch, &call, &a);
    if (result == XD_OK) result = xdi_sample_finish(&call, alone ? NULL : xdi_denoise_gradient, &a, out);
    xdi_sample_close(&call);
    return result;
}
