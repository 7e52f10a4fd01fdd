/* The conformance suite on threads and on a group of one, and what only these have. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "comm_suite.h"
#include "xd_test.h"

#include <pthread.h>
#include <stdlib.h>

static void run(int ranks, xd_reduction mode, xd_rank_function function) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 20 };
    xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
    CHECK_EQ_INT(xd_run_threads(ranks, &desc, function, NULL, &error), XD_OK);
    CHECK_EQ_STR(error.message, "");
}

static void run_alone(xd_reduction mode, xd_rank_function function) {
    const xd_ctx_desc desc = { .reduction = mode };
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    CHECK_EQ_INT(function(self, NULL), XD_OK);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

static void run_everywhere(xd_rank_function function) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++)
        run_alone((xd_reduction)mode, function);
    for (int ranks = 1; ranks <= 8; ranks += 1 + ranks / 3) run(ranks, XD_REDUCTION_DETERMINISTIC, function);
    run(3, XD_REDUCTION_FAST, function);
    run(5, XD_REDUCTION_FAST, function);
    run(2, XD_REDUCTION_INVARIANT, function);
    run(5, XD_REDUCTION_INVARIANT, function);
}

#define CASE(name)                    \
    XD_TEST(name) {                   \
        run_everywhere(suite_##name); \
    }
COMM_SUITE(CASE)

/* ---- threads ---- */

static xd_result levels_rank(xd_comm *world, void *argument) {
    const bool odd = xd_comm_rank(world) == 1;
    (void)argument;
    xd_ctx_set_cpu(xd_comm_ctx(world), odd ? XD_CPU_PORTABLE : XD_CPU_PLAIN);
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "portable") != NULL);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "plain") != NULL);
    xd_ctx_set_cpu(xd_comm_ctx(world), XD_CPU_PLAIN);
    return xd_barrier(world); /* the group goes on */
}

XD_TEST(ranks_on_different_cpu_levels_are_named) {
    run(3, XD_REDUCTION_DETERMINISTIC, levels_rank);
}

/* ---- leaves ---- */

XD_TEST(a_stack_of_leaves_holds_the_forest_that_a_sum_takes) {
    static const int64_t ranges[][2] = { { 0, 8 }, { 0, 13 }, { 3, 9 }, { 5, 6 }, { 8, 24 } };
    enum { ELEMENTS = 300 };
    xd_ctx *ctx = NULL;
    float leaf[ELEMENTS];
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int k = 0; k < 5; k++) {
        const int64_t first = ranges[k][0], end = ranges[k][1];
        const xd_leaves leaves = { first, end - first, 24 };
        xd_leaf_stack *stack = NULL;
        CHECK(xd_leaf_stack_create(ctx, leaves, ELEMENTS, &stack) == XD_OK);
        for (int round = 0; round < 2; round++, xd_leaf_stack_reset(stack)) {
            const float *node;
            long wrong = 0;
            for (int64_t l = first; l < end; l++) {
                for (int64_t i = 0; i < ELEMENTS; i++) leaf[i] = (float)suite_tree(XD_DTYPE_F32, l, l + 1, i);
                CHECK(xd_leaf_stack_push(stack, leaf) == XD_OK);
            }
            CHECK(xd_leaf_stack_push(stack, leaf) == XD_ERROR_STATE);
            node = xd_leaf_stack_forest(stack);
            for (int64_t lo = first; lo < end; lo += xd_leaves_node_size(lo, end), node += ELEMENTS)
                for (int64_t i = 0; i < ELEMENTS; i++)
                    wrong +=
                        (double)node[i] != suite_tree(XD_DTYPE_F32, lo, lo + xd_leaves_node_size(lo, end), i);
            CHECK_EQ_INT(wrong, 0);
        }
        xd_leaf_stack_destroy(stack);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(a_forest_is_cut_into_aligned_powers_of_two) {
    CHECK_EQ_INT(xd_leaves_nodes(0, 8), 1);
    CHECK_EQ_INT(xd_leaves_nodes(3, 6), 3); /* 3 | 4-7 | 8 */
    CHECK_EQ_INT(xd_leaves_nodes(5, 0), 0);
    CHECK_EQ_INT(xd_leaves_node_size(4, 7), 2);
    CHECK_EQ_INT(xd_leaves_node_size(0, 7), 4);
}

/* ---- threads of the caller's own ---- */

typedef struct guest {
    xd_thread_world *world;
    int rank, sum;
} guest;

static void *visit(void *argument) {
    guest *g = (guest *)argument;
    const xd_ctx_desc desc = { .init_timeout_seconds = 20, .timeout_seconds = 20 };
    xd_ctx *ctx = NULL;
    xd_comm *comm = NULL;
    const int one = g->rank + 1;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_thread_world_join(g->world, ctx, g->rank, &comm), XD_OK);
    if (comm) {
        CHECK(xd_comm_size(comm) == 4 && xd_comm_rank(comm) == g->rank);
        CHECK(xd_all_reduce(comm, &one, &g->sum, 1, XD_DTYPE_I32, XD_SUM) == XD_OK);
    }
    xd_comm_destroy(comm);
    xd_ctx_destroy(ctx);
    return NULL;
}

XD_TEST(threads_that_the_caller_started_join_a_world) {
    xd_ctx *ctx = NULL;
    xd_thread_world *world = NULL;
    pthread_t threads[4];
    guest guests[4];
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_thread_world_create(ctx, 4, &world) == XD_OK);
    for (int r = 0; r < 4; r++) {
        guests[r] = (guest){ world, r, 0 };
        CHECK(pthread_create(&threads[r], NULL, visit, &guests[r]) == 0);
    }
    for (int r = 0; r < 4; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < 4; r++) CHECK_EQ_INT(guests[r].sum, 10);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
}

/* ---- a group of one ---- */

XD_TEST(arguments_that_are_wrong_on_their_own_are_refused) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    float a[3] = { 1, 2, 3 }, b[3] = { 0 };
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    CHECK(xd_all_reduce(self, a, a + 1, 2, XD_DTYPE_F32, XD_SUM) == XD_ERROR_ARGUMENT); /* overlap */
    CHECK(xd_all_reduce(self, a, b, 2, XD_DTYPE_I8, XD_SUM) == XD_ERROR_DTYPE);
    CHECK(xd_broadcast(self, a, 3, XD_DTYPE_F32, 1) == XD_ERROR_ARGUMENT);
    CHECK(xd_broadcast(self, NULL, 3, XD_DTYPE_F32, 0) == XD_ERROR_ARGUMENT);
    CHECK(b[0] == 0 && a[1] == 2);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
