#ifndef XDI_IO_GATHER_H
#define XDI_IO_GATHER_H

#include "io/weights_files.h"
#include "tensor/redistribute.h"

/* One tensor of a model and the name it has in the file. */
typedef struct xd_named_tensor {
    const char *name;
    xd_tensor tensor; /* this rank's view; its layout has the shape of the whole tensor */
} xd_named_tensor;

/* What to gather and where to write it. */
typedef struct xd_weights_gather_desc {
    const char *directory;          /* required; exists where root writes */
    const xd_named_tensor *tensors; /* the same names, dtypes and layouts in the same order on every rank */
    int64_t tensor_count;
    int root;                 /* world rank that writes */
    size_t staging_bytes;     /* of a tensor in root's memory at once, at least one index of dimension 0; 0 ->
                               * 16 MiB */
    uint64_t max_shard_bytes; /* as in xd_weights_writer_desc */
    const xd_safetensors_pair *metadata;
    int64_t metadata_count;
} xd_weights_gather_desc;

/* Saves a sharded model as a model directory that root writes, one slab of a tensor at a time, so that no rank ever
 * holds the whole model. Partial tensors are reduced.
 *
 * Collective over the world. Errors: MISMATCH when root, tensor_count or staging_bytes differ between ranks, before a file is
 * begun; those of xd_tensor_gather and of xd_weights_writer, on every rank alike: when root
 * cannot write, every rank returns an error, and an older model stays as xd_weights_writer_commit says. */
XD_API xd_result xd_weights_gather(xd_comm *world, const xd_weights_gather_desc *desc);

#endif
