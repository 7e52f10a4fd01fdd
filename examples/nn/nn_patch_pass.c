/* nn_patch_pass.c - forward and backward of the patch transformer through the blocks of its model. */
#include "nn_call.h"
#include "nn_matmul.h"
#include "nn_patch_inside.h"

#include <string.h>

/* ---- time and class ---- */

static nn_patch_map nn_patch_root_map(const nn_patch *p, const float *const *weights, int which,
                                      int64_t rows) {
    const int64_t width = p->config.width;
    nn_patch_map map = { rows, width, width, weights[which], weights[which + 1] };
    if (which == NN_PATCH_EMBED) map.in = p->pixels;
    if (which == NN_PATCH_COMMON) map.out = 6 * width;
    if (which == NN_PATCH_LAST) map.out = 2 * width;
    if (which == NN_PATCH_OUT) map.out = p->pixels;
    return map;
}

static void nn_patch_condition(const nn_patch *p, const float *const *w, const xd_network_call *call,
                               nn_patch_slot *slot) {
    const int64_t width = p->config.width, count = call->samples;
    const nn_patch_map common = nn_patch_root_map(p, w, NN_PATCH_COMMON, count),
                       last = nn_patch_root_map(p, w, NN_PATCH_LAST, count);
    nn_condition_forward(&p->time, w + NN_PATCH_TIME, call, &slot->time);
    nn_patch_map_forward(&common, slot->time.active, slot->common);
    nn_patch_map_forward(&last, slot->time.active, slot->last);
    for (int64_t s = 0; s < count; s++)
        nn_add_all(2 * width, w[NN_PATCH_LAST_TABLE], slot->last + s * 2 * width);
}

/* Gradients by what time and class came to, of so many samples. */
typedef struct nn_patch_part_of {
    const nn_patch *p;
    int64_t samples;
} nn_patch_part_of;

static nn_sums nn_patch_sums(const nn_patch *p, int64_t count) {
    nn_sums sums = p->sums;
    sums.count = count;
    return sums;
}

static void nn_patch_condition_block(const void *user, int64_t block, float *out) {
    const nn_patch *p = ((const nn_patch_part_of *)user)->p;
    const int64_t count = ((const nn_patch_part_of *)user)->samples * 8 * p->config.width;
    memcpy(out, p->d_condition + block * count, (size_t)count * sizeof *out);
}

/* What follows is of whole samples, and the same on every rank. */
static xd_result nn_patch_condition_backward(const nn_patch *p, const float *const *w, float *const *g,
                                             const nn_patch_slot *slot) {
    const int64_t width = p->config.width, count = slot->samples;
    const nn_patch_part_of of = { p, count };
    const nn_sums sums = nn_patch_sums(p, count * 8 * width);
    const nn_block_sum sum = { nn_patch_condition_block, &of, 0, sums.count };
    const nn_patch_map common = nn_patch_root_map(p, w, NN_PATCH_COMMON, count),
                       last = nn_patch_root_map(p, w, NN_PATCH_LAST, count);
    const float *d_common;
    nn_sums_add(&sums, &sum);
    XD_TRY(nn_sums_join(&sums, &d_common));
    const float *d_last = d_common + count * 6 * width;
    nn_patch_map_backward(&common, slot->time.active, d_common, p->d_active, g + NN_PATCH_COMMON);
    nn_patch_map_backward(&last, slot->time.active, d_last, NULL, g + NN_PATCH_LAST);
    nn_matmul(nn_dense(d_last, count, 2 * width), nn_dense(last.weight, 2 * width, width), p->d_active, width,
              true);
    if (g[NN_PATCH_LAST_TABLE]) nn_sum_rows(count, 2 * width, d_last, g[NN_PATCH_LAST_TABLE]);
    nn_condition_backward(&p->time, w + NN_PATCH_TIME, g + NN_PATCH_TIME, &slot->time, p->d_active);
    return XD_OK;
}

/* ---- before and behind the layers ---- */

