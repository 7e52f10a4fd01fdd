/* poison_xtoken.h - families of the losses across tokenizers. */
#ifndef XD_POISON_XTOKEN_H
#define XD_POISON_XTOKEN_H

#include "poison_files.h"
#include "poison_loss.h"
#include "vocab_calls.h"
#include "makers.h"

enum {
    POISON_XB = 2,
    POISON_XS = 6, /* student positions of a sequence */
    POISON_XT = 5, /* teacher positions */
    POISON_XC = 3, /* chunks */
    POISON_XV = 13,
    POISON_XU = 11, /* the teacher's vocabulary */
    POISON_XP = 7   /* positions of a cache */
};

/* One teacher of a kind, and a second one where teachers are weighed. Few: J is a choice of the columns. */
typedef struct poison_xtoken_variant {
    xd_xtoken_kind kind;
    int teachers;
    xd_xtoken_mode mode;
    xd_likelihood_form form;
    xd_xtoken_score score;
    bool few, reverse, known, lengths;
    bool bare;  /* no labels: nobody else reads the columns outside J */
    bool split; /* the ranks hold positions of the same sequences, and the unit's chunk is on all of them */
} poison_xtoken_variant;

static const poison_xtoken_variant poison_xtoken_variants[] = {
    { .kind = XD_XTOKEN_PROJECTED, .teachers = 1 },
    { .kind = XD_XTOKEN_PROJECTED, .teachers = 1, .few = true, .reverse = true },
    { .kind = XD_XTOKEN_PROJECTED, .teachers = 2, .score = XD_XTOKEN_SCORE_CE },
    { .kind = XD_XTOKEN_PROJECTED, .teachers = 2, .mode = XD_XTOKEN_SELECT },
    { .kind = XD_XTOKEN_PROJECTED, .teachers = 1, .few = true, .bare = true },
    { .kind = XD_XTOKEN_GOLD, .teachers = 1 },
    { .kind = XD_XTOKEN_GOLD, .teachers = 2, .score = XD_XTOKEN_SCORE_ENTROPY, .reverse = true },
    { .kind = XD_XTOKEN_SAME, .teachers = 1 },
    { .kind = XD_XTOKEN_SAME, .teachers = 2, .score = XD_XTOKEN_SCORE_MAX_PROB, .few = true },
    { .kind = XD_XTOKEN_SAME, .teachers = 2, .mode = XD_XTOKEN_AVERAGED_LOGITS, .reverse = true },
    { .kind = XD_XTOKEN_SAME, .teachers = 1, .few = true, .bare = true },
    { .kind = XD_XTOKEN_LIKELIHOOD, .teachers = 1, .lengths = true },
    { .kind = XD_XTOKEN_LIKELIHOOD, .teachers = 1, .form = XD_LIKELIHOOD_KL, .known = true },
    { .kind = XD_XTOKEN_LIKELIHOOD,
      .teachers = 2,
      .form = XD_LIKELIHOOD_KL,
      .score = XD_XTOKEN_SCORE_CE,
      .reverse = true,
      .lengths = true },
    { .kind = XD_XTOKEN_CACHED, .teachers = 1 },
    { .kind = XD_XTOKEN_CACHED, .teachers = 2, .reverse = true },
    { .kind = XD_XTOKEN_PROJECTED, .teachers = 1, .split = true },
    { .kind = XD_XTOKEN_PROJECTED, .teachers = 1, .few = true, .bare = true, .split = true },
    { .kind = XD_XTOKEN_GOLD, .teachers = 1, .split = true },
    { .kind = XD_XTOKEN_SAME, .teachers = 1, .few = true, .split = true },
    { .kind = XD_XTOKEN_CACHED, .teachers = 1, .split = true },
    { .kind = XD_XTOKEN_LIKELIHOOD, .teachers = 2, .score = XD_XTOKEN_SCORE_CE, .split = true },
};
enum { POISON_XTOKEN_VARIANTS = sizeof poison_xtoken_variants / sizeof *poison_xtoken_variants };

