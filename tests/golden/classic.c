/* Golden cases of the area classic: losses of one rank. */
#include "sharded.h"

#include <math.h>
#include <string.h>

/* Logits [.., V] of a case as rows, the loss they go into, and its results. */
typedef struct rows_case {
    int64_t batch, rows, width;
    xd_vocab *vocab;
    float *gradient, *row_loss;
    xd_loss_desc desc;
} rows_case;

static float *rows_of(golden_case *c, const char *name, int64_t count) {
    const golden_array a = golden_tensor(c, name);
    if (a.count != count)
        golden_fail(c, "%s has %lld elements, not %lld", name, (long long)a.count, (long long)count);
    return golden_f32(c, &a);
}

static bool rows_open(golden_case *c, const char *student, rows_case *k) {
    const golden_array a = golden_tensor(c, student);
    memset(k, 0, sizeof *k);
    if (a.ndim < 2 || a.count == 0) {
        golden_fail(c, "%s is no matrix of logits", student);
        return false;
    }
    k->batch = a.shape[0];
    k->width = a.shape[a.ndim - 1];
    k->rows = a.count / k->width;
    k->gradient = (float *)golden_memory(c, (size_t)a.count * sizeof(float));
    k->row_loss = (float *)golden_memory(c, (size_t)k->rows * sizeof(float));
    k->desc.student = golden_rows(golden_f32(c, &a), k->rows, k->width);
    k->desc.common.gradient = golden_rows(k->gradient, k->rows, k->width);
    k->desc.common.row_loss = k->row_loss;
    if (!golden_ok(c, vocab_even(golden_ctx(c), NULL, k->width, &k->vocab))) return false;
    k->desc.vocab = k->vocab;
    return true;
}

static void rows_teacher(golden_case *c, rows_case *k) {
    k->desc.teacher = golden_rows(rows_of(c, "in.teacher_logits", k->rows * k->width), k->rows, k->width);
    k->desc.soft_weight = 1.0;
}

static int64_t *rows_labels(golden_case *c, const rows_case *k) {
    const golden_array a = golden_tensor(c, "in.labels");
    if (a.count != k->rows)
        golden_fail(c, "%lld labels for %lld rows", (long long)a.count, (long long)k->rows);
    return golden_i64(c, &a);
}

/* Runs the loss and compares value and gradient; the value is [rows] where the file has one per row. */
static void rows_compare(golden_case *c, rows_case *k, const char *gradient) {
    const int64_t count = golden_result_count(c, "out.loss");
    xd_loss_values values;
    if (golden_ok(c, golden_loss(golden_case_loans(c), &k->desc, &values))) {
        if (count <= 1)
            golden_close(c, "out.loss", &values.loss, 1);
        else
            golden_close(c, "out.loss", golden_widen(c, k->row_loss, XD_DTYPE_F32, k->rows), k->rows);
        golden_gradient(c, gradient, golden_widen(c, k->gradient, XD_DTYPE_F32, k->rows * k->width),
                        k->rows * k->width);
    }
}

/* cfg.reduction; `none` is one value a row, or an element. */
typedef enum reduction { REDUCTION_MEAN, REDUCTION_SUM, REDUCTION_BATCHMEAN, REDUCTION_NONE } reduction;

static reduction reduction_of(golden_case *c, reduction absent) {
    static const char *const names[] = { "mean", "sum", "batchmean", "none", NULL };
    return (reduction)golden_choice(c, "cfg.reduction", names, (int)absent);
}

static xdi_compat_reduction compat_reduction(reduction r) {
    if (r == REDUCTION_SUM) return XDI_COMPAT_SUM;
    return r == REDUCTION_MEAN ? XDI_COMPAT_MEAN : XDI_COMPAT_BATCHMEAN;
}

static void set_beta(double beta, xd_divergence *divergence, double *out) {
    *divergence = beta == 0.0 ? XD_KL_FORWARD : beta == 1.0 ? XD_KL_REVERSE : XD_JSD;
    *out = beta;
}

