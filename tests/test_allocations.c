/* Each allocation of each call in turn fails on one of 1 to 4 ranks: that rank gets MEMORY, the others fail with it, nobody
 * hangs, nothing leaks, and the same call works the next time. Under the address sanitizer nothing is used after it was
 * freed. tests/test_memory.c has a training step, and meshes with what moves over them. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "ids_scene.h"
#include "route_scene.h"
#include "xtoken_rows.h"

#include <sched.h>
#include <stdlib.h>

enum { RANKS_MAX = 4, MOST = 200 /* allocations of a call */ };

static __thread int64_t fails_in; /* allocations of this thread until one fails; 0 -> never */

static void *heap_allocate(void *user, size_t bytes) {
    if (fails_in > 0 && --fails_in == 0) return NULL;
    __atomic_add_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void heap_release(void *user, void *memory) {
    __atomic_sub_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* What a rank's calls use. */
typedef struct part {
    xd_comm *world;
    xd_vocab *vocab;
    ids_memory memory;
} part;

typedef struct call {
    const char *name;
    xd_result (*run)(part *p);
} call;

#define IDS_CALL(number)                                                                    \
    static xd_result run_ids_##number(part *p) {                                            \
        return ids_call(xd_comm_ctx(p->world), p->vocab, &p->memory, XD_DTYPE_I64, number); \
    }
IDS_CALL(0)
IDS_CALL(1)
IDS_CALL(2)
IDS_CALL(3)
IDS_CALL(4)
IDS_CALL(5)
IDS_CALL(6)
IDS_CALL(7)
IDS_CALL(8)
IDS_CALL(9)
IDS_CALL(10)

static xd_result run_row_stats(part *p) {
    double lse[IDS_ROWS];
    int64_t argmax[IDS_ROWS];
    return xd_row_stats(xd_comm_ctx(p->world), p->vocab, ids_matrix(p->memory.student), 1.0, lse, argmax);
}

static xd_result run_log_softmax(part *p) {
    return xd_log_softmax(xd_comm_ctx(p->world), p->vocab, ids_matrix(p->memory.student), 1.0,
                          ids_matrix(p->memory.out.gradient[0]));
}

static xd_result run_log_softmax_backward(part *p) {
    return xd_log_softmax_backward(xd_comm_ctx(p->world), p->vocab, ids_matrix(p->memory.student), 1.0,
                                   ids_matrix(p->memory.teacher), ids_matrix(p->memory.out.gradient[0]));
}

static xd_result split(part *p, int color) {
    xd_comm *group = NULL;
    XD_TRY(xd_comm_split(p->world, color, 0, &group));
    const xd_result result = xd_barrier(group);
    xd_comm_destroy(group);
    return result;
}

static xd_result run_split_alone(part *p) {
    return split(p, xd_comm_rank(p->world));
}

static xd_result run_split_pairs(part *p) {
    return split(p, xd_comm_rank(p->world) / 2);
}

static xd_result run_vocab(part *p) {
    xd_vocab *vocab = NULL;
    XD_TRY(xd_vocab_create_even(xd_comm_ctx(p->world), p->world, 100, &vocab));
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static xd_result run_norm(part *p) {
    xd_param param;
    xd_gradient_norm norm;
    memset(&param, 0, sizeof param);
    param.name = "logits";
    param.value = param.gradient = p->memory.student;
    param.dtype = XD_DTYPE_F32;
    param.count = IDS_ROWS;
    const xd_gradient_norm_desc d = { .params = &param, .param_count = 1, .max_norm = 1.0 };
    return xd_gradient_norm_compute(xd_comm_ctx(p->world), p->world, &d, &norm);
}

static xd_result run_route(part *p) {
    const int rank = xd_comm_rank(p->world);
    xd_route_desc d = pair_desc(rank);
    float data[6] = { 0 };
    xd_route *route = NULL;
    xd_route_window window;
    xd_result result = XD_OK;
    if (xd_comm_size(p->world) == 1) return XD_OK;
    XD_TRY(xd_route_create(p->world, &d, &route));
    if (rank == 0) result = xd_route_send(route, rows_of(data, 2, 3), NULL);
    if (rank == 1) result = xd_route_take(route, &window);
    if (rank == 1 && result == XD_OK) result = xd_route_release(route);
    result = xd_agree(p->world, result);
    xd_route_destroy(route);
    return result;
}

static xd_result run_messages(part *p) {
    const int rank = xd_comm_rank(p->world);
    xd_route_desc d = pair_desc(rank);
    xd_route *route = NULL;
    d.messages = true;
    if (xd_comm_size(p->world) == 1) return XD_OK;
    XD_TRY(xd_route_create(p->world, &d, &route));
    xd_route_destroy(route);
    return XD_OK;
}

static const call calls[] = { { "xd_loss", run_ids_0 },
                              { "xd_mft_loss", run_ids_1 },
                              { "xd_cosine_loss", run_ids_2 },
                              { "xd_head_loss", run_ids_3 },
                              { "xd_topk_kl_loss", run_ids_4 },
                              { "xd_topk_kl_loss, given ids", run_ids_5 },
                              { "xd_denominator_count", run_ids_6 },
                              { "xd_target_log_probs", run_ids_7 },
                              { "xd_target_log_probs_backward", run_ids_8 },
                              { "xd_gather_columns", run_ids_9 },
                              { "xd_accuracy", run_ids_10 },
                              { "xd_row_stats", run_row_stats },
                              { "xd_log_softmax", run_log_softmax },
                              { "xd_log_softmax_backward", run_log_softmax_backward },
                              { "xd_comm_split, alone", run_split_alone },
                              { "xd_comm_split, pairs", run_split_pairs },
                              { "xd_vocab_create_even", run_vocab },
                              { "xd_gradient_norm_compute", run_norm },
                              { "xd_route_create", run_route },
                              { "xd_route_create, messages", run_messages } };

/* What all ranks of a run share. */
typedef struct run {
    int victim, failures;         /* failures: of the victim */
    uint32_t arrived;             /* atomic */
    xd_result results[RANKS_MAX]; /* of the last call */
} run;

/* All ranks meet here, whatever has become of their world. */
static void meet(run *r, int ranks) {
    const uint32_t turn = __atomic_fetch_add(&r->arrived, 1, __ATOMIC_ACQ_REL) / (uint32_t)ranks;
    while (__atomic_load_n(&r->arrived, __ATOMIC_ACQUIRE) < (turn + 1) * (uint32_t)ranks) sched_yield();
}

/* False when the ranks did not end alike. */
static bool check_alike(run *r, int ranks, const call *c, int64_t n) {
    bool alike = true;
    for (int i = 0; i < ranks; i++) {
        const bool ok = r->results[i] == XD_OK, all = r->results[r->victim] == XD_OK;
        const bool named =
            r->results[i] == XD_ERROR_MEMORY || (i != r->victim && r->results[i] == XD_ERROR_PEER);
        alike = alike && ok == all && (ok || named);
    }
    if (!alike) {
        printf("    %s, allocation %lld of rank %d:", c->name, (long long)n, r->victim);
        for (int i = 0; i < ranks; i++) printf(" %s", xd_result_name(r->results[i]));
        printf("\n");
    }
    CHECK(alike);
    return alike;
}

/* Makes the call again and again with the next allocation failing, until none is left. */
static bool exhaust(part *p, run *r, const call *c) {
    const int rank = xd_comm_rank(p->world), ranks = xd_comm_size(p->world);
    for (int64_t n = 1; n < MOST; n++) {
        fails_in = rank == r->victim ? n : 0;
        r->results[rank] = c->run(p);
        fails_in = 0;
        meet(r, ranks);
        bool alike = true;
        if (rank == 0) alike = check_alike(r, ranks, c, n);
        const bool over = r->results[r->victim] == XD_OK, broken = xd_barrier(p->world) != XD_OK;
        if (rank == r->victim && !over) r->failures++;
        meet(r, ranks);
        CHECK(!broken);
        if (over || broken || !alike) return !broken && alike;
    }
    return false;
}

static xd_result allocations_rank(xd_comm *world, void *argument) {
    run *r = (run *)argument;
    part *p = (part *)calloc(1, sizeof *p);
    p->world = world;
    ids_fill(&p->memory);
    XD_TRY(xd_vocab_create_even(xd_comm_ctx(world), world, IDS_VOCAB, &p->vocab));
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (!exhaust(p, r, &calls[i])) break;
    xd_vocab_destroy(p->vocab);
    free(p);
    return XD_OK;
}

XD_TEST(each_allocation_of_each_call_may_fail_on_each_rank) {
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++)
        for (int victim = 0; victim < ranks; victim++) {
            run r;
            int64_t live = 0;
            const xd_ctx_desc desc = { .allocator = { heap_allocate, heap_release, &live },
                                       .timeout_seconds = 20.0 };
            memset(&r, 0, sizeof r);
            r.victim = victim;
            CHECK_EQ_INT(xd_run_threads(ranks, &desc, allocations_rank, &r, NULL), XD_OK);
            CHECK_EQ_INT(live, 0);
            CHECK(r.failures > 20);
        }
}

XD_TEST_MAIN()
