/* Golden cases of the area xtoken-parts: softmax pieces, log-probabilities, losses and layouts that the peers ran sharded.
 * Each case runs on cfg.tp x cfg.cp threads: equal slabs of the vocabulary over tp, positions in the load-balanced order
 * over cp. What is split is put together before it is compared; what every rank has is compared on every rank. */
#include "golden.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NAME = 64 };

/* The peers divide by the counted positions plus this. */
#define COUNT_EPS 1e-8

#define TRY(call)                                       \
    do {                                                \
        const xd_result try_result = (call);            \
        if (try_result != XD_OK) return try_result;     \
    } while (0)

/* ---- ranks ---- */

typedef struct piece piece;

/* One case over tp x cp ranks. Ranks read it and write to places of their own in what `kind` points to. */
typedef struct job {
    golden_case *c; /* of the main thread: ranks may not use it */
    int tp, cp;
    int64_t batch, length, vocabulary;
    size_t piece_bytes; /* memory of one rank */
    unsigned char *memory;
    xd_result (*run)(piece *p);
    void *kind; /* the inputs and outputs that `run` knows */
} job;

/* What one rank is and holds: rows [batch, held] of its positions, columns [begin, begin + columns). */
struct piece {
    const job *job;
    xd_ctx *ctx;
    xd_comm *tp, *cp;
    int tp_rank, cp_rank;
    xd_mesh *mesh;
    xd_vocab *vocab;
    xd_arena arena;
    int64_t begin, columns, held, rows;
    int64_t *positions; /* [held] */
};

static void *piece_take(piece *p, int64_t count, size_t size) {
    return xd_arena_take_pointer(&p->arena, (size_t)(count > 0 ? count : 1) * size);
}

static xd_result piece_open(piece *p, xd_comm *world) {
    const job *j = p->job;
    xd_mesh_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.axes[0].name = "cp";
    desc.axes[0].size = j->cp;
    desc.axes[1].name = "tp";
    desc.axes[1].size = j->tp;
    TRY(xd_mesh_create(world, &desc, &p->mesh));
    TRY(xd_mesh_group(p->mesh, "tp", &p->tp));
    TRY(xd_mesh_group(p->mesh, "cp", &p->cp));
    TRY(xd_mesh_coordinate(p->mesh, "tp", &p->tp_rank));
    TRY(xd_mesh_coordinate(p->mesh, "cp", &p->cp_rank));
    TRY(xd_vocab_create_even(p->ctx, p->tp, j->vocabulary, &p->vocab));
    const xd_vocab_info info = xd_vocab_describe(p->vocab);
    p->begin = info.begin;
    p->columns = info.end - info.begin;
    p->held = j->length / j->cp;
    p->rows = j->batch * p->held;
    p->positions = (int64_t *)piece_take(p, p->held, sizeof *p->positions);
    return xd_load_balanced_positions(p->ctx, j->length, p->cp_rank, j->cp, p->positions);
}

static xd_result piece_main(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    piece p;
    memset(&p, 0, sizeof p);
    p.job = j;
    p.ctx = xd_comm_ctx(world);
    p.arena = xd_arena_over(j->memory + (size_t)xd_comm_rank(world) * j->piece_bytes, j->piece_bytes);
    xd_result result = piece_open(&p, world);
    if (result == XD_OK) result = j->run(&p);
    xd_vocab_destroy(p.vocab);
    xd_mesh_destroy(p.mesh);
    return result;
}

/* Sizes and ranks of a case over [batch, length, vocabulary]. `words`: 8-byte words a rank takes for one position. */
static bool job_open(golden_case *c, job *j, const golden_array *logits, int64_t words) {
    memset(j, 0, sizeof *j);
    j->c = c;
    j->tp = (int)golden_number(c, "cfg.tp", 1.0);
    j->cp = (int)golden_number(c, "cfg.cp", 1.0);
    if (logits->ndim != 3 || j->tp < 1 || j->cp < 1) {
        golden_fail(c, "logits of %d dimensions on %d x %d ranks", logits->ndim, j->tp, j->cp);
        return false;
    }
    j->batch = logits->shape[0];
    j->length = logits->shape[1];
    j->vocabulary = logits->shape[2];
    j->piece_bytes = ((size_t)(j->batch * j->length + j->length + 1) * (size_t)words) * 8 + 64 * XD_ARENA_ALIGNMENT;
    j->piece_bytes -= j->piece_bytes % XD_ARENA_ALIGNMENT;
    return true;
}

static bool job_run(job *j, xd_result (*run)(piece *p), void *kind) {
    xd_error error;
    j->run = run;
    j->kind = kind;
    j->memory = (unsigned char *)golden_memory(j->c, j->piece_bytes * (size_t)(j->tp * j->cp));
    const xd_result result = xd_run_threads(j->tp * j->cp, NULL, piece_main, j, &error);
    if (result != XD_OK)
        golden_fail(j->c, "rank %d: %s: %s", error.rank, xd_result_name(result), error.message);
    return result == XD_OK;
}

/* Room for `copies` results of [batch, length, n]; one copy for each rank of tp, or one that the ranks share. */
static double *job_values(const job *j, int copies, int64_t n) {
    return (double *)golden_memory(j->c, (size_t)(copies * j->batch * j->length * n) * sizeof(double));
}

/* This rank's positions of whole[batch, length], elements of `size` bytes. */
static void *piece_cut(piece *p, const void *whole, size_t size) {
    unsigned char *cut = (unsigned char *)piece_take(p, p->rows, size);
    for (int64_t r = 0; r < p->rows; r++) {
        const int64_t at = r / p->held * p->job->length + p->positions[r % p->held];
        memcpy(cut + (size_t)r * size, (const unsigned char *)whole + (size_t)at * size, size);
    }
    return cut;
}

