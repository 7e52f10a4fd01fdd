#ifndef XDI_IO_WEIGHTS_FILES_H
#define XDI_IO_WEIGHTS_FILES_H

#include "io/safetensors.h"

/* A model directory in the layout of Hugging Face: model.safetensors, or shards with model.safetensors.index.json, the index,
 * which maps tensors to files. Shards are read under any name, and written as model-00001-of-0000N-save-S.safetensors, where S is
 * one more than the last save of shards in this directory had; a single file keeps the number in its metadata, as
 * "xdistill.save". So no save writes over a file of the last one, and the same saves give the same bytes. */
typedef struct xd_weights_files xd_weights_files;

/* Opens the weights of a directory: model.safetensors when it exists, otherwise the index and all its files. When a save
 * replaces them meanwhile it begins again, so it never returns a mixture.
 *
 *   desc   for every file; NULL -> defaults
 *
 * Local. Errors: as xd_safetensors_open; FORMAT when the index is malformed or names a file outside the directory;
 * MISSING when a file lacks a tensor that the index assigns to it; UNEXPECTED when a file holds a tensor that the index
 * does not assign to it. */
XD_API xd_result xd_weights_files_open(xd_ctx *ctx, const char *directory, const xd_safetensors_desc *desc,
                                       xd_weights_files **out);

/* Closes all files. NULL is fine. */
XD_API void xd_weights_files_close(xd_weights_files *model);

/* The files, in the order of their names. */
XD_API int64_t xd_weights_files_count(const xd_weights_files *model);
XD_API xd_safetensors *xd_weights_files_at(const xd_weights_files *model, int64_t file);

/* Finds a tensor: its open file and its index in that file. Both outputs are untouched on failure.
 * O(log tensors). Errors: MISSING. */
XD_API xd_result xd_weights_files_find(const xd_weights_files *model, const char *name, xd_safetensors **file,
                                       int64_t *index);

/* What to write and how to split it into files. */
typedef struct xd_weights_writer_desc {
    const xd_safetensors_entry *entries; /* files are filled in this order */
    int64_t entry_count;
    uint64_t max_shard_bytes; /* of tensors in one file; a larger tensor gets a file of its own; 0 ->
                               * 5,000,000,000 */
    const xd_safetensors_pair *metadata; /* of every file, beside "format" = "pt" */
    int64_t metadata_count;
} xd_weights_writer_desc;

/* A model directory being written. */
typedef struct xd_weights_writer xd_weights_writer;

/* Plans the files of a model and starts them under temporary names in an existing directory, and removes those of saves that
 * were killed. The desc is read during the call only. One save of a directory at a time: model.safetensors.lock is there until
 * it ends. Local. Errors: as xd_safetensors_writer_create; STATE while another save of any process is in the directory. */
XD_API xd_result xd_weights_writer_create(xd_ctx *ctx, const char *directory,
                                          const xd_weights_writer_desc *desc, xd_weights_writer **out);

/* Writes bytes [first_byte, first_byte + bytes) of tensor `index` of desc.entries, as xd_safetensors_writer_write_range: a
 * sharded tensor can be written block by block, so that no rank needs memory for the whole. Errors: ARGUMENT, IO. */
XD_API xd_result xd_weights_writer_write(xd_weights_writer *writer, int64_t index, uint64_t first_byte,
                                         size_t bytes, const void *data);

/* Makes the new model the one that readers find, in one step, and frees the writer, whatever the result. All files are synced and
 * closed under temporary names before. Then the step is the rename of the index over an older one, the removal of an
 * older model.safetensors, which readers prefer to an index, or the rename of the new model.safetensors. Last it removes what the
 * older save left: its files, shards that no index names, temporary files of dead writers.
 * Errors: as xd_safetensors_writer_commit. Before the step the older model is untouched and the new files are removed. After it
 * the new model is in place: an error then says that the directory could not be synced, so that after a loss of power it may
 * be the older model that is found, whole; or which older file could not be removed. */
XD_API xd_result xd_weights_writer_commit(xd_weights_writer *writer);

/* Discards the files: nothing is left behind. NULL is fine. */
XD_API void xd_weights_writer_abort(xd_weights_writer *writer);

#endif
