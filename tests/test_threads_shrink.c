/* Worlds of threads that have lost ranks: those that are left go on in one of their own, as processes do (test_node_shrink.c). A thread is
 * lost when its function returns, or it calls xd_comm_abort. XD_TEST_KILLS worlds (40), XD_TEST_SEED is the first seed. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "drawn_call.h"
#include "kills.h"
#include "xd_test.h"

enum { MOST = 6, CALLS = 40, WORLDS = 40 };

/* ---- ranks that leave at any call ---- */

typedef struct trial {
    int leaves[MOST]; /* the call at which a rank leaves, counted over all worlds; CALLS: none */
    bool aborts[MOST];
    uint32_t ended; /* ranks that made all calls; atomic */
    uint32_t lost;  /* atomic */
} trial;

/* The sum of 1 << number, of the ranks in this world, by their numbers in the first; long ones are read in place. */
static xd_result call(xd_comm *world, int first, int turn, int64_t *mask) {
    static const int counts[] = { 1, 700, 3 };
    int64_t values[700];
    const int count = counts[turn % 3];
    for (int i = 0; i < count; i++) values[i] = INT64_C(1) << first;
    XD_TRY(xd_all_reduce(world, values, values, count, XD_DTYPE_I64, XD_SUM));
    for (int i = 1; i < count; i++) CHECK_EQ_INT(values[i], values[0]);
    *mask = values[0];
    return XD_OK;
}

static int members(int64_t mask) {
    int count = 0;
    for (; mask; mask &= mask - 1) count++;
    return count;
}

/* Ranks are in their old order. */
static void check_world(xd_comm *world, int first, int64_t mask) {
    CHECK_EQ_INT(xd_comm_size(world), members(mask));
    CHECK_EQ_INT(xd_comm_rank(world), members(mask & ((INT64_C(1) << first) - 1)));
    CHECK_EQ_INT(xd_comm_world_rank(world, xd_comm_rank(world)), xd_comm_rank(world));
}

static xd_result go_through(xd_comm *world, void *argument) {
    trial *t = (trial *)argument;
    xd_comm *worlds[MOST] = { world };
    const int first = xd_comm_rank(world);
    int count = 1;
    xd_result result = XD_OK;
    for (int turn = 0; turn < CALLS && turn != t->leaves[first]; turn++) {
        int64_t mask = 0;
        result = call(worlds[count - 1], first, turn, &mask);
        if (result == XD_OK) check_world(worlds[count - 1], first, mask);
        if (result == XD_OK) continue;
        CHECK_EQ_INT(result, XD_ERROR_PEER);
        CHECK_EQ_INT(xd_comm_shrink(worlds[count - 1], 0.0, &worlds[count]), XD_OK);
        CHECK_EQ_INT(xd_comm_shrink(worlds[count - 1], 0.0, &worlds[count + 1]), XD_ERROR_STATE);
        turn--;
        count++;
    }
    const bool lost = t->leaves[first] < CALLS;
    if (lost && t->aborts[first]) xd_comm_abort(worlds[count - 1]);
    __atomic_add_fetch(lost ? &t->lost : &t->ended, 1, __ATOMIC_RELAXED);
    while (count > 1) xd_comm_destroy(worlds[--count]);
    return XD_OK;
}

XD_TEST(threads_that_are_left_go_on_whenever_others_leave) {
    const xd_ctx_desc desc = { .timeout_seconds = 30 };
    const int worlds = given("XD_TEST_KILLS", WORLDS), begin = given("XD_TEST_SEED", 1);
    uint32_t lost = 0;
    for (int i = 0; i < worlds; i++) {
        uint64_t state = (uint64_t)(begin + i);
        const int ranks = 2 + drawn_number(&state, MOST - 1), stays = drawn_number(&state, ranks);
        trial t = { { 0 }, { false }, 0, 0 };
        for (int r = 0; r < ranks; r++) {
            t.leaves[r] = r == stays || drawn_number(&state, 3) == 0 ? CALLS : drawn_number(&state, CALLS);
            t.aborts[r] = drawn_number(&state, 2) != 0;
        }
        const long failures = xd_test_failures;
        CHECK_EQ_INT(xd_run_threads(ranks, &desc, go_through, &t, NULL), XD_OK);
        CHECK_EQ_INT(t.ended + t.lost, ranks);
        lost += t.lost;
        if (xd_test_failures != failures) printf("seed %d\n", begin + i);
    }
    printf("%d worlds, %u ranks lost\n", worlds, lost);
    CHECK(lost > 0);
}

