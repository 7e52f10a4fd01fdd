/* Golden cases of the losses across tokenizers: the whole loss of NeMo-RL (area xtoken), its parts, and its
 * KD on real ranks (area xtoken-parts). Everything runs with `compat`, on one rank or on those the case was
 * recorded on. */
#include "sharded.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { XTOKEN_TEACHERS = 16 };

/* One teacher of a case, whole. */
typedef struct xtoken_teacher {
    xd_xtoken_teacher desc; /* without what a rank cuts out itself */
    int64_t length, width;
    float *logits;
    int64_t *student_chunks, *teacher_chunks, *labels; /* shifted */
    float *label_weight, *position_weight;
    xd_projection projection;
    xd_exact_map map;
    xd_projection_rows rows;
} xtoken_teacher;

typedef struct xtoken_case {
    golden_case *c;
    int64_t sequences, length, width;
    float *student, *row_weight, *sample_weight;
    int64_t *labels;
    xd_xtoken_desc desc;
    xtoken_teacher teacher[XTOKEN_TEACHERS];
    int teacher_count;
    double *gradient;            /* whole */
    xd_xtoken_values values[16]; /* of each rank */
    xd_xtoken_teacher_values teacher_values[XTOKEN_TEACHERS];
} xtoken_case;

/* ---- reading ---- */

static const char *numbered(char name[64], int teacher, const char *field) {
    snprintf(name, 64, "in.t%d.%s", teacher, field);
    return name;
}

/* Entry `index` of a JSON list of the metadata as text; the fallback when it is absent or null. */
static bool list_flag(golden_case *c, const char *key, int index, bool fallback) {
    const char *text = golden_text(c, key);
    xd_json *list = NULL;
    bool value = fallback;
    if (!text || !golden_ok(c, xd_json_load_memory(golden_ctx(c), NULL, text, strlen(text), &list)))
        return fallback;
    xd_json_bool(xd_json_at(list, (size_t)index), &value);
    xd_json_destroy(golden_ctx(c), list);
    return value;
}

/* Entry `index` as a string; empty when it is absent or no string. */
static void list_text(golden_case *c, const char *key, int index, char text[16]) {
    const char *json = golden_text(c, key);
    xd_json *list = NULL;
    size_t bytes = 0;
    text[0] = '\0';
    if (!json || !golden_ok(c, xd_json_load_memory(golden_ctx(c), NULL, json, strlen(json), &list))) return;
    const char *entry = xd_json_string(xd_json_at(list, (size_t)index), &bytes);
    if (entry) snprintf(text, 16, "%s", entry);
    xd_json_destroy(golden_ctx(c), list);
}

/* ids[b, t] = values[b, t + 1], `fill` at the end of each sequence. */
static int64_t *shifted(golden_case *c, const golden_array *a, int64_t fill) {
    int64_t *out = (int64_t *)golden_memory(c, (size_t)(a->count + 1) * sizeof *out);
    const int64_t length = a->shape[a->ndim - 1];
    for (int64_t i = 0; i < a->count; i++)
        out[i] = i % length + 1 < length ? (int64_t)a->values[i + 1] : fill;
    return out;
}

/* token_mask times sample_mask, of the next position or of the same one. */
static float *weights(xtoken_case *x, const golden_array *mask, bool next) {
    float *out = (float *)golden_memory(x->c, (size_t)(mask->count + 1) * sizeof *out);
    const int64_t length = mask->shape[1];
    for (int64_t i = 0; i < mask->count; i++) {
        const int64_t from = next ? i + 1 : i;
        if (from / length == i / length) out[i] = (float)mask->values[from] * x->sample_weight[i / length];
    }
    return out;
}

static xd_projection_rows dense_rows(golden_case *c, int index) {
    char name[64];
    const golden_array ids = golden_tensor(c, numbered(name, index, "proj_indices"));
    const golden_array likelihoods = golden_tensor(c, numbered(name, index, "proj_likelihoods"));
    xd_projection_rows rows = { NULL, golden_f32(c, &likelihoods), ids.shape[0], ids.shape[1] };
    rows.ids = (int32_t *)golden_memory(c, (size_t)(ids.count + 1) * sizeof *rows.ids);
    for (int64_t i = 0; i < ids.count; i++) rows.ids[i] = (int32_t)ids.values[i];
    return rows;
}

