// Kernels with injected bugs, each beside its correct form: `bug` is 0 or the number of the bug.
#include "test_kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector>

template <typename... Parameters, typename... Arguments>
static cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_bytes,
                          cudaStream_t stream, Arguments &&...arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// An array on the device that is filled from, and compared with, one on the host.
struct Array {
    float *device = nullptr;
    size_t count;
    explicit Array(size_t n) : count(n) {
        if (cudaMalloc(&device, n * sizeof(float))) device = nullptr;
    }
    Array(size_t n, float first, float step) : Array(n) {
        std::vector<float> host(n);
        for (size_t i = 0; i < n; i++) host[i] = first + step * (float)i;
        cudaMemcpy(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice);
    }
    Array(const Array &) = delete;
    ~Array() {
        cudaFree(device);
    }
    std::vector<float> read() const {
        std::vector<float> host(count);
        cudaMemcpy(host.data(), device, count * sizeof(float), cudaMemcpyDeviceToHost);
        return host;
    }
};

template <typename Expected> static int differs(const Array &array, Expected expected) {
    const std::vector<float> host = array.read();
    for (size_t i = 0; i < host.size(); i++)
        if (!(host[i] == expected(i))) return 1;
    return 0;
}

static const int kThreads = 128;

// ---- missing block barriers ----

__global__ void neighbour_kernel(const float *x, float *y, int bug) {
    XD_SHARED(float, part, [kThreads]);
    const unsigned t = threadIdx.x;
    part[t] = x[t];
    if (!bug) __syncthreads();
    y[t] = part[(t + 1) % kThreads] - part[(t + kThreads - 1) % kThreads];
}

static int neighbour(int bug) {
    Array x(kThreads, 1, 1), y(kThreads);
    launch(neighbour_kernel, 1, kThreads, 0, 0, x.device, y.device, bug);
    return differs(y, [](size_t i) { return i == 0 ? -126.0f : i == kThreads - 1 ? -126.0f : 2.0f; });
}

__global__ void broadcast_kernel(const float *x, float *y, int bug) {
    XD_SHARED(float, total, );
    if (threadIdx.x == kThreads - 1) total = x[0];
    if (!bug) __syncthreads();
    y[threadIdx.x] = total;
}

static int broadcast(int bug) {
    Array x(1, 5, 0), y(kThreads);
    launch(broadcast_kernel, 1, kThreads, 0, 0, x.device, y.device, bug);
    return differs(y, [](size_t) { return 5.0f; });
}

__global__ void reuse_kernel(float *y, int bug) {
    XD_SHARED(float, word, );
    float sum = 0.0f;
    for (int round = 0; round < 3; round++) {
        if (threadIdx.x == 0) word = (float)round;
        __syncthreads();
        sum += word;
        if (!bug) __syncthreads();
    }
    y[threadIdx.x] = sum;
}

static int reuse(int bug) {
    Array y(kThreads);
    launch(reuse_kernel, 1, kThreads, 0, 0, y.device, bug);
    return differs(y, [](size_t) { return 3.0f; });
}

__global__ void warp_exchange_kernel(float *y, int bug) {
    XD_SHARED(float, part, [kThreads]);
    const unsigned t = threadIdx.x, warp = t / 32 * 32;
    part[t] = (float)t;
    if (!bug) __syncwarp();
    y[t] = part[warp + (t % 32 ? t % 32 - 1 : 0)];
}

static int warp_exchange(int bug) {
    Array y(kThreads);
    launch(warp_exchange_kernel, 1, kThreads, 0, 0, y.device, bug);
    return differs(y, [](size_t t) { return (float)(t % 32 ? t - 1 : t); });
}

__global__ void histogram_kernel(float *y, int bug) {
    XD_SHARED(unsigned, bins, [4]);
    if (threadIdx.x < 4) bins[threadIdx.x] = 0;
    __syncthreads();
    if (bug)
        bins[threadIdx.x % 4]++;
    else
        atomicAdd(&bins[threadIdx.x % 4], 1u);
    __syncthreads();
    if (threadIdx.x < 4) y[threadIdx.x] = (float)bins[threadIdx.x];
}