/* A matrix for this rank's rows and columns. */
static xd_rows piece_rows(piece *p) {
    xd_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.data = piece_take(p, p->rows * p->columns, sizeof(float));
    rows.dtype = XD_DTYPE_F32;
    rows.rows = p->rows;
    rows.cols = p->columns;
    return rows;
}

/* This rank's rows and columns of whole[batch, length, vocabulary]. */
static xd_rows piece_slab(piece *p, const golden_array *whole) {
    const xd_rows rows = piece_rows(p);
    float *to = (float *)rows.data;
    for (int64_t r = 0; r < p->rows; r++) {
        const int64_t at = r / p->held * p->job->length + p->positions[r % p->held];
        for (int64_t i = 0; i < p->columns; i++)
            to[r * p->columns + i] = (float)whole->values[at * p->job->vocabulary + p->begin + i];
    }
    return rows;
}

/* Puts a slab where it belongs in whole[batch, length, vocabulary]. */
static void piece_join(const piece *p, const xd_rows *slab, double *whole) {
    for (int64_t r = 0; r < p->rows; r++) {
        const int64_t at = r / p->held * p->job->length + p->positions[r % p->held];
        for (int64_t i = 0; i < p->columns; i++)
            whole[at * p->job->vocabulary + p->begin + i] = xd_load_f64(slab->data, slab->dtype, r * p->columns + i);
    }
}

/* Puts values[rows, n] into this tp rank's copy of copies[tp, batch, kept, n]; positions from `kept` on are dropped. */
static void piece_publish(const piece *p, const double *values, int64_t n, int64_t kept, double *copies) {
    double *copy = copies + p->tp_rank * p->job->batch * kept * n;
    for (int64_t r = 0; r < p->rows; r++) {
        const int64_t position = p->positions[r % p->held];
        if (position < kept)
            memcpy(copy + (r / p->held * kept + position) * n, values + r * n, (size_t)n * sizeof *values);
    }
}

static double *piece_widen(piece *p, const void *values, xd_dtype dtype, int64_t count) {
    double *wide = (double *)piece_take(p, count, sizeof *wide);
    for (int64_t i = 0; i < count; i++) wide[i] = xd_load_f64(values, dtype, i);
    return wide;
}

/* The next token of each held position, XD_IGNORE_INDEX where there is none or its mask is 0. */
static xd_result piece_labels(piece *p, const int64_t *ids, const uint8_t *mask, int64_t **labels) {
    xd_shift_desc shift;
    memset(&shift, 0, sizeof shift);
    shift.sequences = p->job->batch;
    shift.length = p->job->length;
    shift.positions = p->positions;
    shift.held = p->held;
    shift.ids = (const int64_t *)piece_cut(p, ids, sizeof *ids);
    shift.mask = mask ? (const uint8_t *)piece_cut(p, mask, 1) : NULL;
    shift.comm = p->cp;
    *labels = (int64_t *)piece_take(p, p->rows, sizeof **labels);
    return xd_next_token_labels(p->ctx, &shift, *labels);
}

/* A batch without counted positions gives 0 in the peers; every other finding is a failure. */
static xd_result piece_status(const piece *p, const xd_status *status) {
    xd_status other = *status;
    other.nothing_counted = 0;
    return xd_status_check(p->ctx, &other);
}

typedef void (*comparison)(golden_case *c, const char *name, const double *got, int64_t count);

/* Compares each copy with the file's tensor. */
static void compare_copies(const job *j, const char *name, const double *copies, int number, int64_t count,
                           comparison compare) {
    for (int i = 0; i < number; i++) compare(j->c, name, copies + i * count, count);
}

/* ---- masks and weights as the files give them ---- */

/* [B, T - 1] as [B, T]: zero for the last position, which predicts nothing. */
static float *pad_positions(golden_case *c, const golden_array *a, int64_t length) {
    const int64_t batch = a->shape[0], kept = a->shape[1];
    float *padded = (float *)golden_memory(c, (size_t)(batch * length) * sizeof *padded);
    for (int64_t i = 0; i < a->count && kept <= length; i++)
        padded[i / kept * length + i % kept] = (float)a->values[i];
    return padded;
}

/* Token mask of samples that count, and the weight of each position's sample. */
static uint8_t *count_mask(golden_case *c, const golden_array *token_mask, const golden_array *sample_mask) {
    uint8_t *mask = golden_u8(c, token_mask);
    for (int64_t i = 0; i < token_mask->count; i++)
        if (sample_mask->values[i * sample_mask->count / token_mask->count] == 0.0) mask[i] = 0;
    return mask;
}

static float *sample_weights(golden_case *c, const golden_array *sample_mask, int64_t length) {
    float *weights = (float *)golden_memory(c, (size_t)(sample_mask->count * length) * sizeof *weights);
    for (int64_t i = 0; i < sample_mask->count * length; i++) weights[i] = (float)sample_mask->values[i / length];
    return weights;
}

/* ---- log-softmax, argmax, columns ---- */

typedef struct softmax_kind {
    golden_array logits, weight;
    int64_t *columns, column_count;
    double temperature;
    double *log_softmax, *gradient; /* whole */
    double *argmax, *picked;        /* a copy for each rank of tp */
} softmax_kind;

static bool softmax_claims(const golden_case *c) {
    return golden_origin_has(c, "vocab_parallel_log_softmax");
}

