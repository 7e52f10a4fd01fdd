/* Spans of sixteen lanes. The last few elements are computed the same way under a mask; whole vectors use none, because some
 * processors do not prefetch for a masked load: a quarter of the speed where memory is the limit. */

#include "kernel/simd/internal.h"

#if defined(XDI_X86)
#    include <float.h>
#    include <immintrin.h>

/* gcc 12 warns about the undefined operand of its own intrinsics. */
#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

#    define XDI_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

/* The first `left` of 16 lanes: 0 where none is left. */
XDI_AVX512 static inline __mmask16 xdi_avx512_lanes(int64_t left) {
    return left > 0 ? (__mmask16)(((uint32_t)1 << left) - 1u) : (__mmask16)0;
}

/* Sixteen elements, zeros for those past `left`. */
XDI_AVX512 static inline __m512 xdi_avx512_get(const float *x, int64_t left) {
    return left >= 16 ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(xdi_avx512_lanes(left), x);
}

XDI_AVX512 static inline __m256i xdi_avx512_get_half(const uint16_t *x, int64_t left) {
    return left >= 16 ? _mm256_loadu_si256((const __m256i *)x)
                      : _mm256_maskz_loadu_epi16(xdi_avx512_lanes(left), x);
}

/* The first `left` of sixteen elements at most. */
XDI_AVX512 static inline void xdi_avx512_put(float *to, int64_t left, __m512 x) {
    if (left >= 16)
        _mm512_storeu_ps(to, x);
    else
        _mm512_mask_storeu_ps(to, xdi_avx512_lanes(left), x);
}

XDI_AVX512 static inline void xdi_avx512_put_half(uint16_t *to, int64_t left, __m256i x) {
    if (left >= 16)
        _mm256_storeu_si256((__m256i *)to, x);
    else
        _mm256_mask_storeu_epi16(to, xdi_avx512_lanes(left), x);
}

/* A product that no compiler joins with a sum: see xd_mulf. The rounding is named, instead of the empty assembly of the
 * other widths: some compilers take no operand of 512 bits where only a function's attribute allows it. */
XDI_AVX512 static inline __m512 xdi_avx512_mul(__m512 x, __m512 y) {
    return _mm512_mul_round_ps(x, y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

XDI_AVX512 static inline __m512 xdi_avx512_abs(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}

XDI_AVX512 static inline __m512 xdi_avx512_from_half(__m256i half, xd_dtype dtype) {
    if (dtype == XD_DTYPE_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* To nearest even in integers, in the upper halves of the lanes: the instruction for it flushes subnormals. */
XDI_AVX512 static inline __m512i xdi_avx512_bf16_bits(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(_mm512_add_epi32(bits, bias), nan, bits, _mm512_set1_epi32(0x400000));
}

XDI_AVX512 static inline __m256i xdi_avx512_to_bf16(__m512 x) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(xdi_avx512_bf16_bits(x), 16));
}

XDI_AVX512 static void xdi_avx512_widen(const uint16_t *from, xd_dtype dtype, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __m256i half = xdi_avx512_get_half(from + i, n - i);
        xdi_avx512_put(to + i, n - i, xdi_avx512_from_half(half, dtype));
    }
}

XDI_AVX512 static void xdi_avx512_narrow(const float *from, uint16_t *to, xd_dtype dtype, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 x = xdi_avx512_get(from + i, n - i);
        const __m256i half = dtype == XD_DTYPE_F16
                                 ? _mm512_maskz_cvtps_ph((__mmask16)0xffffu, x, _MM_FROUND_TO_NEAREST_INT)
                                 : xdi_avx512_to_bf16(x);
        xdi_avx512_put_half(to + i, n - i, half);
    }
}

XDI_AVX512 static inline __m512 xdi_avx512_gradient(const xd_update_args *args, __m512 g) {
    if (args->gradient_scale) g = xdi_avx512_mul(g, _mm512_set1_ps(*args->gradient_scale));
    return args->maximize ? _mm512_xor_ps(g, _mm512_set1_ps(-0.0f)) : g;
}

