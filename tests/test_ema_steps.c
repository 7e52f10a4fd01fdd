/* Averages that a step of the optimizer updates in its own pass: the bits of calls of their own. */
#include "ema_scene.h"

enum { PARAMS = 7, N = 1700, AVERAGES = 12 };

static const xd_dtype dtypes[PARAMS] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F32,
                                         XD_DTYPE_F32, XD_DTYPE_F32,  XD_DTYPE_F32 };
static const int64_t counts[PARAMS] = { N, 1033, 31, 0, 700, 256, N };

/* One of two models: steps update the averages of one, calls those of the other. */
typedef struct model {
    float value[PARAMS][N], gradient[N];
    xd_param params[PARAMS], other[PARAMS];
    xd_tensor_part parts[PARAMS];
    xd_region regions[PARAMS];
    xd_optimizer *optimizer;
    xd_ema *averages[AVERAGES];
} model;

/* Two columns of [count / 2, 5]: runs of two elements; of the others, what is here is the whole. */
static void fill_part(model *m, int i) {
    xd_tensor_part *p = &m->parts[i];
    xd_region *region = &m->regions[i];
    const bool columns = i == 5;
    memset(p, 0, sizeof *p);
    memset(region, 0, sizeof *region);
    p->name = m->params[i].name;
    p->dtype = m->params[i].dtype;
    p->data = m->params[i].value;
    p->ndim = region->ndim = 2;
    p->shape[0] = columns ? counts[i] / 2 : 1;
    p->shape[1] = columns ? 5 : counts[i];
    region->count[0] = 1;
    region->count[1] = counts[i] > 0;
    region->interval[0][0].end = p->shape[0];
    region->interval[1][0].begin = columns ? 3 : 0;
    region->interval[1][0].end = p->shape[1];
    p->region = region;
    p->range.end = counts[i];
}

/* A desc of every format, with decays on both sides of a half. */
static xd_ema_desc format(const model *m, int i) {
    xd_ema_desc d = scene_decay(i % 3 == 1 ? 0.3 : 0.99);
    switch (i % 6) {
    case 1: d.compensated = true; break;
    case 2:
        d.stochastic_bf16 = true;
        d.seed = (uint64_t)i;
        if (i > 6) d.parts = m->parts;
        break;
    case 3: d.live_dtype = true; break;
    case 4: d.compat_credit = true; break;
    case 5: d.dtype = XD_DTYPE_F64; break;
    default: break;
    }
    d.init_from_current = i != 6; /* begins with a copy: it joins from the second step on */
    return d;
}

/* A frozen parameter, a buffer, a second name, an empty one. */
static void open_model(xd_ctx *ctx, model *m, bool stochastic) {
    static const char *const names[PARAMS] = { "a", "b", "c", "d", "e", "f", "g" };
    memset(m, 0, sizeof *m);
    for (int i = 0; i < PARAMS; i++) {
        m->params[i] = scene_param(names[i], counts[i] ? m->value[i] : NULL, dtypes[i], counts[i]);
        m->params[i].gradient = counts[i] ? m->gradient : NULL;
        m->params[i].first = 11 * i;
        scene_fill(m->value[i], dtypes[i], counts[i], (uint32_t)i);
        fill_part(m, i);
    }
    m->params[4].frozen = true;
    m->params[6].value = m->params[0].value;
    m->params[6].frozen = true; /* the first name's parameter is tied */
    memcpy(m->other, m->params, sizeof m->other);
    xd_optimizer_desc d = xd_adamw_defaults(m->params, PARAMS);
    d.stochastic_bf16 = stochastic;
    d.seed = 7;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &m->optimizer), XD_OK);
    for (int i = 0; i < AVERAGES; i++) {
        const xd_ema_desc desc = format(m, i);
        m->averages[i] = scene_ema(ctx, i == 10 ? m->other : m->params, PARAMS, desc);
    }
}

static void close_model(model *m) {
    for (int i = 0; i < AVERAGES; i++) xd_ema_destroy(m->averages[i]);
    xd_optimizer_destroy(m->optimizer);
}

static bool same(xd_param a, xd_param b) {
    return a.dtype == b.dtype && a.count == b.count &&
           (!a.value || memcmp(a.value, b.value, (size_t)a.count * xd_dtype_size(a.dtype)) == 0);
}

static void check_models(const model *a, const model *b) {
    CHECK(memcmp(a->value, b->value, sizeof a->value) == 0);
    for (int i = 0; i < AVERAGES; i++) {
        const int64_t count = xd_ema_describe(a->averages[i]).count;
        for (int64_t k = 0; k < count; k++) {
            CHECK(same(xd_ema_view(a->averages[i], k).shadow, xd_ema_view(b->averages[i], k).shadow));
            CHECK(same(xd_ema_view(a->averages[i], k).compensation,
                       xd_ema_view(b->averages[i], k).compensation));
        }
        CHECK_EQ_INT(xd_ema_describe(a->averages[i]).record.iteration,
                     xd_ema_describe(b->averages[i]).record.iteration);
    }
}

