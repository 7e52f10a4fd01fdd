/* Modes of the files: those of POSIX, and a caller's own that live in memory. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* O_DIRECT */
#endif

#include "xdistill.h"
#include "xd_test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- POSIX ---- */

typedef struct folder {
    xd_ctx *ctx;
    const xd_files *files;
    char name[32], path[48];
} folder;

static void folder_open(folder *f) {
    f->ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &f->ctx), XD_OK);
    f->files = &xd_ctx_settings(f->ctx)->files;
    strcpy(f->name, "/tmp/xdistill-test-XXXXXX");
    CHECK(mkdtemp(f->name) != NULL);
    snprintf(f->path, sizeof f->path, "%s/file", f->name);
}

static void folder_close(folder *f) {
    CHECK(f->files->remove(NULL, f->path) == 0);
    CHECK(rmdir(f->name) == 0); /* nothing else was left there */
    xd_ctx_destroy(f->ctx);
}

/* Opens the folder's file, to be closed by the caller. */
static intptr_t must_open(const folder *f, unsigned mode) {
    intptr_t file = -1;
    CHECK_EQ_INT(f->files->open(NULL, f->path, mode, &file), 0);
    return file;
}

static int try_open(const folder *f, unsigned mode) {
    intptr_t file = -1;
    const int error = f->files->open(NULL, f->path, mode, &file);
    if (error == 0) f->files->close(NULL, file);
    return error;
}

XD_TEST(a_new_file_must_not_exist_and_the_others_must) {
    folder f;
    folder_open(&f);
    CHECK_EQ_INT(try_open(&f, XD_FILE_READ), ENOENT);
    CHECK_EQ_INT(try_open(&f, XD_FILE_EXISTING), ENOENT);
    CHECK_EQ_INT(try_open(&f, XD_FILE_NEW), 0);
    CHECK_EQ_INT(try_open(&f, XD_FILE_NEW), EEXIST);
    CHECK_EQ_INT(try_open(&f, XD_FILE_READ), 0);
    CHECK_EQ_INT(try_open(&f, XD_FILE_EXISTING), 0);
    folder_close(&f);
}

XD_TEST(an_existing_file_is_written_in_place_by_several_at_once) {
    folder f;
    char text[8] = "";
    uint64_t bytes = 0;
    folder_open(&f);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "abcdef", 6), XD_OK);
    const intptr_t one = must_open(&f, XD_FILE_EXISTING), two = must_open(&f, XD_FILE_EXISTING);
    const intptr_t reader = must_open(&f, XD_FILE_READ);
    CHECK_EQ_INT(f.files->write(NULL, one, "BC", 2, 1), 0);
    CHECK_EQ_INT(f.files->write(NULL, two, "E", 1, 4), 0);
    CHECK_EQ_INT(f.files->size(NULL, one, &bytes), 0);
    CHECK_EQ_INT(bytes, 6);
    CHECK_EQ_INT(f.files->read(NULL, two, text, 6, 0), 0);
    CHECK_EQ_STR(text, "aBCdEf");
    CHECK_EQ_INT(f.files->read(NULL, reader, text, 6, 0), 0);
    CHECK_EQ_STR(text, "aBCdEf");
    CHECK_EQ_INT(f.files->write(NULL, reader, "x", 1, 0), EBADF);
    f.files->close(NULL, one);
    f.files->close(NULL, two);
    f.files->close(NULL, reader);
    folder_close(&f);
}

