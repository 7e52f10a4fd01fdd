/* What the tests of the CUDA unit share: a context on a GPU, its memory, comparisons by the byte. Built twice: against
 * the emulation (tests/emu, XD_EMU) and against CUDA itself; what only the emulation can do is empty in the latter. */
#ifndef XD_CUDA_TEST_H
#define XD_CUDA_TEST_H

#include <cuda_runtime.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "xd_test.h"
#include "xdistill.h"

/* Private functions too: the library that the tests are linked with shows them. */
#if !defined(XD_PRIVATE)
#    define XD_PRIVATE XD_API
#endif
#include "makers.h"
#include "vocab_calls.h"
#include "xd_private.h"

#if defined(XD_EMU)
static inline void seal() { emu_seal(); }
static inline void unseal() { emu_unseal(); }
static inline long launch_count() { return emu_launch_count(); }
/* Kernels that write to the host run once while this is 0: comparing orders, the emulation puts back what devices had. */
static inline void compare_orders(int on) { emu_set_comparable(on); }
/* Whether kernels are nvcc's code, with nvcc's functions of mathematics: on a GPU, or its PTX in the emulation. */
static inline bool code_of_nvcc() { return getenv("EMU_PTX") != nullptr; }
#else
static inline void seal() {}
static inline void unseal() {}
static inline void compare_orders(int) {}
static inline long launch_count() { return -1; } /* unknown */
static inline bool code_of_nvcc() { return true; }
#endif

static std::string test_log; /* what contexts of the tests have logged */

static void test_write(void *, xd_log_level, const char *line) {
    test_log += line;
    test_log += '\n';
}

/* What parameters and their gradients may be. */
static const xd_dtype narrow[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };

/* A context on the current device with a stream of its own. */
struct Gpu {
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    cudaStream_t stream = nullptr;

    explicit Gpu(xd_reduction reduction = XD_REDUCTION_DETERMINISTIC, bool two_sweeps = false,
                 const char *cublas = "none") {
        xd_ctx_desc desc = {};
        xd_cuda_desc device = {};
        desc.reduction = reduction;
        desc.logger.write = test_write;
        CHECK(cudaStreamCreate(&stream) == cudaSuccess);
        desc.stream = stream;
        CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
        device.two_sweeps = two_sweeps;
        device.cublas = cublas;
        CHECK(xd_cuda_create(ctx, &device, &cuda) == XD_OK);
    }
    ~Gpu() {
        xd_cuda_destroy(cuda);
        xd_ctx_destroy(ctx);
        cudaStreamDestroy(stream);
    }
    Gpu(const Gpu &) = delete;

    const xd_kernels *kernels() const { return xd_ctx_kernels(ctx); }
    xd_launch launch() const { return xd_ctx_launch(ctx); }
    void wait() const { CHECK(cudaStreamSynchronize(stream) == cudaSuccess); }
};

/* A context on the plain CPU level, the specification of the kernels. */
static inline xd_ctx *plain_ctx() {
    xd_ctx_desc desc = {};
    xd_ctx *ctx = nullptr;
    desc.cpu = XD_CPU_PLAIN;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

/* The GPU of a world's rank: its context computes there, on a stream of its own; or, with on_gpu false, on the CPU. */
struct RankGpu {
    xd_ctx *ctx;
    int rank;
    xd_cuda *cuda = nullptr;
    cudaStream_t stream = nullptr;

    explicit RankGpu(xd_comm *world, const xd_cuda_desc *desc = nullptr, bool on_gpu = true)
        : ctx(xd_comm_ctx(world)), rank(xd_comm_rank(world)) {
        if (!on_gpu) return;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        xd_ctx_set_stream(ctx, stream);
        CHECK(xd_cuda_create(ctx, desc, &cuda) == XD_OK);
    }
    ~RankGpu() {
        xd_cuda_destroy(cuda);
        if (stream) cudaStreamDestroy(stream);
    }
    RankGpu(const RankGpu &) = delete;
};

/* Device memory that holds copies of host memory, `skew` bytes behind an aligned address. */
struct Device {
    unsigned char *base = nullptr;
    size_t bytes = 0, skew = 0;

    Device() {}
    Device(const void *from, size_t size, size_t skewed = 0) : bytes(size), skew(skewed) {
        CHECK(cudaMalloc((void **)&base, size + skewed + 16) == cudaSuccess);
        if (size) CHECK(cudaMemcpy(base + skew, from, size, cudaMemcpyHostToDevice) == cudaSuccess);
    }
    template <typename T> explicit Device(const std::vector<T> &from, size_t skewed = 0)
        : Device(from.data(), from.size() * sizeof(T), skewed) {}
    Device(Device &&other) : base(other.base), bytes(other.bytes), skew(other.skew) { other.base = nullptr; }
    Device(const Device &) = delete;
    ~Device() { cudaFree(base); }

    template <typename T = void> T *at() const { return (T *)(void *)(base + skew); }

    template <typename T> std::vector<T> host() const {
        std::vector<T> out(bytes / sizeof(T));
        if (bytes) CHECK(cudaMemcpy(out.data(), base + skew, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
        return out;
    }
};

/* Random numbers, the same on every machine. */
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 2654435761u + 88172645463325252u) {}
    uint64_t bits() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state;
    }
    int64_t below(int64_t n) { return (int64_t)(bits() % (uint64_t)n); }
    float unit() { return (float)(bits() >> 40) / 16777216.0f * 2.0f - 1.0f; }
};

