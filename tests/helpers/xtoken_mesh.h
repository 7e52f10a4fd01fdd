/* The problem of xtoken_problem.h on many ranks against one. */
#ifndef XTOKEN_MESH_H
#define XTOKEN_MESH_H

#include "xtoken_problem.h"
#include "vocab_calls.h"

typedef struct mesh_job {
    problem *p;
    int dp, cp, tp;
    bool in_order; /* ranks of a sequence hold neighbouring positions, so that most chunks lie on one */
    int spoilt;    /* this rank gets an invalid chunk id; 0 -> none */
    bool fails;    /* the loss is an error, and the ranks go on to report it */
    xd_result results[16];
    char messages[16][sizeof(((xd_error *)NULL)->message)];
    double gradient[STUDENT_ROWS * STUDENT_SIZE];
    xd_xtoken_values values[16];
    xd_xtoken_teacher_values teacher_values[16][3];
} mesh_job;

/* What one rank holds: sequences of its data rank, every cp-th student position, a block of the teacher's, the last block
 * first; or, in order, the same block of both. */
typedef struct mesh_rank {
    int64_t student_row[STUDENT_ROWS], teacher_row[TEACHER_ROWS], students, teachers;
    int64_t begin, end, first_sequence, sequences;
    float student[STUDENT_ROWS * STUDENT_SIZE], teacher[TEACHER_ROWS * TEACHER_SIZE];
    float same[STUDENT_ROWS * STUDENT_SIZE], row_weight[STUDENT_ROWS];
    int64_t labels[STUDENT_ROWS], teacher_labels[TEACHER_ROWS];
    int64_t student_chunks[STUDENT_ROWS], teacher_chunks[TEACHER_ROWS];
    int64_t cache_positions[TEACHER_ROWS];
    float target_log_probs[TEACHER_ROWS];
} mesh_rank;

static inline void mesh_cut(const mesh_job *job, int d, int c, mesh_rank *m) {
    const int piece = job->in_order ? c : job->cp - 1 - c, step = job->in_order ? 1 : job->cp;
    const int64_t begin = job->in_order ? STUDENT_LENGTH * c / job->cp : c;
    const int64_t end = job->in_order ? STUDENT_LENGTH * (c + 1) / job->cp : STUDENT_LENGTH;
    m->sequences = SEQUENCES / job->dp;
    m->first_sequence = d * m->sequences;
    for (int64_t b = m->first_sequence; b < m->first_sequence + m->sequences; b++) {
        for (int64_t i = begin; i < end; i += step) m->student_row[m->students++] = b * STUDENT_LENGTH + i;
        for (int64_t i = TEACHER_LENGTH * piece / job->cp; i < TEACHER_LENGTH * (piece + 1) / job->cp; i++)
            m->teacher_row[m->teachers++] = b * TEACHER_LENGTH + i;
    }
}

static inline void mesh_copy(const problem *p, mesh_rank *m) {
    const int64_t columns = m->end - m->begin;
    for (int64_t i = 0; i < m->students; i++) {
        const int64_t row = m->student_row[i];
        memcpy(m->student + i * columns, p->student + row * STUDENT_SIZE + m->begin,
               (size_t)columns * sizeof(float));
        memcpy(m->same + i * STUDENT_SIZE, p->same + row * STUDENT_SIZE, STUDENT_SIZE * sizeof(float));
        m->row_weight[i] = p->row_weight[row];
        m->labels[i] = p->labels[row];
        m->student_chunks[i] = p->student_chunks[row];
    }
    for (int64_t i = 0; i < m->teachers; i++) {
        const int64_t row = m->teacher_row[i];
        memcpy(m->teacher + i * TEACHER_SIZE, p->teacher + row * TEACHER_SIZE, TEACHER_SIZE * sizeof(float));
        m->teacher_labels[i] = p->teacher_labels[row];
        m->teacher_chunks[i] = p->teacher_chunks[row];
        m->cache_positions[i] = p->cache_positions[row];
        m->target_log_probs[i] = p->target_log_probs[row];
    }
}

