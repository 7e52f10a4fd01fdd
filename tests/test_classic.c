/* Minimal fine-tuning, cosine, KL estimators and universal logit distillation: sharding, gradients by
 * differences, bad input. Their values are compared with the peers' by the golden vectors. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_test.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 7, VOCAB = 19 };

static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

static void fill(float *values, int count, uint64_t seed) {
    for (int i = 0; i < count; i++) values[i] = (float)(3.0 * uniform(&seed));
}

/* ---- losses over a split vocabulary ---- */

typedef struct whole {
    bool cosine;
    float student[ROWS * VOCAB], teacher[ROWS * VOCAB], gradient[ROWS * VOCAB], terms[ROWS * VOCAB];
    int64_t labels[ROWS];
    double loss;
} whole;

static whole *whole_new(bool cosine) {
    whole *w = (whole *)calloc(1, sizeof *w);
    w->cosine = cosine;
    fill(w->student, ROWS * VOCAB, 1);
    fill(w->teacher, ROWS * VOCAB, 2);
    for (int r = 0; r < ROWS; r++) w->labels[r] = r == 3 ? XD_IGNORE_INDEX : (5 * r) % VOCAB;
    w->teacher[5] = 9.0f; /* of the first row: not the label */
    return w;
}

static xd_result whole_rank(xd_comm *world, void *argument) {
    whole *w = (whole *)argument;
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    const int64_t begin = VOCAB * rank * rank / (ranks * ranks);
    const int64_t end = VOCAB * (rank + 1) * (rank + 1) / (ranks * ranks);
    xd_vocab *vocab = NULL;
    mft_desc d;
    xd_loss_values values;
    XD_TRY(vocab_of(xd_comm_ctx(world), world, (xd_interval){ begin, end }, VOCAB, &vocab));
    d = mft_defaults();
    const xd_rows x = { w->student + begin, XD_DTYPE_F32, ROWS, end - begin, VOCAB };
    d.loss.student = d.loss.teacher = d.loss.common.gradient = d.terms = x;
    d.loss.teacher.data = w->teacher + begin;
    d.loss.common.gradient.data = w->gradient + begin;
    d.terms.data = w->terms + begin;
    d.loss.common.labels = xd_ids_of(w->labels, XD_DTYPE_I64);
    d.loss.vocab = vocab;
    d.loss.temperature = 2.0;
    const xd_result result = w->cosine ? cosine_loss(xd_comm_ctx(world), &d.loss, &values)
                                       : mft_loss(xd_comm_ctx(world), &d, &values);
    if (rank == 0) w->loss = values.loss;
    xd_vocab_destroy(vocab);
    return result;
}

static void whole_run(whole *w, int ranks) {
    CHECK_EQ_INT(xd_run_threads(ranks, NULL, whole_rank, w, NULL), XD_OK);
}

XD_TEST(every_split_of_the_vocabulary_gives_the_loss_of_one_rank) {
    for (int cosine = 0; cosine < 2; cosine++) {
        whole *one = whole_new(cosine != 0);
        whole_run(one, 1);
        CHECK(one->loss > 0.0);
        for (int ranks = 2; ranks <= 5; ranks++) {
            whole *w = whole_new(cosine != 0);
            whole_run(w, ranks);
            CHECK(fabs(w->loss - one->loss) <= 1e-6 * one->loss);
            for (int i = 0; i < ROWS * VOCAB; i++) {
                CHECK(fabsf(w->gradient[i] - one->gradient[i]) <= 1e-6f);
                CHECK(fabsf(w->terms[i] - one->terms[i]) <= 1e-5f);
            }
            free(w);
        }
        free(one);
    }
}

XD_TEST(gradients_are_slopes_of_the_loss) {
    for (int cosine = 0; cosine < 2; cosine++) {
        whole *w = whole_new(cosine != 0);
        whole_run(w, 1);
        float *gradient = (float *)malloc(sizeof w->gradient);
        memcpy(gradient, w->gradient, sizeof w->gradient);
        for (int i = 0; i < ROWS * VOCAB; i += 11) {
            const float middle = w->student[i];
            w->student[i] = middle + 0.01f;
            const float right = w->student[i];
            whole_run(w, 1);
            const double high = w->loss;
            w->student[i] = middle - 0.01f;
            whole_run(w, 1);
            const double slope = (high - w->loss) / ((double)right - (double)w->student[i]);
            w->student[i] = middle;
            CHECK(fabs(slope - (double)gradient[i]) < 2e-4);
        }
        free(gradient);
        free(w);
    }
}

