/* What the parts of bench/gpu.cu share: a side, which is the GPU or the CPU that it is compared with, memory of a side, and an
 * operation as both sides prepare it. */
#ifndef XDISTILL_BENCH_GPU_SIDE_H
#define XDISTILL_BENCH_GPU_SIDE_H

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

/* Sizes: of a GPU, or of a test on the emulation. */
#if defined(GPU_SMALL)
enum {
    LOSS_ROWS = 3,
    VOCABULARY = 2312,
    LIST_COLUMNS = 900,
    LIST_LENGTH = 129,
    BLOCKS = 2,
    ARRAYS = 3,
    SAMPLES = 3,
    SAMPLE = 1024,
    LONG_SAMPLE = 2048,
    PIECE_ROWS = 3,
    XTOKEN_ROWS = 10,
    XTOKEN_STUDENT = 400,
    XTOKEN_TEACHER = 472,
    XTOKEN_COLUMNS = 64,
    HEAD_ROWS = 8,
    HEAD_WIDTH = 64,
    GAN_LOGITS = 64
};
#else
enum {
    LOSS_ROWS = 8192,
    VOCABULARY = 128256,
    LIST_COLUMNS = 50000,
    LIST_LENGTH = 8192,
    BLOCKS = 1 << 16,
    ARRAYS = 1000,
    SAMPLES = 1024,
    SAMPLE = 16384,
    LONG_SAMPLE = 65536,
    PIECE_ROWS = 1 << 15,
    XTOKEN_ROWS = 32,
    XTOKEN_STUDENT = 128256,
    XTOKEN_TEACHER = 151936,
    XTOKEN_COLUMNS = 8192,
    HEAD_ROWS = 4096,
    HEAD_WIDTH = 4096,
    GAN_LOGITS = 4096
};
#endif
enum {
    CHECKED_ROWS = 2,
    BLOCK = 4096 /* elements of a parameter's row, and of a small array */,
    PATTERN = 1 << 22
};

static void require(xd_ctx *ctx, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    exit(2);
}

static void require_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    exit(2);
}

static void *host_room(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) exit(2);
    return memory;
}

/* Numbers in [-size, size), the same on every run: a pattern whose length has no common factor with a row's. The first elements of a
 * long array are those of a short one. */
static int64_t noise_period(int64_t count) {
    return count < PATTERN - 1 ? count : PATTERN - 1;
}

static std::vector<unsigned char> noise_pattern(int64_t count, xd_dtype dtype, double size, uint64_t seed) {
    std::vector<unsigned char> pattern((size_t)noise_period(count) * xd_dtype_size(dtype));
    for (int64_t i = 0; i < noise_period(count); i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        xd_store_f64(pattern.data(), dtype, i, size * (double)(int64_t)seed / 9223372036854775808.0);
    }
    return pattern;
}

/* A context and its memory: on the GPU, or on the CPU as the reference. */
struct Side {
    xd_ctx *ctx = nullptr;
    xd_cuda *gpu = nullptr; /* NULL: the CPU, on its plain level */
    std::vector<void *> rooms;

    explicit Side(const xd_cuda_desc *desc) {
        xd_ctx_desc plain = {};
        plain.cpu = XD_CPU_PLAIN;
        require(nullptr, xd_ctx_create(desc ? nullptr : &plain, &ctx));
        if (desc) require(ctx, xd_cuda_create(ctx, desc, &gpu));
    }
    ~Side() {
        for (void *memory : rooms) gpu ? (void)cudaFree(memory) : free(memory);
        xd_cuda_destroy(gpu);
        xd_ctx_destroy(ctx);
    }
    Side(const Side &) = delete;

    /* Zeros. */
    void *room(size_t bytes) {
        void *memory = nullptr;
        if (gpu) {
            require_cuda(cudaMalloc(&memory, bytes));
            require_cuda(cudaMemset(memory, 0, bytes));
        } else {
            memory = host_room(bytes);
        }
        rooms.push_back(memory);
        return memory;
    }

    void *upload(const void *from, size_t bytes) {
        void *memory = room(bytes);
        require(ctx, write(memory, from, bytes));
        return memory;
    }

