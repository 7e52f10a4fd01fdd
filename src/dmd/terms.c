/* The terms of the student and of the fake score. */

#include "base/internal.h"
#include "dmd/state.h"

#include <string.h>

/* ---- the student ---- */

static xd_result xdi_dmd_read_clean(xd_dmd *d, xd_dmd_role role, int64_t samples, xdi_dmd_tensor out) {
    xdi_dmd_reading reading;
    reading.role = role;
    reading.to = XD_PREDICT_X0;
    reading.times = &d->noised;
    reading.hidden = d->tensors[XDI_DMD_NOISED];
    return xdi_dmd_read(d, reading, samples, d->tensors[out]);
}

/* TARGET = what the teacher makes of x_t, away from the negative condition when guided. */
static xd_result xdi_dmd_teach(xd_dmd *d, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    const bool adversarial = xdi_dmd_adversarial(&d->desc);
    const xd_guidance guidance = xdi_dmd_guidance(&d->desc, XD_DMD_TEACHER);
    xd_network_call call = xdi_dmd_call(d, batch, d->tensors[XDI_DMD_NOISED], &d->noised);
    call.slot = XDI_DMD_SLOT_FAKE;
    call.keep = adversarial;
    if (adversarial) call.features = d->features[XDI_DMD_SLOT_FAKE].values;
    XD_TRY(xdi_dmd_forward(d, XD_DMD_TEACHER, &call));
    XD_TRY(xdi_dmd_read_clean(d, XD_DMD_TEACHER, n, XDI_DMD_TARGET));
    if (!guidance.on) return XD_OK;
    call.slot = XDI_DMD_SLOT_REAL;
    call.keep = false;
    call.features = NULL;
    call.condition = batch->negative;
    XD_TRY(xdi_dmd_forward(d, XD_DMD_TEACHER, &call));
    XD_TRY(xdi_dmd_read_clean(d, XD_DMD_TEACHER, n, XDI_DMD_REAL));
    return xdi_dmd_guide_clean(d, &guidance, n, XDI_DMD_TARGET, XDI_DMD_RAW);
}

/* FAKE = what the fake score makes of x_t. */
static xd_result xdi_dmd_follow(xd_dmd *d, const xd_dmd_batch *batch) {
    const xd_guidance guidance = xdi_dmd_guidance(&d->desc, XD_DMD_FAKE_SCORE);
    xd_network_call call = xdi_dmd_call(d, batch, d->tensors[XDI_DMD_NOISED], &d->noised);
    XD_TRY(xdi_dmd_forward(d, XD_DMD_FAKE_SCORE, &call));
    XD_TRY(xdi_dmd_read_clean(d, XD_DMD_FAKE_SCORE, batch->samples, XDI_DMD_FAKE));
    if (!guidance.on) return XD_OK;
    call.condition = batch->negative;
    XD_TRY(xdi_dmd_forward(d, XD_DMD_FAKE_SCORE, &call));
    XD_TRY(xdi_dmd_read_clean(d, XD_DMD_FAKE_SCORE, batch->samples, XDI_DMD_REAL));
    return xdi_dmd_guide_clean(d, &guidance, batch->samples, XDI_DMD_FAKE, XDI_DMD_RAW);
}

/* The mean over the samples of the whole step, in the order of the leaf's. */
static xd_result xdi_dmd_add_distances(xd_dmd *d, int64_t samples, double *value) {
    double sum = 0.0;
    if (samples == 0) return XD_OK;
    XD_TRY(xd_read(d->ctx, d->draws, d->distances, (size_t)samples * sizeof *d->distances));
    for (int64_t i = 0; i < samples; i++) sum += d->draws[i];
    *value += sum / (double)d->desc.sizes.step_samples;
    return XD_OK;
}

static xd_result xdi_dmd_match(xd_dmd *d, int64_t samples, const double *weights, xd_dmd_values *values) {
    xd_vsd_desc desc = xd_vsd_defaults();
    desc.generated = xdi_dmd_rows(d, d->tensors[XDI_DMD_GENERATED], samples);
    desc.teacher = xdi_dmd_rows(d, d->tensors[XDI_DMD_TARGET], samples);
    desc.fake = xdi_dmd_rows(d, d->tensors[XDI_DMD_FAKE], samples);
    desc.gradient = xdi_dmd_slopes(d, d->slope, samples);
    desc.sample_scale = weights;
    desc.normaliser = d->desc.normaliser;
    desc.common = xdi_dmd_common(d, xdi_dmd_whole(&d->desc.sizes));
    desc.common.split = d->desc.sizes.split;
    desc.distance = d->distances;
    XD_TRY(xd_vsd_loss(d->ctx, &desc, d->value));
    if (values) XD_TRY(xdi_dmd_add_distances(d, samples, &values->distance));
    return xdi_dmd_add_value(d, values ? &values->vsd : NULL);
}

