#ifndef XDI_LOSS_VOCAB_H
#define XDI_LOSS_VOCAB_H

#include "comm/collective.h"
#include "kernel/types.h"
#include "tensor/region.h"

/* The split of the logits' columns over a group. Immutable. Logits have at least end - begin columns; further ones are
 * padding: ignored, gradient zero. */
typedef struct xd_vocab xd_vocab;

/* How to split. */
typedef struct xd_vocab_desc {
    int64_t size; /* required; columns over all ranks */
    xd_comm *tp;  /* NULL -> this rank has it all. Outlives the split */
    /* This rank's, as from xd_chunk; may be empty. NULL -> an even split: rank r of n holds at most ceil(size / n)
     * columns, from r ceil(size / n) on */
    const xd_interval *columns;
} xd_vocab_desc;

/* Agrees on every rank's columns. Collective over tp. Holds a few words a rank, on host and device. Waits for a GPU.
 * Errors: SHAPE (size below 1; gap, overlap or other total), MISMATCH (sizes), MEMORY. */
XD_API xd_result xd_vocab_create(xd_ctx *ctx, const xd_vocab_desc *desc, xd_vocab **out);

/* Frees it. Local. */
XD_API void xd_vocab_destroy(xd_vocab *vocab);

/* A rank's view. */
typedef struct xd_vocab_info {
    xd_comm *tp; /* NULL on one rank */
    int rank, ranks;
    int64_t begin, end; /* of this rank */
    int64_t size;
    const int64_t *offsets;        /* [ranks + 1] */
    const int64_t *device_offsets; /* device memory */
} xd_vocab_info;

/* Returns the split; pointers live as long as the object. Local. */
XD_API xd_vocab_info xd_vocab_describe(const xd_vocab *vocab);

/* Returns XD_OK for a status without errors, else DATA with counts, row and value. status is in host memory. Local. */
XD_API xd_result xd_status_check(xd_ctx *ctx, const xd_status *status);

#endif
