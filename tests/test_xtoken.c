/* Losses across tokenizers on one rank: values, gradients, memory, bad input. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "vocab_calls.h"
#include "xd_private.h"
#include "planned.h"
#include "xd_test.h"
#include "xtoken_problem.h"

/* ---- one rank ---- */

static void check_gradient(problem *p) {
    call c;
    open_call(p, &c);
    check_differences(p, &c);
    xd_vocab_destroy(c.vocab);
}

XD_TEST(gradients_of_all_kinds_agree_with_finite_differences) {
    static const xd_xtoken_kind kinds[3] = { XD_XTOKEN_PROJECTED, XD_XTOKEN_GOLD, XD_XTOKEN_SAME };
    for (int i = 0; i < 12; i++) {
        problem p;
        open_problem(&p, kinds[i % 3]);
        p.settings.reverse = i / 3 % 2 == 1;
        p.settings.compat = i >= 6;
        check_gradient(&p);
        close_problem(&p);
    }
}

XD_TEST(gradients_of_several_teachers_add_up) {
    for (int mode = 0; mode < 2; mode++) {
        problem p;
        open_problem(&p, XD_XTOKEN_PROJECTED);
        p.kinds[1] = XD_XTOKEN_GOLD;
        p.kinds[2] = XD_XTOKEN_SAME;
        p.teacher_count = 3;
        p.settings.mode = mode == 0 ? XD_XTOKEN_SUM : XD_XTOKEN_SELECT;
        if (mode == 0) p.settings.score = XD_XTOKEN_SCORE_CE;
        check_gradient(&p);
        close_problem(&p);
    }
}

/* The numbers of the specification's worked example: one sequence, 6 and 7 positions, tau 2. */
typedef struct example {
    float student[6 * 8], teacher[7 * 8];
    xd_projection_rows rows;
    int32_t ids[16];
    float weights[16];
} example;

static void open_example(example *e) {
    static const int32_t ids[16] = { 0, -1, 1, 2, 2, -1, 3, 4, 4, -1, 5, 6, 2, -1, 6, 0 };
    static const float weights[16] = { 1, 0, .7f, .3f, 1, 0, .6f, .4f, 1, 0, .9f, .1f, 1, 0, .5f, .5f };
    for (int i = 0; i < 48; i++)
        e->student[i] = (float)(2.0 * sin(0.7 * (i / 8) + 1.3 * (i % 8) + 0.11 * (i / 8) * (i % 8)));
    for (int i = 0; i < 56; i++)
        e->teacher[i] = (float)(2.0 * cos(0.5 * (i / 8) + 0.9 * (i % 8) - 0.07 * (i / 8) * (i % 8)));
    memcpy(e->ids, ids, sizeof ids);
    memcpy(e->weights, weights, sizeof weights);
    e->rows.ids = e->ids;
    e->rows.weights = e->weights;
    e->rows.rows = 8;
    e->rows.k = 2;
}

/* KD of the example as the reference computes it. gold: 0 P-KL, 1 strict, 2 relaxed. */
static double example_kd(example *e, int gold, bool reverse, bool exact_only, int64_t size, float *gradient) {
    static const int64_t student_chunks[6] = { 1, 1, 2, 3, 3, -1 },
                         teacher_chunks[7] = { 1, 2, 2, 3, 3, -1, -1 };
    static const uint8_t exact[4] = { 1, 1, 0, 1 };
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_projection projection;
    xd_exact_map map;
    xd_xtoken_teacher t;
    xd_xtoken_desc d;
    xd_xtoken_values values;
    t = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    d = xd_xtoken_defaults();
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, 8, &vocab) == XD_OK);
    CHECK(xd_projection_from_rows(ctx, &e->rows, 8, 7, &projection) == XD_OK);
    CHECK(exact_map_create(ctx, &e->rows, 7, gold == 2, &map) == XD_OK);
    t.kind = gold ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED;
    t.logits = rows_of(e->teacher, 7, 8);
    t.vocabulary = 7;
    t.student_chunks = student_chunks;
    t.teacher_chunks = teacher_chunks;
    t.chunks = 4;
    t.chunk_exact = exact;
    t.projected.projection = &projection;
    t.gold.map = &map;
    d.student = rows_of(e->student, 6, 8);
    d.vocab = vocab;
    d.teachers = &t;
    d.teacher_count = 1;
    d.temperature = 2.0;
    d.compat = true;
    d.reverse = reverse;
    d.exact_only = exact_only;
    if (gold)
        d.tail = size ? size : 8192;
    else
        d.columns = size ? size : 8192;
    if (gradient) d.common.gradient = rows_of(gradient, 6, 8);
    CHECK(xd_xtoken_loss(ctx, &d, &values) == XD_OK);
    xd_projection_destroy(ctx, &projection);
    xd_exact_map_destroy(ctx, &map);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    return values.kd;
}

