/* A file that appears under its name only when it is complete. */

#include "base/extend.h"
#include "base/internal.h"
#include "base/publish_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct xdi_publish {
    xd_ctx *ctx;
    intptr_t file, held; /* held: the lock of the temporary file */
    int64_t process;     /* whose file it is: one that is forked from it removes nothing */
    bool open, locked, renamed, joined;
    char *temporary; /* both names follow the struct in the same allocation */
    char *path;
};

#define XDI_PUBLISH_SUFFIX ".tmp-"

enum { XDI_PUBLISH_ROOM = 24, XDI_PUBLISH_TRIES = 1000000 };

/* The same file in the directory that was put aside; false when neither directory has it. */
static bool xdi_file_open_old(xd_ctx *ctx, const char *path, intptr_t *file) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const char *name = strrchr(path, '/');
    if (!name || name == path) return false;
    const size_t room = strlen(path) + sizeof XDI_DIRECTORY_OLD;
    char *old = (char *)xd_allocate(ctx, room);
    if (!old) return false;
    memcpy(old, path, (size_t)(name - path));
    bool found = false;
    const int folder = files->open(files->user, old, XD_FILE_READ, file);
    if (folder == 0) files->close(files->user, *file);
    if (folder == ENOENT) {
        snprintf(old + (name - path), room - (size_t)(name - path), "%s%s", XDI_DIRECTORY_OLD, name);
        found = files->open(files->user, old, XD_FILE_READ, file) == 0 ||
                files->open(files->user, path, XD_FILE_READ, file) == 0; /* the new one has come meanwhile */
    }
    xd_release(ctx, old);
    return found;
}

XD_PRIVATE int xdi_file_open_read(xd_ctx *ctx, const char *path, intptr_t *file) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const int error = files->open(files->user, path, XD_FILE_READ, file);
    return error == ENOENT && xdi_file_open_old(ctx, path, file) ? 0 : error;
}

XD_PRIVATE int xdi_file_probe(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    intptr_t file;
    const int error = xdi_file_open_read(ctx, path, &file);
    if (error == 0) files->close(files->user, file);
    return error;
}

XD_PRIVATE xd_result xdi_refuse_pointer(xd_ctx *ctx, const char *what, const void *data, size_t bytes) {
    static const char begin[] = "version https://git-lfs.github.com/spec/";
    const size_t length = sizeof begin - 1;
    XD_REQUIRE(ctx, bytes < length || memcmp(data, begin, length) != 0, XD_ERROR_FORMAT,
               "%s is a pointer of Git LFS, not the file itself, which `git lfs pull` fetches", what);
    return XD_OK;
}

XD_API xd_result xd_file_load(xd_ctx *ctx, const char *path, size_t max_bytes, char **data, size_t *bytes) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const size_t limit = max_bytes ? max_bytes : (size_t)256 << 20;
    intptr_t file;
    uint64_t size = 0;
    const int refused = xdi_file_open_read(ctx, path, &file);
    XD_REQUIRE(ctx, refused == 0, XD_ERROR_IO, "%s: open: %s", path, xdi_open_error(refused));
    int error = files->size(files->user, file, &size);
    const bool fits = error == 0 && size <= limit && size < SIZE_MAX;
    char *text = fits ? (char *)xd_allocate(ctx, (size_t)size + 1) : NULL;
    if (text) error = files->read(files->user, file, text, (size_t)size, 0);
    files->close(files->user, file); /* nothing was written: a failure loses nothing */
    if (error != 0) xd_release(ctx, text);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: read: %s", path, strerror(error));
    XD_REQUIRE(ctx, fits, XD_ERROR_FORMAT, "%s has %llu bytes, allowed are %llu", path,
               (unsigned long long)size, (unsigned long long)limit);
    XD_REQUIRE(ctx, text, XD_ERROR_MEMORY, "%s: no room for %llu bytes", path, (unsigned long long)size);
    const xd_result result = xdi_refuse_pointer(ctx, path, text, (size_t)size);
    if (result != XD_OK) xd_release(ctx, text);
    XD_TRY(result);
    *data = text;
    *bytes = (size_t)size;
    return XD_OK;
}

