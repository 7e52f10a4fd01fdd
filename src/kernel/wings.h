#ifndef XDI_KERNEL_WINGS_H
#define XDI_KERNEL_WINGS_H

#include "base/section.h"
#include "kernel/kernels.h"

/* across.c, diffusion.c: the entries of a wing, of a level that this machine has. An option leaves them out with the wing; they are
 * NULL then. */
#ifndef XDISTILL_NO_ACROSS
XD_PRIVATE void xdi_kernels_across(xd_cpu_level level, xd_kernels *kernels);
#endif
#ifndef XDISTILL_NO_DIFFUSION
XD_PRIVATE void xdi_kernels_diffusion(xd_cpu_level level, xd_kernels *kernels);
#endif

#endif
