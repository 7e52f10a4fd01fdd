/* Log-probabilities of split rows, and their gradients. */

#include "kernel/ids.h"
#include "loss/internal.h"
#include "loss/softmax.h"

#include <math.h>
#include <string.h>

/* Memory of one call on the context's device: this rank's words, mine[rows * words], and on several ranks all ranks'. */
typedef struct xdi_softmax_exchange {
    const xd_kernels *kernels;
    xd_launch launch;
    xd_softmax_args args; /* parts is this rank's; all is every rank's after the exchange */
    double *everyones;
    int64_t words;
} xdi_softmax_exchange;

static void xdi_softmax_fill_args(const xd_vocab *vocab, const xd_rows *logits, double temperature,
                                  xd_softmax_args *a) {
    memset(a, 0, sizeof *a);
    a->logits = *logits;
    a->vocab = xdi_vocab_shard(vocab);
    a->temperature = temperature == 0.0 ? 1.0 : temperature;
}

/* Memory for `words` words of each of `rows` rows. */
static xd_result xdi_softmax_take(xd_ctx *ctx, int64_t rows, int64_t words, int ranks,
                                  xdi_softmax_exchange *x) {
    x->args.parts = (double *)xdi_call_array(ctx, rows, words, sizeof(double));
    if (ranks > 1) x->everyones = (double *)xdi_call_array(ctx, rows, words, (size_t)ranks * sizeof(double));
    XD_REQUIRE(ctx, x->args.parts && (ranks == 1 || x->everyones), XD_ERROR_MEMORY,
               "no room for %lld partials of %lld rows", (long long)words, (long long)rows);
    x->words = rows * words;
    return XD_OK;
}

/* Local checks and memory, then agreement: all ranks go on or none does. `rows` is the number of rows that have
 * words; `checked` is the result of the caller's checks on this rank. */
static xd_result xdi_softmax_open(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *rows, double temperature,
                                  int64_t words, xd_result checked, xdi_softmax_exchange *x) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    xd_result result = checked;
    if (result == XD_OK) result = xdi_vocab_check_rows(ctx, vocab, "logits", rows, -1);
    memset(x, 0, sizeof *x);
    x->kernels = xd_ctx_kernels(ctx);
    x->launch = xd_ctx_launch(ctx);
    xdi_softmax_fill_args(vocab, rows, temperature, &x->args);
    if (result == XD_OK && !(temperature >= 0.0 && temperature < (double)INFINITY))
        result = XD_FAIL(ctx, XD_ERROR_ARGUMENT, "temperature %g must be positive and finite", temperature);
    if (result == XD_OK) result = xdi_softmax_take(ctx, rows->rows, words, info.ranks, x);
    return xdi_vocab_agree(info.tp, NULL, result);
}

static xd_result xdi_softmax_swap(const xd_vocab *vocab, xdi_softmax_exchange *x) {
    const void *all;
    XD_TRY(xdi_vocab_gather(vocab, x->args.parts, x->everyones, x->words, XD_DTYPE_F64, &all));
    x->args.all = (const double *)all;
    x->args.all_stride = x->words;
    return XD_OK;
}

static void xdi_softmax_close(xd_ctx *ctx, xdi_softmax_exchange *x) {
    xdi_call_memory_done(ctx, x->args.parts);
    xdi_call_memory_done(ctx, x->everyones);
}

XD_PRIVATE xd_result xdi_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                   double *log_sum_exp, int64_t *argmax) {
    XDI_GIVEN(ctx, ctx, vocab);
    xdi_softmax_exchange x;
    xd_result result = xdi_softmax_open(ctx, vocab, &logits, temperature, XD_SOFTMAX_PARTS, XD_OK, &x);
    x.args.log_sum_exp = log_sum_exp;
    x.args.argmax = argmax;
    if (result == XD_OK) result = x.kernels->softmax.stats(&x.launch, &x.args);
    if (result == XD_OK) result = xdi_softmax_swap(vocab, &x);
    if (result == XD_OK) result = x.kernels->softmax.merge(&x.launch, &x.args);
    xdi_softmax_close(ctx, &x);
    return result;
}

