/* Tests of the host side: memory, copies, streams, events, graphs, launch checks, faults, the seal. */
#include "test.h"
#include "test_kernels.h"
#include "sanitizer.h"

#include <string.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

static const int kCount = 100;
static const size_t kBytes = kCount * sizeof(float);

static float *device_array(float value) {
    float *pointer = nullptr;
    const std::vector<float> host(kCount, value);
    if (cudaMalloc(&pointer, kBytes)) return nullptr;
    cudaMemcpy(pointer, host.data(), kBytes, cudaMemcpyHostToDevice);
    return pointer;
}

static float first_of(const float *device) {
    float value = -1.0f;
    cudaMemcpy(&value, device, sizeof value, cudaMemcpyDeviceToHost);
    return value;
}

/* Takes the reports; true when one of them contains the phrase. */
static bool reported(const char *phrase) {
    static char text[20000];
    return emu_take_reports(text, sizeof text) > 0 && strstr(text, phrase);
}

static void fresh_memory_is_nan() {
    unsigned char bytes[8] = { 0 };
    float *fresh;
    CHECK(cudaMalloc(&fresh, 8) == cudaSuccess);
    cudaMemcpy(bytes, fresh, 8, cudaMemcpyDeviceToHost);
    CHECK(bytes[0] == 0xff && bytes[7] == 0xff);
    CHECK((uintptr_t)fresh % 256 == 0);
    cudaFree(fresh);
}

static void addresses_are_not_reused() {
    void *first, *second;
    cudaMalloc(&first, 64);
    cudaFree(first);
    cudaMalloc(&second, 64);
    CHECK(first != second);
    cudaFree(second);
    CHECK(cudaFree(second) == cudaErrorInvalidValue);
    CHECK(reported("cudaFree"));
    cudaGetLastError();
}

static void quota_is_kept() {
    void *block;
    size_t left, total;
    emu_set_quota(2, 1 << 20);
    cudaSetDevice(2);
    CHECK(cudaMalloc(&block, 2 << 20) == cudaErrorMemoryAllocation && block == nullptr);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    CHECK(cudaMalloc(&block, 1 << 19) == cudaSuccess);
    CHECK(cudaMemGetInfo(&left, &total) == cudaSuccess && total == 1 << 20 && left == 1 << 19);
    cudaFree(block);
    cudaSetDevice(0);
    emu_set_quota(2, (size_t)8 << 30);
}