XDI_AVX512 static void xdi_avx512_adam(const xd_update_args *args, const xd_update_array *a,
                                       const float *gradient, int64_t at, int64_t n) {
    const __m512 rise1 = _mm512_set1_ps(args->one_minus_beta1), rise2 = _mm512_set1_ps(args->one_minus_beta2);
    const __m512 beta2 = _mm512_set1_ps(args->beta2), eps = _mm512_set1_ps(args->eps);
    const __m512 step = _mm512_set1_ps(-a->step_size), correction = _mm512_set1_ps(a->root_correction);
    const __m512 decay = _mm512_set1_ps(a->decay), coupled = _mm512_set1_ps(a->weight_decay);
    float *master = a->master + at, *first = a->first + at, *second = a->second + at;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 p = xdi_avx512_get(master + i, n - i);
        __m512 m = xdi_avx512_get(first + i, n - i), v = xdi_avx512_get(second + i, n - i);
        __m512 g = xdi_avx512_gradient(args, xdi_avx512_get(gradient + i, n - i));
        if (args->couple_decay) g = _mm512_fmadd_ps(coupled, p, g);
        const __m512 kept = args->couple_decay ? p : _mm512_mul_ps(p, decay);
        m = _mm512_fmadd_ps(rise1, _mm512_sub_ps(g, m), m);
        v = _mm512_fmadd_ps(rise2, _mm512_mul_ps(g, g), _mm512_mul_ps(beta2, v));
        const __m512 denominator = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), correction), eps);
        xdi_avx512_put(master + i, n - i, _mm512_fmadd_ps(step, _mm512_div_ps(m, denominator), kept));
        xdi_avx512_put(first + i, n - i, m);
        xdi_avx512_put(second + i, n - i, v);
    }
}

XDI_AVX512 static void xdi_avx512_sgd(const xd_update_args *args, const xd_update_array *a,
                                      const float *gradient, int64_t at, int64_t n) {
    const __m512 decay = _mm512_set1_ps(a->weight_decay), momentum = _mm512_set1_ps(args->momentum);
    const __m512 step = _mm512_set1_ps(-a->step_size);
    float *master = a->master + at, *first = a->first + at;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 p = xdi_avx512_get(master + i, n - i);
        __m512 buffer = xdi_avx512_gradient(args, xdi_avx512_get(gradient + i, n - i));
        buffer = _mm512_fmadd_ps(decay, p, buffer);
        if (!a->fresh) buffer = _mm512_fmadd_ps(momentum, xdi_avx512_get(first + i, n - i), buffer);
        xdi_avx512_put(first + i, n - i, buffer);
        xdi_avx512_put(master + i, n - i, _mm512_fmadd_ps(step, buffer, p));
    }
}

/* The new average of target t and source x; see lerp in cpu/optimizer.c. */
XDI_AVX512 static inline __m512 xdi_avx512_moved(const xdi_span_average *average, __m512 t, __m512 x) {
    const bool from_target = average->weight > -0.5f && average->weight < 0.5f;
    const __m512 weight = _mm512_set1_ps(average->weight), keep = _mm512_set1_ps(average->keep);
    const __m512 factor = _mm512_set1_ps(from_target ? average->weight : average->weight - 1.0f);
    if (average->weighted_sum) return _mm512_fmadd_ps(weight, x, _mm512_mul_ps(keep, t));
    return _mm512_fmadd_ps(factor, _mm512_sub_ps(x, t), from_target ? t : x);
}

XDI_AVX512 static void xdi_avx512_lerp(const xdi_span_average *average, float *target, const float *source,
                                       int64_t n) {
    const xdi_span_average a = *average; /* stores cannot change a copy */
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 t = xdi_avx512_get(target + i, n - i);
        const __m512 x = xdi_avx512_get(source + i, n - i);
        xdi_avx512_put(target + i, n - i, xdi_avx512_moved(&a, t, x));
    }
}

