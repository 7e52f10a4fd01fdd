/* The matrix product's tiles and packing in vectors. */

#include "kernel/cpu/matmul.h"
#include "kernel/simd/internal.h"

#if defined(XDI_X86)
#    include <immintrin.h>

/* ---- tiles ---- */

/* 6 x 16: twelve sums of eight lanes, two for b and one for a leave one of the sixteen registers free. */
__attribute__((target("avx2,fma"))) static void xdi_matmul_tile_avx2(int64_t k, const void *packed_a,
                                                                     const void *packed_b, float *tile,
                                                                     int64_t stride, bool accumulate) {
    const float *a = (const float *)packed_a, *b = (const float *)packed_b;
    __m256 sum[6][2];
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 6; i++) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < k; p++, a += 6, b += 16) {
        const __m256 left = _mm256_loadu_ps(b), right = _mm256_loadu_ps(b + 8);
        XDI_MATMUL_UNROLL
        for (int i = 0; i < 6; i++) {
            const __m256 factor = _mm256_set1_ps(a[i]);
            sum[i][0] = _mm256_fmadd_ps(factor, left, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(factor, right, sum[i][1]);
        }
    }
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 6; i++) XDI_MATMUL_UNROLL
    for (int j = 0; j < 2; j++) {
        float *out = tile + i * stride + 8 * j;
        _mm256_storeu_ps(out, accumulate ? _mm256_add_ps(_mm256_loadu_ps(out), sum[i][j]) : sum[i][j]);
    }
}

__attribute__((target("avx512f"))) static inline void
xdi_matmul_store_avx512(__m512 (*sum)[2], float *tile, int64_t stride, bool accumulate) {
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i++) XDI_MATMUL_UNROLL
    for (int j = 0; j < 2; j++) {
        float *out = tile + i * stride + 16 * j;
        _mm512_storeu_ps(out, accumulate ? _mm512_add_ps(_mm512_loadu_ps(out), sum[i][j]) : sum[i][j]);
    }
}

/* 8 x 32: sixteen sums of sixteen lanes. */
__attribute__((target("avx512f"))) static void xdi_matmul_tile_avx512(int64_t k, const void *packed_a,
                                                                      const void *packed_b, float *tile,
                                                                      int64_t stride, bool accumulate) {
    const float *a = (const float *)packed_a, *b = (const float *)packed_b;
    __m512 sum[8][2];
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p++, a += 8, b += 32) {
        const __m512 left = _mm512_loadu_ps(b), right = _mm512_loadu_ps(b + 16);
        XDI_MATMUL_UNROLL
        for (int i = 0; i < 8; i++) {
            const __m512 factor = _mm512_set1_ps(a[i]);
            sum[i][0] = _mm512_fmadd_ps(factor, left, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(factor, right, sum[i][1]);
        }
    }
    xdi_matmul_store_avx512(sum, tile, stride, accumulate);
}

/* The same tile in pairs of bf16: twice the terms per instruction. */
__attribute__((target("avx512f,avx512bf16"))) static void
xdi_matmul_tile_bf16(int64_t k, const void *packed_a, const void *packed_b, float *tile, int64_t stride,
                     bool accumulate) {
    const int32_t *a = (const int32_t *)packed_a, *b = (const int32_t *)packed_b;
    __m512 sum[8][2];
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p += 2, a += 8, b += 32) {
        const __m512bh left = (__m512bh)_mm512_loadu_si512((const void *)b);
        const __m512bh right = (__m512bh)_mm512_loadu_si512((const void *)(b + 16));
        XDI_MATMUL_UNROLL
        for (int i = 0; i < 8; i++) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(a[i]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], factor, left);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], factor, right);
        }
    }
    xdi_matmul_store_avx512(sum, tile, stride, accumulate);
}

/* ---- packing ---- */

/* Lines whose terms are adjacent in memory are transposed in registers, eight lines by eight terms. */
#    define XDI_MATMUL_256 __attribute__((target("avx2")))
#    define XDI_MATMUL_256_INLINE static inline __attribute__((always_inline, target("avx2")))