typedef struct poison_xtoken {
    xd_xtoken_desc desc;
    xd_xtoken_teacher teachers[2];
    xd_xtoken_teacher_values teacher_values[2];
    xd_xtoken_values values;
    xd_status status;
    double scale;
    bool reported;
    int64_t labels[POISON_XB * POISON_XS], student_chunks[POISON_XB * POISON_XS];
    int64_t teacher_labels[POISON_XB * POISON_XS], teacher_chunks[POISON_XB * POISON_XT];
    int64_t positions[POISON_XB * POISON_XT]; /* of the cache */
    uint8_t mask[POISON_XB * POISON_XS], chunk_mask[2][POISON_XB * POISON_XC];
    int student_unit[POISON_XB * POISON_XS], teacher_unit[POISON_XB * POISON_XS],
        slot_unit[POISON_XB * POISON_XC];
} poison_xtoken;

/* What release frees. */
typedef struct poison_xtoken_objects {
    xd_vocab *vocab; /* first */
    xd_projection projection;
    xd_exact_map map;
    xd_teacher_cache *cache;
    unsigned char bytes[POISON_FILE_BYTES]; /* of its file */
} poison_xtoken_objects;

static inline int64_t poison_xtoken_size(const poison_scene *s) {
    return s->size ? s->size : (int64_t)POISON_XV;
}

static inline bool poison_xtoken_same(const poison_scene *s) {
    return poison_xtoken_variants[s->variant].kind == XD_XTOKEN_SAME;
}

/* Chunks of both sides, and whose a row is. A row without a chunk is its own unit, with a number from 100 on. */
static inline void poison_xtoken_units(poison_scene *s, poison_xtoken *p) {
    static const int64_t whole[POISON_XS] = { 0, 0, 1, 1, 2, -1 },
                         whole_teacher[POISON_XT] = { 0, 1, 1, 2, -1 };
    static const int64_t parts[POISON_RANKS][POISON_XS] = { { 0, 0, 0, 0, 1, 1 },
                                                            { -1, -1, 1, 1, 1, 1 },
                                                            { 1, 2, 2, 2, 2, -1 } },
                         parts_teacher[POISON_RANKS][POISON_XT] = { { 0, 0, 0, 0, 1 },
                                                                    { -1, -1, 1, 1, 1 },
                                                                    { 1, 1, 2, 2, -1 } };
    const bool same = poison_xtoken_same(s), split = poison_xtoken_variants[s->variant].split;
    const int64_t *student = split ? parts[s->rank] : whole,
                  *teacher = split ? parts_teacher[s->rank] : whole_teacher;
    for (int r = 0; r < POISON_XB * POISON_XS; r++) {
        const int b = r / POISON_XS;
        const int64_t c = student[r % POISON_XS];
        p->student_chunks[r] = c;
        p->student_unit[r] = same ? r : c < 0 ? 100 + r : (int)(b * POISON_XC + c);
        p->labels[r] = c < 0 ? XD_IGNORE_INDEX : (r * 5 + 1) % poison_xtoken_size(s);
        p->mask[r] = 1;
        p->teacher_unit[r] = r;
        p->teacher_labels[r] = (r * 3 + 2) % (same ? poison_xtoken_size(s) : (int64_t)POISON_XU);
    }
    for (int r = 0; r < POISON_XB * POISON_XT; r++) {
        const int64_t c = p->teacher_chunks[r] = teacher[r % POISON_XT];
        p->positions[r] = c < 0 ? -1 : (r * 3 + (split ? s->rank : 0)) % POISON_XP;
        if (!same) p->teacher_unit[r] = c < 0 ? 100 + r : (int)(r / POISON_XT * POISON_XC + c);
    }
    for (int i = 0; i < POISON_XB * POISON_XC; i++) {
        p->slot_unit[i] = i;
        p->chunk_mask[0][i] = p->chunk_mask[1][i] = 1;
    }
    s->unit = same ? 2 : 1;
    s->row = 2;
    s->spread = split && !same;
}

