/* Models that are built over several ranks: the seven steps, and what each leaves behind. */
#define _POSIX_C_SOURCE 200809L /* dup */
#if defined(XD_TEST_LAYERS)
#    include "model/build_internal.h"
#endif
#include "xdistill.h"
#include "xd_test_numbers.h"

#include "build_scene.h"

#include <stdlib.h>
#include <unistd.h>

/* ---- stages ---- */

static xd_result one_stage(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.desc.pipeline.virtual_stages = 2; /* for several ranks */
    CHECK(build_run(&s) == XD_OK);
    CHECK_EQ_INT(s.calls, 1);
    CHECK_EQ_INT(xd_built_stage_count(s.built), 1);
    const xd_stage stage = xd_built_stage(s.built, 0);
    CHECK(stage.place.first && stage.place.last && stage.place.layer_count == 4);
    CHECK(stage.model && !stage.parallel && stage.place.virtual_stages == 1);
    CHECK(!xd_built_stage(s.built, 1).model && !xd_built_stage(s.built, -1).model);
    const xd_weight_info w = build_info(&s, 0, "layers.3.w"), b = build_info(&s, 0, "layers.0.angles");
    CHECK(w.ready && w.value && w.gradient && ((const float *)w.value)[0] != 0.0f);
    CHECK(b.ready && ((const float *)b.value)[1] == 7.0f);
    build_drop(&s);
    s.desc.groups = NULL; /* one rank in every group */
    CHECK(build_run(&s) == XD_OK && s.lines == 1);
    CHECK_EQ_STR(s.line, " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 32");
    build_close(&s);
    xd_built_destroy(NULL);
    return XD_OK;
}

XD_TEST(without_a_pipeline_there_is_one_stage_that_is_first_and_last) {
    build_ranks(1, one_stage);
    build_ranks(2, one_stage);
}

static xd_result many_stages(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .pp = 2 });
    s.desc.pipeline = (xd_pipeline_desc){ .ranks = 2, .virtual_stages = 3, .layer_count = 12 };
    CHECK(build_run(&s) == XD_OK);
    CHECK_EQ_INT(s.calls, 3);
    CHECK_EQ_INT(xd_built_stage_count(s.built), 3);
    for (int i = 0; i < 3; i++) {
        const xd_stage stage = xd_built_stage(s.built, i);
        CHECK_EQ_INT(s.places[i].virtual_stage, i);
        CHECK(memcmp(&stage.place, &s.places[i], sizeof stage.place) == 0);
        CHECK(stage.place.pipeline_rank == s.rank / 2);
        CHECK((xd_model_find_weight(stage.model, "embed") != NULL) == (i == 0 && s.rank < 2));
        CHECK((xd_model_find_weight(stage.model, "head") != NULL) == (i == 2 && s.rank >= 2));
    }
    CHECK(xd_model_find_weight(xd_built_stage(s.built, 1).model, s.rank < 2 ? "layers.5.w" : "layers.7.w"));
    build_close(&s);
    return XD_OK;
}

XD_TEST(virtual_stages_are_described_in_order_with_their_places) {
    build_ranks(4, many_stages);
}

/* ---- attributes and the line ---- */

static xd_result count_parameters(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .tp = 2, .cp = 2, .pp = 1 });
    s.desc.pipeline.layer_count = 0;
    s.frozen = true; /* counted all the same */
    CHECK(build_run(&s) == XD_OK);
    CHECK_EQ_INT(s.lines, s.rank < 2); /* dp 0 and cp 0 */
    if (s.rank < 2) {
        char line[BUILD_LINE];
        snprintf(line, sizeof line,
                 " > number of parameters on (tensor, pipeline) model parallel rank (%d, 0): 8", s.rank);
        CHECK_EQ_STR(s.line, line);
    }
    build_close(&s);
    return XD_OK;
}

XD_TEST(parameters_are_counted_in_one_line_for_each_model_parallel_rank) {
    build_ranks(8, count_parameters);
}

static void keep_line(void *user, xd_log_level level, const char *line) {
    if (level == XD_LOG_INFO && strstr(line, " > number of parameters")) *(int *)user += 1;
}

XD_TEST(without_a_report_the_line_goes_to_the_logger) {
    int lines = 0;
    const xd_ctx_desc desc = { .logger = { keep_line, &lines }, .log_level = XD_LOG_INFO };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    build_scene s;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && xd_comm_self(ctx, &world) == XD_OK);
    build_open(&s, world, NULL);
    s.desc.report.write = NULL;
    CHECK(build_run(&s) == XD_OK && lines == 1);
    build_close(&s);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

