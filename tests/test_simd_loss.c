/* The vector levels of the losses against the plain one, which is their specification: powers, sums and
 * gradients within the bounds of f32 arithmetic, findings and selections exactly. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#if defined(XD_TEST_LAYERS)
#    include "kernel/simd/loops.h"
#endif
#include "xd_test.h"
#include "xd_test_cpu.h"

#include <stddef.h>
#include <stdlib.h>

enum { ROWS = 5, MOST = 70000, K = 7 };

static double uniform(uint64_t *state) { /* in (-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

/* ---- powers ---- */

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* 2^(x - whole) of n numbers, by the loop that writes gradients. */
static void powers(xd_cpu_level level, const float *x, float *out, int64_t n, double factor, double whole) {
    xdi_tile_gradient g;
    memset(&g, 0, sizeof g);
    g.x.data = (void *)(uintptr_t)x;
    g.out.data = out;
    g.hard = true;
    g.h = xdi_tile_power_of(factor, whole);
    g.hard_scale = 1.0f;
    xdi_loops_level(level)->tiles->gradient(&g, XDI_TILE_NONE, n);
}

XD_TEST(powers_are_within_3e_7_over_the_whole_range) {
    enum { COUNT = 2000 };
    static float x[COUNT], out[COUNT];
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE)
    for (int begin = -140; begin < 60; begin += 5) {
        double worst = 0.0;
        for (int i = 0; i < COUNT; i++) x[i] = (float)(begin + 5.0 * i / COUNT);
        powers((xd_cpu_level)level, x, out, COUNT, 1.0, 0.0);
        for (int i = 0; i < COUNT; i++) {
            const double expected = exp2((double)x[i]);
            if (x[i] <= -127.0f)
                CHECK(out[i] == 0.0f);
            else if (x[i] < -126.0f)
                CHECK(out[i] >= 0.0f && out[i] < 2.4e-38f);
            else
                worst = fmax(worst, fabs((double)out[i] / expected - 1.0));
        }
        CHECK_NEAR(worst, 0.0, 3e-7);
    }
}

XD_TEST(powers_of_special_numbers) {
    const float x[8] = { -INFINITY, NAN, 0.0f, 1e-45f, -0.0f, -3e38f, -1e-39f, 1.0f };
    const float expected[8] = { 0.0f, 0.0f, 1.0f, 1.0f, 1.0f, 0.0f, 1.0f, 2.0f };
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
        float out[8];
        powers((xd_cpu_level)level, x, out, 8, 1.0, 0.0);
        CHECK(isnan(out[1]));
        for (int i = 0; i < 8; i++)
            if (i != 1) CHECK(out[i] == expected[i]);
    }
}

XD_TEST(an_element_has_the_same_bits_at_any_position) {
    enum { COUNT = 67 };
    float x[COUNT], out[COUNT], alone;
    for (int i = 0; i < COUNT; i++) x[i] = (float)(-0.37 * i);
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE)
    for (int from = 0; from < COUNT; from += 3) {
        powers((xd_cpu_level)level, x + from, out, COUNT - from, 1.4426950408889634, 3.0);
        for (int i = from; i < COUNT; i++) {
            powers((xd_cpu_level)level, x + i, &alone, 1, 1.4426950408889634, 3.0);
            CHECK(bits_of(alone) == bits_of(out[i - from]));
        }
    }
}

/* ---- tiles ---- */

