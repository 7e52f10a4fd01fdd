#ifndef XDI_KERNEL_SIMD_SIMD_H
#define XDI_KERNEL_SIMD_SIMD_H

#include <string.h>

#include "kernel/internal.h"

/* Vectors of f32 in three widths with the same operations: xdi_v4 (any processor, by the compiler's own
 * vectors), xdi_v8 (AVX2 and FMA), xdi_v16 (AVX-512). Functions carry their instruction set as an
 * attribute, so no compiler flag is needed. Loops are written once, in files that a level includes: loops.inc.
 *
 *   max, min    the second one where the first is not larger, or smaller: NaN in the first is lost
 *   pick        a >= b ? x : y, lane by lane
 *   mul_sub     a * b - c
 *   exact_sub   the same with one rounding, where the product is near c
 *   remainder   exact_sub, with n an integer, for a power
 *   power       2^(n/steps), n the integer in the low bits of the argument's representation
 *   fraction    scale 2^(f/steps), relative error below 2e-7, for 0 exactly scale; polynomial computes its coefficients
 *   split       v = 2^result * mantissa, mantissa in [sqrt(1/2), sqrt(2)); v positive and normal
 *   load        elements [i, i + lanes) of f32 or bf16
 *   store       the same; to bf16 by round to nearest even. Not for NaN.
 *   load_two    elements [i, i + 2 lanes) of bf16, the even and the odd ones: no lane has to move
 *   store_two   the same way back
 *   stream, stream_two   store of f32, and store_two, past the caches where there is such an instruction: to a
 *               address aligned to XDI_SIMD_LINE, vector after vector
 *   fence       streamed stores are in memory before later ones
 *   top, top_two   the larger by representation, as signed integers, of what is kept and a vector, or
 *               elements [i, i + 2 lanes) of bf16: unlike max it does not occupy the units that add
 *   top_bits    the representation, as f32, of the largest kept by top, or by top_two
 *   total       the sum of all lanes, in double
 *
 * 2^x is taken in steps: x steps = n + f with n an integer and f in [-1/2, 1/2], so that 2^(n/steps), from a table where the
 * width has a permutation for one, times a short polynomial in f is the power. Entry i of the table has the bits of 2^(i/steps)
 * minus those that n itself contributes: i in the upper bits of the mantissa. */

/* Bytes of a cache line. */
enum { XDI_SIMD_LINE = 64 };

/* Attributes of what is inlined and of what is called, by width. */
#define XDI_TARGET_256 __attribute__((target("avx2,fma")))
#define XDI_TARGET_512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#if defined(__OPTIMIZE__)
#    define XDI_SIMD_INLINE_256 static inline XDI_TARGET_256 __attribute__((always_inline))
#    define XDI_SIMD_INLINE_512 static inline XDI_TARGET_512 __attribute__((always_inline))
#else /* Expanded here too, they would be half of all code, and of the seconds that making it takes. */
#    define XDI_SIMD_INLINE_256 static inline XDI_TARGET_256
#    define XDI_SIMD_INLINE_512 static inline XDI_TARGET_512
#endif
#define XDI_SIMD_256 XDI_SIMD_AS_WRITTEN static XDI_TARGET_256
#define XDI_SIMD_512 XDI_SIMD_AS_WRITTEN static XDI_TARGET_512

/* Vectors of the compiler's own, of any width: each level makes of them what it has. */
typedef float __attribute__((vector_size(32))) xdi_f8;
typedef int32_t __attribute__((vector_size(32))) xdi_i8;
typedef uint32_t __attribute__((vector_size(32))) xdi_u8;
typedef double __attribute__((vector_size(64))) xdi_d8;

/* Elements of one row, or of a part of it. */
typedef struct xdi_simd_array {
    void *data;
    bool bf16;
} xdi_simd_array;

#define XDI_SIMD_SQRT_HALF_BITS 0x3f3504f3

/* The initial value of `top`: less than every representation, also as halves. */
#define XDI_SIMD_NO_TOP ((int32_t)0x80008000)

/* Fewer elements than lanes, padded, so that the bits of an element do not depend on its position. */
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

/* Elements [begin, end) in `room`, which has space for `count` f32, padded to count. */
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

#endif
