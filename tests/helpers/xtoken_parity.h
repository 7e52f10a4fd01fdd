/* A step of distillation with the teacher on one mesh and the student on another, against the same step on one
 * rank. Every rank checks what it holds, so the ranks may be threads or processes. */
#ifndef XTOKEN_PARITY_H
#define XTOKEN_PARITY_H

#include "xdistill.h"
#include "makers.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xtoken_rows.h"

#include <stdlib.h>

enum {
    PARITY_SAMPLES = 4,
    PARITY_STUDENT_LENGTH = 12,
    PARITY_TEACHER_LENGTH = 16,
    PARITY_STUDENT_SIZE = 13,
    PARITY_TEACHER_SIZE = 11,
    PARITY_HIDDEN = 5,
    PARITY_CHUNKS = 6,
    PARITY_COLUMNS = 7, /* of J */
    PARITY_ROWS = PARITY_SAMPLES * PARITY_STUDENT_LENGTH,
    PARITY_CELLS = PARITY_ROWS * PARITY_STUDENT_SIZE
};

/* Ranks [first, first + tp cp dp), tp fastest. */
typedef struct parity_mesh {
    int tp, cp, dp, first;
    int64_t micro_batch;
} parity_mesh;

typedef struct parity {
    parity_mesh teacher, student;
    xd_xtoken_kind kind;
    xd_route_payload payload;
    xd_reduction reduction;
    bool relaxed; /* GOLD: H-KL */
    bool messages;
    /* what one rank gets, for each of the students' steps */
    double loss[PARITY_SAMPLES];
    float gradient[PARITY_CELLS];
    double denominator, token_denominator, most;
} parity;

/* ---- the formulas ---- */

static inline float parity_student(int64_t b, int64_t i, int64_t v) {
    return (float)(3.0 * sin((double)(b * 131 + i * 17 + v * 7 + 1) * 0.7));
}

static inline float parity_hidden(int64_t b, int64_t t, int64_t j) {
    return (float)sin((double)(b * 57 + t * 13 + j * 29 + 2) * 0.9);
}

/* One logit of the teacher's head, from its hidden states. */
static inline float parity_head(const float *hidden, int64_t v) {
    double sum = 0.0;
    for (int64_t j = 0; j < PARITY_HIDDEN; j++)
        sum += (double)hidden[j] * 2.5 * cos((double)(v * 11 + j * 5) * 0.37);
    return (float)sum;
}

static inline float parity_teacher(int64_t b, int64_t t, int64_t v) {
    float hidden[PARITY_HIDDEN];
    for (int64_t j = 0; j < PARITY_HIDDEN; j++) hidden[j] = parity_hidden(b, t, j);
    return parity_head(hidden, v);
}

/* Chunks of uneven length; some positions in none, chunk 5 of the second sequence without a teacher. */
static inline int64_t parity_student_chunk(int64_t b, int64_t i) {
    static const int64_t chunks[PARITY_STUDENT_LENGTH] = { 0, 0, 1, 2, 2, 2, 3, -1, 4, 4, 5, -1 };
    return b == 2 && i == 7 ? 3 : chunks[i];
}

static inline int64_t parity_teacher_chunk(int64_t b, int64_t t) {
    static const int64_t chunks[PARITY_TEACHER_LENGTH] = { -1, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4, 5, 5, -1 };
    return b == 1 && chunks[t] == 5 ? -1 : chunks[t];
}

static inline int64_t parity_label(int64_t b, int64_t i) {
    return i == PARITY_STUDENT_LENGTH - 1 ? XD_IGNORE_INDEX : (b * 3 + i * 5 + 1) % PARITY_STUDENT_SIZE;
}

