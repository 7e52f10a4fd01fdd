/* Every call of the losses that takes ids, on memory of a context's device: what tests of the two widths share. C and C++. */
#ifndef IDS_SCENE_H
#define IDS_SCENE_H

#include <math.h>
#include <string.h>

#include "xd_test.h"
#include "xdistill.h"
#include "loss_calls.h"
#include "softmax_calls.h"

enum { IDS_ROWS = 9, IDS_VOCAB = 44, IDS_WIDTH = 48, IDS_HIDDEN = 6, IDS_K = 3, IDS_CALLS = 11 };

/* What the calls write; all of it is compared. */
typedef struct ids_results {
    xd_loss_values values[5];
    xd_status status;
    xd_denominator denominator;
    float gradient[5][IDS_ROWS * IDS_WIDTH], row_loss[5][IDS_ROWS], weight_gradient[IDS_WIDTH * IDS_HIDDEN];
    float log_probs[IDS_ROWS], picked[IDS_ROWS * IDS_K], shared[IDS_ROWS * IDS_K];
    double accuracy;
} ids_results;

/* Everything that the calls read and write, in one block. */
typedef struct ids_memory {
    float student[IDS_ROWS * IDS_WIDTH], teacher[IDS_ROWS * IDS_WIDTH];
    float hidden[IDS_ROWS * IDS_HIDDEN], weight[IDS_WIDTH * IDS_HIDDEN];
    float row_weight[IDS_ROWS], values[IDS_ROWS * IDS_K];
    int64_t labels[IDS_ROWS], ids[IDS_ROWS * IDS_K];
    int32_t narrow_labels[IDS_ROWS], narrow_ids[IDS_ROWS * IDS_K];
    ids_results out;
} ids_memory;

static inline void ids_fill(ids_memory *m) {
    memset(m, 0, sizeof *m);
    for (int i = 0; i < IDS_ROWS * IDS_WIDTH; i++) {
        m->student[i] = 4.0f * sinf(0.7f * (float)i);
        m->teacher[i] = 3.0f * cosf(0.3f * (float)i);
    }
    for (int i = 0; i < IDS_ROWS * IDS_HIDDEN; i++) m->hidden[i] = sinf((float)i);
    for (int i = 0; i < IDS_WIDTH * IDS_HIDDEN; i++) m->weight[i] = cosf(1.3f * (float)i);
    for (int r = 0; r < IDS_ROWS; r++) {
        /* ignored, outside on both sides, the last column, and others; row 7 is the student's most probable id */
        m->labels[r] = r == 2   ? XD_IGNORE_INDEX
                       : r == 4 ? IDS_VOCAB
                       : r == 5 ? -7
                       : r == 6 ? IDS_VOCAB - 1
                                : 5 * r;
        for (int v = 0; r == 7 && v < IDS_VOCAB; v++)
            if (m->student[r * IDS_WIDTH + v] > m->student[r * IDS_WIDTH + m->labels[r]]) m->labels[r] = v;
        m->narrow_labels[r] = (int32_t)m->labels[r];
        m->row_weight[r] = 0.5f + (float)r;
        for (int j = 0; j < IDS_K; j++) {
            const int at = r * IDS_K + j;
            m->ids[at] = (7 * r + 13 * j) % IDS_VOCAB;
            m->narrow_ids[at] = (int32_t)m->ids[at];
            m->values[at] = r == 3 && j == 1 ? -HUGE_VALF : logf(0.3f / (float)(j + 1));
        }
    }
}

static inline xd_ids ids_of(const int64_t *wide, const int32_t *narrow, xd_dtype dtype) {
    return dtype == XD_DTYPE_I32 ? xd_ids_of(narrow, dtype) : xd_ids_of(wide, dtype);
}

static inline xd_rows ids_matrix(const float *data) {
    return xd_rows_of(data, XD_DTYPE_F32, IDS_ROWS, IDS_WIDTH);
}

/* The desc of loss `i` of the four over whole rows: hard and soft, minimal fine-tuning, cosine, a head. */
static inline xd_loss_desc ids_loss(const xd_vocab *vocab, ids_memory *m, xd_dtype dtype, int i) {
    xd_loss_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = vocab;
    d.soft_weight = i < 3 ? 0.5 : 0.0;
    d.hard_weight = i == 0 || i == 3 ? 0.5 : 0.0;
    if (i < 3) {
        d.student = ids_matrix(m->student);
        d.teacher = ids_matrix(m->teacher);
        d.common.gradient = ids_matrix(m->out.gradient[i]);
    }
    d.common.labels = ids_of(m->labels, m->narrow_labels, dtype);
    d.common.row_weight = m->row_weight;
    d.common.row_loss = m->out.row_loss[i];
    d.common.status = &m->out.status;
    return d;
}

