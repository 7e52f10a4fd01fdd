#ifndef XDI_CHECKPOINT_MAP_H
#define XDI_CHECKPOINT_MAP_H

#include "checkpoint/checkpoint.h"
#include "io/weights.h"

/* Maps weights to tensors of Hugging Face model directories with other names or layouts, in both directions:
 * docs/checkpoints.md. GPT-2 (examples/16_gpt2_names.c):
 *
 *     { "wte.weight", "embed.weight" },
 *     { "h.{}.attn.c_attn.weight", "blocks.{}.k.weight", .transpose = true, .dim = 1, .their_begin = 768, .length = 768 },
 *
 * A weight without an entry keeps its name. Each element of a weight and of a tensor of theirs needs exactly one entry. */

/* Maps their tensor, or indices of one dimension, to our weight. Only theirs is required. */
typedef struct xd_weight_map {
    /* Names with at most one "{}" for 0, 1, 2 and so on. If only ours has it, number n of ours is index n of their dimension 0.
     * If only theirs has it, the reverse. */
    const char *theirs; /* required */
    const char *ours;   /* NULL: tensors that may exist, but are neither read nor written */
    bool transpose;     /* the last two dimensions: [in, out] there, [out, in] here */
    /* Indices [their_begin, their_begin + length) of their dimension `dim` are [our_begin, our_begin + length) of ours. A
     * stacked dimension counts in `dim`, but is not `dim`. */
    int dim;
    int64_t their_begin, our_begin;
    int64_t length; /* 0 -> all indices of both */
} xd_weight_map;

/* Weights and their entries, the same list on all ranks. */
typedef struct xd_mapped_weights {
    const xd_tensor_part *parts; /* [part_count] of xd_parallel_parts */
    int64_t part_count;
    const xd_weight_map *maps; /* [map_count] */
    int64_t map_count;
} xd_mapped_weights;

/* What to read. */
typedef struct xd_weights_import_desc {
    const char *directory; /* required; for xd_weights_open; paths may differ between ranks */
    xd_mapped_weights weights;
    /* Accept missing, unexpected and wrongly shaped tensors, entries without a weight, and an index that differs from its
     * shards: the shards count, with a warning. */
    bool lenient;
    bool convert;         /* floating-point types, as xd_cast; false -> DTYPE */
    size_t staging_bytes; /* of elements in memory at once, at least 64, the same on all ranks; 0 -> 16 MiB */
} xd_weights_import_desc;

/* Reads a model directory into the parts. Collective. A wrapped model needs xd_parallel_publish afterwards.
 *
 *   report   of their tensors; step is 0. Also filled in when its counts make the call fail; may be NULL
 *
 * Nothing changes before all ranks agree; IO while data moves leaves the weights partly loaded.
 * Errors: those of xd_weights_open; ARGUMENT (an invalid entry; two for the same elements), MISMATCH (between ranks), MISSING,
 * UNEXPECTED, SHAPE (unless lenient; elements without an entry), DTYPE (also several in one tensor of theirs), UNSUPPORTED (a
 * type that cannot be read), IO, MEMORY. */
XD_API xd_result xd_weights_import(xd_comm *comm, const xd_weights_import_desc *desc,
                                   xd_checkpoint_report *report);

/* What to write. */
typedef struct xd_weights_export_desc {
    const char *directory; /* required; exists on rank 0 */
    xd_mapped_weights weights;
    size_t staging_bytes; /* of a tensor on rank 0 at once, at least 64, the same on all ranks; 0 -> 16 MiB */
    uint64_t max_shard_bytes;        /* as in xd_weights_writer_desc */
    const xd_weights_pair *metadata; /* [metadata_count] of rank 0, with `pieces` of each rank */
    int64_t metadata_count;
    bool pieces; /* each rank writes its own files; the same on all ranks; false -> rank 0 writes all */
} xd_weights_export_desc;

/* Writes a model directory with their names, order and shapes and our types. Collective. An older model stays unless the
 * message says otherwise.
 *
 * Rank 0 gathers and writes windows of weights (xd_state_gather) and publishes once (xd_weights_writer_commit). With `pieces`
 * each rank writes its elements to shard-0000(r+1)-model-0000k-of-0000n.safetensors, without max_shard_bytes.
 * Errors: those of xd_weights_import about entries, of xd_state_gather and xd_weights_writer; PEER (rank 0's disk failed). With `pieces`:
 * MISMATCH (as in xd_state_gather), STATE (.safetensors files exist), those of xdi_safetensors_writer. */
XD_API xd_result xd_weights_export(xd_comm *comm, const xd_weights_export_desc *desc);

#endif
