/* The processes of a job on one machine. They meet in a file in memory: whoever comes first makes it, the last one adds the
 * memory that the world needs and removes the name. What ends that early is written into the file, and the name is removed too.
 *
 * Rank r holds a lock on byte r of the file as long as it is in the world (see comm/node.c), and whoever changes who is in the file
 * holds one more. No other state has an owner, so a process may die at any moment: who waits for it finds its lock free.
 *
 * All memory that ranks share later is in regions of the same file, mapped one by one. Ranks that wait poll some time, then
 * sleep in a futex for a fiftieth of a second at a time: a process that dies rings no bell. */

#include "comm/job.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__) && (defined(_DEFAULT_SOURCE) || defined(_GNU_SOURCE))
#    include <sys/syscall.h>
#endif

enum {
    XDI_JOB_GUARD = XD_NODE_RANKS_MAX, /* the byte that is locked by who changes the members */
    XDI_JOB_SPIN = 800,                /* polls, where there is a core for each rank */
    XDI_JOB_YIELD = 900,               /* these and yields, where there is none */
    XDI_JOB_SLEEP = 20000000,          /* nanoseconds, if nobody rings */
    XDI_JOB_NAP = 200000, /* nanoseconds, where there is no futex, and before the file is there */
    XDI_JOB_SAMPLES = 20  /* half sleeps after which a rank that did not move is stopped */
};

static void xdi_job_nap(long nanoseconds) {
    const struct timespec nap = { 0, nanoseconds };
    nanosleep(&nap, NULL);
}

/* ---- bells ---- */

XD_PRIVATE void xdi_job_sleep(xdi_job_bell *bell, uint32_t rings) {
#if defined(SYS_futex)
    enum { XDI_FUTEX_WAIT = 0 };
    const struct timespec most = { 0, XDI_JOB_SLEEP };
    syscall(SYS_futex, &bell->rings, XDI_FUTEX_WAIT, rings, &most, NULL, 0);
#else
    if (__atomic_load_n(&bell->rings, __ATOMIC_SEQ_CST) == rings) xdi_job_nap(XDI_JOB_NAP);
#endif
}

/* Who sleeps has set `sleepers`, after reading `rings`, and looked again at what it waits for: then either it has seen that, or
 * this sees `sleepers`. */
XD_PRIVATE void xdi_job_ring(xdi_job_bell *bell) {
    if (!__atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST)) return;
    __atomic_store_n(&bell->sleepers, 0u, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&bell->rings, 1u, __ATOMIC_SEQ_CST);
