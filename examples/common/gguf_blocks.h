/* gguf_blocks.h - the quantised blocks of GGUF files: integers of a few bits with scales, and for some a minimum, in f16. Part of
 * gguf.c. All numbers are little-endian. */
#ifndef GGUF_BLOCKS_H
#define GGUF_BLOCKS_H

#include "gguf.h"
#include "xdistill.h"

enum { GGUF_SMALL = 32, GGUF_LARGE = 256 }; /* elements of a block */

static inline float gguf_half(const uint8_t *from) {
    return xd_f32_from_f16((uint16_t)(from[0] | from[1] << 8));
}

static inline int gguf_signed(uint8_t byte) {
    return byte < 128 ? byte : byte - 256;
}

/* Sixteen bytes hold the low halves' 16 elements of a block, then the high halves' 16. */
static inline void gguf_nibbles(const uint8_t *packed, int count, float low_scale, float low,
                                float high_scale, float high, float *out) {
    for (int i = 0; i < count; i++) {
        out[i] = (float)(packed[i] & 15) * low_scale + low;
        out[i + count] = (float)(packed[i] >> 4) * high_scale + high;
    }
}

/* Scale and minimum `j` of eight each, six bits wide, in 12 bytes. */
static inline void gguf_six_bits(const uint8_t *packed, int j, int *scale, int *minimum) {
    if (j < 4) {
        *scale = packed[j] & 63;
        *minimum = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        *minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
    }
}

/* f16 scale, f16 scale of minima, 12 bytes of both, 128 bytes of elements: 32 low nibbles, then their high ones. */
static inline void gguf_unpack_q4_k(const uint8_t *from, float *out) {
    const float scale = gguf_half(from), least = gguf_half(from + 2);
    const uint8_t *packed = from + 16;
    for (int part = 0; part < 4; part++, packed += 32, out += 64) {
        int a, b, c, d;
        gguf_six_bits(from + 4, 2 * part, &a, &b);
        gguf_six_bits(from + 4, 2 * part + 1, &c, &d);
        gguf_nibbles(packed, 32, scale * (float)a, -least * (float)b, scale * (float)c, -least * (float)d,
                     out);
    }
}

/* 128 bytes of low nibbles, 64 bytes of two higher bits, 16 signed scales of 16 elements each, f16 scale of those. */
static inline void gguf_unpack_q6_k(const uint8_t *from, float *out) {
    const float scale = gguf_half(from + 208);
    for (int i = 0; i < GGUF_LARGE; i++) {
        const int half = i / 128, within = i % 128, quarter = within / 32, at = within % 32;
        const uint8_t low = from[64 * half + at + 32 * (quarter % 2)], high = from[128 + 32 * half + at];
        const int value = (quarter < 2 ? low & 15 : low >> 4) | (high >> 2 * quarter & 3) << 4;
        out[i] = scale * (float)gguf_signed(from[192 + i / 16]) * (float)(value - 32);
    }
}

static inline void gguf_unpack_block(uint32_t type, const uint8_t *from, float *out) {
    const float scale = gguf_half(from), least = gguf_half(from + 2);
    switch (type) {
    case GGUF_Q4_0: gguf_nibbles(from + 2, 16, scale, -8.0f * scale, scale, -8.0f * scale, out); break;
    case GGUF_Q4_1: gguf_nibbles(from + 4, 16, scale, least, scale, least, out); break;
    case GGUF_Q8_0:
        for (int i = 0; i < GGUF_SMALL; i++) out[i] = (float)gguf_signed(from[2 + i]) * scale;
        break;
    case GGUF_Q4_K: gguf_unpack_q4_k(from, out); break;
    default: gguf_unpack_q6_k(from, out); break;
    }
}

#endif /* GGUF_BLOCKS_H */
