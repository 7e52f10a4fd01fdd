#ifndef XDI_ALIGN_PROJECTION_H
#define XDI_ALIGN_PROJECTION_H

#include "align/align.h"
#include "kernel/types.h"

/* From a student's vocabulary to a teacher's: which teacher ids a student id stands for, and with what share.
 * Built once for a pair of tokenizers, offline: votes are counted (xd_votes), each student id keeps its best
 * (xd_projection_rows), and what losses use is a sparse matrix (xd_projection). Memory is that of the
 * votes, never [V_s, V_t]. All calls are local. */

/* ---- votes ---- */

/* A sparse sum of votes over (student id, teacher id). */
typedef struct xd_votes xd_votes;

/* Errors: ARGUMENT for a vocabulary of less than one id or more than 2^31 - 1, MEMORY. */
XD_API xd_result xd_votes_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size, xd_votes **out);
XD_API void xd_votes_destroy(xd_votes *votes);

/* Adds weight to one pair. Errors: ARGUMENT for an id outside its vocabulary, MEMORY. */
XD_API xd_result xd_votes_add(xd_votes *votes, int64_t student_id, int64_t teacher_id, double weight);

/* A token of one vocabulary, and its text in the tokens of the other. */
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
    int64_t max_pieces;  /* later pieces are cut off; at least 1 */
    const int64_t *skip; /* [skip_count] tokens that cast no vote */
    int64_t skip_count;
    const int64_t *foreign_skip; /* [foreign_skip_count] a token with such a piece casts no vote */
    int64_t foreign_skip_count;
} xd_votes_pass;

/* Every token votes for its pieces with the weights of xd_piece_weights, as in NeMo-RL's
 * minimal_projection_via_multitoken.py. Errors: as xd_votes_add; votes added before the
 * failure stay. */
XD_API xd_result xd_votes_add_pass(xd_votes *votes, const xd_votes_pass *pass);

/* Shares of a token's pieces: 0.9 * 0.1^i, scaled to sum 1. Pure. */
XD_API void xd_piece_weights(int64_t count, double *weights);

/* Votes for special tokens ("<...>") that look alike: similarity = 0.6 R + 0.4 J, R the Ratcliff-Obershelp
 * ratio of the strings, J the Jaccard index of their words longer than two letters. */
typedef struct xd_special_desc {
    xd_texts student, teacher; /* vocabularies */
    double threshold;          /* least similarity of a pair */
    int64_t max_pairs;         /* best pairs a student token keeps */
} xd_special_desc;

/* One pair of similar special tokens. */
typedef struct xd_special_pair {
    int64_t student_id, teacher_id;
    double similarity;
} xd_special_pair;

/* The pairs, best first within a student token, lowest teacher id among equals. *pairs comes from the
 * context's allocator: xd_release. Errors: ARGUMENT for a negative max_pairs, MEMORY. */
XD_API xd_result xd_special_pairs(xd_ctx *ctx, const xd_special_desc *desc, xd_special_pair **pairs,
                                  int64_t *count);

/* The student id keeps no vote but one of weight 1 for the teacher id. Errors: as xd_votes_add. */
XD_API xd_result xd_votes_set_exact(xd_votes *votes, int64_t student_id, int64_t teacher_id);

/* One cell of the votes. */
typedef struct xd_vote {
    int32_t student_id, teacher_id;
    double weight;
} xd_vote;

/* All cells, by student id, then teacher id; valid until the next call on votes. */
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
    /* The reference's file to the last bit of its bf16 arithmetic: votes rounded to bf16, normalised, the
     * best k; slots without votes hold the lowest teacher ids that are free, with weight 0. */
    bool compat;
    bool scale_trick; /* compat only: the last slot's weight becomes 0.2, rows are normalised again */
} xd_projection_rows_desc;

/* Normalised votes, largest first, lowest id among equals. Errors: ARGUMENT for k < 1 or the scale trick
 * without compat, MEMORY. */
XD_API xd_result xd_projection_rows_from_votes(xd_votes *votes, const xd_projection_rows_desc *desc,
                                               xd_projection_rows *out);

/* Rows of student ids whose string the teacher has too become that id alone; of equal teacher strings the
 * highest id wins (reapply_exact_map.py). An empty string is nobody's. Errors: ARGUMENT when there are more
 * student strings than rows; MEMORY. */
XD_API xd_result xd_projection_rows_apply_exact(xd_ctx *ctx, xd_projection_rows *rows, xd_texts student,
                                                xd_texts teacher);

