/* Descriptions of models: names, order, ties, storage, first values, and whether ranks agree. */
#define XDISTILL_IMPLEMENTATION
#if defined(XD_TEST_LAYERS)
#    include "model/describe_internal.h"
#endif
#include "xdistill.h"
#include "planned.h"
#include "xd_test.h"

static xd_ctx *plain_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

static xd_weight_desc matrix(const char *name, int64_t rows, int64_t columns) {
    return (xd_weight_desc){ .name = name,
                             .dtype = XD_DTYPE_F32,
                             .ndim = 2,
                             .shape = { rows, columns },
                             .init = { XD_INIT_NORMAL, 0.0f, 0.02f } };
}

static xd_weight_desc vector(const char *name, int64_t n) {
    return (xd_weight_desc){ .name = name, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { n } };
}

static xd_weight *add(xd_block *block, xd_weight_desc desc) {
    xd_weight *weight = NULL;
    CHECK(xd_weight_add(block, &desc, &weight) == XD_OK);
    return weight;
}

static xd_block *child(xd_block *parent, const char *name) {
    xd_block *block = NULL;
    CHECK(xd_block_add(parent, &(xd_block_desc){ .name = name, .type = "layer" }, &block) == XD_OK);
    return block;
}

/* A small language model with a tied head, a computed table and a weight that is registered after its block's children. */
static xd_model *language_model_of(xd_ctx *ctx, uint64_t seed, int layers, int64_t rows) {
    xd_model *model = NULL;
    char name[32];
    CHECK(xd_model_create(ctx, &(xd_model_desc){ .seed = seed }, &model) == XD_OK);
    xd_block *root = xd_model_root(model);
    add(root, matrix("embed.weight", 50, 8));
    for (int i = 0; i < layers; i++) {
        snprintf(name, sizeof name, "layers.%d", i);
        xd_block *layer = child(root, name), *mlp = child(layer, "mlp");
        add(mlp, matrix("up.weight", rows, 24 * 8 / rows));
        xd_weight_desc norm = vector("norm.weight", 8);
        norm.init = (xd_init){ XD_INIT_CONSTANT, 1.0f, 0.0f };
        add(layer, norm);
        xd_weight_desc angles = vector("angles", 4);
        angles.buffer = angles.transient = true;
        add(layer, angles);
    }
    xd_weight_desc head = matrix("head.weight", 50, 8);
    head.init = (xd_init){ XD_INIT_ZERO, 0.0f, 0.0f };
    head.tied_to = "embed.weight";
    add(root, head);
    return model;
}

static xd_model *language_model(xd_ctx *ctx, uint64_t seed, int layers) {
    return language_model_of(ctx, seed, layers, 24);
}

XD_TEST(weights_are_in_the_order_of_blocks_and_found_by_full_name) {
    static const char *const order[] = { "embed.weight",           "head.weight",
                                         "layers.0.norm.weight",   "layers.0.angles",
                                         "layers.0.mlp.up.weight", "layers.1.norm.weight",
                                         "layers.1.angles",        "layers.1.mlp.up.weight" };
    xd_ctx *ctx = plain_ctx();
    xd_model *model = language_model(ctx, 1, 2);
    CHECK_EQ_INT(xd_model_describe(model).weight_count, 0);
    CHECK(xd_model_weight_at(model, 0) == NULL && xdi_model_hash(model) == 0);
    CHECK(xd_model_seal(model) == XD_OK && xdi_model_hash(model) != 0);
    CHECK_EQ_INT(xd_model_describe(model).weight_count, 8);
    for (int64_t i = 0; i < 8; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(model, i));
        CHECK_EQ_STR(info.name, order[i]);
        CHECK(xd_model_find_weight(model, order[i]) == xd_model_weight_at(model, i));
    }
    CHECK(xd_model_weight_at(model, 8) == NULL && xd_model_weight_at(model, -1) == NULL);
    CHECK(xd_model_find_weight(model, "layers.0") == NULL &&
          xd_model_find_block(model, "embed.weight") == NULL);
    CHECK(xd_model_find_block(model, "") == xd_model_root(model) && xd_model_find_weight(model, "") == NULL);
    CHECK_EQ_STR(xd_block_describe(xd_model_find_block(model, "layers.1.mlp")).name, "layers.1.mlp");
    CHECK_EQ_STR(xd_block_describe(xd_model_find_block(model, "layers.1.mlp")).desc->type, "layer");
    CHECK_EQ_STR(xd_block_describe(xd_model_find_block(model, "layers.1.mlp")).desc->name, "mlp");
    CHECK_EQ_STR(xd_block_describe(xd_model_root(model)).name, "");
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

