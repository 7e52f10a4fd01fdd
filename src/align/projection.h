#ifndef XDI_ALIGN_PROJECTION_H
#define XDI_ALIGN_PROJECTION_H

#include "align/align.h"
#include "kernel/types.h"

/* From a student's vocabulary to a teacher's: which teacher ids a student id stands for, and with what weights.
 * Built once for a pair of tokenizers, offline: votes are counted (xd_votes), the best of each student id are selected
 * (xd_projection_rows), and losses use the result as a sparse matrix (xd_projection). Memory is that of the
 * votes, never [V_s, V_t]. All calls are local. */

/* ---- votes ---- */

/* A sparse sum of votes over (student id, teacher id). */
typedef struct xd_votes xd_votes;

/* An empty sum. Errors: ARGUMENT for a vocabulary of less than one id or more than 2^31 - 1, MEMORY. */
XD_API xd_result xd_votes_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size, xd_votes **out);
XD_API void xd_votes_destroy(xd_votes *votes);

/* Adds weight to one pair. Errors: ARGUMENT for an id outside its vocabulary and for a weight that is negative, NaN or above
 * 3e38, MEMORY. */
XD_API xd_result xd_votes_add(xd_votes *votes, int64_t student_id, int64_t teacher_id, double weight);

/* A token of one vocabulary, and its pieces: the tokens of the other vocabulary that spell its text. */
typedef struct xd_pieces {
    xd_text text; /* "<|...|>" is a special token: it casts no votes here */
    const int64_t *ids;
    int64_t count;
} xd_pieces;

/* A pass over all tokens of one vocabulary. */
typedef struct xd_votes_pass {
    const xd_pieces *tokens; /* [count], by id */
    int64_t count;
    bool reverse;        /* the tokens are the teacher's and the pieces the student's */
    int64_t max_pieces;  /* later pieces are ignored; at least 1 */
    const int64_t *skip; /* [skip_count] tokens that cast no vote */
    int64_t skip_count;
    const int64_t *foreign_skip; /* [foreign_skip_count] a token with such a piece casts no vote */
    int64_t foreign_skip_count;
} xd_votes_pass;

/* Every token votes for its pieces with the weights of xd_piece_weights, as in NeMo-RL's
 * minimal_projection_via_multitoken.py. Errors: as xd_votes_add; votes added before the
 * failure remain. */
XD_API xd_result xd_votes_add_pass(xd_votes *votes, const xd_votes_pass *pass);

/* Weights of a token's pieces: 0.9 * 0.1^i, scaled to sum 1. Pure. */
XD_API void xd_piece_weights(int64_t count, double *weights);

/* Votes for special tokens ("<...>") that look alike: similarity = 0.6 R + 0.4 J, R the Ratcliff-Obershelp
 * ratio of the strings, J the Jaccard index of their words longer than two letters. */
typedef struct xd_special_desc {
    xd_texts student, teacher; /* vocabularies */
    double threshold;          /* minimum similarity of a pair */
    int64_t max_pairs;         /* pairs of one student token, the best ones */
} xd_special_desc;

/* One pair of similar special tokens. */
typedef struct xd_special_pair {
    int64_t student_id, teacher_id;
    double similarity;
} xd_special_pair;

/* The pairs, best first within a student token, lowest teacher id among equals. *pairs comes from the
 * context's allocator: xd_release. Errors: ARGUMENT for a negative max_pairs or a threshold that is not finite, MEMORY. */
XD_API xd_result xd_special_pairs(xd_ctx *ctx, const xd_special_desc *desc, xd_special_pair **pairs,
                                  int64_t *count);

/* Replaces all votes of the student id by one of weight 1 for the teacher id. Errors: as xd_votes_add. */
XD_API xd_result xd_votes_set_exact(xd_votes *votes, int64_t student_id, int64_t teacher_id);

/* One cell of the votes: their sum for a pair of ids. */
typedef struct xd_vote {
    int32_t student_id, teacher_id;
    double weight;
} xd_vote;

/* All cells, by student id, then teacher id; valid until the next call on votes. Errors: MEMORY. */
XD_API xd_result xd_votes_read(xd_votes *votes, const xd_vote **cells, int64_t *count);

/* ---- rows ---- */

