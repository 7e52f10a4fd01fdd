/* Types in which stages take and put out values, and policies of precision by name. */
#include "xdistill.h"
#include "xd_test_numbers.h"

#include "build_scene.h"

enum { ELEMENTS = 3 };

static const float numbers[ELEMENTS] = { 1.00390625f, -65504.0f, 0.1f };

/* ---- casts ---- */

/* Three tensors: floats, halves and integers. */
static void check_inputs(const xd_stage *stage, xd_dtype to) {
    uint16_t room[ELEMENTS] = { 0 }, halves[ELEMENTS] = { 1, 2, 3 };
    const int64_t ids[ELEMENTS] = { 7, 8, 9 };
    xd_stage_values list[3] = { { numbers, XD_DTYPE_F32, ELEMENTS, room },
                                { halves, XD_DTYPE_F16, ELEMENTS, NULL },
                                { ids, XD_DTYPE_I64, ELEMENTS, NULL } };
    CHECK(stage->input_dtype == to);
    CHECK(xd_stage_cast(stage, XD_STAGE_INPUTS, list, 3) == XD_OK);
    CHECK(list[1].values == halves && list[1].dtype == XD_DTYPE_F16 && list[2].values == ids);
    if (to == XD_DTYPE_NONE || to == XD_DTYPE_F32) {
        CHECK(list[0].values == numbers && list[0].dtype == XD_DTYPE_F32 && room[0] == 0);
        return;
    }
    CHECK(list[0].values == room && list[0].dtype == to);
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ_INT(room[i], to == XD_DTYPE_BF16 ? xd_bf16_from_f32(numbers[i]) : f16_of(numbers[i]));
}

static void check_outputs(const xd_stage *stage, xd_dtype to) {
    float room[ELEMENTS] = { 0.0f };
    uint16_t halves[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++) halves[i] = xd_bf16_from_f32(numbers[i]);
    xd_stage_values one = { halves, XD_DTYPE_BF16, ELEMENTS, room };
    CHECK(stage->output_dtype == to);
    CHECK(xd_stage_cast(stage, XD_STAGE_OUTPUTS, &one, 1) == XD_OK);
    CHECK(one.dtype == (to == XD_DTYPE_F32 ? to : XD_DTYPE_BF16));
    CHECK(one.values == (to == XD_DTYPE_F32 ? (const void *)room : (const void *)halves));
    for (int i = 0; i < ELEMENTS && to == XD_DTYPE_F32; i++)
        CHECK(room[i] == xd_f32_from_bf16(xd_bf16_from_f32(numbers[i])));
}

/* Two stages: the first has the input, the last the output. */
static xd_result cast_at_the_ends(xd_comm *world, void *argument) {
    const xd_ddp_desc ddp = { .view_dtype = XD_DTYPE_BF16 };
    build_scene s;
    (void)argument;
    for (int i = 0; i < 5; i++) {
        build_open(&s, world, &(xd_expert_desc){ .pp = 2 });
        s.desc.precision.f16 = i == 1;
        s.desc.precision.bf16 = i >= 2 && i < 4;
        if (i == 3) s.desc.precision.input_dtype = XD_DTYPE_F32;
        if (i == 3) s.desc.precision.output_dtype = XD_DTYPE_BF16;
        if (i == 4) s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
        CHECK(build_run(&s) == XD_OK);
        const xd_stage stage = xd_built_stage(s.built, 0);
        const xd_dtype half = i == 0 ? XD_DTYPE_NONE : i == 1 ? XD_DTYPE_F16 : XD_DTYPE_BF16;
        check_inputs(&stage, s.rank > 0 ? XD_DTYPE_NONE : i == 3 ? XD_DTYPE_F32 : half);
        check_outputs(&stage, s.rank < 1 || i == 0 ? XD_DTYPE_NONE : i == 3 ? XD_DTYPE_BF16 : XD_DTYPE_F32);
        xd_stage other = stage; /* the casts are what a stage says, whichever place it has */
        other.input_dtype = XD_DTYPE_F16;
        other.output_dtype = XD_DTYPE_F32;
        check_inputs(&other, XD_DTYPE_F16);
        check_outputs(&other, XD_DTYPE_F32);
        build_close(&s);
    }
    return XD_OK;
}

XD_TEST(inputs_are_cast_on_the_first_stage_and_outputs_on_the_last) {
    build_ranks(2, cast_at_the_ends);
}

static xd_result refuse_casts(xd_comm *world, void *argument) {
    build_scene s;
    uint16_t room[ELEMENTS] = { 0 };
    (void)argument;
    build_open(&s, world, NULL);
    s.desc.precision.output_dtype = XD_DTYPE_I32;
    build_fails(&s, XD_ERROR_DTYPE, true, "outputs as I32: F32, BF16 and F16 are possible");
    s.desc.precision.output_dtype = s.rank ? XD_DTYPE_F32 : XD_DTYPE_NONE;
    build_fails(&s, XD_ERROR_MISMATCH, true, "precision.output_dtype");
    s.desc.precision = (xd_precision){ .bf16 = true };
    CHECK(build_run(&s) == XD_OK);
    const xd_stage stage = xd_built_stage(s.built, 0);
    xd_stage_values list[2] = { { numbers, XD_DTYPE_F32, ELEMENTS, room },
                                { numbers, XD_DTYPE_F32, ELEMENTS, NULL } };
    CHECK(xd_stage_cast(&stage, XD_STAGE_INPUTS, list, 2) == XD_ERROR_ARGUMENT);
    CHECK(build_says(&s, "value 1 of 2 becomes BF16, and there is no room for its 3 elements"));
    CHECK(list[0].values == numbers && room[0] == 0);
    CHECK(xd_stage_cast(&stage, XD_STAGE_INPUTS, NULL, 1) == XD_ERROR_ARGUMENT);
    CHECK(xd_stage_cast(&stage, XD_STAGE_INPUTS, list, 1) == XD_OK && list[0].values == room);
    build_close(&s);
    return XD_OK;
}

