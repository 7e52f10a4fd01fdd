/* Chunks of an alignment: which one a token belongs to, and their release. */

#include "align/align.h"
#include "base/extend.h"

#include <string.h>

XD_API void xd_chunk_ids(const xd_alignment *alignment, xd_chunk_side side, const xd_align_side *tokens,
                         int64_t *ids, uint8_t *exact) {
    const uint8_t *mask = tokens->mask;
    const int64_t count = tokens->count;
    for (int64_t i = 0; i < count; i++) ids[i] = -1;
    if (exact) memset(exact, 0, (size_t)count);
    for (int64_t n = 0; n < alignment->count; n++) {
        const xd_aligned_chunk *c = &alignment->chunks[n];
        const bool student = side == XD_CHUNK_STUDENT;
        const int64_t begin = student ? c->student_begin : c->teacher_begin;
        const int64_t end = student ? c->student_end : c->teacher_end;
        const bool one = c->student_end - c->student_begin == 1 && c->teacher_end - c->teacher_begin == 1;
        for (int64_t i = begin; i < end && i < count; i++) {
            if (mask && !mask[i]) continue;
            ids[i] = n;
            if (exact) exact[i] = one && (c->flags & XD_CHUNK_EXACT) != 0;
        }
    }
}

XD_API void xd_alignment_destroy(xd_ctx *ctx, xd_alignment *alignment) {
    xd_release(ctx, alignment->chunks);
    memset(alignment, 0, sizeof *alignment);
}
