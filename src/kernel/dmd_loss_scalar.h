#ifndef XDI_KERNEL_DMD_LOSS_SCALAR_H
#define XDI_KERNEL_DMD_LOSS_SCALAR_H

#include "kernel/dmd_loss.h"
#include "kernel/optimizer_scalar.h"

/* Formulas of kernel/dmd_loss.h that CPU and CUDA share. Products that are added have no rounding error, or are xd_mul. */

/* ---- sums ---- */

/* A loss from here on is a finding, so that limbs have room for every term. */
#define XD_SAMPLE_LARGEST 1e75

XD_SCALAR int xd_sum_words(bool fixed) {
    return fixed ? XD_NORM_LIMBS : 1;
}

/* A number in [0, XD_SAMPLE_LARGEST) as mantissa 2^(*bit - 320); what is below 2^-320 is cut off. */
XD_SCALAR uint64_t xd_sum_mantissa(double term, int *bit) {
    int exponent = 0;
    const double fraction = frexp(term, &exponent); /* term = fraction 2^exponent */
    const uint64_t mantissa = (uint64_t)xd_mul_exact(fraction, 9007199254740992.0); /* 2^53 */
    *bit = exponent - 53 + 320;
    if (*bit >= 0) return mantissa;
    const int cut = -*bit;
    *bit = 0;
    return cut < 53 ? mantissa >> cut : 0;
}

/* Adds a number in [0, XD_SAMPLE_LARGEST). */
XD_SCALAR void xd_sum_put(int64_t *words, bool fixed, double term) {
    if (!fixed) {
        double sum;
        memcpy(&sum, words, sizeof sum);
        sum = xd_add(sum, term);
        memcpy(words, &sum, sizeof sum);
        return;
    }
    int bit;
    const uint64_t mantissa = xd_sum_mantissa(term, &bit);
    if (mantissa == 0) return;
    const int limb = bit / 32, shift = bit % 32;
    const uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
    words[limb] += (int64_t)(low & 0xffffffffu);
    words[limb + 1] += (int64_t)((low >> 32) + (high & 0xffffffffu));
    words[limb + 2] += (int64_t)(high >> 32);
    xd_norm_carry(words);
}

/* Adds another sum. */
XD_SCALAR void xd_sum_join(int64_t *words, bool fixed, const int64_t *other) {
    if (!fixed) {
        double term;
        memcpy(&term, other, sizeof term);
        xd_sum_put(words, false, term);
        return;
    }
    for (int i = 0; i < XD_NORM_LIMBS; i++) words[i] += other[i];
    xd_norm_carry(words);
}

XD_SCALAR double xd_sum_read(const int64_t *words, bool fixed) {
    double sum;
    if (fixed) return xd_norm_limbs_read(words);
    memcpy(&sum, words, sizeof sum);
    return sum;
}

/* Words of a row's sums, and of a record. */
XD_SCALAR int xd_sample_words(bool fixed) {
    return (int)XD_SAMPLE_SUMS + 2 * xd_sum_words(fixed);
}

XD_SCALAR int xd_sample_record_words(bool fixed) {
    return (int)XD_SAMPLE_RECORD_SUMS + 2 * xd_sum_words(fixed);
}

XD_SCALAR int64_t xd_sample_chunks(int64_t elements) {
    return (elements + XD_SAMPLE_CHUNK - 1) / XD_SAMPLE_CHUNK;
}

/* Adds the sums of a chunk, or of another shard. */
XD_SCALAR void xd_sample_join(int64_t *sums, bool fixed, const int64_t *other) {
    sums[XD_SAMPLE_COUNTED] += other[XD_SAMPLE_COUNTED];
    if (other[XD_SAMPLE_FINDING] > sums[XD_SAMPLE_FINDING])
        sums[XD_SAMPLE_FINDING] = other[XD_SAMPLE_FINDING];
    for (int k = 0; k < 2; k++) {
        const int at = (int)XD_SAMPLE_SUMS + k * xd_sum_words(fixed);
        xd_sum_join(sums + at, fixed, other + at);
    }
}

