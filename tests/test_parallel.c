/* Calls on several threads: the same bits for any number of them, in every mode. */
#include "xdistill.h"
#include "makers.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_private.h"
#include "parallel.h"
#include "xd_test.h"
#include "averages.h"
#include "softmax_calls.h"

#include <stdlib.h>
#include <unistd.h>

enum { ROWS = 5, COLUMNS = 17001, K = 64, WIDTH = 96, HEAD_ROWS = 300, HEAD_COLUMNS = 800 };
enum { PARAMS = 5, LARGE = 200000, OUT = 64 << 20 };

/* ---- inputs and outputs ---- */

static float student[ROWS * COLUMNS], teacher[ROWS * COLUMNS], weights[ROWS * COLUMNS],
    gradient[ROWS * COLUMNS];
static uint16_t student16[ROWS * COLUMNS], teacher16[ROWS * COLUMNS], gradient16[ROWS * COLUMNS];
static int64_t labels[HEAD_ROWS];
static float row_weight[ROWS];

static void fill(void) {
    uint64_t state = 7;
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        student[i] = 6.0f * number(&state);
        teacher[i] = student[i] + 2.0f * number(&state);
        weights[i] = number(&state);
        student16[i] = xd_bf16_from_f32(student[i]);
        teacher16[i] = xd_bf16_from_f32(teacher[i]);
    }
    for (int i = 0; i < HEAD_ROWS; i++) labels[i] = (int64_t)i * 7919 % HEAD_COLUMNS;
    for (int i = 0; i < ROWS; i++) row_weight[i] = (float)(i + 1) / ROWS;
    labels[3] = -100;
}

static xd_rows rows_of(void *data, xd_dtype dtype, int64_t count, int64_t columns) {
    const xd_rows x = { data, dtype, count, columns, 0 };
    return x;
}

/* What calls have given, one after the other. */
typedef struct sink {
    unsigned char *bytes;
    size_t size;
} sink;

static void keep(sink *out, const void *data, size_t bytes) {
    CHECK(out->size + bytes <= OUT);
    if (out->size + bytes > OUT) return;
    memcpy(out->bytes + out->size, data, bytes);
    out->size += bytes;
}

/* ---- the calls that spread ---- */

static void loss_of(xd_ctx *ctx, const xd_vocab *vocab, bool narrow, xd_divergence divergence, bool hard,
                    sink *out) {
    xd_loss_desc d;
    xd_loss_values values;
    float row_loss[ROWS];
    memset(&d, 0, sizeof d);
    memset(&values, 0, sizeof values);
    d.student = narrow ? rows_of(student16, XD_DTYPE_BF16, ROWS, COLUMNS)
                       : rows_of(student, XD_DTYPE_F32, ROWS, COLUMNS);
    d.teacher = narrow ? rows_of(teacher16, XD_DTYPE_BF16, ROWS, COLUMNS)
                       : rows_of(teacher, XD_DTYPE_F32, ROWS, COLUMNS);
    d.common.gradient = narrow ? rows_of(gradient16, XD_DTYPE_BF16, ROWS, COLUMNS)
                               : rows_of(gradient, XD_DTYPE_F32, ROWS, COLUMNS);
    if (hard) d.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    if (hard) d.label_smoothing = 0.1;
    d.vocab = vocab;
    d.hard_weight = hard ? 0.5 : 0.0;
    d.soft_weight = 1.0;
    d.common.row_weight = row_weight;
    d.temperature = hard ? 2.0 : 1.0;
    d.divergence = divergence;
    d.beta = 0.5;
    d.common.row_loss = row_loss;
    CHECK_EQ_INT(xd_loss(ctx, &d, &values), XD_OK);
    keep(out, &values.loss, sizeof values.loss);
    keep(out, row_loss, sizeof row_loss);
    keep(out, d.common.gradient.data, ROWS * COLUMNS * xd_dtype_size(d.common.gradient.dtype));
}

static void call_loss(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    static const xd_divergence divergences[] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD, XD_SOFT_CE };
    for (int i = 0; i < 4; i++) loss_of(ctx, vocab, false, divergences[i], i % 2 == 0, out);
    loss_of(ctx, vocab, true, XD_KL_FORWARD, false, out);
    loss_of(ctx, vocab, true, XD_JSD, true, out);
}

