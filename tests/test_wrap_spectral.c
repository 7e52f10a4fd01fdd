/* Blocks with spectral norm: their vectors have the type in which their weights are shown. */
#define XDISTILL_IMPLEMENTATION
#if defined(XD_TEST_LAYERS)
#    include "model/describe_internal.h"
#endif
#include "xdistill.h"
#include "wrap_calls.h"

#include "wrap_weights.h"

enum { ROWS = 5, COLUMNS = 3 };

static void add_vector(xd_block *block, const char *name, int64_t count, void *value) {
    const xd_weight_desc d = { .name = name,
                               .dtype = XD_DTYPE_F32,
                               .ndim = 1,
                               .shape = { count },
                               .init = { XD_INIT_NORMAL, 0.0f, 1.0f },
                               .buffer = true,
                               .value = value,
                               .room = value ? count : 0 };
    CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
}

/* Two blocks, of which one has spectral norm. */
static xd_model *describe(xd_ctx *ctx, void *value) {
    xd_model *model = NULL;
    CHECK(xd_model_create(ctx, &(xd_model_desc){ .seed = 11 }, &model) == XD_OK);
    for (int i = 0; i < 2; i++) {
        const xd_block_desc d = { .name = "conv", .unit = XD_UNIT_ALWAYS, .spectral_norm = true };
        xd_block *block = NULL;
        if (i)
            block = wrap_child(xd_model_root(model), "plain", NULL);
        else
            CHECK(xd_block_add(xd_model_root(model), &d, &block) == XD_OK);
        wrap_weight(block, "weight_orig", ROWS, COLUMNS);
        add_vector(block, "weight_u", ROWS, i ? NULL : value);
        add_vector(block, "weight_v", COLUMNS, NULL);
        add_vector(block, "running", COLUMNS, NULL);
    }
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

static xd_dtype dtype_of(const xd_model *model, const char *name) {
    return xd_weight_describe(xd_model_find_weight(model, name)).desc->dtype;
}

static bool says(xd_ctx *ctx, const char *text) {
    if (!strstr(xd_last_error(ctx)->message, text)) printf("\"%s\"\n", xd_last_error(ctx)->message);
    return strstr(xd_last_error(ctx)->message, text) != NULL;
}

/* What a view of the block shows of a vector. */
static void *shown(xd_model *model, const char *block, int index) {
    xd_block_view view;
    xd_block *b = xd_model_find_block(model, block);
    CHECK(xd_block_begin(b, (xd_pass){ XD_PASS_INFERENCE, 0, false }, &view) == XD_OK);
    CHECK(xd_block_end(b) == XD_OK);
    return view.values[index];
}

typedef struct scene {
    bool fsdp, filled; /* filled: the model holds values before it is wrapped */
    xd_dtype view;
    bool hosted; /* parts are kept in memory of another context */
} scene;

static xd_result wrap(const scene *s, xd_model *model, xd_comm *world, xd_ctx *host, xd_parallel **out) {
    const xd_ddp_desc ddp = { .view_dtype = s->view };
    const xd_fsdp_desc fsdp = { .view_dtype = s->view, .host = host };
    return s->fsdp ? wrap_over_fsdp(model, world, &fsdp, out) : wrap_over_ddp(model, world, &ddp, out);
}

static void check_vectors(xd_model *model, const float *u, bool half) {
    const uint16_t *halves = (const uint16_t *)shown(model, "conv", 1);
    const float *floats = (const float *)shown(model, "plain", 1);
    CHECK(dtype_of(model, "conv.weight_u") == (half ? XD_DTYPE_BF16 : XD_DTYPE_F32));
    CHECK(dtype_of(model, "conv.weight_v") == (half ? XD_DTYPE_BF16 : XD_DTYPE_F32));
    CHECK(dtype_of(model, "conv.running") == XD_DTYPE_F32 &&
          dtype_of(model, "plain.weight_u") == XD_DTYPE_F32);
    for (int i = 0; i < ROWS && half; i++) CHECK_EQ_INT(halves[i], xd_bf16_from_f32(u[i]));
    for (int i = 0; i < ROWS && !half; i++) CHECK(((const float *)(const void *)halves)[i] == u[i]);
    CHECK(floats != NULL && floats[0] != 0.0f);
}

static xd_result show_vectors(xd_comm *world, void *argument) {
    const scene *s = (const scene *)argument;
    const bool half = s->view == XD_DTYPE_BF16;
    xd_ctx *ctx = xd_comm_ctx(world), *host = NULL;
    xd_parallel *parallel = NULL;
    if (s->hosted) CHECK(xd_ctx_create(xd_ctx_settings(ctx), &host) == XD_OK);
    xd_model *model = describe(ctx, NULL), *alone = describe(ctx, NULL);
    CHECK(xd_model_allocate(alone) == XD_OK && xd_model_init_weights(alone) == XD_OK);
    const float *u = (const float *)xd_weight_describe(xd_model_find_weight(alone, "conv.weight_u")).value;
    if (s->filled) CHECK(xd_model_allocate(model) == XD_OK && xd_model_init_weights(model) == XD_OK);
    const uint64_t before = xdi_model_hash(model);
    CHECK(xd_model_describe(model).wrapper == XD_WRAP_NONE);
    CHECK(wrap(s, model, world, host, &parallel) == XD_OK);
    CHECK(xd_model_describe(model).wrapper == (s->fsdp ? XD_WRAP_FSDP : XD_WRAP_DDP));
    check_vectors(model, u, half);
    xd_param params[16];
    int64_t count = 0;
    CHECK(xd_parallel_params(parallel, 16, params, &count) == XD_OK && count == 8);
    CHECK(strcmp(params[1].name, "conv.weight_u") == 0);
    CHECK(params[1].dtype == (half ? XD_DTYPE_BF16 : XD_DTYPE_F32));
    /* What the power iteration writes is there after the step; with a host, what is written into the list. */
    uint16_t *halves = (uint16_t *)(s->hosted ? params[1].value : shown(model, "conv", 1));
    if (half) halves[0] = 0x4040; /* 3 */
    CHECK(xd_parallel_publish(parallel) == XD_OK);
    if (half) CHECK_EQ_INT(((const uint16_t *)shown(model, "conv", 1))[0], 0x4040);
    xd_parallel_destroy(parallel);
    CHECK(xd_model_describe(model).wrapper == XD_WRAP_NONE);
    /* The model is as it was described, and where it had storage it has the values. */
    CHECK(xdi_model_hash(model) == before && dtype_of(model, "conv.weight_u") == XD_DTYPE_F32);
    const float *back = (const float *)xd_weight_describe(xd_model_find_weight(model, "conv.weight_u")).value;
    CHECK((back != NULL) == (s->filled && !s->fsdp));
    const float rounded = xd_f32_from_bf16(xd_bf16_from_f32(u[1]));
    if (back) CHECK(back[0] == (half ? 3.0f : u[0]) && back[1] == (half ? rounded : u[1]));
    xd_model_destroy(model);
    xd_model_destroy(alone);
    xd_ctx_destroy(host);
    return XD_OK;
}

XD_TEST(vectors_of_spectral_norm_have_the_type_of_the_weights_in_views) {
    for (int i = 0; i < 12; i++) {
        const bool hosted = i >= 8;
        scene s = { hosted || (i & 4) != 0, (i & 1) != 0, i & 2 ? XD_DTYPE_BF16 : XD_DTYPE_NONE, hosted };
        for (int ranks = 1; ranks <= 2; ranks++)
            CHECK(xd_run_threads(ranks, NULL, show_vectors, &s, NULL) == XD_OK);
    }
}

/* A plan has the bytes of the wrapper, and leaves the model as it was. */
static xd_result plan_and_refuse(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_fsdp_desc fsdp = { .view_dtype = XD_DTYPE_BF16 };
    const xd_memory_plan_desc d = { .fsdp = &fsdp, .ranks = xd_comm_size(world) };
    const scene s = { true, false, XD_DTYPE_BF16, false };
    xd_memory_plan plan;
    xd_parallel *parallel = NULL;
    float value[ROWS] = { 1.0f };
    xd_model *model = describe(ctx, NULL), *given = describe(ctx, value);
    const uint64_t before = xdi_model_hash(model);
    (void)argument;
    CHECK(xd_plan_memory(model, &d, xd_comm_rank(world), &plan) == XD_OK);
    CHECK(xdi_model_hash(model) == before);
    CHECK(wrap(&s, model, world, NULL, &parallel) == XD_OK);
    const xd_parallel_bytes bytes = xd_parallel_memory(parallel);
    CHECK(memcmp(&bytes, &plan.wrapper, sizeof bytes) == 0);
    xd_parallel_destroy(parallel);
    /* The caller's storage keeps its type; in that type it is fine. */
    const scene ddp = { false, false, XD_DTYPE_BF16, false }, wide = { false, false, XD_DTYPE_NONE, false };
    CHECK(wrap(&ddp, given, world, NULL, &parallel) == XD_ERROR_STATE);
    CHECK(says(ctx, "buffer \"conv.weight_u\" has the caller's storage of F32"));
    CHECK(says(ctx, "give the buffer as BF16"));
    CHECK(xdi_model_hash(given) == before && xd_model_describe(given).wrapper == XD_WRAP_NONE);
    CHECK(wrap(&wide, given, world, NULL, &parallel) == XD_OK);
    CHECK(shown(given, "conv", 1) == (const void *)value);
    xd_parallel_destroy(parallel);
    /* Under FSDP too, but where parts are kept elsewhere. */
    const scene parts = { true, false, XD_DTYPE_NONE, false };
    xd_ctx *host = NULL;
    CHECK(xd_ctx_create(xd_ctx_settings(ctx), &host) == XD_OK);
    CHECK(wrap(&parts, given, world, host, &parallel) == XD_ERROR_STATE);
    CHECK(says(ctx, "buffer \"conv.weight_u\" has the caller's storage, and parts are kept"));
    CHECK(wrap(&parts, given, world, NULL, &parallel) == XD_OK);
    CHECK(shown(given, "conv", 1) == (const void *)value);
    xd_parallel_destroy(parallel);
    xd_ctx_destroy(host);
    CHECK(xd_weight_describe(xd_model_find_weight(given, "conv.weight_u")).value == (const void *)value);
    xd_model_destroy(model);
    xd_model_destroy(given);
    return XD_OK;
}

XD_TEST(vectors_of_spectral_norm_are_planned_and_storage_of_the_caller_keeps_its_type) {
    CHECK(xd_run_threads(2, NULL, plan_and_refuse, NULL, NULL) == XD_OK);
}

XD_TEST_MAIN()
