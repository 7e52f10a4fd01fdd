/* The loops on sixteen lanes: AVX-512. */

#include "kernel/simd/loops.h"

#if defined(XDI_X86)

#    include <immintrin.h>

#    if !defined(__clang__) /* gcc 12 warns about the undefined operand of its own intrinsics */
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* ---- vectors ---- */

static const uint32_t xdi_v16_table[32] = {
    0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
    0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
    0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
    0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3
};

/* Orders of halves: the lower 16 to the upper halves of 16 lanes, and the upper halves of all lanes next to each other. */
static const uint16_t xdi_v16_widen[32] = { 0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                            8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15 };
static const uint16_t xdi_v16_narrow[32] = { 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                             1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 };

typedef __m512 xdi_v16;
typedef __m512i xdi_v16_bits;
enum { xdi_v16_lanes = 16, xdi_v16_steps = 32, xdi_v16_terms = 3 };

XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_set(float x) {
    return _mm512_set1_ps(x);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_add(xdi_v16 a, xdi_v16 b) {
    return _mm512_add_ps(a, b);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_sub(xdi_v16 a, xdi_v16 b) {
    return _mm512_sub_ps(a, b);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_mul(xdi_v16 a, xdi_v16 b) {
    return _mm512_mul_ps(a, b);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_div(xdi_v16 a, xdi_v16 b) {
    return _mm512_div_ps(a, b);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_fma(xdi_v16 a, xdi_v16 b, xdi_v16 c) {
    return _mm512_fmadd_ps(a, b, c);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_mul_sub(xdi_v16 a, xdi_v16 b, xdi_v16 c) {
    return _mm512_fmsub_ps(a, b, c);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_exact_sub(xdi_v16 a, xdi_v16 b, xdi_v16 c) {
    return _mm512_fmsub_ps(a, b, c);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_remainder(xdi_v16 a, xdi_v16 b, xdi_v16 n) {
    return xdi_v16_exact_sub(a, b, n);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_pick(xdi_v16 a, xdi_v16 b, xdi_v16 x, xdi_v16 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), y, x);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_max(xdi_v16 a, xdi_v16 b) {
    return _mm512_max_ps(a, b);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_min(xdi_v16 a, xdi_v16 b) {
    return _mm512_min_ps(a, b);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_power(xdi_v16 t) {
    const __m512i n = _mm512_castps_si512(t);
    const __m512i low = _mm512_loadu_si512((const void *)xdi_v16_table);
    const __m512i high = _mm512_loadu_si512((const void *)(xdi_v16_table + 16));
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(n, 18), _mm512_permutex2var_epi32(low, n, high)));
}
XDI_SIMD_INLINE_512 void xdi_v16_polynomial(float scale, xdi_v16 *terms) {
    terms[0] = xdi_v16_set(scale * 2.345944813e-04f);
    terms[1] = xdi_v16_set(scale * 2.166116610e-02f);
    terms[2] = xdi_v16_set(scale);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_fraction(xdi_v16 f, const xdi_v16 *terms) {
    xdi_v16 p = xdi_v16_fma(terms[0], f, terms[1]);
    return xdi_v16_fma(p, f, terms[2]);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_split(xdi_v16 v, xdi_v16 *mantissa) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i exponent =
        _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(XDI_SIMD_SQRT_HALF_BITS)), 23);
    *mantissa = _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(exponent, 23)));
    return _mm512_cvtepi32_ps(exponent);
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_load(xdi_simd_array x, int64_t i) {
    if (!x.bf16) return _mm512_loadu_ps((const float *)x.data + i);
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)((const uint16_t *)x.data + i));
    const __m512i order = _mm512_loadu_si512((const void *)xdi_v16_widen);
    return _mm512_castsi512_ps(
        _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, order, _mm512_castsi256_si512(bits)));
}
XDI_SIMD_INLINE_512 void xdi_v16_load_two(xdi_simd_array x, int64_t i, xdi_v16 *even, xdi_v16 *odd) {
    const __m512i bits = _mm512_loadu_si512((const void *)((const uint16_t *)x.data + i));
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int32_t)0xffff0000)));
}
XDI_SIMD_INLINE_512 xdi_v16_bits xdi_v16_no_top(void) {
    return _mm512_set1_epi32(XDI_SIMD_NO_TOP);
}
XDI_SIMD_INLINE_512 xdi_v16_bits xdi_v16_top(xdi_v16_bits tops, xdi_v16 v) {
    return _mm512_max_epi32(tops, _mm512_castps_si512(v));
}
XDI_SIMD_INLINE_512 xdi_v16_bits xdi_v16_top_two(xdi_v16_bits tops, xdi_simd_array x, int64_t i) {
    return _mm512_max_epi16(tops, _mm512_loadu_si512((const void *)((const uint16_t *)x.data + i)));
}
XDI_SIMD_INLINE_512 int32_t xdi_v16_top_bits(xdi_v16_bits tops, bool two) {
    const __m512i odd = two ? _mm512_and_si512(tops, _mm512_set1_epi32((int32_t)0xffff0000)) : tops;
    return _mm512_reduce_max_epi32(two ? _mm512_max_epi32(odd, _mm512_slli_epi32(tops, 16)) : odd);
}
XDI_SIMD_INLINE_512 double xdi_v16_total(xdi_v16 v) {
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)),
                                              _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))));
}
/* The upper half of the result is the number rounded to bf16. */
XDI_SIMD_INLINE_512 __m512i xdi_v16_rounded(xdi_v16 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
/* The upper halves of both vectors, each rounded by its lower half: up where that is above one half of the last bit, or is one
 * half and the last bit is odd. */
XDI_SIMD_INLINE_512 __m512i xdi_v16_paired(xdi_v16 even, xdi_v16 odd) {
    const __m512i a = _mm512_castps_si512(even), b = _mm512_castps_si512(odd);
    const __m512i one = _mm512_set1_epi16(1);
    const __m512i high = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b);
    const __m512i low = _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
    const __m512i sticky = _mm512_ternarylogic_epi32(low, high, one, 0xf8); /* low | (high & one) */
    return _mm512_mask_add_epi16(high, _mm512_cmpgt_epu16_mask(sticky, _mm512_set1_epi16((int16_t)0x8000)),
                                 high, one);
}
XDI_SIMD_INLINE_512 void xdi_v16_store_two(xdi_simd_array x, int64_t i, xdi_v16 even, xdi_v16 odd) {
    _mm512_storeu_si512((void *)((uint16_t *)x.data + i), xdi_v16_paired(even, odd));
}
XDI_SIMD_INLINE_512 void xdi_v16_stream_two(xdi_simd_array x, int64_t i, xdi_v16 even, xdi_v16 odd) {
    _mm512_stream_si512((__m512i *)(void *)((uint16_t *)x.data + i), xdi_v16_paired(even, odd));
}
XDI_SIMD_INLINE_512 void xdi_v16_stream(xdi_simd_array x, int64_t i, xdi_v16 v) {
    _mm512_stream_ps((float *)x.data + i, v);
}
XDI_SIMD_INLINE_512 void xdi_v16_fence(void) {
    _mm_sfence();
}
XDI_SIMD_INLINE_512 void xdi_v16_store(xdi_simd_array x, int64_t i, xdi_v16 v) {
    if (!x.bf16) {
        _mm512_storeu_ps((float *)x.data + i, v);
        return;
    }
    const __m512i order = _mm512_loadu_si512((const void *)xdi_v16_narrow);
    const __m512i high = _mm512_permutexvar_epi16(order, xdi_v16_rounded(v));
    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)x.data + i), _mm512_castsi512_si256(high));
}

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

