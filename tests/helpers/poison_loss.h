/* poison_loss.h - families of the losses within one vocabulary. */
#ifndef XD_POISON_LOSS_H
#define XD_POISON_LOSS_H

#include "poison.h"
#include "vocab_calls.h"
#include "loss_calls.h"

enum { POISON_T = 5, POISON_V = 41, POISON_UNIT = 2, POISON_PADDING = 2 };

/* What the losses of this file share; in the block. */
typedef struct poison_loss {
    xd_loss_desc loss;
    mft_desc mft;
    xd_head_loss_desc head;
    xd_topk_desc topk;
    xd_kl_estimate_desc estimate;
    xd_loss_common *common; /* of the one in use */
    xd_loss_values values;
    xd_denominator denominator;
    xd_status status;
    double scale;
    bool reported;
    uint8_t mask[POISON_T];
} poison_loss;

/* Wide: two tiles of the vector loops, and a part of one. */
enum { POISON_WIDE = 2 * 2048 + 77 };

static inline int64_t poison_size(const poison_scene *s) {
    return s->size ? s->size : (int64_t)POISON_V;
}

/* Of objects that begin with it, or are it. */
static inline const xd_vocab *poison_vocab_of(const poison_scene *s) {
    return s->compound ? *(xd_vocab *const *)s->objects : (const xd_vocab *)s->objects;
}

static inline xd_interval poison_columns(const poison_scene *s) {
    const xd_vocab_info info = xd_vocab_describe(poison_vocab_of(s));
    const xd_interval columns = { info.begin, info.end };
    return columns;
}

static inline bool poison_vocab(poison_scene *s, int64_t size) {
    xd_vocab *vocab = NULL;
    CHECK_EQ_INT(vocab_even(s->ctx, s->layout == POISON_VOCABULARY ? s->world : NULL, size, &vocab), XD_OK);
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
    part->width = poison_size(s);
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
        xd_store_f64(labels->data, ids, r, (double)((r * 17 + 5) % poison_size(s)));
        p->mask[r] = 1;
    }
    poison_fill(weight, 9, 1.0, 0.5);
    p->common = common;
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
    xd_loss_common *common = p->common;
    if (s->layout == POISON_ROWS_SPLIT && s->rank != 1) return;
    if (way == 0) p->mask[s->unit] = 0;
    if (way == 1)
        xd_store_f64((void *)common->labels.data, common->labels.dtype, s->unit, (double)XD_IGNORE_INDEX);
    if (way == 2) ((float *)common->row_weight)[s->unit] = 0.0f;
}

static inline bool poison_is_id(const poison_part *part) {
    return part->dtype == XD_DTYPE_I32 || part->dtype == XD_DTYPE_I64;
}

/* What every loss over rows says about numbers. */
static inline poison_verdict poison_expect_loss(const poison_scene *s, const poison_part *part,
                                                double value) {
    const bool finite = isfinite(value) != 0, moderate = fabs(value) <= 500.0;
    (void)s;
    if (poison_is_id(part)) {
        if (!finite) return POISON_SKIP;
        return value >= 0.0 && value < (double)poison_size(s) ? POISON_FINE : POISON_FOUND;
    }
    if (!strcmp(part->name, "denominator_value"))
        return finite && value >= 0.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "temperature")) return finite && value > 0.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "beta") || !strcmp(part->name, "label_smoothing") ||
        !strcmp(part->name, "threshold"))
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
    if (!poison_vocab(s, poison_size(s))) return false;
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

static inline poison_loss *poison_loss_begin(poison_scene *s) {
    poison_loss *p = (poison_loss *)s->own;
    p->common->status = p->reported ? &p->status : NULL;
    return p;
}

static inline xd_result poison_loss_call(poison_scene *s) {
    poison_loss *p = poison_loss_begin(s);
    return xd_loss(s->ctx, &p->loss, &p->values);
}

static const poison_family poison_family_loss = {
    "xd_loss",
    POISON_LOSS_VARIANTS,
    3,
    { true, true, true },
    poison_loss_build,
    poison_loss_call,
    poison_leave_out_row,
    poison_expect_loss,
    poison_release_vocab,
    NULL,
};

/* ---- xd_loss by MFT and by cosine ---- */

