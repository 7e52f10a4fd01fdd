/* What distribution matching draws, sums of two tensors, and what all of its losses get besides theirs. */

#include "base/internal.h"
#include "dmd/internal.h"
#include "dmd/state.h"

#include <string.h>

XD_PRIVATE xd_rows xdi_dmd_rows(const xd_dmd *d, const void *data, int64_t samples) {
    return xd_rows_of(data, d->desc.sizes.dtype, samples, d->desc.sizes.elements);
}

XD_PRIVATE xd_rows xdi_dmd_slopes(const xd_dmd *d, const float *data, int64_t samples) {
    return xd_rows_of(data, XD_DTYPE_F32, samples, d->desc.sizes.elements);
}

XD_PRIVATE xd_result xdi_dmd_send(xd_dmd *d, void *to, const void *from, size_t bytes) {
    const xd_device_ops *device = &xd_ctx_kernels(d->ctx)->memory;
    const xd_launch launch = xd_ctx_launch(d->ctx);
    if (bytes == 0) return XD_OK;
    XD_TRY(device->copy(&launch, to, from, bytes, XD_COPY_TO_DEVICE));
    return device->synchronize(&launch); /* the caller's memory is used again */
}

XD_PRIVATE xd_result xdi_dmd_mix(xd_dmd *d, xd_rows p, xd_rows q, xd_rows out) {
    xd_mix_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.p = p, desc.q = q, desc.out = out, desc.mix = d->mixes;
    XD_TRY(xdi_dmd_send(d, d->mixes, d->host_mixes, (size_t)p.rows * sizeof *d->mixes));
    return xd_mix_rows(d->ctx, &desc);
}

XD_PRIVATE xd_sample_common xdi_dmd_common(const xd_dmd *d, int64_t numbers) {
    xd_sample_common common;
    memset(&common, 0, sizeof common);
    common.weight = 1.0;
    common.denominator_value = (double)d->desc.sizes.step_samples * (double)numbers;
    common.status = d->status;
    common.workspace = d->workspace;
    common.workspace_bytes = d->workspace_bytes;
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

XD_PRIVATE bool xdi_dmd_draws_there(const xd_dmd *d) {
    const xd_dmd_draws *own = d->desc.draws;
    return !(own && own->normals) && xd_ctx_kernels(d->ctx)->dmd.draw;
}

XD_PRIVATE bool xdi_dmd_draws_apart(const xd_dmd *d) {
    return !xdi_dmd_draws_there(d) && xd_ctx_kernels(d->ctx)->device != XD_DEVICE_CPU;
}

XD_PRIVATE bool xdi_dmd_draws_between(const xd_dmd *d) {
    return xdi_dmd_draws_apart(d) || (!xdi_dmd_draws_there(d) && d->desc.sizes.dtype != XD_DTYPE_F32);
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
    float *here = d->host_normals ? d->host_normals : d->normals ? d->normals : (float *)out;
    xd_rows none;
    memset(&none, 0, sizeof none);
    if (where.samples == 0) return XD_OK;
    if (xdi_dmd_draws_there(d))
        return xdi_dmd_fill(d, &xd_ctx_kernels(d->ctx)->dmd, &draw, xdi_dmd_rows(d, out, where.samples));
    if (own && own->normals)
        XD_TRY(own->normals(own->user, &draw, here));
    else
        XD_TRY(xdi_dmd_fill(d, &xd_ctx_host_kernels(d->ctx)->dmd, &draw,
                            xdi_dmd_slopes(d, here, where.samples)));
    if (!d->normals) return XD_OK;
    if (d->host_normals)
        XD_TRY(xdi_dmd_send(d, d->normals, here, (size_t)(where.samples * elements) * sizeof *here));
    for (int64_t i = 0; i < where.samples; i++) d->host_mixes[i].c0 = 1.0, d->host_mixes[i].c1 = 0.0;
    return xdi_dmd_mix(d, xdi_dmd_slopes(d, d->normals, where.samples), none,
                       xdi_dmd_rows(d, out, where.samples));
}

XD_PRIVATE void xdi_dmd_set_time(const xd_dmd *d, const xdi_dmd_times *times, int64_t row, double t) {
    const xd_dtype dtype = d->desc.network_dtype;
    times->exact[row] = t;
    times->network[row] =
        xdi_noise_network_time(t, d->desc.network_scale, dtype == XD_DTYPE_NONE ? XD_DTYPE_F32 : dtype);
}

XD_PRIVATE xd_result xdi_dmd_draw_times(xd_dmd *d, xdi_dmd_where where, const xd_time_sampler *sampler,
                                        const xdi_dmd_times *out) {
    const xd_dmd_draw draw = xdi_dmd_draw(d, where);
    const xd_dmd_draws *own = d->desc.draws;
    if (own && own->numbers) {
        XD_TRY(own->numbers(own->user, &draw, sampler, d->draws));
        for (int64_t i = 0; i < where.samples; i++)
            XD_TRY(xdi_time_of_draw(d->ctx, sampler, d->draws[i], &d->draws[i]));
    } else {
        XD_TRY(xdi_times_of_samples(d->ctx, sampler, &draw.random, where.samples, d->draws));
    }
    for (int64_t i = 0; i < where.samples; i++) xdi_dmd_set_time(d, out, i, d->draws[i]);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_draw_rungs(xd_dmd *d, xdi_dmd_where where, int64_t rows) {
    xd_dmd_draw draw = xdi_dmd_draw(d, where);
    const xd_dmd_draws *own = d->desc.draws;
    const int64_t count = d->desc.rungs.steps;
    draw.rows = rows;
    if (own && own->rungs) {
        XD_TRY(own->rungs(own->user, &draw, count, d->rung));
        for (int64_t i = 0; i < rows; i++)
            XD_REQUIRE(d->ctx, d->rung[i] >= 0 && d->rung[i] < count, XD_ERROR_ARGUMENT, "rung %lld of %lld",
                       (long long)d->rung[i], (long long)count);
        return XD_OK;
    }
    for (int64_t i = 0; i < rows; i++, draw.random.sample++)
        d->rung[i] = xd_draw_index(&draw.random, 0, count);
    return XD_OK;
}
