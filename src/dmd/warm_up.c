/* Warm-up of the student: regression of the teacher's velocities from rung to rung. */

#include "base/internal.h"
#include "dmd/internal.h"
#include "dmd/state.h"

#include <string.h>

/* x_t = x at the next rung, by the teacher from the input; velocity = the mean one between the two. */
static xd_result xdi_dmd_teacher_velocity(xd_dmd *d, const xd_dmd_batch *batch, int64_t rung,
                                          void *velocity) {
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    const int64_t n = batch->samples, count = (int64_t)d->desc.regression.substeps + 1;
    const double t = xdi_dmd_rung_time(&d->desc, rung), next = xdi_dmd_rung_time(&d->desc, rung + 1);
    void *x = d->tensors.noised;
    for (int64_t k = 0; k + 1 < count; k++) {
        const double from = xdi_even_step(t, next, count, k), to = xdi_even_step(t, next, count, k + 1);
        const xdi_dmd_point at = { k == 0 ? d->tensors.input : x, &d->noised };
        xdi_dmd_set_times(&d->desc, &d->noised, n, from);
        XD_TRY(xdi_dmd_guide(d, batch, at));
        XD_TRY(xdi_dmd_euler(d, n, at, to - from, x));
    }
    for (int64_t i = 0; i < n; i++) {
        d->factors.host_mixes[i].c0 = 1.0 / (next - t);
        d->factors.host_mixes[i].c1 = -1.0 / (next - t);
    }
    return xdi_dmd_mix(d, xdi_dmd_rows(sizes, x, n), xdi_dmd_rows(sizes, d->tensors.input, n),
                       xdi_dmd_rows(sizes, velocity, n));
}

XD_PRIVATE int64_t xdi_dmd_warm_up_samples(const xd_dmd_desc *desc) {
    return desc->regression.step_samples ? desc->regression.step_samples : desc->sizes.step_samples;
}

/* The square of velocity(p, x_t) - velocity, which is linear in p, x_t and velocity: the denoising term's sum, with factors of
 * its own. */
static xd_result xdi_dmd_regress(xd_dmd *d, int64_t samples, const void *velocity, double *value) {
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
        d->factors.host_terms[i].prediction = mix.c0;
        d->factors.host_terms[i].clean = mix.c1;
        d->factors.host_terms[i].noise = -1.0;
        d->factors.host_terms[i].weight = 1.0;
    }
    XD_TRY(xdi_dmd_send(d->ctx, d->factors.terms, d->factors.host_terms,
                        (size_t)samples * sizeof *d->factors.terms));
    desc.prediction = xdi_dmd_rows(&d->desc.sizes, d->tensors.prediction, samples);
    desc.clean = xdi_dmd_rows(&d->desc.sizes, d->tensors.input, samples);
    desc.noise = xdi_dmd_rows(&d->desc.sizes, velocity, samples);
    desc.gradient = xdi_dmd_gradient_rows(&d->desc.sizes, d->gradients.prediction, samples);
    desc.terms = d->factors.terms;
    desc.common = xdi_dmd_common(d, 1);
    desc.common.denominator_value = (double)xdi_dmd_warm_up_samples(&d->desc) * numbers;
    desc.common.split = d->desc.sizes.split;
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->results.value));
    return xdi_dmd_add_value(d, value);
}

static xd_result xdi_dmd_learn_velocity(xd_dmd *d, int64_t micro_batch, const xd_dmd_batch *batch,
                                        int64_t rung, const void *velocity, double *value) {
    xd_network_call call;
    xdi_dmd_set_times(&d->desc, &d->input, batch->samples, xdi_dmd_rung_time(&d->desc, rung));
    call = xdi_dmd_call(batch, xdi_dmd_input_point(d), d->tensors.prediction);
    call.keep = true;
    XD_TRY(xdi_dmd_forward(d, XD_DMD_STUDENT, &call));
    XD_TRY(xdi_dmd_regress(d, batch->samples, velocity, value));
    call.raw = NULL;
    call.raw_gradient = d->gradients.prediction;
    call.weights = true;
    call.micro_batch = micro_batch;
    call.more = rung + 1 < d->desc.rungs.steps;
    return xdi_dmd_backward(d, XD_DMD_STUDENT, &call);
}

static xd_result xdi_dmd_check_warm_up(const xd_dmd *d, int64_t micro_batch, const xd_dmd_batch *batch) {
    static const char *const names[] = { "FLOW", "EDM", "VP", "TRIG", "CUSTOM" };
    XD_REQUIRE(d->ctx, d->desc.regression.substeps >= 1, XD_ERROR_STATE, "warm-up by %d steps a rung",
               d->desc.regression.substeps);
    XD_REQUIRE(d->ctx, d->desc.schedule.kind == XD_NOISE_FLOW, XD_ERROR_STATE,
               "warm-up under the schedule %s; it is for FLOW", names[d->desc.schedule.kind]);
    XD_TRY(xdi_dmd_check_batch(d, micro_batch, batch, xdi_dmd_warm_up_samples(&d->desc)));
    return xdi_dmd_check_guidance(d, batch, XD_DMD_TEACHER);
}

XD_PRIVATE xd_result xdi_dmd_warm_up(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                     xd_dmd_values *values) {
    XD_TRY(xdi_dmd_check_warm_up(dmd, micro_batch, batch));
    dmd->noised_micro_batch = -1;
    XD_TRY(xdi_dmd_take_noise(dmd, XD_DMD_TEACHER, batch));
    XD_TRY(xdi_dmd_begin(dmd, dmd->tensors.noise, batch->samples));
    for (int64_t rung = 0; rung < dmd->desc.rungs.steps; rung++) {
        void *input = dmd->tensors.input, *velocity = dmd->tensors.scratch;
        XD_TRY(xdi_dmd_teacher_velocity(dmd, batch, rung, velocity));
        XD_TRY(xdi_dmd_learn_velocity(dmd, micro_batch, batch, rung, velocity,
                                      values ? &values->regression : NULL));
        dmd->tensors.input = dmd->tensors.noised; /* where the teacher has come to */
        dmd->tensors.noised = input;
    }
    return XD_OK;
}
