/* Optimizer steps: vectors, rounding order, passing over, groups, narrow parameters, bad input. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>

static xd_ctx *adamw_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

static xd_param adamw_param(const char *name, float *value, float *gradient, int64_t count) {
    xd_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.value = value;
    p.gradient = gradient;
    p.dtype = XD_DTYPE_F32;
    p.count = count;
    return p;
}

static xd_optimizer_desc adamw_desc(const xd_param *params, int64_t count) {
    return xd_adamw_defaults(params, count);
}

/* Reproducible values in (-1, 1) with all mantissa bits in use. */
static float adamw_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)((double)(*state >> 8) / 8388608.0 - 1.0);
}

static void adamw_fill(float *values, int n, uint32_t seed, float scale) {
    for (int i = 0; i < n; i++) values[i] = scale * adamw_random(&seed);
}

/* FNV-1a over the bits. */
static uint64_t adamw_hash(const float *values, int n) {
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        hash = (hash ^ bits) * 1099511628211u;
    }
    return hash;
}

XD_TEST(adamw_follows_the_published_vector) {
    static const double expected[3][3] = { { 0.99899000002, 0.05, 0.00025 },
                                           { 0.9987136730870784, 0.02, 0.00031225 },
                                           { 0.9983632568124357, 0.0305, 0.00032756275 } };
    static const float gradients[3] = { 0.5f, -0.25f, 0.125f };
    xd_ctx *ctx = adamw_ctx();
    float value = 1.0f, gradient = 0.0f;
    const xd_param param = adamw_param("w", &value, &gradient, 1);
    const xd_optimizer_desc desc = adamw_desc(&param, 1);
    xd_optimizer *optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
    const xd_optimizer_state state = xd_optimizer_state_at(optimizer, 0);
    for (int t = 0; t < 3; t++) {
        gradient = gradients[t];
        CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
        CHECK_NEAR(value, expected[t][0], 2e-7);
        CHECK_NEAR(state.exp_avg[0], expected[t][1], 1e-8);
        CHECK_NEAR(state.exp_avg_sq[0], expected[t][2], 1e-10);
        CHECK_EQ_INT(*state.step, t + 1);
    }
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

/* Five steps of one kind over 1003 elements; returns the hash of values and state. */
/* Adam is AdamW without a decay, and both are what their recipes say. */
XD_TEST(recipes_are_the_published_defaults) {
    float value[4] = { 1, -2, 3, -4 }, gradient[4] = { 0.5f, 0.25f, -1, 2 }, expected[4];
    const xd_param param = adamw_param("w", value, gradient, 4);
    const xd_optimizer_desc w = xd_adamw_defaults(&param, 1), a = xd_adam_defaults(&param, 1);
    CHECK(w.learning_rate == 1e-3 && w.beta1 == 0.9 && w.beta2 == 0.999 && w.weight_decay == 1e-2);
    CHECK(a.learning_rate == 1e-3 && a.beta1 == 0.9 && a.beta2 == 0.999 && a.weight_decay == 0.0);
    CHECK(a.params == &param && a.param_count == 1);
    for (int i = 0; i < 4; i++) /* the first step is the learning rate, against the gradient's sign */
        expected[i] = value[i] - (gradient[i] > 0 ? 1e-3f : -1e-3f);
    xd_ctx *ctx = adamw_ctx();
    xd_optimizer *optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &a, &optimizer) == XD_OK);
    CHECK(xd_optimizer_settings(optimizer)->eps == 1e-8);
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    for (int i = 0; i < 4; i++) CHECK_NEAR(value[i], expected[i], 1e-6);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

static uint64_t adamw_run(xd_optimizer_kind kind, float gradient_scale) {
    enum { N = 1003 };
    static float value[N], gradient[N];
    xd_ctx *ctx = adamw_ctx();
    const xd_param param = adamw_param("w", value, gradient, N);
    xd_optimizer_desc desc = adamw_desc(&param, 1);
    desc.kind = kind;
    desc.learning_rate = 0.01;
    desc.weight_decay = 0.1;
    desc.momentum = 0.9;
    adamw_fill(value, N, 1u, 1.0f);
    xd_optimizer *optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
    xd_optimizer_step_desc step;
    memset(&step, 0, sizeof step);
    step.gradient_scale = &gradient_scale;
    for (uint32_t t = 0; t < 5; t++) {
        adamw_fill(gradient, N, 100u + t, 0.25f);
        CHECK(xd_optimizer_step(optimizer, &step, NULL) == XD_OK);
    }
    const uint64_t hash =
        adamw_hash(value, N) ^ adamw_hash(xd_optimizer_state_at(optimizer, 0).exp_avg, N) * 3u;
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
    return hash;
}

