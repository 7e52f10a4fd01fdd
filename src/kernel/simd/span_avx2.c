/* Spans of eight lanes. The plain spans compute the last few elements, with the same bits. Every processor with AVX2 also
 * converts halves (F16C). */

#include "kernel/simd/internal.h"

#if defined(XDI_X86)
#    include <float.h>
#    include <immintrin.h>

#    define XDI_AVX2 __attribute__((target("avx2,fma,f16c")))

/* Ends an expression: see xd_mulf. */
XDI_AVX2 static inline __m256 xdi_avx2_rounded(__m256 product) {
    __asm__("" : "+x"(product));
    return product;
}

XDI_AVX2 static inline __m256 xdi_avx2_abs(__m256 x) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

XDI_AVX2 static inline __m256 xdi_avx2_from_half(__m128i half, xd_dtype dtype) {
    if (dtype == XD_DTYPE_F16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

XDI_AVX2 static inline __m128i xdi_avx2_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i half = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

XDI_AVX2 static void xdi_avx2_widen(const uint16_t *from, xd_dtype dtype, float *to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(
            to + i, xdi_avx2_from_half(_mm_loadu_si128((const __m128i *)(const void *)(from + i)), dtype));
    xdi_span_kernels_plain()->widen(from + i, dtype, to + i, n - i);
}

XDI_AVX2 static void xdi_avx2_narrow(const float *from, uint16_t *to, xd_dtype dtype, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_loadu_ps(from + i);
        const __m128i half =
            dtype == XD_DTYPE_F16 ? _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT) : xdi_avx2_to_bf16(x);
        _mm_storeu_si128((__m128i *)(void *)(to + i), half);
    }
    xdi_span_kernels_plain()->narrow(from + i, to + i, dtype, n - i);
}

XDI_AVX2 static inline __m256 xdi_avx2_gradient(const xd_update_args *args, __m256 g) {
    if (args->gradient_scale) g = xdi_avx2_rounded(_mm256_mul_ps(g, _mm256_set1_ps(*args->gradient_scale)));
    return args->maximize ? _mm256_xor_ps(g, _mm256_set1_ps(-0.0f)) : g;
}

XDI_AVX2 static void xdi_avx2_adam(const xd_update_args *args, const xd_update_array *a,
                                   const float *gradient, int64_t at, int64_t n) {
    const __m256 rise1 = _mm256_set1_ps(args->one_minus_beta1), rise2 = _mm256_set1_ps(args->one_minus_beta2);
    const __m256 beta2 = _mm256_set1_ps(args->beta2), eps = _mm256_set1_ps(args->eps);
    const __m256 step = _mm256_set1_ps(-a->step_size), correction = _mm256_set1_ps(a->root_correction);
    const __m256 decay = _mm256_set1_ps(a->decay), coupled = _mm256_set1_ps(a->weight_decay);
    float *master = a->master + at, *first = a->first + at, *second = a->second + at;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 p = _mm256_loadu_ps(master + i);
        __m256 m = _mm256_loadu_ps(first + i), v = _mm256_loadu_ps(second + i);
        __m256 g = xdi_avx2_gradient(args, _mm256_loadu_ps(gradient + i));
        if (args->couple_decay) g = _mm256_fmadd_ps(coupled, p, g);
        const __m256 kept = args->couple_decay ? p : _mm256_mul_ps(p, decay);
        m = _mm256_fmadd_ps(rise1, _mm256_sub_ps(g, m), m);
        v = _mm256_fmadd_ps(rise2, _mm256_mul_ps(g, g), _mm256_mul_ps(beta2, v));
        const __m256 denominator = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v), correction), eps);
        _mm256_storeu_ps(master + i, _mm256_fmadd_ps(step, _mm256_div_ps(m, denominator), kept));
        _mm256_storeu_ps(first + i, m);
        _mm256_storeu_ps(second + i, v);
    }
    xdi_span_kernels_plain()->adam(args, a, gradient + i, at + i, n - i);
}

