/* Losses across tokenizers on many ranks against one. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "xtoken_problem.h"

/* ---- many ranks ---- */

typedef struct mesh_job {
    problem *p;
    int dp, cp, tp;
    int spoilt; /* this rank gets a wrong chunk id; 0 -> none */
    xd_result results[16];
    double gradient[STUDENT_ROWS * STUDENT_SIZE];
    xd_xtoken_values values[16];
    xd_xtoken_teacher_values teacher_values[16][3];
} mesh_job;

/* What one rank holds: sequences of its data rank, every cp-th student position, a piece of the teacher's. */
typedef struct mesh_rank {
    int64_t student_row[STUDENT_ROWS], teacher_row[TEACHER_ROWS], students, teachers;
    int64_t begin, end, first_sequence, sequences;
    float student[STUDENT_ROWS * STUDENT_SIZE], teacher[TEACHER_ROWS * TEACHER_SIZE];
    float same[STUDENT_ROWS * STUDENT_SIZE], row_weight[STUDENT_ROWS];
    int64_t labels[STUDENT_ROWS], teacher_labels[TEACHER_ROWS];
    int64_t student_chunks[STUDENT_ROWS], teacher_chunks[TEACHER_ROWS];
} mesh_rank;

static void mesh_cut(const mesh_job *job, int d, int c, mesh_rank *m) {
    m->sequences = SEQUENCES / job->dp;
    m->first_sequence = d * m->sequences;
    for (int64_t b = m->first_sequence; b < m->first_sequence + m->sequences; b++) {
        for (int64_t i = c; i < STUDENT_LENGTH; i += job->cp)
            m->student_row[m->students++] = b * STUDENT_LENGTH + i;
        for (int64_t i = TEACHER_LENGTH * c / job->cp; i < TEACHER_LENGTH * (c + 1) / job->cp; i++)
            m->teacher_row[m->teachers++] = b * TEACHER_LENGTH + i;
    }
}

static void mesh_copy(const problem *p, mesh_rank *m) {
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
    }
}

static xd_xtoken_teacher mesh_teacher(problem *p, mesh_rank *m, int index) {
    xd_xtoken_teacher t = teacher_of(p, index);
    t.logits.data = t.kind == XD_XTOKEN_SAME ? m->same : m->teacher;
    t.logits.rows = t.kind == XD_XTOKEN_SAME ? m->students : m->teachers;
    t.student_chunks = m->student_chunks;
    t.teacher_chunks = m->teacher_chunks;
    t.chunk_mask += m->first_sequence * CHUNKS;
    t.chunk_exact += m->first_sequence * CHUNKS;
    if (t.labels) t.labels = m->teacher_labels;
    return t;
}

static xd_result mesh_body(xd_comm *world, void *argument) {
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
    if (result == XD_OK)
        result = xd_vocab_create(xd_comm_ctx(world), tp, m->begin, m->end, STUDENT_SIZE, &vocab);
    desc.student = desc.gradient = rows_of(m->student, m->students, m->end - m->begin);
    if (p->teacher_count > 1)
        desc.gradient.data = calloc((size_t)(STUDENT_ROWS * STUDENT_SIZE), sizeof(float));
    desc.vocab = vocab;
    desc.sequences = m->sequences;
    desc.sequence_comm = cp;
    desc.comm = data;
    desc.sample_weight = p->sample_weight + m->first_sequence;
    desc.labels = m->labels;
    desc.row_weight = m->row_weight;
    desc.teachers = teachers;
    desc.teacher_count = p->teacher_count;
    desc.teacher_values = job->teacher_values[rank];
    if (result == XD_OK) result = xd_xtoken_loss(xd_comm_ctx(world), &desc, &job->values[rank]);
    job->results[rank] = result;
    if (job->spoilt > 0) result = xd_barrier(world); /* an error would end the others' calls early */
    for (int64_t i = 0; i < m->students; i++)
        for (int64_t v = m->begin; v < m->end; v++)
            job->gradient[m->student_row[i] * STUDENT_SIZE + v] =
                (double)((float *)desc.gradient.data)[i * (m->end - m->begin) + v - m->begin];
    if (p->teacher_count > 1) free(desc.gradient.data);
    xd_vocab_destroy(vocab);
    xd_comm_destroy(tp);
    xd_comm_destroy(cp);
    xd_comm_destroy(data);
    free(m);
    return result;
}

