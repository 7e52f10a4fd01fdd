/* The student's input, and its samples with noise. */

#include "base/internal.h"
#include "dmd/state.h"

#include <string.h>

/* The student's prediction at its input. */
static xd_result xdi_dmd_predict(xd_dmd *d, const xd_dmd_batch *batch, bool keep) {
    xd_network_call call = xdi_dmd_call(batch, xdi_dmd_input_point(d), d->tensors.prediction);
    call.keep = keep;
    return xdi_dmd_forward(d, XD_DMD_STUDENT, &call);
}

/* From the prediction at rung j to the input at the next, with noise of the kind that the rungs have. */
static xd_result xdi_dmd_next_rung(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, int64_t rung) {
    const xdi_dmd_where fresh = xdi_dmd_at(phase, XD_STREAM_ROLLOUT + 1 + (int)rung, batch);
    if (d->desc.rungs.fresh_noise)
        XD_TRY(xdi_dmd_normals(d, fresh, d->tensors.epsilon));
    else
        XD_TRY(xdi_dmd_read_input(d, XD_DMD_STUDENT, XD_PREDICT_EPS, batch->samples, d->tensors.epsilon));
    return xdi_dmd_descend(d, XD_DMD_STUDENT, batch->samples, rung, d->tensors.epsilon);
}

/* The input at one rung for all samples, of the student's own making: it starts from new noise and goes down rung by rung; the last
 * re-noising is by the batch's noise. */
static xd_result xdi_dmd_roll_out(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, int64_t rung) {
    const int64_t n = batch->samples;
    if (rung == 0) return xdi_dmd_begin(d, d->tensors.noise, n);
    XD_TRY(xdi_dmd_normals(d, xdi_dmd_at(phase, XD_STREAM_ROLLOUT, batch), d->tensors.epsilon));
    XD_TRY(xdi_dmd_begin(d, d->tensors.epsilon, n));
    for (int64_t j = 0; j < rung; j++) {
        XD_TRY(xdi_dmd_predict(d, batch, false));
        XD_TRY(j < rung - 1 ? xdi_dmd_next_rung(d, phase, batch, j)
                            : xdi_dmd_descend(d, XD_DMD_STUDENT, n, j, d->tensors.noise));
    }
    return XD_OK;
}

/* Copies the rows of the input whose own rung this is. */
static xd_result xdi_dmd_keep_rung(xd_dmd *d, const xd_dmd_batch *batch, int64_t rung, void *kept) {
    const xd_device_ops *device = &xd_ctx_kernels(d->ctx)->memory;
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const size_t size = (size_t)d->desc.sizes.elements * xd_dtype_size(d->desc.sizes.dtype);
    const unsigned char *input = (const unsigned char *)d->tensors.input;
    unsigned char *to = (unsigned char *)kept;
    for (int64_t i = 0; i < batch->samples && size > 0; i++)
        if ((batch->first + i) % d->desc.rungs.steps == rung)
            XD_TRY(device->copy(&launch, to + (size_t)i * size, input + (size_t)i * size, size,
                                XD_COPY_ON_DEVICE));
    return XD_OK;
}

/* The input at a rung for each sample. All of them go down to the last rung, so that the number of forwards is that of every rank,
 * and what each had at its own is kept on the way. */
static xd_result xdi_dmd_roll_outs(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples, steps = d->desc.rungs.steps;
    void *kept = d->tensors.scratch;
    XD_TRY(xdi_dmd_begin(d, d->tensors.noise, n));
    XD_TRY(xdi_dmd_keep_rung(d, batch, 0, kept));
    for (int64_t j = 0; j + 1 < steps; j++) {
        XD_TRY(xdi_dmd_predict(d, batch, false));
        XD_TRY(xdi_dmd_next_rung(d, phase, batch, j));
        XD_TRY(xdi_dmd_keep_rung(d, batch, j + 1, kept));
    }
    d->tensors.scratch = d->tensors.input; /* the two change places */
    d->tensors.input = kept;
    for (int64_t i = 0; i < n; i++)
        xdi_dmd_set_time(&d->desc, &d->input, i, xdi_dmd_rung_time(&d->desc, (batch->first + i) % steps));
    return XD_OK;
}

