#include "sharded.h"
#include "softmax_calls.h"

#include <stdlib.h>
#include <string.h>

typedef struct sharded_job {
    int tp, cp;
    int64_t sequences, length, width;
    sharded_body body;
    void *user;
    bool nothing_counted[SHARDED_RANKS];
} sharded_job;

static xd_result sharded_positions(xd_ctx *ctx, const sharded_job *job, int rank, int64_t *positions,
                                   int64_t *held) {
    if (job->length % (2 * job->cp) == 0) {
        *held = job->length / job->cp;
        return xd_load_balanced_positions(ctx, job->length, rank, job->cp, positions);
    }
    const int64_t first = job->length * rank / job->cp;
    *held = job->length * (rank + 1) / job->cp - first;
    for (int64_t i = 0; i < *held; i++) positions[i] = first + i;
    return XD_OK;
}

static xd_result sharded_rank(xd_comm *world, void *argument) {
    sharded_job *job = (sharded_job *)argument;
    const int cp_rank = xd_comm_rank(world) / job->tp, tp_rank = xd_comm_rank(world) % job->tp;
    xd_comm *tp = NULL, *cp = NULL;
    golden_device *device = NULL;
    golden_loans loans;
    sharded_part part;
    int64_t held = 0;
    memset(&part, 0, sizeof part);
    part.rank = xd_comm_rank(world);
    part.ctx = xd_comm_ctx(world);
    part.loans = &loans;
    golden_loans_open(&loans, part.ctx);
    part.width = job->width;
    int64_t *row = (int64_t *)malloc((size_t)((job->sequences + 1) * (job->length + 1)) * sizeof *row);
    int64_t *positions = (int64_t *)malloc((size_t)(job->length + 1) * sizeof *positions);
    xd_result result = row && positions ? XD_OK : XD_ERROR_MEMORY;
    if (result == XD_OK) result = golden_device_open(part.ctx, &device);
    if (result == XD_OK) result = xd_comm_split(world, cp_rank, tp_rank, &tp);
    if (result == XD_OK) result = xd_comm_split(world, tp_rank, cp_rank, &cp);
    if (result == XD_OK) result = vocab_even(part.ctx, tp, job->width, &part.vocab);
    if (result == XD_OK) result = sharded_positions(part.ctx, job, cp_rank, positions, &held);
    if (result == XD_OK) {
        for (int64_t b = 0; b < job->sequences; b++)
            for (int64_t i = 0; i < held; i++) row[part.rows++] = b * job->length + positions[i];
        part.cp = cp;
        part.info = xd_vocab_describe(part.vocab);
        part.row = row;
        result = job->body(&part, job->user);
    }
    free(row);
    free(positions);
    xd_vocab_destroy(part.vocab);
    xd_comm_destroy(tp);
    xd_comm_destroy(cp);
    job->nothing_counted[part.rank] = loans.nothing_counted;
    golden_back(&loans, XD_ERROR_STATE); /* what a failed body still has lent */
    golden_device_close(device);
    return result;
}

bool sharded_run(golden_case *c, int64_t sequences, int64_t length, int64_t width, sharded_body body,
                 void *user) {
    sharded_job job;
    xd_error error;
    memset(&job, 0, sizeof job);
    job.tp = golden_integer(c, "cfg.tp", 1, 1, SHARDED_RANKS);
    job.cp = golden_integer(c, "cfg.cp", 1, 1, SHARDED_RANKS / job.tp);
    job.sequences = sequences;
    job.length = length;
    job.width = width;
    job.body = body;
    job.user = user;
    memset(&error, 0, sizeof error);
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.cpu = xd_ctx_settings(golden_ctx(c))->cpu;
    desc.reduction = xd_ctx_settings(golden_ctx(c))->reduction;
    const xd_result result = xd_run_threads(job.tp * job.cp, &desc, sharded_rank, &job, &error);
    for (int r = 0; r < job.tp * job.cp; r++)
        if (job.nothing_counted[r]) golden_case_loans(c)->nothing_counted = true;
    if (result != XD_OK) golden_fail(c, "%s: %s", xd_result_name(result), error.message);
    return result == XD_OK;
}