/* Finding of a number: FINE when it is finite. */
XD_SCALAR int64_t xd_sample_finding(double value) {
    return isnan(value)      ? (int64_t)XD_SAMPLE_NAN
           : isfinite(value) ? (int64_t)XD_SAMPLE_FINE
                             : (int64_t)XD_SAMPLE_INFINITE;
}

/* The sums of chunk and row start with this. */
XD_SCALAR void xd_sample_clear(int64_t *sums, bool fixed) {
    for (int i = 0; i < xd_sample_words(fixed); i++) sums[i] = 0;
}

/* The join entry for sample b. */
XD_SCALAR void xd_sample_join_chunks(const xd_sample_args *a, int64_t b) {
    const int words = xd_sample_words(a->fixed);
    const int64_t chunks = xd_sample_chunks(a->elements);
    int64_t *sums = a->sums + b * words;
    xd_sample_clear(sums, a->fixed);
    for (int64_t k = 0; k < chunks; k++) xd_sample_join(sums, a->fixed, a->parts + (b * chunks + k) * words);
}

/* All shards' sums of sample b. */
XD_SCALAR void xd_sample_gather(const xd_sample_args *a, int64_t b, int64_t *sums) {
    const int words = xd_sample_words(a->fixed);
    xd_sample_clear(sums, a->fixed);
    for (int k = 0; k < a->shards; k++)
        xd_sample_join(sums, a->fixed, a->all_sums + (k * a->samples + b) * words);
}

/* A sample with these sums' elements and finding, and no loss yet. */
XD_SCALAR void xd_sample_begin(xd_sample *s, const int64_t *sums) {
    s->counted = sums[XD_SAMPLE_COUNTED];
    s->finding = sums[XD_SAMPLE_FINDING];
    s->value = s->finding == (int64_t)XD_SAMPLE_NAN ? (double)NAN : (double)INFINITY;
}

/* The sum XD_SAMPLE_SUMS + which of these words. */
XD_SCALAR double xd_sample_sum(const int64_t *sums, bool fixed, int which) {
    return xd_sum_read(sums + (int)XD_SAMPLE_SUMS + which * xd_sum_words(fixed), fixed);
}

/* Makes a number that is not finite, or refused, the sample's finding unless it has one. */
XD_SCALAR void xd_sample_expect(xd_sample *s, bool fits, double value) {
    if (fits || s->finding != (int64_t)XD_SAMPLE_FINE) return;
    s->finding = isnan(value) ? (int64_t)XD_SAMPLE_NAN : (int64_t)XD_SAMPLE_INFINITE;
    s->value = value;
}

/* Loss and factor of a sample that has neither yet. */
XD_SCALAR void xd_sample_settle(xd_sample *s, double loss, double factor) {
    xd_sample_expect(s, fabs(loss) < XD_SAMPLE_LARGEST, loss);
    xd_sample_expect(s, isfinite(factor), factor);
    const bool fine = s->finding == (int64_t)XD_SAMPLE_FINE;
    s->loss = fine ? loss : 0.0;
    s->factor = fine ? factor : 0.0;
}

/* ---- the student's term ---- */

/* f32 rounded to a dtype. */
XD_SCALAR float xd_round_to(xd_dtype dtype, float value) {
    if (dtype == XD_DTYPE_BF16) return xd_bits_from_bf16(xd_bits_to_bf16(value));
    return dtype == XD_DTYPE_F16 ? xd_bits_from_f16(xd_bits_to_f16(value)) : value;
}

/* w_b. */
XD_SCALAR double xd_vsd_weight(const xd_vsd_args *a, double mean, double scale) {
    if (a->normaliser == XD_VSD_NONE) return scale;
    if (a->normaliser == XD_VSD_ORIGINAL) return mean > 0.0 ? xd_mul(1.0 / mean, scale) : 0.0;
    return xd_mul(1.0 / xd_add(mean, 1e-6), scale);
}

XD_SCALAR double xd_vsd_weight_rounded(const xd_vsd_args *a, double mean, double scale) {
    float weight = 1.0f;
    const float m = (float)mean;
    if (a->normaliser == XD_VSD_ORIGINAL) weight = m > 0.0f ? xd_divf(1.0f, m) : 0.0f;
    if (a->normaliser == XD_VSD_MEAN) weight = xd_divf(1.0f, xd_addf(m, 1e-6f));
    return (double)xd_round_to(a->generated.dtype, xd_mulf(weight, (float)scale));
}

