#ifndef XDI_COMM_TRANSPORT_H
#define XDI_COMM_TRANSPORT_H

#include "base/extend.h"
#include "comm/collective.h"

/* For authors of transports. */

/* What ranks compare before data moves. 64 bytes; all-gathered by the control plane. */
typedef struct xd_control {
    uint64_t sequence;
    uint32_t kind;
    uint32_t dtype;
    uint32_t op;
    int32_t root;
    uint64_t count;    /* elements that must agree for this kind */
    uint64_t layout;   /* hash of counts, leaves and plan */
    int32_t status;    /* xd_result of the local checks */
    int32_t mode;      /* xd_reduction, xd_cpu_level and floating-point state */
    uint64_t extra;    /* split: color and key; reductions: first leaf */
    uint64_t leaves;   /* reductions: number of leaves */
    uint64_t products; /* xd_ctx_products */
} xd_control;

typedef struct xd_transport xd_transport;

/* One SEND or RECV on its way. */
typedef struct xd_message {
    xd_collective record; /* of dtype NONE: this rank has refused it */
    int index;            /* in the caller's list */
    int stage;            /* the transport's; 0 at the beginning */
    int64_t their_count;  /* what the other rank passed, filled in by the transport */
    xd_dtype their_dtype; /* NONE: it has refused */
} xd_message;

/* One rank's end of a group. comm/threads.c is the reference for each call. All calls but destroy and abort may
 * wait, but not longer than `deadline` (seconds of the context's clock). A transport reports a broken group with
 * PEER or TIMEOUT through xd_fail_culprit. */
typedef struct xd_transport_ops {
    const char *name;
    /* All-gathers one record per rank. `next` is what this rank will execute when all agree (NULL: nothing):
     * a transport may publish its buffers together with the record. It stays valid until execute returns. A transport that
     * does not compare a call gives each rank this one's record, the sum over all ranks of `layout` being 0, with the leaves that
     * next->known_leaves has; without these, a sum over leaves is always compared. */
    xd_result (*control)(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                         xd_control *all, double deadline);
    /* Moves and reduces the data of a record that every rank has agreed on: the control call just before
     * had it as `next`. Without `exchange`, SEND and RECV come here too, without a control call; they compare count and
     * dtype themselves, and a MISMATCH on both sides does not break the group. Dtype NONE means that this rank refused
     * the call: it moves nothing and succeeds, the other side returns ARGUMENT, and the group is not broken either.
     * Other errors break it. */
    xd_result (*execute)(xd_transport *transport, const xd_collective *collective, double deadline);
    /* Creates a sub-group of the given members, in this order; they are ranks of `transport` and include this one.
     * Only the members call it, right after a control call. */
    xd_result (*split)(xd_transport *transport, const int *members, int size, int rank, double deadline,
                       xd_transport **out);
    void (*abort)(xd_transport *transport); /* wake peers that wait for this rank: it will not come */
    void (*destroy)(xd_transport *transport);
    /* For a rank that waits for peers by other means: makes progress on messages; PEER when the world is broken. Never
     * waits. NULL: not needed. */
    xd_result (*poll)(xd_transport *transport);
    /* Can move memory of the context's GPU; if false, a call with such memory is refused before execute. */
    bool moves_device_memory;
    /* A wait by other means has failed with TIMEOUT or PEER because of the world rank `culprit`: from now on the world is
     * broken, and ranks that wait in it are told, as far as the transport can, of this culprit. Never waits. NULL: not
     * offered; then they find out by themselves. */
    void (*fail)(xd_transport *transport, xd_result result, int culprit);
    /* The same ranks for another context, whose calls another thread makes at the same time, but see forks_in_order: *out shares
     * the fate of the world and nothing else. All ranks call it, right after a control call, on the thread of this transport;
     * errors are those of this transport's context. `ctx` has the same allocator. *out = NULL on all ranks: not possible
     * here. NULL: not offered. */
    xd_result (*fork)(xd_transport *transport, xd_ctx *ctx, double deadline, xd_transport **out);
    /* Lets all messages make progress at the same time, those to one rank and those from one rank in their order, each with
     * whatever SEND, RECV or list of messages the other rank is in (over NCCL only with a list). Fills in what the other
     * ranks passed; data moves only where count and dtype are the same and neither has refused, and any other pair is no
     * error here. Returns when all have met; errors break the group. Without a control call. NULL: messages go through
     * `execute`, one after another. */
    xd_result (*exchange)(xd_transport *transport, xd_message *messages, int count, double deadline);
    /* Bytes that the allocator of this rank hands out in `fork`, with what this rank allocates for all; 0: fork would make
     * nothing. NULL: nobody knows. Local. */
    size_t (*fork_bytes)(const xd_transport *transport);
    /* Calls of a fork come from the thread of its origin, and those of both have one order on all ranks. If false, another thread
     * may make them at the same time. */
    bool forks_in_order;
    /* A world of the ranks of a broken one that live and have called this when all of them have, or by the deadline; in their
     * order, and whole, whatever happens to those that are not in it. Called on the world's first handle, without a control
     * call. STATE when nothing has broken it. NULL: not offered. */
    xd_result (*shrink)(xd_transport *transport, double deadline, xd_transport **out);
    /* Whether the state of this program allows a call, such as a stream that is being captured. An error refuses it before it
     * counts and before ranks compare anything: nobody is told, since all ranks are in the same state. `next` as in control, or
     * a message. Local. NULL: every call. */
    xd_result (*admit)(xd_transport *transport, const xd_collective *next);
    /* Whether calls become part of a graph now, which ranks cannot wait for each other in: wrappers leave agreements out then.
     * Local. NULL: never. */
    bool (*is_recording)(xd_transport *transport);
} xd_transport_ops;

