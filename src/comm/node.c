/* Memory of the host that the processes of a group share when all of them are on one node: a file in memory, created by
 * rank 0 and mapped by all. It has no name, or loses it before it holds a byte, so nothing is left behind when a process
 * dies, whenever that is: the others open it through rank 0's descriptor, in /proc.
 *
 * Rank r holds a lock on byte r of the file as long as it has the memory, and the system releases the lock when the
 * process ends: so the others see that a rank has died. Such locks belong to processes, and a process does not see its
 * own. Ranks in one process could therefore not see each other's, and a group with such ranks shares nothing here. */

#include "comm/internal.h"
#include "comm/topology.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    XDI_NODE_LINE = 64,    /* bytes at the start of the file that the library uses itself */
    XDI_NODE_SPIN = 100,   /* polls before yielding the core */
    XDI_NODE_YIELD = 2000, /* yields before short sleeps */
    XDI_NODE_NAP = 50000   /* nanoseconds */
};

/* The flag that makes a file without a name; 0 where there is none. glibc has the number without _GNU_SOURCE too. */
#if defined(O_TMPFILE)
enum { XDI_NODE_NAMELESS = O_TMPFILE };
#elif defined(__O_TMPFILE)
enum { XDI_NODE_NAMELESS = __O_TMPFILE };
#else
enum { XDI_NODE_NAMELESS = 0 };
#endif

/* What a rank waits for. A process that was stopped in a wait still says so when others have done their part. */
typedef struct xdi_node_wish {
    uint32_t rank;            /* 1 + whom; 0: it does not wait; atomic, like the next two, and written last */
    uint64_t counter, target; /* bytes from the start of the file; 0: a counter that is not in it */
} xdi_node_wish;

/* The start of the file; then, in lines of its own, the ranks' wishes, and the shared memory. */
typedef struct xdi_node_head {
    uint64_t token;   /* that rank 0 told: the same process and descriptor on another host has another file */
    uint64_t failure; /* 0, or why waits ended: result << 32 | (culprit + 1); atomic, written once */
} xdi_node_head;

struct xdi_node {
    xd_comm *comm;
    char *memory;        /* the mapping, head first */
    size_t bytes, begin; /* of the mapping; of the shared memory in it */
    int file;            /* open as long as the lock is needed */
};

/* ---- the file ---- */

/* What the ranks are told of the file: rank 0's process and descriptor, and a token, 0 when there is no file. */
typedef enum xdi_node_told {
    XDI_NODE_PROCESS,
    XDI_NODE_DESCRIPTOR,
    XDI_NODE_TOKEN,
    XDI_NODE_WORDS
} xdi_node_told;

/* A file without a name; where the system has none, one whose name is gone at once. */
static int xdi_node_open(uint64_t token) {
    char path[64];
    if (XDI_NODE_NAMELESS != 0) {
        const int file = open("/dev/shm", O_RDWR | O_CLOEXEC | XDI_NODE_NAMELESS, 0600);
        if (file >= 0) return file;
    }
    snprintf(path, sizeof path, "/dev/shm/xdistill-%lld-%llx", (long long)getpid(),
             (unsigned long long)token);
    const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0) unlink(path);
    return file;
}

XD_PRIVATE bool xdi_node_fill(int file, uint64_t begin, size_t bytes) {
    static const char zeros[4096] = { 0 };
    while (bytes > 0) {
        const ssize_t written =
            pwrite(file, zeros, bytes < sizeof zeros ? bytes : sizeof zeros, (off_t)begin);
        if (written <= 0) return false;
        begin += (uint64_t)written;
        bytes -= (size_t)written;
    }
    return true;
}

static bool xdi_node_map(xdi_node *node) {
    struct stat status;
    if (fstat(node->file, &status) != 0 || status.st_size < 0 || (size_t)status.st_size != node->bytes)
        return false;
    void *memory = mmap(NULL, node->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, node->file, 0);
    if (memory == MAP_FAILED) return false;
    node->memory = (char *)memory;
    return true;
}

static struct flock xdi_node_byte(int byte, bool lock_it) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = lock_it ? F_WRLCK : F_UNLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
}

XD_PRIVATE bool xdi_node_hold(int file, int byte) {
    struct flock lock = xdi_node_byte(byte, true);
    return fcntl(file, F_SETLK, &lock) == 0;
}

XD_PRIVATE void xdi_node_let_go(int file, int byte) {
    struct flock lock = xdi_node_byte(byte, false);
    (void)fcntl(file, F_SETLK, &lock);
}

