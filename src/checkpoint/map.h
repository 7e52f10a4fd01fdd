#ifndef XDI_CHECKPOINT_MAP_H
#define XDI_CHECKPOINT_MAP_H

#include "checkpoint/checkpoint.h"
#include "io/safetensors.h"

/* Weights under the names and in the layouts of others: a model directory of Hugging Face is read into a model that names, turns,
 * joins or stacks its weights otherwise, and written again so that every tensor has the bits that were read. A list of entries
 * says what is what, and works in both directions. GPT-2, for a model with a weight for each projection:
 *
 *     { "wte.weight", "embed.weight" },
 *     { "h.{}.attn.c_attn.weight", "blocks.{}.q.weight", .transpose = true, .dim = 1, .length = 768 },
 *     { "h.{}.attn.c_attn.weight", "blocks.{}.k.weight", .transpose = true, .dim = 1, .their_begin = 768, .length = 768 },
 *     { "h.{}.attn.c_attn.weight", "blocks.{}.v.weight", .transpose = true, .dim = 1, .their_begin = 1536, .length = 768 },
 *     { "h.{}.mlp.c_fc.weight", "blocks.{}.up.weight", .transpose = true },
 *     ...
 *
 * A weight that no entry names is itself in the files. Every element of a weight must come from exactly one entry, and every
 * element of a tensor of theirs must go to exactly one weight: what the entries do not say is refused, not guessed. */

/* An entry: a tensor of theirs, or indices of one of its dimensions, is a weight of ours, or indices of it. Zero is the default of
 * every field but theirs. */
typedef struct xd_weight_map {
    /* Names, with at most one "{}" for a number: 0, 1, 2 and so on. If ours alone has it, theirs is stacked: number n of ours is
     * index n of their dimension 0, which ours lacks. If theirs alone has it, ours is stacked likewise. */
    const char *theirs; /* required */
    const char *ours;   /* NULL: such tensors may be in the files, are not read, and are not written */
    bool transpose;     /* the last two dimensions are exchanged: a linear layer is [in, out] there and [out,
                         * in] here */
    /* Part of a tensor: indices [their_begin, their_begin + length) of their dimension `dim` (counted with the dimension that is
     * stacked, which cannot be this one) are indices [our_begin, our_begin + length) of the same dimension of ours. */
    int dim;
    int64_t their_begin, our_begin;
    int64_t length; /* 0 -> all indices, of both */
} xd_weight_map;

/* Weights, and the names they have elsewhere. All ranks have the same list: names, types, shapes, order, entries. */
typedef struct xd_mapped_weights {
    const xd_tensor_part *parts; /* [part_count] as for a checkpoint: xd_parallel_parts */
    int64_t part_count;
    const xd_weight_map *maps; /* [map_count] */
    int64_t map_count;
} xd_mapped_weights;

/* Checks that entries can be followed in both directions, with the shapes of the parts alone: no file is touched. Local.
 * Errors: ARGUMENT for an entry that makes no sense or names no weight, and for two entries that take the same elements, naming
 * both; SHAPE for elements of a tensor that no entry names, with their number; DTYPE for weights of different types in one
 * tensor of theirs; MEMORY. */
XD_API xd_result xd_weight_map_check(xd_ctx *ctx, const xd_mapped_weights *weights);

/* What to read. Zero is the default of the fields that are not required. */
typedef struct xd_weights_import_desc {
    const char *directory; /* required; what xd_weights_reader_open opens. Ranks may reach it by different
                            * paths */
    xd_mapped_weights weights;
    bool lenient; /* tensors of theirs that are missing, unexpected or of another shape are reported, and
                   * what is here of them stays as it is; entries may name no weight. So may an index name
                   * tensors that its shards lack, or lack some of theirs: what a shard has is read, and the
                   * context warns. false -> they are errors */
    bool convert; /* floating-point tensors of another type are converted, as by xd_cast; false -> DTYPE */
    size_t staging_bytes; /* of elements in memory at once, at least 64, the same on all ranks; 0 -> 16 MiB */
} xd_weights_import_desc;

