/* Emulation of the bf16 type: storage, and conversions by round to nearest even with a quiet NaN. */
#ifndef EMU_CUDA_BF16_H
#define EMU_CUDA_BF16_H

#include <cstdint>
#include <cstring>
#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value);
    operator float() const;
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
    return value.bits;
}

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 value;
    value.bits = bits;
    return value;
}

inline float __bfloat162float(__nv_bfloat16 value) {
    return __uint_as_float((unsigned)value.bits << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return __ushort_as_bfloat16(0x7fff);
    return __ushort_as_bfloat16((unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
}

inline __nv_bfloat16 __float2bfloat16(float value) {
    return __float2bfloat16_rn(value);
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return { __float2bfloat16_rn(x), __float2bfloat16_rn(y) };
}

inline float2 __bfloat1622float2(__nv_bfloat162 value) {
    return { __bfloat162float(value.x), __bfloat162float(value.y) };
}

inline __nv_bfloat16::__nv_bfloat16(float value) : bits(__float2bfloat16_rn(value).bits) {}

inline __nv_bfloat16::operator float() const {
    return __bfloat162float(*this);
}

#endif
