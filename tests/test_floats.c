/* Floating-point states of a host program: the ranks of a world compare theirs, a context warns of one that is not the default,
 * and all threads of a pool compute in that of the thread that calls. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/internal.h"
#endif
#include "float_state.h"
#include "node_world.h"
#include "parallel.h"
#include "xd_test.h"

#include <pthread.h>
#include <stdlib.h>

enum { RANKS = 3, ODD = 1 };

/* A thread with a state of its own that joins a world. */
typedef struct guest {
    xd_thread_world *world;
    float_kind kind;
    int rank;
    xd_result result, again;
    int culprit;
    char message[256];
} guest;

static void *guest_run(void *argument) {
    guest *g = (guest *)argument;
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    xd_ctx *ctx = NULL;
    xd_comm *comm = NULL;
    CHECK(float_state_set(g->kind));
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    g->result = xd_thread_world_join(g->world, ctx, g->rank, &comm);
    g->culprit = xd_last_error(ctx)->culprit;
    snprintf(g->message, sizeof g->message, "%.255s", xd_last_error(ctx)->message);
    g->again = g->result == XD_OK ? xd_barrier(comm) : XD_OK;
    xd_comm_destroy(comm);
    xd_ctx_destroy(ctx);
    return NULL;
}

static void guests_meet(guest guests[RANKS], float_kind odd) {
    xd_ctx *ctx = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    xd_thread_world *world = NULL;
    pthread_t threads[RANKS];
    CHECK_EQ_INT(xd_thread_world_create(ctx, &(xd_thread_world_desc){ RANKS }, &world), XD_OK);
    for (int r = 0; r < RANKS; r++) {
        memset(&guests[r], 0, sizeof guests[r]);
        guests[r].world = world;
        guests[r].rank = r;
        guests[r].kind = r == ODD ? odd : FLOAT_DEFAULT;
        CHECK_EQ_INT(pthread_create(&threads[r], NULL, guest_run, &guests[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) CHECK_EQ_INT(pthread_join(threads[r], NULL), 0);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
}

XD_TEST(threads_that_join_in_another_state_are_named_and_a_world_in_one_state_follows) {
    if (!float_state_set(FLOAT_DEFAULT)) SKIP("no floating-point states here");
    for (int kind = FLOAT_UP; kind < FLOAT_KINDS; kind++) {
        guest guests[RANKS];
        char words[200];
        snprintf(words, sizeof words,
                 "rank 1 computes with %s, rank 0 with rounding to nearest (in xd_thread_world_join)",
                 float_words[kind]);
        guests_meet(guests, (float_kind)kind);
        for (int r = 0; r < RANKS; r++) {
            CHECK_EQ_INT(guests[r].result, XD_ERROR_MISMATCH);
            CHECK_EQ_INT(guests[r].culprit, ODD);
            CHECK_EQ_STR(guests[r].message, words);
        }
        guests_meet(guests, FLOAT_DEFAULT);
        for (int r = 0; r < RANKS; r++) CHECK(guests[r].result == XD_OK && guests[r].again == XD_OK);
    }
}

/* ---- processes ---- */

static xd_result join_odd(xd_comm *world, void *argument) {
    (void)argument;
    return xd_barrier(world);
}

static xd_result processes_meet(float_kind odd, char message[RANKS][256]) {
    node_end *ends = (node_end *)node_memory(RANKS * sizeof *ends);
    const node_start start = { .ranks = RANKS, .function = join_odd };
    pid_t children[RANKS];
    char name[32];
    xd_result result = XD_OK;
    node_name(name);
    fflush(stdout);
    for (int r = 0; r < RANKS; r++) {
        children[r] = fork();
        if (children[r] != 0) continue;
        float_state_set(r == ODD ? odd : FLOAT_DEFAULT);
        node_main(&start, name, r, &ends[r]);
        _exit(0);
    }
    for (int r = 0; r < RANKS; r++) {
        CHECK(waitpid(children[r], &ends[r].status, 0) == children[r]);
        CHECK(ends[r].status == 0 && ends[r].failures == 0);
        CHECK(r == 0 || ends[r].result == result);
        result = ends[r].result;
        memcpy(message[r], ends[r].message, sizeof ends[r].message);
    }
    munmap(ends, RANKS * sizeof *ends);
    return result;
}

XD_TEST(processes_that_join_in_another_state_are_named) {
    char message[RANKS][256];
    CHECK_EQ_INT(processes_meet(FLOAT_FLUSH, message), XD_ERROR_MISMATCH);
    for (int r = 0; r < RANKS; r++)
        CHECK(strstr(message[r], "rank 1 computes with rounding to nearest, flush"));
    CHECK_EQ_INT(processes_meet(FLOAT_DEFAULT, message), XD_OK);
    CHECK_EQ_INT(node_left_behind(), 0);
}

/* ---- a state that changes later ---- */

static xd_result changes_later(xd_comm *world, void *argument) {
    const bool odd = xd_comm_rank(world) == ODD;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm *part = NULL;
    float one = 1.0f, sum = 0.0f;
    (void)argument;
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (odd) float_state_set(FLOAT_UP);
    CHECK_EQ_INT(xd_comm_split(world, 0, 0, &part), XD_ERROR_MISMATCH);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "split: rank 1 computes with rounding up, rank 0 computes with "
                                              "rounding to nearest (in xd_comm_split)");
    CHECK_EQ_INT(xd_last_error(ctx)->culprit, ODD);
    CHECK_EQ_INT(xd_all_reduce(world, &one, &sum, 1, XD_DTYPE_F32, XD_SUM), XD_ERROR_MISMATCH);
    CHECK(part == NULL && sum == 0.0f);
    float_state_set(FLOAT_DEFAULT);
    CHECK_EQ_INT(xd_comm_split(world, 0, 0, &part), XD_OK);
    CHECK_EQ_INT(xd_all_reduce(part, &one, &sum, 1, XD_DTYPE_F32, XD_SUM), XD_OK);
    CHECK(sum == (float)xd_comm_size(world));
    xd_comm_destroy(part);
    return XD_OK;
}

XD_TEST(a_state_that_changes_after_joining_is_found_by_the_next_collective) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, changes_later, NULL, NULL), XD_OK);
}

