/* Ranks as threads of one process: the reference transport. Peers read each other's buffers in place.
 *
 * Every rank has a slot. To take part in round p it fills page p % 2 of its slot (control record, address of its
 * data) and then sets `arrived` to p; a round is complete for a rank when it has seen all others arrive. No rank
 * can be two rounds ahead, so two pages suffice and reading one needs no second barrier. Short payloads are
 * copied into the page and every rank reduces them for itself: one round. Longer ones are not copied: ranks read
 * them between the control round and a closing round, in which each reports that it has read the others' data.
 *
 * The first wait that fails breaks the world permanently, with all groups split from it. A rank then leaves its
 * call, and its caller may free the buffers. So a rank that accesses memory of peers first sets `busy` and checks
 * that the world is not broken, and a rank that leaves a broken call waits until its peers are not busy. That does
 * not take long, because copying never waits. */

#include "comm/internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    XDI_THREADS_INLINE = 4096, /* maximum bytes of a payload in the page */
    XDI_THREADS_SPIN = 100,    /* polls before yielding the core */
    XDI_THREADS_REST = 100,    /* waits without polling after polling in vain */
    /* The turn from which a wait sleeps. Beside other programs the system may give the core back at once to who yields it, while
     * the thread that is waited for does not run: then yielding takes the time of both. */
    XDI_THREADS_YIELD = 600,
    XDI_THREADS_NAP = 50000 /* nanoseconds */
};

typedef struct xdi_threads_page {
    xd_control control;
    xd_collective record;
    const void *data; /* record.send, or payload below */
    int64_t *offsets; /* [size], offset in data of the block for each rank */
    bool is_short;
    bool on_device;
    uint64_t payload[XDI_THREADS_INLINE / 8]; /* aligned for every dtype */
} xdi_threads_page;

typedef struct xdi_threads_group xdi_threads_group;

typedef struct xdi_threads_slot {
    uint64_t arrived;         /* rounds this rank has entered; atomic */
    uint32_t left;            /* this rank destroyed its handle; atomic */
    uint32_t busy;            /* this rank accesses memory of peers; atomic */
    uint32_t joined;          /* world group: the rank has joined; atomic */
    uint64_t child_round;     /* the round whose split produced `child`; atomic */
    xdi_threads_group *child; /* NULL: no memory */
    /* Events of this rank once it has moved memory of a device: its data to send is complete; its accesses to memory of
     * peers are complete. They live as long as the group, because peers wait for them after this rank has returned. */
    void *ready, *done;
    void (*event_destroy)(void *event);
    xdi_threads_page page[2];
} xdi_threads_slot;

/* A send waiting for its receiver, one for each ordered pair of ranks. */
typedef struct xdi_threads_mail {
    uint64_t posted; /* messages offered so far; atomic, written by the sender */
    uint64_t done;   /* messages processed so far; atomic, written by the receiver */
    const void *data;
    int64_t count, wanted; /* the sender's and the receiver's */
    bool on_device;
    xd_dtype dtype, wanted_dtype;
} xdi_threads_mail;

struct xdi_threads_group {
    struct xd_thread_world *world;
    xdi_threads_group *next; /* in world->groups */
    int size;
    uint32_t holders;        /* handles that exist or may still be created; atomic */
    int *world_ranks;        /* [size] */
    xdi_threads_slot *slots; /* [size] */
    int64_t *offsets;        /* [size][2][size], for the pages */
    xdi_threads_mail *mail;  /* [from][to] */
    void *shared;            /* see xdi_threads_share */
};

struct xd_thread_world {
    xd_allocator allocator;
    uint64_t failure; /* 0, or what broke the world: result << 32 | (culprit + 1); atomic, written once */
    pthread_mutex_t lock;
    xdi_threads_group *groups; /* all that exist, the world's own last; under lock */
    xdi_threads_group *root;
    uint32_t *gone; /* [ranks], the rank has left the world; atomic */
    uint32_t *asks; /* [ranks], it wants to go on with those that live; under lock */
    int *before;    /* [ranks], of a world that survivors made: their numbers in the one before */
    struct xd_thread_world
        *next;    /* the world of its survivors, which ends with it; under lock, written once */
    bool no_room; /* for that one; under lock */
};

typedef struct xdi_threads {
    xd_transport base;
    xdi_threads_group *group;
    xdi_threads_slot *slot; /* this rank's */
    uint64_t round;
    int rest;            /* number of next waits that yield the core at once */
    bool on_device;      /* the collective in progress moves memory of a device */
    void *stream;        /* on which it does so */
    const void **pieces; /* [size], scratch */
    xd_leaves *leaves;   /* [size], scratch */
} xdi_threads;

/* ---- memory of a world ---- */

