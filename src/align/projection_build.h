#ifndef XDI_ALIGN_PROJECTION_BUILD_H
#define XDI_ALIGN_PROJECTION_BUILD_H

#include "align/projection_file.h"
#include "text/tokenizer.h"

/* What a projection covers. */
typedef struct xd_projection_report {
    int64_t tokens;     /* student ids in use */
    int64_t covered;    /* of these: with at least one teacher id; the others have an empty row */
    int64_t exact;      /* of these: both tokenizers have the token, which is its only teacher id */
    int64_t cut;        /* tokens with more than max_pieces pieces */
    int64_t entries;    /* of the matrix */
    double mean_pieces; /* pieces of a token, before max_pieces limits them; an exact token is one piece */
    double lost_bytes;  /* share of all tokens' bytes that is in ignored pieces or that the teacher cannot
                         * write */
    double lost_mass;   /* share of a row's votes outside its k best, mean over the covered rows */
} xd_projection_report;

/* Two tokenizers and how to build their projection. */
typedef struct xd_projection_desc {
    const xd_tokenizer *student, *teacher; /* required */
    const xd_projection_options *options;  /* NULL -> xd_projection_defaults() */
} xd_projection_desc;

/* Builds the projection of two tokenizers from the bytes of their tokens.
 *
 * A student token whose bytes are a token of the teacher maps to that token alone; a special token maps to the special
 * token of the same name. The bytes of any other token, UTF-8 or not, are encoded by the teacher's tokenizer as
 * they would be inside a text, and the first pieces get votes with the weights of xd_piece_weights; pieces
 * that are the teacher's unknown token get none. The k best votes of each student id become its row, scaled to sum
 * 1. (NeMo-RL's form, which goes through decoded strings, a dense matrix and bf16, is xd_votes_add_pass with
 * compat rows.)
 *
 *   out      [student's size, teacher's size], with its origin; free with xd_projection_destroy
 *   report   NULL when it is not needed
 *
 * Local. Deterministic: the same tokenizers and options give the same bits. Memory besides the tokenizers and
 * an encoder: at most 64 bytes per vote (up to max_pieces per token), 110 for each of a row's k entries, and
 * 60 per id.
 * Errors: ARGUMENT for options out of range; DATA when a split pattern takes too many steps; MEMORY. */
XD_API xd_result xd_projection_build(xd_ctx *ctx, const xd_projection_desc *desc, xd_projection *out,
                                     xd_projection_report *report);

/* The projection from a cache directory: read when a file with its cache name exists, else built and
 * written. A damaged file is replaced. Several processes may do this at the same time: they write the same bytes, and each
 * file appears whole.
 *
 *   directory  must exist
 *   built      false when it was read; may be NULL
 *
 * Local. Errors: as xd_projection_build and xd_projection_save; *out then holds no projection. */
XD_API xd_result xd_projection_cached(xd_ctx *ctx, const char *directory, const xd_projection_desc *desc,
                                      xd_projection *out, bool *built);

#endif
