#ifndef XDI_DISTILL_ALIGN_H
#define XDI_DISTILL_ALIGN_H

#include "base/context.h"

/* Two tokenizations of one text, cut into chunks: the shortest runs of student and teacher tokens that cover
 * the same piece of it. Cross-tokenizer losses compare chunk with chunk. All calls are local. */

/* Bytes; not terminated. */
typedef struct xd_text {
    const char *data;
    int64_t size;
} xd_text;

enum {
    XD_CHUNK_EXACT = 1, /* both sides spell the same piece of text */
    XD_CHUNK_MASKED = 2 /* some token of it is masked out: the chunk does not count */
};

/* Tokens [student_begin, student_end) and [teacher_begin, teacher_end). An empty side has begin = end, the
 * place where its tokens would be. Chunks are in order on both sides and do not overlap. */
typedef struct xd_aligned_chunk {
    int32_t student_begin, student_end;
    int32_t teacher_begin, teacher_end;
    uint32_t flags;
} xd_aligned_chunk;

/* The chunks of one sequence. `chunks` belongs to the context that made it; free it with
 * xd_alignment_free. */
typedef struct xd_alignment {
    xd_aligned_chunk *chunks;
    int64_t count;
} xd_alignment;

/* What a token is besides its text: tokens with a role and no bytes are paired with the other side's of the
 * same role at the same place. */
typedef enum xd_token_role { XD_TOKEN_TEXT = 0, XD_TOKEN_BOS, XD_TOKEN_EOS, XD_TOKEN_SPECIAL } xd_token_role;

/* Where a token comes from: bytes [begin, end) of the original text. Tokens that share a character, or a
 * cluster that was normalised as a whole, may have the same span, or one that lies inside another's. */
typedef struct xd_token_span {
    int64_t begin, end;
} xd_token_span;

/* One side of a sequence for xd_align_bytes. */
typedef struct xd_align_side {
    const xd_token_span *spans; /* [count] begins do not decrease, ends do not decrease */
    const uint8_t *roles;       /* [count] xd_token_role, or NULL */
    const uint8_t *mask;        /* [count] 0: padding, or a prompt that is not trained on; NULL -> all count */
    const int32_t *documents;   /* [count] not decreasing; packed documents never share a chunk. NULL -> one */
    int64_t count;
} xd_align_side;

/* What did not align. */
typedef struct xd_align_report {
    int64_t chunks, exact;
    int64_t one_sided;   /* chunks with an empty side */
    int64_t masked;      /* chunks that do not count because of a mask */
    int64_t total_bytes; /* of the text covered by the student's tokens */
    int64_t lost_bytes;  /* of those in chunks that are not exact or are masked */
} xd_align_report;

/* The default aligner: both tokenizations cover one byte string, so a sweep over the places where both have a
 * boundary gives the chunks. Linear, no heuristics; split multi-byte characters, leading spaces and
 * insertions need no rules of their own.
 *
 *   report  may be NULL
 *
 * Padding does not matter: chunks of tokens past the last unmasked one come last. Errors: ARGUMENT for spans
 * that go backwards, documents that go backwards; MEMORY. */
XD_API xd_result xd_align_bytes(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out, xd_align_report *report);

/* One pair of sequences of a batch, and where its chunks go. */
typedef struct xd_align_job {
    xd_align_side student, teacher;
    xd_alignment out;
    xd_align_report report;
} xd_align_job;

/* xd_align_bytes for every job, on `workers` threads of this process (0 or 1 -> on the calling one). The
 * result does not depend on the number. All or nothing: on failure no job has chunks. The context's allocator
 * must be thread-safe when workers > 1. Errors: as xd_align_bytes, of the first job that failed. */
XD_API xd_result xd_align_batch(xd_ctx *ctx, xd_align_job *jobs, int64_t count, int workers);

/* Settings of xd_align_dp. */
typedef struct xd_align_dp_desc {
    int max_combination; /* tokens that one token may match; 0 -> 4 */
} xd_align_dp_desc;

/* The aligner of NeMo-RL (nemo_rl/algorithms/x_token/token_aligner.py), bit for bit, for parity: a dynamic
 * programme over token surface strings as vocabularies store them ("Ġfox", "▁fox", "<0xE2>"), anchored by
 * unique triples and repaired afterwards. It runs on the padded sequences and its result depends on the
 * padding; use xd_align_bytes for anything else. Time O(n m K), memory O(n m) between anchors. No mask: see
 * xd_chunk_ids. Errors: ARGUMENT for max_combination outside 1 to 64, MEMORY. */
XD_API xd_result xd_align_dp(xd_ctx *ctx, const xd_text *student, int64_t student_count,
                             const xd_text *teacher, int64_t teacher_count, const xd_align_dp_desc *desc,
                             xd_alignment *out);

/* The dynamic programme of xd_align_dp alone, on the strings as they are: no canonical forms, anchors or
 * repairs. *score (may be NULL) in the reference's units: 3 a match, -3 a mismatch, -1.5 a token without
 * partner, 1.5 n for one token that matches n. Ties prefer, in this order, the diagonal, a student token
 * alone, a teacher token alone, one student token to n, one teacher token to n. */
XD_API xd_result xd_align_segment(xd_ctx *ctx, const xd_text *student, int64_t student_count,
                                  const xd_text *teacher, int64_t teacher_count, const xd_align_dp_desc *desc,
                                  xd_alignment *out, double *score);

/* Which side of a chunk. */
typedef enum xd_chunk_side { XD_CHUNK_STUDENT = 0, XD_CHUNK_TEACHER } xd_chunk_side;

/* ids[i] = number of the chunk that token i belongs to, -1 where there is none or mask (may be NULL) is 0;
 * exact (may be NULL): the token is the only one of its side in an exact chunk whose other side has one token
 * too. [count] each. Allocates nothing. */
XD_API void xd_chunk_ids(const xd_alignment *alignment, xd_chunk_side side, const uint8_t *mask, int64_t *ids,
                         uint8_t *exact, int64_t count);

/* Frees the chunks; an empty alignment is fine. */
XD_API void xd_alignment_free(xd_ctx *ctx, xd_alignment *alignment);

#endif