static int histogram(int bug) {
    Array y(4);
    launch(histogram_kernel, 1, kThreads, 0, 0, y.device, bug);
    return differs(y, [](size_t) { return kThreads / 4.0f; });
}

// ---- bounds and unwritten memory ----

__global__ void read_past_end_kernel(const float *x, float *y, int bug) {
    y[threadIdx.x] = x[threadIdx.x + (bug ? 1 : 0)];
}

static int read_past_end(int bug) {
    Array x(kThreads, 0, 1), y(kThreads);
    launch(read_past_end_kernel, 1, kThreads, 0, 0, x.device, y.device, bug);
    return differs(y, [](size_t i) { return (float)i; });
}

__global__ void shared_past_end_kernel(float *y, int bug) {
    XD_SHARED(float, part, [kThreads]);
    XD_SHARED(float, other, [kThreads]);
    float *first = part; // a pointer, so that the compiler does not know the bound
    other[threadIdx.x] = 1.0f;
    first[threadIdx.x + (bug ? 1 : 0)] = 2.0f;
    __syncthreads();
    y[threadIdx.x] = other[threadIdx.x] + (bug ? 2.0f : part[threadIdx.x]);
}

static int shared_past_end(int bug) {
    Array y(kThreads);
    launch(shared_past_end_kernel, 1, kThreads, 0, 0, y.device, bug);
    return differs(y, [](size_t) { return 3.0f; });
}

__global__ void shared_unwritten_kernel(float *y, int bug) {
    XD_DYN_SHARED(float, sums);
    if (!bug || threadIdx.x) sums[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = sums[kThreads - 1 - threadIdx.x];
}

static int shared_unwritten(int bug) {
    Array y(kThreads);
    launch(shared_unwritten_kernel, 1, kThreads, kThreads * sizeof(float), 0, y.device, bug);
    return differs(y, [](size_t) { return 1.0f; });
}

__global__ void add_kernel(float *y, const float *x, float add, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) y[i] = x[i] + add;
}

static int global_unwritten(int bug) {
    Array x(kThreads), y(kThreads);
    cudaMemset(x.device, 0, (kThreads - (bug ? 1 : 0)) * sizeof(float));
    launch(add_kernel, 1, kThreads, 0, 0, y.device, x.device, 1.0f, kThreads);
    return differs(y, [](size_t) { return 1.0f; });
}

__global__ void count_kernel(unsigned *count, float *y) {
    atomicAdd(count, 1u);
    __syncthreads();
    y[threadIdx.x] = (float)*count;
}

static int counter_not_zeroed(int bug) {
    Array count(1), y(kThreads);
    if (!bug) cudaMemset(count.device, 0, sizeof(float));
    launch(count_kernel, 1, kThreads, 0, 0, reinterpret_cast<unsigned *>(count.device), y.device);
    return differs(y, [](size_t) { return (float)kThreads; });
}

static int use_after_free(int bug) {
    Array y(kThreads);
    float *gone;
    if (cudaMalloc(&gone, kThreads * sizeof(float))) return 1;
    cudaMemset(gone, 0, kThreads * sizeof(float));
    if (bug) cudaFree(gone);
    launch(add_kernel, 1, kThreads, 0, 0, y.device, gone, 1.0f, kThreads);
    const int result = differs(y, [](size_t) { return 1.0f; });
    if (!bug) cudaFree(gone);
    return result;
}

// ---- across blocks ----

__global__ void one_element_kernel(float *y, int bug) {
    if (threadIdx.x == 0) y[bug ? 0 : blockIdx.x] = (float)blockIdx.x;
}

static int one_element(int bug) {
    Array y(4);
    cudaMemset(y.device, 0, 4 * sizeof(float));
    launch(one_element_kernel, 4, 32, 0, 0, y.device, bug);
    return differs(y, [&](size_t i) { return bug ? (i ? 0.0f : 3.0f) : (float)i; });
}

