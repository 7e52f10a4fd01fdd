#ifndef XDI_IO_SAFETENSORS_INTERNAL_H
#define XDI_IO_SAFETENSORS_INTERNAL_H

#include "base/internal.h"
#include "io/weights.h"

/* One safetensors file: what xd_weights_desc and xd_weights_writer_desc say of it. */
typedef struct xdi_safetensors xdi_safetensors;

typedef struct xdi_safetensors_desc {
    xd_weights_mode mode;
    size_t max_header_bytes;
    bool skip_unknown;
} xdi_safetensors_desc;

typedef struct xdi_safetensors_info {
    const char *name;
    xd_dtype dtype;
    const char *type;
    int ndim;
    const int64_t *shape; /* [ndim] */
    uint64_t begin, end;  /* bytes from the start of the data area */
} xdi_safetensors_info;

/* safetensors.c: opens a file, or bytes in memory, which must outlive the object; desc NULL -> defaults. */
XD_PRIVATE xd_result xdi_safetensors_open(xd_ctx *ctx, const char *path, const xdi_safetensors_desc *desc,
                                          xdi_safetensors **out);
XD_PRIVATE xd_result xdi_safetensors_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                                 const xdi_safetensors_desc *desc, xdi_safetensors **out);
XD_PRIVATE void xdi_safetensors_close(xdi_safetensors *file);

/* Tensors in byte order of their names; -1 and NULL for none. */
XD_PRIVATE int64_t xdi_safetensors_count(const xdi_safetensors *file);
XD_PRIVATE const xdi_safetensors_info *xdi_safetensors_at(const xdi_safetensors *file, int64_t index);
XD_PRIVATE int64_t xdi_safetensors_find(const xdi_safetensors *file, const char *name);

/* Metadata by key, and by index in byte order of keys; false past the last. */
XD_PRIVATE const char *xdi_safetensors_metadata(const xdi_safetensors *file, const char *key);
XD_PRIVATE bool xdi_safetensors_metadata_at(const xdi_safetensors *file, int64_t index, const char **key,
                                            const char **value);

/* The path as it was given, the bytes of the file, and where its data area starts. */
XD_PRIVATE const char *xdi_safetensors_path(const xdi_safetensors *file);
XD_PRIVATE uint64_t xdi_safetensors_size(const xdi_safetensors *file, uint64_t *data);

/* A tensor's bytes without a copy, and copies of bytes or of a box. */
XD_PRIVATE const void *xdi_safetensors_data(const xdi_safetensors *file, int64_t index);
XD_PRIVATE xd_result xdi_safetensors_read_range(xdi_safetensors *file, int64_t index, uint64_t first_byte,
                                                size_t bytes, void *destination);
XD_PRIVATE xd_result xdi_safetensors_read_box(xdi_safetensors *file, int64_t index, const int64_t *offset,
                                              const int64_t *size, void *destination);

/* safetensors_writer.c: a file being written under a temporary name, as xd_weights_writer of one file. */
typedef struct xdi_safetensors_writer xdi_safetensors_writer;

XD_PRIVATE xd_result xdi_safetensors_writer_create(xd_ctx *ctx, const char *path,
                                                   const xd_weights_writer_desc *desc,
                                                   xdi_safetensors_writer **out);
XD_PRIVATE xd_result xdi_safetensors_writer_write(xdi_safetensors_writer *writer, int64_t index,
                                                  uint64_t first_byte, size_t bytes, const void *data);
XD_PRIVATE xd_result xdi_safetensors_writer_commit(xdi_safetensors_writer *writer);
XD_PRIVATE void xdi_safetensors_writer_abort(xdi_safetensors_writer *writer);

#endif
