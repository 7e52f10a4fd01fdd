#ifndef XDI_KERNEL_CPU_EXACT_H
#define XDI_KERNEL_CPU_EXACT_H

#include "kernel/fixed.h"
#include "kernel/internal.h"

/* The terms of INVARIANT mode's sums, and the sums, on vectors of double: xdi_w1 for the plain level, xdi_w2,
 * xdi_w4 and xdi_w8 beside xdi_v4, xdi_v8 and xdi_v16 (kernel/simd/exact.h). A term has the same bits in every width and with every
 * math library: single operations of IEEE 754 in one order. A product is fused with a sum only where it is
 * exact, by a power of two. */

/* 1.5 2^52: a sum of it and something below 2^51 holds that, rounded to an integer, in its low bits. */
#define XDI_EXACT_MAGIC 6755399441055744.0
#define XDI_EXACT_MAGIC_BITS UINT64_C(0x4338000000000000)

/* Powers of e up to here are 0, so that all others are normal numbers. */
#define XDI_EXACT_LEAST (-708.0)

#define XDI_EXACT_SIGN UINT64_C(0x8000000000000000)
#define XDI_EXACT_ONE_BITS UINT64_C(0x3ff0000000000000)
#define XDI_EXACT_ROOT_BITS UINT64_C(0x3ff6a09e667f3bcd) /* of 2 */

/* ln 2 is their sum; HIGH has 42 bits, which makes its product with an exponent exact. */
#define XDI_EXACT_LN2_HIGH 0.6931471805598903
#define XDI_EXACT_LN2_LOW 5.497923018708371e-14
#define XDI_EXACT_LOG2E 1.4426950408889634

#define XDI_EXACT_VECTORS(d, bytes, INLINE)                         \
    typedef double __attribute__((vector_size(bytes))) d;           \
    typedef int64_t __attribute__((vector_size(bytes))) d##_mask;   \
    typedef uint64_t __attribute__((vector_size(bytes))) d##_words; \
    enum { d##_lanes = (bytes) / 8 };                               \
    INLINE d d##_set(double x) {                                    \
        const d zero = { 0.0 };                                     \
        return zero + x;                                            \
    }                                                               \
    /* What is to be rounded before it is added to something. */    \
    INLINE d d##_mul(d a, d b) {                                    \
        return a * b;                                               \
    }                                                               \
    INLINE d d##_pick(d##_mask mask, d x, d y) {                    \
        return (d)((mask & (d##_mask)x) | (~mask & (d##_mask)y));   \
    }                                                               \
    INLINE d d##_where(d##_mask mask, d x) {                        \
        return (d)(mask & (d##_mask)x);                             \
    }

/* Three operations that some widths have instructions for: the larger one, y where x is NaN; the largest
 * integer not above x, which is below 2^51; x power + y, where power is a power of two. */
#define XDI_EXACT_ANY(d, INLINE)                                       \
    INLINE d d##_larger(d x, d y) {                                    \
        return d##_pick((d##_mask)(x > y), x, y);                      \
    }                                                                  \
    INLINE d d##_floor(d x) {                                          \
        const d whole = (x + XDI_EXACT_MAGIC) - XDI_EXACT_MAGIC;       \
        return whole - d##_where((d##_mask)(whole > x), d##_set(1.0)); \
    }                                                                  \
    INLINE d d##_scaled(d x, double power, d y) {                      \
        const d product = x * power;                                   \
        return product + y;                                            \
    }

/* e^x = power (1 + result), the result in [-0.3, 0.42]: with f the rest of x over a whole number of ln 2,
 * e^f - 1 as f + f^2 times a polynomial, even and odd powers apart. Relative error of e^x below 2^-52. */
