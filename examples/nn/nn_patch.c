/* nn_patch.c - the patch transformer's description, memory and passes. */
#include "nn_patch.h"

#include "nn_exp.h"
#include "nn_matmul.h"
#include "nn_patch_layer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Weights of the root, in the order of its block. */
enum {
    NN_PATCH_EMBED,
    NN_PATCH_EMBED_BIAS,
    NN_PATCH_POSITION,
    NN_PATCH_TIME,
    NN_PATCH_TIME_BIAS,
    NN_PATCH_LABEL,
    NN_PATCH_COMMON, /* [6 width, width]: shift, scale and gate of all layers, from time and class */
    NN_PATCH_COMMON_BIAS,
    NN_PATCH_LAST, /* [2 width, width]: shift and scale behind the layers */
    NN_PATCH_LAST_BIAS,
    NN_PATCH_LAST_TABLE,
    NN_PATCH_OUT,
    NN_PATCH_OUT_BIAS,
    NN_PATCH_ROOT_WEIGHTS
};

/* Rows that are computed together: few enough to stay in the cache, and a multiple of the terms of a product's block, so
 * that sums over rows do not depend on it. */
enum { NN_PATCH_ROWS = 512, NN_PATCH_MOST_SAMPLES = 1 << 20 };

nn_patch_config nn_patch_defaults(void) {
    const nn_patch_config c = { 16, 4, 96, 4, 4, 240, 64, 11 };
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
    XD_REQUIRE(ctx, c->layers >= 0 && c->layers < 10000 && c->ffn > 0, XD_ERROR_ARGUMENT,
               "%d layers of inner width %d", c->layers, c->ffn);
    XD_REQUIRE(ctx, c->frequencies > 0 && c->frequencies % 2 == 0 && c->labels > 0, XD_ERROR_ARGUMENT,
               "%d sines and cosines are not an even number, or %d labels are none", c->frequencies,
               c->labels);
    return XD_OK;
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

/* One forward: what it keeps of all samples. */
typedef struct nn_patch_slot {
    bool keeps;                          /* otherwise rows are those of one chunk only, used again by each */
    int64_t samples;                     /* of its last forward; -1 before */
    int32_t *labels;                     /* [samples] */
    float *features;                     /* [samples, frequencies] */
    float *embedding, *sigmoid, *active; /* [samples, width] of time and class, before silu and behind */
    float *common, *last;                /* [samples, 6 width], [samples, 2 width] */
    float *patches;                      /* [rows, pixels] */
    float *normed, *inverse;             /* [rows, width], [rows] behind the layers */
    nn_patch_trace *traces;              /* [layers] */
} nn_patch_slot;

struct nn_patch {
    xd_ctx *ctx;
    nn_patch_config config;
    int64_t samples; /* most of a call */
    int64_t chunk;   /* samples computed together */
    nn_grid grid;    /* of a chunk */
    int64_t pixels;  /* of a patch */
    int slot_count;
    nn_patch_slot *slots; /* [slot_count + 1]; the last is that of inference */
    nn_patch_trace *traces;
    xd_block **blocks;        /* [layers + 1]; the last is the root */
    double *frequency;        /* [frequencies / 2] */
    float *x, *d_x;           /* [samples * tokens, width] the stream */
    float *d_common, *d_last; /* of all samples */
    float *d_active;          /* [samples, width] */
    float *raw;               /* [rows of a chunk, pixels] */
    nn_patch_room room;
    void *memory;
};

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
    t->probs = nn_patch_floats(arena, rows * p->config.heads * p->grid.tokens);
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

/* Everything, once to count and once to place. */
static void nn_patch_place(nn_patch *p, xd_arena *arena) {
    const int64_t width = p->config.width, rows = p->chunk * p->grid.tokens;
    const int64_t wide = p->config.ffn > 3 * width ? p->config.ffn : 3 * width;
    for (int i = 0; i <= p->slot_count; i++) nn_patch_place_slot(p, arena, &p->slots[i]);
    p->frequency = (double *)xd_arena_take_pointer(arena, (size_t)p->config.frequencies / 2 * sizeof(double));
    p->x = nn_patch_floats(arena, p->samples * p->grid.tokens * width);
    p->d_x = nn_patch_floats(arena, p->samples * p->grid.tokens * width);
    p->d_common = nn_patch_floats(arena, p->samples * 6 * width);
    p->d_last = nn_patch_floats(arena, p->samples * 2 * width);
    p->d_active = nn_patch_floats(arena, p->samples * width);
    p->raw = nn_patch_floats(arena, rows * p->pixels);
    p->room.common = nn_patch_floats(arena, p->chunk * 6 * width);
    p->room.d_common = nn_patch_floats(arena, p->chunk * 6 * width);
    p->room.read = nn_patch_floats(arena, rows * width);
    p->room.d_branch = nn_patch_floats(arena, rows * width);
    p->room.wide = nn_patch_floats(arena, rows * wide);
    p->room.d_wide = nn_patch_floats(arena, rows * wide);
    p->room.attention = nn_patch_floats(arena, nn_full_attention_room(p->grid, p->config.heads));
}

static bool nn_patch_allocate(nn_patch *p) {
    const size_t slots = (size_t)p->slot_count + 1, layers = (size_t)p->config.layers;
    p->slots = (nn_patch_slot *)xd_allocate(p->ctx, slots * sizeof *p->slots);
    p->traces = (nn_patch_trace *)xd_allocate(p->ctx, (slots * layers + 1) * sizeof *p->traces);
    p->blocks = (xd_block **)xd_allocate(p->ctx, (layers + 1) * sizeof *p->blocks);
    if (!p->slots || !p->traces || !p->blocks) return false;
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

xd_result nn_patch_create(xd_ctx *ctx, const nn_patch_config *config, xd_model *model, int64_t samples,
                          int slots, nn_patch **out) {
    XD_TRY(nn_patch_check(ctx, config));
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
    p->grid.tokens = (int64_t)across * across;
    p->grid.width = config->width;
    p->chunk = p->grid.tokens < NN_PATCH_ROWS ? NN_PATCH_ROWS / p->grid.tokens : 1;
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
    *out = p;
    return XD_OK;
}

void nn_patch_destroy(nn_patch *p) {
    if (!p) return;
    xd_ctx *ctx = p->ctx;
    xd_release(ctx, p->memory);
    xd_release(ctx, (void *)p->blocks);
    xd_release(ctx, p->traces);
    xd_release(ctx, p->slots);
    xd_release(ctx, p);
}

/* ---- time and class ---- */

static nn_patch_map nn_patch_root_map(const nn_patch *p, const float *const *weights, int which,
                                      int64_t rows) {
    const int64_t width = p->config.width;
    nn_patch_map map = { rows, width, width, weights[which], weights[which + 1] };
    if (which == NN_PATCH_EMBED) map.in = p->pixels;
    if (which == NN_PATCH_TIME) map.in = p->config.frequencies;
    if (which == NN_PATCH_COMMON) map.out = 6 * width;
    if (which == NN_PATCH_LAST) map.out = 2 * width;
    if (which == NN_PATCH_OUT) map.out = p->pixels;
    return map;
}

static void nn_patch_condition(const nn_patch *p, const float *const *w, const xd_network_call *call,
                               nn_patch_slot *slot) {
    const int half = p->config.frequencies / 2;
    const int64_t width = p->config.width, count = call->samples;
    const int32_t *labels = (const int32_t *)call->condition;
    const nn_patch_map time = nn_patch_root_map(p, w, NN_PATCH_TIME, count),
                       common = nn_patch_root_map(p, w, NN_PATCH_COMMON, count),
                       last = nn_patch_root_map(p, w, NN_PATCH_LAST, count);
    for (int64_t s = 0; s < count; s++)
        for (int i = 0; i < half; i++) {
            const double angle = call->times[s] * p->frequency[i];
            slot->features[(2 * s) * half + i] = (float)sin(angle);
            slot->features[(2 * s + 1) * half + i] = (float)cos(angle);
        }
    nn_patch_map_forward(&time, slot->features, slot->embedding);
    for (int64_t s = 0; s < count; s++) {
        slot->labels[s] = labels ? labels[s] : p->config.labels - 1;
        nn_add_all(width, w[NN_PATCH_LABEL] + slot->labels[s] * width, slot->embedding + s * width);
    }
    nn_sigmoid(count * width, slot->embedding, slot->sigmoid);
    nn_silu(count * width, slot->embedding, slot->sigmoid, slot->active);
    nn_patch_map_forward(&common, slot->active, slot->common);
    nn_patch_map_forward(&last, slot->active, slot->last);
    for (int64_t s = 0; s < count; s++)
        nn_add_all(2 * width, w[NN_PATCH_LAST_TABLE], slot->last + s * 2 * width);
}

static void nn_patch_condition_backward(const nn_patch *p, const float *const *w, float *const *g,
                                        const nn_patch_slot *slot) {
    const int64_t width = p->config.width, count = slot->samples;
    const nn_patch_map time = nn_patch_root_map(p, w, NN_PATCH_TIME, count),
                       common = nn_patch_root_map(p, w, NN_PATCH_COMMON, count),
                       last = nn_patch_root_map(p, w, NN_PATCH_LAST, count);
    nn_patch_map_backward(&common, slot->active, p->d_common, p->d_active, g + NN_PATCH_COMMON);
    nn_patch_map_backward(&last, slot->active, p->d_last, NULL, g + NN_PATCH_LAST);
    nn_matmul(nn_dense(p->d_last, count, 2 * width), nn_dense(last.weight, 2 * width, width), p->d_active,
              width, true);
    if (g[NN_PATCH_LAST_TABLE]) nn_sum_rows(count, 2 * width, p->d_last, g[NN_PATCH_LAST_TABLE]);
    nn_silu_backward(count * width, slot->embedding, slot->sigmoid, p->d_active);
    nn_patch_map_backward(&time, slot->features, p->d_active, NULL, g + NN_PATCH_TIME);
    if (!g[NN_PATCH_LABEL]) return;
    for (int64_t s = 0; s < count; s++)
        nn_add_all(width, p->d_active + s * width, g[NN_PATCH_LABEL] + slot->labels[s] * width);
}

/* ---- before and behind the layers ---- */

/* Copies pixels between images and rows of patches. */
static void nn_patch_cut(const nn_patch *p, int64_t samples, const float *images, float *patches) {
    const int64_t patch = p->config.patch, side = p->config.side, across = side / patch;
    for (int64_t s = 0; s < samples; s++)
        for (int64_t y = 0; y < side; y++)
            for (int64_t x = 0; x < across; x++)
                memcpy(patches + ((s * across + y / patch) * across + x) * p->pixels + y % patch * patch,
                       images + (s * side + y) * side + x * patch, (size_t)patch * sizeof *patches);
}

static void nn_patch_paste(const nn_patch *p, int64_t samples, const float *patches, float *images) {
    const int64_t patch = p->config.patch, side = p->config.side, across = side / patch;
    for (int64_t s = 0; s < samples; s++)
        for (int64_t y = 0; y < side; y++)
            for (int64_t x = 0; x < across; x++)
                memcpy(images + (s * side + y) * side + x * patch,
                       patches + ((s * across + y / patch) * across + x) * p->pixels + y % patch * patch,
                       (size_t)patch * sizeof *patches);
}

/* Some samples of a call: where the slot keeps theirs, and where the stream and images are. */
typedef struct nn_patch_span {
    nn_grid grid;
    int64_t first, rows, image; /* samples before it; its rows; elements of all images before it */
    int64_t kept;               /* rows before it in the slot */
    float *x, *d_x;
} nn_patch_span;

static nn_patch_span nn_patch_span_at(const nn_patch *p, const nn_patch_slot *slot, int64_t first) {
    nn_patch_span span;
    span.grid = p->grid;
    span.grid.samples = slot->samples - first < p->chunk ? slot->samples - first : p->chunk;
    span.first = first;
    span.rows = span.grid.samples * p->grid.tokens;
    span.image = first * p->config.side * p->config.side;
    span.kept = slot->keeps ? first * p->grid.tokens : 0;
    span.x = p->x + first * p->grid.tokens * p->grid.width;
    span.d_x = p->d_x + first * p->grid.tokens * p->grid.width;
    return span;
}

static nn_per_sample nn_patch_last(const nn_patch *p, float *rows, int64_t first, int place) {
    const nn_per_sample x = { rows + (2 * first + place) * p->config.width, 2 * p->config.width };
    return x;
}

static void nn_patch_embed(const nn_patch *p, const float *const *w, const nn_patch_slot *slot,
                           const float *images) {
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_map embed = nn_patch_root_map(p, w, NN_PATCH_EMBED, s.rows);
        float *patches = slot->patches + s.kept * p->pixels;
        nn_patch_cut(p, s.grid.samples, images + s.image, patches);
        nn_patch_map_forward(&embed, patches, s.x);
        for (int64_t i = 0; i < s.grid.samples; i++)
            nn_add_all(s.grid.tokens * s.grid.width, w[NN_PATCH_POSITION],
                       s.x + i * s.grid.tokens * s.grid.width);
    }
}

static void nn_patch_embed_backward(const nn_patch *p, const float *const *w, float *const *g,
                                    const nn_patch_slot *slot, float *d_images) {
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_map embed = nn_patch_root_map(p, w, NN_PATCH_EMBED, s.rows);
        nn_patch_map_backward(&embed, slot->patches + s.kept * p->pixels, s.d_x, d_images ? p->raw : NULL,
                              g + NN_PATCH_EMBED);
        if (d_images) nn_patch_paste(p, s.grid.samples, p->raw, d_images + s.image);
        if (g[NN_PATCH_POSITION])
            nn_sum_rows(s.grid.samples, s.grid.tokens * s.grid.width, s.d_x, g[NN_PATCH_POSITION]);
    }
}

