#ifndef XDI_IO_SAFETENSORS_H
#define XDI_IO_SAFETENSORS_H

#include "base/context.h"
#include "base/dtype.h"

/* The safetensors format: 8 bytes header length, a JSON header, the tensors' bytes (little-endian, last dimension
 * fastest, back to back). Files are untrusted, so the reader checks everything the format promises when it opens one:
 * lengths, UTF-8, types, that the tensors cover the data without gap or overlap, and that the file ends
 * where they end. The data start is 8-aligned in files of this writer; the format does not promise any alignment. What is
 * read and written lies in memory of the host, also on a context with a GPU. */

/* An open file. */
typedef struct xd_safetensors xd_safetensors;

/* How the bytes of an open file are reached. */
typedef enum xd_safetensors_mode {
    XD_SAFETENSORS_MAP = 0, /* the default: memory-mapped, or read whole where files cannot be mapped */
    XD_SAFETENSORS_STREAM   /* only the header stays in memory; data is read on request */
} xd_safetensors_mode;

/* How to open a file. Zero is the default of every field. */
typedef struct xd_safetensors_desc {
    xd_safetensors_mode mode;
    size_t max_header_bytes; /* 0 -> 100,000,000, the format's own limit */
    /* Leave out tensors whose type is not in XD_DTYPES. Otherwise those of the format's other types are listed with the dtype
     * NONE, and a type that the format does not have refuses the file. */
    bool skip_unknown;
} xd_safetensors_desc;

/* One tensor of an open file; the pointers live as long as the file is open. */
typedef struct xd_safetensors_info {
    const char *name; /* UTF-8, without NUL inside */
    xd_dtype dtype;   /* NONE for a type of the format that is not in XD_DTYPES: the tensor cannot be read */
    /* What the file calls it: "BF16"; with NONE one of F4, F6_E2M3, F6_E3M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ and C64. */
    const char *type;
    int ndim;             /* 0 to 64; 0 is a scalar */
    const int64_t *shape; /* [ndim]; sizes may be 0 */
    uint64_t begin, end;  /* bytes, relative to the data area */
} xd_safetensors_info;

/* Opens and checks a file. desc NULL -> defaults. Local.
 * Errors: IO, MEMORY; FORMAT for every violation of the format, naming file, tensor and numbers. */
XD_API xd_result xd_safetensors_open(xd_ctx *ctx, const char *path, const xd_safetensors_desc *desc,
                                     xd_safetensors **out);

/* The same over bytes in memory, which must outlive the object. Errors: FORMAT, MEMORY. */
XD_API xd_result xd_safetensors_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                            const xd_safetensors_desc *desc, xd_safetensors **out);

/* Closes; everything obtained from the object is then invalid. NULL is fine. */
XD_API void xd_safetensors_close(xd_safetensors *file);

/* Tensors have the indices 0 .. count - 1 in the order of their names' bytes. */
XD_API int64_t xd_safetensors_count(const xd_safetensors *file);
XD_API const xd_safetensors_info *xd_safetensors_at(const xd_safetensors *file, int64_t index);

/* Index of a name, -1 for an unknown one. O(log count). */
XD_API int64_t xd_safetensors_find(const xd_safetensors *file, const char *name);

/* Value of a key of the file's metadata, NULL for an unknown key. */
XD_API const char *xd_safetensors_metadata(const xd_safetensors *file, const char *key);

/* Pair `index` of the metadata in the order of the keys' bytes; false past the last. */
XD_API bool xd_safetensors_metadata_at(const xd_safetensors *file, int64_t index, const char **key,
                                       const char **value);

/* A tensor's bytes without a copy, possibly unaligned; NULL in stream mode, and for a dtype of NONE. Pages may be read only
 * when they are used: see map in xd_files about a file that is truncated meanwhile. */
XD_API const void *xd_safetensors_data(const xd_safetensors *file, int64_t index);

/* Copies bytes [first_byte, first_byte + bytes) of a tensor. Errors: ARGUMENT outside the tensor, UNSUPPORTED for a dtype of
 * NONE, IO. */
XD_API xd_result xd_safetensors_read_range(xd_safetensors *file, int64_t index, uint64_t first_byte,
                                           size_t bytes, void *destination);

