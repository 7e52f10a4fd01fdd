/* gguf.h - reads GGUF files, versions 2 and 3, little-endian: metadata, and tensors as floats.
 *
 *     gguf *file = NULL;
 *     XD_TRY(gguf_open(ctx, "model.gguf", &file));
 *     int64_t layers = 0;
 *     if (!gguf_int(file, "llama.block_count", &layers)) ...
 *     XD_TRY(gguf_read(file, gguf_tensor_find(file, "output_norm.weight"), 0, 1, floats));
 *     gguf_close(file);
 *
 * The file is mapped and checked once, when it is opened: every length, count, offset and kind against the
 * bytes there are. What it costs is in proportion to its size. */
#ifndef GGUF_H
#define GGUF_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An open file. */
typedef struct gguf gguf;

/* How the elements of a tensor are stored: those that gguf_read knows, by their number in the file. The
 * quantised ones hold 32 elements a block, those of the name K 256 (gguf_blocks.h). */
typedef enum gguf_type {
    GGUF_F32 = 0,
    GGUF_F16 = 1,
    GGUF_Q4_0 = 2,
    GGUF_Q4_1 = 3,
    GGUF_Q8_0 = 8,
    GGUF_Q4_K = 12,
    GGUF_Q6_K = 14,
    GGUF_BF16 = 30
} gguf_type;

/* One tensor: `rows` rows of `cols` elements, row after row; a vector is one row. The file's first dimension
 * is cols, all others together are rows. */
typedef struct gguf_tensor {
    xd_text name;
    uint32_t type; /* a gguf_type, or another number: then the tensor is there but cannot be read */
    int64_t rows, cols;
    const uint8_t *data; /* in the mapped file */
} gguf_tensor;

/* Opens a file. Local. Errors: IO; FORMAT for what breaks the form, with the byte; UNSUPPORTED for another
 * version and for arrays of arrays; MEMORY. */
xd_result gguf_open(xd_ctx *ctx, const char *path, gguf **out);

/* The same over bytes in memory, which must outlive the object. */
xd_result gguf_parse(xd_ctx *ctx, const void *data, size_t bytes, gguf **out);

/* NULL is fine. */
void gguf_close(gguf *file);

/* ---- metadata ---- */

/* The value of a key: true and *out set when there is one of that type (an integer of any width that fits,
 * a float of either width), else false and *out untouched. */
bool gguf_int(const gguf *file, const char *key, int64_t *out);
bool gguf_double(const gguf *file, const char *key, double *out);
bool gguf_bool(const gguf *file, const char *key, bool *out);
bool gguf_string(const gguf *file, const char *key, xd_text *out);

/* The elements of an array that have not been taken yet. */
typedef struct gguf_array {
    uint32_t kind;
    int64_t left;
    const uint8_t *next;
} gguf_array;

/* The array of a key: of strings, or of integers. False when there is none. */
bool gguf_strings(const gguf *file, const char *key, gguf_array *out);
bool gguf_ints(const gguf *file, const char *key, gguf_array *out);

/* Takes the next element; false at the end. */
bool gguf_next_string(gguf_array *array, xd_text *out);
bool gguf_next_int(gguf_array *array, int64_t *out);

/* The same of an array of floats. */
bool gguf_doubles(const gguf *file, const char *key, gguf_array *out);
bool gguf_next_double(gguf_array *array, double *out);

bool gguf_text_is(xd_text text, const char *word);

/* At most this much of a text that came from a file goes into a message. */
int gguf_shown(xd_text text);

/* ---- tensors ---- */

/* All tensors, in the order of their names. */
int64_t gguf_tensor_count(const gguf *file);
const gguf_tensor *gguf_tensor_at(const gguf *file, int64_t index);

/* The tensor of a name; NULL when there is none. */
const gguf_tensor *gguf_tensor_find(const gguf *file, const char *name);

/* out [rows, tensor->cols] = rows [first, first + rows) of a tensor of this file, as floats. Local.
 * Errors: ARGUMENT for rows outside of it, UNSUPPORTED for a type that is not in gguf_type. */
xd_result gguf_read(const gguf *file, const gguf_tensor *tensor, int64_t first, int64_t rows, float *out);

#ifdef __cplusplus
}
#endif

#endif /* GGUF_H */
