/* The table of files: that of POSIX, call by call, calls that fail, and a caller's own files that live in memory.
 * 0.1 s of processor at -O2. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* O_DIRECT */
#endif

#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/publish_internal.h"
#endif
#include "xd_test.h"
#include "weights_calls.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
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

/* ---- past the page cache, at any place ---- */

static uint64_t draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Why writing past the page cache should not work here. */
static int expected_reason(const folder *f) {
#if defined(O_DIRECT)
    return folder_can_go_past_the_page_cache(f) ? 0 : EINVAL;
#else
    (void)f;
    return ENOSYS;
#endif
}

XD_TEST(direct_writing_takes_any_memory_offset_and_size) {
    enum { ROOM = 1 << 17 };
    folder f;
    uint64_t state = 5;
    const long page = sysconf(_SC_PAGESIZE), block = page > XD_FILE_ALIGNMENT ? page : XD_FILE_ALIGNMENT;
    folder_open(&f);
    void *memory = NULL;
    CHECK(posix_memalign(&memory, XD_FILE_ALIGNMENT, ROOM) == 0);
    unsigned char *data = (unsigned char *)memory, *model = (unsigned char *)calloc(ROOM, 1),
                  *found = (unsigned char *)malloc(ROOM);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, model, ROOM), XD_OK);
    const int reason_here = expected_reason(&f);
    const intptr_t files[2] = { must_open(&f, XD_FILE_EXISTING),
                                must_open(&f, XD_FILE_EXISTING | XD_FILE_DIRECT) };
    for (int n = 0; n < 60; n++) {
        const size_t offset = draw(&state) % (n % 3 ? 20000 : ROOM), from = draw(&state) % 5000;
        size_t bytes = draw(&state) % (n % 4 ? 30000 : ROOM);
        const size_t start = n % 2 ? from : offset % XD_FILE_ALIGNMENT; /* where nothing is copied, too */
        if (bytes > ROOM - offset) bytes = ROOM - offset;
        if (bytes > ROOM - start) bytes = ROOM - start;
        for (size_t i = 0; i < bytes; i++) model[offset + i] = data[start + i] = (unsigned char)draw(&state);
        int reason = -1;
        CHECK_EQ_INT(f.files->write_direct(NULL, files[n & 1], data + start, bytes, offset, &reason), 0);
        CHECK(reason == reason_here || (reason == 0 && bytes < 2 * (size_t)block)); /* no whole one in it */
        CHECK_EQ_INT(f.files->read(NULL, files[n / 2 & 1], found, ROOM, 0), 0);
        CHECK(memcmp(found, model, ROOM) == 0);
    }
#if defined(O_DIRECT)
    CHECK(!goes_past_the_page_cache(files[0])); /* handles are as they were opened */
#endif
    int reason = -1;
    CHECK_EQ_INT(f.files->write_direct(NULL, files[0], NULL, 0, 5, &reason), 0);
    CHECK_EQ_INT(reason, 0);
    const intptr_t reader = must_open(&f, XD_FILE_READ);
    CHECK_EQ_INT(f.files->write_direct(NULL, reader, data, ROOM, 0, &reason), EBADF);
    f.files->close(NULL, reader);
    f.files->close(NULL, files[0]);
    f.files->close(NULL, files[1]);
    free(memory);
    free(model);
    free(found);
    folder_close(&f);
}

/* A limit on the size of files makes real short writes: the first one ends at the limit, the next one fails. EINTR is not
 * tested: no write to a regular file returns it. */
XD_TEST(a_short_write_goes_on_and_is_never_a_success) {
    enum { LIMIT = 3 * XD_FILE_ALIGNMENT + 10, BYTES = 5 * XD_FILE_ALIGNMENT };
    static unsigned char data[BYTES + 1];
    folder f;
    struct rlimit before, limit;
    folder_open(&f);
    memset(data, 7, sizeof data);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "", 0), XD_OK);
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    limit = before;
    limit.rlim_cur = LIMIT;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    const intptr_t file = must_open(&f, XD_FILE_EXISTING);
    for (int direct = 0; direct < 2; direct++) {
        uint64_t bytes = 0;
        int reason = 0;
        CHECK_EQ_INT(f.files->resize(NULL, file, 0), 0);
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        const int error = direct ? f.files->write_direct(NULL, file, data + 1, BYTES, 0, &reason)
                                 : f.files->write(NULL, file, data, BYTES, 0);
        CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
        CHECK_EQ_INT(error, EFBIG);
        CHECK_EQ_INT(f.files->size(NULL, file, &bytes), 0);
        CHECK_EQ_INT(bytes, LIMIT);
    }
    signal(SIGXFSZ, handler);
    f.files->close(NULL, file);
    folder_close(&f);
}