/* Elements of a dtype, most of them ordinary; every now and then an extreme one, when asked for. */
static inline std::vector<unsigned char> elements(xd_dtype dtype, int64_t count, Random *random, bool extremes) {
    static const double odd[] = { 0.0, -0.0, 1e-41, -3e-39, 65504.0, 65520.0, 3e38, -1e30, 1e-7, 6e-8 };
    std::vector<unsigned char> out((size_t)count * xd_dtype_size(dtype));
    const bool floating = xd_dtype_is_floating(dtype);
    for (int64_t i = 0; i < count; i++) {
        double value = floating ? random->unit() : (double)(random->below(250) - (dtype == XD_DTYPE_U8 ? 0 : 120));
        if (dtype == XD_DTYPE_BOOL) value = (double)random->below(2);
        if (dtype == XD_DTYPE_U8) value = (double)random->below(250);
        if (extremes && floating && random->below(9) == 0) value = odd[random->below(10)];
        if (extremes && floating && random->below(40) == 0) value = random->below(2) ? HUGE_VAL : -HUGE_VAL;
        if (extremes && floating && random->below(40) == 0) value = NAN;
        xd_store_f64(out.data(), dtype, i, value);
    }
    return out;
}

/* The first byte that differs, or -1. */
template <typename T> static inline long first_difference(const std::vector<T> &a, const std::vector<T> &b) {
    if (a.size() != b.size()) return 0;
    for (size_t i = 0; i < a.size(); i++)
        if (memcmp(&a[i], &b[i], sizeof(T)) != 0) return (long)i;
    return -1;
}

/* The same for elements of a dtype. A NaN is a NaN: which of them an operation yields differs between processors. */
static inline long first_other(xd_dtype dtype, const std::vector<unsigned char> &a,
                               const std::vector<unsigned char> &b) {
    const size_t size = xd_dtype_size(dtype), n = a.size() / size;
    if (a.size() != b.size()) return 0;
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&a[i * size], &b[i * size], size) == 0) continue;
        const double x = xd_load_f64(a.data(), dtype, (int64_t)i), y = xd_load_f64(b.data(), dtype, (int64_t)i);
        if (x == x || y == y) return (long)i;
    }
    return -1;
}

#define CHECK_ELEMENTS(dtype, a, b) CHECK_EQ_INT(first_other((dtype), (a), (b)), -1)
#define CHECK_SAME(a, b) CHECK_EQ_INT(first_difference((a), (b)), -1)

/* A program of these tests: passes over everything, in words, where there is no GPU. */
/* Whether there is one, asked by a process of its own: one that has asked cannot fork others that use it. */
static inline bool has_gpu() {
    int devices = 0, status = 0;
    const pid_t child = fork();
    if (child == 0) _exit(cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 ? 0 : 1);
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#define XD_CUDA_TEST_MAIN()                                                      \
    int main(int argc, char **argv) {                                            \
        if (!has_gpu()) {                                                        \
            printf("skipped: there is no GPU\n0 passed, 0 failed, 1 skipped\n"); \
            return 0;                                                            \
        }                                                                        \
        return xd_test_main(argc, argv);                                         \
    }

#endif
