/* What networks are given and what their predictions say, at one time and down a list of times. */

#include "base/internal.h"
#include "dmd/internal.h"
#include "dmd/state.h"

#include <string.h>

/* ---- networks ---- */

static bool xdi_dmd_takes_part(const xd_dmd *d, xd_dmd_role role) {
    const xd_parallel *parallel = d->desc.trainers[role].parallel;
    return d->beyond < 0 || (parallel && d->beyond < xd_parallel_micro_batches(parallel).opened);
}

/* A network of the caller's may fail by a result alone. */
static xd_result xdi_dmd_check_callback(const xd_dmd *d, xd_dmd_role role, const char *pass,
                                        xd_result result) {
    if (result == XD_OK || xd_last_error(d->ctx)->result == result) return result;
    return XD_FAIL(d->ctx, result, "the %s of the %s returned %s without a message", pass,
                   d->only_network ? d->only_network : xdi_dmd_role_name(role), xd_result_name(result));
}

XD_PRIVATE xd_result xdi_dmd_forward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call) {
    const xd_network *network = &d->desc.networks[role];
    if (!xdi_dmd_takes_part(d, role)) return XD_OK;
    return xdi_dmd_check_callback(d, role, "forward", network->forward(network->user, call));
}

XD_PRIVATE xd_result xdi_dmd_backward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call) {
    const xd_network *network = &d->desc.networks[role];
    if (!xdi_dmd_takes_part(d, role)) return XD_OK;
    return xdi_dmd_check_callback(d, role, "backward", network->backward(network->user, call));
}

XD_PRIVATE xd_result xdi_dmd_penalty(xd_dmd *d, const xd_network_call *call) {
    const xd_network *network = &d->desc.networks[XD_DMD_DISCRIMINATOR];
    if (!xdi_dmd_takes_part(d, XD_DMD_DISCRIMINATOR)) return XD_OK;
    return xdi_dmd_check_callback(d, XD_DMD_DISCRIMINATOR, "penalty", network->penalty(network->user, call));
}

XD_PRIVATE xd_result xdi_dmd_add_noise(xd_dmd *d, const xdi_dmd_times *times, xd_rows clean, xd_rows noise,
                                       xd_rows out) {
    for (int64_t i = 0; i < clean.rows; i++)
        XD_TRY(xd_noise_mix(d->ctx, &d->desc.schedule, times->exact[i], &d->factors.host_mixes[i]));
    return xdi_dmd_mix(d, clean, noise, out);
}

XD_PRIVATE xd_result xdi_dmd_read(xd_dmd *d, xdi_dmd_reading reading, int64_t samples, void *out) {
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    xd_conversion conversion;
    memset(&conversion, 0, sizeof conversion);
    conversion.from = d->desc.networks[reading.role].predicts;
    conversion.to = reading.to;
    conversion.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < samples; i++)
        XD_TRY(xd_prediction_mix(d->ctx, &d->desc.schedule, &conversion, reading.at.times->exact[i],
                                 &d->factors.host_mixes[i]));
    return xdi_dmd_mix(d, xdi_dmd_rows(sizes, d->tensors.prediction, samples),
                       xdi_dmd_rows(sizes, reading.at.x, samples), xdi_dmd_rows(sizes, out, samples));
}

XD_PRIVATE xd_network_call xdi_dmd_call(const xd_dmd_batch *batch, xdi_dmd_point at, void *prediction) {
    xd_network_call call;
    memset(&call, 0, sizeof call);
    call.samples = batch->samples;
    call.hidden = at.x;
    call.times = at.times->network;
    call.condition = batch->condition;
    call.raw = prediction;
    return call;
}

XD_PRIVATE xdi_dmd_point xdi_dmd_input_point(const xd_dmd *d) {
    xdi_dmd_point at;
    at.x = d->tensors.input;
    at.times = &d->input;
    return at;
}

/* ---- rungs ---- */

XD_PRIVATE xdi_dmd_where xdi_dmd_at(xd_dmd_role phase, int stream, const xd_dmd_batch *batch) {
    xdi_dmd_where where;
    where.role = phase;
    where.stream = (uint8_t)stream;
    where.first = batch->first;
    where.samples = batch->samples;
    return where;
}

XD_PRIVATE double xdi_dmd_rung_time(const xd_dmd_desc *desc, int64_t rung) {
    const double t = desc->rungs.list[rung];
    return desc->student_times.dtype == XD_DTYPE_F32 ? (double)(float)t : t;
}

XD_PRIVATE void xdi_dmd_set_times(const xd_dmd_desc *desc, const xdi_dmd_times *times, int64_t samples,
                                  double t) {
    for (int64_t i = 0; i < samples; i++) xdi_dmd_set_time(desc, times, i, t);
}

XD_PRIVATE xd_result xdi_dmd_begin(xd_dmd *d, const void *noise, int64_t samples) {
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    xd_rows none;
    memset(&none, 0, sizeof none);
    XD_TRY(xdi_noise_level_at(d->ctx, &d->desc.schedule, d->desc.rungs.list[0], &level));
    for (int64_t i = 0; i < samples; i++)
        d->factors.host_mixes[i].c0 = level.sigma, d->factors.host_mixes[i].c1 = 0.0;
    xdi_dmd_set_times(&d->desc, &d->input, samples, xdi_dmd_rung_time(&d->desc, 0));
    return xdi_dmd_mix(d, xdi_dmd_rows(&d->desc.sizes, noise, samples), none,
                       xdi_dmd_rows(&d->desc.sizes, d->tensors.input, samples));
}

