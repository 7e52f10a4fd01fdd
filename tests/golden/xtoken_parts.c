/* Golden cases of the area xtoken-parts that need no second tokenizer: losses and statistics over a split
 * vocabulary. */
#include "sharded.h"
#include "softmax_calls.h"

#include <stdlib.h>
#include <string.h>

/* What most cases have: logits [B, T, V] (or [T, B, V]), and whole arrays of results. */
typedef struct parts_case {
    golden_case *c;
    int64_t sequences, length, width, rows;
    int64_t n; /* entries a row of ids, columns or k */
    float *logits, *other, *weight;
    int64_t *ids;
    double temperature, number, smoothing;
    double *columns_out, *gradient, *row_out, *values, *id_out;
    double *loss; /* of each rank */
} parts_case;

static double *parts_room(golden_case *c, int64_t count) {
    return (double *)golden_memory(c, (size_t)(count + 1) * sizeof(double));
}

static bool parts_open(golden_case *c, const char *logits, parts_case *p) {
    const golden_array a = golden_tensor(c, logits);
    memset(p, 0, sizeof *p);
    if (a.ndim != 3 || a.count == 0) {
        golden_fail(c, "%s has %d dimensions, not 3", logits, a.ndim);
        return false;
    }
    p->c = c;
    p->sequences = a.shape[0];
    p->length = a.shape[1];
    p->width = a.shape[2];
    p->rows = p->sequences * p->length;
    p->logits = golden_f32(c, &a);
    p->temperature = golden_number(c, "cfg.temperature", 1.0);
    p->columns_out = parts_room(c, a.count);
    p->gradient = parts_room(c, a.count);
    p->row_out = parts_room(c, p->rows);
    p->loss = sharded_values(c);
    return true;
}

static float *parts_f32(parts_case *p, const char *name, int64_t count) {
    const golden_array a = golden_tensor(p->c, name);
    if (a.count != count) golden_fail(p->c, "%s has %lld elements", name, (long long)a.count);
    return golden_f32(p->c, &a);
}

/* What a gradient is weighed by; zeros in a file without gradient. */
static float *parts_weight(parts_case *p, int64_t count) {
    if (golden_has(p->c, "in.weight")) return parts_f32(p, "in.weight", count);
    return (float *)golden_memory(p->c, (size_t)(count + 1) * sizeof(float));
}

static int64_t *parts_i64(parts_case *p, const char *name) {
    const golden_array a = golden_tensor(p->c, name);
    p->n = a.ndim > 0 ? a.shape[a.ndim - 1] : 0;
    return golden_i64(p->c, &a);
}

/* Ids of columns; a file without them asks for none. */
static int64_t *parts_columns(parts_case *p, const char *name) {
    if (golden_has(p->c, name)) return parts_i64(p, name);
    p->n = 0;
    return (int64_t *)golden_memory(p->c, sizeof(int64_t));
}

static bool parts_run(parts_case *p, sharded_body body) {
    return sharded_run(p->c, p->sequences, p->length, p->width, body, p);
}

/* `values` [count], to be written by a call. */
static float *floats_out(const sharded_part *part, double *room, int64_t count) {
    return (float *)golden_out(part->loans, room, (size_t)count * sizeof(float));
}

/* Converts the f32 values at the beginning of the memory to double in place, from the last one to the first. */
static void widen_in_place(double *room, int64_t count) {
    for (int64_t i = count - 1; i >= 0; i--) {
        float value;
        memcpy(&value, (const char *)room + (size_t)i * sizeof value, sizeof value);
        room[i] = (double)value;
    }
}

static int64_t *ids_out(const sharded_part *part, int64_t *ids, int64_t count) {
    return (int64_t *)golden_out(part->loans, ids, (size_t)count * sizeof *ids);
}

static const int64_t *ids_in(const sharded_part *part, const int64_t *ids, int64_t count) {
    return (const int64_t *)golden_in(part->loans, ids, (size_t)count * sizeof *ids);
}

static void to_doubles(const int64_t *ids, int64_t count, double *out) {
    for (int64_t i = 0; i < count; i++) out[i] = (double)ids[i];
}

/* ---- log-softmax, argmax, columns ---- */

