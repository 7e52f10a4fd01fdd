/* What writers that died have left: told by locks that only the living hold. */

#include "base/extend.h"
#include "base/internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

XD_PRIVATE void xdi_path_folder(const char *path, char *folder) {
    const char *slash = strrchr(path, '/');
    const size_t length = slash ? (size_t)(slash - path) : 0;
    memcpy(folder, path, length);
    folder[length] = '\0';
    if (length == 0) strcpy(folder, slash ? "/" : ".");
}

XD_PRIVATE bool xdi_abandoned_remove(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    intptr_t file, held;
    bool removed = false;
    if (!files->remove || files->open(files->user, path, XD_FILE_EXISTING, &file) != 0) return false;
    const int error = files->lock ? files->lock(files->user, path, file, &held) : ENOSYS;
    if (error == 0) {
        removed = files->remove(files->user, path) == 0;
        files->close(files->user, held);
    } else if (error != EWOULDBLOCK && error != ESTALE) {
        xdi_ctx_warn_of_locks(ctx, path, error);
    }
    files->close(files->user, file); /* nothing was written */
    return removed;
}

typedef struct xdi_abandoned {
    xd_ctx *ctx;
    char *path;       /* the start of every name meant; digits are added */
    const char *base; /* its last part */
    size_t length;
} xdi_abandoned;

enum { XDI_ABANDONED_DIGITS = 12 };

static void xdi_abandoned_each(void *argument, const char *name) {
    xdi_abandoned *a = (xdi_abandoned *)argument;
    const size_t base = strlen(a->base);
    if (strncmp(name, a->base, base) != 0) return;
    const size_t digits = strlen(name + base);
    if (digits == 0 || digits >= XDI_ABANDONED_DIGITS || strspn(name + base, "0123456789") != digits) return;
    memcpy(a->path + a->length, name + base, digits + 1);
    (void)xdi_abandoned_remove(a->ctx, a->path);
    a->path[a->length] = '\0';
}

XD_PRIVATE void xdi_abandoned_sweep(xd_ctx *ctx, const char *path, const char *suffix) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const size_t length = strlen(path) + strlen(suffix), room = length + XDI_ABANDONED_DIGITS + 1;
    char *memory = files->list ? (char *)xd_allocate(ctx, room + length + 2) : NULL;
    if (!memory) return; /* what stays does no harm but take its room */
    xdi_abandoned a;
    a.ctx = ctx;
    a.path = memory;
    a.length = length;
    snprintf(a.path, room, "%s%s", path, suffix);
    const char *slash = strrchr(a.path, '/');
    char *folder = memory + room;
    a.base = slash ? slash + 1 : a.path;
    xdi_path_folder(path, folder);
    (void)files->list(files->user, folder, xdi_abandoned_each, &a);
    xd_release(ctx, memory);
}

/* Opens the lock's file, made where there is none, and takes the lock. ESTALE: its last holder removed it meanwhile. */
static int xdi_lock_try(xd_ctx *ctx, xdi_lock *lock, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    int error = files->open(files->user, path, XD_FILE_NEW, &lock->file);
    if (error == EEXIST) {
        error = files->open(files->user, path, XD_FILE_EXISTING, &lock->file);
        if (error == ENOENT) return ESTALE;
    }
    if (error != 0) return error;
    error = files->lock(files->user, path, lock->file, &lock->held);
    lock->process = xdi_process();
    if (error == 0)
        lock->taken = true;
    else
        files->close(files->user, lock->file);
    if (error == 0 || error == EWOULDBLOCK || error == ESTALE) return error;
    xdi_ctx_warn_of_locks(ctx, path, error);
    if (files->remove) files->remove(files->user, path);
    return 0;
}

XD_PRIVATE xd_result xdi_lock_take(xd_ctx *ctx, const char *path, xdi_lock *lock) {
    enum { TRIES = 100 };
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    lock->taken = false;
    if (!files->lock || !files->remove) return XD_OK;
    int error = ESTALE;
    for (int i = 0; i < TRIES && error == ESTALE; i++) error = xdi_lock_try(ctx, lock, path);
    XD_REQUIRE(ctx, error != EWOULDBLOCK, XD_ERROR_STATE, "%s: another writer holds this lock", path);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: open: %s", path, xdi_open_error(error));
    return XD_OK;
}

XD_PRIVATE void xdi_lock_drop(xd_ctx *ctx, const char *path, xdi_lock *lock) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    if (!lock->taken) return;
    lock->taken = false;
    /* Before the lock ends: a writer that takes it later finds that the name is gone. */
    if (!xdi_is_forked(lock->process)) files->remove(files->user, path);
    files->close(files->user, lock->held);
    files->close(files->user, lock->file);
}
