/* Cross entropy and the KL family on one rank: values, gradients against finite differences, bad input. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "planned.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

#include <stdlib.h>

enum { ROWS = 6, VOCAB = 13, WIDTH = 15 }; /* two columns of padding */

typedef struct fixture {
    xd_ctx *ctx;
    xd_vocab *vocab;
    float student[ROWS * WIDTH], teacher[ROWS * WIDTH], gradient[ROWS * WIDTH], row_loss[ROWS], weight[ROWS];
    int64_t labels[ROWS];
    uint8_t mask[ROWS];
    xd_status status;
    xd_loss_desc desc;
} fixture;

static double uniform(uint64_t *state) { /* in (-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

static xd_rows rows_of(void *data, xd_dtype dtype, int64_t rows, int64_t cols) {
    xd_rows r;
    r.data = data;
    r.dtype = dtype;
    r.rows = rows;
    r.cols = cols;
    r.stride = 0;
    return r;
}

static void fixture_open(fixture *f, xd_reduction reduction) {
    xd_ctx_desc desc;
    uint64_t state = 7;
    memset(f, 0, sizeof *f);
    memset(&desc, 0, sizeof desc);
    desc.reduction = reduction;
    desc.cpu = xd_test_cpu();
    CHECK(xd_ctx_create(&desc, &f->ctx) == XD_OK);
    CHECK(vocab_even(f->ctx, NULL, VOCAB, &f->vocab) == XD_OK);
    for (int i = 0; i < ROWS * WIDTH; i++) {
        f->student[i] = (float)(3.0 * uniform(&state));
        f->teacher[i] = (float)(3.0 * uniform(&state));
        f->gradient[i] = 77.0f;
    }
    for (int r = 0; r < ROWS; r++) {
        f->labels[r] = r == 2 ? XD_IGNORE_INDEX : (r * 5) % VOCAB;
        f->mask[r] = r != 4;
        f->weight[r] = 0.5f + 0.25f * (float)r;
    }
    f->desc.student = rows_of(f->student, XD_DTYPE_F32, ROWS, WIDTH);
    f->desc.teacher = rows_of(f->teacher, XD_DTYPE_F32, ROWS, WIDTH);
    f->desc.common.gradient = rows_of(f->gradient, XD_DTYPE_F32, ROWS, WIDTH);
    f->desc.common.labels = xd_ids_of(f->labels, XD_DTYPE_I64);
    f->desc.common.mask = f->mask;
    f->desc.vocab = f->vocab;
    f->desc.hard_weight = f->desc.soft_weight = 1.0;
    f->desc.beta = 0.5;
    f->desc.common.row_loss = f->row_loss;
    f->desc.common.status = &f->status;
}

static void fixture_close(fixture *f) {
    xd_vocab_destroy(f->vocab);
    xd_ctx_destroy(f->ctx);
}

static double loss_of(fixture *f) {
    xd_loss_values values;
    CHECK(xd_loss(f->ctx, &f->desc, &values) == XD_OK);
    return values.loss;
}

/* Central differences of the value against the gradient, at every element. */
static void check_gradient(fixture *f) {
    float gradient[ROWS * WIDTH];
    const xd_rows keep = f->desc.common.gradient;
    loss_of(f);
    memcpy(gradient, f->gradient, sizeof gradient);
    f->desc.common.gradient.data = NULL;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        const float x = f->student[i], step = 1.0f / 256;
        f->student[i] = x + step;
        const double above = loss_of(f);
        f->student[i] = x - step;
        const double below = loss_of(f);
        f->student[i] = x;
        CHECK_NEAR(gradient[i], (above - below) / (2.0 / 256), 3e-5);
        if (i % WIDTH >= VOCAB) CHECK(gradient[i] == 0.0f);
    }
    f->desc.common.gradient = keep;
    CHECK(xd_status_check(f->ctx, &f->status) == XD_OK);
}

XD_TEST(cross_entropy_is_the_mean_over_counted_rows) {
    fixture f;
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    f.desc.teacher.data = NULL;
    f.desc.soft_weight = 0.0;
    double sum = 0.0;
    for (int r = 0; r < ROWS; r++) {
        double total = 0.0, loss;
        for (int c = 0; c < VOCAB; c++) total += exp((double)f.student[r * WIDTH + c]);
        loss = r == 2 || r == 4 ? 0.0 : log(total) - (double)f.student[r * WIDTH + f.labels[r]];
        sum += loss;
        loss_of(&f);
        f.desc.common.gradient.data = NULL;
        CHECK_NEAR(f.row_loss[r], loss, 1e-6);
    }
    CHECK_NEAR(loss_of(&f), sum / 4, xd_test_f32(1e-12, sum / 4));
    fixture_close(&f);
}