/* Variants: f32; bf16 in place; of minimal fine-tuning with terms. */
static inline xd_loss_desc *poison_mft_desc(poison_scene *s, poison_loss *p, xd_loss_desc *d) {
    const xd_dtype dtype = s->variant == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    poison_part *student = poison_logits(s, "student", dtype, 1);
    d->vocab = (const xd_vocab *)s->objects;
    d->student = poison_padded(student);
    d->teacher = poison_padded(poison_logits(s, "teacher", dtype, 2));
    d->soft_weight = 1.5;
    poison_one(s, "soft_weight", POISON_IN | POISON_ONE, &d->soft_weight);
    poison_common(s, p, &d->common, XD_DTYPE_I64);
    poison_loss_gradient(s, student, dtype, s->variant == 1, &d->common.gradient);
    return d;
}

static inline bool poison_mft_build(poison_scene *s) {
    poison_loss *p = (poison_loss *)(s->own = poison_take(s, sizeof *p));
    if (!poison_vocab(s, poison_size(s))) return false;
    xd_loss_desc *d = poison_mft_desc(s, p, &p->mft.loss);
    d->temperature = 2.0;
    p->mft.threshold = 0.2;
    poison_one(s, "temperature", POISON_IN | POISON_ONE, &d->temperature);
    poison_one(s, "threshold", POISON_IN | POISON_ONE, &p->mft.threshold);
    if (s->variant == 1) return true;
    p->mft.terms =
        poison_rows(poison_matrix(s, "terms", POISON_OUT, XD_DTYPE_F32, POISON_T, d->student.cols));
    return true;
}

static inline xd_result poison_mft_call(poison_scene *s) {
    poison_loss *p = poison_loss_begin(s);
    return mft_loss(s->ctx, &p->mft, &p->values);
}

static inline bool poison_cosine_build(poison_scene *s) {
    poison_loss *p = (poison_loss *)(s->own = poison_take(s, sizeof *p));
    if (!poison_vocab(s, poison_size(s))) return false;
    poison_mft_desc(s, p, &p->loss);
    return true;
}

static inline xd_result poison_cosine_call(poison_scene *s) {
    poison_loss *p = poison_loss_begin(s);
    return cosine_loss(s->ctx, &p->loss, &p->values);
}

/* For the cosine infinity has no direction, whatever its sign; of minimal fine-tuning labels are read. */
static inline poison_verdict poison_expect_cosine(const poison_scene *s, const poison_part *part,
                                                  double value) {
    const bool logits = !strcmp(part->name, "student") || !strcmp(part->name, "teacher");
    if (poison_is_id(part)) return isfinite(value) ? POISON_IGNORED : POISON_SKIP;
    return logits && isinf(value) ? POISON_FOUND : poison_expect_loss(s, part, value);
}

static const poison_family poison_family_mft = {
    "xd_loss of MFT",
    2,
    3,
    { true, true, true },
    poison_mft_build,
    poison_mft_call,
    poison_leave_out_row,
    poison_expect_loss,
    poison_release_vocab,
    NULL,
};
static const poison_family poison_family_cosine = {
    "xd_loss of cosine",
    2,
    3,
    { true, true, true },
    poison_cosine_build,
    poison_cosine_call,
    poison_leave_out_row,
    poison_expect_cosine,
    poison_release_vocab,
    NULL,
};

/* ---- xd_head_loss ---- */

enum { POISON_H = 9 };

/* hidden, weight and bias of one side. A row of weight belongs to no unit: the whole call has it. */
static inline void poison_head_side(poison_scene *s, const char *const names[3], xd_dtype dtype,
                                    uint64_t seed, xd_head *head) {
    const xd_interval columns = poison_columns(s);
    const uint64_t own = s->layout == POISON_ROWS_SPLIT ? seed + 100 * (uint64_t)s->rank : seed;
    poison_part *hidden = poison_matrix(s, names[0], POISON_IN, dtype, POISON_T, POISON_H);
    poison_part *weight = poison_matrix(s, names[1], POISON_IN | POISON_ONE, dtype, 1,
                                        (columns.end - columns.begin) * POISON_H);
    poison_part *bias =
        poison_matrix(s, names[2], POISON_IN | POISON_ONE, XD_DTYPE_F32, 1, columns.end - columns.begin);
    poison_fill(hidden, own, 0.0, 1.0);
    for (int64_t v = 0; v < columns.end - columns.begin; v++) {
        for (int64_t h = 0; h < POISON_H; h++)
            xd_store_f64(weight->data, dtype, v * POISON_H + h,
                         poison_noise(seed + 50, columns.begin + v, h));
        xd_store_f64(bias->data, XD_DTYPE_F32, v, poison_noise(seed + 60, columns.begin + v, 0));
    }
    head->hidden = poison_rows(hidden);
    head->weight = xd_rows_of(weight->data, dtype, columns.end - columns.begin, POISON_H);
    head->bias = (const float *)bias->data;
    weight->first = columns.begin * POISON_H;
    weight->width = poison_size(s) * POISON_H;
    bias->first = columns.begin;
    bias->width = poison_size(s);
}

