/* A vocabulary split over ranks. */

#include "loss/internal.h"

#include <stdio.h>

struct xd_vocab {
    xd_ctx *ctx;
    xd_comm *tp;
    int rank, ranks;
    const xd_device_ops *memory; /* whose allocator device_offsets come from */
    int64_t *offsets;            /* [ranks + 1] */
    int64_t *device_offsets;
};

static xd_result xdi_vocab_validate(xd_ctx *ctx, const int64_t *all, int ranks, int64_t size) {
    int64_t at = 0;
    for (int i = 0; i < ranks; i++) {
        const int64_t begin = all[3 * i], end = all[3 * i + 1], total = all[3 * i + 2];
        XD_REQUIRE(ctx, total == size, XD_ERROR_MISMATCH,
                   "vocabulary has %lld columns here but %lld on rank %d of the group", (long long)size,
                   (long long)total, i);
        XD_REQUIRE(ctx, begin <= end, XD_ERROR_SHAPE, "vocabulary shard %d begins at %lld after its end %lld",
                   i, (long long)begin, (long long)end);
        XD_REQUIRE(ctx, begin <= at, XD_ERROR_SHAPE,
                   "vocabulary columns %lld to %lld are in no shard (gap before shard %d)", (long long)at,
                   (long long)begin, i);
        XD_REQUIRE(ctx, begin == at, XD_ERROR_SHAPE,
                   "vocabulary shard %d begins at column %lld but the shards before it end at %lld (overlap)",
                   i, (long long)begin, (long long)at);
        at = end;
    }
    XD_REQUIRE(ctx, at == size, XD_ERROR_SHAPE, "vocabulary shards end at column %lld but there are %lld",
               (long long)at, (long long)size);
    XD_REQUIRE(ctx, size > 0, XD_ERROR_SHAPE, "vocabulary has %lld columns; at least 1 is needed",
               (long long)size);
    return XD_OK;
}

/* Words of the block at device_offsets: during the agreement three from this rank and three from each rank, later the
 * offsets. */
static size_t xdi_vocab_words(int ranks) {
    return 3 * ((size_t)ranks + 1);
}

static xd_vocab *xdi_vocab_new(xd_ctx *ctx, xd_comm *tp) {
    xd_vocab *vocab = XDI_OBJECT(xd_vocab, ctx, sizeof *vocab);
    if (!vocab) return NULL;
    vocab->ctx = ctx;
    vocab->tp = tp && xd_comm_size(tp) > 1 ? tp : NULL;
    vocab->rank = vocab->tp ? xd_comm_rank(tp) : 0;
    vocab->ranks = vocab->tp ? xd_comm_size(tp) : 1;
    vocab->memory = &xd_ctx_kernels(ctx)->memory;
    vocab->offsets = (int64_t *)xd_allocate(ctx, (size_t)(vocab->ranks + 1) * sizeof *vocab->offsets);
    vocab->device_offsets =
        (int64_t *)vocab->memory->allocate(ctx, xdi_vocab_words(vocab->ranks) * sizeof *vocab->offsets);
    if (vocab->offsets && vocab->device_offsets) return vocab;
    xd_vocab_destroy(vocab);
    return NULL;
}

/* Gathers {begin, end, size} of all ranks through device memory, which the group's transport works on. */
static xd_result xdi_vocab_exchange(xd_vocab *vocab, const int64_t mine[3], int64_t *all) {
    const xd_launch launch = xd_ctx_launch(vocab->ctx);
    int64_t *send = vocab->device_offsets, *recv = send + 3;
    const void *result;
    XD_TRY(vocab->memory->copy(&launch, send, mine, 3 * sizeof *mine, XD_COPY_TO_DEVICE));
    XD_TRY(xdi_vocab_gather(vocab, send, recv, 3, XD_DTYPE_I64, &result));
    return xd_read(vocab->ctx, all, result, (size_t)vocab->ranks * 3 * sizeof *all);
}

/* Checks the values of all ranks; every rank has the same list and returns the same error. */
static xd_result xdi_vocab_fill(xd_vocab *vocab, const int64_t mine[3], int64_t *all) {
    const size_t bytes = (size_t)(vocab->ranks + 1) * sizeof *vocab->offsets;
    const xd_launch launch = xd_ctx_launch(vocab->ctx);
    XD_TRY(xdi_vocab_exchange(vocab, mine, all));
    XD_TRY(xdi_vocab_validate(vocab->ctx, all, vocab->ranks, mine[2]));
    for (int i = 0; i < vocab->ranks; i++) vocab->offsets[i] = all[3 * i];
    vocab->offsets[vocab->ranks] = mine[2];
    XD_TRY(vocab->memory->copy(&launch, vocab->device_offsets, vocab->offsets, bytes, XD_COPY_TO_DEVICE));
    return vocab->memory->synchronize(&launch);
}

