#ifndef XDI_ALIGN_PROJECTION_H
#define XDI_ALIGN_PROJECTION_H

#include "align/align.h"
#include "kernel/types.h"

/* Maps student ids to weighted teacher ids, once for a pair of tokenizers: votes (xd_votes) become rows (xd_projection_rows),
 * and rows a sparse matrix (xd_projection). Memory is that of the votes, never [V_s, V_t]. All calls are local. */

/* ---- votes ---- */

/* A sparse sum of votes over (student id, teacher id). */
typedef struct xd_votes xd_votes;

/* Creates an empty sum. Errors: ARGUMENT (not 1 to 2^31 - 1 ids), MEMORY. */
XD_API xd_result xd_votes_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size, xd_votes **out);
XD_API void xd_votes_destroy(xd_votes *votes);

/* Adds weight to a pair of ids. Errors: ARGUMENT (id outside its vocabulary; weight negative, NaN or above 3e38), MEMORY. */
XD_API xd_result xd_votes_add(xd_votes *votes, int64_t student_id, int64_t teacher_id, double weight);

/* A token, and the other vocabulary's tokens that spell its text. */
typedef struct xd_pieces {
    xd_text text; /* "<|...|>" casts no votes */
    const int64_t *ids;
    int64_t count;
} xd_pieces;

/* A pass over all tokens of one vocabulary. */
typedef struct xd_votes_pass {
    const xd_pieces *tokens; /* [count], by id */
    int64_t count;
    bool reverse;        /* from teacher to student */
    int64_t max_pieces;  /* ignores later pieces; at least 1 */
    const int64_t *skip; /* [skip_count] tokens without votes */
    int64_t skip_count;
    const int64_t *foreign_skip; /* [foreign_skip_count] a token with such a piece has no votes */
    int64_t foreign_skip_count;
} xd_votes_pass;

/* Adds the tokens' votes for their pieces, with xd_piece_weights (NeMo-RL, minimal_projection_via_multitoken.py). Errors: as
 * xd_votes_add; earlier votes remain. */
XD_API xd_result xd_votes_add_pass(xd_votes *votes, const xd_votes_pass *pass);

/* Returns the pieces' weights: 0.9 * 0.1^i, scaled to sum 1. Pure. */
XD_API void xd_piece_weights(int64_t count, double *weights);

/* Which special tokens ("<...>") are similar: 0.6 R + 0.4 J, R the Ratcliff-Obershelp ratio, J the Jaccard index of words
 * longer than two letters. */
typedef struct xd_special_desc {
    xd_texts student, teacher; /* vocabularies */
    double threshold;          /* minimum similarity */
    int64_t max_pairs;         /* of one student token */
} xd_special_desc;

/* A pair of similar special tokens. */
typedef struct xd_special_pair {
    int64_t student_id, teacher_id;
    double similarity;
} xd_special_pair;

/* Returns the pairs, best first within a student token, lowest teacher id among equals. Free *pairs with xd_release. Errors:
 * ARGUMENT (max_pairs negative; threshold not finite), MEMORY. */
XD_API xd_result xd_special_pairs(xd_ctx *ctx, const xd_special_desc *desc, xd_special_pair **pairs,
                                  int64_t *count);

/* Replaces all votes of the student id by one of weight 1 for the teacher id. Errors: as xd_votes_add. */
XD_API xd_result xd_votes_set_exact(xd_votes *votes, int64_t student_id, int64_t teacher_id);

/* The votes of a pair. */
typedef struct xd_vote {
    int32_t student_id, teacher_id;
    double weight;
} xd_vote;

/* Returns all cells, by student id, then teacher id, until the next call on votes. Errors: MEMORY. */
XD_API xd_result xd_votes_read(xd_votes *votes, const xd_vote **cells, int64_t *count);

/* ---- rows ---- */

/* The k best teacher ids of every student id; free with xd_projection_rows_destroy. */
typedef struct xd_projection_rows {
    int32_t *ids;   /* [rows, k]; -1: no entry */
    float *weights; /* [rows, k] */
    int64_t rows, k;
} xd_projection_rows;

/* Settings of xd_projection_rows_from_votes. */
typedef struct xd_projection_rows_desc {
    int64_t k; /* entries of a row, at least 1 */
    /* The reference's bits: votes rounded to bf16, normalised in bf16, the best k. Entries without votes hold the lowest
     * unused teacher ids with weight 0. */
    bool compat;
    /* compat only: the last weight becomes 0.2 (0 in rows of xd_votes_set_exact), rows are normalised again; an exact row
     * of k = 1 becomes empty. */
    bool scale_trick;
} xd_projection_rows_desc;

/* Selects normalised votes, largest first, lowest id among equals. Errors: ARGUMENT (k < 1; scale_trick without compat),
 * MEMORY. */
XD_API xd_result xd_projection_rows_from_votes(xd_votes *votes, const xd_projection_rows_desc *desc,
                                               xd_projection_rows *out);

/* Maps each student id whose string the teacher has to that teacher id alone, the highest of equal strings
 * (reapply_exact_map.py). Ignores empty strings. Errors: ARGUMENT (more student strings than rows), MEMORY. */
XD_API xd_result xd_projection_rows_apply_exact(xd_ctx *ctx, xd_projection_rows *rows, xd_texts student,
                                                xd_texts teacher);

/* Settings of xd_projection_rows_cut. */
typedef struct xd_projection_cut_desc {
    int64_t k; /* entries of a row, at least 1 */
    /* As the reference for the scale trick: the last entry stays last; in rows with free entries it is also sorted, and
     * appears twice. */
    bool preserve_last;
    bool compat; /* weights are bf16 before and after */
} xd_projection_cut_desc;

