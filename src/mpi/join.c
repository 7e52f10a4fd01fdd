/* Joining: the first communication of a world, what must be the same on all ranks, and the public function. */

/* Waits for a request that was started with `code`, with a deadline, in case a rank never comes. */
static xd_result xdi_mpi_join(xd_ctx *ctx, int code, MPI_Request *request, double deadline,
                              const char *what) {
    int done = 0;
    while (code == MPI_SUCCESS) {
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code == MPI_SUCCESS && done) break;
        XD_REQUIRE(ctx, xd_now(ctx) < deadline, XD_ERROR_TIMEOUT,
                   "some rank of the communicator did not call xd_comm_mpi before the deadline");
        sched_yield();
    }
    XD_REQUIRE(ctx, code == MPI_SUCCESS, XD_ERROR_PEER, "MPI could not %s: code %d", what, code);
    return XD_OK;
}

static size_t xdi_mpi_least(int size) {
    return (size_t)XDI_MPI_STAGING_LEAST * (size_t)size;
}

static bool xdi_mpi_staging_fits(uint64_t bytes, int size) {
    return bytes >= xdi_mpi_least(size) && bytes < PTRDIFF_MAX;
}

/* What all ranks refuse in the same words, having heard the same: a rank that refused its own alone would leave the others
 * waiting. */
static xd_result xdi_mpi_check_settings(xd_ctx *ctx, const xdi_mpi_entry *all, int size) {
    for (int r = 0; r < size; r++)
        if (!xdi_mpi_staging_fits(all[r].staging_bytes, size))
            return XD_FAIL_CULPRIT(ctx, XD_ERROR_ARGUMENT, r,
                                   "staging_bytes is %llu on rank %d, %d ranks need %zu, and at most %zu",
                                   (unsigned long long)all[r].staging_bytes, r, size, xdi_mpi_least(size),
                                   (size_t)PTRDIFF_MAX - 1);
    for (int r = 1; r < size; r++) /* sums would be split into different tiles */
        if (all[r].staging_bytes != all[0].staging_bytes)
            return XD_FAIL_CULPRIT(
                ctx, XD_ERROR_MISMATCH, r, "staging_bytes is %llu on rank %d, and %llu on rank 0",
                (unsigned long long)all[r].staging_bytes, r, (unsigned long long)all[0].staging_bytes);
    for (int r = 0; r < size; r++)
        if (all[r].compare < -1 || all[r].compare != all[0].compare)
            return XD_FAIL_CULPRIT(ctx, all[r].compare < -1 ? XD_ERROR_ARGUMENT : XD_ERROR_MISMATCH, r,
                                   "compare is %lld on rank %d, and %lld on rank 0",
                                   (long long)all[r].compare, r, (long long)all[0].compare);
    return XD_OK;
}

/* Processes may run on different processors; the bits of losses depend on the CPU level, so all use the lowest. */
static xd_result xdi_mpi_agree(xd_ctx *ctx, const xdi_mpi_entry *all, int size, xd_result mine) {
    int32_t lowest = all[0].cpu;
    XD_TRY(xdi_mpi_check_settings(ctx, all, size));
    XD_TRY(mine);
    for (int r = 0; r < size; r++) {
        if (all[r].result != XD_OK)
            return XD_FAIL_CULPRIT(ctx, XD_ERROR_PEER, r, "rank %d could not join: %s", r,
                                   xd_result_name((xd_result)all[r].result));
        lowest = all[r].cpu < lowest ? all[r].cpu : lowest;
    }
    for (int r = 1; r < size; r++)
        XD_TRY(xd_float_state_compare(ctx, r, (unsigned)all[r].floats, (unsigned)all[0].floats));
    for (int r = 0; r < size; r++) xd_ctx_meet_products(ctx, r, all[r].products);
    xd_ctx_set_cpu(ctx, (xd_cpu_level)lowest);
    return XD_OK;
}

static xd_result xdi_mpi_duplicate(xd_ctx *ctx, MPI_Comm mpi, MPI_Comm *out, double deadline) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Comm_idup(mpi, out, &request);
    XD_TRY(xdi_mpi_join(ctx, code, &request, deadline, "duplicate the communicator"));
    MPI_Comm_set_errhandler(*out, MPI_ERRORS_RETURN);
    return XD_OK;
}

/* Collects what must be known of all ranks. */
static xd_result xdi_mpi_compare(xd_ctx *ctx, xdi_mpi_world *world, double deadline) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int bytes = (int)sizeof world->said;
    const int code =
        MPI_Iallgather(&world->said, bytes, MPI_BYTE, world->heard, bytes, MPI_BYTE, world->comm, &request);
    return xdi_mpi_join(ctx, code, &request, deadline, "compare the ranks' settings");
}

