#ifndef XDI_KERNEL_SIMD_DMD_H
#define XDI_KERNEL_SIMD_DMD_H

#include "kernel/simd/internal.h"

/* The entries of diffusion models that are faster with vectors. */
XD_PRIVATE void xdi_simd_dmd_fill(xd_dmd_kernels *kernels);
XD_PRIVATE void xdi_simd_dmd_loss_fill(xd_dmd_loss_kernels *kernels);

#endif