static xd_result softmax_piece(piece *p) {
    const softmax_kind *k = (const softmax_kind *)p->job->kind;
    const int64_t length = p->job->length;
    const xd_rows logits = piece_slab(p, &k->logits), weight = piece_slab(p, &k->weight), out = piece_rows(p);
    int64_t *argmax = (int64_t *)piece_take(p, p->rows, sizeof *argmax);
    double *picked = (double *)piece_take(p, p->rows * k->column_count, sizeof *picked);
    TRY(xd_log_softmax(p->ctx, p->vocab, logits, k->temperature, out));
    piece_join(p, &out, k->log_softmax);
    TRY(xd_log_softmax_backward(p->ctx, p->vocab, logits, k->temperature, weight, out));
    piece_join(p, &out, k->gradient);
    TRY(xd_row_stats(p->ctx, p->vocab, logits, k->temperature, NULL, argmax));
    piece_publish(p, piece_widen(p, argmax, XD_DTYPE_I64, p->rows), 1, length, k->argmax);
    TRY(xd_gather_columns(p->ctx, p->vocab, logits, k->columns, k->column_count, 0, picked));
    piece_publish(p, picked, k->column_count, length, k->picked);
    return XD_OK;
}

static void softmax_run(golden_case *c) {
    job j;
    softmax_kind k;
    k.logits = golden_tensor(c, "in.logits");
    k.weight = golden_tensor(c, "in.weight");
    const golden_array columns = golden_tensor(c, "in.columns");
    k.columns = golden_i64(c, &columns);
    k.column_count = columns.count;
    k.temperature = golden_number(c, "cfg.temperature", 1.0);
    if (!job_open(c, &j, &k.logits, 4 * k.logits.shape[2] + 2 * columns.count + 8)) return;
    k.log_softmax = job_values(&j, 1, j.vocabulary);
    k.gradient = job_values(&j, 1, j.vocabulary);
    k.argmax = job_values(&j, j.tp, 1);
    k.picked = job_values(&j, j.tp, columns.count);
    if (!job_run(&j, softmax_piece, &k)) return;
    const int64_t rows = j.batch * j.length;
    golden_close(c, "out.log_softmax", k.log_softmax, rows * j.vocabulary);
    golden_gradient(c, "grad.logits", k.gradient, rows * j.vocabulary);
    golden_gradient(c, "grad.logits_full_gather_summed", k.gradient, rows * j.vocabulary);
    compare_copies(&j, "out.argmax_lowest", k.argmax, j.tp, rows, golden_exact);
    compare_copies(&j, "out.columns", k.picked, j.tp, rows * columns.count, golden_exact);
}

/* ---- largest logits ---- */

typedef struct largest_kind {
    golden_array logits;
    int64_t *asked, asked_count, k;
    double *values, *ids, *gathered; /* a copy for each rank of tp */
} largest_kind;

static bool largest_claims(const golden_case *c) {
    return golden_origin_has(c, "distributed_vocab_topk");
}

static xd_result largest_piece(piece *p) {
    const largest_kind *k = (const largest_kind *)p->job->kind;
    const int64_t length = p->job->length, n = k->asked_count;
    const xd_rows logits = piece_slab(p, &k->logits);
    double *values = (double *)piece_take(p, p->rows * k->k, sizeof *values);
    int64_t *ids = (int64_t *)piece_take(p, p->rows * k->k, sizeof *ids);
    double *gathered = (double *)piece_take(p, p->rows * n, sizeof *gathered);
    const int64_t *asked = (const int64_t *)piece_cut(p, k->asked, (size_t)n * sizeof *asked);
    TRY(xd_vocab_topk(p->ctx, p->vocab, logits, k->k, values, ids));
    piece_publish(p, values, k->k, length, k->values);
    piece_publish(p, piece_widen(p, ids, XD_DTYPE_I64, p->rows * k->k), k->k, length, k->ids);
    TRY(xd_gather_columns(p->ctx, p->vocab, logits, asked, n, n, gathered));
    piece_publish(p, gathered, n, length, k->gathered);
    return XD_OK;
}

/* Among equal logits the peer's choice is arbitrary and ours the lowest id: an id of an equal logit is as good. */
static void largest_settle_ties(golden_case *c, const largest_kind *k, int copies) {
    const golden_array expected = golden_tensor(c, "out.topk_indices");
    const int64_t vocabulary = k->logits.shape[2];
    for (int64_t i = 0; i < copies * expected.count; i++) {
        const int64_t at = i % expected.count, row = at / k->k * vocabulary;
        const double theirs = expected.values[at];
        if (k->logits.values[row + (int64_t)k->ids[i]] == k->logits.values[row + (int64_t)theirs]) k->ids[i] = theirs;
    }
}

static void largest_run(golden_case *c) {
    job j;
    largest_kind k;
    k.logits = golden_tensor(c, "in.logits");
    const golden_array asked = golden_tensor(c, "in.global_indices"), values = golden_tensor(c, "out.topk_values");
    k.asked = golden_i64(c, &asked);
    k.asked_count = asked.ndim == 3 ? asked.shape[2] : 0;
    k.k = values.ndim == 3 ? values.shape[2] : 0; /* cfg.k, or the vocabulary when that is smaller */
    if (!job_open(c, &j, &k.logits, k.logits.shape[2] + 3 * k.k + 2 * k.asked_count + 4)) return;
    k.values = job_values(&j, j.tp, k.k);
    k.ids = job_values(&j, j.tp, k.k);
    k.gathered = job_values(&j, j.tp, k.asked_count);
    if (!job_run(&j, largest_piece, &k)) return;
    const int64_t rows = j.batch * j.length;
    largest_settle_ties(c, &k, j.tp);
    compare_copies(&j, "out.topk_values", k.values, j.tp, rows * k.k, golden_exact);
    compare_copies(&j, "out.topk_indices", k.ids, j.tp, rows * k.k, golden_exact);
    compare_copies(&j, "out.gathered", k.gathered, j.tp, rows * k.asked_count, golden_exact);
}

