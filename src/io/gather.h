#ifndef XDI_IO_GATHER_H
#define XDI_IO_GATHER_H

#include "io/weights.h"
#include "tensor/redistribute.h"

/* A tensor of a file. */
typedef struct xd_named_tensor {
    const char *name;
    xd_tensor tensor; /* this rank's view */
} xd_named_tensor;

/* What to write. */
typedef struct xd_weights_gather_desc {
    const char *directory;          /* required; exists on root */
    const xd_named_tensor *tensors; /* the same names, dtypes, layouts, order on every rank */
    int64_t tensor_count;
    int root; /* rank of `world` that writes */
    /* Of a tensor on root, at least one index of dimension 0; 0 -> 16 MiB. */
    size_t staging_bytes;
    uint64_t max_shard_bytes; /* as in xd_weights_writer_desc */
    const xd_weights_pair *metadata;
    int64_t metadata_count;
} xd_weights_gather_desc;

/* Saves a sharded model on root, slab by slab, with partial tensors reduced. Collective over the world.
 * Errors: MISMATCH (root, tensor_count, staging_bytes; no file begun), those of xd_tensor_gather and xd_weights_writer. */
XD_API xd_result xd_weights_gather(xd_comm *world, const xd_weights_gather_desc *desc);

#endif
