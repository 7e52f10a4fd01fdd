#include <math.h>
#include <string.h>

/* Narrow arrays are widened and rounded back in chunks on the stack; f32 arrays are used where they lie. */
enum { XDI_UPDATE_CHUNK = 512 };

/* A product that is added to something later would be fused with the addition under -ffp-contract=fast, which
 * changes bits. Passing it through here ends the expression. */
static float xdi_update_rounded(float product) {
#if defined(__GNUC__) && defined(__x86_64__)
    __asm__("" : "+x"(product));
    return product;
#elif defined(__GNUC__) && defined(__aarch64__)
    __asm__("" : "+w"(product));
    return product;
#else
    volatile float stored = product;
    return stored;
#endif
}

static bool xdi_update_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

/* Elements [at, at + n) of an array as f32: the array itself, or `buffer` filled with widened copies. */
static const float *xdi_update_widen(const void *data, xd_dtype dtype, int64_t at, int64_t n, float *buffer) {
    if (dtype == XD_DTYPE_F32) return (const float *)data + at;
    const uint16_t *half = (const uint16_t *)data + at;
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) buffer[i] = xd_f32_from_bf16(half[i]);
    else
        for (int64_t i = 0; i < n; i++) buffer[i] = xd_f32_from_f16(half[i]);
    return buffer;
}

static void xdi_update_narrow(const float *values, void *data, xd_dtype dtype, int64_t at, int64_t n) {
    if (dtype == XD_DTYPE_F32) {
        memcpy((float *)data + at, values, (size_t)n * sizeof *values);
        return;
    }
    uint16_t *half = (uint16_t *)data + at;
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) half[i] = xd_bf16_from_f32(values[i]);
    else
        for (int64_t i = 0; i < n; i++) half[i] = xd_f16_from_f32(values[i]);
}

static int64_t xdi_update_chunk(int64_t count, int64_t at) {
    const int64_t room = XDI_UPDATE_CHUNK;
    return count - at < room ? count - at : room;
}

static xd_result xdi_update_check(const xd_launch *launch, const xd_update_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_update_array *a = &args->arrays[k];
        XDI_REQUIRE(launch->ctx, xdi_update_takes(a->gradient_dtype), XD_ERROR_DTYPE,
                    "array %lld: gradients are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->gradient_dtype));
        XDI_REQUIRE(launch->ctx, !a->value || xdi_update_takes(a->value_dtype), XD_ERROR_DTYPE,
                    "array %lld: parameters are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->value_dtype));
    }
    return XD_OK;
}

/* The gradient an update works with: scaled and turned as asked. */
static float xdi_update_gradient(const xd_update_args *args, float gradient) {
    if (args->gradient_scale) gradient = xdi_update_rounded(gradient * *args->gradient_scale);
    return args->maximize ? -gradient : gradient;
}

/* adam: one step of AdamW or, with couple_decay, of Adam with L2 regularisation. All f32, in this order:
 *   g   = gradient * scale                        (no scale: no multiplication)
 *   P   = p * decay                               AdamW
 *   g   = fma(weight_decay, p, g),  P = p         L2 form
 *   m   = fma(1 - beta1, g - m, m)
 *   v   = fma(1 - beta2, g * g, beta2 * v)
 *   p   = fma(-step_size, m / (sqrt(v) / root_correction + eps), P) */
static void xdi_cpu_adam_chunk(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                               int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float p = a->master[at + i];
        float m = a->first[at + i], v = a->second[at + i];
        float g = xdi_update_gradient(args, gradient[i]);
        if (args->couple_decay) g = fmaf(a->weight_decay, p, g);
        const float kept = args->couple_decay ? p : p * a->decay;
        m = fmaf(args->one_minus_beta1, g - m, m);
        v = fmaf(args->one_minus_beta2, g * g, args->beta2 * v);
        const float denominator = sqrtf(v) / a->root_correction + args->eps;
        a->master[at + i] = fmaf(-a->step_size, m / denominator, kept);
        a->first[at + i] = m;
        a->second[at + i] = v;
    }
}

