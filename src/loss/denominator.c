/* What a loss is divided by, counted over batches and ranks. */

#include "base/extend.h"
#include "kernel/kernels.h"
#include "loss/denominator.h"
#include "loss/internal.h"

/* Refuses batches whose labels cannot be read, and negative counts; the other ranks find out by the exchange. */
static xd_result xdi_denominator_count_one(xd_ctx *ctx, const xd_kernels *kernels, const xd_positions *batch,
                                           int64_t *part) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_positions refused = { -1, { NULL, XD_DTYPE_NONE }, false, 0, NULL, NULL };
    xd_result checked = xdi_vocab_check_ids(ctx, "labels", &batch->labels);
    if (checked == XD_OK && batch->count < 0)
        checked = XD_FAIL(ctx, XD_ERROR_ARGUMENT, "a batch of %lld positions", (long long)batch->count);
    XD_TRY(kernels->rows.count(&launch, checked == XD_OK ? batch : &refused, part));
    return checked;
}

/* Adds up all batches in part[XD_COUNT_WORDS], over all ranks. */
static xd_result xdi_denominator_add(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                     int64_t batch_count, int64_t *part) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    XD_TRY(kernels->memory.fill(&launch, part, 0, XD_COUNT_WORDS * sizeof *part));
    xd_result counted = XD_OK;
    if (batch_count < 0 || (batch_count > 0 && !batches)) {
        const xd_positions refused = { -1, { NULL, XD_DTYPE_NONE }, false, 0, NULL, NULL };
        (void)xdi_denominator_count_one(ctx, kernels, &refused, part);
        counted = XD_FAIL(ctx, XD_ERROR_ARGUMENT, "%lld batches of positions%s", (long long)batch_count,
                          batches ? "" : " at NULL");
    }
    for (int64_t b = 0; b < batch_count && batches; b++) {
        const xd_result result = xdi_denominator_count_one(ctx, kernels, &batches[b], part);
        if (counted == XD_OK) counted = result;
    }
    if (comm && xd_comm_size(comm) > 1)
        XD_TRY(xd_all_reduce(comm, part, part, XD_COUNT_WORDS, XD_DTYPE_I64, XD_SUM));
    return counted;
}

XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out) {
    XDI_LIVE(xd_comm, comm);
    XDI_GIVEN_TO_ALL(ctx, comm, ctx, out);
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    int64_t words[XD_COUNT_WORDS];
    const bool host = kernels->device == XD_DEVICE_CPU;
    int64_t *part = host ? words : (int64_t *)(void *)out; /* a GPU counts in the result's memory */
    XD_TRY(xdi_denominator_add(ctx, comm, batches, batch_count, part));
    XD_REQUIRE(ctx, !host || part[XD_COUNT_REFUSED] == 0, XD_ERROR_ARGUMENT,
               "%lld weights of positions are negative, not finite or too large (or counts negative)",
               (long long)words[XD_COUNT_REFUSED]);
    return kernels->rows.denominator(&launch, part, out);
}
