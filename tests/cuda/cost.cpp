/* Each operation of the CUDA unit once, at a small size with a row's ends in it, for the report of the PTX interpreter: the
 * section of the report is the operation, and a line "operation dtype elements, units" on standard output says how much was done.
 * tools/gpu_cost.py joins both. sh tests/cuda/run.sh cost runs it.
 *
 *     cost [a part of an operation's name]             only these operations
 *     cost --host [a part of an operation's name]      instead of that, what the host computes for a call, without the kernels */
#include "cost.h"

#include "cost_train.h"
#include "cost_xtoken.h"

/* ---- losses over rows ---- */

static const void *labels_of(int64_t rows, int64_t columns) {
    std::vector<int64_t> labels;
    for (int64_t r = 0; r < rows; r++) labels.push_back((r * 7919 + 1000) % columns);
    return upload(labels.data(), labels.size() * sizeof labels[0]);
}

struct Loss {
    const char *name;
    double hard, soft, temperature, smoothing;
    xd_divergence divergence;
};

static void measure_loss(const Loss &loss, xd_dtype dtype) {
    if (!is_wanted(loss.name)) return;
    const double width = (double)xd_dtype_size(dtype);
    xd_loss_desc d = {};
    xd_vocab *vocab = whole_vocabulary(VOCABULARY);
    d.vocab = vocab;
    d.student = noise_rows(LOSS_ROWS, VOCABULARY, dtype, 3.0);
    if (loss.soft > 0.0) d.teacher = noise_rows(LOSS_ROWS, VOCABULARY, dtype, 3.0);
    d.hard_weight = loss.hard;
    d.soft_weight = loss.soft;
    d.temperature = loss.temperature;
    d.label_smoothing = loss.smoothing;
    d.divergence = loss.divergence;
    d.beta = 0.5;
    if (loss.hard > 0.0) d.common.labels.data = (void *)labels_of(LOSS_ROWS, VOCABULARY);
    d.common.gradient = empty_rows(LOSS_ROWS, VOCABULARY, dtype);
    d.common.denominator_value = LOSS_ROWS;
    d.common.status = (xd_status *)room(sizeof *d.common.status);
    xd_loss_values *out = (xd_loss_values *)room(sizeof *out);
    measure({ loss.name, dtype, (double)LOSS_ROWS * VOCABULARY, (loss.soft > 0.0 ? 3.0 : 2.0) * width },
            [&] { require(xd_loss(ctx, &d, out)); });
    release(vocab);
}

static void measure_losses() {
    static const Loss losses[] = {
        { "ce", 1, 0, 1, 0, XD_KL_FORWARD },         { "ce_smoothed", 1, 0, 1, 0.1, XD_KL_FORWARD },
        { "kl", 0, 1, 2, 0, XD_KL_FORWARD },         { "kl_t1", 0, 1, 1, 0, XD_KL_FORWARD },
        { "reverse_kl", 0, 1, 2, 0, XD_KL_REVERSE }, { "jsd", 0, 1, 2, 0, XD_JSD },
        { "hard_soft", 0.5, 0.5, 2, 0, XD_KL_FORWARD }, { "hard_soft_t1", 0.5, 0.5, 1, 0, XD_KL_FORWARD },
    };
    for (const Loss &loss : losses)
        for (const xd_dtype dtype : { XD_DTYPE_BF16, XD_DTYPE_F32 }) measure_loss(loss, dtype);
}

static void measure_statistics() {
    if (!is_wanted("statistics")) return;
    xd_vocab *vocab = whole_vocabulary(VOCABULARY);
    xd_log_probs_desc d = {};
    d.vocab = vocab;
    d.logits = noise_rows(ROWS, VOCABULARY, XD_DTYPE_BF16, 3.0);
    d.log_sum_exp = (double *)room(ROWS * sizeof(double));
    d.argmax = (int64_t *)room(ROWS * sizeof(int64_t));
    measure({ "statistics", XD_DTYPE_BF16, (double)ROWS * VOCABULARY, 2.0 }, [&] { require(xd_log_probs(ctx, &d)); });
    release(vocab);
}

/* The k largest of a row. */
static void measure_select(const char *name, xd_dtype dtype, int64_t columns, int64_t k) {
    if (!is_wanted(name)) return;
    xd_vocab *vocab = whole_vocabulary(columns);
    const xd_rows logits = noise_rows(ROWS, columns, dtype, 3.0);
    float *values = (float *)room((size_t)(ROWS * k) * sizeof(float));
    int64_t *ids = (int64_t *)room((size_t)(ROWS * k) * sizeof(int64_t));
    measure({ name, dtype, (double)(ROWS * columns), (double)xd_dtype_size(dtype) },
            [&] { require(xd_vocab_topk(ctx, vocab, logits, k, values, ids)); });
    release(vocab);
}

static void measure_topk() {
    enum { K = 64 };
    std::vector<int64_t> ids;
    if (!is_wanted("topk_kl")) return;
    xd_vocab *vocab = whole_vocabulary(VOCABULARY);
    xd_topk_desc d = {};
    d.student = noise_rows(ROWS, VOCABULARY, XD_DTYPE_BF16, 3.0);
    d.vocab = vocab;
    d.k = K;
    for (int64_t i = 0; i < ROWS * K; i++) ids.push_back(i % K * 1999 + 5);
    const std::vector<float> values(ROWS * K, -4.2f);
    d.ids.data = upload(ids.data(), ids.size() * sizeof ids[0]);
    d.values = (float *)upload(values.data(), values.size() * sizeof values[0]);
    d.common.gradient = empty_rows(ROWS, VOCABULARY, XD_DTYPE_BF16);
    d.common.denominator_value = ROWS;
    d.common.status = (xd_status *)room(sizeof *d.common.status);
    xd_loss_values *out = (xd_loss_values *)room(sizeof *out);
    measure({ "topk_kl", XD_DTYPE_BF16, (double)ROWS * VOCABULARY, 4.0 }, [&] { require(xd_topk_kl_loss(ctx, &d, out)); });
    release(vocab);
}

int main(int argc, char **argv) {
    const bool host = argc > 1 && strcmp(argv[1], "--host") == 0;
    wanted = argc > 1 + host ? argv[1 + host] : nullptr;
    require(xd_ctx_create(nullptr, &ctx));
    require(xd_cuda_create(ctx, nullptr, &gpu));
    host_alone = host;
    measure_losses();
    measure_statistics();
    measure_topk();
    measure_select("select_64", XD_DTYPE_BF16, VOCABULARY, 64);
    measure_select("select_8192", XD_DTYPE_F32, 50000, 8192);
    measure_training();
    measure_diffusion();
    measure_copies();
    measure_xtoken();
    xd_cuda_destroy(gpu);
    xd_ctx_destroy(ctx);
    return 0;
}
