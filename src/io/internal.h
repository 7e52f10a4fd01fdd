#ifndef XDI_IO_INTERNAL_H
#define XDI_IO_INTERNAL_H

#include "base/internal.h"
#include "io/safetensors_internal.h"

/* Limits of the format, and the entry of its header that is no tensor. */
enum {
    XDI_SAFETENSORS_LIMIT = 100000000, /* header bytes */
    XDI_SAFETENSORS_NAME = 65536,
    XDI_SAFETENSORS_DIMS = 64
};

#define XDI_SAFETENSORS_METADATA "__metadata__"

/* safetensors.c: bytes of a tensor. Returns the dimension whose size is negative or makes the product overflow, -1 when none
 * does. */
XD_PRIVATE int xdi_safetensors_bytes(xd_dtype dtype, int ndim, const int64_t *shape, uint64_t *bytes);

/* safetensors_writer.c: what a plan checks about tensor `index`; *bytes is its size. And that no two have the same name, with
 * memory for `count` pointers. */
XD_PRIVATE xd_result xdi_safetensors_check_entry(xd_ctx *ctx, const xd_weights_entry *e, int64_t index,
                                                 uint64_t *bytes);
XD_PRIVATE xd_result xdi_safetensors_check_repeats(xd_ctx *ctx, const xd_weights_entry *entries,
                                                   int64_t count, const void **order);

/* safetensors_writer.c: xdi_safetensors_writer_create, whose temporary file has a lock of its own only when `locked`; and the
 * parts of its commit: everything before the rename, and the rename. xdi_safetensors_writer_abort ends both. */
XD_PRIVATE xd_result xdi_safetensors_writer_start(xd_ctx *ctx, const char *path,
                                                  const xd_weights_writer_desc *desc, bool locked,
                                                  xdi_safetensors_writer **out);
XD_PRIVATE xd_result xdi_safetensors_writer_close(xdi_safetensors_writer *writer);
XD_PRIVATE xd_result xdi_safetensors_writer_rename(xdi_safetensors_writer *writer);

/* written.c: the pieces of tensors that a writer has written, in the order of the calls. */
typedef struct xdi_written_piece {
    int64_t tensor;
    uint64_t begin, end; /* bytes of the tensor */
} xdi_written_piece;

typedef struct xdi_written {
    xdi_written_piece *pieces; /* [count]; the owner releases it */
    size_t count, room;
} xdi_written;

/* Makes room for one piece, and notes it: one that continues the last piece takes none. */
XD_PRIVATE xd_result xdi_written_reserve(xd_ctx *ctx, xdi_written *w);
XD_PRIVATE void xdi_written_note(xdi_written *w, int64_t tensor, uint64_t begin, uint64_t end);
/* STATE with the first hole or overlap of tensors 0 .. count - 1. */
XD_PRIVATE xd_result xdi_written_check(xd_ctx *ctx, const xdi_written *w, int64_t count,
                                       const char *const *names, const uint64_t *bytes);

/* weights_files.c: directory/name in new memory, NULL when there is no room, which the caller reports; and whether a name is
 * one of the directory itself. */
#define XDI_WEIGHTS_SINGLE "model.safetensors"
#define XDI_WEIGHTS_INDEX "model.safetensors.index.json"
XD_PRIVATE char *xdi_weights_path(xd_ctx *ctx, const char *directory, const char *name);
XD_PRIVATE bool xdi_weights_is_basename(const char *name);

/* weights_files.c: model.safetensors, or an index and its files. When `lenient`, an index that differs from its files is no
 * error, but a warning of the context: a tensor that its shard lacks is looked for in the others, and one that the index lacks
 * is there. */
typedef struct xdi_weights_files xdi_weights_files;
XD_PRIVATE xd_result xdi_weights_files_start(xd_ctx *ctx, const char *directory,
                                             const xdi_safetensors_desc *desc, bool lenient,
                                             xdi_weights_files **out);
XD_PRIVATE void xdi_weights_files_close(xdi_weights_files *model);

/* The files in order of names. */
XD_PRIVATE int64_t xdi_weights_files_count(const xdi_weights_files *model);
XD_PRIVATE xdi_safetensors *xdi_weights_files_at(const xdi_weights_files *model, int64_t file);

/* weights_files.c: the file whose tensor of a name counts, NULL when none has it: the one of the index, else the first. */
XD_PRIVATE xdi_safetensors *xdi_weights_holder(const xdi_weights_files *model, const char *name);

/* weights_reader.c: a hash of what is where, for ranks to compare. */
XD_PRIVATE uint64_t xdi_weights_reader_hash(const xd_weights *reader);

#endif
