/* Losses across tokenizers on every CPU level against the plain one: odd sizes, ends of rows, bf16, ties,
 * numbers that are none, rows that f32 does not fit. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

#include <stdlib.h>

enum { ROWS = 61, OTHER_ROWS = 57, STUDENT = 1037, TEACHER = 903, WIDTH = 1041, ENTRIES = 3, CHUNKS = 45 };

/* One problem; every level computes on a copy of the same logits. */
typedef struct simd_problem {
    float *student, *teacher;
    int64_t student_chunks[ROWS], teacher_chunks[OTHER_ROWS], labels[ROWS];
    int32_t ids[STUDENT * ENTRIES];
    float weights[STUDENT * ENTRIES];
    xd_xtoken_desc settings;
    xd_xtoken_kind kind;
    bool bf16, in_place;
} simd_problem;

static uint32_t seed;

static double uniform(void) {
    seed = seed * 1664525u + 1013904223u;
    return (double)(seed >> 8) / 16777216.0;
}

/* Every second student id is one teacher id, the others three of them. */
static void open_simd(simd_problem *p, xd_xtoken_kind kind) {
    memset(p, 0, sizeof *p);
    seed = 11;
    p->kind = kind;
    p->student = (float *)malloc(ROWS * WIDTH * sizeof(float));
    p->teacher = (float *)malloc(OTHER_ROWS * TEACHER * sizeof(float));
    for (int i = 0; i < ROWS * WIDTH; i++) p->student[i] = (float)((uniform() - 0.5) * 12.0);
    for (int i = 0; i < OTHER_ROWS * TEACHER; i++) p->teacher[i] = (float)((uniform() - 0.5) * 12.0);
    for (int i = 0; i < ROWS; i++) {
        p->student_chunks[i] = i < 50 ? i * 4 / 5 : i < 58 ? CHUNKS - 1 : -1; /* the last has eight rows */
        p->labels[i] = i % 7 == 3 ? XD_IGNORE_INDEX : i * 101 % STUDENT;
    }
    for (int i = 0; i < OTHER_ROWS; i++) p->teacher_chunks[i] = i < 54 ? i * 5 / 6 : -1;
    for (int v = 0; v < STUDENT; v++)
        for (int e = 0; e < ENTRIES; e++) {
            const bool exact = v % 2 == 0;
            p->ids[v * ENTRIES + e] = (int32_t)((v * 7 + e * 13) % TEACHER);
            p->weights[v * ENTRIES + e] = exact ? (e == 0 ? 1.0f : 0.0f) : 0.5f - 0.15f * (float)e;
            if (exact && e > 0) p->ids[v * ENTRIES + e] = -1;
        }
    p->settings.temperature = 1.3;
    p->settings.columns = 333;
    p->settings.tail = 77;
    p->settings.ce_weight = 0.4;
}

static void close_simd(simd_problem *p) {
    free(p->student);
    free(p->teacher);
}

typedef struct simd_result {
    xd_xtoken_values values;
    xd_xtoken_teacher_values teacher;
    xd_status status;
    float *gradient;
} simd_result;

static void *copy_of(const float *from, int64_t count, bool bf16) {
    void *to = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++)
        xd_store_f64(to, bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32, i, (double)from[i]);
    return to;
}

