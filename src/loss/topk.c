/* Selections over a vocabulary that is split over ranks. */

#include "loss/internal.h"
#include "loss/topk.h"

#include <string.h>

static xd_result xdi_topk_prepare(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                  xdi_topk_candidates *c) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    XD_TRY(xdi_vocab_check_rows(ctx, vocab, "logits", logits, -1));
    XD_REQUIRE(ctx, k >= 1 && k <= info.size, XD_ERROR_ARGUMENT,
               "k is %lld but the vocabulary has %lld columns", (long long)k, (long long)info.size);
    if (info.ranks == 1) return XD_OK; /* this rank's candidates are the result */
    const size_t pair = 2 * sizeof(int64_t);
    c->mine = (int64_t *)xdi_call_array(ctx, logits->rows, k, pair);
    c->all = (int64_t *)xdi_call_array(ctx, logits->rows, k, pair * (size_t)info.ranks);
    XD_REQUIRE(ctx, c->mine && c->all, XD_ERROR_MEMORY, "no room for %lld candidates of %lld rows",
               (long long)k, (long long)logits->rows);
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
    a.narrow = c->narrow;
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

/* `mine` is this rank's result of the local part. */
static xd_result xdi_topk_call(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                               xd_result mine, double *values, float *narrow, int64_t *ids) {
    xdi_topk_candidates c = { NULL, NULL, narrow };
    if (mine == XD_OK) mine = xdi_topk_prepare(ctx, vocab, logits, k, &c);
    mine = xdi_vocab_agree(xd_vocab_describe(vocab).tp, NULL, mine);
    if (mine == XD_OK) mine = xdi_topk_select(ctx, vocab, logits, k, &c, values, ids);
    xdi_call_memory_done(ctx, c.mine);
    xdi_call_memory_done(ctx, c.all);
    return mine;
}

XD_PRIVATE xd_result xdi_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                    double *values, int64_t *ids) {
    return xdi_topk_call(ctx, vocab, logits, k, XD_OK, values, NULL, ids);
}

XD_API xd_result xd_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t k, float *values,
                               int64_t *ids) {
    XDI_LIVE(xd_vocab, vocab);
    XDI_GIVEN(ctx, ctx, vocab);
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t most = k < info.size ? k : info.size;
    const int64_t rows = logits.rows > 0 && most > 0 ? logits.rows : 0; /* others are refused below */
    const bool narrow = info.ranks == 1 && xd_ctx_kernels(ctx)->topk.select_narrow;
    double *wide = narrow ? NULL : (double *)xdi_call_array(ctx, rows, rows > 0 ? most : 0, sizeof *wide);
    xd_result result = wide || narrow ? XD_OK
                                      : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld values of %lld rows",
                                                (long long)most, (long long)rows);
    if (result == XD_OK && rows > 0) result = XDI_CHECK_GIVEN(ctx, values, ids);
    result = xdi_topk_call(ctx, vocab, &logits, k, result, wide, narrow ? values : NULL, ids);
    if (result == XD_OK && wide) result = xd_cast(ctx, values, XD_DTYPE_F32, wide, XD_DTYPE_F64, rows * k);
    xdi_call_memory_done(ctx, wide);
    return result;
}

XD_PRIVATE int64_t xdi_topk_sequences(const xd_vocab_topk_desc *desc) {
    return desc->sequences ? desc->sequences : 1;
}

XD_PRIVATE xd_rows xdi_topk_sequence(const xd_rows *all, int64_t b, int64_t held) {
    xd_rows rows = *all;
    rows.rows = held;
    rows.stride = all->stride ? all->stride : all->cols;
    if (rows.data)
        rows.data = (char *)rows.data + (size_t)(b * held * rows.stride) * xd_dtype_size(rows.dtype);
    return rows;
}

/* Memory for the call. */
typedef struct xdi_topk_columns {
    xd_rows maxima;  /* [1, V/tp] */
    double *values;  /* [k] */
    uint8_t *voters; /* [T / B] */
} xdi_topk_columns;