XD_PRIVATE bool xdi_node_is_held(int file, int byte) {
    struct flock lock = xdi_node_byte(byte, true);
    return fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

static bool xdi_node_lives(const xdi_node *node, int rank) {
    return xdi_node_is_held(node->file, rank);
}

/* Rank 0 makes the file. */
static bool xdi_node_make(xdi_node *node, int64_t *told) {
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) return false;
    const uint64_t moment = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    const int64_t process = (int64_t)getpid();
    const uint64_t token = (xd_hash(moment, &process, sizeof process) >> 1) | 1u;
    node->file = xdi_node_open(token);
    if (node->file < 0 || !xdi_node_fill(node->file, 0, node->bytes) || !xdi_node_map(node)) return false;
    ((xdi_node_head *)(void *)node->memory)->token = token;
    told[XDI_NODE_PROCESS] = process;
    told[XDI_NODE_DESCRIPTOR] = node->file;
    told[XDI_NODE_TOKEN] = (int64_t)token;
    return true;
}

static bool xdi_node_join(xdi_node *node, const int64_t *told) {
    char path[64];
    if (told[XDI_NODE_TOKEN] == 0) return false;
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)told[XDI_NODE_PROCESS],
             (long long)told[XDI_NODE_DESCRIPTOR]);
    node->file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    return node->file >= 0 && xdi_node_map(node) &&
           ((const xdi_node_head *)(const void *)node->memory)->token == (uint64_t)told[XDI_NODE_TOKEN];
}

/* ---- creating ---- */

/* Collective, even for a rank that has failed; *shared receives whether all ranks succeeded. */
static xd_result xdi_node_meet(xd_comm *comm, xdi_node *node, int64_t *told, bool can, bool *shared) {
    const int rank = xd_comm_rank(comm);
    XD_TRY(xd_broadcast(comm, told, XDI_NODE_WORDS, XD_DTYPE_I64, 0));
    if (can && rank > 0) can = xdi_node_join(node, told);
    if (can) can = xdi_node_hold(node->file, rank);
    XD_TRY(xdi_comm_all_can(comm, can, shared));
    if (!*shared) return XD_OK;
    for (int r = 0; r < xd_comm_size(comm); r++) can = can && (r == rank || xdi_node_lives(node, r));
    return xdi_comm_all_can(comm, can, shared);
}

XD_PRIVATE xd_result xdi_node_create(xd_comm *comm, size_t bytes, xdi_node **out) {
    int64_t told[XDI_NODE_WORDS] = { 0, 0, 0 };
    bool shared = false;
    xdi_node *node = (xdi_node *)xd_allocate(xd_comm_ctx(comm), sizeof *node);
    bool can = node && bytes <= SIZE_MAX / 2;
    if (node) {
        const size_t waits = (size_t)xd_comm_size(comm) * sizeof(xdi_node_wish);
        node->comm = comm;
        node->begin = XDI_NODE_LINE * (1 + (waits + XDI_NODE_LINE - 1) / XDI_NODE_LINE);
        node->bytes = bytes + node->begin;
        node->file = -1;
    }
    if (can && xd_comm_rank(comm) == 0) can = xdi_node_make(node, told);
    const xd_result result = xdi_node_meet(comm, node, told, can, &shared);
    if (result != XD_OK || !shared) {
        xdi_node_destroy(node);
        node = NULL;
    }
    *out = node;
    return result;
}

XD_PRIVATE void xdi_node_destroy(xdi_node *node) {
    if (!node) return;
    if (node->memory) munmap(node->memory, node->bytes);
    if (node->file >= 0) close(node->file);
    xd_release(xd_comm_ctx(node->comm), node);
}

XD_PRIVATE void *xdi_node_memory(const xdi_node *node) {
    return node->memory + node->begin;
}

/* ---- waiting ---- */

XD_PRIVATE bool xdi_node_has_died(const xdi_node *node, int rank) {
    return rank != xd_comm_rank(node->comm) && !xdi_node_lives(node, rank);
}

static uint64_t xdi_node_failure(const xdi_node *node) {
    return __atomic_load_n(&((const xdi_node_head *)(const void *)node->memory)->failure, __ATOMIC_ACQUIRE);
}