XD_API xd_result xd_file_save(xd_ctx *ctx, const char *path, const void *data, size_t bytes) {
    xdi_publish *file = NULL;
    XD_TRY(xdi_publish_create(ctx, path, &file));
    const xd_result result = xdi_publish_write(file, data, bytes, 0);
    if (result == XD_OK) return xdi_publish_commit(file);
    xdi_publish_abort(file);
    return result;
}

/* ---- names in a directory ---- */

typedef struct xdi_names {
    xd_ctx *ctx;
    char *text; /* NUL-terminated, one behind the other */
    size_t bytes, capacity;
    int64_t count;
    bool full;
} xdi_names;

static void xdi_names_each(void *argument, const char *name) {
    xdi_names *n = (xdi_names *)argument;
    const size_t more = strlen(name) + 1;
    if (n->full) return;
    if (more > n->capacity - n->bytes) {
        const size_t capacity = 2 * n->capacity + more + 1024;
        char *text = (char *)xd_allocate(n->ctx, capacity);
        n->full = text == NULL;
        if (!text) return;
        if (n->bytes) memcpy(text, n->text, n->bytes);
        xd_release(n->ctx, n->text);
        n->text = text;
        n->capacity = capacity;
    }
    memcpy(n->text + n->bytes, name, more);
    n->bytes += more;
    n->count++;
}

static int xdi_names_order(const void *a, const void *b) {
    return strcmp((const char *)a, (const char *)b);
}

/* The names in order, copied behind their pointers, in one block. */
static const char **xdi_names_sorted(const xdi_names *n) {
    const size_t count = (size_t)n->count, pointers = count * sizeof(char *);
    const void **order = (const void **)xd_allocate(n->ctx, count * sizeof *order);
    char *block = order ? (char *)xd_allocate(n->ctx, pointers + n->bytes) : NULL;
    const char **names = (const char **)(void *)block;
    if (block && n->bytes) memcpy(block + pointers, n->text, n->bytes);
    for (size_t i = 0, at = pointers; block && i < count; at += strlen(block + at) + 1, i++)
        order[i] = block + at;
    if (block) xdi_sort(order, count, xdi_names_order);
    for (size_t i = 0; block && i < count; i++) names[i] = (const char *)order[i];
    xd_release(n->ctx, order);
    return names;
}

XD_API xd_result xd_file_list(xd_ctx *ctx, const char *directory, const char ***names, int64_t *count) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    XD_REQUIRE(ctx, files->list, XD_ERROR_UNSUPPORTED, "%s: the files of this context offer no list",
               directory);
    xdi_names n;
    memset(&n, 0, sizeof n);
    n.ctx = ctx;
    const int error = files->list(files->user, directory, xdi_names_each, &n);
    const char **sorted = error == 0 && !n.full ? xdi_names_sorted(&n) : NULL;
    xd_release(ctx, n.text);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: list: %s", directory, strerror(error));
    XD_REQUIRE(ctx, sorted, XD_ERROR_MEMORY, "%s: no room for its %lld names", directory, (long long)n.count);
    *names = sorted;
    *count = n.count;
    return XD_OK;
}

/* ---- writing ---- */

/* Takes the lock of the new temporary file. EEXIST: another writer took it for abandoned in the moment before. */
static int xdi_publish_lock(xdi_publish *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const int error = files->lock(files->user, p->temporary, p->file, &p->held);
    p->locked = error == 0;
    if (error != EWOULDBLOCK && error != ESTALE) return 0; /* without locks too */
    files->close(files->user, p->file);
    return EEXIST;
}

