#ifndef XDI_IO_WEIGHTS_H
#define XDI_IO_WEIGHTS_H

#include "base/context.h"
#include "base/dtype.h"

/* Weights in safetensors files: a file, bytes in memory, or a Hugging Face model directory (docs/checkpoints.md). Data is in
 * host memory, dense, last dimension fastest. */

/* ---- reading ---- */

/* Open weights. */
typedef struct xd_weights xd_weights;

/* How data is read. */
typedef enum xd_weights_mode {
    XD_WEIGHTS_MAP = 0, /* memory-mapped, or else read whole */
    XD_WEIGHTS_STREAM   /* on request; only headers stay in memory */
} xd_weights_mode;

/* One of directory, file, data. */
typedef struct xd_weights_desc {
    const char *directory; /* model.safetensors, else the index and its files, else all NAME.safetensors */
    const char *file;      /* one file; a piece in it counts as a tensor */
    const void *data;      /* [bytes] of a file; must outlive the object */
    size_t bytes;
    xd_weights_mode mode;
    size_t max_header_bytes; /* 0 -> 100,000,000 */
    /* Leave out tensors of types outside XD_DTYPES. false -> types of the format have dtype NONE, unknown types are
     * FORMAT. */
    bool skip_unknown;
    /* The index may differ from its files: the files count, with a warning. false -> an error. */
    bool lenient;
} xd_weights_desc;

/* Metadata. */
typedef struct xd_weights_pair {
    const char *key, *value; /* UTF-8; no key twice */
} xd_weights_pair;

/* A whole tensor. */
typedef struct xd_weights_tensor {
    const char *name; /* UTF-8 without NUL inside */
    xd_dtype dtype;   /* NONE: outside XD_DTYPES, not readable */
    /* As in files: "BF16"; with NONE F4, F6_E2M3, F6_E3M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ or C64. */
    const char *type;
    int ndim;             /* 0 to 64 */
    const int64_t *shape; /* [ndim]; sizes may be 0 */
    int64_t piece_count;
    int64_t file;        /* of its first piece */
    uint64_t begin, end; /* its bytes in the file */
} xd_weights_tensor;

/* A file. */
typedef struct xd_weights_file {
    const char *name; /* in the directory; "memory": data */
    uint64_t bytes;
    const xd_weights_pair *metadata; /* [metadata_count] by bytes of keys */
    int64_t metadata_count;
} xd_weights_file;

/* Opens and checks weights, untrusted too. Reads a directory again if a save replaces it: never a mixture. Local.
 * Errors: ARGUMENT (none or several of directory, file, data), IO, MEMORY, FORMAT (a file or index; a file outside the
 * directory; pieces that overlap, lack elements, differ in type), MISSING (a tensor of the index), UNEXPECTED (one that it
 * does not assign to its file). */
XD_API xd_result xd_weights_open(xd_ctx *ctx, const xd_weights_desc *desc, xd_weights **out);

/* Closes all files; what calls returned is invalid. NULL is fine. */
XD_API void xd_weights_close(xd_weights *weights);

/* Their facts. */
typedef struct xd_weights_info {
    int64_t tensor_count, file_count;
} xd_weights_info;

/* Return facts; tensors and files by bytes of names. NULL for an index out of range. */
XD_API xd_weights_info xd_weights_describe(const xd_weights *weights);
XD_API const xd_weights_tensor *xd_weights_at(const xd_weights *weights, int64_t index);
XD_API const xd_weights_file *xd_weights_file_at(const xd_weights *weights, int64_t index);

/* Returns an index, -1 if unknown. O(log count). */
XD_API int64_t xd_weights_find(const xd_weights *weights, const char *name);

/* Returns the value in the first file with the key, NULL if unknown. */
XD_API const char *xd_weights_metadata(const xd_weights *weights, const char *key);

/* Returns a tensor's bytes, possibly unaligned; NULL in stream mode, for dtype NONE and for several pieces. If another
 * program truncates the file: xd_files.map. */
XD_API const void *xd_weights_data(const xd_weights *weights, int64_t index);

