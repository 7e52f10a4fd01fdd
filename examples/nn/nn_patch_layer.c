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

/* A map's gradients by the tokens of one block. */
typedef struct nn_map_rows {
    nn_patch_map map; /* of a block's rows */
    const float *x, *d_y;
} nn_map_rows;

static void nn_map_block(const void *user, int64_t block, float *out) {
    const nn_map_rows *m = (const nn_map_rows *)user;
    const int64_t rows = m->map.rows, in = m->map.in, to = m->map.out, first = block * rows;
    const nn_view above = nn_dense(m->d_y + first * to, rows, to);
    nn_matmul(nn_transpose(above), nn_dense(m->x + first * in, rows, in), out, in, false);
    memset(out + to * in, 0, (size_t)to * sizeof *out);
    nn_sum_rows(rows, to, m->d_y + first * to, out + to * in);
}

void nn_patch_map_sum(const nn_patch_map *map, const nn_sums *sums, int64_t offset, const float *x,
                      const float *d_y) {
    nn_map_rows rows = { *map, x, d_y };
    const nn_block_sum sum = { nn_map_block, &rows, offset, map->out * (map->in + 1) };
    rows.map.rows = map->rows / sums->at->count;
    nn_sums_add(sums, &sum);
}

static nn_layer_widths nn_layer_widths_of(const nn_patch_part *part) {
    const nn_layer_widths w = { part->grid.width, part->heads->end - part->heads->begin,
                                part->inner->end - part->inner->begin };
    return w;
}

/* A map of the layer, of what is here; its bias follows its weight. */
static nn_patch_map nn_layer_map(const nn_patch_part *part, const float *const *weights, int which) {
    const nn_layer_widths w = nn_layer_widths_of(part);
    nn_patch_map map = { part->grid.samples * part->grid.tokens, w.width, w.width, weights[which],
                         weights[which + 1] };
    if (which == NN_LAYER_QKV) map.out = 3 * w.heads;
    if (which == NN_LAYER_OUT) map.in = w.heads;
    if (which == NN_LAYER_UP) map.out = w.inner;
    if (which == NN_LAYER_DOWN) map.in = w.inner;
    return map;
}

/* Behind the heads or the inner width: what all ranks have of these goes into y. */
static xd_result nn_layer_map_join(const nn_pieces *pieces, const nn_patch_map *map, const float *x,
                                   float *y) {
    const nn_piece_product of = { x, map->weight, map->rows, map->out, 1, true };
    if (pieces->comm) return nn_pieces_multiply(pieces, &of, map->bias, y);
    nn_patch_map_forward(map, x, y);
    return XD_OK;
}

static nn_per_sample nn_layer_place(const nn_patch_part *part, float *rows, int place) {
    const int64_t width = part->grid.width;
    const nn_per_sample x = { rows + place * width, 6 * width, part->grid.samples * 6 * width };
    return x;
}

