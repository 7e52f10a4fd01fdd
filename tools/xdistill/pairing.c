/* pairing.c - two tokenizations of a text: alignment, projection, rows. */
#include "pairing.h"
#include "ranks.h"

#include <string.h>

/* Teacher ids that a student's token stands for, at most. */
enum { PAIRING_MOST_ENTRIES = 256 };

/* ---- the whole text ---- */

/* The chunk of each of the student's tokens. */
static xd_result pairing_index(xd_ctx *ctx, pairing *p) {
    bool failed = false;
    p->chunk_of = (int32_t *)ranks_room(ctx, p->student->count, sizeof *p->chunk_of, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)p->student->count);
    for (int64_t c = 0; c < p->chunks.count; c++) {
        const xd_aligned_chunk *chunk = &p->chunks.chunks[c];
        for (int32_t i = chunk->student_begin; i < chunk->student_end; i++) p->chunk_of[i] = (int32_t)c;
    }
    return XD_OK;
}

xd_result pairing_align(xd_ctx *ctx, const tokens *student, const tokens *teacher, pairing *out,
                        xd_align_report *report) {
    const xd_align_side sides[2] = { { .spans = student->spans, .count = student->count },
                                     { .spans = teacher->spans, .count = teacher->count } };
    memset(out, 0, sizeof *out);
    out->student = student;
    out->teacher = teacher;
    xd_result result = xd_align_bytes(ctx, &sides[0], &sides[1], &out->chunks, report);
    if (result == XD_OK) result = pairing_index(ctx, out);
    if (result != XD_OK) pairing_free(ctx, out);
    return result;
}

static bool pairing_has_both(const xd_aligned_chunk *chunk) {
    return chunk->student_begin < chunk->student_end && chunk->teacher_begin < chunk->teacher_end;
}

static xd_result pairing_vote(const pairing *p, xd_votes *votes) {
    for (int64_t c = 0; c < p->chunks.count; c++) {
        const xd_aligned_chunk *chunk = &p->chunks.chunks[c];
        if (!pairing_has_both(chunk)) continue;
        XD_TRY(xd_votes_add(votes, p->student->ids[chunk->student_begin],
                            p->teacher->ids[chunk->teacher_begin], 1.0));
    }
    return XD_OK;
}

static xd_result pairing_project(xd_ctx *ctx, pairing *p, const int vocabularies[2]) {
    xd_votes *votes = NULL;
    xd_projection_rows rows;
    const xd_projection_rows_desc desc = { .k = PAIRING_MOST_ENTRIES };
    memset(&rows, 0, sizeof rows);
    XD_TRY(xd_votes_create(ctx, &(xd_votes_desc){ vocabularies[0], vocabularies[1] }, &votes));
    xd_result result = pairing_vote(p, votes);
    if (result == XD_OK) result = xd_projection_rows_from_votes(votes, &desc, &rows);
    if (result == XD_OK)
        result = xd_projection_from_rows(ctx, &rows, vocabularies[0], vocabularies[1], &p->projection);
    xd_projection_rows_destroy(ctx, &rows);
    xd_votes_destroy(votes);
    return result;
}

xd_result pairing_create(xd_ctx *ctx, const tokens *student, const tokens *teacher, const int vocabularies[2],
                         pairing *out) {
    XD_TRY(pairing_align(ctx, student, teacher, out, NULL));
    const xd_result result = pairing_project(ctx, out, vocabularies);
    if (result != XD_OK) pairing_free(ctx, out);
    return result;
}

void pairing_free(xd_ctx *ctx, pairing *p) {
    xd_projection_destroy(ctx, &p->projection);
    xd_alignment_destroy(ctx, &p->chunks);
    xd_release(ctx, p->chunk_of);
    memset(p, 0, sizeof *p);
}

/* ---- rows ---- */

xd_result pairing_row_create(xd_ctx *ctx, int length, int most, pairing_row *out) {
    bool failed = false;
    memset(out, 0, sizeof *out);
    out->length = length;
    out->places = PAIRING_PLACES * length;
    if (most > 0 && most < out->places) out->places = most;
    out->student_chunks = (int64_t *)ranks_room(ctx, length, sizeof(int64_t), &failed);
    out->teacher_chunks = (int64_t *)ranks_room(ctx, out->places, sizeof(int64_t), &failed);
    out->cache_positions = (int64_t *)ranks_room(ctx, out->places, sizeof(int64_t), &failed);
    out->mask = (uint8_t *)ranks_room(ctx, length, 1, &failed);
    return failed ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a row of %d tokens", length) : XD_OK;
}

void pairing_row_free(xd_ctx *ctx, pairing_row *row) {
    xd_release(ctx, row->student_chunks);
    xd_release(ctx, row->teacher_chunks);
    xd_release(ctx, row->cache_positions);
    xd_release(ctx, row->mask);
    memset(row, 0, sizeof *row);
}

static void pairing_clear_row(pairing_row *row) {
    memset(row->mask, 0, (size_t)row->length);
    for (int i = 0; i < row->length; i++) row->student_chunks[i] = -1;
    for (int i = 0; i < row->places; i++) row->teacher_chunks[i] = row->cache_positions[i] = -1;
    row->part = row->from = row->held = 0;
}

/* Position i of the row predicts token start + 1 + i, and position i of the teacher's token from + 1 + i. */
void pairing_read_row(const pairing *p, int64_t part_tokens, int64_t start, pairing_row *row) {
    const xd_aligned_chunk *chunks = p->chunks.chunks;
    const int64_t part = part_tokens > 0 ? part_tokens : p->teacher->count + 1;
    int64_t c = p->chunk_of[start] + 1;
    pairing_clear_row(row);
    if (c >= p->chunks.count || chunks[c].teacher_begin == 0) return;
    const int64_t from = chunks[c].teacher_begin - 1, last = start + row->length;
    row->from = from;
    row->part = from / part;
    for (int64_t n = 0; c < p->chunks.count && chunks[c].student_end <= last + 1 && n < row->length;
         c++, n++) {
        const int64_t before = chunks[c].teacher_begin - 1;
        if (before - from >= row->places || before / part != row->part) break;
        if (!pairing_has_both(&chunks[c])) continue;
        row->student_chunks[chunks[c].student_begin - start - 1] = n;
        row->teacher_chunks[before - from] = n;
        row->cache_positions[before - from] = before % part;
        row->mask[n] = 1;
        row->held = (int)(before - from + 1);
    }
}
