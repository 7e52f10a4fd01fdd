/* A random program of starts and waits on some queues: what a seed draws is the same on all ranks, whatever runs the records. */
#ifndef QUEUE_PROGRAM_H
#define QUEUE_PROGRAM_H

#include "xd_test.h"
#include "xdistill.h"

#include <stdlib.h>

enum { MOST = 8 };

static inline xd_collective sum_of(const float *send, float *recv, int64_t count) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = send;
    c.recv = recv;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.op = XD_SUM;
    return c;
}

enum { STEPS = 1000, QUEUES = 4, CAPACITY = 5, LONGEST = 1500 };

typedef struct job {
    uint64_t seed;
    int queues;
    xd_queue_form form;
    uint64_t hash[MOST]; /* of all that a rank has received, in the order of its waits */
    xd_comm_counters traffic[MOST][QUEUES];
} job;

/* A record between start and wait. */
typedef struct entry {
    bool open;
    xd_ticket ticket;
    float *send, *recv;
} entry;

static inline uint64_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Neighbours 2k and 2k + 1; false for a last one alone. */
static inline bool draw_pair(xd_collective *c, int rank, int size, bool upward) {
    c->root = rank ^ 1;
    c->kind = (rank % 2 == 0) == upward ? XD_COLLECTIVE_SEND : XD_COLLECTIVE_RECV;
    return c->root < size;
}

static inline void draw_leaves(xd_collective *c, int rank, int size) {
    c->leaves.total = size;
    c->leaves.first = rank;
    c->leaves.count = 1;
}

/* The next record, the same on all ranks. `counts` is of the caller and overwritten at once: the queue has its copy. False: this
 * rank has no part in it. */
static inline bool draw(const xd_comm *world, uint64_t *state, entry *e, int64_t *counts, xd_collective *c) {
    const int rank = xd_comm_rank(world), size = xd_comm_size(world);
    const int64_t each = (int64_t)next(state) % (next(state) % 2 ? 8 : LONGEST);
    *c = sum_of(e->send, e->recv, each);
    c->root = (int)(next(state) % (uint64_t)size);
    for (int r = 0; r < size; r++) counts[r] = (each + r * (int64_t)(next(state) % 3)) / size;
    const uint64_t kind = next(state) % 9;
    const bool leaves =
        xd_ctx_settings(xd_comm_ctx(world))->reduction == XD_REDUCTION_INVARIANT || next(state) % 2;
    if (kind < 2 && leaves) draw_leaves(c, rank, size);
    if (kind == 1 || kind == 2) c->kind = kind == 1 ? XD_COLLECTIVE_REDUCE_SCATTER : XD_COLLECTIVE_SCATTER;
    if (kind == 3 || kind == 4) c->kind = kind == 3 ? XD_COLLECTIVE_ALL_GATHER : XD_COLLECTIVE_GATHER;
    if (kind == 5) c->kind = XD_COLLECTIVE_BROADCAST;
    if (kind == 5 && rank == c->root) memcpy(e->recv, e->send, (size_t)each * sizeof(float));
    if (kind == 5) c->send = c->recv;
    if (kind == 6) c->kind = XD_COLLECTIVE_BARRIER;
    if (kind == 1 || kind == 2) c->send_counts = counts;
    if (kind == 3 || kind == 4) c->recv_counts = counts;
    if (kind == 7) c->op = XD_MAX;
    return kind != 8 || draw_pair(c, rank, size, next(state) % 2);
}

static inline void fill(entry *e, const xd_comm *world, uint64_t seed) {
    for (int i = 0; i < 2 * LONGEST; i++) {
        uint64_t x = seed + (uint64_t)i * 0x9e3779b97f4a7c15u + (uint64_t)xd_comm_rank(world) * 77;
        e->send[i] = ldexpf((float)(int32_t)(uint32_t)(next(&x) << 1), (int)(next(&x) % 9) - 31);
        e->recv[i] = 0.0f;
    }
}

static inline void finish(job *j, xd_queue *queue, entry *e, int rank) {
    if (e->ticket.number) CHECK_EQ_INT(xd_queue_wait(queue, e->ticket), XD_OK);
    j->hash[rank] = xd_hash(j->hash[rank], e->recv, 2 * LONGEST * sizeof(float));
    e->open = false;
}

static inline void step(xd_comm *world, job *j, xd_queue *queue, entry *entries, uint64_t *state) {
    int64_t counts[MOST];
    xd_collective c;
    entry *e = &entries[next(state) % CAPACITY];
    if (e->open) {
        finish(j, queue, e, xd_comm_rank(world));
        return;
    }
    fill(e, world, *state);
    const bool mine = draw(world, state, e, counts, &c);
    e->open = true;
    e->ticket.number = 0;
    if (mine) CHECK_EQ_INT(xd_queue_start(queue, &c, &e->ticket), XD_OK);
    memset(counts, 0x55, sizeof counts);
}

static inline xd_result run_program(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    const int rank = xd_comm_rank(world);
    const xd_queue_desc d = { j->form, CAPACITY };
    xd_queue *queue[QUEUES] = { NULL };
    entry entries[QUEUES][CAPACITY];
    uint64_t state = j->seed;
    float *memory = (float *)malloc(sizeof(float) * 4 * LONGEST * QUEUES * CAPACITY), *at = memory;
    memset(entries, 0, sizeof entries);
    for (int i = 0; i < QUEUES * CAPACITY; i++, at += 4 * LONGEST) {
        entries[i / CAPACITY][i % CAPACITY].send = at;
        entries[i / CAPACITY][i % CAPACITY].recv = at + 2 * LONGEST;
    }
    for (int q = 0; q < j->queues; q++) CHECK_EQ_INT(xd_queue_create(world, &d, &queue[q]), XD_OK);
    for (int i = 0; i < STEPS; i++) {
        const int q = (int)(next(&state) % (uint64_t)j->queues);
        step(world, j, queue[q], entries[q], &state);
    }
    for (int q = 0; q < j->queues; q++) {
        for (int i = 0; i < CAPACITY; i++)
            if (entries[q][i].open) finish(j, queue[q], &entries[q][i], rank);
        const xd_queue_info facts = xd_queue_describe(queue[q]);
        CHECK_EQ_INT(facts.form, j->form);
        CHECK_EQ_INT(facts.open, 0);
        j->traffic[rank][q] = facts.traffic;
        xd_queue_destroy(queue[q]);
    }
    free(memory);
    return xd_barrier(world);
}

#endif