/* log_sum_exp of every row in device memory, the same on all ranks. */
static xd_result xdi_softmax_lse(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                 double temperature, const xd_rows *other, const char *name, double **lse) {
    const int64_t rows = logits->rows > 0 ? logits->rows : 0; /* xdi_row_stats refuses negative ones */
    xd_result result = other ? xdi_vocab_check_rows(ctx, vocab, name, other, logits->rows) : XD_OK;
    *lse = result == XD_OK ? (double *)xdi_call_array(ctx, rows, 1, sizeof **lse) : NULL;
    if (result == XD_OK && !*lse)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld rows", (long long)rows);
    result = xdi_vocab_agree(xd_vocab_describe(vocab).tp, NULL, result);
    if (result == XD_OK) result = xdi_row_stats(ctx, vocab, *logits, temperature, *lse, NULL);
    if (result == XD_OK) return XD_OK;
    xdi_call_memory_done(ctx, *lse);
    *lse = NULL;
    return result;
}

/* gradient = (weight - softmax sum_v weight) / temperature, the sum over the whole vocabulary. */
static xd_result xdi_log_probs_all_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                            double temperature, xd_rows weight, xd_rows gradient) {
    xdi_softmax_exchange x;
    double *lse;
    XD_TRY(xdi_vocab_agree(xd_vocab_describe(vocab).tp, NULL,
                           xdi_vocab_check_rows(ctx, vocab, "the gradient of all", &weight, logits.rows)));
    XD_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &gradient, "gradient", &lse));
    xd_result result = xdi_softmax_open(ctx, vocab, &weight, temperature, 1, XD_OK, &x);
    x.args.weights = weight;
    x.args.logits = logits;
    x.args.log_sum_exp = lse;
    x.args.out = gradient;
    if (result == XD_OK) result = x.kernels->softmax.row_sums(&x.launch, &x.args);
    if (result == XD_OK) result = xdi_softmax_swap(vocab, &x);
    if (result == XD_OK) result = x.kernels->softmax.write_backward(&x.launch, &x.args);
    xdi_softmax_close(ctx, &x);
    xdi_call_memory_done(ctx, lse);
    return result;
}

/* What to pick of each row, and where to. */
typedef struct xdi_softmax_pick {
    xd_ids ids;
    int64_t n, stride;
    void *values;
    xd_dtype dtype;
    const char *name; /* of values, as the caller calls them */
} xdi_softmax_pick;

static xd_result xdi_softmax_check_ids(xd_ctx *ctx, const xd_ids *ids, int64_t rows, int64_t n) {
    XD_REQUIRE(ctx, ids->data || rows == 0 || n == 0, XD_ERROR_ARGUMENT, "%lld rows have no ids",
               (long long)rows);
    return xdi_vocab_check_ids(ctx, "ids", ids);
}

/* Ids of a list that all rows share are checked here, where the host can read them; those of rows give NaN. */
static xd_result xdi_softmax_check_pick(xd_ctx *ctx, const xd_vocab *vocab, int64_t rows,
                                        const xdi_softmax_pick *p) {
    XD_REQUIRE(ctx, rows <= 0 || p->n <= 0 || p->values, XD_ERROR_ARGUMENT,
               "%s is NULL and %lld rows have %lld", p->name, (long long)rows, (long long)p->n);
    const int64_t size = xd_vocab_describe(vocab).size;
    const bool readable = xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU;
    XD_REQUIRE(ctx, p->n >= 0 && (p->stride == 0 || p->stride >= p->n), XD_ERROR_ARGUMENT,
               "%lld ids a row with stride %lld", (long long)p->n, (long long)p->stride);
    XD_REQUIRE(ctx, p->stride <= 0 || rows <= PTRDIFF_MAX / 8 / p->stride, XD_ERROR_MEMORY,
               "%lld rows of ids with stride %lld are more than memory has", (long long)rows,
               (long long)p->stride);
    XD_TRY(xdi_softmax_check_ids(ctx, &p->ids, rows, p->n));
    for (int64_t j = 0; j < p->n && p->stride == 0 && readable && p->ids.data; j++)
        XD_REQUIRE(ctx, xd_id_at(p->ids, j) >= 0 && xd_id_at(p->ids, j) < size, XD_ERROR_ARGUMENT,
                   "column %lld is outside the vocabulary of %lld", (long long)xd_id_at(p->ids, j),
                   (long long)size);
    return XD_OK;
}