static inline void parity_projection(xd_ctx *ctx, bool relaxed, xd_projection *projection,
                                     xd_exact_map *map) {
    int32_t ids[PARITY_STUDENT_SIZE * 2];
    float weights[PARITY_STUDENT_SIZE * 2];
    const xd_projection_rows rows = { ids, weights, PARITY_STUDENT_SIZE, 2 };
    for (int v = 0; v < PARITY_STUDENT_SIZE; v++) {
        const bool exact = v % 3 == 0;
        ids[2 * v] = (int32_t)(v * 5 % PARITY_TEACHER_SIZE);
        ids[2 * v + 1] = exact ? -1 : (int32_t)((v * 5 + 3) % PARITY_TEACHER_SIZE);
        weights[2 * v] = exact ? 1.0f : 0.7f;
        weights[2 * v + 1] = exact ? 0.0f : 0.3f;
    }
    CHECK(xd_projection_from_rows(ctx, &rows, PARITY_STUDENT_SIZE, PARITY_TEACHER_SIZE, projection) == XD_OK);
    CHECK(exact_map_create(ctx, &rows, PARITY_TEACHER_SIZE, relaxed, map) == XD_OK);
}

/* ---- the rows one rank holds ---- */

/* Block r of n: the two of the load-balanced order where the length allows it, else one of n nearly equal ones. */
static inline int parity_spans(int64_t length, int r, int n, bool balanced, xd_route_span *spans) {
    const int64_t piece = length / (2 * n);
    spans[0].begin = length * r / n;
    spans[0].end = length * (r + 1) / n;
    if (!balanced || n == 1 || length % (2 * n) != 0) return 1;
    spans[0].begin = r * piece;
    spans[0].end = (r + 1) * piece;
    spans[1].begin = (2 * n - 1 - r) * piece;
    spans[1].end = (2 * n - r) * piece;
    return 2;
}

/* Uneven shards; of three or more, one is empty. */
static inline int64_t parity_cut(int64_t size, int r, int n) {
    return r == 0 ? 0 : r >= n ? size : n > 2 && r == 2 ? size * 2 / 5 : r == 1 ? size * 2 / 5 : size - 1;
}

static inline int64_t parity_expand(const xd_route_span *spans, int count, int64_t *positions) {
    int64_t held = 0;
    for (int s = 0; s < count; s++)
        for (int64_t i = spans[s].begin; i < spans[s].end; i++) positions[held++] = i;
    return held;
}

/* A rank's position on a mesh. */
typedef struct parity_place {
    bool member;
    int t, c, d;
    xd_route_span spans[2], window[2]; /* its rows; the teacher's rows that it uses */
    int span_count, window_count;
    int64_t positions[PARITY_TEACHER_LENGTH], held;
    int64_t window_positions[PARITY_TEACHER_LENGTH], window_held;
    int64_t first_sample, samples, begin, end; /* columns */
} parity_place;

static inline parity_place parity_stand(const parity_mesh *m, int rank, int64_t length, int64_t size) {
    parity_place p;
    const int at = rank - m->first;
    memset(&p, 0, sizeof p);
    p.member = at >= 0 && at < m->tp * m->cp * m->dp;
    if (!p.member) return p;
    p.t = at % m->tp;
    p.c = at / m->tp % m->cp;
    p.d = at / m->tp / m->cp;
    p.first_sample = PARITY_SAMPLES * p.d / m->dp;
    p.samples = PARITY_SAMPLES * (p.d + 1) / m->dp - p.first_sample;
    p.begin = parity_cut(size, p.t, m->tp);
    p.end = parity_cut(size, p.t + 1, m->tp);
    p.span_count = parity_spans(length, p.c, m->cp, true, p.spans);
    p.held = parity_expand(p.spans, p.span_count, p.positions);
    return p;
}

static inline bool parity_same(const parity *p) {
    return p->kind == XD_XTOKEN_SAME;
}

static inline int64_t parity_teacher_length(const parity *p) {
    return parity_same(p) ? PARITY_STUDENT_LENGTH : PARITY_TEACHER_LENGTH;
}

static inline int64_t parity_teacher_size(const parity *p) {
    return parity_same(p) ? PARITY_STUDENT_SIZE : PARITY_TEACHER_SIZE;
}

/* ---- the loss of some rows ---- */

/* One call of the loss: samples [first, first + count) at the given positions of both sides. */
typedef struct parity_call {
    int64_t first, count;
    const int64_t *positions, *teacher_positions;
    int64_t held, teacher_held, begin, end;
    xd_rows teacher;    /* logits, or the chosen columns */
    const int64_t *ids; /* COLUMNS */
    const xd_vocab *vocab;
    xd_comm *sequence, *data;
    double denominator, token_denominator;
    float gradient[PARITY_CELLS];
    xd_xtoken_values values;
    xd_xtoken_teacher_values teacher_values;
} parity_call;