/* Eight terms of a line as f32. `narrow`, the dtype, is a compile-time constant at every call. */
XDI_MATMUL_256_INLINE __m256 xdi_matmul_eight(const void *data, bool narrow, int64_t at) {
    if (!narrow) return _mm256_loadu_ps((const float *)data + at);
    const __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)data + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/* Transposes: x[i] = column i of the 8 x 8 numbers whose rows x held. */
XDI_MATMUL_256_INLINE void xdi_matmul_turn(__m256 *x) {
    __m256 pair[8], four[8];
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i += 4) XDI_MATMUL_UNROLL
    for (int j = 0; j < 2; j++) {
        four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
        four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
    }
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
    }
}

/* Prefetches the lines after those being transposed, when element p begins a cache line. */
static inline void xdi_matmul_fetch_lines(const xdi_matmul_lines *x, int64_t size, int64_t line, int64_t p) {
    if (p % (XDI_MATMUL_LINE / size) != 0 || line + 2 * XDI_MATMUL_AHEAD > x->lines) return;
    XDI_MATMUL_UNROLL
    for (int64_t i = 0; i < XDI_MATMUL_AHEAD; i++)
        xdi_matmul_fetch(x->data, (line + XDI_MATMUL_AHEAD + i) * x->line_stride + p, size);
}

/* `count` <= 8 lines from number `line` on. Eight lanes are stored all the same: what lies past the lines is overwritten by the
 * next term or, after the last term, is the panel's padding. */
XDI_MATMUL_256_INLINE void xdi_matmul_turn_lines(const xdi_matmul_lines *x, bool narrow, int64_t line,
                                                 int64_t count, int64_t width, float *packed) {
    int64_t p = 0;
    for (; p + 8 <= x->terms; p += 8) {
        __m256 block[8];
        xdi_matmul_fetch_lines(x, narrow ? 2 : 4, line, p);
        XDI_MATMUL_UNROLL
        for (int64_t i = 0; i < 8; i++)
            block[i] = i < count ? xdi_matmul_eight(x->data, narrow, (line + i) * x->line_stride + p)
                                 : _mm256_setzero_ps();
        xdi_matmul_turn(block);
        XDI_MATMUL_UNROLL
        for (int64_t i = 0; i < 8; i++) _mm256_storeu_ps(packed + (p + i) * width, block[i]);
    }
    for (; p < x->terms; p++)
        for (int64_t i = 0; i < count; i++)
            packed[p * width + i] = xdi_matmul_float(x, (line + i) * x->line_stride + p);
}

/* `narrow`, the dtype, is a compile-time constant at every call. */
XDI_MATMUL_256_INLINE void xdi_matmul_turned(const xdi_matmul_lines *x, bool narrow,
                                             const xdi_matmul_panels *to) {
    const int64_t width = to->width, group = width < 8 ? width : 8;
    char *panel = to->data;
    for (int64_t begin = 0; begin < x->lines; begin += width, panel += to->bytes)
        for (int64_t i = 0; i < width && begin + i < x->lines; i += group) {
            const int64_t count = xdi_matmul_smaller(group, x->lines - begin - i);
            xdi_matmul_turn_lines(x, narrow, begin + i, count, width, (float *)(void *)panel + i);
        }
}

/* Prefetches the terms after those being copied, of adjacent lines. */
static inline void xdi_matmul_fetch_terms(const xdi_matmul_lines *x, int64_t size, int64_t p) {
    const int64_t ahead = (p + XDI_MATMUL_AHEAD) * x->term_stride;
    if (p + XDI_MATMUL_AHEAD >= x->terms) return;
    for (int64_t line = 0; line < x->lines; line += XDI_MATMUL_LINE / size)
        xdi_matmul_fetch(x->data, ahead + line, size);
}

