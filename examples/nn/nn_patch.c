/* nn_patch.c - the patch transformer's description and memory. */
#include "nn_patch.h"

#include "nn_patch_inside.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Rows of all ranks that are computed together: few enough to stay in the cache. Sums over samples depend on it. */
enum { NN_PATCH_ROWS = 512, NN_PATCH_MOST_SAMPLES = 1 << 20 };

nn_patch_config nn_patch_defaults(void) {
    const nn_patch_config c = { 16, 4, 96, 4, 4, 240, 64, 11, NULL };
    return c;
}

/* ---- description ---- */

static xd_result nn_patch_check(xd_ctx *ctx, const nn_patch_config *c) {
    XD_REQUIRE(ctx, c->side > 0 && c->patch > 0 && c->side % c->patch == 0 && c->side <= 1024,
               XD_ERROR_ARGUMENT, "images of side %d are not cut into patches of side %d", c->side, c->patch);
    const int tokens = c->side / c->patch * (c->side / c->patch);
    XD_REQUIRE(ctx, tokens % 8 == 0, XD_ERROR_ARGUMENT,
               "side %d and patch %d give %d tokens, not a multiple of 8", c->side, c->patch, tokens);
    XD_REQUIRE(ctx, c->heads > 0 && c->heads < 1024 && c->width > 0 && c->width % (8 * c->heads) == 0,
               XD_ERROR_ARGUMENT, "width %d is not a multiple of 8 for each of %d heads", c->width, c->heads);
    XD_REQUIRE(ctx, c->layers > 0 && c->layers < 10000 && c->ffn > 0, XD_ERROR_ARGUMENT,
               "%d layers of inner width %d", c->layers, c->ffn);
    XD_REQUIRE(ctx, c->frequencies > 0 && c->frequencies % 2 == 0 && c->labels > 0, XD_ERROR_ARGUMENT,
               "%d sines and cosines are not an even number, or %d labels are none", c->frequencies,
               c->labels);
    return XD_OK;
}

/* Samples are rows of pixels, of which each rank has a run. */
static xd_result nn_patch_check_cut(xd_ctx *ctx, const nn_patch_config *c) {
    const int across = c->side / c->patch, ranks = c->cp ? xd_comm_size(c->cp) : 1;
    const nn_positions at = nn_positions_of(c->cp, (int64_t)across * across);
    XD_REQUIRE(ctx, ranks <= NN_POSITION_BLOCKS, XD_ERROR_ARGUMENT, "%d ranks share %d blocks of tokens",
               ranks, (int)NN_POSITION_BLOCKS);
    for (int r = 1; r < ranks; r++) {
        const xd_interval tokens = nn_positions_tokens(&at, r);
        XD_REQUIRE(ctx, c->patch == 1 || tokens.begin % across == 0, XD_ERROR_ARGUMENT,
                   "rank %d of %d begins with token %lld, within a row of %d patches", r, ranks,
                   (long long)tokens.begin, across);
    }
    return XD_OK;
}

xd_interval nn_patch_pixels(const nn_patch_config *c) {
    const int64_t across = c->side / c->patch, pixels = (int64_t)c->patch * c->patch;
    const nn_positions at = nn_positions_of(c->cp, across * across);
    const xd_interval own = { at.first * at.each * pixels, (at.first + at.count) * at.each * pixels };
    return own;
}

/* columns 0: a vector. deviation 0: begins as zeros. */
static xd_result nn_patch_add(xd_block *block, const char *name, int64_t rows, int64_t columns,
                              double deviation) {
    xd_weight_desc w;
    memset(&w, 0, sizeof w);
    w.name = name;
    w.dtype = XD_DTYPE_F32;
    w.ndim = columns ? 2 : 1;
    w.shape[0] = rows;
    w.shape[1] = columns;
    w.init.kind = deviation > 0.0 ? XD_INIT_NORMAL : XD_INIT_ZERO;
    w.init.scale = (float)deviation;
    return xd_weight_add(block, &w, NULL);
}

/* A matrix [out, in], which keeps the size of what it reads, and a bias of zeros. */
static xd_result nn_patch_add_map(xd_block *block, const char *name, int64_t out, int64_t in, bool zero) {
    char full[32];
    snprintf(full, sizeof full, "%s.weight", name);
    XD_TRY(nn_patch_add(block, full, out, in, zero ? 0.0 : 1.0 / sqrt((double)in)));
    snprintf(full, sizeof full, "%s.bias", name);
    return nn_patch_add(block, full, out, 0, 0.0);
}