XD_TEST(the_worked_example_has_its_known_losses) {
    example e;
    open_example(&e);
    CHECK_NEAR(example_kd(&e, 0, false, false, 4, NULL), 1.1723729516, 1e-6);
    CHECK_NEAR(example_kd(&e, 0, false, true, 4, NULL), 1.2134190056, 1e-6);
    CHECK_NEAR(example_kd(&e, 0, true, false, 4, NULL), 1.2016453974, 1e-6);
    CHECK_NEAR(example_kd(&e, 0, true, true, 4, NULL), 1.3795737346, 1e-6);
    CHECK_NEAR(example_kd(&e, 0, false, false, 0, NULL), 1.7310727756, 1e-6);
    CHECK_NEAR(example_kd(&e, 1, false, false, 1, NULL), 0.5728004474, 1e-6);
    CHECK_NEAR(example_kd(&e, 1, false, false, 0, NULL), 0.9364533575, 1e-6);
    CHECK_NEAR(example_kd(&e, 1, true, false, 0, NULL), 1.1002835099, 1e-6);
    CHECK_NEAR(example_kd(&e, 2, false, false, 0, NULL), 1.0413047250, 1e-6);
    CHECK_NEAR(example_kd(&e, 2, true, false, 0, NULL), 1.3205519185, 1e-6);
}

XD_TEST(the_worked_example_has_its_known_gradients) {
    static const double pkl[8] = { -.00729082, .01796426, .00486681, .00146107,
                                   .00120139,  .03079289, .00788909, -.05688469 };
    static const double gold[8] = { -.09745418, .08608125, -.02233117, .00226855,
                                    -.01343521, .06027616, -.04383,    .02842459 };
    example e;
    float gradient[48];
    open_example(&e);
    example_kd(&e, 0, false, false, 4, gradient);
    for (int v = 0; v < 8; v++) CHECK_NEAR(gradient[v], pkl[v], 1e-7);
    for (int v = 40; v < 48; v++) CHECK(gradient[v] == 0.0f);
    example_kd(&e, 1, false, false, 0, gradient);
    for (int v = 0; v < 8; v++) CHECK_NEAR(gradient[v], gold[v], 1e-7);
}