static void step_models(model *together, model *apart, uint32_t t, const xd_status *status) {
    const xd_optimizer_step_desc all = { .averages = together->averages,
                                         .average_count = AVERAGES,
                                         .status = status },
                                 none = { .status = status };
    scene_fill(together->gradient, XD_DTYPE_F32, N, 70 + t);
    memcpy(apart->gradient, together->gradient, sizeof apart->gradient);
    CHECK_EQ_INT(xd_optimizer_step(together->optimizer, &all, NULL), XD_OK);
    CHECK_EQ_INT(xd_optimizer_step(apart->optimizer, &none, NULL), XD_OK);
    for (int i = 0; i < AVERAGES; i++)
        CHECK_EQ_INT(xd_ema_update(apart->averages[i], XD_EMA_NEXT, status), XD_OK);
    check_models(together, apart);
}

XD_TEST(a_step_updates_twelve_averages_of_every_format_as_calls_of_their_own_do) {
    static model together, apart;
    const xd_status bad = { .not_finite = 1 };
    for (int level = XD_CPU_PLAIN; level <= (int)xd_cpu_best(); level++)
        for (int stochastic = 0; stochastic < 2 && xd_cpu_supports((xd_cpu_level)level); stochastic++) {
            xd_ctx *ctx = scene_ctx((xd_cpu_level)level, 1 + level % 3);
            open_model(ctx, &together, stochastic != 0);
            open_model(ctx, &apart, stochastic != 0);
            for (uint32_t t = 0; t < 4; t++) step_models(&together, &apart, t, t == 2 ? &bad : NULL);
            close_model(&together);
            close_model(&apart);
            xd_ctx_destroy(ctx);
        }
}

/* ---- the entry ---- */

