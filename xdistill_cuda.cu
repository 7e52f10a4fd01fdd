/* xdistill_cuda.cu - v0.3.0 - the kernels of xdistill on CUDA. License at the end of xdistill.h.

       nvcc -O2 -arch=sm_90 -c xdistill_cuda.cu         (sm_80 on an A100; without -arch: any GPU since sm_75, slower)
       nvcc -O2 -arch=sm_90 app.cu xdistill_cuda.cu     one file of app defines XDISTILL_IMPLEMENTATION

   USE            xd_cuda_create (>>kernel/cuda) gives a context this unit's kernel table: losses, optimizers, averages
                  and collectives of that context then work on device memory. After it no operation allocates, waits or
                  copies to the host: results stay on the device until xd_read.
   NUMERICS       Elementwise operations (AdamW, SGD, averages, casts, scaling) and sums over ranks have the bits of the
                  CPU's kernels. Reductions are deterministic: the same bits on every run and every GPU. Exact sums
                  (INVARIANT) have the CPU's bits as well. Losses compute their terms in f32 and add them in double, so
                  they agree with the CPU's to a few 1e-6; in INVARIANT mode no split changes a bit of the GPU's.
   OPTIONS        XDISTILL_NO_ACROSS and XDISTILL_NO_DIFFUSION, as in xdistill.h, leave out their kernels.
   CONTENTS       search for ">>": the basis of every kernel, then the operations, then the table. */

/* Generated from src/xdistill_cuda.cu by tools/amalgamate.py. Edit src/, then run `make amalgamate`. */
#include "xdistill.h"

/* >>cuda/port.cuh */

/* The basis of every kernel of the unit: launching, shared memory, 16-byte access, element types,
 * reductions.
 *
 * The unit is compiled in two ways: by nvcc for a GPU and, with XD_EMU defined, by a C++ compiler against a
 * cuda_runtime.h that runs kernels on the CPU. Kernels are written so that both compile them unchanged:
 *   launches       through XDI_CUDA_LAUNCH alone; parameters are values of at most 4 KB together
 *   shared memory  XD_SHARED(float, part, [32]);  XD_DYN_SHARED(float, row);
 *   16 bytes       xdi_cuda_load16 and xdi_cuda_store16
 *   CUB            its block primitives only (cub::Block*), where the emulation has a plain twin
 *   blocks         whole warps; no thread returns before a barrier; no block waits for another
 *   rounding       explicit where bits are promised: xd_mul, xd_fmaf and the like, or __fmul_rn, __fmaf_rn
 *   formulas       those of an element or a row that a CPU has too are in the header: base/scalar.h, kernel/..._scalar.h */

#include <cuda_runtime.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <atomic>
#include <utility>

#if !defined(XD_EMU)
#    include <cub/block/block_radix_sort.cuh>
#endif

/* Below 9.0 the functions of rings are compiled, and not called. table.cu ends this. */
#if defined(__NVCC__)
#    pragma nv_diagnostic push
#    pragma nv_diag_suppress 177
#endif

/* Blocks of a multiprocessor that a kernel is compiled for. On 10.0 the compiler takes more registers: one block less. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#    define XDI_CUDA_BLOCKS(n) ((n) > 1 ? (n)-1 : 1)
#else
#    define XDI_CUDA_BLOCKS(n) (n)
#endif

#if defined(XDISTILL_STATIC)
#    error \
        "the CUDA unit calls the library in another unit: leave XDISTILL_STATIC out where that is implemented"
#endif

/* The emulation has its own forms of all but the last. */
#if !defined(XD_EMU)
#    define XD_SHARED(type, name, extent) __shared__ type name extent
#    define XD_DYN_SHARED(type, name)                                            \
        extern __shared__ __align__(16) unsigned char xdi_cuda_dynamic_shared[]; \
        type *name = reinterpret_cast<type *>(xdi_cuda_dynamic_shared)
#    define XDI_CUDA_PRAGMA(text) _Pragma(#    text)
#    define XD_UNROLL XDI_CUDA_PRAGMA(unroll)
#    define XD_UNROLL_N(n) XDI_CUDA_PRAGMA(unroll n)
#    define XDI_CUDA_ALIGNED8(pointer) ((void)0)
#    define XDI_CUDA_ALIGNED16(pointer) ((void)0)
#else
#    define XDI_CUDA_ALIGNED8(pointer) emu_require_aligned((pointer), 8, __FILE__, __LINE__)
#    define XDI_CUDA_ALIGNED16(pointer) emu_require_aligned((pointer), 16, __FILE__, __LINE__)
#endif

/* A function that is called rarely, in double: inlined, it would take the registers of the loops around it. ONCE: a kernel has
 * its code once, wherever it is called from. Each kernel has a copy of what it calls. */
#if defined(XD_EMU)
#    define XDI_CUDA_ONCE
#    define XDI_CUDA_APART static
#else
#    define XDI_CUDA_ONCE __noinline__
#    define XDI_CUDA_APART static __noinline__
#endif

/* A value that is kept in a register: the compiler would compute it again in every turn of a loop, from the arguments. */
static __device__ inline int xdi_cuda_held(int value) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(value));
#endif
    return value;
}

struct xdi_cuda_cublas;
struct xd_array_list;

enum { XDI_CUDA_NORMS = 2 };

enum { XDI_CUDA_RING_MOST_KINDS = 7, XDI_CUDA_RING_CHOICES = 10 };

/* The device that a context computes on. The table is the first member, so that a context's table leads back here. */
struct xd_cuda {
    xd_kernels kernels;
    xd_ctx *ctx;
    xd_allocator allocator; /* of device memory */
    int device;
    int processors;
    int capability;  /* 90 for compute capability 9.0 */
    void *workspace; /* partial results of the multi-array reductions */
    size_t workspace_bytes;
    /* Clusters that run at once, of losses whose rows stay on the chip: F32 and BF16, kind, choice; see loss_ring_host.cu. */
    int ring_clusters[2][XDI_CUDA_RING_MOST_KINDS][XDI_CUDA_RING_CHOICES];
    size_t processor_shared_bytes; /* of a multiprocessor, set with them */
    xd_array_list *stage;                  /* of lists that are not kept */
    xd_array_list *norms[XDI_CUDA_NORMS]; /* the lists of the last norms */
    int norm;                              /* the one that changes next */
    uint64_t apart;            /* a bit for each device whose memory this one cannot access, once there are events */
    xdi_cuda_cublas *cublas;   /* NULL: products are the unit's own */
};

static xd_cuda *xdi_cuda_of(const xd_ctx *ctx) {
    return (xd_cuda *)(void *)const_cast<xd_kernels *>(xd_ctx_settings(ctx)->kernels);
}

/* ---- errors ---- */

/* A CUDA error as an xd_result: the call as it was written, CUDA's name and text of the error. */
static xd_result xdi_cuda_result(xd_ctx *ctx, cudaError_t error, const char *call, const char *file, int line,
                                 const char *function) {
    if (error == cudaSuccess) return XD_OK;
    cudaGetLastError(); /* it is reported here; the next call starts clean */
    const xd_result result = error == cudaErrorMemoryAllocation ? XD_ERROR_MEMORY : XD_ERROR_DEVICE;
    return xd_fail(ctx, result, file, line, function, "%.160s: %s: %s", call, cudaGetErrorName(error),
                   cudaGetErrorString(error));
}

#define XDI_CUDA_CHECK(ctx, call) xdi_cuda_result((ctx), (call), #call, __FILE__, __LINE__, __func__)
#define XDI_CUDA_TRY(ctx, call) XD_TRY(XDI_CUDA_CHECK(ctx, call))

/* ---- launches ---- */

/* During its lifetime the context's device is the thread's current one. */
struct xdi_cuda_scope {
    xd_ctx *ctx;
    int previous;
    xd_result result;

    explicit xdi_cuda_scope(xd_ctx *context, int device) : ctx(context), previous(device), result(XD_OK) {
        result = XDI_CUDA_CHECK(ctx, cudaGetDevice(&previous));
        if (result != XD_OK) previous = device;
        if (previous != device) result = XDI_CUDA_CHECK(ctx, cudaSetDevice(device));
        current = device;
    }
    explicit xdi_cuda_scope(const xd_launch *launch)
        : xdi_cuda_scope(launch->ctx, xdi_cuda_of(launch->ctx)->device) {}
    ~xdi_cuda_scope() {
        if (previous != current) cudaSetDevice(previous);
    }
    xdi_cuda_scope(const xdi_cuda_scope &) = delete;
    xdi_cuda_scope &operator=(const xdi_cuda_scope &) = delete;

  private:
    int current;
};

/* The grid of a launch: at least one block, whole warps. */
struct xdi_cuda_grid {
    int64_t blocks;
    int threads;
    int cluster;         /* blocks that run together and can access each other's shared memory; 0: no cluster */
    size_t shared_bytes; /* dynamic */
};

static xdi_cuda_grid xdi_cuda_grid_of(int64_t blocks, int threads, size_t shared_bytes = 0) {
    xdi_cuda_grid grid;
    grid.blocks = blocks > 0 ? blocks : 1;
    grid.threads = threads;
    grid.cluster = 0;
    grid.shared_bytes = shared_bytes;
    return grid;
}

template <typename... Parameters, typename... Arguments>
static xd_result xdi_cuda_launch_at(const char *file, int line, const char *function, const char *text,
                                    const xd_launch *launch, xdi_cuda_grid grid,
                                    void (*kernel)(Parameters...), Arguments &&...arguments) {
    if (grid.blocks > INT32_MAX)
        return xd_fail(launch->ctx, XD_ERROR_ARGUMENT, file, line, function, "%.160s: a grid of %lld blocks",
                       text, (long long)grid.blocks);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)grid.blocks, 1, 1);
    config.blockDim = dim3((unsigned)grid.threads, 1, 1);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = (cudaStream_t)launch->stream;
    cudaLaunchAttribute cluster = {};
    if (grid.cluster > 0) {
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = (unsigned)grid.cluster;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        config.attrs = &cluster;
        config.numAttrs = 1;
    }
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
    return xdi_cuda_result(launch->ctx, error, text, file, line, function);
}

/* XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, 256), kernel<T>, arguments...)); */
#define XDI_CUDA_LAUNCH(...) \
    xdi_cuda_launch_at(__FILE__, __LINE__, __func__, "launch(" #__VA_ARGS__ ")", __VA_ARGS__)

/* Loads a kernel now, so that its first launch neither allocates nor waits. Every family of kernels has a
 * function that does this for each of its instances; table.cu calls them. */
template <typename... Parameters> static xd_result xdi_cuda_load(xd_ctx *ctx, void (*kernel)(Parameters...)) {
    cudaFuncAttributes attributes;
    return XDI_CUDA_CHECK(ctx, cudaFuncGetAttributes(&attributes, kernel));
}

/* ---- element types ---- */

/* Storage of the narrow dtypes; float and double stand for themselves. */
struct xdi_cuda_bf16 {
    uint16_t bits;
};
struct xdi_cuda_f16 {
    uint16_t bits;
};

/* In place of a dtype where a kernel has no such argument: its instances have no code for one. */
struct xdi_cuda_none {};

template <typename T> struct xdi_cuda_is {
    enum { GIVEN = 1 };
};
template <> struct xdi_cuda_is<xdi_cuda_none> {
    enum { GIVEN = 0 };
};

/* f16 by base/scalar.h, or by the instruction for it, which loses the payload of a NaN: */
static __device__ inline float xdi_cuda_f16_value(uint16_t half) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return wide;
#else
    return xd_bits_from_f16(half);
#endif
}

/* and with it. */
static __device__ inline float xdi_cuda_from_f16(uint16_t half) {
    const uint32_t bits = half, nan = (bits & 0x8000u) << 16 | 0x7fc00000u | (bits & 0x3ffu) << 13;
    return (bits & 0x7fffu) > 0x7c00u ? xd_float_of_bits(nan) : xdi_cuda_f16_value(half);
}

static __device__ inline uint16_t xdi_cuda_to_f16(float value) {
#if defined(__CUDA_ARCH__)
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    const uint32_t bits = xd_bits_of_float(value);
    const uint32_t nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : half);
#else
    return xd_bits_to_f16(value);
#endif
}

static __device__ inline float xdi_cuda_widen(float value) {
    return value;
}

static __device__ inline float xdi_cuda_widen(xdi_cuda_bf16 value) {
    return xd_bits_from_bf16(value.bits);
}

static __device__ inline float xdi_cuda_widen(xdi_cuda_f16 value) {
    return xdi_cuda_from_f16(value.bits);
}

static __device__ inline void xdi_cuda_narrow(float value, float *out) {
    *out = value;
}

static __device__ inline void xdi_cuda_narrow(float value, xdi_cuda_bf16 *out) {
    out->bits = xd_bits_to_bf16(value);
}

static __device__ inline void xdi_cuda_narrow(float value, xdi_cuda_f16 *out) {
    out->bits = xdi_cuda_to_f16(value);
}

/* Runs the statements with T as the storage type of a dtype: F32, BF16 or F16; the caller has checked that it
 * is one of them. */
#define XDI_CUDA_FLOATS(dtype, T, ...)     \
    if ((dtype) == XD_DTYPE_F32) {         \
        typedef float T;                   \
        __VA_ARGS__                        \
    } else if ((dtype) == XD_DTYPE_BF16) { \
        typedef xdi_cuda_bf16 T;           \
        __VA_ARGS__                        \
    } else {                               \
        typedef xdi_cuda_f16 T;            \
        __VA_ARGS__                        \
    }

/* ---- 16 bytes at a time ---- */

/* The elements that 16 bytes hold. */
template <typename T> struct xdi_cuda_pack {
    enum { COUNT = 16 / (int)sizeof(T) };
    T at[COUNT];
};

#if defined(XD_EMU)
typedef unsigned __attribute__((vector_size(16), may_alias)) xdi_cuda_bits16;
typedef unsigned __attribute__((vector_size(8), may_alias)) xdi_cuda_bits8;
#else
typedef uint4 xdi_cuda_bits16;
typedef uint2 xdi_cuda_bits8;
#endif

/* The address must be a multiple of 16. */
template <typename T> static __device__ inline xdi_cuda_pack<T> xdi_cuda_load16(const T *from) {
    XDI_CUDA_ALIGNED16(from);
    const xdi_cuda_bits16 bits = *reinterpret_cast<const xdi_cuda_bits16 *>(from);
    xdi_cuda_pack<T> pack;
    memcpy(&pack, &bits, sizeof pack);
    return pack;
}

/* A struct of a multiple of 16 bytes. */
template <typename T> static __device__ inline T xdi_cuda_load_whole(const T *from) {
    enum { PACKS = (int)(sizeof(T) / 16) };
    static_assert(sizeof(T) == 16 * PACKS && alignof(T) % 16 == 0, "whole packs");
    xdi_cuda_pack<uint32_t> packs[PACKS];
    T value;
    XD_UNROLL
    for (int i = 0; i < PACKS; i++) packs[i] = xdi_cuda_load16(reinterpret_cast<const uint32_t *>(from) + 4 * i);
    memcpy(&value, packs, sizeof value);
    return value;
}

/* To device memory. */
template <typename T> static __device__ inline void xdi_cuda_store16(T *to, const xdi_cuda_pack<T> &pack) {
    XDI_CUDA_ALIGNED16(to);
    xdi_cuda_bits16 bits;
    memcpy(&bits, &pack, sizeof bits);
#if defined(__CUDA_ARCH__)
    /* In one store: where the words are not in neighbouring registers, the compiler would make four of it. */
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w)
                 : "memory");
#else
    *reinterpret_cast<xdi_cuda_bits16 *>(to) = bits;
#endif
}

/* The same with eight bytes. */
template <typename T> static __device__ inline xdi_cuda_bits8 xdi_cuda_load8(const T *from) {
    XDI_CUDA_ALIGNED8(from);
    return *reinterpret_cast<const xdi_cuda_bits8 *>(from);
}

template <typename T> static __device__ inline void xdi_cuda_store8(T *to, xdi_cuda_bits8 bits) {
    XDI_CUDA_ALIGNED8(to);
    *reinterpret_cast<xdi_cuda_bits8 *>(to) = bits;
}

static __host__ __device__ inline bool xdi_cuda_is_aligned16(const void *pointer) {
    return ((uintptr_t)pointer & 15u) == 0;
}

/* ---- reductions ---- */

enum { XDI_CUDA_WARP = 32, XDI_CUDA_MAX_WARPS = 32 };

/* The value of the lane whose number differs in the bits of `mask`; T is any struct of whole words. */
template <typename T> static __device__ inline T xdi_cuda_shuffle_xor(T value, int mask) {
    enum { WORDS = (int)(sizeof(T) / 4) };
    static_assert(sizeof(T) % 4 == 0, "whole words");
    unsigned words[WORDS];
    memcpy(words, &value, sizeof value);
    XD_UNROLL
    for (int i = 0; i < WORDS; i++) words[i] = __shfl_xor_sync(0xffffffffu, words[i], mask);
    T other;
    memcpy(&other, words, sizeof other);
    return other;
}

/* All lanes' values merged in the order of the lanes, the same on every lane; all 32 take part. merge(a, b)
 * need not commute: a always comes from the lower lanes. */
template <typename T, typename Merge> static __device__ inline T xdi_cuda_warp_reduce(T value, Merge merge) {
    enum { AT_ONCE = sizeof(T) > 2 * sizeof(int64_t) ? 1 : 5 }; /* the code of what is long stands there once */
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    XD_UNROLL_N(AT_ONCE)
    for (int mask = 1; mask < XDI_CUDA_WARP; mask *= 2) {
        const T other = xdi_cuda_shuffle_xor(value, mask);
        value = lane & mask ? merge(other, value) : merge(value, other);
    }
    return value;
}

/* The same over the block, in the order of the threads, on every thread. The block is one-dimensional and
 * every thread calls it; merging `identity` changes nothing. */
template <typename T, typename Merge>
static __device__ inline T xdi_cuda_block_reduce(T value, T identity, Merge merge) {
    XD_SHARED(T, parts, [XDI_CUDA_MAX_WARPS]);
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    const int warps = (int)(blockDim.x / XDI_CUDA_WARP);
    value = xdi_cuda_warp_reduce(value, merge);
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    value = xdi_cuda_warp_reduce(lane < warps ? parts[lane] : identity, merge);
    __syncthreads(); /* parts may be written again */
    return value;
}

struct xdi_cuda_add {
    template <typename T> __device__ T operator()(T a, T b) const {
        return a + b;
    }
};
struct xdi_cuda_larger {
    template <typename T> __device__ T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};

/* ---- lists ---- */

/* The first of an ascending list that is not below `value`. */
template <typename T>
static __device__ inline int64_t xdi_cuda_lower_bound(const T *list, int64_t count, int64_t value) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (list[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* >>cuda/device.cu */

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

/* >>cuda/list.cuh */

/* Lists of arrays. A model has a thousand of them and a launch for each would cost more than the work, so a kernel
 * takes a list, in one of two forms, and splits every array into chunks that are aligned to 16 bytes when the array
 * is.
 *   xdi_cuda_list   in the parameters of a few launches: nothing is copied, and a captured graph has its own copy
 *   xdi_cuda_kept   in device memory, all arrays in one launch: kept.cuh */

enum { XDI_CUDA_CHUNK = 16384, XDI_CUDA_THREADS = 256, XDI_CUDA_LIST_BYTES = 3328 };

template <typename Item> struct xdi_cuda_list {
    enum { ROOM = (XDI_CUDA_LIST_BYTES - 24) / (int)(sizeof(Item) + sizeof(uint32_t)) };
    Item at[ROOM];
    uint32_t first_chunk[ROOM];
    int64_t chunks; /* of all arrays */
    int64_t chunk;  /* elements of one */
    int count;

    /* Appends an array of `elements`; there is room. Empty ones are left out. */
    void add(const Item &item, int64_t elements) {
        if (elements <= 0) return;
        at[count] = item;
        first_chunk[count] = (uint32_t)chunks;
        chunks += (elements + chunk - 1) / chunk;
        count++;
    }
    __device__ int64_t first(int k) const {
        return first_chunk[k];
    }
};

/* The last array whose first chunk is not above `chunk`. */
template <typename List> static __device__ inline int xdi_cuda_list_find(const List &list, int64_t chunk) {
    int low = 0, high = list.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (list.first(middle) <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Calls item(k, &value) -> elements for each of `count` arrays and launch_list(list) for each list that fills
 * up. */
template <typename Item, typename MakeItem, typename LaunchList>
static xd_result xdi_cuda_each_list(int64_t count, MakeItem make_item, LaunchList launch_list) {
    xdi_cuda_list<Item> list;
    list.count = 0;
    list.chunks = 0;
    list.chunk = XDI_CUDA_CHUNK;
    for (int64_t k = 0; k < count; k++) {
        Item item;
        const int64_t elements = make_item(k, &item);
        list.add(item, elements);
        const bool full = list.count == xdi_cuda_list<Item>::ROOM || (k + 1 == count && list.count > 0);
        if (!full) continue;
        XD_TRY(launch_list(list));
        list.count = 0;
        list.chunks = 0;
    }
    return XD_OK;
}

/* As many blocks as can run at once, or one per chunk when there are fewer chunks. */
template <typename... Parameters>
static xd_result xdi_cuda_chunk_grid(const xd_launch *launch, int64_t chunks, void (*kernel)(Parameters...),
                                     xdi_cuda_grid *grid) {
    int blocks = 0;
    XDI_CUDA_TRY(launch->ctx,
                 cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, XDI_CUDA_THREADS, 0));
    const int64_t most = (int64_t)blocks * xdi_cuda_of(launch->ctx)->processors;
    *grid = xdi_cuda_grid_of(chunks < most ? chunks : most, XDI_CUDA_THREADS);
    return XD_OK;
}

/* ---- the elements of an array ---- */

/* The elements of one chunk. */
struct xdi_cuda_span {
    int64_t begin, end;
};

static __device__ inline xdi_cuda_span xdi_cuda_span_of(int64_t chunk_of_array, int64_t elements,
                                                        int64_t chunk = XDI_CUDA_CHUNK) {
    xdi_cuda_span span;
    span.begin = chunk_of_array * chunk;
    span.end = elements - span.begin < chunk ? elements : span.begin + chunk;
    return span;
}

/* Calls work(item, span) for each chunk of the list that is this block's. */
template <typename List, typename Work>
static __device__ inline void xdi_cuda_each_chunk(const List &list, Work work) {
    for (int64_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
        const int k = xdi_cuda_list_find(list, chunk);
        work(list.at[k], xdi_cuda_span_of(chunk - list.first(k), list.at[k].count, list.chunk));
    }
}

/* The threads of a block share the elements of a span: eight(i) for eight that start at i while `wide`,
 * one(i) for the others. The result for an element must not depend on which of the two is called. */
template <typename Eight, typename One>
static __device__ inline void xdi_cuda_walk(xdi_cuda_span span, bool wide, Eight eight, One one) {
    const int64_t eights = wide ? (span.end - span.begin) / 8 : 0;
    for (int64_t k = threadIdx.x; k < eights; k += blockDim.x) eight(span.begin + 8 * k);
    for (int64_t i = span.begin + 8 * eights + threadIdx.x; i < span.end; i += blockDim.x) one(i);
}

/* One element, and eight at an address aligned to 16, of an F32, BF16 or F16 array, as f32. */
static __device__ inline float xdi_cuda_read_float(const void *data, int dtype, int64_t i) {
    if (dtype == XD_DTYPE_F32) return static_cast<const float *>(data)[i];
    if (dtype == XD_DTYPE_BF16) return xdi_cuda_widen(static_cast<const xdi_cuda_bf16 *>(data)[i]);
    return xdi_cuda_widen(static_cast<const xdi_cuda_f16 *>(data)[i]);
}

static __device__ inline void xdi_cuda_write_float(void *data, int dtype, int64_t i, float value) {
    if (dtype == XD_DTYPE_F32)
        static_cast<float *>(data)[i] = value;
    else if (dtype == XD_DTYPE_BF16)
        xdi_cuda_narrow(value, static_cast<xdi_cuda_bf16 *>(data) + i);
    else
        xdi_cuda_narrow(value, static_cast<xdi_cuda_f16 *>(data) + i);
}

template <typename T> static __device__ inline void xdi_cuda_read8_as(const T *from, float (&values)[8]) {
    XD_UNROLL
    for (int at = 0; at < 8; at += xdi_cuda_pack<T>::COUNT) {
        const xdi_cuda_pack<T> pack = xdi_cuda_load16(from + at);
        XD_UNROLL
        for (int j = 0; j < xdi_cuda_pack<T>::COUNT; j++) values[at + j] = xdi_cuda_widen(pack.at[j]);
    }
}

template <typename T> static __device__ inline void xdi_cuda_write8_as(T *to, const float (&values)[8]) {
    XD_UNROLL
    for (int at = 0; at < 8; at += xdi_cuda_pack<T>::COUNT) {
        xdi_cuda_pack<T> pack;
        XD_UNROLL
        for (int j = 0; j < xdi_cuda_pack<T>::COUNT; j++) xdi_cuda_narrow(values[at + j], &pack.at[j]);
        xdi_cuda_store16(to + at, pack);
    }
}

static __device__ inline void xdi_cuda_read8(const void *data, int dtype, int64_t i, float (&values)[8]) {
    if (dtype == XD_DTYPE_F32)
        xdi_cuda_read8_as(static_cast<const float *>(data) + i, values);
    else if (dtype == XD_DTYPE_BF16)
        xdi_cuda_read8_as(static_cast<const xdi_cuda_bf16 *>(data) + i, values);
    else
        xdi_cuda_read8_as(static_cast<const xdi_cuda_f16 *>(data) + i, values);
}

static __device__ inline void xdi_cuda_write8(void *data, int dtype, int64_t i, const float (&values)[8]) {
    if (dtype == XD_DTYPE_F32)
        xdi_cuda_write8_as(static_cast<float *>(data) + i, values);
    else if (dtype == XD_DTYPE_BF16)
        xdi_cuda_write8_as(static_cast<xdi_cuda_bf16 *>(data) + i, values);
    else
        xdi_cuda_write8_as(static_cast<xdi_cuda_f16 *>(data) + i, values);
}

/* >>cuda/kept.cuh */

/* Lists of arrays in device memory, so that a kernel takes all of them in one launch. The list of a caller that passes the same
 * arrays again and again is kept, and only changes are copied; another one is staged, which means copied by every call. */

enum {
    XDI_CUDA_LIST_WORDS = 12,   /* of the longest item and its first chunk */
    XDI_CUDA_LIST_SCRATCH = 4,  /* words of an array that one kernel leaves for the next */
    XDI_CUDA_LIST_TABLE = 2048, /* chunks that a list has room for, beside one of each array */
    XDI_CUDA_LIST_STAGED = 512, /* arrays of the longest items that are staged together */
    XDI_CUDA_PATCH_WORDS = 496
};

/* A plane for each word of the items and one for the first chunks, so that what changes between calls, like the gradients'
 * addresses, is contiguous; then the arrays of the chunks. Includes empty arrays. */
template <typename Item> struct xdi_cuda_kept {
    enum { WORDS = (int)(sizeof(Item) / sizeof(uint64_t)) };
    static_assert(sizeof(Item) % sizeof(uint64_t) == 0, "whole words");
    static_assert((int)WORDS < (int)XDI_CUDA_LIST_WORDS, "a list has room for the item");
    const uint64_t *words;  /* [WORDS + 1, count] */
    const uint32_t *arrays; /* the array of each chunk, or of the first of 2^shift chunks */
    uint64_t *scratch;      /* [count, XDI_CUDA_LIST_SCRATCH] for the longest items */
    int64_t chunks, chunk;
    int count, shift;

    __device__ Item item(int k) const {
        uint64_t all[WORDS];
        Item item;
        XD_UNROLL
        for (int w = 0; w < WORDS; w++) all[w] = words[(int64_t)w * count + k];
        memcpy(&item, all, sizeof item);
        return item;
    }
    __device__ int64_t first(int k) const {
        return (int64_t)words[(int64_t)WORDS * count + k];
    }
    /* The last array whose first chunk is not above `at`. */
    __device__ int find(int64_t at) const {
        int k = (int)arrays[at >> shift];
        if (shift)
            while (k + 1 < count && first(k + 1) <= at) k++;
        return k;
    }
};

/* Calls work(k, array k, span) for each chunk of the list that is this block's. */
template <typename Item, typename Work>
static __device__ inline void xdi_cuda_each_kept(const xdi_cuda_kept<Item> &list, Work work) {
    int next = blockIdx.x < list.chunks ? list.find(blockIdx.x) : 0;
    for (int64_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
        const int k = next;
        if (chunk + gridDim.x < list.chunks) next = list.find(chunk + gridDim.x); /* on its way during the work */
        const Item item = list.item(k);
        work(k, item, xdi_cuda_span_of(chunk - list.first(k), (int64_t)item.count, list.chunk));
    }
}

/* ---- the memory of a list ---- */

struct xd_array_list {
    xd_cuda *cuda;
    uint64_t *device;        /* [room] the list of the last call, then the scratch of its arrays */
    uint64_t *there;         /* [room] a copy of it on the host */
    uint64_t *next;          /* [room] of the current call */
    int64_t *elements;       /* [room / 3] of the arrays in `there` */
    int64_t room, count;     /* count: arrays in `there`; -1: it is not on the device */
    int64_t chunks, chunk;   /* as in xdi_cuda_kept */
    int item_words, shift;
    bool captured; /* a graph reads it, so it must not change */
    bool current;  /* the arrays of the last call are in it */
    bool rounded;  /* of a step: some of its arrays are rounded at random */
};

/* Words of a list of arrays, without scratch. */
static int64_t xdi_cuda_list_words(int64_t arrays, int item_words) {
    return arrays * (item_words + 1) + (arrays + XDI_CUDA_LIST_TABLE + 1) / 2;
}

/* An even number, so that the scratch begins at a multiple of 16 bytes. */
static int64_t xdi_cuda_list_room(int64_t arrays) {
    return (xdi_cuda_list_words(arrays, XDI_CUDA_LIST_WORDS - 1) + 3) / 2 * 2;
}

/* The most arrays that find room. */
static int64_t xdi_cuda_list_most(const xd_array_list *list, int item_words) {
    return (2 * list->room - XDI_CUDA_LIST_TABLE - 1) / (2 * item_words + 3);
}

static xd_memory_bytes xdi_cuda_kept_bytes(int64_t arrays) {
    const int64_t room = xdi_cuda_list_room(arrays);
    xd_memory_bytes bytes;
    bytes.device = (size_t)(room + arrays * XDI_CUDA_LIST_SCRATCH) * sizeof(uint64_t);
    bytes.host = sizeof(xd_array_list) + (size_t)(2 * room + room / 3) * sizeof(uint64_t);
    return bytes;
}

/* The device is the current one, here and in the next. */
static xd_result xdi_cuda_list_make(xd_cuda *cuda, int64_t arrays, xd_array_list **out) {
    const xd_memory_bytes bytes = xdi_cuda_kept_bytes(arrays);
    xd_array_list *list = (xd_array_list *)xd_allocate(cuda->ctx, bytes.host);
    XD_REQUIRE(cuda->ctx, list, XD_ERROR_MEMORY, "no room for a list of %lld arrays", (long long)arrays);
    list->cuda = cuda;
    list->room = xdi_cuda_list_room(arrays);
    list->count = -1;
    list->captured = list->current = false;
    list->there = (uint64_t *)(void *)(list + 1);
    list->next = list->there + list->room;
    list->elements = (int64_t *)(void *)(list->next + list->room);
    list->device = (uint64_t *)cuda->allocator.allocate(cuda->allocator.user, bytes.device);
    if (!list->device) {
        xd_release(cuda->ctx, list);
        return XD_FAIL(cuda->ctx, XD_ERROR_MEMORY, "no room for a list of %lld arrays: %zu bytes of the device",
                       (long long)arrays, bytes.device);
    }
    *out = list;
    return XD_OK;
}

static void xdi_cuda_list_free(xd_array_list *list) {
    if (!list) return;
    list->cuda->allocator.release(list->cuda->allocator.user, list->device);
    xd_release(list->cuda->ctx, list);
}

static xd_result xdi_cuda_list_create(xd_ctx *ctx, int64_t arrays, xd_array_list **out) {
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    XD_TRY(scope.result);
    return xdi_cuda_list_make(xdi_cuda_of(ctx), arrays, out);
}

static void xdi_cuda_list_destroy(xd_array_list *list) {
    if (!list) return;
    xdi_cuda_scope scope(list->cuda->ctx, list->cuda->device);
    xdi_cuda_list_free(list);
}

/* ---- what it holds ---- */

/* Long lists have long chunks, short ones enough of them for all processors. */
template <typename Item> struct xdi_cuda_chunks {
    static int64_t elements(int64_t, int64_t all) {
        int64_t chunk = 65536;
        while (chunk > 4096 && all < 4096 * chunk) chunk /= 2;
        return chunk;
    }
};

/* Whether a call that says its arrays are those of the last one finds them there. `list` may be NULL. */
static bool xdi_cuda_list_is_current(const xd_array_list *list, bool same, int64_t count) {
    return list && same && list->current && list->count == count;
}

/* Whether the list holds these arrays. */
template <typename Item, typename MakeItem>
static bool xdi_cuda_list_holds(const xd_array_list *list, int64_t count, MakeItem make_item) {
    enum { WORDS = xdi_cuda_kept<Item>::WORDS };
    if (list->count != count || list->item_words != (int)WORDS) return false;
    for (int64_t k = 0; k < count; k++) {
        Item item;
        uint64_t all[WORDS], differs = (uint64_t)(make_item(k, &item) ^ list->elements[k]);
        memcpy(all, &item, sizeof all);
        for (int w = 0; w < WORDS; w++) differs |= all[w] ^ list->there[w * count + k];
        if (differs) return false;
    }
    return true;
}

/* The first chunks of the arrays, from their elements and those of a chunk, and the arrays of the chunks. */
static void xdi_cuda_list_split(xd_array_list *list, int64_t count, uint64_t *first, int64_t chunk) {
    uint32_t *arrays = (uint32_t *)(void *)(first + count);
    list->chunk = chunk;
    list->chunks = 0;
    list->shift = 0;
    for (int64_t k = 0; k < count; k++) {
        first[k] = (uint64_t)list->chunks;
        list->chunks += (list->elements[k] + list->chunk - 1) / list->chunk;
    }
    while (list->chunks >> list->shift >= count + XDI_CUDA_LIST_TABLE) list->shift++;
    for (int64_t k = 0, at = 0; k < count; k++) {
        const int64_t end = k + 1 < count ? (int64_t)first[k + 1] : list->chunks;
        for (; at << list->shift < end; at++) arrays[at] = (uint32_t)k;
    }
}

/* Fills list->next with the arrays that make_item(k, &value) -> elements gives. Returns its words. */
template <typename Item, typename MakeItem>
static int64_t xdi_cuda_list_fill(xd_array_list *list, int64_t count, MakeItem make_item) {
    enum { WORDS = xdi_cuda_kept<Item>::WORDS };
    const int64_t words = xdi_cuda_list_words(count, WORDS);
    int64_t elements = 0;
    memset(list->next + (WORDS + 1) * count, 0, (size_t)(words - (WORDS + 1) * count) * sizeof(uint64_t));
    for (int64_t k = 0; k < count; k++) {
        Item item;
        uint64_t all[WORDS];
        list->elements[k] = make_item(k, &item);
        memcpy(all, &item, sizeof all);
        for (int w = 0; w < WORDS; w++) list->next[w * count + k] = all[w];
        elements += list->elements[k];
    }
    list->item_words = (int)WORDS;
    xdi_cuda_list_split(list, count, list->next + WORDS * count, xdi_cuda_chunks<Item>::elements(count, elements));
    const int64_t used = list->chunks > 0 ? ((list->chunks - 1) >> list->shift) + 1 : 0;
    return (WORDS + 1) * count + (used + 1) / 2;
}

/* Words to write into a list, as kernel parameters: so no host memory must stay valid until the copy. */
struct xdi_cuda_patch {
    uint64_t *to;
    int64_t count;
    uint64_t words[XDI_CUDA_PATCH_WORDS];
};

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_patch_kernel(const __grid_constant__ xdi_cuda_patch patch) {
    for (int64_t i = threadIdx.x; i < patch.count; i += blockDim.x) patch.to[i] = patch.words[i];
}

/* Copies the words of list->next to the device, all of them or those that have changed. */
static xd_result xdi_cuda_list_send(const xd_launch *launch, xd_array_list *list, int64_t words, bool all) {
    for (int64_t at = 0; at < words; at += XDI_CUDA_PATCH_WORDS) {
        xdi_cuda_patch patch;
        patch.to = list->device + at;
        patch.count = words - at < XDI_CUDA_PATCH_WORDS ? words - at : (int64_t)XDI_CUDA_PATCH_WORDS;
        const size_t bytes = (size_t)patch.count * sizeof(uint64_t);
        if (!all && memcmp(list->there + at, list->next + at, bytes) == 0) continue;
        memcpy(patch.words, list->next + at, bytes);
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_THREADS), xdi_cuda_patch_kernel, patch));
        memcpy(list->there + at, list->next + at, bytes);
    }
    return XD_OK;
}

/* Whether kernels can read these arrays from a kept list. A graph reads the contents at the time it runs, so a list that a graph
 * reads is not changed any more, and nothing is copied to a kept list while a graph is being captured. */
template <typename Item, typename MakeItem>
static xd_result xdi_cuda_list_bring(const xd_launch *launch, xd_array_list *list, bool same, int64_t count,
                                     MakeItem make_item, bool *there) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    *there = false;
    if (count > xdi_cuda_list_most(list, xdi_cuda_kept<Item>::WORDS)) return XD_OK;
    XDI_CUDA_TRY(launch->ctx, cudaStreamIsCapturing((cudaStream_t)launch->stream, &capture));
    const bool capturing = capture != cudaStreamCaptureStatusNone;
    *there = same || xdi_cuda_list_holds<Item>(list, count, make_item);
    if (*there && capturing) list->captured = true;
    if (*there || capturing || list->captured) return XD_OK;
    const bool all = list->count != count || list->item_words != (int)xdi_cuda_kept<Item>::WORDS;
    list->count = -1; /* until all copies have been launched */
    XD_TRY(xdi_cuda_list_send(launch, list, xdi_cuda_list_fill<Item>(list, count, make_item), all));
    list->count = count;
    *there = true;
    return XD_OK;
}

template <typename Item> static xdi_cuda_kept<Item> xdi_cuda_kept_of(const xd_array_list *list, int64_t count) {
    xdi_cuda_kept<Item> kept;
    kept.words = list->device;
    kept.arrays = (const uint32_t *)(const void *)(list->device + (xdi_cuda_kept<Item>::WORDS + 1) * count);
    kept.scratch = list->device + list->room;
    kept.chunks = list->chunks;
    kept.chunk = list->chunk;
    kept.count = (int)count;
    kept.shift = list->shift;
    return kept;
}

/* Calls run(list) for the arrays that make_item(k, &value) -> elements gives: once when `list`, which may be NULL, can keep them,
 * else for each piece that is staged. `same`: they are those of the last call with the list. */
template <typename Item, typename MakeItem, typename Run>
static xd_result xdi_cuda_listed(const xd_launch *launch, xd_array_list *list, bool same, int64_t count, MakeItem make_item,
                                 Run run) {
    const bool current = xdi_cuda_list_is_current(list, same, count);
    bool there = false;
    if (count == 0) return XD_OK;
    if (list) {
        list->current = false;
        XD_TRY(xdi_cuda_list_bring<Item>(launch, list, current, count, make_item, &there));
        list->current = there;
    }
    if (there) return run(xdi_cuda_kept_of<Item>(list, count));
    xd_array_list *stage = xdi_cuda_of(launch->ctx)->stage;
    const int64_t most = xdi_cuda_list_most(stage, xdi_cuda_kept<Item>::WORDS);
    for (int64_t begin = 0; begin < count; begin += most) {
        const int64_t n = count - begin < most ? count - begin : most;
        const auto make_piece = [&](int64_t k, Item *item) { return make_item(begin + k, item); };
        XD_TRY(xdi_cuda_list_send(launch, stage, xdi_cuda_list_fill<Item>(stage, n, make_piece), true));
        XD_TRY(run(xdi_cuda_kept_of<Item>(stage, n)));
    }
    return XD_OK;
}

/* >>cuda/four.cuh */

/* Four elements of a thread. The accesses of a warp are contiguous: 512 bytes of an f32 array, 256 of a narrower one. What a thread
 * asks for stays as it lies in memory until it is widened, so that nothing waits before all arrays have been asked for. */

enum { XDI_CUDA_FOUR = 4, XDI_CUDA_FOURS = 2, XDI_CUDA_FOURS_APART = 4 * XDI_CUDA_WARP };

/* Of 16-bit types the first two words, the first element in the lower half. */
struct xdi_cuda_four {
    uint32_t words[4];
};

/* Element i of an F32, BF16 or F16 array and the next three; the address is a multiple of what they take. */
static __device__ inline xdi_cuda_four xdi_cuda_ask4(const void *data, int dtype, int64_t i) {
    xdi_cuda_four four;
    if (dtype == XD_DTYPE_F32) {
        const xdi_cuda_pack<float> pack = xdi_cuda_load16(static_cast<const float *>(data) + i);
        memcpy(four.words, &pack, sizeof pack);
    } else {
        const xdi_cuda_bits8 bits = xdi_cuda_load8(static_cast<const uint16_t *>(data) + i);
        memcpy(four.words, &bits, sizeof bits);
        four.words[2] = four.words[3] = 0;
    }
    return four;
}

static __device__ inline void xdi_cuda_put4(void *data, int dtype, int64_t i, const xdi_cuda_four &four) {
    if (dtype == XD_DTYPE_F32) {
        xdi_cuda_pack<float> pack;
        memcpy(&pack, four.words, sizeof pack);
        xdi_cuda_store16(static_cast<float *>(data) + i, pack);
    } else {
        xdi_cuda_bits8 bits;
        memcpy(&bits, four.words, sizeof bits);
        xdi_cuda_store8(static_cast<uint16_t *>(data) + i, bits);
    }
}

static __device__ inline void xdi_cuda_read4(const float *from, float (&values)[4]) {
    const xdi_cuda_pack<float> pack = xdi_cuda_load16(from);
    memcpy(values, &pack, sizeof pack);
}

static __device__ inline void xdi_cuda_write4(float *to, const float (&values)[4]) {
    xdi_cuda_pack<float> pack;
    memcpy(&pack, values, sizeof pack);
    xdi_cuda_store16(to, pack);
}

static __device__ inline void xdi_cuda_widen4(const xdi_cuda_four &four, int dtype, float (&values)[4]) {
    if (dtype == XD_DTYPE_F32) {
        memcpy(values, four.words, sizeof values);
    } else if (dtype == XD_DTYPE_BF16) {
        XD_UNROLL
        for (int j = 0; j < 4; j++)
            values[j] = xd_float_of_bits(j % 2 ? four.words[j / 2] & 0xffff0000u : four.words[j / 2] << 16);
    } else {
        XD_UNROLL
        for (int j = 0; j < 4; j++) values[j] = xdi_cuda_from_f16((uint16_t)(four.words[j / 2] >> (j % 2 * 16) & 0xffffu));
    }
}

static __device__ inline xdi_cuda_four xdi_cuda_narrow4(const float (&values)[4], int dtype) {
    xdi_cuda_four four = {};
    if (dtype == XD_DTYPE_F32) {
        memcpy(four.words, values, sizeof values);
    } else if (dtype == XD_DTYPE_BF16) {
        XD_UNROLL
        for (int j = 0; j < 4; j++) four.words[j / 2] |= (uint32_t)xd_bits_to_bf16(values[j]) << (j % 2 * 16);
    } else {
        XD_UNROLL
        for (int j = 0; j < 4; j++) four.words[j / 2] |= (uint32_t)xdi_cuda_to_f16(values[j]) << (j % 2 * 16);
    }
    return four;
}

/* The threads of a block share the elements of a span: fours(at) for four at at[0] and four at at[1] while `wide`, one(i) for the
 * others. Where the second four are not there, at[1] is at[0], so that they are loaded twice and have the same results. The result
 * of an element must not depend on which of the two is called. */
template <typename Fours, typename One>
static __device__ inline void xdi_cuda_walk4(xdi_cuda_span span, bool wide, Fours fours, One one) {
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    const int64_t end = span.begin + (wide ? (span.end - span.begin) / XDI_CUDA_FOUR * XDI_CUDA_FOUR : 0);
    const int64_t step = (int64_t)blockDim.x * (XDI_CUDA_FOUR * XDI_CUDA_FOURS);
    int64_t i = span.begin + warp * (XDI_CUDA_FOURS * XDI_CUDA_FOURS_APART) + lane * XDI_CUDA_FOUR;
    for (; i < end; i += step) {
        const int64_t at[XDI_CUDA_FOURS] = { i, i + XDI_CUDA_FOURS_APART < end ? i + XDI_CUDA_FOURS_APART : i };
        fours(at);
    }
    for (i = end + threadIdx.x; i < span.end; i += blockDim.x) one(i);
}

/* >>cuda/copy.cu */

/* Strided copies, many in a launch: the blocks of a redistribution, and arrays whose dtype does not change. Reads
 * and writes every byte once, 16 at a time where addresses, strides and lengths allow, with four loads of a thread on their way.
 * A thread computes the coordinates of its first unit by divisions and those of the others by additions. Grid: one block of 256
 * threads per chunk of 16384 units. */

enum { XDI_CUDA_MOVE_AHEAD = 4 };

struct xdi_cuda_move {
    char *to;
    const char *from;
    int64_t extent[XD_DIMS_MAX], to_stride[XD_DIMS_MAX], from_stride[XD_DIMS_MAX]; /* strides in bytes */
    int ndim;
    int unit; /* bytes that one thread moves: 16, 8, 4, 2 or 1 */
    int64_t units;
};

/* Both are not negative; those of a real tensor are below 2^32. */
static __device__ inline int64_t xdi_cuda_move_divide(int64_t a, int64_t b) {
    return (((uint64_t)a | (uint64_t)b) >> 32) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

/* Where a thread is in a move. The outer dimensions are computed anew when the last one is at its end. */
struct xdi_cuda_move_at {
    const xdi_cuda_move &m;
    int64_t to, from; /* of the outer dimensions, in bytes */
    int64_t outer, last; /* index of these, and coordinate in the last */

    __device__ xdi_cuda_move_at(const xdi_cuda_move &move, int64_t i) : m(move) {
        const int64_t extent = m.extent[m.ndim - 1];
        outer = xdi_cuda_move_divide(i, extent);
        last = i - outer * extent;
        find();
    }
    __device__ void find() {
        int64_t i = outer;
        to = from = 0;
        for (int d = m.ndim - 2; d >= 0; d--) {
            const int64_t next = d > 0 ? xdi_cuda_move_divide(i, m.extent[d]) : 0, at = i - next * m.extent[d];
            to += at * m.to_stride[d];
            from += at * m.from_stride[d];
            i = next;
        }
    }
    __device__ void advance(int64_t step) {
        const int64_t extent = m.extent[m.ndim - 1];
        last += step;
        if (last < extent) return;
        const int64_t rows = last < 2 * extent ? 1 : xdi_cuda_move_divide(last, extent);
        outer += rows;
        last -= rows * extent;
        find();
    }
};

/* Each of a thread's units, `step` apart: several loads before the first store. */
template <typename T> static __device__ inline void xdi_cuda_move_units(const xdi_cuda_move &m, int64_t begin, int64_t end, int step) {
    const int d = m.ndim - 1;
    const int64_t to_stride = m.to_stride[d], from_stride = m.from_stride[d];
    xdi_cuda_move_at at(m, begin);
    while (begin < end) {
        T units[XDI_CUDA_MOVE_AHEAD];
        char *to[XDI_CUDA_MOVE_AHEAD];
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MOVE_AHEAD; k++) {
            if (begin + k * step >= end) continue;
            to[k] = m.to + at.to + at.last * to_stride;
            units[k] = *reinterpret_cast<const T *>(m.from + at.from + at.last * from_stride);
            at.advance(step);
        }
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MOVE_AHEAD; k++)
            if (begin + k * step < end) *reinterpret_cast<T *>(to[k]) = units[k];
        begin += XDI_CUDA_MOVE_AHEAD * step;
    }
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 1)
    xdi_cuda_move_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_move> list, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    const int k = xdi_cuda_list_find(list, blockIdx.x);
    const xdi_cuda_move &m = list.at[k];
    const xdi_cuda_span span = xdi_cuda_span_of(blockIdx.x - list.first(k), m.units);
    const int64_t begin = span.begin + (int64_t)threadIdx.x;
    if (begin >= span.end) return;
    switch (m.unit) {
    case 16: xdi_cuda_move_units<xdi_cuda_bits16>(m, begin, span.end, XDI_CUDA_THREADS); break;
    case 8: xdi_cuda_move_units<uint64_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    case 4: xdi_cuda_move_units<uint32_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    case 2: xdi_cuda_move_units<uint16_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    default: xdi_cuda_move_units<uint8_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    }
}

/* The largest unit, up to `limit`, that divides every address, stride and length. */
static int xdi_cuda_move_unit_of(uint64_t bits, int limit) {
    int unit = limit;
    while (bits % (uint64_t)unit != 0) unit /= 2;
    return unit;
}

static int64_t xdi_cuda_move_bytes(void *to, const void *from, int64_t bytes, xdi_cuda_move *move) {
    memset(move, 0, sizeof *move);
    move->to = (char *)to;
    move->from = (const char *)from;
    move->unit =
        xdi_cuda_move_unit_of((uint64_t)(uintptr_t)to | (uint64_t)(uintptr_t)from | (uint64_t)bytes, 16);
    move->ndim = 1;
    move->units = move->extent[0] = to == from ? 0 : bytes / move->unit;
    move->to_stride[0] = move->from_stride[0] = move->unit;
    return move->units;
}

/* A strided block of elements of `size` bytes. Where the last dimension is dense on both sides it is moved in
 * larger units; otherwise element by element. A stride of zero reads the same element repeatedly. */
static int64_t xdi_cuda_move_block(const xd_copy *copy, const void *source, void *destination, size_t size,
                                   xdi_cuda_move *move) {
    const int last = copy->ndim - 1;
    const int64_t bytes = (int64_t)size;
    const bool dense = copy->src_stride[last] == 1 && copy->dst_stride[last] == 1;
    memset(move, 0, sizeof *move);
    move->to = (char *)destination + copy->dst_offset * bytes;
    move->from = (const char *)source + copy->src_offset * bytes;
    move->ndim = copy->ndim;
    uint64_t bits = (uint64_t)(uintptr_t)move->to | (uint64_t)(uintptr_t)move->from;
    for (int d = 0; d < copy->ndim; d++) {
        move->extent[d] = copy->extent[d];
        move->to_stride[d] = copy->dst_stride[d] * bytes;
        move->from_stride[d] = copy->src_stride[d] * bytes;
        if (d < last) bits |= (uint64_t)move->to_stride[d] | (uint64_t)move->from_stride[d];
    }
    if (dense) bits |= (uint64_t)(copy->extent[last] * bytes);
    move->unit = xdi_cuda_move_unit_of(bits, dense ? 16 : (int)size);
    if (dense) {
        move->extent[last] = copy->extent[last] * bytes / move->unit;
        move->to_stride[last] = move->from_stride[last] = move->unit;
    }
    move->units = 1;
    for (int d = 0; d < copy->ndim; d++) move->units *= move->extent[d];
    return move->units;
}

/* Launches the moves that make_item(k, &move) -> units fills in. */
template <typename MakeItem>
static xd_result xdi_cuda_move_run(const xd_launch *launch, int64_t count, MakeItem make_item) {
    return xdi_cuda_each_list<xdi_cuda_move>(count, make_item, [&](const xdi_cuda_list<xdi_cuda_move> &list) {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.chunks, XDI_CUDA_THREADS), xdi_cuda_move_kernel,
                               list, (const xd_status *)launch->status);
    });
}

static xd_result xdi_cuda_copies(const xd_launch *launch, const xd_copy *copies, int64_t count,
                                 const void *source, void *destination, size_t size) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_move_run(launch, count, [&](int64_t k, xdi_cuda_move *move) {
        return xdi_cuda_move_block(&copies[k], source, destination, size, move);
    });
}

static xd_result xdi_cuda_copy_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_move_kernel);
}

/* >>cuda/fill.cu */

/* First values of boxes of tensors, with the CPU's bits: the formulas are in base/philox_scalar.h and kernel/fill.h. A thread forms
 * four elements, which share a block of random numbers where their indices do. Writes each element once; ten rounds of two
 * products for four elements. Runs when a model is made, so the places are computed from the index by divisions. */

enum { XDI_CUDA_FILL_EACH = 4 };

struct xdi_cuda_init_box {
    xd_copy box;
    xd_init init;
    xd_philox random;
    int64_t count, limit;
    void *out;
    xd_dtype dtype;
};

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_init_kernel(const __grid_constant__ xdi_cuda_init_box f) {
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * XDI_CUDA_FILL_EACH;
    const bool random = xd_init_is_random(&f.init);
    int64_t block = -1;
    float lanes[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    for (int64_t i = first; i < first + XDI_CUDA_FILL_EACH && i < f.count; i++) {
        int64_t index, place;
        xd_fill_places(&f.box, i, &index, &place);
        if (random && index / 4 != block) {
            block = index / 4;
            xd_philox_lanes(&f.random, block, f.init.kind == XD_INIT_NORMAL, lanes);
        }
        const float value = index < f.limit ? xd_init_value(&f.init, lanes[index % 4]) : 0.0f;
        xd_element_store(f.out, f.dtype, place, (double)value);
    }
}

static xd_result xdi_cuda_init_run(const xd_launch *launch, const xd_fill_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    for (int64_t k = 0; k < args->box_count; k++) {
        xdi_cuda_init_box f = {};
        f.box = args->boxes[k];
        f.init = args->init;
        f.random = args->random;
        f.limit = args->limit;
        f.out = args->out;
        f.dtype = args->dtype;
        f.count = 1;
        for (int d = 0; d < f.box.ndim; d++) f.count *= f.box.extent[d];
        const int64_t each = (int64_t)XDI_CUDA_THREADS * XDI_CUDA_FILL_EACH, blocks = (f.count + each - 1) / each;
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_THREADS), xdi_cuda_init_kernel, f));
    }
    return XD_OK;
}

static xd_result xdi_cuda_init_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_init_kernel);
}

/* >>cuda/reduce.cu */

/* Sums over ranks: xd_reduce_pieces and xd_reduce_leaves of kernel/cpu/reduce.c, with the same bits. Every input is read once
 * and the sum written once; a thread has read all of its elements before it writes, so the sum may overwrite an input. */

/* Maximum number of inputs and nodes of one sum: their addresses are launch parameters. */
enum { XDI_CUDA_PIECES = 448, XDI_CUDA_NODES = 416 };

struct xdi_cuda_pieces {
    const void *at[XDI_CUDA_PIECES];
    void *out;
    int64_t count;
    double scale; /* of XD_AVG, exact in the type of the sum */
    int ranks;
    xd_reduce_op op;
    bool wide;
};

/* How elements are added: narrow floats in f32, integers without signed overflow. */
static __device__ inline float xdi_cuda_sum_load(float x) {
    return x;
}
static __device__ inline double xdi_cuda_sum_load(double x) {
    return x;
}
static __device__ inline float xdi_cuda_sum_load(xdi_cuda_bf16 x) {
    return xdi_cuda_widen(x);
}
static __device__ inline float xdi_cuda_sum_load(xdi_cuda_f16 x) {
    return xdi_cuda_widen(x);
}
static __device__ inline uint32_t xdi_cuda_sum_load(int32_t x) {
    return (uint32_t)x;
}
static __device__ inline uint64_t xdi_cuda_sum_load(int64_t x) {
    return (uint64_t)x;
}
static __device__ inline uint8_t xdi_cuda_sum_load(uint8_t x) {
    return x;
}

static __device__ inline float xdi_cuda_sum_add(float a, float b) {
    return __fadd_rn(a, b);
}
static __device__ inline double xdi_cuda_sum_add(double a, double b) {
    return __dadd_rn(a, b);
}
template <typename T> static __device__ inline T xdi_cuda_sum_add(T a, T b) {
    return (T)(a + b);
}

static __device__ inline float xdi_cuda_sum_scale(float a, double scale) {
    return __fmul_rn(a, (float)scale);
}
static __device__ inline double xdi_cuda_sum_scale(double a, double scale) {
    return __dmul_rn(a, scale);
}
template <typename T> static __device__ inline T xdi_cuda_sum_scale(T a, double) {
    return a; /* integers have no average */
}

template <typename T, typename Sum> static __device__ inline void xdi_cuda_sum_store(Sum sum, T *out) {
    *out = (T)sum;
}
static __device__ inline void xdi_cuda_sum_store(float sum, xdi_cuda_bf16 *out) {
    xdi_cuda_narrow(sum, out);
}
static __device__ inline void xdi_cuda_sum_store(float sum, xdi_cuda_f16 *out) {
    xdi_cuda_narrow(sum, out);
}

/* The larger or the smaller one, compared as T; a NaN wins. */
template <typename T> static __device__ inline bool xdi_cuda_wins(T a, T b, xd_reduce_op op) {
    return (op == XD_MAX ? a > b : a < b) || a != a;
}
static __device__ inline bool xdi_cuda_wins(uint32_t a, uint32_t b, xd_reduce_op op) {
    return op == XD_MAX ? (int32_t)a > (int32_t)b : (int32_t)a < (int32_t)b;
}
static __device__ inline bool xdi_cuda_wins(uint64_t a, uint64_t b, xd_reduce_op op) {
    return op == XD_MAX ? (int64_t)a > (int64_t)b : (int64_t)a < (int64_t)b;
}

template <typename Sum> static __device__ inline Sum xdi_cuda_sum_merge(Sum sum, Sum next, xd_reduce_op op) {
    if (op == XD_MAX || op == XD_MIN) return xdi_cuda_wins(next, sum, op) ? next : sum;
    return xdi_cuda_sum_add(sum, next);
}

/* Grid: one block of 256 threads per chunk of 16384 elements. Bytes: (ranks + 1) * count * sizeof(T). */
template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_pieces_kernel(const __grid_constant__ xdi_cuda_pieces pieces) {
    enum { LANES = xdi_cuda_pack<T>::COUNT };
    const xdi_cuda_span span = xdi_cuda_span_of(blockIdx.x, pieces.count);
    const int64_t packs = pieces.wide ? (span.end - span.begin) / LANES : 0;
    for (int64_t k = threadIdx.x; k < packs; k += blockDim.x) {
        const int64_t i = span.begin + k * LANES;
        xdi_cuda_pack<T> pack = xdi_cuda_load16(static_cast<const T *>(pieces.at[0]) + i);
        decltype(xdi_cuda_sum_load(pack.at[0])) sums[LANES];
        XD_UNROLL
        for (int j = 0; j < LANES; j++) sums[j] = xdi_cuda_sum_load(pack.at[j]);
        for (int r = 1; r < pieces.ranks; r++) {
            pack = xdi_cuda_load16(static_cast<const T *>(pieces.at[r]) + i);
            XD_UNROLL
            for (int j = 0; j < LANES; j++)
                sums[j] = xdi_cuda_sum_merge(sums[j], xdi_cuda_sum_load(pack.at[j]), pieces.op);
        }
        XD_UNROLL
        for (int j = 0; j < LANES; j++) {
            if (pieces.op == XD_AVG) sums[j] = xdi_cuda_sum_scale(sums[j], pieces.scale);
            xdi_cuda_sum_store(sums[j], &pack.at[j]);
        }
        xdi_cuda_store16(static_cast<T *>(pieces.out) + i, pack);
    }
    for (int64_t i = span.begin + packs * LANES + threadIdx.x; i < span.end; i += blockDim.x) {
        auto sum = xdi_cuda_sum_load(static_cast<const T *>(pieces.at[0])[i]);
        for (int r = 1; r < pieces.ranks; r++)
            sum = xdi_cuda_sum_merge(sum, xdi_cuda_sum_load(static_cast<const T *>(pieces.at[r])[i]),
                                     pieces.op);
        if (pieces.op == XD_AVG) sum = xdi_cuda_sum_scale(sum, pieces.scale);
        xdi_cuda_sum_store(sum, static_cast<T *>(pieces.out) + i);
    }
}

static xd_result xdi_cuda_reduce_pieces(const xd_launch *launch, void *out, const void *const *from,
                                        int ranks, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    XD_REQUIRE(launch->ctx, xd_reduce_supports(dtype, op), XD_ERROR_DTYPE, "%s has no %s",
                xd_dtype_name(dtype), op == XD_AVG ? "average" : "arithmetic");
    XD_REQUIRE(launch->ctx, ranks <= XDI_CUDA_PIECES, XD_ERROR_UNSUPPORTED,
                "a sum over %d ranks on one GPU; %d is the most", ranks, (int)XDI_CUDA_PIECES);
    if (count <= 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xdi_cuda_pieces pieces;
    memset(&pieces, 0, sizeof pieces);
    pieces.out = out;
    pieces.count = count;
    pieces.ranks = ranks;
    pieces.op = op;
    pieces.scale = dtype == XD_DTYPE_F64 ? 1.0 / (double)ranks : (double)(1.0f / (float)ranks);
    pieces.wide = xdi_cuda_is_aligned16(out);
    for (int r = 0; r < ranks; r++) {
        pieces.at[r] = from[r];
        pieces.wide = pieces.wide && xdi_cuda_is_aligned16(from[r]);
    }
    const xdi_cuda_grid grid =
        xdi_cuda_grid_of((count + XDI_CUDA_CHUNK - 1) / XDI_CUDA_CHUNK, XDI_CUDA_THREADS);
    switch (dtype) {
    case XD_DTYPE_F32: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<float>, pieces);
    case XD_DTYPE_F64: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<double>, pieces);
    case XD_DTYPE_BF16: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<xdi_cuda_bf16>, pieces);
    case XD_DTYPE_F16: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<xdi_cuda_f16>, pieces);
    case XD_DTYPE_I32: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<int32_t>, pieces);
    case XD_DTYPE_I64: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<int64_t>, pieces);
    default: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<uint8_t>, pieces);
    }
}

/* The canonical tree as a program: push each node in turn, then merge the top of the stack with the value below it as often as
 * `merges` says. Each thread's stack is a column of shared memory; the top stays in a register. */
struct xdi_cuda_nodes {
    const void *at[XDI_CUDA_NODES];
    uint8_t merges[XDI_CUDA_NODES];
    void *out;
    int64_t count;
    double scale;
    int nodes;
};

/* Grid: one block of 256 threads per 256 elements. Bytes: (nodes + 1) * count * sizeof(T). Shared: depth * 256 * sizeof(T). */
template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_leaves_kernel(const __grid_constant__ xdi_cuda_nodes nodes) {
    XD_DYN_SHARED(T, stack);
    const int64_t i = (int64_t)blockIdx.x * XDI_CUDA_THREADS + threadIdx.x;
    if (i >= nodes.count) return;
    T top = (T)0;
    int below = 0;
    for (int k = 0; k < nodes.nodes; k++) {
        if (k > 0) stack[below++ * XDI_CUDA_THREADS + (int)threadIdx.x] = top;
        top = static_cast<const T *>(nodes.at[k])[i];
        for (int m = nodes.merges[k]; m > 0; m--)
            top = xdi_cuda_sum_add(stack[--below * XDI_CUDA_THREADS + (int)threadIdx.x], top);
    }
    static_cast<T *>(nodes.out)[i] = xdi_cuda_sum_scale(top, nodes.scale);
}

/* Writes the program, and the deepest stack to *depth; returns the number of nodes, also when there are too many. */
static int xdi_cuda_nodes_fill(xdi_cuda_nodes *nodes, const void *const *forests, const xd_leaves *leaves,
                               int ranks, int64_t stride_bytes, int *depth) {
    int64_t size[64];
    int top = -1, n = 0;
    *depth = 0;
    for (int r = 0; r < ranks; r++) {
        const int64_t end = leaves[r].first + leaves[r].count;
        const char *node = (const char *)forests[r];
        for (int64_t lo = leaves[r].first; lo < end;
             lo += xd_leaves_node_size(lo, end), node += stride_bytes, n++) {
            if (n >= XDI_CUDA_NODES) continue;
            size[++top] = xd_leaves_node_size(lo, end);
            *depth = top > *depth ? top : *depth;
            nodes->at[n] = node;
            for (; top > 0 && size[top - 1] == size[top]; size[--top] *= 2) nodes->merges[n]++;
        }
    }
    if (n > 0 && n <= XDI_CUDA_NODES) nodes->merges[n - 1] = (uint8_t)(nodes->merges[n - 1] + top);
    return n;
}

static xd_result xdi_cuda_reduce_leaves(const xd_launch *launch, void *out, const void *const *forests,
                                        const xd_leaves *leaves, int ranks, int64_t stride, int64_t count,
                                        xd_dtype dtype, xd_reduce_op op) {
    XD_REQUIRE(
        launch->ctx, dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_F64, XD_ERROR_DTYPE,
        "a sum over leaves is F32 or F64, not %s: rounding a node would make its bits depend on the ranks",
        xd_dtype_name(dtype));
    XD_REQUIRE(launch->ctx, op == XD_SUM || op == XD_AVG, XD_ERROR_ARGUMENT,
                "leaves go with SUM and AVG, not operation %d", (int)op);
    if (count <= 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xdi_cuda_nodes nodes;
    memset(&nodes, 0, sizeof nodes);
    int depth;
    const int64_t size = (int64_t)xd_dtype_size(dtype);
    nodes.nodes = xdi_cuda_nodes_fill(&nodes, forests, leaves, ranks, stride * size, &depth);
    XD_REQUIRE(launch->ctx, nodes.nodes <= XDI_CUDA_NODES && depth <= 24, XD_ERROR_UNSUPPORTED,
                "a tree of %d nodes, %d deep, on one GPU; %d and 24 are the most", nodes.nodes, depth,
                (int)XDI_CUDA_NODES);
    nodes.out = out;
    nodes.count = count;
    nodes.scale = 1.0;
    const double total = (double)leaves[0].total;
    if (op == XD_AVG)
        nodes.scale = dtype == XD_DTYPE_F64 ? 1.0 / total : (double)(1.0f / (float)leaves[0].total);
    const xdi_cuda_grid grid =
        xdi_cuda_grid_of((count + XDI_CUDA_THREADS - 1) / XDI_CUDA_THREADS, XDI_CUDA_THREADS,
                         (size_t)(depth * XDI_CUDA_THREADS) * (size_t)size);
    if (dtype == XD_DTYPE_F32) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_leaves_kernel<float>, nodes);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_leaves_kernel<double>, nodes);
}

static xd_result xdi_cuda_reduce_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<double>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<xdi_cuda_f16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<int32_t>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<int64_t>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<uint8_t>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_leaves_kernel<float>));
    return xdi_cuda_load(ctx, xdi_cuda_leaves_kernel<double>);
}

/* >>cuda/average.cu */

/* Averages, and what else moves arrays element by element: casts, copies at a rate, exchanges. The formulas are in
 * kernel/optimizer_scalar.h, and the bits are the same as on a CPU. All of them move bytes and compute little: 16-byte accesses,
 * each array read and written once. An f32 average of bf16 parameters takes 10 bytes an element; beside others in a step 8, and
 * 2 once for all of them. Grid: blocks of 256 threads, each block a chunk at a time. Averages retain their list on the device. */

static bool xdi_cuda_is_narrow_float(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

static bool xdi_cuda_is_float(xd_dtype dtype) {
    return xdi_cuda_is_narrow_float(dtype) || dtype == XD_DTYPE_F64;
}

/* ---- one element ---- */

struct xdi_cuda_lerp_options {
    const xd_average_turn *turn; /* nullptr: what follows is known */
    double keep_f64;
    float weight, keep;
    bool weighted_sum, copies;
};

/* The value as a narrow dtype would hold it, widened again. */
static __device__ inline float xdi_cuda_as_stored(float value, int dtype) {
    if (dtype == XD_DTYPE_BF16) {
        xdi_cuda_bf16 narrow;
        xdi_cuda_narrow(value, &narrow);
        return xdi_cuda_widen(narrow);
    }
    if (dtype == XD_DTYPE_F16) {
        xdi_cuda_f16 narrow;
        xdi_cuda_narrow(value, &narrow);
        return xdi_cuda_widen(narrow);
    }
    return value;
}

/* Rounds an element at random, to a value that the narrow dtype holds. */
static __device__ inline float xdi_cuda_round(const xd_philox &random, int64_t element, float p) {
    uint32_t words[4];
    xd_philox_words(&random, element / XD_ROUNDED_PER_BLOCK, words);
    return xd_bits_from_bf16(xd_round_to_bf16(p, xd_round_bits(words, element)));
}

static __host__ __device__ inline void xdi_cuda_lerp_set(xdi_cuda_lerp_options *o, double keep) {
    o->keep_f64 = keep;
    o->weight = (float)xd_sub(1.0, keep);
    o->keep = (float)keep;
}

/* What the device has counted, of an average that it counts; false when this update does nothing. A copy is the sum of all of the
 * source and nothing of the target, which is then taken for a negative zero: that changes no sum, not the sign of a zero either. */
static __device__ inline bool xdi_cuda_lerp_take(xdi_cuda_lerp_options *o) {
    if (o->turn == nullptr) return true;
    if (xd_status_refuses(&o->turn->rests)) return false;
    o->copies = o->turn->copies != 0;
    o->weighted_sum = o->weighted_sum || o->copies;
    xdi_cuda_lerp_set(o, o->copies ? 0.0 : o->turn->keep);
    return true;
}

static __device__ inline void xdi_cuda_lerp_element(const xdi_cuda_lerp_options &o, void *target, int dtype,
                                                    int64_t i, double source) {
    if (dtype == XD_DTYPE_F64) {
        double *at = static_cast<double *>(target) + i;
        *at = xd_lerp_f64(o.keep_f64, o.weighted_sum, o.copies ? -0.0 : *at, source);
    } else {
        const float rounded = xdi_cuda_as_stored((float)source, dtype);
        const float before = o.copies ? -0.0f : xdi_cuda_read_float(target, dtype, i);
        xdi_cuda_write_float(target, dtype, i,
                             xd_lerp_f32(o.weight, o.keep, o.weighted_sum, before, rounded));
    }
}

/* Eight at an aligned address; neither side is F64. */
static __device__ inline void xdi_cuda_lerp8(const xdi_cuda_lerp_options &o, void *target, int dtype,
                                             int64_t i, const float (&source)[8]) {
    float values[8];
    xdi_cuda_read8(target, dtype, i, values);
    XD_UNROLL
    for (int j = 0; j < 8; j++)
        values[j] = xd_lerp_f32(o.weight, o.keep, o.weighted_sum, o.copies ? -0.0f : values[j],
                                xdi_cuda_as_stored(source[j], dtype));
    xdi_cuda_write8(target, dtype, i, values);
}

/* Four of a target, from those before. */
static __device__ inline xdi_cuda_four xdi_cuda_lerp4(const xdi_cuda_lerp_options &o, const xdi_cuda_four &target, int dtype,
                                                      const float (&source)[4]) {
    float values[4], rounded[4];
    xdi_cuda_widen4(target, dtype, values);
    memcpy(rounded, source, sizeof rounded);
    if (dtype != XD_DTYPE_F32) xdi_cuda_widen4(xdi_cuda_narrow4(source, dtype), dtype, rounded);
    XD_UNROLL
    for (int j = 0; j < 4; j++)
        values[j] = xd_lerp_f32(o.weight, o.keep, o.weighted_sum, o.copies ? -0.0f : values[j], rounded[j]);
    return xdi_cuda_narrow4(values, dtype);
}

static xdi_cuda_lerp_options xdi_cuda_lerp_options_of(double keep, bool weighted_sum, const xd_average_turn *turn) {
    xdi_cuda_lerp_options options = {};
    options.turn = turn;
    xdi_cuda_lerp_set(&options, keep);
    options.weighted_sum = weighted_sum;
    return options;
}

/* ---- counters of averages ---- */

/* One block. */
static __global__ void xdi_cuda_turn_kernel(const xd_turn_args args, const xd_status *status) {
    xd_average_turn *turn = args.turn;
    if (args.begins) {
        for (int k = (int)threadIdx.x; k < (int)XD_AVERAGE_KEEPS; k += (int)blockDim.x) turn->known[k] = -1;
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    if (args.begins) {
        turn->rests = xd_status();
        turn->copies = 0;
        turn->keep = 0.0;
        turn->iteration = args.last;
        turn->initialized = args.initialized ? 1 : 0;
    }
    xd_average_take_turn(&args, status);
}

static xd_result xdi_cuda_turn(const xd_launch *launch, const xd_turn_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_THREADS), xdi_cuda_turn_kernel, *args,
                           (const xd_status *)launch->status);
}

/* ---- lerp and cast ---- */

struct xdi_cuda_pair {
    void *target;
    const void *source;
    int64_t count;
    uint8_t target_dtype, source_dtype, wide, unused[5];
};

static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 4)
    xdi_cuda_lerp_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_pair> list,
                         const __grid_constant__ xdi_cuda_lerp_options options, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    xdi_cuda_lerp_options now = options;
    if (!xdi_cuda_lerp_take(&now)) return;
    xdi_cuda_each_kept(list, [&](int, const xdi_cuda_pair &a, xdi_cuda_span span) {
        xdi_cuda_walk4(
            span, a.wide != 0,
            [&](const int64_t (&at)[XDI_CUDA_FOURS]) {
                xdi_cuda_four source[XDI_CUDA_FOURS], target[XDI_CUDA_FOURS];
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) source[q] = xdi_cuda_ask4(a.source, a.source_dtype, at[q]);
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) target[q] = xdi_cuda_ask4(a.target, a.target_dtype, at[q]);
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) {
                    float values[4];
                    xdi_cuda_widen4(source[q], a.source_dtype, values);
                    xdi_cuda_put4(a.target, a.target_dtype, at[q],
                                  xdi_cuda_lerp4(now, target[q], a.target_dtype, values));
                }
            },
            [&](int64_t i) {
                xdi_cuda_lerp_element(now, a.target, a.target_dtype, i,
                                      xd_element_load(a.source, (xd_dtype)a.source_dtype, i));
            });
    });
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_cast_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_pair> list, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    xdi_cuda_each_chunk(list, [&](const xdi_cuda_pair &a, xdi_cuda_span span) {
        xdi_cuda_walk(
            span, a.wide != 0,
            [&](int64_t i) {
                float values[8];
                xdi_cuda_read8(a.source, a.source_dtype, i, values);
                xdi_cuda_write8(a.target, a.target_dtype, i, values);
            },
            [&](int64_t i) {
                xd_element_store(a.target, (xd_dtype)a.target_dtype, i,
                                   xd_element_load(a.source, (xd_dtype)a.source_dtype, i));
            });
    });
}

static xdi_cuda_pair xdi_cuda_pair_of(void *target, xd_dtype target_dtype, const void *source,
                                      xd_dtype source_dtype, int64_t count) {
    xdi_cuda_pair pair;
    memset(&pair, 0, sizeof pair);
    pair.target = target;
    pair.source = source;
    pair.count = count;
    pair.target_dtype = (uint8_t)target_dtype;
    pair.source_dtype = (uint8_t)source_dtype;
    pair.wide = xdi_cuda_is_narrow_float(target_dtype) && xdi_cuda_is_narrow_float(source_dtype) &&
                xdi_cuda_is_aligned16(target) && xdi_cuda_is_aligned16(source);
    return pair;
}

static xd_result xdi_cuda_lerp(const xd_launch *launch, const xd_lerp_args *args) {
    const bool current = xdi_cuda_list_is_current(args->list, args->same, args->array_count);
    for (int64_t k = 0; k < args->array_count && !current; k++) {
        const xd_lerp_array *a = &args->arrays[k];
        XD_REQUIRE(launch->ctx, xdi_cuda_is_float(a->target_dtype) && xdi_cuda_is_float(a->source_dtype),
                    XD_ERROR_DTYPE, "array %lld: cannot average %s into %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_lerp_options options = xdi_cuda_lerp_options_of(args->keep, args->weighted_sum, args->turn);
    const auto make_item = [&](int64_t k, xdi_cuda_pair *item) {
        const xd_lerp_array *a = &args->arrays[k];
        *item = xdi_cuda_pair_of(a->target, a->target_dtype, a->source, a->source_dtype, a->count);
        return a->count;
    };
    return xdi_cuda_listed<xdi_cuda_pair>(
        launch, args->list, args->same, args->array_count, make_item, [&](const xdi_cuda_kept<xdi_cuda_pair> &list) {
            xdi_cuda_grid grid;
            if (list.chunks == 0) return (xd_result)XD_OK;
            XD_TRY(xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_lerp_kernel, &grid));
            return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_lerp_kernel, list, options, (const xd_status *)launch->status);
        });
}

static bool xdi_cuda_cast_takes(xd_dtype dtype) {
    return xdi_cuda_is_float(dtype) || dtype == XD_DTYPE_I32 || dtype == XD_DTYPE_I64 ||
           dtype == XD_DTYPE_U8 || dtype == XD_DTYPE_BOOL;
}

static xd_result xdi_cuda_cast(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count) {
    for (int64_t k = 0; k < array_count; k++) {
        const xd_cast_array *a = &arrays[k];
        XD_REQUIRE(launch->ctx,
                    a->target_dtype == a->source_dtype ||
                        (xdi_cuda_cast_takes(a->target_dtype) && xdi_cuda_cast_takes(a->source_dtype)),
                    XD_ERROR_DTYPE, "array %lld: cannot convert %s to %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(xdi_cuda_each_list<xdi_cuda_pair>(
        array_count,
        [&](int64_t k, xdi_cuda_pair *item) {
            const xd_cast_array *a = &arrays[k];
            *item = xdi_cuda_pair_of(a->target, a->target_dtype, a->source, a->source_dtype, a->count);
            return a->target_dtype == a->source_dtype ? (int64_t)0 : a->count;
        },
        [&](const xdi_cuda_list<xdi_cuda_pair> &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.chunks, XDI_CUDA_THREADS),
                                   xdi_cuda_cast_kernel, list, (const xd_status *)launch->status);
        }));
    return xdi_cuda_move_run(launch, array_count, [&](int64_t k, xdi_cuda_move *item) {
        const xd_cast_array *a = &arrays[k];
        const bool same = a->target_dtype == a->source_dtype;
        return same ? xdi_cuda_move_bytes(a->target, a->source,
                                          a->count * (int64_t)xd_dtype_size(a->target_dtype), item)
                    : (int64_t)0;
    });
}

/* ---- averages in other formats, counted ones, and exchanges ---- */

struct xdi_cuda_average_options {
    xdi_cuda_lerp_options lerp;
    uint64_t seed;
    int64_t iteration;
    int64_t *unmoved;
    float factor;
    int kind;
};

/* As xdi_cuda_lerp_take; a copy is a kind of its own. */
static __device__ inline bool xdi_cuda_average_take(xdi_cuda_average_options *o) {
    if (o->lerp.turn == nullptr) return true;
    if (!xdi_cuda_lerp_take(&o->lerp)) return false;
    o->iteration = o->lerp.turn->iteration;
    if (o->lerp.copies) o->kind = XD_AVERAGE_COPY;
    return true;
}

/* Moves one element by the format of its array. */
static __device__ inline void xdi_cuda_average_move(const xdi_cuda_average_options &o, const xd_average_array &a,
                                                    int64_t i, double source) {
    if (a.random) {
        const xd_philox random = xd_average_random(o.seed, a.key, o.iteration);
        const float before = xdi_cuda_read_float(a.target, XD_DTYPE_BF16, i);
        const float after = xd_lerp_f32(o.lerp.weight, o.lerp.keep, false, before, (float)source);
        xdi_cuda_write_float(a.target, XD_DTYPE_BF16, i, xdi_cuda_round(random, a.origin + i, after));
    } else if (a.compensation) {
        xd_lerp_compensated(o.lerp.weight, (float)source, static_cast<float *>(a.target) + i, a.compensation + i);
    } else {
        xdi_cuda_lerp_element(o.lerp, a.target, (int)a.target_dtype, i, source);
    }
}

/* The bits of an element. */
static __device__ inline uint64_t xdi_cuda_average_bits(const xd_average_array &a, int64_t i) {
    switch (a.target_dtype) {
    case XD_DTYPE_F64: return static_cast<const uint64_t *>(a.target)[i];
    case XD_DTYPE_F32: return static_cast<const uint32_t *>(a.target)[i];
    default: return static_cast<const uint16_t *>(a.target)[i];
    }
}

/* One element by the kind of the call; whether it has not moved, where that is counted. */
static __device__ inline bool xdi_cuda_average_element(const xdi_cuda_average_options &o, const xd_average_array &a,
                                                       int64_t i) {
    const double source = xd_element_load(a.source, a.source_dtype, i);
    if (o.kind == XD_AVERAGE_ADD) {
        float *target = static_cast<float *>(a.target) + i;
        *target = xd_fmaf(o.factor, (float)source, *target);
        return false;
    }
    if (o.kind == XD_AVERAGE_COPY) {
        xd_element_store(a.target, a.target_dtype, i, source);
        if (a.compensation) a.compensation[i] = 0;
        return false;
    }
    const uint64_t before = xdi_cuda_average_bits(a, i);
    const uint16_t lacked = a.compensation ? a.compensation[i] : (uint16_t)0;
    const double was = xd_element_load(a.target, a.target_dtype, i);
    xdi_cuda_average_move(o, a, i, source);
    if (!o.unmoved || !xd_average_differs(source, was, lacked)) return false;
    const bool same = before == xdi_cuda_average_bits(a, i) && (!a.compensation || a.compensation[i] == lacked);
    return xd_average_stays(same, was, xd_element_load(a.target, a.target_dtype, i));
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 1)
    xdi_cuda_average_kernel(const __grid_constant__ xdi_cuda_list<xd_average_array> list,
                            const xdi_cuda_average_options options, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    xdi_cuda_average_options now = options;
    if (!xdi_cuda_average_take(&now)) return;
    unsigned long long unmoved = 0;
    xdi_cuda_each_chunk(list, [&](const xd_average_array &a, xdi_cuda_span span) {
        xdi_cuda_walk(span, false, [](int64_t) {},
                      [&](int64_t i) { unmoved += xdi_cuda_average_element(now, a, i) ? 1u : 0u; });
    });
    if (unmoved) atomicAdd(reinterpret_cast<unsigned long long *>(options.unmoved), unmoved);
}

static xd_result xdi_cuda_average_check(const xd_launch *launch, const xd_average_args *args, int64_t k) {
    const xd_average_array *a = &args->arrays[k];
    const bool wide = a->target_dtype == XD_DTYPE_F32;
    XD_REQUIRE(launch->ctx, xdi_cuda_is_float(a->target_dtype) && xdi_cuda_is_float(a->source_dtype),
               XD_ERROR_DTYPE, "array %lld: cannot average %s into %s", (long long)k,
               xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    XD_REQUIRE(launch->ctx, !a->random || (a->target_dtype == XD_DTYPE_BF16 && !a->compensation),
               XD_ERROR_DTYPE, "array %lld: BF16 is rounded at random, not %s", (long long)k,
               xd_dtype_name(a->target_dtype));
    XD_REQUIRE(launch->ctx, (!a->compensation && args->kind != XD_AVERAGE_ADD) || wide, XD_ERROR_DTYPE,
               "array %lld: F32 has a compensation and is added to, not %s", (long long)k,
               xd_dtype_name(a->target_dtype));
    return XD_OK;
}

static xdi_cuda_average_options xdi_cuda_average_options_of(const xd_average_args *args) {
    xdi_cuda_average_options options = {};
    options.lerp = xdi_cuda_lerp_options_of(args->keep, args->weighted_sum, args->turn);
    options.seed = args->seed;
    options.iteration = args->iteration;
    options.unmoved = args->unmoved;
    options.factor = args->factor;
    options.kind = (int)args->kind;
    return options;
}

static xd_result xdi_cuda_average(const xd_launch *launch, const xd_average_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) XD_TRY(xdi_cuda_average_check(launch, args, k));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_average_options options = xdi_cuda_average_options_of(args);
    return xdi_cuda_each_list<xd_average_array>(
        args->array_count,
        [&](int64_t k, xd_average_array *item) {
            *item = args->arrays[k];
            return item->count;
        },
        [&](const xdi_cuda_list<xd_average_array> &list) {
            static_assert(sizeof list + sizeof options + sizeof(void *) <= 4096, "the parameters of a launch");
            xdi_cuda_grid grid;
            XD_TRY(xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_average_kernel, &grid));
            return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_average_kernel, list, options,
                                   (const xd_status *)launch->status);
        });
}

/* ---- averages of a step ----
 *
 * After a step its parameters are read once more, for up to MOST averages of any format; the one of the arrays needs no read. */

enum { XDI_CUDA_BESIDE = 8 };

struct xdi_cuda_beside_target {
    void *target; /* nullptr: this average has none */
    uint16_t *compensation;
    int64_t origin;
    uint64_t key;
    uint8_t dtype, random, wide, unused[5];
};

template <int MOST> struct xdi_cuda_beside {
    const void *source;
    int64_t count;
    uint8_t source_dtype, wide, unused[6];
    xdi_cuda_beside_target at[MOST];
};

struct xdi_cuda_beside_options {
    xdi_cuda_average_options each[XDI_CUDA_BESIDE];
    int count;
};

XDI_CUDA_APART __device__ void xdi_cuda_beside_element(const xdi_cuda_average_options &o,
                                                       const xdi_cuda_beside_target &t, int64_t i, double source) {
    xd_average_array a = {};
    a.target = t.target;
    a.compensation = t.compensation;
    a.origin = t.origin;
    a.key = t.key;
    a.target_dtype = (xd_dtype)t.dtype;
    a.random = t.random != 0;
    xdi_cuda_average_move(o, a, i, source);
}

/* The averages of a list that copy. */
template <int MOST>
static __device__ inline void xdi_cuda_beside_copy(const xdi_cuda_list<xdi_cuda_beside<MOST>> &list, int count,
                                                   const bool *copies) {
    xdi_cuda_each_chunk(list, [&](const xdi_cuda_beside<MOST> &a, xdi_cuda_span span) {
        xdi_cuda_walk(span, false, [](int64_t) {}, [&](int64_t i) {
            const double source = xd_element_load(a.source, (xd_dtype)a.source_dtype, i);
            for (int k = 0; k < count; k++) {
                const xdi_cuda_beside_target &t = a.at[k];
                if (!t.target || !copies[k]) continue;
                xd_element_store(t.target, (xd_dtype)t.dtype, i, source);
                if (t.compensation) t.compensation[i] = 0;
            }
        });
    });
}

template <int MOST>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 1)
    xdi_cuda_beside_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_beside<MOST>> list,
                           const __grid_constant__ xdi_cuda_beside_options options, const xd_status *status) {
    XD_SHARED(xdi_cuda_average_options, each, [MOST]);
    XD_SHARED(bool, moves, [MOST]);
    XD_SHARED(bool, copies, [MOST]);
    bool any = false;
    if (xd_status_refuses(status)) return;
    const int mine = (int)threadIdx.x;
    if (mine < MOST && mine < options.count) {
        each[mine] = options.each[mine];
        const bool acts = xdi_cuda_average_take(&each[mine]);
        copies[mine] = acts && each[mine].lerp.copies;
        moves[mine] = acts && !copies[mine];
    }
    __syncthreads();
    for (int k = 0; k < options.count; k++) any = any || copies[k];
    if (any) xdi_cuda_beside_copy(list, options.count, copies);
    xdi_cuda_each_chunk(list, [&](const xdi_cuda_beside<MOST> &a, xdi_cuda_span span) {
        xdi_cuda_walk(
            span, a.wide != 0,
            [&](int64_t i) {
                float source[8];
                xdi_cuda_read8(a.source, a.source_dtype, i, source);
                for (int k = 0; k < options.count; k++) {
                    const xdi_cuda_beside_target &t = a.at[k];
                    if (!moves[k]) continue;
                    if (t.wide) {
                        xdi_cuda_lerp8(each[k].lerp, t.target, t.dtype, i, source);
                    } else if (t.target) {
                        XD_UNROLL
                        for (int j = 0; j < 8; j++)
                            xdi_cuda_beside_element(each[k], t, i + j, (double)source[j]);
                    }
                }
            },
            [&](int64_t i) {
                const double source = xd_element_load(a.source, (xd_dtype)a.source_dtype, i);
                for (int k = 0; k < options.count; k++)
                    if (a.at[k].target && moves[k]) xdi_cuda_beside_element(each[k], a.at[k], i, source);
            });
    });
}

template <int MOST>
static int64_t xdi_cuda_beside_of(const xd_average_args *averages, int count, int64_t k,
                                  xdi_cuda_beside<MOST> *out) {
    memset(out, 0, sizeof *out);
    for (int i = 0; i < count; i++) {
        const xd_average_array *a = &averages[i].arrays[k];
        xdi_cuda_beside_target *t = &out->at[i];
        if (!a->target) continue;
        out->source = a->source;
        out->count = a->count;
        out->source_dtype = (uint8_t)a->source_dtype;
        t->target = a->target;
        t->compensation = a->compensation;
        t->origin = a->origin;
        t->key = a->key;
        t->dtype = (uint8_t)a->target_dtype;
        t->random = a->random;
        t->wide = !a->random && !a->compensation && a->target_dtype != XD_DTYPE_F64 &&
                  xdi_cuda_is_aligned16(a->target);
    }
    out->wide = out->source_dtype != XD_DTYPE_F64 && xdi_cuda_is_aligned16(out->source);
    return out->count;
}

static xd_result xdi_cuda_beside_check(const xd_launch *launch, const xd_update_args *args) {
    for (int i = 0; i < args->average_count; i++)
        for (int64_t k = 0; k < args->array_count; k++)
            if (args->averages[i].arrays[k].target) XD_TRY(xdi_cuda_average_check(launch, &args->averages[i], k));
    return XD_OK;
}

/* `count` of the averages, at most MOST. */
template <int MOST>
static xd_result xdi_cuda_beside_some(const xd_launch *launch, const xd_average_args *averages, int count) {
    xdi_cuda_beside_options options = {};
    options.count = count;
    for (int i = 0; i < count; i++) options.each[i] = xdi_cuda_average_options_of(&averages[i]);
    return xdi_cuda_each_list<xdi_cuda_beside<MOST>>(
        averages->array_count,
        [&](int64_t k, xdi_cuda_beside<MOST> *item) { return xdi_cuda_beside_of(averages, count, k, item); },
        [&](const xdi_cuda_list<xdi_cuda_beside<MOST>> &list) {
            static_assert(sizeof list + sizeof options + sizeof(void *) <= 4096, "the parameters of a launch");
            xdi_cuda_grid grid;
            XD_TRY(xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_beside_kernel<MOST>, &grid));
            return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_beside_kernel<MOST>, list, options,
                                   (const xd_status *)launch->status);
        });
}

/* The averages beside those of the arrays, of what a step has just written. */
static xd_result xdi_cuda_beside_run(const xd_launch *launch, const xd_update_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    for (int at = 0; at < args->average_count; at += XDI_CUDA_BESIDE) {
        const int left = args->average_count - at;
        const xd_average_args *averages = args->averages + at;
        if (left <= 2)
            XD_TRY(xdi_cuda_beside_some<2>(launch, averages, left));
        else if (left <= 4)
            XD_TRY(xdi_cuda_beside_some<4>(launch, averages, left));
        else
            XD_TRY(xdi_cuda_beside_some<XDI_CUDA_BESIDE>(
                launch, averages, left < (int)XDI_CUDA_BESIDE ? left : (int)XDI_CUDA_BESIDE));
    }
    return XD_OK;
}

/* Units of 16, 8, 4, 2 or 1 bytes, as in copies. */
struct xdi_cuda_swap_item {
    char *a, *b;
    int64_t units;
    int unit;
};

template <typename T> static __device__ inline void xdi_cuda_swap_unit(char *a, char *b) {
    const T kept = *reinterpret_cast<const T *>(a);
    *reinterpret_cast<T *>(a) = *reinterpret_cast<const T *>(b);
    *reinterpret_cast<T *>(b) = kept;
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_swap_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_swap_item> list) {
    const int k = xdi_cuda_list_find(list, blockIdx.x);
    const xdi_cuda_swap_item &s = list.at[k];
    xdi_cuda_walk(
        xdi_cuda_span_of(blockIdx.x - list.first(k), s.units), false, [](int64_t) {},
        [&](int64_t i) {
            char *a = s.a + i * s.unit, *b = s.b + i * s.unit;
            if (s.unit == 16) {
                const auto kept = xdi_cuda_load16(a);
                xdi_cuda_store16(a, xdi_cuda_load16(b));
                xdi_cuda_store16(b, kept);
            } else if (s.unit == 8) {
                xdi_cuda_swap_unit<uint64_t>(a, b);
            } else if (s.unit == 4) {
                xdi_cuda_swap_unit<uint32_t>(a, b);
            } else if (s.unit == 2) {
                xdi_cuda_swap_unit<uint16_t>(a, b);
            } else {
                xdi_cuda_swap_unit<char>(a, b);
            }
        });
}

static xd_result xdi_cuda_swap(const xd_launch *launch, const xd_swap_array *arrays, int64_t array_count) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_list<xdi_cuda_swap_item>(
        array_count,
        [&](int64_t k, xdi_cuda_swap_item *item) {
            const xd_swap_array *s = &arrays[k];
            const uint64_t bits =
                (uint64_t)(uintptr_t)s->a | (uint64_t)(uintptr_t)s->b | (uint64_t)s->bytes;
            item->a = static_cast<char *>(s->a);
            item->b = static_cast<char *>(s->b);
            item->unit = xdi_cuda_move_unit_of(bits, 16);
            item->units = s->bytes / item->unit;
            return item->units;
        },
        [&](const xdi_cuda_list<xdi_cuda_swap_item> &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.chunks, XDI_CUDA_THREADS), xdi_cuda_swap_kernel,
                                   list);
        });
}

static xd_result xdi_cuda_average_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_lerp_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_cast_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_turn_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_average_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_beside_kernel<2>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_beside_kernel<4>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_beside_kernel<XDI_CUDA_BESIDE>));
    return xdi_cuda_load(ctx, xdi_cuda_swap_kernel);
}

/* >>cuda/optimizer.cu */

/* Optimizer steps. The formulas are in kernel/optimizer_scalar.h, and the bits are the same as on a CPU. They move bytes and
 * compute little: 16-byte accesses, each array read and written once, all of a thread's loads asked for before the first is used;
 * adam 28 bytes an element with bf16 gradients and parameters and f32 masters, 30 with f32 gradients. Grid: blocks of 256 threads,
 * each block a chunk at a time. Optimizers keep their list on the device, so a step is one launch, after one that counts it
 * and computes what depends on the count, once an array. */

/* ---- adam and sgd ---- */

/* What a schedule changes in every step. Arrays share a few of these rates, so they are not part of the list. */
struct xdi_cuda_rate {
    double learning_rate;
    float decay, weight_decay, step_size, root_correction;
    int64_t fresh;
};
static_assert(sizeof(xdi_cuda_rate) == 4 * sizeof(uint64_t), "without gaps: rates are compared by their bytes");

enum { XDI_CUDA_RATES = 16 };

struct xdi_cuda_update {
    float *master, *first, *second;
    void *value;
    const void *gradient;
    int64_t *steps;
    void *average;
    int64_t count;
    uint64_t key;
    int64_t origin;
    uint8_t value_dtype, gradient_dtype, average_dtype, rate, wide, unused[3];
};

/* What the kernel before the step has from the host. */
struct xdi_cuda_step_options {
    const float *gradient_scale;
    const xd_status *status;
    double beta1, beta2;
    bool adam;
    int rate_count;
    xdi_cuda_rate rates[XDI_CUDA_RATES];
};

/* And what it leaves for the step: the scalars of an array. */
struct alignas(16) xdi_cuda_step {
    xd_update_scalars scalars;
    int64_t number; /* 0: not known */
};
static_assert(sizeof(xdi_cuda_step) <= XDI_CUDA_LIST_SCRATCH * sizeof(uint64_t), "the scratch of an array");
static_assert(sizeof(xdi_cuda_update) == (XDI_CUDA_LIST_WORDS - 1) * sizeof(uint64_t), "the arrays that have a scratch");

struct xdi_cuda_update_options {
    const xd_status *status;
    xdi_cuda_lerp_options average;
    uint64_t rounding_seed;
    xd_update_rules rules;
};

/* The scalars of each array, and one step more in its count. One thread per array. */
static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_step_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_update> list,
                         const __grid_constant__ xdi_cuda_step_options options) {
    const int k = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= list.count || xd_status_refuses(options.status)) return;
    const xdi_cuda_update a = list.item(k);
    const xdi_cuda_rate &rate = options.rates[a.rate];
    xdi_cuda_step step;
    xd_update_scalars &s = step.scalars;
    s.scaled = options.gradient_scale != nullptr;
    s.scale = s.scaled ? *options.gradient_scale : 1.0f;
    s.decay = rate.decay;
    s.weight_decay = rate.weight_decay;
    s.step_size = rate.step_size;
    s.root_correction = rate.root_correction;
    s.fresh = rate.fresh != 0;
    step.number = 0;
    if (a.steps) {
        step.number = *a.steps += 1;
        s.fresh = step.number == 1;
        s.step_size = xd_update_step_size(rate.learning_rate, options.beta1, step.number, options.adam);
        if (options.adam) s.root_correction = xd_update_root_correction(options.beta2, step.number);
    }
    reinterpret_cast<xdi_cuda_step *>(list.scratch)[k] = step;
}

struct xdi_cuda_adam {
    const xdi_cuda_update_options &options;
    const xd_update_scalars &s;

    __device__ void operator()(float gradient, float &p, float &m, float &v) const {
        xd_adam_element(&options.rules, &s, gradient, &p, &m, &v);
    }
};

struct xdi_cuda_sgd {
    const xdi_cuda_update_options &options;
    const xd_update_scalars &s;

    __device__ void operator()(float gradient, float &p, float &buffer, float &) const {
        xd_sgd_element(&options.rules, &s, gradient, &p, &buffer);
    }
};

/* Four elements of an array, and the next access of its arrays' warp. */
template <bool HAS_SECOND> struct xdi_cuda_update_fours {
    xdi_cuda_four gradient, average;
    float master[4], first[4], second[4];

    __device__ void ask(const xdi_cuda_update &a, bool averages, int64_t i) {
        gradient = xdi_cuda_ask4(a.gradient, a.gradient_dtype, i);
        xdi_cuda_read4(a.master + i, master);
        xdi_cuda_read4(a.first + i, first);
        if (HAS_SECOND) xdi_cuda_read4(a.second + i, second);
        if (averages) average = xdi_cuda_ask4(a.average, a.average_dtype, i);
    }
    template <typename Step> __device__ void move(const xdi_cuda_update &a, const Step &step) {
        float g[4];
        xdi_cuda_widen4(gradient, a.gradient_dtype, g);
        XD_UNROLL
        for (int j = 0; j < 4; j++) step(g[j], master[j], first[j], second[j]);
    }
    __device__ void put(const xdi_cuda_update &a, const xdi_cuda_lerp_options &options, bool averages, int64_t i) {
        xdi_cuda_write4(a.master + i, master);
        xdi_cuda_write4(a.first + i, first);
        if (HAS_SECOND) xdi_cuda_write4(a.second + i, second);
        if (a.value) {
            const xdi_cuda_four value = xdi_cuda_narrow4(master, a.value_dtype);
            xdi_cuda_put4(a.value, a.value_dtype, i, value);
            if (averages) xdi_cuda_widen4(value, a.value_dtype, master);
        }
        if (averages)
            xdi_cuda_put4(a.average, a.average_dtype, i, xdi_cuda_lerp4(options, average, a.average_dtype, master));
    }
};

/* ROUNDED: arrays without a master copy may be in the list; the others pay nothing for them. */
template <typename Step, bool HAS_SECOND, bool ROUNDED>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS, ROUNDED ? 1 : 4)
    xdi_cuda_update_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_update> list,
                           const __grid_constant__ xdi_cuda_update_options options) {
    if (xd_status_refuses(options.status)) return;
    XD_SHARED(xdi_cuda_lerp_options, average, [1]); /* in registers they would spill */
    XD_SHARED(bool, averages, [1]);
    if (threadIdx.x == 0) {
        average[0] = options.average;
        averages[0] = xdi_cuda_lerp_take(&average[0]);
    }
    __syncthreads();
    xdi_cuda_each_kept(list, [&](int k, const xdi_cuda_update &a, xdi_cuda_span span) {
        const xdi_cuda_step now = reinterpret_cast<const xdi_cuda_step *>(list.scratch)[k];
        const Step step = { options, now.scalars };
        const bool rounded = ROUNDED && !a.master, moves = a.average && averages[0];
        const xd_philox random = xd_update_random(options.rounding_seed, a.key, now.number);
        xdi_cuda_walk4(
            span, a.wide != 0 && !rounded, /* four at a time have no registers left for random numbers */
            [&](const int64_t (&at)[XDI_CUDA_FOURS]) {
                xdi_cuda_update_fours<HAS_SECOND> fours[XDI_CUDA_FOURS];
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) fours[q].ask(a, moves, at[q]);
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) {
                    fours[q].move(a, step);
                    fours[q].put(a, average[0], moves, at[q]);
                }
            },
            [&](int64_t i) {
                float p = rounded ? xdi_cuda_read_float(a.value, XD_DTYPE_BF16, i) : a.master[i];
                float m = a.first[i], v = HAS_SECOND ? a.second[i] : 0.0f;
                step(xdi_cuda_read_float(a.gradient, a.gradient_dtype, i), p, m, v);
                if (rounded)
                    p = xdi_cuda_round(random, a.origin + i, p);
                else
                    a.master[i] = p;
                a.first[i] = m;
                if (HAS_SECOND) a.second[i] = v;
                if (a.value) xdi_cuda_write_float(a.value, a.value_dtype, i, p);
                if (!moves) return;
                if (a.value) p = xdi_cuda_as_stored(p, a.value_dtype);
                xdi_cuda_lerp_element(average[0], a.average, a.average_dtype, i, (double)p);
            });
    });
}

static xd_result xdi_cuda_update_check(const xd_launch *launch, const xd_update_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_update_array *a = &args->arrays[k];
        XD_REQUIRE(launch->ctx, xdi_cuda_is_narrow_float(a->gradient_dtype), XD_ERROR_DTYPE,
                    "array %lld: gradients are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->gradient_dtype));
        XD_REQUIRE(launch->ctx, !a->value || xdi_cuda_is_narrow_float(a->value_dtype), XD_ERROR_DTYPE,
                    "array %lld: parameters are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->value_dtype));
        XD_REQUIRE(launch->ctx, a->master || a->count == 0 || (a->value_dtype == XD_DTYPE_BF16 && a->steps),
                    XD_ERROR_DTYPE, "array %lld: %s values have a master copy, BF16 ones a step count",
                    (long long)k, xd_dtype_name(a->value_dtype));
        XD_REQUIRE(launch->ctx, !a->average || xdi_cuda_is_float(a->average_dtype), XD_ERROR_DTYPE,
                    "array %lld: cannot average F32 into %s", (long long)k, xd_dtype_name(a->average_dtype));
    }
    return XD_OK;
}

static xdi_cuda_rate xdi_cuda_rate_of(const xd_update_array *a) {
    xdi_cuda_rate rate;
    rate.learning_rate = a->learning_rate;
    rate.decay = a->decay;
    rate.weight_decay = a->weight_decay;
    rate.step_size = a->step_size;
    rate.root_correction = a->root_correction;
    rate.fresh = a->fresh;
    return rate;
}

static bool xdi_cuda_same_rate(const xdi_cuda_rate *a, const xdi_cuda_rate *b) {
    uint64_t x[4], y[4];
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

/* The index of an array's rate among the options; rate_count when it is not there. */
static int xdi_cuda_find_rate(const xdi_cuda_step_options *options, const xd_update_array *a) {
    const xdi_cuda_rate rate = xdi_cuda_rate_of(a);
    int i = 0;
    while (i < options->rate_count && !xdi_cuda_same_rate(&options->rates[i], &rate)) i++;
    return i;
}

/* The rate of an array in a list of updates. */
static int xdi_cuda_kept_rate(const xd_array_list *list, int64_t k) {
    enum { WORD = offsetof(xdi_cuda_update, rate) / sizeof(uint64_t), BYTE = offsetof(xdi_cuda_update, rate) % sizeof(uint64_t) };
    uint8_t bytes[sizeof(uint64_t)];
    memcpy(bytes, &list->there[WORD * list->count + k], sizeof bytes);
    return bytes[BYTE];
}

/* Puts the rates of arrays from `begin` on into the options; returns the first array whose rate does not fit. *same becomes false
 * where the list, if it is given, has another rate for an array. */
static int64_t xdi_cuda_take_rates(const xd_update_args *args, int64_t begin, const xd_array_list *list,
                                   xdi_cuda_step_options *options, bool *same) {
    options->rate_count = 0;
    for (int64_t k = begin; k < args->array_count; k++) {
        const int at = xdi_cuda_find_rate(options, &args->arrays[k]);
        if (list && xdi_cuda_kept_rate(list, k) != at) *same = false;
        if (at < options->rate_count) continue;
        if (at == XDI_CUDA_RATES) return k;
        options->rates[options->rate_count++] = xdi_cuda_rate_of(&args->arrays[k]);
    }
    return args->array_count;
}

/* Fills every byte, so that equal lists are equal bytes. */
static void xdi_cuda_update_of(const xd_update_array *a, const xdi_cuda_step_options *options,
                               bool has_second, xdi_cuda_update *u) {
    u->master = a->master;
    u->first = a->first;
    u->second = has_second ? a->second : nullptr;
    u->value = a->value;
    u->gradient = a->gradient;
    u->steps = a->steps;
    u->average = a->average;
    u->count = a->count;
    u->key = a->key;
    u->origin = a->origin;
    u->value_dtype = (uint8_t)a->value_dtype;
    u->gradient_dtype = (uint8_t)a->gradient_dtype;
    u->average_dtype = (uint8_t)a->average_dtype;
    u->rate = (uint8_t)xdi_cuda_find_rate(options, a);
    memset(u->unused, 0, sizeof u->unused);
    const uintptr_t addresses = (uintptr_t)u->master | (uintptr_t)u->first | (uintptr_t)u->second | (uintptr_t)u->value |
                                (uintptr_t)u->gradient | (uintptr_t)u->average;
    u->wide = addresses % 16 == 0 && !(u->average && a->average_dtype == XD_DTYPE_F64);
}

/* The step of `count` arrays whose rates are in the options: two launches when the list is kept. */
template <typename Step, bool HAS_SECOND, bool ROUNDED>
static xd_result xdi_cuda_update_arrays(const xd_launch *launch, const xd_update_array *arrays, int64_t count,
                                        const xdi_cuda_step_options &rates, const xdi_cuda_update_options &options,
                                        xd_array_list *keep, bool same) {
    const auto make_item = [&](int64_t k, xdi_cuda_update *item) {
        xdi_cuda_update_of(&arrays[k], &rates, HAS_SECOND, item);
        return item->count;
    };
    return xdi_cuda_listed<xdi_cuda_update>(
        launch, keep, same, count, make_item, [&](const xdi_cuda_kept<xdi_cuda_update> &list) {
            const int64_t blocks = (list.count + XDI_CUDA_THREADS - 1) / XDI_CUDA_THREADS;
            xdi_cuda_grid grid;
            XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_THREADS), xdi_cuda_step_kernel, list, rates));
            if (list.chunks == 0) return (xd_result)XD_OK;
            XD_TRY((xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_update_kernel<Step, HAS_SECOND, ROUNDED>, &grid)));
            return XDI_CUDA_LAUNCH(launch, grid, (xdi_cuda_update_kernel<Step, HAS_SECOND, ROUNDED>), list, options);
        });
}

static bool xdi_cuda_any_rounded(const xd_update_args *args) {
    for (int64_t k = 0; k < args->array_count; k++)
        if (!args->arrays[k].master && args->arrays[k].count > 0) return true;
    return false;
}

template <typename Step, bool HAS_SECOND>
static xd_result xdi_cuda_update_run(const xd_launch *launch, const xd_update_args *args) {
    const bool current = xdi_cuda_list_is_current(args->list, args->same, args->array_count);
    if (!current) XD_TRY(xdi_cuda_update_check(launch, args));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xdi_cuda_step_options rates = {};
    rates.gradient_scale = args->gradient_scale;
    rates.status = launch->status;
    rates.beta1 = args->beta1_exact;
    rates.beta2 = args->beta2_exact;
    rates.adam = HAS_SECOND;
    xdi_cuda_update_options options = {};
    options.status = launch->status;
    options.average = xdi_cuda_lerp_options_of(args->keep, args->weighted_sum, args->turn);
    options.rules.one_minus_beta1 = args->one_minus_beta1;
    options.rules.one_minus_beta2 = args->one_minus_beta2;
    options.rules.beta2 = args->beta2;
    options.rules.eps = args->eps;
    options.rules.momentum = args->momentum;
    options.rules.couple_decay = args->couple_decay;
    options.rules.maximize = args->maximize;
    options.rounding_seed = args->rounding_seed;
    const bool rounded = current ? args->list->rounded : xdi_cuda_any_rounded(args);
    for (int64_t begin = 0, end; begin < args->array_count; begin = end) {
        bool same = current;
        end = xdi_cuda_take_rates(args, begin, current ? args->list : nullptr, &rates, &same);
        xd_array_list *list = end - begin == args->array_count ? args->list : nullptr;
        if (list) list->rounded = rounded;
        if (!list && args->list) args->list->current = false;
        const auto run = rounded ? xdi_cuda_update_arrays<Step, HAS_SECOND, true>
                                 : xdi_cuda_update_arrays<Step, HAS_SECOND, false>;
        XD_TRY(run(launch, args->arrays + begin, end - begin, rates, options, list, same));
    }
    return XD_OK;
}

/* ---- scale ---- */

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_scale_kernel(void *data, int dtype, int64_t count, bool wide, float factor) {
    xdi_cuda_walk(
        xdi_cuda_span_of(blockIdx.x, count), wide,
        [&](int64_t i) {
            float values[8];
            xdi_cuda_read8(data, dtype, i, values);
            XD_UNROLL
            for (int j = 0; j < 8; j++) values[j] = xd_mulf(values[j], factor);
            xdi_cuda_write8(data, dtype, i, values);
        },
        [&](int64_t i) {
            xdi_cuda_write_float(data, dtype, i, xd_mulf(xdi_cuda_read_float(data, dtype, i), factor));
        });
}

static xd_result xdi_cuda_scale(const xd_launch *launch, const xd_scale_args *args) {
    XD_REQUIRE(launch->ctx, xdi_cuda_is_narrow_float(args->dtype), XD_ERROR_DTYPE,
                "scaling takes F32, BF16 or F16, not %s", xd_dtype_name(args->dtype));
    if (args->count <= 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(
        launch, xdi_cuda_grid_of((args->count + XDI_CUDA_CHUNK - 1) / XDI_CUDA_CHUNK, XDI_CUDA_THREADS),
        xdi_cuda_scale_kernel, args->data, (int)args->dtype, args->count, xdi_cuda_is_aligned16(args->data),
        args->factor);
}

static xd_result xdi_cuda_adam_run(const xd_launch *launch, const xd_update_args *args) {
    XD_TRY(xdi_cuda_beside_check(launch, args));
    XD_TRY((xdi_cuda_update_run<xdi_cuda_adam, true>(launch, args)));
    return xdi_cuda_beside_run(launch, args);
}

static xd_result xdi_cuda_sgd_run(const xd_launch *launch, const xd_update_args *args) {
    XD_TRY(xdi_cuda_beside_check(launch, args));
    XD_TRY((xdi_cuda_update_run<xdi_cuda_sgd, false>(launch, args)));
    return xdi_cuda_beside_run(launch, args);
}

static xd_result xdi_cuda_optimizer_load(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_adam, true, false>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_adam, true, true>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_sgd, false, false>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_sgd, false, true>)));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_step_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_patch_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_scale_kernel);
}

/* >>cuda/matmul.cu */

/* The matrix product of the table in plain CUDA: for INVARIANT mode, for the emulation, and without cuBLASLt. A block
 * of 256 threads computes a tile of 64 x 64 sums, a thread 4 x 4 of them; shared memory holds 16 terms of both
 * operands at a time. An element's sum runs over k in blocks of 256
 * terms, each from the first to the last term by fused multiply-adds, so its bits depend on k alone. Strides
 * are free: the transposed matrix is the same memory.
 *   grid ceil(m / 64) * ceil(n / 64); reads m n k / 64 elements of each side, mostly from the L2 cache. */

enum { XDI_CUDA_TILE = 64, XDI_CUDA_DEPTH = 16, XDI_CUDA_TERMS = 256, XDI_CUDA_TILE_ROW = XDI_CUDA_TILE + 4 };

/* Copies rows [row, row + 64) x terms [k, k + 16) of a matrix [rows, terms] into shared memory, term by term; zeros where the
 * matrix ends. Neighbouring threads read adjacent memory. */
static __device__ inline void xdi_cuda_tile_load(const xd_matrix &x, int64_t row_stride, int64_t term_stride,
                                                 int64_t rows, int64_t terms, int64_t row, int64_t k,
                                                 float (*tile)[XDI_CUDA_TILE_ROW]) {
    const bool along_terms = term_stride == 1;
    for (int i = (int)threadIdx.x; i < XDI_CUDA_TILE * XDI_CUDA_DEPTH; i += XDI_CUDA_THREADS) {
        const int r = along_terms ? i / XDI_CUDA_DEPTH : i % XDI_CUDA_TILE;
        const int t = along_terms ? i % XDI_CUDA_DEPTH : i / XDI_CUDA_TILE;
        const bool inside = row + r < rows && k + t < terms;
        tile[t][r] =
            inside ? xdi_cuda_read_float(x.data, (int)x.dtype, (row + r) * row_stride + (k + t) * term_stride)
                   : 0.0f;
    }
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_matmul_kernel(const __grid_constant__ xd_matmul_args args, int64_t tiles_across) {
    XD_SHARED(float, left, [XDI_CUDA_DEPTH][XDI_CUDA_TILE_ROW]);
    XD_SHARED(float, right, [XDI_CUDA_DEPTH][XDI_CUDA_TILE_ROW]);
    const int64_t m = args.a.rows, n = args.b.cols, terms = args.a.cols;
    const int64_t row = blockIdx.x / tiles_across * XDI_CUDA_TILE,
                  column = blockIdx.x % tiles_across * XDI_CUDA_TILE;
    const int down = (int)threadIdx.x / 16 * 4, across = (int)threadIdx.x % 16 * 4;
    float total[4][4], sum[4][4];
    XD_UNROLL
    for (int e = 0; e < 16; e++) {
        const int64_t r = row + down + e / 4, c = column + across + e % 4;
        total[e / 4][e % 4] = args.accumulate && r < m && c < n ? args.out[r * args.out_stride + c] : 0.0f;
        sum[e / 4][e % 4] = 0.0f;
    }
    for (int64_t k = 0; k < terms; k += XDI_CUDA_DEPTH) {
        xdi_cuda_tile_load(args.a, args.a.row_stride, args.a.col_stride, m, terms, row, k, left);
        xdi_cuda_tile_load(args.b, args.b.col_stride, args.b.row_stride, n, terms, column, k, right);
        __syncthreads();
        XD_UNROLL
        for (int t = 0; t < XDI_CUDA_DEPTH; t++) {
            XD_UNROLL
            for (int e = 0; e < 16; e++)
                sum[e / 4][e % 4] =
                    __fmaf_rn(left[t][down + e / 4], right[t][across + e % 4], sum[e / 4][e % 4]);
        }
        __syncthreads();
        if ((k + XDI_CUDA_DEPTH) % XDI_CUDA_TERMS != 0 && k + XDI_CUDA_DEPTH < terms) continue;
        XD_UNROLL
        for (int e = 0; e < 16; e++) {
            total[e / 4][e % 4] = __fadd_rn(total[e / 4][e % 4], sum[e / 4][e % 4]);
            sum[e / 4][e % 4] = 0.0f;
        }
    }
    XD_UNROLL
    for (int e = 0; e < 16; e++) {
        const int64_t r = row + down + e / 4, c = column + across + e % 4;
        if (r >= m || c >= n) continue;
        if (args.out_dtype == XD_DTYPE_BF16)
            xdi_cuda_narrow(total[e / 4][e % 4],
                            reinterpret_cast<xdi_cuda_bf16 *>(args.out) + r * args.out_stride + c);
        else
            args.out[r * args.out_stride + c] = total[e / 4][e % 4];
    }
}

static xd_result xdi_cuda_matmul_plain(const xd_launch *launch, const xd_matmul_args *args) {
    const int64_t down = (args->a.rows + XDI_CUDA_TILE - 1) / XDI_CUDA_TILE;
    const int64_t across = (args->b.cols + XDI_CUDA_TILE - 1) / XDI_CUDA_TILE;
    if (down == 0 || across == 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(down * across, XDI_CUDA_THREADS), xdi_cuda_matmul_kernel,
                           *args, across);
}

static xd_result xdi_cuda_matmul_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_matmul_kernel);
}

/* >>cuda/matmul_library.cu */

/* NVIDIA's cuBLASLt for the table's matrix products (matmul_cublas.cu): found, loaded and left. It is loaded at run time, so the
 * unit is linked without it; its header gives the types. Ranks that have it at different versions, or not all of them, compute
 * their own products (xd_ctx_meet_products). */

#if defined(__has_include)
#    if __has_include(<cublasLt.h>)
#        include <cublasLt.h>
#        include <dlfcn.h>
#        define XDI_CUDA_CUBLAS_IS_KNOWN
#    endif
#endif

#if defined(XDI_CUDA_CUBLAS_IS_KNOWN)

/* X(function of cublasLt.h): all functions that are used. */
#    define XDI_CUDA_CUBLAS_FUNCTIONS(X)        \
        X(cublasLtCreate)                       \
        X(cublasLtDestroy)                      \
        X(cublasLtGetProperty)                  \
        X(cublasLtGetVersion)                   \
        X(cublasLtGetStatusString)              \
        X(cublasLtMatmulDescCreate)             \
        X(cublasLtMatmulDescDestroy)            \
        X(cublasLtMatmulDescSetAttribute)       \
        X(cublasLtMatrixLayoutCreate)           \
        X(cublasLtMatrixLayoutDestroy)          \
        X(cublasLtMatmulPreferenceCreate)       \
        X(cublasLtMatmulPreferenceDestroy)      \
        X(cublasLtMatmulPreferenceSetAttribute) \
        X(cublasLtMatmulAlgoGetHeuristic)       \
        X(cublasLtMatmul)

/* A product as cuBLASLt is asked for it: matrices are those of b, a and out, each transposed. No two products of one shape need
 * different algorithms, and all of it is compared as bytes. */
struct xdi_cuda_cublas_shape {
    int64_t rows[3], columns[3], stride[3];
    int32_t type[3], turn[2]; /* cudaDataType_t, cublasOperation_t */
    uint32_t alignment[3];    /* bytes */
};

/* What was found for a shape; also that nothing was. */
struct xdi_cuda_cublas_kept {
    xdi_cuda_cublas_shape shape;
    cublasLtMatmulAlgo_t algorithm;
    bool found;
};

/* A head has six shapes, and as many for the rows of its last chunk. */
enum { XDI_CUDA_CUBLAS_KEPT = 64 };

#    define XDI_CUDA_CUBLAS_MEMBER(function) decltype(&::function) function;
struct xdi_cuda_cublas {
    void *library; /* from dlopen */
    cublasLtHandle_t handle;
    char *memory; /* of the device, since the first product: cuBLASLt's workspace, then the room for rounded elements */
    xdi_cuda_cublas_kept kept[XDI_CUDA_CUBLAS_KEPT];
    int64_t found; /* so far; the oldest entry makes room */
    XDI_CUDA_CUBLAS_FUNCTIONS(XDI_CUDA_CUBLAS_MEMBER)
};
#    undef XDI_CUDA_CUBLAS_MEMBER

/* NVIDIA recommends 32 MiB for Hopper; 96 MiB hold the gradient of 256 rows of 196608 logits. */
static const size_t xdi_cuda_cublas_workspace_bytes = (size_t)32 << 20;
static const size_t xdi_cuda_cublas_room_bytes = (size_t)96 << 20;

/* A status of cuBLASLt as an xd_result: the failed call as written in the source, and the library's text for the status. */
static xd_result xdi_cuda_cublas_result(xd_ctx *ctx, const xdi_cuda_cublas *cublas, cublasStatus_t status,
                                        const char *call, const char *file, int line, const char *function) {
    if (status == CUBLAS_STATUS_SUCCESS) return XD_OK;
    const xd_result result = status == CUBLAS_STATUS_ALLOC_FAILED ? XD_ERROR_MEMORY : XD_ERROR_DEVICE;
    return xd_fail(ctx, result, file, line, function, "%.160s: %s", call,
                   cublas->cublasLtGetStatusString(status));
}

/* XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtCreate(arguments...)); */
#    define XDI_CUDA_CUBLAS_TRY(ctx, cublas, call) \
        XD_TRY(xdi_cuda_cublas_result((ctx), (cublas), (cublas)->call, #call, __FILE__, __LINE__, __func__))

/* ---- loading ---- */

/* Why the library is not used: with no name, this is no error. */
struct xdi_cuda_cublas_refusal {
    xd_result result;
    char words[320];
};

/* Opens a file beside the CUDA runtime that the process has loaded; NULL: there is none, as where it is linked into a program. */
static void *xdi_cuda_open_beside_runtime(const char *name) {
    char path[1024];
    Dl_info place = {};
    snprintf(path, sizeof path, "libcudart.so.%d", CUDART_VERSION / 1000);
    void *runtime = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    void *inside = runtime ? dlsym(runtime, "cudaGetDevice") : NULL;
    const bool known = inside && dladdr(inside, &place) != 0 && place.dli_fname;
    const char *slash = known ? strrchr(place.dli_fname, '/') : NULL;
    const int folder = slash ? (int)(slash - place.dli_fname) : 0;
    if (slash) snprintf(path, sizeof path, "%.*s/%s", folder, place.dli_fname, name);
    if (runtime) dlclose(runtime);
    return slash ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

static bool xdi_cuda_cublas_find(xdi_cuda_cublas *cublas, const char *name, bool beside,
                                 xdi_cuda_cublas_refusal *no) {
    cublas->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!cublas->library) {
        const char *words = dlerror();
        snprintf(no->words, sizeof no->words, "cuBLASLt cannot be loaded: %s", words ? words : name);
        if (beside) cublas->library = xdi_cuda_open_beside_runtime(name);
    }
    if (!cublas->library) return false;
#    define XDI_CUDA_CUBLAS_FIND(function)                                                             \
        cublas->function = reinterpret_cast<decltype(&::function)>(dlsym(cublas->library, #function)); \
        if (!cublas->function) {                                                                       \
            snprintf(no->words, sizeof no->words, "%s has no function " #function, name);              \
            return false;                                                                              \
        }
    XDI_CUDA_CUBLAS_FUNCTIONS(XDI_CUDA_CUBLAS_FIND)
#    undef XDI_CUDA_CUBLAS_FIND
    return true;
}

/* What the header declares about functions and their arguments holds within a major version. */
static bool xdi_cuda_cublas_fits(const xdi_cuda_cublas *cublas, const char *name,
                                 xdi_cuda_cublas_refusal *no) {
    int major = 0;
    if (cublas->cublasLtGetProperty(MAJOR_VERSION, &major) == CUBLAS_STATUS_SUCCESS &&
        major == CUBLAS_VER_MAJOR)
        return true;
    snprintf(no->words, sizeof no->words, "%s is version %zu of cuBLASLt, the unit was built for version %d",
             name, cublas->cublasLtGetVersion(), CUBLAS_VERSION);
    return false;
}

static bool xdi_cuda_cublas_start(xdi_cuda_cublas *cublas, const char *name, bool beside,
                                  xdi_cuda_cublas_refusal *no) {
    no->result = XD_ERROR_UNSUPPORTED;
    if (!xdi_cuda_cublas_find(cublas, name, beside, no) || !xdi_cuda_cublas_fits(cublas, name, no))
        return false;
    const cublasStatus_t status = cublas->cublasLtCreate(&cublas->handle);
    if (status == CUBLAS_STATUS_SUCCESS) return true;
    no->result = status == CUBLAS_STATUS_ALLOC_FAILED ? XD_ERROR_MEMORY : XD_ERROR_DEVICE;
    snprintf(no->words, sizeof no->words, "cublasLtCreate(&handle): %s", cublas->cublasLtGetStatusString(status));
    return false;
}

/* The device is the current one; its work has ended. */
static void xdi_cuda_cublas_close(xd_cuda *cuda) {
    xdi_cuda_cublas *cublas = cuda->cublas;
    if (!cublas) return;
    if (cublas->memory) cuda->allocator.release(cuda->allocator.user, cublas->memory);
    if (cublas->handle) cublas->cublasLtDestroy(cublas->handle);
    if (cublas->library) dlclose(cublas->library);
    xd_release(cuda->ctx, cublas);
    cuda->cublas = NULL;
}

/* name: as xd_cuda_desc.cublas, but never "none". What was created before a failure is destroyed by xdi_cuda_cublas_close. */
static xd_result xdi_cuda_cublas_open(xd_ctx *ctx, xd_cuda *cuda, const char *name) {
    char of_this_toolkit[32];
    xdi_cuda_cublas_refusal no = {};
    const bool is_named = name && name[0];
    snprintf(of_this_toolkit, sizeof of_this_toolkit, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    cuda->cublas = (xdi_cuda_cublas *)xd_allocate(ctx, sizeof *cuda->cublas);
    XD_REQUIRE(ctx, cuda->cublas, XD_ERROR_MEMORY, "no room for the functions of cuBLASLt");
    if (xdi_cuda_cublas_start(cuda->cublas, is_named ? name : of_this_toolkit, !is_named, &no)) {
        cuda->kernels.products.library = (uint32_t)cuda->cublas->cublasLtGetVersion();
        return XD_OK;
    }
    if (is_named) return XD_FAIL(ctx, no.result, "%s", no.words);
    xdi_cuda_cublas_close(cuda);
    xd_log(ctx, XD_LOG_INFO, "matrix products are the unit's own: %s", no.words);
    return XD_OK;
}

/* ---- memory ---- */

/* During its lifetime this thread may load kernels and allocate while a stream is captured, which takes no part in it. */
struct xdi_cuda_relaxed {
    cudaStreamCaptureMode mode;
    bool changed;

    xdi_cuda_relaxed() : mode(cudaStreamCaptureModeRelaxed) {
        changed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
    }
    ~xdi_cuda_relaxed() {
        if (changed) cudaThreadExchangeStreamCaptureMode(&mode);
    }
    xdi_cuda_relaxed(const xdi_cuda_relaxed &) = delete;
    xdi_cuda_relaxed &operator=(const xdi_cuda_relaxed &) = delete;
};

/* The library that this context's next product may use; NULL: it is the unit's own. */
static xdi_cuda_cublas *xdi_cuda_cublas_of(const xd_launch *launch) {
    const xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    const bool invariant = xd_ctx_settings(launch->ctx)->reduction == XD_REDUCTION_INVARIANT;
    return cuda->kernels.products.library && !invariant ? cuda->cublas : NULL;
}

/* What the first product allocates, in a capture too. */
static xd_result xdi_cuda_cublas_prepare(const xd_launch *launch) {
    const xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    xdi_cuda_cublas *cublas = xdi_cuda_cublas_of(launch);
    const size_t bytes = xdi_cuda_cublas_workspace_bytes + xdi_cuda_cublas_room_bytes;
    if (!cublas || cublas->memory) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_relaxed relaxed;
    cublas->memory = (char *)cuda->allocator.allocate(cuda->allocator.user, bytes);
    XD_REQUIRE(launch->ctx, cublas->memory, XD_ERROR_MEMORY,
               "no room for %zu bytes for the products of cuBLASLt on device %d; xd_cuda_desc.cublas \"none\" "
               "takes none",
               bytes, cuda->device);
    return XD_OK;
}

#else

static xd_result xdi_cuda_cublas_open(xd_ctx *ctx, xd_cuda *, const char *name) {
    XD_REQUIRE(ctx, !name || !name[0], XD_ERROR_UNSUPPORTED, "the CUDA unit was built without cublasLt.h");
    xd_log(ctx, XD_LOG_INFO, "matrix products are the unit's own: it was built without cublasLt.h");
    return XD_OK;
}

static void xdi_cuda_cublas_close(xd_cuda *) {}

static xd_result xdi_cuda_cublas_prepare(const xd_launch *) {
    return XD_OK;
}

#endif

/* Ranks have agreed on it. The library stays loaded: work of it may be on its way. */
static void xdi_cuda_products_own(xd_ctx *ctx) {
    xdi_cuda_of(ctx)->kernels.products.library = 0;
}

static xd_product_kernels xdi_cuda_products_table() {
    xd_product_kernels table = {};
    table.narrow = true;
    table.prepare = xdi_cuda_cublas_prepare;
    table.own = xdi_cuda_products_own;
    return table;
}

/* >>cuda/matmul_cublas.cu */

/* The table's matrix product by NVIDIA's cuBLASLt, where that is loaded (matmul_library.cu).
 *
 * cuBLASLt knows matrices stored by columns, and out = a b stored by rows is out^T = b^T a^T stored by
 * columns. Both sides are treated alike: as matrices [rows, terms], a and the transposed b, in which the
 * terms of a row or the rows of a term are neighbours. Read by columns, the former is the transposed matrix
 * and the latter the matrix.
 *
 * Where products are requested in bf16, an operand in f32 is first rounded into memory of this unit, as many rows at a time as
 * fit; these are rows or columns of the result, so no sum is split. Products that do not fit this form, and those for which
 * cuBLASLt has no algorithm, are computed by the plain kernel. Sums are in f32, also of F32 factors: never in TF32. */

#if defined(XDI_CUDA_CUBLAS_IS_KNOWN)

/* ---- a side of a product ---- */

/* A matrix [rows, terms] as lines of neighbours, `stride` elements from one line to the next. */
struct xdi_cuda_lines {
    bool of_terms; /* a line is a row; else a term of all rows */
    int64_t count, length, stride;
};

/* The stride does not matter where there is one element or one line. False where neighbours in the matrix are not adjacent in
 * memory, and where lines overlap. */
static bool xdi_cuda_lines_are(int64_t count, int64_t stride, int64_t length, int64_t step) {
    return (step == 1 || length == 1) && (count == 1 || stride >= length);
}

static bool xdi_cuda_lines_of(const xd_matrix &x, xdi_cuda_lines *lines) {
    lines->of_terms = xdi_cuda_lines_are(x.rows, x.row_stride, x.cols, x.col_stride);
    if (!lines->of_terms && !xdi_cuda_lines_are(x.cols, x.col_stride, x.rows, x.row_stride)) return false;
    lines->count = lines->of_terms ? x.rows : x.cols;
    lines->length = lines->of_terms ? x.cols : x.rows;
    lines->stride = lines->of_terms ? x.row_stride : x.col_stride;
    if (lines->count == 1) lines->stride = lines->length;
    return true;
}

/* Rows [row, row + rows) of a matrix. */
static xd_matrix xdi_cuda_matrix_rows(const xd_matrix &x, int64_t row, int64_t rows) {
    xd_matrix part = x;
    part.data = (const char *)x.data + row * x.row_stride * (int64_t)xd_dtype_size(x.dtype);
    part.rows = rows;
    return part;
}

/* ---- rounding to bf16 ----
 *
 * A thread rounds 8 consecutive elements of a line: it reads 32 bytes, in two loads where all lines begin on 16 bytes, and
 * writes 16. Lines are written to the unit's memory at multiples of 16 bytes, padded with zeros.
 *   grid lines * pitch / 2048, block 256; the index needs a division, whose latency the memory accesses hide. */

enum { XDI_CUDA_ROUNDED = 8 };

static int64_t xdi_cuda_cublas_pitch(int64_t length) {
    return (length + XDI_CUDA_ROUNDED - 1) / XDI_CUDA_ROUNDED * XDI_CUDA_ROUNDED;
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_cublas_round_kernel(const float *from, xdi_cuda_lines lines, bool aligned, xdi_cuda_bf16 *to) {
    const int64_t packs = (lines.length + XDI_CUDA_ROUNDED - 1) / XDI_CUDA_ROUNDED;
    const int64_t i = (int64_t)blockIdx.x * XDI_CUDA_THREADS + threadIdx.x;
    if (i >= lines.count * packs) return;
    const int64_t line = i / packs, at = (i - line * packs) * XDI_CUDA_ROUNDED, left = lines.length - at;
    const float *source = from + line * lines.stride + at;
    xdi_cuda_pack<xdi_cuda_bf16> rounded;
    if (aligned && left >= XDI_CUDA_ROUNDED) {
        const xdi_cuda_pack<float> low = xdi_cuda_load16(source), high = xdi_cuda_load16(source + 4);
        XD_UNROLL
        for (int e = 0; e < 4; e++) {
            xdi_cuda_narrow(low.at[e], &rounded.at[e]);
            xdi_cuda_narrow(high.at[e], &rounded.at[4 + e]);
        }
    } else {
        XD_UNROLL
        for (int e = 0; e < XDI_CUDA_ROUNDED; e++)
            xdi_cuda_narrow(e < left ? source[e] : 0.0f, &rounded.at[e]);
    }
    xdi_cuda_store16(to + i * XDI_CUDA_ROUNDED, rounded);
}

/* One operand: the whole matrix, and how many of its rows are multiplied at a time. */
struct xdi_cuda_side {
    xd_matrix all;       /* [rows, terms] */
    xdi_cuda_bf16 *room; /* for `piece` rows in bf16; NULL: they are read in place */
    int64_t piece;
};

/* The operand with `bytes` at `room` for its rounded rows; false where not even one row fits. Blocks are multiples of 8 rows
 * where possible, so that those of the result begin on 16 bytes where the result does. */
static bool xdi_cuda_side_of(const xd_matrix &all, char *room, size_t bytes, xdi_cuda_side *side) {
    xdi_cuda_lines lines;
    if (!xdi_cuda_lines_of(all, &lines)) return false;
    side->all = all;
    side->room = reinterpret_cast<xdi_cuda_bf16 *>(room);
    side->piece = all.rows;
    if (!room) return true;
    const int64_t elements = (int64_t)(bytes / sizeof(xdi_cuda_bf16));
    const int64_t fit = lines.of_terms ? elements / xdi_cuda_cublas_pitch(all.cols)
                                       : elements / all.cols / XDI_CUDA_ROUNDED * XDI_CUDA_ROUNDED;
    if (fit < all.rows)
        side->piece = fit < XDI_CUDA_ROUNDED ? fit : fit / XDI_CUDA_ROUNDED * XDI_CUDA_ROUNDED;
    return side->piece > 0;
}

/* The rows of a block as they are multiplied: in place, or where their bf16 form is written. */
static xd_matrix xdi_cuda_side_rows(const xdi_cuda_side &side, int64_t row, int64_t rows) {
    xd_matrix part = xdi_cuda_matrix_rows(side.all, row, rows);
    xdi_cuda_lines lines;
    if (!side.room || !xdi_cuda_lines_of(part, &lines)) return part;
    const int64_t pitch = xdi_cuda_cublas_pitch(lines.length);
    part.data = side.room;
    part.dtype = XD_DTYPE_BF16;
    part.row_stride = lines.of_terms ? pitch : 1;
    part.col_stride = lines.of_terms ? 1 : pitch;
    return part;
}

static xd_result xdi_cuda_side_round(const xd_launch *launch, const xdi_cuda_side &side, int64_t row,
                                     int64_t rows) {
    const xd_matrix part = xdi_cuda_matrix_rows(side.all, row, rows);
    xdi_cuda_lines lines;
    if (!side.room || !xdi_cuda_lines_of(part, &lines)) return XD_OK;
    const int64_t threads = lines.count * (xdi_cuda_cublas_pitch(lines.length) / XDI_CUDA_ROUNDED);
    const bool aligned = xdi_cuda_is_aligned16(part.data) && lines.stride % 4 == 0;
    return XDI_CUDA_LAUNCH(
        launch, xdi_cuda_grid_of((threads + XDI_CUDA_THREADS - 1) / XDI_CUDA_THREADS, XDI_CUDA_THREADS),
        xdi_cuda_cublas_round_kernel, (const float *)part.data, lines, aligned, side.room);
}

/* ---- one product ---- */

static cudaDataType_t xdi_cuda_cublas_type(xd_dtype dtype) {
    return dtype == XD_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* One of the three matrices; alignment beyond 16 bytes is not passed on: the bits would depend on it. */
static void xdi_cuda_cublas_shape_set(xdi_cuda_cublas_shape *shape, int which, int64_t rows, int64_t columns,
                                      int64_t stride, xd_dtype dtype, const void *address) {
    shape->rows[which] = rows;
    shape->columns[which] = columns;
    shape->stride[which] = stride;
    shape->type[which] = xdi_cuda_cublas_type(dtype);
    shape->alignment[which] = (uint32_t)xdi_cuda_move_unit_of((uint64_t)(uintptr_t)address, 16);
}

static void xdi_cuda_cublas_shape_side(xdi_cuda_cublas_shape *shape, const xd_matrix &x, bool is_first) {
    xdi_cuda_lines lines = {};
    xdi_cuda_lines_of(x, &lines);
    xdi_cuda_cublas_shape_set(shape, is_first ? 0 : 1, lines.length, lines.count, lines.stride, x.dtype, x.data);
    shape->turn[is_first ? 0 : 1] = lines.of_terms == is_first ? CUBLAS_OP_T : CUBLAS_OP_N;
}

static void xdi_cuda_cublas_shape_of(const xd_matmul_args &args, xdi_cuda_cublas_shape *shape) {
    const int64_t m = args.a.rows, n = args.b.cols;
    memset(shape, 0, sizeof *shape);
    xdi_cuda_cublas_shape_side(shape, xd_matrix_transposed(args.b), true);
    xdi_cuda_cublas_shape_side(shape, args.a, false);
    xdi_cuda_cublas_shape_set(shape, 2, n, m, m == 1 ? n : args.out_stride, args.out_dtype, args.out);
}

/* A product of two operands of one dtype in cuBLASLt's types; all of it is host memory. */
struct xdi_cuda_cublas_product {
    const xdi_cuda_cublas *cublas;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulPreference_t preference;

    explicit xdi_cuda_cublas_product(const xdi_cuda_cublas *library)
        : cublas(library), operation(NULL), layout(), preference(NULL) {}
    ~xdi_cuda_cublas_product() {
        if (preference) cublas->cublasLtMatmulPreferenceDestroy(preference);
        for (cublasLtMatrixLayout_t one : layout)
            if (one) cublas->cublasLtMatrixLayoutDestroy(one);
        if (operation) cublas->cublasLtMatmulDescDestroy(operation);
    }
    xdi_cuda_cublas_product(const xdi_cuda_cublas_product &) = delete;
    xdi_cuda_cublas_product &operator=(const xdi_cuda_cublas_product &) = delete;

    xd_result describe(xd_ctx *ctx, const xdi_cuda_cublas_shape &shape) {
        static const cublasLtMatmulDescAttributes_t turns[2] = { CUBLASLT_MATMUL_DESC_TRANSA,
                                                                 CUBLASLT_MATMUL_DESC_TRANSB };
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        for (int i = 0; i < 2; i++)
            XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                                cublasLtMatmulDescSetAttribute(operation, turns[i], &shape.turn[i],
                                                               sizeof shape.turn[i]));
        for (int i = 0; i < 3; i++)
            XDI_CUDA_CUBLAS_TRY(
                ctx, cublas,
                cublasLtMatrixLayoutCreate(&layout[i], (cudaDataType_t)shape.type[i], (uint64_t)shape.rows[i],
                                           (uint64_t)shape.columns[i], shape.stride[i]));
        return XD_OK;
    }

    xd_result prefer(xd_ctx *ctx, const xdi_cuda_cublas_shape &shape) {
        static const cublasLtMatmulPreferenceAttributes_t of[4] = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
        };
        const uint64_t most = xdi_cuda_cublas_workspace_bytes;
        XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtMatmulPreferenceCreate(&preference));
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulPreferenceSetAttribute(
                                preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
        for (int i = 0; i < 4; i++)
            XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                                cublasLtMatmulPreferenceSetAttribute(preference, of[i],
                                                                     &shape.alignment[i < 2 ? i : 2],
                                                                     sizeof shape.alignment[0]));
        return XD_OK;
    }
};

/* Asks for the algorithm of a product that has been described. */
static xd_result xdi_cuda_cublas_ask(xd_ctx *ctx, xdi_cuda_cublas_product *p, xdi_cuda_cublas_kept *kept) {
    cublasLtMatmulHeuristicResult_t best = {};
    int count = 0;
    XD_TRY(p->prefer(ctx, kept->shape));
    const cublasStatus_t status = p->cublas->cublasLtMatmulAlgoGetHeuristic(
        p->cublas->handle, p->operation, p->layout[0], p->layout[1], p->layout[2], p->layout[2],
        p->preference, 1, &best, &count);
    kept->found = status == CUBLAS_STATUS_SUCCESS && count > 0 && best.state == CUBLAS_STATUS_SUCCESS;
    kept->algorithm = best.algo;
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return XD_OK;
    return xdi_cuda_cublas_result(ctx, p->cublas, status, "cublasLtMatmulAlgoGetHeuristic(...)", __FILE__,
                                  __LINE__, __func__);
}

/* The entry of a shape that has been met; NULL. */
static const xdi_cuda_cublas_kept *xdi_cuda_cublas_met(const xdi_cuda_cublas *cublas,
                                                       const xdi_cuda_cublas_shape &shape) {
    for (int64_t i = 0; i < cublas->found && i < XDI_CUDA_CUBLAS_KEPT; i++)
        if (memcmp(&cublas->kept[i].shape, &shape, sizeof shape) == 0) return &cublas->kept[i];
    return NULL;
}

/* *taken: false where cuBLASLt has no algorithm for the product; nothing has been launched then. */
static xd_result xdi_cuda_cublas_multiply(const xd_launch *launch, xdi_cuda_cublas *cublas,
                                          const xd_matmul_args &args, bool *taken) {
    const float alpha = 1.0f, beta = args.accumulate ? 1.0f : 0.0f;
    xdi_cuda_cublas_kept fresh = {};
    xdi_cuda_cublas_product p(cublas);
    xdi_cuda_cublas_shape_of(args, &fresh.shape);
    const xdi_cuda_cublas_kept *kept = xdi_cuda_cublas_met(cublas, fresh.shape);
    *taken = kept && kept->found;
    if (kept && !kept->found) return XD_OK;
    XD_TRY(p.describe(launch->ctx, fresh.shape));
    if (!kept) {
        XD_TRY(xdi_cuda_cublas_ask(launch->ctx, &p, &fresh));
        xdi_cuda_cublas_kept *place = &cublas->kept[cublas->found++ % XDI_CUDA_CUBLAS_KEPT];
        *place = fresh;
        kept = place;
        *taken = kept->found;
        if (!kept->found) return XD_OK;
    }
    XDI_CUDA_CUBLAS_TRY(launch->ctx, cublas,
                        cublasLtMatmul(cublas->handle, p.operation, &alpha, args.b.data, p.layout[0],
                                       args.a.data, p.layout[1], &beta, args.out, p.layout[2], args.out,
                                       p.layout[2], &kept->algorithm, cublas->memory,
                                       xdi_cuda_cublas_workspace_bytes, (cudaStream_t)launch->stream));
    return XD_OK;
}

/* Rows of a times columns of b; both are rounded already. */
static xd_result xdi_cuda_cublas_piece(const xd_launch *launch, const xd_matmul_args &args,
                                       const xdi_cuda_side &a, int64_t row, int64_t rows,
                                       const xdi_cuda_side &b, int64_t column, int64_t columns) {
    bool taken = false;
    xd_matmul_args piece = args;
    piece.a = xdi_cuda_side_rows(a, row, rows);
    piece.b = xd_matrix_transposed(xdi_cuda_side_rows(b, column, columns));
    piece.out = reinterpret_cast<float *>(reinterpret_cast<char *>(args.out) +
                                          (row * args.out_stride + column) *
                                              (int64_t)xd_dtype_size(args.out_dtype));
    XD_TRY(xdi_cuda_cublas_multiply(launch, xdi_cuda_of(launch->ctx)->cublas, piece, &taken));
    if (taken) return XD_OK;
    piece.a = xdi_cuda_matrix_rows(a.all, row, rows);
    piece.b = xd_matrix_transposed(xdi_cuda_matrix_rows(b.all, column, columns));
    return xdi_cuda_matmul_plain(launch, &piece);
}

static xd_result xdi_cuda_cublas_pieces(const xd_launch *launch, const xd_matmul_args &args,
                                        const xdi_cuda_side &a, const xdi_cuda_side &b) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_relaxed relaxed;
    for (int64_t row = 0; row < a.all.rows; row += a.piece) {
        const int64_t rows = a.all.rows - row < a.piece ? a.all.rows - row : a.piece;
        XD_TRY(xdi_cuda_side_round(launch, a, row, rows));
        for (int64_t column = 0; column < b.all.rows; column += b.piece) {
            const int64_t columns = b.all.rows - column < b.piece ? b.all.rows - column : b.piece;
            /* A b that is one block is rounded once, for all blocks of a. */
            if (row == 0 || columns < b.all.rows) XD_TRY(xdi_cuda_side_round(launch, b, column, columns));
            XD_TRY(xdi_cuda_cublas_piece(launch, args, a, row, rows, b, column, columns));
        }
    }
    return XD_OK;
}

/* Both operands with their part of the room; false for a product that the plain kernel must compute. */
static bool xdi_cuda_cublas_sides(const xdi_cuda_cublas *cublas, const xd_matmul_args &args, xdi_cuda_side *a,
                                  xdi_cuda_side *b) {
    const xd_dtype left = args.a.dtype, right = args.b.dtype;
    const bool known =
        (left == XD_DTYPE_F32 || left == XD_DTYPE_BF16) && (right == XD_DTYPE_F32 || right == XD_DTYPE_BF16);
    if (!known || (left != right && !args.bf16)) return false;
    if (args.out_dtype == XD_DTYPE_BF16 && (left != XD_DTYPE_BF16 || right != XD_DTYPE_BF16)) return false;
    if (args.a.rows > 1 && args.out_stride < args.b.cols) return false;
    const bool round_a = args.bf16 && left == XD_DTYPE_F32, round_b = args.bf16 && right == XD_DTYPE_F32;
    const size_t each = xdi_cuda_cublas_room_bytes / (round_a && round_b ? 2 : 1);
    char *room = cublas->memory + xdi_cuda_cublas_workspace_bytes;
    return xdi_cuda_side_of(args.a, round_a ? room : NULL, each, a) &&
           xdi_cuda_side_of(xd_matrix_transposed(args.b), round_b ? room + (round_a ? each : 0) : NULL, each,
                            b);
}

static xd_result xdi_cuda_matmul(const xd_launch *launch, const xd_matmul_args *args) {
    xdi_cuda_cublas *cublas = xdi_cuda_cublas_of(launch);
    const bool empty = args->a.rows <= 0 || args->a.cols <= 0 || args->b.cols <= 0;
    xd_matmul_args whole = *args;
    xdi_cuda_side a, b;
    if (!whole.out_dtype) whole.out_dtype = XD_DTYPE_F32;
    if (cublas && !empty) XD_TRY(xdi_cuda_cublas_prepare(launch));
    if (!cublas || empty || !xdi_cuda_cublas_sides(cublas, whole, &a, &b))
        return xdi_cuda_matmul_plain(launch, &whole);
    return xdi_cuda_cublas_pieces(launch, whole, a, b);
}

static xd_result xdi_cuda_matmul_cublas_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_cublas_round_kernel);
}

#else

static xd_result xdi_cuda_matmul(const xd_launch *launch, const xd_matmul_args *args) {
    return xdi_cuda_matmul_plain(launch, args);
}

static xd_result xdi_cuda_matmul_cublas_load(xd_ctx *) {
    return XD_OK;
}

#endif

/* >>cuda/loss.cuh */

/* Rows of logits: the threads of a row, reading and writing its elements, and sums of terms.
 *
 * TEAM threads work on a row: a warp on short rows, so that a block has eight of them, and the whole block on long
 * ones. A thread processes eight columns at a time, 16 bytes per load where the row is aligned to 16 bytes; it adds
 * these eight in f32 and everything else in double. Every sum has one order, whatever the grid. */

enum { XDI_CUDA_TEAM_BLOCK = 256, XDI_CUDA_SHORT_ROW = 2048, XDI_CUDA_EIGHT = 8 };

#define XDI_CUDA_LOG2E 1.4426950408889634
#define XDI_CUDA_LN2 0.69314718055994531

/* Blocks of the kernels here. The bound lets ptxas use as many registers as a block can have; otherwise it spills some
 * to have more blocks on a multiprocessor. */
#define XDI_CUDA_KERNEL __launch_bounds__(XDI_CUDA_TEAM_BLOCK)
#define XDI_CUDA_WIDE_KERNEL __launch_bounds__(XDI_CUDA_TEAM_BLOCK, 1)

/* Runs the statements with TEAM as the number of threads for a row of `columns` columns. */
#define XDI_CUDA_TEAMS(columns, TEAM, ...)   \
    if ((columns) <= XDI_CUDA_SHORT_ROW) {   \
        enum { TEAM = XDI_CUDA_WARP };       \
        __VA_ARGS__                          \
    } else {                                 \
        enum { TEAM = XDI_CUDA_TEAM_BLOCK }; \
        __VA_ARGS__                          \
    }

/* Runs the statements with T as the storage type of logits; the caller has checked that it is F32 or BF16. */
#define XDI_CUDA_LOGITS(dtype, T, ...) \
    if ((dtype) == XD_DTYPE_F32) {     \
        typedef float T;               \
        __VA_ARGS__                    \
    } else {                           \
        typedef xdi_cuda_bf16 T;       \
        __VA_ARGS__                    \
    }

/* Runs the statements with the types of a call's logits, of which Y is none without a teacher, and TEAM. */
#define XDI_CUDA_LOSS_CASES(a, X, Y, TEAM, ...)                                                        \
    {                                                                                                  \
        const bool given = (a)->teacher.data && (a)->soft_weight != 0.0;                               \
        if ((a)->vocab.end - (a)->vocab.begin <= XDI_CUDA_SHORT_ROW) {                                 \
            enum { TEAM = XDI_CUDA_WARP };                                                             \
            XDI_CUDA_LOSS_ANY(given, X, Y, { __VA_ARGS__ })                                            \
        } else {                                                                                       \
            enum { TEAM = XDI_CUDA_TEAM_BLOCK };                                                       \
            if (!given) {                                                                              \
                XDI_CUDA_LOGITS((a)->student.dtype, X, { typedef xdi_cuda_none Y; __VA_ARGS__ })       \
            } else if ((a)->student.dtype == (a)->teacher.dtype) {                                     \
                XDI_CUDA_LOGITS((a)->student.dtype, X, { typedef X Y; __VA_ARGS__ })                   \
            } else {                                                                                   \
                typedef xdi_cuda_any X, Y;                                                             \
                __VA_ARGS__                                                                            \
            }                                                                                          \
        }                                                                                              \
    }
#define XDI_CUDA_LOSS_ANY(given, X, Y, ...) \
    typedef xdi_cuda_any X;                 \
    if (given) {                            \
        typedef xdi_cuda_any Y;             \
        __VA_ARGS__                         \
    } else {                                \
        typedef xdi_cuda_none Y;            \
        __VA_ARGS__                         \
    }

static xdi_cuda_grid xdi_cuda_team_grid(int64_t rows, int team) {
    const int64_t each = XDI_CUDA_TEAM_BLOCK / team;
    return xdi_cuda_grid_of((rows + each - 1) / each, XDI_CUDA_TEAM_BLOCK);
}

/* One thread for each of count things. */
static xdi_cuda_grid xdi_cuda_flat_grid(int64_t count) {
    return xdi_cuda_grid_of((count + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK, XDI_CUDA_TEAM_BLOCK);
}

static __device__ inline int64_t xdi_cuda_flat_index() {
    return (int64_t)blockIdx.x * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x;
}

/* Of a block of whole teams, which has XDI_CUDA_TEAM_BLOCK threads, or of one team. */
template <int TEAM> static __device__ inline int64_t xdi_cuda_team_row() {
    enum { TEAMS = TEAM < XDI_CUDA_TEAM_BLOCK ? XDI_CUDA_TEAM_BLOCK / TEAM : 1 };
    return (int64_t)blockIdx.x * TEAMS + (int64_t)threadIdx.x / TEAM;
}

template <int TEAM> static __device__ inline int xdi_cuda_team_thread() {
    return (int)threadIdx.x % TEAM;
}

template <int TEAM> static __device__ inline void xdi_cuda_team_sync() {
    if (TEAM == XDI_CUDA_WARP)
        __syncwarp();
    else
        __syncthreads();
}

template <int TEAM, typename T, typename Merge>
static __device__ inline T xdi_cuda_team_reduce(T value, T identity, Merge merge) {
    return TEAM == XDI_CUDA_WARP ? xdi_cuda_warp_reduce(value, merge)
                                 : xdi_cuda_block_reduce(value, identity, merge);
}

/* ---- elements ---- */

/* Eight elements of a row. */
struct xdi_cuda_eight {
    float at[XDI_CUDA_EIGHT];
};

static __host__ __device__ inline int64_t xdi_cuda_stride(const xd_rows &x) {
    return x.stride ? x.stride : x.cols;
}

template <typename T> static __device__ inline T *xdi_cuda_row(const xd_rows &x, int64_t row) {
    return static_cast<T *>(x.data) + row * xdi_cuda_stride(x);
}

/* Eight elements as they lie in memory: a load that is under way takes few registers, and nothing waits for it before they
 * are widened. `from` is a multiple of 16 bytes. */
template <typename T> struct xdi_cuda_raw {
    static_assert(sizeof(T) == 2, "eight elements are 16 bytes");
    xdi_cuda_pack<T> pack;

    __device__ void load(const T *from) {
        pack = xdi_cuda_load16(from);
    }
    __device__ xdi_cuda_eight widened() const {
        xdi_cuda_eight chunk;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) chunk.at[i] = xdi_cuda_widen(pack.at[i]);
        return chunk;
    }
};

template <> struct xdi_cuda_raw<float> {
    xdi_cuda_pack<float> low, high;

    __device__ void load(const float *from) {
        low = xdi_cuda_load16(from);
        high = xdi_cuda_load16(from + 4);
    }
    __device__ xdi_cuda_eight widened() const {
        return { { low.at[0], low.at[1], low.at[2], low.at[3], high.at[0], high.at[1], high.at[2], high.at[3] } };
    }
};

template <> struct xdi_cuda_raw<xdi_cuda_bf16> {
    xdi_cuda_pack<uint32_t> pairs;

    __device__ void load(const xdi_cuda_bf16 *from) {
        pairs = xdi_cuda_load16(reinterpret_cast<const uint32_t *>(from));
    }
    __device__ xdi_cuda_eight widened() const {
        xdi_cuda_eight chunk;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i += 2) {
            chunk.at[i] = xd_float_of_bits(pairs.at[i / 2] << 16);
            chunk.at[i + 1] = xd_float_of_bits(pairs.at[i / 2] & 0xffff0000u);
        }
        return chunk;
    }
};

template <typename T> static __device__ inline xdi_cuda_eight xdi_cuda_read_whole(const T *from) {
    xdi_cuda_raw<T> raw;
    raw.load(from);
    return raw.widened();
}

/* Elements [column, column + 8) of a row; `beyond` for those at `end` and beyond. */
template <typename T>
static __device__ inline xdi_cuda_eight xdi_cuda_read(const T *row, int64_t column, int64_t end,
                                                      float beyond = 0.0f) {
    xdi_cuda_eight chunk;
    if (xdi_cuda_is_aligned16(row) && column + XDI_CUDA_EIGHT <= end) return xdi_cuda_read_whole(row + column);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        chunk.at[i] = column + i < end ? xdi_cuda_widen(row[column + i]) : beyond;
    return chunk;
}

/* A row of logits of a type, whose elements are read by address; xdi_cuda_any is a type that only the call knows. One kernel for
 * any type serves rows whose time is not in reading: short ones, and those whose teacher has another type. */
struct xdi_cuda_any {
    float widest;
};

template <typename T> struct xdi_cuda_line {
    const T *at;

    static __device__ xdi_cuda_line of(const xd_rows &x, int64_t row) {
        return { xdi_cuda_row<T>(x, row) };
    }
    __device__ xdi_cuda_line from(int64_t column) const {
        return { at + column };
    }
    __device__ float element(int64_t column) const {
        return xdi_cuda_widen(at[column]);
    }
    __device__ xdi_cuda_eight eight(int64_t column, int64_t end, float beyond) const {
        return xdi_cuda_read(at, column, end, beyond);
    }
};

template <> struct xdi_cuda_line<xdi_cuda_none> {
    const xdi_cuda_none *at;

    static __device__ xdi_cuda_line of(const xd_rows &, int64_t) {
        return { NULL };
    }
    __device__ xdi_cuda_line from(int64_t) const {
        return { NULL };
    }
    __device__ float element(int64_t) const {
        return 0.0f;
    }
    __device__ xdi_cuda_eight eight(int64_t, int64_t, float) const {
        return {};
    }
};

template <> struct xdi_cuda_line<xdi_cuda_any> {
    const char *at;
    bool wide;

    static __device__ xdi_cuda_line of(const xd_rows &x, int64_t row) {
        const bool wide = x.dtype == XD_DTYPE_F32;
        return { static_cast<const char *>(x.data) + row * xdi_cuda_stride(x) * (wide ? 4 : 2), wide };
    }
    __device__ xdi_cuda_line from(int64_t column) const {
        return { at + column * (wide ? 4 : 2), wide };
    }
    __device__ const float *floats() const {
        return reinterpret_cast<const float *>(at);
    }
    __device__ const xdi_cuda_bf16 *halves() const {
        return reinterpret_cast<const xdi_cuda_bf16 *>(at);
    }
    __device__ float element(int64_t column) const {
        return wide ? floats()[column] : xdi_cuda_widen(halves()[column]);
    }
    __device__ xdi_cuda_eight eight(int64_t column, int64_t end, float beyond) const {
        return wide ? xdi_cuda_read(floats(), column, end, beyond) : xdi_cuda_read(halves(), column, end, beyond);
    }
};

/* A pack of eight elements, rounded; a NaN loses its payload. */
template <typename T> static __device__ inline xdi_cuda_pack<T> xdi_cuda_rounded(const float *from) {
    xdi_cuda_pack<T> pack;
    XD_UNROLL
    for (int i = 0; i < xdi_cuda_pack<T>::COUNT; i++) xdi_cuda_narrow(from[i], &pack.at[i]);
    return pack;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> __device__ inline xdi_cuda_pack<xdi_cuda_bf16> xdi_cuda_rounded(const float *from) {
    unsigned words[4];
    xdi_cuda_pack<xdi_cuda_bf16> pack;
    XD_UNROLL
    for (int i = 0; i < 4; i++)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
    memcpy(&pack, words, sizeof pack);
    return pack;
}
#endif

/* Eight elements, rounded, to a multiple of 16 bytes. */
template <typename T> static __device__ inline void xdi_cuda_write_whole(T *to, const xdi_cuda_eight &chunk) {
    enum { PACK = xdi_cuda_pack<T>::COUNT };
    XD_UNROLL
    for (int k = 0; k < XDI_CUDA_EIGHT; k += PACK) xdi_cuda_store16(to + k, xdi_cuda_rounded<T>(chunk.at + k));
}

/* Writes them, rounded; those at `end` and beyond are not changed. */
template <typename T>
static __device__ inline void xdi_cuda_write(T *row, int64_t column, int64_t end,
                                             const xdi_cuda_eight &chunk) {
    if (xdi_cuda_is_aligned16(row) && column + XDI_CUDA_EIGHT <= end) {
        xdi_cuda_write_whole(row + column, chunk);
    } else {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (column + i < end) xdi_cuda_narrow(chunk.at[i], &row[column + i]);
    }
}

/* The same for rows whose type only the call knows. */
static __device__ inline xdi_cuda_eight xdi_cuda_read_any(const xd_rows &x, int64_t row, int64_t column,
                                                          int64_t end) {
    if (x.dtype == XD_DTYPE_F32) return xdi_cuda_read(xdi_cuda_row<float>(x, row), column, end);
    return xdi_cuda_read(xdi_cuda_row<xdi_cuda_bf16>(x, row), column, end);
}

static __device__ inline void xdi_cuda_write_any(const xd_rows &x, int64_t row, int64_t column, int64_t end,
                                                 const xdi_cuda_eight &chunk) {
    if (x.dtype == XD_DTYPE_F32)
        xdi_cuda_write(xdi_cuda_row<float>(x, row), column, end, chunk);
    else
        xdi_cuda_write(xdi_cuda_row<xdi_cuda_bf16>(x, row), column, end, chunk);
}

/* Where a row begins on 16 bytes; else NULL. */
static __device__ inline void *xdi_cuda_aligned_row(const xd_rows &x, int64_t row) {
    void *at = x.dtype == XD_DTYPE_F32 ? (void *)xdi_cuda_row<float>(x, row) : (void *)xdi_cuda_row<xdi_cuda_bf16>(x, row);
    return xdi_cuda_is_aligned16(at) ? at : NULL;
}

static __device__ inline float xdi_cuda_element(const xd_rows &x, int64_t row, int64_t column) {
    if (x.dtype == XD_DTYPE_F32) return xdi_cuda_row<float>(x, row)[column];
    return xdi_cuda_widen(xdi_cuda_row<xdi_cuda_bf16>(x, row)[column]);
}

static __device__ inline void xdi_cuda_set_element(const xd_rows &x, int64_t row, int64_t column,
                                                   float value) {
    if (x.dtype == XD_DTYPE_F32)
        xdi_cuda_row<float>(x, row)[column] = value;
    else
        xdi_cuda_narrow(value, &xdi_cuda_row<xdi_cuda_bf16>(x, row)[column]);
}

/* 1 / tau or log2(e) / tau. Where tau is so small that f32 cannot hold it, about the largest f32: with infinity the largest
 * element, whose difference is 0, would have the power NaN. */
static __host__ __device__ inline float xdi_cuda_factor(double factor) {
    return (float)fmin(factor, 3.4e38);
}

/* ---- functions, by the instructions that a GPU has for them: a few units of the last place ---- */

#if defined(__CUDA_ARCH__)

/* 2^x; 0 below 2^-126. */
static __device__ inline float xdi_cuda_power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The logarithm to base 2 of what is not below 2^-126; its error near 1 is 2^-22. */
static __device__ inline float xdi_cuda_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* a / b, b in [2^-126, 2^126]. */
static __device__ inline float xdi_cuda_ratio(float a, float b) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    return __fmul_rn(a, y);
}

#else

static __device__ inline float xdi_cuda_power(float x) {
    return x < -126.0f ? 0.0f : exp2f(x);
}

static __device__ inline float xdi_cuda_log2(float x) {
    return log2f(x);
}

static __device__ inline float xdi_cuda_ratio(float a, float b) {
    return a / b;
}

#endif

/* e^(difference / tau), factor = log2(e) / tau; 0 for -infinity. */
static __device__ inline float xdi_cuda_exp_of(float difference, float factor) {
    return xdi_cuda_power(__fmul_rn(difference, factor));
}

/* x - reference, where a shard of only -infinity has -infinity as its reference. */
static __device__ inline float xdi_cuda_minus(float x, float reference) {
    return reference == -INFINITY ? -INFINITY : __fsub_rn(x, reference);
}

/* The sum of eight terms, as a tree. */
static __device__ inline float xdi_cuda_sum_of(const xdi_cuda_eight &x) {
    return __fadd_rn(__fadd_rn(__fadd_rn(x.at[0], x.at[1]), __fadd_rn(x.at[2], x.at[3])),
                     __fadd_rn(__fadd_rn(x.at[4], x.at[5]), __fadd_rn(x.at[6], x.at[7])));
}

/* The largest of eight elements that is not NaN, else -infinity. */
static __device__ inline float xdi_cuda_max_of(const xdi_cuda_eight &x) {
    float max = -INFINITY;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) max = fmaxf(max, x.at[i]);
    return max;
}

/* ---- the largest element of a row ---- */

struct xdi_cuda_largest {
    float max;
    int broken;  /* a NaN or +infinity in the row */
    int64_t arg; /* the lowest column that has max; INT64_MAX without columns */
};

struct xdi_cuda_largest_join {
    __device__ xdi_cuda_largest operator()(xdi_cuda_largest a, const xdi_cuda_largest &b) const {
        if (b.max > a.max || (b.max == a.max && b.arg < a.arg)) {
            a.max = b.max;
            a.arg = b.arg;
        }
        a.broken |= b.broken;
        return a;
    }
};

/* Adds eight elements to what a thread has seen of a row. */
static __device__ inline void xdi_cuda_see(const xdi_cuda_eight &x, int64_t column, int64_t columns,
                                           xdi_cuda_largest *best) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
        if (column + i >= columns) continue;
        const float value = isnan(x.at[i]) ? -INFINITY : x.at[i]; /* so that arg is a column in any case */
        if (!(x.at[i] < INFINITY)) best->broken = 1;
        if (value > best->max || best->arg == INT64_MAX) {
            best->max = value;
            best->arg = column + i;
        }
    }
}

/* Over the row's first `columns`, on every thread of the team: xdi_loss_row_max. */
template <int TEAM>
static __device__ inline xdi_cuda_largest xdi_cuda_row_largest(const xd_rows &x, int64_t row,
                                                               int64_t columns) {
    const xdi_cuda_largest none = { -INFINITY, 0, INT64_MAX };
    xdi_cuda_largest best = none;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM)
        xdi_cuda_see(xdi_cuda_read_any(x, row, c, columns), c, columns, &best);
    return xdi_cuda_team_reduce<TEAM>(best, none, xdi_cuda_largest_join());
}

/* ---- sums ---- */

/* N sums of terms: doubles, or xd_fixed with the terms that do not fit counted. */
template <int N, bool FIXED> struct xdi_cuda_sums;

template <int N> struct xdi_cuda_sums<N, false> {
    typedef double sum_type;
    struct totals {
        double sum[N];
    };
    struct join {
        __device__ totals operator()(totals a, const totals &b) const {
            XD_UNROLL
            for (int i = 0; i < N; i++) a.sum[i] = __dadd_rn(a.sum[i], b.sum[i]);
            return a;
        }
    };
    totals whole;
    float part[N]; /* of the eight columns at work */

    __device__ xdi_cuda_sums() {
        XD_UNROLL
        for (int i = 0; i < N; i++) {
            whole.sum[i] = 0.0;
            part[i] = 0.0f;
        }
    }
    __device__ void add(int which, float term) {
        part[which] = __fadd_rn(part[which], term);
    }
    __device__ void add_wide(int which, double term) {
        whole.sum[which] = __dadd_rn(whole.sum[which], term);
    }
    __device__ void end_eight() {
        XD_UNROLL
        for (int i = 0; i < N; i++) {
            add_wide(i, (double)part[i]);
            part[i] = 0.0f;
        }
    }
};

/* xd_fixed_put; a term or a sum that does not fit is counted instead. */
struct xdi_cuda_misfits {
    int64_t large, infinite;
};

static __device__ inline void xdi_cuda_fixed_add(xd_fixed *sum, double term, xdi_cuda_misfits *misfits) {
    if (xd_fixed_put(sum, term)) return;
    if (isfinite(term))
        misfits->large++;
    else
        misfits->infinite++;
}

/* Word by word: a sum in memory begins on any 8 bytes. */
static __device__ inline void xdi_cuda_fixed_put(xd_fixed *to, xd_fixed sum) {
    to->high = sum.high;
    to->low = sum.low;
}

template <int N> struct xdi_cuda_sums<N, true> {
    typedef xd_fixed sum_type;
    struct totals {
        xd_fixed sum[N];
        xdi_cuda_misfits misfits;
    };
    struct join {
        __device__ totals operator()(totals a, const totals &b) const {
            XD_UNROLL
            for (int i = 0; i < N; i++) {
                const int64_t next = a.sum[i].high + b.sum[i].high; /* both are below 2^55 */
                const bool fits = next < (int64_t)1 << 55 && next > -((int64_t)1 << 55);
                a.sum[i].high = fits ? next : 0;
                a.sum[i].low += b.sum[i].low;
                a.misfits.large += fits ? 0 : 1;
            }
            a.misfits.large += b.misfits.large;
            a.misfits.infinite += b.misfits.infinite;
            return a;
        }
    };
    totals whole;

    __device__ xdi_cuda_sums() {
        memset(&whole, 0, sizeof whole);
    }
    __device__ void add(int which, float term) {
        add_wide(which, (double)term);
    }
    __device__ void add_wide(int which, double term) {
        xdi_cuda_fixed_add(&whole.sum[which], term, &whole.misfits);
    }
    __device__ void end_eight() {}
};

/* The team's sums on every thread of it. */
template <int TEAM, int N, bool FIXED>
static __device__ inline typename xdi_cuda_sums<N, FIXED>::totals
xdi_cuda_team_totals(const xdi_cuda_sums<N, FIXED> &mine) {
    const xdi_cuda_sums<N, FIXED> none;
    return xdi_cuda_team_reduce<TEAM>(mine.whole, none.whole, typename xdi_cuda_sums<N, FIXED>::join());
}

/* ---- sorting ---- */

/* Sorts `count` items by the TEAM threads that call it: order(low, high) orders the items at two indices, low < high.
 * Bitonic, every step ascending, so that indices past the end need no items. The steps of a team see each other's
 * writes. */
template <int TEAM, typename Order>
static __device__ inline void xdi_cuda_bitonic(int64_t count, Order order) {
    for (int64_t size = 2; size / 2 < count; size *= 2)
        for (int64_t stride = size / 2; stride > 0; stride /= 2) {
            XD_UNROLL_N(1)
            for (int64_t i = xdi_cuda_team_thread<TEAM>(); i < count; i += TEAM) {
                const int64_t partner = stride == size / 2 ? i ^ (size - 1) : i ^ stride;
                if (partner > i && partner < count) order(i, partner);
            }
            xdi_cuda_team_sync<TEAM>();
        }
}

/* >>cuda/ahead.cuh */

/* Columns on their way: a thread asks for the next steps of its row before it works on this one, so that a multiprocessor has
 * the bytes in flight that its memory's latency needs. The copies go into shared memory and hold no register. Each thread reads
 * only what it has asked for, so nothing waits at a barrier. */

/* Copies 16 bytes to shared memory. They are there at once where there is no such instruction: in the emulation. */
static __device__ inline void xdi_cuda_copy16(void *shared, const void *from) {
    XDI_CUDA_ALIGNED16(from);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
#else
    *static_cast<xdi_cuda_bits16 *>(shared) = *static_cast<const xdi_cuda_bits16 *>(from);
#endif
}

/* Makes a group of the copies since the last call. */
static __device__ inline void xdi_cuda_copies_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits until at most LEFT of this thread's groups are on their way, the latest. */
template <int LEFT> static __device__ inline void xdi_cuda_copies_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

/* The room of one tensor in a block: STAGES times eight columns a thread. */
template <typename T, int STAGES> struct xdi_cuda_waiting {
    alignas(16) T at[STAGES][XDI_CUDA_TEAM_BLOCK][XDI_CUDA_EIGHT];

    __device__ void ask(int stage, const xdi_cuda_line<T> &from) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i += xdi_cuda_pack<T>::COUNT)
            xdi_cuda_copy16(&at[stage][threadIdx.x][i], from.at + i);
    }
    __device__ xdi_cuda_eight take(int stage, const xdi_cuda_line<T> &) const {
        return xdi_cuda_read_whole(&at[stage][threadIdx.x][0]);
    }
};

template <int STAGES> struct xdi_cuda_waiting<xdi_cuda_none, STAGES> {
    __device__ void ask(int, const xdi_cuda_line<xdi_cuda_none> &) {}
    __device__ xdi_cuda_eight take(int, const xdi_cuda_line<xdi_cuda_none> &) const {
        return {};
    }
};

template <int STAGES> struct xdi_cuda_waiting<xdi_cuda_any, STAGES> {
    alignas(16) float at[STAGES][XDI_CUDA_TEAM_BLOCK][XDI_CUDA_EIGHT];

    __device__ void ask(int stage, const xdi_cuda_line<xdi_cuda_any> &from) {
        float *to = &at[stage][threadIdx.x][0];
        xdi_cuda_copy16(to, from.at);
        if (from.wide) xdi_cuda_copy16(to + 4, from.floats() + 4);
    }
    __device__ xdi_cuda_eight take(int stage, const xdi_cuda_line<xdi_cuda_any> &of) const {
        const float *from = &at[stage][threadIdx.x][0];
        return of.wide ? xdi_cuda_read_whole(from) : xdi_cuda_read_whole(reinterpret_cast<const xdi_cuda_bf16 *>(from));
    }
};

/* Of both tensors: at most 32 KiB, so that four blocks find room; 16 bytes more, as a tensor of no type has a size too. */
enum { XDI_CUDA_AHEAD_BYTES = (32 << 10) + 16 };

/* The walks of a kernel share the memory, whatever their types. */
static __device__ inline xdi_cuda_bits16 *xdi_cuda_ahead_bytes() {
    XD_SHARED(xdi_cuda_bits16, bytes, [XDI_CUDA_AHEAD_BYTES / 16]);
    return bytes;
}

template <typename X, typename Y> struct xdi_cuda_ahead {
    enum {
        BYTES = XDI_CUDA_EIGHT * (int)(sizeof(X) + (xdi_cuda_is<Y>::GIVEN ? sizeof(Y) : 0)),
        STAGES = BYTES <= 32 ? 4 : 2
    };
    xdi_cuda_waiting<X, STAGES> x;
    xdi_cuda_waiting<Y, STAGES> y;
};

template <typename X, typename Y> static __device__ inline xdi_cuda_ahead<X, Y> &xdi_cuda_ahead_room() {
    static_assert((int)sizeof(xdi_cuda_ahead<X, Y>) <= (int)XDI_CUDA_AHEAD_BYTES, "the room");
    return *reinterpret_cast<xdi_cuda_ahead<X, Y> *>(xdi_cuda_ahead_bytes());
}

/* Where a row lies. walk() calls use(k, eight of x, eight of y) for `count` steps of this thread's columns: step k has the eight
 * from number first + k * step on, at a multiple of 16 bytes in the first `whole` steps; the others are what rest(k, &x, &y) reads.
 * One loop has both kinds, so that a kernel has the work of a step once. The threads of a block need not have the same counts. */
struct xdi_cuda_in_memory {
    template <typename X, typename Y, typename Rest, typename Use>
    static __device__ inline void walk(const xdi_cuda_line<X> &x, const xdi_cuda_line<Y> &y, int64_t first, int64_t step, int whole,
                                       int count, Rest rest, Use use) {
        enum { STAGES = xdi_cuda_ahead<X, Y>::STAGES };
        xdi_cuda_ahead<X, Y> &room = xdi_cuda_ahead_room<X, Y>();
        XD_UNROLL
        for (int k = 0; k < STAGES; k++) {
            if (k < whole) room.x.ask(k, x.from(first + k * step)), room.y.ask(k, y.from(first + k * step));
            xdi_cuda_copies_group();
        }
        XD_UNROLL_N(1)
        for (int k = 0; k < count; k++) {
            const int stage = k % STAGES;
            xdi_cuda_eight values, beside;
            if (k < whole) {
                xdi_cuda_copies_wait<STAGES - 1>();
                values = room.x.take(stage, x);
                beside = room.y.take(stage, y);
                if (k + STAGES < whole) {
                    const int64_t next = first + (k + STAGES) * step;
                    room.x.ask(stage, x.from(next));
                    room.y.ask(stage, y.from(next));
                }
                xdi_cuda_copies_group();
            } else {
                rest(k, &values, &beside);
            }
            use(k, values, beside);
        }
    }
};

/* Steps of columns [first, columns) by `step`. */
static __device__ inline int xdi_cuda_steps_of(int64_t first, int64_t columns, int64_t step) {
    return first < columns ? (int)((columns - first + step - 1) / step) : 0;
}

/* >>cuda/largest.cuh */

/* The largest elements of a row: what a thread has seen at each of the eight places of its loads, four of which are on their way
 * at a time. Halves are compared in pairs, as they lie in memory. */

/* The larger of two, and of pairs of bf16; NaN is smaller than everything, or, where NANS, larger. */
template <bool NANS> static __device__ inline float xdi_cuda_larger_of(float a, float b) {
    if (!NANS) return fmaxf(a, b);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return isnan(a) ? a : isnan(b) ? b : fmaxf(a, b);
#endif
}

template <bool NANS> static __device__ inline uint32_t xdi_cuda_larger_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t larger;
    if (NANS)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else
        asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    const float low = xdi_cuda_larger_of<NANS>(xd_float_of_bits(a << 16), xd_float_of_bits(b << 16));
    const float high = xdi_cuda_larger_of<NANS>(xd_float_of_bits(a & 0xffff0000u), xd_float_of_bits(b & 0xffff0000u));
    return xd_bits_of_float(low) >> 16 | (xd_bits_of_float(high) & 0xffff0000u);
#endif
}

/* Elements [column, column + 8) of a row as they lie in memory; -infinity for those at `end` and beyond. */
static __device__ inline xdi_cuda_raw<float> xdi_cuda_raw_of(const float *row, int64_t column, int64_t end) {
    xdi_cuda_raw<float> raw;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT / 2; i++) {
        raw.low.at[i] = column + i < end ? row[column + i] : -INFINITY;
        raw.high.at[i] = column + 4 + i < end ? row[column + 4 + i] : -INFINITY;
    }
    return raw;
}

static __device__ inline xdi_cuda_raw<xdi_cuda_bf16> xdi_cuda_raw_of(const xdi_cuda_bf16 *row, int64_t column, int64_t end) {
    const uint32_t nothing = 0xff80u; /* -infinity */
    xdi_cuda_raw<xdi_cuda_bf16> raw;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i += 2) {
        const uint32_t low = column + i < end ? row[column + i].bits : nothing;
        const uint32_t high = column + i + 1 < end ? row[column + i + 1].bits : nothing;
        raw.pairs.at[i / 2] = low | high << 16;
    }
    return raw;
}

/* Calls use(eight elements as in memory, column) for the team's columns [0, end) of a row, in their order for each thread;
 * elements at `end` and beyond are -infinity. The loads of four steps are asked for before the first is used. */
template <int TEAM, typename T, typename Use>
static __device__ inline void xdi_cuda_each_eight(const T *row, int64_t end, Use use) {
    enum { AHEAD = 4, STEP = TEAM * XDI_CUDA_EIGHT };
    int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    if (xdi_cuda_is_aligned16(row)) {
        xdi_cuda_raw<T> raw[AHEAD];
        for (; c + (AHEAD - 1) * STEP + XDI_CUDA_EIGHT <= end; c += AHEAD * STEP) {
            XD_UNROLL
            for (int k = 0; k < AHEAD; k++) raw[k].load(row + c + k * STEP);
            XD_UNROLL
            for (int k = 0; k < AHEAD; k++) use(raw[k], c + k * STEP);
        }
        XD_UNROLL
        for (int k = 0; k < AHEAD - 1; k++)
            if (c + k * STEP + XDI_CUDA_EIGHT <= end) raw[k].load(row + c + k * STEP);
        XD_UNROLL
        for (int k = 0; k < AHEAD - 1; k++) {
            if (c + XDI_CUDA_EIGHT > end) break;
            use(raw[k], c);
            c += STEP;
        }
    }
    XD_UNROLL_N(1)
    for (; c < end; c += STEP) use(xdi_cuda_raw_of(row, c, end), c);
}

/* The same with four loads on their way all the time, for more registers: a step's is asked for as soon as those of the step four
 * before are free. */
template <int TEAM, typename T, typename Use>
static __device__ inline void xdi_cuda_stream_eights(const T *row, int64_t end, Use use) {
    enum { AHEAD = 4, STEP = TEAM * XDI_CUDA_EIGHT };
    int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    if (xdi_cuda_is_aligned16(row) && c + XDI_CUDA_EIGHT <= end) {
        int left = (int)((end - XDI_CUDA_EIGHT - c) / STEP) + 1; /* whole steps */
        xdi_cuda_raw<T> raw[AHEAD];
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (k < left) raw[k].load(row + c + k * STEP);
        XD_UNROLL_N(1)
        for (; left > AHEAD; left -= AHEAD) {
            XD_UNROLL
            for (int k = 0; k < AHEAD; k++, c += STEP) {
                const xdi_cuda_raw<T> now = raw[k];
                if (k + AHEAD < left) raw[k].load(row + c + AHEAD * STEP);
                use(now, c);
            }
        }
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++) {
            if (k >= left) break;
            use(raw[k], c);
            c += STEP;
        }
    }
    XD_UNROLL_N(1)
    for (; c < end; c += STEP) use(xdi_cuda_raw_of(row, c, end), c);
}

/* The largest at each of the eight places. */
template <typename T, bool NANS> struct xdi_cuda_places;

template <bool NANS> struct xdi_cuda_places<float, NANS> {
    float at[XDI_CUDA_EIGHT];

    __device__ xdi_cuda_places() {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) at[i] = -INFINITY;
    }
    __device__ void see(const xdi_cuda_raw<float> &raw) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            at[i] = xdi_cuda_larger_of<NANS>(at[i], i < 4 ? raw.low.at[i % 4] : raw.high.at[i % 4]);
    }
    __device__ float value(int place) const {
        return at[place];
    }
};

template <bool NANS> struct xdi_cuda_places<xdi_cuda_bf16, NANS> {
    uint32_t pairs[XDI_CUDA_EIGHT / 2];

    __device__ xdi_cuda_places() {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT / 2; i++) pairs[i] = 0xff80ff80u;
    }
    __device__ void see(const xdi_cuda_raw<xdi_cuda_bf16> &raw) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT / 2; i++) pairs[i] = xdi_cuda_larger_pair<NANS>(pairs[i], raw.pairs.at[i]);
    }
    __device__ float value(int place) const {
        return xd_float_of_bits(place % 2 ? pairs[place / 2] & 0xffff0000u : pairs[place / 2] << 16);
    }
};

template <bool NANS> struct xdi_cuda_larger_float {
    __device__ float operator()(float a, float b) const {
        return xdi_cuda_larger_of<NANS>(a, b);
    }
};

/* Of eight elements; NaN does not count. */
static __device__ inline float xdi_cuda_largest_of(const xdi_cuda_raw<float> &raw) {
    const float low = fmaxf(fmaxf(raw.low.at[0], raw.low.at[1]), fmaxf(raw.low.at[2], raw.low.at[3]));
    return fmaxf(low, fmaxf(fmaxf(raw.high.at[0], raw.high.at[1]), fmaxf(raw.high.at[2], raw.high.at[3])));
}

static __device__ inline float xdi_cuda_largest_of(const xdi_cuda_raw<xdi_cuda_bf16> &raw) {
    const uint32_t pair = xdi_cuda_larger_pair<false>(xdi_cuda_larger_pair<false>(raw.pairs.at[0], raw.pairs.at[1]),
                                                      xdi_cuda_larger_pair<false>(raw.pairs.at[2], raw.pairs.at[3]));
    return fmaxf(xd_float_of_bits(pair << 16), xd_float_of_bits(pair & 0xffff0000u));
}

/* What a thread has seen, over all places. */
template <bool NANS, typename T> static __device__ inline float xdi_cuda_largest_of(const xdi_cuda_places<T, NANS> &places) {
    float max = places.value(0);
    XD_UNROLL
    for (int i = 1; i < XDI_CUDA_EIGHT; i++) max = xdi_cuda_larger_of<NANS>(max, places.value(i));
    return max;
}

/* >>cuda/norm.cu */

/* Norms of a list of gradients, and the factor that follows from one: the entries of kernel/cpu/norm.c and clip.c. Reads
 * every gradient once. Two stages: at most 512 blocks go through the chunks and write a partial sum each, one block merges the
 * partial sums in order. Their number does not depend on the GPU, so plain sums have the same bits on every GPU; exact ones are
 * sums of integers and do not depend on any order. The lists of the last norms stay on the device. */

enum { XDI_CUDA_NORM_BLOCKS = 512, XDI_CUDA_NORM_LIST = XDI_CUDA_LIST_STAGED };

struct xdi_cuda_norm_item {
    const void *data;
    uint64_t count : 48, dtype : 8, replica : 4, wide : 4;
};

/* The same number of chunks for every block: of one array exactly, of a list nearly, as arrays end where they end. A chunk is a
 * multiple of four times 16 bytes a thread, of which all are asked for before one is used. */
template <> struct xdi_cuda_chunks<xdi_cuda_norm_item> {
    static int64_t elements(int64_t arrays, int64_t all) {
        const int64_t most = 65536, step = 4 * 8 * (int)XDI_CUDA_THREADS, blocks = XDI_CUDA_NORM_BLOCKS;
        int64_t rounds = (all + blocks * most - 1) / (blocks * most);
        if (arrays > 1 && rounds < 8) rounds = 8;
        const int64_t each = (all + blocks * rounds - 1) / (blocks * rounds);
        return each < step ? step : (each + step - 1) / step * step;
    }
};

/* The partial sums of one block. */
struct xdi_cuda_norm_part {
    double sum, largest;
    int64_t not_finite, nan;
};

struct xdi_cuda_norm_plus {
    __device__ double operator()(double a, double b) const {
        return xd_add(a, b);
    }
};

struct xdi_cuda_norm_join {
    __device__ xdi_cuda_norm_part operator()(xdi_cuda_norm_part a, const xdi_cuda_norm_part &b) const {
        a.sum = xd_add(a.sum, b.sum);
        a.largest = a.largest > b.largest ? a.largest : b.largest;
        a.not_finite += b.not_finite;
        a.nan += b.nan;
        return a;
    }
};

/* Adds 32 bits to limb k; these are integers, so the order of the threads does not matter. */
static __device__ inline void xdi_cuda_limb_add(unsigned long long *limbs, int k, uint64_t bits) {
    if (bits) atomicAdd(limbs + k, (unsigned long long)bits);
}

/* mantissa * 2^(bit - 320), as xdi_norm_add. */
static __device__ inline void xdi_cuda_limbs_add(unsigned long long *limbs, uint64_t mantissa, int bit) {
    const int limb = bit / 32, shift = bit % 32;
    const uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
    xdi_cuda_limb_add(limbs, limb, low & 0xffffffffu);
    xdi_cuda_limb_add(limbs, limb + 1, (low >> 32) + (high & 0xffffffffu));
    xdi_cuda_limb_add(limbs, limb + 2, high >> 32);
}

/* A thread's exact sum: 128 bits over a window of exponents. Gradients of one array have similar magnitudes, so nearly all
 * terms fall into the window of the first; the others go to shared memory at once. */
struct xdi_cuda_window {
    uint64_t low, high;
    int bit; /* of the window's first bit; -1: no window yet */
    int terms;

    __device__ void flush(unsigned long long *limbs) {
        if (terms == 0) return;
        xdi_cuda_limbs_add(limbs, low & 0xffffffffu, bit);
        xdi_cuda_limbs_add(limbs, low >> 32, bit + 32);
        xdi_cuda_limbs_add(limbs, high & 0xffffffffu, bit + 64);
        xdi_cuda_limbs_add(limbs, high >> 32, bit + 96);
        low = high = 0;
        terms = 0;
    }

    /* A mantissa of at most 48 bits, shifted by less than 64: 2^16 of them fit. */
    __device__ void add(unsigned long long *limbs, uint64_t mantissa, int at) {
        if (mantissa == 0) return;
        if (bit < 0) bit = at > 32 ? at - 32 : 0;
        if (at < bit || at >= bit + 64 || bit + 128 > 32 * (XD_NORM_LIMBS - 2)) {
            xdi_cuda_limbs_add(limbs, mantissa, at);
            return;
        }
        const int shift = at - bit;
        const uint64_t lower = mantissa << shift;
        low += lower;
        high += (shift ? mantissa >> (64 - shift) : 0) + (low < lower ? 1 : 0);
        terms++;
    }
};

/* Counts an element that is not finite. */
static __device__ inline void xdi_cuda_norm_count(xdi_cuda_norm_part *part, uint32_t bits) {
    part->not_finite++;
    part->nan += (bits & 0x7fffffu) != 0 ? 1 : 0;
}

static __device__ inline uint32_t xdi_cuda_norm_bits(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}

/* Adds a finite element, given by its magnitude; of L2 its sign does not matter. */
static __device__ inline void xdi_cuda_norm_add(xdi_cuda_norm_part *part, xd_norm_type type, double magnitude) {
    if (type == XD_NORM_L2)
        part->sum = xd_fma(magnitude, magnitude, part->sum); /* the product is exact */
    else if (type == XD_NORM_MAX)
        part->largest = magnitude > part->largest ? magnitude : part->largest;
    else
        part->sum = xd_add(part->sum, magnitude);
}

/* Adds an element, or of a replica only counts. */
static __device__ inline void xdi_cuda_norm_one(xdi_cuda_norm_part *part, xd_norm_type type, float x, bool replica) {
    const uint32_t bits = xdi_cuda_norm_bits(x);
    if (bits >= 0x7f800000u)
        xdi_cuda_norm_count(part, bits);
    else if (!replica)
        xdi_cuda_norm_add(part, type, (double)xd_float_of_bits(bits));
}

/* ---- plain norms ---- */

/* What an element j of 16 bytes is: its value in double, and the bits of its magnitude as an f32. */
template <typename T> struct xdi_cuda_norm_words;

template <> struct xdi_cuda_norm_words<float> {
    static __device__ double value(const uint32_t (&words)[4], int j) {
        return (double)xd_float_of_bits(words[j]);
    }
    static __device__ uint32_t bits(const uint32_t (&words)[4], int j) {
        return words[j] & 0x7fffffffu;
    }
};

/* Every other one by its bits, as a conversion to double takes as long as eight other instructions: shifted into place they are
 * x 2^-896, denormals too. An infinity is 2^128 then, and a NaN more. */
template <> struct xdi_cuda_norm_words<xdi_cuda_bf16> {
    static __device__ double value(const uint32_t (&words)[4], int j) {
        const uint32_t word = words[j / 2];
        if (j % 2 == 0) return (double)xd_float_of_bits(word << 16);
        return xd_mul(__hiloint2double((int)((uint32_t)((int32_t)word >> 3) & 0x8fffe000u), 0), 0x1p896);
    }
    static __device__ uint32_t bits(const uint32_t (&words)[4], int j) {
        return (j % 2 ? words[j / 2] : words[j / 2] << 16) & 0x7fff0000u;
    }
};

template <> struct xdi_cuda_norm_words<xdi_cuda_f16> {
    static __device__ double value(const uint32_t (&words)[4], int j) {
        return (double)xdi_cuda_f16_value((uint16_t)(words[j / 2] >> (j % 2 * 16) & 0xffffu));
    }
    static __device__ uint32_t bits(const uint32_t (&words)[4], int j) {
        return xd_bits_of_float(xdi_cuda_f16_value((uint16_t)(words[j / 2] >> (j % 2 * 16) & 0x7fffu)));
    }
};

/* So that the compiler asks for all before it uses one. */
template <int COUNT> static __device__ inline void xdi_cuda_norm_asked(uint32_t (&words)[COUNT][4]) {
#if defined(__CUDA_ARCH__)
    XD_UNROLL
    for (int k = COUNT - 1; k >= 0; k--)
        asm volatile("" : "+r"(words[k][0]), "+r"(words[k][1]), "+r"(words[k][2]), "+r"(words[k][3])::"memory");
#else
    (void)words;
#endif
}

/* COUNT times 16 bytes of a thread, a step of the block apart. Whether all are finite is asked once, of their sum or their
 * largest: below `limit` they are, and above it they are read again one by one. */
template <xd_norm_type TYPE, typename T, int COUNT>
static __device__ inline void xdi_cuda_norm_packs(const T *data, bool replica, xdi_cuda_norm_part *part) {
    enum { EACH = xdi_cuda_pack<T>::COUNT, STEP = XDI_CUDA_THREADS * EACH };
    const uint32_t limit = TYPE == XD_NORM_MAX ? 0x7f800000u : (uint32_t)(1023 + (TYPE == XD_NORM_L2 ? 250 : 125)) << 20;
    uint32_t words[COUNT][4], top = 0;
    XD_UNROLL
    for (int k = 0; k < COUNT; k++) {
        const xdi_cuda_pack<T> pack = xdi_cuda_load16(data + k * STEP);
        memcpy(words[k], &pack, sizeof pack);
    }
    xdi_cuda_norm_asked(words);
    xdi_cuda_norm_part sum = *part;
    XD_UNROLL
    for (int k = 0; k < COUNT; k++) {
        XD_UNROLL
        for (int j = 0; j < EACH; j++) {
            if (TYPE != XD_NORM_MAX) {
                const double x = xdi_cuda_norm_words<T>::value(words[k], j);
                xdi_cuda_norm_add(&sum, TYPE, TYPE == XD_NORM_L2 ? x : fabs(x));
                continue;
            }
            const uint32_t bits = xdi_cuda_norm_words<T>::bits(words[k], j);
            top = bits > top ? bits : top;
        }
    }
    if (TYPE != XD_NORM_MAX) top = (uint32_t)__double2hiint(sum.sum);
    if (top < limit) {
        if (TYPE == XD_NORM_MAX) xdi_cuda_norm_add(&sum, TYPE, (double)xd_float_of_bits(top));
        if (!replica) *part = sum;
        return;
    }
    XD_UNROLL_N(1)
    for (int k = 0; k < COUNT; k++) {
        XD_UNROLL_N(1)
        for (int j = 0; j < EACH; j++)
            xdi_cuda_norm_one(part, TYPE, xdi_cuda_widen(data[k * STEP + j]), replica);
    }
}

/* A chunk of an array. A thread adds its elements in the order of the array. */
template <xd_norm_type TYPE, typename T>
static __device__ inline void xdi_cuda_norm_span(const xdi_cuda_norm_item &a, xdi_cuda_span span, xdi_cuda_norm_part *part) {
    enum { EACH = xdi_cuda_pack<T>::COUNT, STEP = XDI_CUDA_THREADS * EACH };
    const T *data = static_cast<const T *>(a.data) + span.begin;
    const bool replica = a.replica != 0;
    const int count = (int)(span.end - span.begin), whole = a.wide ? count / EACH * EACH : 0;
    int i = (int)threadIdx.x * EACH;
    for (; i + 3 * STEP < whole; i += 4 * STEP) xdi_cuda_norm_packs<TYPE, T, 4>(data + i, replica, part);
    for (; i + STEP < whole; i += 2 * STEP) xdi_cuda_norm_packs<TYPE, T, 2>(data + i, replica, part);
    if (i < whole) xdi_cuda_norm_packs<TYPE, T, 1>(data + i, replica, part);
    for (i = whole + (int)threadIdx.x; i < count; i += XDI_CUDA_THREADS)
        xdi_cuda_norm_one(part, TYPE, xdi_cuda_widen(data[i]), replica);
}

template <typename T>
static __device__ inline void xdi_cuda_norm_plain(const xdi_cuda_norm_item &a, xd_norm_type type, xdi_cuda_span span,
                                                  xdi_cuda_norm_part *part) {
    if (type == XD_NORM_L2)
        xdi_cuda_norm_span<XD_NORM_L2, T>(a, span, part);
    else if (type == XD_NORM_MAX)
        xdi_cuda_norm_span<XD_NORM_MAX, T>(a, span, part);
    else
        xdi_cuda_norm_span<XD_NORM_L1, T>(a, span, part);
}

/* ---- exact ones ---- */

/* Adds an element to the exact sum. */
static __device__ inline void xdi_cuda_norm_exact(xdi_cuda_norm_part *part, xdi_cuda_window *window, unsigned long long *limbs,
                                                  const xdi_cuda_norm_item &a, xd_norm_type type, float x) {
    const uint32_t bits = xdi_cuda_norm_bits(x);
    if (bits >= 0x7f800000u) {
        xdi_cuda_norm_count(part, bits);
        return;
    }
    if (a.replica) return;
    int exponent;
    const uint64_t mantissa = xd_norm_mantissa(x, &exponent);
    if (type == XD_NORM_L2)
        window->add(limbs, mantissa * mantissa, 2 * exponent + 320);
    else
        window->add(limbs, mantissa, exponent + 320);
}

/* Merges a block's parts. What is not finite is rare, and a norm has a sum or a largest element. */
static __device__ inline void xdi_cuda_norm_reduce(xd_norm_type type, xdi_cuda_norm_part *part) {
    if (__syncthreads_or(part->not_finite != 0)) {
        const xdi_cuda_norm_part none = { 0.0, 0.0, 0, 0 };
        *part = xdi_cuda_block_reduce(*part, none, xdi_cuda_norm_join());
    } else if (type == XD_NORM_MAX) {
        part->largest = xdi_cuda_block_reduce(part->largest, 0.0, xdi_cuda_larger());
    } else {
        part->sum = xdi_cuda_block_reduce(part->sum, 0.0, xdi_cuda_norm_plus());
    }
}

/* Four blocks fit on a multiprocessor: so an H100 runs all 512 at once. */
template <bool EXACT>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 4)
    xdi_cuda_norm_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_norm_item> list, xd_norm_type type,
                         xd_norm_sum *parts) {
    XD_SHARED(unsigned long long, limbs, [XD_NORM_LIMBS]);
    xdi_cuda_norm_part part = { 0.0, 0.0, 0, 0 };
    xdi_cuda_window window = { 0, 0, -1, 0 };
    if (EXACT) {
        if (threadIdx.x < XD_NORM_LIMBS) limbs[threadIdx.x] = 0;
        __syncthreads();
    }
    xdi_cuda_each_kept(list, [&](int, const xdi_cuda_norm_item &a, xdi_cuda_span span) {
        if (!EXACT) {
            XDI_CUDA_FLOATS(a.dtype, T, { xdi_cuda_norm_plain<T>(a, type, span, &part); })
            return;
        }
        if (window.terms > 65536 - 512) window.flush(limbs); /* before this chunk could overflow it */
        xdi_cuda_walk(
            span, a.wide != 0,
            [&](int64_t i) {
                float values[8];
                xdi_cuda_read8(a.data, a.dtype, i, values);
                XD_UNROLL
                for (int j = 0; j < 8; j++) xdi_cuda_norm_exact(&part, &window, limbs, a, type, values[j]);
            },
            [&](int64_t i) {
                xdi_cuda_norm_exact(&part, &window, limbs, a, type, xdi_cuda_read_float(a.data, a.dtype, i));
            });
    });
    if (EXACT) window.flush(limbs);
    xdi_cuda_norm_reduce(type, &part); /* also the barrier after the limbs */
    xd_norm_sum *out = parts + blockIdx.x;
    if (threadIdx.x == 0) {
        out->sum = part.sum;
        out->largest = part.largest;
        out->not_finite = part.not_finite;
        out->nan = part.nan;
    }
    if (EXACT && threadIdx.x < XD_NORM_LIMBS)
        out->limbs[threadIdx.x] = (int64_t)limbs[threadIdx.x];
}

/* Adds the partial sums to the sum: one block; a thread per partial sum, then a thread per limb. */
template <bool EXACT>
static __global__ void __launch_bounds__(XDI_CUDA_NORM_BLOCKS)
    xdi_cuda_norm_join_kernel(const xd_norm_sum *parts, int count, xd_norm_sum *sum) {
    XD_SHARED(int64_t, limbs, [XD_NORM_LIMBS]);
    const int t = (int)threadIdx.x;
    xdi_cuda_norm_part part = { 0.0, 0.0, 0, 0 };
    const xdi_cuda_norm_part none = part;
    if (t < count) {
        part.sum = parts[t].sum;
        part.largest = parts[t].largest;
        part.not_finite = parts[t].not_finite;
        part.nan = parts[t].nan;
    }
    part = xdi_cuda_block_reduce(part, none, xdi_cuda_norm_join());
    if (EXACT) {
        if (t < XD_NORM_LIMBS) {
            limbs[t] = sum->limbs[t];
            for (int k = 0; k < count; k++) limbs[t] += parts[k].limbs[t];
        }
        __syncthreads();
    }
    if (t != 0) return;
    sum->sum = xd_add(sum->sum, part.sum);
    sum->largest = sum->largest > part.largest ? sum->largest : part.largest;
    sum->not_finite += part.not_finite;
    sum->nan += part.nan;
    if (!EXACT) return;
    xd_norm_carry(limbs);
    for (int k = 0; k < XD_NORM_LIMBS; k++) sum->limbs[k] = limbs[k];
}

/* Adds the norm of a list to the sum: two launches. */
template <bool EXACT>
static xd_result xdi_cuda_norm_of(const xd_launch *launch, const xdi_cuda_kept<xdi_cuda_norm_item> &list, xd_norm_type type,
                                  xd_norm_sum *sum) {
    xd_norm_sum *parts = (xd_norm_sum *)xdi_cuda_of(launch->ctx)->workspace;
    const int blocks = list.chunks < XDI_CUDA_NORM_BLOCKS ? (int)list.chunks : (int)XDI_CUDA_NORM_BLOCKS;
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_THREADS), xdi_cuda_norm_kernel<EXACT>, list, type, parts));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_NORM_BLOCKS), xdi_cuda_norm_join_kernel<EXACT>, parts, blocks,
                           sum);
}

/* The list of a former norm that has these arrays, or the one whose turn it is to change. */
template <typename MakeItem>
static xd_array_list *xdi_cuda_norm_list(xd_cuda *cuda, int64_t count, MakeItem make_item) {
    for (xd_array_list *list : cuda->norms)
        if (xdi_cuda_list_holds<xdi_cuda_norm_item>(list, count, make_item)) return list;
    cuda->norm = (cuda->norm + 1) % XDI_CUDA_NORMS;
    return cuda->norms[cuda->norm];
}

static xd_result xdi_cuda_norm(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum) {
    const bool exact = args->exact && args->type != XD_NORM_MAX;
    for (int64_t k = 0; k < args->array_count; k++)
        XD_REQUIRE(launch->ctx, xdi_cuda_is_narrow_float(args->arrays[k].dtype), XD_ERROR_DTYPE,
                    "array %lld: norms take F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(args->arrays[k].dtype));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    const auto make_item = [&](int64_t k, xdi_cuda_norm_item *item) {
        const xd_norm_array *a = &args->arrays[k];
        item->data = a->data;
        item->count = (uint64_t)a->count & 0xffffffffffffu;
        item->dtype = (uint8_t)a->dtype;
        item->replica = a->replica;
        item->wide = xdi_cuda_is_aligned16(a->data);
        return a->count;
    };
    return xdi_cuda_listed<xdi_cuda_norm_item>(
        launch, xdi_cuda_norm_list(cuda, args->array_count, make_item), false, args->array_count, make_item,
        [&](const xdi_cuda_kept<xdi_cuda_norm_item> &list) {
            return list.chunks == 0 ? (xd_result)XD_OK
                   : exact          ? xdi_cuda_norm_of<true>(launch, list, args->type, sum)
                                    : xdi_cuda_norm_of<false>(launch, list, args->type, sum);
        });
}

/* ---- clip ---- */

static __global__ void xdi_cuda_clip_kernel(const __grid_constant__ xd_clip_args args) {
    if (threadIdx.x == 0) xd_clip_write(&args);
}

static xd_result xdi_cuda_clip(const xd_launch *launch, const xd_clip_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_clip_kernel, *args);
}

static xd_result xdi_cuda_norm_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_join_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_join_kernel<true>));
    return xdi_cuda_load(ctx, xdi_cuda_clip_kernel);
}

/* >>cuda/loss.cu */

/* The losses over a row of logits: kernel/cpu/loss.c is the reference, kernel/loss.h has the formulas.
 *
 * references, stats, mixture: one read of the rows. grad: one read, one write; the gradient may be the student's
 * memory, each thread reads its eight columns before it writes them. Terms are f32, with base-2 exponentials; what is
 * summed over a row, and all that follows per row, is double. A probability below 2^-149 is 0 here. */

static __device__ inline bool xdi_cuda_loss_has_soft(const xd_loss_args &a) {
    return a.teacher.data && a.soft_weight != 0.0;
}

static __device__ inline bool xdi_cuda_loss_has_hard(const xd_loss_args &a) {
    return a.labels.data && a.hard_weight != 0.0;
}

/* ---- references: grid (rows / teams), block 256 ---- */

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_loss_references_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>(), columns = a.vocab.end - a.vocab.begin;
    if (r >= a.student.rows) return; /* the whole team returns */
    const bool counts = a.row_scale[r] != 0.0, soft = counts && xdi_cuda_loss_has_soft(a);
    xdi_cuda_largest student = { 0.0f, 0, 0 }, teacher = { 0.0f, 0, 0 };
    if (counts) student = xdi_cuda_row_largest<TEAM>(a.student, r, columns);
    if (soft) teacher = xdi_cuda_row_largest<TEAM>(a.teacher, r, columns);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    double *ref = a.references + r * XD_LOSS_REFERENCES;
    const bool empty = student.arg == INT64_MAX;
    const double nan = (double)NAN;
    ref[XD_LOSS_MAX] = student.broken ? nan : (double)student.max;
    ref[XD_LOSS_ARG] = !counts ? 0.0 : empty ? -1.0 : (double)(student.arg + a.vocab.begin);
    ref[XD_LOSS_TEACHER_AT_ARG] = 0.0;
    if (soft)
        ref[XD_LOSS_TEACHER_AT_ARG] =
            empty ? -(double)INFINITY : (double)xdi_cuda_element(a.teacher, r, student.arg);
    ref[XD_LOSS_TEACHER_MAX] = teacher.broken ? nan : (double)teacher.max;
}

static xd_result xdi_cuda_loss_references(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_loss_references_kernel<TEAM>, *a);
    })
}

/* References of the whole row from those of all shards. */
static __device__ void xdi_cuda_loss_whole_reference(const xd_loss_args &a, int64_t r, double *ref) {
    xd_loss_no_reference(ref);
    XD_UNROLL_N(1)
    for (int i = 0; i < a.vocab.shards; i++)
        xd_loss_join_reference(ref, a.all_references + i * a.reference_stride + r * XD_LOSS_REFERENCES);
}

/* One thread per row. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_loss_merge_references_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    double ref[XD_LOSS_REFERENCES]; /* one shard reads and writes the same memory */
    xdi_cuda_loss_whole_reference(a, r, ref);
    for (int i = 0; i < XD_LOSS_REFERENCES; i++) a.references[r * XD_LOSS_REFERENCES + i] = ref[i];
}

static xd_result xdi_cuda_loss_merge_references(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_merge_references_kernel,
                           *a);
}

/* ---- stats: grid (rows / teams), block 256 ---- */

enum { XDI_CUDA_LOSS_TERMS = XD_LOSS_LINEAR + 1 }; /* HARD .. LINEAR come from every column */

/* What the terms of a row are computed with. */
struct xdi_cuda_loss_row {
    float max, teacher_max, at_arg;
    float per_tau, hard_factor, soft_factor; /* 1 / tau, and log2(e) without and with it */
    bool hard, soft, uniform, shared;        /* shared: tau is 1, hard and soft have the same exponential */
    xd_divergence divergence;
};

/* Y is the teacher's type. */
template <typename Y>
static __device__ inline xdi_cuda_loss_row xdi_cuda_loss_row_of(const xd_loss_args &a, double max, double teacher_max,
                                                                double at_arg) {
    xdi_cuda_loss_row w;
    w.max = (float)max; /* logits are f32: exact */
    w.teacher_max = (float)teacher_max;
    w.at_arg = (float)at_arg;
    w.per_tau = xdi_cuda_factor(1.0 / a.temperature);
    w.hard_factor = (float)XDI_CUDA_LOG2E;
    w.soft_factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature);
    w.hard = xdi_cuda_held(xdi_cuda_loss_has_hard(a)) != 0;
    w.soft = xdi_cuda_is<Y>::GIVEN != 0;
    w.uniform = xdi_cuda_held(a.uniform_weight != 0.0) != 0;
    w.shared = xdi_cuda_held(a.temperature == 1.0) != 0;
    w.divergence = (xd_divergence)xdi_cuda_held((int)a.divergence);
    return w;
}

/* The term of CROSS at one column from dx = x - M and dy = y - N; 0 where the weighting probability is 0, so that 0 * infinity
 * never occurs. */
static __device__ inline float xdi_cuda_loss_cross(const xdi_cuda_loss_row &w, float e_s, float e_t, float dx,
                                                   float dy, float y) {
    switch (w.divergence) {
    case XD_KL_FORWARD: return e_t > 0.0f ? __fmul_rn(e_t, __fmul_rn(__fsub_rn(dy, dx), w.per_tau)) : 0.0f;
    case XD_SOFT_CE: return e_t > 0.0f ? __fmul_rn(e_t, __fmul_rn(dx, w.per_tau)) : 0.0f;
    case XD_KL_REVERSE:
        return e_s > 0.0f ? __fmul_rn(e_s, __fmul_rn(__fsub_rn(dx, __fsub_rn(y, w.at_arg)), w.per_tau))
                          : 0.0f;
    default: return 0.0f; /* JSD needs the normalisers first */
    }
}

/* Adds a power whose exponent is `difference`. The largest element's 1 is not added to the f32 part of the sum, so that the
 * other terms keep their digits: on nearly one-hot rows the gradient consists of them. */
template <typename Sums>
static __device__ inline void xdi_cuda_loss_add_power(Sums *sums, int which, float power, float difference) {
    if (difference == 0.0f)
        sums->add_wide(which, 1.0);
    else
        sums->add(which, power);
}

template <typename Sums>
static __device__ inline void xdi_cuda_loss_terms(const xdi_cuda_loss_row &w, float x, float y, Sums *sums) {
    const float dx = xdi_cuda_minus(x, w.max);
    const float e = w.hard || w.shared ? xdi_cuda_exp_of(dx, w.hard_factor) : 0.0f;
    if (w.hard) xdi_cuda_loss_add_power(sums, XD_LOSS_HARD, e, dx);
    if (w.hard && w.uniform)
        sums->add_wide(XD_LOSS_LINEAR, w.max == -INFINITY ? -(double)INFINITY : xd_sub((double)x, (double)w.max));
    if (!w.soft) return;
    const float dy = xdi_cuda_minus(y, w.teacher_max);
    const float e_s = w.shared ? e : xdi_cuda_exp_of(dx, w.soft_factor);
    const float e_t = xdi_cuda_exp_of(dy, w.soft_factor);
    xdi_cuda_loss_add_power(sums, XD_LOSS_SOFT, e_s, dx);
    xdi_cuda_loss_add_power(sums, XD_LOSS_TEACHER, e_t, dy);
    sums->add(XD_LOSS_CROSS, xdi_cuda_loss_cross(w, e_s, e_t, dx, dy, y));
}

/* Logits of either type. */
template <bool FIXED, int TEAM>
static __device__ inline void xdi_cuda_loss_stats_row(const xd_loss_args &a, int64_t r, const double *ref,
                                                      xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, FIXED> *sums) {
    xdi_cuda_loss_row w =
        xdi_cuda_loss_row_of<float>(a, ref[XD_LOSS_MAX], ref[XD_LOSS_TEACHER_MAX], ref[XD_LOSS_TEACHER_AT_ARG]);
    w.soft = xdi_cuda_loss_has_soft(a);
    const int64_t columns = a.vocab.end - a.vocab.begin;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns);
        xdi_cuda_eight y = {};
        if (w.soft) y = xdi_cuda_read_any(a.teacher, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < columns) xdi_cuda_loss_terms(w, x.at[i], y.at[i], sums);
        sums->end_eight();
    }
}

/* TARGET of the shard that owns the label. */
static __device__ inline double xdi_cuda_loss_target(const xd_loss_args &a, int64_t r, double max) {
    if (!xdi_cuda_loss_has_hard(a)) return 0.0;
    const int64_t target = xd_id_at(a.labels, r) - a.vocab.begin;
    if (target < 0 || target >= a.vocab.end - a.vocab.begin) return 0.0;
    const double x = (double)xdi_cuda_element(a.student, r, target);
    return max == -(double)INFINITY ? -(double)INFINITY : xd_sub(x, max);
}

static __device__ inline void xdi_cuda_loss_put(void *to,
                                                const xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false>::totals &t,
                                                double target, bool broken) {
    double *sums = static_cast<double *>(to);
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) sums[i] = t.sum[i];
    sums[XD_LOSS_TARGET] = target;
    sums[XD_LOSS_BAD] = broken ? 1.0 : 0.0;
}

static __device__ inline void xdi_cuda_loss_put(void *to,
                                                const xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, true>::totals &t,
                                                double target, bool broken) {
    xd_fixed *sums = static_cast<xd_fixed *>(to);
    xdi_cuda_misfits misfits = t.misfits;
    xd_fixed at_target = { 0, 0 };
    xdi_cuda_fixed_add(&at_target, target, &misfits);
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) xdi_cuda_fixed_put(&sums[i], t.sum[i]);
    xdi_cuda_fixed_put(&sums[XD_LOSS_TARGET], at_target);
    sums[XD_LOSS_BAD].high = misfits.infinite + (broken ? 1 : 0);
    sums[XD_LOSS_BAD].low = misfits.large;
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_loss_stats_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const double *ref = a.references + r * XD_LOSS_REFERENCES;
    const bool broken = isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX]);
    const bool counts = !broken && a.row_scale[r] != 0.0;
    xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, FIXED> mine;
    if (counts) xdi_cuda_loss_stats_row<FIXED, TEAM>(a, r, ref, &mine);
    const typename xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, FIXED>::totals totals =
        xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    const double target = counts ? xdi_cuda_loss_target(a, r, ref[XD_LOSS_MAX]) : 0.0;
    const size_t size = FIXED ? sizeof(xd_fixed) : sizeof(double);
    xdi_cuda_loss_put(static_cast<char *>(a.sums) + (size_t)r * XD_LOSS_SUMS * size, totals, target, broken);
}

static xd_result xdi_cuda_loss_stats(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_loss_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM), (xdi_cuda_loss_stats_kernel<false, TEAM>), *a);
    })
}

/* ---- combine: one thread per row, in double ---- */

static __device__ void xdi_cuda_loss_total_fixed(const xd_loss_args &a, int64_t r, double *total,
                                                 xd_loss_row *row) {
    const xd_fixed *all = static_cast<const xd_fixed *>(a.all_sums);
    for (int i = 0; i < XD_LOSS_SUMS; i++) {
        xd_fixed sum = { 0, 0 };
        for (int shard = 0; shard < a.vocab.shards; shard++) {
            const xd_fixed *part = all + shard * a.sums_stride + r * XD_LOSS_SUMS + i;
            sum.high += part->high;
            sum.low += part->low;
        }
        if (i == XD_LOSS_BAD && sum.low > 0) row->finding = (int)XD_ROW_OVERFLOW;
        if (i == XD_LOSS_BAD && sum.high > 0) row->finding = (int)XD_ROW_NOT_FINITE;
        total[i] = xd_fixed_read(sum);
    }
}

static __device__ void xdi_cuda_loss_total_plain(const xd_loss_args &a, int64_t r, const double *ref,
                                                 double *total) {
    const double *all = static_cast<const double *>(a.all_sums);
    for (int i = 0; i < XD_LOSS_SUMS; i++) total[i] = 0.0;
    XD_UNROLL_N(1)
    for (int i = 0; i < a.vocab.shards; i++) {
        const double *own = a.all_references + i * a.reference_stride + r * XD_LOSS_REFERENCES;
        const double *sums = all + i * a.sums_stride + r * XD_LOSS_SUMS;
        const int64_t begin = a.vocab.offsets[i], end = a.vocab.offsets[i + 1];
        xd_loss_rescale(&a, ref, own, sums, end - begin, total);
        const int64_t label = xdi_cuda_loss_has_hard(a) ? xd_id_at(a.labels, r) : -1;
        if (label >= begin && label < end)
            total[XD_LOSS_TARGET] = sums[XD_LOSS_TARGET] + (own[XD_LOSS_MAX] - ref[XD_LOSS_MAX]);
    }
    if (isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX])) total[XD_LOSS_BAD] += 1.0;
}

/* The scalars of a row from the references and sums of all of it. */
static __device__ inline void xdi_cuda_loss_scalars(const xd_loss_args &a, int64_t r, const double *ref,
                                                    const double *total, xd_loss_row *row) {
    xd_loss_take_references(ref, row);
    const int64_t label = a.labels.data ? xd_id_at(a.labels, r) : 0;
    if (label < 0 || label >= a.vocab.size) {
        row->finding = (int)XD_ROW_LABEL;
        return;
    }
    xd_loss_scalars(&a, xdi_cuda_loss_has_hard(a), xdi_cuda_loss_has_soft(a), a.vocab.size, total, row);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_loss_combine_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    xd_loss_row row;
    memset(&row, 0, sizeof row);
    if (a.row_scale[r] != 0.0) {
        double total[XD_LOSS_SUMS], ref[XD_LOSS_REFERENCES];
        xdi_cuda_loss_whole_reference(a, r, ref);
        if (a.fixed)
            xdi_cuda_loss_total_fixed(a, r, total, &row);
        else
            xdi_cuda_loss_total_plain(a, r, ref, total);
        xdi_cuda_loss_scalars(a, r, ref, total, &row);
        xd_loss_settle(&a, r, &row);
    }
    a.row[r] = row;
}

static xd_result xdi_cuda_loss_combine(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_combine_kernel, *a);
}

/* ---- probabilities of a row after combine ---- */

/* Probabilities come as e^(x - M) times the inverse of the whole sum: the logarithm of a large sum has too few digits
 * in f32. d is the logarithm of teacher/student. */
struct xdi_cuda_loss_scales {
    xdi_cuda_loss_row row;
    float hard_inverse, soft_inverse, teacher_inverse;
    float log_gap; /* ln of the student's sum less that of the teacher's */
    float beta, top, mean;
};

template <typename Y>
static __device__ inline xdi_cuda_loss_scales xdi_cuda_loss_scales_of(const xd_loss_args &a, const xd_loss_row &row) {
    xdi_cuda_loss_scales s;
    s.row = xdi_cuda_loss_row_of<Y>(a, row.max, row.teacher_max, row.teacher_at_arg);
    s.hard_inverse = s.row.hard ? (float)exp(-row.hard_log) : 0.0f;
    s.soft_inverse = s.row.soft ? (float)exp(-row.soft_log) : 0.0f;
    s.teacher_inverse = s.row.soft ? (float)exp(-row.teacher_log) : 0.0f;
    s.log_gap = (float)(row.soft_log - row.teacher_log);
    s.beta = (float)a.beta;
    s.top = (float)row.top;
    s.mean = (float)row.mean;
    return s;
}

/* xd_log_ratios in f32, without branches. With a = |d| one of the two is -ln(1 + u), u = w (e^-a - 1), w the weight of what
 * is less probable, and the other is d away. For small a, where a logarithm near 1 has no digits, by series. */
static __device__ inline void xdi_cuda_loss_log_ratios_of(float d, float beta, float *student,
                                                          float *teacher) {
    const float a = fabsf(d), rest = __fsub_rn(1.0f, beta), less = d > 0.0f ? rest : beta;
    const float more = d > 0.0f ? beta : rest;
    const float e = xdi_cuda_power(__fmul_rn(a, -(float)XDI_CUDA_LOG2E));
    const float direct = __fmul_rn(xdi_cuda_log2(__fmaf_rn(less, e, more)), -0.69314718f);
    float u = __fmaf_rn(a, 1.0f / 5040.0f, -1.0f / 720.0f);
    u = __fmaf_rn(a, u, 1.0f / 120.0f);
    u = __fmaf_rn(a, u, -1.0f / 24.0f);
    u = __fmaf_rn(a, u, 1.0f / 6.0f);
    u = __fmaf_rn(a, u, -0.5f);
    u = __fmul_rn(__fmul_rn(less, -a), __fmaf_rn(a, u, 1.0f)); /* w (e^-a - 1) */
    const float z = xdi_cuda_ratio(u, __fadd_rn(2.0f, u)), zz = __fmul_rn(z, z);
    float series = __fmaf_rn(zz, 1.0f / 9.0f, 1.0f / 7.0f);
    series = __fmaf_rn(zz, series, 0.2f);
    series = __fmaf_rn(zz, series, 1.0f / 3.0f);
    series = __fmul_rn(__fmul_rn(-2.0f, z), __fmaf_rn(zz, series, 1.0f)); /* -2 artanh(z) = -ln(1 + u) */
    const float first = a < 0.5f ? series : direct;
    *student = d > 0.0f ? __fsub_rn(first, d) : first;
    *teacher = d > 0.0f ? first : __fadd_rn(first, d);
}

static __device__ inline float xdi_cuda_loss_log_ratio(const xdi_cuda_loss_scales &s, float dx, float dy) {
    return __fmaf_rn(__fsub_rn(dy, dx), s.row.per_tau, s.log_gap);
}

/* ---- mixture (JSD): grid (rows / teams), block 256 ---- */

template <typename Sums>
static __device__ inline void xdi_cuda_loss_mixture_terms(const xdi_cuda_loss_scales &s, float x, float y,
                                                          Sums *sums) {
    const float dx = __fsub_rn(x, s.row.max), dy = __fsub_rn(y, s.row.teacher_max);
    const float p = __fmul_rn(xdi_cuda_exp_of(dx, s.row.soft_factor), s.soft_inverse);
    const float q = __fmul_rn(xdi_cuda_exp_of(dy, s.row.soft_factor), s.teacher_inverse);
    float student, teacher;
    xdi_cuda_loss_log_ratios_of(xdi_cuda_loss_log_ratio(s, dx, dy), s.beta, &student, &teacher);
    sums->add(XD_LOSS_TEACHER_MIXTURE, q > 0.0f ? __fmul_rn(q, teacher) : 0.0f);
    sums->add(XD_LOSS_STUDENT_MIXTURE, p > 0.0f ? __fmul_rn(p, __fsub_rn(student, s.top)) : 0.0f);
}

template <bool FIXED, int TEAM>
static __device__ inline typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::totals
xdi_cuda_loss_mixture_row(const xd_loss_args &a, int64_t r, bool counts) {
    const int64_t columns = a.vocab.end - a.vocab.begin;
    const xdi_cuda_loss_scales s = xdi_cuda_loss_scales_of<float>(a, a.row[r]); /* a teacher of either type */
    xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED> mine;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); counts && c < columns;
         c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns);
        const xdi_cuda_eight y = xdi_cuda_read_any(a.teacher, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < columns) xdi_cuda_loss_mixture_terms(s, x.at[i], y.at[i], &mine);
        mine.end_eight();
    }
    return xdi_cuda_team_totals<TEAM>(mine);
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_loss_mixture_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const bool counts = a.row_scale[r] != 0.0 && a.row[r].finding == (int)XD_ROW_FINE;
    const typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::totals totals =
        xdi_cuda_loss_mixture_row<FIXED, TEAM>(a, r, counts);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::sum_type *to =
        static_cast<typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::sum_type *>(a.mixtures) +
        r * XD_LOSS_MIXTURES;
    for (int i = 0; i < XD_LOSS_MIXTURES; i++) to[i] = totals.sum[i];
}

static xd_result xdi_cuda_loss_mixture(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_loss_mixture_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM), (xdi_cuda_loss_mixture_kernel<false, TEAM>), *a);
    })
}

static __device__ double xdi_cuda_loss_mixture_total(const xd_loss_args &a, int64_t r, int which) {
    double total = 0.0;
    xd_fixed exact = { 0, 0 };
    for (int i = 0; i < a.vocab.shards; i++) {
        const int64_t at = (i * a.student.rows + r) * XD_LOSS_MIXTURES + which;
        if (a.fixed) {
            exact.high += static_cast<const xd_fixed *>(a.all_mixtures)[at].high;
            exact.low += static_cast<const xd_fixed *>(a.all_mixtures)[at].low;
        } else {
            total += static_cast<const double *>(a.all_mixtures)[at];
        }
    }
    return a.fixed ? xd_fixed_read(exact) : total;
}

/* One thread per row. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_loss_mixture_combine_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows || a.row_scale[r] == 0.0 || a.row[r].finding != (int)XD_ROW_FINE) return;
    xd_loss_mixture_scalars(&a, r, xdi_cuda_loss_mixture_total(a, r, XD_LOSS_TEACHER_MIXTURE),
                                  xdi_cuda_loss_mixture_total(a, r, XD_LOSS_STUDENT_MIXTURE), a.row + r);
}

static xd_result xdi_cuda_loss_mixture_combine(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_mixture_combine_kernel,
                           *a);
}

/* ---- grad: grid (rows / teams), block 256 ---- */

/* Weights of the losses in a row's gradient, including its scale. */
struct xdi_cuda_loss_weights {
    float hard, soft; /* of p, and of the divergence's gradient */
    float uniform;    /* what hard subtracts everywhere; at the label see xdi_cuda_loss_column */
};

/* d soft / d (x / tau) of eight columns; *e has e^(dx / tau) and becomes the gradient. What the call has is asked once for
 * all of them: a branch for each costs as much as its arithmetic. */
static __device__ inline void xdi_cuda_loss_soft_gradient(const xdi_cuda_loss_scales &s, const xdi_cuda_eight &dx,
                                                          const xdi_cuda_eight &y, xdi_cuda_eight *e) {
    const float rest = __fsub_rn(1.0f, s.beta);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) e->at[i] = __fmul_rn(e->at[i], s.soft_inverse);
    if (s.row.divergence == XD_KL_REVERSE) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float p = e->at[i], gap = __fsub_rn(dx.at[i], __fsub_rn(y.at[i], s.row.at_arg));
            e->at[i] = p > 0.0f ? __fmul_rn(p, __fmaf_rn(gap, s.row.per_tau, -s.mean)) : 0.0f;
        }
    } else if (s.row.divergence == XD_JSD) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float p = e->at[i], dy = __fsub_rn(y.at[i], s.row.teacher_max);
            float student, teacher;
            xdi_cuda_loss_log_ratios_of(xdi_cuda_loss_log_ratio(s, dx.at[i], dy), s.beta, &student, &teacher);
            const float slope = __fsub_rn(__fsub_rn(student, s.top), s.mean);
            e->at[i] = p > 0.0f ? __fmul_rn(__fmul_rn(p, rest), slope) : 0.0f;
        }
    } else {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float q = xdi_cuda_exp_of(__fsub_rn(y.at[i], s.row.teacher_max), s.row.soft_factor);
            e->at[i] = __fmaf_rn(-q, s.teacher_inverse, e->at[i]);
        }
    }
}

static __device__ inline xdi_cuda_eight xdi_cuda_loss_gradient(const xdi_cuda_loss_scales &s,
                                                               const xdi_cuda_loss_weights &w,
                                                               const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
    xdi_cuda_eight dx, e = {}, g = {};
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) dx.at[i] = __fsub_rn(x.at[i], s.row.max);
    if (s.row.hard || s.row.shared) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) e.at[i] = xdi_cuda_exp_of(dx.at[i], s.row.hard_factor);
    }
    if (s.row.hard) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            g.at[i] = __fmul_rn(w.hard, __fsub_rn(__fmul_rn(e.at[i], s.hard_inverse), w.uniform));
    }
    if (!s.row.soft) return g;
    if (!s.row.shared) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) e.at[i] = xdi_cuda_exp_of(dx.at[i], s.row.soft_factor);
    }
    xdi_cuda_loss_soft_gradient(s, dx, y, &e);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) g.at[i] = __fmaf_rn(w.soft, e.at[i], g.at[i]);
    return g;
}

/* A column that may hold nearly all probability, where 1 - p has no digits in f32: the label's, or the student's most
 * probable one. Its gradient is double, from logits that are read before the row is overwritten. */
struct xdi_cuda_loss_column {
    int64_t at; /* -1: not on this shard */
    double x, y;
};

static __device__ inline xdi_cuda_loss_column xdi_cuda_loss_column_of(const xd_loss_args &a, int64_t r,
                                                                      int64_t id) {
    xdi_cuda_loss_column column = { -1, 0.0, 0.0 };
    if (id < a.vocab.begin || id >= a.vocab.end) return column;
    column.at = id - a.vocab.begin;
    column.x = (double)xdi_cuda_element(a.student, r, column.at);
    if (a.teacher.data) column.y = (double)xdi_cuda_element(a.teacher, r, column.at);
    return column;
}

/* xdi_loss_gradient_at of kernel/cpu/loss.c. */
XDI_CUDA_APART __device__ double xdi_cuda_loss_gradient_at(const xd_loss_args &a, int64_t r, const xd_loss_row &row,
                                                           const xdi_cuda_loss_column &column) {
    double g = 0.0;
    if (xdi_cuda_loss_has_hard(a))
        g = xd_loss_hard_gradient(&a, &row, column.x, column.at + a.vocab.begin == xd_id_at(a.labels, r));
    if (xdi_cuda_loss_has_soft(a))
        g = xd_loss_add_soft(&a, g, xd_loss_soft_gradient(&a, &row, column.x, column.y));
    return xd_mul(a.row_scale[r], g);
}

template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_grad_columns(const xd_loss_args &a, int64_t r,
                                                         const xd_loss_row &row, int64_t columns) {
    const xdi_cuda_loss_scales s = xdi_cuda_loss_scales_of<Y>(a, row);
    const xdi_cuda_loss_weights w = { (float)(a.row_scale[r] * a.hard_weight),
                                      (float)(a.row_scale[r] * a.soft_weight / a.temperature),
                                      (float)a.uniform_weight };
    const xdi_cuda_line<X> student = xdi_cuda_line<X>::of(a.student, r);
    const xdi_cuda_line<Y> teacher = xdi_cuda_line<Y>::of(a.teacher, r);
    /* Backwards: what was read last is still in the cache. At the end what is not whole. */
    const int64_t width = a.gradient.cols, step = XDI_CUDA_EIGHT * TEAM, first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    void *gradient = xdi_cuda_aligned_row(a.gradient, r);
    const bool aligned = gradient && xdi_cuda_is_aligned16(student.at) && xdi_cuda_is_aligned16(teacher.at);
    const bool wide = xdi_cuda_held(a.gradient.dtype == XD_DTYPE_F32) != 0;
    const int whole = aligned ? (int)((columns < width ? columns : width) / step) : 0;
    const int64_t last = first + (whole - 1) * step;
    xdi_cuda_in_memory::walk(
        student, teacher, last, -step, whole, xdi_cuda_steps_of(first, width, step),
        [&](int k, xdi_cuda_eight *x, xdi_cuda_eight *y) {
            *x = student.eight(first + k * step, columns, 0.0f);
            *y = teacher.eight(first + k * step, columns, 0.0f);
        },
        [&](int k, const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
            const int64_t c = first + k * step;
            xdi_cuda_eight g = xdi_cuda_loss_gradient(s, w, x, y);
            if (k >= whole) {
                XD_UNROLL
                for (int i = 0; i < XDI_CUDA_EIGHT; i++) g.at[i] = c + i < columns ? g.at[i] : 0.0f;
                xdi_cuda_write_any(a.gradient, r, c, width, g);
            } else if (wide) {
                xdi_cuda_write_whole(static_cast<float *>(gradient) + last - k * step, g);
            } else {
                xdi_cuda_write_whole(static_cast<xdi_cuda_bf16 *>(gradient) + last - k * step, g);
            }
        });
}

template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_grad_row(const xd_loss_args &a, int64_t r) {
    const xd_loss_row row = a.row[r];
    const bool counts = a.row_scale[r] != 0.0 && row.finding == (int)XD_ROW_FINE;
    xdi_cuda_loss_column exact[2] = { { -1, 0.0, 0.0 }, { -1, 0.0, 0.0 } };
    if (counts && xdi_cuda_team_thread<TEAM>() == 0) {
        exact[0] = xdi_cuda_loss_column_of(a, r, (int64_t)row.argmax);
        exact[1] = xdi_cuda_loss_column_of(a, r, xdi_cuda_loss_has_hard(a) ? xd_id_at(a.labels, r) : -1);
    }
    xdi_cuda_team_sync<TEAM>(); /* now the row may be overwritten */
    xdi_cuda_loss_grad_columns<X, Y, TEAM>(a, r, row, counts ? a.vocab.end - a.vocab.begin : 0);
    xdi_cuda_team_sync<TEAM>();
    XD_UNROLL
    for (int i = 0; i < 2; i++)
        if (exact[i].at >= 0)
            xdi_cuda_set_element(a.gradient, r, exact[i].at,
                                 (float)xdi_cuda_loss_gradient_at(a, r, row, exact[i]));
}

/* As many blocks on a multiprocessor as registers allow without spilling, so that some load while others compute. */
template <typename Y> struct xdi_cuda_loss_blocks {
    enum { LEAST = xdi_cuda_is<Y>::GIVEN ? 2 : 4 };
};

template <typename X, typename Y, int TEAM>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, xdi_cuda_loss_blocks<Y>::LEAST)
xdi_cuda_loss_grad_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r < a.student.rows) xdi_cuda_loss_grad_row<X, Y, TEAM>(a, r); /* the whole team returns */
}

static xd_result xdi_cuda_loss_grad(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOSS_CASES(a, X, Y, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               (xdi_cuda_loss_grad_kernel<X, Y, TEAM>), *a);
    })
}

/* >>cuda/loss_sweep.cu */

/* References and sums of a row of logits, or of the part of one that a block of a cluster holds, in one read.
 *
 * The lanes of a warp sum relative to the largest elements that any of them has read; when a larger one comes, all of them
 * move to it together, which happens a few times in a row. What a call has, hard, soft, and which divergence, is asked once
 * for eight columns. A power of 1, that of the reference itself, is added apart from the others, so that these keep their
 * digits: on nearly one-hot rows the gradient consists of them.
 *
 * Nothing here looks for numbers that are not finite: a NaN makes the sum of the powers NaN, and infinity is the largest
 * element. */

/* The largest elements of a student's columns and where they are. */
struct xdi_cuda_summit {
    float max, teacher_max;
    float beside;  /* the teacher's logit at the student's largest; for KL_REVERSE */
    int32_t eight; /* the number of the eight columns that have the student's largest; INT32_MAX without columns */
};

struct xdi_cuda_summit_join {
    __device__ xdi_cuda_summit operator()(xdi_cuda_summit a, const xdi_cuda_summit &b) const {
        if (b.max > a.max || (b.max == a.max && b.eight < a.eight)) {
            a.max = b.max;
            a.beside = b.beside;
            a.eight = b.eight;
        }
        a.teacher_max = fmaxf(a.teacher_max, b.teacher_max);
        return a;
    }
};

/* A lane at work. The sums are relative to the references in `row`; LINEAR is the plain sum of x. */
struct xdi_cuda_loss_sweep {
    xdi_cuda_loss_row row;
    float base, teacher_base; /* the references; 0 instead of -infinity */
    xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false> sums;
    xdi_cuda_summit seen; /* by this lane */
};

/* How sums change with their references. */
struct xdi_cuda_loss_turn {
    double hard, student, teacher; /* what the sums of powers are multiplied by */
    double step;                   /* of CROSS, for a unit of what weights it */
};

/* e^x by one instruction, or exact. */
template <bool EXACT> static __device__ inline double xdi_cuda_loss_power_of(double x) {
    if (x == 0.0) return 1.0;
    return EXACT ? exp(x) : (double)xdi_cuda_exp_of((float)x, (float)XDI_CUDA_LOG2E);
}

template <bool EXACT>
static __device__ inline xdi_cuda_loss_turn xdi_cuda_loss_turn_to(const xdi_cuda_loss_row &from,
                                                                  const xdi_cuda_summit &to, double temperature) {
    const double shift = from.max == to.max ? 0.0 : (double)from.max - (double)to.max, z = shift / temperature;
    const double fall = from.teacher_max == to.teacher_max ? 0.0 : (double)from.teacher_max - (double)to.teacher_max;
    const double u = fall / temperature;
    xdi_cuda_loss_turn turn = { 1.0, 1.0, 1.0, z };
    if (from.hard) turn.hard = xdi_cuda_loss_power_of<EXACT>(shift);
    if (!from.soft) return turn;
    turn.student = xdi_cuda_loss_power_of<EXACT>(z);
    turn.teacher = xdi_cuda_loss_power_of<EXACT>(u);
    if (from.divergence == XD_KL_FORWARD) turn.step = u - z;
    if (from.divergence == XD_KL_REVERSE && from.at_arg != to.beside)
        turn.step -= ((double)from.at_arg - (double)to.beside) / temperature;
    return turn;
}

/* Adds what is summed in f32, which is done for sixteen columns together: a conversion to double costs as much as a power. */
static __device__ inline void xdi_cuda_loss_flush(xdi_cuda_loss_sweep *t) {
    XD_UNROLL
    for (int i = XD_LOSS_HARD; i <= XD_LOSS_CROSS; i++) {
        if (i == XD_LOSS_HARD ? !t->row.hard : !t->row.soft) continue;
        t->sums.add_wide(i, (double)t->sums.part[i]);
        t->sums.part[i] = 0.0f;
    }
}

/* Brings the sums to new references: xd_loss_rescale for one lane. Empty sums stay 0. */
template <bool EXACT>
static __device__ inline void xdi_cuda_loss_move(xdi_cuda_loss_sweep *t, double temperature, const xdi_cuda_summit &to) {
    double *sum = t->sums.whole.sum;
    const xdi_cuda_loss_turn turn = xdi_cuda_loss_turn_to<EXACT>(t->row, to, temperature);
    xdi_cuda_loss_flush(t);
    if (t->row.hard) sum[XD_LOSS_HARD] *= turn.hard;
    if (t->row.soft) {
        const bool reverse = t->row.divergence == XD_KL_REVERSE;
        const double mass = reverse ? sum[XD_LOSS_SOFT] : sum[XD_LOSS_TEACHER];
        const double factor = reverse ? turn.student : turn.teacher;
        sum[XD_LOSS_CROSS] = factor > 0.0 && mass > 0.0 ? factor * (sum[XD_LOSS_CROSS] + mass * turn.step) : 0.0;
        sum[XD_LOSS_SOFT] *= turn.student;
        sum[XD_LOSS_TEACHER] *= turn.teacher;
    }
    t->row.max = to.max;
    t->row.teacher_max = to.teacher_max;
    t->row.at_arg = to.beside;
    t->base = to.max == -INFINITY ? 0.0f : to.max;
    t->teacher_base = to.teacher_max == -INFINITY ? 0.0f : to.teacher_max;
}

/* What the lane has seen with these eight, whose largest are given; then the whole warp's references. Every lane calls it. */
static __device__ inline void xdi_cuda_loss_look(double temperature, const xdi_cuda_eight &x, const xdi_cuda_eight &y,
                                                 float max, float teacher_max, int64_t c, xdi_cuda_loss_sweep *t) {
    const bool higher = max > t->row.max || teacher_max > t->row.teacher_max;
    if (max > t->seen.max) {
        t->seen.max = max;
        t->seen.eight = (int32_t)(c / XDI_CUDA_EIGHT);
        if (t->row.divergence == XD_KL_REVERSE) {
            XD_UNROLL
            for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
                if (x.at[i] == max) t->seen.beside = y.at[i];
        }
    }
    t->seen.teacher_max = fmaxf(t->seen.teacher_max, teacher_max);
    if (__any_sync(0xffffffffu, higher))
        xdi_cuda_loss_move<false>(t, temperature, xdi_cuda_warp_reduce(t->seen, xdi_cuda_summit_join()));
}

/* Adds eight powers; `top`: one of them may be that of the reference. */
static __device__ inline void xdi_cuda_loss_add_powers(xdi_cuda_loss_sweep *t, int which, bool top,
                                                       const xdi_cuda_eight &power, const xdi_cuda_eight &difference) {
    if (!top) {
        t->sums.add(which, xdi_cuda_sum_of(power));
        return;
    }
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        xdi_cuda_loss_add_power(&t->sums, which, power.at[i], difference.at[i]);
}

/* The terms of CROSS, 0 where the weighting probability is 0; without the factor 1 / tau. */
static __device__ inline float xdi_cuda_loss_cross_of(const xdi_cuda_loss_row &w, const xdi_cuda_eight &e,
                                                      const xdi_cuda_eight &q, const xdi_cuda_eight &dx,
                                                      const xdi_cuda_eight &dy, const xdi_cuda_eight &y) {
    xdi_cuda_eight term;
    if (w.divergence == XD_KL_FORWARD) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            term.at[i] = q.at[i] > 0.0f ? __fmul_rn(q.at[i], __fsub_rn(dy.at[i], dx.at[i])) : 0.0f;
    } else if (w.divergence == XD_SOFT_CE) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) term.at[i] = q.at[i] > 0.0f ? __fmul_rn(q.at[i], dx.at[i]) : 0.0f;
    } else {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float gap = __fsub_rn(dx.at[i], __fsub_rn(y.at[i], w.at_arg));
            term.at[i] = e.at[i] > 0.0f ? __fmul_rn(e.at[i], gap) : 0.0f;
        }
    }
    return xdi_cuda_sum_of(term);
}

static __device__ inline xdi_cuda_eight xdi_cuda_differences_of(const xdi_cuda_eight &x, float base) {
    xdi_cuda_eight difference;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) difference.at[i] = __fsub_rn(x.at[i], base);
    return difference;
}

/* e^(difference / tau). */
static __device__ inline xdi_cuda_eight xdi_cuda_powers_of(const xdi_cuda_eight &difference, float factor) {
    xdi_cuda_eight power;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) power.at[i] = xdi_cuda_exp_of(difference.at[i], factor);
    return power;
}

/* Adds eight columns, -infinity where there is none. */
static __device__ inline void xdi_cuda_loss_take(xdi_cuda_loss_sweep *t, const xdi_cuda_eight &x, const xdi_cuda_eight &y,
                                                 bool top, bool teacher_top) {
    const xdi_cuda_eight dx = xdi_cuda_differences_of(x, t->base);
    xdi_cuda_eight e = {};
    if (t->row.hard || t->row.shared) e = xdi_cuda_powers_of(dx, t->row.hard_factor);
    if (t->row.hard) xdi_cuda_loss_add_powers(t, XD_LOSS_HARD, top, e, dx);
    if (!t->row.soft) return;
    if (!t->row.shared) e = xdi_cuda_powers_of(dx, t->row.soft_factor);
    xdi_cuda_loss_add_powers(t, XD_LOSS_SOFT, top, e, dx);
    const xdi_cuda_eight dy = xdi_cuda_differences_of(y, t->teacher_base);
    const xdi_cuda_eight q = xdi_cuda_powers_of(dy, t->row.soft_factor);
    xdi_cuda_loss_add_powers(t, XD_LOSS_TEACHER, teacher_top, q, dy);
    if (t->row.divergence == XD_JSD) return; /* it needs the normalisers first */
    t->sums.add(XD_LOSS_CROSS, __fmul_rn(xdi_cuda_loss_cross_of(t->row, e, q, dx, dy, y), t->row.per_tau));
}

/* The sum of x, for a smoothed label; those at `columns` and beyond are left out. */
static __device__ inline void xdi_cuda_loss_add_plain(xdi_cuda_loss_sweep *t, const xdi_cuda_eight &x, int64_t c,
                                                      int64_t columns) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (c + i < columns) t->sums.add_wide(XD_LOSS_LINEAR, (double)x.at[i]);
}

/* Looks at eight columns from c on and adds them. Every lane of the warp calls it. */
static __device__ inline void xdi_cuda_loss_sweep_eight(const xd_loss_args &a, const xdi_cuda_eight &x,
                                                        const xdi_cuda_eight &y, int64_t c, int64_t columns,
                                                        xdi_cuda_loss_sweep *t) {
    const float max = xdi_cuda_max_of(x), teacher_max = t->row.soft ? xdi_cuda_max_of(y) : -INFINITY;
    xdi_cuda_loss_look(a.temperature, x, y, max, teacher_max, c, t);
    xdi_cuda_loss_take(t, x, y, max == t->row.max, teacher_max == t->row.teacher_max);
    if (t->row.uniform) xdi_cuda_loss_add_plain(t, x, c, columns);
}

/* All columns of this lane. The lanes of a warp go through theirs as often as each other. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_sweep_lane(const xd_loss_args &a, const xdi_cuda_line<X> &student,
                                                       const xdi_cuda_line<Y> &teacher, int64_t columns, xdi_cuda_loss_sweep *t) {
    const int64_t step = XDI_CUDA_EIGHT * TEAM, warp = XDI_CUDA_EIGHT * XDI_CUDA_WARP;
    const int64_t first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    const int64_t begin = first - XDI_CUDA_EIGHT * (int64_t)(threadIdx.x % XDI_CUDA_WARP); /* of the warp */
    const bool aligned = xdi_cuda_is_aligned16(student.at) && xdi_cuda_is_aligned16(teacher.at);
    const int whole = aligned && columns >= begin + warp ? (int)((columns - begin - warp) / step) + 1 : 0;
    xdi_cuda_in_memory::walk(
        student, teacher, first, step, whole, xdi_cuda_steps_of(begin, columns, step),
        [&](int k, xdi_cuda_eight *x, xdi_cuda_eight *y) {
            *x = student.eight(first + k * step, columns, -INFINITY);
            *y = teacher.eight(first + k * step, columns, -INFINITY);
        },
        [&](int k, const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
            xdi_cuda_loss_sweep_eight(a, x, y, first + k * step, columns, t);
            if ((k & 1) && k < whole) xdi_cuda_loss_flush(t);
        });
}

/* `columns` columns, the first of which is number `begin` of the whole row: references [XD_LOSS_REFERENCES] and sums
 * [XD_LOSS_SUMS], without TARGET, on every thread of the team. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_sweep_columns(const xd_loss_args &a, const xdi_cuda_line<X> &student,
                                                          const xdi_cuda_line<Y> &teacher, int64_t columns, int64_t begin, double *ref, double *total) {
    const xdi_cuda_summit none = { -INFINITY, -INFINITY, -INFINITY, INT32_MAX };
    const int64_t first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    xdi_cuda_loss_sweep t;
    t.row = xdi_cuda_loss_row_of<Y>(a, -(double)INFINITY, -(double)INFINITY, -(double)INFINITY);
    t.base = t.teacher_base = 0.0f;
    t.seen = none;
    if (first < columns) t.seen.eight = (int32_t)(first / XDI_CUDA_EIGHT);
    xdi_cuda_loss_sweep_lane<X, Y, TEAM>(a, student, teacher, columns, &t);
    xdi_cuda_summit whole = xdi_cuda_team_reduce<TEAM>(t.seen, none, xdi_cuda_summit_join());
    int64_t arg = -1;
    if (whole.eight != INT32_MAX) {
        arg = (int64_t)whole.eight * XDI_CUDA_EIGHT;
        const xdi_cuda_eight x = student.eight(arg, columns, -INFINITY);
        const int64_t begin_of_eight = arg;
        XD_UNROLL
        for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
            if (x.at[i] == whole.max) arg = begin_of_eight + i;
        if (t.row.soft) whole.beside = teacher.element(arg);
    }
    xdi_cuda_loss_move<true>(&t, a.temperature, whole);
    const xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false>::totals sums = xdi_cuda_team_totals<TEAM>(t.sums);
    const bool bad = whole.max == INFINITY || isnan(sums.sum[XD_LOSS_HARD]) || isnan(sums.sum[XD_LOSS_SOFT]);
    const bool teacher_bad = t.row.soft && (whole.teacher_max == INFINITY || isnan(sums.sum[XD_LOSS_TEACHER]));
    const bool broken = bad || teacher_bad;
    ref[XD_LOSS_MAX] = bad ? (double)NAN : (double)whole.max;
    ref[XD_LOSS_ARG] = arg < 0 ? -1.0 : (double)(arg + begin);
    ref[XD_LOSS_TEACHER_AT_ARG] = t.row.soft ? (double)whole.beside : 0.0;
    ref[XD_LOSS_TEACHER_MAX] = !t.row.soft ? 0.0 : teacher_bad ? (double)NAN : (double)whole.teacher_max;
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) total[i] = broken ? 0.0 : sums.sum[i];
    if (t.row.uniform && columns > 0 && !broken) total[XD_LOSS_LINEAR] -= (double)columns * ref[XD_LOSS_MAX];
    total[XD_LOSS_TARGET] = 0.0;
    total[XD_LOSS_BAD] = broken ? 1.0 : 0.0;
}

/* >>cuda/loss_fused.cu */

/* A loss row by row: references and sums are computed in one read of the rows, as running sums; where one shard is the whole
 * row, its scalars and its gradient follow at once, while the row is in the cache. Two reads and one write of a row,
 * three reads for JSD. Grid (rows / teams), block 256. */

/* References [XD_LOSS_REFERENCES] and sums [XD_LOSS_SUMS] of this shard, on every thread of the team. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_sweep_row(const xd_loss_args &a, int64_t r, double *ref, double *total) {
    const xdi_cuda_line<X> student = xdi_cuda_line<X>::of(a.student, r);
    const xdi_cuda_line<Y> teacher = xdi_cuda_line<Y>::of(a.teacher, r);
    xdi_cuda_loss_sweep_columns<X, Y, TEAM>(a, student, teacher, a.vocab.end - a.vocab.begin, a.vocab.begin, ref, total);
    if (total[XD_LOSS_BAD] == 0.0) total[XD_LOSS_TARGET] = xdi_cuda_loss_target(a, r, ref[XD_LOSS_MAX]);
}

/* xdi_cuda_loss_mixture_row of known types, in the same order. */
template <typename X, typename Y, int TEAM>
static __device__ inline xdi_cuda_sums<XD_LOSS_MIXTURES, false>::totals
xdi_cuda_loss_mixture_ahead(const xd_loss_args &a, int64_t r, bool counts) {
    const xdi_cuda_loss_scales s = xdi_cuda_loss_scales_of<Y>(a, a.row[r]);
    const xdi_cuda_line<X> student = xdi_cuda_line<X>::of(a.student, r);
    const xdi_cuda_line<Y> teacher = xdi_cuda_line<Y>::of(a.teacher, r);
    const int64_t columns = counts ? a.vocab.end - a.vocab.begin : 0, step = XDI_CUDA_EIGHT * TEAM;
    const int64_t first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    const bool aligned = xdi_cuda_is_aligned16(student.at) && xdi_cuda_is_aligned16(teacher.at);
    const int whole = aligned ? (int)(columns / step) : 0;
    xdi_cuda_sums<XD_LOSS_MIXTURES, false> mine;
    xdi_cuda_in_memory::walk(
        student, teacher, first, step, whole, xdi_cuda_steps_of(first, columns, step),
        [&](int k, xdi_cuda_eight *x, xdi_cuda_eight *y) { /* columns that are not there add 0 */
            *x = student.eight(first + k * step, columns, -INFINITY);
            *y = teacher.eight(first + k * step, columns, -INFINITY);
        },
        [&](int, const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) xdi_cuda_loss_mixture_terms(s, x.at[i], y.at[i], &mine);
            mine.end_eight();
        });
    return xdi_cuda_team_totals<TEAM>(mine);
}

/* A whole row's scalars, once its references and sums are known: written by one thread, then seen by the team. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_row_scalars(const xd_loss_args &a, int64_t r, const double *ref,
                                                         const double *total, bool counts) {
    if (xdi_cuda_team_thread<TEAM>() == 0) {
        xd_loss_row row;
        memset(&row, 0, sizeof row);
        if (counts) {
            xdi_cuda_loss_scalars(a, r, ref, total, &row);
            xd_loss_settle(&a, r, &row);
        }
        a.row[r] = row;
    }
    xdi_cuda_team_sync<TEAM>();
    if (!xdi_cuda_is<Y>::GIVEN || a.divergence != XD_JSD) return;
    const bool fine = counts && a.row[r].finding == (int)XD_ROW_FINE;
    const xdi_cuda_sums<XD_LOSS_MIXTURES, false>::totals totals = xdi_cuda_loss_mixture_ahead<X, Y, TEAM>(a, r, fine);
    xdi_cuda_team_sync<TEAM>(); /* all threads have read the row's scalars */
    if (fine && xdi_cuda_team_thread<TEAM>() == 0)
        xd_loss_mixture_scalars(&a, r, totals.sum[XD_LOSS_TEACHER_MIXTURE],
                                      totals.sum[XD_LOSS_STUDENT_MIXTURE], a.row + r);
    xdi_cuda_team_sync<TEAM>();
}

/* What a shard knows of a row, for the merge over the shards. */
XDI_CUDA_APART __device__ void xdi_cuda_loss_row_keep(const xd_loss_args &a, int64_t r, const double *ref,
                                                      const double *total) {
    for (int i = 0; i < XD_LOSS_REFERENCES; i++) a.references[r * XD_LOSS_REFERENCES + i] = ref[i];
    for (int i = 0; i < XD_LOSS_SUMS; i++) static_cast<double *>(a.sums)[r * XD_LOSS_SUMS + i] = total[i];
}

template <typename X, typename Y, int TEAM>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, xdi_cuda_loss_blocks<Y>::LEAST)
    xdi_cuda_loss_fused_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return; /* the whole team returns */
    const bool counts = a.row_scale[r] != 0.0;
    double ref[XD_LOSS_REFERENCES] = {}, total[XD_LOSS_SUMS] = {};
    if (counts) xdi_cuda_loss_sweep_row<X, Y, TEAM>(a, r, ref, total);
    if (a.vocab.shards > 1) {
        if (xdi_cuda_team_thread<TEAM>() == 0) xdi_cuda_loss_row_keep(a, r, ref, total);
        return;
    }
    xdi_cuda_loss_row_scalars<X, Y, TEAM>(a, r, ref, total, counts);
    if (a.gradient.data) xdi_cuda_loss_grad_row<X, Y, TEAM>(a, r);
}

/* On the current device. */
static xd_result xdi_cuda_loss_fused_start(const xd_launch *launch, const xd_loss_args *a) {
    XDI_CUDA_LOSS_CASES(a, X, Y, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               (xdi_cuda_loss_fused_kernel<X, Y, TEAM>), *a);
    })
}

static xd_result xdi_cuda_loss_fused(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_loss_fused_start(launch, a);
}

/* ---- loading, also for loss.cu ---- */

/* The kernels of XDI_CUDA_LOSS_CASES. */
template <typename X, typename Y, int TEAM> static xd_result xdi_cuda_loss_load_rows(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_loss_grad_kernel<X, Y, TEAM>)));
    return xdi_cuda_load(ctx, xdi_cuda_loss_fused_kernel<X, Y, TEAM>);
}

template <int TEAM> static xd_result xdi_cuda_loss_load_team(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_references_kernel<TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_mixture_kernel<false, TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_stats_kernel<false, TEAM>));
    return xdi_cuda_loss_load_rows<xdi_cuda_any, xdi_cuda_any, TEAM>(ctx);
}

static xd_result xdi_cuda_loss_load_types(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_loss_load_rows<xdi_cuda_any, xdi_cuda_none, XDI_CUDA_WARP>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<float, xdi_cuda_none, XDI_CUDA_TEAM_BLOCK>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<xdi_cuda_bf16, xdi_cuda_none, XDI_CUDA_TEAM_BLOCK>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<float, float, XDI_CUDA_TEAM_BLOCK>(ctx)));
    return xdi_cuda_loss_load_rows<xdi_cuda_bf16, xdi_cuda_bf16, XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_result xdi_cuda_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_merge_references_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_combine_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_mixture_combine_kernel));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_loss_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_loss_mixture_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY(xdi_cuda_loss_load_types(ctx));
    XD_TRY(xdi_cuda_loss_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_loss_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_loss_kernels xdi_cuda_loss_table() {
    xd_loss_kernels kernels = {};
    kernels.references = xdi_cuda_loss_references;
    kernels.merge_references = xdi_cuda_loss_merge_references;
    kernels.stats = xdi_cuda_loss_stats;
    kernels.combine = xdi_cuda_loss_combine;
    kernels.mixture = xdi_cuda_loss_mixture;
    kernels.mixture_combine = xdi_cuda_loss_mixture_combine;
    kernels.grad = xdi_cuda_loss_grad;
    kernels.fused = xdi_cuda_loss_fused;
    return kernels;
}

/* >>cuda/ring.cuh */

/* A ring of stages in a block's shared memory that the copy engine fills while the block works on what is there, and clusters of
 * blocks that share a row. Every stage has a barrier for "full", where the copy engine counts bytes, and one for "empty", where
 * each warp arrives when it has read the stage for the last time. Needs compute capability 9.0; elsewhere the functions exist and
 * nothing launches what calls them. */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static __device__ inline unsigned xdi_cuda_cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ inline unsigned xdi_cuda_cluster_size() {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

/* The two halves of the cluster's barrier; all threads of all blocks arrive, and wait before they arrive again. */
static __device__ inline void xdi_cuda_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ inline void xdi_cuda_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The address in block `rank` of what lies at `shared` in this block. Volatile, so that only lanes ask whose block there is. */
template <typename T> static __device__ inline T *xdi_cuda_cluster_map(T *shared, unsigned rank) {
    uint64_t address;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<T *>(address);
}

static __device__ inline void xdi_cuda_barrier_init(uint64_t *barrier, unsigned arrivals) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

/* Before the copy engine uses barriers that this thread has made. */
static __device__ inline void xdi_cuda_barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* An arrival that announces the bytes of copies. */
static __device__ inline void xdi_cuda_barrier_expect(uint64_t *barrier, unsigned bytes) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

static __device__ inline void xdi_cuda_barrier_arrive(uint64_t *barrier) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

/* Whether the phase of this parity has ended; the thread may sleep for some microseconds before it says no. */
static __device__ inline bool xdi_cuda_barrier_passed(uint64_t *barrier, unsigned parity) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
    return done != 0;
}

/* The same where other blocks of the cluster have stored what the phase waits for. */
static __device__ inline bool xdi_cuda_barrier_passed_cluster(uint64_t *barrier, unsigned parity) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
    return done != 0;
}

/* Stores 16 bytes at the same place of block `rank` as `shared` in this one, whose barrier counts them. Nothing else of this thread
 * is ordered by that, so that no round trip to L2 is waited for. */
static __device__ inline void xdi_cuda_cluster_put16(void *shared, const void *from, uint64_t *barrier, unsigned rank) {
    const unsigned own = (unsigned)__cvta_generic_to_shared(shared), counter = (unsigned)__cvta_generic_to_shared(barrier);
    uint64_t words[2];
    memcpy(words, static_cast<const xdi_cuda_bits16 *>(from), sizeof words);
    asm volatile("{\n\t.reg .b32 to, at;\n\tmapa.shared::cluster.u32 to, %0, %4;\n\tmapa.shared::cluster.u32 at, %3, %4;\n\t"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [to], {%1, %2}, [at];\n\t}" ::"r"(own),
                 "l"(words[0]), "l"(words[1]), "r"(counter), "r"(rank)
                 : "memory");
}

static __device__ inline void xdi_cuda_bulk_load(void *shared, const void *global, unsigned bytes,
                                                 uint64_t *barrier) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared),
                   at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(at)
        : "memory");
}

/* Orders this thread's stores to shared memory before copies of the engine to the same place. */
static __device__ inline void xdi_cuda_bulk_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#elif defined(XD_EMU)

static inline unsigned xdi_cuda_cluster_rank() {
    return emu_cluster_rank();
}

static inline unsigned xdi_cuda_cluster_size() {
    return emu_cluster_size();
}

static inline void xdi_cuda_cluster_arrive() {
    emu_cluster_arrive();
}

static inline void xdi_cuda_cluster_wait() {
    emu_cluster_wait();
}

template <typename T> static inline T *xdi_cuda_cluster_map(T *shared, unsigned rank) {
    return emu_map_shared(shared, rank);
}

static inline void xdi_cuda_barrier_init(uint64_t *barrier, unsigned arrivals) {
    emu_mbarrier_init(barrier, arrivals);
}

static inline void xdi_cuda_barriers_ready() {}

static inline void xdi_cuda_barrier_expect(uint64_t *barrier, unsigned bytes) {
    emu_mbarrier_expect(barrier, bytes);
}

static inline void xdi_cuda_barrier_arrive(uint64_t *barrier) {
    emu_mbarrier_arrive(barrier);
}

static inline bool xdi_cuda_barrier_passed(uint64_t *barrier, unsigned parity) {
    return emu_mbarrier_try(barrier, parity) != 0;
}

static inline bool xdi_cuda_barrier_passed_cluster(uint64_t *barrier, unsigned parity) {
    return emu_mbarrier_try(barrier, parity) != 0;
}

static inline void xdi_cuda_cluster_put16(void *shared, const void *from, uint64_t *barrier, unsigned rank) {
    uint64_t words[2];
    memcpy(words, from, sizeof words);
    emu_store_async(emu_map_shared(static_cast<char *>(shared), rank), words[0], words[1], emu_map_shared(barrier, rank));
}

static inline void xdi_cuda_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *barrier) {
    emu_bulk_load(shared, global, bytes, barrier);
}

static inline void xdi_cuda_bulk_fence() {}

#else

static __device__ inline unsigned xdi_cuda_cluster_rank() {
    __trap();
    return 0;
}

static __device__ inline unsigned xdi_cuda_cluster_size() {
    return 1;
}

static __device__ inline void xdi_cuda_cluster_arrive() {}

static __device__ inline void xdi_cuda_cluster_wait() {}

template <typename T> static __device__ inline T *xdi_cuda_cluster_map(T *shared, unsigned) {
    return shared;
}

static __device__ inline void xdi_cuda_barrier_init(uint64_t *, unsigned) {}

static __device__ inline void xdi_cuda_barriers_ready() {}

static __device__ inline void xdi_cuda_barrier_expect(uint64_t *, unsigned) {}

static __device__ inline void xdi_cuda_barrier_arrive(uint64_t *) {}

static __device__ inline bool xdi_cuda_barrier_passed(uint64_t *, unsigned) {
    return true;
}

static __device__ inline bool xdi_cuda_barrier_passed_cluster(uint64_t *, unsigned) {
    return true;
}

static __device__ inline void xdi_cuda_cluster_put16(void *, const void *, uint64_t *, unsigned) {}

static __device__ inline void xdi_cuda_bulk_load(void *, const void *, unsigned, uint64_t *) {}

static __device__ inline void xdi_cuda_bulk_fence() {}

#endif

static __device__ inline void xdi_cuda_cluster_sync() {
    xdi_cuda_cluster_arrive();
    xdi_cuda_cluster_wait();
}

/* ---- the ring ---- */

/* A block's last warp asks for the copies; the others work on what is there. Fourteen warps, two blocks on a multiprocessor: more
 * of them hide more of what each waits for, but leave a thread less than 72 registers. */
enum {
    XDI_CUDA_RING_WARPS = 13, /* that work */
    XDI_CUDA_RING_LANES = XDI_CUDA_RING_WARPS * XDI_CUDA_WARP,
    XDI_CUDA_RING_THREADS = XDI_CUDA_RING_LANES + XDI_CUDA_WARP,
    XDI_CUDA_RING_PART = 16 * XDI_CUDA_RING_LANES,  /* bytes: a pack a thread */
    XDI_CUDA_RING_STAGE = 4 * XDI_CUDA_RING_PART,   /* of all tensors */
    XDI_CUDA_RING_STAGES = 10,                      /* at most: those of one block on a multiprocessor */
    XDI_CUDA_RING_TOLD = 3,                         /* sums of rows by turns, and the second sums of a row */
#if defined(XD_EMU)
    XDI_CUDA_RING_TRIES = 4 /* there a wait ends at once when the copy is lost */
#else
    XDI_CUDA_RING_TRIES = 1 << 20 /* of a wait, some seconds; then the copy counts as lost */
#endif
};

struct xdi_cuda_ring_barriers {
    uint64_t full[XDI_CUDA_RING_STAGES], empty[XDI_CUDA_RING_STAGES];
    uint64_t told[XDI_CUDA_RING_TOLD]; /* where blocks of the cluster count what they tell each other */
};

/* A place in the ring, and the parity of its barrier's phase. */
struct xdi_cuda_ring_place {
    int stage;
    unsigned parity;

    __device__ void next(int stages) {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1u;
    }
    /* At most a ring further. */
    __device__ xdi_cuda_ring_place after(int count, int stages) const {
        const int at = stage + count;
        return { at < stages ? at : at - stages, at < stages ? parity : parity ^ 1u };
    }
};

/* Waits for a phase. *sound becomes false when that takes too long: then the thread waits no more, and what it computes is lost. */
static __device__ inline void xdi_cuda_ring_wait(uint64_t *barrier, unsigned parity, bool *sound) {
    if (xdi_cuda_barrier_passed(barrier, parity)) return;
    for (int i = 0; i < XDI_CUDA_RING_TRIES && *sound; i++)
        if (xdi_cuda_barrier_passed(barrier, parity)) return;
    *sound = false;
}

/* The same for what other blocks store. */
static __device__ inline void xdi_cuda_ring_hear(uint64_t *barrier, unsigned parity, bool *heard) {
    if (xdi_cuda_barrier_passed_cluster(barrier, parity)) return;
    for (int i = 0; i < XDI_CUDA_RING_TRIES && *heard; i++)
        if (xdi_cuda_barrier_passed_cluster(barrier, parity)) return;
    *heard = false;
}

/* One thread makes the barriers; the block synchronises before it uses them. */
static __device__ inline void xdi_cuda_ring_init(xdi_cuda_ring_barriers *barriers, int stages) {
    for (int i = 0; i < stages; i++) {
        xdi_cuda_barrier_init(&barriers->full[i], 1);
        xdi_cuda_barrier_init(&barriers->empty[i], (unsigned)XDI_CUDA_RING_WARPS);
    }
    for (int i = 0; i < XDI_CUDA_RING_TOLD; i++) xdi_cuda_barrier_init(&barriers->told[i], 1);
    xdi_cuda_barriers_ready();
}

/* >>cuda/loss_ring.cuh */

/* Losses of rows that stay on the chip: what they have in common. See loss_ring.cu.
 *
 * BF16 and F32 differ in how a gradient is computed. BF16: an exponent is one product-sum, x s + c, in units of 2, and the weight
 * of the gradient is part of c. F32: its bytes take twice as long, and its gradients would show that c is rounded, so powers are
 * relative to the largest element and multiplied by what their sum and weight are. */

enum xdi_cuda_ring_kind {
    XDI_CUDA_RING_HARD,
    XDI_CUDA_RING_SMOOTH, /* hard, with a smoothed label */
    XDI_CUDA_RING_FORWARD,
    XDI_CUDA_RING_REVERSE,
    XDI_CUDA_RING_JSD,
    XDI_CUDA_RING_BOTH,   /* hard and forward */
    XDI_CUDA_RING_SHARED, /* the same at temperature 1: one exponential */
    XDI_CUDA_RING_KINDS
};
static_assert((int)XDI_CUDA_RING_KINDS == (int)XDI_CUDA_RING_MOST_KINDS, "see xd_cuda");

template <int KIND> struct xdi_cuda_ring_is {
    static constexpr bool BOTH = KIND == XDI_CUDA_RING_BOTH || KIND == XDI_CUDA_RING_SHARED;
    static constexpr bool SMOOTH = KIND == XDI_CUDA_RING_SMOOTH, SHARED = KIND == XDI_CUDA_RING_SHARED;
    static constexpr bool HARD = KIND == XDI_CUDA_RING_HARD || SMOOTH || BOTH, SOFT = !(HARD && !BOTH);
    static constexpr bool FORWARD = KIND == XDI_CUDA_RING_FORWARD || BOTH;
    static constexpr bool REVERSE = KIND == XDI_CUDA_RING_REVERSE, JSD = KIND == XDI_CUDA_RING_JSD;
    static constexpr bool ALONE = HARD && !SOFT; /* the only exponential is the hard loss's */
    static constexpr int TENSORS = SOFT ? 2 : 1;
};

/* Sums of a thread or a block: those of kernel/loss.h, then what is counted apart. */
enum {
    XDI_CUDA_RING_ONES = XDI_CUDA_LOSS_TERMS, /* the student's columns that have its largest element, */
    XDI_CUDA_RING_TEACHER_ONES,               /* and the teacher's */
    XDI_CUDA_RING_APART,                      /* forward: sum of (x - M) s at the latter; reverse: of y at the former */
    XDI_CUDA_RING_SUMS
};

/* Of a warp: four of kernel/loss.h, and four apart. */
enum { XDI_CUDA_RING_FOUR = 4, XDI_CUDA_RING_TOTALS = 2 * XDI_CUDA_RING_FOUR };

template <int KIND> static __host__ __device__ constexpr bool xdi_cuda_ring_sums_up(int i) {
    typedef xdi_cuda_ring_is<KIND> is;
    return i == XD_LOSS_HARD          ? is::HARD && !is::SHARED
           : i == XD_LOSS_SOFT        ? is::SOFT
           : i == XD_LOSS_TEACHER     ? is::SOFT
           : i == XD_LOSS_CROSS       ? is::FORWARD || is::REVERSE
           : i == XD_LOSS_LINEAR      ? is::SMOOTH
           : i == XDI_CUDA_RING_APART ? is::FORWARD || is::REVERSE
           : i == XDI_CUDA_RING_ONES  ? true
                                      : is::SOFT;
}

/* Which of a warp's sums is sum i of a thread. */
template <int KIND> static __host__ __device__ constexpr int xdi_cuda_ring_total_of(int i) {
    return i >= XDI_CUDA_RING_ONES ? XDI_CUDA_RING_FOUR + i - XDI_CUDA_RING_ONES
                                   : (i > 0 && xdi_cuda_ring_sums_up<KIND>(0)) + (i > 1 && xdi_cuda_ring_sums_up<KIND>(1)) +
                                         (i > 2 && xdi_cuda_ring_sums_up<KIND>(2)) + (i > 3 && xdi_cuda_ring_sums_up<KIND>(3));
}

/* What is known of the whole row before its gradient. */
struct xdi_cuda_ring_row {
    float max, teacher_max, beside; /* beside: the teacher's logit at arg */
    float hard, soft, teacher;      /* sums of powers relative to the largest */
    float top, mean;                /* as in xd_loss_row, in nats */
    int arg;                        /* in this block's columns; may lie outside */
};

/* What a call's rows have in common: how they are cut, and factors, which the host computes. */
struct xdi_cuda_ring_call {
    int64_t slice; /* columns of a block */
    int stages;
    float hard_factor, soft_factor, per_tau; /* log2(e), log2(e) / tau, 1 / tau */
    float beta, uniform;                     /* uniform: weight of every column's label */
    double hard_weight, soft_weight;         /* of the gradient; soft / tau */
};

/* With a row's scale. */
struct xdi_cuda_ring_weights {
    float hard, soft;
};

/* ---- pairs of 16-bit numbers ---- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

/* The larger of each half, and the smaller; a NaN counts as missing. */
static __device__ inline uint32_t xdi_cuda_pair_max(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

static __device__ inline uint32_t xdi_cuda_pair_min(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

static __device__ inline uint32_t xdi_cuda_bf16_pair(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

static __device__ inline uint32_t xdi_cuda_f16_pair(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

static __device__ inline float xdi_cuda_log_in(uint32_t pair, int half) {
    float y;
    const uint16_t bits = (uint16_t)(half ? pair >> 16 : pair & 0xffffu);
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

#else

static __device__ inline float xdi_cuda_half_of(uint32_t pair, int half) {
    return xd_bits_from_bf16((uint16_t)(half ? pair >> 16 : pair & 0xffffu));
}

static __device__ inline uint32_t xdi_cuda_pair_max(uint32_t a, uint32_t b) {
    const float low = fmaxf(xdi_cuda_half_of(a, 0), xdi_cuda_half_of(b, 0));
    return xd_bits_to_bf16(low) | (uint32_t)xd_bits_to_bf16(fmaxf(xdi_cuda_half_of(a, 1), xdi_cuda_half_of(b, 1))) << 16;
}

static __device__ inline uint32_t xdi_cuda_pair_min(uint32_t a, uint32_t b) {
    const float low = fminf(xdi_cuda_half_of(a, 0), xdi_cuda_half_of(b, 0));
    return xd_bits_to_bf16(low) | (uint32_t)xd_bits_to_bf16(fminf(xdi_cuda_half_of(a, 1), xdi_cuda_half_of(b, 1))) << 16;
}

static __device__ inline uint32_t xdi_cuda_bf16_pair(float low, float high) {
    return xd_bits_to_bf16(low) | (uint32_t)xd_bits_to_bf16(high) << 16;
}

static __device__ inline uint32_t xdi_cuda_f16_pair(float low, float high) {
    return xd_bits_to_f16(low) | (uint32_t)xd_bits_to_f16(high) << 16;
}

static __device__ inline float xdi_cuda_log_in(uint32_t pair, int half) {
    return xd_bits_from_f16((uint16_t)(half ? pair >> 16 : pair & 0xffffu));
}

#endif

static __device__ inline float xdi_cuda_pair_low(uint32_t pair) {
    return xd_float_of_bits(pair << 16);
}

static __device__ inline float xdi_cuda_pair_high(uint32_t pair) {
    return xd_float_of_bits(pair & 0xffff0000u);
}

typedef xdi_cuda_pack<uint32_t> xdi_cuda_words;

static __device__ inline xdi_cuda_eight xdi_cuda_words_widened(const xdi_cuda_words &words) {
    xdi_cuda_raw<xdi_cuda_bf16> raw;
    raw.pairs = words;
    return raw.widened();
}

static __device__ inline uint32_t xdi_cuda_words_max(const xdi_cuda_words &w) {
    return xdi_cuda_pair_max(xdi_cuda_pair_max(w.at[0], w.at[1]), xdi_cuda_pair_max(w.at[2], w.at[3]));
}

static __device__ inline uint32_t xdi_cuda_words_min(const xdi_cuda_words &w) {
    return xdi_cuda_pair_min(xdi_cuda_pair_min(w.at[0], w.at[1]), xdi_cuda_pair_min(w.at[2], w.at[3]));
}

/* ---- where a thread's columns lie in a stage: four packs, of one tensor or two of each of two, each a part from the next ---- */

template <typename X, int TENSORS> struct xdi_cuda_ring_form;

/* Eight columns a pack. `left`: how many packs of the tensor the block has from this thread's first one of the stage on. */
template <int TENSORS> struct xdi_cuda_ring_form<xdi_cuda_bf16, TENSORS> {
    enum {
        FINE = 0,
        PARTS = 4 / TENSORS, /* times that a thread has eight columns */
        BYTES = XDI_CUDA_RING_STAGE / TENSORS,
        PACKS = BYTES / 16,
        COLUMNS = BYTES / 2
    };
    static __device__ bool has(int part, int left) {
        return part == 0 || left > part * XDI_CUDA_RING_LANES;
    }
    static __device__ bool has_second(int, int) {
        return true;
    }
    static __device__ xdi_cuda_words words(const unsigned char *at, int part) {
        return xdi_cuda_load16(reinterpret_cast<const uint32_t *>(at + part * XDI_CUDA_RING_PART));
    }
    static __device__ xdi_cuda_eight read(const unsigned char *at, int part, int) {
        return xdi_cuda_words_widened(words(at, part));
    }
    static __device__ int column(int part, int i) {
        return part * (XDI_CUDA_RING_PART / 2) + i;
    }
};

/* Four columns a pack; -infinity where there is no second one. */
template <int TENSORS> struct xdi_cuda_ring_form<float, TENSORS> {
    enum { FINE = 1, PARTS = 2 / TENSORS, BYTES = XDI_CUDA_RING_STAGE / TENSORS, PACKS = BYTES / 16, COLUMNS = BYTES / 4 };

    static __device__ bool has(int part, int left) {
        return part == 0 || left > 2 * part * XDI_CUDA_RING_LANES;
    }
    static __device__ bool has_second(int part, int left) {
        return left > (2 * part + 1) * XDI_CUDA_RING_LANES;
    }
    static __device__ xdi_cuda_eight read(const unsigned char *at, int part, int left) {
        const float none = -INFINITY;
        const float *const from = reinterpret_cast<const float *>(at + 2 * part * XDI_CUDA_RING_PART);
        const xdi_cuda_pack<float> low = xdi_cuda_load16(from);
        xdi_cuda_pack<float> high = { { none, none, none, none } };
        if (has_second(part, left)) high = xdi_cuda_load16(from + XDI_CUDA_RING_PART / 4);
        return { { low.at[0], low.at[1], low.at[2], low.at[3], high.at[0], high.at[1], high.at[2], high.at[3] } };
    }
    static __device__ int column(int part, int i) {
        return (2 * part + i / 4) * (XDI_CUDA_RING_PART / 4) + i % 4;
    }
};

/* 16 bytes to shared memory. */
template <typename T> static __device__ inline void xdi_cuda_put16(void *to, const xdi_cuda_pack<T> &pack) {
    XDI_CUDA_ALIGNED16(to);
    memcpy(static_cast<xdi_cuda_bits16 *>(to), &pack, sizeof pack);
}

/* ---- over the lanes of a warp, the same on every lane ---- */

template <int LANES, typename T> static __device__ inline T xdi_cuda_ring_add_lanes(T value) {
    XD_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) value = xdi_cuda_add()(value, xdi_cuda_shuffle_xor(value, mask));
    return value;
}

template <int LANES> static __device__ inline float xdi_cuda_ring_max_lanes(float value) {
    XD_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}

/* An integer in the order of the numbers, which are no NaN, and back. */
static __device__ inline int xdi_cuda_ring_order(float value) {
    const int bits = (int)xd_bits_of_float(value);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

static __device__ inline float xdi_cuda_ring_ordered(int order) {
    return xd_float_of_bits((uint32_t)(order ^ (order >> 31 & 0x7fffffff)));
}

/* Adds two sums over pairs of lanes: a lane whose number has `bit` gets that of b, the others that of a. */
static __device__ inline float xdi_cuda_ring_add_two(float a, float b, int bit) {
    const bool odd = (threadIdx.x & (unsigned)bit) != 0;
    const float own = odd ? b : a, other = odd ? a : b;
    return __fadd_rn(own, __shfl_xor_sync(0xffffffffu, other, bit));
}

/* Adds up COUNT sums over a warp: lane k has that of value k, k < COUNT. */
template <int COUNT> static __device__ inline float xdi_cuda_ring_add_four(float a, float b, float c, float d) {
    float sum = a;
    if (COUNT > 1) sum = xdi_cuda_ring_add_two(a, b, 1);
    if (COUNT > 2) sum = xdi_cuda_ring_add_two(sum, xdi_cuda_ring_add_two(c, d, 1), 2);
    XD_UNROLL
    for (int mask = COUNT > 2 ? 4 : COUNT; mask < XDI_CUDA_WARP; mask *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
    return sum;
}

/* >>cuda/loss_ring_sums.cuh */

/* A thread's columns of a row on the chip: the largest elements, then sums relative to the largest of the block.
 *
 * The power of the largest element, exactly 1, is counted apart, so that the others keep their digits: on nearly one-hot rows the
 * gradient consists of them. Only threads that have such a column look for it, where powers sum to so much. */

/* Exponents of powers of 2: x s + c, which is (x - base) s + rest, the form of GUARDED loops. These leave out products with a
 * power of 0, which may be of infinity, and have digits where the largest element is so large that a rounded c has none. */
struct xdi_cuda_ring_exponent {
    float s, base, c, rest;

    template <bool GUARDED> __device__ xdi_cuda_eight of(const xdi_cuda_eight &x) const {
        xdi_cuda_eight e;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            e.at[i] = GUARDED ? __fmaf_rn(__fsub_rn(x.at[i], base), s, rest) : __fmaf_rn(x.at[i], s, c);
        return e;
    }
};

/* Of powers relative to `base`, times 2^shift; `large`: c has no digits. */
static __device__ inline xdi_cuda_ring_exponent xdi_cuda_ring_exponent_of(float s, float base, float shift, bool large) {
    const float c = __fmaf_rn(-base, s, shift);
    return { s, base, c, large ? shift : __fmaf_rn(base, s, c) };
}

/* Where only GUARDED loops have digits. */
static __device__ inline bool xdi_cuda_ring_large(float base) {
    return !(fabsf(base) <= 4096.0f);
}

/* Computed here, and not again where it is needed. */
static __device__ inline float xdi_cuda_ring_held(float value) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+f"(value));
#endif
    return value;
}

static __device__ inline xdi_cuda_eight xdi_cuda_ring_powers(const xdi_cuda_eight &exponents) {
    xdi_cuda_eight power;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) power.at[i] = xdi_cuda_power(exponents.at[i]);
    return power;
}

static __device__ inline xdi_cuda_eight xdi_cuda_ring_gaps(const xdi_cuda_eight &own, const xdi_cuda_eight &other) {
    xdi_cuda_eight gap;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) gap.at[i] = xdi_cuda_ring_held(__fsub_rn(own.at[i], other.at[i]));
    return gap;
}

/* 2^-rest of a small rest; where it is not small, only the largest element has a power. */
static __device__ inline double xdi_cuda_ring_correction(double rest) {
    const double r = rest * XDI_CUDA_LN2;
    return fabs(rest) < 0.01 ? 1.0 - r + 0.5 * r * r : 1.0;
}

/* The reference of a block of nothing but -infinity. */
static __device__ inline float xdi_cuda_ring_base(float max) {
    return max == -INFINITY ? 0.0f : max;
}

/* The largest elements that a thread has seen, and with LOW the lowest of both tensors. */
template <typename X, int KIND> struct xdi_cuda_ring_peak;

template <int KIND> struct xdi_cuda_ring_peak<xdi_cuda_bf16, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<xdi_cuda_bf16, is::TENSORS> form;
    uint32_t student, teacher, low; /* pairs */

    __device__ xdi_cuda_ring_peak() : student(0xff80ff80u), teacher(0xff80ff80u), low(0x7f807f80u) {}
    __device__ void look(const unsigned char *at, int left) {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            const xdi_cuda_words x = form::words(at, part);
            student = xdi_cuda_pair_max(student, xdi_cuda_words_max(x));
            if (!is::SOFT) continue;
            const xdi_cuda_words y = form::words(at + form::BYTES, part);
            teacher = xdi_cuda_pair_max(teacher, xdi_cuda_words_max(y));
            if (is::JSD) low = xdi_cuda_pair_min(low, xdi_cuda_pair_min(xdi_cuda_words_min(x), xdi_cuda_words_min(y)));
        }
    }
    __device__ float largest() const {
        return fmaxf(xdi_cuda_pair_low(student), xdi_cuda_pair_high(student));
    }
    __device__ float teacher_largest() const {
        return fmaxf(xdi_cuda_pair_low(teacher), xdi_cuda_pair_high(teacher));
    }
    __device__ float lowest() const {
        return fminf(xdi_cuda_pair_low(low), xdi_cuda_pair_high(low));
    }
};

template <int KIND> struct xdi_cuda_ring_peak<float, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<float, is::TENSORS> form;
    float student, teacher;

    __device__ xdi_cuda_ring_peak() : student(-INFINITY), teacher(-INFINITY) {}
    __device__ void look(const unsigned char *at, int left) {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            student = fmaxf(student, xdi_cuda_max_of(form::read(at, part, left)));
            if (is::SOFT) teacher = fmaxf(teacher, xdi_cuda_max_of(form::read(at + form::BYTES, part, left)));
        }
    }
    __device__ float largest() const {
        return student;
    }
    __device__ float teacher_largest() const {
        return teacher;
    }
    __device__ float lowest() const {
        return 0.0f;
    }
};

/* Where the compiler has no registers for two parts of a stage at once. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
enum { XDI_CUDA_RING_NARROW = 1 };
#else
enum { XDI_CUDA_RING_NARROW = 0 };
#endif

template <typename X, int KIND> struct xdi_cuda_ring_sums {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X, is::TENSORS> form;
    enum { ASKED_APART = is::FORWARD || form::FINE }; /* one question a tensor: what both have does not fit into registers together */

    float largest, teacher_largest, lowest; /* of this thread */
    bool mine, teacher_mine;                /* it has a column with the block's largest element */
    float least, teacher_least; /* powers of eight columns that sum to less have none of these; the teacher's where ASKED_APART */
    bool guarded;                           /* its loops are */
    xdi_cuda_ring_exponent student, teacher, hard;
    float sum[XDI_CUDA_RING_SUMS];
    int arg;

    __device__ void begin(const xdi_cuda_ring_peak<X, KIND> &peak, const xdi_cuda_ring_call &call, float max, float teacher_max) {
        const float base = xdi_cuda_ring_base(max), teacher_base = xdi_cuda_ring_base(teacher_max);
        largest = peak.largest();
        teacher_largest = peak.teacher_largest();
        lowest = peak.lowest();
        mine = largest == max;
        teacher_mine = is::SOFT && teacher_largest == teacher_max;
        const float some = max == -INFINITY || (is::SOFT && teacher_max == -INFINITY) ? 0.0f : 0.9f; /* 1, but for roundings */
        least = mine || (!ASKED_APART && teacher_mine) ? some : INFINITY;
        teacher_least = ASKED_APART && teacher_mine ? some : INFINITY;
        guarded = form::FINE || xdi_cuda_ring_large(base) || (is::SOFT && xdi_cuda_ring_large(teacher_base));
        student = xdi_cuda_ring_exponent_of(is::ALONE ? call.hard_factor : call.soft_factor, base, 0.0f, guarded);
        hard = xdi_cuda_ring_exponent_of(call.hard_factor, base, 0.0f, guarded);
        teacher = xdi_cuda_ring_exponent_of(call.soft_factor, teacher_base, 0.0f, guarded);
        student.c = xdi_cuda_ring_held(student.c);
        clear();
    }
    __device__ void clear() {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_RING_SUMS; i++) sum[i] = 0.0f;
        arg = INT32_MAX;
    }
    /* After loops that were not guarded: whether a product with a power of 0 was of infinity. Then the warp repeats them. */
    __device__ bool repeats() const {
        return !form::FINE && (is::FORWARD || is::REVERSE) && !guarded && isnan(sum[XD_LOSS_CROSS]);
    }
    /* Whether the thread has a largest element. */
    __device__ bool has_any() const {
        return fminf(least, teacher_least) < INFINITY;
    }
    /* The thread's columns in one stage: `left` packs before the end of the block's `packs`. */
    template <bool GUARDED> __device__ void take(const unsigned char *at, int left, int packs) {
        enum { TOGETHER = GUARDED || XDI_CUDA_RING_NARROW ? 0 : (int)form::PARTS };
        XD_UNROLL
        for (int part = 0; part < TOGETHER; part++)
            if (form::has(part, left)) take_part<GUARDED>(at, left, packs, part);
        XD_UNROLL_N(1)
        for (int part = TOGETHER; part < form::PARTS; part++)
            if (form::has(part, left)) take_part<GUARDED>(at, left, packs, part);
    }

  private:
    template <bool GUARDED> __device__ void take_part(const unsigned char *at, int left, int packs, int part) {
        const xdi_cuda_eight x = form::read(at, part, left);
        if (is::SMOOTH) put(XD_LOSS_LINEAR, form::has_second(part, left) ? xdi_cuda_sum_of(x) : sum_of_four(x));
        add<GUARDED>(x, at, left, packs, part);
    }
    template <bool GUARDED> __device__ void add(const xdi_cuda_eight &x, const unsigned char *at, int left, int packs, int part) {
        enum { APART = ASKED_APART, NARROW = XDI_CUDA_RING_NARROW };
        const xdi_cuda_eight a = student.template of<GUARDED>(x);
        xdi_cuda_eight e = xdi_cuda_ring_powers(a), h = {}, f = {}, gap = {}, y = {};
        if (is::SOFT && (!APART || is::REVERSE)) y = form::read(at + form::BYTES, part, left);
        float own = NARROW ? INFINITY : xdi_cuda_sum_of(e), other = 0.0f;
        if (is::BOTH && !is::SHARED) h = xdi_cuda_ring_powers(hard.template of<GUARDED>(x));
        if (APART && may_have(own, least)) own = set_apart(x, y, packs - left, part, &e, &h);
        if (APART) put_student(NARROW ? xdi_cuda_sum_of(e) : own, h);
        if (is::SOFT && APART && !is::REVERSE) y = form::read(at + form::BYTES, part, left); /* until then no registers */
        if (is::SOFT) {
            const xdi_cuda_eight b = teacher.template of<GUARDED>(y);
            f = xdi_cuda_ring_powers(b);
            other = NARROW ? INFINITY : xdi_cuda_sum_of(f);
            if (!is::JSD) gap = xdi_cuda_ring_gaps(is::REVERSE ? a : b, is::REVERSE ? b : a);
        }
        if (APART && is::SOFT && may_have(other, teacher_least)) other = set_teacher_apart(x, y, &f);
        if (!APART && may_have(is::SOFT ? fmaxf(own, other) : own, least)) {
            own = set_apart(x, y, packs - left, part, &e, &h);
            if (is::SOFT) other = set_teacher_apart(x, y, &f);
        }
        if (!APART) put_student(NARROW ? xdi_cuda_sum_of(e) : own, h);
        if (!is::SOFT) return;
        put(XD_LOSS_TEACHER, NARROW ? xdi_cuda_sum_of(f) : other);
        if (is::FORWARD) put_cross<GUARDED>(f, gap);
        if (is::REVERSE) put_cross<GUARDED>(e, gap);
    }
    /* Whether eight columns, by the sum of their powers, may have a largest element of the block. */
    static __device__ bool may_have(float power, float least) {
        return XDI_CUDA_RING_NARROW ? least < INFINITY : power >= least;
    }
    __device__ void put_student(float own, const xdi_cuda_eight &h) {
        put(is::ALONE ? XD_LOSS_HARD : XD_LOSS_SOFT, own);
        if (is::BOTH && !is::SHARED) put(XD_LOSS_HARD, xdi_cuda_sum_of(h));
    }
    template <bool GUARDED> __device__ void put_cross(const xdi_cuda_eight &power, const xdi_cuda_eight &gap) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (!GUARDED || power.at[i] > 0.0f)
                sum[XD_LOSS_CROSS] = __fmaf_rn(power.at[i], gap.at[i], sum[XD_LOSS_CROSS]);
    }
    static __device__ float sum_of_four(const xdi_cuda_eight &x) {
        return __fadd_rn(__fadd_rn(x.at[0], x.at[1]), __fadd_rn(x.at[2], x.at[3]));
    }
    __device__ void put(int which, float term) {
        sum[which] = __fadd_rn(sum[which], term);
    }
    /* Of columns from pack `first` on. Returns what remains. */
    __device__ float set_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, int first, int part, xdi_cuda_eight *e,
                               xdi_cuda_eight *h) {
        const int column = first * (int)xdi_cuda_pack<X>::COUNT;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT && (ASKED_APART || mine); i++) {
            if (x.at[i] != largest) continue;
            const int at = column + form::column(part, i);
            e->at[i] = h->at[i] = 0.0f;
            put(XDI_CUDA_RING_ONES, 1.0f);
            if (is::REVERSE) put(XDI_CUDA_RING_APART, y.at[i]);
            if (at < arg) arg = at;
        }
        return xdi_cuda_sum_of(*e);
    }
    __device__ float set_teacher_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, xdi_cuda_eight *f) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT && (ASKED_APART || teacher_mine); i++) {
            if (y.at[i] != teacher_largest) continue;
            f->at[i] = 0.0f;
            put(XDI_CUDA_RING_TEACHER_ONES, 1.0f);
            if (is::FORWARD) put(XDI_CUDA_RING_APART, __fmul_rn(__fsub_rn(x.at[i], student.base), student.s));
        }
        return xdi_cuda_sum_of(*f);
    }
};

/* What makes a block's sums, of any of its threads' exponents, relative to the largest elements and in nats. */
struct xdi_cuda_ring_corrections {
    double student, teacher, hard; /* factors */
    double cross;                  /* of sum SOFT or TEACHER, in CROSS */
};

template <typename X, int KIND>
static __device__ inline xdi_cuda_ring_corrections xdi_cuda_ring_corrections_of(const xdi_cuda_ring_sums<X, KIND> &of) {
    typedef xdi_cuda_ring_is<KIND> is;
    const double rest = (double)of.student.rest, teacher_rest = (double)of.teacher.rest;
    xdi_cuda_ring_corrections by = { xdi_cuda_ring_correction(rest), 1.0, 1.0, 0.0 };
    if (is::SOFT) by.teacher = xdi_cuda_ring_correction(teacher_rest);
    by.hard = is::ALONE ? by.student : xdi_cuda_ring_correction((double)of.hard.rest);
    if (is::FORWARD) by.cross = rest - teacher_rest;
    if (is::REVERSE) /* relative to a teacher's logit of 0 at the student's largest */
        by.cross = teacher_rest - (double)of.teacher.base * (double)of.teacher.s - rest;
    return by;
}

/* XDI_CUDA_RING_ONES and what follows it are still apart. */
template <int KIND> static __device__ inline void xdi_cuda_ring_correct(const xdi_cuda_ring_corrections &by, double *sum) {
    typedef xdi_cuda_ring_is<KIND> is;
    double *cross = &sum[XD_LOSS_CROSS];
    if (is::FORWARD) *cross = XDI_CUDA_LN2 * by.teacher * (*cross + by.cross * sum[XD_LOSS_TEACHER]);
    if (is::REVERSE) *cross = XDI_CUDA_LN2 * by.student * (*cross + by.cross * sum[XD_LOSS_SOFT]);
    sum[XD_LOSS_HARD] *= by.hard;
    sum[XD_LOSS_SOFT] *= by.student;
    sum[XD_LOSS_TEACHER] *= by.teacher;
}

/* >>cuda/loss_ring_grade.cuh */

/* A thread's columns of a row on the chip, once the whole row's sums are known: the gradient, and before it JSD's mixtures, which
 * leave the logarithm of student/mixture in the teacher's place. */

/* A thread's part of the sums over JSD's mixtures. */
struct xdi_cuda_ring_mixtures {
    float student, teacher; /* the student's is negative */
    float largest;          /* of this thread's columns */
    bool mine;              /* it is the row's */
};

/* What both types have: exponents relative to the largest element of the row, and what multiplies powers. */
template <typename X, int KIND> struct xdi_cuda_ring_scale {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X, is::TENSORS> form;
    xdi_cuda_ring_exponent student, teacher, hard;
    float weight, hard_weight, teacher_weight;
    float uniform, slope; /* of a smoothed label; see the forms of REVERSE and JSD */
    float top;            /* JSD: the logarithm of student/mixture at the row's arg */
    float max;            /* of the row */
    int arg;              /* in this block's columns; may lie outside */
    bool guarded;         /* its loops are */

    __device__ void begin(const xdi_cuda_ring_call &call, const xdi_cuda_ring_row &row, bool large) {
        const float base = xdi_cuda_ring_base(row.max), teacher_base = xdi_cuda_ring_base(row.teacher_max);
        student = xdi_cuda_ring_exponent_of(is::ALONE ? call.hard_factor : call.soft_factor, base, 0.0f, large);
        teacher = xdi_cuda_ring_exponent_of(call.soft_factor, teacher_base, 0.0f, large);
        hard = xdi_cuda_ring_exponent_of(call.hard_factor, base, 0.0f, large);
        max = row.max;
        arg = row.arg;
        guarded = large;
    }
    /* Leaves out both terms of the row's arg, which the second kernel has with all digits; the student's others at the largest
     * element become relative to that of arg. `log`: of mixture/student. */
    __device__ void set_apart(const xdi_cuda_ring_mixtures &sums, const xdi_cuda_eight &x, int column, int part,
                              xdi_cuda_eight *log, xdi_cuda_eight *power, xdi_cuda_eight *teacher_power) const {
        if (!sums.mine || xdi_cuda_max_of(x) != sums.largest) return;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (x.at[i] == sums.largest) log->at[i] = __fadd_rn(log->at[i], top);
            if (column + form::column(part, i) == arg) power->at[i] = teacher_power->at[i] = 0.0f;
        }
    }
};

template <typename X, int KIND> struct xdi_cuda_ring_factors;

/* ---- BF16: exponents are divided by their sum, and all but those of BOTH are times the weight, whose sign is in `flip` ---- */

template <int KIND>
struct xdi_cuda_ring_factors<xdi_cuda_bf16, KIND> : xdi_cuda_ring_scale<xdi_cuda_bf16, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_scale<xdi_cuda_bf16, KIND> base_type;
    using typename base_type::form;
    using base_type::student;
    using base_type::teacher;
    using base_type::hard;
    using base_type::guarded;
    using base_type::weight;
    using base_type::hard_weight;
    using base_type::uniform;
    using base_type::slope;
    using base_type::top;
    enum { WEIGHED = !is::BOTH };
    uint32_t flip; /* of a pair's signs */
    float gap;     /* JSD: between the exponents of teacher and student */

    __device__ void settle(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        const float own = is::REVERSE ? __fmul_rn(w.soft, (float)XDI_CUDA_LN2) : is::ALONE ? w.hard : w.soft;
        const float shift = WEIGHED && !is::JSD ? xdi_cuda_log2(fabsf(own)) : 0.0f;
        const float base = xdi_cuda_ring_base(row.max), teacher_base = xdi_cuda_ring_base(row.teacher_max);
        const float log_sum = xdi_cuda_log2(is::ALONE ? row.hard : row.soft), log_teacher = xdi_cuda_log2(row.teacher);
        const bool large = xdi_cuda_ring_large(base) || (is::SOFT && xdi_cuda_ring_large(teacher_base));
        base_type::begin(call, row, large);
        student = xdi_cuda_ring_exponent_of(student.s, base, __fsub_rn(shift, log_sum), large);
        teacher = xdi_cuda_ring_exponent_of(teacher.s, teacher_base, __fsub_rn(shift, log_teacher), large);
        if (is::BOTH && !is::SHARED) hard = xdi_cuda_ring_exponent_of(hard.s, base, -xdi_cuda_log2(row.hard), large);
        flip_by(WEIGHED && !is::JSD ? own : 0.0f);
        weight = own;
        hard_weight = is::SHARED ? __fadd_rn(w.hard, own) : w.hard;
        uniform = __fmul_rn(fabsf(own), call.uniform);
        gap = __fmaf_rn(__fsub_rn(base, teacher_base), student.s, __fsub_rn(log_sum, log_teacher));
    }
    __device__ void flip_by(float own) {
        flip = own < 0.0f ? 0x80008000u : 0u;
        guarded = guarded || own < 0.0f;
    }
    /* REVERSE: log2 of student/teacher, less its mean, is (x - y) s + slope. JSD: that of student/mixture, slope - l, where l is
     * log2 of mixture/student. */
    __device__ void lean(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        if (is::REVERSE)
            slope = __fmaf_rn(__fsub_rn(row.beside, student.base), student.s, -__fmul_rn(row.mean, call.hard_factor));
        if (!is::JSD) return;
        const float own = __fmul_rn(__fmul_rn(w.soft, __fsub_rn(1.0f, call.beta)), (float)XDI_CUDA_LN2);
        const float shift = xdi_cuda_log2(fabsf(own));
        slope = __fmul_rn(-__fadd_rn(row.top, row.mean), call.hard_factor);
        student.c = __fadd_rn(student.c, shift);
        student.rest = __fadd_rn(student.rest, shift);
        flip_by(own);
    }
    template <bool GUARDED> __device__ void grade(const unsigned char *at, int left, xdi_cuda_bf16 *to) const {
        enum { TOGETHER = GUARDED || XDI_CUDA_RING_NARROW ? 0 : (int)form::PARTS };
        XD_UNROLL
        for (int part = 0; part < TOGETHER; part++)
            if (form::has(part, left)) grade_part<GUARDED>(at, left, to, part);
        XD_UNROLL_N(1)
        for (int part = TOGETHER; part < form::PARTS; part++)
            if (form::has(part, left)) grade_part<GUARDED>(at, left, to, part);
    }
    template <bool GUARDED> __device__ void grade_part(const unsigned char *at, int left, xdi_cuda_bf16 *to, int part) const {
        xdi_cuda_words y = {}, out;
        const xdi_cuda_eight x = form::read(at, part, left);
        if (is::SOFT) y = form::words(at + form::BYTES, part);
        const xdi_cuda_eight g = gradient<GUARDED>(x, y);
        XD_UNROLL
        for (int i = 0; i < 4; i++) {
            out.at[i] = xdi_cuda_bf16_pair(g.at[2 * i], g.at[2 * i + 1]);
            if (WEIGHED && GUARDED) out.at[i] ^= flip;
        }
        xdi_cuda_store16(reinterpret_cast<uint32_t *>(to + form::column(part, 0)), out);
    }
    template <bool GUARDED> __device__ xdi_cuda_eight gradient(const xdi_cuda_eight &x, const xdi_cuda_words &beside) const {
        const xdi_cuda_eight a = student.template of<GUARDED>(x), p = xdi_cuda_ring_powers(a);
        xdi_cuda_eight g = p, y = {};
        if (is::SOFT && !is::JSD) y = xdi_cuda_words_widened(beside);
        if (is::FORWARD) {
            const xdi_cuda_eight q = xdi_cuda_ring_powers(teacher.template of<GUARDED>(y));
            xdi_cuda_eight h = {};
            if (is::BOTH && !is::SHARED) h = xdi_cuda_ring_powers(hard.template of<GUARDED>(x));
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                g.at[i] = is::SHARED ? __fmaf_rn(hard_weight, p.at[i], -__fmul_rn(weight, q.at[i]))
                          : is::BOTH ? __fmaf_rn(hard_weight, h.at[i], __fmul_rn(weight, __fsub_rn(p.at[i], q.at[i])))
                                     : __fsub_rn(p.at[i], q.at[i]);
        }
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (is::SMOOTH) g.at[i] = __fsub_rn(p.at[i], uniform);
            if (is::REVERSE) {
                const float log = __fmaf_rn(__fsub_rn(x.at[i], y.at[i]), student.s, slope);
                g.at[i] = GUARDED && !(p.at[i] > 0.0f) ? 0.0f : __fmul_rn(p.at[i], log);
            }
            if (is::JSD) g.at[i] = __fmul_rn(p.at[i], __fsub_rn(slope, xdi_cuda_log_in(beside.at[i / 2], i % 2)));
        }
        return g;
    }

    /* ---- JSD ---- */

    /* Of a row: log2 of student/mixture at its arg, relative to which the student's sum is. */
    __device__ float top_of(float beta, const xdi_cuda_ring_row &row) const {
        float log, teacher_log;
        const float apart = __fsub_rn(row.beside, xdi_cuda_ring_base(row.max));
        logs(__fmaf_rn(apart, student.s, gap), beta, &log, &teacher_log);
        return -log;
    }
    static __device__ float nats(float log) {
        return __fmul_rn(log, (float)XDI_CUDA_LN2);
    }
    /* log2 of mixture/student and of teacher/mixture, d that of teacher/student. Returns the smaller's part of the larger. */
    static __device__ float logs(float d, float beta, float *log, float *teacher_log) {
        const float rest = __fsub_rn(1.0f, beta), z = xdi_cuda_power(-fabsf(d));
        const bool more = d > 0.0f;
        const float low = xdi_cuda_log2(__fmaf_rn(more ? rest : beta, z, more ? beta : rest));
        const float high = __fadd_rn(low, fabsf(d));
        *log = more ? high : low;
        *teacher_log = more ? -low : -high;
        return z;
    }
    __device__ void weigh(xdi_cuda_ring_mixtures *) const {}
    /* Whether 2^d neither overflows nor loses a power that is in the sums, when the lowest logit of a thread's is this. */
    __device__ bool is_narrow(float beta, float lowest) const {
        return __fmul_rn(__fsub_rn(this->max, lowest), student.s) < 100.0f && beta < 1.0f;
    }
    template <bool GUARDED>
    __device__ void mix(unsigned char *at, int left, int column, float beta, xdi_cuda_ring_mixtures *sums) const {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            const xdi_cuda_eight x = form::read(at, part, left), y = form::read(at + form::BYTES, part, left);
            const xdi_cuda_eight log = GUARDED ? mixed_apart(x, y, beta, column, part, sums)
                                               : mixed(x, y, beta, column, part, sums);
            xdi_cuda_words out;
            XD_UNROLL
            for (int i = 0; i < 4; i++) out.at[i] = xdi_cuda_f16_pair(log.at[2 * i], log.at[2 * i + 1]);
            xdi_cuda_put16(at + form::BYTES + part * XDI_CUDA_RING_PART, out);
        }
    }
    __device__ xdi_cuda_eight mixed(const xdi_cuda_eight &x, const xdi_cuda_eight &y, float beta, int column, int part,
                                    xdi_cuda_ring_mixtures *sums) const {
        const float rest = __fsub_rn(1.0f, beta);
        xdi_cuda_eight power = xdi_cuda_ring_powers(student.template of<false>(x)), teacher_power, log, own, teacher_log;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float d = __fmaf_rn(__fsub_rn(y.at[i], x.at[i]), student.s, gap), z = xdi_cuda_power(d);
            teacher_power.at[i] = __fmul_rn(power.at[i], z);
            log.at[i] = xdi_cuda_log2(__fmaf_rn(beta, z, rest));
            teacher_log.at[i] = __fsub_rn(d, log.at[i]);
        }
        own = log;
        this->set_apart(*sums, x, column, part, &own, &power, &teacher_power);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            sums->student = __fmaf_rn(power.at[i], own.at[i], sums->student);
            sums->teacher = __fmaf_rn(teacher_power.at[i], teacher_log.at[i], sums->teacher);
        }
        return log;
    }
    /* The same where one has a power that the other has not. */
    __device__ xdi_cuda_eight mixed_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, float beta, int column, int part,
                                          xdi_cuda_ring_mixtures *sums) const {
        const xdi_cuda_eight a = student.template of<true>(x), b = teacher.template of<true>(y);
        xdi_cuda_eight power, teacher_power, log, own, teacher_log;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float apart = y.at[i] == x.at[i] ? 0.0f : __fsub_rn(y.at[i], x.at[i]);
            const float d = __fmaf_rn(apart, student.s, gap), z = logs(d, beta, &log.at[i], &teacher_log.at[i]);
            const float large = xdi_cuda_power(fmaxf(a.at[i], b.at[i])), small = __fmul_rn(large, z);
            power.at[i] = d > 0.0f ? small : large;
            teacher_power.at[i] = d > 0.0f ? large : small;
        }
        own = log;
        this->set_apart(*sums, x, column, part, &own, &power, &teacher_power);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (power.at[i] > 0.0f) sums->student = __fmaf_rn(power.at[i], own.at[i], sums->student);
            if (teacher_power.at[i] > 0.0f) sums->teacher = __fmaf_rn(teacher_power.at[i], teacher_log.at[i], sums->teacher);
            log.at[i] = fminf(log.at[i], 1024.0f); /* of f16 */
        }
        return log;
    }
};

/* ---- F32 ---- */

template <int KIND> struct xdi_cuda_ring_factors<float, KIND> : xdi_cuda_ring_scale<float, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_scale<float, KIND> base_type;
    using typename base_type::form;
    using base_type::student;
    using base_type::teacher;
    using base_type::hard;
    using base_type::weight;
    using base_type::hard_weight;
    using base_type::teacher_weight;
    using base_type::uniform;
    using base_type::slope;
    float beside, log_gap, per_tau; /* log_gap: ln of the student's sum less that of the teacher's */

    __device__ void settle(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        base_type::begin(call, row, true);
        hard_weight = is::HARD ? __fdiv_rn(w.hard, row.hard) : 0.0f;
        weight = is::SOFT ? __fdiv_rn(w.soft, row.soft) : 0.0f;
        teacher_weight = is::SOFT ? __fdiv_rn(w.soft, row.teacher) : 0.0f;
        if (is::SHARED) weight = __fadd_rn(weight, hard_weight);
        uniform = __fmul_rn(w.hard, call.uniform);
        beside = row.beside;
        per_tau = call.per_tau;
        if (is::JSD) log_gap = logf(__fdiv_rn(row.soft, row.teacher));
        if (is::JSD) weight = __fdiv_rn(1.0f, row.soft); /* the mixtures are of probabilities */
        if (is::JSD) teacher_weight = __fdiv_rn(1.0f, row.teacher);
    }
    /* The mean of a logarithm, REVERSE of student/teacher, JSD of student/mixture. */
    __device__ void lean(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        if (is::REVERSE) slope = row.mean;
        if (is::JSD) slope = __fadd_rn(row.top, row.mean);
        if (is::JSD) weight = __fdiv_rn(__fmul_rn(w.soft, __fsub_rn(1.0f, call.beta)), row.soft);
    }
    template <bool GUARDED> __device__ void grade(const unsigned char *at, int left, float *to) const {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            xdi_cuda_eight y = {};
            const xdi_cuda_eight x = form::read(at, part, left);
            if (is::SOFT) y = form::read(at + form::BYTES, part, left);
            const xdi_cuda_eight g = gradient(x, y);
            xdi_cuda_store16(to + form::column(part, 0), xdi_cuda_rounded<float>(g.at));
            if (form::has_second(part, left)) xdi_cuda_store16(to + form::column(part, 4), xdi_cuda_rounded<float>(g.at + 4));
        }
    }
    /* Relative to the largest element: `rest` is 0. */
    static __device__ xdi_cuda_eight powers(const xdi_cuda_ring_exponent &of, const xdi_cuda_eight &x) {
        xdi_cuda_eight e;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) e.at[i] = __fmul_rn(__fsub_rn(x.at[i], of.base), of.s);
        return xdi_cuda_ring_powers(e);
    }
    __device__ xdi_cuda_eight gradient(const xdi_cuda_eight &x, const xdi_cuda_eight &y) const {
        const xdi_cuda_eight p = powers(student, x);
        xdi_cuda_eight g, q = {}, h = {};
        if (is::FORWARD) q = powers(teacher, y);
        if (is::BOTH && !is::SHARED) h = powers(hard, x);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float scaled = __fmul_rn(p.at[i], is::ALONE ? hard_weight : weight);
            g.at[i] = scaled;
            if (is::SMOOTH) g.at[i] = __fsub_rn(scaled, uniform);
            if (is::FORWARD) g.at[i] = __fmaf_rn(-q.at[i], teacher_weight, scaled);
            if (is::BOTH && !is::SHARED) g.at[i] = __fmaf_rn(h.at[i], hard_weight, g.at[i]);
            if (is::REVERSE) {
                const float apart = __fsub_rn(__fsub_rn(x.at[i], student.base), __fsub_rn(y.at[i], beside));
                g.at[i] = p.at[i] > 0.0f ? __fmul_rn(scaled, __fmaf_rn(apart, per_tau, -slope)) : 0.0f;
            }
            if (is::JSD) g.at[i] = p.at[i] > 0.0f ? __fmul_rn(scaled, __fsub_rn(y.at[i], slope)) : 0.0f;
        }
        return g;
    }

    /* ---- JSD, in nats ---- */

    __device__ float ratio_of(float x, float y) const {
        return __fmaf_rn(__fsub_rn(__fsub_rn(y, teacher.base), __fsub_rn(x, student.base)), per_tau, log_gap);
    }
    __device__ float top_of(float beta, const xdi_cuda_ring_row &row) const {
        float student_log, teacher_log;
        xdi_cuda_loss_log_ratios_of(ratio_of(student.base, row.beside), beta, &student_log, &teacher_log);
        return student_log;
    }
    static __device__ float nats(float log) {
        return log;
    }
    __device__ bool is_narrow(float, float) const {
        return false;
    }
    template <bool GUARDED>
    __device__ void mix(unsigned char *at, int left, int column, float beta, xdi_cuda_ring_mixtures *sums) const {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            unsigned char *const to = at + form::BYTES + 2 * part * XDI_CUDA_RING_PART;
            const xdi_cuda_eight x = form::read(at, part, left), y = form::read(at + form::BYTES, part, left);
            const xdi_cuda_eight log = mixed(x, y, beta, column, part, sums);
            xdi_cuda_put16(to, xdi_cuda_rounded<float>(log.at));
            if (form::has_second(part, left)) xdi_cuda_put16(to + XDI_CUDA_RING_PART, xdi_cuda_rounded<float>(log.at + 4));
        }
    }
    /* The sums are of powers; those of probabilities are asked for. */
    __device__ void weigh(xdi_cuda_ring_mixtures *sums) const {
        sums->student = __fmul_rn(sums->student, weight);
        sums->teacher = __fmul_rn(sums->teacher, teacher_weight);
    }
    /* Returns the logarithms of student/mixture. */
    __device__ xdi_cuda_eight mixed(const xdi_cuda_eight &x, const xdi_cuda_eight &y, float beta, int column, int part,
                                    xdi_cuda_ring_mixtures *sums) const {
        xdi_cuda_eight log, own, teacher_log;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            xdi_cuda_loss_log_ratios_of(ratio_of(x.at[i], y.at[i]), beta, &log.at[i], &teacher_log.at[i]);
            own.at[i] = -log.at[i];
        }
        xdi_cuda_eight power = powers(student, x);
        xdi_cuda_eight teacher_power = powers(teacher, y);
        this->set_apart(*sums, x, column, part, &own, &power, &teacher_power);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (power.at[i] > 0.0f)
                sums->student = __fmaf_rn(power.at[i], own.at[i], sums->student);
            if (teacher_power.at[i] > 0.0f)
                sums->teacher = __fmaf_rn(teacher_power.at[i], teacher_log.at[i], sums->teacher);
        }
        return log;
    }
};

/* >>cuda/loss_ring_row.cuh */

/* What loss_ring.cu keeps of a row and in a block's memory, the thread that asks for copies, and a row's sums: a block's entry, all
 * blocks' entries to what the gradient needs, and to the record of the second kernel. */

/* A row for the second kernel, in the memory of references and sums. */
struct xdi_cuda_ring_record {
    double ref[XD_LOSS_REFERENCES], total[XD_LOSS_SUMS], mixtures[XD_LOSS_MIXTURES];
    double label_x, label_y; /* logits at the label */
};
static_assert(sizeof(xdi_cuda_ring_record) <= XD_LOSS_REFERENCES * sizeof(double) + XD_LOSS_SUMS * sizeof(xd_fixed),
              "a row's memory, see xdi_loss_layout");

/* What a block tells the others: sums as in kernel/loss.h. */
struct alignas(16) xdi_cuda_ring_entry {
    double sum[XDI_CUDA_LOSS_TERMS], ones; /* ones: of the student's columns that have its largest element */
    float max, teacher_max, beside;        /* beside: the teacher's logit at arg */
    float label_x, label_y;                /* 0 unless the block has the label */
    int arg, columns;                      /* arg: a column of the block */
};

/* JSD: a block's sums over the mixture. */
struct alignas(16) xdi_cuda_ring_mixed {
    double sum[XD_LOSS_MIXTURES];
};

enum { XDI_CUDA_RING_BLOCKS = 16, XDI_CUDA_RING_SCALE = 160 };

/* What the asking thread knows, in memory, as it needs its registers between. */
struct xdi_cuda_ring_feed {
    int64_t row;
    double scale;       /* of the row, asked for when the row before was done */
    const char *at[2];  /* what comes next, of the student and the teacher */
    int left;           /* bytes of it that the row still has */
    xdi_cuda_ring_place place; /* parity: of the wait for "empty", which a new ring passes at once */
};

struct xdi_cuda_ring_memory {
    xdi_cuda_ring_barriers barriers;
    xdi_cuda_ring_feed feed;
    int maxima[2][XDI_CUDA_RING_WARPS]; /* in their order as integers */
    float parts[XDI_CUDA_RING_TOTALS][XDI_CUDA_RING_WARPS + 1];
    int args[XDI_CUDA_RING_WARPS];      /* the lowest column that has the block's largest element; INT32_MAX: none */
    double totals[XDI_CUDA_RING_TOTALS]; /* of all warps */
    xdi_cuda_ring_entry table[2][XDI_CUDA_RING_BLOCKS]; /* of this row and the next */
    xdi_cuda_ring_mixed mixtures[XDI_CUDA_RING_BLOCKS];
    xdi_cuda_ring_entry own; /* on their way to the others */
    xdi_cuda_ring_mixed own_mixed;
    alignas(16) unsigned char factors[XDI_CUDA_RING_SCALE]; /* what the row's gradient needs */
    int next;                                               /* the cluster's next row that counts, */
    double next_scale;                                      /* and its scale */
    int sound, heard;                                       /* all copies so far, and all that blocks have told this one */
    unsigned phases[XDI_CUDA_RING_TOLD];                    /* parities of the next waits for that */
};

/* Where a block's columns are, and which rows its cluster has: `cluster`, then every `clusters`-th. */
struct xdi_cuda_ring_block {
    int begin, cluster, clusters, rank, blocks, count, packs, chunks;
    bool last; /* of the row */
};

template <typename X, int TENSORS>
static __device__ inline xdi_cuda_ring_block xdi_cuda_ring_block_of(const xd_loss_args &a, const xdi_cuda_ring_call &call) {
    const int64_t columns = a.vocab.end - a.vocab.begin;
    xdi_cuda_ring_block b;
    b.rank = (int)xdi_cuda_cluster_rank();
    b.blocks = (int)xdi_cuda_cluster_size();
    b.cluster = (int)blockIdx.x / b.blocks;
    b.clusters = (int)gridDim.x / b.blocks;
    const int64_t begin = b.rank * call.slice, left = columns - begin;
    b.begin = (int)(begin < columns ? begin : columns);
    b.count = (int)(left < 0 ? 0 : left < call.slice ? left : call.slice);
    b.packs = b.count / xdi_cuda_pack<X>::COUNT;
    b.chunks = (b.packs + xdi_cuda_ring_form<X, TENSORS>::PACKS - 1) / xdi_cuda_ring_form<X, TENSORS>::PACKS;
    b.last = b.rank + 1 == b.blocks;
    return b;
}

/* ---- the thread that asks for copies, the first of the last warp ---- */

/* Goes to a row that counts, `row` or one after it. */
template <typename X, int TENSORS>
static __device__ inline void xdi_cuda_ring_go(const xd_loss_args &a, const xdi_cuda_ring_block &b, xdi_cuda_ring_feed *f) {
    while (f->row < a.student.rows && f->scale == 0.0) {
        f->row += b.clusters;
        f->scale = f->row < a.student.rows ? a.row_scale[f->row] : 0.0;
    }
    if (f->row >= a.student.rows) return;
    f->at[0] = reinterpret_cast<const char *>(xdi_cuda_row<X>(a.student, f->row) + b.begin);
    if (TENSORS == 2) f->at[1] = reinterpret_cast<const char *>(xdi_cuda_row<X>(a.teacher, f->row) + b.begin);
    f->left = 16 * b.packs;
}

/* Asks for the next stage, if there is one. */
template <typename X, int TENSORS>
static __device__ inline void xdi_cuda_ring_ask(const xd_loss_args &a, const xdi_cuda_ring_block &b, int stages,
                                                unsigned char *room, xdi_cuda_ring_barriers *barriers, xdi_cuda_ring_feed *f, bool *sound) {
    enum { BYTES = xdi_cuda_ring_form<X, TENSORS>::BYTES };
    if (f->left <= 0) xdi_cuda_ring_go<X, TENSORS>(a, b, f);
    if (f->left <= 0) return;
    xdi_cuda_ring_wait(&barriers->empty[f->place.stage], f->place.parity, sound);
    if (!*sound) return;
    const unsigned bytes = (unsigned)(f->left < BYTES ? f->left : (int)BYTES);
    uint64_t *const full = &barriers->full[f->place.stage];
    unsigned char *const to = room + f->place.stage * XDI_CUDA_RING_STAGE;
    xdi_cuda_barrier_expect(full, bytes * TENSORS);
    XD_UNROLL
    for (int i = 0; i < TENSORS; i++) {
        xdi_cuda_bulk_load(to + i * BYTES, f->at[i], bytes, full);
        f->at[i] += BYTES;
    }
    f->place.next(stages);
    f->left -= BYTES;
    if (f->left > 0) return;
    f->row += b.clusters;
    f->scale = f->row < a.student.rows ? a.row_scale[f->row] : 0.0;
}

static __device__ inline xdi_cuda_ring_feed xdi_cuda_ring_feed_of(const xd_loss_args &a, const xdi_cuda_ring_block &b) {
    return { b.cluster, b.cluster < a.student.rows ? a.row_scale[b.cluster] : 0.0, { NULL, NULL }, 0, { 0, 1u } };
}

/* ---- a row ---- */

/* The element of this block's columns, which are all on the chip; `start` is the first one's place. */
template <typename X, int TENSORS>
static __device__ inline float xdi_cuda_ring_element(const unsigned char *room, const xdi_cuda_ring_place &start, int stages,
                                                     int column, int tensor) {
    typedef xdi_cuda_ring_form<X, TENSORS> form;
    enum { COLUMNS = form::COLUMNS };
    int stage = start.stage + column / COLUMNS;
    if (stage >= stages) stage -= stages;
    const unsigned char *at = room + stage * XDI_CUDA_RING_STAGE + tensor * form::BYTES;
    return xdi_cuda_widen(reinterpret_cast<const X *>(at)[column % COLUMNS]);
}

/* The block's entry, from its sums. By all lanes of a warp. */
template <typename X, int KIND>
static __device__ inline xdi_cuda_ring_entry
xdi_cuda_ring_entry_of(const xd_loss_args &a, int64_t r, const xdi_cuda_ring_block &b, int stages, const unsigned char *room,
                       const xdi_cuda_ring_place &start, const double *sum, int arg) {
    typedef xdi_cuda_ring_is<KIND> is;
    xdi_cuda_ring_entry e;
    memset(&e, 0, sizeof e);
    e.arg = arg;
    e.columns = b.count;
    e.ones = sum[XDI_CUDA_RING_ONES];
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++)
        if (xdi_cuda_ring_sums_up<KIND>(i)) e.sum[i] = sum[i];
    if (is::SOFT && arg < b.count) e.beside = xdi_cuda_ring_element<X, is::TENSORS>(room, start, stages, arg, 1);
    e.sum[XD_LOSS_SOFT] += is::SOFT ? e.ones : 0.0;
    e.sum[XD_LOSS_TEACHER] += is::SOFT ? sum[XDI_CUDA_RING_TEACHER_ONES] : 0.0;
    e.sum[XD_LOSS_HARD] += is::HARD && !is::SHARED ? e.ones : 0.0;
    if (is::SHARED) e.sum[XD_LOSS_HARD] = e.sum[XD_LOSS_SOFT];
    const int64_t label = is::HARD ? xd_id_at(a.labels, r) - b.begin : -1;
    if (label >= 0 && label < b.count) {
        e.label_x = xdi_cuda_ring_element<X, is::TENSORS>(room, start, stages, (int)label, 0);
        if (is::SOFT) e.label_y = xdi_cuda_ring_element<X, is::TENSORS>(room, start, stages, (int)label, 1);
    }
    return e;
}

/* A block's sum, where a factor of 0 leaves nothing but NaN, which is a finding. */
static __device__ inline double xdi_cuda_ring_scaled(double factor, double sum) {
    return factor > 0.0 ? factor * sum : isnan(sum) ? sum : 0.0;
}

/* Reverse: a block's sum relative to the row. */
static __device__ inline double xdi_cuda_ring_cross(const xdi_cuda_ring_entry &e, const xdi_cuda_ring_row &row,
                                                    const xdi_cuda_ring_call &call, float shift, double factor) {
    const double step = ((double)shift - ((double)e.beside - (double)row.beside)) * (double)call.per_tau;
    return factor * (e.sum[XD_LOSS_CROSS] + e.sum[XD_LOSS_SOFT] * step);
}

/* The whole row from the blocks' entries, by a warp of each. *rest: the student's sum without its largest elements, of 1. */
template <int KIND>
static __device__ inline xdi_cuda_ring_row xdi_cuda_ring_merge(const xdi_cuda_ring_block &b, const xdi_cuda_ring_call &call,
                                                               const xdi_cuda_ring_entry *table, float *rest) {
    typedef xdi_cuda_ring_is<KIND> is;
    enum { LANES = XDI_CUDA_RING_BLOCKS }; /* two lanes have the same entry */
    const int lane = (int)threadIdx.x % LANES;
    const bool has = lane < b.blocks;
    const xdi_cuda_ring_entry &e = table[has ? lane : 0];
    const float max = has ? e.max : -INFINITY, teacher_max = has && is::SOFT ? e.teacher_max : -INFINITY;
    xdi_cuda_ring_row row = {};
    row.max = xdi_cuda_ring_max_lanes<LANES>(max);
    if (is::SOFT) row.teacher_max = xdi_cuda_ring_max_lanes<LANES>(teacher_max);
    const unsigned first = __ballot_sync(0xffffffffu, max == row.max);
    const int from = first ? __ffs((int)first) - 1 : 0;
    if (is::SOFT) row.beside = table[from].beside;
    row.arg = (int)(table[from].arg + (int64_t)from * call.slice - b.begin);
    const float shift = max == -INFINITY ? -INFINITY : __fsub_rn(max, row.max);
    const float factor = xdi_cuda_exp_of(shift, is::ALONE ? call.hard_factor : call.soft_factor);
    if (is::HARD && !is::SHARED) {
        const float hard = is::ALONE ? factor : xdi_cuda_exp_of(shift, call.hard_factor);
        row.hard = xdi_cuda_ring_add_lanes<LANES>(hard > 0.0f ? __fmul_rn(hard, (float)e.sum[XD_LOSS_HARD]) : 0.0f);
    }
    if (!is::SOFT) return row;
    const float teacher_shift = teacher_max == -INFINITY ? -INFINITY : __fsub_rn(teacher_max, row.teacher_max);
    const float teacher_factor = xdi_cuda_exp_of(teacher_shift, call.soft_factor);
    row.soft = xdi_cuda_ring_add_lanes<LANES>(factor > 0.0f ? __fmul_rn(factor, (float)e.sum[XD_LOSS_SOFT]) : 0.0f);
    row.teacher =
        xdi_cuda_ring_add_lanes<LANES>(teacher_factor > 0.0f ? __fmul_rn(teacher_factor, (float)e.sum[XD_LOSS_TEACHER]) : 0.0f);
    if (is::SHARED) row.hard = row.soft;
    if (is::REVERSE) {
        const double cross = factor > 0.0f ? xdi_cuda_ring_cross(e, row, call, shift, (double)factor) : 0.0;
        row.mean = __fdiv_rn((float)xdi_cuda_ring_add_lanes<LANES>(cross), row.soft);
    }
    if (is::JSD) {
        const double part = factor > 0.0f ? (double)factor * (e.sum[XD_LOSS_SOFT] - (max == row.max ? e.ones : 0.0)) : 0.0;
        *rest = __fdiv_rn(xdi_cuda_ring_add_lanes<LANES>((float)part), row.soft);
    }
    return row;
}

/* The same in double, into the row's record. By one warp. */
template <int KIND>
static __device__ inline void xdi_cuda_ring_keep(const xdi_cuda_ring_block &b, const xdi_cuda_ring_call &call,
                                                 const xdi_cuda_ring_entry *table, const xdi_cuda_ring_row &row,
                                                 xdi_cuda_ring_record *record) {
    typedef xdi_cuda_ring_is<KIND> is;
    enum { LANES = XDI_CUDA_RING_BLOCKS };
    const int lane = (int)threadIdx.x % LANES;
    const bool has = lane < b.blocks, first = threadIdx.x % XDI_CUDA_WARP == 0;
    const xdi_cuda_ring_entry &e = table[has ? lane : 0];
    const float shift = has && e.max > -INFINITY ? __fsub_rn(e.max, row.max) : -INFINITY;
    const float teacher_shift = has && is::SOFT && e.teacher_max > -INFINITY ? __fsub_rn(e.teacher_max, row.teacher_max) : -INFINITY;
    const double factor = (double)xdi_cuda_exp_of(shift, is::ALONE ? call.hard_factor : call.soft_factor);
    const double teacher_factor = (double)xdi_cuda_exp_of(teacher_shift, call.soft_factor);
    const double hard_factor = is::ALONE || is::SHARED ? factor : (double)xdi_cuda_exp_of(shift, call.hard_factor);
    double total[XDI_CUDA_LOSS_TERMS] = {};
    if (is::SOFT) total[XD_LOSS_SOFT] = xdi_cuda_ring_scaled(factor, e.sum[XD_LOSS_SOFT]);
    if (is::HARD) total[XD_LOSS_HARD] = xdi_cuda_ring_scaled(hard_factor, e.sum[XD_LOSS_HARD]);
    if (is::SOFT) total[XD_LOSS_TEACHER] = xdi_cuda_ring_scaled(teacher_factor, e.sum[XD_LOSS_TEACHER]);
    if (factor > 0.0 && is::REVERSE) total[XD_LOSS_CROSS] = xdi_cuda_ring_cross(e, row, call, shift, factor);
    if (teacher_factor > 0.0 && is::FORWARD) {
        const double step = ((double)teacher_shift - (double)shift) * (double)call.per_tau;
        total[XD_LOSS_CROSS] = teacher_factor * (e.sum[XD_LOSS_CROSS] + e.sum[XD_LOSS_TEACHER] * step);
    }
    if (has && is::SMOOTH) total[XD_LOSS_LINEAR] = e.sum[XD_LOSS_LINEAR] - (double)e.columns * (double)row.max;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) {
        if (!xdi_cuda_ring_sums_up<KIND>(i) && !(is::SHARED && i == XD_LOSS_HARD)) continue;
        const double sum = xdi_cuda_ring_add_lanes<LANES>(total[i]);
        if (first) record->total[i] = sum;
    }
    if (is::HARD) {
        const float x = xdi_cuda_ring_add_lanes<LANES>(has ? e.label_x : 0.0f), y = xdi_cuda_ring_add_lanes<LANES>(has ? e.label_y : 0.0f);
        if (first) record->label_x = (double)x, record->label_y = (double)y;
    }
    if (!first) return;
    record->ref[XD_LOSS_MAX] = (double)row.max;
    record->ref[XD_LOSS_ARG] = (double)row.arg + (double)b.begin;
    record->ref[XD_LOSS_TEACHER_AT_ARG] = (double)row.beside;
    record->ref[XD_LOSS_TEACHER_MAX] = (double)row.teacher_max;
}

/* >>cuda/loss_ring.cu */

/* Losses of rows that stay on the chip, so that a row is read once and its gradient written once. The grid is as large as the
 * GPU, in clusters of blocks that share a row; a block has `slice` columns of it, in a ring of stages (ring.cuh) that also holds
 * what comes next. Per row:
 *
 *   1. every block finds its largest elements, then its sums relative to them;
 *   2. its last warp stores both into the shared memory of all blocks, whose barriers count them (JSD: twice);
 *   3. that warp merges the blocks' sums in the order of the columns, and leaves what the gradient needs;
 *   4. the other warps compute the gradient, while the last one asks for the copies of later rows.
 *
 * One such warp of the cluster also merges in double, into a record of the row. A second kernel, with a thread a row, makes of the
 * records what kernel/loss.h promises: the row's scalars and findings, and the gradient of the two columns that may hold nearly
 * all probability. Rows that it cannot take have the path of loss_fused.cu. */

/* ---- the kernel ---- */

template <typename X, int KIND> struct xdi_cuda_ring_worker {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X, is::TENSORS> form;
    typedef xdi_cuda_ring_sums<X, KIND> sums;
    typedef xdi_cuda_ring_factors<X, KIND> factors;
    enum {
        PACK = (int)xdi_cuda_pack<X>::COUNT,
        LAST = (int)XDI_CUDA_LOSS_TERMS - 1,
        COUNT = xdi_cuda_ring_total_of<KIND>(LAST) + (xdi_cuda_ring_sums_up<KIND>(LAST) ? 1 : 0)
    };
    static_assert((int)sizeof(factors) <= (int)XDI_CUDA_RING_SCALE, "the room");
    const xd_loss_args &a;
    const xdi_cuda_ring_call &call;
    const xdi_cuda_ring_block b;
    unsigned char *room;
    xdi_cuda_ring_memory *m;
    xdi_cuda_ring_place start; /* of this row */
    bool sound; /* no copy of this block was lost */

    static __device__ int lane() {
        return (int)threadIdx.x % XDI_CUDA_WARP;
    }
    static __device__ int warp() {
        return (int)threadIdx.x / XDI_CUDA_WARP;
    }
    /* Whether this is the last warp. */
    static __device__ bool leads() {
        return threadIdx.x >= XDI_CUDA_RING_LANES;
    }
    /* Calls use(this thread's part of a stage, packs from there on, its first column) for each stage where it has one. */
    template <typename Use> __device__ void each(Use use) {
        unsigned char *at = room + 16 * (int)threadIdx.x + start.stage * XDI_CUDA_RING_STAGE;
        const unsigned char *const end = room + call.stages * XDI_CUDA_RING_STAGE;
        for (int left = b.packs - (int)threadIdx.x; left > 0; left -= form::PACKS) {
            use(at, left, (b.packs - left) * PACK);
            at += XDI_CUDA_RING_STAGE;
            if (at >= end) at -= call.stages * XDI_CUDA_RING_STAGE;
        }
    }
    __device__ void ask(int count) {
        if (lane() != 0 || !sound) return;
        xdi_cuda_ring_feed feed = m->feed;
        for (int i = 0; i < count; i++) xdi_cuda_ring_ask<X, is::TENSORS>(a, b, call.stages, room, &m->barriers, &feed, &sound);
        m->feed = feed;
    }
    __device__ bool records(int r) const {
        return r / b.clusters % b.blocks == b.rank;
    }
    __device__ xdi_cuda_ring_record *record(int r) const {
        return reinterpret_cast<xdi_cuda_ring_record *>(a.references) + r;
    }

    /* Waits for each stage of the row and finds the warp's largest elements. */
    __device__ void look(xdi_cuda_ring_peak<X, KIND> *peak) {
        const unsigned char *const mine = room + 16 * (int)threadIdx.x;
        xdi_cuda_ring_place at = start;
        for (int left = b.packs - (int)threadIdx.x; left > 0; left -= form::PACKS, at.next(call.stages)) {
            xdi_cuda_ring_wait(&m->barriers.full[at.stage], at.parity, &sound);
            peak->look(mine + at.stage * XDI_CUDA_RING_STAGE, left);
        }
        const int max = __reduce_max_sync(0xffffffffu, xdi_cuda_ring_order(peak->largest()));
        const int teacher_max = is::SOFT ? __reduce_max_sync(0xffffffffu, xdi_cuda_ring_order(peak->teacher_largest())) : 0;
        if (lane() != 0) return;
        m->maxima[0][warp()] = max;
        if (is::SOFT) m->maxima[1][warp()] = teacher_max;
    }
    /* The block's largest element, of the student or of the teacher. */
    __device__ float largest(int tensor) const {
        const int of_warp = m->maxima[tensor][lane() < XDI_CUDA_RING_WARPS ? lane() : 0];
        return xdi_cuda_ring_ordered(__reduce_max_sync(0xffffffffu, of_warp));
    }
    __device__ void add_up(sums *mine) {
        if (!form::FINE && !mine->guarded) {
            each([&](const unsigned char *at, int left, int) { mine->template take<false>(at, left, b.packs); });
            if (!__any_sync(0xffffffffu, mine->repeats())) return;
            mine->clear();
            mine->guarded = true;
        }
        each([&](const unsigned char *at, int left, int) { mine->template take<true>(at, left, b.packs); });
    }
    /* Leaves the warp's sums in memory. What is apart, few threads have. */
    __device__ void keep_warp(const sums &mine) {
        const bool any = __any_sync(0xffffffffu, mine.has_any()) != 0;
        float own[XDI_CUDA_RING_FOUR] = {};
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++)
            if (xdi_cuda_ring_sums_up<KIND>(i)) own[xdi_cuda_ring_total_of<KIND>(i)] = mine.sum[i];
        float total = xdi_cuda_ring_add_four<COUNT>(own[0], own[1], own[2], own[3]), other = 0.0f;
        int arg = INT32_MAX;
        if (any) {
            other = xdi_cuda_ring_add_four<XDI_CUDA_RING_FOUR>(
                mine.sum[XDI_CUDA_RING_ONES], mine.sum[XDI_CUDA_RING_TEACHER_ONES], mine.sum[XDI_CUDA_RING_APART], 0.0f);
            arg = (int)__reduce_min_sync(0xffffffffu, mine.arg);
        }
        if (lane() >= XDI_CUDA_RING_FOUR) total = other; /* the sums repeat every four lanes */
        if (lane() < XDI_CUDA_RING_TOTALS) m->parts[lane()][warp()] = total;
        if (lane() == 0) m->args[warp()] = arg;
    }
    /* Adds up the warps' sums into m->totals, by four lanes each. By the last warp, as what follows. */
    __device__ void total_up() {
        const float *const part = m->parts[lane() / 4];
        double sum = 0.0;
        XD_UNROLL
        for (int w = 0; w < XDI_CUDA_RING_WARPS; w += 4)
            if (w + lane() % 4 < XDI_CUDA_RING_WARPS) sum = xd_add(sum, (double)part[w + lane() % 4]);
        sum = xdi_cuda_ring_add_lanes<4>(sum);
        if (lane() % 4 == 0) m->totals[lane() / 4] = sum;
        __syncwarp();
    }
    /* Tells every block what the first lane has left at `own`; it counts at their barrier `which`. */
    template <typename T> __device__ void tell_all(T *at, const T *own, int which) {
        enum { PARTS = (int)(sizeof(T) / 16) };
        uint64_t *const counter = &m->barriers.told[which];
        static_assert(sizeof(T) % 16 == 0, "whole stores");
        __syncwarp();
        if (lane() == 0) xdi_cuda_barrier_expect(counter, (unsigned)(b.blocks * (int)sizeof *own));
        XD_UNROLL_N(1)
        for (int i = lane(); i < b.blocks * PARTS; i += XDI_CUDA_WARP) {
            const int part = i % PARTS * 16;
            xdi_cuda_cluster_put16(reinterpret_cast<char *>(at) + part, reinterpret_cast<const char *>(own) + part, counter,
                                   (unsigned)(i / PARTS));
        }
    }
    /* Tells every block this one's sums. */
    __device__ void tell(int r, int parity, const xdi_cuda_ring_corrections &by, float max, float teacher_max) {
        double sum[XDI_CUDA_RING_SUMS] = {};
        total_up();
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_RING_SUMS; i++)
            if (xdi_cuda_ring_sums_up<KIND>(i)) sum[i] = m->totals[xdi_cuda_ring_total_of<KIND>(i)];
        const int arg = (int)__reduce_min_sync(0xffffffffu, m->args[lane() < XDI_CUDA_RING_WARPS ? lane() : 0]);
        const double apart = sum[XDI_CUDA_RING_APART];
        xdi_cuda_ring_correct<KIND>(by, sum);
        xdi_cuda_ring_entry e = xdi_cuda_ring_entry_of<X, KIND>(a, r, b, call.stages, room, start, sum, arg);
        e.max = max;
        e.teacher_max = teacher_max;
        if (is::FORWARD) e.sum[XD_LOSS_CROSS] -= XDI_CUDA_LN2 * apart;
        if (is::REVERSE) {
            const double s = (double)call.soft_factor * XDI_CUDA_LN2, y = (double)e.beside; /* as the exponents have it */
            e.sum[XD_LOSS_CROSS] += s * (y * sum[XD_LOSS_SOFT] + (e.ones * y - apart));
        }
        if (!sound) e.sum[is::SOFT ? XD_LOSS_SOFT : XD_LOSS_HARD] = (double)NAN; /* a finding */
        if (lane() == 0) m->own = e;
        tell_all(&m->table[parity][b.rank], &m->own, parity);
    }
    /* Waits for what all blocks have told; where that takes too long, *own, this block's part of it, becomes no number. */
    __device__ void hear(int which, double *own) {
        bool heard = m->heard != 0;
        xdi_cuda_ring_hear(&m->barriers.told[which], m->phases[which], &heard);
        heard = __all_sync(0xffffffffu, heard) != 0;
        __syncwarp(); /* all lanes have read the phase */
        if (lane() == 0) m->phases[which] ^= 1u;
        if (lane() == 0 && !heard) m->heard = 0, *own = (double)NAN;
        __syncwarp();
    }
    /* Leaves what the gradient needs. */
    __device__ void leave(const factors &f) {
        __syncwarp(); /* after left() */
        if (lane() == 0) *reinterpret_cast<factors *>(m->factors) = f;
    }
    __device__ factors left() const {
        return *reinterpret_cast<const factors *>(m->factors);
    }
    /* JSD: a warp's sums over the mixture, of the whole row. */
    __device__ void mix(const sums &mine, const factors &f, bool guarded) {
        xdi_cuda_ring_mixtures of = { 0.0f, 0.0f, mine.largest, mine.largest == f.max };
        if (form::FINE || guarded)
            each([&](unsigned char *at, int left, int column) { f.template mix<true>(at, left, column, call.beta, &of); });
        else
            each([&](unsigned char *at, int left, int column) { f.template mix<false>(at, left, column, call.beta, &of); });
        left().weigh(&of); /* read again, for want of registers */
        const float total = xdi_cuda_ring_add_four<2>(of.student, of.teacher, 0.0f, 0.0f);
        if (lane() < 2) m->parts[lane()][warp()] = total;
    }
    /* JSD: tells every block this one's sums over the mixture. */
    __device__ void tell_mixtures() {
        total_up();
        if (lane() == 0) m->own_mixed.sum[XD_LOSS_STUDENT_MIXTURE] = -m->totals[0];
        if (lane() == 0) m->own_mixed.sum[XD_LOSS_TEACHER_MIXTURE] = m->totals[1];
        tell_all(&m->mixtures[b.rank], &m->own_mixed, 2);
    }
    /* JSD: the row's mean. */
    __device__ void merge_mixtures(int r, const factors &f, float rest, xdi_cuda_ring_row *row) {
        const int block = lane() % XDI_CUDA_RING_BLOCKS;
        double sum[XD_LOSS_MIXTURES];
        for (int i = 0; i < XD_LOSS_MIXTURES; i++)
            sum[i] = xdi_cuda_ring_add_lanes<XDI_CUDA_RING_BLOCKS>(block < b.blocks ? m->mixtures[block].sum[i] : 0.0);
        const double unit = (double)factors::nats(1.0f);
        const double student = unit * (sum[XD_LOSS_STUDENT_MIXTURE] - (double)f.top * (double)rest);
        row->top = factors::nats(f.top);
        row->mean = (float)student;
        if (!records(r) || lane() != 0) return;
        record(r)->mixtures[XD_LOSS_TEACHER_MIXTURE] = unit * sum[XD_LOSS_TEACHER_MIXTURE];
        record(r)->mixtures[XD_LOSS_STUDENT_MIXTURE] = student;
    }
    /* Writes the gradient, if there is one, and gives each stage back. */
    template <bool GUARDED> __device__ void grade(int r, const factors f) {
        X *to = a.gradient.data ? xdi_cuda_row<X>(a.gradient, r) + b.begin + (int)threadIdx.x * PACK : NULL;
        int left = to ? b.packs - (int)threadIdx.x : 0, stage = start.stage;
        for (int k = 0; k < b.chunks; k++, left -= form::PACKS) {
            if (left > 0) {
                f.template grade<GUARDED>(room + 16 * (int)threadIdx.x + stage * XDI_CUDA_RING_STAGE, left, to);
                to += form::COLUMNS;
            }
            if (is::JSD) xdi_cuda_bulk_fence(); /* mix() has written to the stage */
            __syncwarp();
            if (lane() == 0) xdi_cuda_barrier_arrive(&m->barriers.empty[stage]);
            stage = stage + 1 < call.stages ? stage + 1 : 0;
        }
        if (a.gradient.data) zero(r, false);
    }
    /* Zeroes this block's part of a row's gradient, or the padding alone, which the last block has. */
    __device__ void zero(int r, bool all) const {
        X *const to = xdi_cuda_row<X>(a.gradient, r);
        const xdi_cuda_pack<X> zeros = {};
        for (int p = (int)threadIdx.x; p < b.packs && all; p += XDI_CUDA_RING_LANES)
            xdi_cuda_store16(to + b.begin + p * PACK, zeros);
        if (!b.last) return;
        for (int64_t c = a.vocab.end - a.vocab.begin + (int64_t)threadIdx.x; c < a.gradient.cols; c += XDI_CUDA_RING_LANES)
            xdi_cuda_narrow(0.0f, &to[c]);
    }
    /* The block's barrier. All warps come here from two functions, in the same order. */
    static __device__ void meet() {
        __syncthreads();
    }
    /* The same, and whether a copy of this block was lost. */
    __device__ bool meet_sound() const {
        return __syncthreads_or(!sound) == 0;
    }
    /* A row, by a warp that works on columns. */
    __device__ void work(int r) {
        xdi_cuda_ring_peak<X, KIND> peak;
        sums mine;
        sound = m->sound != 0; /* which is not kept in a register from row to row */
        look(&peak);
        meet();
        mine.begin(peak, call, largest(0), is::SOFT ? largest(1) : 0.0f);
        add_up(&mine);
        keep_warp(mine);
        meet_sound();
        meet();
        factors f = left();
        if (is::JSD) {
            const bool wide = f.guarded || !f.is_narrow(call.beta, mine.lowest);
            mix(mine, f, __any_sync(0xffffffffu, wide) != 0);
            meet();
            meet();
            f = left();
        }
        if (form::FINE || mine.guarded || f.guarded)
            grade<true>(r, f);
        else
            grade<false>(r, f);
        start = start.after(b.chunks, call.stages);
    }
    /* The same row, by the last warp. */
    __device__ void lead(int r, double scale, int parity) {
        const xdi_cuda_ring_weights weights = { (float)(scale * call.hard_weight), (float)(scale * call.soft_weight) };
        float rest = 0.0f;
        factors f;
        meet();
        const float max = largest(0), teacher_max = is::SOFT ? largest(1) : 0.0f;
        sums mine; /* for the exponents, which all threads have */
        mine.begin(xdi_cuda_ring_peak<X, KIND>(), call, max, teacher_max);
        const xdi_cuda_ring_corrections by = xdi_cuda_ring_corrections_of(mine);
        count(r + b.clusters); /* while the others add up, who have read m->next */
        sound = meet_sound(); /* asks no more for a ring that has lost one */
        if (lane() == 0) m->sound = sound;
        tell(r, parity, by, max, teacher_max);
        hear(parity, &m->table[parity][b.rank].sum[is::SOFT ? XD_LOSS_SOFT : XD_LOSS_HARD]);
        xdi_cuda_ring_row row = xdi_cuda_ring_merge<KIND>(b, call, m->table[parity], &rest);
        f.settle(call, weights, row);
        if (is::JSD)
            f.top = f.top_of(call.beta, row);
        else
            f.lean(call, weights, row);
        leave(f);
        meet();
        if (is::JSD) {
            meet();
            tell_mixtures();
            hear(2, &m->mixtures[b.rank].sum[XD_LOSS_STUDENT_MIXTURE]);
            f = left();
            merge_mixtures(r, f, rest, &row);
            f.lean(call, weights, row);
            leave(f);
            meet();
        }
        if (records(r)) xdi_cuda_ring_keep<KIND>(b, call, m->table[parity], row, record(r));
    }
    /* The first row from r on that counts, of those of the cluster, and its scale. */
    __device__ int counting(int r, double *scale) const {
        for (; r < (int)a.student.rows; r += b.clusters) {
            *scale = a.row_scale[r];
            if (*scale != 0.0) return r;
        }
        return r;
    }
    __device__ void count(int r) {
        double scale = 0.0;
        const int next = counting(r, &scale);
        if (lane() == 0) m->next = next, m->next_scale = scale;
    }
    __device__ void run() {
        int r = b.cluster, next = m->next;
        for (;;) {
            for (; r < next && r < (int)a.student.rows; r += b.clusters)
                if (a.gradient.data) zero(r, true);
            if (r >= (int)a.student.rows) return;
            work(r);
            r += b.clusters;
            next = m->next;
        }
    }
    __device__ void run_last() {
        int parity = 0;
        if (lane() == 0) m->feed = xdi_cuda_ring_feed_of(a, b);
        ask(call.stages);
        for (int r = m->next; r < (int)a.student.rows; r = m->next, parity ^= 1) {
            lead(r, m->next_scale, parity);
            __syncwarp();
            ask(b.chunks);
            start = start.after(b.chunks, call.stages);
        }
    }
};

/* Blocks that share a multiprocessor; fewer where 72 registers do not suffice. */
template <typename X, int KIND> struct xdi_cuda_ring_least {
    typedef xdi_cuda_ring_is<KIND> is;
    enum { FEW = is::JSD || (sizeof(X) == 2 && is::FORWARD && !is::SHARED), BLOCKS = XDI_CUDA_RING_NARROW && FEW ? 1 : 2 };
};

template <typename X, int KIND>
static __global__ void __launch_bounds__(XDI_CUDA_RING_THREADS, xdi_cuda_ring_least<X, KIND>::BLOCKS)
    xdi_cuda_loss_ring_kernel(const __grid_constant__ xd_loss_args a, const __grid_constant__ xdi_cuda_ring_call call) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    XD_DYN_SHARED(unsigned char, room);
    XD_SHARED(xdi_cuda_ring_memory, memory, );
    const xdi_cuda_ring_block b = xdi_cuda_ring_block_of<X, xdi_cuda_ring_is<KIND>::TENSORS>(a, call);
    xdi_cuda_ring_worker<X, KIND> worker = { a, call, b, room, &memory, { 0, 0u }, true };
    if (threadIdx.x == 0) {
        memory.next_scale = 0.0;
        xdi_cuda_ring_init(&memory.barriers, call.stages);
        memory.next = worker.counting(b.cluster, &memory.next_scale);
        memory.sound = memory.heard = 1;
        for (int i = 0; i < XDI_CUDA_RING_TOLD; i++) memory.phases[i] = 0;
    }
    xdi_cuda_cluster_sync(); /* every block runs, and has its barriers */
    if (worker.leads())
        worker.run_last();
    else
        worker.run();
    xdi_cuda_cluster_sync(); /* no block ends while others write into its memory */
#endif
}

/* >>cuda/loss_ring_rows.cu */

/* The second kernel of losses of rows that stay on the chip, a thread a row: what kernel/loss.h promises, from the records of
 * loss_ring.cu. */

/* The row from its record. */
static __device__ inline void xdi_cuda_ring_read(const xd_loss_args &a, int64_t r, xdi_cuda_ring_record *in, xd_loss_row *row) {
    const bool hard = xdi_cuda_loss_has_hard(a), soft = xdi_cuda_loss_has_soft(a);
    const bool bad = in->ref[XD_LOSS_MAX] == (double)INFINITY || (hard && isnan(in->total[XD_LOSS_HARD])) ||
                     (soft && isnan(in->total[XD_LOSS_SOFT]));
    const bool teacher_bad =
        soft && (in->ref[XD_LOSS_TEACHER_MAX] == (double)INFINITY || isnan(in->total[XD_LOSS_TEACHER]));
    if (bad) in->ref[XD_LOSS_MAX] = (double)NAN;
    if (teacher_bad) in->ref[XD_LOSS_TEACHER_MAX] = (double)NAN;
    in->total[XD_LOSS_TARGET] = in->label_x - in->ref[XD_LOSS_MAX];
    in->total[XD_LOSS_BAD] = bad || teacher_bad ? 1.0 : 0.0;
    xdi_cuda_loss_scalars(a, r, in->ref, in->total, row);
    xd_loss_settle(&a, r, row);
    if (!soft || a.divergence != XD_JSD || row->finding != (int)XD_ROW_FINE) return;
    double student, teacher; /* the term of the most probable column, which the sums lack */
    const double log = (in->ref[XD_LOSS_TEACHER_AT_ARG] - in->ref[XD_LOSS_TEACHER_MAX]) / a.temperature - row->teacher_log;
    xd_log_ratios(log + row->soft_log, a.beta, &student, &teacher);
    const double term = log == -(double)INFINITY ? 0.0 : exp(log) * teacher;
    xd_loss_mixture_scalars(&a, r, in->mixtures[XD_LOSS_TEACHER_MIXTURE] + term, in->mixtures[XD_LOSS_STUDENT_MIXTURE], row);
}

/* The gradient of the label's column and of the student's most probable one. */
static __device__ inline void xdi_cuda_ring_exact(const xd_loss_args &a, int64_t r, const xdi_cuda_ring_record &in,
                                                  const xd_loss_row &row) {
    const xdi_cuda_loss_column likely = { (int64_t)row.argmax, row.max, row.teacher_at_arg };
    xdi_cuda_set_element(a.gradient, r, likely.at, (float)xdi_cuda_loss_gradient_at(a, r, row, likely));
    if (!xdi_cuda_loss_has_hard(a)) return;
    const xdi_cuda_loss_column label = { xd_id_at(a.labels, r), in.label_x, in.label_y };
    xdi_cuda_set_element(a.gradient, r, label.at, (float)xdi_cuda_loss_gradient_at(a, r, row, label));
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_loss_ring_rows_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index(), first = r - (int64_t)(threadIdx.x % XDI_CUDA_WARP);
    bool zero = false;
    if (r < a.student.rows) {
        xd_loss_row row;
        memset(&row, 0, sizeof row);
        if (a.row_scale[r] != 0.0) {
            xdi_cuda_ring_record record = reinterpret_cast<const xdi_cuda_ring_record *>(a.references)[r];
            xdi_cuda_ring_read(a, r, &record, &row);
            zero = row.finding != (int)XD_ROW_FINE;
            if (a.gradient.data && !zero) xdi_cuda_ring_exact(a, r, record, row);
        }
        a.row[r] = row;
    }
    unsigned rows = __ballot_sync(0xffffffffu, zero && a.gradient.data != NULL);
    for (; rows != 0; rows &= rows - 1) { /* the warp zeroes what belongs to a finding */
        const int64_t found = first + __ffs((int)rows) - 1;
        for (int64_t c = (int64_t)(threadIdx.x % XDI_CUDA_WARP); c < a.gradient.cols; c += XDI_CUDA_WARP)
            xdi_cuda_set_element(a.gradient, found, c, 0.0f);
    }
}

/* >>cuda/loss_ring_host.cu */

/* Which rows take the path of loss_ring.cu, with how many blocks and stages, and whether the device has it. */

/* Runs the statements with KIND as a constant. */
#define XDI_CUDA_RING_CASES(kind, KIND, ...)                                                \
    switch (kind) {                                                                         \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_HARD, KIND, __VA_ARGS__)                           \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_SMOOTH, KIND, __VA_ARGS__)                         \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_FORWARD, KIND, __VA_ARGS__)                        \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_REVERSE, KIND, __VA_ARGS__)                        \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_JSD, KIND, __VA_ARGS__)                            \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_BOTH, KIND, __VA_ARGS__)                           \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_SHARED, KIND, __VA_ARGS__)                         \
    default: break;                                                                         \
    }
#define XDI_CUDA_RING_CASE(value, KIND, ...) \
    case value: {                            \
        enum { KIND = value };               \
        __VA_ARGS__                          \
    } break;

/* A call's kind; XDI_CUDA_RING_KINDS: none has what it asks for. */
static int xdi_cuda_ring_kind_of(const xd_loss_args *a) {
    const bool hard = a->labels.data && a->hard_weight != 0.0, soft = a->teacher.data && a->soft_weight != 0.0;
    const bool smooth = a->uniform_weight != 0.0;
    if (hard && !soft) return smooth ? XDI_CUDA_RING_SMOOTH : XDI_CUDA_RING_HARD;
    if (!soft || (hard && (smooth || a->divergence != XD_KL_FORWARD))) return XDI_CUDA_RING_KINDS;
    if (hard) return a->temperature == 1.0 ? XDI_CUDA_RING_SHARED : XDI_CUDA_RING_BOTH;
    return a->divergence == XD_KL_FORWARD   ? XDI_CUDA_RING_FORWARD
           : a->divergence == XD_KL_REVERSE ? XDI_CUDA_RING_REVERSE
           : a->divergence == XD_JSD        ? XDI_CUDA_RING_JSD
                                            : XDI_CUDA_RING_KINDS;
}

static bool xdi_cuda_ring_reads(const xd_rows &x) {
    return xdi_cuda_is_aligned16(x.data) && xdi_cuda_stride(x) * (int64_t)xd_dtype_size(x.dtype) % 16 == 0;
}

/* Whether a row lies as bulk copies need it: whole packs of eight columns, one type, every row on 16 bytes. */
static bool xdi_cuda_ring_takes(const xd_loss_args *a, int kind) {
    const int64_t columns = a->vocab.end - a->vocab.begin;
    const xd_dtype x = a->student.dtype;
    const bool soft = kind >= XDI_CUDA_RING_FORWARD, gradient = a->gradient.data != NULL;
    return a->vocab.shards == 1 && a->student.rows > 0 && a->student.rows < INT32_MAX / 2 && columns > XDI_CUDA_SHORT_ROW &&
           columns % XDI_CUDA_EIGHT == 0 && columns <= INT32_MAX && xdi_cuda_ring_reads(a->student) &&
           (!soft || (a->teacher.dtype == x && xdi_cuda_ring_reads(a->teacher))) &&
           (!gradient || (a->gradient.dtype == x && xdi_cuda_ring_reads(a->gradient)));
}

/* ---- how a row is cut ---- */

/* Stages that a block has room for where `residents` of them share a multiprocessor, each with 1 KiB of the system's. */
static int xdi_cuda_ring_stages(size_t processor_bytes, int residents) {
    const size_t fixed = sizeof(xdi_cuda_ring_memory) + 1024 + 128;
    const int64_t room = (int64_t)(processor_bytes / (size_t)residents) - (int64_t)fixed;
    const int64_t stages = room / XDI_CUDA_RING_STAGE;
    return stages < XDI_CUDA_RING_STAGES ? (int)stages : (int)XDI_CUDA_RING_STAGES;
}

/* A way to cut rows: the index of its number of blocks, 2^blocks, and of blocks on a multiprocessor. */
struct xdi_cuda_ring_choice {
    int blocks, residents;
};

/* In the order of preference: two blocks on a multiprocessor, so that one loads while the other waits for its cluster. */
static const xdi_cuda_ring_choice xdi_cuda_ring_choices[] = {
    { 0, 2 }, { 1, 2 }, { 2, 2 }, { 3, 2 }, { 4, 2 }, { 0, 1 }, { 1, 1 }, { 2, 1 }, { 3, 1 }, { 4, 1 },
};
static_assert(sizeof xdi_cuda_ring_choices / sizeof *xdi_cuda_ring_choices == XDI_CUDA_RING_CHOICES, "see xd_cuda");

/* The first one whose ring holds a row and a stage more, and whose clusters the device runs; the index, -1: none. */
static int xdi_cuda_ring_choose(const xd_cuda *cuda, int kind, xd_dtype dtype, int64_t columns, xdi_cuda_ring_call *call) {
    const int tensors = kind >= XDI_CUDA_RING_FORWARD ? 2 : 1;
    const int64_t stage = XDI_CUDA_RING_STAGE / tensors / (int64_t)xd_dtype_size(dtype);
    for (int i = 0; i < XDI_CUDA_RING_CHOICES; i++) {
        const xdi_cuda_ring_choice c = xdi_cuda_ring_choices[i];
        const int64_t blocks = (int64_t)1 << c.blocks;
        call->slice = (columns + XDI_CUDA_EIGHT * blocks - 1) / (XDI_CUDA_EIGHT * blocks) * XDI_CUDA_EIGHT;
        call->stages = xdi_cuda_ring_stages(cuda->processor_shared_bytes, c.residents);
        if ((call->slice + stage - 1) / stage + 1 <= call->stages && cuda->ring_clusters[dtype == XD_DTYPE_BF16][kind][i] > 0)
            return i;
    }
    return -1;
}

template <typename X, int KIND>
static xd_result xdi_cuda_ring_launch(const xd_launch *launch, const xd_cuda *cuda, const xd_loss_args *a, int choice,
                                      const xdi_cuda_ring_call &call) {
    const int64_t most = cuda->ring_clusters[sizeof(X) == 2][KIND][choice];
    const int64_t blocks = (int64_t)1 << xdi_cuda_ring_choices[choice].blocks;
    const int64_t clusters = a->student.rows < most ? a->student.rows : most;
    xdi_cuda_grid grid = xdi_cuda_grid_of(clusters * blocks, XDI_CUDA_RING_THREADS, (size_t)(call.stages * XDI_CUDA_RING_STAGE));
    grid.cluster = (int)blocks;
    return XDI_CUDA_LAUNCH(launch, grid, (xdi_cuda_loss_ring_kernel<X, KIND>), *a, call);
}

/* Both kernels; of `call`, columns and stages are set. */
static xd_result xdi_cuda_ring_start(const xd_launch *launch, const xd_cuda *cuda, const xd_loss_args *a, int kind, int choice,
                                     xdi_cuda_ring_call call) {
    call.hard_factor = (float)XDI_CUDA_LOG2E;
    call.soft_factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a->temperature);
    call.per_tau = xdi_cuda_factor(1.0 / a->temperature);
    call.beta = (float)a->beta;
    call.uniform = (float)a->uniform_weight;
    call.hard_weight = a->hard_weight;
    call.soft_weight = a->soft_weight / a->temperature;
    XDI_CUDA_RING_CASES(kind, KIND, {
        XDI_CUDA_LOGITS(a->student.dtype, X, { XD_TRY((xdi_cuda_ring_launch<X, KIND>(launch, cuda, a, choice, call))); })
    })
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_ring_rows_kernel, *a);
}

/* The fused entry: rows in a ring where they can be, else the other path. */
static xd_result xdi_cuda_loss_ring(const xd_launch *launch, const xd_loss_args *a) {
    const int kind = xdi_cuda_ring_kind_of(a);
    const xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    xdi_cuda_ring_call call = {};
    const bool takes = kind != XDI_CUDA_RING_KINDS && xdi_cuda_ring_takes(a, kind);
    const int choice = !takes ? -1 : xdi_cuda_ring_choose(cuda, kind, a->student.dtype,
                                                          a->vocab.end - a->vocab.begin, &call);
    if (choice < 0) return xdi_cuda_loss_fused(launch, a);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_ring_start(launch, cuda, a, kind, choice, call);
}

/* ---- set-up ---- */

/* Lets a kernel use the shared memory of each choice, and notes how many of its clusters run at once; 0: none. */
template <typename X, int KIND> static xd_result xdi_cuda_ring_allow(xd_ctx *ctx, xd_cuda *cuda, size_t block_bytes) {
    void (*kernel)(xd_loss_args, xdi_cuda_ring_call) = xdi_cuda_loss_ring_kernel<X, KIND>;
    const int most = xdi_cuda_ring_stages(cuda->processor_shared_bytes, 1) * XDI_CUDA_RING_STAGE;
    XD_TRY(xdi_cuda_load(ctx, kernel));
    if ((size_t)most + sizeof(xdi_cuda_ring_memory) > block_bytes) return XD_OK;
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    for (int i = 0; i < XDI_CUDA_RING_CHOICES; i++) {
        const xdi_cuda_ring_choice c = xdi_cuda_ring_choices[i];
        int clusters = 0;
        cudaLaunchAttribute cluster = {};
        cudaLaunchConfig_t config = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = 1u << c.blocks;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        config.gridDim = dim3(1u << c.blocks, 1, 1);
        config.blockDim = dim3(XDI_CUDA_RING_THREADS, 1, 1);
        config.dynamicSmemBytes = (size_t)(xdi_cuda_ring_stages(cuda->processor_shared_bytes, c.residents) * XDI_CUDA_RING_STAGE);
        config.attrs = &cluster;
        config.numAttrs = 1;
        if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
            cudaGetLastError(); /* "too large" is no failure */
            clusters = 0;
        }
        cuda->ring_clusters[sizeof(X) == 2][KIND][i] = clusters;
    }
    return XD_OK;
}

/* >>cuda/loss_ring_check.cu */

/* xd_cuda_create compares each kernel of loss_ring.cu with the path that reads rows twice, on a few short rows: what a build, a
 * driver or a new GPU does to the ring shows before a user's first loss. */

enum { XDI_CUDA_TRIAL_ROWS = 3, XDI_CUDA_TRIAL_COLUMNS = 520, XDI_CUDA_TRIAL_STAGES = 2, XDI_CUDA_TRIAL_CHOICE = 1 };

/* In memory of the device. */
struct xdi_cuda_trial {
    alignas(16) float student[XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS];
    alignas(16) float teacher[XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS];
    alignas(16) float gradient[2][XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS]; /* by the ring, by two reads */
    xdi_cuda_ring_record record[XDI_CUDA_TRIAL_ROWS];
    xd_loss_row row[2][XDI_CUDA_TRIAL_ROWS];
    double row_scale[XDI_CUDA_TRIAL_ROWS];
    int64_t labels[XDI_CUDA_TRIAL_ROWS];
    int differs; /* a bit for each kind of each type */
};

/* Logits between -8 and 8 by a hash, rows whose first one does not count. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_trial_fill_kernel(xdi_cuda_trial *t, xd_dtype dtype) {
    const xd_rows x = { t->student, dtype, 1, XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS, 0 };
    const xd_rows y = { t->teacher, dtype, 1, XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS, 0 };
    for (int i = (int)threadIdx.x; i < XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS; i += XDI_CUDA_TEAM_BLOCK) {
        const uint32_t hash = (uint32_t)i * 2654435761u;
        xdi_cuda_set_element(x, 0, i, (float)(int)(hash >> 20) / 256.0f - 8.0f);
        xdi_cuda_set_element(y, 0, i, (float)(int)((hash ^ hash << 7) >> 20) / 256.0f - 8.0f);
    }
    if (threadIdx.x >= XDI_CUDA_TRIAL_ROWS) return;
    t->row_scale[threadIdx.x] = threadIdx.x == 0 ? 0.0 : 0.5 + (double)threadIdx.x;
    t->labels[threadIdx.x] = 100 + 150 * (int64_t)threadIdx.x;
}

static __device__ inline bool xdi_cuda_trial_near(double a, double b, double scale, double tolerance) {
    return fabs(a - b) <= tolerance * scale; /* false for NaN */
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_trial_compare_kernel(xdi_cuda_trial *t, xd_dtype dtype, int bit) {
    const int count = XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS;
    const xd_rows ring = { t->gradient[0], dtype, 1, count, 0 }, other = { t->gradient[1], dtype, 1, count, 0 };
    float largest = 0.0f;
    for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK)
        largest = fmaxf(largest, fabsf(xdi_cuda_element(other, 0, i)));
    largest = xdi_cuda_block_reduce(largest, 0.0f, xdi_cuda_larger());
    bool near = true;
    for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK)
        near = near && xdi_cuda_trial_near((double)xdi_cuda_element(ring, 0, i), (double)xdi_cuda_element(other, 0, i),
                                           (double)largest, dtype == XD_DTYPE_F32 ? 1e-5 : 0.01);
    for (int r = (int)threadIdx.x; r < XDI_CUDA_TRIAL_ROWS; r += XDI_CUDA_TEAM_BLOCK) {
        const xd_loss_row &a = t->row[0][r], &b = t->row[1][r];
        near = near && a.finding == b.finding && xdi_cuda_trial_near(a.hard, b.hard, 1.0 + fabs(b.hard), 1e-5) &&
               xdi_cuda_trial_near(a.soft, b.soft, 1.0 + fabs(b.soft), 1e-5);
    }
    if (__syncthreads_or(!near) && threadIdx.x == 0) t->differs |= 1 << bit;
}

/* The call of one kind, by the ring or by two reads. */
static xd_loss_args xdi_cuda_trial_args(xdi_cuda_trial *t, int kind, xd_dtype dtype, int path) {
    const xd_rows rows = { NULL, dtype, XDI_CUDA_TRIAL_ROWS, XDI_CUDA_TRIAL_COLUMNS, XDI_CUDA_TRIAL_COLUMNS };
    xd_loss_args a = {};
    a.student = a.teacher = a.gradient = rows;
    a.student.data = t->student;
    a.gradient.data = t->gradient[path];
    if (kind >= XDI_CUDA_RING_FORWARD) a.teacher.data = t->teacher;
    const bool hard = kind < XDI_CUDA_RING_FORWARD || kind >= XDI_CUDA_RING_BOTH;
    a.labels.data = t->labels;
    a.labels.dtype = XD_DTYPE_I64;
    a.row_scale = t->row_scale;
    a.vocab.end = a.vocab.size = XDI_CUDA_TRIAL_COLUMNS;
    a.vocab.shards = 1;
    a.temperature = kind == XDI_CUDA_RING_SHARED ? 1.0 : 1.5;
    a.divergence = kind == XDI_CUDA_RING_REVERSE ? XD_KL_REVERSE : kind == XDI_CUDA_RING_JSD ? XD_JSD : XD_KL_FORWARD;
    a.beta = 0.25;
    a.uniform_weight = kind == XDI_CUDA_RING_SMOOTH ? 0.25 / XDI_CUDA_TRIAL_COLUMNS : 0.0;
    a.target_weight = kind == XDI_CUDA_RING_SMOOTH ? 0.75 : 1.0;
    a.hard_weight = hard ? 0.5 : 0.0;
    a.soft_weight = a.teacher.data ? 0.75 : 0.0;
    a.references = reinterpret_cast<double *>(t->record);
    a.row = t->row[path];
    return a;
}

static xd_result xdi_cuda_trial_run(const xd_launch *launch, const xd_cuda *cuda, xdi_cuda_trial *t, int kind, xd_dtype dtype) {
    if (cuda->ring_clusters[dtype == XD_DTYPE_BF16][kind][XDI_CUDA_TRIAL_CHOICE] == 0) return XD_OK; /* never launched so */
    const xd_loss_args ring = xdi_cuda_trial_args(t, kind, dtype, 0), other = xdi_cuda_trial_args(t, kind, dtype, 1);
    xdi_cuda_ring_call call = {};
    call.slice = XDI_CUDA_TRIAL_COLUMNS / 2 + 4;
    call.stages = XDI_CUDA_TRIAL_STAGES;
    XD_TRY(xdi_cuda_ring_start(launch, cuda, &ring, kind, XDI_CUDA_TRIAL_CHOICE, call));
    XD_TRY(xdi_cuda_loss_fused_start(launch, &other));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_trial_compare_kernel, t, dtype,
                           2 * kind + (dtype == XD_DTYPE_BF16));
}

/* *differs: a bit for each kind of each type. */
static xd_result xdi_cuda_trial_all(xd_ctx *ctx, const xd_cuda *cuda, xdi_cuda_trial *t, int *differs) {
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16 };
    const xd_launch launch = xd_ctx_launch(ctx);
    XDI_CUDA_TRY(ctx, cudaMemsetAsync(t, 0, sizeof *t, (cudaStream_t)launch.stream));
    for (int i = 0; i < 2; i++) {
        XD_TRY(XDI_CUDA_LAUNCH(&launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_trial_fill_kernel, t, types[i]));
        for (int kind = 0; kind < XDI_CUDA_RING_KINDS; kind++) XD_TRY(xdi_cuda_trial_run(&launch, cuda, t, kind, types[i]));
    }
    XDI_CUDA_TRY(ctx, cudaMemcpyAsync(differs, &t->differs, sizeof *differs, cudaMemcpyDeviceToHost,
                                      (cudaStream_t)launch.stream));
    XDI_CUDA_TRY(ctx, cudaStreamSynchronize((cudaStream_t)launch.stream));
    return XD_OK;
}

enum { XDI_CUDA_TRIAL_DEVICES = 64 };

/* What a process has found, by device: 0 nothing yet, 1 they agree, 2 they differ. */
static std::atomic<int> xdi_cuda_trial_verdicts[XDI_CUDA_TRIAL_DEVICES];

/* A warning names the kernels that differ. */
static xd_result xdi_cuda_trial_judge(xd_ctx *ctx, const xd_cuda *cuda, int *verdict) {
    int differs = 0;
    xdi_cuda_trial *t = (xdi_cuda_trial *)cuda->allocator.allocate(cuda->allocator.user, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for %zu bytes on device %d, to compare the paths of losses", sizeof *t,
               cuda->device);
    const xd_result result = xdi_cuda_trial_all(ctx, cuda, t, &differs);
    cuda->allocator.release(cuda->allocator.user, t);
    XD_TRY(result);
    *verdict = differs ? 2 : 1;
    if (differs)
        xd_log(ctx, XD_LOG_WARN,
               "device %d: losses of rows on the chip differ from those of rows read twice (kernels %#x): rows are read twice",
               cuda->device, differs);
    return XD_OK;
}

/* Whether all kernels of the ring agree with the other path; a process asks each device once. */
static xd_result xdi_cuda_ring_agrees(xd_ctx *ctx, const xd_cuda *cuda, bool *agrees) {
    const bool keeps = cuda->device < XDI_CUDA_TRIAL_DEVICES;
    int verdict = keeps ? xdi_cuda_trial_verdicts[cuda->device].load() : 0;
    if (verdict == 0) XD_TRY(xdi_cuda_trial_judge(ctx, cuda, &verdict));
    if (keeps) xdi_cuda_trial_verdicts[cuda->device].store(verdict);
    *agrees = verdict == 1;
    return XD_OK;
}

/* Turns the path on where the device and the build have it; `architecture` is that of the build. */
static xd_result xdi_cuda_ring_set_up(xd_ctx *ctx, xd_cuda *cuda, int architecture) {
    int launches = 0, block_bytes = 0, processor_bytes = 0;
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_ring_rows_kernel));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&launches, cudaDevAttrClusterLaunch, cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&processor_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, cuda->device));
#if defined(XD_EMU)
    architecture = 900;
#endif
    if (cuda->capability < 90 || architecture < 900 || launches == 0) return XD_OK;
    cuda->processor_shared_bytes = (size_t)processor_bytes;
    for (int kind = 0; kind < XDI_CUDA_RING_KINDS; kind++) XDI_CUDA_RING_CASES(kind, KIND, {
            XD_TRY((xdi_cuda_ring_allow<float, KIND>(ctx, cuda, (size_t)block_bytes)));
            XD_TRY((xdi_cuda_ring_allow<xdi_cuda_bf16, KIND>(ctx, cuda, (size_t)block_bytes)));
        })
    bool agrees = true;
    XD_TRY(xdi_cuda_ring_agrees(ctx, cuda, &agrees));
    if (agrees) cuda->kernels.loss.fused = xdi_cuda_loss_ring;
    return XD_OK;
}

/* >>cuda/sort_ids.cu */

/* Sorts a list of ids in place: xdi_cpu_rows_sort_ids. A bitonic network whose steps are all ascending, so that what lies past the
 * end is the largest. Blocks sort tiles in shared memory; steps between tiles have a thread for each id. */

enum { XDI_CUDA_SORT_TEAM = 1024, XDI_CUDA_SORT_TILE = 4096 };

static __device__ inline void xdi_cuda_sort_pair(int64_t *ids, int64_t low, int64_t high) {
    const int64_t a = ids[low], b = ids[high];
    if (a <= b) return;
    ids[low] = b;
    ids[high] = a;
}

/* A block a tile: the whole sort, or the last steps of one of a larger size. */
static __global__ void __launch_bounds__(XDI_CUDA_SORT_TEAM) xdi_cuda_sort_tile_kernel(int64_t *ids, int64_t count, bool whole) {
    XD_SHARED(int64_t, shared, [XDI_CUDA_SORT_TILE]);
    int64_t *tile = shared;
    const int64_t begin = (int64_t)blockIdx.x * XDI_CUDA_SORT_TILE, left = count - begin;
    const int n = left < XDI_CUDA_SORT_TILE ? (int)left : (int)XDI_CUDA_SORT_TILE;
    for (int i = (int)threadIdx.x; i < n; i += XDI_CUDA_SORT_TEAM) tile[i] = ids[begin + i];
    __syncthreads();
    if (whole)
        xdi_cuda_bitonic<XDI_CUDA_SORT_TEAM>(n, [=](int64_t low, int64_t high) { xdi_cuda_sort_pair(tile, low, high); });
    for (int stride = whole ? 0 : XDI_CUDA_SORT_TILE / 2; stride > 0; stride /= 2) {
        for (int i = (int)threadIdx.x; i < n; i += XDI_CUDA_SORT_TEAM)
            if ((i ^ stride) > i && (i ^ stride) < n) xdi_cuda_sort_pair(tile, i, i ^ stride);
        __syncthreads();
    }
    for (int i = (int)threadIdx.x; i < n; i += XDI_CUDA_SORT_TEAM) ids[begin + i] = tile[i];
}

/* A step of a size: the first compares mirrored places, the others places `stride` apart. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_sort_step_kernel(int64_t *ids, int64_t count, int64_t size, int64_t stride) {
    const int64_t i = xdi_cuda_flat_index(), partner = stride == size / 2 ? i ^ (size - 1) : i ^ stride;
    if (partner > i && partner < count) xdi_cuda_sort_pair(ids, i, partner);
}

static xd_result xdi_cuda_sort_tiles(const xd_launch *launch, int64_t *ids, int64_t count, bool whole) {
    const int64_t tiles = (count + XDI_CUDA_SORT_TILE - 1) / XDI_CUDA_SORT_TILE;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(tiles, XDI_CUDA_SORT_TEAM), xdi_cuda_sort_tile_kernel, ids, count, whole);
}

static xd_result xdi_cuda_rows_sort_ids(const xd_launch *launch, int64_t *ids, int64_t count) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(xdi_cuda_sort_tiles(launch, ids, count, true));
    for (int64_t size = 2 * XDI_CUDA_SORT_TILE; size / 2 < count; size *= 2) {
        for (int64_t stride = size / 2; stride >= XDI_CUDA_SORT_TILE; stride /= 2)
            XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(count), xdi_cuda_sort_step_kernel, ids, count, size, stride));
        XD_TRY(xdi_cuda_sort_tiles(launch, ids, count, false));
    }
    return XD_OK;
}

static xd_result xdi_cuda_sort_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sort_tile_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_sort_step_kernel);
}

/* >>cuda/loss_rows.cu */

/* Which rows count, what they are multiplied by, and how their losses become one value: kernel/cpu/rows.c is the
 * reference. Sums over rows have one order, whatever the GPU. */

static __device__ inline bool xdi_cuda_rows_counts(const xd_positions &p, int64_t i) {
    if (p.mask && !p.mask[i]) return false;
    return !p.labels.data || xd_id_at(p.labels, i) != (p.has_ignore_index ? p.ignore_index : XD_IGNORE_INDEX);
}

/* ---- denominators ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_rows_count_kernel(const __grid_constant__ xd_positions p, int64_t *part) {
    xdi_cuda_sums<1, true> mine;
    int64_t positions = 0;
    for (int64_t i = (int64_t)threadIdx.x; i < p.count; i += XDI_CUDA_TEAM_BLOCK) {
        if (!xdi_cuda_rows_counts(p, i)) continue;
        positions++;
        const float weight = p.weights ? p.weights[i] : 1.0f;
        mine.add(0, weight >= 0.0f ? weight : INFINITY); /* refused like one that is not finite */
    }
    const xdi_cuda_sums<1, true>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    positions = xdi_cuda_block_reduce(positions, (int64_t)0, xdi_cuda_add());
    if (threadIdx.x != 0) return;
    part[XD_COUNT_POSITIONS] += positions;
    part[XD_COUNT_HIGH] += totals.sum[0].high;
    part[XD_COUNT_LOW] += totals.sum[0].low;
    part[XD_COUNT_REFUSED] += totals.misfits.large + totals.misfits.infinite + (p.count < 0 ? 1 : 0);
}

static xd_result xdi_cuda_rows_count(const xd_launch *launch, const xd_positions *positions, int64_t *part) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_rows_count_kernel,
                           *positions, part);
}

/* One thread; part and out may share memory. */
static __global__ void xdi_cuda_rows_denominator_kernel(const int64_t *part, xd_denominator *out) {
    if (threadIdx.x != 0) return;
    const xd_fixed weight = { part[XD_COUNT_HIGH], part[XD_COUNT_LOW] };
    const int64_t positions = part[XD_COUNT_POSITIONS], refused = part[XD_COUNT_REFUSED];
    const double value = refused == 0 ? xd_fixed_read(weight) : 0.0;
    out->value = value;
    out->inverse = value > 0.0 ? 1.0 / value : 0.0;
    out->positions = positions;
    out->refused = refused;
}

static xd_result xdi_cuda_rows_denominator(const xd_launch *launch, const int64_t *part,
                                           xd_denominator *out) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_rows_denominator_kernel, part,
                           out);
}

static __global__ void xdi_cuda_rows_ratio_kernel(const xd_denominator *hit, const xd_denominator *counted,
                                                  double *out) {
    if (threadIdx.x == 0)
        *out = counted->refused ? (double)NAN : counted->value > 0.0 ? hit->value / counted->value : 0.0;
}

static xd_result xdi_cuda_rows_ratio(const xd_launch *launch, const xd_denominator *hit,
                                     const xd_denominator *counted, double *out) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_rows_ratio_kernel, hit,
                           counted, out);
}

/* ---- scales: one thread a row ---- */

static __device__ inline double xdi_cuda_rows_weight(const xd_row_args &a, int64_t row) {
    return a.positions.weights ? (double)a.positions.weights[row] : 1.0;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_scales_kernel(const __grid_constant__ xd_row_args a) {
    const int64_t r = xdi_cuda_flat_index();
    const double inverse = a.denominator               ? a.denominator->inverse
                           : a.denominator_value > 0.0 ? 1.0 / a.denominator_value
                                                       : 0.0;
    const double factor = (a.scale ? *a.scale : 1.0) * inverse;
    if (r == 0) *a.factor = factor;
    if (r >= a.positions.count) return;
    const double scale = xdi_cuda_rows_weight(a, r) * factor;
    a.row_scale[r] = xdi_cuda_rows_counts(a.positions, r) && isfinite(scale) ? scale : 0.0;
}

static xd_result xdi_cuda_rows_scales(const xd_launch *launch, const xd_row_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->positions.count), xdi_cuda_rows_scales_kernel, *a);
}

/* ---- sum: a block for 256 rows, at most 64 of them, and one that adds what they found ---- */

enum { XDI_CUDA_ROWS_BLOCKS = 64 };

/* What one thread has found among its rows. */
struct xdi_cuda_rows_findings {
    int64_t counted, label, not_finite, overflow;
    int64_t hard_eights, soft_eights; /* of the totals in INVARIANT mode, see xd_total */
    int64_t first_row; /* INT64_MAX: none */
    double first_value;

    __device__ void find(int64_t row, int finding, double value) {
        label += finding == (int)XD_ROW_LABEL;
        overflow += finding == (int)XD_ROW_OVERFLOW;
        not_finite += finding == (int)XD_ROW_NOT_FINITE;
        if (row >= first_row) return;
        first_row = row;
        first_value = value;
    }
};

struct xdi_cuda_rows_findings_join {
    __device__ xdi_cuda_rows_findings operator()(xdi_cuda_rows_findings a,
                                                 const xdi_cuda_rows_findings &b) const {
        a.counted += b.counted;
        a.label += b.label;
        a.not_finite += b.not_finite;
        a.overflow += b.overflow;
        a.hard_eights += b.hard_eights;
        a.soft_eights += b.soft_eights;
        if (b.first_row < a.first_row) {
            a.first_row = b.first_row;
            a.first_value = b.first_value;
        }
        return a;
    }
};

struct xdi_cuda_rows_value {
    double hard, soft;
    int finding;
    double value; /* for the status */
};

static __device__ inline xdi_cuda_rows_value xdi_cuda_rows_read(const xd_row_args &a, int64_t r) {
    xdi_cuda_rows_value v;
    if (a.topk_rows) {
        v.hard = 0.0;
        v.soft = a.topk_rows[r].loss;
        v.finding = a.topk_rows[r].finding;
        v.value = a.topk_rows[r].max;
    } else {
        v.hard = a.loss_rows[r].hard;
        v.soft = a.loss_rows[r].soft;
        v.finding = a.loss_rows[r].finding;
        v.value = a.loss_rows[r].max;
        if (v.finding == (int)XD_ROW_LABEL) v.value = (double)xd_id_at(a.positions.labels, r);
        if (v.finding == (int)XD_ROW_NOT_FINITE) v.value = xd_row_reason(v.value, a.loss_rows[r].teacher_max);
    }
    return v;
}

static __device__ inline void xdi_cuda_rows_show(const xd_row_args &a, int64_t r,
                                                 const xdi_cuda_rows_value &v) {
    if (a.row_loss) a.row_loss[r] = (float)xd_loss_of_row(a.hard_weight, v.hard, a.soft_weight, v.soft);
    if (a.student_mass) a.student_mass[r] = (float)a.topk_rows[r].student_mass;
    if (a.teacher_mass) a.teacher_mass[r] = (float)a.topk_rows[r].teacher_mass;
}

/* What xd_total_put gives to the rest; the eights are added to *eights. */
static __device__ inline double xdi_cuda_rows_below_eight(double term, int64_t *eights) {
    const int64_t whole = (int64_t)__dmul_rn(term, 0.125);
    *eights += whole;
    return __dsub_rn(term, __dmul_rn((double)whole, 8.0));
}

template <bool FIXED>
static __device__ inline void xdi_cuda_rows_add_row(const xd_row_args &a, int64_t r,
                                                    xdi_cuda_sums<2, FIXED> *sums,
                                                    xdi_cuda_rows_findings *found) {
    const double weight = xdi_cuda_rows_weight(a, r), scale = xd_mul(weight, *a.factor);
    const xdi_cuda_rows_value v = xdi_cuda_rows_read(a, r);
    xdi_cuda_rows_show(a, r, v);
    if (!xdi_cuda_rows_counts(a.positions, r)) return;
    found->counted++;
    if (!isfinite(scale)) found->find(r, (int)XD_ROW_NOT_FINITE, scale);
    if (a.row_scale[r] == 0.0) return;
    if (v.finding != (int)XD_ROW_FINE) {
        found->find(r, v.finding, v.value);
        return;
    }
    const double hard = __dmul_rn(weight, v.hard), soft = __dmul_rn(weight, v.soft);
    const bool fits = !FIXED || (fabs(hard) < 4194304.0 && fabs(soft) < 4194304.0);
    if (!fits) found->find(r, (int)XD_ROW_OVERFLOW, v.value);
    if (!fits) return;
    sums->add_wide(0, FIXED ? xdi_cuda_rows_below_eight(hard, &found->hard_eights) : hard);
    sums->add_wide(1, FIXED ? xdi_cuda_rows_below_eight(soft, &found->soft_eights) : soft);
}

static __device__ inline void xdi_cuda_rows_put(int64_t *record, const xdi_cuda_sums<2, false>::totals &t) {
    record[XD_RECORD_HARD] = __double_as_longlong(t.sum[0]);
    record[XD_RECORD_SOFT] = __double_as_longlong(t.sum[1]);
    record[XD_RECORD_HARD + 1] = record[XD_RECORD_SOFT + 1] = 0;
}

static __device__ inline void xdi_cuda_rows_put(int64_t *record, const xdi_cuda_sums<2, true>::totals &t) {
    record[XD_RECORD_HARD] = t.sum[0].high;
    record[XD_RECORD_HARD + 1] = t.sum[0].low;
    record[XD_RECORD_SOFT] = t.sum[1].high;
    record[XD_RECORD_SOFT + 1] = t.sum[1].low;
    record[XD_RECORD_OVERFLOW] += t.misfits.large;
}

/* What a block has summed. */
template <bool FIXED> struct xdi_cuda_rows_part {
    typename xdi_cuda_sums<2, FIXED>::totals totals;
    xdi_cuda_rows_findings found;
};

/* Adds the block's parts in the order of its threads; its first thread writes the record. */
template <bool FIXED>
static __device__ inline xdi_cuda_rows_part<FIXED> xdi_cuda_rows_reduce(const xdi_cuda_sums<2, FIXED> &mine,
                                                                        const xdi_cuda_rows_findings &found) {
    const xdi_cuda_rows_findings nothing = { 0, 0, 0, 0, 0, 0, INT64_MAX, 0.0 };
    return { xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine),
             xdi_cuda_block_reduce(found, nothing, xdi_cuda_rows_findings_join()) };
}

template <bool FIXED>
static __device__ inline void xdi_cuda_rows_record(const xd_row_args &a, const xdi_cuda_rows_part<FIXED> &part) {
    const xdi_cuda_rows_findings &found = part.found;
    a.record[XD_RECORD_COUNTED] = found.counted;
    a.record[XD_RECORD_LABEL] = found.label;
    a.record[XD_RECORD_NOT_FINITE] = found.not_finite;
    a.record[XD_RECORD_OVERFLOW] = found.overflow;
    a.record[XD_RECORD_FIRST_ROW] = found.first_row == INT64_MAX ? 0 : found.first_row;
    a.record[XD_RECORD_FIRST_VALUE] = __double_as_longlong(found.first_value);
    a.record[XD_RECORD_HARD_EIGHTS] = found.hard_eights;
    a.record[XD_RECORD_SOFT_EIGHTS] = found.soft_eights;
    xdi_cuda_rows_put(a.record, part.totals);
}

/* Of a block's rows; the only block writes the record itself. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_rows_sum_kernel(const __grid_constant__ xd_row_args a, xdi_cuda_rows_part<FIXED> *parts) {
    xdi_cuda_rows_findings found = { 0, 0, 0, 0, 0, 0, INT64_MAX, 0.0 };
    xdi_cuda_sums<2, FIXED> mine;
    for (int64_t r = xdi_cuda_flat_index(); r < a.positions.count; r += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK)
        xdi_cuda_rows_add_row<FIXED>(a, r, &mine, &found);
    const xdi_cuda_rows_part<FIXED> part = xdi_cuda_rows_reduce<FIXED>(mine, found);
    if (threadIdx.x != 0) return;
    if (gridDim.x == 1)
        xdi_cuda_rows_record<FIXED>(a, part);
    else
        parts[blockIdx.x] = part;
}

/* Of the blocks' parts, a thread for each. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_rows_total_kernel(const __grid_constant__ xd_row_args a, const xdi_cuda_rows_part<FIXED> *parts, int blocks) {
    xdi_cuda_rows_findings found = { 0, 0, 0, 0, 0, 0, INT64_MAX, 0.0 };
    xdi_cuda_sums<2, FIXED> mine;
    if ((int)threadIdx.x < blocks) {
        mine.whole = parts[threadIdx.x].totals;
        found = parts[threadIdx.x].found;
    }
    const xdi_cuda_rows_part<FIXED> part = xdi_cuda_rows_reduce<FIXED>(mine, found);
    if (threadIdx.x == 0) xdi_cuda_rows_record<FIXED>(a, part);
}

template <bool FIXED> static xd_result xdi_cuda_rows_sum_in(const xd_launch *launch, const xd_row_args *a) {
    static_assert((int)XDI_CUDA_ROWS_BLOCKS <= (int)XDI_CUDA_TEAM_BLOCK &&
                      XDI_CUDA_ROWS_BLOCKS * sizeof(xdi_cuda_rows_part<FIXED>) <= XDI_CUDA_NORM_BLOCKS * sizeof(xd_norm_sum),
                  "the context's workspace has a part for each block");
    xdi_cuda_rows_part<FIXED> *parts = (xdi_cuda_rows_part<FIXED> *)xdi_cuda_of(launch->ctx)->workspace;
    xdi_cuda_grid grid = xdi_cuda_flat_grid(a->positions.count);
    if (grid.blocks > XDI_CUDA_ROWS_BLOCKS) grid.blocks = XDI_CUDA_ROWS_BLOCKS;
    XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_rows_sum_kernel<FIXED>, *a, parts));
    if (grid.blocks == 1) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_rows_total_kernel<FIXED>, *a, parts,
                           (int)grid.blocks);
}

static xd_result xdi_cuda_rows_sum(const xd_launch *launch, const xd_row_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return a->fixed ? xdi_cuda_rows_sum_in<true>(launch, a) : xdi_cuda_rows_sum_in<false>(launch, a);
}

/* ---- finish: one thread ---- */

static __device__ double xdi_cuda_rows_total(const xd_row_args &a, int which, int eights) {
    double sum = 0.0;
    xd_total fixed = { { 0, 0 }, 0 };
    for (int i = 0; i < a.ranks; i++) {
        const int64_t *word = a.records + i * XD_RECORD_WORDS + which;
        if (a.fixed) {
            fixed.rest.high += word[0];
            fixed.rest.low += word[1];
            fixed.eights += word[eights - which];
        } else {
            sum += __longlong_as_double(word[0]);
        }
    }
    return a.fixed ? xd_total_read(fixed) : sum;
}

static __device__ int64_t xdi_cuda_rows_total_count(const xd_row_args &a, int which) {
    int64_t sum = 0;
    for (int i = 0; i < a.ranks; i++) sum += a.records[i * XD_RECORD_WORDS + which];
    return sum;
}

/* Adds the findings of all ranks; the first one is that of the lowest rank. */
static __device__ void xdi_cuda_rows_status(const xd_row_args &a, bool nothing, xd_status *status) {
    const bool clean = status->label_out_of_range + status->not_finite + status->overflow == 0;
    for (int i = 0; i < a.ranks && clean; i++) {
        const int64_t *part = a.records + i * XD_RECORD_WORDS;
        if (part[XD_RECORD_LABEL] + part[XD_RECORD_NOT_FINITE] + part[XD_RECORD_OVERFLOW] == 0) continue;
        status->first_row = part[XD_RECORD_FIRST_ROW];
        status->first_value = __longlong_as_double(part[XD_RECORD_FIRST_VALUE]);
        break;
    }
    status->label_out_of_range += xdi_cuda_rows_total_count(a, XD_RECORD_LABEL);
    status->not_finite += xdi_cuda_rows_total_count(a, XD_RECORD_NOT_FINITE);
    status->overflow += xdi_cuda_rows_total_count(a, XD_RECORD_OVERFLOW);
    if (nothing) status->nothing_counted++;
}

static __global__ void xdi_cuda_rows_finish_kernel(const __grid_constant__ xd_row_args a, xd_status *status) {
    if (threadIdx.x != 0) return;
    const double factor = isfinite(*a.factor) ? *a.factor : 0.0; /* else every row is a finding */
    const double hard = __dmul_rn(xdi_cuda_rows_total(a, XD_RECORD_HARD, XD_RECORD_HARD_EIGHTS), factor);
    const double soft = __dmul_rn(xdi_cuda_rows_total(a, XD_RECORD_SOFT, XD_RECORD_SOFT_EIGHTS), factor);
    a.values->hard = hard;
    a.values->soft = soft;
    a.values->loss = __dadd_rn(__dmul_rn(a.hard_weight, hard), __dmul_rn(a.soft_weight, soft));
    a.values->counted = xdi_cuda_rows_total_count(a, XD_RECORD_COUNTED);
    xdi_cuda_rows_status(a, a.denominator && a.denominator->inverse == 0.0, status);
}

static xd_result xdi_cuda_rows_finish(const xd_launch *launch, const xd_row_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_rows_finish_kernel, *a,
                           launch->status);
}

/* ---- columns ---- */

/* A block has 256 columns. Each of its warps sees every eighth row, eight columns a lane and four rows ahead. */
enum { XDI_CUDA_MAXIMA_WARPS = XDI_CUDA_TEAM_BLOCK / XDI_CUDA_WARP, XDI_CUDA_MAXIMA_AHEAD = 4 };

template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_column_maxima_kernel(
    const __grid_constant__ xd_rows logits, const uint8_t *mask, int64_t columns, float *maxima) {
    XD_SHARED(float, best, [XDI_CUDA_MAXIMA_WARPS * XDI_CUDA_TEAM_BLOCK]);
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP, warp = (int)threadIdx.x / XDI_CUDA_WARP;
    const int64_t first = (int64_t)blockIdx.x * XDI_CUDA_TEAM_BLOCK, c = first + lane * XDI_CUDA_EIGHT;
    const bool whole = c + XDI_CUDA_EIGHT <= columns && xdi_cuda_is_aligned16(xdi_cuda_row<T>(logits, 0)) &&
                       xdi_cuda_stride(logits) * (int64_t)sizeof(T) % 16 == 0;
    xdi_cuda_places<T, false> places;
    for (int64_t r = warp; r < logits.rows; r += XDI_CUDA_MAXIMA_WARPS * XDI_CUDA_MAXIMA_AHEAD) {
        xdi_cuda_raw<T> raw[XDI_CUDA_MAXIMA_AHEAD];
        bool has[XDI_CUDA_MAXIMA_AHEAD];
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MAXIMA_AHEAD; k++) {
            const int64_t at = r + k * XDI_CUDA_MAXIMA_WARPS;
            has[k] = at < logits.rows && (!mask || mask[at]) && c < columns;
            if (!has[k]) continue;
            if (whole)
                raw[k].load(xdi_cuda_row<T>(logits, at) + c);
            else
                raw[k] = xdi_cuda_raw_of(xdi_cuda_row<T>(logits, at), c, columns);
        }
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MAXIMA_AHEAD; k++)
            if (has[k]) places.see(raw[k]);
    }
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) best[warp * XDI_CUDA_TEAM_BLOCK + lane * XDI_CUDA_EIGHT + i] = places.value(i);
    __syncthreads();
    float max = -INFINITY;
    for (int w = 0; w < XDI_CUDA_MAXIMA_WARPS; w++) max = fmaxf(max, best[w * XDI_CUDA_TEAM_BLOCK + (int)threadIdx.x]);
    if (first + (int64_t)threadIdx.x < columns) maxima[first + (int64_t)threadIdx.x] = max;
}

static xd_result xdi_cuda_rows_column_maxima(const xd_launch *launch, const xd_rows *logits,
                                             const uint8_t *mask, int64_t columns, float *maxima) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(logits->dtype, T, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(columns), xdi_cuda_rows_column_maxima_kernel<T>, *logits,
                               mask, columns, maxima);
    })
}

/* One block a row. */
template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_voters_kernel(const __grid_constant__ xd_rows logits,
                                                                   const uint8_t *mask, int64_t columns,
                                                                   uint8_t *voters) {
    const int64_t r = (int64_t)blockIdx.x;
    const bool counts = !mask || mask[r];
    xdi_cuda_places<T, true> places;
    xdi_cuda_each_eight<XDI_CUDA_TEAM_BLOCK>(xdi_cuda_row<T>(logits, r), counts ? columns : 0,
                                             [&](const xdi_cuda_raw<T> &raw, int64_t) { places.see(raw); });
    const int bad = __syncthreads_or(!(xdi_cuda_largest_of(places) < INFINITY));
    if (threadIdx.x == 0) voters[r] = (uint8_t)(counts && !bad);
}

static xd_result xdi_cuda_rows_voters(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                      int64_t columns, uint8_t *voters) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (logits->rows == 0) return XD_OK;
    XDI_CUDA_LOGITS(logits->dtype, T, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(logits->rows, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_rows_voters_kernel<T>, *logits, mask, columns, voters);
    })
}

/* ---- rows that are kept: a block each ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_keep_kernel(const __grid_constant__ xd_kept_rows a) {
    const int64_t r = (int64_t)blockIdx.x, columns = a.from.cols;
    bool kept = a.row_scale[r] != 0.0 && a.row[r].finding == (int)XD_ROW_FINE;
    if (kept && a.judge) {
        int bad = 0;
        for (int64_t c = (int64_t)threadIdx.x; c < columns; c += XDI_CUDA_TEAM_BLOCK)
            if (!isfinite(xdi_cuda_element(a.from, r, c))) bad = 1;
        kept = __syncthreads_or(bad) == 0;
        if (!kept && threadIdx.x == 0) xd_loss_reject(a.row + r);
    }
    if (kept && a.to.data == a.from.data) return;
    for (int64_t c = (int64_t)threadIdx.x; c < columns; c += XDI_CUDA_TEAM_BLOCK)
        xdi_cuda_set_element(a.to, r, c, kept ? xdi_cuda_element(a.from, r, c) : 0.0f);
}

static xd_result xdi_cuda_rows_keep(const xd_launch *launch, const xd_kept_rows *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->from.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->from.rows, XDI_CUDA_TEAM_BLOCK), xdi_cuda_rows_keep_kernel, *a);
}

/* ---- table ---- */

static xd_result xdi_cuda_rows_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_count_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_denominator_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_ratio_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_scales_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_sum_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_sum_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_total_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_total_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_finish_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_column_maxima_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_column_maxima_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_voters_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_voters_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_keep_kernel));
    return xdi_cuda_sort_load(ctx);
}

static xd_row_kernels xdi_cuda_rows_table() {
    xd_row_kernels kernels = {};
    kernels.count = xdi_cuda_rows_count;
    kernels.denominator = xdi_cuda_rows_denominator;
    kernels.ratio = xdi_cuda_rows_ratio;
    kernels.scales = xdi_cuda_rows_scales;
    kernels.sum = xdi_cuda_rows_sum;
    kernels.finish = xdi_cuda_rows_finish;
    kernels.column_maxima = xdi_cuda_rows_column_maxima;
    kernels.voters = xdi_cuda_rows_voters;
    kernels.sort_ids = xdi_cuda_rows_sort_ids;
    kernels.keep = xdi_cuda_rows_keep;
    return kernels;
}

/* >>cuda/mft.cu */

/* Minimal fine-tuning and the cosine: kernel/cpu/mft.c is the reference, kernel/mft.h has the formulas. Minimal fine-tuning
 * computes columns in f32 like the losses, and rows in double; the cosine is double throughout, with the CPU's bits wherever
 * its sums have them. */

static __device__ inline bool xdi_cuda_mft_is_fine(const xd_mft_args &a, int64_t r) {
    return a.row_scale[r] != 0.0 && a.row[r].finding == (int)XD_ROW_FINE;
}

static __device__ inline double xdi_cuda_mft_side(const xd_mft_args &a, int shard, int64_t r, int side) {
    return a.all_sides[(shard * a.student.rows + r) * XD_MFT_SIDES + side];
}

/* ---- at_label and correct: one thread a row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_mft_at_label_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    const int64_t label = xd_id_at(a.labels, r) - a.vocab.begin;
    const bool mine = a.row_scale[r] != 0.0 && label >= 0 && label < a.vocab.end - a.vocab.begin;
    double *sides = a.sides + r * XD_MFT_SIDES;
    sides[XD_MFT_STUDENT] = mine ? (double)xdi_cuda_element(a.student, r, label) : 0.0;
    sides[XD_MFT_TEACHER] = mine ? (double)xdi_cuda_element(a.teacher, r, label) : 0.0;
}

static xd_result xdi_cuda_mft_at_label(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_mft_at_label_kernel, *a);
}

static __device__ void xdi_cuda_mft_correct_row(const xd_mft_args &a, int64_t r, xd_loss_row *row) {
    double x = 0.0, y = 0.0;
    for (int i = 0; i < a.vocab.shards; i++) {
        x += xdi_cuda_mft_side(a, i, r, XD_MFT_STUDENT);
        y += xdi_cuda_mft_side(a, i, r, XD_MFT_TEACHER);
    }
    xd_mft_correct(&a, r, x, y, row->argmax == (double)xd_id_at(a.labels, r), row);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_mft_correct_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows || a.row_scale[r] == 0.0) return;
    xd_loss_row row = a.row[r];
    xd_mft_change_sides(&row);
    if (row.finding == (int)XD_ROW_FINE) xdi_cuda_mft_correct_row(a, r, &row);
    a.row[r] = row;
}

static xd_result xdi_cuda_mft_correct(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_mft_correct_kernel, *a);
}

/* ---- write: grid (rows / teams), block 256; one read of both rows, one write of each output ---- */

/* A column's term and gradient, from x - max of both sides and their powers. */
struct xdi_cuda_mft_scales {
    float max, teacher_max, per_tau, factor;
    float q_share, weight, log_gap; /* q = power q_share; its term weight q (gap / tau + log_gap) */
    float p_scale, q_scale;         /* of the powers in the gradient */
};

static __device__ inline xdi_cuda_mft_scales xdi_cuda_mft_scales_of(const xd_mft_args &a, int64_t r) {
    const xd_loss_row &row = a.row[r];
    const double slope = a.row_scale[r] * a.weight / a.temperature, rest = 1.0 - row.mean;
    const double p_inverse = exp(-row.soft_log), q_share = rest * exp(-row.teacher_log);
    xdi_cuda_mft_scales s;
    s.max = (float)row.max;
    s.teacher_max = (float)row.teacher_max;
    s.per_tau = xdi_cuda_factor(1.0 / a.temperature);
    s.factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature);
    s.q_share = (float)q_share;
    s.weight = (float)a.weight;
    s.log_gap = (float)(log(rest) + row.soft_log - row.teacher_log);
    s.p_scale = (float)(slope * p_inverse);
    s.q_scale = (float)(slope * q_share);
    return s;
}

static __device__ inline void xdi_cuda_mft_eight(const xdi_cuda_mft_scales &s, const xdi_cuda_eight &x,
                                                 const xdi_cuda_eight &y, xdi_cuda_eight *term,
                                                 xdi_cuda_eight *gradient) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
        const float dx = __fsub_rn(x.at[i], s.max), dy = __fsub_rn(y.at[i], s.teacher_max);
        const float p = xdi_cuda_exp_of(dx, s.factor), t = xdi_cuda_exp_of(dy, s.factor);
        const float q = __fmul_rn(t, s.q_share);
        const float log_ratio = __fmaf_rn(__fsub_rn(dy, dx), s.per_tau, s.log_gap);
        term->at[i] = q > 0.0f ? __fmul_rn(s.weight, __fmul_rn(q, log_ratio)) : 0.0f;
        gradient->at[i] = __fmaf_rn(-t, s.q_scale, __fmul_rn(p, s.p_scale));
    }
}

/* The label's column, which the correction concerns, or the most probable one: most of the probability may be there, where f32
 * would cancel. Its logits are read before the row is overwritten. */
struct xdi_cuda_mft_column {
    int64_t at; /* -1: not on this shard */
    double x, y;
};

static __device__ inline xdi_cuda_mft_column xdi_cuda_mft_column_of(const xd_mft_args &a, int64_t r,
                                                                    int64_t id) {
    xdi_cuda_mft_column column = { -1, 0.0, 0.0 };
    if (id < a.vocab.begin || id >= a.vocab.end) return column;
    column.at = id - a.vocab.begin;
    column.x = (double)xdi_cuda_element(a.student, r, column.at);
    column.y = (double)xdi_cuda_element(a.teacher, r, column.at);
    return column;
}

static __device__ void xdi_cuda_mft_write_at(const xd_mft_args &a, int64_t r,
                                             const xdi_cuda_mft_column &column) {
    double term, gradient;
    xd_mft_column(&a, r, column.x, column.y, column.at + a.vocab.begin == xd_id_at(a.labels, r), &term, &gradient);
    if (a.terms.data) xdi_cuda_set_element(a.terms, r, column.at, (float)term);
    if (a.gradient.data) xdi_cuda_set_element(a.gradient, r, column.at, (float)gradient);
}

/* A thread writes the eight columns that it has read. */
template <int TEAM>
static __device__ inline void xdi_cuda_mft_columns(const xd_mft_args &a, int64_t r, int64_t columns) {
    const xdi_cuda_mft_scales s = xdi_cuda_mft_scales_of(a, r);
    const int64_t terms = a.terms.data ? a.terms.cols : 0, gradients = a.gradient.data ? a.gradient.cols : 0;
    const int64_t width = terms > gradients ? terms : gradients;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < width; c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight term = {}, gradient = {};
        if (c < columns)
            xdi_cuda_mft_eight(s, xdi_cuda_read_any(a.student, r, c, columns),
                               xdi_cuda_read_any(a.teacher, r, c, columns), &term, &gradient);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i >= columns) term.at[i] = gradient.at[i] = 0.0f;
        if (c < terms) xdi_cuda_write_any(a.terms, r, c, terms, term);
        if (c < gradients) xdi_cuda_write_any(a.gradient, r, c, gradients, gradient);
    }
}

template <int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_mft_write_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return; /* the whole team returns */
    const bool fine = xdi_cuda_mft_is_fine(a, r), first = fine && xdi_cuda_team_thread<TEAM>() == 0;
    xdi_cuda_mft_column exact[2] = { { -1, 0.0, 0.0 }, { -1, 0.0, 0.0 } };
    if (first) {
        exact[0] = xdi_cuda_mft_column_of(a, r, (int64_t)a.row[r].argmax);
        exact[1] = xdi_cuda_mft_column_of(a, r, xd_id_at(a.labels, r));
    }
    xdi_cuda_team_sync<TEAM>(); /* now the row may be overwritten */
    xdi_cuda_mft_columns<TEAM>(a, r, fine ? a.vocab.end - a.vocab.begin : 0);
    xdi_cuda_team_sync<TEAM>();
    XD_UNROLL
    for (int i = 0; i < 2; i++)
        if (exact[i].at >= 0) xdi_cuda_mft_write_at(a, r, exact[i]);
}

static xd_result xdi_cuda_mft_write(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_mft_write_kernel<TEAM>, *a);
    })
}

/* ---- cosine: largest and products, grid (rows / teams), block 256; each reads both rows once ---- */

/* A NaN counts as infinite. */
template <int TEAM>
static __device__ inline float xdi_cuda_mft_magnitude(const xd_rows &x, int64_t r, int64_t columns) {
    float largest = 0.0f;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight eight = xdi_cuda_read_any(x, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            largest = fmaxf(largest, isnan(eight.at[i]) ? INFINITY : fabsf(eight.at[i]));
    }
    return xdi_cuda_team_reduce<TEAM>(largest, 0.0f, xdi_cuda_larger());
}

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_mft_largest_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const int64_t columns = a.row_scale[r] != 0.0 ? a.vocab.end - a.vocab.begin : 0;
    const float student = xdi_cuda_mft_magnitude<TEAM>(a.student, r, columns);
    const float teacher = xdi_cuda_mft_magnitude<TEAM>(a.teacher, r, columns);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    a.sides[r * XD_MFT_SIDES + XD_MFT_STUDENT] = (double)student;
    a.sides[r * XD_MFT_SIDES + XD_MFT_TEACHER] = (double)teacher;
}

static xd_result xdi_cuda_mft_largest(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_mft_largest_kernel<TEAM>, *a);
    })
}

static __device__ inline bool xdi_cuda_mft_exponent(const xd_mft_args &a, int64_t r, int side,
                                                    int *exponent) {
    double largest = 0.0;
    for (int i = 0; a.fixed && i < a.vocab.shards; i++) largest = fmax(largest, xdi_cuda_mft_side(a, i, r, side));
    return xd_cosine_exponent(largest, exponent);
}

template <bool FIXED, int TEAM>
static __device__ inline void xdi_cuda_mft_products_row(const xd_mft_args &a, int64_t r, double x_scale,
                                                        double y_scale,
                                                        xdi_cuda_sums<XD_COSINE_SUMS, FIXED> *sums) {
    const int64_t columns = a.vocab.end - a.vocab.begin;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns); /* 0 past the end */
        const xdi_cuda_eight y = xdi_cuda_read_any(a.teacher, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const double p = xd_mul((double)x.at[i], x_scale), q = xd_mul((double)y.at[i], y_scale);
            sums->add_wide(XD_COSINE_STUDENT, xd_mul(p, p));
            sums->add_wide(XD_COSINE_TEACHER, xd_mul(q, q));
            sums->add_wide(XD_COSINE_BOTH, xd_mul(p, q));
        }
    }
}

static __device__ inline void xdi_cuda_mft_put(void *to, int64_t r,
                                               const xdi_cuda_sums<XD_COSINE_SUMS, false>::totals &t) {
    for (int i = 0; i < XD_COSINE_SUMS; i++) static_cast<double *>(to)[r * XD_COSINE_SUMS + i] = t.sum[i];
}

static __device__ inline void xdi_cuda_mft_put(void *to, int64_t r,
                                               const xdi_cuda_sums<XD_COSINE_SUMS, true>::totals &t) {
    for (int i = 0; i < XD_COSINE_SUMS; i++)
        xdi_cuda_fixed_put(static_cast<xd_fixed *>(to) + r * XD_COSINE_SUMS + i, t.sum[i]);
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_mft_products_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    int x_exponent = 0, y_exponent = 0;
    const bool x_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_STUDENT, &x_exponent);
    const bool y_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_TEACHER, &y_exponent);
    xdi_cuda_sums<XD_COSINE_SUMS, FIXED> mine;
    if (x_fits && y_fits && a.row_scale[r] != 0.0)
        xdi_cuda_mft_products_row<FIXED, TEAM>(a, r, ldexp(1.0, -x_exponent), ldexp(1.0, -y_exponent), &mine);
    const typename xdi_cuda_sums<XD_COSINE_SUMS, FIXED>::totals totals = xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() == 0) xdi_cuda_mft_put(a.sums, r, totals);
}

static xd_result xdi_cuda_mft_products(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_mft_products_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM), (xdi_cuda_mft_products_kernel<false, TEAM>), *a);
    })
}

/* ---- cosine: the row, one thread each ---- */

static __device__ double xdi_cuda_mft_total(const xd_mft_args &a, int64_t r, int which) {
    double total = 0.0;
    xd_fixed exact = { 0, 0 };
    for (int i = 0; i < a.vocab.shards; i++) {
        const int64_t at = (i * a.student.rows + r) * XD_COSINE_SUMS + which;
        if (a.fixed) {
            xd_fixed_join(&exact, static_cast<const xd_fixed *>(a.all_sums)[at]);
        } else {
            total = xd_add(total, static_cast<const double *>(a.all_sums)[at]);
        }
    }
    return a.fixed ? xd_fixed_read(exact) : total;
}

static __device__ void xdi_cuda_mft_cosine_row(const xd_mft_args &a, int64_t r, xd_loss_row *row) {
    int exponents[XD_MFT_SIDES] = { 0, 0 };
    double sums[XD_COSINE_SUMS];
    const bool x_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_STUDENT, &exponents[XD_MFT_STUDENT]);
    const bool y_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_TEACHER, &exponents[XD_MFT_TEACHER]);
    for (int i = 0; i < XD_COSINE_SUMS; i++) sums[i] = xdi_cuda_mft_total(a, r, i);
    xd_cosine_row(&a, r, sums, exponents, x_fits && y_fits, row);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_mft_cosine_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    xd_loss_row row;
    memset(&row, 0, sizeof row);
    if (a.row_scale[r] != 0.0) xdi_cuda_mft_cosine_row(a, r, &row);
    a.row[r] = row;
}

static xd_result xdi_cuda_mft_cosine(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_mft_cosine_kernel, *a);
}

/* ---- cosine: slopes, grid (rows / teams), block 256; one read of both rows, one write ---- */

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_mft_slopes_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const int64_t columns = xdi_cuda_mft_is_fine(a, r) ? a.vocab.end - a.vocab.begin : 0, width = a.gradient.cols;
    double of_x, of_y;
    xd_cosine_slope(&a, r, &of_x, &of_y);
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < width; c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight g = {};
        if (c < columns) {
            const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns); /* 0 past the end */
            const xdi_cuda_eight y = xdi_cuda_read_any(a.teacher, r, c, columns);
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                g.at[i] =
                    (float)xd_add(xd_mul(of_x, (double)x.at[i]), xd_mul(of_y, (double)y.at[i]));
        }
        xdi_cuda_write_any(a.gradient, r, c, width, g);
    }
}

static xd_result xdi_cuda_mft_slopes(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_mft_slopes_kernel<TEAM>, *a);
    })
}

/* ---- table ---- */

template <int TEAM> static xd_result xdi_cuda_mft_load_team(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_write_kernel<TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_largest_kernel<TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_products_kernel<false, TEAM>));
    return xdi_cuda_load(ctx, xdi_cuda_mft_slopes_kernel<TEAM>);
}

static xd_result xdi_cuda_mft_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_at_label_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_correct_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_cosine_kernel));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_mft_products_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY(xdi_cuda_mft_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_mft_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_mft_kernels xdi_cuda_mft_table() {
    xd_mft_kernels kernels = {};
    kernels.at_label = xdi_cuda_mft_at_label;
    kernels.correct = xdi_cuda_mft_correct;
    kernels.write = xdi_cuda_mft_write;
    kernels.largest = xdi_cuda_mft_largest;
    kernels.products = xdi_cuda_mft_products;
    kernels.cosine = xdi_cuda_mft_cosine;
    kernels.slopes = xdi_cuda_mft_slopes;
    return kernels;
}

/* >>cuda/estimate.cu */

/* Estimates of KL from log-probabilities, and sums with a flag: as many blocks as there is room for partial sums, then one block
 * over these. */

struct xdi_cuda_flagged_join {
    __device__ xd_flagged_sum operator()(xd_flagged_sum a, const xd_flagged_sum &b) const {
        a.value = __dadd_rn(a.value, b.value);
        if (a.bad < 0 || (b.bad >= 0 && b.bad < a.bad)) a.bad = b.bad;
        return a;
    }
};

static __device__ inline void xdi_cuda_flagged_put(xd_flagged_sum *out, xd_flagged_sum mine) {
    const xd_flagged_sum none = { 0.0, -1 };
    mine = xdi_cuda_block_reduce(mine, none, xdi_cuda_flagged_join());
    if (threadIdx.x == 0) *out = mine;
}

static int64_t xdi_cuda_flagged_blocks(int64_t count) {
    const int64_t blocks = (count + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK;
    return blocks < 1 ? 1 : blocks < XD_FLAGGED_SUMS - 1 ? blocks : (int64_t)(XD_FLAGGED_SUMS - 1);
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_flagged_kernel(xd_flagged_sum *out, int64_t blocks) {
    static_assert((int)XD_FLAGGED_SUMS - 1 <= (int)XDI_CUDA_TEAM_BLOCK, "a thread for each sum");
    xd_flagged_sum mine = { 0.0, -1 };
    if ((int64_t)threadIdx.x < blocks) mine = out[1 + threadIdx.x];
    xdi_cuda_flagged_put(out, mine);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_estimate_kernel(const __grid_constant__ xd_estimate_args a) {
    xd_flagged_sum mine = { 0.0, -1 };
    for (int64_t i = xdi_cuda_flat_index(); i < a.count; i += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK)
        xd_estimate_one(&a, i, &mine);
    xdi_cuda_flagged_put(a.out + 1 + blockIdx.x, mine);
}

static xd_result xdi_cuda_estimate(const xd_launch *launch, const xd_estimate_args *a) {
    const int64_t blocks = xdi_cuda_flagged_blocks(a->count);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(
        XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK), xdi_cuda_estimate_kernel, *a));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_flagged_kernel, a->out,
                           blocks);
}

static xd_result xdi_cuda_estimate_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_flagged_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_estimate_kernel);
}

/* >>cuda/loss_softmax.cu */

/* Log-softmax of rows whose vocabulary is split, and columns picked from them: kernel/cpu/softmax.c is the reference.
 * Terms are f32, sums and values per row double. */

/* ---- stats: grid (rows / teams), block 256; one read of the rows ---- */

/* What a thread has seen of a row. Terms are e^((x - base) / tau), where base is an element that the largest one exceeds by at most
 * a factor of 2^16 of the powers: so a sum keeps its digits, and is seldom scaled. NaN gets into the sum alone. */
struct xdi_cuda_softmax_seen {
    enum { OCTAVES = 16 };
    float factor, largest = -INFINITY, base = 0.0f;
    int64_t column = 0; /* of the first eight that have the largest */
    double sum = 0.0;

    explicit __device__ xdi_cuda_softmax_seen(float per_octave) : factor(per_octave) {}

    __device__ bool is_far(float larger) const {
        return larger > largest && (largest == -INFINITY || __fmul_rn(__fsub_rn(larger, base), factor) > (float)OCTAVES);
    }
    /* The sum by terms of another base. */
    __device__ double sum_from(float other) const {
        return largest == -INFINITY ? sum : __dmul_rn(sum, exp2(__dmul_rn((double)base - (double)other, (double)factor)));
    }
    template <typename T> __device__ void see(const xdi_cuda_raw<T> &raw, int64_t c) {
        const float larger = xdi_cuda_largest_of(raw);
        if (is_far(larger)) {
            sum = sum_from(larger);
            base = larger;
        }
        if (larger > largest) column = c;
        largest = fmaxf(largest, larger);
        const xdi_cuda_eight x = raw.widened();
        xdi_cuda_eight terms;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) terms.at[i] = xdi_cuda_exp_of(__fsub_rn(x.at[i], base), factor);
        sum = __dadd_rn(sum, (double)xdi_cuda_sum_of(terms));
    }
};

/* The largest element of a row, and the sum of e^((x - max) / tau), NaN when the row has one; on all threads of the team. */
template <int TEAM, typename T>
static __device__ inline double xdi_cuda_softmax_sum(const T *row, int64_t columns, xdi_cuda_softmax_seen *seen, float *max) {
    xdi_cuda_stream_eights<TEAM>(row, columns, [&](const xdi_cuda_raw<T> &raw, int64_t c) { seen->see(raw, c); });
    *max = xdi_cuda_team_reduce<TEAM>(seen->largest, -INFINITY, xdi_cuda_larger_float<false>());
    return xdi_cuda_team_reduce<TEAM>(seen->sum_from(*max), 0.0, xdi_cuda_add());
}

/* The first of eight columns that has an element. */
template <typename T>
static __device__ inline int64_t xdi_cuda_softmax_first(const T *row, int64_t columns, int64_t column, float element) {
    xdi_cuda_raw<T> raw;
    if (xdi_cuda_is_aligned16(row + column) && column + XDI_CUDA_EIGHT <= columns)
        raw.load(row + column); /* one wait, for which the whole block waits */
    else
        raw = xdi_cuda_raw_of(row, column, columns);
    const xdi_cuda_eight x = raw.widened();
    int first = 0;
    XD_UNROLL
    for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
        if (x.at[i] == element) first = i;
    return column + first;
}

/* The same sum, and the first column that has the largest element; INT64_MAX where nothing is above -infinity. */
struct xdi_cuda_softmax_whole {
    double sum;
    int64_t arg;
};

struct xdi_cuda_softmax_join {
    __device__ xdi_cuda_softmax_whole operator()(const xdi_cuda_softmax_whole &a, const xdi_cuda_softmax_whole &b) const {
        return { a.sum + b.sum, a.arg < b.arg ? a.arg : b.arg };
    }
};

template <int TEAM, typename T>
static __device__ inline xdi_cuda_softmax_whole xdi_cuda_softmax_whole_of(const T *row, int64_t columns, xdi_cuda_softmax_seen *seen,
                                                                          float *max) {
    xdi_cuda_stream_eights<TEAM>(row, columns, [&](const xdi_cuda_raw<T> &raw, int64_t c) { seen->see(raw, c); });
    *max = xdi_cuda_team_reduce<TEAM>(seen->largest, -INFINITY, xdi_cuda_larger_float<false>());
    const bool has = *max > -INFINITY && seen->largest == *max;
    const int64_t arg = has ? xdi_cuda_softmax_first(row, columns, seen->column, *max) : (int64_t)INT64_MAX;
    const xdi_cuda_softmax_whole mine = { seen->sum_from(*max), arg }, none = { 0.0, INT64_MAX };
    return xdi_cuda_team_reduce<TEAM>(mine, none, xdi_cuda_softmax_join());
}

template <int TEAM, typename T>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_stats_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>(), columns = a.vocab.end - a.vocab.begin;
    if (r >= a.logits.rows) return;
    const T *row = xdi_cuda_row<T>(a.logits, r);
    xdi_cuda_softmax_seen seen(xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature));
    float max;
    const xdi_cuda_softmax_whole whole = xdi_cuda_softmax_whole_of<TEAM>(row, columns, &seen, &max);
    const double sum = whole.sum;
    int64_t arg = whole.arg;
    if (arg == INT64_MAX) arg = columns > 0 ? 0 : -1 - a.vocab.begin; /* nothing above -infinity */
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    const bool broken = !(max < INFINITY) || !(sum < (double)INFINITY);
    double *part = a.parts + r * XD_SOFTMAX_PARTS;
    part[XD_SOFTMAX_MAX] = broken ? (double)NAN : (double)max;
    part[XD_SOFTMAX_ARG] = (double)(arg + a.vocab.begin);
    part[XD_SOFTMAX_SUM] = broken || max == -INFINITY ? 0.0 : sum;
}

static xd_result xdi_cuda_softmax_stats(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->logits.dtype, T, {
        XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                                   (xdi_cuda_softmax_stats_kernel<TEAM, T>), *a);
        })
    })
}

/* ---- merge: one thread a row ---- */

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_merge_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_flat_index();
    double whole[XD_SOFTMAX_PARTS];
    if (r >= a.logits.rows) return;
    xd_softmax_join(&a, r, whole);
    if (a.log_sum_exp) a.log_sum_exp[r] = xd_softmax_log_sum_exp(whole, a.temperature);
    if (a.argmax) a.argmax[r] = (int64_t)whole[XD_SOFTMAX_ARG];
}

static xd_result xdi_cuda_softmax_merge(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows), xdi_cuda_softmax_merge_kernel, *a);
}

/* ---- write: grid (rows / teams), block 256; one read, one write ---- */

/* What is written of a row. */
enum xdi_cuda_softmax_form {
    XDI_CUDA_SOFTMAX_LOGS,     /* logits / tau - log_sum_exp */
    XDI_CUDA_SOFTMAX_BACKWARD, /* (weights - p * their sum) / tau */
    XDI_CUDA_SOFTMAX_TARGET    /* (one at the id - p) weight / tau */
};

/* One row of a write. The logarithm is taken in double: its whole part would cost the f32 form its digits. */
struct xdi_cuda_softmax_line {
    double per_tau, log_sum_exp;
    float scale;    /* of p */
    float at_id;    /* TARGET: what is added at the id */
    int64_t id;     /* TARGET: this shard's column; -1 elsewhere */
    float weighing; /* BACKWARD: 1 / tau */
};

template <int FORM>
static __device__ inline float xdi_cuda_softmax_value(const xdi_cuda_softmax_line &w, float x, float weight,
                                                      int64_t column) {
    const float log_p = (float)__dsub_rn(__dmul_rn((double)x, w.per_tau), w.log_sum_exp);
    if (FORM == XDI_CUDA_SOFTMAX_LOGS) return log_p;
    const float p = expf(log_p);
    if (FORM == XDI_CUDA_SOFTMAX_BACKWARD) return __fmaf_rn(-p, w.scale, __fmul_rn(weight, w.weighing));
    return column == w.id ? __fmaf_rn(-p, w.scale, w.at_id) : __fmul_rn(-p, w.scale);
}

template <int FORM>
static __device__ inline xdi_cuda_softmax_line xdi_cuda_softmax_line_of(const xd_softmax_args &a, int64_t r,
                                                                        bool *counts) {
    xdi_cuda_softmax_line w = {};
    w.per_tau = 1.0 / a.temperature;
    w.log_sum_exp = a.log_sum_exp[r];
    w.weighing = (float)w.per_tau;
    *counts = true;
    if (FORM == XDI_CUDA_SOFTMAX_BACKWARD) {
        double sum = 0.0;
        for (int i = 0; i < a.vocab.shards; i++) sum += a.all[i * a.all_stride + r];
        w.scale = (float)(sum / a.temperature);
    }
    if (FORM == XDI_CUDA_SOFTMAX_TARGET) {
        const int64_t id = xd_id_at(a.ids, r);
        *counts = a.weight[r] != 0.0f && id >= 0 && id < a.vocab.size;
        w.scale = w.at_id = (float)((double)a.weight[r] / a.temperature);
        w.id = id - a.vocab.begin;
    }
    return w;
}

template <int FORM, int TEAM>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_write_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    bool counts;
    const xdi_cuda_softmax_line w = xdi_cuda_softmax_line_of<FORM>(a, r, &counts);
    const int64_t columns = counts ? a.vocab.end - a.vocab.begin : 0;
    const int64_t width =
        FORM == XDI_CUDA_SOFTMAX_LOGS ? columns : a.out.cols; /* gradients have zeros behind */
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < width; c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight out = {}, weight = {};
        if (c < columns) {
            const xdi_cuda_eight x = xdi_cuda_read_any(a.logits, r, c, columns);
            if (FORM == XDI_CUDA_SOFTMAX_BACKWARD) weight = xdi_cuda_read_any(a.weights, r, c, columns);
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                if (c + i < columns)
                    out.at[i] = xdi_cuda_softmax_value<FORM>(w, x.at[i], weight.at[i], c + i);
        }
        xdi_cuda_write_any(a.out, r, c, width, out);
    }
}

template <int FORM>
static xd_result xdi_cuda_softmax_write_form(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                               (xdi_cuda_softmax_write_kernel<FORM, TEAM>), *a);
    })
}

/* ---- row_sums: grid (rows / teams), block 256 ---- */

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_row_sums_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>(), columns = a.vocab.end - a.vocab.begin;
    if (r >= a.weights.rows) return;
    xdi_cuda_sums<1, false> mine;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.weights, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) mine.add_wide(0, (double)x.at[i]);
    }
    const xdi_cuda_sums<1, false>::totals totals = xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() == 0) a.parts[r] = totals.sum[0];
}

static xd_result xdi_cuda_softmax_row_sums(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->weights.rows, TEAM),
                               xdi_cuda_softmax_row_sums_kernel<TEAM>, *a);
    })
}

/* ---- pick and take: one thread an id ---- */

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_pick_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t at = xdi_cuda_flat_index();
    if (at >= a.logits.rows * a.ids_count) return;
    const int64_t r = at / a.ids_count, id = xd_id_at(a.ids, r * a.ids_stride + at % a.ids_count);
    const bool owned = id >= a.vocab.begin && id < a.vocab.end;
    const bool bad = owned && a.finite && !a.finite[r];
    const double value = owned ? (double)xdi_cuda_element(a.logits, r, id - a.vocab.begin) : 0.0;
    a.parts[at] = bad ? (double)NAN : value;
}

static xd_result xdi_cuda_softmax_pick(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows * a->ids_count),
                           xdi_cuda_softmax_pick_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_take_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t at = xdi_cuda_flat_index();
    if (at >= a.logits.rows * a.ids_count) return;
    const int64_t r = at / a.ids_count, id = xd_id_at(a.ids, r * a.ids_stride + at % a.ids_count);
    double value = (double)NAN;
    if (id >= 0 && id < a.vocab.size) {
        int owner = 0;
        while (id >= a.vocab.offsets[owner + 1]) owner++;
        value = a.all[owner * a.all_stride + at];
        if (a.log_sum_exp) value = value / a.temperature - a.log_sum_exp[r];
    }
    if (a.values_dtype == XD_DTYPE_F32)
        static_cast<float *>(a.values)[at] = (float)value;
    else
        static_cast<double *>(a.values)[at] = value;
}

static xd_result xdi_cuda_softmax_take(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows * a->ids_count),
                           xdi_cuda_softmax_take_kernel, *a);
}

/* ---- hits: one thread a row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_softmax_hits_kernel(const int64_t *argmax,
                                                                    xd_ids labels,
                                                                    const uint8_t *mask, int64_t rows,
                                                                    uint8_t *hits) {
    const int64_t r = xdi_cuda_flat_index();
    if (r < rows) hits[r] = argmax[r] == xd_id_at(labels, r) && (!mask || mask[r]);
}

static xd_result xdi_cuda_softmax_hits(const xd_launch *launch, const int64_t *argmax, xd_ids labels,
                                       const uint8_t *mask, int64_t rows, uint8_t *hits) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(rows), xdi_cuda_softmax_hits_kernel, argmax, labels,
                           mask, rows, hits);
}

/* ---- table ---- */

template <int TEAM> static xd_result xdi_cuda_softmax_load_team(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_stats_kernel<TEAM, float>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_stats_kernel<TEAM, xdi_cuda_bf16>)));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_row_sums_kernel<TEAM>));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_write_kernel<XDI_CUDA_SOFTMAX_LOGS, TEAM>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_write_kernel<XDI_CUDA_SOFTMAX_BACKWARD, TEAM>)));
    return xdi_cuda_load(ctx, xdi_cuda_softmax_write_kernel<XDI_CUDA_SOFTMAX_TARGET, TEAM>);
}

static xd_result xdi_cuda_softmax_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_merge_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_pick_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_take_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_hits_kernel));
    XD_TRY(xdi_cuda_softmax_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_softmax_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_softmax_kernels xdi_cuda_softmax_table() {
    xd_softmax_kernels kernels = {};
    kernels.stats = xdi_cuda_softmax_stats;
    kernels.merge = xdi_cuda_softmax_merge;
    kernels.write = xdi_cuda_softmax_write_form<XDI_CUDA_SOFTMAX_LOGS>;
    kernels.row_sums = xdi_cuda_softmax_row_sums;
    kernels.write_backward = xdi_cuda_softmax_write_form<XDI_CUDA_SOFTMAX_BACKWARD>;
    kernels.pick = xdi_cuda_softmax_pick;
    kernels.take = xdi_cuda_softmax_take;
    kernels.write_target_backward = xdi_cuda_softmax_write_form<XDI_CUDA_SOFTMAX_TARGET>;
    kernels.hits = xdi_cuda_softmax_hits;
    return kernels;
}

/* >>cuda/topk.cu */

/* Top-k losses: kernel/cpu/topk.c is the reference. The columns outside a row's ids are summed like the other losses,
 * eight at a time in f32; the k + 1 entries of a row belong to one warp and are double throughout. */

static __device__ inline double xdi_cuda_warp_sum(double value) {
    return xdi_cuda_warp_reduce(value, xdi_cuda_add());
}

/* ---- maxima: grid (rows / teams), block 256 ---- */

template <int TEAM, typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_maxima_kernel(const __grid_constant__ xd_topk_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    const int64_t columns = a.row_scale[r] != 0.0 ? a.vocab.end - a.vocab.begin : 0;
    xdi_cuda_places<T, true> places;
    xdi_cuda_each_eight<TEAM>(xdi_cuda_row<T>(a.logits, r), columns,
                              [&](const xdi_cuda_raw<T> &raw, int64_t) { places.see(raw); });
    const float max = xdi_cuda_team_reduce<TEAM>(xdi_cuda_largest_of(places), -INFINITY, xdi_cuda_larger_float<true>());
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    a.maxima[r] = a.row_scale[r] == 0.0 ? 0.0 : max < INFINITY ? (double)max : (double)NAN;
}

static xd_result xdi_cuda_topk_maxima(const xd_launch *launch, const xd_topk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->logits.dtype, T, {
        XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                                   (xdi_cuda_topk_maxima_kernel<TEAM, T>), *a);
        })
    })
}

/* ---- stats: grid (rows / teams), block 256; one read of the rows where the sums outside are wanted ---- */

enum { XDI_CUDA_TOPK_OUTSIDE, XDI_CUDA_TOPK_ENTROPY, XDI_CUDA_TOPK_TERMS };

/* Reads the logits at this shard's ids and puts their columns into order[], ascending: each finds its rank. Returns how many
 * there are. */
template <int TEAM>
static __device__ inline int64_t xdi_cuda_topk_inside(const xd_topk_args &a, int64_t r, bool counts) {
    const int64_t *ids = a.ids + r * a.k;
    int64_t n = 0;
    for (int64_t j = xdi_cuda_team_thread<TEAM>(); j < a.k; j += TEAM) {
        const bool inside = counts && ids[j] >= a.vocab.begin && ids[j] < a.vocab.end;
        int64_t rank = 0;
        a.values[r * a.k + j] = inside ? (double)xdi_cuda_element(a.logits, r, ids[j] - a.vocab.begin) : 0.0;
        if (!inside) continue;
        n++;
        for (int64_t i = 0; i < a.k; i++)
            rank += ids[i] >= a.vocab.begin && (ids[i] < ids[j] || (ids[i] == ids[j] && i < j));
        a.order[r * a.k + rank] = ids[j] - a.vocab.begin;
    }
    n = xdi_cuda_team_reduce<TEAM>(n, (int64_t)0, xdi_cuda_add());
    xdi_cuda_team_sync<TEAM>();
    return n;
}

template <bool FIXED, int TEAM>
static __device__ inline void xdi_cuda_topk_outside(const xd_topk_args &a, int64_t r, int64_t inside,
                                                    xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, FIXED> *sums) {
    const int64_t columns = a.vocab.end - a.vocab.begin, *skipped = a.order + r * a.k;
    const float max = (float)a.maxima[r], per_tau = xdi_cuda_factor(1.0 / a.temperature);
    const float factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature);
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.logits, r, c, columns);
        int64_t next = xdi_cuda_lower_bound(skipped, inside, c);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            while (next < inside && skipped[next] < c + i) next++;
            if (c + i >= columns || (next < inside && skipped[next] == c + i)) continue;
            const float dx = xdi_cuda_minus(x.at[i], max), e = xdi_cuda_exp_of(dx, factor);
            sums->add(XDI_CUDA_TOPK_OUTSIDE, e);
            if (e > 0.0f) sums->add(XDI_CUDA_TOPK_ENTROPY, __fmul_rn(e, __fmul_rn(dx, per_tau)));
        }
        sums->end_eight();
    }
}

static __device__ inline void xdi_cuda_topk_put(void *to,
                                                const xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, false>::totals &t,
                                                double max, bool broken) {
    double *sums = static_cast<double *>(to);
    sums[XD_TOPK_MAX] = max;
    sums[XD_TOPK_OUTSIDE] = t.sum[XDI_CUDA_TOPK_OUTSIDE];
    sums[XD_TOPK_ENTROPY] = t.sum[XDI_CUDA_TOPK_ENTROPY];
    sums[XD_TOPK_BAD] = broken ? 1.0 : 0.0;
}

static __device__ inline void
xdi_cuda_topk_put(void *to, const xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, true>::totals &t, double, bool broken) {
    xd_fixed *sums = static_cast<xd_fixed *>(to);
    sums[XD_TOPK_MAX].high = sums[XD_TOPK_MAX].low = 0;
    xdi_cuda_fixed_put(&sums[XD_TOPK_OUTSIDE], t.sum[XDI_CUDA_TOPK_OUTSIDE]);
    xdi_cuda_fixed_put(&sums[XD_TOPK_ENTROPY], t.sum[XDI_CUDA_TOPK_ENTROPY]);
    sums[XD_TOPK_BAD].high = t.misfits.infinite + (broken ? 1 : 0);
    sums[XD_TOPK_BAD].low = t.misfits.large;
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_topk_stats_kernel(const __grid_constant__ xd_topk_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    const bool broken = isnan(a.maxima[r]), counts = !broken && a.row_scale[r] != 0.0;
    const int64_t inside = xdi_cuda_topk_inside<TEAM>(a, r, counts);
    xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, FIXED> mine;
    if (counts && a.outside) xdi_cuda_topk_outside<FIXED, TEAM>(a, r, inside, &mine);
    const typename xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, FIXED>::totals totals =
        xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    const size_t size = FIXED ? sizeof(xd_fixed) : sizeof(double);
    xdi_cuda_topk_put(static_cast<char *>(a.sums) + (size_t)r * XD_TOPK_SUMS * size, totals,
                      counts ? a.maxima[r] : 0.0, broken);
}

static xd_result xdi_cuda_topk_stats(const xd_launch *launch, const xd_topk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_topk_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM), (xdi_cuda_topk_stats_kernel<false, TEAM>), *a);
    })
}

/* ---- merge: one warp per row ---- */

static __device__ inline void xdi_cuda_topk_merge_fixed(const xd_topk_args &a, int64_t r,
                                                        xd_topk_side *side) {
    xd_fixed sum[XD_TOPK_SUMS];
    memset(sum, 0, sizeof sum);
    for (int i = 0; i < a.vocab.shards; i++)
        for (int which = 0; which < XD_TOPK_SUMS; which++) {
            const int64_t *part = a.all + i * a.all_stride + (r * XD_TOPK_SUMS + which) * 2;
            sum[which].high += part[0];
            sum[which].low += part[1];
        }
    side->max = a.maxima[r];
    side->outside = xd_fixed_read(sum[XD_TOPK_OUTSIDE]);
    side->entropy = xd_fixed_read(sum[XD_TOPK_ENTROPY]);
    if (sum[XD_TOPK_BAD].low > 0) side->finding = (int)XD_ROW_OVERFLOW;
    if (sum[XD_TOPK_BAD].high > 0) side->finding = (int)XD_ROW_NOT_FINITE;
}

static __device__ inline double xdi_cuda_topk_part(const xd_topk_args &a, int shard, int64_t r, int which) {
    return __longlong_as_double(a.all[shard * a.all_stride + r * XD_TOPK_SUMS + which]);
}

static __device__ inline void xdi_cuda_topk_merge_plain(const xd_topk_args &a, int64_t r,
                                                        xd_topk_side *side) {
    side->max = -(double)INFINITY;
    for (int i = 0; i < a.vocab.shards; i++) {
        const double max = xdi_cuda_topk_part(a, i, r, XD_TOPK_MAX);
        if (xdi_cuda_topk_part(a, i, r, XD_TOPK_BAD) != 0.0) side->finding = (int)XD_ROW_NOT_FINITE;
        if (max > side->max) side->max = max;
    }
    if (side->finding != (int)XD_ROW_FINE) side->max = (double)NAN;
    for (int i = 0; i < a.vocab.shards; i++) {
        xd_topk_rescale(side, a.temperature, xdi_cuda_topk_part(a, i, r, XD_TOPK_MAX),
                        xdi_cuda_topk_part(a, i, r, XD_TOPK_OUTSIDE),
                        xdi_cuda_topk_part(a, i, r, XD_TOPK_ENTROPY));
    }
}

/* Collects the logits at all ids; true when an id is out of range or twice in the row. */
static __device__ inline bool xdi_cuda_topk_merge_values(const xd_topk_args &a, int64_t r) {
    const int64_t *ids = a.ids + r * a.k;
    const int64_t sums = a.logits.rows * XD_TOPK_SUMS * (a.fixed ? 2 : 1); /* words before the values */
    int wrong = 0;
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < a.k; j += XDI_CUDA_WARP) {
        int shard = 0;
        if (ids[j] >= a.vocab.size) wrong = 1;
        if (ids[j] < 0 || ids[j] >= a.vocab.size) continue;
        while (ids[j] >= a.vocab.offsets[shard + 1]) shard++;
        a.values[r * a.k + j] = __longlong_as_double(a.all[shard * a.all_stride + sums + r * a.k + j]);
        for (int64_t i = 0; i < j; i++)
            if (ids[i] == ids[j]) wrong = 1;
    }
    return __any_sync(0xffffffffu, wrong) != 0;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_merge_kernel(const __grid_constant__ xd_topk_args a) {
    const int64_t r = xdi_cuda_team_row<XDI_CUDA_WARP>();
    if (r >= a.logits.rows) return;
    const bool counts = a.row_scale[r] != 0.0;
    const bool wrong = counts && xdi_cuda_topk_merge_values(a, r);
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() != 0) return;
    xd_topk_side side;
    memset(&side, 0, sizeof side);
    if (counts && a.fixed) xdi_cuda_topk_merge_fixed(a, r, &side);
    if (counts && !a.fixed) xdi_cuda_topk_merge_plain(a, r, &side);
    if (wrong) side.finding = (int)XD_ROW_LABEL;
    if (counts && side.max == -(double)INFINITY) side.finding = (int)XD_ROW_NOT_FINITE;
    a.side[r] = side;
}

static xd_result xdi_cuda_topk_merge(const xd_launch *launch, const xd_topk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_WARP),
                           xdi_cuda_topk_merge_kernel, *a);
}

/* ---- divergence: one warp per row ---- */

/* One row for the divergence: entries j < k are the ids, the tail is one more entry. All lanes hold the same scalars; lane l
 * has the entries l, l + 32, ... */
struct xdi_cuda_topk_entries {
    double *s, *t; /* [k] logarithms */
    double *g;     /* [k] gradient with respect to the entries' logits */
    const int64_t *ids;
    int64_t k;
    double tail_t; /* logarithm of the teacher's tail */
    bool tail;     /* the outside is an entry of the divergence */
    xd_topk_masses at;
    double teacher_mass;
};

/* Not unrolled: its bodies have exponentials in double. */
#define XDI_CUDA_TOPK_EACH(e, j)                                                            \
    XD_UNROLL_N(1)                                                                          \
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < (e)->k; j += XDI_CUDA_WARP) \
        if ((e)->ids[j] >= 0)

/* values[] / temperature, normalised over the row's own entries. Returns ln of the sum, -infinity without entries. */
static __device__ inline double xdi_cuda_topk_normalise(const xdi_cuda_topk_entries *e, const double *values,
                                                        double temperature, double *out) {
    double max = -(double)INFINITY, sum = 0.0;
    XDI_CUDA_TOPK_EACH(e, j) if (values[j] > max) max = values[j];
    max = xdi_cuda_warp_reduce(max, xdi_cuda_larger());
    XDI_CUDA_TOPK_EACH(e, j) if (max > -(double)INFINITY) sum += exp((values[j] - max) / temperature);
    const double log_sum = log(xdi_cuda_warp_sum(sum));
    XDI_CUDA_TOPK_EACH(e, j) out[j] = (values[j] - max) / temperature - log_sum;
    return max / temperature + log_sum;
}

static __device__ inline double xdi_cuda_topk_mass(const xdi_cuda_topk_entries *e, const double *logs) {
    double sum = 0.0;
    XDI_CUDA_TOPK_EACH(e, j) sum += exp(logs[j]);
    return xdi_cuda_warp_sum(sum);
}

static __device__ inline void xdi_cuda_topk_student_entries(const xd_topk_kl_args &a, int64_t r,
                                                            xdi_cuda_topk_entries *e) {
    const double *values = a.values + r * a.k;
    const xd_topk_side side = a.side[r];
    double inside = 0.0;
    XDI_CUDA_TOPK_EACH(e, j) inside += exp((values[j] - side.max) / a.temperature);
    inside = xdi_cuda_warp_sum(inside);
    e->at = xd_topk_student_masses(inside, &side, e->tail);
    if (a.mode == XD_TOPK_RENORMALISE) {
        xdi_cuda_topk_normalise(e, values, a.temperature, e->s);
    } else {
        XDI_CUDA_TOPK_EACH(e, j) e->s[j] = (values[j] - side.max) / a.temperature - e->at.log;
    }
}

static __device__ inline void xdi_cuda_topk_teacher_entries(const xd_topk_kl_args &a, int64_t r,
                                                            xdi_cuda_topk_entries *e) {
    const double *values = a.teacher_values + r * a.k;
    const double tau = a.teacher_temperature;
    const double sum = xdi_cuda_topk_normalise(e, values, tau, e->t);
    const xd_topk_teacher teacher =
        xd_topk_teacher_masses(sum, a.teacher_side ? a.teacher_side + r : nullptr, tau,
                               !a.teacher_side && a.teacher_log ? a.teacher_log[r] : 0.0);
    if (a.mode != XD_TOPK_RENORMALISE && a.mode != XD_TOPK_ZERO_OUTSIDE) {
        XDI_CUDA_TOPK_EACH(e, j) e->t[j] = values[j] / tau - teacher.whole;
    }
    e->teacher_mass = teacher.mass;
    e->tail_t = teacher.tail;
}

/* Forward KL of the entries: sum T (t - s), gradient S sum(T) - T. */
static __device__ inline void xdi_cuda_topk_forward(xdi_cuda_topk_entries *e, double weight,
                                                    xd_topk_row *row) {
    double mass = xdi_cuda_topk_mass(e, e->t), loss = 0.0;
    double at_tail = 0.0; /* the tail's gradient is that of the outside */
    if (e->at.tail_flows) mass = xd_add(mass, exp(e->tail_t));
    XDI_CUDA_TOPK_EACH(e, j) loss = xd_add(loss, xd_topk_forward(e->s[j], e->t[j], weight, mass, &e->g[j]));
    row->loss = xd_add(row->loss, xdi_cuda_warp_sum(loss));
    if (e->tail)
        row->loss = xd_add(row->loss, xd_topk_forward(e->at.tail, e->tail_t, weight, mass, &at_tail));
    row->outside = xd_add(row->outside, xd_topk_forward_outside(&e->at, weight, mass, exp(e->tail_t)));
}

/* The entry with the largest mass, the lowest index among equals. */
struct xdi_cuda_topk_most {
    double mass;
    int64_t j;
};
struct xdi_cuda_topk_most_join {
    __device__ xdi_cuda_topk_most operator()(const xdi_cuda_topk_most &a, const xdi_cuda_topk_most &b) const {
        return b.mass > a.mass || (b.mass == a.mass && b.j < a.j) ? b : a;
    }
};

/* Reverse KL and JSD: A = S r, gradient S ((r - c) - sum S (r - c)), with c the r of the entry with the largest mass, so that
 * nothing cancels on nearly one-hot rows. What is not an entry has A = 0: r = 0 beside r + 1 of the entries. */
static __device__ inline void xdi_cuda_topk_backward(xdi_cuda_topk_entries *e, bool zero_outside,
                                                     bool renormalised, double beta, double weight,
                                                     xd_topk_row *row) {
    const double one = beta == 1.0 && !zero_outside && !renormalised ? 1.0 : 0.0;
    double loss, outside = zero_outside ? 100.0 : 0.0, offset = outside, mean = 0.0, losses = 0.0;
    if (e->tail) {
        const double r = xd_topk_ratio(e->at.tail, e->tail_t, beta, &loss);
        row->loss = xd_add(row->loss, xd_mul(weight, loss));
        if (e->at.tail_flows) offset = outside = r + one;
    }
    xdi_cuda_topk_most most = { renormalised ? -1.0 : e->at.outside_mass, INT64_MAX };
    XDI_CUDA_TOPK_EACH(e, j) {
        const double mass = exp(e->s[j]);
        if (!(mass > most.mass)) continue;
        most.mass = mass;
        most.j = j;
    }
    most = xdi_cuda_warp_reduce(most, xdi_cuda_topk_most_join());
    if (most.j != INT64_MAX) offset = xd_topk_ratio(e->s[most.j], e->t[most.j], beta, &loss) + one;
    XDI_CUDA_TOPK_EACH(e, j) {
        const double r = xd_topk_ratio(e->s[j], e->t[j], beta, &loss) + one;
        losses = xd_add(losses, xd_mul(weight, loss));
        if (e->s[j] > -(double)INFINITY) mean = xd_add(mean, xd_mul(exp(e->s[j]), xd_sub(r, offset)));
    }
    row->loss += xdi_cuda_warp_sum(losses);
    mean = xdi_cuda_warp_sum(mean);
    if (!renormalised)
        mean = xd_add(mean, xd_topk_outside_mean(&e->at, outside, offset, zero_outside));
    XDI_CUDA_TOPK_EACH(e, j)
    e->g[j] = xd_add(e->g[j], xd_topk_backward(e->s[j], weight, xd_topk_ratio(e->s[j], e->t[j], beta, &loss) + one, offset, mean));
    if (!renormalised)
        row->outside = xd_add(row->outside, xd_mul(weight, xd_sub(xd_sub(outside, offset), mean)));
    if (zero_outside) xd_topk_zero_outside(&e->at, weight, row);
}

static __device__ inline void xdi_cuda_topk_divergence_row(const xd_topk_kl_args &a, int64_t r,
                                                           xdi_cuda_topk_entries *e, xd_topk_row *row) {
    const bool renormalised = a.mode == XD_TOPK_RENORMALISE, zero = a.mode == XD_TOPK_ZERO_OUTSIDE;
    const double beta = xd_topk_beta(a.divergence, a.beta);
    xdi_cuda_topk_student_entries(a, r, e);
    xdi_cuda_topk_teacher_entries(a, r, e);
    __syncwarp(); /* all lanes read the entry with the largest mass, which one lane wrote */
    const bool jsd = a.divergence == XD_JSD;
    if (!jsd && beta != 1.0) xdi_cuda_topk_forward(e, 1.0 - beta, row);
    if (jsd || beta != 0.0) /* one call: a kernel has its code once */
        xdi_cuda_topk_backward(e, !jsd && zero, renormalised, jsd ? beta : 1.0, jsd ? 1.0 : beta, row);
    if (renormalised) row->outside = 0.0;
    xd_topk_close(&a, r, &e->at, e->teacher_mass, row);
}

static __device__ inline bool xdi_cuda_topk_has_entries(const xdi_cuda_topk_entries *e) {
    int any = 0;
    XDI_CUDA_TOPK_EACH(e, j) any = 1;
    return __any_sync(0xffffffffu, any) != 0;
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_topk_divergence_kernel(const __grid_constant__ xd_topk_kl_args a) {
    const int64_t r = xdi_cuda_team_row<XDI_CUDA_WARP>();
    if (r >= a.logits.rows) return;
    xd_topk_row row;
    xdi_cuda_topk_entries e;
    memset(&row, 0, sizeof row);
    memset(&e, 0, sizeof e);
    e.s = a.scratch + r * 3 * (a.k + 1);
    e.t = e.s + a.k;
    e.g = a.slots + r * a.k;
    e.ids = a.ids + r * a.k;
    e.k = a.k;
    e.tail = a.mode == XD_TOPK_TAIL;
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < a.k; j += XDI_CUDA_WARP) {
        e.g[j] = 0.0;
        e.s[j] = -(double)INFINITY;
    }
    row.finding = a.side[r].finding;
    if (a.teacher_side && row.finding == (int)XD_ROW_FINE) row.finding = a.teacher_side[r].finding;
    const bool counts = a.row_scale[r] != 0.0 && row.finding == (int)XD_ROW_FINE;
    if (row.finding == (int)XD_ROW_NOT_FINITE) row.max = xd_topk_reason(&a, r);
    if (xdi_cuda_topk_has_entries(&e) && counts) xdi_cuda_topk_divergence_row(a, r, &e, &row);
    if (a.row_scale[r] != 0.0) xd_topk_settle(&a, r, &row);
    const bool fine = row.finding == (int)XD_ROW_FINE;
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); a.log_probs && j < a.k; j += XDI_CUDA_WARP)
        a.log_probs[r * a.k + j] = fine ? (float)e.s[j] : -INFINITY;
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() == 0) a.row[r] = row;
}

static xd_result xdi_cuda_topk_divergence(const xd_launch *launch, const xd_topk_kl_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_WARP),
                           xdi_cuda_topk_divergence_kernel, *a);
}

/* ---- grad: grid (rows / teams), block 256; one read where the outside has a gradient, one write ---- */

/* The gradient outside the ids, p (outside + entropy ln p), times the row's scale. */
struct xdi_cuda_topk_line {
    float max, per_tau, factor, inverse, log; /* p = e^((x - max) / tau) inverse */
    float outside, entropy;
};

static __device__ inline float xdi_cuda_topk_outside_gradient(const xdi_cuda_topk_line &w, float x) {
    const float dx = __fsub_rn(x, w.max), p = __fmul_rn(xdi_cuda_exp_of(dx, w.factor), w.inverse);
    if (!(p > 0.0f)) return 0.0f;
    const float log_p = __fmaf_rn(dx, w.per_tau, -w.log);
    return __fmul_rn(p, w.entropy != 0.0f ? __fmaf_rn(w.entropy, log_p, w.outside) : w.outside);
}

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_grad_kernel(const __grid_constant__ xd_topk_kl_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    const xd_topk_row row = a.row[r];
    const bool counts = a.row_scale[r] != 0.0 && row.finding == (int)XD_ROW_FINE;
    const double scale = a.weight * a.row_scale[r] / a.temperature;
    const xdi_cuda_topk_line w = { (float)row.max,
                                   xdi_cuda_factor(1.0 / a.temperature),
                                   xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature),
                                   (float)exp(-row.log),
                                   (float)row.log,
                                   (float)(scale * row.outside),
                                   (float)(scale * row.entropy) };
    const int64_t columns = counts && (row.outside != 0.0 || row.entropy != 0.0) ? a.vocab.end - a.vocab.begin : 0;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < a.gradient.cols;
         c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight g = {};
        if (c < columns) {
            const xdi_cuda_eight x = xdi_cuda_read_any(a.logits, r, c, columns);
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                if (c + i < columns) g.at[i] = xdi_cuda_topk_outside_gradient(w, x.at[i]);
        }
        xdi_cuda_write_any(a.gradient, r, c, a.gradient.cols, g);
    }
    xdi_cuda_team_sync<TEAM>(); /* the ids' columns are written again */
    for (int64_t j = xdi_cuda_team_thread<TEAM>(); counts && j < a.k; j += TEAM) {
        const int64_t id = a.ids[r * a.k + j];
        if (id >= a.vocab.begin && id < a.vocab.end)
            xdi_cuda_set_element(a.gradient, r, id - a.vocab.begin, (float)(scale * a.slots[r * a.k + j]));
    }
}

static xd_result xdi_cuda_topk_grad(const xd_launch *launch, const xd_topk_kl_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                               xdi_cuda_topk_grad_kernel<TEAM>, *a);
    })
}

/* ---- entries: one thread per entry ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_entries_kernel(const __grid_constant__ xd_topk_entries_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.count) return;
    const bool absent = a.values && a.values[i] == -INFINITY;
    const int64_t id = a.ids.data ? xd_id_at(a.ids, i) : 0;
    if (a.ids.data) a.entry_ids[i] = absent ? -1 : id < 0 || id > a.size ? a.size : id;
    a.entry_values[i] = a.values ? (double)a.values[i] : 0.0;
}

static xd_result xdi_cuda_topk_entries_run(const xd_launch *launch, const xd_topk_entries_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_topk_entries_kernel, *a);
}

/* ---- loading ---- */

template <int TEAM> static xd_result xdi_cuda_topk_load_team(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_topk_maxima_kernel<TEAM, float>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_topk_maxima_kernel<TEAM, xdi_cuda_bf16>)));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_stats_kernel<false, TEAM>));
    return xdi_cuda_load(ctx, xdi_cuda_topk_grad_kernel<TEAM>);
}

static xd_result xdi_cuda_topk_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_merge_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_divergence_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_entries_kernel));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_topk_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY(xdi_cuda_topk_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_topk_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}

/* >>cuda/topk_select.cu */

/* The k largest of every row: xdi_cpu_select and xdi_cpu_select_merge of kernel/cpu/topk.c. Which kernel a row gets is a matter
 * of k: topk_few.cu, topk_many.cu, or the one here, which has no limit.
 *
 * Here one block of 256 works on a row. Passes over the digits of the values find the k-th largest (radix select); one more
 * collects the larger values and, among those equal to it, the lowest columns; a bitonic network sorts the k. */

/* A value as an integer of the same order; NaN is -infinity, both zeros are one. */
static __device__ inline uint32_t xdi_cuda_select_key(float value) {
    const uint32_t bits = __float_as_uint(__fadd_rn(fmaxf(value, -INFINITY), 0.0f));
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

/* Inclusive sum over the lanes of a warp, in their order. */
template <typename T> static __device__ inline T xdi_cuda_warp_scan(T sum) {
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    XD_UNROLL
    for (int step = 1; step < XDI_CUDA_WARP; step *= 2) {
        const T other = __shfl_up_sync(0xffffffffu, sum, (unsigned)step);
        if (lane >= step) sum += other;
    }
    return sum;
}

/* Exclusive sum over the threads of the block, in their order; *total is the block's. */
template <int TEAM, typename T> static __device__ inline T xdi_cuda_select_scan(T mine, T *total) {
    enum { WARPS = TEAM / XDI_CUDA_WARP };
    XD_SHARED(T, warps, [XDI_CUDA_MAX_WARPS]);
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    const T sum = xdi_cuda_warp_scan(mine);
    if (lane == XDI_CUDA_WARP - 1) warps[warp] = sum;
    __syncthreads();
    const T parts = xdi_cuda_warp_scan(lane < WARPS ? warps[lane] : (T)0);
    const T before = __shfl_sync(0xffffffffu, parts, warp > 0 ? warp - 1 : 0);
    *total = __shfl_sync(0xffffffffu, parts, WARPS - 1);
    __syncthreads(); /* warps may be written again */
    return (warp > 0 ? before : 0) + sum - mine;
}

/* Of what is counted by digits: the digit that has the value of rank *need (1: the largest digit's); *need becomes its rank among
 * those of that digit. All threads of the block call it, and counts may be written again when it returns. */
template <int TEAM, int DIGITS> static __device__ inline uint32_t xdi_cuda_select_digit(const unsigned *counts, int64_t *need) {
    enum { WARP = DIGITS <= 8 * XDI_CUDA_WARP, EACH = WARP ? DIGITS / XDI_CUDA_WARP : (DIGITS + TEAM - 1) / TEAM };
    XD_SHARED(unsigned, found, [2]);
    const int top = DIGITS - 1 - EACH * (int)threadIdx.x;
    const unsigned rank = (unsigned)*need;
    unsigned mine = 0, above = 0, total;
    if (!WARP || threadIdx.x < XDI_CUDA_WARP) { /* few digits are left to one warp */
        XD_UNROLL
        for (int i = 0; i < EACH; i++) mine += i <= top ? counts[top - i] : 0;
        if (WARP) above = xdi_cuda_warp_scan(mine) - mine;
    }
    if (!WARP) above = xdi_cuda_select_scan<TEAM>(mine, &total);
    if (above < rank && rank <= above + mine) {
        int i = 0;
        for (; above + counts[top - i] < rank; i++) above += counts[top - i];
        found[0] = (unsigned)(top - i);
        found[1] = above;
    }
    __syncthreads();
    *need -= found[1];
    return found[0];
}

/* The value of rank `need` (1: the largest) among the row's, and how many equal to it belong to the first `need`. TEAM: the
 * threads of the block, here and below. BITS: of a digit. What a load has beyond the row is -infinity and changes neither. */
template <int TEAM, int BITS, typename T>
static __device__ inline uint32_t xdi_cuda_select_threshold(const T *row, int64_t columns, int64_t *need) {
    enum { DIGITS = 1 << BITS, SAME = sizeof(T) == 2 ? 16 : 0 }; /* SAME: bits that the sign alone decides */
    XD_SHARED(unsigned, digits, [DIGITS]);
    unsigned *counts = digits;
    uint32_t prefix = 0;
    for (int left = 32; left > SAME;) { /* bits that are not known */
        const int bits = left - SAME < BITS ? left - SAME : (int)BITS, shift = left - bits;
        const uint32_t mask = (1u << bits) - 1u, known = left < 32 ? ~0u << left : 0u;
        XD_UNROLL_N(1)
        for (int i = (int)threadIdx.x; i < DIGITS; i += TEAM) counts[i] = 0;
        __syncthreads();
        xdi_cuda_each_eight<TEAM>(row, columns, [=](const xdi_cuda_raw<T> &raw, int64_t) {
            const xdi_cuda_eight x = raw.widened();
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                const uint32_t key = xdi_cuda_select_key(x.at[i]);
                if (((key ^ prefix) & known) == 0) atomicAdd(&counts[key >> shift & mask], 1u);
            }
        });
        __syncthreads();
        prefix |= xdi_cuda_select_digit<TEAM, DIGITS>(counts, need) << shift;
        left = shift;
    }
    return SAME > 0 && !(prefix >> 31) ? prefix | 0xffffu : prefix;
}

/* One of a row's k, by its key and this shard's column. A key has no zero's sign. */
template <typename T>
static __device__ inline void xdi_cuda_select_put(const xd_select_args &a, const T *row, int64_t at, uint32_t key,
                                                  uint32_t column) {
    float value = xd_float_of_key(~key);
    if (value == 0.0f) value = xdi_cuda_widen(row[column]);
    if (a.narrow)
        a.narrow[at] = value;
    else
        a.values[at] = (double)value;
    a.ids[at] = a.first + (int64_t)column;
}

/* What stands behind the last of a row. */
static __device__ inline void xdi_cuda_select_fill(const xd_select_args &a, int64_t r, int64_t n) {
    XD_UNROLL_N(1)
    for (int64_t at = r * a.k + n + (int64_t)threadIdx.x; at < (r + 1) * a.k; at += blockDim.x) {
        if (a.narrow)
            a.narrow[at] = -INFINITY;
        else
            a.values[at] = -(double)INFINITY;
        a.ids[at] = -1;
    }
}

/* An element: its key, then ~column, so that a larger word comes first. */
static __device__ inline uint64_t xdi_cuda_select_word(float value, int64_t column) {
    return (uint64_t)xdi_cuda_select_key(value) << 32 | (uint32_t)~(uint32_t)column;
}

/* Sorts words by the threads of a block, the largest first. */
static __device__ inline void xdi_cuda_select_bitonic(uint64_t *words, int64_t count) {
    xdi_cuda_bitonic<XDI_CUDA_TEAM_BLOCK>(count, [=](int64_t low, int64_t high) {
        const uint64_t x = words[low], y = words[high];
        if (x >= y) return;
        words[low] = y;
        words[high] = x;
    });
}

/* Collects the values above the threshold and the first `need` equal to it, in the order of their columns: put(at, value,
 * column). */
template <int TEAM, typename T, typename Put>
static __device__ inline void xdi_cuda_select_collect(const T *row, int64_t columns, uint32_t threshold,
                                                      int64_t need, Put put) {
    static_assert(XDI_CUDA_EIGHT * TEAM < 1 << 16, "two counts in a word");
    int64_t above = 0, equal = 0; /* of the columns before */
    const int64_t tile = XDI_CUDA_EIGHT * TEAM, own = XDI_CUDA_EIGHT * (int64_t)threadIdx.x;
    /* What lies beyond the row comes after all that are needed. The next tile is on its way while this one is counted. */
    xdi_cuda_eight next = {};
    if (own < columns) next = xdi_cuda_read(row, own, columns, -INFINITY);
    for (int64_t begin = 0; begin < columns; begin += tile) {
        const int64_t c = begin + own;
        const xdi_cuda_eight x = next;
        uint32_t mine = 0, total;
        if (c + tile < columns) next = xdi_cuda_read(row, c + tile, columns, -INFINITY);
        if (c < columns) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                const uint32_t key = xdi_cuda_select_key(x.at[i]);
                mine += key > threshold ? 1u << 16 : key == threshold ? 1u : 0u;
            }
        }
        const uint32_t before = xdi_cuda_select_scan<TEAM>(mine, &total);
        int64_t larger = above + (int64_t)(before >> 16), same = equal + (int64_t)(before & 0xffffu);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const uint32_t key = xdi_cuda_select_key(x.at[i]);
            if (mine == 0 || key < threshold) continue;
            if (key > threshold || same < need) put(larger + (same < need ? same : need), x.at[i], c + i);
            if (key > threshold)
                larger++;
            else
                same++;
        }
        above += (int64_t)(total >> 16);
        equal += (int64_t)(total & 0xffffu);
    }
}

/* The words are sorted where the ids go. */
template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_select_kernel(const __grid_constant__ xd_select_args a) {
    const int64_t r = (int64_t)blockIdx.x, n = a.k < a.columns ? a.k : a.columns;
    if (r >= a.logits.rows) return; /* the whole block returns */
    const T *row = xdi_cuda_row<T>(a.logits, r);
    uint64_t *words = reinterpret_cast<uint64_t *>(a.ids + r * a.k);
    int64_t need = n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_TEAM_BLOCK, 8>(row, a.columns, &need);
    xdi_cuda_select_collect<XDI_CUDA_TEAM_BLOCK>(row, a.columns, threshold, need, [=](int64_t at, float value, int64_t column) {
        words[at] = xdi_cuda_select_word(value, column);
    });
    xdi_cuda_select_fill(a, r, n);
    __syncthreads();
    xdi_cuda_select_bitonic(words, n);
    XD_UNROLL_N(1)
    for (int64_t j = (int64_t)threadIdx.x; j < n; j += XDI_CUDA_TEAM_BLOCK)
        xdi_cuda_select_put(a, row, r * a.k + j, (uint32_t)(words[j] >> 32), ~(uint32_t)words[j]);
}

/* >>cuda/topk_few.cu */

/* The k largest of a row, k <= 1,024: a block of 256 a row, which is read a little more than once.
 *
 * Each of 2,048 groups of the row's columns (a thread's, at one of its eight places) has a largest element. The k-th largest of
 * these is not above the k-th largest of the row, so what reaches it has the k among it. A part of the row is enough to find one
 * that a few hundred elements reach; where more do than there is room for, the whole row gives a better one. Many equal values
 * leave the row to radix select. Of the elements collected, the best are found by their upper 16 bits and sorted. */

enum {
    XDI_CUDA_SELECT_FEW = 1024,
    XDI_CUDA_SELECT_ROOM = 2048, /* for elements; a threshold of the whole row collects 1,420 of a thousand in the mean */
    XDI_CUDA_SELECT_RANKED = 256 /* so many are sorted by counting those before each */
};

struct xdi_cuda_select_room {
    uint64_t words[XDI_CUDA_SELECT_ROOM];
    uint32_t eights[XDI_CUDA_SELECT_ROOM]; /* numbers of eights with an element that reaches the threshold */
    int eight_count, word_count;
};

/* The upper 16 bits of the key of rank `need`: each(add) calls add(key) for a thread's keys. */
template <int TEAM, typename Each> static __device__ inline uint32_t xdi_cuda_select_high(int64_t need, Each each) {
    enum { DIGITS = 256 };
    XD_SHARED(unsigned, counts, [DIGITS]);
    uint32_t high = 0;
    for (int shift = 24; shift >= 16; shift -= 8) {
        for (int i = (int)threadIdx.x; i < DIGITS; i += TEAM) counts[i] = 0;
        __syncthreads();
        each([&](uint32_t key) {
            if (shift == 24 || key >> 24 == high) atomicAdd(&counts[key >> shift & (DIGITS - 1)], 1u);
        });
        __syncthreads();
        high = high << 8 | xdi_cuda_select_digit<TEAM, DIGITS>(counts, &need);
    }
    return high;
}

/* A value that at least n of the columns [0, end) reach; -infinity: all do. Every group has a column. */
template <typename T> static __device__ inline float xdi_cuda_select_limit(const T *row, int64_t end, int64_t n) {
    enum { NOTHING = 0x007f }; /* of -infinity */
    xdi_cuda_places<T, false> places;
    xdi_cuda_each_eight<XDI_CUDA_TEAM_BLOCK>(row, end, [&](const xdi_cuda_raw<T> &raw, int64_t) { places.see(raw); });
    const bool threads = n <= XDI_CUDA_TEAM_BLOCK / 4; /* a group for each is enough then */
    uint32_t keys[XDI_CUDA_EIGHT];
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        keys[i] = xdi_cuda_select_key(threads && i == 0 ? xdi_cuda_largest_of(places) : places.value(i));
    const uint32_t high = xdi_cuda_select_high<XDI_CUDA_TEAM_BLOCK>(n, [&](auto add) {
        add(keys[0]);
        if (threads) return;
        XD_UNROLL
        for (int i = 1; i < XDI_CUDA_EIGHT; i++) add(keys[i]);
    });
    return high <= NOTHING ? -INFINITY : xd_float_of_key(~(high << 16));
}

/* Collects the elements that reach the limit, in any order. Returns how many there are, or more than there is room for. */
template <typename T>
static __device__ inline int xdi_cuda_select_reaching(const T *row, int64_t columns, float limit, xdi_cuda_select_room *room) {
    if (threadIdx.x == 0) room->eight_count = room->word_count = 0;
    __syncthreads();
    xdi_cuda_each_eight<XDI_CUDA_TEAM_BLOCK>(row, columns, [=](const xdi_cuda_raw<T> &raw, int64_t c) {
        if (!(xdi_cuda_largest_of(raw) >= limit)) return;
        const int at = atomicAdd(&room->eight_count, 1);
        if (at < XDI_CUDA_SELECT_ROOM) room->eights[at] = (uint32_t)(c / XDI_CUDA_EIGHT);
    });
    __syncthreads();
    const int eights = room->eight_count;
    if (eights > XDI_CUDA_SELECT_ROOM) return eights;
    XD_UNROLL_N(1)
    for (int i = (int)threadIdx.x; i < eights; i += XDI_CUDA_TEAM_BLOCK) {
        const int64_t c = (int64_t)room->eights[i] * XDI_CUDA_EIGHT;
        const xdi_cuda_eight x = xdi_cuda_read(row, c, columns, -INFINITY);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            if (!(x.at[j] >= limit)) continue;
            const int at = atomicAdd(&room->word_count, 1);
            if (at < XDI_CUDA_SELECT_ROOM) room->words[at] = xdi_cuda_select_word(x.at[j], c + j);
        }
    }
    __syncthreads();
    return room->word_count;
}

/* Puts the n best into the room, whatever the values are. */
template <typename T>
XDI_CUDA_APART __device__ void xdi_cuda_select_equals(const T *row, int64_t columns, int64_t n, xdi_cuda_select_room *room) {
    int64_t need = n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_TEAM_BLOCK, 8>(row, columns, &need);
    xdi_cuda_select_collect<XDI_CUDA_TEAM_BLOCK>(row, columns, threshold, need, [=](int64_t at, float value, int64_t column) {
        room->words[at] = xdi_cuda_select_word(value, column);
    });
    __syncthreads();
}

/* Puts elements into the room that have the row's n best among them. Returns how many. */
template <typename T>
static __device__ inline int xdi_cuda_select_gather(const T *row, int64_t columns, int64_t n, xdi_cuda_select_room *room) {
    enum { LEAST = 4 * XDI_CUDA_TEAM_BLOCK * XDI_CUDA_EIGHT };
    if (columns <= XDI_CUDA_SELECT_ROOM) {
        XD_UNROLL_N(1)
        for (int64_t c = (int64_t)threadIdx.x; c < columns; c += XDI_CUDA_TEAM_BLOCK)
            room->words[c] = xdi_cuda_select_word(xdi_cuda_widen(row[c]), c);
        __syncthreads();
        return (int)columns;
    }
    int64_t part = n < XDI_CUDA_SELECT_RANKED ? columns / XDI_CUDA_SELECT_RANKED * n : columns;
    if (part < LEAST) part = LEAST;
    if (part > columns) part = columns;
    for (;;) {
        const float limit = xdi_cuda_select_limit(row, part, n);
        if (limit > -INFINITY) {
            const int count = xdi_cuda_select_reaching(row, columns, limit, room);
            if (count <= XDI_CUDA_SELECT_ROOM) return count;
        }
        if (part == columns) break;
        part = columns;
    }
    xdi_cuda_select_equals(row, columns, n, room);
    return (int)n;
}

/* Calls put(rank, word) for the n best words of the room. */
template <typename Put>
static __device__ inline void xdi_cuda_select_order(xdi_cuda_select_room *room, int count, int64_t n, Put put) {
    XD_SHARED(uint64_t, best, [XDI_CUDA_SELECT_RANKED]);
    XD_SHARED(int, best_count, [1]);
    uint64_t *words = room->words;
    int w = XDI_CUDA_SELECT_RANKED + 1;
    if (n <= XDI_CUDA_SELECT_RANKED) {
        const uint32_t high = xdi_cuda_select_high<XDI_CUDA_TEAM_BLOCK>(n, [=](auto add) {
            XD_UNROLL_N(1)
            for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK) add((uint32_t)(words[i] >> 32));
        });
        if (threadIdx.x == 0) best_count[0] = 0;
        __syncthreads();
        XD_UNROLL_N(1)
        for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK) {
            if ((uint32_t)(words[i] >> 48) < high) continue;
            const int at = atomicAdd(&best_count[0], 1);
            if (at < XDI_CUDA_SELECT_RANKED) best[at] = words[i];
        }
        __syncthreads();
        w = best_count[0];
    }
    if (w <= XDI_CUDA_SELECT_RANKED) {
        if ((int)threadIdx.x >= w) return;
        const uint64_t mine = best[threadIdx.x];
        int rank = 0;
        for (int i = 0; i < w; i++) rank += best[i] > mine;
        if (rank < n) put(rank, mine);
        return;
    }
    xdi_cuda_select_bitonic(words, count);
    XD_UNROLL_N(1)
    for (int j = (int)threadIdx.x; j < n; j += XDI_CUDA_TEAM_BLOCK) put(j, words[j]);
}

template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, XDI_CUDA_BLOCKS(sizeof(T) == 2 ? 5 : 4))
    xdi_cuda_select_few_kernel(const __grid_constant__ xd_select_args a) {
    XD_SHARED(xdi_cuda_select_room, room, [1]);
    const int64_t r = (int64_t)blockIdx.x, n = a.k < a.columns ? a.k : a.columns;
    if (r >= a.logits.rows) return; /* the whole block returns */
    const T *row = xdi_cuda_row<T>(a.logits, r);
    xdi_cuda_select_fill(a, r, n);
    if (n == 0) return;
    const int count = xdi_cuda_select_gather(row, a.columns, n, room);
    xdi_cuda_select_order(room, count, n, [=, &a](int rank, uint64_t word) {
        xdi_cuda_select_put(a, row, r * a.k + rank, (uint32_t)(word >> 32), ~(uint32_t)word);
    });
}

/* >>cuda/topk_many.cu */

/* The k largest of a row, k in 1,025 ... 8,192: a block of 1,024 a row. Radix select with digits of 11 bits finds the k-th largest;
 * the k are collected in the order of their columns into shared memory, where a stable sort of their keys orders them. */

enum {
    XDI_CUDA_SELECT_TEAM = 1024,
    XDI_CUDA_SELECT_EACH = 8,
    XDI_CUDA_SELECT_MANY = XDI_CUDA_SELECT_TEAM * XDI_CUDA_SELECT_EACH,
    XDI_CUDA_SELECT_BYTES = XDI_CUDA_SELECT_MANY * 8 /* dynamic shared memory */
};

/* The keys, then the columns, EACH a thread; the sort works in the same memory, or a little more. */
template <int EACH> struct xdi_cuda_select_list {
    uint32_t keys[XDI_CUDA_SELECT_TEAM * EACH], columns[XDI_CUDA_SELECT_TEAM * EACH];
};

#if !defined(XD_EMU)
template <int EACH> struct xdi_cuda_select_sorter {
    typedef cub::BlockRadixSort<uint32_t, XDI_CUDA_SELECT_TEAM, EACH, uint32_t> type;
};
static_assert(sizeof(xdi_cuda_select_sorter<XDI_CUDA_SELECT_EACH>::type::TempStorage) <= XDI_CUDA_SELECT_BYTES, "the sort's room");
#endif

/* Sorts a full list by descending keys, equal ones in their order. Calls put(i, key, column) with all, i < EACH; the rank is threadIdx.x +
 * i XDI_CUDA_SELECT_TEAM. The keys' bits that differ are [first, end). */
template <int EACH, typename Put>
static __device__ inline void xdi_cuda_select_sort(xdi_cuda_select_list<EACH> *list, int first, int end, Put put) {
#if !defined(XD_EMU)
    typedef typename xdi_cuda_select_sorter<EACH>::type sorter;
    uint32_t keys[EACH], columns[EACH];
    XD_UNROLL
    for (int i = 0; i < EACH; i++) {
        keys[i] = list->keys[threadIdx.x * EACH + i];
        columns[i] = list->columns[threadIdx.x * EACH + i];
    }
    __syncthreads();
    sorter(*reinterpret_cast<typename sorter::TempStorage *>(list)).SortDescendingBlockedToStriped(keys, columns, first, end);
    XD_UNROLL
    for (int i = 0; i < EACH; i++) put(i, keys[i], columns[i]);
#else
    (void)first, (void)end;
    xdi_cuda_bitonic<XDI_CUDA_SELECT_TEAM>(XDI_CUDA_SELECT_TEAM * EACH, [=](int64_t low, int64_t high) {
        const uint32_t x = list->keys[low], y = list->keys[high];
        if (x > y || (x == y && list->columns[low] < list->columns[high])) return;
        std::swap(list->keys[low], list->keys[high]);
        std::swap(list->columns[low], list->columns[high]);
    });
    XD_UNROLL_N(1)
    for (int i = 0, j = (int)threadIdx.x; i < EACH; i++, j += XDI_CUDA_SELECT_TEAM) put(i, list->keys[j], list->columns[j]);
#endif
}

template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_SELECT_TEAM)
    xdi_cuda_select_many_kernel(const __grid_constant__ xd_select_args a) {
    XD_DYN_SHARED(xdi_cuda_select_list<XDI_CUDA_SELECT_EACH>, list);
    const int64_t r = (int64_t)blockIdx.x, n = a.k < a.columns ? a.k : a.columns;
    if (r >= a.logits.rows) return; /* the whole block returns */
    const T *row = xdi_cuda_row<T>(a.logits, r);
    int64_t need = n;
    uint32_t largest = 0;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_SELECT_TEAM, 11>(row, a.columns, &need);
    xdi_cuda_select_collect<XDI_CUDA_SELECT_TEAM>(row, a.columns, threshold, need, [&, list](int64_t at, float value, int64_t column) {
        const uint32_t key = xdi_cuda_select_key(value);
        if (key > largest) largest = key;
        list->keys[at] = key;
        list->columns[at] = (uint32_t)column;
    });
    XD_UNROLL_N(1)
    for (int64_t j = n + (int64_t)threadIdx.x; j < XDI_CUDA_SELECT_MANY; j += XDI_CUDA_SELECT_TEAM) {
        list->keys[j] = threshold; /* behind its equals */
        list->columns[j] = ~0u;
    }
    xdi_cuda_select_fill(a, r, n);
    largest = xdi_cuda_block_reduce(largest, 0u, xdi_cuda_larger()); /* a barrier, too */
    const int first = sizeof(T) == 2 ? 16 : 0, end = 32 - __clz((int)(largest ^ threshold));
    xdi_cuda_select_sort(list, first, end > first ? end : first + 1, [=, &a](int i, uint32_t key, uint32_t column) {
        const int rank = (int)threadIdx.x + i * XDI_CUDA_SELECT_TEAM;
        if (rank < n) xdi_cuda_select_put(a, row, r * a.k + rank, key, column);
    });
}

/* >>cuda/topk_table.cu */

/* The k largest of every row, by k, and the table of the top-k losses. */

static xd_result xdi_cuda_select(const xd_launch *launch, const xd_select_args *a) {
    const int64_t n = a->k < a->columns ? a->k : a->columns;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->logits.dtype, T, {
        if (n <= XDI_CUDA_SELECT_FEW)
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK), xdi_cuda_select_few_kernel<T>, *a);
        if (n <= XDI_CUDA_SELECT_MANY)
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_SELECT_TEAM, XDI_CUDA_SELECT_BYTES),
                                   xdi_cuda_select_many_kernel<T>, *a);
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK), xdi_cuda_select_kernel<T>, *a);
    })
}

/* ---- select_merge: one warp per row ---- */

/* How many of a shard's n candidates, descending, are larger than value; with `equal` also those that equal it. */
static __device__ inline int64_t xdi_cuda_select_before(const int64_t *words, int64_t n, double value,
                                                        bool equal) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const double other = __longlong_as_double(words[middle]);
        if (other > value || (equal && other == value))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Number of valid candidates of a row and shard: from there on ids are -1 (padding). */
static __device__ inline int64_t xdi_cuda_select_given(const int64_t *ids, int64_t k) {
    int64_t low = 0, high = k;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (ids[middle] >= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Every candidate finds its rank among all; among equals the earlier shard comes first, because its columns are lower. */
static __device__ inline void xdi_cuda_select_place(const xd_select_args &a, int64_t r, int shard,
                                                    int64_t j) {
    const int64_t candidates = a.logits.rows * a.k, *mine = a.all + shard * a.all_stride + r * a.k;
    const int64_t id = mine[candidates + j];
    const double value = __longlong_as_double(mine[j]);
    int64_t rank = j;
    if (id < 0) return;
    for (int i = 0; i < a.shards; i++) {
        const int64_t *other = a.all + i * a.all_stride + r * a.k;
        if (i != shard)
            rank += xdi_cuda_select_before(other, xdi_cuda_select_given(other + candidates, a.k), value,
                                           i < shard);
    }
    if (rank >= a.k) return;
    a.values[r * a.k + rank] = value;
    a.ids[r * a.k + rank] = id;
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_select_merge_kernel(const __grid_constant__ xd_select_args a) {
    const int64_t r = xdi_cuda_team_row<XDI_CUDA_WARP>();
    if (r >= a.logits.rows) return;
    for (int shard = 0; shard < a.shards; shard++)
        for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < a.k; j += XDI_CUDA_WARP)
            xdi_cuda_select_place(a, r, shard, j);
}

static xd_result xdi_cuda_select_merge(const xd_launch *launch, const xd_select_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_WARP),
                           xdi_cuda_select_merge_kernel, *a);
}

/* ---- table of the losses ---- */

template <typename T> static xd_result xdi_cuda_select_load_type(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_kernel<T>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_few_kernel<T>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_many_kernel<T>));
    return XDI_CUDA_CHECK(ctx, cudaFuncSetAttribute(xdi_cuda_select_many_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    (int)XDI_CUDA_SELECT_BYTES));
}

static xd_result xdi_cuda_select_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_select_load_type<float>(ctx));
    XD_TRY(xdi_cuda_select_load_type<xdi_cuda_bf16>(ctx));
    return xdi_cuda_load(ctx, xdi_cuda_select_merge_kernel);
}

static xd_topk_kernels xdi_cuda_topk_table() {
    xd_topk_kernels kernels = {};
    kernels.maxima = xdi_cuda_topk_maxima;
    kernels.stats = xdi_cuda_topk_stats;
    kernels.merge = xdi_cuda_topk_merge;
    kernels.divergence = xdi_cuda_topk_divergence;
    kernels.grad = xdi_cuda_topk_grad;
    kernels.entries = xdi_cuda_topk_entries_run;
    kernels.select = xdi_cuda_select;
    kernels.select_merge = xdi_cuda_select_merge;
    kernels.select_narrow = true;
    return kernels;
}

#ifndef XDISTILL_NO_ACROSS
/* >>cuda/xtoken.cu */

/* Projected losses across tokenizers: kernel/cpu/xtoken*.c is the reference. Probabilities are f32, from a logarithm
 * computed in double; sums, and all values of a chunk, are double. One thread or warp adds to each cell, in a fixed order. */

/* ---- cells ---- */

template <bool FIXED> static __device__ inline void xdi_cuda_cell_add(double *cells, int64_t i, double term) {
    if (FIXED)
        xd_cell_put(reinterpret_cast<xd_fixed *>(cells) + i, term);
    else
        cells[i] = xd_add(cells[i], term);
}

/* Adds a team's sum to its cell. */
static __device__ inline void xdi_cuda_cell_join(double *cells, int64_t i,
                                                 const xdi_cuda_sums<1, false>::totals &sum) {
    cells[i] = __dadd_rn(cells[i], sum.sum[0]);
}

static __device__ inline void xdi_cuda_cell_join(double *cells, int64_t i,
                                                 const xdi_cuda_sums<1, true>::totals &sum) {
    xd_fixed *cell = reinterpret_cast<xd_fixed *>(cells) + i;
    xd_fixed_join(cell, sum.sum[0]);
    if (sum.misfits.large + sum.misfits.infinite > 0) cell->high = XD_CELL_NAN;
}

static __device__ inline float xdi_cuda_xtoken_p(const xd_xtoken_rows &x, int64_t row, int64_t column) {
    const double z = (double)xdi_cuda_element(x.logits, row, column);
    return expf((float)__dsub_rn(__ddiv_rn(z, x.temperature), x.lse[row]));
}

/* ---- single logits ---- */

static __device__ inline const void *xdi_cuda_row_of(const xd_rows &x, int64_t row) {
    return x.dtype == XD_DTYPE_F32 ? (const void *)xdi_cuda_row<float>(x, row) : (const void *)xdi_cuda_row<xdi_cuda_bf16>(x, row);
}

/* A logit as it lies in memory, so that nothing waits for it, and its value. wide: the type is F32. */
static __device__ inline uint32_t xdi_cuda_ask(const void *row, bool wide, int64_t column) {
    return wide ? static_cast<const uint32_t *>(row)[column] : (uint32_t) static_cast<const uint16_t *>(row)[column];
}

static __device__ inline float xdi_cuda_asked(uint32_t bits, bool wide) {
    return xd_float_of_bits(wide ? bits : bits << 16);
}

/* Runs the statements with FIXED as the type of the cells. */
#define XDI_CUDA_CELLS(fixed, FIXED, ...) \
    if (fixed) {                          \
        enum { FIXED = 1 };               \
        __VA_ARGS__                       \
    } else {                              \
        enum { FIXED = 0 };               \
        __VA_ARGS__                       \
    }

/* ---- lists of a block ---- */

/* The larger; a NaN stays. */
struct xdi_cuda_larger_or_nan {
    __device__ double operator()(double a, double b) const {
        return a >= b || isnan(a) ? a : b;
    }
};

static __device__ inline double xdi_cuda_block_sum(double x) {
    return xdi_cuda_block_reduce(x, 0.0, xdi_cuda_add());
}

/* Calls use(i, then(ask(i))) for i < n, a thread of the team in steps of TEAM, in batches: what is asked for first is under way for all of
 * a batch before the next load, and these before the first use. */
template <int TEAM, int AHEAD, typename Ask, typename Then, typename Use>
static __device__ inline void xdi_cuda_each_ahead(int64_t n, Ask ask, Then then, Use use) {
    for (int64_t first = (int64_t)xdi_cuda_team_thread<TEAM>(); first < n; first += AHEAD * TEAM) {
        decltype(ask(first)) asked[AHEAD];
        decltype(then(ask(first))) values[AHEAD];
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (first + k * TEAM < n) asked[k] = ask(first + k * TEAM);
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (first + k * TEAM < n) values[k] = then(asked[k]);
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (first + k * TEAM < n) use(first + k * TEAM, values[k]);
    }
}

struct xdi_cuda_same {
    template <typename T> __device__ T operator()(T value) const {
        return value;
    }
};

/* ln sum e^at(i) over i < n, on every thread of the block. */
template <typename At> static __device__ inline double xdi_cuda_block_lse(int64_t n, At at) {
    double max = -(double)INFINITY, sum = 0.0;
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += XDI_CUDA_TEAM_BLOCK)
        max = xdi_cuda_larger_or_nan()(max, at(i));
    max = xdi_cuda_block_reduce(max, -(double)INFINITY, xdi_cuda_larger_or_nan());
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += XDI_CUDA_TEAM_BLOCK)
        sum += (double)expf((float)__dsub_rn(at(i), max));
    return max + log(xdi_cuda_block_sum(sum));
}

/* The largest of a list and where it came first. A NaN is never larger. */
struct xdi_cuda_top {
    double value;
    int64_t at;
};

struct xdi_cuda_top_join {
    __device__ xdi_cuda_top operator()(xdi_cuda_top a, const xdi_cuda_top &b) const {
        if (b.value > a.value || (b.value == a.value && b.at < a.at)) a = b;
        return a;
    }
};

static __device__ inline int64_t xdi_cuda_block_argmax(const double *x, int64_t n) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_top top = none;
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_top one = { x[i], i };
        top = xdi_cuda_top_join()(top, one);
    }
    return xdi_cuda_block_reduce(top, none, xdi_cuda_top_join()).at;
}

/* ---- slots of ids ---- */

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_slots_kernel(const __grid_constant__ xd_xtoken_slots_args a) {
    const int64_t j = xdi_cuda_flat_index();
    if (j < a.k) a.slots[a.ids[j]] = (int32_t)j;
}

static xd_result xdi_cuda_xtoken_slots(const xd_launch *launch, const xd_xtoken_slots_args *a) {
    XD_TRY(xdi_cuda_fill(launch, a->slots, 0xff, (size_t)a->size * sizeof *a->slots));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->k), xdi_cuda_xtoken_slots_kernel, *a);
}

/* ---- cells ---- */

static __device__ inline double xdi_cuda_cell_value(bool fixed, const double *cells, int64_t i) {
    return fixed ? xd_cell_read(reinterpret_cast<const xd_fixed *>(cells)[i]) : cells[i];
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_settle_kernel(const double *cells, int64_t count,
                                                                     double *out) {
    const int64_t i = xdi_cuda_flat_index();
    if (i < count) out[i] = xdi_cuda_cell_value(true, cells, i);
}

static xd_result xdi_cuda_xtoken_settle(const xd_launch *launch, const double *cells, int64_t count, double *out) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(count), xdi_cuda_xtoken_settle_kernel, cells, count, out);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_deltas_kernel(const __grid_constant__ xd_xtoken_row_deltas_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.count) return;
    a.out[i] = xd_xtoken_row_delta(a.chunks + a.places[i], xdi_cuda_cell_value(a.fixed, a.cells, i));
}

static xd_result xdi_cuda_xtoken_row_deltas(const xd_launch *launch, const xd_xtoken_row_deltas_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_xtoken_row_deltas_kernel, *a);
}

/* One block per row. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_sums_kernel(const __grid_constant__ xd_xtoken_row_sums_args a) {
    const int64_t row = (int64_t)blockIdx.x;
    const double largest = __ddiv_rn(a.lse[row], a.temperature);
    xdi_cuda_sums<1, true> mine;
    for (int64_t v = (int64_t)threadIdx.x; v < a.columns; v += XDI_CUDA_TEAM_BLOCK) {
        const double z = (double)xdi_cuda_element(a.logits, row, v);
        mine.add_wide(0, exp(__dsub_rn(__ddiv_rn(z, a.temperature), largest)));
    }
    const xdi_cuda_sums<1, true>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, row, totals);
}

static xd_result xdi_cuda_xtoken_row_sums(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->logits.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_row_sums_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_close_kernel(const __grid_constant__ xd_xtoken_close_args a) {
    const int64_t i = xdi_cuda_flat_index();
    const double kl = xdi_cuda_cell_value(a.fixed, a.cells, 0), sum = xdi_cuda_cell_value(a.fixed, a.cells, 1);
    if (i < a.count) a.out[i] = __dmul_rn(sum, a.scale);
    if (i == 0) xd_xtoken_close_chunk(&a, kl, sum);
}

static xd_result xdi_cuda_xtoken_close(const xd_launch *launch, const xd_xtoken_close_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_xtoken_close_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_logs_kernel(const __grid_constant__ xd_xtoken_row_sums_args a) {
    const int64_t row = xdi_cuda_flat_index();
    if (row >= a.logits.rows) return;
    a.lse[row] = xd_xtoken_row_log(a.lse[row], a.temperature, xdi_cuda_cell_value(true, a.cells, row));
}

static xd_result xdi_cuda_xtoken_row_logs(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->logits.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows), xdi_cuda_xtoken_row_logs_kernel, *a);
}

/* ---- products with a projection: one warp per cell; the transposed product: one block per row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_product_kernel(const __grid_constant__ xd_xtoken_product_args a) {
    const int64_t cell = xdi_cuda_team_row<XDI_CUDA_WARP>();
    const xd_xtoken_projection &m = a.projection;
    if (cell >= a.rows.rows * a.k) return;
    const int64_t row = cell / a.k, column = a.ids ? a.ids[cell % a.k] : cell % a.k;
    if (column < 0 || column >= m.teacher_size) return;
    const int64_t begin = m.column_begin[column], end = m.column_begin[column + 1];
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t e = begin + xdi_cuda_team_thread<XDI_CUDA_WARP>(); e < end; e += XDI_CUDA_WARP) {
        const int64_t v = m.student_id[e] - a.first;
        if (v < 0 || v >= a.columns) continue;
        mine.add_wide(0, __dmul_rn((double)m.column_weight[e], (double)xdi_cuda_element(a.rows, row, v)));
    }
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() == 0) xdi_cuda_cell_join(a.cells, cell, totals);
}

static xd_result xdi_cuda_xtoken_product(const xd_launch *launch, const xd_xtoken_product_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->rows.rows * a->k == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->rows.rows * a->k, XDI_CUDA_WARP),
                               xdi_cuda_xtoken_product_kernel<FIXED>, *a);
    })
}

/* The index of an id in an ascending list; -1: it is not there. */
static __device__ inline int64_t xdi_cuda_xtoken_place(const int64_t *ids, int64_t k, int64_t id) {
    if (!ids) return id;
    const int64_t at = xdi_cuda_lower_bound(ids, k, id);
    return at < k && ids[at] == id ? at : -1;
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_product_back_kernel(const __grid_constant__ xd_xtoken_product_args a) {
    const int64_t row = (int64_t)blockIdx.x, *begin = a.projection.row_begin + a.first;
    for (int64_t c = (int64_t)threadIdx.x; c < a.rows.cols; c += XDI_CUDA_TEAM_BLOCK) {
        const int64_t end = c < a.columns ? begin[c + 1] : 0;
        double sum = 0.0;
        for (int64_t e = c < a.columns ? begin[c] : 0; e < end; e++) {
            const int64_t j = xdi_cuda_xtoken_place(a.ids, a.k, a.projection.teacher_id[e]);
            if (j < 0) continue;
            sum = __dadd_rn(sum, __dmul_rn((double)a.projection.weight[e], a.weight[row * a.k + j]));
        }
        xdi_cuda_set_element(a.rows, row, c, (float)sum);
    }
}

static xd_result xdi_cuda_xtoken_product_back(const xd_launch *launch, const xd_xtoken_product_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->rows.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->rows.rows, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_product_back_kernel, *a);
}

static xd_result xdi_cuda_xtoken_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_slots_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_settle_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_row_deltas_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_row_sums_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_close_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_product_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_product_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_product_back_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_row_logs_kernel);
}

/* The entries of sums; the files after this one add theirs. */
static xd_xtoken_kernels xdi_cuda_xtoken_table() {
    xd_xtoken_kernels kernels = {};
    kernels.row_deltas = xdi_cuda_xtoken_row_deltas;
    kernels.close = xdi_cuda_xtoken_close;
    kernels.slots = xdi_cuda_xtoken_slots;
    kernels.settle = xdi_cuda_xtoken_settle;
    kernels.row_sums = xdi_cuda_xtoken_row_sums;
    kernels.row_logs = xdi_cuda_xtoken_row_logs;
    kernels.product = xdi_cuda_xtoken_product;
    kernels.product_back = xdi_cuda_xtoken_product_back;
    return kernels;
}

/* >>cuda/xtoken_project.cu */

/* Projected losses: the matrix in J, the student's sums of a tile's chunks, deltas. kernel/cpu/xtoken.c is the reference. */

/* ---- probabilities ---- */

/* e^(z / temperature - lse) of a row. */
struct xdi_cuda_xtoken_power {
    float base, factor, rest; /* 2^((z - base) factor - rest) */

    __device__ void set(double lse, double temperature) {
        const double most = 3.4e38, scaled = __dmul_rn(lse, temperature);
        base = (float)(fabs(scaled) > most && isfinite(lse) ? copysign(most, scaled) : scaled);
        factor = xdi_cuda_factor(XDI_CUDA_LOG2E / temperature);
        rest = isfinite(lse) ? (float)__dmul_rn(__dsub_rn(lse, __ddiv_rn((double)base, temperature)), XDI_CUDA_LOG2E) : 0.0f;
    }
    __device__ float operator()(float z) const {
        return xdi_cuda_power(__fsub_rn(__fmul_rn(__fsub_rn(z, base), factor), rest));
    }
};

/* The rows of a place of the call. */
struct xdi_cuda_xtoken_range {
    int64_t begin, end;

    __device__ xdi_cuda_xtoken_range(int64_t first, int64_t last) : begin(first), end(last) {}
    __device__ xdi_cuda_xtoken_range(const xd_xtoken_rows &x, int64_t place)
        : begin(x.begin[place] - x.begin[0]), end(x.begin[place + 1] - x.begin[0]) {}
};

/* ---- prepare: the student ids of this shard that have entries in J, and these entries ---- */

enum { XDI_CUDA_MATRIX_SEGMENT = 1024, XDI_CUDA_MATRIX_EACH = XDI_CUDA_MATRIX_SEGMENT / XDI_CUDA_TEAM_BLOCK };

struct xdi_cuda_matrix_entry {
    int32_t slot; /* in J */
    float weight;
};

/* A student id of this shard that has entries in J. Most have one. A load of 16 bytes. */
struct alignas(16) xdi_cuda_matrix_id {
    xdi_cuda_matrix_entry entry; /* the first */
    int32_t column;              /* of the logits */
    uint32_t others;             /* where the other entries begin, of which the one before has the count as its slot; 0: none */
};

enum { XDI_CUDA_MATRIX_HERE = 2 };

/* A column of J: its entries of this shard, the first of them here. */
struct alignas(16) xdi_cuda_matrix_cell {
    int64_t begin;
    int32_t count, unused;
    int32_t column[XDI_CUDA_MATRIX_HERE]; /* of the logits */
    float weight[XDI_CUDA_MATRIX_HERE];
};

/* What prepared memory holds. A segment is so many columns of the shard. */
struct xdi_cuda_matrix {
    int64_t segments;
    xdi_cuda_matrix_id *ids;     /* ascending */
    xdi_cuda_matrix_cell *cells; /* [k] */
    int64_t *counts;             /* [segments] entries in the upper half, ids in the lower */
    int32_t *first;              /* [segments + 1] the segment's first id */
    int32_t *places;             /* [teacher_size] slots of teacher ids in J, or -1 */
    xdi_cuda_matrix_entry *entries;
    int64_t bytes;

    xdi_cuda_matrix() = default;
    __host__ __device__ explicit xdi_cuda_matrix(const xd_xtoken_matrix &m) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(m.prepared);
        uintptr_t at = start + (16 - start % 16) % 16;
        segments = (m.columns + XDI_CUDA_MATRIX_SEGMENT - 1) / XDI_CUDA_MATRIX_SEGMENT;
        at = take(at, m.columns, &ids);
        at = take(at, m.k, &cells);
        at = take(at, segments, &counts);
        at = take(at, segments + 1, &first);
        at = take(at, m.projection.teacher_size, &places);
        at = take(at + (8 - at % 8) % 8, m.projection.entries, &entries);
        bytes = (int64_t)(at - start) + 16;
    }
    template <typename T> static __host__ __device__ uintptr_t take(uintptr_t at, int64_t count, T **out) {
        *out = reinterpret_cast<T *>(at);
        return at + (uintptr_t)count * sizeof(T);
    }
};

static size_t xdi_cuda_xtoken_matrix_bytes(const xd_xtoken_matrix *m) {
    return (size_t)xdi_cuda_matrix(*m).bytes;
}

static int64_t xdi_cuda_xtoken_project_scratch(int64_t, bool) {
    return 0;
}

/* Of a thread's columns, which lie side by side: entries in the upper half, ids in the lower. */
static __device__ inline uint64_t xdi_cuda_matrix_count(const xd_xtoken_matrix &m, const xdi_cuda_matrix &p, int64_t v,
                                                        int *entries) {
    const xd_xtoken_projection &from = m.projection;
    uint64_t count = 0;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_EACH; i++) {
        const int64_t id = m.first + v + i;
        entries[i] = 0;
        if (v + i >= m.columns) continue;
        for (int64_t e = from.row_begin[id]; e < from.row_begin[id + 1]; e++) entries[i] += p.places[from.teacher_id[e]] >= 0;
        count += ((uint64_t)entries[i] << 32) + (entries[i] > 0 ? 1u : 0u);
    }
    return count;
}

static __device__ inline int64_t xdi_cuda_matrix_column() {
    return (int64_t)blockIdx.x * XDI_CUDA_MATRIX_SEGMENT + (int64_t)threadIdx.x * XDI_CUDA_MATRIX_EACH;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_matrix_count_kernel(const __grid_constant__ xd_xtoken_matrix m) {
    const xdi_cuda_matrix p(m);
    int entries[XDI_CUDA_MATRIX_EACH];
    const uint64_t mine = xdi_cuda_matrix_count(m, p, xdi_cuda_matrix_column(), entries);
    const uint64_t all = xdi_cuda_block_reduce(mine, (uint64_t)0, xdi_cuda_add());
    if (threadIdx.x == 0) p.counts[blockIdx.x] = (int64_t)all;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_matrix_fill_kernel(const __grid_constant__ xd_xtoken_matrix m) {
    const xdi_cuda_matrix p(m);
    const int64_t v = xdi_cuda_matrix_column(), segment = (int64_t)blockIdx.x;
    int entries[XDI_CUDA_MATRIX_EACH];
    uint64_t before = 0, total;
    for (int64_t s = (int64_t)threadIdx.x; s < segment; s += XDI_CUDA_TEAM_BLOCK) before += (uint64_t)p.counts[s];
    before = xdi_cuda_block_reduce(before, (uint64_t)0, xdi_cuda_add());
    const uint64_t mine = xdi_cuda_matrix_count(m, p, v, entries);
    const uint64_t at = before + xdi_cuda_select_scan<XDI_CUDA_TEAM_BLOCK>(mine, &total);
    int64_t id = (int64_t)(at & 0xffffffffu), to = (int64_t)(at >> 32);
    if (threadIdx.x == 0) p.first[segment] = (int32_t)(before & 0xffffffffu);
    if (threadIdx.x == 0 && segment + 1 == p.segments) p.first[segment + 1] = (int32_t)((before + total) & 0xffffffffu);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_EACH; i++) {
        const int64_t row = m.first + v + i;
        if (entries[i] == 0) continue;
        const int64_t begin = to;
        for (int64_t e = m.projection.row_begin[row]; e < m.projection.row_begin[row + 1]; e++) {
            const int32_t slot = p.places[m.projection.teacher_id[e]];
            const xdi_cuda_matrix_entry entry = { slot, m.projection.weight[e] };
            if (slot < 0) continue;
            if (to == begin) p.ids[id].entry = entry;
            p.entries[to++] = entry;
        }
        p.entries[begin].slot = entries[i] - 1; /* the entry itself is with its id */
        p.ids[id].column = (int32_t)(v + i);
        p.ids[id++].others = entries[i] > 1 ? (uint32_t)(begin + 1) : 0;
    }
}

/* One thread per column of J. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_matrix_cells_kernel(const __grid_constant__ xd_xtoken_matrix m) {
    const int64_t j = xdi_cuda_flat_index();
    if (j >= m.k) return;
    const xd_xtoken_projection &from = m.projection;
    const int64_t column = m.ids[j], begin = from.column_begin[column], all = from.column_begin[column + 1] - begin;
    const int64_t first = xdi_cuda_lower_bound(from.student_id + begin, all, m.first);
    const int64_t count = xdi_cuda_lower_bound(from.student_id + begin, all, m.first + m.columns) - first;
    xdi_cuda_matrix_cell cell = {};
    cell.begin = begin + first;
    cell.count = (int32_t)count;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_HERE; i++) {
        if (i >= count) continue;
        cell.column[i] = (int32_t)(from.student_id[cell.begin + i] - m.first);
        cell.weight[i] = from.column_weight[cell.begin + i];
    }
    xdi_cuda_matrix(m).cells[j] = cell;
}

static xd_result xdi_cuda_xtoken_prepare(const xd_launch *launch, const xd_xtoken_matrix *m) {
    const xdi_cuda_matrix p(*m);
    const xd_xtoken_slots_args a = { m->ids, m->k, m->projection.teacher_size, p.places };
    const xdi_cuda_grid grid = xdi_cuda_grid_of(p.segments, XDI_CUDA_TEAM_BLOCK);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(xdi_cuda_xtoken_slots(launch, &a));
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(m->k), xdi_cuda_matrix_cells_kernel, *m));
    if (m->columns == 0) return XD_OK;
    XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_matrix_count_kernel, *m));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_matrix_fill_kernel, *m);
}

/* (M dy) of one of the ids that have entries in J. */
static __device__ inline double xdi_cuda_matrix_back(const xdi_cuda_matrix &p, const xdi_cuda_matrix_id &id, double first,
                                                     const double *dy) {
    double sum = __dmul_rn((double)id.entry.weight, first);
    if (id.others == 0) return sum;
    const xdi_cuda_matrix_entry *others = p.entries + id.others;
    const int count = others[-1].slot;
    for (int i = 0; i < count; i++) {
        const xdi_cuda_matrix_entry entry = others[i];
        sum = __dadd_rn(sum, __dmul_rn((double)entry.weight, dy[entry.slot]));
    }
    return sum;
}

/* ---- project: a thread a cell; the warp shares cells whose columns have many entries ---- */

enum { XDI_CUDA_PROJECT_ROWS = 32, XDI_CUDA_PROJECT_LONG = 48, XDI_CUDA_PROJECT_AHEAD = 4 };

/* Cells of a thread at a time: as many as find room in registers. */
template <bool FIXED> struct xdi_cuda_project_each {
    enum { COUNT = FIXED ? 2 : 4, BATCHES = FIXED ? 2 : 4, ALL = COUNT * BATCHES * XDI_CUDA_TEAM_BLOCK };
};

struct xdi_cuda_project_row {
    xdi_cuda_xtoken_power power;
    int64_t row;
};

/* The entries begin, begin + step, ... of a column of the matrix times the probabilities of rows. */
template <bool FIXED>
static __device__ inline void xdi_cuda_project_add(const xd_xtoken_project_args &a, const xdi_cuda_project_row *rows, int count,
                                                   int64_t begin, int64_t end, int64_t step, xdi_cuda_sums<1, FIXED> *sum) {
    const xd_xtoken_projection &m = a.matrix.projection;
    for (int64_t first = begin; first < end; first += XDI_CUDA_PROJECT_AHEAD * step) {
        int32_t id[XDI_CUDA_PROJECT_AHEAD];
        float weight[XDI_CUDA_PROJECT_AHEAD], z[XDI_CUDA_PROJECT_AHEAD];
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_PROJECT_AHEAD; i++) {
            const bool has = first + i * step < end;
            id[i] = has ? m.student_id[first + i * step] : -1;
            weight[i] = has ? m.column_weight[first + i * step] : 0.0f;
        }
        for (int r = 0; r < count; r++) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_PROJECT_AHEAD; i++)
                z[i] = id[i] >= 0 ? xdi_cuda_element(a.x.logits, rows[r].row, id[i] - a.x.first) : 0.0f;
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_PROJECT_AHEAD; i++)
                if (id[i] >= 0) sum->add_wide(0, __dmul_rn((double)weight[i], (double)rows[r].power(z[i])));
        }
    }
}

/* The sums of the lanes' columns that have many entries, one after the other by the whole warp. */
template <bool FIXED>
static __device__ inline void xdi_cuda_project_long(const xd_xtoken_project_args &a, const xdi_cuda_project_row *rows, int count,
                                                    const xdi_cuda_matrix_cell &cell, xdi_cuda_sums<1, FIXED> *mine) {
    typedef xdi_cuda_sums<1, FIXED> sums;
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    unsigned left = __ballot_sync(0xffffffffu, cell.count > XDI_CUDA_PROJECT_LONG);
    for (; left != 0; left &= left - 1) {
        const int owner = __ffs((int)left) - 1;
        const int64_t from = __shfl_sync(0xffffffffu, cell.begin, owner), to = from + __shfl_sync(0xffffffffu, cell.count, owner);
        sums part;
        xdi_cuda_project_add<FIXED>(a, rows, count, from + lane, to, XDI_CUDA_WARP, &part);
        const typename sums::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(part);
        if (lane == owner) mine->whole = typename sums::join()(mine->whole, totals);
    }
}

/* What a thread's columns have of some rows. The entries that cells hold are under way for all before the first is used. */
template <bool FIXED, int EACH>
static __device__ inline void xdi_cuda_project_rows(const xd_xtoken_project_args &a, const xdi_cuda_project_row *rows, int count,
                                                    const xdi_cuda_matrix_cell (&cells)[EACH], xdi_cuda_sums<1, FIXED> (&mine)[EACH]) {
    enum { HERE = XDI_CUDA_MATRIX_HERE };
    const bool wide = a.x.logits.dtype == XD_DTYPE_F32;
    XD_UNROLL_N(1)
    for (int r = 0; r < count; r++) {
        const xdi_cuda_xtoken_power power = rows[r].power;
        const void *row = xdi_cuda_row_of(a.x.logits, rows[r].row);
        uint32_t asked[EACH][HERE];
        XD_UNROLL
        for (int i = 0; i < EACH * HERE; i++) {
            const xdi_cuda_matrix_cell &cell = cells[i / HERE];
            asked[i / HERE][i % HERE] = 0;
            if (i % HERE < cell.count && cell.count <= XDI_CUDA_PROJECT_LONG)
                asked[i / HERE][i % HERE] = xdi_cuda_ask(row, wide, cell.column[i % HERE]);
        }
        XD_UNROLL
        for (int i = 0; i < EACH * HERE; i++) {
            const xdi_cuda_matrix_cell &cell = cells[i / HERE];
            const float p = power(xdi_cuda_asked(asked[i / HERE][i % HERE], wide));
            if (i % HERE < cell.count && cell.count <= XDI_CUDA_PROJECT_LONG)
                mine[i / HERE].add_wide(0, __dmul_rn((double)cell.weight[i % HERE], (double)p));
        }
    }
    int most = 0;
    XD_UNROLL
    for (int i = 0; i < EACH; i++) most = cells[i].count > most ? cells[i].count : most;
    if (!__any_sync(0xffffffffu, most > HERE)) return;
    XD_UNROLL_N(1)
    for (int i = 0; i < EACH; i++) {
        xdi_cuda_matrix_cell cell = {};
        xdi_cuda_sums<1, FIXED> sum;
        XD_UNROLL
        for (int j = 0; j < EACH; j++)
            if (i == j) cell = cells[j];
        if (cell.count <= XDI_CUDA_PROJECT_LONG)
            xdi_cuda_project_add<FIXED>(a, rows, count, cell.begin + HERE, cell.begin + cell.count, 1, &sum);
        xdi_cuda_project_long<FIXED>(a, rows, count, cell, &sum);
        XD_UNROLL
        for (int j = 0; j < EACH; j++)
            if (i == j) mine[j].whole = typename xdi_cuda_sums<1, FIXED>::join()(mine[j].whole, sum.whole);
    }
}

/* Adds sums to cells, all of which have been asked for before the first is written. */
template <int EACH>
static __device__ inline void xdi_cuda_project_join(double *cells, int64_t count, const xdi_cuda_sums<1, false> (&mine)[EACH]) {
    double before[EACH];
    XD_UNROLL
    for (int i = 0; i < EACH; i++) before[i] = i * XDI_CUDA_TEAM_BLOCK < count ? cells[i * XDI_CUDA_TEAM_BLOCK] : 0.0;
    XD_UNROLL
    for (int i = 0; i < EACH; i++)
        if (i * XDI_CUDA_TEAM_BLOCK < count) cells[i * XDI_CUDA_TEAM_BLOCK] = __dadd_rn(before[i], mine[i].whole.sum[0]);
}

template <int EACH>
static __device__ inline void xdi_cuda_project_join(double *cells, int64_t count, const xdi_cuda_sums<1, true> (&mine)[EACH]) {
    XD_UNROLL
    for (int i = 0; i < EACH; i++)
        if (i * XDI_CUDA_TEAM_BLOCK < count) xdi_cuda_cell_join(cells, i * XDI_CUDA_TEAM_BLOCK, mine[i].whole);
}

/* A block has a part of a chunk's cells, whose rows it takes up once. */
template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : XDI_CUDA_BLOCKS(3))
    xdi_cuda_xtoken_project_kernel(const __grid_constant__ xd_xtoken_project_args a, int64_t parts) {
    typedef xdi_cuda_project_each<FIXED> each;
    enum { COUNT = each::COUNT, STEP = COUNT * XDI_CUDA_TEAM_BLOCK, WORDS = FIXED ? 2 : 1 };
    XD_SHARED(xdi_cuda_project_row, rows, [XDI_CUDA_PROJECT_ROWS]);
    const xdi_cuda_matrix m(a.matrix);
    const int64_t place = (int64_t)blockIdx.x / parts, k = a.matrix.k, begin = ((int64_t)blockIdx.x - place * parts) * each::ALL;
    const xdi_cuda_xtoken_range range(a.x, place);
    for (int64_t first = range.begin; first < range.end; first += XDI_CUDA_PROJECT_ROWS) {
        const int64_t left = range.end - first;
        const int count = left < XDI_CUDA_PROJECT_ROWS ? (int)left : (int)XDI_CUDA_PROJECT_ROWS;
        __syncthreads(); /* the rows before are no longer read */
        if ((int)threadIdx.x < count) {
            xdi_cuda_project_row &row = rows[threadIdx.x];
            row.row = a.x.rows[first + (int64_t)threadIdx.x];
            row.power.set(a.x.lse[row.row], a.x.temperature);
        }
        __syncthreads();
        XD_UNROLL_N(1)
        for (int64_t j = begin + (int64_t)threadIdx.x; j - (int64_t)threadIdx.x < k && j < begin + each::ALL; j += STEP) {
            xdi_cuda_matrix_cell cells[COUNT];
            xdi_cuda_sums<1, FIXED> mine[COUNT];
            XD_UNROLL
            for (int i = 0; i < COUNT; i++) {
                cells[i] = {};
                if (j + i * XDI_CUDA_TEAM_BLOCK < k) cells[i] = xdi_cuda_load_whole(m.cells + j + i * XDI_CUDA_TEAM_BLOCK);
            }
            xdi_cuda_project_rows<FIXED, COUNT>(a, rows, count, cells, mine);
            xdi_cuda_project_join<COUNT>(a.cells + (place * k + j) * WORDS, k - j, mine);
        }
    }
}

static xd_result xdi_cuda_xtoken_project(const xd_launch *launch, const xd_xtoken_project_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        const int64_t each = xdi_cuda_project_each<FIXED>::ALL, parts = (a->matrix.k + each - 1) / each;
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count * parts, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_project_kernel<FIXED>, *a, parts);
    })
}

/* ---- delta: one block per row; reads the row where the matrix has entries in J ---- */

/* An id with what it is multiplied by. */
struct xdi_cuda_delta_id {
    xdi_cuda_matrix_id id;
    double dy; /* of its first entry */
    uint32_t z; /* as it lies in memory */
};

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : XDI_CUDA_BLOCKS(3))
    xdi_cuda_xtoken_delta_kernel(const __grid_constant__ xd_xtoken_delta_args a) {
    const xdi_cuda_matrix p(a.matrix);
    const int64_t i = (int64_t)blockIdx.x, row = a.x.rows[i], place = a.x.places[i];
    const double largest = a.chunks[place].largest, *dy = a.dy + place * a.matrix.k;
    if (largest == 0.0 || a.chunks[place].alone || p.segments == 0) return;
    const int64_t ids = p.first[p.segments];
    const bool wide = a.x.logits.dtype == XD_DTYPE_F32;
    const void *from = xdi_cuda_row_of(a.x.logits, row);
    xdi_cuda_xtoken_power power;
    xdi_cuda_sums<1, FIXED> mine;
    power.set(a.x.lse[row], a.x.temperature);
    xdi_cuda_each_ahead<XDI_CUDA_TEAM_BLOCK, 4>(
        ids, [&](int64_t i) { return xdi_cuda_load_whole(p.ids + i); },
        [&](const xdi_cuda_matrix_id &id) -> xdi_cuda_delta_id {
            return { id, dy[id.entry.slot], xdi_cuda_ask(from, wide, id.column) };
        },
        [&](int64_t, const xdi_cuda_delta_id &x) {
            const double h = xdi_cuda_matrix_back(p, x.id, x.dy, dy);
            mine.add_wide(0, __dmul_rn(__ddiv_rn(h, largest), (double)power(xdi_cuda_asked(x.z, wide))));
        });
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, i, totals);
}

static xd_result xdi_cuda_xtoken_delta(const xd_launch *launch, const xd_xtoken_delta_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->x.count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_delta_kernel<FIXED>, *a);
    })
}

static xd_result xdi_cuda_project_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_matrix_cells_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_matrix_count_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_matrix_fill_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_project_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_project_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_delta_kernel<true>));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_delta_kernel<false>);
}

static void xdi_cuda_project_fill(xd_xtoken_kernels *kernels) {
    kernels->matrix_bytes = xdi_cuda_xtoken_matrix_bytes;
    kernels->project_scratch = xdi_cuda_xtoken_project_scratch;
    kernels->prepare = xdi_cuda_xtoken_prepare;
    kernels->project = xdi_cuda_xtoken_project;
    kernels->delta = xdi_cuda_xtoken_delta;
}

/* >>cuda/xtoken_divergence.cu */

/* Projected losses: the teacher's sums of a tile's chunks, and divergences. kernel/cpu/xtoken.c is the reference. */

/* ---- target: one block per chunk, its rows in order; the chosen logits of a row are gathered once ---- */

/* A block, and what of its lists stays on the chip. */
enum { XDI_CUDA_LISTS_TEAM = 1024, XDI_CUDA_LISTS_AHEAD = 4, XDI_CUDA_BOTH_AHEAD = 3, XDI_CUDA_LISTS_KEPT = 8 * XDI_CUDA_LISTS_TEAM };

static int64_t xdi_cuda_lists_kept(int64_t k) {
    return k < XDI_CUDA_LISTS_KEPT ? k : (int64_t)XDI_CUDA_LISTS_KEPT;
}

/* A row's chosen logits, of which the first stay on the chip. A thread reads only what it has written. */
struct xdi_cuda_target_row {
    const xd_xtoken_target_args &a;
    int64_t row;
    float *kept;

    __device__ float again(int64_t j) const {
        return j < XDI_CUDA_LISTS_KEPT ? kept[j] : xdi_cuda_element(a.x.logits, row, a.ids[j]);
    }
    /* On every thread of the block; NaN for a row that is not finite. */
    __device__ double log_sum_exp(float factor) const {
        const bool wide = a.x.logits.dtype == XD_DTYPE_F32;
        const void *from = xdi_cuda_row_of(a.x.logits, row);
        const int finite = a.x.finite ? (int)a.x.finite[row] : 1;
        float max = -INFINITY;
        double sum = 0.0;
        xdi_cuda_each_ahead<XDI_CUDA_LISTS_TEAM, XDI_CUDA_LISTS_AHEAD>(
            a.k, [&](int64_t j) { return a.ids[j]; }, [&](int64_t id) { return xdi_cuda_ask(from, wide, id); },
            [&](int64_t j, uint32_t asked) {
                const float z = xdi_cuda_asked(asked, wide);
                max = fmaxf(max, z);
                if (j < XDI_CUDA_LISTS_KEPT) kept[j] = z;
            });
        max = xdi_cuda_block_reduce(max, -INFINITY, xdi_cuda_larger());
        for (int64_t j = (int64_t)threadIdx.x; j < a.k; j += XDI_CUDA_LISTS_TEAM)
            sum = __dadd_rn(sum, (double)xdi_cuda_exp_of(__fsub_rn(again(j), max), factor));
        sum = xdi_cuda_block_sum(sum);
        return !finite ? (double)NAN : (double)max / a.x.temperature + log(sum);
    }
};

/* Adds to a thread's cells of a row, all of which have been asked for before the first is written. */
static __device__ inline void xdi_cuda_target_add(const xdi_cuda_target_row &row, double *cells, double inverse, double lse) {
    xdi_cuda_each_ahead<XDI_CUDA_LISTS_TEAM, XDI_CUDA_LISTS_AHEAD>(
        row.a.k, [=](int64_t j) { return cells[j]; }, xdi_cuda_same(), [&](int64_t j, double before) {
            cells[j] = __dadd_rn(before, __dsub_rn(__dmul_rn((double)row.again(j), inverse), lse));
        });
}

static __device__ inline void xdi_cuda_target_put(const xdi_cuda_target_row &row, double *cells, double inverse, double lse) {
    for (int64_t j = (int64_t)threadIdx.x; j < row.a.k; j += XDI_CUDA_LISTS_TEAM)
        xdi_cuda_cell_add<true>(cells, j, __dsub_rn(__dmul_rn((double)row.again(j), inverse), lse));
}

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_LISTS_TEAM)
    xdi_cuda_xtoken_target_kernel(const __grid_constant__ xd_xtoken_target_args a) {
    XD_DYN_SHARED(float, kept);
    const int64_t place = (int64_t)blockIdx.x;
    const xdi_cuda_xtoken_range range(a.x, place);
    const float factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.x.temperature);
    const double inverse = 1.0 / a.x.temperature;
    double *cells = a.cells + place * a.k * (FIXED ? 2 : 1);
    for (int64_t i = range.begin; i < range.end; i++) {
        const xdi_cuda_target_row row = { a, a.x.rows[i], kept };
        const double lse = row.log_sum_exp(factor);
        if (FIXED)
            xdi_cuda_target_put(row, cells, inverse, lse);
        else
            xdi_cuda_target_add(row, cells, inverse, lse);
    }
}

static xd_result xdi_cuda_xtoken_target(const xd_launch *launch, const xd_xtoken_target_args *a) {
    const size_t bytes = (size_t)xdi_cuda_lists_kept(a->k) * sizeof(float);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_LISTS_TEAM, bytes),
                               xdi_cuda_xtoken_target_kernel<FIXED>, *a);
    })
}

/* ---- divergence: one block per chunk; its two lists are read once ---- */

/* What the lists of a chunk have in common. */
struct xdi_cuda_divergence {
    xdi_cuda_top student, teacher;
    double mass;
};

struct xdi_cuda_divergence_join {
    __device__ xdi_cuda_divergence operator()(xdi_cuda_divergence a, const xdi_cuda_divergence &b) const {
        a.student = xdi_cuda_top_join()(a.student, b.student);
        a.teacher = xdi_cuda_top_join()(a.teacher, b.teacher);
        a.mass = a.mass + b.mass;
        return a;
    }
};

/* Of both lists. */
struct alignas(16) xdi_cuda_both {
    double q, a;
};

struct xdi_cuda_both_add {
    __device__ xdi_cuda_both operator()(const xdi_cuda_both &x, const xdi_cuda_both &y) const {
        return { x.q + y.q, x.a + y.a };
    }
};

/* The lists of a chunk, of which the first entries are on the chip once they have been read. A thread reads only what it has
 * written. */
struct xdi_cuda_both_lists {
    double *q, *a;
    xdi_cuda_both *kept;
    int64_t k;

    /* The means of both sides. */
    __device__ xdi_cuda_divergence read(double student, double teacher) const {
        const xdi_cuda_top top = { -(double)INFINITY, INT64_MAX };
        xdi_cuda_divergence mine = { top, top, 0.0 };
        xdi_cuda_each_ahead<XDI_CUDA_LISTS_TEAM, XDI_CUDA_BOTH_AHEAD>(
            k, [&](int64_t j) -> xdi_cuda_both { return { q[j], a[j] }; }, xdi_cuda_same(),
            [&](int64_t j, const xdi_cuda_both &x) {
                const double mean = __dmul_rn(x.q, student), log_mean = __dmul_rn(x.a, teacher);
                const xdi_cuda_divergence one = { { mean, j }, { log_mean, j }, mean };
                put(j, { mean, log_mean });
                mine = xdi_cuda_divergence_join()(mine, one);
            });
        return mine;
    }
    __device__ void put(int64_t j, const xdi_cuda_both &x) const {
        if (j < XDI_CUDA_LISTS_KEPT)
            kept[j] = x;
        else
            q[j] = x.q, a[j] = x.a;
    }
    __device__ xdi_cuda_both at(int64_t j) const {
        if (j < XDI_CUDA_LISTS_KEPT) return kept[j];
        return { q[j], a[j] };
    }
    template <typename Use> __device__ void each(Use use) const {
        XD_UNROLL_N(1)
        for (int64_t j = (int64_t)threadIdx.x; j < k; j += XDI_CUDA_LISTS_TEAM) use(j, at(j));
    }
};

/* xd_xtoken_slope with the inverse of z. sums: the value and sum of slope r. */
static __device__ inline double xdi_cuda_xtoken_slope(double q, double a, double inverse, bool reverse, xdi_cuda_both *sums) {
    const double r = __dmul_rn(q, inverse), shifted = __dadd_rn(r, XD_XTOKEN_EPSILON), s = log(shifted);
    const double target = reverse ? shifted : exp(a);
    const double ds = reverse ? target * (s - a + 1.0) : -target;
    if (reverse || target != 0.0) sums->q += target * (reverse ? s - a : a - s);
    const double slope = reverse ? s - a + 1.0 : ds / shifted;
    sums->a += slope * r;
    return slope;
}

/* ln sum e^a, of which the largest is known. */
static __device__ inline double xdi_cuda_divergence_lse(const xdi_cuda_both_lists &lists, double max) {
    double sum = 0.0;
    lists.each([&](int64_t, const xdi_cuda_both &x) { sum += (double)expf((float)__dsub_rn(x.a, max)); });
    return max + log(xdi_cuda_block_sum(sum));
}

static __global__ void __launch_bounds__(XDI_CUDA_LISTS_TEAM)
    xdi_cuda_xtoken_divergence_kernel(const __grid_constant__ xd_xtoken_divergence_args args) {
    XD_DYN_SHARED(xdi_cuda_both, kept);
    const int64_t k = args.k, start = (int64_t)blockIdx.x * k;
    const xdi_cuda_both_lists lists = { args.student + start, args.teacher + start, kept, k };
    const xdi_cuda_top top = { -(double)INFINITY, INT64_MAX };
    const xdi_cuda_both zero = { 0.0, 0.0 };
    xd_xtoken_chunk *c = args.chunks + blockIdx.x;
    xdi_cuda_both sums = zero;
    double largest = 0.0;
    if (!c->compared) {
        for (int64_t j = (int64_t)threadIdx.x; j < k; j += XDI_CUDA_LISTS_TEAM) lists.q[j] = 0.0;
        return;
    }
    const xdi_cuda_divergence mine = lists.read(1.0 / c->student, 1.0 / c->teacher), none = { top, top, 0.0 };
    const xdi_cuda_divergence all = xdi_cuda_block_reduce(mine, none, xdi_cuda_divergence_join());
    const double lse = args.normalise ? xdi_cuda_divergence_lse(lists, all.teacher.value) : 0.0;
    const double z = all.mass + XD_XTOKEN_EPSILON, inverse = 1.0 / z;
    lists.each([&](int64_t j, const xdi_cuda_both &x) {
        const double slope = xdi_cuda_xtoken_slope(x.q, __dsub_rn(x.a, lse), inverse, args.reverse, &sums);
        lists.put(j, { slope, x.a });
    });
    sums = xdi_cuda_block_reduce(sums, zero, xdi_cuda_both_add());
    const double factor = xd_xtoken_chunk_factor(c, sums.q);
    lists.each([&](int64_t j, const xdi_cuda_both &x) {
        const double dy = xd_xtoken_scaled(__dmul_rn(__dsub_rn(x.q, sums.a), inverse), factor);
        lists.q[j] = dy;
        if (fabs(dy) > largest) largest = fabs(dy);
    });
    largest = xdi_cuda_block_reduce(largest, 0.0, xdi_cuda_larger());
    if (threadIdx.x != 0) return;
    c->value = sums.q;
    c->agree = all.student.at == all.teacher.at;
    c->largest = largest;
    c->delta = xd_xtoken_slope_delta(sums.a, z) * factor * c->student;
}

static xd_result xdi_cuda_xtoken_divergence(const xd_launch *launch, const xd_xtoken_divergence_args *a) {
    const size_t bytes = (size_t)xdi_cuda_lists_kept(a->k) * sizeof(xdi_cuda_both);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->place_count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_LISTS_TEAM, bytes),
                           xdi_cuda_xtoken_divergence_kernel, *a);
}

static xd_result xdi_cuda_divergence_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_target_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_target_kernel<false>));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(xdi_cuda_xtoken_divergence_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)(XDI_CUDA_LISTS_KEPT * sizeof(xdi_cuda_both))));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_divergence_kernel);
}

static void xdi_cuda_divergence_fill(xd_xtoken_kernels *kernels) {
    kernels->target = xdi_cuda_xtoken_target;
    kernels->divergence = xdi_cuda_xtoken_divergence;
}

/* >>cuda/xtoken_gradient.cu */

/* Gradients of losses across tokenizers. A warp works on a span of the columns of a chunk's rows after the other, without a barrier
 * of its block: what depends on the chunk alone is formed once for all rows. Reads the logits, and the gradient of a row that was
 * written before; writes once. */

enum {
    XDI_CUDA_GRADE_LINES = 8, /* rows at a time */
    XDI_CUDA_GRADE_TEAM = 128,
    XDI_CUDA_GRADE_WARPS = XDI_CUDA_GRADE_TEAM / XDI_CUDA_WARP,
    XDI_CUDA_GRADE_SPANS = 8 /* of a warp */
};

/* What a column's derivative comes from. */
enum xdi_cuda_grade_kind {
    XDI_CUDA_GRADE_NONE,   /* cross entropy alone */
    XDI_CUDA_GRADE_MATRIX, /* p (M dy - delta) / temperature */
    XDI_CUDA_GRADE_MEANS   /* scale u - p delta */
};

struct xdi_cuda_grade {
    xd_xtoken_gradient to;
    xdi_cuda_matrix matrix;
    const double *dy; /* [chunks, k] */
    int64_t k;
    const float *u; /* [chunks, columns] */
    const double *delta, *slopes;
    double scale;                  /* of u */
    const xd_xtoken_chunk *chunks; /* NULL: no row is skipped */
    bool one_chunk;                /* all rows are of the first */
    bool by_factor;                /* u's scale is also the chunk's factor */
    bool rest;                     /* rows of the logits, those that were written before are skipped */
    int64_t parts;                 /* blocks of a chunk */
};

/* What the elements of a row have in common; no gaps, as they are copied whole. */
struct xdi_cuda_grade_hard {
    xdi_cuda_xtoken_power one; /* at the temperature 1 */
    float ce;
    int32_t label;
};

struct xdi_cuda_grade_line {
    xdi_cuda_xtoken_power power; /* at the temperature */
    float delta;
    int64_t row;
    int32_t add, soft; /* flags */
};

struct xdi_cuda_grade_lines {
    xdi_cuda_grade_line line;
    xdi_cuda_grade_hard hard;
    int32_t unused;
};

/* A row of the call, or of the logits. */
static __device__ inline int64_t xdi_cuda_grade_row(const xdi_cuda_grade &f, int64_t i) {
    return f.rest ? i : f.to.x.rows[i];
}

static __device__ inline void xdi_cuda_grade_begin(const xdi_cuda_grade &f, int64_t i, double per_delta,
                                                   xdi_cuda_grade_lines *w) {
    const xd_xtoken_rows &x = f.to.x;
    const double delta = f.delta ? f.delta[i] : 0.0;
    const int64_t row = xdi_cuda_grade_row(f, i);
    double ce = 0.0;
    *w = xdi_cuda_grade_lines();
    w->line.row = row;
    w->line.add = f.to.written[row] != 0;
    if (!w->line.add && f.to.ce_factor) ce = f.to.ce_factor[row] * f.to.ce_weight;
    if (f.slopes) ce -= f.slopes[i];
    w->hard.ce = (float)ce;
    w->line.delta = (float)(delta * per_delta);
    w->line.soft = f.dy || delta != 0.0;
    const int64_t label = ce != 0.0 ? xd_id_at(f.to.labels, row) - x.first : -1;
    w->hard.label = label >= 0 && label < x.columns ? (int32_t)label : -1;
    if (ce != 0.0) w->hard.one.set(f.to.lse_one[row], 1.0);
    if (w->line.soft) w->line.power.set(x.lse[row], x.temperature);
}

/* Adds the cross entropy. */
static __device__ inline void xdi_cuda_grade_add_hard(const xdi_cuda_grade_hard &hard, int c, const xdi_cuda_eight &z,
                                                      xdi_cuda_eight *out) {
    const float ce = hard.ce;
    const xdi_cuda_xtoken_power one = hard.one;
    const int label = hard.label - c;
    if (ce == 0.0f) return;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) out->at[i] = __fmaf_rn(ce, one(z.at[i]), out->at[i]);
    if (hard.label < 0 || (unsigned)label >= XDI_CUDA_EIGHT) return;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (i == label) out->at[i] = __fsub_rn(out->at[i], ce);
}

/* Adds the part of the divergence. slopes: M dy / temperature, or u. */
template <int KIND>
static __device__ inline void xdi_cuda_grade_soft(const xdi_cuda_grade_line &w, const xdi_cuda_eight &slopes, float scale,
                                                  const xdi_cuda_eight &z, xdi_cuda_eight *out) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
        const float p = w.soft ? w.power(z.at[i]) : 0.0f;
        if (KIND == XDI_CUDA_GRADE_MATRIX)
            out->at[i] = __fmaf_rn(p, __fsub_rn(slopes.at[i], w.delta), out->at[i]);
        else
            out->at[i] = __fadd_rn(out->at[i], __fmaf_rn(-p, w.delta, __fmul_rn(slopes.at[i], scale)));
    }
}

struct xdi_cuda_grade_asked {
    xdi_cuda_matrix_id id;
    double dy;
};

/* M dy / temperature of a segment's columns, by a warp. first, end: its ids. */
static __device__ inline void xdi_cuda_grade_slopes(const xdi_cuda_grade &f, int begin, int first, int end, const double *dy,
                                                    xdi_cuda_pack<float> *packs) {
    const xdi_cuda_matrix &m = f.matrix;
    const double inverse = 1.0 / f.to.x.temperature;
    const xdi_cuda_pack<float> zero = {};
    float *slopes = packs[0].at;
    __syncwarp(); /* the slopes before are no longer read */
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_SEGMENT / 4; i += XDI_CUDA_WARP) packs[i + (int)(threadIdx.x % XDI_CUDA_WARP)] = zero;
    __syncwarp();
    xdi_cuda_each_ahead<XDI_CUDA_WARP, 3>(
        end - first, [&](int64_t i) { return xdi_cuda_load_whole(m.ids + first + i); },
        [&](const xdi_cuda_matrix_id &id) -> xdi_cuda_grade_asked { return { id, dy[id.entry.slot] }; },
        [&](int64_t, const xdi_cuda_grade_asked &x) {
            slopes[x.id.column - begin] = (float)__dmul_rn(xdi_cuda_matrix_back(m, x.id, x.dy, dy), inverse);
        });
    __syncwarp();
}

/* What lies beyond the columns is 0. */
static __device__ inline void xdi_cuda_grade_trim(int count, xdi_cuda_eight *out) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (i >= count) out->at[i] = 0.0f;
}

/* What a warp has of a place's rows. T: the type of the logits. */
template <int KIND, typename T> struct xdi_cuda_grade_walk {
    /* Eights of a lane, of which so many are on their way at once. */
    enum { EIGHTS = 4, AHEAD = KIND == XDI_CUDA_GRADE_NONE ? 2 : 1, SPAN = EIGHTS * XDI_CUDA_EIGHT * XDI_CUDA_WARP };
    const xdi_cuda_grade &f;
    const float *u; /* of the place */
    const double *dy;
    float scale;
    xdi_cuda_pack<float> *packs; /* [SPAN / 4] slopes */

    /* What is on its way of eight columns. Nothing waits for it before the logits are widened. */
    struct coming {
        xdi_cuda_raw<T> logits;
        xdi_cuda_raw<float> u;
    };

    __device__ int column(int begin, int e) const {
        return begin + XDI_CUDA_EIGHT * (e * XDI_CUDA_WARP + (int)(threadIdx.x % XDI_CUDA_WARP));
    }
    __device__ int columns() const {
        return (int)f.to.x.columns;
    }
    __device__ bool is_whole(const void *row, int c) const {
        return xdi_cuda_is_aligned16(row) && c + XDI_CUDA_EIGHT <= columns();
    }
    __device__ void ask(const T *row, int c, coming *one) const {
        if (is_whole(row, c)) one->logits.load(row + c);
        if (KIND == XDI_CUDA_GRADE_MEANS && is_whole(u, c)) one->u.load(u + c);
    }
    template <typename X> __device__ xdi_cuda_eight take(const X *row, const xdi_cuda_raw<X> &raw, int c) const {
        if (is_whole(row, c)) return raw.widened();
        return c < columns() ? xdi_cuda_read(row, c, columns()) : xdi_cuda_eight();
    }
    /* to: the row of the gradient. */
    __device__ void write(const xdi_cuda_grade_line &w, const xdi_cuda_grade_hard &hard, void *to, int c, const xdi_cuda_eight &z,
                          const xdi_cuda_eight &slopes) const {
        const int end = w.add ? columns() : (int)f.to.rows.cols;
        const bool wide = f.to.rows.dtype == XD_DTYPE_F32;
        float *floats = static_cast<float *>(to);
        xdi_cuda_bf16 *halves = static_cast<xdi_cuda_bf16 *>(to);
        xdi_cuda_eight out = {};
        if (c >= end) return;
        if (w.add) out = wide ? xdi_cuda_read(floats, c, end) : xdi_cuda_read(halves, c, end);
        xdi_cuda_grade_add_hard(hard, c, z, &out);
        if (KIND != XDI_CUDA_GRADE_NONE) xdi_cuda_grade_soft<KIND>(w, slopes, scale, z, &out);
        if (c + XDI_CUDA_EIGHT > columns()) xdi_cuda_grade_trim(columns() > c ? columns() - c : 0, &out);
        if (wide)
            xdi_cuda_write(floats, c, end, out);
        else
            xdi_cuda_write(halves, c, end, out);
    }
    /* The span's columns from `begin` on. first, end: the ids of a segment. */
    __device__ void span(const xdi_cuda_grade_lines *lines, int count, int begin, int first, int end) const {
        XD_UNROLL_N(1)
        for (int r = 0; r < count; r++) {
            const T *row = xdi_cuda_row<T>(f.to.x.logits, lines[r].line.row);
            coming next[AHEAD];
            XD_UNROLL
            for (int e = 0; e < AHEAD; e++) {
                next[e] = {};
                ask(row, column(begin, e), &next[e]);
            }
            if (KIND == XDI_CUDA_GRADE_MATRIX && r == 0) xdi_cuda_grade_slopes(f, begin, first, end, dy, packs);
            const xdi_cuda_grade_line w = lines[r].line; /* in registers: what is stored might be it */
            void *to = const_cast<void *>(xdi_cuda_row_of(f.to.rows, w.row));
            XD_UNROLL_N(1)
            for (int e = 0; e < EIGHTS; e++) { /* once in the code: what is on its way moves up */
                const int c = column(begin, e);
                const coming now = next[0];
                XD_UNROLL
                for (int i = 1; i < AHEAD; i++) next[i - 1] = next[i];
                if (e + AHEAD < EIGHTS) ask(row, column(begin, e + AHEAD), &next[AHEAD - 1]);
                xdi_cuda_eight slope = {};
                if (KIND == XDI_CUDA_GRADE_MATRIX) slope = xdi_cuda_read_whole(packs[0].at + (c - begin));
                if (KIND == XDI_CUDA_GRADE_MEANS) slope = take(u, now.u, c);
                write(w, lines[r].hard, to, c, take(row, now.logits, c), slope);
            }
        }
    }
};

/* The rows of a block: those of a chunk, all, or one. */
static __device__ inline xdi_cuda_xtoken_range xdi_cuda_grade_rows(const xdi_cuda_grade &f, int64_t place) {
    if (f.chunks && !f.one_chunk) return xdi_cuda_xtoken_range(f.to.x, place);
    return xdi_cuda_xtoken_range(place, place + 1);
}

/* Every warp forms the lines for itself. */
template <int KIND, typename T>
static __global__ void __launch_bounds__(XDI_CUDA_GRADE_TEAM, sizeof(T) == 2 ? 5 : 4)
    xdi_cuda_grade_kernel(const __grid_constant__ xdi_cuda_grade f) {
    typedef xdi_cuda_grade_walk<KIND, T> walk_type;
    enum { PACKS = KIND == XDI_CUDA_GRADE_MATRIX ? (int)walk_type::SPAN / 4 : 1 };
    static_assert(KIND != XDI_CUDA_GRADE_MATRIX || (int)walk_type::SPAN == (int)XDI_CUDA_MATRIX_SEGMENT, "a segment a span");
    XD_SHARED(xdi_cuda_grade_lines, all_lines, [XDI_CUDA_GRADE_WARPS * XDI_CUDA_GRADE_LINES]);
    XD_SHARED(xdi_cuda_pack<float>, packs, [XDI_CUDA_GRADE_WARPS * PACKS]);
    const int64_t place = (int64_t)blockIdx.x / f.parts, part = (int64_t)blockIdx.x - place * f.parts;
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    const xdi_cuda_xtoken_range rows = xdi_cuda_grade_rows(f, place);
    const xd_xtoken_chunk *chunk = f.chunks ? f.chunks + (f.one_chunk ? 0 : place) : NULL;
    const int64_t begin = part * (XDI_CUDA_GRADE_SPANS * XDI_CUDA_GRADE_WARPS) + warp;
    const int64_t own = begin + lane * XDI_CUDA_GRADE_WARPS; /* the span whose ids the lane knows */
    xdi_cuda_grade_lines *lines = all_lines + warp * XDI_CUDA_GRADE_LINES;
    int first = 0, end = 0;
    if (chunk && chunk->largest == 0.0) return; /* the whole block returns */
    if (f.rest && f.to.written[place]) return;  /* as here */
    if (KIND == XDI_CUDA_GRADE_MATRIX && lane < XDI_CUDA_GRADE_SPANS && own < f.matrix.segments)
        first = f.matrix.first[own], end = f.matrix.first[own + 1];
    const float scale = (float)(f.by_factor ? f.scale * chunk->factor : f.scale);
    const double per_delta = KIND == XDI_CUDA_GRADE_MATRIX ? 1.0 / f.to.x.temperature : 1.0;
    const float *u = KIND == XDI_CUDA_GRADE_MEANS ? f.u + (f.one_chunk ? 0 : place) * f.to.x.columns : NULL;
    const double *dy = KIND == XDI_CUDA_GRADE_MATRIX ? f.dy + place * f.k : NULL;
    const walk_type walk = { f, u, dy, scale, packs + warp * PACKS };
    for (int64_t r = rows.begin; r < rows.end; r += XDI_CUDA_GRADE_LINES) {
        const int count = rows.end - r < XDI_CUDA_GRADE_LINES ? (int)(rows.end - r) : (int)XDI_CUDA_GRADE_LINES;
        __syncwarp(); /* the lines before are no longer read */
        if (lane < count) xdi_cuda_grade_begin(f, r + lane, per_delta, &lines[lane]);
        __syncwarp();
        XD_UNROLL_N(1)
        for (int s = 0; s < XDI_CUDA_GRADE_SPANS; s++) {
            const int64_t at = (begin + s * XDI_CUDA_GRADE_WARPS) * walk_type::SPAN;
            if (at >= f.to.rows.cols) break;
            walk.span(lines, count, (int)at, __shfl_sync(0xffffffffu, first, s), __shfl_sync(0xffffffffu, end, s));
        }
    }
}

/* Marks the rows that have been written, when no block asks any more. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_grade_mark_kernel(const __grid_constant__ xdi_cuda_grade f, int64_t count) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= count) return;
    const xd_xtoken_chunk *chunk = f.chunks ? f.chunks + (f.one_chunk ? 0 : f.to.x.places[i]) : NULL;
    if (!chunk || chunk->largest != 0.0) f.to.written[xdi_cuda_grade_row(f, i)] = 1;
}

/* chunks: those of the call, or its rows where they are worked on one by one. */
template <int KIND>
static xd_result xdi_cuda_grade_run(const xd_launch *launch, xdi_cuda_grade f, int64_t chunks, int64_t rows) {
    const int64_t most = (int64_t)xdi_cuda_grade_walk<KIND, float>::SPAN * XDI_CUDA_GRADE_WARPS * XDI_CUDA_GRADE_SPANS;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    f.parts = (f.to.rows.cols + most - 1) / most;
    if (rows == 0 || f.parts == 0) return XD_OK;
    XDI_CUDA_LOGITS(f.to.x.logits.dtype, T, {
        const xdi_cuda_grid grid = xdi_cuda_grid_of(chunks * f.parts, XDI_CUDA_GRADE_TEAM);
        const auto kernel = xdi_cuda_grade_kernel<KIND, T>; /* its comma is none of the macro's */
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, kernel, f));
    })
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(rows), xdi_cuda_grade_mark_kernel, f, rows);
}

static xdi_cuda_grade xdi_cuda_grade_of(const xd_xtoken_gradient *to) {
    xdi_cuda_grade f = {};
    f.to = *to;
    f.scale = 1.0;
    return f;
}

static xd_result xdi_cuda_xtoken_project_gradient(const xd_launch *launch,
                                                  const xd_xtoken_project_gradient_args *a) {
    xdi_cuda_grade f = xdi_cuda_grade_of(&a->to);
    f.matrix = xdi_cuda_matrix(a->matrix);
    f.dy = a->dy;
    f.k = a->matrix.k;
    f.delta = a->delta;
    f.chunks = a->chunks;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_MATRIX>(launch, f, a->place_count, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_mean_gradient(const xd_launch *launch, const xd_xtoken_mean_gradient_args *a) {
    xdi_cuda_grade f = xdi_cuda_grade_of(&a->to);
    f.u = a->u;
    f.scale = a->scale;
    f.delta = a->delta;
    f.chunks = a->chunk;
    f.one_chunk = true;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_MEANS>(launch, f, a->to.x.count, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_label_gradient(const xd_launch *launch, const xd_xtoken_label_gradient_args *a) {
    xdi_cuda_grade f = xdi_cuda_grade_of(&a->to);
    f.slopes = a->slopes;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_NONE>(launch, f, a->to.x.count, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to) {
    xdi_cuda_grade f = xdi_cuda_grade_of(to);
    f.rest = true;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_NONE>(launch, f, to->x.logits.rows, to->x.logits.rows);
}

/* ---- through lists of columns: one block per row ---- */

/* (M dy)_v of a row of student ids. `places` holds the index of each teacher id in dy; -1: not in dy. */
static __device__ inline double xdi_cuda_xtoken_back(const xd_xtoken_projection &m, const int32_t *places,
                                                     int64_t id, const double *dy) {
    double sum = 0.0;
    for (int64_t e = m.row_begin[id]; e < m.row_begin[id + 1]; e++) {
        const int64_t place = places[m.teacher_id[e]];
        if (place >= 0) sum = __dadd_rn(sum, __dmul_rn((double)m.weight[e], dy[place]));
    }
    return sum;
}

/* Which gradient is computed; members that it does not use are NULL. */
struct xdi_cuda_xtoken_form {
    xd_xtoken_gradient to;
    xd_xtoken_projection projection; /* without row_begin a student's id is the teacher's */
    const int32_t *places;           /* indices of ids in dy */
    const double *dy;                /* of row i's chunk, or of row i */
    const int64_t *offset;           /* lists: where dy of each chunk begins; places are relative to it */
    int64_t k, ids;                  /* places covers this many ids, for each list */
    const double *delta;
    const xd_xtoken_chunk *chunks;
    bool direct; /* row i is chunk i, and the part of dy is factor M dy */
};

/* What the elements of a row have in common. */
struct xdi_cuda_xtoken_line {
    const double *dy; /* of the row's chunk */
    const int32_t *places;
    double delta, ce, lse_one, factor;
    int64_t row, label;
    bool add;
};

/* False for a row that is skipped. */
static __device__ inline bool xdi_cuda_xtoken_line_of(const xdi_cuda_xtoken_form &f, int64_t i,
                                                      xdi_cuda_xtoken_line *w) {
    const xd_xtoken_rows &x = f.to.x;
    w->row = x.rows[i];
    w->add = f.to.written[w->row] != 0;
    const int64_t place = f.direct ? i : x.places[i];
    if (f.chunks[place].largest == 0.0) return false;
    w->delta = f.delta ? f.delta[i] : 0.0;
    w->dy = f.dy + (f.offset ? f.offset[place] : place * f.k);
    w->places = f.offset ? f.places + place * f.ids : f.places;
    w->factor = f.direct ? f.chunks[place].factor : 0.0;
    if (!w->add && f.to.ce_factor) w->ce = f.to.ce_factor[w->row] * f.to.ce_weight;
    if (w->ce != 0.0) w->lse_one = f.to.lse_one[w->row];
    w->label = w->ce != 0.0 ? xd_id_at(f.to.labels, w->row) - x.first : -1;
    return true;
}

/* (M dy)_v */
static __device__ inline double xdi_cuda_xtoken_h(const xdi_cuda_xtoken_form &f, const xdi_cuda_xtoken_line &w,
                                                  int64_t v) {
    const int64_t id = v + f.to.x.first;
    if (f.projection.row_begin) return xdi_cuda_xtoken_back(f.projection, w.places, id, w.dy);
    return id < f.ids && w.places[id] >= 0 ? w.dy[w.places[id]] : 0.0;
}

static __device__ inline float xdi_cuda_xtoken_element(const xdi_cuda_xtoken_form &f,
                                                       const xdi_cuda_xtoken_line &w, int64_t v, float z,
                                                       float before) {
    const double tau = f.to.x.temperature;
    double g = w.add ? (double)before : 0.0;
    if (w.ce != 0.0)
        g += xd_xtoken_ce_part(w.ce, (double)expf((float)((double)z - w.lse_one)), v == w.label);
    const double p = f.direct ? 0.0 : (double)expf((float)((double)z / tau - f.to.x.lse[w.row]));
    const double h = xdi_cuda_xtoken_h(f, w, v);
    return (float)(g + (f.direct ? w.factor * h : xd_xtoken_project_part(p, h, w.delta, tau)));
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_gradient_kernel(const __grid_constant__ xdi_cuda_xtoken_form f) {
    xdi_cuda_xtoken_line w = {};
    const bool writes = xdi_cuda_xtoken_line_of(f, (int64_t)blockIdx.x, &w);
    const int64_t columns = f.to.x.columns, end = w.add ? columns : f.to.rows.cols;
    for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; writes && c < end;
         c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_eight z = xdi_cuda_read_any(f.to.x.logits, w.row, c, columns);
        xdi_cuda_eight out = {};
        if (w.add) out = xdi_cuda_read_any(f.to.rows, w.row, c, end);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < columns) out.at[i] = xdi_cuda_xtoken_element(f, w, c + i, z.at[i], out.at[i]);
        xdi_cuda_write_any(f.to.rows, w.row, c, end, out);
    }
    __syncthreads(); /* all threads have seen whether the row was written */
    if (threadIdx.x == 0 && writes) f.to.written[w.row] = 1;
}

static xd_result xdi_cuda_xtoken_gradient(const xd_launch *launch, const xdi_cuda_xtoken_form &f, int64_t count) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_gradient_kernel, f);
}

static xd_result xdi_cuda_xtoken_pick_gradient(const xd_launch *launch, const xd_xtoken_pick_gradient_args *a) {
    xdi_cuda_xtoken_form f = {};
    f.to = a->to;
    f.places = a->slots;
    f.ids = INT64_MAX; /* they are student ids */
    f.dy = a->dy;
    f.k = a->k;
    f.chunks = a->chunks;
    f.direct = true;
    return xdi_cuda_xtoken_gradient(launch, f, a->to.x.count);
}

static int64_t xdi_cuda_xtoken_pick_scratch(int64_t) {
    return 0;
}

template <int KIND> static xd_result xdi_cuda_grade_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_grade_kernel<KIND, float>));
    return xdi_cuda_load(ctx, xdi_cuda_grade_kernel<KIND, xdi_cuda_bf16>);
}

static xd_result xdi_cuda_gradient_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_grade_load<XDI_CUDA_GRADE_NONE>(ctx));
    XD_TRY(xdi_cuda_grade_load<XDI_CUDA_GRADE_MATRIX>(ctx));
    XD_TRY(xdi_cuda_grade_load<XDI_CUDA_GRADE_MEANS>(ctx));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_grade_mark_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_gradient_kernel);
}

static void xdi_cuda_gradient_fill(xd_xtoken_kernels *kernels) {
    kernels->pick_scratch = xdi_cuda_xtoken_pick_scratch;
    kernels->project_gradient = xdi_cuda_xtoken_project_gradient;
    kernels->mean_gradient = xdi_cuda_xtoken_mean_gradient;
    kernels->pick_gradient = xdi_cuda_xtoken_pick_gradient;
    kernels->label_gradient = xdi_cuda_xtoken_label_gradient;
    kernels->rest_gradient = xdi_cuda_xtoken_rest_gradient;
}

/* >>cuda/xtoken_gold.cu */

/* Losses over common and uncommon ids of two tokenizers: kernel/cpu/xtoken_gold.c is the reference. What needs no
 * exponential has its bits. Where a sum is split over many blocks, these write partial sums to the caller's scratch and one
 * block adds them in order, so that the result does not depend on the GPU. */

/* Blocks of a sum over a list, and the number of rows whose log-sum-exps the scratch holds at once. */
enum { XDI_CUDA_GOLD_BLOCKS = 128, XDI_CUDA_GOLD_ROWS = 8192 };

/* ---- log_probs: one block per row for its log-sum-exp, one read; then one thread per column, one read and one write ---- */

/* By the whole block; NaN for a row that is not finite. */
template <typename T> static __device__ inline double xdi_cuda_row_lse(const xd_xtoken_rows &x, int64_t r) {
    const T *row = xdi_cuda_row<T>(x.logits, r);
    const float factor = xdi_cuda_factor(XDI_CUDA_LOG2E / x.temperature);
    xdi_cuda_softmax_seen seen(factor);
    float max;
    const double sum = xdi_cuda_softmax_sum<XDI_CUDA_TEAM_BLOCK>(row, x.columns, &seen, &max);
    if (!(max > -INFINITY && max < INFINITY)) return (double)NAN;
    return (double)max / x.temperature + log(sum);
}

template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_lse_kernel(const __grid_constant__ xd_xtoken_log_probs_args a) {
    const double lse = xdi_cuda_row_lse<T>(a.x, a.x.rows[blockIdx.x]);
    if (threadIdx.x == 0) reinterpret_cast<double *>(a.scratch)[blockIdx.x] = lse;
}

/* `lse` holds those of these rows in their order; NULL: a.x.lse has them. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_log_probs_kernel(const __grid_constant__ xd_xtoken_log_probs_args a, const double *lse, bool first) {
    const int64_t v = xdi_cuda_flat_index();
    if (v >= a.x.columns) return;
    if (first) {
        if (FIXED)
            xdi_cuda_fixed_put(reinterpret_cast<xd_fixed *>(a.cells) + v, xd_fixed());
        else
            a.cells[v] = 0.0;
    }
    for (int64_t i = 0; i < a.x.count; i++) {
        const int64_t row = a.x.rows[i];
        const double z = (double)xdi_cuda_element(a.x.logits, row, v), log_sum = lse ? lse[i] : a.x.lse[row];
        xdi_cuda_cell_add<FIXED>(a.cells, v, xd_xtoken_log_prob(z, a.x.temperature, log_sum, a.scale));
    }
}

static xd_result xdi_cuda_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_flat_grid(a->x.columns);
    int64_t first = 0;
    do {
        xd_xtoken_log_probs_args part = *a;
        part.x.rows = a->x.rows + first;
        if (!a->x.lse && a->x.count - first > XDI_CUDA_GOLD_ROWS)
            part.x.count = XDI_CUDA_GOLD_ROWS;
        else
            part.x.count = a->x.count - first;
        const double *lse = a->x.lse ? NULL : reinterpret_cast<const double *>(a->scratch);
        XDI_CUDA_LOGITS(a->x.logits.dtype, T, {
            if (lse && part.x.count > 0)
                XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(part.x.count, XDI_CUDA_TEAM_BLOCK),
                                        xdi_cuda_xtoken_lse_kernel<T>, part));
        })
        XDI_CUDA_CELLS(a->fixed, FIXED, {
            XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_xtoken_log_probs_kernel<FIXED>, part, lse,
                                    first == 0));
        })
        first += part.x.count;
    } while (first < a->x.count);
    return XD_OK;
}

/* ---- pair and total: a partial result for each block, then one block over these ---- */

/* The partial results in the scratch. */
template <bool FIXED> struct xdi_cuda_gold_parts {
    xdi_cuda_top *best, *other; /* [XDI_CUDA_GOLD_BLOCKS] at: the pair's index */
    typename xdi_cuda_sums<1, FIXED>::totals *sum;

    __device__ explicit xdi_cuda_gold_parts(float *scratch) {
        best = reinterpret_cast<xdi_cuda_top *>(scratch);
        other = best + XDI_CUDA_GOLD_BLOCKS;
        sum = reinterpret_cast<typename xdi_cuda_sums<1, FIXED>::totals *>(other + XDI_CUDA_GOLD_BLOCKS);
    }
};

/* A NaN counts as -infinity here; whether the first pair is a NaN is checked again at the end. */
static __device__ inline xdi_cuda_top xdi_cuda_top_of(double value, int64_t at) {
    const xdi_cuda_top top = { isnan(value) ? -(double)INFINITY : value, at };
    return top;
}

template <bool FIXED>
static __device__ inline void xdi_cuda_gold_put(float *scratch, const xdi_cuda_sums<1, FIXED> &mine,
                                                xdi_cuda_top best, xdi_cuda_top other) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    const auto totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    best = xdi_cuda_block_reduce(best, none, xdi_cuda_top_join());
    other = xdi_cuda_block_reduce(other, none, xdi_cuda_top_join());
    if (threadIdx.x != 0) return;
    const xdi_cuda_gold_parts<FIXED> parts(scratch);
    parts.sum[blockIdx.x] = totals;
    parts.best[blockIdx.x] = best;
    parts.other[blockIdx.x] = other;
}

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_pair_kernel(const __grid_constant__ xd_xtoken_pair_args a) {
    xdi_cuda_top best = { -(double)INFINITY, INT64_MAX }, other = best;
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t i = xdi_cuda_flat_index(); i < a.pairs; i += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK) {
        const int64_t v = a.pair[i] - a.first;
        const double beta = a.others[a.other[i]];
        other = xdi_cuda_top_join()(other, xdi_cuda_top_of(beta, i));
        if (v < 0 || v >= a.columns) continue;
        const double alpha = a.means[v];
        double term;
        best = xdi_cuda_top_join()(best, xdi_cuda_top_of(alpha, i));
        if (xd_xtoken_pair_term(alpha, beta, a.reverse, &term, &a.slope[v])) mine.add_wide(0, term);
    }
    xdi_cuda_gold_put<FIXED>(a.scratch, mine, best, other);
}

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_total_kernel(const __grid_constant__ xd_xtoken_total_args a) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t v = xdi_cuda_flat_index(); v < a.columns; v += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK)
        mine.add_wide(0, (double)a.u[v]);
    xdi_cuda_gold_put<FIXED>(a.scratch, mine, none, none);
}

/* The pair that reading the list in order would give: a NaN in front is never exceeded. */
static __device__ inline double xdi_cuda_gold_number(xdi_cuda_top top, bool front_is_nan, int64_t front) {
    return front_is_nan ? (double)front : top.at == INT64_MAX ? -1.0 : (double)top.at;
}

/* One block. Adds the sums of `blocks` blocks to cell 0, in their order; with `best` also the most probable pairs. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_finish_kernel(const __grid_constant__ xd_xtoken_pair_args a,
                                                                     int64_t blocks) {
    xdi_cuda_top best = { -(double)INFINITY, INT64_MAX }, other = best;
    const xdi_cuda_top none = best;
    const xdi_cuda_gold_parts<FIXED> parts(a.scratch);
    xdi_cuda_sums<1, FIXED> mine;
    if ((int64_t)threadIdx.x < blocks) {
        mine.whole = parts.sum[threadIdx.x];
        best = parts.best[threadIdx.x];
        other = parts.other[threadIdx.x];
    }
    const auto totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    best = xdi_cuda_block_reduce(best, none, xdi_cuda_top_join());
    other = xdi_cuda_block_reduce(other, none, xdi_cuda_top_join());
    if (threadIdx.x != 0) return;
    xdi_cuda_cell_join(a.cells, 0, totals);
    if (!a.best) return;
    const int64_t front = xdi_cuda_lower_bound(a.pair, a.pairs, a.first);
    const bool mine_is_nan = best.at != INT64_MAX && isnan(a.means[a.pair[front] - a.first]);
    const double number = xdi_cuda_gold_number(best, mine_is_nan, front);
    a.best[XD_XTOKEN_BEST_MEAN] =
        number < 0.0 ? -(double)INFINITY : a.means[a.pair[(int64_t)number] - a.first];
    a.best[XD_XTOKEN_BEST_PAIR] = number;
    a.best[XD_XTOKEN_BEST_OTHER] = xdi_cuda_gold_number(other, a.pairs > 0 && isnan(a.others[a.other[0]]), 0);
}

/* Blocks for a list; the scratch has room for their partial results. */
static int64_t xdi_cuda_gold_blocks(int64_t count) {
    static_assert(XDI_CUDA_GOLD_BLOCKS *
                          (2 * sizeof(xdi_cuda_top) + sizeof(xdi_cuda_sums<1, true>::totals)) <=
                      XD_XTOKEN_SCRATCH * sizeof(float),
                  "parts fit");
    static_assert(XDI_CUDA_GOLD_ROWS * sizeof(double) <= XD_XTOKEN_SCRATCH * sizeof(float), "rows fit");
    const int64_t blocks = (count + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK;
    return blocks < 1 ? 1 : blocks < XDI_CUDA_GOLD_BLOCKS ? blocks : (int64_t)XDI_CUDA_GOLD_BLOCKS;
}

static xd_result xdi_cuda_xtoken_pair(const xd_launch *launch, const xd_xtoken_pair_args *a) {
    const int64_t blocks = xdi_cuda_gold_blocks(a->pairs);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK);
    const xdi_cuda_grid one = xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->columns > 0) XD_TRY(xdi_cuda_fill(launch, a->slope, 0, (size_t)a->columns * sizeof *a->slope));
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_xtoken_pair_kernel<FIXED>, *a));
        return XDI_CUDA_LAUNCH(launch, one, xdi_cuda_xtoken_finish_kernel<FIXED>, *a, blocks);
    })
}

static xd_result xdi_cuda_xtoken_total(const xd_launch *launch, const xd_xtoken_total_args *a) {
    const int64_t blocks = xdi_cuda_gold_blocks(a->columns);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK);
    const xdi_cuda_grid one = xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK);
    xd_xtoken_pair_args sum = {}; /* without pairs */
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    sum.cells = a->cells;
    sum.scratch = a->scratch;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_xtoken_total_kernel<FIXED>, *a));
        return XDI_CUDA_LAUNCH(launch, one, xdi_cuda_xtoken_finish_kernel<FIXED>, sum, blocks);
    })
}

/* ---- tail: the list's keys, then one block of 1024 that selects, sorts and looks up ----
 *
 * A radix select of the k largest keys, then a bitonic network over them in shared memory, as 64-bit words of key and index, so
 * that no two are equal; a longer tail is sorted in the output. Only the selected values are exponentiated. */

enum { XDI_CUDA_TAIL_TEAM = 1024, XDI_CUDA_TAIL_SHARED = 8192 };

static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_keys_kernel(const __grid_constant__ xd_xtoken_tail t) {
    const int64_t i = xdi_cuda_flat_index(), first = xdi_cuda_lower_bound(t.ids, t.count, t.begin);
    if (first + i >= t.count || t.ids[first + i] >= t.end) return;
    t.scratch[i] = (float)t.means[t.ids[first + i] - t.begin];
}

/* Ascending words are descending values, the lowest index first among equals. */
static __device__ inline void xdi_cuda_tail_sort(uint64_t *words, int64_t n) {
    __syncthreads();
    xdi_cuda_bitonic<XDI_CUDA_TAIL_TEAM>(n, [=](int64_t low, int64_t high) {
        const uint64_t x = words[low], y = words[high];
        if (x <= y) return;
        words[low] = y;
        words[high] = x;
    });
}

static __global__ void __launch_bounds__(XDI_CUDA_TAIL_TEAM)
    xdi_cuda_xtoken_tail_kernel(const __grid_constant__ xd_xtoken_tail t) {
    XD_DYN_SHARED(uint64_t, shared);
    const int64_t first = xdi_cuda_lower_bound(t.ids, t.count, t.begin);
    const int64_t columns = xdi_cuda_lower_bound(t.ids, t.count, t.end) - first;
    const int64_t n = t.k < columns ? t.k : columns;
    uint64_t *words =
        t.k <= XDI_CUDA_TAIL_SHARED ? shared : reinterpret_cast<uint64_t *>(static_cast<void *>(t.found));
    if (n > 0) {
        int64_t need = n;
        const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_TAIL_TEAM, 11>(t.scratch, columns, &need);
        xdi_cuda_select_collect<XDI_CUDA_TAIL_TEAM>(
            t.scratch, columns, threshold, need, [=](int64_t at, float value, int64_t column) {
                words[at] = (uint64_t)~xdi_cuda_select_key(value) << 32 | (uint64_t)column;
            });
    }
    xdi_cuda_tail_sort(words, n);
    for (int64_t j = (int64_t)threadIdx.x; j < t.k; j += XDI_CUDA_TAIL_TEAM) {
        const int64_t id = j < n ? t.ids[first + (int64_t)(words[j] & 0xffffffffu)] - t.begin : -1;
        t.values[j] = id >= 0 ? exp(t.means[id]) : -1.0;
        t.found[j] = id;
    }
}

static xd_result xdi_cuda_xtoken_tail(const xd_launch *launch, const xd_xtoken_tail *t) {
    const size_t shared = t->k <= XDI_CUDA_TAIL_SHARED ? (size_t)t->k * sizeof(uint64_t) : 0;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (t->k == 0) return XD_OK;
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(t->count), xdi_cuda_xtoken_keys_kernel, *t));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TAIL_TEAM, shared),
                           xdi_cuda_xtoken_tail_kernel, *t);
}

/* ---- merge: one block; every entry finds its rank among those of all shards ---- */

/* How many of a descending list are larger than value; with `equal` also those that equal it. */
static __device__ inline int64_t xdi_cuda_tail_before(const double *list, int64_t n, double value,
                                                      bool equal) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (list[middle] > value || (equal && list[middle] == value))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The sum is in fixed point: probabilities fit, and it is the same for every split. A NaN has no rank; it makes the sum NaN. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_merge_kernel(const __grid_constant__ xd_xtoken_merge m) {
    xdi_cuda_sums<1, true> mine;
    for (int64_t i = (int64_t)threadIdx.x; i < m.shards * m.k; i += XDI_CUDA_TEAM_BLOCK) {
        const int64_t shard = i / m.k, place = i % m.k;
        const double value = m.all[shard * m.stride + XD_XTOKEN_BEST_WORDS + place];
        int64_t rank = place;
        for (int64_t r = 0; r < m.shards; r++)
            if (r != shard)
                rank +=
                    xdi_cuda_tail_before(m.all + r * m.stride + XD_XTOKEN_BEST_WORDS, m.k, value, r < shard);
        if (isnan(value)) mine.add_wide(0, value);
        if (rank >= m.k) continue;
        const double y = m.others[rank];
        mine.add_wide(0, fabs(value - y));
        if (shard == m.shard && m.found[place] >= 0)
            m.slope[m.found[place]] = xd_xtoken_tail_slope(value, y);
    }
    const xdi_cuda_sums<1, true>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x != 0) return;
    const bool fits = totals.misfits.large + totals.misfits.infinite == 0;
    m.out[0] = fits ? xd_fixed_read(totals.sum[0]) : (double)NAN;
    m.out[1] = xd_xtoken_agree(&m) ? 1.0 : 0.0;
}

static xd_result xdi_cuda_xtoken_merge(const xd_launch *launch, const xd_xtoken_merge *m) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_xtoken_merge_kernel,
                           *m);
}

static xd_result xdi_cuda_gold_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_lse_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_lse_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_log_probs_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_log_probs_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_pair_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_pair_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_total_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_total_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_finish_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_finish_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_keys_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_tail_kernel));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(xdi_cuda_xtoken_tail_kernel,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)(XDI_CUDA_TAIL_SHARED * sizeof(uint64_t))));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_merge_kernel);
}

static void xdi_cuda_gold_fill(xd_xtoken_kernels *kernels) {
    kernels->log_probs = xdi_cuda_xtoken_log_probs;
    kernels->pair = xdi_cuda_xtoken_pair;
    kernels->tail = xdi_cuda_xtoken_tail;
    kernels->merge = xdi_cuda_xtoken_merge;
    kernels->total = xdi_cuda_xtoken_total;
}

/* >>cuda/xtoken_tile.cu */

/* Tiles of chunks over common and uncommon ids. Means are formed from the logits where they are used. In INVARIANT mode terms have the
 * bits of xtoken_gold.cu, which works on the chunks that several ranks share. */

enum {
    XDI_CUDA_PAIR_EIGHTS = 8, /* of a thread */
    XDI_CUDA_PAIR_COLUMNS = XDI_CUDA_PAIR_EIGHTS * XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK
};

enum { XDI_CUDA_GOLD_KL, XDI_CUDA_GOLD_SLOPES, XDI_CUDA_GOLD_SUMS };

/* The result of a block of pairs. */
template <bool FIXED> struct xdi_cuda_gold_part {
    typename xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED>::totals sums;
    xdi_cuda_top mean, other;
};

/* The scratch of a tile. */
struct xdi_cuda_gold_room {
    int64_t parts, width; /* blocks of a chunk; keys of a chunk's two lists */
    double *lse;          /* of the teacher's rows */
    char *sums;           /* [count, parts] */
    float *keys;          /* [count, width] */
    int64_t bytes;

    __host__ __device__ explicit xdi_cuda_gold_room(const xd_xtoken_gold_args &a) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(a.scratch);
        const int64_t part = (int64_t)(a.fixed ? sizeof(xdi_cuda_gold_part<true>) : sizeof(xdi_cuda_gold_part<false>));
        uintptr_t at = start;
        parts = (a.student.columns + XDI_CUDA_PAIR_COLUMNS - 1) / XDI_CUDA_PAIR_COLUMNS;
        width = rounded(a.map.rest_count) + rounded(a.map.other_rest_count);
        keys = reinterpret_cast<float *>(at);
        at += (uintptr_t)(a.count * width) * sizeof(float);
        lse = reinterpret_cast<double *>(at);
        at += (uintptr_t)((a.teacher.count + 1) / 2 * 2) * sizeof(double); /* so that parts begin on 16 bytes */
        sums = reinterpret_cast<char *>(at);
        at += (uintptr_t)(a.count * parts * part);
        bytes = (int64_t)(at - start);
    }
    static __host__ __device__ int64_t rounded(int64_t count) {
        return (count + 3) / 4 * 4; /* so that lists begin on 16 bytes */
    }
    __device__ float *list(const xd_xtoken_gold_args &a, int64_t chunk, bool others) const {
        return keys + chunk * width + (others ? rounded(a.map.rest_count) : 0);
    }
};

static size_t xdi_cuda_gold_bytes(const xd_xtoken_gold_args *a) {
    return (size_t)xdi_cuda_gold_room(*a).bytes;
}

/* ---- cells ---- */

struct xdi_cuda_either {
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const {
        return a | b;
    }
};

typedef xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, false>::totals xdi_cuda_gold_doubles;
typedef xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, true>::totals xdi_cuda_gold_integers;

static __device__ inline bool xdi_cuda_gold_fits(const xdi_cuda_gold_integers &sums) {
    return sums.misfits.large + sums.misfits.infinite == 0;
}

/* Cell i becomes one of the sums. */
static __device__ inline void xdi_cuda_gold_set(double *cells, int64_t i, const xdi_cuda_gold_doubles &sums, int which) {
    cells[i] = sums.sum[which];
}

static __device__ inline void xdi_cuda_gold_set(double *cells, int64_t i, const xdi_cuda_gold_integers &sums, int which) {
    xd_fixed sum = sums.sum[which];
    if (!xdi_cuda_gold_fits(sums)) sum.high = XD_CELL_NAN;
    xdi_cuda_fixed_put(reinterpret_cast<xd_fixed *>(cells) + i, sum);
}

/* Adds one of the sums to cell i. */
static __device__ inline void xdi_cuda_gold_add(double *cells, int64_t i, const xdi_cuda_gold_doubles &sums, int which) {
    cells[i] = __dadd_rn(cells[i], sums.sum[which]);
}

static __device__ inline void xdi_cuda_gold_add(double *cells, int64_t i, const xdi_cuda_gold_integers &sums, int which) {
    xd_fixed *cell = reinterpret_cast<xd_fixed *>(cells) + i;
    xd_fixed_join(cell, sums.sum[which]);
    if (!xdi_cuda_gold_fits(sums)) cell->high = XD_CELL_NAN;
}

static __device__ inline double xdi_cuda_gold_value(const xdi_cuda_gold_doubles &sums, int which) {
    return sums.sum[which];
}

static __device__ inline double xdi_cuda_gold_value(const xdi_cuda_gold_integers &sums, int which) {
    return xdi_cuda_gold_fits(sums) ? xd_fixed_read(sums.sum[which]) : (double)NAN;
}

/* ---- partners: one thread per pair ---- */

static __host__ __device__ inline int64_t xdi_cuda_gold_width(const xd_xtoken_gold_args &a) {
    return (a.student.columns + XDI_CUDA_EIGHT - 1) / XDI_CUDA_EIGHT * XDI_CUDA_EIGHT;
}

/* Behind the partners: where this shard's ids begin and end in the list without partners, and all in the teacher's. */
static __device__ inline int32_t *xdi_cuda_gold_bounds(const xd_xtoken_gold_args &a, bool others) {
    return a.partner + xdi_cuda_gold_width(a) + (others ? 2 : 0);
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_partners_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i < 2) {
        const int64_t first = a.student.first, id = i == 0 ? first : first + a.student.columns;
        xdi_cuda_gold_bounds(a, false)[i] = (int32_t)xdi_cuda_lower_bound(a.map.rest, a.map.rest_count, id);
        xdi_cuda_gold_bounds(a, true)[i] =
            (int32_t)xdi_cuda_lower_bound(a.map.other_rest, a.map.other_rest_count, i == 0 ? 0 : a.teacher.columns);
    }
    if (i >= a.map.pairs) return;
    const int64_t v = a.map.pair[i] - a.student.first;
    if (v >= 0 && v < a.student.columns) a.partner[v] = a.map.other[i];
}

static xd_result xdi_cuda_gold_partners(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const int64_t width = xdi_cuda_gold_width(*a);
    if (width > 0) XD_TRY(xdi_cuda_fill(launch, a->partner, 0xff, (size_t)width * sizeof *a->partner));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->map.pairs), xdi_cuda_gold_partners_kernel, *a);
}

/* ---- means of a chunk ---- */

/* The mean log-probability of a column over the chunk's rows, from their logits. `sum` is what an order of columns goes by. */
template <bool FIXED> struct xdi_cuda_gold_means;

template <> struct xdi_cuda_gold_means<false> {
    typedef float value;
    const xd_xtoken_rows &x;
    xdi_cuda_xtoken_range rows;
    int64_t row;              /* the first, and where it begins */
    const void *start;
    float base, factor, rest; /* (sum - base) factor - rest */

    /* lse: of the rows of the call; NULL: x.lse. */
    __device__ xdi_cuda_gold_means(const xd_xtoken_rows &side, int64_t place, const double *lse, double positions)
        : x(side), rows(side, place) {
        const double scale = 1.0 / (positions * x.temperature);
        double all = 0.0;
        for (int64_t i = rows.begin; i < rows.end; i++) all += lse ? lse[i] : x.lse[x.rows[i]];
        all *= x.temperature;
        row = x.rows[rows.begin];
        start = static_cast<const char *>(x.logits.data) + row * xdi_cuda_stride(x.logits) * (half() ? 2 : 4);
        base = (float)all;
        factor = xdi_cuda_factor(scale);
        rest = (float)((all - (double)base) * scale);
    }
    __device__ bool half() const {
        return x.logits.dtype == XD_DTYPE_BF16;
    }
    __device__ float of_sum(float all) const {
        return __fmaf_rn(__fsub_rn(all, base), factor, -rest);
    }
    /* Of the ids that are not negative; the others get any number. */
    __device__ void gather(const int32_t (&ids)[XDI_CUDA_EIGHT], float (&means)[XDI_CUDA_EIGHT]) const {
        const bool wide = !half();
        uint32_t asked[XDI_CUDA_EIGHT];
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) asked[j] = xdi_cuda_ask(start, wide, ids[j] < 0 ? 0 : ids[j]);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = xdi_cuda_asked(asked[j], wide);
        XD_UNROLL_N(1)
        for (int64_t i = rows.begin + 1; i < rows.end; i++) {
            const void *more = xdi_cuda_row_of(x.logits, x.rows[i]);
            XD_UNROLL
            for (int j = 0; j < XDI_CUDA_EIGHT; j++) asked[j] = xdi_cuda_ask(more, wide, ids[j] < 0 ? 0 : ids[j]);
            XD_UNROLL
            for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = __fadd_rn(means[j], xdi_cuda_asked(asked[j], wide));
        }
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = of_sum(means[j]);
    }
    /* Of eight columns, whose logits of the first row are given; what lies beyond the columns is of no use. */
    __device__ void finish(int64_t c, xdi_cuda_eight all, float (&means)[XDI_CUDA_EIGHT]) const {
        for (int64_t i = rows.begin + 1; i < rows.end; i++) {
            const xdi_cuda_eight more = xdi_cuda_read_any(x.logits, x.rows[i], c, x.columns);
            XD_UNROLL
            for (int j = 0; j < XDI_CUDA_EIGHT; j++) all.at[j] = __fadd_rn(all.at[j], more.at[j]);
        }
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = of_sum(all.at[j]);
    }
    __device__ double probability(int64_t, float key) const {
        return (double)xdi_cuda_power(__fmul_rn(of_sum(key), (float)XDI_CUDA_LOG2E));
    }
};

template <> struct xdi_cuda_gold_means<true> {
    typedef double value;
    const xd_xtoken_rows &x;
    xdi_cuda_xtoken_range rows;
    const double *lse;
    double scale;

    __device__ xdi_cuda_gold_means(const xd_xtoken_rows &side, int64_t place, const double *lses, double positions)
        : x(side), rows(side, place), lse(lses), scale(1.0 / positions) {}
    __device__ double operator()(int64_t v) const {
        xd_fixed cell = {};
        for (int64_t i = rows.begin; i < rows.end; i++) {
            const int64_t row = x.rows[i];
            const double z = (double)xdi_cuda_element(x.logits, row, v), log_sum = lse ? lse[i] : x.lse[row];
            xd_cell_put(&cell, xd_xtoken_log_prob(z, x.temperature, log_sum, scale));
        }
        return xd_cell_read(cell);
    }
    __device__ double probability(int64_t v, float) const {
        return exp((*this)(v));
    }
};

template <bool FIXED>
static __device__ inline xdi_cuda_gold_means<FIXED> xdi_cuda_gold_student(const xd_xtoken_gold_args &a, int64_t chunk) {
    return xdi_cuda_gold_means<FIXED>(a.student, chunk, NULL, a.chunks[chunk].student);
}

template <bool FIXED>
static __device__ inline xdi_cuda_gold_means<FIXED> xdi_cuda_gold_teacher(const xd_xtoken_gold_args &a, int64_t chunk) {
    return xdi_cuda_gold_means<FIXED>(a.teacher, chunk, xdi_cuda_gold_room(a).lse, a.chunks[chunk].teacher);
}

/* ---- pairs: a block has a part of the columns of a chunk ---- */

/* The partners of eight columns. */
static __device__ inline void xdi_cuda_gold_ask(const int32_t *from, int32_t (&partner)[XDI_CUDA_EIGHT]) {
    const xdi_cuda_pack<int32_t> low = xdi_cuda_load16(from), high = xdi_cuda_load16(from + 4);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) partner[i] = i < 4 ? low.at[i % 4] : high.at[i % 4];
}

/* The first column of eight number e of this thread. */
static __device__ inline int64_t xdi_cuda_pair_column(int64_t part, int e) {
    return part * XDI_CUDA_PAIR_COLUMNS + (e * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x) * XDI_CUDA_EIGHT;
}

static __device__ inline xdi_cuda_top xdi_cuda_gold_top(double value, int64_t at) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX }, one = { value, at };
    return at < 0 ? none : one;
}

static __device__ inline xdi_cuda_top xdi_cuda_gold_best_of(const xdi_cuda_top &mine) {
    return xdi_cuda_block_reduce(mine, xdi_cuda_gold_top(0.0, -1), xdi_cuda_top_join());
}

/* The work of a block. T: the type of the student's logits. */
template <bool FIXED, typename T> struct xdi_cuda_gold_pairs;

/* The most probable column that a thread has seen; the lowest among equals. */
struct xdi_cuda_gold_best {
    double value;
    int64_t column;

    __device__ void see(double x, int64_t v) {
        if (column >= 0 && !(x > value)) return;
        value = x;
        column = v;
    }
};

template <typename T> struct xdi_cuda_gold_pairs<true, T> {
    static __device__ inline void run(const xd_xtoken_gold_args &a, int64_t chunk, int64_t part, xdi_cuda_gold_part<true> *out) {
        const int64_t columns = a.student.columns;
        const xdi_cuda_gold_means<true> student = xdi_cuda_gold_student<true>(a, chunk), teacher = xdi_cuda_gold_teacher<true>(a, chunk);
        xdi_cuda_gold_best mean = { 0.0, -1 }, other = { 0.0, -1 };
        xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, true> mine;
        for (int e = 0; e < XDI_CUDA_PAIR_EIGHTS; e++) {
            const int64_t c = xdi_cuda_pair_column(part, e);
            int32_t partner[XDI_CUDA_EIGHT];
            xdi_cuda_eight slopes = {};
            if (c >= columns) break;
            xdi_cuda_gold_ask(a.partner + c, partner);
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                double term = 0.0;
                if (partner[i] < 0) continue;
                const double alpha = student(c + i), beta = teacher(partner[i]);
                mean.see(alpha, a.student.first + c + i);
                other.see(beta, a.student.first + c + i);
                if (!xd_xtoken_pair_term(alpha, beta, a.reverse, &term, &slopes.at[i])) continue;
                mine.add_wide(XDI_CUDA_GOLD_KL, term);
                mine.add_wide(XDI_CUDA_GOLD_SLOPES, (double)slopes.at[i]);
            }
            xdi_cuda_write(a.u + chunk * columns, c, columns, slopes);
        }
        const auto sums = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
        const xdi_cuda_top best = xdi_cuda_gold_best_of(xdi_cuda_gold_top(mean.value, mean.column));
        const xdi_cuda_top best_other = xdi_cuda_gold_best_of(xdi_cuda_gold_top(other.value, other.column));
        if (threadIdx.x != 0) return;
        out->sums = sums;
        out->mean = best;
        out->other = best_other;
    }
};

/* Eight columns that are on their way. */
template <typename T> struct xdi_cuda_gold_coming {
    int32_t partner[XDI_CUDA_EIGHT];
    xdi_cuda_raw<T> logits; /* of the first row, if `whole` */
    bool whole;

    __device__ void ask(const xd_xtoken_gold_args &a, const T *row, int64_t c) {
        whole = xdi_cuda_is_aligned16(row) && c + XDI_CUDA_EIGHT <= a.student.columns;
        if (c < a.student.columns) xdi_cuda_gold_ask(a.partner + c, partner);
        if (whole) logits.load(row + c);
    }
};

/* The largest mean that a thread has seen, and its eight columns; which of them has it is found at the end. */
struct xdi_cuda_gold_largest {
    float value;
    int eight;

    /* x: -infinity without a partner; some: there is one. */
    __device__ void see(const float (&x)[XDI_CUDA_EIGHT], bool some, int e) {
        float most = -INFINITY;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) most = fmaxf(most, x[i]);
        const bool is_new = most > value || (some && eight < 0);
        value = is_new ? most : value;
        eight = is_new ? e : eight;
    }
};

template <typename T> struct xdi_cuda_gold_pairs<false, T> {
    typedef xdi_cuda_gold_means<false> means_type;
    const xd_xtoken_gold_args &a;
    means_type student, teacher;
    int64_t part;
    float *u;
    xdi_cuda_gold_largest mean, other;
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, false> mine;

    __device__ xdi_cuda_gold_pairs(const xd_xtoken_gold_args &args, int64_t chunk, int64_t block)
        : a(args), student(xdi_cuda_gold_student<false>(args, chunk)), teacher(xdi_cuda_gold_teacher<false>(args, chunk)), part(block),
          u(args.u + chunk * args.student.columns) {
        mean = other = { -INFINITY, -1 };
    }
    __device__ void values(const xdi_cuda_gold_coming<T> &now, int64_t c, float (&alpha)[XDI_CUDA_EIGHT],
                           float (&beta)[XDI_CUDA_EIGHT]) const {
        teacher.gather(now.partner, beta);
        student.finish(c, now.whole ? now.logits.widened() : xdi_cuda_read_any(a.student.logits, student.row, c, a.student.columns), alpha);
    }
    __device__ void eight(const xdi_cuda_gold_coming<T> &now, int64_t c, int e) {
        float alpha[XDI_CUDA_EIGHT], beta[XDI_CUDA_EIGHT];
        xdi_cuda_eight slopes;
        int32_t none = -1;
        values(now, c, alpha, beta);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const bool has = now.partner[i] >= 0;
            const float d = __fsub_rn(alpha[i], beta[i]);
            none &= now.partner[i];
            alpha[i] = has ? alpha[i] : -INFINITY;
            beta[i] = has ? beta[i] : -INFINITY;
            const float p = xdi_cuda_power(__fmul_rn(a.reverse ? alpha[i] : beta[i], (float)XDI_CUDA_LOG2E));
            mine.add(XDI_CUDA_GOLD_KL, p == 0.0f ? 0.0f : __fmul_rn(p, a.reverse ? d : -d));
            slopes.at[i] = p == 0.0f ? 0.0f : __fmul_rn(p, a.reverse ? __fadd_rn(d, 1.0f) : -1.0f);
            mine.add(XDI_CUDA_GOLD_SLOPES, slopes.at[i]);
        }
        mean.see(alpha, none >= 0, e);
        other.see(beta, none >= 0, e);
        mine.end_eight();
        xdi_cuda_write(u, c, a.student.columns, slopes);
    }
    /* The best of the block, by the thread that has seen it. */
    __device__ void tell(const xdi_cuda_gold_largest &largest, bool others, xdi_cuda_top *out) const {
        const int64_t c = largest.eight < 0 ? -1 : xdi_cuda_pair_column(part, largest.eight);
        const xdi_cuda_top best = xdi_cuda_gold_best_of(xdi_cuda_gold_top((double)largest.value, c));
        if (best.at == INT64_MAX && threadIdx.x == 0) *out = best;
        if (c != best.at) return;
        xdi_cuda_gold_coming<T> again;
        float alpha[XDI_CUDA_EIGHT], beta[XDI_CUDA_EIGHT];
        int at = 0;
        again.ask(a, xdi_cuda_row<T>(a.student.logits, student.row), c);
        values(again, c, alpha, beta);
        XD_UNROLL
        for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
            if (again.partner[i] >= 0 && (others ? beta[i] : alpha[i]) == largest.value) at = i;
        out->value = best.value;
        out->at = a.student.first + c + at;
    }
    static __device__ inline void run(const xd_xtoken_gold_args &args, int64_t chunk, int64_t block, xdi_cuda_gold_part<false> *out) {
        xdi_cuda_gold_pairs work(args, chunk, block);
        const T *row = xdi_cuda_row<T>(args.student.logits, work.student.row);
        xdi_cuda_gold_coming<T> next;
        next.ask(args, row, xdi_cuda_pair_column(block, 0));
        XD_UNROLL_N(1)
        for (int e = 0; e < XDI_CUDA_PAIR_EIGHTS; e++) {
            const int64_t c = xdi_cuda_pair_column(block, e);
            const xdi_cuda_gold_coming<T> now = next;
            if (c >= args.student.columns) break;
            if (e + 1 < XDI_CUDA_PAIR_EIGHTS) next.ask(args, row, xdi_cuda_pair_column(block, e + 1));
            work.eight(now, c, e);
        }
        const auto sums = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(work.mine);
        if (threadIdx.x == 0) out->sums = sums;
        work.tell(work.mean, false, &out->mean);
        work.tell(work.other, true, &out->other);
    }
};

template <bool FIXED, typename T>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : sizeof(T) == 2 ? 3 : 2)
    xdi_cuda_gold_pairs_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const xdi_cuda_gold_room room(a);
    const int64_t chunk = (int64_t)blockIdx.x / room.parts, part = (int64_t)blockIdx.x - chunk * room.parts;
    xdi_cuda_gold_pairs<FIXED, T>::run(a, chunk, part, reinterpret_cast<xdi_cuda_gold_part<FIXED> *>(room.sums) + blockIdx.x);
}

template <bool FIXED, typename T> static xd_result xdi_cuda_gold_pairs_of(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const xdi_cuda_gold_room room(*a);
    const auto kernel = xdi_cuda_gold_pairs_kernel<FIXED, T>; /* its comma is none of the macro's */
    if (room.parts == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count * room.parts, XDI_CUDA_TEAM_BLOCK), kernel, *a);
}

/* Sums in fixed point take logits of any type. */
static xd_result xdi_cuda_gold_pairs_all(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    if (a->fixed) return xdi_cuda_gold_pairs_of<true, float>(launch, a);
    XDI_CUDA_LOGITS(a->student.logits.dtype, T, { return (xdi_cuda_gold_pairs_of<false, T>(launch, a)); })
}

/* >>cuda/xtoken_tails.cu */

/* Tiles of chunks over common and uncommon ids, after their pairs: both sides' tails, what shards compare of them, and the results. */

/* ---- lists ---- */

/* A list of this shard and where its tail goes. */
struct xdi_cuda_gold_list {
    const int32_t *ids; /* [count] */
    int count, n, k;
    float *keys;     /* [count] */
    uint64_t *words; /* [k] the sorted tail, in the memory of `found` or of `values`: ~key, then the place in the list */
    double *values;  /* [k] */

    __device__ xdi_cuda_gold_list(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
        const int32_t *bounds = xdi_cuda_gold_bounds(a, others);
        ids = (others ? a.map.other_rest : a.map.rest) + bounds[0];
        count = bounds[1] - bounds[0];
        k = (int)a.k;
        n = k < count ? k : count;
        keys = xdi_cuda_gold_room(a).list(a, chunk, others);
        values = others ? a.other_tail + chunk * a.k : a.tails + chunk * (XD_XTOKEN_GOLD_WORDS + a.k) + XD_XTOKEN_GOLD_WORDS;
        words = others ? reinterpret_cast<uint64_t *>(values) : reinterpret_cast<uint64_t *>(a.found + chunk * a.k);
    }
};

template <bool FIXED>
static __device__ inline xdi_cuda_gold_means<FIXED> xdi_cuda_gold_side(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
    return others ? xdi_cuda_gold_teacher<FIXED>(a, chunk) : xdi_cuda_gold_student<FIXED>(a, chunk);
}

/* ---- keys: the logits of a list, or sums of them, on the chip where they fit ---- */

/* An id with the sum of the rows before; then this row's logit as it lies in memory. */
struct xdi_cuda_gold_asked {
    int32_t id;
    float sum;
};

struct xdi_cuda_gold_key {
    uint32_t logit;
    float sum;
};

enum { XDI_CUDA_GOLD_TEAM = XDI_CUDA_SELECT_TEAM, XDI_CUDA_GOLD_AHEAD = 8 };

/* Keys that are BF16 logits, and no sums of them. */
static __device__ inline bool xdi_cuda_gold_is_narrow(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
    const xd_xtoken_rows &x = others ? a.teacher : a.student;
    return x.logits.dtype == XD_DTYPE_BF16 && x.begin[chunk + 1] - x.begin[chunk] == 1;
}

/* Logits of one row that are BF16, as they are. */
static __device__ inline void xdi_cuda_gold_keys(const xdi_cuda_gold_list &list, const xdi_cuda_gold_means<false> &means, int64_t first,
                                                 xdi_cuda_bf16 *keys) {
    const void *row = means.start;
    uint16_t *bits = reinterpret_cast<uint16_t *>(keys);
    xdi_cuda_each_ahead<XDI_CUDA_GOLD_TEAM, XDI_CUDA_GOLD_AHEAD>(
        list.count, [&](int64_t i) { return list.ids[i]; }, [&](int32_t id) { return xdi_cuda_ask(row, false, id - first); },
        [&](int64_t i, uint32_t asked) { bits[i] = (uint16_t)asked; });
}

/* Sums of logits, row after row. */
static __device__ inline void xdi_cuda_gold_keys(const xdi_cuda_gold_list &list, const xdi_cuda_gold_means<false> &means, int64_t first,
                                                 float *keys) {
    const bool wide = means.x.logits.dtype == XD_DTYPE_F32;
    XD_UNROLL_N(1)
    for (int64_t r = means.rows.begin; r < means.rows.end; r++) {
        const void *row = xdi_cuda_row_of(means.x.logits, means.x.rows[r]);
        const bool adds = r > means.rows.begin;
        xdi_cuda_each_ahead<XDI_CUDA_GOLD_TEAM, XDI_CUDA_GOLD_AHEAD>(
            list.count, [&](int64_t i) -> xdi_cuda_gold_asked { return { list.ids[i], adds ? keys[i] : 0.0f }; },
            [&](const xdi_cuda_gold_asked &x) -> xdi_cuda_gold_key { return { xdi_cuda_ask(row, wide, x.id - first), x.sum }; },
            [&](int64_t i, const xdi_cuda_gold_key &x) {
                const float z = xdi_cuda_asked(x.logit, wide);
                keys[i] = adds ? __fadd_rn(x.sum, z) : z;
            });
    }
}

static __device__ inline void xdi_cuda_gold_keys(const xdi_cuda_gold_list &list, const xdi_cuda_gold_means<true> &means, int64_t first,
                                                 float *keys) {
    XD_UNROLL_N(1)
    for (int64_t i = (int64_t)threadIdx.x; i < list.count; i += XDI_CUDA_GOLD_TEAM) keys[i] = (float)means(list.ids[i] - first);
}

/* Where they go: the chip's room, or the list's memory. */
template <typename T> static __device__ inline T *xdi_cuda_gold_keys_at(const xdi_cuda_gold_list &, unsigned char *room) {
    return reinterpret_cast<T *>(room);
}

template <> __device__ inline float *xdi_cuda_gold_keys_at<float>(const xdi_cuda_gold_list &list, unsigned char *) {
    return list.keys;
}

/* ---- sorts ---- */

/* In memory of the device: a tail of any length. Words are ~key, then the place. */
template <typename T>
static __device__ inline void xdi_cuda_gold_sort_long(const xdi_cuda_gold_list &list, const T *keys) {
    uint64_t *words = list.words;
    int64_t need = list.n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_GOLD_TEAM, 11>(keys, list.count, &need);
    xdi_cuda_select_collect<XDI_CUDA_GOLD_TEAM>(keys, list.count, threshold, need, [=](int64_t at, float value, int64_t column) {
        words[at] = (uint64_t)~xdi_cuda_select_key(value) << 32 | (uint64_t)column;
    });
    xdi_cuda_tail_sort(words, list.n);
}

/* On the chip: of at most 1,024 EACH. */
template <int EACH, typename T>
static __device__ inline void xdi_cuda_gold_sort_short(const xdi_cuda_gold_list &list, const T *keys, xdi_cuda_select_list<EACH> *room) {
    int64_t need = list.n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_GOLD_TEAM, 11>(keys, list.count, &need);
    uint32_t differ = 0;
    xdi_cuda_select_collect<XDI_CUDA_GOLD_TEAM>(
        keys, list.count, threshold, need, [&, room](int64_t at, float value, int64_t column) {
            const uint32_t key = xdi_cuda_select_key(value);
            differ |= key ^ threshold;
            room->keys[at] = key;
            room->columns[at] = (uint32_t)column;
        });
    for (int j = list.n + (int)threadIdx.x; j < XDI_CUDA_GOLD_TEAM * EACH; j += XDI_CUDA_GOLD_TEAM) {
        room->keys[j] = threshold; /* behind its equals */
        room->columns[j] = ~0u;
    }
    differ = xdi_cuda_block_reduce(differ, 0u, xdi_cuda_either()); /* a barrier, too */
    if (sizeof(T) == 2) differ &= ~0xffffu;
    const int first = differ ? __ffs((int)differ) - 1 : 0, end = differ ? 32 - __clz((int)differ) : 1, n = list.n;
    uint64_t *words = list.words;
    xdi_cuda_select_sort<EACH>(room, first, end, [=](int i, uint32_t key, uint32_t column) {
        const int rank = (int)threadIdx.x + i * XDI_CUDA_GOLD_TEAM;
        if (rank < n) words[rank] = (uint64_t)~key << 32 | (uint64_t)column;
    });
}

template <int EACH> struct xdi_cuda_gold_sorter {
    template <typename T> static __device__ inline void run(const xdi_cuda_gold_list &list, const T *keys, void *room) {
        xdi_cuda_gold_sort_short<EACH>(list, keys, static_cast<xdi_cuda_select_list<EACH> *>(room));
    }
};

template <> struct xdi_cuda_gold_sorter<0> {
    template <typename T> static __device__ inline void run(const xdi_cuda_gold_list &list, const T *keys, void *) {
        xdi_cuda_gold_sort_long(list, keys);
    }
};

/* Dynamic shared memory of a sort of at most 1,024, and of none. */
enum { XDI_CUDA_GOLD_SHORT_BYTES = 40 << 10 };
#if !defined(XD_EMU)
static_assert(sizeof(xdi_cuda_select_sorter<1>::type::TempStorage) <= XDI_CUDA_GOLD_SHORT_BYTES, "the sort's room");
#endif

template <int EACH> struct xdi_cuda_gold_sort_room {
    enum { BYTES = EACH == 0 ? 0 : EACH == 1 ? (int)XDI_CUDA_GOLD_SHORT_BYTES : (int)XDI_CUDA_SELECT_BYTES };
};

/* ---- lists: a block each, the student's and then the teacher's of each chunk. T: of the keys, of which `kept` fit the chip ---- */

template <bool FIXED, int EACH, typename T>
static __global__ void __launch_bounds__(XDI_CUDA_GOLD_TEAM)
    xdi_cuda_gold_lists_kernel(const __grid_constant__ xd_xtoken_gold_args a, int kept) {
    XD_DYN_SHARED(unsigned char, room);
    const int64_t chunk = (int64_t)blockIdx.x / 2;
    const bool others = blockIdx.x % 2 != 0;
    const xdi_cuda_gold_list list(a, chunk, others);
    const bool is_narrow = !FIXED && list.count <= kept && xdi_cuda_gold_is_narrow(a, chunk, others);
    if (list.n == 0 || is_narrow != (sizeof(T) == 2)) return; /* the whole block returns */
    T *keys = xdi_cuda_gold_keys_at<T>(list, room + xdi_cuda_gold_sort_room<EACH>::BYTES);
    xdi_cuda_gold_keys(list, xdi_cuda_gold_side<FIXED>(a, chunk, others), others ? 0 : a.student.first, keys);
    __syncthreads();
    xdi_cuda_gold_sorter<EACH>::run(list, keys, room);
}

/* ---- what sorted lists mean ---- */

/* A rank of both tails: the sums are of |x - y|, and what that of the derivatives changes by. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_compare(double x, double y, int64_t found, float before, float *u,
                                                    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> *mine) {
    mine->add_wide(0, fabs(__dsub_rn(x, y)));
    if (found < 0) return;
    const float slope = xd_xtoken_tail_slope(x, y);
    u[found] = slope;
    mine->add_wide(XDI_CUDA_GOLD_SLOPES, (double)slope);
    if (before != 0.0f) mine->add_wide(XDI_CUDA_GOLD_SLOPES, -(double)before); /* the id also has a partner */
}

/* An entry of a sorted list: its column, -1: none. */
struct xdi_cuda_gold_entry {
    int32_t column;
    float key;
};

static __device__ inline uint64_t xdi_cuda_gold_word(const xdi_cuda_gold_list &list, int64_t rank) {
    return rank < list.n ? list.words[rank] : ~(uint64_t)0;
}

static __device__ inline xdi_cuda_gold_entry xdi_cuda_gold_entry_of(const xdi_cuda_gold_list &list, uint64_t word, int64_t first) {
    return { word == ~(uint64_t)0 ? -1 : (int32_t)(list.ids[word & 0xffffffffu] - first), xd_float_of_key((uint32_t)(word >> 32)) };
}

/* Threads of a block that ends a chunk: sums in fixed point take more registers. */
template <bool FIXED> struct xdi_cuda_gold_end {
    enum { TEAM = FIXED ? 512 : 1024 };
};

/* The tail of a side in the place of its words, for other ranks. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_tell(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
    const xdi_cuda_gold_list list(a, chunk, others);
    const xdi_cuda_gold_means<FIXED> means = xdi_cuda_gold_side<FIXED>(a, chunk, others);
    const int64_t first = others ? 0 : a.student.first;
    int64_t *found = a.found + chunk * a.k;
    xdi_cuda_each_ahead<xdi_cuda_gold_end<FIXED>::TEAM, FIXED ? 1 : 4>(
        list.k, [&](int64_t rank) { return xdi_cuda_gold_word(list, rank); },
        [&](uint64_t word) { return xdi_cuda_gold_entry_of(list, word, first); },
        [&](int64_t rank, const xdi_cuda_gold_entry &entry) {
            list.values[rank] = entry.column < 0 ? -1.0 : means.probability(entry.column, entry.key);
            if (!others) found[rank] = entry.column;
        });
}

/* A rank of both lists. */
struct xdi_cuda_gold_words {
    uint64_t own, other;
};

struct xdi_cuda_gold_both {
    xdi_cuda_gold_entry own, other;
    float before; /* the derivative */
};

/* Both sorted lists of a rank that has all columns. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_compare_lists(const xd_xtoken_gold_args &a, int64_t chunk,
                                                          xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> *mine) {
    const xdi_cuda_gold_list list(a, chunk, false), others(a, chunk, true);
    const xdi_cuda_gold_means<FIXED> student = xdi_cuda_gold_student<FIXED>(a, chunk), teacher = xdi_cuda_gold_teacher<FIXED>(a, chunk);
    const int64_t first = a.student.first;
    float *u = a.u + chunk * a.student.columns;
    xdi_cuda_each_ahead<xdi_cuda_gold_end<FIXED>::TEAM, FIXED ? 1 : 2>(
        list.k,
        [&](int64_t rank) -> xdi_cuda_gold_words { return { xdi_cuda_gold_word(list, rank), xdi_cuda_gold_word(others, rank) }; },
        [&](const xdi_cuda_gold_words &words) -> xdi_cuda_gold_both {
            const xdi_cuda_gold_entry own = xdi_cuda_gold_entry_of(list, words.own, first);
            return { own, xdi_cuda_gold_entry_of(others, words.other, 0), own.column < 0 ? 0.0f : u[own.column] };
        },
        [&](int64_t, const xdi_cuda_gold_both &both) {
            const double x = both.own.column < 0 ? -1.0 : student.probability(both.own.column, both.own.key);
            const double y = both.other.column < 0 ? -1.0 : teacher.probability(both.other.column, both.other.key);
            xdi_cuda_gold_compare<FIXED>(x, y, both.own.column, both.before, u, mine);
        });
}

/* Adds up the parts of a chunk's pairs, by a warp. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_join(const xd_xtoken_gold_args &a, int64_t chunk) {
    typedef xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> sums_type;
    const xdi_cuda_gold_room room(a);
    const xdi_cuda_gold_part<FIXED> *parts = reinterpret_cast<const xdi_cuda_gold_part<FIXED> *>(room.sums) + chunk * room.parts;
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_top mean = none, other = none;
    sums_type mine;
    for (int64_t i = (int64_t)threadIdx.x; i < room.parts; i += XDI_CUDA_WARP) {
        mine.whole = typename sums_type::join()(mine.whole, parts[i].sums);
        const xdi_cuda_top one = { parts[i].mean.value, parts[i].mean.at }, two = { parts[i].other.value, parts[i].other.at };
        mean = xdi_cuda_top_join()(mean, one);
        other = xdi_cuda_top_join()(other, two);
    }
    const typename sums_type::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    mean = xdi_cuda_warp_reduce(mean, xdi_cuda_top_join());
    other = xdi_cuda_warp_reduce(other, xdi_cuda_top_join());
    if (threadIdx.x != 0) return;
    double *words = a.tails + chunk * (XD_XTOKEN_GOLD_WORDS + a.k);
    for (int which = 0; which < XDI_CUDA_GOLD_SUMS; which++)
        xdi_cuda_gold_set(a.sums, chunk * XDI_CUDA_GOLD_SUMS + which, totals, which);
    words[XD_XTOKEN_GOLD_MEAN] = mean.value;
    words[XD_XTOKEN_GOLD_PAIR] = mean.at == INT64_MAX ? -1.0 : (double)mean.at;
    words[XD_XTOKEN_GOLD_OTHER_MEAN] = other.value;
    words[XD_XTOKEN_GOLD_OTHER] = other.at == INT64_MAX ? -1.0 : (double)other.at;
}

/* ---- results of a chunk ---- */

/* Whether the most likely pair of all shards is the teacher's. */
static __device__ inline bool xdi_cuda_gold_agree(const xd_xtoken_gold_args &a, const double *words, int64_t stride) {
    xdi_cuda_top mean = { -(double)INFINITY, INT64_MAX }, other = mean;
    for (int r = 0; r < a.shards; r++, words += stride) {
        const xdi_cuda_top one = { words[XD_XTOKEN_GOLD_MEAN], (int64_t)words[XD_XTOKEN_GOLD_PAIR] };
        const xdi_cuda_top two = { words[XD_XTOKEN_GOLD_OTHER_MEAN], (int64_t)words[XD_XTOKEN_GOLD_OTHER] };
        if (one.at >= 0) mean = xdi_cuda_top_join()(mean, one);
        if (two.at >= 0) other = xdi_cuda_top_join()(other, two);
    }
    return mean.at != INT64_MAX && mean.at == other.at;
}

/* By one thread; the sums of this rank's pairs stand in their cells. */
template <typename Totals>
static __device__ inline void xdi_cuda_gold_put_merged(const xd_xtoken_gold_args &a, int64_t chunk, const Totals &totals) {
    const int64_t width = XD_XTOKEN_GOLD_WORDS + a.k;
    a.merged[2 * chunk] = xdi_cuda_gold_value(totals, 0);
    a.merged[2 * chunk + 1] = xdi_cuda_gold_agree(a, a.all + chunk * width, a.count * width) ? 1.0 : 0.0;
    xdi_cuda_gold_add(a.sums, chunk * XDI_CUDA_GOLD_SUMS + XDI_CUDA_GOLD_SLOPES, totals, XDI_CUDA_GOLD_SLOPES);
}

/* Row i of the call; the first of a chunk's completes the chunk. */
static __device__ inline void xdi_cuda_gold_close_row(const xd_xtoken_gold_args &a, int64_t i, int64_t place) {
    const int64_t cell = place * XDI_CUDA_GOLD_SUMS;
    const double kl = xdi_cuda_cell_value(a.fixed, a.sums, cell + XDI_CUDA_GOLD_KL);
    const double sum = a.write ? xdi_cuda_cell_value(a.fixed, a.sums, cell + XDI_CUDA_GOLD_SLOPES) : 0.0;
    xd_xtoken_close_args one = {};
    one.merged = a.merged + 2 * place;
    one.chunk = a.chunks + place;
    a.delta[i] = __dmul_rn(sum, __ddiv_rn(one.chunk->factor, a.student.temperature));
    if (i == a.student.begin[place] - a.student.begin[0]) xd_xtoken_close_chunk(&one, kl, sum);
}

/* ---- ends: a block a chunk. Where one rank has all columns, nothing is left to be merged ---- */

template <bool FIXED>
static __global__ void __launch_bounds__(xdi_cuda_gold_end<FIXED>::TEAM)
    xdi_cuda_gold_ends_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t chunk = (int64_t)blockIdx.x;
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> mine;
    XD_UNROLL_N(1)
    for (int side = 0; side < 2 && a.k > 0 && a.shards > 1; side++) xdi_cuda_gold_tell<FIXED>(a, chunk, side == 1);
    if (a.k > 0 && a.shards == 1) xdi_cuda_gold_compare_lists<FIXED>(a, chunk, &mine);
    const auto totals = xdi_cuda_team_totals<xdi_cuda_gold_end<FIXED>::TEAM>(mine);
    if (threadIdx.x >= XDI_CUDA_WARP) return;
    xdi_cuda_gold_join<FIXED>(a, chunk);
    if (a.shards != 1) return;
    if (threadIdx.x == 0) xdi_cuda_gold_put_merged(a, chunk, totals);
    __syncwarp();
    const xdi_cuda_xtoken_range rows(a.student, chunk);
    for (int64_t i = rows.begin + (int64_t)threadIdx.x; i < rows.end; i += XDI_CUDA_WARP) xdi_cuda_gold_close_row(a, i, chunk);
}

/* BF16 keys that a block's shared memory holds beside a sort and what is static. */
static xd_result xdi_cuda_gold_kept(xd_ctx *ctx, int64_t bytes, int64_t *kept) {
    const int64_t others = 28 << 10;
    int device = 0, most = 0;
    XDI_CUDA_TRY(ctx, cudaGetDevice(&device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    *kept = most > bytes + others ? (most - bytes - others) / 16 * 8 : 0;
    return XD_OK;
}

template <bool FIXED, int EACH, typename T>
static xd_result xdi_cuda_gold_sort_keys(const xd_launch *launch, const xd_xtoken_gold_args *a, int64_t kept) {
    const size_t bytes = (size_t)xdi_cuda_gold_sort_room<EACH>::BYTES + (sizeof(T) == 2 ? 2 * (size_t)kept : 0);
    const auto kernel = xdi_cuda_gold_lists_kernel<FIXED, EACH, T>; /* its commas are none of the macro's */
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(2 * a->count, XDI_CUDA_GOLD_TEAM, bytes), kernel, *a, (int)kept);
}

template <bool FIXED, int EACH> static xd_result xdi_cuda_gold_sort_lists(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const int64_t longest = a->map.rest_count > a->map.other_rest_count ? a->map.rest_count : a->map.other_rest_count;
    const bool narrow = a->student.logits.dtype == XD_DTYPE_BF16 || a->teacher.logits.dtype == XD_DTYPE_BF16;
    int64_t kept = 0;
    if (!FIXED && narrow) XD_TRY(xdi_cuda_gold_kept(launch->ctx, xdi_cuda_gold_sort_room<EACH>::BYTES, &kept));
    if (kept > longest) kept = (longest + 7) / 8 * 8;
    if (kept > 0) XD_TRY((xdi_cuda_gold_sort_keys<false, EACH, xdi_cuda_bf16>(launch, a, kept)));
    return xdi_cuda_gold_sort_keys<FIXED, EACH, float>(launch, a, kept);
}

template <bool FIXED> static xd_result xdi_cuda_gold_lists(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    if (a->k > XDI_CUDA_SELECT_MANY)
        XD_TRY((xdi_cuda_gold_sort_lists<FIXED, 0>(launch, a)));
    else if (a->k > XDI_CUDA_SELECT_TEAM)
        XD_TRY((xdi_cuda_gold_sort_lists<FIXED, XDI_CUDA_SELECT_EACH>(launch, a)));
    else if (a->k > 0)
        XD_TRY((xdi_cuda_gold_sort_lists<FIXED, 1>(launch, a)));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, (int)xdi_cuda_gold_end<FIXED>::TEAM), xdi_cuda_gold_ends_kernel<FIXED>, *a);
}

/* ---- sums ---- */

/* The log-sum-exps of the teacher's rows, a block each. */
template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_lse_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const double lse = xdi_cuda_row_lse<T>(a.teacher, a.teacher.rows[blockIdx.x]);
    if (threadIdx.x == 0) xdi_cuda_gold_room(a).lse[blockIdx.x] = lse;
}

static xd_result xdi_cuda_gold_sums(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->teacher.logits.dtype, T, {
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->teacher.count, XDI_CUDA_TEAM_BLOCK), xdi_cuda_gold_lse_kernel<T>, *a));
    })
    XD_TRY(xdi_cuda_gold_pairs_all(launch, a));
    XDI_CUDA_CELLS(a->fixed, FIXED, { return xdi_cuda_gold_lists<FIXED>(launch, a); })
}

/* ---- merge: one block per chunk; every entry finds its rank among those of all shards ---- */

/* Of entry i of a shard's tail: its rank among those of all. */
static __device__ inline int64_t xdi_cuda_gold_rank(const xd_xtoken_gold_args &a, const double *tails, int64_t stride, int shard,
                                                    int64_t i, double value) {
    int64_t rank = i;
    for (int r = 0; r < a.shards; r++)
        if (r != shard) rank += xdi_cuda_tail_before(tails + r * stride, a.k, value, r < shard);
    return rank;
}

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_SELECT_TEAM)
    xdi_cuda_gold_merge_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t chunk = (int64_t)blockIdx.x, width = XD_XTOKEN_GOLD_WORDS + a.k, stride = a.count * width;
    const double *tails = a.all + chunk * width + XD_XTOKEN_GOLD_WORDS, *others = a.other_tail + chunk * a.k;
    const int64_t *found = a.found + chunk * a.k;
    float *u = a.u + chunk * a.student.columns;
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> mine;
    for (int shard = 0; shard < a.shards; shard++)
        for (int64_t i = (int64_t)threadIdx.x; i < a.k; i += XDI_CUDA_SELECT_TEAM) {
            const double value = tails[shard * stride + i];
            const int64_t rank = xdi_cuda_gold_rank(a, tails, stride, shard, i, value);
            if (isnan(value)) mine.add_wide(0, value);
            if (rank >= a.k) continue;
            const int64_t column = shard == a.shard ? found[i] : -1;
            xdi_cuda_gold_compare<FIXED>(value, others[rank], column, column >= 0 ? u[column] : 0.0f, u, &mine);
        }
    const auto totals = xdi_cuda_team_totals<XDI_CUDA_SELECT_TEAM>(mine);
    if (threadIdx.x == 0) xdi_cuda_gold_put_merged(a, chunk, totals);
}

static xd_result xdi_cuda_gold_merge(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_SELECT_TEAM), xdi_cuda_gold_merge_kernel<FIXED>, *a);
    })
}

/* ---- close: one thread per row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_close_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.student.count) return;
    xdi_cuda_gold_close_row(a, i, a.student.places[i]);
}

static xd_result xdi_cuda_gold_close(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.count), xdi_cuda_gold_close_kernel, *a);
}

static xd_result xdi_cuda_gold_gradient(const xd_launch *launch, const xd_xtoken_gold_args *a, const xd_xtoken_gradient *to) {
    xdi_cuda_grade f = xdi_cuda_grade_of(to);
    f.u = a->u;
    f.scale = 1.0 / a->student.temperature;
    f.by_factor = true;
    f.delta = a->delta;
    f.chunks = a->chunks;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_MEANS>(launch, f, a->count, a->student.count);
}

/* ---- table ---- */

template <bool FIXED, int EACH, typename T> static xd_result xdi_cuda_gold_lists_load(xd_ctx *ctx) {
    const int64_t bytes = xdi_cuda_gold_sort_room<EACH>::BYTES;
    const auto kernel = xdi_cuda_gold_lists_kernel<FIXED, EACH, T>;
    int64_t kept = 0;
    XD_TRY(xdi_cuda_load(ctx, kernel));
    if (sizeof(T) == 2) XD_TRY(xdi_cuda_gold_kept(ctx, bytes, &kept));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes + 2 * kept)));
    return XD_OK;
}

template <int EACH> static xd_result xdi_cuda_gold_sorts_load(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_gold_lists_load<false, EACH, xdi_cuda_bf16>(ctx)));
    XD_TRY((xdi_cuda_gold_lists_load<false, EACH, float>(ctx)));
    return xdi_cuda_gold_lists_load<true, EACH, float>(ctx);
}

template <bool FIXED> static xd_result xdi_cuda_gold_tile_load_cells(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_ends_kernel<FIXED>));
    return xdi_cuda_load(ctx, xdi_cuda_gold_merge_kernel<FIXED>);
}

static xd_result xdi_cuda_gold_tile_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_partners_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_lse_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_lse_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_close_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_pairs_kernel<true, float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_pairs_kernel<false, float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_pairs_kernel<false, xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_gold_sorts_load<0>(ctx));
    XD_TRY(xdi_cuda_gold_sorts_load<1>(ctx));
    XD_TRY(xdi_cuda_gold_sorts_load<XDI_CUDA_SELECT_EACH>(ctx));
    XD_TRY(xdi_cuda_gold_tile_load_cells<true>(ctx));
    return xdi_cuda_gold_tile_load_cells<false>(ctx);
}

static void xdi_cuda_gold_tile_fill(xd_xtoken_kernels *kernels) {
    kernels->gold_bytes = xdi_cuda_gold_bytes;
    kernels->gold_partners = xdi_cuda_gold_partners;
    kernels->gold_sums = xdi_cuda_gold_sums;
    kernels->gold_merge = xdi_cuda_gold_merge;
    kernels->gold_close = xdi_cuda_gold_close;
    kernels->gold_gradient = xdi_cuda_gold_gradient;
}

/* >>cuda/xtoken_rows.cu */

/* Losses across tokenizers, by single rows: moments, and teachers of the student's own tokenizer.
 * kernel/cpu/xtoken_rows.c is the reference. */

/* ---- moments: one block per row; two or three reads, all but the first mostly from the cache ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_moments_kernel(const __grid_constant__ xd_xtoken_moments_args a) {
    const int64_t i = (int64_t)blockIdx.x, row = a.x.rows[i], first = XDI_CUDA_EIGHT * (int64_t)threadIdx.x;
    const xdi_cuda_largest best = xdi_cuda_row_largest<XDI_CUDA_TEAM_BLOCK>(a.x.logits, row, a.x.columns);
    const bool counts = !best.broken && best.max > -INFINITY;
    xdi_cuda_sums<1, false> sums, entropies;
    for (int64_t c = first; counts && c < a.x.columns; c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.x.logits, row, c, a.x.columns);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++)
            if (c + j < a.x.columns) sums.add(0, expf(__fsub_rn(x.at[j], best.max)));
        sums.end_eight();
    }
    const double sum = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(sums).sum[0];
    const double log_sum = counts ? log(sum) : (double)NAN;
    for (int64_t c = first; a.entropy && c < a.x.columns; c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.x.logits, row, c, a.x.columns);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const double p =
                exp((double)__fsub_rn(x.at[j], best.max) - log_sum); /* near 1, ln p has no digits in f32 */
            if (c + j < a.x.columns) entropies.add_wide(0, xd_xtoken_entropy_term(p));
        }
    }
    const double entropy = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(entropies).sum[0];
    if (threadIdx.x != 0) return;
    const int64_t label = a.labels.data ? xd_id_at(a.labels, row) : -1;
    double *out = a.moments + i * XD_XTOKEN_MOMENTS;
    out[XD_XTOKEN_LARGEST] = best.broken ? (double)NAN : (double)best.max;
    out[XD_XTOKEN_LOG_SUM] = log_sum;
    out[XD_XTOKEN_ENTROPY] = a.entropy && !counts ? (double)NAN : entropy;
    out[XD_XTOKEN_LABEL] =
        label >= 0 && label < a.x.columns ? (double)xdi_cuda_element(a.x.logits, row, label) : (double)NAN;
}

static xd_result xdi_cuda_xtoken_moments(const xd_launch *launch, const xd_xtoken_moments_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->x.count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_moments_kernel, *a);
}

/* ---- pick: one thread per entry ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_pick_kernel(const __grid_constant__ xd_xtoken_pick_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.x.count * a.k) return;
    const int64_t v = a.ids[i % a.k] - a.x.first, row = a.x.rows[i / a.k];
    double value = -(double)INFINITY;
    if (v >= 0 && v < a.x.columns)
        value = xd_xtoken_picked(a.add ? a.out[i] : 0.0, a.scale, (double)xdi_cuda_element(a.x.logits, row, v));
    if (xd_xtoken_row_is_bad(&a.x, row)) value = (double)NAN;
    a.out[i] = value;
}

static xd_result xdi_cuda_xtoken_pick(const xd_launch *launch, const xd_xtoken_pick_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count * a->k == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->x.count * a->k), xdi_cuda_xtoken_pick_kernel, *a);
}

/* ---- compare: one block per row, whose two lists stay in the cache ---- */

/* Log-softmax in place. */
static __device__ inline void xdi_cuda_xtoken_log_softmax(double *x, int64_t k) {
    const double lse = xdi_cuda_block_lse(k, [=](int64_t j) { return x[j]; });
    for (int64_t j = (int64_t)threadIdx.x; j < k; j += XDI_CUDA_TEAM_BLOCK) x[j] = __dsub_rn(x[j], lse);
}

/* A thread reads and writes its own entries only, except for the most probable ones. */
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_compare_kernel(const __grid_constant__ xd_xtoken_compare_args a) {
    xd_xtoken_chunk *chunk = a.chunks + blockIdx.x;
    double *s = a.student + (int64_t)blockIdx.x * a.k, *t = a.teacher + (int64_t)blockIdx.x * a.k;
    const int64_t first = (int64_t)threadIdx.x;
    double value = 0.0;
    if (!chunk->compared) return;
    for (int64_t j = first; j < a.k; j += XDI_CUDA_TEAM_BLOCK) {
        s[j] = __ddiv_rn(s[j], a.temperature);
        t[j] = __ddiv_rn(__ddiv_rn(t[j], a.divisor), a.temperature);
    }
    const bool agree = xdi_cuda_block_argmax(s, a.k) == xdi_cuda_block_argmax(t, a.k);
    xdi_cuda_xtoken_log_softmax(s, a.k);
    xdi_cuda_xtoken_log_softmax(t, a.k);
    for (int64_t j = first; j < a.k; j += XDI_CUDA_TEAM_BLOCK) xd_xtoken_add_kl(s[j], t[j], a.reverse, &value);
    value = xdi_cuda_block_sum(value);
    for (int64_t j = first; j < a.k; j += XDI_CUDA_TEAM_BLOCK)
        s[j] = xd_xtoken_kl_slope(s[j], t[j], a.reverse, value);
    if (threadIdx.x != 0) return;
    chunk->value = value;
    chunk->agree = agree;
    chunk->largest = xd_xtoken_chunk_takes(chunk, value) ? 1.0 : 0.0;
}

static xd_result xdi_cuda_xtoken_compare(const xd_launch *launch, const xd_xtoken_compare_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_compare_kernel, *a);
}

static xd_result xdi_cuda_xtoken_rows_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_moments_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_pick_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_compare_kernel);
}

static void xdi_cuda_xtoken_rows_fill(xd_xtoken_kernels *kernels) {
    kernels->moments = xdi_cuda_xtoken_moments;
    kernels->pick = xdi_cuda_xtoken_pick;
    kernels->compare = xdi_cuda_xtoken_compare;
}

/* >>cuda/xtoken_lists.cu */

/* Losses across tokenizers whose chunks each have their own list of columns: kernel/cpu/xtoken_lists.c is the reference. */

/* The chunk that an entry of the lists belongs to. */
static __device__ inline int64_t xdi_cuda_list_place(const xd_xtoken_lists &a, int64_t entry) {
    int64_t low = 0, high = a.count - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (a.offset[middle] <= entry)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Adds scale (p M) of one teacher id over this shard's columns: the terms first, first + step, ... of that id. */
template <bool FIXED>
static __device__ inline void xdi_cuda_list_add(const xd_xtoken_list_args &a, int64_t row, int32_t id,
                                                double scale, int64_t first, int64_t step,
                                                xdi_cuda_sums<1, FIXED> *sum) {
    const xd_xtoken_projection &m = a.lists.projection;
    if (!m.column_begin) {
        const int64_t v = id - a.x.first;
        if (first == 0 && v >= 0 && v < a.x.columns)
            sum->add_wide(0, __dmul_rn(scale, (double)xdi_cuda_xtoken_p(a.x, row, v)));
        return;
    }
    for (int64_t e = m.column_begin[id] + first; e < m.column_begin[id + 1]; e += step) {
        const int64_t v = m.student_id[e] - a.x.first;
        if (v < 0 || v >= a.x.columns) continue;
        const double weight = __dmul_rn((double)m.column_weight[e], scale);
        sum->add_wide(0, __dmul_rn(weight, (double)xdi_cuda_xtoken_p(a.x, row, v)));
    }
}

/* ---- list_project: one warp per entry, which goes through the entry's column of the matrix once per row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_list_project_kernel(const __grid_constant__ xd_xtoken_list_args a) {
    const int64_t entry = xdi_cuda_team_row<XDI_CUDA_WARP>(), lane = xdi_cuda_team_thread<XDI_CUDA_WARP>();
    if (entry >= a.lists.entries) return;
    const int64_t place = xdi_cuda_list_place(a.lists, entry);
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t r = 0; r < a.x.count; r++)
        if (a.x.places[r] == place)
            xdi_cuda_list_add<FIXED>(a, a.x.rows[r], a.lists.ids[entry], 1.0, lane, XDI_CUDA_WARP, &mine);
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    if (lane == 0) xdi_cuda_cell_join(a.cells, entry, totals);
}

static xd_result xdi_cuda_list_project(const xd_launch *launch, const xd_xtoken_list_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0 || a->lists.entries == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->lists.entries, XDI_CUDA_WARP),
                               xdi_cuda_list_project_kernel<FIXED>, *a);
    })
}

/* ---- list_divergence: one block per chunk; three reads of its lists, which stay in the cache ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_list_divergence_kernel(const __grid_constant__ xd_xtoken_list_args a) {
    xd_xtoken_chunk *c = a.chunks + blockIdx.x;
    const int64_t begin = a.lists.offset[blockIdx.x], n = a.lists.offset[blockIdx.x + 1] - begin;
    const int64_t first = (int64_t)threadIdx.x;
    double *q = a.student + begin, inside = 0.0, target = 0.0, value = 0.0, largest = 0.0, slope = 0.0;
    const double *t = a.teacher + begin;
    if (n == 0) return;
    for (int64_t i = first; i < n; i += XDI_CUDA_TEAM_BLOCK) q[i] = __ddiv_rn(q[i], c->student);
    const bool agree = xdi_cuda_block_argmax(q, n) == xdi_cuda_block_argmax(t, n);
    for (int64_t i = first; i < n; i += XDI_CUDA_TEAM_BLOCK) {
        inside += q[i];
        target += t[i];
        value += xd_xtoken_list_term(q[i], t[i], a.reverse, &q[i]);
    }
    const double outside = 1.0 - xdi_cuda_block_sum(inside), all = xdi_cuda_block_sum(target);
    value = xdi_cuda_block_sum(value) + xd_xtoken_list_rest(outside, all, a.reverse, &slope);
    const double factor = xd_xtoken_chunk_factor(c, value);
    for (int64_t i = first; i < n; i += XDI_CUDA_TEAM_BLOCK) {
        q[i] = xd_xtoken_scaled(xd_xtoken_list_slope(q[i], outside, slope), factor);
        if (fabs(q[i]) > largest) largest = fabs(q[i]);
    }
    largest = xdi_cuda_block_reduce(largest, 0.0, xdi_cuda_larger());
    if (threadIdx.x != 0) return;
    c->value = value;
    c->agree = agree;
    c->largest = largest;
}

static xd_result xdi_cuda_list_divergence(const xd_launch *launch, const xd_xtoken_list_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->lists.count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->lists.count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_list_divergence_kernel, *a);
}

/* ---- list_delta: one block per row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_list_delta_kernel(const __grid_constant__ xd_xtoken_list_args a) {
    const int64_t r = (int64_t)blockIdx.x, place = a.x.places[r], end = a.lists.offset[place + 1];
    const double largest = a.chunks[place].largest;
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t i = a.lists.offset[place] + (int64_t)threadIdx.x; i < end; i += XDI_CUDA_TEAM_BLOCK)
        if (a.student[i] != 0.0)
            xdi_cuda_list_add<FIXED>(a, a.x.rows[r], a.lists.ids[i], __ddiv_rn(a.student[i], largest), 0, 1, &mine);
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, r, totals);
}

static xd_result xdi_cuda_list_delta(const xd_launch *launch, const xd_xtoken_list_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->x.count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_list_delta_kernel<FIXED>, *a);
    })
}

/* ---- list_gradient: the indices of all ids in each chunk's list, one thread per entry; then as for other gradients ---- */

static size_t xdi_cuda_list_bytes(int64_t, const xd_xtoken_lists *lists) {
    return (size_t)(lists->count * lists->projection.teacher_size) * sizeof(int32_t);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_list_slots_kernel(const __grid_constant__ xd_xtoken_lists lists, int32_t *slots) {
    const int64_t entry = xdi_cuda_flat_index();
    if (entry >= lists.entries) return;
    const int64_t place = xdi_cuda_list_place(lists, entry);
    slots[place * lists.projection.teacher_size + lists.ids[entry]] = (int32_t)(entry - lists.offset[place]);
}

static xd_result xdi_cuda_list_gradient(const xd_launch *launch, const xd_xtoken_list_gradient_args *a) {
    int32_t *slots = static_cast<int32_t *>(a->scratch);
    xdi_cuda_xtoken_form f = {};
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->to.x.count == 0 || a->lists.entries == 0) return XD_OK;
    XD_TRY(xdi_cuda_fill(launch, slots, 0xff, xdi_cuda_list_bytes(a->to.x.columns, &a->lists)));
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->lists.entries), xdi_cuda_list_slots_kernel, a->lists,
                            slots));
    f.to = a->to;
    f.projection = a->lists.projection;
    f.places = slots;
    f.ids = a->lists.projection.teacher_size;
    f.offset = a->lists.offset;
    f.dy = a->dy;
    f.delta = a->delta;
    f.chunks = a->chunks;
    return xdi_cuda_xtoken_gradient(launch, f, a->to.x.count);
}

static xd_result xdi_cuda_list_kernels_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_project_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_project_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_divergence_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_delta_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_delta_kernel<false>));
    return xdi_cuda_load(ctx, xdi_cuda_list_slots_kernel);
}

static void xdi_cuda_list_kernels_fill(xd_xtoken_kernels *kernels) {
    kernels->list_project = xdi_cuda_list_project;
    kernels->list_divergence = xdi_cuda_list_divergence;
    kernels->list_delta = xdi_cuda_list_delta;
    kernels->list_bytes = xdi_cuda_list_bytes;
    kernels->list_gradient = xdi_cuda_list_gradient;
}

/* >>cuda/xtoken_chunks.cu */

/* Averages of chunks, with the bits of kernel/cpu/xtoken_chunks.c. The chunk of every row is in host memory and is passed in
 * the launch parameters, a few hundred rows per launch, so that nothing is copied or retained. */

/* The rows, or chunks, from `first` on: the chunk's index among all, -1: none, and its size. */
struct xdi_cuda_chunk_list {
    enum { ROOM = XDI_CUDA_LIST_BYTES / (int)(2 * sizeof(int64_t)) };
    int64_t first, count;
    int64_t chunk[ROOM], size[ROOM];
};

/* Calls launch_list with the lists of `count` rows or chunks; chunk_of and size_of give their contents. */
template <typename ChunkOf, typename SizeOf, typename LaunchList>
static xd_result xdi_cuda_each_chunk_list(int64_t count, ChunkOf chunk_of, SizeOf size_of,
                                          LaunchList launch_list) {
    xdi_cuda_chunk_list list;
    for (list.first = 0; list.first < count; list.first += list.count) {
        list.count = count - list.first;
        if (list.count > xdi_cuda_chunk_list::ROOM) list.count = xdi_cuda_chunk_list::ROOM;
        for (int64_t i = 0; i < list.count; i++) {
            list.chunk[i] = chunk_of(list.first + i);
            list.size[i] = list.chunk[i] < 0 ? 0 : size_of(list.chunk[i]);
        }
        XD_TRY(launch_list(list));
    }
    return XD_OK;
}

/* ---- sums: one thread per column; reads every element once ---- */

/* A block handles only the chunks of its group, so that many blocks share a few columns, and one thread adds to each sum, in
 * the order of the rows. */
enum { XDI_CUDA_CHUNK_GROUPS = 16 };

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_chunk_sums_kernel(
    const __grid_constant__ xd_chunk_args a, const __grid_constant__ xdi_cuda_chunk_list list) {
    const int64_t n = a.rows.cols, group = (int64_t)blockIdx.x % XDI_CUDA_CHUNK_GROUPS;
    const int64_t c =
        (int64_t)blockIdx.x / XDI_CUDA_CHUNK_GROUPS * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x;
    if (c >= n) return;
    for (int64_t i = 0; i < list.count; i++) {
        const int64_t chunk = list.chunk[i];
        if (chunk < 0 || chunk % XDI_CUDA_CHUNK_GROUPS != group) continue;
        xdi_cuda_cell_add<FIXED>(a.out, chunk * n + c, (double)xdi_cuda_element(a.rows, list.first + i, c));
    }
}

static xd_result xdi_cuda_chunk_sums(const xd_launch *launch, const xd_chunk_args *a) {
    const int64_t blocks = (a->rows.cols + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks * XDI_CUDA_CHUNK_GROUPS, XDI_CUDA_TEAM_BLOCK);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_chunk_list(
        a->rows.rows, [&](int64_t row) { return xd_chunk_of_row(a, row); }, [](int64_t) { return 0; },
        [&](const xdi_cuda_chunk_list &list) {
            XDI_CUDA_CELLS(a->fixed, FIXED, {
                return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_chunk_sums_kernel<FIXED>, *a, list);
            })
        });
}

/* ---- averages: one thread per entry ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_chunk_averages_kernel(
    const __grid_constant__ xd_chunk_args a, const __grid_constant__ xdi_cuda_chunk_list list) {
    const int64_t n = a.rows.cols, i = xdi_cuda_flat_index();
    if (i >= list.count * n) return;
    const int64_t size = list.size[i / n], at = list.first * n + i;
    a.out[at] = xd_chunk_average(a.sums[at], size);
}

static xd_result xdi_cuda_chunk_averages(const xd_launch *launch, const xd_chunk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_chunk_list(
        a->count, [](int64_t chunk) { return chunk; }, [&](int64_t chunk) { return a->sizes[chunk]; },
        [&](const xdi_cuda_chunk_list &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(list.count * a->rows.cols),
                                   xdi_cuda_chunk_averages_kernel, *a, list);
        });
}

/* ---- spread: one block per row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_chunk_spread_kernel(
    const __grid_constant__ xd_chunk_args a, const __grid_constant__ xdi_cuda_chunk_list list) {
    const int64_t n = a.rows.cols, row = list.first + blockIdx.x, chunk = list.chunk[blockIdx.x];
    const double size = (double)list.size[blockIdx.x];
    for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; c < n;
         c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        xdi_cuda_eight out = {};
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (chunk >= 0 && c + i < n) out.at[i] = (float)__ddiv_rn(a.weight[chunk * n + c + i], size);
        xdi_cuda_write_any(a.rows, row, c, n, out);
    }
}

static xd_result xdi_cuda_chunk_spread(const xd_launch *launch, const xd_chunk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_chunk_list(
        a->rows.rows, [&](int64_t row) { return xd_chunk_of_row(a, row); },
        [&](int64_t chunk) { return a->sizes[chunk]; },
        [&](const xdi_cuda_chunk_list &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.count, XDI_CUDA_TEAM_BLOCK),
                                   xdi_cuda_chunk_spread_kernel, *a, list);
        });
}

static xd_result xdi_cuda_chunks_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_chunk_sums_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_chunk_sums_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_chunk_averages_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_chunk_spread_kernel);
}

static void xdi_cuda_chunks_fill(xd_xtoken_kernels *kernels) {
    kernels->chunk_sums = xdi_cuda_chunk_sums;
    kernels->chunk_averages = xdi_cuda_chunk_averages;
    kernels->chunk_spread = xdi_cuda_chunk_spread;
}

/* >>cuda/uld.cu */

/* Universal logit distillation: kernel/cpu/uld.c is the reference. Exponentials are f32, and everything computed from them is
 * double. Sums are split over blocks, which write partial sums to the scratch; one block adds these in order. */

enum { XDI_CUDA_ULD_DIGITS = 256, XDI_CUDA_ULD_PASSES = 4 };

/* scale times the probabilities of a row. */
struct xdi_cuda_uld_power {
    float max, factor;
    double scale;

    __device__ xdi_cuda_uld_power(const xd_uld_rows &side, int64_t row, double times) {
        const double *part = side.parts + row * XD_SOFTMAX_PARTS;
        max = (float)part[XD_SOFTMAX_MAX];
        factor = xdi_cuda_factor(XDI_CUDA_LOG2E / side.temperature);
        scale = times / part[XD_SOFTMAX_SUM];
    }
    __device__ double operator()(float logit) const {
        return __dmul_rn(scale, (double)xdi_cuda_exp_of(__fsub_rn(logit, max), factor));
    }
};

static int64_t xdi_cuda_uld_segments(int64_t count) {
    return (count + XD_ULD_SEGMENT - 1) / XD_ULD_SEGMENT;
}

/* ---- merge: one thread per chunk ---- */

static __device__ inline void xdi_cuda_uld_merge_side(const xd_uld_rows &side, int which,
                                                      xd_uld_chunk *chunk) {
    double factor = 1.0;
    for (int64_t row = chunk->begin[which]; row < chunk->end[which]; row++) {
        const double max = side.parts[row * XD_SOFTMAX_PARTS + XD_SOFTMAX_MAX];
        if (!isfinite(max)) {
            chunk->finite = false;
            return;
        }
        if (row == chunk->base[which]) continue;
        const double p =
            xdi_cuda_uld_power(side, row, 1.0)(xdi_cuda_element(side.logits, row, side.ids[row]));
        side.scores[row] = p;
        factor *= xd_uld_floored(p);
    }
    chunk->factor[which] = factor;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_uld_merge_kernel(const __grid_constant__ xd_uld_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.count) return;
    a.chunks[i].finite = true;
    for (int which = 0; which < XD_ULD_SIDES; which++)
        xdi_cuda_uld_merge_side(a.side[which], which, &a.chunks[i]);
}

static xd_result xdi_cuda_uld_merge(const xd_launch *launch, const xd_uld_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_uld_merge_kernel, *a);
}

/* ---- sort: a radix sort of four digits; for each digit: a histogram of every segment of a list, the offsets, and the scatter.
 * Reads a list twice per digit and writes it once. ---- */

/* One pass over the lists of a side: from a's logits, or from the previous pass. */
struct xdi_cuda_uld_pass {
    xd_uld_rows side;
    const xd_uld_chunk *chunks;
    int which, shift;
    bool first;
    const uint64_t *from; /* [lists, count] */
    uint64_t *to;
    unsigned *counts; /* [lists, XDI_CUDA_ULD_DIGITS, segments], then offsets */
    int64_t segments;

    __device__ uint64_t record(int64_t list, int64_t j) const {
        if (!first) return from[list * side.count + j];
        const int64_t id = side.list ? (int64_t)side.list[j] : j;
        const uint32_t key =
            ~xdi_cuda_select_key(xdi_cuda_element(side.logits, chunks[list].base[which], id));
        return (uint64_t)key << 32 | (uint64_t)id;
    }
    __device__ int digit(uint64_t record) const {
        return (int)(record >> shift & (XDI_CUDA_ULD_DIGITS - 1));
    }
    __device__ unsigned *cell(int64_t list, int64_t digit, int64_t segment) const {
        return counts + (list * XDI_CUDA_ULD_DIGITS + digit) * segments + segment;
    }
    __device__ int64_t end(int64_t segment) const {
        const int64_t next = (segment + 1) * XD_ULD_SEGMENT;
        return next < side.count ? next : side.count;
    }
};

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_uld_count_kernel(const __grid_constant__ xdi_cuda_uld_pass p) {
    XD_SHARED(unsigned, counts, [XDI_CUDA_ULD_DIGITS]);
    const int64_t list = (int64_t)blockIdx.x / p.segments, segment = (int64_t)blockIdx.x % p.segments;
    if (!p.chunks[list].finite) return; /* the whole block returns */
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t j = segment * XD_ULD_SEGMENT + (int64_t)threadIdx.x; j < p.end(segment);
         j += XDI_CUDA_TEAM_BLOCK)
        atomicAdd(&counts[p.digit(p.record(list, j))], 1u);
    __syncthreads();
    *p.cell(list, (int64_t)threadIdx.x, segment) = counts[threadIdx.x];
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_uld_offset_kernel(const __grid_constant__ xdi_cuda_uld_pass p) {
    const int64_t list = (int64_t)blockIdx.x;
    unsigned mine = 0, total;
    if (!p.chunks[list].finite) return; /* the whole block returns */
    unsigned *cells = p.cell(list, (int64_t)threadIdx.x, 0);
    for (int64_t segment = 0; segment < p.segments; segment++) mine += cells[segment];
    unsigned at = xdi_cuda_select_scan<XDI_CUDA_TEAM_BLOCK>(mine, &total);
    for (int64_t segment = 0; segment < p.segments; segment++) {
        const unsigned here = cells[segment];
        cells[segment] = at;
        at += here;
    }
}

/* A warp takes neighbouring records, 32 at a time, so that records of one digit keep their order. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_uld_scatter_kernel(const __grid_constant__ xdi_cuda_uld_pass p) {
    enum { WARPS = XDI_CUDA_TEAM_BLOCK / XDI_CUDA_WARP, EACH = XD_ULD_SEGMENT / WARPS };
    static_assert((int)XDI_CUDA_TEAM_BLOCK == (int)XDI_CUDA_ULD_DIGITS, "a thread for each digit");
    XD_SHARED(unsigned, next, [WARPS * XDI_CUDA_ULD_DIGITS]);
    const int64_t list = (int64_t)blockIdx.x / p.segments, segment = (int64_t)blockIdx.x % p.segments;
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP, warp = (int)threadIdx.x / XDI_CUDA_WARP;
    const int64_t begin = segment * XD_ULD_SEGMENT + (int64_t)warp * EACH + lane, end = p.end(segment);
    unsigned *mine = next + warp * XDI_CUDA_ULD_DIGITS;
    if (!p.chunks[list].finite) return; /* the whole block returns */
    for (int w = 0; w < WARPS; w++) next[w * XDI_CUDA_ULD_DIGITS + (int)threadIdx.x] = 0;
    __syncthreads();
    for (int k = 0; k < EACH && begin + k < end; k += XDI_CUDA_WARP)
        atomicAdd(&mine[p.digit(p.record(list, begin + k))], 1u);
    __syncthreads();
    unsigned at = *p.cell(list, (int64_t)threadIdx.x, segment);
    for (int w = 0; w < WARPS; w++) {
        unsigned *cell = &next[w * XDI_CUDA_ULD_DIGITS + (int)threadIdx.x];
        const unsigned here = *cell;
        *cell = at;
        at += here;
    }
    __syncthreads();
    for (int k = 0; k < EACH; k += XDI_CUDA_WARP) {
        const bool has = begin + k < end;
        const uint64_t record = has ? p.record(list, begin + k) : 0;
        const int digit = has ? p.digit(record) : (int)XDI_CUDA_ULD_DIGITS;
        const unsigned equals = __match_any_sync(0xffffffffu, (unsigned)digit);
        const unsigned before = (unsigned)__popc(equals & ((1u << lane) - 1u));
        const unsigned to = has ? mine[digit] : 0;
        __syncwarp();
        if (has && before == 0) mine[digit] = to + (unsigned)__popc(equals);
        __syncwarp();
        if (has) p.to[list * p.side.count + to + before] = record;
    }
}

static xd_result xdi_cuda_uld_sort_side(const xd_launch *launch, const xd_uld_args *a, int which) {
    const xd_uld_rows *side = &a->side[which];
    xdi_cuda_uld_pass p;
    if (side->count == 0) return XD_OK;
    p.side = *side;
    p.chunks = a->chunks;
    p.which = which;
    p.counts = reinterpret_cast<unsigned *>(a->scratch);
    p.segments = xdi_cuda_uld_segments(side->count);
    p.from = NULL;
    for (int pass = 0; pass < XDI_CUDA_ULD_PASSES; pass++) {
        p.shift = 32 + 8 * pass;
        p.first = pass == 0;
        p.to = pass % 2 == 0 ? side->spare : side->sorted;
        const xdi_cuda_grid grid = xdi_cuda_grid_of(a->count * p.segments, XDI_CUDA_TEAM_BLOCK);
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_uld_count_kernel, p));
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK),
                                xdi_cuda_uld_offset_kernel, p));
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_uld_scatter_kernel, p));
        p.from = p.to;
    }
    return XD_OK;
}

static xd_result xdi_cuda_uld_sort(const xd_launch *launch, const xd_uld_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    for (int which = 0; which < XD_ULD_SIDES; which++) XD_TRY(xdi_cuda_uld_sort_side(launch, a, which));
    return XD_OK;
}

/* ---- compare: one block for each segment of the ranks and of the matched pairs of a chunk ---- */

enum { XDI_CUDA_ULD_UNMATCHED, XDI_CUDA_ULD_MATCHED, XDI_CUDA_ULD_MEAN, XDI_CUDA_ULD_TOTALS };
typedef xdi_cuda_sums<XDI_CUDA_ULD_TOTALS, false> xdi_cuda_uld_sums;

/* What a block uses of its chunk. */
struct xdi_cuda_uld_pair {
    const xd_uld_args &a;
    int64_t index;
    xdi_cuda_uld_power student, teacher;
    float *slope;

    __device__ xdi_cuda_uld_pair(const xd_uld_args &args, int64_t i)
        : a(args), index(i), student(args.side[XD_ULD_STUDENT], args.chunks[i].base[XD_ULD_STUDENT],
                                     args.chunks[i].factor[XD_ULD_STUDENT]),
          teacher(args.side[XD_ULD_TEACHER], args.chunks[i].base[XD_ULD_TEACHER],
                  args.chunks[i].factor[XD_ULD_TEACHER]),
          slope(args.slope ? args.slope + i * args.side[XD_ULD_STUDENT].columns : NULL) {}

    __device__ void rank(int64_t r, xdi_cuda_uld_sums *sums) const {
        const int64_t n = a.side[XD_ULD_STUDENT].count, m = a.side[XD_ULD_TEACHER].count;
        const uint64_t x = r < n ? a.side[XD_ULD_STUDENT].sorted[index * n + r] : 0;
        const uint64_t y = r < m ? a.side[XD_ULD_TEACHER].sorted[index * m + r] : 0;
        const double u = r < n ? student(xd_float_of_key((uint32_t)(x >> 32))) : 0.0;
        const double v = r < m ? teacher(xd_float_of_key((uint32_t)(y >> 32))) : 0.0;
        const bool compared = n > 0 && m > 0;
        const double d = compared ? xd_uld_sign(a.unmatched_weight, u, v) : 0.0;
        if (compared) sums->add_wide(XDI_CUDA_ULD_UNMATCHED, fabs(u - v));
        if (r >= n || !slope) return;
        slope[(uint32_t)x] = (float)d;
        sums->add_wide(XDI_CUDA_ULD_MEAN, d * u);
    }
    __device__ void matched(int64_t i, xdi_cuda_uld_sums *sums) const {
        const xd_uld_chunk &chunk = a.chunks[index];
        const int64_t s = a.matched[XD_ULD_STUDENT][i], t = a.matched[XD_ULD_TEACHER][i];
        const double u =
            student(xdi_cuda_element(a.side[XD_ULD_STUDENT].logits, chunk.base[XD_ULD_STUDENT], s));
        const double v =
            teacher(xdi_cuda_element(a.side[XD_ULD_TEACHER].logits, chunk.base[XD_ULD_TEACHER], t));
        double d;
        sums->add_wide(XDI_CUDA_ULD_MATCHED, xd_jsd_entry(u, v, a.beta, &d));
        if (!slope) return;
        slope[s] = (float)(a.matched_weight * d);
        sums->add_wide(XDI_CUDA_ULD_MEAN, a.matched_weight * d * u);
    }
};

static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_uld_compare_kernel(const __grid_constant__ xd_uld_args a,
                                                                        int64_t ranks, int64_t segments,
                                                                        int64_t parts) {
    const int64_t chunk = (int64_t)blockIdx.x / parts, part = (int64_t)blockIdx.x % parts;
    const bool sorted = part < segments;
    const int64_t begin = (sorted ? part : part - segments) * XD_ULD_SEGMENT + (int64_t)threadIdx.x;
    const int64_t all = sorted ? ranks : a.matched_count, room = begin + XD_ULD_SEGMENT;
    if (!a.chunks[chunk].finite) return; /* the whole block returns */
    const xdi_cuda_uld_pair pair(a, chunk);
    xdi_cuda_uld_sums mine;
    for (int64_t i = begin; i < room && i < all; i += XDI_CUDA_TEAM_BLOCK) {
        if (sorted)
            pair.rank(i, &mine);
        else
            pair.matched(i, &mine);
    }
    const xdi_cuda_uld_sums::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) reinterpret_cast<xdi_cuda_uld_sums::totals *>(a.scratch)[blockIdx.x] = totals;
}

/* One block per chunk. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_uld_total_kernel(const __grid_constant__ xd_uld_args a,
                                                                 int64_t parts) {
    const xdi_cuda_uld_sums::totals *from =
        reinterpret_cast<const xdi_cuda_uld_sums::totals *>(a.scratch) + (int64_t)blockIdx.x * parts;
    xd_uld_chunk *chunk = &a.chunks[blockIdx.x];
    xdi_cuda_uld_sums mine;
    if (!chunk->finite) return; /* the whole block returns */
    for (int64_t i = (int64_t)threadIdx.x; i < parts; i += XDI_CUDA_TEAM_BLOCK)
        mine.whole = xdi_cuda_uld_sums::join()(mine.whole, from[i]);
    const xdi_cuda_uld_sums::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x != 0) return;
    chunk->unmatched = totals.sum[XDI_CUDA_ULD_UNMATCHED];
    chunk->matched = totals.sum[XDI_CUDA_ULD_MATCHED];
    chunk->mean = xd_uld_mean(totals.sum[XDI_CUDA_ULD_MEAN], chunk->factor[XD_ULD_STUDENT]);
}

static xd_result xdi_cuda_uld_compare(const xd_launch *launch, const xd_uld_args *a) {
    const int64_t n = a->side[XD_ULD_STUDENT].count, m = a->side[XD_ULD_TEACHER].count, ranks = n > m ? n : m;
    const int64_t segments = xdi_cuda_uld_segments(ranks);
    const int64_t parts = segments + xdi_cuda_uld_segments(a->matched_count);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count * parts, XDI_CUDA_TEAM_BLOCK),
                            xdi_cuda_uld_compare_kernel, *a, ranks, segments, parts));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK), xdi_cuda_uld_total_kernel,
                           *a, parts);
}

/* ---- gradient: one thread per eight columns ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_uld_gradient_kernel(const __grid_constant__ xd_uld_args a, int64_t parts) {
    const xd_uld_rows &side = a.side[XD_ULD_STUDENT];
    const int64_t row = a.row + (int64_t)blockIdx.x / parts, i = (int64_t)a.owner[row] - a.first;
    const int64_t c =
        ((int64_t)blockIdx.x % parts * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x) * XDI_CUDA_EIGHT;
    xdi_cuda_eight out = {};
    if (c >= a.gradient.cols) return;
    if (a.owner[row] >= 0 && a.chunks[i].finite) {
        const xd_uld_chunk &chunk = a.chunks[i];
        const bool base = row == chunk.base[XD_ULD_STUDENT];
        const double mean = base ? chunk.mean : side.scores[row], factor = chunk.factor[XD_ULD_STUDENT];
        const double along = base ? factor : mean > XD_ULD_FLOOR ? factor * chunk.mean / mean : 0.0;
        const xdi_cuda_uld_power p(side, row, a.share * along / side.temperature);
        const float *slope = a.slope + i * side.columns;
        const xdi_cuda_eight x = xdi_cuda_read_any(side.logits, row, c, side.columns);
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_EIGHT; k++) {
            if (c + k >= side.columns) continue;
            const double d = base ? (double)slope[c + k] : c + k == side.ids[row] ? 1.0 : 0.0;
            out.at[k] = (float)(p(x.at[k]) * (d - mean));
        }
    }
    xdi_cuda_write_any(a.gradient, row, c, a.gradient.cols, out);
}

static xd_result xdi_cuda_uld_gradient(const xd_launch *launch, const xd_uld_args *a) {
    enum { COLUMNS = XDI_CUDA_TEAM_BLOCK * XDI_CUDA_EIGHT };
    const int64_t parts = (a->gradient.cols + COLUMNS - 1) / COLUMNS;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->rows * parts, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_uld_gradient_kernel, *a, parts);
}

/* ---- jsd ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_jsd_kernel(const __grid_constant__ xd_jsd_args a) {
    xd_flagged_sum mine = { 0.0, -1 };
    for (int64_t i = xdi_cuda_flat_index(); i < a.student.rows * a.student.cols;
         i += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK) {
        const int64_t r = i / a.student.cols, c = i % a.student.cols;
        double slope;
        mine.value += xd_jsd_entry((double)xdi_cuda_element(a.student, r, c),
                                         (double)xdi_cuda_element(a.teacher, r, c), a.beta, &slope);
        if (a.gradient.data) xdi_cuda_set_element(a.gradient, r, c, (float)(slope / a.denominator));
    }
    xdi_cuda_flagged_put(a.out + 1 + blockIdx.x, mine);
}

static xd_result xdi_cuda_jsd(const xd_launch *launch, const xd_jsd_args *a) {
    const int64_t blocks = xdi_cuda_flagged_blocks(a->student.rows * a->student.cols);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK), xdi_cuda_jsd_kernel, *a));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_flagged_kernel, a->out,
                           blocks);
}

static xd_result xdi_cuda_uld_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_merge_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_count_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_offset_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_scatter_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_compare_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_total_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_gradient_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_jsd_kernel);
}

static xd_uld_kernels xdi_cuda_uld_table() {
    xd_uld_kernels kernels = {};
    kernels.merge = xdi_cuda_uld_merge;
    kernels.sort = xdi_cuda_uld_sort;
    kernels.compare = xdi_cuda_uld_compare;
    kernels.gradient = xdi_cuda_uld_gradient;
    kernels.jsd = xdi_cuda_jsd;
    return kernels;
}

#endif
#ifndef XDISTILL_NO_DIFFUSION
/* >>cuda/doubles.cuh */

/* BF16 and F32 as doubles and back, in integers: a conversion to or from double takes as long as four other instructions or more.
 * What follows is exact in the range that it names; who calls it looks whether numbers were in it, and has another way. */

/* A lowered number is 2^-896 times the number: then the exponents of both types have the same bits. Subnormal numbers of F32 are
 * subnormal doubles. */
#define XDI_CUDA_RAISE 5.282945311356653e+269 /* 2^896 */

static __device__ inline double xdi_cuda_double_of(uint32_t high, uint32_t low) {
    return __hiloint2double((int)high, (int)low);
}

static __device__ inline uint32_t xdi_cuda_high_of(double value) {
    return (uint32_t)__double2hiint(value);
}

static __device__ inline uint32_t xdi_cuda_low_of(double value) {
    return (uint32_t)__double2loint(value);
}

/* Rounded to F32. gcc 12.2 makes copies of two neighbours that are rounded and widened again: hence "volatile" in the emulation. */
static __device__ inline double xdi_cuda_f32_of(double value) {
#if defined(XD_EMU)
    volatile float narrow = (float)value;
#else
    const float narrow = (float)value;
#endif
    return (double)narrow;
}

/* A finite F32 number of no sign, lowered. */
static __device__ inline double xdi_cuda_lowered(uint32_t bits) {
    return xdi_cuda_double_of(bits >> 3, bits << 29);
}

/* A finite BF16 number out of two, lowered. */
static __device__ inline double xdi_cuda_upper_half(uint32_t word) {
    return xdi_cuda_double_of((uint32_t)((int32_t)word >> 3) & 0x8fffe000u, 0);
}

static __device__ inline double xdi_cuda_lower_half(uint32_t word) {
    return xdi_cuda_upper_half(word << 16);
}

/* Bits of a where the mask has ones, and of b elsewhere. */
static __device__ inline uint32_t xdi_cuda_choose_bits(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(a), "r"(b));
    return bits;
#else
    return (mask & a) | (~mask & b);
#endif
}

/* A lowered number, rounded to what F32 holds; the last 29 bits of the double do not count. */
static __device__ inline uint64_t xdi_cuda_as_f32_bits(double lowered) {
    const uint64_t bits = (uint64_t)__double_as_longlong(lowered);
    return bits + (0x0fffffffu + (bits >> 29 & 1u));
}

static __device__ inline double xdi_cuda_as_f32(double lowered) {
    return __longlong_as_double((long long)(xdi_cuda_as_f32_bits(lowered) & ~(uint64_t)0x1fffffffu));
}

/* The F32 number of a lowered one; bits that it has not are cut off. */
static __device__ inline float xdi_cuda_raised(double lowered) {
    const uint32_t low = xdi_cuda_low_of(lowered), high = xdi_cuda_high_of(lowered);
    return xd_float_of_bits(xdi_cuda_choose_bits(0x80000000u, high, __funnelshift_l(low, high, 3)));
}

/* Whether BF16 numbers, two in a word, are all finite; maybe not where products of them overflow. */
struct xdi_cuda_finite {
    uint32_t found = 0;

    /* 0 x, which is a NaN unless x is finite */
    __device__ void note(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(found) : "r"(x), "r"(0));
#else
        found |= (((x & 0x7f807f80u) + 0x00800080u) & 0x80008000u) >> 1;
#endif
    }
    __device__ void note(uint32_t x, uint32_t y, uint32_t z) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        uint32_t all;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(all) : "r"(x), "r"(y), "r"(z));
        note(all);
#else
        note(x), note(y), note(z);
#endif
    }
    __device__ bool holds() const {
        return (found & 0x7fff7fffu) == 0;
    }
};

/* The upper halves of two words in one. */
static __device__ inline uint32_t xdi_cuda_upper_halves(uint32_t low, uint32_t high) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(low, high, 0x7632);
#else
    return low >> 16 | (high & 0xffff0000u);
#endif
}

/* Doubles that become BF16, rounded once, and whether all of them are zero or normal numbers of it. */
struct xdi_cuda_bf16_range {
    uint32_t least = 0xffffffffu, most = 0;

    /* In the upper half of a word. A double that is not exact in the upper word gets a last bit there, so that it is no tie. */
    __device__ uint32_t round(double value) {
        const uint32_t low = xdi_cuda_low_of(value), high = xdi_cuda_high_of(value) | (low < 1u ? low : 1u);
        const uint32_t rounded = high + (0xfffu + (high >> 13 & 1u)), magnitude = rounded << 1;
        least = magnitude - 0x1fffu < least ? magnitude - 0x1fffu : least; /* 0x1ffe is that of zero */
        most = magnitude > most ? magnitude : most;
        return xdi_cuda_choose_bits(0xc0000000u, rounded, rounded << 3);
    }
    __device__ bool holds() const {
        return least >= 0x70200000u - 0x1fffu && most < 0x8fe00000u;
    }
};

/* >>cuda/dmd.cu */

/* Distribution matching: kernel/cpu/dmd.c is the reference, kernel/dmd.h has the formulas. */

/* ---- mix: one read of p and of q, one write, with the CPU's bits. Grid (rows x pieces of a row), block 256; which row it is costs
 * one division a block. Where p, q and out have one type and lie at multiples of 16 bytes, a thread has eight neighbours at a time,
 * all asked for before the first is used. Else it has elements a block's width apart. ---- */

enum { XDI_CUDA_MIX_EACH = 4, XDI_CUDA_MIX_PIECE = XDI_CUDA_MIX_EACH * XDI_CUDA_TEAM_BLOCK };
enum { XDI_CUDA_MIX_EIGHTS = XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK };

/* Packs of eight that a thread asks for: 32 bytes of each tensor. */
static int64_t xdi_cuda_mix_packs(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 ? 1 : 2;
}

static __device__ inline void xdi_cuda_mix_element(const xd_mix_desc &d, xd_mix mix, bool both, int64_t r, int64_t c) {
    const double p = xd_element_load(d.p.data, d.p.dtype, r * d.p.stride + c);
    const double q = both ? xd_element_load(d.q.data, d.q.dtype, r * d.q.stride + c) : 0.0;
    xd_store_once(d.out.data, d.out.dtype, r * d.out.stride + c, xd_mix_of(mix, both, p, q));
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_mix_kernel(const __grid_constant__ xd_mix_desc d, uint32_t pieces) {
    const uint32_t row = blockIdx.x / pieces, piece = blockIdx.x - row * pieces;
    const xd_mix mix = d.mix[row];
    const bool both = d.q.data && mix.c1 != 0.0;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MIX_EACH; i++) {
        const int64_t c = (int64_t)piece * XDI_CUDA_MIX_PIECE + i * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x;
        if (c >= d.out.cols) break;
        xdi_cuda_mix_element(d, mix, both, row, c);
    }
}

/* Eight at an address of out. False, and nothing written: not every one has its bits in this way. */
template <typename T> struct xdi_cuda_mix_eight {
    xd_mix mix;
    bool both;

    __device__ xdi_cuda_mix_eight(xd_mix pair, bool has) : mix(pair), both(has) {}
    __device__ bool write(const xdi_cuda_raw<T> &p, const xdi_cuda_raw<T> &q, T *out) const {
        const xdi_cuda_eight x = p.widened(), y = q.widened();
        xdi_cuda_pack<T> pack[XDI_CUDA_EIGHT / xdi_cuda_pack<T>::COUNT];
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const double value = xd_mix_of(mix, both, (double)x.at[j], (double)y.at[j]);
            xdi_cuda_narrow(sizeof(T) == 2 ? xd_float_to_odd(value) : (float)value,
                            &pack[j / xdi_cuda_pack<T>::COUNT].at[j % xdi_cuda_pack<T>::COUNT]);
        }
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_EIGHT / xdi_cuda_pack<T>::COUNT; k++)
            xdi_cuda_store16(out + k * xdi_cuda_pack<T>::COUNT, pack[k]);
        return true;
    }
};

/* Of BF16 in integers; with factors so that no product leaves the range of normal doubles. */
template <> struct xdi_cuda_mix_eight<xdi_cuda_bf16> {
    double c0, c1; /* for elements that are lowered */
    bool fits;

    static __device__ bool is_near_one(double factor) {
        return factor == 0.0 || (fabs(factor) > 1e-100 && fabs(factor) < 1e30);
    }
    __device__ xdi_cuda_mix_eight(xd_mix pair, bool both)
        : c0(xd_mul(pair.c0, XDI_CUDA_RAISE)), c1(xd_mul(both ? pair.c1 : xd_mul(pair.c0, 0.0), XDI_CUDA_RAISE)),
          fits(is_near_one(pair.c0) && (!both || is_near_one(pair.c1))) {}
    __device__ bool write(const xdi_cuda_raw<xdi_cuda_bf16> &p, const xdi_cuda_raw<xdi_cuda_bf16> &q, xdi_cuda_bf16 *out) const {
        xdi_cuda_bf16_range range;
        xdi_cuda_finite finite;
        xdi_cuda_pack<uint32_t> words;
        if (!fits) return false;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT / 2; j++) {
            const uint32_t x = p.pairs.at[j], y = q.pairs.at[j];
            finite.note(x);
            finite.note(y);
            const double low = xd_fma(c0, xdi_cuda_lower_half(x), xd_mul(c1, xdi_cuda_lower_half(y)));
            const double high = xd_fma(c0, xdi_cuda_upper_half(x), xd_mul(c1, xdi_cuda_upper_half(y)));
            words.at[j] = xdi_cuda_upper_halves(range.round(low), range.round(high));
        }
        if (!range.holds() || !finite.holds()) return false;
        xdi_cuda_store16(reinterpret_cast<uint32_t *>(out), words);
        return true;
    }
};

template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_mix_eights_kernel(const __grid_constant__ xd_mix_desc d, uint32_t pieces) {
    enum { PACKS = 4 / (int)sizeof(T) };
    const uint32_t row = blockIdx.x / pieces, piece = blockIdx.x - row * pieces;
    const xd_mix mix = d.mix[row];
    const bool both = d.q.data && mix.c1 != 0.0;
    const xdi_cuda_mix_eight<T> eight(mix, both);
    const int64_t first = (int64_t)piece * (PACKS * XDI_CUDA_MIX_EIGHTS) + (int64_t)threadIdx.x * XDI_CUDA_EIGHT;
    const T *p = static_cast<const T *>(d.p.data) + (row * d.p.stride + first);
    const T *q = both ? static_cast<const T *>(d.q.data) + (row * d.q.stride + first) : p;
    T *out = static_cast<T *>(d.out.data) + (row * d.out.stride + first);
    xdi_cuda_raw<T> x[PACKS], y[PACKS];
    XD_UNROLL
    for (int k = 0; k < PACKS; k++) {
        const int step = k * XDI_CUDA_MIX_EIGHTS;
        if (first + step + XDI_CUDA_EIGHT > d.out.cols) continue;
        x[k].load(p + step);
        y[k].load(q + step);
    }
    XD_UNROLL
    for (int k = 0; k < PACKS; k++) {
        const int step = k * XDI_CUDA_MIX_EIGHTS;
        if (first + step + XDI_CUDA_EIGHT <= d.out.cols && eight.write(x[k], y[k], out + step)) continue;
        for (int64_t c = first + step; c < first + step + XDI_CUDA_EIGHT && c < d.out.cols; c++)
            xdi_cuda_mix_element(d, mix, both, row, c);
    }
}

static bool xdi_cuda_mix_is_even(const xd_rows &x, xd_dtype dtype) {
    return x.dtype == dtype && xdi_cuda_is_aligned16(x.data) && x.stride % XDI_CUDA_EIGHT == 0;
}

static xd_result xdi_cuda_mix(const xd_launch *launch, const xd_mix_desc *d) {
    const xd_dtype dtype = d->out.dtype;
    const bool even = xdi_cuda_mix_is_even(d->out, dtype) && xdi_cuda_mix_is_even(d->p, dtype) && dtype != XD_DTYPE_F64 &&
                      (!d->q.data || xdi_cuda_mix_is_even(d->q, dtype));
    const int64_t piece = even ? xdi_cuda_mix_packs(dtype) * XDI_CUDA_MIX_EIGHTS : (int64_t)XDI_CUDA_MIX_PIECE;
    const int64_t pieces = (d->out.cols + piece - 1) / piece;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (d->out.rows * pieces == 0) return XD_OK;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(d->out.rows * pieces, XDI_CUDA_TEAM_BLOCK);
    if (!even) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_mix_kernel, *d, (uint32_t)pieces);
    XDI_CUDA_FLOATS(dtype, T, return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_mix_eights_kernel<T>, *d, (uint32_t)pieces);)
}

/* ---- draw: a thread for each block of four numbers, block 256; writes every element once, 16 bytes at a time where four F32
 * elements of a block lie there. Ten rounds of two products and two logarithms and sines for four elements, so stores set the
 * pace: with the CPU's bits. ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_draw_kernel(const __grid_constant__ xd_draw_desc d, int64_t blocks) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, r = i / blocks;
    if (r >= d.out.rows) return;
    const int64_t block = d.first / 4 + (i - r * blocks), column = 4 * block - d.first;
    const xd_philox random = xd_draw_of(&d, r);
    xdi_cuda_pack<float> lanes;
    xd_philox_lanes(&random, block, !d.uniform, lanes.at);
    if (d.out.dtype == XD_DTYPE_F32 && column >= 0 && column + 4 <= d.out.cols) {
        float *out = (float *)d.out.data + (r * d.out.stride + column);
        if (xdi_cuda_is_aligned16(out)) {
            xdi_cuda_store16(out, lanes);
            return;
        }
    }
    XD_UNROLL
    for (int k = 0; k < 4; k++)
        if (column + k >= 0 && column + k < d.out.cols)
            xd_element_store(d.out.data, d.out.dtype, r * d.out.stride + column + k, (double)lanes.at[k]);
}

static xd_result xdi_cuda_draw(const xd_launch *launch, const xd_draw_desc *d) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t blocks = xd_draw_blocks(d), all = d->out.rows * blocks;
    if (all == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch,
                           xdi_cuda_grid_of((all + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_draw_kernel, *d, blocks);
}

static xd_result xdi_cuda_dmd_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_draw_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mix_eights_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mix_eights_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mix_eights_kernel<xdi_cuda_f16>));
    return xdi_cuda_load(ctx, xdi_cuda_mix_kernel);
}

static xd_dmd_kernels xdi_cuda_dmd_table() {
    xd_dmd_kernels kernels = {};
    kernels.mix = xdi_cuda_mix;
    kernels.draw = xdi_cuda_draw;
    return kernels;
}

/* >>cuda/in_order.cuh */

/* Numbers added one after the other, by a warp: the bits of one thread that does so, in half its time.
 *
 * While a sum stays between a power of 2 and the next one, its last place stays what it is, and a number adds to it what it rounds to
 * in that place, whatever the sum is; unless it lies in the middle between two such values: then the sum's last bit decides. What they
 * round to adds up without an error, in any order. So each lane adds up some numbers that follow each other, and a scan over the lanes
 * finds the first one that reaches the next power or has such a middle. Its numbers are added in turn, and those of the lanes after it
 * are looked at again. */

enum { XDI_CUDA_IN_ORDER_LANE = 8, XDI_CUDA_IN_ORDER = XDI_CUDA_IN_ORDER_LANE * XDI_CUDA_WARP };

/* Numbers, two in a load. */
struct alignas(16) xdi_cuda_number_pair {
    double at[2];
};

static __device__ inline uint64_t xdi_cuda_double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static __device__ inline double xdi_cuda_bits_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* What a lane's numbers round to, one after the other, in the last place of a sum from `low` up to 2 low. From two sums, an even and an
 * odd one: a middle leaves them equal, or two places from each other, and so they stay. *alike: it left them one place from each other.
 * Of 2 low or more it is some number that is not less. */
static __device__ inline double xdi_cuda_rounded_sum(const double (&x)[XDI_CUDA_IN_ORDER_LANE], double low, bool *alike) {
    const double odd_low = xdi_cuda_bits_double(xdi_cuda_double_bits(low) + 1);
    double even = low, odd = odd_low;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_IN_ORDER_LANE; i++) {
        even = xd_add(even, x[i]);
        odd = xd_add(odd, x[i]);
    }
    const double sum = xd_sub(even, low);
    *alike = xd_sub(odd, odd_low) == sum;
    return sum;
}

/* The inclusive sums over the lanes. */
static __device__ inline double xdi_cuda_scan_lanes(double value) {
    XD_UNROLL
    for (int below = 1; below < XDI_CUDA_WARP; below *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, value, (unsigned)below);
        if ((int)threadIdx.x % XDI_CUDA_WARP >= below) value = xd_add(value, other);
    }
    return value;
}

/* Adds 256 numbers of which lane k has those of 8 k and after, which also lie in memory; `some`: any of a lane's is not 0. */
static __device__ inline double xdi_cuda_add_in_order_256(double sum, const double (&x)[XDI_CUDA_IN_ORDER_LANE], bool some,
                                                          const xdi_cuda_number_pair *tile) {
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP;
    for (int begin = 0;;) {
        const bool left = some && lane >= begin;
        bool alike;
        const double low = xdi_cuda_bits_double(xdi_cuda_double_bits(sum) & 0x7ff0000000000000u);
        const double rounded = xdi_cuda_rounded_sum(x, low, &alike);
        const double to = xd_add(sum, xdi_cuda_scan_lanes(left ? rounded : 0.0));
        const bool fine = !left || (alike && to < xd_add(low, low));
        const unsigned stops = ~__ballot_sync(0xffffffffu, fine);
        const int stop = stops ? __ffs((int)stops) - 1 : XDI_CUDA_WARP;
        const double before = __shfl_sync(0xffffffffu, to, stop > 0 ? stop - 1 : 0);
        if (stop > 0) sum = before;
        if (stop == XDI_CUDA_WARP) return sum;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_IN_ORDER_LANE / 2; i++) {
            const xdi_cuda_number_pair pair = tile[stop * (XDI_CUDA_IN_ORDER_LANE / 2) + i];
            sum = xd_add(xd_add(sum, pair.at[0]), pair.at[1]);
        }
        begin = stop + 1;
        if (begin == XDI_CUDA_WARP) return sum;
    }
}

/* Adds n numbers, none negative; what follows them in the tile up to a multiple of 8 is 0. All lanes of a warp have the sum. */
static __device__ inline double xdi_cuda_add_in_order(double sum, const xdi_cuda_number_pair *tile, int n) {
    enum { PAIRS = XDI_CUDA_IN_ORDER_LANE / 2 };
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP;
    for (int begin = 0; begin < n; begin += XDI_CUDA_IN_ORDER, tile += XDI_CUDA_IN_ORDER / 2) {
        double x[XDI_CUDA_IN_ORDER_LANE] = {};
        uint64_t any = 0;
        XD_UNROLL
        for (int i = 0; i < PAIRS && begin + lane * XDI_CUDA_IN_ORDER_LANE < n; i++) {
            const xdi_cuda_number_pair pair = tile[lane * PAIRS + i];
            x[2 * i] = pair.at[0];
            x[2 * i + 1] = pair.at[1];
            any |= xdi_cuda_double_bits(pair.at[0]) | xdi_cuda_double_bits(pair.at[1]);
        }
        if (__any_sync(0xffffffffu, any != 0)) sum = xdi_cuda_add_in_order_256(sum, x, any != 0, tile);
    }
    return sum;
}

/* >>cuda/dmd_total.cu */

/* Losses over samples, from samples to one value, and the weights of f-distill: kernel/dmd_loss_scalar.h has the formulas, with the
 * CPU's bits but for exponentials. Each is one block, a thread for every sample of a tile, so that a sample's words are read,
 * and its exponential formed, beside those of the others; only what must have an order is added in it, out of shared memory,
 * by one warp for each sum (in_order.cuh). Sums in fixed point have no order. A rank has tens to thousands of samples: more blocks
 * would wait for each other longer than they compute. */

enum {
    XDI_CUDA_TOTAL_THREADS = 256,
    XDI_CUDA_TOTAL_MOST = 1024, /* where a sample is little work: its words come from memory, which takes longer than to add it */
    XDI_CUDA_TOTAL_LEAST = 64   /* two warps: two sums */
};

struct xdi_cuda_smaller {
    template <typename T> __device__ T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};

/* What the samples of a thread have found, and the first of them over the block. */
struct xdi_cuda_total_findings {
    int64_t count = 0, first = INT64_MAX;
    double value = 0.0; /* of this thread's first */

    __device__ void note(int64_t b, double what) {
        if (count++ > 0) return;
        first = b;
        value = what;
    }
    /* Count, sample and value to three words; every thread calls it. */
    __device__ void write(int64_t *words) {
        const int64_t all = xdi_cuda_block_reduce(count, (int64_t)0, xdi_cuda_add());
        const int64_t least = xdi_cuda_block_reduce(first, (int64_t)INT64_MAX, xdi_cuda_smaller());
        if (threadIdx.x == 0) words[0] = all;
        if (threadIdx.x == 0 && all == 0) words[1] = words[2] = 0;
        if (all == 0 || least != first) return;
        words[1] = first;
        memcpy(words + 2, &value, sizeof value);
    }
};

/* A sum of numbers of the block's threads, tile after tile; all threads call its functions. */
template <bool FIXED> struct xdi_cuda_total_sum {
    unsigned long long *limbs; /* [XD_NORM_LIMBS] shared */
    double sum = 0.0; /* of all lanes of the warp */
    int warp;         /* that adds in order */

    __device__ xdi_cuda_total_sum(unsigned long long *room, int adder) : limbs(room), warp(adder) {
        for (int k = (int)threadIdx.x; k < XD_NORM_LIMBS; k += (int)blockDim.x) limbs[k] = 0;
    }
    /* A thread's own number, in fixed point. */
    __device__ void put(double term) {
        int bit;
        const uint64_t mantissa = FIXED ? xd_sum_mantissa(term, &bit) : 0;
        if (mantissa) xdi_cuda_limbs_add(limbs, mantissa, bit);
    }
    /* n numbers, none negative, and 0 up to the end of their warp. What is not this sum's is 0 there, which changes no bit of it. */
    __device__ void add(const xdi_cuda_number_pair *tile, int n) {
        if (!FIXED && (int)threadIdx.x / XDI_CUDA_WARP == warp) sum = xdi_cuda_add_in_order(sum, tile, n);
    }
    /* All threads' puts lie before a barrier. */
    __device__ void write(int64_t *words) {
        if ((int)threadIdx.x != warp * XDI_CUDA_WARP) return;
        if (FIXED) {
            xd_norm_carry((int64_t *)limbs);
            for (int k = 0; k < XD_NORM_LIMBS; k++) words[k] = (int64_t)limbs[k];
        } else {
            memcpy(words, &sum, sizeof sum);
        }
    }
};

static int xdi_cuda_total_threads(int64_t samples, int64_t bins, int most) {
    const int64_t wanted = samples > bins ? samples : bins;
    int64_t threads = (wanted + XDI_CUDA_WARP - 1) / XDI_CUDA_WARP * XDI_CUDA_WARP;
    if (threads < XDI_CUDA_TOTAL_LEAST) threads = XDI_CUDA_TOTAL_LEAST;
    return (int)(threads < most ? threads : most);
}

/* ---- total, and of a rank that is alone what finish does, too ---- */

/* The finish entry of a rank alone, whose record is in shared memory. */
template <bool FIXED>
static __device__ inline void xdi_cuda_sample_finish_as(const xd_sample_args &a, const int64_t *record, xd_status *status) {
    xd_sample_args known = a;
    known.fixed = FIXED;
    known.ranks = 1;
    known.records = record;
    xd_sample_finish(&known, status);
}

/* Sums in fixed point take more registers of a thread. */
template <bool FIXED>
static __global__ void __launch_bounds__(FIXED ? XDI_CUDA_TOTAL_MOST / 2 : XDI_CUDA_TOTAL_MOST)
    xdi_cuda_sample_total_kernel(const __grid_constant__ xd_sample_args a, bool alone, xd_status *status) {
    XD_SHARED(xdi_cuda_number_pair, positives, [XDI_CUDA_TOTAL_MOST / 2]);
    XD_SHARED(xdi_cuda_number_pair, negatives, [XDI_CUDA_TOTAL_MOST / 2]); /* their magnitudes */
    XD_SHARED(unsigned long long, limbs, [2 * XD_NORM_LIMBS]);
    XD_SHARED(int64_t, record, [XD_SAMPLE_RECORD_SUMS + 2 * XD_NORM_LIMBS]);
    const int t = (int)threadIdx.x;
    xd_sample next;
    if (t < a.samples) next = a.sample[t];
    xdi_cuda_total_sum<FIXED> positive(limbs, 0), negative(limbs + XD_NORM_LIMBS, 1);
    xdi_cuda_total_findings findings;
    int64_t counted = 0;
    __syncthreads();
    for (int64_t begin = 0; begin < a.samples; begin += blockDim.x) {
        const int64_t b = begin + t, left = a.samples - begin;
        positives[t / 2].at[t % 2] = negatives[t / 2].at[t % 2] = 0.0;
        if (b < a.samples) {
            const xd_sample s = next;
            if (b + blockDim.x < a.samples) next = a.sample[b + blockDim.x]; /* on its way while this tile is added */
            if (a.sample_loss) a.sample_loss[b] = s.loss;
            counted += s.counted;
            if (s.finding != (int64_t)XD_SAMPLE_FINE) findings.note(b, s.value);
            (s.loss < 0.0 ? negatives : positives)[t / 2].at[t % 2] = fabs(s.loss);
            if (s.loss < 0.0)
                negative.put(-s.loss);
            else
                positive.put(s.loss);
        }
        __syncthreads();
        positive.add(positives, (int)(left < blockDim.x ? left : blockDim.x));
        negative.add(negatives, (int)(left < blockDim.x ? left : blockDim.x));
        __syncthreads();
    }
    counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add());
    if (t == 0) record[XD_SAMPLE_RECORD_COUNTED] = counted;
    findings.write(record + XD_SAMPLE_RECORD_FINDINGS);
    positive.write(record + XD_SAMPLE_RECORD_SUMS);
    negative.write(record + XD_SAMPLE_RECORD_SUMS + xd_sum_words(FIXED));
    __syncthreads();
    if (t == 0 && alone) xdi_cuda_sample_finish_as<FIXED>(a, record, status);
    for (int k = t; k < xd_sample_record_words(FIXED) && !alone; k += (int)blockDim.x) a.record[k] = record[k];
}

static xd_result xdi_cuda_sample_total_launch(const xd_launch *launch, const xd_sample_args *a, bool alone) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int most = a->fixed ? XDI_CUDA_TOTAL_MOST / 2 : XDI_CUDA_TOTAL_MOST;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->samples, 0, most));
    if (a->fixed) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_total_kernel<true>, *a, alone, launch->status);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_total_kernel<false>, *a, alone, launch->status);
}

static xd_result xdi_cuda_sample_total(const xd_launch *launch, const xd_sample_args *a) {
    return xdi_cuda_sample_total_launch(launch, a, false);
}

static xd_result xdi_cuda_sample_finish_alone(const xd_launch *launch, const xd_sample_args *a) {
    return xdi_cuda_sample_total_launch(launch, a, true);
}

/* ---- finish: one thread, in the order of the ranks ---- */

static __global__ void xdi_cuda_sample_finish_kernel(const __grid_constant__ xd_sample_args a, xd_status *status) {
    if (threadIdx.x == 0) xd_sample_finish(&a, status);
}

static xd_result xdi_cuda_sample_finish(const xd_launch *launch, const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_sample_finish_kernel, *a, launch->status);
}

/* ---- f-distill: ratios. A thread has every bin whose number is its own modulo the block, and adds to it in the order of the
 * samples. ---- */

static __global__ void __launch_bounds__(XDI_CUDA_TOTAL_THREADS)
    xdi_cuda_fdistill_ratios_kernel(const __grid_constant__ xd_fdistill_args a) {
    XD_SHARED(double, tile, [XDI_CUDA_TOTAL_THREADS]);
    XD_SHARED(int, places, [XDI_CUDA_TOTAL_THREADS]);
    const int t = (int)threadIdx.x;
    xdi_cuda_total_findings findings;
    for (int64_t k = t; k <= a.bins; k += blockDim.x)
        for (int i = 0; i < (int)XD_FDISTILL_BIN_WORDS; i++) a.record[k * (int)XD_FDISTILL_BIN_WORDS + i] = 0;
    for (int64_t begin = 0; begin < a.logits.rows; begin += blockDim.x) {
        const int64_t b = begin + t, left = a.logits.rows - begin, n = left < blockDim.x ? left : blockDim.x;
        if (b < a.logits.rows) {
            double value;
            places[t] = (int)xd_fdistill_place(&a, b, &value);
            tile[t] = a.weights[b];
            if (isnan(tile[t])) findings.note(b, value);
        }
        __syncthreads();
        for (int64_t k = t; k < a.bins; k += blockDim.x)
            for (int64_t i = 0; i < n; i++) {
                int64_t *bin = a.record + k * (int)XD_FDISTILL_BIN_WORDS;
                if (places[i] != k) continue;
                bin[0]++;
                xd_sum_put(bin + 1, a.fixed, tile[i]);
            }
        __syncthreads();
    }
    findings.write(a.record + a.bins * (int)XD_FDISTILL_BIN_WORDS);
}

static xd_result xdi_cuda_fdistill_ratios(const xd_launch *launch, const xd_fdistill_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->logits.rows, a->bins, XDI_CUDA_TOTAL_THREADS));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_ratios_kernel, *a);
}

/* ---- f-distill: bins ---- */

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_TOTAL_THREADS)
    xdi_cuda_fdistill_bins_kernel(const __grid_constant__ xd_fdistill_args a, xd_status *status) {
    XD_SHARED(xdi_cuda_number_pair, tile, [XDI_CUDA_TOTAL_THREADS / 2]);
    XD_SHARED(unsigned long long, limbs, [XD_NORM_LIMBS]);
    XD_SHARED(int, clean, [1]);
    const int t = (int)threadIdx.x;
    xdi_cuda_total_sum<FIXED> sum(limbs, 0);
    int64_t counted = 0;
    if (t == 0) *clean = xd_fdistill_report(&a, status) ? 1 : 0;
    __syncthreads();
    for (int64_t k = t; k < a.bins; k += blockDim.x) {
        a.next[k] = xd_fdistill_next(&a, k);
        if (*clean) a.bin_values[k] = a.next[k];
    }
    __syncthreads();
    for (int64_t begin = 0; begin < a.logits.rows; begin += blockDim.x) {
        const int64_t b = begin + t, left = a.logits.rows - begin;
        tile[t / 2].at[t % 2] = 0.0;
        if (b < a.logits.rows) {
            const bool counts = xd_fdistill_weigh(&a, b); /* else it has a finding */
            const double weight = counts ? fabs(a.weights[b]) : 0.0;
            tile[t / 2].at[t % 2] = weight;
            counted += counts;
            if (counts) sum.put(weight);
        }
        __syncthreads();
        sum.add(tile, (int)(left < blockDim.x ? left : blockDim.x));
        __syncthreads();
    }
    counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add());
    if (t == 0) {
        for (int i = 1; i < (int)XD_FDISTILL_BIN_WORDS; i++) a.mass[i] = 0;
        a.mass[0] = counted;
    }
    sum.write(a.mass + 1);
}

static xd_result xdi_cuda_fdistill_bins(const xd_launch *launch, const xd_fdistill_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->logits.rows, a->bins, XDI_CUDA_TOTAL_THREADS));
    if (a->fixed) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_bins_kernel<true>, *a, launch->status);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_bins_kernel<false>, *a, launch->status);
}

/* ---- f-distill: weights ---- */

static __global__ void __launch_bounds__(XDI_CUDA_TOTAL_THREADS)
    xdi_cuda_fdistill_weights_kernel(const __grid_constant__ xd_fdistill_args a) {
    XD_SHARED(double, mean, [1]);
    if (threadIdx.x == 0) *mean = xd_fdistill_mean(&a);
    __syncthreads();
    for (int64_t b = (int64_t)threadIdx.x; b < a.logits.rows; b += blockDim.x) xd_fdistill_share(&a, b, *mean);
}

static xd_result xdi_cuda_fdistill_weights(const xd_launch *launch, const xd_fdistill_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->logits.rows, 0, XDI_CUDA_TOTAL_THREADS));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_weights_kernel, *a);
}

static xd_result xdi_cuda_dmd_total_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_total_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_total_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_finish_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_fdistill_ratios_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_fdistill_bins_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_fdistill_bins_kernel<true>));
    return xdi_cuda_load(ctx, xdi_cuda_fdistill_weights_kernel);
}

/* >>cuda/dmd_terms.cuh */

/* The terms of losses over samples: an element's, and eight elements' of one type. kernel/dmd_loss.h has the formulas. */

enum { XDI_CUDA_SAMPLE_THREADS = XD_SAMPLE_LANES };

/* ---- terms: what is added for an element, and what a gradient is a multiple of ---- */

struct xdi_cuda_sample_pair {
    float first, second; /* a magnitude and a square */
};

static __device__ inline float xdi_cuda_sample_load(const xd_rows &x, int64_t b, int64_t i) {
    return xdi_cuda_read_float(x.data, (uint8_t)x.dtype, b * (x.stride ? x.stride : x.cols) + i);
}

/* The sums of a thread over its elements of a tile, eight lanes of each, and what tells whether they were all in the range of the
 * integers' way to double. */
struct xdi_cuda_sample_lanes {
    double first[XDI_CUDA_EIGHT] = {}, second[XDI_CUDA_EIGHT] = {};
    xdi_cuda_finite finite;

    /* An infinity or a NaN of F32 has the place of numbers of 2^128 and more. */
    __device__ bool hold() const {
        double most = 0.0, most_square = 0.0;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            most = fmax(most, first[j]);
            most_square = fmax(most_square, second[j]);
        }
        return finite.holds() && most < 3.402823669209385e38 && most_square < 1.157920892373162e77; /* 2^128, 2^256 */
    }
};

template <typename Storage> struct xdi_cuda_sample_resident {
    enum { BLOCKS = 2 };
};
template <> struct xdi_cuda_sample_resident<xdi_cuda_bf16> {
    enum { BLOCKS = 3 };
};

/* Elements of T, or xdi_cuda_none: of any type, at any address, one at a time. SLOPE_INPUTS: the gradient needs the first of the
 * inputs. AHEAD: steps whose loads are asked for before they are needed. RESIDENT: blocks on a multiprocessor, as registers allow. */
template <typename Storage> struct xdi_cuda_vsd_terms {
    typedef Storage T;
    enum { SLOPE_INPUTS = 2, AHEAD = 2, STREAMS = 0, RESIDENT = xdi_cuda_sample_resident<Storage>::BLOCKS };
    xd_vsd_args a;
    bool rounded;

    template <typename S> xdi_cuda_vsd_terms<S> of() const {
        return { a, rounded };
    }
    bool one_at_a_time() const {
        return rounded;
    }
    __host__ __device__ const xd_sample_args &base() const {
        return a.base;
    }
    __host__ __device__ const xd_rows &input(int k) const {
        return k == 0 ? a.fake : k == 1 ? a.teacher : a.generated;
    }
    __host__ __device__ const xd_rows &out() const {
        return a.gradient;
    }
    typedef xd_vsd_given given_type;
    __device__ xd_vsd_given given(int64_t b) const {
        return xd_vsd_given_of(&a, b);
    }
    /* The sample of these sums, which the first of its blocks keeps. Sums that are not fixed have no code of those that are. */
    template <bool FIXED>
    __device__ xd_sample weigh(int64_t b, const int64_t *sums, const xd_vsd_given &given, bool keeps) const {
        xd_sample s;
        const double mean = xd_vsd_weigh_sums(&a, sums, FIXED, given, &s);
        if (keeps) a.base.sample[b] = s;
        if (keeps && a.distance) a.distance[b] = mean;
        return s;
    }
    XDI_CUDA_ONCE __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
        const float x = xdi_cuda_sample_load(a.generated, b, i), t = xdi_cuda_sample_load(a.teacher, b, i),
                    f = xdi_cuda_sample_load(a.fake, b, i);
        if (rounded)
            return { 0.0f, xd_vsd_step(a.generated.dtype, (float)a.base.sample[b].weight, x, t, f) };
        return { xd_subf(x, t), xd_subf(f, t) };
    }
    /* x may be under the gradient already, and only COMPAT needs it. */
    __device__ float slope(int64_t b, int64_t i) const {
        if (rounded) return at(b, i).second;
        return xd_subf(xdi_cuda_sample_load(a.fake, b, i), xdi_cuda_sample_load(a.teacher, b, i));
    }
};

/* What a thread does with eight elements of a sample. seconds(): what the gradient is a multiple of; add() returns it too, where
 * somebody keeps it. */
template <typename Terms> struct xdi_cuda_sample_eights;

template <typename Storage> struct xdi_cuda_sample_eights<xdi_cuda_vsd_terms<Storage> > {
    __device__ xdi_cuda_sample_eights(const xdi_cuda_vsd_terms<Storage> &, int64_t) {}
    __device__ bool fits() const {
        return true;
    }
    template <bool EXACT> __device__ xdi_cuda_eight seconds(const xdi_cuda_raw<Storage> *in) const {
        xdi_cuda_eight f = in[0].widened();
        const xdi_cuda_eight t = in[1].widened();
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) f.at[j] = xd_subf(f.at[j], t.at[j]);
        return f;
    }
    __device__ xdi_cuda_eight add(const xdi_cuda_raw<Storage> *in, xdi_cuda_sample_lanes *lanes, bool) const {
        const xdi_cuda_eight t = in[1].widened(), x = in[2].widened(), second = seconds<true>(in);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const uint32_t first = xd_bits_of_float(xd_subf(x.at[j], t.at[j])) & 0x7fffffffu;
            const uint32_t other = xd_bits_of_float(second.at[j]) & 0x7fffffffu;
            const double root = xd_mul(xdi_cuda_lowered(other), XDI_CUDA_RAISE);
            lanes->first[j] = xd_fma(xdi_cuda_lowered(first), XDI_CUDA_RAISE, lanes->first[j]);
            lanes->second[j] = xd_fma(root, root, lanes->second[j]);
        }
        return second;
    }
};

template <typename Storage> struct xdi_cuda_denoise_terms {
    typedef Storage T;
    enum { SLOPE_INPUTS = 3, AHEAD = 1, STREAMS = sizeof(Storage) == 2, RESIDENT = STREAMS ? 4 : 2 };
    xd_denoise_args a;

    template <typename S> xdi_cuda_denoise_terms<S> of() const {
        return { a };
    }
    bool one_at_a_time() const {
        return false;
    }
    __host__ __device__ const xd_sample_args &base() const {
        return a.base;
    }
    __host__ __device__ const xd_rows &input(int k) const {
        return k == 0 ? a.prediction : k == 1 ? a.clean : a.noise;
    }
    __host__ __device__ const xd_rows &out() const {
        return a.gradient;
    }
    __device__ double known_factor(int64_t b) const {
        return xd_denoise_factor(a.terms + b);
    }
    XDI_CUDA_ONCE __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
        return { 0.0f, xd_denoise_residual(a.terms + b, xdi_cuda_sample_load(a.prediction, b, i),
                                           xdi_cuda_sample_load(a.clean, b, i), xdi_cuda_sample_load(a.noise, b, i)) };
    }
    __device__ float slope(int64_t b, int64_t i) const {
        return at(b, i).second;
    }
};

template <typename Storage> struct xdi_cuda_sample_eights<xdi_cuda_denoise_terms<Storage> > {
    xd_denoise_term term;

    __device__ xdi_cuda_sample_eights(const xdi_cuda_denoise_terms<Storage> &terms, int64_t b) : term(terms.a.terms[b]) {}
    __device__ bool fits() const {
        return true;
    }
    template <bool EXACT> __device__ xdi_cuda_eight seconds(const xdi_cuda_raw<Storage> *in) const {
        const xdi_cuda_eight p = in[0].widened(), x = in[1].widened(), e = in[2].widened();
        xdi_cuda_eight second;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) second.at[j] = xd_denoise_residual(&term, p.at[j], x.at[j], e.at[j]);
        return second;
    }
    __device__ xdi_cuda_eight add(const xdi_cuda_raw<Storage> *in, xdi_cuda_sample_lanes *lanes, bool) const {
        const xdi_cuda_eight second = seconds<true>(in);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const uint32_t bits = xd_bits_of_float(second.at[j]) & 0x7fffffffu;
            const double root = xd_mul(xdi_cuda_lowered(bits), XDI_CUDA_RAISE);
            lanes->second[j] = xd_fma(root, root, lanes->second[j]);
        }
        return second;
    }
};

/* Of BF16: lowered elements, whose sum is the lowered residual, and rounding in integers. With factors of 2^-22 or more, all
 * products are multiples of 2^-178, the smallest double lowered, so that a subnormal sum is exact as well. */
template <> struct xdi_cuda_sample_eights<xdi_cuda_denoise_terms<xdi_cuda_bf16> > {
    double prediction, clean, noise;

    __device__ xdi_cuda_sample_eights(const xdi_cuda_denoise_terms<xdi_cuda_bf16> &terms, int64_t b)
        : prediction(xdi_cuda_f32_of(terms.a.terms[b].prediction)), clean(xdi_cuda_f32_of(terms.a.terms[b].clean)),
          noise(xdi_cuda_f32_of(terms.a.terms[b].noise)) {}
    static __device__ bool is_large(double factor) {
        return factor == 0.0 || (fabs(factor) >= 2.384185791015625e-7 && isfinite(factor)); /* 2^-22 */
    }
    __device__ bool fits() const {
        return is_large(prediction) && is_large(clean) && is_large(noise);
    }
    __device__ double sum(double p, double x, double e) const {
        return xd_fma(noise, e, xd_fma(clean, x, xd_mul(prediction, p)));
    }
    /* Lowered, of halves `upper` of three words. */
    __device__ double residual(bool upper, uint32_t p, uint32_t x, uint32_t e) const {
        return upper ? sum(xdi_cuda_upper_half(p), xdi_cuda_upper_half(x), xdi_cuda_upper_half(e))
                     : sum(xdi_cuda_lower_half(p), xdi_cuda_lower_half(x), xdi_cuda_lower_half(e));
    }
    /* Not EXACT: cut off to F32, where rounding is exact. */
    template <bool EXACT> __device__ xdi_cuda_eight seconds(const xdi_cuda_raw<xdi_cuda_bf16> *in) const {
        xdi_cuda_eight second;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const double r = residual(j % 2 != 0, in[0].pairs.at[j / 2], in[1].pairs.at[j / 2], in[2].pairs.at[j / 2]);
            second.at[j] = xdi_cuda_raised(EXACT ? __longlong_as_double((long long)xdi_cuda_as_f32_bits(r)) : r);
        }
        return second;
    }
    __device__ xdi_cuda_eight add(const xdi_cuda_raw<xdi_cuda_bf16> *in, xdi_cuda_sample_lanes *lanes, bool keeps) const {
        xdi_cuda_eight second = {};
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const uint32_t p = in[0].pairs.at[j / 2], x = in[1].pairs.at[j / 2], e = in[2].pairs.at[j / 2];
            const double r = xdi_cuda_as_f32(residual(j % 2 != 0, p, x, e)), root = xd_mul(r, XDI_CUDA_RAISE);
            if (j % 2 == 0) lanes->finite.note(p, x, e);
            lanes->second[j] = xd_fma(root, root, lanes->second[j]);
            if (keeps) second.at[j] = xdi_cuda_raised(r);
        }
        return second;
    }
};

/* >>cuda/dmd_tile.cuh */

/* What a block does with a chunk of a sample, a warp with a tile of it: sums, and the gradient. */

/* ---- what a block does with a chunk ---- */

struct xdi_cuda_sample_range {
    int64_t begin, end; /* elements of a sample, XD_SAMPLE_CHUNK at most */
};

static __device__ inline xdi_cuda_sample_range xdi_cuda_sample_chunk(const xd_sample_args &a, int64_t chunk) {
    const int64_t begin = chunk * XD_SAMPLE_CHUNK, end = begin + XD_SAMPLE_CHUNK;
    return { begin, end < a.elements ? end : a.elements };
}

/* A warp has a tile: a thread has eight neighbouring lanes of it, which are 16 bytes of each narrow tensor, and all eight elements
 * of each lane. So the tree of kernel/dmd_loss.h, neighbours first, is one in the thread and then one over the warp. */
static_assert((int)XD_SAMPLE_LANES == (int)XDI_CUDA_EIGHT * (int)XDI_CUDA_WARP, "a warp has all lanes");
static_assert((int)XD_SAMPLE_CHUNK == (int)XD_SAMPLE_TILE * (XDI_CUDA_SAMPLE_THREADS / (int)XDI_CUDA_WARP), "a block has all tiles");

enum { XDI_CUDA_SAMPLE_STEPS = (int)XD_SAMPLE_TILE / (int)XD_SAMPLE_LANES };

/* This warp's tile of a range. */
static __device__ inline xdi_cuda_sample_range xdi_cuda_sample_tile(xdi_cuda_sample_range range) {
    const int64_t begin = range.begin + (int64_t)(threadIdx.x / XDI_CUDA_WARP) * (int)XD_SAMPLE_TILE;
    const int64_t end = begin + (int)XD_SAMPLE_TILE;
    return { begin, end < range.end ? end : range.end };
}

/* Where a thread keeps eight numbers of a step, as two packs of four: a warp's are neighbours. */
static __device__ inline float *xdi_cuda_sample_kept(float *kept, int step) {
    const int warp = (int)(threadIdx.x / XDI_CUDA_WARP), lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    return kept + (warp * (int)XD_SAMPLE_TILE + step * (int)XD_SAMPLE_LANES + 4 * lane);
}

enum { XDI_CUDA_SAMPLE_HALF = (int)XD_SAMPLE_LANES / 2 };

static __device__ inline void xdi_cuda_sample_keep(float *kept, int step, const xdi_cuda_eight &values) {
    float *at = xdi_cuda_sample_kept(kept, step);
    xdi_cuda_bits16 bits[2];
    memcpy(bits, values.at, sizeof bits);
    *reinterpret_cast<xdi_cuda_bits16 *>(at) = bits[0];
    *reinterpret_cast<xdi_cuda_bits16 *>(at + XDI_CUDA_SAMPLE_HALF) = bits[1];
}

static __device__ inline xdi_cuda_eight xdi_cuda_sample_recall(float *kept, int step) {
    const float *at = xdi_cuda_sample_kept(kept, step);
    const xdi_cuda_bits16 bits[2] = { *reinterpret_cast<const xdi_cuda_bits16 *>(at),
                                      *reinterpret_cast<const xdi_cuda_bits16 *>(at + XDI_CUDA_SAMPLE_HALF) };
    xdi_cuda_eight values;
    memcpy(values.at, bits, sizeof bits);
    return values;
}

/* Where the numbers go that the gradient is a multiple of, eight a step. ready(): that place, once the first elements are on their
 * way. Nowhere; */
struct xdi_cuda_sample_nowhere {
    enum { WANTS = 0 };
    __device__ xdi_cuda_sample_nowhere ready() const {
        return *this;
    }
    __device__ void whole(int, const xdi_cuda_eight &) const {}
    __device__ void some(int, xdi_cuda_sample_range, const xdi_cuda_eight &) const {}
};

/* into shared memory, of which a thread reads only what it has written there itself. */
struct xdi_cuda_sample_keeper {
    enum { WANTS = 1 };
    float *kept;
    __device__ xdi_cuda_sample_keeper ready() const {
        return *this;
    }
    __device__ void whole(int step, const xdi_cuda_eight &values) const {
        xdi_cuda_sample_keep(kept, step, values);
    }
    __device__ void some(int step, xdi_cuda_sample_range tile, const xdi_cuda_eight &values) const {
        if (tile.begin + step * (int)XD_SAMPLE_LANES < tile.end) xdi_cuda_sample_keep(kept, step, values);
    }
};

/* The eights of a whole tile: the first are asked for when it is made, so that other loads and factors do not come before. */
template <typename Terms, int INPUTS> struct xdi_cuda_sample_walk {
    typedef typename Terms::T T;
    enum { AHEAD = Terms::AHEAD };
    const T *from[INPUTS];
    xdi_cuda_raw<T> ahead[AHEAD][INPUTS];

    __device__ xdi_cuda_sample_walk(const Terms &terms, int64_t b, int64_t begin) {
        const int64_t first = begin + (int)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        XD_UNROLL
        for (int k = 0; k < INPUTS; k++) from[k] = xdi_cuda_row<const T>(terms.input(k), b) + first;
        XD_UNROLL
        for (int i = 0; i < AHEAD; i++) {
            XD_UNROLL
            for (int k = 0; k < INPUTS; k++) ahead[i][k].load(from[k] + i * (int)XD_SAMPLE_LANES);
        }
    }
    /* Calls use(step, inputs) for each, the next steps on their way. */
    template <typename Use> __device__ void each(Use use) {
        XD_UNROLL_N(1)
        for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step += AHEAD) {
            XD_UNROLL
            for (int k = 0; k < INPUTS; k++) from[k] += AHEAD * (int)XD_SAMPLE_LANES;
            XD_UNROLL
            for (int i = 0; i < AHEAD; i++) {
                xdi_cuda_raw<T> now[INPUTS];
                XD_UNROLL
                for (int k = 0; k < INPUTS; k++) {
                    now[k] = ahead[i][k];
                    if (step + AHEAD < XDI_CUDA_SAMPLE_STEPS) ahead[i][k].load(from[k] + i * (int)XD_SAMPLE_LANES);
                }
                use(step + i, now);
            }
        }
    }
};

/* The same through shared memory, by copies that hold no register. A thread reads only what it has asked for. */
template <typename Terms, int INPUTS> struct xdi_cuda_sample_stream {
    typedef typename Terms::T T;
    enum { STAGES = 2 };
    const T *from[INPUTS];
    T (*room)[INPUTS][XDI_CUDA_SAMPLE_THREADS][XDI_CUDA_EIGHT]; /* of each stage */

    __device__ xdi_cuda_sample_stream(const Terms &terms, int64_t b, int64_t begin) {
        XD_SHARED(xdi_cuda_bits16, bytes, [STAGES * INPUTS * XDI_CUDA_SAMPLE_THREADS * XDI_CUDA_EIGHT * sizeof(T) / 16]);
        const int64_t first = begin + (int)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        room = reinterpret_cast<T(*)[INPUTS][XDI_CUDA_SAMPLE_THREADS][XDI_CUDA_EIGHT]>(bytes);
        XD_UNROLL
        for (int k = 0; k < INPUTS; k++) from[k] = xdi_cuda_row<const T>(terms.input(k), b) + first;
        XD_UNROLL
        for (int i = 0; i < STAGES; i++) ask(i);
    }
    template <typename Use> __device__ void each(Use use) {
        XD_UNROLL_N(1)
        for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
            xdi_cuda_raw<T> now[INPUTS];
            xdi_cuda_copies_wait<STAGES - 1>();
            XD_UNROLL
            for (int k = 0; k < INPUTS; k++) now[k].load(&room[step % STAGES][k][threadIdx.x][0]);
            if (step + STAGES < XDI_CUDA_SAMPLE_STEPS)
                ask(step % STAGES);
            else
                xdi_cuda_copies_group();
            use(step, now);
        }
    }

  private:
    /* For the next step. */
    __device__ void ask(int stage) {
        XD_UNROLL
        for (int k = 0; k < INPUTS; k++) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i += xdi_cuda_pack<T>::COUNT)
                xdi_cuda_copy16(&room[stage][k][threadIdx.x][i], from[k] + i);
            from[k] += XD_SAMPLE_LANES;
        }
        xdi_cuda_copies_group();
    }
};

/* The one that terms ask for. */
template <typename Terms, int INPUTS>
using xdi_cuda_sample_way = typename std::conditional<Terms::STREAMS != 0, xdi_cuda_sample_stream<Terms, INPUTS>,
                                                      xdi_cuda_sample_walk<Terms, INPUTS> >::type;

/* The same sums of any tile: an element at a time. Elements that do not count add nothing. */
template <bool FIXED, typename Terms, typename Sink>
static __device__ int64_t xdi_cuda_sample_each(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, const Sink &sink,
                                               xdi_cuda_sample_lanes *lanes, unsigned long long *limbs) {
    const xd_sample_args &a = terms.base();
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    int64_t counted = 0;
    *lanes = xdi_cuda_sample_lanes();
    for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
        xdi_cuda_eight values = {};
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const int64_t i = tile.begin + step * (int)XD_SAMPLE_LANES + lane * (int)XDI_CUDA_EIGHT + j;
            if (i >= tile.end || (a.mask && !a.mask[b * a.elements + i])) continue;
            const xdi_cuda_sample_pair pair = terms.at(b, i);
            counted++;
            values.at[j] = pair.second;
            lanes->first[j] = xd_add(lanes->first[j], fabs((double)pair.first));
            lanes->second[j] = xd_add(lanes->second[j], xd_mul((double)pair.second, (double)pair.second));
            if (!FIXED || !isfinite(pair.first) || !isfinite(pair.second)) continue;
            int exponent;
            uint64_t mantissa = xd_norm_mantissa(pair.first, &exponent);
            xdi_cuda_limbs_add(limbs, mantissa, exponent + 320);
            mantissa = xd_norm_mantissa(pair.second, &exponent);
            xdi_cuda_limbs_add(limbs + XD_NORM_LIMBS, mantissa * mantissa, 2 * exponent + 320);
        }
        sink.some(step, tile, values);
    }
    return counted;
}

/* All elements of the tile are there and count. */
template <typename Terms>
static __device__ inline bool xdi_cuda_sample_is_whole(const Terms &terms, xdi_cuda_sample_range tile) {
    return !terms.base().mask && tile.end - tile.begin == (int)XD_SAMPLE_TILE;
}

/* The lanes of a whole tile of such a type; false: not every number was in the range of that way. */
template <typename Terms, typename Sink>
static __device__ bool xdi_cuda_sample_add_whole(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, const Sink &sink,
                                                 xdi_cuda_sample_lanes *lanes, std::true_type) {
    if (!xdi_cuda_sample_is_whole(terms, tile)) return false;
    xdi_cuda_sample_way<Terms, 3> walk(terms, b, tile.begin);
    const xdi_cuda_sample_eights<Terms> eights(terms, b);
    const auto to = sink.ready();
    if (!eights.fits()) return false;
    walk.each([&](int step, const xdi_cuda_raw<typename Terms::T> *in) { to.whole(step, eights.add(in, lanes, Sink::WANTS != 0)); });
    return !__any_sync(0xffffffffu, !lanes->hold());
}

template <typename Terms, typename Sink>
static __device__ bool xdi_cuda_sample_add_whole(const Terms &, int64_t, xdi_cuda_sample_range, const Sink &,
                                                 xdi_cuda_sample_lanes *, std::false_type) {
    return false;
}

/* The lanes of a tile; how many of its elements this thread has counted. */
template <bool FIXED, typename Terms, typename Sink>
static __device__ int64_t xdi_cuda_sample_add(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, const Sink &sink,
                                              xdi_cuda_sample_lanes *lanes, unsigned long long *limbs) {
    enum { GIVEN = !FIXED && xdi_cuda_is<typename Terms::T>::GIVEN };
    if (xdi_cuda_sample_add_whole(terms, b, tile, sink, lanes, std::integral_constant<bool, GIVEN != 0>()))
        return XDI_CUDA_SAMPLE_STEPS * (int)XDI_CUDA_EIGHT;
    return xdi_cuda_sample_each<FIXED>(terms, b, tile, sink.ready(), lanes, limbs);
}

/* The sum over the tree; on every thread of the warp. */
static __device__ inline double xdi_cuda_sample_tree(double (&lanes)[XDI_CUDA_EIGHT]) {
    XD_UNROLL
    for (int apart = 1; apart < XDI_CUDA_EIGHT; apart *= 2) {
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j += 2 * apart) lanes[j] = xd_add(lanes[j], lanes[j + apart]);
    }
    XD_UNROLL
    for (int mask = 1; mask < XDI_CUDA_WARP; mask *= 2)
        lanes[0] = xd_add(lanes[0], xdi_cuda_shuffle_xor(lanes[0], mask));
    return lanes[0];
}

enum { XDI_CUDA_SAMPLE_WARPS = XDI_CUDA_SAMPLE_THREADS / (int)XDI_CUDA_WARP };

/* What the tiles of a range come to, in order, to words behind XD_SAMPLE_FINDING; the first warp. Its lanes 0 and 1 add a sum each. */
static __device__ inline void xdi_cuda_sample_add_tiles(const double *tiles, int64_t *words, bool fixed) {
    enum { WARPS = XDI_CUDA_SAMPLE_WARPS };
    const int lane = (int)threadIdx.x;
    const double tile = tiles[lane % (2 * WARPS)];
    const bool nan = __any_sync(0xffffffffu, isnan(tile)), infinite = __any_sync(0xffffffffu, !isfinite(tile));
    double sum = 0.0;
    if (lane < 2)
        for (int k = 0; k < WARPS; k++) sum = xd_add(sum, tiles[lane * WARPS + k]);
    if (lane < 2 && !fixed) words[XD_SAMPLE_SUMS + lane] = __double_as_longlong(sum);
    if (lane == 0) words[XD_SAMPLE_FINDING] = nan ? XD_SAMPLE_NAN : infinite ? XD_SAMPLE_INFINITE : XD_SAMPLE_FINE;
}

/* The sums of a range to out[xd_sample_words], which the first threads write; all threads of a block. When fixed, integers are added
 * in shared memory. */
template <bool FIXED, typename Terms, typename Sink>
static __device__ void xdi_cuda_sample_sums(const Terms &terms, int64_t b, xdi_cuda_sample_range range, int64_t *out,
                                            const Sink &sink) {
    enum { WARPS = XDI_CUDA_SAMPLE_WARPS };
    XD_SHARED(unsigned long long, limbs, [2 * XD_NORM_LIMBS]);
    XD_SHARED(double, tiles, [2 * WARPS]);
    const int t = (int)threadIdx.x, warp = t / XDI_CUDA_WARP;
    if (FIXED && t < 2 * XD_NORM_LIMBS) limbs[t] = 0;
    if (FIXED) __syncthreads();
    xdi_cuda_sample_lanes lanes;
    int64_t counted = xdi_cuda_sample_add<FIXED>(terms, b, xdi_cuda_sample_tile(range), sink, &lanes, limbs);
    const double first = xdi_cuda_sample_tree(lanes.first), second = xdi_cuda_sample_tree(lanes.second);
    if (t % XDI_CUDA_WARP == 0) tiles[warp] = first;
    if (t % XDI_CUDA_WARP == 0) tiles[WARPS + warp] = second;
    __syncthreads();
    if (terms.base().mask)
        counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add());
    else
        counted = range.end - range.begin;
    if (t == 0) out[XD_SAMPLE_COUNTED] = counted;
    if (warp == 0) xdi_cuda_sample_add_tiles(tiles, out, FIXED);
    if (FIXED && t < 2) xd_norm_carry((int64_t *)limbs + t * XD_NORM_LIMBS);
    if (FIXED) __syncthreads();
    if (FIXED && t < 2 * XD_NORM_LIMBS) out[XD_SAMPLE_SUMS + t] = (int64_t)limbs[t];
}

/* ---- the gradient of a range, of what was kept of it (KEPT) or is read again ---- */

/* What eight numbers are multiplied by: the product in double, rounded to F32 and to the tensor's type. */
struct xdi_cuda_sample_factor {
    double factor;
    float near;
    bool exact; /* near is factor: the product in F32 is the same */
    bool close; /* near has a relative error of 2^-24, and enlarges nothing */

    explicit __device__ xdi_cuda_sample_factor(double by) : factor(by), near((float)by) {
        exact = (double)near == factor;
        close = fabs(factor) > 1e-30 && fabs(factor) <= 1.0;
    }
};

template <typename T>
static __device__ inline void xdi_cuda_sample_write8(T *to, const xdi_cuda_sample_factor &by, const xdi_cuda_eight &slope) {
    xdi_cuda_eight values;
    XD_UNROLL
    for (int j = 0; j < XDI_CUDA_EIGHT; j++) values.at[j] = (float)xd_mul(by.factor, (double)slope.at[j]);
    xdi_cuda_write_whole(to, values);
}

/* To BF16 by way of the product in F32, which is at most four steps of F32 off: true, and written, unless one of the eight is as
 * near as that to the middle of two numbers of BF16. */
static __device__ inline bool xdi_cuda_sample_write_near(xdi_cuda_bf16 *to, const xdi_cuda_sample_factor &by,
                                                         const xdi_cuda_eight &slope) {
    xdi_cuda_pack<uint32_t> words;
    uint32_t least = 0xffffu;
    XD_UNROLL
    for (int j = 0; j < XDI_CUDA_EIGHT; j += 2) {
        const uint32_t low = xd_bits_of_float(xd_mulf(by.near, slope.at[j])) + 0x8004u;
        const uint32_t high = xd_bits_of_float(xd_mulf(by.near, slope.at[j + 1])) + 0x8004u;
        least = (low & 0xffffu) < least ? low & 0xffffu : least;
        least = (high & 0xffffu) < least ? high & 0xffffu : least;
        words.at[j / 2] = xdi_cuda_upper_halves(low, high);
    }
    if (least <= 8) return false;
    xdi_cuda_store16(reinterpret_cast<uint32_t *>(to), words);
    return true;
}

/* slopes(true or false): exact, or cut off. All numbers are finite, as a sample with a finding has no factor. */
template <typename T, typename Slopes>
static __device__ inline void xdi_cuda_sample_put(T *to, const xdi_cuda_sample_factor &by, Slopes slopes) {
    xdi_cuda_sample_write8(to, by, slopes(std::true_type()));
}

template <typename Slopes>
static __device__ inline void xdi_cuda_sample_put(xdi_cuda_bf16 *to, const xdi_cuda_sample_factor &by, Slopes slopes) {
    if (by.exact) {
        xdi_cuda_eight values = slopes(std::true_type());
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) values.at[j] = xd_mulf(by.near, values.at[j]);
        xdi_cuda_write_whole(to, values);
        return;
    }
    if (by.close && xdi_cuda_sample_write_near(to, by, slopes(std::false_type()))) return;
    xdi_cuda_sample_write8(to, by, slopes(std::true_type()));
}

/* The factor of a sample's gradient; `none`: it is all zero, as of a sample with a finding. */
struct xdi_cuda_sample_by {
    double factor;
    bool none;
};

static __device__ inline xdi_cuda_sample_by xdi_cuda_sample_by_of(double factor, double whole) {
    return { xd_mul(factor, whole), factor == 0.0 };
}

template <bool KEPT, typename Terms>
static __device__ void xdi_cuda_sample_write_each(const Terms &terms, int64_t b, xdi_cuda_sample_range tile,
                                                  xdi_cuda_sample_by by, float *kept) {
    const xd_sample_args &a = terms.base();
    const xd_rows &out = terms.out();
    for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
        const int64_t first =
            tile.begin + step * (int)XD_SAMPLE_LANES + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        XD_UNROLL_N(1)
        for (int j = 0; j < XDI_CUDA_EIGHT && first + j < tile.end; j++) {
            const int64_t i = first + j;
            const bool counts = !by.none && (!a.mask || a.mask[b * a.elements + i]);
            const int at = j < 4 ? j : j - 4 + (int)XDI_CUDA_SAMPLE_HALF;
            const float slope = !counts ? 0.0f : KEPT ? xdi_cuda_sample_kept(kept, step)[at] : terms.slope(b, i);
            xd_sample_store(&out, b, i, by.none ? 0.0 : xd_mul(by.factor, (double)slope));
        }
    }
}

/* Where a thread's first eight of a tile's gradient go. */
template <typename Terms>
static __device__ typename Terms::T *xdi_cuda_sample_to(const Terms &terms, int64_t b, xdi_cuda_sample_range tile) {
    return xdi_cuda_row<typename Terms::T>(terms.out(), b) +
           (tile.begin + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT);
}

/* Of a whole tile of elements of a type; false: nothing is written. */
template <bool KEPT, typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &terms, int64_t b, xdi_cuda_sample_range tile,
                                                   xdi_cuda_sample_by of, float *kept, std::true_type) {
    typedef typename Terms::T T;
    if (!xdi_cuda_sample_is_whole(terms, tile) || of.none) return false;
    T *to = xdi_cuda_sample_to(terms, b, tile);
    if (KEPT) {
        const xdi_cuda_sample_factor by(of.factor);
        XD_UNROLL_N(2)
        for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
            const xdi_cuda_eight slope = xdi_cuda_sample_recall(kept, step);
            xdi_cuda_sample_put(to + step * (int)XD_SAMPLE_LANES, by, [&](auto) { return slope; });
        }
        return true;
    }
    xdi_cuda_sample_way<Terms, Terms::SLOPE_INPUTS> walk(terms, b, tile.begin);
    const xdi_cuda_sample_eights<Terms> eights(terms, b);
    if (!eights.fits()) return false;
    const xdi_cuda_sample_factor by(of.factor);
    walk.each([&](int step, const xdi_cuda_raw<T> *in) {
        xdi_cuda_sample_put(to + step * (int)XD_SAMPLE_LANES, by,
                            [&](auto exact) { return eights.template seconds<decltype(exact)::value>(in); });
    });
    return true;
}

template <bool KEPT, typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &, int64_t, xdi_cuda_sample_range, xdi_cuda_sample_by, float *,
                                                   std::false_type) {
    return false;
}

template <bool KEPT, typename Terms>
static __device__ void xdi_cuda_sample_write(const Terms &terms, int64_t b, xdi_cuda_sample_range range, xdi_cuda_sample_by by,
                                             float *kept) {
    enum { GIVEN = xdi_cuda_is<typename Terms::T>::GIVEN };
    const xdi_cuda_sample_range tile = xdi_cuda_sample_tile(range);
    if (!xdi_cuda_sample_write_whole<KEPT>(terms, b, tile, by, kept, std::integral_constant<bool, GIVEN != 0>()))
        xdi_cuda_sample_write_each<KEPT>(terms, b, tile, by, kept);
}

/* ---- sums and gradient at once, where the factor is known before the sums ---- */

/* weight scale / N, known before the sums: nobody else has parts of samples. */
static __device__ inline double xdi_cuda_sample_whole(const xd_sample_args &a) {
    return xd_sample_factor(&a, xd_sample_denominator(&a, a.samples * a.elements));
}

template <typename Terms> struct xdi_cuda_sample_writer {
    const Terms &terms;
    int64_t b;
    xdi_cuda_sample_range tile;
    xdi_cuda_sample_factor by;

    __device__ void whole(int step, const xdi_cuda_eight &values) const {
        put(step, values, std::integral_constant<bool, xdi_cuda_is<typename Terms::T>::GIVEN != 0>());
    }
    __device__ void some(int step, xdi_cuda_sample_range range, const xdi_cuda_eight &values) const {
        const int64_t first =
            range.begin + step * (int)XD_SAMPLE_LANES + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        XD_UNROLL_N(1)
        for (int j = 0; j < XDI_CUDA_EIGHT && first + j < range.end; j++)
            xd_sample_store(&terms.out(), b, first + j, xd_mul(by.factor, (double)values.at[j]));
    }

  private:
    __device__ void put(int step, const xdi_cuda_eight &values, std::true_type) const {
        xdi_cuda_sample_put(xdi_cuda_sample_to(terms, b, tile) + step * (int)XD_SAMPLE_LANES, by, [&](auto) { return values; });
    }
    __device__ void put(int, const xdi_cuda_eight &, std::false_type) const {}
};

/* The same before its factor is formed. */
template <typename Terms> struct xdi_cuda_sample_writing {
    enum { WANTS = 1 };
    const Terms &terms;
    int64_t b;
    xdi_cuda_sample_range tile;

    __device__ xdi_cuda_sample_writer<Terms> ready() const {
        const double factor = xd_mul(terms.known_factor(b), xdi_cuda_sample_whole(terms.base()));
        return { terms, b, tile, xdi_cuda_sample_factor(factor) };
    }
};

/* >>cuda/dmd_loss.cu */

/* Losses over samples, but for the way from samples to one value, which is in dmd_total.cu: kernel/cpu/dmd_loss.c is the
 * reference, kernel/dmd_loss.h has the formulas. Sums have the CPU's bits; so
 * have gradients, but for the terms on logits, whose exponentials are the GPU's. */

/* ---- measure: grid (rows x chunks), block XD_SAMPLE_LANES; reads every element once. ---- */

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, 1)
    xdi_cuda_sample_measure_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const uint32_t b = blockIdx.x / chunks;
    const int64_t words = xd_sample_words(FIXED);
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), blockIdx.x - b * chunks);
    xdi_cuda_sample_sums<FIXED>(terms, b, range, terms.base().parts + (int64_t)blockIdx.x * words, xdi_cuda_sample_nowhere());
}

/* ---- slope: the same grid; one read of what the term needs, one write. ---- */

template <typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, 1)
    xdi_cuda_sample_slope_kernel(const __grid_constant__ Terms terms, uint32_t chunks, bool alone) {
    const xd_sample_args &a = terms.base();
    const uint32_t b = blockIdx.x / chunks;
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(a, blockIdx.x - b * chunks);
    const xdi_cuda_sample_by by = xdi_cuda_sample_by_of(a.sample[b].factor, alone ? xdi_cuda_sample_whole(a) : *a.factor);
    xdi_cuda_sample_write<false>(terms, b, range, by, nullptr);
}

/* ---- by sample, the student's term: a block a chunk, which it keeps in shared memory, 64 KiB at most, and a cluster of blocks a
 * sample. So nothing is read twice: three reads and one write of an element in place of the six that measure and slope make, and one
 * launch for three. ---- */

enum { XDI_CUDA_BY_SAMPLE_CHUNKS = 16 }; /* at most: the blocks of a cluster of 9.0 */

template <bool FIXED> struct xdi_cuda_by_sample_sums {
    int64_t words[(int)XD_SAMPLE_SUMS + 2 * (FIXED ? (int)XD_NORM_LIMBS : 1)];
};

/* Sums of several blocks, or of one, added up in their order. */
template <bool FIXED>
static __device__ inline xdi_cuda_by_sample_sums<FIXED> xdi_cuda_by_sample_join(const xdi_cuda_by_sample_sums<FIXED> *of, uint32_t count) {
    xdi_cuda_by_sample_sums<FIXED> sums;
    xd_sample_clear(sums.words, FIXED);
    XD_UNROLL_N(1)
    for (uint32_t k = 0; k < count; k++) xd_sample_join(sums.words, FIXED, of[k].words);
    return sums;
}

/* Tells every block of the cluster this one's sums, at its place in `table`. */
template <bool FIXED>
static __device__ inline void xdi_cuda_by_sample_tell(const xdi_cuda_by_sample_sums<FIXED> *mine, xdi_cuda_by_sample_sums<FIXED> *table,
                                                      uint32_t chunk, uint32_t chunks) {
    if (threadIdx.x < chunks) *xdi_cuda_cluster_map(table + chunk, threadIdx.x) = *mine;
}

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : XDI_CUDA_BLOCKS(Terms::RESIDENT))
    xdi_cuda_by_sample_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    XD_DYN_SHARED(float, kept);
    XD_SHARED(xdi_cuda_by_sample_sums<FIXED>, mine, [1]);
    XD_SHARED(xdi_cuda_by_sample_sums<FIXED>, table, [XDI_CUDA_BY_SAMPLE_CHUNKS]);
    XD_SHARED(xdi_cuda_sample_by, by, [1]);
    const xd_sample_args &a = terms.base();
    const uint32_t b = blockIdx.x / chunks, chunk = blockIdx.x - b * chunks;
    if (chunks > 1) xdi_cuda_cluster_arrive(); /* this block runs */
    xdi_cuda_sample_sums<FIXED>(terms, b, xdi_cuda_sample_chunk(a, chunk), mine->words, xdi_cuda_sample_keeper{ kept });
    __syncthreads();
    if (chunks > 1) {
        xdi_cuda_cluster_wait();
        xdi_cuda_by_sample_tell<FIXED>(mine, table, chunk, chunks);
        xdi_cuda_cluster_arrive();
        xdi_cuda_cluster_wait(); /* from here on nobody writes into another block */
    }
    if (threadIdx.x == 0) {
        const typename Terms::given_type given = terms.given(b);
        const double whole = xdi_cuda_sample_whole(a);
        const xdi_cuda_by_sample_sums<FIXED> sums = xdi_cuda_by_sample_join<FIXED>(chunks > 1 ? table : mine, chunks);
        *by = xdi_cuda_sample_by_of(terms.template weigh<FIXED>(b, sums.words, given, chunk == 0).factor, whole);
    }
    __syncthreads();
    if (terms.out().data) xdi_cuda_sample_write<true>(terms, b, xdi_cuda_sample_chunk(a, xdi_cuda_held((int)chunk)), *by, kept);
}

/* ---- at once, the denoising term: its factor does not depend on the sums. A second kernel, with a thread a sample, joins them and
 * writes zeros over the gradient of a sample that has a finding, or no weight. ---- */

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : XDI_CUDA_BLOCKS(Terms::RESIDENT))
    xdi_cuda_at_once_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const xd_sample_args &a = terms.base();
    const uint32_t b = blockIdx.x / chunks;
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(a, blockIdx.x - b * chunks);
    const xdi_cuda_sample_writing<Terms> writing = { terms, b, xdi_cuda_sample_tile(range) };
    xdi_cuda_sample_sums<FIXED>(terms, b, range, a.parts + (int64_t)blockIdx.x * xd_sample_words(FIXED), writing);
}

/* The sums of a sample's chunks, four of which are asked for at a time. */
template <bool FIXED>
static __device__ inline xdi_cuda_by_sample_sums<FIXED> xdi_cuda_denoise_sums(const xd_sample_args &a, int64_t b) {
    enum { AHEAD = FIXED ? 1 : 4 };
    const uint32_t chunks = (uint32_t)xd_sample_chunks(a.elements);
    const xdi_cuda_by_sample_sums<FIXED> *from = reinterpret_cast<const xdi_cuda_by_sample_sums<FIXED> *>(a.parts) + b * chunks;
    xdi_cuda_by_sample_sums<FIXED> sums = xdi_cuda_by_sample_join<FIXED>(from, 0), part[AHEAD];
    for (uint32_t k = 0; k < chunks; k += (uint32_t)AHEAD) {
        XD_UNROLL
        for (uint32_t i = 0; i < (uint32_t)AHEAD; i++) part[i] = from[k + i < chunks ? k + i : k];
        XD_UNROLL
        for (uint32_t i = 0; i < (uint32_t)AHEAD; i++)
            if (k + i < chunks) xd_sample_join(sums.words, FIXED, part[i].words);
    }
    return sums;
}

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_WARP)
    xdi_cuda_denoise_settle_kernel(const __grid_constant__ xd_denoise_args a) {
    const int64_t first = (int64_t)blockIdx.x * XDI_CUDA_WARP, b = first + threadIdx.x;
    bool none = false;
    if (b < a.base.samples) {
        const xd_denoise_term term = a.terms[b];
        const xdi_cuda_by_sample_sums<FIXED> sums = xdi_cuda_denoise_sums<FIXED>(a.base, b);
        xd_sample sample;
        xd_denoise_weigh_sums(sums.words, FIXED, &term, &sample);
        a.base.sample[b] = sample;
        none = sample.factor == 0.0 && a.gradient.data;
    }
    for (unsigned left = __ballot_sync(0xffffffffu, none); left; left &= left - 1)
        for (int64_t i = threadIdx.x; i < a.base.elements; i += XDI_CUDA_WARP)
            xd_sample_store(&a.gradient, first + __ffs((int)left) - 1, i, 0.0);
}

/* ---- the type that all tensors have ---- */

typedef xdi_cuda_vsd_terms<xdi_cuda_none> xdi_cuda_vsd_any;
typedef xdi_cuda_denoise_terms<xdi_cuda_none> xdi_cuda_denoise_any;

static bool xdi_cuda_sample_is_even(const xd_rows &x, xd_dtype dtype) {
    return x.dtype == dtype && xdi_cuda_is_aligned16(x.data) && xdi_cuda_stride(x) % XDI_CUDA_EIGHT == 0;
}

/* Calls launch(terms of that type), or of none: then elements are read one at a time. */
template <typename Terms, typename Launch> static xd_result xdi_cuda_sample_typed(const Terms &terms, Launch launch) {
    const xd_dtype dtype = terms.input(0).dtype;
    bool even = !terms.base().mask && !terms.one_at_a_time();
    for (int k = 0; k < 3; k++) even = even && xdi_cuda_sample_is_even(terms.input(k), dtype);
    if (terms.out().data) even = even && xdi_cuda_sample_is_even(terms.out(), dtype);
    if (!even) return launch(terms);
    XDI_CUDA_FLOATS(dtype, T, return launch(terms.template of<T>());)
}

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_by_sample_launch(const xd_launch *launch, const Terms &terms) {
    const xd_sample_args &a = terms.base();
    const int64_t chunks = a.elements > 0 ? xd_sample_chunks(a.elements) : 1;
    const int64_t most = chunks > 1 ? (int64_t)XD_SAMPLE_CHUNK : a.elements;
    const int64_t room = (most + XD_SAMPLE_LANES - 1) / XD_SAMPLE_LANES * XD_SAMPLE_LANES;
    xdi_cuda_grid grid = xdi_cuda_grid_of(a.samples * chunks, XDI_CUDA_SAMPLE_THREADS, (size_t)room * sizeof(float));
    grid.cluster = chunks > 1 ? (int)chunks : 0;
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_by_sample_kernel<FIXED, Terms>, terms, (uint32_t)chunks);
}

static xd_result xdi_cuda_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *args) {
    const xd_sample_args &a = args->base;
    const int64_t most = xdi_cuda_of(launch->ctx)->kernels.dmd_loss.by_sample_elements;
    const xdi_cuda_vsd_any terms = { *args, false };
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_REQUIRE(launch->ctx, a.elements <= most, XD_ERROR_ARGUMENT,
               "a sample of %lld elements; %lld are finished at once", (long long)a.elements, (long long)most);
    if (a.samples == 0) return XD_OK;
    if (a.fixed) return xdi_cuda_by_sample_launch<true>(launch, terms);
    return xdi_cuda_sample_typed(terms, [&](const auto &typed) { return xdi_cuda_by_sample_launch<false>(launch, typed); });
}

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_sample_measure_launch(const xd_launch *launch, const Terms &terms, int64_t chunks) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_measure_kernel<FIXED, Terms>, terms, (uint32_t)chunks);
}

template <typename Terms> static xd_result xdi_cuda_sample_measure(const xd_launch *launch, const Terms &terms,
                                                                   const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    if (a->fixed) return xdi_cuda_sample_measure_launch<true>(launch, terms, chunks);
    return xdi_cuda_sample_typed(
        terms, [&](const auto &typed) { return xdi_cuda_sample_measure_launch<false>(launch, typed, chunks); });
}

template <typename Terms>
static xd_result xdi_cuda_sample_slope_launch(const xd_launch *launch, const Terms &terms, int64_t chunks, bool alone) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_slope_kernel<Terms>, terms, (uint32_t)chunks, alone);
}

template <typename Terms> static xd_result xdi_cuda_sample_slope(const xd_launch *launch, const Terms &terms,
                                                                 const xd_sample_args *a, bool alone = false) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    return xdi_cuda_sample_typed(
        terms, [&](const auto &typed) { return xdi_cuda_sample_slope_launch(launch, typed, chunks, alone); });
}

static xd_result xdi_cuda_vsd_measure(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_any{ *args, false }, &args->base);
}

static xd_result xdi_cuda_vsd_rounded(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_any{ *args, true }, &args->base);
}

static xd_result xdi_cuda_vsd_slope(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_vsd_any{ *args, args->form == XD_VSD_COMPAT }, &args->base);
}

static xd_result xdi_cuda_denoise_measure(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_denoise_any{ *args }, &args->base);
}

static xd_result xdi_cuda_denoise_slope(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_denoise_any{ *args }, &args->base);
}

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_at_once_launch(const xd_launch *launch, const Terms &terms) {
    const int64_t chunks = xd_sample_chunks(terms.base().elements);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_at_once_kernel<FIXED, Terms>, terms, (uint32_t)chunks);
}

/* Sums and gradient in one read, of a gradient that lies over no input: a tile with a number out of range is read again. */
static xd_result xdi_cuda_denoise_at_once(const xd_launch *launch, const xdi_cuda_denoise_any &terms) {
    if (terms.base().samples * terms.base().elements == 0) return XD_OK;
    if (terms.base().fixed) return xdi_cuda_at_once_launch<true>(launch, terms);
    return xdi_cuda_sample_typed(terms, [&](const auto &typed) { return xdi_cuda_at_once_launch<false>(launch, typed); });
}

static xd_result xdi_cuda_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *args) {
    const xdi_cuda_denoise_any terms = { *args };
    const void *out = args->gradient.data;
    const bool over = out && (out == args->prediction.data || out == args->clean.data || out == args->noise.data);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (args->base.samples == 0) return XD_OK;
    XD_TRY(out && !over ? xdi_cuda_denoise_at_once(launch, terms) : xdi_cuda_denoise_measure(launch, args));
    const int64_t blocks = (args->base.samples + XDI_CUDA_WARP - 1) / XDI_CUDA_WARP;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks, XDI_CUDA_WARP);
    XD_TRY(args->base.fixed ? XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_denoise_settle_kernel<true>, *args)
                            : XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_denoise_settle_kernel<false>, *args));
    return over ? xdi_cuda_sample_slope(launch, terms, &args->base, true) : XD_OK;
}

/* ---- a thread for each sample ---- */

#define XDI_CUDA_EACH_SAMPLE(name, type, base, call)                                                               \
    static __global__ void XDI_CUDA_KERNEL xdi_cuda_##name##_kernel(const __grid_constant__ type args) {           \
        const int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;                                          \
        if (b < args.base samples) call(&args, b);                                                                 \
    }                                                                                                              \
    static xd_result xdi_cuda_##name(const xd_launch *launch, const type *args) {                                  \
        xdi_cuda_scope scope(launch);                                                                              \
        XD_TRY(scope.result);                                                                                      \
        if (args->base samples == 0) return XD_OK;                                                                 \
        const int64_t blocks = (args->base samples + XDI_CUDA_WARP - 1) / XDI_CUDA_WARP;                           \
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_WARP), xdi_cuda_##name##_kernel, *args);  \
    }

XDI_CUDA_EACH_SAMPLE(vsd_weigh, xd_vsd_args, base., xd_vsd_weigh_sample)
XDI_CUDA_EACH_SAMPLE(vsd_settle, xd_vsd_args, base., xd_vsd_settle_sample)
XDI_CUDA_EACH_SAMPLE(denoise_weigh, xd_denoise_args, base., xd_denoise_weigh_sample)
XDI_CUDA_EACH_SAMPLE(gan_terms, xd_gan_args, base., xd_gan_sample)
XDI_CUDA_EACH_SAMPLE(gan_slope, xd_gan_args, base., xd_gan_slope_sample)
XDI_CUDA_EACH_SAMPLE(sample_join, xd_sample_args, , xd_sample_join_chunks)

/* ---- the table ---- */

/* The dynamic shared memory is more than a block has unasked. */
template <typename... Parameters>
static xd_result xdi_cuda_by_sample_load(xd_ctx *ctx, void (*kernel)(Parameters...)) {
    XD_TRY(xdi_cuda_load(ctx, kernel));
    return XDI_CUDA_CHECK(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    (int)(XD_SAMPLE_CHUNK * sizeof(float))));
}

template <typename Storage> static xd_result xdi_cuda_sample_load_type(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_at_once_kernel<false, xdi_cuda_denoise_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, xdi_cuda_vsd_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, xdi_cuda_denoise_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<xdi_cuda_vsd_terms<Storage> >));
    return xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<xdi_cuda_denoise_terms<Storage> >);
}

static xd_result xdi_cuda_dmd_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<true, xdi_cuda_vsd_any>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_at_once_kernel<true, xdi_cuda_denoise_any>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, xdi_cuda_vsd_any>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, xdi_cuda_denoise_any>));
    XD_TRY(xdi_cuda_sample_load_type<xdi_cuda_none>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<float>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<xdi_cuda_bf16>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<xdi_cuda_f16>(ctx));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_settle_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_settle_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_settle_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_terms_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_slope_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_join_kernel));
    return xdi_cuda_dmd_total_load(ctx);
}

/* Whether the device runs clusters of so many blocks of every instance. */
template <typename... Parameters>
static bool xdi_cuda_by_sample_allows(void (*kernel)(Parameters...), unsigned chunks) {
    int clusters = 0;
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = chunks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(chunks, 1, 1);
    config.blockDim = dim3(XDI_CUDA_SAMPLE_THREADS, 1, 1);
    config.dynamicSmemBytes = XD_SAMPLE_CHUNK * sizeof(float);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess)
        return clusters > 0;
    cudaGetLastError(); /* "too large" is no failure */
    return false;
}

/* Samples of several chunks, where blocks have clusters: 9.0 and above. */
static void xdi_cuda_by_sample_set_up(xd_cuda *cuda, int architecture) {
#if defined(XD_EMU)
    architecture = 900;
#endif
    if (cuda->capability < 90 || architecture < 900) return;
    for (unsigned chunks = XDI_CUDA_BY_SAMPLE_CHUNKS; chunks > 1; chunks /= 2) {
        if (!xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<true, xdi_cuda_vsd_any>, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_any>, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<float> >, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<xdi_cuda_bf16> >, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<xdi_cuda_f16> >, chunks))
            continue;
        cuda->kernels.dmd_loss.by_sample_elements = (int64_t)chunks * XD_SAMPLE_CHUNK;
        return;
    }
}

static xd_dmd_loss_kernels xdi_cuda_dmd_loss_table() {
    xd_dmd_loss_kernels kernels = {};
    kernels.vsd_measure = xdi_cuda_vsd_measure;
    kernels.vsd_weigh = xdi_cuda_vsd_weigh;
    kernels.vsd_rounded = xdi_cuda_vsd_rounded;
    kernels.vsd_settle = xdi_cuda_vsd_settle;
    kernels.vsd_slope = xdi_cuda_vsd_slope;
    kernels.denoise_measure = xdi_cuda_denoise_measure;
    kernels.denoise_weigh = xdi_cuda_denoise_weigh;
    kernels.denoise_slope = xdi_cuda_denoise_slope;
    kernels.gan_terms = xdi_cuda_gan_terms;
    kernels.gan_slope = xdi_cuda_gan_slope;
    kernels.join = xdi_cuda_sample_join;
    kernels.total = xdi_cuda_sample_total;
    kernels.finish = xdi_cuda_sample_finish;
    kernels.fdistill_ratios = xdi_cuda_fdistill_ratios;
    kernels.fdistill_bins = xdi_cuda_fdistill_bins;
    kernels.fdistill_weights = xdi_cuda_fdistill_weights;
    kernels.vsd_by_sample = xdi_cuda_vsd_by_sample;
    kernels.denoise_by_sample = xdi_cuda_denoise_by_sample;
    kernels.by_sample_elements = XD_SAMPLE_CHUNK;
    kernels.denoise_at_once = true;
    kernels.finish_alone = xdi_cuda_sample_finish_alone;
    return kernels;
}

#endif
/* >>cuda/table.cu */

/* The kernel table of the unit, and what runs once: the set-up of a context's GPU. */

/* What the compiler has made of this code. */
struct xdi_cuda_build {
    int architecture; /* 900 for sm_90 */
    float product;    /* of the factors */
    int quotients;    /* lanes whose quotient is not the nearest number */
};

static __global__ void xdi_cuda_probe_kernel(xdi_cuda_build *build, float one_factor, float other_factor) {
#if defined(__CUDA_ARCH__)
    const int compiled_for = __CUDA_ARCH__;
#else
    const int compiled_for = 0;
#endif
    const float x = (float)(8388609 + 9973 * (int)threadIdx.x), y = (float)(8388613 + 7919 * (int)threadIdx.x);
    const unsigned wrong = __ballot_sync(0xffffffffu, x / y != __fdiv_rn(x, y));
    if (threadIdx.x > 0) return;
    build->architecture = compiled_for;
    build->product = __fmul_rn(one_factor, other_factor);
    build->quotients = __popc(wrong);
}

#ifndef XDISTILL_NO_ACROSS
static xd_result xdi_cuda_across_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_xtoken_load(ctx));
    XD_TRY(xdi_cuda_project_load(ctx));
    XD_TRY(xdi_cuda_divergence_load(ctx));
    XD_TRY(xdi_cuda_gradient_load(ctx));
    XD_TRY(xdi_cuda_gold_load(ctx));
    XD_TRY(xdi_cuda_gold_tile_load(ctx));
    XD_TRY(xdi_cuda_xtoken_rows_load(ctx));
    XD_TRY(xdi_cuda_list_kernels_load(ctx));
    XD_TRY(xdi_cuda_chunks_load(ctx));
    return xdi_cuda_uld_load(ctx);
}

static void xdi_cuda_across_fill(xd_kernels *kernels) {
    kernels->xtoken = xdi_cuda_xtoken_table();
    xdi_cuda_project_fill(&kernels->xtoken);
    xdi_cuda_divergence_fill(&kernels->xtoken);
    xdi_cuda_gradient_fill(&kernels->xtoken);
    xdi_cuda_gold_fill(&kernels->xtoken);
    xdi_cuda_gold_tile_fill(&kernels->xtoken);
    xdi_cuda_xtoken_rows_fill(&kernels->xtoken);
    xdi_cuda_list_kernels_fill(&kernels->xtoken);
    xdi_cuda_chunks_fill(&kernels->xtoken);
    kernels->uld = xdi_cuda_uld_table();
}
#endif

static xd_result xdi_cuda_load_all(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_probe_kernel));
    XD_TRY(xdi_cuda_copy_load(ctx));
    XD_TRY(xdi_cuda_init_load(ctx));
    XD_TRY(xdi_cuda_reduce_load(ctx));
    XD_TRY(xdi_cuda_norm_load(ctx));
    XD_TRY(xdi_cuda_matmul_load(ctx));
    XD_TRY(xdi_cuda_matmul_cublas_load(ctx));
    XD_TRY(xdi_cuda_average_load(ctx));
    XD_TRY(xdi_cuda_optimizer_load(ctx));
    XD_TRY(xdi_cuda_loss_load(ctx));
    XD_TRY(xdi_cuda_mft_load(ctx));
    XD_TRY(xdi_cuda_estimate_load(ctx));
    XD_TRY(xdi_cuda_rows_load(ctx));
    XD_TRY(xdi_cuda_softmax_load(ctx));
#ifndef XDISTILL_NO_ACROSS
    XD_TRY(xdi_cuda_across_load(ctx));
#endif
#ifndef XDISTILL_NO_DIFFUSION
    XD_TRY(xdi_cuda_dmd_load(ctx));
    XD_TRY(xdi_cuda_dmd_loss_load(ctx));
#endif
    XD_TRY(xdi_cuda_topk_load(ctx));
    return xdi_cuda_select_load(ctx);
}

static xd_kernels xdi_cuda_table() {
    xd_kernels kernels = {}; /* here and in the tables below: what is not set is not offered */
    kernels.name = "cuda";
    kernels.device = XD_DEVICE_CUDA;
    kernels.memory = xdi_cuda_memory_table();
    kernels.loss = xdi_cuda_loss_table();
    kernels.topk = xdi_cuda_topk_table();
    kernels.mft = xdi_cuda_mft_table();
    kernels.rows = xdi_cuda_rows_table();
    kernels.softmax = xdi_cuda_softmax_table();
#ifndef XDISTILL_NO_ACROSS
    xdi_cuda_across_fill(&kernels);
#endif
    kernels.optimizer.adam = xdi_cuda_adam_run;
    kernels.optimizer.sgd = xdi_cuda_sgd_run;
    kernels.optimizer.lerp = xdi_cuda_lerp;
    kernels.optimizer.cast = xdi_cuda_cast;
    kernels.optimizer.scale = xdi_cuda_scale;
    kernels.optimizer.norm = xdi_cuda_norm;
    kernels.optimizer.list_create = xdi_cuda_list_create;
    kernels.optimizer.list_destroy = xdi_cuda_list_destroy;
    kernels.optimizer.list_bytes = xdi_cuda_kept_bytes;
    kernels.optimizer.average = xdi_cuda_average;
    kernels.optimizer.averages_in_steps = true;
    kernels.optimizer.swap = xdi_cuda_swap;
    kernels.optimizer.turn = xdi_cuda_turn;
    kernels.clip = xdi_cuda_clip;
    kernels.estimate = xdi_cuda_estimate;
    kernels.reduce.pieces = xdi_cuda_reduce_pieces;
    kernels.reduce.leaves = xdi_cuda_reduce_leaves;
    kernels.copies = xdi_cuda_copies;
    kernels.matmul = xdi_cuda_matmul;
    kernels.products = xdi_cuda_products_table();
    kernels.fill = xdi_cuda_init_run;
#ifndef XDISTILL_NO_DIFFUSION
    kernels.dmd = xdi_cuda_dmd_table();
    kernels.dmd_loss = xdi_cuda_dmd_loss_table();
#endif
    return kernels;
}

/* The GPU's properties. */
static xd_result xdi_cuda_inspect(xd_ctx *ctx, xd_cuda *cuda) {
    int major = 0, minor = 0;
    XDI_CUDA_TRY(ctx, cudaGetDevice(&cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, cuda->device));
    XDI_CUDA_TRY(ctx,
                 cudaDeviceGetAttribute(&cuda->processors, cudaDevAttrMultiProcessorCount, cuda->device));
    cuda->capability = 10 * major + minor;
    XD_REQUIRE(ctx, cuda->capability >= 80, XD_ERROR_UNSUPPORTED,
                "device %d has compute capability %d.%d; 8.0 is the least", cuda->device, major, minor);
    return XD_OK;
}

/* Options of the compiler that change bits which are promised. The product is 2^-130, a subnormal number. */
static xd_result xdi_cuda_check_build(xd_ctx *ctx, const xdi_cuda_build &build) {
    uint32_t product;
    memcpy(&product, &build.product, sizeof product);
    XD_REQUIRE(ctx, product == 0x00080000u, XD_ERROR_UNSUPPORTED,
                "xdistill_cuda.cu was compiled with -ftz=true or -use_fast_math, which makes subnormal numbers 0: "
                "compile it without");
    XD_REQUIRE(ctx, build.quotients == 0, XD_ERROR_UNSUPPORTED,
                "xdistill_cuda.cu was compiled with -prec-div=false or -use_fast_math: %d of %d quotients are not "
                "the nearest number; compile it without",
                build.quotients, (int)XDI_CUDA_WARP);
    return XD_OK;
}

/* Runs the probe and warns once when the build leaves something of the chip unused. */
static xd_result xdi_cuda_probe(xd_ctx *ctx, const xd_cuda *cuda, int *out) {
    const xd_launch launch = xd_ctx_launch(ctx);
    xdi_cuda_build build = {};
    xdi_cuda_build *result = (xdi_cuda_build *)cuda->workspace;
    XD_TRY(XDI_CUDA_LAUNCH(&launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_probe_kernel, result,
                           ldexpf(1.0f, -100), ldexpf(1.0f, -30)));
    XDI_CUDA_TRY(ctx, cudaMemcpyAsync(&build, result, sizeof build, cudaMemcpyDeviceToHost,
                                      (cudaStream_t)launch.stream));
    XDI_CUDA_TRY(ctx, cudaStreamSynchronize((cudaStream_t)launch.stream));
    XD_TRY(xdi_cuda_check_build(ctx, build));
    const int architecture = build.architecture;
    if (architecture > 0 && architecture < 900 && cuda->capability >= 90)
        xd_log(ctx, XD_LOG_WARN,
               "xdistill_cuda.cu was compiled for sm_%d; rebuild with -arch=sm_90 for this device",
               architecture / 10);
    *out = architecture;
    return XD_OK;
}

static xd_result xdi_cuda_set_up(xd_ctx *ctx, xd_cuda *cuda, const xd_cuda_desc *desc) {
    int architecture = 0;
    XD_TRY(xdi_cuda_inspect(ctx, cuda));
    cuda->workspace_bytes = XDI_CUDA_NORM_BLOCKS * sizeof(xd_norm_sum);
    cuda->workspace = cuda->allocator.allocate(cuda->allocator.user, cuda->workspace_bytes);
    XD_REQUIRE(ctx, cuda->workspace, XD_ERROR_MEMORY, "no room for %zu bytes of workspace on device %d",
                cuda->workspace_bytes, cuda->device);
    XD_TRY(xdi_cuda_list_make(cuda, XDI_CUDA_LIST_STAGED, &cuda->stage));
    for (xd_array_list *&list : cuda->norms) XD_TRY(xdi_cuda_list_make(cuda, XDI_CUDA_NORM_LIST, &list));
    XD_TRY(xdi_cuda_load_all(ctx));
    XD_TRY(xdi_cuda_probe(ctx, cuda, &architecture));
    if (!desc->cublas || strcmp(desc->cublas, "none") != 0)
        XD_TRY(xdi_cuda_cublas_open(ctx, cuda, desc->cublas));
    if (desc->two_sweeps) return XD_OK;
#ifndef XDISTILL_NO_DIFFUSION
    xdi_cuda_by_sample_set_up(cuda, architecture);
#endif
    return xdi_cuda_ring_set_up(ctx, cuda, architecture);
}

/* The device is the current one. */
static void xdi_cuda_free(xd_cuda *cuda) {
    xdi_cuda_cublas_close(cuda);
    for (xd_array_list *list : cuda->norms) xdi_cuda_list_free(list);
    xdi_cuda_list_free(cuda->stage);
    if (cuda->workspace) cuda->allocator.release(cuda->allocator.user, cuda->workspace);
    xd_release(cuda->ctx, cuda);
}

XD_API xd_result xd_cuda_create(xd_ctx *ctx, const xd_cuda_desc *desc, xd_cuda **out) {
    const xd_cuda_desc d = desc ? *desc : xd_cuda_desc();
    XD_REQUIRE(ctx, xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU, XD_ERROR_STATE,
                "the context has a device already");
    xd_cuda *cuda = (xd_cuda *)xd_allocate(ctx, sizeof *cuda);
    XD_REQUIRE(ctx, cuda, XD_ERROR_MEMORY, "no room for the handle of a device");
    cuda->ctx = ctx;
    cuda->kernels = xdi_cuda_table();
    cuda->allocator = d.allocator;
    if (!cuda->allocator.allocate || !cuda->allocator.release) {
        cuda->allocator.allocate = xdi_cuda_allocate_plain;
        cuda->allocator.release = xdi_cuda_release_plain;
        cuda->allocator.user = NULL;
    }
    const xd_result result = xdi_cuda_set_up(ctx, cuda, &d);
    if (result != XD_OK) {
        xdi_cuda_free(cuda);
        return result;
    }
    xd_ctx_set_kernels(ctx, &cuda->kernels);
    *out = cuda;
    return XD_OK;
}

XD_API void xd_cuda_destroy(xd_cuda *cuda) {
    if (!cuda) return;
    xd_ctx *ctx = cuda->ctx;
    const xd_launch launch = xd_ctx_launch(ctx);
    xdi_cuda_scope scope(ctx, cuda->device);
    xdi_cuda_synchronize(&launch);
    xd_ctx_set_kernels(ctx, NULL);
    xdi_cuda_free(cuda);
}

#if defined(__NVCC__)
#    pragma nv_diagnostic pop
#endif

/* xdistill sha256 65072e5c6891d117bb8cf69acaaea5caab3b2ebdb804fbbacd672999e9725706 */
