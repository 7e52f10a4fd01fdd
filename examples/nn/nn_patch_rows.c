/* nn_patch_rows.c - loops over rows, written so that compilers make vectors of them: sums are kept in eight lanes. */
#include "nn_patch_rows.h"

#include "nn_exp.h"
#include "nn_small.h"

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

static float nn_lane_sum(int64_t width, const float *x) {
    float lane[NN_LANE] = { 0 };
    for (int64_t i = 0; i < width; i += NN_LANE)
        for (int j = 0; j < NN_LANE; j++) lane[j] += x[i + j];
    return nn_lane_fold(lane);
}

static float nn_lane_dot(int64_t width, const float *x, const float *y) {
    float lane[NN_LANE] = { 0 };
    for (int64_t i = 0; i < width; i += NN_LANE)
        for (int j = 0; j < NN_LANE; j++) lane[j] += x[i + j] * y[i + j];
    return nn_lane_fold(lane);
}

void nn_layernorm(int64_t rows, int64_t width, const float *x, float *y, float *inverse) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        const float mean = nn_lane_sum(width, x) / (float)width;
        for (int64_t i = 0; i < width; i++) y[i] = x[i] - mean;
        const float scale = 1.0f / sqrtf(nn_lane_dot(width, y, y) / (float)width + 1e-6f);
        for (int64_t i = 0; i < width; i++) y[i] *= scale;
        inverse[r] = scale;
    }
}

