/* How fast the vector logarithm of a level is: what benches measure their ceilings with. */
#ifndef XDISTILL_BENCH_LOGARITHMS_H
#define XDISTILL_BENCH_LOGARITHMS_H

/* The sum of log2 over the XDI_TILE numbers of x, in two chains. */
#define BENCH_LOGARITHMS(v, LEAF)                                       \
    LEAF double bench_logarithms_##v(xdi_simd_array x) {                \
        v sum = v##_set(0.0f), more = sum;                              \
        for (int64_t i = 0; i < XDI_TILE; i += 2 * v##_lanes) {         \
            sum = v##_add(sum, v##_log2(v##_load(x, i)));               \
            more = v##_add(more, v##_log2(v##_load(x, i + v##_lanes))); \
        }                                                               \
        return v##_total(v##_add(sum, more));                           \
    }
BENCH_LOGARITHMS(xdi_v4, XDI_SIMD_128)
#if defined(XDI_X86)
BENCH_LOGARITHMS(xdi_v8, XDI_SIMD_256)
BENCH_LOGARITHMS(xdi_v16, XDI_SIMD_512)
#endif

static double (*bench_logarithms_of(xd_cpu_level level))(xdi_simd_array) {
#if defined(XDI_X86)
    if (level == XD_CPU_AVX2) return bench_logarithms_xdi_v8;
    if (level >= XD_CPU_AVX512) return bench_logarithms_xdi_v16;
#endif
    (void)level;
    return bench_logarithms_xdi_v4;
}

#endif