__global__ void last_block_kernel(float *partial, unsigned *ticket, float *y, int bug) {
    XD_SHARED(unsigned, mine, );
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = (float)(blockIdx.x + 1);
        if (!bug) __threadfence();
        mine = atomicAdd(ticket, 1u);
    }
    __syncthreads();
    if (mine != gridDim.x - 1 || threadIdx.x) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) sum += partial[b];
    *y = sum;
}

static int last_block(int bug) {
    Array partial(8), ticket(1), y(1);
    cudaMemset(ticket.device, 0, sizeof(float));
    launch(last_block_kernel, 8, 64, 0, 0, partial.device, reinterpret_cast<unsigned *>(ticket.device),
           y.device, bug);
    return differs(y, [](size_t) { return 36.0f; });
}

// ---- barriers that not every thread reaches ----

__global__ void divergent_kernel(float *y, int bug) {
    XD_SHARED(float, word, );
    if (threadIdx.x == 0) word = 1.0f;
    if (bug && threadIdx.x >= 64) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = word;
}

static int divergent_barrier(int bug) {
    Array y(kThreads);
    launch(divergent_kernel, 1, kThreads, 0, 0, y.device, bug);
    return differs(y, [](size_t) { return 1.0f; });
}

__global__ void skipped_kernel(float *y, int bug) {
    for (int round = 0; round < (bug && threadIdx.x == 5 ? 1 : 2); round++) __syncthreads();
    y[threadIdx.x] = 1.0f;
}

static int skipped_barrier(int bug) {
    Array y(kThreads);
    launch(skipped_kernel, 1, kThreads, 0, 0, y.device, bug);
    return differs(y, [](size_t) { return 1.0f; });
}

__global__ void exit_kernel(float *y, int count) {
    if ((int)threadIdx.x >= count) return;
    __syncthreads();
    y[threadIdx.x] = 1.0f;
}

static int exit_before_barrier(int bug) {
    Array y(kThreads);
    cudaMemset(y.device, 0, kThreads * sizeof(float));
    launch(exit_kernel, 1, kThreads, 0, 0, y.device, bug ? 100 : kThreads);
    return differs(y, [](size_t) { return 1.0f; });
}

// ---- warp operations ----

__global__ void mask_kernel(float *y, int bug) {
    const unsigned lane = threadIdx.x % 32;
    float value = (float)lane;
    if (lane < (bug == 1 ? 17u : 16u)) value = __shfl_xor_sync(0x0000ffffu, value, 1);
    if (bug == 2) value = __shfl_xor_sync(lane < 16 ? 0x0001ffffu : 0xffffffffu, value, 1);
    if (bug == 3 && lane != 7) value = __shfl_xor_sync(0xffffffffu, value, 0);
    if (bug == 4)
        value = __shfl_sync(lane < 16 ? 0x0000ffffu : 0xffff0000u, value, 0); // reads a lane out of its mask
    y[threadIdx.x] = value;
}

static int run_mask(int bug) {
    Array y(32);
    launch(mask_kernel, 1, 32, 0, 0, y.device, bug);
    return differs(y, [](size_t i) { return i < 16 ? (float)(i ^ 1) : (float)i; });
}

static int lane_not_in_mask(int bug) {
    return run_mask(bug ? 1 : 0);
}
static int different_masks(int bug) {
    return run_mask(bug ? 2 : 0);
}
static int missing_lane(int bug) {
    return run_mask(bug ? 3 : 0);
}
static int source_not_in_mask(int bug) {
    return run_mask(bug ? 4 : 0);
}

// ---- alignment ----

__device__ static float4 load16(const void *address) {
    emu_require_aligned(address, 16, __FILE__, __LINE__);
    return *static_cast<const float4 *>(address);
}

__global__ void aligned_kernel(const char *x, float *y, int offset, int bare) {
    const char *address = x + 16 * threadIdx.x + offset;
    const float4 v = bare ? *reinterpret_cast<const float4 *>(address) : load16(address);
    y[threadIdx.x] = v.x + v.y + v.z + v.w;
}

