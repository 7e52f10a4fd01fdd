/* Joining: the id, the memory of a world, what must be the same on all ranks, and the public functions. */

/* ---- the id ---- */

XD_API xd_result xd_nccl_unique_id(xd_ctx *ctx, ncclUniqueId *out) {
    if (!ctx) return XD_ERROR_ARGUMENT;
    XD_REQUIRE(ctx, out, XD_ERROR_ARGUMENT, "out is NULL");
    const ncclResult_t code = ncclGetUniqueId(out);
    return code == ncclSuccess ? XD_OK : xdi_nccl_refuse(ctx, code, NULL);
}

static xd_result xdi_nccl_learn_id(xd_ctx *ctx, const xd_nccl_desc *d, ncclUniqueId *id, double deadline) {
    if (d->id) {
        *id = *d->id;
        return XD_OK;
    }
    XD_REQUIRE(ctx, sizeof *id == XDI_NCCL_ID, XD_ERROR_UNSUPPORTED,
               "an id of this NCCL has %d bytes, not %d", (int)sizeof *id, (int)XDI_NCCL_ID);
    if (d->rank == 0) XD_TRY(xd_nccl_unique_id(ctx, id));
    return d->size == 1 ? XD_OK : xdi_nccl_exchange(ctx, d, id, deadline);
}

/* ---- joining ---- */

static xd_result xdi_nccl_validate(xd_ctx *ctx, const xd_nccl_desc *d) {
    const xd_kernels *kernels = xd_ctx_settings(ctx)->kernels; /* NULL: the CPU's */
    XD_REQUIRE(ctx, d->size >= 1 && d->rank >= 0 && d->rank < d->size, XD_ERROR_ARGUMENT,
               "rank %d is outside [0, %d)", d->rank, d->size);
    XD_REQUIRE(ctx, d->size == 1 || d->id || d->file || (d->host && d->port), XD_ERROR_ARGUMENT,
               "%d ranks need an id, a file, or a host and a port", d->size);
    if (d->size > 1 && !d->id) XD_TRY(xdi_nccl_check_secret(ctx, d));
    XD_REQUIRE(ctx, d->compare >= -1, XD_ERROR_ARGUMENT, "compare is %lld", (long long)d->compare);
    XD_REQUIRE(ctx, kernels && kernels->device == XD_DEVICE_CUDA, XD_ERROR_STATE,
               "xd_comm_nccl comes after xd_cuda_create");
    return XD_OK;
}

/* The memory of a world, and the device that it is on. */
static xd_result xdi_nccl_place(xdi_nccl_world *world) {
    xd_ctx *ctx = world->ctx;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    struct cudaPointerAttributes attributes;
    world->staging = (char *)memory->allocate(ctx, world->staging_bytes);
    world->mirror = (char *)memory->allocate(ctx, XDI_NCCL_MIRROR);
    XD_REQUIRE(ctx, world->staging && world->mirror, XD_ERROR_MEMORY,
               "the GPU has no room for %lld bytes of staging", (long long)world->staging_bytes);
    world->mirror_bytes = XDI_NCCL_MIRROR;
    const cudaError_t code = cudaPointerGetAttributes(&attributes, world->staging);
    XD_REQUIRE(ctx, code == cudaSuccess, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code));
    world->device = attributes.device;
    return XD_OK;
}

static xd_result xdi_nccl_furnish(xdi_nccl_world *world) {
    cudaEvent_t *const events[] = { &world->brought, &world->joined, &world->added[0], &world->added[1] };
    cudaError_t code = cudaStreamCreateWithFlags(&world->stream, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&world->adds, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = xdi_nccl_mark_create(&world->spare);
    for (size_t i = 0; i < sizeof events / sizeof *events && code == cudaSuccess; i++)
        code = cudaEventCreateWithFlags(events[i], cudaEventDisableTiming);
    XD_REQUIRE(world->ctx, code == cudaSuccess, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code));
    return XD_OK;
}

/* Ranks may run on different processors, and the bits of losses depend on the CPU level: all use the lowest, and
 * matrix products of one origin. The same exchange compares the settings that must be the same on all ranks. */