/* The maximum comes from representations where one number is not negative, else from a comparison. */
XD_TEST(the_maximum_of_a_tile_for_every_sign) {
    enum { COUNT = 150 };
    const float highest[6] = { 3.5f, 0.0f, -0.25f, -1e30f, INFINITY, -INFINITY };
    static float x[COUNT];
    static uint16_t narrow[COUNT];
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE)
    for (int k = 0; k < 6; k++)
        for (int at = 0; at < COUNT; at += 7)
            for (int half = 0; half < 2; half++) {
                const xdi_simd_array array = { half ? (void *)narrow : (void *)x, half != 0 };
                const xdi_tile_power power = xdi_tile_power_of(1.0, 64.0);
                float max;
                for (int i = 0; i < COUNT; i++) x[i] = k == 3 ? -INFINITY : highest[k] - 1.0f - (float)i;
                x[at] = xd_f32_from_bf16(xd_bf16_from_f32(highest[k]));
                if (k == 4) x[(at + 3) % COUNT] = -NAN; /* is left out */
                for (int i = 0; i < COUNT; i++) narrow[i] = xd_bf16_from_f32(x[i]);
                xdi_loops_level((xd_cpu_level)level)->tiles->sum(array, COUNT, power, NULL, &max);
                CHECK(max == x[at]);
            }
}

/* A NaN anywhere shows, whatever its sign; infinities of both signs do not hide the largest number. */
XD_TEST(the_largest_element_of_a_tile_is_NaN_when_there_is_one) {
    enum { COUNT = 75 }; /* whole vectors of every width, and a rest */
    const float odd[5] = { NAN, -NAN, INFINITY, -INFINITY, 1.5f };
    static float x[COUNT];
    static uint16_t narrow[COUNT];
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE)
    for (int k = 0; k < 5; k++)
        for (int at = 0; at < COUNT; at++)
            for (int half = 0; half < 2; half++) {
                const xdi_simd_array array = { half ? (void *)narrow : (void *)x, half != 0 };
                for (int i = 0; i < COUNT; i++) x[i] = i % 3 ? -1.0f - (float)i : -INFINITY;
                x[at] = odd[k];
                for (int i = 0; i < COUNT; i++) narrow[i] = xd_bf16_from_f32(x[i]);
                const float max = xdi_loops_level((xd_cpu_level)level)->tiles->max(array, COUNT);
                const float others = at == 1 ? -3.0f : -2.0f;
                CHECK(k < 2 ? isnan(max) : max == (k == 3 ? others : odd[k]));
            }
}

XD_TEST(gradients_past_the_caches_have_the_same_bits) {
    enum { COUNT = 333, BYTES = COUNT * 4 };
    static unsigned char memory[2][BYTES + XDI_SIMD_LINE];
    static float x[COUNT], y[COUNT];
    static uint16_t narrow[2][COUNT];
    for (int i = 0; i < COUNT; i++) {
        x[i] = (float)(i % 17) - 8.0f;
        y[i] = (float)(i % 13) - 6.5f;
        narrow[0][i] = xd_bf16_from_f32(x[i]);
        narrow[1][i] = xd_bf16_from_f32(y[i]);
    }
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE)
    for (int kind = 0; kind < 4; kind++) { /* bf16 or not in, and out */
        const xdi_tiles *tiles = xdi_loops_level((xd_cpu_level)level)->tiles;
        unsigned char *out[2];
        for (int streamed = 0; streamed < 2; streamed++) {
            xdi_tile_gradient g;
            memset(&g, 0, sizeof g);
            memset(memory[streamed], 0, sizeof memory[streamed]);
            out[streamed] = memory[streamed] + XDI_SIMD_LINE - (uintptr_t)memory[streamed] % XDI_SIMD_LINE;
            g.x.bf16 = g.y.bf16 = (kind & 1) != 0;
            g.x.data = g.x.bf16 ? (void *)narrow[0] : (void *)x;
            g.y.data = g.y.bf16 ? (void *)narrow[1] : (void *)y;
            g.out.bf16 = (kind & 2) != 0;
            g.out.data = out[streamed];
            g.streamed = streamed != 0;
            g.p = g.q = xdi_tile_power_of(XDI_TILE_LOG2E, 12.0);
            g.soft_scale = 0.75f;
            g.teacher_scale = 0.5f;
            tiles->gradient(&g, XDI_TILE_FORWARD, COUNT);
            tiles->fence();
        }
        CHECK(memcmp(out[0], out[1], (size_t)COUNT * (kind & 2 ? 2 : 4)) == 0);
    }
}

