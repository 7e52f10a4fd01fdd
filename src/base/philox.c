/* Random numbers from counters. */

#include "base/philox.h"

#include <math.h>
#include <string.h>

XD_API void xd_philox_block(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xd2511f53u * c0;
        const uint64_t b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u; /* golden ratio */
        k1 += 0xbb67ae85u; /* sqrt(3) - 1 */
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

XD_API void xd_philox_counter(const xd_philox *p, uint64_t block, uint32_t counter[4]) {
    counter[0] = (uint32_t)block;
    counter[1] = (uint32_t)(block >> 32 & 0xffu) | (uint32_t)p->stream << 8 | (uint32_t)p->micro << 16;
    counter[2] = p->sample;
    counter[3] = p->step;
}

static void xdi_philox_words(const xd_philox *p, int64_t block, uint32_t words[4]) {
    const uint32_t key[2] = { (uint32_t)p->seed, (uint32_t)(p->seed >> 32) };
    uint32_t counter[4];
    xd_philox_counter(p, (uint64_t)block, counter);
    xd_philox_block(counter, key, words);
}

XD_API uint32_t xd_philox_word(const xd_philox *p, int64_t element) {
    uint32_t words[4];
    xdi_philox_words(p, element / 4, words);
    return words[element % 4];
}

XD_API double xd_philox_uniform_f64(const xd_philox *p, int64_t block) {
    uint32_t words[4];
    xdi_philox_words(p, block, words);
    const uint64_t bits = (uint64_t)words[1] << 32 | words[0];
    /* Odd multiples of 2^-53: 52 bits and the one below them, exact, never 0 or 1. */
    return (double)((bits >> 12) * 2u + 1u) * (1.0 / 9007199254740992.0);
}

/* (r >> 9) 2^-23 + 2^-24, exact. */
static float xdi_philox_uniform(uint32_t word) {
    return (float)((word >> 9) * 2u + 1u) * (1.0f / 16777216.0f);
}

/* The bits of what follows are promised: products are added to other terms by fmaf only, so that it does not depend on the
 * compiler which of them are fused. Coefficients: interpolation at Chebyshev nodes, rounded to f32. */

/* ln(x) for x in (0, 1), normal: x = 2^e m with m in [sqrt(1/2), sqrt(2)), f = m - 1,
 * ln(m) = f - f^2 / 2 + f^3 P(f). Error below 1 unit in the last place. */
static float xdi_philox_log(float x) {
    static const float p[] = { 0.333333313f,  -0.24999997f, 0.200007156f,  -0.166678026f, 0.142490581f,
                               -0.124256872f, 0.116854198f, -0.114797339f, 0.0697161183f };
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t shifted = bits - 0x3f3504f3u; /* sqrt(1/2): exponents now change there */
    const float e = (float)((int32_t)shifted >> 23);
    bits = (shifted & 0x7fffffu) + 0x3f3504f3u;
    float m;
    memcpy(&m, &bits, sizeof m);
    const float f = m - 1.0f;
    const float square = f * f;
    float poly = p[8];
    for (int i = 7; i >= 0; i--) poly = fmaf(poly, f, p[i]);
    float y = fmaf(square, f * poly, e * -1.90465421e-9f); /* ln 2 = 0.693147182f - 1.9e-9 */
    y = fmaf(-0.5f, square, y);
    return fmaf(e, 0.693147182f, f + y);
}

/* sin and cos of 2 pi u, u in (0, 1): 4u is exact, q the nearest quarter turn, r in [-1/2, 1/2] the remainder. */
static void xdi_philox_sin_cos(float u, float *sine, float *cosine) {
    static const float s[] = { 1.57079637f, -0.645964086f, 0.0796925798f, -0.00468126638f, 0.000158206298f };
    static const float c[] = { -1.23370051f, 0.2536695f, -0.0208634753f, 0.000919196347f, -2.49092282e-05f };
    const float turns = 4.0f * u;
    const int quarter = (int)(turns + 0.5f);
    const float r = turns - (float)quarter;
    const float square = r * r;
    float a = s[4], b = c[4];
    for (int i = 3; i >= 0; i--) {
        a = fmaf(a, square, s[i]);
        b = fmaf(b, square, c[i]);
    }
    a = a * r;
    b = fmaf(b, square, 1.0f);
    const bool swapped = (quarter & 1) != 0;
    *sine = swapped ? b : a;
    *cosine = swapped ? a : b;
    if (quarter & 2) *sine = -*sine;
    if ((quarter + 1) & 2) *cosine = -*cosine;
}

static void xdi_philox_uniform_block(const uint32_t words[4], float lanes[4]) {
    for (int k = 0; k < 4; k++) lanes[k] = xdi_philox_uniform(words[k]);
}

static void xdi_philox_normal_block(const uint32_t words[4], float lanes[4]) {
    for (int k = 0; k < 4; k += 2) {
        float sine, cosine;
        const float radius = sqrtf(-2.0f * xdi_philox_log(xdi_philox_uniform(words[k])));
        xdi_philox_sin_cos(xdi_philox_uniform(words[k + 1]), &sine, &cosine);
        lanes[k] = radius * cosine;
        lanes[k + 1] = radius * sine;
    }
}

/* Goes over the blocks that [first, first + count) overlaps; of the first and the last some lanes may be unused. */
static void xdi_philox_fill(const xd_philox *p, int64_t first, int64_t count, float *out,
                            void (*lanes_of)(const uint32_t words[4], float lanes[4])) {
    const int64_t end = first + count;
    for (int64_t block = first / 4; block * 4 < end; block++) {
        uint32_t words[4];
        float lanes[4];
        xdi_philox_words(p, block, words);
        lanes_of(words, lanes);
        const int64_t begin = block * 4 < first ? first : block * 4;
        for (int64_t i = begin; i < block * 4 + 4 && i < end; i++) out[i - first] = lanes[i % 4];
    }
}

XD_API void xd_philox_fill_uniform(const xd_philox *p, int64_t first, int64_t count, float *out) {
    xdi_philox_fill(p, first, count, out, xdi_philox_uniform_block);
}

XD_API void xd_philox_fill_normal(const xd_philox *p, int64_t first, int64_t count, float *out) {
    xdi_philox_fill(p, first, count, out, xdi_philox_normal_block);
}
