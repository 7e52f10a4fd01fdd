/* Losses across tokenizers: chunks, projections, and the loss on one rank and on many. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>

/* ---- a problem, whole ---- */

enum {
    SEQUENCES = 2,
    STUDENT_LENGTH = 7,
    TEACHER_LENGTH = 9,
    STUDENT_SIZE = 13,
    TEACHER_SIZE = 11,
    CHUNKS = 6
};
enum { STUDENT_ROWS = SEQUENCES * STUDENT_LENGTH, TEACHER_ROWS = SEQUENCES * TEACHER_LENGTH };

typedef struct problem {
    xd_ctx *ctx;
    float student[STUDENT_ROWS * STUDENT_SIZE];
    float teacher[TEACHER_ROWS * TEACHER_SIZE];
    float same[STUDENT_ROWS * STUDENT_SIZE];
    int64_t labels[STUDENT_ROWS], teacher_labels[TEACHER_ROWS];
    float row_weight[STUDENT_ROWS], sample_weight[SEQUENCES];
    int64_t student_chunks[STUDENT_ROWS], teacher_chunks[TEACHER_ROWS];
    uint8_t mask[SEQUENCES * CHUNKS], exact[SEQUENCES * CHUNKS];
    xd_projection projection;
    xd_exact_map map;
    xd_xtoken_kind kinds[3];
    int teacher_count;
    xd_xtoken_desc settings;
} problem;

static uint32_t seed;

static double uniform(void) {
    seed = seed * 1664525u + 1013904223u;
    return (double)(seed >> 8) / 16777216.0;
}

static void fill(float *x, int count, double width) {
    for (int i = 0; i < count; i++) x[i] = (float)((uniform() - 0.5) * width);
}

/* Two entries a row; every third id has one partner of weight 1. */
static void make_projection(problem *p) {
    int32_t ids[STUDENT_SIZE * 2];
    float weights[STUDENT_SIZE * 2];
    const xd_projection_rows rows = { ids, weights, STUDENT_SIZE, 2 };
    for (int v = 0; v < STUDENT_SIZE; v++) {
        const bool exact = v % 3 == 0;
        ids[2 * v] = (int32_t)(v * 5 % TEACHER_SIZE);
        ids[2 * v + 1] = exact ? -1 : (int32_t)((v * 5 + 3) % TEACHER_SIZE);
        weights[2 * v] = exact ? 1.0f : 0.7f;
        weights[2 * v + 1] = exact ? 0.0f : 0.3f;
    }
    CHECK(xd_projection_from_rows(p->ctx, &rows, STUDENT_SIZE, TEACHER_SIZE, &p->projection) == XD_OK);
    CHECK(xd_exact_map_create(p->ctx, &rows, TEACHER_SIZE, false, &p->map) == XD_OK);
}

static void open_problem_as(problem *p, xd_xtoken_kind kind, xd_reduction reduction) {
    static const int64_t student[STUDENT_LENGTH] = { 0, 1, 1, 2, 4, 4, -1 };
    static const int64_t teacher[TEACHER_LENGTH] = { 0, 0, 1, 2, 2, 2, 3, 4, -1 };
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(p, 0, sizeof *p);
    seed = 7;
    desc.reduction = reduction;
    CHECK(xd_ctx_create(&desc, &p->ctx) == XD_OK);
    fill(p->student, STUDENT_ROWS * STUDENT_SIZE, 6.0);
    fill(p->teacher, TEACHER_ROWS * TEACHER_SIZE, 6.0);
    fill(p->same, STUDENT_ROWS * STUDENT_SIZE, 6.0);
    for (int i = 0; i < STUDENT_ROWS; i++) {
        p->labels[i] = i % STUDENT_LENGTH == 6 ? XD_IGNORE_INDEX : (i * 5 + 1) % STUDENT_SIZE;
        p->row_weight[i] = i == 3 ? 0.0f : 1.0f;
        p->student_chunks[i] = student[i % STUDENT_LENGTH];
    }
    for (int i = 0; i < TEACHER_ROWS; i++) {
        p->teacher_chunks[i] = teacher[i % TEACHER_LENGTH];
        p->teacher_labels[i] = (i * 3 + 2) % TEACHER_SIZE;
    }
    p->student_chunks[STUDENT_LENGTH + 4] = 5; /* the second sequence differs: chunk 5 has no teacher */
    for (int i = 0; i < SEQUENCES * CHUNKS; i++) {
        p->mask[i] = 1;
        p->exact[i] = (uint8_t)(i % CHUNKS != 2);
    }
    p->sample_weight[0] = 1.0f;
    p->sample_weight[1] = 0.5f;
    make_projection(p);
    p->kinds[0] = kind;
    p->teacher_count = 1;
    p->settings.temperature = 1.5;
    p->settings.columns = 8;
    p->settings.tail = 5;
    p->settings.kd_weight = 0.8;
    p->settings.ce_weight = 0.6;
}

