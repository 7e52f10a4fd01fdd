/* The columns of a teacher's logits that a sample keeps. */

#include "loss/topk.h"
#include "teacher/internal.h"
#include "teacher/route.h"

#include <string.h>

/* What one call holds, in memory of the device. */
typedef struct xdi_columns {
    const xd_kernels *kernels;
    const xd_vocab *vocab;
    const uint8_t *mask;
    xd_comm *comm;
    int64_t held, k;
    int64_t *ids;   /* [sequences, k] */
    double *picked; /* [held, k] */
} xdi_columns;

static xd_result xdi_columns_check(xd_ctx *ctx, const xd_rows *logits, int64_t sequences, int64_t k,
                                   const xd_rows *values) {
    XD_REQUIRE(ctx, sequences > 0 && logits->rows % sequences == 0, XD_ERROR_SHAPE,
               "%lld rows for %lld sequences", (long long)logits->rows, (long long)sequences);
    XD_REQUIRE(ctx, values->dtype == XD_DTYPE_F32 || values->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
               "values are %s; F32 or BF16 is needed", xd_dtype_name(values->dtype));
    XD_REQUIRE(ctx,
               values->rows == logits->rows && values->cols == k &&
                   (values->stride == 0 || values->stride >= k) && (values->data || values->rows == 0),
               XD_ERROR_SHAPE, "values are %lld by %lld, but there are %lld rows and %lld columns",
               (long long)values->rows, (long long)values->cols, (long long)logits->rows, (long long)k);
    return XD_OK;
}

/* Rows of sequence b. */
static xd_rows xdi_columns_rows(const xdi_columns *c, const xd_rows *all, int64_t b) {
    xd_rows rows = *all;
    rows.rows = c->held;
    rows.stride = all->stride ? all->stride : all->cols;
    if (rows.data)
        rows.data = (char *)rows.data + (size_t)(b * c->held * rows.stride) * xd_dtype_size(rows.dtype);
    return rows;
}

/* The chosen columns of this shard, zeros where another shard has the column: their bits, added as integers over
 * the shards, are the values themselves. */
static xd_result xdi_columns_pick(xd_ctx *ctx, const xdi_columns *c, const xd_rows *logits,
                                  const int64_t *ids) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_vocab_info info = xd_vocab_describe(c->vocab);
    xd_softmax_args a;
    memset(&a, 0, sizeof a);
    a.logits = *logits;
    a.begin = info.begin;
    a.end = info.end;
    a.size = info.size;
    a.ids = xd_ids_of(ids, XD_DTYPE_I64);
    a.ids_count = c->k;
    a.parts = c->picked;
    XD_TRY(c->kernels->softmax.pick(&launch, &a));
    if (info.ranks == 1) return XD_OK;
    return xd_all_reduce(info.tp, c->picked, c->picked, c->held * c->k, XD_DTYPE_I64, XD_SUM);
}

static xd_result xdi_columns_sequence(xd_ctx *ctx, const xdi_columns *c, const xd_rows *logits, int64_t b,
                                      const xd_rows *values) {
    const xd_rows rows = xdi_columns_rows(c, logits, b), to = xdi_columns_rows(c, values, b);
    const uint8_t *mask = c->mask ? c->mask + b * c->held : NULL;
    int64_t *ids = c->ids + b * c->k;
    xd_rows from;
    XD_TRY(xd_vocab_topk_columns(ctx, c->vocab, rows, mask, c->comm, c->k, ids, NULL));
    XD_TRY(xdi_columns_pick(ctx, c, &rows, ids));
    from.data = c->picked;
    from.dtype = XD_DTYPE_F64;
    from.rows = c->held;
    from.cols = from.stride = c->k;
    return xdi_route_copy(ctx, c->kernels, &from, &to);
}

XD_API xd_result xd_vocab_topk_gather(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t sequences,
                                      const uint8_t *mask, xd_comm *comm, int64_t k, int64_t *ids,
                                      xd_rows values) {
    xd_comm *tp = xd_vocab_describe(vocab).tp;
    xdi_columns c;
    xd_result result = xdi_columns_check(ctx, &logits, sequences, k, &values);
    memset(&c, 0, sizeof c);
    c.kernels = xd_ctx_kernels(ctx);
    c.vocab = vocab;
    c.mask = mask;
    c.comm = comm;
    c.k = k;
    if (result == XD_OK) {
        c.held = logits.rows / sequences;
        c.picked = (double *)xdi_call_memory(ctx, ((size_t)(c.held * k) + 1) * sizeof *c.picked);
        c.ids = (int64_t *)xdi_call_memory(ctx, ((size_t)(sequences * k) + 1) * sizeof *c.ids);
        if (!c.picked || !c.ids)
            result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld values", (long long)(c.held * k));
    }
    result = xdi_vocab_agree(tp, comm, result);
    for (int64_t b = 0; b < sequences && result == XD_OK; b++)
        result = xdi_columns_sequence(ctx, &c, &logits, b, &values);
    if (result == XD_OK) result = xd_read(ctx, ids, c.ids, (size_t)(sequences * k) * sizeof *ids);
    xdi_call_memory_done(ctx, c.ids);
    xdi_call_memory_done(ctx, c.picked);
    return result;
}