/* Columns of this rank in an even split. */
static xd_interval xdi_vocab_even(const xd_comm *tp, int64_t size) {
    const int64_t ranks = tp ? xd_comm_size(tp) : 1, rank = tp ? xd_comm_rank(tp) : 0;
    const int64_t piece = size > 0 ? (size - 1) / ranks + 1 : 0;
    const int64_t begin = piece > 0 && rank < (size - 1) / piece + 1 ? rank * piece : size;
    const xd_interval columns = { begin, size - begin > piece ? begin + piece : size };
    return columns;
}

XD_API xd_result xd_vocab_create(xd_ctx *ctx, const xd_vocab_desc *desc, xd_vocab **out) {
    XDI_GIVEN(ctx, ctx, desc);
    xd_comm *tp = desc->tp;
    XDI_GIVEN_TO_ALL(ctx, tp, ctx, out);
    const int64_t size = desc->size;
    const xd_interval columns = desc->columns ? *desc->columns : xdi_vocab_even(tp, size);
    const int64_t mine[3] = { columns.begin, columns.end, size };
    xd_vocab *vocab = xdi_vocab_new(ctx, tp);
    int64_t *all = vocab ? (int64_t *)xd_allocate(ctx, (size_t)vocab->ranks * sizeof mine) : NULL;
    xd_result result = all ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a vocabulary");
    result = xdi_vocab_agree(tp, NULL, result);
    if (result == XD_OK) result = xdi_vocab_fill(vocab, mine, all);
    xd_release(ctx, all);
    if (result != XD_OK) {
        xd_vocab_destroy(vocab);
        return result;
    }
    *out = vocab;
    return XD_OK;
}

XD_API void xd_vocab_destroy(xd_vocab *vocab) {
    if (!vocab || XDI_IS_GONE(xd_vocab, vocab)) return;
    vocab->memory->release(vocab->ctx, vocab->device_offsets);
    xd_release(vocab->ctx, vocab->offsets);
    xd_release(vocab->ctx, vocab);
}

XD_API xd_vocab_info xd_vocab_describe(const xd_vocab *vocab) {
    XD_ASSERT(vocab);
    xd_vocab_info info;
    info.tp = vocab->tp;
    info.rank = vocab->rank;
    info.ranks = vocab->ranks;
    info.begin = vocab->offsets[vocab->rank];
    info.end = vocab->offsets[vocab->rank + 1];
    info.size = vocab->offsets[vocab->ranks];
    info.offsets = vocab->offsets;
    info.device_offsets = vocab->device_offsets;
    return info;
}

XD_PRIVATE xd_vocab_shard xdi_vocab_shard(const xd_vocab *vocab) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const xd_vocab_shard shard = {
        info.begin, info.end, info.size, info.rank, info.ranks, info.device_offsets
    };
    return shard;
}

/* What labels may be: the commonest slip is an array of 32 bits that is read as one of 64. */
static const char *xdi_status_bound(const xd_status *status, int64_t vocabulary, char *text, size_t size) {
    char below[40] = "below the vocabulary's size";
    text[0] = '\0';
    if (vocabulary > 0) snprintf(below, sizeof below, "0 to %lld", (long long)vocabulary - 1);
    if (status->label_out_of_range > 0)
        snprintf(text, size,
                 "; labels are %s, or ignore_index; labels of 32 bits are xd_ids_of(labels, XD_DTYPE_I32)",
                 below);
    return text;
}

XD_PRIVATE xd_result xdi_status_check(xd_ctx *ctx, const xd_status *status, int64_t vocabulary) {
    char bound[160];
    XD_REQUIRE(ctx, status->nothing_counted == 0, XD_ERROR_DATA, "no counted position in %lld losses",
               (long long)status->nothing_counted);
    const bool clean = status->label_out_of_range == 0 && status->not_finite == 0 && status->overflow == 0;
    XD_REQUIRE(ctx, status->large_norms == 0, XD_ERROR_DATA, "%lld norms of gradients above their limit",
               (long long)status->large_norms);
    XD_REQUIRE(
        ctx, clean, XD_ERROR_DATA,
        "%lld labels out of range, %lld rows not finite, %lld sums ran over; first: row %lld, value %.10g%s",
        (long long)status->label_out_of_range, (long long)status->not_finite, (long long)status->overflow,
        (long long)status->first_row, status->first_value,
        xdi_status_bound(status, vocabulary, bound, sizeof bound));
    return XD_OK;
}

