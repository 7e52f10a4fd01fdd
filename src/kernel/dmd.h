#ifndef XDI_KERNEL_DMD_H
#define XDI_KERNEL_DMD_H

#include "kernel/dmd_types.h"

/* What distribution matching computes on rows of samples: [samples, elements], each row one sample or a part of one.
 *
 *   mix   out = c0 p + c1 q, row by row with the row's own factors: the forward process, every conversion between
 *         predictions, guidance. In double: round(fma(c0, p, c1 q)) with the product c1 q rounded to double, and one
 *         rounding to the type of out, also to F16 and BF16. Without q, and in rows whose c1 is 0, q is not read and the
 *         result is round(c0 p). The bits are the same on every level and device; where p and q are both NaN the result is
 *         one NaN or the other.
 *   draw  row r, column c = number first + c of the Philox sequence of the row's sample, formed in f32 and rounded once to the type
 *         of out. The bits are the same on every level and device. NULL: the host draws, and what it has drawn is copied. */
typedef struct xd_dmd_kernels {
    xd_result (*mix)(const xd_launch *launch, const xd_mix_desc *desc);
    xd_result (*draw)(const xd_launch *launch, const xd_draw_desc *desc); /* out.stride is not 0 */
} xd_dmd_kernels;

#endif
