/* A directory that appears under its name when all of its files are there. */

#include "base/directory.h"
#include "base/extend.h"
#include "base/internal.h"
#include "base/publish_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { XDI_DIRECTORY_ROOM = 32, XDI_DIRECTORY_TRIES = 1000, XDI_TREE_DEPTH = 16, XDI_TREE_NAME = 1024 };

struct xd_publish_directory {
    xd_ctx *ctx;
    char *path, *temporary, *old, *lock_path; /* after the struct in the same allocation */
    xdi_lock lock;
    int64_t process; /* whose directory it is: one that is forked from it removes nothing */
    bool made, renamed;
};

/* ---- removing ---- */

typedef struct xdi_tree {
    const xd_files *files;
    char *path;
    size_t length, room;
    int depth, error;
} xdi_tree;

static void xdi_tree_remove(xdi_tree *t);

static void xdi_tree_each(void *argument, const char *name) {
    xdi_tree *t = (xdi_tree *)argument;
    const size_t length = t->length, more = strlen(name) + 1;
    if (length + more >= t->room) {
        t->error = ENAMETOOLONG;
        return;
    }
    snprintf(t->path + length, t->room - length, "/%s", name);
    t->length += more;
    t->depth++;
    xdi_tree_remove(t);
    t->depth--;
    t->length = length;
    t->path[length] = '\0';
}

/* An empty directory, or whatever else has the name. */
static int xdi_tree_remove_one(const xdi_tree *t) {
    const xd_files *files = t->files;
    const int error = files->remove_directory ? files->remove_directory(files->user, t->path) : ENOTDIR;
    return error == ENOTDIR ? files->remove(files->user, t->path) : error;
}

/* Looks into a directory only when its removal says that it is one with names in it: never through a symbolic link. */
static void xdi_tree_remove(xdi_tree *t) {
    int error = xdi_tree_remove_one(t);
    if ((error == ENOTEMPTY || error == EEXIST) && t->files->list && t->depth < XDI_TREE_DEPTH) {
        error = t->files->list(t->files->user, t->path, xdi_tree_each, t);
        if (error == 0) error = xdi_tree_remove_one(t);
    }
    if (error != 0 && error != ENOENT && t->error == 0) t->error = error;
}

XD_PRIVATE int xdi_directory_remove(xd_ctx *ctx, const char *path) {
    xdi_tree t;
    memset(&t, 0, sizeof t);
    t.files = &xd_ctx_settings(ctx)->files;
    if (!t.files->remove) return ENOSYS;
    t.length = strlen(path);
    t.room = t.length + XDI_TREE_DEPTH * XDI_TREE_NAME;
    t.path = (char *)xd_allocate(ctx, t.room);
    if (!t.path) return ENOMEM;
    memcpy(t.path, path, t.length);
    xdi_tree_remove(&t);
    xd_release(ctx, t.path);
    return t.error;
}

/* ---- writing ---- */

static int xdi_directory_rename(const xd_publish_directory *d, const char *from, const char *to) {
    const xd_files *files = &xd_ctx_settings(d->ctx)->files;
    return files->rename(files->user, from, to);
}

/* What an earlier writer left: its old directory is the one to have when it died between two renames. */
static xd_result xdi_directory_recover(xd_publish_directory *d) {
    const bool there = xdi_file_probe(d->ctx, d->path) == EISDIR;
    int error = 0;
    if (xdi_file_probe(d->ctx, d->old) == EISDIR)
        error = there ? xdi_directory_remove(d->ctx, d->old) : xdi_directory_rename(d, d->old, d->path);
    XD_REQUIRE(d->ctx, error == 0, XD_ERROR_IO, "%s: %s: %s", d->old, there ? "remove" : "rename",
               strerror(error));
    return XD_OK;
}

/* Makes the temporary directory; without a lock, those of others stay. */
static xd_result xdi_directory_make(xd_publish_directory *d) {
    const xd_files *files = &xd_ctx_settings(d->ctx)->files;
    int error = EISDIR;
    for (int i = 0; i < XDI_DIRECTORY_TRIES && error == EISDIR; i++) {
        snprintf(d->temporary + strlen(d->path), XDI_DIRECTORY_ROOM, ".tmp-%d", i);
        if (d->lock.taken) (void)xdi_directory_remove(d->ctx, d->temporary);
        error = xdi_file_probe(d->ctx, d->temporary);
    }
    XD_REQUIRE(d->ctx, error == ENOENT, XD_ERROR_IO, "%s: make: %s", d->temporary, strerror(error));
    error = files->make_directory(files->user, d->temporary);
    XD_REQUIRE(d->ctx, error == 0, XD_ERROR_IO, "%s: make: %s", d->temporary, strerror(error));
    d->made = true;
    return XD_OK;
}

static xd_result xdi_directory_start(xd_publish_directory *d) {
    const xd_files *files = &xd_ctx_settings(d->ctx)->files;
    XD_REQUIRE(d->ctx, files->make_directory && files->rename, XD_ERROR_UNSUPPORTED,
               "%s: the files of this context offer no %s", d->path,
               files->rename ? "make_directory" : "rename");
    int error = files->replaceable ? files->replaceable(files->user, d->path) : EISDIR;
    if (error == 0 && xdi_file_probe(d->ctx, d->path) != ENOENT) error = ENOTDIR;
    XD_REQUIRE(d->ctx, error == 0 || error == EISDIR, XD_ERROR_IO, "%s: replace: %s", d->path,
               xdi_open_error(error));
    XD_TRY(xdi_lock_take(d->ctx, d->lock_path, &d->lock));
    XD_TRY(xdi_directory_recover(d));
    return xdi_directory_make(d);
}