XD_API xd_result xd_status_check(xd_ctx *ctx, const xd_status *status) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, status);
    return xdi_status_check(ctx, status, 0);
}

XD_PRIVATE xd_result xdi_rows_check(xd_ctx *ctx, const char *name, const xd_rows *rows) {
    XD_REQUIRE(ctx, rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
               "%s is %s; F32 or BF16 is needed", name, xd_dtype_name(rows->dtype));
    XD_REQUIRE(ctx, rows->rows >= 0 && rows->cols >= 0, XD_ERROR_SHAPE, "%s has %lld rows of %lld columns",
               name, (long long)rows->rows, (long long)rows->cols);
    XD_REQUIRE(ctx, rows->stride == 0 || rows->stride >= rows->cols, XD_ERROR_SHAPE,
               "%s has stride %lld, less than its %lld columns", name, (long long)rows->stride,
               (long long)rows->cols);
    XD_REQUIRE(ctx, rows->data || rows->rows == 0 || rows->cols == 0, XD_ERROR_ARGUMENT,
               "%s has no data of %lld rows of %lld columns", name, (long long)rows->rows,
               (long long)rows->cols);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocab_check_rows(xd_ctx *ctx, const xd_vocab *vocab, const char *name,
                                          const xd_rows *rows, int64_t count) {
    const int64_t columns = vocab->offsets[vocab->rank + 1] - vocab->offsets[vocab->rank];
    XD_REQUIRE(ctx, count < 0 || rows->rows == count, XD_ERROR_SHAPE,
               "%s has %lld rows but %lld are expected", name, (long long)rows->rows, (long long)count);
    XD_REQUIRE(ctx, rows->cols >= columns, XD_ERROR_SHAPE, "%s has %lld columns but the shard has %lld", name,
               (long long)rows->cols, (long long)columns);
    return xdi_rows_check(ctx, name, rows);
}

XD_PRIVATE xd_result xdi_vocab_check_ids(xd_ctx *ctx, const char *name, const xd_ids *ids) {
    const bool fits = ids->dtype == XD_DTYPE_NONE || ids->dtype == XD_DTYPE_I32 || ids->dtype == XD_DTYPE_I64;
    XD_REQUIRE(ctx, !ids->data || fits, XD_ERROR_DTYPE, "%s are %s: I32 or I64 is needed", name,
               xd_dtype_name(ids->dtype));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocab_check_gradient(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *student,
                                              const xd_rows *gradient) {
    XD_TRY(xdi_vocab_check_rows(ctx, vocab, "gradient", gradient, student->rows));
    const int64_t stride = student->stride ? student->stride : student->cols;
    const int64_t gradient_stride = gradient->stride ? gradient->stride : gradient->cols;
    const bool same = gradient->dtype == student->dtype && gradient_stride == stride;
    XD_REQUIRE(ctx, gradient->data != student->data || same, XD_ERROR_SHAPE,
               "a gradient over the student needs its dtype and stride: %s and %lld against %s and %lld",
               xd_dtype_name(gradient->dtype), (long long)gradient_stride, xd_dtype_name(student->dtype),
               (long long)stride);
    return XD_OK;
}

/* Counts of an exchange follow from what its call was given, which is what the caller knows. */
static xd_result xdi_vocab_explain(xd_ctx *ctx) {
    const xd_error told = *xd_last_error(ctx);
    return XD_FAIL_CULPRIT(
        ctx, XD_ERROR_MISMATCH, told.culprit,
        "%.300s; ranks that share a vocabulary pass the same number of rows and the same settings",
        told.message);
}

XD_PRIVATE xd_result xdi_vocab_gather(const xd_vocab *vocab, const void *mine, void *all, int64_t count,
                                      xd_dtype dtype, const void **result) {
    *result = vocab->tp ? all : mine;
    if (!vocab->tp) return XD_OK;
    const xd_result told = xdi_comm_all_gather_equal(vocab->tp, mine, all, count, dtype);
    return told == XD_ERROR_MISMATCH ? xdi_vocab_explain(xd_comm_ctx(vocab->tp)) : told;
}

XD_PRIVATE xd_result xdi_vocab_agree(xd_comm *tp, xd_comm *comm, xd_result mine) {
    if (tp && xd_comm_size(tp) > 1) mine = xdi_comm_agree_or_record(tp, mine, 0);
    if (comm && xd_comm_size(comm) > 1) mine = xdi_comm_agree_or_record(comm, mine, 0);
    return mine;
}

XD_PRIVATE xd_result xdi_vocab_agree_rows(xd_comm *comm, xd_result mine, int64_t rows) {
    return comm && xd_comm_size(comm) > 1 ? xdi_comm_agree_or_record(comm, mine, rows) : mine;
}
