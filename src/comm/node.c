/* Memory of the host that the processes of a group share when all of them are on one node: a file in memory, created by
 * rank 0 and mapped by all. Its name is removed before it is used, so nothing is left behind when a process dies.
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

/* The start of the file, before the shared memory. */
typedef struct xdi_node_head {
    uint64_t token; /* the number in the file's name: a file of this name on another host has another token */
    uint64_t failure; /* 0, or why waits ended: result << 32 | (culprit + 1); atomic, written once */
} xdi_node_head;

struct xdi_node {
    xd_comm *comm;
    char *memory; /* the mapping, head first */
    size_t bytes;
    int file; /* open as long as the lock is needed */
};

/* ---- the file ---- */

/* The ranks agree on the name as two numbers: a process and a time. */
static void xdi_node_name(const int64_t *name, char *path, size_t size) {
    snprintf(path, size, "/dev/shm/xdistill-%lld-%llx", (long long)name[0], (unsigned long long)name[1]);
}

/* Writing, unlike setting a length, allocates the memory at once: a lack of it is an error here, not a signal later. */
static bool xdi_node_fill(int file, size_t bytes) {
    static const char zeros[4096] = { 0 };
    while (bytes > 0) {
        const ssize_t written = write(file, zeros, bytes < sizeof zeros ? bytes : sizeof zeros);
        if (written <= 0) return false;
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

static struct flock xdi_node_byte(int rank) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

/* Whether another process holds the lock on the rank's byte. */
static bool xdi_node_lives(const xdi_node *node, int rank) {
    struct flock lock = xdi_node_byte(rank);
    return fcntl(node->file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* Rank 0 makes the file; name[1] is 0 when it cannot. path is the file to be removed, or "". */
static bool xdi_node_make(xdi_node *node, int64_t *name, char *path, size_t size) {
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) return false;
    const uint64_t moment = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    name[0] = (int64_t)getpid();
    name[1] = (int64_t)((xd_hash(moment, &name[0], sizeof name[0]) >> 1) | 1u);
    xdi_node_name(name, path, size);
    node->file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (node->file < 0) path[0] = 0; /* nothing to remove */
    if (node->file >= 0 && xdi_node_fill(node->file, node->bytes) && xdi_node_map(node)) {
        ((xdi_node_head *)(void *)node->memory)->token = (uint64_t)name[1];
        return true;
    }
    name[1] = 0;
    return false;
}

static bool xdi_node_join(xdi_node *node, const int64_t *name) {
    char path[64];
    if (name[1] == 0) return false;
    xdi_node_name(name, path, sizeof path);
    node->file = open(path, O_RDWR | O_CLOEXEC);
    return node->file >= 0 && xdi_node_map(node) &&
           ((const xdi_node_head *)(const void *)node->memory)->token == (uint64_t)name[1];
}

/* ---- creating ---- */

/* Collective, even for a rank that has failed; *shared receives whether all ranks succeeded. */
static xd_result xdi_node_meet(xd_comm *comm, xdi_node *node, int64_t *name, bool can, bool *shared) {
    const int rank = xd_comm_rank(comm);
    XD_TRY(xd_broadcast(comm, name, 2, XD_DTYPE_I64, 0));
    if (can && rank > 0) can = xdi_node_join(node, name);
    if (can) {
        struct flock lock = xdi_node_byte(rank);
        can = fcntl(node->file, F_SETLK, &lock) == 0;
    }
    XD_TRY(xdi_comm_all_can(comm, can, shared));
    if (!*shared) return XD_OK;
    for (int r = 0; r < xd_comm_size(comm); r++) can = can && (r == rank || xdi_node_lives(node, r));
    return xdi_comm_all_can(comm, can, shared);
}

XD_PRIVATE xd_result xdi_node_create(xd_comm *comm, size_t bytes, xdi_node **out) {
    char path[64] = "";
    int64_t name[2] = { 0, 0 };
    bool shared = false;
    xdi_node *node = (xdi_node *)xd_allocate(xd_comm_ctx(comm), sizeof *node);
    bool can = node && bytes <= SIZE_MAX / 2;
    if (node) {
        node->comm = comm;
        node->bytes = bytes + XDI_NODE_LINE;
        node->file = -1;
    }
    if (can && xd_comm_rank(comm) == 0) can = xdi_node_make(node, name, path, sizeof path);
    const xd_result result = xdi_node_meet(comm, node, name, can, &shared);
    if (path[0]) unlink(path);
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
    return node->memory + XDI_NODE_LINE;
}

/* ---- waiting ---- */

XD_PRIVATE bool xdi_node_has_died(const xdi_node *node, int rank) {
    return rank != xd_comm_rank(node->comm) && !xdi_node_lives(node, rank);
}

/* Only the first failure is recorded: all later waits report it. */
static void xdi_node_break(const xdi_node *node, xd_result result, int rank) {
    xdi_node_head *head = (xdi_node_head *)(void *)node->memory;
    const uint64_t culprit = (uint64_t)(uint32_t)(xd_comm_world_rank(node->comm, rank) + 1);
    uint64_t none = 0;
    __atomic_compare_exchange_n(&head->failure, &none, ((uint64_t)result << 32) | culprit, false,
                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* As in comm/threads.c: a rank that waits for a late one returns TIMEOUT, the late one itself PEER. */
static xd_result xdi_node_report(const xdi_node *node, int waits_for) {
    const xdi_node_head *head = (const xdi_node_head *)(const void *)node->memory;
    const uint64_t failure = __atomic_load_n(&head->failure, __ATOMIC_ACQUIRE);
    const int culprit = (int)(failure & 0xffffffffu) - 1, rank = xd_comm_rank(node->comm);
    const bool late = (xd_result)(failure >> 32) == XD_ERROR_TIMEOUT;
    xd_ctx *ctx = xd_comm_ctx(node->comm);
    if (late && (waits_for == rank || culprit != xd_comm_world_rank(node->comm, rank)))
        return XD_FAIL_CULPRIT(ctx, XD_ERROR_TIMEOUT, culprit, "rank %d did not come before the deadline",
                               culprit);
    return XD_FAIL_CULPRIT(ctx, XD_ERROR_PEER, culprit, "rank %d %s", culprit,
                           late ? "came after the deadline" : "has died or left");
}

static void xdi_node_pause(int turn) {
    const struct timespec nap = { 0, XDI_NODE_NAP };
    if (turn < XDI_NODE_YIELD)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

XD_PRIVATE xd_result xdi_node_watch(const xdi_node *node, const uint64_t *counter, uint64_t target,
                                    int rank) {
    const xdi_node_head *head = (const xdi_node_head *)(const void *)node->memory;
    xd_ctx *ctx = xd_comm_ctx(node->comm);
    xd_transport *transport = xdi_comm_transport(node->comm);
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->timeout_seconds;
    for (int turn = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target; turn += turn < XDI_NODE_YIELD) {
        if (__atomic_load_n(&head->failure, __ATOMIC_ACQUIRE)) return xdi_node_report(node, rank);
        if (turn < XDI_NODE_SPIN) continue;
        if (transport->ops->poll) XD_TRY(transport->ops->poll(transport));
        /* The clock and the lock first, then the counter, so that a rank that was in time is not reported. */
        const bool late = xd_now(ctx) >= deadline, died = xdi_node_has_died(node, rank);
        if ((late || died) && __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target) {
            xdi_node_break(node, died ? XD_ERROR_PEER : XD_ERROR_TIMEOUT, rank);
            return xdi_node_report(node, rank);
        }
        xdi_node_pause(turn);
    }
    return XD_OK;
}
