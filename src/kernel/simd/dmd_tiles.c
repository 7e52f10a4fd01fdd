/* Tiles of losses over samples: kernel/simd/dmd_tiles.inc for the levels with intrinsics. Products that are added have no rounding
 * error, so one rounding for both is the bits of two. */

#include "kernel/cpu/dmd_loss.h"
#include "kernel/simd/dmd.h"
#include "kernel/simd/simd.h"

#if defined(XDI_X86)
#    include <immintrin.h>

/* Bytes between what tiles read and what they ask for; elements whose terms are kept before they are added, so few that the
 * next ones are read meanwhile. */
enum { XDI_SAMPLE_AHEAD = 3072, XDI_SAMPLE_PART = 2 * XD_SAMPLE_LANES };

/* gcc 12 warns about the undefined operand of its own intrinsics. */
#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* ---- AVX2 ---- */

#    define XDI_SAMPLE(name) xdi_avx2_tile_##name
#    define XDI_SAMPLE_LOOP static XDI_TARGET_256
#    define XDI_SAMPLE_INLINE XDI_SIMD_INLINE_256

typedef xdi_f8 xdi_avx2_tile_floats;
typedef xdi_u8 xdi_avx2_tile_words;

typedef struct xdi_avx2_tile_wide {
    __m256d low, high;
} xdi_avx2_tile_wide;

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_of(__m256d low, __m256d high) {
    xdi_avx2_tile_wide x;
    x.low = low;
    x.high = high;
    return x;
}

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_set(double x) {
    return xdi_avx2_tile_of(_mm256_set1_pd(x), _mm256_set1_pd(x));
}

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_widen(xdi_f8 x) {
    return xdi_avx2_tile_of(_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)),
                            _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)));
}

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_widen_at(const float *x) {
    return xdi_avx2_tile_of(_mm256_cvtps_pd(_mm_loadu_ps(x)), _mm256_cvtps_pd(_mm_loadu_ps(x + 4)));
}

XDI_SAMPLE_INLINE xdi_f8 xdi_avx2_tile_narrow(xdi_avx2_tile_wide x) {
    return (xdi_f8)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(x.low)),
                                        _mm256_cvtpd_ps(x.high), 1);
}

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_add(xdi_avx2_tile_wide x, xdi_avx2_tile_wide y) {
    return xdi_avx2_tile_of(_mm256_add_pd(x.low, y.low), _mm256_add_pd(x.high, y.high));
}

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_mul(xdi_avx2_tile_wide x, xdi_avx2_tile_wide y) {
    return xdi_avx2_tile_of(_mm256_mul_pd(x.low, y.low), _mm256_mul_pd(x.high, y.high));
}

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_add_product(xdi_avx2_tile_wide x, xdi_avx2_tile_wide y,
                                                               xdi_avx2_tile_wide sum) {
    return xdi_avx2_tile_of(_mm256_fmadd_pd(x.low, y.low, sum.low),
                            _mm256_fmadd_pd(x.high, y.high, sum.high));
}

XDI_SAMPLE_INLINE void xdi_avx2_tile_put(xdi_avx2_tile_wide x, double *out) {
    _mm256_storeu_pd(out, x.low);
    _mm256_storeu_pd(out + 4, x.high);
}

XDI_SAMPLE_INLINE xdi_avx2_tile_wide xdi_avx2_tile_get(const double *x) {
    return xdi_avx2_tile_of(_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4));
}

/* The sums of neighbours among sixteen. */
XDI_SAMPLE_INLINE void xdi_avx2_tile_join(const double *in, double *out) {
    const __m256d a = _mm256_hadd_pd(_mm256_loadu_pd(in), _mm256_loadu_pd(in + 4));
    const __m256d b = _mm256_hadd_pd(_mm256_loadu_pd(in + 8), _mm256_loadu_pd(in + 12));
    _mm256_storeu_pd(out, _mm256_permute4x64_pd(a, 0xd8));
    _mm256_storeu_pd(out + 4, _mm256_permute4x64_pd(b, 0xd8));
}

XDI_SAMPLE_INLINE void xdi_avx2_tile_stream(void *out, xdi_u8 x) {
    _mm256_stream_si256((__m256i *)out, (__m256i)x);
}

/* In place of each bits >> 16, bf16 in the upper half: as xd_bits_to_bf16. */
XDI_SAMPLE_INLINE xdi_u8 xdi_avx2_tile_rounded(xdi_f8 x) {
    const xdi_u8 bits = (xdi_u8)x, nan = (xdi_u8)(x != x);
    const xdi_u8 nearest = bits + (((bits >> 16) & 1u) + 0x7fffu);
    return (nearest & ~nan) | ((bits | 0x400000u) & nan);
}

