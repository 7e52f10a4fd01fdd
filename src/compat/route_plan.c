/* NeMo-RL's plan for teacher shards, for comparing plans. */

#include "compat/route_plan.h"
#include "loss/internal.h"
#include "teacher/internal.h"

/* The shard's part of the window; false when there is none. */
static bool xdi_route_cut(const xdi_teacher_shard *s, int64_t begin, int64_t end, xdi_teacher_shard *out) {
    *out = *s;
    if (out->position_begin < begin) out->position_begin = begin;
    if (out->position_end > end) out->position_end = end;
    return out->position_begin < out->position_end && out->vocabulary_begin < out->vocabulary_end;
}

/* Ends of any sign may be more than INT64_MAX apart. */
static uint64_t xdi_route_extent(int64_t begin, int64_t end) {
    return (uint64_t)end - (uint64_t)begin;
}

static xd_result xdi_route_check(xd_ctx *ctx, const xdi_teacher_route_desc *d) {
    XD_REQUIRE(ctx, d->count >= 0 && (d->shards || d->count == 0), XD_ERROR_ARGUMENT, "%lld shards%s",
               (long long)d->count, d->count < 0 ? "" : ", but no list of them");
    XD_REQUIRE(ctx, d->begin <= d->end && d->vocabulary >= 0, XD_ERROR_ARGUMENT,
               "a window of positions [%lld, %lld) by %lld columns", (long long)d->begin, (long long)d->end,
               (long long)d->vocabulary);
    const int64_t most = d->vocabulary > 0 ? INT64_MAX / d->vocabulary : INT64_MAX;
    XD_REQUIRE(ctx, xdi_route_extent(d->begin, d->end) <= (uint64_t)most, XD_ERROR_SHAPE,
               "a window of positions [%lld, %lld) by %lld columns has more than 2^63 logits",
               (long long)d->begin, (long long)d->end, (long long)d->vocabulary);
    for (int64_t i = 0; i < d->count; i++) {
        const xdi_teacher_shard *s = &d->shards[i];
        XD_REQUIRE(ctx, s->position_begin <= s->position_end && s->vocabulary_begin <= s->vocabulary_end,
                   XD_ERROR_ARGUMENT, "shard %lld is [%lld, %lld) by [%lld, %lld)", (long long)i,
                   (long long)s->position_begin, (long long)s->position_end, (long long)s->vocabulary_begin,
                   (long long)s->vocabulary_end);
        XD_REQUIRE(ctx, xdi_route_extent(s->position_begin, s->position_end) <= (uint64_t)INT64_MAX,
                   XD_ERROR_SHAPE, "shard %lld has more than 2^63 positions, [%lld, %lld)", (long long)i,
                   (long long)s->position_begin, (long long)s->position_end);
        XD_REQUIRE(ctx, s->vocabulary_begin >= 0 && s->vocabulary_end <= d->vocabulary, XD_ERROR_ARGUMENT,
                   "shard %lld has columns [%lld, %lld) of a vocabulary of %lld", (long long)i,
                   (long long)s->vocabulary_begin, (long long)s->vocabulary_end, (long long)d->vocabulary);
    }
    return XD_OK;
}

static bool xdi_route_overlap(const xdi_teacher_shard *a, const xdi_teacher_shard *b) {
    return a->position_begin < b->position_end && b->position_begin < a->position_end &&
           a->vocabulary_begin < b->vocabulary_end && b->vocabulary_begin < a->vocabulary_end;
}