static void call_topk_kl(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    static const xd_topk_mode modes[] = { XD_TOPK_TAIL, XD_TOPK_RENORMALISE, XD_TOPK_ZERO_OUTSIDE };
    for (int i = 0; i < 3; i++) {
        xd_topk_desc d;
        xd_loss_values values;
        float log_probs[ROWS * K];
        memset(&d, 0, sizeof d);
        memset(&values, 0, sizeof values);
        d.student = rows_of(student, XD_DTYPE_F32, ROWS, COLUMNS);
        d.teacher = rows_of(teacher, XD_DTYPE_F32, ROWS, COLUMNS);
        d.common.gradient = rows_of(gradient, XD_DTYPE_F32, ROWS, COLUMNS);
        d.vocab = vocab;
        d.k = K;
        d.mode = modes[i];
        d.divergence = i == 1 ? XD_JSD : XD_KL_FORWARD;
        d.beta = 0.5;
        d.student_log_probs = log_probs;
        CHECK_EQ_INT(xd_topk_kl_loss(ctx, &d, &values), XD_OK);
        keep(out, &values.loss, sizeof values.loss);
        keep(out, log_probs, sizeof log_probs);
        keep(out, gradient, sizeof gradient);
    }
}

static void call_selection(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    static const int64_t counts[] = { 5, K };
    const xd_rows x = rows_of(student, XD_DTYPE_F32, ROWS, COLUMNS),
                  y = rows_of(teacher16, XD_DTYPE_BF16, ROWS, COLUMNS);
    for (int i = 0; i < 2; i++) {
        const size_t n = (size_t)(ROWS * counts[i]);
        float values[ROWS * K];
        int64_t ids[ROWS * K];
        CHECK_EQ_INT(xd_vocab_topk(ctx, vocab, i ? y : x, counts[i], values, ids), XD_OK);
        keep(out, values, n * sizeof *values);
        keep(out, ids, n * sizeof *ids);
        const xd_vocab_topk_desc d = vocab_topk_desc(vocab, i ? x : y, 1, counts[i]);
        CHECK_EQ_INT(vocab_topk_columns(ctx, &d, ids, gradient), XD_OK);
        keep(out, ids, (size_t)counts[i] * sizeof *ids);
        keep(out, gradient, COLUMNS * sizeof *gradient); /* the maxima of the columns */
    }
}

static void call_softmax(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    const xd_rows x = rows_of(student, XD_DTYPE_F32, ROWS, COLUMNS),
                  w = rows_of(weights, XD_DTYPE_F32, ROWS, COLUMNS);
    const xd_rows to = rows_of(gradient, XD_DTYPE_F32, ROWS, COLUMNS);
    double numbers[ROWS];
    float log_probs[ROWS];
    int64_t argmax[ROWS], ids[ROWS];
    for (int i = 0; i < ROWS; i++) ids[i] = i * 1000;
    CHECK_EQ_INT(softmax_row_stats(ctx, vocab, x, 2.0, numbers, argmax), XD_OK);
    keep(out, numbers, sizeof numbers);
    keep(out, argmax, sizeof argmax);
    CHECK_EQ_INT(softmax_all(ctx, vocab, x, 2.0, to), XD_OK);
    keep(out, gradient, sizeof gradient);
    CHECK_EQ_INT(softmax_all_backward(ctx, vocab, x, 2.0, w, to), XD_OK);
    keep(out, gradient, sizeof gradient);
    CHECK_EQ_INT(softmax_at_ids(ctx, vocab, x, 2.0, xd_ids_of(ids, XD_DTYPE_I64), log_probs), XD_OK);
    keep(out, log_probs, sizeof log_probs);
    CHECK_EQ_INT(softmax_at_ids_backward(ctx, vocab, x, 2.0, xd_ids_of(ids, XD_DTYPE_I64), row_weight, to),
                 XD_OK);
    keep(out, gradient, sizeof gradient);
}

static void call_mft(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    mft_desc d;
    xd_loss_values values;
    d = mft_defaults();
    memset(&values, 0, sizeof values);
    d.loss.student = rows_of(student, XD_DTYPE_F32, ROWS, COLUMNS);
    d.loss.teacher = rows_of(teacher, XD_DTYPE_F32, ROWS, COLUMNS);
    d.loss.common.gradient = rows_of(gradient, XD_DTYPE_F32, ROWS, COLUMNS);
    d.loss.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d.loss.vocab = vocab;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_OK);
    keep(out, &values.loss, sizeof values.loss);
    keep(out, gradient, sizeof gradient);
    d.loss.common.labels.data = NULL;
    CHECK_EQ_INT(cosine_loss(ctx, &d.loss, &values), XD_OK);
    keep(out, &values.loss, sizeof values.loss);
    keep(out, gradient, sizeof gradient);
}