static void nn_patch_head(const nn_patch *p, const float *const *w, const nn_patch_slot *slot,
                          float *images) {
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_map out = nn_patch_root_map(p, w, NN_PATCH_OUT, s.rows);
        float *normed = slot->normed + s.kept * s.grid.width;
        nn_layernorm(s.rows, s.grid.width, s.x, normed, slot->inverse + s.kept);
        nn_modulate(s.grid, normed, nn_patch_last(p, slot->last, first, 0),
                    nn_patch_last(p, slot->last, first, 1), p->room.read);
        nn_patch_map_forward(&out, p->room.read, p->raw);
        nn_patch_paste(p, s.grid.samples, p->raw, images + s.image);
    }
}

/* Leaves the gradient by the stream behind the layers in d_x; d_images NULL: there is none. */
static void nn_patch_head_backward(const nn_patch *p, const float *const *w, float *const *g,
                                   const nn_patch_slot *slot, const float *d_images) {
    memset(p->d_x, 0, (size_t)(slot->samples * p->grid.tokens * p->grid.width) * sizeof *p->d_x);
    memset(p->d_last, 0, (size_t)(slot->samples * 2 * p->grid.width) * sizeof *p->d_last);
    if (!d_images) return;
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_map out = nn_patch_root_map(p, w, NN_PATCH_OUT, s.rows);
        const nn_normed kept = { slot->normed + s.kept * s.grid.width, slot->inverse + s.kept,
                                 nn_patch_last(p, slot->last, first, 1) };
        nn_modulate(s.grid, kept.y, nn_patch_last(p, slot->last, first, 0), kept.scale, p->room.read);
        nn_patch_cut(p, s.grid.samples, d_images + s.image, p->raw);
        nn_patch_map_backward(&out, p->room.read, p->raw, p->room.d_branch, g + NN_PATCH_OUT);
        nn_modulated_backward(s.grid, &kept, p->room.d_branch, s.d_x, nn_patch_last(p, p->d_last, first, 0),
                              nn_patch_last(p, p->d_last, first, 1));
    }
}