static void *xdi_threads_allocate(xd_thread_world *world, size_t bytes) {
    void *memory = world->allocator.allocate(world->allocator.user, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void xdi_threads_free(xd_thread_world *world, void *memory) {
    if (memory) world->allocator.release(world->allocator.user, memory);
}

static void xdi_threads_group_free(xdi_threads_group *group) {
    xd_thread_world *world = group->world;
    for (int r = 0; group->slots && r < group->size; r++) {
        const xdi_threads_slot *slot = &group->slots[r];
        if (slot->ready) slot->event_destroy(slot->ready);
        if (slot->done) slot->event_destroy(slot->done);
    }
    xdi_threads_free(world, group->shared);
    xdi_threads_free(world, group->mail);
    xdi_threads_free(world, group->offsets);
    xdi_threads_free(world, group->slots);
    xdi_threads_free(world, group->world_ranks);
    xdi_threads_free(world, group);
}

static xdi_threads_group *xdi_threads_group_create(xd_thread_world *world, int size) {
    const size_t n = (size_t)size;
    xdi_threads_group *group = (xdi_threads_group *)xdi_threads_allocate(world, sizeof *group);
    if (!group) return NULL;
    group->world = world;
    group->size = size;
    group->holders = (uint32_t)size;
    group->world_ranks = (int *)xdi_threads_allocate(world, n * sizeof *group->world_ranks);
    group->slots = (xdi_threads_slot *)xdi_threads_allocate(world, n * sizeof *group->slots);
    group->offsets = (int64_t *)xdi_threads_allocate(world, 2 * n * n * sizeof *group->offsets);
    group->mail = (xdi_threads_mail *)xdi_threads_allocate(world, n * n * sizeof *group->mail);
    if (!group->world_ranks || !group->slots || !group->offsets || !group->mail) {
        xdi_threads_group_free(group);
        return NULL;
    }
    for (size_t i = 0; i < 2 * n; i++) group->slots[i / 2].page[i % 2].offsets = group->offsets + i * n;
    pthread_mutex_lock(&world->lock);
    group->next = world->groups;
    world->groups = group;
    pthread_mutex_unlock(&world->lock);
    return group;
}

/* Releases one handle; the last one frees the group. The world's own group lives as long as the world. */
static void xdi_threads_group_leave(xdi_threads_group *group) {
    xd_thread_world *world = group->world;
    if (__atomic_sub_fetch(&group->holders, 1, __ATOMIC_ACQ_REL) > 0 || group == world->root) return;
    pthread_mutex_lock(&world->lock);
    xdi_threads_group **at = &world->groups;
    while (*at != group) at = &(*at)->next;
    *at = group->next;
    pthread_mutex_unlock(&world->lock);
    xdi_threads_group_free(group);
}

/* ---- failure ---- */

/* Only the first failure is recorded; later ones are its consequences. */
static void xdi_threads_break(xd_thread_world *world, xd_result result, int culprit) {
    uint64_t healthy = 0;
    const uint64_t failure = ((uint64_t)result << 32) | (uint64_t)(uint32_t)(culprit + 1);
    __atomic_compare_exchange_n(&world->failure, &healthy, failure, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}

static uint64_t xdi_threads_failure(const xd_thread_world *world) {
    return __atomic_load_n(&world->failure, __ATOMIC_SEQ_CST);
}

/* Waits until no peer accesses this rank's memory: see the top of the file. */
static void xdi_threads_drain(const xdi_threads *t) {
    for (int r = 0; r < t->group->size; r++)
        while (r != t->base.rank && __atomic_load_n(&t->group->slots[r].busy, __ATOMIC_SEQ_CST))
            sched_yield();
}

/* Before this rank clears `busy`, its device must have completed its accesses. Only in a broken world the host waits for
 * a device. */
static void xdi_threads_settle(const xdi_threads *t) {
    if (!t->on_device || !__atomic_load_n(&t->slot->busy, __ATOMIC_SEQ_CST)) return;
    xd_launch launch = xd_ctx_launch(t->base.ctx);
    launch.stream = t->stream;
    xd_ctx_kernels(t->base.ctx)->memory.synchronize(&launch);
    __atomic_store_n(&t->slot->busy, 0u, __ATOMIC_SEQ_CST);
}

/* "2" or "2,3": the world ranks that have not entered the round in which this rank waits. False when it does not wait for
 * the culprit: that is late in another group, or in another call, and those who are missing here may not be to blame. */
static bool xdi_threads_missing(const xdi_threads *t, int culprit, char *text, size_t size) {
    bool member = false, missed = false;
    size_t used = 0;
    for (int r = 0; r < t->group->size; r++) {
        const bool is_culprit = t->group->world_ranks[r] == culprit;
        member = member || is_culprit;
        if (__atomic_load_n(&t->group->slots[r].arrived, __ATOMIC_ACQUIRE) >= t->round) continue;
        missed = missed || is_culprit;
        if (used + 16 < size)
            used += (size_t)snprintf(text + used, size - used, used ? ",%d" : "%d", t->group->world_ranks[r]);
    }
    if (used > 0) return missed;
    snprintf(text, size, "%d", culprit); /* it has come since, or this is a message */
    return member;
}

/* Reports the broken world. A rank that was waiting for the late one returns TIMEOUT, like the rank whose deadline
 * passed first; the late one itself, one that was waiting for others, and every later call, returns PEER. */
static xd_result xdi_threads_report(const xdi_threads *t, bool waiting) {
    const uint64_t failure = xdi_threads_failure(t->group->world);
    const xd_result cause = (xd_result)(failure >> 32);
    const int culprit = (int)(failure & 0xffffffffu) - 1, me = t->group->world_ranks[t->base.rank];
    char missing[160];
    xdi_threads_settle(t);
    xdi_threads_drain(t);
    if (cause == XD_ERROR_TIMEOUT && culprit == me)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit,
                               "rank %d came after the deadline: the world is broken", me);
    if (cause == XD_ERROR_TIMEOUT && waiting && xdi_threads_missing(t, culprit, missing, sizeof missing))
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_TIMEOUT, culprit,
                               "rank%s %s did not arrive before the deadline",
                               strchr(missing, ',') ? "s" : "", missing);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit, "rank %d %s: the world is broken", culprit,
                           cause == XD_ERROR_TIMEOUT ? "did not arrive before the deadline"
                                                     : "failed or left");
}

static bool xdi_threads_has_left(const xdi_threads_group *group, int rank) {
    return __atomic_load_n(&group->slots[rank].left, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(&group->world->gone[group->world_ranks[rank]], __ATOMIC_ACQUIRE);
}

/* ---- waiting ---- */

/* The turn at which a wait begins. Polling pays only while the other rank runs at the same time. The number of cores does
 * not decide that: the system may run two threads on one of many. So a rank that has polled in vain does not poll for some
 * waits, then tries again. */
static int xdi_threads_patience(xdi_threads *t) {
    if (t->rest == 0) return 0;
    t->rest--;
    return XDI_THREADS_SPIN;
}

/* Polls while both may be running, then yields, then sleeps. True when the caller should check the clock: always after
 * yielding the core, not after a mere poll. */
static bool xdi_threads_pause(xdi_threads *t, int turn) {
    if (turn < XDI_THREADS_SPIN) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        if (turn == XDI_THREADS_SPIN - 1) t->rest = XDI_THREADS_REST;
        return false;
    }
    if (turn < XDI_THREADS_YIELD) {
        sched_yield();
    } else {
        struct timespec nap = { 0, XDI_THREADS_NAP };
        nanosleep(&nap, NULL);
    }
    return true;
}