static bool read_projection(xtoken_case *x, int index) {
    golden_case *c = x->c;
    xtoken_teacher *t = &x->teacher[index];
    char name[64];
    const int64_t size = t->desc.vocabulary;
    if (!golden_has(c, numbered(name, index, "proj_coo_index"))) {
        const xd_projection_rows rows = dense_rows(c, index);
        if (t->desc.kind == XD_XTOKEN_GOLD)
            return golden_exact_map(
                c, &rows, size,
                list_flag(c, "cfg.teacher_xtoken_loss", index, golden_flag(c, "cfg.xtoken_loss", false)),
                &t->map);
        return golden_ok(c, xd_projection_from_rows(golden_ctx(c), &rows, x->width, size, &t->projection));
    }
    const golden_array ids = golden_tensor(c, numbered(name, index, "proj_coo_index"));
    const golden_array value = golden_tensor(c, numbered(name, index, "proj_coo_value"));
    xdi_vote *cells = (xdi_vote *)golden_memory(c, (size_t)(value.count + 1) * sizeof *cells);
    for (int64_t i = 0; i < value.count; i++) {
        cells[i].student_id = (int32_t)ids.values[i];
        cells[i].teacher_id = (int32_t)ids.values[value.count + i];
        cells[i].weight = value.values[i];
    }
    const xdi_projection_cells list = { cells, value.count, x->width, size };
    return golden_ok(c, xdi_projection_from_cells(golden_ctx(c), &list, &t->projection));
}

/* Only for a teacher with another tokenizer. */
static bool read_alignment(xtoken_case *x, int index) {
    golden_case *c = x->c;
    xtoken_teacher *t = &x->teacher[index];
    char name[64];
    const golden_array student = golden_tensor(c, numbered(name, index, "student_chunk_id"));
    const golden_array teacher = golden_tensor(c, numbered(name, index, "teacher_chunk_id"));
    const golden_array valid = golden_tensor(c, numbered(name, index, "pair_valid"));
    const golden_array correct = golden_tensor(c, numbered(name, index, "pair_is_correct"));
    const bool all_gold = golden_flag(c, "cfg.gold_loss", false);
    const bool gold =
        x->desc.mode == XD_XTOKEN_SUM ? list_flag(c, "cfg.teacher_gold_loss", index, all_gold) : all_gold;
    t->student_chunks = shifted(c, &student, -1);
    t->teacher_chunks = shifted(c, &teacher, -1);
    t->desc.kind = gold ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED;
    t->desc.chunks = valid.shape[1];
    t->desc.chunk_mask = golden_u8(c, &valid);
    t->desc.chunk_exact = golden_u8(c, &correct);
    if (golden_has(c, numbered(name, index, "input_ids"))) {
        const golden_array ids = golden_tensor(c, name);
        const golden_array mask = golden_tensor(c, numbered(name, index, "token_mask"));
        t->labels = shifted(c, &ids, XD_IGNORE_INDEX);
        t->label_weight = weights(x, &mask, true);
        t->position_weight = weights(x, &mask, false);
    }
    if (!read_projection(x, index)) return false;
    t->desc.projected.projection = &t->projection;
    t->desc.gold.map = &t->map;
    return true;
}

/* What the configuration calls a teacher is what the file has of it. */
static bool check_kind(xtoken_case *x, int index, bool aligned) {
    static const char *const modes[] = { "pkl", "gold", "same", NULL };
    golden_case *c = x->c;
    char name[64], kind[16];
    const bool sparse = golden_has(c, numbered(name, index, "proj_coo_index"));
    const int mode = golden_choice(c, "cfg.mode", modes, -1);
    list_text(c, "cfg.teacher_kind", index, kind);
    if (mode >= 0 && (modes[mode][0] == 's') == aligned)
        golden_fail(c, "cfg.mode = %s, but teacher %d has %s", modes[mode], index,
                    aligned ? "chunks" : "no chunks");
    if (mode >= 0 && mode < 2 && golden_flag(c, "cfg.gold_loss", false) != (mode == 1))
        golden_fail(c, "cfg.mode = %s, but cfg.gold_loss says otherwise", modes[mode]);
    if (kind[0] && strcmp(kind, !aligned ? "same" : sparse ? "sparse" : "dense") != 0)
        golden_fail(c, "cfg.teacher_kind of teacher %d is \"%s\", but its projection is %s", index, kind,
                    !aligned ? "absent"
                    : sparse ? "sparse"
                             : "dense");
    return true;
}

