/* f-distill: weights of the student's samples, from the logits of a whole step. */

#include "base/internal.h"
#include "dmd/losses.h"
#include "dmd/fdistill.h"
#include "dmd/state.h"

#include <math.h>
#include <string.h>

static xdi_fdistill_desc xdi_dmd_fdistill_desc(const xd_dmd *d) {
    const xd_dmd_fdistill *f = &d->desc.gan.fdistill;
    const bool own = f->min_t != 0.0 || f->max_t != 0.0;
    xdi_fdistill_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.logits = xd_rows_of(d->ratios.logits, XD_DTYPE_F32, d->ratios.rows,
                             d->desc.networks[XD_DMD_DISCRIMINATOR].heads);
    desc.divergence = f->divergence;
    desc.lower = f->lower;
    desc.upper = f->upper;
    desc.bins = f->bins;
    desc.rate = f->rate;
    desc.min_t = own ? f->min_t : d->desc.student_times.min_t;
    desc.max_t = own ? f->max_t : d->desc.student_times.max_t;
    desc.times = d->ratios.times;
    desc.bin_values = d->ratios.bins;
    desc.comm = d->desc.data;
    desc.status = d->results.status;
    desc.workspace = d->results.workspace;
    desc.workspace_bytes = d->results.workspace_bytes;
    return desc;
}

/* ---- settings and memory ---- */

XD_PRIVATE xd_result xdi_dmd_check_fdistill(xd_ctx *ctx, const xd_dmd_desc *desc) {
    const xd_dmd_fdistill *f = &desc->gan.fdistill;
    if (!f->on) return XD_OK;
    XD_REQUIRE(ctx, (int)f->divergence >= 0 && f->divergence <= XD_F_NEYMAN, XD_ERROR_ARGUMENT,
               "f-distill by divergence %d", (int)f->divergence);
    XD_REQUIRE(ctx, f->lower > 0.0 && f->lower <= f->upper && isfinite(f->upper), XD_ERROR_ARGUMENT,
               "f-distill with ratios in [%g, %g]: 0 < lower <= upper is needed", f->lower, f->upper);
    XD_REQUIRE(ctx, f->bins >= 0 && f->bins <= XD_FDISTILL_BINS_MAX, XD_ERROR_ARGUMENT,
               "f-distill with %d bins; 0 to %d are possible", f->bins, XD_FDISTILL_BINS_MAX);
    XD_REQUIRE(ctx, f->rate >= 0.0 && f->rate <= 1.0, XD_ERROR_ARGUMENT,
               "f-distill with rate %g, which is outside [0, 1]", f->rate);
    XD_REQUIRE(ctx,
               isfinite(f->min_t) && isfinite(f->max_t) &&
                   (f->min_t < f->max_t || (f->min_t == 0.0 && f->max_t == 0.0)),
               XD_ERROR_ARGUMENT, "f-distill with times in [%g, %g]: min_t < max_t is needed", f->min_t,
               f->max_t);
    return XD_OK;
}

XD_PRIVATE void xdi_dmd_lay_out_ratios(xd_dmd *d, xd_arena *host, xd_arena *device) {
    const size_t micro_batches = (size_t)d->micro_batches,
                 rows = micro_batches * (size_t)d->desc.sizes.samples,
                 bins = (size_t)d->desc.gan.fdistill.bins,
                 heads = (size_t)d->desc.networks[XD_DMD_DISCRIMINATOR].heads;
    xdi_dmd_ratios *r = &d->ratios;
    r->logits = (float *)xd_arena_take_pointer(device, rows * heads * sizeof *r->logits);
    r->times = (double *)xd_arena_take_pointer(device, rows * sizeof *r->times);
    r->weights = (double *)xd_arena_take_pointer(device, rows * sizeof *r->weights);
    r->bins = (double *)xd_arena_take_pointer(device, bins * sizeof *r->bins);
    r->earlier = (double *)xd_arena_take_pointer(device, bins * sizeof *r->earlier);
    r->first = (int64_t *)xd_arena_take_pointer(host, micro_batches * sizeof *r->first);
    r->samples = (int64_t *)xd_arena_take_pointer(host, micro_batches * sizeof *r->samples);
}

XD_PRIVATE size_t xdi_dmd_ratios_workspace(const xd_dmd *d) {
    xdi_fdistill_desc desc;
    if (!d->desc.gan.fdistill.on) return 0;
    desc = xdi_dmd_fdistill_desc(d);
    return xdi_fdistill_workspace_bytes(&desc);
}