static bool softmax_claims(const golden_case *c) {
    return golden_origin_has(c, "vocab_parallel_log_softmax");
}

static xd_result softmax_body(const sharded_part *part, void *user) {
    parts_case *p = (parts_case *)user;
    float *logits = sharded_columns(part, p->logits), *out = sharded_columns(part, p->logits);
    float *weight = sharded_columns(part, p->weight);
    int64_t *argmax = (int64_t *)malloc((size_t)(part->rows + 1) * sizeof *argmax);
    double *values = (double *)calloc((size_t)(part->rows * p->n + 1), sizeof *values);
    golden_loans *l = part->loans;
    const xd_rows x = sharded_rows(part, logits), y = sharded_rows(part, out), w = sharded_rows(part, weight);
    xd_result result = golden_back(
        l, softmax_all(part->ctx, part->vocab, golden_rows_in(l, x), p->temperature, golden_rows_out(l, y)));
    sharded_put_columns(part, out, p->columns_out);
    if (result == XD_OK)
        result =
            golden_back(l, softmax_all_backward(part->ctx, part->vocab, golden_rows_in(l, x), p->temperature,
                                                golden_rows_in(l, w), golden_rows_out(l, y)));
    sharded_put_columns(part, out, p->gradient);
    if (result == XD_OK)
        result = golden_back(l, softmax_columns(part->ctx, part->vocab, golden_rows_in(l, x),
                                                xd_ids_of(ids_in(part, p->ids, p->n), XD_DTYPE_I64), p->n, 0,
                                                floats_out(part, values, part->rows * p->n)));
    widen_in_place(values, part->rows * p->n);
    sharded_put(part, values, p->n, p->values);
    if (result == XD_OK)
        result = golden_back(l, softmax_row_stats(part->ctx, part->vocab, golden_rows_in(l, x),
                                                  p->temperature, NULL, ids_out(part, argmax, part->rows)));
    if (result == XD_OK) to_doubles(argmax, part->rows, values);
    sharded_put(part, values, 1, p->row_out);
    free(logits);
    free(out);
    free(weight);
    free(argmax);
    free(values);
    return result;
}

static void softmax_run(golden_case *c) {
    parts_case p;
    if (!parts_open(c, "in.logits", &p)) return;
    p.weight = parts_weight(&p, p.rows * p.width);
    p.ids = parts_columns(&p, "in.columns");
    p.values = parts_room(c, p.rows * p.n);
    if (!parts_run(&p, softmax_body)) return;
    golden_close(c, "out.log_softmax", p.columns_out, p.rows * p.width);
    golden_gradient(c, "grad.logits", p.gradient, p.rows * p.width);
    golden_gradient(c, "grad.logits_full_gather_summed", p.gradient, p.rows * p.width);
    golden_exact(c, "out.argmax_lowest", p.row_out, p.rows);
    golden_inert(c, "out.argmax"); /* the peer's choice among equals; argmax_lowest is ours */
    golden_close(c, "out.columns", p.values, p.rows * p.n);
}

/* ---- top-k over the vocabulary, logits at ids ---- */

static bool topk_claims(const golden_case *c) {
    return golden_origin_has(c, "distributed_vocab_topk");
}

static xd_result topk_body(const sharded_part *part, void *user) {
    parts_case *p = (parts_case *)user;
    const int64_t k = (int64_t)p->number, room = part->rows * (k > p->n ? k : p->n) + 1;
    float *logits = sharded_columns(part, p->logits);
    int64_t *ids = sharded_i64(part, p->ids, p->n), *best = (int64_t *)malloc((size_t)room * sizeof *best);
    double *values = (double *)calloc((size_t)room, sizeof *values);
    const xd_rows x = sharded_rows(part, logits);
    golden_loans *l = part->loans;
    xd_result result = golden_back(l, xd_vocab_topk(part->ctx, part->vocab, golden_rows_in(l, x), k,
                                                    floats_out(part, values, part->rows * k),
                                                    ids_out(part, best, part->rows * k)));
    widen_in_place(values, part->rows * k);
    sharded_put(part, values, k, p->columns_out);
    if (result == XD_OK) to_doubles(best, part->rows * k, values);
    sharded_put(part, values, k, p->id_out);
    if (result == XD_OK)
        result = golden_back(l, softmax_columns(part->ctx, part->vocab, golden_rows_in(l, x),
                                                xd_ids_of(ids_in(part, ids, part->rows * p->n), XD_DTYPE_I64),
                                                p->n, p->n, floats_out(part, values, part->rows * p->n)));
    widen_in_place(values, part->rows * p->n);
    sharded_put(part, values, p->n, p->values);
    free(logits);
    free(ids);
    free(best);
    free(values);
    return result;
}