/* The same from bf16, without a widened copy in between. */
XDI_AVX512 static void xdi_avx512_lerp_bf16(const xdi_span_average *average, float *target,
                                            const uint16_t *source, int64_t n) {
    const xdi_span_average a = *average;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 t = xdi_avx512_get(target + i, n - i);
        const __m512 x = xdi_avx512_from_half(xdi_avx512_get_half(source + i, n - i), XD_DTYPE_BF16);
        xdi_avx512_put(target + i, n - i, xdi_avx512_moved(&a, t, x));
    }
}

/* xd_lerp_compensated. */
XDI_AVX512 static void xdi_avx512_compensated(float weight, const float *source, float *target,
                                              uint16_t *compensation, int64_t n) {
    const bool far = weight >= 0.5f || weight <= -0.5f;
    const __m512 factor = _mm512_set1_ps(far ? weight - 1.0f : weight);
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 t = xdi_avx512_get(target + i, n - i), x = xdi_avx512_get(source + i, n - i);
        const __m256i term = xdi_avx512_get_half(compensation + i, n - i);
        const __m512 kept = xdi_avx512_from_half(term, XD_DTYPE_BF16);
        const __m512 difference = _mm512_sub_ps(_mm512_sub_ps(x, t), kept), base = far ? x : t;
        const __m512 step =
            far ? xdi_avx512_mul(factor, difference) : _mm512_fmadd_ps(factor, difference, kept);
        const __m512 sum = _mm512_add_ps(base, step), moved = _mm512_sub_ps(sum, base);
        const __m512 lost =
            _mm512_add_ps(_mm512_sub_ps(base, _mm512_sub_ps(sum, moved)), _mm512_sub_ps(step, moved));
        const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(lost), exponent);
        const __mmask16 finite = _mm512_cmplt_epu32_mask(magnitude, exponent);
        xdi_avx512_put(target + i, n - i, sum);
        xdi_avx512_put_half(compensation + i, n - i,
                            _mm256_maskz_mov_epi16(finite, xdi_avx512_to_bf16(lost)));
    }
}

XDI_AVX512 static void xdi_avx512_scale(float *x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        xdi_avx512_put(x + i, n - i, _mm512_mul_ps(xdi_avx512_get(x + i, n - i), _mm512_set1_ps(factor)));
    }
}

XDI_AVX512 static void xdi_avx512_add(float *sum, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        xdi_avx512_put(sum + i, n - i,
                       _mm512_add_ps(xdi_avx512_get(sum + i, n - i), xdi_avx512_get(x + i, n - i)));
    }
}

/* Sixteen elements from `i` on, zeros past the end. */
XDI_AVX512 static inline __m512 xdi_avx512_load(const void *data, xd_dtype dtype, int64_t i, int64_t n) {
    if (dtype == XD_DTYPE_F32) return xdi_avx512_get((const float *)data + i, n - i);
    return xdi_avx512_from_half(xdi_avx512_get_half((const uint16_t *)data + i, n - i), dtype);
}

XDI_AVX512 static double xdi_avx512_sum(__m512d x) {
    double lanes[8];
    _mm512_storeu_pd(lanes, x);
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* Magnitudes of f32 order like their bits, infinity and NaN above all. */
XDI_AVX512 static double xdi_avx512_largest(const void *data, xd_dtype dtype, int64_t n) {
    __m512i largest = _mm512_setzero_si512();
    uint32_t lanes[16], top = 0;
    for (int64_t i = 0; i < n; i += 16)
        largest = _mm512_max_epu32(largest,
                                   _mm512_castps_si512(xdi_avx512_abs(xdi_avx512_load(data, dtype, i, n))));
    _mm512_storeu_si512(lanes, largest);
    for (int k = 0; k < 16; k++) top = lanes[k] > top ? lanes[k] : top;
    float value;
    memcpy(&value, &top, sizeof value);
    return (double)value;
}

/* 32 halves, zeros for those past `left`. */
XDI_AVX512 static inline __m512i xdi_avx512_get_pairs(const uint16_t *x, int64_t left) {
    const __mmask32 lanes = left > 0 && left < 32 ? (__mmask32)((1u << left) - 1u) : 0;
    return left >= 32 ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(lanes, x);
}

/* The sum of f32 lanes in double. */
XDI_AVX512 static double xdi_avx512_total(__m512 x) {
    return xdi_avx512_sum(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)),
                                        _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))));
}