/* A cache of the teacher's vocabulary, from a file that is gone when the call returns. Caches are written on the host. */
static inline void poison_xtoken_cache(poison_scene *s, poison_xtoken_objects *o) {
    float logits[POISON_XP * POISON_XU];
    int32_t ids[POISON_XP], next[POISON_XP];
    xd_teacher_cache_desc desc;
    xd_teacher_cache_block block;
    xd_teacher_cache_writer *writer = NULL;
    xd_ctx *host = NULL;
    char path[64];
    memset(&desc, 0, sizeof desc);
    memset(&block, 0, sizeof block);
    for (int i = 0; i < POISON_XP * POISON_XU; i++) logits[i] = (float)(3.0 * poison_noise(77, i, 0));
    for (int i = 0; i < POISON_XP; i++) {
        ids[i] = i;
        next[i] = i + 1 < POISON_XP ? i + 1 : -1;
    }
    desc.vocabulary = POISON_XU;
    desc.k = 4;
    desc.temperature = 1.5;
    block.logits = xd_rows_of(logits, XD_DTYPE_F32, POISON_XP, POISON_XU);
    block.ids = ids;
    block.next = next;
    poison_path(s, path);
    CHECK_EQ_INT(xd_ctx_create(NULL, &host), XD_OK);
    CHECK_EQ_INT(cache_writer_create(host, path, &desc, &writer), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(writer, NULL, 0), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(writer, &block), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(writer), XD_OK);
    xd_ctx_destroy(host);
    FILE *file = fopen(path, "rb");
    const size_t size = file ? fread(o->bytes, 1, sizeof o->bytes, file) : 0;
    if (file) fclose(file);
    remove(path);
    CHECK_EQ_INT(cache_open_memory(s->ctx, o->bytes, size, NULL, &o->cache), XD_OK);
}

static inline bool poison_xtoken_objects_build(poison_scene *s) {
    int32_t ids[POISON_WIDE * 2];
    float weights[POISON_WIDE * 2];
    const int size = (int)poison_xtoken_size(s);
    const xd_projection_rows rows = { ids, weights, size, 2 };
    poison_xtoken_objects *o = (poison_xtoken_objects *)calloc(1, sizeof *o);
    s->objects = o;
    s->compound = true;
    for (int v = 0; v < size; v++) {
        const bool exact = v % 3 == 0;
        ids[2 * v] = (int32_t)(v * 5 % POISON_XU);
        ids[2 * v + 1] = exact ? -1 : (int32_t)((v * 5 + 3) % POISON_XU);
        weights[2 * v] = exact ? 1.0f : 0.7f;
        weights[2 * v + 1] = exact ? 0.0f : 0.3f;
    }
    CHECK_EQ_INT(vocab_even(s->ctx, s->layout == POISON_VOCABULARY ? s->world : NULL, size, &o->vocab),
                 XD_OK);
    CHECK_EQ_INT(xd_projection_from_rows(s->ctx, &rows, size, POISON_XU, &o->projection), XD_OK);
    CHECK_EQ_INT(exact_map_create(s->ctx, &rows, POISON_XU, false, &o->map), XD_OK);
    if (poison_xtoken_variants[s->variant].kind == XD_XTOKEN_CACHED) poison_xtoken_cache(s, o);
    return true;
}

static inline void poison_release_xtoken(poison_scene *s) {
    poison_xtoken_objects *o = (poison_xtoken_objects *)s->objects;
    xd_vocab_destroy(o->vocab);
    xd_projection_destroy(s->ctx, &o->projection);
    xd_exact_map_destroy(s->ctx, &o->map);
    xd_teacher_cache_close(o->cache);
    free(o);
}

static inline poison_part *poison_xtoken_list(poison_scene *s, const char *name, int64_t rows,
                                              const int *unit, double middle, double size) {
    poison_part *part = poison_matrix(s, name, POISON_IN, XD_DTYPE_F32, rows, 1);
    part->unit = unit;
    poison_fill(part, 31 + (uint64_t)s->part_count, middle, size);
    return part;
}

