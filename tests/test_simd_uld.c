/* Universal logit distillation on every CPU level against the plain one, and that against lists sorted here:
 * odd sizes, both merges, hybrid, bf16, ties, rows and chunks that f32 does not fit, numbers that are none. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

#include <stdlib.h>

enum { ROWS = 23, OTHER_ROWS = 19, STUDENT = 1037, TEACHER = 2903, WIDTH = 1041, MATCHED = 401 };

/* One problem; every level computes on a copy of the same logits. */
typedef struct simd_problem {
    int64_t vocabulary, other, width;
    float *student, *teacher;
    int64_t *ids, *other_ids, *matched, *other_matched;
    xd_aligned_chunk chunks[4];
    xd_uld_desc settings;
    bool bf16, in_place;
} simd_problem;

static uint32_t seed;

static double uniform(void) {
    seed = seed * 1664525u + 1013904223u;
    return (double)(seed >> 8) / 16777216.0;
}

static float *random_logits(int64_t count) {
    float *x = (float *)malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = (float)((uniform() - 0.5) * 12.0);
    return x;
}

static int64_t *spread_ids(int64_t count, int64_t step, int64_t size) {
    int64_t *ids = (int64_t *)malloc((size_t)count * sizeof *ids);
    for (int64_t i = 0; i < count; i++) ids[i] = (step * i + 1) % size;
    return ids;
}

static void open_sized(simd_problem *p, int64_t vocabulary, int64_t other, int64_t width) {
    static const int32_t bounds[4][4] = {
        { 1, 2, 1, 2 }, { 2, 5, 2, 3 }, { 6, 7, 5, 9 }, { 20, 23, 12, 13 }
    };
    memset(p, 0, sizeof *p);
    seed = 11;
    p->vocabulary = vocabulary;
    p->other = other;
    p->width = width;
    p->student = random_logits(ROWS * width);
    p->teacher = random_logits(OTHER_ROWS * other);
    p->ids = spread_ids(ROWS, 101, vocabulary);
    p->other_ids = spread_ids(OTHER_ROWS, 77, other);
    p->matched = spread_ids(MATCHED, 2, vocabulary);
    p->other_matched = spread_ids(MATCHED, 5, other);
    for (int i = 0; i < 4; i++) {
        p->chunks[i].student_begin = bounds[i][0];
        p->chunks[i].student_end = bounds[i][1];
        p->chunks[i].teacher_begin = bounds[i][2];
        p->chunks[i].teacher_end = bounds[i][3];
    }
    p->settings.chunk_count = 4;
    p->settings.scale = 1.0;
    p->settings.matched_weight = 0.3;
    p->settings.unmatched_weight = 0.7;
    p->settings.beta = 0.4;
    p->settings.student.temperature = 1.3;
}

static void open_simd(simd_problem *p) {
    open_sized(p, STUDENT, TEACHER, WIDTH);
}

static void close_simd(simd_problem *p) {
    free(p->student);
    free(p->teacher);
    free(p->ids);
    free(p->other_ids);
    free(p->matched);
    free(p->other_matched);
}

typedef struct simd_result {
    xd_result result;
    xd_uld_values values;
    float *gradient; /* [ROWS, width] */
} simd_result;

static void *copy_of(const float *from, int64_t count, xd_dtype dtype) {
    void *to = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) xd_store_f64(to, dtype, i, (double)from[i]);
    return to;
}

static void run_level(const simd_problem *p, xd_cpu_level level, simd_result *r) {
    const xd_dtype dtype = p->bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_uld_desc d = p->settings;
    memset(&desc, 0, sizeof desc);
    memset(r, 0, sizeof *r);
    desc.cpu = level;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    void *student = copy_of(p->student, ROWS * p->width, dtype);
    void *teacher = copy_of(p->teacher, OTHER_ROWS * p->other, dtype);
    void *gradient = p->in_place ? student : copy_of(p->student, ROWS * p->width, dtype);
    const xd_rows x = { student, dtype, ROWS, p->width, 0 }, y = { teacher, dtype, OTHER_ROWS, p->other, 0 };
    d.student.logits = d.gradient = x;
    d.gradient.data = gradient;
    d.student.vocabulary = p->vocabulary;
    d.student.ids = p->ids;
    d.teacher.logits = y;
    d.teacher.vocabulary = p->other;
    d.teacher.ids = p->other_ids;
    d.chunks = p->chunks;
    d.matched_student = p->matched;
    d.matched_teacher = p->other_matched;
    r->result = xd_uld_loss(ctx, &d, &r->values);
    r->gradient = (float *)malloc((size_t)(ROWS * p->width) * sizeof(float));
    for (int64_t i = 0; i < ROWS * p->width; i++) r->gradient[i] = (float)xd_load_f64(gradient, dtype, i);
    if (!p->in_place) free(gradient);
    free(student);
    free(teacher);
    xd_ctx_destroy(ctx);
}