static void run_level(const simd_problem *p, xd_cpu_level level, simd_result *r) {
    const xd_dtype dtype = p->bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    const xd_projection_rows rows = { (int32_t *)p->ids, (float *)p->weights, STUDENT, ENTRIES };
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_projection projection;
    xd_exact_map map;
    xd_xtoken_teacher t;
    xd_xtoken_desc d = p->settings;
    memset(&desc, 0, sizeof desc);
    t = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    memset(r, 0, sizeof *r);
    desc.cpu = level;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, STUDENT, &vocab) == XD_OK);
    CHECK(xd_projection_from_rows(ctx, &rows, STUDENT, TEACHER, &projection) == XD_OK);
    CHECK(exact_map_create(ctx, &rows, TEACHER, false, &map) == XD_OK);
    void *student = copy_of(p->student, ROWS * WIDTH, p->bf16);
    void *teacher = copy_of(p->teacher, OTHER_ROWS * TEACHER, p->bf16);
    void *gradient = p->in_place ? student : copy_of(p->student, ROWS * WIDTH, p->bf16);
    const xd_rows x = { student, dtype, ROWS, STUDENT, WIDTH };
    const xd_rows y = { teacher, dtype, OTHER_ROWS, TEACHER, 0 };
    const xd_rows g = { gradient, dtype, ROWS, WIDTH, WIDTH };
    t.kind = p->kind;
    t.logits = y;
    t.student_chunks = p->student_chunks;
    t.teacher_chunks = p->teacher_chunks;
    t.chunks = CHUNKS;
    t.projected.projection = &projection;
    t.gold.map = &map;
    d.student = x;
    d.common.gradient = g;
    d.vocab = vocab;
    d.common.labels.data = p->labels;
    d.teachers = &t;
    d.teacher_count = 1;
    d.teacher_values = &r->teacher;
    d.common.status = &r->status;
    CHECK(xd_xtoken_loss(ctx, &d, &r->values) == XD_OK);
    r->gradient = (float *)malloc(ROWS * WIDTH * sizeof(float));
    for (int64_t i = 0; i < ROWS * WIDTH; i++) r->gradient[i] = (float)xd_load_f64(gradient, dtype, i);
    if (!p->in_place) free(gradient);
    free(student);
    free(teacher);
    xd_projection_destroy(ctx, &projection);
    xd_exact_map_destroy(ctx, &map);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

/* Every level this machine has against the plain one. */
static void check_levels(const simd_problem *p) {
    simd_result plain, fast;
    double largest = 0.0;
    run_level(p, XD_CPU_PLAIN, &plain);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) largest = fmax(largest, fabs((double)plain.gradient[i]));
    XD_TEST_LEVELS(level, XD_CPU_PLAIN + 1) {
        run_level(p, (xd_cpu_level)level, &fast);
        CHECK_NEAR(fast.values.loss, plain.values.loss, 1e-6 * fabs(plain.values.loss));
        CHECK_NEAR(fast.teacher.kd, plain.teacher.kd, 1e-6 * fabs(plain.teacher.kd));
        CHECK_NEAR(fast.teacher.tail, plain.teacher.tail, 2e-5 * fabs(plain.teacher.tail)); /* differences */
        CHECK(fast.teacher.agreeing == plain.teacher.agreeing &&
              fast.teacher.compared == plain.teacher.compared);
        CHECK_EQ_INT(fast.status.not_finite, plain.status.not_finite);
        for (int64_t i = 0; i < ROWS * WIDTH; i++) {
            const double size = p->bf16 ? fabs((double)plain.gradient[i]) / 128.0 : 0.0;
            CHECK_NEAR(fast.gradient[i], plain.gradient[i], 2e-6 * largest + size);
            if (i % WIDTH >= STUDENT) CHECK(fast.gradient[i] == 0.0f);
        }
        free(fast.gradient);
    }
    free(plain.gradient);
}

XD_TEST(every_level_has_the_loss_and_gradient_of_the_plain_one) {
    for (int form = 0; form < 16; form++) {
        simd_problem p;
        open_simd(&p, form % 2 ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED);
        p.settings.reverse = form / 2 % 2 == 1;
        p.settings.compat = form / 4 % 2 == 1;
        p.bf16 = p.in_place = form / 8 == 1;
        check_levels(&p);
        close_simd(&p);
    }
}

XD_TEST(every_level_leaves_out_chunks_that_are_not_finite) {
    for (int kind = 0; kind < 2; kind++) {
        simd_problem p;
        open_simd(&p, (xd_xtoken_kind)kind);
        p.student[3 * WIDTH + 17] = NAN;
        p.student[20 * WIDTH + 1036] = INFINITY;
        p.teacher[30 * TEACHER + 2] = NAN;
        for (int v = 0; v < STUDENT; v++) p.student[9 * WIDTH + v] = -INFINITY;
        check_levels(&p);
        close_simd(&p);
    }
}

