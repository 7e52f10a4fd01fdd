/* Devices, launches and copies. */
#include "emu.h"

#include <set>

#include "exec.h"

namespace emu {

struct Attributes {
    int dynamic_limit = (int)kDefaultShared;
    bool large_clusters = false;
};
static std::map<const void *, Attributes> attributes; /* of kernels */
static std::set<std::pair<int, int>> peers;           /* (device, device whose memory it may access) */
static long launch_count;

bool may_access(int device, int owner) {
    return device == owner || (settings.peers && peers.count({ device, owner }));
}

/* ---- launches ---- */

static dim3 cluster_of(const cudaLaunchConfig_t &config) {
    for (unsigned i = 0; i < config.numAttrs; i++) {
        const cudaLaunchAttribute &attribute = config.attrs[i];
        if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
        return dim3(attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z);
    }
    return dim3(1, 1, 1);
}

static uint64_t volume(dim3 d) {
    return (uint64_t)d.x * d.y * d.z;
}

/* What the launch itself refuses on a GPU; NULL when nothing. */
static const char *launch_fault(const Launch &launch, const Attributes &kernel) {
    const dim3 g = launch.grid, b = launch.block, c = launch.cluster;
    if (volume(g) == 0 || volume(b) == 0 || volume(c) == 0)
        return "a dimension of the grid, block or cluster is 0";
    if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) return "the grid is too large";
    if (b.x > 1024 || b.y > 1024 || b.z > 64 || volume(b) > 1024) return "the block is too large";
    if (volume(c) > (kernel.large_clusters ? 16 : 8)) return "the cluster is too large";
    if (g.x % c.x || g.y % c.y || g.z % c.z) return "the grid is no multiple of the cluster";
    if (launch.dynamic_bytes > (size_t)kernel.dynamic_limit)
        return "more dynamic shared memory than the kernel may have";
    return nullptr;
}

/* Rules of this library's own units that a GPU does not enforce. */
static const char *rule_fault(const Launch &launch) {
    return volume(launch.block) % 32 ? "the block size is no multiple of 32" : nullptr;
}

static std::function<bool()> launch_step(const Launch &launch) {
    return [launch] {
        if (sticky_error(launch.device)) return true; /* the context is lost: nothing runs any more */
        if (!execute(launch)) set_sticky(launch.device, cudaErrorLaunchFailure);
        return true;
    };
}

static cudaError_t launch_on(const std::shared_ptr<Stream> &stream, Launch launch) {
    const Attributes kernel = attributes[launch.call->kernel];
    const char *fault = launch_fault(launch, kernel), *rule = rule_fault(launch);
    if (fault || rule) {
        report("launch of %s: %s (grid %u,%u,%u block %u,%u,%u, %zu bytes)",
               kernel_name(launch.call->kernel).c_str(), fault ? fault : rule, launch.grid.x, launch.grid.y,
               launch.grid.z, launch.block.x, launch.block.y, launch.block.z, launch.dynamic_bytes);
        return remember(cudaErrorInvalidConfiguration);
    }
    launch_count++;
    return remember(submit(stream, launch_step(launch)));
}

} // namespace emu

using namespace emu;

cudaError_t emu_launch(const cudaLaunchConfig_t *config, const emu_kernel_call &call) {
    const std::shared_ptr<emu_kernel_call> owned(new emu_kernel_call(call), [](emu_kernel_call *c) {
        c->destroy(c->arguments);
        delete c;
    });
    const cudaError_t entered = enter(cudaErrorLaunchOutOfResources);
    if (entered) return entered;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(config->stream, "cudaLaunchKernelEx");
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    if (device_of(*stream) != current_device) {
        report("launch of %s: the stream is of device %d, the current device is %d",
               kernel_name(call.kernel).c_str(), device_of(*stream), current_device);
        return remember(cudaErrorInvalidResourceHandle);
    }
    return launch_on(stream, { config->gridDim, config->blockDim, cluster_of(*config),
                               config->dynamicSmemBytes, current_device, comparable != 0, owned });
}

long emu_launch_count(void) {
    Lock lock(big_lock);
    return launch_count;
}

cudaError_t emu_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || (size_t)value > kMaxShared) return remember(cudaErrorInvalidValue);
        attributes[kernel].dynamic_limit = value;
    }
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed)
        attributes[kernel].large_clusters = value != 0;
    return cudaSuccess;
}

