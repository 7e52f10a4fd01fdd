#ifndef XDI_ALIGN_ALIGN_H
#define XDI_ALIGN_ALIGN_H

#include "base/context.h"
#include "base/text.h"

/* Divides two tokenizations of a text into chunks: the shortest runs of student and teacher tokens that cover the same bytes.
 * All calls are local. */

enum {
    XD_CHUNK_EXACT = 1, /* both sides spell the same text */
    XD_CHUNK_MASKED = 2 /* a token is masked: does not count */
};

/* Tokens [student_begin, student_end) and [teacher_begin, teacher_end); begin = end on an empty side. Chunks are in order on
 * both sides, without overlap. */
typedef struct xd_aligned_chunk {
    int32_t student_begin, student_end;
    int32_t teacher_begin, teacher_end;
    uint32_t flags;
} xd_aligned_chunk;

/* The chunks of one sequence; free them with xd_alignment_destroy. */
typedef struct xd_alignment {
    xd_aligned_chunk *chunks;
    int64_t count;
} xd_alignment;

/* One side of a sequence for xd_align_bytes. */
typedef struct xd_align_side {
    const xd_token_span *spans; /* [count] neither begins nor ends decrease */
    const uint8_t *roles;       /* [count] xd_token_role, or NULL */
    const uint8_t *mask;        /* [count] 0: padding or prompt; NULL -> all count */
    const int32_t *documents;   /* [count] not decreasing; packed documents share no chunk; NULL -> one */
    int64_t count;
} xd_align_side;

/* Counts of an alignment. */
typedef struct xd_align_report {
    int64_t chunks, exact;
    int64_t one_sided;   /* chunks with an empty side */
    int64_t masked;      /* chunks with a masked token */
    int64_t total_bytes; /* of the text covered by the student's tokens */
    int64_t lost_bytes;  /* of those in chunks not exact or masked */
} xd_align_report;

/* Aligns one sequence by the byte offsets where both sides have a token boundary. Linear time.
 *
 *   report  may be NULL
 *
 * Padding does not change the result: its chunks come last. Errors: ARGUMENT (spans or documents go backwards), MEMORY. */
XD_API xd_result xd_align_bytes(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out, xd_align_report *report);

/* One pair of sequences, and its results. */
typedef struct xd_align_job {
    xd_align_side student, teacher;
    xd_alignment out;
    xd_align_report report;
} xd_align_job;

/* Aligns every job, as xd_align_bytes, on the context's threads; all or nothing. Errors: those of the first failed job. */
XD_API xd_result xd_align_batch(xd_ctx *ctx, xd_align_job *jobs, int64_t count);

/* Which side of a chunk. */
typedef enum xd_chunk_side { XD_CHUNK_STUDENT = 0, XD_CHUNK_TEACHER } xd_chunk_side;

/* Sets ids[i] to the chunk of token i, or -1 if it has none or its mask is 0. xd_xtoken_loss takes chunks of
 * next tokens. So shift them by xd_next_token_labels with ignore_index -1. Local. Allocates nothing.
 *
 *   tokens   the aligned side; only mask and count are read
 *   ids      [count]
 *   exact    [count] 1: the chunk is exact, with one token on each side; exact may be NULL */
XD_API void xd_chunk_ids(const xd_alignment *alignment, xd_chunk_side side, const xd_align_side *tokens,
                         int64_t *ids, uint8_t *exact);

/* Frees the chunks; may be empty. */
XD_API void xd_alignment_destroy(xd_ctx *ctx, xd_alignment *alignment);

#endif
