/* Warm-up of the student: regression of the teacher's velocities from rung to rung. */

#include "base/internal.h"
#include "dmd/internal.h"
#include "dmd/state.h"

#include <string.h>

/* NOISED = x at the next rung, by the teacher from x_t in INPUT; TARGET = the mean velocity between the two. */
static xd_result xdi_dmd_teach_velocity(xd_dmd *d, const xd_dmd_batch *batch, int64_t rung) {
    const int64_t n = batch->samples, count = (int64_t)d->desc.regression.substeps + 1;
    const double t = xdi_dmd_rung_time(d, rung), next = xdi_dmd_rung_time(d, rung + 1);
    void *x = d->tensors[XDI_DMD_NOISED];
    for (int64_t k = 0; k + 1 < count; k++) {
        const double from = xdi_even_step(t, next, count, k), to = xdi_even_step(t, next, count, k + 1);
        xdi_dmd_point at = { XDI_DMD_NOISED, NULL };
        at.times = &d->noised;
        if (k == 0) at.tensor = XDI_DMD_INPUT;
        xdi_dmd_set_times(d, &d->noised, n, from);
        XD_TRY(xdi_dmd_guide(d, batch, at));
        XD_TRY(xdi_dmd_euler(d, n, at, to - from, x));
    }
    for (int64_t i = 0; i < n; i++) {
        d->host_mixes[i].c0 = 1.0 / (next - t);
        d->host_mixes[i].c1 = -1.0 / (next - t);
    }
    return xdi_dmd_mix(d, xdi_dmd_rows(d, x, n), xdi_dmd_rows(d, d->tensors[XDI_DMD_INPUT], n),
                       xdi_dmd_rows(d, d->tensors[XDI_DMD_TARGET], n));
}

XD_PRIVATE int64_t xdi_dmd_warm_up_samples(const xd_dmd *d) {
    return d->desc.regression.step_samples ? d->desc.regression.step_samples : d->desc.sizes.step_samples;
}

/* The square of velocity(p, x_t) - TARGET, which is linear in p, x_t and TARGET: the denoising term's sum, with factors of
 * its own. */
static xd_result xdi_dmd_regress(xd_dmd *d, int64_t samples, double *value) {
    const double numbers = (double)xdi_dmd_whole(&d->desc.sizes) * (double)d->desc.rungs.steps;
    xd_denoise_desc desc = xd_denoise_defaults();
    xd_conversion conversion;
    xd_mix mix = { 0.0, 0.0 };
    memset(&conversion, 0, sizeof conversion);
    conversion.from = d->desc.networks[XD_DMD_STUDENT].predicts;
    conversion.to = XD_PREDICT_FLOW;
    conversion.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < samples; i++) {
        XD_TRY(xd_prediction_mix(d->ctx, &d->desc.schedule, &conversion, d->input.exact[i], &mix));
        d->host_terms[i].prediction = mix.c0;
        d->host_terms[i].clean = mix.c1;
        d->host_terms[i].noise = -1.0;
        d->host_terms[i].weight = 1.0;
    }
    XD_TRY(xdi_dmd_send(d, d->terms, d->host_terms, (size_t)samples * sizeof *d->terms));
    desc.prediction = xdi_dmd_rows(d, d->tensors[XDI_DMD_RAW], samples);
    desc.clean = xdi_dmd_rows(d, d->tensors[XDI_DMD_INPUT], samples);
    desc.noise = xdi_dmd_rows(d, d->tensors[XDI_DMD_TARGET], samples);
    desc.gradient = xdi_dmd_slopes(d, d->raw_slope, samples);
    desc.terms = d->terms;
    desc.common = xdi_dmd_common(d, 1);
    desc.common.denominator_value = (double)xdi_dmd_warm_up_samples(d) * numbers;
    desc.common.split = d->desc.sizes.split;
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->value));
    return xdi_dmd_add_value(d, value);
}

static xd_result xdi_dmd_learn_velocity(xd_dmd *d, int64_t leaf, const xd_dmd_batch *batch, int64_t rung,
                                        double *value) {
    xd_network_call call;
    xdi_dmd_set_times(d, &d->input, batch->samples, xdi_dmd_rung_time(d, rung));
    call = xdi_dmd_call(d, batch, d->tensors[XDI_DMD_INPUT], &d->input);
    call.keep = true;
    XD_TRY(xdi_dmd_forward(d, XD_DMD_STUDENT, &call));
    XD_TRY(xdi_dmd_regress(d, batch->samples, value));
    call.raw = NULL;
    call.raw_gradient = d->raw_slope;
    call.weights = true;
    call.leaf = leaf;
    call.more = rung + 1 < d->desc.rungs.steps;
    return xdi_dmd_backward(d, XD_DMD_STUDENT, &call);
}

static xd_result xdi_dmd_check_warm_up(const xd_dmd *d, int64_t leaf, const xd_dmd_batch *batch) {
    static const char *const names[] = { "FLOW", "EDM", "VP", "TRIG", "CUSTOM" };
    XD_REQUIRE(d->ctx, d->desc.regression.substeps >= 1, XD_ERROR_STATE, "warm-up by %d steps a rung",
               d->desc.regression.substeps);
    XD_REQUIRE(d->ctx, d->desc.schedule.kind == XD_NOISE_FLOW, XD_ERROR_STATE,
               "warm-up under the schedule %s; it is for FLOW", names[d->desc.schedule.kind]);
    XD_TRY(xdi_dmd_check_batch(d, leaf, batch, xdi_dmd_warm_up_samples(d)));
    return xdi_dmd_check_guidance(d, batch, XD_DMD_TEACHER);
}

XD_PRIVATE xd_result xdi_dmd_warm_up(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch,
                                     xd_dmd_values *values) {
    XD_TRY(xdi_dmd_check_warm_up(dmd, leaf, batch));
    dmd->noised_leaf = -1;
    XD_TRY(xdi_dmd_take_noise(dmd, XD_DMD_TEACHER, batch));
    XD_TRY(xdi_dmd_begin(dmd, dmd->tensors[XDI_DMD_NOISE], batch->samples));
    for (int64_t rung = 0; rung < dmd->desc.rungs.steps; rung++) {
        void *input = dmd->tensors[XDI_DMD_INPUT];
        XD_TRY(xdi_dmd_teach_velocity(dmd, batch, rung));
        XD_TRY(xdi_dmd_learn_velocity(dmd, leaf, batch, rung, values ? &values->regression : NULL));
        dmd->tensors[XDI_DMD_INPUT] = dmd->tensors[XDI_DMD_NOISED]; /* where the teacher has come to */
        dmd->tensors[XDI_DMD_NOISED] = input;
    }
    return XD_OK;
}
