/* What losses across tokenizers compute with, in the table of a CPU level. */

#include "kernel/cpu/uld.h"
#include "kernel/cpu/xtoken.h"
#include "kernel/simd/across.h"
#include "kernel/wings.h"

XD_PRIVATE void xdi_kernels_across(xd_cpu_level level, xd_kernels *kernels) {
    kernels->xtoken = *xdi_xtoken_kernels_plain();
    kernels->uld = *xdi_uld_kernels_plain();
    if (level == XD_CPU_PLAIN) return;
    xdi_simd_xtoken_fill(&kernels->xtoken);
    xdi_simd_uld_fill(&kernels->uld);
}