/* sgd: stochastic gradient descent with momentum, neither dampened nor Nesterov's. All f32, in this order:
 *   g      = gradient * scale,  then fma(weight_decay, p, g)
 *   buffer = g at the first gradient, afterwards fma(momentum, buffer, g)
 *   p      = fma(-step_size, buffer, p) */
static void xdi_cpu_sgd_chunk(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                              int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float p = a->master[at + i];
        const float g = fmaf(a->weight_decay, p, xdi_update_gradient(args, gradient[i]));
        const float buffer = a->fresh ? g : fmaf(args->momentum, a->first[at + i], g);
        a->first[at + i] = buffer;
        a->master[at + i] = fmaf(-a->step_size, buffer, p);
    }
}

typedef void (*xdi_update_chunk_function)(const xd_update_args *, const xd_update_array *, const float *,
                                          int64_t, int64_t);

/* Runs a chunk function over every array and writes the narrow copies. */
static xd_result xdi_update_run(const xd_launch *launch, const xd_update_args *args,
                                xdi_update_chunk_function run) {
    float widened[XDI_UPDATE_CHUNK];
    XDI_TRY(xdi_update_check(launch, args));
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_update_array *a = &args->arrays[k];
        for (int64_t at = 0; at < a->count; at += XDI_UPDATE_CHUNK) {
            const int64_t n = xdi_update_chunk(a->count, at);
            run(args, a, xdi_update_widen(a->gradient, a->gradient_dtype, at, n, widened), at, n);
            if (a->value) xdi_update_narrow(a->master + at, a->value, a->value_dtype, at, n);
        }
    }
    return XD_OK;
}

static xd_result xdi_cpu_adam(const xd_launch *launch, const xd_update_args *args) {
    return xdi_update_run(launch, args, xdi_cpu_adam_chunk);
}

static xd_result xdi_cpu_sgd(const xd_launch *launch, const xd_update_args *args) {
    return xdi_update_run(launch, args, xdi_cpu_sgd_chunk);
}

/* lerp: target <- target + w (source - target), w = 1 - keep formed in double and rounded once to the
 * arithmetic's type (1.0f - keep would be off by 0.02 % for 0.9999). The source is rounded to the target's
 * dtype first.
 *   d = source - target
 *   |w| <  0.5   fma(w, d, target)          w = 0 keeps the target, to the bit
 *   |w| >= 0.5   fma(w - 1, d, source)      w = 1 yields the source, to the bit
 * weighted_sum: fma(1 - keep, source, keep * target), the factors rounded once. */
static float xdi_cpu_lerp_f32(const xd_lerp_args *args, float target, float source) {
    const float weight = (float)(1.0 - args->keep);
    if (args->weighted_sum) return fmaf(weight, source, (float)args->keep * target);
    const float difference = source - target;
    return fabsf(weight) < 0.5f ? fmaf(weight, difference, target) : fmaf(weight - 1.0f, difference, source);
}

static double xdi_cpu_lerp_f64(const xd_lerp_args *args, double target, double source) {
    const double weight = 1.0 - args->keep;
    if (args->weighted_sum) return fma(weight, source, args->keep * target);
    const double difference = source - target;
    return fabs(weight) < 0.5 ? fma(weight, difference, target) : fma(weight - 1.0, difference, source);
}

/* The source as the target's dtype would hold it, widened again. */
static float xdi_cpu_lerp_source(const xd_lerp_array *a, int64_t index) {
    const float value = (float)xd_load_f64(a->source, a->source_dtype, index);
    if (a->target_dtype == XD_DTYPE_BF16) return xd_f32_from_bf16(xd_bf16_from_f32(value));
    if (a->target_dtype == XD_DTYPE_F16) return xd_f32_from_f16(xd_f16_from_f32(value));
    return value;
}

static void xdi_cpu_lerp_array(const xd_lerp_args *args, const xd_lerp_array *a) {
    float values[XDI_UPDATE_CHUNK];
    if (a->target_dtype == XD_DTYPE_F64) {
        double *target = (double *)a->target;
        for (int64_t i = 0; i < a->count; i++)
            target[i] = xdi_cpu_lerp_f64(args, target[i], xd_load_f64(a->source, a->source_dtype, i));
        return;
    }
    for (int64_t at = 0; at < a->count; at += XDI_UPDATE_CHUNK) {
        const int64_t n = xdi_update_chunk(a->count, at);
        const float *target = xdi_update_widen(a->target, a->target_dtype, at, n, values);
        for (int64_t i = 0; i < n; i++)
            values[i] = xdi_cpu_lerp_f32(args, target[i], xdi_cpu_lerp_source(a, at + i));
        xdi_update_narrow(values, a->target, a->target_dtype, at, n);
    }
}