/* ---- one file, several ranks ---- */

enum { RANKS = 4, SHARED_BYTES = 300000 };

typedef struct shared {
    char path[80];
    bool direct;
} shared;

static unsigned char shared_byte(size_t i) {
    return (unsigned char)(i * 2654435761u >> 13);
}

/* Pieces of any size, dealt in turn, so that ranks share blocks. */
static xd_result write_pieces(xdi_publish *file, int rank, bool direct) {
    unsigned char *piece = (unsigned char *)malloc(20000);
    xd_result result = XD_OK;
    uint64_t state = 3; /* the same cuts on all ranks */
    size_t at = 0;
    for (int n = 0; at < SHARED_BYTES && result == XD_OK; n++) {
        size_t bytes = 1 + draw(&state) % 20000;
        if (bytes > SHARED_BYTES - at) bytes = SHARED_BYTES - at;
        for (size_t i = 0; i < bytes; i++) piece[i] = shared_byte(at + i);
        if (n % RANKS == rank)
            result = direct ? xdi_publish_write_direct(file, piece, bytes, at, NULL)
                            : xdi_publish_write(file, piece, bytes, at);
        at += bytes;
    }
    free(piece);
    return result;
}

static xd_result write_shared(xd_comm *world, void *argument) {
    const shared *s = (const shared *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    xdi_publish *file = NULL;
    char name[100];
    snprintf(name, sizeof name, "%s.tmp-0", s->path);
    xd_result result = XD_OK;
    if (rank == 0) {
        result = xdi_publish_create(ctx, s->path, &file);
        if (result == XD_OK) CHECK_EQ_STR(xdi_publish_path(file), name);
        if (result == XD_OK) result = xdi_publish_resize(file, SHARED_BYTES);
    }
    XD_TRY(xd_agree(world, result));
    if (rank != 0) result = xdi_publish_join(ctx, name, &file);
    if (result == XD_OK) result = write_pieces(file, rank, s->direct);
    if (rank != 0 && result == XD_OK) result = xdi_publish_commit(file);
    XD_TRY(xd_agree(world, result));
    return rank == 0 ? xdi_publish_commit(file) : XD_OK;
}

XD_TEST(several_ranks_write_one_file) {
    folder f;
    folder_open(&f);
    for (int direct = 0; direct < 2; direct++) {
        shared s;
        char *data = NULL;
        size_t bytes = 0, wrong = 0;
        snprintf(s.path, sizeof s.path, "%s", f.path);
        s.direct = direct != 0;
        CHECK_EQ_INT(xd_run_threads(RANKS, NULL, write_shared, &s, NULL), XD_OK);
        CHECK_EQ_INT(xd_file_load(f.ctx, f.path, 0, &data, &bytes), XD_OK);
        CHECK_EQ_INT(bytes, SHARED_BYTES);
        for (size_t i = 0; i < bytes; i++) wrong += (unsigned char)data[i] != shared_byte(i);
        CHECK_EQ_INT(wrong, 0);
        xd_release(f.ctx, data);
    }
    folder_close(&f);
}

XD_TEST(who_joins_a_file_neither_makes_nor_renames_nor_removes_it) {
    folder f;
    xdi_publish *file = NULL;
    char *data = NULL;
    size_t bytes = 0;
    folder_open(&f);
    CHECK_EQ_INT(xdi_publish_join(f.ctx, f.path, &file), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(f.ctx)->message, "open: No such file") && file == NULL);
    CHECK_EQ_INT(xdi_publish_join(f.ctx, f.name, &file), XD_ERROR_IO); /* a directory */
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "abcdef", 6), XD_OK);
    for (int way = 0; way < 2; way++) {
        CHECK_EQ_INT(xdi_publish_join(f.ctx, f.path, &file), XD_OK);
        CHECK_EQ_STR(xdi_publish_path(file), f.path);
        CHECK_EQ_INT(xdi_publish_write(file, way ? "Y" : "X", 1, (uint64_t)way), XD_OK);
        if (way)
            xdi_publish_abort(file);
        else
            CHECK_EQ_INT(xdi_publish_commit(file), XD_OK);
    }
    CHECK_EQ_INT(xd_file_load(f.ctx, f.path, 0, &data, &bytes), XD_OK);
    CHECK(bytes == 6 && memcmp(data, "XYcdef", 6) == 0);
    xd_release(f.ctx, data);
    folder_close(&f);
}