static inline xd_xtoken_teacher mesh_teacher(problem *p, mesh_rank *m, int index) {
    xd_xtoken_teacher t = teacher_of(p, index);
    if (t.logits.data) t.logits.data = t.kind == XD_XTOKEN_SAME ? m->same : m->teacher;
    t.logits.rows = t.kind == XD_XTOKEN_SAME ? m->students : m->teachers;
    t.student_chunks = m->student_chunks;
    t.teacher_chunks = m->teacher_chunks;
    t.chunk_mask += m->first_sequence * CHUNKS;
    t.chunk_exact += m->first_sequence * CHUNKS;
    if (t.labels.data) t.labels.data = m->teacher_labels;
    if (t.cached.positions) t.cached.positions = m->cache_positions;
    if (t.likelihood.target_log_probs) t.likelihood.target_log_probs = m->target_log_probs;
    if (t.likelihood.chunk_length) t.likelihood.chunk_length += m->first_sequence * CHUNKS;
    return t;
}

static inline xd_result mesh_body(xd_comm *world, void *argument) {
    mesh_job *job = (mesh_job *)argument;
    problem *p = job->p;
    const int rank = xd_comm_rank(world), t = rank % job->tp, c = rank / job->tp % job->cp;
    const int d = rank / job->tp / job->cp;
    static const int64_t cuts[5][5] = {
        { 0 }, { 0, 13 }, { 0, 4, 13 }, { 0, 5, 5, 13 }, { 0, 1, 7, 12, 13 }
    };
    xd_comm *tp = NULL, *cp = NULL, *data = NULL;
    xd_vocab *vocab = NULL;
    xd_xtoken_teacher teachers[3];
    xd_xtoken_desc desc = p->settings;
    mesh_rank *m = (mesh_rank *)calloc(1, sizeof *m);
    m->begin = cuts[job->tp][t];
    m->end = cuts[job->tp][t + 1];
    mesh_cut(job, d, c, m);
    mesh_copy(p, m);
    if (job->spoilt > 0 && rank == job->spoilt) m->student_chunks[0] = CHUNKS;
    for (int i = 0; i < p->teacher_count; i++) teachers[i] = mesh_teacher(p, m, i);
    xd_result result = xd_comm_split(world, rank / job->tp, rank, &tp);
    if (result == XD_OK) result = xd_comm_split(world, d * job->tp + t, rank, &cp);
    if (result == XD_OK) result = xd_comm_split(world, t, rank, &data);
    const xd_interval columns = { m->begin, m->end };
    if (result == XD_OK) result = vocab_of(xd_comm_ctx(world), tp, columns, STUDENT_SIZE, &vocab);
    desc.student = desc.common.gradient = rows_of(m->student, m->students, m->end - m->begin);
    if (p->teacher_count > 1)
        desc.common.gradient.data = calloc((size_t)(STUDENT_ROWS * STUDENT_SIZE), sizeof(float));
    desc.vocab = vocab;
    desc.sequences = m->sequences;
    desc.sequence_comm = cp;
    desc.common.comm = data;
    desc.sample_weight = p->sample_weight + m->first_sequence;
    desc.common.labels.data = m->labels;
    desc.common.row_weight = m->row_weight;
    desc.teachers = teachers;
    desc.teacher_count = p->teacher_count;
    desc.teacher_values = job->teacher_values[rank];
    if (result == XD_OK) result = XTOKEN_LOSS(xd_comm_ctx(world), &desc, &job->values[rank]);
    job->results[rank] = result;
    strcpy(job->messages[rank], xd_last_error(xd_comm_ctx(world))->message);
    if (job->spoilt > 0 || job->fails)
        result = xd_barrier(world); /* an error would end the other ranks' calls early */
    for (int64_t i = 0; i < m->students; i++)
        for (int64_t v = m->begin; v < m->end; v++)
            job->gradient[m->student_row[i] * STUDENT_SIZE + v] =
                (double)((float *)desc.common.gradient.data)[i * (m->end - m->begin) + v - m->begin];
    if (p->teacher_count > 1) free(desc.common.gradient.data);
    xd_vocab_destroy(vocab);
    xd_comm_destroy(tp);
    xd_comm_destroy(cp);
    xd_comm_destroy(data);
    free(m);
    return result;
}

