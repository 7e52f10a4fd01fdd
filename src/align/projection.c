/* The sparse projection matrix, from rows or from votes, and the map of exact pairs. */

#include "align/internal.h"
#include "align/rows.h"
#include "base/extend.h"

#include <math.h>
#include <string.h>

/* ---- the sparse matrix ---- */

/* Memory of a projection with `entries` cells, in one block. */
static xd_result xdi_projection_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size,
                                       int64_t entries, xd_projection *out) {
    const size_t begins = (size_t)(student_size + teacher_size + 2) * sizeof(int64_t);
    const size_t cells = (size_t)entries * (2 * sizeof(int32_t) + 2 * sizeof(float));
    char *memory = (char *)xd_allocate(ctx, begins + cells);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a projection of %lld entries", (long long)entries);
    int64_t *begin = (int64_t *)(void *)memory;
    int32_t *ids = (int32_t *)(void *)(memory + begins);
    float *weights = (float *)(void *)(ids + 2 * entries);
    memset(out, 0, sizeof *out);
    out->student_size = student_size;
    out->teacher_size = teacher_size;
    out->entries = entries;
    out->row_begin = begin;
    out->column_begin = begin + student_size + 1;
    out->teacher_id = ids;
    out->student_id = ids + entries;
    out->weight = weights;
    out->column_weight = weights + entries;
    return XD_OK;
}

XD_API void xd_projection_destroy(xd_ctx *ctx, xd_projection *projection) {
    xd_release(ctx, (void *)projection->row_begin);
    memset(projection, 0, sizeof *projection);
}

/* From sorted cells without repetition: rows, then the transposed matrix by counting. */
static void xdi_projection_fill(const xdi_vote *cells, xd_projection *p) {
    int64_t *row = (int64_t *)p->row_begin, *column = (int64_t *)p->column_begin;
    int32_t *teacher = (int32_t *)p->teacher_id, *student = (int32_t *)p->student_id;
    float *weight = (float *)p->weight, *column_weight = (float *)p->column_weight;
    for (int64_t i = 0; i < p->entries; i++) {
        row[cells[i].student_id + 1]++;
        column[cells[i].teacher_id + 1]++;
        teacher[i] = cells[i].teacher_id;
        weight[i] = (float)cells[i].weight;
    }
    for (int64_t s = 0; s < p->student_size; s++) row[s + 1] += row[s];
    for (int64_t t = 0; t < p->teacher_size; t++) column[t + 1] += column[t];
    for (int64_t i = 0; i < p->entries; i++) {
        const int64_t at = column[cells[i].teacher_id]++; /* begins move to ends ... */
        student[at] = cells[i].student_id;
        column_weight[at] = weight[i];
    }
    for (int64_t t = p->teacher_size; t > 0; t--) column[t] = column[t - 1]; /* ... and back */
    column[0] = 0;
}

XD_PRIVATE xd_result xdi_projection_from_cells(xd_ctx *ctx, const xdi_projection_cells *list,
                                               xd_projection *out) {
    XDI_GIVEN(NULL, ctx);
    XD_REQUIRE(ctx, list, XD_ERROR_ARGUMENT, "cells is NULL");
    XDI_GIVEN(ctx, out);
    const xdi_vote *cells = list->cells, *sorted = NULL;
    const int64_t count = list->count;
    int64_t student_size = list->student_size, teacher_size = list->teacher_size;
    xd_votes *votes = NULL;
    int64_t entries = 0;
    XD_REQUIRE(ctx, count >= 0 && (cells || count == 0), XD_ERROR_ARGUMENT, "%lld cells%s", (long long)count,
               count < 0 ? "" : ", but no list of them");
    XD_REQUIRE(ctx, student_size >= 0 && teacher_size >= 0, XD_ERROR_ARGUMENT,
               "vocabularies of %lld and %lld ids", (long long)student_size, (long long)teacher_size);
    for (int64_t i = 0; i < count; i++) {
        XD_TRY(xdi_check_weight(ctx, cells[i].weight, cells[i].student_id, cells[i].teacher_id));
        if (cells[i].student_id >= student_size) student_size = (int64_t)cells[i].student_id + 1;
        if (cells[i].teacher_id >= teacher_size) teacher_size = (int64_t)cells[i].teacher_id + 1;
    }
    const xd_votes_desc sizes = { student_size, teacher_size };
    XD_TRY(xd_votes_create(ctx, &sizes, &votes));
    xd_result result = XD_OK;
    for (int64_t i = 0; i < count && result == XD_OK; i++)
        result = xd_votes_add(votes, cells[i].student_id, cells[i].teacher_id, cells[i].weight);
    if (result == XD_OK) result = xdi_votes_read(votes, &sorted, &entries);
    if (result == XD_OK) result = xdi_projection_create(ctx, student_size, teacher_size, entries, out);
    if (result == XD_OK) xdi_projection_fill(sorted, out);
    xd_votes_destroy(votes);
    return result;
}

