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
 * not take long, because copying never waits.
 *
 * Here are groups, handles and worlds; threads_wait.c has the rounds and what ends a wait, threads_move.c what a collective
 * moves, threads_messages.c messages between two ranks. */

#include "comm/threads_internal.h"

#include <string.h>

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
                                                  xdi_threads_shrink,
                                                  NULL,
                                                  NULL };

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

XD_API xd_result xd_thread_world_create(xd_ctx *ctx, const xd_thread_world_desc *desc,
                                        xd_thread_world **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    const int ranks = desc->ranks;
    XD_REQUIRE(ctx, ranks >= 1, XD_ERROR_ARGUMENT, "a world of %d ranks", ranks);
    xd_thread_world *world = xdi_threads_world_new(&xd_ctx_settings(ctx)->allocator, ranks);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", ranks);
    XDI_BORN(xd_thread_world, ctx, world);
    *out = world;
    return XD_OK;
}

XD_API void xd_thread_world_destroy(xd_thread_world *world) {
    if (world && XDI_IS_GONE(xd_thread_world, world)) return;
    XDI_DEAD(world);
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

/* After the first round, which all have entered. Every rank reads the same. */
static xd_result xdi_threads_compare(xd_ctx *ctx, const xdi_threads_group *group) {
    for (int r = 1; r < group->size; r++)
        XD_TRY(xd_float_state_compare(ctx, r, group->slots[r].floats, group->slots[0].floats));
    return XD_OK;
}

XD_API xd_result xd_thread_world_join(xd_thread_world *world, xd_ctx *ctx, int rank, xd_comm **out) {
    XDI_LIVE(xd_thread_world, world);
    XDI_GIVEN(ctx, world, ctx, out);
    XD_REQUIRE(ctx, rank >= 0 && rank < world->root->size, XD_ERROR_ARGUMENT, "rank %d is outside [0, %d)",
               rank, world->root->size);
    XD_REQUIRE(ctx, __atomic_exchange_n(&world->root->slots[rank].joined, 1u, __ATOMIC_ACQ_REL) == 0,
               XD_ERROR_STATE, "rank %d has joined before", rank);
    xd_ctx_set_rank(ctx, rank);
    world->root->slots[rank].floats = xdi_ctx_float_state(ctx);
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
    if (result == XD_OK) result = xdi_threads_compare(ctx, world->root);
    if (result != XD_OK) {
        xd_comm_destroy(comm);
        return result;
    }
    *out = comm;
    return XD_OK;
}
