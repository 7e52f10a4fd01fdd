/* The loops on eight lanes: AVX2 and FMA. */

#include "kernel/simd/loops.h"

#if defined(XDI_X86)

#    include <immintrin.h>

#    if !defined(__clang__) /* gcc 12 warns about the undefined operand of its own intrinsics */
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* ---- vectors ---- */

static const uint32_t xdi_v8_table[8] = { 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                          0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7 };

typedef __m256 xdi_v8;
typedef __m256i xdi_v8_bits;
enum { xdi_v8_lanes = 8, xdi_v8_steps = 8, xdi_v8_terms = 4 };

XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_set(float x) {
    return _mm256_set1_ps(x);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_add(xdi_v8 a, xdi_v8 b) {
    return _mm256_add_ps(a, b);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_sub(xdi_v8 a, xdi_v8 b) {
    return _mm256_sub_ps(a, b);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_mul(xdi_v8 a, xdi_v8 b) {
    return _mm256_mul_ps(a, b);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_div(xdi_v8 a, xdi_v8 b) {
    return _mm256_div_ps(a, b);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_fma(xdi_v8 a, xdi_v8 b, xdi_v8 c) {
    return _mm256_fmadd_ps(a, b, c);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_mul_sub(xdi_v8 a, xdi_v8 b, xdi_v8 c) {
    return _mm256_fmsub_ps(a, b, c);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_exact_sub(xdi_v8 a, xdi_v8 b, xdi_v8 c) {
    return _mm256_fmsub_ps(a, b, c);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_remainder(xdi_v8 a, xdi_v8 b, xdi_v8 n) {
    return xdi_v8_exact_sub(a, b, n);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_pick(xdi_v8 a, xdi_v8 b, xdi_v8 x, xdi_v8 y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_max(xdi_v8 a, xdi_v8 b) {
    return _mm256_max_ps(a, b);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_min(xdi_v8 a, xdi_v8 b) {
    return _mm256_min_ps(a, b);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_power(xdi_v8 t) {
    const __m256i n = _mm256_castps_si256(t);
    const __m256i table = _mm256_loadu_si256((const __m256i *)(const void *)xdi_v8_table);
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_slli_epi32(n, 20), _mm256_permutevar8x32_epi32(table, n)));
}
XDI_SIMD_INLINE_256 void xdi_v8_polynomial(float scale, xdi_v8 *terms) {
    terms[0] = xdi_v8_set(scale * 1.083962925e-04f);
    terms[1] = xdi_v8_set(scale * 3.754126141e-03f);
    terms[2] = xdi_v8_set(scale * 8.664339781e-02f);
    terms[3] = xdi_v8_set(scale);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_fraction(xdi_v8 f, const xdi_v8 *terms) {
    xdi_v8 p = xdi_v8_fma(terms[0], f, terms[1]);
    p = xdi_v8_fma(p, f, terms[2]);
    return xdi_v8_fma(p, f, terms[3]);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_split(xdi_v8 v, xdi_v8 *mantissa) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i exponent =
        _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(XDI_SIMD_SQRT_HALF_BITS)), 23);
    *mantissa = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(exponent, 23)));
    return _mm256_cvtepi32_ps(exponent);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_load(xdi_simd_array x, int64_t i) {
    if (!x.bf16) return _mm256_loadu_ps((const float *)x.data + i);
    const __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)x.data + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
XDI_SIMD_INLINE_256 void xdi_v8_load_two(xdi_simd_array x, int64_t i, xdi_v8 *even, xdi_v8 *odd) {
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)((const uint16_t *)x.data + i));
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int32_t)0xffff0000)));
}
XDI_SIMD_INLINE_256 xdi_v8_bits xdi_v8_no_top(void) {
    return _mm256_set1_epi32(XDI_SIMD_NO_TOP);
}
XDI_SIMD_INLINE_256 xdi_v8_bits xdi_v8_top(xdi_v8_bits tops, xdi_v8 v) {
    return _mm256_max_epi32(tops, _mm256_castps_si256(v));
}
XDI_SIMD_INLINE_256 xdi_v8_bits xdi_v8_top_two(xdi_v8_bits tops, xdi_simd_array x, int64_t i) {
    const uint16_t *at = (const uint16_t *)x.data + i;
    return _mm256_max_epi16(tops, _mm256_loadu_si256((const __m256i *)(const void *)at));
}
XDI_SIMD_INLINE_256 int32_t xdi_v8_top_bits(xdi_v8_bits tops, bool two) {
    const __m256i odd = two ? _mm256_and_si256(tops, _mm256_set1_epi32((int32_t)0xffff0000)) : tops;
    const __m256i both = two ? _mm256_max_epi32(odd, _mm256_slli_epi32(tops, 16)) : odd;
    int32_t lanes[8], top;
    _mm256_storeu_si256((__m256i *)(void *)lanes, both);
    top = lanes[0];
    for (int i = 1; i < 8; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
}
XDI_SIMD_INLINE_256 double xdi_v8_total(xdi_v8 v) {
    const __m256d four = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
                                       _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
/* The upper half of the result is the number rounded to bf16. */
XDI_SIMD_INLINE_256 __m256i xdi_v8_rounded(xdi_v8 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
XDI_SIMD_INLINE_256 __m256i xdi_v8_paired(xdi_v8 even, xdi_v8 odd) {
    const __m256i low = _mm256_srli_epi32(xdi_v8_rounded(even), 16);
    return _mm256_blend_epi16(low, xdi_v8_rounded(odd), 0xaa);
}
XDI_SIMD_INLINE_256 void xdi_v8_store_two(xdi_simd_array x, int64_t i, xdi_v8 even, xdi_v8 odd) {
    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)x.data + i), xdi_v8_paired(even, odd));
}
XDI_SIMD_INLINE_256 void xdi_v8_stream_two(xdi_simd_array x, int64_t i, xdi_v8 even, xdi_v8 odd) {
    _mm256_stream_si256((__m256i *)(void *)((uint16_t *)x.data + i), xdi_v8_paired(even, odd));
}
XDI_SIMD_INLINE_256 void xdi_v8_stream(xdi_simd_array x, int64_t i, xdi_v8 v) {
    _mm256_stream_ps((float *)x.data + i, v);
}
XDI_SIMD_INLINE_256 void xdi_v8_fence(void) {
    _mm_sfence();
}
XDI_SIMD_INLINE_256 void xdi_v8_store(xdi_simd_array x, int64_t i, xdi_v8 v) {
    if (!x.bf16) {
        _mm256_storeu_ps((float *)x.data + i, v);
        return;
    }
    const __m256i high = _mm256_srli_epi32(xdi_v8_rounded(v), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)(void *)((uint16_t *)x.data + i), _mm256_castsi256_si128(packed));
}

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

/* ---- selections ---- */

/* The order of four lanes that puts those selected by a mask first. */
static const int32_t xdi_v8_front[16][4] = { { 0, 1, 2, 3 }, { 0, 1, 2, 3 }, { 1, 0, 2, 3 }, { 0, 1, 2, 3 },
                                             { 2, 0, 1, 3 }, { 0, 2, 1, 3 }, { 1, 2, 0, 3 }, { 0, 1, 2, 3 },
                                             { 3, 0, 1, 2 }, { 0, 3, 1, 2 }, { 1, 3, 0, 2 }, { 0, 1, 3, 2 },
                                             { 2, 3, 0, 1 }, { 0, 2, 3, 1 }, { 1, 2, 3, 0 }, { 0, 1, 2, 3 } };

/* Keys from the bits of numbers, and the other way round. */
XDI_SIMD_INLINE_256 __m256i xdi_v8_key(__m256i bits) {
    const __m256i below = _mm256_srai_epi32(bits, 31);
    return _mm256_xor_si256(bits, _mm256_andnot_si256(below, _mm256_set1_epi32(0x7fffffff)));
}

/* Moves the selected lanes of each half to its front; the halves are written one after the other. */
XDI_SIMD_INLINE_256 void xdi_v8_collect_halves(__m256i x, __m256i order, int64_t low, uint32_t *to) {
    const __m256i moved = _mm256_castps_si256(_mm256_permutevar_ps(_mm256_castsi256_ps(x), order));
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(moved));
    _mm_storeu_si128((__m128i *)(void *)(to + low), _mm256_extracti128_si256(moved, 1));
}