static xd_result nn_patch_describe_root(const nn_patch_config *c, xd_block *root) {
    const int64_t across = c->side / c->patch, pixels = (int64_t)c->patch * c->patch, width = c->width;
    XD_TRY(nn_patch_add_map(root, "embed", width, pixels, false));
    XD_TRY(nn_patch_add(root, "position", across * across, width, 0.1));
    XD_TRY(nn_patch_add_map(root, "time", width, c->frequencies, false));
    XD_TRY(nn_patch_add(root, "label", c->labels, width, 0.1));
    XD_TRY(nn_patch_add_map(root, "common", 6 * width, width, true));
    XD_TRY(nn_patch_add_map(root, "last", 2 * width, width, true));
    XD_TRY(nn_patch_add(root, "last.table", 2, width, 0.0));
    return nn_patch_add_map(root, "out", pixels, width, true);
}

static xd_result nn_patch_describe_layer(const nn_patch_config *c, xd_block *block) {
    XD_TRY(nn_patch_add(block, "table", 6, c->width, 0.0));
    XD_TRY(nn_patch_add_map(block, "qkv", 3 * (int64_t)c->width, c->width, false));
    XD_TRY(nn_patch_add_map(block, "attended", c->width, c->width, false));
    XD_TRY(nn_patch_add_map(block, "up", c->ffn, c->width, false));
    return nn_patch_add_map(block, "down", c->width, c->ffn, false);
}

static xd_result nn_patch_describe_all(const nn_patch_config *c, xd_model *model) {
    XD_TRY(nn_patch_describe_root(c, xd_model_root(model)));
    for (int i = 0; i < c->layers; i++) {
        char name[32];
        xd_block_desc desc;
        xd_block *block;
        memset(&desc, 0, sizeof desc);
        snprintf(name, sizeof name, "blocks.%d", i);
        desc.name = name;
        desc.type = "layer";
        XD_TRY(xd_block_add(xd_model_root(model), &desc, &block));
        XD_TRY(nn_patch_describe_layer(c, block));
    }
    return xd_model_seal(model);
}

xd_result nn_patch_describe(xd_ctx *ctx, const nn_patch_config *config, uint64_t seed, xd_model **out) {
    xd_model_desc desc;
    xd_model *model;
    memset(&desc, 0, sizeof desc);
    desc.seed = seed;
    XD_TRY(nn_patch_check(ctx, config));
    XD_TRY(xd_model_create(ctx, &desc, &model));
    const xd_result result = nn_patch_describe_all(config, model);
    if (result != XD_OK) {
        xd_model_destroy(model);
        return result;
    }
    *out = model;
    return XD_OK;
}

/* ---- memory ---- */

static float *nn_patch_floats(xd_arena *arena, int64_t count) {
    return (float *)xd_arena_take_pointer(arena, (size_t)count * sizeof(float));
}

static void nn_patch_place_trace(const nn_patch *p, xd_arena *arena, int64_t rows, nn_patch_trace *t) {
    const int64_t width = p->config.width, ffn = p->config.ffn;
    for (int i = 0; i < 2; i++) {
        t->normed[i] = nn_patch_floats(arena, rows * width);
        t->inverse[i] = nn_patch_floats(arena, rows);
    }
    t->qkv = nn_patch_floats(arena, rows * 3 * width);
    t->probs = nn_patch_floats(arena, rows * p->config.heads * p->at.all);
    t->keys = p->at.comm ? nn_patch_floats(arena, rows / p->grid.tokens * p->at.all * 2 * width) : NULL;
    t->mixed = nn_patch_floats(arena, rows * width);
    t->attended = nn_patch_floats(arena, rows * width);
    t->inner = nn_patch_floats(arena, rows * ffn);
    t->sigmoid = nn_patch_floats(arena, rows * ffn);
    t->fed = nn_patch_floats(arena, rows * width);
}

static void nn_patch_place_slot(const nn_patch *p, xd_arena *arena, nn_patch_slot *slot) {
    const int64_t width = p->config.width, samples = p->samples;
    const int64_t rows = (slot->keeps ? samples : p->chunk) * p->grid.tokens;
    slot->labels = (int32_t *)xd_arena_take_pointer(arena, (size_t)samples * sizeof *slot->labels);
    slot->features = nn_patch_floats(arena, samples * p->config.frequencies);
    slot->embedding = nn_patch_floats(arena, samples * width);
    slot->sigmoid = nn_patch_floats(arena, samples * width);
    slot->active = nn_patch_floats(arena, samples * width);
    slot->common = nn_patch_floats(arena, samples * 6 * width);
    slot->last = nn_patch_floats(arena, samples * 2 * width);
    slot->patches = nn_patch_floats(arena, rows * p->pixels);
    slot->normed = nn_patch_floats(arena, rows * width);
    slot->inverse = nn_patch_floats(arena, rows);
    for (int i = 0; i < p->config.layers; i++) {
        if (slot->keeps || i == 0) nn_patch_place_trace(p, arena, rows, &slot->traces[i]);
        if (!slot->keeps) slot->traces[i] = slot->traces[0];
    }
}

