#ifndef XDI_LOSS_VOCAB_H
#define XDI_LOSS_VOCAB_H

#include "comm/collective.h"
#include "kernel/types.h"
#include "tensor/region.h"

/* How the columns of the logits, the vocabulary, lie over the ranks of one group. Immutable, agreed once,
 * used by every loss. Logits handed to a loss have at least end - begin columns; columns beyond that are
 * padding of the projection: they take no part, and their gradient is zero. */
typedef struct xd_vocab xd_vocab;

/* Agrees on the columns of every rank.
 *
 *   tp       the group that shares the vocabulary; NULL -> this rank holds it all. Must outlive the object.
 *   columns  global columns of this rank, as xd_chunk gives them; none at all is legal
 *   size     true columns over all ranks
 *
 * Collective over tp. Errors, the same on every rank: SHAPE when shards, in rank order, leave a gap, overlap or do
 * not end at size (both numbers are in the message), MISMATCH when sizes differ, MEMORY. Takes some words a rank of
 * the context's allocator and of its device's, which xd_vocab_destroy gives back; with a GPU it waits. */
XD_API xd_result xd_vocab_create(xd_ctx *ctx, xd_comm *tp, xd_interval columns, int64_t size, xd_vocab **out);

/* As xd_vocab_create with the even cut: rank r of n holds ceil(size / n) columns from r * ceil(size / n), the last ones
 * fewer or none. Collective over tp; errors as there. */
XD_API xd_result xd_vocab_create_even(xd_ctx *ctx, xd_comm *tp, int64_t size, xd_vocab **out);

/* Frees the object; local. NULL is fine. */
XD_API void xd_vocab_destroy(xd_vocab *vocab);

/* What was agreed, as this rank sees it. */
typedef struct xd_vocab_info {
    xd_comm *tp; /* NULL on one rank */
    int rank, ranks;
    int64_t begin, end; /* of this rank */
    int64_t size;
    const int64_t *offsets;        /* [ranks + 1] */
    const int64_t *device_offsets; /* the same in memory of the context's device */
} xd_vocab_info;

/* The agreed cut; the pointers live as long as the object. Local. */
XD_API xd_vocab_info xd_vocab_describe(const xd_vocab *vocab);

/* Turns what a status recorded into an error: OK when it is clean, else DATA with counts, row and value. The
 * status is on the host. Local. */
XD_API xd_result xd_status_check(xd_ctx *ctx, const xd_status *status);

/* The same for a status in memory of the context's device: xd_read, then xd_status_check. Local. */
XD_API xd_result xd_read_status(xd_ctx *ctx, const xd_status *status);

#endif
