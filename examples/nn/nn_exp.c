/* nn_exp.c - exp(x) = 2^n exp(r), n the whole number nearest to x / ln 2. A library's expf takes one number at
 * a time; short loops of constant length become vectors, those of AVX2 where the machine has it. */
#include "nn_exp.h"

#include "xdistill.h"

#include <math.h>

/* gcc makes no vectors of a loop with a choice in it while a comparison might trap. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC push_options
#    pragma GCC optimize("O3", "no-trapping-math")
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#    define NN_INLINE static inline __attribute__((always_inline))
#    define NN_AVX2 __attribute__((target("avx2")))
#else
#    define NN_INLINE static inline
#endif

enum { NN_LANES = 16 };

typedef union nn_lanes {
    float number[NN_LANES];
    uint32_t bits[NN_LANES];
} nn_lanes;

/* sigmoid: of -x, and then 1 / (1 + that); a constant where this is called. y may be x, so it is written
 * last. */
NN_INLINE void nn_exp_lanes(bool sigmoid, const float *x, float *y) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to a whole number */
    const float sign = sigmoid ? -1.0f : 1.0f;
    float r[NN_LANES], out[NN_LANES];
    nn_lanes n;
    for (int i = 0; i < NN_LANES; i++) {
        const float own = sign * x[i];
        n.number[i] = own * 1.44269504f + shift;
        const float whole = n.number[i] - shift;
        r[i] = own - whole * 0.693359375f + whole * 2.12194440e-4f; /* ln 2 in two parts */
    }
    /* Out of range, or not a number, this is not a power; then it is not used either. */
    for (int i = 0; i < NN_LANES; i++) n.bits[i] = (n.bits[i] - 0x4b400000u + 127u) << 23;
    for (int i = 0; i < NN_LANES; i++) {
        float p = 1.0f / 5040.0f;
        p = p * r[i] + 1.0f / 720.0f;
        p = p * r[i] + 1.0f / 120.0f;
        p = p * r[i] + 1.0f / 24.0f;
        p = p * r[i] + 1.0f / 6.0f;
        p = p * r[i] + 0.5f;
        p = p * r[i] * r[i] + r[i] + 1.0f;
        const float low = sign * x[i] < -87.0f ? 0.0f : p * n.number[i];
        const float power = sign * x[i] > 88.0f ? INFINITY : low;
        out[i] = sigmoid ? 1.0f / (1.0f + power) : power;
    }
    for (int i = 0; i < NN_LANES; i++) y[i] = out[i];
}

/* Block by block; the last one is filled up with zeros. */
NN_INLINE void nn_exp_all(bool sigmoid, int64_t count, const float *x, float *y) {
    float tail[NN_LANES];
    int64_t i = 0;
    for (; i + NN_LANES <= count; i += NN_LANES) nn_exp_lanes(sigmoid, x + i, y + i);
    if (i == count) return;
    for (int j = 0; j < NN_LANES; j++) tail[j] = i + j < count ? x[i + j] : 0.0f;
    nn_exp_lanes(sigmoid, tail, tail);
    for (int j = 0; i + j < count; j++) y[i + j] = tail[j];
}

#if defined(NN_AVX2)
NN_AVX2 static void nn_exp_avx2(bool sigmoid, int64_t count, const float *x, float *y) {
    if (sigmoid)
        nn_exp_all(true, count, x, y);
    else
        nn_exp_all(false, count, x, y);
}

static bool nn_has_avx2(void) {
    return xd_cpu_best() >= XD_CPU_AVX2;
}
#else
static void nn_exp_avx2(bool sigmoid, int64_t count, const float *x, float *y) {
    nn_exp_all(sigmoid, count, x, y);
}

static bool nn_has_avx2(void) {
    return false;
}
#endif

void nn_exp(int64_t count, const float *x, float *y) {
    if (nn_has_avx2())
        nn_exp_avx2(false, count, x, y);
    else
        nn_exp_all(false, count, x, y);
}

void nn_sigmoid(int64_t count, const float *x, float *y) {
    if (nn_has_avx2())
        nn_exp_avx2(true, count, x, y);
    else
        nn_exp_all(true, count, x, y);
}

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC pop_options
#endif
