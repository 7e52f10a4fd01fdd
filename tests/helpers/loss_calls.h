/* loss_calls.h - xd_loss by the divergences that are not of probabilities alone, and xd_vocab_topk_columns by its outputs. */
#ifndef XD_TEST_LOSS_CALLS_H
#define XD_TEST_LOSS_CALLS_H

#include <string.h>

typedef struct mft_desc {
    xd_loss_desc loss;
    double threshold;
    xd_rows terms;
} mft_desc;

static inline mft_desc mft_defaults(void) {
    mft_desc d;
    memset(&d, 0, sizeof d);
    d.loss.soft_weight = 1.0;
    d.threshold = 0.2;
    return d;
}

static inline xd_result mft_loss(xd_ctx *ctx, const mft_desc *desc, xd_loss_values *out) {
    xd_loss_desc d = desc->loss;
    d.hard_weight = 0.0;
    d.divergence = XD_MFT;
    d.mft_threshold = desc->threshold;
    d.mft_terms = desc->terms;
    return xd_loss(ctx, &d, out);
}

static inline xd_result cosine_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    xd_loss_desc d = *desc;
    d.hard_weight = 0.0;
    d.divergence = XD_COSINE;
    return xd_loss(ctx, &d, out);
}

static inline xd_vocab_topk_desc vocab_topk_desc(const xd_vocab *vocab, xd_rows logits, int64_t sequences,
                                                 int64_t k) {
    xd_vocab_topk_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = vocab;
    d.logits = logits;
    d.sequences = sequences;
    d.k = k;
    return d;
}

static inline xd_result vocab_topk_columns(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids,
                                           float *importance) {
    xd_vocab_topk_desc d = *desc;
    d.importance = importance;
    return xd_vocab_topk_columns(ctx, &d, ids);
}

static inline xd_result vocab_topk_gather(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids,
                                          xd_rows values) {
    xd_vocab_topk_desc d = *desc;
    d.values = values;
    return xd_vocab_topk_columns(ctx, &d, ids);
}

#endif
