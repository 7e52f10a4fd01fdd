/* The loops on four lanes, for any processor: vector types of the compiler. The plain level has those of INVARIANT mode's
 * gradients. */

#include "kernel/simd/loops.h"

/* ---- vectors ---- */

typedef float __attribute__((vector_size(16))) xdi_v4;
typedef int32_t __attribute__((vector_size(16))) xdi_v4_bits;
typedef uint32_t __attribute__((vector_size(16))) xdi_v4_words; /* which wrap around, for any bits */
typedef int16_t __attribute__((vector_size(16))) xdi_v4_halves;
enum { xdi_v4_lanes = 4, xdi_v4_steps = 1, xdi_v4_terms = 7 };

XDI_SIMD_INLINE xdi_v4 xdi_v4_set(float x) {
    const xdi_v4 v = { x, x, x, x };
    return v;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_add(xdi_v4 a, xdi_v4 b) {
    return a + b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_sub(xdi_v4 a, xdi_v4 b) {
    return a - b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_mul(xdi_v4 a, xdi_v4 b) {
    return a * b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_div(xdi_v4 a, xdi_v4 b) {
    return a / b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_fma(xdi_v4 a, xdi_v4 b, xdi_v4 c) {
    return a * b + c;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_mul_sub(xdi_v4 a, xdi_v4 b, xdi_v4 c) {
    return a * b - c;
}
/* Without fma: a product of two 12-bit halves has no rounding error, nor has its difference from c; the other parts are
 * small. */
XDI_SIMD_INLINE xdi_v4 xdi_v4_exact_sub(xdi_v4 a, xdi_v4 b, xdi_v4 c) {
    const xdi_v4 a_high = (xdi_v4)((xdi_v4_bits)a & ~0xfff), b_high = (xdi_v4)((xdi_v4_bits)b & ~0xfff);
    const xdi_v4 a_low = a - a_high, b_low = b - b_high;
    return ((a_high * b_high - c) + a_high * b_low) + a_low * b;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_remainder(xdi_v4 a, xdi_v4 b, xdi_v4 n) {
    return xdi_v4_exact_sub(a, b, n);
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_pick(xdi_v4 a, xdi_v4 b, xdi_v4 x, xdi_v4 y) {
    const xdi_v4_bits mask = (xdi_v4_bits)(a >= b);
    return (xdi_v4)((mask & (xdi_v4_bits)x) | (~mask & (xdi_v4_bits)y));
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_max(xdi_v4 a, xdi_v4 b) {
    const xdi_v4_bits mask = (xdi_v4_bits)(a > b);
    return (xdi_v4)((mask & (xdi_v4_bits)a) | (~mask & (xdi_v4_bits)b));
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_min(xdi_v4 a, xdi_v4 b) {
    const xdi_v4_bits mask = (xdi_v4_bits)(a < b);
    return (xdi_v4)((mask & (xdi_v4_bits)a) | (~mask & (xdi_v4_bits)b));
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_power(xdi_v4 t) {
    return (xdi_v4)(((xdi_v4_words)t << 23) + 0x3f800000u);
}
/* Without a table f is up to 1/2; one term less would be wrong by 2.4e-7, all in one direction. */
XDI_SIMD_INLINE void xdi_v4_polynomial(float scale, xdi_v4 *terms) {
    terms[0] = xdi_v4_set(scale * 1.535336133e-04f);
    terms[1] = xdi_v4_set(scale * 1.339887461e-03f);
    terms[2] = xdi_v4_set(scale * 9.618437362e-03f);
    terms[3] = xdi_v4_set(scale * 5.550332471e-02f);
    terms[4] = xdi_v4_set(scale * 2.402264791e-01f);
    terms[5] = xdi_v4_set(scale * 6.931472029e-01f);
    terms[6] = xdi_v4_set(scale);
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_fraction(xdi_v4 f, const xdi_v4 *terms) {
    xdi_v4 p = xdi_v4_fma(terms[0], f, terms[1]);
    p = xdi_v4_fma(p, f, terms[2]);
    p = xdi_v4_fma(p, f, terms[3]);
    p = xdi_v4_fma(p, f, terms[4]);
    p = xdi_v4_fma(p, f, terms[5]);
    return xdi_v4_fma(p, f, terms[6]);
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_split(xdi_v4 v, xdi_v4 *mantissa) {
    const xdi_v4_words bits = (xdi_v4_words)v;
    const xdi_v4_bits exponent = (xdi_v4_bits)(bits - XDI_SIMD_SQRT_HALF_BITS) >> 23;
    *mantissa = (xdi_v4)(bits - ((xdi_v4_words)exponent << 23));
    const xdi_v4 result = { (float)exponent[0], (float)exponent[1], (float)exponent[2], (float)exponent[3] };
    return result;
}
XDI_SIMD_INLINE xdi_v4 xdi_v4_load(xdi_simd_array x, int64_t i) {
    xdi_v4 v;
    if (x.bf16) {
        const uint16_t *p = (const uint16_t *)x.data + i;
        const xdi_v4_bits bits = { p[0], p[1], p[2], p[3] };
        v = (xdi_v4)(bits << 16);
    } else {
        memcpy(&v, (const float *)x.data + i, sizeof v);
    }
    return v;
}
XDI_SIMD_INLINE void xdi_v4_load_two(xdi_simd_array x, int64_t i, xdi_v4 *even, xdi_v4 *odd) {
    xdi_v4_bits bits;
    memcpy(&bits, (const uint16_t *)x.data + i, sizeof bits);
    *even = (xdi_v4)(bits << 16);
    *odd = (xdi_v4)(bits & (int32_t)0xffff0000);
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_no_top(void) {
    const xdi_v4_bits none = { XDI_SIMD_NO_TOP, XDI_SIMD_NO_TOP, XDI_SIMD_NO_TOP, XDI_SIMD_NO_TOP };
    return none;
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_top(xdi_v4_bits tops, xdi_v4 v) {
    const xdi_v4_bits bits = (xdi_v4_bits)v, mask = bits > tops;
    return (mask & bits) | (~mask & tops);
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_top_two(xdi_v4_bits tops, xdi_simd_array x, int64_t i) {
    xdi_v4_halves halves;
    memcpy(&halves, (const uint16_t *)x.data + i, sizeof halves);
    const xdi_v4_halves mask = halves > (xdi_v4_halves)tops;
    return (xdi_v4_bits)((mask & halves) | (~mask & (xdi_v4_halves)tops));
}
XDI_SIMD_INLINE int32_t xdi_v4_top_bits(xdi_v4_bits tops, bool two) {
    int32_t top = INT32_MIN;
    for (int lane = 0; lane < 4; lane++) {
        const int32_t odd = two ? tops[lane] & (int32_t)0xffff0000 : tops[lane];
        const int32_t even = two ? (int32_t)((uint32_t)tops[lane] << 16) : odd;
        top = odd > top ? odd : top;
        top = even > top ? even : top;
    }
    return top;
}
XDI_SIMD_INLINE double xdi_v4_total(xdi_v4 v) {
    return ((double)v[0] + (double)v[1]) + ((double)v[2] + (double)v[3]);
}
XDI_SIMD_INLINE xdi_v4_bits xdi_v4_rounded(xdi_v4 v) {
    const xdi_v4_words bits = (xdi_v4_words)v;
    return (xdi_v4_bits)(bits + 0x7fffu + ((bits >> 16) & 1u));
}
XDI_SIMD_INLINE void xdi_v4_store_two(xdi_simd_array x, int64_t i, xdi_v4 even, xdi_v4 odd) {
    const xdi_v4_bits low = (xdi_v4_rounded(even) >> 16) & 0xffff;
    const xdi_v4_bits both = low | (xdi_v4_rounded(odd) & (int32_t)0xffff0000);
    memcpy((uint16_t *)x.data + i, &both, sizeof both);
}
XDI_SIMD_INLINE void xdi_v4_stream_two(xdi_simd_array x, int64_t i, xdi_v4 even, xdi_v4 odd) {
    xdi_v4_store_two(x, i, even, odd);
}
XDI_SIMD_INLINE void xdi_v4_stream(xdi_simd_array x, int64_t i, xdi_v4 v) {
    memcpy((float *)x.data + i, &v, sizeof v);
}
XDI_SIMD_INLINE void xdi_v4_fence(void) {}
XDI_SIMD_INLINE void xdi_v4_store(xdi_simd_array x, int64_t i, xdi_v4 v) {
    if (x.bf16) {
        const xdi_v4_bits rounded = xdi_v4_rounded(v);
        uint16_t *p = (uint16_t *)x.data + i;
        for (int lane = 0; lane < 4; lane++) p[lane] = (uint16_t)((uint32_t)rounded[lane] >> 16);
    } else {
        memcpy((float *)x.data + i, &v, sizeof v);
    }
}

static const uint32_t xdi_u4_table[8] = { 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                          0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7 };
enum { xdi_u4_lanes = 4 };
XDI_SIMD_INLINE xdi_v4 xdi_u4_power(xdi_v4 t) {
    uint32_t n[4];
    float power[4];
    xdi_v4 out;
    memcpy(n, &t, sizeof n);
    for (int lane = 0; lane < 4; lane++) n[lane] = (n[lane] << 20) + xdi_u4_table[n[lane] & 7];
    memcpy(power, n, sizeof power);
    memcpy(&out, power, sizeof out);
    return out;
}
/* The product's rounding error from products of halves of 12 bits, which have none; then a b - n, rounded once, is the exact
 * difference of the product and n plus that error. */
XDI_SIMD_INLINE xdi_v4 xdi_u4_less(xdi_v4 a, xdi_v4 b, xdi_v4 product, xdi_v4 n) {
    const xdi_v4 a_high = (xdi_v4)((xdi_v4_bits)a & ~0xfff), a_low = xdi_v4_sub(a, a_high);
    const xdi_v4 b_high = (xdi_v4)((xdi_v4_bits)b & ~0xfff), b_low = xdi_v4_sub(b, b_high);
    xdi_v4 error = xdi_v4_sub(xdi_v4_mul(a_high, b_high), product);
    error = xdi_v4_add(error, xdi_v4_mul(a_low, b_high));
    error = xdi_v4_add(error, xdi_v4_mul(a_high, b_low));
    error = xdi_v4_add(error, xdi_v4_mul(a_low, b_low));
    return xdi_v4_add(xdi_v4_sub(product, n), error);
}

#define xdi_v xdi_v4
#define XDI_V(name) xdi_u4_##name
#define XDI_F(name) xdi_v4_##name
#define XDI_INLINE XDI_SIMD_INLINE
#define XDI_OUTER XDI_SIMD_128
#include "kernel/simd/invariant.inc"
#undef xdi_v
#undef XDI_V
#undef XDI_F
#undef XDI_INLINE
#undef XDI_OUTER

XDI_SIMD_128 void xdi_u4_fence(void) {}

static const xdi_tiles xdi_u4_tiles = { NULL,         NULL, NULL, NULL, NULL, NULL, NULL,
                                        xdi_u4_fence, NULL, NULL, NULL, NULL, NULL, xdi_u4_tile_gradient };

XD_PRIVATE const xdi_tiles *xdi_tiles_plain(void) {
    return &xdi_u4_tiles;
}

#if defined(XDI_PORTABLE)

XDI_EXACT_VECTORS(xdi_w2, 16, XDI_SIMD_INLINE)
XDI_EXACT_ANY(xdi_w2, XDI_SIMD_INLINE)

XDI_SIMD_INLINE void xdi_w2_widen(xdi_v4 v, xdi_w2 *a, xdi_w2 *b) {
    const xdi_w2 low = { (double)v[0], (double)v[1] }, high = { (double)v[2], (double)v[3] };
    *a = low;
    *b = high;
}
XDI_SIMD_INLINE xdi_v4 xdi_w2_narrow(xdi_w2 a, xdi_w2 b) {
    const xdi_v4 v = { (float)a[0], (float)a[1], (float)b[0], (float)b[1] };
    return v;
}

/* ---- selections ---- */

static int64_t xdi_v4_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                   uint32_t *keys, int64_t room) {
    return xdi_tile_collect_rest(x, 0, n, threshold, indices, keys, 0, room);
}

static void xdi_v4_tile_range(const uint32_t *keys, int64_t n, uint32_t *first, uint32_t *last) {
    *first = *last = keys[0];
    for (int64_t i = 1; i < n; i++) {
        *first = keys[i] < *first ? keys[i] : *first;
        *last = keys[i] > *last ? keys[i] : *last;
    }
}

static void xdi_v4_tile_offsets(uint32_t *bins, int64_t n) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t count = bins[i];
        bins[i] = sum;
        sum += count;
    }
}

static bool xdi_v4_tile_unpack(const uint64_t *records, int64_t n, int64_t first, double *values,
                               int64_t *ids) {
    return xdi_tile_unpack_rest(records, n, first, values, ids);
}

XDI_SIMD_INLINE void xdi_v4_store_past(xdi_simd_array x, int64_t i, xdi_v4 value) {
    xdi_v4_store(x, i, value);
}

#    ifndef XDISTILL_NO_ACROSS

/* ---- losses across tokenizers ---- */

static void xdi_v4_to_tables(const float *lanes, int64_t n, float *tables) {
    for (int64_t i = 0; i < n; i++)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane++)
            tables[i * XDI_XTOKEN_LANES + lane] = lanes[lane * XDI_XTOKEN_STRIDE + i];
}

static void xdi_v4_to_lanes(const float *tables, int64_t n, float *lanes) {
    for (int64_t i = 0; i < n; i++)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane++)
            lanes[lane * XDI_XTOKEN_STRIDE + i] = tables[i * XDI_XTOKEN_LANES + lane];
}

static double xdi_v4_xtoken_top(const double *x, int64_t n, bool magnitude) {
    return xdi_xtoken_top_rest(x, n, magnitude);
}

#    endif

#    define xdi_v xdi_v4
#    define XDI_V(name) xdi_v4_##name
#    define XDI_INVARIANT xdi_u4_tile_gradient
#    define xdi_w xdi_w2
#    define XDI_W(name) xdi_w2_##name
#    define XDI_INLINE XDI_SIMD_INLINE
#    define XDI_LEAF XDI_SIMD_128
#    include "kernel/simd/loops.inc"
#    undef xdi_v
#    undef XDI_V
#    undef XDI_INVARIANT
#    undef xdi_w
#    undef XDI_W
#    undef XDI_INLINE
#    undef XDI_LEAF

XD_PRIVATE const xdi_loops *xdi_loops_portable(void) {
    return &xdi_v4_loops;
}

#endif
