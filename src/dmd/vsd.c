/* The student's term of distribution matching. */

#include "dmd/losses.h"
#include "dmd/vsd.h"

#include <string.h>

XD_API xd_vsd_desc xd_vsd_defaults(void) {
    xd_vsd_desc d;
    memset(&d, 0, sizeof d);
    d.common.weight = 1.0;
    return d;
}

static xdi_sample_call xdi_vsd_call_of(xd_ctx *ctx, const xd_vsd_desc *d, xd_vsd_args *a) {
    xdi_sample_call call;
    memset(&call, 0, sizeof call);
    memset(a, 0, sizeof *a);
    a->base.samples = d->generated.rows;
    a->base.elements = d->generated.cols;
    a->base.mask = d->mask;
    a->generated = d->generated;
    a->teacher = d->teacher;
    a->fake = d->fake;
    a->gradient = d->gradient;
    a->sample_scale = d->sample_scale;
    a->chain = d->chain;
    a->distance = d->distance;
    a->normaliser = d->normaliser;
    a->form = d->form;
    call.ctx = ctx;
    call.kernels = &xd_ctx_kernels(ctx)->dmd_loss;
    call.common = &d->common;
    call.args = &a->base;
    call.measured = true;
    return call;
}

static xd_result xdi_vsd_validate(xd_ctx *ctx, const xd_vsd_desc *d) {
    const xd_rows *const inputs[3] = { &d->generated, &d->teacher, &d->fake };
    const char *const names[3] = { "generated", "teacher", "fake" };
    for (int i = 0; i < 3; i++)
        XD_TRY(xdi_sample_check_rows(ctx, names[i], inputs[i], d->generated.rows, d->generated.cols));
    XD_TRY(xdi_sample_check_gradient(ctx, "gradient", &d->gradient, inputs, 3));
    XD_REQUIRE(ctx, (int)d->normaliser >= 0 && d->normaliser <= XD_VSD_NONE, XD_ERROR_ARGUMENT,
               "normaliser %d is unknown", (int)d->normaliser);
    XD_REQUIRE(ctx, (int)d->form >= 0 && d->form <= XD_VSD_COMPAT, XD_ERROR_ARGUMENT, "form %d is unknown",
               (int)d->form);
    return xdi_sample_check_common(ctx, &d->common);
}

XD_PRIVATE size_t xdi_vsd_workspace(xd_ctx *ctx, const xd_vsd_desc *desc) {
    xd_vsd_args a;
    xdi_sample_call call = xdi_vsd_call_of(ctx, desc, &a);
    return xdi_sample_bytes(&call);
}

static xd_result xdi_vsd_samples(const xd_launch *launch, xdi_sample_call *call, const xd_vsd_args *a) {
    XD_TRY(call->kernels->vsd_measure(launch, a));
    XD_TRY(xdi_sample_exchange(launch, call));
    XD_TRY(call->kernels->vsd_weigh(launch, a));
    if (a->form != XD_VSD_COMPAT) return XD_OK;
    XD_TRY(call->kernels->vsd_rounded(launch, a));
    XD_TRY(xdi_sample_exchange(launch, call));
    return call->kernels->vsd_settle(launch, a);
}

static xd_result xdi_vsd_gradient(const xd_launch *launch, const void *args) {
    const xd_vsd_args *a = (const xd_vsd_args *)args;
    return a->gradient.data ? xd_ctx_kernels(launch->ctx)->dmd_loss.vsd_slope(launch, a) : XD_OK;
}

XD_API xd_result xd_vsd_loss(xd_ctx *ctx, const xd_vsd_desc *desc, xd_sample_values *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_vsd_args a;
    xdi_sample_call call = xdi_vsd_call_of(ctx, desc, &a);
    xd_result result = XDI_CHECK_GIVEN_AS(ctx, true, out);
    if (result == XD_OK) result = xdi_vsd_validate(ctx, desc);
    if (xdi_plan_is_open(ctx)) return xdi_sample_plan(&call, result);
    result = xdi_sample_open(&call, result);
    const bool alone = result == XD_OK && a.form != XD_VSD_COMPAT && xdi_sample_goes_alone(&call, false);
    if (result == XD_OK)
        result = alone ? call.kernels->vsd_by_sample(&launch, &a) : xdi_vsd_samples(&launch, &call, &a);
    if (result == XD_OK) result = xdi_sample_finish(&call, alone ? NULL : xdi_vsd_gradient, &a, out);
    xdi_sample_close(&call);
    return result;
}