/* ---- warnings ---- */

typedef struct heard {
    int lines;
    char last[256];
} heard;

static void hear(void *user, xd_log_level level, const char *line) {
    heard *h = (heard *)user;
    CHECK(level == XD_LOG_WARN);
    h->lines++;
    snprintf(h->last, sizeof h->last, "%s", line);
}

XD_TEST(a_context_warns_once_of_a_state_that_is_not_the_default) {
    for (int kind = FLOAT_DEFAULT; kind < FLOAT_KINDS; kind++)
        for (int later = 0; later < 2;
             later++) { /* set before the context is created, or before its group is */
            heard h = { 0, "" };
            const xd_ctx_desc desc = { .logger = { hear, &h } };
            xd_ctx *ctx = NULL;
            xd_comm *self = NULL;
            if (!later && !float_state_set((float_kind)kind)) continue;
            CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
            CHECK_EQ_INT(h.lines, !later && kind != FLOAT_DEFAULT);
            if (!float_state_set((float_kind)kind)) continue;
            CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
            for (int i = 0; i < 3; i++) CHECK_EQ_INT(xd_barrier(self), XD_OK);
            float_state_set(FLOAT_DEFAULT);
            CHECK_EQ_INT(h.lines, kind != FLOAT_DEFAULT);
            CHECK(kind == FLOAT_DEFAULT || strstr(h.last, float_words[kind]) != NULL);
            xd_comm_destroy(self);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(every_state_has_a_name_of_its_own) {
    for (unsigned a = 0; a < 16; a++)
        for (unsigned b = 0; b < a; b++) CHECK(strcmp(xdi_float_state_name(a), xdi_float_state_name(b)) != 0);
    CHECK_EQ_STR(xdi_float_state_name(16), "unknown");
    CHECK_EQ_INT(xd_float_state(), 0);
}

/* ---- pools ---- */

enum { COUNT = 400000 };
static float first[COUNT], other[COUNT], gradient[COUNT];

static void step(float *values, int threads, loop *own, float_kind kind) {
    uint64_t state = 5;
    xd_ctx *ctx = open_ctx(threads, own, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    xd_optimizer *optimizer = NULL;
    float_state_set(FLOAT_DEFAULT);
    for (int i = 0; i < COUNT; i++) {
        values[i] = number(&state);
        gradient[i] = number(&state) * 1e-39f; /* a denormal number */
    }
    const xd_param param = {
        .name = "w", .value = values, .gradient = gradient, .dtype = XD_DTYPE_F32, .count = COUNT
    };
    const xd_optimizer_desc desc = xd_adamw_defaults(&param, 1);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &desc, &optimizer), XD_OK);
    CHECK(float_state_set(kind));
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    float_state_set(FLOAT_DEFAULT);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST(threads_of_a_pool_compute_in_the_state_of_the_caller) {
    for (int kind = FLOAT_UP; kind < FLOAT_KINDS; kind++) {
        loop own;
        loop_clear(&own);
        if (!float_state_set((float_kind)kind)) continue;
        step(first, 1, NULL, (float_kind)kind);
        step(other, 4, NULL, (float_kind)kind);
        CHECK(memcmp(first, other, sizeof first) == 0);
        step(other, 4, &own, (float_kind)kind);
        CHECK(own.rounds > 0 && memcmp(first, other, sizeof first) == 0);
        step(other, 1, NULL, FLOAT_DEFAULT);
        CHECK(kind != FLOAT_UP || memcmp(first, other, sizeof first) != 0); /* the state matters */
    }
}

XD_TEST_MAIN()