/* Every level this machine has against the plain one. */
static void check_levels(const simd_problem *p) {
    simd_result plain, fast;
    double largest = 0.0;
    run_level(p, XD_CPU_PLAIN, &plain);
    for (int64_t i = 0; i < ROWS * p->width; i++) largest = fmax(largest, fabs((double)plain.gradient[i]));
    XD_TEST_LEVELS(level, XD_CPU_PLAIN + 1) {
        run_level(p, (xd_cpu_level)level, &fast);
        CHECK_EQ_INT(fast.result, plain.result);
        /* f32 probabilities, whose sums are 1 however small their differences */
        CHECK_NEAR(fast.values.loss, plain.values.loss, 1e-6 * fabs(plain.values.loss) + 1e-7);
        CHECK_NEAR(fast.values.matched, plain.values.matched, 1e-6 * fabs(plain.values.matched) + 1e-7);
        CHECK_NEAR(fast.values.unmatched, plain.values.unmatched, 1e-6 * fabs(plain.values.unmatched) + 1e-7);
        CHECK_EQ_INT(fast.values.chunks, plain.values.chunks);
        /* where slopes cancel the error is that of the probabilities: the portable powers of two err by 1e-7, the others by less */
        const double bound = (level == XD_CPU_PORTABLE ? 3e-6 : 2e-6) * largest;
        for (int64_t i = 0; plain.result == XD_OK && i < ROWS * p->width; i++) {
            const double size = p->bf16 ? fabs((double)plain.gradient[i]) / 128.0 : 0.0;
            CHECK_NEAR(fast.gradient[i], plain.gradient[i], bound + size);
            if (i % p->width >= p->vocabulary) CHECK(fast.gradient[i] == 0.0f);
        }
        free(fast.gradient);
    }
    free(plain.gradient);
}

XD_TEST(every_level_has_the_loss_and_gradient_of_the_plain_one) {
    static const double betas[] = { 0.0, 0.4, 1.0 };
    for (int form = 0; form < 16; form++) {
        simd_problem p;
        open_simd(&p);
        p.settings.merge = (xd_uld_merge)(form % 2);
        p.settings.matched_count = form / 2 % 2 ? MATCHED : 0;
        p.settings.beta = betas[form % 3];
        p.bf16 = form / 4 % 2 == 1;
        p.in_place = form / 8 == 1;
        check_levels(&p);
        close_simd(&p);
    }
}

XD_TEST(every_level_ranks_equals_by_their_ids) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        simd_problem p;
        open_simd(&p);
        p.bf16 = bf16 == 1;
        for (int64_t i = 0; i < ROWS * WIDTH; i++) /* five values, both zeros and -infinity */
            p.student[i] = i % 11 == 0 ? -INFINITY : i % 7 == 0 ? -0.0f : (float)(int)(p.student[i] / 3.0f);
        check_levels(&p);
        close_simd(&p);
    }
}

/* Steep rows, a temperature of next to nothing, and a chunk whose factor is below all that f32 has. */
XD_TEST(every_level_has_what_f32_cannot_say) {
    for (int form = 0; form < 3; form++) {
        simd_problem p;
        open_simd(&p);
        p.settings.matched_count = form == 1 ? MATCHED : 0;
        for (int64_t i = 0; form == 0 && i < ROWS * WIDTH; i++) p.student[i] *= 1e20f;
        if (form == 1) p.settings.teacher.temperature = 1e-7;
        if (form == 2) {
            p.chunks[3].student_begin = 8; /* fifteen tokens */
            for (int64_t t = 8; t < 22; t++) p.student[(t - 1) * WIDTH + p.ids[t]] = -40.0f;
        }
        check_levels(&p);
        close_simd(&p);
    }
}

XD_TEST(every_level_refuses_rows_that_are_not_finite) {
    for (int form = 0; form < 3; form++) {
        simd_problem p;
        open_simd(&p);
        if (form == 0) p.student[2 * WIDTH + 1036] = NAN;
        if (form == 1) p.teacher[5 * TEACHER] = INFINITY;
        for (int v = 0; form == 2 && v < STUDENT; v++) p.student[v] = -INFINITY;
        check_levels(&p);
        simd_result r;
        run_level(&p, XD_CPU_BEST, &r);
        CHECK_EQ_INT(r.result, XD_ERROR_DATA);
        CHECK(r.values.loss == 0.0 && r.values.chunks == 0);
        free(r.gradient);
        close_simd(&p);
    }
}

