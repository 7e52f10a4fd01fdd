/* Weights of samples from a discriminator's density ratios. */

#include "dmd/fdistill.h"
#include "dmd/losses.h"
#include "kernel/dmd_loss_scalar.h"
#include "loss/internal.h"

#include <math.h>
#include <string.h>

XD_PRIVATE xdi_fdistill_desc xdi_fdistill_defaults(void) {
    xdi_fdistill_desc d;
    memset(&d, 0, sizeof d);
    d.lower = 0.1;
    d.upper = 20.0;
    d.bins = 10;
    d.max_t = 0.999;
    return d;
}

XD_PRIVATE double xdi_f_weight(xd_f_divergence divergence, double ratio) {
    return xd_f_weight_of(divergence, ratio);
}

static xd_result xdi_fdistill_validate(xd_ctx *ctx, const xdi_fdistill_desc *d, const double *weights) {
    XD_TRY(xdi_sample_check_rows(ctx, "logits", &d->logits, d->logits.rows, d->logits.cols));
    XD_REQUIRE(ctx, d->logits.cols >= 1, XD_ERROR_SHAPE, "logits have %lld heads; at least 1 is needed",
               (long long)d->logits.cols);
    XD_REQUIRE(ctx, (int)d->divergence >= 0 && d->divergence <= XD_F_NEYMAN, XD_ERROR_ARGUMENT,
               "divergence %d is unknown", (int)d->divergence);
    XD_REQUIRE(ctx, d->lower > 0.0 && d->lower <= d->upper && isfinite(d->upper), XD_ERROR_ARGUMENT,
               "ratios in [%g, %g]: 0 < lower <= upper is needed", d->lower, d->upper);
    XD_REQUIRE(ctx, weights || d->logits.rows == 0, XD_ERROR_ARGUMENT, "weights is NULL for %lld samples",
               (long long)d->logits.rows);
    XD_REQUIRE(ctx, d->bins >= 0 && d->bins <= XD_FDISTILL_BINS_MAX, XD_ERROR_ARGUMENT,
               "%d bins; 0 to %d are possible", d->bins, XD_FDISTILL_BINS_MAX);
    if (d->bins == 0) return xdi_sample_check_status(ctx, d->status);
    XD_REQUIRE(ctx, d->rate >= 0.0 && d->rate <= 1.0, XD_ERROR_ARGUMENT, "rate %g is outside [0, 1]",
               d->rate);
    XD_REQUIRE(ctx, isfinite(d->min_t) && isfinite(d->max_t) && d->min_t < d->max_t, XD_ERROR_ARGUMENT,
               "times in [%g, %g]: min_t < max_t is needed", d->min_t, d->max_t);
    XD_REQUIRE(ctx, d->bin_values, XD_ERROR_ARGUMENT, "bin_values is NULL for %d bins", d->bins);
    XD_REQUIRE(ctx, d->times || d->logits.rows == 0, XD_ERROR_ARGUMENT, "times is NULL for %lld samples",
               (long long)d->logits.rows);
    return xdi_sample_check_status(ctx, d->status);
}

/* ---- memory ---- */

static bool xdi_fdistill_layout(const xdi_fdistill_desc *d, xd_fdistill_args *a, xd_arena *arena) {
    const size_t bin = (size_t)XD_FDISTILL_BIN_WORDS * sizeof(int64_t);
    const int64_t bins = d->bins, ranks = d->comm ? xd_comm_size(d->comm) : 1, all = ranks > 1 ? ranks : 0;
    bool fits = true;
    a->record = (int64_t *)xdi_arena_array(arena, bins + 1, bin, &fits);
    a->records = (int64_t *)xdi_arena_array(arena, all * (bins + 1), bin, &fits);
    a->mass = (int64_t *)xdi_arena_array(arena, 1, bin, &fits);
    a->masses = (int64_t *)xdi_arena_array(arena, all, bin, &fits);
    a->next = (double *)xdi_arena_array(arena, bins, sizeof(double), &fits);
    if (all == 0) a->records = a->record;
    if (all == 0) a->masses = a->mass;
    a->ranks = (int)ranks;
    return fits;
}

