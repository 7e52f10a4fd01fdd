/* Streams, events and graphs.
 *
 * A stream is a queue of items. Whoever waits, and in eager mode whoever submits, drives the queues of all streams: it executes
 * any first item whose predecessors are done. An item that cannot finish yet (a collective whose peers are missing) stays first
 * and is tried again. */
#include "emu.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <set>
#include <thread>

#include <sys/syscall.h>
#include <unistd.h>

/* One of: `make` makes the step of a replay; an event is recorded, or waited for, at each launch. */
struct emu_graph_item {
    std::function<std::function<bool()>()> make;
    cudaEvent_t record, wait;
};

struct emu_graph {
    std::vector<emu_graph_item> items;
};

struct emu_graph_exec {
    emu_graph graph;
};

namespace emu {

/* A capture, from its begin on; events that were recorded in it keep it after its end. */
struct Capture {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    emu_graph *graph;
    bool active = true, invalid = false;
};

struct Stream {
    int device;
    bool blocking; /* synchronises with the legacy stream */
    bool legacy;
    std::deque<Item> queue;
    uint64_t issued = 0, completed = 0;
    bool busy = false;                /* its first item runs without the lock */
    std::shared_ptr<Capture> capture; /* the capture in progress */
    bool capture_origin = false;
    uint64_t captured = 0, joined = 0; /* its items in the capture, and those that another stream waits for */
};

} // namespace emu

struct emu_stream {
    std::shared_ptr<emu::Stream> state;
};

struct emu_event {
    std::shared_ptr<emu::Stream> stream; /* NULL before the first record */
    uint64_t sequence;
    std::shared_ptr<emu::Capture> captured; /* the capture of the last record; NULL: it was outside of one */
    unsigned flags;
    uint64_t tick; /* of the last executed record */
    int device;    /* the current one when it was made: that of its records */
    std::shared_ptr<emu::Stream> captured_on; /* the stream of the last record in a capture, and its items then */
    uint64_t captured_items;
};

namespace emu {

static std::vector<std::shared_ptr<Stream>> streams; /* in the order of creation */
static std::shared_ptr<Stream> legacy_streams[kMaxDevices];
static std::set<cudaStream_t> stream_handles;
static std::set<cudaEvent_t> events;
static std::set<cudaGraph_t> graphs;
static std::set<cudaGraphExec_t> execs;
static uint64_t ticks;
static std::vector<std::shared_ptr<Capture>> captures; /* in progress */
static unsigned long long capture_ids;
static __thread bool in_host_function;
static __thread cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

/* ---- driving ---- */

static bool runnable(const Stream &stream) {
    if (stream.busy || stream.queue.empty()) return false;
    for (const auto &before : stream.queue.front().after)
        if (before.first->completed < before.second) return false;
    return true;
}

static bool run_first(Stream &stream) {
    bool done;
    if (stream.queue.front().unlocked) {
        stream.busy = true;
        big_lock.unlock();
        in_host_function = true;
        done = stream.queue.front().step();
        in_host_function = false;
        big_lock.lock();
        stream.busy = false;
    } else {
        done = stream.queue.front().step();
    }
    if (!done) return false;
    stream.queue.pop_front();
    stream.completed++;
    note_progress();
    return true;
}

/* Executes one item of some stream; false when nothing can go on. */
static bool drive_one() {
    const size_t count = streams.size();
    for (size_t i = 0; i < count; i++) {
        const std::shared_ptr<Stream> &candidate =
            streams[settings.streams == EMU_LAZY_REVERSE ? count - 1 - i : i];
        if (!runnable(*candidate)) continue;
        const std::shared_ptr<Stream> stream = candidate; /* it may be destroyed meanwhile */
        if (run_first(*stream)) return true;
        if (streams.size() != count) return true; /* a host function ran: look again */
    }
    return false;
}

void drive() {
    while (drive_one()) {
    }
}

bool wait_until(Lock &lock, const std::function<bool()> &done, const char *what) {
    typedef std::chrono::steady_clock Clock;
    unsigned long seen = progress;
    Clock::time_point deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                    std::chrono::duration<double>(settings.hang_seconds));
    while (!done()) {
        if (drive_one()) continue;
        if (done()) break;
        if (progress != seen) {
            seen = progress;
            deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                          std::chrono::duration<double>(settings.hang_seconds));
        }
        if (changed.wait_until(lock, deadline) == std::cv_status::timeout && progress == seen) {
            report("%s hangs: nothing has made progress for %g s", what, settings.hang_seconds);
            return false;
        }
    }
    return true;
}

