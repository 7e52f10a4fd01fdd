/* Sums in rank order by the context's kernels, and those that NCCL does itself. */

/* A sum of this rank's block, tile by tile. Staging has two halves: while the kernels add one, on a stream of the world, the next
 * tile comes into the other. What this rank adds itself is read where it is, unless it is a forest of several nodes. */
typedef struct xdi_nccl_sum {
    const xd_collective *c;
    cudaStream_t stream, adds; /* the caller's, and that of the kernels: the same when one tile is enough */
    void *out;
    int64_t stride; /* elements from one node of send to the next */
    int64_t tile;   /* elements of each node */
    size_t half;    /* bytes of a half of staging; 0: there is one */
} xdi_nccl_sum;

static int64_t xdi_nccl_nodes(const xdi_nccl *t, int rank) {
    return t->leaves[rank].total ? xd_leaves_nodes(t->leaves[rank].first, t->leaves[rank].count) : 1;
}

/* Elements of a block of `count` in the tile that begins at `at`. */
static int64_t xdi_nccl_in_tile(int64_t count, int64_t at, int64_t tile) {
    const int64_t left = count > at ? count - at : 0;
    return left < tile ? left : tile;
}

/* Nodes of all ranks that need room in staging on some rank. */
static int64_t xdi_nccl_slots(const xdi_nccl *t) {
    bool single = true;
    int64_t nodes = 0;
    for (int r = 0; r < t->base.size; r++) {
        nodes += xdi_nccl_nodes(t, r);
        single = single && xdi_nccl_nodes(t, r) == 1;
    }
    return single ? nodes - 1 : nodes;
}

/* Collects the tile at `at` of this rank's block in the half `half`: the nodes of the ranks, back to back. */
static xd_result xdi_nccl_bring(xdi_nccl *t, const xdi_nccl_sum *s, int half, int64_t at, double deadline) {
    const size_t size = xd_dtype_size(s->c->dtype), bytes = (size_t)s->tile * size;
    const int n = t->base.size, me = t->base.rank;
    const int64_t own = xdi_nccl_in_tile(t->counts[me], at, s->tile);
    const bool in_place = xdi_nccl_nodes(t, me) == 1;
    const char *mine = (const char *)s->c->send + (size_t)(t->begins[me] + at) * size;
    char *room = t->world->staging + (size_t)half * s->half;
    xdi_nccl_batch batch = xdi_nccl_begin(t, s->stream);
    for (int r = 0; r < n; r++) {
        t->pieces[r] = r == me && in_place ? mine : room;
        if (r == me && in_place) continue;
        for (int64_t k = 0; k < xdi_nccl_nodes(t, me); k++)
            xdi_nccl_put(&batch, r, s->c->send, k * s->stride + t->begins[r] + at,
                         xdi_nccl_in_tile(t->counts[r], at, s->tile), size);
        for (int64_t k = 0; k < xdi_nccl_nodes(t, r); k++, room += bytes)
            xdi_nccl_get(&batch, r, room, 0, own, size);
    }
    XD_TRY(xdi_nccl_end(&batch, deadline));
    for (int64_t k = 0; k < xdi_nccl_nodes(t, me) && !in_place; k++)
        XD_TRY(xdi_nccl_copy(t, s->stream, (char *)(uintptr_t)t->pieces[me] + (size_t)k * bytes,
                             mine + (size_t)(k * s->stride) * size, (size_t)own * size));
    return XD_OK;
}

/* Adds t->pieces, whose nodes are `stride` elements apart, into out. */
static xd_result xdi_nccl_add(xdi_nccl *t, const xdi_nccl_sum *s, void *out, int64_t stride, int64_t count) {
    const xd_collective *c = s->c;
    const int n = t->base.size;
    const xd_reduce_kernels *reduce = &xd_ctx_kernels(t->world->ctx)->reduce;
    xd_launch launch = xd_ctx_launch(t->world->ctx);
    launch.stream = s->adds;
    const xd_result result =
        c->leaves.total
            ? reduce->leaves(&launch, out, t->pieces, t->leaves, n, stride, count, c->dtype, c->op)
            : reduce->pieces(&launch, out, t->pieces, n, count, c->dtype, c->op);
    return xdi_nccl_lost(t, xdi_nccl_pass_on(t, result));
}

/* `later` goes on after what `earlier` has so far. */
static xd_result xdi_nccl_follow(xdi_nccl *t, cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
    if (later == earlier) return XD_OK;
    XD_TRY(xdi_nccl_cuda(t, cudaEventRecord(event, earlier)));
    return xdi_nccl_cuda(t, cudaStreamWaitEvent(later, event, 0));
}

