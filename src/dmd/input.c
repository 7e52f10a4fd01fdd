/* What networks are given, and what their predictions say. */

#include "base/internal.h"
#include "dmd/state.h"

#include <string.h>

static bool xdi_dmd_takes_part(const xd_dmd *d, xd_dmd_role role) {
    const xd_parallel *parallel = d->desc.trainers[role].parallel;
    return d->beyond < 0 || (parallel && d->beyond < xd_parallel_leaves(parallel).opened);
}

XD_PRIVATE xd_result xdi_dmd_forward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call) {
    const xd_network *network = &d->desc.networks[role];
    return xdi_dmd_takes_part(d, role) ? network->forward(network->user, call) : XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_backward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call) {
    const xd_network *network = &d->desc.networks[role];
    return xdi_dmd_takes_part(d, role) ? network->backward(network->user, call) : XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_add_noise(xd_dmd *d, const xdi_dmd_times *times, xd_rows clean, xd_rows noise,
                                       xd_rows out) {
    for (int64_t i = 0; i < clean.rows; i++)
        XD_TRY(xd_noise_mix(d->ctx, &d->desc.schedule, times->exact[i], &d->host_mixes[i]));
    return xdi_dmd_mix(d, clean, noise, out);
}

XD_PRIVATE xd_result xdi_dmd_read(xd_dmd *d, xdi_dmd_reading reading, int64_t samples, void *out) {
    xd_conversion conversion;
    memset(&conversion, 0, sizeof conversion);
    conversion.from = d->desc.networks[reading.role].predicts;
    conversion.to = reading.to;
    conversion.v_is_flow = d->desc.v_is_flow;
    for (int64_t i = 0; i < samples; i++)
        XD_TRY(xd_prediction_mix(d->ctx, &d->desc.schedule, &conversion, reading.times->exact[i],
                                 &d->host_mixes[i]));
    return xdi_dmd_mix(d, xdi_dmd_rows(d, d->tensors[XDI_DMD_RAW], samples),
                       xdi_dmd_rows(d, reading.hidden, samples), xdi_dmd_rows(d, out, samples));
}

/* ---- the student's input ---- */

static xdi_dmd_where xdi_dmd_at(xd_dmd_role phase, int stream, const xd_dmd_batch *batch) {
    xdi_dmd_where where;
    where.role = phase;
    where.stream = (uint8_t)stream;
    where.first = batch->first;
    where.samples = batch->samples;
    return where;
}

/* A rung's time as the samplers round theirs. */
static double xdi_dmd_rung_time(const xd_dmd *d, int64_t rung) {
    const double t = d->desc.rungs.list[rung];
    return d->desc.student_times.dtype == XD_DTYPE_F32 ? (double)(float)t : t;
}

static void xdi_dmd_set_rung(const xd_dmd *d, int64_t rung, int64_t samples) {
    for (int64_t i = 0; i < samples; i++) xdi_dmd_set_time(d, &d->input, i, xdi_dmd_rung_time(d, rung));
}

/* INPUT = sigma of the first rung, as a double, times noise: what a sampler starts from. */
static xd_result xdi_dmd_begin(xd_dmd *d, const void *noise, int64_t samples) {
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    xd_rows none;
    memset(&none, 0, sizeof none);
    XD_TRY(xd_noise_level_at(d->ctx, &d->desc.schedule, d->desc.rungs.list[0], &level));
    for (int64_t i = 0; i < samples; i++) d->host_mixes[i].c0 = level.sigma, d->host_mixes[i].c1 = 0.0;
    xdi_dmd_set_rung(d, 0, samples);
    return xdi_dmd_mix(d, xdi_dmd_rows(d, noise, samples), none,
                       xdi_dmd_rows(d, d->tensors[XDI_DMD_INPUT], samples));
}

/* RAW = the student's prediction at INPUT. */
static xd_result xdi_dmd_predict(xd_dmd *d, const xd_dmd_batch *batch, bool keep) {
    xd_network_call call;
    memset(&call, 0, sizeof call);
    call.samples = batch->samples;
    call.hidden = d->tensors[XDI_DMD_INPUT];
    call.times = d->input.network;
    call.condition = batch->condition;
    call.keep = keep;
    call.raw = d->tensors[XDI_DMD_RAW];
    return xdi_dmd_forward(d, XD_DMD_STUDENT, &call);
}

static xd_result xdi_dmd_read_student(xd_dmd *d, xd_prediction to, int64_t samples, xdi_dmd_tensor out) {
    xdi_dmd_reading reading;
    reading.role = XD_DMD_STUDENT;
    reading.to = to;
    reading.times = &d->input;
    reading.hidden = d->tensors[XDI_DMD_INPUT];
    return xdi_dmd_read(d, reading, samples, d->tensors[out]);
}

/* INPUT at rung `rung` of the student's own making: it starts from new noise and goes down rung by rung; the last re-noising
 * is by the batch's noise. */
static xd_result xdi_dmd_roll_out(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, int64_t rung) {
    const int64_t n = batch->samples;
    const xd_rows clean = xdi_dmd_rows(d, d->tensors[XDI_DMD_GENERATED], n);
    const xd_rows epsilon = xdi_dmd_rows(d, d->tensors[XDI_DMD_EPSILON], n);
    const xd_rows noise = xdi_dmd_rows(d, d->tensors[XDI_DMD_NOISE], n);
    const xd_rows input = xdi_dmd_rows(d, d->tensors[XDI_DMD_INPUT], n);
    if (rung == 0) return xdi_dmd_begin(d, noise.data, n);
    XD_TRY(xdi_dmd_normals(d, xdi_dmd_at(phase, XD_STREAM_ROLLOUT, batch), epsilon.data));
    XD_TRY(xdi_dmd_begin(d, epsilon.data, n));
    for (int64_t j = 0; j < rung; j++) {
        const bool last = j == rung - 1;
        XD_TRY(xdi_dmd_predict(d, batch, false));
        if (!last && d->desc.rungs.fresh_noise)
            XD_TRY(
                xdi_dmd_normals(d, xdi_dmd_at(phase, XD_STREAM_ROLLOUT + 1 + (int)j, batch), epsilon.data));
        else if (!last)
            XD_TRY(xdi_dmd_read_student(d, XD_PREDICT_EPS, n, XDI_DMD_EPSILON));
        XD_TRY(xdi_dmd_read_student(d, XD_PREDICT_X0, n, XDI_DMD_GENERATED));
        xdi_dmd_set_rung(d, j + 1, n);
        XD_TRY(xdi_dmd_add_noise(d, &d->input, clean, last ? noise : epsilon, input));
    }
    return XD_OK;
}

/* Real samples, each noised to a rung of its own. */
static xd_result xdi_dmd_noise_real(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    XD_REQUIRE(d->ctx, batch->real || n == 0, XD_ERROR_ARGUMENT,
               "a student of %d steps without roll-outs needs real samples; the batch has %lld without",
               d->desc.rungs.steps, (long long)n);
    XD_TRY(xdi_dmd_draw_rungs(d, xdi_dmd_at(phase, XD_STREAM_RUNG, batch), n));
    for (int64_t i = 0; i < n; i++) xdi_dmd_set_time(d, &d->input, i, xdi_dmd_rung_time(d, d->rung[i]));
    return xdi_dmd_add_noise(d, &d->input, xdi_dmd_rows(d, batch->real, n),
                             xdi_dmd_rows(d, d->tensors[XDI_DMD_NOISE], n),
                             xdi_dmd_rows(d, d->tensors[XDI_DMD_INPUT], n));
}

/* NOISE: the batch's own or drawn. */
static xd_result xdi_dmd_take_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    const xd_device_ops *device = &xd_ctx_kernels(d->ctx)->memory;
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const size_t bytes =
        (size_t)(batch->samples * d->desc.sizes.elements) * xd_dtype_size(d->desc.sizes.dtype);
    if (!batch->noise)
        return xdi_dmd_normals(d, xdi_dmd_at(phase, XD_STREAM_STUDENT_NOISE, batch),
                               d->tensors[XDI_DMD_NOISE]);
    if (bytes == 0) return XD_OK;
    return device->copy(&launch, d->tensors[XDI_DMD_NOISE], batch->noise, bytes, XD_COPY_ON_DEVICE);
}