XDI_AVX2 static void xdi_avx2_sgd(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                                  int64_t at, int64_t n) {
    const __m256 decay = _mm256_set1_ps(a->weight_decay), momentum = _mm256_set1_ps(args->momentum);
    const __m256 step = _mm256_set1_ps(-a->step_size);
    float *master = a->master + at, *first = a->first + at;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 p = _mm256_loadu_ps(master + i);
        __m256 buffer = xdi_avx2_gradient(args, _mm256_loadu_ps(gradient + i));
        buffer = _mm256_fmadd_ps(decay, p, buffer);
        if (!a->fresh) buffer = _mm256_fmadd_ps(momentum, _mm256_loadu_ps(first + i), buffer);
        _mm256_storeu_ps(first + i, buffer);
        _mm256_storeu_ps(master + i, _mm256_fmadd_ps(step, buffer, p));
    }
    xdi_span_kernels_plain()->sgd(args, a, gradient + i, at + i, n - i);
}

XDI_AVX2 static void xdi_avx2_lerp(const xdi_span_average *average, float *target, const float *source,
                                   int64_t n) {
    const bool from_target =
        average->weight > -0.5f && average->weight < 0.5f; /* see lerp in cpu/optimizer.c */
    const __m256 weight = _mm256_set1_ps(average->weight), keep = _mm256_set1_ps(average->keep);
    const __m256 factor = _mm256_set1_ps(from_target ? average->weight : average->weight - 1.0f);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_loadu_ps(source + i), t = _mm256_loadu_ps(target + i);
        const __m256 moved = average->weighted_sum
                                 ? _mm256_fmadd_ps(weight, x, _mm256_mul_ps(keep, t))
                                 : _mm256_fmadd_ps(factor, _mm256_sub_ps(x, t), from_target ? t : x);
        _mm256_storeu_ps(target + i, moved);
    }
    xdi_span_kernels_plain()->lerp(average, target + i, source + i, n - i);
}

/* xd_lerp_compensated. */
XDI_AVX2 static void xdi_avx2_compensated(float weight, const float *source, float *target,
                                          uint16_t *compensation, int64_t n) {
    const bool far = weight >= 0.5f || weight <= -0.5f;
    const __m256 factor = _mm256_set1_ps(far ? weight - 1.0f : weight);
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i *term = (__m128i *)(void *)(compensation + i);
        const __m256 t = _mm256_loadu_ps(target + i), x = _mm256_loadu_ps(source + i);
        const __m256 kept = xdi_avx2_from_half(_mm_loadu_si128(term), XD_DTYPE_BF16);
        const __m256 difference = _mm256_sub_ps(_mm256_sub_ps(x, t), kept), base = far ? x : t;
        const __m256 step = far ? xdi_avx2_rounded(_mm256_mul_ps(factor, difference))
                                : _mm256_fmadd_ps(factor, difference, kept);
        const __m256 sum = _mm256_add_ps(base, step), moved = _mm256_sub_ps(sum, base);
        const __m256 lost =
            _mm256_add_ps(_mm256_sub_ps(base, _mm256_sub_ps(sum, moved)), _mm256_sub_ps(step, moved));
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(lost), exponent);
        const __m256i finite = _mm256_cmpgt_epi32(exponent, magnitude);
        _mm256_storeu_ps(target + i, sum);
        _mm_storeu_si128(term, xdi_avx2_to_bf16(_mm256_and_ps(lost, _mm256_castsi256_ps(finite))));
    }
    xdi_span_kernels_plain()->compensated(weight, source + i, target + i, compensation + i, n - i);
}

XDI_AVX2 static void xdi_avx2_scale(float *x, float factor, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(factor)));
    xdi_span_kernels_plain()->scale(x + i, factor, n - i);
}

XDI_AVX2 static void xdi_avx2_add(float *sum, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), _mm256_loadu_ps(x + i)));
    xdi_span_kernels_plain()->add(sum + i, x + i, n - i);
}

XDI_AVX2 static inline __m256 xdi_avx2_load(const void *data, xd_dtype dtype, int64_t i) {
    if (dtype == XD_DTYPE_F32) return _mm256_loadu_ps((const float *)data + i);
    return xdi_avx2_from_half(_mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)data + i)),
                              dtype);
}