static inline void poison_xtoken_teacher(poison_scene *s, poison_xtoken *p, int index) {
    static const char *const names[2] = { "teacher", "another teacher" };
    const poison_xtoken_variant *v = poison_xtoken_variants + s->variant;
    const poison_xtoken_objects *o = (const poison_xtoken_objects *)s->objects;
    const bool same = v->kind == XD_XTOKEN_SAME;
    const int64_t rows = POISON_XB * (same ? POISON_XS : POISON_XT);
    xd_xtoken_teacher *t = &p->teachers[index];
    *t = xd_xtoken_teacher_defaults(v->kind);
    t->student_chunks = p->student_chunks;
    t->teacher_chunks = p->teacher_chunks;
    t->chunks = POISON_XC;
    t->chunk_mask = p->chunk_mask[index];
    t->projected.projection = &o->projection;
    t->gold.map = &o->map;
    t->likelihood.form = v->form;
    t->labels = xd_ids_of(p->teacher_labels, XD_DTYPE_I64);
    t->denominator_value = 7.0;
    t->weight = 1.0 + 0.5 * index;
    if (v->kind == XD_XTOKEN_CACHED) {
        t->logits.rows = rows;
        t->cached.cache = o->cache;
        t->cached.positions = p->positions;
        t->cached.projection = &o->projection;
    } else if (v->known) {
        t->logits.rows = rows;
        t->likelihood.target_log_probs =
            (const float *)poison_xtoken_list(s, "target_log_probs", rows, p->teacher_unit, -3.0, 1.0)->data;
    } else {
        poison_part *logits = poison_matrix(s, names[index], POISON_IN, XD_DTYPE_F32, rows,
                                            same ? poison_xtoken_size(s) : (int64_t)POISON_XU);
        poison_fill(logits,
                    2 + (uint64_t)index + (s->layout == POISON_ROWS_SPLIT ? 100 * (uint64_t)s->rank : 0), 0.0,
                    3.0);
        logits->unit = p->teacher_unit;
        t->logits = poison_rows(logits);
    }
    if (v->lengths)
        t->likelihood.chunk_length = (const float *)poison_xtoken_list(
                                         s, "chunk_length", POISON_XB * POISON_XC, p->slot_unit, 4.0, 1.0)
                                         ->data;
    if (v->mode == XD_XTOKEN_SELECT || v->score == XD_XTOKEN_SCORE_CE)
        t->label_weight =
            (const float *)poison_xtoken_list(s, "label_weight", rows, p->teacher_unit, 1.0, 0.5)->data;
    else if (v->score != XD_XTOKEN_SCORE_NONE)
        t->position_weight =
            (const float *)poison_xtoken_list(s, "position_weight", rows, p->teacher_unit, 1.0, 0.5)->data;
    poison_one(s, "teacher.weight", POISON_IN | POISON_ONE, &t->weight);
    if (!same) poison_one(s, "teacher.denominator_value", POISON_IN | POISON_ONE, &t->denominator_value);
    poison_one(s, "kd of a teacher", POISON_TOTAL | POISON_SAME, &p->teacher_values[index].kd);
    poison_one(s, "omega", POISON_TOTAL | POISON_SAME, &p->teacher_values[index].weight);
    poison_one(s, "divergence", POISON_TOTAL | POISON_SAME, &p->teacher_values[index].divergence);
    poison_one(s, "tail", POISON_TOTAL | POISON_SAME, &p->teacher_values[index].tail);
    poison_one(s, "agreeing", POISON_TOTAL | POISON_SAME | POISON_LOOSE, &p->teacher_values[index].agreeing);
}

static inline void poison_xtoken_results(poison_scene *s, poison_xtoken *p) {
    poison_one(s, "loss", POISON_TOTAL | POISON_SAME, &p->values.loss);
    poison_one(s, "kd", POISON_TOTAL | POISON_SAME, &p->values.kd);
    poison_one(s, "ce", POISON_TOTAL | POISON_SAME, &p->values.ce);
    poison_one(s, "balance", POISON_TOTAL | POISON_SAME, &p->values.balance);
    poison_one(s, "right", POISON_TOTAL | POISON_SAME | POISON_LOOSE, &p->values.right);
    poison_one(s, "tokens", POISON_TOTAL | POISON_SAME | POISON_LOOSE, &p->values.tokens);
}

