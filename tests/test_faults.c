/* What every rank gets when one of them does the wrong thing: it stays away, leaves, comes late, or has no memory; what passes
 * something else than the others is a matter of comm_suite.h. Ranks are threads, and time is a counter of ours: no test sleeps. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "comm_suite.h"
#include "xd_test.h"

#include <sched.h>
#include <stdlib.h>

enum { RANKS = 4, ODD = 2, COUNT = 3000 /* the long path */, SHORT = 3 };

/* A clock that goes a millisecond ahead each time somebody looks. */
static uint64_t ticks;

static double tick(void *user) {
    (void)user;
    return 1e-3 * (double)__atomic_add_fetch(&ticks, 1, __ATOMIC_RELAXED);
}

/* A clock that stands still until RANKS - 1 ranks wait: however long the machine keeps a rank from running, no rank is
 * late but the one that means to be. The first look of an armed thread is its call's deadline, the second is a wait. */
static uint32_t waiting;
static __thread int looks = -1;

static double patient_tick(void *user) {
    if (looks >= 0 && ++looks == 2) __atomic_add_fetch(&waiting, 1, __ATOMIC_ACQ_REL);
    return __atomic_load_n(&waiting, __ATOMIC_ACQUIRE) < RANKS - 1 ? 0.0 : 10.0 + tick(user);
}

/* A clock by which only an armed rank is ever late, once rank 0 waits. */
static uint32_t first_looks;

static double armed_tick(void *user) {
    (void)user;
    if (looks == -2) __atomic_add_fetch(&first_looks, 1, __ATOMIC_ACQ_REL);
    if (looks >= 0) looks++;
    return looks > 1 && __atomic_load_n(&first_looks, __ATOMIC_ACQUIRE) > 1 ? 10.0 : 0.0;
}

typedef enum fault {
    MISSING,
    LEAVES,
    WRONG_COUNT,
    WRONG_DTYPE,
    WRONG_OPERATION,
    BAD_ARGUMENT,
    LATE,
    FAULTS
} fault;

typedef struct scene {
    int kind; /* xd_collective_kind */
    fault fault;
    int64_t count;
    uint32_t finished; /* ranks whose call has returned; atomic */
} scene;

static void wait_for(const uint32_t *counter, uint32_t value) {
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) sched_yield();
}

static void check_culprit(xd_comm *world, int named, int culprit) {
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    char name[16];
    snprintf(name, sizeof name, "rank %d", named);
    CHECK_EQ_INT(error->culprit, culprit);
    CHECK(strstr(error->message, name) != NULL);
}

static void survivor(xd_comm *world, const scene *s, xd_result got) {
    CHECK_EQ_INT(got, s->fault == LEAVES ? XD_ERROR_PEER : XD_ERROR_TIMEOUT);
    check_culprit(world, ODD, ODD);
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER); /* a broken group stays broken */
    check_culprit(world, ODD, ODD);
}

static xd_result fault_rank(xd_comm *world, void *argument) {
    scene *s = (scene *)argument;
    const bool odd = xd_comm_rank(world) == ODD;
    float *send = (float *)malloc(RANKS * COUNT * sizeof *send),
          *recv = (float *)malloc(RANKS * COUNT * sizeof *recv);
    xd_result got = XD_OK;
    for (int i = 0; i < RANKS * COUNT; i++) send[i] = 1.0f, recv[i] = -7.0f;
    CHECK(xd_barrier(world) == XD_OK); /* the first call has the longer deadline */
    if (odd && s->fault != LEAVES) wait_for(&s->finished, RANKS - 1);
    if (!odd) looks = 0;
    if (!odd || s->fault == LATE) got = suite_call(world, s->kind, SUITE_FAULTS, odd, s->count, send, recv);
    looks = -1;
    for (int i = 0; i < RANKS * COUNT; i += 97) CHECK(recv[i] == -7.0f); /* untouched */
    __atomic_add_fetch(&s->finished, 1, __ATOMIC_RELEASE);
    if (!odd)
        survivor(world, s, got);
    else if (s->fault == LATE)
        CHECK_EQ_INT(got, XD_ERROR_PEER);
    free(recv);
    free(send);
    return XD_OK;
}