/* ---- passes ---- */

static nn_patch_part nn_patch_part_at(const nn_patch *p, const nn_patch_slot *slot, int layer,
                                      const nn_patch_span *s) {
    const int64_t width = p->config.width, ffn = p->config.ffn, kept = s->kept;
    const nn_patch_trace *t = &slot->traces[layer];
    nn_patch_part part = { s->grid, p->config.heads, ffn, *t, p->room, slot->common + s->first * 6 * width,
                           s->x };
    for (int i = 0; i < 2; i++) part.trace.normed[i] += kept * width, part.trace.inverse[i] += kept;
    part.trace.qkv += kept * 3 * width;
    part.trace.probs += kept * p->config.heads * p->grid.tokens;
    part.trace.mixed += kept * width;
    part.trace.attended += kept * width;
    part.trace.inner += kept * ffn;
    part.trace.sigmoid += kept * ffn;
    part.trace.fed += kept * width;
    return part;
}

static xd_pass nn_patch_pass(const xd_network_call *call, bool backward) {
    xd_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.kind = XD_PASS_INFERENCE;
    if (backward ? call->weights : call->keep) pass.kind = backward ? XD_PASS_BACKWARD : XD_PASS_FORWARD;
    if (pass.kind == XD_PASS_BACKWARD) pass.leaf = call->leaf, pass.more = call->more;
    return pass;
}

