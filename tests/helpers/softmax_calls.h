/* softmax_calls.h - xd_log_probs and its backward for one output at a time. */
#ifndef XD_TEST_SOFTMAX_CALLS_H
#define XD_TEST_SOFTMAX_CALLS_H

#include <string.h>

static inline xd_log_probs_desc softmax_desc(const xd_vocab *vocab, xd_rows logits, double temperature) {
    xd_log_probs_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = vocab;
    d.logits = logits;
    d.temperature = temperature;
    return d;
}

static inline xd_result softmax_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                          double temperature, double *log_sum_exp, int64_t *argmax) {
    xd_log_probs_desc d = softmax_desc(vocab, logits, temperature);
    d.log_sum_exp = log_sum_exp;
    d.argmax = argmax;
    return xd_log_probs(ctx, &d);
}

static inline xd_result softmax_all(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                    xd_rows all) {
    xd_log_probs_desc d = softmax_desc(vocab, logits, temperature);
    d.all = all;
    return xd_log_probs(ctx, &d);
}

static inline xd_result softmax_all_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                             double temperature, xd_rows weight, xd_rows gradient) {
    const xd_log_probs_desc d = softmax_desc(vocab, logits, temperature);
    const xd_log_probs_gradient g = { NULL, weight, gradient };
    return xd_log_probs_backward(ctx, &d, &g);
}

static inline xd_result softmax_at_ids(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                       xd_ids ids, float *at_ids) {
    xd_log_probs_desc d = softmax_desc(vocab, logits, temperature);
    d.ids = ids;
    d.at_ids = at_ids;
    return xd_log_probs(ctx, &d);
}

static inline xd_result softmax_at_ids_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                                double temperature, xd_ids ids, const float *weight,
                                                xd_rows gradient) {
    xd_log_probs_desc d = softmax_desc(vocab, logits, temperature);
    xd_log_probs_gradient g;
    memset(&g, 0, sizeof g);
    d.ids = ids;
    g.at_ids = weight;
    g.logits = gradient;
    return xd_log_probs_backward(ctx, &d, &g);
}

/* Logits at n ids of each row; with a stride of 0 the same n for all rows. */
static inline xd_result softmax_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, xd_ids ids,
                                        int64_t n, int64_t stride, float *values) {
    xd_log_probs_desc d = softmax_desc(vocab, logits, 0.0);
    d.ids = ids;
    d.ids_per_row = n;
    d.ids_shared = stride == 0;
    d.logits_at_ids = values;
    return xd_log_probs(ctx, &d);
}

static inline xd_result softmax_accuracy(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                         const xd_positions *positions, xd_comm *comm, double *accuracy) {
    xd_log_probs_desc d = softmax_desc(vocab, logits, 0.0);
    d.counted = *positions;
    d.comm = comm;
    d.accuracy = accuracy;
    return xd_log_probs(ctx, &d);
}

#endif