/* The gradient by x becomes that by the student's own prediction. */
static xd_result xdi_dmd_student_backward(xd_dmd *d, int64_t leaf, const xd_dmd_batch *batch) {
    xd_network_call call = xdi_dmd_call(d, batch, d->tensors[XDI_DMD_INPUT], &d->input);
    xd_conversion conversion;
    xd_rows none;
    memset(&none, 0, sizeof none);
    memset(&conversion, 0, sizeof conversion);
    conversion.from = d->desc.networks[XD_DMD_STUDENT].predicts;
    conversion.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < batch->samples; i++) {
        XD_TRY(
            xd_prediction_mix(d->ctx, &d->desc.schedule, &conversion, d->input.exact[i], &d->host_mixes[i]));
        d->host_mixes[i].c1 = 0.0;
    }
    XD_TRY(xdi_dmd_mix(d, xdi_dmd_slopes(d, d->slope, batch->samples), none,
                       xdi_dmd_slopes(d, d->raw_slope, batch->samples)));
    call.raw = NULL;
    call.raw_gradient = d->raw_slope;
    call.weights = true;
    call.leaf = leaf;
    return xdi_dmd_backward(d, XD_DMD_STUDENT, &call);
}

XD_API xd_result xd_dmd_student(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch, xd_dmd_values *values) {
    XDI_GIVEN_OF(dmd, batch);
    const double *weights = NULL;
    XD_TRY(xdi_dmd_check_batch(dmd, leaf, batch, dmd->desc.sizes.step_samples));
    XD_TRY(xdi_dmd_check_guidance(dmd, batch, XD_DMD_FAKE_SCORE));
    XD_TRY(xdi_dmd_check_guidance(dmd, batch, XD_DMD_TEACHER));
    XD_TRY(xdi_dmd_take_weights(dmd, leaf, batch->samples, &weights));
    dmd->noised_leaf = -1;
    XD_TRY(xdi_dmd_generate(dmd, XD_DMD_STUDENT, batch, true));
    if (dmd->desc.own_samples) XD_TRY(xdi_dmd_copy_kept(dmd, leaf, batch->samples, true));
    XD_TRY(xdi_dmd_noise(dmd, XD_DMD_STUDENT, batch));
    XD_TRY(xdi_dmd_follow(dmd, batch));
    XD_TRY(xdi_dmd_teach(dmd, batch));
    XD_TRY(xdi_dmd_match(dmd, batch->samples, weights, values));
    if (xdi_dmd_adversarial(&dmd->desc))
        XD_TRY(xdi_dmd_generator(dmd, batch, values ? &values->generator : NULL));
    return xdi_dmd_student_backward(dmd, leaf, batch);
}

/* ---- the fake score ---- */

static xd_result xdi_dmd_denoise(xd_dmd *d, int64_t samples, double *value) {
    xd_denoise_desc desc = xd_denoise_defaults();
    xd_denoise_form form = d->desc.fake_loss;
    form.native = d->desc.networks[XD_DMD_FAKE_SCORE].predicts;
    form.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < samples; i++)
        XD_TRY(xd_denoise_term_at(d->ctx, &d->desc.schedule, &form, d->noised.exact[i], &d->host_terms[i]));
    XD_TRY(xdi_dmd_send(d, d->terms, d->host_terms, (size_t)samples * sizeof *d->terms));
    desc.prediction = xdi_dmd_rows(d, d->tensors[XDI_DMD_RAW], samples);
    desc.clean = xdi_dmd_rows(d, d->tensors[XDI_DMD_GENERATED], samples);
    desc.noise = xdi_dmd_rows(d, d->tensors[XDI_DMD_EPSILON], samples);
    desc.gradient = xdi_dmd_slopes(d, d->raw_slope, samples);
    desc.terms = d->terms;
    desc.common = xdi_dmd_common(d, xdi_dmd_whole(&d->desc.sizes));
    desc.common.split = d->desc.sizes.split;
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->value));
    return xdi_dmd_add_value(d, value);
}

XD_API xd_result xd_dmd_fake_score(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch,
                                   xd_dmd_values *values) {
    XDI_GIVEN_OF(dmd, batch);
    xd_network_call call;
    XD_TRY(xdi_dmd_check_batch(dmd, leaf, batch, dmd->desc.sizes.step_samples));
    dmd->noised_leaf = -1;
    XD_TRY(xdi_dmd_fetch(dmd, XD_DMD_FAKE_SCORE, leaf, batch));
    XD_TRY(xdi_dmd_noise(dmd, XD_DMD_FAKE_SCORE, batch));
    call = xdi_dmd_call(dmd, batch, dmd->tensors[XDI_DMD_NOISED], &dmd->noised);
    call.keep = true;
    XD_TRY(xdi_dmd_forward(dmd, XD_DMD_FAKE_SCORE, &call));
    XD_TRY(xdi_dmd_denoise(dmd, batch->samples, values ? &values->fake_score : NULL));
    call.raw = NULL;
    call.raw_gradient = dmd->raw_slope;
    call.weights = true;
    call.leaf = leaf;
    XD_TRY(xdi_dmd_backward(dmd, XD_DMD_FAKE_SCORE, &call));
    dmd->noised_leaf = leaf;
    return XD_OK;
}
