#ifndef XDI_ALIGN_ALIGN_H
#define XDI_ALIGN_ALIGN_H

#include "base/context.h"
#include "base/text.h"

/* Two tokenizations of one text, divided into chunks: the shortest runs of student and teacher tokens that cover
 * the same bytes of it. Cross-tokenizer losses compare chunk with chunk. All calls are local. */

enum {
    XD_CHUNK_EXACT = 1, /* both sides spell the same text */
    XD_CHUNK_MASKED = 2 /* at least one of its tokens is masked out: the chunk does not count */
};

/* Tokens [student_begin, student_end) and [teacher_begin, teacher_end). An empty side has begin = end, the
 * index where its tokens would be. Chunks are in order on both sides and do not overlap. */
typedef struct xd_aligned_chunk {
    int32_t student_begin, student_end;
    int32_t teacher_begin, teacher_end;
    uint32_t flags;
} xd_aligned_chunk;

/* The chunks of one sequence. `chunks` belongs to the context that made it; free it with
 * xd_alignment_destroy. */
typedef struct xd_alignment {
    xd_aligned_chunk *chunks;
    int64_t count;
} xd_alignment;

/* One side of a sequence for xd_align_bytes. */
typedef struct xd_align_side {
    const xd_token_span *spans; /* [count] begins do not decrease, ends do not decrease */
    const uint8_t *roles;       /* [count] xd_token_role, or NULL */
    const uint8_t *mask;      /* [count] 0: padding, or a prompt that is not trained on; NULL -> all count */
    const int32_t *documents; /* [count] not decreasing; packed documents never share a chunk. NULL -> one */
    int64_t count;
} xd_align_side;

/* Counts of what aligned and what did not. */
typedef struct xd_align_report {
    int64_t chunks, exact;
    int64_t one_sided;   /* chunks with an empty side */
    int64_t masked;      /* chunks that do not count because of a mask */
    int64_t total_bytes; /* of the text covered by the student's tokens */
    int64_t lost_bytes;  /* of those in chunks that are not exact or are masked */
} xd_align_report;

/* The default aligner: both tokenizations cover one byte string, so a sweep over the offsets where both have a
 * boundary gives the chunks. Linear time, no heuristics; split multi-byte characters, leading spaces and
 * insertions need no special rules.
 *
 *   report  may be NULL
 *
 * Padding does not change the result: chunks of tokens after the last unmasked token come last. Errors: ARGUMENT for spans
 * or documents that go backwards; MEMORY. */
XD_API xd_result xd_align_bytes(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out, xd_align_report *report);

/* One pair of sequences of a batch, and where its chunks go. */
typedef struct xd_align_job {
    xd_align_side student, teacher;
    xd_alignment out;
    xd_align_report report;
} xd_align_job;

/* xd_align_bytes for every job, on the threads of the context. All or nothing: on failure no job has chunks. Errors: as
 * xd_align_bytes, of the first job that failed. */
XD_API xd_result xd_align_batch(xd_ctx *ctx, xd_align_job *jobs, int64_t count);

/* Which side of a chunk. */
typedef enum xd_chunk_side { XD_CHUNK_STUDENT = 0, XD_CHUNK_TEACHER } xd_chunk_side;

/* ids[i] = index of the chunk that token i belongs to, -1 where it is in no chunk or its mask is 0; exact (may be NULL):
 * the token is the only one of its side in an exact chunk whose other side has one token too. [count] each.
 *
 *   tokens   the side as it was aligned; only mask and count are read
 *
 * Local. Allocates nothing. */
XD_API void xd_chunk_ids(const xd_alignment *alignment, xd_chunk_side side, const xd_align_side *tokens,
                         int64_t *ids, uint8_t *exact);

/* Frees the chunks; an empty alignment is fine. */
XD_API void xd_alignment_destroy(xd_ctx *ctx, xd_alignment *alignment);

#endif