XD_TEST(minimal_fine_tuning_refuses_what_it_cannot_do) {
    whole *w = whole_new(false);
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    mft_desc d;
    xd_loss_values values = { 7.0, 0.0, 0.0, 0 };
    d = mft_defaults();
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(vocab_even(ctx, NULL, VOCAB, &vocab), XD_OK);
    const xd_rows x = { w->student, XD_DTYPE_F32, ROWS, VOCAB, 0 };
    d.loss.student = d.loss.teacher = x;
    d.loss.vocab = vocab;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "no labels") != NULL);
    d.loss.common.labels = xd_ids_of(w->labels, XD_DTYPE_I64);
    d.threshold = 1.5;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "threshold 1.5") != NULL);
    d.threshold = 0.0;
    d.terms = x;
    d.terms.rows = ROWS - 1;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "[6, 19], the student's logits [7, 19]") != NULL);
    memset(&d.terms, 0, sizeof d.terms);
    w->labels[0] = VOCAB;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_ERROR_DATA);
    w->labels[0] = 0;
    w->student[VOCAB] = (float)NAN;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_ERROR_DATA);
    CHECK(values.loss == 7.0);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    free(w);
}

/* ---- KL estimators ---- */

XD_TEST(estimators_clamp_the_input_and_by_default_nothing_else) {
    float logprobs[] = { -1.0f, -1.0f, -40.0f }, reference[] = { -1.5f, -0.25f, -1.0f };
    float values[3], gradient[3];
    const float weight[] = { 1.0f, 2.0f, 1.0f };
    double sum = 0.0;
    xd_ctx *ctx = NULL;
    xd_kl_estimate_desc d;
    memset(&d, 0, sizeof d);
    d.logprobs = logprobs;
    d.reference = reference;
    d.weight = weight;
    d.count = 3;
    d.values = values;
    d.gradient = gradient;
    d.input_clamp = 20.0;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_kl_estimate(ctx, &d, &sum), XD_OK);
    CHECK(values[0] == 0.5f && values[1] == -0.75f && values[2] == -20.0f);
    CHECK(gradient[0] == 1.0f && gradient[1] == 2.0f && gradient[2] == 0.0f && sum == 0.5 - 1.5 - 20.0);
    d.kind = XD_KL_K2;
    d.output_clamp = 10.0;
    CHECK_EQ_INT(xd_kl_estimate(ctx, &d, &sum), XD_OK);
    CHECK(values[0] == 0.125f && values[2] == 10.0f && gradient[0] == 0.5f && gradient[2] == 0.0f);
    d.input_clamp = -1.0;
    CHECK_EQ_INT(xd_kl_estimate(ctx, &d, &sum), XD_ERROR_ARGUMENT);
    d.input_clamp = d.output_clamp = 0.0; /* not at all */
    CHECK_EQ_INT(xd_kl_estimate(ctx, &d, &sum), XD_OK);
    CHECK(values[2] == 760.5f && gradient[2] == -39.0f);
    logprobs[1] = (float)NAN;
    CHECK_EQ_INT(xd_kl_estimate(ctx, &d, &sum), XD_ERROR_DATA);
    CHECK(strstr(xd_last_error(ctx)->message, "token 1") != NULL);
    xd_ctx_destroy(ctx);
}

/* ---- universal logit distillation ---- */

enum { TOKENS = 6, OTHER = 13 };

typedef struct pair {
    float student[TOKENS * VOCAB], teacher[TOKENS * OTHER], gradient[TOKENS * VOCAB];
    int64_t ids[TOKENS], other_ids[TOKENS], matched[2][3];
    xd_aligned_chunk chunks[3];
    xd_uld_desc d;
} pair;