static xd_result xdi_nccl_agree(xdi_nccl *t, double deadline) {
    xdi_nccl_world *world = t->world;
    uint64_t lowest = (uint64_t)xd_ctx_settings(t->base.ctx)->cpu;
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.count = lowest;
    mine.extra = (uint64_t)world->staging_bytes;
    mine.layout = (uint64_t)world->compare;
    mine.leaves = xd_float_state();
    mine.dtype = xd_ctx_products(t->base.ctx);
    XD_TRY(xdi_nccl_gather_records(t, &mine, deadline));
    for (int r = 0; r < t->base.size; r++) {
        const xd_control *theirs = &t->records[r], *first = &t->records[0];
        if (theirs->count < lowest) lowest = theirs->count;
        XD_REQUIRE(t->base.ctx, theirs->extra == first->extra && theirs->layout == first->layout,
                   XD_ERROR_MISMATCH,
                   "rank %d passed staging_bytes %llu and compare %lld, rank 0 %llu and %lld", r,
                   (unsigned long long)theirs->extra, (long long)theirs->layout,
                   (unsigned long long)first->extra, (long long)first->layout);
        XD_TRY(xd_float_state_compare(t->base.ctx, r, (unsigned)theirs->leaves, (unsigned)first->leaves));
    }
    for (int r = 0; r < t->base.size; r++) xd_ctx_meet_products(t->base.ctx, r, t->records[r].dtype);
    xd_ctx_set_cpu(t->base.ctx, (xd_cpu_level)lowest);
    return XD_OK;
}

static xd_result xdi_nccl_enter_world(xdi_nccl *t, const xd_nccl_desc *d) {
    xd_ctx *ctx = t->base.ctx;
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    ncclUniqueId id;
    XD_TRY(xdi_nccl_learn_id(ctx, d, &id, deadline));
    XD_TRY(xdi_nccl_join(t, &id, deadline));
    return xdi_nccl_agree(t, deadline);
}

/* The first handle of a world, which then holds it; NULL and the world remains after an error. */
static xd_result xdi_nccl_found(xdi_nccl_world *world, const xd_nccl_desc *d, xdi_nccl **out) {
    xdi_nccl *t = NULL;
    xdi_nccl_scope scope;
    const cudaError_t code = xdi_nccl_scope_begin(&scope, world->device);
    xd_result result = code == cudaSuccess
                           ? xdi_nccl_furnish(world)
                           : XD_FAIL(world->ctx, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code));
    if (result == XD_OK) result = xdi_nccl_create(world, d->size, d->rank, &t);
    if (result == XD_OK) {
        for (int r = 0; r < d->size; r++) t->world_ranks[r] = r;
        result = xdi_nccl_enter_world(t, d);
        if (result != XD_OK) xdi_nccl_destroy(&t->base);
    }
    xdi_nccl_scope_end(&scope);
    *out = result == XD_OK ? t : NULL;
    return result;
}

XD_API xd_result xd_comm_nccl(xd_ctx *ctx, const xd_nccl_desc *desc, xd_comm **out) {
    if (!ctx) return XD_ERROR_ARGUMENT;
    XD_REQUIRE(ctx, desc, XD_ERROR_ARGUMENT, "desc is NULL");
    XD_REQUIRE(ctx, out, XD_ERROR_ARGUMENT, "out is NULL");
    xd_nccl_desc d = *desc;
    if (!d.staging_bytes) d.staging_bytes = XDI_NCCL_STAGING;
    XD_TRY(xdi_nccl_validate(ctx, &d));
    xd_ctx_set_rank(ctx, d.rank);
    xdi_nccl *t = NULL;
    xdi_nccl_world *world = (xdi_nccl_world *)xd_allocate(ctx, sizeof *world);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", d.size);
    world->ctx = ctx;
    world->staging_bytes = d.staging_bytes;
    world->compare = d.compare == 0 ? (int64_t)XDI_NCCL_COMPARED : d.compare < 0 ? 0 : d.compare;
    world->is_held = true;
    xd_result result = xdi_nccl_place(world);
    if (result == XD_OK) result = xdi_nccl_found(world, &d, &t);
    world->is_held = false;
    if (result == XD_OK) return xd_comm_create(ctx, &t->base, out);
    xdi_nccl_release_world(world);
    return result;
}