/* ---- losses ---- */

/* One problem, and what a level makes of it. */
typedef struct problem {
    int64_t vocab, width;
    xd_dtype dtype;
    double temperature, hard_weight, soft_weight, beta, smoothing;
    xd_divergence divergence;
    bool in_place;
    int topk; /* -1: the whole vocabulary; else an xd_topk_mode */
    float student[ROWS * MOST], teacher[ROWS * MOST];
    int64_t labels[ROWS], ids[ROWS * K];
    float values[ROWS * K];
} problem;

typedef struct outcome {
    double gradient[ROWS * MOST], row_loss[ROWS];
    xd_loss_values values;
    xd_status status;
} outcome;

/* A matrix of the problem's dtype one element off alignment. */
static xd_rows rows_of(const problem *p, const float *data, void **owned) {
    const size_t size = xd_dtype_size(p->dtype);
    xd_rows rows;
    *owned = malloc((size_t)(ROWS * p->width + 1) * size);
    rows.data = (unsigned char *)*owned + size;
    rows.dtype = p->dtype;
    rows.rows = ROWS;
    rows.cols = p->vocab;
    rows.stride = p->width;
    for (int64_t i = 0; i < ROWS * p->width; i++)
        xd_store_f64(rows.data, p->dtype, i, data ? (double)data[i] : 7.0);
    return rows;
}

static void run_problem(const problem *p, xd_cpu_level level, outcome *out) {
    static float row_loss[ROWS];
    xd_ctx_desc settings;
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    void *owned[3];
    xd_loss_desc d;
    xd_topk_desc t;
    memset(&settings, 0, sizeof settings);
    memset(&out->values, 0, sizeof out->values);
    memset(&out->status, 0, sizeof out->status);
    memset(&d, 0, sizeof d);
    memset(&t, 0, sizeof t);
    settings.cpu = level;
    CHECK(xd_ctx_create(&settings, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, p->vocab, &vocab) == XD_OK);
    d.student = t.student = rows_of(p, p->student, &owned[0]);
    d.teacher = t.teacher = rows_of(p, p->teacher, &owned[1]);
    d.common.gradient = rows_of(p, NULL, &owned[2]);
    if (p->in_place) d.common.gradient = d.student;
    t.common.gradient = d.common.gradient;
    d.vocab = t.vocab = vocab;
    d.common.status = t.common.status = &out->status;
    d.common.row_loss = t.common.row_loss = row_loss;
    d.common.denominator_value = t.common.denominator_value = ROWS;
    d.temperature = t.temperature = p->temperature;
    d.divergence = t.divergence = p->divergence;
    d.beta = t.beta = p->beta;
    d.hard_weight = p->hard_weight;
    d.soft_weight = p->soft_weight;
    d.label_smoothing = p->smoothing;
    if (p->hard_weight != 0.0) d.common.labels = xd_ids_of(p->labels, XD_DTYPE_I64);
    t.mode = (xd_topk_mode)p->topk;
    t.k = K;
    t.ids = xd_ids_of(p->ids, XD_DTYPE_I64);
    const xd_result result =
        p->topk < 0 ? xd_loss(ctx, &d, &out->values) : xd_topk_kl_loss(ctx, &t, &out->values);
    CHECK(result == XD_OK);
    if (result != XD_OK) printf("%s\n", xd_last_error(ctx)->message);
    for (int r = 0; r < ROWS; r++) {
        out->row_loss[r] = (double)row_loss[r];
        for (int64_t c = 0; c < p->vocab; c++)
            out->gradient[r * p->width + c] = xd_load_f64(d.common.gradient.data, p->dtype, r * p->width + c);
    }
    for (int i = 0; i < 3; i++) free(owned[i]);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

/* The arithmetic of f32 on numbers of the size that the row's gradient is made of, probabilities times the
 * distance of the logarithms; bf16 is rounded on top, to a neighbour where the number lies halfway. */
static void compare(const problem *p, const outcome *plain, const outcome *fast) {
    const double squared = fmax(1.0, p->temperature * p->temperature); /* factor of the divergence */
    const double narrow = p->dtype == XD_DTYPE_BF16 ? 1.0 / 128.0 : 0.0;
    for (int r = 0; r < ROWS; r++) {
        double most =
            (p->hard_weight + (squared * p->soft_weight + fabs(plain->row_loss[r])) / p->temperature) / ROWS;
        for (int64_t c = 0; c < p->vocab; c++) most = fmax(most, fabs(plain->gradient[r * p->width + c]));
        CHECK_NEAR(fast->row_loss[r], plain->row_loss[r], 1e-6 * (squared + fabs(plain->row_loss[r])));
        for (int64_t c = 0; c < p->vocab; c++) {
            const double expected = plain->gradient[r * p->width + c];
            CHECK_NEAR(fast->gradient[r * p->width + c], expected, 1e-6 * most + narrow * fabs(expected));
        }
    }
    CHECK_NEAR(fast->values.loss, plain->values.loss, 1e-6 * (squared + fabs(plain->values.loss)));
    CHECK_EQ_INT(fast->status.not_finite, plain->status.not_finite);
    CHECK_EQ_INT(fast->status.label_out_of_range, plain->status.label_out_of_range);
    CHECK_EQ_INT(fast->status.first_row, plain->status.first_row);
    CHECK_EQ_INT(fast->values.counted, plain->values.counted);
}

static void all_levels(const problem *p) {
    static outcome plain, fast;
    run_problem(p, XD_CPU_PLAIN, &plain);
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
        const long before = xd_test_failures;
        run_problem(p, (xd_cpu_level)level, &fast);
        compare(p, &plain, &fast);
        if (xd_test_failures > before && before < XD_TEST_SHOWN)
            printf(
                "  level %s, divergence %d, top-k %d, %lld columns, %s, temperature %g, weights %g and %g\n",
                xd_cpu_level_name((xd_cpu_level)level), (int)p->divergence, p->topk, (long long)p->vocab,
                xd_dtype_name(p->dtype), p->temperature, p->hard_weight, p->soft_weight);
    }
}