/* A box or bytes of a tensor. */
typedef struct xd_weights_read_desc {
    const int64_t *offset, *size; /* [ndim] box [offset, offset + size); both NULL -> bytes */
    /* A range of bytes, only of a tensor in one piece. */
    uint64_t first_byte;
    size_t bytes;
} xd_weights_read_desc;

/* Copies a part of a tensor, dense, to the host. In stream mode, ranges less than 256 KiB apart share a read.
 *
 *    desc   NULL -> the whole tensor
 *
 * Errors: ARGUMENT (outside the tensor), UNSUPPORTED (dtype NONE; bytes of several pieces), IO, MEMORY. */
XD_API xd_result xd_weights_read(xd_weights *weights, int64_t index, const xd_weights_read_desc *desc,
                                 void *destination);

/* ---- writing ---- */

/* A tensor to write. */
typedef struct xd_weights_entry {
    const char *name; /* required; UTF-8, 1 byte to 64 KiB; not "__metadata__" */
    xd_dtype dtype;   /* required */
    int ndim;
    const int64_t *shape; /* [ndim] */
} xd_weights_entry;

/* One of directory and file. */
typedef struct xd_weights_writer_desc {
    const char *directory; /* exists already */
    const char *file;
    const xd_weights_entry *entries; /* [entry_count], in order of files; in a file wide dtypes come first */
    int64_t entry_count;
    const xd_weights_pair *metadata; /* [metadata_count] of every file, besides "format" = "pt" */
    int64_t metadata_count;
    /* Bytes of tensors in one file of a directory; a larger tensor has a file of its own; 0 -> 5,000,000,000. */
    uint64_t max_shard_bytes;
    size_t alignment; /* of the data area, a power of two from 8; 0 -> 8 */
} xd_weights_writer_desc;

/* Places in a planned file. */
typedef struct xd_weights_layout {
    const unsigned char *header; /* length, JSON, spaces */
    uint64_t header_bytes;       /* start of the data area */
    uint64_t file_bytes;
    const uint64_t *begin; /* [entry_count] first byte in the file */
    const uint64_t *bytes; /* [entry_count] length */
} xd_weights_layout;

/* Plans header and places of one file, as xd_weights_writer writes it. *out is one block for xd_release.
 *
 *    desc   without directory, file, max_shard_bytes
 *
 * Local; O(n log n). Errors: ARGUMENT (names, also repeated; dtypes, shapes, metadata; header above 100,000,000 bytes),
 * MEMORY. */
XD_API xd_result xd_weights_plan(xd_ctx *ctx, const xd_weights_writer_desc *desc, xd_weights_layout **out);

/* A file or directory being written. */
typedef struct xd_weights_writer xd_weights_writer;

/* Starts files under temporary names; removes those of killed saves. A directory has one save at a time:
 * model.safetensors.lock. Local.
 * Errors: as xd_weights_plan; ARGUMENT (none or both of directory and file), STATE (another save of any process),
 * UNSUPPORTED (file calls), IO. */
XD_API xd_result xd_weights_writer_create(xd_ctx *ctx, const xd_weights_writer_desc *desc,
                                          xd_weights_writer **out);

/* `bytes` up to the tensor's end. */
#define XD_WEIGHTS_REST SIZE_MAX

/* Writes bytes [first_byte, first_byte + bytes) of a tensor, each byte once, in any order. A piece that does not continue the
 * last takes 24 bytes.
 *
 *    index   in desc.entries
 *    bytes   or XD_WEIGHTS_REST
 *
 * Errors: ARGUMENT (outside the tensor), IO, MEMORY. */
XD_API xd_result xd_weights_writer_write(xd_weights_writer *writer, int64_t index, uint64_t first_byte,
                                         size_t bytes, const void *data);

/* Syncs all files, publishes them in one step, removes old ones, and frees the writer in every case.
 * Errors: STATE (bytes missing or written twice), IO, MEMORY. Before the step the older model stays and new files are
 * removed. After it the new model is in place; the error means that a directory was not synced or a file not
 * removed. */
XD_API xd_result xd_weights_writer_commit(xd_weights_writer *writer);

/* Removes the new files. NULL is fine. */
XD_API void xd_weights_writer_abort(xd_weights_writer *writer);

#endif
