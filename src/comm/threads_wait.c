/* How the ranks that are threads wait for one another, and what they say when that ends early. */

#include "comm/threads_internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    XDI_THREADS_REST = 100, /* waits without polling after polling in vain */
    XDI_THREADS_NAP = 50000 /* nanoseconds */
};

/* ---- failure ---- */

/* Only the first failure is recorded; later ones are its consequences. */
XD_PRIVATE void xdi_threads_break(xd_thread_world *world, xd_result result, int culprit) {
    uint64_t healthy = 0;
    const uint64_t failure = ((uint64_t)result << 32) | (uint64_t)(uint32_t)(culprit + 1);
    __atomic_compare_exchange_n(&world->failure, &healthy, failure, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}

XD_PRIVATE uint64_t xdi_threads_failure(const xd_thread_world *world) {
    return __atomic_load_n(&world->failure, __ATOMIC_SEQ_CST);
}

/* Waits until no peer accesses this rank's memory: see the top of threads.c. */
XD_PRIVATE void xdi_threads_drain(const xdi_threads *t) {
    for (int r = 0; r < t->group->size; r++)
        while (r != t->base.rank && __atomic_load_n(&t->group->slots[r].busy, __ATOMIC_SEQ_CST))
            sched_yield();
}

/* Before this rank clears `busy`, its device must have completed its accesses. Only in a broken world the host waits for
 * a device. */
XD_PRIVATE void xdi_threads_settle(const xdi_threads *t) {
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
XD_PRIVATE xd_result xdi_threads_report(const xdi_threads *t, bool waiting) {
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

XD_PRIVATE bool xdi_threads_has_left(const xdi_threads_group *group, int rank) {
    return __atomic_load_n(&group->slots[rank].left, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(&group->world->gone[group->world_ranks[rank]], __ATOMIC_ACQUIRE);
}

/* ---- waiting ---- */

/* The turn at which a wait begins. Polling pays only while the other rank runs at the same time. The number of cores does
 * not decide that: the system may run two threads on one of many. So a rank that has polled in vain does not poll for some
 * waits, then tries again. */
XD_PRIVATE int xdi_threads_patience(xdi_threads *t) {
    if (t->rest == 0) return 0;
    t->rest--;
    return XDI_THREADS_SPIN;
}

/* Polls while both may be running, then yields, then sleeps. True when the caller should check the clock: always after
 * yielding the core, not after a mere poll. */
XD_PRIVATE bool xdi_threads_pause(xdi_threads *t, int turn) {
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
XD_PRIVATE xd_result xdi_threads_wait(xdi_threads *t, const uint64_t *counter, uint64_t target, int rank,
                                      double deadline) {
    const xdi_threads_group *group = t->group;
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) return XD_OK;
    for (int turn = xdi_threads_patience(t); __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target;
         turn += turn < XDI_THREADS_YIELD) {
        /* It may have arrived just before it left or failed: read the counter again after seeing that. */
        if (xdi_threads_failure(group->world) && __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target)
            return xdi_threads_report(t, true);
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
XD_PRIVATE xd_result xdi_threads_round(xdi_threads *t, double deadline) {
    __atomic_store_n(&t->slot->arrived, ++t->round, __ATOMIC_RELEASE);
    for (int r = 0; r < t->group->size; r++)
        if (r != t->base.rank)
            XD_TRY(xdi_threads_wait(t, &t->group->slots[r].arrived, t->round, r, deadline));
    return XD_OK;
}