static inline void check_mesh(problem *p, const call *one, const xd_xtoken_values *whole, int dp, int cp,
                              int tp, bool in_order) {
    mesh_job *job = (mesh_job *)calloc(1, sizeof *job);
    xd_error error;
    double most = 0.0;
    memset(&error, 0, sizeof error);
    job->p = p;
    job->dp = dp;
    job->cp = cp;
    job->tp = tp;
    job->in_order = in_order;
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = xd_ctx_settings(p->ctx)->reduction;
    const bool exact = desc.reduction == XD_REDUCTION_INVARIANT;
    CHECK(xd_run_threads(dp * cp * tp, &desc, mesh_body, job, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
    for (int r = 0; r < dp * cp * tp; r++) {
        CHECK_NEAR(job->values[r].loss, whole->loss, exact ? 0.0 : 1e-7 * fabs(whole->loss));
        CHECK_NEAR(job->values[r].ce, whole->ce, exact ? 0.0 : 1e-7 * fabs(whole->ce));
        CHECK_NEAR(job->values[r].right, whole->right, 1e-12);
        CHECK(job->values[r].loss == job->values[0].loss); /* the same bits on every rank */
        for (int i = 0; i < p->teacher_count; i++) {
            CHECK_NEAR(job->teacher_values[r][i].agreeing, one->teacher_values[i].agreeing, 1e-12);
            CHECK_NEAR(job->teacher_values[r][i].weight, one->teacher_values[i].weight, 1e-7);
        }
    }
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) most = fmax(most, fabs((double)one->gradient[i]));
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
        CHECK_NEAR(job->gradient[i], one->gradient[i], exact ? 0.0 : 1e-6 * most);
    free(job);
}

/* Uneven shards, one of them empty; sequences cut unevenly; a data axis. Of these meshes one, turn % XTOKEN_MESHES; with ranks that
 * compute one after the other some of them. */
enum { XTOKEN_MESHES = 6, XTOKEN_MESHES_IN_ORDER = 3 };

static inline void check_mesh_of(problem *p, const call *one, const xd_xtoken_values *whole, int turn,
                                 bool in_order) {
    static const int meshes[XTOKEN_MESHES][3] = { { 1, 1, 2 }, { 1, 1, 3 }, { 1, 2, 1 },
                                                  { 1, 3, 2 }, { 2, 1, 1 }, { 2, 2, 3 } };
    static const int some[XTOKEN_MESHES_IN_ORDER] = { 2, 3, 5 };
    const int *m = meshes[in_order ? some[turn % XTOKEN_MESHES_IN_ORDER] : turn % XTOKEN_MESHES];
    check_mesh(p, one, whole, m[0], m[1], m[2], in_order);
}

static inline void check_meshes(problem *p) {
    call one;
    open_call(p, &one);
    const xd_xtoken_values whole = run_call(p, &one);
    for (int i = 0; i < XTOKEN_MESHES; i++) check_mesh_of(p, &one, &whole, i, false);
    for (int i = 0; i < XTOKEN_MESHES_IN_ORDER; i++) check_mesh_of(p, &one, &whole, i, true);
    xd_vocab_destroy(one.vocab);
}

/* Two of them, others for each pair of problems: where a mesh takes seconds, and check_meshes goes through all elsewhere. */
static inline void check_some_meshes(problem *p, int turn) {
    call one;
    open_call(p, &one);
    const xd_xtoken_values whole = run_call(p, &one);
    check_mesh_of(p, &one, &whole, turn / 2, false);
    check_mesh_of(p, &one, &whole, turn / 2 + 1, true);
    xd_vocab_destroy(one.vocab);
}

#endif
