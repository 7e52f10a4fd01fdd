/* The conformance suite on threads and on a group of one, and what only these have. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "comm/internal.h"
#endif
#include "comm_suite.h"
#include "xd_test.h"

#include <pthread.h>
#include <stdlib.h>

static void run(int ranks, xd_reduction mode, xd_rank_function function) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 60 };
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
        CHECK(xd_leaf_stack_create(ctx, &(xd_leaf_stack_desc){ .leaves = leaves, .elements = ELEMENTS },
                                   &stack) == XD_OK);
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

/* Bits from a small generator, so that every addition rounds. */
static void random_leaf(uint64_t seed, float *out, int n) {
    uint64_t x = seed * 2654435761u + 88172645463325252u;
    for (int i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        out[i] = (float)((double)(int64_t)x / 9007199254740992.0);
    }
}

XD_TEST(leaves_written_in_place_and_memory_of_the_callers_give_the_bits_of_a_push) {
    enum { ELEMENTS = 7, LEAVES = 40, ROOM = ELEMENTS * 16 };
    xd_ctx *ctx = NULL;
    long wrong = 0;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int count = 1; count <= LEAVES; count++)
        for (int first = 0; first < 24; first += count % 5 + 1) {
            const xd_leaves leaves = { first, count, 64 };
            float leaf[ELEMENTS], room[ROOM + 1];
            xd_leaf_stack_desc d = { .leaves = leaves, .elements = ELEMENTS };
            xd_leaf_stack *pushed = NULL, *placed = NULL;
            const size_t bytes = xdi_leaf_stack_bytes(&d), nodes = (size_t)xd_leaves_nodes(first, count);
            CHECK(bytes <= ROOM * sizeof(float) && bytes >= nodes * sizeof leaf);
            d.memory = first % 2 ? room : NULL; /* or memory of the stack's own */
            d.memory_bytes = bytes;
            room[bytes / sizeof(float)] = 17.0f;
            CHECK(xd_leaf_stack_create(ctx, &(xd_leaf_stack_desc){ .leaves = leaves, .elements = ELEMENTS },
                                       &pushed) == XD_OK);
            CHECK(xd_leaf_stack_create(ctx, &d, &placed) == XD_OK);
            for (int l = 0; l < count; l++) {
                float *place = NULL;
                random_leaf((uint64_t)(first + l), leaf, ELEMENTS);
                CHECK(xd_leaf_stack_push(pushed, leaf) == XD_OK);
                if (l % 3 != 2) { /* copied now and then */
                    CHECK(xd_leaf_stack_next(placed, &place) == XD_OK);
                    memcpy(place, leaf, sizeof leaf);
                }
                CHECK(xd_leaf_stack_push(placed, place ? place : leaf) == XD_OK);
            }
            wrong +=
                memcmp(xd_leaf_stack_forest(pushed), xd_leaf_stack_forest(placed), nodes * sizeof leaf) != 0;
            wrong += d.memory && xd_leaf_stack_forest(placed) != room;
            wrong += room[bytes / sizeof(float)] != 17.0f;
            xd_leaf_stack_destroy(placed);
            xd_leaf_stack_destroy(pushed);
        }
    CHECK_EQ_INT(wrong, 0);
    xd_ctx_destroy(ctx);
}

typedef struct leaf_memory {
    size_t bytes;
    int calls;
} leaf_memory;

static void *count_allocate(void *user, size_t bytes) {
    leaf_memory *m = (leaf_memory *)user;
    m->bytes += bytes;
    m->calls++;
    return malloc(bytes);
}

static void count_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(a_stack_of_one_leaf_is_the_gradient_buffer_and_steps_allocate_nothing) {
    float gradient[1000], *place = NULL;
    leaf_memory memory = { 0, 0 };
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, &memory } };
    xd_leaf_stack_desc d = { .leaves = { 5, 1, 8 }, .elements = 1000, .memory = gradient };
    xd_leaf_stack *stack = NULL;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK_EQ_INT(xdi_leaf_stack_bytes(&d), sizeof gradient);
    d.memory_bytes = sizeof gradient;
    const size_t before = memory.bytes;
    CHECK(xd_leaf_stack_create(ctx, &d, &stack) == XD_OK);
    CHECK(memory.bytes - before < 400); /* the object alone */
    const int calls = memory.calls;
    for (int step = 0; step < 3; step++, xd_leaf_stack_reset(stack)) {
        CHECK(xd_leaf_stack_next(stack, &place) == XD_OK && place == gradient);
        CHECK(xd_leaf_stack_push(stack, place) == XD_OK && xd_leaf_stack_forest(stack) == gradient);
    }
    CHECK_EQ_INT(memory.calls, calls);
    xd_leaf_stack_destroy(stack);
    d.memory = NULL;
    const size_t own = memory.bytes;
    CHECK(xd_leaf_stack_create(ctx, &d, &stack) == XD_OK);
    CHECK(memory.bytes - own >= sizeof gradient && memory.bytes - own < sizeof gradient + 500);
    xd_leaf_stack_destroy(stack);
    xd_ctx_destroy(ctx);
}