XD_TEST(a_student_that_equals_its_teacher_loses_nothing_by_default) {
    problem p;
    call c;
    xd_projection identity;
    xdi_vote cells[STUDENT_SIZE];
    open_problem(&p, XD_XTOKEN_PROJECTED);
    for (int v = 0; v < STUDENT_SIZE; v++) {
        cells[v].student_id = cells[v].teacher_id = v;
        cells[v].weight = 1.0;
    }
    const xdi_projection_cells list = { cells, STUDENT_SIZE, STUDENT_SIZE, STUDENT_SIZE };
    CHECK(xdi_projection_from_cells(p.ctx, &list, &identity) == XD_OK);
    for (int i = 0; i < STUDENT_ROWS; i++)
        p.student_chunks[i] = i % STUDENT_LENGTH < CHUNKS ? i % STUDENT_LENGTH : -1;
    open_call(&p, &c);
    c.teachers[0].projected.projection = &identity;
    c.teachers[0].logits = rows_of(p.student, STUDENT_ROWS, STUDENT_SIZE);
    c.teachers[0].teacher_chunks = p.student_chunks;
    c.d.common.labels.data = NULL;
    c.d.columns = 8192;
    CHECK_NEAR(run_call(&p, &c).loss, 0.0, 1e-7); /* both sides' logarithms are of f32 */
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) CHECK_NEAR(c.gradient[i], 0.0, 1e-7);
    xd_projection_destroy(p.ctx, &identity);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(the_gradient_may_overwrite_the_logits_of_one_teacher_but_not_of_several) {
    for (int kind = 0; kind < 3; kind++) {
        problem p;
        call c;
        xd_xtoken_values values;
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &c);
        run_call(&p, &c);
        c.d.common.gradient.data = p.student;
        c.d.teacher_count = 2;
        c.teachers[1] = c.teachers[0];
        CHECK(xd_xtoken_loss(p.ctx, &c.d, &values) == XD_ERROR_ARGUMENT);
        c.d.teacher_count = 1;
        run_call(&p, &c);
        CHECK(memcmp(p.student, c.gradient, sizeof c.gradient) == 0);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

XD_TEST(balance_makes_both_terms_equal_and_gives_the_next_weight) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_PROJECTED);
    open_call(&p, &c);
    const xd_xtoken_values fixed = run_call(&p, &c);
    CHECK_NEAR(fixed.loss, 0.8 * fixed.kd + 0.6 * fixed.ce, 1e-12);
    c.d.balance = true;
    const xd_xtoken_values balanced = run_call(&p, &c);
    CHECK_NEAR(balanced.kd_weight, fixed.balance, 1e-12);
    CHECK_NEAR(balanced.loss, 2.0 * balanced.ce, 1e-9);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

/* With a KD of almost nothing, its rounding is not multiplied by more than 1e4; compat has no bound. */
XD_TEST(the_balance_has_a_bound_except_in_compat) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_SAME);
    open_call(&p, &c);
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) p.same[i] = p.student[i] + (i % 7 ? 0.0f : 1e-4f);
    c.d.balance = true;
    const xd_xtoken_values bounded = run_call(&p, &c);
    CHECK(bounded.kd > 0.0 && bounded.kd < 1e-7);
    CHECK(bounded.balance == 1e4 && bounded.kd_weight == 1e4);
    c.d.compat = true;
    const xd_xtoken_values free_of_it = run_call(&p, &c);
    CHECK_NEAR(free_of_it.balance, free_of_it.ce / free_of_it.kd, 1e-9 * free_of_it.balance);
    CHECK(free_of_it.balance > 1e7);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