/* Settings of xd_projection_rows_cut. */
typedef struct xd_projection_cut_desc {
    int64_t k; /* entries of a row, at least 1 */
    /* As the reference does for files with the scale trick: the stored last entry is kept in the last slot;
     * in rows with free slots it also takes part in the sorting, and so appears twice. */
    bool preserve_last;
    bool compat; /* weights are bf16 numbers, and rounded to bf16 again */
} xd_projection_cut_desc;

/* Keeps the k largest weights of every row, normalised (sort_and_cut_projection_matrix.py). Entries without
 * id or weight fall. Errors: ARGUMENT for k < 1, MEMORY. */
XD_API xd_result xd_projection_rows_cut(xd_ctx *ctx, const xd_projection_rows *rows,
                                        const xd_projection_cut_desc *desc, xd_projection_rows *out);

/* What is kept of similarities. */
typedef struct xd_similarity_desc {
    int64_t k;        /* entries of a row, at least 1 */
    double threshold; /* entries below it lose their id but keep their weight; 0: none does */
} xd_similarity_desc;

/* Rows from similarities in [-1, 1], such as cosines of embeddings: |s| to the power of ten times the row's
 * largest, normalised, the best k (minimal_projection_generator.py).
 *
 *   similarities  [student ids, teacher ids] f32, memory of the host
 *
 * On the threads of the context; the same bits for any number. Errors: ARGUMENT for k < 1, DTYPE, SHAPE, MEMORY. */
XD_API xd_result xd_projection_rows_from_similarities(xd_ctx *ctx, xd_rows similarities,
                                                      const xd_similarity_desc *desc,
                                                      xd_projection_rows *out);

/* The same with the cosine similarities of two sets of embeddings, a row at a time.
 *
 *   student  [student ids, width] f32, memory of the host
 *   teacher  [teacher ids, width] likewise
 */
XD_API xd_result xd_projection_rows_from_embeddings(xd_ctx *ctx, xd_rows student, xd_rows teacher,
                                                    const xd_similarity_desc *desc, xd_projection_rows *out);

/* Divides every row by its sum; rows that sum to 0 stay. [rows, columns], in place. This is the whole of the
 * reference's one-sided Sinkhorn step: repeating it changes nothing. */
XD_API void xd_normalise_rows(double *matrix, int64_t rows, int64_t columns);

/* Frees the rows; empty ones are fine. */
XD_API void xd_projection_rows_destroy(xd_ctx *ctx, xd_projection_rows *rows);

/* ---- the matrix that losses use ---- */

/* How a projection is built from two tokenizers. Start from xd_projection_defaults. */
typedef struct xd_projection_options {
    int64_t max_pieces;       /* first pieces of a token that get votes, 1 to 32 */
    int64_t k;                /* entries that a student id keeps, 1 to 1024 */
    bool disable_exact;       /* a token that both vocabularies have goes through its pieces like any other */
    bool reverse;             /* the teacher's tokens vote too, each for its pieces in the student's tokens */
    bool special_pairs;       /* special tokens that look alike vote (xd_special_pairs) */
    double special_threshold; /* similarity that such a pair needs */
} xd_projection_options;

/* What a projection was made of: it is right for these two tokenizers only. All zero -> not said. */
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
    xd_projection_origin
        origin; /* for files: filled by xd_projection_build and by loading; who makes a matrix in another
                                  * way sets it before xd_projection_save */
} xd_projection;

/* From rows: entries without id fall, equal ids of a row are added up. Sizes are those of the tokenizers, or
 * larger when the rows need it. Free with xd_projection_destroy. Errors: ARGUMENT for weights that are negative
 * or not finite, MEMORY. */
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

/* Student ids that are one teacher id and the other way round, and those that are not. One block; free with
 * xd_exact_map_destroy. */
typedef struct xd_exact_map {
    int32_t *student, *teacher; /* [pairs] by student id */
    int32_t *student_rest;      /* [student_rest_count] ascending */
    int32_t *teacher_rest;      /* [teacher_rest_count] ascending */
    int64_t pairs, student_rest_count, teacher_rest_count;
} xd_exact_map;

/* Strict: a row of weight 1 whose stored second id is -1. Relaxed: a largest weight of 0.6 or more. Two
 * student ids for one teacher id: strict keeps the lower, relaxed the one with the larger weight. Errors:
 * ARGUMENT for fewer than two columns when strict, MEMORY. */
XD_API xd_result xd_exact_map_create(xd_ctx *ctx, const xd_projection_rows *rows, int64_t teacher_size,
                                     bool relaxed, xd_exact_map *out);
XD_API void xd_exact_map_destroy(xd_ctx *ctx, xd_exact_map *map);

#endif