static void copies_are_checked() {
    float *device = device_array(1.0f), host[2 * kCount];
    CHECK(cudaMemcpy(host, device, kBytes + 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(reported("do not fit at byte 0 of a block of 400 bytes"));
    CHECK(cudaMemcpy(host, device, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidMemcpyDirection);
    CHECK(reported("kind 1"));
    CHECK(cudaMemset(device + 1, 0, kBytes) == cudaErrorInvalidValue);
    CHECK(reported("cudaMemset"));
    CHECK(cudaMemcpy2DAsync(device, 40, device + 5, 40, 20, 10, cudaMemcpyDefault, 0) == cudaSuccess);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, device + 3) == cudaSuccess &&
          attributes.type == cudaMemoryTypeDevice);
    CHECK(cudaPointerGetAttributes(&attributes, host) == cudaSuccess &&
          attributes.type == cudaMemoryTypeUnregistered);
    cudaDeviceSynchronize();
    cudaFree(device);
    cudaGetLastError();
}

static void launches_are_checked() {
    const char *what[] = { "multiple of 32", "too large", "is 0", "dynamic shared" };
    const cudaError_t results[] = { launch_shape(1, 33, 0, 0), launch_shape(1, 2048, 0, 0),
                                    launch_shape(0, 32, 0, 0), launch_shape(1, 32, 50000, 0) };
    char text[4000];
    CHECK(emu_take_reports(text, sizeof text) == 4);
    for (int i = 0; i < 4; i++)
        CHECK_WITH(results[i] == cudaErrorInvalidConfiguration && strstr(text, what[i]), what[i]);
    CHECK(allow_dynamic(60000) == cudaSuccess && launch_shape(1, 32, 50000, 0) == cudaSuccess);
    CHECK(allow_dynamic(300000) == cudaErrorInvalidValue);
    const long before = emu_launch_count();
    CHECK(launch_shape(dim3(3, 2, 2), dim3(8, 4, 2), 0, 0) == cudaSuccess &&
          emu_launch_count() == before + 1);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    cudaGetLastError();
}

static void a_trap_sticks() {
    CHECK(launch_trap(0) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
    void *block;
    CHECK(cudaMalloc(&block, 4) == cudaErrorLaunchFailure);
    CHECK(reported("__trap at"));
    emu_reset_errors();
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

static void streams_keep_their_order() {
    float *x = device_array(1.0f), *y = device_array(0.0f), result[kCount];
    cudaStream_t a = nullptr, b = nullptr;
    cudaEvent_t event = nullptr;
    CHECK(!cudaStreamCreate(&a) && !cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking) &&
          !cudaEventCreate(&event));
    launch_add(x, x, 1.0f, kCount, a);
    launch_add(x, x, 1.0f, kCount, a);
    cudaEventRecord(event, a);
    cudaStreamWaitEvent(b, event, 0);
    launch_add(y, x, 10.0f, kCount, b);
    CHECK(cudaMemcpyAsync(result, y, kBytes, cudaMemcpyDeviceToHost, b) == cudaSuccess); /* pageable: waits */
    CHECK(result[0] == 13.0f && result[kCount - 1] == 13.0f);
    launch_add(x, x, 1.0f, kCount, a);
    CHECK(first_of(x) == 4.0f); /* the legacy stream waits for a */
    CHECK(!cudaStreamDestroy(a) && !cudaStreamDestroy(b) && !cudaEventDestroy(event));
    CHECK(cudaStreamSynchronize(a) == cudaErrorInvalidResourceHandle);
    CHECK(reported("no stream"));
    cudaFree(x);
    cudaFree(y);
    cudaGetLastError();
}

static void lazy_streams_wait_for_somebody() {
    float *x = device_array(1.0f);
    cudaStream_t stream;
    int polls = 0;
    cudaStreamCreate(&stream);
    emu_set_streams(EMU_LAZY);
    for (int i = 0; i < 3; i++) launch_add(x, x, 1.0f, kCount, stream);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) polls++;
    CHECK(polls == 2);
    emu_set_streams(EMU_EAGER);
    CHECK(first_of(x) == 4.0f);
    cudaStreamDestroy(stream);
    cudaFree(x);
}

static void add_one(void *counter) {
    ++*static_cast<int *>(counter);
}

static void graphs_replay() {
    float *x = device_array(0.0f);
    int calls = 0;
    cudaStream_t a = nullptr, b = nullptr;
    cudaEvent_t fork_event = nullptr, join_event = nullptr;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(!cudaStreamCreate(&a) && !cudaStreamCreate(&b) && !cudaEventCreate(&fork_event) &&
          !cudaEventCreate(&join_event));
    CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal) == cudaSuccess);
    launch_add(x, x, 1.0f, kCount, a);
    cudaEventRecord(fork_event, a);
    cudaStreamWaitEvent(b, fork_event, 0);
    launch_add(x, x, 2.0f, kCount, b);
    cudaEventRecord(join_event, b);
    cudaStreamWaitEvent(a, join_event, 0);
    cudaLaunchHostFunc(a, add_one, &calls);
    CHECK(cudaStreamEndCapture(a, &graph) == cudaSuccess);
    CHECK(first_of(x) == 0.0f); /* nothing has run yet */
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, a) == cudaSuccess);
    CHECK(first_of(x) == 9.0f && calls == 3);
    CHECK(!cudaGraphExecDestroy(exec) && !cudaGraphDestroy(graph));
    CHECK(!cudaStreamDestroy(a) && !cudaStreamDestroy(b) && !cudaEventDestroy(fork_event) &&
          !cudaEventDestroy(join_event));
    cudaFree(x);
    cudaGetLastError();
}

/* ---- what a capture forbids ---- */

/* A stream that is captured in a mode, and what becomes of the capture. */
struct Captured {
    cudaStream_t stream = nullptr;
    float *memory;