static void call_head(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    static float hidden_gradient[HEAD_ROWS * WIDTH], weight_gradient[HEAD_COLUMNS * WIDTH];
    xd_head_loss_desc d;
    xd_loss_values values;
    xd_vocab *own = NULL;
    (void)vocab;
    memset(&d, 0, sizeof d);
    memset(&values, 0, sizeof values);
    memset(weight_gradient, 0, sizeof weight_gradient);
    CHECK_EQ_INT(vocab_even(ctx, NULL, HEAD_COLUMNS, &own), XD_OK);
    d.student.hidden = rows_of(weights, XD_DTYPE_F32, HEAD_ROWS, WIDTH);
    d.student.weight = rows_of(student, XD_DTYPE_F32, HEAD_COLUMNS, WIDTH);
    d.hidden_gradient = rows_of(hidden_gradient, XD_DTYPE_F32, HEAD_ROWS, WIDTH);
    d.weight_gradient = weight_gradient;
    d.loss.vocab = own;
    d.loss.hard_weight = 1.0;
    d.loss.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    CHECK_EQ_INT(xd_head_loss(ctx, &d, &values), XD_OK);
    keep(out, &values.loss, sizeof values.loss);
    keep(out, hidden_gradient, sizeof hidden_gradient);
    keep(out, weight_gradient, sizeof weight_gradient);
    xd_vocab_destroy(own);
}

/* Shapes that are cut by columns, by rows and by both, and leave edges. */
static void call_matmul(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    static const int64_t shapes[][3] = { { 65, 70, 1200 }, { 600, 130, 70 }, { 430, 190, 440 }, { 3, 5, 7 } };
    static float product[600 * 1300];
    (void)vocab;
    for (int i = 0; i < 8; i++) {
        const int64_t *n = shapes[i / 2];
        xd_matmul_args p;
        memset(&p, 0, sizeof p);
        const xd_rows a = rows_of(student, XD_DTYPE_F32, n[0], n[1]);
        const xd_rows b = rows_of(teacher16, XD_DTYPE_BF16, n[2], n[1]);
        p.a = xd_matrix_of_rows(&a);
        p.b = xd_matrix_transposed(xd_matrix_of_rows(&b));
        p.out = product;
        p.out_stride = n[2];
        p.bf16 = i % 2 == 1;
        for (int64_t j = 0; j < n[0] * n[2]; j++) product[j] = 0.5f;
        p.accumulate = i % 2 == 0;
        CHECK_EQ_INT(xd_matmul(ctx, &p, NULL), XD_OK);
        keep(out, product, (size_t)(n[0] * n[2]) * sizeof *product);
    }
}

static float parameters[2 * LARGE], gradients[2 * LARGE];
static uint16_t narrow[LARGE];

/* One large parameter, some small ones, one without elements. */
static void training_params(xd_param params[PARAMS]) {
    static const int64_t counts[PARAMS] = { 3, LARGE, 0, 70000, 1000 };
    static const char *const names[PARAMS] = { "a", "b", "c", "d", "e" };
    int64_t at = 0;
    memset(params, 0, PARAMS * sizeof *params);
    for (int i = 0; i < PARAMS; i++) {
        params[i].name = names[i];
        params[i].value = parameters + at;
        params[i].gradient = gradients + at;
        params[i].dtype = XD_DTYPE_F32;
        params[i].count = counts[i];
        at += counts[i];
    }
    params[3].value = narrow;
    params[3].dtype = XD_DTYPE_BF16;
    for (int64_t i = 0; i < at; i++) {
        parameters[i] = student[i % (ROWS * COLUMNS)];
        gradients[i] = weights[i % (ROWS * COLUMNS)];
    }
    for (int i = 0; i < LARGE; i++) narrow[i] = student16[i % (ROWS * COLUMNS)];
}

