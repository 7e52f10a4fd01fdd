#include <math.h>
#include <string.h>

/* Partials of a row: largest element, its lowest id, sum of exponentials relative to it. */
enum { XDI_SOFTMAX_MAX, XDI_SOFTMAX_ARG, XDI_SOFTMAX_SUM, XDI_SOFTMAX_WORDS };

/* Memory of one call: mine[rows * words] and, on several ranks, everyone's. */
typedef struct xdi_softmax_exchange {
    double *mine, *all;
    const double *parts; /* [ranks, rows * words] after the exchange */
    int64_t words;
} xdi_softmax_exchange;

/* Checks and memory on this rank alone, then agreed: all ranks go on or none does. */
static xd_result xdi_softmax_open(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                  double temperature, int64_t words, xdi_softmax_exchange *x) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    xd_result result = xdi_vocab_check_rows(ctx, vocab, "logits", logits, -1);
    memset(x, 0, sizeof *x);
    x->words = result == XD_OK ? logits->rows * words : 0;
    if (result == XD_OK && !(temperature >= 0.0 && temperature < (double)INFINITY))
        result = XDI_FAIL(ctx, XD_ERROR_ARGUMENT, "temperature %g must be positive and finite", temperature);
    if (result == XD_OK) {
        const size_t bytes = (size_t)x->words * sizeof(double);
        x->mine = (double *)xd_allocate(ctx, bytes ? bytes : 1);
        x->all = info.ranks > 1 ? (double *)xd_allocate(ctx, bytes ? bytes * (size_t)info.ranks : 1) : NULL;
        if (!x->mine || (info.ranks > 1 && !x->all))
            result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld partials", (long long)x->words);
    }
    return xdi_vocab_agree(info.tp, NULL, result);
}

static xd_result xdi_softmax_swap(const xd_vocab *vocab, xdi_softmax_exchange *x) {
    const void *parts;
    XDI_TRY(xdi_vocab_gather(vocab, x->mine, x->all, x->words, XD_DTYPE_F64, &parts));
    x->parts = (const double *)parts;
    return XD_OK;
}

static void xdi_softmax_close(xd_ctx *ctx, xdi_softmax_exchange *x) {
    xd_release(ctx, x->mine);
    xd_release(ctx, x->all);
}

static double xdi_softmax_tau(double temperature) {
    return temperature == 0.0 ? 1.0 : temperature;
}

static void xdi_softmax_part(const xd_vocab_info *info, const xd_rows *logits, int64_t r, double tau,
                             double *part) {
    const int64_t columns = info->end - info->begin;
    int64_t arg;
    part[XDI_SOFTMAX_MAX] = xdi_loss_row_max(logits, r, columns, &arg);
    part[XDI_SOFTMAX_ARG] = arg < 0 ? -1.0 : (double)(arg + info->begin);
    part[XDI_SOFTMAX_SUM] = 0.0;
    for (int64_t c = 0; c < columns && part[XDI_SOFTMAX_MAX] > -INFINITY; c++)
        part[XDI_SOFTMAX_SUM] += exp((xdi_loss_load(logits, r, c) - part[XDI_SOFTMAX_MAX]) / tau);
}

/* Joins a row's partials in rank order. The result's sum is relative to its max; NaN spreads. */
static void xdi_softmax_join(const xdi_softmax_exchange *x, int ranks, int64_t row, double tau,
                             double *whole) {
    whole[XDI_SOFTMAX_MAX] = -INFINITY;
    whole[XDI_SOFTMAX_ARG] = -1.0;
    whole[XDI_SOFTMAX_SUM] = 0.0;
    for (int i = 0; i < ranks; i++) {
        const double *part = x->parts + i * x->words + row * XDI_SOFTMAX_WORDS;
        const bool first = whole[XDI_SOFTMAX_ARG] < 0.0 && part[XDI_SOFTMAX_ARG] >= 0.0;
        if (!first && !(part[XDI_SOFTMAX_MAX] > whole[XDI_SOFTMAX_MAX])) continue;
        whole[XDI_SOFTMAX_MAX] = part[XDI_SOFTMAX_MAX];
        whole[XDI_SOFTMAX_ARG] = part[XDI_SOFTMAX_ARG];
    }
    for (int i = 0; i < ranks; i++) {
        const double *part = x->parts + i * x->words + row * XDI_SOFTMAX_WORDS;
        if (isnan(part[XDI_SOFTMAX_MAX])) whole[XDI_SOFTMAX_SUM] = NAN;
        if (part[XDI_SOFTMAX_MAX] > -INFINITY)
            whole[XDI_SOFTMAX_SUM] +=
                part[XDI_SOFTMAX_SUM] * exp((part[XDI_SOFTMAX_MAX] - whole[XDI_SOFTMAX_MAX]) / tau);
    }
}

