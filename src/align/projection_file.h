#ifndef XDI_ALIGN_PROJECTION_FILE_H
#define XDI_ALIGN_PROJECTION_FILE_H

#include "align/projection.h"

/* Projections as files. Every number is little-endian:
 *
 *      0  8 bytes   "XDPROJ\r\n"
 *      8  u32       version, 1
 *     12  u32       CRC-32C of everything after it
 *     16  u64       student_size
 *     24  u64       teacher_size
 *     32  u64       entries
 *     40  u64       hash of the student's tokenizer
 *     48  u64       hash of the teacher's tokenizer
 *     56  u32       max_pieces
 *     60  u32       k
 *     64  u32       1 disable_exact + 2 reverse + 4 special_pairs
 *     68  u32       0
 *     72  f64       special_threshold
 *     80  u64       row_begin [student_size + 1]
 *         u32       teacher_id [entries], ascending within a row
 *         f32       weight [entries], finite and not negative
 *
 * and nothing after it. All calls are local. */

enum {
    XD_PROJECTION_MOST_IDS = 1 << 22, /* ids of a vocabulary in a file */
    XD_PROJECTION_NAME_BYTES = 128
};

/* max_pieces 4, k 4, special_threshold 0.3 (NeMo-RL), all else off. Pure. */
XD_API xd_projection_options xd_projection_defaults(void);

/* A file name of the version, both hashes and all options: "projection1-<student>-<teacher>-p4-k4.xdproj".
 * Equal origins have equal names, and different ones different names. Pure. */
XD_API void xd_projection_cache_name(const xd_projection_origin *origin, char name[XD_PROJECTION_NAME_BYTES]);

/* Writes a projection with its origin; the file appears whole or not at all. The same projection gives the same
 * bytes. Memory: the file. Errors: ARGUMENT for options of the origin, sizes or weights (negative, NaN, above 3e38) that the file
 * cannot hold, and for entries that are not those of the rows, IO, MEMORY. */
XD_API xd_result xd_projection_save(xd_ctx *ctx, const char *path, const xd_projection *projection);

/* Reads a projection.
 *
 *   expected  the tokenizers it is to be used with; only the hashes are compared. NULL -> any
 *   out       free with xd_projection_destroy; its origin is the file's
 *
 * A file is hostile input: nothing is allocated before its sizes are known to fit its length. Memory: the
 * file, and at most 80 bytes per entry and 32 per id. Errors: IO; FORMAT for what violates the format above;
 * CORRUPT for a wrong checksum; UNSUPPORTED for another version; ARGUMENT when it belongs to other
 * tokenizers, with all four hashes; MEMORY. */
XD_API xd_result xd_projection_load(xd_ctx *ctx, const char *path, const xd_projection_origin *expected,
                                    xd_projection *out);

/* The same over bytes in memory, which are not needed after the call. */
XD_API xd_result xd_projection_load_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                           const xd_projection_origin *expected, xd_projection *out);

/* The rows of a projection, largest weight first, lowest id among equals: what xd_exact_map_create reads.
 *
 *   k  entries of a row; 0 -> those of the longest row, at least 2
 *
 * Free with xd_projection_rows_destroy. Errors: ARGUMENT for k < 0, MEMORY. */
XD_API xd_result xd_projection_to_rows(xd_ctx *ctx, const xd_projection *projection, int64_t k,
                                       xd_projection_rows *out);

#endif
