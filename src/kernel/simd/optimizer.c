/* Which spans a CPU level uses. */

#include "kernel/simd/internal.h"

/* A machine without a level never runs it; see xd_kernels_cpu. */
XD_PRIVATE const xdi_span_kernels *xdi_span_kernels_level(xd_cpu_level level) {
    if (level == XD_CPU_PLAIN) return xdi_span_kernels_plain();
#if defined(XDI_X86)
    if (level >= XD_CPU_AVX512) return xdi_span_kernels_avx512();
    if (level == XD_CPU_AVX2) return xdi_span_kernels_avx2();
#endif
    return xdi_span_kernels_portable();
}

XD_PRIVATE xd_optimizer_kernels xdi_optimizer_kernels_level(xd_cpu_level level) {
    if (level == XD_CPU_PLAIN) return *xdi_optimizer_kernels_plain();
#if defined(XDI_X86)
    if (level >= XD_CPU_AVX512) return *xdi_optimizer_kernels_avx512();
    if (level == XD_CPU_AVX2) return *xdi_optimizer_kernels_avx2();
#endif
    return *xdi_optimizer_kernels_portable();
}
