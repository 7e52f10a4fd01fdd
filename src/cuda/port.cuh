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