static bool read_teacher(xtoken_case *x, int index) {
    golden_case *c = x->c;
    xtoken_teacher *t = &x->teacher[index];
    char name[64];
    double sizes[XTOKEN_TEACHERS], omegas[XTOKEN_TEACHERS];
    const golden_array logits = golden_tensor(c, numbered(name, index, "full_logits"));
    const golden_array mask = golden_tensor(c, "in.token_mask");
    t->length = logits.shape[1];
    t->width = logits.shape[2];
    t->logits = golden_f32(c, &logits);
    t->desc.vocabulary = t->width;
    t->desc.weight = 1.0;
    if (golden_numbers(c, "cfg.teacher_vocab_sizes", sizes, XTOKEN_TEACHERS) > index)
        t->desc.vocabulary = (int64_t)sizes[index];
    if (golden_numbers(c, "cfg.teacher_weights", omegas, XTOKEN_TEACHERS) > index)
        t->desc.weight = omegas[index];
    const bool aligned = golden_has(c, numbered(name, index, "student_chunk_id"));
    if (!check_kind(x, index, aligned)) return false;
    if (aligned) return read_alignment(x, index);
    t->desc.kind = XD_XTOKEN_SAME;
    t->position_weight = weights(x, &mask, false);
    return true;
}

static void read_settings(xtoken_case *x) {
    static const char *const modes[] = { "sum", "averaged_logits", "select_teacher", NULL };
    static const char *const scores[] = { "ce", "entropy", "max_prob", NULL };
    golden_case *c = x->c;
    xd_xtoken_desc *d = &x->desc;
    d->compat = true;
    d->sequences = x->sequences;
    d->temperature = golden_number(c, "cfg.temperature", 1.0);
    d->reverse = golden_flag(c, "cfg.reverse_kl", false);
    d->exact_only = golden_flag(c, "cfg.exact_token_match_only", false);
    d->columns = (int64_t)golden_number(c, "cfg.vocab_topk", 8192.0);
    d->tail = (int64_t)golden_number(c, "cfg.uncommon_topk", 8192.0);
    d->kd_weight = golden_number(c, "cfg.kl_loss_weight", 1.0);
    d->ce_weight = golden_number(c, "cfg.ce_loss_scale", 0.1);
    d->balance = golden_flag(c, "cfg.dynamic_loss_scaling", false);
    d->alpha = golden_number(c, "cfg.alpha", 1.0);
    d->normalise_by_vocabulary = golden_flag(c, "cfg.normalize_teacher_by_vocab", false);
    switch (golden_choice(c, "cfg.kd_loss_mode", modes, 0)) {
    case 1: d->mode = XD_XTOKEN_AVERAGED_LOGITS; break;
    case 2: d->mode = XD_XTOKEN_SELECT; break;
    default: d->mode = XD_XTOKEN_SUM;
    }
    switch (golden_choice(c, "cfg.sum_weights_metric", scores, -1)) {
    case 0: d->score = XD_XTOKEN_SCORE_CE; break;
    case 1: d->score = XD_XTOKEN_SCORE_ENTROPY; break;
    case 2: d->score = XD_XTOKEN_SCORE_MAX_PROB; break;
    default: break;
    }
    golden_only(c, "cfg.student_vocab_size", (double)x->width);
    /* Only the peer's gold loss of this teacher, or of all, reads them. */
    golden_inert(c, "cfg.gold_loss");
    golden_inert(c, "cfg.teacher_gold_loss");
    golden_inert(c, "cfg.xtoken_loss");
    golden_inert(c, "cfg.teacher_xtoken_loss");
}

static bool xtoken_open(golden_case *c, xtoken_case *x) {
    const golden_array student = golden_tensor(c, "in.student_logits"),
                       ids = golden_tensor(c, "in.input_ids");
    const golden_array mask = golden_tensor(c, "in.token_mask"), sample = golden_tensor(c, "in.sample_mask");
    memset(x, 0, sizeof *x);
    if (student.ndim != 3 || mask.ndim != 2) {
        golden_fail(c, "student logits of %d dimensions", student.ndim);
        return false;
    }
    x->c = c;
    x->sequences = student.shape[0];
    x->length = student.shape[1];
    x->width = student.shape[2];
    x->student = golden_f32(c, &student);
    x->sample_weight = golden_f32(c, &sample);
    x->labels = shifted(c, &ids, XD_IGNORE_INDEX);
    x->row_weight = weights(x, &mask, true);
    x->gradient = (double *)golden_memory(c, (size_t)(student.count + 1) * sizeof *x->gradient);
    x->desc.common.denominator_value = sharded_denominator(c, x->row_weight, x->sequences * x->length);
    read_settings(x);
    x->teacher_count = golden_integer(c, "cfg.num_teachers", 1, 0, XTOKEN_TEACHERS);
    for (int i = 0; i < x->teacher_count; i++)
        if (!read_teacher(x, i)) return false;
    return true;
}

