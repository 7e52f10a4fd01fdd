/* The pool of a context, and a parallel_for of the caller: what they promise, and how a wrong one is named. */
#include "xdistill.h"
#include "vocab_calls.h"
#include "parallel.h"
#include "planned.h"
#include "xd_test.h"

#include <stdlib.h>

enum { ROWS = 5, COLUMNS = 17001 };

static float weights[ROWS * COLUMNS];
static uint16_t student[ROWS * COLUMNS], teacher[ROWS * COLUMNS], gradient[ROWS * COLUMNS];

static void fill(void) {
    uint64_t state = 7;
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        weights[i] = number(&state);
        student[i] = xd_bf16_from_f32(6.0f * number(&state));
        teacher[i] = xd_bf16_from_f32(6.0f * number(&state));
    }
}

/* ---- the pool ---- */

/* What an allocator was asked for, and what a logger was told. */
typedef struct witness {
    int calls, left; /* left: calls until there is no room, -1: always room */
    char line[256];
} witness;

static void *witness_allocate(void *user, size_t bytes) {
    witness *w = (witness *)user;
    if (w->left == 0) return NULL;
    if (w->left > 0) w->left--;
    w->calls++;
    return malloc(bytes);
}

static void witness_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void witness_write(void *user, xd_log_level level, const char *line) {
    witness *w = (witness *)user;
    (void)level;
    snprintf(w->line, sizeof w->line, "%s", line);
}

static xd_ctx_desc witnessed(witness *w, int threads) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(w, 0, sizeof *w);
    w->left = -1;
    desc.allocator.allocate = witness_allocate;
    desc.allocator.release = witness_release;
    desc.allocator.user = w;
    desc.logger.write = witness_write;
    desc.logger.user = w;
    desc.threads = threads;
    return desc;
}

XD_TEST(one_thread_is_the_default) {
    xd_ctx *ctx = open_ctx(0, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    CHECK_EQ_INT(xd_ctx_settings(ctx)->threads, 1);
    xd_ctx_destroy(ctx);
}

XD_TEST(numbers_of_threads_that_cannot_be_are_refused_by_number) {
    static const int wrong[] = { -1, 1025, 1 << 30 };
    for (int i = 0; i < 3; i++) {
        witness w;
        char number_in_words[32];
        xd_ctx *ctx = NULL;
        const xd_ctx_desc desc = witnessed(&w, wrong[i]);
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_ARGUMENT);
        snprintf(number_in_words, sizeof number_in_words, "%d threads", wrong[i]);
        CHECK(ctx == NULL && w.calls == 0);
        CHECK(strstr(w.line, number_in_words) != NULL && strstr(w.line, "1024") != NULL);
    }
}

XD_TEST(a_pool_that_finds_no_memory_leaves_no_context) {
    for (int left = 0; left < 3; left++) {
        witness w;
        xd_ctx *ctx = NULL;
        const xd_ctx_desc desc = witnessed(&w, 3);
        w.left = left;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_MEMORY);
        CHECK(ctx == NULL);
        CHECK_EQ_INT(w.calls, left);
    }
}

