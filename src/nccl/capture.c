/* Streams that are being captured: a call becomes part of the graph, or is refused with nothing lost. */

static bool xdi_nccl_is_message(const xd_collective *c) {
    return c->kind == XD_COLLECTIVE_SEND || c->kind == XD_COLLECTIVE_RECV;
}

/* Whether a call works on the caller's stream, not on the world's alone. */
static bool xdi_nccl_uses_stream(const xd_collective *next) {
    return next && (xdi_nccl_is_message(next) || xdi_nccl_is_moving((uint32_t)next->kind));
}

/* What keeps a call out of a graph; NULL: nothing. */
static const char *xdi_nccl_obstacle(const xdi_nccl *t, const xd_collective *next) {
    int64_t send = 0, recv = 0;
    if (!xdi_nccl_uses_stream(next)) return "the host waits for its peers";
    const bool is_message = xdi_nccl_is_message(next);
    if (is_message ? t->world->compare == INT64_MAX : xdi_nccl_compares(t, next))
        return "the ranks compare it, and the host waits for that (xd_nccl_desc.compare)";
    if (is_message)
        *(next->kind == XD_COLLECTIVE_SEND ? &send : &recv) = next->count;
    else
        xdi_nccl_extents(t, next, &send, &recv);
    if (xdi_nccl_on_host(t, next->send, send) || xdi_nccl_on_host(t, next->recv, recv))
        return "its memory is the host's, and the host waits for copies of it";
    return NULL;
}

/* Asks CUDA only what a capture allows. A fork for a context without a GPU works on the world's own stream. */
static xd_result xdi_nccl_admit_on(xdi_nccl *t, const xd_collective *next, cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id;
    const cudaError_t code = xdi_nccl_capture_info(stream, &status, &id);
    if (code != cudaSuccess) {
        cudaGetLastError(); /* if it is another error, the call reports it */
        XD_REQUIRE(t->base.ctx, code != cudaErrorStreamCaptureImplicit || !xdi_nccl_uses_stream(next),
                   XD_ERROR_UNSUPPORTED,
                   "the legacy stream cannot be used while a blocking stream is captured");
        return XD_OK;
    }
    if (status == cudaStreamCaptureStatusNone) return XD_OK;
    XD_REQUIRE(t->base.ctx, status == cudaStreamCaptureStatusActive, XD_ERROR_UNSUPPORTED,
               "the capture of the stream was invalidated by an earlier call");
    const char *obstacle = xdi_nccl_obstacle(t, next);
    XD_REQUIRE(t->base.ctx, !obstacle, XD_ERROR_UNSUPPORTED, "a captured stream cannot record this call: %s",
               obstacle);
    return XD_OK;
}

static bool xdi_nccl_is_recording(xd_transport *transport) {
    const xdi_nccl *t = (const xdi_nccl *)transport;
    const xd_ctx_desc *settings = xd_ctx_settings(transport->ctx);
    const bool has_device = settings->kernels && settings->kernels->device == XD_DEVICE_CUDA;
    xdi_nccl_scope scope;
    bool recording = false;
    if (t->world->failure != XD_OK || !has_device) return false;
    if (xdi_nccl_scope_begin(&scope, t->world->device) == cudaSuccess)
        recording = xdi_nccl_capture_of(t, (cudaStream_t)settings->stream) != 0;
    xdi_nccl_scope_end(&scope);
    return recording;
}

static xd_result xdi_nccl_admit_call(xd_transport *transport, const xd_collective *next) {
    xdi_nccl *t = (xdi_nccl *)transport;
    const xd_ctx_desc *settings = xd_ctx_settings(transport->ctx);
    void *const given = next && next->stream ? next->stream : settings->stream;
    const bool has_device = settings->kernels && settings->kernels->device == XD_DEVICE_CUDA;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK || !has_device) return XD_OK;
    xd_result result = XD_OK;
    if (xdi_nccl_scope_begin(&scope, t->world->device) == cudaSuccess)
        result = xdi_nccl_admit_on(t, next, (cudaStream_t)given);
    xdi_nccl_scope_end(&scope);
    return result;
}