#if defined(SYS_futex)
    enum { XDI_FUTEX_WAKE = 1 };
    syscall(SYS_futex, &bell->rings, XDI_FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* ---- failure ---- */

XD_PRIVATE void xdi_job_break(xdi_job *job, xd_result result, int culprit) {
    uint64_t healthy = 0;
    const uint64_t failure = ((uint64_t)result << 32) | (uint64_t)(uint32_t)(culprit + 1);
    __atomic_compare_exchange_n(&job->world->failure, &healthy, failure, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}

XD_PRIVATE uint64_t xdi_job_failure(const xdi_job *job) {
    return __atomic_load_n(&job->world->failure, __ATOMIC_SEQ_CST);
}

XD_PRIVATE bool xdi_job_has_died(const xdi_job *job, int rank) {
    return rank != job->rank && !xdi_node_is_held(job->file, job->world->locks[rank]);
}

XD_PRIVATE bool xdi_job_has_left(const xdi_job *job, int rank) {
    return __atomic_load_n(&job->world->members[rank].gone, __ATOMIC_ACQUIRE) != 0;
}

static void xdi_job_beat(xdi_job *job) {
    __atomic_add_fetch(&job->world->members[job->rank].beats, 1u, __ATOMIC_RELAXED);
}

/* Whether a rank that says that it waits takes turns in its wait. Others may ask that of this one meanwhile. */
static bool xdi_job_moves(xdi_job *job, int rank) {
    const xdi_job_member *member = &job->world->members[rank];
    const uint32_t before = __atomic_load_n(&member->beats, __ATOMIC_RELAXED);
    for (int i = 0; i < XDI_JOB_SAMPLES; i++) {
        if (rank == job->rank || __atomic_load_n(&member->beats, __ATOMIC_RELAXED) != before) return true;
        xdi_job_nap(XDI_JOB_SLEEP / 2);
        xdi_job_beat(job);
    }
    return false;
}

/* Whom everybody waits for when `rank` did not come: a rank that is waiting itself is not the late one, unless it was stopped
 * there. */
static int xdi_job_root(xdi_job *job, int rank) {
    int root = rank;
    for (int i = 0; i < job->size; i++) {
        const int next = (int)__atomic_load_n(&job->world->members[root].waits_for, __ATOMIC_ACQUIRE) - 1;
        if (next < 0 || next >= job->size || next == root || !xdi_job_moves(job, root)) return root;
        root = next;
    }
    return rank; /* they wait for one another */
}

/* ---- waiting ---- */

XD_PRIVATE bool xdi_job_is_crowded(int ranks) {
    return (long)ranks > sysconf(_SC_NPROCESSORS_ONLN);
}

/* Polling pays only while the other rank runs at the same time. With fewer cores than ranks, yielding lets it run, and costs less
 * than waking up; with enough of them, who has polled in vain waits for one that has work, or whose core others use. */
XD_PRIVATE xdi_job_wait xdi_job_wait_begin(const xdi_job *job, xdi_job_bell *bell, double deadline) {
    const xdi_job_wait wait = { bell, deadline, job->crowded ? XDI_JOB_SPIN : 0, false, 0, XD_OK, false };
    return wait;
}

XD_PRIVATE void xdi_job_wait_end(xdi_job *job, xdi_job_wait *wait) {
    if (wait->tells) __atomic_store_n(&job->world->members[job->rank].waits_for, 0u, __ATOMIC_RELEASE);
    wait->tells = false;
}

static void xdi_job_rest(xdi_job *job, xdi_job_wait *wait, int rank) {
    xdi_job_member *mine = &job->world->members[job->rank];
    xdi_job_beat(job);
    if (job->crowded && wait->turn < XDI_JOB_YIELD) {
        wait->turn++;
        sched_yield();
    } else if (!wait->armed) {
        wait->tells = wait->armed = true;
        __atomic_store_n(&mine->waits_for, (uint32_t)rank + 1u, __ATOMIC_RELEASE);
        wait->rings = __atomic_load_n(&wait->bell->rings, __ATOMIC_SEQ_CST);
        __atomic_store_n(&wait->bell->sleepers, 1u, __ATOMIC_SEQ_CST);
    } else {
        wait->armed = false;
        xdi_job_sleep(wait->bell, wait->rings);
        if (xdi_job_has_died(job, rank)) wait->excuse = XD_ERROR_PEER;
    }
}

XD_PRIVATE bool xdi_job_turn(xd_ctx *ctx, xdi_job *job, xdi_job_wait *wait, int rank, bool gone) {
    if (xdi_job_failure(job)) return false;
    if (wait->excuse != XD_OK) {
        const bool late = wait->excuse == XD_ERROR_TIMEOUT;
        xdi_job_break(job, wait->excuse, late ? xdi_job_root(job, rank) : rank);
        return false;
    }
    if (wait->turn < XDI_JOB_SPIN) {
        wait->turn++;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        return true;
    }
    if (gone || xdi_job_has_left(job, rank))
        wait->excuse = XD_ERROR_PEER;
    else if (xd_now(ctx) >= wait->deadline)
        wait->excuse = XD_ERROR_TIMEOUT;
    else
        xdi_job_rest(job, wait, rank);
    return true;
}

/* ---- regions ---- */

static size_t xdi_job_whole_pages(size_t bytes) {
    return (bytes + XDI_JOB_PAGE - 1) / XDI_JOB_PAGE * XDI_JOB_PAGE;
}

XD_PRIVATE void *xdi_job_map(const xdi_job *job, int region, size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, job->file,
                        (off_t)job->head->regions[region].begin);
    return memory == MAP_FAILED ? NULL : memory;
}

XD_PRIVATE void xdi_job_give(const xdi_job *job, int region, void *memory, size_t bytes) {
    if (memory) munmap(memory, bytes);
    __atomic_sub_fetch(&job->head->regions[region].holders, 1u, __ATOMIC_ACQ_REL);
}

XD_PRIVATE void xdi_job_drop(const xdi_job *job, int region) {
    if (region >= 0) __atomic_store_n(&job->head->regions[region].holders, 0u, __ATOMIC_RELEASE);
}

/* Appends a region to the file. */
static int xdi_job_append(xdi_job *job, size_t bytes, int holders) {
    const uint32_t index = __atomic_fetch_add(&job->head->region_count, 1u, __ATOMIC_ACQ_REL);
    if (index >= XDI_JOB_REGIONS) {
        __atomic_sub_fetch(&job->head->region_count, 1u, __ATOMIC_ACQ_REL);
        return -1;
    }
    xdi_job_region *region = &job->head->regions[index];
    region->begin = __atomic_fetch_add(&job->head->bytes, (uint64_t)bytes, __ATOMIC_ACQ_REL);
    __atomic_store_n(&region->holders, (uint32_t)holders, __ATOMIC_RELEASE);
    if (!xdi_node_fill(job->file, region->begin, bytes)) return -1;
    __atomic_store_n(&region->bytes, (uint64_t)bytes, __ATOMIC_RELEASE);
    return (int)index;
}

/* Zeros a region that others have used. */
static bool xdi_job_wipe(const xdi_job *job, int region, size_t bytes) {
    void *memory = xdi_job_map(job, region, bytes);
    if (!memory) return false;
    memset(memory, 0, bytes);
    munmap(memory, bytes);
    return true;
}

XD_PRIVATE int xdi_job_take(xdi_job *job, size_t wanted, int holders) {
    const size_t bytes = xdi_job_whole_pages(wanted);
    const uint32_t count = __atomic_load_n(&job->head->region_count, __ATOMIC_ACQUIRE);
    for (uint32_t i = 1; i < count && i < XDI_JOB_REGIONS; i++) {
        xdi_job_region *region = &job->head->regions[i];
        uint32_t none = 0;
        if (__atomic_load_n(&region->bytes, __ATOMIC_ACQUIRE) != bytes) continue;
        if (!__atomic_compare_exchange_n(&region->holders, &none, (uint32_t)holders, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE))
            continue;
        if (xdi_job_wipe(job, (int)i, bytes)) return (int)i;
        __atomic_store_n(&region->holders, 0u, __ATOMIC_RELEASE);
        return -1;
    }
    return xdi_job_append(job, bytes, holders);
}

/* ---- joining ---- */

/* What this rank brings. */
typedef struct xdi_job_entry {
    xd_ctx *ctx;
    const xd_node_desc *desc;
    size_t region_bytes;
    double deadline;
} xdi_job_entry;

/* Waits for the lock by which members are changed, which is held for moments unless its process has been stopped. */
static bool xdi_job_guard(const xdi_job *job, xd_ctx *ctx, double deadline) {
    while (!xdi_node_hold(job->file, XDI_JOB_GUARD)) {
        if (xd_now(ctx) >= deadline) return false;
        xdi_job_nap(XDI_JOB_NAP);
    }
    return true;
}

/* Ends the job for all that join it. With the guard. */
XD_PRINTF(4, 5)
static void xdi_job_refuse(xdi_job *job, xd_result result, int culprit, const char *format, ...) {
    xdi_job_head *head = job->head;
    va_list arguments;
    unlink(job->path);
    if (head->refused) return;
    va_start(arguments, format);
    vsnprintf(head->text, sizeof head->text, format, arguments);
    va_end(arguments);
    head->culprit = culprit;
    __atomic_store_n(&head->refused, (uint32_t)result, __ATOMIC_SEQ_CST);
    xdi_job_ring(&head->world.bell);
}

static xd_result xdi_job_refusal(const xdi_job *job, xd_ctx *ctx) {
    const xd_result result = (xd_result)__atomic_load_n(&job->head->refused, __ATOMIC_ACQUIRE);
    return XD_FAIL_CULPRIT(ctx, result, job->head->culprit, "%s", job->head->text);
}

static void xdi_job_leave_file(xdi_job *job) {
    if (job->head) munmap(job->head, sizeof *job->head);
    if (job->file >= 0) close(job->file);
    job->head = NULL;
    job->file = -1;
}

/* Opens the file of the name, which may be new. */
static xd_result xdi_job_open(xdi_job *job, xd_ctx *ctx) {
    struct stat status;
    job->file = open(job->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    const int error = errno;
    const bool there = job->file >= 0 ? fstat(job->file, &status) == 0 : lstat(job->path, &status) == 0;
    if (there && (status.st_uid != geteuid() || !S_ISREG(status.st_mode) || (status.st_mode & 077) != 0))
        return XD_FAIL(
            ctx, XD_ERROR_STATE,
            "%s is of user %lld with mode %o: a job of user %lld needs a file of its own, of mode 600",
            job->path, (long long)status.st_uid, (unsigned)status.st_mode & 07777u, (long long)geteuid());
    XD_REQUIRE(ctx, job->file >= 0, XD_ERROR_IO, "%s cannot be made: %s", job->path, strerror(error));
    return XD_OK;
}

/* Maps the beginning of the file, and fills it in if this rank is the first. With the guard. False: no memory. */
static bool xdi_job_map_head(xdi_job *job, const xd_node_desc *desc, off_t bytes) {
    const size_t most = xdi_job_whole_pages(sizeof *job->head);
    const bool is_new = bytes < (off_t)most;
    if (is_new && !xdi_node_fill(job->file, 0, most)) return false;
    void *memory = mmap(NULL, sizeof *job->head, PROT_READ | PROT_WRITE, MAP_SHARED, job->file, 0);
    if (memory == MAP_FAILED) return false;
    job->head = (xdi_job_head *)memory;
    job->world = &job->head->world;
    if (job->head->layout) return true;
    job->head->slot_bytes = desc->slot_bytes;
    job->head->size = job->head->world.size = desc->size;
    for (int r = 0; r < desc->size; r++) job->head->world.locks[r] = (unsigned char)r;
    job->head->bytes = most;
    job->head->layout = sizeof *job->head;
    return true;
}

/* How many of those that have joined live; *dead receives one that does not, or -1. */
static int xdi_job_count(const xdi_job *job, int *dead) {
    int alive = 0;
    *dead = -1;
    for (int r = 0; r < XD_NODE_RANKS_MAX; r++) {
        if (job->head->world.members[r].process == 0) continue;
        if (job->head->world.members[r].process != (int64_t)getpid() && !xdi_node_is_held(job->file, r))
            *dead = r;
        else
            alive++;
    }
    return alive;
}

/* Whether this rank may join those that are in the file. With the guard. */
static xd_result xdi_job_fits(xdi_job *job, const xdi_job_entry *e, int dead) {
    const xd_node_desc *d = e->desc;
    const xdi_job_head *head = job->head;
    const long long mine = (long long)getpid();
    int other = 0; /* a rank that this process is already */
    while (other < XD_NODE_RANKS_MAX && head->world.members[other].process != mine) other++;
    if (other < XD_NODE_RANKS_MAX) /* its lock goes with this file */
        xdi_job_refuse(job, XD_ERROR_STATE, d->rank,
                       "process %lld is rank %d of job %s, and cannot be rank %d too", mine, other, d->name,
                       d->rank);
    else if (head->size != d->size)
        xdi_job_refuse(job, XD_ERROR_MISMATCH, d->rank,
                       "rank %d says that job %s has %d ranks, others say %d", d->rank, d->name, d->size,
                       (int)head->size);
    else if (head->slot_bytes != (uint64_t)d->slot_bytes)
        xdi_job_refuse(job, XD_ERROR_MISMATCH, d->rank,
                       "slot_bytes is %zu on rank %d, and %" PRIu64 " on others", d->slot_bytes, d->rank,
                       head->slot_bytes);
    else if (dead >= 0)
        xdi_job_refuse(job, XD_ERROR_PEER, dead, "rank %d has died while ranks joined job %s", dead, d->name);
    else if (head->world.members[d->rank].process)
        xdi_job_refuse(job, XD_ERROR_STATE, d->rank,
                       "rank %d has joined job %s twice: processes %lld and %lld", d->rank, d->name,
                       (long long)head->world.members[d->rank].process, mine);
    else
        return XD_OK;
    return xdi_job_refusal(job, e->ctx);
}

/* The last rank adds the world's memory. With the guard. */
static void xdi_job_complete(xdi_job *job, const xdi_job_entry *e) {
    if (xdi_job_append(job, xdi_job_whole_pages(e->region_bytes), job->size) != 0) {
        xdi_job_refuse(job, XD_ERROR_MEMORY, -1, "no room in /dev/shm for %zu bytes that %d ranks share",
                       e->region_bytes, job->size);
        return;
    }
    unlink(job->path);
    __atomic_store_n(&job->head->complete, 1u, __ATOMIC_SEQ_CST);
    xdi_job_ring(&job->head->world.bell);
}

/* Becomes a member. With the guard. */
static xd_result xdi_job_enter(xdi_job *job, const xdi_job_entry *e, int dead, int alive) {
    XD_TRY(xdi_job_fits(job, e, dead));
    XD_REQUIRE(e->ctx, xdi_node_hold(job->file, job->rank), XD_ERROR_STATE,
               "another process holds rank %d of the %d ranks of job %s", job->rank, job->size,
               e->desc->name);
    job->head->world.members[job->rank].process = (int64_t)getpid();
    if (alive + 1 == job->size) xdi_job_complete(job, e);
    return XD_OK;
}

/* One try to enter the file of the name. *again: it was one that others had done with. */
static xd_result xdi_job_try(xdi_job *job, const xdi_job_entry *e, bool *again) {
    struct stat status;
    int dead = -1, alive = 0;
    *again = false;
    XD_TRY(xdi_job_open(job, e->ctx));
    XD_REQUIRE(e->ctx, xdi_job_guard(job, e->ctx, e->deadline), XD_ERROR_TIMEOUT,
               "job %s: another process has kept the file of its %d ranks to itself until the deadline",
               e->desc->name, job->size);
    *again = fstat(job->file, &status) != 0 || status.st_nlink == 0;
    if (*again) return XD_OK;
    if (!xdi_job_map_head(job, e->desc, status.st_size)) {
        unlink(job->path);
        return XD_FAIL(e->ctx, XD_ERROR_MEMORY,
                       "no room in /dev/shm for the %zu bytes in which %d ranks meet", sizeof *job->head,
                       job->size);
    }
    alive = xdi_job_count(job, &dead);
    *again = job->head->layout != sizeof *job->head || job->head->refused || job->head->complete ||
             (dead >= 0 && alive == 0);
    if (*again) { /* left behind by processes that died */
        unlink(job->path);
        return XD_OK;
    }
    const xd_result result = xdi_job_enter(job, e, dead, alive);
    xdi_node_let_go(job->file, XDI_JOB_GUARD);
    return result;
}

/* "2,3": the ranks that are not there. */
static void xdi_job_missing(const xdi_job *job, char *text, size_t size, int *first) {
    size_t used = 0;
    text[0] = 0;
    *first = -1;
    for (int r = 0; r < job->size && used + 8 < size; r++) {
        if (job->head->world.members[r].process) continue;
        used += (size_t)snprintf(text + used, size - used, used ? ",%d" : "%d", r);
        if (*first < 0) *first = r;
    }
}

/* Ends the joining because of a rank that has died, or of those that have not come. */
static xd_result xdi_job_give_up(xdi_job *job, const xdi_job_entry *e) {
    char missing[120];
    int dead = -1, first = -1;
    const bool guarded = xdi_job_guard(job, e->ctx, xd_now(e->ctx) + 1.0);
    if (job->head->complete) {
        if (guarded) xdi_node_let_go(job->file, XDI_JOB_GUARD);
        return XD_OK;
    }
    xdi_job_count(job, &dead);
    xdi_job_missing(job, missing, sizeof missing, &first);
    if (dead >= 0)
        xdi_job_refuse(job, XD_ERROR_PEER, dead, "rank %d has died while ranks joined job %s", dead,
                       e->desc->name);
    else
        xdi_job_refuse(
            job, XD_ERROR_TIMEOUT, first, "rank%s %s of %d did not join job %s before the deadline of %g s",
            strchr(missing, ',') ? "s" : "", missing, job->size, e->desc->name, e->desc->timeout_s);
    if (guarded) xdi_node_let_go(job->file, XDI_JOB_GUARD);
    return xdi_job_refusal(job, e->ctx);
}

/* Waits until all have joined. */
static xd_result xdi_job_await(xdi_job *job, const xdi_job_entry *e) {
    xdi_job_head *head = job->head;
    for (;;) {
        int dead = -1;
        const uint32_t rings = __atomic_load_n(&head->world.bell.rings, __ATOMIC_SEQ_CST);
        __atomic_store_n(&head->world.bell.sleepers, 1u, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&head->complete, __ATOMIC_SEQ_CST)) return XD_OK;
        if (__atomic_load_n(&head->refused, __ATOMIC_SEQ_CST)) return xdi_job_refusal(job, e->ctx);
        xdi_job_count(job, &dead);
        if (dead >= 0 || xd_now(e->ctx) >= e->deadline) return xdi_job_give_up(job, e);
        xdi_job_sleep(&head->world.bell, rings);
    }
}

XD_PRIVATE xd_result xdi_job_join(xd_ctx *ctx, const xd_node_desc *desc, size_t region_bytes, xdi_job **out) {
    const xdi_job_entry e = { ctx, desc, region_bytes, xd_now(ctx) + desc->timeout_s };
    xdi_job *job = (xdi_job *)xd_allocate(ctx, sizeof *job);
    XD_REQUIRE(ctx, job, XD_ERROR_MEMORY, "no room for a job of %d ranks", desc->size);
    job->rank = desc->rank;
    job->size = desc->size;
    job->holders = 1;
    job->file = -1;
    job->crowded = xdi_job_is_crowded(desc->size);
    snprintf(job->path, sizeof job->path, "/dev/shm/xdistill-job-%s", desc->name);
    bool again = false;
    xd_result result;
    do {
        xdi_job_leave_file(job);
        result = xdi_job_try(job, &e, &again);
    } while (result == XD_OK && again);
    if (result == XD_OK) result = xdi_job_await(job, &e);
    if (result == XD_OK) {
        *out = job;
        return XD_OK;
    }
    xdi_job_leave_file(job);
    xd_release(ctx, job);
    return result;
}

/* Processes may run on different processors; the bits of losses depend on the CPU level, so all use the lowest. */
static xd_result xdi_job_agree(xd_ctx *ctx, const xdi_job *job, xd_result mine) {
    int32_t lowest = job->head->world.members[0].cpu;
    XD_TRY(mine);
    for (int r = 0; r < job->size; r++) {
        const xdi_job_member *member = &job->head->world.members[r];
        if (member->result != XD_OK)
            return XD_FAIL_CULPRIT(ctx, XD_ERROR_PEER, r, "rank %d could not join: %s", r,
                                   xd_result_name((xd_result)member->result));
        lowest = member->cpu < lowest ? member->cpu : lowest;
    }
    for (int r = 1; r < job->size; r++)
        XD_TRY(xd_float_state_compare(ctx, r, job->head->world.members[r].floats,
                                      job->head->world.members[0].floats));
    for (int r = 0; r < job->size; r++) xd_ctx_meet_products(ctx, r, job->head->world.members[r].products);
    xd_ctx_set_cpu(ctx, (xd_cpu_level)lowest);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_job_meet(xd_ctx *ctx, xdi_job *job, xd_result mine, double deadline) {
    xdi_job_member *members = job->head->world.members;
    members[job->rank].cpu = (int32_t)xd_ctx_settings(ctx)->cpu;
    members[job->rank].products = xd_ctx_products(ctx);
    members[job->rank].floats = xdi_ctx_float_state(ctx);
    members[job->rank].result = (int32_t)mine;
    __atomic_store_n(&members[job->rank].prepared, 1u, __ATOMIC_SEQ_CST);
    xdi_job_ring(&job->head->world.bell);
    for (int r = 0; r < job->size; r++) {
        xdi_job_wait wait = xdi_job_wait_begin(job, &job->head->world.bell, deadline);
        bool whole = true;
        while (whole && !__atomic_load_n(&members[r].prepared, __ATOMIC_SEQ_CST))
            whole = xdi_job_turn(ctx, job, &wait, r, false);
        xdi_job_wait_end(job, &wait);
        if (whole) continue;
        XD_TRY(mine);
        const uint64_t failure = xdi_job_failure(job);
        const int culprit = (int)(failure & 0xffffffffu) - 1;
        return XD_FAIL_CULPRIT(ctx, (xd_result)(failure >> 32), culprit,
                               "rank %d of %d died or was stopped while ranks joined", culprit, job->size);
    }
    return xdi_job_agree(ctx, job, mine);
}

XD_PRIVATE void xdi_job_hold(xdi_job *job) {
    __atomic_add_fetch(&job->holders, 1, __ATOMIC_ACQ_REL);
}

XD_PRIVATE void xdi_job_release(xd_ctx *ctx, xdi_job *job) {
    if (__atomic_sub_fetch(&job->holders, 1, __ATOMIC_ACQ_REL) > 0) return;
    __atomic_store_n(&job->world->members[job->rank].gone, 1u, __ATOMIC_SEQ_CST);
    xdi_job *first = job->first;
    if (first)
        xdi_job_give(job, job->region, job->world, sizeof *job->world);
    else
        xdi_job_leave_file(job);
    xd_release(ctx, job);
    if (first) xdi_job_release(ctx, first);
}