XD_TEST(gradients_equal_finite_differences) {
    static const xd_divergence kinds[4] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD, XD_SOFT_CE };
    static const xd_reduction modes[2] = { XD_REDUCTION_DETERMINISTIC, XD_REDUCTION_INVARIANT };
    for (int mode = 0; mode < 2; mode++)
        for (int kind = 0; kind < 4; kind++)
            for (int variant = 0; variant < 4; variant++) {
                fixture f;
                fixture_open(&f, modes[mode]);
                f.desc.divergence = kinds[kind];
                f.desc.temperature = variant & 1 ? 2.0 : 0.0;
                f.desc.beta = variant & 1 ? 0.3 : 0.5;
                f.desc.hard_weight = variant & 2 ? 0.4 : 1.0;
                f.desc.soft_weight = variant & 2 ? 0.6 : 1.0;
                f.desc.label_smoothing = variant & 2 ? 0.1 : 0.0;
                f.desc.smoothing = mode ? XD_SMOOTHING_MEGATRON : XD_SMOOTHING_TORCH;
                f.desc.common.row_weight = variant & 2 ? f.weight : NULL;
                check_gradient(&f);
                fixture_close(&f);
            }
}

XD_TEST(zero_means_zero) {
    fixture f, kl;
    xd_loss_values values;
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    fixture_open(&kl, XD_REDUCTION_DETERMINISTIC);
    f.desc.divergence = XD_JSD;
    f.desc.beta = 0.0; /* no teacher in the mixture: the forward KL */
    CHECK(loss_of(&f) == loss_of(&kl));
    CHECK(memcmp(f.gradient, kl.gradient, sizeof f.gradient) == 0);
    f.labels[0] = kl.labels[0] = 0; /* an id like any other, also when no ignore_index was given */
    CHECK(loss_of(&f) == loss_of(&kl) && f.row_loss[0] > 0.0f);
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_OK && values.counted == 4);
    f.desc.common.has_ignore_index = true;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_OK && f.row_loss[0] == 0.0f);
    CHECK_EQ_INT(f.status.label_out_of_range, 1); /* -100 is then a wrong id */
    f.desc.hard_weight = f.desc.soft_weight = 0.0;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "hard_weight is 0 and soft_weight 0") != NULL);
    fixture_close(&f);
    fixture_close(&kl);
}

XD_TEST(gradient_may_overwrite_the_student) {
    fixture f;
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    f.desc.divergence = XD_JSD;
    const double loss = loss_of(&f);
    f.desc.common.gradient = f.desc.student;
    CHECK(loss_of(&f) == loss);
    CHECK(memcmp(f.student, f.gradient, sizeof f.student) == 0);
    f.desc.common.gradient.cols = VOCAB;
    xd_loss_values values;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_SHAPE);
    fixture_close(&f);
}

XD_TEST(invariant_values_agree_with_plain_ones) {
    for (int kind = 0; kind < 4; kind++) {
        fixture plain, fixed;
        fixture_open(&plain, XD_REDUCTION_DETERMINISTIC);
        fixture_open(&fixed, XD_REDUCTION_INVARIANT);
        plain.desc.divergence = fixed.desc.divergence = (xd_divergence)kind;
        const double expected = loss_of(&fixed);
        CHECK_NEAR(loss_of(&plain), expected, xd_test_f32(1e-13, expected));
        for (int i = 0; i < ROWS * WIDTH; i++)
            CHECK_NEAR(plain.gradient[i], fixed.gradient[i],
                       xd_test_f32(3e-8, 1.0)); /* f32 on every level in INVARIANT mode */
        fixture_close(&plain);
        fixture_close(&fixed);
    }
}

XD_TEST(equal_distributions_have_no_divergence_and_no_gradient) {
    for (int kind = 0; kind < 3; kind++) {
        fixture f;
        fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
        memcpy(f.teacher, f.student, sizeof f.teacher);
        f.desc.divergence = (xd_divergence)kind;
        f.desc.hard_weight = 0.0;
        f.desc.soft_weight = 1.0;
        CHECK_NEAR(loss_of(&f), 0.0, 1e-15);
        for (int i = 0; i < ROWS * WIDTH; i++) CHECK_NEAR(f.gradient[i], 0.0, 1e-15);
        fixture_close(&f);
    }
}

