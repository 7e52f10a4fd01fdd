#ifndef XDI_BASE_PHILOX_SCALAR_H
#define XDI_BASE_PHILOX_SCALAR_H

#include "base/philox.h"
#include "base/scalar.h"

/* Formulas of base/philox.h. Their bits are promised: products are added to other terms by xd_fmaf only, or are exact, so that
 * it does not depend on the compiler which of them are fused. Coefficients: interpolation at Chebyshev nodes, rounded to f32. */

/* 128 random bits for each of 2^128 counters under a 64-bit key. */
XD_SCALAR void xd_philox_rounds(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
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

/* The counter of block `block` in [0, 2^40), elements 4 block .. 4 block + 3:
 *
 *   { low 32 bits of block, next 8 bits | stream << 8 | micro << 16, sample, step } */
XD_SCALAR void xd_philox_counter_of(const xd_philox *p, uint64_t block, uint32_t counter[4]) {
    counter[0] = (uint32_t)block;
    counter[1] = (uint32_t)(block >> 32 & 0xffu) | (uint32_t)p->stream << 8 | (uint32_t)p->micro << 16;
    counter[2] = p->sample;
    counter[3] = p->step;
}

/* The four words of a block. */
XD_SCALAR void xd_philox_words(const xd_philox *p, int64_t block, uint32_t words[4]) {
    const uint32_t key[2] = { (uint32_t)p->seed, (uint32_t)(p->seed >> 32) };
    uint32_t counter[4];
    xd_philox_counter_of(p, (uint64_t)block, counter);
    xd_philox_rounds(counter, key, words);
}

/* (r >> 9) 2^-23 + 2^-24, exact. */
XD_SCALAR float xd_philox_uniform_of(uint32_t word) {
    return xd_mulf((float)((word >> 9) * 2u + 1u), 1.0f / 16777216.0f);
}

/* ln(x) for x in (0, 1), normal: x = 2^e m with m in [sqrt(1/2), sqrt(2)), f = m - 1,
 * ln(m) = f - f^2 / 2 + f^3 P(f). Error below 1 unit in the last place. */
XD_SCALAR float xd_philox_log(float x) {
    const uint32_t shifted = xd_bits_of_float(x) - 0x3f3504f3u; /* sqrt(1/2): exponents now change there */
    const float e = (float)((int32_t)shifted >> 23);
    const float f = xd_subf(xd_float_of_bits((shifted & 0x7fffffu) + 0x3f3504f3u), 1.0f);
    const float square = xd_mulf(f, f);
    float poly = 0.0697161183f;
    poly = xd_fmaf(poly, f, -0.114797339f);
    poly = xd_fmaf(poly, f, 0.116854198f);
    poly = xd_fmaf(poly, f, -0.124256872f);
    poly = xd_fmaf(poly, f, 0.142490581f);
    poly = xd_fmaf(poly, f, -0.166678026f);
    poly = xd_fmaf(poly, f, 0.200007156f);
    poly = xd_fmaf(poly, f, -0.24999997f);
    poly = xd_fmaf(poly, f, 0.333333313f);
    /* ln 2 = 0.693147182f - 1.9e-9 */
    float y = xd_fmaf(square, xd_mulf(f, poly), xd_mulf(e, -1.90465421e-9f));
    y = xd_fmaf(-0.5f, square, y);
    return xd_fmaf(e, 0.693147182f, xd_addf(f, y));
}

/* sin and cos of 2 pi u, u in (0, 1): 4u is exact, q the nearest quarter turn, r in [-1/2, 1/2] the remainder. */
XD_SCALAR void xd_philox_sin_cos(float u, float *sine, float *cosine) {
    const float turns = xd_mulf(4.0f, u);
    const int quarter = (int)xd_addf(turns, 0.5f);
    const float r = xd_subf(turns, (float)quarter);
    const float square = xd_mulf(r, r);
    float a = 0.000158206298f, b = -2.49092282e-05f;
    a = xd_fmaf(a, square, -0.00468126638f);
    b = xd_fmaf(b, square, 0.000919196347f);
    a = xd_fmaf(a, square, 0.0796925798f);
    b = xd_fmaf(b, square, -0.0208634753f);
    a = xd_fmaf(a, square, -0.645964086f);
    b = xd_fmaf(b, square, 0.2536695f);
    a = xd_fmaf(a, square, 1.57079637f);
    b = xd_fmaf(b, square, -1.23370051f);
    a = xd_mulf(a, r);
    b = xd_fmaf(b, square, 1.0f);
    const bool swapped = (quarter & 1) != 0;
    *sine = swapped ? b : a;
    *cosine = swapped ? a : b;
    if (quarter & 2) *sine = -*sine;
    if ((quarter + 1) & 2) *cosine = -*cosine;
}

/* Uniform or normal numbers of a block. */
XD_SCALAR void xd_philox_lanes(const xd_philox *p, int64_t block, bool normal, float lanes[4]) {
    uint32_t words[4];
    xd_philox_words(p, block, words);
    for (int k = 0; k < 4; k++) lanes[k] = xd_philox_uniform_of(words[k]);
    for (int k = 0; k < 4 && normal; k += 2) {
        float sine, cosine;
        const float radius = xd_sqrtf(xd_mulf(-2.0f, xd_philox_log(lanes[k])));
        xd_philox_sin_cos(lanes[k + 1], &sine, &cosine);
        lanes[k] = xd_mulf(radius, cosine);
        lanes[k + 1] = xd_mulf(radius, sine);
    }
}

#endif