/* Creates the temporary file: the first free name of path.tmp-0, path.tmp-1, ... after those of dead writers are removed. */
static int xdi_publish_open(xdi_publish *p, bool locked) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const size_t length = strlen(p->path);
    int error = EEXIST;
    if (locked) xdi_abandoned_sweep(p->ctx, p->path, XDI_PUBLISH_SUFFIX);
    memcpy(p->temporary, p->path, length);
    for (int i = 0; i < XDI_PUBLISH_TRIES && error == EEXIST; i++) {
        snprintf(p->temporary + length, XDI_PUBLISH_ROOM, "%s%d", XDI_PUBLISH_SUFFIX, i);
        error = files->open(files->user, p->temporary, XD_FILE_NEW, &p->file);
        if (error == EEXIST && locked && xdi_abandoned_remove(p->ctx, p->temporary)) i--;
        if (error == 0 && locked && files->lock) error = xdi_publish_lock(p);
    }
    p->open = error == 0;
    return error;
}

XD_PRIVATE xd_result xdi_publish_start(xd_ctx *ctx, const char *path, bool locked, xdi_publish **out) {
    const size_t length = strlen(path);
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    XD_REQUIRE(ctx, length > 0, XD_ERROR_ARGUMENT, "the path is empty");
    XD_REQUIRE(ctx, files->write && files->rename, XD_ERROR_UNSUPPORTED,
               "%s: the files of this context offer no %s", path, files->write ? "rename" : "write");
    int error = files->replaceable ? files->replaceable(files->user, path) : 0;
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: replace: %s", path, xdi_open_error(error));
    xdi_publish *p = (xdi_publish *)xd_allocate(ctx, sizeof *p + 2 * length + 1 + XDI_PUBLISH_ROOM);
    XD_REQUIRE(ctx, p, XD_ERROR_MEMORY, "%s: no room for a file object", path);
    p->ctx = ctx;
    p->process = xdi_process();
    p->path = (char *)(p + 1);
    p->temporary = p->path + length + 1;
    memcpy(p->path, path, length + 1);
    error = xdi_publish_open(p, locked);
    if (error != 0) xd_release(ctx, p);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: create beside it: %s", path, strerror(error));
    *out = p;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_publish_create(xd_ctx *ctx, const char *path, xdi_publish **out) {
    return xdi_publish_start(ctx, path, true, out);
}

XD_PRIVATE const char *xdi_publish_path(const xdi_publish *p) {
    return p->temporary;
}

XD_PRIVATE xd_result xdi_publish_join(xd_ctx *ctx, const char *path, xdi_publish **out) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    XD_REQUIRE(ctx, files->write, XD_ERROR_UNSUPPORTED, "%s: the files of this context offer no write", path);
    const size_t length = strlen(path);
    xdi_publish *p = (xdi_publish *)xd_allocate(ctx, sizeof *p + length + 1);
    XD_REQUIRE(ctx, p, XD_ERROR_MEMORY, "%s: no room for a file object", path);
    p->ctx = ctx;
    p->path = p->temporary = (char *)(p + 1);
    memcpy(p->path, path, length + 1);
    const int error = files->open(files->user, path, XD_FILE_EXISTING, &p->file);
    p->open = p->joined = error == 0;
    if (error != 0) xd_release(ctx, p);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: open: %s", path, xdi_open_error(error));
    *out = p;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_publish_write(xdi_publish *p, const void *data, size_t bytes, uint64_t offset) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const int error = bytes ? files->write(files->user, p->file, data, bytes, offset) : 0;
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: write of %llu bytes at %llu: %s", p->path,
               (unsigned long long)bytes, (unsigned long long)offset, strerror(error));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_publish_write_direct(xdi_publish *p, const void *data, size_t bytes, uint64_t offset,
                                              int *reason) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    int why = ENOSYS;
    const int error = files->write_direct
                          ? files->write_direct(files->user, p->file, data, bytes, offset, &why)
                          : files->write(files->user, p->file, data, bytes, offset);
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: direct write of %llu bytes at %llu: %s", p->path,
               (unsigned long long)bytes, (unsigned long long)offset, strerror(error));
    if (reason) *reason = why;
    return XD_OK;
}

