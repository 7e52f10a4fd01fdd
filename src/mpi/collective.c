/* Collectives: data that only moves goes as flows between this rank and each other, terms of sums tile by tile. */

/* ---- flows ---- */

static int xdi_mpi_tag(const xdi_mpi *t, int channel) {
    return t->world->first_tag + t->group * XDI_MPI_CHANNELS + channel;
}

/* Starts the next message of one direction of a flow, when there is one. */
static xd_result xdi_mpi_post(xdi_mpi *t, int peer, bool arrives, int tag) {
    xdi_mpi_flow *flow = &t->flows[peer];
    const size_t left = arrives ? flow->in_bytes : flow->out_bytes;
    const size_t bytes = left < (size_t)XDI_MPI_CHUNK ? left : (size_t)XDI_MPI_CHUNK;
    MPI_Request *request = &t->requests[t->posted];
    const int rank = t->world->seats[t->world_ranks[peer]];
    if (bytes == 0) return XD_OK;
    const int code = arrives ? MPI_Irecv(flow->in, (int)bytes, MPI_BYTE, rank, tag, t->world->comm, request)
                             : MPI_Isend(flow->out, (int)bytes, MPI_BYTE, rank, tag, t->world->comm, request);
    if (code != MPI_SUCCESS) return xdi_mpi_fault(t, code, peer);
    t->arrives[t->posted] = arrives;
    t->peers[t->posted++] = peer;
    if (arrives) {
        flow->in += bytes;
        flow->in_bytes -= bytes;
    } else {
        flow->out += bytes;
        flow->out_bytes -= bytes;
    }
    return XD_OK;
}

/* Moves all data of t->flows, which are empty afterwards. Both ends split a flow into the same messages. */
static xd_result xdi_mpi_exchange(xdi_mpi *t, int channel, double deadline) {
    const int n = t->base.size, tag = xdi_mpi_tag(t, channel);
    for (bool more = true; more;) {
        more = false;
        for (int k = 1; k < n; k++) XD_TRY(xdi_mpi_post(t, (t->base.rank + n - k) % n, true, tag));
        for (int k = 1; k < n; k++) XD_TRY(xdi_mpi_post(t, (t->base.rank + k) % n, false, tag));
        XD_TRY(xdi_mpi_wait(t, deadline));
        for (int r = 0; r < n; r++) more = more || t->flows[r].in_bytes || t->flows[r].out_bytes;
    }
    return XD_OK;
}

/* Begins a new exchange. A failed one may have left flows and requests behind. */
static void xdi_mpi_clear(xdi_mpi *t) {
    memset(t->flows, 0, (size_t)t->base.size * sizeof *t->flows);
}

static void xdi_mpi_out(xdi_mpi *t, int peer, const void *data, int64_t begin, int64_t count, size_t size) {
    if (count <= 0) return;
    t->flows[peer].out = (const char *)data + (size_t)begin * size;
    t->flows[peer].out_bytes = (size_t)count * size;
}

static void xdi_mpi_in(xdi_mpi *t, int peer, void *data, int64_t begin, int64_t count, size_t size) {
    if (count <= 0) return;
    t->flows[peer].in = (char *)data + (size_t)begin * size;
    t->flows[peer].in_bytes = (size_t)count * size;
}

/* What stays on this rank is copied, not sent. */
static void xdi_mpi_keep(xdi_mpi *t) {
    xdi_mpi_flow *own = &t->flows[t->base.rank];
    if (own->in_bytes && own->out_bytes && own->in != own->out) memcpy(own->in, own->out, own->in_bytes);
    memset(own, 0, sizeof *own);
}

/* ---- control records ---- */

static xd_result xdi_mpi_gather_records(xdi_mpi *t, double deadline, const int *members, int count) {
    xdi_mpi_clear(t);
    for (int i = 0; i < count; i++) {
        const int r = members ? members[i] : i;
        xdi_mpi_out(t, r, &t->mine, 0, 1, sizeof t->mine);
        xdi_mpi_in(t, r, t->records, r, 1, sizeof t->mine);
    }
    xdi_mpi_keep(t);
    return xdi_mpi_exchange(t, XDI_MPI_CONTROL, deadline);
}