static void xtoken_close(xtoken_case *x) {
    for (int i = 0; i < x->teacher_count; i++) {
        if (x->teacher[i].projection.row_begin)
            xd_projection_destroy(golden_ctx(x->c), &x->teacher[i].projection);
        if (x->teacher[i].map.student) xd_exact_map_destroy(golden_ctx(x->c), &x->teacher[i].map);
    }
}

/* ---- running ---- */

/* The rows of a teacher that a rank holds: a block of each sequence, or the student's rows where they share a tokenizer. */
static sharded_part teacher_part(const xtoken_case *x, const sharded_part *part, int index, int64_t *row) {
    const xtoken_teacher *t = &x->teacher[index];
    const int64_t rank = xd_comm_rank(part->cp), ranks = xd_comm_size(part->cp);
    sharded_part mine = *part;
    if (t->desc.kind == XD_XTOKEN_SAME) return mine;
    mine.rows = 0;
    mine.row = row;
    for (int64_t b = 0; b < x->sequences; b++)
        for (int64_t i = t->length * rank / ranks; i < t->length * (rank + 1) / ranks; i++)
            row[mine.rows++] = b * t->length + i;
    return mine;
}

/* Every array of a teacher that a rank cuts out, so that the rank can free them. */
typedef struct xtoken_mine {
    int64_t *row, *student_chunks, *teacher_chunks, *labels;
    float *logits, *label_weight, *position_weight;
} xtoken_mine;

static xd_xtoken_teacher cut_teacher(const xtoken_case *x, const sharded_part *part, int index,
                                     xtoken_mine *m) {
    const xtoken_teacher *t = &x->teacher[index];
    xd_xtoken_teacher desc = t->desc;
    memset(m, 0, sizeof *m);
    m->row = (int64_t *)malloc((size_t)(x->sequences * t->length + 1) * sizeof *m->row);
    const sharded_part rows = teacher_part(x, part, index, m->row);
    desc.logits = golden_rows(m->logits = sharded_f32(&rows, t->logits, t->width), rows.rows, t->width);
    if (t->student_chunks) desc.student_chunks = m->student_chunks = sharded_i64(part, t->student_chunks, 1);
    if (t->teacher_chunks) desc.teacher_chunks = m->teacher_chunks = sharded_i64(&rows, t->teacher_chunks, 1);
    if (t->labels) desc.labels.data = m->labels = sharded_i64(&rows, t->labels, 1);
    if (t->label_weight) desc.label_weight = m->label_weight = sharded_f32(&rows, t->label_weight, 1);
    if (t->position_weight)
        desc.position_weight = m->position_weight = sharded_f32(&rows, t->position_weight, 1);
    return desc;
}

static void free_mine(xtoken_mine *m) {
    free(m->row);
    free(m->student_chunks);
    free(m->teacher_chunks);
    free(m->labels);
    free(m->logits);
    free(m->label_weight);
    free(m->position_weight);
}

static xd_result xtoken_body(const sharded_part *part, void *user) {
    xtoken_case *x = (xtoken_case *)user;
    xtoken_mine mine[XTOKEN_TEACHERS];
    xd_xtoken_teacher teachers[XTOKEN_TEACHERS];
    xd_xtoken_teacher_values values[XTOKEN_TEACHERS];
    float *student = sharded_columns(part, x->student), *gradient = sharded_columns(part, x->student);
    float *row_weight = sharded_f32(part, x->row_weight, 1);
    int64_t *labels = sharded_i64(part, x->labels, 1);
    xd_xtoken_desc d = x->desc;
    for (int i = 0; i < x->teacher_count; i++) {
        teachers[i] = cut_teacher(x, part, i, &mine[i]);
        teachers[i].logits = golden_rows_in(part->loans, teachers[i].logits);
    }
    d.student = golden_rows_in(part->loans, sharded_rows(part, student));
    d.vocab = part->vocab;
    d.sequence_comm = part->cp;
    d.sample_weight = x->sample_weight;
    d.common.labels.data = labels;
    d.common.row_weight = row_weight;
    d.teachers = teachers;
    d.teacher_count = x->teacher_count;
    float *slope = x->teacher_count > 1 ? gradient : student; /* over the logits */
    d.common.gradient = golden_rows_out(part->loans, sharded_rows(part, slope));
    d.teacher_values = values;
    xd_status found; /* on the host, like the values: the call waits for them */
    memset(&found, 0, sizeof found);
    d.common.status = &found;
    xd_result result = xd_xtoken_loss(part->ctx, &d, &x->values[part->rank]);
    result = golden_found(part->loans, result, &found);
    sharded_put_columns(part, slope, x->gradient);
    if (part->rank == 0) memcpy(x->teacher_values, values, sizeof values);
    for (int i = 0; i < x->teacher_count; i++) free_mine(&mine[i]);
    free(student);
    free(gradient);
    free(row_weight);
    free(labels);
    return result;
}

