/* safetensors_bench.h - a context whose allocations and file calls can be made to fail one by one, and what the tests of
 * safetensors files write with it. */
#ifndef SAFETENSORS_BENCH_H
#define SAFETENSORS_BENCH_H

#include "xd_test.h"
#include "xdistill.h"
#include "weights_calls.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

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

static inline bool fails(bench *b, bool file_call) {
    return b->fail_files == file_call && b->calls++ == b->fail_at;
}

static inline void *bench_allocate(void *user, size_t bytes) {
    bench *b = (bench *)user;
    if (fails(b, false)) return NULL;
    b->live++;
    return malloc(bytes);
}

static inline void bench_release(void *user, void *memory) {
    ((bench *)user)->live--;
    free(memory);
}

static inline int bench_open(void *user, const char *path, unsigned mode, intptr_t *file) {
    bench *b = (bench *)user;
    const int error = fails(b, true) ? 5 : b->real.open(NULL, path, mode, file);
    if (error == 0) b->opened++;
    return error;
}

static inline int bench_size(void *user, intptr_t file, uint64_t *bytes) {
    bench *b = (bench *)user;
    return fails(b, true) ? 5 : b->real.size(NULL, file, bytes);
}

static inline int bench_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    bench *b = (bench *)user;
    b->bytes_read += bytes;
    return fails(b, true) ? 5 : b->real.read(NULL, file, buffer, bytes, offset);
}

static inline int bench_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    bench *b = (bench *)user;
    return fails(b, true) ? 28 : b->real.write(NULL, file, buffer, bytes, offset);
}

static inline int bench_resize(void *user, intptr_t file, uint64_t bytes) {
    bench *b = (bench *)user;
    return fails(b, true) ? 28 : b->real.resize(NULL, file, bytes);
}

static inline int bench_sync(void *user, intptr_t file) {
    (void)file; /* the disk's speed is not what is tested */
    return fails((bench *)user, true) ? 5 : 0;
}

static inline int bench_close(void *user, intptr_t file) {
    bench *b = (bench *)user;
    b->opened--;
    const int error = b->real.close(NULL, file); /* a close that fails closes all the same */
    return fails(b, true) ? 5 : error;
}

static inline int bench_map(void *user, intptr_t file, uint64_t bytes, const void **address) {
    bench *b = (bench *)user;
    const int error = b->no_map || fails(b, true) ? 12 : b->real.map(NULL, file, bytes, address);
    if (error == 0) b->opened++;
    return error;
}

static inline int bench_unmap(void *user, const void *address, uint64_t bytes) {
    bench *b = (bench *)user;
    b->opened--;
    return b->real.unmap(NULL, address, bytes);
}

static inline int bench_rename(void *user, const char *from, const char *to) {
    bench *b = (bench *)user;
    return fails(b, true) ? 5 : b->real.rename(NULL, from, to);
}

static inline int bench_sync_directory(void *user, const char *path) {
    bench *b = (bench *)user;
    (void)path;
    b->unsure = b->unsure || (b->fail_files && b->calls == b->fail_at);
    return fails(b, true) ? 5 : 0;
}

static inline int bench_free_space(void *user, const char *path, uint64_t *bytes) {
    (void)path;
    *bytes = ((bench *)user)->free_space;
    return 0;
}

static inline int bench_remove(void *user, const char *path) {
    return ((bench *)user)->real.remove(NULL, path);
}

static inline void bench_start(bench *b) {
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
static inline int bench_files(bench *b, bool remove_them) {
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

static inline void bench_end(bench *b) {
    bench_files(b, true);
    CHECK(rmdir(b->directory) == 0);
    xd_ctx_destroy(b->ctx);
    CHECK_EQ_INT(b->live, 0);
    CHECK_EQ_INT(b->opened, 0);
}

static inline const char *bench_path(const bench *b, const char *name) {
    static char path[400];
    snprintf(path, sizeof path, "%s/%s", b->directory, name);
    return path;
}

/* ---- a file and a model of five tensors ---- */

static const int64_t shape_box[] = { 3, 4, 5 }, shape_two[] = { 2 }, shape_zero[] = { 0, 7 };
static const xd_weights_entry entries[] = { { "z.bytes", XD_DTYPE_U8, 1, shape_two },
                                            { "m \"box\"", XD_DTYPE_I32, 3, shape_box },
                                            { "scalar", XD_DTYPE_BF16, 0, NULL },
                                            { "a\xc3\xa9", XD_DTYPE_F64, 1, shape_two },
                                            { "empty", XD_DTYPE_F32, 2, shape_zero } };

enum { ENTRY_COUNT = sizeof entries / sizeof entries[0] };

static inline xd_weights_writer_desc writer_desc(void) {
    static const xd_weights_pair pair = { "note", "line\nend" };
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entries = entries;
    desc.entry_count = ENTRY_COUNT;
    desc.metadata = &pair;
    desc.metadata_count = 1;
    return desc;
}

/* Writes the file above, the box in two pieces, back to front; the first error wins and aborts. */
static inline xd_result write_file(bench *b, const char *name, size_t alignment) {
    static int32_t box[60];
    static const unsigned char bytes[2] = { 7, 8 };
    static const double doubles[2] = { 1.0, -2.0 };
    const uint16_t one = xd_bf16_from_f32(1.0f);
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc = writer_desc();
    desc.alignment = alignment;
    for (int i = 0; i < 60; i++) box[i] = i;
    xd_result result = weights_write_file(b->ctx, bench_path(b, name), &desc, &w);
    if (result != XD_OK) return result;
    if (result == XD_OK) result = xd_weights_writer_write(w, 1, 100, 140, &box[25]);
    if (result == XD_OK) result = xd_weights_writer_write(w, 1, 0, 100, box);
    if (result == XD_OK) result = xd_weights_writer_write(w, 0, 0, XD_WEIGHTS_REST, bytes);
    if (result == XD_OK) result = xd_weights_writer_write(w, 3, 0, XD_WEIGHTS_REST, doubles);
    if (result == XD_OK) result = xd_weights_writer_write(w, 2, 0, XD_WEIGHTS_REST, &one);
    if (result == XD_OK) return xd_weights_writer_commit(w);
    xd_weights_writer_abort(w);
    return result;
}

static inline xd_result write_model(bench *b, uint64_t max_shard_bytes) {
    static unsigned char data[240];
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.entries = entries;
    desc.entry_count = ENTRY_COUNT;
    desc.max_shard_bytes = max_shard_bytes;
    for (int i = 0; i < 240; i++) data[i] = (unsigned char)i;
    static const size_t bytes[ENTRY_COUNT] = { 2, 240, 2, 16, 0 };
    xd_result result = weights_write_directory(b->ctx, b->directory, &desc, &w);
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

#endif