static void topk_run(golden_case *c) {
    parts_case p;
    if (!parts_open(c, "in.logits", &p)) return;
    p.ids = parts_columns(&p, "in.global_indices");
    p.number = (double)golden_integer(c, "cfg.k", 1, 1, 1 << 30);
    if (p.number > (double)p.width) p.number = (double)p.width; /* the peer returns as many as there are */
    p.id_out = parts_room(c, p.rows * p.width);
    p.values = parts_room(c, p.rows * p.n);
    if (!parts_run(&p, topk_body)) return;
    golden_close(c, "out.topk_values", p.columns_out, p.rows * (int64_t)p.number);
    golden_exact(c, "out.topk_indices", p.id_out, p.rows * (int64_t)p.number);
    golden_close(c, "out.gathered", p.values, p.rows * p.n);
}

/* ---- columns worth keeping ---- */

static bool select_claims(const golden_case *c) {
    return golden_origin_has(c, "select_teacher_topk_indices");
}

static void select_run(golden_case *c) {
    parts_case p;
    xd_vocab *vocab = NULL;
    if (!parts_open(c, "in.teacher_logits", &p)) return;
    const int64_t asked = golden_integer(c, "cfg.k", 1, 1, 1 << 30), k = asked < p.width ? asked : p.width;
    int64_t *ids = (int64_t *)golden_memory(c, (size_t)(k + 1) * sizeof *ids);
    float *importance = (float *)golden_memory(c, (size_t)p.width * sizeof *importance);
    double *wide = parts_room(c, k);
    golden_loans *l = golden_case_loans(c);
    if (!golden_ok(c, vocab_even(golden_ctx(c), NULL, p.width, &vocab))) return;
    const xd_rows x = golden_rows_in(l, golden_rows(p.logits, p.rows, p.width));
    int64_t *ids_there = (int64_t *)golden_out(l, ids, (size_t)k * sizeof *ids);
    float *importance_there = (float *)golden_out(l, importance, (size_t)p.width * sizeof *importance);
    const xd_vocab_topk_desc d = vocab_topk_desc(vocab, x, 1, k);
    if (golden_ok(c, golden_back(l, vocab_topk_columns(golden_ctx(c), &d, ids_there, importance_there)))) {
        to_doubles(ids, k, wide);
        golden_exact(c, "out.indices", wide, k);
        golden_exact(c, "out.importance", golden_widen(c, importance, XD_DTYPE_F32, p.width), p.width);
    }
    xd_vocab_destroy(vocab);
}

/* ---- log-probabilities of the next token ---- */

static bool logprobs_claims(const golden_case *c) {
    return golden_origin_has(c, "from_parallel_logits_to_logprobs");
}

static xd_result logprobs_body(const sharded_part *part, void *user) {
    parts_case *p = (parts_case *)user;
    float *logits = sharded_columns(part, p->logits), *weight = sharded_f32(part, p->weight, 1);
    int64_t *labels = sharded_i64(part, p->ids, 1);
    double *values = (double *)calloc((size_t)part->rows + 1, sizeof *values);
    const xd_rows x = sharded_rows(part, logits);
    golden_loans *l = part->loans;
    xd_result result =
        golden_back(l, softmax_at_ids(part->ctx, part->vocab, golden_rows_in(l, x), 1.0,
                                      xd_ids_of(ids_in(part, labels, part->rows), XD_DTYPE_I64),
                                      floats_out(part, values, part->rows)));
    widen_in_place(values, part->rows);
    sharded_put(part, values, 1, p->row_out);
    const xd_rows over = golden_rows_out(l, x); /* the gradient is written over the logits */
    const float *weight_there = (const float *)golden_in(l, weight, (size_t)part->rows * sizeof *weight);
    if (result == XD_OK)
        result =
            golden_back(l, softmax_at_ids_backward(part->ctx, part->vocab, over, 1.0,
                                                   xd_ids_of(ids_in(part, labels, part->rows), XD_DTYPE_I64),
                                                   weight_there, over));
    sharded_put_columns(part, logits, p->gradient);
    free(logits);
    free(weight);
    free(labels);
    free(values);
    return result;
}

