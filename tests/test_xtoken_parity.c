/* Distillation across meshes has the loss and gradient of one rank. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xtoken_parity.h"

static void check_parity(parity p) {
    xd_error error;
    xd_ctx_desc desc;
    memset(&error, 0, sizeof error);
    memset(&desc, 0, sizeof desc);
    desc.reduction = p.reduction;
    parity_prepare(&p);
    const int teachers = p.teacher.first + p.teacher.tp * p.teacher.cp * p.teacher.dp;
    const int students = p.student.first + p.student.tp * p.student.cp * p.student.dp;
    CHECK(xd_run_threads(teachers > students ? teachers : students, &desc, parity_body, &p, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
}

/* TP, CP, DP, first rank, micro-batch. The first pair is the nightly one of the reference. */
static const parity_mesh meshes[][2] = {
    { { 2, 2, 2, 0, 1 }, { 4, 2, 1, 0, 2 } }, /* as the reference's nightly run */
    { { 2, 2, 2, 0, 2 }, { 1, 1, 1, 0, 1 } }, /* to one rank */
    { { 1, 1, 1, 0, 3 }, { 2, 2, 1, 1, 2 } }, /* from one rank, that is no student */
    { { 3, 1, 1, 0, 1 }, { 2, 1, 2, 0, 2 } }, { { 1, 3, 1, 0, 2 }, { 3, 1, 1, 2, 4 } },
    { { 1, 1, 3, 1, 1 }, { 1, 3, 1, 0, 4 } }, { { 2, 1, 2, 0, 2 }, { 1, 2, 2, 4, 2 } } /* no rank is both */
};
enum { MESHES = sizeof meshes / sizeof *meshes, SOME_MESHES = 4 };

static void check_meshes(xd_xtoken_kind kind, xd_route_payload payload, bool relaxed, int count) {
    for (int i = 0; i < count; i++)
        for (int invariant = 0; invariant < 2; invariant++) {
            parity p;
            memset(&p, 0, sizeof p);
            p.teacher = meshes[i][0];
            p.student = meshes[i][1];
            p.kind = kind;
            p.payload = payload;
            p.relaxed = relaxed;
            p.messages = (i + invariant) % 2 == 1;
            p.reduction = invariant ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
            check_parity(p);
        }
}

XD_TEST(p_kl_has_parity_from_full_logits) {
    check_meshes(XD_XTOKEN_PROJECTED, XD_ROUTE_LOGITS, false, MESHES);
}

XD_TEST(p_kl_has_parity_from_hidden_states) {
    check_meshes(XD_XTOKEN_PROJECTED, XD_ROUTE_HIDDEN, false, SOME_MESHES);
}

/* J is chosen by the teacher's ranks, and k columns travel. */
XD_TEST(p_kl_has_parity_from_chosen_columns) {
    check_meshes(XD_XTOKEN_PROJECTED, XD_ROUTE_COLUMNS, false, MESHES);
}

XD_TEST(gold_has_parity) {
    check_meshes(XD_XTOKEN_GOLD, XD_ROUTE_LOGITS, false, MESHES);
}

XD_TEST(h_kl_has_parity) {
    check_meshes(XD_XTOKEN_GOLD, XD_ROUTE_HIDDEN, true, SOME_MESHES);
}

XD_TEST(one_tokenizer_has_parity) {
    check_meshes(XD_XTOKEN_SAME, XD_ROUTE_LOGITS, false, MESHES);
}

XD_TEST(chosen_columns_that_cannot_be_are_refused) {
    static const int64_t lists[4][PARITY_COLUMNS] = { { 0, 1, 3, 4, 6, 7, 10 },
                                                      { 0, 1, 3, 3, 6, 7, 10 },
                                                      { -1, 1, 3, 4, 6, 7, 10 },
                                                      { 0, 1, 3, 4, 6, 7, PARITY_TEACHER_SIZE } };
    float teacher[PARITY_TEACHER_LENGTH * PARITY_COLUMNS] = { 0 };
    int64_t positions[PARITY_TEACHER_LENGTH];
    parity_call *c = (parity_call *)calloc(1, sizeof *c);
    xd_vocab *vocab = NULL;
    xd_ctx *ctx = NULL;
    parity p;
    memset(&p, 0, sizeof p);
    for (int i = 0; i < PARITY_TEACHER_LENGTH; i++) positions[i] = i;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, PARITY_STUDENT_SIZE, &vocab) == XD_OK);
    c->count = 1;
    c->positions = c->teacher_positions = positions;
    c->held = PARITY_STUDENT_LENGTH;
    c->teacher_held = PARITY_TEACHER_LENGTH;
    c->end = PARITY_STUDENT_SIZE;
    c->teacher = rows_of(teacher, PARITY_TEACHER_LENGTH, PARITY_COLUMNS);
    c->vocab = vocab;
    for (int i = 0; i < 4; i++) {
        c->ids = lists[i];
        CHECK_EQ_INT(parity_loss(ctx, &p, c), i == 0 ? XD_OK : XD_ERROR_ARGUMENT);
    }
    CHECK(strstr(xd_last_error(ctx)->message, "teacher 0 has column 11 after 7, of 11"));
    c->ids = lists[0];
    c->teacher.cols = PARITY_COLUMNS - 1;
    CHECK_EQ_INT(parity_loss(ctx, &p, c), XD_ERROR_SHAPE);
    c->ids = NULL; /* whole rows have the whole vocabulary */
    c->teacher.cols = PARITY_COLUMNS;
    CHECK_EQ_INT(parity_loss(ctx, &p, c), XD_ERROR_SHAPE);
    c->ids = lists[0];
    p.kind = XD_XTOKEN_GOLD;
    CHECK_EQ_INT(parity_loss(ctx, &p, c), XD_ERROR_ARGUMENT);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    free(c);
}

XD_TEST_MAIN()
