/* Averages: schedules, bits, the state machine, names, buffers, ties, loading and publishing, bad input. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test_numbers.h"
#include "ema_scene.h"

#include <stdlib.h>

static xd_ema_desc ema_desc(double decay) {
    xd_ema_desc d = xd_ema_defaults(XD_EMA_CONSTANT);
    d.decay = decay;
    return d;
}

static float ema_f32(const xd_ema *ema, int64_t index) {
    return ((const float *)xd_ema_view(ema, index).shadow.value)[0];
}

static double ema_decay(xd_ema_desc desc, int64_t iteration) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, NULL, 0, &desc, &ema) == XD_OK);
    CHECK(xd_ema_update(ema, iteration, NULL) == XD_OK);
    const double decay = xd_ema_describe(ema).decay;
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
    return decay;
}

XD_TEST(schedules_give_the_published_decays) {
    xd_ema_desc power = xd_ema_defaults(XD_EMA_POWER), half = xd_ema_defaults(XD_EMA_HALFLIFE),
                ramp = xd_ema_defaults(XD_EMA_RAMP);
    CHECK(ema_decay(xd_ema_defaults(XD_EMA_CONSTANT), 5) == 0.9999);
    CHECK(ema_decay(ema_desc(0.0), 5) == 0.0); /* zero is zero */
    CHECK(ema_decay(power, 0) == 0.0 && ema_decay(power, 1) == 0.0);
    CHECK_NEAR(ema_decay(power, 2), 3.894852164105202e-06, 1e-20);
    CHECK_NEAR(ema_decay(power, 10), 0.1505698073120877, 2e-16);
    CHECK_NEAR(ema_decay(power, 100), 0.8347654136933328, 1e-15);
    CHECK_NEAR(ema_decay(power, 100000), 0.9998203152467342, 1e-15);
    CHECK(ema_decay(half, 0) == 0.0 && ema_decay(half, 1) == 9.5367431640625e-07 &&
          ema_decay(half, 20) == 0.5);
    half.batch_size = 128;
    CHECK_NEAR(ema_decay(half, 1000), 0.9862327044933592, 1e-15);
    CHECK_NEAR(ema_decay(half, 78125), 0.9998225700643298, 1e-15);
    half.disable_rampup = true;
    CHECK_NEAR(ema_decay(half, 1), 0.9998225700643298, 1e-15);
    CHECK_NEAR(ema_decay(ramp, 1), 2.0 / 11.0, 1e-16);
    CHECK(ema_decay(ramp, 1000000) == 0.9999);
}

/* The shadow after each of n updates from `from` towards `to`. */
static void ema_sequence(float from, float to, double decay, const float *expected, int n) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    float value = from;
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    const xd_ema_desc desc = ema_desc(decay);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, &param, 1, &desc, &ema) == XD_OK);
    CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_OK); /* copies */
    value = to;
    for (int i = 0; i < n; i++) {
        CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_OK);
        CHECK_NEAR(ema_f32(ema, 0), expected[i], 0.0);
    }
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

/* Hexadecimal floats, which C++11 does not have, as integers times powers of two. */
XD_TEST(averages_have_the_published_bits) {
    const float first[5] = { ldexpf(0x199999a, -28), ldexpf(0x1851eb8, -27), ldexpf(0x1158106, -26),
                             ldexpf(0x1602752, -26), ldexpf(0x1a35696, -26) };
    const float slow[3] = { ldexpf(0x100068e, -24), ldexpf(0x1000d1c, -24), ldexpf(0x10013aa, -24) };
    const float large[1] = { ldexpf(0x1b33334, -24) };
    ema_sequence(0.0f, 1.0f, 0.9, first, 5);
    ema_sequence(1.0f, 2.0f, 0.9999, slow, 3);
    ema_sequence(1.0f, 2.0f, 0.3, large, 1);
}