static inline xd_result ids_head(xd_ctx *ctx, const xd_vocab *vocab, ids_memory *m, xd_dtype dtype) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    xd_head_loss_desc d;
    memset(&d, 0, sizeof d);
    d.loss = ids_loss(vocab, m, dtype, 3);
    d.student.hidden = xd_rows_of(m->hidden, XD_DTYPE_F32, IDS_ROWS, IDS_HIDDEN);
    d.student.weight = xd_rows_of(m->weight, XD_DTYPE_F32, info.end - info.begin, IDS_HIDDEN);
    d.weight_gradient = m->out.weight_gradient;
    return xd_head_loss(ctx, &d, &m->out.values[3]);
}

static inline xd_result ids_mft(xd_ctx *ctx, const xd_vocab *vocab, ids_memory *m, xd_dtype dtype) {
    mft_desc d = mft_defaults();
    d.loss = ids_loss(vocab, m, dtype, 1);
    return mft_loss(ctx, &d, &m->out.values[1]);
}

/* labels: the test is about the width of the labels; otherwise about that of the ids, and there are no labels. */
static inline xd_result ids_topk(xd_ctx *ctx, const xd_vocab *vocab, ids_memory *m, xd_dtype dtype,
                                 bool labels) {
    xd_topk_desc d;
    memset(&d, 0, sizeof d);
    d.student = ids_matrix(m->student);
    d.vocab = vocab;
    d.k = IDS_K;
    d.ids = labels ? xd_ids_of(m->ids, XD_DTYPE_NONE) : ids_of(m->ids, m->narrow_ids, dtype);
    d.values = m->values;
    d.mode = XD_TOPK_TAIL;
    if (labels) d.common.labels = ids_of(m->labels, m->narrow_labels, dtype);
    d.common.row_weight = m->row_weight;
    d.common.status = &m->out.status;
    d.common.gradient = ids_matrix(m->out.gradient[4]);
    d.common.row_loss = m->out.row_loss[4];
    return xd_topk_kl_loss(ctx, &d, &m->out.values[4]);
}

/* Makes call `call` of IDS_CALLS with ids of a dtype; `m` is memory of the context's device. */
static inline xd_result ids_call(xd_ctx *ctx, const xd_vocab *vocab, ids_memory *m, xd_dtype dtype,
                                 int call) {
    const xd_ids labels = ids_of(m->labels, m->narrow_labels, dtype),
                 ids = ids_of(m->ids, m->narrow_ids, dtype);
    const xd_rows student = ids_matrix(m->student);
    const xd_positions positions = { IDS_ROWS, labels, false, 0, NULL, m->row_weight };
    xd_loss_desc d = ids_loss(vocab, m, dtype, call == 0 ? 0 : 2);
    switch (call) {
    case 0: return xd_loss(ctx, &d, &m->out.values[0]);
    case 1: return ids_mft(ctx, vocab, m, dtype);
    case 2: return cosine_loss(ctx, &d, &m->out.values[2]);
    case 3: return ids_head(ctx, vocab, m, dtype);
    case 4: return ids_topk(ctx, vocab, m, dtype, true);
    case 5: return ids_topk(ctx, vocab, m, dtype, false);
    case 6: return xd_denominator_count(ctx, NULL, &positions, 1, &m->out.denominator);
    case 7: return softmax_at_ids(ctx, vocab, student, 2.0, labels, m->out.log_probs);
    case 8:
        return softmax_at_ids_backward(ctx, vocab, student, 2.0, labels, m->row_weight,
                                       ids_matrix(m->out.gradient[3]));
    case 9: {
        const xd_result result = softmax_columns(ctx, vocab, student, ids, IDS_K, IDS_K, m->out.picked);
        return result == XD_OK ? softmax_columns(ctx, vocab, student, ids, IDS_K, 0, m->out.shared) : result;
    }
    default: return softmax_accuracy(ctx, vocab, student, &positions, NULL, &m->out.accuracy);
    }
}

/* All calls in turn. */
static inline void ids_calls(xd_ctx *ctx, const xd_vocab *vocab, ids_memory *m, xd_dtype dtype) {
    for (int call = 0; call < IDS_CALLS; call++) CHECK_EQ_INT(ids_call(ctx, vocab, m, dtype, call), XD_OK);
}

/* None of them accepts ids of another type, and every message names the accepted ones. */
static inline void ids_refusals(xd_ctx *ctx, const xd_vocab *vocab, ids_memory *m) {
    for (int call = 0; call < IDS_CALLS; call++) {
        CHECK_EQ_INT(ids_call(ctx, vocab, m, XD_DTYPE_F32, call), XD_ERROR_DTYPE);
        CHECK(strstr(xd_last_error(ctx)->message, "are F32: I32 or I64 is needed"));
    }
}

/* Checks that the scene tests something: labels were found, some of them outside, and one row is predicted correctly. */
static inline void ids_seen(const ids_memory *m) {
    CHECK(m->out.status.label_out_of_range > 0);
    CHECK(m->out.values[0].loss > 0.0 && m->out.values[3].hard > 0.0 && m->out.values[4].loss != 0.0);
    CHECK(m->out.denominator.positions == IDS_ROWS - 1 && m->out.accuracy > 0.0 && m->out.accuracy < 1.0);
    CHECK(m->out.log_probs[0] < 0.0f && isnan(m->out.log_probs[4]) && m->out.picked[1] != 0.0f);
}

#endif