/* Where a line of a patch of row `row` is among the pixels that this rank has of a chunk's images. */
static int64_t nn_patch_place_of(const nn_patch *p, nn_grid grid, int64_t row, int64_t line) {
    const int64_t patch = p->config.patch, side = p->config.side, across = side / patch;
    const int64_t before = p->at.first * p->at.each, token = before + row / grid.samples;
    const int64_t image = row % grid.samples * grid.tokens - before; /* in patches */
    return image * p->pixels + (token / across * patch + line) * side + token % across * patch;
}

/* Copies pixels between images and rows of patches. */
static void nn_patch_cut(const nn_patch *p, nn_grid grid, const float *images, float *patches) {
    const int64_t patch = p->config.patch;
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++, patches += p->pixels)
        for (int64_t line = 0; line < patch; line++)
            memcpy(patches + line * patch, images + nn_patch_place_of(p, grid, r, line),
                   (size_t)patch * sizeof *patches);
}

static void nn_patch_paste(const nn_patch *p, nn_grid grid, const float *patches, float *images) {
    const int64_t patch = p->config.patch;
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++, patches += p->pixels)
        for (int64_t line = 0; line < patch; line++)
            memcpy(images + nn_patch_place_of(p, grid, r, line), patches + line * patch,
                   (size_t)patch * sizeof *patches);
}

/* Some samples of a call: where the slot keeps theirs, and where the stream and images are. */
typedef struct nn_patch_span {
    nn_grid grid;
    int64_t first, rows, image; /* samples before it; its rows; elements of all images before it */
    int64_t kept;               /* rows before it in the slot */
    float *x, *d_x;
} nn_patch_span;

typedef struct nn_patch_span_of {
    const nn_patch *p;
    const nn_patch_span *span;
} nn_patch_span_of;

static nn_patch_span nn_patch_span_at(const nn_patch *p, const nn_patch_slot *slot, int64_t first) {
    nn_patch_span span;
    span.grid = p->grid;
    span.grid.samples = slot->samples - first < p->chunk ? slot->samples - first : p->chunk;
    span.first = first;
    span.rows = span.grid.samples * p->grid.tokens;
    span.image = first * p->grid.tokens * p->pixels;
    span.kept = slot->keeps ? first * p->grid.tokens : 0;
    span.x = p->x + first * p->grid.tokens * p->grid.width;
    span.d_x = p->d_x + first * p->grid.tokens * p->grid.width;
    return span;
}

static nn_per_sample nn_patch_last(const nn_patch *p, float *rows, int64_t first, int place) {
    const nn_per_sample x = { rows + (2 * first + place) * p->config.width, 2 * p->config.width, 0 };
    return x;
}

/* The gradient by it, in each block. */
static nn_per_sample nn_patch_d_last(const nn_patch *p, const nn_patch_slot *slot, int64_t first, int place) {
    nn_per_sample x = nn_patch_last(p, p->d_condition + slot->samples * 6 * p->config.width, first, place);
    x.block = slot->samples * 8 * p->config.width;
    return x;
}

static void nn_patch_embed(const nn_patch *p, const float *const *w, const nn_patch_slot *slot,
                           const float *images) {
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_map embed = nn_patch_root_map(p, w, NN_PATCH_EMBED, s.rows);
        float *patches = slot->patches + s.kept * p->pixels;
        nn_patch_cut(p, s.grid, images + s.image, patches);
        nn_patch_map_forward(&embed, patches, s.x);
        for (int64_t r = 0; r < s.rows; r++)
            nn_add_all(s.grid.width,
                       w[NN_PATCH_POSITION] + (p->at.first * p->at.each + r / s.grid.samples) * s.grid.width,
                       s.x + r * s.grid.width);
    }
}

/* Of the positions, those of a block: zeros for the others. */
static void nn_patch_position_block(const void *user, int64_t block, float *out) {
    const nn_patch *p = ((const nn_patch_span_of *)user)->p;
    const nn_patch_span *s = ((const nn_patch_span_of *)user)->span;
    const int64_t width = s->grid.width, each = s->grid.samples * width;
    memset(out, 0, (size_t)(p->at.all * width) * sizeof *out);
    for (int64_t t = block * p->at.each; t < (block + 1) * p->at.each; t++)
        nn_sum_rows(s->grid.samples, width, s->d_x + t * each, out + (p->at.first * p->at.each + t) * width);
}

