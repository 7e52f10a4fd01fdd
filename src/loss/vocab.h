#ifndef XDI_LOSS_VOCAB_H
#define XDI_LOSS_VOCAB_H

#include "comm/collective.h"
#include "kernel/types.h"
#include "tensor/region.h"

/* The split of the vocabulary, the columns of the logits, over a group. Immutable; every loss uses it. Logits have at least
 * end - begin columns; further ones are padding: ignored, gradient zero. */
typedef struct xd_vocab xd_vocab;

/* How to split a vocabulary. */
typedef struct xd_vocab_desc {
    int64_t size; /* required; true columns over all ranks */
    xd_comm *tp;  /* group that shares the vocabulary; NULL -> this rank has it all. Must outlive the split */
    /* Global columns of this rank, as from xd_chunk; may be empty. NULL -> an even split: rank r holds at most ceil(size / n)
     * columns from r ceil(size / n). */
    const xd_interval *columns;
} xd_vocab_desc;

/* Agrees on the columns of every rank. Collective over tp. Allocates a few words a rank, on host and device, until
 * xd_vocab_destroy. Waits for a GPU.
 * Errors: SHAPE (shards in rank order have a gap, overlap or end before or after size), MISMATCH (sizes), MEMORY. */
XD_API xd_result xd_vocab_create(xd_ctx *ctx, const xd_vocab_desc *desc, xd_vocab **out);

/* Frees it; local. NULL is fine. */
XD_API void xd_vocab_destroy(xd_vocab *vocab);

/* The split as this rank sees it. */
typedef struct xd_vocab_info {
    xd_comm *tp; /* NULL on one rank */
    int rank, ranks;
    int64_t begin, end; /* of this rank */
    int64_t size;
    const int64_t *offsets;        /* [ranks + 1] */
    const int64_t *device_offsets; /* the same in device memory */
} xd_vocab_info;

/* Returns the split; pointers live as long as the object. Local. */
XD_API xd_vocab_info xd_vocab_describe(const xd_vocab *vocab);

/* Returns OK for a status without errors, else DATA with counts, row and value. Host memory: xd_read copies a GPU's. Local. */
XD_API xd_result xd_status_check(xd_ctx *ctx, const xd_status *status);

#endif
