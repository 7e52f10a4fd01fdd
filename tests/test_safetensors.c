#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "safetensors_bench.h"
#include "weights_calls.h"

/* ---- headers by hand ---- */

/* Opens a file made of a header text and a number of data bytes. */
static xd_result open_text(xd_ctx *ctx, const char *header, size_t data_bytes, const xd_weights_desc *desc,
                           unsigned char **memory, xd_weights **out) {
    const size_t length = strlen(header);
    *memory = (unsigned char *)calloc(8 + length + data_bytes, 1);
    for (int i = 0; i < 8; i++) (*memory)[i] = (unsigned char)((uint64_t)length >> (8 * i));
    memcpy(*memory + 8, header, length);
    return weights_open_memory(ctx, *memory, 8 + length + data_bytes, desc, out);
}

static void check_header(xd_ctx *ctx, const char *header, size_t data_bytes, const char *expected) {
    unsigned char *memory;
    xd_weights *file = NULL;
    const xd_result result = open_text(ctx, header, data_bytes, NULL, &memory, &file);
    if (expected) {
        CHECK_EQ_INT(result, XD_ERROR_FORMAT);
        CHECK(file == NULL);
        if (!strstr(xd_last_error(ctx)->message, expected))
            CHECK_EQ_STR(xd_last_error(ctx)->message, expected);
    } else {
        if (result != XD_OK) CHECK_EQ_STR(xd_last_error(ctx)->message, header);
        xd_weights_close(file);
    }
    free(memory);
}

#define ENTRY(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

XD_TEST(legal_headers_are_accepted) {
    bench b;
    bench_start(&b);
    check_header(b.ctx, "{}", 0, NULL);
    check_header(b.ctx, " {} \n\t ", 0, NULL);
    check_header(b.ctx, "{\"__metadata__\":null}", 0, NULL);
    check_header(b.ctx, "{\"__metadata__\":{\"a\":\"b\"}}", 0, NULL);
    check_header(b.ctx, "{" ENTRY("a", "F32", "[2]", 0, 8) "}", 8, NULL);
    check_header(b.ctx, "{" ENTRY("a", "F32", "[]", 0, 4) "}", 4, NULL);
    check_header(b.ctx, "{" ENTRY("b", "U8", "[3]", 4, 7) "," ENTRY("a", "F32", "[1,1]", 0, 4) "}", 7, NULL);
    check_header(b.ctx,
                 "{" ENTRY("a", "U8", "[3,0]", 2, 2) "," ENTRY("b", "U8", "[2]", 0, 2) "," ENTRY(
                     "c", "F64", "[0]", 2, 2) "," ENTRY("d", "U8", "[1]", 2, 3) "}",
                 3, NULL);
    check_header(b.ctx, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"more\":[1.5,{}]}}",
                 1, NULL);
    check_header(b.ctx, "{" ENTRY("\\ud83d\\ude00", "U8", "[1]", 0, 1) "}", 1, NULL);
    bench_end(&b);
}

XD_TEST(every_broken_promise_of_a_header_is_named) {
    bench b;
    bench_start(&b);
    check_header(b.ctx, "", 0, "value expected");
    check_header(b.ctx, "[]", 0, "no object");
    check_header(b.ctx, "{} x", 0, "after the value");
    check_header(b.ctx, "{\"\xff\":1}", 0, "invalid UTF-8");
    check_header(b.ctx, "{\"a\":1}", 0, "no dtype");
    check_header(b.ctx, "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,0]}}", 0, "no shape");
    check_header(b.ctx, "{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", 0, "data_offsets");
    check_header(b.ctx, "{" ENTRY("a", "U7", "[1]", 0, 1) "}", 1, "unknown dtype \"U7\"");
    check_header(b.ctx, "{" ENTRY("a", "NONE", "[1]", 0, 1) "}", 1, "unknown dtype");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[-1]", 0, 1) "}", 1, "non-negative");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1.0]", 0, 1) "}", 1, "non-negative");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1e0]", 0, 1) "}", 1, "non-negative");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1]", -0, 1) "}", 1, "data_offsets");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1]", 0, 1e0) "}", 1, "data_offsets");
    check_header(b.ctx, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1,
                 "data_offsets");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1]", 1, 0) "}", 1, "begins at 1 but ends at 0");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[2]", 0, 1) "}", 1, "needs 2 bytes but its offsets span 1");
    check_header(b.ctx, "{" ENTRY("a", "F64", "[4611686018427387904,2]", 0, 0) "}", 0, "overflows");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[18446744073709551615]", 0, 1) "}", 1, "non-negative");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1]", 1, 2) "}", 2, "begins at 1, the one before ends at 0");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[2]", 0, 2) "," ENTRY("b", "U8", "[2]", 1, 3) "}", 3,
                 "ends at 2");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[2]", 0, 2) "," ENTRY("b", "U8", "[2]", 0, 2) "}", 2,
                 "ends at 2");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1]", 0, 1) "," ENTRY("b", "U8", "[1]", 2, 3) "}", 3,
                 "begins at 2");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1]", 0, 1) "}", 2, "end at 1 but there are 2");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[1]", 0, 1) "}", 0, "end at 1 but there are 0");
    check_header(b.ctx, "{}", 1, "end at 0 but there are 1");
    check_header(b.ctx, "{\"__metadata__\":[]}", 0, "__metadata__ is no object");
    check_header(b.ctx, "{\"__metadata__\":{\"a\":1}}", 0, "is no string");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[0]", 0, 0) "," ENTRY("a", "U8", "[0]", 0, 0) "}", 0,
                 "stands twice");
    check_header(b.ctx, "{" ENTRY("a", "U8", "[0]", 0, 0) "," ENTRY("\\u0061", "U8", "[0]", 0, 0) "}", 0,
                 "twice");
    check_header(b.ctx, "{" ENTRY("\\u0000", "U8", "[0]", 0, 0) "}", 0, "NUL");
    check_header(b.ctx, "{" ENTRY("\\ud800", "U8", "[0]", 0, 0) "}", 0, "lone surrogate");
    check_header(b.ctx, "{\"a\":{\"x\":[[[1]]]}}", 0, "nested too deeply");
    bench_end(&b);
}

