/* What tests of routes share: two meshes with any split of each, a step over them, and what every window must contain. */
#ifndef ROUTE_SCENE_H
#define ROUTE_SCENE_H

#include "xd_test.h"
#include "xdistill.h"

#include <stdlib.h>

enum { LENGTH = 24, COLUMNS = 11, SAMPLES = 7, STEPS = 2, SPANS = 2 };

/* ---- a mesh on each side ---- */

typedef struct side {
    int tp, cp, dp, first; /* ranks [first, first + tp cp dp) of the world */
    int64_t micro_batch;
    bool balanced;               /* the load-balanced order, else contiguous blocks of different sizes */
    bool replicated;             /* every rank of tp has all columns */
    int64_t columns[4], cuts[4]; /* [tp + 1] and [dp + 1] */
    int64_t positions[4];        /* [cp + 1] */
} side;

typedef struct scene {
    side teacher, student;
    xd_route_payload payload;
    xd_dtype wire, dtype;
    bool messages, reversed; /* reversed: the teacher goes through its samples backwards */
    bool refused;            /* there is no memory that all ranks can address, so messages are expected */
    int ranks, slots, steps;
    int64_t views; /* windows that were not copied, all ranks; atomic */
} scene;

static uint32_t seed = 3;

static inline int draw(int below) {
    seed = seed * 1664525u + 1013904223u;
    return (int)((seed >> 8) % (uint32_t)below);
}

/* Ascending cuts of [0, size]; blocks may be empty. */
static inline void draw_cuts(int64_t *cuts, int pieces, int64_t size) {
    for (int i = 0; i <= pieces; i++) cuts[i] = i == 0 ? 0 : i == pieces ? size : draw((int)size + 1);
    for (int i = 1; i < pieces; i++)
        for (int j = i + 1; j < pieces; j++)
            if (cuts[j] < cuts[i]) {
                const int64_t other = cuts[i];
                cuts[i] = cuts[j];
                cuts[j] = other;
            }
}

static inline side draw_side(void) {
    side s;
    memset(&s, 0, sizeof s);
    do {
        s.tp = 1 + draw(3);
        s.cp = 1 + draw(3);
        s.dp = 1 + draw(3);
    } while (s.tp * s.cp * s.dp > 8);
    s.micro_batch = 1 + draw(4);
    s.balanced = draw(2) == 0;
    draw_cuts(s.columns, s.tp, COLUMNS);
    draw_cuts(s.cuts, s.dp, SAMPLES);
    draw_cuts(s.positions, s.cp, LENGTH);
    return s;
}

/* Fills a rank's side; spans has room for two. False when the rank is not on it. */
static inline bool side_of(const side *s, int rank, xd_route_span *spans, xd_route_side *out) {
    const int at = rank - s->first, t = at % s->tp, c = at / s->tp % s->cp, d = at / s->tp / s->cp;
    memset(out, 0, sizeof *out);
    if (at < 0 || at >= s->tp * s->cp * s->dp || s->cuts[d] == s->cuts[d + 1]) return false;
    out->sample_begin = s->cuts[d];
    out->sample_count = s->cuts[d + 1] - s->cuts[d];
    out->micro_batch = s->micro_batch;
    out->positions = spans;
    out->span_count = 1;
    spans[0].begin = s->positions[c];
    spans[0].end = s->positions[c + 1];
    if (s->balanced) {
        const int64_t piece = LENGTH / (2 * s->cp);
        out->span_count = 2;
        spans[0].begin = c * piece;
        spans[0].end = (c + 1) * piece;
        spans[1].begin = (2 * s->cp - 1 - c) * piece;
        spans[1].end = (2 * s->cp - c) * piece;
    }
    out->column_end = COLUMNS;
    if (!s->replicated) {
        out->column_begin = s->columns[t];
        out->column_end = s->columns[t + 1];
        if (out->column_end == 0) out->column_begin = out->column_end = COLUMNS; /* none: 0 and 0 mean all */
    }
    return true;
}

/* The last rank has no side. */
static inline int ranks_of(const scene *s) {
    const int teachers = s->teacher.first + s->teacher.tp * s->teacher.cp * s->teacher.dp;
    const int students = s->student.first + s->student.tp * s->student.cp * s->student.dp;
    return (teachers > students ? teachers : students) + 1;
}

