/* BF16 parameters without a master copy: what is rounded up, what down, and that nothing but the place of an element decides. */
#include "xdistill.h"
#include "planned.h"
#include "xd_test.h"
#include "averages.h"
#include "xd_test_numbers.h"
#include "wrap_calls.h"

#include <stdlib.h>

enum { N = 3001, STEPS = 5 };

static const char name[] = "layers.0.weight";

static xd_ctx *open_ctx(xd_cpu_level level, int threads) {
    const xd_ctx_desc desc = { .cpu = level, .threads = threads };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

static float unit(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)((double)(*state >> 8) / 8388608.0 - 1.0);
}

static float widened(uint16_t bits) {
    float x;
    const uint32_t wide = (uint32_t)bits << 16;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static uint16_t truncated(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Numbers of many sizes, subnormal ones and the largest too. */
static void draw_values(uint16_t *values, float *gradients, int n) {
    static const float sizes[] = { 1.0f, 1e-3f, 1e-30f, 1e-39f, 3e30f, 1.0f, 1.0f };
    uint32_t state = 7;
    for (int i = 0; i < n; i++) {
        values[i] = truncated(unit(&state) * sizes[i % 7]);
        gradients[i] = unit(&state) * sizes[i % 7];
    }
}

static xd_param param_of(void *value, float *gradient, xd_dtype dtype, int64_t count) {
    xd_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.value = value;
    p.gradient = gradient;
    p.dtype = dtype;
    p.count = count;
    return p;
}

static xd_optimizer_desc desc_of(const xd_param *params, int64_t count, xd_optimizer_kind kind) {
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.kind = kind;
    d.momentum = 0.9;
    d.stochastic_bf16 = true;
    d.seed = 0x123456789abcdefu;
    return d;
}

/* The rule in double: up (in magnitude) when the random number is among the last (x - a) / (b - a) of the 65536 there are. */
static uint16_t expected_rounding(float x, int64_t element, int64_t step) {
    const uint64_t hash = xd_hash(0, name, strlen(name));
    const xd_philox random = { 0x123456789abcdefu, XD_STREAM_OPTIMIZER, (uint16_t)(hash >> 32),
                               (uint32_t)hash, (uint32_t)step };
    const uint32_t word = word_of(&random, element / 2);
    const double drawn = (double)(element % 2 ? word >> 16 : word & 0xffffu);
    const uint16_t below = truncated(x);
    const double a = fabs((double)widened(below));
    /* the distance of the neighbours, also where the upper one is infinity */
    const double b = below % 0x8000 < 0x7f7f ? fabs((double)widened((uint16_t)(below + 1))) : 0x1p128;
    return (uint16_t)(below + (drawn >= 65536.0 * (1.0 - (fabs((double)x) - a) / (b - a))));
}

/* Each step of BF16 values against the same step of an F32 copy of them, rounded by the rule. */
static void check_rule(xd_optimizer_kind kind, xd_cpu_level level, int64_t first) {
    static uint16_t values[N], expected[N];
    static float gradients[N], wide[N];
    xd_ctx *ctx = open_ctx(level, 1);
    xd_optimizer *rounded = NULL, *exact = NULL;
    draw_values(values, gradients, N);
    xd_param narrow = param_of(values, gradients, XD_DTYPE_BF16, N);
    const xd_param f32 = param_of(wide, gradients, XD_DTYPE_F32, N);
    narrow.first = first;
    const xd_optimizer_desc a = desc_of(&narrow, 1, kind), b = desc_of(&f32, 1, kind);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &a, &rounded), XD_OK);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &b, &exact), XD_OK);
    CHECK(xd_optimizer_state_at(rounded, 0).master == NULL && xd_optimizer_state_at(rounded, 0).exp_avg);
    long up = 0, nearest = 0;
    for (int step = 1; step <= STEPS; step++) {
        for (int i = 0; i < N; i++) wide[i] = widened(values[i]);
        CHECK(xd_optimizer_step(rounded, NULL, NULL) == XD_OK &&
              xd_optimizer_step(exact, NULL, NULL) == XD_OK);
        for (int i = 0; i < N; i++) {
            expected[i] = expected_rounding(wide[i], first + i, step);
            up += expected[i] != truncated(wide[i]);
            nearest += expected[i] == xd_bf16_from_f32(wide[i]);
        }
        CHECK(memcmp(values, expected, sizeof values) == 0);
    }
    CHECK(up > N && nearest < STEPS * N - N / 2); /* both happen, and it is not rounding to nearest */
    xd_optimizer_destroy(exact);
    xd_optimizer_destroy(rounded);
    xd_ctx_destroy(ctx);
}