static inline xd_result parity_loss(xd_ctx *ctx, const parity *p, parity_call *c) {
    static const uint8_t exists[PARITY_SAMPLES * PARITY_CHUNKS] = { 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1,
                                                                    1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1 };
    static const float weights[PARITY_SAMPLES] = { 1.0f, 0.5f, 1.0f, 0.25f };
    const int64_t columns = c->end - c->begin;
    float logits[PARITY_CELLS], row_weight[PARITY_ROWS];
    int64_t labels[PARITY_ROWS], chunks[PARITY_ROWS], teacher_chunks[PARITY_SAMPLES * PARITY_TEACHER_LENGTH];
    xd_projection projection;
    xd_exact_map map;
    xd_xtoken_teacher teacher;
    xd_xtoken_desc d;
    for (int64_t b = 0; b < c->count; b++) {
        for (int64_t i = 0; i < c->held; i++) {
            const int64_t row = b * c->held + i, at = c->positions[i];
            for (int64_t v = 0; v < columns; v++)
                logits[row * columns + v] = parity_student(c->first + b, at, c->begin + v);
            labels[row] = parity_label(c->first + b, at);
            chunks[row] = parity_student_chunk(c->first + b, at);
            row_weight[row] = weights[c->first + b];
        }
        for (int64_t t = 0; t < c->teacher_held && !parity_same(p); t++)
            teacher_chunks[b * c->teacher_held + t] =
                parity_teacher_chunk(c->first + b, c->teacher_positions[t]);
    }
    parity_projection(ctx, p->relaxed, &projection, &map);
    teacher = xd_xtoken_teacher_defaults(p->kind);
    d = xd_xtoken_defaults();
    teacher.logits = c->teacher;
    teacher.student_chunks = chunks;
    teacher.teacher_chunks = teacher_chunks;
    teacher.chunks = PARITY_CHUNKS;
    teacher.chunk_mask = exists + c->first * PARITY_CHUNKS;
    teacher.projected.projection = &projection;
    teacher.gold.map = &map;
    teacher.projected.column_ids = c->ids;
    teacher.denominator_value = c->denominator;
    d.student = rows_of(logits, c->count * c->held, columns);
    d.common.gradient = rows_of(c->gradient, c->count * c->held, columns);
    d.vocab = c->vocab;
    d.sequences = c->count;
    d.sequence_comm = c->sequence;
    d.common.comm = c->data;
    d.sample_weight = weights + c->first;
    d.common.labels.data = labels;
    d.common.row_weight = row_weight;
    d.common.denominator_value = c->token_denominator;
    d.teachers = &teacher;
    d.teacher_count = 1;
    d.teacher_values = &c->teacher_values;
    d.temperature = 1.5;
    d.columns = PARITY_COLUMNS;
    d.tail = 5;
    d.kd_weight = 0.8;
    d.ce_weight = 0.6;
    const xd_result result = xd_xtoken_loss(ctx, &d, &c->values);
    xd_projection_destroy(ctx, &projection);
    xd_exact_map_destroy(ctx, &map);
    return result;
}

/* ---- one rank ---- */

/* Sequences first, first + 1, ... count of them on one rank, with the denominators of the whole step. */
static inline void parity_alone(xd_ctx *ctx, const parity *p, int64_t first, int64_t count, parity_call *c) {
    const int64_t length = parity_teacher_length(p), size = parity_teacher_size(p);
    float *teacher = (float *)calloc((size_t)(count * length * size), sizeof(float));
    int64_t positions[PARITY_TEACHER_LENGTH];
    xd_vocab *vocab = NULL;
    for (int64_t i = 0; i < PARITY_TEACHER_LENGTH; i++) positions[i] = i;
    for (int64_t i = 0; i < count * length * size; i++)
        teacher[i] = parity_teacher(first + i / size / length, i / size % length, i % size);
    CHECK(vocab_even(ctx, NULL, PARITY_STUDENT_SIZE, &vocab) == XD_OK);
    memset(c, 0, sizeof *c);
    c->first = first;
    c->count = count;
    c->positions = c->teacher_positions = positions;
    c->held = PARITY_STUDENT_LENGTH;
    c->teacher_held = length;
    c->end = PARITY_STUDENT_SIZE;
    c->teacher = rows_of(teacher, count * length, size);
    c->vocab = vocab;
    c->denominator = p->denominator;
    c->token_denominator = p->token_denominator;
    CHECK(parity_loss(ctx, p, c) == XD_OK);
    xd_vocab_destroy(vocab);
    free(teacher);
}

