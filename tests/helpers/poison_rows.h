/* poison_rows.h - families of softmax pieces and selections. They report nothing: NaN and infinity go into the results of
 * their row, and no further. */
#ifndef XD_POISON_ROWS_H
#define XD_POISON_ROWS_H

#include "poison_loss.h"
#include "softmax_calls.h"
#include "xd_private.h"
#include "vocab_calls.h"

typedef struct poison_softmax {
    xd_rows logits, weight, gradient;
    xd_positions positions;
    xdi_project_desc project;
    double temperature, accuracy;
    const double *project_weight;
    double *lse, *projected;
    int64_t *argmax, *ids;
    float *values, *row_weight;
    int64_t labels[POISON_T];
    uint8_t mask[POISON_T];
} poison_softmax;

typedef struct poison_softmax_objects {
    xd_vocab *vocab; /* first */
    xd_projection projection;
} poison_softmax_objects;

static inline bool poison_softmax_is(const poison_scene *s, const char *name) {
    return !strcmp(s->family->name, name);
}

static inline void poison_softmax_outputs(poison_scene *s, poison_softmax *p) {
    const xd_interval columns = poison_columns(s);
    const int64_t held = columns.end - columns.begin;
    const bool backward = strstr(s->family->name, "backward") || poison_softmax_is(s, "xd_log_probs of all");
    if (backward)
        p->gradient = poison_rows(poison_matrix(s, "gradient", POISON_OUT, XD_DTYPE_F32, POISON_T, held));
    if (poison_softmax_is(s, "xd_log_probs_backward of all")) {
        poison_part *weight =
            poison_shard(s, "weight", POISON_IN, XD_DTYPE_F32, POISON_T, columns, poison_size(s));
        poison_fill(weight, 5, 0.0, 1.0);
        p->weight = poison_rows(weight);
    }
    poison_part *row_weight = NULL;
    if (poison_softmax_is(s, "xd_log_probs_backward") || poison_softmax_is(s, "xd_log_probs of accuracy"))
        row_weight = poison_matrix(s, "row weight", POISON_IN, XD_DTYPE_F32, POISON_T, 1);
    if (row_weight) {
        poison_fill(row_weight, 6, 1.0, 0.5);
        p->row_weight = (float *)row_weight->data;
    }
    if (poison_softmax_is(s, "xd_log_probs")) {
        p->lse =
            (double *)poison_matrix(s, "log_sum_exp", POISON_OUT | POISON_SAME, XD_DTYPE_F64, POISON_T, 1)
                ->data;
        p->argmax =
            (int64_t *)poison_matrix(s, "argmax", POISON_OUT | POISON_SAME, XD_DTYPE_I64, POISON_T, 1)->data;
    }
    if (poison_softmax_is(s, "xd_log_probs at ids") || poison_softmax_is(s, "xd_log_probs of logits") ||
        poison_softmax_is(s, "xd_vocab_topk"))
        p->values = (float *)poison_matrix(s, "values", POISON_OUT | POISON_SAME, XD_DTYPE_F32, POISON_T,
                                           poison_softmax_is(s, "xd_vocab_topk") ? POISON_K : 1)
                        ->data;
    if (poison_softmax_is(s, "xd_vocab_topk"))
        p->ids =
            (int64_t *)poison_matrix(s, "ids", POISON_OUT | POISON_SAME, XD_DTYPE_I64, POISON_T, POISON_K)
                ->data;
    if (poison_softmax_is(s, "xdi_project"))
        p->projected =
            (double *)poison_matrix(s, "projected", POISON_OUT | POISON_SAME, XD_DTYPE_F64, POISON_T, 7)
                ->data;
    if (poison_softmax_is(s, "xdi_project_backward")) {
        poison_part *weight = poison_matrix(s, "weight", POISON_IN, XD_DTYPE_F64, POISON_T, 7);
        poison_fill(weight, 5, 0.0, 1.0);
        p->project_weight = (const double *)weight->data;
    }
    if (poison_softmax_is(s, "xd_log_probs of accuracy"))
        poison_one(s, "accuracy", POISON_TOTAL | POISON_SAME, &p->accuracy);
}

static inline bool poison_softmax_build(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)(s->own = poison_take(s, sizeof *p));
    poison_softmax_objects *o = (poison_softmax_objects *)calloc(1, sizeof *o);
    const xd_dtype dtype = s->variant == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    xd_vocab *vocab = NULL;
    CHECK_EQ_INT(vocab_even(s->ctx, s->layout == POISON_VOCABULARY ? s->world : NULL, poison_size(s), &vocab),
                 XD_OK);
    xdi_vote mine[POISON_WIDE];
    for (int v = 0; v < (int)poison_size(s); v++) {
        mine[v].student_id = v;
        mine[v].teacher_id = v * 3 % 7;
        mine[v].weight = 1.0;
    }
    const xdi_projection_cells list = { mine, poison_size(s), poison_size(s), 7 };
    CHECK_EQ_INT(xdi_projection_from_cells(s->ctx, &list, &o->projection), XD_OK);
    o->vocab = vocab;
    s->objects = o;
    s->compound = true;
    s->unit = POISON_UNIT;
    for (int r = 0; r < POISON_T; r++) {
        p->labels[r] = (r * 17 + 5) % poison_size(s);
        p->mask[r] = 1;
    }
    if (!poison_softmax_is(s, "xdi_project_backward")) {
        poison_part *logits = poison_logits(s, "logits", dtype, 1);
        if (poison_softmax_is(s, "xdi_project")) poison_fill(logits, 1, 0.5, 0.4);
        p->logits = poison_padded(logits);
    }
    p->temperature = 2.0;
    p->project.vocab = vocab;
    p->project.projection = &o->projection;
    p->positions.count = POISON_T;
    p->positions.labels = xd_ids_of(p->labels, XD_DTYPE_I64);
    p->positions.mask = p->mask;
    poison_softmax_outputs(s, p);
    p->positions.weights = p->row_weight;
    if (strstr(s->family->name, "xd_log_probs") && !poison_softmax_is(s, "xd_log_probs of logits") &&
        !poison_softmax_is(s, "xd_log_probs of accuracy"))
        poison_one(s, "temperature", POISON_IN | POISON_ONE, &p->temperature);
    return true;
}

