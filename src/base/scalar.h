#ifndef XDI_BASE_SCALAR_H
#define XDI_BASE_SCALAR_H

#include "base/dtype.h"

#include <math.h>
#include <string.h>

/* Formulas of one element, and of the few values of a row, that kernels of every device share: each is written once, as
 * an inline function that nvcc compiles for the host and for the device. */
#if defined(__CUDACC__)
#    define XD_SCALAR static inline __host__ __device__
#else
#    define XD_SCALAR static inline
#endif

/* ---- roundings ---- */

/* Products and sums with a rounding of their own. nvcc, and C compilers that may use a fused multiply-add, contract a
 * product and the sum that uses it, which changes bits; formulas whose bits are promised use these functions. */
XD_SCALAR double xd_mul(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#elif defined(__CUDACC__)
    return a * b;
#elif defined(__GNUC__) && defined(__x86_64__)
    double product = a * b;
    __asm__("" : "+x"(product));
    return product;
#elif defined(__GNUC__) && defined(__aarch64__)
    double product = a * b;
    __asm__("" : "+w"(product));
    return product;
#else
    volatile double product = a * b;
    return product;
#endif
}

XD_SCALAR float xd_mulf(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#elif defined(__CUDACC__)
    return a * b;
#elif defined(__GNUC__) && defined(__x86_64__)
    float product = a * b;
    __asm__("" : "+x"(product));
    return product;
#elif defined(__GNUC__) && defined(__aarch64__)
    float product = a * b;
    __asm__("" : "+w"(product));
    return product;
#else
    volatile float product = a * b;
    return product;
#endif
}

/* A product that is exact, for example by a power of two: fused or not, the bits are the same. */
XD_SCALAR double xd_mul_exact(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}

XD_SCALAR double xd_add(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dadd_rn(a, b);
#else
    return a + b;
#endif
}

XD_SCALAR double xd_sub(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dsub_rn(a, b);
#else
    return a - b;
#endif
}

XD_SCALAR float xd_addf(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

XD_SCALAR float xd_subf(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fsub_rn(a, b);
#else
    return a - b;
#endif
}

/* Rounded to nearest, even with -use_fast_math. */
XD_SCALAR float xd_divf(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

XD_SCALAR float xd_sqrtf(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return sqrtf(x);
#endif
}

/* a * b + c with one rounding, where the formula requires one. */
XD_SCALAR float xd_fmaf(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

XD_SCALAR double xd_fma(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
    return __fma_rn(a, b, c);
#else
    return fma(a, b, c);
#endif
}

/* floor, and rint of numbers that are not negative, below 2^52: on a CPU without a call and without a branch that would be
 * mispredicted. */
XD_SCALAR int64_t xd_floor_i64(double x) {
#if defined(__CUDA_ARCH__)
    return (int64_t)__double2ll_rd(x);
#else
    const int64_t whole = (int64_t)x;
    return whole - ((double)whole > x ? 1 : 0);
#endif
}

XD_SCALAR int64_t xd_nearest_i64(double x) {
#if defined(__CUDA_ARCH__)
    return (int64_t)__double2ll_rn(x);
#else
    const int64_t below = (int64_t)x;
    const double rest = x - (double)below;
    const int up = rest > 0.5, tie = rest == 0.5;
    return below + (up | (tie & (int)(below & 1)));
#endif
}

/* ---- bits ---- */

XD_SCALAR uint32_t xd_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

XD_SCALAR float xd_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Descending order of numbers as ascending order of integers, and the way back; both zeros are one. */
XD_SCALAR uint32_t xd_key_of_float(float x) {
    const uint32_t bits = xd_bits_of_float(xd_addf(x, 0.0f));
    return bits & 0x80000000u ? bits : bits ^ 0x7fffffffu;
}

XD_SCALAR float xd_float_of_key(uint32_t key) {
    return xd_float_of_bits(key & 0x80000000u ? key : key ^ 0x7fffffffu);
}

/* ---- storage ---- */

/* The conversions of base/half.h. */
XD_SCALAR uint16_t xd_bits_to_bf16(float value) {
    const uint32_t bits = xd_bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x0040u; /* still a NaN, a quiet one */
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

XD_SCALAR float xd_bits_from_bf16(uint16_t half) {
    return xd_float_of_bits((uint32_t)half << 16);
}

XD_SCALAR uint16_t xd_bits_to_f16(float value) {
    const uint32_t bits = xd_bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    const int exponent = (int)(magnitude >> 23) - 127;
    if (exponent < -25) return (uint16_t)sign; /* below half of the smallest subnormal */
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const int shift = exponent < -14 ? -1 - exponent : 13; /* subnormals lose more bits */
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rounded = kept + ((rest > half || (rest == half && (kept & 1u))) ? 1u : 0u);
    /* The mantissa bits of a normal number include the hidden bit, which adds one to the biased exponent. */
    const uint32_t base = exponent < -14 ? 0u : (uint32_t)(exponent + 14) << 10;
    return (uint16_t)(sign | (base + rounded));
}

XD_SCALAR float xd_bits_from_f16(uint16_t half) {
    const uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
    const uint32_t exponent = ((uint32_t)half >> 10) & 0x1fu;
    const uint32_t mantissa = (uint32_t)half & 0x3ffu;
    if (exponent == 31u)
        return xd_float_of_bits(sign | 0x7f800000u | (mantissa ? 0x400000u | (mantissa << 13) : 0u));
    if (exponent) return xd_float_of_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = xd_mulf((float)mantissa, 5.9604644775390625e-8f); /* 2^-24: exact */
    return sign ? -magnitude : magnitude;
}

/* xd_load_f64 and xd_store_f64 of base/half.h. */
XD_SCALAR double xd_element_load(const void *data, xd_dtype dtype, int64_t index) {
    switch (dtype) {
    case XD_DTYPE_F32: return (double)((const float *)data)[index];
    case XD_DTYPE_F64: return ((const double *)data)[index];
    case XD_DTYPE_BF16: return (double)xd_bits_from_bf16(((const uint16_t *)data)[index]);
    case XD_DTYPE_F16: return (double)xd_bits_from_f16(((const uint16_t *)data)[index]);
    case XD_DTYPE_I32: return (double)((const int32_t *)data)[index];
    case XD_DTYPE_I64: return (double)((const int64_t *)data)[index];
    case XD_DTYPE_U8:
    case XD_DTYPE_BOOL: return (double)((const uint8_t *)data)[index];
    default: return 0.0;
    }
}

XD_SCALAR void xd_element_store(void *data, xd_dtype dtype, int64_t index, double value) {
    switch (dtype) {
    case XD_DTYPE_F32: ((float *)data)[index] = (float)value; break;
    case XD_DTYPE_F64: ((double *)data)[index] = value; break;
    case XD_DTYPE_BF16: ((uint16_t *)data)[index] = xd_bits_to_bf16((float)value); break;
    case XD_DTYPE_F16: ((uint16_t *)data)[index] = xd_bits_to_f16((float)value); break;
    case XD_DTYPE_I32: ((int32_t *)data)[index] = (int32_t)value; break;
    case XD_DTYPE_I64: ((int64_t *)data)[index] = (int64_t)value; break;
    case XD_DTYPE_U8: ((uint8_t *)data)[index] = (uint8_t)value; break;
    case XD_DTYPE_BOOL: ((uint8_t *)data)[index] = (uint8_t)(value != 0.0); break;
    default: break;
    }
}

#endif
