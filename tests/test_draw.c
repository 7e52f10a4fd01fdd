/* Random numbers for rows of samples: those of the counters one by one, for every split, type and number of threads; what is refused. */
#include "xdistill.h"

#include "xd_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, COLUMNS = 41 };

static xd_ctx *context(int threads) {
    const xd_ctx_desc desc = { .threads = threads };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    return ctx;
}

static xd_draw_desc draw_of(void *out, xd_dtype dtype, int64_t rows, int64_t columns) {
    const xd_draw_desc d = {
        .random = { .seed = 11, .stream = XD_STREAM_USER, .micro = 2, .sample = 5, .step = 8 },
        .out = xd_rows_of(out, dtype, rows, columns)
    };
    return d;
}

/* Number `element` of a sample, formed alone and stored alone. */
static void expected(const xd_draw_desc *d, int64_t row, int64_t element, void *out) {
    xd_philox random = d->random;
    float number;
    random.sample += (uint32_t)row;
    if (d->uniform)
        xd_philox_fill_uniform(&random, element, 1, &number);
    else
        xd_philox_fill_normal(&random, element, 1, &number);
    xd_store_f64(out, d->out.dtype, 0, (double)number);
}

XD_TEST(every_split_of_every_type_has_the_numbers_of_the_counters) {
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    static const int64_t cuts[] = { 0, 1, 2, 5, 8, 23, 24, 41 };
    for (int k = 0; k < 8; k++) {
        xd_ctx *ctx = context(k < 4 ? 1 : 3);
        const size_t size = xd_dtype_size(types[k % 4]);
        unsigned char out[ROWS * COLUMNS * 8], one[8];
        memset(out, 0xab, sizeof out);
        for (int c = 0; c + 1 < (int)(sizeof cuts / sizeof *cuts); c++) {
            xd_draw_desc d = draw_of(out + (size_t)cuts[c] * size, types[k % 4], ROWS, cuts[c + 1] - cuts[c]);
            d.out.stride = COLUMNS;
            d.first = cuts[c];
            d.uniform = k / 2 % 2 == 1;
            CHECK_EQ_INT(xd_draw_rows(ctx, &d), XD_OK);
        }
        for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
            xd_draw_desc d = draw_of(NULL, types[k % 4], 0, 0);
            d.uniform = k / 2 % 2 == 1;
            expected(&d, i / COLUMNS, i % COLUMNS, one);
            CHECK(memcmp(one, out + (size_t)i * size, size) == 0);
        }
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(what_is_between_rows_stays) {
    xd_ctx *ctx = context(1);
    float out[ROWS * 10];
    for (int i = 0; i < ROWS * 10; i++) out[i] = 9.0f;
    xd_draw_desc d = draw_of(out, XD_DTYPE_F32, ROWS, 7);
    d.out.stride = 10;
    d.first = 3;
    CHECK_EQ_INT(xd_draw_rows(ctx, &d), XD_OK);
    for (int i = 0; i < ROWS * 10; i++) CHECK((out[i] == 9.0f) == (i % 10 >= 7));
    xd_ctx_destroy(ctx);
}

XD_TEST(many_numbers_have_the_same_bits_on_many_threads_and_the_moments_of_their_distribution) {
    enum { LONG = 100003 };
    float *a = (float *)malloc(2 * LONG * sizeof *a), *b = (float *)malloc(2 * LONG * sizeof *b);
    xd_ctx *one = context(1), *four = context(4);
    for (int uniform = 0; uniform < 2; uniform++) {
        double sum = 0.0, square = 0.0;
        xd_draw_desc d = draw_of(a, XD_DTYPE_F32, 2, LONG);
        d.uniform = uniform == 1;
        CHECK_EQ_INT(xd_draw_rows(one, &d), XD_OK);
        d.out.data = b;
        CHECK_EQ_INT(xd_draw_rows(four, &d), XD_OK);
        CHECK(memcmp(a, b, 2 * LONG * sizeof *a) == 0);
        for (int i = 0; i < 2 * LONG; i++) sum += (double)a[i], square += (double)a[i] * (double)a[i];
        const double mean = sum / (2 * LONG), variance = square / (2 * LONG) - mean * mean;
        CHECK_NEAR(mean, uniform ? 0.5 : 0.0, 0.02);
        CHECK_NEAR(variance, uniform ? 1.0 / 12.0 : 1.0, 0.02);
    }
    xd_ctx_destroy(one);
    xd_ctx_destroy(four);
    free(a);
    free(b);
}

XD_TEST(a_step_in_memory_is_added) {
    xd_ctx *ctx = context(1);
    float out[2][ROWS * COLUMNS];
    int64_t step = 5;
    xd_draw_desc d = draw_of(out[0], XD_DTYPE_F32, ROWS, COLUMNS);
    d.step = &step;
    CHECK_EQ_INT(xd_draw_rows(ctx, &d), XD_OK);
    d.step = NULL;
    d.random.step += 5;
    d.out.data = out[1];
    CHECK_EQ_INT(xd_draw_rows(ctx, &d), XD_OK);
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    d.random.step++;
    CHECK_EQ_INT(xd_draw_rows(ctx, &d), XD_OK);
    CHECK(memcmp(out[0], out[1], sizeof out[0]) != 0);
    xd_ctx_destroy(ctx);
}

static int64_t calls;

static void *take(void *user, size_t bytes) {
    (void)user;
    calls++;
    return malloc(bytes ? bytes : 1);
}

static void give_back(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(nothing_is_allocated) {
    const xd_ctx_desc desc = { .allocator = { take, give_back, NULL } };
    float out[ROWS * COLUMNS];
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    const xd_draw_desc d = draw_of(out, XD_DTYPE_F32, ROWS, COLUMNS);
    const int64_t before = calls;
    CHECK_EQ_INT(xd_draw_rows(ctx, &d), XD_OK);
    CHECK_EQ_INT(calls, before);
    xd_ctx_destroy(ctx);
}

XD_TEST(what_does_not_fit_is_refused_and_nothing_is_written) {
    xd_ctx *ctx = context(1);
    float out[8] = { 0 };
    const xd_draw_desc good = draw_of(out, XD_DTYPE_F32, 2, 4);
    xd_draw_desc d[8];
    static const xd_result codes[] = { XD_ERROR_DTYPE,    XD_ERROR_SHAPE,    XD_ERROR_SHAPE,
                                       XD_ERROR_ARGUMENT, XD_ERROR_ARGUMENT, XD_ERROR_ARGUMENT,
                                       XD_ERROR_SHAPE,    XD_ERROR_SHAPE };
    static const char *const texts[] = {
        "out is I32",
        "out has 2 rows of 4 elements, 3 apart",
        "out has -1 rows of 4 elements",
        "out has no memory",
        "the first element is number -1",
        "2 samples from sample 4294967295",
        "4 elements from 4398046511101 on; random numbers are for 4398046511104",
        "out has 2 rows of -4 elements"
    };
    for (int i = 0; i < 8; i++) d[i] = good;
    d[0].out.dtype = XD_DTYPE_I32;
    d[1].out.stride = 3;
    d[2].out.rows = -1;
    d[3].out.data = NULL;
    d[4].first = -1;
    d[5].random.sample = UINT32_MAX;
    d[6].first = (INT64_C(1) << 42) - 3;
    d[7].out.cols = -4;
    for (int i = 0; i < 8; i++) {
        CHECK_EQ_INT(xd_draw_rows(ctx, &d[i]), codes[i]);
        CHECK(strstr(xd_last_error(ctx)->message, texts[i]) != NULL);
    }
    for (int i = 0; i < 8; i++) CHECK(out[i] == 0.0f);
    d[0] = good;
    d[0].out.rows = 0, d[0].out.data = NULL;
    CHECK_EQ_INT(xd_draw_rows(ctx, &d[0]), XD_OK);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_table_without_the_entry_says_so) {
    float out[4];
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_kernels kernels = *xd_ctx_kernels(ctx);
    kernels.dmd.draw = NULL;
    xd_ctx_set_kernels(ctx, &kernels);
    const xd_draw_desc d = draw_of(out, XD_DTYPE_F32, 1, 4);
    CHECK_EQ_INT(xd_draw_rows(ctx, &d), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, "draw no random numbers") != NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