/* What the caller says of a sample. */
typedef struct xd_vsd_given {
    double scale, chain;
} xd_vsd_given;

XD_SCALAR xd_vsd_given xd_vsd_given_of(const xd_vsd_args *a, int64_t b) {
    xd_vsd_given given;
    given.scale = a->sample_scale ? a->sample_scale[b] : 1.0;
    given.chain = a->chain ? a->chain[b] : 1.0;
    return given;
}

/* A sample with these sums, and the mean that `distance` gets. */
XD_SCALAR double xd_vsd_weigh_sums(const xd_vsd_args *a, const int64_t *sums, bool fixed, xd_vsd_given given,
                                   xd_sample *s) {
    xd_sample_begin(s, sums);
    const double mean = s->counted > 0 ? xd_sample_sum(sums, fixed, 0) / (double)s->counted : 0.0;
    const double square = xd_sample_sum(sums, fixed, 1);
    xd_sample_expect(s, given.scale >= 0.0 && isfinite(given.scale), given.scale);
    xd_sample_expect(s, isfinite(given.chain), given.chain);
    s->weight = a->form == XD_VSD_COMPAT ? xd_vsd_weight_rounded(a, mean, given.scale)
                                         : xd_vsd_weight(a, mean, given.scale);
    if (s->counted == 0) s->weight = 0.0;
    xd_sample_expect(s, isfinite(s->weight), s->weight);
    if (a->form == XD_VSD_COMPAT)
        xd_sample_settle(s, 0.0, given.chain);
    else
        xd_sample_settle(s, xd_mul(xd_mul(0.5, square), xd_mul(s->weight, s->weight)),
                         xd_mul(s->weight, given.chain));
    return mean;
}

/* vsd_weigh for sample b. */
XD_SCALAR void xd_vsd_weigh_sample(const xd_vsd_args *a, int64_t b) {
    int64_t sums[(int)XD_SAMPLE_SUMS + 2 * XD_NORM_LIMBS];
    xd_sample_gather(&a->base, b, sums);
    const double mean = xd_vsd_weigh_sums(a, sums, a->base.fixed, xd_vsd_given_of(a, b), a->base.sample + b);
    if (a->distance) a->distance[b] = mean;
}

/* vsd_settle for sample b: the factor, chain, stays. */
XD_SCALAR void xd_vsd_settle_sample(const xd_vsd_args *a, int64_t b) {
    int64_t sums[(int)XD_SAMPLE_SUMS + 2 * XD_NORM_LIMBS];
    xd_sample *s = a->base.sample + b, before = *s;
    xd_sample_gather(&a->base, b, sums);
    xd_sample_begin(s, sums);
    if (before.finding != (int64_t)XD_SAMPLE_FINE) {
        *s = before;
        return;
    }
    xd_sample_settle(s, xd_mul(0.5, xd_sample_sum(sums, a->base.fixed, 1)), before.factor);
}

/* x - (x - g) as tensors of the dtype hold it. */
XD_SCALAR float xd_vsd_step(xd_dtype dtype, float weight, float x, float teacher, float fake) {
    const float g = xd_round_to(dtype, xd_mulf(xd_round_to(dtype, xd_subf(fake, teacher)), weight));
    return xd_round_to(dtype, xd_subf(x, xd_round_to(dtype, xd_subf(x, g))));
}

/* ---- the denoising term ---- */

/* r. Factors and elements have 24 bits each, so no product has a rounding error. */
XD_SCALAR float xd_denoise_residual(const xd_denoise_term *term, float p, float x, float e) {
    const double a = xd_mul_exact((double)(float)term->prediction, (double)p);
    const double b = xd_mul_exact((double)(float)term->clean, (double)x);
    const double c = xd_mul_exact((double)(float)term->noise, (double)e);
    return (float)xd_add(xd_add(a, b), c);
}

