/* What losses across tokenizers are made of: chunks, projections, the routing of a teacher's shards. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_private.h"
#include "xd_test.h"
#include "xtoken_problem.h"

/* ---- chunks and projections ---- */

XD_TEST(chunk_ids_outside_their_range_are_refused) {
    xd_ctx *ctx = NULL;
    int64_t ids[3] = { 0, 2, -1 }, sizes[2] = { 7, 7 };
    xdi_chunk_map map;
    memset(&map, 0, sizeof map);
    map.ids = ids;
    map.sequences = 1;
    map.held = 3;
    map.chunks = 2;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xdi_chunk_sizes(ctx, &map, sizes) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "chunk id 2 of position 1 is outside [-1, 2)") != NULL);
    CHECK_EQ_INT(sizes[0], 7);
    ids[1] = 1;
    CHECK(xdi_chunk_sizes(ctx, &map, sizes) == XD_OK);
    CHECK_EQ_INT(sizes[0], 1);
    CHECK_EQ_INT(sizes[1], 1);
    xd_ctx_destroy(ctx);
}

XD_TEST(some_columns_of_a_projection_are_columns_of_the_whole) {
    problem p;
    xd_vocab *vocab = NULL;
    const int64_t columns[3] = { 1, 4, 10 }, wrong[2] = { 4, 1 };
    double whole[STUDENT_ROWS * TEACHER_SIZE], some[STUDENT_ROWS * 3], weight[STUDENT_ROWS * TEACHER_SIZE];
    float gradient[STUDENT_ROWS * STUDENT_SIZE], expected[STUDENT_ROWS * STUDENT_SIZE];
    open_problem(&p, XD_XTOKEN_PROJECTED);
    CHECK(vocab_even(p.ctx, NULL, STUDENT_SIZE, &vocab) == XD_OK);
    const xd_rows rows = rows_of(p.student, STUDENT_ROWS, STUDENT_SIZE);
    const xdi_project_desc all = { .vocab = vocab, .projection = &p.projection },
                           three = { vocab, &p.projection, columns, 3 };
    CHECK(xdi_project(p.ctx, &all, rows, whole) == XD_OK);
    CHECK(xdi_project(p.ctx, &three, rows, some) == XD_OK);
    memset(weight, 0, sizeof weight);
    for (int t = 0; t < STUDENT_ROWS; t++)
        for (int j = 0; j < 3; j++) {
            CHECK(some[t * 3 + j] == whole[t * TEACHER_SIZE + columns[j]]);
            weight[t * TEACHER_SIZE + columns[j]] = some[t * 3 + j];
        }
    CHECK(xdi_project_backward(p.ctx, &all, weight, rows_of(expected, STUDENT_ROWS, STUDENT_SIZE)) == XD_OK);
    CHECK(xdi_project_backward(p.ctx, &three, some, rows_of(gradient, STUDENT_ROWS, STUDENT_SIZE)) == XD_OK);
    CHECK(memcmp(gradient, expected, sizeof expected) == 0);
    const xdi_project_desc unordered = { vocab, &p.projection, wrong, 2 },
                           short_of = { vocab, &p.projection, NULL, 3 };
    const xdi_project_desc none = { vocab, &p.projection, columns, 0 };
    CHECK(xdi_project(p.ctx, &unordered, rows, some) == XD_ERROR_ARGUMENT);
    CHECK(xdi_project(p.ctx, &short_of, rows, some) == XD_ERROR_SHAPE);
    CHECK(xdi_project(p.ctx, &none, rows, NULL) == XD_OK); /* no column is no column */
    xd_vocab_destroy(vocab);
    close_problem(&p);
}

/* ---- exact sums ---- */

enum { RANKS = 3, HELD = 2, WIDTH = 5 };

