/* Handles on groups: made by joining, splitting, forking and going on, and their table of calls. */

static void xdi_mpi_destroy(xd_transport *transport);
static xd_result xdi_mpi_create(xd_ctx *ctx, xdi_mpi_world *world, int size, int rank, int group,
                                xdi_mpi **out);

/* The members agree on an id that none of them has used: then no two ranks share it in any other group. `members` NULL: all.
 * *least receives the least `mine` of them. */
static xd_result xdi_mpi_number(xdi_mpi *t, const int *members, int size, int *least, double deadline) {
    XD_REQUIRE(t->base.ctx, !t->is_fork, XD_ERROR_UNSUPPORTED,
               "the communicator of a queue on %d ranks is not split or forked", t->base.size);
    memset(&t->mine, 0, sizeof t->mine);
    t->mine.sequence = (uint64_t)t->world->next_group;
    t->mine.root = *least;
    XD_TRY(xdi_mpi_gather_records(t, deadline, members, size));
    uint64_t id = 0;
    for (int r = 0; r < size; r++) {
        const xd_control *theirs = &t->records[members ? members[r] : r];
        id = theirs->sequence > id ? theirs->sequence : id;
        *least = theirs->root < *least ? theirs->root : *least;
    }
    XD_REQUIRE(t->base.ctx, id < (uint64_t)t->world->groups, XD_ERROR_UNSUPPORTED,
               "the tags of this MPI are enough for %d groups", t->world->groups - 1);
    t->world->next_group = (int)id + 1;
    return XD_OK;
}

static xd_result xdi_mpi_split(xd_transport *transport, const int *members, int size, int rank,
                               double deadline, xd_transport **out) {
    xdi_mpi *t = (xdi_mpi *)transport, *child = NULL;
    int least = 0;
    XD_TRY(xdi_mpi_number(t, members, size, &least, deadline));
    XD_TRY(xdi_mpi_create(transport->ctx, t->world, size, rank, t->world->next_group - 1, &child));
    for (int r = 0; r < size; r++) child->world_ranks[r] = t->world_ranks[members[r]];
    *out = &child->base;
    return XD_OK;
}

static xd_result xdi_mpi_fork(xd_transport *transport, xd_ctx *ctx, double deadline, xd_transport **out) {
    xdi_mpi *t = (xdi_mpi *)transport, *fork = NULL;
    const int size = transport->size;
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    XD_TRY(xdi_mpi_number(t, NULL, size, &level, deadline));
    if (level < MPI_THREAD_MULTIPLE) return XD_OK;
    if (xdi_mpi_create(ctx, t->world, size, transport->rank, t->world->next_group - 1, &fork) == XD_OK) {
        memcpy(fork->world_ranks, t->world_ranks, (size_t)size * sizeof *t->world_ranks);
        fork->is_fork = true;
        fork->staging = (char *)xd_allocate(ctx, (size_t)t->world->staging_bytes);
        *out = &fork->base;
        if (fork->staging) return XD_OK;
        *out = NULL;
        xdi_mpi_destroy(&fork->base);
    }
    return XD_FAIL(transport->ctx, XD_ERROR_MEMORY,
                   "no room for a second handle on %d ranks and its %lld bytes of staging", size,
                   (long long)t->world->staging_bytes);
}

static size_t xdi_mpi_fork_bytes(const xd_transport *transport) {
    const xdi_mpi *t = (const xdi_mpi *)transport;
    const size_t n = (size_t)transport->size;
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE || t->is_fork) return 0;
    return sizeof *t + (size_t)t->world->staging_bytes +
           n * (sizeof *t->world_ranks + sizeof *t->records + sizeof *t->flows + 2 * sizeof *t->requests +
                2 * sizeof *t->statuses + 2 * sizeof *t->peers + 2 * sizeof *t->arrives +
                2 * sizeof *t->lanes + sizeof *t->begins + sizeof *t->counts + sizeof *t->leaves +
                sizeof *t->pieces);
}

static void xdi_mpi_abort(xd_transport *transport) {
    xdi_mpi *t = (xdi_mpi *)transport;
    xdi_mpi_break(t->world, XD_ERROR_PEER, t->world_ranks[transport->rank]);
    pthread_mutex_lock(&t->world->lock);
    xdi_mpi_leave(t->world);
    pthread_mutex_unlock(&t->world->lock);
}

static void xdi_mpi_fail(xd_transport *transport, xd_result result, int culprit) {
    xdi_mpi_break(((xdi_mpi *)transport)->world, result, culprit);
}

/* Polling for a notice calls MPI, which makes progress on pending messages. */
static xd_result xdi_mpi_poll(xd_transport *transport) {
    xdi_mpi *t = (xdi_mpi *)transport;
    return xdi_mpi_is_broken(t->world) ? xdi_mpi_report(t, false) : XD_OK;
}

