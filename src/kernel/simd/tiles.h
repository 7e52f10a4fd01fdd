#ifndef XDI_KERNEL_SIMD_TILES_H
#define XDI_KERNEL_SIMD_TILES_H

#include "kernel/simd/internal.h"
#include "kernel/simd/simd.h"

/* The innermost loops of losses over part of a row, one set for each vector width. Sums are f32 in the
 * lanes and f64 from then on, so a call should cover no more than XDI_TILE elements. */
enum { XDI_TILE = 2048 };

/* Tiles of a row whose powers are kept for its gradient: as many as fit in the L2 cache together with a row of bf16 logits. */
enum { XDI_SIMD_KEPT = 32 };

#define XDI_TILE_LOG2E 1.4426950408889634
#define XDI_TILE_LN2 0.69314718055994531

/* 2^(factor x - whole), with |factor x| below 2^17. Elements up to `low` give exactly 0; NaN stays NaN; the result must not
 * pass 2^127. whole is an integer, so that the fraction of factor x is rounded once, to its own precision: relative error below
 * 3e-7, plus that of the factor's rounding. */
typedef struct xdi_tile_power {
    float factor, whole, low;
} xdi_tile_power;

/* The inputs of a tile's sums, and the sums, in base 2: p and q are the powers of the sides `own` and `other`.
 *   own     sum p
 *   other   sum q
 *   cross   sum p (own_weight log2 p - log2 q)
 * Maxima ignore NaN, which appears in the sums. */
typedef struct xdi_tile_pair {
    xdi_simd_array x, y; /* own and other */
    xdi_tile_power p, q;
    /* elements that x and y are near where p counts: subtracted first, which is exact */
    float own_from, other_from;
    float own_weight;
    bool careful; /* y may be -infinity: 0 times that is 0; `infinite` is set where x is finite there */
    float *kept;  /* [2, XDI_TILE] p and q themselves, where x and y are bf16; NULL -> not requested */
    double own, other, cross;
    float own_max, other_max;
    bool infinite;
} xdi_tile_pair;

/* The Jensen-Shannon divergence. P and Q are the probabilities of the student and the teacher, m their mixture, p and q the
 * powers, which lack the remainder of the normaliser: log2 P = factor x - whole - rest. */
typedef struct xdi_tile_mixture {
    xdi_tile_power p, q;
    float p_rest, q_rest;
    float p_share, q_share; /* of the mixture */
    float top;              /* subtracted from log2(P/m) */
} xdi_tile_mixture;

/* How the gradient of a row is formed: the sum of the hard part and of a soft part.
 *   hard      hard_scale h - uniform              h: the student's power at temperature 1
 *   FORWARD   soft_scale p - teacher_scale q
 *   REVERSE   soft_scale p (factor ((x - student_from) - (y - teacher_from)) - mean)
 *   MIXTURE   soft_scale p (log2(P/m) - top)
 *   OUTSIDE   p (soft_scale + teacher_scale log2 p)   top-k: no teacher */
typedef enum xdi_tile_soft {
    XDI_TILE_NONE = 0,
    XDI_TILE_FORWARD,
    XDI_TILE_REVERSE,
    XDI_TILE_MIXTURE,
    XDI_TILE_OUTSIDE
} xdi_tile_soft;

typedef struct xdi_tile_gradient {
    xdi_simd_array x, y, out;
    bool streamed; /* the stores bypass the caches: out begins at a cache line, and `fence` follows */
    /* Memory to prefetch meanwhile, with a teacher only: elements [32 k, 32 k + 32) prefetch line k / 2 of the first or, for
     * odd k, of the second; NULL -> nothing. */
    const char *ahead[2];
    bool hard;
    xdi_tile_power h;
    float hard_scale, uniform;
    xdi_tile_power p, q;
    float soft_scale, teacher_scale, mean;
    float student_from, teacher_from; /* REVERSE: the logits of the student's most probable id */
    xdi_tile_mixture mixture;
} xdi_tile_gradient;

/* The gradient p_scale p - q_scale q from the powers that a pair has stored, in bf16. */
typedef struct xdi_tile_kept {
    float *p, *q;
    float p_scale, q_scale;
    xdi_simd_array out;
    bool streamed; /* as in xdi_tile_gradient */
} xdi_tile_kept;

