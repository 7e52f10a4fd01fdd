#ifndef XDI_IO_WEIGHTS_READER_H
#define XDI_IO_WEIGHTS_READER_H

#include "io/weights_files.h"

/* A model directory read by whole tensors, wherever their bytes are: in model.safetensors, in the shards of an index, or in pieces,
 * each of which a rank has written into a file of its own. Pieces are what torch.distributed.checkpoint writes with its
 * HuggingFaceStorageWriter, and xd_weights_export with `pieces`: when there is neither model.safetensors nor an index, all files
 * NAME.safetensors of the directory are read, and those whose metadata has
 *
 *     "DCP_SHARDING_INFO": "{\"embed.weight\": {\"saved_offsets\": [4096, 0]}, ...}"
 *
 * hold boxes of tensors: their first elements have these indices. A tensor is as large as its pieces reach, so one that lacks its
 * last piece is a smaller one: compare shapes. What is read goes to memory of the host. */
typedef struct xd_weights_reader xd_weights_reader;

/* One whole tensor; pointers live as long as the object. */
typedef struct xd_weights_tensor {
    const char *name;
    xd_dtype dtype;       /* NONE for a type that is not in XD_DTYPES: the tensor cannot be read */
    const char *type;     /* what the files call it, see xd_safetensors_info */
    int ndim;             /* 0 to 64 */
    const int64_t *shape; /* [ndim] */
    int64_t piece_count;
} xd_weights_tensor;

/* Opens a directory and checks that the pieces of each tensor have one type, cover it and do not overlap.
 *
 *   desc   for every file; NULL -> defaults
 *
 * Local. Errors: those of xd_weights_files_open; FORMAT for a sharding info that does not say offsets of exactly the tensors of its
 * file, for pieces of different types or dimensions, for pieces that overlap, and for elements that no piece has, with their
 * number; MEMORY. */
XD_API xd_result xd_weights_reader_open(xd_ctx *ctx, const char *directory, const xd_safetensors_desc *desc,
                                        xd_weights_reader **out);

/* Closes all files. NULL is fine. */
XD_API void xd_weights_reader_close(xd_weights_reader *reader);

/* Tensors have the indices 0 .. count - 1 in the order of their names' bytes. */
XD_API int64_t xd_weights_reader_count(const xd_weights_reader *reader);
XD_API const xd_weights_tensor *xd_weights_reader_at(const xd_weights_reader *reader, int64_t index);

/* Index of a name, -1 for an unknown one. O(log count). */
XD_API int64_t xd_weights_reader_find(const xd_weights_reader *reader, const char *name);

/* Copies the box [offset, offset + size) of a tensor, densely packed, from all pieces that have some of it. What of a piece
 * lies side by side in the box is one read, as xd_safetensors_read_box.
 *   offset, size   [ndim] elements; ignored for a scalar
 * Allocates nothing of its own. Errors: ARGUMENT outside the tensor, UNSUPPORTED for a dtype of NONE, IO, MEMORY. */
XD_API xd_result xd_weights_reader_read(xd_weights_reader *reader, int64_t index, const int64_t *offset,
                                        const int64_t *size, void *destination);

#endif
