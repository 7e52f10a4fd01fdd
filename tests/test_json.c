#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/internal.h"
#endif
#include "xd_test.h"

#include <float.h>
#include <stdlib.h>

static xd_ctx *new_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

static xd_json *parse(xd_ctx *ctx, const char *text) {
    xd_json *root = NULL;
    if (xd_json_load_memory(ctx, NULL, text, strlen(text), &root) != XD_OK)
        CHECK_EQ_STR(xd_last_error(ctx)->message, text);
    return root;
}

/* The text is refused with a message that holds `expected`; it is given in memory of its exact size. */
static void refuse(xd_ctx *ctx, const char *text, const char *expected) {
    xd_json *root = NULL;
    const size_t length = strlen(text);
    char *copy = (char *)malloc(length + 1);
    memcpy(copy, text, length);
    CHECK_EQ_INT(xd_json_load_memory(ctx, NULL, copy, length, &root), XD_ERROR_FORMAT);
    CHECK(root == NULL);
    if (!strstr(xd_last_error(ctx)->message, expected)) CHECK_EQ_STR(xd_last_error(ctx)->message, expected);
    free(copy);
}

XD_TEST(a_document_is_walked_and_searched) {
    xd_ctx *ctx = new_ctx();
    xd_json *root = parse(ctx, " {\"b\":[1,\"two\",null,true],\"a\":{\"x\":{}},\"\":[]} \n");
    const xd_json *list = xd_json_find(root, "b");
    bool truth = false;
    int64_t one = 0;
    CHECK_EQ_INT(xd_json_count(root), 3);
    CHECK_EQ_STR(xd_json_key(xd_json_first(root), NULL), "b");
    CHECK_EQ_STR(xd_json_key(xdi_json_by_key(root, 0), NULL), "");
    CHECK_EQ_STR(xd_json_key(xdi_json_by_key(root, 1), NULL), "a");
    CHECK(xdi_json_by_key(root, 3) == NULL);
    CHECK_EQ_INT(xd_json_count(list), 4);
    CHECK(xd_json_int64(xd_json_at(list, 0), &one) && one == 1);
    CHECK_EQ_STR(xd_json_string(xd_json_at(list, 1), NULL), "two");
    CHECK_EQ_INT(xd_json_kind_of(xd_json_at(list, 2)), XD_JSON_NULL);
    CHECK(xd_json_bool(xd_json_at(list, 3), &truth) && truth);
    CHECK(xd_json_next(xd_json_at(list, 3)) == NULL);
    CHECK_EQ_INT(xd_json_offset(list), 6);
    CHECK_EQ_INT(xd_json_kind_of(xd_json_find(xd_json_find(root, "a"), "x")), XD_JSON_OBJECT);
    CHECK(xd_json_find(xd_json_find(root, "no"), "x") == NULL);
    CHECK(xd_json_first(NULL) == NULL && xd_json_count(NULL) == 0 && xd_json_at(root, 0) == NULL);
    xd_json_destroy(ctx, root);
    xd_ctx_destroy(ctx);
}

XD_TEST(integers_and_doubles_are_told_apart) {
    xd_ctx *ctx = new_ctx();
    xd_json *root =
        parse(ctx, "[-1,1.0,1e3,-0,18446744073709551615,-9223372036854775808,18446744073709551616,"
                   "-9223372036854775809,9223372036854775808]");
    int64_t i = 7;
    uint64_t u = 7;
    double d = 0.0;
    CHECK(xd_json_int64(xd_json_at(root, 0), &i) && i == -1);
    CHECK(!xd_json_uint64(xd_json_at(root, 0), &u));
    for (size_t k = 1; k < 4; k++) CHECK(!xd_json_int64(xd_json_at(root, k), &i));
    CHECK(xd_json_double(xd_json_at(root, 2), &d) && d == 1000.0);
    CHECK(xd_json_double(xd_json_at(root, 3), &d) && d == 0.0 && signbit(d));
    CHECK(xd_json_uint64(xd_json_at(root, 4), &u) && u == UINT64_MAX);
    CHECK(!xd_json_int64(xd_json_at(root, 4), &i));
    CHECK(xd_json_int64(xd_json_at(root, 5), &i) && i == INT64_MIN);
    CHECK(!xd_json_uint64(xd_json_at(root, 6), &u));
    CHECK(!xd_json_int64(xd_json_at(root, 7), &i) && i == INT64_MIN);
    CHECK(!xd_json_int64(xd_json_at(root, 8), &i));
    CHECK(xd_json_double(xd_json_at(root, 8), &d) && d == 9223372036854775808.0);
    xd_json_destroy(ctx, root);
    xd_ctx_destroy(ctx);
}

