#ifndef XDI_COMM_PROCESSES_H
#define XDI_COMM_PROCESSES_H

#include "comm/collective.h"

/* Processes of one machine as ranks, over shared memory. */

/* Processes of a job, at most. */
#define XD_NODE_RANKS_MAX 64

/* How a process joins. */
typedef struct xd_node_desc {
    /* Job name, the same on all ranks, unique on this machine: 1 to 64 letters, digits, '-', '_'. */
    const char *name;
    int rank, size;   /* size in [1, XD_NODE_RANKS_MAX] */
    double timeout_s; /* seconds to join; 0 -> the context's init_timeout_seconds */
    /* Shared memory of a rank, the same on all, at least 8 KiB * size; 0 -> max(512 KiB, 16 KiB * size). */
    size_t slot_bytes;
} xd_node_desc;

/* xd_comm_node's memory: size * (slot_bytes + 10 KB + 128 bytes * size), in multiples of 64 KiB. A fork takes as much,
 * a split as much without slot_bytes. A job has at most 1023 groups at a time. The last process frees all.
 *
 * An ended process causes PEER within 0.1 s, a stopped one TIMEOUT, both with its rank; xd_comm_shrink recovers. See
 * docs/concepts.md. */

/* Joins processes of one machine and user into a world; destroy it with xd_comm_destroy. Collective. Sums follow rank
 * order, with the bits of threads. GPU memory: UNSUPPORTED. The context's CPU level becomes the lowest of all ranks. A
 * process is one rank of a job; one thread uses the world, and one thread each queue.
 *
 * Errors on this rank alone: ARGUMENT (name, rank, size, timeout_s, slot_bytes), STATE (another user or this process
 * uses the name), IO (no /dev/shm).
 * Errors on every joined rank: MISMATCH (size, slot_bytes, floating-point state), STATE (two processes with one rank),
 * TIMEOUT (names missing ranks), PEER (a process died or could not join), MEMORY (/dev/shm full). */
XD_API xd_result xd_comm_node(xd_ctx *ctx, const xd_node_desc *desc, xd_comm **out);

/* Creates the world of this machine's processes (xd_launch_discover): xd_comm_self for one, else xd_comm_node.
 * Collective; must not run while setenv does.
 * Errors: those of these calls; UNSUPPORTED (several machines: xd_comm_mpi, xd_comm_nccl), MISSING (job name: set
 * XDISTILL_JOB). */
XD_API xd_result xd_comm_launched(xd_ctx *ctx, xd_comm **out);

#endif