XD_PRIVATE xd_result xdi_dmd_begin_ratios(xd_dmd *d) {
    const double one = 1.0;
    if (!d->desc.gan.fdistill.on) return XD_OK;
    xdi_dmd_forget_ratios(d);
    for (int k = 0; k < d->desc.gan.fdistill.bins; k++)
        XD_TRY(xdi_dmd_send(d->ctx, d->ratios.bins + k, &one, sizeof one));
    return XD_OK;
}

XD_PRIVATE void xdi_dmd_forget_ratios(xd_dmd *d) {
    for (int64_t k = 0; k < d->micro_batches; k++) d->ratios.first[k] = -1;
    d->ratios.rows = 0;
    d->ratios.weighed = false;
}

/* ---- weights ---- */

XD_PRIVATE xd_result xdi_dmd_check_on(const xd_dmd *d) {
    XD_REQUIRE(d->ctx, d->desc.gan.fdistill.on, XD_ERROR_STATE, "a distillation without f-distill");
    return XD_OK;
}

static xd_result xdi_dmd_copy_bins(xd_dmd *d, double *to, const double *from) {
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const size_t bytes = (size_t)d->desc.gan.fdistill.bins * sizeof *to;
    if (bytes == 0) return XD_OK;
    return xd_ctx_kernels(d->ctx)->memory.copy(&launch, to, from, bytes, XD_COPY_ON_DEVICE);
}

XD_PRIVATE xd_result xdi_dmd_weigh(xd_dmd *dmd) {
    XD_TRY(xdi_dmd_check_on(dmd));
    const xdi_fdistill_desc desc = xdi_dmd_fdistill_desc(dmd);
    XD_TRY(xdi_dmd_copy_bins(dmd, dmd->ratios.earlier, dmd->ratios.bins));
    XD_TRY(xdi_fdistill_weights(dmd->ctx, &desc, dmd->ratios.weights));
    dmd->ratios.weighed = true;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_undo_weigh(xd_dmd *d) {
    if (!d->desc.gan.fdistill.on || !d->ratios.weighed) return XD_OK;
    xdi_dmd_forget_ratios(d);
    return xdi_dmd_copy_bins(d, d->ratios.bins, d->ratios.earlier);
}

XD_PRIVATE xd_result xdi_dmd_take_weights(xd_dmd *d, int64_t micro_batch, int64_t samples,
                                          const double **out) {
    xdi_dmd_ratios *r = &d->ratios;
    if (!d->desc.gan.fdistill.on) return XD_OK;
    XD_REQUIRE(d->ctx, r->weighed && r->first[micro_batch] >= 0, XD_ERROR_STATE,
               "micro-batch %lld of %lld has no weights of f-distill, which only xd_dmd_step computes",
               (long long)micro_batch, (long long)d->micro_batches);
    XD_REQUIRE(d->ctx, r->samples[micro_batch] == samples, XD_ERROR_STATE,
               "micro-batch %lld has weights of %lld samples, and now has %lld", (long long)micro_batch,
               (long long)r->samples[micro_batch], (long long)samples);
    *out = r->weights + r->first[micro_batch];
    r->first[micro_batch] = -1;
    return XD_OK;
}

/* ---- bins ---- */

XD_PRIVATE xd_result xdi_dmd_bins(xd_dmd *dmd, double *out) {
    XD_TRY(xdi_dmd_check_on(dmd));
    const size_t bytes = (size_t)dmd->desc.gan.fdistill.bins * sizeof *out;
    return bytes > 0 ? xd_read(dmd->ctx, out, dmd->ratios.bins, bytes) : XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_set_bins(xd_dmd *dmd, const double *values, int count) {
    XD_TRY(xdi_dmd_check_on(dmd));
    XD_REQUIRE(dmd->ctx, count == dmd->desc.gan.fdistill.bins, XD_ERROR_ARGUMENT,
               "%d values for the %d bins of f-distill", count, dmd->desc.gan.fdistill.bins);
    for (int k = 0; k < count; k++)
        XD_REQUIRE(dmd->ctx, isfinite(values[k]) && values[k] > 0.0, XD_ERROR_ARGUMENT,
                   "bin %d of %d of f-distill is %g; it must be above 0 and finite", k, count, values[k]);
    return xdi_dmd_send(dmd->ctx, dmd->ratios.bins, values, (size_t)count * sizeof *values);
}
