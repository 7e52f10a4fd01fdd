/* poison_loss.h - families of the losses within one vocabulary. */
#ifndef XD_POISON_LOSS_H
#define XD_POISON_LOSS_H

#include "poison.h"

enum { POISON_T = 5, POISON_V = 41, POISON_UNIT = 2, POISON_PADDING = 2 };

/* What the losses of this file share; in the block. */
typedef struct poison_loss {
    xd_loss_desc loss;
    xd_loss_values values;
    xd_denominator denominator;
    xd_status status;
    double scale;
    bool reported;
    uint8_t mask[POISON_T];
} poison_loss;

static inline xd_interval poison_columns(const poison_scene *s) {
    const xd_vocab_info info = xd_vocab_describe((const xd_vocab *)s->objects);
    const xd_interval columns = { info.begin, info.end };
    return columns;
}

static inline bool poison_vocab(poison_scene *s, int64_t size) {
    xd_vocab *vocab = NULL;
    CHECK_EQ_INT(xd_vocab_create_even(s->ctx, s->layout == POISON_VOCABULARY ? s->world : NULL, size, &vocab), XD_OK);
    s->objects = vocab;
    return vocab != NULL;
}

static inline void poison_release_vocab(poison_scene *s) {
    xd_vocab_destroy((xd_vocab *)s->objects);
}

/* Logits of this rank with padding columns, which nobody reads; rows split over ranks have numbers of their own. */
static inline poison_part *poison_logits(poison_scene *s, const char *name, xd_dtype dtype, uint64_t seed) {
    const xd_interval columns = poison_columns(s);
    const int64_t held = columns.end - columns.begin, stride = held + POISON_PADDING;
    void *data = poison_take(s, (size_t)(POISON_T * stride) * xd_dtype_size(dtype) + 64);
    poison_part *part = poison_add(s, name, POISON_IN, data, dtype);
    part->rows = POISON_T;
    part->cols = held;
    part->stride = stride;
    part->first = columns.begin;
    part->width = POISON_V;
    poison_fill(part, s->layout == POISON_ROWS_SPLIT ? seed + 100 * (uint64_t)s->rank : seed, 0.0, 3.0);
    return part;
}

static inline xd_rows poison_padded(const poison_part *part) {
    const xd_rows rows = { part->data, part->dtype, part->rows, part->stride, part->stride };
    return rows;
}

/* Labels, weights, mask, scale, D, row_loss and status: all that losses have in common. */
static inline void poison_common(poison_scene *s, poison_loss *p, xd_loss_common *common, xd_dtype ids) {
    const int same = s->layout == POISON_VOCABULARY ? POISON_SAME : 0;
    poison_part *labels = poison_matrix(s, "labels", POISON_IN, ids, POISON_T, 1);
    poison_part *weight = poison_matrix(s, "row_weight", POISON_IN, XD_DTYPE_F32, POISON_T, 1);
    poison_part *row_loss = poison_matrix(s, "row_loss", POISON_OUT | same, XD_DTYPE_F32, POISON_T, 1);
    for (int r = 0; r < POISON_T; r++) {
        xd_store_f64(labels->data, ids, r, (double)((r * 17 + 5) % POISON_V));
        p->mask[r] = 1;
    }
    poison_fill(weight, 9, 1.0, 0.5);
    p->scale = 0.75;
    p->reported = true;
    common->labels = xd_ids_of(labels->data, ids);
    common->mask = p->mask;
    common->row_weight = (const float *)weight->data;
    common->row_loss = (float *)row_loss->data;
    common->scale = &p->scale;
    common->denominator_value = 7.0;
    common->comm = s->data;
    poison_one(s, "scale", POISON_IN | POISON_ONE, &p->scale);
    if (s->variant == 0) {
        p->denominator.value = 7.0;
        p->denominator.inverse = 1.0 / 7.0;
        common->denominator = &p->denominator;
        poison_one(s, "denominator.inverse", POISON_IN | POISON_ONE, &p->denominator.inverse);
    } else {
        poison_one(s, "denominator_value", POISON_IN | POISON_ONE, &common->denominator_value);
    }
    poison_totals(s, &p->values);
    s->status = &p->status;
    s->reported = &p->reported;
    s->unit = POISON_UNIT;
}

static inline void poison_leave_out_row(poison_scene *s, int way) {
    poison_loss *p = (poison_loss *)s->own;
    xd_loss_common *common = &p->loss.common;
    if (s->layout == POISON_ROWS_SPLIT && s->rank != 1) return;
    if (way == 0) p->mask[s->unit] = 0;
    if (way == 1) xd_store_f64((void *)common->labels.data, common->labels.dtype, s->unit, (double)XD_IGNORE_INDEX);
    if (way == 2) ((float *)common->row_weight)[s->unit] = 0.0f;
}

static inline bool poison_is_id(const poison_part *part) {
    return part->dtype == XD_DTYPE_I32 || part->dtype == XD_DTYPE_I64;
}

