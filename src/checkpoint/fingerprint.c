/* Fingerprints of tensors: sums, so that each rank forms that of its elements alone. */

#include "base/crc.h"
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

/* ---- four at a time, and the checksum of their bytes ---- */

/* Checksums are formed by one unit of a processor and fingerprints by others, so both of the same bytes take little longer than
 * one. Three streams, as in crc.c, of XDI_CHECKED bytes each; a line of each in turn. */
enum { XDI_CHECKED = 8 << 10, XDI_CHECKED_LINE = 64 };

typedef struct xdi_checked_crc {
    uint64_t a, b,
        c; /* of the streams: registers of the checksum, which begin with ones and are inverted in the end */
} xdi_checked_crc;

XDI_FINGERPRINT_INLINE uint64_t xdi_checked_load(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

XDI_FINGERPRINT_INLINE xdi_checked_crc xdi_checked_line(xdi_checked_crc crc, const unsigned char *p) {
    for (int i = 0; i < XDI_CHECKED_LINE; i += 8, p += 8) {
        crc.a = _mm_crc32_u64(crc.a, xdi_checked_load(p));
        crc.b = _mm_crc32_u64(crc.b, xdi_checked_load(p + XDI_CHECKED));
        crc.c = _mm_crc32_u64(crc.c, xdi_checked_load(p + 2 * XDI_CHECKED));
    }
    return crc;
}

static xdi_checked_crc xdi_checked_begin(uint32_t crc) {
    const xdi_checked_crc start = { ~crc, UINT32_MAX, UINT32_MAX };
    return start;
}

static uint32_t xdi_checked_end(xdi_checked_crc crc) {
    const uint32_t two = xdi_crc32c_combine(~(uint32_t)crc.a, ~(uint32_t)crc.b, XDI_CHECKED);
    return xdi_crc32c_combine(two, ~(uint32_t)crc.c, XDI_CHECKED);
}

/* sum, with a line's elements added; *key moves on. */
XDI_FINGERPRINT_INLINE __m256i xdi_checked_add_4(__m256i sum, const unsigned char *p, size_t size,
                                                 __m256i *key) {
    const __m256i four = _mm256_set1_epi64x((int64_t)(4 * XDI_FINGERPRINT_KEY));
    for (size_t i = 0; i < (size_t)XDI_CHECKED_LINE; i += 4 * size) {
        const __m256i x = _mm256_add_epi64(xdi_fingerprint_load(p + i, size), *key);
        sum = _mm256_add_epi64(sum, xdi_fingerprint_mix_4(x));
        *key = _mm256_add_epi64(*key, four);
    }
    return sum;
}

/* Three streams at p, whose first element has the index `first`. */
XDI_FINGERPRINT_INLINE uint64_t xdi_checked_fours(const unsigned char *p, size_t size, int64_t first,
                                                  uint32_t *checksum) {
    const uint64_t k = XDI_FINGERPRINT_KEY, start = ((uint64_t)first + 1) * k;
    const __m256i stream = _mm256_set1_epi64x((int64_t)((uint64_t)XDI_CHECKED / size * k));
    __m256i key_a = _mm256_set_epi64x((int64_t)(start + 3 * k), (int64_t)(start + 2 * k),
                                      (int64_t)(start + k), (int64_t)start);
    __m256i key_b = _mm256_add_epi64(key_a, stream), key_c = _mm256_add_epi64(key_b, stream);
    __m256i a = _mm256_setzero_si256(), b = a, c = a;
    xdi_checked_crc crc = xdi_checked_begin(*checksum);
    for (int i = 0; i < XDI_CHECKED; i += XDI_CHECKED_LINE, p += XDI_CHECKED_LINE) {
        crc = xdi_checked_line(crc, p);
        a = xdi_checked_add_4(a, p, size, &key_a);
        b = xdi_checked_add_4(b, p + XDI_CHECKED, size, &key_b);
        c = xdi_checked_add_4(c, p + 2 * XDI_CHECKED, size, &key_c);
    }
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)(void *)lanes, _mm256_add_epi64(a, _mm256_add_epi64(b, c)));
    *checksum = xdi_checked_end(crc);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

