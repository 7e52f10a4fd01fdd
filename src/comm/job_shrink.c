/* How the processes that are left of a broken world make the next one. Each says in the old world that it asks for that. Whoever
 * sees that all who live have asked, or that its time is over, prepares memory for those that have, with their list in it,
 * and offers it by one atomic exchange: the first offer holds for everybody. So there is nothing that ranks could see
 * differently, and nobody whose death others would have to wait for.
 *
 * The new world is in regions of the same file that nobody else has mapped: a process that was stopped, and wakes up in the old
 * world, writes there. Ranks keep the locks by which others see that they live. */

#include "comm/job.h"

#include <string.h>
#include <sys/mman.h>

enum { XDI_SHRINK_NO_MEMORY = XDI_JOB_REGIONS + 1 /* the offer of who had none; others are 1 + a region */ };

/* Those that ask, by their locks. */
typedef struct xdi_shrink_list {
    int size;
    unsigned char locks[XD_NODE_RANKS_MAX];
} xdi_shrink_list;

/* ---- offering ---- */

/* False when one lives that does not ask. */
static bool xdi_shrink_count(const xdi_job *job, xdi_shrink_list *asking) {
    bool all = true;
    memset(asking, 0, sizeof *asking);
    for (int r = 0; r < job->size; r++) {
        const bool asks = __atomic_load_n(&job->world->members[r].asks, __ATOMIC_SEQ_CST) != 0;
        if (xdi_job_has_left(job, r) || xdi_job_has_died(job, r)) continue;
        all = all && asks;
        if (asks) asking->locks[asking->size++] = job->world->locks[r];
    }
    return all;
}

/* Two regions, for the world and for its first group. */
static uint32_t xdi_shrink_prepare(xdi_job *old, xdi_job_bytes *bytes, const xdi_shrink_list *asking,
                                   int regions[2]) {
    const int n = asking->size;
    regions[1] = -1;
    regions[0] = xdi_job_take(old, sizeof(xdi_job_world), n);
    if (regions[0] >= 0) regions[1] = xdi_job_take(old, bytes(old, n), n);
    void *memory = regions[1] >= 0 ? xdi_job_map(old, regions[0], sizeof(xdi_job_world)) : NULL;
    if (!memory) return XDI_SHRINK_NO_MEMORY;
    xdi_job_world *world = (xdi_job_world *)memory;
    world->size = n;
    world->group = regions[1];
    memcpy(world->locks, asking->locks, sizeof world->locks);
    munmap(memory, sizeof *world);
    return (uint32_t)regions[0] + 1u;
}

static void xdi_shrink_offer(xdi_job *old, xdi_job_bytes *bytes, const xdi_shrink_list *asking) {
    int regions[2];
    uint32_t none = 0;
    const uint32_t offer = xdi_shrink_prepare(old, bytes, asking, regions);
    const bool holds = __atomic_compare_exchange_n(&old->world->next, &none, offer, false, __ATOMIC_SEQ_CST,
                                                   __ATOMIC_SEQ_CST);
    for (int i = 0; i < 2 && !(holds && offer != XDI_SHRINK_NO_MEMORY); i++) xdi_job_drop(old, regions[i]);
    xdi_job_ring(&old->world->bell);
}

/* Asks, and waits until there is an offer: returned. */
static uint32_t xdi_shrink_ask(xd_ctx *ctx, xdi_job *old, xdi_job_bytes *bytes, double deadline) {
    xdi_job_world *world = old->world;
    xdi_shrink_list asking;
    old->asked = true;
    __atomic_store_n(&world->members[old->rank].asks, 1u, __ATOMIC_SEQ_CST);
    xdi_job_ring(&world->bell);
    for (;;) {
        const uint32_t rings = __atomic_load_n(&world->bell.rings, __ATOMIC_SEQ_CST);
        __atomic_store_n(&world->bell.sleepers, 1u, __ATOMIC_SEQ_CST);
        const uint32_t offer = __atomic_load_n(&world->next, __ATOMIC_SEQ_CST);
        if (offer) return offer;
        if (xdi_shrink_count(old, &asking) || xd_now(ctx) >= deadline)
            xdi_shrink_offer(old, bytes, &asking);
        else
            xdi_job_sleep(&world->bell, rings);
    }
}

/* ---- following ---- */

/* This rank's end of the world in a region. It uses the file that the first world has opened. */
static xd_result xdi_shrink_enter(xd_ctx *ctx, xdi_job *old, int region, xdi_job *job) {
    const unsigned char mine = old->world->locks[old->rank];
    job->world = (xdi_job_world *)xdi_job_map(old, region, sizeof *job->world);
    XD_REQUIRE(ctx, job->world, XD_ERROR_MEMORY, "%zu bytes that ranks share cannot be mapped",
               sizeof *job->world);
    job->size = job->world->size;
    while (job->rank < job->size && job->world->locks[job->rank] != mine) job->rank++;
    if (job->rank == job->size) {
        munmap(job->world, sizeof *job->world);
        return XD_FAIL_CULPRIT(ctx, XD_ERROR_PEER, old->rank,
                               "rank %d came after the deadline: %d of %d ranks go on without it", old->rank,
                               job->size, old->size);
    }
    job->head = old->head;
    job->file = old->file;
    job->first = old->first ? old->first : old;
    job->region = region;
    job->holders = 1;
    job->crowded = xdi_job_is_crowded(job->size);
    xdi_job_hold(job->first);
    return XD_OK;
}

/* For others not to wait for this rank. */
static xd_result xdi_shrink_leave(xd_ctx *ctx, xdi_job *old) {
    __atomic_store_n(&old->world->members[old->rank].gone, 1u, __ATOMIC_SEQ_CST);
    return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for what is left of %d ranks", old->size);
}

XD_PRIVATE xd_result xdi_job_shrink(xd_ctx *ctx, xdi_job *old, xdi_job_bytes *bytes, double deadline,
                                    xdi_job **out) {
    XD_REQUIRE(ctx, xdi_job_failure(old), XD_ERROR_STATE, "nothing has broken this world of %d ranks",
               old->size);
    XD_REQUIRE(ctx, !old->asked && !xdi_job_has_left(old, old->rank), XD_ERROR_STATE,
               "rank %d has %s this world of %d ranks already", old->rank,
               old->asked ? "gone on from" : "left", old->size);
    xdi_job *job = (xdi_job *)xd_allocate(ctx, sizeof *job);
    if (!job) return xdi_shrink_leave(ctx, old);
    const uint32_t offer = xdi_shrink_ask(ctx, old, bytes, deadline);
    const xd_result result =
        offer == XDI_SHRINK_NO_MEMORY
            ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room in /dev/shm for a world of what is left of %d ranks",
                      old->size)
            : xdi_shrink_enter(ctx, old, (int)offer - 1, job);
    if (result == XD_OK)
        *out = job;
    else
        xd_release(ctx, job);
    return result;
}
