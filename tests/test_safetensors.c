#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- a context whose allocations and file calls can be made to fail, one by one ---- */

typedef struct bench {
    xd_ctx *ctx;
    char directory[64];
    long live;       /* blocks not yet released */
    long opened;     /* files not yet closed, mappings included */
    long calls;      /* of the failing kind so far */
    long fail_at;    /* this call fails; -1: none does */
    bool fail_files; /* file calls instead of allocations */
    bool no_map;
    bool unsure; /* the sync of a directory failed: files are complete, but perhaps not for ever */
    uint64_t bytes_read, free_space;
    xd_files real;
} bench;

static bool fails(bench *b, bool file_call) {
    return b->fail_files == file_call && b->calls++ == b->fail_at;
}

static void *bench_allocate(void *user, size_t bytes) {
    bench *b = (bench *)user;
    if (fails(b, false)) return NULL;
    b->live++;
    return malloc(bytes);
}

static void bench_release(void *user, void *memory) {
    ((bench *)user)->live--;
    free(memory);
}

static int bench_open(void *user, const char *path, unsigned mode, intptr_t *file) {
    bench *b = (bench *)user;
    const int error = fails(b, true) ? 5 : b->real.open(NULL, path, mode, file);
    if (error == 0) b->opened++;
    return error;
}

static int bench_size(void *user, intptr_t file, uint64_t *bytes) {
    bench *b = (bench *)user;
    return fails(b, true) ? 5 : b->real.size(NULL, file, bytes);
}

static int bench_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    bench *b = (bench *)user;
    b->bytes_read += bytes;
    return fails(b, true) ? 5 : b->real.read(NULL, file, buffer, bytes, offset);
}

static int bench_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    bench *b = (bench *)user;
    return fails(b, true) ? 28 : b->real.write(NULL, file, buffer, bytes, offset);
}

static int bench_resize(void *user, intptr_t file, uint64_t bytes) {
    bench *b = (bench *)user;
    return fails(b, true) ? 28 : b->real.resize(NULL, file, bytes);
}

static int bench_sync(void *user, intptr_t file) {
    (void)file; /* the disk's speed is not what is tested */
    return fails((bench *)user, true) ? 5 : 0;
}

static int bench_close(void *user, intptr_t file) {
    bench *b = (bench *)user;
    b->opened--;
    const int error = b->real.close(NULL, file); /* a close that fails closes all the same */
    return fails(b, true) ? 5 : error;
}

static int bench_map(void *user, intptr_t file, uint64_t bytes, const void **address) {
    bench *b = (bench *)user;
    const int error = b->no_map || fails(b, true) ? 12 : b->real.map(NULL, file, bytes, address);
    if (error == 0) b->opened++;
    return error;
}

static int bench_unmap(void *user, const void *address, uint64_t bytes) {
    bench *b = (bench *)user;
    b->opened--;
    return b->real.unmap(NULL, address, bytes);
}

static int bench_rename(void *user, const char *from, const char *to) {
    bench *b = (bench *)user;
    return fails(b, true) ? 5 : b->real.rename(NULL, from, to);
}

static int bench_sync_directory(void *user, const char *path) {
    bench *b = (bench *)user;
    (void)path;
    b->unsure = b->unsure || (b->fail_files && b->calls == b->fail_at);
    return fails(b, true) ? 5 : 0;
}

static int bench_free_space(void *user, const char *path, uint64_t *bytes) {
    (void)path;
    *bytes = ((bench *)user)->free_space;
    return 0;
}

static int bench_remove(void *user, const char *path) {
    return ((bench *)user)->real.remove(NULL, path);
}

static void bench_start(bench *b) {
    xd_ctx *plain = NULL;
    xd_ctx_desc desc;
    memset(b, 0, sizeof *b);
    memset(&desc, 0, sizeof desc);
    b->fail_at = -1;
    b->free_space = UINT64_MAX;
    strcpy(b->directory, "/tmp/xdistill-test-XXXXXX");
    CHECK(mkdtemp(b->directory) != NULL);
    CHECK_EQ_INT(xd_ctx_create(NULL, &plain), XD_OK);
    b->real = xd_ctx_settings(plain)->files;
    xd_ctx_destroy(plain);
    desc.allocator.allocate = bench_allocate;
    desc.allocator.release = bench_release;
    desc.allocator.user = b;
    desc.files.open = bench_open;
    desc.files.size = bench_size;
    desc.files.read = bench_read;
    desc.files.write = bench_write;
    desc.files.resize = bench_resize;
    desc.files.sync = bench_sync;
    desc.files.close = bench_close;
    desc.files.map = bench_map;
    desc.files.unmap = bench_unmap;
    desc.files.rename = bench_rename;
    desc.files.remove = bench_remove;
    desc.files.sync_directory = bench_sync_directory;
    desc.files.free_space = bench_free_space;
    desc.files.user = b;
    CHECK_EQ_INT(xd_ctx_create(&desc, &b->ctx), XD_OK);
}