/* Counted positions by the library's own denominator. */
static int64_t counted_positions(golden_case *c, xd_ids labels, int64_t count, int64_t ignore_index) {
    xd_positions positions;
    xd_denominator denominator;
    memset(&positions, 0, sizeof positions);
    positions.count = count;
    positions.labels = labels;
    positions.has_ignore_index = true;
    positions.ignore_index = ignore_index;
    memset(&denominator, 0, sizeof denominator);
    golden_ok(c, golden_denominator(golden_case_loans(c), &positions, &denominator));
    return denominator.positions;
}

/* ---- cross entropy ---- */

static bool ce_claims(const golden_case *c) {
    return golden_origin_has(c, "torch.nn.functional.cross_entropy");
}

static void ce_run(golden_case *c) {
    rows_case k;
    if (!rows_open(c, "in.logits", &k)) return;
    k.desc.common.labels = xd_ids_of(rows_labels(c, &k), XD_DTYPE_I64);
    k.desc.hard_weight = 1.0;
    k.desc.common.has_ignore_index = true;
    k.desc.common.ignore_index = (int64_t)golden_number(c, "cfg.ignore_index", XD_IGNORE_INDEX);
    k.desc.label_smoothing = golden_number(c, "cfg.label_smoothing", 0.0);
    const reduction r = reduction_of(c, REDUCTION_MEAN);
    if (r == REDUCTION_BATCHMEAN) golden_fail(c, "cfg.reduction = batchmean: cross entropy has none");
    if (r != REDUCTION_MEAN) k.desc.common.denominator_value = 1.0;
    rows_compare(c, &k, "grad.logits");
    xd_vocab_destroy(k.vocab);
}

/* ---- masked KL ---- */

static bool kl_claims(const golden_case *c) {
    return golden_origin_has(c, "torch.nn.functional.kl_div");
}

static void kl_run(golden_case *c) {
    rows_case k;
    xd_positions positions;
    xd_denominator denominator;
    xd_loss_values values;
    if (!rows_open(c, "in.student_logits", &k)) return;
    rows_teacher(c, &k);
    memset(&positions, 0, sizeof positions);
    positions.count = k.rows;
    positions.weights = rows_of(c, "in.mask", k.rows);
    k.desc.common.row_weight = positions.weights;
    k.desc.common.denominator = &denominator;
    k.desc.temperature = golden_number(c, "cfg.temperature", 1.0);
    k.desc.divergence = golden_flag(c, "cfg.reverse", false) ? XD_KL_REVERSE : XD_KL_FORWARD;
    if (golden_ok(c, golden_denominator(golden_case_loans(c), &positions, &denominator)))
        rows_compare(c, &k, "grad.student_logits");
    k.desc.common.row_weight = NULL; /* per_token has neither mask nor tau^2 */
    k.desc.temperature_factor = XD_TEMPERATURE_FACTOR_ONE;
    if (golden_ok(c, golden_loss(golden_case_loans(c), &k.desc, &values)))
        golden_close(c, "out.per_token", golden_widen(c, k.row_loss, XD_DTYPE_F32, k.rows), k.rows);
    xd_vocab_destroy(k.vocab);
}

/* ---- TRL generalised JSD ---- */

static bool jsd_claims(const golden_case *c) {
    return golden_origin_has(c, "generalized_jsd_loss");
}

static bool jsd_probabilities_claims(const golden_case *c) {
    return jsd_claims(c) && golden_is(c, "cfg.logits_are_probs", "true");
}

static void jsd_probabilities(golden_case *c, rows_case *k, double beta) {
    double loss = 0.0;
    golden_loans *l = golden_case_loans(c);
    const xd_rows student = golden_rows_in(l, k->desc.student), teacher = golden_rows_in(l, k->desc.teacher);
    const xd_rows gradient = golden_rows_out(l, k->desc.common.gradient);
    const xd_result result = xdi_compat_jsd_of_probabilities(
        golden_ctx(c), student, teacher, beta, k->desc.common.denominator_value, gradient, &loss);
    if (!golden_ok(c, golden_back(l, result))) return;
    golden_close(c, "out.loss", &loss, 1);
    golden_gradient(c, "grad.student_logits", golden_widen(c, k->gradient, XD_DTYPE_F32, k->rows * k->width),
                    k->rows * k->width);
}

