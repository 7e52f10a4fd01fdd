/* Collectives: control records, and what only moves. */

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

/* What the ranks did before a barrier or an agreement without comparing it. */
static xd_result xdi_nccl_look_back(xdi_nccl *t) {
    const int other = xdi_nccl_stranger(t);
    const bool pairs = other == t->base.size;
    const int culprit = other < 0 || pairs ? -1 : t->world_ranks[other];
    char calls[200];
    if (other < 0) return XD_OK;
    xdi_nccl_recall(t, calls, sizeof calls);
    xdi_nccl_break(t->world, XD_ERROR_MISMATCH, culprit);
    if (pairs)
        return XD_FAIL(t->base.ctx, XD_ERROR_MISMATCH,
                       "counts of an all_to_all differ between two ranks, among %lld calls that were not "
                       "compared; %s",
                       (long long)t->unseen, calls);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_MISMATCH, culprit,
                           "rank %d made other calls than rank %d, of which this one made %lld that were not "
                           "compared; %s",
                           culprit, t->world_ranks[0], (long long)t->unseen, calls);
}

static xd_result xdi_nccl_confer_seen(xdi_nccl *t, const xd_control *mine, xd_control *all, double deadline) {
    const int n = t->base.size;
    xd_control record = *mine;
    if (t->displaced) record.extra = 1; /* otherwise only splits, leaves and histories use it */
    xdi_nccl_show_history(t, &record);
    XD_TRY(xdi_nccl_gather_records(t, &record, deadline));
    XD_TRY(xdi_nccl_look_back(t));
    for (int r = 0; r < n && xdi_nccl_is_moving(mine->kind); r++)
        t->displaced = t->displaced || t->records[r].extra;
    memcpy(all, t->records, (size_t)n * sizeof *all);
    return XD_OK;
}

static xd_result xdi_nccl_confer(xdi_nccl *t, const xd_control *mine, const xd_collective *next,
                                 xd_control *all, double deadline) {
    t->displaced = next && !next->leaves.total && (next->send_displacements || next->recv_displacements);
    const bool moves = xdi_nccl_is_moving(mine->kind), compares = !moves || xdi_nccl_compares(t, next);
    t->calls += moves;
    xdi_nccl_note(t, mine);
    if (compares) return xdi_nccl_confer_seen(t, mine, all, deadline);
    /* The peers are not comparing, so they cannot learn why this rank does not come. */
    if (mine->status != (int32_t)XD_OK) return xdi_nccl_lost(t, (xd_result)mine->status);
    xdi_nccl_remember(t, mine);
    xd_control_assume(mine, next, t->base.size, all);
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