/* Waits until *counter, which `rank` increases, reaches `target`. */
static xd_result xdi_threads_wait(xdi_threads *t, const uint64_t *counter, uint64_t target, int rank,
                                  double deadline) {
    const xdi_threads_group *group = t->group;
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) return XD_OK;
    for (int turn = xdi_threads_patience(t); __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target;
         turn += turn < XDI_THREADS_YIELD) {
        if (xdi_threads_failure(group->world)) return xdi_threads_report(t, true);
        /* It may have arrived just before it left: read the counter again after seeing that it has left. */
        if (xdi_threads_has_left(group, rank) && __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target) {
            xdi_threads_break(group->world, XD_ERROR_PEER, group->world_ranks[rank]);
            return xdi_threads_report(t, true);
        }
        if (!xdi_threads_pause(t, turn) || xd_now(t->base.ctx) < deadline) continue;
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) break;
        xdi_threads_break(group->world, XD_ERROR_TIMEOUT, group->world_ranks[rank]);
        return xdi_threads_report(t, true);
    }
    return XD_OK;
}

/* Enters the next round and waits for all. */
static xd_result xdi_threads_round(xdi_threads *t, double deadline) {
    __atomic_store_n(&t->slot->arrived, ++t->round, __ATOMIC_RELEASE);
    for (int r = 0; r < t->group->size; r++)
        if (r != t->base.rank)
            XD_TRY(xdi_threads_wait(t, &t->group->slots[r].arrived, t->round, r, deadline));
    return XD_OK;
}

static xdi_threads_page *xdi_threads_page_of(const xdi_threads *t, int rank) {
    return &t->group->slots[rank].page[t->round & 1];
}

/* ---- memory of a device ----
 *
 * The ranks' threads meet in rounds as for host memory, but the data moves later, on their streams: a rank records `ready`
 * before it publishes its addresses, and streams of peers wait for that; each records `done` after its work, and every
 * stream waits for all of these. The host never waits for a device. */

static bool xdi_threads_sees_device(const xdi_threads *t, const xd_collective *c) {
    const xd_kernels *kernels = xd_ctx_settings(t->base.ctx)->kernels; /* NULL: the CPU's */
    const void *memory = c->send ? c->send : c->recv;
    return kernels && kernels->device != XD_DEVICE_CPU && memory && kernels->memory.owns(t->base.ctx, memory);
}

static xd_launch xdi_threads_launch(const xdi_threads *t, const xd_collective *c) {
    xd_launch launch = xd_ctx_launch(t->base.ctx);
    if (c->stream) launch.stream = c->stream;
    return launch;
}

/* Records that what c sends is complete at this point of the stream. */
static xd_result xdi_threads_ready(const xdi_threads *t, const xd_collective *c) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    xdi_threads_slot *slot = t->slot;
    slot->event_destroy = memory->event_destroy;
    if (!slot->ready) slot->ready = memory->event_create(t->base.ctx);
    if (!slot->done) slot->done = memory->event_create(t->base.ctx);
    XD_REQUIRE(t->base.ctx, slot->ready && slot->done, XD_ERROR_DEVICE,
               "the device has no events for a group of ranks");
    return memory->event_record(&launch, slot->ready);
}

/* A failure of this rank's device in the middle of a collective: peers cannot go on without its part. */
static xd_result xdi_threads_lost(const xdi_threads *t, xd_result result) {
    if (result == XD_OK) return result;
    xdi_threads_break(t->group->world, XD_ERROR_PEER, t->group->world_ranks[t->base.rank]);
    xdi_threads_settle(t);
    xdi_threads_drain(t);
    return result;
}

/* Copies between this rank's memory and a peer's. */
static xd_result xdi_threads_bytes(const xdi_threads *t, const xd_collective *c, void *to, const void *from,
                                   size_t bytes) {
    if (bytes == 0 || to == from) return XD_OK;
    if (t->on_device) {
        const xd_launch launch = xdi_threads_launch(t, c);
        return xd_ctx_kernels(t->base.ctx)->memory.copy(&launch, to, from, bytes, XD_COPY_ON_DEVICE);
    }
    xdi_copy_bytes(to, from, bytes);
    return XD_OK;
}

/* ---- the vtable ---- */

static xd_result xdi_threads_publish(const xdi_threads *t, xdi_threads_page *page, const xd_collective *c) {
    const int n = t->base.size;
    page->record = *c;
    page->data = c->send;
    for (int r = 0; c->send_counts && r < n; r++)
        page->offsets[r] = xdi_comm_offset(c->send_counts, c->send_displacements, r);
    const size_t bytes = (size_t)xdi_comm_send_elements(c, t->base.rank, n) * xd_dtype_size(c->dtype);
    page->on_device = xdi_threads_sees_device(t, c);
    page->is_short = bytes <= sizeof page->payload && !c->send_displacements && !page->on_device;
    if (page->on_device) return xdi_threads_ready(t, c);
    if (!page->is_short) return XD_OK;
    if (bytes) memcpy(page->payload, c->send, bytes);
    page->data = page->payload;
    return XD_OK;
}

static xd_result xdi_threads_control(xd_transport *transport, const xd_control *mine,
                                     const xd_collective *next, xd_control *all, double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    if (xdi_threads_failure(t->group->world)) return xdi_threads_report(t, false);
    xdi_threads_page *page = &t->slot->page[(t->round + 1) & 1];
    page->control = *mine;
    if (next) XD_TRY(xdi_threads_lost(t, xdi_threads_publish(t, page, next)));
    XD_TRY(xdi_threads_round(t, deadline));
    for (int r = 0; r < t->base.size; r++) all[r] = xdi_threads_page_of(t, r)->control;
    return XD_OK;
}

/* Copies `count` elements from element `from` of a peer's data to element `to` of recv. */
static xd_result xdi_threads_copy(const xdi_threads *t, const xd_collective *c, int64_t to,
                                  const xdi_threads_page *page, int64_t from, int64_t count) {
    const size_t size = xd_dtype_size(c->dtype);
    if (count <= 0) return XD_OK; /* either side may be NULL */
    return xdi_threads_bytes(t, c, (char *)c->recv + (size_t)to * size,
                             (const char *)page->data + (size_t)from * size, (size_t)count * size);
}