/* Only the first failure is recorded: all later waits report it. */
static void xdi_node_break(const xdi_node *node, xd_result result, int culprit) {
    xdi_node_head *head = (xdi_node_head *)(void *)node->memory;
    uint64_t none = 0;
    __atomic_compare_exchange_n(&head->failure, &none,
                                ((uint64_t)result << 32) | (uint64_t)(uint32_t)(culprit + 1), false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static xdi_node_wish *xdi_node_wish_of(const xdi_node *node, int rank) {
    return (xdi_node_wish *)(void *)(node->memory + XDI_NODE_LINE) + rank;
}

/* Whom `rank` waits for; -1 when it does not wait, or need not any more: then it has been stopped, or is about to go on. */
static int xdi_node_next(const xdi_node *node, int rank) {
    const xdi_node_wish *wish = xdi_node_wish_of(node, rank);
    const int next = (int)__atomic_load_n(&wish->rank, __ATOMIC_ACQUIRE) - 1;
    const uint64_t counter = __atomic_load_n(&wish->counter, __ATOMIC_RELAXED);
    const uint64_t target = __atomic_load_n(&wish->target, __ATOMIC_RELAXED);
    if (next < 0 || counter == 0) return next;
    const uint64_t *at = (const uint64_t *)(const void *)(node->memory + counter);
    return __atomic_load_n(at, __ATOMIC_ACQUIRE) < target ? next : -1;
}

/* Whom everybody waits for when `rank` did not come: a rank that is waiting here itself is not the late one. */
static int xdi_node_root(const xdi_node *node, int rank) {
    int root = rank;
    for (int r = 0; r < xd_comm_size(node->comm); r++) {
        const int next = xdi_node_next(node, root);
        if (next < 0 || next == root) return root;
        root = next;
    }
    return rank; /* they wait for one another */
}

/* As in comm/threads_wait.c: a rank that waits for a late one returns TIMEOUT, the late one itself PEER. The transport hands
 * the failure on to ranks that wait elsewhere. */
static xd_result xdi_node_report(const xdi_node *node, int waits_for) {
    const uint64_t failure = xdi_node_failure(node);
    const int culprit = (int)(failure & 0xffffffffu) - 1, rank = xd_comm_rank(node->comm);
    const xd_result cause = (xd_result)(failure >> 32);
    const bool late = cause == XD_ERROR_TIMEOUT;
    xd_ctx *ctx = xd_comm_ctx(node->comm);
    xd_transport *transport = xdi_comm_transport(node->comm);
    if (transport->ops->fail) transport->ops->fail(transport, cause, culprit);
    if (late && (waits_for == rank || culprit != xd_comm_world_rank(node->comm, rank)))
        return XD_FAIL_CULPRIT(ctx, XD_ERROR_TIMEOUT, culprit, "rank %d did not come before the deadline",
                               culprit);
    return XD_FAIL_CULPRIT(ctx, XD_ERROR_PEER, culprit, "rank %d %s", culprit,
                           late ? "came after the deadline" : "has died or left");
}

XD_PRIVATE xd_result xdi_node_check(const xdi_node *node, int rank) {
    return xdi_node_failure(node) ? xdi_node_report(node, rank) : XD_OK;
}

XD_PRIVATE void xdi_node_hand_on(const xdi_node *node) {
    xd_transport *transport = xdi_comm_transport(node->comm);
    int culprit = xdi_comm_culprit(node->comm);
    if (culprit < 0 && transport->ops->poll && transport->ops->poll(transport) != XD_OK)
        culprit = xd_last_error(transport->ctx)->culprit;
    if (culprit >= 0) xdi_node_break(node, XD_ERROR_PEER, culprit);
}

static void xdi_node_pause(int turn) {
    const struct timespec nap = { 0, XDI_NODE_NAP };
    if (turn < XDI_NODE_YIELD)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

static xd_result xdi_node_wait(const xdi_node *node, const uint64_t *counter, uint64_t target, int rank) {
    xd_ctx *ctx = xd_comm_ctx(node->comm);
    xd_transport *transport = xdi_comm_transport(node->comm);
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->timeout_seconds;
    for (int turn = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target; turn += turn < XDI_NODE_YIELD) {
        XD_TRY(xdi_node_check(node, rank));
        if (turn < XDI_NODE_SPIN) continue;
        const xd_result polled = transport->ops->poll ? transport->ops->poll(transport) : XD_OK;
        if (polled != XD_OK) {
            xdi_node_break(node, polled, xd_last_error(ctx)->culprit);
            return polled;
        }
        /* The clock and the lock first, then the counter, so that a rank that was in time is not reported. */
        const bool late = xd_now(ctx) >= deadline, died = xdi_node_has_died(node, rank);
        if ((late || died) && __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target) {
            const int root = died ? rank : xdi_node_root(node, rank);
            xdi_node_break(node, died ? XD_ERROR_PEER : XD_ERROR_TIMEOUT,
                           xd_comm_world_rank(node->comm, root));
            return xdi_node_report(node, rank);
        }
        xdi_node_pause(turn);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_node_watch(const xdi_node *node, const uint64_t *counter, uint64_t target,
                                    int rank) {
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) return XD_OK;
    xdi_node_wish *wish = xdi_node_wish_of(node, xd_comm_rank(node->comm));
    const uintptr_t at = (uintptr_t)counter, begin = (uintptr_t)node->memory;
    const bool inside = at > begin && at - begin < node->bytes;
    __atomic_store_n(&wish->counter, inside ? (uint64_t)(at - begin) : 0u, __ATOMIC_RELAXED);
    __atomic_store_n(&wish->target, target, __ATOMIC_RELAXED);
    __atomic_store_n(&wish->rank, (uint32_t)rank + 1u, __ATOMIC_RELEASE);
    const xd_result result = xdi_node_wait(node, counter, target, rank);
    __atomic_store_n(&wish->rank, 0u, __ATOMIC_RELEASE);
    return result;
}