/* ---- columns that matter to a teacher ---- */

typedef struct columns_kind {
    golden_array logits;
    int64_t k;
    double *ids;        /* [ranks, k] */
    double *importance; /* [cp, V] */
} columns_kind;

static bool columns_claims(const golden_case *c) {
    return golden_origin_has(c, "select_teacher_topk_indices");
}

static xd_result columns_piece(piece *p) {
    const columns_kind *k = (const columns_kind *)p->job->kind;
    const xd_rows logits = piece_slab(p, &k->logits);
    const int rank = p->cp_rank * p->job->tp + p->tp_rank;
    int64_t *ids = (int64_t *)piece_take(p, k->k, sizeof *ids);
    float *importance = (float *)piece_take(p, p->columns, sizeof *importance);
    TRY(xd_select_columns(p->ctx, p->vocab, logits, NULL, p->cp, k->k, ids, importance));
    for (int64_t i = 0; i < k->k; i++) k->ids[rank * k->k + i] = (double)ids[i];
    for (int64_t i = 0; i < p->columns; i++)
        k->importance[p->cp_rank * p->job->vocabulary + p->begin + i] = (double)importance[i];
    return XD_OK;
}

static void columns_run(golden_case *c) {
    job j;
    columns_kind k;
    k.logits = golden_tensor(c, "in.teacher_logits");
    k.k = golden_tensor(c, "out.indices").count; /* cfg.k, or the vocabulary when that is smaller */
    if (!job_open(c, &j, &k.logits, 2 * k.logits.shape[2] + k.k + 4)) return;
    k.ids = (double *)golden_memory(c, (size_t)(j.tp * j.cp * k.k) * sizeof *k.ids);
    k.importance = (double *)golden_memory(c, (size_t)(j.cp * j.vocabulary) * sizeof *k.importance);
    if (!job_run(&j, columns_piece, &k)) return;
    compare_copies(&j, "out.indices", k.ids, j.tp * j.cp, k.k, golden_exact);
    compare_copies(&j, "out.importance", k.importance, j.cp, j.vocabulary, golden_exact);
}

/* ---- log-probabilities of the next token ---- */

typedef struct logprobs_kind {
    golden_array logits;
    int64_t *ids;  /* [B, T] */
    float *weight; /* [B, T] */
    double *log_probs; /* a copy for each rank of tp */
    double *gradient;  /* whole */
} logprobs_kind;

static bool logprobs_claims(const golden_case *c) {
    return golden_origin_has(c, "from_parallel_logits_to_logprobs");
}

static xd_result logprobs_piece(piece *p) {
    const logprobs_kind *k = (const logprobs_kind *)p->job->kind;
    const xd_rows logits = piece_slab(p, &k->logits), gradient = piece_rows(p);
    const float *weight = (const float *)piece_cut(p, k->weight, sizeof *weight);
    double *log_probs = (double *)piece_take(p, p->rows, sizeof *log_probs);
    int64_t *labels;
    TRY(piece_labels(p, k->ids, NULL, &labels));
    TRY(xd_target_log_probs(p->ctx, p->vocab, logits, 0.0, labels, log_probs));
    piece_publish(p, log_probs, 1, p->job->length - 1, k->log_probs);
    TRY(xd_target_log_probs_backward(p->ctx, p->vocab, logits, 0.0, labels, weight, gradient));
    piece_join(p, &gradient, k->gradient);
    return XD_OK;
}

static void logprobs_run(golden_case *c) {
    job j;
    logprobs_kind k;
    k.logits = golden_tensor(c, "in.logits");
    const golden_array ids = golden_tensor(c, "in.input_ids"), weight = golden_tensor(c, "in.weight");
    if (!job_open(c, &j, &k.logits, 2 * k.logits.shape[2] + 8)) return;
    k.ids = golden_i64(c, &ids);
    k.weight = pad_positions(c, &weight, j.length);
    k.log_probs = job_values(&j, j.tp, 1);
    k.gradient = job_values(&j, 1, j.vocabulary);
    if (!job_run(&j, logprobs_piece, &k)) return;
    compare_copies(&j, "out.logprobs", k.log_probs, j.tp, j.batch * (j.length - 1), golden_close);
    golden_gradient(c, "grad.logits", k.gradient, j.batch * j.length * j.vocabulary);
}

/* ---- next-token cross entropy and accuracy ---- */

typedef struct next_token_kind {
    golden_array logits;
    int64_t *ids;     /* [B, T] */
    uint8_t *mask;    /* [B, T] */
    float *weight;    /* [B, T] */
    double denominator;
    double *each, *counted;  /* per position, a copy for each rank of tp */
    double *loss, *accuracy; /* [ranks] */
    double *gradient;        /* whole */
} next_token_kind;

static bool next_token_claims(const golden_case *c) {
    return golden_origin_has(c, "student_next_token_ce");
}

/* The loss of every position, counted or not. */
static xd_result next_token_each(piece *p, const next_token_kind *k, xd_loss_desc *desc) {
    float *row_loss = (float *)piece_take(p, p->rows, sizeof *row_loss);
    xd_loss_values values;
    int64_t *labels;
    TRY(piece_labels(p, k->ids, NULL, &labels));
    desc->labels = labels;
    desc->row_loss = row_loss;
    TRY(xd_loss(p->ctx, desc, &values));
    piece_publish(p, piece_widen(p, row_loss, XD_DTYPE_F32, p->rows), 1, p->job->length - 1, k->each);
    desc->row_loss = NULL;
    return piece_status(p, desc->status);
}