/* A file that grows needs room, which its new length does not take yet. Not knowing is no reason to refuse. */
static xd_result xdi_publish_check_space(xdi_publish *p, uint64_t bytes) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    uint64_t size = 0, room = 0;
    if (!files->free_space || files->size(files->user, p->file, &size) != 0 || bytes <= size) return XD_OK;
    if (files->free_space(files->user, p->temporary, &room) != 0) return XD_OK;
    XD_REQUIRE(p->ctx, bytes - size <= room, XD_ERROR_IO, "%s: %llu bytes more are needed, %llu are free",
               p->path, (unsigned long long)(bytes - size), (unsigned long long)room);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_publish_resize(xdi_publish *p, uint64_t bytes) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    XD_REQUIRE(p->ctx, files->resize, XD_ERROR_UNSUPPORTED, "%s: the files of this context offer no resize",
               p->path);
    XD_TRY(xdi_publish_check_space(p, bytes));
    const int error = files->resize(files->user, p->file, bytes);
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: resize to %llu bytes: %s", p->path,
               (unsigned long long)bytes, strerror(error));
    return XD_OK;
}

/* FUSE, CIFS and others know no sync of a directory; files are synced by themselves. */
XD_PRIVATE int xdi_directory_sync(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const int error = files->sync_directory ? files->sync_directory(files->user, path) : 0;
    if (error != EINVAL && error != ENOTSUP && error != EOPNOTSUPP) return error;
    xdi_ctx_tell_of_syncs(ctx, path, error);
    return 0;
}

XD_PRIVATE int xdi_directory_make_all(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const size_t length = strlen(path);
    int error = files->make_directory(files->user, path);
    char *part = error == ENOENT ? (char *)xd_allocate(ctx, length + 1) : NULL;
    for (size_t i = 1; part && i <= length; i++) {
        if ((path[i] != '/' && path[i]) || path[i - 1] == '/') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        error = files->make_directory(files->user, part);
        if (error != 0) break;
    }
    xd_release(ctx, part);
    return error;
}

XD_PRIVATE xd_result xdi_publish_sync_folder(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    if (!files->sync_directory) return XD_OK;
    char *folder = (char *)xd_allocate(ctx, strlen(path) + 2);
    XD_REQUIRE(ctx, folder, XD_ERROR_MEMORY, "%s: no room for the name of its directory", path);
    xdi_path_folder(path, folder);
    const int error = xdi_directory_sync(ctx, folder);
    xd_release(ctx, folder);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: sync of the directory: %s", path, strerror(error));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_publish_close(xdi_publish *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    int error = files->sync ? files->sync(files->user, p->file) : 0;
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: sync: %s", p->path, strerror(error));
    error = files->close(files->user, p->file);
    p->open = false;
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: close: %s", p->path, strerror(error));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_publish_rename(xdi_publish *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const int error = files->rename(files->user, p->temporary, p->path);
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: rename: %s", p->path, strerror(error));
    p->renamed = true; /* nothing to remove */
    return XD_OK;
}

XD_PRIVATE bool xdi_publish_is_waiting(const xdi_publish *p) {
    return xdi_file_probe(p->ctx, p->temporary) == 0;
}

XD_PRIVATE xd_result xdi_publish_commit(xdi_publish *p) {
    xd_result result = xdi_publish_close(p);
    if (result == XD_OK && !p->joined) result = xdi_publish_rename(p);
    if (result == XD_OK && !p->joined) result = xdi_publish_sync_folder(p->ctx, p->path);
    xdi_publish_abort(p);
    return result;
}

XD_PRIVATE void xdi_publish_abort(xdi_publish *p) {
    if (!p) return;
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    if (p->open) files->close(files->user, p->file);
    const bool here = !p->renamed && !p->joined && !xdi_is_forked(p->process);
    if (here && files->remove) files->remove(files->user, p->temporary);
    if (p->locked) files->close(files->user, p->held);
    xd_release(p->ctx, p);
}
