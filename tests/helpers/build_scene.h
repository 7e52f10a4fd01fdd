/* What tests of xd_build share: a rank's settings, and a provider of small stages whose doings can be spoilt. */
#ifndef BUILD_SCENE_H
#define BUILD_SCENE_H

#include "xdistill.h"

#include "build_ranks.h"

enum { BUILD_CALLS = 16, BUILD_LINE = 128 };

typedef struct build_scene {
    xd_ctx *ctx;
    xd_comm *world;
    int rank;
    xd_grid *grid;
    xd_built *built;
    xd_build_desc desc;
    xd_stage_hooks before, after;
    uint64_t seed;
    bool frozen, tables,
        expert;     /* what stages have: weights that do not train; a computed buffer; an expert */
    int layer_rows; /* 0 -> 2 */
    int calls;      /* of the provider */
    xd_stage_place places[BUILD_CALLS];
    char line[BUILD_LINE];
    int lines;
} build_scene;

/* A build of models that are there. */
static inline xd_result build_existing(xd_comm *world, const xd_build_desc *settings, const xd_stages *stages,
                                       xd_built **out) {
    xd_build_desc desc = *settings;
    desc.stages = stages;
    return xd_build(world, &desc, out);
}

static float build_table[64]; /* the caller's storage of computed buffers, two of each layer */

static xd_weight *build_weight(const build_scene *s, xd_block *block, const char *name, int64_t rows,
                               int64_t columns) {
    xd_weight *weight = NULL;
    xd_weight_desc d = { .name = name, .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { rows, columns } };
    d.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 0.5f };
    d.traits.frozen = s->frozen;
    CHECK(xd_weight_add(block, &d, &weight) == XD_OK);
    return weight;
}

static void build_layer(const build_scene *s, xd_model *model, int64_t number) {
    char name[32];
    xd_block *block = NULL;
    snprintf(name, sizeof name, "layers.%lld", (long long)number);
    CHECK(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = name, .type = "layer" }, &block) ==
          XD_OK);
    build_weight(s, block, "w", s->layer_rows ? s->layer_rows : 2, 3);
    xd_weight_desc d = { .name = "angles", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 2 }, .buffer = true };
    d.init = (xd_init){ XD_INIT_CONSTANT, 7.0f, 0.0f };
    CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
    d.name = "table";
    d.traits.keep_f32 = true;
    d.value = build_table + 2 * number;
    d.room = 2;
    if (s->tables) CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
    if (!s->expert) return;
    snprintf(name, sizeof name, "%d", xd_comm_rank(xd_grid_groups(s->grid)->ep));
    xd_weight_desc e = { .name = name, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    e.traits.expert = true;
    e.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 0.5f };
    CHECK(xd_block_add(block, &(xd_block_desc){ .name = "experts", .type = "experts" }, &block) == XD_OK);
    CHECK(xd_weight_add(block, &e, NULL) == XD_OK);
}

/* An embedding of 3 elements at the first place, a head of 5 at the last, layers of 6 between. */
static xd_result build_describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    build_scene *s = (build_scene *)user;
    xd_model *model = NULL;
    s->places[s->calls++ % BUILD_CALLS] = *place;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = s->seed }, &model));
    if (place->first) build_weight(s, xd_model_root(model), "embed", 1, 3);
    for (int64_t i = 0; i < place->layer_count; i++) build_layer(s, model, place->first_layer + i);
    if (place->last) build_weight(s, xd_model_root(model), "head", 5, 1);
    *out = model;
    return XD_OK;
}

static void build_write(void *user, const char *line) {
    build_scene *s = (build_scene *)user;
    snprintf(s->line, sizeof s->line, "%s", line);
    s->lines++;
}

/* sizes NULL -> all ranks are data ranks. */
static void build_open(build_scene *s, xd_comm *world, const xd_expert_desc *sizes) {
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    s->world = world;
    s->rank = xd_comm_rank(world);
    CHECK(xd_grid_create(world, sizes ? sizes : &(xd_expert_desc){ 0 }, &s->grid) == XD_OK);
    s->desc.groups = xd_grid_groups(s->grid);
    s->desc.provider = (xd_stage_provider){ build_describe, s };
    s->desc.pipeline.layer_count = 4;
    s->desc.report = (xd_build_report){ build_write, s };
    s->desc.before = &s->before;
    s->desc.after = &s->after;
    s->seed = 5;
}

static xd_result build_run(build_scene *s) {
    return xd_build(s->world, &s->desc, &s->built);
}

static void build_drop(build_scene *s) {
    xd_built_destroy(s->built);
    s->built = NULL;
    s->calls = s->lines = 0;
}

static void build_close(build_scene *s) {
    xd_built_destroy(s->built);
    xd_grid_destroy(s->grid);
}

static xd_weight_info build_info(const build_scene *s, int stage, const char *name) {
    xd_weight *w = xd_model_find_weight(xd_built_stage(s->built, stage).model, name);
    CHECK(w != NULL);
    return xd_weight_describe(w);
}

static bool build_says(const build_scene *s, const char *text) {
    const char *message = xd_last_error(s->ctx)->message;
    if (strstr(message, text)) return true;
    printf("rank %d: \"%s\" lacks \"%s\"\n", s->rank, message, text);
    return false;
}

/* The step fails on all ranks with this result, or with PEER where another rank is to blame; nothing is made. */
static void build_fails(build_scene *s, xd_result result, bool everywhere, const char *text) {
    const xd_result got = build_run(s);
    CHECK(got == result || (!everywhere && got == XD_ERROR_PEER));
    CHECK(build_says(s, text) && !s->built);
}

#endif