/* Disjoint rectangles whose areas add up to the window's cover it. */
static xd_result xdi_route_cover(xd_ctx *ctx, const xdi_teacher_route_desc *d) {
    const xdi_teacher_shard *shards = d->shards;
    const int64_t begin = d->begin, end = d->end;
    int64_t area = 0;
    for (int64_t i = 0; i < d->count; i++) {
        xdi_teacher_shard mine, other;
        if (!xdi_route_cut(&shards[i], begin, end, &mine)) continue;
        area += (mine.position_end - mine.position_begin) * (mine.vocabulary_end - mine.vocabulary_begin);
        for (int64_t j = 0; j < i; j++)
            XD_REQUIRE(ctx,
                       !xdi_route_cut(&shards[j], begin, end, &other) || !xdi_route_overlap(&mine, &other),
                       XD_ERROR_SHAPE, "shards %lld and %lld overlap", (long long)j, (long long)i);
    }
    XD_REQUIRE(ctx, area == (end - begin) * d->vocabulary, XD_ERROR_SHAPE,
               "shards hold %lld of the window's %lld logits", (long long)area,
               (long long)((end - begin) * d->vocabulary));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_teacher_route(xd_ctx *ctx, const xdi_teacher_route_desc *desc,
                                       xdi_teacher_piece *pieces, int64_t *piece_count) {
    XDI_GIVEN(ctx, ctx, desc, pieces, piece_count);
    const xdi_teacher_shard *shards = desc->shards;
    int64_t n = 0;
    XD_TRY(xdi_route_check(ctx, desc));
    XD_TRY(xdi_route_cover(ctx, desc));
    for (int64_t i = 0; i < desc->count; i++) {
        xdi_teacher_shard part;
        if (!xdi_route_cut(&shards[i], desc->begin, desc->end, &part)) continue;
        pieces[n].shard = i;
        pieces[n].from_position = part.position_begin - shards[i].position_begin;
        pieces[n].from_column = 0;
        pieces[n].to_position = part.position_begin - desc->begin;
        pieces[n].to_column = part.vocabulary_begin;
        pieces[n].positions = part.position_end - part.position_begin;
        pieces[n++].columns = part.vocabulary_end - part.vocabulary_begin;
    }
    *piece_count = n;
    return XD_OK;
}

static xd_result xdi_route_check_rows(xd_ctx *ctx, const char *name, const xd_rows *rows, int64_t position,
                                      int64_t column, const xdi_teacher_piece *piece) {
    XD_TRY(xdi_rows_check(ctx, name, rows));
    XD_REQUIRE(
        ctx,
        position >= 0 && column >= 0 && piece->positions >= 0 && piece->columns >= 0 &&
            position <= rows->rows && piece->positions <= rows->rows - position && column <= rows->cols &&
            piece->columns <= rows->cols - column,
        XD_ERROR_SHAPE,
        "a piece of %lld positions from %lld on by %lld columns from %lld on leaves %s of %lld by %lld",
        (long long)piece->positions, (long long)position, (long long)piece->columns, (long long)column, name,
        (long long)rows->rows, (long long)rows->cols);
    return XD_OK;
}

/* The piece's elements of rows that it begins in at a position and a column. */
static xd_rows xdi_route_part_of(const xd_rows *rows, int64_t position, int64_t column,
                                 const xdi_teacher_piece *piece) {
    xd_rows part = *rows;
    part.stride = rows->stride ? rows->stride : rows->cols;
    part.rows = piece->positions;
    part.cols = piece->columns;
    part.data =
        (unsigned char *)rows->data + (size_t)(position * part.stride + column) * xd_dtype_size(rows->dtype);
    return part;
}

XD_PRIVATE xd_result xdi_teacher_piece_copy(xd_ctx *ctx, const xdi_teacher_piece *piece, xd_rows shard,
                                            xd_rows window) {
    XDI_GIVEN(ctx, ctx, piece);
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    XD_TRY(xdi_route_check_rows(ctx, "shard", &shard, piece->from_position, piece->from_column, piece));
    XD_TRY(xdi_route_check_rows(ctx, "window", &window, piece->to_position, piece->to_column, piece));
    if (piece->positions == 0 || piece->columns == 0) return XD_OK;
    const xd_rows from = xdi_route_part_of(&shard, piece->from_position, piece->from_column, piece);
    const xd_rows to = xdi_route_part_of(&window, piece->to_position, piece->to_column, piece);
    return xdi_rows_copy(ctx, kernels, &from, &to);
}