/* ---- directories and space ---- */

XD_TEST(only_an_empty_directory_is_removed_as_one) {
    folder f;
    char inner[64], link[64], missing[64];
    folder_open(&f);
    snprintf(inner, sizeof inner, "%s/inner", f.name);
    snprintf(link, sizeof link, "%s/link", f.name);
    snprintf(missing, sizeof missing, "%s/missing", f.name);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "a", 1), XD_OK);
    CHECK_EQ_INT(f.files->make_directory(NULL, inner), 0);
    CHECK(symlink(inner, link) == 0);
    CHECK_EQ_INT(f.files->remove_directory(NULL, missing), ENOENT);
    CHECK_EQ_INT(f.files->remove_directory(NULL, f.path), ENOTDIR);
    CHECK_EQ_INT(f.files->remove_directory(NULL, link), ENOTDIR);
    const int full = f.files->remove_directory(NULL, f.name);
    CHECK(full == ENOTEMPTY || full == EEXIST);
    CHECK_EQ_INT(try_open(&f, XD_FILE_READ), 0);
    CHECK_EQ_INT(f.files->remove_directory(NULL, inner), 0);
    CHECK_EQ_INT(f.files->remove_directory(NULL, inner), ENOENT);
    CHECK_EQ_INT(f.files->remove(NULL, link), 0);
    folder_close(&f);
}

XD_TEST(two_names_are_exchanged_in_one_step_or_not_at_all) {
    folder f;
    char other[64], *text = NULL;
    size_t bytes = 0;
    folder_open(&f);
    snprintf(other, sizeof other, "%s/other", f.name);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "one", 3), XD_OK);
    const int missing = f.files->exchange(NULL, f.path, other);
    CHECK(missing == ENOENT || missing == ENOSYS || missing == EINVAL); /* the last two: not offered here */
    CHECK_EQ_INT(try_open(&f, XD_FILE_READ), 0);
    CHECK_EQ_INT(xd_file_save(f.ctx, other, "other", 5), XD_OK);
    const int error = f.files->exchange(NULL, f.path, other);
    CHECK_EQ_INT(error, missing == ENOENT ? 0 : missing);
    CHECK_EQ_INT(xd_file_load(f.ctx, f.path, 0, &text, &bytes), XD_OK);
    CHECK_EQ_STR(text, error == 0 ? "other" : "one");
    xd_release(f.ctx, text);
    CHECK_EQ_INT(xd_file_load(f.ctx, other, 0, &text, &bytes), XD_OK);
    CHECK_EQ_STR(text, error == 0 ? "one" : "other");
    xd_release(f.ctx, text);
    CHECK_EQ_INT(f.files->remove(NULL, other), 0);
    folder_close(&f);
}

XD_TEST(free_space_is_that_of_the_file_system) {
    folder f;
    uint64_t bytes = UINT64_MAX;
    struct statvfs status;
    folder_open(&f);
    CHECK_EQ_INT(f.files->free_space(NULL, f.path, &bytes), ENOENT);
    CHECK_EQ_INT(bytes, UINT64_MAX);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "a", 1), XD_OK);
    CHECK(statvfs(f.path, &status) == 0);
    if (status.f_blocks == 0) { /* a ramfs has no numbers */
        CHECK_EQ_INT(f.files->free_space(NULL, f.path, &bytes), ENOTSUP);
    } else { /* others write meanwhile, so the number may have changed */
        CHECK_EQ_INT(f.files->free_space(NULL, f.path, &bytes), 0);
        CHECK(bytes <= (uint64_t)status.f_blocks * status.f_frsize);
        CHECK_EQ_INT(bytes % status.f_frsize, 0);
    }
    folder_close(&f);
}