static void play(fault f) {
    const bool patient = f == MISSING || f == LATE;
    for (int kind = XD_COLLECTIVE_BARRIER; kind <= XD_COLLECTIVE_SPLIT; kind++)
        for (int size = 0; size < 2; size++) {
            scene s = { kind, f, size ? COUNT : SHORT, 0 };
            const bool pair = kind == XD_COLLECTIVE_SEND || kind == XD_COLLECTIVE_RECV; /* below */
            if (pair) continue;
            waiting = 0;
            const xd_ctx_desc d = { .clock = { patient ? patient_tick : tick, NULL },
                                    .timeout_seconds = patient ? 2 : 1e9,
                                    .init_timeout_seconds = 1e9 };
            CHECK_EQ_INT(xd_run_threads(RANKS, &d, fault_rank, &s, NULL), XD_OK);
        }
}

XD_TEST(a_missing_rank_is_named_by_a_timeout_on_every_other) {
    play(MISSING);
}
XD_TEST(a_rank_that_leaves_is_named_by_every_other) {
    play(LEAVES);
}
XD_TEST(a_rank_after_the_deadline_gets_an_error_too) {
    play(LATE);
}

static xd_result message_rank(xd_comm *world, void *argument) {
    (void)argument;
    const int rank = xd_comm_rank(world);
    float a[16] = { 0 }, b[16] = { 0 };
    CHECK(xd_all_reduce(world, a, b, rank >= 2 ? 12 : 8, XD_DTYPE_F32, XD_SUM) == XD_ERROR_MISMATCH);
    CHECK_EQ_STR(xd_last_error(xd_comm_ctx(world))->message,
                 "all_reduce: ranks 2,3 passed count 12, rank 0 passed count 8 (in xd_all_reduce)");
    const int64_t counts[RANKS] = { 1, 1, rank == 3 ? 2 : 1, 1 };
    CHECK(xd_all_gather(world, a, b, counts, XD_DTYPE_F32) == XD_ERROR_MISMATCH);
    CHECK_EQ_STR(xd_last_error(xd_comm_ctx(world))->message,
                 "all_gather: rank 3 passed counts[2] = 2, rank 0 passed 1 (in xd_all_gather)");
    CHECK(xd_agree(world, rank == 1 ? xd_fail(xd_comm_ctx(world), XD_ERROR_IO, __FILE__, __LINE__, __func__,
                                              "disk on fire")
                                    : XD_OK) == (rank == 1 ? XD_ERROR_IO : XD_ERROR_PEER));
    if (rank != 1)
        CHECK_EQ_STR(xd_last_error(xd_comm_ctx(world))->message,
                     "agree: rank 1 failed with ERROR_IO: disk on fire (in xd_agree)");
    return xd_barrier(world);
}

XD_TEST(messages_name_the_ranks_that_differ_and_both_numbers) {
    CHECK_EQ_INT(xd_run_threads(RANKS, NULL, message_rank, NULL, NULL), XD_OK);
}

static xd_result late_rank(xd_comm *world, void *argument) {
    (void)argument;
    if (xd_comm_rank(world) == ODD)
        for (int i = 0; i < 50; i++) tick(NULL);
    return xd_barrier(world);
}

XD_TEST(a_late_rank_within_the_deadline_is_a_success) {
    const xd_ctx_desc desc = { .clock = { tick, NULL }, .timeout_seconds = 1e9, .init_timeout_seconds = 1e9 };
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, late_rank, NULL, NULL), XD_OK);
}

static xd_result culprit_rank(xd_comm *world, void *argument) {
    xd_comm *half = NULL;
    XD_TRY(xd_comm_split(world, xd_comm_rank(world) / 2, 0, &half));
    xd_result result = XD_OK;
    if (xd_comm_rank(world) == ODD)
        result =
            xd_fail(xd_comm_ctx(world), XD_ERROR_DATA, __FILE__, __LINE__, __func__, "the seventh label");
    else
        while (result == XD_OK) result = xd_barrier(argument ? half : world); /* until the group breaks */
    if (xd_comm_rank(world) != ODD) {
        CHECK_EQ_INT(result, XD_ERROR_PEER);
        check_culprit(world, ODD, ODD);
    }
    xd_comm_destroy(half);
    return result;
}