/* Fills in what one rank gets. The students' data ranks each use one micro-batch in a step: here that is one call only when it
 * has all samples, or with one data rank. */
static inline void parity_prepare(parity *p) {
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    parity_call *c = (parity_call *)malloc(sizeof *c);
    memset(&desc, 0, sizeof desc);
    desc.reduction = p->reduction;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(p->student.dp == 1 || p->student.micro_batch * p->student.dp == PARITY_SAMPLES);
    p->denominator = p->token_denominator = 0.0;
    parity_alone(ctx, p, 0, PARITY_SAMPLES, c);
    p->denominator = c->teacher_values.denominator;
    p->token_denominator = c->values.token_denominator;
    memcpy(p->gradient, c->gradient, sizeof p->gradient);
    for (int64_t i = 0; i < PARITY_CELLS; i++) p->most = fmax(p->most, fabs((double)p->gradient[i]));
    CHECK(p->most > 0.0 && p->token_denominator > 0.0);
    const int64_t batch = p->student.dp == 1 ? p->student.micro_batch : (int64_t)PARITY_SAMPLES;
    for (int64_t step = 0; step * batch < PARITY_SAMPLES; step++) {
        parity_alone(ctx, p, step * batch, batch, c);
        p->loss[step] = c->values.loss;
    }
    free(c);
    xd_ctx_destroy(ctx);
}

/* ---- many ranks ---- */

typedef struct parity_rank {
    parity_place teacher, student;
    xd_comm *teacher_tp, *teacher_cp, *tp, *cp, *data;
    xd_vocab *teacher_vocab, *vocab;
    xd_route *route;
} parity_rank;

static inline xd_result parity_open(xd_comm *world, const parity *p, parity_rank *r) {
    const int rank = xd_comm_rank(world);
    const parity_mesh *tm = &p->teacher, *sm = &p->student;
    parity_place *t = &r->teacher, *s = &r->student;
    xd_route_desc d;
    memset(r, 0, sizeof *r);
    *t = parity_stand(tm, rank, parity_teacher_length(p), parity_teacher_size(p));
    *s = parity_stand(sm, rank, PARITY_STUDENT_LENGTH, PARITY_STUDENT_SIZE);
    s->window_count = parity_spans(PARITY_TEACHER_LENGTH, s->c, sm->cp, false, s->window);
    if (parity_same(p)) {
        memcpy(s->window, s->spans, sizeof s->spans);
        s->window_count = s->span_count;
    }
    s->window_held = parity_expand(s->window, s->member ? s->window_count : 0, s->window_positions);
    xd_result result = xd_comm_split(world, t->member ? t->d * tm->cp + t->c : -1, rank, &r->teacher_tp);
    if (result == XD_OK)
        result = xd_comm_split(world, t->member ? t->d * tm->tp + t->t : -1, rank, &r->teacher_cp);
    if (result == XD_OK) result = xd_comm_split(world, s->member ? s->d * sm->cp + s->c : -1, rank, &r->tp);
    if (result == XD_OK) result = xd_comm_split(world, s->member ? s->d * sm->tp + s->t : -1, rank, &r->cp);
    if (result == XD_OK) result = xd_comm_split(world, s->member ? s->t : -1, rank, &r->data);
    const xd_interval theirs = { t->begin, t->end }, mine = { s->begin, s->end };
    if (result == XD_OK && t->member)
        result =
            vocab_of(xd_comm_ctx(world), r->teacher_tp, theirs, parity_teacher_size(p), &r->teacher_vocab);
    if (result == XD_OK && s->member)
        result = vocab_of(xd_comm_ctx(world), r->tp, mine, PARITY_STUDENT_SIZE, &r->vocab);
    memset(&d, 0, sizeof d);
    d.payload = p->payload;
    d.messages = p->messages;
    d.samples = PARITY_SAMPLES;
    d.length = parity_teacher_length(p);
    d.columns = parity_teacher_size(p);
    if (p->payload == XD_ROUTE_COLUMNS) d.columns = PARITY_COLUMNS;
    if (p->payload == XD_ROUTE_HIDDEN) d.columns = PARITY_HIDDEN;
    d.teacher.sample_count = t->samples;
    d.teacher.sample_begin = t->first_sample;
    d.teacher.micro_batch = tm->micro_batch;
    d.teacher.positions = t->spans;
    d.teacher.span_count = t->span_count;
    if (p->payload == XD_ROUTE_LOGITS) {
        d.teacher.column_begin = t->end > 0 ? t->begin : d.columns;
        d.teacher.column_end = t->end > 0 ? t->end : d.columns;
    }
    d.student.sample_count = s->samples;
    d.student.sample_begin = s->first_sample;
    d.student.micro_batch = sm->micro_batch;
    d.student.positions = s->window;
    d.student.span_count = s->window_count;
    return result == XD_OK ? xd_route_create(world, &d, &r->route) : result;
}