XD_TEST(the_names_in_a_directory_come_sorted) {
    static const char *const made[] = { "step-9", "step-10", ".hidden", "Z", "a", "\xc3\xa9" };
    static const char *const sorted[] = { ".hidden", "Z", "a", "step-10", "step-9", "\xc3\xa9" };
    folder f;
    const char **names = NULL;
    int64_t count = -1;
    char path[80];
    folder_open(&f);
    CHECK_EQ_INT(xd_file_list(f.ctx, f.name, &names, &count), XD_OK);
    CHECK(count == 0 && names != NULL);
    xd_release(f.ctx, (void *)names);
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, "%s/%s", f.name, made[i]);
        CHECK_EQ_INT(i == 4 ? f.files->make_directory(NULL, path) : (int)xd_file_save(f.ctx, path, "", 0), 0);
    }
    CHECK_EQ_INT(xd_file_list(f.ctx, f.name, &names, &count), XD_OK);
    CHECK_EQ_INT(count, 6);
    for (int i = 0; i < 6 && count == 6; i++) CHECK_EQ_STR(names[i], sorted[i]);
    xd_release(f.ctx, (void *)names);
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, "%s/%s", f.name, made[i]);
        CHECK_EQ_INT(i == 4 ? f.files->remove_directory(NULL, path) : f.files->remove(NULL, path), 0);
    }
    names = NULL;
    CHECK_EQ_INT(xd_file_list(f.ctx, path, &names, &count), XD_ERROR_IO); /* it is gone */
    CHECK(strstr(xd_last_error(f.ctx)->message, "list: No such file") && names == NULL);
    CHECK(rmdir(f.name) == 0);
    xd_ctx_destroy(f.ctx);
}

/* ---- calls that fail ---- */

/* POSIX files of which single calls fail, or tell what the test wants. */
typedef struct fault {
    xd_files real;
    int list, remove_directory, free_space, write_direct; /* what they return; 0: the real call does it */
    uint64_t space;                                       /* what free_space tells */
    int spaces;                                           /* how often it was asked */
    long allocations;                                     /* that still succeed; -1: all */
} fault;

static int fault_list(void *user, const char *directory, void (*each)(void *argument, const char *name),
                      void *argument) {
    fault *x = (fault *)user;
    if (x->list == 0) return x->real.list(NULL, directory, each, argument);
    each(argument, "one"); /* and then it fails */
    return x->list;
}

static int fault_remove_directory(void *user, const char *path) {
    fault *x = (fault *)user;
    return x->remove_directory ? x->remove_directory : x->real.remove_directory(NULL, path);
}

static int fault_free_space(void *user, const char *path, uint64_t *bytes) {
    fault *x = (fault *)user;
    (void)path;
    x->spaces++;
    *bytes = x->space;
    return x->free_space;
}

static int fault_write_direct(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset,
                              int *reason) {
    fault *x = (fault *)user;
    *reason = ENOMEM;
    return x->write_direct ? x->write_direct : x->real.write(NULL, file, buffer, bytes, offset);
}

static void *fault_allocate(void *user, size_t bytes) {
    fault *x = (fault *)user;
    if (x->allocations == 0) return NULL;
    if (x->allocations > 0) x->allocations--;
    return malloc(bytes);
}

static void fault_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* The folder's context again, with these calls. */
static void fault_open(fault *x, folder *f) {
    xd_ctx_desc desc;
    folder_open(f);
    memset(x, 0, sizeof *x);
    memset(&desc, 0, sizeof desc);
    x->real = *f->files;
    x->allocations = -1;
    desc.allocator.allocate = fault_allocate;
    desc.allocator.release = fault_release;
    desc.allocator.user = x;
    desc.files.list = fault_list;
    desc.files.remove_directory = fault_remove_directory;
    desc.files.free_space = fault_free_space;
    desc.files.write_direct = fault_write_direct;
    desc.files.user = x;
    xd_ctx_destroy(f->ctx);
    CHECK_EQ_INT(xd_ctx_create(&desc, &f->ctx), XD_OK);
    f->files = &xd_ctx_settings(f->ctx)->files;
}