XD_PRIVATE xd_result xdi_projection_given(xd_ctx *ctx, const xd_projection *projection) {
    XDI_GIVEN(ctx, projection->row_begin, projection->column_begin);
    XDI_GIVEN_LIST(ctx, projection->teacher_id, projection->entries);
    XDI_GIVEN_LIST(ctx, projection->weight, projection->entries);
    XDI_GIVEN_LIST(ctx, projection->student_id, projection->entries);
    XDI_GIVEN_LIST(ctx, projection->column_weight, projection->entries);
    return XD_OK;
}

XD_API xd_result xd_projection_from_rows(xd_ctx *ctx, const xd_projection_rows *rows, int64_t student_size,
                                         int64_t teacher_size, xd_projection *out) {
    XDI_GIVEN(ctx, ctx, rows, out);
    XD_TRY(xdi_check_row_weights(ctx, rows));
    XD_REQUIRE(ctx, student_size >= 0 && teacher_size >= 0, XD_ERROR_ARGUMENT,
               "vocabularies of %lld and %lld ids", (long long)student_size, (long long)teacher_size);
    const size_t most = (size_t)rows->rows * (size_t)rows->k;
    XD_REQUIRE(ctx, most <= SIZE_MAX / sizeof(xdi_vote), XD_ERROR_MEMORY, "no room for %zu entries", most);
    xdi_vote *cells = (xdi_vote *)xd_allocate(ctx, most * sizeof *cells);
    xdi_projection_cells list = { cells, 0, student_size, teacher_size };
    XD_REQUIRE(ctx, cells, XD_ERROR_MEMORY, "no room for %zu entries", most);
    for (int64_t r = 0; r < rows->rows; r++)
        for (int64_t i = r * rows->k; i < (r + 1) * rows->k; i++) {
            if (rows->ids[i] < 0) continue;
            cells[list.count].student_id = (int32_t)r;
            cells[list.count].teacher_id = rows->ids[i];
            cells[list.count++].weight = (double)rows->weights[i];
        }
    const xd_result result = xdi_projection_from_cells(ctx, &list, out);
    xd_release(ctx, cells);
    return result;
}

/* ---- the exact map ---- */

/* Index of the row's largest weight, the first stored among equals. */
static int64_t xdi_exact_best(const xd_projection_rows *rows, int64_t r) {
    int64_t best = r * rows->k;
    for (int64_t i = best + 1; i < (r + 1) * rows->k; i++)
        if (rows->weights[i] > rows->weights[best]) best = i;
    return best;
}

/* Every id of the rows is one of the teacher's vocabulary. */
static xd_result xdi_exact_check_ids(xd_ctx *ctx, const xd_projection_rows *rows, int64_t teacher_size) {
    for (int64_t i = 0; i < rows->rows * rows->k; i++)
        XD_REQUIRE(ctx, rows->ids[i] < teacher_size, XD_ERROR_ARGUMENT,
                   "row %lld has teacher id %d, the vocabulary %lld", (long long)(i / rows->k),
                   (int)rows->ids[i], (long long)teacher_size);
    return XD_OK;
}