static void jsd_run(golden_case *c) {
    const double beta = golden_number(c, "cfg.beta", 0.5);
    const bool labels = golden_flag(c, "cfg.labels", false);
    rows_case k;
    const reduction r = reduction_of(c, REDUCTION_BATCHMEAN);
    if (r == REDUCTION_NONE) {
        golden_skip(c, "not built: divergence of each entry, unsummed");
        return;
    }
    if (!rows_open(c, "in.student_logits", &k)) return;
    rows_teacher(c, &k);
    if (labels) k.desc.common.labels = xd_ids_of(rows_labels(c, &k), XD_DTYPE_I64);
    k.desc.soft_weight = 1.0;
    k.desc.temperature = golden_number(c, "cfg.temperature", 1.0);
    k.desc.temperature_factor = XD_TEMPERATURE_FACTOR_ONE;
    k.desc.common.denominator_value = golden_number(c, "cfg.num_items_in_batch", 0.0);
    if (k.desc.common.denominator_value == 0.0)
        k.desc.common.denominator_value = xdi_compat_jsd_denominator(
            compat_reduction(r), k.batch, counted_positions(c, k.desc.common.labels, k.rows, XD_IGNORE_INDEX),
            k.width, labels);
    set_beta(beta, &k.desc.divergence, &k.desc.beta);
    if (golden_flag(c, "cfg.logits_are_probs", false))
        jsd_probabilities(c, &k, beta);
    else
        rows_compare(c, &k, "grad.student_logits");
    xd_vocab_destroy(k.vocab);
}

/* ---- Model-Optimizer ---- */

static bool modelopt_claims(const golden_case *c) {
    return golden_origin_has(c, "LogitsDistillationLoss");
}

static void modelopt_run(golden_case *c) {
    rows_case k;
    if (!rows_open(c, "in.student_logits", &k)) return;
    rows_teacher(c, &k);
    k.desc.temperature = golden_number(c, "cfg.temperature", 1.0);
    const reduction r = reduction_of(c, REDUCTION_BATCHMEAN);
    k.desc.common.denominator_value =
        r == REDUCTION_NONE ? 1.0 : xdi_compat_modelopt_denominator(compat_reduction(r), k.rows, k.width);
    rows_compare(c, &k, "grad.student_logits");
    xd_vocab_destroy(k.vocab);
}

static bool mft_claims(const golden_case *c) {
    return golden_origin_has(c, "MFTLoss");
}

static void mft_run(golden_case *c) {
    rows_case k;
    mft_desc d;
    xd_loss_values values;
    if (!rows_open(c, "in.student_logits", &k)) return;
    const reduction r = reduction_of(c, REDUCTION_MEAN);
    const bool none = r == REDUCTION_NONE;
    const int64_t count = k.rows * k.width;
    float *terms = (float *)golden_memory(c, (size_t)(count + 1) * sizeof *terms);
    rows_teacher(c, &k);
    memset(&d, 0, sizeof d);
    d.loss = k.desc;
    d.loss.common.labels = xd_ids_of(rows_labels(c, &k), XD_DTYPE_I64);
    d.loss.temperature = golden_number(c, "cfg.temperature", 1.0);
    d.loss.common.denominator_value =
        none ? 1.0 : xdi_compat_modelopt_denominator(compat_reduction(r), k.rows, k.width);
    d.threshold = golden_number(c, "cfg.threshold", 0.2);
    d.terms = golden_rows(terms, k.rows, k.width);
    if (golden_ok(c, golden_mft_loss(golden_case_loans(c), &d, &values))) {
        if (none)
            golden_close(c, "out.loss", golden_widen(c, terms, XD_DTYPE_F32, count), count);
        else
            golden_close(c, "out.loss", &values.loss, 1);
        golden_gradient(c, "grad.student_logits", golden_widen(c, k.gradient, XD_DTYPE_F32, count), count);
    }
    xd_vocab_destroy(k.vocab);
}

