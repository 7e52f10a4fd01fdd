/* A penalty on sampled tokens, as in reinforcement learning: KL(student || reference) from the
 * log-probabilities of the tokens alone, with its gradient back to the student's logits.
 *
 * Two ranks share the vocabulary. The student is a table with one row of logits per position; the
 * reference is fixed. A rank samples the same tokens as the other: each draws from whole rows.
 *
 *     cc -std=c99 -O2 examples/27_sampled_tokens.c -o sampled -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>

enum { RANKS = 2, TOKENS = 64, VOCABULARY = 32, STEPS = 60 };

/* Your sampler. Any ids will do here: those of the reference's likeliest tokens and others. */
static void sample(int step, int32_t *ids) {
    for (int t = 0; t < TOKENS; t++) ids[t] = (int32_t)((7 * t + 11 * step) % VOCABULARY);
}

typedef struct shard {
    float student[TOKENS * VOCABULARY], reference[TOKENS * VOCABULARY];
    float gradient[TOKENS * VOCABULARY];
    float mine[TOKENS], theirs[TOKENS], slope[TOKENS];
    int32_t ids[TOKENS];
} shard;

static xd_result step_once(xd_ctx *ctx, const xd_vocab *vocab, shard *s, double *kl) {
    const xd_vocab_info own = xd_vocab_describe(vocab);
    const int64_t columns = own.end - own.begin;
    xd_log_probs_desc student = {
        .vocab = vocab,
        .logits = xd_rows_of(s->student, XD_DTYPE_F32, TOKENS, columns),
        .ids = xd_ids_of(s->ids, XD_DTYPE_I32),
        .at_ids = s->mine,
    };
    xd_log_probs_desc reference = student;
    reference.logits.data = s->reference;
    reference.at_ids = s->theirs;
    XD_TRY(xd_log_probs(ctx, &student));
    XD_TRY(xd_log_probs(ctx, &reference));

    const xd_kl_estimate_desc estimate = {
        .logprobs = s->mine,
        .reference = s->theirs,
        .count = TOKENS,
        .kind = XD_KL_K3,
        .gradient = s->slope,
    };
    XD_TRY(xd_kl_estimate(ctx, &estimate, kl));
    *kl /= TOKENS;

    const xd_log_probs_gradient back = {
        .at_ids = s->slope,
        .logits = xd_rows_of(s->gradient, XD_DTYPE_F32, TOKENS, columns),
    };
    return xd_log_probs_backward(ctx, &student, &back);
}

static xd_result run_rank(xd_comm *tp, void *last) {
    static shard shards[RANKS];
    xd_ctx *ctx = xd_comm_ctx(tp);
    shard *s = &shards[xd_comm_rank(tp)];
    xd_optimizer *optimizer;
    xd_vocab *vocab;
    double kl = 0.0;
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY, .tp = tp }, &vocab));
    const xd_vocab_info own = xd_vocab_describe(vocab);
    const int64_t columns = own.end - own.begin;
    for (int64_t i = 0; i < TOKENS * columns; i++)
        s->reference[i] = 2.0f * sinf((float)(i / columns + 5 * (own.begin + i % columns)));

    const xd_param table = {
        .name = "table",
        .value = s->student,
        .gradient = s->gradient,
        .dtype = XD_DTYPE_F32,
        .count = TOKENS * columns,
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&table, 1);
    adamw.learning_rate = 0.1;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    for (int step = 0; step <= STEPS; step++) {
        sample(step, s->ids);
        XD_TRY(step_once(ctx, vocab, s, &kl));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (xd_comm_rank(tp) == 0 && step % 20 == 0) printf("step %2d   KL %.4f\n", step, kl);
    }
    if (xd_comm_rank(tp) == 0) *(double *)last = kl;
    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

int main(void) {
    xd_error error;
    double kl = 1.0;
    if (xd_run_threads(RANKS, NULL, run_rank, &kl, &error) == XD_OK) return kl < 0.5 ? 0 : 1;
    fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
    return 1;
}
