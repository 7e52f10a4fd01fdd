#ifndef XDI_COMPAT_ROUTE_PLAN_H
#define XDI_COMPAT_ROUTE_PLAN_H

#include "kernel/types.h"

/* From the ranks a teacher ran on to those a student runs on: which rectangle of which shard goes where.
 * Positions and vocabulary may be cut differently on both sides, and unevenly. The plan is pure: it moves
 * nothing and talks to nobody, so every rank can make that of any other. */

/* What one teacher rank holds of a sequence's logits: positions by vocabulary. */
typedef struct xd_teacher_shard {
    int64_t position_begin, position_end;
    int64_t vocabulary_begin, vocabulary_end;
} xd_teacher_shard;

/* A rectangle to copy: `positions` x `columns` elements, from a place in the shard's own rows to one in the
 * rows of the window. */
typedef struct xd_teacher_piece {
    int64_t shard;
    int64_t from_position, from_column;
    int64_t to_position, to_column;
    int64_t positions, columns;
} xd_teacher_piece;

/* What the ranks of a teacher hold, and the part of it that is wanted. */
typedef struct xd_teacher_route_desc {
    const xd_teacher_shard *shards; /* [count]; empty ones, and those outside the window, give no piece */
    int64_t count;
    int64_t begin, end; /* the window: positions [begin, end) by all of [0, vocabulary) */
    int64_t vocabulary;
} xd_teacher_route_desc;

/* The pieces of the window, in the order of the shards.
 *
 *   pieces  [desc->count]; *piece_count of them are written
 *
 * Local, allocates nothing. Errors, outputs untouched: ARGUMENT for a window or shard that ends before it
 * begins or leaves the vocabulary; SHAPE when two shards overlap inside the window, naming both, or when
 * some of it is in no shard, with how much. */
XD_API xd_result xd_teacher_route(xd_ctx *ctx, const xd_teacher_route_desc *desc, xd_teacher_piece *pieces,
                                  int64_t *piece_count);

/* Copies one piece out of its shard's rows into the window's, converting between f32 and bf16; on a GPU both are its
 * memory and the work is ordered on the context's stream. Local, allocates nothing. Errors: SHAPE when the piece leaves
 * either, DTYPE. */
XD_API xd_result xd_teacher_piece_copy(xd_ctx *ctx, const xd_teacher_piece *piece, xd_rows shard,
                                       xd_rows window);

#endif
