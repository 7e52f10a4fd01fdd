/* Formats of shadows that follow small differences, and the count of elements that do not move. */
#include "ema_scene.h"
#include "xd_test_numbers.h"
#include "averages.h"
#include "planned.h"

enum { N = 3001 };

static float widened(uint16_t bits) {
    return (float)xd_load_f64(&bits, XD_DTYPE_BF16, 0);
}

static xd_ema_desc compensated(double decay) {
    xd_ema_desc d = scene_decay(decay);
    d.compensated = true;
    return d;
}

static xd_ema_desc at_random(double decay) {
    xd_ema_desc d = scene_decay(decay);
    d.stochastic_bf16 = true;
    d.seed = 0x123456789abcdefu;
    return d;
}

/* ---- compensation ---- */

/* 100,000 updates towards a weight that is nearer than plain f32 can see. */
static double error_after(xd_ema_desc desc) {
    float value = 1.0f;
    double exact = 1.0;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema *ema = scene_ema(ctx, &param, 1, desc);
    value = 1.004f;
    for (int t = 0; t < 100000; t++) {
        CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_OK);
        exact += (1.0 - desc.decay) * ((double)value - exact);
    }
    double got = (double)((const float *)xd_ema_view(ema, 0).shadow.value)[0];
    if (desc.compensated) got += xd_load_f64(xd_ema_view(ema, 0).compensation.value, XD_DTYPE_BF16, 0);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
    return fabs(got - exact);
}

XD_TEST(a_compensated_shadow_follows_a_difference_that_a_plain_one_does_not_see) {
    const double bound = ldexp(1.0, -33) / (1.0 - 0.99999);
    CHECK_NEAR(error_after(compensated(0.99999)), 0.0, bound);
    CHECK(error_after(scene_decay(0.99999)) > 100.0 * bound); /* it has not moved at all */
}

/* One update in double where nothing is rounded but what the rule rounds. */
static void expected_compensated(double decay, float source, float *shadow, uint16_t *term) {
    const float weight = (float)(1.0 - decay), kept = widened(*term);
    const float difference = (source - *shadow) - kept;
    const float base = weight < 0.5f ? *shadow : source;
    const float step = weight < 0.5f ? fmaf(weight, difference, kept) : (weight - 1.0f) * difference;
    const float sum = (float)((double)base + (double)step);
    *shadow = sum;
    *term = xd_bf16_from_f32((float)((double)base + (double)step - (double)sum));
}

/* Every level of this machine, with live values of every type. */
static void on_every_level(void (*check)(xd_cpu_level level, xd_dtype dtype)) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    for (int level = XD_CPU_PLAIN; level <= (int)xd_cpu_best(); level++)
        for (int k = 0; k < 4 && xd_cpu_supports((xd_cpu_level)level); k++)
            check((xd_cpu_level)level, dtypes[k]);
}

