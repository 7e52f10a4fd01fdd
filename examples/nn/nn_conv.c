/* nn_conv.c - the convolutional network's memory. */
#include "nn_conv.h"

#include "nn_conv_inside.h"

#include <string.h>

/* Rows that are computed together: few enough to stay in the cache. Sums over samples depend on it. */
enum { NN_CONV_ROWS = 512, NN_CONV_MOST_SAMPLES = 1 << 20 };

/* ---- memory ---- */

static float *nn_conv_floats(xd_arena *arena, int64_t count) {
    return (float *)xd_arena_take_pointer(arena, (size_t)count * sizeof(float));
}

static void nn_conv_place_trace(const nn_conv *p, xd_arena *arena, int64_t samples, nn_conv_trace *t) {
    t->normed = nn_conv_floats(arena, samples * p->places * t->channels);
    t->inverse = nn_conv_floats(arena, samples * t->groups);
}

/* Of the stream, or of the channels between the convolutions that are here. */
static void nn_conv_size_trace(const nn_conv *p, bool here, nn_conv_trace *t) {
    t->channels = here ? p->pieces.end - p->pieces.begin : p->config.inner;
    t->groups = here ? p->pieces.leaves.count : p->config.groups;
}

static void nn_conv_place_slot(const nn_conv *p, xd_arena *arena, nn_conv_slot *slot) {
    const int64_t samples = p->samples;
    const int64_t kept = slot->keeps ? samples : p->chunk;
    nn_conditioned_place(&p->time, arena, samples, &slot->time);
    slot->pixels = nn_conv_floats(arena, kept * p->places * p->config.channels);
    nn_conv_size_trace(p, false, &slot->last);
    nn_conv_place_trace(p, arena, kept, &slot->last);
    for (int i = 0; i < 2 * p->config.blocks; i++) {
        nn_conv_size_trace(p, i % 2 == 1, &slot->traces[i]);
        if (slot->keeps || i < 2) nn_conv_place_trace(p, arena, kept, &slot->traces[i]);
        if (!slot->keeps) slot->traces[i] = slot->traces[i % 2];
    }
}

/* Everything, once to count and once to place. */
static void nn_conv_place(nn_conv *p, xd_arena *arena) {
    const int64_t inner = p->config.inner, channels = p->config.channels, rows = p->chunk * p->places;
    for (int i = 0; i <= p->slot_count; i++) nn_conv_place_slot(p, arena, &p->slots[i]);
    nn_condition_place(&p->time, arena);
    p->x = nn_conv_floats(arena, p->samples * p->places * inner);
    p->d_x = nn_conv_floats(arena, p->samples * p->places * inner);
    p->d_active = nn_conv_floats(arena, p->samples * p->config.embedding);
    p->room.columns = nn_conv_floats(arena, rows * NN_CONV_SEEN * (inner > channels ? inner : channels));
    p->room.affine = nn_conv_floats(arena, rows * inner);
    p->room.sigmoid = nn_conv_floats(arena, rows * inner);
    p->room.read = nn_conv_floats(arena, rows * inner);
    p->room.branch = nn_conv_floats(arena, rows * inner);
    p->room.d_branch = nn_conv_floats(arena, rows * inner);
    p->room.time = nn_conv_floats(arena, p->chunk * inner);
    p->room.d_active = nn_conv_floats(arena, p->chunk * p->config.embedding);
    p->room.pixels = nn_conv_floats(arena, rows * channels);
    p->pieces.elements =
        p->chunk * (p->places * inner > p->config.embedding ? p->places * inner : p->config.embedding);
    p->pieces.sum = p->config.split ? nn_conv_floats(arena, p->pieces.elements) : NULL;
}

