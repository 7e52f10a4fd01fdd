/* Terms on a discriminator's logits. */

#include "dmd/gan.h"
#include "dmd/losses.h"

#include <string.h>

XD_API xd_gan_desc xd_gan_defaults(void) {
    xd_gan_desc d;
    memset(&d, 0, sizeof d);
    d.common.weight = 1.0;
    return d;
}

static xdi_sample_call xdi_gan_call_of(xd_ctx *ctx, const xd_gan_desc *d, xd_gan_args *a) {
    xdi_sample_call call;
    memset(&call, 0, sizeof call);
    memset(a, 0, sizeof *a);
    a->base.samples = d->fake.rows;
    a->base.elements = d->fake.cols;
    a->fake = d->fake;
    a->real = d->real;
    a->fake_gradient = d->fake_gradient;
    a->real_gradient = d->real_gradient;
    a->role = d->role;
    a->kind = d->kind;
    call.ctx = ctx;
    call.kernels = &xd_ctx_kernels(ctx)->dmd_loss;
    call.common = &d->common;
    call.args = &a->base;
    return call;
}

static xd_result xdi_gan_validate(xd_ctx *ctx, const xd_gan_desc *d) {
    const xd_rows *const inputs[2] = { &d->fake, &d->real };
    const bool pair = d->role != XD_GAN_GENERATOR;
    XD_REQUIRE(ctx, (int)d->role >= 0 && d->role <= XD_GAN_R1, XD_ERROR_ARGUMENT, "role %d is unknown",
               (int)d->role);
    XD_REQUIRE(ctx, (int)d->kind >= 0 && d->kind <= XD_GAN_HINGE, XD_ERROR_ARGUMENT,
               "adversarial loss %d is unknown", (int)d->kind);
    XD_TRY(xdi_sample_check_rows(ctx, "fake", &d->fake, d->fake.rows, d->fake.cols));
    XD_REQUIRE(ctx, pair || (!d->real.data && !d->real_gradient.data), XD_ERROR_ARGUMENT,
               "a generator's term has no real logits: role %d", (int)d->role);
    if (pair) XD_TRY(xdi_sample_check_rows(ctx, "real", &d->real, d->fake.rows, d->fake.cols));
    XD_TRY(xdi_sample_check_gradient(ctx, "fake_gradient", &d->fake_gradient, inputs, 1));
    XD_TRY(xdi_sample_check_gradient(ctx, "real_gradient", &d->real_gradient, inputs + 1, 1));
    XD_REQUIRE(ctx, !d->fake_gradient.data || d->fake_gradient.data != d->real.data, XD_ERROR_ARGUMENT,
               "fake_gradient at %p would lie over the real logits", d->fake_gradient.data);
    XD_REQUIRE(ctx, !d->real_gradient.data || d->real_gradient.data != d->fake.data, XD_ERROR_ARGUMENT,
               "real_gradient at %p would lie over the fake logits", d->real_gradient.data);
    XD_REQUIRE(ctx, !d->common.split, XD_ERROR_ARGUMENT, "logits are not split, but split has %d ranks",
               xd_comm_size(d->common.split));
    return xdi_sample_check_common(ctx, &d->common);
}

XD_PRIVATE size_t xdi_gan_workspace(xd_ctx *ctx, const xd_gan_desc *desc) {
    xd_gan_args a;
    xdi_sample_call call = xdi_gan_call_of(ctx, desc, &a);
    return xdi_sample_bytes(&call);
}

static xd_result xdi_gan_gradient(const xd_launch *launch, const void *args) {
    const xd_gan_args *a = (const xd_gan_args *)args;
    if (!a->fake_gradient.data && !a->real_gradient.data) return XD_OK;
    return xd_ctx_kernels(launch->ctx)->dmd_loss.gan_slope(launch, a);
}

XD_API xd_result xd_gan_loss(xd_ctx *ctx, const xd_gan_desc *desc, xd_sample_values *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_gan_args a;
    xdi_sample_call call = xdi_gan_call_of(ctx, desc, &a);
    xd_result result = XDI_CHECK_GIVEN_AS(ctx, true, out);
    if (result == XD_OK) result = xdi_gan_validate(ctx, desc);
    if (xdi_plan_is_open(ctx)) return xdi_sample_plan(&call, result);
    result = xdi_sample_open(&call, result);
    if (result == XD_OK) result = call.kernels->gan_terms(&launch, &a);
    if (result == XD_OK) result = xdi_sample_finish(&call, xdi_gan_gradient, &a, out);
    xdi_sample_close(&call);
    return result;
}