XD_TEST(a_bf16_shadow_rounds_once_and_may_stand_still) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    for (int k = 0; k < 2; k++) {
        float value = 1.0f;
        const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
        xd_ema_desc desc = ema_desc(k ? 0.999 : 0.9);
        desc.dtype = XD_DTYPE_BF16;
        xd_ema *ema = NULL;
        CHECK(average_create(ctx, &param, 1, &desc, &ema) == XD_OK);
        CHECK(xd_ema_update(ema, 1, NULL) == XD_OK);
        value = 2.0f;
        CHECK(xd_ema_update(ema, 2, NULL) == XD_OK);
        CHECK(xd_load_f64(xd_ema_view(ema, 0).shadow.value, XD_DTYPE_BF16, 0) == (k ? 1.0 : 1.1015625));
        xd_ema_destroy(ema);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(weights_zero_and_one_keep_or_take_the_value_to_the_bit) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    for (int k = 0; k < 2; k++) {
        float value = 0.1f;
        const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
        const xd_ema_desc desc = ema_desc(k ? 0.0 : 1.0);
        xd_ema *ema = NULL;
        CHECK(average_create(ctx, &param, 1, &desc, &ema) == XD_OK);
        CHECK(xd_ema_update(ema, 1, NULL) == XD_OK);
        value = 12345.678f;
        CHECK(xd_ema_update(ema, 2, NULL) == XD_OK);
        CHECK(ema_f32(ema, 0) == (k ? 12345.678f : 0.1f));
        xd_ema_destroy(ema);
    }
    xd_ctx_destroy(ctx);
}

/* One shadow at decay 0.5, live values 1 at creation; each step sets a live value and calls with an
 * iteration. */
typedef struct ema_row {
    int64_t iteration;
    float live, shadow;
    bool initialized;
} ema_row;

static void ema_machine(int64_t start, bool from_current, const ema_row *rows, int n) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    float value = 1.0f;
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema_desc desc = ema_desc(0.5);
    desc.start_iteration = start;
    desc.init_from_current = from_current;
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, &param, 1, &desc, &ema) == XD_OK);
    CHECK(ema_f32(ema, 0) == 1.0f); /* publishing before the first copy gives the weights of creation */
    for (int i = 0; i < n; i++) {
        value = rows[i].live;
        CHECK(xd_ema_update(ema, rows[i].iteration, NULL) == XD_OK);
        CHECK_NEAR(ema_f32(ema, 0), rows[i].shadow, 0.0);
        CHECK_EQ_INT(xd_ema_describe(ema).record.initialized, rows[i].initialized);
    }
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

/* Every situation an update can be in, and where it is tested:
 *   start 0, counted by itself: a copy, then averages        the_first_update_that_counts_copies
 *   start 0, called with 0: a copy, each time                the_first..., the_start_iteration_copies_again...
 *   before the start: nothing changes                        the_first..., nothing_changes_before_the_start
 *   the first call after the start: a copy                   the_first...
 *   the start again: a copy again                            the_start_iteration_copies_again...
 *   iterations that go back: their own decay                 the_start_iteration..., the_decay_is_that_of_the_iteration_given
 *   published before the first copy: weights of creation     publishing_before_the_first_copy_gives_the_weights_of_creation
 *   loaded, then updated: goes on, but copies at the start   a_resumed_average..., a_loaded_average_is_overwritten_at_the_start
 *   resumed without its file: a copy                         an_average_resumed_without_its_file_begins_with_a_copy
 *   counter: given ones are stored, others one more          the_counter_goes_on_from_the_last_iteration_given
 *   a status with a finding: nothing, the counter too        a_status_with_a_finding... */
XD_TEST(the_first_update_that_counts_copies) {
    static const ema_row counted[] = { { XD_EMA_NEXT, 2.0f, 2.0f, true }, { XD_EMA_NEXT, 4.0f, 3.0f, true } };
    static const ema_row zero[] = { { 0, 2.0f, 2.0f, true }, { 1, 4.0f, 3.0f, true } };
    static const ema_row late[] = { { 1, 2.0f, 1.0f, false },
                                    { 99, 3.0f, 1.0f, false },
                                    { 100, 4.0f, 4.0f, true },
                                    { 101, 8.0f, 6.0f, true } };
    static const ema_row skipped[] = { { 99, 2.0f, 1.0f, false },
                                       { 150, 3.0f, 3.0f, true },
                                       { 151, 5.0f, 4.0f, true } };
    ema_machine(0, false, counted, 2);
    ema_machine(0, false, zero, 2);
    ema_machine(100, false, late, 4);
    ema_machine(100, false, skipped, 3);
}