XD_API xd_result xd_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                              double *log_sum_exp, int64_t *argmax) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const double tau = xdi_softmax_tau(temperature);
    xdi_softmax_exchange x;
    xd_result result = xdi_softmax_open(ctx, vocab, &logits, temperature, XDI_SOFTMAX_WORDS, &x);
    if (result == XD_OK) {
        for (int64_t r = 0; r < logits.rows; r++)
            xdi_softmax_part(&info, &logits, r, tau, x.mine + r * XDI_SOFTMAX_WORDS);
        result = xdi_softmax_swap(vocab, &x);
    }
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++) {
        double whole[XDI_SOFTMAX_WORDS];
        xdi_softmax_join(&x, info.ranks, r, tau, whole);
        if (log_sum_exp) log_sum_exp[r] = whole[XDI_SOFTMAX_MAX] / tau + log(whole[XDI_SOFTMAX_SUM]);
        if (argmax) argmax[r] = (int64_t)whole[XDI_SOFTMAX_ARG];
    }
    xdi_softmax_close(ctx, &x);
    return result;
}

/* log_sum_exp of every row in memory of the context, agreed. */
static xd_result xdi_softmax_lse(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                 double temperature, const xd_rows *other, const char *name, double **lse) {
    const size_t rows = logits->rows > 0 ? (size_t)logits->rows : 1;
    xd_result result = other ? xdi_vocab_check_rows(ctx, vocab, name, other, logits->rows) : XD_OK;
    *lse = result == XD_OK ? (double *)xd_allocate(ctx, rows * sizeof **lse) : NULL;
    if (result == XD_OK && !*lse) result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %zu rows", rows);
    result = xdi_vocab_agree(xd_vocab_describe(vocab).tp, NULL, result);
    if (result == XD_OK) result = xd_row_stats(ctx, vocab, *logits, temperature, *lse, NULL);
    if (result == XD_OK) return XD_OK;
    xd_release(ctx, *lse);
    *lse = NULL;
    return result;
}

XD_API xd_result xd_log_softmax(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                xd_rows out) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const double tau = xdi_softmax_tau(temperature);
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &out, "out", &lse));
    for (int64_t r = 0; r < logits.rows; r++)
        for (int64_t c = 0; c < info.end - info.begin; c++)
            xdi_loss_store(&out, r, c, xdi_loss_load(&logits, r, c) / tau - lse[r]);
    xd_release(ctx, lse);
    return XD_OK;
}

XD_API xd_result xd_log_softmax_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                         double temperature, xd_rows weight, xd_rows gradient) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t columns = info.end - info.begin;
    const double tau = xdi_softmax_tau(temperature);
    xdi_softmax_exchange x;
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &gradient, "gradient", &lse));
    xd_result result = xdi_softmax_open(ctx, vocab, &weight, temperature, 1, &x);
    for (int64_t r = 0; r < weight.rows && result == XD_OK; r++) {
        x.mine[r] = 0.0;
        for (int64_t c = 0; c < columns; c++) x.mine[r] += xdi_loss_load(&weight, r, c);
    }
    if (result == XD_OK) result = xdi_softmax_swap(vocab, &x);
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++) {
        double sum = 0.0;
        for (int i = 0; i < info.ranks; i++) sum += x.parts[i * x.words + r];
        for (int64_t c = 0; c < columns; c++) {
            const double p = exp(xdi_loss_load(&logits, r, c) / tau - lse[r]);
            xdi_loss_store(&gradient, r, c, (xdi_loss_load(&weight, r, c) - p * sum) / tau);
        }
        for (int64_t c = columns; c < gradient.cols; c++) xdi_loss_store(&gradient, r, c, 0.0);
    }
    xdi_softmax_close(ctx, &x);
    xd_release(ctx, lse);
    return result;
}

/* values[r, j] of this shard's ids, 0 elsewhere, then each taken from the rank that owns it. */
static void xdi_softmax_pick(const xd_vocab_info *info, const xd_rows *logits, const int64_t *ids, int64_t n,
                             int64_t stride, double *mine) {
    for (int64_t r = 0; r < logits->rows; r++)
        for (int64_t j = 0; j < n; j++) {
            const int64_t id = ids[r * stride + j];
            const bool owned = id >= info->begin && id < info->end;
            mine[r * n + j] = owned ? xdi_loss_load(logits, r, id - info->begin) : 0.0;
        }
}

static int xdi_softmax_owner(const xd_vocab_info *info, int64_t id) {
    int owner = 0;
    if (id < 0 || id >= info->size) return -1;
    while (id >= info->offsets[owner + 1]) owner++;
    return owner;
}

