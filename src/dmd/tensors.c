/* What distribution matching draws, sums of two tensors, and what all of its losses get besides theirs. */

#include "base/internal.h"
#include "dmd/internal.h"
#include "dmd/state.h"

#include <string.h>

XD_PRIVATE xd_rows xdi_dmd_rows(const xd_dmd_sizes *sizes, const void *data, int64_t samples) {
    return xd_rows_of(data, sizes->dtype, samples, sizes->elements);
}

XD_PRIVATE xd_rows xdi_dmd_gradient_rows(const xd_dmd_sizes *sizes, const float *data, int64_t samples) {
    return xd_rows_of(data, XD_DTYPE_F32, samples, sizes->elements);
}

XD_PRIVATE xd_result xdi_dmd_send(xd_ctx *ctx, void *to, const void *from, size_t bytes) {
    const xd_device_ops *device = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    if (bytes == 0) return XD_OK;
    XD_TRY(device->copy(&launch, to, from, bytes, XD_COPY_TO_DEVICE));
    return device->synchronize(&launch); /* the caller's memory is used again */
}

XD_PRIVATE xd_result xdi_dmd_mix(xd_dmd *d, xd_rows p, xd_rows q, xd_rows out) {
    xd_mix_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.p = p, desc.q = q, desc.out = out, desc.mix = d->factors.mixes;
    XD_TRY(xdi_dmd_send(d->ctx, d->factors.mixes, d->factors.host_mixes,
                        (size_t)p.rows * sizeof *d->factors.mixes));
    return xd_mix_rows(d->ctx, &desc);
}

XD_PRIVATE xd_sample_common xdi_dmd_common(const xd_dmd *d, int64_t numbers) {
    xd_sample_common common;
    memset(&common, 0, sizeof common);
    common.weight = 1.0;
    common.denominator_value = (double)d->desc.sizes.step_samples * (double)numbers;
    common.status = d->results.status;
    common.workspace = d->results.workspace;
    common.workspace_bytes = d->results.workspace_bytes;
    return common;
}

/* ---- draws ---- */

/* A number for each row. */
static xd_dmd_draw xdi_dmd_draw(const xd_dmd *d, xdi_dmd_where where) {
    xd_dmd_draw draw;
    memset(&draw, 0, sizeof draw);
    draw.random.seed = d->desc.seed;
    draw.random.stream = where.stream;
    draw.random.micro = (uint16_t)where.role;
    draw.random.sample = (uint32_t)where.first;
    draw.random.step = (uint32_t)(where.role == XD_DMD_TEACHER ? d->record.warm_up : d->record.step);
    draw.rows = where.samples;
    draw.columns = 1;
    return draw;
}

/* The elements of each row. */
static xd_dmd_draw xdi_dmd_draw_elements(const xd_dmd *d, xdi_dmd_where where) {
    xd_dmd_draw draw = xdi_dmd_draw(d, where);
    draw.columns = d->desc.sizes.elements;
    draw.first = d->desc.sizes.first_element;
    return draw;
}

XD_PRIVATE bool xdi_dmd_draws_there(const xd_ctx *ctx, const xd_dmd_desc *desc) {
    return !(desc->draws && desc->draws->normals) && xd_ctx_kernels(ctx)->dmd.draw;
}

XD_PRIVATE bool xdi_dmd_draws_apart(const xd_ctx *ctx, const xd_dmd_desc *desc) {
    return !xdi_dmd_draws_there(ctx, desc) && xd_ctx_kernels(ctx)->device != XD_DEVICE_CPU;
}

XD_PRIVATE bool xdi_dmd_draws_between(const xd_ctx *ctx, const xd_dmd_desc *desc) {
    return xdi_dmd_draws_apart(ctx, desc) ||
           (!xdi_dmd_draws_there(ctx, desc) && desc->sizes.dtype != XD_DTYPE_F32);
}

/* By the counters, on a device or with the host's kernels. */
static xd_result xdi_dmd_fill(xd_dmd *d, const xd_dmd_kernels *kernels, const xd_dmd_draw *draw,
                              xd_rows out) {
    const xd_launch launch = xd_ctx_launch(d->ctx);
    xd_draw_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.random = draw->random;
    desc.first = draw->first;
    desc.out = out;
    if (desc.out.stride == 0) desc.out.stride = desc.out.cols;
    return kernels->draw(&launch, &desc);
}