/* One set of loops. n is the number of elements. */
typedef struct xdi_tiles {
    /* Largest element, -infinity without one; NaN when there is a NaN. */
    float (*max)(xdi_simd_array x, int64_t n);
    /* Sum of the elements less `reference`. */
    double (*linear)(xdi_simd_array x, int64_t n, float reference);
    /* Sum of the powers, of power times its logarithm in base 2 when wanted, and the largest element, ignoring NaN. */
    double (*sum)(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment, float *max);
    void (*pair)(xdi_tile_pair *pair, int64_t n);
    /* Sums of p (log2(P/m) - top) and of q log2(Q/m). */
    void (*mixture)(xdi_simd_array x, xdi_simd_array y, const xdi_tile_mixture *m, int64_t n, double *p_sum,
                    double *q_sum);
    void (*gradient)(const xdi_tile_gradient *g, xdi_tile_soft soft, int64_t n);
    void (*kept)(const xdi_tile_kept *g, int64_t n);
    void (*fence)(void);
    /* maxima[i] becomes element i where that is larger. */
    void (*raise)(xdi_simd_array x, int64_t n, float *maxima);
    /* Writes the indices of the elements that are >= threshold and their keys, in order, while there is room
     * for n more; returns how many. */
    int64_t (*collect)(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices, uint32_t *keys,
                       int64_t room);
    /* Least and largest of n >= 1 keys. */
    void (*range)(const uint32_t *keys, int64_t n, uint32_t *first, uint32_t *last);
    /* bins[i] becomes the sum of the ones before it; n is a multiple of 16. */
    void (*offsets)(uint32_t *bins, int64_t n);
    /* n records, key in the upper half and index in the lower: writes the keys' values, and the indices plus `first`. True when
     * a value is zero, whose sign the key lacks. */
    bool (*unpack)(const uint64_t *records, int64_t n, int64_t first, double *values, int64_t *ids);
    /* gradient with the same bits on every level: invariant.inc */
    void (*invariant)(const xdi_tile_gradient *g, xdi_tile_soft soft, int64_t n);
} xdi_tiles;

/* How many vectors go through a long computation together, step by step; how many are summed before they are joined with the
 * rest, so that lanes never add many terms to a large sum; and where differences of logarithms are clamped. */
enum { XDI_TILE_BLOCK = 32, XDI_TILE_CHAIN = 64 };
#define XDI_TILE_APART 120.0f

/* Padding whose power is 0: finite, and its exponent too. */
#define XDI_TILE_LEAST (-1e30f)

/* rest.c: elements [i, n) of collect, after `count` matches before them; and all of unpack, one by one. */
XD_PRIVATE int64_t xdi_tile_collect_rest(xdi_simd_array x, int64_t i, int64_t n, float threshold,
                                         uint32_t *indices, uint32_t *keys, int64_t count, int64_t room);
XD_PRIVATE bool xdi_tile_unpack_rest(const uint64_t *records, int64_t n, int64_t first, double *values,
                                     int64_t *ids);

/* tiles.c */
XD_PRIVATE xdi_tile_power xdi_tile_power_of(double factor, double whole);

/* A row's largest element, the tile where it is first, and the sum of e^((x - max) / temperature). */
typedef struct xdi_row_sum {
    double max, sum;
    int64_t tile;
} xdi_row_sum;

/* rows.c: the sums over a row, factor = log2(e) / temperature. False where f32 does not suffice, for NaN and for rows without a
 * number. */
XD_PRIVATE bool xdi_simd_row_sum(const xdi_tiles *tiles, const xd_rows *x, int64_t row, int64_t columns,
                                 double factor, xdi_row_sum *out);

/* tiles.c: the loops of the context's level; the plain one has `invariant` and `fence` alone. */
XD_PRIVATE const xdi_tiles *xdi_simd_tiles(const xd_launch *launch);
/* tiles.c: whether powers of numbers up to max can be computed. The bound keeps factor x accurate enough. */
XD_PRIVATE bool xdi_simd_fits(double max, double factor);
/* tiles.c: elements from one row to the next, a row from one column on, and how many elements the tile has that
 * begins at column c. */
XD_PRIVATE int64_t xdi_simd_stride(const xd_rows *x);
XD_PRIVATE xdi_simd_array xdi_simd_array_of(const xd_rows *x, int64_t row, int64_t column);
XD_PRIVATE int64_t xdi_simd_tile_at(int64_t c, int64_t columns);

/* A row's powers relative to the integer nearest to the normaliser: probability = power 2^-rest. */
typedef struct xdi_simd_power {
    xdi_tile_power power;
    double rest;
} xdi_simd_power;

/* loss.c: those of a row with this maximum and logarithm of the sum of e^((x - max) / temperature). */
XD_PRIVATE xdi_simd_power xdi_simd_normalised(double factor, double max, double log_sum);
/* loss.c: whether a gradient's stores bypass the caches; not where it overwrites one of these. */
XD_PRIVATE bool xdi_simd_streams(const xd_rows *gradient, const void *student, const void *teacher);

#endif
