/* json_fields.h - a key and its value in one call. */
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

#endif /* JSON_FIELDS_H */
