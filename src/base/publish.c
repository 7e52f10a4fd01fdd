/* A file that appears under its name only when it is complete. */

#include "base/extend.h"
#include "base/publish.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct xd_publish {
    xd_ctx *ctx;
    intptr_t file;
    bool open;
    char *temporary; /* both names follow the struct in the same allocation */
    char *path;
};

enum { XDI_PUBLISH_SUFFIX = 24, XDI_PUBLISH_TRIES = 1000 };

XD_API xd_result xd_file_load(xd_ctx *ctx, const char *path, size_t max_bytes, char **data, size_t *bytes) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const size_t limit = max_bytes ? max_bytes : (size_t)256 << 20;
    intptr_t file;
    uint64_t size = 0;
    const int refused = files->open(files->user, path, XD_FILE_READ, &file);
    XD_REQUIRE(ctx, refused == 0, XD_ERROR_IO, "%s: open: %s", path, strerror(refused));
    int error = files->size(files->user, file, &size);
    const bool fits = error == 0 && size <= limit && size < SIZE_MAX;
    char *text = fits ? (char *)xd_allocate(ctx, (size_t)size + 1) : NULL;
    if (text) error = files->read(files->user, file, text, (size_t)size, 0);
    files->close(files->user, file); /* nothing was written: a failure loses nothing */
    if (text && error == 0) {
        *data = text;
        *bytes = (size_t)size;
        return XD_OK;
    }
    xd_release(ctx, text);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: read: %s", path, strerror(error));
    XD_REQUIRE(ctx, fits, XD_ERROR_FORMAT, "%s has %llu bytes, allowed are %llu", path,
               (unsigned long long)size, (unsigned long long)limit);
    return XD_FAIL(ctx, XD_ERROR_MEMORY, "%s: no room for %llu bytes", path, (unsigned long long)size);
}

XD_API xd_result xd_file_save(xd_ctx *ctx, const char *path, const void *data, size_t bytes) {
    xd_publish *file = NULL;
    XD_TRY(xd_publish_create(ctx, path, &file));
    const xd_result result = xd_publish_write(file, data, bytes, 0);
    if (result == XD_OK) return xd_publish_commit(file);
    xd_publish_abort(file);
    return result;
}

/* Creates the temporary file: the first free name of path.tmp-0, path.tmp-1, ... A crash may have left some. */
static int xdi_publish_open(xd_publish *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const size_t length = strlen(p->path);
    int error = EEXIST;
    memcpy(p->temporary, p->path, length);
    for (int i = 0; i < XDI_PUBLISH_TRIES && error == EEXIST; i++) {
        snprintf(p->temporary + length, XDI_PUBLISH_SUFFIX, ".tmp-%d", i);
        error = files->open(files->user, p->temporary, XD_FILE_NEW, &p->file);
    }
    p->open = error == 0;
    return error;
}

XD_API xd_result xd_publish_create(xd_ctx *ctx, const char *path, xd_publish **out) {
    const size_t length = strlen(path);
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    XD_REQUIRE(ctx, length > 0, XD_ERROR_ARGUMENT, "the path is empty");
    XD_REQUIRE(ctx, files->write && files->rename, XD_ERROR_UNSUPPORTED,
               "%s: the files of this context offer no %s", path, files->write ? "rename" : "write");
    xd_publish *p = (xd_publish *)xd_allocate(ctx, sizeof *p + 2 * length + 1 + XDI_PUBLISH_SUFFIX);
    XD_REQUIRE(ctx, p, XD_ERROR_MEMORY, "%s: no room for a file object", path);
    p->ctx = ctx;
    p->path = (char *)(p + 1);
    p->temporary = p->path + length + 1;
    memcpy(p->path, path, length + 1);
    const int error = xdi_publish_open(p);
    if (error == 0) {
        *out = p;
        return XD_OK;
    }
    xd_release(ctx, p);
    return XD_FAIL(ctx, XD_ERROR_IO, "%s: create beside it: %s", path, strerror(error));
}

XD_API xd_result xd_publish_write(xd_publish *p, const void *data, size_t bytes, uint64_t offset) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const int error = bytes ? files->write(files->user, p->file, data, bytes, offset) : 0;
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: write of %llu bytes at %llu: %s", p->path,
               (unsigned long long)bytes, (unsigned long long)offset, strerror(error));
    return XD_OK;
}

XD_API xd_result xd_publish_resize(xd_publish *p, uint64_t bytes) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    XD_REQUIRE(p->ctx, files->resize, XD_ERROR_UNSUPPORTED, "%s: the files of this context offer no resize",
               p->path);
    const int error = files->resize(files->user, p->file, bytes);
    XD_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: resize to %llu bytes: %s", p->path,
               (unsigned long long)bytes, strerror(error));
    return XD_OK;
}

/* Syncs the directory of the published file, the current one for a path without a separator. */
static int xdi_publish_sync_directory(xd_publish *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    char *slash = strrchr(p->path, '/');
    if (!files->sync_directory) return 0;
    if (!slash) return files->sync_directory(files->user, ".");
    if (slash == p->path) return files->sync_directory(files->user, "/");
    *slash = '\0';
    const int error = files->sync_directory(files->user, p->path);
    *slash = '/';
    return error;
}

XD_API xd_result xd_publish_commit(xd_publish *p) {
    xd_ctx *ctx = p->ctx;
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const char *step = "sync";
    int error = files->sync ? files->sync(files->user, p->file) : 0;
    if (error == 0) {
        step = "close";
        error = files->close(files->user, p->file);
        p->open = false;
    }
    if (error == 0) {
        step = "rename";
        error = files->rename(files->user, p->temporary, p->path);
    }
    if (error == 0) {
        step = "sync of the directory";
        error = xdi_publish_sync_directory(p);
        p->temporary[0] = '\0'; /* renamed: nothing to remove */
    }
    const xd_result result =
        error == 0 ? XD_OK : XD_FAIL(ctx, XD_ERROR_IO, "%s: %s: %s", p->path, step, strerror(error));
    xd_publish_abort(p);
    return result;
}

XD_API void xd_publish_abort(xd_publish *p) {
    if (!p) return;
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    if (p->open) files->close(files->user, p->file);
    if (p->temporary[0] && files->remove) files->remove(files->user, p->temporary);
    xd_release(p->ctx, p);
}