static inline void poison_release_softmax(poison_scene *s) {
    poison_softmax_objects *o = (poison_softmax_objects *)s->objects;
    xd_vocab_destroy(o->vocab);
    xd_projection_destroy(s->ctx, &o->projection);
    free(o);
}

static inline void poison_softmax_leave_out(poison_scene *s, int way) {
    poison_softmax *p = (poison_softmax *)s->own;
    (void)way;
    if (p->row_weight) p->row_weight[s->unit] = 0.0f;
    p->mask[s->unit] = 0;
}

static inline xd_result poison_call_row_stats(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return softmax_row_stats(s->ctx, poison_vocab_of(s), p->logits, p->temperature, p->lse, p->argmax);
}

static inline xd_result poison_call_log_softmax(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return softmax_all(s->ctx, poison_vocab_of(s), p->logits, p->temperature, p->gradient);
}

static inline xd_result poison_call_log_softmax_backward(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return softmax_all_backward(s->ctx, poison_vocab_of(s), p->logits, p->temperature, p->weight,
                                p->gradient);
}

static inline xd_result poison_call_target_log_probs(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return softmax_at_ids(s->ctx, poison_vocab_of(s), p->logits, p->temperature, p->positions.labels,
                          p->values);
}

static inline xd_result poison_call_target_log_probs_backward(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return softmax_at_ids_backward(s->ctx, poison_vocab_of(s), p->logits, p->temperature, p->positions.labels,
                                   p->row_weight, p->gradient);
}

static inline xd_result poison_call_gather_columns(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return softmax_columns(s->ctx, poison_vocab_of(s), p->logits, p->positions.labels, 1, 1, p->values);
}

static inline xd_result poison_call_vocab_topk(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return xd_vocab_topk(s->ctx, poison_vocab_of(s), p->logits, POISON_K, p->values, p->ids);
}

static inline xd_result poison_call_accuracy(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return softmax_accuracy(s->ctx, poison_vocab_of(s), p->logits, &p->positions, NULL, &p->accuracy);
}

static inline xd_result poison_call_project(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return xdi_project(s->ctx, &p->project, p->logits, p->projected);
}

static inline xd_result poison_call_project_backward(poison_scene *s) {
    poison_softmax *p = (poison_softmax *)s->own;
    return xdi_project_backward(s->ctx, &p->project, p->project_weight, p->gradient);
}

static inline poison_verdict poison_expect_softmax(const poison_scene *s, const poison_part *part,
                                                   double value) {
    if (!strcmp(part->name, "temperature"))
        return isfinite(value) && value > 0.0 ? POISON_SKIP : POISON_REFUSED;
    if (!poison_softmax_is(s, "xd_log_probs of accuracy") || strcmp(part->name, "row weight"))
        return POISON_ALONE;
    return value >= 0.0 && value < 4194304.0 ? POISON_FINE
                                             : POISON_REFUSED; /* weights are summed as integers */
}

#define POISON_SOFTMAX_FAMILY(function, name, ways)         \
    static const poison_family poison_family_##function = { \
        name,                                               \
        2,                                                  \
        ways,                                               \
        { true, true, false },                              \
        poison_softmax_build,                               \
        poison_call_##function,                             \
        poison_softmax_leave_out,                           \
        poison_expect_softmax,                              \
        poison_release_softmax,                             \
        NULL,                                               \
    };
POISON_SOFTMAX_FAMILY(row_stats, "xd_log_probs", 0)
POISON_SOFTMAX_FAMILY(log_softmax, "xd_log_probs of all", 0)
POISON_SOFTMAX_FAMILY(log_softmax_backward, "xd_log_probs_backward of all", 0)
POISON_SOFTMAX_FAMILY(target_log_probs, "xd_log_probs at ids", 0)
POISON_SOFTMAX_FAMILY(target_log_probs_backward, "xd_log_probs_backward", 1)
POISON_SOFTMAX_FAMILY(gather_columns, "xd_log_probs of logits", 0)
POISON_SOFTMAX_FAMILY(vocab_topk, "xd_vocab_topk", 0)
POISON_SOFTMAX_FAMILY(accuracy, "xd_log_probs of accuracy", 1)
POISON_SOFTMAX_FAMILY(project, "xdi_project", 0)
POISON_SOFTMAX_FAMILY(project_backward, "xdi_project_backward", 0)

#endif