    explicit Captured(cudaStreamCaptureMode mode, unsigned flags = cudaStreamNonBlocking)
        : memory(device_array(0.0f)) {
        CHECK(cudaStreamCreateWithFlags(&stream, flags) == cudaSuccess);
        CHECK(cudaStreamBeginCapture(stream, mode) == cudaSuccess);
        CHECK(launch_add(memory, memory, 1.0f, kCount, stream) == cudaSuccess);
    }
    /* Ends the capture; true when it is whole, and its graph then adds one. */
    bool survives() {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        cudaStreamCaptureStatus status;
        CHECK(cudaStreamGetCaptureInfo(stream, &status) == cudaSuccess);
        const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        CHECK((status == cudaStreamCaptureStatusActive) == (ended == cudaSuccess));
        if (ended != cudaSuccess) {
            CHECK(ended == cudaErrorStreamCaptureInvalidated && graph == nullptr);
            CHECK(status == cudaStreamCaptureStatusInvalidated);
            return false;
        }
        CHECK(!cudaGraphInstantiate(&exec, graph, 0) && !cudaGraphLaunch(exec, stream));
        CHECK(!cudaStreamSynchronize(stream) && first_of(memory) == 1.0f);
        CHECK(!cudaGraphExecDestroy(exec) && !cudaGraphDestroy(graph));
        return true;
    }
    ~Captured() {
        CHECK(!cudaStreamDestroy(stream) && !cudaFree(memory));
        cudaGetLastError();
    }
};

static void elsewhere(const std::function<void()> &body) {
    std::thread(body).join();
}

/* An allocation, as an example of a call that no stream sees. */
static cudaError_t allocate_a_little() {
    void *block = nullptr;
    const cudaError_t result = cudaMalloc(&block, 4);
    if (result == cudaSuccess) CHECK(cudaFree(block) == cudaSuccess);
    return result;
}

static void captures_forbid_unsafe_calls() {
    {
        Captured global(cudaStreamCaptureModeGlobal);
        CHECK(allocate_a_little() == cudaErrorStreamCaptureUnsupported);
        CHECK(reported("cudaMalloc while this thread captures a stream"));
        CHECK(launch_add(global.memory, global.memory, 1.0f, kCount, global.stream) ==
              cudaErrorStreamCaptureInvalidated);
        CHECK(!global.survives());
        CHECK(allocate_a_little() == cudaSuccess);
    }
    {
        Captured global(cudaStreamCaptureModeGlobal);
        elsewhere([] { CHECK(allocate_a_little() == cudaErrorStreamCaptureUnsupported); });
        CHECK(reported("cudaMalloc while another thread captures a stream") && !global.survives());
    }
    {
        Captured local(cudaStreamCaptureModeThreadLocal);
        elsewhere([] { CHECK(allocate_a_little() == cudaSuccess); });
        CHECK(local.survives());
    }
    {
        Captured relaxed(cudaStreamCaptureModeRelaxed);
        CHECK(allocate_a_little() == cudaSuccess && relaxed.survives());
    }
    {
        Captured global(cudaStreamCaptureModeGlobal);
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        CHECK(!cudaThreadExchangeStreamCaptureMode(&mode) && mode == cudaStreamCaptureModeGlobal);
        CHECK(allocate_a_little() == cudaSuccess);
        CHECK(!cudaThreadExchangeStreamCaptureMode(&mode) && mode == cudaStreamCaptureModeRelaxed);
        CHECK(global.survives());
    }
    CHECK(emu_report_count() == 0);
}

static void captured_streams_are_not_waited_for() {
    cudaError_t (*const calls[])(cudaStream_t) = { cudaStreamSynchronize, cudaStreamQuery,
                                                  [](cudaStream_t) { return cudaDeviceSynchronize(); } };
    for (const auto call : calls) {
        Captured relaxed(cudaStreamCaptureModeRelaxed);
        CHECK(call(relaxed.stream) == cudaErrorStreamCaptureUnsupported);
        CHECK(reported("of a stream that is captured") && !relaxed.survives());
    }
    for (const bool blocking : { false, true }) {
        Captured relaxed(cudaStreamCaptureModeRelaxed, blocking ? cudaStreamDefault : cudaStreamNonBlocking);
        cudaStreamCaptureStatus status;
        const cudaError_t expected = blocking ? cudaErrorStreamCaptureImplicit : cudaSuccess;
        CHECK(cudaStreamIsCapturing(nullptr, &status) == expected);
        CHECK(emu_report_count() == 0); /* a question */
        CHECK(cudaMemsetAsync(relaxed.memory, 0, 4, nullptr) == expected);
        CHECK(reported("the legacy stream") == blocking && relaxed.survives() == !blocking);
    }
    {
        Captured local(cudaStreamCaptureModeThreadLocal);
        cudaGraph_t graph;
        elsewhere([&] { CHECK(cudaStreamEndCapture(local.stream, &graph) == cudaErrorStreamCaptureWrongThread); });
        CHECK(local.survives());
    }
}