static xd_result next_token_piece(piece *p) {
    const next_token_kind *k = (const next_token_kind *)p->job->kind;
    const int rank = p->cp_rank * p->job->tp + p->tp_rank;
    xd_loss_values values;
    xd_status status;
    xd_loss_desc desc;
    memset(&status, 0, sizeof status);
    memset(&desc, 0, sizeof desc);
    desc.student = piece_slab(p, &k->logits);
    desc.vocab = p->vocab;
    desc.comm = p->cp;
    desc.status = &status;
    desc.denominator_value = k->denominator;
    TRY(next_token_each(p, k, &desc));
    const float *weight = (const float *)piece_cut(p, k->weight, sizeof *weight);
    double *counted = (double *)piece_take(p, p->rows, sizeof *counted);
    int64_t *labels;
    TRY(piece_labels(p, k->ids, k->mask, &labels));
    desc.labels = labels;
    desc.row_weight = weight;
    desc.gradient = piece_rows(p);
    TRY(xd_loss(p->ctx, &desc, &values));
    TRY(piece_status(p, &status));
    TRY(xd_accuracy(p->ctx, p->vocab, desc.student, labels, XD_IGNORE_INDEX, NULL, p->cp, &k->accuracy[rank]));
    for (int64_t r = 0; r < p->rows; r++) counted[r] = labels[r] == XD_IGNORE_INDEX ? 0.0 : (double)weight[r];
    piece_publish(p, counted, 1, p->job->length - 1, k->counted);
    piece_join(p, &desc.gradient, k->gradient);
    k->loss[rank] = values.loss;
    return XD_OK;
}

static void next_token_run(golden_case *c) {
    job j;
    next_token_kind k;
    k.logits = golden_tensor(c, "in.logits");
    const golden_array ids = golden_tensor(c, "in.input_ids"), mask = golden_tensor(c, "in.token_mask"),
                       samples = golden_tensor(c, "in.sample_mask"), total = golden_tensor(c, "in.global_valid_toks");
    if (!job_open(c, &j, &k.logits, 2 * k.logits.shape[2] + 20)) return;
    k.ids = golden_i64(c, &ids);
    k.mask = count_mask(c, &mask, &samples);
    k.weight = sample_weights(c, &samples, j.length);
    k.denominator = total.values[0] + COUNT_EPS;
    k.each = job_values(&j, j.tp, 1);
    k.counted = job_values(&j, j.tp, 1);
    k.loss = (double *)golden_memory(c, (size_t)(j.tp * j.cp) * sizeof *k.loss);
    k.accuracy = (double *)golden_memory(c, (size_t)(j.tp * j.cp) * sizeof *k.accuracy);
    k.gradient = job_values(&j, 1, j.vocabulary);
    if (!job_run(&j, next_token_piece, &k)) return;
    const int64_t positions = j.batch * (j.length - 1);
    compare_copies(&j, "out.per_token_ce", k.each, j.tp, positions, golden_close);
    compare_copies(&j, "out.label_mask", k.counted, j.tp, positions, golden_exact);
    compare_copies(&j, "out.loss", k.loss, j.tp * j.cp, 1, golden_close);
    for (int i = 0; i < j.tp * j.cp; i++) golden_within(c, "out.accuracy", &k.accuracy[i], 1, 1e-6);
    golden_gradient(c, "grad.logits", k.gradient, j.batch * j.length * j.vocabulary);
}

/* ---- cross entropy of each position: hard with Megatron's smoothing, or soft ---- */

typedef struct each_kind {
    golden_array logits, teacher;
    int64_t *target; /* NULL -> soft */
    float *weight;
    double smoothing;
    double *each;     /* a copy for each rank of tp */
    double *gradient; /* whole */
} each_kind;

static bool each_claims_hard(const golden_case *c) {
    return golden_origin_has(c, "vocab_parallel_cross_entropy");
}

static bool each_claims_soft(const golden_case *c) {
    return golden_origin_has(c, "DistributedCrossEntropy");
}

static xd_result each_piece(piece *p) {
    const each_kind *k = (const each_kind *)p->job->kind;
    float *row_loss = (float *)piece_take(p, p->rows, sizeof *row_loss);
    xd_loss_values values;
    xd_loss_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.student = piece_slab(p, &k->logits);
    desc.vocab = p->vocab;
    if (k->target) {
        desc.labels = (const int64_t *)piece_cut(p, k->target, sizeof *k->target);
        desc.label_smoothing = k->smoothing;
        desc.smoothing = XD_SMOOTHING_MEGATRON;
    } else {
        desc.teacher = piece_slab(p, &k->teacher);
        desc.divergence = XD_SOFT_CE;
    }
    desc.row_weight = (const float *)piece_cut(p, k->weight, sizeof *k->weight);
    desc.denominator_value = 1.0;
    desc.comm = p->cp;
    desc.gradient = piece_rows(p);
    desc.row_loss = row_loss;
    TRY(xd_loss(p->ctx, &desc, &values));
    piece_publish(p, piece_widen(p, row_loss, XD_DTYPE_F32, p->rows), 1, p->job->length, k->each);
    piece_join(p, &desc.gradient, k->gradient);
    return XD_OK;
}

/* The first two axes are [T, B] or [B, T]: nothing here depends on which. */
static void each_run(golden_case *c, each_kind *k, const char *loss, const char *gradient) {
    job j;
    const golden_array weight = golden_tensor(c, "in.weight");
    if (!job_open(c, &j, &k->logits, 3 * k->logits.shape[2] + 8)) return;
    k->weight = golden_f32(c, &weight);
    k->each = job_values(&j, j.tp, 1);
    k->gradient = job_values(&j, 1, j.vocabulary);
    if (!job_run(&j, each_piece, k)) return;
    compare_copies(&j, loss, k->each, j.tp, j.batch * j.length, golden_close);
    golden_gradient(c, gradient, k->gradient, j.batch * j.length * j.vocabulary);
}