/* What a build writes to standard error with the ready-made logger. */
static void build_to_stderr(xd_log_level level, char *text, size_t size) {
    const xd_ctx_desc desc = { .logger = xd_stderr_logger(), .log_level = level };
    FILE *file = tmpfile();
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    build_scene s;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && xd_comm_self(ctx, &world) == XD_OK);
    build_open(&s, world, NULL);
    s.desc.report.write = NULL;
    fflush(stderr);
    const int kept = dup(2);
    CHECK(file && kept >= 0 && dup2(fileno(file), 2) == 2);
    const xd_result result = build_run(&s);
    fflush(stderr);
    CHECK(dup2(kept, 2) == 2 && close(kept) == 0);
    CHECK(result == XD_OK);
    rewind(file);
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
    build_close(&s);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_ready_made_logger_writes_the_line_to_standard_error) {
    char text[512];
    build_to_stderr(XD_LOG_INFO, text, sizeof text);
    CHECK(strstr(text, " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): ") != NULL);
    CHECK(strlen(text) > 0 && text[strlen(text) - 1] == '\n');
    build_to_stderr(XD_LOG_WARN, text, sizeof text);
    CHECK_EQ_STR(text, "");
}

/* Three weights that are cut over tp: nothing said, all said, one attribute said; and one that is not cut. */
typedef struct cut_scene {
    build_scene s;
    xd_layout *rows, *columns;
} cut_scene;

static xd_result describe_cuts(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    cut_scene *c = (cut_scene *)user;
    const int rank = xd_comm_rank(c->s.world);
    xd_model *model = NULL;
    xd_weight *tie = NULL;
    (void)place;
    CHECK(xd_model_create(ctx, &(xd_model_desc){ .rank = rank }, &model) == XD_OK);
    xd_block *root = xd_model_root(model);
    xd_weight_desc d = { .name = "bare", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 4, 6 } };
    d.layout = c->columns;
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d.name = "said";
    d.layout = c->rows;
    d.traits = (xd_weight_traits){ .tensor_parallel = true, .partition_dim = 1, .partition_stride = 3 };
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d.name = "half";
    d.traits = (xd_weight_traits){ .partition_stride = 4, .expert = true };
    d.layout = c->columns;
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d.name = "whole";
    d.traits = (xd_weight_traits){ 0 };
    d.layout = NULL;
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d.name = "tie";
    d.tied_to = "bare";
    CHECK(xd_weight_add(root, &d, &tie) == XD_OK);
    *out = model;
    return XD_OK;
}

static void make_cuts(cut_scene *c, xd_mesh **mesh) {
    xd_mesh_desc m = { .axes = { { "tp", 2 } } };
    xd_layout_desc d = { .ndim = 2, .shape = { 4, 6 } };
    CHECK(xd_mesh_create(c->s.world, &m, mesh) == XD_OK);
    d.topology = xd_mesh_topology(*mesh);
    d.placement[0] = (xd_placement){ .kind = XD_SHARD, .dim = 0 };
    CHECK(xd_layout_create(c->s.ctx, &d, &c->rows) == XD_OK);
    d.placement[0] = (xd_placement){ .kind = XD_SHARD, .dim = -1, .sections = 3 };
    CHECK(xd_layout_create(c->s.ctx, &d, &c->columns) == XD_OK);
}