/* ---- a vocabulary of some size ---- */

static int descending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Probabilities of a row, largest first, and zeros up to `room`. */
static double *sorted_softmax(const float *row, int64_t n, int64_t room) {
    double *p = (double *)calloc((size_t)room, sizeof *p), sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += p[i] = exp((double)row[i]);
    for (int64_t i = 0; i < n; i++) p[i] /= sum;
    qsort(p, (size_t)n, sizeof *p, descending);
    return p;
}

XD_TEST(fifty_thousand_ids_are_sorted_as_any_sort_does) {
    enum { SIZE = 50257, OTHER = 49999 };
    simd_problem p;
    simd_result r;
    double sum = 0.0;
    open_sized(&p, SIZE, OTHER, SIZE);
    p.settings.student.temperature = 1.0;
    p.settings.chunk_count = 1; /* one token, predicted by the first rows */
    check_levels(&p);
    run_level(&p, XD_CPU_PLAIN, &r);
    double *s = sorted_softmax(p.student, SIZE, SIZE), *t = sorted_softmax(p.teacher, OTHER, SIZE);
    for (int64_t i = 0; i < SIZE; i++) sum += fabs(s[i] - t[i]);
    CHECK_NEAR(r.values.loss, sum, 1e-12);
    free(s);
    free(t);
    free(r.gradient);
    close_simd(&p);
}

/* ---- several chunks at a time ---- */

/* The loss of chunks of one token each with a table of kernels; the gradient in `gradient`. */
static xd_uld_values run_table(const xd_kernels *kernels, const xd_uld_desc *desc, float *gradient) {
    xd_ctx_desc settings;
    xd_ctx *ctx = NULL;
    xd_uld_values values;
    xd_uld_desc d = *desc;
    memset(&settings, 0, sizeof settings);
    settings.kernels = kernels;
    d.gradient = d.student.logits;
    d.gradient.data = gradient;
    CHECK(xd_ctx_create(&settings, &ctx) == XD_OK);
    CHECK(xd_uld_loss(ctx, &d, &values) == XD_OK);
    xd_ctx_destroy(ctx);
    return values;
}

/* As on a device, where 64 MB hold nine chunks of this vocabulary; on a CPU they come one by one. */
XD_TEST(chunks_that_are_worked_on_together_have_the_bits_of_single_ones) {
    enum { SIZE = 200003, TOKENS = 16, TILED = 13 };
    const size_t bytes = (size_t)TOKENS * SIZE * sizeof(float);
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    const xd_kernels plain = *xd_ctx_kernels(ctx);
    xd_kernels device = plain;
    xd_ctx_destroy(ctx);
    xd_aligned_chunk chunks[TILED];
    xd_uld_desc d;
    memset(chunks, 0, sizeof chunks);
    memset(&d, 0, sizeof d);
    float *student = random_logits((int64_t)TOKENS * SIZE), *teacher = random_logits((int64_t)TOKENS * SIZE);
    float *one = (float *)malloc(bytes), *other = (float *)malloc(bytes);
    int64_t *ids = spread_ids(TOKENS, 7919, SIZE);
    for (int i = 0; i < TILED; i++) { /* token 9 is nobody's */
        chunks[i].student_begin = chunks[i].teacher_begin = i + 1 + (i > 7);
        chunks[i].student_end = chunks[i].teacher_end = i + 2 + (i > 7);
    }
    const xd_rows x = { student, XD_DTYPE_F32, TOKENS, SIZE, 0 },
                  y = { teacher, XD_DTYPE_F32, TOKENS, SIZE, 0 };
    d.scale = 1.0;
    d.student.logits = x;
    d.teacher.logits = y;
    d.student.vocabulary = d.teacher.vocabulary = SIZE;
    d.student.ids = d.teacher.ids = ids;
    d.chunks = chunks;
    d.chunk_count = TILED;
    device.device = XD_DEVICE_CUDA; /* the CPU's kernels and memory under another name */
    const xd_uld_values a = run_table(&plain, &d, one), b = run_table(&device, &d, other);
    CHECK(a.loss == b.loss && a.loss > 0.0 && b.chunks == TILED);
    CHECK(memcmp(one, other, bytes) == 0);
    free(student);
    free(teacher);
    free(one);
    free(other);
    free(ids);
}

XD_TEST_MAIN()