XD_TEST(escapes_and_utf8_are_decoded) {
    xd_ctx *ctx = new_ctx();
    xd_json *root =
        parse(ctx, "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\",\"\\u0041\\u00e9\\u20AC\\ud83d\\ude00\",\"\xc3\xa9\"]");
    size_t bytes = 0;
    CHECK_EQ_STR(xd_json_string(xd_json_at(root, 0), &bytes), "\"\\/\b\f\n\r\t");
    CHECK_EQ_INT(bytes, 8);
    CHECK_EQ_STR(xd_json_string(xd_json_at(root, 1), &bytes), "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    CHECK_EQ_INT(bytes, 10);
    CHECK_EQ_STR(xd_json_string(xd_json_at(root, 2), NULL), "\xc3\xa9");
    xd_json_destroy(ctx, root);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_byte_order_mark_of_utf8_comes_before_a_text) {
    xd_ctx *ctx = new_ctx();
    int64_t value = 0;
    xd_json *root = parse(ctx, "\xef\xbb\xbf {\"a\":7}");
    CHECK(xd_json_int64(xd_json_find(root, "a"), &value) && value == 7);
    CHECK_EQ_INT(xd_json_offset(root), 4);
    xd_json_destroy(ctx, root);
    xd_ctx_destroy(ctx);
}

XD_TEST(malformed_texts_are_refused_with_the_place) {
    static const char *const wrong[][2] = {
        { "", "byte 0" },
        { "  ", "byte 2" },
        { "{", "string expected" },
        { "[1", "',' or ']'" },
        { "[1,]", "byte 3" },
        { "{\"a\"}", "':'" },
        { "{\"a\":1,}", "string" },
        { "{a:1}", "string" },
        { "nul", "byte 0" },
        { "truex", "after the" },
        { "[1] 2", "byte 4" },
        { "01", "after the" },
        { "+1", "byte 0" },
        { "1.", "digit" },
        { ".5", "value" },
        { "1e", "digit" },
        { "1e+", "digit" },
        { "-", "value" },
        { "0x1", "after the" },
        { "NaN", "value" },
        { "1e999", "range" },
        { "-1e999", "range" },
        { "\"a", "without end" },
        { "\"\n\"", "control" },
        { "\"\\x\"", "escape" },
        { "\"\\", "escape" },
        { "\"\\u12\"", "four" },
        { "\"\\u0000\"", "NUL" },
        { "\"\\ud800\"", "lone" },
        { "\"\\udc00\"", "lone" },
        { "\"\\ud800\\u0041\"", "lone" },
        { "\"\x80\"", "UTF-8" },
        { "\"\xc0\x80\"", "UTF-8" },
        { "\"\xed\xa0\x80\"", "UTF-8" },
        { "\"\xf4\x90\x80\x80\"", "UTF-8" },
        { "\"\xe2\x82", "UTF-8" },
        { "\xef\xbb\xbf", "byte 3" },
        { "\xef\xbb\xbf\xef\xbb\xbf{}", "byte 3" },
        { " \xef\xbb\xbf{}", "byte 1" },
        { "\xff\xfe{", "byte-order mark of UTF-16" },
        { "\xfe\xff{", "byte-order mark of UTF-16" },
        { "{\"a\":1,\"b\":2,\"a\":3}", "stands twice" },
        { "'a'", "value" },
        { "[1 2]", "',' or ']'" },
    };
    xd_ctx *ctx = new_ctx();
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) refuse(ctx, wrong[i][0], wrong[i][1]);
    xd_ctx_destroy(ctx);
}

