/* Guidance of clean samples, with the deviations that its rescaled form needs. */

#include "base/internal.h"
#include "dmd/losses.h"
#include "dmd/internal.h"
#include "dmd/state.h"

#include <math.h>
#include <string.h>

XD_PRIVATE xd_guidance xdi_dmd_guidance(const xd_dmd_desc *desc, xd_dmd_role role) {
    xd_guidance guidance = desc->networks[role].guidance;
    if (role != XD_DMD_TEACHER) return guidance;
    guidance.on = desc->guided;
    guidance.scale = desc->guidance_scale;
    return guidance;
}

/* ---- deviations ---- */

/* A number whose f32 has four equal bytes, so that a fill of bytes makes an array of it. */
static double xdi_dmd_constant(void) {
    float value;
    memset(&value, 0x3f, sizeof value);
    return (double)value;
}

XD_PRIVATE bool xdi_dmd_rescales(const xd_dmd_desc *desc) {
    return desc->networks[XD_DMD_TEACHER].guidance.rescale > 0.0 ||
           desc->networks[XD_DMD_FAKE_SCORE].guidance.rescale > 0.0;
}

XD_PRIVATE void xdi_dmd_lay_out_deviations(xd_dmd *d, xd_arena *host, xd_arena *device) {
    const size_t n = (size_t)d->desc.sizes.samples, all = n * (size_t)d->desc.sizes.elements;
    xdi_dmd_deviations *v = &d->deviations;
    v->constant = (float *)xd_arena_take_pointer(device, all * sizeof *v->constant);
    v->sums = (double *)xd_arena_take_pointer(device, n * sizeof *v->sums);
    v->host_sums = (double *)xd_arena_take_pointer(host, n * sizeof *v->host_sums);
    v->shift = (double *)xd_arena_take_pointer(host, n * sizeof *v->shift);
    v->conditional = (double *)xd_arena_take_pointer(host, n * sizeof *v->conditional);
    v->guided = (double *)xd_arena_take_pointer(host, n * sizeof *v->guided);
}

static xd_denoise_desc xdi_dmd_squares_desc(const xd_dmd *d, const void *x, int64_t samples) {
    xd_denoise_desc desc = xd_denoise_defaults();
    desc.prediction = xdi_dmd_rows(&d->desc.sizes, x, samples);
    desc.clean = desc.noise = xdi_dmd_gradient_rows(&d->desc.sizes, d->deviations.constant, samples);
    desc.terms = d->factors.terms;
    desc.common = xdi_dmd_common(d, xdi_dmd_whole(&d->desc.sizes));
    desc.common.split = d->desc.sizes.split;
    desc.common.sample_loss = d->deviations.sums;
    return desc;
}

XD_PRIVATE size_t xdi_dmd_guidance_workspace(const xd_dmd *d) {
    const int64_t n = d->desc.sizes.samples;
    xd_denoise_desc desc = xdi_dmd_squares_desc(d, d, n); /* any address: nothing is read */
    desc.clean = desc.noise = xdi_dmd_gradient_rows(&d->desc.sizes, (const float *)(const void *)d, n);
    desc.terms = (const xd_denoise_term *)(const void *)d;
    return xdi_denoise_workspace(d->ctx, &desc);
}

/* out [samples] = sums over whole samples of (x + shift c)^2: the denoising term's sums, which are those of all ranks, and in
 * INVARIANT mode exact. */
static xd_result xdi_dmd_squares(xd_dmd *d, const void *x, int64_t samples, double *out) {
    const xd_denoise_desc desc = xdi_dmd_squares_desc(d, x, samples);
    for (int64_t i = 0; i < samples; i++) {
        d->factors.host_terms[i].prediction = d->factors.host_terms[i].weight = 1.0;
        d->factors.host_terms[i].clean = d->deviations.shift[i];
        d->factors.host_terms[i].noise = 0.0;
    }
    XD_TRY(xdi_dmd_send(d->ctx, d->factors.terms, d->factors.host_terms,
                        (size_t)samples * sizeof *d->factors.terms));
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->results.value));
    return samples > 0 ? xd_read(d->ctx, out, d->deviations.sums, (size_t)samples * sizeof *out) : XD_OK;
}