XD_TEST(nearly_one_hot_rows_keep_their_digits) {
    /* student and teacher agree on id 0 up to 1e-11; the gradient of the reverse KL there is p (r - R),
     * tiny */
    fixture f;
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    for (int i = 0; i < ROWS * WIDTH; i++)
        f.student[i] = f.teacher[i] = i % WIDTH == 0 ? 40.0f : (float)(i % 7);
    f.teacher[3] = 9.0f;
    f.desc.common.labels.data = NULL;
    f.desc.hard_weight = 0.0;
    f.desc.common.denominator_value = 1.0;
    f.desc.divergence = XD_KL_REVERSE;
    loss_of(&f);
    double total = 0.0, mean = 0.0;
    for (int c = 0; c < VOCAB; c++) total += exp((double)f.student[c] - 40.0);
    for (int c = 0; c < VOCAB; c++)
        mean += exp((double)f.student[c] - 40.0) / total * (double)(f.student[c] - f.teacher[c]);
    for (int c = 0; c < VOCAB; c++) {
        const double p = exp((double)f.student[c] - 40.0) / total;
        const double expected = p * ((double)(f.student[c] - f.teacher[c]) - mean);
        CHECK_NEAR(f.gradient[c], expected,
                   (xd_test_cpu() == XD_CPU_PLAIN ? 1e-6 : 3e-6) * fabs(expected) + 1e-40);
    }
    fixture_close(&f);
}

XD_TEST(masked_columns_of_minus_infinity_are_legal) {
    for (int kind = 0; kind < 4; kind++) {
        fixture f;
        fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
        for (int r = 0; r < ROWS; r++) f.student[r * WIDTH + 11] = f.teacher[r * WIDTH + 11] = -INFINITY;
        f.desc.divergence = (xd_divergence)kind;
        CHECK(isfinite(loss_of(&f)));
        CHECK(xd_status_check(f.ctx, &f.status) == XD_OK);
        for (int r = 0; r < ROWS; r++) CHECK(f.gradient[r * WIDTH + 11] == 0.0f);
        fixture_close(&f);
    }
}

static void check_row_dropped(const fixture *f, int row) {
    CHECK(f->row_loss[row] == 0.0f);
    for (int c = 0; c < WIDTH; c++) CHECK(f->gradient[row * WIDTH + c] == 0.0f);
}

XD_TEST(bad_rows_get_zero_gradient_and_are_counted) {
    for (int mode = 0; mode < 2; mode++) {
        fixture f;
        fixture_open(&f, mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        f.labels[0] = VOCAB;
        f.student[WIDTH + 2] = NAN;
        f.teacher[3 * WIDTH + 2] = INFINITY;
        f.student[4 * WIDTH] = NAN;           /* masked: nobody looks */
        f.student[5 * WIDTH + 1] = -INFINITY; /* the teacher has mass there */
        CHECK(isfinite(loss_of(&f)));
        CHECK_EQ_INT(f.status.label_out_of_range, 1);
        CHECK_EQ_INT(f.status.not_finite, 3);
        CHECK_EQ_INT(f.status.first_row, 0);
        CHECK_NEAR(f.status.first_value, VOCAB, 0);
        for (int r = 0; r < ROWS; r++) check_row_dropped(&f, r); /* row 2 is ignored */
        CHECK(xd_status_check(f.ctx, &f.status) == XD_ERROR_DATA);
        fixture_close(&f);
    }
}

XD_TEST(without_a_status_bad_rows_are_an_error) {
    fixture f;
    xd_loss_values values = { 5.0, 5.0, 5.0, 5 };
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    f.desc.common.status = NULL;
    f.labels[0] = -3;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_DATA);
    CHECK(strstr(xd_last_error(f.ctx)->message, "value -3") != NULL);
    CHECK(values.loss == 5.0);
    fixture_close(&f);
}

XD_TEST(nothing_counted_gives_zero_and_a_flag) {
    fixture f;
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    memset(f.mask, 0, sizeof f.mask);
    CHECK(loss_of(&f) == 0.0);
    CHECK_EQ_INT(f.status.nothing_counted, 1);
    for (int r = 0; r < ROWS; r++) check_row_dropped(&f, r);
    fixture_close(&f);
}

