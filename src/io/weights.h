#ifndef XDI_IO_WEIGHTS_H
#define XDI_IO_WEIGHTS_H

#include "base/context.h"
#include "base/dtype.h"

/* Weights in safetensors files: one file, bytes in memory, or a Hugging Face model directory. Data is in host memory, dense,
 * last dimension fastest. The reader checks untrusted files at open. The format promises no alignment; the writer aligns data
 * to 8 bytes.
 *
 * A directory has model.safetensors, or shards with the index model.safetensors.index.json, which maps tensors to files. Or it
 * has pieces, one file a rank, from torch.distributed.checkpoint's HuggingFaceStorageWriter or xd_weights_export with
 * `pieces`. Pieces have metadata with the indices of their first elements:
 *
 *     "DCP_SHARDING_INFO": "{\"embed.weight\": {\"saved_offsets\": [4096, 0]}, ...}"
 *
 * A tensor ends where its pieces end, so compare shapes: a lost last piece shortens it. */

/* ---- reading ---- */

/* Open weights. */
typedef struct xd_weights xd_weights;

/* How data of an open file is read. */
typedef enum xd_weights_mode {
    XD_WEIGHTS_MAP = 0, /* the default: memory-mapped, or read whole if it cannot be mapped */
    XD_WEIGHTS_STREAM   /* only headers stay in memory; data is read on request */
} xd_weights_mode;

/* What to open: one of directory, file, data. */
typedef struct xd_weights_desc {
    const char *directory; /* model.safetensors, else the index and its files, else all NAME.safetensors */
    const char *file;      /* its tensors; pieces are tensors of their own */
    const void *data;      /* [bytes] of a file, which must outlive the object */
    size_t bytes;
    xd_weights_mode mode;
    size_t max_header_bytes; /* 0 -> 100,000,000, the format's limit */
    /* Leave out types that are not in XD_DTYPES. false -> the format's other types have the dtype NONE; unknown types refuse
     * the file. */
    bool skip_unknown;
    /* Accept an index that differs from its files: the files count, with a warning. */
    bool lenient;
} xd_weights_desc;

/* One pair of metadata. */
typedef struct xd_weights_pair {
    const char *key, *value; /* UTF-8; no key twice */
} xd_weights_pair;

/* One whole tensor; pointers live as long as the object. */
typedef struct xd_weights_tensor {
    const char *name; /* UTF-8, without NUL inside */
    xd_dtype dtype;   /* NONE: a type outside XD_DTYPES, cannot be read */
    /* The files' name: "BF16"; with NONE F4, F6_E2M3, F6_E3M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ or C64. */
    const char *type;
    int ndim;             /* 0 to 64; 0 is a scalar */
    const int64_t *shape; /* [ndim]; sizes may be 0 */
    int64_t piece_count;
    int64_t file;        /* of its first piece */
    uint64_t begin, end; /* bytes of that piece in the file */
} xd_weights_tensor;

/* One file; pointers live as long as the object. */
typedef struct xd_weights_file {
    const char *name;                /* in its directory; "memory" for bytes in memory */
    uint64_t bytes;                  /* of the whole file */
    const xd_weights_pair *metadata; /* [metadata_count] in byte order of keys */
    int64_t metadata_count;
} xd_weights_file;

/* Opens and checks weights. A directory is read again if a save replaces its files: never a mixture. Pieces of a tensor have
 * one type, cover it and do not overlap. Local.
 * Errors: ARGUMENT (none or several of directory, file, data), IO, MEMORY, FORMAT (a violation in a file, names tensor and
 * numbers; a malformed index, or a file outside the directory; pieces with wrong offsets, different types, overlaps or missing
 * elements), MISSING (a tensor that the index has), UNEXPECTED (one that it does not assign to its file). */
XD_API xd_result xd_weights_open(xd_ctx *ctx, const xd_weights_desc *desc, xd_weights **out);

/* Closes all files; all that was obtained from them is invalid. NULL is fine. */
XD_API void xd_weights_close(xd_weights *weights);

/* Facts of open weights. */
typedef struct xd_weights_info {
    int64_t tensor_count, file_count;
} xd_weights_info;

/* Return facts. Tensors are in byte order of their names, files too; NULL for an index out of range. */
XD_API xd_weights_info xd_weights_describe(const xd_weights *weights);
XD_API const xd_weights_tensor *xd_weights_at(const xd_weights *weights, int64_t index);
XD_API const xd_weights_file *xd_weights_file_at(const xd_weights *weights, int64_t index);

/* Index of a name, -1 if unknown. O(log count). */
XD_API int64_t xd_weights_find(const xd_weights *weights, const char *name);

/* Value of a metadata key in the first file that has it, NULL if unknown. */
XD_API const char *xd_weights_metadata(const xd_weights *weights, const char *key);

/* A tensor's bytes without a copy, possibly unaligned; NULL in stream mode, for dtype NONE and for several pieces. Pages may
 * be read on use: see map in xd_files on truncated files. */
XD_API const void *xd_weights_data(const xd_weights *weights, int64_t index);

