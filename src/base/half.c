/* bf16 and f16, by integer arithmetic. */

#include "base/half.h"

#include <string.h>

static uint32_t xdi_half_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float xdi_half_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

XD_API uint16_t xd_bf16_from_f32(float value) {
    const uint32_t bits = xdi_half_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x0040u); /* NaN: keep it one, quiet */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

XD_API float xd_f32_from_bf16(uint16_t bits) {
    return xdi_half_float((uint32_t)bits << 16);
}

XD_API uint16_t xd_f16_from_f32(float value) {
    const uint32_t bits = xdi_half_bits(value);
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
    /* A normal number's kept part carries the hidden bit, which adds one to the biased exponent. */
    const uint32_t base = exponent < -14 ? 0u : (uint32_t)(exponent + 14) << 10;
    return (uint16_t)(sign | (base + rounded));
}

XD_API float xd_f32_from_f16(uint16_t bits) {
    const uint32_t sign = ((uint32_t)bits & 0x8000u) << 16;
    const uint32_t exponent = ((uint32_t)bits >> 10) & 0x1fu;
    const uint32_t mantissa = (uint32_t)bits & 0x3ffu;
    if (exponent == 31u)
        return xdi_half_float(sign | 0x7f800000u | (mantissa ? 0x400000u | (mantissa << 13) : 0u));
    if (exponent) return xdi_half_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24: exact */
    return sign ? -magnitude : magnitude;
}

XD_API double xd_load_f64(const void *data, xd_dtype dtype, int64_t index) {
    switch (dtype) {
    case XD_DTYPE_F32: return (double)((const float *)data)[index];
    case XD_DTYPE_F64: return ((const double *)data)[index];
    case XD_DTYPE_BF16: return (double)xd_f32_from_bf16(((const uint16_t *)data)[index]);
    case XD_DTYPE_F16: return (double)xd_f32_from_f16(((const uint16_t *)data)[index]);
    case XD_DTYPE_I32: return (double)((const int32_t *)data)[index];
    case XD_DTYPE_I64: return (double)((const int64_t *)data)[index];
    case XD_DTYPE_U8:
    case XD_DTYPE_BOOL: return (double)((const uint8_t *)data)[index];
    default: return 0.0;
    }
}

XD_API void xd_store_f64(void *data, xd_dtype dtype, int64_t index, double value) {
    switch (dtype) {
    case XD_DTYPE_F32: ((float *)data)[index] = (float)value; break;
    case XD_DTYPE_F64: ((double *)data)[index] = value; break;
    case XD_DTYPE_BF16: ((uint16_t *)data)[index] = xd_bf16_from_f32((float)value); break;
    case XD_DTYPE_F16: ((uint16_t *)data)[index] = xd_f16_from_f32((float)value); break;
    case XD_DTYPE_I32: ((int32_t *)data)[index] = (int32_t)value; break;
    case XD_DTYPE_I64: ((int64_t *)data)[index] = (int64_t)value; break;
    case XD_DTYPE_U8: ((uint8_t *)data)[index] = (uint8_t)value; break;
    case XD_DTYPE_BOOL: ((uint8_t *)data)[index] = (uint8_t)(value != 0.0); break;
    default: break;
    }
}