XD_TEST(limits_hold_to_the_unit) {
    xd_ctx *ctx = new_ctx();
    xd_json_desc desc;
    xd_json *root = NULL;
    memset(&desc, 0, sizeof desc);
    desc.max_depth = 2;
    CHECK_EQ_INT(xd_json_load_memory(ctx, &desc, "[[]]", 4, &root), XD_OK);
    xd_json_destroy(ctx, root);
    CHECK_EQ_INT(xd_json_load_memory(ctx, &desc, "[[[]]]", 6, &root), XD_ERROR_FORMAT);
    desc.max_nodes = 3; /* the root, and one for each bracket and comma */
    CHECK_EQ_INT(xd_json_load_memory(ctx, &desc, "[1,\",,,\"]", 9, &root), XD_OK);
    xd_json_destroy(ctx, root);
    CHECK_EQ_INT(xd_json_load_memory(ctx, &desc, "[1,2,3]", 7, &root), XD_ERROR_FORMAT);
    desc.max_bytes = 6;
    CHECK_EQ_INT(xd_json_load_memory(ctx, &desc, "[1,2]  ", 7, &root), XD_ERROR_FORMAT);
    desc.max_depth = 1001;
    CHECK_EQ_INT(xd_json_load_memory(ctx, &desc, "1", 1, &root), XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_hundred_thousand_keys_are_found_fast) {
    enum { COUNT = 100000 };
    xd_ctx *ctx = new_ctx();
    xd_json_writer w = xd_json_writer_create(ctx);
    const char *text = NULL;
    size_t bytes = 0;
    xd_json *root = NULL;
    char key[16];
    xd_json_write_object(&w);
    for (int i = 0; i < COUNT; i++) {
        snprintf(key, sizeof key, "k%d", (i * 7919) % COUNT);
        xd_json_write_key(&w, key);
        xd_json_write_int64(&w, i);
    }
    xd_json_write_end(&w);
    CHECK_EQ_INT(xd_json_writer_text(&w, &text, &bytes), XD_OK);
    CHECK_EQ_INT(xd_json_load_memory(ctx, NULL, text, bytes, &root), XD_OK);
    for (int i = 0; i < COUNT; i++) {
        int64_t value = -1;
        snprintf(key, sizeof key, "k%d", (i * 7919) % COUNT);
        CHECK(xd_json_int64(xd_json_find(root, key), &value) && value == i);
    }
    xd_json_destroy(ctx, root);
    xd_json_writer_destroy(&w);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_writer_separates_escapes_and_indents) {
    xd_ctx *ctx = new_ctx();
    for (int indent = 0; indent < 3; indent += 2) {
        xd_json_writer w = xd_json_writer_create(ctx);
        const char *text = NULL;
        w.indent = indent;
        xd_json_write_object(&w);
        xd_json_write_key(&w, "a\n\"");
        xd_json_write_array(&w);
        xd_json_write_int64(&w, -1);
        xd_json_write_double(&w, 1.0);
        xd_json_write_end(&w);
        xd_json_write_key(&w, "e");
        xd_json_write_object(&w);
        xd_json_write_end(&w);
        xd_json_write_key(&w, "s");
        xd_json_write_string(&w, "\x01/\xc3\xa9");
        xd_json_write_end(&w);
        CHECK_EQ_INT(xd_json_writer_text(&w, &text, NULL), XD_OK);
        CHECK_EQ_STR(text, indent ? "{\n  \"a\\n\\\"\": [\n    -1,\n    1.0\n  ],\n  \"e\": {},\n  \"s\": "
                                    "\"\\u0001/\xc3\xa9\"\n}"
                                  : "{\"a\\n\\\"\":[-1,1.0],\"e\":{},\"s\":\"\\u0001/\xc3\xa9\"}");
        xd_json_writer_destroy(&w);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(doubles_read_back_to_the_same_bits) {
    xd_ctx *ctx = new_ctx();
    const double special[] = { 0.0,  -0.0, 1.0, 0.1, 1.0 / 3.0, DBL_MAX, -DBL_MIN, 4.9406564584124654e-324,
                               1e22, 1e21 };
    const xd_philox noise = { 5, XD_STREAM_USER, 0, 0, 0 };
    xd_json_writer w = xd_json_writer_create(ctx);
    const char *text = NULL;
    size_t bytes = 0;
    xd_json *root = NULL;
    double values[1000];
    for (int i = 0; i < 1000; i++)
        values[i] = i < 10 ? special[i] : ldexp(xd_philox_uniform_f64(&noise, i), (i * 37) % 2000 - 1020);
    xd_json_write_array(&w);
    for (int i = 0; i < 1000; i++) xd_json_write_double(&w, values[i]);
    xd_json_write_end(&w);
    CHECK_EQ_INT(xd_json_writer_text(&w, &text, &bytes), XD_OK);
    CHECK_EQ_INT(xd_json_load_memory(ctx, NULL, text, bytes, &root), XD_OK);
    for (int i = 0; i < 1000; i++) {
        double got = 99.0;
        CHECK(xd_json_double(xd_json_at(root, (size_t)i), &got) && memcmp(&got, &values[i], sizeof got) == 0);
    }
    xd_json_destroy(ctx, root);
    xd_json_writer_destroy(&w);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_writer_refuses_what_is_no_json) {
    xd_ctx *ctx = new_ctx();
    const char *text = NULL;
    xd_json_writer w = xd_json_writer_create(ctx);
    CHECK_EQ_INT(xd_json_writer_text(&w, &text, NULL), XD_ERROR_STATE);
    for (int k = 0; k < 8; k++) {
        xd_json_writer_destroy(&w);
        if (k != 3) xd_json_write_object(&w);
        if (k == 0) xd_json_write_int64(&w, 1);
        if (k == 1) xd_json_write_key(&w, "a"), xd_json_write_key(&w, "b");
        if (k == 2) xd_json_write_key(&w, "a");
        if (k == 3) xd_json_write_null(&w), xd_json_write_null(&w);
        if (k == 4) xd_json_write_key(&w, "a"), xd_json_write_double(&w, (double)NAN);
        if (k == 5) xd_json_write_key(&w, "\x80"), xd_json_write_null(&w);
        if (k == 6) xd_json_write_end(&w), xd_json_write_end(&w);
        if (k != 3 && k < 6) xd_json_write_end(&w);
        CHECK_EQ_INT(xd_json_writer_text(&w, &text, NULL),
                     k == 4 || k == 5 ? XD_ERROR_ARGUMENT : XD_ERROR_STATE);
    }
    CHECK(text == NULL);
    xd_json_writer_destroy(&w);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
