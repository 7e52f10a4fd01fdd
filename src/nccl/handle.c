/* Handles on groups: made by joining, splitting and forking, and their table of calls. */

static xd_result xdi_nccl_create(xdi_nccl_world *world, int size, int rank, xdi_nccl **out);

/* Joins the communicator of `id`. */
static xd_result xdi_nccl_join(xdi_nccl *t, const ncclUniqueId *id, double deadline) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t code = ncclCommInitRankConfig(&t->comm, t->base.size, *id, t->base.rank, &config);
    return xdi_nccl_settle(t, code, deadline);
}

/* The first member creates an id and sends it to the others; `members` NULL: all. NCCL has a split too, but ranks outside the
 * group would have to call it as well. */
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
        xdi_nccl_put(&batch, members ? members[r] : r, t->world->mirror, 0, 1, bytes);
    if (rank > 0) xdi_nccl_get(&batch, members ? members[0] : 0, t->world->mirror, 0, 1, bytes);
    XD_TRY(xdi_nccl_end(&batch, deadline));
    XD_TRY(xdi_nccl_leave(t, stream));
    XD_TRY(xdi_nccl_wait(t, deadline));
    if (rank == 0) return XD_OK;
    XD_TRY(xdi_nccl_copy(t, stream, id, t->world->mirror, bytes));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

static void xdi_nccl_destroy(xd_transport *transport);

static xd_result xdi_nccl_split_off(xdi_nccl *t, const int *members, int size, int rank, double deadline,
                                    xd_transport **out) {
    xdi_nccl *child = NULL;
    ncclUniqueId id;
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

static xd_result xdi_nccl_split(xd_transport *transport, const int *members, int size, int rank,
                                double deadline, xd_transport **out) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_split_off(t, members, size, rank, deadline, out);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* The same ranks, and the world's stream and memory on the device: calls of both come from one thread, in one order. */
static xd_result xdi_nccl_fork_for(xdi_nccl *t, xd_ctx *ctx, double deadline, xd_transport **out) {
    xdi_nccl *twin = NULL;
    const int n = t->base.size, rank = t->base.rank;
    ncclUniqueId id;
    XD_TRY(xdi_nccl_pass_on(t, xdi_nccl_create(t->world, n, rank, &twin)));
    memcpy(twin->world_ranks, t->world_ranks, (size_t)n * sizeof *t->world_ranks);
    twin->base.ctx = t->base.ctx; /* whose errors these are */
    xd_result result = xdi_nccl_hand_on(t, NULL, n, rank, &id, deadline);
    if (result == XD_OK) result = xdi_nccl_join(twin, &id, deadline);
    if (result != XD_OK) {
        xdi_nccl_destroy(&twin->base);
        return result;
    }
    twin->base.ctx = ctx;
    *out = &twin->base;
    return XD_OK;
}

static xd_result xdi_nccl_fork(xd_transport *transport, xd_ctx *ctx, double deadline, xd_transport **out) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_fork_for(t, ctx, deadline, out);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* What follows ends things, and does so without the scope when CUDA refuses it. */
static void xdi_nccl_fail(xd_transport *transport, xd_result result, int culprit) {
    xdi_nccl_world *world = ((xdi_nccl *)transport)->world;
    xdi_nccl_scope scope;
    (void)xdi_nccl_scope_begin(&scope, world->device);
    xdi_nccl_break(world, result, culprit);
    xdi_nccl_scope_end(&scope);
}

static void xdi_nccl_abort(xd_transport *transport) {
    const xdi_nccl *t = (const xdi_nccl *)transport;
    xdi_nccl_fail(transport, XD_ERROR_PEER, t->world_ranks[transport->rank]);
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
    const cudaEvent_t events[] = { world->brought, world->joined, world->added[0], world->added[1] };
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i]) cudaEventDestroy(events[i]);
    if (world->adds) cudaStreamDestroy(world->adds);
    if (world->stream) cudaStreamDestroy(world->stream);
    xdi_nccl_mark_destroy(&world->spare);
    memory->release(world->ctx, world->mirror);
    memory->release(world->ctx, world->staging);
    xd_release(world->ctx, world);
}

static void xdi_nccl_destroy(xd_transport *transport) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xd_ctx *ctx = t->world->ctx; /* a forked handle's own has no device */
    xdi_nccl **at = &t->world->groups;
    xdi_nccl_scope scope;
    (void)xdi_nccl_scope_begin(&scope, t->world->device);
    xdi_nccl_close(t);
    while (*at != t) at = &(*at)->next;
    *at = t->next;
    xdi_nccl_release_world(t->world);
    xdi_nccl_mark_destroy(&t->last);
    if (t->records) cudaFreeHost(t->records);
    xd_ctx_kernels(ctx)->memory.release(ctx, t->arrived);
    xd_release(ctx, (void *)t->pieces);
    xd_release(ctx, t->leaves);
    xd_release(ctx, t->counts);
    xd_release(ctx, t->begins);
    xd_release(ctx, t->world_ranks);
    xd_release(ctx, t);
    xdi_nccl_scope_end(&scope);
}

static const xd_transport_ops xdi_nccl_ops = { "nccl",
                                               xdi_nccl_control,
                                               xdi_nccl_execute,
                                               xdi_nccl_split,
                                               xdi_nccl_abort,
                                               xdi_nccl_destroy,
                                               NULL,
                                               true,
                                               xdi_nccl_fail,
                                               xdi_nccl_fork,
                                               xdi_nccl_exchange_all,
                                               NULL,
                                               true,
                                               NULL,
                                               xdi_nccl_admit_call,
                                               xdi_nccl_is_recording };

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
    t->arrived = (xd_control *)xd_ctx_kernels(ctx)->memory.allocate(ctx, 2 * n * sizeof *t->arrived);
    cudaError_t code = xdi_nccl_mark_create(&t->last);
    if (code == cudaSuccess) code = cudaMallocHost(&records, 2 * n * sizeof *t->records);
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
