/* Routes from a teacher's ranks to a student's: every split gives the same bits. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "xtoken_rows.h"

#include <stdlib.h>

enum { LENGTH = 24, COLUMNS = 11, SAMPLES = 7, STEPS = 2, SPANS = 2 };

/* ---- a mesh on each side ---- */

typedef struct side {
    int tp, cp, dp, first; /* ranks [first, first + tp cp dp) of the world */
    int64_t micro_batch;
    bool balanced;               /* the load-balanced order, else uneven contiguous pieces */
    bool replicated;             /* every rank of tp has all columns */
    int64_t columns[4], cuts[4]; /* [tp + 1] and [dp + 1] */
    int64_t positions[4];        /* [cp + 1] */
} side;

typedef struct scene {
    side teacher, student;
    xd_route_payload payload;
    xd_dtype wire, dtype;
    bool messages, reversed; /* reversed: the teacher goes through its samples backwards */
    int ranks, slots, steps;
    int64_t views; /* windows that were not copied, all ranks; atomic */
} scene;

static uint32_t seed = 3;

static int draw(int below) {
    seed = seed * 1664525u + 1013904223u;
    return (int)((seed >> 8) % (uint32_t)below);
}

/* Ascending cuts of [0, size], pieces may be empty. */
static void draw_cuts(int64_t *cuts, int pieces, int64_t size) {
    for (int i = 0; i <= pieces; i++) cuts[i] = i == 0 ? 0 : i == pieces ? size : draw((int)size + 1);
    for (int i = 1; i < pieces; i++)
        for (int j = i + 1; j < pieces; j++)
            if (cuts[j] < cuts[i]) {
                const int64_t other = cuts[i];
                cuts[i] = cuts[j];
                cuts[j] = other;
            }
}

static side draw_side(void) {
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
static bool side_of(const side *s, int rank, xd_route_span *spans, xd_route_side *out) {
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
        if (out->column_end == 0) out->column_begin = out->column_end = COLUMNS; /* none: 0 and 0 are all */
    }
    return true;
}

/* ---- what is in a row ---- */

static float element(int step, int64_t sample, int64_t position, int64_t column) {
    const int64_t i = ((step * SAMPLES + sample) * LENGTH + position) * COLUMNS + column;
    return (float)(i * 2654435761 % 100003) / 313.0f - 100.0f;
}

static int64_t id_of(int step, int64_t sample, int64_t column) {
    return sample * 1000 + column + step;
}

static int64_t sample_at(const scene *s, const xd_route_side *half, int64_t i) {
    return half->sample_begin + (s->reversed ? half->sample_count - 1 - i : i);
}

/* Position of row i of a sample. */
static int64_t position_at(const xd_route_side *half, int64_t i) {
    const int64_t first = half->positions[0].end - half->positions[0].begin;
    return i < first ? half->positions[0].begin + i : half->positions[1].begin + i - first;
}

static int64_t held_of(const xd_route_side *half) {
    int64_t held = 0;
    for (int i = 0; i < half->span_count; i++) held += half->positions[i].end - half->positions[i].begin;
    return held;
}

static xd_result send_batch(const scene *s, xd_route *route, const xd_route_side *half, int step,
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
    free(data); /* free at once: the route has its own copy */
    return result;
}

