/* Each operation of the CUDA unit once, at a small size with a row's ends in it, for the report of the PTX interpreter: the
 * section of the report is the operation, and a line "operation dtype elements, units" on standard output says how much was done.
 * tools/gpu_cost.py joins both. sh tests/cuda/run.sh cost runs it.
 *
 *     cost [a part of an operation's name]      only these operations */
#include <cuda_runtime.h>
#define XDISTILL_IMPLEMENTED
#include "xdistill.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

static const char *wanted;
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

/* The call, in a section of its own. The first call of a context may prepare something, so it comes before. */
template <typename Call> static void measure(const Operation &operation, Call call) {
    char section[100];
    snprintf(section, sizeof section, "%s %s", operation.name, name_of(operation.dtype));
    call();
    cudaDeviceSynchronize();
    emu_ptx_section(section);
    const long before = emu_launch_count();
    call();
    cudaDeviceSynchronize();
    emu_ptx_section("-");
    printf("%s\t%.0f\t%g\t%ld\n", section, operation.elements, operation.bytes, emu_launch_count() - before);
    fflush(stdout);
}

static void release(xd_vocab *vocab) {
    xd_vocab_destroy(vocab);
    for (void *memory : rooms) cudaFree(memory);
    rooms.clear();
}

/* ---- losses over rows ---- */

enum { ROWS = 2, VOCABULARY = 128256 };

static xd_vocab *whole_vocabulary(int64_t columns) {
    xd_vocab *vocab = nullptr;
    xd_vocab_desc desc = {};
    desc.size = columns;
    require(xd_vocab_create(ctx, &desc, &vocab));
    return vocab;
}

static const void *labels_of(int64_t rows, int64_t columns) {
    std::vector<int64_t> labels;
    for (int64_t r = 0; r < rows; r++) labels.push_back((r * 7919 + 1000) % columns);
    return upload(labels.data(), labels.size() * sizeof labels[0]);
}

struct Loss {
    const char *name;
    double hard, soft, temperature, smoothing;
    xd_divergence divergence;
};

static void measure_loss(const Loss &loss, xd_dtype dtype) {
    if (!is_wanted(loss.name)) return;
    const double width = (double)xd_dtype_size(dtype);
    xd_loss_desc d = {};
    xd_vocab *vocab = whole_vocabulary(VOCABULARY);
    d.vocab = vocab;
    d.student = noise_rows(ROWS, VOCABULARY, dtype, 3.0);
    if (loss.soft > 0.0) d.teacher = noise_rows(ROWS, VOCABULARY, dtype, 3.0);
    d.hard_weight = loss.hard;
    d.soft_weight = loss.soft;
    d.temperature = loss.temperature;
    d.label_smoothing = loss.smoothing;
    d.divergence = loss.divergence;
    d.beta = 0.5;
    if (loss.hard > 0.0) d.common.labels.data = (void *)labels_of(ROWS, VOCABULARY);
    d.common.gradient = empty_rows(ROWS, VOCABULARY, dtype);
    d.common.denominator_value = ROWS;
    d.common.status = (xd_status *)room(sizeof *d.common.status);
    xd_loss_values *out = (xd_loss_values *)room(sizeof *out);
    measure({ loss.name, dtype, (double)ROWS * VOCABULARY, (loss.soft > 0.0 ? 3.0 : 2.0) * width },
            [&] { require(xd_loss(ctx, &d, out)); });
    release(vocab);
}

static void measure_losses() {
    static const Loss losses[] = {
        { "ce", 1, 0, 1, 0, XD_KL_FORWARD },         { "ce_smoothed", 1, 0, 1, 0.1, XD_KL_FORWARD },
        { "kl", 0, 1, 2, 0, XD_KL_FORWARD },         { "kl_t1", 0, 1, 1, 0, XD_KL_FORWARD },
        { "reverse_kl", 0, 1, 2, 0, XD_KL_REVERSE }, { "jsd", 0, 1, 2, 0, XD_JSD },
        { "hard_soft", 0.5, 0.5, 2, 0, XD_KL_FORWARD }, { "hard_soft_t1", 0.5, 0.5, 1, 0, XD_KL_FORWARD },
    };
    for (const Loss &loss : losses)
        for (const xd_dtype dtype : { XD_DTYPE_BF16, XD_DTYPE_F32 }) measure_loss(loss, dtype);
}

int main(int argc, char **argv) {
    wanted = argc > 1 ? argv[1] : nullptr;
    require(xd_ctx_create(nullptr, &ctx));
    require(xd_cuda_create(ctx, nullptr, &gpu));
    measure_losses();
    xd_cuda_destroy(gpu);
    xd_ctx_destroy(ctx);
    return 0;
}