/* values[r, j] of the rank that owns the id; as log-probabilities where lse is given. */
static xd_result xdi_softmax_columns(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                     double temperature, double *lse, const xdi_softmax_pick *pick) {
    xdi_softmax_exchange x;
    const xd_result checked = xdi_softmax_check_pick(ctx, vocab, logits->rows, pick);
    xd_result result = xdi_softmax_open(ctx, vocab, logits, temperature, pick->n, checked, &x);
    x.args.log_sum_exp = lse;
    x.args.ids = pick->ids;
    x.args.ids_count = pick->n;
    x.args.ids_stride = pick->stride;
    x.args.values = pick->values;
    x.args.values_dtype = pick->dtype;
    if (result == XD_OK) result = x.kernels->softmax.pick(&x.launch, &x.args);
    if (result == XD_OK) result = xdi_softmax_swap(vocab, &x);
    if (result == XD_OK) result = x.kernels->softmax.take(&x.launch, &x.args);
    xdi_softmax_close(ctx, &x);
    return result;
}

XD_PRIVATE xd_result xdi_vocab_at_ids(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, xd_ids ids,
                                      double *values) {
    const xdi_softmax_pick pick = { ids, 1, 1, values, XD_DTYPE_F64, "values" };
    return xdi_softmax_columns(ctx, vocab, logits, 0.0, NULL, &pick);
}

/* gradient = (onehot(id) - softmax) weight[t] / temperature */
static xd_result xdi_log_probs_ids_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                            double temperature, xd_ids ids, const float *weight,
                                            xd_rows gradient) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_softmax_args args;
    double *lse;
    const xd_result mine = xdi_softmax_check_ids(ctx, &ids, logits.rows, 1);
    XD_TRY(xdi_vocab_agree(xd_vocab_describe(vocab).tp, NULL, mine));
    XD_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &gradient, "gradient", &lse));
    xdi_softmax_fill_args(vocab, &logits, temperature, &args);
    args.log_sum_exp = lse;
    args.ids = ids;
    args.weight = weight;
    args.out = gradient;
    const xd_result result = kernels->softmax.write_target_backward(&launch, &args);
    xdi_call_memory_done(ctx, lse);
    return result;
}

static xd_result xdi_softmax_check_positions(xd_ctx *ctx, const xd_positions *positions, int64_t rows) {
    XD_REQUIRE(ctx, positions->labels.data, XD_ERROR_ARGUMENT, "counted has no labels for accuracy");
    XD_REQUIRE(ctx, positions->count == rows, XD_ERROR_SHAPE, "counted has %lld rows but logits have %lld",
               (long long)positions->count, (long long)rows);
    return xdi_vocab_check_ids(ctx, "labels", &positions->labels);
}

/* What accuracy needs: two denominators, then argmax and hits of every row. */
static xd_result xdi_softmax_accuracy(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                      const xd_positions *positions, xd_comm *comm, void *memory,
                                      double *out) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_denominator *counted = (xd_denominator *)memory, *hit = counted + 1;
    int64_t *argmax = (int64_t *)(void *)(hit + 1);
    uint8_t *hits = (uint8_t *)(argmax + logits->rows);
    xd_positions right = *positions; /* those where the argmax is the label */
    right.mask = hits;
    xd_result result = xdi_row_stats(ctx, vocab, *logits, 0.0, NULL, argmax);
    XD_TRY(xdi_vocab_agree(NULL, comm, result));
    XD_TRY(kernels->softmax.hits(&launch, argmax, positions->labels, positions->mask, logits->rows, hits));
    XD_TRY(xd_denominator_count(ctx, comm, positions, 1, counted));
    XD_TRY(xd_denominator_count(ctx, comm, &right, 1, hit));
    return kernels->rows.ratio(&launch, hit, counted, out);
}

/* Accuracy with its memory. `positions` is checked. */
static xd_result xdi_log_probs_accuracy(xd_ctx *ctx, const xd_log_probs_desc *d) {
    const int64_t heads = (int64_t)(2 * sizeof(xd_denominator)); /* more rows than the two take */
    const int64_t rows = d->logits.rows <= INT64_MAX - heads ? d->logits.rows + heads : -1;
    void *memory = xdi_call_array(ctx, rows, 1, sizeof(int64_t) + 1);
    xd_result result = XD_OK;
    if (!memory) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld rows", (long long)d->logits.rows);
    result = xdi_vocab_agree(xd_vocab_describe(d->vocab).tp, d->comm, result);
    if (result == XD_OK)
        result = xdi_softmax_accuracy(ctx, d->vocab, &d->logits, &d->counted, d->comm, memory, d->accuracy);
    xdi_call_memory_done(ctx, memory);
    return result;
}

