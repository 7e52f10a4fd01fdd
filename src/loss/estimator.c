/* Monte-Carlo estimates of a KL divergence. */

#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "loss/estimator.h"

#include <string.h>

static xd_result xdi_estimate_validate(xd_ctx *ctx, const xd_kl_estimate_desc *d) {
    XD_REQUIRE(ctx, (int)d->kind >= 0 && (int)d->kind <= (int)XD_KL_K3, XD_ERROR_ARGUMENT,
               "KL estimator %d does not exist", (int)d->kind);
    XD_REQUIRE(ctx, d->input_clamp >= 0.0 && d->output_clamp >= 0.0, XD_ERROR_ARGUMENT,
               "clamps %g and %g must not be negative", d->input_clamp, d->output_clamp);
    XD_REQUIRE(ctx, d->count >= 0, XD_ERROR_ARGUMENT, "%lld tokens", (long long)d->count);
    XDI_GIVEN_LIST(ctx, d->logprobs, d->count);
    XDI_GIVEN_LIST(ctx, d->reference, d->count);
    return XD_OK;
}

XD_API xd_result xd_kl_estimate(xd_ctx *ctx, const xd_kl_estimate_desc *desc, double *sum) {
    XDI_GIVEN(ctx, ctx, desc, sum);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_estimate_args a;
    xd_flagged_sum total;
    XD_TRY(xdi_estimate_validate(ctx, desc));
    memset(&a, 0, sizeof a);
    a.logprobs = desc->logprobs;
    a.reference = desc->reference;
    a.weight = desc->weight;
    a.count = desc->count;
    a.kind = (int)desc->kind;
    a.input_clamp = desc->input_clamp != 0.0 ? desc->input_clamp : (double)INFINITY;
    a.output_clamp = desc->output_clamp;
    a.values = desc->values;
    a.gradient = desc->gradient;
    a.out = (xd_flagged_sum *)xdi_call_memory(ctx, XD_FLAGGED_SUMS * sizeof *a.out);
    XD_REQUIRE(ctx, a.out, XD_ERROR_MEMORY, "no room for %d sums", (int)XD_FLAGGED_SUMS);
    xd_result result = xd_ctx_kernels(ctx)->estimate(&launch, &a);
    if (result == XD_OK) result = xd_read(ctx, &total, a.out, sizeof total);
    xdi_call_memory_done(ctx, a.out);
    XD_TRY(result);
    XD_REQUIRE(ctx, total.bad < 0, XD_ERROR_DATA,
               "the estimate of token %lld, or its weight, is not finite or too large for f32",
               (long long)total.bad);
    *sum = total.value;
    return XD_OK;
}
