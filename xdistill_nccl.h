/* xdistill_nccl.h - GPUs joined by NCCL as a world of xdistill. License: see xdistill.h.

   In *one* C, C++ or CUDA file:                      Everywhere else:
       #define XDISTILL_IMPLEMENTATION                          #include "xdistill.h"
       #include "xdistill.h"                                    #include "xdistill_nccl.h"
       #include "xdistill_nccl.h"                     nvcc app.cu xdistill_cuda.cu -lnccl -lpthread

       cudaSetDevice(local_rank);
       xd_cuda_create(ctx, NULL, &cuda);
       xd_nccl_desc desc = { .rank = rank, .size = size, .host = "node0", .port = "29501" };
       xd_comm_nccl(ctx, &desc, &world);
       ...
       xd_comm_destroy(world);
       xd_cuda_destroy(cuda);

   Data is on the GPU and moves on the context's stream; xd_nccl_desc.compare decides what the host waits for.
   DETERMINISTIC and INVARIANT sums are computed here, in rank order, by the context's kernels: the bits are
   those of the threads transport, with any version of NCCL. Host memory is copied through the GPU, and calls
   with it wait. Needs NCCL 2.18. */
#ifndef XDISTILL_NCCL_H
#define XDISTILL_NCCL_H

#if !defined(XD_VERSION_MAJOR)
#    error "include xdistill.h before xdistill_nccl.h"
#elif XD_VERSION_MAJOR != 0 || XD_VERSION_MINOR != 2
#    error "xdistill_nccl.h belongs to xdistill.h version 0.2: take both from one release"
#endif

#include <cuda_runtime.h>
#include <nccl.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#    error "xdistill_nccl.h needs NCCL 2.18"
#endif

/* How to join a world. Zero is the default of every field. Ranks get the id of the world in one of three
 * ways: as `id`, or rank 0 creates it and passes it on through a file or TCP. A world of one rank needs none
 * of them. */
typedef struct xd_nccl_desc {
    int rank, size;         /* size is required */
    const ncclUniqueId *id; /* from xd_nccl_unique_id on one rank, sent to all, for example by MPI */
    const char *file; /* a path that all ranks see, where no file exists yet; removed when all have joined */
    const char *host; /* the machine of rank 0 (MASTER_ADDR of a launcher) */
    const char *port; /* a free port there: not MASTER_PORT, on which torchrun itself listens */
    int64_t compare;  /* collectives of each group whose arguments are compared; 0 -> all; -1 -> none */
    size_t staging_bytes; /* device memory for the terms of a sum; 0 -> 16 MiB */
} xd_nccl_desc;

/* The id of a new world, for xd_nccl_desc.id. Local. Errors: DEVICE, PEER (with NCCL's own text). */
XD_API xd_result xd_nccl_unique_id(xd_ctx *ctx, ncclUniqueId *out);

/* Joins the ranks that share an id into a world.
 *
 *   ctx    computes on a GPU (xd_cuda_create), which must be the calling thread's current device here and in every
 *          xd_comm_split; ranks of one process must have different GPUs
 *   desc   read during the call only; compare and staging_bytes are the same on every rank
 *   out    destroy it, and all groups split from it, before xd_cuda_destroy
 *
 * Comparing the ranks' arguments takes a network round trip. The host waits for it, and so for the group's
 * earlier collectives, but not for kernels launched after them. For calls that are not compared, the call only
 * starts work, ranks whose arguments differ hang until the next deadline, and either all ranks or none must
 * pass displacements. Barriers, splits, agreements and sums over leaves are always compared; sends and receives
 * when compare is 0.
 *
 * The context's CPU level becomes the lowest of all ranks. Collective over `size` ranks; waits at most
 * init_timeout_seconds. Memory: staging_bytes on the GPU, once for all groups that are split from the world.
 *
 * After a failure: NCCL does not report which rank is missing, so ranks that wait for one that left or died get
 * TIMEOUT at their deadline, or PEER as soon as NCCL detects it. Then all communicators of the world are aborted
 * on this rank, which ends the work that its streams were waiting in. A wait by CUDA's own calls has no deadline
 * and may never end: wait by xd_read or xd_barrier.
 *
 * Errors: ARGUMENT, STATE (no GPU, or not the current one), MEMORY (the others then get TIMEOUT), IO (the
 * file, the port), MISMATCH (compare or staging_bytes), DEVICE and PEER (with NCCL's own text), TIMEOUT.
 */
XD_API xd_result xd_comm_nccl(xd_ctx *ctx, const xd_nccl_desc *desc, xd_comm **out);

#endif

#if defined(XDISTILL_IMPLEMENTATION) && !defined(XDISTILL_NCCL_IMPLEMENTED)
#define XDISTILL_NCCL_IMPLEMENTED

#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Communicators do not block: a call of NCCL that has to wait for peers returns "in progress", and this file
 * polls until it is complete or the deadline has passed.
 *
 * Data moves on the stream of each call. The control plane has a separate stream, so that reading the
 * peers' records does not wait for kernels of the caller. Calls on one communicator must run in order on
 * the device too: each records an event after its work, and the next one, on any stream, waits for it. */

enum {
    XDI_NCCL_STAGING = 1 << 24, /* bytes */
    XDI_NCCL_MIRROR = 1 << 16,  /* bytes, at first */
    XDI_NCCL_SHORT = 4096,      /* bytes up to which every rank computes the whole sum of an all_reduce */
    XDI_NCCL_ALIGN = 16,  /* elements: tiles begin at multiples of it, so that kernels can use wide loads */
    XDI_NCCL_SPIN = 1000, /* polls before each further one is followed by a short sleep */
    XDI_NCCL_HELLO = 0x78646e63 /* sent by a rank to rank 0 before its number */
};

typedef struct xdi_nccl xdi_nccl;

/* What the handles of one world share on this rank. */
typedef struct xdi_nccl_world {
    xd_ctx *ctx;
    xdi_nccl *groups;    /* all handles */
    xd_result failure;   /* XD_OK, or what broke the world */
    int culprit;         /* world rank; -1 unknown */
    cudaStream_t stream; /* control records and host memory */
    cudaEvent_t spare;   /* recorded after the last use of staging */
    char *staging;       /* terms of a sum: a tile of each node of every rank's forest, in order */
    char *mirror;        /* copies of host memory on the device */
    size_t staging_bytes, mirror_bytes;
    int64_t compare; /* calls of a group that are compared */
    bool is_held;    /* by xd_comm_nccl, until the first handle exists */
} xdi_nccl_world;

