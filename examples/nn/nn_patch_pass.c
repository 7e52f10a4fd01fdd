/* nn_patch_pass.c - forward and backward of the patch transformer through the blocks of its model. */
#include "nn_call.h"
#include "nn_exp.h"
#include "nn_matmul.h"
#include "nn_patch_inside.h"

#include <math.h>
#include <string.h>

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

static xd_result nn_patch_labels_check(const nn_patch *p, const xd_network_call *call) {
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

/* The stream behind a layer as [width, tokens] of each sample, when that is a feature. */
static void nn_patch_give_feature(const nn_patch *p, const nn_patch_slot *slot, int layer,
                                  float *const *features) {
    const int64_t tokens = p->grid.tokens, width = p->grid.width;
    if (!features || p->captured[layer] < 0) return;
    float *out = features[p->captured[layer]];
    for (int64_t r = 0; r < slot->samples * tokens; r++)
        for (int64_t c = 0; c < width; c++)
            out[(r / tokens * width + c) * tokens + r % tokens] = p->x[r * width + c];
}

static void nn_patch_take_feature(const nn_patch *p, const nn_patch_slot *slot, int layer,
                                  const float *const *gradients) {
    const int64_t tokens = p->grid.tokens, width = p->grid.width;
    if (!gradients || p->captured[layer] < 0) return;
    const float *d = gradients[p->captured[layer]];
    for (int64_t r = 0; r < slot->samples * tokens; r++)
        for (int64_t c = 0; c < width; c++)
            p->d_x[r * width + c] += d[(r / tokens * width + c) * tokens + r % tokens];
}

/* How many layers a backward goes through: without a gradient by what is predicted, and none of weights, those before the last
 * feature. */
static int nn_patch_layers_behind(const nn_patch *p, const xd_network_call *call) {
    int layers = p->config.layers;
    if (call->raw_gradient || call->weights) return layers;
    while (layers > 0 && (!call->feature_gradients || p->captured[layers - 1] < 0)) layers--;
    return layers;
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
    const xd_pass pass = nn_pass_of(call, false);
    xd_block_view root;
    const float *w[NN_PATCH_ROOT_WEIGHTS];
    float *g[NN_PATCH_ROOT_WEIGHTS];
    XD_TRY(nn_call_check(p->ctx, call, p->samples, p->slot_count, call->keep));
    XD_TRY(nn_patch_labels_check(p, call));
    nn_patch_slot *slot = &p->slots[call->keep ? call->slot : p->slot_count];
    XD_TRY(xd_block_begin(p->blocks[layers], pass, &root));
    nn_patch_root_weights(&root, w, g);
    slot->samples = call->samples;
    if (slot->samples > 0) {
        nn_patch_condition(p, w, call, slot);
        nn_patch_embed(p, w, slot, (const float *)call->hidden);
    }
    for (int i = 0; i < layers; i++) {
        XD_TRY(nn_patch_layer_pass(p, slot, i, pass, false));
        nn_patch_give_feature(p, slot, i, call->features);
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
    XD_REQUIRE(p->ctx, slot->samples >= 0, XD_ERROR_STATE,
               "backward of %lld samples where slot %d holds none", (long long)call->samples, call->slot);
    XD_REQUIRE(p->ctx, slot->samples == call->samples, XD_ERROR_STATE,
               "backward of %lld samples where slot %d holds %lld", (long long)call->samples, call->slot,
               (long long)slot->samples);
    XD_TRY(xd_block_begin(p->blocks[layers], pass, &root));
    nn_patch_root_weights(&root, w, g);
    memset(p->d_common, 0, (size_t)(slot->samples * 6 * p->grid.width) * sizeof *p->d_common);
    nn_patch_head_backward(p, w, g, slot, call->raw_gradient);
    for (int i = nn_patch_layers_behind(p, call) - 1; i >= 0; i--) {
        nn_patch_take_feature(p, slot, i, call->feature_gradients);
        XD_TRY(nn_patch_layer_pass(p, slot, i, pass, true));
    }
    nn_patch_embed_backward(p, w, g, slot, call->hidden_gradient);
    if (slot->samples > 0 && call->weights) nn_patch_condition_backward(p, w, g, slot);
    return xd_block_end(p->blocks[layers]);
}

xd_network nn_patch_network(nn_patch *p) {
    xd_network n;
    memset(&n, 0, sizeof n);
    n.user = p;
    n.predicts = XD_PREDICT_FLOW;
    n.feature_count = p->feature_count;
    n.feature_elements = p->feature_elements;
    n.forward = nn_patch_forward;
    n.backward = nn_patch_backward;
    return n;
}
