/* Any bytes are parsed or refused; what is accepted can be walked, searched, and written to a text that reads back. */
#include "fuzz.h"

/* Writes a value; every member of an object must be found again under its key. */
static void rewrite(const xd_json *value, xd_json_writer *w) {
    const xd_json_kind kind = xd_json_kind_of(value);
    size_t bytes = 0;
    int64_t integer;
    uint64_t natural;
    double real;
    bool truth;
    if (kind == XD_JSON_ARRAY || kind == XD_JSON_OBJECT) {
        if (kind == XD_JSON_ARRAY)
            xd_json_write_array(w);
        else
            xd_json_write_object(w);
        for (const xd_json *item = xd_json_first(value); item; item = xd_json_next(item)) {
            if (kind == XD_JSON_OBJECT) {
                const char *key = xd_json_key(item, &bytes);
                FUZZ_CHECK(xd_json_find(value, key) == item);
                xd_json_write_key(w, key);
            }
            rewrite(item, w);
        }
        xd_json_write_end(w);
        return;
    }
    const char *string = xd_json_string(value, &bytes);
    if (string)
        xd_json_write_string_n(w, string, bytes);
    else if (xd_json_int64(value, &integer))
        xd_json_write_int64(w, integer);
    else if (xd_json_uint64(value, &natural))
        xd_json_write_uint64(w, natural);
    else if (xd_json_double(value, &real))
        xd_json_write_double(w, real);
    else if (xd_json_bool(value, &truth))
        xd_json_write_bool(w, truth);
    else
        xd_json_write_null(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    xd_ctx *ctx = fuzz_ctx();
    xd_json *root = NULL, *again = NULL;
    xd_json_desc limits = { 0, 0, 60 }; /* within what the writer can nest */
    if (xd_json_load_memory(ctx, &limits, (const char *)data, bytes, &root) != XD_OK) return 0;
    xd_json_writer first = xd_json_writer_create(ctx), second = xd_json_writer_create(ctx);
    const char *text = NULL, *repeated = NULL;
    size_t length = 0, repeated_length = 0;
    rewrite(root, &first);
    FUZZ_CHECK(xd_json_writer_text(&first, &text, &length) == XD_OK);
    FUZZ_CHECK(xd_json_load_memory(ctx, &limits, text, length, &again) == XD_OK);
    rewrite(again, &second);
    FUZZ_CHECK(xd_json_writer_text(&second, &repeated, &repeated_length) == XD_OK);
    FUZZ_CHECK(length == repeated_length && memcmp(text, repeated, length) == 0);
    xd_json_writer_destroy(&first);
    xd_json_writer_destroy(&second);
    xd_json_destroy(ctx, root);
    xd_json_destroy(ctx, again);
    return 0;
}