static void call_training(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    xd_param params[PARAMS];
    xd_optimizer *optimizer = NULL;
    xd_ema *ema = NULL;
    (void)vocab;
    for (int kind = 0; kind < 2; kind++) {
        xd_optimizer_desc d;
        xd_ema_desc average;
        xd_optimizer_step_desc step;
        xd_gradient_norm_desc measure;
        xd_gradient_norm norm;
        training_params(params);
        d = xd_adamw_defaults(params, PARAMS);
        memset(&average, 0, sizeof average);
        memset(&measure, 0, sizeof measure);
        measure.params = params;
        measure.param_count = PARAMS;
        if (kind)
            d = (xd_optimizer_desc){
                .params = params, .param_count = PARAMS, .kind = XD_OPTIMIZER_SGD, .learning_rate = 1e-3
            };
        d.momentum = 0.9;
        measure.max_norm = 1.0;
        measure.type = kind ? XD_NORM_L1 : XD_NORM_L2;
        average.decay = 0.9;
        average.init_from_current = true;
        CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
        CHECK_EQ_INT(average_create(ctx, params, PARAMS, &average, &ema), XD_OK);
        for (int i = 0; i < 2; i++) {
            memset(&step, 0, sizeof step);
            CHECK_EQ_INT(xd_gradient_norm_compute(ctx, NULL, &measure, &norm), XD_OK);
            step.gradient_scale = &norm.coefficient;
            step.averages = &ema;
            step.average_count = i;
            CHECK_EQ_INT(xd_optimizer_step(optimizer, &step, NULL), XD_OK);
            if (!i) CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
            keep(out, &norm.norm, sizeof norm.norm);
        }
        CHECK_EQ_INT(xd_clip_gradients(ctx, params, PARAMS, 0.7f), XD_OK);
        keep(out, parameters, sizeof parameters);
        keep(out, narrow, sizeof narrow);
        keep(out, gradients, sizeof gradients);
        for (int64_t i = 0; i < xd_ema_describe(ema).count; i++) {
            const xd_param shadow = xd_ema_view(ema, i).shadow;
            keep(out, shadow.value, (size_t)shadow.count * xd_dtype_size(shadow.dtype));
        }
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }
}

static void call_align(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    enum { JOBS = 20, TOKENS = 40 };
    static xd_token_span spans[JOBS][2][TOKENS];
    xd_align_job jobs[JOBS];
    (void)vocab;
    memset(jobs, 0, sizeof jobs);
    for (int i = 0; i < JOBS; i++) {
        for (int j = 0; j < TOKENS; j++) {
            spans[i][0][j].begin = 3 * j;
            spans[i][0][j].end = 3 * j + 3;
            spans[i][1][j].begin = j * (i + 1) % 3 + 3 * j;
            spans[i][1][j].end = (j + 1) * (i + 1) % 3 + 3 * j + 3;
        }
        jobs[i].student.spans = spans[i][0];
        jobs[i].teacher.spans = spans[i][1];
        jobs[i].student.count = TOKENS;
        jobs[i].teacher.count = TOKENS - i % 3;
    }
    CHECK_EQ_INT(xd_align_batch(ctx, jobs, JOBS), XD_OK);
    for (int i = 0; i < JOBS; i++) {
        keep(out, jobs[i].out.chunks, (size_t)jobs[i].out.count * sizeof *jobs[i].out.chunks);
        keep(out, &jobs[i].report, sizeof jobs[i].report);
        xd_alignment_destroy(ctx, &jobs[i].out);
    }
}

static void call_projection(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    enum { IDS = 90, DIMENSIONS = 24 };
    const xdi_similarity_desc desc = { 4, 0.01 };
    const xd_rows similar = xd_rows_of(weights, XD_DTYPE_F32, IDS, 2 * IDS);
    const xd_rows ours = xd_rows_of(student, XD_DTYPE_F32, IDS, DIMENSIONS),
                  theirs = xd_rows_of(teacher, XD_DTYPE_F32, 2 * IDS, DIMENSIONS);
    (void)vocab;
    for (int i = 0; i < 2; i++) {
        xd_projection_rows made;
        memset(&made, 0, sizeof made);
        CHECK_EQ_INT(i ? xdi_projection_rows_from_embeddings(ctx, ours, theirs, &desc, &made)
                       : xdi_projection_rows_from_similarities(ctx, similar, &desc, &made),
                     XD_OK);
        keep(out, made.ids, (size_t)(made.rows * made.k) * sizeof *made.ids);
        keep(out, made.weights, (size_t)(made.rows * made.k) * sizeof *made.weights);
        xd_projection_rows_destroy(ctx, &made);
    }
}

/* ---- across tokenizers ---- */

/* A text of which one chunk is long and the others short; or a few rows of a large vocabulary. */
enum { TEXT = 100, TEXT_IDS = 800, OTHER_IDS = 700, LONG_CHUNK = 70, SHORT_CHUNKS = 20, CACHED_IDS = 8 };

typedef struct text {
    int64_t rows, ids, other_ids;
    int64_t chunk[TEXT], other_chunk[TEXT], label[TEXT], other_label[TEXT], place[TEXT];
    float weight[TEXT];
    xd_projection projection;
    xd_exact_map map;
    xd_teacher_cache *cache;
} text;

