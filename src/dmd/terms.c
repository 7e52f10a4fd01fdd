/* The terms of the student and of the fake score. */

#include "base/internal.h"
#include "dmd/state.h"

#include <string.h>

/* ---- the student ---- */

/* x_t. */
static xdi_dmd_point xdi_dmd_noised_point(const xd_dmd *d) {
    xdi_dmd_point at;
    at.x = d->tensors.noised;
    at.times = &d->noised;
    return at;
}

static xd_result xdi_dmd_read_clean(xd_dmd *d, xd_dmd_role role, xdi_dmd_point at, int64_t samples,
                                    void *out) {
    xdi_dmd_reading reading;
    reading.role = role;
    reading.to = XD_PREDICT_X0;
    reading.at = at;
    return xdi_dmd_read(d, reading, samples, out);
}

/* x0 = what a network makes of x_t, and, when it is guided, of x_t with the negative condition. */
static xd_result xdi_dmd_guided_x0(xd_dmd *d, xd_dmd_role role, const xd_dmd_batch *batch,
                                   xd_network_call *call, void *x0) {
    const xd_guidance guidance = xdi_dmd_guidance(&d->desc, role);
    const xdi_dmd_point at = xdi_dmd_noised_point(d);
    void *negative = d->tensors.scratch;
    XD_TRY(xdi_dmd_forward(d, role, call));
    XD_TRY(xdi_dmd_read_clean(d, role, at, batch->samples, x0));
    if (!guidance.on) return XD_OK;
    if (role == XD_DMD_TEACHER) call->slot = XDI_DMD_SLOT_REAL;
    call->keep = false;
    call->features = NULL;
    call->condition = batch->negative;
    XD_TRY(xdi_dmd_forward(d, role, call));
    XD_TRY(xdi_dmd_read_clean(d, role, at, batch->samples, negative));
    return xdi_dmd_guide_clean(d, &guidance, batch->samples, x0, negative);
}

static xd_result xdi_dmd_teacher_x0(xd_dmd *d, const xd_dmd_batch *batch, void *x0) {
    xd_network_call call = xdi_dmd_call(batch, xdi_dmd_noised_point(d), d->tensors.prediction);
    call.slot = XDI_DMD_SLOT_FAKE;
    call.keep = xdi_dmd_adversarial(&d->desc);
    if (call.keep) call.features = d->features[XDI_DMD_SLOT_FAKE].values;
    return xdi_dmd_guided_x0(d, XD_DMD_TEACHER, batch, &call, x0);
}

static xd_result xdi_dmd_fake_score_x0(xd_dmd *d, const xd_dmd_batch *batch, void *x0) {
    xd_network_call call = xdi_dmd_call(batch, xdi_dmd_noised_point(d), d->tensors.prediction);
    return xdi_dmd_guided_x0(d, XD_DMD_FAKE_SCORE, batch, &call, x0);
}

/* The mean over the samples of the whole step, in the order of the micro-batch's. */
static xd_result xdi_dmd_add_distances(xd_dmd *d, int64_t samples, double *value) {
    double sum = 0.0;
    if (samples == 0) return XD_OK;
    XD_TRY(xd_read(d->ctx, d->results.host_distances, d->results.distances,
                   (size_t)samples * sizeof *d->results.distances));
    for (int64_t i = 0; i < samples; i++) sum += d->results.host_distances[i];
    *value += sum / (double)d->desc.sizes.step_samples;
    return XD_OK;
}

static xd_result xdi_dmd_match(xd_dmd *d, int64_t samples, const double *weights, xd_dmd_values *values) {
    xd_vsd_desc desc = xd_vsd_defaults();
    desc.generated = xdi_dmd_rows(&d->desc.sizes, d->tensors.generated, samples);
    desc.teacher = xdi_dmd_rows(&d->desc.sizes, d->tensors.teacher_x0, samples);
    desc.fake = xdi_dmd_rows(&d->desc.sizes, d->tensors.fake_x0, samples);
    desc.gradient = xdi_dmd_gradient_rows(&d->desc.sizes, d->gradients.generated, samples);
    desc.sample_scale = weights;
    desc.normaliser = d->desc.normaliser;
    desc.common = xdi_dmd_common(d, xdi_dmd_whole(&d->desc.sizes));
    desc.common.split = d->desc.sizes.split;
    desc.distance = d->results.distances;
    XD_TRY(xd_vsd_loss(d->ctx, &desc, d->results.value));
    if (values) XD_TRY(xdi_dmd_add_distances(d, samples, &values->distance));
    return xdi_dmd_add_value(d, values ? &values->vsd : NULL);
}