/* Built with every compiler and with flags that invite fused arithmetic, these are the same numbers. */
XD_TEST(steps_have_the_committed_bits_under_any_compiler_flags) {
    CHECK(adamw_run(XD_OPTIMIZER_ADAMW, 1.0f) == UINT64_C(0x3f9a2822e5412508));
    CHECK(adamw_run(XD_OPTIMIZER_ADAMW, 0.3f) == UINT64_C(0x7e8511ab8db74b83));
    CHECK(adamw_run(XD_OPTIMIZER_ADAM_L2, 0.3f) == UINT64_C(0x823d66f2b01ccfea));
    CHECK(adamw_run(XD_OPTIMIZER_SGD, 0.3f) == UINT64_C(0xca0b370ae87d69f3));
}

XD_TEST(a_cut_parameter_steps_to_the_same_bits) {
    enum { N = 1000, CUT = 333 };
    float whole[N], parts[N], gradient[N];
    xd_ctx *ctx = adamw_ctx();
    adamw_fill(whole, N, 7u, 1.0f);
    memcpy(parts, whole, sizeof parts);
    const xd_param one = adamw_param("w", whole, gradient, N);
    xd_param three[3];
    three[0] = adamw_param("w.0", parts, gradient, CUT);
    three[1] = adamw_param("w.1", NULL, gradient, 0);
    three[2] = adamw_param("w.2", parts + CUT, gradient + CUT, N - CUT);
    const xd_optimizer_desc desc_one = adamw_desc(&one, 1), desc_three = adamw_desc(three, 3);
    xd_optimizer *a = NULL, *b = NULL;
    CHECK(xd_optimizer_create(ctx, &desc_one, &a) == XD_OK);
    CHECK(xd_optimizer_create(ctx, &desc_three, &b) == XD_OK);
    for (uint32_t t = 0; t < 4; t++) {
        adamw_fill(gradient, N, 50u + t, 1.0f);
        CHECK(xd_optimizer_step(a, NULL, NULL) == XD_OK);
        CHECK(xd_optimizer_step(b, NULL, NULL) == XD_OK);
    }
    CHECK(memcmp(whole, parts, sizeof whole) == 0);
    CHECK_EQ_INT(*xd_optimizer_state_at(b, 1).step, 4); /* empty shards count steps like the others */
    xd_optimizer_destroy(b);
    xd_optimizer_destroy(a);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_fused_gradient_scale_equals_clipping_beforehand) {
    enum { N = 100 };
    float a[N], b[N], gradient[N];
    const float scale = 0.37f;
    xd_ctx *ctx = adamw_ctx();
    adamw_fill(a, N, 3u, 1.0f);
    memcpy(b, a, sizeof b);
    const xd_param pa = adamw_param("a", a, gradient, N), pb = adamw_param("b", b, gradient, N);
    const xd_optimizer_desc da = adamw_desc(&pa, 1), db = adamw_desc(&pb, 1);
    xd_optimizer *oa = NULL, *ob = NULL;
    CHECK(xd_optimizer_create(ctx, &da, &oa) == XD_OK);
    CHECK(xd_optimizer_create(ctx, &db, &ob) == XD_OK);
    adamw_fill(gradient, N, 4u, 1.0f);
    xd_optimizer_step_desc step;
    memset(&step, 0, sizeof step);
    step.gradient_scale = &scale;
    CHECK(xd_optimizer_step(oa, &step, NULL) == XD_OK);
    CHECK(xd_clip_gradients(ctx, &pb, 1, scale) == XD_OK);
    CHECK(xd_optimizer_step(ob, NULL, NULL) == XD_OK);
    CHECK(memcmp(a, b, sizeof a) == 0);
    xd_optimizer_destroy(ob);
    xd_optimizer_destroy(oa);
    xd_ctx_destroy(ctx);
}