static void fill(problem *p, int64_t vocab, uint64_t seed) {
    uint64_t state = seed;
    memset(p, 0, offsetof(problem, student));
    p->vocab = vocab;
    p->width = vocab + 3;
    p->dtype = XD_DTYPE_F32;
    p->temperature = 1.0;
    p->hard_weight = 0.4;
    p->soft_weight = 0.6;
    p->beta = 0.3;
    p->topk = -1;
    for (int64_t i = 0; i < ROWS * p->width; i++) {
        p->student[i] = (float)(5.0 * uniform(&state));
        p->teacher[i] = (float)((double)p->student[i] + 3.0 * uniform(&state));
    }
    for (int r = 0; r < ROWS; r++) {
        p->labels[r] = (r * 31) % vocab;
        for (int j = 0; j < K; j++) p->ids[r * K + j] = vocab < K ? j % vocab : (r + j * (vocab / K)) % vocab;
    }
}

static void each_divergence(problem *p) {
    for (int kind = (int)XD_KL_FORWARD; kind <= (int)XD_SOFT_CE; kind++) {
        p->divergence = (xd_divergence)kind;
        all_levels(p);
    }
}

XD_TEST(every_number_of_columns_up_to_70) {
    static problem p;
    for (int64_t vocab = 1; vocab <= 70; vocab++) {
        fill(&p, vocab, (uint64_t)vocab);
        p.dtype = vocab % 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
        p.in_place = vocab % 3 == 0;
        each_divergence(&p);
    }
}

