/* What diffusion models compute with, in the table of a CPU level. */

#include "kernel/cpu/dmd.h"
#include "kernel/cpu/dmd_loss.h"
#include "kernel/simd/dmd.h"
#include "kernel/wings.h"

XD_PRIVATE void xdi_kernels_diffusion(xd_cpu_level level, xd_kernels *kernels) {
    kernels->dmd = *xdi_dmd_kernels_plain();
    kernels->dmd_loss = *xdi_dmd_loss_kernels_plain();
    if (level == XD_CPU_PLAIN) return;
    xdi_simd_dmd_fill(&kernels->dmd);
    xdi_simd_dmd_loss_fill(&kernels->dmd_loss);
}
