/* A world whose ranks are processes, forked by the test: what transports between processes give, without a launcher. Records
 * and payload go through one block of memory that all of them inherit. It has the collectives that routes need, on host memory.
 * No rank is delayed on purpose; alarms end ranks that hang. */
#ifndef PROCESS_WORLD_H
#define PROCESS_WORLD_H

#include "xd_test.h"
#include "xdistill.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROCESS_RANKS = 18, PROCESS_GROUPS = 16, PROCESS_BYTES = 1 << 18, PROCESS_SECONDS = 100 };

/* One rank's page: the rank publishes something, all read it, and only then it publishes the next. */
typedef struct process_page {
    uint64_t arrived[PROCESS_GROUPS]; /* atomic, like the next three */
    uint64_t child_round;
    uint32_t gone;
    int child;
    xd_control control;
    int64_t counts[PROCESS_RANKS];
    unsigned char data[PROCESS_BYTES];
    xd_result result; /* of the rank's function */
    long failures;
    char message[256];
} process_page;

typedef struct process_block {
    int next_group; /* atomic */
    process_page pages[PROCESS_RANKS];
} process_block;

typedef struct process_rank {
    xd_transport base;
    process_block *block;
    int group, world_ranks[PROCESS_RANKS];
    uint64_t round;
} process_rank;

static inline void *process_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static inline process_page *process_page_of(const process_rank *t, int rank) {
    return &t->block->pages[t->world_ranks[rank]];
}

/* The rank that is waited for, when it has gone, or any other: then the one that is waited for may have left because of it. -1
 * while all are there. */
static inline int process_gone(const process_rank *t, int rank) {
    if (__atomic_load_n(&process_page_of(t, rank)->gone, __ATOMIC_ACQUIRE)) return rank;
    for (int r = 0; r < t->base.size; r++)
        if (__atomic_load_n(&process_page_of(t, r)->gone, __ATOMIC_ACQUIRE)) return r;
    return -1;
}

static inline xd_result process_wait(process_rank *t, const uint64_t *counter, uint64_t target, int rank,
                                     double deadline) {
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < target) {
        const int gone = process_gone(t, rank), culprit = t->world_ranks[gone >= 0 ? gone : rank];
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) break;
        if (gone >= 0 || xd_now(t->base.ctx) > deadline)
            return xd_fail_culprit(t->base.ctx, gone >= 0 ? XD_ERROR_PEER : XD_ERROR_TIMEOUT, culprit,
                                   __FILE__, __LINE__, __func__, "rank %d did not come", culprit);
        sched_yield();
    }
    return XD_OK;
}

static inline xd_result process_round(process_rank *t, double deadline) {
    __atomic_store_n(&process_page_of(t, t->base.rank)->arrived[t->group], ++t->round, __ATOMIC_RELEASE);
    for (int r = 0; r < t->base.size; r++) {
        const xd_result result =
            process_wait(t, &process_page_of(t, r)->arrived[t->group], t->round, r, deadline);
        if (result != XD_OK) return result;
    }
    return XD_OK;
}

static inline xd_result process_control(xd_transport *transport, const xd_control *mine,
                                        const xd_collective *next, xd_control *all, double deadline) {
    process_rank *t = (process_rank *)transport;
    (void)next;
    process_page_of(t, transport->rank)->control = *mine;
    const xd_result result = process_round(t, deadline);
    for (int r = 0; r < transport->size && result == XD_OK; r++) all[r] = process_page_of(t, r)->control;
    return result == XD_OK ? process_round(t, deadline) : result;
}