static xd_result nn_patch_call_check(const nn_patch *p, const xd_network_call *call, bool slot) {
    XD_REQUIRE(p->ctx, call->samples >= 0 && call->samples <= p->samples, XD_ERROR_ARGUMENT,
               "%lld samples where there is room for %lld", (long long)call->samples, (long long)p->samples);
    XD_REQUIRE(p->ctx, !slot || (call->slot >= 0 && call->slot < p->slot_count), XD_ERROR_ARGUMENT,
               "slot %d of %d", call->slot, p->slot_count);
    for (int64_t s = 0; call->condition && s < call->samples; s++) {
        const int32_t label = ((const int32_t *)call->condition)[s];
        XD_REQUIRE(p->ctx, label >= 0 && label < p->config.labels, XD_ERROR_ARGUMENT,
                   "sample %lld has label %ld of %d", (long long)s, (long)label, p->config.labels);
    }
    return XD_OK;
}

static xd_result nn_patch_layer_pass(const nn_patch *p, const nn_patch_slot *slot, int layer, xd_pass pass,
                                     bool backward) {
    xd_block_view view;
    XD_TRY(xd_block_begin(p->blocks[layer], pass, &view));
    const float *w[NN_PATCH_LAYER_WEIGHTS];
    float *g[NN_PATCH_LAYER_WEIGHTS];
    for (int i = 0; i < NN_PATCH_LAYER_WEIGHTS; i++) {
        w[i] = (const float *)view.values[i];
        g[i] = (float *)view.gradients[i];
    }
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_part part = nn_patch_part_at(p, slot, layer, &s);
        if (backward)
            nn_patch_layer_backward(&part, w, g, s.d_x, p->d_common + first * 6 * s.grid.width);
        else
            nn_patch_layer_forward(&part, w);
    }
    return xd_block_end(p->blocks[layer]);
}

