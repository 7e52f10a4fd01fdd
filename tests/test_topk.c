/* Top-k losses, selection, softmax statistics, the next-token shift. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "planned.h"
#include "xd_test.h"
#include "xd_test_cpu.h"
#include "softmax_calls.h"

#include <stdlib.h>

enum { ROWS = 5, VOCAB = 11, K = 4 };

typedef struct fixture {
    xd_ctx *ctx;
    xd_vocab *vocab;
    float student[ROWS * VOCAB], teacher[ROWS * VOCAB], gradient[ROWS * VOCAB], values[ROWS * K];
    float row_loss[ROWS], student_mass[ROWS], teacher_mass[ROWS];
    int64_t ids[ROWS * K];
    xd_status status;
    xd_topk_desc desc;
} fixture;

static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

static xd_rows rows_of(float *data, int64_t rows, int64_t cols) {
    xd_rows r;
    r.data = data;
    r.dtype = XD_DTYPE_F32;
    r.rows = rows;
    r.cols = cols;
    r.stride = 0;
    return r;
}

static void fixture_open(fixture *f) {
    xd_ctx_desc desc;
    uint64_t state = 3;
    memset(f, 0, sizeof *f);
    memset(&desc, 0, sizeof desc);
    desc.cpu = xd_test_cpu();
    CHECK(xd_ctx_create(&desc, &f->ctx) == XD_OK);
    CHECK(vocab_even(f->ctx, NULL, VOCAB, &f->vocab) == XD_OK);
    for (int i = 0; i < ROWS * VOCAB; i++) {
        f->student[i] = (float)(2.0 * uniform(&state));
        f->teacher[i] = (float)(2.0 * uniform(&state));
    }
    for (int i = 0; i < ROWS * K; i++) {
        f->ids[i] = (i / K + 3 * (i % K)) % VOCAB;
        f->values[i] = (float)(-1.5 - 0.2 * (i % K) - 0.05 * (i / K));
    }
    f->values[K + 1] = -INFINITY; /* absent: its id is not read */
    f->ids[K + 1] = -7;
    f->desc.student = rows_of(f->student, ROWS, VOCAB);
    f->desc.common.gradient = rows_of(f->gradient, ROWS, VOCAB);
    f->desc.vocab = f->vocab;
    f->desc.k = K;
    f->desc.ids = xd_ids_of(f->ids, XD_DTYPE_I64);
    f->desc.values = f->values;
    f->desc.common.row_loss = f->row_loss;
    f->desc.student_mass = f->student_mass;
    f->desc.teacher_mass = f->teacher_mass;
    f->desc.common.status = &f->status;
}

static void fixture_close(fixture *f) {
    xd_vocab_destroy(f->vocab);
    xd_ctx_destroy(f->ctx);
}

static double loss_of(fixture *f) {
    xd_loss_values values = { 0.0, 0.0, 0.0, 0 };
    CHECK(xd_topk_kl_loss(f->ctx, &f->desc, &values) == XD_OK);
    return values.loss;
}

static void check_gradient(fixture *f) {
    float gradient[ROWS * VOCAB];
    loss_of(f);
    memcpy(gradient, f->gradient, sizeof gradient);
    f->desc.common.gradient.data = NULL;
    for (int i = 0; i < ROWS * VOCAB; i++) {
        const float x = f->student[i], step = 1.0f / 512;
        f->student[i] = x + step;
        const double above = loss_of(f);
        f->student[i] = x - step;
        const double below = loss_of(f);
        f->student[i] = x;
        CHECK_NEAR(gradient[i], (above - below) / (2.0 / 512),
                   2e-5 + 1e-5 * fabs((double)gradient[i]) + xd_test_f32(0.0, 256.0 * above));
    }
    CHECK(xd_status_check(f->ctx, &f->status) == XD_OK);
}

