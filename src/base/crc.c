/* CRC-32C: the remainder of the data, as a polynomial over the field of two elements, divided by XDI_CRC_POLYNOMIAL. The
 * registers hold polynomials with their bits reversed: bit 31 is the coefficient of 1, and a shift to the right multiplies
 * by x. */

#include "base/crc.h"
#include "base/internal.h"

#include <string.h>

#if defined(XDI_X86)
#    include <nmmintrin.h>
#    define XDI_CRC_INSTRUCTION __attribute__((target("sse4.2")))
#    define XDI_CRC_8(crc, bytes) _mm_crc32_u64(crc, bytes)
#    define XDI_CRC_1(crc, byte) _mm_crc32_u8(crc, byte)
typedef uint64_t xdi_crc_register;
#elif defined(__ARM_FEATURE_CRC32) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#    include <arm_acle.h>
#    define XDI_CRC_INSTRUCTION
#    define XDI_CRC_8(crc, bytes) __crc32cd(crc, bytes)
#    define XDI_CRC_1(crc, byte) __crc32cb(crc, byte)
typedef uint32_t xdi_crc_register;
#endif

/* 0x1EDC6F41 with its bits reversed. */
#define XDI_CRC_POLYNOMIAL 0x82f63b78u

static uint32_t xdi_crc_times_x(uint32_t a) {
    return a >> 1 ^ (XDI_CRC_POLYNOMIAL & (0u - (a & 1)));
}

/* Eight steps of the division: the effect of the low byte of crc on the other bytes. */
static uint32_t xdi_crc_byte(uint32_t crc) {
    for (int bit = 0; bit < 8; bit++) crc = xdi_crc_times_x(crc);
    return crc;
}

static uint32_t xdi_crc_plain(uint32_t c, const unsigned char *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) c = c >> 8 ^ xdi_crc_byte((c ^ p[i]) & 255);
    return c;
}

/* ---- the effect of zeros: multiplication by a power of x ---- */

static uint32_t xdi_crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & (0u - (a >> bit & 1));
        b = xdi_crc_times_x(b);
    }
    return product;
}

/* x to the power of 2^n modulo the polynomial. That is x + 1 times a primitive one of degree 31, so x has the order 2^31 - 1
 * and the list begins again with n = 31. */
static uint32_t xdi_crc_power(int n) {
    enum { PERIOD = 31 };
    static const uint32_t powers[PERIOD] = {
        0x40000000u, 0x20000000u, 0x08000000u, 0x00800000u, 0x00008000u, 0x82f63b78u, 0x6ea2d55cu,
        0x18b8ea18u, 0x510ac59au, 0xb82be955u, 0xb8fdb1e7u, 0x88e56f72u, 0x74c360a4u, 0xe4172b16u,
        0x0d65762au, 0x35d73a62u, 0x28461564u, 0xbf455269u, 0xe2ea32dcu, 0xfe7740e6u, 0xf946610bu,
        0x3c204f8fu, 0x538586e3u, 0x59726915u, 0x734d5309u, 0xbc1ac763u, 0x7d0722ccu, 0xd289cabeu,
        0xe94ca9bcu, 0x05b74f3fu, 0xa51e1f42u,
    };
    return powers[n % PERIOD];
}

XD_PRIVATE uint32_t xdi_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
    for (int n = 3; length_b > 0; n++, length_b >>= 1) /* eight bits a byte */
        if (length_b & 1) crc_a = xdi_crc_multiply(xdi_crc_power(n), crc_a);
    return crc_a ^ crc_b;
}

/* ---- at memory speed ---- */

#if defined(XDI_CRC_INSTRUCTION)