float *sharded_columns(const sharded_part *part, const float *whole) {
    const int64_t columns = part->info.end - part->info.begin;
    float *mine = (float *)malloc((size_t)(part->rows * columns + 1) * sizeof *mine);
    for (int64_t r = 0; r < part->rows; r++)
        for (int64_t i = 0; i < columns; i++)
            mine[r * columns + i] = whole[part->row[r] * part->width + part->info.begin + i];
    return mine;
}

float *sharded_f32(const sharded_part *part, const float *whole, int64_t n) {
    float *mine = (float *)malloc((size_t)(part->rows * n + 1) * sizeof *mine);
    for (int64_t i = 0; i < part->rows * n; i++) mine[i] = whole[part->row[i / n] * n + i % n];
    return mine;
}

int64_t *sharded_i64(const sharded_part *part, const int64_t *whole, int64_t n) {
    int64_t *mine = (int64_t *)malloc((size_t)(part->rows * n + 1) * sizeof *mine);
    for (int64_t i = 0; i < part->rows * n; i++) mine[i] = whole[part->row[i / n] * n + i % n];
    return mine;
}

void sharded_put_columns(const sharded_part *part, const float *mine, double *whole) {
    const int64_t columns = part->info.end - part->info.begin;
    for (int64_t r = 0; r < part->rows; r++)
        for (int64_t i = 0; i < columns; i++)
            whole[part->row[r] * part->width + part->info.begin + i] = (double)mine[r * columns + i];
}

/* The ranks of one vocabulary have the same results; they write in turn, so that every rank is compared. */
void sharded_put(const sharded_part *part, const double *mine, int64_t n, double *whole) {
    for (int64_t i = 0; i < part->rows * n; i++)
        if (part->row[i / n] % part->info.ranks == part->info.rank)
            whole[part->row[i / n] * n + i % n] = mine[i];
}

int sharded_ranks(golden_case *c) {
    const int tp = golden_integer(c, "cfg.tp", 1, 1, SHARDED_RANKS);
    return tp * golden_integer(c, "cfg.cp", 1, 1, SHARDED_RANKS / tp);
}

double *sharded_values(golden_case *c) {
    return (double *)golden_memory(c, (size_t)sharded_ranks(c) * sizeof(double));
}

void sharded_close_values(golden_case *c, const char *name, const double *values) {
    for (int r = 0; r < sharded_ranks(c); r++) golden_close(c, name, &values[r], 1);
}

xd_rows golden_rows(float *data, int64_t rows, int64_t cols) {
    xd_rows r;
    r.data = data;
    r.dtype = XD_DTYPE_F32;
    r.rows = rows;
    r.cols = cols;
    r.stride = 0;
    return r;
}

xd_rows sharded_rows(const sharded_part *part, float *data) {
    return golden_rows(data, part->rows, part->info.end - part->info.begin);
}

float *sharded_mask(golden_case *c, int64_t sequences, int64_t length, bool next) {
    const golden_array token = golden_tensor(c, "in.token_mask"), sample = golden_tensor(c, "in.sample_mask");
    float *mask = (float *)golden_memory(c, (size_t)(sequences * length + 1) * sizeof *mask);
    if (token.count != sequences * length || sample.count != sequences) {
        golden_fail(c, "masks of %lld and %lld entries", (long long)token.count, (long long)sample.count);
        return mask;
    }
    for (int64_t b = 0; b < sequences; b++)
        for (int64_t t = 0; t < length; t++) {
            const int64_t from = t + (next ? 1 : 0);
            if (from < length)
                mask[b * length + t] = (float)(token.values[b * length + from] * sample.values[b]);
        }
    return mask;
}

double sharded_denominator(golden_case *c, const float *mask, int64_t count) {
    double sum = 0.0;
    if (golden_has(c, "in.global_valid_toks"))
        return golden_tensor(c, "in.global_valid_toks").values[0] + 1e-8;
    for (int64_t i = 0; i < count; i++) sum += (double)mask[i];
    return sum + 1e-8;
}

double *sharded_without_last(golden_case *c, const double *whole, int64_t sequences, int64_t length,
                             int64_t n) {
    double *out = (double *)golden_memory(c, (size_t)(sequences * length * n + 1) * sizeof *out);
    const int64_t kept = (length - 1) * n;
    for (int64_t b = 0; b < sequences; b++)
        memcpy(out + b * kept, whole + b * length * n, (size_t)kept * sizeof *out);
    return out;
}

/* ---- NeMo-RL top-k distillation ---- */

