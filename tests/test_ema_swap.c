/* An average in the place of the weights, to evaluate it, and back. */
#include "ema_scene.h"

enum { ENTRIES = 9, MOST = 1000 };

/* A list of everything there is: dtypes, a frozen one, a tied one, buffers, an empty shard. */
typedef struct model {
    xd_param params[ENTRIES];
    unsigned char values[ENTRIES][MOST * 8];
} model;

static size_t bytes_of(const xd_param *p) {
    return (size_t)p->count * xd_dtype_size(p->dtype);
}

static model *new_model(void) {
    static const char *const names[ENTRIES] = { "w",     "frozen",  "half", "brain", "double",
                                                "empty", "counter", "mask", "tied" };
    static const xd_dtype dtypes[ENTRIES] = { XD_DTYPE_F32,  XD_DTYPE_F32, XD_DTYPE_F16,
                                              XD_DTYPE_BF16, XD_DTYPE_F64, XD_DTYPE_F32,
                                              XD_DTYPE_I64,  XD_DTYPE_U8,  XD_DTYPE_F32 };
    static const int64_t counts[ENTRIES] = { MOST, 7, 65, 999, 3, 0, 1, 5, MOST };
    model *m = (model *)calloc(1, sizeof *m);
    for (int i = 0; i < ENTRIES; i++)
        m->params[i] = scene_param(names[i], i == 5 ? NULL : m->values[i == 8 ? 0 : i], dtypes[i], counts[i]);
    m->params[1].frozen = true;
    m->params[6].buffer = m->params[7].buffer = true;
    return m;
}

static void set_weights(model *m, uint32_t seed) {
    for (int i = 0; i < ENTRIES - 1; i++)
        if (m->params[i].buffer)
            memset(m->values[i], (int)(seed % 200), bytes_of(&m->params[i]));
        else if (!m->params[i].frozen)
            scene_fill(m->values[i], m->params[i].dtype, m->params[i].count, seed + (uint32_t)i);
}

static xd_ema_desc own_dtypes(void) {
    xd_ema_desc d = scene_decay(0.7);
    d.live_dtype = true;
    return d;
}

/* The shadows as they are, one after the other. */
static void keep_shadows(const xd_ema *ema, unsigned char (*to)[MOST * 8]) {
    for (int64_t i = 0; i < xd_ema_describe(ema).count; i++) {
        const xd_param view = xd_ema_view(ema, i).shadow;
        memcpy(to[i], view.value ? view.value : "", bytes_of(&view));
    }
}

static void check_exchange(int threads, bool averaged) {
    static unsigned char weights[ENTRIES][MOST * 8], shadows[ENTRIES][MOST * 8];
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, threads);
    model *m = new_model();
    set_weights(m, 1);
    xd_ema *ema = scene_ema(ctx, m->params, ENTRIES, own_dtypes());
    CHECK_EQ_INT(xd_ema_describe(ema).count, ENTRIES - 1); /* the tied one has no shadow of its own */
    set_weights(m, 2);
    if (averaged) CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    set_weights(m, 3);
    memcpy(weights, m->values, sizeof weights);
    memset(shadows, 0, sizeof shadows);
    keep_shadows(ema, shadows);
    for (int turn = 0; turn < 4; turn++) {
        CHECK(xd_ema_describe(ema).swapped == (turn % 2 == 1));
        CHECK_EQ_INT(xd_ema_swap(ema), XD_OK);
        for (int i = 0; i < ENTRIES - 1; i++) {
            const size_t bytes = bytes_of(&m->params[i]);
            const xd_param view = xd_ema_view(ema, i).shadow;
            CHECK(memcmp(m->values[i], turn % 2 ? weights[i] : shadows[i], bytes) == 0);
            CHECK(bytes == 0 || memcmp(view.value, turn % 2 ? shadows[i] : weights[i], bytes) == 0);
        }
    }
    xd_ema_destroy(ema);
    free(m);
    xd_ctx_destroy(ctx);
}

XD_TEST(an_exchange_puts_the_average_into_the_weights_and_a_second_one_brings_every_bit_back) {
    check_exchange(1, true);
    check_exchange(4, true);
    check_exchange(1, false); /* before any update: the weights of creation */
}

XD_TEST(an_average_that_was_exchanged_goes_on_to_the_bits_of_one_that_was_not) {
    static unsigned char expected[ENTRIES][MOST * 8], got[ENTRIES][MOST * 8];
    for (int k = 0; k < 2; k++) {
        xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
        model *m = new_model();
        set_weights(m, 1);
        xd_ema *ema = scene_ema(ctx, m->params, ENTRIES, own_dtypes());
        for (uint32_t t = 2; t < 8; t++) {
            set_weights(m, t);
            CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
            for (int turn = 0; turn < 2 * k; turn++) CHECK_EQ_INT(xd_ema_swap(ema), XD_OK);
        }
        CHECK_EQ_INT(xd_ema_describe(ema).record.iteration, 6);
        keep_shadows(ema, k ? got : expected);
        xd_ema_destroy(ema);
        free(m);
        xd_ctx_destroy(ctx);
    }
    CHECK(memcmp(expected, got, sizeof got) == 0);
}