static void each_run_hard(golden_case *c) {
    each_kind k;
    memset(&k, 0, sizeof k);
    k.logits = golden_tensor(c, "in.logits");
    const golden_array target = golden_tensor(c, "in.target");
    k.target = golden_i64(c, &target);
    k.smoothing = golden_number(c, "cfg.label_smoothing", 0.0);
    each_run(c, &k, "out.loss_per_token", "grad.logits");
}

static void each_run_soft(golden_case *c) {
    each_kind k;
    memset(&k, 0, sizeof k);
    k.logits = golden_tensor(c, "in.student_logits");
    k.teacher = golden_tensor(c, "in.target_logits");
    each_run(c, &k, "out.cross_entropy", "grad.student_logits");
}

/* ---- distillation from a teacher's k largest logits ---- */

typedef struct topk_kind {
    golden_array logits;
    int64_t k, *ids;      /* [B, T, k] */
    float *values;        /* [B, T, k] */
    int64_t *token_mask;  /* [B, T]; also stands for the ids, which a file of this kind lacks */
    uint8_t *mask;        /* [B, T] */
    float *weight;        /* [B, T] */
    double denominator;   /* 0 -> counted */
    xd_topk_mode mode;
    xd_divergence divergence;
    double beta;
    double *log_probs; /* a copy for each rank of tp */
    double *loss;      /* [ranks] */
    double *gradient;  /* whole */
} topk_kind;

static bool topk_claims(const golden_case *c) {
    return golden_origin_has(c, "get_distillation_topk_logprobs_from_logits");
}

/* The student's log-probabilities of every position, counted or not. */
static xd_result topk_log_probs(piece *p, const topk_kind *k, xd_topk_desc *desc) {
    xd_loss_values values;
    desc->student_log_probs = (double *)piece_take(p, p->rows * k->k, sizeof(double));
    desc->denominator_value = 1.0;
    TRY(xd_topk_kl_loss(p->ctx, desc, &values));
    piece_publish(p, desc->student_log_probs, k->k, p->job->length - 1, k->log_probs);
    desc->student_log_probs = NULL;
    desc->denominator_value = 0.0;
    return piece_status(p, desc->status);
}

static xd_result topk_denominator(piece *p, const topk_kind *k, xd_topk_desc *desc, xd_denominator *denominator) {
    xd_positions positions;
    memset(&positions, 0, sizeof positions);
    positions.count = p->rows;
    positions.labels = desc->labels;
    positions.weights = desc->row_weight;
    TRY(xd_denominator_count(p->ctx, p->cp, &positions, 1, denominator));
    if (k->denominator > 0.0)
        desc->denominator_value = k->denominator;
    else
        desc->denominator = denominator;
    return XD_OK;
}

static xd_result topk_piece(piece *p) {
    const topk_kind *k = (const topk_kind *)p->job->kind;
    xd_loss_values values;
    xd_denominator denominator;
    xd_status status;
    xd_topk_desc desc;
    int64_t *labels;
    memset(&status, 0, sizeof status);
    memset(&desc, 0, sizeof desc);
    desc.student = piece_slab(p, &k->logits);
    desc.vocab = p->vocab;
    desc.k = k->k;
    desc.ids = (const int64_t *)piece_cut(p, k->ids, (size_t)k->k * sizeof *k->ids);
    desc.values = (const float *)piece_cut(p, k->values, (size_t)k->k * sizeof *k->values);
    desc.values_kind = XD_TOPK_LOGITS;
    desc.mode = k->mode;
    desc.divergence = k->divergence;
    desc.beta = k->beta;
    desc.comm = p->cp;
    desc.status = &status;
    TRY(topk_log_probs(p, k, &desc));
    TRY(piece_labels(p, k->token_mask, k->mask, &labels));
    desc.labels = labels;
    desc.row_weight = (const float *)piece_cut(p, k->weight, sizeof *k->weight);
    desc.gradient = piece_rows(p);
    TRY(topk_denominator(p, k, &desc, &denominator));
    TRY(xd_topk_kl_loss(p->ctx, &desc, &values));
    TRY(piece_status(p, &status));
    piece_join(p, &desc.gradient, k->gradient);
    k->loss[p->cp_rank * p->job->tp + p->tp_rank] = values.loss;
    return XD_OK;
}

/* cfg.mixed_kl_weight is the weight of the forward divergence, beta that of the reverse one. */
static bool topk_settings(golden_case *c, topk_kind *k) {
    k->mode = golden_flag(c, "cfg.zero_outside_topk", false) ? XD_TOPK_ZERO_OUTSIDE : XD_TOPK_RENORMALISE;
    if (golden_is(c, "cfg.kl_type", "forward")) {
        k->divergence = XD_KL_FORWARD;
    } else if (golden_is(c, "cfg.kl_type", "reverse")) {
        k->divergence = XD_KL_REVERSE;
    } else if (golden_is(c, "cfg.kl_type", "mixed")) {
        k->divergence = XD_KL_MIXED;
        k->beta = 1.0 - golden_number(c, "cfg.mixed_kl_weight", 0.5);
        if (k->beta == 0.0) k->beta = XD_ZERO;
    } else {
        golden_fail(c, "unknown kl_type %s", golden_text(c, "cfg.kl_type"));
        return false;
    }
    return true;
}

