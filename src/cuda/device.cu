/* Memory of the device and the order of work on it: the xd_device_ops of the table. */

#include <time.h>

static void *xdi_cuda_allocate_plain(void *user, size_t bytes) {
    (void)user;
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError(); /* a lack of memory is reported by NULL */
    return NULL;
}

static void xdi_cuda_release_plain(void *user, void *memory) {
    (void)user;
    cudaFree(memory);
}

static void *xdi_cuda_allocate(xd_ctx *ctx, size_t bytes) {
    const xd_cuda *cuda = xdi_cuda_of(ctx);
    xdi_cuda_scope scope(ctx, cuda->device);
    if (scope.result != XD_OK) return NULL;
    return cuda->allocator.allocate(cuda->allocator.user, bytes ? bytes : 1);
}

static void xdi_cuda_release(xd_ctx *ctx, void *memory) {
    const xd_cuda *cuda = xdi_cuda_of(ctx);
    xdi_cuda_scope scope(ctx, cuda->device);
    if (memory && scope.result == XD_OK) cuda->allocator.release(cuda->allocator.user, memory);
}

static xd_result xdi_cuda_copy(const xd_launch *launch, void *to, const void *from, size_t bytes,
                               xd_copy_kind kind) {
    static const cudaMemcpyKind kinds[] = { cudaMemcpyDeviceToDevice, cudaMemcpyHostToDevice,
                                            cudaMemcpyDeviceToHost };
    if (bytes == 0 || to == from) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_CHECK(launch->ctx,
                          cudaMemcpyAsync(to, from, bytes, kinds[kind], (cudaStream_t)launch->stream));
}

static xd_result xdi_cuda_fill(const xd_launch *launch, void *to, uint8_t value, size_t bytes) {
    if (bytes == 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_CHECK(launch->ctx, cudaMemsetAsync(to, value, bytes, (cudaStream_t)launch->stream));
}

/* Polls instead of blocking, so that a peer that never comes is an error at the deadline. */
static xd_result xdi_cuda_synchronize(const xd_launch *launch) {
    const double seconds = xd_ctx_settings(launch->ctx)->timeout_seconds;
    const double deadline = xd_now(launch->ctx) + seconds;
    const struct timespec nap = { 0, 20000 };
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    for (int turn = 0;; turn++) {
        const cudaError_t state = cudaStreamQuery((cudaStream_t)launch->stream);
        if (state != cudaErrorNotReady) return XDI_CUDA_CHECK(launch->ctx, state);
        XD_REQUIRE(launch->ctx, xd_now(launch->ctx) < deadline, XD_ERROR_TIMEOUT,
                    "the device's work did not end within %g seconds", seconds);
        if (turn > 1000) nanosleep(&nap, NULL);
    }
}

static bool xdi_cuda_owns(xd_ctx *ctx, const void *memory) {
    cudaPointerAttributes attributes;
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        cudaGetLastError(); /* a broken device: its next call reports it */
        return true;
    }
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

/* Events order ranks that read each other's memory, so peer access between GPUs is enabled here. */
static void *xdi_cuda_event_create(xd_ctx *ctx) {
    xd_cuda *cuda = xdi_cuda_of(ctx);
    const int device = cuda->device;
    int devices = 0;
    cudaEvent_t event = NULL;
    xdi_cuda_scope scope(ctx, device);
    if (XDI_CUDA_CHECK(ctx, cudaGetDeviceCount(&devices)) != XD_OK) return NULL;
    for (int peer = 0; peer < devices; peer++) {
        int can = 0;
        if (peer == device) continue;
        cudaError_t enabled = cudaDeviceCanAccessPeer(&can, device, peer);
        if (enabled == cudaSuccess)
            enabled = can ? cudaDeviceEnablePeerAccess(peer, 0) : cudaErrorPeerAccessUnsupported;
        if (enabled == cudaSuccess) continue;
        cudaGetLastError();
        if (enabled != cudaErrorPeerAccessAlreadyEnabled) cuda->apart |= (uint64_t)1 << peer % 64;
    }
    if (XDI_CUDA_CHECK(ctx, cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) != XD_OK) return NULL;
    return event;
}

/* A GPU without access to another one gets copies of its memory from the driver, but no kernel reads it. */
static bool xdi_cuda_reaches(xd_ctx *ctx, const void *memory) {
    const xd_cuda *cuda = xdi_cuda_of(ctx);
    cudaPointerAttributes attributes;
    if (!cuda->apart) return true;
    xdi_cuda_scope scope(ctx, cuda->device);
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        cudaGetLastError(); /* a broken device: its next call reports it */
        return true;
    }
    if (attributes.type != cudaMemoryTypeDevice || attributes.device == cuda->device) return true;
    return (cuda->apart >> attributes.device % 64 & 1) == 0;
}

