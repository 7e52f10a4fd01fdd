/* nn_patch_layer.c - one layer of the patch transformer. */
#include "nn_patch_layer.h"

#include "nn_exp.h"
#include "nn_matmul.h"

#include <string.h>

/* Places in a row of shifts, scales and gates: those of attention, and 3 further of the feed-forward part. */
enum { NN_SHIFT, NN_SCALE, NN_GATED, NN_BRANCH };

void nn_patch_map_forward(const nn_patch_map *map, const float *x, float *y) {
    nn_fill_rows(map->rows, map->out, map->bias, y);
    nn_matmul(nn_dense(x, map->rows, map->in), nn_transpose(nn_dense(map->weight, map->out, map->in)), y,
              map->out, true);
}

void nn_patch_map_backward(const nn_patch_map *map, const float *x, const float *d_y, float *d_x,
                           float *const gradients[2]) {
    const nn_view above = nn_dense(d_y, map->rows, map->out);
    if (d_x) nn_matmul(above, nn_dense(map->weight, map->out, map->in), d_x, map->in, false);
    if (gradients[0])
        nn_matmul(nn_transpose(above), nn_dense(x, map->rows, map->in), gradients[0], map->in, true);
    if (gradients[1]) nn_sum_rows(map->rows, map->out, d_y, gradients[1]);
}

/* A map of the layer; its bias follows its weight. */
static nn_patch_map nn_layer_map(const nn_patch_part *part, const float *const *weights, int which) {
    const int64_t width = part->grid.width;
    const nn_patch_map map = { part->grid.samples * part->grid.tokens,
                               which == NN_LAYER_DOWN ? part->ffn : width,
                               which == NN_LAYER_UP    ? part->ffn
                               : which == NN_LAYER_QKV ? 3 * width
                                                       : width,
                               weights[which], weights[which + 1] };
    return map;
}

static nn_per_sample nn_layer_place(const nn_patch_part *part, float *rows, int place) {
    const nn_per_sample x = { rows + place * part->grid.width, 6 * part->grid.width };
    return x;
}

static nn_full_attention nn_layer_attention(const nn_patch_part *part) {
    const nn_full_attention a = { part->grid, part->heads, part->trace.qkv, part->trace.probs,
                                  part->room.attention };
    return a;
}

static void nn_layer_add_table(const nn_patch_part *part, const float *table) {
    const int64_t width = 6 * part->grid.width, samples = part->grid.samples;
    nn_fill_rows(samples, width, table, part->room.common);
    nn_add_all(samples * width, part->common, part->room.common);
}

/* What a branch reads, again for its backward. */
static void nn_layer_read(const nn_patch_part *part, int branch) {
    const int place = branch * NN_BRANCH;
    nn_modulate(part->grid, part->trace.normed[branch],
                nn_layer_place(part, part->room.common, place + NN_SHIFT),
                nn_layer_place(part, part->room.common, place + NN_SCALE), part->room.read);
}

/* ---- forward ---- */

static void nn_layer_enter(const nn_patch_part *part, int branch) {
    nn_layernorm(part->grid.samples * part->grid.tokens, part->grid.width, part->x,
                 part->trace.normed[branch], part->trace.inverse[branch]);
    nn_layer_read(part, branch);
}

static void nn_layer_leave(const nn_patch_part *part, int branch, const float *y) {
    nn_gate(part->grid, y, nn_layer_place(part, part->room.common, branch * NN_BRANCH + NN_GATED), part->x);
}

void nn_patch_layer_forward(const nn_patch_part *part, const float *const *weights) {
    const nn_patch_trace *t = &part->trace;
    const nn_patch_room *room = &part->room;
    const nn_patch_map qkv = nn_layer_map(part, weights, NN_LAYER_QKV),
                       out = nn_layer_map(part, weights, NN_LAYER_OUT),
                       up = nn_layer_map(part, weights, NN_LAYER_UP),
                       down = nn_layer_map(part, weights, NN_LAYER_DOWN);
    const nn_full_attention attention = nn_layer_attention(part);
    nn_layer_add_table(part, weights[NN_LAYER_TABLE]);

    nn_layer_enter(part, 0);
    nn_patch_map_forward(&qkv, room->read, t->qkv);
    nn_full_attention_forward(&attention, t->mixed);
    nn_patch_map_forward(&out, t->mixed, t->attended);
    nn_layer_leave(part, 0, t->attended);

    nn_layer_enter(part, 1);
    nn_patch_map_forward(&up, room->read, t->inner);
    nn_sigmoid(up.rows * up.out, t->inner, t->sigmoid);
    nn_silu(up.rows * up.out, t->inner, t->sigmoid, room->wide);
    nn_patch_map_forward(&down, room->wide, t->fed);
    nn_layer_leave(part, 1, t->fed);
}