/* The factor of a sample without a finding. */
XD_SCALAR double xd_denoise_factor(const xd_denoise_term *term) {
    return xd_mul(xd_mul(2.0, term->weight), (double)(float)term->prediction);
}

/* A sample with these sums and factors. */
XD_SCALAR void xd_denoise_weigh_sums(const int64_t *sums, bool fixed, const xd_denoise_term *term,
                                     xd_sample *s) {
    xd_sample_begin(s, sums);
    s->weight = term->weight;
    xd_sample_expect(s, isfinite((float)term->prediction), term->prediction);
    xd_sample_expect(s, isfinite((float)term->clean), term->clean);
    xd_sample_expect(s, isfinite((float)term->noise), term->noise);
    xd_sample_expect(s, term->weight >= 0.0 && isfinite(term->weight), term->weight);
    xd_sample_settle(s, xd_mul(term->weight, xd_sample_sum(sums, fixed, 1)), xd_denoise_factor(term));
}

/* denoise_weigh for sample b. */
XD_SCALAR void xd_denoise_weigh_sample(const xd_denoise_args *a, int64_t b) {
    int64_t sums[(int)XD_SAMPLE_SUMS + 2 * XD_NORM_LIMBS];
    xd_sample_gather(&a->base, b, sums);
    xd_denoise_weigh_sums(sums, a->base.fixed, a->terms + b, a->base.sample + b);
}

/* ---- terms on logits ---- */

XD_SCALAR double xd_softplus(double u) {
    return u > 20.0 ? u : log1p(exp(u));
}

/* Its derivative. */
XD_SCALAR double xd_softplus_slope(double u) {
    return u > 20.0 ? 1.0 : 1.0 / xd_add(1.0, exp(-u));
}

/* The loss of a pair of logits, and its slopes by them. */
typedef struct xd_gan_term {
    double loss, fake_slope, real_slope;
} xd_gan_term;

XD_SCALAR xd_gan_term xd_gan_term_of(const xd_gan_args *a, double fake, double real) {
    xd_gan_term t = { 0.0, 0.0, 0.0 };
    const bool discriminator = a->role == XD_GAN_DISCRIMINATOR;
    if (a->role == XD_GAN_R1) {
        const double difference = xd_sub(real, fake);
        t.loss = xd_mul(difference, difference);
        t.real_slope = xd_mul(2.0, difference);
        t.fake_slope = -t.real_slope;
    } else if (a->kind == XD_GAN_HINGE) {
        const double over = discriminator ? xd_add(1.0, fake) : 0.0, under = xd_sub(1.0, real);
        t.loss = !discriminator ? -fake : xd_add(over > 0.0 ? over : 0.0, under > 0.0 ? under : 0.0);
        t.fake_slope = !discriminator ? -1.0 : over > 0.0 ? 1.0 : 0.0;
        t.real_slope = discriminator && under > 0.0 ? -1.0 : 0.0;
    } else {
        t.loss = discriminator ? xd_add(xd_softplus(fake), xd_softplus(-real)) : xd_softplus(-fake);
        t.fake_slope = discriminator ? xd_softplus_slope(fake) : -xd_softplus_slope(-fake);
        t.real_slope = discriminator ? -xd_softplus_slope(-real) : 0.0;
    }
    return t;
}

XD_SCALAR double xd_sample_load(const xd_rows *x, int64_t row, int64_t column) {
    return xd_element_load(x->data, x->dtype, row * (x->stride ? x->stride : x->cols) + column);
}

XD_SCALAR void xd_sample_store(const xd_rows *x, int64_t row, int64_t column, double value) {
    xd_element_store(x->data, x->dtype, row * (x->stride ? x->stride : x->cols) + column, value);
}

/* gan_terms for sample b. */
XD_SCALAR void xd_gan_sample(const xd_gan_args *a, int64_t b) {
    xd_sample *s = a->base.sample + b;
    double sum = 0.0;
    s->counted = a->base.elements;
    s->finding = (int64_t)XD_SAMPLE_FINE;
    s->value = s->weight = 0.0;
    for (int64_t k = 0; k < a->base.elements; k++) {
        const double fake = xd_sample_load(&a->fake, b, k);
        const double real = a->real.data ? xd_sample_load(&a->real, b, k) : 0.0;
        xd_sample_expect(s, isfinite(fake), fake);
        xd_sample_expect(s, isfinite(real), real);
        sum = xd_add(sum, xd_gan_term_of(a, fake, real).loss);
    }
    xd_sample_settle(s, sum, 1.0);
}