XD_API xd_result xd_publish_directory_create(xd_ctx *ctx, const xd_publish_directory_desc *desc,
                                             xd_publish_directory **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN(ctx, desc->path);
    const char *path = desc->path;
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') length--;
    const size_t room = length + XDI_DIRECTORY_ROOM;
    XD_REQUIRE(ctx, length > 0 && strcmp(path, "/") != 0 && strcmp(path, ".") != 0, XD_ERROR_ARGUMENT,
               "\"%s\" is no directory that could be replaced", path);
    xd_publish_directory *d = XDI_OBJECT(xd_publish_directory, ctx, sizeof *d + 4 * room);
    XD_REQUIRE(ctx, d, XD_ERROR_MEMORY, "%s: no room for a directory object", path);
    d->ctx = ctx;
    d->process = xdi_process();
    d->path = (char *)(d + 1);
    d->temporary = d->path + room;
    d->old = d->temporary + room;
    d->lock_path = d->old + room;
    memcpy(d->path, path, length);
    memcpy(d->temporary, path, length);
    memcpy(d->old, path, length);
    strcpy(d->old + length, XDI_DIRECTORY_OLD);
    memcpy(d->lock_path, path, length);
    strcpy(d->lock_path + length, ".lock");
    const xd_result result = xdi_directory_start(d);
    if (result == XD_OK)
        *out = d;
    else
        xd_publish_directory_abort(d);
    return result;
}

XD_API const char *xd_publish_directory_path(const xd_publish_directory *d) {
    XD_ASSERT(d);
    return d->temporary;
}

/* Where names cannot be exchanged: the older directory goes aside first, and openers look for it there. */
static xd_result xdi_directory_put_aside(xd_publish_directory *d) {
    int error = xdi_directory_rename(d, d->path, d->old);
    XD_REQUIRE(d->ctx, error == 0, XD_ERROR_IO, "%s: rename to %s: %s", d->path, d->old, strerror(error));
    xd_result result = xdi_publish_sync_folder(d->ctx, d->path);
    error = result == XD_OK ? xdi_directory_rename(d, d->temporary, d->path) : 0;
    if (error != 0)
        result = XD_FAIL(d->ctx, XD_ERROR_IO, "%s: rename to %s: %s", d->temporary, d->path, strerror(error));
    if (result != XD_OK)
        (void)xdi_directory_rename(d, d->old, d->path);
    else
        d->renamed = true;
    return result;
}

static xd_result xdi_directory_switch(xd_publish_directory *d, const char **older) {
    const xd_files *files = &xd_ctx_settings(d->ctx)->files;
    int error = xdi_directory_sync(d->ctx, d->temporary);
    XD_REQUIRE(d->ctx, error == 0, XD_ERROR_IO, "%s: sync: %s", d->temporary, strerror(error));
    if (xdi_file_probe(d->ctx, d->path) == ENOENT) {
        error = xdi_directory_rename(d, d->temporary, d->path);
        XD_REQUIRE(d->ctx, error == 0, XD_ERROR_IO, "%s: rename: %s", d->path, strerror(error));
        d->renamed = true;
    } else if (files->exchange && files->exchange(files->user, d->temporary, d->path) == 0) {
        d->renamed = true;
        *older = d->temporary;
    } else {
        XD_TRY(xdi_directory_put_aside(d));
        *older = d->old;
    }
    return xdi_publish_sync_folder(d->ctx, d->path);
}

XD_API xd_result xd_publish_directory_commit(xd_publish_directory *d) {
    XDI_LIVE(xd_publish_directory, d);
    XDI_CALL(d ? d->ctx : NULL);
    const char *older = NULL;
    xd_result result = XDI_CHECK_GIVEN(d ? d->ctx : NULL, d);
    if (result != XD_OK) {
        xd_publish_directory_abort(d);
        return result;
    }
    result = xdi_directory_switch(d, &older);
    const int error = result == XD_OK && older ? xdi_directory_remove(d->ctx, older) : 0;
    if (error != 0)
        result = XD_FAIL(d->ctx, XD_ERROR_IO, "%s: the new directory is complete, but %s stays: %s", d->path,
                         older, strerror(error));
    else if (result != XD_OK && d->renamed) /* the last sync has failed */
        result = XD_FAIL(d->ctx, result, "the new directory is complete, but may be lost with the power: %s",
                         xd_last_error(d->ctx)->message);
    xd_publish_directory_abort(d);
    return result;
}

XD_API void xd_publish_directory_abort(xd_publish_directory *d) {
    if (!d || XDI_IS_GONE(xd_publish_directory, d)) return;
    if (d->made && !d->renamed && !xdi_is_forked(d->process))
        (void)xdi_directory_remove(d->ctx, d->temporary);
    xdi_lock_drop(d->ctx, d->lock_path, &d->lock);
    xd_release(d->ctx, d);
}