static void open_problem(problem *p, xd_xtoken_kind kind) {
    open_problem_as(p, kind, XD_REDUCTION_DETERMINISTIC);
}

static void close_problem(problem *p) {
    xd_projection_free(p->ctx, &p->projection);
    xd_exact_map_free(p->ctx, &p->map);
    xd_ctx_destroy(p->ctx);
}

static xd_rows rows_of(float *data, int64_t rows, int64_t cols) {
    xd_rows r;
    memset(&r, 0, sizeof r);
    r.data = data;
    r.dtype = XD_DTYPE_F32;
    r.rows = rows;
    r.cols = cols;
    return r;
}

static xd_xtoken_teacher teacher_of(problem *p, int index) {
    xd_xtoken_teacher t;
    memset(&t, 0, sizeof t);
    t.kind = p->kinds[index];
    t.logits = rows_of(p->teacher, TEACHER_ROWS, TEACHER_SIZE);
    t.student_chunks = p->student_chunks;
    t.teacher_chunks = p->teacher_chunks;
    t.chunks = CHUNKS;
    t.chunk_mask = p->mask;
    t.chunk_exact = p->exact;
    t.projection = &p->projection;
    t.map = &p->map;
    t.labels = p->teacher_labels;
    t.weight = 1.0 + 0.5 * index;
    if (t.kind == XD_XTOKEN_SAME) {
        t.logits = rows_of(p->same, STUDENT_ROWS, STUDENT_SIZE);
        t.labels = NULL;
    }
    return t;
}

/* Everything a test may change about one call. */
typedef struct call {
    xd_xtoken_desc d;
    xd_xtoken_teacher teachers[3];
    xd_xtoken_teacher_values teacher_values[3];
    xd_vocab *vocab;
    float gradient[STUDENT_ROWS * STUDENT_SIZE];
    xd_status status;
} call;

static void open_call(problem *p, call *c) {
    memset(c, 0, sizeof *c);
    c->d = p->settings;
    CHECK(xd_vocab_create(p->ctx, NULL, 0, STUDENT_SIZE, STUDENT_SIZE, &c->vocab) == XD_OK);
    c->d.student = rows_of(p->student, STUDENT_ROWS, STUDENT_SIZE);
    c->d.vocab = c->vocab;
    c->d.sequences = SEQUENCES;
    c->d.sample_weight = p->sample_weight;
    c->d.labels = p->labels;
    c->d.row_weight = p->row_weight;
    for (int i = 0; i < p->teacher_count; i++) c->teachers[i] = teacher_of(p, i);
    c->d.teachers = c->teachers;
    c->d.teacher_count = p->teacher_count;
    c->d.gradient = rows_of(c->gradient, STUDENT_ROWS, STUDENT_SIZE);
    c->d.teacher_values = c->teacher_values;
    c->d.status = &c->status;
}

static xd_xtoken_values run_call(problem *p, call *c) {
    xd_xtoken_values values;
    memset(&values, 0, sizeof values);
    CHECK(xd_xtoken_loss(p->ctx, &c->d, &values) == XD_OK);
    return values;
}

/* ---- one rank ---- */

/* Central differences in float logits against the gradient, for some elements. */
static void check_differences(problem *p) {
    call c;
    open_call(p, &c);
    run_call(p, &c);
    xd_xtoken_desc d = c.d;
    d.gradient.data = NULL;
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i += 5) {
        const float kept = p->student[i], step = 1.0f / 512.0f;
        xd_xtoken_values up, down;
        p->student[i] = kept + step;
        CHECK(xd_xtoken_loss(p->ctx, &d, &up) == XD_OK);
        const float above = p->student[i];
        p->student[i] = kept - step;
        CHECK(xd_xtoken_loss(p->ctx, &d, &down) == XD_OK);
        const double slope = (up.loss - down.loss) / ((double)above - (double)p->student[i]);
        p->student[i] = kept;
        CHECK_NEAR(slope, c.gradient[i], 2e-5);
    }
    xd_vocab_destroy(c.vocab);
}

