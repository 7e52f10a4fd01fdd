#ifndef XDI_KERNEL_OPTIMIZER_SCALAR_H
#define XDI_KERNEL_OPTIMIZER_SCALAR_H

#include "base/philox_scalar.h"
#include "kernel/optimizer.h"

/* ---- steps ---- */

/* True when some operation of this step found bad data, so that the step must not happen. NULL is fine. */
XD_SCALAR bool xd_status_refuses(const xd_status *status) {
    return status && (status->label_out_of_range != 0 || status->not_finite != 0 ||
                      status->nothing_counted != 0 || status->overflow != 0 || status->large_norms != 0);
}

/* What all arrays of a step share: fields of xd_update_args. */
typedef struct xd_update_rules {
    float one_minus_beta1, one_minus_beta2, beta2, eps, momentum;
    bool couple_decay, maximize;
} xd_update_rules;

/* The scalars of an array's step: fields of xd_update_array, and the scale of the gradient, if there is one. */
typedef struct xd_update_scalars {
    float scale, decay, weight_decay, step_size, root_correction;
    bool scaled, fresh;
} xd_update_scalars;

/* The gradient that an update uses: scaled, and with its sign changed for `maximize`. */
XD_SCALAR float xd_update_gradient(const xd_update_rules *rules, const xd_update_scalars *s, float gradient) {
    if (s->scaled) gradient = xd_mulf(gradient, s->scale);
    return rules->maximize ? -gradient : gradient;
}

/* adam: one step of AdamW or, with couple_decay, of Adam with L2 regularisation. All f32, in this order:
 *   g   = gradient * scale                        (no scale: no multiplication)
 *   P   = p * decay                               AdamW
 *   g   = fma(weight_decay, p, g),  P = p         L2 form
 *   m   = fma(1 - beta1, g - m, m)
 *   v   = fma(1 - beta2, g * g, beta2 * v)
 *   p   = fma(-step_size, m / (sqrt(v) / root_correction + eps), P) */
XD_SCALAR void xd_adam_element(const xd_update_rules *rules, const xd_update_scalars *s, float gradient,
                               float *p, float *m, float *v) {
    float g = xd_update_gradient(rules, s, gradient);
    if (rules->couple_decay) g = xd_fmaf(s->weight_decay, *p, g);
    const float kept = rules->couple_decay ? *p : xd_mulf(*p, s->decay);
    *m = xd_fmaf(rules->one_minus_beta1, xd_subf(g, *m), *m);
    *v = xd_fmaf(rules->one_minus_beta2, xd_mulf(g, g), xd_mulf(rules->beta2, *v));
    const float denominator = xd_addf(xd_divf(xd_sqrtf(*v), s->root_correction), rules->eps);
    *p = xd_fmaf(-s->step_size, xd_divf(*m, denominator), kept);
}

/* sgd: stochastic gradient descent with momentum, neither dampened nor Nesterov's. All f32, in this order:
 *   g      = gradient * scale,  then fma(weight_decay, p, g)
 *   buffer = g at the first gradient, afterwards fma(momentum, buffer, g)
 *   p      = fma(-step_size, buffer, p) */
XD_SCALAR void xd_sgd_element(const xd_update_rules *rules, const xd_update_scalars *s, float gradient,
                              float *p, float *buffer) {
    const float g = xd_fmaf(s->weight_decay, *p, xd_update_gradient(rules, s, gradient));
    *buffer = s->fresh ? g : xd_fmaf(rules->momentum, *buffer, g);
    *p = xd_fmaf(-s->step_size, *buffer, *p);
}

/* 1 - beta^t, rounded after the power, whose products have a fixed order, and after the difference. */
XD_SCALAR double xd_update_correction(double beta, int64_t t) {
    double power = 1.0;
    for (; t > 0; t >>= 1, beta = xd_mul(beta, beta))
        if (t & 1) power = xd_mul(power, beta);
    return xd_sub(1.0, power);
}

/* The scalars of step t, computed in double and rounded once. `adam`: of adam, not of sgd. */
XD_SCALAR float xd_update_step_size(double learning_rate, double beta1, int64_t t, bool adam) {
    return (float)(adam ? learning_rate / xd_update_correction(beta1, t) : learning_rate);
}

XD_SCALAR float xd_update_root_correction(double beta2, int64_t t) {
    return (float)sqrt(xd_update_correction(beta2, t));
}

/* ---- rounding at random ---- */

/* The sequence of random bits of an array's step t. */
XD_SCALAR xd_philox xd_update_random(uint64_t seed, uint64_t key, int64_t t) {
    xd_philox random;
    random.seed = seed;
    random.stream = XD_STREAM_OPTIMIZER;
    random.micro = (uint16_t)(key >> 32 & 0xffffu);
    random.sample = (uint32_t)(key & 0xffffffffu);
    random.step = (uint32_t)((uint64_t)t & 0xffffffffu);
    return random;
}