XDI_SIMD_256 int64_t xdi_v8_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                         uint32_t *keys, int64_t room) {
    const xdi_v8 limit = xdi_v8_set(threshold), zero = xdi_v8_set(0.0f);
    __m256i at = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    int64_t count = 0, i = 0;
    for (; i + 8 <= n && count + 8 <= room; i += 8) {
        const xdi_v8 a = xdi_v8_load(x, i);
        const int mask = _mm256_movemask_ps(_mm256_cmp_ps(a, limit, _CMP_GE_OQ)), low = mask & 15;
        const __m128i front = _mm_loadu_si128((const __m128i *)(const void *)xdi_v8_front[low]);
        const __m128i back = _mm_loadu_si128((const __m128i *)(const void *)xdi_v8_front[mask >> 4]);
        const __m256i order = _mm256_inserti128_si256(_mm256_castsi128_si256(front), back, 1);
        const int64_t kept = __builtin_popcount((unsigned)low);
        xdi_v8_collect_halves(at, order, kept, indices + count);
        xdi_v8_collect_halves(xdi_v8_key(_mm256_castps_si256(_mm256_add_ps(a, zero))), order, kept,
                              keys + count);
        count += __builtin_popcount((unsigned)mask);
        at = _mm256_add_epi32(at, _mm256_set1_epi32(8));
    }
    return xdi_tile_collect_rest(x, i, n, threshold, indices, keys, count, room);
}

