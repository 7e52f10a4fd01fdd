/* The columns of a teacher's logits that are selected for a sample. */

#include "loss/internal.h"
#include "loss/topk.h"

#include <string.h>

enum { XDI_ROWS_CASTS = 32 /* rows of a call */ };

/* Rows without gaps on both sides are one row. */
XD_PRIVATE xd_result xdi_rows_copy(xd_ctx *ctx, const xd_kernels *kernels, const xd_rows *from,
                                   const xd_rows *to) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const bool dense = from->stride == to->cols && to->stride == to->cols;
    const int64_t rows = dense ? 1 : to->rows, columns = dense ? to->rows * to->cols : to->cols;
    const size_t from_step = (size_t)from->stride * xd_dtype_size(from->dtype);
    const size_t to_step = (size_t)to->stride * xd_dtype_size(to->dtype);
    xd_cast_array casts[XDI_ROWS_CASTS];
    if (rows * columns == 0) return XD_OK;
    if (from->dtype == to->dtype) {
        xd_copy copy;
        memset(&copy, 0, sizeof copy);
        copy.ndim = dense ? 1 : 2;
        copy.extent[0] = rows;
        copy.src_stride[0] = from->stride;
        copy.dst_stride[0] = to->stride;
        copy.extent[copy.ndim - 1] = columns;
        copy.src_stride[copy.ndim - 1] = copy.dst_stride[copy.ndim - 1] = 1;
        return kernels->copies(&launch, &copy, 1, from->data, to->data, xd_dtype_size(to->dtype));
    }
    for (int64_t r = 0; r < rows; r++) {
        xd_cast_array *cast = &casts[r % XDI_ROWS_CASTS];
        cast->target = (char *)to->data + (size_t)r * to_step;
        cast->source = (const char *)from->data + (size_t)r * from_step;
        cast->count = columns;
        cast->target_dtype = to->dtype;
        cast->source_dtype = from->dtype;
        if (r + 1 < rows && r % XDI_ROWS_CASTS + 1 < XDI_ROWS_CASTS) continue;
        XD_TRY(kernels->optimizer.cast(&launch, casts, r % XDI_ROWS_CASTS + 1));
    }
    return XD_OK;
}

/* Memory of one call, on the device. */
typedef struct xdi_columns {
    const xd_kernels *kernels;
    const xd_vocab_topk_desc *d;
    int64_t held;    /* rows of a sequence */
    int64_t *ids;    /* [sequences, k] */
    double *picked;  /* [held, k] */
    uint8_t *finite; /* [held] */
} xdi_columns;

static xd_result xdi_columns_check(xd_ctx *ctx, const xd_vocab_topk_desc *d, const xd_rows *values) {
    const int64_t rows = d->logits.rows;
    XD_REQUIRE(ctx, values->dtype == XD_DTYPE_F32 || values->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
               "values are %s; F32 or BF16 is needed", xd_dtype_name(values->dtype));
    XD_REQUIRE(ctx, values->rows == rows && values->cols == d->k, XD_ERROR_SHAPE,
               "values are %lld by %lld, but there are %lld rows and %lld columns", (long long)values->rows,
               (long long)values->cols, (long long)rows, (long long)d->k);
    XD_REQUIRE(ctx, values->stride == 0 || values->stride >= values->cols, XD_ERROR_SHAPE,
               "values have stride %lld, less than their %lld columns", (long long)values->stride,
               (long long)values->cols);
    XD_REQUIRE(ctx, values->data || rows == 0, XD_ERROR_SHAPE, "%lld rows of values have no data",
               (long long)rows);
    return XD_OK;
}

/* The chosen columns of this shard, zeros where another shard has the column: their bits, added as integers over
 * the shards, are the values themselves. */