static nn_full_attention nn_layer_attention(const nn_patch_part *part) {
    nn_full_attention a = { part->grid,          part->heads->leaves.count, part->at,
                            part->trace.qkv,     part->trace.keys,          part->trace.probs,
                            part->room.attention };
    a.grid.width = part->heads->end - part->heads->begin;
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

xd_result nn_patch_layer_forward(const nn_patch_part *part, const float *const *weights) {
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
    XD_TRY(nn_full_attention_forward(&attention, t->mixed));
    XD_TRY(nn_layer_map_join(part->heads, &out, t->mixed, t->attended));
    nn_layer_leave(part, 0, t->attended);

    nn_layer_enter(part, 1);
    nn_patch_map_forward(&up, room->read, t->inner);
    nn_sigmoid(up.rows * up.out, t->inner, t->sigmoid);
    nn_silu(up.rows * up.out, t->inner, t->sigmoid, room->wide);
    XD_TRY(nn_layer_map_join(part->inner, &down, room->wide, t->fed));
    nn_layer_leave(part, 1, t->fed);
    return XD_OK;
}

/* ---- backward ---- */

static void nn_layer_sizes(nn_layer_widths w, int64_t sizes[NN_PATCH_LAYER_WEIGHTS]) {
    sizes[NN_LAYER_TABLE] = 6 * w.width;
    sizes[NN_LAYER_QKV] = 3 * w.heads * w.width;
    sizes[NN_LAYER_QKV_BIAS] = 3 * w.heads;
    sizes[NN_LAYER_OUT] = w.width * w.heads;
    sizes[NN_LAYER_OUT_BIAS] = w.width;
    sizes[NN_LAYER_UP] = w.inner * w.width;
    sizes[NN_LAYER_UP_BIAS] = w.inner;
    sizes[NN_LAYER_DOWN] = w.width * w.inner;
    sizes[NN_LAYER_DOWN_BIAS] = w.width;
}

/* Floats of the weights before one. */
static int64_t nn_layer_offset(nn_layer_widths widths, int which) {
    int64_t sizes[NN_PATCH_LAYER_WEIGHTS], offset = 0;
    nn_layer_sizes(widths, sizes);
    for (int i = 0; i < which; i++) offset += sizes[i];
    return offset;
}

int64_t nn_patch_layer_floats(nn_layer_widths widths) {
    return nn_layer_offset(widths, NN_PATCH_LAYER_WEIGHTS);
}

int64_t nn_patch_layer_largest(nn_layer_widths w) {
    const int64_t heads = (3 * w.heads + 6) * (w.width + 1), feed = (w.width + 1) * (w.inner + 1);
    return heads > feed ? heads : feed;
}

/* The sums for a map's weight and bias. */
static void nn_layer_map_sum(const nn_patch_part *part, const nn_patch_slopes *slopes, int which,
                             const nn_patch_map *map, const float *x, const float *d_y) {
    if (slopes->sums && (slopes->gradients[which] || slopes->gradients[which + 1]))
        nn_patch_map_sum(map, slopes->sums, nn_layer_offset(nn_layer_widths_of(part), which), x, d_y);
}

/* d_x = ... of a map to the heads or the inner width, all ranks together. */
static xd_result nn_layer_map_enter(const nn_pieces *pieces, const nn_patch_map *map, const float *d_y,
                                    float *d_x) {
    float *const none[2] = { NULL, NULL };
    const nn_piece_product of = {
        d_y, map->weight, map->rows, map->in, (int)(map->out / (pieces->end - pieces->begin)), false
    };
    if (pieces->comm) return nn_pieces_multiply(pieces, &of, NULL, d_x);
    nn_patch_map_backward(map, NULL, d_y, d_x, none);
    return XD_OK;
}

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

static xd_result nn_layer_feed_backward(const nn_patch_part *part, const float *const *weights,
                                        const nn_patch_slopes *slopes) {
    float *const none[2] = { NULL, NULL };
    const nn_patch_trace *t = &part->trace;
    const nn_patch_room *room = &part->room;
    const nn_patch_map up = nn_layer_map(part, weights, NN_LAYER_UP),
                       down = nn_layer_map(part, weights, NN_LAYER_DOWN);
    nn_layer_leave_backward(part, 1, t->fed, slopes->d_x);
    nn_silu(up.rows * up.out, t->inner, t->sigmoid, room->wide);
    nn_patch_map_backward(&down, NULL, room->d_branch, room->d_wide, none);
    nn_layer_map_sum(part, slopes, NN_LAYER_DOWN, &down, room->wide, room->d_branch);
    nn_silu_backward(up.rows * up.out, t->inner, t->sigmoid, room->d_wide);
    nn_layer_read(part, 1);
    nn_layer_map_sum(part, slopes, NN_LAYER_UP, &up, room->read, room->d_wide);
    XD_TRY(nn_layer_map_enter(part->inner, &up, room->d_wide, room->d_branch));
    nn_layer_enter_backward(part, 1, slopes->d_x);
    return XD_OK;
}

static xd_result nn_layer_attend_backward(const nn_patch_part *part, const float *const *weights,
                                          const nn_patch_slopes *slopes) {
    float *const none[2] = { NULL, NULL };
    const nn_patch_trace *t = &part->trace;
    const nn_patch_room *room = &part->room;
    const nn_patch_map qkv = nn_layer_map(part, weights, NN_LAYER_QKV),
                       out = nn_layer_map(part, weights, NN_LAYER_OUT);
    const nn_full_attention attention = nn_layer_attention(part);
    nn_layer_leave_backward(part, 0, t->attended, slopes->d_x);
    nn_patch_map_backward(&out, NULL, room->d_branch, room->read, none);
    nn_layer_map_sum(part, slopes, NN_LAYER_OUT, &out, t->mixed, room->d_branch);
    XD_TRY(nn_full_attention_backward(&attention, room->read, room->d_wide));
    nn_layer_read(part, 0);
    nn_layer_map_sum(part, slopes, NN_LAYER_QKV, &qkv, room->read, room->d_wide);
    XD_TRY(nn_layer_map_enter(part->heads, &qkv, room->d_wide, room->d_branch));
    nn_layer_enter_backward(part, 0, slopes->d_x);
    return XD_OK;
}

/* The table's gradient in a block: the sum over its samples. */
static void nn_layer_table_block(const void *user, int64_t block, float *out) {
    const nn_patch_part *part = (const nn_patch_part *)user;
    const int64_t samples = part->grid.samples, width = 6 * part->grid.width;
    memset(out, 0, (size_t)width * sizeof *out);
    nn_sum_rows(samples, width, part->room.d_common + block * samples * width, out);
}

/* The sums of all blocks to the gradients. */
static xd_result nn_layer_give(const nn_patch_part *part, const nn_patch_slopes *slopes) {
    const nn_block_sum table = { nn_layer_table_block, part, 0, 6 * part->grid.width };
    int64_t sizes[NN_PATCH_LAYER_WEIGHTS];
    const float *sum;
    nn_sums_add(slopes->sums, &table);
    XD_TRY(nn_sums_join(slopes->sums, &sum));
    nn_layer_sizes(nn_layer_widths_of(part), sizes);
    for (int i = 0; i < NN_PATCH_LAYER_WEIGHTS; sum += sizes[i++])
        if (slopes->gradients[i]) nn_add_all(sizes[i], sum, slopes->gradients[i]);
    return XD_OK;
}

xd_result nn_patch_layer_backward(const nn_patch_part *part, const float *const *weights,
                                  const nn_patch_slopes *slopes) {
    const int64_t count = part->grid.samples * 6 * part->grid.width;
    nn_layer_add_table(part, weights[NN_LAYER_TABLE]);
    XD_TRY(nn_layer_feed_backward(part, weights, slopes));
    XD_TRY(nn_layer_attend_backward(part, weights, slopes));
    for (int64_t b = 0; b < part->at->count; b++)
        nn_add_all(count, part->room.d_common + b * count, slopes->d_common + b * slopes->block);
    return slopes->sums ? nn_layer_give(part, slopes) : XD_OK;
}
