/* Queues of collectives: the bits and counters of a program are those of the same program inline, every fault names its culprit,
 * and what is refused is refused on all ranks. Ranks are threads, and time is a counter of ours: no test sleeps. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "queue_bytes.h"
#include "queue_program.h"

#include <sched.h>
#include <stdlib.h>

enum { RANKS = 4, ODD = 2 };

static const xd_queue_form forms[] = { XD_QUEUE_INLINE, XD_QUEUE_WORKER };

static bool says(const xd_comm *comm, const char *text) {
    return strstr(xd_last_error(xd_comm_ctx(comm))->message, text) != NULL;
}

/* ---- random programs ---- */

static void compare_programs(int ranks, xd_reduction mode, int queues) {
    static job jobs[2];
    const xd_ctx_desc d = { .reduction = mode };
    for (int f = 0; f < 2; f++) {
        memset(&jobs[f], 0, sizeof jobs[f]);
        jobs[f].seed = (uint64_t)ranks * 1000 + (uint64_t)mode * 100 + (uint64_t)queues;
        jobs[f].queues = queues;
        jobs[f].form = forms[f];
        CHECK_EQ_INT(xd_run_threads(ranks, &d, run_program, &jobs[f], NULL), XD_OK);
    }
    uint64_t calls = 0;
    for (int q = 0; q < queues; q++) calls += jobs[0].traffic[0][q].calls;
    CHECK(calls > STEPS / 3);
    CHECK(memcmp(jobs[0].hash, jobs[1].hash, sizeof jobs[0].hash) == 0);
    CHECK(memcmp(jobs[0].traffic, jobs[1].traffic, sizeof jobs[0].traffic) == 0);
}

XD_TEST(a_random_program_on_workers_gives_the_bits_and_counters_of_the_same_inline) {
    static const int sizes[] = { 1, 2, 3, 4, 8 };
    for (int i = 0; i < 5; i++)
        for (int queues = 1; queues <= QUEUES; queues += 3) {
            compare_programs(sizes[i], XD_REDUCTION_DETERMINISTIC, queues);
            compare_programs(sizes[i], XD_REDUCTION_INVARIANT, queues);
        }
}

/* ---- faults ---- */

/* The clock stands still until all ranks but ODD wait in the call with the fault; then only ODD can be late. The first look of an
 * armed thread is its deadline, the second is a wait. */
static uint32_t armed, waiting, passed, finished, ticks;
static uint32_t scene_number;
static __thread uint32_t looks_of;
static __thread int looks;

static double patient(void *user) {
    (void)user;
    if (__atomic_load_n(&armed, __ATOMIC_ACQUIRE)) {
        if (looks_of != scene_number) looks = 0, looks_of = scene_number;
        if (++looks == 2) __atomic_add_fetch(&waiting, 1, __ATOMIC_ACQ_REL);
    }
    if (__atomic_load_n(&waiting, __ATOMIC_ACQUIRE) < RANKS - 1) return 0.0;
    return 10.0 + 1e-3 * (double)__atomic_add_fetch(&ticks, 1, __ATOMIC_RELAXED);
}

static void wait_for(const uint32_t *counter, uint32_t value) {
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) sched_yield();
}

/* All ranks: from now on looks at the clock are those of the call with the fault. */
static void arm(const xd_comm *world) {
    __atomic_add_fetch(&passed, 1, __ATOMIC_ACQ_REL);
    if (xd_comm_rank(world) == ODD) {
        wait_for(&passed, RANKS);
        __atomic_store_n(&armed, 1u, __ATOMIC_RELEASE);
    }
    wait_for(&armed, 1);
}

static void play(xd_rank_function rank, void *argument) {
    const xd_ctx_desc d = { .clock = { patient, NULL }, .timeout_seconds = 2, .init_timeout_seconds = 1e9 };
    armed = waiting = passed = finished = ticks = 0;
    scene_number++;
    CHECK_EQ_INT(xd_run_threads(RANKS, &d, rank, argument, NULL), XD_OK);
}

typedef enum fault {
    MISSING,
    LEAVES,
    LATE,
    WRONG_COUNT,
    WRONG_DTYPE,
    WRONG_OPERATION,
    BAD_ARGUMENT,
    FAULTS
} fault;

typedef struct scene {
    fault fault;
    xd_queue_form form;
    bool beside; /* the fault is in a call on the communicator */
    int64_t count;
} scene;

enum { SHORT = 3, LONG = 3000 };