XD_TEST(thousands_of_names_are_all_found) {
    enum { MANY = 3000 };
    xd_ctx *ctx = plain_ctx();
    xd_model *model = NULL;
    xd_weight *weights[MANY];
    char name[32];
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "a.%d.weight", i);
        weights[i] = add(xd_model_root(model), vector(name, 1));
    }
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "a.%d.weight", i);
        CHECK(xd_model_find_weight(model, name) == weights[i]);
    }
    CHECK(xd_model_find_weight(model, "a.3000.weight") == NULL);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

/* The groups are those of xd_optimizer_desc. */
XD_TEST(a_weight_names_its_group_of_an_optimizer) {
    xd_ctx *ctx = plain_ctx();
    xd_model *model = NULL;
    xd_param params[2];
    int64_t count = 0;
    CHECK(xd_model_create(ctx, &(xd_model_desc){ .seed = 1 }, &model) == XD_OK);
    xd_weight_desc second = vector("second", 3);
    second.group = 2;
    add(xd_model_root(model), vector("first", 3));
    add(xd_model_root(model), second);
    CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK);
    CHECK(xd_model_init_weights(model) == XD_OK && xd_model_params(model, 2, params, &count) == XD_OK);
    CHECK(count == 2 && params[0].group == 0 && params[1].group == 2);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_tie_has_its_owners_storage_and_counts_once) {
    xd_ctx *ctx = plain_ctx();
    xd_model *model = language_model(ctx, 1, 1);
    xd_memory_bytes bytes = { 0, 0 };
    xd_param params[8];
    int64_t count = 0;
    CHECK(xd_model_params(model, 0, NULL, &count) == XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "not sealed"));
    CHECK(xd_model_seal(model) == XD_OK);
    CHECK_EQ_INT(xd_model_describe(model).parameter_count, 50 * 8 + 8 + 24 * 8);
    CHECK_EQ_INT(xd_model_describe(model).trained_count, 50 * 8 + 8 + 24 * 8);
    CHECK(xd_model_params(model, 0, NULL, &count) == XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "\"embed.weight\" has no storage"));
    CHECK(PLANNED_MEMORY(ctx, xd_model_allocate(model), &bytes) == XD_OK);
    CHECK(bytes.host >= 2 * (50 * 8 + 8 + 24 * 8) * sizeof(float) + 4 * sizeof(float));
    CHECK(xd_model_allocate(model) == XD_OK);
    CHECK(PLANNED_MEMORY(ctx, xd_model_allocate(model), &bytes) == XD_OK && bytes.host == 0);
    CHECK(xd_model_init_weights(model) == XD_OK);
    const xd_weight_info embed = xd_weight_describe(xd_model_find_weight(model, "embed.weight"));
    const xd_weight_info head = xd_weight_describe(xd_model_find_weight(model, "head.weight"));
    CHECK(head.value == embed.value && head.gradient == embed.gradient && head.value != NULL);
    CHECK(head.owner == xd_model_find_weight(model, "embed.weight") && embed.owner == head.owner);
    CHECK(head.ready && ((const float *)head.value)[0] != 0.0f);
    CHECK(xd_model_params(model, 8, params, &count) == XD_OK);
    CHECK_EQ_INT(count, 4);
    CHECK_EQ_STR(params[0].name, "embed.weight");
    CHECK(!params[0].no_decay && params[1].no_decay && params[2].buffer && !params[2].gradient);
    CHECK_EQ_INT(params[3].shape[0], 24);
    memset(params, 0, sizeof params);
    CHECK(xd_model_params(model, 3, params, &count) == XD_ERROR_ARGUMENT);
    CHECK(!params[0].name && count == 4); /* outputs are untouched on failure */
    CHECK(strstr(xd_last_error(ctx)->message, "4 parameters, capacity is 3"));
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