#define XDI_EXACT_MATH(d, INLINE)                                                                         \
    INLINE d d##_exp_parts(d x, d *power) {                                                               \
        const d t = d##_mul(x, d##_set(XDI_EXACT_LOG2E)) + XDI_EXACT_MAGIC, n = t - XDI_EXACT_MAGIC;      \
        const d rest = x - d##_mul(n, d##_set(XDI_EXACT_LN2_HIGH));                                       \
        const d f = rest - d##_mul(n, d##_set(XDI_EXACT_LN2_LOW)), g = d##_mul(f, f);                     \
        d even = d##_mul(g, d##_set(2.7620078203806394e-07)) + 2.4801521317484083e-05;                    \
        d odd = d##_mul(g, d##_set(2.5100377619606372e-08)) + 2.7557268476553695e-06;                     \
        even = d##_mul(even, g) + 0.0013888888917199863;                                                  \
        odd = d##_mul(odd, g) + 0.00019841269863042963;                                                   \
        even = d##_mul(even, g) + 0.04166666666662416;                                                    \
        odd = d##_mul(odd, g) + 0.008333333333330063;                                                     \
        even = d##_mul(even, g) + 0.5;                                                                    \
        odd = d##_mul(odd, g) + 0.16666666666666669;                                                      \
        *power = (d)(((d##_words)t << 52) + XDI_EXACT_ONE_BITS);                                          \
        return d##_mul(d##_mul(odd, f) + even, g) + f;                                                    \
    }                                                                                                     \
    /* For x at most 700. */                                                                              \
    INLINE d d##_exp(d x) {                                                                               \
        d power;                                                                                          \
        const d less_one = d##_exp_parts(d##_larger(x, d##_set(XDI_EXACT_LEAST)), &power);                \
        return d##_where((d##_mask)(x > XDI_EXACT_LEAST), d##_mul(less_one + 1.0, power));                \
    }                                                                                                     \
    /* ln(x + rest) of a normal x up to 1, where rest is less than a unit of x, and 0 for x below 1/2. */ \
    INLINE d d##_log(d x, d rest) {                                                                       \
        const d##_words bits = (d##_words)x, halvings = (XDI_EXACT_ROOT_BITS - bits) >> 52;               \
        const d f = (d)(bits + (halvings << 52)) - 1.0, s = f / (f + 2.0), g = d##_mul(s, s);             \
        const d n = (d)(halvings + XDI_EXACT_MAGIC_BITS) - XDI_EXACT_MAGIC;                               \
        d p = d##_mul(g, d##_set(0.14616484198366603)) + 0.1533171880828007;                              \
        p = d##_mul(p, g) + 0.18182889209266595;                                                          \
        p = d##_mul(p, g) + 0.22222211133642084;                                                          \
        p = d##_mul(p, g) + 0.2857142862598255;                                                           \
        p = d##_mul(p, g) + 0.3999999999989949;                                                           \
        p = d##_mul(p, g) + 0.666666666666667;                                                            \
        const d log = (f - d##_mul(s, f - d##_mul(p, g))) + rest;                                         \
        return (log - d##_mul(n, d##_set(XDI_EXACT_LN2_LOW))) - d##_mul(n, d##_set(XDI_EXACT_LN2_HIGH));  \
    }                                                                                                     \
    /* The terms of the Jensen-Shannon divergence at a column with log-probabilities s and t: */          \
    /* q ln(q/m) and p (ln(p/m) - top). With E the quotient of the smaller probability and the larger, */ \
    /* and w the smaller one's share of m, m = larger (1 + w (E - 1)). */                                 \
    INLINE void d##_mixture(d s, d t, double beta, double top, d *teacher, d *student) {                  \
        const d gap = t - s;                                                                              \
        const d##_mask above = (d##_mask)(gap > 0.0);                                                     \
        const d distance = (d)((d##_words)gap | XDI_EXACT_SIGN);                                          \
        d power;                                                                                          \
        const d less_one = d##_exp_parts(d##_larger(distance, d##_set(XDI_EXACT_LEAST)), &power);         \
        const d quotient = d##_mul(less_one + 1.0, power);                                                \
        const d below_one = d##_mul(less_one, power) + (power - 1.0);                                     \
        const d larger = d##_exp(d##_pick(above, t, s));                                                  \
        const d smaller = d##_where((d##_mask)(distance > XDI_EXACT_LEAST), d##_mul(larger, quotient));   \
        const d share = d##_pick(above, d##_set(1.0 - beta), d##_set(beta));                              \
        const d change = d##_mul(share, below_one), near = change + 1.0;                                  \
        const d##_mask close = (d##_mask)(quotient > 0.5);                                                \
        const d mixture = d##_pick(close, near, (1.0 - share) + d##_mul(share, quotient));                \
        const d log = -d##_log(mixture, d##_where(close, change - (near - 1.0))), far = log + distance;   \
        const d q = d##_pick(above, larger, smaller), p = d##_pick(above, smaller, larger);               \
        *teacher = d##_where((d##_mask)(q > 0.0), q * d##_pick(above, log, far));                         \
        *student = d##_where((d##_mask)(p > 0.0), p * (d##_pick(above, far, log) - top));                 \
    }

XDI_EXACT_VECTORS(xdi_w1, 8, XDI_SIMD_INLINE)
XDI_EXACT_ANY(xdi_w1, XDI_SIMD_INLINE)
XDI_EXACT_MATH(xdi_w1, XDI_SIMD_INLINE)

/* exact.c: terms of sums in fixed point, the same bits on every level: e^x, x at most 700; q ln(q/m) and
 * p (ln(p/m) - top) of log-probabilities s of p and t of q, m = beta q + (1 - beta) p, 0 for p or q of 0. */
XD_PRIVATE double xdi_exact_exp(double x);
XD_PRIVATE void xdi_exact_mixture(double s, double t, double beta, double top, double *teacher,
                                  double *student);

#endif