/* Sums over tokens for a map of the root, whose weights are `sum` from now on, to the gradients. */
static void nn_patch_give_map(const nn_patch_map *map, const float *sum, float *const gradients[2]) {
    if (gradients[0]) nn_add_all(map->out * map->in, sum, gradients[0]);
    if (gradients[1]) nn_add_all(map->out, sum + map->out * map->in, gradients[1]);
}

static xd_result nn_patch_embed_sum(const nn_patch *p, const nn_patch_slot *slot, const nn_patch_span *s,
                                    const nn_patch_map *embed, float *const *g) {
    const int64_t map = embed->out * (embed->in + 1), position = p->at.all * s->grid.width;
    const nn_sums sums = nn_patch_sums(p, map + position);
    const nn_patch_span_of of = { p, s };
    const nn_block_sum positions = { nn_patch_position_block, &of, map, position };
    const float *sum;
    nn_patch_map_sum(embed, &sums, 0, slot->patches + s->kept * p->pixels, s->d_x);
    nn_sums_add(&sums, &positions);
    XD_TRY(nn_sums_join(&sums, &sum));
    nn_patch_give_map(embed, sum, g + NN_PATCH_EMBED);
    if (g[NN_PATCH_POSITION]) nn_add_all(position, sum + map, g[NN_PATCH_POSITION]);
    return XD_OK;
}

static xd_result nn_patch_embed_backward(const nn_patch *p, const float *const *w, float *const *g,
                                         const nn_patch_slot *slot, const xd_network_call *call) {
    float *const none[2] = { NULL, NULL };
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_map embed = nn_patch_root_map(p, w, NN_PATCH_EMBED, s.rows);
        if (call->hidden_gradient) {
            nn_patch_map_backward(&embed, NULL, s.d_x, p->raw, none);
            nn_patch_paste(p, s.grid, p->raw, call->hidden_gradient + s.image);
        }
        if (call->weights) XD_TRY(nn_patch_embed_sum(p, slot, &s, &embed, g));
    }
    return XD_OK;
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
        nn_patch_paste(p, s.grid, p->raw, images + s.image);
    }
}

static xd_result nn_patch_out_sum(const nn_patch *p, const nn_patch_map *out, float *const *g) {
    const nn_sums sums = nn_patch_sums(p, out->out * (out->in + 1));
    const float *sum;
    nn_patch_map_sum(out, &sums, 0, p->room.read, p->raw);
    XD_TRY(nn_sums_join(&sums, &sum));
    nn_patch_give_map(out, sum, g + NN_PATCH_OUT);
    return XD_OK;
}

/* Leaves the gradient by the stream behind the layers in d_x. */
static xd_result nn_patch_head_backward(const nn_patch *p, const float *const *w, float *const *g,
                                        const nn_patch_slot *slot, const xd_network_call *call) {
    const int64_t width = p->grid.width;
    float *const none[2] = { NULL, NULL };
    memset(p->d_x, 0, (size_t)(slot->samples * p->grid.tokens * width) * sizeof *p->d_x);
    memset(p->d_condition, 0, (size_t)(p->at.count * slot->samples * 8 * width) * sizeof *p->d_condition);
    for (int64_t first = 0; call->raw_gradient && first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_map out = nn_patch_root_map(p, w, NN_PATCH_OUT, s.rows);
        const nn_normed kept = { slot->normed + s.kept * width, slot->inverse + s.kept,
                                 nn_patch_last(p, slot->last, first, 1) };
        nn_modulate(s.grid, kept.y, nn_patch_last(p, slot->last, first, 0), kept.scale, p->room.read);
        nn_patch_cut(p, s.grid, call->raw_gradient + s.image, p->raw);
        nn_patch_map_backward(&out, NULL, p->raw, p->room.d_branch, none);
        if (call->weights) XD_TRY(nn_patch_out_sum(p, &out, g));
        nn_modulated_backward(s.grid, &kept, p->room.d_branch, s.d_x, nn_patch_d_last(p, slot, first, 0),
                              nn_patch_d_last(p, slot, first, 1));
    }
    return XD_OK;
}