cudaError_t emu_get_attributes(cudaFuncAttributes *result, const void *kernel) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    memset(result, 0, sizeof *result);
    result->maxThreadsPerBlock = 1024;
    result->numRegs = 32;
    result->ptxVersion = result->binaryVersion = 90;
    result->maxDynamicSharedSizeBytes = attributes[kernel].dynamic_limit;
    return cudaSuccess;
}

/* ---- devices ---- */

static bool is_device(int device) {
    return device >= 0 && device < settings.devices;
}

cudaError_t cudaGetDeviceCount(int *count) {
    const cudaError_t entered = enter(cudaErrorNoDevice);
    if (entered) return entered;
    *count = settings.devices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (!is_device(device)) return remember(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

/* Of an H100; EMU_ARCH=80 or 100: of an A100 or B200. */
static int capability() {
    const char *arch = getenv("EMU_ARCH");
    return arch && atoi(arch) > 0 ? atoi(arch) : 90;
}

static int device_value(cudaDeviceAttr attribute) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMaxSharedMemoryPerBlock: return (int)kDefaultShared;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return capability() < 90 ? 108 : capability() < 100 ? 132 : 148;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return capability() < 90 ? 163 << 10 : (int)kMaxShared;
    case cudaDevAttrMemoryPoolsSupported: return 1;
    case cudaDevAttrClusterLaunch: return capability() >= 90;
    }
    return -1;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (!is_device(device)) return remember(cudaErrorInvalidDevice);
    const int found = device_value(attribute);
    if (found < 0) return remember(cudaErrorInvalidValue);
    *value = found;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (!is_device(device)) return remember(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "Emulated device %d", device);
    properties->totalGlobalMem = settings.quota[device];
    properties->sharedMemPerBlock = kDefaultShared;
    properties->sharedMemPerBlockOptin = kMaxShared;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->multiProcessorCount = device_value(cudaDevAttrMultiProcessorCount);
    properties->major = device_value(cudaDevAttrComputeCapabilityMajor);
    properties->minor = device_value(cudaDevAttrComputeCapabilityMinor);
    properties->l2CacheSize = device_value(cudaDevAttrL2CacheSize);
    const int grid[3] = { 0x7fffffff, 65535, 65535 }, threads[3] = { 1024, 1024, 64 };
    memcpy(properties->maxGridSize, grid, sizeof grid);
    memcpy(properties->maxThreadsDim, threads, sizeof threads);
    properties->clusterLaunch = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (!is_device(device)) return remember(cudaErrorInvalidDevice);
    snprintf(text, (size_t)length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    if (!is_device(device) || !is_device(peer)) return remember(cudaErrorInvalidDevice);
    *can = settings.peers && device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (!is_device(peer) || peer == current_device || flags) return remember(cudaErrorInvalidValue);
    Lock lock(big_lock);
    if (!settings.peers) return remember(cudaErrorPeerAccessUnsupported);
    return peers.insert({ current_device, peer }).second ? cudaSuccess
                                                         : remember(cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    Lock lock(big_lock);
    return peers.erase({ current_device, peer }) ? cudaSuccess : remember(cudaErrorPeerAccessNotEnabled);
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* ---- copies ---- */

namespace {

struct Copy {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
    bool to_device, from_device;
};

/* True when the whole range lies in one live block, or on the host where host memory is meant. */
bool range_is_valid(const char *address, size_t bytes, bool on_device, const char *function) {
    if (!on_device) return true;
    const Block *block = find_block(address);
    if (block && block->device >= 0 && address + bytes <= block->base + block->bytes) return true;
    report("%s: %zu bytes do not fit at %s", function, bytes, describe(address).c_str());
    return false;
}

cudaError_t resolve_kind(Copy *copy, cudaMemcpyKind kind, const char *function) {
    copy->to_device = in_device_range(copy->to);
    copy->from_device = in_device_range(copy->from);
    const bool wants_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool wants_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    /* Page-locked memory has one address on the host and on the device. */
    const bool wrong_to = wants_to != copy->to_device && !is_pinned(copy->to, 1);
    const bool wrong_from = wants_from != copy->from_device && !is_pinned(copy->from, 1);
    if (kind != cudaMemcpyDefault && (wrong_to || wrong_from)) {
        report("%s: kind %d, but from %s to %s", function, (int)kind, describe(copy->from).c_str(),
               describe(copy->to).c_str());
        return cudaErrorInvalidMemcpyDirection;
    }
    const size_t to_bytes = copy->to_pitch * (copy->height - 1) + copy->width;
    const size_t from_bytes = copy->from_pitch * (copy->height - 1) + copy->width;
    if (!range_is_valid(copy->to, to_bytes, copy->to_device, function) ||
        !range_is_valid(copy->from, from_bytes, copy->from_device, function))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

void carry_out(const Copy &copy, const char *from) {
    DeviceAccess access;
    for (size_t row = 0; row < copy.height; row++) {
        char *to = copy.to + row * copy.to_pitch;
        const char *source = from + row * copy.from_pitch;
        memmove(to, source, copy.width);
        if (copy.to_device && copy.from_device)
            check_copied(to, source, copy.width);
        else if (copy.to_device)
            check_written(to, copy.width);
    }
}

/* Looked up again: blocks may be freed between the call and the execution. */
bool still_valid(const Copy &copy) {
    return range_is_valid(copy.to, copy.width, copy.to_device, "a copy in a stream") &&
           range_is_valid(copy.from, copy.width, copy.from_device, "a copy in a stream");
}

/* How CUDA does it: a pageable source is read during the call (through a staging buffer); a pageable destination makes the call
 * wait; pinned memory and device memory are accessed when the stream gets there. */
cudaError_t submit_copy(const std::shared_ptr<Stream> &stream, const Copy &copy, bool *wait) {
    const bool pageable_source = !copy.from_device && !find_block(copy.from);
    *wait = copy.from_device && !copy.to_device && !find_block(copy.to);
    if (!pageable_source || is_capturing(*stream))
        return submit(stream, [copy] {
            if (still_valid(copy)) carry_out(copy, copy.from);
            return true;
        });
    const size_t bytes = copy.from_pitch * (copy.height - 1) + copy.width;
    const auto staged = std::make_shared<std::vector<char>>(copy.from, copy.from + bytes);
    return submit(stream, [copy, staged] {
        if (still_valid(copy)) carry_out(copy, staged->data());
        return true;
    });
}

cudaError_t copy_on(Copy copy, cudaMemcpyKind kind, cudaStream_t handle, bool blocking,
                    const char *function) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (copy.width == 0 || copy.height == 0) return cudaSuccess;
    bool wait;
    std::shared_ptr<Stream> stream;
    {
        Lock lock(big_lock);
        stream = resolve(handle, function);
        if (!stream) return remember(cudaErrorInvalidResourceHandle);
        const cudaError_t kind_error = resolve_kind(&copy, kind, function);
        if (kind_error) return remember(kind_error);
        const bool to_host = copy.from_device && !copy.to_device;
        if ((blocking || to_host) && sealed(function)) return remember(cudaErrorNotPermitted);
        if (blocking && breaks_capture(function)) return remember(cudaErrorStreamCaptureUnsupported);
        const cudaError_t submitted = submit_copy(stream, copy, &wait);
        if (submitted) return remember(submitted);
        if (is_capturing(*stream)) return cudaSuccess;
    }
    if (!wait && !blocking) return cudaSuccess;
    const cudaError_t waited = wait_stream(stream, function);
    return remember(waited ? waited : sticky_error(current_device));
}

cudaError_t set_on(void *to, int value, size_t bytes, cudaStream_t handle, const char *function) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    if (bytes == 0) return cudaSuccess;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, function);
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    char *begin = static_cast<char *>(to);
    if (!range_is_valid(begin, bytes, true, function)) return remember(cudaErrorInvalidValue);
    return remember(submit(stream, [begin, value, bytes] {
        if (!range_is_valid(begin, bytes, true, "a memset in a stream")) return true;
        DeviceAccess access;
        memset(begin, value, bytes);
        check_written(begin, bytes);
        return true;
    }));
}

Copy flat(void *to, const void *from, size_t bytes) {
    return { static_cast<char *>(to), static_cast<const char *>(from), bytes, bytes, bytes, 1, false, false };
}

} // namespace

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy_on(flat(to, from, bytes), kind, nullptr, true, "cudaMemcpy");
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy_on(flat(to, from, bytes), kind, stream, false, "cudaMemcpyAsync");
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return remember(cudaErrorInvalidValue);
    const Copy copy = { static_cast<char *>(to),
                        static_cast<const char *>(from),
                        to_pitch,
                        from_pitch,
                        width,
                        height,
                        false,
                        false };
    return copy_on(copy, kind, stream, false, "cudaMemcpy2DAsync");
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    if (!is_device(to_device) || !is_device(from_device)) return remember(cudaErrorInvalidDevice);
    return copy_on(flat(to, from, bytes), cudaMemcpyDeviceToDevice, stream, false, "cudaMemcpyPeerAsync");
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return set_on(to, value, bytes, nullptr, "cudaMemset");
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    return set_on(to, value, bytes, stream, "cudaMemsetAsync");
}
