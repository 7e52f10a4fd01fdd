/* A machine without a level never runs it; see xd_kernels_cpu. */
XD_PRIVATE const xdi_span_kernels *xdi_span_kernels_level(xd_cpu_level level) {
    if (level == XD_CPU_PLAIN) return xdi_span_kernels_plain();
#if defined(XDI_X86)
    if (level >= XD_CPU_AVX512) return &xdi_avx512_spans;
    if (level == XD_CPU_AVX2) return &xdi_avx2_spans;
#endif
    return &xdi_portable_spans;
}

XD_PRIVATE xd_optimizer_kernels xdi_optimizer_kernels_level(xd_cpu_level level) {
    if (level == XD_CPU_PLAIN) return *xd_optimizer_kernels_cpu();
#if defined(XDI_X86)
    if (level >= XD_CPU_AVX512) return xdi_avx512_optimizer;
    if (level == XD_CPU_AVX2) return xdi_avx2_optimizer;
#endif
    return xdi_portable_optimizer;
}