/* ---- first values ---- */

/* The whole weight's values as the declaration says: by seed, name and index. */
static void whole_values(uint64_t seed, const char *name, int64_t n, float scale, float *out) {
    const uint64_t key = xd_hash(0, name, strlen(name));
    const xd_philox random = { .seed = seed,
                               .stream = XD_STREAM_INIT,
                               .sample = (uint32_t)(key & 0xffffffffu),
                               .step = (uint32_t)(key >> 32) };
    xd_philox_fill_normal(&random, 0, n, out);
    for (int64_t i = 0; i < n; i++) out[i] *= scale;
}

/* The values that each rank of a layout holds are those of the whole weight, whatever the cut. */
static void check_cut(xd_ctx *ctx, const xd_layout_desc *cut, int ranks, int64_t true_rows,
                      const float *whole) {
    xd_layout *layout = NULL;
    CHECK(xd_layout_create(ctx, cut, &layout) == XD_OK);
    for (int rank = 0; rank < ranks; rank++) {
        xd_model *model = NULL;
        CHECK(xd_model_create(ctx, &(xd_model_desc){ .seed = 7, .rank = rank }, &model) == XD_OK);
        xd_weight_desc desc = matrix("w", true_rows, cut->shape[1]);
        desc.stored_rows = cut->shape[0];
        desc.layout = layout;
        desc.init.scale = 0.5f;
        xd_weight *weight = add(child(xd_model_root(model), "block"), desc);
        CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK &&
              xd_model_init_weights(model) == XD_OK);
        const xd_weight_info info = xd_weight_describe(weight);
        int64_t at = 0;
        for (int i = 0; i < info.region->count[0]; i++)
            for (int64_t r = info.region->interval[0][i].begin; r < info.region->interval[0][i].end; r++)
                for (int j = 0; j < info.region->count[1]; j++)
                    for (int64_t c = info.region->interval[1][j].begin; c < info.region->interval[1][j].end;
                         c++)
                        CHECK(((const float *)info.value)[at++] ==
                              (r < true_rows ? whole[r * cut->shape[1] + c] : 0.0f));
        CHECK_EQ_INT(at, info.count);
        xd_model_destroy(model);
    }
    xd_layout_destroy(layout);
}

XD_TEST(first_values_do_not_depend_on_the_layout_and_padded_rows_are_0) {
    enum { ROWS = 37, COLUMNS = 300 };
    static float whole[ROWS * COLUMNS];
    xd_ctx *ctx = plain_ctx();
    whole_values(7, "block.w", ROWS * COLUMNS, 0.5f, whole);
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int dim = 0; dim < 2; dim++)
            for (int64_t padding = 0; padding < 12; padding += 11)
                for (int balanced = 0; balanced < 2; balanced++) {
                    xd_topology line = { 0 };
                    line.axis_count = 1;
                    line.size[0] = line.rank_count = ranks;
                    xd_layout_desc cut = { .ndim = 2,
                                           .shape = { ROWS + padding, COLUMNS },
                                           .topology = &line };
                    cut.placement[0] = (xd_placement){ .kind = XD_SHARD, .dim = dim, .balanced = balanced };
                    if (balanced && cut.shape[dim] % (2 * ranks) != 0) continue;
                    check_cut(ctx, &cut, ranks, ROWS, whole);
                }
    xd_ctx_destroy(ctx);
}