/* Every transport begins with this. */
struct xd_transport {
    const xd_transport_ops *ops;
    xd_ctx *ctx;
    int rank, size;
    const int *world_ranks; /* [size] */
};

/* Wraps a transport into a handle, which then owns it (destroyed with it, also on failure). Local. */
XD_API xd_result xd_comm_create(xd_ctx *ctx, xd_transport *transport, xd_comm **out);

/* For transports that send messages between pairs of ranks, as xdistill_mpi.h and xdistill_nccl.h do. All four are
 * local, and the first three pure. */

/* Fills in all[ranks] for a call that the ranks do not compare, as xd_transport_ops.control promises it. */
XD_API void xd_control_assume(const xd_control *mine, const xd_collective *next, int ranks, xd_control *all);

/* The leaves of every rank in a reduction, out[ranks]: those that are known, else of the records all[ranks], which are read for
 * a sum over leaves only; without leaves zero. Returns the nodes of all ranks together, of one without leaves 1. */
XD_API int64_t xd_control_leaves(const xd_control *all, const xd_collective *collective, int ranks,
                                 xd_leaves *out);

/* The block of a reduction that each rank sums, begins[ranks] and counts[ranks] in elements: of a REDUCE_SCATTER what the caller
 * says, of an ALL_REDUCE equal parts, the first ranks one more, or `whole` for each. Returns the elements from one node of a
 * rank's leaves to the next. */
XD_API int64_t xd_collective_blocks(const xd_collective *collective, int ranks, bool whole, int64_t *begins,
                                    int64_t *counts);

/* Who is told of messages: what goes to a rank of the group, and where comes what it sends. Never of 0 bytes. */
typedef struct xd_message_sink {
    void (*put)(void *user, int peer, const void *data, size_t bytes);
    void (*get)(void *user, int peer, void *data, size_t bytes);
} xd_message_sink;

/* Tells `sink`, with `user`, what `rank` puts and gets in a collective that only moves data, for all of the group's ranks in
 * their order, itself included: there both or neither is told, and of a BROADCAST neither. Allocates nothing. */
XD_API void xd_collective_messages(const xd_collective *collective, int rank, int ranks,
                                   const xd_message_sink *sink, void *user);

#endif
