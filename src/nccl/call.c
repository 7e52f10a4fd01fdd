/* One call of a collective, with memory of the device or of the host. */

/* Starts a call whose memory is all on the device. */
static xd_result xdi_nccl_start(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, double deadline) {
    XD_TRY(xdi_nccl_enter(t, stream));
    if (c->kind == XD_COLLECTIVE_ALL_REDUCE) {
        XD_TRY(xdi_nccl_all_reduce(t, c, stream, deadline));
    } else if (c->kind == XD_COLLECTIVE_REDUCE_SCATTER) {
        XD_TRY(xdi_nccl_reduce_scatter(t, c, stream, deadline));
    } else {
        XD_TRY(xdi_nccl_move(t, c, stream, deadline));
    }
    return xdi_nccl_leave(t, stream);
}

/* The largest end of a block. */
static int64_t xdi_nccl_extent(const int64_t *counts, const int64_t *displacements, int n) {
    int64_t extent = 0, end = 0;
    for (int r = 0; r < n; end += counts[r++]) {
        const int64_t begin = displacements ? displacements[r] : end;
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
    xd_ctx *ctx = t->world->ctx;
    return memory && elements > 0 && !xd_ctx_kernels(ctx)->memory.owns(ctx, memory);
}

/* Enlarges the mirror to at least `bytes`. Nothing uses it between calls. */
static xd_result xdi_nccl_widen(xdi_nccl *t, size_t bytes) {
    xdi_nccl_world *world = t->world;
    const xd_device_ops *memory = &xd_ctx_kernels(world->ctx)->memory;
    if (bytes <= world->mirror_bytes) return XD_OK;
    memory->release(world->ctx, world->mirror);
    world->mirror_bytes = 0;
    world->mirror = (char *)memory->allocate(world->ctx, bytes);
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
    /* The buffer on the device belongs to a stream of the caller. */
    if (send && recv && from_host != to_host) {
        XD_TRY(xdi_nccl_enter(t, stream));
        XD_TRY(xdi_nccl_leave(t, stream));
    }
    return xdi_nccl_run_host(t, c, (size_t)send * size, (size_t)recv * size, deadline);
}

static xd_result xdi_nccl_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_run(t, c, deadline);
    xdi_nccl_scope_end(&scope);
    return result;
}
