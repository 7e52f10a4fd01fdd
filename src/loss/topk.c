/* Selections over a vocabulary that is cut over ranks. */

#include "loss/internal.h"
#include "loss/topk.h"

#include <string.h>

static xd_result xdi_topk_prepare(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                  xdi_topk_candidates *c) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    XD_TRY(xdi_vocab_check_rows(ctx, vocab, "logits", logits, -1));
    XD_REQUIRE(ctx, k >= 1 && k <= info.size, XD_ERROR_ARGUMENT,
               "k is %lld but the vocabulary has %lld columns", (long long)k, (long long)info.size);
    if (info.ranks == 1) return XD_OK;                       /* its own candidates are the result */
    const size_t words = 2 * (size_t)(logits->rows * k) + 1; /* never an empty block */
    c->mine = (int64_t *)xdi_call_memory(ctx, words * sizeof(int64_t));
    c->all = (int64_t *)xdi_call_memory(ctx, words * (size_t)info.ranks * sizeof(int64_t));
    XD_REQUIRE(ctx, c->mine && c->all, XD_ERROR_MEMORY, "no room for %zu candidates", words / 2);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_topk_select(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                     const xdi_topk_candidates *c, double *values, int64_t *ids) {
    const xd_topk_kernels *kernels = &xd_ctx_kernels(ctx)->topk;
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const void *all;
    xd_select_args a;
    memset(&a, 0, sizeof a);
    a.logits = *logits;
    a.k = k;
    a.first = info.begin;
    a.columns = info.end - info.begin;
    a.values = info.ranks == 1 ? values : (double *)(void *)c->mine;
    a.ids = info.ranks == 1 ? ids : c->mine + logits->rows * k;
    XD_TRY(kernels->select(&launch, &a));
    if (info.ranks == 1) return XD_OK;
    a.all_stride = 2 * logits->rows * k;
    XD_TRY(xdi_vocab_gather(vocab, c->mine, c->all, a.all_stride, XD_DTYPE_I64, &all));
    a.all = (const int64_t *)all;
    a.shards = info.ranks;
    a.values = values;
    a.ids = ids;
    return kernels->select_merge(&launch, &a);
}

XD_API xd_result xd_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t k, double *values,
                               int64_t *ids) {
    xdi_topk_candidates c = { NULL, NULL };
    xd_result result = xdi_topk_prepare(ctx, vocab, &logits, k, &c);
    result = xdi_vocab_agree(xd_vocab_describe(vocab).tp, NULL, result);
    if (result == XD_OK) result = xdi_topk_select(ctx, vocab, &logits, k, &c, values, ids);
    xdi_call_memory_done(ctx, c.mine);
    xdi_call_memory_done(ctx, c.all);
    return result;
}

/* The largest logit of each of this shard's columns, over comm, is a row to select from. */
static xd_result xdi_topk_columns(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                  const uint8_t *mask, xd_comm *comm, xd_rows maxima, int64_t k,
                                  double *values, int64_t *ids) {
    const xd_row_kernels *kernels = &xd_ctx_kernels(ctx)->rows;
    const xd_launch launch = xd_ctx_launch(ctx);
    float *row = (float *)maxima.data;
    XD_TRY(kernels->column_maxima(&launch, logits, mask, maxima.cols, row));
    if (comm && xd_comm_size(comm) > 1)
        XD_TRY(xd_all_reduce(comm, row, row, maxima.cols, XD_DTYPE_F32, XD_MAX));
    XD_TRY(xd_vocab_topk(ctx, vocab, maxima, k, values, ids));
    return kernels->sort_ids(&launch, ids, k);
}

XD_API xd_result xd_vocab_topk_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                       const uint8_t *mask, xd_comm *comm, int64_t k, int64_t *ids,
                                       float *importance) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    const size_t bytes = (size_t)(info.end - info.begin) * sizeof(float);
    xd_rows maxima = { NULL, XD_DTYPE_F32, 1, info.end - info.begin, 0 };
    double *values = (double *)xdi_call_memory(ctx, (size_t)(k > 0 ? k : 1) * sizeof *values);
    maxima.data = xdi_call_memory(ctx, bytes + 1);
    xd_result result = xdi_vocab_check_rows(ctx, vocab, "logits", &logits, -1);
    if (result == XD_OK && !(maxima.data && values))
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld columns", (long long)maxima.cols);
    result = xdi_vocab_agree(info.tp, comm, result);
    if (result == XD_OK) result = xdi_topk_columns(ctx, vocab, &logits, mask, comm, maxima, k, values, ids);
    if (result == XD_OK && importance)
        result = memory->copy(&launch, importance, maxima.data, bytes, XD_COPY_ON_DEVICE);
    xdi_call_memory_done(ctx, maxima.data);
    xdi_call_memory_done(ctx, values);
    return result;
}