/* Real samples, each noised to a rung of its own. */
static xd_result xdi_dmd_noise_real(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    XD_REQUIRE(d->ctx, batch->real || n == 0, XD_ERROR_ARGUMENT,
               "a student of %d steps without roll-outs needs real samples; the batch has %lld without",
               d->desc.rungs.steps, (long long)n);
    XD_TRY(xdi_dmd_draw_rungs(d, xdi_dmd_at(phase, XD_STREAM_RUNG, batch), n));
    for (int64_t i = 0; i < n; i++)
        xdi_dmd_set_time(&d->desc, &d->input, i, xdi_dmd_rung_time(&d->desc, d->draws.rungs[i]));
    return xdi_dmd_add_noise(d, &d->input, xdi_dmd_rows(&d->desc.sizes, batch->real, n),
                             xdi_dmd_rows(&d->desc.sizes, d->tensors.noise, n),
                             xdi_dmd_rows(&d->desc.sizes, d->tensors.input, n));
}

XD_PRIVATE xd_result xdi_dmd_take_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    const xd_device_ops *device = &xd_ctx_kernels(d->ctx)->memory;
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const size_t bytes =
        (size_t)(batch->samples * d->desc.sizes.elements) * xd_dtype_size(d->desc.sizes.dtype);
    if (!batch->noise)
        return xdi_dmd_normals(d, xdi_dmd_at(phase, XD_STREAM_STUDENT_NOISE, batch), d->tensors.noise);
    if (bytes == 0) return XD_OK;
    return device->copy(&launch, d->tensors.noise, batch->noise, bytes, XD_COPY_ON_DEVICE);
}

static xd_result xdi_dmd_input(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    xdi_dmd_where first = xdi_dmd_at(phase, XD_STREAM_RUNG, batch);
    XD_TRY(xdi_dmd_take_noise(d, phase, batch));
    if (d->desc.rungs.steps == 1) return xdi_dmd_begin(d, d->tensors.noise, batch->samples);
    if (!d->desc.rungs.roll_out) return xdi_dmd_noise_real(d, phase, batch);
    if (d->desc.rungs.deal == XD_DMD_RUNGS_IN_TURN) return xdi_dmd_roll_outs(d, phase, batch);
    first.first = 0; /* one rung for all samples of the step: every rank draws the same */
    XD_TRY(xdi_dmd_draw_rungs(d, first, 1));
    return xdi_dmd_roll_out(d, phase, batch, d->draws.rungs[0]);
}

XD_PRIVATE xd_result xdi_dmd_generate(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, bool keep) {
    XD_TRY(xdi_dmd_input(d, phase, batch));
    XD_TRY(xdi_dmd_predict(d, batch, keep));
    return xdi_dmd_read_input(d, XD_DMD_STUDENT, XD_PREDICT_X0, batch->samples, d->tensors.generated);
}

XD_PRIVATE xd_result xdi_dmd_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    const xd_time_sampler *sampler = phase == XD_DMD_STUDENT ? &d->desc.student_times : &d->desc.fake_times;
    XD_TRY(xdi_dmd_draw_times(d, xdi_dmd_at(phase, XD_STREAM_TIME, batch), sampler, &d->noised));
    XD_TRY(xdi_dmd_normals(d, xdi_dmd_at(phase, XD_STREAM_EPSILON, batch), d->tensors.epsilon));
    return xdi_dmd_add_noise(d, &d->noised, xdi_dmd_rows(&d->desc.sizes, d->tensors.generated, n),
                             xdi_dmd_rows(&d->desc.sizes, d->tensors.epsilon, n),
                             xdi_dmd_rows(&d->desc.sizes, d->tensors.noised, n));
}
