/* What the terms of a micro-batch have in common. */

#include "base/internal.h"
#include "dmd/state.h"

#include <string.h>

XD_PRIVATE xd_result xdi_dmd_add_value(xd_dmd *d, double *value) {
    xd_sample_values here;
    if (!value) return XD_OK;
    XD_TRY(xd_read(d->ctx, &here, d->results.value, sizeof here));
    *value += here.loss;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_check_batch(const xd_dmd *d, int64_t micro_batch, const xd_dmd_batch *batch,
                                         int64_t step_samples) {
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    XD_REQUIRE(d->ctx, batch->samples >= 0 && batch->samples <= sizes->samples, XD_ERROR_ARGUMENT,
               "%lld samples in a batch; there is room for %lld", (long long)batch->samples,
               (long long)sizes->samples);
    XD_REQUIRE(d->ctx, batch->first >= 0 && batch->first <= step_samples - batch->samples, XD_ERROR_ARGUMENT,
               "samples %lld to %lld of a step of %lld", (long long)batch->first,
               (long long)(batch->first + batch->samples - 1), (long long)step_samples);
    XD_REQUIRE(d->ctx, micro_batch >= 0 && micro_batch < d->micro_batches, XD_ERROR_ARGUMENT,
               "micro-batch %lld of %lld", (long long)micro_batch, (long long)d->micro_batches);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_check_guidance(const xd_dmd *d, const xd_dmd_batch *batch, xd_dmd_role role) {
    const xd_guidance guidance = xdi_dmd_guidance(&d->desc, role);
    XD_REQUIRE(d->ctx, !guidance.on || batch->negative || batch->samples == 0, XD_ERROR_ARGUMENT,
               "guidance by %g, and no negative condition for %lld samples", guidance.scale,
               (long long)batch->samples);
    return XD_OK;
}

XD_API xd_result xd_dmd_findings(xd_dmd *dmd, xd_status *out) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_IN_PLAN(dmd ? dmd->ctx : NULL, dmd, out);
    const xd_launch launch = xd_ctx_launch(dmd->ctx);
    xd_status found;
    XD_TRY(xd_read(dmd->ctx, &found, dmd->results.status, sizeof found));
    XD_TRY(
        xd_ctx_kernels(dmd->ctx)->memory.fill(&launch, dmd->results.status, 0, sizeof *dmd->results.status));
    *out = found;
    return XD_OK;
}

/* ---- what the student generated ---- */

XD_PRIVATE xd_result xdi_dmd_copy_kept(xd_dmd *d, int64_t micro_batch, int64_t samples, bool keep) {
    const xd_device_ops *device = &xd_ctx_kernels(d->ctx)->memory;
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const size_t size = (size_t)d->desc.sizes.elements * xd_dtype_size(d->desc.sizes.dtype);
    unsigned char *kept =
        (unsigned char *)d->kept.samples + (size_t)(micro_batch * d->desc.sizes.samples) * size;
    void *here = d->tensors.generated;
    if (keep) d->kept.counts[micro_batch] = samples;
    if (samples == 0) return XD_OK;
    return device->copy(&launch, keep ? kept : here, keep ? here : kept, (size_t)samples * size,
                        XD_COPY_ON_DEVICE);
}

XD_PRIVATE xd_result xdi_dmd_fetch(xd_dmd *d, xd_dmd_role phase, int64_t micro_batch,
                                   const xd_dmd_batch *batch) {
    if (!d->desc.own_samples || d->kept.counts[micro_batch] < 0)
        return xdi_dmd_generate(d, phase, batch, false);
    XD_REQUIRE(d->ctx, d->kept.counts[micro_batch] == batch->samples, XD_ERROR_STATE,
               "the student generated %lld samples for micro-batch %lld, of which %lld are to be used",
               (long long)d->kept.counts[micro_batch], (long long)micro_batch, (long long)batch->samples);
    return xdi_dmd_copy_kept(d, micro_batch, batch->samples, false);
}