XD_TEST(casts_without_room_are_refused_before_any) {
    build_ranks(2, refuse_casts);
}

/* ---- policies ---- */

static int lines;

static void count_lines(void *user, xd_log_level level, const char *line) {
    (void)user;
    if (level == XD_LOG_INFO && strstr(line, "spectral norm stays float32")) lines++;
}

static void check_policy(xd_ctx *ctx, xd_policy_desc desc, bool applied, xd_dtype param, xd_dtype output) {
    xd_policy p;
    CHECK(xd_policy_find(ctx, &desc, &p) == XD_OK);
    CHECK(p.applied == applied);
    CHECK(p.fsdp.sent_dtype == param && p.fsdp.view_dtype == param && p.ddp.view_dtype == param);
    CHECK(p.precision.input_dtype == param && p.precision.output_dtype == output);
    CHECK(!p.precision.bf16 && !p.precision.f16 && p.fsdp.micro_batches == 0);
}

static void refuse_policy(xd_ctx *ctx, xd_policy_desc desc, xd_result result, const char *text) {
    xd_policy p;
    memset(&p, 7, sizeof p);
    const xd_policy before = p;
    CHECK_EQ_INT(xd_policy_find(ctx, &desc, &p), result);
    if (!strstr(xd_last_error(ctx)->message, text)) printf("%s\n", xd_last_error(ctx)->message);
    CHECK(strstr(xd_last_error(ctx)->message, text) && memcmp(&p, &before, sizeof p) == 0);
}

XD_TEST(policies_by_name_follow_the_rules_of_credit) {
    const xd_ctx_desc logged = { .logger = { count_lines, NULL }, .log_level = XD_LOG_INFO };
    const xd_dtype none = XD_DTYPE_NONE, half = XD_DTYPE_BF16;
    xd_ctx *ctx = NULL;
    xd_policy p;
    CHECK(xd_ctx_create(&logged, &ctx) == XD_OK);
    lines = 0;
    CHECK(xd_policy_find(ctx, NULL, &p) == XD_OK && p.applied && p.fsdp.view_dtype == half);
    check_policy(ctx, (xd_policy_desc){ .param_dtype = "" }, true, half, half);
    check_policy(ctx, (xd_policy_desc){ .param_dtype = "bf16" }, true, half, half);
    check_policy(ctx, (xd_policy_desc){ .param_dtype = "BFloat16", .output_dtype = "float32" }, true, half,
                 XD_DTYPE_F32);
    check_policy(ctx, (xd_policy_desc){ .param_dtype = "Half", .reduce_dtype = "fp32" }, true, XD_DTYPE_F16,
                 half);
    check_policy(ctx, (xd_policy_desc){ .param_dtype = "FLOAT32", .output_dtype = "float" }, true,
                 XD_DTYPE_F32, XD_DTYPE_F32);
    check_policy(ctx, (xd_policy_desc){ .param_dtype = "bf16", .disabled = true }, false, none, none);
    check_policy(ctx, (xd_policy_desc){ .disabled = true, .spectral_norm = true }, false, none, none);
    CHECK_EQ_INT(lines, 0);
    check_policy(ctx, (xd_policy_desc){ .spectral_norm = true }, false, none, none);
    CHECK_EQ_INT(lines, 1);
    check_policy(ctx, (xd_policy_desc){ .spectral_norm = true, .reduce_dtype = "float32" }, true, half, half);
    refuse_policy(ctx, (xd_policy_desc){ .param_dtype = "bfloat" }, XD_ERROR_ARGUMENT,
                  "param_dtype is \"bfloat\"");
    refuse_policy(ctx, (xd_policy_desc){ .param_dtype = "int32" }, XD_ERROR_DTYPE,
                  "param_dtype is \"int32\"");
    refuse_policy(ctx, (xd_policy_desc){ .output_dtype = "double" }, XD_ERROR_DTYPE,
                  "output_dtype is \"double\"");
    refuse_policy(ctx, (xd_policy_desc){ .reduce_dtype = "bf16" }, XD_ERROR_UNSUPPORTED,
                  "gradients are summed in float32");
    xd_ctx_destroy(ctx);
}

/* The settings are those of a wrapper: a view has the type that was named. */
static xd_result wrap_by_policy(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_policy policy;
    build_scene s;
    (void)argument;
    CHECK(xd_policy_find(ctx, &(xd_policy_desc){ .param_dtype = "bf16" }, &policy) == XD_OK);
    build_open(&s, world, NULL);
    s.desc.precision = policy.precision;
    s.desc.wrap = (xd_wrap){ XD_WRAP_FSDP, NULL, &policy.fsdp };
    CHECK(build_run(&s) == XD_OK);
    const xd_stage stage = xd_built_stage(s.built, 0);
    CHECK(stage.input_dtype == XD_DTYPE_BF16 && stage.output_dtype == XD_DTYPE_BF16);
    CHECK(xd_model_describe(stage.model).wrapper == XD_WRAP_FSDP);
    CHECK(build_info(&s, 0, "layers.1.w").desc->dtype == XD_DTYPE_F32); /* as it is kept */
    build_drop(&s);
    build_close(&s);
    return XD_OK;
}

XD_TEST(a_build_takes_the_settings_of_a_policy) {
    build_ranks(2, wrap_by_policy);
}

XD_TEST_MAIN()
