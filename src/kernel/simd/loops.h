#ifndef XDI_KERNEL_SIMD_LOOPS_H
#define XDI_KERNEL_SIMD_LOOPS_H

#include <float.h>

#include "kernel/cpu/exact.h"
#include "kernel/simd/across.h"
#include "kernel/simd/tiles.h"

/* The inner loops of a vector width: one table of each family. loops.inc holds them, the file of a CPU level
 * includes it. */

/* ---- exact sums ---- */

/* The logits of a tile and the references of their terms. */
typedef struct xdi_exact_tile {
    xdi_simd_array x, y; /* student and teacher */
    double max, teacher_max, teacher_at_arg, scale;
} xdi_exact_tile;

/* The functions of a level on n columns, a multiple of `lanes`. False when the plain kernels must compute the tile; the
 * sums must not be used then.
 *   powers    sum e^((x - max) scale)
 *   moments   the same, and of those powers times their exponents
 *   linear    sum x - max
 *   pair      SOFT, TEACHER and CROSS of kernel/loss.h
 *   mixture   the sums of the Jensen-Shannon divergence */
typedef struct xdi_exact_level {
    int lanes;
    bool (*powers)(xdi_simd_array x, int64_t n, double max, double scale, xd_fixed *sum);
    bool (*moments)(xdi_simd_array x, int64_t n, double max, double scale, xd_fixed *sum, xd_fixed *moment);
    bool (*linear)(xdi_simd_array x, int64_t n, double max, xd_fixed *sum);
    bool (*pair)(const xdi_exact_tile *tile, int64_t n, xd_divergence divergence, xd_fixed *sums);
    bool (*mixture)(const xdi_exact_tile *tile, int64_t n, const xd_loss_row *row, double beta,
                    xd_fixed *sums);
} xdi_exact_level;

/* ---- minimal fine-tuning and the cosine ---- */

/* A row's terms of minimal fine-tuning: with q = 2^(...) q_scale they are weight q (slope ((y - y_max) - (x - x_max)) +
 * shift), whose differences lose no accuracy where q is large. */
typedef struct xdi_mft_tile {
    xdi_simd_array x, y, out;
    xdi_tile_power power;
    float q_scale, weight, x_max, y_max, slope, shift;
} xdi_mft_tile;

/* One set of loops over n elements.
 *   largest    largest magnitude, infinity when there is a NaN
 *   products   sums of the products of x and y
 *   exact      the same of x x_scale and y y_scale, whose magnitudes are below 1
 *   slopes     out = of_x x + of_y y */
typedef struct xdi_mft_level {
    void (*terms)(const xdi_mft_tile *tile, int64_t n);
    float (*largest)(xdi_simd_array x, int64_t n);
    void (*products)(xdi_simd_array x, xdi_simd_array y, int64_t n, double *sums);
    void (*exact)(xdi_simd_array x, xdi_simd_array y, int64_t n, double x_scale, double y_scale,
                  xd_fixed *sums);
    void (*slopes)(xdi_simd_array x, xdi_simd_array y, xdi_simd_array out, int64_t n, double of_x,
                   double of_y);
} xdi_mft_level;

/* ---- maxima of columns ---- */

/* Number of rows whose columns are compared together, of bf16 and of f32: memory is read in long runs, and each maximum
 * is loaded and stored once for all of them. With three rows of f32 or more, some processors' prefetchers fail. */
enum { XDI_ROWS_AT_ONCE = 4, XDI_ROWS_OF_F32 = 2, XDI_ROWS_PIECE = 4096 };

typedef bool (*xdi_rows_raise)(const xdi_simd_array *x, int64_t n, float *maxima);

/* ---- all of a width ---- */

typedef struct xdi_loops {
    const xdi_tiles *tiles;
    const xdi_exact_level *exact;
    const xdi_mft_level *mft;
    xdi_rows_raise raise;
#ifndef XDISTILL_NO_ACROSS
    const xdi_uld_loops *uld;
    const xdi_xtoken_loops *xtoken;
#endif
} xdi_loops;

/* portable.c: what the plain level uses of its loops. */
XD_PRIVATE const xdi_tiles *xdi_tiles_plain(void);
/* <level>.c */
#if defined(XDI_PORTABLE)
XD_PRIVATE const xdi_loops *xdi_loops_portable(void);
#endif
#if defined(XDI_X86)
XD_PRIVATE const xdi_loops *xdi_loops_avx2(void);
XD_PRIVATE const xdi_loops *xdi_loops_avx512(void);
#endif

/* levels.c: those of a level, and of a context's; NULL for the plain one. */
XD_PRIVATE const xdi_loops *xdi_loops_level(xd_cpu_level level);
XD_PRIVATE const xdi_loops *xdi_loops_of(const xd_launch *launch);

#endif