XD_TEST(top_k_gradients_equal_finite_differences) {
    static const xd_divergence kinds[4] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_KL_MIXED, XD_JSD };
    for (int mode = 0; mode < 4; mode++)
        for (int kind = 0; kind < 4; kind++)
            for (int own = 0; own < 2; own++) {
                fixture f;
                fixture_open(&f);
                f.desc.mode = (xd_topk_mode)mode;
                f.desc.divergence = kinds[kind];
                f.desc.beta = 0.3;
                if (own) { /* teacher logits at given ids, temperature on both sides */
                    f.desc.values = NULL;
                    f.desc.teacher = rows_of(f.teacher, ROWS, VOCAB);
                    f.ids[K + 1] = 5;
                    f.desc.temperature = 1.5;
                    f.desc.temperature_factor = XD_TEMPERATURE_FACTOR_SQUARED;
                }
                if (f.desc.mode == XD_TOPK_ZERO_OUTSIDE && kinds[kind] == XD_JSD) {
                    xd_loss_values unused;
                    CHECK(xd_topk_kl_loss(f.ctx, &f.desc, &unused) == XD_ERROR_UNSUPPORTED);
                } else {
                    check_gradient(&f);
                }
                fixture_close(&f);
            }
}

XD_TEST(all_ids_make_the_whole_loss) {
    static const xd_divergence kinds[3] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD };
    for (int kind = 0; kind < 3; kind++)
        for (int mode = 0; mode < 3; mode++) {
            fixture f;
            xd_loss_desc full;
            xd_loss_values values;
            float expected[ROWS * VOCAB];
            if (mode == (int)XD_TOPK_TAIL) continue; /* its floor of 1e-7 is one entry more */
            fixture_open(&f);
            memset(&full, 0, sizeof full);
            full.student = f.desc.student;
            full.teacher = f.desc.teacher = rows_of(f.teacher, ROWS, VOCAB);
            full.common.gradient = rows_of(expected, ROWS, VOCAB);
            full.vocab = f.vocab;
            full.soft_weight = 1.0;
            full.beta = f.desc.beta = 0.5;
            full.divergence = f.desc.divergence = kinds[kind];
            CHECK(xd_loss(f.ctx, &full, &values) == XD_OK);
            f.desc.values = NULL;
            f.desc.ids.data = NULL;
            f.desc.k = VOCAB;
            f.desc.mode = (xd_topk_mode)mode;
            CHECK_NEAR(loss_of(&f), values.loss, xd_test_f32(1e-13, 1.0));
            for (int i = 0; i < ROWS * VOCAB; i++)
                CHECK_NEAR(f.gradient[i], expected[i], xd_test_f32(1e-8, 1.0));
            for (int r = 0; r < ROWS; r++) CHECK_NEAR(f.student_mass[r], 1.0, 1e-7);
            fixture_close(&f);
        }
}

/* ---- what holds the mass outside the ids ---- */

XD_TEST(a_mode_of_0_is_the_tail) {
    xd_loss_values values;
    fixture f;
    fixture_open(&f);
    CHECK_EQ_INT(XD_TOPK_TAIL, 0);
    const double unset = loss_of(&f);
    f.desc.mode = XD_TOPK_TAIL;
    CHECK(loss_of(&f) == unset);
    f.desc.mode = XD_TOPK_RENORMALISE;
    CHECK(fabs(loss_of(&f) - unset) > 1e-3);
    /* Logits alone do not tell it: the default refuses them, as TRUNCATE does, and the modes that do not read it take them. */
    f.desc.values_kind = XD_TOPK_LOGITS;
    static const char *const refused[] = { "mode TAIL needs the teacher's mass outside the ids", NULL,
                                           "mode TRUNCATE needs the teacher's mass outside the ids", NULL };
    for (int mode = 0; mode < 4; mode++) {
        f.desc.mode = (xd_topk_mode)mode;
        CHECK_EQ_INT(xd_topk_kl_loss(f.ctx, &f.desc, &values), refused[mode] ? XD_ERROR_ARGUMENT : XD_OK);
        if (refused[mode]) CHECK(strstr(xd_last_error(f.ctx)->message, refused[mode]) != NULL);
    }
    double log_sums[ROWS] = { 0 };
    f.desc.mode = (xd_topk_mode)0;
    f.desc.log_normaliser = log_sums; /* then logits are log-probabilities */
    CHECK(loss_of(&f) == unset);
    fixture_close(&f);
}