static int run_aligned(int offset, int bare) {
    Array x(kThreads * 4 + 4, 1, 0), y(kThreads);
    launch(aligned_kernel, 1, kThreads, 0, 0, reinterpret_cast<const char *>(x.device), y.device, offset,
           bare);
    return differs(y, [](size_t) { return 4.0f; });
}

static int misaligned_by_2(int bug) {
    return run_aligned(bug ? 2 : 0, 0);
}
static int misaligned_by_4(int bug) {
    return run_aligned(bug ? 4 : 0, 0);
}
static int misaligned_by_8(int bug) {
    return run_aligned(bug ? 8 : 0, 0);
}
static int misaligned_bare_by_2(int bug) {
    return run_aligned(bug ? 2 : 0, 1);
}
static int misaligned_bare_by_4(int bug) {
    return run_aligned(bug ? 4 : 0, 1);
}
static int misaligned_bare_by_8(int bug) {
    return run_aligned(bug ? 8 : 0, 1);
}

// ---- host and device memory ----

static int host_reads_device(int bug) {
    Array x(kThreads, 1, 0);
    volatile const float *direct = x.device;
    if (bug) return direct[3] == 1.0f ? 0 : 1;
    return differs(x, [](size_t) { return 1.0f; });
}

static int kernel_gets_host_pointer(int bug) {
    Array x(kThreads, 1, 0), y(kThreads);
    std::vector<float> host(kThreads, 1.0f);
    launch(add_kernel, 1, kThreads, 0, 0, y.device, bug ? host.data() : x.device, 1.0f, kThreads);
    return differs(y, [](size_t) { return 2.0f; });
}

static int kernel_writes_host_pointer(int bug) {
    Array x(kThreads, 1, 0), y(kThreads);
    std::vector<float> host(kThreads, 0.0f);
    launch(add_kernel, 1, kThreads, 0, 0, bug ? host.data() : y.device, x.device, 1.0f, kThreads);
    return differs(y, [](size_t) { return 2.0f; });
}

static int other_device(int bug) {
    Array y(kThreads);
    cudaSetDevice(1);
    int result;
    {
        Array x(kThreads, 1, 0);
        cudaSetDevice(0);
        if (!bug) cudaDeviceEnablePeerAccess(1, 0);
        launch(add_kernel, 1, kThreads, 0, 0, y.device, x.device, 1.0f, kThreads);
        result = differs(y, [](size_t) { return 2.0f; });
        if (!bug) cudaDeviceDisablePeerAccess(1);
    }
    return result;
}

// ---- clusters and bulk copies ----

__global__ void cluster_kernel(float *y, int bug) {
    XD_SHARED(float, part, [32]);
    const unsigned rank = emu_cluster_rank(), size = emu_cluster_size(), t = threadIdx.x;
    part[t] = (float)(100 * rank + t);
    if (bug != 1) emu_cluster_sync();
    const float *right = emu_map_shared(&part[0], (rank + 1) % size);
    y[blockIdx.x * 32 + t] = right[t];
    if (bug != 2) emu_cluster_sync(); // no block may overwrite or exit while others read
    part[t] = -1.0f;
}

static int run_cluster(int bug) {
    Array y(8 * 32);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 4;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 8;
    config.blockDim = 32;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaLaunchKernelEx(&config, cluster_kernel, y.device, bug)) return 1;
    return differs(y, [](size_t i) { return (float)(100 * ((i / 32 + 1) % 4) + i % 32); });
}

static int cluster_without_first_sync(int bug) {
    return run_cluster(bug ? 1 : 0);
}
static int cluster_without_last_sync(int bug) {
    return run_cluster(bug ? 2 : 0);
}

