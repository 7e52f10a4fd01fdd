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
    char calls[200];
    xdi_nccl_recall(t, calls, sizeof calls);
    xdi_nccl_break(t->world, XD_ERROR_TIMEOUT, -1);
    return XD_FAIL(t->base.ctx, XD_ERROR_TIMEOUT,
                   "some rank of the group of %d did not arrive before the deadline; %s", t->base.size,
                   calls);
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

/* ---- the calling thread ---- */

/* Makes the device current, as a worker's thread or a caller with several GPUs may have another one. And while some stream is
 * in a capture, lets this thread allocate and ask for events: what it does that for is not part of the capture. */
static cudaError_t xdi_nccl_scope_begin(xdi_nccl_scope *scope, int device) {
    scope->device = scope->previous = device;
    scope->mode = cudaStreamCaptureModeRelaxed;
    scope->is_relaxed = false;
    cudaError_t code = cudaGetDevice(&scope->previous);
    if (code != cudaSuccess) scope->previous = device;
    if (scope->previous != device) code = cudaSetDevice(device);
    if (code != cudaSuccess) return code;
    code = cudaThreadExchangeStreamCaptureMode(&scope->mode);
    scope->is_relaxed = code == cudaSuccess;
    return code;
}

static void xdi_nccl_scope_end(xdi_nccl_scope *scope) {
    if (scope->is_relaxed) cudaThreadExchangeStreamCaptureMode(&scope->mode);
    if (scope->previous != scope->device) cudaSetDevice(scope->previous);
}

/* The scope of a call of the table that peers wait for. */
static xd_result xdi_nccl_begin_call(xdi_nccl *t, xdi_nccl_scope *scope) {
    return xdi_nccl_cuda(t, xdi_nccl_scope_begin(scope, t->world->device));
}

/* ---- waiting ---- */

/* CUDA has changed the arguments of this function twice. */
static cudaError_t xdi_nccl_capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id) {
#if CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, id, NULL, NULL, NULL, NULL);
#elif CUDART_VERSION >= 12000
    return cudaStreamGetCaptureInfo(stream, status, id, NULL, NULL, NULL);
#else
    return cudaStreamGetCaptureInfo(stream, status, id);
#endif
}

static void xdi_nccl_pause(int turn) {
    const struct timespec nap = { 0, 20000 };
    if (turn >= XDI_NCCL_SPIN) nanosleep(&nap, NULL);
}

/* The capture that a stream is in; 0: none. */
static unsigned long long xdi_nccl_capture_of(const xdi_nccl *t, cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (stream == t->world->stream) return 0;
    if (xdi_nccl_capture_info(stream, &status, &id) != cudaSuccess)
        cudaGetLastError(); /* its next use reports it */
    return status == cudaStreamCaptureStatusActive ? id : 0;
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
        const cudaError_t done = cudaEventQuery(t->last.done);
        if (done == cudaSuccess) return XD_OK;
        if (done != cudaErrorNotReady) return xdi_nccl_cuda(t, done);
        const ncclResult_t asked = ncclCommGetAsyncError(t->comm, &state);
        if (asked != ncclSuccess) return xdi_nccl_fault(t, asked);
        if (state != ncclSuccess && state != ncclInProgress) return xdi_nccl_fault(t, state);
        if (xd_now(t->base.ctx) >= deadline) return xdi_nccl_expire(t);
        xdi_nccl_pause(turn);
    }
}

/* Waits on `stream` for the work before the mark. A graph waits for what was before each of its launches. */
static xd_result xdi_nccl_await(xdi_nccl *t, cudaStream_t stream, const xdi_nccl_mark *mark) {
    const unsigned long long capture = xdi_nccl_capture_of(t, stream);
    if (capture == 0) return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, mark->done, 0));
    if (capture == mark->capture) return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, mark->inside, 0));
    return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, mark->done, cudaEventWaitExternal));
}

/* Marks the end of the work on `stream`. */
static xd_result xdi_nccl_put_mark(xdi_nccl *t, cudaStream_t stream, xdi_nccl_mark *mark) {
    const unsigned long long capture = xdi_nccl_capture_of(t, stream);
    if (capture == 0) return xdi_nccl_cuda(t, cudaEventRecord(mark->done, stream));
    mark->capture = capture;
    XD_TRY(xdi_nccl_cuda(t, cudaEventRecordWithFlags(mark->done, stream, cudaEventRecordExternal)));
    return xdi_nccl_cuda(t, cudaEventRecord(mark->inside, stream));
}

static cudaError_t xdi_nccl_mark_create(xdi_nccl_mark *mark) {
    const cudaError_t code = cudaEventCreateWithFlags(&mark->done, cudaEventDisableTiming);
    return code == cudaSuccess ? cudaEventCreateWithFlags(&mark->inside, cudaEventDisableTiming) : code;
}

static void xdi_nccl_mark_destroy(xdi_nccl_mark *mark) {
    if (mark->done) cudaEventDestroy(mark->done);
    if (mark->inside) cudaEventDestroy(mark->inside);
}

/* Begins work of this communicator on `stream`, after its earlier work; and ends it. */
static xd_result xdi_nccl_enter(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_await(t, stream, &t->last);
}

static xd_result xdi_nccl_leave(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_put_mark(t, stream, &t->last);
}

static xd_result xdi_nccl_copy(xdi_nccl *t, cudaStream_t stream, void *to, const void *from, size_t bytes) {
    if (bytes == 0 || to == from) return XD_OK;
    return xdi_nccl_cuda(t, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
}