/* ---- selections ---- */

/* Keys from the bits of numbers, and the other way round. */
XDI_SIMD_INLINE_512 __m512i xdi_v16_key(__m512i bits) {
    const __m512i below = _mm512_srai_epi32(bits, 31);
    return _mm512_xor_si512(bits, _mm512_andnot_si512(below, _mm512_set1_epi32(0x7fffffff)));
}

/* Vectors of 16: the selected indices and keys move to the front of the vector, and the whole vector is stored. */
XDI_SIMD_512 int64_t xdi_v16_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                          uint32_t *keys, int64_t room) {
    const xdi_v16 limit = xdi_v16_set(threshold), zero = xdi_v16_set(0.0f);
    __m512i at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int64_t count = 0, i = 0;
    for (; i + 16 <= n && count + 16 <= room; i += 16) {
        const xdi_v16 a = xdi_v16_load(x, i);
        const __mmask16 mask = _mm512_cmp_ps_mask(a, limit, _CMP_GE_OQ);
        const __m512i key = xdi_v16_key(_mm512_castps_si512(_mm512_add_ps(a, zero)));
        _mm512_storeu_si512((void *)(indices + count), _mm512_maskz_compress_epi32(mask, at));
        _mm512_storeu_si512((void *)(keys + count), _mm512_maskz_compress_epi32(mask, key));
        count += __builtin_popcount((unsigned)mask);
        at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
    return xdi_tile_collect_rest(x, i, n, threshold, indices, keys, count, room);
}

XDI_SIMD_512 void xdi_v16_tile_range(const uint32_t *keys, int64_t n, uint32_t *first, uint32_t *last) {
    __m512i low = _mm512_set1_epi32((int)keys[0]), high = low;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i key = _mm512_loadu_si512((const void *)(keys + i));
        low = _mm512_min_epu32(low, key);
        high = _mm512_max_epu32(high, key);
    }
    *first = _mm512_reduce_min_epu32(low);
    *last = _mm512_reduce_max_epu32(high);
    for (; i < n; i++) {
        *first = keys[i] < *first ? keys[i] : *first;
        *last = keys[i] > *last ? keys[i] : *last;
    }
}