static void events_do_not_leave_a_capture() {
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event) == cudaSuccess);
    {
        Captured relaxed(cudaStreamCaptureModeRelaxed);
        CHECK(cudaEventRecord(event, relaxed.stream) == cudaSuccess);
        CHECK(cudaEventQuery(event) == cudaErrorCapturedEvent);
        CHECK(reported("cudaEventQuery of an event that was recorded in a capture") && !relaxed.survives());
        CHECK(cudaEventSynchronize(event) == cudaErrorCapturedEvent && reported("cudaEventSynchronize"));
        CHECK(cudaStreamWaitEvent(relaxed.stream, event, 0) == cudaErrorCapturedEvent);
        CHECK(reported("cudaStreamWaitEvent of an event") && cudaEventRecord(event, relaxed.stream) == cudaSuccess);
        CHECK(cudaEventSynchronize(event) == cudaSuccess);
    }
    {
        Captured relaxed(cudaStreamCaptureModeRelaxed);
        CHECK(cudaStreamWaitEvent(relaxed.stream, event, 0) == cudaErrorStreamCaptureIsolation);
        CHECK(reported("from outside the capture") && !relaxed.survives());
    }
    {
        Captured one(cudaStreamCaptureModeRelaxed), other(cudaStreamCaptureModeRelaxed);
        CHECK(cudaEventRecord(event, one.stream) == cudaSuccess);
        CHECK(cudaStreamWaitEvent(other.stream, event, 0) == cudaErrorStreamCaptureMerge);
        CHECK(reported("two captures") && !one.survives() && !other.survives());
    }
    CHECK(cudaEventDestroy(event) == cudaSuccess);
    cudaGetLastError();
}

/* A stream that becomes part of a capture is waited for by the first one, or the capture has no graph. */
static void captured_streams_are_joined() {
    cudaStream_t other;
    cudaEvent_t forked, done;
    CHECK(!cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) && !cudaEventCreate(&forked) &&
          !cudaEventCreate(&done));
    for (int late = 0; late < 3; late++) { /* work on the other stream before the join, after it too, or none */
        Captured relaxed(cudaStreamCaptureModeRelaxed);
        CHECK(!cudaEventRecord(forked, relaxed.stream) && !cudaStreamWaitEvent(other, forked, 0));
        if (late < 2) launch_add(relaxed.memory, relaxed.memory, 0.0f, kCount, other);
        CHECK(!cudaEventRecord(done, other) && !cudaStreamWaitEvent(relaxed.stream, done, 0));
        if (late != 1) {
            CHECK(relaxed.survives());
            continue;
        }
        cudaGraph_t graph;
        launch_add(relaxed.memory, relaxed.memory, 0.0f, kCount, other);
        CHECK(cudaStreamEndCapture(relaxed.stream, &graph) == cudaErrorStreamCaptureUnjoined && !graph);
        CHECK(reported("no stream waits for work of another captured stream"));
    }
    CHECK(!cudaEventDestroy(forked) && !cudaEventDestroy(done) && !cudaStreamDestroy(other));
    cudaGetLastError();
}