struct xdi_nccl {
    xd_transport base;
    xdi_nccl_world *world;
    xdi_nccl *next; /* in world->groups */
    ncclComm_t comm;
    int *world_ranks;    /* [size] */
    xd_control *records; /* [size], page-locked: copies into other memory would wait inside CUDA */
    xd_control *arrived; /* [size], the same on the device */
    cudaEvent_t last;    /* recorded after the last work on comm */
    int64_t calls;       /* collectives so far */
    bool displaced;      /* some rank passed displacements to the call in progress */
    int64_t *begins;     /* [size], first element of each rank's block of a sum */
    int64_t *counts;     /* [size], and its length */
    xd_leaves *leaves;   /* [size] */
    const void **pieces; /* [size] */
};

/* ---- failure ---- */

/* Only the first failure is recorded. Ends all pending work on this rank. */
static void xdi_nccl_break(xdi_nccl_world *world, xd_result result, int culprit) {
    if (world->failure != XD_OK) return;
    world->failure = result;
    world->culprit = culprit;
    for (xdi_nccl *t = world->groups; t; t = t->next) {
        if (t->comm) ncclCommAbort(t->comm);
        t->comm = NULL;
    }
}

static xd_result xdi_nccl_report(const xdi_nccl *t) {
    const xdi_nccl_world *world = t->world;
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, world->culprit,
                           "the world is broken since an earlier %s of this rank",
                           xd_result_name(world->failure));
}

/* NCCL's text, and its details of the last error. */
static xd_result xdi_nccl_refuse(xd_ctx *ctx, ncclResult_t code, ncclComm_t comm) {
    const char *detail = ncclGetLastError(comm);
    const bool remote = code == ncclRemoteError || code == ncclSystemError;
    return XD_FAIL(ctx, remote ? XD_ERROR_PEER : XD_ERROR_DEVICE, "NCCL: %s%s%.300s",
                   ncclGetErrorString(code), detail && detail[0] ? ": " : "", detail ? detail : "");
}

static xd_result xdi_nccl_fault(xdi_nccl *t, ncclResult_t code) {
    const xd_result result = xdi_nccl_refuse(t->base.ctx, code, t->comm);
    xdi_nccl_break(t->world, result, -1);
    return result;
}

static xd_result xdi_nccl_expire(xdi_nccl *t) {
    xdi_nccl_break(t->world, XD_ERROR_TIMEOUT, -1);
    return XD_FAIL(t->base.ctx, XD_ERROR_TIMEOUT,
                   "some rank of the group of %d did not arrive before the deadline", t->base.size);
}

/* A failure of this rank alone in the middle of a call: peers cannot go on without its part. */
static xd_result xdi_nccl_lost(xdi_nccl *t, xd_result result) {
    if (result != XD_OK) xdi_nccl_break(t->world, XD_ERROR_PEER, t->world_ranks[t->base.rank]);
    return result;
}

static xd_result xdi_nccl_cuda(xdi_nccl *t, cudaError_t code) {
    if (code == cudaSuccess) return XD_OK;
    return xdi_nccl_lost(t, XD_FAIL(t->base.ctx, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code)));
}

/* ---- waiting ---- */

static void xdi_nccl_pause(int turn) {
    const struct timespec nap = { 0, 20000 };
    if (turn >= XDI_NCCL_SPIN) nanosleep(&nap, NULL);
}

/* Waits until NCCL has accepted a call that returned `code`. */
static xd_result xdi_nccl_settle(xdi_nccl *t, ncclResult_t code, double deadline) {
    for (int turn = 0; code == ncclInProgress; turn += turn < XDI_NCCL_SPIN) {
        const ncclResult_t asked = ncclCommGetAsyncError(t->comm, &code);
        if (asked != ncclSuccess) code = asked;
        if (code != ncclInProgress) break;
        if (xd_now(t->base.ctx) >= deadline) return xdi_nccl_expire(t);
        xdi_nccl_pause(turn);
    }
    return code == ncclSuccess ? XD_OK : xdi_nccl_fault(t, code);
}

/* Waits until the device has completed the work before t->last. */
static xd_result xdi_nccl_wait(xdi_nccl *t, double deadline) {
    for (int turn = 0;; turn += turn < XDI_NCCL_SPIN) {
        ncclResult_t state = ncclSuccess;
        const cudaError_t done = cudaEventQuery(t->last);
        if (done == cudaSuccess) return XD_OK;
        if (done != cudaErrorNotReady) return xdi_nccl_cuda(t, done);
        const ncclResult_t asked = ncclCommGetAsyncError(t->comm, &state);
        if (asked != ncclSuccess) return xdi_nccl_fault(t, asked);
        if (state != ncclSuccess && state != ncclInProgress) return xdi_nccl_fault(t, state);
        if (xd_now(t->base.ctx) >= deadline) return xdi_nccl_expire(t);
        xdi_nccl_pause(turn);
    }
}

/* Begins work of this communicator on `stream`, after its earlier work; and ends it. */
static xd_result xdi_nccl_enter(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, t->last, 0));
}

static xd_result xdi_nccl_leave(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_cuda(t, cudaEventRecord(t->last, stream));
}

