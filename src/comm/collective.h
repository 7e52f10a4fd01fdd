#ifndef XDI_COMM_COLLECTIVE_H
#define XDI_COMM_COLLECTIVE_H

#include "base/context.h"
#include "base/dtype.h"
#include "kernel/types.h"

/* One rank's handle on an ordered group of ranks. Made by a transport (xd_comm_self, xd_run_threads, the
 * companion headers), by xd_comm_split, or taken from a mesh. Belongs to the context, and so to the thread,
 * it was made with.
 *
 * Every call below is collective over the group unless its comment says otherwise: all ranks call it, in the same
 * order, with the same kind, dtype, op, root, reduction mode and fitting counts. Differences are found before
 * data moves: every rank returns MISMATCH, and the message names the ranks that differ from rank 0 of the
 * group. A rank whose own arguments are wrong returns that error and the others PEER with its message. After
 * either error the group can still be used.
 *
 * No call waits longer than xd_ctx_desc.timeout_seconds (init_timeout_seconds for the first call on a world).
 * When a rank does not arrive the others return TIMEOUT, when it has left they return PEER; then the group is
 * broken, with all groups that were split from the same world: every later call returns PEER at once, naming
 * the culprit.
 *
 * Counts are elements. Ranks in messages and errors are world ranks. Outputs are untouched on failure,
 * except when the group breaks while data moves. recv may equal send where both have the same extent, and
 * in reduce_scatter, all_gather, gather and scatter the short one may be this rank's block of the long one;
 * no other overlap.
 *
 * On contexts with a GPU (xd_cuda_create) data may lie in device memory: the work is ordered on the streams of
 * the ranks, no call waits for the device, and the bits are those of host memory. In a world of threads the kernels of
 * each rank read the memory of the others, so ranks on different GPUs need peer access between them. MPI and xd_comm_node move
 * host memory only: UNSUPPORTED for device memory. */
typedef struct xd_comm xd_comm;

/* What a collective does. AGREE, SPLIT and FORK have functions of their own and no xd_collective. */
typedef enum xd_collective_kind {
    XD_COLLECTIVE_BARRIER = 1,
    XD_COLLECTIVE_BROADCAST,
    XD_COLLECTIVE_ALL_REDUCE,
    XD_COLLECTIVE_REDUCE_SCATTER,
    XD_COLLECTIVE_ALL_GATHER,
    XD_COLLECTIVE_ALL_TO_ALL,
    XD_COLLECTIVE_GATHER,
    XD_COLLECTIVE_SCATTER,
    XD_COLLECTIVE_SEND, /* the last two concern two ranks only */
    XD_COLLECTIVE_RECV,
    XD_COLLECTIVE_AGREE,
    XD_COLLECTIVE_SPLIT,
    XD_COLLECTIVE_FORK /* the same group for a queue: xd_queue_create */
} xd_collective_kind;

/* The one struct that describes every collective: one function checks, counts and traces it and injects faults,
 * then passes it to the transport's `execute`. Unused fields are zero. Counts and displacements are arrays of
 * `size` entries, in group rank order; displacements NULL -> blocks lie back to back. */
typedef struct xd_collective {
    xd_collective_kind kind;
    const void *send;
    void *recv;
    int64_t count;              /* elements: BROADCAST, ALL_REDUCE, SEND, RECV */
    const int64_t *send_counts; /* SCATTER, ALL_TO_ALL, REDUCE_SCATTER: elements for each rank */
    const int64_t *send_displacements;
    const int64_t *recv_counts; /* GATHER, ALL_GATHER, ALL_TO_ALL: elements from each rank */
    const int64_t *recv_displacements;
    xd_dtype dtype;
    xd_reduce_op op;
    int root; /* BROADCAST, GATHER, SCATTER: group rank; SEND, RECV: the other rank */
    /* ALL_REDUCE, REDUCE_SCATTER: send holds this rank's forest, its nodes back to back, each of the whole extent,
     * and the sum follows the canonical tree. Required for floating-point sums in INVARIANT mode. */
    xd_leaves leaves;
    void *stream;      /* device transports: the work is ordered on it; NULL -> the context's */
    uint64_t sequence; /* filled in by the library: calls so far on this group */
    /* [size] or NULL, on all ranks or on none: the leaves of every rank, where all ranks know them beforehand, because they have
     * agreed on a plan. Entry `rank` is what `leaves` says, and together they are [0, total) in rank order. Then a transport that
     * compares nothing need not ask for them: a sum over leaves takes no round of its own (xd_nccl_desc.compare,
     * xd_mpi_desc.compare). Bits are the same. NULL -> ranks tell each other */
    const xd_leaves *known_leaves;
} xd_collective;