static void check_mesh(problem *p, const call *one, const xd_xtoken_values *whole, int dp, int cp, int tp) {
    mesh_job *job = (mesh_job *)calloc(1, sizeof *job);
    xd_error error;
    double most = 0.0;
    memset(&error, 0, sizeof error);
    job->p = p;
    job->dp = dp;
    job->cp = cp;
    job->tp = tp;
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

/* Uneven shards, one of them empty; sequences cut unevenly; a data axis. */
static void check_meshes(problem *p) {
    static const int meshes[6][3] = { { 1, 1, 2 }, { 1, 1, 3 }, { 1, 2, 1 },
                                      { 1, 3, 2 }, { 2, 1, 1 }, { 2, 2, 3 } };
    call one;
    open_call(p, &one);
    const xd_xtoken_values whole = run_call(p, &one);
    for (int i = 0; i < 6; i++) check_mesh(p, &one, &whole, meshes[i][0], meshes[i][1], meshes[i][2]);
    xd_vocab_destroy(one.vocab);
}

XD_TEST(every_mesh_has_the_loss_and_gradient_of_one_rank) {
    for (int kind = 0; kind < 3; kind++)
        for (int reverse = 0; reverse < 2; reverse++) {
            problem p;
            open_problem(&p, (xd_xtoken_kind)kind);
            p.settings.reverse = reverse == 1;
            p.settings.balance = reverse == 1;
            check_meshes(&p);
            close_problem(&p);
        }
}

XD_TEST(every_mesh_weighs_several_teachers_alike) {
    static const xd_xtoken_score scores[3] = { XD_XTOKEN_SCORE_CE, XD_XTOKEN_SCORE_ENTROPY,
                                               XD_XTOKEN_SCORE_NONE };
    for (int i = 0; i < 3; i++) {
        problem p;
        open_problem(&p, XD_XTOKEN_PROJECTED);
        p.kinds[1] = XD_XTOKEN_GOLD;
        p.kinds[2] = XD_XTOKEN_SAME;
        p.teacher_count = 3;
        p.settings.score = scores[i];
        p.settings.normalise_by_vocabulary = i == 1;
        if (i == 2) p.settings.mode = XD_XTOKEN_SELECT;
        check_meshes(&p);
        close_problem(&p);
    }
}

XD_TEST(every_mesh_averages_logits_alike) {
    problem p;
    open_problem(&p, XD_XTOKEN_SAME);
    p.kinds[1] = XD_XTOKEN_SAME;
    p.teacher_count = 2;
    p.settings.mode = XD_XTOKEN_AVERAGED_LOGITS;
    check_meshes(&p);
    close_problem(&p);
}

/* One rank alone has a wrong chunk id: every rank is told, and none waits. */
XD_TEST(ranks_fail_alike_when_one_has_a_bad_input) {
    problem p;
    xd_error error;
    mesh_job *job = (mesh_job *)calloc(1, sizeof *job);
    open_problem(&p, XD_XTOKEN_PROJECTED);
    job->p = &p;
    job->dp = job->cp = job->tp = 2;
    job->spoilt = 5;
    CHECK(xd_run_threads(8, NULL, mesh_body, job, &error) == XD_OK);
    for (int r = 0; r < 8; r++)
        CHECK_EQ_INT(job->results[r], r == job->spoilt ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    free(job);
    close_problem(&p);
}

/* ---- INVARIANT mode ---- */

XD_TEST(in_invariant_mode_every_mesh_has_the_bits_of_one_rank) {
    for (int kind = 0; kind < 3; kind++)
        for (int reverse = 0; reverse < 2; reverse++) {
            problem p;
            open_problem_as(&p, (xd_xtoken_kind)kind, XD_REDUCTION_INVARIANT);
            p.settings.reverse = reverse == 1;
            p.settings.balance = reverse == 1;
            p.settings.compat = reverse == 0 && kind == 1;
            check_meshes(&p);
            close_problem(&p);
        }
}

XD_TEST(in_invariant_mode_several_teachers_have_the_bits_of_one_rank) {
    for (int i = 0; i < 2; i++) {
        problem p;
        open_problem_as(&p, XD_XTOKEN_PROJECTED, XD_REDUCTION_INVARIANT);
        p.kinds[1] = XD_XTOKEN_GOLD;
        p.kinds[2] = XD_XTOKEN_SAME;
        p.teacher_count = 3;
        p.settings.score = i == 0 ? XD_XTOKEN_SCORE_MAX_PROB : XD_XTOKEN_SCORE_NONE;
        p.settings.mode = i == 0 ? XD_XTOKEN_SUM : XD_XTOKEN_SELECT;
        check_meshes(&p);
        close_problem(&p);
    }
}

XD_TEST(invariant_mode_agrees_with_the_default_and_keeps_infinities) {
    for (int kind = 0; kind < 3; kind++) {
        problem p[2];
        call c[2];
        xd_xtoken_values values[2];
        for (int i = 0; i < 2; i++) {
            open_problem_as(&p[i], (xd_xtoken_kind)kind,
                            i ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
            for (int t = 0; t < TEACHER_ROWS; t++) p[i].teacher[t * TEACHER_SIZE + 2] = -INFINITY;
            for (int t = 0; t < STUDENT_ROWS; t++) p[i].same[t * STUDENT_SIZE + 2] = -INFINITY;
            p[i].student[4 * STUDENT_SIZE] = NAN; /* row 4: chunk 4 of the first sequence */
            open_call(&p[i], &c[i]);
            values[i] = run_call(&p[i], &c[i]);
        }
        CHECK_NEAR(values[0].loss, values[1].loss, 1e-9);
        /* the row's cross entropy, and the chunk; SAME sees the chosen columns alone */
        CHECK_EQ_INT(c[0].status.not_finite, kind == 2 ? 1 : 2);
        CHECK_EQ_INT(c[1].status.not_finite, kind == 2 ? 1 : 2);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) CHECK(isfinite(c[0].gradient[i]));
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
            CHECK_NEAR(c[0].gradient[i], c[1].gradient[i], 1e-7);
        for (int i = 0; i < 2; i++) {
            xd_vocab_destroy(c[i].vocab);
            close_problem(&p[i]);
        }
    }
}

XD_TEST_MAIN()