static xd_result xdi_nccl_copy(xdi_nccl *t, cudaStream_t stream, void *to, const void *from, size_t bytes) {
    if (bytes == 0 || to == from) return XD_OK;
    return xdi_nccl_cuda(t, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
}

/* ---- messages ---- */

/* Sends and receives of one group call. */
typedef struct xdi_nccl_batch {
    xdi_nccl *t;
    cudaStream_t stream;
    ncclResult_t code;
} xdi_nccl_batch;

static xdi_nccl_batch xdi_nccl_begin(xdi_nccl *t, cudaStream_t stream) {
    xdi_nccl_batch batch;
    batch.t = t;
    batch.stream = stream;
    batch.code = ncclGroupStart();
    return batch;
}

static bool xdi_nccl_goes(const xdi_nccl_batch *b, int peer, int64_t count) {
    return count > 0 && peer != b->t->base.rank && (b->code == ncclSuccess || b->code == ncclInProgress);
}

/* `count` elements of `size` bytes from element `begin`. What stays on this rank is not sent. */
static void xdi_nccl_put(xdi_nccl_batch *b, int peer, const void *data, int64_t begin, int64_t count,
                         size_t size) {
    if (!xdi_nccl_goes(b, peer, count)) return;
    b->code = ncclSend((const char *)data + (size_t)begin * size, (size_t)count * size, ncclUint8, peer,
                       b->t->comm, b->stream);
}

static void xdi_nccl_get(xdi_nccl_batch *b, int peer, void *data, int64_t begin, int64_t count, size_t size) {
    if (!xdi_nccl_goes(b, peer, count)) return;
    b->code = ncclRecv((char *)data + (size_t)begin * size, (size_t)count * size, ncclUint8, peer, b->t->comm,
                       b->stream);
}

static xd_result xdi_nccl_end(xdi_nccl_batch *b, double deadline) {
    const ncclResult_t ended = ncclGroupEnd();
    if (b->code == ncclSuccess || b->code == ncclInProgress) b->code = ended;
    return xdi_nccl_settle(b->t, b->code, deadline);
}

/* ---- the control plane ---- */

static xd_result xdi_nccl_gather_records(xdi_nccl *t, const xd_control *mine, double deadline) {
    const cudaStream_t stream = t->world->stream;
    const size_t n = (size_t)t->base.size, me = (size_t)t->base.rank;
    t->records[me] = *mine;
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_copy(t, stream, &t->arrived[me], &t->records[me], sizeof *mine));
    const ncclResult_t code =
        ncclAllGather(&t->arrived[me], t->arrived, sizeof *mine, ncclUint8, t->comm, stream);
    XD_TRY(xdi_nccl_settle(t, code, deadline));
    XD_TRY(xdi_nccl_copy(t, stream, t->records, t->arrived, n * sizeof *mine));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

/* Whether the ranks compare this call. All have the same count of calls, so all decide the same. */
static bool xdi_nccl_compares(xdi_nccl *t, const xd_control *mine, const xd_collective *next) {
    const bool moves =
        mine->kind >= (uint32_t)XD_COLLECTIVE_BROADCAST && mine->kind < (uint32_t)XD_COLLECTIVE_SEND;
    if (!moves) return true;
    return t->calls++ < t->world->compare || (next && next->leaves.total);
}

static xd_result xdi_nccl_control(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                                  xd_control *all, double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    const int n = transport->size;
    xd_control record = *mine;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    t->displaced = next && !next->leaves.total && (next->send_displacements || next->recv_displacements);
    if (xdi_nccl_compares(t, mine, next)) {
        if (t->displaced) record.extra = 1; /* otherwise only splits and leaves use it */
        XD_TRY(xdi_nccl_gather_records(t, &record, deadline));
        for (int r = 0; r < n; r++) t->displaced = t->displaced || t->records[r].extra;
        memcpy(all, t->records, (size_t)n * sizeof *all);
        return XD_OK;
    }
    /* The peers are not comparing, so they cannot learn why this rank does not come. */
    if (mine->status != (int32_t)XD_OK) return xdi_nccl_lost(t, (xd_result)mine->status);
    for (int r = 0; r < n; r++) {
        all[r] = *mine;
        all[r].layout = 0; /* those of an all_to_all add up to zero */
    }
    return XD_OK;
}

/* ---- moves ---- */

/* First element of the next block: its displacement, or the end of the last one. */
static int64_t xdi_nccl_place(const int64_t *displacements, int rank, int64_t count, int64_t *end) {
    const int64_t begin = displacements ? displacements[rank] : *end;
    *end += count;
    return begin;
}

/* True for equal blocks back to back, for which NCCL has calls: the same answer on every rank. */
static bool xdi_nccl_is_even(const xdi_nccl *t, const int64_t *counts) {
    for (int r = 0; r < t->base.size; r++)
        if (counts[r] != counts[0]) return false;
    return !t->displaced;
}

/* Every kind that only moves data, as messages. */
static xd_result xdi_nccl_messages(xdi_nccl *t, const xd_collective *c, cudaStream_t stream,
                                   double deadline) {
    const int n = t->base.size, me = t->base.rank;
    const bool to_all = c->kind == XD_COLLECTIVE_ALL_TO_ALL, gather = c->kind == XD_COLLECTIVE_GATHER;
    const bool all_gather = c->kind == XD_COLLECTIVE_ALL_GATHER, scatter = c->kind == XD_COLLECTIVE_SCATTER;
    const size_t size = xd_dtype_size(c->dtype);
    const bool root = c->root == me;
    int64_t sent = 0, received = 0, from = -1, to = -1; /* the last two: this rank's block for itself */
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int r = 0; r < n; r++) {
        if (to_all || scatter) {
            const int64_t begin = xdi_nccl_place(c->send_displacements, r, c->send_counts[r], &sent);
            if (to_all || root) xdi_nccl_put(&batch, r, c->send, begin, c->send_counts[r], size);
            if ((to_all || root) && r == me) from = begin;
        }
        if (to_all || all_gather || gather) {
            const int64_t begin = xdi_nccl_place(c->recv_displacements, r, c->recv_counts[r], &received);
            if (!gather || root) xdi_nccl_get(&batch, r, c->recv, begin, c->recv_counts[r], size);
            if ((!gather || root) && r == me) to = begin;
        }
        if (all_gather || (gather && r == c->root))
            xdi_nccl_put(&batch, r, c->send, 0, c->recv_counts[me], size);
        if (scatter && r == c->root) xdi_nccl_get(&batch, r, c->recv, 0, c->send_counts[me], size);
    }
    XD_TRY(xdi_nccl_end(&batch, deadline));
    if (from < 0 && to < 0) return XD_OK;
    const int64_t count = from >= 0 ? c->send_counts[me] : c->recv_counts[me];
    return xdi_nccl_copy(t, stream, (char *)c->recv + (size_t)(to > 0 ? to : 0) * size,
                         (const char *)c->send + (size_t)(from > 0 ? from : 0) * size, (size_t)count * size);
}

static xd_result xdi_nccl_move(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    if (c->kind == XD_COLLECTIVE_BROADCAST) {
        void *data =
            c->root == t->base.rank ? (void *)(uintptr_t)c->send : c->recv; /* root's is not written */
        const size_t bytes = (size_t)c->count * size;
        if (bytes == 0) return XD_OK;
        const ncclResult_t code = ncclBroadcast(data, data, bytes, ncclUint8, c->root, t->comm, stream);
        return xdi_nccl_settle(t, code, deadline);
    }
    if (c->kind == XD_COLLECTIVE_ALL_GATHER && xdi_nccl_is_even(t, c->recv_counts)) {
        const size_t bytes = (size_t)c->recv_counts[0] * size;
        if (bytes == 0) return XD_OK;
        return xdi_nccl_settle(t, ncclAllGather(c->send, c->recv, bytes, ncclUint8, t->comm, stream),
                               deadline);
    }
    return xdi_nccl_messages(t, c, stream, deadline);
}

/* ---- sums ---- */

static int64_t xdi_nccl_nodes(const xdi_nccl *t, int rank) {
    return t->leaves[rank].total ? xd_leaves_nodes(t->leaves[rank].first, t->leaves[rank].count) : 1;
}

/* Elements of a block of `count` in the tile that begins at `at`. */
static int64_t xdi_nccl_in_tile(int64_t count, int64_t at, int64_t tile) {
    const int64_t left = count > at ? count - at : 0;
    return left < tile ? left : tile;
}

/* Collects the tile at `at` of this rank's block: node k of rank r becomes tile (nodes of the ranks before r) + k
 * of the staging memory. */