static void text_projection(xd_ctx *ctx, text *t) {
    static int32_t ids[COLUMNS * 2];
    static float shares[COLUMNS * 2];
    const xd_projection_rows rows = { ids, shares, t->ids, 2 };
    for (int64_t v = 0; v < t->ids; v++) {
        const bool exact = v % 3 == 0;
        ids[2 * v] = (int32_t)(v * 5 % t->other_ids);
        ids[2 * v + 1] = exact ? -1 : (int32_t)((v * 5 + 3) % t->other_ids);
        shares[2 * v] = exact ? 1.0f : 0.7f;
        shares[2 * v + 1] = exact ? 0.0f : 0.3f;
    }
    CHECK_EQ_INT(xd_projection_from_rows(ctx, &rows, t->ids, t->other_ids, &t->projection), XD_OK);
    CHECK_EQ_INT(exact_map_create(ctx, &rows, t->other_ids, false, &t->map), XD_OK);
}

static void text_cache(xd_ctx *ctx, text *t) {
    char path[64];
    int32_t ids[TEXT], next[TEXT];
    xd_teacher_cache_desc desc;
    xd_teacher_cache_block block;
    xd_teacher_cache_writer *w = NULL;
    snprintf(path, sizeof path, "/tmp/xdistill-test-parallel-%ld", (long)getpid());
    memset(&desc, 0, sizeof desc);
    memset(&block, 0, sizeof block);
    desc.vocabulary = t->other_ids;
    desc.temperature = 1.5;
    desc.k = CACHED_IDS;
    for (int i = 0; i < t->rows; i++) {
        t->place[i] = i;
        ids[i] = i == 0 ? 1 : next[i - 1];
        next[i] = i == t->rows - 1 ? -1 : (int32_t)t->other_label[i];
    }
    block.logits = rows_of(teacher, XD_DTYPE_F32, t->rows, t->other_ids);
    block.ids = ids;
    block.next = next;
    CHECK_EQ_INT(cache_writer_create(ctx, path, &desc, &w), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, NULL, 0), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &block), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_OK);
    CHECK_EQ_INT(cache_open(ctx, path, NULL, &t->cache), XD_OK);
    remove(path);
}

static void text_open(xd_ctx *ctx, xd_xtoken_kind kind, text *t) {
    memset(t, 0, sizeof *t);
    t->rows = kind == XD_XTOKEN_GOLD ? ROWS : TEXT;
    t->ids = t->other_ids = kind == XD_XTOKEN_GOLD ? COLUMNS : TEXT_IDS;
    if (kind == XD_XTOKEN_PROJECTED || kind == XD_XTOKEN_CACHED) t->other_ids = OTHER_IDS;
    for (int i = 0; i < t->rows; i++) {
        const int others = TEXT - LONG_CHUNK / 7;
        t->chunk[i] = i < LONG_CHUNK ? 0 : 1 + (i - LONG_CHUNK) * SHORT_CHUNKS / (TEXT - LONG_CHUNK);
        t->other_chunk[i] = i < TEXT - others ? 0 : 1 + (i - TEXT + others) * SHORT_CHUNKS / others;
        if (kind == XD_XTOKEN_GOLD) t->chunk[i] = t->other_chunk[i] = i / 2;
        t->label[i] = i * 7919 % t->ids;
        t->other_label[i] = i * 104729 % t->other_ids;
        t->weight[i] = (float)(i % 5) / 4.0f;
    }
    text_projection(ctx, t);
    text_cache(ctx, t);
}

static void text_close(xd_ctx *ctx, text *t) {
    xd_teacher_cache_close(t->cache);
    xd_exact_map_destroy(ctx, &t->map);
    xd_projection_destroy(ctx, &t->projection);
}

static xd_xtoken_teacher text_teacher(const text *t, xd_xtoken_kind kind) {
    xd_xtoken_teacher one = xd_xtoken_teacher_defaults(kind);
    one.logits = rows_of(kind == XD_XTOKEN_CACHED ? NULL : teacher, XD_DTYPE_F32, t->rows, t->other_ids);
    one.student_chunks = t->chunk;
    one.teacher_chunks = t->other_chunk;
    one.chunks = 1 + SHORT_CHUNKS;
    one.labels.data = t->other_label;
    one.projected.projection = one.cached.projection = &t->projection;
    one.gold.map = &t->map;
    if (kind == XD_XTOKEN_CACHED) one.cached.cache = t->cache;
    one.cached.positions = t->place;
    one.likelihood.form = XD_LIKELIHOOD_KL;
    return one;
}

