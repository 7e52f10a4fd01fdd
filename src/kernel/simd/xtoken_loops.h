#ifndef XDI_KERNEL_SIMD_XTOKEN_LOOPS_H
#define XDI_KERNEL_SIMD_XTOKEN_LOOPS_H

#include "kernel/simd/tiles.h"

/* The innermost loops of losses across tokenizers, one set for each vector width.
 *
 * A projection is walked for 16 chunks at once: tables of 16 floats per slot or student id, so that an entry of the matrix is
 * one multiply-add of vectors, in both directions. The student's ids come in blocks whose tables stay in the L1 and L2 caches:
 * DENSE ids, or those of BLOCK that have an entry, where these are few. */
enum { XDI_XTOKEN_LANES = 16, XDI_XTOKEN_BLOCK = 1024, XDI_XTOKEN_DENSE = 256 };

/* p = scale 2^(...) of a row. */
typedef struct xdi_xtoken_power {
    xdi_tile_power power;
    float scale;
} xdi_xtoken_power;

/* A row's gradient: out (+)= p1 + u_scale u - shift p, or, with times_p, p (u_scale u - shift) for the last two terms. */
typedef struct xdi_xtoken_writer {
    xdi_simd_array x, out;
    bool add, hard, soft, times_p, past; /* past: the stores bypass the caches */
    xdi_xtoken_power p, p1;
    const float *u; /* or NULL */
    float u_scale, shift;
    int64_t label; /* its column; -1: without cross entropy, or on another shard */
} xdi_xtoken_writer;

/* Distance between the 16 lanes of a block: they must not all be in one set of the cache. */
enum { XDI_XTOKEN_STRIDE = XDI_XTOKEN_BLOCK + 16 };

/* Inner loops of one vector width; n elements. */
typedef struct xdi_xtoken_loops {
    /* out (+)= p */
    void (*powers)(xdi_simd_array x, int64_t n, xdi_xtoken_power p, bool add, float *out);
    /* sum of p h */
    double (*dot)(xdi_simd_array x, int64_t n, xdi_xtoken_power p, const float *h);
    /* Gathers the listed elements of a block of n, padded with -infinity to a multiple of 16. Prefetches the next block. */
    void (*pack)(xdi_simd_array x, int64_t n, const int32_t *list, int64_t count, float *out);
    /* n entries: slots[16 slot] += weight ids[16 i], or with `back` ids += weight slots. i counts student ids
     * where they are packed, or is the id less `first`. */
    void (*walk)(const int32_t *student, const int32_t *slot, const float *weight, int64_t n, bool packed,
                 int64_t first, float *ids, float *slots, bool back);
    /* n elements, rounded up to 8, from lanes [16, STRIDE] to tables [n, 16], and back. */
    void (*to_tables)(const float *lanes, int64_t n, float *tables);
    void (*to_lanes)(const float *tables, int64_t n, float *lanes);
    /* cells (+)= x factor - shift */
    void (*widen)(xdi_simd_array x, int64_t n, double factor, double shift, bool add, double *cells);
    /* out = x factor - shift; the sum of the products */
    double (*narrow)(const double *x, int64_t n, double factor, double shift, float *out);
    /* the largest element, or magnitude, ignoring NaN */
    double (*top)(const double *x, int64_t n, bool magnitude);
    /* From q / Z and a to d d(c) / d r in q; sums of the divergence and of q r. */
    double (*slopes)(float *q, const float *a, int64_t n, float inverse, bool reverse, double *dot);
    /* e^beta (beta - alpha), or the reverse: the sum, and in slope the derivative by alpha. */
    double (*pair)(const float *alpha, const float *beta, int64_t n, bool reverse, float *slope);
    void (*write)(const xdi_xtoken_writer *w, int64_t n);
    /* - sum of p ln(p + XD_XTOKEN_EPSILON) */
    double (*entropy)(xdi_simd_array x, int64_t n, xdi_xtoken_power p);
} xdi_xtoken_loops;

static inline xdi_simd_array xdi_xtoken_floats(const float *x) {
    xdi_simd_array array;
    array.data = (void *)x;
    array.bf16 = false;
    return array;
}

/* Prefetches what follows a block: the next call for the same row comes after those for all other rows. */
static inline void xdi_xtoken_ahead(xdi_simd_array x, int64_t i) {
    const uintptr_t size = x.bf16 ? sizeof(uint16_t) : sizeof(float);
    __builtin_prefetch((const void *)((uintptr_t)x.data + (uintptr_t)i * size)); /* maybe past the end */
}

/* xtoken.c: scale exp(z / temperature - lse); false where f32 does not fit. */
XD_PRIVATE bool xdi_simd_xtoken_power(double temperature, double lse, double scale, xdi_xtoken_power *p);

/* xtoken_rest.c: the listed elements of a block one by one, since no vector operation compresses faster; and the
 * largest of the last few elements. */
XD_PRIVATE void xdi_xtoken_pack(xdi_simd_array x, int64_t n, const int32_t *list, int64_t count, float *out);
XD_PRIVATE double xdi_xtoken_top_rest(const double *x, int64_t n, bool magnitude);

#endif
