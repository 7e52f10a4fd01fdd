/* nn_patch_attention.c - see nn_patch_attention.h. */
#include "nn_patch_attention.h"

#include "nn_exp.h"
#include "nn_small.h"

#include <math.h>
#include <string.h>

/* At -O2 gcc makes vectors of few loops. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC push_options
#    pragma GCC optimize("O3", "no-trapping-math", "no-math-errno")
#endif

enum { NN_LARGEST_LANE = 8 };

/* out [cols, rows] of x [rows, cols] with a stride */
static void nn_turn(int64_t rows, int64_t cols, const float *x, int64_t stride, float *out) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) out[j * rows + i] = x[i * stride + j];
}

/* ---- softmax ---- */

static float nn_largest(int64_t count, const float *x) {
    float lane[NN_LARGEST_LANE];
    memcpy(lane, x, sizeof lane);
    for (int64_t i = NN_LARGEST_LANE; i < count; i += NN_LARGEST_LANE)
        for (int j = 0; j < NN_LARGEST_LANE; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int half = NN_LARGEST_LANE / 2; half > 0; half /= 2)
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
        const float inverse = 1.0f / nn_row_sum(count, row);
        for (int64_t i = 0; i < count; i++) row[i] *= inverse;
    }
}

/* In place over the gradient of the probabilities. */
static void nn_softmax_rows_backward(int64_t rows, int64_t count, float scale, const float *probs, float *d) {
    for (int64_t r = 0; r < rows; r++, probs += count, d += count) {
        const float mean = nn_row_dot(count, probs, d);
        for (int64_t i = 0; i < count; i++) d[i] = probs[i] * (d[i] - mean) * scale;
    }
}

/* ---- what is read ---- */

/* Rows of all tokens: those of a sample begin at row number `sample`, `stride` floats from one token to the next. */
typedef struct nn_token_rows {
    const float *data;
    int64_t row, stride;
} nn_token_rows;

static nn_token_rows nn_rows_of(const nn_full_attention *a, const float *data, int64_t row) {
    const nn_token_rows rows = { data, row, a->grid.samples * row };
    return rows;
}

/* Keys; values follow them in each row. */
static nn_token_rows nn_attention_keys(const nn_full_attention *a) {
    const int64_t width = a->grid.width;
    return a->kept ? nn_rows_of(a, a->kept, 2 * width) : nn_rows_of(a, a->qkv + width, 3 * width);
}

/* ---- forward ---- */

static xd_result nn_attention_gather_keys(const nn_full_attention *a) {
    const int64_t width = a->grid.width, rows = a->grid.samples * a->grid.tokens;
    if (!a->kept) return XD_OK;
    for (int64_t r = 0; r < rows; r++)
        memcpy(a->room.own + r * 2 * width, a->qkv + (3 * r + 1) * width,
               (size_t)(2 * width) * sizeof(float));
    return nn_positions_gather(a->at, a->grid.samples * 2 * width, a->room.own, a->kept);
}

xd_result nn_full_attention_forward(const nn_full_attention *a, float *out) {
    const int64_t tokens = a->grid.tokens, all = a->at->all, width = a->grid.width, each = width / a->heads;
    const nn_token_rows queries = nn_rows_of(a, a->qkv, 3 * width), keys = nn_attention_keys(a);
    const nn_small scores = { tokens, all, each, queries.stride, 1, all, all };
    const nn_small values = { tokens, each, all, all, 1, keys.stride, a->grid.samples * width };
    XD_TRY(nn_attention_gather_keys(a));
    for (int64_t s = 0; s < a->grid.samples; s++) {
        const float *q = queries.data + s * queries.row, *k = keys.data + s * keys.row;
        float *probs = a->probs + s * a->heads * tokens * all;
        for (int64_t h = 0; h < a->heads; h++) {
            nn_turn(all, each, k + h * each, keys.stride, a->room.turned);
            nn_small_product(&scores, q + h * each, a->room.turned, probs + h * tokens * all);
        }
        nn_softmax_rows(a->heads * tokens, all, 1.0f / sqrtf((float)each), probs);
        for (int64_t h = 0; h < a->heads; h++)
            nn_small_product(&values, probs + h * tokens * all, k + width + h * each,
                             out + s * width + h * each);
    }
    return XD_OK;
}

/* ---- backward ---- */

/* The gradients by the scores of the queries here, and by these queries. */
static void nn_attention_queries_backward(const nn_full_attention *a, const float *d_out, float *d_qkv) {
    const int64_t tokens = a->grid.tokens, all = a->at->all, width = a->grid.width, each = width / a->heads;
    const nn_token_rows slopes = nn_rows_of(a, d_out, width), keys = nn_attention_keys(a);
    const nn_small scores = { tokens, all, each, slopes.stride, 1, all, all };
    const nn_small by_query = { tokens, each, all, all, 1, keys.stride, a->grid.samples * 3 * width };
    for (int64_t n = 0; n < a->grid.samples * a->heads; n++) {
        const int64_t s = n / a->heads, at = n % a->heads * each;
        const float *k = keys.data + s * keys.row + at;
        float *d_scores = a->room.scores + n * tokens * all;
        nn_turn(all, each, k + width, keys.stride, a->room.turned);
        nn_small_product(&scores, slopes.data + s * slopes.row + at, a->room.turned, d_scores);
        nn_softmax_rows_backward(tokens, all, 1.0f / sqrtf((float)each), a->probs + n * tokens * all,
                                 d_scores);
        nn_small_product(&by_query, d_scores, k, d_qkv + s * 3 * width + at);
    }
}

