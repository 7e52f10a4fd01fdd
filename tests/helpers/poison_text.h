/* poison_text.h - families of what projections are made from. A number that no weight and no similarity can be is refused. */
#ifndef XD_POISON_TEXT_H
#define XD_POISON_TEXT_H

#include "poison.h"
#include "xd_private.h"
#include "makers.h"

enum { POISON_R = 6, POISON_C = 5, POISON_P = 3 };

typedef struct poison_text {
    xdi_vote cells[POISON_R];
    xd_projection_rows rows;
    xd_projection_rows_desc from_votes;
    xdi_similarity_desc similarity;
    xdi_projection_cut_desc cut;
    xdi_special_desc special;
    xd_rows student, teacher;
    int32_t ids[POISON_R * POISON_P];
    double weight;
    float *out;
} poison_text;

static inline poison_text *poison_text_begin(poison_scene *s) {
    poison_text *p = (poison_text *)(s->own = poison_take(s, sizeof *p));
    for (int i = 0; i < POISON_R; i++) {
        p->cells[i].student_id = i;
        p->cells[i].teacher_id = i % POISON_C;
        p->cells[i].weight = 1.0 + i;
        for (int j = 0; j < POISON_P; j++) p->ids[i * POISON_P + j] = (i + j) % POISON_C;
    }
    p->from_votes.k = p->similarity.k = p->cut.k = POISON_P;
    p->weight = 1.5;
    p->out = (float *)poison_matrix(s, "weights of the result", POISON_OUT, XD_DTYPE_F32, POISON_R, POISON_P)
                 ->data;
    s->unit = 2;
    return p;
}

static inline void poison_text_take(poison_text *p, const xd_projection_rows *made) {
    for (int64_t i = 0; i < made->rows * made->k && i < POISON_R * POISON_P; i++)
        p->out[i] = made->weights[i];
}

static inline poison_verdict poison_expect_weight(const poison_scene *s, const poison_part *part,
                                                  double value) {
    (void)s, (void)part;
    if (value >= 0.0 && value <= 3e38) return POISON_LEGAL;
    return POISON_REFUSED;
}

/* ---- votes and rows made from them ---- */

static inline bool poison_votes_build(poison_scene *s) {
    poison_text *p = poison_text_begin(s);
    poison_one(s, "weight", POISON_IN | POISON_ONE, &p->weight);
    return true;
}

static inline xd_result poison_votes_call(poison_scene *s) {
    poison_text *p = (poison_text *)s->own;
    xd_projection_rows made;
    xd_votes *votes = NULL;
    xd_result result = votes_create(s->ctx, POISON_R, POISON_C, &votes);
    for (int i = 0; i < POISON_R && result == XD_OK; i++) result = xd_votes_add(votes, i, i % POISON_C, 2.0);
    if (result == XD_OK) result = xd_votes_add(votes, 2, 4, p->weight);
    if (result == XD_OK) result = xd_projection_rows_from_votes(votes, &p->from_votes, &made);
    if (result == XD_OK) {
        poison_text_take(p, &made);
        xd_projection_rows_destroy(s->ctx, &made);
    }
    xd_votes_destroy(votes);
    return result;
}

static const poison_family poison_family_votes = {
    "xd_votes_add",       1,    0,    { true, false, false }, poison_votes_build, poison_votes_call, NULL,
    poison_expect_weight, NULL, NULL,
};

/* ---- xdi_projection_from_cells ---- */

static inline bool poison_cells_build(poison_scene *s) {
    poison_text *p = poison_text_begin(s);
    poison_one(s, "weight", POISON_IN | POISON_ONE, &p->cells[2].weight);
    return true;
}

static inline xd_result poison_cells_call(poison_scene *s) {
    poison_text *p = (poison_text *)s->own;
    const xdi_projection_cells list = { p->cells, POISON_R, POISON_R, POISON_C };
    xd_projection made;
    const xd_result result = xdi_projection_from_cells(s->ctx, &list, &made);
    if (result != XD_OK) return result;
    for (int i = 0; i < POISON_R; i++) p->out[i] = made.weight[i];
    xd_projection_destroy(s->ctx, &made);
    return XD_OK;
}

static const poison_family poison_family_cells = {
    "xdi_projection_from_cells",
    1,
    0,
    { true, false, false },
    poison_cells_build,
    poison_cells_call,
    NULL,
    poison_expect_weight,
    NULL,
    NULL,
};

/* ---- calls that read rows ---- */

static inline bool poison_weights_build(poison_scene *s) {
    poison_text *p = poison_text_begin(s);
    poison_part *weights = poison_matrix(s, "weights", POISON_IN, XD_DTYPE_F32, POISON_R, POISON_P);
    poison_fill(weights, 3, 0.5, 0.4);
    p->rows.ids = p->ids;
    p->rows.weights = (float *)weights->data;
    p->rows.rows = POISON_R;
    p->rows.k = POISON_P;
    return true;
}

static inline xd_result poison_from_rows_call(poison_scene *s) {
    poison_text *p = (poison_text *)s->own;
    xd_projection made;
    const xd_result result = xd_projection_from_rows(s->ctx, &p->rows, POISON_R, POISON_C, &made);
    if (result != XD_OK) return result;
    for (int64_t i = 0; i < made.entries && i < POISON_R * POISON_P; i++) p->out[i] = made.weight[i];
    xd_projection_destroy(s->ctx, &made);
    return XD_OK;
}

