#ifndef XDI_KERNEL_CPU_DMD_H
#define XDI_KERNEL_CPU_DMD_H

#include "kernel/dmd.h"
#include "kernel/internal.h"

/* The plain table, the specification of the others. */
XD_PRIVATE const xd_dmd_kernels *xdi_dmd_kernels_plain(void);

#endif