/* labels [B, T] of whole sequences; `fill` at the last position and where the mask is 0. */
static int64_t *whole_labels(parts_case *p, const uint8_t *mask) {
    int64_t *positions = (int64_t *)golden_memory(p->c, (size_t)(p->length + 1) * sizeof *positions);
    int64_t *labels = (int64_t *)golden_memory(p->c, (size_t)(p->rows + 1) * sizeof *labels);
    xd_shift_desc d;
    memset(&d, 0, sizeof d);
    d.sequences = p->sequences;
    d.length = d.held = p->length;
    d.positions = positions;
    d.ids = xd_ids_of(parts_i64(p, "in.input_ids"), XD_DTYPE_I64);
    d.mask = mask;
    golden_ok(p->c, xd_load_balanced_positions(golden_ctx(p->c), p->length, 0, 1, positions));
    golden_ok(p->c, xd_next_token_labels(golden_ctx(p->c), &d, labels));
    return labels;
}

/* weight [B, T-1] with a 0 after each sequence. */
static float *with_last(parts_case *p, const float *weight) {
    float *out = (float *)golden_memory(p->c, (size_t)(p->rows + 1) * sizeof *out);
    for (int64_t b = 0; b < p->sequences; b++)
        for (int64_t t = 0; t + 1 < p->length; t++) out[b * p->length + t] = weight[b * (p->length - 1) + t];
    return out;
}

static void logprobs_run(golden_case *c) {
    parts_case p;
    if (!parts_open(c, "in.logits", &p)) return;
    const int64_t kept = p.sequences * (p.length - 1);
    p.ids = whole_labels(&p, NULL);
    p.weight = with_last(&p, parts_weight(&p, kept));
    if (!parts_run(&p, logprobs_body)) return;
    golden_close(c, "out.logprobs", sharded_without_last(c, p.row_out, p.sequences, p.length, 1), kept);
    golden_inert(c, "cfg.chunk_size");                /* positions that the peer takes at a time */
    if (!golden_flag(c, "cfg.inference_only", false)) /* the peer then keeps nothing for a gradient */
        golden_gradient(c, "grad.logits", p.gradient, p.rows * p.width);
}

/* ---- cross entropy: next token, Megatron's, soft targets ---- */

/* Row losses of all rows, and the weighted loss with its gradient. */
static xd_result ce_body(const sharded_part *part, void *user) {
    parts_case *p = (parts_case *)user;
    float *logits = sharded_columns(part, p->logits),
          *other = p->other ? sharded_columns(part, p->other) : NULL;
    float *weight = sharded_f32(part, p->weight, 1);
    float *row_loss = (float *)calloc((size_t)part->rows + 1, sizeof *row_loss);
    double *wide = (double *)calloc((size_t)part->rows + 1, sizeof *wide);
    int64_t *labels = p->ids ? sharded_i64(part, p->ids, 1) : NULL;
    xd_loss_desc d;
    xd_loss_values values;
    memset(&d, 0, sizeof d);
    d.student = sharded_rows(part, logits);
    if (other) d.teacher = sharded_rows(part, other);
    d.divergence = XD_SOFT_CE;
    d.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d.hard_weight = labels ? 1.0 : 0.0;
    d.soft_weight = other ? 1.0 : 0.0;
    d.vocab = part->vocab;
    d.label_smoothing = p->smoothing;
    d.smoothing = XD_SMOOTHING_MEGATRON;
    d.common.denominator_value = p->number;
    d.common.comm = part->cp;
    d.common.row_loss = row_loss;
    xd_result result = golden_loss(part->loans, &d, &values);
    for (int64_t r = 0; r < part->rows; r++) wide[r] = (double)row_loss[r];
    sharded_put(part, wide, 1, p->row_out);
    d.common.row_weight = weight;
    d.common.gradient = d.student;
    if (result == XD_OK) result = golden_loss(part->loans, &d, &values);
    if (result == XD_OK) p->loss[part->rank] = values.loss;
    sharded_put_columns(part, logits, p->gradient);
    free(logits);
    free(other);
    free(weight);
    free(row_loss);
    free(wide);
    free(labels);
    return result;
}