XD_TEST(steps_round_by_the_rule_for_every_kind_and_cpu_level) {
    /* the last one: where the counter of blocks of random numbers gets a second word */
    static const int64_t first[] = { 0, 3, (INT64_C(1) << 35) - 1003 };
    for (int kind = 0; kind <= XD_OPTIMIZER_SGD; kind++)
        for (int level = XD_CPU_PLAIN; level <= (int)xd_cpu_best(); level++)
            for (int k = 0; k < 3 && xd_cpu_supports((xd_cpu_level)level); k++)
                check_rule((xd_optimizer_kind)kind, (xd_cpu_level)level, first[k]);
}

/* A step of nothing, over every BF16 there is. */
XD_TEST(what_bf16_can_hold_does_not_change) {
    enum { ALL = 65536 };
    static uint16_t values[ALL];
    static float gradients[ALL];
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 1);
    xd_optimizer *optimizer = NULL;
    for (int i = 0; i < ALL; i++) {
        values[i] = (uint16_t)i;
        gradients[i] = 1.0f;
    }
    const xd_param param = param_of(values, gradients, XD_DTYPE_BF16, ALL);
    xd_optimizer_desc d = desc_of(&param, 1, XD_OPTIMIZER_ADAMW);
    d.learning_rate = 0.0;
    d.weight_decay = 0.0;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
    long wrong = 0;
    for (int step = 0; step < 3; step++) {
        CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
        for (int i = 0; i < ALL; i++) {
            const bool nan = (i & 0x7fff) > 0x7f80;
            wrong += nan ? !isnan(widened(values[i])) : values[i] != i;
        }
    }
    CHECK_EQ_INT(wrong, 0);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

/* Weights of 1 that go down by a tenth of a unit in the last place a step: to nearest they would stay for ever. Neighbours are
 * 2^-8 apart below 1 and 2^-7 above. */
XD_TEST(the_mean_of_many_is_exact_and_elements_and_steps_are_independent) {
    enum { MANY = 200000, TIMES = 20 };
    const double shift = 0.1 / 256.0;
    uint16_t *values = (uint16_t *)malloc(MANY * sizeof *values);
    signed char *before = (signed char *)calloc(MANY, 1);
    float *gradients = (float *)malloc(MANY * sizeof *gradients);
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 1);
    xd_optimizer *optimizer = NULL;
    for (int i = 0; i < MANY; i++) gradients[i] = 1.0f;
    const xd_param param = param_of(values, gradients, XD_DTYPE_BF16, MANY);
    xd_optimizer_desc d = desc_of(&param, 1, XD_OPTIMIZER_SGD);
    d.momentum = d.weight_decay = 0.0;
    d.learning_rate = shift;
    for (int i = 0; i < MANY; i++) values[i] = xd_bf16_from_f32(1.0f);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
    double sum = 0.0, along = 0.0, across = 0.0;
    for (int step = 1; step <= TIMES; step++) {
        CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
        for (int i = 0; i < MANY; i++) {
            const double moved = ((double)widened(values[i]) < 1.0) - 0.1; /* mean 0, variance 0.09 */
            sum += moved;
            if (i > 0) along += moved * (((double)widened(values[i - 1]) < 1.0 ? 1.0 : 0.0) - 0.1);
            if (step > 1) across += moved * ((before[i] ? 1.0 : 0.0) - 0.1);
        }
        for (int i = 0; i < MANY; i++) before[i] = (double)widened(values[i]) < 1.0;
        for (int i = 0; i < MANY; i++) values[i] = xd_bf16_from_f32(1.0f);
    }
    const double n = (double)MANY * TIMES;
    CHECK_NEAR(sum / n, 0.0, 5.0 * sqrt(0.09 / n) + 1e-5); /* the rate is a multiple of 2^-16 */
    CHECK_NEAR(along / n, 0.0, 5.0 * 0.09 / sqrt(n));
    CHECK_NEAR(across / n, 0.0, 5.0 * 0.09 / sqrt(n));
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
    free(values);
    free(before);
    free(gradients);
}