/* Adjacent lines, term by term. Eight lanes are stored also where a panel has six, as above. */
XDI_MATMUL_256_INLINE void xdi_matmul_beside(const xdi_matmul_lines *x, bool narrow,
                                             const xdi_matmul_panels *to) {
    const int64_t width = to->width, bytes = to->bytes, lines = x->lines, eights = width < 8 ? 8 : width;
    for (int64_t p = 0; p < x->terms; p++) {
        const int64_t from = p * x->term_stride;
        char *packed = to->data + p * width * 4;
        int64_t begin = 0, i;
        xdi_matmul_fetch_terms(x, narrow ? 2 : 4, p);
        for (; begin + eights <= lines; begin += width, packed += bytes)
            for (i = 0; i < eights; i += 8)
                _mm256_storeu_ps((float *)(void *)packed + i,
                                 xdi_matmul_eight(x->data, narrow, from + begin + i));
        for (; begin < lines; begin += width, packed += bytes) {
            for (i = 0; begin + i + 8 <= lines; i += 8)
                _mm256_storeu_ps((float *)(void *)packed + i,
                                 xdi_matmul_eight(x->data, narrow, from + begin + i));
            for (; i < width && begin + i < lines; i++)
                ((float *)(void *)packed)[i] = xdi_matmul_float(x, from + begin + i);
        }
    }
}

XDI_MATMUL_256 static void xdi_matmul_pack_turned(const xdi_matmul_lines *x, const xdi_matmul_panels *to) {
    if (x->dtype == XD_DTYPE_F32)
        xdi_matmul_turned(x, false, to);
    else
        xdi_matmul_turned(x, true, to);
}

XDI_MATMUL_256 static void xdi_matmul_pack_beside(const xdi_matmul_lines *x, const xdi_matmul_panels *to) {
    if (x->dtype == XD_DTYPE_F32)
        xdi_matmul_beside(x, false, to);
    else
        xdi_matmul_beside(x, true, to);
}

/* packed[p / 2 * width + line] holds terms p (low half) and p + 1 of a line; the term after the last is 0. Only the kernel that
 * multiplies pairs uses them, so a machine that gets here has wide vectors. */

#    define XDI_MATMUL_512 __attribute__((target("avx2,avx512f,avx512bw,avx512vl")))
#    define XDI_MATMUL_512_INLINE \
        static inline __attribute__((always_inline, target("avx2,avx512f,avx512bw,avx512vl")))

/* gcc 12 warns about the undefined operand of its own intrinsics. */
#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* Sixteen elements of two and of four bytes, zeros where the mask has none. Not every processor prefetches for a masked load,
 * so whole vectors use no mask. */
XDI_MATMUL_512_INLINE __m256i xdi_matmul_load_half(const uint16_t *x, __mmask16 lanes) {
    return lanes == 0xffffu ? _mm256_loadu_si256((const __m256i *)x) : _mm256_maskz_loadu_epi16(lanes, x);
}

XDI_MATMUL_512_INLINE __m512 xdi_matmul_load(const float *x, __mmask16 lanes) {
    return lanes == 0xffffu ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(lanes, x);
}

/* Sixteen numbers from `data` on as bf16, in the low halves of the lanes; only those of the mask are read. */
XDI_MATMUL_512_INLINE __m512i xdi_matmul_halves(const void *data, bool narrow, int64_t at, __mmask16 lanes) {
    if (narrow) return _mm512_cvtepu16_epi32(xdi_matmul_load_half((const uint16_t *)data + at, lanes));
    const __m512 x = xdi_matmul_load((const float *)data + at, lanes);
    const __m512i bits = _mm512_castps_si512(x), top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40)); /* a NaN stays one */
}

XDI_MATMUL_512_INLINE __mmask16 xdi_matmul_mask(int64_t left) {
    if (left <= 0) return 0;
    return left >= 16 ? (__mmask16)0xffffu : (__mmask16)((1u << left) - 1u);
}

