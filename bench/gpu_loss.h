/* Losses over rows of logits, selections and the head, for bench/gpu.cu. */
#ifndef XDISTILL_BENCH_GPU_LOSS_H
#define XDISTILL_BENCH_GPU_LOSS_H

#include "gpu_side.h"

struct Loss {
    const char *name;
    double hard, soft, temperature, smoothing;
    xd_divergence divergence;
};

static void prepare_loss(const Loss &loss, int64_t columns, const Case &c, Side &side, int64_t rows,
                         Operation *op) {
    const size_t width = xd_dtype_size(c.dtype);
    const std::vector<int64_t> labels = labels_of(rows, columns);
    xd_loss_desc *d = op->hold(xd_loss_desc());
    d->vocab = whole_vocabulary(side, op, columns);
    d->student = side.noise_rows(rows, columns, c.dtype, 8.0, 1);
    if (loss.soft > 0.0) d->teacher = side.noise_rows(rows, columns, c.dtype, 8.0, 2);
    d->hard_weight = loss.hard;
    d->soft_weight = loss.soft;
    d->temperature = loss.temperature;
    d->label_smoothing = loss.smoothing;
    d->divergence = loss.divergence;
    d->beta = 0.5;
    if (loss.hard > 0.0) d->common.labels.data = side.upload(labels.data(), labels.size() * sizeof labels[0]);
    d->common.gradient = side.empty_rows(rows, columns, c.dtype);
    d->common.denominator_value = (double)c.rows;
    d->common.status = side.status();
    xd_loss_values *out = (xd_loss_values *)side.room(sizeof *out);
    xd_ctx *ctx = side.ctx;
    op->call = [=] { require(ctx, xd_loss(ctx, d, out)); };
    op->workspace = planned_workspace(side, op->call);
    d->common.workspace_bytes = op->workspace;
    d->common.workspace = side.room(op->workspace);
    op->outputs.push_back({ d->common.gradient.data, c.dtype, columns, labels, loss.hard > 0.0 ? 1 : 0 });
    op->bytes = (loss.soft > 0.0 ? 3.0 : 2.0) * (double)(rows * columns) * (double)width;
    op->size = size_of(rows, columns);
}

static void add_losses(std::vector<Case> *cases, const char *variant, int64_t rows, int64_t columns,
                       bool few) {
    static const Loss losses[] = {
        { "ce", 1, 0, 1, 0, XD_KL_FORWARD },
        { "ce_smoothed", 1, 0, 1, 0.1, XD_KL_FORWARD },
        { "kl", 0, 1, 2, 0, XD_KL_FORWARD },
        { "kl_t1", 0, 1, 1, 0, XD_KL_FORWARD },
        { "reverse_kl", 0, 1, 2, 0, XD_KL_REVERSE },
        { "jsd", 0, 1, 2, 0, XD_JSD },
        { "hard_soft", 0.5, 0.5, 2, 0, XD_KL_FORWARD },
        { "hard_soft_t1", 0.5, 0.5, 1, 0, XD_KL_FORWARD },
    };
    for (const Loss &loss : losses) {
        if (few && strcmp(loss.name, "ce") != 0 && strcmp(loss.name, "kl") != 0) continue;
        const Loss *chosen = &loss;
        for (const xd_dtype dtype : { XD_DTYPE_BF16, XD_DTYPE_F32 })
            cases->push_back({ loss.name, dtype, rows, CHECKED_ROWS, dtype == XD_DTYPE_F32 ? 1e-5 : 4e-3,
                               [=](const Case &c, Side &side, int64_t n, Operation *op) {
                                   prepare_loss(*chosen, columns, c, side, n, op);
                               },
                               variant });
    }
}

static void prepare_statistics(const Case &c, Side &side, int64_t rows, Operation *op) {
    xd_log_probs_desc *d = op->hold(xd_log_probs_desc());
    xd_ctx *ctx = side.ctx;
    d->vocab = whole_vocabulary(side, op, VOCABULARY);
    d->logits = side.noise_rows(rows, VOCABULARY, c.dtype, 8.0, 1);
    d->log_sum_exp = (double *)side.room((size_t)rows * sizeof(double));
    d->argmax = (int64_t *)side.room((size_t)rows * sizeof(int64_t));
    d->workspace_bytes = op->workspace = 4096 + 72 * (size_t)rows;
    d->workspace = side.room(d->workspace_bytes);
    op->call = [=] { require(ctx, xd_log_probs(ctx, d)); };
    op->outputs.push_back({ d->log_sum_exp, XD_DTYPE_F64, 1, {}, 0 });
    op->outputs.push_back({ d->argmax, XD_DTYPE_I64, 1, {}, 0 });
    op->bytes = (double)rows * VOCABULARY * (double)xd_dtype_size(c.dtype);
    op->size = size_of(rows, VOCABULARY);
}