/* What to read of a tensor: a box or bytes. */
typedef struct xd_weights_read_desc {
    const int64_t *offset, *size; /* [ndim] elements of the box [offset, offset + size); NULL: bytes */
    /* Bytes [first_byte, first_byte + bytes) of a tensor in one piece. */
    uint64_t first_byte;
    size_t bytes;
} xd_weights_read_desc;

/* Copies a part of a tensor, dense, from all its pieces. In stream mode, ranges less than 256 KiB apart share a read.
 *
 *    desc          NULL -> the whole tensor
 *    destination   host memory
 *
 * Errors: ARGUMENT (outside the tensor), UNSUPPORTED (dtype NONE; bytes of several pieces), IO, MEMORY. */
XD_API xd_result xd_weights_read(xd_weights *weights, int64_t index, const xd_weights_read_desc *desc,
                                 void *destination);

/* ---- writing ---- */

/* One tensor to write. */
typedef struct xd_weights_entry {
    const char *name; /* required; UTF-8, 1 byte to 64 KiB, not "__metadata__" */
    xd_dtype dtype;   /* required */
    int ndim;
    const int64_t *shape; /* [ndim] */
} xd_weights_entry;

/* What to write: one file or a model directory. */
typedef struct xd_weights_writer_desc {
    const char *directory; /* exists; model.safetensors, or shards and their index */
    const char *file;      /* one file instead */
    const xd_weights_entry
        *entries; /* [entry_count]; shards are filled in this order, a file has wide dtypes first */
    int64_t entry_count;
    const xd_weights_pair *metadata; /* [metadata_count] of every file, in addition to "format" = "pt" */
    int64_t metadata_count;
    /* Of a directory: tensor bytes in one file; a larger tensor gets its own; 0 -> 5,000,000,000. */
    uint64_t max_shard_bytes;
    size_t alignment; /* of the data area, power of two from 8; 0 -> 8 */
} xd_weights_writer_desc;

/* Places in a planned file. */
typedef struct xd_weights_layout {
    const unsigned char *header; /* the file's first bytes: length, JSON text, spaces */
    uint64_t header_bytes;       /* start of the data area */
    uint64_t file_bytes;         /* of the whole file */
    const uint64_t *begin;       /* [entry_count], in desc.entries order: first byte in the file */
    const uint64_t *bytes;       /* [entry_count] length; contiguous, last dimension fastest */
} xd_weights_layout;

/* Plans the header and all places of one file as xd_weights_writer writes it. It reads the desc only, so ranks with one desc
 * can write their parts without communication. *out is one block; free it with xd_release.
 *
 *    desc   directory, file and max_shard_bytes are not read
 *
 * Local; O(n log n). Errors: ARGUMENT (names empty, repeated, "__metadata__", above 64 KiB or not UTF-8; dtypes, sizes,
 * metadata; header above 100,000,000 bytes), MEMORY. */
XD_API xd_result xd_weights_plan(xd_ctx *ctx, const xd_weights_writer_desc *desc, xd_weights_layout **out);

/* A file or directory being written under temporary names. */
typedef struct xd_weights_writer xd_weights_writer;

/* Starts files under temporary names; the desc is read during the call only.
 *
 * Shards are model-00001-of-0000N-save-S.safetensors. S is the last save's number plus one; single files of a directory keep it
 * in metadata as "xdistill.save". No save overwrites the last one's files; equal saves give equal bytes. One save of a
 * directory at a time: model.safetensors.lock exists until it ends. Removes files of killed saves.
 *
 * Local. Errors: as xd_weights_plan; ARGUMENT (none or both of directory and file), STATE (another save of any process), IO. */
XD_API xd_result xd_weights_writer_create(xd_ctx *ctx, const xd_weights_writer_desc *desc,
                                          xd_weights_writer **out);

/* In xd_weights_writer_write: the bytes from first_byte to the tensor's end. */
#define XD_WEIGHTS_REST SIZE_MAX

/* Writes bytes [first_byte, first_byte + bytes) of a tensor, each byte once, in any order: block by block, no rank needs the
 * whole. A piece that does not continue the last takes 24 bytes.
 *
 *    index   of the tensor in desc.entries
 *    bytes   or XD_WEIGHTS_REST
 *
 * Errors: ARGUMENT (outside the tensor), IO, MEMORY. */
XD_API xd_result xd_weights_writer_write(xd_weights_writer *writer, int64_t index, uint64_t first_byte,
                                         size_t bytes, const void *data);

/* Publishes in one step and frees the writer in every case. All files are synced and closed before. For a directory the step
 * renames the index, removes an older model.safetensors (preferred by readers), or renames the new one. Then it removes old
 * files, unindexed shards and temporary files of dead writers.
 * Errors: STATE (bytes missing or written twice; names the first), IO, MEMORY. Before the step what was there stays and new
 * files are removed. After it the new model is in place. The error then means a failed directory sync (a power loss may
 * restore the older model, whole) or a file not removed. */
XD_API xd_result xd_weights_writer_commit(xd_weights_writer *writer);

/* Discards the files. NULL is fine. */
XD_API void xd_weights_writer_abort(xd_weights_writer *writer);

#endif