/* ---- the whole loss ---- */

static double ratio(double numerator, double denominator) {
    return denominator > 0.0 ? numerator / denominator : 0.0;
}

/* A number of a loss, by the name that the file gives it. */
typedef struct named_number {
    const char *name;
    double value;
} named_number;

/* The value of a metric without its "out." and "_t0"; false for one that is not known. */
static bool metric(const xtoken_case *x, const char *name, int teacher, double *value) {
    const xd_xtoken_values *v = &x->values[0];
    const xd_xtoken_teacher_values *t = &x->teacher_values[teacher < 0 ? 0 : teacher];
    const named_number whole[] = {
        { "loss", v->loss },
        { "kl_loss", v->kd },
        { "ce_loss", v->ce },
        { "kl_loss_scale", x->desc.balance ? v->kd_weight : 1.0 },
        { "accuracy", ratio(v->right, v->tokens) },
        { "num_valid_samples", (double)x->sequences },
        { "selected_teacher", (double)v->selected },
        { NULL, 0.0 },
    };
    const named_number of_teacher[] = {
        { "kl_loss", t->kd },
        { "weight", t->weight },
        { "kl_common", ratio(t->divergence, t->denominator) },
        { "l1_uncommon", ratio(t->tail, t->denominator) },
        { "proj_accuracy", ratio(t->agreeing, t->compared) },
        { "num_valid_chunks", t->counted }, /* not the denominator, which is 1 where none counts */
        { "num_valid_pairs", t->counted },
        { NULL, 0.0 },
    };
    for (const named_number *n = teacher < 0 ? whole : of_teacher; n->name; n++)
        if (strcmp(n->name, name) == 0) {
            *value = n->value;
            return true;
        }
    return false;
}

/* One result of the file: "out.kl_loss", "out32.num_valid_pairs_t0", "expect.loss". */
static void check_metric(golden_case *c, const xtoken_case *x, const char *what) {
    char name[64], full[80];
    int teacher = -1, end = 0;
    snprintf(name, sizeof name, "%s", what);
    snprintf(full, sizeof full, "out.%s", what);
    char *suffix = strrchr(name, '_');
    if (suffix && sscanf(suffix, "_t%d%n", &teacher, &end) == 1 && suffix[end] == '\0')
        *suffix = '\0';
    else
        teacher = -1;
    double value = 0.0;
    if (teacher >= x->teacher_count || !metric(x, name, teacher, &value))
        golden_fail(c, "%s: this kind has no such number", full);
    else
        golden_close(c, full, &value, 1);
}

/* Every output of the file is a metric. */
static void check_metrics(golden_case *c, const xtoken_case *x) {
    static const char *const prefixes[] = { "out.", "out32.", "expect.", "expect32." };
    for (int form = 0; form < 4; form++) {
        const size_t length = strlen(prefixes[form]);
        for (int i = 0; form < 2 && i < golden_tensor_count(c); i++)
            if (strncmp(golden_tensor_name(c, i), prefixes[form], length) == 0)
                check_metric(c, x, golden_tensor_name(c, i) + length);
        for (int i = 0; form >= 2 && golden_key(c, i); i++)
            if (strncmp(golden_key(c, i), prefixes[form], length) == 0)
                check_metric(c, x, golden_key(c, i) + length);
    }
}

static bool loss_claims(const golden_case *c) {
    return golden_origin_has(c, "CrossTokenizerDistillationLossFn (inputs");
}

static void loss_run(golden_case *c) {
    xtoken_case x;
    if (xtoken_open(c, &x) && sharded_run(c, x.sequences, x.length, x.width, xtoken_body, &x)) {
        check_metrics(c, &x);
        golden_gradient(c, "grad.student_logits", x.gradient, x.sequences * x.length * x.width);
    }
    xtoken_close(&x);
}

const golden_kind golden_kinds_xtoken[] = {
    { "loss across tokenizers", loss_claims, loss_run },
    { NULL, NULL, NULL },
};

