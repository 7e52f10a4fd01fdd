/* How the ranks that are processes wait for one another, and what they say when that ends early. */

#include "comm/processes_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- failure ---- */

/* World ranks of the group that have not entered this round; `culprit` alone when there are none. */
static bool xdi_processes_missing(const xdi_processes *t, int culprit, char *text, size_t size) {
    bool member = false, missed = false;
    size_t used = 0;
    for (int r = 0; r < t->base.size; r++) {
        const bool is_culprit = t->world_ranks[r] == culprit;
        member = member || is_culprit;
        if (__atomic_load_n(&t->seats[r].flag[t->round & 1].arrived, __ATOMIC_ACQUIRE) >= t->round) continue;
        missed = missed || is_culprit;
        if (used + 16 < size)
            used += (size_t)snprintf(text + used, size - used, used ? ",%d" : "%d", t->world_ranks[r]);
    }
    if (used > 0) return missed;
    snprintf(text, size, "%d", culprit);
    return member;
}

/* Reports the broken world as comm/threads_wait.c does. */
XD_PRIVATE xd_result xdi_processes_report(const xdi_processes *t, bool waiting) {
    const uint64_t failure = xdi_job_failure(t->job);
    const xd_result cause = (xd_result)(failure >> 32);
    const int culprit = (int)(failure & 0xffffffffu) - 1, me = t->world_ranks[t->base.rank];
    char missing[160];
    if (cause == XD_ERROR_TIMEOUT && culprit == me)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit,
                               "rank %d came after the deadline: the world is broken", me);
    if (cause == XD_ERROR_TIMEOUT && waiting && xdi_processes_missing(t, culprit, missing, sizeof missing))
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_TIMEOUT, culprit,
                               "rank%s %s did not arrive before the deadline",
                               strchr(missing, ',') ? "s" : "", missing);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit, "rank %d %s: the world is broken", culprit,
                           cause == XD_ERROR_TIMEOUT ? "did not arrive before the deadline"
                                                     : "failed, died or left");
}

XD_PRIVATE bool xdi_processes_has_left(const xdi_processes *t, int rank) {
    return __atomic_load_n(&t->seats[rank].left, __ATOMIC_ACQUIRE) != 0;
}

/* ---- waiting ---- */

XD_PRIVATE xd_result xdi_processes_await(xdi_processes *t, const uint64_t *counter, uint64_t target, int rank,
                                         double deadline) {
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) return XD_OK;
    xdi_job_wait wait = xdi_job_wait_begin(t->job, &t->group->bell, deadline);
    bool whole = true;
    while (whole && __atomic_load_n(counter, __ATOMIC_SEQ_CST) < target)
        whole =
            xdi_job_turn(t->base.ctx, t->job, &wait, t->world_ranks[rank], xdi_processes_has_left(t, rank));
    xdi_job_wait_end(t->job, &wait);
    /* It may have arrived just before the world broke. */
    return whole || __atomic_load_n(counter, __ATOMIC_SEQ_CST) >= target ? XD_OK
                                                                         : xdi_processes_report(t, true);
}

XD_PRIVATE void xdi_processes_tell(const xdi_processes *t, uint64_t *counter, uint64_t value) {
    __atomic_store_n(counter, value, __ATOMIC_SEQ_CST);
    xdi_job_ring(&t->group->bell);
}
