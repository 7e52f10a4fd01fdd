#ifndef XDI_CHECKPOINT_MAP_H
#define XDI_CHECKPOINT_MAP_H

#include "checkpoint/checkpoint.h"
#include "io/weights.h"

/* Maps weights to tensors of model directories with other names or layouts, in both directions: docs/checkpoints.md. A weight
 * without an entry keeps its name. Each element, of theirs too, has exactly one entry. */

/* Maps their tensor, or indices of a dimension, to our weight. */
typedef struct xd_weight_map {
    /* At most one "{}" for 0, 1, 2 ... If only ours has it, number n of ours is index n of their dimension 0; and reversed. */
    const char *theirs; /* required */
    const char *ours;   /* NULL: may exist, is neither read nor written */
    bool transpose;     /* the last two dimensions: [in, out] there, [out, in] here */
    /* `length` indices from their_begin in their dimension `dim` are those from our_begin in ours. A stacked dimension counts,
     * but is not `dim`. */
    int dim;
    int64_t their_begin, our_begin;
    int64_t length; /* 0 -> all of both */
} xd_weight_map;

/* Weights and entries, the same on all ranks. */
typedef struct xd_mapped_weights {
    const xd_tensor_part *parts; /* [part_count] of xd_parallel_parts */
    int64_t part_count;
    const xd_weight_map *maps; /* [map_count] */
    int64_t map_count;
} xd_mapped_weights;

/* What to read. */
typedef struct xd_weights_import_desc {
    const char *directory; /* required; may differ between ranks */
    xd_mapped_weights weights;
    /* As in xd_checkpoint_load_desc and xd_weights_desc; also accepts entries without a weight. */
    bool lenient;
    bool convert;         /* floating point, by xd_cast; false -> DTYPE */
    size_t staging_bytes; /* of elements, at least 64, the same on all ranks; 0 -> 16 MiB */
} xd_weights_import_desc;

/* Reads a model directory into the parts. Collective. For a wrapper call xd_parallel_publish afterwards.
 *
 *   report   of their tensors; step is 0. Also filled in if its counts are the error; may be NULL
 *
 * Nothing changes before all ranks agree; IO after that leaves the weights partly loaded.
 * Errors: those of xd_weights_open; ARGUMENT (an entry; elements with two), MISMATCH (between ranks), MISSING, UNEXPECTED, SHAPE
 * (unless lenient; elements without an entry), DTYPE, UNSUPPORTED (dtype NONE), IO, MEMORY. */
XD_API xd_result xd_weights_import(xd_comm *comm, const xd_weights_import_desc *desc,
                                   xd_checkpoint_report *report);

/* What to write. */
typedef struct xd_weights_export_desc {
    const char *directory; /* required; exists on rank 0 */
    xd_mapped_weights weights;
    size_t staging_bytes;            /* of a tensor on rank 0, as for an import */
    uint64_t max_shard_bytes;        /* as in xd_weights_writer_desc */
    const xd_weights_pair *metadata; /* [metadata_count] of rank 0; `pieces`: of each */
    int64_t metadata_count;
    bool pieces; /* of each rank; the same on all; false -> rank 0 writes all */
} xd_weights_export_desc;

/* Writes a model directory with their names, order and shapes and our types. Collective. On failure an older model stays unless
 * the message says otherwise. With `pieces` no element moves between ranks; max_shard_bytes is not read.
 * Errors: those of xd_weights_import about entries, of xd_state_gather and xd_weights_writer; DTYPE (several in one tensor of
 * theirs), PEER (rank 0's disk). With `pieces`: MISMATCH (as xd_state_gather), STATE (.safetensors files exist). */
XD_API xd_result xd_weights_export(xd_comm *comm, const xd_weights_export_desc *desc);

#endif