/* ---- backward ---- */

/* By what was added to the stream. */
static void nn_layer_leave_backward(const nn_patch_part *part, int branch, const float *y, const float *d_x) {
    const int place = branch * NN_BRANCH + NN_GATED;
    nn_gate_backward(part->grid, y, nn_layer_place(part, part->room.common, place), d_x, part->room.d_branch,
                     nn_layer_place(part, part->room.d_common, place));
}

/* From d_branch, by what the branch read, to the stream. */
static void nn_layer_enter_backward(const nn_patch_part *part, int branch, float *d_x) {
    const int place = branch * NN_BRANCH;
    const nn_normed kept = { part->trace.normed[branch], part->trace.inverse[branch],
                             nn_layer_place(part, part->room.common, place + NN_SCALE) };
    nn_modulated_backward(part->grid, &kept, part->room.d_branch, d_x,
                          nn_layer_place(part, part->room.d_common, place + NN_SHIFT),
                          nn_layer_place(part, part->room.d_common, place + NN_SCALE));
}

static void nn_layer_feed_backward(const nn_patch_part *part, const float *const *weights,
                                   float *const *gradients, float *d_x) {
    const nn_patch_trace *t = &part->trace;
    const nn_patch_room *room = &part->room;
    const nn_patch_map up = nn_layer_map(part, weights, NN_LAYER_UP),
                       down = nn_layer_map(part, weights, NN_LAYER_DOWN);
    nn_layer_leave_backward(part, 1, t->fed, d_x);
    nn_silu(up.rows * up.out, t->inner, t->sigmoid, room->wide);
    nn_patch_map_backward(&down, room->wide, room->d_branch, room->d_wide, gradients + NN_LAYER_DOWN);
    nn_silu_backward(up.rows * up.out, t->inner, t->sigmoid, room->d_wide);
    nn_layer_read(part, 1);
    nn_patch_map_backward(&up, room->read, room->d_wide, room->d_branch, gradients + NN_LAYER_UP);
    nn_layer_enter_backward(part, 1, d_x);
}

static void nn_layer_attend_backward(const nn_patch_part *part, const float *const *weights,
                                     float *const *gradients, float *d_x) {
    const nn_patch_trace *t = &part->trace;
    const nn_patch_room *room = &part->room;
    const nn_patch_map qkv = nn_layer_map(part, weights, NN_LAYER_QKV),
                       out = nn_layer_map(part, weights, NN_LAYER_OUT);
    const nn_full_attention attention = nn_layer_attention(part);
    nn_layer_leave_backward(part, 0, t->attended, d_x);
    nn_patch_map_backward(&out, t->mixed, room->d_branch, room->read, gradients + NN_LAYER_OUT);
    nn_full_attention_backward(&attention, room->read, room->d_wide);
    nn_layer_read(part, 0);
    nn_patch_map_backward(&qkv, room->read, room->d_wide, room->d_branch, gradients + NN_LAYER_QKV);
    nn_layer_enter_backward(part, 0, d_x);
}

void nn_patch_layer_backward(const nn_patch_part *part, const float *const *weights, float *const *gradients,
                             float *d_x, float *d_common) {
    const int64_t samples = part->grid.samples, width = 6 * part->grid.width;
    nn_layer_add_table(part, weights[NN_LAYER_TABLE]);
    nn_layer_feed_backward(part, weights, gradients, d_x);
    nn_layer_attend_backward(part, weights, gradients, d_x);
    nn_add_all(samples * width, part->room.d_common, d_common);
    if (gradients[NN_LAYER_TABLE])
        nn_sum_rows(samples, width, part->room.d_common, gradients[NN_LAYER_TABLE]);
}