/* The divisor of compat is at least 1; the count beside it is the true one. */
XD_TEST(the_true_number_of_counted_chunks_is_told_beside_a_clamped_divisor) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_GOLD);
    open_call(&p, &c);
    c.d.compat = true;
    run_call(&p, &c);
    CHECK(c.teacher_values[0].counted == 8.0 && c.teacher_values[0].denominator == 8.0);
    memset(p.mask, 0, sizeof p.mask);
    run_call(&p, &c);
    CHECK(c.teacher_values[0].counted == 0.0 && c.teacher_values[0].denominator == 1.0);
    c.d.compat = false;
    run_call(&p, &c);
    CHECK(c.teacher_values[0].counted == 0.0 && c.teacher_values[0].denominator == 0.0);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(a_tail_of_none_leaves_the_exact_pairs) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_GOLD);
    open_call(&p, &c);
    const xd_xtoken_values with = run_call(&p, &c);
    const double divergence = c.teacher_values[0].divergence;
    CHECK(c.teacher_values[0].tail > 0.0);
    c.d.tail = 0;
    const xd_xtoken_values without = run_call(&p, &c);
    CHECK(c.teacher_values[0].tail == 0.0 && c.teacher_values[0].divergence == divergence);
    CHECK(without.kd < with.kd);
    check_differences(&p, &c);
    c.d.tail = -1;
    CHECK(xd_xtoken_loss(p.ctx, &c.d, &(xd_xtoken_values){ 0 }) == XD_ERROR_ARGUMENT);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(exact_only_and_sample_weights_choose_the_chunks) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_GOLD);
    open_call(&p, &c);
    run_call(&p, &c);
    CHECK_NEAR(c.teacher_values[0].denominator, 4.0 + 0.5 * 4.0, 1e-12); /* chunks 0, 1, 2 and 4 of each */
    CHECK_NEAR(c.teacher_values[0].compared, 8.0, 1e-12);
    c.d.exact_only = true;
    run_call(&p, &c);
    CHECK_NEAR(c.teacher_values[0].denominator, 3.0 + 0.5 * 3.0, 1e-12);
    p.sample_weight[1] = 0.0f;
    run_call(&p, &c);
    CHECK_NEAR(c.teacher_values[0].denominator, 3.0, 1e-12);
    c.d.common.labels.data = NULL;
    run_call(&p, &c);
    for (int i = STUDENT_LENGTH * STUDENT_SIZE; i < STUDENT_ROWS * STUDENT_SIZE; i++)
        CHECK(c.gradient[i] == 0.0f);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(nothing_counted_is_zero_and_told) {
    for (int kind = 0; kind < 3; kind++) {
        problem p;
        call c;
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &c);
        memset(p.mask, 0, sizeof p.mask);
        memset(p.row_weight, 0, sizeof p.row_weight);
        const xd_xtoken_values values = run_call(&p, &c);
        CHECK(values.loss == 0.0 && values.kd == 0.0 && values.ce == 0.0);
        CHECK_EQ_INT(c.status.nothing_counted, 1);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) CHECK(c.gradient[i] == 0.0f);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

XD_TEST(a_masked_position_counts_as_one_without_weight) {
    for (int kind = 0; kind < 3; kind++) {
        uint8_t mask[STUDENT_ROWS];
        problem p;
        call masked, weighed;
        memset(mask, 7, sizeof mask);
        mask[2] = mask[9] = 0;
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &masked);
        open_call(&p, &weighed);
        p.labels[2] = STUDENT_SIZE; /* nobody looks at it */
        masked.d.common.mask = mask;
        const double tokens = run_call(&p, &masked).tokens;
        p.row_weight[2] = p.row_weight[9] = 0.0f;
        const xd_xtoken_values values = run_call(&p, &weighed);
        CHECK(values.tokens == tokens && tokens > 0.0);
        CHECK_EQ_INT(masked.status.label_out_of_range, 0);
        CHECK(memcmp(masked.gradient, weighed.gradient, sizeof masked.gradient) == 0);
        CHECK(memcmp(masked.teacher_values, weighed.teacher_values, sizeof masked.teacher_values) == 0);
        xd_vocab_destroy(masked.vocab);
        xd_vocab_destroy(weighed.vocab);
        close_problem(&p);
    }
}

XD_TEST(labels_of_32_bits_are_those_of_64) {
    for (int kind = 0; kind < 5; kind++) {
        int32_t labels[STUDENT_ROWS], others[TEACHER_ROWS];
        problem p;
        call c, narrow;
        if (kind == 3) continue; /* a cache has its own */
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &c);
        open_call(&p, &narrow);
        c.d.score = narrow.d.score = XD_XTOKEN_SCORE_CE;
        for (int i = 0; i < STUDENT_ROWS; i++) labels[i] = (int32_t)p.labels[i];
        for (int i = 0; i < TEACHER_ROWS; i++) others[i] = (int32_t)p.teacher_labels[i];
        narrow.d.common.labels = xd_ids_of(labels, XD_DTYPE_I32);
        if (narrow.teachers[0].labels.data) narrow.teachers[0].labels = xd_ids_of(others, XD_DTYPE_I32);
        const xd_xtoken_values values = run_call(&p, &c), same = run_call(&p, &narrow);
        CHECK(memcmp(&values, &same, sizeof same) == 0);
        CHECK(memcmp(c.gradient, narrow.gradient, sizeof c.gradient) == 0);
        CHECK(memcmp(c.teacher_values, narrow.teacher_values, sizeof c.teacher_values) == 0);
        xd_vocab_destroy(c.vocab);
        xd_vocab_destroy(narrow.vocab);
        close_problem(&p);
    }
}

