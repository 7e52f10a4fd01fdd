/* Collectives: control records, what only moves, and sums. */

/* ---- sends and receives of one group call ---- */

typedef struct xdi_nccl_batch {
    xdi_nccl *t;
    cudaStream_t stream;
    ncclResult_t code;
    const void *from; /* what this rank keeps: from where to where, and its bytes */
    void *to;
    size_t bytes;
} xdi_nccl_batch;

static xdi_nccl_batch xdi_nccl_begin(xdi_nccl *t, cudaStream_t stream) {
    xdi_nccl_batch batch;
    memset(&batch, 0, sizeof batch);
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

static bool xdi_nccl_is_moving(uint32_t kind) {
    return kind >= (uint32_t)XD_COLLECTIVE_BROADCAST && kind < (uint32_t)XD_COLLECTIVE_SEND;
}

/* Whether the ranks compare a call that moves data. All have the same count of calls, so all decide the same. */
static bool xdi_nccl_compares(const xdi_nccl *t, const xd_collective *next) {
    return t->calls < t->world->compare || (next && next->leaves.total && !next->known_leaves);
}

static xd_result xdi_nccl_confer(xdi_nccl *t, const xd_control *mine, const xd_collective *next,
                                 xd_control *all, double deadline) {
    const int n = t->base.size;
    xd_control record = *mine;
    t->displaced = next && !next->leaves.total && (next->send_displacements || next->recv_displacements);
    const bool moves = xdi_nccl_is_moving(mine->kind), compares = !moves || xdi_nccl_compares(t, next);
    t->calls += moves;
    if (compares) {
        if (t->displaced) record.extra = 1; /* otherwise only splits and leaves use it */
        XD_TRY(xdi_nccl_gather_records(t, &record, deadline));
        for (int r = 0; r < n; r++) t->displaced = t->displaced || t->records[r].extra;
        memcpy(all, t->records, (size_t)n * sizeof *all);
        return XD_OK;
    }
    /* The peers are not comparing, so they cannot learn why this rank does not come. */
    if (mine->status != (int32_t)XD_OK) return xdi_nccl_lost(t, (xd_result)mine->status);
    xd_control_assume(mine, next, n, all);
    return XD_OK;
}

static xd_result xdi_nccl_control(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                                  xd_control *all, double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_confer(t, mine, next, all, deadline);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* ---- moves ---- */

/* True for equal blocks back to back, for which NCCL has calls: the same answer on every rank. */
static bool xdi_nccl_is_even(const xdi_nccl *t, const int64_t *counts) {
    for (int r = 0; r < t->base.size; r++)
        if (counts[r] != counts[0]) return false;
    return !t->displaced;
}

static void xdi_nccl_send(void *user, int peer, const void *data, size_t bytes) {
    xdi_nccl_batch *b = (xdi_nccl_batch *)user;
    if (peer == b->t->base.rank) b->from = data;
    xdi_nccl_put(b, peer, data, 0, (int64_t)bytes, 1);
}

static void xdi_nccl_receive(void *user, int peer, void *data, size_t bytes) {
    xdi_nccl_batch *b = (xdi_nccl_batch *)user;
    if (peer == b->t->base.rank) {
        b->to = data;
        b->bytes = bytes;
    }
    xdi_nccl_get(b, peer, data, 0, (int64_t)bytes, 1);
}

/* Every kind that only moves data, as messages. */
static xd_result xdi_nccl_messages(xdi_nccl *t, const xd_collective *c, cudaStream_t stream,
                                   double deadline) {
    static const xd_message_sink sink = { xdi_nccl_send, xdi_nccl_receive };
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    xd_collective_messages(c, t->base.rank, t->base.size, &sink, &batch);
    XD_TRY(xdi_nccl_end(&batch, deadline));
    return batch.to && batch.from ? xdi_nccl_copy(t, stream, batch.to, batch.from, batch.bytes) : XD_OK;
}

static xd_result xdi_nccl_move(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    if (c->kind == XD_COLLECTIVE_BROADCAST) {
        /* root's is not written */
        void *data = c->root == t->base.rank ? (void *)(uintptr_t)c->send : c->recv;
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
    const xd_reduce_kernels *reduce = &xd_ctx_kernels(t->world->ctx)->reduce;
    xd_launch launch = xd_ctx_launch(t->world->ctx);
    int64_t longest = 0;
    launch.stream = stream;
    for (int r = 0; r < n; r++) longest = t->counts[r] > longest ? t->counts[r] : longest;
    XD_TRY(xdi_nccl_await(t, stream, &t->world->spare));
    for (int64_t at = 0; at < longest; at += tile) {
        const int64_t count = xdi_nccl_in_tile(t->counts[t->base.rank], at, tile);
        XD_TRY(xdi_nccl_bring(t, c, stream, stride, at, tile, deadline));
        if (count == 0) continue;
        char *to = (char *)out + (size_t)at * size;
        const xd_result result =
            c->leaves.total
                ? reduce->leaves(&launch, to, t->pieces, t->leaves, n, tile, count, c->dtype, c->op)
                : reduce->pieces(&launch, to, t->pieces, n, count, c->dtype, c->op);
        XD_TRY(xdi_nccl_lost(t, xdi_nccl_pass_on(t, result)));
    }
    return xdi_nccl_put_mark(t, stream, &t->world->spare);
}

/* Finds every rank's leaves; returns the elements of each node in a tile. */
static int64_t xdi_nccl_tile(xdi_nccl *t, const xd_collective *c) {
    const int64_t nodes = xd_control_leaves(t->records, c, t->base.size, t->leaves);
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
    if (xdi_nccl_is_native(t, c) && xdi_nccl_is_even(t, c->send_counts)) {
        if (c->send_counts[0] == 0) return XD_OK;
        const ncclResult_t code =
            ncclReduceScatter(c->send, c->recv, (size_t)c->send_counts[0], xdi_nccl_type(c->dtype),
                              xdi_nccl_op(c->op), t->comm, stream);
        return xdi_nccl_settle(t, code, deadline);
    }
    const int64_t tile = xdi_nccl_tile(t, c);
    XD_TRY(xdi_nccl_room(t, tile));
    const int64_t stride = xd_collective_blocks(c, t->base.size, false, t->begins, t->counts);
    return xdi_nccl_reduce(t, c, stream, c->recv, stride, tile, deadline);
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
    const int64_t stride = xd_collective_blocks(c, n, whole, t->begins, t->counts);
    char *own = (char *)c->recv + (size_t)t->begins[me] * size;
    XD_TRY(xdi_nccl_reduce(t, c, stream, own, stride, tile, deadline));
    if (whole) return XD_OK;
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int r = 0; r < n; r++) {
        xdi_nccl_put(&batch, r, own, 0, t->counts[me], size);
        xdi_nccl_get(&batch, r, c->recv, t->begins[r], t->counts[r], size);
    }
    return xdi_nccl_end(&batch, deadline);
}