static xd_result xdi_nccl_bring(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, int64_t stride,
                                int64_t at, int64_t tile, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    const int n = t->base.size, me = t->base.rank;
    const int64_t own = xdi_nccl_in_tile(t->counts[me], at, tile);
    int64_t slot = 0; /* tiles of the ranks before this one */
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int r = 0; r < n; slot += xdi_nccl_nodes(t, r++)) {
        t->pieces[r] = t->world->staging + (size_t)(slot * tile) * size;
        for (int64_t k = 0; k < xdi_nccl_nodes(t, me); k++)
            xdi_nccl_put(&batch, r, c->send, k * stride + t->begins[r] + at,
                         xdi_nccl_in_tile(t->counts[r], at, tile), size);
        for (int64_t k = 0; k < xdi_nccl_nodes(t, r); k++)
            xdi_nccl_get(&batch, r, t->world->staging, (slot + k) * tile, own, size);
    }
    XD_TRY(xdi_nccl_end(&batch, deadline));
    for (int64_t k = 0; k < xdi_nccl_nodes(t, me); k++)
        XD_TRY(xdi_nccl_copy(t, stream, (char *)(uintptr_t)t->pieces[me] + (size_t)(k * tile) * size,
                             (const char *)c->send + (size_t)(k * stride + t->begins[me] + at) * size,
                             (size_t)own * size));
    return XD_OK;
}

/* Reduces this rank's block into out, tile by tile. */
static xd_result xdi_nccl_reduce(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, void *out,
                                 int64_t stride, int64_t tile, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    const int n = t->base.size;
    const xd_reduce_kernels *reduce = &xd_ctx_kernels(t->base.ctx)->reduce;
    xd_launch launch = xd_ctx_launch(t->base.ctx);
    int64_t longest = 0;
    launch.stream = stream;
    for (int r = 0; r < n; r++) longest = t->counts[r] > longest ? t->counts[r] : longest;
    XD_TRY(xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, t->world->spare, 0)));
    for (int64_t at = 0; at < longest; at += tile) {
        const int64_t count = xdi_nccl_in_tile(t->counts[t->base.rank], at, tile);
        XD_TRY(xdi_nccl_bring(t, c, stream, stride, at, tile, deadline));
        if (count == 0) continue;
        char *to = (char *)out + (size_t)at * size;
        const xd_result result =
            c->leaves.total
                ? reduce->leaves(&launch, to, t->pieces, t->leaves, n, tile, count, c->dtype, c->op)
                : reduce->pieces(&launch, to, t->pieces, n, count, c->dtype, c->op);
        XD_TRY(xdi_nccl_lost(t, result));
    }
    return xdi_nccl_cuda(t, cudaEventRecord(t->world->spare, stream));
}

/* Reads every rank's leaves from the control records; returns the elements of each node in a tile. */
static int64_t xdi_nccl_tile(xdi_nccl *t, const xd_collective *c) {
    int64_t nodes = 0;
    memset(t->leaves, 0, (size_t)t->base.size * sizeof *t->leaves);
    for (int r = 0; r < t->base.size; r++) {
        if (c->leaves.total) { /* else the records may be those of an earlier call */
            t->leaves[r].first = (int64_t)t->records[r].extra;
            t->leaves[r].count = (int64_t)t->records[r].leaves;
            t->leaves[r].total = c->leaves.total;
        }
        nodes += xdi_nccl_nodes(t, r);
    }
    const int64_t room =
        (int64_t)t->world->staging_bytes / ((nodes ? nodes : 1) * (int64_t)xd_dtype_size(c->dtype));
    const int64_t tile = room - room % XDI_NCCL_ALIGN;
    return tile > 0 ? tile : room;
}

static xd_result xdi_nccl_room(xdi_nccl *t, int64_t tile) {
    if (tile > 0) return XD_OK;
    return xdi_nccl_lost(t, XD_FAIL(t->base.ctx, XD_ERROR_MEMORY,
                                    "%lld bytes of staging do not hold one element of every node of a sum",
                                    (long long)t->world->staging_bytes));
}

/* Reductions that NCCL may do itself: FAST sums, and those without rounding. NCCL's MAX and MIN may lose a NaN. */
static bool xdi_nccl_is_native(const xdi_nccl *t, const xd_collective *c) {
    if (xd_ctx_settings(t->base.ctx)->reduction != XD_REDUCTION_FAST || c->leaves.total) return false;
    return !xd_dtype_is_floating(c->dtype) || c->op == XD_SUM || c->op == XD_AVG;
}

static ncclDataType_t xdi_nccl_type(xd_dtype dtype) {
    switch (dtype) {
    case XD_DTYPE_F32: return ncclFloat32;
    case XD_DTYPE_F64: return ncclFloat64;
    case XD_DTYPE_BF16: return (ncclDataType_t)9; /* ncclBfloat16: C does not see it in every release */
    case XD_DTYPE_F16: return ncclFloat16;
    case XD_DTYPE_I32: return ncclInt32;
    case XD_DTYPE_I64: return ncclInt64;
    default: return ncclUint8;
    }
}

static ncclRedOp_t xdi_nccl_op(xd_reduce_op op) {
    return op == XD_MAX ? ncclMax : op == XD_MIN ? ncclMin : op == XD_AVG ? ncclAvg : ncclSum;
}

static xd_result xdi_nccl_reduce_scatter(xdi_nccl *t, const xd_collective *c, cudaStream_t stream,
                                         double deadline) {
    const int n = t->base.size;
    int64_t total = 0;
    if (xdi_nccl_is_native(t, c) && xdi_nccl_is_even(t, c->send_counts)) {
        if (c->send_counts[0] == 0) return XD_OK;
        const ncclResult_t code =
            ncclReduceScatter(c->send, c->recv, (size_t)c->send_counts[0], xdi_nccl_type(c->dtype),
                              xdi_nccl_op(c->op), t->comm, stream);
        return xdi_nccl_settle(t, code, deadline);
    }
    const int64_t tile = xdi_nccl_tile(t, c);
    XD_TRY(xdi_nccl_room(t, tile));
    for (int r = 0; r < n; r++) {
        t->begins[r] = xdi_nccl_place(c->send_displacements, r, c->send_counts[r], &total);
        t->counts[r] = c->send_counts[r];
    }
    return xdi_nccl_reduce(t, c, stream, c->recv, total, tile, deadline);
}

/* Each rank sums a block, then all gather the sums. Short arrays go to every rank whole, which saves a round. In
 * place, a rank overwrites only elements that it has sent already or does not send. */