XD_TEST(the_start_iteration_copies_again_and_order_is_free) {
    static const ema_row again[] = { { 5, 2.0f, 2.0f, true },
                                     { 6, 4.0f, 3.0f, true },
                                     { 5, 7.0f, 7.0f, true } };
    static const ema_row zero[] = { { 0, 2.0f, 2.0f, true },
                                    { 0, 5.0f, 5.0f, true },
                                    { 1, 7.0f, 6.0f, true } };
    static const ema_row backwards[] = { { 9, 2.0f, 2.0f, true },
                                         { 7, 4.0f, 3.0f, true },
                                         { 3, 9.0f, 3.0f, true } };
    static const ema_row current[] = { { 1, 3.0f, 2.0f, true }, { 2, 4.0f, 3.0f, true } };
    ema_machine(5, false, again, 3);
    ema_machine(0, false, zero, 3);
    ema_machine(5, false, backwards, 3);
    ema_machine(0, true, current, 2);
}

/* Parameters and buffers, the counter counting by itself. */
XD_TEST(nothing_changes_before_the_start) {
    float value = 1.0f, buffer = 1.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_param params[2];
    params[0] = scene_param("w", &value, XD_DTYPE_F32, 1);
    params[1] = scene_param("b", &buffer, XD_DTYPE_F32, 1);
    params[1].buffer = true;
    xd_ema_desc desc = ema_desc(0.5);
    desc.start_iteration = 100;
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, params, 2, &desc, &ema) == XD_OK);
    for (int64_t i = 1; i < 100; i++) {
        value = buffer = (float)i + 1.0f;
        CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_OK);
        CHECK(ema_f32(ema, 0) == 1.0f && ema_f32(ema, 1) == 1.0f);
        CHECK(!xd_ema_describe(ema).record.initialized);
        CHECK_EQ_INT(xd_ema_describe(ema).record.iteration, i);
    }
    CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_OK);
    CHECK(ema_f32(ema, 0) == 100.0f && ema_f32(ema, 1) == 100.0f && xd_ema_describe(ema).record.initialized);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(publishing_before_the_first_copy_gives_the_weights_of_creation) {
    float value = 1.5f, out = 0.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1),
                   target = scene_param("w", &out, XD_DTYPE_F32, 1);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, &param, 1, NULL, &ema) == XD_OK);
    value = 7.0f;
    CHECK(xd_ema_copy_to(ema, &target, 1, false, NULL) == XD_OK);
    CHECK(out == 1.5f && !xd_ema_describe(ema).record.initialized &&
          xd_ema_describe(ema).record.iteration == 0);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_decay_is_that_of_the_iteration_given) {
    static const int64_t iterations[] = { 10, 1000, 10, 3, 1000000 };
    float value = 0.0f;
    double shadow = 0.0;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema_desc desc = xd_ema_defaults(XD_EMA_POWER);
    desc.init_from_current = true;
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, &param, 1, &desc, &ema) == XD_OK);
    for (int k = 0; k < 5; k++) {
        value = (float)(k + 1);
        shadow += (1.0 - pow(1.0 - 1.0 / (double)iterations[k], 17.97)) * ((double)value - shadow);
        CHECK(xd_ema_update(ema, iterations[k], NULL) == XD_OK);
        CHECK_NEAR(ema_f32(ema, 0), shadow, 1e-5);
        CHECK_EQ_INT(xd_ema_describe(ema).record.iteration, iterations[k]);
    }
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_counter_goes_on_from_the_last_iteration_given) {
    static const int64_t asked[] = {
        XD_EMA_NEXT, XD_EMA_NEXT, 40, XD_EMA_NEXT, 7, XD_EMA_NEXT, 0, XD_EMA_NEXT
    };
    static const int64_t stored[] = { 1, 2, 40, 41, 7, 8, 0, 1 };
    float value = 1.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, &param, 1, NULL, &ema) == XD_OK);
    for (int k = 0; k < 8; k++) {
        CHECK(xd_ema_update(ema, asked[k], NULL) == XD_OK);
        CHECK_EQ_INT(xd_ema_describe(ema).record.iteration, stored[k]);
    }
    CHECK(xd_ema_update(ema, INT64_MAX, NULL) == XD_OK);
    CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "there is no iteration after 9223372036854775807");
    CHECK_EQ_INT(xd_ema_describe(ema).record.iteration, INT64_MAX);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