/* ---- KD alone, on several ranks ---- */

static bool kd_claims(const golden_case *c) {
    return golden_origin_has(c, "::CrossTokenizerDistillationLossFn._sum_kd");
}

/* The peer's value on a rank is a share of the whole: KD/(tp cp), or of teachers with the same tokenizer a partial sum. */
static void check_shares(golden_case *c, const xtoken_case *x) {
    const int ranks = sharded_ranks(c);
    for (int r = 0; r < ranks && x->teacher[0].desc.kind != XD_XTOKEN_SAME; r++) {
        char name[64];
        const double share = x->values[r].kd / (double)ranks;
        snprintf(name, sizeof name, "out.rank%d.kd", r);
        golden_close(c, name, &share, 1);
    }
}

static void kd_run(golden_case *c) {
    xtoken_case x;
    golden_inert(c, "out.rank*"); /* each rank's share, where it is a partial sum */
    golden_inert(c, "out32.rank*");
    golden_inert(c, "expect.rank*");
    golden_inert(c, "expect32.rank*");
    golden_inert(c, "grad.rank*");
    if (xtoken_open(c, &x)) {
        x.desc.ce_weight = 0.0; /* no cross entropy in the gradient */
        if (sharded_run(c, x.sequences, x.length, x.width, xtoken_body, &x)) {
            double *kd = sharded_values(c), accuracy = ratio(x.values[0].right, x.values[0].tokens);
            for (int r = 0; r < sharded_ranks(c); r++) kd[r] = x.values[r].kd;
            sharded_close_values(c, "out.kd_single", kd);
            check_shares(c, &x);
            golden_close(c, "out.accuracy", &accuracy, 1);
            golden_gradient(c, "grad.student_logits_single", x.gradient, x.sequences * x.length * x.width);
        }
    }
    xtoken_close(&x);
}

/* ---- chunks ---- */

static bool chunks_claims(const golden_case *c) {
    return golden_origin_has(c, "chunk_log_prob_sums");
}

static void chunks_run(golden_case *c) {
    const golden_array values = golden_tensor(c, "in.log_probs"), ids = golden_tensor(c, "in.chunk_id");
    golden_array weight;
    memset(&weight, 0, sizeof weight);
    if (golden_has(c, "in.grad_chunk_avg")) weight = golden_tensor(c, "in.grad_chunk_avg");
    if (values.ndim != 3 || ids.ndim != 2 || (weight.values && weight.ndim != 3)) {
        golden_fail(c, "chunks of %d, %d and %d dimensions", values.ndim, ids.ndim, weight.ndim);
        return;
    }
    if (weight.values) golden_only(c, "cfg.max_chunks", (double)weight.shape[1]);
    const int64_t chunks =
        weight.values ? weight.shape[1] : golden_integer(c, "cfg.max_chunks", 0, 0, 1 << 20);
    const int64_t n = values.shape[2], count = ids.shape[0] * chunks;
    const xdi_chunk_map map = { golden_i64(c, &ids), ids.shape[0], ids.shape[1], chunks, NULL };
    double *sums = (double *)golden_memory(c, (size_t)(count * n + 1) * sizeof *sums);
    double *wide = (double *)golden_memory(c, (size_t)(count + 1) * sizeof *wide);
    int64_t *sizes = (int64_t *)golden_memory(c, (size_t)(count + 1) * sizeof *sizes);
    const xd_rows rows = golden_rows(golden_f32(c, &values), values.count / n, n);
    const size_t bytes = (size_t)(count * n) * sizeof *sums;
    golden_loans *l = golden_case_loans(c);
    double *there = (double *)golden_out(l, sums, bytes);
    if (!golden_ok(
            c, golden_back(l, xdi_chunk_sums(golden_ctx(c), &map, golden_rows_in(l, rows), there, sizes))))
        return;
    for (int64_t i = 0; i < count; i++) wide[i] = (double)sizes[i];
    golden_double(c, "out.chunk_sums", sums, count * n);
    golden_exact(c, "out.chunk_sizes", wide, count);
    there = (double *)golden_out(l, sums, bytes);
    if (!golden_ok(c, golden_back(l, xdi_chunk_averages(golden_ctx(c), there, sizes, count, n, there))))
        return;
    golden_double(c, "out.chunk_avg", sums, count * n);
    if (!weight.values) return;
    const double *slope = (const double *)golden_in(l, weight.values, bytes);
    if (!golden_ok(c, golden_back(l, xdi_chunk_averages_backward(golden_ctx(c), &map, sizes, slope,
                                                                 golden_rows_out(l, rows)))))
        return;
    golden_gradient(c, "grad.log_probs", golden_widen(c, rows.data, XD_DTYPE_F32, values.count),
                    values.count);
}