/* ---- passes ---- */

static nn_patch_part nn_patch_part_at(const nn_patch *p, const nn_patch_slot *slot, int layer,
                                      const nn_patch_span *s) {
    const int64_t width = p->config.width, heads = p->heads.end - p->heads.begin, kept = s->kept;
    const int64_t inner = p->inner.end - p->inner.begin;
    nn_patch_part part = { s->grid,
                           &p->at,
                           &p->heads,
                           &p->inner,
                           slot->traces[layer],
                           p->room,
                           slot->common + s->first * 6 * width,
                           s->x };
    for (int i = 0; i < 2; i++) part.trace.normed[i] += kept * width, part.trace.inverse[i] += kept;
    part.trace.qkv += kept * 3 * heads;
    part.trace.probs += kept * p->heads.leaves.count * p->at.all;
    if (p->at.comm) part.trace.keys += kept / p->grid.tokens * p->at.all * 2 * heads;
    part.trace.mixed += kept * heads;
    part.trace.attended += kept * width;
    part.trace.inner += kept * inner;
    part.trace.sigmoid += kept * inner;
    part.trace.fed += kept * width;
    return part;
}

static xd_result nn_patch_layer_chunks(const nn_patch *p, const nn_patch_slot *slot, int layer,
                                       const xd_network_call *back, const xd_block_view *view) {
    const nn_layer_widths widths = { p->config.width, p->heads.end - p->heads.begin,
                                     p->inner.end - p->inner.begin };
    const nn_sums sums = nn_patch_sums(p, nn_patch_layer_floats(widths));
    const float *w[NN_PATCH_LAYER_WEIGHTS];
    float *g[NN_PATCH_LAYER_WEIGHTS];
    nn_call_weights(view, NN_PATCH_LAYER_WEIGHTS, w, g);
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const nn_patch_part part = nn_patch_part_at(p, slot, layer, &s);
        const nn_patch_slopes slopes = { s.d_x, p->d_condition + first * 6 * s.grid.width,
                                         slot->samples * 8 * s.grid.width, g,
                                         back && back->weights ? &sums : NULL };
        XD_TRY(back ? nn_patch_layer_backward(&part, w, &slopes) : nn_patch_layer_forward(&part, w));
    }
    return XD_OK;
}

/* `back` NULL: forward. */
static xd_result nn_patch_layer_pass(const nn_patch *p, const nn_patch_slot *slot, int layer, xd_pass pass,
                                     const xd_network_call *back) {
    xd_block_view view;
    XD_TRY(xd_block_begin(p->blocks[layer], pass, &view));
    XD_TRY(nn_patch_layer_chunks(p, slot, layer, back, &view));
    return xd_block_end(p->blocks[layer]);
}

/* ---- features ---- */

/* The streams of a chunk, all tokens of them. */
static xd_result nn_patch_whole_stream(const nn_patch *p, const nn_patch_span *s, const float **out) {
    *out = p->at.comm ? p->room.attention.all : s->x;
    return p->at.comm
               ? nn_positions_gather(&p->at, s->grid.samples * s->grid.width, s->x, p->room.attention.all)
               : XD_OK;
}

/* The stream behind a layer as [width, tokens] of each sample, when that is a feature. */
static xd_result nn_patch_give_feature(const nn_patch *p, const nn_patch_slot *slot, int layer,
                                       float *const *features) {
    const int64_t all = p->at.all, width = p->grid.width;
    if (!features || p->features.number[layer] < 0) return XD_OK;
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        float *out = features[p->features.number[layer]] + first * all * width;
        const float *stream;
        XD_TRY(nn_patch_whole_stream(p, &s, &stream));
        for (int64_t r = 0; r < s.grid.samples * all; r++)
            for (int64_t c = 0; c < width; c++)
                out[(r % s.grid.samples * width + c) * all + r / s.grid.samples] = stream[r * width + c];
    }
    return XD_OK;
}

