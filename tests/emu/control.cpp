/* Settings, reports, errors, fault injection, handles that are alive. */
#include "emu.h"

#include <stdarg.h>
#include <unistd.h>

namespace emu {

std::recursive_mutex big_lock;
std::condition_variable_any changed;
unsigned long progress;

void note_progress() {
    progress++;
    changed.notify_all();
}

static Settings from_environment() {
    Settings s = { EMU_ASCENDING, 0, 1, EMU_EAGER, 4, 20.0, false, true, {} };
    for (int d = 0; d < kMaxDevices; d++) s.quota[d] = (size_t)8 << 30;
    const char *order = getenv("EMU_ORDER"), *streams = getenv("EMU_STREAMS");
    if (order && !strcmp(order, "desc")) s.order = EMU_DESCENDING;
    if (order && !strncmp(order, "compare", 7)) {
        s.order = EMU_COMPARE;
        if (order[7] == ':') s.compared = (unsigned)strtoul(order + 8, nullptr, 10);
    }
    if (order && !strncmp(order, "random", 6)) {
        s.order = EMU_RANDOM;
        if (order[6] == ':') s.seed = strtoull(order + 7, nullptr, 10);
    }
    if (streams && !strcmp(streams, "lazy")) s.streams = EMU_LAZY;
    if (streams && !strcmp(streams, "lazy-reverse")) s.streams = EMU_LAZY_REVERSE;
    if (getenv("EMU_DEVICES")) s.devices = atoi(getenv("EMU_DEVICES"));
    if (s.devices < 1 || s.devices > kMaxDevices) s.devices = 1;
    s.host_faults = getenv("EMU_HOST_FAULTS") && atoi(getenv("EMU_HOST_FAULTS"));
    s.peers = !getenv("EMU_PEERS") || atoi(getenv("EMU_PEERS"));
    if (getenv("EMU_HANG_SECONDS")) s.hang_seconds = atof(getenv("EMU_HANG_SECONDS"));
    return s;
}

Settings settings = from_environment();
__thread int current_device;
__thread int comparable = 1;

/* ---- reports ---- */

static std::string report_text;
static int report_count;

void report(const char *format, ...) {
    char line[1200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    Lock lock(big_lock);
    if (++report_count <= 20) fprintf(stderr, "emu: %s\n", line);
    if (report_text.size() < 16000) report_text.append(line).append("\n");
}

/* ---- errors ---- */

static __thread cudaError_t last_error;
static __thread int seal_depth;
static __thread long calls, failing_call;
static cudaError_t sticky[kMaxDevices];

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

void set_sticky(int device, cudaError_t error) {
    Lock lock(big_lock);
    if (sticky[device] == cudaSuccess) sticky[device] = error;
}

cudaError_t sticky_error(int device) {
    Lock lock(big_lock);
    return sticky[device];
}

bool injected_fault() {
    calls++;
    return failing_call > 0 && --failing_call == 0;
}

cudaError_t enter(cudaError_t injected) {
    if (injected_fault()) return remember(injected);
    Lock lock(big_lock);
    return remember(sticky[current_device]);
}

bool sealed(const char *function) {
    if (seal_depth == 0) return false;
    report("%s after set-up: allocation, synchronisation and device-to-host copies are sealed", function);
    return true;
}

/* ---- handles ---- */

static int handles[kHandleKinds];
static const char *const handle_names[kHandleKinds] = {
    "device blocks",    "pinned blocks",       "streams", "events", "graphs", "graph execs", "communicators",
    "cuBLASLt handles", "cuBLASLt descriptors"
};

void count_handle(Handle kind, int change) {
    Lock lock(big_lock);
    handles[kind] += change;
}

static std::string handle_text(int *total) {
    std::string text;
    *total = 0;
    for (int k = 0; k < kHandleKinds; k++) {
        if (handles[k] == 0) continue;
        *total += handles[k];
        text += (text.empty() ? "" : ", ") + std::to_string(handles[k]) + " " + handle_names[k];
    }
    return text;
}

/* Ends the process with a failure when something was reported or is still alive. */
struct AtExit {
    ~AtExit() {
        int alive;
        const std::string text = handle_text(&alive);
        if (alive) fprintf(stderr, "emu: alive at exit: %s\n", text.c_str());
        if (report_count) fprintf(stderr, "emu: %d reports\n", report_count);
        if (!alive && !report_count) return;
        fflush(nullptr);
        _exit(99);
    }
};
static AtExit at_exit; /* constructed last in this file, so destroyed before what it reads */

static void copy_text(char *to, size_t room, const std::string &text) {
    if (to && room) snprintf(to, room, "%s", text.c_str());
}

} // namespace emu

using namespace emu;

void emu_set_compared(unsigned launches) {
    settings.compared = launches;
}

void emu_set_order(emu_order order, uint64_t seed) {
    Lock lock(big_lock);
    settings.order = order;
    settings.seed = seed;
}

void emu_set_streams(emu_streams mode) {
    Lock lock(big_lock);
    settings.streams = mode;
}

void emu_set_comparable(int value) {
    comparable = value;
}

void emu_set_device_count(int count) {
    Lock lock(big_lock);
    settings.devices = count < 1 ? 1 : count > kMaxDevices ? kMaxDevices : count;
}

void emu_set_quota(int device, size_t bytes) {
    Lock lock(big_lock);
    if (device >= 0 && device < kMaxDevices) settings.quota[device] = bytes;
}

void emu_set_peer_access(int possible) {
    Lock lock(big_lock);
    settings.peers = possible != 0;
}

void emu_set_hang_seconds(double seconds) {
    Lock lock(big_lock);
    settings.hang_seconds = seconds;
}

void emu_seal(void) {
    seal_depth++;
}

void emu_unseal(void) {
    if (seal_depth > 0) seal_depth--;
}

void emu_fail_call(long n) {
    failing_call = n;
}

long emu_calls(void) {
    return calls;
}

int emu_report_count(void) {
    Lock lock(big_lock);
    return report_count;
}

int emu_take_reports(char *text, size_t room) {
    Lock lock(big_lock);
    const int count = report_count;
    copy_text(text, room, report_text);
    report_text.clear();
    report_count = 0;
    return count;
}

int emu_live_handles(char *text, size_t room) {
    Lock lock(big_lock);
    int total;
    const std::string names = handle_text(&total);
    copy_text(text, room, names);
    return total;
}

void emu_reset_errors(void) {
    Lock lock(big_lock);
    for (int d = 0; d < kMaxDevices; d++) sticky[d] = cudaSuccess;
    last_error = cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t error = last_error;
    Lock lock(big_lock);
    last_error = sticky[current_device];
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    { cudaSuccess, "cudaSuccess", "no error" },
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory" },
    { cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error" },
    { cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument" },
    { cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer" },
    { cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
      "invalid copy direction for memcpy" },
    { cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "driver version is insufficient" },
    { cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function" },
    { cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected" },
    { cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal" },
    { cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered" },
    { cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
      "too many resources requested for launch" },
    { cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
      "peer access is not supported between these two devices" },
    { cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
      "peer access is already enabled" },
    { cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled" },
    { cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "already registered" },
    { cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer is not registered" },
    { cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure" },
    { cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted" },
    { cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported" },
    { cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
      "not permitted while capturing" },
    { cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "capture was invalidated" },
    { cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "two captures would become one" },
    { cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
      "the capture was not begun in this stream" },
    { cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "captured stream was not joined" },
    { cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
      "dependency on work outside of the capture" },
    { cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
      "dependency of the legacy stream on a capture" },
    { cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "the event was recorded in a capture" },
    { cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
      "the capture was begun in another thread" },
    { cudaErrorUnknown, "cudaErrorUnknown", "unknown error" },
};

const char *cudaGetErrorName(cudaError_t error) {
    for (const auto &e : errors)
        if (e.error == error) return e.name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    for (const auto &e : errors)
        if (e.error == error) return e.text;
    return "unrecognized error code";
}