/* Number of files in the directory; with `remove_them` it is empty afterwards. */
static int bench_files(bench *b, bool remove_them) {
    DIR *directory = opendir(b->directory);
    int count = 0;
    for (struct dirent *entry; directory && (entry = readdir(directory)) != NULL;) {
        char path[400];
        if (entry->d_name[0] == '.') continue;
        count++;
        snprintf(path, sizeof path, "%s/%s", b->directory, entry->d_name);
        if (remove_them) remove(path);
    }
    if (directory) closedir(directory);
    return count;
}

static void bench_end(bench *b) {
    bench_files(b, true);
    CHECK(rmdir(b->directory) == 0);
    xd_ctx_destroy(b->ctx);
    CHECK_EQ_INT(b->live, 0);
    CHECK_EQ_INT(b->opened, 0);
}

static const char *bench_path(const bench *b, const char *name) {
    static char path[400];
    snprintf(path, sizeof path, "%s/%s", b->directory, name);
    return path;
}

/* ---- headers by hand ---- */

/* Opens a file made of a header text and a number of data bytes. */
static xd_result open_text(xd_ctx *ctx, const char *header, size_t data_bytes,
                           const xd_safetensors_desc *desc, unsigned char **memory, xd_safetensors **out) {
    const size_t length = strlen(header);
    *memory = (unsigned char *)calloc(8 + length + data_bytes, 1);
    for (int i = 0; i < 8; i++) (*memory)[i] = (unsigned char)((uint64_t)length >> (8 * i));
    memcpy(*memory + 8, header, length);
    return xd_safetensors_open_memory(ctx, *memory, 8 + length + data_bytes, desc, out);
}