static pair *pair_new(xd_uld_merge merge) {
    static const int32_t bounds[3][4] = { { 1, 2, 1, 3 }, { 2, 4, 3, 4 }, { 5, 6, 4, 6 } };
    pair *p = (pair *)calloc(1, sizeof *p);
    fill(p->student, TOKENS * VOCAB, 3);
    fill(p->teacher, TOKENS * OTHER, 4);
    for (int t = 0; t < TOKENS; t++) {
        p->ids[t] = (4 * t + 1) % VOCAB;
        p->other_ids[t] = (3 * t + 2) % OTHER;
    }
    for (int i = 0; i < 3; i++) {
        p->chunks[i].student_begin = bounds[i][0];
        p->chunks[i].student_end = bounds[i][1];
        p->chunks[i].teacher_begin = bounds[i][2];
        p->chunks[i].teacher_end = bounds[i][3];
        p->matched[0][i] = 2 * i;
        p->matched[1][i] = 3 * i + 1;
    }
    const xd_rows x = { p->student, XD_DTYPE_F32, TOKENS, VOCAB, 0 },
                  y = { p->teacher, XD_DTYPE_F32, TOKENS, OTHER, 0 };
    p->d.student.logits = p->d.gradient = x;
    p->d.student.vocabulary = VOCAB;
    p->d.student.ids = p->ids;
    p->d.teacher.logits = y;
    p->d.teacher.vocabulary = OTHER;
    p->d.teacher.ids = p->other_ids;
    p->d.chunks = p->chunks;
    p->d.chunk_count = 3;
    p->d.merge = merge;
    p->d.scale = 1.0;
    p->d.matched_student = p->matched[0];
    p->d.matched_teacher = p->matched[1];
    p->d.matched_count = 3;
    p->d.matched_weight = 0.4;
    p->d.unmatched_weight = 0.6;
    p->d.beta = 0.3;
    p->d.gradient.data = p->gradient;
    return p;
}

XD_TEST(sorted_losses_have_the_slopes_they_say_also_in_place) {
    for (int merge = 0; merge < 2; merge++) {
        pair *p = pair_new((xd_uld_merge)merge);
        xd_ctx *ctx = NULL;
        xd_ctx_desc desc;
        xd_uld_values values, high, low;
        memset(&desc, 0, sizeof desc);
        desc.cpu = XD_CPU_PLAIN; /* differences want double */
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &values), XD_OK);
        CHECK_EQ_INT(values.chunks, 3);
        float gradient[TOKENS * VOCAB];
        memcpy(gradient, p->gradient, sizeof gradient);
        for (int i = 0; i < TOKENS * VOCAB; i += 5) {
            const float middle = p->student[i];
            p->student[i] = middle + 1e-3f;
            const float right = p->student[i];
            CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &high), XD_OK);
            p->student[i] = middle - 1e-3f;
            CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &low), XD_OK);
            const double slope = (high.loss - low.loss) / ((double)right - (double)p->student[i]);
            p->student[i] = middle;
            CHECK(fabs(slope - (double)gradient[i]) < 1e-4);
        }
        p->d.gradient.data = p->student;
        CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &high), XD_OK);
        CHECK(high.loss == values.loss && memcmp(p->student, gradient, sizeof gradient) == 0);
        xd_ctx_destroy(ctx);
        free(p);
    }
}

XD_TEST(sorted_losses_refuse_ids_and_chunks_that_cannot_be) {
    pair *p = pair_new(XD_ULD_BAYESIAN);
    xd_ctx *ctx = NULL;
    xd_uld_values values;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    p->chunks[0].student_begin = 0; /* the first token has no row before it */
    CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "chunk 0, [0, 2)") != NULL);
    p->chunks[0].student_begin = 1;
    p->chunks[1].teacher_begin = 2; /* overlaps the one before */
    CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &values), XD_ERROR_ARGUMENT);
    p->chunks[1].teacher_begin = 3;
    p->matched[1][2] = OTHER;
    CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &values), XD_ERROR_ARGUMENT);
    p->matched[1][2] = 0;
    p->ids[4] = -1;
    CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "student token 4 has id -1 of a vocabulary of 19") != NULL);
    p->ids[4] = 0;
    p->d.student.temperature = -1.0;
    CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &values), XD_ERROR_ARGUMENT);
    p->d.student.temperature = 0.0;
    p->teacher[2 * OTHER] = (float)NAN;
    CHECK_EQ_INT(xd_uld_loss(ctx, &p->d, &values), XD_ERROR_DATA);
    xd_ctx_destroy(ctx);
    free(p);
}

XD_TEST_MAIN()
