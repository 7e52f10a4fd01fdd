#include <math.h>

static xd_result xdi_estimate_validate(xd_ctx *ctx, const xd_kl_estimate_desc *d) {
    XDI_REQUIRE(ctx, (int)d->kind >= 0 && (int)d->kind <= (int)XD_KL_K3, XD_ERROR_ARGUMENT,
                "KL estimator %d does not exist", (int)d->kind);
    XDI_REQUIRE(ctx, d->input_clamp >= 0.0 && d->output_clamp >= 0.0, XD_ERROR_ARGUMENT,
                "clamps %g and %g must not be negative", d->input_clamp, d->output_clamp);
    XDI_REQUIRE(ctx, d->count >= 0 && (d->count == 0 || (d->logprobs && d->reference)), XD_ERROR_ARGUMENT,
                "%lld tokens without log-probabilities", (long long)d->count);
    return XD_OK;
}

static double xdi_estimate_value(xd_kl_estimator kind, double rho) {
    if (kind == XD_KL_K1) return -rho;
    return kind == XD_KL_K2 ? 0.5 * rho * rho : expm1(rho) - rho;
}

/* With respect to the student's log-probability, of which rho is minus. */
static double xdi_estimate_slope(xd_kl_estimator kind, double rho) {
    if (kind == XD_KL_K1) return 1.0;
    return kind == XD_KL_K2 ? -rho : -expm1(rho);
}

XD_API xd_result xd_kl_estimate(xd_ctx *ctx, const xd_kl_estimate_desc *desc, double *sum) {
    const xd_kl_estimate_desc *d = desc;
    const double most = d->input_clamp != 0.0 ? d->input_clamp : 20.0;
    double total = 0.0;
    int64_t bad = -1;
    XDI_TRY(xdi_estimate_validate(ctx, d));
    for (int64_t i = 0; i < d->count; i++) {
        const double free_rho = (double)d->reference[i] - (double)d->logprobs[i];
        const double rho = fmax(-most, fmin(most, free_rho));
        const double weight = d->weight ? (double)d->weight[i] : 1.0;
        double value = isnan(free_rho) ? free_rho : xdi_estimate_value(d->kind, rho);
        double slope = rho == free_rho ? xdi_estimate_slope(d->kind, rho) : 0.0;
        if (d->output_clamp != 0.0 && fabs(value) > d->output_clamp) {
            value = value > 0.0 ? d->output_clamp : -d->output_clamp;
            slope = 0.0;
        }
        if (!isfinite(value)) {
            if (bad < 0 && weight != 0.0) bad = i;
            value = slope = 0.0;
        }
        total += weight * value;
        if (d->values) d->values[i] = (float)value;
        if (d->gradient) d->gradient[i] = (float)(weight * slope);
    }
    XDI_REQUIRE(ctx, bad < 0, XD_ERROR_DATA, "the estimate of token %lld is not finite", (long long)bad);
    *sum = total;
    return XD_OK;
}