XD_TEST(copies_of_an_embedding_begin_with_the_same_values_whatever_their_names) {
    static const char *const names[] = { "embed", "head", "other" };
    xd_weight *weights[3];
    xd_ctx *ctx = NULL;
    xd_model *model = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_model_create(ctx, NULL, &model) == XD_OK);
    for (int i = 0; i < 3; i++) {
        xd_weight_desc w = { .name = names[i], .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 5, 3 } };
        w.init = (xd_init){ XD_INIT_NORMAL, .scale = 0.5f };
        w.traits.shared_embedding = i < 2;
        w.traits.shared = i == 1;
        CHECK(xd_weight_add(xd_model_root(model), &w, &weights[i]) == XD_OK);
    }
    CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK);
    CHECK(xd_model_init_weights(model) == XD_OK);
    const void *embed = xd_weight_describe(weights[0]).value;
    CHECK(memcmp(embed, xd_weight_describe(weights[1]).value, 15 * sizeof(float)) == 0);
    CHECK(memcmp(embed, xd_weight_describe(weights[2]).value, 15 * sizeof(float)) != 0);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

XD_TEST(first_values_are_rounded_to_the_weights_type_and_given_ones_stay) {
    enum { N = 9000 }; /* several blocks */
    static float expected[N], kept[5] = { 1, 2, 3, 4, 5 };
    static uint16_t given[N];
    xd_ctx *ctx = plain_ctx();
    xd_model *model = NULL;
    CHECK(xd_model_create(ctx, &(xd_model_desc){ .seed = 3 }, &model) == XD_OK);
    xd_weight_desc half = vector("half", N), mine = vector("mine", 5), uniform = vector("uniform", N);
    half.dtype = XD_DTYPE_BF16;
    half.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 2.0f };
    mine.value = kept;
    mine.room = 5;
    uniform.init = (xd_init){ XD_INIT_UNIFORM, 1.0f, 0.25f };
    xd_weight_desc scalar = { .name = "scalar",
                              .dtype = XD_DTYPE_F64,
                              .init = { XD_INIT_CONSTANT, 0.5f, 0.0f } };
    xd_weight_desc table = vector("table", 3);
    table.buffer = true;
    table.init = (xd_init){ XD_INIT_CONSTANT, 9.0f, 0.0f };
    add(xd_model_root(model), half);
    add(xd_model_root(model), mine);
    add(xd_model_root(model), uniform);
    xd_weight *computed = add(xd_model_root(model), table);
    add(xd_model_root(model), scalar);
    CHECK(xd_weight_set_ready(computed) == XD_ERROR_STATE);
    CHECK(xd_model_seal(model) == XD_OK);
    CHECK(xd_model_init_weights(model) == XD_ERROR_STATE);
    CHECK(xd_model_allocate(model) == XD_OK);
    CHECK(xd_weight_set_ready(computed) == XD_OK);
    ((float *)xd_weight_describe(computed).value)[0] = 4.0f;
    CHECK(xd_model_init_weights(model) == XD_OK);
    whole_values(3, "half", N, 2.0f, expected);
    for (int i = 0; i < N; i++) given[i] = xd_bf16_from_f32(expected[i]);
    CHECK(memcmp(xd_weight_describe(xd_model_find_weight(model, "half")).value, given, sizeof given) == 0);
    CHECK(kept[0] == 1.0f && kept[4] == 5.0f &&
          xd_weight_describe(xd_model_find_weight(model, "mine")).value == kept);
    CHECK(((const float *)xd_weight_describe(computed).value)[0] == 4.0f);
    CHECK(((const float *)xd_weight_describe(computed).value)[1] == 0.0f);
    CHECK(*(const double *)xd_weight_describe(xd_model_find_weight(model, "scalar")).value == 0.5);
    const float *spread = (const float *)xd_weight_describe(xd_model_find_weight(model, "uniform")).value;
    double sum = 0.0, low = 2.0, high = 0.0;
    for (int i = 0; i < N; i++) {
        sum += (double)spread[i];
        low = fmin(low, (double)spread[i]);
        high = fmax(high, (double)spread[i]);
    }
    CHECK_NEAR(sum / N, 1.0, 0.01);
    CHECK(low >= 0.75 && low < 0.751 && high <= 1.25 && high > 1.249);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

