#ifndef XDI_IO_SAFETENSORS_H
#define XDI_IO_SAFETENSORS_H

#include "base/context.h"
#include "base/dtype.h"

/* The safetensors format: 8 bytes of header length, a JSON header, then tensors: little-endian, last dimension fastest, no
 * gaps. The reader checks untrusted files at open: lengths, UTF-8, types, gaps, overlaps, the end. The writer aligns data to
 * 8 bytes; the format promises no alignment. Data is in host memory, also with a GPU. */

/* An open file. */
typedef struct xd_safetensors xd_safetensors;

/* How data of an open file is read. */
typedef enum xd_safetensors_mode {
    XD_SAFETENSORS_MAP = 0, /* the default: memory-mapped, or read whole if it cannot be mapped */
    XD_SAFETENSORS_STREAM   /* only the header stays in memory; data is read on request */
} xd_safetensors_mode;

/* How to open a file. */
typedef struct xd_safetensors_desc {
    xd_safetensors_mode mode;
    size_t max_header_bytes; /* 0 -> 100,000,000, the format's limit */
    /* Leave out types that are not in XD_DTYPES. false -> the format's other types have the dtype NONE; unknown types refuse
     * the file. */
    bool skip_unknown;
} xd_safetensors_desc;

/* One tensor; pointers live as long as the file is open. */
typedef struct xd_safetensors_info {
    const char *name; /* UTF-8, without NUL inside */
    xd_dtype dtype;   /* NONE: a type outside XD_DTYPES, cannot be read */
    /* The file's name: "BF16"; with NONE F4, F6_E2M3, F6_E3M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ or C64. */
    const char *type;
    int ndim;             /* 0 to 64; 0 is a scalar */
    const int64_t *shape; /* [ndim]; sizes may be 0 */
    uint64_t begin, end;  /* bytes from the start of the data area */
} xd_safetensors_info;

/* Opens and checks a file. desc NULL -> defaults. Local.
 * Errors: IO, MEMORY, FORMAT (a violation; names file, tensor and numbers). */
XD_API xd_result xd_safetensors_open(xd_ctx *ctx, const char *path, const xd_safetensors_desc *desc,
                                     xd_safetensors **out);

/* The same over bytes in memory, which must outlive the object. Errors: FORMAT, MEMORY. */
XD_API xd_result xd_safetensors_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                            const xd_safetensors_desc *desc, xd_safetensors **out);

/* Closes the file; all that was obtained from it is invalid. NULL is fine. */
XD_API void xd_safetensors_close(xd_safetensors *file);

/* Tensors 0 .. count - 1 in the byte order of their names. */
XD_API int64_t xd_safetensors_count(const xd_safetensors *file);
XD_API const xd_safetensors_info *xd_safetensors_at(const xd_safetensors *file, int64_t index);

/* Index of a name, -1 if unknown. O(log count). */
XD_API int64_t xd_safetensors_find(const xd_safetensors *file, const char *name);

/* Value of a metadata key, NULL if unknown. */
XD_API const char *xd_safetensors_metadata(const xd_safetensors *file, const char *key);

/* Returns metadata pair `index` in byte order of keys; false past the last. */
XD_API bool xd_safetensors_metadata_at(const xd_safetensors *file, int64_t index, const char **key,
                                       const char **value);

/* A tensor's bytes without a copy, possibly unaligned; NULL in stream mode and for dtype NONE. Pages may be read on use: see
 * map in xd_files on truncated files. */
XD_API const void *xd_safetensors_data(const xd_safetensors *file, int64_t index);

/* Copies bytes [first_byte, first_byte + bytes) of a tensor. Errors: ARGUMENT (outside it), UNSUPPORTED (dtype NONE), IO. */
XD_API xd_result xd_safetensors_read_range(xd_safetensors *file, int64_t index, uint64_t first_byte,
                                           size_t bytes, void *destination);

