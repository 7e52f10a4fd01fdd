#ifndef XDI_KERNEL_CPU_DMD_LOSS_H
#define XDI_KERNEL_CPU_DMD_LOSS_H

#include "kernel/dmd_loss_scalar.h"
#include "kernel/internal.h"
#include "kernel/span.h"

/* The plain table, the specification of the others. */
XD_PRIVATE const xd_dmd_loss_kernels *xdi_dmd_loss_kernels_plain(void);

/* Losses over samples are written once, on loops over f32 that a CPU level compiles for its vectors. All of them have the same
 * bits: elements are apart from each other, no product that is added has a rounding error, and lanes are those of
 * kernel/dmd_loss.h. n is at most XD_SAMPLE_TILE.
 *   difference  out = a - b
 *   residual    out = xd_denoise_residual
 *   lanes       lanes[l] = the sum of |x_i|, or of its square, over i % XD_SAMPLE_LANES = l in ascending order; all of them are set
 *   scaled      out = factor x, in double; out may be x */
typedef struct xdi_sample_loops {
    void (*difference)(const float *a, const float *b, float *out, int64_t n);
    void (*residual)(const xd_denoise_term *term, const float *const *in, float *out, int64_t n);
    void (*lanes)(const float *x, int64_t n, bool square, double *lanes);
    void (*scaled)(const float *x, double factor, float *out, int64_t n);
} xdi_sample_loops;

/* Where tiles write a gradient. */
typedef struct xdi_sample_out {
    void *data;
    bool streamed; /* past the caches: data is a multiple of 64 bytes, and `fence` follows */
} xdi_sample_out;

/* Elements that every level takes at a time. */
enum { XDI_SAMPLE_STEP = 32 };

/* Factors of gradients are in [XDI_SAMPLE_LEAST, 1 / XDI_SAMPLE_LEAST], which f32 holds with all of its bits. */
#define XDI_SAMPLE_LEAST 1e-30

/* A gradient whose factor is known: of a tile, or of a part. */
typedef struct xdi_sample_slopes {
    const void *in[3];
    double factor;
    xdi_sample_out out;
} xdi_sample_slopes;

/* The same over tensors of one dtype, F32 or BF16, where no mask is and sums are not fixed. Rows of `in` are the loss's three
 * tensors: x, T and F, or prediction, clean and noise, whose factors are those of an xd_denoise_term as f32. Sums are of a whole
 * tile, lanes joined; of slopes n is a multiple of XDI_SAMPLE_STEP.
 *   vsd_sums        sums[0] of |x - T|, sums[1] of (F - T)^2. Writes the gradient of a whole other tile of the dtype meanwhile:
 *                   both directions of memory are busy. NULL: none
 *   vsd_slopes      out = factor (F - T)
 *   denoise_sum     the sum of r^2
 *   denoise_both    the same, and out = factor r of the tile
 *   denoise_slopes  out = factor r
 *   fence           streamed stores are in memory before later ones */
typedef struct xdi_sample_tiles {
    void (*vsd_sums)(const void *const *in, bool bf16, const xdi_sample_slopes *meanwhile, double *sums);
    void (*vsd_slopes)(const xdi_sample_slopes *slopes, bool bf16, int64_t n);
    double (*denoise_sum)(const float factors[3], const void *const *in, bool bf16);
    double (*denoise_both)(const float factors[3], const void *const *in, bool bf16, double factor,
                           const xdi_sample_out *out);
    void (*denoise_slopes)(const float factors[3], const void *const *in, bool bf16, double factor,
                           const xdi_sample_out *out, int64_t n);
    void (*fence)(void);
} xdi_sample_tiles;

/* simd/dmd_tiles.c: those of a level; NULL where it has none. */
XD_PRIVATE const xdi_sample_tiles *xdi_sample_tiles_level(xd_cpu_level level);

/* What an entry runs on. */
typedef struct xdi_sample_level {
    const xdi_sample_loops *loops;
    const xdi_span_kernels *spans;
    const xdi_sample_tiles *tiles; /* NULL: not offered */
} xdi_sample_level;

/* cpu/dmd_loss.c: the entries with elements, on a level. */
XD_PRIVATE xd_result xdi_vsd_measure(const xd_launch *launch, const xd_vsd_args *a, xdi_sample_level level);
XD_PRIVATE xd_result xdi_vsd_rounded(const xd_launch *launch, const xd_vsd_args *a, xdi_sample_level level);
XD_PRIVATE xd_result xdi_vsd_slope(const xd_launch *launch, const xd_vsd_args *a, xdi_sample_level level);
XD_PRIVATE xd_result xdi_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *a, xdi_sample_level level);
XD_PRIVATE xd_result xdi_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *a,
                                           xdi_sample_level level);
XD_PRIVATE xd_result xdi_denoise_measure(const xd_launch *launch, const xd_denoise_args *a,
                                         xdi_sample_level level);
XD_PRIVATE xd_result xdi_denoise_slope(const xd_launch *launch, const xd_denoise_args *a,
                                       xdi_sample_level level);

#endif