XD_TEST(the_runner_reports_the_culprit_and_sub_groups_break_with_the_world) {
    static int use_half = 1;
    for (int half = 0; half < 2; half++) {
        xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
        CHECK_EQ_INT(xd_run_threads(RANKS, NULL, culprit_rank, half ? &use_half : NULL, &error),
                     XD_ERROR_DATA);
        CHECK_EQ_INT(error.rank, ODD);
        CHECK_EQ_STR(error.message, "the seventh label");
    }
}

/* Rank ODD stays away from its half; rank 0 waits for rank 1 in the other one, and does not blame it. */
static xd_result halves_rank(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    xd_comm *half = NULL;
    uint32_t *finished = (uint32_t *)argument;
    XD_TRY(xd_comm_split(world, rank / 2, 0, &half));
    XD_TRY(xd_barrier(world));
    if (rank == 1 || rank == ODD)
        wait_for(finished, 2);
    else {
        looks = rank == 0 ? -2 : 0;
        CHECK_EQ_INT(xd_barrier(half), rank == 0 ? XD_ERROR_PEER : XD_ERROR_TIMEOUT);
        looks = -1;
        check_culprit(world, ODD, ODD);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "rank 1") == NULL);
        __atomic_add_fetch(finished, 1, __ATOMIC_RELEASE);
    }
    xd_comm_destroy(half);
    return XD_OK;
}

XD_TEST(a_rank_that_waits_in_another_group_is_told_who_is_late) {
    const xd_ctx_desc desc = { .clock = { armed_tick, NULL }, .timeout_seconds = 2 };
    uint32_t finished = 0;
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, halves_rank, &finished, NULL), XD_OK);
}

/* ---- two ranks ---- */

/* Ranks 1 and ODD; kind is what ODD does, and what rank 1 does too when that is the fault. */
static xd_result exchange(xd_comm *world, int kind, fault f) {
    const int rank = xd_comm_rank(world), peer = 1 + ODD - rank;
    const bool odd = rank == ODD;
    const int64_t count = !odd ? 8 : f == WRONG_COUNT ? 5 : f == BAD_ARGUMENT ? -1 : 8;
    const xd_dtype dtype = odd && f == WRONG_DTYPE ? XD_DTYPE_I32 : XD_DTYPE_F32;
    const bool sends = kind == (odd || f == WRONG_OPERATION ? XD_COLLECTIVE_SEND : XD_COLLECTIVE_RECV);
    float data[8];
    for (int i = 0; i < 8; i++) data[i] = sends ? 1.0f : -7.0f;
    const xd_result got =
        sends ? xd_send(world, data, count, dtype, peer) : xd_recv(world, data, count, dtype, peer);
    for (int i = 0; i < 8; i++) CHECK(data[i] == (sends || got == XD_OK ? 1.0f : -7.0f));
    return got;
}

/* [fault][0: rank 1, 1: ODD] */
static const xd_result pair_want[FAULTS][2] = { { XD_ERROR_TIMEOUT, XD_OK },
                                                { XD_ERROR_PEER, XD_OK },
                                                { XD_ERROR_MISMATCH, XD_ERROR_MISMATCH },
                                                { XD_ERROR_MISMATCH, XD_ERROR_MISMATCH },
                                                { XD_ERROR_TIMEOUT, XD_ERROR_TIMEOUT },
                                                { XD_ERROR_PEER, XD_ERROR_ARGUMENT },
                                                { XD_ERROR_TIMEOUT, XD_ERROR_PEER } };