static bool idle(const Stream &stream) {
    return stream.completed == stream.issued;
}

static bool device_idle(int device) {
    for (const auto &stream : streams)
        if (stream->device == device && !idle(*stream)) return false;
    return true;
}

cudaError_t wait_stream(const std::shared_ptr<Stream> &stream, const char *function) {
    Lock lock(big_lock);
    const uint64_t target = stream->issued;
    if (!wait_until(
            lock, [&] { return stream->completed >= target; }, function))
        return cudaErrorUnknown;
    return cudaSuccess;
}

cudaError_t wait_device(int device, const char *function) {
    Lock lock(big_lock);
    return wait_until(
               lock, [&] { return device_idle(device); }, function)
               ? cudaSuccess
               : cudaErrorUnknown;
}

/* ---- handles and submission ---- */

static std::shared_ptr<Stream> new_stream(int device, bool blocking, bool legacy) {
    std::shared_ptr<Stream> stream = std::make_shared<Stream>();
    stream->device = device;
    stream->blocking = blocking;
    stream->legacy = legacy;
    streams.push_back(stream);
    return stream;
}

std::shared_ptr<Stream> resolve(cudaStream_t handle, const char *function) {
    if (in_host_function) report("%s in a host function: it must not call CUDA", function);
    if (handle == nullptr || handle == cudaStreamLegacy) {
        std::shared_ptr<Stream> &legacy = legacy_streams[current_device];
        if (!legacy) legacy = new_stream(current_device, true, true);
        return legacy;
    }
    if (stream_handles.count(handle)) return handle->state;
    report("%s: %p is no stream, or was destroyed", function, (void *)handle);
    return nullptr;
}

int device_of(const Stream &stream) {
    return stream.device;
}

bool is_capturing(const Stream &stream) {
    return stream.capture != nullptr;
}

/* CUDA's rule for calls that a capture does not see: the mode of the thread and that of each capture decide. */
static bool forbids_unsafe_calls(const Capture &capture) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
    if (capture.thread == std::this_thread::get_id()) return capture.mode != cudaStreamCaptureModeRelaxed;
    return thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

bool breaks_capture(const char *function) {
    Lock lock(big_lock);
    bool breaks = false;
    for (const auto &capture : captures) {
        if (!forbids_unsafe_calls(*capture)) continue;
        capture->invalid = breaks = true;
        report("%s while %s thread captures a stream", function,
               capture->thread == std::this_thread::get_id() ? "this" : "another");
    }
    return breaks;
}

/* A capture that the legacy stream would wait for: one with a blocking stream of its device. NULL: none. */
static Capture *implicit_capture(const Stream &stream) {
    if (!stream.legacy) return nullptr;
    for (const auto &other : streams)
        if (other->capture && other->blocking && other->device == stream.device) return other->capture.get();
    return nullptr;
}