/* ---- deadlines ---- */

/* Rank 1 comes when the others have gone on: rank 0 would wait for long, but rank 2, which comes second, does not. */
static xd_result be_late(xd_comm *world, void *argument) {
    xd_comm *next = NULL;
    uint32_t *asks = (uint32_t *)argument, *gone_on = asks + 1;
    xd_ctx *ctx = xd_comm_ctx(world);
    if (xd_comm_rank(world) == 3) xd_comm_abort(world);
    if (xd_comm_rank(world) == 3) return XD_OK;
    if (xd_comm_rank(world) == 1) {
        while (__atomic_load_n(gone_on, __ATOMIC_ACQUIRE) < 2) nap(100);
        CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
        CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_PEER);
        CHECK_EQ_STR(xd_last_error(ctx)->message,
                     "rank 1 came after the deadline: 2 of 4 ranks go on without it (in xd_comm_shrink)");
        CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_STATE);
        CHECK_EQ_STR(xd_last_error(ctx)->message, "rank 1 has gone on from this world of 4 ranks already");
        CHECK(next == NULL);
        return XD_OK;
    }
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    if (xd_comm_rank(world) == 0) __atomic_store_n(asks, 1u, __ATOMIC_RELEASE);
    while (!__atomic_load_n(asks, __ATOMIC_ACQUIRE)) nap(100);
    if (xd_comm_rank(world) == 2) nap(50000);
    CHECK_EQ_INT(xd_comm_shrink(world, xd_comm_rank(world) == 0 ? 100.0 : 0.05, &next), XD_OK);
    CHECK_EQ_INT(next ? xd_comm_size(next) : 0, 2);
    if (next) CHECK_EQ_INT(xd_barrier(next), XD_OK);
    __atomic_add_fetch(gone_on, 1, __ATOMIC_RELEASE);
    xd_comm_destroy(next);
    return XD_OK;
}

/* Who was late for a call, but not for this one, is in. */
static xd_result come_back(xd_comm *world, void *argument) {
    xd_comm *next = NULL;
    (void)argument;
    CHECK_EQ_INT(xd_barrier(world), XD_OK); /* which may wait for longer */
    if (xd_comm_rank(world) == 1) nap(200000);
    const xd_result broken = xd_barrier(world);
    CHECK(broken == XD_ERROR_TIMEOUT || broken == XD_ERROR_PEER);
    CHECK_EQ_INT(xd_comm_shrink(world, 20.0, &next), XD_OK);
    CHECK_EQ_INT(next ? xd_comm_size(next) : 0, 3);
    xd_comm_destroy(next);
    return XD_OK;
}

XD_TEST(a_thread_that_comes_after_the_deadline_is_left_out) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 }, short_desc = { .timeout_seconds = 0.05 };
    uint32_t counts[2] = { 0, 0 };
    CHECK_EQ_INT(xd_run_threads(4, &desc, be_late, counts, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(3, &short_desc, come_back, NULL, NULL), XD_OK);
}

/* ---- what is refused ---- */

static xd_result refuse(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm *half = NULL, *next = NULL;
    (void)argument;
    CHECK_EQ_INT(xd_comm_split(world, 0, 0, &half), XD_OK);
    CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_STATE);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "nothing has broken this world of 2 ranks");
    CHECK_EQ_INT(xd_comm_shrink(half, 0.0, &next), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_comm_shrink(world, -1.0, &next), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (xd_comm_rank(world) == 0) {
        xd_comm_abort(world);
        CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_STATE);
        CHECK_EQ_STR(xd_last_error(ctx)->message, "rank 0 has left this world of 2 ranks already");
    } else {
        CHECK_EQ_INT(xd_barrier(half), XD_ERROR_PEER);
        CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_OK);
        CHECK_EQ_INT(xd_comm_size(next), 1);
    }
    xd_comm_destroy(next);
    xd_comm_destroy(half);
    return XD_OK;
}

XD_TEST(threads_that_have_lost_nobody_or_have_left_cannot_go_on) {
    CHECK_EQ_INT(xd_run_threads(2, NULL, refuse, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