/* With the record of another run, at its iteration and at the start. */
XD_TEST(a_loaded_average_is_overwritten_at_the_start) {
    for (int64_t at = 4; at <= 6; at++) {
        float value = 1.0f, saved = 10.0f;
        xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
        const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1),
                       list = scene_param("w", &saved, XD_DTYPE_F32, 1);
        xd_ema_desc desc = ema_desc(0.5);
        desc.start_iteration = 5;
        xd_ema *ema = NULL;
        CHECK(average_create(ctx, &param, 1, &desc, &ema) == XD_OK);
        CHECK(average_load(ema, &list, 1, NULL, NULL) == XD_OK);
        CHECK(xd_ema_describe(ema).record.initialized);
        value = 2.0f;
        CHECK(xd_ema_update(ema, at, NULL) == XD_OK);
        CHECK(ema_f32(ema, 0) == (at < 5 ? 10.0f : at == 5 ? 2.0f : 6.0f));
        xd_ema_destroy(ema);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(an_average_resumed_without_its_file_begins_with_a_copy) {
    static const ema_row resumed[] = { { 501, 4.0f, 4.0f, true }, { 502, 8.0f, 6.0f, true } };
    static const ema_row early[] = { { 3, 4.0f, 1.0f, false }, { 501, 5.0f, 5.0f, true } };
    ema_machine(0, false, resumed, 2);
    ema_machine(100, false, resumed, 2);
    ema_machine(100, false, early, 2);
}

XD_TEST(a_status_with_a_finding_stops_update_and_counter) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    float value = 1.0f;
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema *ema = NULL;
    xd_status status;
    memset(&status, 0, sizeof status);
    status.not_finite = 1;
    CHECK(average_create(ctx, &param, 1, NULL, &ema) == XD_OK);
    value = 2.0f;
    CHECK(xd_ema_update(ema, XD_EMA_NEXT, &status) == XD_OK);
    CHECK(ema_f32(ema, 0) == 1.0f);
    CHECK_EQ_INT(xd_ema_describe(ema).record.iteration, 0);
    CHECK(xd_ema_update(ema, -2, NULL) == XD_ERROR_ARGUMENT);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_average_of_a_shard_is_the_shard_of_the_average) {
    enum { N = 1000, RANKS = 8, STEPS = 4 };
    static const int lengths[4] = { 1, 7, 8, N };
    float whole[N], pieces[N];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    for (int l = 0; l < 4; l++) {
        const int n = lengths[l], chunk = (n + RANKS - 1) / RANKS;
        const xd_param one = scene_param("w", whole, XD_DTYPE_F32, n);
        const xd_ema_desc desc = ema_desc(0.7);
        xd_param shard[RANKS];
        xd_ema *all = NULL, *part[RANKS];
        scene_fill(whole, XD_DTYPE_F32, n, 1u);
        memcpy(pieces, whole, sizeof(float) * (size_t)n);
        CHECK(average_create(ctx, &one, 1, &desc, &all) == XD_OK);
        for (int r = 0; r < RANKS; r++) {
            const int begin = r * chunk < n ? r * chunk : n, end = begin + chunk < n ? begin + chunk : n;
            shard[r] = scene_param("w", end > begin ? pieces + begin : NULL, XD_DTYPE_F32, end - begin);
            CHECK(average_create(ctx, &shard[r], 1, &desc, &part[r]) == XD_OK);
        }
        for (int t = 0; t < STEPS; t++) {
            scene_fill(whole, XD_DTYPE_F32, n, 10u + (uint32_t)t);
            memcpy(pieces, whole, sizeof(float) * (size_t)n);
            CHECK(xd_ema_update(all, XD_EMA_NEXT, NULL) == XD_OK);
            for (int r = 0; r < RANKS; r++) CHECK(xd_ema_update(part[r], XD_EMA_NEXT, NULL) == XD_OK);
        }
        const float *expected = (const float *)xd_ema_view(all, 0).shadow.value;
        for (int r = 0, at = 0; r < RANKS; r++) {
            const xd_param view = xd_ema_view(part[r], 0).shadow;
            CHECK(memcmp(view.value, expected + at, (size_t)view.count * sizeof(float)) == 0);
            at += (int)view.count;
            xd_ema_destroy(part[r]);
        }
        xd_ema_destroy(all);
    }
    xd_ctx_destroy(ctx);
}