/* Two students, of which the second has e^3 as much on the ids as the first, follow the gradient of one loss. Their masses on
 * the ids in the end. */
static void follow(xd_topk_mode mode, xd_divergence divergence, double *masses) {
    fixture f;
    fixture_open(&f);
    for (int r = 0; r < 2; r++) {
        for (int c = 0; c < VOCAB; c++) f.student[r * VOCAB + c] = 0.1f * (float)c;
        for (int j = 0; j < K; j++) f.ids[r * K + j] = 2 * j + 1;
        for (int j = 0; j < K; j++) f.values[r * K + j] = logf(0.06f + 0.1f * (float)j); /* together 0.84 */
        for (int j = 0; j < K && r; j++) f.student[r * VOCAB + f.ids[r * K + j]] += 3.0f;
    }
    f.desc.student.rows = f.desc.common.gradient.rows = 2;
    f.desc.mode = mode;
    f.desc.divergence = divergence;
    f.desc.beta = 0.5;
    for (int step = 0; step < 400; step++) {
        loss_of(&f);
        for (int i = 0; i < 2 * VOCAB; i++)
            f.student[i] -= 8.0f * f.gradient[i]; /* 4 a row: the mean is of two */
    }
    for (int r = 0; r < 2; r++) masses[r] = (double)f.student_mass[r];
    fixture_close(&f);
}

XD_TEST(the_optimum_of_a_mode_has_the_mass_that_its_comment_tells) {
    double masses[2];
    static const xd_divergence kinds[] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD };
    for (int kind = 0; kind < 3; kind++) {
        follow(XD_TOPK_TAIL, kinds[kind], masses);
        for (int r = 0; r < 2; r++) CHECK_NEAR(masses[r], 0.84, 0.02);
        follow(XD_TOPK_RENORMALISE, kinds[kind],
               masses); /* both are at 0 loss, far from each other and from 0.84 */
        CHECK(masses[0] < 0.5 && masses[1] > 0.9);
    }
    follow(XD_TOPK_TRUNCATE, XD_KL_FORWARD, masses);
    for (int r = 0; r < 2; r++) CHECK(masses[r] > 0.99);
    follow(XD_TOPK_TRUNCATE, XD_KL_REVERSE, masses);
    for (int r = 0; r < 2; r++) CHECK_NEAR(masses[r], 0.84 / exp(1.0), 0.02);
    follow(XD_TOPK_TRUNCATE, XD_JSD, masses);
    for (int r = 0; r < 2; r++) CHECK_NEAR(masses[r], 0.84, 0.02);
    for (int kind = 0; kind < 2; kind++) {
        follow(XD_TOPK_ZERO_OUTSIDE, kinds[kind], masses);
        for (int r = 0; r < 2; r++) CHECK(masses[r] > 0.99);
    }
}

XD_TEST(masses_are_reported) {
    fixture f;
    fixture_open(&f);
    f.desc.mode = XD_TOPK_TAIL;
    loss_of(&f);
    for (int r = 0; r < ROWS; r++) {
        double inside = 0.0, total = 0.0, teacher = 0.0;
        for (int c = 0; c < VOCAB; c++) total += exp((double)f.student[r * VOCAB + c]);
        for (int j = 0; j < K; j++) {
            if (f.values[r * K + j] == -INFINITY) continue;
            inside += exp((double)f.student[r * VOCAB + f.ids[r * K + j]]);
            teacher += exp((double)f.values[r * K + j]);
        }
        CHECK_NEAR(f.student_mass[r], inside / total, 1e-6);
        CHECK_NEAR(f.teacher_mass[r], teacher, 1e-6);
    }
    fixture_close(&f);
}

