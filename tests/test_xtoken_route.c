/* Routes from a teacher's ranks to a student's: every split gives the same bits. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "route_scene.h"
#include "xtoken_rows.h"

#include <sched.h>

static void play(scene *s) {
    xd_error error;
    memset(&error, 0, sizeof error);
    s->ranks = ranks_of(s);
    s->steps = STEPS;
    CHECK(xd_run_threads(s->ranks, NULL, route_body, s, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
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

/* The teacher posts the second micro-batch while the student holds the first, and only then is let on. */
static xd_result overlap_body(xd_comm *world, void *argument) {
    const xd_route_desc d = pair_desc(xd_comm_rank(world));
    xd_route *route = NULL;
    (void)argument;
    XD_TRY(xd_route_create(world, &d, &route));
    CHECK_EQ_INT(xd_route_describe(route).slots, 2);
    CHECK(xd_route_describe(route).shared);
    if (xd_comm_rank(world) == 0) {
        xd_rows slot;
        for (int i = 0; i < 2; i++) {
            XD_TRY(xd_route_slot(route, &slot, NULL));
            fill_slot(slot, (float)i);
            XD_TRY(xd_route_post(route));
            XD_TRY(xd_barrier(world));
        }
        XD_TRY(xd_route_slot(route, &slot, NULL)); /* waits for the student's release */
        fill_slot(slot, 2.0f);
        XD_TRY(xd_route_post(route));
    } else {
        xd_route_window w;
        XD_TRY(xd_barrier(world));
        XD_TRY(xd_route_take(route, &w));
        CHECK(w.is_view);
        const float *first = (const float *)w.rows.data;
        XD_TRY(xd_barrier(world)); /* the second one is posted */
        CHECK(first[0] == 0.0f && first[5] == 0.0f);
        for (int i = 1; i < 3; i++) {
            XD_TRY(xd_route_release(route));
            XD_TRY(xd_route_take(route, &w));
            CHECK(((const float *)w.rows.data)[0] == (float)i);
            CHECK(w.rows.data == (i == 2 ? (const void *)first : w.rows.data)); /* the first slot again */
        }
        XD_TRY(xd_route_release(route));
    }
    XD_TRY(xd_barrier(world));
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

/* The ranks' clock stands still while they join; once the student waits, every look at it takes a second. */
typedef struct late {
    int joined, over, seconds; /* atomic */
    xd_result seen;
    char message[256];
} late;

static double late_clock(void *user) {
    late *l = (late *)user;
    const bool waits = __atomic_load_n(&l->joined, __ATOMIC_ACQUIRE) == 2;
    return waits ? __atomic_add_fetch(&l->seconds, 1, __ATOMIC_RELAXED) : 0.0;
}

/* The teacher stays away, alive. */
static xd_result late_body(xd_comm *world, void *argument) {
    late *l = (late *)argument;
    const xd_route_desc d = pair_desc(xd_comm_rank(world));
    xd_route *route = NULL;
    xd_route_window w;
    XD_TRY(xd_route_create(world, &d, &route));
    __atomic_add_fetch(&l->joined, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&l->joined, __ATOMIC_ACQUIRE) < 2) sched_yield();
    if (xd_comm_rank(world) == 1) {
        l->seen = xd_route_take(route, &w);
        strncpy(l->message, xd_last_error(xd_comm_ctx(world))->message, sizeof l->message - 1);
        __atomic_store_n(&l->over, 1, __ATOMIC_RELEASE);
    } else {
        while (!__atomic_load_n(&l->over, __ATOMIC_ACQUIRE)) sched_yield();
    }
    xd_route_destroy(route);
    return XD_OK;
}

XD_TEST(a_student_waits_no_longer_than_the_deadline) {
    late l;
    memset(&l, 0, sizeof l);
    const xd_ctx_desc desc = { .timeout_seconds = 60, .clock = { late_clock, &l } };
    CHECK(xd_run_threads(2, &desc, late_body, &l, NULL) == XD_OK);
    CHECK_EQ_INT(l.seen, XD_ERROR_TIMEOUT);
    CHECK(strstr(l.message, "rank 0"));
    CHECK(l.seconds > 60);
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
static void beyond_memory(xd_route_desc *d, int rank) {
    if (rank == 1) d->student.sample_count = INT64_C(1) << 61; /* words of a list whose bytes are 2^64 */
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
        { other_columns, XD_ERROR_MISMATCH, "settings of a route: rank" },
        { integers, XD_ERROR_DTYPE, "a wire of I32" },
        { bad_count, XD_ERROR_PEER, "a student side of -1 samples" },
        { beyond_memory, XD_ERROR_PEER, "a student side of 2305843009213693952 samples, of 4" },
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
