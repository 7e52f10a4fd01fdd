#ifndef XDI_IO_WEIGHTS_FILES_H
#define XDI_IO_WEIGHTS_FILES_H

#include "io/safetensors.h"

/* A Hugging Face model directory: model.safetensors, or shards with the index model.safetensors.index.json, which maps
 * tensors to files. Reads any shard names; writes model-00001-of-0000N-save-S.safetensors. S is the last save's number plus
 * one; single files keep it in metadata as "xdistill.save". No save overwrites the last one's files; equal saves give equal
 * bytes. */
typedef struct xd_weights_files xd_weights_files;

/* Opens model.safetensors if it exists, otherwise the index and its files. Starts again if a save replaces them: never a
 * mixture.
 *
 *    desc   for every file; NULL -> defaults
 *
 * Local. Errors: as xd_safetensors_open; FORMAT (malformed index, or a file outside the directory), MISSING (an assigned
 * tensor), UNEXPECTED (a tensor that the index does not assign to its file). */
XD_API xd_result xd_weights_files_open(xd_ctx *ctx, const char *directory, const xd_safetensors_desc *desc,
                                       xd_weights_files **out);

/* Closes all files. NULL is fine. */
XD_API void xd_weights_files_close(xd_weights_files *model);

/* The files in order of names. */
XD_API int64_t xd_weights_files_count(const xd_weights_files *model);
XD_API xd_safetensors *xd_weights_files_at(const xd_weights_files *model, int64_t file);

/* Finds a tensor's open file and its index there; outputs are untouched on failure. O(log tensors). Errors: MISSING. */
XD_API xd_result xd_weights_files_find(const xd_weights_files *model, const char *name, xd_safetensors **file,
                                       int64_t *index);

/* What to write and how to split it. */
typedef struct xd_weights_writer_desc {
    const xd_safetensors_entry *entries; /* files are filled in this order */
    int64_t entry_count;
    /* Tensor bytes in one file; a larger tensor gets its own; 0 -> 5,000,000,000. */
    uint64_t max_shard_bytes;
    const xd_safetensors_pair *metadata; /* of every file, in addition to "format" = "pt" */
    int64_t metadata_count;
} xd_weights_writer_desc;

/* A model directory being written. */
typedef struct xd_weights_writer xd_weights_writer;

/* Starts the files of a model under temporary names in an existing directory; removes those of killed saves. The desc is
 * read during the call only. One save at a time: model.safetensors.lock exists until it ends. Local.
 * Errors: as xd_safetensors_writer_create; STATE (another save of any process). */
XD_API xd_result xd_weights_writer_create(xd_ctx *ctx, const char *directory,
                                          const xd_weights_writer_desc *desc, xd_weights_writer **out);

/* Writes bytes [first_byte, first_byte + bytes) of tensor `index`, as xd_safetensors_writer_write_range: block by block, no
 * rank needs the whole. Errors: ARGUMENT, IO. */
XD_API xd_result xd_weights_writer_write(xd_weights_writer *writer, int64_t index, uint64_t first_byte,
                                         size_t bytes, const void *data);

/* Publishes the new model in one step and frees the writer in every case. All files are synced and closed before. The step
 * renames the index, removes an older model.safetensors (preferred by readers), or renames the new one. Then it removes old
 * files, unindexed shards and temporary files of dead writers.
 * Errors: as xd_safetensors_writer_commit. Before the step the older model stays and new files are removed. After it the new
 * model is in place. The error then means a failed directory sync (a power loss may restore the older model, whole) or a
 * file not removed. */
XD_API xd_result xd_weights_writer_commit(xd_weights_writer *writer);

/* Discards the files. NULL is fine. */
XD_API void xd_weights_writer_abort(xd_weights_writer *writer);

#endif