/* For the keys here: probabilities and gradients by scores of all queries, [samples, heads, all tokens, `row`], of which the first
 * `tokens` columns are read; all queries, and the gradients by what they gave. */
typedef struct nn_key_side {
    const float *probs, *scores;
    int64_t row;
    nn_token_rows queries, slopes;
} nn_key_side;

static void nn_attention_keys_backward(const nn_full_attention *a, const nn_key_side *side, float *d_qkv) {
    const int64_t tokens = a->grid.tokens, all = a->at->all, width = a->grid.width, each = width / a->heads;
    const int64_t out = a->grid.samples * 3 * width;
    const nn_small by_value = { tokens, each, all, 1, side->row, side->slopes.stride, out };
    const nn_small by_key = { tokens, each, all, 1, side->row, side->queries.stride, out };
    for (int64_t n = 0; n < a->grid.samples * a->heads; n++) {
        const int64_t s = n / a->heads, at = n % a->heads * each;
        float *to = d_qkv + s * 3 * width + at;
        nn_small_product(&by_value, side->probs + n * all * side->row,
                         side->slopes.data + s * side->slopes.row + at, to + 2 * width);
        nn_small_product(&by_key, side->scores + n * all * side->row,
                         side->queries.data + s * side->queries.row + at, to + width);
    }
}

/* ---- ranks that share tokens ---- */

/* Columns of a rank's keys from, or the rows of its queries into, an array [samples and heads, tokens, all tokens] or [samples and
 * heads, all tokens, tokens]. */
static void nn_attention_send_columns(const nn_full_attention *a, const float *from, xd_interval keys,
                                      float *to) {
    const int64_t size = keys.end - keys.begin;
    for (int64_t r = 0; r < a->grid.samples * a->heads * a->grid.tokens; r++)
        memcpy(to + r * size, from + r * a->at->all + keys.begin, (size_t)size * sizeof *to);
}

static void nn_attention_take_rows(const nn_full_attention *a, const float *from, xd_interval queries,
                                   float *to) {
    const int64_t tokens = a->grid.tokens, size = (queries.end - queries.begin) * tokens;
    for (int64_t n = 0; n < a->grid.samples * a->heads; n++)
        memcpy(to + (n * a->at->all + queries.begin) * tokens, from + n * size, (size_t)size * sizeof *to);
}

/* Two arrays of [samples, heads, tokens, all tokens] by queries become room.columns, two by keys. */
static xd_result nn_attention_exchange(const nn_full_attention *a) {
    const int64_t each = a->grid.samples * a->heads * a->grid.tokens;
    int64_t counts[NN_POSITION_BLOCKS];
    for (int r = 0; r < xd_comm_size(a->at->comm); r++) {
        const xd_interval keys = nn_positions_tokens(a->at, r);
        float *to = a->room.sent + 2 * each * keys.begin;
        counts[r] = 2 * each * (keys.end - keys.begin);
        nn_attention_send_columns(a, a->probs, keys, to);
        nn_attention_send_columns(a, a->room.scores, keys, to + counts[r] / 2);
    }
    XD_TRY(xd_all_to_all(a->at->comm, a->room.sent, counts, a->room.received, counts, XD_DTYPE_F32));
    for (int r = 0; r < xd_comm_size(a->at->comm); r++) {
        const xd_interval queries = nn_positions_tokens(a->at, r);
        const float *from = a->room.received + 2 * each * queries.begin;
        nn_attention_take_rows(a, from, queries, a->room.columns);
        nn_attention_take_rows(a, from + counts[r] / 2, queries, a->room.columns + each * a->at->all);
    }
    return XD_OK;
}

/* Queries, and the gradients by what they gave, of all tokens side by side. */
static xd_result nn_attention_gather_queries(const nn_full_attention *a, const float *d_out) {
    const int64_t width = a->grid.width, rows = a->grid.samples * a->grid.tokens;
    for (int64_t r = 0; r < rows; r++) {
        memcpy(a->room.own + 2 * r * width, a->qkv + 3 * r * width, (size_t)width * sizeof(float));
        memcpy(a->room.own + (2 * r + 1) * width, d_out + r * width, (size_t)width * sizeof(float));
    }
    return nn_positions_gather(a->at, a->grid.samples * 2 * width, a->room.own, a->room.all);
}

static xd_result nn_attention_key_side(const nn_full_attention *a, const float *d_out, nn_key_side *out) {
    const int64_t width = a->grid.width;
    out->probs = a->probs;
    out->scores = a->room.scores;
    out->row = a->at->all;
    out->queries = nn_rows_of(a, a->qkv, 3 * width);
    out->slopes = nn_rows_of(a, d_out, width);
    if (!a->kept) return XD_OK;
    XD_TRY(nn_attention_exchange(a));
    XD_TRY(nn_attention_gather_queries(a, d_out));
    out->probs = a->room.columns;
    out->scores = a->room.columns + a->grid.samples * a->heads * a->grid.tokens * a->at->all;
    out->row = a->grid.tokens;
    out->queries = nn_rows_of(a, a->room.all, 2 * width);
    out->slopes = nn_rows_of(a, a->room.all + width, 2 * width);
    return XD_OK;
}

xd_result nn_full_attention_backward(const nn_full_attention *a, const float *d_out, float *d_qkv) {
    nn_key_side side;
    nn_attention_queries_backward(a, d_out, d_qkv);
    XD_TRY(nn_attention_key_side(a, d_out, &side));
    nn_attention_keys_backward(a, &side, d_qkv);
    return XD_OK;
}

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC pop_options
#endif