static xd_result no_take(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    (void)tensor, (void)elements, (void)data;
    ++*(int *)user;
    return XD_OK;
}

/* An export of the one average, which must not begin. */
static xd_result export_it(xd_ctx *ctx, xd_ema *ema, const xd_param *p, int *taken) {
    xd_comm *comm = NULL;
    xd_ema_record record;
    xd_tensor_part part = { .name = p->name, .dtype = p->dtype, .ndim = 1, .data = p->value };
    part.shape[0] = part.range.end = p->count;
    const xd_checkpoint_average average = { .name = "slow", .ema = ema };
    const xd_checkpoint_network network = {
        .parts = &part, .part_count = 1, .averages = &average, .average_count = 1
    };
    const xd_state_gather_desc gather = { .networks = &network,
                                          .network_count = 1,
                                          .average = true,
                                          .record = &record,
                                          .take = no_take,
                                          .user = taken };
    CHECK_EQ_INT(xd_comm_self(ctx, &comm), XD_OK);
    const xd_result result = xd_state_gather(comm, &gather);
    xd_comm_destroy(comm);
    return result;
}

XD_TEST(while_exchanged_nothing_updates_steps_publishes_loads_or_saves) {
    static const char words[] = "the average is exchanged with the values of its 1 parameters";
    float value[3] = { 1.0f, 2.0f, 3.0f }, gradient[3] = { 1.0f, 1.0f, 1.0f },
          other[3] = { 0.0f, 0.0f, 0.0f };
    int taken = 0;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param param = scene_param("w", value, XD_DTYPE_F32, 3);
    const xd_param list = scene_param("w", other, XD_DTYPE_F32, 3);
    param.gradient = gradient;
    xd_ema *ema = scene_ema(ctx, &param, 1, scene_decay(0.5));
    const xd_optimizer_desc desc = xd_adamw_defaults(&param, 1);
    const xd_optimizer_step_desc with = { .averages = &ema, .average_count = 1 };
    xd_optimizer *optimizer = NULL;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &desc, &optimizer), XD_OK);
    value[0] = 5.0f;
    CHECK_EQ_INT(export_it(ctx, ema, &param, &taken), XD_OK);
    CHECK_EQ_INT(taken, 1);
    CHECK_EQ_INT(xd_ema_swap(ema), XD_OK);
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_ERROR_STATE);
    CHECK(scene_says(ctx, words));
    CHECK_EQ_INT(xd_optimizer_step(optimizer, &with, NULL), XD_ERROR_STATE);
    CHECK(scene_says(ctx, words));
    CHECK_EQ_INT(xd_ema_copy_to(ema, &list, 1, false, NULL), XD_ERROR_STATE);
    CHECK(scene_says(ctx, words));
    CHECK_EQ_INT(average_load(ema, &list, 1, NULL, NULL), XD_ERROR_STATE);
    CHECK(scene_says(ctx, words));
    CHECK_EQ_INT(export_it(ctx, ema, &param, &taken), XD_ERROR_STATE);
    CHECK(scene_says(ctx, words));
    CHECK_EQ_INT(taken, 1);
    CHECK(value[0] == 1.0f && other[0] == 0.0f && xd_ema_describe(ema).record.iteration == 0);
    CHECK_EQ_INT(*xd_optimizer_state_at(optimizer, 0).step, 0);
    CHECK_EQ_INT(xd_ema_swap(ema), XD_OK);
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    CHECK(value[0] == 5.0f && ((const float *)xd_ema_view(ema, 0).shadow.value)[0] == 3.0f);
    xd_optimizer_destroy(optimizer);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST(shadows_of_another_dtype_are_not_exchanged_and_neither_are_the_others) {
    float first = 1.0f;
    uint16_t second = xd_bf16_from_f32(2.0f);
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_param params[2];
    params[0] = scene_param("first", &first, XD_DTYPE_F32, 1);
    params[1] = scene_param("second", &second, XD_DTYPE_BF16, 1);
    xd_ema *ema = scene_ema(ctx, params, 2, scene_decay(0.5));
    first = 9.0f;
    CHECK_EQ_INT(xd_ema_swap(ema), XD_ERROR_DTYPE);
    CHECK(scene_says(ctx, "second: a shadow of f32 and values of bf16") ||
          scene_says(ctx, "second: a shadow of F32 and values of BF16"));
    CHECK(first == 9.0f && !xd_ema_describe(ema).swapped);
    params[1].count = 0; /* the list changed */
    CHECK_EQ_INT(xd_ema_swap(ema), XD_ERROR_STATE);
    CHECK(scene_says(ctx, "second"));
    params[1].count = 1;
    CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
    xd_ema_destroy(ema);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