/* What this rank publishes of a collective; -1: this transport does not support that size or kind. */
static inline int64_t process_show(const process_rank *t, const xd_collective *c) {
    process_page *page = process_page_of(t, t->base.rank);
    int64_t elements = 0;
    switch (c->kind) {
    case XD_COLLECTIVE_BROADCAST: elements = c->root == t->base.rank ? c->count : 0; break;
    case XD_COLLECTIVE_ALL_REDUCE: elements = c->leaves.total ? -1 : c->count; break;
    case XD_COLLECTIVE_ALL_GATHER: elements = c->recv_counts[t->base.rank]; break;
    case XD_COLLECTIVE_ALL_TO_ALL:
        for (int r = 0; r < t->base.size; r++) elements += page->counts[r] = c->send_counts[r];
        break;
    default: return -1;
    }
    if (elements < 0 || (size_t)elements * xd_dtype_size(c->dtype) > sizeof page->data) return -1;
    if (elements > 0) memcpy(page->data, c->send, (size_t)elements * xd_dtype_size(c->dtype));
    return elements;
}

static inline xd_result process_look(const process_rank *t, const xd_collective *c) {
    const size_t size = xd_dtype_size(c->dtype);
    const void *pieces[PROCESS_RANKS];
    const xd_launch launch = xd_ctx_launch(t->base.ctx);
    char *to = (char *)c->recv;
    for (int r = 0; r < t->base.size; r++) pieces[r] = process_page_of(t, r)->data;
    if (c->kind == XD_COLLECTIVE_ALL_REDUCE)
        return xd_ctx_host_kernels(t->base.ctx)
            ->reduce.pieces(&launch, c->recv, pieces, t->base.size, c->count, c->dtype, c->op);
    if (c->kind == XD_COLLECTIVE_BROADCAST) {
        memcpy(c->recv, pieces[c->root], (size_t)c->count * size);
        return XD_OK;
    }
    for (int r = 0; r < t->base.size; to += (size_t)c->recv_counts[r++] * size) {
        int64_t at = 0;
        for (int s = 0; c->kind == XD_COLLECTIVE_ALL_TO_ALL && s < t->base.rank; s++)
            at += process_page_of(t, r)->counts[s];
        if (c->recv_counts[r] > 0)
            memcpy(to, (const char *)pieces[r] + (size_t)at * size, (size_t)c->recv_counts[r] * size);
    }
    return XD_OK;
}

static inline xd_result process_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    process_rank *t = (process_rank *)transport;
    if (process_show(t, c) < 0) return XD_ERROR_UNSUPPORTED;
    xd_result result = process_round(t, deadline);
    if (result == XD_OK) result = process_look(t, c);
    return result == XD_OK ? process_round(t, deadline) : result;
}

static inline xd_result process_poll(xd_transport *transport) {
    const process_rank *t = (const process_rank *)transport;
    for (int r = 0; r < transport->size; r++)
        if (__atomic_load_n(&process_page_of(t, r)->gone, __ATOMIC_ACQUIRE))
            return xd_fail_culprit(transport->ctx, XD_ERROR_PEER, t->world_ranks[r], __FILE__, __LINE__,
                                   __func__, "rank %d has left", t->world_ranks[r]);
    return XD_OK;
}

static inline void process_abort(xd_transport *transport) {
    __atomic_store_n(&process_page_of((process_rank *)transport, transport->rank)->gone, 1u,
                     __ATOMIC_RELEASE);
}

static inline void process_destroy(xd_transport *transport) {
    xd_release(transport->ctx, transport);
}

static inline process_rank *process_create(xd_ctx *ctx, process_block *block, int group, int size, int rank);

/* The first member chooses a number for the group and publishes it. */
static inline xd_result process_split(xd_transport *transport, const int *members, int size, int rank,
                                      double deadline, xd_transport **out) {
    process_rank *t = (process_rank *)transport;
    process_page *first = process_page_of(t, members[0]);
    if (rank == 0) {
        first->child = __atomic_add_fetch(&t->block->next_group, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&first->child_round, t->round, __ATOMIC_RELEASE);
    }
    const xd_result result = process_wait(t, &first->child_round, t->round, members[0], deadline);
    if (result != XD_OK) return result;
    CHECK(first->child < PROCESS_GROUPS);
    process_rank *child = process_create(transport->ctx, t->block, first->child, size, rank);
    for (int r = 0; r < size; r++) child->world_ranks[r] = t->world_ranks[members[r]];
    *out = &child->base;
    return XD_OK;
}