static xd_result xdi_nccl_all_reduce(xdi_nccl *t, const xd_collective *c, cudaStream_t stream,
                                     double deadline) {
    const int n = t->base.size, me = t->base.rank;
    const size_t size = xd_dtype_size(c->dtype);
    if (c->count == 0) return XD_OK;
    if (xdi_nccl_is_native(t, c)) {
        const ncclResult_t code = ncclAllReduce(c->send, c->recv, (size_t)c->count, xdi_nccl_type(c->dtype),
                                                xdi_nccl_op(c->op), t->comm, stream);
        return xdi_nccl_settle(t, code, deadline);
    }
    const int64_t tile = xdi_nccl_tile(t, c);
    XD_TRY(xdi_nccl_room(t, tile));
    const bool whole = c->count <= tile && (size_t)c->count * size <= (size_t)XDI_NCCL_SHORT;
    const int64_t each = c->count / n, rest = c->count % n;
    for (int r = 0; r < n; r++) {
        t->begins[r] = whole ? 0 : r * each + (r < rest ? r : rest);
        t->counts[r] = whole ? c->count : each + (r < rest ? 1 : 0);
    }
    char *own = (char *)c->recv + (size_t)t->begins[me] * size;
    XD_TRY(xdi_nccl_reduce(t, c, stream, own, c->count, tile, deadline));
    if (whole) return XD_OK;
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int r = 0; r < n; r++) {
        xdi_nccl_put(&batch, r, own, 0, t->counts[me], size);
        xdi_nccl_get(&batch, r, c->recv, t->begins[r], t->counts[r], size);
    }
    return xdi_nccl_end(&batch, deadline);
}

/* ---- one call ---- */

/* Starts a call whose memory is all on the device. */
static xd_result xdi_nccl_start(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    XD_TRY(xdi_nccl_enter(t, stream));
    if (c->kind == XD_COLLECTIVE_ALL_REDUCE) {
        XD_TRY(xdi_nccl_all_reduce(t, c, stream, deadline));
    } else if (c->kind == XD_COLLECTIVE_REDUCE_SCATTER) {
        XD_TRY(xdi_nccl_reduce_scatter(t, c, stream, deadline));
    } else if (c->kind == XD_COLLECTIVE_SEND || c->kind == XD_COLLECTIVE_RECV) {
        xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
        if (c->kind == XD_COLLECTIVE_SEND) xdi_nccl_put(&batch, c->root, c->send, 0, c->count, size);
        if (c->kind == XD_COLLECTIVE_RECV) xdi_nccl_get(&batch, c->root, c->recv, 0, c->count, size);
        XD_TRY(xdi_nccl_end(&batch, deadline));
    } else {
        XD_TRY(xdi_nccl_move(t, c, stream, deadline));
    }
    return xdi_nccl_leave(t, stream);
}

/* The largest end of a block. */
static int64_t xdi_nccl_extent(const int64_t *counts, const int64_t *displacements, int n) {
    int64_t extent = 0, end = 0;
    for (int r = 0; r < n; r++) {
        const int64_t begin = xdi_nccl_place(displacements, r, counts[r], &end);
        if (counts[r] && begin + counts[r] > extent) extent = begin + counts[r];
    }
    return extent;
}

/* Elements of memory that a call reads, and writes, on this rank. */
static void xdi_nccl_extents(const xdi_nccl *t, const xd_collective *c, int64_t *send, int64_t *recv) {
    const int n = t->base.size, me = t->base.rank;
    const bool root = c->root == me;
    const int64_t nodes = c->leaves.total ? xd_leaves_nodes(c->leaves.first, c->leaves.count) : 1;
    const int64_t sent = c->send_counts ? xdi_nccl_extent(c->send_counts, c->send_displacements, n) : 0;
    const int64_t received = c->recv_counts ? xdi_nccl_extent(c->recv_counts, c->recv_displacements, n) : 0;
    *send = *recv = 0;
    switch (c->kind) {
    case XD_COLLECTIVE_SEND: *send = c->count; break;
    case XD_COLLECTIVE_RECV: *recv = c->count; break;
    case XD_COLLECTIVE_BROADCAST: *(root ? send : recv) = c->count; break;
    case XD_COLLECTIVE_ALL_REDUCE: *send = c->count * nodes, *recv = c->count; break;
    case XD_COLLECTIVE_REDUCE_SCATTER: *send = sent * nodes, *recv = c->send_counts[me]; break;
    case XD_COLLECTIVE_ALL_GATHER: *send = c->recv_counts[me], *recv = received; break;
    case XD_COLLECTIVE_GATHER: *send = c->recv_counts[me], *recv = root ? received : 0; break;
    case XD_COLLECTIVE_SCATTER: *send = root ? sent : 0, *recv = c->send_counts[me]; break;
    default: *send = sent, *recv = received; break;
    }
}

static bool xdi_nccl_on_host(const xdi_nccl *t, const void *memory, int64_t elements) {
    return memory && elements > 0 && !xd_ctx_kernels(t->base.ctx)->memory.owns(t->base.ctx, memory);
}

/* Enlarges the mirror to at least `bytes`. Nothing uses it between calls. */
static xd_result xdi_nccl_widen(xdi_nccl *t, size_t bytes) {
    xdi_nccl_world *world = t->world;
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    if (bytes <= world->mirror_bytes) return XD_OK;
    memory->release(t->base.ctx, world->mirror);
    world->mirror_bytes = 0;
    world->mirror = (char *)memory->allocate(t->base.ctx, bytes);
    if (!world->mirror)
        return xdi_nccl_lost(t,
                             XD_FAIL(t->base.ctx, XD_ERROR_MEMORY,
                                     "the GPU has no room for %lld bytes of host memory", (long long)bytes));
    world->mirror_bytes = bytes;
    return XD_OK;
}

/* A call with host memory, through the mirror: first what is sent, then what is received, with its gaps. */
static xd_result xdi_nccl_run_host(xdi_nccl *t, const xd_collective *c, size_t send, size_t recv,
                                   double deadline) {
    const cudaStream_t stream = t->world->stream;
    const size_t behind = (send + 255) / 256 * 256;
    xd_collective record = *c;
    XD_TRY(xdi_nccl_widen(t, behind + recv));
    if (send) record.send = t->world->mirror;
    if (recv) record.recv = t->world->mirror + behind;
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_copy(t, stream, t->world->mirror, c->send, send));
    XD_TRY(xdi_nccl_copy(t, stream, t->world->mirror + behind, c->recv, recv));
    XD_TRY(xdi_nccl_start(t, &record, stream, deadline));
    XD_TRY(xdi_nccl_wait(t, deadline)); /* the copy below may block inside CUDA, so nothing may be pending */
    XD_TRY(xdi_nccl_copy(t, stream, c->recv, t->world->mirror + behind, recv));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

static xd_result xdi_nccl_run(xdi_nccl *t, const xd_collective *c, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    int64_t send, recv;
    void *const given = c->stream ? c->stream : xd_ctx_settings(t->base.ctx)->stream;
    const cudaStream_t stream = (cudaStream_t)given;
    xdi_nccl_extents(t, c, &send, &recv);
    const bool from_host = xdi_nccl_on_host(t, c->send, send), to_host = xdi_nccl_on_host(t, c->recv, recv);
    if (!from_host && !to_host) return xdi_nccl_start(t, c, stream, deadline);
    if (send && recv &&
        from_host != to_host) { /* the buffer on the device belongs to a stream of the caller */
        XD_TRY(xdi_nccl_enter(t, stream));
        XD_TRY(xdi_nccl_leave(t, stream));
    }
    return xdi_nccl_run_host(t, c, (size_t)send * size, (size_t)recv * size, deadline);
}

