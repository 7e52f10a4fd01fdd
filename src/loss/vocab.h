#ifndef XDI_LOSS_VOCAB_H
#define XDI_LOSS_VOCAB_H

#include "comm/collective.h"
#include "kernel/types.h"
#include "tensor/region.h"

/* How the columns of the logits (the vocabulary) are split over the ranks of one group. Immutable; the ranks agree on it
 * once, and every loss uses it. Logits passed to a loss have at least end - begin columns; further columns are padding of
 * the output layer: they are ignored, and their gradient is zero. */
typedef struct xd_vocab xd_vocab;

/* Agrees on the columns of every rank.
 *
 *   tp       the group that shares the vocabulary; NULL -> this rank holds it all. Must outlive the object.
 *   columns  global columns of this rank, as xd_chunk gives them; may be empty
 *   size     true columns over all ranks
 *
 * Collective over tp. Errors, the same on every rank: SHAPE when shards, in rank order, leave a gap, overlap or do
 * not end at size (both numbers are in the message), MISMATCH when sizes differ, MEMORY. Takes a few
 * words for each rank from the context's allocator and from its device's; xd_vocab_destroy frees them. On a GPU the call
 * waits for the device. */
XD_API xd_result xd_vocab_create(xd_ctx *ctx, xd_comm *tp, xd_interval columns, int64_t size, xd_vocab **out);

/* As xd_vocab_create with an even split: rank r of n holds ceil(size / n) columns from r * ceil(size / n), the last ranks
 * fewer or none. Collective over tp; errors as xd_vocab_create. */
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

/* The agreed split; the pointers live as long as the object. Local. */
XD_API xd_vocab_info xd_vocab_describe(const xd_vocab *vocab);

/* Turns a status into a result: OK when it recorded nothing, else DATA with counts, row and value. The status is in
 * host memory. Local. */
XD_API xd_result xd_status_check(xd_ctx *ctx, const xd_status *status);

/* The same for a status in memory of the context's device: xd_read, then xd_status_check. Local. */
XD_API xd_result xd_read_status(xd_ctx *ctx, const xd_status *status);

#endif