/* Pairs of terms of sixteen adjacent lines. */
XDI_MATMUL_512_INLINE __m512i xdi_matmul_sixteen_pairs(const void *data, bool narrow, int64_t first,
                                                       int64_t second, __mmask16 low, __mmask16 high) {
    return _mm512_or_si512(xdi_matmul_halves(data, narrow, first, low),
                           _mm512_slli_epi32(xdi_matmul_halves(data, narrow, second, high), 16));
}

/* Adjacent lines, as xdi_matmul_beside. A vector goes to one panel, or half of it to each of two: a block with such narrow
 * panels has room for an even number of them. `narrow`, the dtype, is a compile-time constant. */
XDI_MATMUL_512_INLINE void xdi_matmul_pair_beside(const xdi_matmul_lines *x, bool narrow,
                                                  const xdi_matmul_panels *to) {
    const void *data = x->data;
    const int64_t width = to->width, bytes = to->bytes, lines = x->lines;
    const int64_t step = width < 16 ? 16 : width, jump = width < 16 ? 2 * bytes : bytes;
    for (int64_t p = 0; p < x->terms; p += 2) {
        const int64_t first = p * x->term_stride, second = first + x->term_stride;
        const bool both = p + 1 < x->terms;
        char *packed = to->data + p / 2 * width * 4;
        xdi_matmul_fetch_terms(x, narrow ? 2 : 4, p);
        xdi_matmul_fetch_terms(x, narrow ? 2 : 4, p + 1);
        for (int64_t begin = 0; begin < lines; begin += step, packed += jump)
            for (int64_t i = 0; i < step; i += 16) {
                const int64_t line = begin + i;
                const __mmask16 lanes = xdi_matmul_mask(lines - line);
                const __m512i pairs = both && line + 16 <= lines
                                          ? xdi_matmul_sixteen_pairs(data, narrow, first + line,
                                                                     second + line, 0xffffu, 0xffffu)
                                          : xdi_matmul_sixteen_pairs(data, narrow, first + line,
                                                                     second + line, lanes, both ? lanes : 0);
                if (width < 16) {
                    _mm256_storeu_si256((__m256i *)(void *)packed, _mm512_castsi512_si256(pairs));
                    _mm256_storeu_si256((__m256i *)(void *)(packed + bytes),
                                        _mm512_extracti64x4_epi64(pairs, 1));
                } else {
                    _mm512_storeu_si512((void *)(packed + i * 4), pairs);
                }
            }
    }
}

/* Eight pairs of a line, as lanes to transpose. */
XDI_MATMUL_512_INLINE __m256 xdi_matmul_eight_pairs(const void *data, bool narrow, int64_t at) {
    if (narrow) return _mm256_loadu_ps((const float *)(const void *)((const uint16_t *)data + at));
    return _mm256_castsi256_ps(_mm512_cvtepi32_epi16(xdi_matmul_halves(data, false, at, 0xffffu)));
}

static inline uint32_t xdi_matmul_half(const xdi_matmul_lines *x, int64_t at) {
    return x->dtype == XD_DTYPE_BF16 ? (uint32_t)((const uint16_t *)x->data)[at]
                                     : (uint32_t)xd_bits_to_bf16(((const float *)x->data)[at]);
}

/* The terms of a line from number p on, one pair after the other. */
static void xdi_matmul_pair_line(const xdi_matmul_lines *x, int64_t line, int64_t p, int64_t width,
                                 uint32_t *packed) {
    const int64_t from = line * x->line_stride, stride = x->term_stride;
    for (; p + 1 < x->terms; p += 2)
        packed[p / 2 * width] =
            xdi_matmul_half(x, from + p * stride) | xdi_matmul_half(x, from + (p + 1) * stride) << 16;
    if (p < x->terms) packed[p / 2 * width] = xdi_matmul_half(x, from + p * stride);
}