/* ---- two ranks ---- */

/* Swaps records with one other rank. */
static xd_result xdi_nccl_swap(xdi_nccl *t, int peer, const xd_control *mine, double deadline) {
    const cudaStream_t stream = t->world->stream;
    const int me = t->base.rank;
    const size_t size = sizeof *mine;
    t->records[me] = *mine;
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_copy(t, stream, &t->arrived[me], &t->records[me], size));
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    xdi_nccl_put(&batch, peer, t->arrived, me, 1, size);
    xdi_nccl_get(&batch, peer, t->arrived, peer, 1, size);
    XD_TRY(xdi_nccl_end(&batch, deadline));
    XD_TRY(xdi_nccl_copy(t, stream, &t->records[peer], &t->arrived[peer], size));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

/* A pair of ranks has no common count of calls, so it is compared only when all calls are. */
static xd_result xdi_nccl_pair(xdi_nccl *t, const xd_collective *c, double deadline) {
    const bool sends = c->kind == XD_COLLECTIVE_SEND;
    const int me = t->base.rank, from = t->world_ranks[sends ? me : c->root],
              to = t->world_ranks[sends ? c->root : me];
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.count = (uint64_t)c->count;
    mine.dtype = (uint32_t)c->dtype;
    if (t->world->compare < INT64_MAX) {
        if (c->dtype != XD_DTYPE_NONE) return xdi_nccl_run(t, c, deadline);
        xdi_nccl_break(t->world, XD_ERROR_PEER, t->world_ranks[me]); /* as in control */
        return XD_OK;
    }
    XD_TRY(xdi_nccl_swap(t, c->root, &mine, deadline));
    const xd_control *theirs = &t->records[c->root], *offer = sends ? &mine : theirs,
                     *wish = sends ? theirs : &mine;
    if (mine.dtype == (uint32_t)XD_DTYPE_NONE) return XD_OK; /* there is no data to move */
    XD_REQUIRE(t->base.ctx, theirs->dtype != (uint32_t)XD_DTYPE_NONE, XD_ERROR_ARGUMENT,
               "rank %d refused its own arguments", t->world_ranks[c->root]);
    XD_REQUIRE(t->base.ctx, offer->dtype == wish->dtype, XD_ERROR_MISMATCH,
               "rank %d sends %s, rank %d receives %s", from, xd_dtype_name((xd_dtype)offer->dtype), to,
               xd_dtype_name((xd_dtype)wish->dtype));
    XD_REQUIRE(t->base.ctx, offer->count == wish->count, XD_ERROR_MISMATCH,
               "rank %d sends count %lld, rank %d receives count %lld", from, (long long)offer->count, to,
               (long long)wish->count);
    return xdi_nccl_run(t, c, deadline);
}

static xd_result xdi_nccl_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    if (c->kind == XD_COLLECTIVE_SEND || c->kind == XD_COLLECTIVE_RECV) return xdi_nccl_pair(t, c, deadline);
    return xdi_nccl_run(t, c, deadline);
}

/* ---- handles ---- */

static xd_result xdi_nccl_create(xdi_nccl_world *world, int size, int rank, xdi_nccl **out);

/* Joins the communicator of `id`. */
static xd_result xdi_nccl_join(xdi_nccl *t, const ncclUniqueId *id, double deadline) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t code = ncclCommInitRankConfig(&t->comm, t->base.size, *id, t->base.rank, &config);
    return xdi_nccl_settle(t, code, deadline);
}

/* The first member creates an id and sends it to the others. NCCL has a split too, but ranks outside the group
 * would have to call it as well. */
static xd_result xdi_nccl_hand_on(xdi_nccl *t, const int *members, int size, int rank, ncclUniqueId *id,
                                  double deadline) {
    const cudaStream_t stream = t->world->stream;
    const size_t bytes = sizeof *id;
    if (rank == 0) {
        const ncclResult_t code = ncclGetUniqueId(id);
        if (code != ncclSuccess) return xdi_nccl_fault(t, code);
        XD_TRY(xdi_nccl_copy(t, stream, t->world->mirror, id, bytes));
    }
    XD_TRY(xdi_nccl_enter(t, stream));
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int r = 1; r < size && rank == 0; r++)
        xdi_nccl_put(&batch, members[r], t->world->mirror, 0, 1, bytes);
    if (rank > 0) xdi_nccl_get(&batch, members[0], t->world->mirror, 0, 1, bytes);
    XD_TRY(xdi_nccl_end(&batch, deadline));
    XD_TRY(xdi_nccl_leave(t, stream));
    XD_TRY(xdi_nccl_wait(t, deadline));
    if (rank == 0) return XD_OK;
    XD_TRY(xdi_nccl_copy(t, stream, id, t->world->mirror, bytes));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

static void xdi_nccl_destroy(xd_transport *transport);

static xd_result xdi_nccl_split(xd_transport *transport, const int *members, int size, int rank,
                                double deadline, xd_transport **out) {
    xdi_nccl *t = (xdi_nccl *)transport, *child = NULL;
    ncclUniqueId id;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    XD_TRY(xdi_nccl_create(t->world, size, rank, &child));
    for (int r = 0; r < size; r++) child->world_ranks[r] = t->world_ranks[members[r]];
    xd_result result = xdi_nccl_hand_on(t, members, size, rank, &id, deadline);
    if (result == XD_OK) result = xdi_nccl_join(child, &id, deadline);
    if (result == XD_OK)
        *out = &child->base;
    else
        xdi_nccl_destroy(&child->base);
    return result;
}

static void xdi_nccl_abort(xd_transport *transport) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_break(t->world, XD_ERROR_PEER, t->world_ranks[transport->rank]);
}

/* Pending work gets the time of one collective; then the communicator is aborted. */
static void xdi_nccl_close(xdi_nccl *t) {
    const double deadline = xd_now(t->base.ctx) + xd_ctx_settings(t->base.ctx)->timeout_seconds;
    if (t->comm && xdi_nccl_wait(t, deadline) == XD_OK &&
        xdi_nccl_settle(t, ncclCommFinalize(t->comm), deadline) == XD_OK)
        ncclCommDestroy(t->comm);
    t->comm = NULL; /* a failure has aborted it */
}

static void xdi_nccl_release_world(xdi_nccl_world *world) {
    const xd_device_ops *memory = &xd_ctx_kernels(world->ctx)->memory;
    if (world->groups || world->is_held) return;
    if (world->stream) cudaStreamDestroy(world->stream);
    if (world->spare) cudaEventDestroy(world->spare);
    memory->release(world->ctx, world->mirror);
    memory->release(world->ctx, world->staging);
    xd_release(world->ctx, world);
}