/* gan_slope for sample b. A gradient may lie over the logits. */
XD_SCALAR void xd_gan_slope_sample(const xd_gan_args *a, int64_t b) {
    const double factor = xd_mul(a->base.sample[b].factor, *a->base.factor);
    for (int64_t k = 0; k < a->base.elements; k++) {
        const double fake = xd_sample_load(&a->fake, b, k);
        const double real = a->real.data ? xd_sample_load(&a->real, b, k) : 0.0;
        const xd_gan_term t = xd_gan_term_of(a, fake, real);
        if (a->fake_gradient.data)
            xd_sample_store(&a->fake_gradient, b, k, factor != 0.0 ? xd_mul(factor, t.fake_slope) : 0.0);
        if (a->real_gradient.data)
            xd_sample_store(&a->real_gradient, b, k, factor != 0.0 ? xd_mul(factor, t.real_slope) : 0.0);
    }
}

/* ---- from samples to one value ---- */

/* Adds the loss of sample b to a record's sums. */
XD_SCALAR void xd_sample_total_put(int64_t *record, bool fixed, double loss) {
    int64_t *sums = record + XD_SAMPLE_RECORD_SUMS;
    xd_sum_put(loss < 0.0 ? sums + xd_sum_words(fixed) : sums, fixed, fabs(loss));
}

/* The total entry, in the order of the samples. */
XD_SCALAR void xd_sample_total(const xd_sample_args *a) {
    for (int i = 0; i < xd_sample_record_words(a->fixed); i++) a->record[i] = 0;
    for (int64_t b = 0; b < a->samples; b++) {
        const xd_sample *s = a->sample + b;
        if (a->sample_loss) a->sample_loss[b] = s->loss;
        a->record[XD_SAMPLE_RECORD_COUNTED] += s->counted;
        if (s->finding != (int64_t)XD_SAMPLE_FINE && a->record[XD_SAMPLE_RECORD_FINDINGS]++ == 0) {
            a->record[XD_SAMPLE_RECORD_FIRST] = b;
            memcpy(a->record + XD_SAMPLE_RECORD_VALUE, &s->value, sizeof s->value);
        }
        xd_sample_total_put(a->record, a->fixed, s->loss);
    }
}

/* Adds `count` findings to a status; the first one's sample and value unless it has one already. */
XD_SCALAR void xd_sample_report(xd_status *status, int64_t count, int64_t first, double value) {
    if (count == 0) return;
    if (status->label_out_of_range + status->not_finite + status->overflow == 0) {
        status->first_row = first;
        status->first_value = value;
    }
    status->not_finite += count;
}

/* N, when so many elements count. */
XD_SCALAR double xd_sample_denominator(const xd_sample_args *a, int64_t counted) {
    const double n = a->denominator ? a->denominator->value : a->denominator_value;
    return !a->denominator && n == 0.0 ? (double)counted : n;
}

/* weight scale / N; 0 where that has no value. */
XD_SCALAR double xd_sample_factor(const xd_sample_args *a, double n) {
    const double scale = a->scale ? *a->scale : 1.0;
    return n > 0.0 && isfinite(scale) ? xd_mul(a->weight, scale) / n : 0.0;
}