static bool xdi_exact_candidate(const xd_projection_rows *rows, int64_t r, int64_t teacher_size,
                                bool relaxed) {
    const int64_t best = xdi_exact_best(rows, r);
    const int32_t id = rows->ids[best];
    if (id < 0 || id >= teacher_size) return false;
    if (relaxed) return rows->weights[best] >= 0.6f;
    return rows->weights[best] == 1.0f && rows->ids[r * rows->k + 1] == -1;
}

/* owner[t] = the student id that has teacher id t, or -1. */
static void xdi_exact_owners(const xd_projection_rows *rows, int64_t teacher_size, bool relaxed,
                             int32_t *owner) {
    for (int64_t t = 0; t < teacher_size; t++) owner[t] = -1;
    for (int64_t r = 0; r < rows->rows; r++) {
        if (!xdi_exact_candidate(rows, r, teacher_size, relaxed)) continue;
        const int64_t best = xdi_exact_best(rows, r);
        int32_t *mine = &owner[rows->ids[best]];
        if (*mine < 0 || (relaxed && rows->weights[best] > rows->weights[xdi_exact_best(rows, *mine)]))
            *mine = (int32_t)r;
    }
}

static void xdi_exact_fill(const xd_projection_rows *rows, int64_t teacher_size, bool relaxed,
                           const int32_t *owner, xd_exact_map *map) {
    for (int64_t r = 0; r < rows->rows; r++) {
        const int32_t id = rows->ids[xdi_exact_best(rows, r)];
        if (xdi_exact_candidate(rows, r, teacher_size, relaxed) && owner[id] == (int32_t)r) {
            map->student[map->pairs] = (int32_t)r;
            map->teacher[map->pairs++] = id;
        } else {
            map->student_rest[map->student_rest_count++] = (int32_t)r;
        }
    }
    for (int64_t t = 0; t < teacher_size; t++)
        if (owner[t] < 0) map->teacher_rest[map->teacher_rest_count++] = (int32_t)t;
}

XD_API xd_result xd_exact_map_create(xd_ctx *ctx, const xd_exact_map_desc *desc, xd_exact_map *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN(ctx, desc->rows);
    const xd_projection_rows *rows = desc->rows;
    const int64_t teacher_size = desc->teacher_size;
    const bool relaxed = desc->relaxed;
    XD_REQUIRE(ctx, relaxed || rows->k >= 2, XD_ERROR_ARGUMENT,
               "the strict exact map needs 2 entries a row, the projection has %lld", (long long)rows->k);
    XD_REQUIRE(ctx, teacher_size >= 0 && teacher_size <= INT32_MAX, XD_ERROR_ARGUMENT, "%lld teacher ids",
               (long long)teacher_size);
    XD_TRY(xdi_check_row_weights(ctx, rows));
    if (!relaxed) XD_TRY(xdi_exact_check_ids(ctx, rows, teacher_size));
    const size_t n = (size_t)rows->rows, m = (size_t)teacher_size;
    int32_t *memory = (int32_t *)xd_allocate(ctx, (3 * n + m) * sizeof *memory);
    int32_t *owner = (int32_t *)xd_allocate(ctx, m * sizeof *owner);
    if (memory && owner) {
        memset(out, 0, sizeof *out);
        out->student = memory;
        out->teacher = memory + n;
        out->student_rest = memory + 2 * n;
        out->teacher_rest = memory + 3 * n;
        xdi_exact_owners(rows, teacher_size, relaxed, owner);
        xdi_exact_fill(rows, teacher_size, relaxed, owner, out);
    } else {
        xd_release(ctx, memory);
        memory = NULL;
    }
    xd_release(ctx, owner);
    return memory ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a map of %zu and %zu ids", n, m);
}

XD_API void xd_exact_map_destroy(xd_ctx *ctx, xd_exact_map *map) {
    xd_release(ctx, map->student);
    memset(map, 0, sizeof *map);
}