/* A power of two, so that nothing is rounded otherwise. */
XD_TEST(the_scale_multiplies_loss_and_gradient) {
    for (int kind = 0; kind < 6; kind++) {
        const double scale = 4.0, nothing = (double)NAN;
        problem p;
        call c, scaled;
        open_problem(&p, kind < 3 ? (xd_xtoken_kind)kind : kind == 3 ? XD_XTOKEN_LIKELIHOOD : XD_XTOKEN_GOLD);
        if (kind == 5) p.kinds[1] = XD_XTOKEN_SAME;
        if (kind == 5) p.teacher_count = 2;
        open_call(&p, &c);
        open_call(&p, &scaled);
        c.d.balance = scaled.d.balance = kind == 4;
        scaled.d.common.scale = &scale;
        const xd_xtoken_values one = run_call(&p, &c), four = run_call(&p, &scaled);
        CHECK(one.loss != 0.0 && four.loss == 4.0 * one.loss);
        CHECK(four.kd == 4.0 * one.kd && four.ce == 4.0 * one.ce && four.balance == one.balance);
        CHECK(four.kd_weight == one.kd_weight);
        CHECK(scaled.teacher_values[0].kd == 4.0 * c.teacher_values[0].kd);
        CHECK(scaled.teacher_values[0].divergence == c.teacher_values[0].divergence);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
            CHECK(scaled.gradient[i] == 4.0f * c.gradient[i]);
        scaled.d.common.scale = &nothing;
        CHECK(run_call(&p, &scaled).loss == 0.0);
        CHECK_EQ_INT(scaled.status.not_finite, 1);
        CHECK_EQ_INT(scaled.status.first_row, 0);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) CHECK(scaled.gradient[i] == 0.0f);
        xd_vocab_destroy(c.vocab);
        xd_vocab_destroy(scaled.vocab);
        close_problem(&p);
    }
}

XD_TEST(the_denominator_of_the_step_is_taken_as_it_was_counted) {
    for (int kind = 0; kind < 3; kind += 2) { /* PROJECTED and SAME */
        problem p;
        call c, given;
        xd_denominator counted, nothing;
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &c);
        open_call(&p, &given);
        const xd_positions all = { STUDENT_ROWS, { p.labels, XD_DTYPE_I64 }, false, 0, NULL, NULL };
        const xd_positions none = { 0, { NULL, XD_DTYPE_NONE }, false, 0, NULL, NULL };
        CHECK(xd_denominator_count(p.ctx, NULL, &all, 1, &counted) == XD_OK && counted.value > 0.0);
        CHECK(xd_denominator_count(p.ctx, NULL, &none, 1, &nothing) == XD_OK && nothing.inverse == 0.0);
        c.d.common.denominator_value = counted.value;
        given.d.common.denominator = &counted;
        given.d.common.denominator_value = 3.0; /* not looked at */
        const xd_xtoken_values values = run_call(&p, &c), same = run_call(&p, &given);
        CHECK(memcmp(&values, &same, sizeof same) == 0);
        CHECK(memcmp(c.gradient, given.gradient, sizeof c.gradient) == 0);
        given.d.common.denominator = &nothing;
        CHECK(run_call(&p, &given).ce == 0.0);
        CHECK_EQ_INT(given.status.nothing_counted, kind == 2);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE && kind == 2; i++) CHECK(given.gradient[i] == 0.0f);
        xd_vocab_destroy(c.vocab);
        xd_vocab_destroy(given.vocab);
        close_problem(&p);
    }
}