XDI_AVX2 static double xdi_avx2_sum(__m256d x) {
    double lanes[4];
    _mm256_storeu_pd(lanes, x);
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

/* The remainder of a span: a few elements from `i` on. */
static double xdi_avx2_rest(const void *data, xd_dtype dtype, xd_norm_type type, int64_t i, int64_t n) {
    const char *rest = (const char *)data + (size_t)i * xd_dtype_size(dtype);
    return xdi_span_kernels_plain()->power_sum(rest, dtype, type, n - i);
}

/* Magnitudes of f32 order like their bits, infinity and NaN above all. */
XDI_AVX2 static double xdi_avx2_largest(const void *data, xd_dtype dtype, int64_t n) {
    __m256i largest = _mm256_setzero_si256();
    uint32_t lanes[8], top = 0;
    float value;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        largest = _mm256_max_epu32(largest, _mm256_castps_si256(xdi_avx2_abs(xdi_avx2_load(data, dtype, i))));
    _mm256_storeu_si256((__m256i *)(void *)lanes, largest);
    for (int k = 0; k < 8; k++) top = lanes[k] > top ? lanes[k] : top;
    memcpy(&value, &top, sizeof value);
    const double rest = xdi_avx2_rest(data, dtype, XD_NORM_MAX, i, n);
    return (double)value <= rest || rest != rest ? rest : (double)value; /* NaN stays */
}

/* See xdi_avx512_squares_bf16; here a lane adds 32 squares in each of two sums and loses at most 2^-19. */
XDI_AVX2 static double xdi_avx2_squares_bf16(const uint16_t *x, int64_t n) {
    const __m256i top = _mm256_set1_epi32((int32_t)0xffff0000);
    __m256 even = _mm256_setzero_ps(), odd = even;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256i pair = _mm256_loadu_si256((const __m256i *)(const void *)(x + i));
        const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
        const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(pair, top));
        even = _mm256_fmadd_ps(low, low, even);
        odd = _mm256_fmadd_ps(high, high, odd);
    }
    even = _mm256_add_ps(even, odd);
    const double sum = xdi_avx2_sum(_mm256_cvtps_pd(_mm256_castps256_ps128(even))) +
                       xdi_avx2_sum(_mm256_cvtps_pd(_mm256_extractf128_ps(even, 1))) +
                       xdi_avx2_rest(x, XD_DTYPE_BF16, XD_NORM_L2, i, n);
    return sum > XDI_SPAN_LEAST_SQUARES && sum <= DBL_MAX ? sum : -1.0;
}

XDI_AVX2 static double xdi_avx2_power_sum(const void *data, xd_dtype dtype, xd_norm_type type, int64_t n) {
    __m256d low = _mm256_setzero_pd(), high = low, low2 = low, high2 = low;
    int64_t i = 0;
    if (type == XD_NORM_MAX) return xdi_avx2_largest(data, dtype, n);
    if (type == XD_NORM_L2 && dtype == XD_DTYPE_BF16) {
        const double sum = xdi_avx2_squares_bf16((const uint16_t *)data, n);
        if (sum >= 0.0) return sum;
    }
    for (; i + 8 <= n; i += 8) {
        const __m256 x = xdi_avx2_abs(xdi_avx2_load(data, dtype, i));
        const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x)),
                      b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        const __m256d a2 = type == XD_NORM_L2 ? _mm256_mul_pd(a, a) : a,
                      b2 = type == XD_NORM_L2 ? _mm256_mul_pd(b, b) : b;
        if (i & 8) {
            low2 = _mm256_add_pd(low2, a2);
            high2 = _mm256_add_pd(high2, b2);
        } else {
            low = _mm256_add_pd(low, a2);
            high = _mm256_add_pd(high, b2);
        }
    }
    const double sum = xdi_avx2_sum(_mm256_add_pd(_mm256_add_pd(low, low2), _mm256_add_pd(high, high2)));
    return sum + xdi_avx2_rest(data, dtype, type, i, n);
}