XD_TEST(bad_ids_are_data_errors_and_empty_rows_are_zero) {
    fixture f;
    fixture_open(&f);
    f.ids[0] = VOCAB;        /* outside */
    f.ids[K + 1] = f.ids[K]; /* twice, but absent: fine */
    f.ids[2 * K + 1] = f.ids[2 * K];
    f.ids[3 * K] = -1; /* present and negative */
    for (int j = 0; j < K; j++) f.values[4 * K + j] = -INFINITY;
    f.desc.mode = XD_TOPK_TAIL;
    CHECK(isfinite(loss_of(&f)));
    CHECK_EQ_INT(f.status.label_out_of_range, 3);
    CHECK_EQ_INT(f.status.not_finite, 0);
    for (int r = 0; r < ROWS; r++) CHECK((f.row_loss[r] == 0.0f) == (r != 1));
    for (int c = 0; c < VOCAB; c++) CHECK(f.gradient[c] == 0.0f && f.gradient[4 * VOCAB + c] == 0.0f);
    fixture_close(&f);
}

XD_TEST(a_workspace_of_the_queried_size_is_enough_and_a_smaller_one_is_refused) {
    fixture f;
    xd_loss_values values;
    fixture_open(&f);
    for (int own = 0; own < 2; own++) { /* the student's own ids take more */
        f.desc.common.workspace = NULL;
        if (own) {
            f.desc.teacher = f.desc.student;
            f.desc.ids.data = NULL;
            f.desc.values = NULL;
        }
        const double loss = loss_of(&f);
        const size_t bytes = PLANNED_WORKSPACE(f.ctx, xd_topk_kl_loss(f.ctx, &f.desc, &values));
        f.desc.common.workspace = malloc(bytes);
        f.desc.common.workspace_bytes = bytes;
        CHECK(loss_of(&f) == loss);
        f.desc.common.workspace_bytes = bytes - 1;
        CHECK(xd_topk_kl_loss(f.ctx, &f.desc, &values) == XD_ERROR_ARGUMENT);
        free(f.desc.common.workspace);
    }
    fixture_close(&f);
}

XD_TEST(log_probabilities_of_another_temperature_are_refused) {
    fixture f;
    xd_loss_values values;
    fixture_open(&f);
    f.desc.temperature = 2.0;
    CHECK(xd_topk_kl_loss(f.ctx, &f.desc, &values) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "temperature 1 but the loss is at 2") != NULL);
    f.desc.temperature = 0.0;
    f.desc.k = VOCAB + 1;
    CHECK(xd_topk_kl_loss(f.ctx, &f.desc, &values) == XD_ERROR_ARGUMENT);
    fixture_close(&f);
}

/* Four ranks with 3, 0, 1 and 7 of the eleven columns. */
static void shard_columns(int rank, int64_t *begin, int64_t *end) {
    static const int64_t offsets[5] = { 0, 3, 3, 4, VOCAB };
    *begin = offsets[rank];
    *end = offsets[rank + 1];
}

