/* demo_bridge.c - from the student's tokens to the teacher's: the chunks of the text, and the vocabularies. */
#include "demo.h"

#include <string.h>

enum { DEMO_MOST_ENTRIES = 1024 }; /* teacher tokens that a student token stands for, at most */

static xd_align_side demo_side(const demo_text *text) {
    xd_align_side side;
    memset(&side, 0, sizeof side);
    side.spans = text->spans;
    side.count = text->count;
    return side;
}

/* The whole text is aligned once; rows cut windows out of it. */
static xd_result demo_align(xd_ctx *ctx, demo_bridge *b) {
    const xd_align_side student = demo_side(b->student), teacher = demo_side(b->teacher);
    int64_t chunk = 0;
    XD_TRY(xd_align_bytes(ctx, &student, &teacher, &b->alignment, NULL));
    b->first_chunk = (int64_t *)xd_allocate(ctx, ((size_t)student.count + 1) * sizeof *b->first_chunk);
    if (!b->first_chunk) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the chunks of a text");
    for (int64_t i = 0; i < student.count; i++) {
        while (chunk < b->alignment.count && b->alignment.chunks[chunk].student_begin < i) chunk++;
        b->first_chunk[i] = chunk;
    }
    return XD_OK;
}

/* Exact maps know tokens that both vocabularies have, or that are nearly all of another. The matrix links every
 * teacher's token to the student's token that begins it, and the other way round: with it the student's
 * probabilities of next tokens become those of what the teacher may say next. */
static xd_result demo_map_vocabularies(xd_ctx *ctx, const xd_tokenizer *student, const xd_tokenizer *teacher,
                                       demo_bridge *b) {
    xd_projection_options options = xd_projection_defaults();
    const xd_projection_desc desc = { student, teacher, &options, NULL };
    xd_projection pieces;
    xd_projection_rows rows;
    memset(&pieces, 0, sizeof pieces);
    memset(&rows, 0, sizeof rows);
    xd_result result = xd_projection_build(ctx, &desc, &pieces, NULL);
    if (result == XD_OK) result = xd_projection_to_rows(ctx, &pieces, 0, &rows);
    xd_exact_map_desc map = { .rows = &rows, .teacher_size = pieces.teacher_size };
    if (result == XD_OK) result = xd_exact_map_create(ctx, &map, &b->strict);
    map.relaxed = true;
    if (result == XD_OK) result = xd_exact_map_create(ctx, &map, &b->relaxed);
    options.max_pieces = 1;
    options.k = DEMO_MOST_ENTRIES;
    options.disable_exact = options.reverse = true;
    if (result == XD_OK) result = xd_projection_build(ctx, &desc, &b->projection, NULL);
    xd_projection_rows_destroy(ctx, &rows);
    xd_projection_destroy(ctx, &pieces);
    return result;
}

xd_result demo_bridge_make(xd_ctx *ctx, const xd_tokenizer *student_tokenizer, const demo_text *student,
                           const xd_tokenizer *teacher_tokenizer, const demo_text *teacher,
                           demo_bridge *out) {
    memset(out, 0, sizeof *out);
    out->student = student;
    out->teacher = teacher;
    xd_result result = demo_align(ctx, out);
    if (result == XD_OK) result = demo_map_vocabularies(ctx, student_tokenizer, teacher_tokenizer, out);
    if (result != XD_OK) demo_bridge_free(ctx, out);
    return result;
}

void demo_bridge_free(xd_ctx *ctx, demo_bridge *b) {
    xd_alignment_destroy(ctx, &b->alignment);
    xd_release(ctx, b->first_chunk);
    xd_projection_destroy(ctx, &b->projection);
    xd_exact_map_destroy(ctx, &b->strict);
    xd_exact_map_destroy(ctx, &b->relaxed);
    memset(b, 0, sizeof *b);
}

demo_window demo_bridge_window(const demo_bridge *b, int64_t student_start) {
    const xd_alignment *all = &b->alignment;
    demo_window w;
    w.student_start = student_start;
    w.first = w.end = b->first_chunk[student_start];
    w.teacher_start = w.first < all->count ? all->chunks[w.first].teacher_begin : b->teacher->count;
    while (w.first < all->count && (all->chunks[w.first].student_begin <= student_start ||
                                    all->chunks[w.first].teacher_begin <= w.teacher_start))
        w.first++;
    for (w.end = w.first; w.end < all->count; w.end++)
        if (all->chunks[w.end].student_end > student_start + DEMO_ROW + 1 ||
            all->chunks[w.end].teacher_end > w.teacher_start + DEMO_ROW + 1)
            break;
    return w;
}

void demo_bridge_chunks(const demo_bridge *b, const demo_window *w, xd_chunk_side side, int64_t *chunks,
                        int64_t *heads) {
    const bool student = side == XD_CHUNK_STUDENT;
    const int64_t start = student ? w->student_start : w->teacher_start;
    for (int i = 0; i < DEMO_ROW; i++) chunks[i] = heads[i] = -1;
    for (int64_t c = w->first; c < w->end; c++) {
        const xd_aligned_chunk *chunk = &b->alignment.chunks[c];
        const int64_t begin = student ? chunk->student_begin : chunk->teacher_begin;
        const int64_t end = student ? chunk->student_end : chunk->teacher_end;
        /* Place i predicts the token at start + i + 1. */
        for (int64_t token = begin; token < end; token++) chunks[token - start - 1] = c - w->first;
        if (begin < end) heads[begin - start - 1] = c - w->first;
    }
}

