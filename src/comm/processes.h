#ifndef XDI_COMM_PROCESSES_H
#define XDI_COMM_PROCESSES_H

#include "comm/collective.h"

/* Processes of one machine as ranks over shared memory, without mpirun. */

/* Maximum number of processes of a job. */
#define XD_NODE_RANKS_MAX 64

/* How a process joins. Zero is the default of the last two fields. */
typedef struct xd_node_desc {
    /* Job name, the same on all ranks, unique on this machine: 1 to 64 letters, digits, '-', '_'. */
    const char *name;
    int rank, size;   /* of the job; size in [1, XD_NODE_RANKS_MAX] */
    double timeout_s; /* seconds for all to join; 0 -> the context's init_timeout_seconds */
    /* Shared memory of a rank, the same on all ranks, at least 8 KiB * size; 0 -> max(512 KiB, 16 KiB * size). */
    size_t slot_bytes;
} xd_node_desc;

/* How xd_comm_node works. The processes meet in /dev/shm/xdistill-job-NAME, which only their user may open. The name is gone
 * after the call. If a process dies alone in it, the name and 64 KiB stay until the next job of that name.
 *
 * Memory: size * (slot_bytes + 10 KB + 128 bytes * size), in multiples of 64 KiB. A fork takes the same, a split the same
 * without slot_bytes; at most 1023 groups at a time. The last process frees all.
 *
 * A waiting rank polls, yields for some microseconds, then sleeps. An ended process causes PEER within 0.1 s, a stopped one
 * TIMEOUT at the deadline, with its rank. Both break the world; xd_comm_shrink recovers it. */

/* Joins processes of one machine and user into a world, with the C library only; destroy it with xd_comm_destroy. Collective.
 * Sums follow rank order, with the bits of threads. GPU memory is refused (UNSUPPORTED). The context's CPU level becomes the
 * lowest of all ranks. A process is one rank of a job: one thread for the world, one for each queue.
 *
 * Errors on this rank alone: ARGUMENT (name, rank, size, slot_bytes), STATE (another user or this process uses the name), IO
 * (no /dev/shm).
 * Errors on every joined rank: MISMATCH (size, slot_bytes, floating-point state), STATE (two processes with one rank),
 * TIMEOUT (names missing ranks), PEER (a process died or could not join), MEMORY (/dev/shm is full). */
XD_API xd_result xd_comm_node(xd_ctx *ctx, const xd_node_desc *desc, xd_comm **out);

/* Creates the world of a launcher's processes on this machine (xd_launch_discover): xd_comm_self for one, else xd_comm_node.
 * *out is untouched on failure.
 *
 * Collective; must not run while setenv does. Errors: those of xd_launch_discover and xd_comm_node; UNSUPPORTED (several
 * machines: use xd_comm_mpi or xd_comm_nccl), MISSING (no job name: set XDISTILL_JOB). */
XD_API xd_result xd_comm_launched(xd_ctx *ctx, xd_comm **out);

#endif