XD_PRIVATE xd_result xdi_dmd_input(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    xdi_dmd_where first = xdi_dmd_at(phase, XD_STREAM_RUNG, batch);
    XD_TRY(xdi_dmd_take_noise(d, phase, batch));
    if (d->desc.rungs.steps == 1) return xdi_dmd_begin(d, d->tensors[XDI_DMD_NOISE], batch->samples);
    if (!d->desc.rungs.roll_out) return xdi_dmd_noise_real(d, phase, batch);
    first.first = 0; /* one rung for all samples of the step: every rank draws the same */
    XD_TRY(xdi_dmd_draw_rungs(d, first, 1));
    return xdi_dmd_roll_out(d, phase, batch, d->rung[0]);
}

XD_PRIVATE xd_result xdi_dmd_generate(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, bool keep) {
    XD_TRY(xdi_dmd_input(d, phase, batch));
    XD_TRY(xdi_dmd_predict(d, batch, keep));
    return xdi_dmd_read_student(d, XD_PREDICT_X0, batch->samples, XDI_DMD_GENERATED);
}

XD_PRIVATE xd_result xdi_dmd_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    const xd_time_sampler *sampler = phase == XD_DMD_STUDENT ? &d->desc.student_times : &d->desc.fake_times;
    XD_TRY(xdi_dmd_draw_times(d, xdi_dmd_at(phase, XD_STREAM_TIME, batch), sampler, &d->noised));
    XD_TRY(xdi_dmd_normals(d, xdi_dmd_at(phase, XD_STREAM_EPSILON, batch), d->tensors[XDI_DMD_EPSILON]));
    return xdi_dmd_add_noise(d, &d->noised, xdi_dmd_rows(d, d->tensors[XDI_DMD_GENERATED], n),
                             xdi_dmd_rows(d, d->tensors[XDI_DMD_EPSILON], n),
                             xdi_dmd_rows(d, d->tensors[XDI_DMD_NOISED], n));
}