static bool valid_claims(const golden_case *c) {
    return golden_origin_has(c, "::valid_chunk_mask");
}

static void valid_run(golden_case *c) {
    const golden_array student = golden_tensor(c, "in.student_sizes"),
                       teacher = golden_tensor(c, "in.teacher_sizes");
    const golden_array pairs = golden_tensor(c, "in.pair_valid");
    uint8_t *valid = (uint8_t *)golden_memory(c, (size_t)(pairs.count + 1));
    xdi_valid_chunks(golden_i64(c, &student), golden_i64(c, &teacher), golden_u8(c, &pairs), NULL,
                     pairs.count, valid);
    golden_exact(c, "out.mask", golden_widen(c, valid, XD_DTYPE_U8, pairs.count), pairs.count);
}

/* ---- probabilities in the teacher's vocabulary ---- */

typedef struct project_job {
    float *probs;
    double *weight, *out, *gradient;
    xd_projection projection;
} project_job;

static bool project_claims(const golden_case *c) {
    return golden_origin_has(c, "::project_student_to_teacher_vocab");
}

static xd_result project_body(const sharded_part *part, void *user) {
    project_job *job = (project_job *)user;
    const int64_t k = job->projection.teacher_size;
    float *probs = sharded_columns(part, job->probs);
    double *mine = (double *)calloc((size_t)(part->rows * k + 1), sizeof *mine);
    const xd_rows rows = sharded_rows(part, probs);
    const size_t bytes = (size_t)(part->rows * k) * sizeof *mine;
    golden_loans *l = part->loans;
    double *there = (double *)golden_out(l, mine, bytes);
    const xdi_project_desc desc = { part->vocab, &job->projection, NULL, k };
    xd_result result = golden_back(l, xdi_project(part->ctx, &desc, golden_rows_in(l, rows), there));
    sharded_put(part, mine, k, job->out);
    for (int64_t i = 0; i < part->rows * k; i++) mine[i] = job->weight[part->row[i / k] * k + i % k];
    const double *weight = (const double *)golden_in(l, mine, bytes);
    if (result == XD_OK)
        result = golden_back(l, xdi_project_backward(part->ctx, &desc, weight, golden_rows_out(l, rows)));
    sharded_put_columns(part, probs, job->gradient);
    free(probs);
    free(mine);
    return result;
}

static void project_run(golden_case *c) {
    const golden_array probs = golden_tensor(c, "in.student_probs");
    golden_array weight;
    memset(&weight, 0, sizeof weight);
    if (golden_has(c, "in.weight")) weight = golden_tensor(c, "in.weight");
    const golden_array ids = golden_tensor(c, "in.proj_indices");
    const golden_array likelihoods = golden_tensor(c, "in.proj_likelihoods");
    xd_projection_rows rows = { NULL, golden_f32(c, &likelihoods), ids.shape[0], ids.shape[1] };
    project_job job;
    memset(&job, 0, sizeof job);
    rows.ids = (int32_t *)golden_memory(c, (size_t)(ids.count + 1) * sizeof *rows.ids);
    for (int64_t i = 0; i < ids.count; i++) rows.ids[i] = (int32_t)ids.values[i];
    job.probs = golden_f32(c, &probs);
    /* Without a weight of the gradient the result tells how many columns there are, and its values are as good as others. */
    if (!weight.values) weight = golden_tensor(c, "out.projected");
    if (probs.ndim != 3 || weight.ndim != 3) {
        golden_fail(c, "probabilities of %d and %d dimensions, not 3", probs.ndim, weight.ndim);
        return;
    }
    job.weight = weight.values;
    job.out = (double *)golden_memory(c, (size_t)(weight.count + 1) * sizeof(double));
    job.gradient = (double *)golden_memory(c, (size_t)(probs.count + 1) * sizeof(double));
    if (!golden_ok(c, xd_projection_from_rows(golden_ctx(c), &rows, probs.shape[2], weight.shape[2],
                                              &job.projection)))
        return;
    if (sharded_run(c, probs.shape[0], probs.shape[1], probs.shape[2], project_body, &job)) {
        golden_close(c, "out.projected", job.out, weight.count);
        golden_gradient(c, "grad.student_probs", job.gradient, probs.count);
    }
    xd_projection_destroy(golden_ctx(c), &job.projection);
}

/* ---- a teacher's shards ---- */

