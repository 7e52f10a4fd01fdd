#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "xd_private.h"
#include "xd_test.h"

#include <math.h>

static xd_ctx *new_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

static xd_text text(const char *string) {
    const xd_text t = { string, (int64_t)strlen(string) };
    return t;
}

static void check_row(const xd_projection_rows *rows, int64_t r, const int32_t *ids, const double *weights) {
    for (int64_t i = 0; i < rows->k; i++) {
        CHECK_EQ_INT(rows->ids[r * rows->k + i], ids[i]);
        CHECK(fabs((double)rows->weights[r * rows->k + i] - weights[i]) < 1e-4);
    }
}

XD_TEST(votes_add_up_in_the_order_of_ids) {
    xd_ctx *ctx = new_ctx();
    xd_votes *votes = NULL;
    const xdi_vote *cells = NULL;
    int64_t count = 0;
    CHECK_EQ_INT(votes_create(ctx, 4, 9, &votes), XD_OK);
    CHECK_EQ_INT(xd_votes_add(votes, 2, 8, 0.5), XD_OK);
    CHECK_EQ_INT(xd_votes_add(votes, 0, 3, 1.0), XD_OK);
    CHECK_EQ_INT(xd_votes_add(votes, 2, 1, 0.25), XD_OK);
    CHECK_EQ_INT(xd_votes_add(votes, 2, 8, 0.125), XD_OK);
    for (int again = 0; again < 2; again++) { /* reading changes nothing */
        CHECK_EQ_INT(xdi_votes_read(votes, &cells, &count), XD_OK);
        CHECK_EQ_INT(count, 3);
        CHECK(cells[0].student_id == 0 && cells[0].teacher_id == 3 && cells[0].weight == 1.0);
        CHECK(cells[1].student_id == 2 && cells[1].teacher_id == 1 && cells[1].weight == 0.25);
        CHECK(cells[2].student_id == 2 && cells[2].teacher_id == 8 && cells[2].weight == 0.625);
    }
    CHECK_EQ_INT(xdi_votes_set_exact(votes, 2, 5), XD_OK);
    CHECK_EQ_INT(xdi_votes_set_exact(votes, 3, 0), XD_OK);
    CHECK_EQ_INT(xdi_votes_read(votes, &cells, &count), XD_OK);
    CHECK_EQ_INT(count, 3);
    CHECK(cells[1].student_id == 2 && cells[1].teacher_id == 5 && cells[1].weight == 1.0);
    CHECK(cells[2].student_id == 3 && cells[2].teacher_id == 0);
    CHECK_EQ_INT(xd_votes_add(votes, 4, 0, 1.0), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "student id 4 is outside a vocabulary of 4") != NULL);
    CHECK_EQ_INT(xd_votes_add(votes, 0, -1, 1.0), XD_ERROR_ARGUMENT);
    xd_votes_destroy(votes);
    xd_ctx_destroy(ctx);
}