static void xdi_cuda_event_destroy(void *event) {
    if (event) cudaEventDestroy((cudaEvent_t)event);
}

static xd_result xdi_cuda_event_record(const xd_launch *launch, void *event) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_CHECK(launch->ctx, cudaEventRecord((cudaEvent_t)event, (cudaStream_t)launch->stream));
}

static xd_result xdi_cuda_event_wait(const xd_launch *launch, void *event) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_CHECK(launch->ctx,
                          cudaStreamWaitEvent((cudaStream_t)launch->stream, (cudaEvent_t)event, 0));
}

static xd_result xdi_cuda_call(const xd_launch *launch, void (*function)(void *user), void *user) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_CHECK(launch->ctx, cudaLaunchHostFunc((cudaStream_t)launch->stream, function, user));
}

/* A process that opens a small block gets access to the whole 2 MiB allocation that contains it, so no block is smaller.
 * If another rank cannot open it, messages are used instead, so errors only give NULL here; a permanent error is reported
 * by the next call. */
static void *xdi_cuda_share_create(xd_ctx *ctx, size_t bytes, xd_device_handle *handle) {
    static_assert(sizeof(cudaIpcMemHandle_t) == sizeof *handle, "a handle holds what CUDA calls one");
    const size_t unit = (size_t)2 << 20;
    void *memory = NULL;
    cudaIpcMemHandle_t name;
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (scope.result != XD_OK || bytes > SIZE_MAX - unit) return NULL;
    if (cudaMalloc(&memory, (bytes + unit - 1) / unit * unit) == cudaSuccess) {
        if (cudaIpcGetMemHandle(&name, memory) == cudaSuccess) {
            memcpy(handle, &name, sizeof name);
            return memory;
        }
        cudaFree(memory);
    }
    cudaGetLastError();
    return NULL;
}

static void xdi_cuda_share_destroy(xd_ctx *ctx, void *memory) {
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (memory && scope.result == XD_OK) cudaFree(memory);
}

static void *xdi_cuda_share_open(xd_ctx *ctx, const xd_device_handle *handle) {
    void *memory = NULL;
    cudaIpcMemHandle_t name;
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (scope.result != XD_OK) return NULL;
    memcpy(&name, handle, sizeof name);
    if (cudaIpcOpenMemHandle(&memory, name, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

static void xdi_cuda_share_close(xd_ctx *ctx, void *memory) {
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (scope.result == XD_OK) cudaIpcCloseMemHandle(memory);
}

static void *xdi_cuda_stream_create(xd_ctx *ctx) {
    cudaStream_t stream = NULL;
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (scope.result != XD_OK) return NULL;
    if (XDI_CUDA_CHECK(ctx, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) != XD_OK) return NULL;
    return stream;
}

static void xdi_cuda_stream_destroy(xd_ctx *ctx, void *stream) {
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (stream && scope.result == XD_OK) cudaStreamDestroy((cudaStream_t)stream);
}

/* Portable: what is kept on the host may go to any GPU of the process. */
static void *xdi_cuda_host_allocate(xd_ctx *ctx, size_t bytes) {
    void *memory = NULL;
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (scope.result != XD_OK) return NULL;
    if (cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocPortable) == cudaSuccess) return memory;
    cudaGetLastError(); /* a lack of memory is reported by NULL */
    return NULL;
}

static void xdi_cuda_host_release(xd_ctx *ctx, void *memory) {
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    if (memory && scope.result == XD_OK) cudaFreeHost(memory);
}

static xd_device_ops xdi_cuda_memory_table() {
    xd_device_ops memory = {};
    memory.allocate = xdi_cuda_allocate;
    memory.release = xdi_cuda_release;
    memory.copy = xdi_cuda_copy;
    memory.fill = xdi_cuda_fill;
    memory.synchronize = xdi_cuda_synchronize;
    memory.owns = xdi_cuda_owns;
    memory.event_create = xdi_cuda_event_create;
    memory.event_destroy = xdi_cuda_event_destroy;
    memory.event_record = xdi_cuda_event_record;
    memory.event_wait = xdi_cuda_event_wait;
    memory.call = xdi_cuda_call;
    memory.share_create = xdi_cuda_share_create;
    memory.share_destroy = xdi_cuda_share_destroy;
    memory.share_open = xdi_cuda_share_open;
    memory.share_close = xdi_cuda_share_close;
    memory.stream_create = xdi_cuda_stream_create;
    memory.stream_destroy = xdi_cuda_stream_destroy;
    memory.host_allocate = xdi_cuda_host_allocate;
    memory.host_release = xdi_cuda_host_release;
    memory.reaches = xdi_cuda_reaches;
    return memory;
}