/* Whether the ranks compare this call. All have the same count of calls, so all decide the same. */
static bool xdi_mpi_compares(xdi_mpi *t, const xd_control *mine, const xd_collective *next) {
    const int64_t compare = t->world->said.compare;
    const bool moves =
        mine->kind >= (uint32_t)XD_COLLECTIVE_BROADCAST && mine->kind < (uint32_t)XD_COLLECTIVE_SEND;
    if (!moves || compare == 0) return true;
    return t->calls++ < compare || (next && next->leaves.total && !next->known_leaves);
}

static xd_result xdi_mpi_control(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                                 xd_control *all, double deadline) {
    xdi_mpi *t = (xdi_mpi *)transport;
    const int n = transport->size;
    if (xdi_mpi_is_broken(t->world)) return xdi_mpi_report(t, false);
    if (xdi_mpi_compares(t, mine, next)) {
        t->mine = *mine;
        XD_TRY(xdi_mpi_gather_records(t, deadline, NULL, n));
        memcpy(all, t->records, (size_t)n * sizeof *all);
        return XD_OK;
    }
    if (mine->status != (int32_t)XD_OK) { /* the peers are not comparing, so nothing else tells them */
        xdi_mpi_break(t->world, XD_ERROR_PEER, t->world_ranks[transport->rank]);
        return (xd_result)mine->status;
    }
    xd_control_assume(mine, next, n, all);
    return XD_OK;
}

/* ---- moves ---- */

static void xdi_mpi_put(void *user, int peer, const void *data, size_t bytes) {
    xdi_mpi_out((xdi_mpi *)user, peer, data, 0, (int64_t)bytes, 1);
}

static void xdi_mpi_get(void *user, int peer, void *data, size_t bytes) {
    xdi_mpi_in((xdi_mpi *)user, peer, data, 0, (int64_t)bytes, 1);
}

/* Every kind that only moves data, as flows. */
static void xdi_mpi_plan(xdi_mpi *t, const xd_collective *c) {
    static const xd_message_sink sink = { xdi_mpi_put, xdi_mpi_get };
    xdi_mpi_clear(t);
    xd_collective_messages(c, t->base.rank, t->base.size, &sink, t);
    xdi_mpi_keep(t);
}

/* ---- sums ---- */

static int64_t xdi_mpi_nodes(const xdi_mpi *t, int rank) {
    return t->leaves[rank].total ? xd_leaves_nodes(t->leaves[rank].first, t->leaves[rank].count) : 1;
}

/* Elements of a block of `count` in the tile that begins at `at`. */
static int64_t xdi_mpi_in_tile(int64_t count, int64_t at, int64_t tile) {
    const int64_t left = count > at ? count - at : 0;
    return left < tile ? left : tile;
}

/* Collects the tile at `at` of this rank's block: node k of rank r becomes tile (nodes of the ranks before r)
 * + k of the staging memory. One message per node, since the nodes of a forest are not contiguous. */
static xd_result xdi_mpi_bring(xdi_mpi *t, const xd_collective *c, int64_t stride, int64_t at, int64_t tile,
                               double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    const int n = t->base.size, me = t->base.rank;
    int64_t deepest = 0;
    for (int r = 0; r < n; r++) deepest = xdi_mpi_nodes(t, r) > deepest ? xdi_mpi_nodes(t, r) : deepest;
    for (int64_t k = 0; k < deepest; k++) {
        int64_t slot = 0; /* tiles of the ranks before this one */
        xdi_mpi_clear(t);
        for (int r = 0; r < n; slot += xdi_mpi_nodes(t, r++)) {
            if (k == 0) t->pieces[r] = t->staging + (size_t)(slot * tile) * size;
            if (k < xdi_mpi_nodes(t, me))
                xdi_mpi_out(t, r, c->send, k * stride + t->begins[r] + at,
                            xdi_mpi_in_tile(t->counts[r], at, tile), size);
            if (k < xdi_mpi_nodes(t, r))
                xdi_mpi_in(t, r, t->staging, (slot + k) * tile, xdi_mpi_in_tile(t->counts[me], at, tile),
                           size);
        }
        xdi_mpi_keep(t);
        XD_TRY(xdi_mpi_exchange(t, XDI_MPI_DATA, deadline));
    }
    return XD_OK;
}

