/* Losses across tokenizers on many ranks against one. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "xtoken_mesh.h"

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

/* A chunk that one rank alone works on has no finite loss: every rank names the same row and value. */
XD_TEST(ranks_name_the_same_row_that_is_not_finite) {
    for (int kind = 0; kind < 2; kind++) {
        problem p;
        xd_error error;
        mesh_job *job = (mesh_job *)calloc(1, sizeof *job);
        open_problem(&p, (xd_xtoken_kind)kind);
        p.student[4 * STUDENT_SIZE] = NAN; /* chunk 4, all of it on the second rank of the sequence */
        p.row_weight[4] = 0.0f;
        job->p = &p;
        job->dp = 1;
        job->cp = job->tp = 2;
        job->in_order = job->fails = true;
        CHECK(xd_run_threads(4, NULL, mesh_body, job, &error) == XD_OK);
        for (int r = 0; r < 4; r++) {
            CHECK_EQ_INT(job->results[r], XD_ERROR_DATA);
            CHECK_EQ_STR(job->messages[r], job->messages[0]);
        }
        CHECK(strstr(job->messages[0], "first: row 4, value nan") != NULL);
        free(job);
        close_problem(&p);
    }
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
        CHECK_NEAR(values[0].loss, values[1].loss, 1e-6);
        /* the row's cross entropy, and the chunk or position, whether J has that column or not */
        CHECK_EQ_INT(c[0].status.not_finite, 2);
        CHECK_EQ_INT(c[1].status.not_finite, 2);
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