static xd_result default_attributes(xd_comm *world, void *argument) {
    cut_scene c;
    xd_mesh *mesh = NULL;
    (void)argument;
    build_open(&c.s, world, &(xd_expert_desc){ .tp = 2 });
    make_cuts(&c, &mesh);
    c.s.desc.provider = (xd_stage_provider){ describe_cuts, &c };
    CHECK(build_run(&c.s) == XD_OK);
    const xd_weight_traits bare = build_info(&c.s, 0, "bare").desc->traits,
                           said = build_info(&c.s, 0, "said").desc->traits,
                           half = build_info(&c.s, 0, "half").desc->traits,
                           whole = build_info(&c.s, 0, "whole").desc->traits,
                           tie = build_info(&c.s, 0, "tie").desc->traits;
    CHECK(bare.tensor_parallel && bare.partition_dim == 1 && bare.partition_stride == 3);
    CHECK(!bare.expert_tensor_parallel && half.expert_tensor_parallel);
    CHECK(said.tensor_parallel && said.partition_dim == 1 && said.partition_stride == 3);
    CHECK(half.tensor_parallel && half.partition_dim == 1 && half.partition_stride == 4);
    CHECK(!whole.tensor_parallel && tie.tensor_parallel && tie.partition_dim == 1);
    CHECK(strstr(c.s.line, ": 60")); /* 3 x 12 and 24 */
    build_close(&c.s);
    xd_layout_destroy(c.rows);
    xd_layout_destroy(c.columns);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

XD_TEST(attributes_of_tensor_parallel_weights_are_filled_in_one_by_one) {
    build_ranks(2, default_attributes);
}

/* ---- storage and first values ---- */

static int init_calls;

static xd_result fill_angles(void *user, xd_model *model, xd_block *block) {
    char name[64];
    (void)user;
    snprintf(name, sizeof name, "%s.angles", xd_block_describe(block).name);
    xd_weight *w = xd_model_find_weight(model, name);
    if (!w) return XD_OK;
    float *value = (float *)xd_weight_describe(w).value;
    value[0] = 1.5f;
    value[1] = (float)xd_weight_describe(w).count;
    return xd_weight_set_ready(w);
}

static xd_result init_angles(void *user, xd_model *model, xd_block *block) {
    init_calls++;
    return fill_angles(user, model, block);
}

/* Under FSDP: what a view of a layer shows of its buffers, and this rank's part of its weight. */
static const float *shown_buffers(const build_scene *s, int index) {
    xd_block_view view;
    xd_block *block = xd_model_find_block(xd_built_stage(s->built, 0).model, "layers.1");
    CHECK(xd_block_begin(block, (xd_pass){ XD_PASS_INFERENCE, 0, false }, &view) == XD_OK);
    CHECK(xd_block_end(block) == XD_OK);
    return (const float *)view.values[index];
}

static xd_result materialise_parts(xd_comm *world, void *argument) {
    static const xd_fsdp_desc fsdp = { .micro_batches = 2 };
    const float *const table = build_table + 2;
    xd_param params[32], plain[32];
    int64_t count = 0;
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.tables = true;
    s.desc.storage = XD_STORAGE_META;
    s.desc.wrap = (xd_wrap){ XD_WRAP_FSDP, NULL, &fsdp };
    CHECK(build_run(&s) == XD_OK);
    CHECK(xd_parallel_params(xd_built_stage(s.built, 0).parallel, 32, plain, &count) == XD_OK && count > 8);
    const int64_t i = 5; /* some weight that this rank has a part of */
    const float first = plain[i].count > 0 ? ((const float *)plain[i].value)[0] : 0.0f;
    CHECK(shown_buffers(&s, 1)[0] == 7.0f && shown_buffers(&s, 2) == table);
    build_drop(&s);
    s.desc.init.call = fill_angles;
    CHECK(build_run(&s) == XD_OK);
    CHECK(shown_buffers(&s, 1)[0] == 1.5f && shown_buffers(&s, 1)[1] == 2.0f);
    CHECK(shown_buffers(&s, 2) == table); /* the caller's, whole and in its place */
    CHECK(xd_parallel_params(xd_built_stage(s.built, 0).parallel, 32, params, &count) == XD_OK);
    CHECK(params[i].count == plain[i].count);
    CHECK(params[i].count == 0 || ((const float *)params[i].value)[0] == first);
    CHECK(xd_parallel_publish(xd_built_stage(s.built, 0).parallel) == XD_OK);
    CHECK(shown_buffers(&s, 1)[0] == 1.5f);
    build_close(&s);
    return XD_OK;
}

/* A wrap that fails leaves models of the caller's without the buffers' storage, so that all of it can be made. */
static xd_result refuse_a_part(xd_comm *world, void *argument) {
    static const xd_fsdp_desc fsdp = { .micro_batches = 1 };
    xd_stages stages;
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    memset(&stages, 0, sizeof stages);
    const xd_stage_place place = { .pipeline_ranks = 1, .virtual_stages = 1, .layer_count = 2 };
    xd_ctx *ctx = xd_comm_ctx(world);
    stages.count = 1;
    stages.stages[0].place = place;
    CHECK(build_describe(&s, ctx, &place, &stages.stages[0].model) == XD_OK);
    s.desc.provider.describe = NULL;
    s.desc.before = NULL;
    s.desc.init.call = fill_angles;
    s.desc.wrap = (xd_wrap){ XD_WRAP_FSDP, NULL, &fsdp };
    CHECK(build_existing(world, &s.desc, &stages, &s.built) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "1 micro-batches for 2 data ranks"));
    xd_model *model = stages.stages[0].model;
    CHECK(!xd_weight_describe(xd_model_find_weight(model, "layers.1.angles")).ready);
    CHECK(xd_model_allocate(model) == XD_OK && xd_model_init_weights(model) == XD_OK);
    CHECK(xd_weight_describe(xd_model_find_weight(model, "layers.1.w")).ready);
    xd_model_destroy(model);
    s.built = NULL;
    build_close(&s);
    return XD_OK;
}

XD_TEST(buffers_of_the_caller_and_of_callbacks_stay_whole_under_fsdp) {
    build_ranks(2, materialise_parts);
    build_ranks(2, refuse_a_part);
}