/* The k best teacher ids of every student id, as the reference's files hold them. ids and weights are one
 * block from the context's allocator; free with xd_projection_rows_destroy. */
typedef struct xd_projection_rows {
    int32_t *ids;   /* [rows, k]; -1: no entry */
    float *weights; /* [rows, k] */
    int64_t rows, k;
} xd_projection_rows;

/* Settings of xd_projection_rows_from_votes. */
typedef struct xd_projection_rows_desc {
    int64_t k; /* entries of a row, at least 1 */
    /* The same bits as the reference's file and its bf16 arithmetic: votes rounded to bf16, normalised, the
     * best k; entries without votes hold the lowest unused teacher ids, with weight 0. */
    bool compat;
    /* compat only: the last entry's weight becomes 0.2, in rows of xd_votes_set_exact 0, and rows are normalised again. As in
     * the reference this holds for k = 1 too, where an exact row becomes empty. */
    bool scale_trick;
} xd_projection_rows_desc;

/* Normalised votes, largest first, lowest id among equals. Errors: ARGUMENT for k < 1 or the scale trick
 * without compat, MEMORY. */
XD_API xd_result xd_projection_rows_from_votes(xd_votes *votes, const xd_projection_rows_desc *desc,
                                               xd_projection_rows *out);

/* The row of a student id whose string the teacher has too becomes that teacher id alone; of equal teacher strings the
 * highest id wins (reapply_exact_map.py). Empty strings are never matched. Errors: ARGUMENT when there are more
 * student strings than rows; MEMORY. */
XD_API xd_result xd_projection_rows_apply_exact(xd_ctx *ctx, xd_projection_rows *rows, xd_texts student,
                                                xd_texts teacher);

/* Settings of xd_projection_rows_cut. */
typedef struct xd_projection_cut_desc {
    int64_t k; /* entries of a row, at least 1 */
    /* As the reference does for files with the scale trick: the stored last entry stays the last;
     * in rows with free entries it also takes part in the sorting, and so appears twice. */
    bool preserve_last;
    bool compat; /* weights are bf16 numbers, and rounded to bf16 again */
} xd_projection_cut_desc;

/* The k largest weights of every row, normalised (sort_and_cut_projection_matrix.py). Entries without
 * id or weight are dropped. Errors: ARGUMENT for k < 1, and for an entry whose weight is negative, NaN or above 3e38, MEMORY. */
XD_API xd_result xd_projection_rows_cut(xd_ctx *ctx, const xd_projection_rows *rows,
                                        const xd_projection_cut_desc *desc, xd_projection_rows *out);

/* Which similarities become entries. */
typedef struct xd_similarity_desc {
    int64_t k;        /* entries of a row, at least 1 */
    double threshold; /* entries below it lose their id but not their weight; 0: none does */
} xd_similarity_desc;

/* Rows from similarities in [-1, 1], such as cosines of embeddings: |s| to the power of ten times the row's
 * largest, normalised, the best k (minimal_projection_generator.py).
 *
 *   similarities  [student ids, teacher ids] f32, host memory
 *
 * On the threads of the context; the same bits for any number. Errors: ARGUMENT for k < 1, a similarity that is NaN or, by more
 * than rounding (0.01), outside [-1, 1], a threshold that is not finite; DTYPE, SHAPE, MEMORY. */
XD_API xd_result xd_projection_rows_from_similarities(xd_ctx *ctx, xd_rows similarities,
                                                      const xd_similarity_desc *desc,
                                                      xd_projection_rows *out);

/* As xd_projection_rows_from_similarities, with the cosine similarities of two sets of embeddings, a row at a time; every
 * number of the embeddings must be finite.
 *
 *   student  [student ids, width] f32, host memory
 *   teacher  [teacher ids, width] f32, host memory
 */
XD_API xd_result xd_projection_rows_from_embeddings(xd_ctx *ctx, xd_rows student, xd_rows teacher,
                                                    const xd_similarity_desc *desc, xd_projection_rows *out);

/* Divides every row by its sum; rows that sum to 0 are unchanged. [rows, columns], in place. This equals the
 * reference's one-sided Sinkhorn steps, any number of them: repeating it changes nothing. */