/* ---- the contents of a row ---- */

static inline float element(int step, int64_t sample, int64_t position, int64_t column) {
    const int64_t i = ((step * SAMPLES + sample) * LENGTH + position) * COLUMNS + column;
    return (float)(i * 2654435761 % 100003) / 313.0f - 100.0f;
}

static inline int64_t id_of(int step, int64_t sample, int64_t column) {
    return sample * 1000 + column + step;
}

static inline int64_t sample_at(const scene *s, const xd_route_side *half, int64_t i) {
    return half->sample_begin + (s->reversed ? half->sample_count - 1 - i : i);
}

/* Position of row i of a sample. */
static inline int64_t position_at(const xd_route_side *half, int64_t i) {
    const int64_t first = half->positions[0].end - half->positions[0].begin;
    return i < first ? half->positions[0].begin + i : half->positions[1].begin + i - first;
}

static inline int64_t held_of(const xd_route_side *half) {
    int64_t held = 0;
    for (int i = 0; i < half->span_count; i++) held += half->positions[i].end - half->positions[i].begin;
    return held;
}

static inline xd_result send_batch(const scene *s, xd_route *route, const xd_route_side *half, int step,
                                   int64_t batch) {
    const int64_t held = held_of(half), columns = half->column_end - half->column_begin;
    const int64_t begin = batch * half->micro_batch, left = half->sample_count - begin;
    const int64_t samples = left < half->micro_batch ? left : half->micro_batch;
    const int64_t stride = columns + 3;
    float *data = (float *)calloc((size_t)(samples * held * stride + 1), sizeof(float));
    int64_t ids[SAMPLES * COLUMNS];
    for (int64_t b = 0; b < samples; b++) {
        const int64_t sample = sample_at(s, half, begin + b);
        for (int64_t c = 0; c < COLUMNS; c++) ids[b * COLUMNS + c] = id_of(step, sample, c);
        for (int64_t i = 0; i < held; i++)
            for (int64_t c = 0; c < columns; c++)
                data[(b * held + i) * stride + c] =
                    element(step, sample, position_at(half, i), half->column_begin + c);
    }
    xd_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.data = data;
    rows.dtype = XD_DTYPE_F32;
    rows.rows = samples * held;
    rows.cols = columns;
    rows.stride = stride;
    const xd_result result = xd_route_send(route, rows, s->payload == XD_ROUTE_COLUMNS ? ids : NULL);
    free(data); /* may be freed at once: the route has its own copy */
    return result;
}

static inline void check_window(const scene *s, const xd_route_window *w, const xd_route_side *half, int step,
                                int64_t batch) {
    const int64_t held = held_of(half), columns = half->column_end - half->column_begin;
    int wrong = 0;
    CHECK_EQ_INT(w->rows.rows, w->sample_count * held);
    CHECK_EQ_INT(w->rows.cols, columns);
    CHECK((w->ids != NULL) == (s->payload == XD_ROUTE_COLUMNS));
    for (int64_t b = 0; b < w->sample_count; b++) {
        const int64_t sample = half->sample_begin + batch * half->micro_batch + b;
        for (int64_t c = 0; w->ids && c < COLUMNS; c++)
            wrong += w->ids[b * COLUMNS + c] != id_of(step, sample, c);
        for (int64_t i = 0; i < held; i++)
            for (int64_t c = 0; c < columns; c++) {
                float expected = element(step, sample, position_at(half, i), half->column_begin + c);
                if (s->wire == XD_DTYPE_BF16 || s->dtype == XD_DTYPE_BF16)
                    expected = xd_f32_from_bf16(xd_bf16_from_f32(expected));
                const double got =
                    xd_load_f64(w->rows.data, w->rows.dtype, (b * held + i) * w->rows.stride + c);
                wrong += got != (double)expected;
            }
    }
    CHECK_EQ_INT(wrong, 0);
}

/* ---- one rank ---- */

static inline xd_route_desc desc_of(const scene *s, const xd_route_side *teacher,
                                    const xd_route_side *student) {
    xd_route_desc d;
    memset(&d, 0, sizeof d);
    d.payload = s->payload;
    d.samples = SAMPLES;
    d.length = LENGTH;
    d.columns = COLUMNS;
    d.wire = s->wire;
    d.dtype = s->dtype;
    d.slots = s->slots;
    d.messages = s->messages;
    d.teacher = *teacher;
    d.student = *student;
    return d;
}

