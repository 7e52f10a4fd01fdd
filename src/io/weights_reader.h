#ifndef XDI_IO_WEIGHTS_READER_H
#define XDI_IO_WEIGHTS_READER_H

#include "io/weights_files.h"

/* Reads a model directory by whole tensors: model.safetensors, indexed shards, or pieces, one file a rank, from
 * torch.distributed.checkpoint's HuggingFaceStorageWriter or xd_weights_export with `pieces`. Without model.safetensors and
 * index it reads all NAME.safetensors. Pieces have metadata with the indices of their first elements:
 *
 *     "DCP_SHARDING_INFO": "{\"embed.weight\": {\"saved_offsets\": [4096, 0]}, ...}"
 *
 * A tensor ends where its pieces end, so compare shapes: a lost last piece shortens it. Reads into host memory. */
typedef struct xd_weights_reader xd_weights_reader;

/* One whole tensor; pointers live as long as the object. */
typedef struct xd_weights_tensor {
    const char *name;
    xd_dtype dtype;       /* NONE: a type outside XD_DTYPES, cannot be read */
    const char *type;     /* the files' name, see xd_safetensors_info */
    int ndim;             /* 0 to 64 */
    const int64_t *shape; /* [ndim] */
    int64_t piece_count;
} xd_weights_tensor;

/* Opens a directory and checks that pieces of a tensor have one type, cover it and do not overlap.
 *
 *    desc   for every file; NULL -> defaults
 *
 * Local. Errors: those of xd_weights_files_open; FORMAT (sharding info without offsets for exactly its file's tensors;
 * pieces with different types or dimensions, overlaps, or missing elements), MEMORY. */
XD_API xd_result xd_weights_reader_open(xd_ctx *ctx, const char *directory, const xd_safetensors_desc *desc,
                                        xd_weights_reader **out);

/* Closes all files. NULL is fine. */
XD_API void xd_weights_reader_close(xd_weights_reader *reader);

/* Tensors 0 .. count - 1 in the byte order of their names. */
XD_API int64_t xd_weights_reader_count(const xd_weights_reader *reader);
XD_API const xd_weights_tensor *xd_weights_reader_at(const xd_weights_reader *reader, int64_t index);

/* Index of a name, -1 if unknown. O(log count). */
XD_API int64_t xd_weights_reader_find(const xd_weights_reader *reader, const char *name);

/* Copies the box [offset, offset + size) of a tensor, dense, from all its pieces. One xd_safetensors_read_box reads each run
 * that is contiguous in the box.
 *    offset, size   [ndim] elements; ignored for a scalar
 * Allocates nothing of its own. Errors: ARGUMENT (outside the tensor), UNSUPPORTED (dtype NONE), IO, MEMORY. */
XD_API xd_result xd_weights_reader_read(xd_weights_reader *reader, int64_t index, const int64_t *offset,
                                        const int64_t *size, void *destination);

#endif