static void nn_patch_root_weights(const xd_block_view *view, const float **w, float **g) {
    for (int i = 0; i < NN_PATCH_ROOT_WEIGHTS; i++) {
        w[i] = (const float *)view->values[i];
        g[i] = (float *)view->gradients[i];
    }
}

static xd_result nn_patch_forward(void *user, const xd_network_call *call) {
    nn_patch *p = (nn_patch *)user;
    const int layers = p->config.layers;
    const xd_pass pass = nn_patch_pass(call, false);
    xd_block_view root;
    const float *w[NN_PATCH_ROOT_WEIGHTS];
    float *g[NN_PATCH_ROOT_WEIGHTS];
    XD_TRY(nn_patch_call_check(p, call, call->keep));
    nn_patch_slot *slot = &p->slots[call->keep ? call->slot : p->slot_count];
    XD_TRY(xd_block_begin(p->blocks[layers], pass, &root));
    nn_patch_root_weights(&root, w, g);
    slot->samples = call->samples;
    if (slot->samples > 0) {
        nn_patch_condition(p, w, call, slot);
        nn_patch_embed(p, w, slot, (const float *)call->hidden);
    }
    for (int i = 0; i < layers; i++) XD_TRY(nn_patch_layer_pass(p, slot, i, pass, false));
    nn_patch_head(p, w, slot, (float *)call->raw);
    return xd_block_end(p->blocks[layers]);
}

static xd_result nn_patch_backward(void *user, const xd_network_call *call) {
    nn_patch *p = (nn_patch *)user;
    const int layers = p->config.layers;
    const xd_pass pass = nn_patch_pass(call, true);
    xd_block_view root;
    const float *w[NN_PATCH_ROOT_WEIGHTS];
    float *g[NN_PATCH_ROOT_WEIGHTS];
    XD_TRY(nn_patch_call_check(p, call, true));
    const nn_patch_slot *slot = &p->slots[call->slot];
    XD_REQUIRE(p->ctx, slot->samples == call->samples, XD_ERROR_STATE,
               "backward of %lld samples where slot %d holds %lld", (long long)call->samples, call->slot,
               (long long)slot->samples);
    XD_TRY(xd_block_begin(p->blocks[layers], pass, &root));
    nn_patch_root_weights(&root, w, g);
    memset(p->d_common, 0, (size_t)(slot->samples * 6 * p->grid.width) * sizeof *p->d_common);
    nn_patch_head_backward(p, w, g, slot, call->raw_gradient);
    for (int i = layers - 1; i >= 0; i--) XD_TRY(nn_patch_layer_pass(p, slot, i, pass, true));
    nn_patch_embed_backward(p, w, g, slot, call->hidden_gradient);
    if (slot->samples > 0 && call->weights) nn_patch_condition_backward(p, w, g, slot);
    return xd_block_end(p->blocks[layers]);
}

xd_network nn_patch_network(nn_patch *p) {
    xd_network n;
    memset(&n, 0, sizeof n);
    n.user = p;
    n.predicts = XD_PREDICT_FLOW;
    n.forward = nn_patch_forward;
    n.backward = nn_patch_backward;
    return n;
}