static inline void parity_close(parity_rank *r) {
    xd_route_destroy(r->route);
    xd_vocab_destroy(r->vocab);
    xd_vocab_destroy(r->teacher_vocab);
    xd_comm_destroy(r->data);
    xd_comm_destroy(r->cp);
    xd_comm_destroy(r->tp);
    xd_comm_destroy(r->teacher_cp);
    xd_comm_destroy(r->teacher_tp);
}

/* The J is the loss's own: from the positions whose chunk counts. */
static inline xd_result parity_send_columns(xd_ctx *ctx, const parity_rank *r, int64_t first, int64_t count,
                                            xd_rows logits) {
    static const uint8_t dropped[2][2] = { { 1, 2 }, { 2, 4 } }; /* chunks that do not exist */
    const parity_place *t = &r->teacher;
    uint8_t mask[PARITY_SAMPLES * PARITY_TEACHER_LENGTH];
    int64_t ids[PARITY_SAMPLES * PARITY_COLUMNS];
    float values[PARITY_SAMPLES * PARITY_TEACHER_LENGTH * PARITY_COLUMNS];
    for (int64_t i = 0; i < count * t->held; i++) {
        const int64_t b = first + i / t->held, chunk = parity_teacher_chunk(b, t->positions[i % t->held]);
        mask[i] = (uint8_t)(chunk >= 0);
        for (int k = 0; k < 2; k++)
            if (b == dropped[k][0] && chunk == dropped[k][1]) mask[i] = 0;
    }
    const xd_rows rows = rows_of(values, count * t->held, PARITY_COLUMNS);
    xd_vocab_topk_desc d = vocab_topk_desc(r->teacher_vocab, logits, count, PARITY_COLUMNS);
    d.mask = mask;
    d.comm = r->teacher_cp;
    const xd_result result = vocab_topk_gather(ctx, &d, ids, rows);
    return result == XD_OK ? xd_route_send(r->route, rows, ids) : result;
}

static inline xd_result parity_send(xd_ctx *ctx, const parity_rank *r, const parity *p, int64_t batch) {
    const parity_place *t = &r->teacher;
    const bool hidden = p->payload == XD_ROUTE_HIDDEN;
    const int64_t first = t->first_sample + batch * p->teacher.micro_batch;
    const int64_t left = t->first_sample + t->samples - first;
    const int64_t count = left < p->teacher.micro_batch ? left : p->teacher.micro_batch;
    const int64_t columns = hidden ? (int64_t)PARITY_HIDDEN : t->end - t->begin;
    float *data = (float *)calloc((size_t)(count * t->held * columns + 1), sizeof(float));
    for (int64_t i = 0; i < count * t->held; i++)
        for (int64_t v = 0; v < columns; v++) {
            const int64_t b = first + i / t->held, at = t->positions[i % t->held];
            data[i * columns + v] = hidden ? parity_hidden(b, at, v) : parity_teacher(b, at, t->begin + v);
        }
    const xd_rows rows = rows_of(data, count * t->held, columns);
    const xd_result result = p->payload == XD_ROUTE_COLUMNS ? parity_send_columns(ctx, r, first, count, rows)
                                                            : xd_route_send(r->route, rows, NULL);
    free(data);
    return result;
}

