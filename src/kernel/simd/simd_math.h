#ifndef XDI_KERNEL_SIMD_SIMD_MATH_H
#define XDI_KERNEL_SIMD_SIMD_MATH_H

#include "kernel/simd/tiles.h"

/* Powers and logarithms of base 2, ends of arrays and sums of lanes for every vector width v, written once
 * as a macro that defines v_... functions with the attributes INLINE. */

#define XDI_SIMD_MATH(v, INLINE)                                                                            \
    /* Element i of n and the ones behind it; past the end `fill`. */                                       \
    INLINE v v##_read(xdi_simd_array x, int64_t i, int64_t n, float fill) {                                 \
        xdi_simd_array lanes;                                                                               \
        float part[v##_lanes];                                                                              \
        if (i + v##_lanes <= n) return v##_load(x, i);                                                      \
        lanes.data = part;                                                                                  \
        lanes.bf16 = false;                                                                                 \
        xdi_simd_part(x, i, n, v##_lanes, fill, part);                                                      \
        return v##_load(lanes, 0);                                                                          \
    }                                                                                                       \
    INLINE void v##_write(xdi_simd_array x, int64_t i, int64_t n, v value) {                                \
        xdi_simd_array lanes;                                                                               \
        float part[v##_lanes];                                                                              \
        if (i + v##_lanes <= n) {                                                                           \
            v##_store(x, i, value);                                                                         \
            return;                                                                                         \
        }                                                                                                   \
        lanes.data = part;                                                                                  \
        lanes.bf16 = false;                                                                                 \
        v##_store(lanes, 0, value);                                                                         \
        xdi_simd_store_part(x, i, n, part);                                                                 \
    }                                                                                                       \
    /* Twice as many: one half after the other or, by parity, the even and the odd elements of bf16. */     \
    INLINE void v##_read_two(xdi_simd_array x, int64_t i, bool parity, v *a, v *b) {                        \
        if (parity) {                                                                                       \
            v##_load_two(x, i, a, b);                                                                       \
            return;                                                                                         \
        }                                                                                                   \
        *a = v##_load(x, i);                                                                                \
        *b = v##_load(x, i + v##_lanes);                                                                    \
    }                                                                                                       \
    INLINE void v##_write_two(xdi_simd_array x, int64_t i, bool parity, v a, v b) {                         \
        if (parity) {                                                                                       \
            v##_store_two(x, i, a, b);                                                                      \
            return;                                                                                         \
        }                                                                                                   \
        v##_store(x, i, a);                                                                                 \
        v##_store(x, i + v##_lanes, b);                                                                     \
    }                                                                                                       \
    /* The same past the caches, to bf16 (parity) or f32. */                                                \
    INLINE void v##_send_two(xdi_simd_array x, int64_t i, bool parity, v a, v b) {                          \
        if (parity) {                                                                                       \
            v##_stream_two(x, i, a, b);                                                                     \
            return;                                                                                         \
        }                                                                                                   \
        v##_stream(x, i, a);                                                                                \
        v##_stream(x, i + v##_lanes, b);                                                                    \
    }                                                                                                       \
    /* A number of 1.5 2^23 plus an integer holds the sum with a small number rounded to an integer. */     \
    INLINE v v##_exp2_parts(v x, const xdi_tile_power *power, float scale, v *whole) {                      \
        const v factor = v##_set(power->factor * (float)v##_steps);                                         \
        const v magic = v##_set(12582912.0f - power->whole * (float)v##_steps);                             \
        const v clamped = v##_max(v##_set(power->low), x);                                                  \
        const v t = v##_fma(clamped, factor, magic);                                                        \
        const v f = v##_exact_sub(clamped, factor, v##_sub(t, magic));                                      \
        *whole = v##_power(t);                                                                              \
        return v##_fraction(f, scale);                                                                      \
    }                                                                                                       \
    INLINE v v##_scaled_exp2(v x, const xdi_tile_power *power, float scale) {                               \
        v whole;                                                                                            \
        const v fraction = v##_exp2_parts(x, power, scale, &whole);                                         \
        return v##_mul(fraction, whole);                                                                    \
    }                                                                                                       \
    INLINE v v##_exp2(v x, const xdi_tile_power *power) {                                                   \
        return v##_scaled_exp2(x, power, 1.0f);                                                             \
    }                                                                                                       \
    /* sum + power */                                                                                       \
    INLINE v v##_add_exp2(v x, const xdi_tile_power *power, v sum) {                                        \
        v whole;                                                                                            \
        const v fraction = v##_exp2_parts(x, power, 1.0f, &whole);                                          \
        return v##_fma(fraction, whole, sum);                                                               \
    }                                                                                                       \
    /* log2 of the power. */                                                                                \
    INLINE v v##_exponent(v x, const xdi_tile_power *power) {                                               \
        return v##_exact_sub(x, v##_set(power->factor), v##_set(power->whole));                             \
    }                                                                                                       \
    /* log2 x = result * rest + exponent, for positive normal numbers, absolute error below 1e-7 near 1. */ \
    INLINE v v##_log2_parts(v x, v *rest, v *exponent) {                                                    \
        v mantissa;                                                                                         \
        *exponent = v##_split(x, &mantissa);                                                                \
        const v f = v##_sub(mantissa, v##_set(1.0f));                                                       \
        const v f2 = v##_mul(f, f), f4 = v##_mul(f2, f2);                                                   \
        const v low = v##_fma(f, v##_set(-7.213471532e-01f), v##_set(1.442694902e+00f));                    \
        const v second = v##_fma(f, v##_set(-3.607201576e-01f), v##_set(4.809206426e-01f));                 \
        const v third = v##_fma(f, v##_set(-2.385506332e-01f), v##_set(2.876938581e-01f));                  \
        const v fourth = v##_fma(f, v##_set(-2.100603729e-01f), v##_set(2.171332985e-01f));                 \
        const v high = v##_fma(f2, v##_fma(f2, v##_set(1.256961972e-01f), fourth), third);                  \
        *rest = f;                                                                                          \
        return v##_fma(f4, high, v##_fma(f2, second, low));                                                 \
    }                                                                                                       \
    INLINE v v##_log2(v x) {                                                                                \
        v f, exponent;                                                                                      \
        const v p = v##_log2_parts(x, &f, &exponent);                                                       \
        return v##_fma(p, f, exponent);                                                                     \
    }                                                                                                       \
    INLINE float v##_largest(v x) {                                                                         \
        xdi_simd_array lanes;                                                                               \
        float part[v##_lanes], max;                                                                         \
        lanes.data = part;                                                                                  \
        lanes.bf16 = false;                                                                                 \
        v##_store(lanes, 0, x);                                                                             \
        max = part[0];                                                                                      \
        for (int i = 1; i < v##_lanes; i++) max = part[i] > max ? part[i] : max;                            \
        return max;                                                                                         \
    }

XDI_SIMD_MATH(xdi_v4, XDI_SIMD_INLINE)

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

XDI_SIMD_MATH(xdi_v8, XDI_SIMD_INLINE_256)
XDI_SIMD_MATH(xdi_v16, XDI_SIMD_INLINE_512)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

#endif