/* Elements that one block of random numbers serves: 16 bits each, in the order of the words, the lower half first. */
#define XD_ROUNDED_PER_BLOCK 8

XD_SCALAR uint32_t xd_round_bits(const uint32_t words[4], int64_t element) {
    return words[element % XD_ROUNDED_PER_BLOCK / 2] >> (element % 2 * 16) & 0xffffu;
}

/* The BF16 below or above in magnitude: the random number carries into the kept bits as often as the dropped ones are large.
 * Infinity and NaN as ever. */
XD_SCALAR uint16_t xd_round_to_bf16(float value, uint32_t random) {
    const uint32_t bits = xd_bits_of_float(value);
    if ((bits & 0x7f800000u) == 0x7f800000u) return xd_bits_to_bf16(value);
    return (uint16_t)((bits + random) >> 16);
}

/* ---- averages ---- */

/* lerp: target <- target + w (source - target), w = 1 - keep computed in double and rounded once to the
 * arithmetic's type (1.0f - keep would have an error of 0.02 % for 0.9999). The source is rounded to the target's
 * dtype first.
 *   d = source - target
 *   |w| <  0.5   fma(w, d, target)          w = 0 gives the bits of the target
 *   |w| >= 0.5   fma(w - 1, d, source)      w = 1 gives the bits of the source
 * weighted_sum: fma(1 - keep, source, keep * target), the factors rounded once. */
XD_SCALAR float xd_lerp_f32(float weight, float keep, bool weighted_sum, float target, float source) {
    if (weighted_sum) return xd_fmaf(weight, source, xd_mulf(keep, target));
    const float difference = xd_subf(source, target);
    return fabsf(weight) < 0.5f ? xd_fmaf(weight, difference, target)
                                : xd_fmaf(xd_subf(weight, 1.0f), difference, source);
}

XD_SCALAR double xd_lerp_f64(double keep, bool weighted_sum, double target, double source) {
    const double weight = xd_sub(1.0, keep);
    if (weighted_sum) return xd_fma(weight, source, xd_mul(keep, target));
    const double difference = xd_sub(source, target);
    return fabs(weight) < 0.5 ? xd_fma(weight, difference, target)
                              : xd_fma(xd_sub(weight, 1.0), difference, source);
}

/* lerp of an average that is target + compensation, both of which are read and written:
 *   d = (source - target) - compensation
 *   |w| <  0.5   target + (fma(w, d, compensation))
 *   |w| >= 0.5   source + (w - 1) d                    w = 1 gives the bits of the source
 * The outer sum is rounded to the target; what that rounding lost, which an f32 holds exactly (Knuth's sum of two), is rounded to
 * the compensation, or forgotten where it is not finite. */
XD_SCALAR void xd_lerp_compensated(float weight, float source, float *target, uint16_t *compensation) {
    const float kept = xd_bits_from_bf16(*compensation);
    const float difference = xd_subf(xd_subf(source, *target), kept);
    const bool far = fabsf(weight) >= 0.5f;
    const float base = far ? source : *target;
    const float step = far ? xd_mulf(xd_subf(weight, 1.0f), difference) : xd_fmaf(weight, difference, kept);
    const float sum = xd_addf(base, step);
    const float moved = xd_subf(sum, base);
    const float lost = xd_addf(xd_subf(base, xd_subf(sum, moved)), xd_subf(step, moved));
    *target = sum;
    *compensation = (xd_bits_of_float(lost) & 0x7f800000u) == 0x7f800000u ? 0 : xd_bits_to_bf16(lost);
}

/* The sequence of random bits of an array in an iteration. Elements take them as those of an optimizer's step do. */
XD_SCALAR xd_philox xd_average_random(uint64_t seed, uint64_t key, int64_t iteration) {
    xd_philox random = xd_update_random(seed, key, iteration);
    random.stream = XD_STREAM_EMA;
    return random;
}

/* What an update of an average does, and its iteration: that of xd_ema_update, where a refused step changes nothing. The
 * decay of an iteration is the one that was passed when it would have come without refusals. */