XD_TEST(lengths_and_names_beyond_the_limits_are_refused) {
    bench b;
    bench_start(&b);
    xd_weights *file = NULL;
    unsigned char bytes[16] = { 0 };
    CHECK_EQ_INT(weights_open_memory(b.ctx, bytes, 7, NULL, &file), XD_ERROR_FORMAT);
    CHECK(strstr(xd_last_error(b.ctx)->message, "7 bytes"));
    bytes[0] = 9;
    CHECK_EQ_INT(weights_open_memory(b.ctx, bytes, 16, NULL, &file), XD_ERROR_FORMAT);
    CHECK(strstr(xd_last_error(b.ctx)->message, "9 bytes in a file of 16"));
    memset(bytes, 0xff, 8);
    CHECK_EQ_INT(weights_open_memory(b.ctx, bytes, 16, NULL, &file), XD_ERROR_FORMAT);
    CHECK(strstr(xd_last_error(b.ctx)->message, "allowed are 100000000"));
    char *header = (char *)calloc(70000, 1);
    memset(header, 'n', 69000);
    memcpy(header, "{\"", 2);
    strcpy(header + 65540, "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    check_header(b.ctx, header, 0, "name of 65538 bytes");
    strcpy(header, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1");
    for (int i = 0; i < 64; i++) strcat(header, ",1");
    strcat(header, "],\"data_offsets\":[0,1]}}");
    check_header(b.ctx, header, 1, "65 dimensions");
    free(header);
    bench_end(&b);
}

XD_TEST(unknown_dtypes_can_be_skipped_but_still_take_their_place) {
    bench b;
    bench_start(&b);
    const char *header = "{" ENTRY("a", "I4", "[2]", 0, 1) "," ENTRY("b", "U8", "[2]", 1, 3) "}";
    xd_weights_desc desc;
    unsigned char *memory;
    xd_weights *file = NULL;
    memset(&desc, 0, sizeof desc);
    desc.skip_unknown = true;
    CHECK_EQ_INT(open_text(b.ctx, header, 3, &desc, &memory, &file), XD_OK);
    CHECK_EQ_INT(weights_count(file), 1);
    CHECK_EQ_INT(xd_weights_find(file, "b"), 0);
    CHECK_EQ_INT(xd_weights_find(file, "a"), -1);
    CHECK((const unsigned char *)xd_weights_data(file, 0) == memory + 8 + strlen(header) + 1);
    xd_weights_close(file);
    free(memory);
    bench_end(&b);
}

/* Types that are in the format only: the file opens, what else it has is read, and they are refused by name. Sizes as the
 * package safetensors 0.8.0 checks them. */
XD_TEST(a_type_that_cannot_be_read_is_a_property_of_its_tensor) {
    static const struct {
        const char *type, *shape, *whole; /* NULL: it opens */
        int bytes;
    } cases[] = { { "F4", "[2]", NULL, 1 },
                  { "F4", "[3,4]", NULL, 6 },
                  { "F4", "[3]", "of type F4 has 12 bits, which are no whole bytes", 2 },
                  { "F6_E2M3", "[4]", NULL, 3 },
                  { "F6_E2M3", "[5]", "of type F6_E2M3 has 30 bits", 4 },
                  { "F6_E3M2", "[2,2]", NULL, 3 },
                  { "F6_E3M2", "[8]", "needs 6 bytes but its offsets span 3", 3 },
                  { "F6_E3M2", "[0]", NULL, 0 },
                  { "F8_E8M0", "[3]", NULL, 3 },
                  { "F8_E4M3FNUZ", "[3]", NULL, 3 },
                  { "F8_E5M2FNUZ", "[]", NULL, 1 },
                  { "C64", "[2]", NULL, 16 },
                  { "C64", "[2]", "needs 16 bytes but its offsets span 8", 8 },
                  { "C64", "[144115188075855872]", "overflows", 8 },
                  { "F4", "[4611686018427387904]", "overflows", 8 },
                  { "C128", "[1]", "has the unknown dtype \"C128\"", 16 } };
    bench b;
    bench_start(&b);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int bytes = cases[i].bytes;
        const int64_t zero[2] = { 0, 0 };
        unsigned char read[4] = { 0 };
        char header[300], told[80];
        unsigned char *memory = NULL;
        xd_weights *file = NULL;
        snprintf(header, sizeof header,
                 "{\"odd\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[0,%d]},"
                 "\"plain\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[%d,%d]}}",
                 cases[i].type, cases[i].shape, bytes, bytes, bytes + 2);
        const xd_result result = open_text(b.ctx, header, (size_t)bytes + 2, NULL, &memory, &file);
        CHECK_EQ_INT(result, cases[i].whole ? XD_ERROR_FORMAT : XD_OK);
        if (result != XD_OK) {
            CHECK(cases[i].whole && strstr(xd_last_error(b.ctx)->message, cases[i].whole));
            free(memory);
            continue;
        }
        CHECK_EQ_INT(weights_count(file), 2);
        CHECK_EQ_INT(xd_weights_at(file, 0)->dtype, XD_DTYPE_NONE);
        CHECK_EQ_STR(xd_weights_at(file, 0)->type, cases[i].type);
        CHECK_EQ_STR(xd_weights_at(file, 1)->type, "U8");
        CHECK(xd_weights_data(file, 0) == NULL && xd_weights_data(file, 1) != NULL);
        snprintf(told, sizeof told, "tensor \"odd\" is of type %s, which cannot be read", cases[i].type);
        CHECK_EQ_INT(weights_read_bytes(file, 0, 0, 0, read), XD_ERROR_UNSUPPORTED);
        CHECK(strstr(xd_last_error(b.ctx)->message, told));
        CHECK_EQ_INT(weights_read_box(file, 0, zero, zero, read), XD_ERROR_UNSUPPORTED);
        CHECK(strstr(xd_last_error(b.ctx)->message, told));
        CHECK_EQ_INT(weights_read_bytes(file, 1, 0, 2, read), XD_OK);
        xd_weights_close(file);
        free(memory);
    }
    bench_end(&b);
}

/* ---- files ---- */

/* Every box of the tensor, against plain indexing. */
static void check_boxes(xd_weights *file) {
    const int64_t index = xd_weights_find(file, "m \"box\"");
    int64_t o[3], n[3];
    for (int64_t code = 0; code < 6 * 10 * 15; code++) {
        /* pairs (offset, size) with offset + size <= 3, 4, 5 and size >= 1: 6, 10, 15 of them */
        int64_t rest[3] = { code % 6, code / 6 % 10, code / 60 };
        for (int d = 0; d < 3; d++) {
            for (o[d] = 0; rest[d] >= shape_box[d] - o[d]; o[d]++) rest[d] -= shape_box[d] - o[d];
            n[d] = rest[d] + 1;
        }
        int32_t got[61];
        memset(got, -1, sizeof got);
        CHECK_EQ_INT(weights_read_box(file, index, o, n, got), XD_OK);
        int64_t at = 0;
        for (int64_t i = o[0]; i < o[0] + n[0]; i++)
            for (int64_t k = o[1]; k < o[1] + n[1]; k++)
                for (int64_t l = o[2]; l < o[2] + n[2]; l++) CHECK_EQ_INT(got[at++], (i * 4 + k) * 5 + l);
        CHECK_EQ_INT(got[at], -1);
    }
}

static void check_file(bench *b, const char *name, xd_weights_mode mode) {
    static const char *const names[] = { "a\xc3\xa9", "empty", "m \"box\"", "scalar", "z.bytes" };
    xd_weights_desc desc;
    xd_weights *file = NULL;
    double doubles[2] = { 0.0, 0.0 };
    unsigned char byte = 0;
    memset(&desc, 0, sizeof desc);
    desc.mode = mode;
    CHECK_EQ_INT(weights_open_file(b->ctx, bench_path(b, name), &desc, &file), XD_OK);
    if (!file) return;
    CHECK_EQ_INT(weights_count(file), ENTRY_COUNT);
    for (int i = 0; i < ENTRY_COUNT; i++) {
        CHECK_EQ_STR(xd_weights_at(file, i)->name, names[i]);
        CHECK_EQ_INT(xd_weights_find(file, names[i]), i);
        CHECK((xd_weights_data(file, i) != NULL) == (mode == XD_WEIGHTS_MAP));
    }
    CHECK_EQ_STR(xd_weights_metadata(file, "format"), "pt");
    CHECK_EQ_STR(xd_weights_metadata(file, "note"), "line\nend");
    const char *key = "untouched", *value = key;
    CHECK(weights_metadata_at(file, 0, &key, &value));
    CHECK_EQ_STR(key, "format");
    CHECK_EQ_STR(value, "pt");
    CHECK(weights_metadata_at(file, 1, &key, &value));
    CHECK_EQ_STR(key, "note");
    CHECK(!weights_metadata_at(file, 2, &key, &value));
    CHECK_EQ_STR(value, "line\nend"); /* untouched past the last */
    CHECK_EQ_INT(weights_read_bytes(file, 0, 0, 16, doubles), XD_OK);
    CHECK(doubles[0] == 1.0 && doubles[1] == -2.0);
    CHECK_EQ_INT(weights_read_bytes(file, 4, 1, 1, &byte), XD_OK);
    CHECK_EQ_INT(byte, 8);
    CHECK_EQ_INT(weights_read_bytes(file, 4, 1, 2, &byte), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(weights_read_bytes(file, 5, 0, 0, &byte), XD_ERROR_ARGUMENT);
    const int64_t outside[3] = { 0, 2, 0 }, whole[3] = { 3, 3, 5 };
    CHECK_EQ_INT(weights_read_box(file, 2, outside, whole, doubles), XD_ERROR_ARGUMENT);
    const xd_weights_read_desc unsized = { .offset = outside };
    CHECK_EQ_INT(xd_weights_read(file, 2, &unsized, doubles), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(b->ctx)->message, "tensor \"m \"box\"\": a box with offset, but size is NULL");
    check_boxes(file);
    xd_weights_close(file);
}

XD_TEST(a_file_reads_back_mapped_streamed_and_where_nothing_can_be_mapped) {
    bench b;
    bench_start(&b);
    CHECK_EQ_INT(write_file(&b, "a.safetensors", 0), XD_OK);
    CHECK_EQ_INT(write_file(&b, "b.safetensors", 4096), XD_OK);
    CHECK_EQ_INT(bench_files(&b, false), 2);
    check_file(&b, "a.safetensors", XD_WEIGHTS_MAP);
    check_file(&b, "b.safetensors", XD_WEIGHTS_STREAM);
    b.no_map = true;
    check_file(&b, "a.safetensors", XD_WEIGHTS_MAP);
    bench_end(&b);
}

XD_TEST(the_bytes_of_a_file_are_those_of_the_format) {
    static const int64_t two[] = { 2 };
    static const xd_weights_entry entry = { "a", XD_DTYPE_F32, 1, two };
    static const char text[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                               "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    static const float values[2] = { 1.0f, -2.0f };
    static const unsigned char tail[8] = { 0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0 };
    bench b;
    bench_start(&b);
    xd_weights_writer_desc desc;
    xd_weights_writer *w = NULL;
    char *data = NULL;
    size_t bytes = 0;
    memset(&desc, 0, sizeof desc);
    desc.entries = &entry;
    desc.entry_count = 1;
    CHECK_EQ_INT(weights_write_file(b.ctx, bench_path(&b, "f"), &desc, &w), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(w, 0, 0, XD_WEIGHTS_REST, values), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(w), XD_OK);
    CHECK_EQ_INT(xd_file_load(b.ctx, bench_path(&b, "f"), 0, &data, &bytes), XD_OK);
    CHECK_EQ_INT(bytes, 8 + 88 + 8);
    CHECK_EQ_INT((unsigned char)data[0], 88);
    CHECK(memcmp(data + 8, text, sizeof text - 1) == 0);
    for (size_t i = 8 + sizeof text - 1; i < 96; i++) CHECK(data[i] == ' ');
    CHECK(memcmp(data + 96, tail, 8) == 0);
    xd_release(b.ctx, data);
    bench_end(&b);
}

XD_TEST(wide_elements_come_first_so_that_tensors_are_aligned) {
    bench b;
    bench_start(&b);
    xd_weights *file = NULL;
    CHECK_EQ_INT(write_file(&b, "f", 0), XD_OK);
    CHECK_EQ_INT(weights_open_file(b.ctx, bench_path(&b, "f"), NULL, &file), XD_OK);
    const uint64_t first = xd_weights_at(file, 0)->begin; /* F64 */
    CHECK_EQ_INT(xd_weights_file_at(file, 0)->bytes - first, xd_weights_at(file, 4)->end - first);
    CHECK_EQ_INT(xd_weights_at(file, 1)->begin - first, 16);  /* F32, empty */
    CHECK_EQ_INT(xd_weights_at(file, 2)->begin - first, 16);  /* I32 */
    CHECK_EQ_INT(xd_weights_at(file, 3)->begin - first, 256); /* BF16 */
    CHECK_EQ_INT(xd_weights_at(file, 4)->begin - first, 258); /* U8 */
    xd_weights_close(file);
    bench_end(&b);
}

XD_TEST(a_streamed_box_reads_little_more_than_its_bytes) {
    enum { ROWS = 64, COLUMNS = 400000 };
    static const int64_t shape[] = { ROWS, COLUMNS };
    static const xd_weights_entry entry = { "w", XD_DTYPE_U8, 2, shape };
    bench b;
    bench_start(&b);
    xd_weights_writer_desc desc;
    xd_weights_writer *w = NULL;
    xd_weights *file = NULL;
    unsigned char *data = (unsigned char *)malloc(ROWS * COLUMNS),
                  *part = (unsigned char *)malloc(ROWS * COLUMNS);
    for (int i = 0; i < ROWS * COLUMNS; i++) data[i] = (unsigned char)(i * 31 + i / 997);
    memset(&desc, 0, sizeof desc);
    desc.entries = &entry;
    desc.entry_count = 1;
    CHECK_EQ_INT(weights_write_file(b.ctx, bench_path(&b, "f"), &desc, &w), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(w, 0, 0, XD_WEIGHTS_REST, data), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(w), XD_OK);
    xd_weights_desc stream;
    memset(&stream, 0, sizeof stream);
    stream.mode = XD_WEIGHTS_STREAM;
    CHECK_EQ_INT(weights_open_file(b.ctx, bench_path(&b, "f"), &stream, &file), XD_OK);
    const int64_t offsets[2][2] = { { 10, 0 }, { 5, 1000 } },
                  sizes[2][2] = { { 20, COLUMNS }, { 50, 100000 } };
    for (int k = 0; k < 2; k++) {
        b.bytes_read = 0;
        CHECK_EQ_INT(weights_read_box(file, 0, offsets[k], sizes[k], part), XD_OK);
        CHECK_EQ_INT(b.bytes_read, sizes[k][0] * sizes[k][1]);
        for (int64_t i = 0; i < sizes[k][0]; i++)
            CHECK(memcmp(part + i * sizes[k][1], data + (offsets[k][0] + i) * COLUMNS + offsets[k][1],
                         (size_t)sizes[k][1]) == 0);
    }
    xd_weights_close(file);
    free(data);
    free(part);
    bench_end(&b);
}

/* A plan and a writer refuse alike, before there is a file. */
static void check_bad_plan(bench *b, const xd_weights_writer_desc *desc, const char *expected) {
    xd_weights_layout *layout = NULL;
    xd_weights_writer *w = NULL;
    CHECK_EQ_INT(xd_weights_plan(b->ctx, desc, &layout), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(b->ctx)->message, expected);
    CHECK_EQ_INT(weights_write_file(b->ctx, bench_path(b, "f"), desc, &w), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(b->ctx)->message, expected);
    CHECK(w == NULL && layout == NULL);
    CHECK_EQ_INT(bench_files(b, false), 0);
}

XD_TEST(bad_tensors_are_refused_before_a_file_exists) {
    static const int64_t negative[] = { 3, -1 }, huge[] = { (int64_t)1 << 62, 4 }, most[] = { INT64_MAX };
    static const struct {
        xd_weights_entry entry;
        const char *message;
    } bad[] = {
        { { NULL, XD_DTYPE_U8, 0, NULL }, "tensor 1 has no name" },
        { { "", XD_DTYPE_U8, 0, NULL }, "tensor 1 has no name" },
        { { "__metadata__", XD_DTYPE_U8, 0, NULL },
          "tensor 1 is named __metadata__, which is the name of something else" },
        { { "first", XD_DTYPE_U8, 0, NULL }, "tensors 0 and 1 are both named \"first\"" },
        { { "abc\xc3", XD_DTYPE_U8, 0, NULL }, "the name of tensor 1 is not UTF-8 from byte 3 on" },
        { { "\xc3\xa9\xff", XD_DTYPE_U8, 0, NULL }, "the name of tensor 1 is not UTF-8 from byte 2 on" },
        { { "a", XD_DTYPE_NONE, 0, NULL }, "tensor \"a\" has no dtype" },
        { { "a", XD_DTYPE_U8, 65, huge }, "tensor \"a\" has 65 dimensions, allowed are 64" },
        { { "a", XD_DTYPE_U8, -1, huge }, "tensor \"a\" has -1 dimensions, allowed are 64" },
        { { "a", XD_DTYPE_U8, 2, NULL }, "tensor \"a\" has 2 dimensions but no shape" },
        { { "a", XD_DTYPE_U8, 2, negative },
          "tensor \"a\": size -1 of dimension 1 is negative or brings it beyond 2^63 bytes" },
        { { "a", XD_DTYPE_U8, 2, huge },
          "tensor \"a\": size 4 of dimension 1 is negative or brings it beyond 2^63 bytes" },
        { { "a", XD_DTYPE_I16, 1, most },
          "tensor \"a\": size 9223372036854775807 of dimension 0 is negative or brings it beyond 2^63 "
          "bytes" },
        { { "a", XD_DTYPE_U8, 1, most },
          "tensor \"a\" has 9223372036854775807 bytes, the ones before it 4: a file has less than 2^63" },
    };
    bench b;
    bench_start(&b);
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entry_count = 2;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const xd_weights_entry both[] = { { "first", XD_DTYPE_F32, 0, NULL }, bad[i].entry };
        desc.entries = both;
        check_bad_plan(&b, &desc, bad[i].message);
    }
    char *name = (char *)malloc(65538);
    memset(name, 'n', 65537);
    name[65537] = '\0';
    const xd_weights_entry named = { name, XD_DTYPE_U8, 0, NULL };
    desc.entries = &named;
    desc.entry_count = 1;
    check_bad_plan(&b, &desc, "the name of tensor 0 has 65537 bytes, allowed are 65536");
    free(name);
    bench_end(&b);
}

XD_TEST(bad_metadata_and_numbers_are_refused_before_a_file_exists) {
    static const struct {
        xd_weights_pair pair;
        const char *message;
    } bad[] = {
        { { NULL, "value" }, "pair 1 of the metadata has no key" },
        { { "key", NULL }, "pair 1 of the metadata has no value" },
        { { "first", "value" }, "the metadata has the key \"first\" twice" },
        { { "format", "pt" }, "pair 1 of the metadata is \"format\", which every file has already" },
        { { "\xff", "value" }, "the key of pair 1 of the metadata is not UTF-8" },
        { { "key", "\xff" }, "the value of pair 1 of the metadata is not UTF-8" },
    };
    bench b;
    bench_start(&b);
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.metadata_count = 2;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const xd_weights_pair both[] = { { "first", "1" }, bad[i].pair };
        desc.metadata = both;
        check_bad_plan(&b, &desc, bad[i].message);
    }
    desc.metadata_count = -1;
    check_bad_plan(&b, &desc, "-1 pairs of metadata, allowed are 16666666");
    desc.metadata_count = 0;
    desc.entry_count = -1;
    check_bad_plan(&b, &desc, "-1 tensors, allowed are 3125000");
    const xd_weights_entry one = { "one", XD_DTYPE_U8, 0, NULL };
    desc.entries = &one;
    desc.entry_count = 3125001;
    check_bad_plan(&b, &desc, "3125001 tensors, allowed are 3125000");
    desc.entry_count = 0;
    desc.alignment = 12;
    check_bad_plan(&b, &desc, "alignment 12 is no power of two from 8 on");
    desc.alignment = (size_t)1 << 30;
    check_bad_plan(&b, &desc, "a header of 1073741816 bytes, allowed are 100000000");
    bench_end(&b);
}

XD_TEST(a_file_that_does_not_fit_is_refused_before_it_is_written) {
    bench b;
    bench_start(&b);
    CHECK_EQ_INT(write_file(&b, "f", 0), XD_OK);
    char *data = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(xd_file_load(b.ctx, bench_path(&b, "f"), 0, &data, &bytes), XD_OK);
    xd_release(b.ctx, data);
    b.free_space = bytes - 1;
    CHECK_EQ_INT(write_file(&b, "g", 0), XD_ERROR_IO);
    char expected[80];
    snprintf(expected, sizeof expected, "%d bytes more are needed, %d are free", (int)bytes, (int)bytes - 1);
    CHECK(strstr(xd_last_error(b.ctx)->message, expected) != NULL);
    CHECK_EQ_INT(bench_files(&b, false), 1); /* the old one */
    b.free_space = bytes;
    CHECK_EQ_INT(write_file(&b, "g", 0), XD_OK);
    bench_end(&b);
}

XD_TEST(an_incomplete_file_is_not_published) {
    bench b;
    bench_start(&b);
    xd_weights_writer *w = NULL;
    const xd_weights_writer_desc desc = writer_desc();
    CHECK_EQ_INT(weights_write_file(b.ctx, bench_path(&b, "f"), &desc, &w), XD_OK);
    CHECK_EQ_INT(bench_files(&b, false), 1);
    CHECK_EQ_INT(xd_weights_writer_write(w, 0, 1, 2, "ab"), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_weights_writer_write(w, 0, 0, XD_WEIGHTS_REST, "ab"), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(w), XD_ERROR_STATE);
    CHECK_EQ_INT(bench_files(&b, false), 0);
    bench_end(&b);
}

/* As many bytes as the tensors have are not each of their bytes: the first hole or overlap is named, in every file. */
XD_TEST(every_byte_of_a_tensor_is_written_once) {
    static const int64_t four = 4;
    static const struct {
        unsigned begin[3], bytes[3];
        const char *message;
    } cases[] = { { { 0, 0, 0 }, { 4, 4, 0 }, "tensor \"b\": bytes 0 to 3 of 8 are written more than once" },
                  { { 4, 4, 0 }, { 4, 4, 0 }, "tensor \"b\": bytes 0 to 3 of 8 are not written" },
                  { { 6, 0, 0 }, { 2, 4, 0 }, "tensor \"b\": bytes 4 to 5 of 8 are not written" },
                  { { 0, 6, 0 }, { 4, 0, 4 }, "tensor \"b\": bytes 0 to 3 of 8 are written more than once" },
                  { { 2, 0, 4 }, { 4, 4, 0 }, "tensor \"b\": bytes 2 to 3 of 8 are written more than once" },
                  { { 0, 0, 0 }, { 8, 1, 0 }, "tensor \"b\": bytes 0 to 0 of 8 are written more than once" },
                  { { 0, 0, 0 }, { 0, 0, 0 }, "tensor \"b\": bytes 0 to 7 of 8 are not written" },
                  { { 4, 0, 2 }, { 4, 2, 2 }, NULL },
                  { { 0, 2, 4 }, { 2, 2, 4 }, NULL } };
    const xd_weights_entry three[3] = { { "a", XD_DTYPE_U16, 1, &four },
                                        { "b", XD_DTYPE_U16, 1, &four },
                                        { "c", XD_DTYPE_U16, 1, &four } };
    bench b;
    bench_start(&b);
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        xd_weights_writer_desc d;
        xd_weights_writer *w = NULL;
        const size_t at = i / 2;
        memset(&d, 0, sizeof d);
        d.entries = three;
        d.entry_count = 3;
        d.max_shard_bytes = i % 2 ? 8 : 0; /* one file, and one for each tensor */
        CHECK_EQ_INT(weights_write_directory(b.ctx, b.directory, &d, &w), XD_OK);
        CHECK_EQ_INT(xd_weights_writer_write(w, 2, 0, 8, "12345678"), XD_OK);
        for (int k = 0; k < 3; k++)
            CHECK_EQ_INT(xd_weights_writer_write(w, 1, cases[at].begin[k], cases[at].bytes[k], "abcdefgh"),
                         XD_OK);
        CHECK_EQ_INT(xd_weights_writer_write(w, 0, 0, 8, "12345678"), XD_OK);
        const xd_result result = xd_weights_writer_commit(w);
        CHECK_EQ_INT(result, cases[at].message ? XD_ERROR_STATE : XD_OK);
        if (cases[at].message)
            CHECK_EQ_STR(strstr(xd_last_error(b.ctx)->message, "tensor"), cases[at].message);
    }
    bench_end(&b);
}