/* Reduces `count` elements of all ranks' data into out, from element begin_own or, by_offset, from the block that
 * each rank has for this one; `stride` elements from node to node. */
static xd_result xdi_threads_reduce(const xdi_threads *t, const xd_collective *c, void *out,
                                    int64_t begin_own, bool by_offset, int64_t stride, int64_t count) {
    const size_t size = xd_dtype_size(c->dtype);
    const xd_reduce_kernels *reduce =
        &(t->on_device ? xd_ctx_kernels(t->base.ctx) : xd_ctx_host_kernels(t->base.ctx))->reduce;
    const xd_launch launch = xdi_threads_launch(t, c);
    if (count == 0) return XD_OK;
    for (int r = 0; r < t->base.size; r++) {
        const xdi_threads_page *page = xdi_threads_page_of(t, r);
        const int64_t begin = by_offset ? page->offsets[t->base.rank] : begin_own;
        t->leaves[r] = page->record.leaves;
        t->pieces[r] = page->data ? (const char *)page->data + (size_t)begin * size : NULL;
    }
    if (c->leaves.total)
        return reduce->leaves(&launch, out, t->pieces, t->leaves, t->base.size, stride, count, c->dtype,
                              c->op);
    return reduce->pieces(&launch, out, t->pieces, t->base.size, count, c->dtype, c->op);
}

/* Each rank reduces its block and stores the sums into every rank's recv: in place is fine, since no other rank reads
 * that block. Short arrays are reduced whole by every rank. */
static xd_result xdi_threads_all_reduce(const xdi_threads *t, const xd_collective *c, bool is_short) {
    const size_t size = xd_dtype_size(c->dtype);
    if (is_short) return xdi_threads_reduce(t, c, c->recv, 0, false, c->count, c->count);
    int64_t begin, end;
    xdi_comm_piece(c->count, t->base.size, t->base.rank, &begin, &end);
    const int64_t tile =
        t->on_device ? c->count : 4096; /* a tile stays in the cache; on a device few launches are better */
    for (int64_t at = begin; at < end; at += tile) {
        const int64_t n = end - at < tile ? end - at : tile;
        char *sums = (char *)c->recv + (size_t)at * size;
        XD_TRY(xdi_threads_reduce(t, c, sums, at, false, c->count, n));
        for (int r = 0; r < t->base.size; r++)
            if (r != t->base.rank)
                XD_TRY(xdi_threads_bytes(t, c,
                                         (char *)xdi_threads_page_of(t, r)->record.recv + (size_t)at * size,
                                         sums, (size_t)n * size));
    }
    return XD_OK;
}

/* A block that is in its place already is not written: others may be reading it. */
static xd_result xdi_threads_collect(const xdi_threads *t, const xd_collective *c) {
    const size_t size = xd_dtype_size(c->dtype);
    for (int r = 0; r < t->base.size; r++) {
        const xdi_threads_page *page = xdi_threads_page_of(t, r);
        const int64_t from = c->kind == XD_COLLECTIVE_ALL_TO_ALL ? page->offsets[t->base.rank] : 0,
                      to = xdi_comm_offset(c->recv_counts, c->recv_displacements, r);
        const bool in_place =
            r == t->base.rank && c->recv_counts[r] > 0 && c->send == (char *)c->recv + (size_t)to * size;
        if (!in_place) XD_TRY(xdi_threads_copy(t, c, to, page, from, c->recv_counts[r]));
    }
    return XD_OK;
}

static xd_result xdi_threads_move(const xdi_threads *t, const xd_collective *c, bool is_short) {
    const int rank = t->base.rank;
    const xdi_threads_page *root = xdi_threads_page_of(t, c->root);
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE: return xdi_threads_all_reduce(t, c, is_short);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xdi_threads_reduce(t, c, c->recv, 0, true, xdi_comm_total(c->send_counts, t->base.size),
                                  c->send_counts[rank]);
    case XD_COLLECTIVE_BROADCAST:
        return rank != c->root ? xdi_threads_copy(t, c, 0, root, 0, c->count) : XD_OK;
    case XD_COLLECTIVE_SCATTER:
        return xdi_threads_copy(t, c, 0, root, root->offsets[rank], c->send_counts[rank]);
    case XD_COLLECTIVE_GATHER: return rank == c->root ? xdi_threads_collect(t, c) : XD_OK;
    default: return xdi_threads_collect(t, c);
    }
}

/* Marks this rank as accessing memory of peers; false when the world is broken and their memory may be freed. */
static bool xdi_threads_enter(const xdi_threads *t) {
    __atomic_store_n(&t->slot->busy, 1u, __ATOMIC_SEQ_CST);
    if (!xdi_threads_failure(t->group->world)) return true;
    __atomic_store_n(&t->slot->busy, 0u, __ATOMIC_SEQ_CST);
    return false;
}

static void xdi_threads_exit(const xdi_threads *t) {
    __atomic_store_n(&t->slot->busy, 0u, __ATOMIC_SEQ_CST);
}

/* This rank's part on its stream, after the peers' `ready`. */
static xd_result xdi_threads_move_device(const xdi_threads *t, const xd_collective *c) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    for (int r = 0; r < t->base.size; r++)
        if (r != t->base.rank && xdi_threads_page_of(t, r)->on_device)
            XD_TRY(memory->event_wait(&launch, t->group->slots[r].ready));
    XD_TRY(xdi_threads_move(t, c, false));
    return t->slot->done ? memory->event_record(&launch, t->slot->done) : XD_OK;
}

/* Makes the stream wait until every peer has completed its part. */
static xd_result xdi_threads_follow(const xdi_threads *t, const xd_collective *c) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    for (int r = 0; r < t->base.size; r++)
        if (r != t->base.rank && t->group->slots[r].done)
            XD_TRY(memory->event_wait(&launch, t->group->slots[r].done));
    return XD_OK;
}

/* This rank is busy until its stream waits for all peers: work it has launched may run at any time. */
static xd_result xdi_threads_execute_device(xdi_threads *t, const xd_collective *c, double deadline) {
    t->stream = xdi_threads_launch(t, c).stream;
    XD_TRY(xdi_threads_lost(t, xdi_threads_move_device(t, c)));
    XD_TRY(xdi_threads_round(t, deadline));
    XD_TRY(xdi_threads_lost(t, xdi_threads_follow(t, c)));
    xdi_threads_exit(t);
    return XD_OK;
}