/* For the samples of a chunk. */
static void nn_patch_place_attention(nn_patch *p, xd_arena *arena) {
    const int64_t width = p->config.width, rows = p->chunk * p->grid.tokens;
    const int64_t scores = rows * p->config.heads * p->at.all;
    nn_attention_room *room = &p->room.attention;
    room->turned = nn_patch_floats(arena, width / p->config.heads * p->at.all);
    room->scores = nn_patch_floats(arena, scores);
    if (!p->at.comm) return;
    room->sent = nn_patch_floats(arena, 2 * scores);
    room->received = nn_patch_floats(arena, 2 * scores);
    room->columns = nn_patch_floats(arena, 2 * scores);
    room->own = nn_patch_floats(arena, rows * 2 * width);
    room->all = nn_patch_floats(arena, p->chunk * p->at.all * 2 * width);
}

static int64_t nn_patch_larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Sums of a layer, of what is before and behind the layers, and of what came of time and class. */
static void nn_patch_place_sums(nn_patch *p, xd_arena *arena) {
    const int64_t width = p->config.width, ffn = p->config.ffn, map = (p->pixels + 1) * (width + 1);
    const int64_t condition = p->samples * 8 * width, position = p->at.all * width;
    const int64_t least = nn_patch_larger(condition, nn_patch_larger(map, position));
    const int64_t room = nn_sums_room(nn_patch_larger(least, nn_patch_layer_largest(width, ffn)));
    p->most = nn_patch_larger(nn_patch_larger(condition, map + position), nn_patch_layer_floats(width, ffn));
    p->sums.at = &p->at;
    p->sums.nodes = nn_patch_floats(arena, nn_positions_nodes(&p->at) * p->most);
    p->sums.root = p->at.comm ? nn_patch_floats(arena, p->most) : NULL;
    p->sums.room = nn_patch_floats(arena, room);
}

/* Everything, once to count and once to place. */
static void nn_patch_place(nn_patch *p, xd_arena *arena) {
    const int64_t width = p->config.width, rows = p->chunk * p->grid.tokens;
    const int64_t wide = p->config.ffn > 3 * width ? p->config.ffn : 3 * width;
    for (int i = 0; i <= p->slot_count; i++) nn_patch_place_slot(p, arena, &p->slots[i]);
    p->frequency = (double *)xd_arena_take_pointer(arena, (size_t)p->config.frequencies / 2 * sizeof(double));
    p->x = nn_patch_floats(arena, p->samples * p->grid.tokens * width);
    p->d_x = nn_patch_floats(arena, p->samples * p->grid.tokens * width);
    p->d_condition = nn_patch_floats(arena, p->at.count * p->samples * 8 * width);
    p->d_active = nn_patch_floats(arena, p->samples * width);
    p->raw = nn_patch_floats(arena, rows * p->pixels);
    p->room.common = nn_patch_floats(arena, p->chunk * 6 * width);
    p->room.d_common = nn_patch_floats(arena, p->at.count * p->chunk * 6 * width);
    p->room.read = nn_patch_floats(arena, rows * width);
    p->room.d_branch = nn_patch_floats(arena, rows * width);
    p->room.wide = nn_patch_floats(arena, rows * wide);
    p->room.d_wide = nn_patch_floats(arena, rows * wide);
    nn_patch_place_attention(p, arena);
    nn_patch_place_sums(p, arena);
}

static bool nn_patch_allocate(nn_patch *p) {
    const size_t slots = (size_t)p->slot_count + 1, layers = (size_t)p->config.layers;
    p->slots = (nn_patch_slot *)xd_allocate(p->ctx, slots * sizeof *p->slots);
    p->traces = (nn_patch_trace *)xd_allocate(p->ctx, (slots * layers + 1) * sizeof *p->traces);
    p->blocks = (xd_block **)xd_allocate(p->ctx, (layers + 1) * sizeof *p->blocks);
    p->captured = (int *)xd_allocate(p->ctx, layers * sizeof *p->captured);
    p->feature_elements = (int64_t *)xd_allocate(p->ctx, layers * sizeof *p->feature_elements);
    if (!p->slots || !p->traces || !p->blocks || !p->captured || !p->feature_elements) return false;
    for (size_t i = 0; i < slots; i++) {
        p->slots[i].keeps = i + 1 < slots;
        p->slots[i].samples = -1;
        p->slots[i].traces = p->traces + i * layers;
    }
    xd_arena plan = xd_arena_over(NULL, 0);
    nn_patch_place(p, &plan);
    p->memory = xd_allocate(p->ctx, plan.peak + XD_ARENA_ALIGNMENT);
    if (!p->memory) return false;
    const size_t past = (size_t)((uintptr_t)p->memory % XD_ARENA_ALIGNMENT);
    xd_arena arena =
        xd_arena_over((char *)p->memory + (XD_ARENA_ALIGNMENT - past) % XD_ARENA_ALIGNMENT, plan.peak);
    nn_patch_place(p, &arena);
    memset(p->sums.nodes, 0, (size_t)(nn_positions_nodes(&p->at) * p->most) * sizeof *p->sums.nodes);
    return true;
}