static xd_result xdi_cpu_lerp(const xd_launch *launch, const xd_lerp_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_lerp_array *a = &args->arrays[k];
        XDI_REQUIRE(launch->ctx,
                    (xdi_update_takes(a->target_dtype) || a->target_dtype == XD_DTYPE_F64) &&
                        (xdi_update_takes(a->source_dtype) || a->source_dtype == XD_DTYPE_F64),
                    XD_ERROR_DTYPE, "array %lld: cannot average %s into %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    for (int64_t k = 0; k < args->array_count; k++) xdi_cpu_lerp_array(args, &args->arrays[k]);
    return XD_OK;
}

static bool xdi_cpu_cast_takes(xd_dtype dtype) {
    return xdi_update_takes(dtype) || dtype == XD_DTYPE_F64 || dtype == XD_DTYPE_I32 ||
           dtype == XD_DTYPE_I64 || dtype == XD_DTYPE_U8 || dtype == XD_DTYPE_BOOL;
}

/* cast: target[i] = source[i], rounded to nearest even where the target is narrower. */
static xd_result xdi_cpu_cast(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count) {
    for (int64_t k = 0; k < array_count; k++) {
        const xd_cast_array *a = &arrays[k];
        XDI_REQUIRE(launch->ctx,
                    a->target_dtype == a->source_dtype ||
                        (xdi_cpu_cast_takes(a->target_dtype) && xdi_cpu_cast_takes(a->source_dtype)),
                    XD_ERROR_DTYPE, "array %lld: cannot convert %s to %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    for (int64_t k = 0; k < array_count; k++) {
        const xd_cast_array *a = &arrays[k];
        if (a->count == 0) continue; /* an empty array may be NULL */
        if (a->target_dtype == a->source_dtype)
            memcpy(a->target, a->source, (size_t)a->count * xd_dtype_size(a->target_dtype));
        else
            for (int64_t i = 0; i < a->count; i++)
                xd_store_f64(a->target, a->target_dtype, i, xd_load_f64(a->source, a->source_dtype, i));
    }
    return XD_OK;
}

/* scale: x <- x * factor, one f32 rounding and one more where x is narrower. */
static xd_result xdi_cpu_scale(const xd_launch *launch, const xd_scale_args *args) {
    float values[XDI_UPDATE_CHUNK];
    XDI_REQUIRE(launch->ctx, xdi_update_takes(args->dtype), XD_ERROR_DTYPE,
                "scaling takes F32, BF16 or F16, not %s", xd_dtype_name(args->dtype));
    for (int64_t at = 0; at < args->count; at += XDI_UPDATE_CHUNK) {
        const int64_t n = xdi_update_chunk(args->count, at);
        const float *x = xdi_update_widen(args->data, args->dtype, at, n, values);
        for (int64_t i = 0; i < n; i++) values[i] = x[i] * args->factor;
        xdi_update_narrow(values, args->data, args->dtype, at, n);
    }
    return XD_OK;
}

/* Adds mantissa * 2^(bit - 320) to the limbs. mantissa < 2^48, so a limb grows by less than 2^33 a call. */
static void xdi_norm_add(int64_t *limbs, uint64_t mantissa, int bit) {
    const int limb = bit / 32, shift = bit % 32;
    const uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
    limbs[limb] += (int64_t)(low & 0xffffffffu);
    limbs[limb + 1] += (int64_t)(low >> 32) + (int64_t)(high & 0xffffffffu);
    limbs[limb + 2] += (int64_t)(high >> 32);
}

/* Leaves every limb but the last in [0, 2^32). The value stays the same. */
static void xdi_norm_carry(int64_t *limbs) {
    for (int k = 0; k + 1 < XD_NORM_LIMBS; k++) {
        limbs[k + 1] += limbs[k] >> 32; /* no limb is ever negative */
        limbs[k] &= 0xffffffff;
    }
}

/* |x| or its square, added exactly: the f32 is mantissa * 2^exponent with a 24-bit mantissa. */
static void xdi_norm_add_f32(int64_t *limbs, float x, bool square) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int biased = (int)((bits >> 23) & 0xffu);
    const uint64_t mantissa = (bits & 0x7fffffu) | (biased ? 0x800000u : 0u);
    const int exponent = (biased ? biased : 1) - 150;
    if (square)
        xdi_norm_add(limbs, mantissa * mantissa, 2 * exponent + 320);
    else
        xdi_norm_add(limbs, mantissa, exponent + 320);
}

/* A chunk of finite and other values. The square of an f32 is exact in double and can neither overflow nor
 * vanish there, so the plain sum needs no scaling. */
static double xdi_norm_chunk(const xd_norm_args *args, const float *x, int64_t n, bool replica,
                             xd_norm_sum *sum) {
    double subtotal = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            sum->not_finite++;
            sum->nan += isnan(x[i]) ? 1 : 0;
        } else if (!replica) {
            const double magnitude = fabs((double)x[i]);
            if (args->type == XD_NORM_MAX)
                sum->largest = magnitude > sum->largest ? magnitude : sum->largest;
            else if (args->exact)
                xdi_norm_add_f32(sum->limbs, x[i], args->type == XD_NORM_L2);
            else
                subtotal += args->type == XD_NORM_L2 ? magnitude * magnitude : magnitude;
        }
    }
    return subtotal;
}