XDI_FINGERPRINT_AVX2 static uint64_t xdi_checked_avx2(const unsigned char *p, size_t size, int64_t first,
                                                      uint32_t *checksum) {
    switch (size) {
    case 1: return xdi_checked_fours(p, 1, first, checksum);
    case 2: return xdi_checked_fours(p, 2, first, checksum);
    case 4: return xdi_checked_fours(p, 4, first, checksum);
    default: return xdi_checked_fours(p, 8, first, checksum);
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

/* The sum of the lanes, without gcc's own of signed numbers, where a sanitizer finds that they overflow. */
XDI_FINGERPRINT_INLINE_512 uint64_t xdi_fingerprint_sum_8(__m512i sum) {
    uint64_t lanes[8], total = 0;
    _mm512_storeu_si512(lanes, sum);
    for (int i = 0; i < 8; i++) total += lanes[i];
    return total;
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
    *sum = xdi_fingerprint_sum_8(_mm512_add_epi64(a, b));
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

/* ---- eight at a time, and the checksum of their bytes ---- */

XDI_FINGERPRINT_INLINE_512 __m512i xdi_checked_add_8(__m512i sum, const unsigned char *p, size_t size,
                                                     __m512i *key) {
    const __m512i eight = _mm512_set1_epi64((int64_t)(8 * XDI_FINGERPRINT_KEY));
    for (size_t i = 0; i < (size_t)XDI_CHECKED_LINE; i += 8 * size) {
        sum = xdi_fingerprint_add_8(sum, _mm512_add_epi64(xdi_fingerprint_load_8(p + i, size), *key));
        *key = _mm512_add_epi64(*key, eight);
    }
    return sum;
}

XDI_FINGERPRINT_INLINE_512 uint64_t xdi_checked_eights(const unsigned char *p, size_t size, int64_t first,
                                                       uint32_t *checksum) {
    const uint64_t k = XDI_FINGERPRINT_KEY;
    const __m512i stream = _mm512_set1_epi64((int64_t)((uint64_t)XDI_CHECKED / size * k));
    uint64_t lanes[8];
    for (int i = 0; i < 8; i++) lanes[i] = ((uint64_t)first + 1 + (uint64_t)i) * k;
    __m512i key_a = _mm512_loadu_si512(lanes), key_b = _mm512_add_epi64(key_a, stream),
            key_c = _mm512_add_epi64(key_b, stream);
    __m512i a = _mm512_setzero_si512(), b = a, c = a;
    xdi_checked_crc crc = xdi_checked_begin(*checksum);
    for (int i = 0; i < XDI_CHECKED; i += XDI_CHECKED_LINE, p += XDI_CHECKED_LINE) {
        crc = xdi_checked_line(crc, p);
        a = xdi_checked_add_8(a, p, size, &key_a);
        b = xdi_checked_add_8(b, p + XDI_CHECKED, size, &key_b);
        c = xdi_checked_add_8(c, p + 2 * XDI_CHECKED, size, &key_c);
    }
    *checksum = xdi_checked_end(crc);
    return xdi_fingerprint_sum_8(_mm512_add_epi64(a, _mm512_add_epi64(b, c)));
}

XDI_FINGERPRINT_AVX512 static uint64_t xdi_checked_avx512(const unsigned char *p, size_t size, int64_t first,
                                                          uint32_t *checksum) {
    switch (size) {
    case 1: return xdi_checked_eights(p, 1, first, checksum);
    case 2: return xdi_checked_eights(p, 2, first, checksum);
    case 4: return xdi_checked_eights(p, 4, first, checksum);
    default: return xdi_checked_eights(p, 8, first, checksum);
    }
}

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

/* The code for a level: AVX512, AVX2 or PLAIN. Asks what the compiler's run-time library knows, since xd_cpu_supports may ask the
 * processor, which takes microseconds. */
static xd_cpu_level xdi_fingerprint_code(xd_cpu_level level) {
    const bool best = level == XD_CPU_BEST;
    __builtin_cpu_init();
    if ((best || level >= XD_CPU_AVX512) && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512dq"))
        return XD_CPU_AVX512;
    return (best || level >= XD_CPU_AVX2) && __builtin_cpu_supports("avx2") ? XD_CPU_AVX2 : XD_CPU_PLAIN;
}

/* The first elements of all, in a number that it returns, where the level has code for them. */
static int64_t xdi_fingerprint_fast(xd_cpu_level level, const unsigned char *p, size_t size, int64_t first,
                                    int64_t count, uint64_t *sum) {
    const xd_cpu_level code = count < 8 ? XD_CPU_PLAIN : xdi_fingerprint_code(level);
    *sum = 0;
    if (code == XD_CPU_PLAIN) return 0;
    return code == XD_CPU_AVX512 ? xdi_fingerprint_avx512(p, size, first, count, sum)
                                 : xdi_fingerprint_avx2(p, size, first, count, sum);
}

/* Likewise, with their bytes in the checksum. */
static int64_t xdi_checked_fast(xd_cpu_level level, const xdi_checked_data *d, uint64_t *sum, uint32_t *crc) {
    const int64_t turn = (int64_t)((size_t)(3 * XDI_CHECKED) / d->size);
    const xd_cpu_level code = d->count < turn ? XD_CPU_PLAIN : xdi_fingerprint_code(level);
    int64_t done = 0;
    *sum = 0;
    for (; code != XD_CPU_PLAIN && d->count - done >= turn; done += turn) {
        const unsigned char *p = (const unsigned char *)d->data + (size_t)done * d->size;
        *sum += code == XD_CPU_AVX512 ? xdi_checked_avx512(p, d->size, d->first + done, crc)
                                      : xdi_checked_avx2(p, d->size, d->first + done, crc);
    }
    return done;
}

#else

static int64_t xdi_fingerprint_fast(xd_cpu_level level, const unsigned char *p, size_t size, int64_t first,
                                    int64_t count, uint64_t *sum) {
    (void)level, (void)p, (void)size, (void)first, (void)count;
    *sum = 0;
    return 0;
}

static int64_t xdi_checked_fast(xd_cpu_level level, const xdi_checked_data *d, uint64_t *sum, uint32_t *crc) {
    (void)level, (void)d, (void)crc;
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

XD_PRIVATE uint64_t xdi_checked_level(xd_cpu_level level, const xdi_checked_data *d, uint32_t *crc) {
    uint64_t sum;
    const int64_t done = xdi_checked_fast(level, d, &sum, crc), left = d->count - done;
    const unsigned char *rest = (const unsigned char *)d->data + (size_t)done * d->size;
    *crc = xd_crc32c_level(level, *crc, rest, (size_t)left * d->size);
    return sum + xdi_fingerprint_level(level, rest, d->size, d->first + done, left);
}

XD_PRIVATE uint64_t xdi_checked(const xdi_checked_data *d, uint32_t *crc) {
    return xdi_checked_level(XD_CPU_BEST, d, crc);
}