/* What one handle has moved so far. */
typedef struct xd_comm_counters {
    uint64_t calls;      /* collectives completed */
    uint64_t bytes_sent; /* payload bytes from this rank to other ranks; what stays local does not count */
    uint64_t bytes_received; /* payload bytes from other ranks */
} xd_comm_counters;

/* Local facts. rank is in [0, size); xd_comm_world_rank maps a group rank to the world's. */
XD_API int xd_comm_rank(const xd_comm *comm);
XD_API int xd_comm_size(const xd_comm *comm);
XD_API int xd_comm_world_rank(const xd_comm *comm, int rank);
XD_API xd_ctx *xd_comm_ctx(const xd_comm *comm);
XD_API xd_comm_counters xd_comm_traffic(const xd_comm *comm);

/* A group of one rank: every collective is a copy. Local. Destroy with xd_comm_destroy. Errors: MEMORY. */
XD_API xd_result xd_comm_self(xd_ctx *ctx, xd_comm **out);

/* Frees the handle; local. NULL is fine. Peers that still wait for this rank get PEER, or TIMEOUT at their
 * deadline where the transport cannot notify them (MPI): xd_comm_abort notifies them at once. A process that was forked from
 * this rank's is no rank: calls over several ranks are STATE there at once, and peers notice nothing of its copy of the handle. */
XD_API void xd_comm_destroy(xd_comm *comm);

/* This rank leaves the world for good: peers that wait for it, now or later, get PEER naming it, in
 * every group of the world. Local; the handles stay valid until destroyed. Called for a rank function that
 * returns an error. */
XD_API void xd_comm_abort(xd_comm *comm);

/* The same ranks, in the same order, for another context: a group whose calls work in the memory of `ctx` and report to it. What
 * ranks with a GPU do on the host goes over a group of a context without one: optimizers of parts that are kept there
 * (xd_fsdp_desc.host), checkpoints of them. It shares the fate of the world and nothing else, and is destroyed before it. On MPI
 * it is not split and not forked again. On NCCL calls of both come from one thread, in one order on all ranks; memory of the host
 * passes through the GPU.
 *
 *   ctx   with the allocator and the reduction mode of the group's own; outlives *out. Another one, or the same
 *
 * Collective over comm. Errors, the same on every rank: ARGUMENT (ctx NULL or of another reduction mode), UNSUPPORTED (the
 * transport cannot: MPI below MPI_THREAD_MULTIPLE), MEMORY, and those of xd_comm_split. */
XD_API xd_result xd_comm_fork(xd_comm *comm, xd_ctx *ctx, xd_comm **out);

/* After a rank was lost: a world of those that are left, in their old order and without a gap in their numbers. It has nothing in
 * common with the broken one, which stays broken, with its groups and queues: each is destroyed by its owner, before or
 * after. What ranks hold in groups of the old world (meshes, wrapped models, optimizers) they make again over the new one, from a
 * checkpoint for example, which any number of ranks reads.
 *
 *   broken      a world, not a group split from one, of which some rank has returned PEER or TIMEOUT
 *   timeout_s   seconds that it waits for ranks that live and do not call; 0 -> the context's timeout_seconds
 *   out         the new world, of this context; destroy it with xd_comm_destroy
 *
 * Collective over all ranks that go on. It returns when all that live have called; those that have ended, have destroyed
 * their handles or have called xd_comm_abort are not waited for. At the earliest deadline of any rank those that have called
 * go on without the others: a process that was stopped gets PEER from this call and from all others, and can do nothing to
 * the new world. A rank that came too late for the collective in which the world broke, but in time for this call, is in.
 * Whoever dies meanwhile is left out, or else is missed in the new world's first call, which breaks that: then this is called
 * again, on that.
 * Memory: as for joining the ranks; what the old world shared goes when the last process ends.
 *
 * Offered by worlds of xd_comm_node and of threads, and by those that this call made of them; by those of xd_comm_mpi where the MPI
 * library has recovery, with the differences that are told there: above all, a rank that lives and does not call makes it
 * fail with TIMEOUT. A thread is lost when its rank function returns or it calls xd_comm_abort; so a recovery can be tried in
 * one process. Memory of all these worlds goes with the first one, before which their handles are destroyed.
 *
 * Errors: ARGUMENT (a group, timeout_s) and UNSUPPORTED (the transport), on this rank alone, and the others do not wait for
 * it if it ends; STATE (nothing has broken this world, or this rank has left it or has called before); PEER (this rank came
 * after the deadline); MEMORY (on all; on one alone that has no room for its handles, which is missed by the others then). */
XD_API xd_result xd_comm_shrink(xd_comm *broken, double timeout_s, xd_comm **out);

/* Returns on every rank after every rank has called. */
XD_API xd_result xd_barrier(xd_comm *comm);
/* Copies root's data into every rank's data; [count] elements. */
XD_API xd_result xd_broadcast(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int root);
/* recv = op over all ranks of send, element by element; [count] elements, the same bits on every rank. */
XD_API xd_result xd_all_reduce(xd_comm *comm, const void *send, void *recv, int64_t count, xd_dtype dtype,
                               xd_reduce_op op);