/* norm: what these arrays add to (sum |x|^p)^(1/p), p = 1 or 2, or to max |x|. Either a double sum in array
 * order, which depends on how arrays are cut, or an exact one, which does not. */
static xd_result xdi_cpu_norm(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum) {
    float widened[XDI_UPDATE_CHUNK];
    for (int64_t k = 0; k < args->array_count; k++)
        XDI_REQUIRE(launch->ctx, xdi_update_takes(args->arrays[k].dtype), XD_ERROR_DTYPE,
                    "array %lld: norms take F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(args->arrays[k].dtype));
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_norm_array *a = &args->arrays[k];
        for (int64_t at = 0; at < a->count; at += XDI_UPDATE_CHUNK) {
            const int64_t n = xdi_update_chunk(a->count, at);
            const float *x = xdi_update_widen(a->data, a->dtype, at, n, widened);
            sum->sum += xdi_norm_chunk(args, x, n, a->replica, sum);
            xdi_norm_carry(sum->limbs);
        }
    }
    return XD_OK;
}

XD_API double xd_norm_limbs_value(const int64_t limbs[XD_NORM_LIMBS]) {
    int64_t carried[XD_NORM_LIMBS];
    memcpy(carried, limbs, sizeof carried);
    xdi_norm_carry(carried);
    int top = XD_NORM_LIMBS - 1;
    while (top > 1 && carried[top] == 0) top--; /* bit 64 and above: squares begin at bit 22 */
    uint64_t head = ((uint64_t)carried[top] << 32) | (uint64_t)carried[top - 1];
    if (head == 0) return 0.0;
    uint64_t below = top > 1 ? (uint64_t)carried[top - 2] : 0;
    int shift = 0; /* the leading bit to the top, so that 11 bits lie below a double's last */
    while (!(head >> 63)) {
        head = (head << 1) | ((below >> 31) & 1u);
        below = (below << 1) & 0xffffffffu;
        shift++;
    }
    bool rest = below != 0;
    for (int k = 0; k + 2 < top; k++) rest = rest || carried[k] != 0;
    return ldexp((double)(head | (rest ? 1u : 0u)), 32 * (top - 1) - shift - 320);
}

static const xd_optimizer_kernels xdi_cpu_optimizer_table = {
    xdi_cpu_adam, xdi_cpu_sgd, xdi_cpu_lerp, xdi_cpu_cast, xdi_cpu_scale, xdi_cpu_norm,
};

XD_API const xd_optimizer_kernels *xd_optimizer_kernels_cpu(void) {
    return &xdi_cpu_optimizer_table;
}