/* ---- cosine ---- */

static bool cosine_claims(const golden_case *c) {
    return golden_origin_has(c, "LigerFusedLinearCosineSimilarityFunction.distillation_loss_fn");
}

static void cosine_run(golden_case *c) {
    rows_case k;
    xd_loss_values values;
    if (!rows_open(c, "in.student_logits", &k)) return;
    rows_teacher(c, &k);
    k.desc.soft_weight = golden_number(c, "cfg.beta", 1.0);
    k.desc.common.denominator_value = 1.0;
    if (golden_ok(c, golden_cosine_loss(golden_case_loans(c), &k.desc, &values))) {
        golden_close(c, "out.loss", &values.loss, 1);
        golden_gradient(c, "grad.student_logits", golden_widen(c, k.gradient, XD_DTYPE_F32, k.rows * k.width),
                        k.rows * k.width);
    }
    xd_vocab_destroy(k.vocab);
}

/* ---- KL estimators ---- */

static bool estimator_claims(const golden_case *c) {
    return golden_origin_has(c, "::calculate_kl");
}

static void estimator_run(golden_case *c) {
    static const char *const names[] = { "k1", "k2", "k3", NULL };
    static const xd_kl_estimator kinds[] = { XD_KL_K1, XD_KL_K2, XD_KL_K3 };
    const golden_array logprobs = golden_tensor(c, "in.logprobs"),
                       other = golden_tensor(c, "in.logprobs_reference");
    const size_t bytes = (size_t)(logprobs.count + 1) * sizeof(float);
    float *values = (float *)golden_memory(c, bytes), *gradient = (float *)golden_memory(c, bytes);
    xd_kl_estimate_desc d;
    double sum = 0.0;
    memset(&d, 0, sizeof d);
    golden_loans *l = golden_case_loans(c);
    d.logprobs = (const float *)golden_in(l, golden_f32(c, &logprobs), bytes - sizeof(float));
    d.reference = (const float *)golden_in(l, golden_f32(c, &other), bytes - sizeof(float));
    d.count = logprobs.count;
    d.kind = kinds[golden_choice(c, "cfg.kl_type", names, 2)];
    d.input_clamp = golden_number(c, "cfg.input_clamp", (double)INFINITY);
    d.output_clamp = golden_number(c, "cfg.output_clamp", 0.0);
    d.values = (float *)golden_out(l, values, bytes);
    d.gradient = (float *)golden_out(l, gradient, bytes);
    if (!golden_ok(c, golden_back(l, xd_kl_estimate(golden_ctx(c), &d, &sum)))) return;
    golden_close(c, "out.loss", &sum, 1);
    golden_close(c, "out.per_token", golden_widen(c, values, XD_DTYPE_F32, d.count), d.count);
    golden_gradient(c, "grad.logprobs", golden_widen(c, gradient, XD_DTYPE_F32, d.count), d.count);
}

/* ---- soft-target cross entropy ---- */

static bool soft_claims(const golden_case *c) {
    return golden_origin_has(c, "DraftCrossEntropyLossFn");
}

static void soft_run(golden_case *c) {
    rows_case k;
    if (!rows_open(c, "in.student_logits", &k)) return;
    rows_teacher(c, &k);
    float *mask = sharded_mask(c, k.batch, k.rows / k.batch, false);
    k.desc.divergence = XD_SOFT_CE;
    k.desc.common.row_weight = mask;
    k.desc.common.denominator_value = sharded_denominator(c, mask, k.rows);
    rows_compare(c, &k, "grad.student_logits");
    xd_vocab_destroy(k.vocab);
}

/* ---- TRL top-k: support of the student, or shipped by a server ---- */

