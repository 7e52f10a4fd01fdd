#include <string.h>

/* This shard's part of the chosen columns of one sequence as f32 bits, zero where another shard has the column:
 * added as integers over the shards they are the values themselves. */
static void xdi_columns_pick(const xd_vocab_info *info, const xd_rows *logits, int64_t first, int64_t held,
                             const int64_t *ids, int64_t k, int32_t *bits) {
    for (int64_t i = 0; i < held; i++)
        for (int64_t j = 0; j < k; j++) {
            const bool mine = ids[j] >= info->begin && ids[j] < info->end;
            const float value = mine ? (float)xdi_loss_load(logits, first + i, ids[j] - info->begin) : 0.0f;
            memcpy(&bits[i * k + j], &value, sizeof value);
        }
}

static void xdi_columns_store(const int32_t *bits, int64_t first, int64_t held, int64_t k,
                              const xd_rows *values) {
    for (int64_t i = 0; i < held; i++)
        for (int64_t j = 0; j < k; j++) {
            float value;
            memcpy(&value, &bits[i * k + j], sizeof value);
            xdi_loss_store(values, first + i, j, (double)value);
        }
}

static xd_result xdi_columns_check(xd_ctx *ctx, const xd_rows *logits, int64_t sequences, int64_t k,
                                   const xd_rows *values) {
    XDI_REQUIRE(ctx, xd_ctx_kernels(ctx).device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
                "a teacher's columns are chosen on the CPU only");
    XDI_REQUIRE(ctx, sequences > 0 && logits->rows % sequences == 0, XD_ERROR_SHAPE,
                "%lld rows for %lld sequences", (long long)logits->rows, (long long)sequences);
    XDI_REQUIRE(ctx, values->dtype == XD_DTYPE_F32 || values->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
                "values are %s; F32 or BF16 is needed", xd_dtype_name(values->dtype));
    XDI_REQUIRE(ctx,
                values->rows == logits->rows && values->cols == k &&
                    (values->stride == 0 || values->stride >= k) && (values->data || values->rows == 0),
                XD_ERROR_SHAPE, "values are %lld by %lld, but there are %lld rows and %lld columns",
                (long long)values->rows, (long long)values->cols, (long long)logits->rows, (long long)k);
    return XD_OK;
}

static xd_result xdi_columns_sequence(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                      int64_t first, int64_t held, const uint8_t *mask, xd_comm *comm,
                                      int64_t k, int64_t *ids, int32_t *bits, const xd_rows *values) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const size_t skip = (size_t)(first * (logits->stride ? logits->stride : logits->cols));
    xd_rows rows = *logits;
    rows.rows = held;
    if (rows.data) rows.data = (char *)rows.data + skip * xd_dtype_size(rows.dtype);
    XDI_TRY(xd_select_columns(ctx, vocab, rows, mask ? mask + first : NULL, comm, k, ids, NULL));
    xdi_columns_pick(&info, logits, first, held, ids, k, bits);
    if (info.ranks > 1) XDI_TRY(xd_all_reduce(info.tp, bits, bits, held * k, XD_DTYPE_I32, XD_SUM));
    xdi_columns_store(bits, first, held, k, values);
    return XD_OK;
}

XD_API xd_result xd_teacher_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t sequences,
                                    const uint8_t *mask, xd_comm *comm, int64_t k, int64_t *ids,
                                    xd_rows values) {
    xd_comm *tp = xd_vocab_describe(vocab).tp;
    xd_result result = xdi_columns_check(ctx, &logits, sequences, k, &values);
    int32_t *bits = NULL;
    const int64_t held = result == XD_OK ? logits.rows / sequences : 0;
    if (result == XD_OK) {
        bits = (int32_t *)xd_allocate(ctx, (size_t)(held * k + 1) * sizeof *bits);
        if (!bits) result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld values", (long long)(held * k));
    }
    result = xdi_vocab_agree(tp, comm, result);
    for (int64_t b = 0; b < sequences && result == XD_OK; b++)
        result = xdi_columns_sequence(ctx, vocab, &logits, b * held, held, mask, comm, k, ids + b * k, bits,
                                      &values);
    xd_release(ctx, bits);
    return result;
}