XD_TEST(gradients_of_all_kinds_agree_with_finite_differences) {
    static const xd_xtoken_kind kinds[3] = { XD_XTOKEN_PROJECTED, XD_XTOKEN_GOLD, XD_XTOKEN_SAME };
    for (int i = 0; i < 12; i++) {
        problem p;
        open_problem(&p, kinds[i % 3]);
        p.settings.reverse = i / 3 % 2 == 1;
        p.settings.compat = i >= 6;
        check_differences(&p);
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
        check_differences(&p);
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
    memset(&t, 0, sizeof t);
    memset(&d, 0, sizeof d);
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_vocab_create(ctx, NULL, 0, 8, 8, &vocab) == XD_OK);
    CHECK(xd_projection_from_rows(ctx, &e->rows, 8, 7, &projection) == XD_OK);
    CHECK(xd_exact_map_create(ctx, &e->rows, 7, gold == 2, &map) == XD_OK);
    t.kind = gold ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED;
    t.logits = rows_of(e->teacher, 7, 8);
    t.vocabulary = 7;
    t.student_chunks = student_chunks;
    t.teacher_chunks = teacher_chunks;
    t.chunks = 4;
    t.chunk_exact = exact;
    t.projection = &projection;
    t.map = &map;
    d.student = rows_of(e->student, 6, 8);
    d.vocab = vocab;
    d.teachers = &t;
    d.teacher_count = 1;
    d.temperature = 2.0;
    d.compat = true;
    d.reverse = reverse;
    d.exact_only = exact_only;
    if (gold)
        d.tail = size;
    else
        d.columns = size;
    if (gradient) d.gradient = rows_of(gradient, 6, 8);
    CHECK(xd_xtoken_loss(ctx, &d, &values) == XD_OK);
    xd_projection_free(ctx, &projection);
    xd_exact_map_free(ctx, &map);
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
    xd_vote cells[STUDENT_SIZE];
    open_problem(&p, XD_XTOKEN_PROJECTED);
    for (int v = 0; v < STUDENT_SIZE; v++) {
        cells[v].student_id = cells[v].teacher_id = v;
        cells[v].weight = 1.0;
    }
    CHECK(xd_projection_from_cells(p.ctx, cells, STUDENT_SIZE, STUDENT_SIZE, STUDENT_SIZE, &identity) ==
          XD_OK);
    for (int i = 0; i < STUDENT_ROWS; i++)
        p.student_chunks[i] = i % STUDENT_LENGTH < CHUNKS ? i % STUDENT_LENGTH : -1;
    open_call(&p, &c);
    c.teachers[0].projection = &identity;
    c.teachers[0].logits = rows_of(p.student, STUDENT_ROWS, STUDENT_SIZE);
    c.teachers[0].teacher_chunks = p.student_chunks;
    c.d.labels = NULL;
    c.d.columns = 0;
    CHECK_NEAR(run_call(&p, &c).loss, 0.0, 1e-8);
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) CHECK_NEAR(c.gradient[i], 0.0, 1e-7);
    xd_projection_free(p.ctx, &identity);
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
        c.d.gradient.data = p.student;
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
    c.d.labels = NULL;
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