static inline bool poison_xtoken_build(poison_scene *s) {
    const poison_xtoken_variant *v = poison_xtoken_variants + s->variant;
    if (v->split && s->layout != POISON_ROWS_SPLIT) return false;
    poison_xtoken *p = (poison_xtoken *)(s->own = poison_take(s, sizeof *p));
    xd_xtoken_desc *d = &p->desc;
    if (!poison_xtoken_objects_build(s)) return false;
    poison_xtoken_units(s, p);
    *d = xd_xtoken_defaults();
    poison_part *student = poison_shard(s, "student", POISON_IN, XD_DTYPE_F32, POISON_XB * POISON_XS,
                                        poison_columns(s), poison_xtoken_size(s));
    student->unit = p->student_unit;
    poison_fill(student, s->layout == POISON_ROWS_SPLIT ? 1 + 100 * (uint64_t)s->rank : 1, 0.0, 3.0);
    d->student = poison_rows(student);
    d->vocab = ((poison_xtoken_objects *)s->objects)->vocab;
    d->sequences = POISON_XB;
    poison_part *sample =
        poison_matrix(s, "sample_weight", POISON_IN | POISON_ONE, XD_DTYPE_F32, 1, POISON_XB);
    poison_fill(sample, 8, 1.0, 0.25);
    d->sample_weight = (const float *)sample->data;
    if (!v->bare) d->common.labels = xd_ids_of(p->labels, XD_DTYPE_I64);
    d->common.mask = p->mask;
    d->common.row_weight =
        (const float *)poison_xtoken_list(s, "row_weight", POISON_XB * POISON_XS, p->student_unit, 1.0, 0.5)
            ->data;
    d->common.denominator_value = 9.0;
    d->common.comm = s->data;
    if (v->split) d->sequence_comm = s->world;
    d->common.scale = &p->scale;
    p->scale = 0.75;
    d->mode = v->mode;
    d->score = v->score;
    d->reverse = v->reverse;
    d->temperature = 1.5;
    d->columns = v->few ? 6 : 100;
    d->tail = 4;
    d->teachers = p->teachers;
    d->teacher_count = v->teachers;
    d->teacher_values = p->teacher_values;
    for (int i = 0; i < v->teachers; i++) poison_xtoken_teacher(s, p, i);
    poison_part *gradient =
        poison_matrix(s, "gradient", POISON_OUT, XD_DTYPE_F32, POISON_XB * POISON_XS, d->student.cols);
    gradient->unit = p->student_unit;
    d->common.gradient = poison_rows(gradient);
    poison_one(s, "scale", POISON_IN | POISON_ONE, &p->scale);
    poison_one(s, "temperature", POISON_IN | POISON_ONE, &d->temperature);
    poison_one(s, "kd_weight", POISON_IN | POISON_ONE, &d->kd_weight);
    poison_one(s, "ce_weight", POISON_IN | POISON_ONE, &d->ce_weight);
    poison_one(s, "denominator_value", POISON_IN | POISON_ONE, &d->common.denominator_value);
    if (v->score != XD_XTOKEN_SCORE_NONE) poison_one(s, "alpha", POISON_IN | POISON_ONE, &d->alpha);
    poison_xtoken_results(s, p);
    s->status = &p->status;
    p->reported = true;
    s->reported = &p->reported;
    s->wide = v->few || (v->kind == XD_XTOKEN_SAME && v->mode != XD_XTOKEN_AVERAGED_LOGITS &&
                         d->columns < poison_xtoken_size(s)); /* J is a choice */
    s->weighed = v->score != XD_XTOKEN_SCORE_NONE || v->mode == XD_XTOKEN_SELECT;
    return true;
}

static inline xd_result poison_xtoken_call(poison_scene *s) {
    poison_xtoken *p = (poison_xtoken *)s->own;
    p->desc.common.status = p->reported ? &p->status : NULL;
    return xd_xtoken_loss(s->ctx, &p->desc, &p->values);
}

/* What the teacher gives is left out with its chunk; the rows still have a cross entropy. */
static inline int poison_xtoken_found_way(const poison_scene *s, const poison_part *part) {
    if (!strcmp(part->name, "student") || part->role & POISON_ONE) return 3;
    return poison_xtoken_same(s) ? -1 : !strncmp(part->name, "another", 7) ? 4 : 2;
}