/* The finish entry. */
XD_SCALAR void xd_sample_finish(const xd_sample_args *a, xd_status *status) {
    const int words = xd_sample_record_words(a->fixed), sum_words = xd_sum_words(a->fixed);
    int64_t sums[2 * XD_NORM_LIMBS], counted = 0;
    for (int i = 0; i < 2 * sum_words; i++) sums[i] = 0;
    for (int r = 0; r < a->ranks; r++) {
        const int64_t *record = a->records + r * words;
        double value;
        memcpy(&value, record + XD_SAMPLE_RECORD_VALUE, sizeof value);
        counted += record[XD_SAMPLE_RECORD_COUNTED];
        xd_sample_report(status, record[XD_SAMPLE_RECORD_FINDINGS], record[XD_SAMPLE_RECORD_FIRST], value);
        for (int k = 0; k < 2; k++)
            xd_sum_join(sums + k * sum_words, a->fixed, record + XD_SAMPLE_RECORD_SUMS + k * sum_words);
    }
    const double n = xd_sample_denominator(a, counted), factor = xd_sample_factor(a, n);
    if (a->scale && !isfinite(*a->scale)) xd_sample_report(status, 1, 0, *a->scale);
    if (!(n > 0.0)) status->nothing_counted++;
    *a->factor = factor;
    a->values->loss =
        xd_mul(factor, xd_sub(xd_sum_read(sums, a->fixed), xd_sum_read(sums + sum_words, a->fixed)));
    a->values->denominator = n;
    a->values->counted = counted;
}

/* ---- f-distill ---- */

XD_SCALAR double xd_f_weight_of(xd_f_divergence divergence, double rho) {
    switch (divergence) {
    case XD_F_JS: return xd_sub(1.0, 1.0 / xd_add(1.0, rho));
    case XD_F_RKL: return 1.0;
    case XD_F_KL: return rho;
    case XD_F_SF: return 1.0 / xd_add(1.0, rho);
    case XD_F_SH: return sqrt(rho);
    case XD_F_JF: return xd_add(1.0, rho);
    case XD_F_NEYMAN: return 1.0 / (rho > 1e-8 ? rho : 1e-8);
    }
    return (double)NAN;
}

XD_SCALAR double xd_clamp(double x, double low, double high) {
    return x < low ? low : x > high ? high : x;
}

/* rho of sample b; NaN for a finding. */
XD_SCALAR double xd_fdistill_ratio(const xd_fdistill_args *a, int64_t b, double *mean) {
    double sum = 0.0;
    for (int64_t k = 0; k < a->logits.cols; k++) sum = xd_add(sum, xd_sample_load(&a->logits, b, k));
    *mean = sum / (double)a->logits.cols;
    if (!isfinite(*mean)) return (double)NAN;
    return xd_clamp(exp(xd_clamp(*mean, -10.0, 10.0)), a->lower, a->upper);
}

XD_SCALAR int64_t xd_fdistill_bin(const xd_fdistill_args *a, double t) {
    const double bin = floor(xd_sub(t, a->min_t) / (xd_sub(a->max_t, a->min_t) / (double)a->bins));
    return (int64_t)xd_clamp(bin, 0.0, (double)(a->bins - 1));
}

/* A sample with its ratio: weights[b] becomes rho, or NaN for a finding, whose value it is then. Its bin; -1: it goes into none. */
XD_SCALAR int64_t xd_fdistill_place(const xd_fdistill_args *a, int64_t b, double *value) {
    const double rho = xd_fdistill_ratio(a, b, value), t = a->bins > 0 ? a->times[b] : 0.0;
    const bool fine = isfinite(rho) && isfinite(t);
    if (isfinite(rho)) *value = t;
    a->weights[b] = fine ? rho : (double)NAN;
    return fine && a->bins > 0 ? xd_fdistill_bin(a, t) : -1;
}

/* fdistill_ratios, in the order of the samples. */
XD_SCALAR void xd_fdistill_ratios_of(const xd_fdistill_args *a) {
    int64_t *findings = a->record + a->bins * (int)XD_FDISTILL_BIN_WORDS;
    for (int64_t i = 0; i < (a->bins + 1) * (int)XD_FDISTILL_BIN_WORDS; i++) a->record[i] = 0;
    for (int64_t b = 0; b < a->logits.rows; b++) {
        double value;
        const int64_t place = xd_fdistill_place(a, b, &value);
        if (place >= 0) {
            int64_t *bin = a->record + place * (int)XD_FDISTILL_BIN_WORDS;
            bin[0]++;
            xd_sum_put(bin + 1, a->fixed, a->weights[b]);
        } else if (isnan(a->weights[b]) && findings[0]++ == 0) {
            findings[1] = b;
            memcpy(findings + 2, &value, sizeof value);
        }
    }
}