XD_TEST(nothing_is_allocated_after_the_first_calls) {
    witness w;
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    const xd_ctx_desc desc = witnessed(&w, 3);
    fill();
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(vocab_even(ctx, NULL, COLUMNS, &vocab), XD_OK);
    xd_loss_desc d;
    xd_loss_values values;
    memset(&d, 0, sizeof d);
    d.student = xd_rows_of(student, XD_DTYPE_BF16, ROWS, COLUMNS);
    d.teacher = xd_rows_of(teacher, XD_DTYPE_BF16, ROWS, COLUMNS);
    d.common.gradient = xd_rows_of(gradient, XD_DTYPE_BF16, ROWS, COLUMNS);
    d.vocab = vocab;
    d.soft_weight = 1.0;
    d.common.workspace_bytes = PLANNED_WORKSPACE(ctx, xd_loss(ctx, &d, &values));
    d.common.workspace = malloc(d.common.workspace_bytes);
    CHECK_EQ_INT(xd_loss(ctx, &d, &values), XD_OK);
    const int before = w.calls;
    for (int i = 0; i < 5; i++) CHECK_EQ_INT(xd_loss(ctx, &d, &values), XD_OK);
    CHECK_EQ_INT(w.calls, before);
    free(d.common.workspace);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

/* Two blocks of 2^16 elements. */
static xd_result norm_of_weights(xd_ctx *ctx, xd_comm *comm, double *norm) {
    xd_param param;
    xd_gradient_norm_desc d;
    xd_gradient_norm out;
    memset(&param, 0, sizeof param);
    memset(&d, 0, sizeof d);
    memset(&out, 0, sizeof out);
    param.name = "weights";
    param.gradient = weights;
    param.dtype = XD_DTYPE_F32;
    param.count = ROWS * COLUMNS;
    d.params = &param;
    d.param_count = 1;
    const xd_result result = xd_gradient_norm_compute(ctx, comm, &d, &out);
    *norm = out.norm;
    return result;
}

static void norm_with(loop *own, const char *message) {
    xd_ctx *ctx = open_ctx(2, own, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    double norm;
    CHECK_EQ_INT(norm_of_weights(ctx, NULL, &norm), message ? XD_ERROR_STATE : XD_OK);
    if (message) CHECK(strstr(xd_last_error(ctx)->message, message) != NULL);
    if (message && !strstr(xd_last_error(ctx)->message, message)) printf("%s\n", xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_parallel_for_that_does_not_run_each_piece_once_is_named_with_the_piece) {
    loop own;
    fill();
    loop_clear(&own);
    norm_with(&own, NULL);
    own.twice = 1;
    norm_with(&own, "parallel_for ran piece 1 of 2 2 times");
    loop_clear(&own);
    own.never = 0;
    norm_with(&own, "parallel_for ran piece 0 of 2 0 times");
    loop_clear(&own);
    own.beyond = true;
    norm_with(&own, "parallel_for asked for piece 2 of 2");
}

/* ---- a parallel_for that fails on one rank ---- */

enum { FAULTY_RANKS = 3, FAULTY = 1 };

/* Runs the pieces here, in order; on one thread not all of them, or one twice. */
typedef struct shared_loop {
    pthread_t faulty;
    int how; /* atomic; 0: as it should be, 1: piece 0 is left out, 2: piece 1 is run twice */
    double fair;
    double norms[FAULTY_RANKS];
} shared_loop;

static void shared_run(void *user, int64_t pieces, void (*body)(void *argument, int64_t piece),
                       void *argument) {
    shared_loop *l = (shared_loop *)user;
    const int how = __atomic_load_n(&l->how, __ATOMIC_ACQUIRE);
    const bool faulty = how > 0 && pthread_equal(l->faulty, pthread_self());
    for (int64_t i = 0; i < pieces; i++) {
        if (!(faulty && how == 1 && i == 0)) body(argument, i);
        if (faulty && how == 2 && i == 1) body(argument, i);
    }
}

/* This rank's own error, or the others' that names it. */
static void check_fault(xd_comm *world, xd_result result, const char *message) {
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    CHECK_EQ_INT(result, xd_comm_rank(world) == FAULTY ? XD_ERROR_STATE : XD_ERROR_PEER);
    CHECK(strstr(error->message, message) != NULL);
    CHECK(xd_comm_rank(world) == FAULTY || error->culprit == FAULTY);
}

static xd_result faulty_rank(xd_comm *world, void *argument) {
    static const char *const messages[3] = { "", "parallel_for ran piece 0 of 2 0 times",
                                             "parallel_for ran piece 1 of 2 2 times" };
    shared_loop *l = (shared_loop *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    double norm = 0.0;
    if (rank == FAULTY) l->faulty = pthread_self();
    for (int how = 1; how < 3; how++) {
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
        if (rank == FAULTY) __atomic_store_n(&l->how, how, __ATOMIC_RELEASE);
        check_fault(world, norm_of_weights(ctx, world, &norm), messages[how]); /* a collective call */
        CHECK_EQ_INT(norm_of_weights(ctx, NULL, &norm), XD_OK); /* and one of this rank alone */
        CHECK(norm == l->fair);
        if (rank == FAULTY) __atomic_store_n(&l->how, 0, __ATOMIC_RELEASE);
        check_fault(world, xd_barrier(world), messages[how]);
    }
    CHECK_EQ_INT(norm_of_weights(ctx, world, &l->norms[rank]), XD_OK);
    return XD_OK;
}

XD_TEST(a_parallel_for_that_fails_on_one_rank_is_every_ranks_error) {
    static shared_loop l;
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    memset(&l, 0, sizeof l);
    memset(&desc, 0, sizeof desc);
    fill();
    desc.threads = 2;
    desc.timeout_seconds = desc.init_timeout_seconds = 1e9; /* nobody waits for it */
    desc.parallel_for.run = shared_run;
    desc.parallel_for.user = &l;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(norm_of_weights(ctx, NULL, &l.fair), XD_OK);
    xd_ctx_destroy(ctx);
    CHECK_EQ_INT(xd_run_threads(FAULTY_RANKS, &desc, faulty_rank, &l, NULL), XD_OK);
    CHECK(l.norms[0] > 0.0 && l.norms[0] == l.norms[1] && l.norms[0] == l.norms[2]);
}

/* Ranks in threads of one process, each with a pool. */
static xd_result pooled_rank(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    double *norm = (double *)argument + xd_comm_rank(world);
    for (int i = 0; i < 20; i++) CHECK_EQ_INT(norm_of_weights(ctx, world, norm), XD_OK);
    return XD_OK;
}

XD_TEST(every_rank_has_a_pool_of_its_own) {
    double norms[3] = { 0.0, 1.0, 2.0 };
    xd_ctx_desc desc;
    fill();
    memset(&desc, 0, sizeof desc);
    desc.threads = 3;
    CHECK_EQ_INT(xd_run_threads(3, &desc, pooled_rank, norms, NULL), XD_OK);
    CHECK(norms[0] > 0.0 && norms[0] == norms[1] && norms[1] == norms[2]);
}

XD_TEST_MAIN()