/* 0: the chunk and its rows do not count, nor are they scored. 1: its sequence has no weight. For comparison: 3: as 0, but
 * scored. 2, 4: the chunk of one teacher does not count and is not scored. Of a chunk on several ranks the rows of rank 1 alone
 * have the value, and no cross entropy or score when only that is left out. */
static inline void poison_xtoken_leave_out(poison_scene *s, int way) {
    const poison_xtoken_variant *v = poison_xtoken_variants + s->variant;
    poison_xtoken *p = (poison_xtoken *)s->own;
    const int64_t teacher_rows = v->kind == XD_XTOKEN_SAME ? POISON_XS : POISON_XT;
    if (s->layout == POISON_ROWS_SPLIT && s->rank != 1 && !v->split) return;
    const bool of[2] = { way != 4, way != 2 }; /* teachers */
    const bool mine = s->layout != POISON_ROWS_SPLIT || s->rank == 1;
    for (int i = 0; i < 2; i++)
        if (way != 1 && v->kind != XD_XTOKEN_SAME && of[i]) p->chunk_mask[i][s->unit] = 0;
    if (way == 1) ((float *)p->desc.sample_weight)[0] = 0.0f;
    for (int r = 0; r < POISON_XS; r++)
        if (way == 1 || (way != 2 && way != 4 && p->student_unit[r] == s->unit && mine)) p->mask[r] = 0;
    for (int r = 0; r < teacher_rows && way != 3; r++) {
        if (way != 1 && (p->teacher_unit[r] != s->unit || !mine)) continue;
        for (int i = 0; i < p->desc.teacher_count; i++) {
            if (!of[i]) continue;
            if (p->teachers[i].label_weight) ((float *)p->teachers[i].label_weight)[r] = 0.0f;
            if (p->teachers[i].position_weight) ((float *)p->teachers[i].position_weight)[r] = 0.0f;
        }
    }
}

static inline poison_verdict poison_expect_xtoken(const poison_scene *s, const poison_part *part,
                                                  double value) {
    const bool finite = isfinite(value) != 0, weight = finite && value >= 0.0;
    const bool fixed = xd_ctx_settings(s->ctx)->reduction == XD_REDUCTION_INVARIANT;
    if (!strcmp(part->name, "sample_weight"))
        return weight && value < (fixed ? 4194304.0 : 1e30) ? POISON_CALL : POISON_REFUSED;
    if (strstr(part->name, "denominator_value")) return weight ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "temperature")) return finite && value > 0.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "scale")) return POISON_CALL;
    if (part->role & POISON_ONE) return finite ? POISON_CALL : POISON_REFUSED;
    if (strstr(part->name, "_weight"))
        return weight && value < (fixed ? 4194304.0 : 1e30) ? POISON_EITHER : POISON_REFUSED;
    if (!strcmp(part->name, "chunk_length")) return finite && value > 0.0 ? POISON_EITHER : POISON_REFUSED;
    if (!strcmp(part->name, "target_log_probs"))
        return isnan(value) || value > 1.0 ? POISON_FOUND : POISON_EITHER;
    if (fabs(value) <= 500.0) return POISON_FINE;
    return finite || value < 0.0 ? POISON_EITHER : POISON_FOUND;
}

static const poison_family poison_family_xtoken = {
    "xd_xtoken_loss",        POISON_XTOKEN_VARIANTS, 2,
    { true, true, true },    poison_xtoken_build,    poison_xtoken_call,
    poison_xtoken_leave_out, poison_expect_xtoken,   poison_release_xtoken,
    poison_xtoken_found_way,
};

/* ---- xd_uld_loss: local, and findings are an error ---- */

enum { POISON_ULD_T = 5, POISON_ULD_V = 7 };

typedef struct poison_uld {
    xd_uld_desc desc;
    xd_uld_values values;
    xd_aligned_chunk chunks[POISON_ULD_T - 1];
    int64_t ids[POISON_ULD_T], matched[2];
    int teacher_unit[POISON_ULD_T];
} poison_uld;