static bool is_late(fault f) {
    return f == MISSING || f == LATE;
}

static bool breaks(fault f) {
    return is_late(f) || f == LEAVES;
}

static xd_collective with_fault(xd_collective c, fault f) {
    if (f == WRONG_COUNT) c.count--;
    if (f == WRONG_DTYPE) c.dtype = XD_DTYPE_I32;
    if (f == WRONG_OPERATION) c.op = XD_MAX;
    if (f == BAD_ARGUMENT) c.count = -5;
    return c;
}

static void check_named(xd_comm *world) {
    CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
    CHECK(says(world, "rank 2"));
}

/* The call with the fault: in the queue, or on the communicator. */
static xd_result call(xd_comm *world, xd_queue *queue, const scene *s, const xd_collective *c) {
    xd_ticket ticket = { 0 };
    if (s->beside) return xd_collective_run(world, c);
    XD_TRY(xd_queue_start(queue, c, &ticket));
    return xd_queue_wait(queue, ticket);
}

static void survive(xd_comm *world, xd_queue *queue, const scene *s, const xd_collective *good) {
    const xd_result got = call(world, queue, s, good);
    CHECK_EQ_INT(got, is_late(s->fault)                              ? XD_ERROR_TIMEOUT
                      : breaks(s->fault) || s->fault == BAD_ARGUMENT ? XD_ERROR_PEER
                                                                     : XD_ERROR_MISMATCH);
    check_named(world);
    if (!breaks(s->fault)) return;
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER); /* for the communicator and the queue */
    check_named(world);
    CHECK_EQ_INT(xd_queue_start(queue, good, NULL), XD_ERROR_PEER);
    check_named(world);
}

static void fail(xd_comm *world, xd_queue *queue, const scene *s, const xd_collective *good) {
    const xd_collective bad = with_fault(*good, s->fault);
    if (s->fault == LEAVES) return;
    if (is_late(s->fault)) wait_for(&finished, RANKS - 1);
    if (s->fault == MISSING) return;
    CHECK_EQ_INT(call(world, queue, s, &bad), s->fault == LATE           ? XD_ERROR_PEER
                                              : s->fault == BAD_ARGUMENT ? XD_ERROR_ARGUMENT
                                                                         : XD_ERROR_MISMATCH);
}

static xd_result fault_rank(xd_comm *world, void *argument) {
    const scene *s = (const scene *)argument;
    const bool odd = xd_comm_rank(world) == ODD;
    float first[LONG], send[LONG], recv[LONG];
    xd_queue *queue = NULL;
    xd_ticket ticket = { 0 };
    const xd_queue_desc d = { s->form, 3 };
    for (int i = 0; i < LONG; i++) first[i] = send[i] = 1.0f, recv[i] = -7.0f;
    const xd_collective before = sum_of(first, first, LONG), good = sum_of(send, recv, s->count);
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_OK);
    CHECK_EQ_INT(xd_queue_start(queue, &before, &ticket), XD_OK);
    while (!xd_queue_done(queue, ticket)) sched_yield();
    if (is_late(s->fault)) arm(world);
    (odd ? fail : survive)(world, queue, s, &good);
    for (int i = 0; i < LONG; i += 97) CHECK(recv[i] == -7.0f); /* untouched */
    __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
    CHECK_EQ_INT(xd_queue_wait(queue, ticket), XD_OK); /* it was run before */
    CHECK(first[LONG - 1] == (float)RANKS);
    if (!breaks(s->fault)) {
        CHECK_EQ_INT(xd_queue_start(queue, &good, NULL), XD_OK); /* the queue goes on */
        CHECK_EQ_INT(xd_queue_wait_all(queue), XD_OK);
        CHECK(recv[s->count - 1] == (float)RANKS);
    }
    xd_queue_destroy(queue);
    return XD_OK;
}

XD_TEST(every_fault_in_a_queue_or_beside_it_names_its_culprit_on_all_other_ranks) {
    for (int f = 0; f < FAULTS; f++)
        for (int i = 0; i < 8; i++) {
            scene s = { (fault)f, forms[i & 1], i & 2, i & 4 ? LONG : SHORT };
            play(fault_rank, &s);
        }
}

