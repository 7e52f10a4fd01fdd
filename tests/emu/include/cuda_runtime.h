/* Emulation of <cuda_runtime.h>: what nvcc has built in (qualifiers, vector types, built-in variables), the launch template,
 * and the macros of the seam. Host calls: emu_api.h. Device functions: emu_device.h. */
#ifndef EMU_CUDA_RUNTIME_H
#define EMU_CUDA_RUNTIME_H

#include "emu_api.h"

#ifdef __cplusplus

#    include <cmath>
#    include <cstdio>
#    include <cstdlib>
#    include <cstring>
#    include <tuple>
#    include <utility>

#    define __global__
#    define __device__
#    define __host__
#    define __constant__ static const
#    define __forceinline__ inline __attribute__((always_inline))
#    define __launch_bounds__(...)
#    define __grid_constant__
#    define __align__(bytes) alignas(bytes)

/* ---- vector types ---- */

#    define EMU_VECTORS(base, name, align2, align4)                                                    \
        struct name##1 {                                                                               \
            base x;                                                                                    \
        };                                                                                             \
        struct alignas(align2) name##2 {                                                               \
            base x, y;                                                                                 \
        };                                                                                             \
        struct name##3 {                                                                               \
            base x, y, z;                                                                              \
        };                                                                                             \
        struct alignas(align4) name##4 {                                                               \
            base x, y, z, w;                                                                           \
        };                                                                                             \
        static inline __attribute__((unused)) name##2 make_##name##2(base x, base y) {                 \
            return { x, y };                                                                           \
        }                                                                                              \
        static inline __attribute__((unused)) name##3 make_##name##3(base x, base y, base z) {         \
            return { x, y, z };                                                                        \
        }                                                                                              \
        static inline __attribute__((unused)) name##4 make_##name##4(base x, base y, base z, base w) { \
            return { x, y, z, w };                                                                     \
        }

#    define uint3 uint3_vector /* declared by emu_api.h for C as well */
EMU_VECTORS(char, char, 2, 4)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 16)
EMU_VECTORS(double, double, 16, 16)
#    undef uint3
#    undef EMU_VECTORS

/* ---- the running thread: rewritten at every switch ---- */

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
static const int warpSize = 32;

/* ---- launch ---- */

struct emu_kernel_call {
    const void *kernel;                 /* identity, for attributes and reports */
    void (*run)(const void *arguments); /* one thread's call, on that thread's stack */
    void (*destroy)(void *arguments);
    void *arguments; /* copied at the launch, as CUDA does */
    size_t argument_bytes;
    /* Gives each argument to a function, in order. */
    void (*each_argument)(const void *arguments, void (*take)(void *user, const void *value, size_t bytes), void *user);
};

cudaError_t emu_launch(const cudaLaunchConfig_t *config, const emu_kernel_call &call);
cudaError_t emu_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);
cudaError_t emu_get_attributes(cudaFuncAttributes *attributes, const void *kernel);

template <typename... Parameters> struct emu_call_of {
    typedef void (*Kernel)(Parameters...);
    Kernel kernel;
    std::tuple<std::decay_t<Parameters>...> values;

    template <size_t... I> void apply(std::index_sequence<I...>) const {
        kernel(std::get<I>(values)...);
    }
    static void run(const void *self) {
        static_cast<const emu_call_of *>(self)->apply(std::index_sequence_for<Parameters...>());
    }
    static void each_argument(const void *self, void (*take)(void *, const void *, size_t), void *user) {
        std::apply([&](const auto &...value) { (take(user, &value, sizeof value), ...); },
                   static_cast<const emu_call_of *>(self)->values);
    }
    static void destroy(void *self) {
        delete static_cast<emu_call_of *>(self);
    }
};

template <typename... Parameters, typename... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                                      Arguments &&...arguments) {
    typedef emu_call_of<Parameters...> Call;
    Call *call = new Call{ kernel, { static_cast<Parameters>(arguments)... } };
    return emu_launch(config, { reinterpret_cast<const void *>(kernel), Call::run, Call::destroy, call, sizeof *call,
                                Call::each_argument });
}

template <typename Function>
inline cudaError_t cudaFuncSetAttribute(Function *kernel, cudaFuncAttribute attribute, int value) {
    return emu_set_attribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

template <typename Function>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Function *kernel) {
    return emu_get_attributes(attributes, reinterpret_cast<const void *>(kernel));
}

template <typename Function>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Function *, int threads,
                                                                 size_t) {
    *blocks = threads > 0 && threads <= 1024 ? 2048 / threads : 0;
    return threads > 0 ? cudaSuccess : cudaErrorInvalidValue;
}

/* Few, so that a grid as large as the GPU works on several rows a cluster. */
template <typename Function>
inline cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, Function *,
                                                  const cudaLaunchConfig_t *config) {
    *clusters = config ? 2 : 0;
    return config ? cudaSuccess : cudaErrorInvalidValue;
}

/* CUDA's C++ overloads. */
template <typename T> inline cudaError_t cudaMalloc(T **pointer, size_t bytes) {
    return ::cudaMalloc(reinterpret_cast<void **>(pointer), bytes);
}
template <typename T> inline cudaError_t cudaMallocHost(T **pointer, size_t bytes) {
    return ::cudaMallocHost(reinterpret_cast<void **>(pointer), bytes);
}

/* ---- the seam: how device code declares shared memory and asks for unrolling ----
 *
 *   XD_SHARED(float, part, [32]);    XD_SHARED(int, total, );    XD_DYN_SHARED(float, tile);
 *
 * A declaration gets its address in the block's arena at the first use in a launch; red zones separate any two. */

struct emu_shared_site {
    unsigned launch, offset;
};

void *emu_shared(emu_shared_site *site, size_t bytes, size_t alignment, const char *name);
void *emu_dynamic_shared(size_t alignment);

#    define XD_SHARED(type, name, ...)                                 \
        typedef type emu_type_of_##name __VA_ARGS__;                   \
        static emu_shared_site emu_site_of_##name;                     \
        emu_type_of_##name &name = *static_cast<emu_type_of_##name *>( \
            emu_shared(&emu_site_of_##name, sizeof(emu_type_of_##name), alignof(emu_type_of_##name), #name))
#    define XD_DYN_SHARED(type, name) type *name = static_cast<type *>(emu_dynamic_shared(alignof(type)))
#    define XD_UNROLL
#    define XD_UNROLL_N(count)

#    include "emu_device.h"

#endif /* __cplusplus */
#endif
