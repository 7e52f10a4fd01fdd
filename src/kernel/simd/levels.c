/* The CPU levels and the functions of each. Another instruction set takes a file like avx2.c, a line here, and one in
 * base/cpu.c. */

#include "kernel/simd/loops.h"

typedef struct xdi_level {
    xd_cpu_level level;
    const xdi_loops *(*loops)(void);
    const xdi_span_kernels *(*spans)(void);
    const xd_optimizer_kernels *(*optimizer)(void);
    xdi_matmul_kernel (*matmul)(bool bf16);
} xdi_level;

/* Plain kernels have no loops. */
static const xdi_level xdi_levels[] = {
    { XD_CPU_PLAIN, NULL, xdi_span_kernels_plain, xdi_optimizer_kernels_plain, xdi_matmul_kernel_portable },
#if defined(XDI_PORTABLE)
    { XD_CPU_PORTABLE, xdi_loops_portable, xdi_span_kernels_portable, xdi_optimizer_kernels_portable,
      xdi_matmul_kernel_portable },
#endif
#if defined(XDI_X86)
    { XD_CPU_AVX2, xdi_loops_avx2, xdi_span_kernels_avx2, xdi_optimizer_kernels_avx2,
      xdi_matmul_kernel_avx2 },
    { XD_CPU_AVX512, xdi_loops_avx512, xdi_span_kernels_avx512, xdi_optimizer_kernels_avx512,
      xdi_matmul_kernel_avx512 },
    { XD_CPU_AVX512_BF16, xdi_loops_avx512, xdi_span_kernels_avx512, xdi_optimizer_kernels_avx512,
      xdi_matmul_kernel_avx512_bf16 },
#endif
};

/* Contexts and xdi_kernels_cpu have checked that the level exists. */
static const xdi_level *xdi_level_of(xd_cpu_level level) {
    const xdi_level *found = xdi_levels;
    for (size_t i = 0; i < sizeof xdi_levels / sizeof *xdi_levels; i++)
        if (xdi_levels[i].level == level) found = &xdi_levels[i];
    return found;
}

XD_PRIVATE const xdi_loops *xdi_loops_level(xd_cpu_level level) {
    return xdi_level_of(level)->loops ? xdi_level_of(level)->loops() : NULL;
}

XD_PRIVATE const xdi_loops *xdi_loops_of(const xd_launch *launch) {
    return xdi_loops_level(xd_ctx_settings(launch->ctx)->cpu);
}

XD_PRIVATE const xdi_span_kernels *xdi_span_kernels_level(xd_cpu_level level) {
    return xdi_level_of(level)->spans();
}

XD_PRIVATE const xd_optimizer_kernels *xdi_optimizer_kernels_level(xd_cpu_level level) {
    return xdi_level_of(level)->optimizer();
}

XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_level(xd_cpu_level level, bool bf16) {
    return xdi_level_of(level)->matmul(bf16);
}