/* The gradient by x becomes that by the student's own prediction. */
static xd_result xdi_dmd_student_backward(xd_dmd *d, int64_t micro_batch, const xd_dmd_batch *batch) {
    xd_network_call call = xdi_dmd_call(batch, xdi_dmd_input_point(d), NULL);
    xd_conversion conversion;
    xd_rows none;
    memset(&none, 0, sizeof none);
    memset(&conversion, 0, sizeof conversion);
    conversion.from = d->desc.networks[XD_DMD_STUDENT].predicts;
    conversion.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < batch->samples; i++) {
        XD_TRY(xd_prediction_mix(d->ctx, &d->desc.schedule, &conversion, d->input.exact[i],
                                 &d->factors.host_mixes[i]));
        d->factors.host_mixes[i].c1 = 0.0;
    }
    XD_TRY(xdi_dmd_mix(d, xdi_dmd_gradient_rows(&d->desc.sizes, d->gradients.generated, batch->samples), none,
                       xdi_dmd_gradient_rows(&d->desc.sizes, d->gradients.prediction, batch->samples)));
    call.raw_gradient = d->gradients.prediction;
    call.weights = true;
    call.micro_batch = micro_batch;
    return xdi_dmd_backward(d, XD_DMD_STUDENT, &call);
}

XD_API xd_result xd_dmd_student(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                xd_dmd_values *values) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_OF(dmd, batch);
    const double *weights = NULL;
    XD_TRY(xdi_dmd_check_batch(dmd, micro_batch, batch, dmd->desc.sizes.step_samples));
    XD_TRY(xdi_dmd_check_guidance(dmd, batch, XD_DMD_FAKE_SCORE));
    XD_TRY(xdi_dmd_check_guidance(dmd, batch, XD_DMD_TEACHER));
    XD_TRY(xdi_dmd_take_weights(dmd, micro_batch, batch->samples, &weights));
    dmd->noised_micro_batch = -1;
    XD_TRY(xdi_dmd_generate(dmd, XD_DMD_STUDENT, batch, true));
    if (dmd->desc.own_samples) XD_TRY(xdi_dmd_copy_kept(dmd, micro_batch, batch->samples, true));
    XD_TRY(xdi_dmd_noise(dmd, XD_DMD_STUDENT, batch));
    XD_TRY(xdi_dmd_fake_score_x0(dmd, batch, dmd->tensors.fake_x0));
    XD_TRY(xdi_dmd_teacher_x0(dmd, batch, dmd->tensors.teacher_x0));
    XD_TRY(xdi_dmd_match(dmd, batch->samples, weights, values));
    if (xdi_dmd_adversarial(&dmd->desc))
        XD_TRY(xdi_dmd_generator(dmd, batch, values ? &values->generator : NULL));
    return xdi_dmd_student_backward(dmd, micro_batch, batch);
}

/* ---- the fake score ---- */

static xd_result xdi_dmd_denoise(xd_dmd *d, int64_t samples, double *value) {
    xd_denoise_desc desc = xd_denoise_defaults();
    xd_denoise_form form = d->desc.fake_loss;
    form.native = d->desc.networks[XD_DMD_FAKE_SCORE].predicts;
    form.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < samples; i++)
        XD_TRY(xd_denoise_term_at(d->ctx, &d->desc.schedule, &form, d->noised.exact[i],
                                  &d->factors.host_terms[i]));
    XD_TRY(xdi_dmd_send(d->ctx, d->factors.terms, d->factors.host_terms,
                        (size_t)samples * sizeof *d->factors.terms));
    desc.prediction = xdi_dmd_rows(&d->desc.sizes, d->tensors.prediction, samples);
    desc.clean = xdi_dmd_rows(&d->desc.sizes, d->tensors.generated, samples);
    desc.noise = xdi_dmd_rows(&d->desc.sizes, d->tensors.epsilon, samples);
    desc.gradient = xdi_dmd_gradient_rows(&d->desc.sizes, d->gradients.prediction, samples);
    desc.terms = d->factors.terms;
    desc.common = xdi_dmd_common(d, xdi_dmd_whole(&d->desc.sizes));
    desc.common.split = d->desc.sizes.split;
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->results.value));
    return xdi_dmd_add_value(d, value);
}

XD_API xd_result xd_dmd_fake_score(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                   xd_dmd_values *values) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_OF(dmd, batch);
    xd_network_call call;
    XD_TRY(xdi_dmd_check_batch(dmd, micro_batch, batch, dmd->desc.sizes.step_samples));
    dmd->noised_micro_batch = -1;
    XD_TRY(xdi_dmd_fetch(dmd, XD_DMD_FAKE_SCORE, micro_batch, batch));
    XD_TRY(xdi_dmd_noise(dmd, XD_DMD_FAKE_SCORE, batch));
    call = xdi_dmd_call(batch, xdi_dmd_noised_point(dmd), dmd->tensors.prediction);
    call.keep = true;
    XD_TRY(xdi_dmd_forward(dmd, XD_DMD_FAKE_SCORE, &call));
    XD_TRY(xdi_dmd_denoise(dmd, batch->samples, values ? &values->fake_score : NULL));
    call.raw = NULL;
    call.raw_gradient = dmd->gradients.prediction;
    call.weights = true;
    call.micro_batch = micro_batch;
    XD_TRY(xdi_dmd_backward(dmd, XD_DMD_FAKE_SCORE, &call));
    dmd->noised_micro_batch = micro_batch;
    return XD_OK;
}
