/* nn_conv_block.c - see nn_conv_block.h. */
#include "nn_conv_block.h"

#include "nn_exp.h"
#include "nn_matmul.h"
#include "nn_patch_layer.h"

#include <string.h>

static int64_t nn_conv_rows(const nn_conv_part *part) {
    return part->sizes.samples * part->sizes.places;
}

nn_conv_map nn_conv_part_map(const nn_conv_part *part, const float *const weights[2], int64_t in,
                             int64_t out) {
    const nn_conv_map map = { part->sizes.samples, part->height, part->width,       in, out,
                              weights[0],          weights[1],   part->room.columns };
    return map;
}

/* The channels of h that are here. */
static int64_t nn_conv_here(const nn_conv_part *part) {
    return part->pieces->end - part->pieces->begin;
}

static nn_conv_map nn_conv_inner_map(const nn_conv_part *part, const float *const *weights, int which) {
    const int64_t here = nn_conv_here(part), all = part->sizes.channels;
    const bool first = which == NN_CONV_CONV1;
    return nn_conv_part_map(part, weights + which, first ? all : here, first ? here : all);
}

static nn_group_norm nn_conv_norm(const nn_conv_part *part, const nn_conv_trace *trace) {
    nn_group_norm norm = part->sizes;
    norm.channels = trace->channels;
    norm.groups = trace->groups;
    return norm;
}

/* ---- norm, scale, shift and silu ---- */

void nn_conv_read(const nn_conv_part *part, const nn_conv_trace *kept, const float *const affine[2]) {
    const int64_t rows = nn_conv_rows(part), channels = kept->channels;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < channels; c++)
            part->room.affine[r * channels + c] =
                kept->normed[r * channels + c] * affine[0][c] + affine[1][c];
    nn_sigmoid(rows * channels, part->room.affine, part->room.sigmoid);
    nn_silu(rows * channels, part->room.affine, part->room.sigmoid, part->room.read);
}

void nn_conv_read_backward(const nn_conv_part *part, const nn_conv_trace *kept, const float *const affine[2],
                           float *const gradients[2], float *d) {
    const int64_t rows = nn_conv_rows(part), channels = kept->channels;
    const nn_group_norm norm = nn_conv_norm(part, kept);
    nn_silu_backward(rows * channels, part->room.affine, part->room.sigmoid, d);
    if (gradients[1]) nn_sum_rows(rows, channels, d, gradients[1]);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < channels; c++) {
            const int64_t i = r * channels + c;
            if (gradients[0]) gradients[0][c] += d[i] * kept->normed[i];
            d[i] *= affine[0][c];
        }
    nn_group_norm_backward(&norm, kept->normed, kept->inverse, d);
}

/* ---- time and class ---- */

static nn_patch_map nn_conv_time(const nn_conv_part *part, const float *const *weights) {
    const nn_patch_map map = { part->sizes.samples, part->embedding, nn_conv_here(part),
                               weights[NN_CONV_TIME], weights[NN_CONV_TIME_BIAS] };
    return map;
}

static void nn_conv_add_time(const nn_conv_part *part, const float *const *weights, float *h) {
    const nn_patch_map time = nn_conv_time(part, weights);
    const int64_t channels = time.out;
    nn_patch_map_forward(&time, part->active, part->room.time);
    for (int64_t r = 0; r < nn_conv_rows(part); r++)
        nn_add_all(channels, part->room.time + r / part->sizes.places * channels, h + r * channels);
}