/* Variants: hard and forward KL to another head; bf16 and a teacher's logits; hard alone. */
static inline bool poison_head_build(poison_scene *s) {
    static const char *const student[3] = { "student.hidden", "student.weight", "student.bias" };
    static const char *const teacher[3] = { "teacher.hidden", "teacher.weight", "teacher.bias" };
    static const int every[1] = { POISON_UNIT };
    const xd_dtype dtype = s->variant == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    const bool invariant = xd_ctx_settings(s->ctx)->reduction == XD_REDUCTION_INVARIANT;
    poison_loss *p = (poison_loss *)(s->own = poison_take(s, sizeof *p));
    xd_head_loss_desc *d = &p->head;
    if (!poison_vocab(s, poison_size(s))) return false;
    const xd_interval columns = poison_columns(s);
    d->loss.vocab = (const xd_vocab *)s->objects;
    d->loss.hard_weight = 1.0;
    d->loss.soft_weight = s->variant < 2 ? 0.5 : 0.0;
    d->loss.temperature = 2.0;
    poison_head_side(s, student, dtype, 1, &d->student);
    if (s->variant == 0) poison_head_side(s, teacher, dtype, 2, &d->teacher);
    if (s->variant == 1) d->loss.teacher = poison_padded(poison_logits(s, "teacher", dtype, 2));
    poison_common(s, p, &d->loss.common, XD_DTYPE_I64);
    const int same = s->layout == POISON_VOCABULARY ? POISON_SAME : 0;
    if (!invariant || s->layout != POISON_VOCABULARY) /* tiles of 64 columns */
        d->hidden_gradient =
            poison_rows(poison_matrix(s, "hidden_gradient", POISON_OUT | same, dtype, POISON_T, POISON_H));
    poison_part *weight = poison_matrix(s, "weight_gradient", POISON_OUT, XD_DTYPE_F32, 1,
                                        (columns.end - columns.begin) * POISON_H);
    poison_part *bias =
        poison_matrix(s, "bias_gradient", POISON_OUT, XD_DTYPE_F32, 1, columns.end - columns.begin);
    weight->unit = bias->unit = every; /* a sum over units, also over the poisoned one */
    d->weight_gradient = (float *)weight->data;
    d->bias_gradient = (float *)bias->data;
    return true;
}

static inline xd_result poison_head_call(poison_scene *s) {
    poison_loss *p = poison_loss_begin(s);
    return xd_head_loss(s->ctx, &p->head, &p->values);
}

/* A product with infinity is infinite or NaN, of either sign: -infinity among hidden states is no logit. */
static inline poison_verdict poison_expect_head(const poison_scene *s, const poison_part *part,
                                                double value) {
    const bool hidden = strstr(part->name, "hidden") != NULL;
    if (strstr(part->name, ".bias") && value < 0.0) return POISON_LEGAL; /* a logit of -infinity */
    return hidden && isinf(value) ? POISON_FOUND : poison_expect_loss(s, part, value);
}

static const poison_family poison_family_head = {
    "xd_head_loss",
    3,
    3,
    { true, true, true },
    poison_head_build,
    poison_head_call,
    poison_leave_out_row,
    poison_expect_head,
    poison_release_vocab,
    NULL,
};

/* ---- xd_topk_kl_loss ---- */

enum { POISON_K = 5 };

typedef struct poison_topk_variant {
    int teacher; /* 0 log-probabilities, 1 logits of the ids, 2 logits of the vocabulary, 3 those, and no ids */
    xd_topk_mode mode;
    xd_divergence divergence;
    xd_dtype dtype;
    bool normaliser;
} poison_topk_variant;

