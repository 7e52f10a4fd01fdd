/* The fate of a world on this rank, and how it waits for NCCL and for the device. */

/* ---- failure ---- */

/* Only the first failure is recorded. Ends all pending work on this rank. */
static void xdi_nccl_break(xdi_nccl_world *world, xd_result result, int culprit) {
    if (world->failure != XD_OK) return;
    world->failure = result;
    world->culprit = culprit;
    for (xdi_nccl *t = world->groups; t; t = t->next) {
        if (t->comm) ncclCommAbort(t->comm);
        t->comm = NULL;
    }
}

static xd_result xdi_nccl_report(const xdi_nccl *t) {
    const xdi_nccl_world *world = t->world;
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, world->culprit,
                           "the world is broken since an earlier %s of this rank",
                           xd_result_name(world->failure));
}

/* NCCL's text, and its details of the last error. */
static xd_result xdi_nccl_refuse(xd_ctx *ctx, ncclResult_t code, ncclComm_t comm) {
    const char *detail = ncclGetLastError(comm);
    const bool remote = code == ncclRemoteError || code == ncclSystemError;
    return XD_FAIL(ctx, remote ? XD_ERROR_PEER : XD_ERROR_DEVICE, "NCCL: %s%s%.300s",
                   ncclGetErrorString(code), detail && detail[0] ? ": " : "", detail ? detail : "");
}

static xd_result xdi_nccl_fault(xdi_nccl *t, ncclResult_t code) {
    const xd_result result = xdi_nccl_refuse(t->base.ctx, code, t->comm);
    xdi_nccl_break(t->world, result, -1);
    return result;
}

static xd_result xdi_nccl_expire(xdi_nccl *t) {
    xdi_nccl_break(t->world, XD_ERROR_TIMEOUT, -1);
    return XD_FAIL(t->base.ctx, XD_ERROR_TIMEOUT,
                   "some rank of the group of %d did not arrive before the deadline", t->base.size);
}

/* A failure of this rank alone in the middle of a call: peers cannot go on without its part. */
static xd_result xdi_nccl_lost(xdi_nccl *t, xd_result result) {
    if (result != XD_OK) xdi_nccl_break(t->world, XD_ERROR_PEER, t->world_ranks[t->base.rank]);
    return result;
}

/* An error of the device's context is one of a forked handle's. */
static xd_result xdi_nccl_pass_on(xdi_nccl *t, xd_result result) {
    if (result == XD_OK || t->base.ctx == t->world->ctx) return result;
    return XD_FAIL(t->base.ctx, result, "%.300s", xd_last_error(t->world->ctx)->message);
}

static xd_result xdi_nccl_cuda(xdi_nccl *t, cudaError_t code) {
    if (code == cudaSuccess) return XD_OK;
    return xdi_nccl_lost(t, XD_FAIL(t->base.ctx, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code)));
}

/* ---- waiting ---- */

static void xdi_nccl_pause(int turn) {
    const struct timespec nap = { 0, 20000 };
    if (turn >= XDI_NCCL_SPIN) nanosleep(&nap, NULL);
}

/* Waits until NCCL has accepted a call that returned `code`. */
static xd_result xdi_nccl_settle(xdi_nccl *t, ncclResult_t code, double deadline) {
    for (int turn = 0; code == ncclInProgress; turn += turn < XDI_NCCL_SPIN) {
        const ncclResult_t asked = ncclCommGetAsyncError(t->comm, &code);
        if (asked != ncclSuccess) code = asked;
        if (code != ncclInProgress) break;
        if (xd_now(t->base.ctx) >= deadline) return xdi_nccl_expire(t);
        xdi_nccl_pause(turn);
    }
    return code == ncclSuccess ? XD_OK : xdi_nccl_fault(t, code);
}

/* Waits until the device has completed the work before t->last. */
static xd_result xdi_nccl_wait(xdi_nccl *t, double deadline) {
    for (int turn = 0;; turn += turn < XDI_NCCL_SPIN) {
        ncclResult_t state = ncclSuccess;
        const cudaError_t done = cudaEventQuery(t->last);
        if (done == cudaSuccess) return XD_OK;
        if (done != cudaErrorNotReady) return xdi_nccl_cuda(t, done);
        const ncclResult_t asked = ncclCommGetAsyncError(t->comm, &state);
        if (asked != ncclSuccess) return xdi_nccl_fault(t, asked);
        if (state != ncclSuccess && state != ncclInProgress) return xdi_nccl_fault(t, state);
        if (xd_now(t->base.ctx) >= deadline) return xdi_nccl_expire(t);
        xdi_nccl_pause(turn);
    }
}

/* Begins work of this communicator on `stream`, after its earlier work; and ends it. */
static xd_result xdi_nccl_enter(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, t->last, 0));
}

static xd_result xdi_nccl_leave(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_cuda(t, cudaEventRecord(t->last, stream));
}

static xd_result xdi_nccl_copy(xdi_nccl *t, cudaStream_t stream, void *to, const void *from, size_t bytes) {
    if (bytes == 0 || to == from) return XD_OK;
    return xdi_nccl_cuda(t, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
}