static xd_result pair_fault_rank(xd_comm *world, void *argument) {
    scene *s = (scene *)argument;
    const int rank = xd_comm_rank(world);
    const bool odd = rank == ODD;
    const bool whole = s->fault == WRONG_COUNT || s->fault == WRONG_DTYPE || s->fault == BAD_ARGUMENT;
    CHECK(xd_barrier(world) == XD_OK);
    if (odd && (s->fault == MISSING || s->fault == LATE)) wait_for(&s->finished, 1);
    if ((rank == 1 || odd) && !(odd && s->fault <= LEAVES)) {
        const xd_result got = exchange(world, s->kind, s->fault), want = pair_want[s->fault][odd];
        /* When neither comes, one names the other, which learns that it was too late itself. */
        CHECK(got == want || (s->fault == WRONG_OPERATION && got == XD_ERROR_PEER));
        if (want == XD_ERROR_PEER || want == XD_ERROR_TIMEOUT)
            CHECK(xd_last_error(xd_comm_ctx(world))->culprit > 0);
        if (!odd && want != XD_ERROR_MISMATCH && s->fault != WRONG_OPERATION) check_culprit(world, ODD, ODD);
        __atomic_add_fetch(&s->finished, 1, __ATOMIC_RELEASE);
    }
    if (!whole) return XD_OK;
    if (rank == 1 || odd) CHECK_EQ_INT(exchange(world, s->kind, FAULTS /* nobody's */), XD_OK);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    return XD_OK;
}

XD_TEST(each_fault_of_one_end_of_a_message_is_an_error_on_both) {
    for (int kind = XD_COLLECTIVE_SEND; kind <= XD_COLLECTIVE_RECV; kind++)
        for (int f = 0; f < FAULTS; f++) {
            const bool waits = f == MISSING || f == LATE || f == WRONG_OPERATION;
            scene s = { kind, (fault)f, 0, 0 };
            const xd_ctx_desc d = { .clock = { tick, NULL },
                                    .timeout_seconds = waits ? 0.05 : 1e9,
                                    .init_timeout_seconds = 1e9 };
            CHECK_EQ_INT(xd_run_threads(RANKS, &d, pair_fault_rank, &s, NULL), XD_OK);
        }
}

static xd_result pair_rank(xd_comm *world, void *argument) {
    float x[4] = { 0 };
    const int rank = xd_comm_rank(world);
    const bool sends = argument != NULL;
    if (rank == ODD) return XD_OK; /* leaves while rank 1 waits for it */
    if (rank == 1) {
        CHECK_EQ_INT(sends ? xd_send(world, x, 4, XD_DTYPE_F32, ODD)
                           : xd_recv(world, x, 4, XD_DTYPE_F32, ODD),
                     XD_ERROR_PEER);
        check_culprit(world, ODD, ODD);
    }
    return XD_OK;
}

XD_TEST(send_and_receive_notice_that_the_other_rank_left) {
    static int yes;
    CHECK_EQ_INT(xd_run_threads(RANKS, NULL, pair_rank, NULL, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(RANKS, NULL, pair_rank, &yes, NULL), XD_OK);
}

/* ---- memory ---- */

typedef struct ration {
    int64_t left, alive; /* allocations until one fails; blocks not yet released; atomic */
} ration;

static void *ration_allocate(void *user, size_t bytes) {
    ration *r = (ration *)user;
    if (__atomic_fetch_sub(&r->left, 1, __ATOMIC_RELAXED) == 0) return NULL;
    __atomic_add_fetch(&r->alive, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void ration_release(void *user, void *memory) {
    ration *r = (ration *)user;
    __atomic_sub_fetch(&r->alive, 1, __ATOMIC_RELAXED);
    free(memory);
}

static xd_result memory_rank(xd_comm *world, void *argument) {
    (void)argument;
    xd_comm *half = NULL;
    XD_TRY(xd_comm_split(world, xd_comm_rank(world) / 2, 0, &half));
    const xd_result result = xd_barrier(half);
    xd_comm_destroy(half);
    return result;
}

XD_TEST(memory_may_run_out_at_any_point_without_a_hang_or_a_leak) {
    bool all_granted = false;
    int64_t point = 0;
    for (; !all_granted && point < 1000; point++) {
        ration r = { point, 0 };
        const xd_ctx_desc desc = { .allocator = { ration_allocate, ration_release, &r },
                                   .timeout_seconds = 60 };
        const xd_result result = xd_run_threads(RANKS, &desc, memory_rank, NULL, NULL);
        all_granted = r.left >= 0;
        CHECK_EQ_INT(result, all_granted ? XD_OK : XD_ERROR_MEMORY);
        CHECK_EQ_INT(r.alive, 0);
    }
    CHECK(all_granted && point > 20);
}

XD_TEST_MAIN()