XD_TEST(storage_in_one_flat_buffer_of_the_caller_needs_nothing_of_the_librarys) {
    static float values[50 * 8 + 8], gradients[50 * 8 + 8];
    xd_ctx *ctx = plain_ctx();
    xd_model *model = NULL;
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    xd_weight_desc first = matrix("wte", 50, 8), second = vector("norm", 8);
    first.value = values;
    first.gradient = gradients;
    second.value = values + 50 * 8;
    second.gradient = gradients + 50 * 8;
    first.room = 50 * 8;
    second.room = 8;
    add(xd_model_root(model), first);
    add(xd_model_root(model), second);
    CHECK(xd_model_seal(model) == XD_OK);
    xd_memory_bytes bytes = { 0, 0 };
    CHECK(PLANNED_MEMORY(ctx, xd_model_allocate(model), &bytes) == XD_OK && bytes.host == 0);
    CHECK(xd_model_allocate(model) == XD_OK);
    xd_param params[2];
    int64_t count = 0;
    CHECK(xd_model_params(model, 2, params, &count) == XD_OK);
    CHECK(params[1].value == values + 400 && params[1].gradient == gradients + 400);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

/* ---- bad input ---- */

typedef struct refusal {
    xd_weight_desc desc;
    xd_result result;
    const char *text;
} refusal;

XD_TEST(a_bad_weight_is_refused_with_its_numbers_and_changes_nothing) {
    static float room[4];
    const xd_topology line = { .axis_count = 1, .rank_count = 2, .size = { 2 } };
    const xd_layout_desc cut = { .ndim = 1, .shape = { 6 }, .topology = &line };
    xd_ctx *ctx = plain_ctx();
    xd_layout *layout = NULL;
    CHECK(xd_layout_create(ctx, &cut, &layout) == XD_OK);
    const int64_t huge = INT64_C(1) << 62;
#define W(...)         \
    (xd_weight_desc) { \
        __VA_ARGS__    \
    }
    const refusal bad[] = {
        { W(.dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "has no name" },
        { W(.name = "", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "has no name" },
        { W(.name = "a..b", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "\"a..b\" has an empty component" },
        { W(.name = ".a", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "empty component" },
        { W(.name = "a.", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "empty component" },
        { W(.name = "\xff", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "not UTF-8" },
        { W(.name = "__metadata__", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "reserved for files" },
        { W(.name = "taken", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "\"taken\" is that of a weight" },
        { W(.name = "block", .dtype = XD_DTYPE_F32), XD_ERROR_ARGUMENT, "\"block\" is that of a block" },
        { W(.name = "a"), XD_ERROR_ARGUMENT, "no dtype" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 9), XD_ERROR_ARGUMENT,
          "9 dimensions, allowed are 8" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = -1), XD_ERROR_ARGUMENT, "-1 dimensions" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { -4 }), XD_ERROR_SHAPE,
          "dimension 0 of -4" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { huge, 4 }), XD_ERROR_SHAPE,
          "overflow" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 8 }, .stored_rows = 7), XD_ERROR_SHAPE,
          "7 rows are stored, it has 8" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .stored_rows = 7), XD_ERROR_SHAPE,
          "7 rows are stored, it has 0" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 5 }, .layout = layout), XD_ERROR_SHAPE,
          "dimension 0 is 5, in its layout 6" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 6, 1 }, .layout = layout),
          XD_ERROR_SHAPE, "2 dimensions, its layout 1" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 5 }, .value = room, .room = 4),
          XD_ERROR_SHAPE, "room for 4 elements, this rank holds 5" },
        { W(.name = "a", .dtype = XD_DTYPE_I64), XD_ERROR_ARGUMENT, "I64 is trained" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .transient = true), XD_ERROR_ARGUMENT,
          "transient but no buffer" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .buffer = true, .gradient = room, .room = 1),
          XD_ERROR_ARGUMENT, "not trained but has a gradient" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .init = { XD_INIT_NORMAL, 0.0f, NAN }), XD_ERROR_ARGUMENT,
          "scale nan" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .init = { (xd_init_kind)9, 0.0f, 0.0f }), XD_ERROR_ARGUMENT,
          "init 9" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .traits = { .decay = (xd_decay)7 }), XD_ERROR_ARGUMENT,
          "decay 7" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .tied_to = "nobody"), XD_ERROR_MISSING,
          "\"nobody\", which is no weight" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .tied_to = "block"), XD_ERROR_MISSING,
          "\"block\", which is no weight" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 }, .tied_to = "taken"),
          XD_ERROR_SHAPE, "dimension 0 is 4, of \"taken\", to which it is tied, 3" },
        { W(.name = "a", .dtype = XD_DTYPE_BF16, .ndim = 1, .shape = { 3 }, .tied_to = "taken"),
          XD_ERROR_SHAPE, "BF16" },
        { W(.name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 3 }, .tied_to = "taken", .value = room,
            .room = 4),
          XD_ERROR_ARGUMENT, "those of its owner" },
    };
    xd_model *model = NULL;
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    child(xd_model_root(model), "block");
    add(xd_model_root(model), vector("taken", 3));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        xd_weight *out = NULL;
        CHECK(xd_weight_add(xd_model_root(model), &bad[i].desc, &out) == bad[i].result);
        CHECK(out == NULL);
        if (!strstr(xd_last_error(ctx)->message, bad[i].text))
            CHECK_EQ_STR(xd_last_error(ctx)->message, bad[i].text);
    }
    CHECK(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = "taken" }, NULL) == XD_ERROR_ARGUMENT);
    CHECK(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = "b", .unit = (xd_shard_unit)3 },
                       NULL) == XD_ERROR_ARGUMENT);
    CHECK(xd_model_seal(model) == XD_OK);
    CHECK_EQ_INT(xd_model_describe(model).weight_count, 1);
    xd_model_destroy(model);
    xd_layout_destroy(layout);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_sealed_model_takes_no_more_and_a_wrong_order_or_shared_storage_no_seal) {
    static float room[8];
    xd_ctx *ctx = plain_ctx();
    xd_model *model = NULL;
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    xd_block *block = child(xd_model_root(model), "first");
    add(block, vector("w", 3));
    xd_weight_desc tie = vector("head", 3); /* the root's weights come before its children's */
    tie.tied_to = "first.w";
    add(xd_model_root(model), tie);
    CHECK(xd_model_seal(model) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "\"head\" is tied to \"first.w\", which comes after it"));
    xd_model_destroy(model);

    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    xd_weight_desc low = vector("low", 5), high = vector("high", 4);
    low.value = room;
    low.room = 5;
    high.gradient = room + 4;
    high.room = 4;
    add(xd_model_root(model), low);
    add(xd_model_root(model), high);
    CHECK(xd_model_seal(model) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "\"low\" and \"high\" share 4 bytes"));
    xd_model_destroy(model);

    model = language_model(ctx, 1, 1);
    CHECK(xd_model_allocate(model) == XD_ERROR_STATE);
    CHECK(xd_model_seal(model) == XD_OK && xd_model_seal(model) == XD_ERROR_STATE);
    CHECK(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = "late" }, NULL) == XD_ERROR_STATE);
    const xd_weight_desc late = vector("late", 1);
    CHECK(xd_weight_add(xd_model_root(model), &late, NULL) == XD_ERROR_STATE);
    xd_model_destroy(model);
    xd_model_destroy(NULL);
    xd_ctx_destroy(ctx);
}

