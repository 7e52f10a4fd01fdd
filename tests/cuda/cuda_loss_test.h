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
    explicit Pair(xd_reduction reduction = XD_REDUCTION_DETERMINISTIC, bool two_sweeps = false)
        : gpu(reduction, two_sweeps) {
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
        CHECK(vocab_even(cpu, nullptr, size, &vocab) == XD_OK);
        call(cpu, vocab, board->bytes.data());
        xd_vocab_destroy(vocab);
        CHECK(vocab_even(gpu.ctx, nullptr, size, &vocab) == XD_OK);
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

/* The same findings on both sides. */
static inline void check_status(const xd_status *a, const xd_status *b) {
    CHECK_EQ_INT(a->label_out_of_range, b->label_out_of_range);
    CHECK_EQ_INT(a->not_finite, b->not_finite);
    CHECK_EQ_INT(a->overflow, b->overflow);
    CHECK_EQ_INT(a->nothing_counted, b->nothing_counted);
    CHECK_EQ_INT(a->first_row, b->first_row);
    CHECK(a->first_value == b->first_value || (isnan(a->first_value) && isnan(b->first_value)));
}

static inline xd_rows rows_at(void *base, size_t offset, xd_dtype dtype, const Shape &s) {
    xd_rows r = { (unsigned char *)base + offset, dtype, s.rows, s.cols, s.stride() };
    return r;
}

/* ---- ranks that share a vocabulary ---- */

enum { TP_ROWS = 4, TP_COLS = 45 };

/* Rank r of a world has columns cuts[r] to cuts[r + 1], on a GPU of its own or on the CPU. */
struct TpLogits {
    bool on_device;
    std::vector<int64_t> cuts;
    std::vector<float> student, teacher;

    TpLogits(const std::vector<int64_t> &parts, bool device) : on_device(device), cuts(parts) {
        Random random(21);
        for (int i = 0; i < TP_ROWS * TP_COLS; i++) {
            student.push_back(5.0f * random.unit());
            teacher.push_back(5.0f * random.unit());
        }
    }
    void run(xd_reduction reduction, xd_result (*rank)(xd_comm *world, void *argument),
             void *argument) const {
        xd_ctx_desc desc = {};
        desc.reduction = reduction;
        desc.cpu = XD_CPU_PLAIN;
        CHECK(xd_run_threads((int)cuts.size() - 1, &desc, rank, argument, nullptr) == XD_OK);
    }
    int64_t columns(int rank) const {
        return cuts[(size_t)rank + 1] - cuts[(size_t)rank];
    }

    /* A rank's columns, and one element more: a shard without columns has an address, too. */
    std::vector<float> shard(const std::vector<float> &whole, int rank) const {
        std::vector<float> out;
        for (int64_t r = 0; r < TP_ROWS; r++)
            for (int64_t c = 0; c < columns(rank); c++)
                out.push_back(whole[(size_t)(r * TP_COLS + cuts[(size_t)rank] + c)]);
        out.resize(out.size() + 1);
        return out;
    }
    /* Puts a rank's columns into the whole. */
    void put(int rank, const std::vector<float> &shard, std::vector<float> *whole) const {
        for (int64_t i = 0; i < TP_ROWS * columns(rank); i++)
            (*whole)[(size_t)(i / columns(rank) * TP_COLS + cuts[(size_t)rank] + i % columns(rank))] =
                shard[(size_t)i];
    }
};

#endif