XD_TEST(more_than_one_tile_with_the_maximum_anywhere) {
    static problem p;
    for (int round = 0; round < 4; round++) {
        fill(&p, 2497, 5);
        for (int r = 0; r < ROWS; r++) {
            p.student[r * p.width + (r * 601) % p.vocab] = 30.0f; /* larger than what came first */
            p.teacher[r * p.width + (r * 499 + 300) % p.vocab] = r % 2 ? 90.0f : 20.0f;
            if (r % 3 == 2) { /* beyond what the first tile's powers are relative to */
                p.student[r * p.width + p.vocab - 2] = 70.0f;
                p.student[r * p.width + p.vocab - 3] = 69.0f;
                p.teacher[r * p.width + p.vocab - 3] = 80.0f;
                p.teacher[r * p.width + p.vocab - 2] = 79.5f;
            }
        }
        p.dtype = round % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        p.in_place = round == 2;
        if (round == 3) p.soft_weight = 0.0;
        each_divergence(&p);
    }
}

XD_TEST(a_row_of_more_tiles_than_powers_are_kept_of) {
    static problem p;
    fill(&p, (XDI_SIMD_KEPT + 1) * XDI_TILE + 70, 9);
    for (int r = 0; r < ROWS; r++) { /* the integers change within what is kept */
        p.student[r * p.width + 20 * XDI_TILE + 500 * r] = 80.0f;
        p.teacher[r * p.width + 30 * XDI_TILE + 500 * r] = 85.0f;
        p.student[r * p.width + 30 * XDI_TILE + 500 * r + 1] = 79.0f;
    }
    p.dtype = XD_DTYPE_BF16;
    for (int round = 0; round < 3; round++) {
        p.in_place = round == 1;
        p.temperature = round == 2 ? 2.0 : 1.0;
        p.hard_weight = round == 2 ? 0.0 : 0.4;
        all_levels(&p);
    }
}

XD_TEST(temperatures_weights_and_smoothing) {
    static const double temperatures[6] = { 2.0, 0.5, 1e-3, 1e3, 1e-9, 1e9 };
    static problem p;
    for (int i = 0; i < 6; i++)
        for (int weights = 0; weights < 3; weights++) {
            fill(&p, 203, 9);
            p.temperature = temperatures[i];
            p.hard_weight = weights == 1 ? 0.0 : 0.7;
            p.soft_weight = weights == 2 ? 0.0 : 1.3 * fmin(1.0, temperatures[i]);
            p.smoothing = i % 2 ? 0.1 : 0.0;
            each_divergence(&p);
        }
}

XD_TEST(masked_columns_and_one_hot_rows) {
    static problem p;
    for (int which = 0; which < 6; which++) {
        fill(&p, 150, 21);
        for (int64_t c = 0; c < p.width; c++) {
            if (which == 0 && c % 3 == 1) p.student[p.width + c] = p.teacher[p.width + c] = -INFINITY;
            if (which == 1 && c % 3 == 1) p.teacher[c] = -INFINITY; /* infinite for the reverse KL */
            if (which == 2 && c % 3 == 1) p.student[2 * p.width + c] = -INFINITY; /* for the forward one */
            if (which == 3 && c > 0) p.student[c] = p.teacher[p.width + c] = -INFINITY;
            if (which == 4) p.student[c] = p.teacher[c] = c == 77 ? 0.0f : -1e30f;
            if (which == 5) p.student[p.width + c] = -INFINITY; /* nothing left */
        }
        if (which == 4) p.student[p.width + 3] = p.teacher[p.width + 3] = p.student[2 * p.width + 9] = 60.0f;
        p.hard_weight = 0.0;
        each_divergence(&p);
        p.hard_weight = 1.0;
        p.soft_weight = 0.0;
        p.labels[0] = 0;
        each_divergence(&p);
    }
}

XD_TEST(numbers_that_are_not_finite_or_huge) {
    static const float numbers[6] = { NAN, INFINITY, 1e30f, -1e30f, 3e38f, -3e38f };
    static problem p;
    for (int i = 0; i < 6; i++)
        for (int side = 0; side < 2; side++) {
            fill(&p, 130, 4);
            (side ? p.teacher : p.student)[3 * p.width + 129] = numbers[i];
            (side ? p.teacher : p.student)[p.width + 64] = numbers[i];
            p.labels[4] = i == 0 ? 130 : 0;
            each_divergence(&p);
        }
}