/* out [samples] = means: sum (x + a)^2 - sum (x - a)^2 = 4 a sum x, with an a of the size of x. */
static xd_result xdi_dmd_means(xd_dmd *d, const void *x, int64_t samples, double *out) {
    const double c = xdi_dmd_constant(), whole = (double)xdi_dmd_whole(&d->desc.sizes);
    double *shift = d->deviations.shift, *sums = d->deviations.host_sums;
    for (int64_t i = 0; i < samples; i++) shift[i] = 0.0;
    XD_TRY(xdi_dmd_squares(d, x, samples, out));
    for (int64_t i = 0; i < samples; i++) shift[i] = (double)(float)(sqrt(out[i] / whole) / c);
    XD_TRY(xdi_dmd_squares(d, x, samples, out));
    for (int64_t i = 0; i < samples; i++) shift[i] = -shift[i];
    XD_TRY(xdi_dmd_squares(d, x, samples, sums));
    for (int64_t i = 0; i < samples; i++)
        out[i] = shift[i] < 0.0 ? (out[i] - sums[i]) / (-4.0 * shift[i] * c * whole) : 0.0;
    return XD_OK;
}

/* out [samples] = variances: squares around nearly the mean do not cancel, however far it is from 0. What is below the rounding of
 * f32 is none. */
static xd_result xdi_dmd_variances(xd_dmd *d, const void *x, int64_t samples, double *out) {
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const double c = xdi_dmd_constant(), whole = (double)xdi_dmd_whole(&d->desc.sizes);
    const size_t bytes = (size_t)(samples * d->desc.sizes.elements) * sizeof(float);
    double *shift = d->deviations.shift, *sums = d->deviations.host_sums;
    if (bytes > 0) XD_TRY(xd_ctx_kernels(d->ctx)->memory.fill(&launch, d->deviations.constant, 0x3f, bytes));
    XD_TRY(xdi_dmd_means(d, x, samples, out));
    for (int64_t i = 0; i < samples; i++) shift[i] = -(double)(float)(out[i] / c);
    XD_TRY(xdi_dmd_squares(d, x, samples, sums));
    for (int64_t i = 0; i < samples; i++) {
        const double mean = out[i], left = mean + shift[i] * c, variance = sums[i] / whole - left * left;
        out[i] = variance > ldexp(mean * mean, -44) ? variance : 0.0;
    }
    return XD_OK;
}

/* ---- guidance ---- */

XD_PRIVATE xd_result xdi_dmd_guide_clean(xd_dmd *d, const xd_guidance *guidance, int64_t samples, void *x0,
                                         const void *negative) {
    const xd_rows with = xdi_dmd_rows(&d->desc.sizes, x0, samples);
    const xd_rows without = xdi_dmd_rows(&d->desc.sizes, negative, samples);
    double *conditional = d->deviations.conditional, *guided = d->deviations.guided;
    for (int64_t i = 0; i < samples; i++) d->factors.host_mixes[i] = xdi_guidance_mix(guidance->scale);
    if (guidance->rescale == 0.0) return xdi_dmd_mix(d, with, without, with);
    XD_TRY(xdi_dmd_mix(d, with, without, xdi_dmd_rows(&d->desc.sizes, d->tensors.guided_x0, samples)));
    XD_TRY(xdi_dmd_variances(d, x0, samples, conditional));
    XD_TRY(xdi_dmd_variances(d, d->tensors.guided_x0, samples, guided));
    for (int64_t i = 0; i < samples; i++) { /* from the two again, so that a narrow type rounds once */
        const double ratio = guided[i] > 0.0 ? sqrt(conditional[i] / guided[i]) : 1.0;
        const double factor = guidance->rescale * ratio + (1.0 - guidance->rescale);
        d->factors.host_mixes[i] = xdi_guidance_mix(guidance->scale);
        d->factors.host_mixes[i].c0 *= factor;
        d->factors.host_mixes[i].c1 *= factor;
    }
    return xdi_dmd_mix(d, with, without, with);
}