static xd_result materialise(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.tables = true;
    s.desc.storage = XD_STORAGE_META;
    s.desc.init.call = init_angles;
    init_calls = 0;
    build_table[2] = 41.0f;
    build_table[3] = 42.0f;
    CHECK(build_run(&s) == XD_OK);
    CHECK_EQ_INT(init_calls, 5); /* the root and four layers */
    const xd_weight_info w = build_info(&s, 0, "layers.1.w"), angles = build_info(&s, 0, "layers.1.angles"),
                         table = build_info(&s, 0, "layers.1.table");
    CHECK(w.ready && ((const float *)w.value)[5] != 0.0f);
    CHECK(((const float *)angles.value)[0] == 1.5f && ((const float *)angles.value)[1] == 2.0f);
    CHECK(table.value == build_table + 2 && build_table[2] == 41.0f && build_table[3] == 42.0f);
    const float first = ((const float *)w.value)[5];
    build_drop(&s);
    s.desc.storage = XD_STORAGE_DEVICE; /* the same values either way */
    s.desc.init.call = NULL;
    CHECK(build_run(&s) == XD_OK && ((const float *)build_info(&s, 0, "layers.1.w").value)[5] == first);
    CHECK(((const float *)build_info(&s, 0, "layers.1.angles").value)[0] == 7.0f);
    build_drop(&s);
    s.desc.storage = XD_STORAGE_CALLER; /* none is made */
    CHECK(build_run(&s) == XD_OK && !build_info(&s, 0, "layers.1.w").value);
    CHECK(build_info(&s, 0, "layers.1.table").ready);
    build_close(&s);
    return XD_OK;
}

XD_TEST(meta_stages_get_storage_and_values_and_computed_buffers_keep_theirs) {
    build_ranks(1, materialise);
}

/* ---- precision ---- */

static void check_types(const build_scene *s, xd_dtype half) {
    CHECK(build_info(s, 0, "layers.0.w").desc->dtype == half);
    CHECK(build_info(s, 0, "layers.0.angles").desc->dtype == half);
    CHECK(build_info(s, 0, "layers.0.table").desc->dtype == XD_DTYPE_F32); /* keep_f32 */
    CHECK(build_info(s, 0, "embed").desc->dtype == half);
}

static xd_result lower_types(xd_comm *world, void *argument) {
    static const char *const keep[] = { "nothing", "layers.*.w", "*mbe*" };
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.tables = true;
    CHECK(build_run(&s) == XD_OK);
    check_types(&s, XD_DTYPE_F32); /* neither type */
    const float value = ((const float *)build_info(&s, 0, "embed").value)[2];
    for (int storage = XD_STORAGE_DEVICE; storage <= XD_STORAGE_META; storage++) {
        s.desc.storage = (xd_build_storage)storage;
        build_drop(&s);
        s.desc.precision = (xd_precision){ .bf16 = true };
        CHECK(build_run(&s) == XD_OK);
        check_types(&s, XD_DTYPE_BF16);
        CHECK(((const uint16_t *)build_info(&s, 0, "embed").value)[2] == xd_bf16_from_f32(value));
        CHECK(((const uint16_t *)build_info(&s, 0, "layers.2.angles").value)[0] == xd_bf16_from_f32(7.0f));
        build_drop(&s);
        s.desc.precision = (xd_precision){ .f16 = true };
        CHECK(build_run(&s) == XD_OK);
        check_types(&s, XD_DTYPE_F16);
        CHECK(((const uint16_t *)build_info(&s, 0, "embed").value)[2] == f16_of(value));
    }
    build_drop(&s);
    s.desc.precision = (xd_precision){ .bf16 = true, .keep = keep, .keep_count = 3 };
    CHECK(build_run(&s) == XD_OK);
    CHECK(build_info(&s, 0, "layers.3.w").desc->dtype == XD_DTYPE_F32);
    CHECK(build_info(&s, 0, "embed").desc->dtype == XD_DTYPE_F32);
    CHECK(build_info(&s, 0, "head").desc->dtype == XD_DTYPE_BF16);
    CHECK(build_info(&s, 0, "layers.3.angles").desc->dtype == XD_DTYPE_BF16);
    build_close(&s);
    return XD_OK;
}

XD_TEST(half_types_are_for_all_floating_weights_and_buffers_but_those_kept) {
    build_ranks(1, lower_types);
}

