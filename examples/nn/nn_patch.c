/* nn_patch.c - the patch transformer's memory. */
#include "nn_patch.h"

#include "nn_patch_inside.h"

#include <string.h>

/* Rows of all ranks that are computed together: few enough to stay in the cache. Sums over samples depend on it. */
enum { NN_PATCH_ROWS = 512, NN_PATCH_MOST_SAMPLES = 1 << 20 };

/* ---- memory ---- */

static float *nn_patch_floats(xd_arena *arena, int64_t count) {
    return (float *)xd_arena_take_pointer(arena, (size_t)count * sizeof(float));
}

static nn_layer_widths nn_patch_widths(const nn_patch *p) {
    const nn_layer_widths w = { p->config.width, p->heads.end - p->heads.begin,
                                p->inner.end - p->inner.begin };
    return w;
}

static void nn_patch_place_trace(const nn_patch *p, xd_arena *arena, int64_t rows, nn_patch_trace *t) {
    const nn_layer_widths w = nn_patch_widths(p);
    for (int i = 0; i < 2; i++) {
        t->normed[i] = nn_patch_floats(arena, rows * w.width);
        t->inverse[i] = nn_patch_floats(arena, rows);
    }
    t->qkv = nn_patch_floats(arena, rows * 3 * w.heads);
    t->probs = nn_patch_floats(arena, rows * p->heads.leaves.count * p->at.all);
    t->keys = p->at.comm ? nn_patch_floats(arena, rows / p->grid.tokens * p->at.all * 2 * w.heads) : NULL;
    t->mixed = nn_patch_floats(arena, rows * w.heads);
    t->attended = nn_patch_floats(arena, rows * w.width);
    t->inner = nn_patch_floats(arena, rows * w.inner);
    t->sigmoid = nn_patch_floats(arena, rows * w.inner);
    t->fed = nn_patch_floats(arena, rows * w.width);
}

static void nn_patch_place_slot(const nn_patch *p, xd_arena *arena, nn_patch_slot *slot) {
    const int64_t width = p->config.width, samples = p->samples;
    const int64_t rows = (slot->keeps ? samples : p->chunk) * p->grid.tokens;
    nn_conditioned_place(&p->time, arena, samples, &slot->time);
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
    const int64_t scores = rows * p->heads.leaves.count * p->at.all;
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
    const int64_t width = p->config.width, map = (p->pixels + 1) * (width + 1);
    const int64_t condition = p->samples * 8 * width, position = p->at.all * width;
    const int64_t least = nn_patch_larger(condition, nn_patch_larger(map, position));
    const int64_t room = nn_sums_room(nn_patch_larger(least, nn_patch_layer_largest(nn_patch_widths(p))));
    p->most = nn_patch_larger(nn_patch_larger(condition, map + position),
                              nn_patch_layer_floats(nn_patch_widths(p)));
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
    nn_condition_place(&p->time, arena);
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
    p->heads.elements = p->inner.elements = rows * width;
    p->heads.sum = p->inner.sum = p->config.split ? nn_patch_floats(arena, rows * width) : NULL;
    nn_patch_place_attention(p, arena);
    nn_patch_place_sums(p, arena);
}

static bool nn_patch_allocate(nn_patch *p) {
    const size_t slots = (size_t)p->slot_count + 1, layers = (size_t)p->config.layers;
    p->slots = (nn_patch_slot *)xd_allocate(p->ctx, slots * sizeof *p->slots);
    p->traces = (nn_patch_trace *)xd_allocate(p->ctx, (slots * layers + 1) * sizeof *p->traces);
    p->blocks = (xd_block **)xd_allocate(p->ctx, (layers + 1) * sizeof *p->blocks);
    p->features.number = (int *)xd_allocate(p->ctx, layers * sizeof *p->features.number);
    p->features.elements = (int64_t *)xd_allocate(p->ctx, layers * sizeof *p->features.elements);
    if (!p->slots || !p->traces || !p->blocks || !p->features.number || !p->features.elements) return false;
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

static xd_result nn_patch_make_stacks(nn_patch *p) {
    if (!p->config.split) return XD_OK;
    const xd_leaf_stack_desc heads = { .leaves = p->heads.leaves, .elements = p->heads.elements };
    const xd_leaf_stack_desc inner = { .leaves = p->inner.leaves, .elements = p->inner.elements };
    XD_TRY(xd_leaf_stack_create(p->ctx, &heads, &p->heads.stack));
    return xd_leaf_stack_create(p->ctx, &inner, &p->inner.stack);
}

xd_result nn_patch_capture(nn_patch *p, const int *layers, int count) {
    return nn_features_choose(p->ctx, &p->features, "layer", layers, count);
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
    const int across = config->side / config->patch;
    p->ctx = ctx;
    p->config = *config;
    p->samples = samples;
    p->slot_count = slots;
    p->pixels = (int64_t)config->patch * config->patch;
    p->at = nn_positions_of(config->cp, (int64_t)across * across);
    p->grid.tokens = p->at.count * p->at.each;
    p->heads = nn_patch_heads(config);
    p->inner = nn_patch_inner(config);
    p->grid.width = config->width;
    p->grid.block = p->at.each;
    p->features.blocks = config->layers;
    p->time.frequencies = config->frequencies;
    p->time.labels = config->labels;
    p->time.width = config->width;
    p->chunk = p->at.all < NN_PATCH_ROWS ? NN_PATCH_ROWS / p->at.all : 1;
    if (p->chunk > samples) p->chunk = samples;
    xd_result result = nn_patch_allocate(p)
                           ? nn_network_blocks(ctx, model, config->layers, p->blocks)
                           : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld samples in %d slots",
                                     (long long)samples, slots);
    if (result == XD_OK) result = nn_patch_make_stacks(p);
    if (result != XD_OK) {
        nn_patch_destroy(p);
        return result;
    }
    nn_condition_fill(&p->time);
    nn_features_begin(&p->features, p->at.all * p->grid.width);
    *out = p;
    return XD_OK;
}

void nn_patch_destroy(nn_patch *p) {
    if (!p) return;
    xd_ctx *ctx = p->ctx;
    xd_leaf_stack_destroy(p->heads.stack);
    xd_leaf_stack_destroy(p->inner.stack);
    xd_release(ctx, p->memory);
    xd_release(ctx, (void *)p->blocks);
    xd_release(ctx, p->features.number);
    xd_release(ctx, p->features.elements);
    xd_release(ctx, p->traces);
    xd_release(ctx, p->slots);
    xd_release(ctx, p);
}