static void fault_close(folder *f) {
    CHECK(rmdir(f->name) == 0);
    xd_ctx_destroy(f->ctx);
}

XD_TEST(a_list_that_fails_is_no_shorter_list) {
    fault x;
    folder f;
    const char **names = NULL;
    int64_t count = -1;
    fault_open(&x, &f);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "a", 1), XD_OK);
    x.list = EIO;
    CHECK_EQ_INT(xd_file_list(f.ctx, f.name, &names, &count), XD_ERROR_IO);
    x.list = 0;
    for (long n = 0; n < 3; n++) {
        x.allocations = n;
        CHECK_EQ_INT(xd_file_list(f.ctx, f.name, &names, &count), XD_ERROR_MEMORY);
    }
    CHECK(names == NULL && count == -1);
    x.allocations = 3;
    CHECK_EQ_INT(xd_file_list(f.ctx, f.name, &names, &count), XD_OK);
    CHECK_EQ_INT(count, 1);
    CHECK_EQ_STR(names[0], "file");
    xd_release(f.ctx, (void *)names);
    CHECK_EQ_INT(f.files->remove(&x, f.path), 0);
    fault_close(&f);
}

XD_TEST(a_full_disk_is_known_before_anything_is_written) {
    fault x;
    folder f;
    xdi_publish *file = NULL;
    fault_open(&x, &f);
    CHECK_EQ_INT(xdi_publish_create(f.ctx, f.path, &file), XD_OK);
    x.space = 1000;
    CHECK_EQ_INT(xdi_publish_resize(file, 1001), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(f.ctx)->message, "1001 bytes more are needed, 1000 are free") != NULL);
    CHECK_EQ_INT(xdi_publish_resize(file, 1000), XD_OK);
    CHECK_EQ_INT(x.spaces, 2);
    x.space = 500;
    CHECK_EQ_INT(xdi_publish_resize(file, 1500), XD_OK); /* it has 1000 already */
    CHECK_EQ_INT(xdi_publish_resize(file, 10), XD_OK);   /* shorter: nothing is asked */
    CHECK_EQ_INT(x.spaces, 3);
    x.free_space = ENOTSUP;
    CHECK_EQ_INT(xdi_publish_resize(file, 5000), XD_OK); /* who does not know does not refuse */
    CHECK_EQ_INT(x.spaces, 4);
    xdi_publish_abort(file);
    fault_close(&f);
}

XD_TEST(a_direct_write_that_fails_is_an_error_and_one_that_is_not_offered_a_reason) {
    fault x;
    folder f;
    xdi_publish *file = NULL;
    int reason = -1;
    fault_open(&x, &f);
    CHECK_EQ_INT(xdi_publish_create(f.ctx, f.path, &file), XD_OK);
    x.write_direct = ENOSPC;
    CHECK_EQ_INT(xdi_publish_write_direct(file, "abc", 3, 70, &reason), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(f.ctx)->message, "direct write of 3 bytes at 70: No space") != NULL);
    CHECK_EQ_INT(reason, -1);
    x.write_direct = 0;
    CHECK_EQ_INT(xdi_publish_write_direct(file, "abc", 3, 0, &reason), XD_OK);
    CHECK_EQ_INT(reason, ENOMEM);
    CHECK_EQ_INT(xdi_publish_write_direct(file, "abc", 3, 0, NULL), XD_OK);
    xdi_publish_abort(file);
    fault_close(&f);
}

static xd_result make_directory(const folder *f) {
    xd_publish_directory *d = NULL;
    char name[100];
    XD_TRY(xd_publish_directory_create(f->ctx, &(xd_publish_directory_desc){ f->path }, &d));
    snprintf(name, sizeof name, "%s/inner", xd_publish_directory_path(d));
    CHECK_EQ_INT(f->files->make_directory(f->files->user, name), 0);
    return xd_publish_directory_commit(d);
}

