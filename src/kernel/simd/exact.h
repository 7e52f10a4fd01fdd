#ifndef XDI_KERNEL_SIMD_EXACT_H
#define XDI_KERNEL_SIMD_EXACT_H

#include "kernel/cpu/exact.h"
#include "kernel/simd/simd.h"

/* The sums of INVARIANT mode on vectors of double: xdi_w2, xdi_w4 and xdi_w8. */

/* Vectors take terms below 2^11: those of a tile move the high limb of a sum by less than 2^52. */
#define XDI_EXACT_LARGE_BITS UINT64_C(0x40a0000000000000)

/* Sums of one kind of term over a part of a row. `add` is for any term, `add_positive` for powers, which saves
 * the floor: it may share the same value differently among the limbs. */
#define XDI_EXACT_SUMS(d, INLINE)                                                                    \
    typedef struct d##_sum {                                                                         \
        d##_words high, low, large;                                                                  \
    } d##_sum;                                                                                       \
    INLINE d##_sum d##_no_sum(void) {                                                                \
        const d##_words zero = { 0 };                                                                \
        d##_sum sum;                                                                                 \
        sum.high = zero;                                                                             \
        sum.low = zero;                                                                              \
        sum.large = zero;                                                                            \
        return sum;                                                                                  \
    }                                                                                                \
    INLINE void d##_add(d##_sum *sum, d term) {                                                      \
        const d scaled = term * 1073741824.0, high = d##_floor(scaled), rest = scaled - high;        \
        sum->high += (d##_words)(high + XDI_EXACT_MAGIC);                                            \
        sum->low += (d##_words)d##_scaled(rest, 1099511627776.0, d##_set(XDI_EXACT_MAGIC));          \
        sum->large |= ((d##_words)term & ~XDI_EXACT_SIGN) + (XDI_EXACT_SIGN - XDI_EXACT_LARGE_BITS); \
    }                                                                                                \
    INLINE void d##_add_positive(d##_sum *sum, d term) {                                             \
        const d high = d##_scaled(term, 1073741824.0, d##_set(XDI_EXACT_MAGIC));                     \
        const d rest = d##_scaled(term, 1073741824.0, XDI_EXACT_MAGIC - high);                       \
        sum->high += (d##_words)high;                                                                \
        sum->low += (d##_words)d##_scaled(rest, 1099511627776.0, d##_set(XDI_EXACT_MAGIC));          \
    }                                                                                                \
    /* What `count` terms came to; false when one was large, infinite or NaN. */                     \
    INLINE bool d##_sum_of(const d##_sum *sum, int64_t count, xd_fixed *total) {                     \
        const uint64_t magic = (uint64_t)count * XDI_EXACT_MAGIC_BITS;                               \
        uint64_t high = 0, low = 0, large = 0;                                                       \
        for (int i = 0; i < d##_lanes; i++) {                                                        \
            high += sum->high[i];                                                                    \
            low += sum->low[i];                                                                      \
            large |= sum->large[i];                                                                  \
        }                                                                                            \
        total->high = (int64_t)(high - magic);                                                       \
        total->low = (int64_t)(low - magic);                                                         \
        return large < XDI_EXACT_SIGN;                                                               \
    }

XDI_EXACT_VECTORS(xdi_w2, 16, XDI_SIMD_INLINE)
XDI_EXACT_ANY(xdi_w2, XDI_SIMD_INLINE)
XDI_EXACT_MATH(xdi_w2, XDI_SIMD_INLINE)
XDI_EXACT_SUMS(xdi_w2, XDI_SIMD_INLINE)

XDI_SIMD_INLINE void xdi_w2_widen(xdi_v4 v, xdi_w2 *a, xdi_w2 *b) {
    const xdi_w2 low = { (double)v[0], (double)v[1] }, high = { (double)v[2], (double)v[3] };
    *a = low;
    *b = high;
}
XDI_SIMD_INLINE xdi_v4 xdi_w2_narrow(xdi_w2 a, xdi_w2 b) {
    const xdi_v4 v = { (float)a[0], (float)a[1], (float)b[0], (float)b[1] };
    return v;
}

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

XDI_EXACT_VECTORS(xdi_w4, 32, XDI_SIMD_INLINE_256)

XDI_SIMD_INLINE_256 xdi_w4 xdi_w4_larger(xdi_w4 x, xdi_w4 y) {
    return (xdi_w4)_mm256_max_pd((__m256d)x, (__m256d)y);
}
XDI_SIMD_INLINE_256 xdi_w4 xdi_w4_floor(xdi_w4 x) {
    return (xdi_w4)_mm256_floor_pd((__m256d)x);
}
XDI_SIMD_INLINE_256 xdi_w4 xdi_w4_scaled(xdi_w4 x, double power, xdi_w4 y) {
    return (xdi_w4)_mm256_fmadd_pd((__m256d)x, _mm256_set1_pd(power), (__m256d)y);
}
XDI_SIMD_INLINE_256 void xdi_w4_widen(xdi_v8 v, xdi_w4 *a, xdi_w4 *b) {
    *a = (xdi_w4)_mm256_cvtps_pd(_mm256_castps256_ps128(v));
    *b = (xdi_w4)_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_w4_narrow(xdi_w4 a, xdi_w4 b) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps((__m256d)a)),
                                _mm256_cvtpd_ps((__m256d)b), 1);
}

XDI_EXACT_MATH(xdi_w4, XDI_SIMD_INLINE_256)
XDI_EXACT_SUMS(xdi_w4, XDI_SIMD_INLINE_256)

XDI_EXACT_VECTORS(xdi_w8, 64, XDI_SIMD_INLINE_512)

XDI_SIMD_INLINE_512 xdi_w8 xdi_w8_larger(xdi_w8 x, xdi_w8 y) {
    return (xdi_w8)_mm512_max_pd((__m512d)x, (__m512d)y);
}
XDI_SIMD_INLINE_512 xdi_w8 xdi_w8_floor(xdi_w8 x) {
    return (xdi_w8)_mm512_floor_pd((__m512d)x);
}
XDI_SIMD_INLINE_512 xdi_w8 xdi_w8_scaled(xdi_w8 x, double power, xdi_w8 y) {
    return (xdi_w8)_mm512_fmadd_pd((__m512d)x, _mm512_set1_pd(power), (__m512d)y);
}
XDI_SIMD_INLINE_512 void xdi_w8_widen(xdi_v16 v, xdi_w8 *a, xdi_w8 *b) {
    *a = (xdi_w8)_mm512_cvtps_pd(_mm512_castps512_ps256(v));
    *b = (xdi_w8)_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_w8_narrow(xdi_w8 a, xdi_w8 b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)a)),
                              _mm512_cvtpd_ps((__m512d)b), 1);
}

XDI_EXACT_MATH(xdi_w8, XDI_SIMD_INLINE_512)
XDI_EXACT_SUMS(xdi_w8, XDI_SIMD_INLINE_512)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

#endif