/* A model that holds values of its own, with integers, bytes, a tie and a narrow type beside them. */
static xd_result describe_loaded(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    xd_model *model = NULL;
    (void)user;
    (void)place;
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    xd_block *root = xd_model_root(model);
    xd_weight_desc d = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 3 } };
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d.name = "tie";
    d.tied_to = "w";
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d = (xd_weight_desc){ .name = "wide", .dtype = XD_DTYPE_F64, .ndim = 1, .shape = { 3 }, .buffer = true };
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d.name = "ids";
    d.dtype = XD_DTYPE_I64;
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    d.name = "codes";
    d.dtype = XD_DTYPE_F8_E4M3;
    CHECK(xd_weight_add(root, &d, NULL) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK);
    for (int64_t i = 0; i < 5; i++) {
        const xd_weight_info w = xd_weight_describe(xd_model_weight_at(model, i));
        for (int64_t k = 0; k < 3 && w.desc->dtype != XD_DTYPE_F8_E4M3; k++)
            xd_store_f64(w.value, w.desc->dtype, k, 1.25 * (double)(k + 1));
        if (w.desc->dtype == XD_DTYPE_F8_E4M3) memcpy(w.value, "abc", 3);
        CHECK(xd_weight_set_ready(xd_model_weight_at(model, i)) == XD_OK);
    }
    *out = model;
    return XD_OK;
}

static xd_result convert_values(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.desc.provider.describe = describe_loaded;
    s.desc.precision.bf16 = true;
    CHECK(build_run(&s) == XD_OK);
    const xd_weight_info w = build_info(&s, 0, "w"), tie = build_info(&s, 0, "tie"),
                         wide = build_info(&s, 0, "wide"), ids = build_info(&s, 0, "ids"),
                         codes = build_info(&s, 0, "codes");
    CHECK(w.desc->dtype == XD_DTYPE_BF16 && tie.desc->dtype == XD_DTYPE_BF16 && tie.value == w.value);
    CHECK(wide.desc->dtype == XD_DTYPE_BF16 && ids.desc->dtype == XD_DTYPE_I64 && w.gradient);
    for (int64_t k = 0; k < 3; k++) {
        CHECK(xd_load_f64(w.value, XD_DTYPE_BF16, k) == 1.25 * (double)(k + 1));
        CHECK(xd_load_f64(wide.value, XD_DTYPE_BF16, k) == 1.25 * (double)(k + 1));
        CHECK(((const int64_t *)ids.value)[k] == (int64_t)(1.25 * (double)(k + 1)));
    }
    CHECK(codes.desc->dtype == XD_DTYPE_F8_E4M3 && memcmp(codes.value, "abc", 3) == 0);
    build_close(&s);
    return XD_OK;
}

XD_TEST(values_that_a_model_holds_are_converted_with_it) {
    build_ranks(1, convert_values);
}

/* ---- wraps ---- */

static xd_result wrap_stages(xd_comm *world, void *argument) {
    static const char *const types[] = { "layer" };
    const xd_ddp_desc ddp = { .micro_batches = 4 };
    const xd_fsdp_desc fsdp = { .micro_batches = 4, .unit_types = types, .unit_type_count = 1 };
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .pp = 2 });
    s.desc.pipeline.virtual_stages = 2;
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
    CHECK(build_run(&s) == XD_OK);
    for (int i = 0; i < 2; i++) {
        xd_parallel *p = xd_built_stage(s.built, i).parallel;
        CHECK(p && xd_parallel_micro_batches(p).total == 4 && xd_parallel_micro_batches(p).own == 2);
        CHECK(!xd_weight_describe(xd_model_weight_at(xd_built_stage(s.built, i).model, 0)).gradient);
    }
    build_drop(&s);
    s.desc.wrap = (xd_wrap){ XD_WRAP_FSDP, NULL, &fsdp };
    for (int storage = XD_STORAGE_DEVICE; storage <= XD_STORAGE_CALLER; storage++) {
        s.desc.storage = (xd_build_storage)storage;
        CHECK(build_run(&s) == XD_OK);
        const xd_stage stage = xd_built_stage(s.built, 0);
        CHECK(stage.parallel && xd_parallel_memory(stage.parallel).gathered > 0);
        CHECK(build_info(&s, 0, s.rank < 2 ? "layers.0.angles" : "layers.1.angles").ready);
        CHECK(!build_info(&s, 0, s.rank < 2 ? "layers.0.w" : "layers.1.w").value);
        build_drop(&s);
    }
    build_close(&s);
    return XD_OK;
}

XD_TEST(each_stage_gets_a_wrapper_over_its_data_ranks) {
    build_ranks(4, wrap_stages);
}

static xd_result wrap_replicas(xd_comm *world, void *argument) {
    (void)argument;
    for (int i = 0; i < 2; i++) {
        build_scene s;
        build_open(&s, world, &(xd_expert_desc){ .optimizer_instances = 2 });
        xd_comm *replicas = s.desc.groups->inter_instances;
        const xd_fsdp_desc fsdp = { .micro_batches = 8, .replicas = replicas };
        const xd_ddp_desc ddp = { .micro_batches = 8, .sharded_optimizer = true, .replicas = replicas };
        s.desc.wrap = i ? (xd_wrap){ XD_WRAP_DDP, &ddp, NULL } : (xd_wrap){ XD_WRAP_FSDP, NULL, &fsdp };
        CHECK(build_run(&s) == XD_OK);
        CHECK_EQ_INT(xd_parallel_micro_batches(xd_built_stage(s.built, 0).parallel).own, 2);
        CHECK_EQ_INT(xd_parallel_micro_batches(xd_built_stage(s.built, 0).parallel).total, 8);
        build_close(&s);
    }
    return XD_OK;
}