static xd_result xdi_threads_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    bool is_short = true;
    t->on_device = false;
    for (int r = 0; r < t->base.size; r++) {
        is_short = is_short && xdi_threads_page_of(t, r)->is_short;
        t->on_device = t->on_device || xdi_threads_page_of(t, r)->on_device;
    }
    if (is_short) return xdi_threads_move(t, c, true);
    if (!xdi_threads_enter(t)) return xdi_threads_report(t, true);
    if (t->on_device) return xdi_threads_execute_device(t, c, deadline);
    const xd_result moved = xdi_threads_move(t, c, false);
    xdi_threads_exit(t);
    XD_TRY(moved);
    return xdi_threads_round(t, deadline);
}

/* ---- two ranks ---- */

static xdi_threads_mail *xdi_threads_mail_of(const xdi_threads *t, const xd_collective *c) {
    const int me = t->base.rank, n = t->base.size;
    return &t->group->mail[c->kind == XD_COLLECTIVE_SEND ? me * n + c->root : c->root * n + me];
}

/* Both sides see the same four values. */
static bool xdi_threads_fits(const xdi_threads_mail *mail) {
    return mail->dtype != XD_DTYPE_NONE && mail->dtype == mail->wanted_dtype && mail->count == mail->wanted;
}

static xd_result xdi_threads_post(xdi_threads *t, xdi_threads_mail *mail, const xd_collective *c) {
    mail->data = c->send;
    mail->count = c->count;
    mail->dtype = c->dtype;
    mail->on_device = xdi_threads_sees_device(t, c);
    if (mail->on_device) XD_TRY(xdi_threads_lost(t, xdi_threads_ready(t, c)));
    __atomic_store_n(&mail->posted, mail->posted + 1, __ATOMIC_RELEASE); /* only this thread writes it */
    return XD_OK;
}

/* The receiver is done with what was posted. */
static xd_result xdi_threads_sent(xdi_threads *t, const xdi_threads_mail *mail, xd_message *m) {
    m->their_count = mail->wanted;
    m->their_dtype = mail->wanted_dtype;
    if (!mail->on_device || m->record.count == 0 || !xdi_threads_fits(mail)) return XD_OK;
    const xd_launch launch = xdi_threads_launch(t, &m->record);
    return xd_ctx_kernels(t->base.ctx)->memory.event_wait(&launch, t->group->slots[m->record.root].done);
}

/* The receiver's copy. */
static xd_result xdi_threads_take(xdi_threads *t, const xdi_threads_mail *mail, const xd_collective *c) {
    const size_t bytes = (size_t)c->count * xd_dtype_size(c->dtype);
    t->on_device = mail->on_device;
    if (!t->on_device) return xdi_threads_bytes(t, c, c->recv, mail->data, bytes);
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    XD_TRY(xdi_threads_ready(t, c));
    XD_TRY(memory->event_wait(&launch, t->group->slots[c->root].ready));
    XD_TRY(xdi_threads_bytes(t, c, c->recv, mail->data, bytes));
    return memory->event_record(&launch, t->slot->done);
}

static xd_result xdi_threads_receive(xdi_threads *t, xdi_threads_mail *mail, xd_message *m) {
    if (!xdi_threads_enter(t)) return xdi_threads_report(t, true);
    m->their_count = mail->count;
    m->their_dtype = mail->dtype;
    mail->wanted = m->record.count;
    mail->wanted_dtype = m->record.dtype;
    xd_result result = XD_OK;
    if (m->record.count > 0 && xdi_threads_fits(mail))
        result = xdi_threads_lost(t, xdi_threads_take(t, mail, &m->record));
    __atomic_store_n(&mail->done, mail->done + 1, __ATOMIC_RELEASE);
    xdi_threads_exit(t);
    return result;
}

/* Stages of a message. A sender posts it, a receiver takes what is posted. */
enum { XDI_THREADS_NEW = 0, XDI_THREADS_POSTED, XDI_THREADS_MET };

/* Whether there is something to do for a message that has not met. */
static bool xdi_threads_can(const xdi_threads *t, const xd_message *m) {
    const xdi_threads_mail *mail = xdi_threads_mail_of(t, &m->record);
    if (m->record.kind == XD_COLLECTIVE_RECV)
        return __atomic_load_n(&mail->posted, __ATOMIC_ACQUIRE) > mail->done;
    return m->stage == XDI_THREADS_NEW || __atomic_load_n(&mail->done, __ATOMIC_ACQUIRE) == mail->posted;
}

static xd_result xdi_threads_advance(xdi_threads *t, xd_message *m) {
    xdi_threads_mail *mail = xdi_threads_mail_of(t, &m->record);
    const bool sends = m->record.kind == XD_COLLECTIVE_SEND, posts = sends && m->stage == XDI_THREADS_NEW;
    m->stage = posts ? XDI_THREADS_POSTED : XDI_THREADS_MET;
    if (posts) return xdi_threads_post(t, mail, &m->record);
    return sends ? xdi_threads_sent(t, mail, m) : xdi_threads_receive(t, mail, m);
}

/* The first message from `at` on that has not met and is not behind another between the same ranks; count without one. */
static int xdi_threads_next(const xd_message *messages, int count, int at) {
    for (; at < count; at++) {
        const xd_collective *c = &messages[at].record;
        bool free = messages[at].stage != XDI_THREADS_MET;
        for (int i = 0; free && i < at; i++)
            free = messages[i].stage == XDI_THREADS_MET || messages[i].record.kind != c->kind ||
                   messages[i].record.root != c->root;
        if (free) break;
    }
    return at;
}