/* ---- the public calls ---- */

static xdi_softmax_pick xdi_log_probs_pick(const xd_log_probs_desc *d, float *values, const char *name) {
    const int64_t n = d->ids_per_row == 0 ? 1 : d->ids_per_row;
    const xdi_softmax_pick pick = { d->ids, n, d->ids_shared ? 0 : n, values, XD_DTYPE_F32, name };
    return pick;
}

/* The bytes that softmax.h promises to be enough: sums and argmax of every row, accuracy's hits, and the largest exchange. */
static xd_result xdi_log_probs_check_workspace(xd_ctx *ctx, const xd_log_probs_desc *d) {
    const size_t words = d->ids_per_row > 3 ? (size_t)d->ids_per_row : 3,
                 ranks = (size_t)xd_vocab_describe(d->vocab).ranks;
    const size_t rows = d->logits.rows > 0 ? (size_t)d->logits.rows : 0;
    size_t bytes = 0;
    if (!d->workspace) return XD_OK;
    const bool fits = xdi_size_multiply(words, 1 + ranks, &bytes) && bytes < SIZE_MAX - 3 &&
                      xdi_size_multiply(bytes + 3, 8, &bytes) && xdi_size_multiply(bytes, rows, &bytes) &&
                      bytes <= SIZE_MAX - 4096;
    XD_REQUIRE(ctx, fits && d->workspace_bytes >= bytes + 4096, XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but log-probabilities of %lld rows need %zu", d->workspace_bytes,
               (long long)d->logits.rows, fits ? bytes + 4096 : SIZE_MAX);
    return XD_OK;
}

/* What this rank can see to be wrong, before any exchange. */
static xd_result xdi_log_probs_check(xd_ctx *ctx, const xd_log_probs_desc *d) {
    const xdi_softmax_pick at_ids = xdi_log_probs_pick(d, d->at_ids, "at_ids");
    XD_REQUIRE(ctx,
               d->log_sum_exp || d->argmax || d->at_ids || d->logits_at_ids || d->all.data || d->accuracy ||
                   d->logits.rows == 0,
               XD_ERROR_ARGUMENT, "no output is given for %lld rows of %lld columns",
               (long long)d->logits.rows, (long long)d->logits.cols);
    XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, "logits", &d->logits, -1));
    XD_TRY(xdi_log_probs_check_workspace(ctx, d));
    XD_REQUIRE(ctx, d->temperature >= 0.0 && d->temperature < (double)INFINITY, XD_ERROR_ARGUMENT,
               "temperature %g must be positive and finite", d->temperature);
    if (d->all.data) XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, "all", &d->all, d->logits.rows));
    if (d->accuracy) XD_TRY(xdi_softmax_check_positions(ctx, &d->counted, d->logits.rows));
    if (!d->at_ids && !d->logits_at_ids) return XD_OK;
    const xdi_softmax_pick pick =
        d->at_ids ? at_ids : xdi_log_probs_pick(d, d->logits_at_ids, "logits_at_ids");
    return xdi_softmax_check_pick(ctx, d->vocab, d->logits.rows, &pick);
}

/* Those that need the sum of each row, which is d->log_sum_exp or memory of the call. */
static xd_result xdi_log_probs_of_sums(xd_ctx *ctx, const xd_log_probs_desc *d, double *lse) {
    const xdi_softmax_pick pick = xdi_log_probs_pick(d, d->at_ids, "at_ids");
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_softmax_args args;
    if (d->at_ids) XD_TRY(xdi_softmax_columns(ctx, d->vocab, &d->logits, d->temperature, lse, &pick));
    if (!d->all.data) return XD_OK;
    xdi_softmax_fill_args(d->vocab, &d->logits, d->temperature, &args);
    args.log_sum_exp = lse;
    args.out = d->all;
    return xd_ctx_kernels(ctx)->softmax.write(&launch, &args);
}