static xd_result xdi_columns_pick(xd_ctx *ctx, const xdi_columns *c, int64_t b) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_vocab_info info = xd_vocab_describe(c->d->vocab);
    xd_softmax_args a;
    memset(&a, 0, sizeof a);
    a.logits = xdi_topk_sequence(&c->d->logits, b, c->held);
    a.vocab = xdi_vocab_shard(c->d->vocab);
    a.ids = xd_ids_of(c->ids + b * c->d->k, XD_DTYPE_I64);
    a.ids_count = c->d->k;
    a.parts = c->picked;
    a.finite = c->finite;
    XD_TRY(xdi_topk_voters(ctx, c->d, b, NULL, c->finite));
    XD_TRY(c->kernels->softmax.pick(&launch, &a));
    if (info.ranks == 1) return XD_OK;
    return xd_all_reduce(info.tp, c->picked, c->picked, c->held * c->d->k, XD_DTYPE_I64, XD_SUM);
}

static xd_result xdi_columns_sequence(xd_ctx *ctx, const xdi_columns *c, int64_t b, const xd_rows *values) {
    const xd_rows from = xd_rows_of(c->picked, XD_DTYPE_F64, c->held, c->d->k);
    const xd_rows to = xdi_topk_sequence(values, b, c->held);
    XD_TRY(xdi_columns_pick(ctx, c, b));
    return xdi_rows_copy(ctx, c->kernels, &from, &to);
}

static xd_result xdi_columns_prepare(xd_ctx *ctx, const xd_rows *values, xdi_columns *c) {
    const xd_vocab_topk_desc *d = c->d;
    const int64_t sequences = xdi_topk_sequences(d);
    XD_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the columns have no vocabulary");
    XD_REQUIRE(ctx, sequences > 0 && d->logits.rows % sequences == 0, XD_ERROR_SHAPE,
               "%lld rows for %lld sequences", (long long)d->logits.rows, (long long)sequences);
    XD_TRY(xdi_columns_check(ctx, d, values));
    c->held = d->logits.rows / sequences;
    c->picked = (double *)xdi_call_array(ctx, c->held, d->k, sizeof *c->picked);
    c->ids = (int64_t *)xdi_call_array(ctx, sequences, d->k, sizeof *c->ids);
    c->finite = (uint8_t *)xdi_call_array(ctx, c->held, 1, sizeof *c->finite);
    XD_REQUIRE(ctx, c->picked && c->ids && c->finite, XD_ERROR_MEMORY, "no room for %lld values of %lld rows",
               (long long)d->k, (long long)c->held);
    return XD_OK;
}

/* Ids on the host, with their values. */
static xd_result xdi_columns_gather(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids) {
    xdi_columns c;
    memset(&c, 0, sizeof c);
    c.kernels = xd_ctx_kernels(ctx);
    c.d = desc;
    xd_result result = XDI_CHECK_GIVEN(ctx, ids);
    if (result == XD_OK) result = xdi_columns_prepare(ctx, &desc->values, &c);
    result = xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL, desc->comm, result);
    if (result == XD_OK) result = xdi_topk_choose(ctx, desc, c.ids);
    for (int64_t b = 0; result == XD_OK && b < xdi_topk_sequences(desc); b++)
        result = xdi_columns_sequence(ctx, &c, b, &desc->values);
    if (result == XD_OK)
        result = xd_read(ctx, ids, c.ids, (size_t)(xdi_topk_sequences(desc) * desc->k) * sizeof *ids);
    xdi_call_memory_done(ctx, c.finite);
    xdi_call_memory_done(ctx, c.ids);
    xdi_call_memory_done(ctx, c.picked);
    return result;
}

XD_API xd_result xd_vocab_topk_columns(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids) {
    XDI_GIVEN(ctx, ctx, desc);
    const bool values = desc->values.data || desc->values.rows != 0 || desc->values.dtype != XD_DTYPE_NONE;
    return values ? xdi_columns_gather(ctx, desc, ids) : xdi_topk_choose(ctx, desc, ids);
}