/* A turn of waiting for the messages that have not met; as xdi_threads_wait. */
static xd_result xdi_threads_linger(xdi_threads *t, const xd_message *messages, int count, int turn,
                                    double deadline) {
    xdi_threads_group *group = t->group;
    const int first = xdi_threads_next(messages, count, 0);
    if (xdi_threads_failure(group->world)) return xdi_threads_report(t, true);
    for (int i = first; i < count; i = xdi_threads_next(messages, count, i + 1)) {
        const int peer = messages[i].record.root;
        if (!xdi_threads_has_left(group, peer) || xdi_threads_can(t, &messages[i])) continue;
        xdi_threads_break(group->world, XD_ERROR_PEER, group->world_ranks[peer]);
        return xdi_threads_report(t, true);
    }
    if (!xdi_threads_pause(t, turn) || xd_now(t->base.ctx) < deadline) return XD_OK;
    for (int i = first; i < count; i = xdi_threads_next(messages, count, i + 1))
        if (xdi_threads_can(t, &messages[i])) return XD_OK;
    xdi_threads_break(group->world, XD_ERROR_TIMEOUT, group->world_ranks[messages[first].record.root]);
    return xdi_threads_report(t, true);
}

static xd_result xdi_threads_exchange(xd_transport *transport, xd_message *messages, int count,
                                      double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    if (xdi_threads_failure(t->group->world)) return xdi_threads_report(t, false);
    int turn = xdi_threads_patience(t);
    while (xdi_threads_next(messages, count, 0) < count) {
        bool moved = false;
        for (int i = 0; (i = xdi_threads_next(messages, count, i)) < count; i++) {
            if (!xdi_threads_can(t, &messages[i])) continue;
            XD_TRY(xdi_threads_advance(t, &messages[i]));
            moved = true;
        }
        if (moved) continue;
        XD_TRY(xdi_threads_linger(t, messages, count, turn, deadline));
        turn += turn < XDI_THREADS_YIELD;
    }
    return XD_OK;
}

/* ---- handles ---- */

static xd_result xdi_threads_attach(xd_ctx *ctx, xdi_threads_group *group, int rank, xd_transport **out);

/* The first member creates the group and publishes it in its slot of the parent, where the others read it. `members` NULL:
 * all, in their order. */
static xd_result xdi_threads_child(xdi_threads *t, const int *members, int size, int rank, double deadline) {
    const int first = members ? members[0] : 0;
    xdi_threads_slot *leader = &t->group->slots[first];
    if (rank == 0) {
        xdi_threads_group *made = xdi_threads_group_create(t->group->world, size);
        for (int r = 0; made && r < size; r++)
            made->world_ranks[r] = t->group->world_ranks[members ? members[r] : r];
        leader->child = made;
        __atomic_store_n(&leader->child_round, t->round, __ATOMIC_RELEASE);
    } else {
        XD_TRY(xdi_threads_wait(t, &leader->child_round, t->round, first, deadline));
    }
    XD_REQUIRE(t->base.ctx, leader->child, XD_ERROR_MEMORY, "no room for a group of %d ranks", size);
    return XD_OK;
}

static xd_result xdi_threads_split(xd_transport *transport, const int *members, int size, int rank,
                                   double deadline, xd_transport **out) {
    xdi_threads *t = (xdi_threads *)transport;
    XD_TRY(xdi_threads_child(t, members, size, rank, deadline));
    return xdi_threads_attach(transport->ctx, t->group->slots[members[0]].child, rank, out);
}

static xd_result xdi_threads_fork(xd_transport *transport, xd_ctx *ctx, double deadline, xd_transport **out) {
    xdi_threads *t = (xdi_threads *)transport;
    XD_TRY(xdi_threads_child(t, NULL, transport->size, transport->rank, deadline));
    const xd_result result = xdi_threads_attach(ctx, t->group->slots[0].child, transport->rank, out);
    return result == XD_OK ? XD_OK : xdi_ctx_adopt(transport->ctx, xd_last_error(ctx));
}

/* A handle; the first rank makes the group. */
static size_t xdi_threads_fork_bytes(const xd_transport *transport) {
    const size_t n = (size_t)transport->size;
    const size_t handle = sizeof(xdi_threads) + n * (sizeof(void *) + sizeof(xd_leaves));
    if (transport->rank > 0) return handle;
    return handle + sizeof(xdi_threads_group) + n * (sizeof(int) + sizeof(xdi_threads_slot)) +
           n * n * (2 * sizeof(int64_t) + sizeof(xdi_threads_mail));
}

static void xdi_threads_abort(xd_transport *transport) {
    xdi_threads *t = (xdi_threads *)transport;
    const int me = t->group->world_ranks[t->base.rank];
    xdi_threads_break(t->group->world, XD_ERROR_PEER, me);
    __atomic_store_n(&t->group->world->gone[me], 1u, __ATOMIC_RELEASE);
}

static void xdi_threads_destroy(xd_transport *transport) {
    xdi_threads *t = (xdi_threads *)transport;
    xdi_threads_group *group = t->group;
    __atomic_store_n(&t->slot->left, 1u, __ATOMIC_RELEASE);
    if (group == group->world->root)
        __atomic_store_n(&group->world->gone[transport->rank], 1u, __ATOMIC_RELEASE);
    xdi_threads_group_leave(group);
    xd_release(transport->ctx, t->leaves);
    xd_release(transport->ctx, (void *)t->pieces);
    xd_release(transport->ctx, t);
}

/* ---- worlds of those that are left ---- */

/* The lists are made under a lock, so nobody can see another. */
static bool xdi_threads_all_ask(const xd_thread_world *world, int *count) {
    bool all = true;
    *count = 0;
    for (int r = 0; r < world->root->size; r++) {
        if (__atomic_load_n(&world->gone[r], __ATOMIC_ACQUIRE)) continue;
        *count += world->asks[r] != 0;
        all = all && world->asks[r];
    }
    return all;
}

static xd_thread_world *xdi_threads_world_new(const xd_allocator *allocator, int ranks);

/* The world of the `count` that ask, none of which can leave while it waits. */
static void xdi_threads_found(xd_thread_world *old, int count) {
    xd_thread_world *made = xdi_threads_world_new(&old->allocator, count);
    for (int r = 0, n = 0; made && r < old->root->size && n < count; r++)
        if (old->asks[r]) made->before[n++] = r;
    old->next = made;
    old->no_room = !made;
}