static void check_window(const scene *s, const xd_route_window *w, const xd_route_side *half, int step,
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

static xd_route_desc desc_of(const scene *s, const xd_route_side *teacher, const xd_route_side *student) {
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

#define TRY(call)                                   \
    do {                                            \
        const xd_result try_result = (call);        \
        if (try_result != XD_OK) return try_result; \
    } while (0)

static xd_result play_step(scene *s, xd_route *route, const xd_route_side *teacher,
                           const xd_route_side *student, int step) {
    const xd_route_info info = xd_route_describe(route);
    int64_t posted = 0;
    for (int64_t i = 0; i < info.takes; i++) {
        xd_route_window w;
        while (xd_route_describe(route).due > 0) TRY(send_batch(s, route, teacher, step, posted++));
        TRY(xd_route_take(route, &w));
        check_window(s, &w, student, step, i);
        if (w.is_view) __atomic_fetch_add(&s->views, 1, __ATOMIC_RELAXED);
        TRY(xd_route_release(route));
    }
    while (posted < info.posts) TRY(send_batch(s, route, teacher, step, posted++));
    return XD_OK;
}

static xd_result route_body(xd_comm *world, void *argument) {
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

static void play(scene *s) {
    xd_error error;
    memset(&error, 0, sizeof error);
    const int teachers = s->teacher.first + s->teacher.tp * s->teacher.cp * s->teacher.dp;
    const int students = s->student.first + s->student.tp * s->student.cp * s->student.dp;
    s->ranks = (teachers > students ? teachers : students) + 1; /* the last rank has no side */
    s->steps = STEPS;
    CHECK(xd_run_threads(s->ranks, NULL, route_body, s, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
}

/* A loss takes all columns of the teacher, whatever the student's own split. */
static scene draw_scene(void) {
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

XD_TEST(every_split_gives_every_split_the_same_bits) {
    for (int i = 0; i < 40; i++) {
        scene s = draw_scene();
        play(&s);
    }
}

XD_TEST(messages_give_the_same_bits) {
    for (int i = 0; i < 40; i++) {
        scene s = draw_scene();
        s.messages = true;
        play(&s);
    }
}

/* ---- views, the ring ---- */

static scene plain_scene(void) {
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

/* Two students look at the slots of one teacher: nothing is copied but into the slots. */
XD_TEST(a_window_in_one_slot_is_a_pointer_into_it) {
    scene s = plain_scene();
    s.student.first = 1;
    s.student.tp = 2;
    play(&s);
    CHECK_EQ_INT(s.views, 2 * 4 * STEPS);

    s = plain_scene(); /* one rank is both */
    s.payload = XD_ROUTE_COLUMNS;
    play(&s);
    CHECK_EQ_INT(s.views, 4 * STEPS);

    s = plain_scene(); /* half of the positions of one sample are a run of rows; of two they are not */
    s.student.cp = 2;
    s.student.positions[1] = LENGTH / 3;
    s.student.positions[2] = LENGTH;
    s.teacher.micro_batch = s.student.micro_batch = 1;
    play(&s);
    CHECK_EQ_INT(s.views, 2 * SAMPLES * STEPS);
    s.views = 0;
    s.teacher.micro_batch = s.student.micro_batch = 2;
    play(&s);
    CHECK_EQ_INT(s.views, 2 * STEPS); /* the last sample is alone in its micro-batch */

    s = plain_scene(); /* micro-batches of another size, another dtype */
    s.student.micro_batch = 4;
    play(&s);
    CHECK_EQ_INT(s.views, 0);
    s.student.micro_batch = 2;
    s.dtype = XD_DTYPE_BF16;
    play(&s);
    CHECK_EQ_INT(s.views, 0);
}

/* A teacher (rank 0) and a student (rank 1) of one sample a micro-batch. */
static xd_route_desc pair_desc(int rank) {
    xd_route_desc d;
    memset(&d, 0, sizeof d);
    d.samples = 4;
    d.length = 2;
    d.columns = 3;
    if (rank == 0) d.teacher.sample_count = 4, d.teacher.micro_batch = 1;
    if (rank == 1) d.student.sample_count = 4, d.student.micro_batch = 1;
    return d;
}

static void fill_slot(xd_rows rows, float value) {
    for (int64_t i = 0; i < rows.rows * rows.cols; i++) ((float *)rows.data)[i] = value;
}

/* The teacher posts the second micro-batch while the student holds the first, and only then is let on. */
static xd_result overlap_body(xd_comm *world, void *argument) {
    const xd_route_desc d = pair_desc(xd_comm_rank(world));
    xd_route *route = NULL;
    (void)argument;
    TRY(xd_route_create(world, &d, &route));
    CHECK_EQ_INT(xd_route_describe(route).slots, 2);
    CHECK(xd_route_describe(route).shared);
    if (xd_comm_rank(world) == 0) {
        xd_rows slot;
        for (int i = 0; i < 2; i++) {
            TRY(xd_route_slot(route, &slot, NULL));
            fill_slot(slot, (float)i);
            TRY(xd_route_post(route));
            TRY(xd_barrier(world));
        }
        TRY(xd_route_slot(route, &slot, NULL)); /* waits for the student's release */
        fill_slot(slot, 2.0f);
        TRY(xd_route_post(route));
    } else {
        xd_route_window w;
        TRY(xd_barrier(world));
        TRY(xd_route_take(route, &w));
        CHECK(w.is_view);
        const float *first = (const float *)w.rows.data;
        TRY(xd_barrier(world)); /* the second one is posted */
        CHECK(first[0] == 0.0f && first[5] == 0.0f);
        for (int i = 1; i < 3; i++) {
            TRY(xd_route_release(route));
            TRY(xd_route_take(route, &w));
            CHECK(((const float *)w.rows.data)[0] == (float)i);
            CHECK(w.rows.data == (i == 2 ? (const void *)first : w.rows.data)); /* the first slot again */
        }
        TRY(xd_route_release(route));
    }
    TRY(xd_barrier(world));
    xd_route_destroy(route);
    return XD_OK;
}

XD_TEST(a_teacher_fills_the_next_slot_while_a_student_reads) {
    xd_error error;
    memset(&error, 0, sizeof error);
    CHECK(xd_run_threads(2, NULL, overlap_body, NULL, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
}

/* ---- failures ---- */

typedef struct failure {
    bool messages, teacher_leaves;
    xd_result seen;
    char message[256];
} failure;

/* One side leaves with an error of its own in the middle of a step. */
static xd_result failing_body(xd_comm *world, void *argument) {
    failure *f = (failure *)argument;
    const int rank = xd_comm_rank(world);
    xd_route_desc d = pair_desc(rank);
    xd_route *route = NULL;
    xd_route_window w;
    float data[6] = { 0 };
    d.messages = f->messages;
    xd_result result = xd_route_create(world, &d, &route);
    for (int i = 0; i < 8 && result == XD_OK; i++) { /* two steps */
        if (i == 2 && (rank == 0) == f->teacher_leaves) {
            xd_route_destroy(route);
            return XD_ERROR_IO;
        }
        result = rank == 0 ? xd_route_send(route, rows_of(data, 2, 3), NULL) : xd_route_take(route, &w);
        if (result == XD_OK && rank == 1) result = xd_route_release(route);
    }
    if (result != XD_OK) {
        f->seen = result;
        strncpy(f->message, xd_last_error(xd_comm_ctx(world))->message, sizeof f->message - 1);
    }
    xd_route_destroy(route);
    return result;
}

XD_TEST(when_one_side_fails_the_other_is_told_who) {
    for (int i = 0; i < 4; i++) {
        failure f;
        memset(&f, 0, sizeof f);
        f.messages = i % 2 == 1;
        f.teacher_leaves = i / 2 == 1;
        CHECK(xd_run_threads(2, NULL, failing_body, &f, NULL) == XD_ERROR_IO);
        CHECK_EQ_INT(f.seen, XD_ERROR_PEER);
        CHECK(strstr(f.message, f.teacher_leaves ? "rank 0" : "rank 1"));
    }
}

/* The teacher stays away, alive. */
static xd_result late_body(xd_comm *world, void *argument) {
    failure *f = (failure *)argument;
    const xd_route_desc d = pair_desc(xd_comm_rank(world));
    xd_route *route = NULL;
    xd_route_window w;
    TRY(xd_route_create(world, &d, &route));
    if (xd_comm_rank(world) == 1) {
        f->seen = xd_route_take(route, &w);
        strncpy(f->message, xd_last_error(xd_comm_ctx(world))->message, sizeof f->message - 1);
        __atomic_store_n(&f->teacher_leaves, true, __ATOMIC_RELEASE);
    } else {
        while (!__atomic_load_n(&f->teacher_leaves, __ATOMIC_ACQUIRE)) continue;
    }
    xd_route_destroy(route);
    return XD_OK;
}

XD_TEST(a_student_waits_no_longer_than_the_deadline) {
    failure f;
    xd_ctx_desc desc;
    memset(&f, 0, sizeof f);
    memset(&desc, 0, sizeof desc);
    desc.timeout_seconds = 0.05;
    CHECK(xd_run_threads(2, &desc, late_body, &f, NULL) == XD_OK);
    CHECK_EQ_INT(f.seen, XD_ERROR_TIMEOUT);
    CHECK(strstr(f.message, "rank 0"));
}

/* ---- errors ---- */

typedef struct bad_route {
    void (*spoil)(xd_route_desc *d, int rank);
    xd_result expected;
    const char *message;
} bad_route;

static xd_result bad_body(xd_comm *world, void *argument) {
    const bad_route *bad = (const bad_route *)argument;
    xd_route_desc d = pair_desc(xd_comm_rank(world));
    xd_route *route = NULL;
    bad->spoil(&d, xd_comm_rank(world));
    const xd_result result = xd_route_create(world, &d, &route);
    CHECK(result != XD_OK && route == NULL);
    if (bad->expected != XD_ERROR_PEER) CHECK_EQ_INT(result, bad->expected);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, bad->message));
    return xd_barrier(world); /* the group goes on */
}

static void no_student(xd_route_desc *d, int rank) {
    d->student.sample_count = rank >= 0 ? 0 : 1;
}
static void no_one(xd_route_desc *d, int rank) {
    d->student.sample_count = d->teacher.sample_count = rank >= 0 ? 0 : 1;
}
static void a_gap(xd_route_desc *d, int rank) {
    static const xd_route_span half = { 0, 1 };
    if (rank == 0) d->teacher.positions = &half, d->teacher.span_count = 1;
}
static void a_missing_sample(xd_route_desc *d, int rank) {
    if (rank == 0) d->teacher.sample_count = 3;
}
static void missing_columns(xd_route_desc *d, int rank) {
    if (rank == 0) d->teacher.column_begin = 1, d->teacher.column_end = 3;
}
static void an_overlap(xd_route_desc *d, int rank) {
    d->teacher.sample_count = 4;
    d->teacher.column_begin = rank;
    d->teacher.column_end = rank + 2;
}
static void a_sample_twice(xd_route_desc *d, int rank) {
    static const int64_t samples[4] = { 0, 1, 1, 2 };
    if (rank == 1) d->student.samples = samples;
}
static void a_sample_outside(xd_route_desc *d, int rank) {
    if (rank == 1) d->student.sample_begin = 1;
}
static void positions_outside(xd_route_desc *d, int rank) {
    static const xd_route_span far = { 1, 3 };
    if (rank == 1) d->student.positions = &far, d->student.span_count = 1;
}
static void columns_outside(xd_route_desc *d, int rank) {
    if (rank == 1) d->student.column_end = 4;
}
static void few_slots(xd_route_desc *d, int rank) {
    if (rank == 1) d->student.micro_batch = 3;
    d->slots = 2;
}
static void other_columns(xd_route_desc *d, int rank) {
    d->columns = 3 + rank;
}
static void integers(xd_route_desc *d, int rank) {
    d->wire = rank >= 0 ? XD_DTYPE_I32 : XD_DTYPE_F32;
}
static void bad_count(xd_route_desc *d, int rank) {
    if (rank == 1) d->student.sample_count = -1;
}
static void part_of_the_columns(xd_route_desc *d, int rank) {
    d->payload = XD_ROUTE_COLUMNS;
    if (rank == 1) d->student.column_end = 2;
}

XD_TEST(every_rank_is_told_what_is_wrong_with_a_route) {
    static const bad_route bad[] = {
        { no_student, XD_ERROR_PEER, "no rank is a student" }, /* rank 1 has no side: it hears of it */
        { no_one, XD_ERROR_ARGUMENT, "no rank is a teacher or a student" },
        { a_gap, XD_ERROR_SHAPE, "teachers hold 3 of the 6 elements of sample 0 that student rank 1 wants" },
        { a_missing_sample, XD_ERROR_SHAPE, "teachers hold 0 of the 6 elements of sample 3" },
        { missing_columns, XD_ERROR_SHAPE, "teachers hold 4 of the 6 elements" },
        { an_overlap, XD_ERROR_SHAPE, "the shards of teacher ranks 0 and 1 overlap in part in sample 0" },
        { a_sample_twice, XD_ERROR_ARGUMENT, "student rank 1 has sample 1 twice" },
        { a_sample_outside, XD_ERROR_ARGUMENT, "student rank 1 has sample 4 of 4" },
        { positions_outside, XD_ERROR_ARGUMENT, "student rank 1 has positions [1, 3) after 0, of 2" },
        { columns_outside, XD_ERROR_ARGUMENT, "student rank 1 has columns [0, 4) of 3" },
        { few_slots, XD_ERROR_ARGUMENT, "a ring of 2 slots, but students who step together need 3" },
        { other_columns, XD_ERROR_MISMATCH, "the route" },
        { integers, XD_ERROR_DTYPE, "a wire of I32" },
        { bad_count, XD_ERROR_PEER, "a student side of -1 samples" },
        { part_of_the_columns, XD_ERROR_ARGUMENT, "student rank 1 wants 2 of the 3 chosen columns" }
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bad_route one = bad[i];
        CHECK(xd_run_threads(2, NULL, bad_body, &one, NULL) == XD_OK);
    }
}

XD_TEST(calls_out_of_turn_are_refused) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    xd_route *route = NULL;
    xd_route_window w;
    float data[6] = { 1, 2, 3, 4, 5, 6 };
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    xd_route_desc d = pair_desc(0);
    d.student = d.teacher;
    CHECK(xd_route_create(self, &d, &route) == XD_OK);
    CHECK_EQ_INT(xd_route_describe(route).due, 1);
    CHECK(xd_route_take(route, &w) == XD_ERROR_STATE);
    CHECK(xd_route_release(route) == XD_ERROR_STATE);
    CHECK(xd_route_post(route) == XD_ERROR_STATE);
    CHECK(xd_route_send(route, rows_of(data, 3, 3), NULL) == XD_ERROR_SHAPE);
    CHECK(xd_route_send(route, rows_of(data, 2, 2), NULL) == XD_ERROR_SHAPE);
    for (int i = 0; i < 2; i++) CHECK(xd_route_send(route, rows_of(data, 2, 3), NULL) == XD_OK);
    CHECK(xd_route_send(route, rows_of(data, 2, 3), NULL) == XD_ERROR_STATE); /* both slots are full */
    CHECK(xd_route_take(route, &w) == XD_OK);
    CHECK(w.is_view && w.sample_count == 1 && ((const float *)w.rows.data)[5] == 6.0f);
    CHECK(xd_route_take(route, &w) == XD_ERROR_STATE); /* the last one was not released */
    CHECK(xd_route_send(route, rows_of(data, 2, 3), NULL) == XD_ERROR_STATE);
    CHECK(xd_route_release(route) == XD_OK);
    CHECK(xd_route_send(route, rows_of(data, 2, 3), NULL) == XD_OK);
    xd_route_destroy(route);
    xd_route_destroy(NULL);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- memory ---- */

/* Fails one allocation, counted over all ranks. */
typedef struct scarce {
    int64_t calls, live, fails; /* atomic */
} scarce;

static void *scarce_allocate(void *user, size_t bytes) {
    scarce *s = (scarce *)user;
    if (__atomic_add_fetch(&s->calls, 1, __ATOMIC_RELAXED) == s->fails) return NULL;
    void *memory = malloc(bytes);
    if (memory) __atomic_fetch_add(&s->live, 1, __ATOMIC_RELAXED);
    return memory;
}

static void scarce_release(void *user, void *memory) {
    if (memory) __atomic_fetch_sub(&((scarce *)user)->live, 1, __ATOMIC_RELAXED);
    free(memory);
}

XD_TEST(no_room_is_an_error_on_every_rank_and_leaves_nothing_behind) {
    for (int messages = 0; messages < 2; messages++) {
        scarce memory;
        xd_ctx_desc desc;
        xd_result result = XD_ERROR_MEMORY;
        memset(&memory, 0, sizeof memory);
        memset(&desc, 0, sizeof desc);
        desc.allocator.allocate = scarce_allocate;
        desc.allocator.release = scarce_release;
        desc.allocator.user = &memory;
        for (memory.fails = 1; result != XD_OK && memory.fails < 400; memory.fails++) {
            scene s = plain_scene();
            s.payload = XD_ROUTE_COLUMNS;
            s.student.first = 1;
            s.student.dp = 2;
            s.student.cuts[1] = 4;
            s.student.cuts[2] = SAMPLES;
            s.steps = 1;
            s.messages = messages == 1;
            memory.calls = 0;
            result = xd_run_threads(3, &desc, route_body, &s, NULL);
            CHECK_EQ_INT(memory.live, 0);
            CHECK(result == XD_OK || result == XD_ERROR_MEMORY);
        }
        CHECK(result == XD_OK);
    }
}

XD_TEST_MAIN()
