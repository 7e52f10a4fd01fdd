/* What other averages do wrong, a test for each: it fails where their way comes back (tests/mutants does that). */
#include "ema_scene.h"

enum { N = 4099 };

static const xd_dtype narrow[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };

/* ---- arithmetic ---- */

/* 1 - 0.9999 is 0x1.a36e2ep-14 in f32; of a decay rounded first it is 1.00016594e-4, a sixth of a per mille more. A shadow of 0
 * that moves towards 1 shows the weight itself: by a call of its own, by a step of the optimizer, on every CPU level, from
 * every dtype and at every place in an array. */
static void check_weight(xd_cpu_level level, xd_dtype dtype, bool joined) {
    static float live[N], gradient[N];
    const float right = ldexpf(0x1a36e2e, -38), wrong = 1.0f - (float)0.9999;
    xd_ctx *ctx = scene_ctx(level, 1);
    xd_optimizer *optimizer = NULL;
    xd_param param = scene_param("w", live, dtype, N);
    param.gradient = gradient;
    xd_optimizer_desc desc = {
        .params = &param, .param_count = 1, .kind = XD_OPTIMIZER_SGD, .learning_rate = 1e-3
    };
    CHECK(right != wrong && wrong > 1.0001e-4f);
    memset(live, 0, sizeof live);
    memset(gradient, 0, sizeof gradient);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &desc, &optimizer), XD_OK);
    xd_ema *ema = scene_ema(ctx, &param, 1, scene_decay(0.9999));
    for (int i = 0; i < N; i++) {
        xd_store_f64(live, dtype, i, 1.0);
        if (xd_optimizer_state_at(optimizer, 0).master) xd_optimizer_state_at(optimizer, 0).master[i] = 1.0f;
    }
    const xd_optimizer_step_desc with = { .averages = &ema, .average_count = 1 };
    CHECK_EQ_INT(joined ? xd_optimizer_step(optimizer, &with, NULL) : xd_ema_update(ema, XD_EMA_NEXT, NULL),
                 XD_OK);
    const float *shadow = (const float *)xd_ema_view(ema, 0).shadow.value;
    long other = 0;
    for (int i = 0; i < N; i++) other += shadow[i] != right;
    CHECK_EQ_INT(other, 0);
    xd_ema_destroy(ema);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST(trap_the_weight_is_one_minus_the_decay_in_double_not_of_a_decay_rounded_first) {
    for (int level = XD_CPU_PLAIN; level <= (int)xd_cpu_best(); level++)
        for (int k = 0; k < 6 && xd_cpu_supports((xd_cpu_level)level); k++)
            check_weight((xd_cpu_level)level, narrow[k % 3], k >= 3);
}

