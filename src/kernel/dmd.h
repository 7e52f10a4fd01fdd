#ifndef XDI_KERNEL_DMD_H
#define XDI_KERNEL_DMD_H

#include "kernel/types.h"

/* What distribution matching computes on rows of samples: [samples, elements], each row one sample or a part of one.
 *
 *   mix   out = c0 p + c1 q, row by row with the row's own factors: the forward process, every conversion between
 *         predictions, guidance. In double: round(fma(c0, p, c1 q)) with the product c1 q rounded to double, and one
 *         rounding to the type of out, also to F16 and BF16. Without q, and in rows whose c1 is 0, q is not read and the
 *         result is round(c0 p). The bits are the same on every level and device; where p and q are both NaN the result is
 *         one NaN or the other. */
typedef struct xd_dmd_kernels {
    xd_result (*mix)(const xd_launch *launch, const xd_mix_desc *desc);
} xd_dmd_kernels;

/* The plain CPU implementation, the specification of the others. */
XD_API const xd_dmd_kernels *xd_dmd_kernels_cpu(void);

#endif