/* Prefix sum in steps of 1, 2, 4 and 8 lanes. */
XDI_SIMD_512 void xdi_v16_tile_offsets(uint32_t *bins, int64_t n) {
    const __m512i zero = _mm512_setzero_si512(), top = _mm512_set1_epi32(15);
    __m512i before = zero;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i count = _mm512_loadu_si512((const void *)(bins + i));
        __m512i sum = _mm512_add_epi32(count, _mm512_alignr_epi32(count, zero, 15));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
        _mm512_storeu_si512((void *)(bins + i), _mm512_add_epi32(before, _mm512_sub_epi32(sum, count)));
        before = _mm512_add_epi32(before, _mm512_permutexvar_epi32(top, sum));
    }
}

XDI_SIMD_512 bool xdi_v16_tile_unpack(const uint64_t *records, int64_t n, int64_t first, double *values,
                                      int64_t *ids) {
    const __m512i low = _mm512_set1_epi64(0xffffffff), begin = _mm512_set1_epi64(first);
    const int64_t head = (int64_t)(-(uintptr_t)values % XDI_SIMD_LINE / sizeof *values); /* to a line */
    __mmask8 zeros = 0;
    int64_t j = head < n ? head : n;
    const bool begin_zero = xdi_tile_unpack_rest(records, j, first, values, ids);
    for (; j + 8 <= n; j += 8) {
        const __m512i record = _mm512_loadu_si512((const void *)(records + j));
        const __m512i bits = xdi_v16_key(_mm512_srli_epi64(record, 32));
        const __m512d value = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_cvtepi64_epi32(bits)));
        zeros |= _mm512_cmp_pd_mask(value, _mm512_setzero_pd(), _CMP_EQ_OQ);
        _mm512_storeu_pd(values + j, value);
        _mm512_storeu_si512((void *)(ids + j), _mm512_add_epi64(_mm512_and_si512(record, low), begin));
    }
    const bool rest = xdi_tile_unpack_rest(records + j, n - j, first, values + j, ids + j);
    return zeros != 0 || begin_zero || rest;
}