/* External events connect replays with streams: each replay waits for the last record of one, and records another. */
static void external_events_order_replays() {
    float *x = device_array(1.0f), *y = device_array(0.0f);
    cudaStream_t stream, before, after;
    cudaEvent_t begin, end;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(!cudaStreamCreate(&stream) && !cudaStreamCreateWithFlags(&before, cudaStreamNonBlocking) &&
          !cudaStreamCreateWithFlags(&after, cudaStreamNonBlocking) && !cudaEventCreate(&begin) &&
          !cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(stream, begin, cudaEventWaitExternal) == cudaSuccess);
    launch_add(y, x, 10.0f, kCount, stream);
    CHECK(cudaEventRecordWithFlags(end, stream, cudaEventRecordExternal) == cudaSuccess);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (const emu_streams mode : { EMU_LAZY, EMU_LAZY_REVERSE }) {
        emu_set_streams(mode);
        launch_add(x, x, 1.0f, kCount, before);
        cudaEventRecord(begin, before);
        CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
        CHECK(cudaEventQuery(end) == cudaErrorNotReady);
        CHECK(cudaStreamWaitEvent(after, end, 0) == cudaSuccess);
        launch_add(y, y, 100.0f, kCount, after);
        CHECK(cudaStreamSynchronize(after) == cudaSuccess && cudaEventQuery(end) == cudaSuccess);
        CHECK(first_of(y) == (mode == EMU_LAZY ? 112.0f : 113.0f));
    }
    emu_set_streams(EMU_EAGER);
    CHECK(!cudaGraphExecDestroy(exec) && !cudaGraphDestroy(graph) && !cudaEventDestroy(begin) &&
          !cudaEventDestroy(end));
    CHECK(!cudaStreamDestroy(stream) && !cudaStreamDestroy(before) && !cudaStreamDestroy(after));
    CHECK(!cudaFree(x) && !cudaFree(y));
}

/* ---- several devices ---- */

static void each_thread_has_a_current_device() {
    int device = -1;
    CHECK(cudaSetDevice(2) == cudaSuccess);
    elsewhere([] {
        int own = -1;
        CHECK(cudaGetDevice(&own) == cudaSuccess && own == 0);
        CHECK(cudaSetDevice(3) == cudaSuccess);
    });
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 2);
    CHECK(cudaSetDevice(0) == cudaSuccess);
}

static void events_belong_to_a_device() {
    cudaStream_t here, there;
    cudaEvent_t event;
    CHECK(!cudaStreamCreate(&here) && !cudaEventCreate(&event) && !cudaSetDevice(1) && !cudaStreamCreate(&there));
    CHECK(cudaEventRecord(event, there) == cudaErrorInvalidResourceHandle);
    CHECK(reported("the event is of device 0, the stream of device 1"));
    CHECK(cudaEventRecord(event, nullptr) == cudaErrorInvalidResourceHandle && reported("of device 1"));
    CHECK(cudaEventRecord(event, here) == cudaSuccess); /* whatever the current device is */
    CHECK(cudaStreamWaitEvent(there, event, 0) == cudaSuccess && cudaEventSynchronize(event) == cudaSuccess);
    CHECK(!cudaSetDevice(0) && !cudaStreamDestroy(here) && !cudaStreamDestroy(there) && !cudaEventDestroy(event));
    cudaGetLastError();
}

static void peer_access_can_be_absent() {
    int can = -1;
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess && can == 1);
    emu_set_peer_access(0);
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess && can == 0);
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessUnsupported);
    emu_set_peer_access(1);
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaSuccess && cudaDeviceDisablePeerAccess(1) == cudaSuccess);
    cudaGetLastError();
}

/* What the other process finds, as its exit status: 1 + the number of the failed check. It keeps the block open until it
 * receives a byte, and answers with one. */
static int look_from_outside(cudaIpcMemHandle_t handle, int from, int to) {
    float *opened = nullptr;
    char byte = 0;
    if (cudaIpcOpenMemHandle((void **)&opened, handle, cudaIpcMemLazyEnablePeerAccess)) return 1;
    if (first_of(opened) != 7.0f) return 2;
    if (launch_add(opened, opened, 1.0f, kCount, nullptr) || cudaDeviceSynchronize()) return 3;
    if (write(to, &byte, 1) != 1 || read(from, &byte, 1) != 1) return 4;
    if (cudaIpcCloseMemHandle(opened)) return 5;
    if (cudaIpcOpenMemHandle((void **)&opened, handle, 0) != cudaErrorInvalidValue) return 6;
    return 0;
}