static void xdi_nccl_destroy(xd_transport *transport) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xd_ctx *ctx = transport->ctx;
    xdi_nccl **at = &t->world->groups;
    xdi_nccl_close(t);
    while (*at != t) at = &(*at)->next;
    *at = t->next;
    xdi_nccl_release_world(t->world);
    if (t->last) cudaEventDestroy(t->last);
    if (t->records) cudaFreeHost(t->records);
    xd_ctx_kernels(ctx)->memory.release(ctx, t->arrived);
    xd_release(ctx, (void *)t->pieces);
    xd_release(ctx, t->leaves);
    xd_release(ctx, t->counts);
    xd_release(ctx, t->begins);
    xd_release(ctx, t->world_ranks);
    xd_release(ctx, t);
}

static const xd_transport_ops xdi_nccl_ops = {
    "nccl", xdi_nccl_control, xdi_nccl_execute, xdi_nccl_split, xdi_nccl_abort, xdi_nccl_destroy, NULL, true
};

/* A handle without a communicator; the caller fills in world_ranks. */
static xd_result xdi_nccl_create(xdi_nccl_world *world, int size, int rank, xdi_nccl **out) {
    xd_ctx *ctx = world->ctx;
    const size_t n = (size_t)size;
    void *records = NULL;
    xdi_nccl *t = (xdi_nccl *)xd_allocate(ctx, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    t->base.ops = &xdi_nccl_ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = size;
    t->world = world;
    t->next = world->groups;
    world->groups = t;
    t->world_ranks = (int *)xd_allocate(ctx, n * sizeof *t->world_ranks);
    t->base.world_ranks = t->world_ranks;
    t->begins = (int64_t *)xd_allocate(ctx, n * sizeof *t->begins);
    t->counts = (int64_t *)xd_allocate(ctx, n * sizeof *t->counts);
    t->leaves = (xd_leaves *)xd_allocate(ctx, n * sizeof *t->leaves);
    t->pieces = (const void **)xd_allocate(ctx, n * sizeof *t->pieces);
    t->arrived = (xd_control *)xd_ctx_kernels(ctx)->memory.allocate(ctx, n * sizeof *t->arrived);
    cudaError_t code = cudaEventCreateWithFlags(&t->last, cudaEventDisableTiming);
    if (code == cudaSuccess) code = cudaMallocHost(&records, n * sizeof *t->records);
    t->records = (xd_control *)records;
    if (!t->world_ranks || !t->begins || !t->counts || !t->leaves || !t->pieces || !t->arrived ||
        code != cudaSuccess) {
        xdi_nccl_destroy(&t->base);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a handle on %d ranks: CUDA says %s", size,
                       cudaGetErrorString(code));
    }
    *out = t;
    return XD_OK;
}

/* ---- the id ---- */

XD_API xd_result xd_nccl_unique_id(xd_ctx *ctx, ncclUniqueId *out) {
    const ncclResult_t code = ncclGetUniqueId(out);
    return code == ncclSuccess ? XD_OK : xdi_nccl_refuse(ctx, code, NULL);
}

/* Sleeps between two polls of a file or a port. */
static xd_result xdi_nccl_nap(xd_ctx *ctx, const char *what, const char *where, double deadline) {
    const struct timespec nap = { 0, 10000000 };
    XD_REQUIRE(ctx, xd_now(ctx) < deadline, XD_ERROR_TIMEOUT, "no %s %s before the deadline", what, where);
    nanosleep(&nap, NULL);
    return XD_OK;
}

/* The file of rank 0 appears complete, under a name that did not exist. */
static xd_result xdi_nccl_read_id(xd_ctx *ctx, const char *path, ncclUniqueId *id, double deadline) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    intptr_t file = 0;
    while (files->open(files->user, path, XD_FILE_READ, &file) != 0)
        XD_TRY(xdi_nccl_nap(ctx, "id in the file", path, deadline));
    const int code = files->read(files->user, file, id, sizeof *id, 0);
    files->close(files->user, file);
    XD_REQUIRE(ctx, code == 0, XD_ERROR_IO, "%s holds no id: %s", path, strerror(code));
    return XD_OK;
}

/* No call on the socket waits longer than a second. */
static void xdi_nccl_limit(int socket) {
    struct timeval second;
    second.tv_sec = 1;
    second.tv_usec = 0;
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
}