XD_TEST(a_directory_that_cannot_be_removed_is_named) {
    fault x;
    folder f;
    char name[100];
    fault_open(&x, &f);
    CHECK_EQ_INT(make_directory(&f), XD_OK);
    x.remove_directory = EACCES;
    CHECK_EQ_INT(make_directory(&f), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(f.ctx)->message, "the new directory is complete, but ") != NULL);
    CHECK(strstr(xd_last_error(f.ctx)->message, "stays: Permission denied") != NULL);
    x.remove_directory = 0;
    CHECK(rmdir(strcat(strcpy(name, f.path), ".tmp-0/inner")) == 0);
    CHECK(rmdir(strcat(strcpy(name, f.path), ".tmp-0")) == 0);
    CHECK(rmdir(strcat(strcpy(name, f.path), "/inner")) == 0 && rmdir(f.path) == 0);
    fault_close(&f);
}

/* ---- a caller's own ---- */

enum { SHELF_FILES = 4, SHELF_BYTES = 64 };

/* Files in memory; a handle is the index. */
typedef struct shelf {
    char names[SHELF_FILES][48], bytes[SHELF_FILES][SHELF_BYTES];
    uint64_t sizes[SHELF_FILES];
    unsigned modes[8]; /* as they came */
    int opened, maps, unmaps;
    const void *unmapped;
    uint64_t unmapped_bytes;
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
    xd_weights *tensors = NULL;
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
    CHECK_EQ_INT(weights_open_file(ctx, "b", NULL, &tensors), XD_OK); /* without map */
    CHECK_EQ_INT(weights_count(tensors), 0);
    xd_weights_close(tensors);
    char large[SHELF_BYTES + 1] = "";
    CHECK_EQ_INT(xd_file_save(ctx, "c", large, sizeof large), XD_ERROR_IO); /* without remove */
    CHECK(shelf_find(&s, "c") < 0 && shelf_find(&s, "c.tmp-0") >= 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(what_a_table_does_not_offer_is_said_before_a_file_is_made) {
    shelf s;
    xd_ctx *ctx = NULL;
    xdi_publish *file = NULL;
    xd_ctx_desc desc = shelf_desc(&s);
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(xdi_publish_create(ctx, "a", &file), XD_OK);
    CHECK_EQ_INT(xdi_publish_resize(file, 10), XD_ERROR_UNSUPPORTED);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "a: the files of this context offer no resize");
    int reason = -1;
    CHECK_EQ_INT(xdi_publish_write_direct(file, "x", 1, 0, &reason), XD_OK); /* the usual way */
    CHECK_EQ_INT(reason, ENOSYS);
    xdi_publish_abort(file);
    const char **names = NULL;
    int64_t count = 0;
    CHECK_EQ_INT(xd_file_list(ctx, "a", &names, &count), XD_ERROR_UNSUPPORTED);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "a: the files of this context offer no list");
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
    s->maps++;
    return 0;
}

static int shelf_no_map(void *user, intptr_t file, uint64_t bytes, const void **address) {
    (void)user;
    (void)file;
    (void)bytes;
    (void)address;
    return ENOTSUP;
}

static int shelf_unmap(void *user, const void *address, uint64_t bytes) {
    shelf *s = (shelf *)user;
    s->unmaps++;
    s->unmapped = address;
    s->unmapped_bytes = bytes;
    return 0;
}

XD_TEST(a_map_is_ended_once_with_its_address_and_size) {
    static const char empty[] = "\2\0\0\0\0\0\0\0{}";
    shelf s;
    for (int maps = 0; maps < 2; maps++) {
        xd_ctx *ctx = NULL;
        xd_weights *tensors = NULL;
        xd_ctx_desc desc = shelf_desc(&s);
        desc.files.map = maps ? shelf_map : shelf_no_map;
        desc.files.unmap = shelf_unmap;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        CHECK_EQ_INT(xd_file_save(ctx, "b", empty, sizeof empty - 1), XD_OK);
        CHECK_EQ_INT(weights_open_file(ctx, "b", NULL, &tensors), XD_OK);
        CHECK_EQ_INT(s.maps, maps);
        CHECK_EQ_INT(s.unmaps, 0);
        xd_weights_close(tensors);
        CHECK_EQ_INT(s.unmaps, maps); /* what was read instead has no map to end */
        if (maps) CHECK(s.unmapped == s.bytes[shelf_find(&s, "b")] && s.unmapped_bytes == sizeof empty - 1);
        xd_ctx_destroy(ctx);
    }
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