/* Count and sum of a bin over all ranks; `stride` words from one rank's to the next one's. */
XD_SCALAR double xd_fdistill_gather(const xd_fdistill_args *a, const int64_t *bin, int64_t stride,
                                    int64_t *count) {
    int64_t sum[XD_NORM_LIMBS];
    for (int i = 0; i < xd_sum_words(a->fixed); i++) sum[i] = 0;
    *count = 0;
    for (int r = 0; r < a->ranks; r++) {
        *count += bin[r * stride];
        xd_sum_join(sum, a->fixed, bin + r * stride + 1);
    }
    return xd_sum_read(sum, a->fixed);
}

/* The value of bin k after this call. */
XD_SCALAR double xd_fdistill_next(const xd_fdistill_args *a, int64_t k) {
    int64_t count;
    const double sum = xd_fdistill_gather(a, a->records + k * (int)XD_FDISTILL_BIN_WORDS,
                                          (a->bins + 1) * (int)XD_FDISTILL_BIN_WORDS, &count);
    if (count == 0) return a->bin_values[k];
    const double mean = sum / xd_add((double)count, 1e-6);
    return xd_add(xd_mul(a->bin_values[k], a->rate), xd_mul(xd_sub(1.0, a->rate), mean));
}

/* Findings of all ranks to the status. True when it has none, of this loss or another. */
XD_SCALAR bool xd_fdistill_report(const xd_fdistill_args *a, xd_status *status) {
    for (int r = 0; r < a->ranks; r++) {
        const int64_t *f = a->records + (r * (a->bins + 1) + a->bins) * (int)XD_FDISTILL_BIN_WORDS;
        double value;
        memcpy(&value, f + 2, sizeof value);
        xd_sample_report(status, f[0], f[1], value);
    }
    return status->label_out_of_range + status->not_finite + status->nothing_counted + status->overflow == 0;
}

/* Makes rho of sample b its h. False for a finding, which stays as it is. */
XD_SCALAR bool xd_fdistill_weigh(const xd_fdistill_args *a, int64_t b) {
    double rho = a->weights[b];
    if (isnan(rho)) return false;
    if (a->bins > 0) rho = rho / xd_add(a->next[xd_fdistill_bin(a, a->times[b])], 1e-6);
    a->weights[b] = xd_f_weight_of(a->divergence, rho);
    return true;
}

/* fdistill_bins. */
XD_SCALAR void xd_fdistill_bins_of(const xd_fdistill_args *a, xd_status *status) {
    const bool clean = xd_fdistill_report(a, status);
    for (int64_t k = 0; k < a->bins; k++) a->next[k] = xd_fdistill_next(a, k);
    for (int64_t k = 0; k < a->bins && clean; k++) a->bin_values[k] = a->next[k];
    for (int i = 0; i < (int)XD_FDISTILL_BIN_WORDS; i++) a->mass[i] = 0;
    for (int64_t b = 0; b < a->logits.rows; b++) {
        if (!xd_fdistill_weigh(a, b)) continue;
        a->mass[0]++;
        xd_sum_put(a->mass + 1, a->fixed, a->weights[b]);
    }
}

/* The mean of h over all ranks. */
XD_SCALAR double xd_fdistill_mean(const xd_fdistill_args *a) {
    int64_t count;
    const double sum = xd_fdistill_gather(a, a->masses, (int)XD_FDISTILL_BIN_WORDS, &count);
    return count > 0 ? sum / (double)count : 0.0;
}

XD_SCALAR void xd_fdistill_share(const xd_fdistill_args *a, int64_t b, double mean) {
    a->weights[b] = isnan(a->weights[b]) ? 0.0 : a->weights[b] / xd_add(mean, 1e-6);
}

/* fdistill_weights. */
XD_SCALAR void xd_fdistill_weights_of(const xd_fdistill_args *a) {
    const double mean = xd_fdistill_mean(a);
    for (int64_t b = 0; b < a->logits.rows; b++) xd_fdistill_share(a, b, mean);
}

#endif