XD_API void xd_normalise_rows(double *matrix, int64_t rows, int64_t columns);

/* Frees the rows; empty ones are fine. */
XD_API void xd_projection_rows_destroy(xd_ctx *ctx, xd_projection_rows *rows);

/* ---- the matrix that losses use ---- */

/* How a projection is built from two tokenizers. Start from xd_projection_defaults. */
typedef struct xd_projection_options {
    int64_t max_pieces;       /* first pieces of a token that get votes, 1 to 32 */
    int64_t k;                /* maximum entries of a student id, 1 to 1024 */
    bool disable_exact;       /* a token that both vocabularies have votes for its pieces like any other */
    bool reverse;             /* the teacher's tokens vote too, each for its pieces in the student's tokens */
    bool special_pairs;       /* special tokens that look alike vote (xd_special_pairs) */
    double special_threshold; /* minimum similarity of such a pair */
} xd_projection_options;

/* What a projection was made of: it is valid for these two tokenizers only. All zero -> unknown. */
typedef struct xd_projection_origin {
    uint64_t student_hash, teacher_hash; /* xd_tokenizer_info.hash */
    xd_projection_options options;
} xd_projection_origin;

/* Sparse [student_size, teacher_size], by rows and by columns. Immutable; may be shared by threads. */
typedef struct xd_projection {
    int64_t student_size, teacher_size, entries;
    const int64_t *row_begin;    /* [student_size + 1] */
    const int32_t *teacher_id;   /* [entries] ascending within a row */
    const float *weight;         /* [entries] */
    const int64_t *column_begin; /* [teacher_size + 1] the transposed matrix */
    const int32_t *student_id;   /* [entries] ascending within a column */
    const float *column_weight;  /* [entries] */
    /* For files: xd_projection_build and loading fill it; set it before xd_projection_save for a matrix made in another
     * way. */
    xd_projection_origin origin;
} xd_projection;

/* From rows: entries without id are dropped, equal ids of a row are added up. Sizes are those of the tokenizers, or
 * larger when the rows need it. Free with xd_projection_destroy. Errors: ARGUMENT for weights that are negative
 * or not finite and for sizes below 0, MEMORY. */
XD_API xd_result xd_projection_from_rows(xd_ctx *ctx, const xd_projection_rows *rows, int64_t student_size,
                                         int64_t teacher_size, xd_projection *out);

/* A matrix as a list of its cells. */
typedef struct xd_projection_cells {
    const xd_vote *cells; /* [count] in any order; equal ones are added up */
    int64_t count;
    int64_t student_size, teacher_size; /* of the vocabularies; larger when a cell needs it */
} xd_projection_cells;

/* From a list of cells. Errors: as xd_projection_from_rows. */
XD_API xd_result xd_projection_from_cells(xd_ctx *ctx, const xd_projection_cells *cells, xd_projection *out);

/* Frees the matrix; an empty one is fine. */
XD_API void xd_projection_destroy(xd_ctx *ctx, xd_projection *projection);

/* ---- the exact map of gold losses ---- */

/* Student and teacher ids that stand for each other one to one, and the ids without a partner. One block of memory; free
 * with xd_exact_map_destroy. */
typedef struct xd_exact_map {
    int32_t *student, *teacher; /* [pairs] by student id */
    int32_t *student_rest;      /* [student_rest_count] ascending */
    int32_t *teacher_rest;      /* [teacher_rest_count] ascending */
    int64_t pairs, student_rest_count, teacher_rest_count;
} xd_exact_map;

/* Pairs of a strict map: rows of weight 1 whose stored second id is -1. Relaxed: rows with a largest weight of 0.6 or more.
 * Of two student ids for one teacher id strict takes the lower, relaxed the one with the larger weight. Of teacher ids that are
 * not below teacher_size relaxed makes no pairs. Errors: ARGUMENT when strict, for fewer than two columns and for such an id;
 * for weights as xd_projection_rows_cut; MEMORY. */
XD_API xd_result xd_exact_map_create(xd_ctx *ctx, const xd_projection_rows *rows, int64_t teacher_size,
                                     bool relaxed, xd_exact_map *out);
XD_API void xd_exact_map_destroy(xd_ctx *ctx, xd_exact_map *map);

#endif