static void check_header(xd_ctx *ctx, const char *header, size_t data_bytes, const char *expected) {
    unsigned char *memory;
    xd_safetensors *file = NULL;
    const xd_result result = open_text(ctx, header, data_bytes, NULL, &memory, &file);
    if (expected) {
        CHECK_EQ_INT(result, XD_ERROR_FORMAT);
        CHECK(file == NULL);
        if (!strstr(xd_last_error(ctx)->message, expected))
            CHECK_EQ_STR(xd_last_error(ctx)->message, expected);
    } else {
        if (result != XD_OK) CHECK_EQ_STR(xd_last_error(ctx)->message, header);
        xd_safetensors_close(file);
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
    xd_safetensors *file = NULL;
    unsigned char bytes[16] = { 0 };
    CHECK_EQ_INT(xd_safetensors_open_memory(b.ctx, bytes, 7, NULL, &file), XD_ERROR_FORMAT);
    CHECK(strstr(xd_last_error(b.ctx)->message, "7 bytes"));
    bytes[0] = 9;
    CHECK_EQ_INT(xd_safetensors_open_memory(b.ctx, bytes, 16, NULL, &file), XD_ERROR_FORMAT);
    CHECK(strstr(xd_last_error(b.ctx)->message, "9 bytes in a file of 16"));
    memset(bytes, 0xff, 8);
    CHECK_EQ_INT(xd_safetensors_open_memory(b.ctx, bytes, 16, NULL, &file), XD_ERROR_FORMAT);
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
    const char *header = "{" ENTRY("a", "F4", "[2]", 0, 1) "," ENTRY("b", "U8", "[2]", 1, 3) "}";
    xd_safetensors_desc desc;
    unsigned char *memory;
    xd_safetensors *file = NULL;
    memset(&desc, 0, sizeof desc);
    desc.skip_unknown = true;
    CHECK_EQ_INT(open_text(b.ctx, header, 3, &desc, &memory, &file), XD_OK);
    CHECK_EQ_INT(xd_safetensors_count(file), 1);
    CHECK_EQ_INT(xd_safetensors_find(file, "b"), 0);
    CHECK_EQ_INT(xd_safetensors_find(file, "a"), -1);
    CHECK((const unsigned char *)xd_safetensors_data(file, 0) == memory + 8 + strlen(header) + 1);
    xd_safetensors_close(file);
    free(memory);
    bench_end(&b);
}

/* ---- files ---- */

static const int64_t shape_box[] = { 3, 4, 5 }, shape_two[] = { 2 }, shape_zero[] = { 0, 7 };
static const xd_safetensors_entry entries[] = { { "z.bytes", XD_DTYPE_U8, 1, shape_two },
                                                { "m \"box\"", XD_DTYPE_I32, 3, shape_box },
                                                { "scalar", XD_DTYPE_BF16, 0, NULL },
                                                { "a\xc3\xa9", XD_DTYPE_F64, 1, shape_two },
                                                { "empty", XD_DTYPE_F32, 2, shape_zero } };

enum { ENTRY_COUNT = sizeof entries / sizeof entries[0] };

static xd_safetensors_writer_desc writer_desc(void) {
    static const xd_safetensors_pair pair = { "note", "line\nend" };
    xd_safetensors_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entries = entries;
    desc.entry_count = ENTRY_COUNT;
    desc.metadata = &pair;
    desc.metadata_count = 1;
    return desc;
}

/* Writes the file above, the box in two pieces, back to front; the first error wins and aborts. */
static xd_result write_file(bench *b, const char *name, size_t alignment) {
    static int32_t box[60];
    static const unsigned char bytes[2] = { 7, 8 };
    static const double doubles[2] = { 1.0, -2.0 };
    const uint16_t one = xd_bf16_from_f32(1.0f);
    xd_safetensors_writer *w = NULL;
    xd_safetensors_writer_desc desc = writer_desc();
    desc.alignment = alignment;
    for (int i = 0; i < 60; i++) box[i] = i;
    xd_result result = xd_safetensors_writer_create(b->ctx, bench_path(b, name), &desc, &w);
    if (result != XD_OK) return result;
    if (result == XD_OK) result = xd_safetensors_writer_write_range(w, 1, 100, 140, &box[25]);
    if (result == XD_OK) result = xd_safetensors_writer_write_range(w, 1, 0, 100, box);
    if (result == XD_OK) result = xd_safetensors_writer_write(w, 0, bytes);
    if (result == XD_OK) result = xd_safetensors_writer_write(w, 3, doubles);
    if (result == XD_OK) result = xd_safetensors_writer_write(w, 2, &one);
    if (result == XD_OK) return xd_safetensors_writer_commit(w);
    xd_safetensors_writer_abort(w);
    return result;
}

/* Every box of the tensor, against plain indexing. */
static void check_boxes(xd_safetensors *file) {
    const int64_t index = xd_safetensors_find(file, "m \"box\"");
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
        CHECK_EQ_INT(xd_safetensors_read_box(file, index, o, n, got), XD_OK);
        int64_t at = 0;
        for (int64_t i = o[0]; i < o[0] + n[0]; i++)
            for (int64_t k = o[1]; k < o[1] + n[1]; k++)
                for (int64_t l = o[2]; l < o[2] + n[2]; l++) CHECK_EQ_INT(got[at++], (i * 4 + k) * 5 + l);
        CHECK_EQ_INT(got[at], -1);
    }
}

