/* Messages between two ranks, as a caller lists them. */

/* The messages of a pair of ranks have an order that both know: those from the lower rank first, then as listed. The k-th of each
 * pair are a wave, which all ranks are in at the same time. */
static void xdi_nccl_number(const xdi_nccl *t, xd_message *messages, int count) {
    for (int i = 0; i < count; i++) {
        const xd_collective *c = &messages[i].record;
        const bool up = (c->kind == XD_COLLECTIVE_SEND) == (t->base.rank < c->root);
        int before = 0;
        for (int k = 0; k < count; k++) {
            const xd_collective *other = &messages[k].record;
            const bool same = other->kind == c->kind;
            if (other->root == c->root && (same ? k < i : !up)) before++;
        }
        messages[i].stage = 1 + before;
    }
}

/* Swaps what both ranks passed, for all messages of a wave at once; false in *any without one. */
static xd_result xdi_nccl_offer(xdi_nccl *t, xd_message *messages, int count, int wave, bool *any,
                                double deadline) {
    const cudaStream_t stream = t->world->stream;
    const int n = t->base.size;
    const size_t size = sizeof *t->records;
    xd_control *mine = t->records + n;
    *any = false;
    memset(mine, 0, (size_t)n * size);
    for (int i = 0; i < count; i++) {
        if (messages[i].stage != wave) continue;
        mine[messages[i].record.root].count = (uint64_t)messages[i].record.count;
        mine[messages[i].record.root].dtype = (uint32_t)messages[i].record.dtype;
        *any = true;
    }
    if (!*any) return XD_OK;
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_copy(t, stream, t->arrived + n, mine, (size_t)n * size));
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int i = 0; i < count; i++) {
        if (messages[i].stage != wave) continue;
        xdi_nccl_put(&batch, messages[i].record.root, t->arrived, n + messages[i].record.root, 1, size);
        xdi_nccl_get(&batch, messages[i].record.root, t->arrived, messages[i].record.root, 1, size);
    }
    XD_TRY(xdi_nccl_end(&batch, deadline));
    for (int i = 0; i < count; i++) {
        const int peer = messages[i].record.root;
        if (messages[i].stage == wave)
            XD_TRY(xdi_nccl_copy(t, stream, &t->records[peer], &t->arrived[peer], size));
    }
    XD_TRY(xdi_nccl_leave(t, stream));
    XD_TRY(xdi_nccl_wait(t, deadline));
    for (int i = 0; i < count; i++) {
        if (messages[i].stage != wave) continue;
        messages[i].their_count = (int64_t)t->records[messages[i].record.root].count;
        messages[i].their_dtype = (xd_dtype)t->records[messages[i].record.root].dtype;
    }
    return XD_OK;
}

/* Whether a message of this wave moves data. */
static bool xdi_nccl_moves(const xd_message *m, int wave) {
    const xd_collective *c = &m->record;
    return m->stage == wave && c->count > 0 && c->dtype != XD_DTYPE_NONE && c->dtype == m->their_dtype &&
           c->count == m->their_count;
}

/* A message's memory and its bytes; on the device at *behind of the mirror when it is the host's, and *behind goes on. */
static void *xdi_nccl_reach(const xdi_nccl *t, const xd_collective *c, size_t *bytes, size_t *behind) {
    void *data = c->kind == XD_COLLECTIVE_SEND ? (void *)(uintptr_t)c->send : c->recv;
    const size_t at = *behind;
    *bytes = (size_t)c->count * xd_dtype_size(c->dtype);
    if (!xdi_nccl_on_host(t, data, c->count)) return data;
    *behind += (*bytes + 255) / 256 * 256;
    return t->world->mirror + at;
}

/* Copies between the host's memory of a wave's messages of a kind and the mirror. */
static xd_result xdi_nccl_reflect(xdi_nccl *t, const xd_message *messages, int count, int wave,
                                  xd_collective_kind kind) {
    const cudaStream_t stream = t->world->stream;
    size_t bytes, behind = 0;
    for (int i = 0; i < count; i++) {
        const xd_collective *c = &messages[i].record;
        if (!xdi_nccl_moves(&messages[i], wave)) continue;
        char *there = (char *)xdi_nccl_reach(t, c, &bytes, &behind);
        if (c->kind != kind) continue;
        if (kind == XD_COLLECTIVE_SEND && there != c->send)
            XD_TRY(xdi_nccl_copy(t, stream, there, c->send, bytes));
        if (kind == XD_COLLECTIVE_RECV && there != c->recv)
            XD_TRY(xdi_nccl_copy(t, stream, c->recv, there, bytes));
    }
    return XD_OK;
}

