/* nn_disc.c - the discriminator's description and memory. */
#include "nn_disc.h"

#include "nn_disc_inside.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Rows that are computed together: the terms of a product's block. */
enum { NN_DISC_ROWS = 256, NN_DISC_MOST_SAMPLES = 1 << 20, NN_DISC_MOST_SIDE = 4096 };

int nn_disc_groups(int channels) {
    int groups = 32;
    if (channels <= 32) return channels < 8 ? 1 : channels / 4;
    while (channels % groups != 0) groups--;
    return groups;
}

/* ---- description ---- */

static xd_result nn_disc_check_feature(xd_ctx *ctx, int head, const nn_disc_feature *f) {
    const int inner = f->channels / 2;
    XD_REQUIRE(ctx, f->channels > 0 && f->channels % 2 == 0 && f->channels <= NN_DISC_MOST_SIDE,
               XD_ERROR_ARGUMENT, "head %d reads %d channels, not an even number up to %d", head, f->channels,
               (int)NN_DISC_MOST_SIDE);
    XD_REQUIRE(ctx,
               f->height >= 2 && f->width >= 2 && f->height <= NN_DISC_MOST_SIDE &&
                   f->width <= NN_DISC_MOST_SIDE,
               XD_ERROR_ARGUMENT, "head %d reads features of %d x %d; the sides are 2 to %d", head, f->height,
               f->width, (int)NN_DISC_MOST_SIDE);
    XD_REQUIRE(ctx, inner % nn_disc_groups(inner) == 0, XD_ERROR_ARGUMENT,
               "head %d: %d channels behind the convolution are not a multiple of %d groups", head, inner,
               nn_disc_groups(inner));
    return XD_OK;
}

static xd_result nn_disc_check(xd_ctx *ctx, const nn_disc_config *c) {
    XD_REQUIRE(ctx, c->heads >= 1 && c->heads <= NN_DISC_MOST_HEADS, XD_ERROR_ARGUMENT,
               "a discriminator of %d heads; there are 1 to %d", c->heads, (int)NN_DISC_MOST_HEADS);
    for (int i = 0; i < c->heads; i++) XD_TRY(nn_disc_check_feature(ctx, i, &c->features[i]));
    return XD_OK;
}

static xd_weight_desc nn_disc_weight(const char *name, int ndim, int64_t rows, int64_t columns) {
    xd_weight_desc w;
    memset(&w, 0, sizeof w);
    w.name = name;
    w.dtype = XD_DTYPE_F32;
    w.ndim = ndim;
    w.shape[0] = rows;
    w.shape[1] = columns;
    return w;
}

/* A convolution's weight and bias, within 1 / sqrt(inputs). */
static xd_result nn_disc_add_convolution(xd_block *block, xd_weight_desc weight, const char *bias,
                                         int64_t inputs) {
    xd_weight_desc b = nn_disc_weight(bias, 1, weight.shape[0], 0);
    weight.init.kind = b.init.kind = XD_INIT_UNIFORM;
    weight.init.scale = b.init.scale = (float)(1.0 / sqrt((double)inputs));
    XD_TRY(xd_weight_add(block, &weight, NULL));
    return xd_weight_add(block, &b, NULL);
}

static xd_result nn_disc_describe_head(const nn_disc_feature *feature, xd_block *block) {
    const nn_disc_sizes s = nn_disc_sizes_of(*feature);
    xd_weight_desc conv = nn_disc_weight("conv.weight", 4, s.inner, s.channels),
                   scale = nn_disc_weight("norm.weight", 1, s.inner, 0),
                   last = nn_disc_weight("last.weight", 4, 1, s.inner);
    const xd_weight_desc shift = nn_disc_weight("norm.bias", 1, s.inner, 0);
    conv.shape[2] = conv.shape[3] = 4;
    last.shape[2] = last.shape[3] = 1;
    scale.init.kind = XD_INIT_CONSTANT;
    scale.init.center = 1.0f;
    XD_TRY(nn_disc_add_convolution(block, conv, "conv.bias", s.terms));
    XD_TRY(xd_weight_add(block, &scale, NULL));
    XD_TRY(xd_weight_add(block, &shift, NULL));
    return nn_disc_add_convolution(block, last, "last.bias", s.inner);
}

static xd_result nn_disc_describe_all(const nn_disc_config *c, xd_model *model) {
    for (int i = 0; i < c->heads; i++) {
        char name[32];
        xd_block_desc desc;
        xd_block *block;
        memset(&desc, 0, sizeof desc);
        snprintf(name, sizeof name, "heads.%d", i);
        desc.name = name;
        desc.type = "head";
        XD_TRY(xd_block_add(xd_model_root(model), &desc, &block));
        XD_TRY(nn_disc_describe_head(&c->features[i], block));
    }
    return xd_model_seal(model);
}