static void xtoken_of(xd_ctx *ctx, xd_xtoken_kind kind, int64_t tile, sink *out) {
    static text t;
    xd_xtoken_teacher one;
    xd_xtoken_teacher_values measured;
    xd_xtoken_values values;
    xd_vocab *vocab = NULL;
    text_open(ctx, kind, &t);
    CHECK_EQ_INT(vocab_even(ctx, NULL, t.ids, &vocab), XD_OK);
    for (int compat = 0; compat < 2; compat++) {
        xd_xtoken_desc d = xd_xtoken_defaults();
        memset(&values, 0, sizeof values);
        one = text_teacher(&t, kind);
        d.student = rows_of(student, XD_DTYPE_F32, t.rows, t.ids);
        d.common.gradient = rows_of(gradient, XD_DTYPE_F32, t.rows, t.ids);
        d.common.labels.data = t.label;
        d.common.row_weight = t.weight;
        d.vocab = vocab;
        d.teachers = &one;
        d.teacher_count = 1;
        d.teacher_values = &measured;
        d.temperature = 1.5;
        d.score = kind == XD_XTOKEN_GOLD ? XD_XTOKEN_SCORE_ENTROPY : XD_XTOKEN_SCORE_NONE;
        d.columns = 300;
        d.tail = 2000;
        d.tile = tile;
        d.compat = compat == 1;
        CHECK_EQ_INT(xd_xtoken_loss(ctx, &d, &values), XD_OK);
        CHECK(values.loss != 0.0 && measured.denominator > 0.0);
        keep(out, &values, sizeof values);
        keep(out, &measured, sizeof measured);
        keep(out, gradient, (size_t)(t.rows * t.ids) * sizeof *gradient);
    }
    xd_vocab_destroy(vocab);
    text_close(ctx, &t);
}

static void call_projected(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    (void)vocab;
    xtoken_of(ctx, XD_XTOKEN_PROJECTED, 0, out);
}

static void call_gold(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    (void)vocab;
    xtoken_of(ctx, XD_XTOKEN_GOLD, 0, out);
}

static void call_same(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    (void)vocab;
    xtoken_of(ctx, XD_XTOKEN_SAME, 0, out);
}

static void call_cached(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    (void)vocab;
    xtoken_of(ctx, XD_XTOKEN_CACHED, 0, out);
}

static void call_likelihood(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    (void)vocab;
    xtoken_of(ctx, XD_XTOKEN_LIKELIHOOD, 0, out);
}

static void call_uld(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    enum { SHORT = 20 };
    static text t;
    xd_aligned_chunk chunks[SHORT];
    xd_uld_desc d;
    xd_uld_values values;
    (void)vocab;
    text_open(ctx, XD_XTOKEN_PROJECTED, &t);
    memset(&d, 0, sizeof d);
    memset(chunks, 0, sizeof chunks);
    for (int i = 0; i < SHORT; i++) {
        chunks[i].student_begin = 1 + 4 * i;
        chunks[i].student_end = 2 + 4 * i + i % 3;
        chunks[i].teacher_begin = 1 + 3 * i;
        chunks[i].teacher_end = 2 + 3 * i + i % 2;
    }
    d.student.logits = rows_of(student, XD_DTYPE_F32, TEXT, t.ids);
    d.teacher.logits = rows_of(teacher, XD_DTYPE_F32, TEXT, t.other_ids);
    d.student.vocabulary = t.ids;
    d.teacher.vocabulary = t.other_ids;
    d.student.ids = t.label;
    d.teacher.ids = t.other_label;
    d.chunks = chunks;
    d.scale = 1.0;
    d.gradient = rows_of(gradient, XD_DTYPE_F32, TEXT, t.ids);
    for (d.chunk_count = 0; d.chunk_count <= SHORT; d.chunk_count += SHORT / 4) {
        CHECK_EQ_INT(xd_uld_loss(ctx, &d, &values), XD_OK);
        keep(out, &values, sizeof values);
        keep(out, gradient, (size_t)(TEXT * t.ids) * sizeof *gradient);
    }
    text_close(ctx, &t);
}

/* Sums over ranks are formed by each rank for its share, on the threads of its context. */
static void call_reduce(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                       XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8 };
    static const xd_reduce_op ops[] = { XD_SUM, XD_AVG, XD_MAX, XD_MIN };
    const void *pieces[] = { student, teacher, weights };
    const xd_leaves leaves[] = { { 0, 1, 4 }, { 1, 1, 4 }, { 2, 2, 4 } };
    const int64_t bytes = (int64_t)sizeof student - 12;
    (void)vocab;
    for (int d = 0; d < 7; d++)
        for (int i = 0; i < 4; i++) {
            const int64_t count = bytes / (int64_t)xd_dtype_size(dtypes[d]);
            if (!xd_reduce_supports(dtypes[d], ops[i])) continue;
            CHECK_EQ_INT(xd_reduce_pieces(ctx, gradient, pieces, 3, count, dtypes[d], ops[i]), XD_OK);
            keep(out, gradient, sizeof gradient);
        }
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_INT(xd_reduce_leaves(ctx, gradient, pieces, leaves, 3, 0, bytes / 4, XD_DTYPE_F32, ops[i]),
                     XD_OK);
        keep(out, gradient, sizeof gradient);
    }
}