XD_PRIVATE xd_result xdi_dmd_read_input(xd_dmd *d, xd_dmd_role role, xd_prediction to, int64_t samples,
                                        void *out) {
    xdi_dmd_reading reading;
    reading.role = role;
    reading.to = to;
    reading.at = xdi_dmd_input_point(d);
    return xdi_dmd_read(d, reading, samples, out);
}

XD_PRIVATE xd_result xdi_dmd_descend(xd_dmd *d, xd_dmd_role role, int64_t samples, int64_t rung,
                                     const void *noise) {
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    XD_TRY(xdi_dmd_read_input(d, role, XD_PREDICT_X0, samples, d->tensors.generated));
    xdi_dmd_set_times(&d->desc, &d->input, samples, xdi_dmd_rung_time(&d->desc, rung + 1));
    return xdi_dmd_add_noise(d, &d->input, xdi_dmd_rows(sizes, d->tensors.generated, samples),
                             xdi_dmd_rows(sizes, noise, samples),
                             xdi_dmd_rows(sizes, d->tensors.input, samples));
}

/* ---- along the slope ---- */

static xd_result xdi_dmd_infer(xd_dmd *d, const xd_dmd_batch *batch, const void *condition,
                               xdi_dmd_point at) {
    xd_network_call call = xdi_dmd_call(batch, at, d->tensors.prediction);
    call.condition = condition;
    return xdi_dmd_forward(d, XD_DMD_TEACHER, &call);
}

/* With rescale, by clean samples: deviations are of those. */
static xd_result xdi_dmd_guide_rescaled(xd_dmd *d, const xd_dmd_batch *batch, xdi_dmd_point at) {
    const xd_guidance guidance = xdi_dmd_guidance(&d->desc, XD_DMD_TEACHER);
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    const int64_t n = batch->samples;
    void *x0 = d->tensors.teacher_x0, *negative = d->tensors.scratch;
    xdi_dmd_reading reading;
    xd_conversion back;
    reading.role = XD_DMD_TEACHER;
    reading.to = XD_PREDICT_X0;
    reading.at = at;
    XD_TRY(xdi_dmd_infer(d, batch, batch->condition, at));
    XD_TRY(xdi_dmd_read(d, reading, n, x0));
    XD_TRY(xdi_dmd_infer(d, batch, batch->negative, at));
    XD_TRY(xdi_dmd_read(d, reading, n, negative));
    XD_TRY(xdi_dmd_guide_clean(d, &guidance, n, x0, negative));
    memset(&back, 0, sizeof back);
    back.from = XD_PREDICT_X0;
    back.to = d->desc.networks[XD_DMD_TEACHER].predicts;
    back.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < n; i++)
        XD_TRY(xd_prediction_mix(d->ctx, &d->desc.schedule, &back, at.times->exact[i],
                                 &d->factors.host_mixes[i]));
    return xdi_dmd_mix(d, xdi_dmd_rows(sizes, x0, n), xdi_dmd_rows(sizes, at.x, n),
                       xdi_dmd_rows(sizes, d->tensors.prediction, n));
}

XD_PRIVATE xd_result xdi_dmd_guide(xd_dmd *d, const xd_dmd_batch *batch, xdi_dmd_point at) {
    if (xdi_dmd_guidance(&d->desc, XD_DMD_TEACHER).rescale > 0.0) return xdi_dmd_guide_rescaled(d, batch, at);
    const xd_rows prediction = xdi_dmd_rows(&d->desc.sizes, d->tensors.prediction, batch->samples);
    const xd_rows conditional = xdi_dmd_rows(&d->desc.sizes, d->tensors.scratch, batch->samples);
    XD_TRY(xdi_dmd_infer(d, batch, batch->condition, at));
    if (!d->desc.guided) return XD_OK;
    for (int64_t i = 0; i < batch->samples; i++)
        d->factors.host_mixes[i].c0 = 1.0, d->factors.host_mixes[i].c1 = 0.0;
    XD_TRY(xdi_dmd_mix(d, prediction, prediction, conditional));
    XD_TRY(xdi_dmd_infer(d, batch, batch->negative, at));
    for (int64_t i = 0; i < batch->samples; i++)
        d->factors.host_mixes[i] = xdi_guidance_mix(d->desc.guidance_scale);
    return xdi_dmd_mix(d, conditional, prediction, prediction);
}

XD_PRIVATE xd_result xdi_dmd_slope(xd_dmd *d, int64_t samples, xdi_dmd_point at, void *out) {
    xdi_dmd_reading reading;
    reading.role = XD_DMD_TEACHER;
    reading.to = XD_PREDICT_FLOW;
    reading.at = at;
    return xdi_dmd_read(d, reading, samples, out);
}

XD_PRIVATE xd_result xdi_dmd_euler(xd_dmd *d, int64_t samples, xdi_dmd_point at, double width, void *out) {
    xd_conversion conversion;
    memset(&conversion, 0, sizeof conversion);
    conversion.from = d->desc.networks[XD_DMD_TEACHER].predicts;
    conversion.to = XD_PREDICT_FLOW;
    conversion.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < samples; i++) { /* x + width (c0 p + c1 x), rounded once */
        xd_mix *mix = &d->factors.host_mixes[i];
        XD_TRY(xd_prediction_mix(d->ctx, &d->desc.schedule, &conversion, at.times->exact[i], mix));
        mix->c0 *= width;
        mix->c1 = 1.0 + width * mix->c1;
    }
    return xdi_dmd_mix(d, xdi_dmd_rows(&d->desc.sizes, d->tensors.prediction, samples),
                       xdi_dmd_rows(&d->desc.sizes, at.x, samples),
                       xdi_dmd_rows(&d->desc.sizes, out, samples));
}