/* A float stored in one dtype, then in another, as double. */
static double ema_through(float value, xd_dtype first, xd_dtype second) {
    float cell[1]; /* one element of any of the dtypes */
    xd_store_f64(cell, first, 0, (double)value);
    const double stored = xd_load_f64(cell, first, 0);
    xd_store_f64(cell, second, 0, stored);
    return xd_load_f64(cell, second, 0);
}

XD_TEST(every_pair_of_dtypes_agrees_with_double_arithmetic_rounded_once) {
    enum { N = 257 };
    static const xd_dtype dtypes[3] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    float start[N], next[N], live[N];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    scene_fill(start, XD_DTYPE_F32, N, 5u);
    scene_fill(next, XD_DTYPE_F32, N, 6u);
    for (int k = 0; k < 9; k++) {
        const xd_dtype from = dtypes[k / 3], to = dtypes[k % 3];
        const xd_param param = scene_param("w", live, from, N);
        xd_ema_desc desc = ema_desc(0.9);
        desc.dtype = to;
        xd_ema *ema = NULL;
        for (int i = 0; i < N; i++) xd_store_f64(live, from, i, (double)start[i]);
        CHECK(average_create(ctx, &param, 1, &desc, &ema) == XD_OK);
        CHECK(xd_ema_update(ema, 1, NULL) == XD_OK);
        for (int i = 0; i < N; i++) xd_store_f64(live, from, i, (double)next[i]);
        CHECK(xd_ema_update(ema, 2, NULL) == XD_OK);
        for (int i = 0; i < N; i++) {
            const double a = ema_through(start[i], from, to), b = ema_through(next[i], from, to);
            const double expected = ema_through((float)(a + (1.0 - 0.9) * (b - a)), XD_DTYPE_F32, to);
            CHECK_NEAR(xd_load_f64(xd_ema_view(ema, 0).shadow.value, to, i), expected,
                       to == XD_DTYPE_F32 ? 1.2e-7 : 0.0);
        }
        xd_ema_destroy(ema);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(buffers_are_copied_as_they_are) {
    int64_t counter = (INT64_C(1) << 53) + 1; /* no double holds it */
    uint8_t flag = 1;
    uint16_t half = f16_of(0.1f);
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_param params[3];
    params[0] = scene_param("counter", &counter, XD_DTYPE_I64, 1);
    params[1] = scene_param("flag", &flag, XD_DTYPE_BOOL, 1);
    params[2] = scene_param("half", &half, XD_DTYPE_F16, 1);
    for (int i = 0; i < 3; i++) params[i].buffer = true;
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, params, 3, NULL, &ema) == XD_OK);
    CHECK(xd_ema_update(ema, 1, NULL) == XD_OK);
    counter += 2;
    flag = 0;
    half = f16_of(7.0f);
    CHECK(xd_ema_update(ema, 2, NULL) == XD_OK);
    CHECK(memcmp(xd_ema_view(ema, 0).shadow.value, &counter, sizeof counter) == 0);
    CHECK(memcmp(xd_ema_view(ema, 1).shadow.value, &flag, sizeof flag) == 0);
    CHECK(memcmp(xd_ema_view(ema, 2).shadow.value, &half, sizeof half) == 0);
    xd_ema_destroy(ema);
    params[0].buffer = false;
    ema = NULL;
    CHECK(average_create(ctx, params, 3, NULL, &ema) == XD_ERROR_DTYPE);
    CHECK(ema == NULL);
    xd_ctx_destroy(ctx);
}