static void call_project(xd_ctx *ctx, const xd_vocab *vocab, sink *out) {
    enum { TEACHER = 12011, CELLS = 2 * COLUMNS, CHOSEN = 6000 };
    static xdi_vote cells[CELLS];
    static double probs[ROWS * TEACHER];
    static int64_t chosen[CHOSEN];
    xd_projection m;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < CELLS; i++) {
        cells[i].student_id = i % COLUMNS;
        cells[i].teacher_id = (int32_t)((int64_t)i * 7919 % TEACHER);
        cells[i].weight = 0.25 + (double)(i % 7) / 8.0;
    }
    for (int i = 0; i < CHOSEN; i++) chosen[i] = 2 * i;
    CHECK_EQ_INT(
        xdi_projection_from_cells(ctx, &(xdi_projection_cells){ cells, CELLS, COLUMNS, TEACHER }, &m), XD_OK);
    for (int i = 0; i < 2; i++) {
        const int64_t k = i ? CHOSEN : TEACHER;
        const xd_rows from = i ? rows_of(student16, XD_DTYPE_BF16, ROWS, COLUMNS)
                               : rows_of(weights, XD_DTYPE_F32, ROWS, COLUMNS);
        const xd_rows to = i ? rows_of(gradient16, XD_DTYPE_BF16, ROWS, COLUMNS)
                             : rows_of(gradient, XD_DTYPE_F32, ROWS, COLUMNS);
        const xdi_project_desc d = { vocab, &m, i ? chosen : NULL, k };
        CHECK_EQ_INT(xdi_project(ctx, &d, from, probs), XD_OK);
        keep(out, probs, (size_t)(ROWS * k) * sizeof *probs);
        CHECK_EQ_INT(xdi_project_backward(ctx, &d, probs, to), XD_OK);
        keep(out, to.data, (size_t)(ROWS * COLUMNS) * xd_dtype_size(to.dtype));
    }
    xd_projection_destroy(ctx, &m);
}

/* ---- the same bits ---- */

/* Every call that spreads over threads. */
static const struct {
    const char *name;
    void (*run)(xd_ctx *ctx, const xd_vocab *vocab, sink *out);
} calls[] = {
    { "xd_loss", call_loss },
    { "xd_topk_kl_loss", call_topk_kl },
    { "xd_vocab_topk, xd_vocab_topk_columns", call_selection },
    { "xd_log_probs, xd_log_probs_backward", call_softmax },
    { "xd_loss, MFT and cosine", call_mft },
    { "xd_head_loss", call_head },
    { "xd_matmul", call_matmul },
    { "xd_optimizer_step, xd_ema_update, xd_gradient_norm_compute, xd_clip_gradients", call_training },
    { "xd_align_batch", call_align },
    { "xdi_projection_rows_from_similarities, xdi_projection_rows_from_embeddings", call_projection },
    { "xd_xtoken_loss, PROJECTED", call_projected },
    { "xd_xtoken_loss, GOLD", call_gold },
    { "xd_xtoken_loss, SAME", call_same },
    { "xd_xtoken_loss, CACHED", call_cached },
    { "xd_xtoken_loss, LIKELIHOOD", call_likelihood },
    { "xd_uld_loss", call_uld },
    { "xdi_project, xdi_project_backward", call_project },
    { "xd_reduce_pieces, xd_reduce_leaves", call_reduce },
};
enum { CALLS = sizeof calls / sizeof *calls };

