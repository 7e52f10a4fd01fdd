#ifndef XDI_KERNEL_SIMD_SIMD_H
#define XDI_KERNEL_SIMD_SIMD_H

#include <string.h>

#include "kernel/internal.h"

/* Vectors of f32 in three widths with the same operations: xdi_v4 (any processor, by the compiler's own
 * vectors), xdi_v8 (AVX2 and FMA), xdi_v16 (AVX-512). Functions carry their instruction set as an
 * attribute, so no compiler flag is needed. Bodies are written once, as a macro over the prefix: tiles.c.
 *
 *   max, min    the second one where the first is not larger, or smaller: NaN in the first is lost
 *   pick        a >= b ? x : y, lane by lane
 *   mul_sub     a * b - c
 *   exact_sub   the same with one rounding, where the product is near c
 *   power       2^(n/steps), n the integer in the low bits of the argument's representation
 *   fraction    scale 2^(f/steps), relative error below 2e-7, for 0 exactly scale
 *   split       v = 2^result * mantissa, mantissa in [sqrt(1/2), sqrt(2)); v positive and normal
 *   load        elements [i, i + lanes) of f32 or bf16
 *   store       the same; to bf16 by round to nearest even. Not for NaN.
 *   load_two    elements [i, i + 2 lanes) of bf16, the even and the odd ones: no lane has to move
 *   store_two   the same way back
 *   stream, stream_two   store of f32, and store_two, past the caches where there is such an instruction: to a
 *               place aligned to XDI_SIMD_LINE, vector after vector
 *   fence       what was streamed is in memory before whatever follows
 *   top, top_two   the larger by representation, as signed integers, of what is kept and a vector, or
 *               elements [i, i + 2 lanes) of bf16: unlike max it takes no turn of those that add
 *   top_bits    the representation, as f32, of the largest kept by top, or by top_two
 *   total       the sum of all lanes, in double */

/* Bytes that memory is read and written by. */
enum { XDI_SIMD_LINE = 64 };