XD_TEST(what_has_no_gradient_or_is_frozen_keeps_value_state_and_step) {
    float value[4] = { 1.0f, 1.0f, 1.0f, 1.0f }, gradient[4] = { 1.0f, 1.0f, 1.0f, 0.0f };
    xd_ctx *ctx = adamw_ctx();
    xd_param params[4];
    for (int i = 0; i < 4; i++) params[i] = adamw_param("w", &value[i], &gradient[i], 1);
    params[0].gradient = NULL;
    params[1].frozen = true;
    params[2].buffer = true;
    const xd_optimizer_desc desc = adamw_desc(params, 4);
    xd_optimizer *optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    CHECK(value[0] == 1.0f && value[1] == 1.0f && value[2] == 1.0f);
    CHECK(value[3] < 1.0f); /* a zero gradient counts: the parameter decays */
    CHECK_EQ_INT(*xd_optimizer_state_at(optimizer, 0).step, 0);
    CHECK_EQ_INT(*xd_optimizer_state_at(optimizer, 3).step, 1);
    CHECK(xd_optimizer_state_at(optimizer, 1).exp_avg == NULL);
    CHECK(xd_optimizer_state_at(optimizer, 4).step == NULL);
    params[0].gradient = &gradient[0]; /* the caller may bring it later; its bias correction starts then */
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    CHECK_NEAR(value[0], 0.99899, 1e-6);
    params[0].count = 2;
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_ERROR_STATE);
    CHECK_EQ_INT(*xd_optimizer_state_at(optimizer, 0).step, 1);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_status_with_a_finding_skips_the_step) {
    float value = 1.0f, gradient = 1.0f;
    xd_ctx *ctx = adamw_ctx();
    const xd_param param = adamw_param("w", &value, &gradient, 1);
    const xd_optimizer_desc desc = adamw_desc(&param, 1);
    xd_optimizer *optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
    xd_status status;
    memset(&status, 0, sizeof status);
    status.label_out_of_range = 1;
    xd_optimizer_step_desc step;
    memset(&step, 0, sizeof step);
    step.status = &status;
    bool skipped = false;
    CHECK(xd_optimizer_step(optimizer, &step, &skipped) == XD_OK);
    CHECK(skipped && value == 1.0f);
    CHECK_EQ_INT(*xd_optimizer_state_at(optimizer, 0).step, 0);
    memset(&status, 0, sizeof status);
    CHECK(xd_optimizer_step(optimizer, &step, &skipped) == XD_OK);
    CHECK(!skipped && value < 1.0f);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST(groups_scale_the_learning_rate_and_replace_the_decay) {
    float value[4] = { 1.0f, 1.0f, 1.0f, 1.0f }, gradient[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    xd_ctx *ctx = adamw_ctx();
    xd_param params[4];
    for (int i = 0; i < 4; i++) params[i] = adamw_param("w", &value[i], &gradient[i], 1);
    params[1].group = 1;
    params[2].group = 2;
    params[3].no_decay = true;
    xd_optimizer_group groups[3];
    for (int i = 0; i < 3; i++) {
        groups[i].learning_rate_scale = i == 1 ? 0.5 : 1.0;
        groups[i].weight_decay = i == 2 ? 0.0 : 0.5;
    }
    xd_optimizer_desc desc = adamw_desc(params, 4);
    desc.learning_rate = 0.1;
    desc.weight_decay = 0.5;
    desc.group_count = 3;
    xd_optimizer *optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "no list of groups, and group_count 3") != NULL);
    desc.groups = groups;
    desc.group_count = 0;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "a list of groups, and group_count 0") != NULL);
    desc.group_count = 3;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    CHECK(value[0] == 0.95f && value[1] == 0.975f && value[2] == 1.0f && value[3] == 1.0f);
    CHECK(xd_optimizer_set_learning_rate(optimizer, 0.0) == XD_OK); /* here zero is zero */
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    CHECK(value[0] == 0.95f);
    CHECK(xd_optimizer_set_learning_rate(optimizer, -1.0) == XD_ERROR_ARGUMENT);
    xd_optimizer_destroy(optimizer);
    params[0].group = 3;
    optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "group 3, but there are 3") != NULL);
    CHECK(optimizer == NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_bf16_parameter_moves_through_its_f32_master) {
    enum { N = 33 };
    uint16_t value[N], gradient[N];
    float master[N], wide[N], gradient_f32[N];
    xd_ctx *ctx = adamw_ctx();
    adamw_fill(wide, N, 9u, 1.0f);
    adamw_fill(gradient_f32, N, 10u, 1.0f);
    for (int i = 0; i < N; i++) {
        value[i] = xd_bf16_from_f32(wide[i]);
        gradient[i] = xd_bf16_from_f32(gradient_f32[i]);
        master[i] = xd_f32_from_bf16(value[i]);
        gradient_f32[i] = xd_f32_from_bf16(gradient[i]);
    }
    xd_param narrow = adamw_param("w", NULL, NULL, N);
    narrow.value = value;
    narrow.dtype = XD_DTYPE_BF16;
    narrow.gradient = gradient;
    narrow.gradient_dtype = XD_DTYPE_BF16;
    const xd_param plain = adamw_param("w", master, gradient_f32, N);
    const xd_optimizer_desc dn = adamw_desc(&narrow, 1), dp = adamw_desc(&plain, 1);
    xd_optimizer *on = NULL, *op = NULL;
    CHECK(xd_optimizer_create(ctx, &dn, &on) == XD_OK);
    CHECK(xd_optimizer_create(ctx, &dp, &op) == XD_OK);
    for (int t = 0; t < 20; t++) {
        CHECK(xd_optimizer_step(on, NULL, NULL) == XD_OK);
        CHECK(xd_optimizer_step(op, NULL, NULL) == XD_OK);
    }
    CHECK(memcmp(xd_optimizer_state_at(on, 0).master, master, sizeof master) == 0);
    for (int i = 0; i < N; i++) CHECK_EQ_INT(value[i], xd_bf16_from_f32(master[i]));
    CHECK(xd_optimizer_state_at(op, 0).master == NULL);
    xd_optimizer_destroy(op);
    xd_optimizer_destroy(on);
    xd_ctx_destroy(ctx);
}