typedef struct topk_distill {
    int64_t sequences, length, width, k;
    float *student, *values, *mask;
    int64_t *ids;
    double denominator, beta;
    xd_divergence divergence;
    xd_topk_mode mode;
    double *gradient, *log_probs, *entropy; /* whole results */
    double *loss;                           /* of each rank */
} topk_distill;

bool topk_distill_claims(const golden_case *c) {
    return golden_origin_has(c, "get_distillation_topk_logprobs_from_logits");
}

static void topk_distill_desc(const topk_distill *job, const sharded_part *part, xd_topk_desc *d) {
    memset(d, 0, sizeof *d);
    d->vocab = part->vocab;
    d->k = job->k;
    d->values_kind = XD_TOPK_LOGITS;
    d->mode = job->mode;
    d->divergence = job->divergence;
    d->beta = job->beta;
    d->common.denominator_value = job->denominator;
    d->common.comm = part->cp;
}

/* sum p ln p of the student's rows: minus the cross entropy of a distribution with itself. */
static xd_result topk_distill_entropy(const sharded_part *part, xd_rows student, double *entropy) {
    xd_loss_desc d;
    xd_loss_values values;
    float *row_loss = (float *)calloc((size_t)part->rows + 1, sizeof *row_loss);
    memset(&d, 0, sizeof d);
    d.student = d.teacher = student;
    d.vocab = part->vocab;
    d.divergence = XD_SOFT_CE;
    d.soft_weight = 1.0;
    d.common.denominator_value = 1.0;
    d.common.row_loss = row_loss;
    const xd_result result = golden_loss(part->loans, &d, &values);
    for (int64_t r = 0; r < part->rows; r++) entropy[r] = -(double)row_loss[r];
    free(row_loss);
    return result;
}

static xd_result topk_distill_body(const sharded_part *part, void *user) {
    topk_distill *job = (topk_distill *)user;
    float *student = sharded_columns(part, job->student), *gradient = sharded_columns(part, job->student);
    float *values = sharded_f32(part, job->values, job->k), *mask = sharded_f32(part, job->mask, 1);
    int64_t *ids = sharded_i64(part, job->ids, job->k);
    float *log_probs = (float *)calloc((size_t)(part->rows * job->k + 1), sizeof *log_probs);
    double *wide = (double *)calloc((size_t)(part->rows * job->k + 1), sizeof *wide);
    double *entropy = (double *)calloc((size_t)part->rows + 1, sizeof *entropy);
    xd_loss_values loss;
    xd_topk_desc d;
    topk_distill_desc(job, part, &d);
    d.student = sharded_rows(part, student);
    d.common.gradient = sharded_rows(part, gradient);
    d.ids = xd_ids_of(ids, XD_DTYPE_I64);
    d.values = values;
    d.common.row_weight = mask;
    xd_result result = golden_topk_loss(part->loans, &d, &loss);
    if (result == XD_OK) job->loss[part->rank] = loss.loss;
    sharded_put_columns(part, gradient, job->gradient);
    d.common.gradient.data = NULL; /* log-probabilities of every row, masked ones too */
    d.common.row_weight = NULL;
    d.student_log_probs = log_probs;
    if (result == XD_OK) result = golden_topk_loss(part->loans, &d, &loss);
    if (result == XD_OK) result = topk_distill_entropy(part, d.student, entropy);
    for (int64_t i = 0; i < part->rows * job->k; i++) wide[i] = (double)log_probs[i];
    sharded_put(part, wide, job->k, job->log_probs);
    sharded_put(part, entropy, 1, job->entropy);
    free(student);
    free(gradient);
    free(values);
    free(mask);
    free(ids);
    free(log_probs);
    free(wide);
    free(entropy);
    return result;
}

