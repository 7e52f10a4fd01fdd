/* Plans of safetensors files: they are the files, whose bytes stay as they are. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "safetensors_bench.h"
#include "weights_calls.h"

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
    xd_weights_entry entries[MANY];
} crowd;

static void crowd_make(crowd *c) {
    for (int i = 0; i < MANY; i++) {
        const xd_dtype dtype = (xd_dtype)(1 + i * 7 % (int)XD_DTYPE_F64);
        snprintf(c->names[i], MANY_NAME, "layers.%d.%s", i * 37 % MANY, i % 3 ? "weight" : "w");
        for (int d = 0; d < 3; d++) c->shapes[i][d] = (i + d * 5) % 4;
        const xd_weights_entry entry = { c->names[i], dtype, i % 4, c->shapes[i] };
        c->entries[i] = entry;
    }
}

static xd_result write_crowd(bench *b, const crowd *c, const char *name, size_t alignment) {
    static const unsigned char data[216] = { 1, 2, 3 };
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entries = c->entries;
    desc.entry_count = MANY;
    desc.alignment = alignment;
    XD_TRY(weights_write_file(b->ctx, bench_path(b, name), &desc, &w));
    for (int i = 0; i < MANY; i++)
        CHECK_EQ_INT(xd_weights_writer_write(w, i, 0, XD_WEIGHTS_REST, data), XD_OK);
    return xd_weights_writer_commit(w);
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
        xd_weights_layout *layout = NULL;
        xd_weights *file = NULL;
        xd_weights_writer_desc desc;
        char *data = NULL;
        size_t bytes = 0;
        memset(&desc, 0, sizeof desc);
        desc.entries = c->entries;
        desc.entry_count = MANY;
        desc.alignment = alignments[n];
        CHECK_EQ_INT(xd_weights_plan(b.ctx, &desc, &layout), XD_OK);
        CHECK_EQ_INT(bench_files(&b, false), 0);
        CHECK_EQ_INT(write_crowd(&b, c, "f", alignments[n]), XD_OK);
        CHECK_EQ_INT(xd_file_load(b.ctx, bench_path(&b, "f"), 0, &data, &bytes), XD_OK);
        CHECK_EQ_INT(layout->file_bytes, bytes);
        CHECK_EQ_INT(layout->header_bytes % (alignments[n] ? alignments[n] : 8), 0);
        CHECK(memcmp(data, layout->header, (size_t)layout->header_bytes) == 0);
        CHECK_EQ_INT(weights_open_file(b.ctx, bench_path(&b, "f"), NULL, &file), XD_OK);
        for (int i = 0; i < MANY; i++) {
            const xd_weights_tensor *info = xd_weights_at(file, xd_weights_find(file, c->entries[i].name));
            CHECK_EQ_INT(layout->begin[i], info->begin);
            CHECK_EQ_INT(layout->bytes[i], info->end - info->begin);
        }
        xd_weights_close(file);
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
    xd_weights_entry turned[MANY];
    xd_weights_layout *one = NULL, *other = NULL;
    xd_weights_writer_desc desc;
    bench_start(&b);
    crowd_make(c);
    for (int i = 0; i < MANY; i++) turned[i] = c->entries[MANY - 1 - i];
    memset(&desc, 0, sizeof desc);
    desc.entries = c->entries;
    desc.entry_count = MANY;
    CHECK_EQ_INT(xd_weights_plan(b.ctx, &desc, &one), XD_OK);
    desc.entries = turned;
    CHECK_EQ_INT(xd_weights_plan(b.ctx, &desc, &other), XD_OK);
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
    xd_weights_layout *layout = NULL;
    xd_weights_writer_desc desc;
    bench_start(&b);
    memset(&desc, 0, sizeof desc);
    CHECK_EQ_INT(xd_weights_plan(b.ctx, &desc, &layout), XD_OK);
    CHECK_EQ_INT(layout->header_bytes, 40);
    CHECK_EQ_INT(layout->file_bytes, 40);
    CHECK(memcmp(layout->header + 8, "{\"__metadata__\":{\"format\":\"pt\"}} ", 32) == 0);
    xd_release(b.ctx, layout);
    bench_end(&b);
}

XD_TEST(a_name_in_two_shards_is_refused) {
    static const xd_weights_entry twice[] = { { "a", XD_DTYPE_U8, 0, NULL },
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
    CHECK_EQ_INT(weights_write_directory(b.ctx, b.directory, &desc, &w), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(b.ctx)->message, "tensors 0 and 2 are both named \"a\"");
    CHECK(w == NULL);
    CHECK_EQ_INT(bench_files(&b, false), 0);
    bench_end(&b);
}

XD_TEST_MAIN()