/* Two updates of a list whose second half are the same numbers as buffers. */
XD_TEST(buffers_are_averaged_by_a_flag_as_parameters_are_but_for_integers_and_vectors_of_spectral_norm) {
    float values[2][6], u[3] = { 0.6f, 0.8f, 0.0f };
    int64_t counter = 1;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_param params[4];
    params[0] = scene_param("w", values[0], XD_DTYPE_F32, 6);
    params[1] = scene_param("running_mean", values[1], XD_DTYPE_F32, 6);
    params[2] = scene_param("conv.weight_u", u, XD_DTYPE_F32, 3);
    params[3] = scene_param("num_batches", &counter, XD_DTYPE_I64, 1);
    for (int i = 1; i < 4; i++) params[i].buffer = true;
    for (int k = 0; k < 3; k++) {
        xd_ema_desc d = scene_decay(0.9);
        d.average_buffers = k > 0;
        d.compat_credit = k == 2;
        scene_fill(values[0], XD_DTYPE_F32, 6, 3);
        memcpy(values[1], values[0], sizeof values[0]);
        xd_ema *ema = scene_ema(ctx, params, 4, d);
        for (uint32_t t = 0; t < 2; t++) {
            scene_fill(values[0], XD_DTYPE_F32, 6, 4 + t);
            memcpy(values[1], values[0], sizeof values[0]);
            u[2] += 0.25f;
            counter++;
            CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_OK);
        }
        const void *mean = xd_ema_view(ema, 1).shadow.value;
        CHECK(memcmp(mean, k ? xd_ema_view(ema, 0).shadow.value : values[1], sizeof values[1]) == 0);
        CHECK(memcmp(xd_ema_view(ema, 0).shadow.value, values[0], sizeof values[0]) != 0);
        CHECK(memcmp(xd_ema_view(ema, 2).shadow.value, u, sizeof u) == 0);
        CHECK(memcmp(xd_ema_view(ema, 3).shadow.value, &counter, sizeof counter) == 0);
        /* Resumed from what it shows. */
        const xd_ema_record record = xd_ema_describe(ema).record;
        CHECK(record.config.average_buffers == (k > 0));
        const xd_param saved[] = { xd_ema_view(ema, 0).shadow, xd_ema_view(ema, 1).shadow,
                                   xd_ema_view(ema, 2).shadow, xd_ema_view(ema, 3).shadow };
        xd_ema *resumed = scene_ema(ctx, params, 4, record.config);
        CHECK(average_load(resumed, saved, 4, &(xd_ema_load_desc){ .record = &record }, NULL) == XD_OK);
        scene_fill(values[1], XD_DTYPE_F32, 6, 9);
        CHECK(xd_ema_update(ema, XD_EMA_NEXT, NULL) == XD_OK);
        CHECK(xd_ema_update(resumed, XD_EMA_NEXT, NULL) == XD_OK);
        for (int i = 0; i < 2; i++)
            CHECK(memcmp(xd_ema_view(resumed, i).shadow.value, xd_ema_view(ema, i).shadow.value,
                         sizeof values[0]) == 0);
        xd_ema_destroy(resumed);
        xd_ema_destroy(ema);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(tokens_of_the_caller_are_stripped_instead) {
    static const char *const tokens[] = { "student." };
    float a = 1.0f, target = 0.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    const xd_param param = scene_param("student.module.w", &a, XD_DTYPE_F32, 1),
                   out = scene_param("module.w", &target, XD_DTYPE_F32, 1);
    xd_ema_desc d = scene_decay(0.5);
    d.strip_tokens = tokens;
    d.strip_count = 1;
    xd_ema *ema = scene_ema(ctx, &param, 1, d);
    CHECK_EQ_STR(xd_ema_view(ema, 0).shadow.name, "module.w"); /* that of wrappers stays */
    CHECK(xd_ema_copy_to(ema, &out, 1, false, NULL) == XD_OK && target == 1.0f);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(names_lose_their_wrappers_and_may_not_collide) {
    float a = 1.0f, b = 2.0f, target = 0.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_param params[2];
    params[0] = scene_param("module._orig_mod.layer._checkpoint_wrapped_module.w", &a, XD_DTYPE_F32, 1);
    params[1] = scene_param("layer.b", &b, XD_DTYPE_F32, 1);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, params, 2, NULL, &ema) == XD_OK);
    CHECK_EQ_STR(xd_ema_view(ema, 0).shadow.name, "layer.w");
    const xd_param out = scene_param("_fsdp_wrapped_module.layer.w", &target, XD_DTYPE_F32, 1);
    xd_ema_match match;
    CHECK(xd_ema_copy_to(ema, &out, 1, true, &match) == XD_OK);
    CHECK(match.matched == 1 && match.missing_in_target == 1 && target == 1.0f);
    xd_ema_destroy(ema);
    params[1].name = "layer.w";
    ema = NULL;
    CHECK(average_create(ctx, params, 2, NULL, &ema) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "layer.w") != NULL);
    CHECK(ema == NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(tied_parameters_share_a_shadow_and_both_names_receive_it) {
    float value[2] = { 1.0f, 2.0f }, first[2] = { 0.0f, 0.0f }, second[2] = { 0.0f, 0.0f };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_param params[2], targets[2];
    params[0] = scene_param("embedding", value, XD_DTYPE_F32, 2);
    params[1] = scene_param("head", value, XD_DTYPE_F32, 2);
    targets[0] = scene_param("embedding", first, XD_DTYPE_F32, 2);
    targets[1] = scene_param("head", second, XD_DTYPE_F32, 2);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, params, 2, NULL, &ema) == XD_OK);
    CHECK_EQ_INT(xd_ema_describe(ema).count, 1);
    CHECK(xd_ema_copy_to(ema, targets, 2, false, NULL) == XD_OK);
    CHECK(memcmp(first, value, sizeof value) == 0 && memcmp(second, value, sizeof value) == 0);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_strict_load_refuses_what_does_not_fit_and_writes_nothing) {
    static const int64_t tall[2] = { 2, 1 }, flat[2] = { 1, 2 };
    float a[2] = { 1.0f, 2.0f }, b = 3.0f, saved[2] = { 8.0f, 9.0f };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_param params[2], sources[3];
    params[0] = scene_param("a", a, XD_DTYPE_F32, 2);
    params[0].shape = tall;
    params[0].dims = 2;
    params[1] = scene_param("b", &b, XD_DTYPE_F32, 1);
    sources[0] = scene_param("a", saved, XD_DTYPE_F32, 2);
    sources[1] = scene_param("b", saved, XD_DTYPE_F32, 1);
    sources[2] = scene_param("c", saved, XD_DTYPE_F32, 1);
    xd_ema *ema = NULL;
    xd_ema_match match;
    CHECK(average_create(ctx, params, 2, NULL, &ema) == XD_OK);
    CHECK(average_load(ema, sources, 3, NULL, &match) == XD_ERROR_UNEXPECTED);
    CHECK_EQ_STR(match.names, "c");
    CHECK(average_load(ema, sources, 1, NULL, &match) == XD_ERROR_MISSING);
    CHECK_EQ_STR(match.names, "b");
    sources[0].count = 1; /* one element would spread over two if shapes were not compared */
    CHECK(average_load(ema, sources, 2, NULL, &match) == XD_ERROR_SHAPE);
    CHECK(average_load(ema, sources, 2, &(xd_ema_load_desc){ .lenient = true }, &match) == XD_ERROR_SHAPE);
    sources[0].count = 2;
    sources[0].shape = flat;
    sources[0].dims = 2;
    CHECK(average_load(ema, sources, 2, NULL, &match) == XD_ERROR_SHAPE);
    CHECK(memcmp(xd_ema_view(ema, 0).shadow.value, a, sizeof a) == 0 && ema_f32(ema, 1) == 3.0f);
    CHECK(!xd_ema_describe(ema).record.initialized);
    sources[0].shape = tall;
    CHECK(average_load(ema, sources, 1, &(xd_ema_load_desc){ .lenient = true }, &match) == XD_OK);
    CHECK(match.matched == 1 && match.missing_in_target == 1);
    CHECK(!xd_ema_describe(ema).record.initialized); /* b was not restored */
    CHECK(average_load(ema, sources, 2, NULL, NULL) == XD_OK);
    CHECK(ema_f32(ema, 1) == 8.0f && xd_ema_describe(ema).record.initialized);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_resumed_average_goes_on_to_the_same_bits) {
    enum { N = 50 };
    float value[N], kept[N];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    const xd_param param = scene_param("w", value, XD_DTYPE_F32, N);
    xd_ema *through = NULL, *first = NULL, *resumed = NULL;
    scene_fill(value, XD_DTYPE_F32, N, 1u);
    CHECK(average_create(ctx, &param, 1, NULL, &through) == XD_OK);
    CHECK(average_create(ctx, &param, 1, NULL, &first) == XD_OK);
    for (uint32_t t = 0; t < 6; t++) {
        scene_fill(value, XD_DTYPE_F32, N, 20u + t);
        if (t == 3) {
            CHECK(average_create(ctx, &param, 1, NULL, &resumed) == XD_OK);
            const xd_param saved = scene_param("w", kept, XD_DTYPE_F32, N);
            xd_ema_record record = xd_ema_describe(first).record;
            CHECK(xd_ema_copy_to(first, &saved, 1, false, NULL) == XD_OK);
            CHECK(average_load(resumed, &saved, 1, &(xd_ema_load_desc){ .record = &record }, NULL) == XD_OK);
            record.format_version = 2;
            CHECK(average_load(resumed, &saved, 1, &(xd_ema_load_desc){ .record = &record }, NULL) ==
                  XD_ERROR_FORMAT);
        }
        CHECK(xd_ema_update(through, XD_EMA_NEXT, NULL) == XD_OK);
        CHECK(xd_ema_update(resumed ? resumed : first, XD_EMA_NEXT, NULL) == XD_OK);
    }
    CHECK(memcmp(xd_ema_view(through, 0).shadow.value, xd_ema_view(resumed, 0).shadow.value, sizeof value) ==
          0);
    CHECK_EQ_INT(xd_ema_describe(resumed).record.iteration, 6);
    xd_ema_destroy(resumed);
    xd_ema_destroy(first);
    xd_ema_destroy(through);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_final_error_stays_below_the_dead_zone) {
    float value = 0.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, &param, 1, NULL, &ema) == XD_OK);
    CHECK(xd_ema_update(ema, 1, NULL) == XD_OK);
    value = 1.0f;
    for (int64_t i = 2; i <= 200000; i++) CHECK(xd_ema_update(ema, i, NULL) == XD_OK);
    CHECK_NEAR(ema_f32(ema, 0), 1.0, ldexp(1.0, -24) / (1.0 - 0.9999));
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(numbers_out_of_range_are_refused) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 0);
    xd_ema *ema = NULL;
    for (int k = 0; k < 8; k++) {
        xd_ema_desc desc = ema_desc(0.0);
        if (k == 0) desc.decay = 1.5;
        if (k == 1) desc.decay = (double)NAN;
        if (k == 2) desc.gamma = -1.5;
        if (k == 3) desc.schedule = XD_EMA_HALFLIFE, desc.halflife_kimg = 0.0;
        if (k == 4) desc.rampup_ratio = -0.1;
        if (k == 5) desc.batch_size = -1;
        if (k == 6) desc.start_iteration = -1;
        if (k == 7) desc.decay = -0.1;
        CHECK(average_create(ctx, NULL, 0, &desc, &ema) == XD_ERROR_ARGUMENT);
    }
    float value = 0.0f;
    xd_param param = scene_param(NULL, &value, XD_DTYPE_F32, 1);
    CHECK(average_create(ctx, &param, 1, NULL, &ema) == XD_ERROR_ARGUMENT);
    CHECK(ema == NULL);
    xd_ctx_destroy(ctx);
}

/* Serves the context, then nothing. */
static void *ema_allocate(void *user, size_t bytes) {
    int *left = (int *)user;
    return (*left)-- > 0 ? malloc(bytes) : NULL;
}

static void ema_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(no_room_for_the_shadows_is_an_error) {
    int left = 1;
    float value = 1.0f;
    xd_ctx_desc ctx_desc;
    memset(&ctx_desc, 0, sizeof ctx_desc);
    ctx_desc.allocator.allocate = ema_allocate;
    ctx_desc.allocator.release = ema_release;
    ctx_desc.allocator.user = &left;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&ctx_desc, &ctx) == XD_OK);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1);
    xd_ema *ema = NULL;
    CHECK(average_create(ctx, &param, 1, NULL, &ema) == XD_ERROR_MEMORY);
    CHECK(ema == NULL);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