/* What every loss over rows says about numbers. */
static inline poison_verdict poison_expect_loss(const poison_scene *s, const poison_part *part, double value) {
    const bool finite = isfinite(value) != 0, moderate = fabs(value) <= 500.0;
    (void)s;
    if (poison_is_id(part)) {
        if (!finite) return POISON_SKIP;
        return value >= 0.0 && value < POISON_V ? POISON_FINE : POISON_FOUND;
    }
    if (!strcmp(part->name, "denominator_value")) return finite && value >= 0.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "temperature")) return finite && value > 0.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "beta") || !strcmp(part->name, "label_smoothing") || !strcmp(part->name, "threshold"))
        return value >= 0.0 && value <= 1.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "hard_weight") || !strcmp(part->name, "soft_weight"))
        return finite ? POISON_CALL : POISON_REFUSED;
    if (part->role & POISON_ONE) return POISON_CALL;
    if (moderate) return POISON_FINE;
    if (!strcmp(part->name, "row_weight")) return finite ? POISON_EITHER : POISON_FOUND;
    return finite || value < 0.0 ? POISON_EITHER : POISON_FOUND; /* -infinity is a logit */
}

/* ---- xd_loss ---- */

typedef struct poison_loss_variant {
    double hard, soft, temperature, beta, smoothing;
    xd_divergence divergence;
    xd_dtype logits, gradient, ids;
    bool in_place;
} poison_loss_variant;

static const poison_loss_variant poison_loss_variants[] = {
    { 1.0, 0.0, 0.0, 0.0, 0.0, XD_KL_FORWARD, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_I64, false },
    { 1.0, 0.0, 0.0, 0.0, 0.1, XD_KL_FORWARD, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_I32, true },
    { 0.0, 1.5, 2.0, 0.0, 0.0, XD_KL_FORWARD, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_I64, false },
    { 0.0, 1.5, 2.0, 0.0, 0.0, XD_KL_REVERSE, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_I64, true },
    { 0.0, 1.5, 1.0, 0.3, 0.0, XD_JSD, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_I64, false },
    { 0.0, 1.5, 2.0, 0.0, 0.0, XD_SOFT_CE, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_I64, false },
    { 0.5, 1.5, 1.0, 0.0, 0.0, XD_KL_FORWARD, XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_I64, false },
    { 0.5, 1.5, 3.0, 0.6, 0.2, XD_JSD, XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_I32, true },
    { 0.5, -1.0, 1.0, 0.0, 0.0, XD_KL_REVERSE, XD_DTYPE_BF16, XD_DTYPE_F32, XD_DTYPE_I32, false },
};
enum { POISON_LOSS_VARIANTS = sizeof poison_loss_variants / sizeof *poison_loss_variants };

static inline void poison_loss_gradient(poison_scene *s, poison_part *student, xd_dtype dtype, bool in_place,
                                        xd_rows *gradient) {
    if (in_place) {
        student->role |= POISON_OUT;
        *gradient = poison_padded(student);
        return;
    }
    poison_part *part = poison_matrix(s, "gradient", POISON_OUT, dtype, POISON_T, student->stride);
    *gradient = poison_rows(part);
}

static inline bool poison_loss_build(poison_scene *s) {
    const poison_loss_variant *v = poison_loss_variants + s->variant;
    poison_loss *p = (poison_loss *)(s->own = poison_take(s, sizeof *p));
    xd_loss_desc *d = &p->loss;
    if (!poison_vocab(s, POISON_V)) return false;
    poison_part *student = poison_logits(s, "student", v->logits, 1);
    d->vocab = (const xd_vocab *)s->objects;
    d->student = poison_padded(student);
    if (v->soft != 0.0) d->teacher = poison_padded(poison_logits(s, "teacher", v->logits, 2));
    d->hard_weight = v->hard;
    d->soft_weight = v->soft;
    d->temperature = v->temperature;
    d->beta = v->beta;
    d->divergence = v->divergence;
    d->label_smoothing = v->smoothing;
    if (v->hard != 0.0) poison_one(s, "hard_weight", POISON_IN | POISON_ONE, &d->hard_weight);
    if (v->soft != 0.0) poison_one(s, "soft_weight", POISON_IN | POISON_ONE, &d->soft_weight);
    if (v->soft != 0.0) poison_one(s, "temperature", POISON_IN | POISON_ONE, &d->temperature);
    if (v->divergence == XD_JSD) poison_one(s, "beta", POISON_IN | POISON_ONE, &d->beta);
    if (v->smoothing != 0.0) poison_one(s, "label_smoothing", POISON_IN | POISON_ONE, &d->label_smoothing);
    poison_common(s, p, &d->common, v->ids);
    poison_loss_gradient(s, student, v->gradient, v->in_place, &d->common.gradient);
    return true;
}

static inline xd_result poison_loss_call(poison_scene *s) {
    poison_loss *p = (poison_loss *)s->own;
    p->loss.common.status = p->reported ? &p->status : NULL;
    return xd_loss(s->ctx, &p->loss, &p->values);
}

static const poison_family poison_family_loss = {
    "xd_loss",          POISON_LOSS_VARIANTS, 3, { true, true, true }, poison_loss_build,
    poison_loss_call, poison_leave_out_row, poison_expect_loss, poison_release_vocab,
};

#endif
