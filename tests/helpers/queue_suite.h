/* The conformance suite of transports with a queue between: each call of the suite starts its record on a queue of the group and
 * waits for it. Groups get their queue at the first call. Agreements and splits, which are no records, go to the group itself,
 * so cases in which a rank takes one for the other are left out. */
#ifndef QUEUE_SUITE_H
#define QUEUE_SUITE_H

#include "xd_test.h"
#include "xdistill.h"

enum { QUEUED_GROUPS = 16 };

static __thread xd_queue_form queued_form;
static __thread struct {
    xd_comm *comm;
    xd_queue *queue;
} queued[QUEUED_GROUPS];

static inline xd_queue *queued_find(xd_comm *comm) {
    const xd_queue_desc d = { queued_form, 1 };
    int at = 0;
    while (at < QUEUED_GROUPS && queued[at].comm && queued[at].comm != comm) at++;
    CHECK(at < QUEUED_GROUPS);
    if (queued[at].comm) return queued[at].queue;
    CHECK_EQ_INT(xd_queue_create(comm, &d, &queued[at].queue), XD_OK);
    CHECK_EQ_INT(xd_queue_describe(queued[at].queue).form, queued_form);
    queued[at].comm = comm;
    return queued[at].queue;
}

/* Ends the queue of a group, if it has one; the last entry takes its place. */
static inline void queued_end(xd_comm *comm) {
    for (int i = 0; i < QUEUED_GROUPS; i++) {
        if (!comm || queued[i].comm != comm) continue;
        xd_queue_destroy(queued[i].queue);
        int last = i;
        while (last + 1 < QUEUED_GROUPS && queued[last + 1].comm) last++;
        queued[i] = queued[last];
        queued[last].comm = NULL;
    }
}

static inline xd_result queued_run(xd_comm *comm, const xd_collective *record) {
    xd_queue *queue = queued_find(comm);
    xd_ticket ticket = { 0 };
    XD_TRY(xd_queue_start(queue, record, &ticket));
    return xd_queue_wait(queue, ticket);
}

static inline xd_comm_counters queued_traffic(const xd_comm *comm) {
    return xd_queue_describe(queued_find((xd_comm *)(uintptr_t)comm)).traffic;
}

static inline void queued_destroy(xd_comm *comm) {
    queued_end(comm);
    xd_comm_destroy(comm);
}

static inline xd_collective queued_record(xd_collective_kind kind, const void *send, void *recv,
                                          xd_dtype dtype) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.send = send;
    c.recv = recv;
    c.dtype = dtype;
    return c;
}

#define QUEUED(KIND, send, recv, dtype, FIELDS)                                   \
    {                                                                             \
        xd_collective c = queued_record(XD_COLLECTIVE_##KIND, send, recv, dtype); \
        FIELDS;                                                                   \
        return queued_run(comm, &c);                                              \
    }

static inline xd_result queued_barrier(xd_comm *comm)
    QUEUED(BARRIER, NULL, NULL, XD_DTYPE_NONE, c.count = 0) static inline xd_result
    queued_broadcast(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int root)
        QUEUED(BROADCAST, data, data, dtype, c.count = count; c.root = root) static inline xd_result
    queued_all_reduce(xd_comm *comm, const void *send, void *recv, int64_t count, xd_dtype dtype,
                      xd_reduce_op op)
        QUEUED(ALL_REDUCE, send, recv, dtype, c.count = count; c.op = op) static inline xd_result
    queued_reduce_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                          xd_reduce_op op)
        QUEUED(REDUCE_SCATTER, send, recv, dtype, c.send_counts = counts; c.op = op) static inline xd_result
    queued_all_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype)
        QUEUED(ALL_GATHER, send, recv, dtype, c.recv_counts = counts) static inline xd_result
    queued_all_to_all(xd_comm *comm, const void *send, const int64_t *out, void *recv, const int64_t *in,
                      xd_dtype dtype)
        QUEUED(ALL_TO_ALL, send, recv, dtype, c.send_counts = out; c.recv_counts = in) static inline xd_result
    queued_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                  int root)
        QUEUED(GATHER, send, recv, dtype, c.recv_counts = counts; c.root = root) static inline xd_result
    queued_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                   int root)
        QUEUED(SCATTER, send, recv, dtype, c.send_counts = counts; c.root = root) static inline xd_result
    queued_send(xd_comm *comm, const void *data, int64_t count, xd_dtype dtype, int to)
        QUEUED(SEND, data, NULL, dtype, c.count = count; c.root = to) static inline xd_result
    queued_recv(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int from)
        QUEUED(RECV, NULL, data, dtype, c.count = count; c.root = from)

#define SUITE_LAST_KIND XD_COLLECTIVE_SCATTER
#define xd_collective_run queued_run
#define xd_comm_traffic queued_traffic
#define xd_comm_destroy queued_destroy
#define xd_barrier queued_barrier
#define xd_broadcast queued_broadcast
#define xd_all_reduce queued_all_reduce
#define xd_reduce_scatter queued_reduce_scatter
#define xd_all_gather queued_all_gather
#define xd_all_to_all queued_all_to_all
#define xd_gather queued_gather
#define xd_scatter queued_scatter
#define xd_send queued_send
#define xd_recv queued_recv
#include "comm_suite.h"
#undef xd_collective_run
#undef xd_comm_traffic
#undef xd_comm_destroy
#undef xd_barrier
#undef xd_broadcast
#undef xd_all_reduce
#undef xd_reduce_scatter
#undef xd_all_gather
#undef xd_all_to_all
#undef xd_gather
#undef xd_scatter
#undef xd_send
#undef xd_recv

    /* A case on queues of this form. */
    static inline xd_result queued_case(xd_comm *world, xd_queue_form form, xd_rank_function function) {
    queued_form = form;
    const xd_result result = function(world, NULL);
    queued_end(world);
    return result;
}

#endif