/* The first communication. `mine`: what xdi_mpi_prepare returned here. */
static xd_result xdi_mpi_meet(xd_ctx *ctx, MPI_Comm mpi, xdi_mpi_world *world, int size, xd_result mine) {
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    int *most = NULL, found = 0;
    world->said.cpu = (int32_t)xd_ctx_settings(ctx)->cpu;
    world->said.result = (int32_t)mine;
    world->said.floats = xd_float_state();
    world->said.products = xd_ctx_products(ctx);
    world->failure = xdi_mpi_duplicate(ctx, mpi, &world->comm, deadline);
    if (world->failure == XD_OK) world->failure = xdi_mpi_compare(ctx, world, deadline);
    if (world->failure != XD_OK)
        world->in_flight = true; /* MPI may still write to the buffers of the request */
    XD_TRY(world->failure);
    XD_TRY(xdi_mpi_agree(ctx, world->heard, size, mine));
    MPI_Comm_get_attr(world->comm, MPI_TAG_UB, (void *)&most, &found);
    world->tags = found ? *most : 32767;
#if defined(XDI_MPI_RECOVERS)
    world->tags /= world->tags >> 30 ? 1 << 10 : 1 << 4; /* for the worlds that may follow */
#endif
    world->groups = world->tags / XDI_MPI_CHANNELS;
    return XD_OK;
}

/* What can fail on one rank alone comes before the first communication, which tells the others. Memory of a size that every
 * rank will refuse is not asked for. */
static xd_result xdi_mpi_prepare(xd_ctx *ctx, xdi_mpi_world *world, int size, int rank, xd_comm **out) {
    const size_t bytes = (size_t)world->said.staging_bytes;
    xdi_mpi *t = NULL;
    if (!xdi_mpi_staging_fits(bytes, size)) return XD_OK;
    world->staging_bytes = (int64_t)bytes;
    world->staging = (char *)xd_allocate(ctx, bytes);
    XD_REQUIRE(ctx, world->staging, XD_ERROR_MEMORY, "no room for %zu bytes of staging", bytes);
    XD_TRY(xdi_mpi_create(ctx, world, size, rank, 1, &t));
    for (int r = 0; r < size; r++) t->world_ranks[r] = r;
    return xd_comm_create(ctx, &t->base, out);
}

/* The desc with its defaults. Unset handles have all bits zero, which no MPI gives to a communicator. */
static xd_result xdi_mpi_resolve(xd_ctx *ctx, xd_mpi_desc *d) {
    int running = 0, finalized = 0, size = 0, between = 0;
    MPI_Comm unset;
    memset(&unset, 0, sizeof unset);
    MPI_Initialized(&running);
    MPI_Finalized(&finalized);
    XD_REQUIRE(ctx, running && !finalized, XD_ERROR_STATE,
               "xd_comm_mpi comes after MPI_Init and before MPI_Finalize");
    if (d->mpi == unset) d->mpi = MPI_COMM_WORLD;
    XD_REQUIRE(ctx, d->mpi != MPI_COMM_NULL, XD_ERROR_ARGUMENT, "the communicator is MPI_COMM_NULL");
    MPI_Comm_test_inter(d->mpi, &between);
    XD_REQUIRE(ctx, !between, XD_ERROR_ARGUMENT, "the communicator joins two groups: it has to be of one");
    MPI_Comm_size(d->mpi, &size);
    if (d->staging_bytes) return XD_OK;
    d->staging_bytes = (size_t)XDI_MPI_STAGING_RANK * (size_t)size;
    if (d->staging_bytes < XDI_MPI_STAGING) d->staging_bytes = XDI_MPI_STAGING;
    return XD_OK;
}

XD_API xd_result xd_comm_mpi(xd_ctx *ctx, const xd_mpi_desc *desc, xd_comm **out) {
    int size = 0, rank = 0;
    xd_mpi_desc d;
    if (!ctx) return XD_ERROR_ARGUMENT;
    XD_REQUIRE(ctx, out, XD_ERROR_ARGUMENT, "out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    XD_TRY(xdi_mpi_resolve(ctx, &d));
    MPI_Comm_size(d.mpi, &size);
    MPI_Comm_rank(d.mpi, &rank);
    xd_ctx_set_rank(ctx, rank);
    xdi_mpi_world *world = xdi_mpi_create_world(ctx, &d, size, rank);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", size);
    xd_comm *comm = NULL;
    const xd_result mine = xdi_mpi_prepare(ctx, world, size, rank, &comm);
    const xd_result result = xdi_mpi_meet(ctx, d.mpi, world, size, mine);
    if (result == XD_OK)
        *out = comm;
    else
        xd_comm_destroy(comm);
    xdi_mpi_release_world(ctx, world);
    return result;
}
