/* folders.c - over the file functions of the context, so that it works wherever the library does. */
#include "folders.h"

#include <stdio.h>
#include <string.h>

xd_result folders_make(xd_ctx *ctx, const char *directory) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    char part[512];
    const int length = snprintf(part, sizeof part, "%s", directory);
    XD_REQUIRE(ctx, length > 0 && length < (int)sizeof part, XD_ERROR_ARGUMENT,
               "a folder's name of %d bytes: 1 to %d are possible", length, (int)sizeof part - 1);
    for (char *end = part + 1;; end++) {
        if (*end != '/' && *end != 0) continue;
        const char was = *end;
        *end = 0;
        const int error = files->make_directory(files->user, part);
        XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "cannot make the directory %s: %s", part, strerror(error));
        *end = was;
        if (was == 0) return XD_OK;
    }
}

/* What is removed, and from where. */
typedef struct folders_removal {
    const xd_files *files;
    const char *directory;
    char failed[1024]; /* the first that could not be */
} folders_removal;

static void folders_fail(folders_removal *removal, const char *path) {
    if (!removal->failed[0]) snprintf(removal->failed, sizeof removal->failed, "%s", path);
}

static void folders_remove_file(void *argument, const char *name) {
    folders_removal *removal = (folders_removal *)argument;
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", removal->directory, name);
    if (removal->files->remove(removal->files->user, path) != 0) folders_fail(removal, path);
}

/* A checkpoint has no folders inside. */
static void folders_remove_checkpoint(void *argument, const char *name) {
    folders_removal *removal = (folders_removal *)argument;
    folders_removal inside = { removal->files, NULL, "" };
    char path[1024];
    if (strncmp(name, "step-", 5) != 0) return;
    snprintf(path, sizeof path, "%s/%s", removal->directory, name);
    inside.directory = path;
    (void)inside.files->list(inside.files->user, path, folders_remove_file, &inside);
    if (inside.failed[0]) folders_fail(removal, inside.failed);
    if (inside.files->remove_directory(inside.files->user, path) != 0) folders_fail(removal, path);
}

xd_result folders_forget_checkpoints(xd_ctx *ctx, const char *directory) {
    folders_removal removal = { &xd_ctx_settings(ctx)->files, directory, "" };
    const int error =
        removal.files->list(removal.files->user, directory, folders_remove_checkpoint, &removal);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "cannot read the directory %s: %s", directory, strerror(error));
    XD_REQUIRE(ctx, !removal.failed[0], XD_ERROR_IO, "cannot remove %s", removal.failed);
    return XD_OK;
}