/* The numbers of all ranks, and what rank 0 has found. */
typedef struct exact_sums {
    problem *p;
    float values[RANKS * HELD * WIDTH];
    double projected[STUDENT_ROWS * TEACHER_SIZE], sums[CHUNKS * WIDTH];
} exact_sums;

static xd_result exact_rank(xd_comm *world, void *user) {
    static const int64_t ids[RANKS * HELD] = { 0, 2, -1, 2, 0, 3 };
    exact_sums *all = (exact_sums *)user, mine = *all;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int64_t rank = xd_comm_rank(world), ranks = xd_comm_size(world), held = RANKS * HELD / ranks;
    const int64_t begin = rank * STUDENT_SIZE / ranks, end = (rank + 1) * STUDENT_SIZE / ranks;
    int64_t sizes[CHUNKS];
    xd_vocab *vocab = NULL;
    xd_rows probs = rows_of(all->p->student + begin, STUDENT_ROWS, end - begin);
    const xdi_chunk_map map = { ids + rank * held, 1, held, CHUNKS, world };
    probs.stride = STUDENT_SIZE;
    CHECK(vocab_of(ctx, world, (xd_interval){ begin, end }, STUDENT_SIZE, &vocab) == XD_OK);
    CHECK(xdi_project(ctx, &(xdi_project_desc){ vocab, &all->p->projection, NULL, TEACHER_SIZE }, probs,
                      mine.projected) == XD_OK);
    CHECK(xdi_chunk_sums(ctx, &map, rows_of(all->values + rank * held * WIDTH, held, WIDTH), mine.sums,
                         sizes) == XD_OK);
    CHECK(sizes[0] == 2 && sizes[1] == 0 && sizes[2] == 2 && sizes[3] == 1);
    if (rank == 0) *all = mine;
    xd_vocab_destroy(vocab);
    return XD_OK;
}

XD_TEST(in_invariant_mode_sums_over_ranks_have_the_bits_of_one_rank) {
    problem p;
    exact_sums one, many;
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(&one, 0, sizeof one);
    open_problem(&p, XD_XTOKEN_PROJECTED);
    fill(one.values, RANKS * HELD * WIDTH, 3.0);
    one.p = &p;
    many = one;
    desc.reduction = XD_REDUCTION_INVARIANT;
    CHECK(xd_run_threads(1, &desc, exact_rank, &one, NULL) == XD_OK);
    CHECK(xd_run_threads(RANKS, &desc, exact_rank, &many, NULL) == XD_OK);
    CHECK(memcmp(one.projected, many.projected, sizeof one.projected) == 0);
    CHECK(memcmp(one.sums, many.sums, sizeof one.sums) == 0);
    CHECK(one.sums[WIDTH] == 0.0 && one.projected[0] != 0.0); /* an empty chunk */
    close_problem(&p);
}

XD_TEST(exact_sums_leave_alone_what_they_refuse) {
    xd_ctx *ctx = NULL;
    xd_ctx_desc desc;
    float values[6] = { 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f };
    double *sums = (double *)calloc(4, sizeof *sums);
    const int64_t ids[3] = { 0, 2, 1 };
    int64_t sizes[2] = { 7, 7 };
    const xdi_chunk_map map = { ids, 1, 3, 2, NULL };
    memset(&desc, 0, sizeof desc);
    desc.reduction = XD_REDUCTION_INVARIANT;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(xdi_chunk_sums(ctx, &map, rows_of(values, 3, 2), sums, sizes) == XD_ERROR_ARGUMENT);
    CHECK(sums[0] == 0.0 && sizes[0] == 7);
    free(sums);
    xd_ctx_destroy(ctx);
}

/* ---- a teacher's shards ---- */