#    ifndef XDISTILL_NO_ACROSS

/* ---- losses across tokenizers ---- */

/* Eight at a time is fast enough for both widths. */
XDI_SIMD_512 void xdi_v16_to_tables(const float *lanes, int64_t n, float *tables) {
    xdi_v8_to_tables(lanes, n, tables);
}

XDI_SIMD_512 void xdi_v16_to_lanes(const float *tables, int64_t n, float *lanes) {
    xdi_v8_to_lanes(tables, n, lanes);
}

XDI_SIMD_512 double xdi_v16_xtoken_top(const double *x, int64_t n, bool magnitude) {
    const __m512d kept = _mm512_castsi512_pd(_mm512_set1_epi64(magnitude ? INT64_MAX : -1));
    __m512d tops[2] = { _mm512_set1_pd(-INFINITY), _mm512_set1_pd(-INFINITY) };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        tops[0] = _mm512_max_pd(_mm512_and_pd(_mm512_loadu_pd(x + i), kept), tops[0]);
        tops[1] = _mm512_max_pd(_mm512_and_pd(_mm512_loadu_pd(x + i + 8), kept), tops[1]);
    }
    const double top = _mm512_reduce_max_pd(_mm512_max_pd(tops[0], tops[1]));
    const double rest = xdi_xtoken_top_rest(x + i, n - i, magnitude);
    return rest > top ? rest : top;
}

#    endif

/* To a multiple of 64 bytes. */
XDI_SIMD_INLINE_512 void xdi_v16_store_past(xdi_simd_array x, int64_t i, xdi_v16 value) {
    const __m512i order = _mm512_loadu_si512((const void *)xdi_v16_narrow);
    if (x.bf16)
        _mm256_stream_si256((__m256i *)(void *)((uint16_t *)x.data + i),
                            _mm512_castsi512_si256(_mm512_permutexvar_epi16(order, xdi_v16_rounded(value))));
    else
        xdi_v16_stream(x, i, value);
}

static const uint32_t xdi_u16_table[16] = { 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                            0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7,
                                            0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                            0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7 };
enum { xdi_u16_lanes = 16 };
XDI_SIMD_INLINE_512 xdi_v16 xdi_u16_power(xdi_v16 t) {
    const __m512i n = _mm512_castps_si512(t), table = _mm512_loadu_si512((const void *)xdi_u16_table);
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(n, 20), _mm512_permutexvar_epi32(n, table)));
}
XDI_SIMD_INLINE_512 xdi_v16 xdi_u16_less(xdi_v16 a, xdi_v16 b, xdi_v16 product, xdi_v16 n) {
    (void)product;
    return _mm512_fmsub_ps(a, b, n);
}

#    define xdi_v xdi_v16
#    define XDI_V(name) xdi_u16_##name
#    define XDI_F(name) xdi_v16_##name
#    define XDI_INLINE XDI_SIMD_INLINE_512
#    define XDI_OUTER XDI_SIMD_512
#    include "kernel/simd/invariant.inc"
#    undef XDI_V
#    undef XDI_F
#    undef XDI_INLINE
#    undef XDI_OUTER

#    define XDI_V(name) xdi_v16_##name
#    define XDI_INVARIANT xdi_u16_tile_gradient
#    define xdi_w xdi_w8
#    define XDI_W(name) xdi_w8_##name
#    define XDI_INLINE XDI_SIMD_INLINE_512
#    define XDI_LEAF XDI_SIMD_512
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

XD_PRIVATE const xdi_loops *xdi_loops_avx512(void) {
    return &xdi_v16_loops;
}

#endif
