#ifndef XDI_ALIGN_PROJECTION_H
#define XDI_ALIGN_PROJECTION_H

#include "align/align.h"
#include "kernel/types.h"

/* Maps student ids to weighted teacher ids: votes become rows, rows a sparse matrix. Memory is that of the votes,
 * never [V_s, V_t]. All calls are local. */

/* ---- votes ---- */

/* A sparse sum of votes for pairs of a student id and a teacher id. */
typedef struct xd_votes xd_votes;

/* Sizes of vocabularies. */
typedef struct xd_votes_desc {
    int64_t student_size, teacher_size; /* required */
} xd_votes_desc;

/* Creates an empty sum. Errors: ARGUMENT (not 1 to 2^31 - 1 ids), MEMORY. */
XD_API xd_result xd_votes_create(xd_ctx *ctx, const xd_votes_desc *desc, xd_votes **out);
XD_API void xd_votes_destroy(xd_votes *votes);

/* Adds weight to a pair. Errors: ARGUMENT (ids; weight negative, NaN or above 3e38), MEMORY. */
XD_API xd_result xd_votes_add(xd_votes *votes, int64_t student_id, int64_t teacher_id, double weight);

/* ---- rows ---- */

/* The k best teacher ids of each student id; free with xd_projection_rows_destroy. */
typedef struct xd_projection_rows {
    int32_t *ids;   /* [rows, k]; -1: none */
    float *weights; /* [rows, k] */
    int64_t rows, k;
} xd_projection_rows;

/* Settings of xd_projection_rows_from_votes. */
typedef struct xd_projection_rows_desc {
    int64_t k; /* entries of a row, at least 1 */
    /* the reference's bits: docs/xtoken.md */
    bool compat;
    /* compat only: docs/xtoken.md */
    bool scale_trick;
} xd_projection_rows_desc;

/* Selects the k best normalised votes of each student id: largest first, lowest id among equals. Errors: ARGUMENT (k;
 * scale_trick without compat), MEMORY. */
XD_API xd_result xd_projection_rows_from_votes(xd_votes *votes, const xd_projection_rows_desc *desc,
                                               xd_projection_rows *out);

/* Frees the rows; may be empty. */
XD_API void xd_projection_rows_destroy(xd_ctx *ctx, xd_projection_rows *rows);

/* ---- the matrix that losses use ---- */

/* Options of a build; start from xd_projection_defaults. */
typedef struct xd_projection_options {
    int64_t max_pieces;       /* of a token, with votes, 1 to 32 */
    int64_t k;                /* entries of a student id, 1 to 1024 */
    bool disable_exact;       /* exact tokens also vote for pieces */
    bool reverse;             /* teacher tokens also vote for student pieces */
    bool special_pairs;       /* similar special tokens vote */
    double special_threshold; /* minimum similarity */
} xd_projection_options;

/* What a projection is valid for. All zero -> unknown. */
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
    const int64_t *column_begin; /* [teacher_size + 1] of the transpose */
    const int32_t *student_id;   /* [entries] ascending within a column */
    const float *column_weight;  /* [entries] */
    /* xd_projection_build and loading set it */
    xd_projection_origin origin;
} xd_projection;

/* Makes a matrix from rows. It is larger than the sizes if ids of rows need it. Drops entries without id, and adds
 * equal ids. Free with xd_projection_destroy. Errors: ARGUMENT (weights negative or not finite; negative sizes),
 * MEMORY. */
XD_API xd_result xd_projection_from_rows(xd_ctx *ctx, const xd_projection_rows *rows, int64_t student_size,
                                         int64_t teacher_size, xd_projection *out);

/* Frees the matrix; may be empty. */
XD_API void xd_projection_destroy(xd_ctx *ctx, xd_projection *projection);

/* ---- the exact map of gold losses ---- */

/* One-to-one pairs of ids, and the ids without a pair; free with xd_exact_map_destroy. */
typedef struct xd_exact_map {
    int32_t *student, *teacher; /* [pairs] by student id */
    int32_t *student_rest;      /* [student_rest_count] ascending */
    int32_t *teacher_rest;      /* [teacher_rest_count] ascending */
    int64_t pairs, student_rest_count, teacher_rest_count;
} xd_exact_map;

/* Which pairs a map has. */
typedef struct xd_exact_map_desc {
    const xd_projection_rows *rows; /* at least 2 columns without relaxed */
    int64_t teacher_size;
    bool relaxed; /* pairs rows with a largest weight from 0.6 on; false -> of 1, with second id -1 */
} xd_exact_map_desc;

/* Creates a map. Of two student ids for one teacher id strict takes the lower, relaxed the larger weight. Errors:
 * ARGUMENT (strict: columns, or an id not below teacher_size; weights negative, NaN or above 3e38), MEMORY. */
XD_API xd_result xd_exact_map_create(xd_ctx *ctx, const xd_exact_map_desc *desc, xd_exact_map *out);
XD_API void xd_exact_map_destroy(xd_ctx *ctx, xd_exact_map *map);

#endif
