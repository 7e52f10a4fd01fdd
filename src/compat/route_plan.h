#ifndef XDI_COMPAT_ROUTE_PLAN_H
#define XDI_COMPAT_ROUTE_PLAN_H

#include "kernel/types.h"

/* From the ranks a teacher ran on to those a student runs on: which rectangle of which shard goes where.
 * Positions and vocabulary may be split differently on both sides, and unevenly. The plan is pure: it moves no
 * data and does not communicate, so every rank can compute the plan of any other. */

/* What one teacher rank holds of a sequence's logits: positions by vocabulary. */
typedef struct xd_teacher_shard {
    int64_t position_begin, position_end;
    int64_t vocabulary_begin, vocabulary_end;
} xd_teacher_shard;

/* A rectangle to copy: `positions` x `columns` elements, from row and column of the shard to row and column of the
 * window. */
typedef struct xd_teacher_piece {
    int64_t shard;
    int64_t from_position, from_column;
    int64_t to_position, to_column;
    int64_t positions, columns;
} xd_teacher_piece;

/* What the ranks of a teacher hold, and the part of it to copy. */
typedef struct xd_teacher_route_desc {
    const xd_teacher_shard *shards; /* [count]; empty shards, and those outside the window, give no
                                     * rectangle */
    int64_t count;
    int64_t begin, end; /* the window: positions [begin, end) by all of [0, vocabulary) */
    int64_t vocabulary;
} xd_teacher_route_desc;

/* The rectangles of the window, in the order of the shards.
 *
 *   pieces  [desc->count]; *piece_count of them are written
 *
 * Local, allocates nothing. Errors, outputs untouched: ARGUMENT for a window or shard that ends before it
 * begins or leaves the vocabulary; SHAPE when two shards overlap inside the window, naming both, when part of it is in no
 * shard, with how much, and for a window of more than 2^63 logits or a shard of more than 2^63 positions. */
XD_API xd_result xd_teacher_route(xd_ctx *ctx, const xd_teacher_route_desc *desc, xd_teacher_piece *pieces,
                                  int64_t *piece_count);

/* Copies one rectangle from its shard's rows to the window's, converting between f32 and bf16; on a GPU both are device
 * memory and the work is queued on the context's stream. Local, allocates nothing. Errors: SHAPE when the rectangle leaves
 * either, DTYPE. */
XD_API xd_result xd_teacher_piece_copy(xd_ctx *ctx, const xd_teacher_piece *piece, xd_rows shard,
                                       xd_rows window);

#endif