XD_TEST(replicas_shard_over_the_group_of_their_instance) {
    build_ranks(4, wrap_replicas);
}

static bool halves_are_frozen;

static xd_result wrap_halves(xd_comm *world, void *argument) {
    const xd_ddp_desc ddp = { .micro_batches = 0 };
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.frozen = halves_are_frozen;
    s.desc.precision.bf16 = true;
    s.desc.groups = NULL; /* a group of its own */
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
    CHECK(build_run(&s) == XD_OK);
    CHECK(build_info(&s, 0, "embed").desc->dtype == XD_DTYPE_BF16 && build_info(&s, 0, "embed").ready);
    CHECK_EQ_INT(xd_parallel_micro_batches(xd_built_stage(s.built, 0).parallel).total, 1);
    build_close(&s);
    return XD_OK;
}

XD_TEST(models_of_half_types_are_wrapped_frozen_or_not) {
    for (int frozen = 0; frozen < 2; frozen++)
        for (int ranks = 1; ranks <= 2; ranks++) {
            halves_are_frozen = frozen != 0;
            build_ranks(ranks, wrap_halves);
        }
}

/* ---- equal values ---- */

static xd_result init_by_rank(void *user, xd_model *model, xd_block *block) {
    const build_scene *s = (const build_scene *)user;
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
        const xd_weight_info w = xd_weight_describe(xd_model_weight_at(model, i));
        if (w.block != block || w.owner != xd_model_weight_at(model, i)) continue;
        for (int64_t k = 0; k < w.count; k++) ((float *)w.value)[k] = (float)(100 * s->rank + k);
        CHECK(xd_weight_set_ready(w.owner) == XD_OK);
    }
    return XD_OK;
}

static void check_values(const build_scene *s, const char *name, int64_t at, int rank) {
    CHECK_NEAR(((const float *)build_info(s, 0, name).value)[at], 100 * rank + at, 0.0);
}

static xd_result make_equal(xd_comm *world, void *argument) {
    const xd_ddp_desc ddp = { .micro_batches = 0 };
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .cp = 2, .pp = 2 });
    const int root = s.rank < 4 ? 0 : 4;
    const char *const w = s.rank < 4 ? "layers.0.w" : "layers.2.w", *const angles = s.rank < 4
                                                                                        ? "layers.0.angles"
                                                                                        : "layers.2.angles";
    s.desc.init = (xd_block_init){ init_by_rank, &s };
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
    CHECK(build_run(&s) == XD_OK); /* nothing is looked at */
    check_values(&s, w, 3, s.rank);
    build_drop(&s);
    s.desc.values.broadcast = true;
    s.seed = (uint64_t)s.rank; /* seeds may differ then */
    CHECK(build_run(&s) == XD_OK);
    check_values(&s, w, 3, root);
    check_values(&s, angles, 1, root);
    build_drop(&s);
    s.desc.values.without_buffers = true;
    CHECK(build_run(&s) == XD_OK);
    check_values(&s, w, 3, root);
    check_values(&s, angles, 1, s.rank);
    build_drop(&s);
    s.seed = 5;
    s.desc.values = (xd_build_values){ .check = true };
    build_fails(&s, XD_ERROR_MISMATCH, true, "holds other values on rank");
    CHECK(build_says(&s, s.rank < 4 ? "\"embed\" holds other values on rank 1 than on rank 0"
                                    : "\"head\" holds other values on rank 5 than on rank 4"));
    s.desc.init.call = NULL;
    CHECK(build_run(&s) == XD_OK);
    build_close(&s);
    return XD_OK;
}

XD_TEST(values_become_those_of_the_first_data_rank_or_are_compared) {
    build_ranks(8, make_equal);
}

/* Under FSDP first values are formed in parts, from the seed of the first data rank. */
static xd_result equal_seeds(xd_comm *world, void *argument) {
    const xd_fsdp_desc fsdp = { .micro_batches = 0 };
    build_scene s;
    xd_block_view view;
    (void)argument;
    build_open(&s, world, NULL);
    s.seed = (uint64_t)s.rank + 5;
    s.desc.wrap = (xd_wrap){ XD_WRAP_FSDP, NULL, &fsdp };
    s.desc.values.broadcast = true;
    CHECK(build_run(&s) == XD_OK);
    xd_block *root = xd_model_root(xd_built_stage(s.built, 0).model);
    CHECK(xd_block_begin(root, (xd_pass){ XD_PASS_INFERENCE, 0, false }, &view) == XD_OK);
    float shown[3];
    memcpy(shown, view.values[0], sizeof shown);
    CHECK(xd_block_end(root) == XD_OK);
    build_drop(&s);
    s.seed = 5;
    s.desc.wrap = (xd_wrap){ XD_WRAP_NONE, NULL, NULL };
    CHECK(build_run(&s) == XD_OK);
    CHECK(memcmp(build_info(&s, 0, "embed").value, shown, sizeof shown) == 0);
    build_close(&s);
    return XD_OK;
}

