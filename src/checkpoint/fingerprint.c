/* Fingerprints of tensors: sums, so that each rank forms that of its elements alone. */

#include "checkpoint/internal.h"

#include <string.h>

#if defined(XDI_X86)
#    include <immintrin.h>
#endif

/* The golden ratio, and the factors of a finaliser of 64 bits (splitmix64). */
#define XDI_FINGERPRINT_KEY UINT64_C(0x9e3779b97f4a7c15)
#define XDI_FINGERPRINT_FIRST UINT64_C(0xbf58476d1ce4e5b9)
#define XDI_FINGERPRINT_SECOND UINT64_C(0x94d049bb133111eb)

/* Every bit of the input changes about half of the output's. */
static uint64_t xdi_fingerprint_mix(uint64_t x) {
    x = (x ^ x >> 30) * XDI_FINGERPRINT_FIRST;
    x = (x ^ x >> 27) * XDI_FINGERPRINT_SECOND;
    return x ^ x >> 31;
}

static uint64_t xdi_fingerprint_bits(const unsigned char *data, size_t size) {
    uint16_t half;
    uint32_t word;
    uint64_t twice;
    switch (size) {
    case 1: return *data;
    case 2: memcpy(&half, data, sizeof half); return half;
    case 4: memcpy(&word, data, sizeof word); return word;
    default: memcpy(&twice, data, sizeof twice); return twice;
    }
}

static uint64_t xdi_fingerprint_plain(const unsigned char *bytes, size_t size, int64_t first, int64_t count) {
    uint64_t sum = 0, key = ((uint64_t)first + 1) * XDI_FINGERPRINT_KEY;
    for (int64_t i = 0; i < count; i++, bytes += size, key += XDI_FINGERPRINT_KEY)
        sum += xdi_fingerprint_mix(xdi_fingerprint_bits(bytes, size) + key);
    return sum;
}

/* ---- four elements at a time ---- */

#if defined(XDI_X86)

#    define XDI_FINGERPRINT_AVX2 __attribute__((target("avx2")))
#    define XDI_FINGERPRINT_INLINE static inline __attribute__((always_inline, target("avx2")))

/* There is no product of 64 bits: that of the low halves, and the two that reach into the high one. */
XDI_FINGERPRINT_INLINE __m256i xdi_fingerprint_times(__m256i x, uint64_t factor) {
    const __m256i low = _mm256_set1_epi64x((int64_t)(factor & 0xffffffffu)),
                  high = _mm256_set1_epi64x((int64_t)(factor >> 32));
    const __m256i cross =
        _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), low), _mm256_mul_epu32(x, high));
    return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(cross, 32));
}

XDI_FINGERPRINT_INLINE __m256i xdi_fingerprint_mix_4(__m256i x) {
    x = xdi_fingerprint_times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), XDI_FINGERPRINT_FIRST);
    x = xdi_fingerprint_times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), XDI_FINGERPRINT_SECOND);
    return _mm256_xor_si256(x, _mm256_srli_epi64(x, 31));
}

/* The bits of four elements. */
XDI_FINGERPRINT_INLINE __m256i xdi_fingerprint_load(const unsigned char *p, size_t size) {
    if (size == 1) {
        int32_t bytes;
        memcpy(&bytes, p, sizeof bytes);
        return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    }
    if (size == 2) return _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(const void *)p));
    if (size == 4) return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

/* Whole fours in two chains; returns how many elements that were. `size` is a constant where this is called. */
XDI_FINGERPRINT_INLINE int64_t xdi_fingerprint_fours(const unsigned char *p, size_t size, int64_t first,
                                                     int64_t count, uint64_t *sum) {
    const uint64_t k = XDI_FINGERPRINT_KEY, start = ((uint64_t)first + 1) * k;
    __m256i key = _mm256_set_epi64x((int64_t)(start + 3 * k), (int64_t)(start + 2 * k), (int64_t)(start + k),
                                    (int64_t)start);
    const __m256i four = _mm256_set1_epi64x((int64_t)(4 * k));
    __m256i a = _mm256_setzero_si256(), b = a;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8, p += 8 * size) {
        const __m256i next = _mm256_add_epi64(key, four);
        a = _mm256_add_epi64(a, xdi_fingerprint_mix_4(_mm256_add_epi64(xdi_fingerprint_load(p, size), key)));
        b = _mm256_add_epi64(
            b, xdi_fingerprint_mix_4(_mm256_add_epi64(xdi_fingerprint_load(p + 4 * size, size), next)));
        key = _mm256_add_epi64(next, four);
    }
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)(void *)lanes, _mm256_add_epi64(a, b));
    *sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
    return i;
}

XDI_FINGERPRINT_AVX2 static int64_t xdi_fingerprint_avx2(const unsigned char *p, size_t size, int64_t first,
                                                         int64_t count, uint64_t *sum) {
    switch (size) {
    case 1: return xdi_fingerprint_fours(p, 1, first, count, sum);
    case 2: return xdi_fingerprint_fours(p, 2, first, count, sum);
    case 4: return xdi_fingerprint_fours(p, 4, first, count, sum);
    default: return xdi_fingerprint_fours(p, 8, first, count, sum);
    }
}