static void another_process_opens_memory() {
    for (int early = 0; early < 2; early++) { /* early: freed while it is open */
        cudaIpcMemHandle_t handle;
        float *x = device_array(7.0f);
        void *own;
        int there[2], back[2], status = -1;
        char byte = 0;
        CHECK(cudaIpcGetMemHandle(&handle, x + 1) == cudaErrorInvalidValue);
        CHECK(cudaIpcGetMemHandle(&handle, x) == cudaSuccess);
        CHECK(cudaIpcOpenMemHandle(&own, handle, cudaIpcMemLazyEnablePeerAccess) == cudaErrorNotSupported);
        CHECK(pipe(there) == 0 && pipe(back) == 0);
        const pid_t child = fork();
        if (child == 0) _exit(look_from_outside(handle, there[0], back[1]));
        close(back[1]); /* a child that fails is noticed */
        CHECK(read(back[0], &byte, 1) == 1);
        CHECK(first_of(x) == 8.0f);
        if (early) CHECK(cudaFree(x) == cudaSuccess && reported("another process has open"));
        CHECK(write(there[1], &byte, 1) == 1);
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        if (!early) CHECK(cudaFree(x) == cudaSuccess && emu_report_count() == 0);
        for (int end : { there[0], there[1], back[0] }) close(end);
        cudaGetLastError();
    }
}

static void the_seal_refuses() {
    float *x = device_array(0.0f), *pinned, host;
    void *block;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaMallocHost(&pinned, kBytes);
    emu_seal();
    CHECK(launch_add(x, x, 1.0f, kCount, stream) == cudaSuccess);
    CHECK(cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    CHECK(emu_report_count() == 0);
    CHECK(cudaMalloc(&block, 4) == cudaErrorNotPermitted);
    CHECK(cudaMallocAsync(&block, 4, stream) == cudaErrorNotPermitted);
    CHECK(cudaMallocHost(&block, 4) == cudaErrorNotPermitted);
    CHECK(cudaFree(x) == cudaErrorNotPermitted);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorNotPermitted);
    CHECK(cudaDeviceSynchronize() == cudaErrorNotPermitted);
    CHECK(cudaMemcpyAsync(pinned, x, 4, cudaMemcpyDeviceToHost, stream) == cudaErrorNotPermitted);
    CHECK(cudaMemcpy(&host, x, 4, cudaMemcpyDeviceToHost) == cudaErrorNotPermitted);
    emu_unseal();
    CHECK(emu_take_reports(nullptr, 0) == 8);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(!cudaFreeHost(pinned) && !cudaFree(x) && !cudaStreamDestroy(stream));
    cudaGetLastError();
}

/* A sequence of eight fallible calls that cleans up after itself; true when every call succeeded. */
static bool sequence() {
    float *x = nullptr, *pinned = nullptr;
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    const bool ok = !cudaMalloc(&x, kBytes) && !cudaMallocHost(&pinned, kBytes) &&
                    !cudaStreamCreate(&stream) && !cudaEventCreate(&event) &&
                    !cudaMemsetAsync(x, 0, kBytes, stream) && !launch_add(x, x, 1.0f, kCount, stream) &&
                    !cudaEventRecord(event, stream) && !cudaStreamSynchronize(stream);
    if (event) cudaEventDestroy(event);
    if (stream) cudaStreamDestroy(stream);
    cudaFreeHost(pinned);
    cudaFree(x);
    return ok;
}

static void each_call_can_fail() {
    int failures = 0;
    const int alive = emu_live_handles(nullptr, 0);
    for (long n = 1;; n++, failures++) {
        emu_fail_call(n);
        if (sequence()) break;
        CHECK(cudaGetLastError() != cudaSuccess);
        CHECK(emu_live_handles(nullptr, 0) == alive);
    }
    emu_fail_call(0);
    CHECK_WITH(failures == 8, std::to_string(failures));
}

static void stream_ordered_memory() {
    float *x = nullptr;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    emu_set_streams(EMU_LAZY);
    CHECK(cudaMallocAsync(reinterpret_cast<void **>(&x), kBytes, stream) == cudaSuccess);
    cudaMemsetAsync(x, 0, kBytes, stream);
    launch_add(x, x, 1.0f, kCount, stream);
    CHECK(cudaFreeAsync(x, stream) == cudaSuccess);
    CHECK(emu_live_handles(nullptr, 0) == 2); /* the stream, and the block until the stream gets there */
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess && emu_live_handles(nullptr, 0) == 1);
    emu_set_streams(EMU_EAGER);
    cudaStreamDestroy(stream);
}