/* Copies the box [offset, offset + size) of a tensor, dense. In stream mode, ranges less than 256 KiB apart share a read.
 *    offset, size   [ndim] elements; ignored for a scalar
 * Errors: ARGUMENT (outside the tensor), UNSUPPORTED (dtype NONE), IO, MEMORY. */
XD_API xd_result xd_safetensors_read_box(xd_safetensors *file, int64_t index, const int64_t *offset,
                                         const int64_t *size, void *destination);

/* ---- writing ---- */

/* One tensor to write. */
typedef struct xd_safetensors_entry {
    const char *name; /* required; UTF-8, 1 byte to 64 KiB, not "__metadata__" */
    xd_dtype dtype;   /* required */
    int ndim;
    const int64_t *shape; /* [ndim] */
} xd_safetensors_entry;

/* One pair of metadata to write. */
typedef struct xd_safetensors_pair {
    const char *key, *value; /* UTF-8; no key twice */
} xd_safetensors_pair;

/* All that decides a file's layout. */
typedef struct xd_safetensors_writer_desc {
    const xd_safetensors_entry *entries; /* any order; the file holds wide dtypes first, then by name */
    int64_t entry_count;
    const xd_safetensors_pair *metadata; /* in addition to "format" = "pt" */
    int64_t metadata_count;
    size_t alignment; /* of the data area, power of two from 8; 0 -> 8 */
} xd_safetensors_writer_desc;

/* Places in a planned file. */
typedef struct xd_safetensors_layout {
    const unsigned char *header; /* the file's first bytes: length, JSON text, spaces */
    uint64_t header_bytes;       /* start of the data area */
    uint64_t file_bytes;         /* of the whole file */
    const uint64_t *begin;       /* [entry_count], in desc.entries order: first byte in the file */
    const uint64_t *bytes;       /* [entry_count] length; contiguous, last dimension fastest */
} xd_safetensors_layout;

/* Plans the header and all places as xd_safetensors_writer_create writes them. It reads the desc only, so ranks with one
 * desc can write their parts without communication. *out is one block; free it with xd_release. Local; O(n log n).
 * Errors: ARGUMENT (names empty, repeated, "__metadata__", above 64 KiB or not UTF-8; dtypes, sizes, metadata; header above
 * 100,000,000 bytes), MEMORY. */
XD_API xd_result xd_safetensors_plan(xd_ctx *ctx, const xd_safetensors_writer_desc *desc,
                                     xd_safetensors_layout **out);

/* A file being written under a temporary name. */
typedef struct xd_safetensors_writer xd_safetensors_writer;

/* Plans a file and starts it under a temporary name; the desc is read during the call only. Local. Errors: as
 * xd_safetensors_plan; IO. */
XD_API xd_result xd_safetensors_writer_create(xd_ctx *ctx, const char *path,
                                              const xd_safetensors_writer_desc *desc,
                                              xd_safetensors_writer **out);

/* Write a tensor or its bytes [first_byte, first_byte + bytes), each byte once, in any order. A piece that does not continue
 * the last takes 24 bytes.
 *    index   of the tensor in desc.entries
 * Errors: ARGUMENT (outside the tensor), IO, MEMORY. */
XD_API xd_result xd_safetensors_writer_write(xd_safetensors_writer *writer, int64_t index, const void *data);
XD_API xd_result xd_safetensors_writer_write_range(xd_safetensors_writer *writer, int64_t index,
                                                   uint64_t first_byte, size_t bytes, const void *data);

/* Syncs the file, gives it its name and frees the writer in every case.
 * Errors, no file left: STATE (bytes missing or written twice; names the first), IO, MEMORY. */
XD_API xd_result xd_safetensors_writer_commit(xd_safetensors_writer *writer);

/* Discards the file. NULL is fine. */
XD_API void xd_safetensors_writer_abort(xd_safetensors_writer *writer);

#endif