/* Squares of bf16 are exact in f32, so f32 lanes add up to eight of them and lose at most 2^-21 of the sum. They overflow or
 * vanish where double would not: the sum shows this, and the result is then -1. */
XDI_AVX512 static double xdi_avx512_squares_bf16(const uint16_t *x, int64_t n) {
    const __m512i top = _mm512_set1_epi32((int32_t)0xffff0000);
    __m512 even = _mm512_setzero_ps(), odd = even, even2 = even, odd2 = even;
    for (int64_t i = 0; i < n; i += 64) {
        const __m512i pair = xdi_avx512_get_pairs(x + i, n - i);
        const __m512i pair2 = xdi_avx512_get_pairs(x + i + 32, n - i - 32);
        const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
        const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pair, top));
        const __m512 low2 = _mm512_castsi512_ps(_mm512_slli_epi32(pair2, 16));
        const __m512 high2 = _mm512_castsi512_ps(_mm512_and_si512(pair2, top));
        even = _mm512_fmadd_ps(low, low, even);
        odd = _mm512_fmadd_ps(high, high, odd);
        even2 = _mm512_fmadd_ps(low2, low2, even2);
        odd2 = _mm512_fmadd_ps(high2, high2, odd2);
    }
    const double sum = xdi_avx512_total(_mm512_add_ps(_mm512_add_ps(even, odd), _mm512_add_ps(even2, odd2)));
    return sum > XDI_SPAN_LEAST_SQUARES && sum <= DBL_MAX ? sum : -1.0;
}

/* Squares or magnitudes in double. `dtype` and `square` are compile-time constants where speed matters. */
XDI_AVX512 static inline __attribute__((always_inline)) double
xdi_avx512_powers(const void *data, xd_dtype dtype, bool square, int64_t n) {
    __m512d low = _mm512_setzero_pd(), high = low, low2 = low, high2 = low;
    for (int64_t i = 0; i < n; i += 32) {
        const __m512 x = xdi_avx512_abs(xdi_avx512_load(data, dtype, i, n));
        const __m512 y = xdi_avx512_abs(xdi_avx512_load(data, dtype, i + 16, n));
        const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x)),
                      b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        const __m512d c = _mm512_cvtps_pd(_mm512_castps512_ps256(y)),
                      d = _mm512_cvtps_pd(_mm512_extractf32x8_ps(y, 1));
        low = square ? _mm512_fmadd_pd(a, a, low) : _mm512_add_pd(a, low);
        high = square ? _mm512_fmadd_pd(b, b, high) : _mm512_add_pd(b, high);
        low2 = square ? _mm512_fmadd_pd(c, c, low2) : _mm512_add_pd(c, low2);
        high2 = square ? _mm512_fmadd_pd(d, d, high2) : _mm512_add_pd(d, high2);
    }
    return xdi_avx512_sum(_mm512_add_pd(_mm512_add_pd(low, low2), _mm512_add_pd(high, high2)));
}

XDI_AVX512 static double xdi_avx512_power_sum(const void *data, xd_dtype dtype, xd_norm_type type,
                                              int64_t n) {
    if (type == XD_NORM_MAX) return xdi_avx512_largest(data, dtype, n);
    if (type == XD_NORM_L2 && dtype == XD_DTYPE_F32) return xdi_avx512_powers(data, XD_DTYPE_F32, true, n);
    if (type == XD_NORM_L2 && dtype == XD_DTYPE_BF16) {
        const double sum = xdi_avx512_squares_bf16((const uint16_t *)data, n);
        if (sum >= 0.0) return sum;
    }
    return xdi_avx512_powers(data, dtype, type == XD_NORM_L2, n);
}

