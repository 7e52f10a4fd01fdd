/* Golden cases of universal logit distillation (area classic): TRL's ULDLoss. */
#include "golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One side of the whole batch. */
typedef struct side {
    float *logits;
    int64_t *labels, *ids;
    xd_token_span *spans;
    int64_t length, width;
    bool skip_eos;
} side;

typedef struct batch {
    golden_case *c;
    side student, teacher;
    int64_t rows;
    int64_t *matched[2]; /* student, teacher */
    int64_t matched_count;
    float *gradient;
    double sum, last_matched, last_unmatched;
} batch;

static bool uld_claims(const golden_case *c) {
    return golden_origin_has(c, "::ULDLoss");
}

static void side_open(golden_case *c, const char *name, side *s) {
    char key[64];
    snprintf(key, sizeof key, "in.%s_logits", name);
    const golden_array logits = golden_tensor(c, key);
    snprintf(key, sizeof key, "in.%s_labels", name);
    const golden_array labels = golden_tensor(c, key);
    snprintf(key, sizeof key, "in.%s_input_ids", name);
    const golden_array ids = golden_tensor(c, key);
    snprintf(key, sizeof key, "in.%s_byte_offsets", name);
    const golden_array offsets = golden_tensor(c, key);
    s->logits = golden_f32(c, &logits);
    s->labels = golden_i64(c, &labels);
    s->ids = golden_i64(c, &ids);
    s->length = logits.shape[1];
    s->width = logits.shape[2];
    s->spans = (xd_token_span *)golden_memory(c, (size_t)(ids.count + 1) * sizeof *s->spans);
    for (int64_t i = 0; i < ids.count; i++) {
        s->spans[i].begin = (int64_t)offsets.values[2 * i];
        s->spans[i].end = (int64_t)offsets.values[2 * i + 1];
    }
    snprintf(key, sizeof key, "cfg.uld_skip_%s_eos", name);
    s->skip_eos = golden_flag(c, key, true);
}

static void batch_open(golden_case *c, batch *b) {
    const golden_array logits = golden_tensor(c, "in.student_logits");
    golden_array pairs;
    memset(&pairs, 0, sizeof pairs);
    if (golden_has(c, "in.matched_teacher_student")) pairs = golden_tensor(c, "in.matched_teacher_student");
    memset(b, 0, sizeof *b);
    b->c = c;
    b->rows = logits.shape[0];
    side_open(c, "student", &b->student);
    side_open(c, "teacher", &b->teacher);
    b->matched_count = golden_flag(c, "cfg.uld_use_hybrid_loss", false) ? pairs.shape[0] : 0;
    for (int i = 0; i < 2; i++) {
        b->matched[i] = (int64_t *)golden_memory(c, (size_t)(pairs.count + 1) * sizeof(int64_t));
        for (int64_t k = 0; k < b->matched_count; k++)
            b->matched[i][k] = (int64_t)pairs.values[2 * k + 1 - i];
    }
    b->gradient = (float *)golden_memory(c, (size_t)(logits.count + 1) * sizeof *b->gradient);
}

static xdi_uld_trl_side trl_side(const side *s, int64_t row) {
    const xdi_uld_trl_side trl = { s->labels + row * s->length, s->spans + row * s->length, s->length,
                                   s->skip_eos };
    return trl;
}

static xd_uld_side uld_side(const side *s, int64_t row, double temperature) {
    const xd_uld_side out = { { s->logits + row * s->length * s->width, XD_DTYPE_F32, s->length, s->width,
                                0 },
                              s->width,
                              s->ids + row * s->length,
                              temperature };
    return out;
}