static xd_result xdi_topk_columns_prepare(xd_ctx *ctx, const xd_vocab_topk_desc *d, xdi_topk_columns *c) {
    XD_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the columns have no vocabulary");
    const xd_vocab_info info = xd_vocab_describe(d->vocab);
    const int64_t sequences = xdi_topk_sequences(d), columns = info.end - info.begin;
    XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, "logits", &d->logits, -1));
    XD_REQUIRE(ctx, sequences > 0 && d->logits.rows % sequences == 0, XD_ERROR_SHAPE,
               "%lld rows for %lld sequences", (long long)d->logits.rows, (long long)sequences);
    XD_REQUIRE(ctx, d->k >= 1 && d->k <= info.size, XD_ERROR_ARGUMENT,
               "k is %lld but the vocabulary has %lld columns", (long long)d->k, (long long)info.size);
    c->values = (double *)xdi_call_memory(ctx, (size_t)d->k * sizeof *c->values);
    c->maxima =
        xd_rows_of(xdi_call_memory(ctx, (size_t)columns * sizeof(float) + 1), XD_DTYPE_F32, 1, columns);
    c->voters = (uint8_t *)xdi_call_memory(ctx, (size_t)(d->logits.rows / sequences) + 1);
    XD_REQUIRE(ctx, c->maxima.data && c->values && c->voters, XD_ERROR_MEMORY, "no room for %lld columns",
               (long long)columns);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_topk_voters(xd_ctx *ctx, const xd_vocab_topk_desc *d, int64_t b, const uint8_t *mask,
                                     uint8_t *voters) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_vocab_info info = xd_vocab_describe(d->vocab);
    const int64_t held = d->logits.rows / xdi_topk_sequences(d);
    const xd_rows logits = xdi_topk_sequence(&d->logits, b, held);
    XD_TRY(xd_ctx_kernels(ctx)->rows.voters(&launch, &logits, mask ? mask + b * held : NULL,
                                            info.end - info.begin, voters));
    if (info.ranks == 1 || held == 0) return XD_OK;
    return xd_all_reduce(info.tp, voters, voters, held, XD_DTYPE_U8, XD_MIN);
}

/* The largest logit of each of this shard's columns, over comm, is a row to select from. */
static xd_result xdi_topk_columns_of(xd_ctx *ctx, const xd_vocab_topk_desc *d, int64_t b,
                                     const xdi_topk_columns *c, int64_t *ids) {
    const xd_row_kernels *kernels = &xd_ctx_kernels(ctx)->rows;
    const xd_launch launch = xd_ctx_launch(ctx);
    const int64_t held = d->logits.rows / xdi_topk_sequences(d), columns = c->maxima.cols;
    const xd_rows logits = xdi_topk_sequence(&d->logits, b, held);
    float *row = (float *)c->maxima.data;
    if (xd_vocab_describe(d->vocab).ranks == 1) {
        const uint8_t *mask = d->mask ? d->mask + b * held : NULL;
        XD_TRY(xdi_rows_elect(&launch, &logits, mask, columns, c->voters, row));
    } else { /* another shard's number may take a row's vote */
        XD_TRY(xdi_topk_voters(ctx, d, b, d->mask, c->voters));
        XD_TRY(kernels->column_maxima(&launch, &logits, c->voters, columns, row));
    }
    if (d->comm && xd_comm_size(d->comm) > 1)
        XD_TRY(xd_all_reduce(d->comm, row, row, columns, XD_DTYPE_F32, XD_MAX));
    XD_TRY(xdi_vocab_topk(ctx, d->vocab, &c->maxima, d->k, c->values, ids));
    return kernels->sort_ids(&launch, ids, d->k);
}

XD_PRIVATE xd_result xdi_topk_choose(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids) {
    float *importance = desc->importance;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    xdi_topk_columns c;
    memset(&c, 0, sizeof c);
    xd_result result = XDI_CHECK_GIVEN(ctx, ids);
    if (result == XD_OK) result = xdi_topk_columns_prepare(ctx, desc, &c);
    result = xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL, desc->comm, result);
    for (int64_t b = 0; b < xdi_topk_sequences(desc) && result == XD_OK; b++) {
        result = xdi_topk_columns_of(ctx, desc, b, &c, ids + b * desc->k);
        if (result == XD_OK && importance)
            result = memory->copy(&launch, importance + b * c.maxima.cols, c.maxima.data,
                                  (size_t)c.maxima.cols * sizeof(float), XD_COPY_ON_DEVICE);
    }
    xdi_call_memory_done(ctx, c.voters);
    xdi_call_memory_done(ctx, c.maxima.data);
    xdi_call_memory_done(ctx, c.values);
    return result;
}