static void topk_run(golden_case *c) {
    job j;
    topk_kind k;
    memset(&k, 0, sizeof k);
    k.logits = golden_tensor(c, "in.student_logits");
    const golden_array ids = golden_tensor(c, "in.teacher_topk_indices"),
                       values = golden_tensor(c, "in.teacher_topk_logits"),
                       mask = golden_tensor(c, "in.token_mask"), samples = golden_tensor(c, "in.sample_mask");
    k.k = ids.ndim == 3 ? ids.shape[2] : 0;
    if (!topk_settings(c, &k) || !job_open(c, &j, &k.logits, 2 * k.logits.shape[2] + 3 * k.k + 12)) return;
    k.ids = golden_i64(c, &ids);
    k.values = golden_f32(c, &values);
    k.token_mask = golden_i64(c, &mask);
    k.mask = count_mask(c, &mask, &samples);
    k.weight = sample_weights(c, &samples, j.length);
    if (golden_has(c, "in.global_valid_toks"))
        k.denominator = golden_tensor(c, "in.global_valid_toks").values[0] + COUNT_EPS;
    k.log_probs = job_values(&j, j.tp, k.k);
    k.loss = (double *)golden_memory(c, (size_t)(j.tp * j.cp) * sizeof *k.loss);
    k.gradient = job_values(&j, 1, j.vocabulary);
    if (!job_run(&j, topk_piece, &k)) return;
    compare_copies(&j, "out.student_topk_logprobs", k.log_probs, j.tp, j.batch * (j.length - 1) * k.k, golden_close);
    compare_copies(&j, "out.loss", k.loss, j.tp * j.cp, 1, golden_close);
    golden_gradient(c, "grad.student_logits", k.gradient, j.batch * j.length * j.vocabulary);
}

/* ---- the load-balanced order ---- */

/* [B, L, H] split over the middle axis. Here "vocabulary" is H, and held is each rank's share of L. */
typedef struct order_kind {
    const float **shards;    /* [cp] in.rankN.shard, in the load-balanced order */
    const float *weight;     /* [B, L, H] */
    double **balanced_index; /* the rest: [cp], each written by its rank */
    double **window_index, **shift_index, **window, **shift, **gradient;
} order_kind;

static bool order_claims(const golden_case *c) {
    return golden_origin_has(c, "cp_load_balanced_to_contiguous");
}

static xd_result order_layout(const piece *p, bool split, bool balanced, xd_layout **out) {
    xd_layout_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ndim = 3;
    desc.shape[0] = p->job->batch;
    desc.shape[1] = p->job->length;
    desc.shape[2] = p->job->vocabulary;
    desc.topology = xd_mesh_topology(p->mesh);
    if (split) {
        desc.placement[0].kind = XD_SHARD; /* of "cp", the mesh's first axis */
        desc.placement[0].dim = 1;
        desc.placement[0].balanced = balanced;
    }
    return xd_layout_create(p->ctx, &desc, out);
}

/* Moves `from` between two layouts and widens what arrives. */
static xd_result order_move(piece *p, const xd_layout *layout, const float *from, const xd_layout *target, float *to,
                            double *wide) {
    const int rank = p->cp_rank; /* tp is 1 */
    const xd_tensor source = xd_tensor_view(layout, rank, (void *)(uintptr_t)from, XD_DTYPE_F32);
    const xd_tensor destination = xd_tensor_view(target, rank, to, XD_DTYPE_F32);
    TRY(xd_redistribute(xd_mesh_world(p->mesh), &source, &destination));
    for (int64_t i = 0; wide && i < xd_tensor_numel(&destination); i++) wide[i] = (double)to[i];
    return XD_OK;
}

/* The value one position on, for the positions of this rank's contiguous window: `sequences` rows of 64-bit values, any
 * of which but -1 may be shifted; -1 comes where there is none. */
static xd_result order_shift(piece *p, int64_t sequences, const int64_t *window, const int64_t *values,
                             int64_t *shifted) {
    xd_shift_desc shift;
    memset(&shift, 0, sizeof shift);
    shift.sequences = sequences;
    shift.length = p->job->length;
    shift.positions = window;
    shift.held = p->held;
    shift.ids = values;
    shift.fill = -1;
    shift.comm = p->cp;
    return xd_next_token_labels(p->ctx, &shift, shifted);
}

static xd_result order_indices(piece *p, const order_kind *k, int64_t *window) {
    const xd_interval piece_window = xd_chunk(p->job->length, p->job->cp, p->cp_rank);
    int64_t *shifted = (int64_t *)piece_take(p, p->held, sizeof *shifted);
    for (int64_t i = 0; i < p->held; i++) window[i] = piece_window.begin + i;
    TRY(order_shift(p, 1, window, window, shifted));
    for (int64_t i = 0; i < p->held; i++) {
        k->balanced_index[p->cp_rank][i] = (double)p->positions[i];
        k->window_index[p->cp_rank][i] = (double)window[i];
        k->shift_index[p->cp_rank][i] = (double)shifted[i];
    }
    return XD_OK;
}

/* Shifts [B, held, H] floats as bits, one sequence for each of B x H. The peer's fill is 0. */
static xd_result order_shift_values(piece *p, const order_kind *k, const int64_t *window, const float *values) {
    const int64_t width = p->job->vocabulary, sequences = p->job->batch * width, count = sequences * p->held;
    int64_t *bits = (int64_t *)piece_take(p, count, sizeof *bits);
    int64_t *shifted = (int64_t *)piece_take(p, count, sizeof *shifted);
    for (int64_t i = 0; i < count; i++) {
        const int64_t s = i / p->held, at = (s / width * p->held + i % p->held) * width + s % width;
        uint32_t word;
        memcpy(&word, &values[at], sizeof word);
        bits[i] = (int64_t)word;
    }
    TRY(order_shift(p, sequences, window, bits, shifted));
    for (int64_t i = 0; i < count; i++) {
        const int64_t s = i / p->held, at = (s / width * p->held + i % p->held) * width + s % width;
        const uint32_t word = shifted[i] < 0 ? 0u : (uint32_t)shifted[i];
        float value;
        memcpy(&value, &word, sizeof value);
        k->shift[p->cp_rank][at] = (double)value;
    }
    return XD_OK;
}