static void check_entry(bool sgd, xd_dtype dtype) {
    static float master[2][N], first[2][N], second[2][N], shadow[2][N], gradient[N];
    static uint16_t value[2][N], term[2][N], random[2][N];
    xd_ctx *ctx = scene_ctx(XD_CPU_PLAIN, 1);
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(ctx)->optimizer;
    const xd_launch launch = { .ctx = ctx };
    CHECK(kernels->averages_in_steps);
    for (int k = 0; k < 2; k++) {
        const xd_average_array arrays[2] = { { .target = shadow[k],
                                               .compensation = term[k],
                                               .source = dtype == XD_DTYPE_F32 ? (void *)master[k] : value[k],
                                               .count = N,
                                               .target_dtype = XD_DTYPE_F32,
                                               .source_dtype = dtype },
                                             { .target = random[k],
                                               .source = dtype == XD_DTYPE_F32 ? (void *)master[k] : value[k],
                                               .count = N,
                                               .origin = 5,
                                               .key = 77,
                                               .target_dtype = XD_DTYPE_BF16,
                                               .source_dtype = dtype,
                                               .random = true } };
        const xd_average_args averages[2] = {
            { .arrays = &arrays[0], .array_count = 1, .keep = 0.9 },
            { .arrays = &arrays[1], .array_count = 1, .keep = 0.2, .seed = 3, .iteration = 9 }
        };
        const xd_update_array update = { .master = master[k],
                                         .first = first[k],
                                         .second = second[k],
                                         .value = dtype == XD_DTYPE_F32 ? NULL : value[k],
                                         .value_dtype = dtype,
                                         .gradient = gradient,
                                         .gradient_dtype = XD_DTYPE_F32,
                                         .count = N,
                                         .decay = 1.0f,
                                         .step_size = 0.25f,
                                         .root_correction = 1.0f,
                                         .fresh = true };
        const xd_update_args args = { .arrays = &update,
                                      .array_count = 1,
                                      .one_minus_beta1 = 0.5f,
                                      .one_minus_beta2 = 0.5f,
                                      .beta2 = 0.5f,
                                      .eps = 1.0f,
                                      .averages = averages,
                                      .average_count = k == 0 ? 2 : 0 };
        scene_fill(master[k], XD_DTYPE_F32, N, 1);
        scene_fill(gradient, XD_DTYPE_F32, N, 2);
        scene_fill(shadow[k], XD_DTYPE_F32, N, 3);
        scene_fill(random[k], XD_DTYPE_BF16, N, 4);
        CHECK_EQ_INT((sgd ? kernels->sgd : kernels->adam)(&launch, &args), XD_OK);
        for (int i = 0; i < 2 && k == 1; i++) CHECK_EQ_INT(kernels->average(&launch, &averages[i]), XD_OK);
    }
    CHECK(memcmp(shadow[0], shadow[1], sizeof shadow[0]) == 0);
    CHECK(memcmp(term[0], term[1], sizeof term[0]) == 0);
    CHECK(memcmp(random[0], random[1], sizeof random[0]) == 0);
    CHECK(memcmp(master[0], master[1], sizeof master[0]) == 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_entry_of_a_step_averages_the_parameters_that_it_has_written) {
    check_entry(false, XD_DTYPE_F32);
    check_entry(false, XD_DTYPE_BF16);
    check_entry(true, XD_DTYPE_F16);
}

XD_TEST(the_entry_of_a_step_refuses_a_format_that_no_average_has) {
    float master[4] = { 1.0f }, first[4] = { 0.0f }, second[4] = { 0.0f }, gradient[4] = { 1.0f };
    int32_t shadow[4] = { 0 };
    xd_ctx *ctx = scene_ctx(XD_CPU_PLAIN, 1);
    const xd_launch launch = { .ctx = ctx };
    const xd_average_array array = { .target = shadow,
                                     .source = master,
                                     .count = 4,
                                     .target_dtype = XD_DTYPE_I32,
                                     .source_dtype = XD_DTYPE_F32 };
    const xd_average_args average = { .arrays = &array, .array_count = 1, .keep = 0.5 };
    const xd_update_array update = { .master = master,
                                     .first = first,
                                     .second = second,
                                     .gradient = gradient,
                                     .gradient_dtype = XD_DTYPE_F32,
                                     .count = 4 };
    const xd_update_args args = {
        .arrays = &update, .array_count = 1, .averages = &average, .average_count = 1
    };
    CHECK_EQ_INT(xd_ctx_kernels(ctx)->optimizer.adam(&launch, &args), XD_ERROR_DTYPE);
    CHECK(scene_says(ctx, "array 0: cannot average F32 into I32"));
    CHECK(master[0] == 1.0f);
    xd_ctx_destroy(ctx);
}

/* ---- lists of other lengths ---- */

/* The optimizer has `stepped` entries of the list, the average `averaged`. */
static void check_lengths(int64_t stepped, int64_t averaged, bool random) {
    static float value[2][3][N], gradient[N];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param params[2][3];
    xd_ema *ema[2][2];
    xd_optimizer *optimizer[2];
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 3; i++) {
            params[k][i] = scene_param(i == 0 ? "a" : i == 1 ? "b" : "c", value[k][i], XD_DTYPE_F32, N);
            params[k][i].gradient = gradient;
            scene_fill(value[k][i], XD_DTYPE_F32, N, (uint32_t)i);
        }
        const xd_optimizer_desc d = xd_adamw_defaults(params[k], stepped);
        CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer[k]), XD_OK);
        xd_ema_desc desc = scene_decay(0.9);
        ema[k][0] = scene_ema(ctx, params[k], averaged, desc);
        desc.stochastic_bf16 = random;
        ema[k][1] = scene_ema(ctx, params[k], averaged, desc);
        scene_fill(value[k][2], XD_DTYPE_F32, N, 100); /* no step changes it, but its owner does */
    }
    for (int round = 0; round < 6; round++) {
        const xd_optimizer_step_desc with = { .averages = ema[0], .average_count = round / 3 ? 1 : 2 };
        scene_fill(gradient, XD_DTYPE_F32, N, 9 + (uint32_t)round);
        for (int k = 0; k < 2; k++) params[k][0].gradient = round == 4 ? NULL : gradient; /* not stepped */
        CHECK_EQ_INT(xd_optimizer_step(optimizer[0], &with, NULL), XD_OK);
        CHECK_EQ_INT(xd_optimizer_step(optimizer[1], NULL, NULL), XD_OK);
        for (int j = 0; j < with.average_count; j++) {
            CHECK_EQ_INT(xd_ema_update(ema[1][j], XD_EMA_NEXT, NULL), XD_OK);
            for (int64_t i = 0; i < averaged; i++)
                CHECK(same(xd_ema_view(ema[0][j], i).shadow, xd_ema_view(ema[1][j], i).shadow));
        }
    }
    params[0][0].count--;
    const xd_optimizer_step_desc with = { .averages = ema[0], .average_count = 1 };
    CHECK_EQ_INT(xd_optimizer_step(optimizer[0], &with, NULL), XD_ERROR_STATE);
    for (int k = 0; k < 2; k++) {
        xd_ema_destroy(ema[k][0]);
        xd_ema_destroy(ema[k][1]);
        xd_optimizer_destroy(optimizer[k]);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(averages_over_more_or_fewer_entries_than_are_stepped_have_the_bits_of_calls_of_their_own) {
    for (int64_t stepped = 1; stepped <= 3; stepped++)
        for (int64_t averaged = 1; averaged <= 3; averaged++) {
            check_lengths(stepped, averaged, false);
            check_lengths(stepped, averaged, true);
        }
}

XD_TEST_MAIN()
