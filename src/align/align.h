#ifndef XDI_ALIGN_ALIGN_H
#define XDI_ALIGN_ALIGN_H

#include "base/context.h"
#include "base/text.h"

/* Chunks: the shortest runs of student and teacher tokens that cover the same bytes. All calls are local. */

enum {
    XD_CHUNK_EXACT = 1, /* both sides have the same text */
    XD_CHUNK_MASKED = 2 /* has a masked token: not counted */
};

/* Half-open ranges, of which one may be empty; in order, without overlap. */
typedef struct xd_aligned_chunk {
    int32_t student_begin, student_end;
    int32_t teacher_begin, teacher_end;
    uint32_t flags;
} xd_aligned_chunk;

/* One sequence's chunks; free with xd_alignment_destroy. */
typedef struct xd_alignment {
    xd_aligned_chunk *chunks;
    int64_t count;
} xd_alignment;

/* The tokens of one side. */
typedef struct xd_align_side {
    const xd_token_span *spans; /* [count] begins and ends never decrease */
    const uint8_t *roles;       /* [count] xd_token_role, or NULL */
    const uint8_t *mask;        /* [count] 0: does not count; NULL -> all do */
    const int32_t *documents;   /* [count] never decreasing; no chunk crosses documents; NULL -> one */
    int64_t count;
} xd_align_side;

/* Counts of an alignment. */
typedef struct xd_align_report {
    int64_t chunks, exact;
    int64_t one_sided;   /* with an empty side */
    int64_t masked;      /* with a masked token */
    int64_t total_bytes; /* covered by the student's tokens */
    int64_t lost_bytes;  /* of these in masked or inexact chunks */
} xd_align_report;

/* Aligns one sequence at byte offsets where both sides have a token boundary; report may be NULL. Linear time.
 * Padding changes no result: its chunks come last. Errors: ARGUMENT (spans or documents go backwards), MEMORY. */
XD_API xd_result xd_align_bytes(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out, xd_align_report *report);

/* One pair of sequences. */
typedef struct xd_align_job {
    xd_align_side student, teacher;
    xd_alignment out;
    xd_align_report report;
} xd_align_job;

/* Aligns every job as xd_align_bytes, on the context's threads. Errors: the first failed job's. */
XD_API xd_result xd_align_batch(xd_ctx *ctx, xd_align_job *jobs, int64_t count);

/* A side of a chunk. */
typedef enum xd_chunk_side { XD_CHUNK_STUDENT = 0, XD_CHUNK_TEACHER } xd_chunk_side;

/* Sets ids [count] to the chunk of each token; -1: it has none, or mask 0. For xd_xtoken_loss shift them by
 * xd_next_token_labels with ignore_index -1. Local. Allocates nothing.
 *
 *   tokens   the aligned side; reads only mask and count
 *   exact    [count] 1: the chunk is exact, with one token on each side; exact may be NULL */
XD_API void xd_chunk_ids(const xd_alignment *alignment, xd_chunk_side side, const xd_align_side *tokens,
                         int64_t *ids, uint8_t *exact);

/* Frees the chunks; may be empty. */
XD_API void xd_alignment_destroy(xd_ctx *ctx, xd_alignment *alignment);

#endif
