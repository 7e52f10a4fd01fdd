#ifndef XDI_KERNEL_CPU_EXACT_H
#define XDI_KERNEL_CPU_EXACT_H

#include "kernel/fixed.h"
#include "kernel/internal.h"

/* The terms of INVARIANT mode's sums, and the sums, on vectors of double: xdi_w1 for the plain level, xdi_w2,
 * xdi_w4 and xdi_w8 with xdi_v4, xdi_v8 and xdi_v16. A term has the same bits in every width and
 * with every math library: single operations of IEEE 754 in a fixed order. A product is fused with a sum only where
 * the product is exact, by a power of two. */

/* 1.5 2^52: a sum of it and something below 2^51 holds that, rounded to an integer, in its low bits. */
#define XDI_EXACT_MAGIC 6755399441055744.0
#define XDI_EXACT_MAGIC_BITS UINT64_C(0x4338000000000000)

/* Powers of e up to here are 0, so that all others are normal numbers. */
#define XDI_EXACT_LEAST (-708.0)

#define XDI_EXACT_SIGN UINT64_C(0x8000000000000000)
#define XDI_EXACT_ONE_BITS UINT64_C(0x3ff0000000000000)
#define XDI_EXACT_ROOT_BITS UINT64_C(0x3ff6a09e667f3bcd) /* of 2 */

/* Vectors take terms below 2^11: those of a tile move the high limb of a sum by less than 2^52. */
#define XDI_EXACT_LARGE_BITS UINT64_C(0x40a0000000000000)

/* ln 2 is their sum; HIGH has 42 bits, so its product with an exponent has no rounding error. */
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
    /* A product that is rounded before it is added to anything. */ \
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

/* Exponentials and terms: exact_math.inc, once for each of them. */

/* exact.c: terms of sums in fixed point, the same bits on every level: e^x, x at most 700; q ln(q/m) and
 * p (ln(p/m) - top) of log-probabilities s of p and t of q, m = beta q + (1 - beta) p, 0 for p or q of 0. */
XD_PRIVATE double xdi_exact_exp(double x);
XD_PRIVATE void xdi_exact_mixture(double s, double t, double beta, double top, double *teacher,
                                  double *student);

#endif