static void run_call(int call, int threads, loop *own, xd_reduction reduction, xd_cpu_level level,
                     sink *out) {
    xd_ctx *ctx = open_ctx(threads, own, reduction, level);
    xd_vocab *vocab = NULL;
    CHECK_EQ_INT(vocab_even(ctx, NULL, COLUMNS, &vocab), XD_OK);
    out->size = 0;
    memset(gradient, 0, sizeof gradient);
    memset(gradient16, 0, sizeof gradient16);
    calls[call].run(ctx, vocab, out);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

static void compare(int call, xd_reduction reduction, xd_cpu_level level, sink *one, sink *other) {
    static const int threads[] = { 2, 7, 3 }; /* the first one with the caller's parallel_for */
    /* Plain loops are slow, and on a CPU FAST has the code of DETERMINISTIC: their pieces are the same. */
    const int runs = level == XD_CPU_PLAIN || reduction == XD_REDUCTION_FAST ? 1 : 3;
    loop own;
    loop_clear(&own);
    run_call(call, 1, NULL, reduction, level, one);
    for (int i = 0; i < runs; i++) {
        run_call(call, threads[i], i == 0 ? &own : NULL, reduction, level, other);
        const bool same = one->size == other->size && memcmp(one->bytes, other->bytes, one->size) == 0;
        CHECK(same);
        if (!same)
            printf("%s, %s, mode %d, %d threads\n", calls[call].name, xd_cpu_level_name(level),
                   (int)reduction, threads[i]);
    }
    if (own.rounds == 0) printf("%s does not spread\n", calls[call].name);
    CHECK(own.rounds > 0);
}

static void compare_all(xd_reduction reduction) {
    sink one = { (unsigned char *)malloc(OUT), 0 }, other = { (unsigned char *)malloc(OUT), 0 };
    fill();
    CHECK(one.bytes && other.bytes);
    for (int call = 0; call < CALLS; call++) {
        /* On a CPU FAST has the code of DETERMINISTIC. */
        if (reduction != XD_REDUCTION_FAST) compare(call, reduction, XD_CPU_PLAIN, &one, &other);
        compare(call, reduction, XD_CPU_BEST, &one, &other);
    }
    free(one.bytes);
    free(other.bytes);
}

XD_TEST(any_number_of_threads_gives_the_same_bits) {
    compare_all(XD_REDUCTION_DETERMINISTIC);
}

XD_TEST(any_number_of_threads_gives_the_same_bits_in_invariant_mode) {
    compare_all(XD_REDUCTION_INVARIANT);
}

XD_TEST(any_number_of_threads_gives_the_same_bits_in_fast_mode) {
    compare_all(XD_REDUCTION_FAST);
}

XD_TEST(tiles_of_chunks_change_no_bit) {
    static const int64_t tiles[] = { 1, 5, 64 };
    sink one = { (unsigned char *)malloc(OUT), 0 }, other = { (unsigned char *)malloc(OUT), 0 };
    xd_ctx *ctx = open_ctx(2, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    fill();
    for (int kind = XD_XTOKEN_PROJECTED; kind <= XD_XTOKEN_CACHED; kind++)
        for (int i = 0; i < 3; i++) {
            one.size = other.size = 0;
            xtoken_of(ctx, (xd_xtoken_kind)kind, 0, &one);
            xtoken_of(ctx, (xd_xtoken_kind)kind, tiles[i], &other);
            CHECK(one.size == other.size && memcmp(one.bytes, other.bytes, one.size) == 0);
        }
    xd_ctx_destroy(ctx);
    free(one.bytes);
    free(other.bytes);
}

/* An all-reduce of three ranks, each with threads of its own: what rank 0 receives. */
enum { SHARED = ROWS * COLUMNS };

static xd_result reduce_rank(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    float *received = (float *)argument + rank * SHARED; /* of [3, SHARED] */
    const float *mine[] = { student, teacher, weights };
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = mine[rank];
    c.recv = received;
    c.count = SHARED;
    c.dtype = XD_DTYPE_F32;
    c.op = XD_SUM;
    if (xd_ctx_settings(xd_comm_ctx(world))->reduction == XD_REDUCTION_INVARIANT) {
        c.leaves.first = rank;
        c.leaves.count = 1;
        c.leaves.total = 3;
        return xd_collective_run(world, &c);
    }
    XD_TRY(xd_collective_run(world, &c));
    return xd_all_reduce(world, received, received, SHARED - 7, XD_DTYPE_F32, XD_AVG); /* in place */
}

XD_TEST(any_number_of_threads_a_rank_gives_an_all_reduce_the_same_bits) {
    static const xd_reduction modes[] = { XD_REDUCTION_DETERMINISTIC, XD_REDUCTION_INVARIANT,
                                          XD_REDUCTION_FAST };
    static const int threads[] = { 1, 2, 3, 7 };
    const size_t bytes = 3 * SHARED * sizeof(float);
    float *one = (float *)malloc(bytes), *other = (float *)malloc(bytes);
    fill();
    CHECK(one && other);
    for (int mode = 0; mode < 3; mode++)
        for (int i = 0; i < 4; i++) {
            xd_ctx_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.threads = threads[i];
            desc.reduction = modes[mode];
            CHECK_EQ_INT(xd_run_threads(3, &desc, reduce_rank, i ? other : one, NULL), XD_OK);
            if (i) CHECK(memcmp(one, other, bytes) == 0);
        }
    CHECK(memcmp(one, one + SHARED, SHARED * sizeof *one) == 0);
    free(one);
    free(other);
}

XD_TEST_MAIN()
