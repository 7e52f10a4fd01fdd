/* What the tests of losses on a GPU share: the same call on the plain CPU kernels and on the GPU, over copies of the
 * same memory. */
#ifndef XD_CUDA_LOSS_TEST_H
#define XD_CUDA_LOSS_TEST_H

#include "cuda_test.h"

/* ---- one block of memory that exists on both sides ---- */

struct Board {
    std::vector<unsigned char> bytes;

    size_t add(const void *from, size_t size, size_t skew = 0) {
        const size_t at = (bytes.size() + 63) / 64 * 64 + skew;
        bytes.resize(at + size + 64);
        if (from) memcpy(bytes.data() + at, from, size);
        return at;
    }
    template <typename T> size_t add(const std::vector<T> &from, size_t skew = 0) {
        return add(from.data(), from.size() * sizeof(T), skew);
    }
};

template <typename T> static T *place(void *base, size_t offset) {
    return (T *)(void *)((unsigned char *)base + offset);
}

/* The CPU's context beside the GPU's. */
struct Pair {
    Gpu gpu;
    xd_ctx *cpu = nullptr;
    explicit Pair(xd_reduction reduction = XD_REDUCTION_DETERMINISTIC, bool cluster = false) : gpu(reduction, cluster) {
        xd_ctx_desc desc = {};
        desc.reduction = reduction;
        desc.cpu = XD_CPU_PLAIN;
        CHECK(xd_ctx_create(&desc, &cpu) == XD_OK);
    }
    ~Pair() {
        xd_ctx_destroy(cpu);
    }

    /* Runs a call over the board on both sides; `sealed`: it may not allocate,
   * wait or read. */
    template <typename Call>
    std::vector<unsigned char> run(Board *board, int64_t size, bool sealed, Call call) {
        Device device(board->bytes);
        xd_vocab *vocab = nullptr;
        CHECK(xd_vocab_create(cpu, nullptr, 0, size, size, &vocab) == XD_OK);
        call(cpu, vocab, board->bytes.data());
        xd_vocab_destroy(vocab);
        CHECK(xd_vocab_create(gpu.ctx, nullptr, 0, size, size, &vocab) == XD_OK);
        if (sealed) seal();
        call(gpu.ctx, vocab, device.at<void>());
        if (sealed) unseal();
        gpu.wait();
        xd_vocab_destroy(vocab);
        return device.host<unsigned char>();
    }
};

/* max|a - b| <= tolerance * max(|b|, floor), NaN equal to NaN. Gradients are
 * relative to the whole tensor. */
template <typename T>
static inline void check_near(const T *a, const T *b, int64_t n, double tolerance, double floor = 1e-30) {
    double largest = floor, worst = 0.0;
    bool same_nan = true;
    for (int64_t i = 0; i < n; i++) {
        if (isfinite((double)b[i])) largest = fmax(largest, fabs((double)b[i]));
        if (isnan((double)a[i]) != isnan((double)b[i])) same_nan = false;
        if (isfinite((double)a[i]) && isfinite((double)b[i]))
            worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
        if (isinf((double)a[i]) != isinf((double)b[i])) same_nan = false;
    }
    CHECK(same_nan);
    CHECK_NEAR(worst / largest, 0.0, tolerance);
}

static inline std::vector<float> widened(const void *data, xd_dtype dtype, int64_t count) {
    std::vector<float> out((size_t)count);
    for (int64_t i = 0; i < count; i++) out[(size_t)i] = (float)xd_load_f64(data, dtype, i);
    return out;
}

static inline double tolerance_of(xd_dtype dtype) {
    return dtype == XD_DTYPE_BF16 ? 0.0040 : 3e-6; /* one step of bf16 is 2^-8 of the value */
}

/* ---- logits ---- */

struct Shape {
    int64_t rows, cols, padding, skew; /* skew: elements before the first row */
    xd_dtype student, teacher, gradient;

    int64_t stride() const {
        return cols + padding;
    }
};

static inline std::vector<unsigned char> logits(xd_dtype dtype, const Shape &s, Random *random) {
    std::vector<unsigned char> out((size_t)(s.rows * s.stride()) * xd_dtype_size(dtype));
    for (int64_t i = 0; i < s.rows * s.stride(); i++)
        xd_store_f64(out.data(), dtype, i, 6.0 * (double)random->unit());
    return out;
}

static inline xd_rows rows_at(void *base, size_t offset, xd_dtype dtype, const Shape &s) {
    xd_rows r = { (unsigned char *)base + offset, dtype, s.rows, s.cols, s.stride() };
    return r;
}

#endif