/* Whether work may be submitted to a stream: not while its capture is invalid, or another one forbids it. */
static cudaError_t check_stream(const Stream &stream) {
    if (Capture *capture = implicit_capture(stream)) {
        capture->invalid = true;
        report("the legacy stream is used while a blocking stream is captured");
        return cudaErrorStreamCaptureImplicit;
    }
    return stream.capture && stream.capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

/* A call that asks for, or waits for, the work of a captured stream. */
static cudaError_t refuse_captured(const Stream &stream, const char *function) {
    if (!stream.capture) return check_stream(stream);
    stream.capture->invalid = true;
    report("%s of a stream that is captured", function);
    return cudaErrorStreamCaptureUnsupported;
}

/* The same for an event. */
static cudaError_t refuse_captured(const emu_event &event, const char *function) {
    if (!event.captured) return cudaSuccess;
    if (event.captured->active) event.captured->invalid = true;
    report("%s of an event that was recorded in a capture", function);
    return cudaErrorCapturedEvent;
}

/* The legacy stream waits for all blocking streams of its device, and they for it. */
static void add_legacy_order(const Stream &stream, Item &item) {
    if (!stream.blocking) return;
    for (const auto &other : streams) {
        const bool ordered = other->device == stream.device && other->blocking && other.get() != &stream &&
                             (stream.legacy || other->legacy);
        if (ordered && !idle(*other)) item.after.push_back({ other, other->issued });
    }
}

static void append(const std::shared_ptr<Stream> &stream, Item item) {
    add_legacy_order(*stream, item);
    stream->queue.push_back(std::move(item));
    stream->issued++;
    if (settings.streams == EMU_EAGER) drive();
    changed.notify_all();
}

static void capture_item(Stream &stream, emu_graph_item item) {
    stream.capture->graph->items.push_back(std::move(item));
    stream.captured++;
}

cudaError_t submit_fresh(const std::shared_ptr<Stream> &stream, std::function<std::function<bool()>()> make) {
    const cudaError_t bad = check_stream(*stream);
    if (bad) return bad;
    if (stream->capture) {
        capture_item(*stream, { std::move(make), nullptr, nullptr });
        return cudaSuccess;
    }
    Item item;
    item.step = make();
    append(stream, std::move(item));
    return cudaSuccess;
}

cudaError_t submit(const std::shared_ptr<Stream> &stream, std::function<bool()> step) {
    return submit_fresh(stream, [step] { return step; });
}

/* ---- streams ---- */

static cudaError_t create_stream(cudaStream_t *handle, unsigned flags) {
    const cudaError_t entered = enter(cudaErrorMemoryAllocation);
    if (entered) return entered;
    if (!handle || flags > cudaStreamNonBlocking) return remember(cudaErrorInvalidValue);
    Lock lock(big_lock);
    *handle = new emu_stream{ new_stream(current_device, flags != cudaStreamNonBlocking, false) };
    stream_handles.insert(*handle);
    count_handle(kStream, 1);
    return cudaSuccess;
}

/* The first check of synchronising calls; 0 to go on. */
static cudaError_t enter_waiting(const char *function) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (sealed(function)) return remember(cudaErrorNotPermitted);
    if (breaks_capture(function)) return remember(cudaErrorStreamCaptureUnsupported);
    return cudaSuccess;
}

/* The sticky error of a device, after waiting for its work. */
static cudaError_t after_waiting(cudaError_t waited) {
    return waited ? remember(waited) : remember(sticky_error(current_device));
}

} // namespace emu