/* Each half is free again when its sum is done. In place, a rank writes only what it does not send. */
static xd_result xdi_nccl_reduce_tiles(xdi_nccl *t, const xdi_nccl_sum *s, double deadline) {
    const size_t size = xd_dtype_size(s->c->dtype);
    xdi_nccl_world *world = t->world;
    int64_t longest = 0;
    int half = 0;
    for (int r = 0; r < t->base.size; r++) longest = t->counts[r] > longest ? t->counts[r] : longest;
    for (int64_t at = 0; at < longest; at += s->tile, half = s->half ? 1 - half : 0) {
        const int64_t count = xdi_nccl_in_tile(t->counts[t->base.rank], at, s->tile);
        const bool again = s->adds != s->stream && count > 0 && at >= 2 * s->tile;
        if (again) XD_TRY(xdi_nccl_cuda(t, cudaStreamWaitEvent(s->stream, world->added[half], 0)));
        XD_TRY(xdi_nccl_bring(t, s, half, at, deadline));
        if (count == 0) continue;
        XD_TRY(xdi_nccl_follow(t, s->adds, s->stream, world->brought));
        XD_TRY(xdi_nccl_add(t, s, (char *)s->out + (size_t)at * size, s->tile, count));
        if (s->adds != s->stream) XD_TRY(xdi_nccl_cuda(t, cudaEventRecord(world->added[half], s->adds)));
    }
    return xdi_nccl_follow(t, s->stream, s->adds, world->joined);
}

/* A rank alone brings nothing: it copies, or adds its own nodes. */
static xd_result xdi_nccl_reduce_alone(xdi_nccl *t, const xdi_nccl_sum *s) {
    const size_t size = xd_dtype_size(s->c->dtype);
    t->pieces[0] = (const char *)s->c->send + (size_t)t->begins[0] * size;
    if (s->c->leaves.total) return xdi_nccl_add(t, s, s->out, s->stride, t->counts[0]);
    return xdi_nccl_copy(t, s->stream, s->out, t->pieces[0], (size_t)t->counts[0] * size);
}

/* Whether the kernels can be on the world's stream for them: a capture that it is in must be that of the caller's stream. */
static bool xdi_nccl_can_overlap(const xdi_nccl *t, cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (xdi_nccl_capture_info(t->world->adds, &status, &id) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    if (status == cudaStreamCaptureStatusNone) return true;
    return status == cudaStreamCaptureStatusActive && id == xdi_nccl_capture_of(t, stream);
}

/* Reduces this rank's block into out. */
static xd_result xdi_nccl_reduce(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, void *out,
                                 int64_t stride, int64_t tile, double deadline) {
    xdi_nccl_sum sum;
    memset(&sum, 0, sizeof sum);
    sum.c = c;
    sum.stream = sum.adds = stream;
    sum.out = out;
    sum.stride = stride;
    sum.tile = tile;
    if (t->base.size == 1) return xdi_nccl_reduce_alone(t, &sum);
    const size_t bytes = (size_t)(xdi_nccl_slots(t) * tile) * xd_dtype_size(c->dtype);
    sum.half = 2 * bytes <= t->world->staging_bytes ? bytes : 0;
    if (sum.half && t->counts[t->base.rank] > tile && xdi_nccl_can_overlap(t, stream))
        sum.adds = t->world->adds;
    XD_TRY(xdi_nccl_await(t, stream, &t->world->spare));
    XD_TRY(xdi_nccl_reduce_tiles(t, &sum, deadline));
    return xdi_nccl_put_mark(t, stream, &t->world->spare);
}

/* Finds every rank's leaves; returns the elements of each node in a tile, two of which are in staging if there is room. */
static int64_t xdi_nccl_tile(xdi_nccl *t, const xd_collective *c) {
    (void)xd_control_leaves(t->records, c, t->base.size, t->leaves);
    const int64_t slots = t->base.size == 1 ? 0 : xdi_nccl_slots(t);
    if (slots == 0) return INT64_MAX; /* nothing is staged */
    const int64_t room = (int64_t)t->world->staging_bytes / (slots * (int64_t)xd_dtype_size(c->dtype));
    const int64_t tile = room / 2 - room / 2 % XDI_NCCL_ALIGN;
    return tile > 0 ? tile : room > 1 ? room / 2 : room;
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
