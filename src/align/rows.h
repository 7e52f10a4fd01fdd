#ifndef XDI_ALIGN_ROWS_H
#define XDI_ALIGN_ROWS_H

#include "align/projection.h"
#include "base/internal.h"

/* Votes, rows and matrices as the scripts of NeMo-RL make them, and as builds of this library use them. All calls are local. */

/* A token, and the other vocabulary's tokens that spell its text. */
typedef struct xdi_vote_pieces {
    xd_text text; /* "<|...|>" casts no votes */
    const int64_t *ids;
    int64_t count;
} xdi_vote_pieces;

/* A pass over all tokens of one vocabulary. */
typedef struct xdi_votes_pass {
    const xdi_vote_pieces *tokens; /* [count], by id */
    int64_t count;
    bool reverse;        /* from teacher to student */
    int64_t max_pieces;  /* ignores later pieces; at least 1 */
    const int64_t *skip; /* [skip_count] tokens without votes */
    int64_t skip_count;
    const int64_t *foreign_skip; /* [foreign_skip_count] a token with such a piece has no votes */
    int64_t foreign_skip_count;
} xdi_votes_pass;

/* Adds the tokens' votes for their pieces, with xdi_piece_weights (NeMo-RL, minimal_projection_via_multitoken.py). Errors: as
 * xd_votes_add; earlier votes remain. */
XD_PRIVATE xd_result xdi_votes_add_pass(xd_votes *votes, const xdi_votes_pass *pass);

/* Returns the pieces' weights: 0.9 * 0.1^i, scaled to sum 1. Pure. */
XD_PRIVATE void xdi_piece_weights(int64_t count, double *weights);

/* Which special tokens ("<...>") are similar: 0.6 R + 0.4 J, R the Ratcliff-Obershelp ratio, J the Jaccard index of words
 * longer than two letters. */
typedef struct xdi_special_desc {
    xd_texts student, teacher; /* vocabularies */
    double threshold;          /* minimum similarity */
    int64_t max_pairs;         /* of one student token */
} xdi_special_desc;

/* A pair of similar special tokens. */
typedef struct xdi_special_pair {
    int64_t student_id, teacher_id;
    double similarity;
} xdi_special_pair;

/* Returns the pairs, best first within a student token, lowest teacher id among equals. Free *pairs with xd_release. Errors:
 * ARGUMENT (max_pairs negative; threshold not finite), MEMORY. */
XD_PRIVATE xd_result xdi_special_pairs(xd_ctx *ctx, const xdi_special_desc *desc, xdi_special_pair **pairs,
                                       int64_t *count);

/* Replaces all votes of the student id by one of weight 1 for the teacher id. Errors: as xd_votes_add. */
XD_PRIVATE xd_result xdi_votes_set_exact(xd_votes *votes, int64_t student_id, int64_t teacher_id);

/* The votes of a pair. */
typedef struct xdi_vote {
    int32_t student_id, teacher_id;
    double weight;
} xdi_vote;

/* Returns all cells, by student id, then teacher id, until the next call on votes. Errors: MEMORY. */
XD_PRIVATE xd_result xdi_votes_read(xd_votes *votes, const xdi_vote **cells, int64_t *count);

/* Maps each student id whose string the teacher has to that teacher id alone, the highest of equal strings
 * (reapply_exact_map.py). Ignores empty strings. Errors: ARGUMENT (more student strings than rows), MEMORY. */
XD_PRIVATE xd_result xdi_projection_rows_apply_exact(xd_ctx *ctx, xd_projection_rows *rows, xd_texts student,
                                                     xd_texts teacher);

/* Settings of xdi_projection_rows_cut. */
typedef struct xdi_projection_cut_desc {
    int64_t k; /* entries of a row, at least 1 */
    /* As the reference for the scale trick: the last entry stays last; in rows with free entries it is also sorted, and
     * appears twice. */
    bool preserve_last;
    bool compat; /* weights are bf16 before and after */
} xdi_projection_cut_desc;

/* Keeps the k largest weights of each row, normalised (sort_and_cut_projection_matrix.py). Drops entries without id or weight.
 * Errors: ARGUMENT (k < 1; weight negative, NaN or above 3e38), MEMORY. */
XD_PRIVATE xd_result xdi_projection_rows_cut(xd_ctx *ctx, const xd_projection_rows *rows,
                                             const xdi_projection_cut_desc *desc, xd_projection_rows *out);

/* Which similarities become entries. */
typedef struct xdi_similarity_desc {
    int64_t k;        /* entries of a row, at least 1 */
    double threshold; /* entries below it keep their weight, not their id; 0: none */
} xdi_similarity_desc;

/* Makes rows from similarities, such as cosines: |s|^(10 * the row's largest), normalised, the best k
 * (minimal_projection_generator.py).
 *
 *   similarities  [student ids, teacher ids] f32 in [-1, 1], host memory
 *
 * Uses the context's threads; the same bits for any number. Errors: ARGUMENT (k < 1; threshold not finite; similarity NaN or
 * more than 0.01 outside [-1, 1]), DTYPE, SHAPE, MEMORY. */
XD_PRIVATE xd_result xdi_projection_rows_from_similarities(xd_ctx *ctx, xd_rows similarities,
                                                           const xdi_similarity_desc *desc,
                                                           xd_projection_rows *out);

/* As xdi_projection_rows_from_similarities, with cosines of embeddings, which must be finite.
 *
 *   student  [student ids, width] f32, host memory
 *   teacher  [teacher ids, width] f32, host memory */
XD_PRIVATE xd_result xdi_projection_rows_from_embeddings(xd_ctx *ctx, xd_rows student, xd_rows teacher,
                                                         const xdi_similarity_desc *desc,
                                                         xd_projection_rows *out);

/* Divides each row of [rows, columns] by its sum, in place, unless it is 0. Equals any number of the reference's one-sided
 * Sinkhorn steps. */
XD_PRIVATE void xdi_normalise_rows(double *matrix, int64_t rows, int64_t columns);

/* A matrix as cells. */
typedef struct xdi_projection_cells {
    const xdi_vote *cells; /* [count] in any order; equal ones add up */
    int64_t count;
    int64_t student_size, teacher_size; /* of the tokenizers, or larger when a cell needs it */
} xdi_projection_cells;

/* Makes a matrix from cells. Errors: as xd_projection_from_rows. */
XD_PRIVATE xd_result xdi_projection_from_cells(xd_ctx *ctx, const xdi_projection_cells *cells,
                                               xd_projection *out);

#endif
