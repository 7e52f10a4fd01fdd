/* What the parts of cost.cpp share: a context on the emulation, memory of an operation, its section of the report. */
#ifndef XD_COST_H
#define XD_COST_H

#include <cuda_runtime.h>
#define XDISTILL_IMPLEMENTED
#include "xdistill.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

static const char *wanted; /* a part of the names of operations; NULL: all */
static bool host_alone;    /* times what the host computes for a call; no kernel runs */

static xd_ctx *ctx;
static xd_cuda *gpu;
static std::vector<void *> rooms;

static void require(xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    exit(1);
}

/* ---- memory, until the operation ends ---- */

static void *room(size_t bytes) {
    void *memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess || cudaMemset(memory, 0, bytes) != cudaSuccess) exit(1);
    rooms.push_back(memory);
    return memory;
}

static void *upload(const void *from, size_t bytes) {
    void *memory = room(bytes);
    if (cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice) != cudaSuccess) exit(1);
    return memory;
}

/* Normal numbers of this deviation, the same on every run. */
static void *noise(int64_t count, xd_dtype dtype, double deviation) {
    static uint64_t seed = 1;
    const size_t width = xd_dtype_size(dtype);
    std::vector<unsigned char> host((size_t)count * width);
    for (int64_t i = 0; i < count; i++) {
        double uniform[2];
        for (double &u : uniform) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            u = ((double)(seed >> 11) + 0.5) / 9007199254740992.0;
        }
        xd_store_f64(host.data(), dtype, i, deviation * sqrt(-2.0 * log(uniform[0])) * cos(6.283185307 * uniform[1]));
    }
    return upload(host.data(), host.size());
}

static xd_rows noise_rows(int64_t rows, int64_t columns, xd_dtype dtype, double deviation) {
    return { noise(rows * columns, dtype, deviation), dtype, rows, columns, 0 };
}

static xd_rows empty_rows(int64_t rows, int64_t columns, xd_dtype dtype) {
    return { room((size_t)(rows * columns) * xd_dtype_size(dtype)), dtype, rows, columns, 0 };
}

static const char *name_of(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 ? "f32" : "bf16";
}

/* `bytes`: what the operation must read and write for an element. */
struct Operation {
    const char *name;
    xd_dtype dtype;
    double elements, bytes;
};

static bool is_wanted(const char *name) {
    return !wanted || strstr(name, wanted);
}

/* The linker gives launches to this function (--wrap): arguments have been packed by then. */
extern "C" cudaError_t __real__Z10emu_launchPK18cudaLaunchConfig_tRK15emu_kernel_call(const cudaLaunchConfig_t *, const emu_kernel_call &);
extern "C" cudaError_t __wrap__Z10emu_launchPK18cudaLaunchConfig_tRK15emu_kernel_call(const cudaLaunchConfig_t *config,
                                                                                      const emu_kernel_call &call) {
    if (!host_alone) return __real__Z10emu_launchPK18cudaLaunchConfig_tRK15emu_kernel_call(config, call);
    call.destroy(call.arguments);
    return cudaSuccess;
}

/* Microseconds of a call on the host, the least of some means: other programs only add to it. */
template <typename Call> static double host_time(Call call) {
    enum { MEANS = 30, CALLS = 50 };
    double least = HUGE_VAL;
    for (int k = 0; k < MEANS; k++) {
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < CALLS; i++) call();
        const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
        least = std::min(least, spent.count() / CALLS);
    }
    return least;
}

/* How many kernels a call launches. */
template <typename Call> static long launches_of(Call call) {
    const long before = emu_launch_count();
    call();
    cudaDeviceSynchronize();
    return emu_launch_count() - before;
}

/* The call, in a section of its own. The first call of a context may prepare something, so it comes before. more: launches that the
 * size of the budget adds to those of the call. */
template <typename Call> static void measure(const Operation &operation, Call call, long more = 0) {
    char section[100];
    snprintf(section, sizeof section, "%s %s", operation.name, name_of(operation.dtype));
    call();
    cudaDeviceSynchronize();
    if (host_alone) {
        printf("%-21s %6.2f us on the host\n", section, host_time(call));
        return;
    }
    emu_ptx_section(section);
    const long launches = launches_of(call);
    emu_ptx_section("-");
    printf("%s\t%.0f\t%g\t%ld\n", section, operation.elements, operation.bytes, launches + more);
    fflush(stdout);
}

/* A call with all that the size of the budget has, of which only kernels of one block count: those of the operation take as long. */
template <typename Call> static void measure_all_of(const Operation &operation, Call call) {
    char section[100];
    if (host_alone) return;
    snprintf(section, sizeof section, "%s %s, all", operation.name, name_of(operation.dtype));
    emu_ptx_section(section);
    call();
    cudaDeviceSynchronize();
    emu_ptx_section("-");
}

static void release(xd_vocab *vocab) {
    xd_vocab_destroy(vocab);
    for (void *memory : rooms) cudaFree(memory);
    rooms.clear();
}

/* Rows of a real vocabulary. Of losses as many that a cluster's first and last steps, once a launch, are few beside its rows. */
enum { ROWS = 2, LOSS_ROWS = 48, VOCABULARY = 128256 };

static xd_vocab *whole_vocabulary(int64_t columns) {
    xd_vocab *vocab = nullptr;
    xd_vocab_desc desc = {};
    desc.size = columns;
    require(xd_vocab_create(ctx, &desc, &vocab));
    return vocab;
}

#endif