/* ---- eight elements at a time ---- */

/* gcc 12 warns about the undefined operand of its own intrinsics. */
#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

#    define XDI_FINGERPRINT_AVX512 __attribute__((target("avx2,avx512f,avx512dq")))
#    define XDI_FINGERPRINT_INLINE_512 \
        static inline __attribute__((always_inline, target("avx2,avx512f,avx512dq")))

/* sum, with each of its eight lanes x's lane added after it was mixed. */
XDI_FINGERPRINT_INLINE_512 __m512i xdi_fingerprint_add_8(__m512i sum, __m512i x) {
    const __m512i first = _mm512_set1_epi64((int64_t)XDI_FINGERPRINT_FIRST),
                  second = _mm512_set1_epi64((int64_t)XDI_FINGERPRINT_SECOND);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), first);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), second);
    return _mm512_add_epi64(sum, _mm512_xor_si512(x, _mm512_srli_epi64(x, 31)));
}

XDI_FINGERPRINT_INLINE_512 __m512i xdi_fingerprint_load_8(const unsigned char *p, size_t size) {
    if (size == 1) return _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(const void *)p));
    if (size == 2) return _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)(const void *)p));
    if (size == 4) return _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_loadu_si512(p);
}

/* Whole eights in two chains, as xdi_fingerprint_fours. */
XDI_FINGERPRINT_INLINE_512 int64_t xdi_fingerprint_eights(const unsigned char *p, size_t size, int64_t first,
                                                          int64_t count, uint64_t *sum) {
    const uint64_t k = XDI_FINGERPRINT_KEY;
    const __m512i eight = _mm512_set1_epi64((int64_t)(8 * k));
    uint64_t lanes[8];
    for (int i = 0; i < 8; i++) lanes[i] = ((uint64_t)first + 1 + (uint64_t)i) * k;
    __m512i key = _mm512_loadu_si512(lanes), a = _mm512_setzero_si512(), b = a;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16, p += 16 * size) {
        const __m512i next = _mm512_add_epi64(key, eight);
        a = xdi_fingerprint_add_8(a, _mm512_add_epi64(xdi_fingerprint_load_8(p, size), key));
        b = xdi_fingerprint_add_8(b, _mm512_add_epi64(xdi_fingerprint_load_8(p + 8 * size, size), next));
        key = _mm512_add_epi64(next, eight);
    }
    *sum = (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(a, b));
    return i;
}

XDI_FINGERPRINT_AVX512 static int64_t xdi_fingerprint_avx512(const unsigned char *p, size_t size,
                                                             int64_t first, int64_t count, uint64_t *sum) {
    switch (size) {
    case 1: return xdi_fingerprint_eights(p, 1, first, count, sum);
    case 2: return xdi_fingerprint_eights(p, 2, first, count, sum);
    case 4: return xdi_fingerprint_eights(p, 4, first, count, sum);
    default: return xdi_fingerprint_eights(p, 8, first, count, sum);
    }
}

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

/* The first elements of all, in a number that it returns, where the level has code for them. */
static int64_t xdi_fingerprint_fast(xd_cpu_level level, const unsigned char *p, size_t size, int64_t first,
                                    int64_t count, uint64_t *sum) {
    *sum = 0;
    if (level == XD_CPU_BEST)
        level = XD_CPU_AVX512; /* xd_cpu_supports may ask the processor, which takes microseconds */
    if (count < 8 || level < XD_CPU_AVX2) return 0;
    __builtin_cpu_init();
    if (level >= XD_CPU_AVX512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        return xdi_fingerprint_avx512(p, size, first, count, sum);
    return __builtin_cpu_supports("avx2") ? xdi_fingerprint_avx2(p, size, first, count, sum) : 0;
}

#else

static int64_t xdi_fingerprint_fast(xd_cpu_level level, const unsigned char *p, size_t size, int64_t first,
                                    int64_t count, uint64_t *sum) {
    (void)level, (void)p, (void)size, (void)first, (void)count;
    *sum = 0;
    return 0;
}

#endif

XD_PRIVATE uint64_t xdi_fingerprint_level(xd_cpu_level level, const void *data, size_t size, int64_t first,
                                          int64_t count) {
    const unsigned char *bytes = (const unsigned char *)data;
    uint64_t sum;
    const int64_t done = xdi_fingerprint_fast(level, bytes, size, first, count, &sum);
    return sum + xdi_fingerprint_plain(bytes + (size_t)done * size, size, first + done, count - done);
}

XD_PRIVATE uint64_t xdi_fingerprint(const void *data, size_t size, int64_t first, int64_t count) {
    return xdi_fingerprint_level(XD_CPU_BEST, data, size, first, count);
}
