/* How many powers and logarithms a level of the library takes a second, from the first cache and with nothing else
 * to do: the ceilings of what arithmetic bounds. A caller measures many short windows. */
#ifndef XDISTILL_BENCH_UNITS_H
#define XDISTILL_BENCH_UNITS_H

/* The sums of 2^(factor x - whole) and of log2 x over the XDI_TILE numbers of x, in two chains. */
#define BENCH_UNITS(v, LEAF)                                                    \
    LEAF double bench_powers_##v(xdi_simd_array x) {                            \
        const xdi_tile_power tile = xdi_tile_power_of(XDI_TILE_LOG2E, 8.0);     \
        v##_power_of power;                                                     \
        v##_prepare(&tile, 1.0f, &power);                                       \
        v sum = v##_set(0.0f), more = sum;                                      \
        for (int64_t i = 0; i < XDI_TILE; i += 2 * v##_lanes) {                 \
            sum = v##_add(sum, v##_exp2(v##_load(x, i), &power));               \
            more = v##_add(more, v##_exp2(v##_load(x, i + v##_lanes), &power)); \
        }                                                                       \
        return v##_total(v##_add(sum, more));                                   \
    }                                                                           \
    LEAF double bench_logarithms_##v(xdi_simd_array x) {                        \
        v sum = v##_set(0.0f), more = sum;                                      \
        for (int64_t i = 0; i < XDI_TILE; i += 2 * v##_lanes) {                 \
            sum = v##_add(sum, v##_log2(v##_load(x, i)));                       \
            more = v##_add(more, v##_log2(v##_load(x, i + v##_lanes)));         \
        }                                                                       \
        return v##_total(v##_add(sum, more));                                   \
    }
#if defined(XDI_PORTABLE)
BENCH_UNITS(xdi_v4, XDI_SIMD_128)
#endif
#if defined(XDI_X86)
BENCH_UNITS(xdi_v8, XDI_SIMD_256)
BENCH_UNITS(xdi_v16, XDI_SIMD_512)
#endif

/* What plain kernels take. */
static double bench_powers_plain(xdi_simd_array x) {
    double sum = 0.0;
    for (int i = 0; i < XDI_TILE; i++) sum += exp((double)((const float *)x.data)[i]);
    return sum;
}

static double bench_logarithms_plain(xdi_simd_array x) {
    double sum = 0.0;
    for (int i = 0; i < XDI_TILE; i++) sum += log((double)((const float *)x.data)[i]);
    return sum;
}

/* The loop of a level. Asking which level is best is slow on some machines: ask once. */
static double (*bench_units_of(xd_cpu_level level, bool logarithms))(xdi_simd_array) {
#if defined(XDI_X86)
    if (level == XD_CPU_AVX2) return logarithms ? bench_logarithms_xdi_v8 : bench_powers_xdi_v8;
    if (level >= XD_CPU_AVX512) return logarithms ? bench_logarithms_xdi_v16 : bench_powers_xdi_v16;
#endif
#if defined(XDI_PORTABLE)
    if (level == XD_CPU_PORTABLE) return logarithms ? bench_logarithms_xdi_v4 : bench_powers_xdi_v4;
#endif
    (void)level;
    return logarithms ? bench_logarithms_plain : bench_powers_plain;
}

#endif