static const poison_topk_variant poison_topk_variants[] = {
    { 0, XD_TOPK_RENORMALISE, XD_KL_FORWARD, XD_DTYPE_F32, false },
    { 0, XD_TOPK_TAIL, XD_KL_FORWARD, XD_DTYPE_F32, false },
    { 0, XD_TOPK_TRUNCATE, XD_KL_REVERSE, XD_DTYPE_BF16, false },
    { 0, XD_TOPK_ZERO_OUTSIDE, XD_KL_MIXED, XD_DTYPE_F32, false },
    { 1, XD_TOPK_TAIL, XD_JSD, XD_DTYPE_F32, true },
    { 1, XD_TOPK_TRUNCATE, XD_KL_FORWARD, XD_DTYPE_F32, true },
    { 1, XD_TOPK_RENORMALISE, XD_KL_MIXED, XD_DTYPE_F32, false },
    { 1, XD_TOPK_ZERO_OUTSIDE, XD_KL_REVERSE, XD_DTYPE_F32, false },
    { 2, XD_TOPK_TAIL, XD_KL_REVERSE, XD_DTYPE_F32, false },
    { 3, XD_TOPK_RENORMALISE, XD_JSD, XD_DTYPE_BF16, false },
    { 3, XD_TOPK_TAIL, XD_KL_FORWARD, XD_DTYPE_F32, false },
};
enum { POISON_TOPK_VARIANTS = sizeof poison_topk_variants / sizeof *poison_topk_variants };

static inline void poison_topk_entries(poison_scene *s, const poison_topk_variant *v, xd_topk_desc *d) {
    const uint64_t seed = s->layout == POISON_ROWS_SPLIT ? 100 * (uint64_t)s->rank : 0;
    poison_part *ids = poison_matrix(s, "ids", POISON_IN, XD_DTYPE_I64, POISON_T, POISON_K);
    for (int64_t r = 0; r < POISON_T; r++)
        for (int64_t j = 0; j < POISON_K; j++)
            xd_store_f64(ids->data, ids->dtype, r * POISON_K + j,
                         (double)((r * 5 + j * 9 + 3) % poison_size(s)));
    d->ids = xd_ids_of(ids->data, ids->dtype);
    if (v->teacher > 1) return;
    poison_part *values = poison_matrix(s, "values", POISON_IN, XD_DTYPE_F32, POISON_T, POISON_K);
    poison_fill(values, seed + 5, -3.0, 0.5); /* together about a fourth */
    d->values = (const float *)values->data;
    d->values_kind = v->teacher ? XD_TOPK_LOGITS : XD_TOPK_LOG_PROBS;
    if (!v->normaliser) return;
    poison_part *log = poison_matrix(s, "log_normaliser", POISON_IN, XD_DTYPE_F64, POISON_T, 1);
    poison_fill(log, seed + 6, 1.0, 0.2);
    d->log_normaliser = (const double *)log->data;
}

static inline bool poison_topk_build(poison_scene *s) {
    const poison_topk_variant *v = poison_topk_variants + s->variant;
    const int same = s->layout == POISON_VOCABULARY ? POISON_SAME : 0;
    poison_loss *p = (poison_loss *)(s->own = poison_take(s, sizeof *p));
    xd_topk_desc *d = &p->topk;
    if (!poison_vocab(s, poison_size(s))) return false;
    poison_part *student = poison_logits(s, "student", v->dtype, 1);
    d->student = poison_padded(student);
    d->vocab = (const xd_vocab *)s->objects;
    d->k = POISON_K;
    d->mode = v->mode;
    d->divergence = v->divergence;
    d->beta = 0.4;
    d->temperature = d->values_temperature = v->teacher == 1 ? 2.0 : 1.0;
    if (v->teacher < 3) poison_topk_entries(s, v, d);
    if (v->teacher > 1) d->teacher = poison_padded(poison_logits(s, "teacher", v->dtype, 2));
    poison_one(s, "beta", POISON_IN | POISON_ONE, &d->beta);
    if (v->teacher) poison_one(s, "temperature", POISON_IN | POISON_ONE, &d->temperature);
    poison_common(s, p, &d->common, XD_DTYPE_I64);
    d->student_mass =
        (float *)poison_matrix(s, "student_mass", POISON_OUT | same, XD_DTYPE_F32, POISON_T, 1)->data;
    d->teacher_mass =
        (float *)poison_matrix(s, "teacher_mass", POISON_OUT | same, XD_DTYPE_F32, POISON_T, 1)->data;
    d->student_log_probs = (float *)poison_matrix(s, "student_log_probs", POISON_OUT | POISON_LOG | same,
                                                  XD_DTYPE_F32, POISON_T, POISON_K)
                               ->data;
    poison_loss_gradient(s, student, v->dtype, s->variant % 2 != 0, &d->common.gradient);
    return true;
}