XDI_SIMD_256 void xdi_v8_tile_range(const uint32_t *keys, int64_t n, uint32_t *first, uint32_t *last) {
    uint32_t lows[8], highs[8];
    __m256i low = _mm256_set1_epi32((int)keys[0]), high = low;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i key = _mm256_loadu_si256((const __m256i *)(const void *)(keys + i));
        low = _mm256_min_epu32(low, key);
        high = _mm256_max_epu32(high, key);
    }
    _mm256_storeu_si256((__m256i *)(void *)lows, low);
    _mm256_storeu_si256((__m256i *)(void *)highs, high);
    *first = lows[0];
    *last = highs[0];
    for (int j = 1; j < 8; j++) {
        *first = lows[j] < *first ? lows[j] : *first;
        *last = highs[j] > *last ? highs[j] : *last;
    }
    for (; i < n; i++) {
        *first = keys[i] < *first ? keys[i] : *first;
        *last = keys[i] > *last ? keys[i] : *last;
    }
}

/* Prefix sum: steps of 1 and 2 lanes give the sums within each half; the total of the lower half is added to the upper one. */
XDI_SIMD_256 void xdi_v8_tile_offsets(uint32_t *bins, int64_t n) {
    const __m256i top = _mm256_set1_epi32(7), half = _mm256_set1_epi32(3);
    __m256i before = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i count = _mm256_loadu_si256((const __m256i *)(const void *)(bins + i));
        __m256i sum = _mm256_add_epi32(count, _mm256_slli_si256(count, 4));
        sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 8));
        const __m256i lower = _mm256_permutevar8x32_epi32(sum, half);
        sum = _mm256_add_epi32(sum, _mm256_blend_epi32(_mm256_setzero_si256(), lower, 0xf0));
        _mm256_storeu_si256((__m256i *)(void *)(bins + i),
                            _mm256_add_epi32(before, _mm256_sub_epi32(sum, count)));
        before = _mm256_add_epi32(before, _mm256_permutevar8x32_epi32(sum, top));
    }
}

XDI_SIMD_256 bool xdi_v8_tile_unpack(const uint64_t *records, int64_t n, int64_t first, double *values,
                                     int64_t *ids) {
    const __m256i low = _mm256_set1_epi64x(0xffffffff), begin = _mm256_set1_epi64x(first);
    const __m256i upper = _mm256_set_epi32(7, 5, 3, 1, 7, 5, 3, 1);
    __m256d zeros = _mm256_setzero_pd();
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
        const __m256i record = _mm256_loadu_si256((const __m256i *)(const void *)(records + j));
        const __m256i bits = xdi_v8_key(_mm256_permutevar8x32_epi32(record, upper));
        const __m256d value = _mm256_cvtps_pd(_mm_castsi128_ps(_mm256_castsi256_si128(bits)));
        zeros = _mm256_or_pd(zeros, _mm256_cmp_pd(value, _mm256_setzero_pd(), _CMP_EQ_OQ));
        _mm256_storeu_pd(values + j, value);
        _mm256_storeu_si256((__m256i *)(void *)(ids + j),
                            _mm256_add_epi64(_mm256_and_si256(record, low), begin));
    }
    const bool rest = xdi_tile_unpack_rest(records + j, n - j, first, values + j, ids + j);
    return _mm256_movemask_pd(zeros) != 0 || rest;
}

#    ifndef XDISTILL_NO_ACROSS

/* ---- losses across tokenizers ---- */