XD_PRIVATE size_t xdi_fdistill_workspace_bytes(const xdi_fdistill_desc *desc) {
    xd_fdistill_args a;
    xd_arena arena = xd_arena_over(NULL, 0);
    if (desc->bins < 0 || desc->bins > XD_FDISTILL_BINS_MAX) return 0;
    return xdi_fdistill_layout(desc, &a, &arena) ? arena.peak : 0;
}

static void xdi_fdistill_fill(xd_ctx *ctx, const xdi_fdistill_desc *d, xd_fdistill_args *a, double *weights) {
    a->logits = d->logits;
    a->divergence = d->divergence;
    a->lower = d->lower;
    a->upper = d->upper;
    a->rate = d->rate;
    a->min_t = d->min_t;
    a->max_t = d->max_t;
    a->bins = d->bins;
    a->times = d->times;
    a->bin_values = d->bin_values;
    a->fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    a->weights = weights;
}

static xd_result xdi_fdistill_prepare(xd_ctx *ctx, const xdi_fdistill_desc *d, xd_fdistill_args *a,
                                      double *weights, void **owned) {
    const size_t needed = xdi_fdistill_workspace_bytes(d);
    void *memory = d->workspace;
    size_t bytes = d->workspace_bytes;
    if (!memory) {
        bytes = needed;
        memory = *owned = xd_ctx_kernels(ctx)->memory.allocate(ctx, bytes);
        XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    xd_arena arena = xd_arena_over(memory, bytes);
    XD_REQUIRE(ctx, xdi_fdistill_layout(d, a, &arena), XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but f-distill needs %zu", bytes, needed);
    xdi_fdistill_fill(ctx, d, a, weights);
    return XD_OK;
}

/* ---- the call ---- */

static xd_result xdi_fdistill_run(xd_ctx *ctx, const xdi_fdistill_desc *d, const xd_fdistill_args *a) {
    const xd_dmd_loss_kernels *kernels = &xd_ctx_kernels(ctx)->dmd_loss;
    const int64_t bin = XD_FDISTILL_BIN_WORDS;
    xd_launch launch = xd_ctx_launch(ctx);
    xd_status found;
    memset(&found, 0, sizeof found);
    launch.status = d->status ? d->status : &found;
    XD_TRY(kernels->fdistill_ratios(&launch, a));
    if (a->ranks > 1)
        XD_TRY(xdi_comm_all_gather_equal(d->comm, a->record, (int64_t *)a->records, (a->bins + 1) * bin,
                                         XD_DTYPE_I64));
    XD_TRY(kernels->fdistill_bins(&launch, a));
    if (a->ranks > 1)
        XD_TRY(xdi_comm_all_gather_equal(d->comm, a->mass, (int64_t *)a->masses, bin, XD_DTYPE_I64));
    XD_TRY(kernels->fdistill_weights(&launch, a));
    return d->status ? XD_OK : xd_status_check(ctx, &found);
}

XD_PRIVATE xd_result xdi_fdistill_weights(xd_ctx *ctx, const xdi_fdistill_desc *desc, double *weights) {
    xd_fdistill_args a;
    void *owned = NULL;
    memset(&a, 0, sizeof a);
    xd_result result = xdi_fdistill_validate(ctx, desc, weights);
    if (result == XD_OK) result = xdi_fdistill_prepare(ctx, desc, &a, weights, &owned);
    result = xdi_vocab_agree_rows(desc->comm, result, desc->bins);
    if (result == XD_OK) result = xdi_fdistill_run(ctx, desc, &a);
    xd_ctx_kernels(ctx)->memory.release(ctx, owned);
    return result;
}