/* Low and high halves of the products of sixteen lanes with a constant. */
XDI_AVX512 static inline void xdi_avx512_product(__m512i x, uint32_t factor, __m512i *low, __m512i *high) {
    const __m512i m = _mm512_set1_epi64((int64_t)factor);
    const __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
    *low = _mm512_mask_mov_epi32(even, (__mmask16)0xaaaau, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), (__mmask16)0xaaaau, odd);
}

/* The words of sixteen blocks from `block` on, which have the same upper bits; those of blocks k, k + 4, k + 8 and k + 12 in
 * out[k]. */
XDI_AVX512 static inline void xdi_avx512_blocks(const xd_philox *p, int64_t block, __m512i out[4]) {
    uint32_t counter[4], k0 = (uint32_t)p->seed, k1 = (uint32_t)(p->seed >> 32);
    xd_philox_counter_of(p, (uint64_t)block, counter);
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32((int32_t)counter[0]),
                                  _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __m512i c1 = _mm512_set1_epi32((int32_t)counter[1]), c2 = _mm512_set1_epi32((int32_t)counter[2]);
    __m512i c3 = _mm512_set1_epi32((int32_t)counter[3]);
    for (int round = 0; round < 10; round++) { /* see xd_philox_rounds */
        __m512i a_low, a_high, b_low, b_high;
        xdi_avx512_product(c0, 0xd2511f53u, &a_low, &a_high);
        xdi_avx512_product(c2, 0xcd9e8d57u, &b_low, &b_high);
        c0 = _mm512_xor_si512(_mm512_xor_si512(b_high, c1), _mm512_set1_epi32((int32_t)k0));
        c1 = b_low;
        c2 = _mm512_xor_si512(_mm512_xor_si512(a_high, c3), _mm512_set1_epi32((int32_t)k1));
        c3 = a_low;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    const __m512i low01 = _mm512_unpacklo_epi32(c0, c1), high01 = _mm512_unpackhi_epi32(c0, c1);
    const __m512i low23 = _mm512_unpacklo_epi32(c2, c3), high23 = _mm512_unpackhi_epi32(c2, c3);
    out[0] = _mm512_unpacklo_epi64(low01, low23);
    out[1] = _mm512_unpackhi_epi64(low01, low23);
    out[2] = _mm512_unpacklo_epi64(high01, high23);
    out[3] = _mm512_unpackhi_epi64(high01, high23);
}

/* xd_round_to_bf16 of sixteen elements, with the halves of the words of two blocks. */
XDI_AVX512 static inline void xdi_avx512_round16(const float *from, __m256i blocks, uint16_t *to) {
    const __m512 x = _mm512_loadu_ps(from);
    const __m512i bits = _mm512_castps_si512(x), top = _mm512_srli_epi32(bits, 16);
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    const __mmask16 infinite = _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(top, nan, top, _mm512_set1_epi32(0x40));
    const __m512i drawn = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_cvtepu16_epi32(blocks)), 16);
    _mm256_storeu_si256((__m256i *)(void *)to,
                        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(drawn, infinite, kept)));
}