static xd_result order_relayout(piece *p, const order_kind *k, xd_layout *const layout[3], const int64_t *window) {
    const int64_t count = p->rows * p->job->vocabulary;
    const int r = p->cp_rank;
    float *contiguous = (float *)piece_take(p, count, sizeof *contiguous);
    float *weight = (float *)piece_take(p, count, sizeof *weight), *back = (float *)piece_take(p, count, sizeof *back);
    TRY(order_move(p, layout[0], k->shards[r], layout[1], contiguous, k->window[r]));
    TRY(order_move(p, layout[2], k->weight, layout[1], weight, NULL));
    TRY(order_move(p, layout[1], weight, layout[0], back, k->gradient[r]));
    return order_shift_values(p, k, window, contiguous);
}

static xd_result order_piece(piece *p) {
    const order_kind *k = (const order_kind *)p->job->kind;
    xd_layout *layout[3] = { NULL, NULL, NULL }; /* balanced, contiguous, whole */
    int64_t *window = (int64_t *)piece_take(p, p->held, sizeof *window);
    xd_result result = order_indices(p, k, window);
    if (result == XD_OK) result = order_layout(p, true, true, &layout[0]);
    if (result == XD_OK) result = order_layout(p, true, false, &layout[1]);
    if (result == XD_OK) result = order_layout(p, false, false, &layout[2]);
    if (result == XD_OK) result = order_relayout(p, k, layout, window);
    for (int i = 0; i < 3; i++) xd_layout_destroy(layout[i]);
    return result;
}

/* [cp] arrays of `count` values. */
static double **order_values(const job *j, int64_t count) {
    double **values = (double **)golden_memory(j->c, (size_t)j->cp * sizeof *values);
    for (int r = 0; r < j->cp; r++) values[r] = (double *)golden_memory(j->c, (size_t)count * sizeof **values);
    return values;
}

static void order_compare(const job *j, const char *format_begin, const char *format_end, double **values,
                          int64_t count) {
    for (int r = 0; r < j->cp; r++) {
        char name[NAME];
        snprintf(name, sizeof name, "%s.rank%d.%s", format_begin, r, format_end);
        golden_exact(j->c, name, values[r], count);
    }
}

static void order_run(golden_case *c) {
    job j;
    order_kind k;
    const golden_array full = golden_tensor(c, "in.full"), weight = golden_tensor(c, "in.weight");
    if (!job_open(c, &j, &full, 6 * full.shape[2] + 8)) return;
    const int64_t held = j.length / j.cp, count = j.batch * held * j.vocabulary;
    k.shards = (const float **)golden_memory(c, (size_t)j.cp * sizeof *k.shards);
    for (int r = 0; r < j.cp; r++) {
        char name[NAME];
        snprintf(name, sizeof name, "in.rank%d.shard", r);
        const golden_array shard = golden_tensor(c, name);
        if (shard.count != count) {
            golden_fail(c, "%s has %lld elements, not %lld", name, (long long)shard.count, (long long)count);
            return;
        }
        k.shards[r] = golden_f32(c, &shard);
    }
    k.weight = golden_f32(c, &weight);
    k.balanced_index = order_values(&j, held);
    k.window_index = order_values(&j, held);
    k.shift_index = order_values(&j, held);
    k.window = order_values(&j, count);
    k.shift = order_values(&j, count);
    k.gradient = order_values(&j, count);
    if (!job_run(&j, order_piece, &k)) return;
    order_compare(&j, "out", "load_balanced_index", k.balanced_index, held);
    order_compare(&j, "out", "contiguous_index", k.window_index, held);
    order_compare(&j, "out", "shift_next_index", k.shift_index, held);
    order_compare(&j, "out", "contiguous", k.window, count);
    order_compare(&j, "out", "shift_next", k.shift, count);
    order_compare(&j, "grad", "shard", k.gradient, count);
}

/* ---- what later parts of the library will answer ---- */

static const char *const not_built[][2] = {
    { "chunk_log_prob_sums", "not built: chunk averages" },
    { "valid_chunk_mask", "not built: chunk averages" },
    { "build_exact_token_map", "not built: exact-token maps" },
    { "project_student_to_teacher_vocab", "not built: vocabulary projections" },
    { "get_sparse_projection_matrix", "not built: vocabulary projections" },
    { "collect_overlapping_teacher_shards", "not built: teacher shard plans" },
    { "CrossTokenizerDistillationLossFn", "not built: sharded cross-tokenizer losses" },
};

static const char *not_built_reason(const golden_case *c) {
    for (size_t i = 0; i < sizeof not_built / sizeof *not_built; i++)
        if (golden_origin_has(c, not_built[i][0])) return not_built[i][1];
    return NULL;
}

static bool not_built_claims(const golden_case *c) {
    return not_built_reason(c) != NULL;
}

static void not_built_run(golden_case *c) {
    golden_skip(c, not_built_reason(c));
}

const golden_kind golden_kinds_xtoken_parts[] = {
    { "softmax pieces", softmax_claims, softmax_run },
    { "largest logits", largest_claims, largest_run },
    { "teacher columns", columns_claims, columns_run },
    { "log-probabilities", logprobs_claims, logprobs_run },
    { "next-token cross entropy", next_token_claims, next_token_run },
    { "hard cross entropy", each_claims_hard, each_run_hard },
    { "soft cross entropy", each_claims_soft, each_run_soft },
    { "top-k distillation", topk_claims, topk_run },
    { "load-balanced order", order_claims, order_run },
    { "not built", not_built_claims, not_built_run },
    { NULL, NULL, NULL },
};