static bool route_claims(const golden_case *c) {
    return golden_origin_has(c, "collect_overlapping_teacher_shards");
}

/* One rank's window, assembled from the shards' rectangles of in.full. */
static void route_window(golden_case *c, const xdi_teacher_piece *pieces, int64_t count, int rank,
                         int64_t positions, const xdi_teacher_shard *shards) {
    char name[64];
    const golden_array full = golden_tensor(c, "in.full");
    const int64_t length = full.shape[1], width = full.shape[2], cells = full.shape[0] * positions * width;
    float *out = (float *)golden_memory(c, (size_t)(cells + 1) * sizeof *out), *in = golden_f32(c, &full);
    for (int64_t b = 0; b < full.shape[0]; b++)
        for (int64_t i = 0; i < count; i++) {
            const xdi_teacher_shard *s = &shards[pieces[i].shard];
            golden_loans *l = golden_case_loans(c);
            xd_rows shard = golden_rows_in(l, golden_rows(in + b * length * width, length, width));
            const xd_rows window =
                golden_rows_out(l, golden_rows(out + b * positions * width, positions, width));
            shard.data = (float *)shard.data + s->position_begin * width + s->vocabulary_begin;
            shard.rows = s->position_end - s->position_begin;
            shard.cols = s->vocabulary_end - s->vocabulary_begin;
            shard.stride = width;
            golden_ok(c, golden_back(l, xdi_teacher_piece_copy(golden_ctx(c), &pieces[i], shard, window)));
        }
    snprintf(name, sizeof name, "out.rank%d.logits", rank);
    golden_exact(c, name, golden_widen(c, out, XD_DTYPE_F32, cells), cells);
}

static void route_run(golden_case *c) {
    const golden_array bounds = golden_tensor(c, "in.shard_bounds"), full = golden_tensor(c, "in.full");
    const int ranks = golden_integer(c, "cfg.student_cp", 1, 1, 1024);
    const int teachers =
        golden_integer(c, "cfg.teacher_cp", 1, 1, 1024) * golden_integer(c, "cfg.teacher_tp", 1, 1, 1024);
    if (teachers != bounds.shape[0])
        golden_fail(c, "%d shards of cfg.teacher_cp and cfg.teacher_tp", teachers);
    const int64_t count = bounds.shape[0], positions = full.shape[1] / ranks;
    xdi_teacher_shard *shards = (xdi_teacher_shard *)golden_memory(c, (size_t)(count + 1) * sizeof *shards);
    xdi_teacher_piece *pieces = (xdi_teacher_piece *)golden_memory(c, (size_t)(count + 1) * sizeof *pieces);
    double *plan = (double *)golden_memory(c, (size_t)(ranks * count + 1) * 10 * sizeof *plan), *at = plan;
    for (int64_t i = 0; i < count; i++) {
        shards[i].position_begin = (int64_t)bounds.values[4 * i];
        shards[i].position_end = (int64_t)bounds.values[4 * i + 1];
        shards[i].vocabulary_begin = (int64_t)bounds.values[4 * i + 2];
        shards[i].vocabulary_end = (int64_t)bounds.values[4 * i + 3];
    }
    for (int r = 0; r < ranks; r++) {
        int64_t n = 0;
        const xdi_teacher_route_desc desc = { shards, count, r * positions, (r + 1) * positions,
                                              full.shape[2] };
        if (!golden_ok(c, xdi_teacher_route(golden_ctx(c), &desc, pieces, &n))) return;
        for (int64_t i = 0; i < n; i++) {
            const xdi_teacher_piece *p = &pieces[i];
            *at++ = (double)r;
            *at++ = (double)p->shard;
            *at++ = (double)p->from_position;
            *at++ = (double)(p->from_position + p->positions);
            *at++ = (double)p->from_column;
            *at++ = (double)(p->from_column + p->columns);
            *at++ = (double)p->to_position;
            *at++ = (double)(p->to_position + p->positions);
            *at++ = (double)p->to_column;
            *at++ = (double)(p->to_column + p->columns);
        }
        route_window(c, pieces, n, r, positions, shards);
    }
    golden_exact(c, "out.plan", plan, at - plan);
}

const golden_kind golden_kinds_chunks[] = {
    { "teacher shards", route_claims, route_run },
    { "KD across tokenizers", kd_claims, kd_run },
    { "chunk averages", chunks_claims, chunks_run },
    { "valid chunks", valid_claims, valid_run },
    { "projected probabilities", project_claims, project_run },
    { NULL, NULL, NULL },
};