/* Starts all of a wave as one group. */
static xd_result xdi_nccl_launch(xdi_nccl *t, const xd_message *messages, int count, int wave,
                                 cudaStream_t stream, double deadline) {
    size_t bytes, behind = 0;
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int i = 0; i < count; i++) {
        const xd_collective *c = &messages[i].record;
        if (!xdi_nccl_moves(&messages[i], wave)) continue;
        void *data = xdi_nccl_reach(t, c, &bytes, &behind);
        if (c->kind == XD_COLLECTIVE_SEND) xdi_nccl_put(&batch, c->root, data, 0, (int64_t)bytes, 1);
        if (c->kind == XD_COLLECTIVE_RECV) xdi_nccl_get(&batch, c->root, data, 0, (int64_t)bytes, 1);
    }
    return xdi_nccl_end(&batch, deadline);
}

/* Moves the data of a wave: on the caller's stream, or through the mirror when some of it is the host's, and then the host
 * waits. */
static xd_result xdi_nccl_carry(xdi_nccl *t, const xd_message *messages, int count, int wave,
                                double deadline) {
    void *const given = messages[0].record.stream;
    const cudaStream_t theirs = (cudaStream_t)given;
    size_t bytes, behind = 0;
    int moving = 0;
    for (int i = 0; i < count; i++) {
        if (!xdi_nccl_moves(&messages[i], wave)) continue;
        (void)xdi_nccl_reach(t, &messages[i].record, &bytes, &behind);
        moving++;
    }
    if (moving == 0) return XD_OK;
    XD_TRY(xdi_nccl_enter(t, theirs));
    if (behind == 0) {
        XD_TRY(xdi_nccl_launch(t, messages, count, wave, theirs, deadline));
        return xdi_nccl_leave(t, theirs);
    }
    const cudaStream_t stream = t->world->stream;
    XD_TRY(xdi_nccl_leave(t, theirs)); /* buffers on the device belong to it */
    XD_TRY(xdi_nccl_widen(t, behind));
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_reflect(t, messages, count, wave, XD_COLLECTIVE_SEND));
    XD_TRY(xdi_nccl_launch(t, messages, count, wave, stream, deadline));
    XD_TRY(xdi_nccl_leave(t, stream));
    /* The copies below may block inside CUDA, so nothing may be pending. */
    XD_TRY(xdi_nccl_wait(t, deadline));
    XD_TRY(xdi_nccl_reflect(t, messages, count, wave, XD_COLLECTIVE_RECV));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

/* What is not compared is one wave: on each way between two ranks data goes in the order of the lists. */
static xd_result xdi_nccl_exchange_unseen(xdi_nccl *t, xd_message *messages, int count, double deadline) {
    int refused = 0;
    for (int i = 0; i < count; i++) {
        messages[i].stage = 1;
        messages[i].their_count = messages[i].record.count;
        messages[i].their_dtype = messages[i].record.dtype;
        refused += messages[i].record.dtype == XD_DTYPE_NONE;
    }
    if (refused == 0) return xdi_nccl_carry(t, messages, count, 1, deadline);
    xdi_nccl_break(t->world, XD_ERROR_PEER, t->world_ranks[t->base.rank]); /* as in control */
    return refused == count ? XD_OK : xdi_nccl_report(t);
}

/* A pair of ranks has no common count of calls, so messages are compared only when all calls are. */
static xd_result xdi_nccl_exchange_seen(xdi_nccl *t, xd_message *messages, int count, double deadline) {
    if (t->world->compare < INT64_MAX) return xdi_nccl_exchange_unseen(t, messages, count, deadline);
    xdi_nccl_number(t, messages, count);
    for (int wave = 1;; wave++) {
        bool any;
        XD_TRY(xdi_nccl_offer(t, messages, count, wave, &any, deadline));
        if (!any) return XD_OK;
        XD_TRY(xdi_nccl_carry(t, messages, count, wave, deadline));
    }
}

static xd_result xdi_nccl_exchange_all(xd_transport *transport, xd_message *messages, int count,
                                       double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_control call;
    memset(&call, 0, sizeof call);
    call.kind = (uint32_t)messages[0].record.kind;
    call.dtype = (uint32_t)messages[0].record.dtype;
    call.count = (uint64_t)messages[0].record.count;
    xdi_nccl_note(t, &call);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_exchange_seen(t, messages, count, deadline);
    xdi_nccl_scope_end(&scope);
    return result;
}