/* ---- a teacher that is not here ---- */

/* The spans and ids of a cache as a text. */
static xd_result demo_record_text(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t count, demo_text *out) {
    xd_cached_position *positions =
        (xd_cached_position *)xd_allocate(ctx, ((size_t)count + 1) * sizeof *positions);
    out->ids = (int32_t *)xd_allocate(ctx, ((size_t)count + 1) * sizeof *out->ids);
    out->spans = (xd_token_span *)xd_allocate(ctx, ((size_t)count + 1) * sizeof *out->spans);
    const xd_teacher_cache_read_desc read = { .count = count, .positions = positions };
    xd_result result = positions && out->ids && out->spans
                           ? xd_teacher_cache_read(ctx, cache, &read)
                           : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld positions", (long long)count);
    for (int64_t i = 0; i < count && result == XD_OK; i++) {
        out->ids[i] = positions[i].id;
        out->spans[i] = positions[i].span;
    }
    out->count = count;
    xd_release(ctx, positions);
    return result;
}

/* Every chunk's first tokens belong together: votes are counted, and the position before the teacher's is
 * where it says so. */
static xd_result demo_record_pairs(const demo_bridge *b, int64_t *places, xd_votes *votes) {
    for (int64_t i = 0; i < b->student->count; i++) places[i] = -1;
    for (int64_t c = 0; c < b->alignment.count; c++) {
        const xd_aligned_chunk *chunk = &b->alignment.chunks[c];
        if (chunk->student_begin == chunk->student_end || chunk->teacher_begin == chunk->teacher_end)
            continue;
        places[chunk->student_begin] = (int64_t)chunk->teacher_begin - 1; /* -1 for the first token of all */
        XD_TRY(xd_votes_add(votes, b->student->ids[chunk->student_begin],
                            b->teacher->ids[chunk->teacher_begin], 1.0));
    }
    return XD_OK;
}

static xd_result demo_record_fill(xd_ctx *ctx, const demo_bridge *b, int64_t student_size,
                                  int64_t teacher_size, demo_record *out) {
    xd_votes *votes = NULL;
    xd_projection_rows rows;
    xd_projection_rows_desc desc;
    memset(&rows, 0, sizeof rows);
    memset(&desc, 0, sizeof desc);
    desc.k = DEMO_MOST_ENTRIES;
    out->places = (int64_t *)xd_allocate(ctx, ((size_t)b->student->count + 1) * sizeof *out->places);
    if (!out->places) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the places of a cache");
    XD_TRY(xd_votes_create(ctx, &(xd_votes_desc){ student_size, teacher_size }, &votes));
    xd_result result = demo_record_pairs(b, out->places, votes);
    if (result == XD_OK) result = xd_projection_rows_from_votes(votes, &desc, &rows);
    if (result == XD_OK)
        result = xd_projection_from_rows(ctx, &rows, student_size, teacher_size, &out->projection);
    xd_projection_rows_destroy(ctx, &rows);
    xd_votes_destroy(votes);
    return result;
}

xd_result demo_record_open(xd_ctx *ctx, const char *path, const xd_tokenizer *student_tokenizer,
                           const demo_text *student, demo_record *out) {
    xd_cached_document document;
    demo_text teacher;
    demo_bridge bridge;
    memset(out, 0, sizeof *out);
    memset(&teacher, 0, sizeof teacher);
    memset(&bridge, 0, sizeof bridge);
    bridge.student = student;
    bridge.teacher = &teacher;
    XD_TRY(xd_teacher_cache_open(ctx, &(xd_teacher_cache_open_desc){ .path = path }, &out->cache));
    const int64_t size = xd_tokenizer_describe(student_tokenizer).size;
    const xd_teacher_cache_info info = xd_teacher_cache_describe(out->cache);
    xd_result result = xd_teacher_cache_find_document(ctx, out->cache, 0, &document);
    if (result == XD_OK && document.text_bytes != student->spans[student->count - 1].end)
        result = XD_FAIL(ctx, XD_ERROR_DATA, "%s is of a text of %lld bytes, not %lld", path,
                         (long long)document.text_bytes, (long long)student->spans[student->count - 1].end);
    if (result == XD_OK) result = demo_record_text(ctx, out->cache, document.count, &teacher);
    if (result == XD_OK) result = demo_align(ctx, &bridge);
    if (result == XD_OK) result = demo_record_fill(ctx, &bridge, size, info.desc.vocabulary, out);
    demo_text_free(ctx, &teacher);
    demo_bridge_free(ctx, &bridge);
    if (result != XD_OK) demo_record_close(ctx, out);
    return result;
}

void demo_record_close(xd_ctx *ctx, demo_record *record) {
    xd_teacher_cache_close(record->cache);
    xd_release(ctx, record->places);
    xd_projection_destroy(ctx, &record->projection);
    memset(record, 0, sizeof *record);
}
