#ifndef XDI_COMM_COLLECTIVE_H
#define XDI_COMM_COLLECTIVE_H

#include "base/context.h"
#include "base/dtype.h"
#include "kernel/types.h"

/* Counts are elements; messages and errors give world ranks. A failure changes outputs only if the group breaks
 * while data moves. recv may equal send if both have the same extent. In reduce_scatter, all_gather, gather and
 * scatter the shorter one may be this rank's block of the longer. No other overlap.
 *
 * With xd_cuda_create data may be device memory: docs/concepts.md. MPI and xd_comm_node return UNSUPPORTED for it. */

/* One rank's handle on an ordered group. Belongs to its context's thread.
 *
 * Calls are collective unless said otherwise: in one order, with equal kind, dtype, op, root, reduction mode and
 * fitting counts. If not, every rank returns MISMATCH before data moves, naming the ranks that differ from group
 * rank 0. A refused call leaves the group usable.
 *
 * A call waits at most xd_ctx_desc.timeout_seconds, a world's first init_timeout_seconds. TIMEOUT (a rank is late)
 * and PEER (one left) break all groups of the world: later calls return PEER with the culprit. */
typedef struct xd_comm xd_comm;

/* AGREE, SPLIT and FORK have functions of their own and no xd_collective. */
typedef enum xd_collective_kind {
    XD_COLLECTIVE_BARRIER = 1,
    XD_COLLECTIVE_BROADCAST,
    XD_COLLECTIVE_ALL_REDUCE,
    XD_COLLECTIVE_REDUCE_SCATTER,
    XD_COLLECTIVE_ALL_GATHER,
    XD_COLLECTIVE_ALL_TO_ALL,
    XD_COLLECTIVE_GATHER,
    XD_COLLECTIVE_SCATTER,
    XD_COLLECTIVE_SEND, /* SEND, RECV: two ranks only */
    XD_COLLECTIVE_RECV,
    XD_COLLECTIVE_AGREE,
    XD_COLLECTIVE_SPLIT,
    XD_COLLECTIVE_FORK /* xd_comm_fork, xd_queue_create */
} xd_collective_kind;

/* Any collective; unused fields are zero. Counts and displacements: [size], in group rank order; displacements NULL
 * -> blocks back to back. */
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
    int root; /* BROADCAST, GATHER, SCATTER: group rank; SEND, RECV: the other */
    /* ALL_REDUCE, REDUCE_SCATTER: send holds this rank's forest, nodes back to back, each of the whole extent.
     * Required for floating-point sums in INVARIANT mode. */
    xd_leaves leaves;
    void *stream;      /* orders device work; NULL -> the context's */
    uint64_t sequence; /* set by the library: calls on this group */
    /* [size] or NULL, on all ranks or on none: every rank's leaves, together [0, total) in rank order; entry `rank`
     * equals `leaves`. NULL -> ranks exchange them. Where calls are not compared, that takes another round
     * (xd_nccl_desc.compare, xd_mpi_desc.compare). */
    const xd_leaves *known_leaves;
} xd_collective;

/* Traffic of one handle. */
typedef struct xd_comm_counters {
    uint64_t calls;          /* collectives completed */
    uint64_t bytes_sent;     /* payload to other ranks, no local copies */
    uint64_t bytes_received; /* payload from other ranks */
} xd_comm_counters;

/* Local. rank is in [0, size); xd_comm_world_rank maps a group rank to the world's, others to -1. */
XD_API int xd_comm_rank(const xd_comm *comm);
XD_API int xd_comm_size(const xd_comm *comm);
XD_API int xd_comm_world_rank(const xd_comm *comm, int rank);
XD_API xd_ctx *xd_comm_ctx(const xd_comm *comm);
XD_API xd_comm_counters xd_comm_traffic(const xd_comm *comm);

/* Creates a group of one rank: collectives copy. Local. Destroy with xd_comm_destroy. Errors: MEMORY. */
XD_API xd_result xd_comm_self(xd_ctx *ctx, xd_comm **out);

/* Frees the handle. Local. Waiting peers get PEER; over MPI TIMEOUT, unless this rank calls xd_comm_abort first. In
 * a forked process, calls over several ranks are STATE. */
XD_API void xd_comm_destroy(xd_comm *comm);

/* Leaves the world for good. Peers of any group that wait for this rank, now or later, get PEER with its number.
 * Handles stay valid until destroyed. Local. */
XD_API void xd_comm_abort(xd_comm *comm);

/* Makes the same group for another context, whose memory and errors its calls use.
 *
 *    ctx   has the group's allocator and reduction mode; may be its context; outlives *out
 *
 * Collective. The fork shares only failures of the world. Destroy it before the world. A fork over MPI cannot be split
 * or forked. Over NCCL one thread calls both groups, in one order on all ranks; host memory passes through the GPU.
 * Errors, the same on every rank: ARGUMENT (ctx NULL or of another reduction mode), UNSUPPORTED (MPI below
 * MPI_THREAD_MULTIPLE), MEMORY, those of xd_comm_split. */
XD_API xd_result xd_comm_fork(xd_comm *comm, xd_ctx *ctx, xd_comm **out);

/* After xd_comm_shrink the old world stays broken. Destroy its groups and queues before or after the call. */