/* The whole, and its parts with an optimizer each, as ranks have them; parts begin anywhere in a block of random numbers. */
XD_TEST(every_cut_and_number_of_threads_gives_the_same_bits) {
    enum { BIG = 200003, PARTS = 7 };
    static const int64_t cuts[PARTS + 1] = { 0, 1, 6, 6, 1029, 65544, 150001, BIG };
    uint16_t *whole = (uint16_t *)malloc(BIG * sizeof *whole), *cut = (uint16_t *)malloc(BIG * sizeof *cut);
    float *gradients = (float *)malloc(BIG * sizeof *gradients);
    draw_values(whole, gradients, BIG);
    memcpy(cut, whole, BIG * sizeof *cut);
    xd_ctx *one = open_ctx(XD_CPU_BEST, 1), *many = open_ctx(XD_CPU_BEST, 3);
    xd_optimizer *optimizer = NULL;
    const xd_param param = param_of(whole, gradients, XD_DTYPE_BF16, BIG);
    const xd_optimizer_desc d = desc_of(&param, 1, XD_OPTIMIZER_ADAMW);
    CHECK_EQ_INT(xd_optimizer_create(many, &d, &optimizer), XD_OK);
    for (int step = 0; step < STEPS; step++) CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    xd_optimizer_destroy(optimizer);
    for (int k = 0; k < PARTS; k++) {
        xd_param part = param_of(cut + cuts[k], gradients + cuts[k], XD_DTYPE_BF16, cuts[k + 1] - cuts[k]);
        part.first = cuts[k];
        const xd_optimizer_desc own = desc_of(&part, 1, XD_OPTIMIZER_ADAMW);
        CHECK_EQ_INT(xd_optimizer_create(one, &own, &optimizer), XD_OK);
        for (int step = 0; step < STEPS; step++)
            CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
        xd_optimizer_destroy(optimizer);
    }
    CHECK(memcmp(whole, cut, BIG * sizeof *cut) == 0);
    xd_ctx_destroy(many);
    xd_ctx_destroy(one);
    free(whole);
    free(cut);
    free(gradients);
}

/* Two lists that begin alike, run with other settings. */
static bool same_after(const char *other_name, uint64_t seed, int64_t first) {
    static uint16_t values[2][N];
    static float gradients[N];
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 1);
    for (int k = 0; k < 2; k++) {
        xd_optimizer *optimizer = NULL;
        draw_values(values[k], gradients, N);
        xd_param param = param_of(values[k], gradients, XD_DTYPE_BF16, N);
        if (k) param.name = other_name;
        if (k) param.first = first;
        xd_optimizer_desc d = desc_of(&param, 1, XD_OPTIMIZER_SGD);
        if (k) d.seed = seed;
        CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
        CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
        xd_optimizer_destroy(optimizer);
    }
    xd_ctx_destroy(ctx);
    return memcmp(values[0], values[1], sizeof values[0]) == 0;
}

XD_TEST(seed_name_and_place_each_change_the_random_bits) {
    CHECK(same_after(name, 0x123456789abcdefu, 0));
    CHECK(!same_after("layers.1.weight", 0x123456789abcdefu, 0));
    CHECK(!same_after(name, 0x123456789abcdeeu, 0));
    CHECK(!same_after(name, 0x23456789abcdefu, 0));
    CHECK(!same_after(name, 0x123456789abcdefu, 8));
    CHECK(!same_after(name, 0x123456789abcdefu, INT64_C(8) << 32));
}