static void check_file(bench *b, const char *name, xd_safetensors_mode mode) {
    static const char *const names[] = { "a\xc3\xa9", "empty", "m \"box\"", "scalar", "z.bytes" };
    xd_safetensors_desc desc;
    xd_safetensors *file = NULL;
    double doubles[2] = { 0.0, 0.0 };
    unsigned char byte = 0;
    memset(&desc, 0, sizeof desc);
    desc.mode = mode;
    CHECK_EQ_INT(xd_safetensors_open(b->ctx, bench_path(b, name), &desc, &file), XD_OK);
    if (!file) return;
    CHECK_EQ_INT(xd_safetensors_count(file), ENTRY_COUNT);
    for (int i = 0; i < ENTRY_COUNT; i++) {
        CHECK_EQ_STR(xd_safetensors_at(file, i)->name, names[i]);
        CHECK_EQ_INT(xd_safetensors_find(file, names[i]), i);
        CHECK((xd_safetensors_data(file, i) != NULL) == (mode == XD_SAFETENSORS_MAP));
    }
    CHECK_EQ_STR(xd_safetensors_metadata(file, "format"), "pt");
    CHECK_EQ_STR(xd_safetensors_metadata(file, "note"), "line\nend");
    const char *key = "untouched", *value = key;
    CHECK(xd_safetensors_metadata_at(file, 0, &key, &value));
    CHECK_EQ_STR(key, "format");
    CHECK_EQ_STR(value, "pt");
    CHECK(xd_safetensors_metadata_at(file, 1, &key, &value));
    CHECK_EQ_STR(key, "note");
    CHECK(!xd_safetensors_metadata_at(file, 2, &key, &value));
    CHECK_EQ_STR(value, "line\nend"); /* untouched past the last */
    CHECK_EQ_INT(xd_safetensors_read_range(file, 0, 0, 16, doubles), XD_OK);
    CHECK(doubles[0] == 1.0 && doubles[1] == -2.0);
    CHECK_EQ_INT(xd_safetensors_read_range(file, 4, 1, 1, &byte), XD_OK);
    CHECK_EQ_INT(byte, 8);
    CHECK_EQ_INT(xd_safetensors_read_range(file, 4, 1, 2, &byte), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_safetensors_read_range(file, 5, 0, 0, &byte), XD_ERROR_ARGUMENT);
    const int64_t outside[3] = { 0, 2, 0 }, whole[3] = { 3, 3, 5 };
    CHECK_EQ_INT(xd_safetensors_read_box(file, 2, outside, whole, doubles), XD_ERROR_ARGUMENT);
    check_boxes(file);
    xd_safetensors_close(file);
}

XD_TEST(a_file_reads_back_mapped_streamed_and_where_nothing_can_be_mapped) {
    bench b;
    bench_start(&b);
    CHECK_EQ_INT(write_file(&b, "a.safetensors", 0), XD_OK);
    CHECK_EQ_INT(write_file(&b, "b.safetensors", 4096), XD_OK);
    CHECK_EQ_INT(bench_files(&b, false), 2);
    check_file(&b, "a.safetensors", XD_SAFETENSORS_MAP);
    check_file(&b, "b.safetensors", XD_SAFETENSORS_STREAM);
    b.no_map = true;
    check_file(&b, "a.safetensors", XD_SAFETENSORS_MAP);
    bench_end(&b);
}

