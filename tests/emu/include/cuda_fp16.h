/* Emulation of the fp16 type: storage, and conversions by round to nearest even that keep subnormals. */
#ifndef EMU_CUDA_FP16_H
#define EMU_CUDA_FP16_H

#include <cstdint>
#include <cstring>
#include "cuda_runtime.h"

struct alignas(2) __half {
    unsigned short bits;
    __half() = default;
    __half(float value);
    operator float() const;
};

struct alignas(4) __half2 {
    __half x, y;
};

typedef __half half;
typedef __half2 half2;

inline unsigned short __half_as_ushort(__half value) {
    return value.bits;
}

inline __half __ushort_as_half(unsigned short bits) {
    __half value;
    value.bits = bits;
    return value;
}

inline float __half2float(__half value) {
    const unsigned sign = (value.bits & 0x8000u) << 16, exponent = (value.bits >> 10) & 31u;
    unsigned fraction = value.bits & 0x3ffu;
    if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return __uint_as_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float magnitude = (float)fraction * 0x1p-24f; /* no rounding: ten bits */
    return sign ? -magnitude : magnitude;
}

inline __half __float2half_rn(float value) {
    const unsigned bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u,
                   magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return __ushort_as_half(0x7fff);
    if (magnitude >= 0x477ff000u)
        return __ushort_as_half((unsigned short)(sign | 0x7c00u)); /* 65520 and above */
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 lets the FPU round at 2^-24 */
        const unsigned rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
        return __ushort_as_half((unsigned short)(sign | rounded));
    }
    const unsigned rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return __ushort_as_half((unsigned short)(sign | (rounded >> 13)));
}

inline __half __float2half(float value) {
    return __float2half_rn(value);
}

inline __half2 __floats2half2_rn(float x, float y) {
    return { __float2half_rn(x), __float2half_rn(y) };
}

inline float2 __half22float2(__half2 value) {
    return { __half2float(value.x), __half2float(value.y) };
}

inline __half::__half(float value) : bits(__float2half_rn(value).bits) {}

inline __half::operator float() const {
    return __half2float(*this);
}

#endif