static inline xd_result poison_topk_call(poison_scene *s) {
    poison_loss *p = poison_loss_begin(s);
    return xd_topk_kl_loss(s->ctx, &p->topk, &p->values);
}

/* A probability cannot be above 1, and -infinity leaves an entry out. */
static inline poison_verdict poison_expect_topk(const poison_scene *s, const poison_part *part,
                                                double value) {
    const poison_topk_variant *v = poison_topk_variants + s->variant;
    const bool whole = !strcmp(part->name, "log_normaliser");
    if (!strcmp(part->name, "values")) {
        if (value < 0.0) return POISON_EITHER;
        if (!isfinite(value)) return POISON_FOUND;
        return v->teacher == 0 && value > 1.0 ? POISON_FOUND : POISON_EITHER;
    }
    if (whole) return isfinite(value) ? POISON_EITHER : POISON_FOUND;
    if (!strcmp(part->name, "labels")) return isfinite(value) ? POISON_IGNORED : POISON_SKIP;
    return poison_expect_loss(s, part, value);
}

static const poison_family poison_family_topk = {
    "xd_topk_kl_loss",
    POISON_TOPK_VARIANTS,
    3,
    { true, true, true },
    poison_topk_build,
    poison_topk_call,
    poison_leave_out_row,
    poison_expect_topk,
    poison_release_vocab,
    NULL,
};

/* ---- xd_kl_estimate: the units are tokens, and findings are an error ---- */

static inline bool poison_estimate_build(poison_scene *s) {
    poison_loss *p = (poison_loss *)(s->own = poison_take(s, sizeof *p));
    xd_kl_estimate_desc *d = &p->estimate;
    poison_part *part = poison_matrix(s, "logprobs", POISON_IN, XD_DTYPE_F32, POISON_T, 1);
    poison_fill(part, 1, -3.0, 2.0);
    d->logprobs = (const float *)part->data;
    part = poison_matrix(s, "reference", POISON_IN, XD_DTYPE_F32, POISON_T, 1);
    poison_fill(part, 2, -3.0, 2.0);
    d->reference = (const float *)part->data;
    part = poison_matrix(s, "weight", POISON_IN, XD_DTYPE_F32, POISON_T, 1);
    poison_fill(part, 3, 1.0, 0.5);
    d->weight = (const float *)part->data;
    d->count = POISON_T;
    d->kind = (xd_kl_estimator)(s->variant % 3);
    if (s->variant >= 3) {
        d->input_clamp = 20.0;
        d->output_clamp = 10.0;
        poison_one(s, "input_clamp", POISON_IN | POISON_ONE, &d->input_clamp);
        poison_one(s, "output_clamp", POISON_IN | POISON_ONE, &d->output_clamp);
    }
    d->values = (float *)poison_matrix(s, "values", POISON_OUT | POISON_OWN, XD_DTYPE_F32, POISON_T, 1)->data;
    d->gradient = (float *)poison_matrix(s, "gradient", POISON_OUT, XD_DTYPE_F32, POISON_T, 1)->data;
    poison_one(s, "sum", POISON_TOTAL, &p->scale);
    s->unit = POISON_UNIT;
    return true;
}

static inline xd_result poison_estimate_call(poison_scene *s) {
    poison_loss *p = (poison_loss *)s->own;
    return xd_kl_estimate(s->ctx, &p->estimate, &p->scale);
}

static inline void poison_estimate_leave_out(poison_scene *s, int way) {
    poison_loss *p = (poison_loss *)s->own;
    (void)way;
    ((float *)p->estimate.weight)[s->unit] = 0.0f;
}

static inline poison_verdict poison_expect_estimate(const poison_scene *s, const poison_part *part,
                                                    double value) {
    (void)s;
    if (part->role & POISON_ONE)
        return value >= 0.0 ? POISON_LEGAL : POISON_REFUSED; /* infinity clamps nothing */
    if (isnan(value)) return POISON_FOUND;
    return POISON_EITHER; /* clamps make infinity legal */
}

static const poison_family poison_family_estimate = {
    "xd_kl_estimate",
    6,
    1,
    { true, false, false },
    poison_estimate_build,
    poison_estimate_call,
    poison_estimate_leave_out,
    poison_expect_estimate,
    NULL,
    NULL,
};

#endif