static xd_result nn_patch_find_blocks(nn_patch *p, xd_model *model) {
    for (int i = 0; i < p->config.layers; i++) {
        char name[32];
        snprintf(name, sizeof name, "blocks.%d", i);
        p->blocks[i] = xd_model_find_block(model, name);
        XD_REQUIRE(p->ctx, p->blocks[i], XD_ERROR_ARGUMENT, "the model has no block \"%s\" of %d layers",
                   name, p->config.layers);
    }
    p->blocks[p->config.layers] = xd_model_root(model);
    return XD_OK;
}

static void nn_patch_number_features(nn_patch *p, const int *layers, int count) {
    for (int i = 0; i < p->config.layers; i++) p->captured[i] = -1;
    for (int i = 0; i < count; i++) p->captured[layers[i]] = i;
    p->feature_count = count;
}

xd_result nn_patch_capture(nn_patch *p, const int *layers, int count) {
    XD_REQUIRE(p->ctx, count >= 0, XD_ERROR_ARGUMENT, "%d features", count);
    for (int i = 0; i < count; i++) {
        XD_REQUIRE(p->ctx, layers[i] >= 0 && layers[i] < p->config.layers, XD_ERROR_ARGUMENT,
                   "a feature behind layer %d of %d", layers[i], p->config.layers);
        XD_REQUIRE(p->ctx, i == 0 || layers[i] > layers[i - 1], XD_ERROR_ARGUMENT,
                   "a feature behind layer %d after that behind layer %d", layers[i], layers[i - 1]);
    }
    nn_patch_number_features(p, layers, count);
    return XD_OK;
}

xd_result nn_patch_create(xd_ctx *ctx, const nn_patch_config *config, xd_model *model, int64_t samples,
                          int slots, nn_patch **out) {
    XD_TRY(nn_patch_check(ctx, config));
    XD_TRY(nn_patch_check_cut(ctx, config));
    XD_REQUIRE(ctx, samples >= 0 && samples <= NN_PATCH_MOST_SAMPLES && slots >= 0, XD_ERROR_ARGUMENT,
               "%lld samples of at most %d in %d slots", (long long)samples, (int)NN_PATCH_MOST_SAMPLES,
               slots);
    nn_patch *p = (nn_patch *)xd_allocate(ctx, sizeof *p);
    if (!p) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a patch transformer's passes");
    const int across = config->side / config->patch, middle = (config->layers - 1) / 2;
    p->ctx = ctx;
    p->config = *config;
    p->samples = samples;
    p->slot_count = slots;
    p->pixels = (int64_t)config->patch * config->patch;
    p->at = nn_positions_of(config->cp, (int64_t)across * across);
    p->grid.tokens = p->at.count * p->at.each;
    p->grid.width = config->width;
    p->grid.block = p->at.each;
    p->chunk = p->at.all < NN_PATCH_ROWS ? NN_PATCH_ROWS / p->at.all : 1;
    if (p->chunk > samples) p->chunk = samples;
    xd_result result = nn_patch_allocate(p)
                           ? nn_patch_find_blocks(p, model)
                           : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld samples in %d slots",
                                     (long long)samples, slots);
    if (result != XD_OK) {
        nn_patch_destroy(p);
        return result;
    }
    for (int i = 0; i < config->frequencies / 2; i++)
        p->frequency[i] =
            config->frequencies == 2 ? 1.0 : pow(1000.0, (double)i / (config->frequencies / 2 - 1));
    for (int i = 0; i < config->layers; i++) p->feature_elements[i] = p->at.all * p->grid.width;
    nn_patch_number_features(p, &middle, 1);
    *out = p;
    return XD_OK;
}

void nn_patch_destroy(nn_patch *p) {
    if (!p) return;
    xd_ctx *ctx = p->ctx;
    xd_release(ctx, p->memory);
    xd_release(ctx, (void *)p->blocks);
    xd_release(ctx, p->captured);
    xd_release(ctx, p->feature_elements);
    xd_release(ctx, p->traces);
    xd_release(ctx, p->slots);
    xd_release(ctx, p);
}