XD_TEST(seeds_become_those_of_the_first_data_rank_before_parts_are_formed) {
    build_ranks(3, equal_seeds);
}

static xd_result equal_experts(xd_comm *world, void *argument) {
    build_scene s;
    char name[48];
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .ep = 2 });
    s.expert = true;
    s.desc.init = (xd_block_init){ init_by_rank, &s };
    s.desc.values.broadcast = true;
    CHECK(build_run(&s) == XD_OK);
    snprintf(name, sizeof name, "layers.0.experts.%d", s.rank % 2);
    check_values(&s, "layers.0.w", 2, 0);
    check_values(&s, name, 2, s.rank % 2); /* ranks 0 and 2, 1 and 3 */
    build_drop(&s);
    s.desc.values = (xd_build_values){ .check = true };
    build_fails(&s, XD_ERROR_MISMATCH, true, "\"embed\" holds other values on rank 1 than on rank 0");
    s.desc.init.call = NULL;
    CHECK(build_run(&s) == XD_OK);
    build_close(&s);
    return XD_OK;
}

XD_TEST(values_of_experts_become_those_of_their_own_data_group) {
    build_ranks(4, equal_experts);
}

/* Leaf n adds n + 1 to every gradient; this rank has experts r % 2, which get leaves of both members of its group. */
static xd_result add_leaves(const build_scene *s, const char *name, bool experts) {
    xd_block *block = xd_model_find_block(xd_built_stage(s->built, 0).model, name);
    const xd_parallel *parallel = xd_built_stage(s->built, 0).parallel;
    const int64_t opened = experts ? xd_parallel_expert_micro_batches(parallel).opened : 1;
    xd_block_view view;
    for (int64_t k = 0; k < opened; k++) {
        const int64_t leaf =
            experts ? xd_parallel_expert_micro_batch(parallel, k) : xd_parallel_micro_batch(parallel, k);
        CHECK_EQ_INT(leaf, experts ? s->rank / 2 * 2 + k : s->rank);
        XD_TRY(xd_block_begin(block, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = k }, &view));
        for (int64_t i = 0; i < (experts ? 4 : 6); i++) ((float *)view.gradients[0])[i] += (float)(leaf + 1);
        XD_TRY(xd_block_end(block));
    }
    return XD_OK;
}