/* What ends the process, or needs a setting at its start, runs in a separate process. */
static void bad_ends_show() {
    const Outcome leak = run_apart([] {
        device_array(0.0f);
        exit(0);
        return 0;
    });
    CHECK_WITH(leak.status == 99 && leak.text.find("1 device blocks") != std::string::npos, leak.text);
    const Outcome padding = run_apart([] {
        float *x = nullptr;
        cudaMalloc(&x, 4);
        launch_add(x + 1, x, 1.0f, 1, 0); /* within the padding of the block */
        cudaFree(x);
        emu_reset_errors();
        return 0;
    });
    CHECK_WITH(!padding.clean, padding.text);
    const Outcome peek = run_apart([] {
        float *x = device_array(1.0f);
        emu_set_host_faults(1);
        launch_add(x, x, 1.0f, kCount, 0);
        const bool right = first_of(x) == 2.0f;
        const float direct = *static_cast<volatile float *>(x);
        cudaFree(x);
        return right ? direct == 2.0f : 1;
    });
    CHECK_WITH(peek.status >= 1000 || peek.text.find("SEGV") != std::string::npos, peek.text);
}

#ifndef EMU_ASAN
static void order_dependence_can_be_declared() {
    float *sum = device_array(0.0f);
    emu_set_order(EMU_COMPARE, 1);
    CHECK(launch_atomic_sum(sum, 0) == cudaSuccess);
    CHECK(reported("depends on the order"));
    emu_set_comparable(0);
    CHECK(launch_atomic_sum(sum, 0) == cudaSuccess);
    CHECK(emu_report_count() == 0);
    emu_set_comparable(1);
    emu_set_order(EMU_ASCENDING, 1);
    cudaFree(sum);
}

static void some_launches_can_be_compared() {
    std::string found;
    emu_set_order(EMU_COMPARE, 1);
    emu_set_compared(2);
    for (int i = 0; i < 18; i++) {
        float *sum = device_array(0.0f); /* a sum that has grown hides the order */
        CHECK(launch_atomic_sum(sum, 0) == cudaSuccess);
        found += emu_report_count() > 0 && reported("depends on the order") ? 'x' : '.';
        cudaFree(sum);
    }
    CHECK_WITH(found == "xx..............x.", found);
    emu_set_compared(0);
    emu_set_order(EMU_ASCENDING, 1);
}
#endif

void stream_tests() {
    test("device functions do what their manual says", [] {
        CHECK_WITH(check_device_functions() == 0, std::to_string(check_device_functions()));
        CHECK(emu_report_count() == 0);
    });
    test("bf16 and fp16 convert exactly",
         [] { CHECK_WITH(check_bf16_and_fp16() == 0, std::to_string(check_bf16_and_fp16())); });
    test("fresh memory is NaN", fresh_memory_is_nan);
    test("addresses are not reused", addresses_are_not_reused);
    test("a device's quota is kept", quota_is_kept);
    test("copies are checked", copies_are_checked);
    test("launches are checked", launches_are_checked);
    test("a trap sticks", a_trap_sticks);
    test("streams keep their order", streams_keep_their_order);
    test("lazy streams wait for somebody", lazy_streams_wait_for_somebody);
    test("graphs replay", graphs_replay);
    test("a capture forbids unsafe calls", captures_forbid_unsafe_calls);
    test("a captured stream is not waited for", captured_streams_are_not_waited_for);
    test("events do not leave a capture", events_do_not_leave_a_capture);
    test("captured streams are joined", captured_streams_are_joined);
    test("external events order replays", external_events_order_replays);
    test("each thread has a current device", each_thread_has_a_current_device);
    test("events belong to a device", events_belong_to_a_device);
    test("peer access can be absent", peer_access_can_be_absent);
    test("another process opens memory", another_process_opens_memory);
    test("the seal refuses", the_seal_refuses);
    test("each call can fail", each_call_can_fail);
    test("memory can be stream-ordered", stream_ordered_memory);
    test("leaks and writes into padding show", bad_ends_show);
#if defined(EMU_ASAN)
    skip("an order dependence is named, unless declared",
         "ASan owns the page faults that the comparison needs");
    skip("the first launches of a shape can be compared alone", "as above");
#else
    test("an order dependence is named, unless declared", order_dependence_can_be_declared);
    test("the first launches of a shape can be compared alone", some_launches_can_be_compared);
#endif
    test("nothing is left over", [] {
        char text[200] = "";
        CHECK_WITH(emu_live_handles(text, sizeof text) == 0, text);
        CHECK_WITH(emu_report_count() == 0, std::to_string(emu_report_count()));
    });
}