XD_TEST(truncated_files_are_refused_at_every_length) {
    bench b;
    bench_start(&b);
    char *data = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(write_file(&b, "f", 0), XD_OK);
    CHECK_EQ_INT(xd_file_load(b.ctx, bench_path(&b, "f"), 0, &data, &bytes), XD_OK);
    for (size_t length = 0; length < bytes; length++) {
        xd_weights *file = NULL;
        char *cut = (char *)malloc(length + 1); /* of its own size, for the address sanitizer */
        memcpy(cut, data, length);
        CHECK_EQ_INT(weights_open_memory(b.ctx, cut, length, NULL, &file), XD_ERROR_FORMAT);
        free(cut);
    }
    xd_release(b.ctx, data);
    bench_end(&b);
}

/* ---- models ---- */

static xd_result open_model(bench *b, int64_t files) {
    xd_weights *model = NULL;
    const xd_result result = weights_open_directory(b->ctx, b->directory, NULL, &model);
    if (result != XD_OK) return result;
    CHECK_EQ_INT(xd_weights_describe(model).file_count, files);
    CHECK_EQ_INT(weights_count(model), ENTRY_COUNT);
    for (int i = 0; i < ENTRY_COUNT; i++) {
        const int64_t index = xd_weights_find(model, entries[i].name);
        CHECK(index >= 0);
        if (index < 0) continue;
        const xd_weights_tensor *info = xd_weights_at(model, index);
        const unsigned char *data = (const unsigned char *)xd_weights_data(model, index);
        CHECK_EQ_STR(info->name, entries[i].name);
        for (uint64_t k = 0; k < info->end - info->begin; k++) CHECK_EQ_INT(data[k], k);
    }
    CHECK_EQ_INT(xd_weights_find(model, "nothing"), -1);
    xd_weights_close(model);
    return result;
}