static bool support_claims(const golden_case *c) {
    return golden_origin_has(c, "compute_topk_self_distillation_loss") ||
           golden_origin_has(c, "_compute_server_forward_kl_loss");
}

static void support_of_server(golden_case *c, const rows_case *k, xd_topk_desc *d) {
    const golden_array ids = golden_tensor(c, "in.teacher_topk_ids");
    const int64_t *labels = rows_labels(c, k);
    const int64_t counted = counted_positions(c, xd_ids_of(labels, XD_DTYPE_I64), k->rows, XD_IGNORE_INDEX);
    d->k = ids.shape[ids.ndim > 0 ? ids.ndim - 1 : 0];
    golden_only(c, "cfg.k", (double)d->k);
    d->ids = xd_ids_of(golden_i64(c, &ids), XD_DTYPE_I64);
    d->values = rows_of(c, "in.teacher_topk_logprobs", k->rows * d->k);
    d->common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d->common.denominator_value = counted > 0 ? (double)counted : 1.0;
}

static void support_run(golden_case *c) {
    rows_case k;
    xd_topk_desc d;
    xd_loss_values values;
    if (!rows_open(c, "in.student_logits", &k)) return;
    memset(&d, 0, sizeof d);
    d.student = k.desc.student;
    d.common.gradient = k.desc.common.gradient;
    d.vocab = k.vocab;
    d.mode = golden_flag(c, "cfg.add_tail", false) ? XD_TOPK_TAIL : XD_TOPK_RENORMALISE;
    d.common.row_loss = k.row_loss;
    d.common.denominator_value = 1.0;
    if (golden_has(c, "in.teacher_topk_ids")) {
        support_of_server(c, &k, &d);
    } else {
        rows_teacher(c, &k);
        d.teacher = k.desc.teacher;
        d.k = (int64_t)golden_number(c, "cfg.topk", 1.0);
        set_beta(golden_number(c, "cfg.alpha", 0.5), &d.divergence, &d.beta);
    }
    if (golden_ok(c, golden_topk_loss(golden_case_loans(c), &d, &values))) {
        golden_close(c, "out.loss", &values.loss, 1);
        golden_gradient(c, "grad.student_logits", golden_widen(c, k.gradient, XD_DTYPE_F32, k.rows * k.width),
                        k.rows * k.width);
        if (golden_wants(c, "out.per_token"))
            golden_close(c, "out.per_token", golden_widen(c, k.row_loss, XD_DTYPE_F32, k.rows), k.rows);
    }
    xd_vocab_destroy(k.vocab);
}

/* ---- cases of later parts of the library ---- */

static const char *const classic_later[][2] = {
    { "ULDLoss", "not built: universal logit distillation" },
    { "Liger", "not built: fused linear losses" },
};

static const char *later_reason(const golden_case *c) {
    for (size_t i = 0; i < sizeof classic_later / sizeof classic_later[0]; i++)
        if (golden_origin_has(c, classic_later[i][0])) return classic_later[i][1];
    return NULL;
}

static bool later_claims(const golden_case *c) {
    return later_reason(c) != NULL;
}

static void later_run(golden_case *c) {
    golden_skip(c, later_reason(c));
}

const golden_kind golden_kinds_classic[] = { { "cross entropy", ce_claims, ce_run },
                                             { "masked KL", kl_claims, kl_run },
                                             { "JSD of probabilities", jsd_probabilities_claims, jsd_run },
                                             { "generalised JSD", jsd_claims, jsd_run },
                                             { "logits distillation", modelopt_claims, modelopt_run },
                                             { "minimal fine-tuning", mft_claims, mft_run },
                                             { "cosine", cosine_claims, cosine_run },
                                             { "KL estimator", estimator_claims, estimator_run },
                                             { "top-k distillation", topk_distill_claims, topk_distill_run },
                                             { "soft-target cross entropy", soft_claims, soft_run },
                                             { "top-k support", support_claims, support_run },
                                             { "later", later_claims, later_run },
                                             { NULL, NULL, NULL } };
