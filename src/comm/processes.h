#ifndef XDI_COMM_PROCESSES_H
#define XDI_COMM_PROCESSES_H

#include "comm/collective.h"

/* Processes of one machine as ranks, over memory that they share: what mpirun is not needed for. */

/* Most processes of one job. */
#define XD_NODE_RANKS_MAX 64

/* How a process joins. Zero is the default of the last two fields. */
typedef struct xd_node_desc {
    /* Names the job on this machine: the same on all ranks, different for each job; 1 to 64 letters, digits, '-', '_'. */
    const char *name;
    int rank, size;   /* of this process among the job's: size in [1, XD_NODE_RANKS_MAX] */
    double timeout_s; /* seconds until everybody has joined; 0 -> the context's init_timeout_seconds */
    /* Shared memory of a rank through which its data goes, the same on all ranks; at least 8 KiB for each of `size`; 0 ->
     * 512 KiB, or 16 KiB for each of `size` if that is more. */
    size_t slot_bytes;
} xd_node_desc;

/* Joins processes of one machine, and of one user, into a world. Data goes through memory that they share, so a group needs
 * nothing but the C library; sums are computed here, in rank order: the bits are those of the threads transport. Data is memory
 * of the host: on contexts with a GPU, memory of the GPU is refused (UNSUPPORTED).
 *
 *   desc   read during the call only
 *   out    destroy it with xd_comm_destroy
 *
 * Collective over the processes named: they meet in a file, /dev/shm/xdistill-job-NAME, that only their user may open. Its name is
 * gone before this call returns on any rank, and so after every end of the call; a process that dies alone in it leaves the
 * name, with 64 KiB, for the next job of that name to remove. Memory: size * (slot_bytes + 10 KB + 128 bytes * size), once; the
 * same without slot_bytes for each group that is split from it, with them for each that is forked; multiples of 64 KiB, and
 * at most 1023 groups at a time. All of it goes with the last process. A process is one rank of a job, with a thread for
 * the world and those of its queues; the context's CPU level becomes the lowest of all.
 *
 * A rank that waits polls and yields the core some microseconds, then sleeps. It sees at once, which is within a tenth of a
 * second, when a process that it waits for has ended, however that happened: PEER, naming it. A stopped process is late:
 * TIMEOUT at the deadline, naming it. In both cases the world is broken, and nothing is left behind when its processes end;
 * xd_comm_shrink makes a world of those that go on.
 *
 * Errors: ARGUMENT (name, rank, size, slot_bytes too small; on this rank alone); on every rank that has joined: MISMATCH
 * (another size, slot_bytes or floating-point state), STATE (two processes with one rank), TIMEOUT (naming the ranks that did
 * not join), PEER (a process has died, or could not join), MEMORY (/dev/shm is full). STATE when the name is in use by another user, or twice by
 * one process; IO when there is no /dev/shm. */
XD_API xd_result xd_comm_node(xd_ctx *ctx, const xd_node_desc *desc, xd_comm **out);

/* The world of the processes that a launcher has started on this machine, build/xdrun or another one (xd_launch_discover):
 * xd_comm_self where this process is alone, else xd_comm_node with the job, the rank and the size that were discovered.
 *
 *   out    destroy it with xd_comm_destroy; untouched on failure
 *
 * Collective over the job's processes, as xd_comm_node; must not run beside setenv. Errors: those of xd_launch_discover and of
 * xd_comm_node; UNSUPPORTED, with both numbers, when some ranks are on other machines: then the world comes from xd_comm_mpi or
 * xd_comm_nccl; MISSING when nothing names the job, as XDISTILL_JOB would. */
XD_API xd_result xd_comm_launched(xd_ctx *ctx, xd_comm **out);

#endif