/* ---- ranks ---- */

enum { SAME = 0, SEED, SHAPE, TRAIT, SHORTER, UNSEALED, WAYS };

static int way; /* in which rank 2 differs */

static xd_result compare(xd_comm *world, void *user) {
    static const char *const told[WAYS] = {
        "",
        "rank 2 another seed than rank 0",
        "weight 4: \"layers.0.mlp.up.weight\" on rank 0, \"layers.0.mlp.up.weight\" on "
        "rank 2 with another",
        "weight 0: \"embed.weight\" on rank 0, \"embed.weight\" on rank 2 with another",
        "weight 5: \"layers.1.norm.weight\" on rank 0, \"nothing\" on rank 2",
        "sealed"
    };
    const bool odd = xd_comm_rank(world) == 2;
    xd_ctx *ctx = xd_comm_ctx(world);
    (void)user;
    xd_model *model = language_model_of(ctx, odd && way == SEED ? 2 : 1, odd && way == SHORTER ? 1 : 2,
                                        odd && way == SHAPE ? 8 : 24);
    if (odd && way == TRAIT)
        CHECK(xd_weight_set_frozen(xd_model_find_weight(model, "embed.weight"), true) == XD_OK);
    if (!odd || way != UNSEALED) CHECK(xd_model_seal(model) == XD_OK);
    const xd_result result = xdi_model_agree(model, world);
    if (way == SAME) CHECK(result == XD_OK);
    if (way == UNSEALED) CHECK(result == (odd ? XD_ERROR_STATE : XD_ERROR_PEER));
    if (way != SAME && way != UNSEALED) CHECK(result == XD_ERROR_MISMATCH);
    if (way != SAME && way != UNSEALED) CHECK_EQ_INT(xd_last_error(ctx)->culprit, 2);
    if (!strstr(xd_last_error(ctx)->message, told[way])) CHECK_EQ_STR(xd_last_error(ctx)->message, told[way]);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(ranks_that_describe_different_models_all_learn_where_they_differ) {
    for (way = SAME; way < WAYS; way++) CHECK(xd_run_threads(4, NULL, compare, NULL, NULL) == XD_OK);
}

typedef struct rank_case {
    int tp;         /* of 4 ranks; the others are data ranks */
    bool knows;     /* .rank is set */
    int refused[4]; /* out, by rank */
    char said[512]; /* out, by rank 3 */
} rank_case;

static xd_result add_split_weight(xd_comm *world, void *argument) {
    rank_case *c = (rank_case *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    const xd_mesh_desc grid = { .axes = { { "dp", 4 / c->tp }, { "tp", c->tp } } };
    xd_mesh *mesh = NULL, *columns = NULL;
    xd_layout *rows = NULL;
    xd_model *model = NULL;
    XD_TRY(xd_mesh_create(world, &grid, &mesh));
    XD_TRY(xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = "tp" }, &columns));
    const xd_layout_desc split = {
        .ndim = 2, .shape = { 8, 8 }, .topology = xd_mesh_topology(columns), .placement = { { XD_SHARD } }
    };
    XD_TRY(xd_layout_create(ctx, &split, &rows));
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .rank = c->knows ? rank : 0 }, &model));
    xd_weight_desc w = matrix("w", 8, 8);
    w.layout = rows;
    c->refused[rank] = xd_weight_add(xd_model_root(model), &w, NULL) == XD_ERROR_ARGUMENT;
    if (rank == 3) snprintf(c->said, sizeof c->said, "%s", xd_last_error(ctx)->message);
    xd_model_destroy(model);
    xd_layout_destroy(rows);
    xd_mesh_destroy(columns);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

XD_TEST(a_rank_that_was_not_set_is_refused_where_a_layout_names_it) {
    rank_case all = { 4, false, { 0 }, "" }, known = { 4, true, { 0 }, "" }, pairs = { 2, false, { 0 }, "" };
    CHECK(xd_run_threads(4, NULL, add_split_weight, &all, NULL) == XD_OK);
    CHECK(xd_run_threads(4, NULL, add_split_weight, &known, NULL) == XD_OK);
    CHECK(xd_run_threads(4, NULL, add_split_weight, &pairs, NULL) == XD_OK);
    for (int r = 0; r < 4; r++) {
        CHECK_EQ_INT(all.refused[r], r > 0);
        CHECK_EQ_INT(known.refused[r], 0);
        CHECK_EQ_INT(pairs.refused[r], r > 1); /* of 0 and 1 each may be number 0 */
    }
    CHECK(strstr(all.said, "rank is 0, but this is rank 3"));
}

XD_TEST_MAIN()