void nn_modulate(nn_grid grid, const float *x, nn_per_sample shift, nn_per_sample scale, float *y) {
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++, x += grid.width, y += grid.width) {
        const float *add = shift.data + r / grid.tokens * shift.stride;
        const float *by = scale.data + r / grid.tokens * scale.stride;
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

void nn_modulated_backward(nn_grid grid, const nn_normed *kept, const float *d_out, float *d_x,
                           nn_per_sample d_shift, nn_per_sample d_scale) {
    const int64_t width = grid.width;
    for (int64_t s = 0; s < grid.samples; s++) {
        const float *by = kept->scale.data + s * kept->scale.stride;
        float *add = d_shift.data + s * d_shift.stride, *scale = d_scale.data + s * d_scale.stride;
        memset(add, 0, (size_t)width * sizeof *add);
        memset(scale, 0, (size_t)width * sizeof *scale);
        for (int64_t r = s * grid.tokens; r < (s + 1) * grid.tokens; r++) {
            const float *y = kept->y + r * width, *d = d_out + r * width;
            for (int64_t i = 0; i < width; i++) add[i] += d[i];
            for (int64_t i = 0; i < width; i++) scale[i] += d[i] * y[i];
            nn_norm_row_backward(width, y, kept->inverse[r], by, d, d_x + r * width);
        }
    }
}

void nn_gate(nn_grid grid, const float *y, nn_per_sample gate, float *x) {
    for (int64_t r = 0; r < grid.samples * grid.tokens; r++, x += grid.width, y += grid.width) {
        const float *by = gate.data + r / grid.tokens * gate.stride;
        for (int64_t i = 0; i < grid.width; i++) x[i] += by[i] * y[i];
    }
}

void nn_gate_backward(nn_grid grid, const float *y, nn_per_sample gate, const float *d_x, float *d_y,
                      nn_per_sample d_gate) {
    const int64_t width = grid.width;
    for (int64_t s = 0; s < grid.samples; s++) {
        const float *by = gate.data + s * gate.stride;
        float *d_by = d_gate.data + s * d_gate.stride;
        memset(d_by, 0, (size_t)width * sizeof *d_by);
        for (int64_t r = s * grid.tokens; r < (s + 1) * grid.tokens; r++) {
            const float *d = d_x + r * width, *own = y + r * width;
            for (int64_t i = 0; i < width; i++) d_by[i] += d[i] * own[i];
            for (int64_t i = 0; i < width; i++) d_y[r * width + i] = by[i] * d[i];
        }
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

/* ---- attention ---- */

/* out [cols, rows] of x [rows, cols] with a stride */
static void nn_turn(int64_t rows, int64_t cols, const float *x, int64_t stride, float *out) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) out[j * rows + i] = x[i * stride + j];
}

static float nn_largest(int64_t count, const float *x) {
    float lane[NN_LANE];
    memcpy(lane, x, sizeof lane);
    for (int64_t i = NN_LANE; i < count; i += NN_LANE)
        for (int j = 0; j < NN_LANE; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int half = NN_LANE / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
    return lane[0];
}

static void nn_softmax_rows(int64_t rows, int64_t count, float scale, float *x) {
    for (int64_t r = 0; r < rows; r++) {
        float *row = x + r * count;
        const float most = nn_largest(count, row);
        for (int64_t i = 0; i < count; i++) row[i] = (row[i] - most) * scale;
    }
    nn_exp(rows * count, x, x);
    for (int64_t r = 0; r < rows; r++) {
        float *row = x + r * count;
        const float inverse = 1.0f / nn_lane_sum(count, row);
        for (int64_t i = 0; i < count; i++) row[i] *= inverse;
    }
}

/* In place over the gradient of the probabilities. */
static void nn_softmax_rows_backward(int64_t rows, int64_t count, float scale, const float *probs, float *d) {
    for (int64_t r = 0; r < rows; r++, probs += count, d += count) {
        const float mean = nn_lane_dot(count, probs, d);
        for (int64_t i = 0; i < count; i++) d[i] = probs[i] * (d[i] - mean) * scale;
    }
}

int64_t nn_full_attention_room(nn_grid grid, int64_t heads) {
    return grid.tokens * (grid.width / heads + grid.tokens);
}

void nn_full_attention_forward(const nn_full_attention *a, float *out) {
    const int64_t tokens = a->grid.tokens, width = a->grid.width, each = width / a->heads;
    const nn_small scores = { tokens, tokens, each, 3 * width, 1, tokens, tokens };
    const nn_small values = { tokens, each, tokens, tokens, 1, 3 * width, width };
    for (int64_t s = 0; s < a->grid.samples; s++) {
        const float *qkv = a->qkv + s * tokens * 3 * width;
        float *probs = a->probs + s * a->heads * tokens * tokens;
        for (int64_t h = 0; h < a->heads; h++) {
            nn_turn(tokens, each, qkv + width + h * each, 3 * width, a->room);
            nn_small_product(&scores, qkv + h * each, a->room, probs + h * tokens * tokens);
        }
        nn_softmax_rows(a->heads * tokens, tokens, 1.0f / sqrtf((float)each), probs);
        for (int64_t h = 0; h < a->heads; h++)
            nn_small_product(&values, probs + h * tokens * tokens, qkv + 2 * width + h * each,
                             out + s * tokens * width + h * each);
    }
}

void nn_full_attention_backward(const nn_full_attention *a, const float *d_out, float *d_qkv) {
    const int64_t tokens = a->grid.tokens, width = a->grid.width, each = width / a->heads;
    const nn_small scores = { tokens, tokens, each, width, 1, tokens, tokens };
    const nn_small by_value = { tokens, each, tokens, 1, tokens, width, 3 * width };
    const nn_small by_query = { tokens, each, tokens, tokens, 1, 3 * width, 3 * width };
    const nn_small by_key = { tokens, each, tokens, 1, tokens, 3 * width, 3 * width };
    float *turned = a->room, *d_scores = a->room + tokens * each;
    for (int64_t k = 0; k < a->grid.samples * a->heads; k++) {
        const int64_t s = k / a->heads, at = k % a->heads * each;
        const float *qkv = a->qkv + s * tokens * 3 * width + at, *probs = a->probs + k * tokens * tokens;
        const float *d = d_out + s * tokens * width + at;
        float *to = d_qkv + s * tokens * 3 * width + at;
        nn_turn(tokens, each, qkv + 2 * width, 3 * width, turned);
        nn_small_product(&scores, d, turned, d_scores);
        nn_small_product(&by_value, probs, d, to + 2 * width);
        nn_softmax_rows_backward(tokens, tokens, 1.0f / sqrtf((float)each), probs, d_scores);
        nn_small_product(&by_query, d_scores, qkv + width, to);
        nn_small_product(&by_key, d_scores, qkv, to + width);
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC pop_options
#endif