/* Whether either half of a word is 8 or less. */
XDI_SAMPLE_INLINE bool xdi_avx2_tile_has_small(xdi_u8 x) {
    const __m256i least = _mm256_min_epu16((__m256i)x, _mm256_set1_epi16(8));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi16(least, (__m256i)x)) != 0;
}

#    include "kernel/simd/dmd_tiles.inc"
#    undef XDI_SAMPLE
#    undef XDI_SAMPLE_LOOP
#    undef XDI_SAMPLE_INLINE

/* ---- AVX-512 ---- */

#    define XDI_SAMPLE(name) xdi_avx512_tile_##name
#    define XDI_SAMPLE_LOOP static XDI_TARGET_512
#    define XDI_SAMPLE_INLINE XDI_SIMD_INLINE_512

typedef float __attribute__((vector_size(64))) xdi_avx512_tile_floats;
typedef uint32_t __attribute__((vector_size(64))) xdi_avx512_tile_words;

typedef struct xdi_avx512_tile_wide {
    __m512d low, high;
} xdi_avx512_tile_wide;

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_of(__m512d low, __m512d high) {
    xdi_avx512_tile_wide x;
    x.low = low;
    x.high = high;
    return x;
}

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_set(double x) {
    return xdi_avx512_tile_of(_mm512_set1_pd(x), _mm512_set1_pd(x));
}

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_widen(xdi_avx512_tile_floats x) {
    return xdi_avx512_tile_of(_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)),
                              _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)));
}

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_widen_at(const float *x) {
    return xdi_avx512_tile_of(_mm512_cvtps_pd(_mm256_loadu_ps(x)), _mm512_cvtps_pd(_mm256_loadu_ps(x + 8)));
}

XDI_SAMPLE_INLINE xdi_avx512_tile_floats xdi_avx512_tile_narrow(xdi_avx512_tile_wide x) {
    return (xdi_avx512_tile_floats)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(x.low)),
                                                      _mm512_cvtpd_ps(x.high), 1);
}

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_add(xdi_avx512_tile_wide x, xdi_avx512_tile_wide y) {
    return xdi_avx512_tile_of(_mm512_add_pd(x.low, y.low), _mm512_add_pd(x.high, y.high));
}

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_mul(xdi_avx512_tile_wide x, xdi_avx512_tile_wide y) {
    return xdi_avx512_tile_of(_mm512_mul_pd(x.low, y.low), _mm512_mul_pd(x.high, y.high));
}

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_add_product(xdi_avx512_tile_wide x,
                                                                   xdi_avx512_tile_wide y,
                                                                   xdi_avx512_tile_wide sum) {
    return xdi_avx512_tile_of(_mm512_fmadd_pd(x.low, y.low, sum.low),
                              _mm512_fmadd_pd(x.high, y.high, sum.high));
}

XDI_SAMPLE_INLINE void xdi_avx512_tile_put(xdi_avx512_tile_wide x, double *out) {
    _mm512_storeu_pd(out, x.low);
    _mm512_storeu_pd(out + 8, x.high);
}

XDI_SAMPLE_INLINE xdi_avx512_tile_wide xdi_avx512_tile_get(const double *x) {
    return xdi_avx512_tile_of(_mm512_loadu_pd(x), _mm512_loadu_pd(x + 8));
}

XDI_SAMPLE_INLINE void xdi_avx512_tile_join(const double *in, double *out) {
    const __m512d a = _mm512_loadu_pd(in), b = _mm512_loadu_pd(in + 8);
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    _mm512_storeu_pd(out,
                     _mm512_add_pd(_mm512_permutex2var_pd(a, even, b), _mm512_permutex2var_pd(a, odd, b)));
}

XDI_SAMPLE_INLINE void xdi_avx512_tile_stream(void *out, xdi_avx512_tile_words x) {
    _mm512_stream_si512((__m512i *)out, (__m512i)x);
}

XDI_SAMPLE_INLINE xdi_avx512_tile_words xdi_avx512_tile_rounded(xdi_avx512_tile_floats x) {
    const __m512i bits = (__m512i)x;
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    return (xdi_avx512_tile_words)_mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
}

XDI_SAMPLE_INLINE bool xdi_avx512_tile_has_small(xdi_avx512_tile_words x) {
    return _mm512_cmple_epu16_mask((__m512i)x, _mm512_set1_epi16(8)) != 0;
}

#    include "kernel/simd/dmd_tiles.inc"
#    undef XDI_SAMPLE
#    undef XDI_SAMPLE_LOOP
#    undef XDI_SAMPLE_INLINE

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif
#endif

XD_PRIVATE const xdi_sample_tiles *xdi_sample_tiles_level(xd_cpu_level level) {
#if defined(XDI_X86)
    if (level == XD_CPU_AVX2) return &xdi_avx2_tile_tiles;
    if (level == XD_CPU_AVX512 || level == XD_CPU_AVX512_BF16) return &xdi_avx512_tile_tiles;
#endif
    (void)level;
    return NULL;
}