/* An average in the same pass, a run that stops and goes on, F16 and F32 beside: nothing of it is another. */
XD_TEST(averages_resumed_runs_and_other_dtypes_are_as_ever) {
    static uint16_t bf16[2][N], f16[2][N];
    static float f32[2][N], gradients[N], shadow[2][N];
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 1);
    for (int k = 0; k < 2; k++) {
        draw_values(bf16[k], gradients, N);
        for (int i = 0; i < N; i++) f32[k][i] = widened(bf16[k][i]);
        for (int i = 0; i < N; i++) f16[k][i] = f16_of(widened(bf16[k][i]));
        xd_param params[3] = { param_of(bf16[k], gradients, XD_DTYPE_BF16, N),
                               param_of(f16[k], gradients, XD_DTYPE_F16, N),
                               param_of(f32[k], gradients, XD_DTYPE_F32, N) };
        params[1].name = "f16";
        params[2].name = "f32";
        xd_optimizer_desc d = desc_of(params, 3, XD_OPTIMIZER_ADAMW);
        xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
        average.decay = 0.5;
        average.init_from_current = true;
        xd_optimizer *optimizer = NULL;
        xd_ema *ema = NULL;
        CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
        CHECK_EQ_INT(average_create(ctx, params, 3, &average, &ema), XD_OK);
        const xd_optimizer_step_desc with = { .averages = &ema, .average_count = 1 };
        for (int step = 0; step < STEPS; step++) {
            CHECK_EQ_INT(xd_optimizer_step(optimizer, k ? &with : NULL, NULL), XD_OK);
            if (!k) CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
            if (!k || step != 2) continue;
            xd_optimizer *next = NULL; /* goes on from what is saved */
            CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &next), XD_OK);
            for (int i = 0; i < 3; i++) {
                const xd_optimizer_state from = xd_optimizer_state_at(optimizer, i),
                                         to = xd_optimizer_state_at(next, i);
                if (from.master) memcpy(to.master, from.master, N * sizeof(float));
                memcpy(to.exp_avg, from.exp_avg, N * sizeof(float));
                memcpy(to.exp_avg_sq, from.exp_avg_sq, N * sizeof(float));
                *to.step = *from.step;
            }
            xd_optimizer_destroy(optimizer);
            optimizer = next;
        }
        CHECK(xd_optimizer_state_at(optimizer, 0).master == NULL &&
              xd_optimizer_state_at(optimizer, 1).master);
        memcpy(shadow[k], xd_ema_view(ema, 0).shadow.value, sizeof shadow[k]);
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }
    CHECK(memcmp(bf16[0], bf16[1], sizeof bf16[0]) == 0 &&
          memcmp(shadow[0], shadow[1], sizeof shadow[0]) == 0);
    CHECK(memcmp(f16[0], f16[1], sizeof f16[0]) == 0 && memcmp(f32[0], f32[1], sizeof f32[0]) == 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(sizes_are_told_and_bad_lists_are_refused) {
    static uint16_t values[N];
    static float gradients[N];
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 1);
    xd_optimizer *optimizer = NULL;
    xd_memory_bytes with = { 0, 0 }, without = { 0, 0 };
    xd_param param = param_of(values, gradients, XD_DTYPE_BF16, N);
    xd_optimizer_desc d = desc_of(&param, 1, XD_OPTIMIZER_ADAMW);
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_optimizer_create(ctx, &d, &optimizer), &without), XD_OK);
    d.stochastic_bf16 = false;
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_optimizer_create(ctx, &d, &optimizer), &with), XD_OK);
    CHECK(with.host > without.host + 4 * N - 256);
    d.stochastic_bf16 = true;
    param.name = NULL;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "(unnamed): its rounding at random needs a name"));
    param.name = name;
    param.first = -5;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "a first element, which is -5"));
    CHECK(optimizer == NULL);
    param.first = 3;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
    param.first = 4;
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_ERROR_STATE);
    CHECK(values[0] == 0 && values[N - 1] == 0);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

/* ---- where parts begin ---- */

enum { ROWS = 7, COLUMNS = 5 };

static xd_result check_first(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int ranks = xd_comm_size(world), rank = xd_comm_rank(world);
    const xd_model_desc desc = { .rank = rank };
    const xd_weight_desc d = { .name = "w",
                               .dtype = XD_DTYPE_F32,
                               .ndim = 2,
                               .shape = { ROWS, COLUMNS },
                               .init = { XD_INIT_NORMAL, 0, 1 } };
    const xd_fsdp_desc fsdp = { .micro_batches = ranks };
    xd_model *model = NULL;
    xd_parallel *wrapped = NULL;
    xd_param param;
    static const int64_t ones[4] = { 1, 1, 1, 1 };
    int64_t count = 0, counts[4];
    (void)argument;
    CHECK_EQ_INT(xd_model_create(ctx, &desc, &model), XD_OK);
    CHECK(xd_weight_add(xd_model_root(model), &d, NULL) == XD_OK && xd_model_seal(model) == XD_OK);
    CHECK_EQ_INT(wrap_over_fsdp(model, world, &fsdp, &wrapped), XD_OK);
    CHECK_EQ_INT(xd_parallel_params(wrapped, 1, &param, &count), XD_OK);
    CHECK_EQ_INT(xd_all_gather(world, &param.count, counts, ones, XD_DTYPE_I64), XD_OK);
    int64_t before = 0;
    for (int r = 0; r < rank; r++) before += counts[r];
    if (param.count > 0) CHECK_EQ_INT(param.first, before);
    xd_parallel_destroy(wrapped);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(wrappers_say_where_the_part_of_a_rank_begins) {
    for (int ranks = 1; ranks <= 4; ranks++)
        CHECK_EQ_INT(xd_run_threads(ranks, NULL, check_first, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