XD_TEST(the_bytes_of_a_file_are_those_of_the_format) {
    static const int64_t two[] = { 2 };
    static const xd_safetensors_entry entry = { "a", XD_DTYPE_F32, 1, two };
    static const char text[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                               "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    static const float values[2] = { 1.0f, -2.0f };
    static const unsigned char tail[8] = { 0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0 };
    bench b;
    bench_start(&b);
    xd_safetensors_writer_desc desc;
    xd_safetensors_writer *w = NULL;
    char *data = NULL;
    size_t bytes = 0;
    memset(&desc, 0, sizeof desc);
    desc.entries = &entry;
    desc.entry_count = 1;
    CHECK_EQ_INT(xd_safetensors_writer_create(b.ctx, bench_path(&b, "f"), &desc, &w), XD_OK);
    CHECK_EQ_INT(xd_safetensors_writer_write(w, 0, values), XD_OK);
    CHECK_EQ_INT(xd_safetensors_writer_commit(w), XD_OK);
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
    xd_safetensors *file = NULL;
    CHECK_EQ_INT(write_file(&b, "f", 0), XD_OK);
    CHECK_EQ_INT(xd_safetensors_open(b.ctx, bench_path(&b, "f"), NULL, &file), XD_OK);
    CHECK_EQ_INT(xd_safetensors_at(file, 0)->begin, 0);   /* F64 */
    CHECK_EQ_INT(xd_safetensors_at(file, 1)->begin, 16);  /* F32, empty */
    CHECK_EQ_INT(xd_safetensors_at(file, 2)->begin, 16);  /* I32 */
    CHECK_EQ_INT(xd_safetensors_at(file, 3)->begin, 256); /* BF16 */
    CHECK_EQ_INT(xd_safetensors_at(file, 4)->begin, 258); /* U8 */
    xd_safetensors_close(file);
    bench_end(&b);
}

XD_TEST(a_streamed_box_reads_little_more_than_its_bytes) {
    enum { ROWS = 64, COLUMNS = 400000 };
    static const int64_t shape[] = { ROWS, COLUMNS };
    static const xd_safetensors_entry entry = { "w", XD_DTYPE_U8, 2, shape };
    bench b;
    bench_start(&b);
    xd_safetensors_writer_desc desc;
    xd_safetensors_writer *w = NULL;
    xd_safetensors *file = NULL;
    unsigned char *data = (unsigned char *)malloc(ROWS * COLUMNS),
                  *part = (unsigned char *)malloc(ROWS * COLUMNS);
    for (int i = 0; i < ROWS * COLUMNS; i++) data[i] = (unsigned char)(i * 31 + i / 997);
    memset(&desc, 0, sizeof desc);
    desc.entries = &entry;
    desc.entry_count = 1;
    CHECK_EQ_INT(xd_safetensors_writer_create(b.ctx, bench_path(&b, "f"), &desc, &w), XD_OK);
    CHECK_EQ_INT(xd_safetensors_writer_write(w, 0, data), XD_OK);
    CHECK_EQ_INT(xd_safetensors_writer_commit(w), XD_OK);
    xd_safetensors_desc stream;
    memset(&stream, 0, sizeof stream);
    stream.mode = XD_SAFETENSORS_STREAM;
    CHECK_EQ_INT(xd_safetensors_open(b.ctx, bench_path(&b, "f"), &stream, &file), XD_OK);
    const int64_t offsets[2][2] = { { 10, 0 }, { 5, 1000 } },
                  sizes[2][2] = { { 20, COLUMNS }, { 50, 100000 } };
    for (int k = 0; k < 2; k++) {
        b.bytes_read = 0;
        CHECK_EQ_INT(xd_safetensors_read_box(file, 0, offsets[k], sizes[k], part), XD_OK);
        CHECK_EQ_INT(b.bytes_read, sizes[k][0] * sizes[k][1]);
        for (int64_t i = 0; i < sizes[k][0]; i++)
            CHECK(memcmp(part + i * sizes[k][1], data + (offsets[k][0] + i) * COLUMNS + offsets[k][1],
                         (size_t)sizes[k][1]) == 0);
    }
    xd_safetensors_close(file);
    free(data);
    free(part);
    bench_end(&b);
}

/* A plan and a writer refuse alike, before there is a file. */
static void check_bad_plan(bench *b, const xd_safetensors_writer_desc *desc, const char *expected) {
    xd_safetensors_layout *layout = NULL;
    xd_safetensors_writer *w = NULL;
    CHECK_EQ_INT(xd_safetensors_plan(b->ctx, desc, &layout), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(b->ctx)->message, expected);
    CHECK_EQ_INT(xd_safetensors_writer_create(b->ctx, bench_path(b, "f"), desc, &w), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(b->ctx)->message, expected);
    CHECK(w == NULL && layout == NULL);
    CHECK_EQ_INT(bench_files(b, false), 0);
}

XD_TEST(bad_tensors_are_refused_before_a_file_exists) {
    static const int64_t negative[] = { 3, -1 }, huge[] = { (int64_t)1 << 62, 4 }, most[] = { INT64_MAX };
    static const struct {
        xd_safetensors_entry entry;
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
    xd_safetensors_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entry_count = 2;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const xd_safetensors_entry both[] = { { "first", XD_DTYPE_F32, 0, NULL }, bad[i].entry };
        desc.entries = both;
        check_bad_plan(&b, &desc, bad[i].message);
    }
    char *name = (char *)malloc(65538);
    memset(name, 'n', 65537);
    name[65537] = '\0';
    const xd_safetensors_entry named = { name, XD_DTYPE_U8, 0, NULL };
    desc.entries = &named;
    desc.entry_count = 1;
    check_bad_plan(&b, &desc, "the name of tensor 0 has 65537 bytes, allowed are 65536");
    free(name);
    bench_end(&b);
}

XD_TEST(bad_metadata_and_numbers_are_refused_before_a_file_exists) {
    static const struct {
        xd_safetensors_pair pair;
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
    xd_safetensors_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.metadata_count = 2;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const xd_safetensors_pair both[] = { { "first", "1" }, bad[i].pair };
        desc.metadata = both;
        check_bad_plan(&b, &desc, bad[i].message);
    }
    desc.metadata_count = -1;
    check_bad_plan(&b, &desc, "-1 pairs of metadata, allowed are 16666666");
    desc.metadata_count = 0;
    desc.entry_count = -1;
    check_bad_plan(&b, &desc, "-1 tensors, allowed are 3125000");
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
    xd_safetensors_writer *w = NULL;
    const xd_safetensors_writer_desc desc = writer_desc();
    CHECK_EQ_INT(xd_safetensors_writer_create(b.ctx, bench_path(&b, "f"), &desc, &w), XD_OK);
    CHECK_EQ_INT(bench_files(&b, false), 1);
    CHECK_EQ_INT(xd_safetensors_writer_write_range(w, 0, 1, 2, "ab"), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_safetensors_writer_write(w, 0, "ab"), XD_OK);
    CHECK_EQ_INT(xd_safetensors_writer_commit(w), XD_ERROR_STATE);
    CHECK_EQ_INT(bench_files(&b, false), 0);
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
        xd_safetensors *file = NULL;
        char *cut = (char *)malloc(length + 1); /* of its own size, for the address sanitizer */
        memcpy(cut, data, length);
        CHECK_EQ_INT(xd_safetensors_open_memory(b.ctx, cut, length, NULL, &file), XD_ERROR_FORMAT);
        free(cut);
    }
    xd_release(b.ctx, data);
    bench_end(&b);
}