using namespace emu;

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return create_stream(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return create_stream(stream, flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    return create_stream(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* What was submitted before is still executed, as in CUDA. */
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = handle ? resolve(handle, "cudaStreamDestroy") : nullptr;
    if (!stream || stream->legacy) return remember(cudaErrorInvalidResourceHandle);
    if (!wait_until(
            lock, [&] { return idle(*stream); }, "cudaStreamDestroy"))
        return remember(cudaErrorUnknown);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    stream_handles.erase(handle);
    delete handle;
    count_handle(kStream, -1);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    const cudaError_t entered = enter_waiting("cudaStreamSynchronize");
    if (entered) return entered;
    std::shared_ptr<Stream> stream;
    {
        Lock lock(big_lock);
        stream = resolve(handle, "cudaStreamSynchronize");
        if (!stream) return remember(cudaErrorInvalidResourceHandle);
        const cudaError_t refused = refuse_captured(*stream, "cudaStreamSynchronize");
        if (refused) return remember(refused);
    }
    return after_waiting(wait_stream(stream, "cudaStreamSynchronize"));
}

cudaError_t cudaDeviceSynchronize(void) {
    const cudaError_t entered = enter_waiting("cudaDeviceSynchronize");
    if (entered) return entered;
    {
        Lock lock(big_lock);
        for (const auto &stream : streams)
            if (stream->device == current_device && stream->capture)
                return remember(refuse_captured(*stream, "cudaDeviceSynchronize"));
    }
    return after_waiting(wait_device(current_device, "cudaDeviceSynchronize"));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (breaks_capture("cudaStreamQuery")) return remember(cudaErrorStreamCaptureUnsupported);
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaStreamQuery");
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    const cudaError_t refused = refuse_captured(*stream, "cudaStreamQuery");
    if (refused) return remember(refused);
    if (idle(*stream)) return remember(sticky_error(current_device));
    drive_one(); /* one item, so that a loop of queries ends */
    return cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaLaunchHostFunc");
    if (!stream || !function) return remember(cudaErrorInvalidValue);
    const std::function<bool()> step = [function, argument] {
        function(argument);
        return true;
    };
    const cudaError_t bad = check_stream(*stream);
    if (bad) return remember(bad);
    if (stream->capture) return submit(stream, step);
    Item item;
    item.step = step;
    item.unlocked = true;
    append(stream, std::move(item));
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    const cudaError_t entered = enter(cudaErrorMemoryAllocation);
    if (entered) return entered;
    if (!event) return remember(cudaErrorInvalidValue);
    Lock lock(big_lock);
    *event = new emu_event{ nullptr, 0, nullptr, flags, 0, current_device, nullptr, 0 };
    events.insert(*event);
    count_handle(kEvent, 1);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

static bool known(cudaEvent_t event, const char *function) {
    if (events.count(event)) return true;
    report("%s: %p is no event, or was destroyed", function, (void *)event);
    return false;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Lock lock(big_lock);
    if (!known(event, "cudaEventDestroy")) return remember(cudaErrorInvalidResourceHandle);
    events.erase(event);
    delete event;
    count_handle(kEvent, -1);
    return cudaSuccess;
}

/* Outside of a capture: at its end on the stream, the event is reached. */
static void record_now(const std::shared_ptr<Stream> &stream, cudaEvent_t event) {
    submit(stream, [event] {
        if (events.count(event)) event->tick = ++ticks;
        return true;
    });
    event->captured = nullptr;
    event->stream = stream;
    event->sequence = stream->issued;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaEventRecord");
    if (!stream || !known(event, "cudaEventRecord")) return remember(cudaErrorInvalidResourceHandle);
    if (event->device != stream->device) {
        report("cudaEventRecord: the event is of device %d, the stream of device %d", event->device,
               stream->device);
        return remember(cudaErrorInvalidResourceHandle);
    }
    const cudaError_t bad = check_stream(*stream);
    if (bad) return remember(bad);
    if (!stream->capture) {
        record_now(stream, event);
    } else if (flags & cudaEventRecordExternal) {
        capture_item(*stream, { nullptr, event, nullptr });
    } else { /* replays use the recorded order anyway */
        event->captured = stream->capture;
        event->captured_on = stream;
        event->captured_items = stream->captured;
    }
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    return cudaEventRecordWithFlags(event, handle, cudaEventRecordDefault);
}

static bool reached(const emu_event &event) {
    return !event.stream || event.stream->completed >= event.sequence;
}

static void wait_now(const std::shared_ptr<Stream> &stream, cudaEvent_t event) {
    if (reached(*event)) return;
    Item item;
    item.step = [] { return true; };
    item.after.push_back({ event->stream, event->sequence });
    append(stream, std::move(item));
}

/* A wait for an event that was recorded in a capture: it is for streams of this capture, or to become one, and only
 * as long as the capture lasts. */
static cudaError_t wait_captured(Stream &stream, const emu_event &event) {
    const std::shared_ptr<Capture> capture = event.captured;
    if (!capture->active) {
        report("cudaStreamWaitEvent of an event that was recorded in a capture that has ended");
        if (stream.capture) stream.capture->invalid = true;
        return stream.capture ? cudaErrorStreamCaptureIsolation : cudaErrorCapturedEvent;
    }
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (stream.capture && stream.capture != capture) {
        stream.capture->invalid = capture->invalid = true;
        report("cudaStreamWaitEvent: two captures would become one");
        return cudaErrorStreamCaptureMerge;
    }
    if (stream.legacy) {
        capture->invalid = true;
        report("cudaStreamWaitEvent: the legacy stream cannot be captured");
        return cudaErrorStreamCaptureImplicit;
    }
    if (!stream.capture) { /* the stream becomes part of the capture */
        stream.capture = capture;
        stream.captured = stream.joined = 0;
    } else if (event.captured_on.get() != &stream) {
        event.captured_on->joined = std::max(event.captured_on->joined, event.captured_items);
        stream.captured++;
    }
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaStreamWaitEvent");
    if (!stream || !known(event, "cudaStreamWaitEvent")) return remember(cudaErrorInvalidResourceHandle);
    const cudaError_t bad = check_stream(*stream);
    if (bad) return remember(bad);
    if (stream->capture && (flags & cudaEventWaitExternal)) {
        capture_item(*stream, { nullptr, nullptr, event });
        return cudaSuccess;
    }
    if (event->captured) return remember(wait_captured(*stream, *event));
    if (stream->capture) {
        stream->capture->invalid = true;
        report("cudaStreamWaitEvent: a captured stream waits for an event from outside the capture");
        return remember(cudaErrorStreamCaptureIsolation);
    }
    wait_now(stream, event);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (breaks_capture("cudaEventQuery")) return remember(cudaErrorStreamCaptureUnsupported);
    Lock lock(big_lock);
    if (!known(event, "cudaEventQuery")) return remember(cudaErrorInvalidResourceHandle);
    const cudaError_t refused = refuse_captured(*event, "cudaEventQuery");
    if (refused) return remember(refused);
    if (reached(*event)) return remember(sticky_error(current_device));
    drive_one();
    return cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const cudaError_t entered = enter_waiting("cudaEventSynchronize");
    if (entered) return entered;
    Lock lock(big_lock);
    if (!known(event, "cudaEventSynchronize")) return remember(cudaErrorInvalidResourceHandle);
    const cudaError_t refused = refuse_captured(*event, "cudaEventSynchronize");
    if (refused) return remember(refused);
    const bool came = wait_until(
        lock, [&] { return reached(*event); }, "cudaEventSynchronize");
    return after_waiting(came ? cudaSuccess : cudaErrorUnknown);
}

/* Not a time: a microsecond for each event that was recorded in between. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    if (!known(begin, "cudaEventElapsedTime") || !known(end, "cudaEventElapsedTime") || !begin->stream ||
        !end->stream || ((begin->flags | end->flags) & cudaEventDisableTiming))
        return remember(cudaErrorInvalidResourceHandle);
    if (!reached(*begin) || !reached(*end)) return remember(cudaErrorNotReady);
    *milliseconds = 0.001f * (float)(end->tick - begin->tick);
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaStreamBeginCapture");
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    if (stream->legacy || stream->capture) return remember(cudaErrorStreamCaptureUnsupported);
    stream->capture = std::make_shared<Capture>();
    stream->capture->id = ++capture_ids;
    stream->capture->mode = mode;
    stream->capture->thread = std::this_thread::get_id();
    stream->capture->graph = new emu_graph;
    stream->capture_origin = true;
    stream->captured = stream->joined = 0;
    captures.push_back(stream->capture);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaStreamEndCapture");
    if (!stream || !graph) return remember(cudaErrorInvalidValue);
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!stream->capture_origin)
        return remember(capture ? cudaErrorStreamCaptureUnmatched : cudaErrorInvalidResourceHandle);
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
        return remember(cudaErrorStreamCaptureWrongThread);
    bool unjoined = false;
    for (const auto &other : streams) {
        if (other->capture != capture) continue;
        unjoined = unjoined || (other != stream && other->joined < other->captured);
        other->capture = nullptr;
    }
    stream->capture_origin = false;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    capture->active = false;
    if (capture->invalid || unjoined) {
        if (!capture->invalid) report("cudaStreamEndCapture: no stream waits for work of another captured stream");
        delete capture->graph;
        return remember(capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined);
    }
    *graph = capture->graph;
    graphs.insert(*graph);
    count_handle(kGraph, 1);
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    if (!mode || *mode > cudaStreamCaptureModeRelaxed) return remember(cudaErrorInvalidValue);
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaStreamIsCapturing");
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    if (nodes || edges || count) return remember(cudaErrorNotSupported);
    if (implicit_capture(*stream)) return remember(cudaErrorStreamCaptureImplicit); /* which goes on */
    const std::shared_ptr<Capture> &capture = stream->capture;
    *status = !capture           ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? capture->graph : nullptr;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    const cudaError_t entered = enter(cudaErrorMemoryAllocation);
    if (entered) return entered;
    Lock lock(big_lock);
    if (!exec || !graphs.count(graph)) return remember(cudaErrorInvalidValue);
    *exec = new emu_graph_exec{ *graph };
    execs.insert(*exec);
    count_handle(kGraphExec, 1);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaGraphLaunch");
    if (!stream || !execs.count(exec)) return remember(cudaErrorInvalidValue);
    const cudaError_t bad = check_stream(*stream);
    if (bad) return remember(bad);
    for (const emu_graph_item &item : exec->graph.items) {
        if (stream->capture)
            capture_item(*stream, item);
        else if (item.make)
            submit_fresh(stream, item.make);
        else if (item.record && events.count(item.record))
            record_now(stream, item.record);
        else if (item.wait && events.count(item.wait))
            wait_now(stream, item.wait);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    Lock lock(big_lock);
    if (!execs.erase(exec)) return remember(cudaErrorInvalidValue);
    delete exec;
    count_handle(kGraphExec, -1);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Lock lock(big_lock);
    if (!graphs.erase(graph)) return remember(cudaErrorInvalidValue);
    delete graph;
    count_handle(kGraph, -1);
    return cudaSuccess;
}

/* The library's ranks poll each other and yield in between. Here the other rank mostly runs a kernel, under the lock; so a rank
 * that yields sleeps until the kernel ends, and leaves the core to it. */
extern "C" int sched_yield(void) noexcept {
    big_lock.lock();
    big_lock.unlock();
    return (int)syscall(SYS_sched_yield);
}