/* Fills the parts from a model directory. Each rank reads what it holds, and what lies less than 256 KiB from it; a tensor that is
 * turned is read in the order of the file, piece by piece. Any number of ranks, with any parts. A wrapped model shows the new
 * values after xd_parallel_publish.
 *
 *   report   counts and names tensors of theirs; step is 0. Filled in also when the load is refused for what it counts; may be
 *            NULL
 *
 * A tied weight is one part, under the name of its owner, and one tensor of the files; a second copy of it there is unexpected,
 * unless an entry leaves it out.
 *
 * Collective. Memory: staging_bytes, twice that when types are converted or on a device, a MiB, and the headers of the files.
 * Nothing is changed before all ranks have agreed on all of the metadata. Errors, on every rank: those of xd_weight_map_check;
 * ARGUMENT; MISMATCH when ranks pass other lists or find other files; those of xd_weights_reader_open, of the lowest rank that has
 * one with the same code and text on all ranks (MEMORY apart); MISSING, UNEXPECTED, SHAPE
 * (all three when not lenient, by name), DTYPE, UNSUPPORTED for a type that cannot be read; IO, MEMORY. An IO error while data
 * is moved leaves the weights partly loaded. */
XD_API xd_result xd_weights_import(xd_comm *comm, const xd_weights_import_desc *desc,
                                   xd_checkpoint_report *report);

/* What to write. Zero is the default of the fields that are not required. */
typedef struct xd_weights_export_desc {
    const char *directory; /* required; exists where rank 0 writes */
    xd_mapped_weights weights;
    size_t staging_bytes; /* of a tensor on rank 0 at once, at least 64, the same on all ranks; 0 -> 16 MiB */
    uint64_t max_shard_bytes;            /* as in xd_weights_writer_desc */
    const xd_safetensors_pair *metadata; /* [metadata_count] of every file, of rank 0; with `pieces` of
                                          * each rank's own */
    int64_t metadata_count;
    bool pieces; /* each rank writes what it has into files of its own, the same on all ranks; false ->
                  * rank 0 writes all */
} xd_weights_export_desc;

/* Writes a model directory under their names, in the order of these, in their shapes and the types of the parts: whatever an
 * import without conversion has read is written with the same bits. Rank 0 writes, a window of a weight at a time
 * (xd_state_gather); the directory changes in one step, as xd_weights_writer_commit says. Files that are no weights (config.json)
 * are the caller's.
 *
 * With `pieces` no element crosses between ranks: rank r writes shard-0000(r+1)-model-0000k-of-0000n.safetensors, where n is
 * the most boxes that it has of a tensor. xd_weights_reader, an import and HuggingFaceStorageReader of
 * torch.distributed.checkpoint read them; `xdistill convert` makes one model of them. The directory exists wherever a rank
 * writes, and has no .safetensors files yet. The files get their names when all ranks have written, and go again when that
 * fails on one; who is killed meanwhile leaves a model with a gap, and nothing but readers, which refuse it, says so.
 * max_shard_bytes is not used.
 *
 * Collective. Memory: as xd_state_gather, and staging_bytes more on rank 0; with `pieces` staging_bytes on each rank, twice that on
 * a device, and the headers of its files. Errors, on every rank: those of xd_weight_map_check, of xd_state_gather and of
 * xd_weights_writer; an older model stays unless the message says otherwise. With `pieces`: MISMATCH as in xd_state_gather, STATE
 * for a directory with .safetensors files, those of xd_safetensors_writer. What the directory refuses has one code and one
 * text on all ranks; without `pieces` a disk that fails while elements come to rank 0 is PEER on the others. */
XD_API xd_result xd_weights_export(xd_comm *comm, const xd_weights_export_desc *desc);

#endif