/* Each block stores into the next one; a thread that has arrived at the cluster's barrier goes on. */
__global__ void told_kernel(float *y, int bug) {
    XD_SHARED(uint64_t, place, [2]);
    XD_SHARED(uint64_t, told, );
    const unsigned next = (emu_cluster_rank() + 1) % emu_cluster_size();
    if (threadIdx.x == 0) emu_mbarrier_init(&told, 1);
    emu_cluster_arrive();
    if (bug != 2) emu_cluster_wait();
    if (threadIdx.x == 0) {
        emu_mbarrier_expect(&told, sizeof place);
        emu_store_async(emu_map_shared(&place[0], next), 3, 4 + next, emu_map_shared(&told, next));
    }
    if (bug != 1) emu_mbarrier_wait(&told, 0);
    y[blockIdx.x * 32 + threadIdx.x] = (float)(place[0] + place[1]);
    if (bug == 2) emu_cluster_wait();
    emu_cluster_arrive();
    emu_cluster_wait(); /* no block ends before it was told */
}

static int run_told(int bug) {
    Array y(4 * 32);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 4;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 4;
    config.blockDim = 32;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaLaunchKernelEx(&config, told_kernel, y.device, bug)) return 1;
    return differs(y, [](size_t i) { return (float)(7 + i / 32); });
}

static int told_without_wait(int bug) {
    return run_told(bug ? 1 : 0);
}
static int told_before_the_barrier(int bug) {
    return run_told(bug ? 2 : 0);
}

__global__ void bulk_kernel(const float *x, float *y, int bug) {
    XD_SHARED(float4, tile, [16]);
    XD_SHARED(float4, result, [16]);
    XD_SHARED(uint64_t, full, );
    const float *in = reinterpret_cast<const float *>(tile);
    float *out = reinterpret_cast<float *>(result);
    if (threadIdx.x == 0) emu_mbarrier_init(&full, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        emu_mbarrier_expect(&full, sizeof tile);
        emu_bulk_load(tile, x, sizeof tile, &full);
    }
    if (bug != 1) emu_mbarrier_wait(&full, 0);
    out[threadIdx.x] = 2.0f * in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        emu_bulk_store(y, result, sizeof result);
        emu_bulk_commit();
        if (bug != 2) emu_bulk_wait(0);
        out[0] = 7.0f;
    }
}

static int run_bulk(int bug) {
    Array x(64, 0, 1), y(64);
    launch(bulk_kernel, 1, 64, 0, 0, x.device, y.device, bug);
    return differs(y, [](size_t i) { return 2.0f * (float)i; });
}

static int bulk_without_wait(int bug) {
    return run_bulk(bug ? 1 : 0);
}
static int bulk_store_without_wait(int bug) {
    return run_bulk(bug ? 2 : 0);
}

// ---- streams ----

static int stale_pinned_read(int bug) {
    Array x(kThreads);
    float *pinned;
    cudaStream_t stream;
    if (cudaMallocHost(&pinned, kThreads * sizeof(float)) || cudaStreamCreate(&stream)) return 1;
    for (int i = 0; i < kThreads; i++) pinned[i] = 1.0f;
    cudaMemcpyAsync(x.device, pinned, kThreads * sizeof(float), cudaMemcpyHostToDevice, stream);
    if (!bug) cudaStreamSynchronize(stream);
    for (int i = 0; i < kThreads; i++) pinned[i] = 2.0f; // the copy may not have read it yet
    cudaStreamSynchronize(stream);
    const int result = differs(x, [](size_t) { return 1.0f; });
    cudaStreamDestroy(stream);
    cudaFreeHost(pinned);
    return result;
}

static int missing_event(int bug) {
    Array x(kThreads), y(kThreads);
    cudaStream_t consumer, producer; // lazy mode runs the older one first
    cudaEvent_t ready;
    if (cudaStreamCreateWithFlags(&consumer, cudaStreamNonBlocking) || cudaEventCreate(&ready) ||
        cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking))
        return 1;
    cudaMemset(x.device, 0, kThreads * sizeof(float));
    cudaDeviceSynchronize(); // these streams do not wait for the legacy stream
    launch(add_kernel, 1, kThreads, 0, producer, x.device, x.device, 3.0f, kThreads);
    cudaEventRecord(ready, producer);
    if (!bug) cudaStreamWaitEvent(consumer, ready, 0);
    launch(add_kernel, 1, kThreads, 0, consumer, y.device, x.device, 1.0f, kThreads);
    cudaDeviceSynchronize();
    const int result = differs(y, [](size_t) { return 4.0f; });
    cudaStreamDestroy(consumer);
    cudaStreamDestroy(producer);
    cudaEventDestroy(ready);
    return result;
}