static bool next_token_claims(const golden_case *c) {
    return golden_origin_has(c, "student_next_token_ce");
}

static void next_token_accuracy(parts_case *p, const float *mask) {
    xd_vocab *vocab = NULL;
    double accuracy = 0.0;
    xd_positions positions;
    memset(&positions, 0, sizeof positions);
    positions.count = p->rows;
    positions.labels = xd_ids_of(p->ids, XD_DTYPE_I64);
    positions.weights = mask;
    if (!golden_ok(p->c, vocab_even(golden_ctx(p->c), NULL, p->width, &vocab))) return;
    if (golden_ok(p->c, golden_accuracy(golden_case_loans(p->c), vocab,
                                        golden_rows(p->logits, p->rows, p->width), &positions, &accuracy)))
        golden_within(p->c, "out.accuracy", &accuracy, 1, 1e-6);
    xd_vocab_destroy(vocab);
}

static void next_token_run(golden_case *c) {
    parts_case p;
    if (!parts_open(c, "in.logits", &p)) return;
    const int64_t kept = p.sequences * (p.length - 1);
    p.ids = whole_labels(&p, NULL);
    p.weight = sharded_mask(c, p.sequences, p.length, true);
    p.number = sharded_denominator(c, p.weight, p.rows);
    if (!parts_run(&p, ce_body)) return;
    sharded_close_values(c, "out.loss", p.loss);
    golden_close(c, "out.per_token_ce", sharded_without_last(c, p.row_out, p.sequences, p.length, 1), kept);
    golden_gradient(c, "grad.logits", p.gradient, p.rows * p.width);
    golden_exact(
        c, "out.label_mask",
        sharded_without_last(c, golden_widen(c, p.weight, XD_DTYPE_F32, p.rows), p.sequences, p.length, 1),
        kept);
    next_token_accuracy(&p, p.weight);
}

static bool megatron_claims(const golden_case *c) {
    return golden_origin_has(c, "vocab_parallel_cross_entropy");
}

static void megatron_run(golden_case *c) {
    parts_case p;
    if (!parts_open(c, "in.logits", &p)) return;
    p.ids = parts_i64(&p, "in.target");
    p.weight = parts_weight(&p, p.rows);
    p.number = 1.0;
    p.smoothing = golden_number(c, "cfg.label_smoothing", 0.0);
    if (!parts_run(&p, ce_body)) return;
    golden_close(c, "out.loss_per_token", p.row_out, p.rows);
    golden_gradient(c, "grad.logits", p.gradient, p.rows * p.width);
}

static bool soft_ce_claims(const golden_case *c) {
    return golden_origin_has(c, "DistributedCrossEntropy");
}

static void soft_ce_run(golden_case *c) {
    parts_case p;
    if (!parts_open(c, "in.student_logits", &p)) return;
    p.other = parts_f32(&p, "in.target_logits", p.rows * p.width);
    p.weight = parts_weight(&p, p.rows);
    p.number = 1.0;
    if (!parts_run(&p, ce_body)) return;
    golden_close(c, "out.cross_entropy", p.row_out, p.rows);
    golden_gradient(c, "grad.student_logits", p.gradient, p.rows * p.width);
}

const golden_kind golden_kinds_xtoken_parts[] = {
    { "softmax", softmax_claims, softmax_run },
    { "vocabulary top-k", topk_claims, topk_run },
    { "selected columns", select_claims, select_run },
    { "log-probabilities", logprobs_claims, logprobs_run },
    { "next-token cross entropy", next_token_claims, next_token_run },
    { "Megatron cross entropy", megatron_claims, megatron_run },
    { "soft-target cross entropy", soft_ce_claims, soft_ce_run },
    { "top-k distillation", topk_distill_claims, topk_distill_run },
    { NULL, NULL, NULL }
};