/* The teacher's logits of a window: its own rows, or the head applied to hidden states. */
static inline xd_rows parity_logits(const parity *p, xd_rows rows, float *buffer) {
    const int64_t size = parity_teacher_size(p);
    if (p->payload != XD_ROUTE_HIDDEN) return rows;
    for (int64_t i = 0; i < rows.rows; i++)
        for (int64_t v = 0; v < size; v++)
            buffer[i * size + v] = parity_head((const float *)rows.data + i * rows.stride, v);
    return rows_of(buffer, rows.rows, size);
}

static inline void parity_check(const parity *p, const parity_place *s, const parity_call *c, int64_t step) {
    const bool exact = p->reduction == XD_REDUCTION_INVARIANT;
    const int64_t columns = s->end - s->begin;
    CHECK_NEAR(c->values.loss, p->loss[step], exact ? 0.0 : 1e-6 * fabs(p->loss[step]));
    for (int64_t i = 0; i < c->count * s->held; i++)
        for (int64_t v = 0; v < columns; v++) {
            const int64_t row = (c->first + i / s->held) * PARITY_STUDENT_LENGTH + s->positions[i % s->held];
            CHECK_NEAR(c->gradient[i * columns + v], p->gradient[row * PARITY_STUDENT_SIZE + s->begin + v],
                       exact ? 0.0 : 1e-6 * p->most);
        }
}

static inline xd_result parity_take(xd_ctx *ctx, const parity_rank *r, const parity *p, int64_t step,
                                    parity_call *c, float *buffer) {
    const parity_place *s = &r->student;
    xd_route_window window;
    xd_result result = xd_route_take(r->route, &window);
    if (result != XD_OK) return result;
    memset(c, 0, sizeof *c);
    c->first = s->first_sample + step * p->student.micro_batch;
    c->count = window.sample_count;
    c->positions = s->positions;
    c->held = s->held;
    c->teacher_positions = s->window_positions;
    c->teacher_held = s->window_held;
    c->begin = s->begin;
    c->end = s->end;
    c->teacher = parity_logits(p, window.rows, buffer);
    c->ids = window.ids;
    c->vocab = r->vocab;
    c->sequence = r->cp;
    c->data = r->data;
    c->denominator = p->denominator;
    c->token_denominator = p->token_denominator;
    result = parity_loss(ctx, p, c);
    if (result == XD_OK) result = xd_route_release(r->route);
    if (result == XD_OK) parity_check(p, s, c, step);
    return result;
}

/* One step of distillation on this rank; argument is a prepared parity. */
static inline xd_result parity_body(xd_comm *world, void *argument) {
    const parity *p = (const parity *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    parity_rank *r = (parity_rank *)malloc(sizeof *r);
    parity_call *c = (parity_call *)malloc(sizeof *c);
    float *buffer =
        (float *)malloc(sizeof(float) * PARITY_SAMPLES * PARITY_TEACHER_LENGTH * PARITY_STUDENT_SIZE);
    xd_result result = parity_open(world, p, r);
    xd_route_info info;
    int64_t posted = 0;
    memset(&info, 0, sizeof info);
    if (result == XD_OK) info = xd_route_describe(r->route);
    for (int64_t i = 0; i < info.takes && result == XD_OK; i++) {
        while (result == XD_OK && xd_route_describe(r->route).due > 0)
            result = parity_send(ctx, r, p, posted++);
        if (result == XD_OK) result = parity_take(ctx, r, p, i, c, buffer);
    }
    while (posted < info.posts && result == XD_OK) result = parity_send(ctx, r, p, posted++);
    if (result == XD_OK) result = xd_barrier(world);
    parity_close(r);
    free(buffer);
    free(c);
    free(r);
    return result;
}

#endif