/* The records behind the one that breaks the world fail at once, each at its wait, and none is run. */
static xd_result chain_rank(xd_comm *world, void *argument) {
    float data[4] = { 1, 1, 1, 1 };
    const xd_collective c = sum_of(data, data, 4);
    xd_queue *queue = NULL;
    xd_ticket ticket[3] = { { 0 } };
    (void)argument;
    CHECK_EQ_INT(xd_queue_create(world, &(xd_queue_desc){ XD_QUEUE_WORKER, 3 }, &queue), XD_OK);
    arm(world);
    if (xd_comm_rank(world) == ODD) {
        wait_for(&finished, RANKS - 1);
    } else {
        for (int i = 0; i < 3; i++) CHECK_EQ_INT(xd_queue_start(queue, &c, &ticket[i]), XD_OK);
        for (int i = 2; i >= 0; i--) {
            CHECK_EQ_INT(xd_queue_wait(queue, ticket[i]), i ? XD_ERROR_PEER : XD_ERROR_TIMEOUT);
            check_named(world);
            CHECK_EQ_INT(xd_queue_wait(queue, ticket[i]), XD_ERROR_STATE); /* told once */
        }
        __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
    }
    xd_queue_destroy(queue);
    return XD_OK;
}

XD_TEST(records_behind_a_broken_one_fail_at_their_waits_which_tell_it_once) {
    play(chain_rank, NULL);
}

/* Two records are open: the first finds all ranks, the second waits in vain for ODD. */
static xd_result destroy_rank(xd_comm *world, void *argument) {
    const bool odd = xd_comm_rank(world) == ODD, whole = argument != NULL;
    float data[2][LONG];
    xd_queue *queue = NULL;
    for (int i = 0; i < LONG; i++) data[0][i] = data[1][i] = 1.0f;
    CHECK_EQ_INT(xd_queue_create(world, &(xd_queue_desc){ XD_QUEUE_WORKER, 2 }, &queue), XD_OK);
    for (int i = 0; i < 2; i++) {
        const xd_collective c = sum_of(data[i], data[i], LONG);
        if (i == 1 && !whole) {
            xd_ticket none = { 0 };
            CHECK(xd_queue_done(queue, none));
            while (xd_queue_describe(queue).traffic.calls < 1) sched_yield();
            arm(world);
            if (odd) break;
        }
        CHECK_EQ_INT(xd_queue_start(queue, &c, NULL), XD_OK);
    }
    if (odd && !whole) wait_for(&finished, RANKS - 1);
    xd_queue_destroy(queue);
    __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
    CHECK(data[0][LONG - 1] == (float)RANKS);
    CHECK(data[1][LONG - 1] == (whole ? (float)RANKS : 1.0f));
    CHECK_EQ_INT(xd_barrier(world), whole ? XD_OK : XD_ERROR_PEER);
    return XD_OK;
}

XD_TEST(destroy_runs_what_was_started_and_ends_with_the_deadline) {
    static int whole = 1;
    play(destroy_rank, &whole);
    play(destroy_rank, NULL);
}

/* ---- what is refused ---- */

static xd_result refused_rank(xd_comm *world, void *argument) {
    const bool odd = xd_comm_rank(world) == ODD;
    const xd_queue_form form = *(const xd_queue_form *)argument;
    xd_queue *queue = NULL;
    xd_queue_desc d = { form, odd ? 7 : 8 };
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_ERROR_MISMATCH);
    CHECK(says(world, "queue: rank 2 passed capacity 7, rank 0 passed 8"));
    d.capacity = odd ? -1 : 8;
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), odd ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(says(world, "queue: capacity -1 is outside [1, 4096]"));
    d.capacity = 4097;
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_ERROR_ARGUMENT);
    d.capacity = 0;
    d.form = odd ? XD_QUEUE_WORKER : XD_QUEUE_INLINE;
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_ERROR_MISMATCH);
    CHECK(says(world, "queue: rank 2 passed form 2, rank 0 passed 1"));
    d.form = (xd_queue_form)4;
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_ERROR_ARGUMENT);
    CHECK(says(world, "queue: form 4 does not exist"));
    CHECK(queue == NULL);
    d.form = form;
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_OK);
    CHECK_EQ_INT(xd_queue_describe(queue).capacity, 16);
    CHECK_EQ_INT(xd_queue_describe(queue).form, form);
    xd_queue_destroy(queue);
    return xd_barrier(world);
}

XD_TEST(queues_that_cannot_be_or_differ_are_refused_by_all_ranks) {
    for (int f = 0; f < 2; f++) {
        xd_queue_form form = forms[f];
        CHECK_EQ_INT(xd_run_threads(RANKS, NULL, refused_rank, &form, NULL), XD_OK);
    }
}