#define XDI_SIMD_INLINE_256 static inline __attribute__((always_inline, target("avx2,fma")))
#define XDI_SIMD_INLINE_512 \
    static inline __attribute__((always_inline, target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

#define XDI_SIMD_256 XDI_SIMD_AS_WRITTEN static __attribute__((target("avx2,fma")))
#define XDI_SIMD_512 \
    XDI_SIMD_AS_WRITTEN static __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

/* 2^x is taken in steps: x steps = n + f with n an integer and f in [-1/2, 1/2], so that 2^(n/steps), from
 * a table where the width has a permutation for one, times a short polynomial in f is the power. An entry i
 * of a table has the bits of 2^(i/steps) less those that n brings along, i in the upper bits of the
 * mantissa. */
static const uint32_t xdi_v8_table[8] = { 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                          0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7 };
static const uint32_t xdi_v16_table[32] = {
    0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
    0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
    0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
    0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3
};

/* Halves of a vector: the lower 16 to the upper halves of 16 lanes, and the upper halves of the lanes
 * together. */
static const uint16_t xdi_v16_widen[32] = { 0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                            8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15 };
static const uint16_t xdi_v16_narrow[32] = { 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                             1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 };

/* Elements of one row, or of a part of it. */
typedef struct xdi_simd_array {
    void *data;
    bool bf16;
} xdi_simd_array;

#define XDI_SIMD_SQRT_HALF_BITS 0x3f3504f3

/* What `top` begins with: less than every representation, by halves as well. */
#define XDI_SIMD_NO_TOP ((int32_t)0x80008000)

/* Fewer elements than lanes, the others filled up, so that an element gets the same bits wherever it is. */
static inline void xdi_simd_part(xdi_simd_array x, int64_t begin, int64_t end, int lanes, float fill,
                                 float *out) {
    for (int i = 0; i < lanes; i++) {
        out[i] = fill;
        if (begin + i < end)
            out[i] = x.bf16 ? xd_f32_from_bf16(((const uint16_t *)x.data)[begin + i])
                            : ((const float *)x.data)[begin + i];
    }
}

static inline void xdi_simd_store_part(xdi_simd_array x, int64_t begin, int64_t end, const float *in) {
    for (int64_t i = begin; i < end; i++) {
        if (x.bf16)
            ((uint16_t *)x.data)[i] = xd_bf16_from_f32(in[i - begin]);
        else
            ((float *)x.data)[i] = in[i - begin];
    }
}

/* Copies elements of the same type. */
static inline void xdi_simd_copy(xdi_simd_array from, int64_t begin, int64_t count, xdi_simd_array to,
                                 int64_t at) {
    const size_t size = from.bf16 ? sizeof(uint16_t) : sizeof(float);
    memcpy((char *)to.data + (size_t)at * size, (const char *)from.data + (size_t)begin * size,
           (size_t)count * size);
}

/* Elements [begin, end) in `room`, which has space for `count` f32, filled up to count. */
static inline xdi_simd_array xdi_simd_padded(xdi_simd_array x, int64_t begin, int64_t end, int64_t count,
                                             float fill, float *room) {
    xdi_simd_array padded;
    padded.data = room;
    padded.bf16 = x.bf16;
    for (int64_t i = end - begin; i < count; i++) {
        if (x.bf16)
            ((uint16_t *)padded.data)[i] = xd_bf16_from_f32(fill);
        else
            room[i] = fill;
    }
    xdi_simd_copy(x, begin, end - begin, padded, 0);
    return padded;
}

/* ---- four lanes ---- */

typedef float __attribute__((vector_size(16))) xdi_v4;
typedef int32_t __attribute__((vector_size(16))) xdi_v4_bits;
typedef int16_t __attribute__((vector_size(16))) xdi_v4_halves;
enum { xdi_v4_lanes = 4, xdi_v4_steps = 1 };

XDI_SIMD_INLINE xdi_v4 xdi_v4_set(float x) {
    const xdi_v4 v = { x, x, x, x };
    return v;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_add(xdi_v4 a, xdi_v4 b) {
    return a + b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_sub(xdi_v4 a, xdi_v4 b) {
    return a - b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_mul(xdi_v4 a, xdi_v4 b) {
    return a * b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_div(xdi_v4 a, xdi_v4 b) {
    return a / b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_fma(xdi_v4 a, xdi_v4 b, xdi_v4 c) {
    return a * b + c;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_mul_sub(xdi_v4 a, xdi_v4 b, xdi_v4 c) {
    return a * b - c;
}
/* Without fma: a product of two 12-bit halves is exact, and so is its distance to c; the other parts are
 * small. */
XDI_SIMD_INLINE xdi_v4 xdi_v4_exact_sub(xdi_v4 a, xdi_v4 b, xdi_v4 c) {
    const xdi_v4 a_high = (xdi_v4)((xdi_v4_bits)a & ~0xfff), b_high = (xdi_v4)((xdi_v4_bits)b & ~0xfff);
    const xdi_v4 a_low = a - a_high, b_low = b - b_high;
    return ((a_high * b_high - c) + a_high * b_low) + a_low * b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_pick(xdi_v4 a, xdi_v4 b, xdi_v4 x, xdi_v4 y) {
    const xdi_v4_bits mask = (xdi_v4_bits)(a >= b);
    return (xdi_v4)((mask & (xdi_v4_bits)x) | (~mask & (xdi_v4_bits)y));
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_max(xdi_v4 a, xdi_v4 b) {
    const xdi_v4_bits mask = (xdi_v4_bits)(a > b);
    return (xdi_v4)((mask & (xdi_v4_bits)a) | (~mask & (xdi_v4_bits)b));
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_min(xdi_v4 a, xdi_v4 b) {
    const xdi_v4_bits mask = (xdi_v4_bits)(a < b);
    return (xdi_v4)((mask & (xdi_v4_bits)a) | (~mask & (xdi_v4_bits)b));
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_power(xdi_v4 t) {
    return (xdi_v4)(((xdi_v4_bits)t << 23) + 0x3f800000);
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_fraction(xdi_v4 f, float scale) {
    xdi_v4 p = f * (scale * 1.327647245e-03f) + scale * 9.675540961e-03f;
    p = p * f + scale * 5.550713092e-02f;
    p = p * f + scale * 2.402212024e-01f;
    p = p * f + scale * 6.931469440e-01f;
    return p * f + scale;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_split(xdi_v4 v, xdi_v4 *mantissa) {
    const xdi_v4_bits bits = (xdi_v4_bits)v, exponent = (bits - XDI_SIMD_SQRT_HALF_BITS) >> 23;
    *mantissa = (xdi_v4)(bits - (exponent << 23));
    const xdi_v4 result = { (float)exponent[0], (float)exponent[1], (float)exponent[2], (float)exponent[3] };
    return result;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_load(xdi_simd_array x, int64_t i) {
    xdi_v4 v;
    if (x.bf16) {
        const uint16_t *p = (const uint16_t *)x.data + i;
        const xdi_v4_bits bits = { p[0], p[1], p[2], p[3] };
        v = (xdi_v4)(bits << 16);
    } else {
        memcpy(&v, (const float *)x.data + i, sizeof v);
    }
    return v;
}
XDI_SIMD_INLINE void xdi_v4_load_two(xdi_simd_array x, int64_t i, xdi_v4 *even, xdi_v4 *odd) {
    xdi_v4_bits bits;
    memcpy(&bits, (const uint16_t *)x.data + i, sizeof bits);
    *even = (xdi_v4)(bits << 16);
    *odd = (xdi_v4)(bits & (int32_t)0xffff0000);
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_no_top(void) {
    const xdi_v4_bits none = { XDI_SIMD_NO_TOP, XDI_SIMD_NO_TOP, XDI_SIMD_NO_TOP, XDI_SIMD_NO_TOP };
    return none;
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_top(xdi_v4_bits tops, xdi_v4 v) {
    const xdi_v4_bits bits = (xdi_v4_bits)v, mask = bits > tops;
    return (mask & bits) | (~mask & tops);
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_top_two(xdi_v4_bits tops, xdi_simd_array x, int64_t i) {
    xdi_v4_halves halves;
    memcpy(&halves, (const uint16_t *)x.data + i, sizeof halves);
    const xdi_v4_halves mask = halves > (xdi_v4_halves)tops;
    return (xdi_v4_bits)((mask & halves) | (~mask & (xdi_v4_halves)tops));
}
XDI_SIMD_INLINE int32_t xdi_v4_top_bits(xdi_v4_bits tops, bool two) {
    int32_t top = INT32_MIN;
    for (int lane = 0; lane < 4; lane++) {
        const int32_t odd = two ? tops[lane] & (int32_t)0xffff0000 : tops[lane];
        const int32_t even = two ? (int32_t)((uint32_t)tops[lane] << 16) : odd;
        top = odd > top ? odd : top;
        top = even > top ? even : top;
    }
    return top;
}
XDI_SIMD_INLINE double xdi_v4_total(xdi_v4 v) {
    return ((double)v[0] + (double)v[1]) + ((double)v[2] + (double)v[3]);
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_rounded(xdi_v4 v) {
    const xdi_v4_bits bits = (xdi_v4_bits)v;
    return bits + 0x7fff + ((bits >> 16) & 1);
}
XDI_SIMD_INLINE void xdi_v4_store_two(xdi_simd_array x, int64_t i, xdi_v4 even, xdi_v4 odd) {
    const xdi_v4_bits low = (xdi_v4_rounded(even) >> 16) & 0xffff;
    const xdi_v4_bits both = low | (xdi_v4_rounded(odd) & (int32_t)0xffff0000);
    memcpy((uint16_t *)x.data + i, &both, sizeof both);
}
XDI_SIMD_INLINE void xdi_v4_stream_two(xdi_simd_array x, int64_t i, xdi_v4 even, xdi_v4 odd) {
    xdi_v4_store_two(x, i, even, odd);
}
XDI_SIMD_INLINE void xdi_v4_stream(xdi_simd_array x, int64_t i, xdi_v4 v) {
    memcpy((float *)x.data + i, &v, sizeof v);
}
XDI_SIMD_INLINE void xdi_v4_fence(void) {}
XDI_SIMD_INLINE void xdi_v4_store(xdi_simd_array x, int64_t i, xdi_v4 v) {
    if (x.bf16) {
        const xdi_v4_bits rounded = xdi_v4_rounded(v);
        uint16_t *p = (uint16_t *)x.data + i;
        for (int lane = 0; lane < 4; lane++) p[lane] = (uint16_t)((uint32_t)rounded[lane] >> 16);
    } else {
        memcpy((float *)x.data + i, &v, sizeof v);
    }
}

#if defined(XDI_X86)

#    include <immintrin.h>

/* gcc 12 takes the undefined operand of its own intrinsics for a mistake. */
#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* ---- eight lanes ---- */

typedef __m256 xdi_v8;
typedef __m256i xdi_v8_bits;
enum { xdi_v8_lanes = 8, xdi_v8_steps = 8 };

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
XDI_SIMD_INLINE_256 xdi_v8 xdi_v8_fraction(xdi_v8 f, float scale) {
    xdi_v8 p = xdi_v8_fma(f, xdi_v8_set(scale * 1.083962925e-04f), xdi_v8_set(scale * 3.754126141e-03f));
    p = xdi_v8_fma(p, f, xdi_v8_set(scale * 8.664339781e-02f));
    return xdi_v8_fma(p, f, xdi_v8_set(scale));
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

/* ---- sixteen lanes ---- */

typedef __m512 xdi_v16;
typedef __m512i xdi_v16_bits;
enum { xdi_v16_lanes = 16, xdi_v16_steps = 32 };

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
XDI_SIMD_INLINE_512 xdi_v16 xdi_v16_fraction(xdi_v16 f, float scale) {
    const xdi_v16 p =
        xdi_v16_fma(f, xdi_v16_set(scale * 2.345944813e-04f), xdi_v16_set(scale * 2.166116610e-02f));
    return xdi_v16_fma(p, f, xdi_v16_set(scale));
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
/* The upper halves of both vectors together and the lower ones: a number goes up where its lower half is above
 * one half of the last place, or is one half and the last place is odd. */
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

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

#endif
