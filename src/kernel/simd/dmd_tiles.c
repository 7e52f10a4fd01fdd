/* Tiles of losses over samples: kernel/simd/dmd_tiles.inc for the levels with intrinsics. Products that are added have no rounding
 * error, so one rounding for both is the bits of two. */

#include "kernel/cpu/dmd_loss.h"
#include "kernel/simd/internal.h"
#include "kernel/simd/simd.h"

#if defined(XDI_X86)
#    include <immintrin.h>

/* Bytes between what tiles read and what they ask for. */
enum { XDI_SAMPLE_AHEAD = 3072 };

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

/* In place of each bits >> 16, bf16 in the upper half: as xd_bits_to_bf16. */
XDI_SAMPLE_INLINE xdi_u8 xdi_avx2_tile_rounded(xdi_f8 x) {
    const xdi_u8 bits = (xdi_u8)x, nan = (xdi_u8)(x != x);
    const xdi_u8 nearest = bits + (((bits >> 16) & 1u) + 0x7fffu);
    return (nearest & ~nan) | ((bits | 0x400000u) & nan);
}

XDI_SAMPLE_INLINE xdi_u8 xdi_avx2_tile_paired(const xdi_f8 x[2]) {
    return (xdi_avx2_tile_rounded(x[0]) >> 16) | (xdi_avx2_tile_rounded(x[1]) & 0xffff0000u);
}

#    include "kernel/simd/dmd_tiles.inc"
#    undef XDI_SAMPLE
#    undef XDI_SAMPLE_LOOP
#    undef XDI_SAMPLE_INLINE

/* ---- AVX-512 ---- */

#    define XDI_SAMPLE(name) xdi_avx512_tile_##name
#    define XDI_SAMPLE_LOOP static XDI_TARGET_512
#    define XDI_SAMPLE_INLINE XDI_SIMD_INLINE_512

typedef __m512d xdi_avx512_tile_wide;

XDI_SAMPLE_INLINE __m512d xdi_avx512_tile_set(double x) {
    return _mm512_set1_pd(x);
}

XDI_SAMPLE_INLINE __m512d xdi_avx512_tile_widen(xdi_f8 x) {
    return _mm512_cvtps_pd((__m256)x);
}

XDI_SAMPLE_INLINE xdi_f8 xdi_avx512_tile_narrow(__m512d x) {
    return (xdi_f8)_mm512_cvtpd_ps(x);
}

XDI_SAMPLE_INLINE __m512d xdi_avx512_tile_add(__m512d x, __m512d y) {
    return _mm512_add_pd(x, y);
}

XDI_SAMPLE_INLINE __m512d xdi_avx512_tile_mul(__m512d x, __m512d y) {
    return _mm512_mul_pd(x, y);
}

XDI_SAMPLE_INLINE __m512d xdi_avx512_tile_add_product(__m512d x, __m512d y, __m512d sum) {
    return _mm512_fmadd_pd(x, y, sum);
}

XDI_SAMPLE_INLINE void xdi_avx512_tile_put(__m512d x, double *out) {
    _mm512_storeu_pd(out, x);
}

XDI_SAMPLE_INLINE __m512d xdi_avx512_tile_get(const double *x) {
    return _mm512_loadu_pd(x);
}

XDI_SAMPLE_INLINE void xdi_avx512_tile_join(const double *in, double *out) {
    const __m512d a = _mm512_loadu_pd(in), b = _mm512_loadu_pd(in + 8);
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    _mm512_storeu_pd(out,
                     _mm512_add_pd(_mm512_permutex2var_pd(a, even, b), _mm512_permutex2var_pd(a, odd, b)));
}

/* All sixteen at once: as xd_bits_to_bf16. */
XDI_SAMPLE_INLINE xdi_u8 xdi_avx512_tile_paired(const xdi_f8 x[2]) {
    const __m512 both = _mm512_insertf32x8(_mm512_castps256_ps512((__m256)x[0]), (__m256)x[1], 1);
    const __m512i bits = _mm512_castps_si512(both);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(both, both, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i even = _mm256_srli_epi32(_mm512_castsi512_si256(rounded), 16);
    return (xdi_u8)_mm256_blend_epi16(even, _mm512_extracti64x4_epi64(rounded, 1), 0xaa);
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
