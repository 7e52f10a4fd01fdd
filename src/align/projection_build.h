#ifndef XDI_ALIGN_PROJECTION_BUILD_H
#define XDI_ALIGN_PROJECTION_BUILD_H

#include "align/projection_file.h"
#include "text/tokenizer.h"

/* What a projection covers. */
typedef struct xd_projection_report {
    int64_t tokens;     /* student ids in use */
    int64_t covered;    /* of them: with at least one teacher id; the others have an empty row */
    int64_t exact;      /* of them: both tokenizers have the token, which is its only teacher id */
    int64_t cut;        /* tokens with more than max_pieces pieces */
    int64_t entries;    /* of the matrix */
    double mean_pieces; /* teacher's pieces of a token, before the cut; an exact one is one piece */
    double lost_bytes;  /* share of all tokens' bytes: in pieces cut off, or not the teacher's to write */
    double lost_mass;   /* share of a row's votes that its k best leave out, mean over the covered rows */
} xd_projection_report;

/* Two tokenizers and how to build their projection. */
typedef struct xd_projection_desc {
    const xd_tokenizer *student, *teacher; /* required */
    const xd_projection_options *options;  /* NULL -> xd_projection_defaults() */
} xd_projection_desc;

/* Builds the projection of two tokenizers from the bytes of their tokens.
 *
 * A student token whose bytes are a token of the teacher's maps to it alone, and so does a special token of
 * the same name. The bytes of any other token, be they UTF-8 or not, are cut by the teacher's tokenizer as
 * they would be inside of a text, and its first pieces get votes with the shares of xd_piece_weights; pieces
 * that are the teacher's unknown token get none. Each student id keeps the k best of its votes, scaled to sum
 * 1. (NeMo-RL's form, which goes through decoded strings, a dense matrix and bf16, is xd_votes_add_pass with
 * compat rows.)
 *
 *   out      [student's size, teacher's size], with its origin; free with xd_projection_destroy
 *   report   NULL when it is not needed
 *
 * Local. Deterministic: the same tokenizers and options give the same bits. Memory besides the tokenizers and
 * an encoder: at most 64 bytes a vote (up to max_pieces a token), 110 for each of the k places of a row, and
 * 60 an id.
 * Errors: ARGUMENT for options out of range; DATA when a split pattern takes too many steps; MEMORY. */
XD_API xd_result xd_projection_build(xd_ctx *ctx, const xd_projection_desc *desc, xd_projection *out,
                                     xd_projection_report *report);

/* The projection from a directory of them: read when a file with the cache name is there, else built and
 * written. A damaged file is replaced. Processes may do it at the same time: they write the same bytes, each
 * whole.
 *
 *   directory  must exist
 *   built      false when it was read; NULL when it does not matter
 *
 * Local. Errors: as xd_projection_build and xd_projection_save; then there is no projection. */
XD_API xd_result xd_projection_cached(xd_ctx *ctx, const char *directory, const xd_projection_desc *desc,
                                      xd_projection *out, bool *built);

#endif