/* A socket that listens (host NULL) or is connected; -1 on failure. */
static int xdi_nccl_open(const char *host, const char *port) {
    struct addrinfo hints, *found = NULL;
    const int on = 1;
    int opened = -1;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = host ? 0 : AI_PASSIVE;
    if (getaddrinfo(host, port, &hints, &found) != 0) return -1;
    for (const struct addrinfo *a = found; a && opened < 0; a = a->ai_next) {
        opened = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        if (opened < 0) continue;
        xdi_nccl_limit(opened);
        setsockopt(opened, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        const bool ready = host ? connect(opened, a->ai_addr, a->ai_addrlen) == 0
                                : bind(opened, a->ai_addr, a->ai_addrlen) == 0 && listen(opened, 1024) == 0;
        if (ready) continue;
        close(opened);
        opened = -1;
    }
    freeaddrinfo(found);
    return opened;
}

/* Serves one connection: returns the rank of the caller, or -1 when it is not a rank of this world. */
static int xdi_nccl_greet(int caller, int size, const ncclUniqueId *id) {
    uint32_t hello[2] = { 0, 0 };
    xdi_nccl_limit(caller);
    if (recv(caller, hello, sizeof hello, MSG_WAITALL) != (ssize_t)sizeof hello) return -1;
    if (hello[0] != (uint32_t)XDI_NCCL_HELLO || hello[1] == 0 || hello[1] >= (uint32_t)size) return -1;
    if (send(caller, id, sizeof *id, MSG_NOSIGNAL) != (ssize_t)sizeof *id) return -1;
    return (int)hello[1];
}

/* Rank 0 sends the id to every other rank. A rank whose connection broke asks again, so each rank is counted once. */
static xd_result xdi_nccl_serve(xd_ctx *ctx, const xd_nccl_desc *d, const ncclUniqueId *id, double deadline) {
    bool *served = (bool *)xd_allocate(ctx, (size_t)d->size * sizeof *served);
    XD_REQUIRE(ctx, served, XD_ERROR_MEMORY, "no room for a list of %d ranks", d->size);
    const int door = xdi_nccl_open(NULL, d->port);
    xd_result result = XD_OK;
    if (door < 0) result = XD_FAIL(ctx, XD_ERROR_IO, "cannot listen on port %s", d->port);
    for (int left = d->size - 1; left > 0 && result == XD_OK;) {
        const int caller = accept(door, NULL, NULL); /* waits at most one second */
        const int rank = caller >= 0 ? xdi_nccl_greet(caller, d->size, id) : -1;
        if (caller >= 0) close(caller);
        if (rank > 0 && !served[rank]) left--;
        if (rank > 0) served[rank] = true;
        if (rank < 0) result = xdi_nccl_nap(ctx, "call of every rank on port", d->port, deadline);
    }
    if (door >= 0) close(door);
    xd_release(ctx, served);
    return result;
}

static xd_result xdi_nccl_ask(xd_ctx *ctx, const xd_nccl_desc *d, ncclUniqueId *id, double deadline) {
    const uint32_t hello[2] = { (uint32_t)XDI_NCCL_HELLO, (uint32_t)d->rank };
    for (;;) {
        const int line = xdi_nccl_open(d->host, d->port);
        const bool told = line >= 0 &&
                          send(line, hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello &&
                          recv(line, id, sizeof *id, MSG_WAITALL) == (ssize_t)sizeof *id;
        if (line >= 0) close(line);
        if (told) return XD_OK;
        XD_TRY(xdi_nccl_nap(ctx, "answer of rank 0 at", d->host, deadline));
    }
}

static xd_result xdi_nccl_learn_id(xd_ctx *ctx, const xd_nccl_desc *d, ncclUniqueId *id, double deadline) {
    if (d->id) {
        *id = *d->id;
        return XD_OK;
    }
    if (d->rank > 0)
        return d->file ? xdi_nccl_read_id(ctx, d->file, id, deadline) : xdi_nccl_ask(ctx, d, id, deadline);
    XD_TRY(xd_nccl_unique_id(ctx, id));
    if (d->size == 1) return XD_OK;
    return d->file ? xd_file_save(ctx, d->file, id, sizeof *id) : xdi_nccl_serve(ctx, d, id, deadline);
}

/* ---- joining ---- */

static xd_result xdi_nccl_validate(xd_ctx *ctx, const xd_nccl_desc *d) {
    const xd_kernels *kernels = xd_ctx_settings(ctx)->kernels; /* NULL: the CPU's */
    XD_REQUIRE(ctx, d->size >= 1 && d->rank >= 0 && d->rank < d->size, XD_ERROR_ARGUMENT,
               "rank %d is outside [0, %d)", d->rank, d->size);
    XD_REQUIRE(ctx, d->size == 1 || d->id || d->file || (d->host && d->port), XD_ERROR_ARGUMENT,
               "%d ranks need an id, a file, or a host and a port", d->size);
    XD_REQUIRE(ctx, d->compare >= -1, XD_ERROR_ARGUMENT, "compare is %lld", (long long)d->compare);
    XD_REQUIRE(ctx, kernels && kernels->device == XD_DEVICE_CUDA, XD_ERROR_STATE,
               "xd_comm_nccl comes after xd_cuda_create");
    return XD_OK;
}

static xd_result xdi_nccl_furnish(xdi_nccl_world *world) {
    xd_ctx *ctx = world->ctx;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    struct cudaPointerAttributes attributes;
    int device = -1;
    world->staging = (char *)memory->allocate(ctx, world->staging_bytes);
    world->mirror = (char *)memory->allocate(ctx, XDI_NCCL_MIRROR);
    XD_REQUIRE(ctx, world->staging && world->mirror, XD_ERROR_MEMORY,
               "the GPU has no room for %lld bytes of staging", (long long)world->staging_bytes);
    world->mirror_bytes = XDI_NCCL_MIRROR;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) code = cudaPointerGetAttributes(&attributes, world->staging);
    XD_REQUIRE(ctx, code != cudaSuccess || attributes.device == device, XD_ERROR_STATE,
               "the current device is %d, that of the context %d", device, attributes.device);
    if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&world->stream, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = cudaEventCreateWithFlags(&world->spare, cudaEventDisableTiming);
    XD_REQUIRE(ctx, code == cudaSuccess, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code));
    return XD_OK;
}

/* Ranks may run on different processors, and the bits of losses depend on the CPU level: all use the lowest. The
 * same exchange compares the settings that must be the same on all ranks. */
static xd_result xdi_nccl_agree(xdi_nccl *t, double deadline) {
    xdi_nccl_world *world = t->world;
    uint64_t lowest = (uint64_t)xd_ctx_settings(t->base.ctx)->cpu;
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.count = lowest;
    mine.extra = (uint64_t)world->staging_bytes;
    mine.layout = (uint64_t)world->compare;
    XD_TRY(xdi_nccl_gather_records(t, &mine, deadline));
    for (int r = 0; r < t->base.size; r++) {
        const xd_control *theirs = &t->records[r], *first = &t->records[0];
        if (theirs->count < lowest) lowest = theirs->count;
        XD_REQUIRE(t->base.ctx, theirs->extra == first->extra && theirs->layout == first->layout,
                   XD_ERROR_MISMATCH,
                   "rank %d passed staging_bytes %llu and compare %lld, rank 0 %llu and %lld", r,
                   (unsigned long long)theirs->extra, (long long)theirs->layout,
                   (unsigned long long)first->extra, (long long)first->layout);
    }
    xd_ctx_set_cpu(t->base.ctx, (xd_cpu_level)lowest);
    return XD_OK;
}

static xd_result xdi_nccl_enter_world(xdi_nccl *t, const xd_nccl_desc *d) {
    xd_ctx *ctx = t->base.ctx;
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const bool made_file = d->rank == 0 && d->size > 1 && d->file && !d->id;
    ncclUniqueId id;
    XD_TRY(xdi_nccl_learn_id(ctx, d, &id, deadline));
    const xd_result joined = xdi_nccl_join(t, &id, deadline);
    if (made_file && files->remove) files->remove(files->user, d->file);
    XD_TRY(joined);
    return xdi_nccl_agree(t, deadline);
}

XD_API xd_result xd_comm_nccl(xd_ctx *ctx, const xd_nccl_desc *desc, xd_comm **out) {
    xd_nccl_desc d = *desc;
    if (!d.staging_bytes) d.staging_bytes = XDI_NCCL_STAGING;
    XD_TRY(xdi_nccl_validate(ctx, &d));
    xd_ctx_set_rank(ctx, d.rank);
    xdi_nccl *t = NULL;
    xdi_nccl_world *world = (xdi_nccl_world *)xd_allocate(ctx, sizeof *world);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", d.size);
    world->ctx = ctx;
    world->staging_bytes = d.staging_bytes;
    world->compare = d.compare == 0 ? INT64_MAX : d.compare < 0 ? 0 : d.compare;
    world->is_held = true;
    xd_result result = xdi_nccl_furnish(world);
    if (result == XD_OK) result = xdi_nccl_create(world, d.size, d.rank, &t);
    world->is_held = false;
    if (result != XD_OK) {
        xdi_nccl_release_world(world);
        return result;
    }
    for (int r = 0; r < d.size; r++) t->world_ranks[r] = r;
    result = xdi_nccl_enter_world(t, &d);
    if (result != XD_OK) {
        xdi_nccl_destroy(&t->base);
        return result;
    }
    return xd_comm_create(ctx, &t->base, out);
}

#endif
