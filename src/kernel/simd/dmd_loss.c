/* Losses over samples on vectors: kernel/simd/dmd_loss.inc compiled for each level. */

#include "kernel/cpu/dmd_loss.h"
#include "kernel/simd/dmd.h"
#include "kernel/simd/simd.h"

#include <math.h>

#if defined(XDI_PORTABLE)
#    define XDI_SAMPLE(name) xdi_portable_sample_##name
#    define XDI_SAMPLE_LOOP static
#    include "kernel/simd/dmd_loss.inc"
#    undef XDI_SAMPLE
#    undef XDI_SAMPLE_LOOP
#endif

#if defined(XDI_X86)
#    define XDI_SAMPLE(name) xdi_avx2_sample_##name
#    define XDI_SAMPLE_LOOP __attribute__((target("avx2,fma"))) static
#    include "kernel/simd/dmd_loss.inc"
#    undef XDI_SAMPLE
#    undef XDI_SAMPLE_LOOP

#    define XDI_SAMPLE(name) xdi_avx512_sample_##name
#    define XDI_SAMPLE_LOOP __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))) static
#    include "kernel/simd/dmd_loss.inc"
#    undef XDI_SAMPLE
#    undef XDI_SAMPLE_LOOP
#endif

static xdi_sample_level xdi_simd_sample_level(const xd_launch *launch) {
    const xd_cpu_level cpu = xd_ctx_settings(launch->ctx)->cpu;
    xdi_sample_level level = { NULL, xdi_span_kernels_level(cpu), xdi_sample_tiles_level(cpu) };
#if defined(XDI_PORTABLE)
    level.loops = &xdi_portable_sample_loops;
#endif
#if defined(XDI_X86)
    if (cpu == XD_CPU_AVX2) level.loops = &xdi_avx2_sample_loops;
    if (cpu == XD_CPU_AVX512 || cpu == XD_CPU_AVX512_BF16) level.loops = &xdi_avx512_sample_loops;
#endif
    return level;
}

static xd_result xdi_simd_vsd_measure(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_measure(launch, args, xdi_simd_sample_level(launch));
}

static xd_result xdi_simd_vsd_rounded(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_rounded(launch, args, xdi_simd_sample_level(launch));
}

static xd_result xdi_simd_vsd_slope(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_slope(launch, args, xdi_simd_sample_level(launch));
}

static xd_result xdi_simd_denoise_measure(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_denoise_measure(launch, args, xdi_simd_sample_level(launch));
}

static xd_result xdi_simd_denoise_slope(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_denoise_slope(launch, args, xdi_simd_sample_level(launch));
}

static xd_result xdi_simd_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_by_sample(launch, args, xdi_simd_sample_level(launch));
}

static xd_result xdi_simd_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_denoise_by_sample(launch, args, xdi_simd_sample_level(launch));
}

/* The entries that read elements; what runs once per sample stays plain. */
XD_PRIVATE void xdi_simd_dmd_loss_fill(xd_dmd_loss_kernels *kernels) {
    kernels->vsd_measure = xdi_simd_vsd_measure;
    kernels->vsd_rounded = xdi_simd_vsd_rounded;
    kernels->vsd_slope = xdi_simd_vsd_slope;
    kernels->denoise_measure = xdi_simd_denoise_measure;
    kernels->denoise_slope = xdi_simd_denoise_slope;
    kernels->vsd_by_sample = xdi_simd_vsd_by_sample;
    kernels->denoise_by_sample = xdi_simd_denoise_by_sample;
}
