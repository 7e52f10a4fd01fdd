/* A small problem across two tokenizers, which the tests of xd_xtoken_loss use. */
#ifndef XTOKEN_PROBLEM_H
#define XTOKEN_PROBLEM_H

#include "xdistill.h"
#include "makers.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xtoken_rows.h"

#include <stdlib.h>

/* The loss that is tested; tests on a GPU have their own, over copies of the arrays. */
#if !defined(XTOKEN_LOSS)
#    define XTOKEN_LOSS xd_xtoken_loss
#endif

enum {
    SEQUENCES = 2,
    STUDENT_LENGTH = 7,
    TEACHER_LENGTH = 9,
    STUDENT_SIZE = 13,
    TEACHER_SIZE = 11,
    CHUNKS = 6
};
enum { STUDENT_ROWS = SEQUENCES * STUDENT_LENGTH, TEACHER_ROWS = SEQUENCES * TEACHER_LENGTH };

typedef struct problem {
    xd_ctx *ctx;
    float student[STUDENT_ROWS * STUDENT_SIZE];
    float teacher[TEACHER_ROWS * TEACHER_SIZE];
    float same[STUDENT_ROWS * STUDENT_SIZE];
    int64_t labels[STUDENT_ROWS], teacher_labels[TEACHER_ROWS];
    float row_weight[STUDENT_ROWS], sample_weight[SEQUENCES];
    int64_t student_chunks[STUDENT_ROWS], teacher_chunks[TEACHER_ROWS];
    uint8_t mask[SEQUENCES * CHUNKS], exact[SEQUENCES * CHUNKS];
    xd_projection projection;
    xd_exact_map map;
    xd_teacher_cache *cache; /* CACHED, and LIKELIHOOD where there is one */
    int64_t cache_positions[TEACHER_ROWS];
    float target_log_probs[TEACHER_ROWS], chunk_length[SEQUENCES * CHUNKS];
    bool known, lengths; /* LIKELIHOOD: target_log_probs are given; chunks have lengths */
    xd_likelihood_form likelihood;
    xd_xtoken_kind kinds[3];
    int teacher_count;
    xd_xtoken_desc settings;
} problem;

static uint32_t seed;

static inline double uniform(void) {
    seed = seed * 1664525u + 1013904223u;
    return (double)(seed >> 8) / 16777216.0;
}

static inline void fill(float *x, int count, double width) {
    for (int i = 0; i < count; i++) x[i] = (float)((uniform() - 0.5) * width);
}

/* Two entries per row; every third id has one partner of weight 1. */
static inline void make_projection(problem *p) {
    int32_t ids[STUDENT_SIZE * 2];
    float weights[STUDENT_SIZE * 2];
    const xd_projection_rows rows = { ids, weights, STUDENT_SIZE, 2 };
    for (int v = 0; v < STUDENT_SIZE; v++) {
        const bool exact = v % 3 == 0;
        ids[2 * v] = (int32_t)(v * 5 % TEACHER_SIZE);
        ids[2 * v + 1] = exact ? -1 : (int32_t)((v * 5 + 3) % TEACHER_SIZE);
        weights[2 * v] = exact ? 1.0f : 0.7f;
        weights[2 * v + 1] = exact ? 0.0f : 0.3f;
    }
    CHECK(xd_projection_from_rows(p->ctx, &rows, STUDENT_SIZE, TEACHER_SIZE, &p->projection) == XD_OK);
    CHECK(exact_map_create(p->ctx, &rows, TEACHER_SIZE, false, &p->map) == XD_OK);
}

static inline void open_problem_as(problem *p, xd_xtoken_kind kind, xd_reduction reduction) {
    static const int64_t student[STUDENT_LENGTH] = { 0, 1, 1, 2, 4, 4, -1 };
    static const int64_t teacher[TEACHER_LENGTH] = { 0, 0, 1, 2, 2, 2, 3, 4, -1 };
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(p, 0, sizeof *p);
    seed = 7;
    desc.reduction = reduction;
    CHECK(xd_ctx_create(&desc, &p->ctx) == XD_OK);
    fill(p->student, STUDENT_ROWS * STUDENT_SIZE, 6.0);
    fill(p->teacher, TEACHER_ROWS * TEACHER_SIZE, 6.0);
    fill(p->same, STUDENT_ROWS * STUDENT_SIZE, 6.0);
    for (int i = 0; i < STUDENT_ROWS; i++) {
        p->labels[i] = i % STUDENT_LENGTH == 6 ? XD_IGNORE_INDEX : (i * 5 + 1) % STUDENT_SIZE;
        p->row_weight[i] = i == 3 ? 0.0f : 1.0f;
        p->student_chunks[i] = student[i % STUDENT_LENGTH];
    }
    for (int i = 0; i < TEACHER_ROWS; i++) {
        p->teacher_chunks[i] = teacher[i % TEACHER_LENGTH];
        p->teacher_labels[i] = (i * 3 + 2) % TEACHER_SIZE;
    }
    p->student_chunks[STUDENT_LENGTH + 4] = 5; /* the second sequence differs: chunk 5 has no teacher */
    for (int i = 0; i < SEQUENCES * CHUNKS; i++) {
        p->mask[i] = 1;
        p->exact[i] = (uint8_t)(i % CHUNKS != 2);
    }
    p->sample_weight[0] = 1.0f;
    p->sample_weight[1] = 0.5f;
    make_projection(p);
    p->kinds[0] = kind;
    p->teacher_count = 1;
    p->settings.temperature = 1.5;
    p->settings.alpha = 1.0;
    p->settings.columns = 8;
    p->settings.tail = 5;
    p->settings.kd_weight = 0.8;
    p->settings.ce_weight = 0.6;
}