XD_SCALAR void xd_average_take_turn(const xd_turn_args *a, const xd_status *status) {
    xd_average_turn *t = a->turn;
    t->known[a->iteration % XD_AVERAGE_KEEPS] = a->iteration;
    t->keeps[a->iteration % XD_AVERAGE_KEEPS] = a->keep;
    t->rests.not_finite = xd_status_refuses(status) ? 1 : 0;
    if (t->rests.not_finite) return;
    const int64_t i = a->next ? t->iteration + 1 : a->iteration, at = i % XD_AVERAGE_KEEPS;
    t->iteration = i;
    t->rests.not_finite = i < a->start ? 1 : 0;
    if (t->rests.not_finite) return;
    t->copies = i == a->start || !t->initialized ? 1 : 0;
    t->initialized = 1;
    t->keep = t->known[at] == i ? t->keeps[at] : a->keep;
}

/* Whether the source of an average differs from the average before. */
XD_SCALAR bool xd_average_differs(double source, double target, uint16_t compensation) {
    return source != xd_add(target, (double)xd_bits_from_bf16(compensation));
}

/* Whether an average has stayed: to the bit, or as a NaN, whose bits are a device's own. */
XD_SCALAR bool xd_average_stays(bool same_bits, double before, double after) {
    return same_bits || (isnan(before) && isnan(after));
}

/* ---- norms ---- */

/* A finite f32 as mantissa * 2^exponent with a 24-bit mantissa. */
XD_SCALAR uint32_t xd_norm_mantissa(float x, int *exponent) {
    const uint32_t bits = xd_bits_of_float(x), biased = (bits >> 23) & 0xffu;
    *exponent = (int)(biased ? biased : 1u) - 150;
    return (bits & 0x7fffffu) | (biased ? 0x800000u : 0u);
}

/* Propagates carries: every limb but the last is then in [0, 2^32). The value does not change. */
XD_SCALAR void xd_norm_carry(int64_t *limbs) {
    for (int k = 0; k + 1 < XD_NORM_LIMBS; k++) {
        limbs[k + 1] += limbs[k] >> 32; /* no limb is ever negative */
        limbs[k] &= 0xffffffff;
    }
}

/* The value of limbs with carries propagated, none negative, rounded to double once. */
XD_SCALAR double xd_norm_limbs_read(const int64_t *limbs) {
    int64_t carried[XD_NORM_LIMBS];
    for (int k = 0; k < XD_NORM_LIMBS; k++) carried[k] = limbs[k];
    xd_norm_carry(carried);
    int top = XD_NORM_LIMBS - 1;
    while (top > 1 && carried[top] == 0) top--; /* bit 64 and above: squares begin at bit 22 */
    uint64_t head = ((uint64_t)carried[top] << 32) | (uint64_t)carried[top - 1];
    if (head == 0) return 0.0;
    uint64_t below = top > 1 ? (uint64_t)carried[top - 2] : 0;
    int shift = 0; /* moves the leading bit to the top: 11 bits are then below the last bit of a double */
    while (!(head >> 63)) {
        head = (head << 1) | ((below >> 31) & 1u);
        below = (below << 1) & 0xffffffffu;
        shift++;
    }
    bool rest = below != 0;
    for (int k = 0; k + 2 < top; k++) rest = rest || carried[k] != 0;
    return ldexp((double)(head | (rest ? 1u : 0u)), 32 * (top - 1) - shift - 320);
}

/* The norm, from the sums of all ranks. */
XD_SCALAR double xd_norm_read(const xd_norm_sum *sum, xd_norm_type type, bool exact) {
    if (sum->nan > 0) return (double)NAN;
    if (sum->not_finite > 0) return (double)INFINITY;
    if (type == XD_NORM_MAX) return sum->largest;
    const double total = exact ? xd_norm_limbs_read(sum->limbs) : sum->sum;
    return type == XD_NORM_L2 ? sqrt(total) : total;
}

/* The factor for a given norm. Here max_norm 0 means zero. */
XD_SCALAR float xd_clip_factor(xd_clip_form form, double max_norm, double norm) {
    const double c = max_norm / xd_add(norm, 1e-6);
    if (form == XD_CLIP_ALWAYS) return isnan(c) ? (float)NAN : (float)(c < 1.0 ? c : 1.0);
    if (form == XD_CLIP_ABOVE && !isfinite(norm)) return 1.0f;
    return c < 1.0 ? (float)c : 1.0f;
}

/* The clip entry, from its sums: the norm, the factor, the finding. */
XD_SCALAR void xd_clip_write(const xd_clip_args *args) {
    *args->norm = xd_norm_read(args->sum, args->type, args->exact);
    *args->not_finite = args->sum->not_finite;
    *args->coefficient =
        args->max_norm > 0.0 ? xd_clip_factor(args->form, args->max_norm, *args->norm) : 1.0f;
    if (args->status) args->status->not_finite += args->sum->not_finite;
    if (args->status && args->refuse_above > 0.0 && *args->norm > args->refuse_above)
        args->status->large_norms++;
}

#endif