static inline xd_result play_step(scene *s, xd_route *route, const xd_route_side *teacher,
                                  const xd_route_side *student, int step) {
    const xd_route_info info = xd_route_describe(route);
    int64_t posted = 0;
    CHECK(info.shared == !(s->messages || s->refused) || info.slots == 0);
    for (int64_t i = 0; i < info.takes; i++) {
        xd_route_window w;
        while (xd_route_describe(route).due > 0) XD_TRY(send_batch(s, route, teacher, step, posted++));
        XD_TRY(xd_route_take(route, &w));
        check_window(s, &w, student, step, i);
        if (w.is_view) __atomic_fetch_add(&s->views, 1, __ATOMIC_RELAXED);
        XD_TRY(xd_route_release(route));
    }
    while (posted < info.posts) XD_TRY(send_batch(s, route, teacher, step, posted++));
    return XD_OK;
}

static inline xd_result route_body(xd_comm *world, void *argument) {
    scene *s = (scene *)argument;
    const int rank = xd_comm_rank(world);
    xd_route_span spans[2][SPANS];
    xd_route_side teacher, student;
    int64_t backwards[SAMPLES];
    xd_route *route = NULL;
    side_of(&s->teacher, rank, spans[0], &teacher);
    side_of(&s->student, rank, spans[1], &student);
    for (int64_t i = 0; i < teacher.sample_count; i++) backwards[i] = sample_at(s, &teacher, i);
    if (s->reversed) teacher.samples = backwards;
    const xd_route_desc d = desc_of(s, &teacher, &student);
    xd_result result = xd_route_create(world, &d, &route);
    for (int step = 0; step < s->steps && result == XD_OK; step++)
        result = play_step(s, route, &teacher, &student, step);
    if (result == XD_OK) result = xd_barrier(world);
    xd_route_destroy(route);
    return result;
}

/* A loss takes all columns of the teacher, whatever the student's own split. */
static inline scene draw_scene(void) {
    scene s;
    memset(&s, 0, sizeof s);
    s.teacher = draw_side();
    s.student = draw_side();
    s.student.replicated = draw(3) > 0;
    s.payload = (xd_route_payload)draw(3);
    s.teacher.replicated = s.payload != XD_ROUTE_LOGITS;
    if (s.payload == XD_ROUTE_COLUMNS) s.student.replicated = true;
    s.wire = draw(3) == 0 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    s.dtype = draw(3) == 0 ? XD_DTYPE_F32 : XD_DTYPE_NONE;
    s.reversed = draw(3) == 0;
    /* ranks of the two sides: the same, all different, or some shared */
    s.student.first = draw(3) * s.teacher.tp * s.teacher.cp * s.teacher.dp / 2;
    return s;
}

static inline scene plain_scene(void) {
    scene s;
    memset(&s, 0, sizeof s);
    s.teacher.tp = s.teacher.cp = s.teacher.dp = s.student.tp = s.student.cp = s.student.dp = 1;
    s.teacher.micro_batch = s.student.micro_batch = 2;
    s.teacher.replicated = s.student.replicated = true;
    s.teacher.cuts[1] = s.student.cuts[1] = SAMPLES;
    s.teacher.positions[1] = s.student.positions[1] = LENGTH;
    s.wire = XD_DTYPE_F32;
    return s;
}

/* A teacher (rank 0) and a student (rank 1) of one sample a micro-batch. */
static inline xd_route_desc pair_desc(int rank) {
    xd_route_desc d;
    memset(&d, 0, sizeof d);
    d.samples = 4;
    d.length = 2;
    d.columns = 3;
    if (rank == 0) d.teacher.sample_count = 4, d.teacher.micro_batch = 1;
    if (rank == 1) d.student.sample_count = 4, d.student.micro_batch = 1;
    return d;
}

static inline void fill_slot(xd_rows rows, float value) {
    for (int64_t i = 0; i < rows.rows * rows.cols; i++) ((float *)rows.data)[i] = value;
}

#endif
