#ifndef XDI_ALIGN_PROJECTION_FILE_H
#define XDI_ALIGN_PROJECTION_FILE_H

#include "align/projection.h"

/* Projections as files, in the format of docs/xtoken.md. All calls are local. */

enum {
    XD_PROJECTION_MAX_IDS = 1 << 22, /* of a vocabulary in a file */
    XD_PROJECTION_NAME_BYTES = 128
};

/* Returns NeMo-RL's options: max_pieces 4, k 4, special_threshold 0.3, all else off. Pure. */
XD_API xd_projection_options xd_projection_defaults(void);

/* Writes a file name of version, hashes and options: "projection1-<student>-<teacher>-p4-k4.xdproj". Different
 * origins have different names. Pure. */
XD_API void xd_projection_cache_name(const xd_projection_origin *origin, char name[XD_PROJECTION_NAME_BYTES]);

/* Saves a projection with its origin, whole or not at all; the same one gives the same bytes. Memory: the file.
 * Errors: ARGUMENT (options or sizes that a file cannot hold; weights negative, NaN or above 3e38; entries that do
 * not match the rows), IO, MEMORY. */
XD_API xd_result xd_projection_save(xd_ctx *ctx, const char *path, const xd_projection *projection);

/* A projection to load: a file, or its bytes. */
typedef struct xd_projection_load_desc {
    const char *path; /* NULL -> data */
    const void *data; /* [data_bytes]; optional with path */
    size_t data_bytes;
    const xd_projection_origin *expected; /* only the hashes are compared; NULL -> any */
} xd_projection_load_desc;

/* Loads a projection with its origin; free with xd_projection_destroy. Checks sizes against the file before it
 * allocates. Takes the file's bytes, and at most 80 per entry and 32 per id. Errors: IO, FORMAT, CORRUPT (checksum),
 * UNSUPPORTED (version), ARGUMENT (tokenizers), MEMORY. */
XD_API xd_result xd_projection_load(xd_ctx *ctx, const xd_projection_load_desc *desc, xd_projection *out);

/* Returns rows for xd_exact_map_create: largest weight first, lowest id among equals.
 *
 *   k  entries of a row; 0 -> the longest row's, at least 2
 *
 * Free with xd_projection_rows_destroy. Errors: ARGUMENT (k), MEMORY. */
XD_API xd_result xd_projection_to_rows(xd_ctx *ctx, const xd_projection *projection, int64_t k,
                                       xd_projection_rows *out);

#endif