XD_TEST(every_level_takes_minus_infinity_for_no_probability) {
    for (int kind = 0; kind < 2; kind++) {
        simd_problem p;
        open_simd(&p, (xd_xtoken_kind)kind);
        for (int t = 0; t < ROWS; t++)
            for (int v = 1; v < STUDENT; v += 96) p.student[t * WIDTH + v] = -INFINITY;
        for (int t = 0; t < OTHER_ROWS; t++) p.teacher[t * TEACHER + 5] = -INFINITY;
        check_levels(&p);
        close_simd(&p);
    }
}

XD_TEST(every_level_sorts_equals_by_their_ids) {
    simd_problem p;
    open_simd(&p, XD_XTOKEN_GOLD);
    for (int t = 0; t < ROWS; t++) /* five values alone */
        for (int v = 0; v < STUDENT; v++) p.student[t * WIDTH + v] = (float)(v * 37 % 5);
    for (int t = 0; t < OTHER_ROWS; t++)
        for (int v = 0; v < TEACHER; v++) p.teacher[t * TEACHER + v] = (float)(v * 31 % 4);
    check_levels(&p);
    close_simd(&p);
}

XD_TEST(every_level_takes_rows_that_f32_does_not_fit) {
    for (int kind = 0; kind < 2; kind++) {
        simd_problem p;
        open_simd(&p, (xd_xtoken_kind)kind);
        for (int v = 0; v < STUDENT; v++)
            p.student[12 * WIDTH + v] += 1048576.0f; /* multiples of 1/8 remain */
        check_levels(&p);
        close_simd(&p);
    }
}

/* Equal, or NaN both. */
static bool same_moment(double fast, double plain, double bound) {
    return isnan(plain) ? isnan(fast) : fast == plain || fabs(fast - plain) <= bound;
}

XD_TEST(every_level_has_the_moments_of_the_plain_one) {
    enum { COUNT = 7 };
    static float x[COUNT * TEACHER];
    const int64_t rows[COUNT] = { 6, 0, 1, 2, 3, 4, 5 }, labels[COUNT] = { 0, TEACHER, 902, -100, 5, 17, 3 };
    seed = 5;
    for (int i = 0; i < COUNT * TEACHER; i++) x[i] = (float)((uniform() - 0.5) * 12.0);
    for (int v = 0; v < TEACHER; v += 2) x[TEACHER + v] = -INFINITY;
    for (int v = 0; v < TEACHER; v++) x[2 * TEACHER + v] = -INFINITY;
    x[3 * TEACHER + 17] = NAN;
    x[4 * TEACHER + 902] = 1e6f; /* is more than f32 fits */
    x[5 * TEACHER + 900] = 300.0f;
    for (int form = 0; form < 4; form++) {
        void *data = copy_of(x, COUNT * TEACHER, form / 2 == 1);
        double moments[2][COUNT * XD_XTOKEN_MOMENTS];
        xd_xtoken_moments_args a;
        memset(&a, 0, sizeof a);
        a.x.logits.data = data;
        a.x.logits.dtype = form / 2 == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        a.x.logits.rows = COUNT;
        a.x.logits.cols = a.x.columns = TEACHER;
        a.x.rows = rows;
        a.x.count = COUNT;
        a.labels.data = labels;
        a.entropy = form % 2 == 1;
        XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
            xd_ctx_desc desc;
            xd_ctx *ctx = NULL;
            memset(&desc, 0, sizeof desc);
            desc.cpu = (xd_cpu_level)level;
            CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
            const xd_launch launch = xd_ctx_launch(ctx);
            a.moments = moments[level > (int)XD_CPU_PLAIN];
            CHECK(xd_ctx_kernels(ctx)->xtoken.moments(&launch, &a) == XD_OK);
            for (int i = 0; i < COUNT * XD_XTOKEN_MOMENTS && level > (int)XD_CPU_PLAIN; i++)
                CHECK(same_moment(moments[1][i], moments[0][i], 4e-6));
            xd_ctx_destroy(ctx);
        }
        free(data);
    }
}

XD_TEST_MAIN()