static xd_result full_rank(xd_comm *world, void *argument) {
    float data[3][2] = { { 1, 1 }, { 1, 1 }, { 1, 1 } };
    xd_queue *queue = NULL;
    xd_ticket ticket[4] = { { 0 } };
    const xd_queue_desc d = { *(const xd_queue_form *)argument, 2 };
    xd_collective c = sum_of(data[0], data[0], 2);
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_OK);
    for (int i = 0; i < 2; i++, c.send = c.recv = data[1])
        CHECK_EQ_INT(xd_queue_start(queue, &c, &ticket[i]), XD_OK);
    while (!xd_queue_done(queue, ticket[1]))
        sched_yield(); /* what has been run holds its place until its wait */
    c.send = c.recv = data[2];
    CHECK_EQ_INT(xd_queue_start(queue, &c, &ticket[2]), XD_ERROR_STATE);
    CHECK(says(world, "queue: 2 records are open, and the capacity is 2"));
    CHECK(ticket[2].number == 0);
    CHECK_EQ_INT(xd_queue_wait(queue, ticket[2]), XD_ERROR_STATE);
    CHECK(says(world, "queue: ticket 0 belongs to none of the 2 open records"));
    CHECK_EQ_INT(xd_queue_wait(queue, ticket[1]), XD_OK);
    CHECK_EQ_INT(xd_queue_start(queue, &c, &ticket[2]), XD_OK);
    CHECK_EQ_INT(xd_queue_wait(queue, ticket[1]), XD_ERROR_STATE); /* its place, but not its ticket */
    c.kind = XD_COLLECTIVE_SPLIT;
    CHECK_EQ_INT(xd_queue_wait(queue, ticket[0]), XD_OK);
    CHECK_EQ_INT(xd_queue_start(queue, &c, &ticket[3]), XD_OK);
    CHECK_EQ_INT(xd_queue_wait_all(queue), XD_ERROR_ARGUMENT);
    CHECK(says(world, "cannot be run"));
    CHECK_EQ_INT(xd_queue_wait_all(queue), XD_OK);
    for (int i = 0; i < 3; i++) CHECK(data[i][1] == (float)RANKS);
    xd_queue_destroy(queue);
    return xd_barrier(world);
}

XD_TEST(a_full_queue_and_a_ticket_without_a_record_are_errors_of_state) {
    for (int f = 0; f < 2; f++) {
        xd_queue_form form = forms[f];
        CHECK_EQ_INT(xd_run_threads(RANKS, NULL, full_rank, &form, NULL), XD_OK);
    }
}

static xd_result auto_rank(xd_comm *world, void *argument) {
    xd_queue *queue = NULL;
    (void)argument;
    CHECK_EQ_INT(xd_queue_create(world, NULL, &queue), XD_OK);
    CHECK_EQ_INT(xd_queue_describe(queue).form, XD_QUEUE_INLINE);
    xd_queue_destroy(queue);
    xd_queue_destroy(NULL);
    CHECK_EQ_INT(xd_queue_create(world, &(xd_queue_desc){ XD_QUEUE_STREAM, 0 }, &queue), XD_OK);
    CHECK_EQ_INT(xd_queue_describe(queue).form, XD_QUEUE_INLINE); /* nor a device */
    xd_queue_destroy(queue);
    return xd_barrier(world);
}

XD_TEST(threads_and_a_rank_alone_have_no_wire_to_wait_for) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    CHECK_EQ_INT(xd_run_threads(2, NULL, auto_rank, NULL, NULL), XD_OK);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    CHECK_EQ_INT(auto_rank(self, NULL), XD_OK);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- memory ---- */

/* The heap, but the call number fails_in of an armed thread is refused. */
static __thread int64_t fails_in;
static int64_t blocks;