static inline void open_problem(problem *p, xd_xtoken_kind kind) {
    open_problem_as(p, kind, XD_REDUCTION_DETERMINISTIC);
}

static inline void close_problem(problem *p) {
    xd_teacher_cache_close(p->cache);
    xd_projection_destroy(p->ctx, &p->projection);
    xd_exact_map_destroy(p->ctx, &p->map);
    xd_ctx_destroy(p->ctx);
}

static inline xd_xtoken_teacher teacher_of(problem *p, int index) {
    xd_xtoken_teacher t;
    memset(&t, 0, sizeof t);
    t.kind = p->kinds[index];
    t.logits = rows_of(p->teacher, TEACHER_ROWS, TEACHER_SIZE);
    t.student_chunks = p->student_chunks;
    t.teacher_chunks = p->teacher_chunks;
    t.chunks = CHUNKS;
    t.chunk_mask = p->mask;
    t.chunk_exact = p->exact;
    t.projected.projection = &p->projection;
    t.gold.map = &p->map;
    t.labels.data = p->teacher_labels;
    t.weight = 1.0 + 0.5 * index;
    if (t.kind == XD_XTOKEN_SAME) {
        t.logits = rows_of(p->same, STUDENT_ROWS, STUDENT_SIZE);
        t.labels.data = NULL;
    }
    if (t.kind == XD_XTOKEN_CACHED || (t.kind == XD_XTOKEN_LIKELIHOOD && (p->cache || p->known))) {
        t.logits.data = NULL;
        t.labels.data = NULL;
        t.cached.cache = p->cache;
        if (t.kind == XD_XTOKEN_CACHED) t.cached.projection = &p->projection;
        t.cached.positions = p->cache ? p->cache_positions : NULL;
        t.likelihood.target_log_probs = p->known ? p->target_log_probs : NULL;
    }
    t.likelihood.form = p->likelihood;
    t.likelihood.chunk_length = p->lengths ? p->chunk_length : NULL;
    return t;
}

/* Everything a test may change about one call. */
typedef struct call {
    xd_xtoken_desc d;
    xd_xtoken_teacher teachers[3];
    xd_xtoken_teacher_values teacher_values[3];
    xd_vocab *vocab;
    float gradient[STUDENT_ROWS * STUDENT_SIZE];
    xd_status status;
} call;

static inline void open_call(problem *p, call *c) {
    memset(c, 0, sizeof *c);
    c->d = p->settings;
    CHECK(vocab_even(p->ctx, NULL, STUDENT_SIZE, &c->vocab) == XD_OK);
    c->d.student = rows_of(p->student, STUDENT_ROWS, STUDENT_SIZE);
    c->d.vocab = c->vocab;
    c->d.sequences = SEQUENCES;
    c->d.sample_weight = p->sample_weight;
    c->d.common.labels.data = p->labels;
    c->d.common.row_weight = p->row_weight;
    for (int i = 0; i < p->teacher_count; i++) c->teachers[i] = teacher_of(p, i);
    c->d.teachers = c->teachers;
    c->d.teacher_count = p->teacher_count;
    c->d.common.gradient = rows_of(c->gradient, STUDENT_ROWS, STUDENT_SIZE);
    c->d.teacher_values = c->teacher_values;
    c->d.common.status = &c->status;
}

static inline xd_xtoken_values run_call(problem *p, call *c) {
    xd_xtoken_values values;
    memset(&values, 0, sizeof values);
    CHECK(XTOKEN_LOSS(p->ctx, &c->d, &values) == XD_OK);
    return values;
}

/* Central differences in float logits against the gradient, for some elements. */
static inline void check_differences(problem *p, call *c) {
    run_call(p, c);
    xd_xtoken_desc d = c->d;
    d.common.gradient.data = NULL;
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i += 5) {
        const float kept = p->student[i], step = 1.0f / 512.0f;
        xd_xtoken_values up, down;
        p->student[i] = kept + step;
        CHECK(xd_xtoken_loss(p->ctx, &d, &up) == XD_OK);
        const float above = p->student[i];
        p->student[i] = kept - step;
        CHECK(xd_xtoken_loss(p->ctx, &d, &down) == XD_OK);
        const double slope = (up.loss - down.loss) / ((double)above - (double)p->student[i]);
        p->student[i] = kept;
        CHECK_NEAR(slope, c->gradient[i], 2e-5 * fmax(1.0, fabs((double)c->gradient[i])));
    }
}

#endif