/* Random cuts on both sides: what is put together is the whole, bit for bit. */
XD_TEST(a_teacher_cut_in_any_way_is_put_together_again) {
    xd_ctx *ctx = NULL;
    float full[12 * 10], out[12 * 10];
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    seed = 3;
    fill(full, 120, 2.0);
    for (int round = 0; round < 40; round++) {
        const int64_t p = (int64_t)(uniform() * 13.0), v = (int64_t)(uniform() * 11.0);
        const int64_t begin = (int64_t)(uniform() * 6.0), end = begin + (int64_t)(uniform() * 7.0);
        const xdi_teacher_shard shards[4] = {
            { 0, p, 0, v }, { p, 12, 0, v }, { 0, p, v, 10 }, { p, 12, v, 10 }
        };
        xdi_teacher_piece pieces[4];
        int64_t count = 0;
        const xdi_teacher_route_desc desc = { shards, 4, begin, end, 10 };
        CHECK(xdi_teacher_route(ctx, &desc, pieces, &count) == XD_OK);
        for (int64_t i = 0; i < count; i++) {
            const xdi_teacher_shard *s = &shards[pieces[i].shard];
            xd_rows shard =
                rows_of(full + s->position_begin * 10 + s->vocabulary_begin,
                        s->position_end - s->position_begin, s->vocabulary_end - s->vocabulary_begin);
            shard.stride = 10;
            CHECK(xdi_teacher_piece_copy(ctx, &pieces[i], shard, rows_of(out, end - begin, 10)) == XD_OK);
        }
        CHECK(memcmp(out, full + begin * 10, (size_t)(end - begin) * 10 * sizeof(float)) == 0);
    }
    xd_ctx_destroy(ctx);
}

/* Numbers whose product or difference does not fit are no cover: 2^32 by 2^32 logits are 2^64. */
XD_TEST(a_window_beyond_the_numbers_is_refused) {
    const int64_t big = INT64_C(1) << 32;
    const xdi_teacher_shard empty = { 0, 0, 0, 0 }, all = { 0, big, 0, big / 2 - 1 },
                            below = { INT64_MIN, 8, 0, 8 };
    xdi_teacher_piece piece;
    int64_t count = 77;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xdi_teacher_route(ctx, &(xdi_teacher_route_desc){ &empty, 1, 0, big, big }, &piece, &count) ==
          XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "[0, 4294967296) by 4294967296 columns has more than 2^63"));
    CHECK(xdi_teacher_route(ctx, &(xdi_teacher_route_desc){ &empty, 1, INT64_MIN, INT64_MAX, 1 }, &piece,
                            &count) == XD_ERROR_SHAPE);
    CHECK(xdi_teacher_route(ctx, &(xdi_teacher_route_desc){ &below, 1, 0, 8, 8 }, &piece, &count) ==
          XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "shard 0 has more than 2^63 positions"));
    CHECK_EQ_INT(count, 77);
    CHECK(xdi_teacher_route(ctx, &(xdi_teacher_route_desc){ &all, 1, 0, big, big / 2 - 1 }, &piece, &count) ==
          XD_OK);
    CHECK(count == 1 && piece.positions == big && piece.columns == big / 2 - 1);
    xd_ctx_destroy(ctx);
}

XD_TEST(shards_that_overlap_or_leave_a_gap_are_refused) {
    const xdi_teacher_shard overlap[2] = { { 0, 4, 0, 6 }, { 3, 8, 5, 10 } },
                            gap[2] = { { 0, 8, 0, 4 }, { 0, 8, 5, 10 } };
    xdi_teacher_piece pieces[2];
    int64_t count = 77;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xdi_teacher_route(ctx, &(xdi_teacher_route_desc){ overlap, 2, 0, 8, 10 }, pieces, &count) ==
          XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "shards 0 and 1 overlap") != NULL);
    CHECK(xdi_teacher_route(ctx, &(xdi_teacher_route_desc){ gap, 2, 0, 8, 10 }, pieces, &count) ==
          XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "72 of the window's 80") != NULL);
    CHECK(xdi_teacher_route(ctx, &(xdi_teacher_route_desc){ gap, 2, 0, 8, 9 }, pieces, &count) ==
          XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(count, 77);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