static xd_result nn_conv_time_backward(const nn_conv_part *part, const float *const *weights,
                                       float *const *gradients, const float *d, float *d_active) {
    const nn_patch_map time = nn_conv_time(part, weights);
    const int64_t channels = time.out, samples = part->sizes.samples, embedding = part->embedding;
    const nn_piece_product of = { part->room.time, time.weight, samples, embedding, 1, false };
    memset(part->room.time, 0, (size_t)(samples * channels) * sizeof *part->room.time);
    for (int64_t s = 0; s < samples; s++)
        nn_sum_rows(part->sizes.places, channels, d + s * part->sizes.places * channels,
                    part->room.time + s * channels);
    nn_patch_map_backward(&time, part->active, part->room.time, NULL, gradients + NN_CONV_TIME);
    if (!part->pieces->comm) {
        nn_matmul(nn_dense(part->room.time, samples, channels), nn_dense(time.weight, channels, embedding),
                  d_active, embedding, true);
        return XD_OK;
    }
    XD_TRY(nn_pieces_multiply(part->pieces, &of, NULL, part->room.d_active));
    nn_add_all(samples * embedding, part->room.d_active, d_active);
    return XD_OK;
}

/* ---- the convolutions that ranks share ---- */

static xd_result nn_conv_conv2(const nn_conv_part *part, const nn_conv_map *conv2, const float *x, float *y) {
    if (part->pieces->comm) return nn_conv_map_join(conv2, part->pieces, x, y);
    nn_conv_map_forward(conv2, x, y);
    return XD_OK;
}

static xd_result nn_conv_conv1_backward(const nn_conv_part *part, const nn_conv_map *conv1, const float *d_y,
                                        float *d_x, float *const gradients[2]) {
    const bool shared = part->pieces->comm != NULL;
    nn_conv_map_backward(conv1, part->room.read, d_y, shared ? NULL : d_x, gradients);
    return shared ? nn_conv_map_join_backward(conv1, part->pieces, d_y, d_x) : XD_OK;
}

/* ---- both ways ---- */

xd_result nn_conv_block_forward(const nn_conv_part *part, const float *const *weights) {
    const nn_conv_map conv1 = nn_conv_inner_map(part, weights, NN_CONV_CONV1),
                      conv2 = nn_conv_inner_map(part, weights, NN_CONV_CONV2);
    const nn_conv_trace *first = &part->norms[0], *second = &part->norms[1];
    const nn_group_norm norm2 = nn_conv_norm(part, second);
    const int64_t count = nn_conv_rows(part) * part->sizes.channels;
    memcpy(first->normed, part->x, (size_t)count * sizeof *part->x);
    nn_group_norm_forward(&part->sizes, first->normed, first->inverse);
    nn_conv_read(part, first, weights + NN_CONV_NORM1);
    nn_conv_map_forward(&conv1, part->room.read, second->normed);
    nn_conv_add_time(part, weights, second->normed);
    nn_group_norm_forward(&norm2, second->normed, second->inverse);
    nn_conv_read(part, second, weights + NN_CONV_NORM2);
    XD_TRY(nn_conv_conv2(part, &conv2, part->room.read, part->room.branch));
    nn_add_all(count, part->room.branch, part->x);
    return XD_OK;
}

xd_result nn_conv_block_backward(const nn_conv_part *part, const float *const *weights,
                                 float *const *gradients, float *d_x, float *d_active) {
    const nn_conv_map conv1 = nn_conv_inner_map(part, weights, NN_CONV_CONV1),
                      conv2 = nn_conv_inner_map(part, weights, NN_CONV_CONV2);
    float *above = part->room.branch, *below = part->room.d_branch;
    nn_conv_read(part, &part->norms[1], weights + NN_CONV_NORM2);
    nn_conv_map_backward(&conv2, part->room.read, d_x, above, gradients + NN_CONV_CONV2);
    nn_conv_read_backward(part, &part->norms[1], weights + NN_CONV_NORM2, gradients + NN_CONV_NORM2, above);
    XD_TRY(nn_conv_time_backward(part, weights, gradients, above, d_active));
    nn_conv_read(part, &part->norms[0], weights + NN_CONV_NORM1);
    XD_TRY(nn_conv_conv1_backward(part, &conv1, above, below, gradients + NN_CONV_CONV1));
    nn_conv_read_backward(part, &part->norms[0], weights + NN_CONV_NORM1, gradients + NN_CONV_NORM1, below);
    nn_add_all(nn_conv_rows(part) * part->sizes.channels, below, d_x);
    return XD_OK;
}
