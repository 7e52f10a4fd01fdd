/* Messages that make progress together, and what happens when one of their ranks does not come. Ranks are threads. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "exchange_suite.h"

#include <sched.h>

XD_TEST(ranks_that_all_send_first_reach_each_other) {
    for (int ranks = 2; ranks <= EXCHANGE_RANKS; ranks++)
        CHECK_EQ_INT(xd_run_threads(ranks, NULL, exchange_rounds, NULL, NULL), XD_OK);
}

XD_TEST(what_differs_or_is_refused_is_told_to_both_ranks_and_stops_no_other_message) {
    CHECK_EQ_INT(xd_run_threads(3, NULL, exchange_mismatch, NULL, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(3, NULL, exchange_refusals, NULL, NULL), XD_OK);
}

XD_TEST(a_rank_alone_has_nobody_to_send_to) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    float data[4] = { 0 };
    const xd_collective c = message_of(XD_COLLECTIVE_SEND, data, 4, 0);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    CHECK_EQ_INT(xd_exchange(self, &c, 1), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 0 is this rank itself") != NULL);
    CHECK_EQ_INT(xd_exchange(self, NULL, 0), XD_OK);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* Rank 0 lists its receives the wrong way round for the others, who send and receive one by one. */
static xd_result mixed_rank(xd_comm *world, void *argument) {
    float a[4] = { 1, 1, 1, 1 }, b[4] = { 2, 2, 2, 2 };
    const xd_collective c[2] = { message_of(XD_COLLECTIVE_RECV, a, 4, 1),
                                 message_of(XD_COLLECTIVE_RECV, b, 4, 2) };
    (void)argument;
    switch (xd_comm_rank(world)) {
    case 0: CHECK_EQ_INT(xd_exchange(world, c, 2), XD_OK); break;
    case 1:
        CHECK_EQ_INT(xd_recv(world, b, 4, XD_DTYPE_F32, 2), XD_OK);
        CHECK_EQ_INT(xd_send(world, b, 4, XD_DTYPE_F32, 0), XD_OK);
        break;
    default:
        CHECK_EQ_INT(xd_send(world, b, 4, XD_DTYPE_F32, 0), XD_OK);
        CHECK_EQ_INT(xd_send(world, a, 4, XD_DTYPE_F32, 1), XD_OK);
    }
    if (xd_comm_rank(world) == 0) CHECK(a[3] == 1.0f && b[3] == 2.0f);
    return xd_barrier(world);
}

XD_TEST(an_exchange_meets_calls_of_one_message_in_any_order) {
    CHECK_EQ_INT(xd_run_threads(3, NULL, mixed_rank, NULL, NULL), XD_OK);
}

/* ---- a rank that does not come ---- */

enum { RANKS = 4, ODD = 2 };

/* A clock that stands still until the rank that is no neighbour of ODD has met both others, which then wait for ODD alone. */
static uint32_t met, finished, ticks;

static double patient(void *user) {
    (void)user;
    if (!__atomic_load_n(&met, __ATOMIC_ACQUIRE)) return 0.0;
    return 10.0 + 1e-3 * (double)__atomic_add_fetch(&ticks, 1, __ATOMIC_RELAXED);
}

static xd_result missing_rank(xd_comm *world, void *argument) {
    const bool leaves = argument != NULL;
    const int me = xd_comm_rank(world), right = (me + 1) % RANKS, left = (me + RANKS - 1) % RANKS;
    float out[4] = { 1, 1, 1, 1 }, in[4] = { -7, -7, -7, -7 };
    const xd_collective c[2] = { message_of(XD_COLLECTIVE_SEND, out, 4, right),
                                 message_of(XD_COLLECTIVE_RECV, in, 4, left) };
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (me == ODD) {
        while (__atomic_load_n(leaves ? &met : &finished, __ATOMIC_ACQUIRE) < (leaves ? 1 : 2)) sched_yield();
        return XD_OK;
    }
    const bool neighbour = right == ODD || left == ODD;
    const xd_result got = xd_exchange(world, c, 2);
    if (!neighbour) {
        CHECK_EQ_INT(got, XD_OK);
        __atomic_store_n(&met, 1u, __ATOMIC_RELEASE);
        while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < 2) sched_yield();
    } else {
        CHECK_EQ_INT(got, leaves ? XD_ERROR_PEER : XD_ERROR_TIMEOUT);
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "rank 2") != NULL);
        __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
    }
    if (left == ODD) CHECK(in[0] == -7.0f);
    CHECK_EQ_INT(xd_exchange(world, c, 2), XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
    return XD_OK;
}

XD_TEST(a_rank_that_never_comes_or_leaves_is_named_by_its_neighbours) {
    static int leaves;
    for (int i = 0; i < 2; i++) {
        const xd_ctx_desc d = { .clock = { i ? NULL : patient, NULL },
                                .timeout_seconds = i ? 1e9 : 2,
                                .init_timeout_seconds = 1e9 };
        met = finished = ticks = 0;
        CHECK_EQ_INT(xd_run_threads(RANKS, &d, missing_rank, i ? &leaves : NULL, NULL), XD_OK);
    }
}

XD_TEST_MAIN()