XD_TEST(a_model_reads_back_from_one_file_and_from_several) {
    bench b;
    bench_start(&b);
    CHECK_EQ_INT(write_model(&b, 0), XD_OK);
    CHECK_EQ_INT(bench_files(&b, false), 1);
    CHECK_EQ_INT(open_model(&b, 1), XD_OK);
    CHECK_EQ_INT(write_model(&b, 18), XD_OK); /* [2] [240] [2 + 16 + 0]; replaces the single file */
    CHECK_EQ_INT(bench_files(&b, false), 4);
    CHECK_EQ_INT(open_model(&b, 3), XD_OK);
    bench_end(&b);
}

static void check_index(bench *b, const char *text, xd_result expected, const char *message) {
    CHECK_EQ_INT(xd_file_save(b->ctx, bench_path(b, "model.safetensors.index.json"), text, strlen(text)),
                 XD_OK);
    CHECK_EQ_INT(open_model(b, 0), expected);
    if (!strstr(xd_last_error(b->ctx)->message, message))
        CHECK_EQ_STR(xd_last_error(b->ctx)->message, message);
}

XD_TEST(an_index_that_does_not_fit_its_files_is_refused) {
    bench b;
    bench_start(&b);
    CHECK_EQ_INT(open_model(&b, 0), XD_ERROR_IO);
    CHECK_EQ_INT(write_file(&b, "one.safetensors", 0), XD_OK);
    check_index(&b, "{", XD_ERROR_FORMAT, "index.json");
    check_index(&b, "{\"weight_map\":[]}", XD_ERROR_FORMAT, "no weight_map");
    check_index(&b, "{\"weight_map\":{\"a\":1}}", XD_ERROR_FORMAT, "does not lie");
    check_index(&b, "{\"weight_map\":{\"a\":\"../one.safetensors\"}}", XD_ERROR_FORMAT, "does not lie");
    check_index(&b, "{\"weight_map\":{\"a\":\"..\"}}", XD_ERROR_FORMAT, "does not lie");
    check_index(&b, "{\"weight_map\":{\"a\":\"\"}}", XD_ERROR_FORMAT, "does not lie");
    check_index(&b, "{\"weight_map\":{\"a\":\"two.safetensors\"}}", XD_ERROR_IO, "two.safetensors");
    check_index(&b, "{\"weight_map\":{\"a\":\"one.safetensors\"}}", XD_ERROR_MISSING,
                "holds no tensor \"a\"");
    check_index(&b, "{\"weight_map\":{\"empty\":\"one.safetensors\"}}", XD_ERROR_UNEXPECTED, "into no file");
    bench_end(&b);
}