    xd_result write(void *to, const void *from, size_t bytes) {
        if (gpu)
            return cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess ? XD_OK
                                                                                      : XD_ERROR_DEVICE;
        memcpy(to, from, bytes);
        return XD_OK;
    }

    void *noise(int64_t count, xd_dtype dtype, double size, uint64_t seed) {
        const size_t width = xd_dtype_size(dtype);
        const std::vector<unsigned char> pattern = noise_pattern(count, dtype, size, seed);
        char *memory = (char *)room((size_t)count * width);
        for (int64_t i = 0, period = noise_period(count); i < count; i += period)
            require(ctx, write(memory + (size_t)i * width, pattern.data(),
                               (size_t)(count - i < period ? count - i : period) * width));
        return memory;
    }

    xd_rows noise_rows(int64_t rows, int64_t columns, xd_dtype dtype, double size, uint64_t seed) {
        return { noise(rows * columns, dtype, size, seed), dtype, rows, columns, 0 };
    }

    xd_rows empty_rows(int64_t rows, int64_t columns, xd_dtype dtype) {
        return { room((size_t)(rows * columns) * xd_dtype_size(dtype)), dtype, rows, columns, 0 };
    }

    xd_status *status() {
        return gpu ? (xd_status *)room(sizeof(xd_status)) : nullptr;
    }
};

/* An array that an operation writes, [rows, columns]; the columns in `apart` [rows, k] of a row are judged for themselves. */
struct Output {
    const void *data;
    xd_dtype dtype;
    int64_t columns;
    std::vector<int64_t> apart;
    int64_t k;
    int64_t rows = INT64_MAX; /* it has no more than these */
};

/* An operation on one side. `keep` holds what its desc points to, and what has to be destroyed. */
struct Operation {
    std::function<void()> call;
    std::vector<Output> outputs;
    std::function<double()> error; /* instead of a comparison of outputs */
    double bytes = 0.0,
           flops = 0.0; /* what it must move, or compute; the first binds unless the second is given */
    size_t workspace = 0;
    std::string size;
    std::vector<std::shared_ptr<void>> keep;

    template <typename T, typename Destroy> void own(T *object, Destroy destroy) {
        keep.push_back(std::shared_ptr<void>(object, [destroy](void *p) { destroy((T *)p); }));
    }
    template <typename T> T *hold(T value) {
        std::shared_ptr<T> held = std::make_shared<T>(std::move(value));
        keep.push_back(held);
        return held.get();
    }
};

/* A line of the table. `prepare` makes the operation of `rows` rows on a side: all of them on the GPU, the first ones on the CPU.
 * The gradient's divisor is that of all rows on both. */
struct Case {
    const char *name;
    xd_dtype dtype;
    int64_t rows, checked;
    double limit; /* of the error */
    std::function<void(const Case &, Side &, int64_t rows, Operation *)> prepare;
    const char *variant = "";
    int calls = 1; /* before the results are compared */
    const char *cublas = nullptr;
};

static xd_vocab *whole_vocabulary(Side &side, Operation *op, int64_t columns) {
    xd_vocab *vocab = nullptr;
    xd_vocab_desc desc = {};
    desc.size = columns;
    require(side.ctx, xd_vocab_create(side.ctx, &desc, &vocab));
    op->own(vocab, xd_vocab_destroy);
    return vocab;
}

/* The workspace of a call, which is only counted. */
static size_t planned_workspace(Side &side, const std::function<void()> &call) {
    xd_planned planned;
    require(side.ctx, xd_plan_begin(side.ctx, NULL));
    call();
    require(side.ctx, xd_plan_end(side.ctx, &planned));
    return planned.workspace;
}

static std::vector<int64_t> labels_of(int64_t rows, int64_t columns) {
    std::vector<int64_t> labels;
    for (int64_t r = 0; r < rows; r++) labels.push_back((r * 7919 + 1000) % columns);
    return labels;
}

static std::string size_of(int64_t rows, int64_t columns) {
    return std::to_string((long long)rows) + "x" + std::to_string((long long)columns);
}

static const char *name_of(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 ? "f32" : "bf16";
}

#endif