static void nn_patch_take_feature(const nn_patch *p, const nn_patch_slot *slot, int layer,
                                  const float *const *gradients) {
    const int64_t all = p->at.all, width = p->grid.width, before = p->at.first * p->at.each;
    if (!gradients || p->features.number[layer] < 0) return;
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_patch_span s = nn_patch_span_at(p, slot, first);
        const float *d = gradients[p->features.number[layer]] + first * all * width;
        for (int64_t r = 0; r < s.rows; r++)
            for (int64_t c = 0; c < width; c++)
                s.d_x[r * width + c] +=
                    d[(r % s.grid.samples * width + c) * all + before + r / s.grid.samples];
    }
}

/* ---- the network's functions ---- */

static xd_result nn_patch_forward(void *user, const xd_network_call *call) {
    nn_patch *p = (nn_patch *)user;
    const int layers = p->config.layers;
    const xd_pass pass = nn_pass_of(call, false);
    xd_block_view root;
    const float *w[NN_PATCH_ROOT_WEIGHTS];
    float *g[NN_PATCH_ROOT_WEIGHTS];
    XD_TRY(nn_call_check(p->ctx, call, p->samples, p->slot_count, call->keep));
    XD_TRY(nn_condition_check(p->ctx, &p->time, call));
    nn_patch_slot *slot = &p->slots[call->keep ? call->slot : p->slot_count];
    XD_TRY(xd_block_begin(p->blocks[layers], pass, &root));
    nn_call_weights(&root, NN_PATCH_ROOT_WEIGHTS, w, g);
    slot->samples = call->samples;
    if (slot->samples > 0) {
        nn_patch_condition(p, w, call, slot);
        nn_patch_embed(p, w, slot, (const float *)call->hidden);
    }
    for (int i = 0; i < layers; i++) {
        XD_TRY(nn_patch_layer_pass(p, slot, i, pass, NULL));
        XD_TRY(nn_patch_give_feature(p, slot, i, call->features));
    }
    nn_patch_head(p, w, slot, (float *)call->raw);
    return xd_block_end(p->blocks[layers]);
}

static xd_result nn_patch_backward(void *user, const xd_network_call *call) {
    nn_patch *p = (nn_patch *)user;
    const int layers = p->config.layers;
    const xd_pass pass = nn_pass_of(call, true);
    xd_block_view root;
    const float *w[NN_PATCH_ROOT_WEIGHTS];
    float *g[NN_PATCH_ROOT_WEIGHTS];
    XD_TRY(nn_call_check(p->ctx, call, p->samples, p->slot_count, true));
    const nn_patch_slot *slot = &p->slots[call->slot];
    XD_TRY(nn_call_check_kept(p->ctx, call, slot->samples));
    XD_TRY(xd_block_begin(p->blocks[layers], pass, &root));
    nn_call_weights(&root, NN_PATCH_ROOT_WEIGHTS, w, g);
    XD_TRY(nn_patch_head_backward(p, w, g, slot, call));
    for (int i = nn_features_behind(&p->features, call) - 1; i >= 0; i--) {
        nn_patch_take_feature(p, slot, i, call->feature_gradients);
        XD_TRY(nn_patch_layer_pass(p, slot, i, pass, call));
    }
    XD_TRY(nn_patch_embed_backward(p, w, g, slot, call));
    if (slot->samples > 0 && call->weights) XD_TRY(nn_patch_condition_backward(p, w, g, slot));
    return xd_block_end(p->blocks[layers]);
}

xd_network nn_patch_network(nn_patch *p) {
    xd_network n;
    memset(&n, 0, sizeof n);
    n.user = p;
    n.predicts = XD_PREDICT_FLOW;
    n.feature_count = p->features.count;
    n.feature_elements = p->features.elements;
    n.forward = nn_patch_forward;
    n.backward = nn_patch_backward;
    return n;
}
