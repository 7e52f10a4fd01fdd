/* nn_patch_rows.c - loops over rows, written so that compilers make vectors of them: sums are kept in eight lanes. */
#include "nn_patch_rows.h"

#include <math.h>
#include <string.h>

/* At -O2 gcc makes vectors of few loops. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC push_options
#    pragma GCC optimize("O3", "no-trapping-math", "no-math-errno")
#endif

enum { NN_LANE = 8 };

static float nn_lane_fold(const float lane[NN_LANE]) {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* ---- norm, shift, scale, gate ---- */

float nn_row_sum(int64_t width, const float *x) {
    float lane[NN_LANE] = { 0 };
    for (int64_t i = 0; i < width; i += NN_LANE)
        for (int j = 0; j < NN_LANE; j++) lane[j] += x[i + j];
    return nn_lane_fold(lane);
}

float nn_row_dot(int64_t width, const float *x, const float *y) {
    float lane[NN_LANE] = { 0 };
    for (int64_t i = 0; i < width; i += NN_LANE)
        for (int j = 0; j < NN_LANE; j++) lane[j] += x[i + j] * y[i + j];
    return nn_lane_fold(lane);
}

void nn_layernorm(int64_t rows, int64_t width, const float *x, float *y, float *inverse) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        const float mean = nn_row_sum(width, x) / (float)width;
        for (int64_t i = 0; i < width; i++) y[i] = x[i] - mean;
        const float scale = 1.0f / sqrtf(nn_row_dot(width, y, y) / (float)width + 1e-6f);
        for (int64_t i = 0; i < width; i++) y[i] *= scale;
        inverse[r] = scale;
    }
}

void nn_modulate(nn_grid grid, const float *x, nn_per_sample shift, nn_per_sample scale, float *y) {
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++, x += grid.width, y += grid.width) {
        const float *add = shift.data + r % grid.samples * shift.stride;
        const float *by = scale.data + r % grid.samples * scale.stride;
        for (int64_t i = 0; i < grid.width; i++) y[i] = x[i] * (1.0f + by[i]) + add[i];
    }
}

/* One row: what is above comes to d_y by the scale, and to x by the norm. */
static void nn_norm_row_backward(int64_t width, const float *y, float inverse, const float *by,
                                 const float *d_out, float *d_x) {
    float sums[NN_LANE] = { 0 }, dots[NN_LANE] = { 0 };
    for (int64_t i = 0; i < width; i += NN_LANE)
        for (int j = 0; j < NN_LANE; j++) {
            const float d_y = d_out[i + j] * (1.0f + by[i + j]);
            sums[j] += d_y;
            dots[j] += d_y * y[i + j];
        }
    const float mean = nn_lane_fold(sums) / (float)width, slope = nn_lane_fold(dots) / (float)width;
    for (int64_t i = 0; i < width; i++) d_x[i] += inverse * (d_out[i] * (1.0f + by[i]) - mean - y[i] * slope);
}

/* A sample's sum over the block that row `r` is in, of zeros at first. */
static float *nn_block_place(nn_grid grid, int64_t r, nn_per_sample sums) {
    const int64_t token = r / grid.samples;
    float *place = sums.data + token / grid.block * sums.block + r % grid.samples * sums.stride;
    if (token % grid.block == 0) memset(place, 0, (size_t)grid.width * sizeof *place);
    return place;
}

void nn_modulated_backward(nn_grid grid, const nn_normed *kept, const float *d_out, float *d_x,
                           nn_per_sample d_shift, nn_per_sample d_scale) {
    const int64_t width = grid.width;
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++) {
        const float *y = kept->y + r * width, *d = d_out + r * width;
        float *add = nn_block_place(grid, r, d_shift), *scale = nn_block_place(grid, r, d_scale);
        for (int64_t i = 0; i < width; i++) add[i] += d[i];
        for (int64_t i = 0; i < width; i++) scale[i] += d[i] * y[i];
        nn_norm_row_backward(width, y, kept->inverse[r],
                             kept->scale.data + r % grid.samples * kept->scale.stride, d, d_x + r * width);
    }
}

void nn_gate(nn_grid grid, const float *y, nn_per_sample gate, float *x) {
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++, x += grid.width, y += grid.width) {
        const float *by = gate.data + r % grid.samples * gate.stride;
        for (int64_t i = 0; i < grid.width; i++) x[i] += by[i] * y[i];
    }
}

void nn_gate_backward(nn_grid grid, const float *y, nn_per_sample gate, const float *d_x, float *d_y,
                      nn_per_sample d_gate) {
    const int64_t width = grid.width;
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++) {
        const float *by = gate.data + r % grid.samples * gate.stride, *d = d_x + r * width,
                    *own = y + r * width;
        float *d_by = nn_block_place(grid, r, d_gate);
        for (int64_t i = 0; i < width; i++) d_by[i] += d[i] * own[i];
        for (int64_t i = 0; i < width; i++) d_y[r * width + i] = by[i] * d[i];
    }
}

/* ---- element by element ---- */

void nn_silu(int64_t count, const float *x, const float *sigmoid, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * sigmoid[i];
}

void nn_silu_backward(int64_t count, const float *x, const float *sigmoid, float *d) {
    for (int64_t i = 0; i < count; i++) d[i] *= sigmoid[i] * (1.0f + x[i] * (1.0f - sigmoid[i]));
}

void nn_fill_rows(int64_t rows, int64_t width, const float *bias, float *y) {
    for (int64_t r = 0; r < rows; r++) memcpy(y + r * width, bias, (size_t)width * sizeof *y);
}

void nn_add_all(int64_t count, const float *x, float *y) {
    for (int64_t i = 0; i < count; i++) y[i] += x[i];
}

void nn_sum_rows(int64_t rows, int64_t width, const float *x, float *sum) {
    for (int64_t r = 0; r < rows; r++) nn_add_all(width, x + r * width, sum);
}

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC pop_options
#endif