XD_TEST(metadata_errors_name_both_numbers_and_leave_outputs_alone) {
    fixture f;
    xd_loss_values values = { 1.5, 1.5, 1.5, 3 };
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    f.desc.temperature = -1.0;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "temperature -1 ") != NULL);
    f.desc.temperature = 0.0;
    CHECK(xd_loss(f.ctx, &f.desc, NULL) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "out is NULL") != NULL);
    f.desc.temperature = (double)INFINITY;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_ARGUMENT);
    f.desc.temperature = 0.0;
    f.desc.teacher.rows = 5;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(f.ctx)->message, "5 rows but 6") != NULL);
    f.desc.teacher.rows = ROWS;
    f.desc.student.dtype = XD_DTYPE_I32;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_DTYPE);
    f.desc.student.dtype = XD_DTYPE_F32;
    f.desc.student.cols = VOCAB - 1;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_SHAPE);
    CHECK(values.loss == 1.5 && f.gradient[0] == 77.0f);
    fixture_close(&f);
}

XD_TEST(a_workspace_of_the_queried_size_is_enough_and_a_smaller_one_is_refused) {
    fixture f;
    xd_loss_values values;
    fixture_open(&f, XD_REDUCTION_INVARIANT);
    f.desc.divergence = XD_JSD;
    const double loss = loss_of(&f);
    const size_t bytes = PLANNED_WORKSPACE(f.ctx, xd_loss(f.ctx, &f.desc, &values));
    f.desc.common.workspace = malloc(bytes);
    f.desc.common.workspace_bytes = bytes;
    CHECK(loss_of(&f) == loss);
    f.desc.common.workspace_bytes = bytes - 1;
    CHECK(xd_loss(f.ctx, &f.desc, &values) == XD_ERROR_ARGUMENT);
    free(f.desc.common.workspace);
    fixture_close(&f);
}

XD_TEST(bf16_logits_and_gradients_are_widened_and_rounded) {
    fixture f;
    uint16_t student[ROWS * WIDTH], teacher[ROWS * WIDTH], gradient[ROWS * WIDTH];
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    for (int i = 0; i < ROWS * WIDTH; i++) {
        student[i] = xd_bf16_from_f32(f.student[i]);
        teacher[i] = xd_bf16_from_f32(f.teacher[i]);
        f.student[i] = xd_f32_from_bf16(student[i]);
        f.teacher[i] = xd_f32_from_bf16(teacher[i]);
    }
    const double wide = loss_of(&f);
    f.desc.student = rows_of(student, XD_DTYPE_BF16, ROWS, WIDTH);
    f.desc.teacher = rows_of(teacher, XD_DTYPE_BF16, ROWS, WIDTH);
    f.desc.common.gradient = rows_of(gradient, XD_DTYPE_BF16, ROWS, WIDTH);
    CHECK_NEAR(loss_of(&f), wide, 1e-6 * wide); /* the order of the sum may differ */
    for (int i = 0; i < ROWS * WIDTH; i++) CHECK(gradient[i] == xd_bf16_from_f32(f.gradient[i]));
    fixture_close(&f);
}

XD_TEST(extreme_logits_stay_finite) {
    for (int kind = 0; kind < 3; kind++) {
        fixture f;
        fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
        for (int i = 0; i < ROWS * WIDTH; i++) {
            f.student[i] *= 1e4f;
            f.teacher[i] *= 1e4f;
        }
        f.desc.divergence = (xd_divergence)kind;
        CHECK(isfinite(loss_of(&f)));
        CHECK(xd_status_check(f.ctx, &f.status) == XD_OK);
        for (int i = 0; i < ROWS * WIDTH; i++) CHECK(isfinite(f.gradient[i]));
        fixture_close(&f);
    }
}

XD_TEST(a_denominator_counts_weights_exactly) {
    fixture f;
    xd_positions batches[2];
    xd_denominator denominator;
    fixture_open(&f, XD_REDUCTION_DETERMINISTIC);
    memset(batches, 0, sizeof batches);
    batches[0].count = ROWS;
    batches[0].labels = xd_ids_of(f.labels, XD_DTYPE_I64);
    batches[0].mask = f.mask;
    batches[0].weights = f.weight;
    batches[1].count = 3;
    CHECK(xd_denominator_count(f.ctx, NULL, batches, 2, &denominator) == XD_OK);
    CHECK_EQ_INT(denominator.positions, 7);
    CHECK_NEAR(denominator.value, 0.5 + 0.75 + 1.25 + 1.75 + 3.0, 0);
    CHECK(xd_denominator_count(f.ctx, NULL, NULL, 2, &denominator) == XD_ERROR_ARGUMENT);
    f.weight[0] = -1.0f;
    CHECK(xd_denominator_count(f.ctx, NULL, batches, 2, &denominator) == XD_ERROR_ARGUMENT);
    fixture_close(&f);
}

XD_TEST_MAIN()