XD_TEST(numbers_out_of_range_are_refused_before_anything_is_made) {
    xd_ctx *ctx = adamw_ctx();
    xd_optimizer *optimizer = NULL;
    for (int k = 0; k < 8; k++) {
        xd_optimizer_desc desc = adamw_desc(NULL, 0);
        if (k == 0) desc.learning_rate = -1.0;
        if (k == 1) desc.beta1 = 1.0;
        if (k == 2) desc.beta2 = -0.1;
        if (k == 3) desc.eps = (double)NAN;
        if (k == 4) desc.weight_decay = -1e-3;
        if (k == 5) desc.momentum = (double)INFINITY;
        if (k == 6) desc.kind = (xd_optimizer_kind)3;
        if (k == 7) desc.param_count = 1;
        CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_ERROR_ARGUMENT);
        CHECK(optimizer == NULL);
    }
    int32_t whole = 0;
    xd_param param = adamw_param("w", NULL, NULL, 1);
    param.value = &whole;
    param.dtype = XD_DTYPE_I32;
    const xd_optimizer_desc desc = adamw_desc(&param, 1);
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_ERROR_DTYPE);
    CHECK(optimizer == NULL);
    xd_ctx_destroy(ctx);
}

/* Serves the context, then nothing. */
static void *adamw_allocate(void *user, size_t bytes) {
    int *left = (int *)user;
    return (*left)-- > 0 ? malloc(bytes) : NULL;
}

static void adamw_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(no_room_for_the_state_is_an_error_with_the_size) {
    int left = 1;
    float value = 1.0f;
    xd_ctx_desc ctx_desc;
    memset(&ctx_desc, 0, sizeof ctx_desc);
    ctx_desc.allocator.allocate = adamw_allocate;
    ctx_desc.allocator.release = adamw_release;
    ctx_desc.allocator.user = &left;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&ctx_desc, &ctx) == XD_OK);
    const xd_param param = adamw_param("w", &value, NULL, 1);
    const xd_optimizer_desc desc = adamw_desc(&param, 1);
    xd_optimizer *optimizer = NULL;
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_ERROR_MEMORY);
    CHECK(optimizer == NULL);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

typedef struct adamw_heard {
    int warnings;
    char last[200];
} adamw_heard;

static void adamw_hear(void *user, xd_log_level level, const char *line) {
    adamw_heard *heard = (adamw_heard *)user;
    if (level != XD_LOG_WARN) return;
    heard->warnings++;
    snprintf(heard->last, sizeof heard->last, "%s", line);
}

XD_TEST(a_step_without_any_gradient_warns_once) {
    float values[2] = { 1.0f, 2.0f }, gradient = 1.0f;
    adamw_heard heard;
    xd_ctx_desc ctx_desc;
    xd_ctx *ctx = NULL;
    xd_optimizer *optimizer = NULL;
    memset(&heard, 0, sizeof heard);
    memset(&ctx_desc, 0, sizeof ctx_desc);
    ctx_desc.logger.write = adamw_hear;
    ctx_desc.logger.user = &heard;
    CHECK(xd_ctx_create(&ctx_desc, &ctx) == XD_OK);
    xd_param params[2] = { adamw_param("frozen", &values[0], NULL, 1),
                           adamw_param("w", &values[1], NULL, 1) };
    params[0].frozen = true;
    const xd_optimizer_desc desc = adamw_desc(params, 2);
    CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
    for (int step = 0; step < 3; step++) CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    CHECK_EQ_INT(heard.warnings, 1);
    CHECK(strstr(heard.last, "2 parameters") && strstr(heard.last, "w's is NULL"));
    params[1].gradient = &gradient;
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    CHECK_EQ_INT(heard.warnings, 1);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