/* Elements before the first whole block go one by one, those after the last sixteen blocks by eight. */
XDI_AVX512 static void xdi_avx512_round(const xd_philox *random, int64_t element, const float *from,
                                        uint16_t *to, int64_t n) {
    const int64_t past = element % XD_ROUNDED_PER_BLOCK;
    int64_t i = past ? XD_ROUNDED_PER_BLOCK - past : 0;
    if (i > n) i = n;
    xdi_span_kernels_plain()->round(random, element, from, to, i);
    for (; i + 128 <= n; i += 128) {
        const int64_t block = (element + i) / XD_ROUNDED_PER_BLOCK;
        __m512i words[4];
        if (((block + 15) ^ block) >> 32) break; /* once in 2^35 elements */
        xdi_avx512_blocks(random, block, words);
        for (int pair = 0; pair < 2; pair++) { /* blocks 2 pair and 2 pair + 1 of each four */
            const int64_t at = i + 16 * pair;
            const __m512i fours = _mm512_shuffle_i32x4(words[2 * pair], words[2 * pair + 1], 0x88);
            const __m512i others = _mm512_shuffle_i32x4(words[2 * pair], words[2 * pair + 1], 0xdd);
            const __m512i even = _mm512_shuffle_i32x4(fours, fours, 0xd8);
            const __m512i odd = _mm512_shuffle_i32x4(others, others, 0xd8);
            xdi_avx512_round16(from + at, _mm512_castsi512_si256(even), to + at);
            xdi_avx512_round16(from + at + 32, _mm512_castsi512_si256(odd), to + at + 32);
            xdi_avx512_round16(from + at + 64, _mm512_extracti64x4_epi64(even, 1), to + at + 64);
            xdi_avx512_round16(from + at + 96, _mm512_extracti64x4_epi64(odd, 1), to + at + 96);
        }
    }
    xdi_avx2_round(random, element + i, from + i, to + i, n - i);
}

/* Eight doubles as f32, to odd: xd_float_to_odd. What is cut off makes the last bit 1. Comparisons with a NaN are false, as those
 * of C. */
XDI_AVX512 static inline __m256 xdi_avx512_to_odd(__m512d value) {
    const __m256 cut = _mm512_cvt_roundpd_ps(value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), value, _CMP_NEQ_OQ);
    const __m256i bits = _mm256_castps_si256(cut);
    return _mm256_castsi256_ps(_mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
}

/* Eight elements of mix. */
XDI_AVX512 static inline __m256 xdi_avx512_mix_eight(const xdi_span_mix *mix, const float *p,
                                                     const float *q) {
    const __m512d c0 = _mm512_set1_pd(mix->factors.c0), c1 = _mm512_set1_pd(mix->factors.c1);
    const __m512d of_p = _mm512_cvtps_pd(_mm256_loadu_ps(p));
    const __m512d value =
        q ? _mm512_fmadd_pd(c0, of_p, _mm512_mul_pd(c1, _mm512_cvtps_pd(_mm256_loadu_ps(q))))
          : _mm512_mul_pd(c0, of_p);
    return mix->to_odd ? xdi_avx512_to_odd(value) : _mm512_cvtpd_ps(value);
}

/* Sixteen at a time; returns how many. Without `large`, the loop has nothing but the arithmetic. */
XDI_AVX512 static inline int64_t xdi_avx512_mix_some(const xdi_span_mix *mix, const float *p, const float *q,
                                                     float *out, int64_t n, bool large) {
    const xdi_span_mix how = *mix; /* no store can change it */
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        if (large) __builtin_prefetch((const char *)(p + i) + XDI_MIX_AHEAD);
        if (large && q) __builtin_prefetch((const char *)(q + i) + XDI_MIX_AHEAD);
        for (int64_t k = i; k < i + 16; k += 8) {
            const __m256 x = xdi_avx512_mix_eight(&how, p + k, q ? q + k : NULL);
            if (large && how.streamed)
                _mm256_stream_ps(out + k, x);
            else
                _mm256_storeu_ps(out + k, x);
        }
    }
    return i;
}

XDI_AVX512 static void xdi_avx512_mix(const xdi_span_mix *mix, const float *p, const float *q, float *out,
                                      int64_t n) {
    const int64_t i = mix->large ? xdi_avx512_mix_some(mix, p, q, out, n, true)
                                 : xdi_avx512_mix_some(mix, p, q, out, n, false);
    xdi_span_kernels_plain()->mix(mix, p + i, q ? q + i : NULL, out + i, n - i);
}

XDI_AVX512 static void xdi_avx512_fence(void) {
    _mm_sfence();
}

/* Thirty-two elements of 16 bits, or those that are left. */
XDI_AVX512 static inline __mmask32 xdi_avx512_halves(int64_t left) {
    return ((uint32_t)1 << left) - 1u;
}