/* A model of all experts, for the lists. */
static xd_model *describe_all_experts(const build_scene *s) {
    xd_model *model = NULL;
    xd_block *layer = NULL, *experts = NULL;
    CHECK(xd_model_create(s->ctx, NULL, &model) == XD_OK);
    build_weight(s, xd_model_root(model), "embed", 1, 3);
    CHECK(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = "layers.0" }, &layer) == XD_OK);
    build_weight(s, layer, "w", 2, 3);
    xd_weight_desc d = { .name = "angles", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 2 }, .buffer = true };
    CHECK(xd_weight_add(layer, &d, NULL) == XD_OK);
    CHECK(xd_block_add(layer, &(xd_block_desc){ .name = "experts" }, &experts) == XD_OK);
    d = (xd_weight_desc){ .name = "0", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    CHECK(xd_weight_add(experts, &d, NULL) == XD_OK);
    d.name = "1";
    CHECK(xd_weight_add(experts, &d, NULL) == XD_OK);
    build_weight(s, xd_model_root(model), "head", 5, 1);
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

static void check_expert_lists(const build_scene *s) {
    xd_model *whole = describe_all_experts(s);
    xd_param params[8];
    int64_t count = 0, here = 0;
    CHECK(xd_built_params(s->built, whole, 8, params, &count) == XD_OK && count == 6);
    for (int64_t i = 0; i < count; i++) {
        const char *of = strstr(params[i].name, "experts.");
        const bool expert = of != NULL, mine = of && of[8] == '0' + s->rank % 2;
        const bool ddp = s->desc.wrap.kind == XD_WRAP_DDP;
        if (params[i].buffer || (expert && !mine)) continue;
        if (expert) CHECK_EQ_INT(params[i].replica, ddp && s->rank >= 2);
        here += params[i].count * expert;
        for (int64_t k = 0; k < params[i].count && (expert || strcmp(params[i].name, "layers.0.w") == 0); k++)
            CHECK_NEAR(((const float *)params[i].gradient)[k], 10.0, 0.0);
    }
    CHECK(s->desc.wrap.kind == XD_WRAP_FSDP || here == 4);
    xd_model_destroy(whole);
}

static xd_result wrap_experts(xd_comm *world, void *argument) {
    static const char *const types[] = { "layer", "experts" };
    const xd_ddp_desc ddp = { .micro_batches = 4 };
    const xd_fsdp_desc fsdp = { .micro_batches = 4, .unit_types = types, .unit_type_count = 2 };
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .ep = 2 });
    s.expert = true;
    s.desc.pipeline.layer_count = 1;
    for (int kind = XD_WRAP_DDP; kind <= XD_WRAP_FSDP; kind++) {
        s.desc.init = (xd_block_init){ kind == XD_WRAP_DDP ? init_by_rank : NULL, &s };
        s.desc.values.broadcast = true;
        s.desc.wrap = (xd_wrap){ (xd_wrap_kind)kind, kind == XD_WRAP_DDP ? &ddp : NULL,
                                 kind == XD_WRAP_FSDP ? &fsdp : NULL };
        CHECK(build_run(&s) == XD_OK);
        CHECK(s.rank > 0 || strstr(s.line, ": 18")); /* 3 + 6 + 5, and one of two experts of 4 */
        if (kind == XD_WRAP_DDP) {
            check_values(&s, "layers.0.w", 2, 0);
            check_values(&s, s.rank % 2 ? "layers.0.experts.1" : "layers.0.experts.0", 2, s.rank % 2);
        }
        CHECK(add_leaves(&s, "layers.0", false) == XD_OK &&
              add_leaves(&s, "layers.0.experts", true) == XD_OK);
        CHECK(xd_block_skip(xd_model_root(xd_built_stage(s.built, 0).model), 0) == XD_OK);
        CHECK(xd_parallel_reduce(xd_built_stage(s.built, 0).parallel) == XD_OK);
        check_expert_lists(&s);
        build_drop(&s);
    }
    build_close(&s);
    return XD_OK;
}

XD_TEST(experts_of_a_build_are_wrapped_over_their_own_data_group) {
    build_ranks(4, wrap_experts);
}

/* ---- stages that exist ---- */

static xd_result take_existing(xd_comm *world, void *argument) {
    const xd_ddp_desc ddp = { .micro_batches = 0 };
    build_scene s;
    xd_stages *stages = (xd_stages *)calloc(1, sizeof *stages);
    (void)argument;
    build_open(&s, world, NULL);
    stages->count = 2;
    for (int i = 0; i < 2; i++) {
        const xd_pipeline_desc pipeline = { 2, 1, 4, NULL };
        CHECK(xdi_pipeline_place(s.ctx, &pipeline, i, 0, &stages->stages[i].place) == XD_OK);
        CHECK(build_describe(&s, s.ctx, &stages->stages[i].place, &stages->stages[i].model) == XD_OK);
    }
    CHECK(build_existing(world, &s.desc, stages, &s.built) == XD_ERROR_ARGUMENT);
    CHECK(build_says(&s, "2 stages exist already: no provider") && !s.built);
    s.desc.provider.describe = NULL;
    s.desc.before = NULL;
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
    const xd_ddp_desc few = { .micro_batches = 1 };
    s.desc.wrap.ddp = &few; /* fails after the storage is there: the models stay the caller's */
    CHECK(build_existing(world, &s.desc, stages, &s.built) == XD_ERROR_ARGUMENT && !s.built);
    CHECK(build_says(&s, "1 micro-batches for 2 data ranks"));
    s.desc.wrap.ddp = &ddp;
    CHECK(build_existing(world, &s.desc, stages, &s.built) == XD_OK);
    CHECK(xd_built_stage_count(s.built) == 2 && xd_built_stage(s.built, 1).parallel);
    CHECK(xd_built_stage(s.built, 1).model == stages->stages[1].model);
    CHECK(xd_built_stage(s.built, 1).place.first_layer == 2 && s.calls == 2);
    *stages = (xd_stages){ .count = 1, .stages = { xd_built_stage(s.built, 0) } };
    xd_built *again = NULL;
    CHECK(build_existing(world, &s.desc, stages, &again) == XD_ERROR_STATE && !again);
    CHECK(build_says(&s, "stage 0 of 1 is wrapped already"));
    stages->count = 0;
    CHECK(build_existing(world, &s.desc, stages, &again) == XD_ERROR_ARGUMENT);
    CHECK(build_says(&s, "0 stages, from 1 to 128"));
    build_close(&s);
    free(stages);
    return XD_OK;
}

XD_TEST(stages_that_exist_go_through_the_steps_from_the_third_on) {
    build_ranks(2, take_existing);
}

XD_TEST_MAIN()