/* Elements 0 to 3 of two lines, side by side. */
XDI_SIMD_INLINE_256 __m256 xdi_v8_two_quarters(const float *low, const float *high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

XDI_SIMD_INLINE_256 void xdi_v8_transpose_half(const float *from, int64_t stride, float *to,
                                               int64_t to_stride) {
    const __m256 a = xdi_v8_two_quarters(from, from + 4 * stride),
                 b = xdi_v8_two_quarters(from + stride, from + 5 * stride),
                 c = xdi_v8_two_quarters(from + 2 * stride, from + 6 * stride),
                 d = xdi_v8_two_quarters(from + 3 * stride, from + 7 * stride);
    const __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    const __m256 more_ab = _mm256_unpackhi_ps(a, b), more_cd = _mm256_unpackhi_ps(c, d);
    _mm256_storeu_ps(to, _mm256_shuffle_ps(ab, cd, 0x44));
    _mm256_storeu_ps(to + to_stride, _mm256_shuffle_ps(ab, cd, 0xee));
    _mm256_storeu_ps(to + 2 * to_stride, _mm256_shuffle_ps(more_ab, more_cd, 0x44));
    _mm256_storeu_ps(to + 3 * to_stride, _mm256_shuffle_ps(more_ab, more_cd, 0xee));
}

/* Transposes eight lines of eight. */
XDI_SIMD_INLINE_256 void xdi_v8_transpose(const float *from, int64_t from_stride, float *to,
                                          int64_t to_stride) {
    xdi_v8_transpose_half(from, from_stride, to, to_stride);
    xdi_v8_transpose_half(from + 4, from_stride, to + 4 * to_stride, to_stride);
}

XD_PRIVATE XDI_TARGET_256 void xdi_v8_to_tables(const float *lanes, int64_t n, float *tables) {
    for (int64_t i = 0; i < n; i += 8)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += 8)
            xdi_v8_transpose(lanes + lane * XDI_XTOKEN_STRIDE + i, XDI_XTOKEN_STRIDE,
                             tables + i * XDI_XTOKEN_LANES + lane, XDI_XTOKEN_LANES);
}

XD_PRIVATE XDI_TARGET_256 void xdi_v8_to_lanes(const float *tables, int64_t n, float *lanes) {
    for (int64_t i = 0; i < n; i += 8)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += 8)
            xdi_v8_transpose(tables + i * XDI_XTOKEN_LANES + lane, XDI_XTOKEN_LANES,
                             lanes + lane * XDI_XTOKEN_STRIDE + i, XDI_XTOKEN_STRIDE);
}

/* The maximum instruction returns its second operand where the first is NaN. */
XDI_SIMD_256 double xdi_v8_xtoken_top(const double *x, int64_t n, bool magnitude) {
    const __m256d kept = _mm256_castsi256_pd(_mm256_set1_epi64x(magnitude ? INT64_MAX : -1));
    __m256d tops[2] = { _mm256_set1_pd(-INFINITY), _mm256_set1_pd(-INFINITY) };
    double lanes[4];
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        tops[0] = _mm256_max_pd(_mm256_and_pd(_mm256_loadu_pd(x + i), kept), tops[0]);
        tops[1] = _mm256_max_pd(_mm256_and_pd(_mm256_loadu_pd(x + i + 4), kept), tops[1]);
    }
    _mm256_storeu_pd(lanes, _mm256_max_pd(tops[0], tops[1]));
    const double top = xdi_xtoken_top_rest(lanes, 4, false),
                 rest = xdi_xtoken_top_rest(x + i, n - i, magnitude);
    return rest > top ? rest : top;
}

#    endif

/* Stores of f32, to a multiple of 32 bytes, bypass the caches; for the halves of bf16 this gains nothing. */
XDI_SIMD_INLINE_256 void xdi_v8_store_past(xdi_simd_array x, int64_t i, xdi_v8 value) {
    if (x.bf16)
        xdi_v8_store(x, i, value);
    else
        xdi_v8_stream(x, i, value);
}

enum { xdi_u8_lanes = 8 };
XDI_SIMD_INLINE_256 xdi_v8 xdi_u8_power(xdi_v8 t) {
    return xdi_v8_power(t);
}
XDI_SIMD_INLINE_256 xdi_v8 xdi_u8_less(xdi_v8 a, xdi_v8 b, xdi_v8 product, xdi_v8 n) {
    (void)product;
    return _mm256_fmsub_ps(a, b, n);
}

#    define xdi_v xdi_v8
#    define XDI_V(name) xdi_u8_##name
#    define XDI_F(name) xdi_v8_##name
#    define XDI_INLINE XDI_SIMD_INLINE_256
#    define XDI_OUTER XDI_SIMD_256
#    include "kernel/simd/invariant.inc"
#    undef XDI_V
#    undef XDI_F
#    undef XDI_INLINE
#    undef XDI_OUTER

#    define XDI_V(name) xdi_v8_##name
#    define XDI_INVARIANT xdi_u8_tile_gradient
#    define xdi_w xdi_w4
#    define XDI_W(name) xdi_w4_##name
#    define XDI_INLINE XDI_SIMD_INLINE_256
#    define XDI_LEAF XDI_SIMD_256
#    include "kernel/simd/loops.inc"
#    undef xdi_v
#    undef XDI_V
#    undef XDI_INVARIANT
#    undef xdi_w
#    undef XDI_W
#    undef XDI_INLINE
#    undef XDI_LEAF

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

XD_PRIVATE const xdi_loops *xdi_loops_avx2(void) {
    return &xdi_v8_loops;
}

#endif
