/* What the losses over samples share: checks, memory, exchanges, and the way from samples to one value. */

#include "dmd/losses.h"
#include "kernel/dmd_loss_scalar.h"
#include "loss/internal.h"

#include <math.h>
#include <string.h>

/* ---- checks ---- */

XD_PRIVATE xd_result xdi_sample_check_rows(xd_ctx *ctx, const char *name, const xd_rows *rows,
                                           int64_t samples, int64_t elements) {
    const bool fits =
        rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16 || rows->dtype == XD_DTYPE_F16;
    XD_REQUIRE(ctx, fits, XD_ERROR_DTYPE, "%s is %s; F32, BF16 or F16 is needed", name,
               xd_dtype_name(rows->dtype));
    XD_REQUIRE(ctx, rows->rows >= 0 && rows->cols >= 0, XD_ERROR_SHAPE,
               "%s has %lld samples of %lld elements", name, (long long)rows->rows, (long long)rows->cols);
    XD_REQUIRE(ctx, rows->rows == samples && rows->cols == elements, XD_ERROR_SHAPE,
               "%s is [%lld, %lld] but [%lld, %lld] is expected", name, (long long)rows->rows,
               (long long)rows->cols, (long long)samples, (long long)elements);
    XD_REQUIRE(ctx, rows->stride == 0 || rows->stride >= rows->cols, XD_ERROR_SHAPE,
               "%s has stride %lld, less than its %lld columns", name, (long long)rows->stride,
               (long long)rows->cols);
    XD_REQUIRE(ctx, rows->data || rows->rows == 0 || rows->cols == 0, XD_ERROR_ARGUMENT,
               "%s has no data of %lld samples of %lld elements", name, (long long)rows->rows,
               (long long)rows->cols);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_sample_check_gradient(xd_ctx *ctx, const char *name, const xd_rows *gradient,
                                               const xd_rows *const *inputs, int count) {
    if (!gradient->data) return XD_OK;
    XD_TRY(xdi_sample_check_rows(ctx, name, gradient, inputs[0]->rows, inputs[0]->cols));
    const int64_t stride = gradient->stride ? gradient->stride : gradient->cols;
    for (int i = 0; i < count; i++) {
        const int64_t other = inputs[i]->stride ? inputs[i]->stride : inputs[i]->cols;
        const bool same = inputs[i]->dtype == gradient->dtype && other == stride;
        XD_REQUIRE(ctx, inputs[i]->data != gradient->data || same, XD_ERROR_SHAPE,
                   "%s over an input needs its dtype and stride: %s and %lld against %s and %lld", name,
                   xd_dtype_name(gradient->dtype), (long long)stride, xd_dtype_name(inputs[i]->dtype),
                   (long long)other);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_sample_check_status(xd_ctx *ctx, const xd_status *status) {
    XD_REQUIRE(ctx, status || xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU, XD_ERROR_ARGUMENT,
               "a loss on a GPU needs a status: its findings are not read on the host during the step");
    return XD_OK;
}

XD_PRIVATE xd_result xdi_sample_check_common(xd_ctx *ctx, const xd_sample_common *common) {
    XD_REQUIRE(ctx, isfinite(common->weight) && common->weight > 0.0, XD_ERROR_ARGUMENT,
               "weight %g must be finite and above 0", common->weight);
    XD_REQUIRE(ctx, isfinite(common->denominator_value) && common->denominator_value >= 0.0,
               XD_ERROR_ARGUMENT, "denominator %g must be finite and not negative",
               common->denominator_value);
    return xdi_sample_check_status(ctx, common->status);
}

/* ---- memory ---- */

static int xdi_sample_ranks(const xd_comm *comm) {
    return comm ? xd_comm_size(comm) : 1;
}

/* The blocks: chunks' sums, the rows', all shards', samples, this rank's record and all ranks', the factor. */
static bool xdi_sample_layout(xdi_sample_call *call, xd_arena *arena) {
    xd_sample_args *a = call->args;
    const size_t word = sizeof(int64_t), row = (size_t)xd_sample_words(a->fixed) * word;
    const size_t record = (size_t)xd_sample_record_words(a->fixed) * word;
    const int64_t samples = a->samples, chunks = xd_sample_chunks(a->elements);
    const int shards = call->measured ? xdi_sample_ranks(call->common->split) : 0;
    const int ranks = xdi_sample_ranks(call->common->comm);
    size_t most; /* no size wraps if this one does not */
    bool fits = true;
    if (!xdi_size_multiply((size_t)samples, ((size_t)chunks + (size_t)shards + 2) * (row + sizeof(xd_sample)),
                           &most))
        return false;
    a->parts = (int64_t *)xdi_arena_array(arena, call->measured ? samples * chunks : 0, row, &fits);
    a->sums = (int64_t *)xdi_arena_array(arena, call->measured && chunks != 1 ? samples : 0, row, &fits);
    call->all_sums = (int64_t *)xdi_arena_array(arena, shards > 1 ? shards * samples : 0, row, &fits);
    a->sample = (xd_sample *)xdi_arena_array(arena, samples, sizeof(xd_sample), &fits);
    a->record = (int64_t *)xdi_arena_array(arena, 1, record, &fits);
    a->records = (int64_t *)xdi_arena_array(arena, ranks > 1 ? ranks : 0, record, &fits);
    a->factor = (double *)xdi_arena_array(arena, 1, sizeof(double), &fits);
    if (chunks == 1) a->sums = a->parts;
    if (shards <= 1) call->all_sums = a->sums;
    if (ranks <= 1) a->records = a->record;
    a->all_sums = call->all_sums;
    a->shards = shards;
    a->ranks = ranks;
    return fits;
}

XD_PRIVATE size_t xdi_sample_bytes(xdi_sample_call *call) {
    xd_arena arena = xd_arena_over(NULL, 0);
    if (call->args->samples < 0 || call->args->elements < 0) return 0;
    call->args->fixed = xd_ctx_settings(call->ctx)->reduction == XD_REDUCTION_INVARIANT;
    return xdi_sample_layout(call, &arena) ? arena.peak : 0;
}

static xd_result xdi_sample_measure(xdi_sample_call *call, size_t *bytes) {
    *bytes = xdi_sample_bytes(call);
    XD_REQUIRE(call->ctx, *bytes > 0, XD_ERROR_ARGUMENT, "the workspace would not fit into memory");
    return XD_OK;
}

XD_PRIVATE xd_result xdi_sample_plan(xdi_sample_call *call, xd_result checked) {
    size_t bytes = 0;
    if (checked == XD_OK) checked = xdi_sample_measure(call, &bytes);
    return xdi_plan_add_workspace(call->ctx, checked, bytes);
}

/* This rank's part of opening: local. */
static xd_result xdi_sample_prepare(xdi_sample_call *call) {
    const xd_sample_common *common = call->common;
    void *memory = common->workspace;
    size_t bytes = common->workspace_bytes, needed = 0;
    XD_TRY(xdi_sample_measure(call, &needed));
    if (!memory) {
        bytes = needed;
        memory = call->owned = xd_ctx_kernels(call->ctx)->memory.allocate(call->ctx, bytes);
        XD_REQUIRE(call->ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    xd_arena arena = xd_arena_over(memory, bytes);
    XD_REQUIRE(call->ctx, xdi_sample_layout(call, &arena), XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but the loss needs %zu", bytes, needed);
    call->args->sample_loss = common->sample_loss;
    call->args->weight = common->weight;
    call->args->scale = common->scale;
    call->args->denominator = common->denominator;
    call->args->denominator_value = common->denominator_value;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_sample_open(xdi_sample_call *call, xd_result checked) {
    xd_result result = checked == XD_OK ? xdi_sample_prepare(call) : checked;
    result = xdi_vocab_agree_rows(call->common->split, result, call->args->samples);
    return xdi_vocab_agree(NULL, call->common->comm, result);
}

XD_PRIVATE void xdi_sample_close(xdi_sample_call *call) {
    xd_ctx_kernels(call->ctx)->memory.release(call->ctx, call->owned);
    call->owned = NULL;
}

/* ---- exchanges ---- */

XD_PRIVATE xd_result xdi_sample_exchange(const xd_launch *launch, xdi_sample_call *call) {
    xd_sample_args *a = call->args;
    if (xd_sample_chunks(a->elements) != 1) XD_TRY(call->kernels->join(launch, a));
    if (a->shards == 1) return XD_OK;
    return xdi_comm_all_gather_equal(call->common->split, a->sums, call->all_sums,
                                     a->samples * xd_sample_words(a->fixed), XD_DTYPE_I64);
}

XD_PRIVATE bool xdi_sample_goes_alone(const xdi_sample_call *call, bool at_once) {
    const xd_sample_args *a = call->args;
    const int64_t threads = xd_ctx_settings(call->ctx)->threads;
    const bool known = !a->mask || a->denominator || a->denominator_value != 0.0;
    const bool host = xd_ctx_kernels(call->ctx)->device == XD_DEVICE_CPU;
    if (!call->kernels->vsd_by_sample || !call->kernels->denoise_by_sample || a->shards != 1 ||
        a->ranks != 1 || !known)
        return false;
    if (at_once) return true;
    if (host && threads > 1 && a->samples < 4 * threads) return false;
    return a->elements <= call->kernels->by_sample_elements;
}

/* From samples to the value, over all ranks. */
static xd_result xdi_sample_settle(const xd_launch *launch, const xdi_sample_call *call) {
    xd_sample_args *a = call->args;
    if (a->ranks == 1 && call->kernels->finish_alone) return call->kernels->finish_alone(launch, a);
    XD_TRY(call->kernels->total(launch, a));
    if (a->ranks > 1)
        XD_TRY(xdi_comm_all_gather_equal(call->common->comm, a->record, (int64_t *)a->records,
                                         xd_sample_record_words(a->fixed), XD_DTYPE_I64));
    return call->kernels->finish(launch, a);
}

XD_PRIVATE xd_result xdi_sample_finish(xdi_sample_call *call, xdi_sample_slope slope, const void *user,
                                       xd_sample_values *out) {
    xd_sample_args *a = call->args;
    xd_launch launch = xd_ctx_launch(call->ctx);
    const bool host = xd_ctx_kernels(call->ctx)->device == XD_DEVICE_CPU;
    xd_sample_values values;
    xd_status found;
    memset(&found, 0, sizeof found);
    launch.status = call->common->status ? call->common->status : &found;
    a->values = host ? &values : out; /* the caller's stays untouched when findings are an error */
    XD_TRY(xdi_sample_settle(&launch, call));
    if (slope) XD_TRY(slope(&launch, user));
    if (!call->common->status) XD_TRY(xd_status_check(call->ctx, &found));
    if (host) *out = values;
    return XD_OK;
}