static void check_fused(xd_cpu_level level) {
    static const double decays[] = { 0.9999, 0.9, 0.3 };
    static float live[N], before[N];
    for (int k = 0; k < 3; k++) {
        const float w = (float)(1.0 - decays[k]);
        xd_ctx *ctx = scene_ctx(level, 1);
        const xd_param param = scene_param("w", live, XD_DTYPE_F32, N);
        scene_fill(live, XD_DTYPE_F32, N, 4);
        memcpy(before, live, sizeof before);
        xd_ema *ema = scene_ema(ctx, &param, 1, scene_decay(decays[k]));
        scene_fill(live, XD_DTYPE_F32, N, 5);
        CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
        long other = 0, twice = 0;
        for (int i = 0; i < N; i++) {
            const float d = live[i] - before[i], a = w < 0.5f ? w : w - 1.0f,
                        base = w < 0.5f ? before[i] : live[i];
            volatile float product = a * d;
            const float once = fmaf(a, d, base), got = ((const float *)xd_ema_view(ema, 0).shadow.value)[i];
            other += got != once;
            twice += product + base != once;
        }
        CHECK_EQ_INT(other, 0);
        CHECK(twice > 0); /* it would be seen */
        xd_ema_destroy(ema);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(trap_product_and_sum_are_rounded_once_not_twice) {
    for (int level = XD_CPU_PLAIN; level <= (int)xd_cpu_best(); level++)
        if (xd_cpu_supports((xd_cpu_level)level)) check_fused((xd_cpu_level)level);
}

/* ---- buffers ---- */

XD_TEST(trap_buffers_are_copied_also_those_of_floats_not_averaged) {
    float value = 1.0f, running = 1.0f;
    int64_t counter = 1;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    for (int form = 0; form < 4; form++) {
        int64_t unmoved = 0;
        xd_param params[3];
        params[0] = scene_param("w", &value, XD_DTYPE_F32, 1);
        params[1] = scene_param("running_mean", &running, XD_DTYPE_F32, 1);
        params[2] = scene_param("counter", &counter, XD_DTYPE_I64, 1);
        params[1].buffer = params[2].buffer = true;
        value = running = 1.0f;
        counter = 1;
        xd_ema_desc desc = scene_decay(0.5);
        desc.compensated = form == 1;
        desc.stochastic_bf16 = form == 2;
        xd_ema *ema = scene_ema(ctx, params, 3, desc);
        if (form == 3) xd_ema_count_unmoved(ema, &unmoved);
        value = running = 3.0f;
        counter = 3;
        CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
        CHECK(xd_load_f64(xd_ema_view(ema, 0).shadow.value, xd_ema_view(ema, 0).shadow.dtype, 0) == 2.0);
        CHECK(*(const float *)xd_ema_view(ema, 1).shadow.value == 3.0f);
        CHECK(*(const int64_t *)xd_ema_view(ema, 2).shadow.value == 3);
        xd_ema_destroy(ema);
    }
    xd_ctx_destroy(ctx);
}

/* ---- names ---- */

XD_TEST(trap_a_target_of_which_no_name_matches_is_an_error_not_silence) {
    float value = 1.0f, target = 0.0f;
    xd_ema_match match;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("layer.w", &value, XD_DTYPE_F32, 1),
                   other = scene_param("wrapped.layer.w", &target, XD_DTYPE_F32, 1);
    xd_ema *ema = scene_ema(ctx, &param, 1, scene_decay(0.5));
    CHECK_EQ_INT(xd_ema_copy_to(ema, &other, 1, false, &match), XD_ERROR_UNEXPECTED);
    CHECK(match.matched == 0 && match.missing_in_shadow == 1 && match.missing_in_target == 1);
    CHECK(scene_says(ctx, "wrapped.layer.w"));
    CHECK(target == 0.0f);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(trap_names_of_buffers_lose_all_wrappers_too) {
    float value = 1.0f, running = 2.0f, targets[2] = { 0.0f, 0.0f };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param params[2], plain[2];
    params[0] = scene_param("module._fsdp_wrapped_module.layer.w", &value, XD_DTYPE_F32, 1);
    params[1] = scene_param("_orig_mod.layer._checkpoint_wrapped_module.mean", &running, XD_DTYPE_F32, 1);
    plain[0] = scene_param("layer.w", &targets[0], XD_DTYPE_F32, 1);
    plain[1] = scene_param("layer.mean", &targets[1], XD_DTYPE_F32, 1);
    params[1].buffer = plain[1].buffer = true;
    xd_ema *ema = scene_ema(ctx, params, 2, scene_decay(0.5));
    CHECK_EQ_INT(xd_ema_copy_to(ema, plain, 2, false, NULL), XD_OK);
    CHECK(targets[0] == 1.0f && targets[1] == 2.0f);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

/* ---- loads and copies ---- */

/* Otherwise the next update would average with the weights of creation. */
XD_TEST(trap_an_empty_map_does_not_initialize_the_average) {
    float value[2] = { 1.0f, 2.0f }, saved = 9.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param params[2];
    xd_ema_desc desc = scene_decay(0.5);
    desc.init_from_current = false;
    params[0] = scene_param("a", &value[0], XD_DTYPE_F32, 1);
    params[1] = scene_param("b", &value[1], XD_DTYPE_F32, 1);
    const xd_param one = scene_param("a", &saved, XD_DTYPE_F32, 1);
    const xd_ema_load_desc lenient = { .lenient = true };
    xd_ema *ema = scene_ema(ctx, params, 2, desc);
    CHECK_EQ_INT(average_load(ema, NULL, 0, NULL, NULL), XD_ERROR_MISSING);
    CHECK(!xd_ema_describe(ema).record.initialized);
    CHECK_EQ_INT(average_load(ema, NULL, 0, &lenient, NULL), XD_OK);
    CHECK(!xd_ema_describe(ema).record.initialized);
    CHECK_EQ_INT(average_load(ema, &one, 1, &lenient, NULL), XD_OK);
    CHECK(!xd_ema_describe(ema).record.initialized); /* nor does a part */
    value[0] = 5.0f;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    CHECK(*(const float *)xd_ema_view(ema, 0).shadow.value == 5.0f); /* copied, not averaged with 9 or 1 */
    CHECK(*(const float *)xd_ema_view(ema, 1).shadow.value == 2.0f);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

/* Shapes that others spread over a shadow of [2, 3], or fold into it; in both directions, strict or not. */
XD_TEST(trap_a_shape_that_could_be_broadcast_is_refused_and_nothing_is_written) {
    static const struct {
        int dims;
        int64_t shape[3], count;
    } other[] = { { 0, { 0 }, 1 },       { 1, { 1 }, 1 },    { 1, { 3 }, 3 },
                  { 2, { 1, 3 }, 3 },    { 2, { 2, 1 }, 2 }, { 2, { 1, 1 }, 1 },
                  { 3, { 1, 2, 3 }, 6 }, { 2, { 3, 2 }, 6 }, { 1, { 6 }, 6 } };
    static const int64_t shape[2] = { 2, 3 };
    float value[6] = { 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param param = scene_param("w", value, XD_DTYPE_F32, 6);
    param.shape = shape;
    param.dims = 2;
    xd_ema *ema = scene_ema(ctx, &param, 1, scene_decay(0.5));
    for (int k = 0; k < 9; k++) {
        float list[6] = { 7.0f, 7.0f, 7.0f, 7.0f, 7.0f, 7.0f };
        xd_ema_match match;
        xd_param p = scene_param("w", list, XD_DTYPE_F32, other[k].count);
        p.shape = other[k].shape;
        p.dims = other[k].dims;
        for (int lenient = 0; lenient < 2; lenient++) {
            const xd_ema_load_desc how = { .lenient = lenient != 0 };
            CHECK_EQ_INT(average_load(ema, &p, 1, &how, &match), XD_ERROR_SHAPE);
            CHECK(match.wrong_shape == 1 && match.matched == 0);
            CHECK_EQ_STR(match.names, "w");
            CHECK_EQ_INT(xd_ema_copy_to(ema, &p, 1, lenient != 0, &match), XD_ERROR_SHAPE);
        }
        for (int i = 0; i < 6; i++)
            CHECK(list[i] == 7.0f && ((const float *)xd_ema_view(ema, 0).shadow.value)[i] == 1.0f);
    }
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(trap_what_was_copied_out_does_not_change_with_the_next_update) {
    float value = 1.0f, saved = 0.0f;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("w", &value, XD_DTYPE_F32, 1),
                   out = scene_param("w", &saved, XD_DTYPE_F32, 1);
    xd_ema *ema = scene_ema(ctx, &param, 1, scene_decay(0.5));
    CHECK_EQ_INT(xd_ema_copy_to(ema, &out, 1, false, NULL), XD_OK);
    value = 3.0f;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    CHECK(saved == 1.0f && *(const float *)xd_ema_view(ema, 0).shadow.value == 2.0f);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

/* ---- shards ---- */

/* [8, 3] and [8] over eight ranks, a row each, and one rank more that has nothing: a shard of length 1 along the sharded dimension
 * is what a whole tensor would be spread over. */
XD_TEST(trap_a_shard_of_one_row_is_neither_spread_nor_mixed_with_the_whole) {
    enum { ROWS = 8, COLUMNS = 3, RANKS = ROWS + 1 };
    float matrix[ROWS * COLUMNS], vector[ROWS];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param whole[2];
    whole[0] = scene_param("matrix", matrix, XD_DTYPE_F32, ROWS * COLUMNS);
    whole[1] = scene_param("vector", vector, XD_DTYPE_F32, ROWS);
    for (int r = 0; r < RANKS; r++) {
        static const int64_t row[2] = { 1, COLUMNS }, none[2] = { 0, COLUMNS }, all[2] = { ROWS, COLUMNS };
        const bool empty = r == ROWS;
        float kept[ROWS * COLUMNS];
        xd_param shard[2];
        scene_fill(matrix, XD_DTYPE_F32, ROWS * COLUMNS, 1);
        scene_fill(vector, XD_DTYPE_F32, ROWS, 2);
        shard[0] =
            scene_param("matrix", empty ? NULL : matrix + r * COLUMNS, XD_DTYPE_F32, empty ? 0 : COLUMNS);
        shard[1] = scene_param("vector", empty ? NULL : vector + r, XD_DTYPE_F32, !empty);
        shard[0].shape = empty ? none : row;
        whole[0].shape = all;
        shard[0].dims = whole[0].dims = 2;
        xd_ema_desc desc = scene_decay(0.5);
        desc.init_from_current = false; /* the first update is a copy: shards alone, too */
        xd_ema *one = scene_ema(ctx, whole, 2, desc), *part = scene_ema(ctx, shard, 2, desc);
        for (uint32_t t = 0; t < 3; t++) {
            scene_fill(matrix, XD_DTYPE_F32, ROWS * COLUMNS, 10 + t);
            scene_fill(vector, XD_DTYPE_F32, ROWS, 20 + t);
            CHECK_EQ_INT(xd_ema_update(one, XD_EMA_NEXT, NULL), XD_OK);
            CHECK_EQ_INT(xd_ema_update(part, XD_EMA_NEXT, NULL), XD_OK);
            for (int i = 0; i < 2; i++) {
                const xd_param mine = xd_ema_view(part, i).shadow, theirs = xd_ema_view(one, i).shadow;
                CHECK_EQ_INT(mine.count, shard[i].count);
                CHECK(memcmp(mine.value ? mine.value : kept,
                             empty ? (void *)kept : (float *)theirs.value + (i ? r : r * COLUMNS),
                             (size_t)mine.count * sizeof(float)) == 0);
            }
        }
        CHECK_EQ_INT(average_load(part, whole, 2, NULL, NULL), XD_ERROR_SHAPE);
        CHECK_EQ_INT(xd_ema_copy_to(part, whole, 2, true, NULL), XD_ERROR_SHAPE);
        CHECK_EQ_INT(xd_ema_copy_to(one, shard, 2, true, NULL), XD_ERROR_SHAPE);
        xd_ema_destroy(part);
        xd_ema_destroy(one);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
