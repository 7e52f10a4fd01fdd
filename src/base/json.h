#ifndef XDI_BASE_JSON_H
#define XDI_BASE_JSON_H

#include "base/context.h"

/* JSON (RFC 8259), bounded: any text, even a malicious one, takes at most O(n log n) time and a fixed multiple of its
 * size in memory.
 *
 *     xd_json *root = NULL;
 *     XD_TRY(xd_json_load_memory(ctx, NULL, text, bytes, &root));
 *     int64_t layers = 0;
 *     if (!xd_json_int64(xd_json_find(root, "num_hidden_layers"), &layers)) ...
 *     for (const xd_json *item = xd_json_first(xd_json_find(root, "merges")); item; item = xd_json_next(item)) ...
 *     xd_json_destroy(ctx, root);
 *
 * Every query accepts NULL and values of another kind; the answer is then NULL, 0 or false. */

/* What a value is. */
typedef enum xd_json_kind {
    XD_JSON_NONE = 0, /* the kind of a NULL pointer: no such value */
    XD_JSON_NULL,
    XD_JSON_BOOL,
    XD_JSON_NUMBER,
    XD_JSON_STRING,
    XD_JSON_ARRAY,
    XD_JSON_OBJECT
} xd_json_kind;

/* One value of a document; the root leads to the whole document and owns it. */
typedef struct xd_json xd_json;

/* Limits of a parse. Zero is the default of every field. */
typedef struct xd_json_desc {
    size_t max_bytes; /* of the text; 0 -> 256 MiB */
    size_t max_nodes; /* values of any kind; 0 -> 16 Mi (each takes 72 bytes) */
    int max_depth;    /* nesting of arrays and objects, at most 1000; 0 -> 64 */
    bool allow_nul;   /* accept \u0000 in strings: their bytes then hold a NUL before their end */
} xd_json_desc;

/* Parses a text that holds exactly one value; white space around it is allowed, and a byte-order mark of UTF-8 before it.
 *
 *   desc   limits; NULL -> defaults
 *   text   not NUL-terminated; not needed after the call
 *
 * Local. One allocation. Stricter than many readers: invalid UTF-8, a lone surrogate, \u0000 (unless allowed), a
 * repeated key in one object and a number beyond the range of a double are refused.
 * Errors: FORMAT with the byte offset, also when a limit is exceeded; MEMORY; ARGUMENT for a depth above 1000. */
XD_API xd_result xd_json_load_memory(xd_ctx *ctx, const xd_json_desc *desc, const char *text, size_t bytes,
                                     xd_json **root);

/* Reads and parses a file. Errors: as xd_json_load_memory, and IO; all of them name the file. */
XD_API xd_result xd_json_load(xd_ctx *ctx, const xd_json_desc *desc, const char *path, xd_json **root);

/* Frees a document. NULL is fine. */
XD_API void xd_json_destroy(xd_ctx *ctx, xd_json *root);

/* What a value is, and the byte of the text where it starts (for messages). */
XD_API xd_json_kind xd_json_kind_of(const xd_json *value);
XD_API size_t xd_json_offset(const xd_json *value);

/* Member of an object by key, which is NUL-terminated. O(log members). */
XD_API const xd_json *xd_json_find(const xd_json *object, const char *key);

/* Elements of an array or members of an object: their number, the first, and the next in the order of the text. */
XD_API size_t xd_json_count(const xd_json *container);
XD_API const xd_json *xd_json_first(const xd_json *container);
XD_API const xd_json *xd_json_next(const xd_json *value);

/* Element `index` of an array. O(1). */
XD_API const xd_json *xd_json_at(const xd_json *array, size_t index);

/* UTF-8 of a member's key or of a string: NUL-terminated, no NUL inside. `bytes` may be NULL. */
XD_API const char *xd_json_key(const xd_json *member, size_t *bytes);
XD_API const char *xd_json_string(const xd_json *value, size_t *bytes);

/* Typed values: true and *out set when the value is of that type and fits, false and *out untouched otherwise.
 * The integers accept integer notation only: 1.0, 1e3 and -0 are doubles. */
XD_API bool xd_json_bool(const xd_json *value, bool *out);
XD_API bool xd_json_int64(const xd_json *value, int64_t *out);
XD_API bool xd_json_uint64(const xd_json *value, uint64_t *out);
XD_API bool xd_json_double(const xd_json *value, double *out);

/* Text being built. Errors are stored: check the result of xd_json_writer_text only. */
typedef struct xd_json_writer {
    xd_ctx *ctx;
    int indent;   /* spaces per level; 0 -> everything on one line. May be set before the first write */
    char *text;   /* from the context's allocator */
    size_t bytes; /* written so far */
    size_t capacity;
    int depth;      /* open containers, at most 63 */
    uint64_t array; /* bit d: the container at depth d is an array */
    uint64_t items; /* bit d: it has an item already */
    bool keyed;     /* a key has been written, its value has not */
    xd_result result;
} xd_json_writer;

/* A writer with no text. Local; allocates nothing yet. */
XD_API xd_json_writer xd_json_writer_create(xd_ctx *ctx);

/* Containers. In an object every value follows its xd_json_write_key. */
XD_API void xd_json_write_object(xd_json_writer *w);
XD_API void xd_json_write_array(xd_json_writer *w);
XD_API void xd_json_write_end(xd_json_writer *w);
XD_API void xd_json_write_key(xd_json_writer *w, const char *key);

/* Values. Strings are UTF-8. Doubles are finite and read back to the same bits. */
XD_API void xd_json_write_null(xd_json_writer *w);
XD_API void xd_json_write_bool(xd_json_writer *w, bool value);
XD_API void xd_json_write_int64(xd_json_writer *w, int64_t value);
XD_API void xd_json_write_uint64(xd_json_writer *w, uint64_t value);
XD_API void xd_json_write_double(xd_json_writer *w, double value);
XD_API void xd_json_write_string(xd_json_writer *w, const char *value);
XD_API void xd_json_write_string_n(xd_json_writer *w, const char *value, size_t bytes);

/* The finished text, NUL-terminated, owned by the writer until xd_json_writer_destroy. `bytes` may be NULL.
 * Errors: MEMORY; ARGUMENT for a non-finite double or a string that is not UTF-8; STATE when containers are still
 * open, a key has no value or is outside an object, or nothing was written. */
XD_API xd_result xd_json_writer_text(xd_json_writer *w, const char **text, size_t *bytes);

/* Frees the text; the writer is then as new. */
XD_API void xd_json_writer_destroy(xd_json_writer *w);

#endif