/* ---- faults ---- */

static xd_result save_and_load(bench *b) {
    xd_result result = write_model(b, 18);
    if (result == XD_OK) result = open_model(b, 3);
    if (result != XD_OK) return result;
    xd_weights_desc desc;
    xd_weights *file = NULL;
    memset(&desc, 0, sizeof desc);
    desc.mode = XD_WEIGHTS_STREAM;
    result =
        weights_open_file(b->ctx, bench_path(b, "model-00002-of-00003-save-1.safetensors"), &desc, &file);
    if (result != XD_OK) return result;
    const int64_t offset[3] = { 0, 1, 1 }, size[3] = { 3, 2, 2 };
    int32_t box[12];
    result = weights_read_box(file, 0, offset, size, box);
    xd_weights_close(file);
    return result;
}

/* Fails one call after the other until a run meets none. A failed save leaves no file at all; a failed load leaves the
 * four files of the model. Nothing else may stay behind: memory, open files, mappings. */
static void fail_everything(bool file_calls) {
    bench b;
    bench_start(&b);
    b.fail_files = file_calls;
    const long live = b.live;
    long failed = 0;
    for (long n = 0; n < 2000; n++) {
        b.calls = 0;
        b.unsure = false;
        b.fail_at = n;
        const xd_result result = save_and_load(&b);
        const bool met = b.calls > n;
        b.fail_at = -1;
        CHECK_EQ_INT(b.live, live);
        CHECK_EQ_INT(b.opened, 0);
        if (result != XD_OK) {
            failed++;
            CHECK_EQ_INT(result, file_calls ? XD_ERROR_IO : XD_ERROR_MEMORY);
            CHECK_EQ_INT(xd_last_error(b.ctx)->result, result);
        }
        const int files = bench_files(&b, true);
        CHECK(files == 4 || (result != XD_OK && files == 0) || (result != XD_OK && b.unsure));
        if (!met) break;
    }
    CHECK(b.calls > 30 && failed > 20);
    bench_end(&b);
}

XD_TEST(a_failing_allocation_leaves_nothing_behind) {
    fail_everything(false);
}

XD_TEST(a_failing_file_call_leaves_nothing_behind) {
    fail_everything(true);
}

XD_TEST_MAIN()