/* Against a list of a teacher's tokens. Their columns are judged apart from the tail's. */
static void prepare_topk(const Case &c, Side &side, int64_t rows, Operation *op) {
    enum { K = 64, APART = VOCABULARY / K - 1 };
    std::vector<int64_t> ids;
    xd_topk_desc *d = op->hold(xd_topk_desc());
    xd_ctx *ctx = side.ctx;
    for (int64_t i = 0; i < rows * K; i++) ids.push_back(i % K * APART + 5);
    const std::vector<float> values((size_t)(rows * K), -4.2f);
    d->student = side.noise_rows(rows, VOCABULARY, c.dtype, 8.0, 1);
    d->vocab = whole_vocabulary(side, op, VOCABULARY);
    d->k = K;
    d->ids.data = side.upload(ids.data(), ids.size() * sizeof ids[0]);
    d->values = (float *)side.upload(values.data(), values.size() * sizeof values[0]);
    d->common.gradient = side.empty_rows(rows, VOCABULARY, c.dtype);
    d->common.denominator_value = (double)c.rows;
    d->common.status = side.status();
    xd_loss_values *out = (xd_loss_values *)side.room(sizeof *out);
    op->call = [=] { require(ctx, xd_topk_kl_loss(ctx, d, out)); };
    op->workspace = planned_workspace(side, op->call);
    d->common.workspace_bytes = op->workspace;
    d->common.workspace = side.room(op->workspace);
    op->outputs.push_back({ d->common.gradient.data, c.dtype, VOCABULARY, ids, K });
    op->bytes = 2.0 * (double)rows * VOCABULARY * (double)xd_dtype_size(c.dtype);
    op->size = size_of(rows, VOCABULARY);
}

static void prepare_select(int64_t columns, int64_t k, const Case &c, Side &side, int64_t rows,
                           Operation *op) {
    const xd_vocab *vocab = whole_vocabulary(side, op, columns);
    const xd_rows logits = side.noise_rows(rows, columns, c.dtype, 8.0, 1);
    float *values = (float *)side.room((size_t)(rows * k) * sizeof(float));
    int64_t *ids = (int64_t *)side.room((size_t)(rows * k) * sizeof(int64_t));
    xd_ctx *ctx = side.ctx;
    op->call = [=] { require(ctx, xd_vocab_topk(ctx, vocab, logits, k, values, ids)); };
    op->outputs.push_back({ values, XD_DTYPE_F32, k, {}, 0 });
    op->outputs.push_back({ ids, XD_DTYPE_I64, k, {}, 0 });
    op->bytes = (double)(rows * columns) * (double)xd_dtype_size(c.dtype);
    op->size = size_of(rows, columns);
}

static void add_selections(std::vector<Case> *cases) {
    cases->push_back({ "statistics", XD_DTYPE_BF16, LOSS_ROWS, CHECKED_ROWS, 1e-6, prepare_statistics });
    cases->push_back({ "topk_kl", XD_DTYPE_BF16, LOSS_ROWS, CHECKED_ROWS, 4e-3, prepare_topk });
    cases->push_back({ "select_64", XD_DTYPE_BF16, LOSS_ROWS, CHECKED_ROWS, 0.0,
                       [](const Case &c, Side &side, int64_t n, Operation *op) {
                           prepare_select(VOCABULARY, 64, c, side, n, op);
                       } });
    cases->push_back({ "select_8192", XD_DTYPE_F32, CHECKED_ROWS * 8, CHECKED_ROWS, 0.0,
                       [](const Case &c, Side &side, int64_t n, Operation *op) {
                           prepare_select(LIST_COLUMNS, LIST_LENGTH, c, side, n, op);
                       } });
}

/* ---- the head ---- */

/* ||a - b|| / ||b|| of floats on the device. */
static double head_distance(const float *a, const float *b, int64_t count) {
    std::vector<float> x((size_t)count), y((size_t)count);
    require_cuda(cudaMemcpy(x.data(), a, (size_t)count * sizeof(float), cudaMemcpyDeviceToHost));
    require_cuda(cudaMemcpy(y.data(), b, (size_t)count * sizeof(float), cudaMemcpyDeviceToHost));
    return bench_distance(x.data(), y.data(), XD_DTYPE_F32, count);
}