/* Copies the box [offset, offset + size) of a tensor, densely packed, reading little more than its bytes: in stream
 * mode, byte ranges less than 256 KiB apart share a read.
 *   offset, size   [ndim] elements; ignored for a scalar
 * Errors: ARGUMENT outside the tensor, UNSUPPORTED for a dtype of NONE, IO, MEMORY. */
XD_API xd_result xd_safetensors_read_box(xd_safetensors *file, int64_t index, const int64_t *offset,
                                         const int64_t *size, void *destination);

/* ---- writing ---- */

/* One tensor of a file to be written. */
typedef struct xd_safetensors_entry {
    const char *name; /* required; UTF-8, 1 byte to 64 KiB, not "__metadata__" */
    xd_dtype dtype;   /* required */
    int ndim;
    const int64_t *shape; /* [ndim] */
} xd_safetensors_entry;

/* One pair of the metadata of a file to be written. */
typedef struct xd_safetensors_pair {
    const char *key, *value; /* UTF-8; keys are not repeated */
} xd_safetensors_pair;

/* Everything that decides the layout of a file. */
typedef struct xd_safetensors_writer_desc {
    const xd_safetensors_entry *entries; /* in any order; the file holds wide dtypes first, then by name */
    int64_t entry_count;
    const xd_safetensors_pair *metadata; /* beside "format" = "pt", which is always written */
    int64_t metadata_count;
    size_t alignment; /* of the data area, a power of two, at least 8; 0 -> 8 */
} xd_safetensors_writer_desc;

/* Where everything of a file lies. */
typedef struct xd_safetensors_layout {
    const unsigned char *header; /* the first bytes of the file: length, JSON text, spaces */
    uint64_t header_bytes;       /* the data area begins here */
    uint64_t file_bytes;         /* of the whole file */
    const uint64_t *begin;       /* [entry_count], in the order of desc.entries: where a tensor begins in the
                                  * file */
    const uint64_t *bytes;       /* [entry_count]; a tensor's bytes lie there in one piece, last dimension
                                  * fastest */
} xd_safetensors_layout;

/* Plans a file: its header and the place of every byte, as xd_safetensors_writer_create writes it. Touches no file and depends
 * on nothing but the desc, so ranks with the same desc know the same places without communication, and each can write
 * its part. *out is one block of memory; free it with xd_release. Local; O(n log n).
 * Errors: ARGUMENT for names that are empty, repeated, "__metadata__", longer than 64 KiB or not UTF-8, for bad dtypes,
 * sizes and metadata, and for a header beyond 100,000,000 bytes; MEMORY. */
XD_API xd_result xd_safetensors_plan(xd_ctx *ctx, const xd_safetensors_writer_desc *desc,
                                     xd_safetensors_layout **out);

/* A file being written under a temporary name. */
typedef struct xd_safetensors_writer xd_safetensors_writer;

/* Plans the whole file and starts it under a temporary name. The desc is read during the call only. Local.
 * Errors: as xd_safetensors_plan; IO. */
XD_API xd_result xd_safetensors_writer_create(xd_ctx *ctx, const char *path,
                                              const xd_safetensors_writer_desc *desc,
                                              xd_safetensors_writer **out);

/* Writes a whole tensor, or bytes [first_byte, first_byte + bytes) of one; each byte exactly once, in any order. A piece that
 * does not continue the one before takes 24 bytes of memory.
 *   index   of the tensor in desc.entries
 * Errors: ARGUMENT outside the tensor, IO, MEMORY. */
XD_API xd_result xd_safetensors_writer_write(xd_safetensors_writer *writer, int64_t index, const void *data);
XD_API xd_result xd_safetensors_writer_write_range(xd_safetensors_writer *writer, int64_t index,
                                                   uint64_t first_byte, size_t bytes, const void *data);

/* Syncs the file, gives it its name and frees the writer, whatever the result.
 * Errors: STATE when a tensor's bytes are not all written, or some more than once, with the first of them; IO, MEMORY; then
 * no file is left behind. */
XD_API xd_result xd_safetensors_writer_commit(xd_safetensors_writer *writer);

/* Discards the file: nothing is left behind. NULL is fine. */
XD_API void xd_safetensors_writer_abort(xd_safetensors_writer *writer);

#endif
