/* nn_layers.c - norm, gate, rotation and attention. */
#include "nn_layers.h"
#include "nn_exp.h"
#include "nn_matmul.h"

#include <math.h>
#include <stddef.h>

/* ---- RMSNorm ---- */

/* The sum of x[i] y[i]; in four parts, because one addition waits for the one before it. */
static double nn_dot(int64_t count, const float *x, const float *y) {
    double part[4] = { 0.0, 0.0, 0.0, 0.0 };
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int j = 0; j < 4; j++) part[j] += (double)x[i + j] * (double)y[i + j];
    for (; i < count; i++) part[0] += (double)x[i] * (double)y[i];
    return (part[0] + part[1]) + (part[2] + part[3]);
}

void nn_rmsnorm(int64_t rows, int64_t width, float eps, const float *x, const float *weight, float *y,
                float *inverse_rms) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        const double squares = nn_dot(width, x, x);
        const float scale = (float)(1.0 / sqrt(squares / (double)width + (double)eps));
        for (int64_t i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
        inverse_rms[r] = scale;
    }
}

/* With n = x * s, s = 1/rms:  d_x = s * (w d_y - n * mean(n w d_y)),  d_w = sum over rows of n d_y. */
void nn_rmsnorm_backward(int64_t rows, int64_t width, const float *x, const float *weight,
                         const float *inverse_rms, const float *d_y, float *d_x, float *d_weight) {
    for (int64_t r = 0; r < rows; r++, x += width, d_y += width, d_x += width) {
        const float scale = inverse_rms[r];
        double dot = 0.0;
        for (int64_t i = 0; i < width; i++) dot += (double)(x[i] * scale) * (double)(weight[i] * d_y[i]);
        const float mean = (float)(dot / (double)width);
        for (int64_t i = 0; i < width; i++) {
            const float normal = x[i] * scale;
            d_x[i] += scale * (weight[i] * d_y[i] - normal * mean);
            d_weight[i] += normal * d_y[i];
        }
    }
}

/* ---- SwiGLU ---- */

enum { NN_BLOCK = 64 }; /* elements whose sigmoids are taken together */

void nn_swiglu(int64_t count, const float *gate, const float *up, float *out) {
    float s[NN_BLOCK];
    for (int64_t at = 0; at < count; at += NN_BLOCK, gate += NN_BLOCK, up += NN_BLOCK, out += NN_BLOCK) {
        const int64_t n = count - at < NN_BLOCK ? count - at : NN_BLOCK;
        nn_sigmoid(n, gate, s);
        for (int64_t i = 0; i < n; i++) out[i] = gate[i] * s[i] * up[i];
    }
}

void nn_swiglu_backward(int64_t count, const float *gate, const float *up, const float *d_out, float *d_gate,
                        float *d_up) {
    float s[NN_BLOCK];
    for (int64_t at = 0; at < count; at += NN_BLOCK) {
        const int64_t end = count - at < NN_BLOCK ? count : at + NN_BLOCK;
        nn_sigmoid(end - at, gate + at, s);
        for (int64_t i = at; i < end; i++) {
            const float own = s[i - at];
            d_gate[i] = d_out[i] * up[i] * own * (1.0f + gate[i] * (1.0f - own));
            d_up[i] = d_out[i] * gate[i] * own;
        }
    }
}

/* ---- rotary positions ---- */

void nn_rope_table(int positions, const int32_t *position, int half, const double *frequency, float *cosine,
                   float *sine) {
    for (int t = 0; t < positions; t++)
        for (int i = 0; i < half; i++) {
            const double angle = (position ? position[t] : t) * frequency[i];
            *cosine++ = (float)cos(angle);
            *sine++ = (float)sin(angle);
        }
}

void nn_rope(int64_t rows, int positions, int heads, int head_dim, const float *cosine, const float *sine,
             float direction, float *x) {
    const int half = head_dim / 2;
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cosine + (r % positions) * half, *s = sine + (r % positions) * half;
        for (int h = 0; h < heads; h++, x += head_dim)
            for (int i = 0; i < half; i++) {
                const float first = x[i], second = x[half + i], sin_i = direction * s[i];
                x[i] = first * c[i] - second * sin_i;
                x[half + i] = second * c[i] + first * sin_i;
            }
    }
}

/* ---- attention ---- */

static int32_t nn_position(const int32_t *list, int index) {
    return list ? list[index] : index;
}

static int32_t nn_query_position(const nn_attention *a, int index) {
    return a->query_pos ? a->query_pos[index] : a->query_first + index;
}

/* One row of scores to probabilities. No key from number `seen` on is seen; those before it that come after the
 * query's position are not either. */