static inline xd_result poison_cut_call(poison_scene *s) {
    poison_text *p = (poison_text *)s->own;
    xd_projection_rows made;
    const xd_result result = xdi_projection_rows_cut(s->ctx, &p->rows, &p->cut, &made);
    if (result != XD_OK) return result;
    poison_text_take(p, &made);
    xd_projection_rows_destroy(s->ctx, &made);
    return XD_OK;
}

static inline xd_result poison_map_call(poison_scene *s) {
    poison_text *p = (poison_text *)s->own;
    xd_exact_map made;
    const xd_result result = exact_map_create(s->ctx, &p->rows, POISON_C, true, &made);
    if (result != XD_OK) return result;
    p->out[0] = (float)made.student_rest_count;
    xd_exact_map_destroy(s->ctx, &made);
    return XD_OK;
}

static const poison_family poison_family_from_rows = {
    "xd_projection_from_rows",
    1,
    0,
    { true, false, false },
    poison_weights_build,
    poison_from_rows_call,
    NULL,
    poison_expect_weight,
    NULL,
    NULL,
};
static const poison_family poison_family_cut = {
    "xdi_projection_rows_cut",
    1,
    0,
    { true, false, false },
    poison_weights_build,
    poison_cut_call,
    NULL,
    poison_expect_weight,
    NULL,
    NULL,
};
static const poison_family poison_family_map = {
    "xd_exact_map_create", 1,    0,    { true, false, false }, poison_weights_build, poison_map_call, NULL,
    poison_expect_weight,  NULL, NULL,
};

/* ---- similarities and embeddings ---- */

static inline bool poison_similar_build(poison_scene *s) {
    poison_text *p = poison_text_begin(s);
    const bool embeddings = strstr(s->family->name, "embeddings") != NULL;
    poison_part *student = poison_matrix(s, "student", POISON_IN, XD_DTYPE_F32, POISON_R, POISON_C);
    poison_fill(student, 4, 0.0, 0.9);
    p->student = poison_rows(student);
    if (embeddings) {
        poison_part *teacher = poison_matrix(s, "teacher", POISON_IN, XD_DTYPE_F32, POISON_R, POISON_C);
        poison_fill(teacher, 5, 0.0, 0.9);
        p->teacher = poison_rows(teacher);
    }
    poison_one(s, "threshold", POISON_IN | POISON_ONE, &p->similarity.threshold);
    return true;
}

static inline xd_result poison_similar_call(poison_scene *s) {
    poison_text *p = (poison_text *)s->own;
    xd_projection_rows made;
    const xd_result result =
        p->teacher.data
            ? xdi_projection_rows_from_embeddings(s->ctx, p->student, p->teacher, &p->similarity, &made)
            : xdi_projection_rows_from_similarities(s->ctx, p->student, &p->similarity, &made);
    if (result != XD_OK) return result;
    poison_text_take(p, &made);
    xd_projection_rows_destroy(s->ctx, &made);
    return XD_OK;
}

static inline poison_verdict poison_expect_similar(const poison_scene *s, const poison_part *part,
                                                   double value) {
    const poison_text *p = (const poison_text *)s->own;
    if (!isfinite(value)) return POISON_REFUSED;
    if (part->role & POISON_ONE || p->teacher.data) return POISON_LEGAL;
    return fabs(value) <= 1.01 ? POISON_LEGAL : POISON_REFUSED;
}

static const poison_family poison_family_similarities = {
    "xdi_projection_rows_from_similarities",
    1,
    0,
    { true, false, false },
    poison_similar_build,
    poison_similar_call,
    NULL,
    poison_expect_similar,
    NULL,
    NULL,
};
static const poison_family poison_family_embeddings = {
    "xdi_projection_rows_from_embeddings",
    1,
    0,
    { true, false, false },
    poison_similar_build,
    poison_similar_call,
    NULL,
    poison_expect_similar,
    NULL,
    NULL,
};

/* ---- xdi_special_pairs ---- */

static inline bool poison_special_build(poison_scene *s) {
    static const xd_text texts[2] = { { "<start of text>", 15 }, { "<end of text>", 13 } };
    poison_text *p = poison_text_begin(s);
    p->special.student.texts = p->special.teacher.texts = texts;
    p->special.student.count = p->special.teacher.count = 2;
    p->special.threshold = 0.3;
    p->special.max_pairs = 2;
    poison_one(s, "threshold", POISON_IN | POISON_ONE, &p->special.threshold);
    return true;
}

static inline xd_result poison_special_call(poison_scene *s) {
    poison_text *p = (poison_text *)s->own;
    xdi_special_pair *pairs = NULL;
    int64_t count = 0;
    const xd_result result = xdi_special_pairs(s->ctx, &p->special, &pairs, &count);
    if (result != XD_OK) return result;
    p->out[0] = (float)count;
    xd_release(s->ctx, pairs);
    return XD_OK;
}

static inline poison_verdict poison_expect_threshold(const poison_scene *s, const poison_part *part,
                                                     double value) {
    (void)s, (void)part;
    return isfinite(value) ? POISON_LEGAL : POISON_REFUSED;
}

static const poison_family poison_family_special = {
    "xdi_special_pairs",
    1,
    0,
    { true, false, false },
    poison_special_build,
    poison_special_call,
    NULL,
    poison_expect_threshold,
    NULL,
    NULL,
};

#endif