XD_TEST(top_k_losses_of_every_mode) {
    static problem p;
    for (int mode = 0; mode <= (int)XD_TOPK_ZERO_OUTSIDE; mode++)
        for (int kind = 0; kind <= (int)XD_KL_MIXED; kind++)
            for (int round = 0; round < 3; round++) {
                if (kind == (int)XD_SOFT_CE || (kind == (int)XD_JSD && mode == (int)XD_TOPK_ZERO_OUTSIDE))
                    continue;
                fill(&p, round == 2 ? 2497 : 40 + 13 * round, 17);
                if (round == 1) p.student[5] = p.teacher[5] = -INFINITY;
                p.hard_weight = 0.0;
                p.soft_weight = 1.0;
                p.topk = mode;
                p.divergence = (xd_divergence)kind;
                p.temperature = round ? 1.7 : 1.0;
                p.dtype = round ? XD_DTYPE_BF16 : XD_DTYPE_F32;
                all_levels(&p);
            }
}

/* ---- selection ---- */

enum { SELECT_COLUMNS = 6000 };

static void select_with(xd_cpu_level level, const xd_rows *logits, int64_t k, float *values, int64_t *ids) {
    xd_ctx_desc settings;
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    memset(&settings, 0, sizeof settings);
    settings.cpu = level;
    CHECK(xd_ctx_create(&settings, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, logits->cols, &vocab) == XD_OK);
    CHECK(xd_vocab_topk(ctx, vocab, *logits, k, values, ids) == XD_OK);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

static void select_everywhere(const float *data, int64_t columns, int64_t k, xd_dtype dtype) {
    static unsigned char memory[SELECT_COLUMNS * 4];
    static float expected[SELECT_COLUMNS], values[SELECT_COLUMNS];
    static int64_t expected_ids[SELECT_COLUMNS], ids[SELECT_COLUMNS];
    const xd_rows rows = { memory, dtype, 1, columns, 0 };
    for (int64_t i = 0; i < columns; i++) xd_store_f64(memory, dtype, i, (double)data[i]);
    select_with(XD_CPU_PLAIN, &rows, k, expected, expected_ids);
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
        select_with((xd_cpu_level)level, &rows, k, values, ids);
        CHECK(memcmp(ids, expected_ids, (size_t)k * sizeof *ids) == 0);
        CHECK(memcmp(values, expected, (size_t)k * sizeof *values) == 0);
    }
}

XD_TEST(selection_is_that_of_the_plain_level) {
    static const int64_t sizes[7][2] = { { 1, 1 },       { 70, 70 },   { 300, 65 },   { 6000, 64 },
                                         { 6000, 1000 }, { 5999, 65 }, { 3000, 2999 } };
    static float data[SELECT_COLUMNS];
    uint64_t state = 3;
    for (int kind = 0; kind < 7; kind++)
        for (int size = 0; size < 7; size++) {
            for (int i = 0; i < SELECT_COLUMNS; i++) {
                data[i] = (float)(10.0 * uniform(&state));
                if (kind == 1) data[i] = (float)(i % 5); /* equals: the lowest id first */
                if (kind == 2) data[i] = i % 2 ? 0.0f : -0.0f;
                if (kind == 3 && i % 3 == 0) data[i] = i % 2 ? -INFINITY : NAN;
                if (kind == 4) data[i] = 1e-3f * (float)i;
                if (kind == 5) data[i] = i % 7 ? -1.0f : INFINITY;
                if (kind == 6) data[i] *= 1e-40f; /* subnormal */
            }
            select_everywhere(data, sizes[size][0], sizes[size][1], XD_DTYPE_F32);
            select_everywhere(data, sizes[size][0], sizes[size][1], XD_DTYPE_BF16);
        }
}

XD_TEST_MAIN()