static xd_result selection_rank(xd_comm *world, void *argument) {
    static const int64_t labels[2] = { 2, 5 };
    float *whole = (float *)argument, mine[2 * VOCAB], out[2 * VOCAB], importance[2 * VOCAB];
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab = NULL;
    int64_t begin, end, ids[2 * 6], argmax[2], columns[2 * 6];
    double log_sum[2], accuracy = -1.0;
    float values[2 * 6], log_probs[2];
    shard_columns(xd_comm_rank(world), &begin, &end);
    CHECK(vocab_of(ctx, world, (xd_interval){ begin, end }, VOCAB, &vocab) == XD_OK);
    for (int r = 0; r < 2; r++)
        for (int64_t c = begin; c < end; c++) mine[r * (end - begin) + c - begin] = whole[r * VOCAB + c];
    const xd_rows rows = rows_of(mine, 2, end - begin);
    CHECK(xd_vocab_topk(ctx, vocab, rows, 6, values, ids) == XD_OK);
    static const int64_t expected[12] = { 2, 5, 9, 0, 4, 10, 7, 0, 1, 2, 3, 4 };
    for (int i = 0; i < 12; i++) CHECK_EQ_INT(ids[i], expected[i]);
    CHECK(softmax_row_stats(ctx, vocab, rows, 0.5, log_sum, argmax) == XD_OK);
    CHECK_EQ_INT(argmax[0], 2);
    CHECK_EQ_INT(argmax[1], 7);
    CHECK(softmax_at_ids(ctx, vocab, rows, 0.5, xd_ids_of(labels, XD_DTYPE_I64), log_probs) == XD_OK);
    CHECK(softmax_all(ctx, vocab, rows, 0.5, rows_of(out, 2, end - begin)) == XD_OK);
    for (int r = 0; r < 2; r++) {
        double total = 0.0;
        for (int c = 0; c < VOCAB; c++) total += exp(2.0 * (double)whole[r * VOCAB + c]);
        CHECK_NEAR(log_sum[r], log(total), 1e-6); /* tiles are summed in f32 */
        CHECK_NEAR((double)log_probs[r], 2.0 * (double)whole[r * VOCAB + labels[r]] - log(total), 1e-6);
        for (int64_t c = begin; c < end; c++)
            CHECK_NEAR(out[r * (end - begin) + c - begin], 2.0 * (double)whole[r * VOCAB + c] - log(total),
                       1e-6);
    }
    xd_positions positions;
    memset(&positions, 0, sizeof positions);
    positions.count = 2;
    positions.labels = xd_ids_of(labels, XD_DTYPE_I64);
    CHECK(softmax_accuracy(ctx, vocab, rows, &positions, NULL, &accuracy) == XD_OK);
    CHECK_NEAR(accuracy, 0.5, 0);
    CHECK(softmax_columns(ctx, vocab, rows, xd_ids_of(labels, XD_DTYPE_I64), 2, 0, values) == XD_OK);
    CHECK(values[0] == whole[2] && values[3] == whole[VOCAB + 5]);
    xd_vocab_topk_desc choice = vocab_topk_desc(vocab, rows, 0, 6);
    CHECK(vocab_topk_columns(ctx, &choice, columns, importance) == XD_OK);
    static const int64_t chosen[6] = { 0, 2, 4, 5, 7, 9 };
    for (int i = 0; i < 6; i++) CHECK_EQ_INT(columns[i], chosen[i]);
    for (int64_t c = begin; c < end; c++) CHECK(importance[c - begin] == fmaxf(whole[c], whole[VOCAB + c]));
    choice.sequences = 2; /* each row is a sequence, and chooses its own */
    CHECK(vocab_topk_columns(ctx, &choice, columns, importance) == XD_OK);
    static const int64_t each[12] = { 0, 2, 4, 5, 9, 10, 0, 1, 2, 3, 4, 7 };
    for (int i = 0; i < 12; i++) CHECK_EQ_INT(columns[i], each[i]);
    CHECK(memcmp(importance, mine, (size_t)(2 * (end - begin)) * sizeof *mine) == 0);
    choice.sequences = 3;
    CHECK(vocab_topk_columns(ctx, &choice, columns, NULL) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "2 rows for 3 sequences"));
    xd_vocab_destroy(vocab);
    return XD_OK;
}

XD_TEST(selection_and_statistics_over_uneven_shards) {
    float whole[2 * VOCAB] = { 2, 1, 9, -1, 2, 9, 0, 1, -3, 5, 2 }; /* ties: 2 and 5; 0, 4 and 10 */
    for (int c = 0; c < VOCAB; c++) whole[VOCAB + c] = c == 7 ? 3.0f : 1.0f;
    CHECK(xd_run_threads(4, NULL, selection_rank, whole, NULL) == XD_OK);
}

