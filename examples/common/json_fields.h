/* json_fields.h - a key and its value in one call, and a finished text as a file. */
#ifndef JSON_FIELDS_H
#define JSON_FIELDS_H

#include "xdistill.h"

static inline void json_field_int(xd_json_writer *w, const char *key, int64_t value) {
    xd_json_write_key(w, key);
    xd_json_write_int64(w, value);
}

static inline void json_field_double(xd_json_writer *w, const char *key, double value) {
    xd_json_write_key(w, key);
    xd_json_write_double(w, value);
}

static inline void json_field_string(xd_json_writer *w, const char *key, const char *value) {
    xd_json_write_key(w, key);
    xd_json_write_string(w, value);
}

static inline void json_field_bool(xd_json_writer *w, const char *key, bool value) {
    xd_json_write_key(w, key);
    xd_json_write_bool(w, value);
}

/* Writes what the writer holds to a file, and frees the writer, whatever the result. */
static inline xd_result json_save(xd_ctx *ctx, xd_json_writer *w, const char *path) {
    const char *text = NULL;
    size_t bytes = 0;
    xd_result result = xd_json_writer_text(w, &text, &bytes);
    if (result == XD_OK) result = xd_file_save(ctx, path, text, bytes);
    xd_json_writer_destroy(w);
    return result;
}

#endif /* JSON_FIELDS_H */