/* The reference empties the last slot of exact rows, which for k = 1 is the only one. */
XD_TEST(an_exact_row_of_the_scale_trick_has_nothing_in_its_last_slot) {
    const int32_t exact_ids[] = { 5, 0, 1 }, other_ids[] = { 8, 1, 0 };
    const double exact_weights[] = { 1.0, 0.0, 0.0 }, other_weights[] = { 0.75 / 1.2, 0.25 / 1.2, 0.2 / 1.2 };
    const xd_projection_rows_desc three = { 3, true, true }, one = { 1, true, true };
    xd_ctx *ctx = new_ctx();
    xd_votes *votes = NULL;
    xd_projection_rows rows;
    CHECK_EQ_INT(votes_create(ctx, 2, 9, &votes), XD_OK);
    CHECK_EQ_INT(xd_votes_add(votes, 0, 8, 0.75), XD_OK);
    CHECK_EQ_INT(xd_votes_add(votes, 0, 1, 0.25), XD_OK);
    CHECK_EQ_INT(xdi_votes_set_exact(votes, 1, 5), XD_OK);
    CHECK_EQ_INT(xd_projection_rows_from_votes(votes, &three, &rows), XD_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(rows.ids[i], other_ids[i]);
        CHECK_NEAR(rows.weights[i], other_weights[i], 4e-3); /* bf16 */
        CHECK_EQ_INT(rows.ids[3 + i], exact_ids[i]);
        CHECK(rows.weights[3 + i] == (float)exact_weights[i]);
    }
    xd_projection_rows_destroy(ctx, &rows);
    CHECK_EQ_INT(xd_projection_rows_from_votes(votes, &one, &rows), XD_OK);
    CHECK(rows.weights[0] == 1.0f && rows.weights[1] == 0.0f);
    xd_projection_rows_destroy(ctx, &rows);
    xd_votes_destroy(votes);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_pass_votes_for_pieces_and_leaves_out_special_tokens) {
    const int64_t two[] = { 4, 2 }, one[] = { 3 }, bad[] = { 1, 7 };
    const int64_t foreign[] = { 7 }, own[] = { 2 };
    const xdi_vote_pieces tokens[] = {
        { text("ab"), two, 2 }, { text("<|x|>"), one, 1 }, { text("c"), one, 1 }, { text("de"), bad, 2 }
    };
    xdi_votes_pass pass;
    xd_ctx *ctx = new_ctx();
    xd_votes *votes = NULL;
    const xdi_vote *cells = NULL;
    int64_t count = 0;
    memset(&pass, 0, sizeof pass);
    pass.tokens = tokens;
    pass.count = 4;
    pass.max_pieces = 4;
    pass.skip = own;
    pass.skip_count = 1;
    pass.foreign_skip = foreign;
    pass.foreign_skip_count = 1;
    CHECK_EQ_INT(votes_create(ctx, 8, 8, &votes), XD_OK);
    CHECK_EQ_INT(xdi_votes_add_pass(votes, &pass), XD_OK);
    pass.reverse = true;
    pass.max_pieces = 1;
    pass.skip_count = 0;
    CHECK_EQ_INT(xdi_votes_add_pass(votes, &pass), XD_OK);
    CHECK_EQ_INT(xdi_votes_read(votes, &cells, &count), XD_OK);
    CHECK_EQ_INT(count, 4);
    CHECK(cells[0].student_id == 0 && cells[0].teacher_id == 2 && fabs(cells[0].weight - 1.0 / 11.0) < 1e-12);
    CHECK(cells[1].student_id == 0 && cells[1].teacher_id == 4 &&
          fabs(cells[1].weight - 10.0 / 11.0) < 1e-12);
    CHECK(cells[2].student_id == 3 && cells[2].teacher_id == 2 && cells[2].weight == 1.0);
    CHECK(cells[3].student_id == 4 && cells[3].teacher_id == 0 && cells[3].weight == 1.0);
    xd_votes_destroy(votes);
    xd_ctx_destroy(ctx);
}

XD_TEST(special_tokens_pair_by_likeness) {
    const xd_text student[] = { text("<s>"), text("word"), text("<|start_of_turn|>") };
    const xd_text teacher[] = { text("<start_of_turn>"), text("<s>"), text("x") };
    const xdi_special_desc desc = { { student, 3 }, { teacher, 3 }, 0.3, 32 };
    xd_ctx *ctx = new_ctx();
    xdi_special_pair *pairs = NULL;
    int64_t count = 0;
    CHECK_EQ_INT(xdi_special_pairs(ctx, &desc, &pairs, &count), XD_OK);
    CHECK_EQ_INT(count, 2);
    CHECK(pairs[0].student_id == 0 && pairs[0].teacher_id == 1 && fabs(pairs[0].similarity - 0.6) < 1e-12);
    /* 15 common characters of 17 and 15; the words "start" and "turn" on both sides */
    CHECK(pairs[1].student_id == 2 && pairs[1].teacher_id == 0 &&
          fabs(pairs[1].similarity - (0.6 * 30.0 / 32.0 + 0.4)) < 1e-12);
    xd_release(ctx, pairs);
    xd_ctx_destroy(ctx);
}

XD_TEST(rows_keep_the_best_and_compat_fills_the_rest) {
    xd_ctx *ctx = new_ctx();
    xd_votes *votes = NULL;
    xd_projection_rows rows;
    CHECK_EQ_INT(votes_create(ctx, 2, 5, &votes), XD_OK);
    for (int t = 0; t < 4; t++) CHECK_EQ_INT(xd_votes_add(votes, 0, t, t == 2 ? 3.0 : 1.0), XD_OK);
    const xd_projection_rows_desc plain = { 3, false, false }, compat = { 3, true, true };
    const int32_t best[] = { 2, 0, 1 }, none[] = { -1, -1, -1 }, filled[] = { 0, 1, 2 };
    const double shares[] = { 0.6, 0.2, 0.2 }, zero[] = { 0.0, 0.0, 0.0 }, trick[] = { 0.0, 0.0, 1.0 };
    CHECK_EQ_INT(xd_projection_rows_from_votes(votes, &plain, &rows), XD_OK);
    check_row(&rows, 0, best, shares);
    check_row(&rows, 1, none, zero);
    xd_projection_rows_destroy(ctx, &rows);
    CHECK_EQ_INT(xd_projection_rows_from_votes(votes, &compat, &rows), XD_OK);
    check_row(&rows, 1, filled, trick); /* the reference's arbitrary id of weight 1 */
    xd_projection_rows_destroy(ctx, &rows);
    const xd_projection_rows_desc wrong = { 3, false, true };
    CHECK_EQ_INT(xd_projection_rows_from_votes(votes, &wrong, &rows), XD_ERROR_ARGUMENT);
    xd_votes_destroy(votes);
    xd_ctx_destroy(ctx);
}