/* Keeps the k largest weights of each row, normalised (sort_and_cut_projection_matrix.py). Drops entries without id or weight.
 * Errors: ARGUMENT (k < 1; weight negative, NaN or above 3e38), MEMORY. */
XD_API xd_result xd_projection_rows_cut(xd_ctx *ctx, const xd_projection_rows *rows,
                                        const xd_projection_cut_desc *desc, xd_projection_rows *out);

/* Which similarities become entries. */
typedef struct xd_similarity_desc {
    int64_t k;        /* entries of a row, at least 1 */
    double threshold; /* entries below it keep their weight, not their id; 0: none */
} xd_similarity_desc;

/* Makes rows from similarities, such as cosines: |s|^(10 * the row's largest), normalised, the best k
 * (minimal_projection_generator.py).
 *
 *   similarities  [student ids, teacher ids] f32 in [-1, 1], host memory
 *
 * Uses the context's threads; the same bits for any number. Errors: ARGUMENT (k < 1; threshold not finite; similarity NaN or
 * more than 0.01 outside [-1, 1]), DTYPE, SHAPE, MEMORY. */
XD_API xd_result xd_projection_rows_from_similarities(xd_ctx *ctx, xd_rows similarities,
                                                      const xd_similarity_desc *desc,
                                                      xd_projection_rows *out);

/* As xd_projection_rows_from_similarities, with cosines of embeddings, which must be finite.
 *
 *   student  [student ids, width] f32, host memory
 *   teacher  [teacher ids, width] f32, host memory */
XD_API xd_result xd_projection_rows_from_embeddings(xd_ctx *ctx, xd_rows student, xd_rows teacher,
                                                    const xd_similarity_desc *desc, xd_projection_rows *out);

/* Divides each row of [rows, columns] by its sum, in place, unless it is 0. Equals any number of the reference's one-sided
 * Sinkhorn steps. */
XD_API void xd_normalise_rows(double *matrix, int64_t rows, int64_t columns);

/* Frees the rows; may be empty. */
XD_API void xd_projection_rows_destroy(xd_ctx *ctx, xd_projection_rows *rows);

/* ---- the matrix that losses use ---- */

/* How to build a projection. Start from xd_projection_defaults. */
typedef struct xd_projection_options {
    int64_t max_pieces;       /* pieces of a token with votes, 1 to 32 */
    int64_t k;                /* entries of a student id, 1 to 1024 */
    bool disable_exact;       /* tokens of both vocabularies also vote for pieces */
    bool reverse;             /* teacher tokens also vote for student pieces */
    bool special_pairs;       /* similar special tokens vote (xd_special_pairs) */
    double special_threshold; /* their minimum similarity */
} xd_projection_options;

/* Tokenizers and options of a projection, valid only for them. All zero -> unknown. */
typedef struct xd_projection_origin {
    uint64_t student_hash, teacher_hash; /* xd_tokenizer_info.hash */
    xd_projection_options options;
} xd_projection_origin;

/* Sparse [student_size, teacher_size]. Immutable; threads may share it. */
typedef struct xd_projection {
    int64_t student_size, teacher_size, entries;
    const int64_t *row_begin;    /* [student_size + 1] */
    const int32_t *teacher_id;   /* [entries] ascending within a row */
    const float *weight;         /* [entries] */
    const int64_t *column_begin; /* [teacher_size + 1] the transposed matrix */
    const int32_t *student_id;   /* [entries] ascending within a column */
    const float *column_weight;  /* [entries] */
    /* Set before xd_projection_save, unless xd_projection_build or loading has. */
    xd_projection_origin origin;
} xd_projection;

/* Makes a matrix from rows. Drops entries without id, and adds equal ids. Sizes are those of the tokenizers, or larger when
 * rows need it. Free with xd_projection_destroy. Errors: ARGUMENT (weight negative or not finite; size below 0), MEMORY. */
XD_API xd_result xd_projection_from_rows(xd_ctx *ctx, const xd_projection_rows *rows, int64_t student_size,
                                         int64_t teacher_size, xd_projection *out);

/* A matrix as cells. */
typedef struct xd_projection_cells {
    const xd_vote *cells; /* [count] in any order; equal ones add up */
    int64_t count;
    int64_t student_size, teacher_size; /* of the tokenizers, or larger when a cell needs it */
} xd_projection_cells;

/* Makes a matrix from cells. Errors: as xd_projection_from_rows. */
XD_API xd_result xd_projection_from_cells(xd_ctx *ctx, const xd_projection_cells *cells, xd_projection *out);

/* Frees the matrix; may be empty. */
XD_API void xd_projection_destroy(xd_ctx *ctx, xd_projection *projection);

/* ---- the exact map of gold losses ---- */

/* Pairs of ids, one to one, and ids without a partner; free with xd_exact_map_destroy. */
typedef struct xd_exact_map {
    int32_t *student, *teacher; /* [pairs] by student id */
    int32_t *student_rest;      /* [student_rest_count] ascending */
    int32_t *teacher_rest;      /* [teacher_rest_count] ascending */
    int64_t pairs, student_rest_count, teacher_rest_count;
} xd_exact_map;

/* Creates a map. Strict: rows of weight 1 whose stored second id is -1. Relaxed: rows with a largest weight of 0.6 or more, for
 * ids below teacher_size. Of two student ids for one teacher id strict takes the lower, relaxed the larger weight. Errors:
 * ARGUMENT (strict: fewer than two columns, or an id not below teacher_size; weights as xd_projection_rows_cut), MEMORY. */
XD_API xd_result xd_exact_map_create(xd_ctx *ctx, const xd_projection_rows *rows, int64_t teacher_size,
                                     bool relaxed, xd_exact_map *out);
XD_API void xd_exact_map_destroy(xd_ctx *ctx, xd_exact_map *map);

#endif