static void nn_masked_softmax(const nn_attention *a, int32_t position, float scale, int seen, float *row) {
    float max = -INFINITY;
    double sum = 0.0;
    while (seen > 0 && nn_position(a->key_pos, seen - 1) > position) seen--;
    for (int j = 0; j < seen; j++) {
        if (nn_position(a->key_pos, j) > position) row[j] = -INFINITY;
        if (row[j] > max) max = row[j];
    }
    for (int j = 0; j < seen; j++) row[j] = (row[j] - max) * scale;
    nn_exp(seen, row, row);
    for (int j = 0; j < seen; j++) sum += (double)row[j];
    const float inverse = (float)(1.0 / sum); /* a query sees at least itself: sum >= 1 */
    for (int j = 0; j < seen; j++) row[j] *= inverse;
    for (int j = seen; j < a->keys; j++) row[j] = 0.0f;
}

static nn_view nn_head(const float *x, int head, int heads, int head_dim, int rows) {
    return nn_block(x + head * head_dim, rows, head_dim, (int64_t)heads * head_dim);
}

static float *nn_head_probs(const nn_attention *a, int head) {
    return a->probs + (int64_t)head * a->queries * a->keys;
}

/* Queries that go through the products together: keys that none of them sees are left out. */
enum { NN_QUERY_BLOCK = 256 };

/* How many keys, from the first on, the queries [begin, end) see: all keys behind them are after every one. */
static int nn_keys_seen(const nn_attention *a, int begin, int end) {
    int32_t last = nn_query_position(a, begin);
    int seen = a->keys;
    for (int i = begin; i < end; i++)
        if (nn_query_position(a, i) > last) last = nn_query_position(a, i);
    while (seen > 0 && nn_position(a->key_pos, seen - 1) > last) seen--;
    return seen;
}

/* The queries [begin, end) of head h. */
static void nn_attend_block(const nn_attention *a, int h, int begin, int end, float *out) {
    const float scale = 1.0f / sqrtf((float)a->head_dim);
    const int64_t stride = (int64_t)a->heads * a->head_dim;
    const int group = h / (a->heads / a->kv_heads), seen = nn_keys_seen(a, begin, end);
    float *probs = nn_head_probs(a, h) + (int64_t)begin * a->keys;
    const nn_view q = nn_head(a->q + begin * stride, h, a->heads, a->head_dim, end - begin);
    const nn_view k = nn_head(a->k, group, a->kv_heads, a->head_dim, seen);
    const nn_view v = nn_head(a->v, group, a->kv_heads, a->head_dim, seen);
    nn_matmul(q, nn_transpose(k), probs, a->keys, false);
    for (int i = begin; i < end; i++)
        nn_masked_softmax(a, nn_query_position(a, i), scale, seen, probs + (int64_t)(i - begin) * a->keys);
    nn_matmul(nn_block(probs, end - begin, seen, a->keys), v, out + begin * stride + h * a->head_dim, stride,
              false);
}

void nn_attention_forward(const nn_attention *a, float *out) {
    for (int h = 0; h < a->heads; h++)
        for (int begin = 0; begin < a->queries; begin += NN_QUERY_BLOCK)
            nn_attend_block(a, h, begin,
                            a->queries < begin + NN_QUERY_BLOCK ? a->queries : begin + NN_QUERY_BLOCK, out);
}

/* Row by row: d_score = prob * (d_prob - sum(d_prob * prob)) * scale, in place over d_prob. */
static void nn_softmax_backward(const float *probs, int rows, int cols, float scale, float *d_probs) {
    for (int i = 0; i < rows; i++, probs += cols, d_probs += cols) {
        float dot = 0.0f;
        for (int j = 0; j < cols; j++) dot += probs[j] * d_probs[j];
        for (int j = 0; j < cols; j++) d_probs[j] = probs[j] * (d_probs[j] - dot) * scale;
    }
}

void nn_attention_backward(const nn_attention *a, const float *d_out, float *d_q, float *d_k, float *d_v,
                           float *d_scores) {
    const float scale = 1.0f / sqrtf((float)a->head_dim);
    const int64_t stride = (int64_t)a->heads * a->head_dim, kv_stride = (int64_t)a->kv_heads * a->head_dim;
    for (int h = 0; h < a->heads; h++) {
        const int group = h / (a->heads / a->kv_heads);
        const nn_view probs = nn_dense(nn_head_probs(a, h), a->queries, a->keys);
        const nn_view scores = nn_dense(d_scores, a->queries, a->keys);
        const nn_view q = nn_head(a->q, h, a->heads, a->head_dim, a->queries);
        const nn_view k = nn_head(a->k, group, a->kv_heads, a->head_dim, a->keys);
        const nn_view v = nn_head(a->v, group, a->kv_heads, a->head_dim, a->keys);
        const nn_view d_o = nn_head(d_out, h, a->heads, a->head_dim, a->queries);
        nn_matmul(d_o, nn_transpose(v), d_scores, a->keys, false);
        nn_matmul(nn_transpose(probs), d_o, d_v + group * a->head_dim, kv_stride, true);
        nn_softmax_backward((const float *)probs.data, a->queries, a->keys, scale, d_scores);
        nn_matmul(scores, k, d_q + h * a->head_dim, stride, false);
        nn_matmul(nn_transpose(scores), q, d_k + group * a->head_dim, kv_stride, true);
    }
}
