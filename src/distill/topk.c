#include <math.h>
#include <string.h>

/* This shard's candidates, and all shards': per row k values, then k ids as doubles (exact below 2^53). */
typedef struct xdi_topk_candidates {
    double *values, *packed, *all;
    int64_t *ids;
} xdi_topk_candidates;

static void xdi_topk_release(xd_ctx *ctx, xdi_topk_candidates *c) {
    xd_release(ctx, c->values);
    xd_release(ctx, c->packed);
    xd_release(ctx, c->all);
    xd_release(ctx, c->ids);
}

static xd_result xdi_topk_prepare(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                  xdi_topk_candidates *c) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    XDI_TRY(xdi_vocab_check_rows(ctx, vocab, "logits", logits, -1));
    XDI_REQUIRE(ctx, k >= 1 && k <= info.size, XD_ERROR_ARGUMENT,
                "k is %lld but the vocabulary has %lld columns", (long long)k, (long long)info.size);
    const size_t entries = (size_t)(logits->rows * k) + 1; /* never an empty block */
    c->values = (double *)xd_allocate(ctx, entries * sizeof(double));
    c->packed = (double *)xd_allocate(ctx, 2 * entries * sizeof(double));
    c->all = (double *)xd_allocate(ctx, 2 * entries * (size_t)info.ranks * sizeof(double));
    c->ids = (int64_t *)xd_allocate(ctx, entries * sizeof(int64_t));
    XDI_REQUIRE(ctx, c->values && c->packed && c->all && c->ids, XD_ERROR_MEMORY,
                "no room for %zu candidates", entries);
    return XD_OK;
}

static xd_result xdi_topk_local(xd_ctx *ctx, const xd_vocab_info *info, const xd_rows *logits, int64_t k,
                                xdi_topk_candidates *c) {
    const xd_loss_kernels kernels = xd_ctx_kernels(ctx).loss;
    xd_select_args args;
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    args.logits = *logits;
    args.k = k;
    args.first = info->begin;
    args.columns = info->end - info->begin;
    args.values = c->values;
    args.ids = c->ids;
    XDI_TRY(kernels.select(&launch, &args));
    for (int64_t i = 0; i < logits->rows * k; i++) {
        c->packed[2 * i] = c->values[i];
        c->packed[2 * i + 1] = (double)c->ids[i];
    }
    return XD_OK;
}

/* The k best of one row's candidates. Shards come in the order of their columns, so equals keep the lowest
 * id. */
static void xdi_topk_best(const double *all, int ranks, int64_t stride, int64_t k, double *values,
                          int64_t *ids) {
    int64_t n = 0;
    for (int i = 0; i < ranks; i++)
        for (int64_t j = 0; j < k; j++) {
            const double value = all[i * stride + 2 * j];
            const int64_t id = (int64_t)all[i * stride + 2 * j + 1];
            if (id >= 0 && (n < k || value > values[n - 1]))
                n = xdi_select_insert(values, ids, n, k, value, id);
        }
}

XD_API xd_result xd_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t k, double *values,
                               int64_t *ids) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t words = logits.rows * k * 2;
    xdi_topk_candidates c;
    const void *all = NULL;
    memset(&c, 0, sizeof c);
    xd_result result = xdi_topk_prepare(ctx, vocab, &logits, k, &c);
    result = xdi_vocab_agree(info.tp, NULL, result);
    if (result == XD_OK) result = xdi_topk_local(ctx, &info, &logits, k, &c);
    if (result == XD_OK) result = xdi_vocab_gather(vocab, c.packed, c.all, words, XD_DTYPE_F64, &all);
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++)
        xdi_topk_best((const double *)all + r * k * 2, info.ranks, words, k, values + r * k, ids + r * k);
    xdi_topk_release(ctx, &c);
    return result;
}

/* Largest logit of each of this shard's columns over the counted positions. */
static void xdi_topk_importance(const xd_rows *logits, const uint8_t *mask, int64_t columns,
                                float *importance) {
    for (int64_t c = 0; c < columns; c++) importance[c] = -INFINITY;
    for (int64_t r = 0; r < logits->rows; r++)
        for (int64_t c = 0; c < columns && (!mask || mask[r]); c++) {
            const float value = (float)xdi_loss_load(logits, r, c);
            if (value > importance[c]) importance[c] = value;
        }
}

static void xdi_topk_sort_ids(int64_t *ids, int64_t k) {
    for (int64_t gap = k / 2; gap > 0; gap /= 2)
        for (int64_t i = gap; i < k; i++) {
            const int64_t id = ids[i];
            int64_t at = i;
            for (; at >= gap && ids[at - gap] > id; at -= gap) ids[at] = ids[at - gap];
            ids[at] = id;
        }
}

XD_API xd_result xd_select_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, const uint8_t *mask,
                                   xd_comm *comm, int64_t k, int64_t *ids, float *importance) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t columns = info.end - info.begin;
    float *mine = (float *)xd_allocate(ctx, ((size_t)columns + 1) * sizeof *mine);
    double *values = (double *)xd_allocate(ctx, (size_t)(k > 0 ? k : 1) * sizeof *values);
    xd_result result = xdi_vocab_check_rows(ctx, vocab, "logits", &logits, -1);
    xd_rows row;
    if (result == XD_OK && !(mine && values))
        result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld columns", (long long)columns);
    result = xdi_vocab_agree(info.tp, comm, result);
    if (result == XD_OK) {
        xdi_topk_importance(&logits, mask, columns, mine);
        if (comm && xd_comm_size(comm) > 1)
            result = xd_all_reduce(comm, mine, mine, columns, XD_DTYPE_F32, XD_MAX);
    }
    row.data = mine;
    row.dtype = XD_DTYPE_F32;
    row.rows = 1;
    row.cols = columns;
    row.stride = 0;
    if (result == XD_OK) result = xd_vocab_topk(ctx, vocab, row, k, values, ids);
    if (result == XD_OK) xdi_topk_sort_ids(ids, k);
    if (result == XD_OK && importance && columns > 0)
        memcpy(importance, mine, (size_t)columns * sizeof *mine);
    xd_release(ctx, mine);
    xd_release(ctx, values);
    return result;
}
