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

static xd_denoise_desc xdi_dmd_squares_desc(const xd_dmd *d, xdi_dmd_tensor x, int64_t samples) {
    xd_denoise_desc desc = xd_denoise_defaults();
    desc.prediction = xdi_dmd_rows(d, d->tensors[x], samples);
    desc.clean = desc.noise = xdi_dmd_slopes(d, d->raw_slope, samples);
    desc.terms = d->terms;
    desc.common = xdi_dmd_common(d, xdi_dmd_whole(&d->desc.sizes));
    desc.common.split = d->desc.sizes.split;
    desc.common.sample_loss = d->distances;
    return desc;
}

XD_PRIVATE size_t xdi_dmd_guidance_workspace(const xd_dmd *d) {
    const int64_t n = d->desc.sizes.samples;
    xd_denoise_desc desc = xdi_dmd_squares_desc(d, XDI_DMD_RAW, n);
    desc.prediction = xdi_dmd_rows(d, d, n); /* any address: nothing is read */
    desc.clean = desc.noise = xdi_dmd_slopes(d, (const float *)(const void *)d, n);
    desc.terms = (const xd_denoise_term *)(const void *)d;
    return xdi_denoise_workspace(d->ctx, &desc);
}

/* out [samples] = sums over whole samples of (x + shift c)^2, with c in raw_slope and shift in spreads[2 samples ...]: the
 * denoising term's sums, which are those of all ranks, and in INVARIANT mode exact. */
static xd_result xdi_dmd_squares(xd_dmd *d, xdi_dmd_tensor x, int64_t samples, double *out) {
    const double *shift = d->spreads + 2 * d->desc.sizes.samples;
    const xd_denoise_desc desc = xdi_dmd_squares_desc(d, x, samples);
    for (int64_t i = 0; i < samples; i++) {
        d->host_terms[i].prediction = d->host_terms[i].weight = 1.0;
        d->host_terms[i].clean = shift[i];
        d->host_terms[i].noise = 0.0;
    }
    XD_TRY(xdi_dmd_send(d, d->terms, d->host_terms, (size_t)samples * sizeof *d->terms));
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->value));
    return samples > 0 ? xd_read(d->ctx, out, d->distances, (size_t)samples * sizeof *out) : XD_OK;
}

/* out [samples] = means: sum (x + a)^2 - sum (x - a)^2 = 4 a sum x, with an a of the size of x. */
static xd_result xdi_dmd_means(xd_dmd *d, xdi_dmd_tensor x, int64_t samples, double *out) {
    const double c = xdi_dmd_constant(), whole = (double)xdi_dmd_whole(&d->desc.sizes);
    double *shift = d->spreads + 2 * d->desc.sizes.samples;
    for (int64_t i = 0; i < samples; i++) shift[i] = 0.0;
    XD_TRY(xdi_dmd_squares(d, x, samples, out));
    for (int64_t i = 0; i < samples; i++) shift[i] = (double)(float)(sqrt(out[i] / whole) / c);
    XD_TRY(xdi_dmd_squares(d, x, samples, out));
    for (int64_t i = 0; i < samples; i++) shift[i] = -shift[i];
    XD_TRY(xdi_dmd_squares(d, x, samples, d->draws));
    for (int64_t i = 0; i < samples; i++)
        out[i] = shift[i] < 0.0 ? (out[i] - d->draws[i]) / (-4.0 * shift[i] * c * whole) : 0.0;
    return XD_OK;
}

/* out [samples] = variances: squares around nearly the mean do not cancel, however far it is from 0. What is below the rounding of
 * f32 is none. */
static xd_result xdi_dmd_variances(xd_dmd *d, xdi_dmd_tensor x, int64_t samples, double *out) {
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const double c = xdi_dmd_constant(), whole = (double)xdi_dmd_whole(&d->desc.sizes);
    const size_t bytes = (size_t)(samples * d->desc.sizes.elements) * sizeof(float);
    double *shift = d->spreads + 2 * d->desc.sizes.samples;
    if (bytes > 0) XD_TRY(xd_ctx_kernels(d->ctx)->memory.fill(&launch, d->raw_slope, 0x3f, bytes));
    XD_TRY(xdi_dmd_means(d, x, samples, out));
    for (int64_t i = 0; i < samples; i++) shift[i] = -(double)(float)(out[i] / c);
    XD_TRY(xdi_dmd_squares(d, x, samples, d->draws));
    for (int64_t i = 0; i < samples; i++) {
        const double mean = out[i], left = mean + shift[i] * c, variance = d->draws[i] / whole - left * left;
        out[i] = variance > ldexp(mean * mean, -44) ? variance : 0.0;
    }
    return XD_OK;
}

/* ---- guidance ---- */

static xd_result xdi_dmd_mix_guided(xd_dmd *d, int64_t samples, xdi_dmd_tensor conditional, void *out) {
    return xdi_dmd_mix(d, xdi_dmd_rows(d, d->tensors[conditional], samples),
                       xdi_dmd_rows(d, d->tensors[XDI_DMD_REAL], samples), xdi_dmd_rows(d, out, samples));
}

XD_PRIVATE xd_result xdi_dmd_guide_clean(xd_dmd *d, const xd_guidance *guidance, int64_t samples,
                                         xdi_dmd_tensor out, xdi_dmd_tensor scratch) {
    double *plain = d->spreads, *guided = plain ? plain + d->desc.sizes.samples : NULL;
    for (int64_t i = 0; i < samples; i++) d->host_mixes[i] = xdi_guidance_mix(guidance->scale);
    if (guidance->rescale == 0.0) return xdi_dmd_mix_guided(d, samples, out, d->tensors[out]);
    XD_TRY(xdi_dmd_mix_guided(d, samples, out, d->tensors[scratch]));
    XD_TRY(xdi_dmd_variances(d, out, samples, plain));
    XD_TRY(xdi_dmd_variances(d, scratch, samples, guided));
    for (int64_t i = 0; i < samples; i++) { /* from the two again, so that a narrow type rounds once */
        const double ratio = guided[i] > 0.0 ? sqrt(plain[i] / guided[i]) : 1.0;
        const double factor = guidance->rescale * ratio + (1.0 - guidance->rescale);
        d->host_mixes[i] = xdi_guidance_mix(guidance->scale);
        d->host_mixes[i].c0 *= factor;
        d->host_mixes[i].c1 *= factor;
    }
    return xdi_dmd_mix_guided(d, samples, out, d->tensors[out]);
}