/* Creates a world of the ranks left after a loss, in their old order, without gaps. Collective over them.
 *
 *    broken      a world, not a split group, in which a rank got PEER or TIMEOUT
 *    timeout_s   seconds to wait for live ranks; 0 -> the context's timeout_seconds
 *    out         destroy it before the first world, which (or the last process) frees all memory
 *
 * For worlds of threads, xd_comm_node, this call, and xd_comm_mpi with recovery. Over MPI a live rank that does not
 * call causes TIMEOUT. Memory: as for joining.
 * Errors on this rank alone: ARGUMENT (group, timeout_s), UNSUPPORTED (transport). Others: STATE (not broken; this rank
 * left or called before), PEER (this rank was late), MEMORY (all ranks, or one). */
XD_API xd_result xd_comm_shrink(xd_comm *broken, double timeout_s, xd_comm **out);

/* Waits for all ranks. */
XD_API xd_result xd_barrier(xd_comm *comm);
/* Copies root's [count] elements to all ranks. */
XD_API xd_result xd_broadcast(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int root);
/* recv = op over all ranks of send, elementwise; [count], the same bits on every rank. */
XD_API xd_result xd_all_reduce(xd_comm *comm, const void *send, void *recv, int64_t count, xd_dtype dtype,
                               xd_reduce_op op);
/* Reduces sum(counts) elements of send; recv is block `rank`, counts[rank] elements. */
XD_API xd_result xd_reduce_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                                   xd_dtype dtype, xd_reduce_op op);
/* Gathers counts[rank] elements of each rank, in rank order. In place it only reads this rank's block. */
XD_API xd_result xd_all_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                               xd_dtype dtype);
/* The same with `count` elements of every rank. */
XD_API xd_result xd_all_gather_even(xd_comm *comm, const void *send, void *recv, int64_t count,
                                    xd_dtype dtype);
/* Adds values[count], on the host, over all ranks in rank order, in every mode: for numbers to report, such as a loss. */
XD_API xd_result xd_sum_values(xd_comm *comm, double *values, int64_t count);
/* Sends send_counts[r] elements to rank r, receives recv_counts[r] from it; both in rank order. */
XD_API xd_result xd_all_to_all(xd_comm *comm, const void *send, const int64_t *send_counts, void *recv,
                               const int64_t *recv_counts, xd_dtype dtype);
/* Gather to root, scatter from root; counts[r] elements of or for rank r, the same on all ranks. Only root uses recv
 * (gather), send (scatter). */
XD_API xd_result xd_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                           int root);
XD_API xd_result xd_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                            xd_dtype dtype, int root);
/* Two ranks only, not ordered with others' collectives. A send returns when the receiver has the data. A rank with
 * wrong arguments still waits for the other to report its error, unless `to` or `from` is wrong. */
XD_API xd_result xd_send(xd_comm *comm, const void *data, int64_t count, xd_dtype dtype, int to);
XD_API xd_result xd_recv(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int from);

/* Sends and receives several messages together, so ranks may all send first. Peers may use xd_send, xd_recv or
 * xd_exchange.
 *
 *   records   [count], SEND or RECV, matched in order between two ranks; all use the stream of records[0]
 *
 * Returns the first failure in the order of records after all have ended.
 * Errors: ARGUMENT (count, kind), those of xd_send and xd_recv. */
XD_API xd_result xd_exchange(xd_comm *comm, const xd_collective *records, int count);

/* Runs any collective. */
XD_API xd_result xd_collective_run(xd_comm *comm, const xd_collective *collective);

/* Agrees on a result: XD_OK if all ranks pass XD_OK. Otherwise a rank with an error gets its own back. The others get
 * PEER with number and message of the lowest such rank. */
XD_API xd_result xd_agree(xd_comm *comm, xd_result mine);

/* Splits as MPI_Comm_split: ranks of one color form a group, ordered by (key, rank). color < 0 -> *out = NULL.
 * Destroy with xd_comm_destroy. Further errors: MEMORY (no rank gets a group). */
XD_API xd_result xd_comm_split(xd_comm *comm, int color, int key, xd_comm **out);

/* A rank of xd_run_threads, which owns world and its context. When it returns, waiting peers get PEER. */
typedef xd_result (*xd_rank_function)(xd_comm *world, void *argument);

/* Runs `ranks` threads as one world and waits for all. The caller is rank 0.
 *
 *   desc    of every context; allocator, logger, clock and files must be thread-safe; NULL -> defaults
 *   error   may be NULL; receives the culprit's error if known
 *
 * Returns XD_OK if every rank did, otherwise the first culprit's result. Further errors: ARGUMENT (ranks < 1),
 * MEMORY. */
XD_API xd_result xd_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                                xd_error *error);

/* The same world for the caller's threads. Each joins once with its own context and destroys its comm. Destroy the
 * world last. Creating is local; joining is collective, for at most init_timeout_seconds.
 * Errors: ARGUMENT (ranks < 1; rank outside), STATE (rank has joined), MISMATCH (floating-point states), TIMEOUT,
 * PEER, MEMORY. */
typedef struct xd_thread_world xd_thread_world;
typedef struct xd_thread_world_desc {
    int ranks; /* required */
} xd_thread_world_desc;
XD_API xd_result xd_thread_world_create(xd_ctx *ctx, const xd_thread_world_desc *desc, xd_thread_world **out);
XD_API xd_result xd_thread_world_join(xd_thread_world *world, xd_ctx *ctx, int rank, xd_comm **out);
XD_API void xd_thread_world_destroy(xd_thread_world *world);

#endif