/* What BF16 logits change: a bias of zeros makes them f32. Over a block of rows and the first columns of the gradient. */
static double head_error(Side *side, const xd_head_loss_desc *given, xd_loss_values *out) {
    const int64_t rows = given->student.hidden.rows < 256 ? given->student.hidden.rows : 256,
                  width = HEAD_WIDTH;
    const int64_t sizes[2] = { rows * width, (VOCABULARY < 1024 ? VOCABULARY : 1024) * width };
    float *results[2][2];
    xd_head_loss_desc d = *given;
    d.student.hidden.rows = rows;
    d.workspace = NULL;
    d.loss.common.denominator_value = (double)rows;
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 2; k++) results[i][k] = (float *)side->room((size_t)sizes[k] * sizeof(float));
        if (i) d.student.bias = (float *)side->room(VOCABULARY * sizeof(float));
        d.hidden_gradient = { results[i][0], XD_DTYPE_F32, rows, width, 0 };
        require_cuda(cudaMemset(d.weight_gradient, 0, (size_t)VOCABULARY * HEAD_WIDTH * sizeof(float)));
        require(side->ctx, xd_head_loss(side->ctx, &d, out));
        require_cuda(cudaMemcpy(results[i][1], d.weight_gradient, (size_t)sizes[1] * sizeof(float),
                                cudaMemcpyDeviceToDevice));
    }
    return bench_larger(head_distance(results[0][0], results[1][0], sizes[0]),
                        head_distance(results[0][1], results[1][1], sizes[1]));
}

/* Bound by arithmetic: six products a weight and row. */
static void prepare_head(bool workspace, Side &side, int64_t rows, Operation *op) {
    const int64_t columns = VOCABULARY, width = HEAD_WIDTH;
    const std::vector<int64_t> labels = labels_of(rows, columns);
    xd_head_loss_desc *d = op->hold(xd_head_loss_desc());
    xd_ctx *ctx = side.ctx;
    Side *here = &side;
    d->student.hidden = side.noise_rows(rows, width, XD_DTYPE_BF16, 0.1, 3);
    d->student.weight = side.noise_rows(columns, width, XD_DTYPE_BF16, 1.0, 4);
    d->hidden_gradient = side.empty_rows(rows, width, XD_DTYPE_BF16);
    d->weight_gradient = (float *)side.room((size_t)(columns * width) * sizeof(float));
    d->bf16 = true;
    d->loss.common.labels.data = side.upload(labels.data(), labels.size() * sizeof labels[0]);
    d->loss.hard_weight = 1.0;
    d->loss.vocab = whole_vocabulary(side, op, columns);
    d->loss.common.denominator_value = (double)rows;
    d->loss.common.status = side.status();
    xd_loss_values *out = (xd_loss_values *)side.room(sizeof *out);
    op->call = [=] { require(ctx, xd_head_loss(ctx, d, out)); };
    d->chunk_rows = workspace ? 2048 : 0;
    op->workspace = planned_workspace(side, op->call);
    d->chunk_rows = 0;
    if (workspace) d->workspace = side.room(d->workspace_bytes = op->workspace);
    op->error = [=] { return head_error(here, d, out); };
    op->flops = 6.0 * (double)rows * (double)columns * (double)width;
    op->size = size_of(rows, width) + "x" + std::to_string(columns);
}

/* Whether cuBLASLt loads under its usual name or beside the runtime. */
static bool has_cublas() {
    const xd_cuda_desc desc = {};
    Side side(&desc);
    return xd_ctx_products(side.ctx) > 1;
}

static void add_heads(std::vector<Case> *cases) {
    const auto of = [](bool workspace) {
        return
            [=](const Case &, Side &side, int64_t n, Operation *op) { prepare_head(workspace, side, n, op); };
    };
    cases->push_back({ "head_own", XD_DTYPE_BF16, HEAD_ROWS / 8, 0, 1e-2, of(true), "the unit's own products",
                       1, "none" });
    if (!has_cublas()) {
        printf("# no lines of head and head_no_room: cuBLASLt does not load\n");
        return;
    }
    cases->push_back({ "head", XD_DTYPE_BF16, HEAD_ROWS, 0, 1e-2, of(true), "cuBLASLt, a workspace" });
    cases->push_back(
        { "head_no_room", XD_DTYPE_BF16, HEAD_ROWS, 0, 1e-2, of(false), "cuBLASLt, no workspace" });
}

#endif