static void *scarce(void *user, size_t bytes) {
    (void)user;
    if (fails_in > 0 && --fails_in == 0) return NULL;
    __atomic_add_fetch(&blocks, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void give_back(void *user, void *memory) {
    (void)user;
    __atomic_sub_fetch(&blocks, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* The allocation `fails` of rank `who` fails. */
typedef struct shortage {
    int who, fails;
    xd_queue_form form;
    bool over; /* there were no more allocations */
} shortage;

static xd_result short_rank(xd_comm *world, void *argument) {
    shortage *s = (shortage *)argument;
    const bool me = xd_comm_rank(world) == s->who;
    xd_queue *queue = NULL;
    const xd_queue_desc d = { s->form, 4 };
    fails_in = me ? s->fails : 0;
    const xd_result got = xd_queue_create(world, &d, &queue);
    const bool over = fails_in > 0;
    fails_in = 0;
    if (me) s->over = over;
    if (got == XD_OK)
        CHECK(queue != NULL && (!me || over));
    else
        CHECK(queue == NULL &&
              (me ? got == XD_ERROR_MEMORY : got == XD_ERROR_PEER || got == XD_ERROR_MEMORY));
    xd_queue_destroy(queue);
    float data[2] = { 1, 1 };
    return xd_all_reduce(world, data, data, 2, XD_DTYPE_F32, XD_SUM);
}

XD_TEST(a_failing_allocation_fails_create_on_all_ranks_and_leaves_the_world_whole) {
    const xd_ctx_desc d = { .allocator = { scarce, give_back, NULL } };
    for (int i = 0; i < 4; i++) {
        shortage s = { i & 1 ? ODD : 0, 1, forms[i >> 1], false };
        for (; !s.over && s.fails < 100; s.fails++)
            CHECK_EQ_INT(xd_run_threads(RANKS, &d, short_rank, &s, NULL), XD_OK);
        CHECK(s.over && s.fails > 4);
        CHECK_EQ_INT(blocks, 0);
    }
}

static xd_result steady_rank(xd_comm *world, void *argument) {
    float data[LONG] = { 0 };
    xd_queue *queue = NULL;
    xd_ticket ticket;
    const xd_queue_desc d = { *(const xd_queue_form *)argument, 2 };
    const xd_collective c = sum_of(data, data, LONG);
    CHECK_EQ_INT(xd_queue_create(world, &d, &queue), XD_OK);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    const int64_t before = __atomic_load_n(&blocks, __ATOMIC_RELAXED);
    for (int i = 0; i < 50; i++) {
        fails_in = 1; /* of this thread */
        CHECK_EQ_INT(xd_queue_start(queue, &c, &ticket), XD_OK);
        CHECK_EQ_INT(xd_queue_wait(queue, ticket), XD_OK);
        CHECK(fails_in == 1);
        fails_in = 0;
    }
    CHECK_EQ_INT(__atomic_load_n(&blocks, __ATOMIC_RELAXED), before);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    xd_queue_destroy(queue);
    return XD_OK;
}

/* The caller's table is another one while a worker sums. */
static xd_result known_rank(xd_comm *world, void *argument) {
    const xd_queue_desc d = { XD_QUEUE_WORKER, 1 };
    const int n = xd_comm_size(world);
    xd_queue *queue = NULL;
    xd_leaves known[4];
    float sum = 1.0f;
    (void)argument;
    for (int r = 0; r < n; r++) known[r] = (xd_leaves){ r, 1, n };
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = c.recv = &sum;
    c.count = 1;
    c.dtype = XD_DTYPE_F32;
    c.leaves = known[xd_comm_rank(world)];
    c.known_leaves = known;
    XD_TRY(xd_queue_create(world, &d, &queue));
    xd_result result = xd_barrier(world);
    for (int k = 0; k < 20 && result == XD_OK; k++) {
        xd_ticket ticket;
        for (int r = 0; r < n; r++) known[r] = (xd_leaves){ r, 1, n };
        result = xd_queue_start(queue, &c, &ticket);
        for (int r = 0; r < n; r++) known[r] = (xd_leaves){ -1, 7, -3 };
        if (result == XD_OK) result = xd_queue_wait(queue, ticket);
    }
    CHECK(sum == (float)(1 << 20) * (float)(1 << 20)); /* times four, twenty times */
    xd_queue_destroy(queue);
    return result;
}

XD_TEST(known_leaves_are_copied_by_a_start) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(4, &desc, known_rank, NULL, NULL), XD_OK);
}

XD_TEST(starts_and_waits_allocate_nothing) {
    const xd_ctx_desc d = { .allocator = { scarce, give_back, NULL } };
    for (int f = 0; f < 2; f++) {
        xd_queue_form form = forms[f];
        CHECK_EQ_INT(xd_run_threads(RANKS, &d, steady_rank, &form, NULL), XD_OK);
    }
}

XD_TEST(a_queue_takes_what_its_bytes_say) {
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, NULL } };
    for (int ranks = 1; ranks <= 5; ranks += 2)
        CHECK_EQ_INT(xd_run_threads(ranks, &desc, queue_bytes_rank, NULL, NULL), XD_OK);
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    CHECK_EQ_INT(queue_bytes_rank(self, NULL), XD_OK);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