static xd_result xdi_log_probs_run(xd_ctx *ctx, const xd_log_probs_desc *d) {
    const xdi_softmax_pick raw = xdi_log_probs_pick(d, d->logits_at_ids, "logits_at_ids");
    const bool sums = d->at_ids || d->all.data, stats = sums || d->log_sum_exp || d->argmax;
    double *lse = d->log_sum_exp, *taken = NULL;
    xd_result result = xdi_log_probs_check(ctx, d);
    if (result == XD_OK && sums && !lse) {
        lse = taken = (double *)xdi_call_array(ctx, d->logits.rows, 1, sizeof *lse);
        if (!lse) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld rows", (long long)d->logits.rows);
    }
    result = xdi_vocab_agree(xd_vocab_describe(d->vocab).tp, d->accuracy ? d->comm : NULL, result);
    /* the first: ranks of other vocabularies wait in it, whatever becomes of the other outputs here */
    if (result == XD_OK && d->accuracy) result = xdi_log_probs_accuracy(ctx, d);
    if (result == XD_OK && stats)
        result = xdi_row_stats(ctx, d->vocab, d->logits, d->temperature, lse, d->argmax);
    if (result == XD_OK && d->logits_at_ids)
        result = xdi_softmax_columns(ctx, d->vocab, &d->logits, 0.0, NULL, &raw);
    if (result == XD_OK)
        result = xdi_log_probs_of_sums(ctx, d, lse); /* the last: it may write over the logits */
    xdi_call_memory_done(ctx, taken);
    return result;
}

XD_API xd_result xd_log_probs(xd_ctx *ctx, const xd_log_probs_desc *desc) {
    XDI_GIVEN(ctx, ctx, desc);
    XDI_LIVE(xd_vocab, desc->vocab);
    XDI_GIVEN(ctx, desc->vocab);
    xdi_call_room_open(ctx, desc->workspace, desc->workspace_bytes);
    const xd_result result = xdi_log_probs_run(ctx, desc);
    xdi_call_room_open(ctx, NULL, 0);
    return result;
}

static xd_result xdi_log_probs_check_gradient(xd_ctx *ctx, const xd_log_probs_desc *d,
                                              const xd_log_probs_gradient *g) {
    const bool one = d->ids_per_row == 0 || d->ids_per_row == 1;
    XD_TRY(xdi_log_probs_check_workspace(ctx, d));
    XD_REQUIRE(ctx, (g->at_ids != NULL) + (g->all.data != NULL) == 1 || d->logits.rows == 0,
               XD_ERROR_ARGUMENT, "gradients by %d outputs are given: at_ids or all is needed, for %lld rows",
               (g->at_ids != NULL) + (g->all.data != NULL), (long long)d->logits.rows);
    XD_REQUIRE(ctx, !g->at_ids || (one && !d->ids_shared), XD_ERROR_ARGUMENT,
               "the gradient is of 1 id a row, not of %lld%s", (long long)d->ids_per_row,
               d->ids_shared ? " for all rows" : "");
    return XD_OK;
}

XD_API xd_result xd_log_probs_backward(xd_ctx *ctx, const xd_log_probs_desc *desc,
                                       const xd_log_probs_gradient *gradient) {
    XDI_GIVEN(ctx, ctx, desc);
    XDI_LIVE(xd_vocab, desc->vocab);
    XDI_GIVEN(ctx, desc->vocab);
    const xd_log_probs_desc *d = desc;
    xd_result mine = XDI_CHECK_GIVEN(ctx, gradient);
    if (mine == XD_OK) mine = xdi_log_probs_check_gradient(ctx, d, gradient);
    XD_TRY(xdi_vocab_agree(xd_vocab_describe(d->vocab).tp, NULL, mine));
    xdi_call_room_open(ctx, d->workspace, d->workspace_bytes);
    mine = gradient->all.data ? xdi_log_probs_all_backward(ctx, d->vocab, d->logits, d->temperature,
                                                           gradient->all, gradient->logits)
                              : xdi_log_probs_ids_backward(ctx, d->vocab, d->logits, d->temperature, d->ids,
                                                           gradient->at_ids, gradient->logits);
    xdi_call_room_open(ctx, NULL, 0);
    return mine;
}
