#ifndef XDI_IO_GATHER_H
#define XDI_IO_GATHER_H

#include "io/weights.h"
#include "tensor/redistribute.h"

/* A tensor and its name in the file. */
typedef struct xd_named_tensor {
    const char *name;
    xd_tensor tensor; /* this rank's view; its layout has the whole shape */
} xd_named_tensor;

/* What to gather and where to write it. */
typedef struct xd_weights_gather_desc {
    const char *directory;          /* required; exists where root writes */
    const xd_named_tensor *tensors; /* the same names, dtypes, layouts and order on every rank */
    int64_t tensor_count;
    int root; /* world rank that writes */
    /* Of a tensor on root at once, at least one index of dimension 0; 0 -> 16 MiB. */
    size_t staging_bytes;
    uint64_t max_shard_bytes; /* as in xd_weights_writer_desc */
    const xd_weights_pair *metadata;
    int64_t metadata_count;
} xd_weights_gather_desc;

/* Saves a sharded model on root, one slab of a tensor at a time, with partial tensors reduced. No rank holds the whole
 * model.
 *
 * Collective over the world. Errors: MISMATCH (root, tensor_count or staging_bytes; no file begun), those of
 * xd_tensor_gather and of xd_weights_writer. If root cannot write, an older model stays as xd_weights_writer_commit says. */
XD_API xd_result xd_weights_gather(xd_comm *world, const xd_weights_gather_desc *desc);

#endif