/* Eight lines whose terms are adjacent, transposed eight pairs at a time; returns the number of terms done. */
XDI_MATMUL_512_INLINE int64_t xdi_matmul_pair_turn(const xdi_matmul_lines *x, bool narrow, int64_t line,
                                                   int64_t width, uint32_t *packed) {
    const int64_t whole = x->terms / 16 * 16;
    for (int64_t p = 0; p < whole; p += 16, packed += 8 * width) {
        __m256 block[8];
        xdi_matmul_fetch_lines(x, narrow ? 2 : 4, line, p);
        XDI_MATMUL_UNROLL
        for (int64_t i = 0; i < 8; i++)
            block[i] = xdi_matmul_eight_pairs(x->data, narrow, (line + i) * x->line_stride + p);
        xdi_matmul_turn(block);
        XDI_MATMUL_UNROLL
        for (int64_t i = 0; i < 8; i++) _mm256_storeu_ps((float *)(void *)(packed + i * width), block[i]);
    }
    return whole;
}

/* Eight lines of a panel at a time. */
XDI_MATMUL_512_INLINE void xdi_matmul_pair_turned(const xdi_matmul_lines *x, bool narrow,
                                                  const xdi_matmul_panels *to) {
    char *panel = to->data;
    for (int64_t begin = 0; begin < x->lines; begin += to->width, panel += to->bytes)
        for (int64_t i = 0; i < to->width && begin + i < x->lines; i += 8) {
            const int64_t line = begin + i, lines = xdi_matmul_smaller(8, x->lines - line);
            uint32_t *packed = (uint32_t *)(void *)panel + i;
            const int64_t p = lines < 8 ? 0 : xdi_matmul_pair_turn(x, narrow, line, to->width, packed);
            for (int64_t j = 0; j < lines && p < x->terms; j++)
                xdi_matmul_pair_line(x, line + j, p, to->width, packed + j);
        }
}

static void xdi_matmul_pair_apart(const xdi_matmul_lines *x, const xdi_matmul_panels *to) {
    for (int64_t line = 0; line < x->lines; line++)
        xdi_matmul_pair_line(x, line, 0, to->width,
                             (uint32_t *)(void *)(to->data + line / to->width * to->bytes) +
                                 line % to->width);
}

XDI_MATMUL_512 static void xdi_matmul_pack_pairs(const xdi_matmul_lines *x, const xdi_matmul_panels *to) {
    const bool narrow = x->dtype == XD_DTYPE_BF16;
    if (x->term_stride == 1 && narrow)
        xdi_matmul_pair_turned(x, true, to);
    else if (x->term_stride == 1)
        xdi_matmul_pair_turned(x, false, to);
    else if (x->line_stride == 1 && narrow)
        xdi_matmul_pair_beside(x, true, to);
    else if (x->line_stride == 1)
        xdi_matmul_pair_beside(x, false, to);
    else
        xdi_matmul_pair_apart(x, to);
}

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

/* Widened or copied as f32, by whichever stride is 1. */
static void xdi_matmul_pack_wide(const xdi_matmul_lines *x, const xdi_matmul_panels *to) {
    if (x->term_stride == 1)
        xdi_matmul_pack_turned(x, to);
    else if (x->line_stride == 1)
        xdi_matmul_pack_beside(x, to);
    else
        xdi_matmul_pack_plain(x, to);
}

/* ---- levels ---- */

XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_avx2(bool bf16) {
    const xdi_matmul_kernel kernel = { xdi_matmul_tile_avx2, xdi_matmul_pack_wide, 6, 16, false };
    (void)bf16;
    return kernel;
}

XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_avx512(bool bf16) {
    const xdi_matmul_kernel kernel = { xdi_matmul_tile_avx512, xdi_matmul_pack_wide, 8, 32, false };
    (void)bf16;
    return kernel;
}

XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_avx512_bf16(bool bf16) {
    const xdi_matmul_kernel kernel = { xdi_matmul_tile_bf16, xdi_matmul_pack_pairs, 8, 32, true };
    return bf16 ? kernel : xdi_matmul_kernel_avx512(false);
}
#endif