XD_TEST(a_chunk_with_a_logit_that_is_not_finite_has_no_loss_and_is_counted) {
    for (int kind = 0; kind < 3; kind++) {
        problem p;
        call c;
        xd_xtoken_values values;
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &c);
        c.d.common.labels.data = NULL;
        p.student[1 * STUDENT_SIZE + 4] = NAN; /* position 1: chunk 1, with position 2 */
        values = run_call(&p, &c);
        CHECK(isfinite(values.loss));
        CHECK_EQ_INT(c.status.not_finite, 1);
        for (int v = 0; v < STUDENT_SIZE; v++) CHECK(c.gradient[STUDENT_SIZE + v] == 0.0f);
        c.d.common.status = NULL;
        CHECK(xd_xtoken_loss(p.ctx, &c.d, &values) == XD_ERROR_DATA);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

XD_TEST(a_logit_of_minus_infinity_is_a_token_without_probability) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_PROJECTED);
    open_call(&p, &c);
    c.d.common.labels.data = NULL;
    for (int t = 0; t < STUDENT_ROWS; t++) p.student[t * STUDENT_SIZE + 5] = -INFINITY;
    CHECK(isfinite(run_call(&p, &c).loss));
    CHECK_EQ_INT(c.status.not_finite, 0);
    for (int t = 0; t < STUDENT_ROWS; t++) CHECK(c.gradient[t * STUDENT_SIZE + 5] == 0.0f);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(a_label_outside_the_vocabulary_does_not_count) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_GOLD);
    open_call(&p, &c);
    const double before = run_call(&p, &c).tokens;
    p.labels[0] = STUDENT_SIZE;
    CHECK_NEAR(run_call(&p, &c).tokens, before - 1.0, 0.0);
    CHECK_EQ_INT(c.status.label_out_of_range, 1);
    CHECK_EQ_INT(c.status.first_row, 0);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(bf16_logits_are_the_f32_logits_they_stand_for) {
    for (int kind = 0; kind < 2; kind++) {
        problem p;
        call c;
        uint16_t student[STUDENT_ROWS * STUDENT_SIZE], teacher[TEACHER_ROWS * TEACHER_SIZE];
        open_problem(&p, (xd_xtoken_kind)kind);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
            p.student[i] = xd_f32_from_bf16(student[i] = xd_bf16_from_f32(p.student[i]));
        for (int i = 0; i < TEACHER_ROWS * TEACHER_SIZE; i++)
            p.teacher[i] = xd_f32_from_bf16(teacher[i] = xd_bf16_from_f32(p.teacher[i]));
        open_call(&p, &c);
        const double loss = run_call(&p, &c).loss;
        c.d.student.data = student;
        c.teachers[0].logits.data = teacher;
        c.d.student.dtype = c.teachers[0].logits.dtype = XD_DTYPE_BF16;
        CHECK_NEAR(run_call(&p, &c).loss, loss, 1e-6); /* sums may take bf16 in another order */
        c.d.common.gradient = c.d.student;             /* over the logits */
        run_call(&p, &c);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
            CHECK(student[i] == xd_bf16_from_f32(c.gradient[i]));
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

XD_TEST(tiles_of_any_size_give_one_result) {
    for (int kind = 0; kind < 3; kind++) {
        problem p;
        call c;
        float whole[STUDENT_ROWS * STUDENT_SIZE];
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &c);
        const double loss = run_call(&p, &c).loss;
        memcpy(whole, c.gradient, sizeof whole);
        for (int64_t tile = 1; tile < 5; tile += 2) {
            c.d.tile = tile;
            CHECK(run_call(&p, &c).loss == loss);
            CHECK(memcmp(whole, c.gradient, sizeof whole) == 0);
        }
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

/* ---- memory ---- */

XD_TEST(the_workspace_is_what_was_asked_for_and_small_at_real_sizes) {
    problem p;
    call c;
    xd_xtoken_values values;
    open_problem(&p, XD_XTOKEN_GOLD);
    open_call(&p, &c);
    c.d.common.workspace_bytes = PLANNED_WORKSPACE(p.ctx, xd_xtoken_loss(p.ctx, &c.d, &values));
    CHECK(c.d.common.workspace_bytes > 0);
    c.d.common.workspace = malloc(c.d.common.workspace_bytes);
    run_call(&p, &c);
    c.d.tile = -1;
    CHECK(PLANNED_WORKSPACE(p.ctx, xd_xtoken_loss(p.ctx, &c.d, &values)) == 0);
    CHECK(strstr(xd_last_error(p.ctx)->message, "tiles of -1") != NULL); /* what the call itself says */
    c.d.tile = 0;
    c.d.common.workspace_bytes--;
    CHECK(xd_xtoken_loss(p.ctx, &c.d, &values) == XD_ERROR_ARGUMENT);
    free(c.d.common.workspace);
    xd_vocab_destroy(c.vocab);
    CHECK(vocab_even(p.ctx, NULL, 128256, &c.vocab) == XD_OK);
    c.d.vocab = c.vocab;
    c.d.sequences = 1;
    c.d.columns = c.d.tail = 8192;
    c.d.student = rows_of(c.gradient, 2048, 128256); /* addresses that nothing reads */
    c.d.common.gradient = c.d.student;
    const xd_projection wide = { .student_size = 128256,
                                 .teacher_size = 151936,
                                 .row_begin = (int64_t *)calloc(128257, sizeof(int64_t)) };
    for (int kind = 0; kind < 2; kind++) {
        c.teachers[0].kind = (xd_xtoken_kind)kind;
        c.teachers[0].vocabulary = 151936;
        c.teachers[0].logits = rows_of(c.gradient, 2048, 151936);
        c.teachers[0].chunks = 2047;
        c.teachers[0].projected.projection = &wide;
        const size_t bytes = PLANNED_WORKSPACE(p.ctx, xd_xtoken_loss(p.ctx, &c.d, &values));
        CHECK(bytes > 0 && bytes < (size_t)16 << 20);
    }
    free((void *)(uintptr_t)wide.row_begin);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

/* ---- bad inputs ---- */

/* Runs a spoilt call and checks the code and a piece of the message; outputs stay untouched. */
static void check_refused(problem *p, call *c, xd_result expected, const char *words) {
    xd_xtoken_values values;
    memset(&values, 0x55, sizeof values);
    const xd_xtoken_values before = values;
    CHECK_EQ_INT(xd_xtoken_loss(p->ctx, &c->d, &values), expected);
    CHECK(strstr(xd_last_error(p->ctx)->message, words) != NULL);
    if (!strstr(xd_last_error(p->ctx)->message, words))
        printf("  said: %s\n", xd_last_error(p->ctx)->message);
    CHECK(memcmp(&values, &before, sizeof values) == 0);
    xd_vocab_destroy(c->vocab);
    open_call(p, c);
}

XD_TEST(bad_settings_are_refused_with_their_numbers) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_PROJECTED);
    open_call(&p, &c);
    c.d.temperature = -1.0;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "temperature -1");
    c.d.columns = -1;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "-1 columns");
    c.d.tail = -2;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "tail of -2");
    c.d.columns = 0; /* zero is zero: no column is no loss, and no workspace */
    xd_xtoken_values values;
    CHECK_EQ_INT(PLANNED_WORKSPACE(p.ctx, xd_xtoken_loss(p.ctx, &c.d, &values)), 0);
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "0 columns");
    c.d.kd_weight = c.d.ce_weight = 0.0;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "no term of the loss has a weight: ce_weight is 0, kd_weight 0");
    c.d.common.labels.data = NULL;
    c.teachers[0].weight = 0.0;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "without labels, kd_weight 0.8 with teachers of weight 0");
    c.d.teacher_count = 0;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "0 teachers");
    c.d.sequences = 4;
    check_refused(&p, &c, XD_ERROR_SHAPE, "14 rows for 4 sequences");
    c.d.mode = XD_XTOKEN_SELECT;
    c.d.score = XD_XTOKEN_SCORE_CE;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "mode SUM");
    c.d.normalise_by_vocabulary = true;
    c.d.mode = XD_XTOKEN_SELECT;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "mode SUM");
    c.d.score = XD_XTOKEN_SCORE_CE;
    c.teachers[0].labels.data = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "teacher 0 has no labels");
    c.d.balance = true;
    c.d.common.labels.data = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "balance needs labels");
    c.d.common.labels.dtype = XD_DTYPE_F32;
    check_refused(&p, &c, XD_ERROR_DTYPE, "labels are F32");
    c.teachers[0].labels.dtype = XD_DTYPE_U8;
    check_refused(&p, &c, XD_ERROR_DTYPE, "labels of a teacher are U8");
    c.d.common.row_loss = c.gradient;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "chunks have losses, not the 14 rows");
    c.d.kd_weight = (double)NAN;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "must be finite");
    c.d.tile = 65537;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "tiles of 65537");
    c.d.vocab = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "no vocabulary");
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(weights_that_cannot_be_used_are_refused) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_SAME);
    p.kinds[1] = XD_XTOKEN_SAME;
    p.teacher_count = 2;
    open_call(&p, &c);
    c.d.mode = XD_XTOKEN_AVERAGED_LOGITS;
    c.teachers[0].weight = 1.0;
    c.teachers[1].weight = -1.0;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "averaged teachers sum to 0");
    c.teachers[1].denominator_value = -3.0;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "denominator -3");
    c.teachers[1].vocabulary = STUDENT_SIZE - 1;
    check_refused(&p, &c, XD_ERROR_SHAPE, "less than the student's vocabulary of 13");
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(bad_teachers_are_refused_with_their_numbers) {
    problem p;
    call c;
    open_problem(&p, XD_XTOKEN_PROJECTED);
    open_call(&p, &c);
    p.student_chunks[3] = CHUNKS;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "chunk id 6 of student row 3 is outside [-1, 6)");
    p.student_chunks[3] = 2;
    p.teacher_chunks[4] = -2;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "chunk id -2 of teacher row 4");
    p.teacher_chunks[4] = 2;
    c.teachers[0].projected.projection = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "no projection");
    p.projection.student_size--;
    check_refused(&p, &c, XD_ERROR_SHAPE, "12 rows but the student's vocabulary 13");
    p.projection.student_size++;
    c.teachers[0].logits.cols = TEACHER_SIZE - 1;
    check_refused(&p, &c, XD_ERROR_SHAPE, "10 columns but its vocabulary is 11");
    c.teachers[0].vocabulary = 9;
    check_refused(&p, &c, XD_ERROR_SHAPE, "11 columns but its vocabulary is 9");
    c.teachers[0].logits.rows--;
    check_refused(&p, &c, XD_ERROR_SHAPE, "17 rows for 2 sequences");
    c.teachers[0].logits.dtype = XD_DTYPE_F64;
    check_refused(&p, &c, XD_ERROR_DTYPE, "F64");
    c.d.exact_only = true;
    c.teachers[0].chunk_exact = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "which chunks are exact");
    c.teachers[0].kind = XD_XTOKEN_SAME;
    check_refused(&p, &c, XD_ERROR_SHAPE, "18 rows but the student 14");
    c.teachers[0].kind = XD_XTOKEN_GOLD;
    p.map.teacher[0] = TEACHER_SIZE;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "teacher id 11");
    p.map.teacher[0] = 0;
    p.map.student_rest[1] = p.map.student_rest[0];
    c.teachers[0].kind = XD_XTOKEN_GOLD;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "id 1 after 1");
    p.sample_weight[0] = -1.0f;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "sample weight -1");
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST_MAIN()