xd_result nn_disc_describe(xd_ctx *ctx, const nn_disc_config *config, uint64_t seed, xd_model **out) {
    xd_model_desc desc;
    xd_model *model;
    memset(&desc, 0, sizeof desc);
    desc.seed = seed;
    XD_TRY(nn_disc_check(ctx, config));
    XD_TRY(xd_model_create(ctx, &desc, &model));
    const xd_result result = nn_disc_describe_all(config, model);
    if (result != XD_OK) {
        xd_model_destroy(model);
        return result;
    }
    *out = model;
    return XD_OK;
}

/* ---- memory ---- */

static float *nn_disc_floats(xd_arena *arena, int64_t count) {
    return (float *)xd_arena_take_pointer(arena, (size_t)count * sizeof(float));
}

static int64_t nn_disc_larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Everything, once to count and once to place. */
static void nn_disc_place(nn_disc *d, xd_arena *arena) {
    int64_t columns = 0, inner = 0;
    for (int i = 0; i <= d->slot_count; i++)
        for (int k = 0; k < d->config.heads; k++) {
            const int64_t samples = d->slots[i].keeps ? d->samples : d->chunk[k];
            nn_disc_trace *trace = &d->slots[i].heads[k];
            trace->normed = nn_disc_floats(arena, samples * d->sizes[k].places * d->sizes[k].inner);
            trace->inverse = nn_disc_floats(arena, samples * d->sizes[k].groups);
        }
    for (int k = 0; k < d->config.heads; k++) {
        const int64_t rows = d->chunk[k] * d->sizes[k].places;
        columns = nn_disc_larger(columns, rows * d->sizes[k].terms);
        inner = nn_disc_larger(inner, rows * d->sizes[k].inner);
    }
    d->columns = nn_disc_floats(arena, columns);
    d->d_columns = nn_disc_floats(arena, columns);
    d->inner = nn_disc_floats(arena, inner);
    d->tangent = nn_disc_floats(arena, inner);
}

static bool nn_disc_allocate(nn_disc *d) {
    const size_t slots = (size_t)d->slot_count + 1;
    d->slots = (nn_disc_slot *)xd_allocate(d->ctx, slots * sizeof *d->slots);
    if (!d->slots) return false;
    for (size_t i = 0; i < slots; i++) {
        d->slots[i].keeps = i + 1 < slots;
        d->slots[i].samples = -1;
    }
    xd_arena plan = xd_arena_over(NULL, 0);
    nn_disc_place(d, &plan);
    d->memory = xd_allocate(d->ctx, plan.peak + XD_ARENA_ALIGNMENT);
    if (!d->memory) return false;
    const size_t past = (size_t)((uintptr_t)d->memory % XD_ARENA_ALIGNMENT);
    xd_arena arena =
        xd_arena_over((char *)d->memory + (XD_ARENA_ALIGNMENT - past) % XD_ARENA_ALIGNMENT, plan.peak);
    nn_disc_place(d, &arena);
    return true;
}

static xd_result nn_disc_find_blocks(nn_disc *d, xd_model *model) {
    for (int i = 0; i < d->config.heads; i++) {
        char name[32];
        snprintf(name, sizeof name, "heads.%d", i);
        d->blocks[i] = xd_model_find_block(model, name);
        XD_REQUIRE(d->ctx, d->blocks[i], XD_ERROR_ARGUMENT, "the model has no block \"%s\" of %d heads", name,
                   d->config.heads);
    }
    return XD_OK;
}

xd_result nn_disc_create(xd_ctx *ctx, const nn_disc_config *config, xd_model *model, int64_t samples,
                         int slots, nn_disc **out) {
    XD_TRY(nn_disc_check(ctx, config));
    XD_REQUIRE(ctx, samples >= 0 && samples <= NN_DISC_MOST_SAMPLES && slots >= 0, XD_ERROR_ARGUMENT,
               "%lld samples of at most %d in %d slots", (long long)samples, (int)NN_DISC_MOST_SAMPLES,
               slots);
    nn_disc *d = (nn_disc *)xd_allocate(ctx, sizeof *d);
    if (!d) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a discriminator's passes");
    memset(d, 0, sizeof *d);
    d->ctx = ctx;
    d->config = *config;
    d->samples = samples;
    d->slot_count = slots;
    for (int k = 0; k < config->heads; k++) {
        d->sizes[k] = nn_disc_sizes_of(config->features[k]);
        d->elements[k] = d->sizes[k].elements;
        d->chunk[k] = d->sizes[k].places < NN_DISC_ROWS ? NN_DISC_ROWS / d->sizes[k].places : 1;
        if (d->chunk[k] > samples) d->chunk[k] = samples;
    }
    const xd_result result = nn_disc_allocate(d)
                                 ? nn_disc_find_blocks(d, model)
                                 : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld samples in %d slots",
                                           (long long)samples, slots);
    if (result != XD_OK) {
        nn_disc_destroy(d);
        return result;
    }
    *out = d;
    return XD_OK;
}

void nn_disc_destroy(nn_disc *d) {
    if (!d) return;
    xd_ctx *ctx = d->ctx;
    xd_release(ctx, d->memory);
    xd_release(ctx, d->slots);
    xd_release(ctx, d);
}