/* send holds sum(counts) elements; this rank receives block `rank`, counts[rank] elements. */
XD_API xd_result xd_reduce_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                                   xd_dtype dtype, xd_reduce_op op);
/* send holds counts[rank] elements; recv holds sum(counts), blocks in rank order. In place this rank's block is only read. */
XD_API xd_result xd_all_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                               xd_dtype dtype);
/* send_counts[r] elements go to rank r, recv_counts[r] come from it; blocks lie in rank order on both sides. */
XD_API xd_result xd_all_to_all(xd_comm *comm, const void *send, const int64_t *send_counts, void *recv,
                               const int64_t *recv_counts, xd_dtype dtype);
/* counts is read on every rank and must agree; recv (gather) and send (scatter) are used on root only. */
XD_API xd_result xd_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                           int root);
XD_API xd_result xd_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                            xd_dtype dtype, int root);
/* Two ranks only. A send returns when the receiver has the data. Not ordered with respect to collectives of
 * other ranks. A rank whose own arguments are wrong still waits for the other one, to report the error to it,
 * unless `to` or `from` itself is wrong. */
XD_API xd_result xd_send(xd_comm *comm, const void *data, int64_t count, xd_dtype dtype, int to);
XD_API xd_result xd_recv(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int from);

/* Several messages of this rank at once: all of them make progress together, so ranks may all send first, in a ring or to
 * everybody. What xd_send, xd_recv or another xd_exchange of the other rank receives or sends fits too.
 *
 *   records   [count], of kind SEND or RECV, as for xd_collective_run; messages to one rank, and from one rank, are matched
 *             in their order. On a device all go to the stream of the first
 *
 * Returns when every message has been received or has failed; a failure of one does not stop the others, and the first in the
 * order of records is returned. Over NCCL the k-th messages of all pairs of ranks go together, those from the lower rank of a
 * pair first; where messages are not compared (xd_nccl_desc.compare) all go at once. That cannot dead-lock as long as both ends of
 * each are in an xd_exchange.
 * Errors: ARGUMENT (count, another kind), and those of xd_send and xd_recv. */
XD_API xd_result xd_exchange(xd_comm *comm, const xd_collective *records, int count);

/* The general form: explicit displacements, leaves, stream. */
XD_API xd_result xd_collective_run(xd_comm *comm, const xd_collective *collective);

/* Agrees on a result: every rank passes its own; XD_OK everywhere -> XD_OK everywhere. Otherwise the ranks
 * that passed an error get it back, and the others get PEER with the number of the lowest such rank and its
 * message. Call it after work that can fail on one rank alone (files, memory), before any rank communicates
 * again. */
XD_API xd_result xd_agree(xd_comm *comm, xd_result mine);

/* As MPI_Comm_split: ranks with the same color form a group, ordered by (key, rank). color < 0 -> no group, *out
 * = NULL. Destroy a group with xd_comm_destroy. Further errors: MEMORY; then no rank gets one. */
XD_API xd_result xd_comm_split(xd_comm *comm, int color, int key, xd_comm **out);

/* What each rank of xd_run_threads runs. The runner owns world and its context. When a rank returns an error,
 * or returns while others wait for it, their calls return PEER. */
typedef xd_result (*xd_rank_function)(xd_comm *world, void *argument);

/* Runs `ranks` threads of this process as one world and waits for all of them.
 *
 *   desc    settings of every rank's context; NULL -> defaults. Allocator, logger, clock and files must be
 *           thread-safe.
 *   error   when not NULL: receives the error behind the result, the culprit's own where it is known
 *
 * Returns XD_OK when every rank returned XD_OK, else the first culprit's result. Rank 0 runs on the calling
 * thread. Further errors: ARGUMENT (ranks < 1), MEMORY. */
XD_API xd_result xd_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                                xd_error *error);

/* The same world for threads that the caller owns: create it once and pass it to n threads. Each joins once with
 * its own context and destroys its comm when done; destroy the world after the last. xd_thread_world_create is
 * local; joining is collective and waits at most init_timeout_seconds. Errors: ARGUMENT (ranks < 1; a rank outside the world),
 * STATE (this rank has joined before), MISMATCH (a thread has another floating-point state), TIMEOUT, PEER, MEMORY. */
typedef struct xd_thread_world xd_thread_world;
XD_API xd_result xd_thread_world_create(xd_ctx *ctx, int ranks, xd_thread_world **out);
XD_API xd_result xd_thread_world_join(xd_thread_world *world, xd_ctx *ctx, int rank, xd_comm **out);
XD_API void xd_thread_world_destroy(xd_thread_world *world);

#endif
