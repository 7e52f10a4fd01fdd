/* What the benchmarks compare gradients with, before they time them: planted errors are larger than every limit. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_test.h"

#include "../bench/gradient.h"

#include <stdlib.h>

enum { ROWS = 2, COLUMNS = 128256 };

/* The gradient of a cross entropy as bench/gpu.cu has it, and a second copy to be spoilt. */
typedef struct scene {
    xd_dtype dtype;
    double limit;
    int64_t labels[ROWS];
    void *expected, *found;
    size_t bytes;
} scene;

static void scene_open(scene *s, xd_dtype dtype) {
    uint64_t seed = 1;
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_loss_desc d;
    xd_loss_values values;
    memset(&d, 0, sizeof d);
    s->dtype = dtype;
    s->limit = dtype == XD_DTYPE_F32 ? 1e-5 : 4e-3;
    s->bytes = (size_t)ROWS * COLUMNS * xd_dtype_size(dtype);
    s->expected = malloc(s->bytes);
    s->found = malloc(s->bytes);
    for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        xd_store_f64(s->expected, dtype, i, 8.0 * (double)(int64_t)seed / 9223372036854775808.0);
    }
    for (int64_t r = 0; r < ROWS; r++) s->labels[r] = r * 7919 % COLUMNS;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, COLUMNS, &vocab) == XD_OK);
    d.student = d.common.gradient = xd_rows_of(s->expected, dtype, ROWS, COLUMNS);
    d.vocab = vocab;
    d.hard_weight = 1.0;
    d.common.labels = xd_ids_of(s->labels, XD_DTYPE_I64);
    d.common.denominator_value = 8192.0;
    CHECK(xd_loss(ctx, &d, &values) == XD_OK);
    memcpy(s->found, s->expected, s->bytes);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

static void scene_close(scene *s) {
    free(s->expected);
    free(s->found);
}

/* Multiplies what is found in the columns of row 1, but for the label's, or in the label's alone. */
static void spoil(scene *s, bool label, double factor) {
    memcpy(s->found, s->expected, s->bytes);
    for (int64_t c = 0; c < COLUMNS; c++) {
        const int64_t i = COLUMNS + c;
        if ((c == s->labels[1]) == label)
            xd_store_f64(s->found, s->dtype, i, factor * xd_load_f64(s->expected, s->dtype, i));
    }
}

static double error_of(const scene *s, bool apart) {
    return bench_gradient_error(s->found, s->expected, s->dtype, ROWS, COLUMNS, apart ? s->labels : NULL,
                                apart ? 1 : 0);
}

XD_TEST(a_gradient_without_half_of_its_softmax_is_wrong) {
    for (int narrow = 0; narrow < 2; narrow++) {
        scene s;
        scene_open(&s, narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32);
        CHECK(error_of(&s, true) == 0.0);
        spoil(&s, false, 0.5);
        CHECK_NEAR(error_of(&s, true), 0.5, 1e-3);
        if (narrow)
            CHECK(bench_distance(s.found, s.expected, s.dtype, ROWS * COLUMNS) <
                  s.limit); /* hidden by the label's */
        spoil(&s, false, 0.0);
        CHECK(error_of(&s, true) > 100.0 * s.limit);
        spoil(&s, false, 1.01);
        CHECK(error_of(&s, true) > s.limit);
        scene_close(&s);
    }
}

XD_TEST(a_wrong_label_s_column_is_wrong) {
    for (int narrow = 0; narrow < 2; narrow++) {
        scene s;
        scene_open(&s, narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32);
        static const double factors[] = { 0.0, 0.5, 0.99, -1.0 };
        for (int i = 0; i < 4; i++) {
            spoil(&s, true, factors[i]);
            CHECK_NEAR(error_of(&s, true), 1.0 - factors[i], 5e-3);
            CHECK(error_of(&s, true) > s.limit);
        }
        /* The gradient of the label beside: two columns are wrong. */
        memcpy(s.found, s.expected, s.bytes);
        const int64_t at = COLUMNS + s.labels[1];
        xd_store_f64(s.found, s.dtype, at, xd_load_f64(s.expected, s.dtype, at + 1));
        xd_store_f64(s.found, s.dtype, at + 1, xd_load_f64(s.expected, s.dtype, at));
        CHECK(error_of(&s, true) > 1.0);
        scene_close(&s);
    }
}

XD_TEST(every_row_counts_for_itself_and_no_number_is_larger_than_all) {
    scene s;
    scene_open(&s, XD_DTYPE_F32);
    float *found = (float *)s.found;
    memset(found + COLUMNS, 0, COLUMNS * sizeof *found); /* a row that was left out */
    CHECK_NEAR(error_of(&s, true), 1.0, 1e-6);
    CHECK_NEAR(error_of(&s, false), 1.0, 1e-6);
    memcpy(s.found, s.expected, s.bytes);
    found[5] = NAN; /* in the first of the rows: the second does not hide it */
    CHECK(!(error_of(&s, true) <= s.limit));
    memset(s.expected, 0, s.bytes);
    CHECK(!(error_of(&s, true) <= s.limit));
    CHECK(isnan(bench_larger(NAN, 1.0)) && isnan(bench_larger(1.0, NAN)) && bench_larger(1.0, 2.0) == 2.0);
    scene_close(&s);
}

XD_TEST_MAIN()