XD_TEST(a_chunk_with_a_logit_that_is_not_finite_has_no_loss_and_is_counted) {
    for (int kind = 0; kind < 3; kind++) {
        problem p;
        call c;
        xd_xtoken_values values;
        open_problem(&p, (xd_xtoken_kind)kind);
        open_call(&p, &c);
        c.d.labels = NULL;
        p.student[1 * STUDENT_SIZE + 4] = NAN; /* position 1: chunk 1, with position 2 */
        values = run_call(&p, &c);
        CHECK(isfinite(values.loss));
        CHECK_EQ_INT(c.status.not_finite, 1);
        for (int v = 0; v < STUDENT_SIZE; v++) CHECK(c.gradient[STUDENT_SIZE + v] == 0.0f);
        c.d.status = NULL;
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
    c.d.labels = NULL;
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
        CHECK(run_call(&p, &c).loss == loss);
        c.d.gradient = c.d.student; /* over the logits */
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
    c.d.workspace_bytes = xd_xtoken_workspace_bytes(&c.d);
    CHECK(c.d.workspace_bytes > 0);
    c.d.workspace = malloc(c.d.workspace_bytes);
    run_call(&p, &c);
    c.d.tile = -1;
    CHECK(xd_xtoken_workspace_bytes(&c.d) == 0);
    c.d.tile = 0;
    c.d.workspace_bytes--;
    CHECK(xd_xtoken_loss(p.ctx, &c.d, &values) == XD_ERROR_ARGUMENT);
    free(c.d.workspace);
    xd_vocab_destroy(c.vocab);
    CHECK(xd_vocab_create(p.ctx, NULL, 0, 128256, 128256, &c.vocab) == XD_OK);
    c.d.vocab = c.vocab;
    c.d.sequences = 1;
    c.d.columns = c.d.tail = 0;
    c.d.student = rows_of(NULL, 2048, 128256);
    for (int kind = 0; kind < 2; kind++) {
        c.teachers[0].kind = (xd_xtoken_kind)kind;
        c.teachers[0].vocabulary = 151936;
        c.teachers[0].logits = rows_of(NULL, 2048, 151936);
        c.teachers[0].chunks = 2047;
        CHECK(xd_xtoken_workspace_bytes(&c.d) < (size_t)16 << 20);
    }
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

/* ---- many ranks ---- */

typedef struct mesh_job {
    problem *p;
    int dp, cp, tp;
    int spoilt; /* this rank gets a wrong chunk id; 0 -> none */
    xd_result results[16];
    double gradient[STUDENT_ROWS * STUDENT_SIZE];
    xd_xtoken_values values[16];
    xd_xtoken_teacher_values teacher_values[16][3];
} mesh_job;

/* What one rank holds: sequences of its data rank, every cp-th student position, a piece of the teacher's. */
typedef struct mesh_rank {
    int64_t student_row[STUDENT_ROWS], teacher_row[TEACHER_ROWS], students, teachers;
    int64_t begin, end, first_sequence, sequences;
    float student[STUDENT_ROWS * STUDENT_SIZE], teacher[TEACHER_ROWS * TEACHER_SIZE];
    float same[STUDENT_ROWS * STUDENT_SIZE], row_weight[STUDENT_ROWS];
    int64_t labels[STUDENT_ROWS], teacher_labels[TEACHER_ROWS];
    int64_t student_chunks[STUDENT_ROWS], teacher_chunks[TEACHER_ROWS];
} mesh_rank;

static void mesh_cut(const mesh_job *job, int d, int c, mesh_rank *m) {
    m->sequences = SEQUENCES / job->dp;
    m->first_sequence = d * m->sequences;
    for (int64_t b = m->first_sequence; b < m->first_sequence + m->sequences; b++) {
        for (int64_t i = c; i < STUDENT_LENGTH; i += job->cp)
            m->student_row[m->students++] = b * STUDENT_LENGTH + i;
        for (int64_t i = TEACHER_LENGTH * c / job->cp; i < TEACHER_LENGTH * (c + 1) / job->cp; i++)
            m->teacher_row[m->teachers++] = b * TEACHER_LENGTH + i;
    }
}

static void mesh_copy(const problem *p, mesh_rank *m) {
    const int64_t columns = m->end - m->begin;
    for (int64_t i = 0; i < m->students; i++) {
        const int64_t row = m->student_row[i];
        memcpy(m->student + i * columns, p->student + row * STUDENT_SIZE + m->begin,
               (size_t)columns * sizeof(float));
        memcpy(m->same + i * STUDENT_SIZE, p->same + row * STUDENT_SIZE, STUDENT_SIZE * sizeof(float));
        m->row_weight[i] = p->row_weight[row];
        m->labels[i] = p->labels[row];
        m->student_chunks[i] = p->student_chunks[row];
    }
    for (int64_t i = 0; i < m->teachers; i++) {
        const int64_t row = m->teacher_row[i];
        memcpy(m->teacher + i * TEACHER_SIZE, p->teacher + row * TEACHER_SIZE, TEACHER_SIZE * sizeof(float));
        m->teacher_labels[i] = p->teacher_labels[row];
        m->teacher_chunks[i] = p->teacher_chunks[row];
    }
}

static xd_xtoken_teacher mesh_teacher(problem *p, mesh_rank *m, int index) {
    xd_xtoken_teacher t = teacher_of(p, index);
    t.logits.data = t.kind == XD_XTOKEN_SAME ? m->same : m->teacher;
    t.logits.rows = t.kind == XD_XTOKEN_SAME ? m->students : m->teachers;
    t.student_chunks = m->student_chunks;
    t.teacher_chunks = m->teacher_chunks;
    t.chunk_mask += m->first_sequence * CHUNKS;
    t.chunk_exact += m->first_sequence * CHUNKS;
    if (t.labels) t.labels = m->teacher_labels;
    return t;
}

static xd_result mesh_body(xd_comm *world, void *argument) {
    mesh_job *job = (mesh_job *)argument;
    problem *p = job->p;
    const int rank = xd_comm_rank(world), t = rank % job->tp, c = rank / job->tp % job->cp;
    const int d = rank / job->tp / job->cp;
    static const int64_t cuts[5][5] = {
        { 0 }, { 0, 13 }, { 0, 4, 13 }, { 0, 5, 5, 13 }, { 0, 1, 7, 12, 13 }
    };
    xd_comm *tp = NULL, *cp = NULL, *data = NULL;
    xd_vocab *vocab = NULL;
    xd_xtoken_teacher teachers[3];
    xd_xtoken_desc desc = p->settings;
    mesh_rank *m = (mesh_rank *)calloc(1, sizeof *m);
    m->begin = cuts[job->tp][t];
    m->end = cuts[job->tp][t + 1];
    mesh_cut(job, d, c, m);
    mesh_copy(p, m);
    if (job->spoilt > 0 && rank == job->spoilt) m->student_chunks[0] = CHUNKS;
    for (int i = 0; i < p->teacher_count; i++) teachers[i] = mesh_teacher(p, m, i);
    xd_result result = xd_comm_split(world, rank / job->tp, rank, &tp);
    if (result == XD_OK) result = xd_comm_split(world, d * job->tp + t, rank, &cp);
    if (result == XD_OK) result = xd_comm_split(world, t, rank, &data);
    if (result == XD_OK)
        result = xd_vocab_create(xd_comm_ctx(world), tp, m->begin, m->end, STUDENT_SIZE, &vocab);
    desc.student = desc.gradient = rows_of(m->student, m->students, m->end - m->begin);
    if (p->teacher_count > 1)
        desc.gradient.data = calloc((size_t)(STUDENT_ROWS * STUDENT_SIZE), sizeof(float));
    desc.vocab = vocab;
    desc.sequences = m->sequences;
    desc.sequence_comm = cp;
    desc.comm = data;
    desc.sample_weight = p->sample_weight + m->first_sequence;
    desc.labels = m->labels;
    desc.row_weight = m->row_weight;
    desc.teachers = teachers;
    desc.teacher_count = p->teacher_count;
    desc.teacher_values = job->teacher_values[rank];
    if (result == XD_OK) result = xd_xtoken_loss(xd_comm_ctx(world), &desc, &job->values[rank]);
    job->results[rank] = result;
    if (job->spoilt > 0) result = xd_barrier(world); /* an error would end the others' calls early */
    for (int64_t i = 0; i < m->students; i++)
        for (int64_t v = m->begin; v < m->end; v++)
            job->gradient[m->student_row[i] * STUDENT_SIZE + v] =
                (double)((float *)desc.gradient.data)[i * (m->end - m->begin) + v - m->begin];
    if (p->teacher_count > 1) free(desc.gradient.data);
    xd_vocab_destroy(vocab);
    xd_comm_destroy(tp);
    xd_comm_destroy(cp);
    xd_comm_destroy(data);
    free(m);
    return result;
}

static void check_mesh(problem *p, const call *one, const xd_xtoken_values *whole, int dp, int cp, int tp) {
    mesh_job *job = (mesh_job *)calloc(1, sizeof *job);
    xd_error error;
    double most = 0.0;
    memset(&error, 0, sizeof error);
    job->p = p;
    job->dp = dp;
    job->cp = cp;
    job->tp = tp;
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = xd_ctx_settings(p->ctx)->reduction;
    const bool exact = desc.reduction == XD_REDUCTION_INVARIANT;
    CHECK(xd_run_threads(dp * cp * tp, &desc, mesh_body, job, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
    for (int r = 0; r < dp * cp * tp; r++) {
        CHECK_NEAR(job->values[r].loss, whole->loss, exact ? 0.0 : 1e-7 * fabs(whole->loss));
        CHECK_NEAR(job->values[r].ce, whole->ce, exact ? 0.0 : 1e-7 * fabs(whole->ce));
        CHECK_NEAR(job->values[r].right, whole->right, 1e-12);
        CHECK(job->values[r].loss == job->values[0].loss); /* the same bits on every rank */
        for (int i = 0; i < p->teacher_count; i++) {
            CHECK_NEAR(job->teacher_values[r][i].agreeing, one->teacher_values[i].agreeing, 1e-12);
            CHECK_NEAR(job->teacher_values[r][i].weight, one->teacher_values[i].weight, 1e-7);
        }
    }
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) most = fmax(most, fabs((double)one->gradient[i]));
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
        CHECK_NEAR(job->gradient[i], one->gradient[i], exact ? 0.0 : 1e-6 * most);
    free(job);
}

/* Uneven shards, one of them empty; sequences cut unevenly; a data axis. */
static void check_meshes(problem *p) {
    static const int meshes[6][3] = { { 1, 1, 2 }, { 1, 1, 3 }, { 1, 2, 1 },
                                      { 1, 3, 2 }, { 2, 1, 1 }, { 2, 2, 3 } };
    call one;
    open_call(p, &one);
    const xd_xtoken_values whole = run_call(p, &one);
    for (int i = 0; i < 6; i++) check_mesh(p, &one, &whole, meshes[i][0], meshes[i][1], meshes[i][2]);
    xd_vocab_destroy(one.vocab);
}

XD_TEST(every_mesh_has_the_loss_and_gradient_of_one_rank) {
    for (int kind = 0; kind < 3; kind++)
        for (int reverse = 0; reverse < 2; reverse++) {
            problem p;
            open_problem(&p, (xd_xtoken_kind)kind);
            p.settings.reverse = reverse == 1;
            p.settings.balance = reverse == 1;
            check_meshes(&p);
            close_problem(&p);
        }
}

XD_TEST(every_mesh_weighs_several_teachers_alike) {
    static const xd_xtoken_score scores[3] = { XD_XTOKEN_SCORE_CE, XD_XTOKEN_SCORE_ENTROPY,
                                               XD_XTOKEN_SCORE_NONE };
    for (int i = 0; i < 3; i++) {
        problem p;
        open_problem(&p, XD_XTOKEN_PROJECTED);
        p.kinds[1] = XD_XTOKEN_GOLD;
        p.kinds[2] = XD_XTOKEN_SAME;
        p.teacher_count = 3;
        p.settings.score = scores[i];
        p.settings.normalise_by_vocabulary = i == 1;
        if (i == 2) p.settings.mode = XD_XTOKEN_SELECT;
        check_meshes(&p);
        close_problem(&p);
    }
}

XD_TEST(every_mesh_averages_logits_alike) {
    problem p;
    open_problem(&p, XD_XTOKEN_SAME);
    p.kinds[1] = XD_XTOKEN_SAME;
    p.teacher_count = 2;
    p.settings.mode = XD_XTOKEN_AVERAGED_LOGITS;
    check_meshes(&p);
    close_problem(&p);
}

/* One rank alone has a wrong chunk id: every rank is told, and none waits. */
XD_TEST(ranks_fail_alike_when_one_has_a_bad_input) {
    problem p;
    xd_error error;
    mesh_job *job = (mesh_job *)calloc(1, sizeof *job);
    open_problem(&p, XD_XTOKEN_PROJECTED);
    job->p = &p;
    job->dp = job->cp = job->tp = 2;
    job->spoilt = 5;
    CHECK(xd_run_threads(8, NULL, mesh_body, job, &error) == XD_OK);
    for (int r = 0; r < 8; r++)
        CHECK_EQ_INT(job->results[r], r == job->spoilt ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    free(job);
    close_problem(&p);
}

/* ---- INVARIANT mode ---- */

XD_TEST(in_invariant_mode_every_mesh_has_the_bits_of_one_rank) {
    for (int kind = 0; kind < 3; kind++)
        for (int reverse = 0; reverse < 2; reverse++) {
            problem p;
            open_problem_as(&p, (xd_xtoken_kind)kind, XD_REDUCTION_INVARIANT);
            p.settings.reverse = reverse == 1;
            p.settings.balance = reverse == 1;
            p.settings.compat = reverse == 0 && kind == 1;
            check_meshes(&p);
            close_problem(&p);
        }
}

XD_TEST(in_invariant_mode_several_teachers_have_the_bits_of_one_rank) {
    for (int i = 0; i < 2; i++) {
        problem p;
        open_problem_as(&p, XD_XTOKEN_PROJECTED, XD_REDUCTION_INVARIANT);
        p.kinds[1] = XD_XTOKEN_GOLD;
        p.kinds[2] = XD_XTOKEN_SAME;
        p.teacher_count = 3;
        p.settings.score = i == 0 ? XD_XTOKEN_SCORE_MAX_PROB : XD_XTOKEN_SCORE_NONE;
        p.settings.mode = i == 0 ? XD_XTOKEN_SUM : XD_XTOKEN_SELECT;
        check_meshes(&p);
        close_problem(&p);
    }
}

XD_TEST(invariant_mode_agrees_with_the_default_and_keeps_infinities) {
    for (int kind = 0; kind < 3; kind++) {
        problem p[2];
        call c[2];
        xd_xtoken_values values[2];
        for (int i = 0; i < 2; i++) {
            open_problem_as(&p[i], (xd_xtoken_kind)kind,
                            i ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
            for (int t = 0; t < TEACHER_ROWS; t++) p[i].teacher[t * TEACHER_SIZE + 2] = -INFINITY;
            for (int t = 0; t < STUDENT_ROWS; t++) p[i].same[t * STUDENT_SIZE + 2] = -INFINITY;
            p[i].student[4 * STUDENT_SIZE] = NAN; /* row 4: chunk 4 of the first sequence */
            open_call(&p[i], &c[i]);
            values[i] = run_call(&p[i], &c[i]);
        }
        CHECK_NEAR(values[0].loss, values[1].loss, 1e-9);
        /* the row's cross entropy, and the chunk; SAME sees the chosen columns alone */
        CHECK_EQ_INT(c[0].status.not_finite, kind == 2 ? 1 : 2);
        CHECK_EQ_INT(c[1].status.not_finite, kind == 2 ? 1 : 2);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) CHECK(isfinite(c[0].gradient[i]));
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
            CHECK_NEAR(c[0].gradient[i], c[1].gradient[i], 1e-7);
        for (int i = 0; i < 2; i++) {
            xd_vocab_destroy(c[i].vocab);
            close_problem(&p[i]);
        }
    }
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
    c.teachers[0].labels = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "teacher 0 has no labels");
    c.d.balance = true;
    c.d.labels = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "balance needs labels");
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
    c.teachers[0].projection = NULL;
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

/* ---- chunks and projections ---- */

XD_TEST(chunk_ids_outside_their_range_are_refused) {
    xd_ctx *ctx = NULL;
    int64_t ids[3] = { 0, 2, -1 }, sizes[2] = { 7, 7 };
    xd_chunk_map map;
    memset(&map, 0, sizeof map);
    map.ids = ids;
    map.sequences = 1;
    map.held = 3;
    map.chunks = 2;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_chunk_sizes(ctx, &map, sizes) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "chunk id 2 of position 1 is outside [-1, 2)") != NULL);
    CHECK_EQ_INT(sizes[0], 7);
    ids[1] = 1;
    CHECK(xd_chunk_sizes(ctx, &map, sizes) == XD_OK);
    CHECK_EQ_INT(sizes[0], 1);
    CHECK_EQ_INT(sizes[1], 1);
    xd_ctx_destroy(ctx);
}

XD_TEST(some_columns_of_a_projection_are_columns_of_the_whole) {
    problem p;
    xd_vocab *vocab = NULL;
    const int64_t columns[3] = { 1, 4, 10 }, wrong[2] = { 4, 1 };
    double whole[STUDENT_ROWS * TEACHER_SIZE], some[STUDENT_ROWS * 3], weight[STUDENT_ROWS * TEACHER_SIZE];
    float gradient[STUDENT_ROWS * STUDENT_SIZE], expected[STUDENT_ROWS * STUDENT_SIZE];
    open_problem(&p, XD_XTOKEN_PROJECTED);
    CHECK(xd_vocab_create(p.ctx, NULL, 0, STUDENT_SIZE, STUDENT_SIZE, &vocab) == XD_OK);
    const xd_rows rows = rows_of(p.student, STUDENT_ROWS, STUDENT_SIZE);
    CHECK(xd_project(p.ctx, vocab, &p.projection, rows, NULL, TEACHER_SIZE, whole) == XD_OK);
    CHECK(xd_project(p.ctx, vocab, &p.projection, rows, columns, 3, some) == XD_OK);
    memset(weight, 0, sizeof weight);
    for (int t = 0; t < STUDENT_ROWS; t++)
        for (int j = 0; j < 3; j++) {
            CHECK(some[t * 3 + j] == whole[t * TEACHER_SIZE + columns[j]]);
            weight[t * TEACHER_SIZE + columns[j]] = some[t * 3 + j];
        }
    CHECK(xd_project_backward(p.ctx, vocab, &p.projection, weight, NULL, TEACHER_SIZE,
                              rows_of(expected, STUDENT_ROWS, STUDENT_SIZE)) == XD_OK);
    CHECK(xd_project_backward(p.ctx, vocab, &p.projection, some, columns, 3,
                              rows_of(gradient, STUDENT_ROWS, STUDENT_SIZE)) == XD_OK);
    CHECK(memcmp(gradient, expected, sizeof expected) == 0);
    CHECK(xd_project(p.ctx, vocab, &p.projection, rows, wrong, 2, some) == XD_ERROR_ARGUMENT);
    CHECK(xd_project(p.ctx, vocab, &p.projection, rows, NULL, 3, some) == XD_ERROR_SHAPE);
    xd_vocab_destroy(vocab);
    close_problem(&p);
}

/* ---- a teacher's shards ---- */

/* Random cuts on both sides: what is put together is the whole, bit for bit. */
XD_TEST(a_teacher_cut_in_any_way_is_put_together_again) {
    xd_ctx *ctx = NULL;
    float full[12 * 10], out[12 * 10];
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    seed = 3;
    fill(full, 120, 2.0);
    for (int round = 0; round < 40; round++) {
        const int64_t p = (int64_t)(uniform() * 13.0), v = (int64_t)(uniform() * 11.0);
        const int64_t begin = (int64_t)(uniform() * 6.0), end = begin + (int64_t)(uniform() * 7.0);
        const xd_teacher_shard shards[4] = {
            { 0, p, 0, v }, { p, 12, 0, v }, { 0, p, v, 10 }, { p, 12, v, 10 }
        };
        xd_teacher_piece pieces[4];
        int64_t count = 0;
        CHECK(xd_teacher_route(ctx, shards, 4, begin, end, 10, pieces, &count) == XD_OK);
        for (int64_t i = 0; i < count; i++) {
            const xd_teacher_shard *s = &shards[pieces[i].shard];
            xd_rows shard =
                rows_of(full + s->position_begin * 10 + s->vocabulary_begin,
                        s->position_end - s->position_begin, s->vocabulary_end - s->vocabulary_begin);
            shard.stride = 10;
            CHECK(xd_teacher_piece_copy(ctx, &pieces[i], shard, rows_of(out, end - begin, 10)) == XD_OK);
        }
        CHECK(memcmp(out, full + begin * 10, (size_t)(end - begin) * 10 * sizeof(float)) == 0);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(shards_that_overlap_or_leave_a_gap_are_refused) {
    const xd_teacher_shard overlap[2] = { { 0, 4, 0, 6 }, { 3, 8, 5, 10 } },
                           gap[2] = { { 0, 8, 0, 4 }, { 0, 8, 5, 10 } };
    xd_teacher_piece pieces[2];
    int64_t count = 77;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_teacher_route(ctx, overlap, 2, 0, 8, 10, pieces, &count) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "shards 0 and 1 overlap") != NULL);
    CHECK(xd_teacher_route(ctx, gap, 2, 0, 8, 10, pieces, &count) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "72 of the window's 80") != NULL);
    CHECK(xd_teacher_route(ctx, gap, 2, 0, 8, 9, pieces, &count) == XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(count, 77);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