XD_TEST(a_mode_that_is_none_is_refused_and_makes_no_file) {
    static const unsigned bad[] = { 0, 4, 8, XD_FILE_DIRECT, XD_FILE_DIRECT | 4u, XD_FILE_NEW | 32u, ~0u };
    folder f;
    folder_open(&f);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK_EQ_INT(try_open(&f, bad[i]), EINVAL);
    CHECK_EQ_INT(try_open(&f, XD_FILE_READ), ENOENT);
    CHECK_EQ_INT(try_open(&f, XD_FILE_NEW), 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK_EQ_INT(try_open(&f, bad[i]), EINVAL);
    folder_close(&f);
}

#if defined(O_DIRECT)
/* A handle of POSIX is a descriptor. */
static bool goes_past_the_page_cache(intptr_t file) {
    return (fcntl((int)file, F_GETFL) & O_DIRECT) != 0;
}

static bool folder_can_go_past_the_page_cache(const folder *f) {
    const int descriptor = open(f->path, O_RDONLY | O_DIRECT);
    if (descriptor >= 0) close(descriptor);
    return descriptor >= 0;
}
#endif

XD_TEST(direct_is_a_hint_that_changes_no_byte) {
    enum { BLOCK = XD_FILE_ALIGNMENT, BLOCKS = 3 };
    folder f;
    void *memory = NULL;
    char tail[5];
    folder_open(&f);
    CHECK(posix_memalign(&memory, BLOCK, (size_t)BLOCK * (BLOCKS + 1)) == 0);
    char *data = (char *)memory;
    for (int i = 0; i < BLOCK * BLOCKS; i++) data[i] = (char)(i * 7 / 3);
    const intptr_t writer = must_open(&f, XD_FILE_NEW | XD_FILE_DIRECT);
#if defined(O_DIRECT)
    CHECK_EQ_INT(goes_past_the_page_cache(writer), folder_can_go_past_the_page_cache(&f));
#endif
    CHECK_EQ_INT(f.files->write(NULL, writer, data, BLOCK * BLOCKS, 0), 0);
    CHECK_EQ_INT(f.files->write(NULL, writer, "ahead", 5, BLOCK * BLOCKS),
                 0); /* of no block: the usual way */
    CHECK_EQ_INT(f.files->close(NULL, writer), 0);

    const intptr_t again = must_open(&f, XD_FILE_EXISTING | XD_FILE_DIRECT);
    data[BLOCK] = 'z';
    CHECK_EQ_INT(f.files->write(NULL, again, data + BLOCK, BLOCK, BLOCK), 0);
    CHECK_EQ_INT(f.files->close(NULL, again), 0);

    const intptr_t reader = must_open(&f, XD_FILE_READ | XD_FILE_DIRECT);
    uint64_t bytes = 0;
    CHECK_EQ_INT(f.files->size(NULL, reader, &bytes), 0);
    CHECK_EQ_INT(bytes, BLOCK * BLOCKS + 5);
    memset(memory, 0, (size_t)BLOCK * (BLOCKS + 1));
    CHECK_EQ_INT(f.files->read(NULL, reader, data, BLOCK * BLOCKS, 0), 0);
    for (int i = 0; i < BLOCK * BLOCKS; i++)
        if (data[i] != (i == BLOCK ? 'z' : (char)(i * 7 / 3))) CHECK_EQ_INT(i, -1);
    CHECK_EQ_INT(f.files->read(NULL, reader, tail, 5, BLOCK * BLOCKS), 0);
    CHECK(memcmp(tail, "ahead", 5) == 0);
    CHECK_EQ_INT(f.files->read(NULL, reader, tail, 5, BLOCK * BLOCKS + 3), EIO); /* beyond the end */
    CHECK_EQ_INT(f.files->close(NULL, reader), 0);
    free(memory);
    folder_close(&f);
}

/* ---- a caller's own ---- */

enum { SHELF_FILES = 4, SHELF_BYTES = 64 };

/* Files in memory; a handle is the index. */
typedef struct shelf {
    char names[SHELF_FILES][48], bytes[SHELF_FILES][SHELF_BYTES];
    uint64_t sizes[SHELF_FILES];
    unsigned modes[8]; /* as they came */
    int opened;
} shelf;

static int shelf_find(const shelf *s, const char *name) {
    for (int i = 0; i < SHELF_FILES; i++)
        if (strcmp(s->names[i], name) == 0) return i;
    return -1;
}

static int shelf_open(void *user, const char *path, unsigned mode, intptr_t *file) {
    shelf *s = (shelf *)user;
    int at = shelf_find(s, path);
    s->modes[s->opened++ % 8] = mode;
    if (mode == XD_FILE_EXISTING) return EINVAL; /* what this one does not know */
    if (mode == XD_FILE_READ && at < 0) return ENOENT;
    if (mode == XD_FILE_NEW && at >= 0) return EEXIST;
    if (mode == XD_FILE_NEW) snprintf(s->names[at = shelf_find(s, "")], sizeof s->names[0], "%s", path);
    *file = at;
    return 0;
}

static int shelf_size(void *user, intptr_t file, uint64_t *bytes) {
    *bytes = ((shelf *)user)->sizes[file];
    return 0;
}

static int shelf_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    shelf *s = (shelf *)user;
    if (offset + bytes > s->sizes[file]) return EIO;
    memcpy(buffer, s->bytes[file] + offset, bytes);
    return 0;
}

static int shelf_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    shelf *s = (shelf *)user;
    if (offset + bytes > SHELF_BYTES) return ENOSPC;
    memcpy(s->bytes[file] + offset, buffer, bytes);
    if (offset + bytes > s->sizes[file]) s->sizes[file] = offset + bytes;
    return 0;
}