/* ---- models ---- */

static xd_result write_model(bench *b, uint64_t max_shard_bytes) {
    static unsigned char data[240];
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entries = entries;
    desc.entry_count = ENTRY_COUNT;
    desc.max_shard_bytes = max_shard_bytes;
    for (int i = 0; i < 240; i++) data[i] = (unsigned char)i;
    static const size_t bytes[ENTRY_COUNT] = { 2, 240, 2, 16, 0 };
    xd_result result = xd_weights_writer_create(b->ctx, b->directory, &desc, &w);
    if (result != XD_OK) return result;
    for (int i = 0; i < ENTRY_COUNT && result == XD_OK; i++) {
        result = xd_weights_writer_write(w, i, 0, bytes[i] / 2, data);
        if (result == XD_OK)
            result =
                xd_weights_writer_write(w, i, bytes[i] / 2, bytes[i] - bytes[i] / 2, data + bytes[i] / 2);
    }
    if (result == XD_OK) return xd_weights_writer_commit(w);
    xd_weights_writer_abort(w);
    return result;
}

static xd_result open_model(bench *b, int64_t files) {
    xd_weights_files *model = NULL;
    const xd_result result = xd_weights_files_open(b->ctx, b->directory, NULL, &model);
    if (result != XD_OK) return result;
    CHECK_EQ_INT(xd_weights_files_count(model), files);
    int64_t tensors = 0;
    for (int64_t f = 0; f < files; f++) tensors += xd_safetensors_count(xd_weights_files_at(model, f));
    CHECK_EQ_INT(tensors, ENTRY_COUNT);
    for (int i = 0; i < ENTRY_COUNT; i++) {
        xd_safetensors *file = NULL;
        int64_t index = -1;
        CHECK_EQ_INT(xd_weights_files_find(model, entries[i].name, &file, &index), XD_OK);
        if (!file) continue;
        const xd_safetensors_info *info = xd_safetensors_at(file, index);
        const unsigned char *data = (const unsigned char *)xd_safetensors_data(file, index);
        CHECK_EQ_STR(info->name, entries[i].name);
        for (uint64_t k = 0; k < info->end - info->begin; k++) CHECK_EQ_INT(data[k], k);
    }
    xd_safetensors *none = NULL;
    int64_t index = -7;
    CHECK_EQ_INT(xd_weights_files_find(model, "nothing", &none, &index), XD_ERROR_MISSING);
    CHECK(none == NULL && index == -7);
    xd_weights_files_close(model);
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

/* ---- the same bytes as ever ---- */

static uint32_t file_checksum(bench *b, const char *name) {
    char *data = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(xd_file_load(b->ctx, bench_path(b, name), 0, &data, &bytes), XD_OK);
    const uint32_t checksum = xd_crc32c(0, data, bytes);
    xd_release(b->ctx, data);
    return checksum;
}

enum { MANY = 200, MANY_NAME = 24 };

/* Tensors of all dtypes, in an order that is none; names of which some begin alike. */
typedef struct crowd {
    char names[MANY][MANY_NAME];
    int64_t shapes[MANY][3];
    xd_safetensors_entry entries[MANY];
} crowd;

static void crowd_make(crowd *c) {
    for (int i = 0; i < MANY; i++) {
        const xd_dtype dtype = (xd_dtype)(1 + i * 7 % (int)XD_DTYPE_F64);
        snprintf(c->names[i], MANY_NAME, "layers.%d.%s", i * 37 % MANY, i % 3 ? "weight" : "w");
        for (int d = 0; d < 3; d++) c->shapes[i][d] = (i + d * 5) % 4;
        const xd_safetensors_entry entry = { c->names[i], dtype, i % 4, c->shapes[i] };
        c->entries[i] = entry;
    }
}

static xd_result write_crowd(bench *b, const crowd *c, const char *name, size_t alignment) {
    static const unsigned char data[216] = { 1, 2, 3 };
    xd_safetensors_writer *w = NULL;
    xd_safetensors_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entries = c->entries;
    desc.entry_count = MANY;
    desc.alignment = alignment;
    XD_TRY(xd_safetensors_writer_create(b->ctx, bench_path(b, name), &desc, &w));
    for (int i = 0; i < MANY; i++) CHECK_EQ_INT(xd_safetensors_writer_write(w, i, data), XD_OK);
    return xd_safetensors_writer_commit(w);
}

/* The numbers are those of the files of 2026-11-24. */
XD_TEST(files_have_the_bytes_that_they_always_had) {
    bench b;
    crowd *c = (crowd *)calloc(1, sizeof *c);
    bench_start(&b);
    crowd_make(c);
    CHECK_EQ_INT(write_file(&b, "a", 0), XD_OK);
    CHECK_EQ_INT(write_file(&b, "b", 4096), XD_OK);
    CHECK_EQ_INT(write_crowd(&b, c, "c", 0), XD_OK);
    CHECK_EQ_INT(write_crowd(&b, c, "d", 64), XD_OK);
    CHECK_EQ_INT(file_checksum(&b, "a"), 0x042b6c6du);
    CHECK_EQ_INT(file_checksum(&b, "b"), 0x379b3967u);
    CHECK_EQ_INT(file_checksum(&b, "c"), 0x29303c28u);
    CHECK_EQ_INT(file_checksum(&b, "d"), 0xf0ecd444u);
    CHECK_EQ_INT(write_model(&b, 18), XD_OK);
    CHECK_EQ_INT(file_checksum(&b, "model-00002-of-00003-save-1.safetensors"), 0x733f635du);
    CHECK_EQ_INT(file_checksum(&b, "model.safetensors.index.json"), 0x689775dcu);
    free(c);
    bench_end(&b);
}

XD_TEST(a_plan_is_the_file_before_it_is_written) {
    static const size_t alignments[] = { 0, 64, 4096 };
    bench b;
    crowd *c = (crowd *)calloc(1, sizeof *c);
    bench_start(&b);
    crowd_make(c);
    for (int n = 0; n < 3; n++) {
        xd_safetensors_layout *layout = NULL;
        xd_safetensors *file = NULL;
        xd_safetensors_writer_desc desc;
        char *data = NULL;
        size_t bytes = 0;
        memset(&desc, 0, sizeof desc);
        desc.entries = c->entries;
        desc.entry_count = MANY;
        desc.alignment = alignments[n];
        CHECK_EQ_INT(xd_safetensors_plan(b.ctx, &desc, &layout), XD_OK);
        CHECK_EQ_INT(bench_files(&b, false), 0);
        CHECK_EQ_INT(write_crowd(&b, c, "f", alignments[n]), XD_OK);
        CHECK_EQ_INT(xd_file_load(b.ctx, bench_path(&b, "f"), 0, &data, &bytes), XD_OK);
        CHECK_EQ_INT(layout->file_bytes, bytes);
        CHECK_EQ_INT(layout->header_bytes % (alignments[n] ? alignments[n] : 8), 0);
        CHECK(memcmp(data, layout->header, (size_t)layout->header_bytes) == 0);
        CHECK_EQ_INT(xd_safetensors_open(b.ctx, bench_path(&b, "f"), NULL, &file), XD_OK);
        for (int i = 0; i < MANY; i++) {
            const xd_safetensors_info *info =
                xd_safetensors_at(file, xd_safetensors_find(file, c->entries[i].name));
            CHECK_EQ_INT(layout->begin[i], layout->header_bytes + info->begin);
            CHECK_EQ_INT(layout->bytes[i], info->end - info->begin);
        }
        xd_safetensors_close(file);
        xd_release(b.ctx, data);
        xd_release(b.ctx, layout);
        bench_files(&b, true);
    }
    free(c);
    bench_end(&b);
}

XD_TEST(a_plan_does_not_depend_on_the_order_of_the_tensors) {
    bench b;
    crowd *c = (crowd *)calloc(1, sizeof *c);
    xd_safetensors_entry turned[MANY];
    xd_safetensors_layout *one = NULL, *other = NULL;
    xd_safetensors_writer_desc desc;
    bench_start(&b);
    crowd_make(c);
    for (int i = 0; i < MANY; i++) turned[i] = c->entries[MANY - 1 - i];
    memset(&desc, 0, sizeof desc);
    desc.entries = c->entries;
    desc.entry_count = MANY;
    CHECK_EQ_INT(xd_safetensors_plan(b.ctx, &desc, &one), XD_OK);
    desc.entries = turned;
    CHECK_EQ_INT(xd_safetensors_plan(b.ctx, &desc, &other), XD_OK);
    CHECK_EQ_INT(one->header_bytes, other->header_bytes);
    CHECK_EQ_INT(one->file_bytes, other->file_bytes);
    CHECK(memcmp(one->header, other->header, (size_t)one->header_bytes) == 0);
    for (int i = 0; i < MANY; i++) CHECK_EQ_INT(one->begin[i], other->begin[MANY - 1 - i]);
    xd_release(b.ctx, one);
    xd_release(b.ctx, other);
    free(c);
    bench_end(&b);
}

XD_TEST(a_plan_of_nothing_is_an_empty_file) {
    bench b;
    xd_safetensors_layout *layout = NULL;
    xd_safetensors_writer_desc desc;
    bench_start(&b);
    memset(&desc, 0, sizeof desc);
    CHECK_EQ_INT(xd_safetensors_plan(b.ctx, &desc, &layout), XD_OK);
    CHECK_EQ_INT(layout->header_bytes, 40);
    CHECK_EQ_INT(layout->file_bytes, 40);
    CHECK(memcmp(layout->header + 8, "{\"__metadata__\":{\"format\":\"pt\"}} ", 32) == 0);
    xd_release(b.ctx, layout);
    bench_end(&b);
}

XD_TEST(a_name_in_two_shards_is_refused) {
    static const xd_safetensors_entry twice[] = { { "a", XD_DTYPE_U8, 0, NULL },
                                                  { "b", XD_DTYPE_U8, 0, NULL },
                                                  { "a", XD_DTYPE_F32, 0, NULL } };
    bench b;
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    bench_start(&b);
    memset(&desc, 0, sizeof desc);
    desc.entries = twice;
    desc.entry_count = 3;
    desc.max_shard_bytes = 1;
    CHECK_EQ_INT(xd_weights_writer_create(b.ctx, b.directory, &desc, &w), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(b.ctx)->message, "tensors 0 and 2 are both named \"a\"");
    CHECK(w == NULL);
    CHECK_EQ_INT(bench_files(&b, false), 0);
    bench_end(&b);
}

/* ---- faults ---- */

static xd_result save_and_load(bench *b) {
    xd_result result = write_model(b, 18);
    if (result == XD_OK) result = open_model(b, 3);
    if (result != XD_OK) return result;
    xd_safetensors_desc desc;
    xd_safetensors *file = NULL;
    memset(&desc, 0, sizeof desc);
    desc.mode = XD_SAFETENSORS_STREAM;
    result =
        xd_safetensors_open(b->ctx, bench_path(b, "model-00002-of-00003-save-1.safetensors"), &desc, &file);
    if (result != XD_OK) return result;
    const int64_t offset[3] = { 0, 1, 1 }, size[3] = { 3, 2, 2 };
    int32_t box[12];
    result = xd_safetensors_read_box(file, 0, offset, size, box);
    xd_safetensors_close(file);
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