XD_TEST(cutting_keeps_the_last_entry_as_the_reference_does) {
    int32_t ids[] = { 10, 11, 12, -1, -1, 97 };
    float weights[] = { 0.5f, 0.25f, 1.0f / 12.0f, 0.0f, 0.0f, 1.0f / 6.0f };
    const xd_projection_rows in = { ids, weights, 1, 6 };
    const xdi_projection_cut_desc cut = { 4, false, false }, last = { 4, true, false },
                                  none = { -1, false, false };
    const int32_t sorted[] = { 10, 11, 97, 12 }, kept[] = { 10, 11, 97, 97 };
    const double sorted_shares[] = { 0.5, 0.25, 0.1667, 0.0833 };
    const double kept_shares[] = { 0.4615, 0.2308, 0.1538, 0.1538 };
    xd_ctx *ctx = new_ctx();
    xd_projection_rows out;
    CHECK_EQ_INT(xdi_projection_rows_cut(ctx, &in, &cut, &out), XD_OK);
    check_row(&out, 0, sorted, sorted_shares);
    xd_projection_rows_destroy(ctx, &out);
    CHECK_EQ_INT(xdi_projection_rows_cut(ctx, &in, &last, &out), XD_OK);
    check_row(&out, 0, kept, kept_shares);
    xd_projection_rows_destroy(ctx, &out);
    CHECK_EQ_INT(xdi_projection_rows_cut(ctx, &in, &none, &out), XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

XD_TEST(equal_strings_are_exact_and_the_highest_id_wins) {
    const xd_text student[] = { text("a"), text("b"), text("") },
                  teacher[] = { text("a"), text(""), text("a") };
    int32_t ids[] = { 1, 0, 1, 0, 1, 0 };
    float weights[] = { 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f };
    xd_projection_rows rows = { ids, weights, 3, 2 };
    xd_ctx *ctx = new_ctx();
    const xd_texts students = { student, 3 }, teachers = { teacher, 3 }, more = { student, 4 };
    CHECK_EQ_INT(xdi_projection_rows_apply_exact(ctx, &rows, students, teachers), XD_OK);
    CHECK(ids[0] == 2 && ids[1] == -1 && weights[0] == 1.0f && weights[1] == 0.0f);
    CHECK(ids[2] == 1 && weights[2] == 0.5f && ids[4] == 1);
    CHECK_EQ_INT(xdi_projection_rows_apply_exact(ctx, &rows, more, teachers), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "4 student strings for a projection of 3 rows") != NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_matrix_has_rows_and_columns_of_the_same_cells) {
    int32_t ids[] = { 3, 1, 3, -1, 0, 3 };
    float weights[] = { 0.5f, 0.25f, 0.25f, 9.0f, 0.0f, 1.0f };
    const xd_projection_rows rows = { ids, weights, 2, 3 };
    xd_ctx *ctx = new_ctx();
    xd_projection p;
    CHECK_EQ_INT(xd_projection_from_rows(ctx, &rows, 4, 2, &p), XD_OK);
    CHECK(p.student_size == 4 && p.teacher_size == 4 && p.entries == 4);
    CHECK(p.row_begin[0] == 0 && p.row_begin[1] == 2 && p.row_begin[2] == 4 && p.row_begin[4] == 4);
    CHECK(p.teacher_id[0] == 1 && p.weight[0] == 0.25f && p.teacher_id[1] == 3 && p.weight[1] == 0.75f);
    CHECK(p.teacher_id[2] == 0 && p.weight[2] == 0.0f && p.teacher_id[3] == 3 && p.weight[3] == 1.0f);
    CHECK(p.column_begin[0] == 0 && p.column_begin[1] == 1 && p.column_begin[2] == 2);
    CHECK(p.column_begin[3] == 2 && p.column_begin[4] == 4);
    CHECK(p.student_id[2] == 0 && p.column_weight[2] == 0.75f && p.student_id[3] == 1);
    xd_projection_destroy(ctx, &p);
    weights[0] = -1.0f;
    CHECK_EQ_INT(xd_projection_from_rows(ctx, &rows, 4, 2, &p), XD_ERROR_ARGUMENT);
    weights[0] = (float)NAN;
    CHECK_EQ_INT(xd_projection_from_rows(ctx, &rows, 4, 2, &p), XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

XD_TEST(exact_maps_settle_collisions) {
    int32_t ids[] = { 2, -1, 2, -1, 1, 0, 0, -1, 9, -1 };
    float weights[] = { 1.0f, 0.0f, 1.0f, 0.0f, 0.7f, 0.3f, 0.65f, 0.0f, 1.0f, 0.0f };
    const xd_projection_rows rows = { ids, weights, 5, 2 };
    xd_ctx *ctx = new_ctx();
    xd_exact_map map;
    CHECK_EQ_INT(exact_map_create(ctx, &rows, 4, false, &map), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "row 4 has teacher id 9, the vocabulary 4");
    CHECK_EQ_INT(exact_map_create(ctx, &rows, 4, true, &map), XD_OK); /* relaxed passes row 4 over */
    CHECK(map.pairs == 3 && map.student[0] == 0 && map.teacher[0] == 2 && map.student[2] == 3);
    CHECK(map.student_rest_count == 2 && map.student_rest[0] == 1 && map.student_rest[1] == 4);
    CHECK(map.teacher_rest_count == 1 && map.teacher_rest[0] == 3);
    xd_exact_map_destroy(ctx, &map);
    ids[8] = -1;
    CHECK_EQ_INT(exact_map_create(ctx, &rows, 4, false, &map), XD_OK);
    CHECK(map.pairs == 1 && map.student[0] == 0 && map.teacher[0] == 2);
    CHECK(map.student_rest_count == 4 && map.student_rest[0] == 1 && map.teacher_rest_count == 3);
    xd_exact_map_destroy(ctx, &map);
    weights[0] = 0.9f;
    CHECK_EQ_INT(exact_map_create(ctx, &rows, 4, true, &map), XD_OK);
    CHECK(map.pairs == 3 && map.student[0] == 1 && map.teacher[0] == 2);
    CHECK(map.student[1] == 2 && map.teacher[1] == 1 && map.student[2] == 3 && map.teacher[2] == 0);
    CHECK(map.teacher_rest_count == 1 && map.teacher_rest[0] == 3);
    xd_exact_map_destroy(ctx, &map);
    xd_ctx_destroy(ctx);
}

XD_TEST(similarities_may_stand_in_wider_rows_and_are_f32) {
    /* Two student ids, three teacher ids; a row is five apart. Embeddings whose cosines are these. */
    const float wide[] = { 1.0f, 0.0f, 0.6f, 9.0f, 9.0f, 0.0f, 1.0f, 0.8f, 9.0f, 9.0f };
    const float student[] = { 2.0f, 0.0f, 0.0f, 3.0f }, teacher[] = { 1.0f, 0.0f, 0.0f, 5.0f, 0.6f, 0.8f };
    const xdi_similarity_desc desc = { 2, 0.0 };
    xd_rows similar = xd_rows_of(wide, XD_DTYPE_F32, 2, 3), ours = xd_rows_of(student, XD_DTYPE_F32, 2, 2),
            theirs = xd_rows_of(teacher, XD_DTYPE_F32, 3, 2);
    xd_projection_rows a, b;
    xd_ctx *ctx = new_ctx();
    similar.stride = 5;
    CHECK_EQ_INT(xdi_projection_rows_from_similarities(ctx, similar, &desc, &a), XD_OK);
    CHECK_EQ_INT(xdi_projection_rows_from_embeddings(ctx, ours, theirs, &desc, &b), XD_OK);
    CHECK(a.rows == 2 && a.k == 2 && a.ids[0] == 0 && a.ids[1] == 2 && a.ids[2] == 1 && a.ids[3] == 2);
    for (int i = 0; i < 4; i++) CHECK(a.ids[i] == b.ids[i] && fabsf(a.weights[i] - b.weights[i]) < 1e-6f);
    xd_projection_rows_destroy(ctx, &a);
    xd_projection_rows_destroy(ctx, &b);
    similar.stride = 2;
    CHECK_EQ_INT(xdi_projection_rows_from_similarities(ctx, similar, &desc, &a), XD_ERROR_SHAPE);
    ours.cols = 1;
    CHECK_EQ_INT(xdi_projection_rows_from_embeddings(ctx, ours, theirs, &desc, &a), XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "1 numbers for the student and 2 for the teacher") != NULL);
    theirs.dtype = XD_DTYPE_BF16;
    CHECK_EQ_INT(xdi_projection_rows_from_embeddings(ctx, ours, theirs, &desc, &a), XD_ERROR_DTYPE);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