XD_TEST(labels_follow_any_list_of_positions) {
    xd_ctx *ctx = NULL;
    xd_shift_desc d;
    int64_t ids[16], positions[4], labels[8];
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int i = 0; i < 16; i++) ids[i] = 100 + i;
    memset(&d, 0, sizeof d);
    d.sequences = 2;
    d.length = 8;
    d.held = 4;
    d.ids = xd_ids_of(ids, XD_DTYPE_I64);
    d.positions = positions;
    CHECK(xd_load_balanced_positions(ctx, 8, 0, 2, positions) == XD_OK);
    CHECK(xd_next_token_labels(ctx, &d, labels) == XD_OK);
    static const int64_t expected[8] = { 101, 102, 107, XD_IGNORE_INDEX, 109, 110, 115, XD_IGNORE_INDEX };
    for (int i = 0; i < 8; i++) CHECK_EQ_INT(labels[i], expected[i]);
    CHECK(xd_load_balanced_positions(ctx, 6, 0, 2, positions) == XD_ERROR_SHAPE);
    positions[1] = 8;
    CHECK(xd_next_token_labels(ctx, &d, labels) == XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

static xd_result shift_rank(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    int64_t positions[4], ids[8], labels[8];
    uint8_t mask[8];
    xd_shift_desc d;
    (void)argument;
    CHECK(xd_load_balanced_positions(ctx, 12, rank, 3, positions) == XD_OK);
    for (int i = 0; i < 8; i++) {
        ids[i] = 1000 * (i / 4) + positions[i % 4];
        mask[i] = positions[i % 4] != 6;
    }
    memset(&d, 0, sizeof d);
    d.sequences = 2;
    d.length = 12;
    d.positions = positions;
    d.held = 4;
    d.ids = xd_ids_of(ids, XD_DTYPE_I64);
    d.mask = mask;
    d.comm = world;
    CHECK(xd_next_token_labels(ctx, &d, labels) == XD_OK);
    for (int i = 0; i < 8; i++) {
        const int64_t next = positions[i % 4] + 1;
        CHECK_EQ_INT(labels[i], next == 12 || next == 6 ? XD_IGNORE_INDEX : 1000 * (i / 4) + next);
    }
    positions[0] = 5; /* held twice, or its own position by nobody */
    CHECK(xd_next_token_labels(ctx, &d, labels) == XD_ERROR_SHAPE);
    return XD_OK;
}

XD_TEST(labels_cross_the_ranks_of_a_split_sequence) {
    CHECK(xd_run_threads(3, NULL, shift_rank, NULL, NULL) == XD_OK);
}

/* One sequence of 15 and seven of 3: the words that are exchanged are as many, 45. */
static xd_result misshapen_rank(xd_comm *world, void *argument) {
    const int odd = *(const int *)argument, rank = xd_comm_rank(world);
    int64_t positions[5], ids[35] = { 0 }, labels[35];
    xd_shift_desc d;
    for (int i = 0; i < 5; i++) positions[i] = rank + 3 * i;
    memset(&d, 0, sizeof d);
    d.sequences = rank == odd ? 7 : 1;
    d.length = rank == odd ? 3 : 15;
    d.positions = positions;
    d.held = rank == odd ? 1 : 5;
    d.ids = xd_ids_of(ids, XD_DTYPE_I64);
    d.comm = world;
    for (int i = 0; i < 35; i++) labels[i] = 7;
    CHECK_EQ_INT(xd_next_token_labels(xd_comm_ctx(world), &d, labels), XD_ERROR_MISMATCH);
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    CHECK_EQ_INT(error->culprit, odd);
    CHECK(strstr(error->message, "rank 2 passed count 7, rank 0 passed count 1") != NULL);
    d.sequences = 1; /* then the lengths differ */
    CHECK_EQ_INT(xd_next_token_labels(xd_comm_ctx(world), &d, labels), XD_ERROR_MISMATCH);
    CHECK_EQ_INT(error->culprit, odd);
    CHECK(strstr(error->message, "rank 2 passed count 3, rank 0 passed count 15") != NULL);
    for (int i = 0; i < 35; i++) CHECK_EQ_INT(labels[i], 7);
    return XD_OK;
}

XD_TEST(labels_of_ranks_with_other_shapes_are_refused_though_as_many_words_are_exchanged) {
    int odd = 2;
    CHECK(xd_run_threads(3, NULL, misshapen_rank, &odd, NULL) == XD_OK);
}

/* Ranks 0 and 1 share a vocabulary and have different numbers of rows; 2 and 3 share another, and count for one accuracy. */
static xd_result uneven_rank(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm *tp = NULL, *data = NULL;
    xd_vocab *vocab = NULL;
    float logits[3 * 2] = { 0.0f };
    double accuracy;
    int64_t labels[3] = { 0, 1, 2 }, argmax[3];
    xd_log_probs_desc d;
    (void)argument;
    CHECK(xd_comm_split(world, rank / 2, rank, &tp) == XD_OK);
    CHECK(xd_comm_split(world, rank % 2, rank, &data) == XD_OK);
    CHECK(vocab_even(ctx, tp, 4, &vocab) == XD_OK);
    memset(&d, 0, sizeof d);
    d.vocab = vocab;
    d.logits = rows_of(logits, rank == 1 ? 2 : 3, 2);
    d.counted.count = d.logits.rows;
    d.counted.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d.comm = data;
    d.argmax = argmax;
    d.accuracy = &accuracy;
    CHECK_EQ_INT(xd_log_probs(ctx, &d), rank < 2 ? XD_ERROR_MISMATCH : XD_ERROR_PEER);
    CHECK(xd_barrier(data) == XD_OK); /* no rank is still in the call */
    xd_vocab_destroy(vocab);
    xd_comm_destroy(data);
    xd_comm_destroy(tp);
    return XD_OK;
}

XD_TEST(rows_that_differ_in_one_vocabulary_end_the_call_of_all_ranks_of_an_accuracy) {
    CHECK(xd_run_threads(4, NULL, uneven_rank, NULL, NULL) == XD_OK);
}

/* ---- memory ---- */

static void *counted_allocate(void *user, size_t bytes) {
    ++*(int *)user;
    return malloc(bytes);
}

static void counted_release(void *user, void *memory) {
    --((int *)user)[1];
    free(memory);
}

static void select_and_normalise(xd_ctx *ctx, const xd_vocab *vocab, int64_t rows, int64_t k) {
    enum { WIDE = 600, MANY = 6 };
    static float logits[MANY * WIDE], out[MANY * WIDE];
    static float values[MANY * 40];
    static double log_sum_exp[MANY];
    static int64_t ids[MANY * 40];
    const xd_rows x = { logits, XD_DTYPE_F32, rows, WIDE, 0 }, y = { out, XD_DTYPE_F32, rows, WIDE, 0 };
    for (int i = 0; i < MANY * WIDE; i++) logits[i] = (float)(i * 37 % 101);
    CHECK(xd_vocab_topk(ctx, vocab, x, k, values, ids) == XD_OK);
    CHECK(values[0] == 100.0f);
    const xd_vocab_topk_desc choice = vocab_topk_desc(vocab, x, 1, k);
    CHECK(vocab_topk_columns(ctx, &choice, ids, NULL) == XD_OK);
    CHECK(softmax_row_stats(ctx, vocab, x, 0.0, log_sum_exp, NULL) == XD_OK);
    CHECK(softmax_all(ctx, vocab, x, 0.0, y) == XD_OK);
    CHECK(softmax_columns(ctx, vocab, x, xd_ids_of(ids, XD_DTYPE_I64), k, 0, values) == XD_OK);
}

XD_TEST(the_same_calls_again_allocate_nothing) {
    int counts[2] = { 0, 0 };
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = counted_allocate;
    desc.allocator.release = counted_release;
    desc.allocator.user = counts;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, 600, &vocab) == XD_OK);
    select_and_normalise(ctx, vocab, 6, 40);
    const int before = counts[0];
    for (int i = 0; i < 5; i++) select_and_normalise(ctx, vocab, 6 - i, 40 - i);
    CHECK_EQ_INT(counts[0], before);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    CHECK_EQ_INT(counts[0] + counts[1], 0); /* all of it is given back in the end */
}

XD_TEST_MAIN()