/* Low and high halves of the products of eight lanes with a constant. */
XDI_AVX2 static inline void xdi_avx2_product(__m256i x, uint32_t factor, __m256i *low, __m256i *high) {
    const __m256i m = _mm256_set1_epi64x((int64_t)factor);
    const __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

/* The words of eight blocks from `block` on, which have the same upper bits; those of blocks k and k + 4 in out[k]. */
XDI_AVX2 static inline void xdi_avx2_blocks(const xd_philox *p, int64_t block, __m256i out[4]) {
    uint32_t counter[4], k0 = (uint32_t)p->seed, k1 = (uint32_t)(p->seed >> 32);
    xd_philox_counter_of(p, (uint64_t)block, counter);
    __m256i c0 =
        _mm256_add_epi32(_mm256_set1_epi32((int32_t)counter[0]), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i c1 = _mm256_set1_epi32((int32_t)counter[1]), c2 = _mm256_set1_epi32((int32_t)counter[2]);
    __m256i c3 = _mm256_set1_epi32((int32_t)counter[3]);
    for (int round = 0; round < 10; round++) { /* see xd_philox_rounds */
        __m256i a_low, a_high, b_low, b_high;
        xdi_avx2_product(c0, 0xd2511f53u, &a_low, &a_high);
        xdi_avx2_product(c2, 0xcd9e8d57u, &b_low, &b_high);
        c0 = _mm256_xor_si256(_mm256_xor_si256(b_high, c1), _mm256_set1_epi32((int32_t)k0));
        c1 = b_low;
        c2 = _mm256_xor_si256(_mm256_xor_si256(a_high, c3), _mm256_set1_epi32((int32_t)k1));
        c3 = a_low;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    const __m256i low01 = _mm256_unpacklo_epi32(c0, c1), high01 = _mm256_unpackhi_epi32(c0, c1);
    const __m256i low23 = _mm256_unpacklo_epi32(c2, c3), high23 = _mm256_unpackhi_epi32(c2, c3);
    out[0] = _mm256_unpacklo_epi64(low01, low23);
    out[1] = _mm256_unpackhi_epi64(low01, low23);
    out[2] = _mm256_unpacklo_epi64(high01, high23);
    out[3] = _mm256_unpackhi_epi64(high01, high23);
}

/* xd_round_to_bf16 of eight elements, with the eight halves of the words of a block. */
XDI_AVX2 static inline void xdi_avx2_round8(const float *from, __m128i block, uint16_t *to) {
    const __m256 x = _mm256_loadu_ps(from);
    const __m256i bits = _mm256_castps_si256(x), top = _mm256_srli_epi32(bits, 16);
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    const __m256i infinite = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_or_si256(top, _mm256_and_si256(nan, _mm256_set1_epi32(0x40)));
    const __m256i drawn = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_cvtepu16_epi32(block)), 16);
    const __m256i half = _mm256_blendv_epi8(drawn, kept, infinite);
    _mm_storeu_si128((__m128i *)(void *)to,
                     _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

/* Elements before the first whole block and after the last eight go one by one. */
XDI_AVX2 XD_PRIVATE void xdi_avx2_round(const xd_philox *random, int64_t element, const float *from,
                                        uint16_t *to, int64_t n) {
    const int64_t past = element % XD_ROUNDED_PER_BLOCK;
    int64_t i = past ? XD_ROUNDED_PER_BLOCK - past : 0;
    if (i > n) i = n;
    xdi_span_kernels_plain()->round(random, element, from, to, i);
    for (; i + 64 <= n; i += 64) {
        const int64_t block = (element + i) / XD_ROUNDED_PER_BLOCK;
        __m256i words[4];
        if (((block + 7) ^ block) >> 32) break; /* once in 2^35 elements */
        xdi_avx2_blocks(random, block, words);
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + 8 * k;
            xdi_avx2_round8(from + at, _mm256_castsi256_si128(words[k]), to + at);
            xdi_avx2_round8(from + at + 32, _mm256_extracti128_si256(words[k], 1), to + at + 32);
        }
    }
    xdi_span_kernels_plain()->round(random, element + i, from + i, to + i, n - i);
}

/* Four doubles as f32, to odd: xd_float_to_odd. Comparisons with a NaN are false, as those of C. */
XDI_AVX2 static inline __m128 xdi_avx2_to_odd(__m256d value, __m128 nearest) {
    const __m256d back = _mm256_cvtps_pd(nearest), sign = _mm256_set1_pd(-0.0);
    const __m256d beyond =
        _mm256_cmp_pd(_mm256_andnot_pd(sign, back), _mm256_andnot_pd(sign, value), _CMP_GT_OQ);
    const __m256d inexact = _mm256_cmp_pd(back, value, _CMP_NEQ_OQ);
    const __m256i low = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    const __m256i beyond_at = _mm256_permutevar8x32_epi32(_mm256_castpd_si256(beyond), low);
    const __m256i inexact_at = _mm256_permutevar8x32_epi32(_mm256_castpd_si256(inexact), low);
    const __m128i down = _mm_add_epi32(_mm_castps_si128(nearest), _mm256_castsi256_si128(beyond_at));
    return _mm_castsi128_ps(_mm_or_si128(down, _mm_srli_epi32(_mm256_castsi256_si128(inexact_at), 31)));
}

/* Four elements of mix. */
XDI_AVX2 static inline __m128 xdi_avx2_mix_four(const xdi_span_mix *mix, const float *p, const float *q) {
    const __m256d c0 = _mm256_set1_pd(mix->factors.c0), c1 = _mm256_set1_pd(mix->factors.c1);
    const __m256d of_p = _mm256_cvtps_pd(_mm_loadu_ps(p));
    const __m256d value = q ? _mm256_fmadd_pd(c0, of_p, _mm256_mul_pd(c1, _mm256_cvtps_pd(_mm_loadu_ps(q))))
                            : _mm256_mul_pd(c0, of_p);
    const __m128 nearest = _mm256_cvtpd_ps(value);
    return mix->to_odd ? xdi_avx2_to_odd(value, nearest) : nearest;
}

/* Sixteen at a time; returns how many. Without `large`, the loop has nothing but the arithmetic. */
XDI_AVX2 static inline int64_t xdi_avx2_mix_some(const xdi_span_mix *mix, const float *p, const float *q,
                                                 float *out, int64_t n, bool large) {
    const xdi_span_mix how = *mix; /* no store can change it */
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        if (large) __builtin_prefetch((const char *)(p + i) + XDI_MIX_AHEAD);
        if (large && q) __builtin_prefetch((const char *)(q + i) + XDI_MIX_AHEAD);
        for (int64_t k = i; k < i + 16; k += 4) {
            const __m128 x = xdi_avx2_mix_four(&how, p + k, q ? q + k : NULL);
            if (large && how.streamed)
                _mm_stream_ps(out + k, x);
            else
                _mm_storeu_ps(out + k, x);
        }
    }
    return i;
}

XDI_AVX2 static void xdi_avx2_mix(const xdi_span_mix *mix, const float *p, const float *q, float *out,
                                  int64_t n) {
    const int64_t i =
        mix->large ? xdi_avx2_mix_some(mix, p, q, out, n, true) : xdi_avx2_mix_some(mix, p, q, out, n, false);
    xdi_span_kernels_plain()->mix(mix, p + i, q ? q + i : NULL, out + i, n - i);
}

XDI_AVX2 static void xdi_avx2_fence(void) {
    _mm_sfence();
}

static const xdi_span_kernels xdi_avx2_spans = {
    xdi_avx2_widen, xdi_avx2_narrow, xdi_avx2_adam,        xdi_avx2_sgd, xdi_avx2_lerp,
    xdi_avx2_scale, xdi_avx2_add,    xdi_avx2_power_sum,   NULL,         true,
    xdi_avx2_round, xdi_avx2_mix,    xdi_avx2_compensated, NULL,         xdi_avx2_fence,
};

XDI_SPAN_ENTRIES(avx2, xdi_avx2_spans)
#endif