XD_API xd_result xd_gather_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, const int64_t *ids,
                                   int64_t n, int64_t ids_stride, double *values) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    xdi_softmax_exchange x;
    XDI_REQUIRE(ctx, n >= 0 && (ids_stride == 0 || ids_stride >= n), XD_ERROR_ARGUMENT,
                "%lld ids a row with stride %lld", (long long)n, (long long)ids_stride);
    for (int64_t j = 0; j < n && ids_stride == 0; j++)
        XDI_REQUIRE(ctx, xdi_softmax_owner(&info, ids[j]) >= 0, XD_ERROR_ARGUMENT,
                    "column %lld is outside the vocabulary of %lld", (long long)ids[j], (long long)info.size);
    xd_result result = xdi_softmax_open(ctx, vocab, &logits, 0.0, n, &x);
    if (result == XD_OK) {
        xdi_softmax_pick(&info, &logits, ids, n, ids_stride, x.mine);
        result = xdi_softmax_swap(vocab, &x);
    }
    for (int64_t i = 0; i < x.words && result == XD_OK; i++) {
        const int owner = xdi_softmax_owner(&info, ids[i / n * ids_stride + i % n]);
        values[i] = owner < 0 ? (double)NAN : x.parts[owner * x.words + i];
    }
    xdi_softmax_close(ctx, &x);
    return result;
}

XD_API xd_result xd_target_log_probs(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                     const int64_t *ids, double *log_probs) {
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, NULL, NULL, &lse));
    const xd_result result = xd_gather_columns(ctx, vocab, logits, ids, 1, 1, log_probs);
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++)
        log_probs[r] = log_probs[r] / xdi_softmax_tau(temperature) - lse[r];
    xd_release(ctx, lse);
    return result;
}

XD_API xd_result xd_target_log_probs_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                              double temperature, const int64_t *ids, const float *weight,
                                              xd_rows gradient) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const double tau = xdi_softmax_tau(temperature);
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &gradient, "gradient", &lse));
    for (int64_t r = 0; r < logits.rows; r++) {
        const bool counts = weight[r] != 0.0f && xdi_softmax_owner(&info, ids[r]) >= 0;
        const int64_t columns = counts ? info.end - info.begin : 0;
        for (int64_t c = 0; c < columns; c++) {
            const double p = exp(xdi_loss_load(&logits, r, c) / tau - lse[r]);
            xdi_loss_store(&gradient, r, c,
                           ((c + info.begin == ids[r] ? 1.0 : 0.0) - p) * (double)weight[r] / tau);
        }
        for (int64_t c = columns; c < gradient.cols; c++) xdi_loss_store(&gradient, r, c, 0.0);
    }
    xd_release(ctx, lse);
    return XD_OK;
}

static xd_result xdi_softmax_check_positions(xd_ctx *ctx, const xd_positions *positions, int64_t rows) {
    XDI_REQUIRE(ctx, positions->labels, XD_ERROR_ARGUMENT, "positions have no labels");
    XDI_REQUIRE(ctx, positions->count == rows, XD_ERROR_SHAPE, "%lld positions but logits have %lld rows",
                (long long)positions->count, (long long)rows);
    return XD_OK;
}

XD_API xd_result xd_accuracy(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                             const xd_positions *positions, xd_comm *comm, double *out) {
    const size_t rows = logits.rows > 0 ? (size_t)logits.rows : 1;
    xd_positions right = *positions; /* those where the argmax is the label */
    xd_denominator counted, hit;
    int64_t *argmax = NULL;
    xd_result result = xdi_softmax_check_positions(ctx, positions, logits.rows);
    if (result == XD_OK) argmax = (int64_t *)xd_allocate(ctx, rows * (sizeof *argmax + 1));
    if (result == XD_OK && !argmax) result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %zu rows", rows);
    result = xdi_vocab_agree(xd_vocab_describe(vocab).tp, comm, result);
    if (result == XD_OK) result = xd_row_stats(ctx, vocab, logits, 0.0, NULL, argmax);
    result = xdi_vocab_agree(NULL, comm, result);
    if (result == XD_OK) {
        uint8_t *mask = (uint8_t *)(argmax + rows);
        for (int64_t r = 0; r < logits.rows; r++)
            mask[r] = argmax[r] == positions->labels[r] && (!positions->mask || positions->mask[r]);
        right.mask = mask;
        result = xd_denominator_count(ctx, comm, positions, 1, &counted);
    }
    if (result == XD_OK) result = xd_denominator_count(ctx, comm, &right, 1, &hit);
    if (result == XD_OK) *out = counted.value > 0.0 ? hit.value / counted.value : 0.0;
    xd_release(ctx, argmax);
    return result;
}