static void xdi_mpi_destroy(xd_transport *transport) {
    xdi_mpi *t = (xdi_mpi *)transport;
    xd_ctx *ctx = transport->ctx;
    xdi_mpi_world *world = t->world;
    pthread_mutex_lock(&world->lock);
    const bool in_flight = world->in_flight;
    pthread_mutex_unlock(&world->lock);
    xdi_mpi_release_world(ctx, world);
    xd_release(ctx, (void *)t->pieces);
    xd_release(ctx, t->leaves);
    xd_release(ctx, t->counts);
    xd_release(ctx, t->begins);
    xd_release(ctx, t->arrives);
    xd_release(ctx, t->peers);
    xd_release(ctx, t->statuses);
    xd_release(ctx, t->requests);
    xd_release(ctx, t->flows);
    xd_release(ctx, t->world_ranks);
    if (in_flight) return;
    if (t->is_fork) xd_release(ctx, t->staging);
    xd_release(ctx, t->lanes);
    xd_release(ctx, t->records);
    xd_release(ctx, t);
}

#if defined(XDI_MPI_RECOVERS)
/* Room for the next world, as large as this one. */
static xd_result xdi_mpi_prepare_next(xdi_mpi *t, xdi_mpi **out) {
    const xdi_mpi_world *old = t->world;
    const xd_mpi_desc d = { old->comm, (size_t)old->staging_bytes, old->said.compare };
    xd_ctx *ctx = t->base.ctx;
    xdi_mpi_world *world = xdi_mpi_create_world(ctx, &d, old->size, old->rank);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for what is left of %d ranks", old->size);
    world->staging_bytes = old->staging_bytes;
    world->staging = (char *)xd_allocate(ctx, d.staging_bytes);
    xd_result result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %zu bytes of staging", d.staging_bytes);
    if (world->staging) result = xdi_mpi_create(ctx, world, old->size, old->rank, 1, out);
    xdi_mpi_release_world(ctx, world); /* the handle's now */
    return result;
}

static xd_result xdi_mpi_shrink(xd_transport *transport, double deadline, xd_transport **out) {
    xdi_mpi *t = (xdi_mpi *)transport, *next = NULL;
    XD_TRY(xdi_mpi_check_shrink(t));
    xd_result result = xdi_mpi_prepare_next(t, &next);
    if (result == XD_OK) result = xdi_mpi_ask(t, deadline);
    if (result == XD_OK) result = xdi_mpi_settle_list(t, deadline);
    if (result == XD_OK) {
        xdi_mpi_number_next(t->world, next);
        *out = &next->base;
        return XD_OK;
    }
    pthread_mutex_lock(&t->world->lock);
    xdi_mpi_leave(t->world);
    pthread_mutex_unlock(&t->world->lock);
    if (next) xdi_mpi_destroy(&next->base);
    return result;
}
#endif

static const xd_transport_ops xdi_mpi_ops = { "mpi",
                                              xdi_mpi_control,
                                              xdi_mpi_execute,
                                              xdi_mpi_split,
                                              xdi_mpi_abort,
                                              xdi_mpi_destroy,
                                              xdi_mpi_poll,
                                              false,
                                              xdi_mpi_fail,
                                              xdi_mpi_fork,
                                              xdi_mpi_messages,
                                              xdi_mpi_fork_bytes,
                                              false,
#if defined(XDI_MPI_RECOVERS)
                                              xdi_mpi_shrink,
#else
                                              NULL,
#endif
                                              NULL,
                                              NULL };

/* A handle; the caller fills in world_ranks. */
static xd_result xdi_mpi_create(xd_ctx *ctx, xdi_mpi_world *world, int size, int rank, int group,
                                xdi_mpi **out) {
    const size_t n = (size_t)size;
    xdi_mpi *t = (xdi_mpi *)xd_allocate(ctx, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    t->base.ops = &xdi_mpi_ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = size;
    t->world = world;
    t->group = group;
    t->staging = world->staging;
    pthread_mutex_lock(&world->lock);
    world->holders++;
    pthread_mutex_unlock(&world->lock);
    t->world_ranks = (int *)xd_allocate(ctx, n * sizeof *t->world_ranks);
    t->records = (xd_control *)xd_allocate(ctx, n * sizeof *t->records);
    t->flows = (xdi_mpi_flow *)xd_allocate(ctx, n * sizeof *t->flows);
    t->requests = (MPI_Request *)xd_allocate(ctx, 2 * n * sizeof *t->requests);
    t->statuses = (MPI_Status *)xd_allocate(ctx, 2 * n * sizeof *t->statuses);
    t->peers = (int *)xd_allocate(ctx, 2 * n * sizeof *t->peers);
    t->arrives = (bool *)xd_allocate(ctx, 2 * n * sizeof *t->arrives);
    t->lanes = (xdi_mpi_lane *)xd_allocate(ctx, 2 * n * sizeof *t->lanes);
    t->begins = (int64_t *)xd_allocate(ctx, n * sizeof *t->begins);
    t->counts = (int64_t *)xd_allocate(ctx, n * sizeof *t->counts);
    t->leaves = (xd_leaves *)xd_allocate(ctx, n * sizeof *t->leaves);
    t->pieces = (const void **)xd_allocate(ctx, n * sizeof *t->pieces);
    if (!t->world_ranks || !t->records || !t->flows || !t->requests || !t->statuses || !t->peers ||
        !t->arrives || !t->lanes || !t->begins || !t->counts || !t->leaves || !t->pieces) {
        xdi_mpi_destroy(&t->base);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    }
    t->base.world_ranks = t->world_ranks;
    *out = t;
    return XD_OK;
}