/* The teacher renormalised over its k ids is the log-softmax over a vocabulary of k. */
static void topk_distill_teacher(golden_case *c, topk_distill *job) {
    const int64_t rows = job->sequences * job->length;
    float *out = (float *)golden_memory(c, (size_t)(rows * job->k + 1) * sizeof *out);
    xd_vocab *vocab = NULL;
    if (!golden_wants(c, "out.teacher_topk_logprobs")) return;
    if (!golden_ok(c, vocab_even(golden_ctx(c), NULL, job->k, &vocab))) return;
    golden_loans *l = golden_case_loans(c);
    const xd_rows values = golden_rows_in(l, golden_rows(job->values, rows, job->k));
    const xd_rows there = golden_rows_out(l, golden_rows(out, rows, job->k));
    if (golden_ok(c, golden_back(l, softmax_all(golden_ctx(c), vocab, values, 1.0, there)))) {
        const double *wide = golden_widen(c, out, XD_DTYPE_F32, rows * job->k);
        golden_close(c, "out.teacher_topk_logprobs",
                     sharded_without_last(c, wide, job->sequences, job->length, job->k),
                     job->sequences * (job->length - 1) * job->k);
    }
    xd_vocab_destroy(vocab);
}

static void topk_distill_compare(golden_case *c, const topk_distill *job) {
    const int64_t kept = job->sequences * (job->length - 1);
    sharded_close_values(c, "out.loss", job->loss);
    golden_gradient(c, "grad.student_logits", job->gradient, job->sequences * job->length * job->width);
    golden_close(c, "out.student_topk_logprobs",
                 sharded_without_last(c, job->log_probs, job->sequences, job->length, job->k), kept * job->k);
    golden_close(c, "out.H_all", sharded_without_last(c, job->entropy, job->sequences, job->length, 1), kept);
}

/* Every position but the last of each sequence: the peer's mean without a mask. */
static float *topk_distill_unmasked(golden_case *c, int64_t sequences, int64_t length) {
    float *mask = (float *)golden_memory(c, (size_t)(sequences * length + 1) * sizeof *mask);
    for (int64_t i = 0; i < sequences * length; i++) mask[i] = i % length + 1 < length ? 1.0f : 0.0f;
    return mask;
}

static void topk_distill_settings(golden_case *c, topk_distill *job) {
    static const char *const types[] = { "forward", "reverse", "mixed", NULL };
    static const xd_divergence divergences[] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_KL_MIXED };
    if (golden_flag(c, "cfg.masked", true)) {
        job->mask = sharded_mask(c, job->sequences, job->length, true);
        job->denominator = sharded_denominator(c, job->mask, job->sequences * job->length);
    } else {
        job->mask = topk_distill_unmasked(c, job->sequences, job->length);
        job->denominator = (double)(job->sequences * (job->length - 1));
    }
    golden_only(c, "cfg.k", (double)job->k);
    job->mode = golden_flag(c, "cfg.zero_outside_topk", false) ? XD_TOPK_ZERO_OUTSIDE : XD_TOPK_RENORMALISE;
    job->beta = 1.0 - golden_number(c, "cfg.mixed_kl_weight", 0.5); /* the peer weighs the forward part */
    job->divergence = divergences[golden_choice(c, "cfg.kl_type", types, 2)];
    if (job->divergence == XD_KL_MIXED && job->beta <= 0.0) job->divergence = XD_KL_FORWARD;
    if (job->divergence != XD_KL_MIXED) job->beta = 0.0;
}

void topk_distill_run(golden_case *c) {
    const golden_array student = golden_tensor(c, "in.student_logits");
    const golden_array values = golden_tensor(c, "in.teacher_topk_logits");
    const golden_array ids = golden_tensor(c, "in.teacher_topk_indices");
    topk_distill job;
    memset(&job, 0, sizeof job);
    if (student.ndim != 3 || values.ndim != 3 || ids.count != values.count) {
        golden_fail(c, "top-k distillation wants [B, T, V] and two [B, T, k]");
        return;
    }
    job.sequences = student.shape[0];
    job.length = student.shape[1];
    job.width = student.shape[2];
    job.k = values.shape[2];
    job.student = golden_f32(c, &student);
    job.values = golden_f32(c, &values);
    job.ids = golden_i64(c, &ids);
    topk_distill_settings(c, &job);
    job.loss = sharded_values(c);
    job.gradient = (double *)golden_memory(c, (size_t)(student.count + 1) * sizeof(double));
    job.log_probs = (double *)golden_memory(c, (size_t)(values.count + 1) * sizeof(double));
    job.entropy = (double *)golden_memory(c, (size_t)(job.sequences * job.length + 1) * sizeof(double));
    if (!sharded_run(c, job.sequences, job.length, job.width, topk_distill_body, &job)) return;
    topk_distill_compare(c, &job);
    topk_distill_teacher(c, &job);
}