/* Asks, and waits until it is decided; NULL: there is no room. */
static xd_thread_world *xdi_threads_ask(xdi_threads *t, double deadline) {
    xd_thread_world *old = t->group->world, *next = NULL;
    bool decided = false;
    for (int turn = XDI_THREADS_SPIN; !decided; turn += turn < XDI_THREADS_YIELD) {
        int count;
        pthread_mutex_lock(&old->lock);
        old->asks[t->base.rank] = 1;
        if (!old->next && !old->no_room &&
            (xdi_threads_all_ask(old, &count) || xd_now(t->base.ctx) >= deadline))
            xdi_threads_found(old, count);
        next = old->next;
        decided = next || old->no_room;
        pthread_mutex_unlock(&old->lock);
        if (!decided) (void)xdi_threads_pause(t, turn);
    }
    return next;
}

static xd_result xdi_threads_shrink(xd_transport *transport, double deadline, xd_transport **out) {
    xdi_threads *t = (xdi_threads *)transport;
    xd_thread_world *old = t->group->world;
    const int me = transport->rank, size = transport->size;
    const bool left = __atomic_load_n(&old->gone[me], __ATOMIC_ACQUIRE) != 0;
    XD_REQUIRE(transport->ctx, xdi_threads_failure(old), XD_ERROR_STATE,
               "nothing has broken this world of %d ranks", size);
    XD_REQUIRE(transport->ctx, !old->asks[me] && !left, XD_ERROR_STATE,
               "rank %d has %s this world of %d ranks already", me, left ? "left" : "gone on from", size);
    xd_thread_world *next = xdi_threads_ask(t, deadline);
    XD_REQUIRE(transport->ctx, next, XD_ERROR_MEMORY, "no room for a world of what is left of %d ranks",
               size);
    int rank = 0;
    while (rank < next->root->size && next->before[rank] != me) rank++;
    if (rank == next->root->size)
        return XD_FAIL_CULPRIT(transport->ctx, XD_ERROR_PEER, me,
                               "rank %d came after the deadline: %d of %d ranks go on without it", me,
                               next->root->size, size);
    const xd_result result = xdi_threads_attach(transport->ctx, next->root, rank, out);
    if (result != XD_OK) __atomic_store_n(&next->gone[rank], 1u, __ATOMIC_RELEASE);
    return result;
}

static const xd_transport_ops xdi_threads_ops = { "threads",
                                                  xdi_threads_control,
                                                  xdi_threads_execute,
                                                  xdi_threads_split,
                                                  xdi_threads_abort,
                                                  xdi_threads_destroy,
                                                  NULL,
                                                  true,
                                                  NULL,
                                                  xdi_threads_fork,
                                                  xdi_threads_exchange,
                                                  xdi_threads_fork_bytes,
                                                  false,
                                                  xdi_threads_shrink };

/* ---- memory that a group shares ---- */

XD_PRIVATE bool xdi_threads_has(const xd_comm *comm) {
    return xdi_comm_transport(comm)->ops == &xdi_threads_ops;
}