static bool nn_conv_allocate(nn_conv *p) {
    const size_t slots = (size_t)p->slot_count + 1, blocks = (size_t)p->config.blocks;
    p->slots = (nn_conv_slot *)xd_allocate(p->ctx, slots * sizeof *p->slots);
    p->traces = (nn_conv_trace *)xd_allocate(p->ctx, slots * 2 * blocks * sizeof *p->traces);
    p->blocks = (xd_block **)xd_allocate(p->ctx, (blocks + 1) * sizeof *p->blocks);
    p->features.number = (int *)xd_allocate(p->ctx, blocks * sizeof *p->features.number);
    p->features.elements = (int64_t *)xd_allocate(p->ctx, blocks * sizeof *p->features.elements);
    if (!p->slots || !p->traces || !p->blocks || !p->features.number || !p->features.elements) return false;
    for (size_t i = 0; i < slots; i++) {
        p->slots[i].keeps = i + 1 < slots;
        p->slots[i].samples = -1;
        p->slots[i].traces = p->traces + i * 2 * blocks;
    }
    xd_arena plan = xd_arena_over(NULL, 0);
    nn_conv_place(p, &plan);
    p->memory = xd_allocate(p->ctx, plan.peak + XD_ARENA_ALIGNMENT);
    if (!p->memory) return false;
    const size_t past = (size_t)((uintptr_t)p->memory % XD_ARENA_ALIGNMENT);
    xd_arena arena =
        xd_arena_over((char *)p->memory + (XD_ARENA_ALIGNMENT - past) % XD_ARENA_ALIGNMENT, plan.peak);
    nn_conv_place(p, &arena);
    return true;
}

xd_result nn_conv_capture(nn_conv *p, const int *blocks, int count) {
    return nn_features_choose(p->ctx, &p->features, "block", blocks, count);
}

xd_result nn_conv_create(xd_ctx *ctx, const nn_conv_config *config, xd_model *model, int64_t samples,
                         int slots, nn_conv **out) {
    XD_TRY(nn_conv_check(ctx, config));
    XD_REQUIRE(ctx, samples >= 0 && samples <= NN_CONV_MOST_SAMPLES && slots >= 0, XD_ERROR_ARGUMENT,
               "%lld samples of at most %d in %d slots", (long long)samples, (int)NN_CONV_MOST_SAMPLES,
               slots);
    nn_conv *p = (nn_conv *)xd_allocate(ctx, sizeof *p);
    if (!p) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a convolutional network's passes");
    p->ctx = ctx;
    p->config = *config;
    p->samples = samples;
    p->slot_count = slots;
    p->places = (int64_t)config->height * config->width;
    p->chunk = p->places < NN_CONV_ROWS ? NN_CONV_ROWS / p->places : 1;
    if (p->chunk > samples) p->chunk = samples;
    p->pieces = nn_conv_channels(config);
    p->features.blocks = config->blocks;
    p->time.frequencies = config->frequencies;
    p->time.labels = config->labels;
    p->time.width = config->embedding;
    xd_result result = nn_conv_allocate(p)
                           ? nn_network_blocks(ctx, model, config->blocks, p->blocks)
                           : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld samples in %d slots",
                                     (long long)samples, slots);
    const xd_leaf_stack_desc pieces = { .leaves = p->pieces.leaves, .elements = p->pieces.elements };
    if (result == XD_OK && config->split) result = xd_leaf_stack_create(ctx, &pieces, &p->pieces.stack);
    if (result != XD_OK) {
        nn_conv_destroy(p);
        return result;
    }
    nn_condition_fill(&p->time);
    nn_features_begin(&p->features, p->places * config->inner);
    *out = p;
    return XD_OK;
}

void nn_conv_destroy(nn_conv *p) {
    if (!p) return;
    xd_ctx *ctx = p->ctx;
    xd_leaf_stack_destroy(p->pieces.stack);
    xd_release(ctx, p->memory);
    xd_release(ctx, p->features.elements);
    xd_release(ctx, p->features.number);
    xd_release(ctx, (void *)p->blocks);
    xd_release(ctx, p->traces);
    xd_release(ctx, p->slots);
    xd_release(ctx, p);
}