/* Reduces this rank's block into out, tile by tile. */
static xd_result xdi_mpi_reduce(xdi_mpi *t, const xd_collective *c, void *out, int64_t stride, int64_t tile,
                                double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    const xd_reduce_kernels *reduce =
        &xd_ctx_host_kernels(t->base.ctx)->reduce; /* pieces are in host memory */
    const xd_launch launch = xd_ctx_launch(t->base.ctx);
    const int n = t->base.size;
    int64_t longest = 0;
    for (int r = 0; r < n; r++) longest = t->counts[r] > longest ? t->counts[r] : longest;
    for (int64_t at = 0; at < longest; at += tile) {
        const int64_t count = xdi_mpi_in_tile(t->counts[t->base.rank], at, tile);
        XD_TRY(xdi_mpi_bring(t, c, stride, at, tile, deadline));
        if (count == 0) continue;
        char *to = (char *)out + (size_t)at * size;
        if (c->leaves.total)
            XD_TRY(reduce->leaves(&launch, to, t->pieces, t->leaves, n, tile, count, c->dtype, c->op));
        else
            XD_TRY(reduce->pieces(&launch, to, t->pieces, n, count, c->dtype, c->op));
    }
    return XD_OK;
}

/* Finds every rank's leaves; returns the elements that a tile of each node may have. */
static int64_t xdi_mpi_tile(xdi_mpi *t, const xd_collective *c) {
    const int64_t nodes = xd_control_leaves(t->records, c, t->base.size, t->leaves);
    const int64_t tile = t->world->staging_bytes / ((nodes ? nodes : 1) * (int64_t)xd_dtype_size(c->dtype));
    return tile > 0 ? tile : 1;
}

static xd_result xdi_mpi_reduce_scatter(xdi_mpi *t, const xd_collective *c, double deadline) {
    const int64_t tile = xdi_mpi_tile(t, c);
    const int64_t stride = xd_collective_blocks(c, t->base.size, false, t->begins, t->counts);
    return xdi_mpi_reduce(t, c, c->recv, stride, tile, deadline);
}

/* Each rank sums a block, then all gather the sums. Short arrays go to every rank whole, which saves a round. In
 * place, a rank overwrites only elements that it has sent already or does not send. */
static xd_result xdi_mpi_all_reduce(xdi_mpi *t, const xd_collective *c, double deadline) {
    const int n = t->base.size, me = t->base.rank;
    const size_t size = xd_dtype_size(c->dtype);
    const int64_t tile = xdi_mpi_tile(t, c);
    const bool whole = c->count <= tile && (size_t)c->count * size <= (size_t)XDI_MPI_SHORT;
    const int64_t stride = xd_collective_blocks(c, n, whole, t->begins, t->counts);
    char *own = (char *)c->recv + (size_t)t->begins[me] * size;
    XD_TRY(xdi_mpi_reduce(t, c, own, stride, tile, deadline));
    if (whole) return XD_OK;
    xdi_mpi_clear(t);
    for (int r = 0; r < n; r++) {
        if (r == me) continue;
        xdi_mpi_out(t, r, own, 0, t->counts[me], size);
        xdi_mpi_in(t, r, c->recv, t->begins[r], t->counts[r], size);
    }
    return xdi_mpi_exchange(t, XDI_MPI_DATA, deadline);
}

static xd_result xdi_mpi_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_mpi *t = (xdi_mpi *)transport;
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE: return xdi_mpi_all_reduce(t, c, deadline);
    case XD_COLLECTIVE_REDUCE_SCATTER: return xdi_mpi_reduce_scatter(t, c, deadline);
    default: xdi_mpi_plan(t, c); return xdi_mpi_exchange(t, XDI_MPI_DATA, deadline);
    }
}