XD_TEST(places_that_are_not_kept_and_memory_that_is_too_small_are_refused) {
    float leaf[4] = { 1.0f, 2.0f, 3.0f, 4.0f }, room[8], *place = NULL, *again = NULL;
    xd_leaf_stack_desc d = { .leaves = { 0, 2, 2 }, .elements = 4, .memory = room, .memory_bytes = 31 };
    xd_leaf_stack *stack = NULL;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_leaf_stack_create(ctx, &d, &stack) == XD_ERROR_ARGUMENT && stack == NULL);
    CHECK(strstr(xd_last_error(ctx)->message, "31 bytes but the stack needs 32") != NULL);
    d.memory_bytes = 32;
    d.leaves.total = 1;
    CHECK(xd_leaf_stack_create(ctx, &d, &stack) == XD_ERROR_ARGUMENT && xdi_leaf_stack_bytes(&d) == 0);
    d.leaves.total = 2;
    d.elements = INT64_MAX;
    CHECK(xd_leaf_stack_create(ctx, &d, &stack) == XD_ERROR_MEMORY && xdi_leaf_stack_bytes(&d) == 0);
    d.elements = 4;
    d.memory = (char *)room + 1;
    CHECK(xd_leaf_stack_create(ctx, &d, &stack) == XD_ERROR_ARGUMENT);
    d.memory = room;
    CHECK(xd_leaf_stack_create(ctx, &d, &stack) == XD_OK);
    CHECK(xd_leaf_stack_push(stack, room) == XD_ERROR_ARGUMENT); /* its memory, but no place was given */
    CHECK(xd_leaf_stack_next(stack, &place) == XD_OK && xd_leaf_stack_next(stack, &again) == XD_OK);
    CHECK(place == again && place == room);
    CHECK(xd_leaf_stack_push(stack, leaf) == XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "leaf 0 has a place") != NULL);
    memcpy(place, leaf, sizeof leaf);
    CHECK(xd_leaf_stack_push(stack, place) == XD_OK);
    CHECK(xd_leaf_stack_push(stack, place) == XD_ERROR_ARGUMENT);
    CHECK(xd_leaf_stack_next(stack, &place) == XD_OK && place == room + 4);
    xd_leaf_stack_reset(stack); /* forgets it */
    CHECK(xd_leaf_stack_push(stack, leaf) == XD_OK && xd_leaf_stack_push(stack, leaf) == XD_OK);
    CHECK(xd_leaf_stack_next(stack, &place) == XD_ERROR_STATE);
    CHECK(xd_leaf_stack_push(stack, leaf) == XD_ERROR_STATE);
    CHECK(room[0] == 2.0f && room[3] == 8.0f);
    xd_leaf_stack_destroy(stack);
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
    const xd_ctx_desc desc = { .init_timeout_seconds = 60, .timeout_seconds = 60 };
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
    CHECK(xd_thread_world_create(ctx, &(xd_thread_world_desc){ 4 }, &world) == XD_OK);
    for (int r = 0; r < 4; r++) {
        guests[r] = (guest){ world, r, 0 };
        CHECK(pthread_create(&threads[r], NULL, visit, &guests[r]) == 0);
    }
    for (int r = 0; r < 4; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < 4; r++) CHECK_EQ_INT(guests[r].sum, 10);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
}

/* ---- ranks that fail after a call ---- */

/* The result of the call, then an error of the rank itself, which ends the world for all. */
static xd_result sum_and_fail(xd_comm *world, void *results) {
    int64_t x = 1;
    const xd_result result = xd_all_reduce(world, &x, &x, 1, XD_DTYPE_I64, XD_SUM);
    ((xd_result *)results)[xd_comm_rank(world)] = result == XD_OK && x == 3 ? XD_OK : XD_ERROR_DATA;
    return XD_ERROR_DATA;
}

XD_TEST(a_call_that_all_ranks_entered_ends_well_though_one_of_them_fails_right_after_it) {
    for (int i = 0; i < 500; i++) {
        xd_result results[3] = { XD_ERROR_STATE, XD_ERROR_STATE, XD_ERROR_STATE };
        CHECK_EQ_INT(xd_run_threads(3, NULL, sum_and_fail, results, NULL), XD_ERROR_DATA);
        for (int r = 0; r < 3; r++) CHECK_EQ_INT(results[r], XD_OK);
    }
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