static void check_compensated(xd_cpu_level level, int threads, double decay, xd_dtype dtype) {
    static float shadow[N];
    static uint16_t term[N];
    static double live[N];
    xd_ctx *ctx = scene_ctx(level, threads);
    const xd_param param = scene_param("w", live, dtype, N);
    scene_fill(live, dtype, N, 3);
    xd_ema *ema = scene_ema(ctx, &param, 1, compensated(decay));
    for (int i = 0; i < N; i++) shadow[i] = (float)xd_load_f64(live, dtype, i);
    memset(term, 0, sizeof term);
    for (uint32_t t = 0; t < 5; t++) {
        scene_fill(live, dtype, N, 50 + t);
        CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
        for (int i = 0; i < N; i++)
            expected_compensated(decay, (float)xd_load_f64(live, dtype, i), &shadow[i], &term[i]);
        CHECK(memcmp(xd_ema_view(ema, 0).shadow.value, shadow, sizeof shadow) == 0);
        CHECK(memcmp(xd_ema_view(ema, 0).compensation.value, term, sizeof term) == 0);
    }
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

static void check_compensations(xd_cpu_level level, xd_dtype dtype) {
    check_compensated(level, 1, 0.999, dtype);
    check_compensated(level, 3, 0.3, dtype);
}

XD_TEST(a_compensated_update_rounds_by_the_rule_on_every_cpu_level) {
    on_every_level(check_compensations);
}

XD_TEST(a_compensated_weight_of_one_takes_the_value_and_infinities_leave_no_term) {
    float value = 0.1f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema *ema = scene_ema(ctx, &param, 1, compensated(0.0));
    value = 12345.678f;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    CHECK(((const float *)xd_ema_view(ema, 0).shadow.value)[0] == 12345.678f);
    CHECK_EQ_INT(*(const uint16_t *)xd_ema_view(ema, 0).compensation.value, 0);
    xd_ema_destroy(ema);
    ema = scene_ema(ctx, &param, 1, compensated(0.9));
    value = INFINITY;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    CHECK(isinf(((const float *)xd_ema_view(ema, 0).shadow.value)[0]));
    CHECK_EQ_INT(*(const uint16_t *)xd_ema_view(ema, 0).compensation.value, 0);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

/* Publishing gives the shadow; a load forgets the term, which is then restored in place. */
XD_TEST(a_compensated_average_is_saved_as_two_tensors_and_resumed_to_the_bit) {
    static float value[N], shadow[N];
    static uint16_t term[N];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("w", value, XD_DTYPE_F32, N),
                   saved = scene_param("w", shadow, XD_DTYPE_F32, N);
    scene_fill(value, XD_DTYPE_F32, N, 1);
    xd_ema *through = scene_ema(ctx, &param, 1, compensated(0.999)),
           *resumed = scene_ema(ctx, &param, 1, compensated(0.999));
    CHECK_EQ_STR(xd_ema_view(through, 0).compensation.name, "w");
    CHECK(xd_ema_view(through, 1).compensation.value == NULL &&
          xd_ema_view(through, -1).compensation.value == NULL);
    for (uint32_t t = 0; t < 8; t++) {
        scene_fill(value, XD_DTYPE_F32, N, 20 + t);
        CHECK_EQ_INT(xd_ema_update(through, XD_EMA_NEXT, NULL), XD_OK);
        CHECK_EQ_INT(xd_ema_update(resumed, XD_EMA_NEXT, NULL), XD_OK);
        if (t != 4) continue;
        const xd_ema_record record = xd_ema_describe(resumed).record;
        CHECK(record.config.compensated);
        CHECK_EQ_INT(xd_ema_copy_to(resumed, &saved, 1, false, NULL), XD_OK);
        memcpy(term, xd_ema_view(resumed, 0).compensation.value, sizeof term);
        long terms = 0;
        for (int i = 0; i < N; i++) terms += term[i] % 0x8000 != 0;
        CHECK(terms > N / 2);
        xd_ema_destroy(resumed);
        resumed = scene_ema(ctx, &param, 1, compensated(0.999));
        CHECK_EQ_INT(xd_ema_update(resumed, XD_EMA_NEXT, NULL), XD_OK); /* a term that a load must forget */
        scene_fill(value, XD_DTYPE_F32, N, 99);
        CHECK_EQ_INT(xd_ema_update(resumed, XD_EMA_NEXT, NULL), XD_OK);
        CHECK_EQ_INT(average_load(resumed, &saved, 1, &(xd_ema_load_desc){ .record = &record }, NULL), XD_OK);
        for (int i = 0; i < N; i++) CHECK(((uint16_t *)xd_ema_view(resumed, 0).compensation.value)[i] == 0);
        memcpy(xd_ema_view(resumed, 0).compensation.value, term, sizeof term);
    }
    CHECK(memcmp(xd_ema_view(through, 0).shadow.value, xd_ema_view(resumed, 0).shadow.value, sizeof shadow) ==
          0);
    CHECK(memcmp(xd_ema_view(through, 0).compensation.value, xd_ema_view(resumed, 0).compensation.value,
                 sizeof term) == 0);
    xd_ema_destroy(resumed);
    xd_ema_destroy(through);
    xd_ctx_destroy(ctx);
}

/* ---- rounding at random ---- */

static uint16_t truncated(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* The rule in double: up (in magnitude) when the random number is among the last (x - a) / (b - a) of the 65536 there are. */
static uint16_t expected_random(const char *name, float x, int64_t element, int64_t iteration) {
    const uint64_t hash = xd_hash(0, name, strlen(name));
    const xd_philox random = { 0x123456789abcdefu, XD_STREAM_EMA, (uint16_t)(hash >> 32), (uint32_t)hash,
                               (uint32_t)iteration };
    const uint32_t word = word_of(&random, element / 2);
    const double drawn = (double)(element % 2 ? word >> 16 : word & 0xffffu);
    const uint16_t below = truncated(x);
    const double a = fabs((double)widened(below)), b = fabs((double)widened((uint16_t)(below + 1)));
    return (uint16_t)(below + (drawn >= 65536.0 * (1.0 - (fabs((double)x) - a) / (b - a))));
}

static void check_random(xd_cpu_level level, double decay, xd_dtype dtype, int64_t first) {
    static uint16_t shadow[N];
    static double live[N];
    const float weight = (float)(1.0 - decay);
    xd_ctx *ctx = scene_ctx(level, 1);
    xd_param param = scene_param("module.layer.w", live, dtype, N);
    param.first = first;
    scene_fill(live, dtype, N, 3);
    xd_ema *ema = scene_ema(ctx, &param, 1, at_random(decay));
    CHECK_EQ_INT(xd_ema_view(ema, 0).shadow.dtype, XD_DTYPE_BF16);
    for (int i = 0; i < N; i++) shadow[i] = xd_bf16_from_f32((float)xd_load_f64(live, dtype, i));
    for (int64_t t = 7; t < 11; t++) {
        scene_fill(live, dtype, N, 50 + (uint32_t)t);
        CHECK_EQ_INT(xd_ema_update(ema, t, NULL), XD_OK);
        for (int i = 0; i < N; i++) {
            const float source = (float)xd_load_f64(live, dtype, i), before = widened(shadow[i]);
            const float difference = source - before;
            const float x =
                weight < 0.5f ? fmaf(weight, difference, before) : fmaf(weight - 1.0f, difference, source);
            shadow[i] = expected_random("layer.w", x, first + i, t);
        }
        CHECK(memcmp(xd_ema_view(ema, 0).shadow.value, shadow, sizeof shadow) == 0);
    }
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

static void check_roundings(xd_cpu_level level, xd_dtype dtype) {
    check_random(level, 0.999, dtype, 0);
    check_random(level, 0.3, dtype, (INT64_C(1) << 35) - 1003);
}

XD_TEST(shadows_round_at_random_by_the_rule_on_every_cpu_level) {
    on_every_level(check_roundings);
}

XD_TEST(the_mean_of_shadows_at_random_is_the_average_where_nearest_ones_stand_still) {
    static float value[N];
    double exact = 1.0, mean[2] = { 0.0, 0.0 };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("w", value, XD_DTYPE_F32, N);
    for (int i = 0; i < N; i++) value[i] = 1.0f;
    xd_ema_desc nearest = scene_decay(0.9999);
    nearest.dtype = XD_DTYPE_BF16;
    xd_ema *ema[2] = { scene_ema(ctx, &param, 1, at_random(0.9999)), scene_ema(ctx, &param, 1, nearest) };
    for (int i = 0; i < N; i++) value[i] = 1.5f;
    for (int t = 0; t < 2000; t++) {
        for (int k = 0; k < 2; k++) CHECK(xd_ema_update(ema[k], XD_EMA_NEXT, NULL) == XD_OK);
        exact += (1.0 - 0.9999) * (1.5 - exact);
    }
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < N; i++)
            mean[k] += xd_load_f64(xd_ema_view(ema[k], 0).shadow.value, XD_DTYPE_BF16, i) / N;
    /* a shadow wanders by sqrt(0.09 / 2^-7) 2^-7, 0.027; the mean of 3001 by 0.0005; six of those */
    CHECK_NEAR(mean[0], exact, 0.003);
    CHECK_NEAR(mean[1], 1.0, 1e-9);
    xd_ema_destroy(ema[0]);
    xd_ema_destroy(ema[1]);
    xd_ctx_destroy(ctx);
}

/* ---- cuts ---- */

enum { ROWS = 6, COLUMNS = 40, WHOLE = ROWS * COLUMNS };

/* A part of [ROWS, COLUMNS]: a rectangle of it, or a range that ignores rows. */
static xd_tensor_part part_of(xd_region *region, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    xd_tensor_part p;
    memset(&p, 0, sizeof p);
    memset(region, 0, sizeof *region);
    region->ndim = 2;
    region->count[0] = rows > 0;
    region->count[1] = 1;
    region->interval[0][0].begin = row;
    region->interval[0][0].end = row + rows;
    region->interval[1][0].begin = column;
    region->interval[1][0].end = column + columns;
    p.name = "w";
    p.dtype = XD_DTYPE_F32;
    p.ndim = 2;
    p.shape[0] = ROWS;
    p.shape[1] = COLUMNS;
    p.region = region;
    p.range.end = rows * columns;
    return p;
}

/* Gives `here` the elements of a part of `whole`. */
static void take_part(const xd_tensor_part *p, const float *whole, float *here) {
    const int64_t columns = p->region->interval[1][0].end - p->region->interval[1][0].begin;
    for (int64_t at = p->range.begin; at < p->range.end; at++)
        here[at - p->range.begin] = whole[(p->region->interval[0][0].begin + at / columns) * COLUMNS +
                                          p->region->interval[1][0].begin + at % columns];
}

/* The entry has so many zeros behind its part. */
static void check_cut(xd_tensor_part part, xd_ema_desc desc, int64_t padding) {
    static float whole[WHOLE], here[2 * WHOLE];
    const int64_t count = part.range.end - part.range.begin;
    const int64_t columns = part.region->interval[1][0].end - part.region->interval[1][0].begin;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param all = scene_param("w", whole, XD_DTYPE_F32, WHOLE);
    const xd_param some = scene_param("w", count + padding ? here : NULL, XD_DTYPE_F32, count + padding);
    memset(here, 0, sizeof here);
    scene_fill(whole, XD_DTYPE_F32, WHOLE, 5);
    take_part(&part, whole, here);
    part.data = here;
    xd_ema *one = scene_ema(ctx, &all, 1, desc);
    desc.parts = &part;
    xd_ema *shard = scene_ema(ctx, &some, 1, desc);
    for (uint32_t t = 0; t < 4; t++) {
        scene_fill(whole, XD_DTYPE_F32, WHOLE, 9 + t);
        take_part(&part, whole, here);
        CHECK_EQ_INT(xd_ema_update(one, XD_EMA_NEXT, NULL), XD_OK);
        CHECK_EQ_INT(xd_ema_update(shard, XD_EMA_NEXT, NULL), XD_OK);
    }
    for (int64_t at = part.range.begin; at < part.range.end; at++) {
        const int64_t index = (part.region->interval[0][0].begin + at / columns) * COLUMNS +
                              part.region->interval[1][0].begin + at % columns;
        CHECK(((const uint16_t *)xd_ema_view(shard, 0).shadow.value)[at - part.range.begin] ==
              ((const uint16_t *)xd_ema_view(one, 0).shadow.value)[index]);
    }
    for (int64_t i = count; i < count + padding; i++)
        CHECK(((const uint16_t *)xd_ema_view(shard, 0).shadow.value)[i] == 0);
    xd_ema_destroy(shard);
    xd_ema_destroy(one);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_random_average_of_any_part_is_that_part_of_the_random_average) {
    xd_region region;
    check_cut(part_of(&region, 0, ROWS, 0, COLUMNS), at_random(0.9), 0);
    check_cut(part_of(&region, 2, 3, 0, COLUMNS), at_random(0.9), 0);
    check_cut(part_of(&region, 0, ROWS, 11, 13), at_random(0.9), 0); /* columns */
    check_cut(part_of(&region, 1, 4, 39, 1), at_random(0.9), 0);
    check_cut(part_of(&region, 4, 0, 0, COLUMNS), at_random(0.9), 0); /* an empty one */
    xd_tensor_part flat = part_of(&region, 0, ROWS, 20, 20);
    flat.range.begin = 37; /* the storage of columns, cut again without regard to rows */
    flat.range.end = 83;
    check_cut(flat, at_random(0.9), 0);
    check_cut(part_of(&region, 0, ROWS, 11, 13), at_random(0.9), 39); /* with rows of padding */
    check_cut(part_of(&region, 4, 0, 0, COLUMNS), at_random(0.9), 7); /* and with nothing else */
}

XD_TEST(a_random_average_resumes_from_its_iteration_to_the_same_bits) {
    static float value[N];
    static uint16_t kept[N];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("w", value, XD_DTYPE_F32, N),
                   saved = scene_param("w", kept, XD_DTYPE_BF16, N);
    scene_fill(value, XD_DTYPE_F32, N, 1);
    xd_ema *through = scene_ema(ctx, &param, 1, at_random(0.99)),
           *resumed = scene_ema(ctx, &param, 1, at_random(0.99));
    for (uint32_t t = 0; t < 8; t++) {
        scene_fill(value, XD_DTYPE_F32, N, 20 + t);
        CHECK_EQ_INT(xd_ema_update(through, XD_EMA_NEXT, NULL), XD_OK);
        CHECK_EQ_INT(xd_ema_update(resumed, XD_EMA_NEXT, NULL), XD_OK);
        if (t != 4) continue;
        const xd_ema_record record = xd_ema_describe(resumed).record;
        CHECK_EQ_INT(xd_ema_copy_to(resumed, &saved, 1, false, NULL), XD_OK);
        xd_ema_destroy(resumed);
        resumed = scene_ema(ctx, &param, 1, at_random(0.99));
        CHECK_EQ_INT(average_load(resumed, &saved, 1, &(xd_ema_load_desc){ .record = &record }, NULL), XD_OK);
    }
    CHECK(memcmp(xd_ema_view(through, 0).shadow.value, xd_ema_view(resumed, 0).shadow.value, sizeof kept) ==
          0);
    xd_ema_destroy(resumed);
    xd_ema_destroy(through);
    xd_ctx_destroy(ctx);
}

/* ---- what both have in common ---- */

/* With the optimizer's step, where a plain average joins the pass over memory, and by a call of its own. */
XD_TEST(steps_update_averages_of_every_format_as_calls_of_their_own_do) {
    static float value[2][N], gradient[N];
    int64_t unmoved[2] = { -1, -1 };
    for (int form = 0; form < 3; form++) {
        xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
        xd_ema *ema[2] = { NULL, NULL };
        xd_optimizer *optimizer[2] = { NULL, NULL };
        xd_param param[2];
        for (int k = 0; k < 2; k++) {
            param[k] = scene_param("w", value[k], XD_DTYPE_F32, N);
            param[k].gradient = gradient;
            scene_fill(value[k], XD_DTYPE_F32, N, 4);
            const xd_optimizer_desc desc = xd_adamw_defaults(&param[k], 1);
            CHECK_EQ_INT(xd_optimizer_create(ctx, &desc, &optimizer[k]), XD_OK);
            ema[k] = scene_ema(ctx, &param[k], 1,
                               form == 0   ? compensated(0.99)
                               : form == 1 ? at_random(0.99)
                                           : scene_decay(0.9999));
            xd_ema_count_unmoved(ema[k], &unmoved[k]);
        }
        for (uint32_t t = 0; t < 3; t++) {
            const xd_optimizer_step_desc with = { .averages = &ema[0], .average_count = 1 };
            scene_fill(gradient, XD_DTYPE_F32, N, 70 + t);
            CHECK_EQ_INT(xd_optimizer_step(optimizer[0], &with, NULL), XD_OK);
            CHECK_EQ_INT(xd_optimizer_step(optimizer[1], NULL, NULL), XD_OK);
            CHECK_EQ_INT(xd_ema_update(ema[1], XD_EMA_NEXT, NULL), XD_OK);
            CHECK_EQ_INT(unmoved[0], unmoved[1]);
            const xd_param a = xd_ema_view(ema[0], 0).shadow, b = xd_ema_view(ema[1], 0).shadow;
            CHECK(memcmp(a.value, b.value, (size_t)N * xd_dtype_size(a.dtype)) == 0);
        }
        for (int k = 0; k < 2; k++) {
            xd_ema_destroy(ema[k]);
            xd_optimizer_destroy(optimizer[k]);
        }
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(formats_that_exclude_each_other_are_refused) {
    float value = 1.0f;
    xd_region region;
    xd_tensor_part part = part_of(&region, 0, ROWS, 0, COLUMNS);
    part.data = &value;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    const struct {
        xd_result result;
        const char *words;
    } expected[] = {
        { XD_ERROR_ARGUMENT, "compensated and stochastic_bf16 exclude each other" },
        { XD_ERROR_ARGUMENT, "compensated excludes live_dtype" },
        { XD_ERROR_ARGUMENT, "stochastic_bf16 excludes live_dtype" },
        { XD_ERROR_ARGUMENT, "compensated excludes live_dtype and compat_credit" },
        { XD_ERROR_DTYPE, "compensated shadows are F32, not" },
        { XD_ERROR_DTYPE, "shadows of stochastic_bf16 are BF16, not" },
        { XD_ERROR_ARGUMENT, "w: its first element is number -3" },
        { XD_ERROR_SHAPE, "w: 1 elements, its part has 240" },
    };
    for (int k = 0; k < 8; k++) {
        xd_ema_desc d = k == 2 || k >= 5 ? at_random(0.5) : compensated(0.5);
        xd_ema *ema = NULL;
        xd_memory_bytes bytes = { 7, 7 };
        d.stochastic_bf16 = d.stochastic_bf16 || k == 0;
        d.live_dtype = k == 1 || k == 2;
        d.compat_credit = k == 3;
        if (k == 4) d.dtype = XD_DTYPE_BF16;
        if (k == 5) d.dtype = XD_DTYPE_F32;
        param.first = k == 6 ? -3 : 0;
        if (k == 7) d.parts = &part;
        CHECK_EQ_INT(average_create(ctx, &param, 1, &d, &ema), expected[k].result);
        CHECK(scene_says(ctx, expected[k].words));
        CHECK(ema == NULL);
        CHECK_EQ_INT(PLANNED_MEMORY(ctx, average_create(ctx, &param, 1, &d, &ema), &bytes),
                     expected[k].result);
        CHECK(bytes.host == 7);
    }
    xd_ctx_destroy(ctx);
}

/* Counts what a context has, as a plan says it. */
static void *count_allocate(void *user, size_t bytes) {
    *(size_t *)user += bytes;
    return malloc(bytes);
}

static void count_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(bytes_are_those_of_the_format) {
    static float value[N];
    size_t taken = 0, host[3];
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = count_allocate;
    desc.allocator.release = count_release;
    desc.allocator.user = &taken;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    const xd_param param = scene_param("w", value, XD_DTYPE_F32, N);
    for (int k = 0; k < 3; k++) {
        const xd_ema_desc d = k == 0 ? scene_decay(0.5) : k == 1 ? compensated(0.5) : at_random(0.5);
        xd_memory_bytes bytes = { 0, 0 };
        xd_ema *ema = NULL;
        CHECK_EQ_INT(PLANNED_MEMORY(ctx, average_create(ctx, &param, 1, &d, &ema), &bytes), XD_OK);
        taken = 0;
        CHECK_EQ_INT(average_create(ctx, &param, 1, &d, &ema), XD_OK);
        CHECK_EQ_INT(taken, bytes.host);
        host[k] = bytes.host;
        taken = 0;
        CHECK_EQ_INT(xd_ema_update(ema, 1, NULL), XD_OK);
        CHECK_EQ_INT(xd_ema_swap(ema), k == 2 ? XD_ERROR_DTYPE : XD_OK);
        CHECK_EQ_INT(taken, 0);
        xd_ema_destroy(ema);
    }
    CHECK(host[1] - host[0] >= 2 * N && host[1] - host[0] < 2 * N + 128);
    CHECK(host[0] - host[2] >= 2 * N - 128 && host[0] - host[2] < 2 * N + 128);
    xd_ctx_destroy(ctx);
}

/* ---- elements that do not move ---- */

/* The count of an update, found by comparing all there is before and after. */
static void check_unmoved(xd_ema_desc desc, xd_dtype dtype, int threads, int64_t *sum) {
    enum { MANY = 70000 };
    static double live[MANY];
    static unsigned char before[MANY * 8];
    static uint16_t term[MANY];
    int64_t unmoved = -5, expected = 0;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, threads);
    const xd_param param = scene_param("w", live, dtype, MANY);
    scene_fill(live, dtype, MANY, 8);
    xd_ema *ema = scene_ema(ctx, &param, 1, desc);
    xd_ema_count_unmoved(ema, &unmoved);
    for (int64_t i = 0; i < MANY; i += 1 + i % 3) /* from no difference to large ones */
        xd_store_f64(live, dtype, i, xd_load_f64(live, dtype, i) * (1.0 + ldexp(1.0, -(int)(i % 24))));
    const xd_param view = xd_ema_view(ema, 0).shadow, lacked = xd_ema_view(ema, 0).compensation;
    const size_t size = xd_dtype_size(view.dtype);
    for (int t = 0; t < 3; t++) {
        memcpy(before, view.value, MANY * size);
        if (lacked.value) memcpy(term, lacked.value, sizeof term);
        CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
        expected = 0;
        for (int64_t i = 0; i < MANY; i++) {
            double average = xd_load_f64(before, view.dtype, i);
            if (lacked.value) average += xd_load_f64(term, XD_DTYPE_BF16, i);
            const bool same =
                memcmp(before + (size_t)i * size, (char *)view.value + (size_t)i * size, size) == 0 &&
                (!lacked.value || term[i] == ((uint16_t *)lacked.value)[i]);
            expected += same && xd_load_f64(live, dtype, i) != average;
        }
        CHECK_EQ_INT(unmoved, expected);
    }
    *sum += unmoved;
    xd_ema_count_unmoved(ema, NULL);
    unmoved = -9;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    CHECK_EQ_INT(unmoved, -9);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(elements_that_do_not_move_are_counted_in_every_format_and_with_any_threads) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64 };
    int64_t plain = 0, follows = 0, random = 0;
    for (int k = 0; k < 6; k++) {
        xd_ema_desc narrow = scene_decay(0.999);
        narrow.dtype = k % 2 ? XD_DTYPE_F16 : XD_DTYPE_BF16;
        int64_t other = 0;
        check_unmoved(scene_decay(0.999), dtypes[k / 2], 1 + 2 * (k % 2), &plain);
        check_unmoved(compensated(0.999), dtypes[k / 2], 1 + 2 * (k % 2), &follows);
        check_unmoved(at_random(0.999), dtypes[k / 2], 1 + 2 * (k % 2), &random);
        check_unmoved(narrow, dtypes[k / 2], 1 + 2 * (k % 2), &other);
        CHECK(other > 0);
    }
    CHECK(plain > 0 && follows < plain / 10 && random > 0);
}

XD_TEST(frozen_weights_copies_and_updates_that_do_nothing_count_no_element) {
    float value[2] = { 1.0f, 1.0f };
    int64_t unmoved = -1;
    xd_status status;
    memset(&status, 0, sizeof status);
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param params[2];
    params[0] = scene_param("w", &value[0], XD_DTYPE_F32, 1);
    params[1] = scene_param("frozen", &value[1], XD_DTYPE_F32, 1);
    params[1].frozen = true;
    xd_ema_desc desc = scene_decay(1.0);
    desc.init_from_current = false;
    desc.start_iteration = 2;
    xd_ema *ema = scene_ema(ctx, params, 2, desc);
    xd_ema_count_unmoved(ema, &unmoved);
    value[0] = 2.0f;
    for (int t = 1; t <= 2; t++) { /* before the start, then the copy */
        unmoved = -1;
        CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
        CHECK_EQ_INT(unmoved, 0);
    }
    value[0] = 3.0f;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    CHECK_EQ_INT(unmoved, 1);
    status.not_finite = 1;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, &status), XD_OK);
    CHECK_EQ_INT(unmoved, 0);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