static inline poison_part *poison_uld_side(poison_scene *s, const char *name, int64_t vocabulary,
                                           xd_uld_side *side) {
    poison_part *logits = poison_matrix(s, name, POISON_IN, XD_DTYPE_F32, POISON_ULD_T, vocabulary);
    poison_fill(logits, (uint64_t)vocabulary, 0.0, 3.0);
    side->logits = poison_rows(logits);
    side->vocabulary = vocabulary;
    side->ids = ((poison_uld *)s->own)->ids;
    side->temperature = 1.5;
    return logits;
}

/* Token i + 1 of both sides is chunk i, which row i predicts; variants: without and with matched ids. */
static inline bool poison_uld_build(poison_scene *s) {
    poison_uld *p = (poison_uld *)(s->own = poison_take(s, sizeof *p));
    xd_uld_desc *d = &p->desc;
    for (int i = 0; i < POISON_ULD_T; i++) p->ids[i] = i + 1;
    for (int i = 0; i + 1 < POISON_ULD_T; i++) {
        p->chunks[i].student_begin = p->chunks[i].teacher_begin = i + 1;
        p->chunks[i].student_end = p->chunks[i].teacher_end = i + 2;
    }
    p->matched[0] = 0, p->matched[1] = 3;
    poison_uld_side(s, "student", POISON_ULD_V, &d->student);
    poison_uld_side(s, "teacher", POISON_ULD_V + 2, &d->teacher);
    d->chunks = p->chunks;
    d->chunk_count = POISON_ULD_T - 1;
    d->matched_student = d->matched_teacher = s->variant ? p->matched : NULL;
    d->matched_count = s->variant ? 2 : 0;
    d->matched_weight = d->unmatched_weight = 0.5;
    d->beta = 0.3;
    d->denominator = 4.0;
    d->scale = 1.0;
    d->gradient =
        poison_rows(poison_matrix(s, "gradient", POISON_OUT, XD_DTYPE_F32, POISON_ULD_T, POISON_ULD_V));
    poison_one(s, "temperature", POISON_IN | POISON_ONE, &d->student.temperature);
    poison_one(s, "scale", POISON_IN | POISON_ONE, &d->scale);
    poison_one(s, "denominator", POISON_IN | POISON_ONE, &d->denominator);
    poison_one(s, "beta", POISON_IN | POISON_ONE, &d->beta);
    if (s->variant) poison_one(s, "matched_weight", POISON_IN | POISON_ONE, &d->matched_weight);
    poison_one(s, "loss", POISON_TOTAL, &p->values.loss);
    poison_one(s, "matched", POISON_TOTAL, &p->values.matched);
    poison_one(s, "unmatched", POISON_TOTAL, &p->values.unmatched);
    s->unit = 2;
    return true;
}

static inline xd_result poison_uld_call(poison_scene *s) {
    poison_uld *p = (poison_uld *)s->own;
    return xd_uld_loss(s->ctx, &p->desc, &p->values);
}

static inline void poison_uld_leave_out(poison_scene *s, int way) {
    poison_uld *p = (poison_uld *)s->own;
    if (way == 0)
        p->chunks[s->unit].teacher_end = p->chunks[s->unit].teacher_begin;
    else
        p->chunks[s->unit].student_end = p->chunks[s->unit].student_begin;
}

static inline poison_verdict poison_expect_uld(const poison_scene *s, const poison_part *part, double value) {
    (void)s;
    if (!strcmp(part->name, "beta")) return value >= 0.0 && value <= 1.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "temperature"))
        return isfinite(value) && value > 0.0 ? POISON_CALL : POISON_REFUSED;
    if (!strcmp(part->name, "denominator"))
        return isfinite(value) && value >= 0.0 ? POISON_CALL : POISON_REFUSED;
    if (part->role & POISON_ONE) return isfinite(value) ? POISON_CALL : POISON_REFUSED;
    if (fabs(value) <= 500.0) return POISON_FINE;
    return isfinite(value) || value < 0.0 ? POISON_EITHER : POISON_FOUND;
}

static const poison_family poison_family_uld = {
    "xd_uld_loss",
    2,
    2,
    { true, false, false },
    poison_uld_build,
    poison_uld_call,
    poison_uld_leave_out,
    poison_expect_uld,
    NULL,
    NULL,
};

#endif