XD_PRIVATE xd_result xdi_dmd_normals(xd_dmd *d, xdi_dmd_where where, void *out) {
    const int64_t elements = d->desc.sizes.elements;
    const xd_dmd_draw draw = xdi_dmd_draw_elements(d, where);
    const xd_dmd_draws *own = d->desc.draws;
    float *here = d->draws.host_normals ? d->draws.host_normals
                  : d->draws.normals    ? d->draws.normals
                                        : (float *)out;
    xd_rows none;
    memset(&none, 0, sizeof none);
    if (where.samples == 0) return XD_OK;
    if (xdi_dmd_draws_there(d->ctx, &d->desc))
        return xdi_dmd_fill(d, &xd_ctx_kernels(d->ctx)->dmd, &draw,
                            xdi_dmd_rows(&d->desc.sizes, out, where.samples));
    if (own && own->normals)
        XD_TRY(own->normals(own->user, &draw, here));
    else
        XD_TRY(xdi_dmd_fill(d, &xd_ctx_host_kernels(d->ctx)->dmd, &draw,
                            xdi_dmd_gradient_rows(&d->desc.sizes, here, where.samples)));
    if (!d->draws.normals) return XD_OK;
    if (d->draws.host_normals)
        XD_TRY(
            xdi_dmd_send(d->ctx, d->draws.normals, here, (size_t)(where.samples * elements) * sizeof *here));
    for (int64_t i = 0; i < where.samples; i++)
        d->factors.host_mixes[i].c0 = 1.0, d->factors.host_mixes[i].c1 = 0.0;
    return xdi_dmd_mix(d, xdi_dmd_gradient_rows(&d->desc.sizes, d->draws.normals, where.samples), none,
                       xdi_dmd_rows(&d->desc.sizes, out, where.samples));
}

XD_PRIVATE void xdi_dmd_set_time(const xd_dmd_desc *desc, const xdi_dmd_times *times, int64_t row, double t) {
    const xd_dtype dtype = desc->network_dtype;
    times->exact[row] = t;
    times->network[row] =
        xdi_noise_network_time(t, desc->network_scale, dtype == XD_DTYPE_NONE ? XD_DTYPE_F32 : dtype);
}

XD_PRIVATE xd_result xdi_dmd_draw_times(xd_dmd *d, xdi_dmd_where where, const xd_time_sampler *sampler,
                                        const xdi_dmd_times *out) {
    const xd_dmd_draw draw = xdi_dmd_draw(d, where);
    const xd_dmd_draws *own = d->desc.draws;
    if (own && own->numbers) {
        XD_TRY(own->numbers(own->user, &draw, sampler, d->draws.times));
        for (int64_t i = 0; i < where.samples; i++)
            XD_TRY(xdi_time_of_draw(d->ctx, sampler, d->draws.times[i], &d->draws.times[i]));
    } else {
        XD_TRY(xd_times_draw(d->ctx, sampler, &draw.random, where.samples, d->draws.times));
    }
    for (int64_t i = 0; i < where.samples; i++) xdi_dmd_set_time(&d->desc, out, i, d->draws.times[i]);
    return XD_OK;
}

/* The fake score knows one distribution: its steps of a turn are at the rung of the student's. */
static int64_t xdi_dmd_held_rung(const xd_dmd_desc *desc, int64_t step) {
    const int64_t turn = step > desc->lead ? (step - desc->lead) / desc->frequency : 0;
    return turn / desc->rungs.hold % desc->rungs.steps;
}

XD_PRIVATE xd_result xdi_dmd_draw_rungs(xd_dmd *d, xdi_dmd_where where, int64_t rows) {
    xd_dmd_draw draw = xdi_dmd_draw(d, where);
    const xd_dmd_draws *own = d->desc.draws;
    const int64_t count = d->desc.rungs.steps;
    draw.rows = rows;
    if (d->desc.rungs.hold > 0) {
        const int64_t rung = xdi_dmd_held_rung(&d->desc, d->record.step);
        for (int64_t i = 0; i < rows; i++) d->draws.rungs[i] = rung;
        return XD_OK;
    }
    if (own && own->rungs) {
        XD_TRY(own->rungs(own->user, &draw, count, d->draws.rungs));
        for (int64_t i = 0; i < rows; i++)
            XD_REQUIRE(d->ctx, d->draws.rungs[i] >= 0 && d->draws.rungs[i] < count, XD_ERROR_ARGUMENT,
                       "rung %lld of %lld", (long long)d->draws.rungs[i], (long long)count);
        return XD_OK;
    }
    for (int64_t i = 0; i < rows; i++, draw.random.sample++)
        d->draws.rungs[i] = xd_draw_index(&draw.random, 0, count);
    return XD_OK;
}