XDI_AVX512 static inline __m512i xdi_avx512_get_halves(const uint16_t *x, int64_t left) {
    return left >= 32 ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(xdi_avx512_halves(left), x);
}

XDI_AVX512 static inline void xdi_avx512_put_halves(uint16_t *to, int64_t left, __m512i x) {
    if (left >= 32)
        _mm512_storeu_si512(to, x);
    else
        _mm512_mask_storeu_epi16(to, xdi_avx512_halves(left), x);
}

/* Eight elements of mix, to odd. */
XDI_AVX512 static inline __m256 xdi_avx512_mix_odd(xd_mix mix, __m256 p, __m256 q, bool both) {
    const __m512d c1 = _mm512_set1_pd(both ? mix.c1 : mix.c0);
    const __m512d product = _mm512_mul_pd(c1, _mm512_cvtps_pd(both ? q : p));
    return xdi_avx512_to_odd(both ? _mm512_fmadd_pd(_mm512_set1_pd(mix.c0), _mm512_cvtps_pd(p), product)
                                  : product);
}

/* Sixteen, rounded to BF16 in the upper halves of the lanes. */
XDI_AVX512 static inline __m512i xdi_avx512_mix_bf16_bits(xd_mix mix, __m512i p, __m512i q, bool both) {
    const __m512 x = _mm512_castsi512_ps(p), y = _mm512_castsi512_ps(q);
    const __m256 low = xdi_avx512_mix_odd(mix, _mm512_castps512_ps256(x), _mm512_castps512_ps256(y), both);
    const __m256 high =
        xdi_avx512_mix_odd(mix, _mm512_extractf32x8_ps(x, 1), _mm512_extractf32x8_ps(y, 1), both);
    return xdi_avx512_bf16_bits(_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1));
}

/* The same from BF16 to BF16 without copies in f32 in between: elements at even places and at odd ones are the lower and the
 * upper halves of lanes, as BF16 is the upper half of f32. */
XDI_AVX512 static void xdi_avx512_mix_bf16(const xdi_span_mix *mix, const uint16_t *p, const uint16_t *q,
                                           uint16_t *out, int64_t n) {
    const xd_mix factors = mix->factors;
    const __m512i top = _mm512_set1_epi32((int)0xffff0000u);
    const bool both = q != NULL, large = mix->large, streamed = mix->streamed;
    for (int64_t i = 0; i < n; i += 32) {
        if (large) __builtin_prefetch((const char *)(p + i) + XDI_MIX_AHEAD);
        if (large && both) __builtin_prefetch((const char *)(q + i) + XDI_MIX_AHEAD);
        const __m512i x = xdi_avx512_get_halves(p + i, n - i);
        const __m512i y = both ? xdi_avx512_get_halves(q + i, n - i) : x;
        const __m512i even =
            xdi_avx512_mix_bf16_bits(factors, _mm512_slli_epi32(x, 16), _mm512_slli_epi32(y, 16), both);
        const __m512i odd =
            xdi_avx512_mix_bf16_bits(factors, _mm512_and_si512(x, top), _mm512_and_si512(y, top), both);
        const __m512i pairs = _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, top));
        if (streamed && n - i >= 32)
            _mm512_stream_si512((__m512i *)(void *)(out + i), pairs);
        else
            xdi_avx512_put_halves(out + i, n - i, pairs);
    }
}

static const xdi_span_kernels xdi_avx512_spans = {
    xdi_avx512_widen, xdi_avx512_narrow, xdi_avx512_adam,        xdi_avx512_sgd,       xdi_avx512_lerp,
    xdi_avx512_scale, xdi_avx512_add,    xdi_avx512_power_sum,   xdi_avx512_lerp_bf16, true,
    xdi_avx512_round, xdi_avx512_mix,    xdi_avx512_compensated, xdi_avx512_mix_bf16,  xdi_avx512_fence,
};

XDI_SPAN_ENTRIES(avx512, xdi_avx512_spans)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif
#endif