#ifdef __clang__
#    define SEEN_BY_UBSAN 0 // the compiler may combine the two halves of the load before they are checked
#else
#    define SEEN_BY_UBSAN (SEEN_CHECKER | SEEN_ASAN)
#endif

const Case kernel_cases[] = {
    { "no barrier between write and read", neighbour, SEEN_ALWAYS, "depends on the order", "race" },
    { "no barrier after a broadcast", broadcast, SEEN_ASCENDING | SEEN_COMPARE | SEEN_CHECKER | SEEN_ASAN,
      "depends on", "race" },
    { "no barrier before reuse", reuse, SEEN_ASCENDING | SEEN_COMPARE | SEEN_CHECKER | SEEN_ASAN,
      "depends on", "race" },
    { "no __syncwarp", warp_exchange, SEEN_DESCENDING | SEEN_COMPARE | SEEN_CHECKER, "depends on", "race" },
    { "histogram without atomics", histogram, SEEN_CHECKER, nullptr, "race" },
    { "global read past the end", read_past_end, SEEN_ALWAYS, "touches byte 512 of a block of 512",
      "reads 4 bytes at byte 512" },
    { "shared write past the end", shared_past_end, SEEN_ALWAYS, "past the end of part",
      "of shared part (512 bytes)" },
    { "shared memory read before written", shared_unwritten, SEEN_ALWAYS, nullptr, "nobody has written" },
    { "global memory read before written", global_unwritten, SEEN_ALWAYS, nullptr, "nobody has written" },
    { "counter not zeroed", counter_not_zeroed, SEEN_ALWAYS, nullptr, "nobody has written" },
    { "use after free", use_after_free, SEEN_ALWAYS, "freed?", "freed?" },
    { "two blocks write one element", one_element, SEEN_DESCENDING | SEEN_COMPARE | SEEN_CHECKER,
      "depends on", "race" },
    { "last block without a fence", last_block, SEEN_CHECKER, nullptr, "race" },
    { "divergent barrier", divergent_barrier, SEEN_ALWAYS, "divergent barrier", "divergent barrier" },
    { "skipped barrier", skipped_barrier, SEEN_ALWAYS, "wait for each other", "wait for each other" },
    { "exit before a barrier", exit_before_barrier, SEEN_ALWAYS, "on: ended", "on: ended" },
    { "lane not in mask", lane_not_in_mask, SEEN_ALWAYS, "is not in mask 0x0000ffff", "is not in mask" },
    { "lanes with different masks", different_masks, SEEN_ALWAYS, "different masks", "different masks" },
    { "a lane of the mask stays away", missing_lane, SEEN_ALWAYS, "ended", "ended" },
    { "shuffle from a lane out of the mask", source_not_in_mask, SEEN_ALWAYS, "which is not in mask",
      "which is not in mask" },
    { "16-byte load off by 2", misaligned_by_2, SEEN_ALWAYS, "not aligned", "not aligned" },
    { "16-byte load off by 4", misaligned_by_4, SEEN_ALWAYS, "not aligned", "not aligned" },
    { "16-byte load off by 8", misaligned_by_8, SEEN_ALWAYS, "not aligned", "not aligned" },
    { "bare 16-byte load off by 2", misaligned_bare_by_2, SEEN_BY_UBSAN, nullptr, "misaligned" },
    { "bare 16-byte load off by 4", misaligned_bare_by_4, SEEN_BY_UBSAN, nullptr, "misaligned" },
    { "bare 16-byte load off by 8", misaligned_bare_by_8, SEEN_BY_UBSAN, nullptr, "misaligned" },
    { "host reads device memory", host_reads_device, SEEN_CHECKER, nullptr, "host code reads" },
    { "kernel gets a host pointer", kernel_gets_host_pointer, SEEN_CHECKER, nullptr, "reads host memory" },
    { "kernel writes to a host pointer", kernel_writes_host_pointer, SEEN_ALWAYS, nullptr,
      "writes host memory" },
    { "memory of another device", other_device, SEEN_CHECKER, nullptr, "without peer access" },
    { "cluster reads before the barrier", cluster_without_first_sync, SEEN_ALWAYS, "depends on", "race" },
    { "cluster overwrites what others read", cluster_without_last_sync, SEEN_COMPARE | SEEN_CHECKER,
      "depends on", "race" },
    { "store of another block not waited for", told_without_wait, SEEN_ALWAYS, nullptr, "nobody has written" },
    { "store into a block without its barrier", told_before_the_barrier, SEEN_ALWAYS, "was not initialised", "was not initialised" },
    { "bulk load not waited for", bulk_without_wait, SEEN_ALWAYS, nullptr, "nobody has written" },
    { "bulk store not waited for", bulk_store_without_wait, SEEN_ALWAYS, nullptr, nullptr },
    { "pinned memory changed too early", stale_pinned_read, SEEN_LAZY, nullptr, nullptr },
    { "missing event", missing_event, SEEN_LAZY, nullptr, nullptr },
};
const int kernel_case_count = (int)(sizeof kernel_cases / sizeof kernel_cases[0]);

