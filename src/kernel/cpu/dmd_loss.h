#ifndef XDI_KERNEL_CPU_DMD_LOSS_H
#define XDI_KERNEL_CPU_DMD_LOSS_H

#include "kernel/dmd_loss_scalar.h"
#include "kernel/internal.h"
#include "kernel/span.h"

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

/* What an entry runs on. */
typedef struct xdi_sample_level {
    const xdi_sample_loops *loops;
    const xdi_span_kernels *spans;
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