static void uld_row(batch *b, int64_t row) {
    static const char *const strategies[] = { "observed", "bayesian", NULL };
    golden_case *c = b->c;
    xdi_uld_trl_desc trl = { trl_side(&b->student, row), trl_side(&b->teacher, row),
                             golden_flag(c, "cfg.use_extended_uld", true), XD_ULD_OBSERVED };
    const double all = (double)(b->teacher.width > 1 ? b->teacher.width : 1);
    xd_alignment chunks = { NULL, 0 };
    xd_uld_values values;
    xd_uld_desc d;
    memset(&d, 0, sizeof d);
    d.merge =
        golden_choice(c, "cfg.uld_token_merge_strategy", strategies, 0) ? XD_ULD_BAYESIAN : XD_ULD_OBSERVED;
    trl.merge = d.merge;
    if (!golden_ok(c, xdi_compat_uld_chunks(golden_ctx(c), &trl, &chunks))) return;
    d.student = uld_side(&b->student, row, golden_number(c, "cfg.uld_student_temperature", 1.0));
    d.teacher = uld_side(&b->teacher, row, golden_number(c, "cfg.uld_teacher_temperature", 1.0));
    d.chunks = chunks.chunks;
    d.chunk_count = chunks.count;
    d.matched_student = b->matched[0];
    d.matched_teacher = b->matched[1];
    d.matched_count = b->matched_count;
    d.matched_weight = golden_number(c, "cfg.uld_hybrid_matched_weight", (double)b->matched_count / all);
    d.unmatched_weight = golden_number(c, "cfg.uld_hybrid_unmatched_weight", 1.0 - d.matched_weight);
    d.beta = golden_number(c, "cfg.beta", 0.5);
    d.scale = golden_number(c, "cfg.uld_distillation_weight", 1.0) / (double)b->rows;
    d.gradient = d.student.logits;
    d.gradient.data = b->gradient + row * b->student.length * b->student.width;
    golden_loans *l = golden_case_loans(c);
    d.student.logits = golden_rows_in(l, d.student.logits);
    d.teacher.logits = golden_rows_in(l, d.teacher.logits);
    d.gradient = golden_rows_out(l, d.gradient);
    if (golden_ok(c, golden_back(l, xd_uld_loss(golden_ctx(c), &d, &values)))) {
        b->sum += values.loss;
        if (values.chunks > 0) b->last_matched = values.matched, b->last_unmatched = values.unmatched;
    }
    xd_alignment_destroy(golden_ctx(c), &chunks);
}

/* The next-token cross entropy that is part of the loss, by xd_loss; adds value and gradient. */
static void add_cross_entropy(batch *b, double weight) {
    golden_case *c = b->c;
    const int64_t count = b->rows * b->student.length;
    int64_t *labels = (int64_t *)golden_memory(c, (size_t)(count + 1) * sizeof *labels);
    float *gradient = (float *)golden_memory(c, (size_t)(count * b->student.width + 1) * sizeof *gradient);
    xd_vocab *vocab = NULL;
    xd_loss_desc d;
    xd_loss_values values;
    for (int64_t i = 0; i < count; i++)
        labels[i] = (i + 1) % b->student.length ? b->student.labels[i + 1] : XD_IGNORE_INDEX;
    memset(&d, 0, sizeof d);
    const xd_rows x = { b->student.logits, XD_DTYPE_F32, count, b->student.width, 0 };
    const xd_rows g = { gradient, XD_DTYPE_F32, count, b->student.width, 0 };
    if (!golden_ok(c, vocab_even(golden_ctx(c), NULL, x.cols, &vocab))) return;
    d.student = x;
    d.common.gradient = g;
    d.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d.vocab = vocab;
    d.hard_weight = weight;
    if (golden_ok(c, golden_loss(golden_case_loans(c), &d, &values))) {
        /* Without a label the peer's mean is 0 / 0. */
        b->sum += golden_case_loans(c)->nothing_counted ? (double)NAN : values.loss;
        for (int64_t i = 0; i < count * x.cols; i++) b->gradient[i] += gradient[i];
    }
    xd_vocab_destroy(vocab);
}

static void uld_run(golden_case *c) {
    const double ce = golden_number(c, "cfg.uld_crossentropy_weight", 0.0);
    batch b;
    batch_open(c, &b);
    for (int64_t row = 0; row < b.rows; row++) uld_row(&b, row);
    if (ce != 0.0) add_cross_entropy(&b, ce);
    const int64_t count = b.rows * b.student.length * b.student.width;
    golden_close(c, "out.loss", &b.sum, 1);
    golden_gradient(c, "grad.student_logits", golden_widen(c, b.gradient, XD_DTYPE_F32, count), count);
    golden_close(c, "out.last_matched_loss", &b.last_matched, 1);
    golden_close(c, "out.last_unmatched_loss", &b.last_unmatched, 1);
}

const golden_kind golden_kinds_uld[] = {
    { "universal logit distillation", uld_claims, uld_run },
    { NULL, NULL, NULL },
};