// ---- used by the tests of streams and launches ----

cudaError_t launch_add(float *y, const float *x, float add, int count, cudaStream_t stream) {
    return launch(add_kernel, dim3((unsigned)(count + 63) / 64), 64, 0, stream, y, x, add, count);
}

__global__ void nothing_kernel() {}

cudaError_t launch_shape(dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream) {
    return launch(nothing_kernel, grid, block, dynamic_bytes, stream);
}

cudaError_t allow_dynamic(int bytes) {
    return cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

__global__ void trap_kernel() {
    if (threadIdx.x == 3) __trap();
}

cudaError_t launch_trap(cudaStream_t stream) {
    return launch(trap_kernel, 1, 32, 0, stream);
}

__global__ void atomic_sum_kernel(float *sum) {
    atomicAdd(sum, 1.0f / (float)(1 + threadIdx.x * threadIdx.x));
}

cudaError_t launch_atomic_sum(float *sum, cudaStream_t stream) {
    return launch(atomic_sum_kernel, 1, 256, 0, stream, sum);
}

// ---- device functions against plain loops ----

enum {
    kUp,
    kDown,
    kIndex,
    kXorHalf,
    kBallot,
    kAny,
    kAll,
    kMatch,
    kAdd,
    kMin,
    kMax,
    kOr,
    kSyncOr,
    kSyncAnd,
    kSyncCount,
    kRows
};

__global__ void operations_kernel(const int *x, int *y) {
    const unsigned t = threadIdx.x;
    const int v = x[t];
    y[kUp * 64 + t] = __shfl_up_sync(~0u, v, 3);
    y[kDown * 64 + t] = __shfl_down_sync(~0u, v, 5, 16);
    y[kIndex * 64 + t] = __shfl_sync(~0u, v, (int)(t * 7 % 32));
    y[kXorHalf * 64 + t] = (int)(__shfl_xor_sync(~0u, v * (1ll << 32), 4) >> 32); // both words of the value are shuffled
    y[kBallot * 64 + t] = (int)__ballot_sync(~0u, v & 1);
    y[kAny * 64 + t] = __any_sync(~0u, v == x[40]);
    y[kAll * 64 + t] = __all_sync(~0u, v < 1000);
    y[kMatch * 64 + t] = (int)__match_any_sync(~0u, v % 3);
    y[kAdd * 64 + t] = __reduce_add_sync(~0u, v);
    y[kMin * 64 + t] = __reduce_min_sync(~0u, v);
    y[kMax * 64 + t] = (int)__reduce_max_sync(~0u, (unsigned)v);
    y[kOr * 64 + t] = (int)__reduce_or_sync(~0u, (unsigned)v);
    y[kSyncOr * 64 + t] = __syncthreads_or(v == x[40]);
    y[kSyncAnd * 64 + t] = __syncthreads_and(v < 1000);
    y[kSyncCount * 64 + t] = __syncthreads_count(v & 1);
}

static int expected_operation(int row, unsigned t, const int *x) {
    const unsigned warp = t / 32 * 32, lane = t % 32;
    int sum = 0, least = x[warp], odd = 0, same = 0, any = 0;
    unsigned largest = 0, bits = 0, ballot = 0;
    for (unsigned l = 0; l < 32; l++) {
        const int v = x[warp + l];
        sum += v;
        least = v < least ? v : least;
        largest = (unsigned)v > largest ? (unsigned)v : largest;
        bits |= (unsigned)v;
        if (v & 1) ballot |= 1u << l;
        if (v % 3 == x[t] % 3) same |= (int)(1u << l);
        if (v == x[40]) any = 1;
    }
    for (int i = 0; i < 64; i++) odd += x[i] & 1;
    switch (row) {
    case kUp: return x[lane < 3 ? t : t - 3];
    case kDown: return x[t % 16 + 5 < 16 ? t + 5 : t];
    case kIndex: return x[warp + t * 7 % 32];
    case kXorHalf: return x[t ^ 4];
    case kBallot: return (int)ballot;
    case kAny: return any;
    case kMatch: return same;
    case kAdd: return sum;
    case kMin: return least;
    case kMax: return (int)largest;
    case kOr: return (int)bits;
    case kSyncCount: return odd;
    default: return 1; // all and any of true predicates
    }
}

int check_device_functions() {
    int x[64], y[kRows * 64], *device_x, *device_y, wrong = 0;
    for (int i = 0; i < 64; i++) x[i] = (i * 37 + 11) % 91 - 13;
    if (cudaMalloc(&device_x, sizeof x) || cudaMalloc(&device_y, sizeof y)) return -1;
    cudaMemcpy(device_x, x, sizeof x, cudaMemcpyHostToDevice);
    launch(operations_kernel, 1, 64, 0, 0, device_x, device_y);
    cudaMemcpy(y, device_y, sizeof y, cudaMemcpyDeviceToHost);
    for (int row = 0; row < kRows; row++)
        for (unsigned t = 0; t < 64; t++) wrong += y[row * 64 + (int)t] != expected_operation(row, t, x);
    cudaFree(device_x);
    cudaFree(device_y);
    return wrong;
}

// Every value of the small types comes back, and halves round to even.
int check_bf16_and_fp16() {
    int wrong = 0;
    for (unsigned bits = 0; bits < 65536; bits++) {
        const float b = __bfloat162float(__ushort_as_bfloat16((unsigned short)bits));
        const float h = __half2float(__ushort_as_half((unsigned short)bits));
        if (b == b) wrong += __bfloat16_as_ushort(__float2bfloat16(b)) != bits;
        if (h == h) wrong += __half_as_ushort(__float2half(h)) != bits;
    }
    wrong +=
        __bfloat16_as_ushort(__float2bfloat16(__uint_as_float(0x3f808000u))) != 0x3f80; // tie to even, down
    wrong += __bfloat16_as_ushort(__float2bfloat16(__uint_as_float(0x3f818000u))) != 0x3f82; // and up
    wrong += __half_as_ushort(__float2half(65519.0f)) != 0x7bff;
    wrong += __half_as_ushort(__float2half(65520.0f)) != 0x7c00;
    wrong += __half_as_ushort(__float2half(0x1p-25f)) != 0 || __half_as_ushort(__float2half(0x1.8p-25f)) != 1;
    wrong += __half_as_ushort(__float2half(2049.0f)) != 0x6800 ||
             __half_as_ushort(__float2half(2051.0f)) != 0x6802;
    return wrong;
}
