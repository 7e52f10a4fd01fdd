/* Spans for any processor. They differ from the plain ones where those call functions: fmaf of the math library, when the
 * compiler may not use the instruction, and the conversions of halves. */

#include "base/half.h"
#include "kernel/simd/internal.h"

#if defined(XDI_PORTABLE)
#    include <math.h>
#    include <string.h>

#    if defined(__FP_FAST_FMAF)
static inline float xdi_portable_fma(float a, float b, float c) {
    return fmaf(a, b, c);
}
#    else
/* a * b is exact in double, so only the sum is rounded, to double and then to float. Rounding twice
 * differs from rounding once only if the double lies halfway between two floats: then its 29 lowest bits
 * are 1000... Results in the range of subnormal floats, which end at another bit, are left to fmaf too. */
static inline float xdi_portable_fma(float a, float b, float c) {
    const double sum = (double)a * (double)b + (double)c;
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    const bool halfway = (bits & 0x1fffffffu) == 0x10000000u;
    const bool tiny = fabs(sum) < 1.1754943508222875e-38 && sum != 0.0;
    return halfway || tiny ? fmaf(a, b, c) : (float)sum;
}
#    endif

static void xdi_portable_widen(const uint16_t *from, xd_dtype dtype, float *to, int64_t n) {
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_from_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_from_f16(from[i]);
}

static void xdi_portable_narrow(const float *from, uint16_t *to, xd_dtype dtype, int64_t n) {
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_to_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_to_f16(from[i]);
}

static void xdi_portable_adam(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                              int64_t at, int64_t n) {
    const xd_update_rules rules = xdi_update_rules_of(args);
    const xd_update_scalars s = xdi_update_scalars_of(args, a);
    for (int64_t i = 0; i < n; i++) {
        const float p = a->master[at + i];
        float m = a->first[at + i], v = a->second[at + i];
        float g = xd_update_gradient(&rules, &s, gradient[i]);
        if (args->couple_decay) g = xdi_portable_fma(a->weight_decay, p, g);
        const float kept = args->couple_decay ? p : p * a->decay;
        m = xdi_portable_fma(args->one_minus_beta1, g - m, m);
        v = xdi_portable_fma(args->one_minus_beta2, g * g, args->beta2 * v);
        const float denominator = sqrtf(v) / a->root_correction + args->eps;
        a->master[at + i] = xdi_portable_fma(-a->step_size, m / denominator, kept);
        a->first[at + i] = m;
        a->second[at + i] = v;
    }
}

static void xdi_portable_sgd(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                             int64_t at, int64_t n) {
    const xd_update_rules rules = xdi_update_rules_of(args);
    const xd_update_scalars s = xdi_update_scalars_of(args, a);
    for (int64_t i = 0; i < n; i++) {
        const float p = a->master[at + i];
        const float g = xdi_portable_fma(a->weight_decay, p, xd_update_gradient(&rules, &s, gradient[i]));
        const float buffer = a->fresh ? g : xdi_portable_fma(args->momentum, a->first[at + i], g);
        a->first[at + i] = buffer;
        a->master[at + i] = xdi_portable_fma(-a->step_size, buffer, p);
    }
}

static void xdi_portable_lerp(const xdi_span_average *average, float *target, const float *source,
                              int64_t n) {
    const float weight = average->weight;
    if (average->weighted_sum)
        for (int64_t i = 0; i < n; i++)
            target[i] = xdi_portable_fma(weight, source[i], average->keep * target[i]);
    else if (fabsf(weight) < 0.5f)
        for (int64_t i = 0; i < n; i++)
            target[i] = xdi_portable_fma(weight, source[i] - target[i], target[i]);
    else
        for (int64_t i = 0; i < n; i++)
            target[i] = xdi_portable_fma(weight - 1.0f, source[i] - target[i], source[i]);
}

static void xdi_portable_scale(float *x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

static void xdi_portable_add(float *sum, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
}

/* Four independent sums, so that an addition need not wait for the previous one. */
static double xdi_portable_power_sum(const void *data, xd_dtype dtype, xd_norm_type type, int64_t n) {
    float widened[XDI_SPAN];
    const float *x = (const float *)data;
    double sum[4] = { 0.0, 0.0, 0.0, 0.0 };
    if (type == XD_NORM_MAX) return xdi_span_kernels_plain()->power_sum(data, dtype, type, n);
    if (dtype != XD_DTYPE_F32) {
        xdi_portable_widen((const uint16_t *)data, dtype, widened, n);
        x = widened;
    }
    for (int64_t i = 0; i < n; i++)
        sum[i % 4] += type == XD_NORM_L2 ? (double)x[i] * (double)x[i] : fabs((double)x[i]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static const xdi_span_kernels xdi_portable_spans = {
    xdi_portable_widen,
    xdi_portable_narrow,
    xdi_portable_adam,
    xdi_portable_sgd,
    xdi_portable_lerp,
    xdi_portable_scale,
    xdi_portable_add,
    xdi_portable_power_sum,
    NULL,
    true,
    NULL,
    NULL,
    NULL,
    NULL,
    NULL,
};

XDI_SPAN_ENTRIES(portable, xdi_portable_spans)

#endif
