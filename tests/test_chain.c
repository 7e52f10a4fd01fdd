/* What one call gives the next one takes: from log-probabilities to estimates to weights of rows to gradients, and from a
 * teacher's selection to a top-k loss, without a conversion in between. */

#include "xd_test.h"
#include "xdistill.h"
#include "vocab_calls.h"
#include "softmax_calls.h"

#include <math.h>
#include <string.h>

enum { TOKENS = 5, VOCAB = 13, K = 4, RANKS = 2 };

/* Every rank's columns of whole rows. */
typedef struct shard {
    xd_ctx *ctx;
    xd_vocab *vocab;
    xd_interval columns;
    float student[TOKENS * VOCAB], reference[TOKENS * VOCAB], gradient[TOKENS * VOCAB];
} shard;

static float whole(int side, int64_t token, int64_t id) {
    return (float)(2.0 * sin((double)(3 * token + 5 * id + 7 * side)));
}

static xd_rows rows_of(const shard *s, float *data) {
    return xd_rows_of(data, XD_DTYPE_F32, TOKENS, s->columns.end - s->columns.begin);
}

static void shard_open(shard *s, xd_comm *world) {
    const int64_t size = VOCAB;
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    s->columns = xd_chunk(size, xd_comm_size(world), xd_comm_rank(world));
    CHECK(vocab_of(s->ctx, world, s->columns, size, &s->vocab) == XD_OK);
    const int64_t width = s->columns.end - s->columns.begin;
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t c = 0; c < width; c++) {
            s->student[t * width + c] = whole(0, t, s->columns.begin + c);
            s->reference[t * width + c] = whole(1, t, s->columns.begin + c);
        }
}

/* ---- sampled tokens ---- */

static const int32_t sampled[TOKENS] = { 4, 0, 12, 7, 9 };
static const float importance[TOKENS] = { 1.0f, 0.5f, 0.0f, 2.0f, 1.5f };

/* The sum of the estimates with one student logit moved, in double, from nothing of the library. */
static double estimated(int64_t token, int64_t id, double by) {
    double sum = 0.0;
    for (int64_t t = 0; t < TOKENS; t++) {
        double total[2] = { 0.0, 0.0 }, at[2];
        for (int side = 0; side < 2; side++)
            for (int64_t v = 0; v < VOCAB; v++) {
                const double x = (double)whole(side, t, v) + (side == 0 && t == token && v == id ? by : 0.0);
                total[side] += exp(x);
                if (v == sampled[t]) at[side] = x;
            }
        const double rho = (at[1] - log(total[1])) - (at[0] - log(total[0]));
        sum += (double)importance[t] * (exp(rho) - 1.0 - rho);
    }
    return sum;
}

/* The penalty of a policy gradient: its value, its gradient, and as weights of a cross entropy. */
static xd_result penalty(xd_comm *world, void *argument) {
    const xd_ids ids = xd_ids_of(sampled, XD_DTYPE_I32);
    float student[TOKENS], reference[TOKENS], values[TOKENS], slopes[TOKENS], row_loss[TOKENS];
    double sum = 0.0;
    shard s;
    (void)argument;
    shard_open(&s, world);
    const xd_rows x = rows_of(&s, s.student), g = rows_of(&s, s.gradient);
    CHECK(softmax_at_ids(s.ctx, s.vocab, x, 1.0, ids, student) == XD_OK);
    CHECK(softmax_at_ids(s.ctx, s.vocab, rows_of(&s, s.reference), 1.0, ids, reference) == XD_OK);
    const xd_kl_estimate_desc d = { .logprobs = student,
                                    .reference = reference,
                                    .weight = importance,
                                    .count = TOKENS,
                                    .kind = XD_KL_K3,
                                    .values = values,
                                    .gradient = slopes };
    CHECK(xd_kl_estimate(s.ctx, &d, &sum) == XD_OK);
    CHECK_NEAR(sum, estimated(0, 0, 0.0), 1e-5);
    CHECK(softmax_at_ids_backward(s.ctx, s.vocab, x, 1.0, ids, slopes, g) == XD_OK);
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t id = s.columns.begin; id < s.columns.end; id++) {
            const double slope = (estimated(t, id, 1e-5) - estimated(t, id, -1e-5)) / 2e-5;
            CHECK_NEAR((double)s.gradient[t * g.cols + id - s.columns.begin], slope, 2e-5);
        }
    xd_loss_values loss;
    const xd_loss_desc ce = { .student = x,
                              .vocab = s.vocab,
                              .hard_weight = 1.0,
                              .common.labels = ids,
                              .common.row_weight = values,
                              .common.row_loss = row_loss,
                              .common.denominator_value = 1.0 };
    double expected = 0.0;
    for (int t = 0; t < TOKENS; t++) expected -= (double)values[t] * (double)student[t];
    CHECK(xd_loss(s.ctx, &ce, &loss) == XD_OK);
    CHECK_NEAR(loss.loss, expected, 1e-5 * fabs(expected));
    for (int t = 0; t < TOKENS; t++) CHECK_NEAR((double)(row_loss[t] + student[t]), 0.0, 1e-6);
    xd_vocab_destroy(s.vocab);
    return XD_OK;
}

XD_TEST(log_probabilities_become_estimates_weights_and_gradients) {
    for (int ranks = 1; ranks <= RANKS; ranks++)
        CHECK(xd_run_threads(ranks, NULL, penalty, NULL, NULL) == XD_OK);
}

/* ---- a teacher's selection ---- */

/* The loss from what a teacher would ship is the loss from its logits. */
static xd_result shipped(xd_comm *world, void *argument) {
    float values[TOKENS * K];
    int64_t ids[TOKENS * K];
    double log_sum_exp[TOKENS];
    xd_loss_values from_logits, from_list;
    shard s;
    (void)argument;
    shard_open(&s, world);
    const xd_rows teacher = rows_of(&s, s.reference);
    CHECK(xd_vocab_topk(s.ctx, s.vocab, teacher, K, values, ids) == XD_OK);
    CHECK(softmax_row_stats(s.ctx, s.vocab, teacher, 2.0, log_sum_exp, NULL) == XD_OK);
    xd_topk_desc d = { .student = rows_of(&s, s.student),
                       .vocab = s.vocab,
                       .k = K,
                       .ids.data = ids,
                       .values = values,
                       .values_kind = XD_TOPK_LOGITS,
                       .log_normaliser = log_sum_exp,
                       .mode = XD_TOPK_TAIL,
                       .temperature = 2.0 };
    CHECK(xd_topk_kl_loss(s.ctx, &d, &from_list) == XD_OK);
    d.values = NULL;
    d.log_normaliser = NULL;
    d.teacher = teacher;
    CHECK(xd_topk_kl_loss(s.ctx, &d, &from_logits) == XD_OK);
    CHECK(from_list.loss > 0.01);
    CHECK_NEAR(from_list.loss, from_logits.loss, 1e-6 * from_logits.loss);
    float again[TOKENS * K]; /* the ids' logits, picked once more, are the same numbers */
    CHECK(softmax_columns(s.ctx, s.vocab, teacher, xd_ids_of(ids, XD_DTYPE_I64), K, K, again) == XD_OK);
    CHECK(memcmp(again, values, sizeof again) == 0);
    xd_vocab_destroy(s.vocab);
    return XD_OK;
}

XD_TEST(a_selection_and_its_statistics_are_what_a_top_k_loss_takes) {
    for (int ranks = 1; ranks <= RANKS; ranks++)
        CHECK(xd_run_threads(ranks, NULL, shipped, NULL, NULL) == XD_OK);
}

XD_TEST_MAIN()