static int shelf_close(void *user, intptr_t file) {
    (void)user;
    (void)file;
    return 0;
}

static int shelf_rename(void *user, const char *from, const char *to) {
    shelf *s = (shelf *)user;
    snprintf(s->names[shelf_find(s, from)], sizeof s->names[0], "%s", to);
    return 0;
}

static xd_ctx_desc shelf_desc(shelf *s) {
    xd_ctx_desc desc;
    memset(s, 0, sizeof *s);
    memset(&desc, 0, sizeof desc);
    desc.files.open = shelf_open;
    desc.files.size = shelf_size;
    desc.files.read = shelf_read;
    desc.files.write = shelf_write;
    desc.files.close = shelf_close;
    desc.files.rename = shelf_rename;
    desc.files.user = s;
    return desc;
}

XD_TEST(files_of_the_callers_own_need_no_more_than_they_are_asked_for) {
    static const char empty[] = "\2\0\0\0\0\0\0\0{}";
    shelf s;
    xd_ctx *ctx = NULL;
    char *text = NULL;
    size_t bytes = 0;
    xd_safetensors *tensors = NULL;
    const xd_ctx_desc desc = shelf_desc(&s);
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK(xd_ctx_settings(ctx)->files.map == NULL && xd_ctx_settings(ctx)->files.sync == NULL);
    CHECK_EQ_INT(xd_file_save(ctx, "a", "hello", 5), XD_OK); /* without sync, remove, sync_directory */
    CHECK_EQ_INT(xd_file_load(ctx, "a", 0, &text, &bytes), XD_OK);
    CHECK(bytes == 5 && memcmp(text, "hello", 5) == 0);
    xd_release(ctx, text);
    CHECK_EQ_INT(s.modes[0], XD_FILE_NEW);
    CHECK_EQ_INT(s.modes[1], XD_FILE_READ);
    CHECK_EQ_INT(xd_file_save(ctx, "b", empty, sizeof empty - 1), XD_OK);
    CHECK_EQ_INT(xd_safetensors_open(ctx, "b", NULL, &tensors), XD_OK); /* without map */
    CHECK_EQ_INT(xd_safetensors_count(tensors), 0);
    xd_safetensors_close(tensors);
    char large[SHELF_BYTES + 1] = "";
    CHECK_EQ_INT(xd_file_save(ctx, "c", large, sizeof large), XD_ERROR_IO); /* without remove */
    CHECK(shelf_find(&s, "c") < 0 && shelf_find(&s, "c.tmp-0") >= 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(what_a_table_does_not_offer_is_said_before_a_file_is_made) {
    shelf s;
    xd_ctx *ctx = NULL;
    xd_publish *file = NULL;
    xd_ctx_desc desc = shelf_desc(&s);
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(xd_publish_create(ctx, "a", &file), XD_OK);
    CHECK_EQ_INT(xd_publish_resize(file, 10), XD_ERROR_UNSUPPORTED);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "a: the files of this context offer no resize");
    xd_publish_abort(file);
    xd_ctx_destroy(ctx);
    for (int which = 0; which < 2; which++) {
        desc = shelf_desc(&s);
        if (which) desc.files.rename = NULL;
        if (!which) desc.files.write = NULL;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        CHECK_EQ_INT(xd_file_save(ctx, "a", "hello", 5), XD_ERROR_UNSUPPORTED);
        CHECK_EQ_STR(xd_last_error(ctx)->message, which ? "a: the files of this context offer no rename"
                                                        : "a: the files of this context offer no write");
        CHECK_EQ_INT(s.opened, 0);
        xd_ctx_destroy(ctx);
    }
}

static int shelf_map(void *user, intptr_t file, uint64_t bytes, const void **address) {
    shelf *s = (shelf *)user;
    (void)bytes;
    *address = s->bytes[file];
    return 0;
}

XD_TEST(a_table_that_cannot_be_read_is_no_table) {
    shelf s;
    for (int missing = 0; missing < 4; missing++) {
        xd_ctx *ctx = NULL;
        xd_ctx_desc desc = shelf_desc(&s);
        if (missing == 0) desc.files.size = NULL;
        if (missing == 1) desc.files.read = NULL;
        if (missing == 2) desc.files.close = NULL;
        if (missing == 3) desc.files.map = shelf_map; /* and nothing to end it */
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_ARGUMENT);
        CHECK(ctx == NULL);
    }
}

XD_TEST_MAIN()
