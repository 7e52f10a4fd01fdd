/* Losses across tokenizers, by single rows: moments, and teachers of the student's own tokenizer. */

#include "kernel/cpu/xtoken.h"
#include "kernel/ids.h"

#include <math.h>
#include <string.h>

static void xdi_cpu_xtoken_moments_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xd_xtoken_moments_args *a = (const xd_xtoken_moments_args *)args;
    const xd_xtoken_rows *x = &a->x;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = x->rows[i], label = a->labels.data ? xd_id_at(a->labels, row) : -1;
        double *out = a->moments + i * XD_XTOKEN_MOMENTS, max = -INFINITY, sum = 0.0, entropy = 0.0;
        for (int64_t v = 0; v < x->columns; v++) {
            const double z = xdi_loss_load(&x->logits, row, v);
            if (!(z <= max)) max = z;
        }
        for (int64_t v = 0; v < x->columns; v++) sum += exp(xdi_loss_load(&x->logits, row, v) - max);
        const double lse = max + log(sum);
        for (int64_t v = 0; v < x->columns && a->entropy; v++) {
            const double p = exp(xdi_loss_load(&x->logits, row, v) - lse);
            entropy += xd_xtoken_entropy_term(p);
        }
        out[XD_XTOKEN_LARGEST] = max;
        out[XD_XTOKEN_LOG_SUM] = log(sum);
        out[XD_XTOKEN_ENTROPY] = entropy;
        out[XD_XTOKEN_LABEL] =
            label >= 0 && label < x->columns ? xdi_loss_load(&x->logits, row, label) : (double)NAN;
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_moments(const xd_launch *launch, const xd_xtoken_moments_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->x.columns, xdi_cpu_xtoken_moments_rows, a);
}

static void xdi_cpu_xtoken_pick_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_xtoken_pick_args *a = (const xd_xtoken_pick_args *)args;
    const xd_xtoken_rows *x = &a->x;
    (void)launch, (void)slot;
    for (int64_t i = begin * a->k; i < end * a->k; i++) {
        const int64_t v = a->ids[i % a->k] - x->first, row = x->rows[i / a->k];
        const double before = a->add ? a->out[i] : 0.0;
        a->out[i] = (double)-INFINITY;
        if (v >= 0 && v < x->columns)
            a->out[i] = xd_xtoken_picked(before, a->scale, xdi_loss_load(&x->logits, row, v));
        if (xd_xtoken_row_is_bad(x, row)) a->out[i] = (double)NAN;
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_pick(const xd_launch *launch, const xd_xtoken_pick_args *a) {
    return xdi_spread_rows(launch, a->x.count, a->k, xdi_cpu_xtoken_pick_rows, a);
}

static void xdi_cpu_xtoken_log_softmax(double *x, int64_t k) {
    const double lse = xdi_cpu_xtoken_lse(x, k);
    for (int64_t j = 0; j < k; j++) x[j] -= lse;
}

/* KL of log-probabilities, and in s its derivative with respect to the logits. */
static double xdi_cpu_xtoken_kl(double *s, const double *t, int64_t k, bool reverse) {
    double value = 0.0;
    for (int64_t j = 0; j < k; j++) xd_xtoken_add_kl(s[j], t[j], reverse, &value);
    for (int64_t j = 0; j < k; j++) s[j] = xd_xtoken_kl_slope(s[j], t[j], reverse, value);
    return value;
}

static void xdi_cpu_xtoken_compare_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xd_xtoken_compare_args *a = (const xd_xtoken_compare_args *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        double *s = a->student + i * a->k, *t = a->teacher + i * a->k;
        if (!a->chunks[i].compared) continue;
        for (int64_t j = 0; j < a->k; j++) s[j] /= a->temperature;
        for (int64_t j = 0; j < a->k; j++) t[j] = t[j] / a->divisor / a->temperature;
        a->chunks[i].agree = xdi_cpu_xtoken_argmax(s, a->k) == xdi_cpu_xtoken_argmax(t, a->k);
        xdi_cpu_xtoken_log_softmax(s, a->k);
        xdi_cpu_xtoken_log_softmax(t, a->k);
        a->chunks[i].value = xdi_cpu_xtoken_kl(s, t, a->k, a->reverse);
        a->chunks[i].largest = xd_xtoken_chunk_takes(&a->chunks[i], a->chunks[i].value) ? 1.0 : 0.0;
    }
}

XD_PRIVATE xd_result xdi_cpu_xtoken_compare(const xd_launch *launch, const xd_xtoken_compare_args *a) {
    return xdi_spread_rows(launch, a->count, a->k, xdi_cpu_xtoken_compare_rows, a);
}

XD_PRIVATE xd_result xdi_cpu_xtoken_slots(const xd_launch *launch, const xd_xtoken_slots_args *a) {
    (void)launch;
    for (int64_t id = 0; id < a->size; id++) a->slots[id] = -1;
    for (int64_t j = 0; j < a->k; j++) a->slots[a->ids[j]] = (int32_t)j;
    return XD_OK;
}