static uint64_t xdi_crc_load(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Three streams of 2^shift bytes each: the instruction needs three cycles, but one can begin in every cycle. The first two
 * are moved on by the bytes behind them. Returns the number of bytes processed. */
XDI_CRC_INSTRUCTION static size_t xdi_crc_streams(uint32_t *crc, const unsigned char *p, size_t bytes,
                                                  int shift) {
    const size_t step = (size_t)1 << shift;
    const uint32_t far = xdi_crc_power(shift + 4), near = xdi_crc_power(shift + 3);
    size_t at = 0;
    for (; bytes - at >= 3 * step; at += 3 * step) {
        const unsigned char *q = p + at;
        xdi_crc_register a = *crc, b = 0, c = 0;
        for (size_t i = 0; i < step; i += 8) {
            a = XDI_CRC_8(a, xdi_crc_load(q + i));
            b = XDI_CRC_8(b, xdi_crc_load(q + step + i));
            c = XDI_CRC_8(c, xdi_crc_load(q + 2 * step + i));
        }
        *crc = xdi_crc_multiply(far, (uint32_t)a) ^ xdi_crc_multiply(near, (uint32_t)b) ^ (uint32_t)c;
    }
    return at;
}

XDI_CRC_INSTRUCTION static uint32_t xdi_crc_instruction(uint32_t c, const unsigned char *p, size_t bytes) {
    static const int shifts[] = { 14, 11, 9 }; /* where the multiplications cost little; then one stream */
    size_t at = 0;
    for (int i = 0; i < 3; i++)
        if (bytes - at >= (size_t)3 << shifts[i]) at += xdi_crc_streams(&c, p + at, bytes - at, shifts[i]);
    xdi_crc_register one = c;
    for (; bytes - at >= 8; at += 8) one = XDI_CRC_8(one, xdi_crc_load(p + at));
    c = (uint32_t)one;
    for (; at < bytes; at++) c = XDI_CRC_1(c, p[at]);
    return c;
}

#endif

#if !defined(XDI_CRC_INSTRUCTION) || defined(XDI_X86)

/* Table k has the effect of a byte at a distance of k bytes. */
static void xdi_crc_tables(uint32_t table[8][256]) {
    table[0][0] = 0;
    table[0][128] = XDI_CRC_POLYNOMIAL;
    for (int i = 64; i > 0; i /= 2) table[0][i] = xdi_crc_times_x(table[0][2 * i]);
    for (int i = 2; i < 256; i *= 2) /* the effects of bits add */
        for (int k = 1; k < i; k++) table[0][i + k] = table[0][i] ^ table[0][k];
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
}

static uint32_t xdi_crc_load_u32(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* The tables are on the stack, so that threads share no initialisation. */
static uint32_t xdi_crc_portable(uint32_t c, const unsigned char *p, size_t bytes) {
    enum { LONG = 256 }; /* bytes that are worth building the tables for */
    uint32_t table[8][256];
    if (bytes < LONG) return xdi_crc_plain(c, p, bytes);
    xdi_crc_tables(table);
    const size_t whole = bytes - bytes % 8;
    for (size_t i = 0; i < whole; i += 8) {
        const uint32_t low = c ^ xdi_crc_load_u32(p + i), high = xdi_crc_load_u32(p + i + 4);
        c = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
            table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^
            table[0][high >> 24];
    }
    return xdi_crc_plain(c, p + whole, bytes - whole);
}

#endif

/* ---- by level ---- */

typedef uint32_t (*xdi_crc_code)(uint32_t c, const unsigned char *p, size_t bytes);

#if defined(XDI_X86)
/* An x86 processor without AVX2 may have the instruction too. */
static xdi_crc_code xdi_crc_best(xd_cpu_level level) {
    __builtin_cpu_init();
    const bool has = __builtin_cpu_supports("sse4.2") && (level == XD_CPU_BEST || xd_cpu_supports(level));
    return has && (level == XD_CPU_BEST || level >= XD_CPU_AVX2) ? xdi_crc_instruction : xdi_crc_portable;
}
#elif defined(XDI_CRC_INSTRUCTION)
static xdi_crc_code xdi_crc_best(xd_cpu_level level) {
    (void)level;
    return xdi_crc_instruction;
}
#else
static xdi_crc_code xdi_crc_best(xd_cpu_level level) {
    (void)level;
    return xdi_crc_portable;
}
#endif

XD_API uint32_t xd_crc32c_level(xd_cpu_level level, uint32_t crc, const void *data, size_t bytes) {
    const xdi_crc_code code = level == XD_CPU_PLAIN ? xdi_crc_plain : xdi_crc_best(level);
    return ~code(~crc, (const unsigned char *)data, bytes);
}

XD_API uint32_t xd_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return xd_crc32c_level(XD_CPU_BEST, crc, data, bytes);
}
