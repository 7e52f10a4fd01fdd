#ifndef XDI_COMPAT_ROUTE_PLAN_H
#define XDI_COMPAT_ROUTE_PLAN_H

#include "base/internal.h"
#include "kernel/types.h"

/* Plans which rectangle of which teacher shard goes where. The two sides may split positions and vocabulary differently. Pure:
 * every rank can compute any plan. */

/* One teacher rank's part of a sequence's logits. */
typedef struct xdi_teacher_shard {
    int64_t position_begin, position_end;
    int64_t vocabulary_begin, vocabulary_end;
} xdi_teacher_shard;

/* A rectangle of positions x columns elements to copy to the window. */
typedef struct xdi_teacher_piece {
    int64_t shard;
    int64_t from_position, from_column;
    int64_t to_position, to_column;
    int64_t positions, columns;
} xdi_teacher_piece;

/* The shards, and the window to copy. */
typedef struct xdi_teacher_route_desc {
    const xdi_teacher_shard *shards; /* [count]; empty or outside: no rectangle */
    int64_t count;
    int64_t begin, end; /* the window: positions [begin, end) by all of [0, vocabulary) */
    int64_t vocabulary;
} xdi_teacher_route_desc;

/* Returns the window's rectangles in the order of the shards. Local, allocates nothing.
 *
 *   pieces  [desc->count]; *piece_count of them are written
 *
 * Errors, outputs untouched: ARGUMENT (window or shard ends before it begins or leaves the vocabulary), SHAPE (shards overlap
 * in the window or do not cover it; a window of more than 2^63 logits or a shard of 2^63 positions). */
XD_PRIVATE xd_result xdi_teacher_route(xd_ctx *ctx, const xdi_teacher_route_desc *desc,
                                       xdi_teacher_piece *pieces, int64_t *piece_count);

/* Copies one rectangle, between f32 and bf16 too. On a GPU rows are device memory, and the work is queued on the stream. Local,
 * allocates nothing. Errors: SHAPE (the rectangle leaves a side), DTYPE. */
XD_PRIVATE xd_result xdi_teacher_piece_copy(xd_ctx *ctx, const xdi_teacher_piece *piece, xd_rows shard,
                                            xd_rows window);

#endif