static inline process_rank *process_create(xd_ctx *ctx, process_block *block, int group, int size, int rank) {
    static const xd_transport_ops ops = { "processes",
                                          process_control,
                                          process_execute,
                                          process_split,
                                          process_abort,
                                          process_destroy,
                                          process_poll,
                                          false,
                                          NULL,
                                          NULL,
                                          NULL,
                                          NULL,
                                          false,
                                          NULL,
                                          NULL,
                                          NULL };
    process_rank *t = (process_rank *)xd_allocate(ctx, sizeof *t);
    t->base.ops = &ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = size;
    t->base.world_ranks = t->world_ranks;
    t->block = block;
    t->group = group;
    for (int r = 0; r < size; r++) t->world_ranks[r] = r;
    return t;
}

/* What a child process runs. An alarm ends it when it hangs. */
static inline void process_main(process_block *block, int ranks, int rank, const xd_ctx_desc *desc,
                                xd_rank_function function, void *argument) {
    process_page *page = &block->pages[rank];
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    alarm(PROCESS_SECONDS);
    xd_test_failures = 0;
    page->result = xd_ctx_create(desc, &ctx);
    if (page->result == XD_OK) {
        xd_ctx_set_rank(ctx, rank);
        page->result = xd_comm_create(ctx, &process_create(ctx, block, 0, ranks, rank)->base, &world);
    }
    if (page->result == XD_OK) page->result = function(world, argument);
    if (page->result != XD_OK) {
        strncpy(page->message, xd_last_error(ctx)->message, sizeof page->message - 1);
        __atomic_store_n(&page->gone, 1u, __ATOMIC_RELEASE);
    }
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    page->failures = xd_test_failures;
    fflush(stdout);
}

/* Set: who is killed by a signal counts as a rank that has left its world, as a launcher would say. Then it is not asked
 * how it ended. */
static bool process_reports_kills;

/* Waits for one of the children that still run; returns its rank, or -1. */
static inline int process_reap(process_block *block, pid_t *children, int ranks, int *status) {
    const pid_t ended = waitpid(-1, status, 0);
    for (int r = 0; r < ranks; r++) {
        if (ended < 0 || children[r] != ended) continue;
        children[r] = 0;
        if (process_reports_kills && WIFSIGNALED(*status))
            __atomic_store_n(&block->pages[r].gone, 1u, __ATOMIC_RELEASE);
        return r;
    }
    return -1;
}

/* Runs the function in `ranks` processes. Their failed checks are counted here, and a process that ends abnormally is a failed
 * check too; `victim` is exempt from both, and goes on when all others have ended if it has been stopped. Returns the first
 * result that is not XD_OK, its message in `message`. */
static inline xd_result process_run(int ranks, int victim, const xd_ctx_desc *desc, xd_rank_function function,
                                    void *argument, char message[256]) {
    process_block *block = (process_block *)process_memory(sizeof *block);
    pid_t children[PROCESS_RANKS];
    xd_result result = XD_OK;
    message[0] = 0;
    CHECK(block && ranks <= PROCESS_RANKS);
    if (!block || ranks > PROCESS_RANKS) return XD_ERROR_MEMORY;
    fflush(stdout);
    for (int r = 0; r < ranks; r++) {
        children[r] = fork();
        if (children[r] != 0) continue;
        process_main(block, ranks, r, desc, function, argument);
        exit(0);
    }
    for (int ended = 0; ended < ranks; ended++) {
        int status = -1;
        if (ended == ranks - 1 && victim >= 0 && children[victim]) kill(children[victim], SIGCONT);
        const int r = process_reap(block, children, ranks, &status);
        CHECK(r >= 0);
        if (r == victim || r < 0) continue;
        CHECK_EQ_INT(status, 0);
        CHECK_EQ_INT(block->pages[r].failures, 0);
    }
    for (int r = 0; r < ranks; r++) {
        if (r == victim) continue;
        if (block->pages[r].result == XD_OK || result != XD_OK) continue;
        result = block->pages[r].result;
        memcpy(message, block->pages[r].message, sizeof block->pages[r].message);
    }
    munmap(block, sizeof *block);
    return result;
}

#endif