XD_PRIVATE xd_result xdi_threads_share(xd_comm *comm, size_t bytes, void **out) {
    const xdi_threads *t = (const xdi_threads *)xdi_comm_transport(comm);
    xd_result made = XD_OK;
    if (t->base.rank == 0) {
        t->group->shared = xdi_threads_allocate(t->group->world, bytes);
        if (!t->group->shared)
            made = XD_FAIL(t->base.ctx, XD_ERROR_MEMORY, "no room for %zu bytes of shared memory", bytes);
    }
    XD_TRY(xd_agree(comm, made));
    *out = t->group->shared;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_threads_watch(xd_comm *comm, const uint64_t *counter, uint64_t target, int rank) {
    xdi_threads *t = (xdi_threads *)xdi_comm_transport(comm);
    const double deadline = xd_now(t->base.ctx) + xd_ctx_settings(t->base.ctx)->timeout_seconds;
    return xdi_threads_wait(t, counter, target, rank, deadline);
}

XD_PRIVATE xd_result xdi_threads_check(xd_comm *comm) {
    const xdi_threads *t = (const xdi_threads *)xdi_comm_transport(comm);
    return xdi_threads_failure(t->group->world) ? xdi_threads_report(t, false) : XD_OK;
}

/* A handle on a group whose `holders` includes it already; releases it on failure. */
static xd_result xdi_threads_attach(xd_ctx *ctx, xdi_threads_group *group, int rank, xd_transport **out) {
    const size_t n = (size_t)group->size;
    xdi_threads *t = (xdi_threads *)xd_allocate(ctx, sizeof *t);
    const void **pieces = (const void **)xd_allocate(ctx, n * sizeof *pieces);
    xd_leaves *leaves = (xd_leaves *)xd_allocate(ctx, n * sizeof *leaves);
    if (!t || !pieces || !leaves) {
        xd_release(ctx, leaves);
        xd_release(ctx, (void *)pieces);
        xd_release(ctx, t);
        xdi_threads_group_leave(group); /* which may free it */
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a handle on %d ranks", (int)n);
    }
    t->base.ops = &xdi_threads_ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = group->size;
    t->base.world_ranks = group->world_ranks;
    t->group = group;
    t->slot = &group->slots[rank];
    t->pieces = pieces;
    t->leaves = leaves;
    *out = &t->base;
    return XD_OK;
}

/* ---- worlds ---- */

/* NULL: no memory. */
static xd_thread_world *xdi_threads_world_new(const xd_allocator *allocator, int ranks) {
    const size_t n = (size_t)ranks;
    xd_thread_world *world = (xd_thread_world *)allocator->allocate(allocator->user, sizeof *world);
    if (!world) return NULL;
    memset(world, 0, sizeof *world);
    world->allocator = *allocator;
    if (pthread_mutex_init(&world->lock, NULL) != 0) {
        allocator->release(allocator->user, world);
        return NULL;
    }
    world->gone = (uint32_t *)xdi_threads_allocate(world, n * (2 * sizeof *world->gone + sizeof(int)));
    world->root = xdi_threads_group_create(world, ranks);
    if (!world->gone || !world->root) {
        xd_thread_world_destroy(world);
        return NULL;
    }
    world->asks = world->gone + n;
    world->before = (int *)(void *)(world->asks + n);
    for (int r = 0; r < ranks; r++) world->root->world_ranks[r] = r;
    return world;
}

XD_API xd_result xd_thread_world_create(xd_ctx *ctx, int ranks, xd_thread_world **out) {
    XD_REQUIRE(ctx, ranks >= 1, XD_ERROR_ARGUMENT, "a world of %d ranks", ranks);
    xd_thread_world *world = xdi_threads_world_new(&xd_ctx_settings(ctx)->allocator, ranks);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", ranks);
    *out = world;
    return XD_OK;
}

XD_API void xd_thread_world_destroy(xd_thread_world *world) {
    while (world) {
        xd_thread_world *next = world->next;
        while (world->groups) {
            xdi_threads_group *group = world->groups;
            world->groups = group->next;
            xdi_threads_group_free(group);
        }
        pthread_mutex_destroy(&world->lock);
        xdi_threads_free(world, world->gone);
        xdi_threads_free(world, world);
        world = next;
    }
}

XD_API xd_result xd_thread_world_join(xd_thread_world *world, xd_ctx *ctx, int rank, xd_comm **out) {
    XD_REQUIRE(ctx, rank >= 0 && rank < world->root->size, XD_ERROR_ARGUMENT, "rank %d is outside [0, %d)",
               rank, world->root->size);
    XD_REQUIRE(ctx, __atomic_exchange_n(&world->root->slots[rank].joined, 1u, __ATOMIC_ACQ_REL) == 0,
               XD_ERROR_STATE, "rank %d has joined before", rank);
    xd_ctx_set_rank(ctx, rank);
    xd_transport *transport = NULL;
    xd_comm *comm = NULL;
    xd_result result = xdi_threads_attach(ctx, world->root, rank, &transport);
    if (result == XD_OK) result = xd_comm_create(ctx, transport, &comm);
    if (result != XD_OK) {
        xdi_threads_break(world, XD_ERROR_PEER, rank);
        return result;
    }
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    result = xdi_threads_round((xdi_threads *)transport, deadline);
    if (result != XD_OK) {
        xd_comm_destroy(comm);
        return result;
    }
    *out = comm;
    return XD_OK;
}

/* ---- the runner ---- */

typedef struct xdi_threads_run {
    xd_thread_world *world;
    const xd_ctx_desc *desc;
    xd_rank_function function;
    void *argument;
    int rank;
    pthread_t thread;
    xd_result result;
    xd_error error;
} xdi_threads_run;

static void xdi_threads_set_error(xdi_threads_run *run, const xd_error *error, const char *message) {
    run->error.rank = run->rank;
    run->error.culprit = -1;
    if (error && error->result == run->result)
        run->error = *error;
    else
        strncpy(run->error.message, message, sizeof run->error.message - 1);
    run->error.result = run->result;
}

static void *xdi_threads_main(void *argument) {
    xdi_threads_run *run = (xdi_threads_run *)argument;
    xd_ctx *ctx = NULL;
    xd_comm *comm = NULL;
    run->result = xd_ctx_create(run->desc, &ctx);
    if (run->result != XD_OK) {
        xdi_threads_set_error(run, NULL, "the context of a rank could not be created");
        xdi_threads_break(run->world, XD_ERROR_PEER, run->rank);
        return NULL;
    }
    run->result = xd_thread_world_join(run->world, ctx, run->rank, &comm);
    if (run->result == XD_OK) run->result = run->function(comm, run->argument);
    if (run->result != XD_OK) {
        xdi_threads_set_error(run, xd_last_error(ctx), "the rank function returned an error of its own");
        xdi_threads_break(run->world, XD_ERROR_PEER, run->rank);
    }
    xd_comm_destroy(comm);
    xd_ctx_destroy(ctx);
    return NULL;
}

/* The run whose failure came first: PEER and TIMEOUT are consequences of another rank's failure, if there is one. */
static const xdi_threads_run *xdi_threads_culprit(const xdi_threads_run *runs, int ranks) {
    const xdi_threads_run *found = NULL;
    int best = 0;
    for (int r = 0; r < ranks; r++) {
        const xd_result result = runs[r].result;
        const int weight = result == XD_OK              ? 0
                           : result == XD_ERROR_PEER    ? 1
                           : result == XD_ERROR_TIMEOUT ? 2
                                                        : 3;
        if (weight <= best) continue;
        best = weight;
        found = &runs[r];
    }
    return found;
}

static xd_result xdi_threads_run_all(xd_ctx *ctx, xdi_threads_run *runs, int ranks, xd_error *error) {
    int started = 1;
    while (started < ranks &&
           pthread_create(&runs[started].thread, NULL, xdi_threads_main, &runs[started]) == 0)
        started++;
    if (started < ranks) xdi_threads_break(runs[0].world, XD_ERROR_PEER, started);
    xdi_threads_main(&runs[0]);
    for (int r = 1; r < started; r++) pthread_join(runs[r].thread, NULL);
    if (started < ranks) {
        const xd_result result =
            XD_FAIL(ctx, XD_ERROR_MEMORY, "the system has no thread for rank %d", started);
        if (error) *error = *xd_last_error(ctx);
        return result;
    }
    const xdi_threads_run *culprit = xdi_threads_culprit(runs, ranks);
    if (!culprit) return XD_OK;
    if (error) *error = culprit->error;
    return culprit->result;
}

XD_API xd_result xd_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                                xd_error *error) {
    xd_ctx *ctx = NULL;
    xd_thread_world *world = NULL;
    xdi_threads_run *runs = NULL;
    xd_result result = xd_ctx_create(desc, &ctx);
    if (result != XD_OK) return result;
    result = xd_thread_world_create(ctx, ranks, &world);
    if (result == XD_OK) {
        runs = (xdi_threads_run *)xd_allocate(ctx, (size_t)ranks * sizeof *runs);
        if (!runs) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %d ranks", ranks);
    }
    if (result != XD_OK && error) *error = *xd_last_error(ctx);
    for (int r = 0; runs && r < ranks; r++) {
        runs[r].world = world;
        runs[r].desc = desc;
        runs[r].function = function;
        runs[r].argument = argument;
        runs[r].rank = r;
    }
    if (runs) result = xdi_threads_run_all(ctx, runs, ranks, error);
    xd_release(ctx, runs);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
    return result;
}
