/* Checkpoints in the directory of a run: their names, the newest, and those that go. */

#include "base/directory.h"
#include "base/publish.h"
#include "checkpoint/internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define XDI_FIND_PREFIX "step-"
#define XDI_FIND_DELETED ".del-0"

/* ---- names ---- */

/* root/step-N and a suffix, in new memory. */
static char *xdi_find_path(xd_ctx *ctx, const char *root, int64_t step, const char *suffix) {
    char name[64];
    snprintf(name, sizeof name, "%s%lld%s", XDI_FIND_PREFIX, (long long)step, suffix);
    return xdi_weights_path(ctx, root, name);
}

XD_PRIVATE char *xdi_checkpoint_path(xd_ctx *ctx, const char *root, int64_t step) {
    return xdi_find_path(ctx, root, step, "");
}

XD_PRIVATE bool xdi_checkpoint_is_step(const char *name, const char *suffix, int64_t *step) {
    const size_t prefix = strlen(XDI_FIND_PREFIX);
    int64_t value = 0;
    if (strncmp(name, XDI_FIND_PREFIX, prefix) != 0) return false;
    const char *digits = name + prefix, *c = digits;
    for (; *c >= '0' && *c <= '9'; c++) {
        const int digit = *c - '0';
        if (value > (INT64_MAX - digit) / 10) return false;
        value = 10 * value + digit;
    }
    if (c == digits || (digits[0] == '0' && c > digits + 1) || strcmp(c, suffix) != 0) return false;
    *step = value;
    return true;
}

/* A name of what a save works with: step-N.lock, step-N.old-0, step-N.del-0, step-N.tmp- and a number. */
static bool xdi_find_is_leftover(const char *name, int64_t *step) {
    char known[64];
    const char *dot = strchr(name, '.');
    if (!dot || (size_t)(dot - name) >= sizeof known) return false;
    memcpy(known, name, (size_t)(dot - name));
    known[dot - name] = '\0';
    if (!xdi_checkpoint_is_step(known, "", step)) return false;
    const size_t digits = strncmp(dot, ".tmp-", 5) == 0 ? strspn(dot + 5, "0123456789") : 0;
    return strcmp(dot, ".lock") == 0 || strcmp(dot, XDI_DIRECTORY_OLD) == 0 ||
           strcmp(dot, XDI_FIND_DELETED) == 0 || (digits > 0 && dot[5 + digits] == '\0');
}

/* ---- which are checkpoints ---- */

static xd_result xdi_find_check_size(const xd_checkpoint *c, const char *directory, int64_t index) {
    const xd_files *files = &xd_ctx_settings(c->ctx)->files;
    const xd_checkpoint_file_info *f = &c->files[index];
    char *path = xdi_weights_path(c->ctx, directory, f->name);
    intptr_t file;
    uint64_t bytes = 0;
    XD_REQUIRE(c->ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", directory);
    const int refused = xdi_file_open_read(c->ctx, path, &file);
    xd_release(c->ctx, path);
    XD_REQUIRE(c->ctx, refused == 0, refused == ENOENT ? XD_ERROR_MISSING : XD_ERROR_IO, "%s/%s: open: %s",
               directory, f->name, xdi_open_error(refused));
    const int error = files->size(files->user, file, &bytes);
    files->close(files->user, file);
    XD_REQUIRE(c->ctx, error == 0, XD_ERROR_IO, "%s/%s: size: %s", directory, f->name, strerror(error));
    XD_REQUIRE(c->ctx, bytes == f->bytes, XD_ERROR_CORRUPT, "%s/%s has %llu bytes, the manifest says %llu",
               directory, f->name, (unsigned long long)bytes, (unsigned long long)f->bytes);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_checkpoint_open_whole(xd_ctx *ctx, const char *directory, xd_checkpoint **out) {
    xd_checkpoint *c = NULL;
    XD_TRY(xdi_checkpoint_open_directory(ctx, directory, &c));
    xd_result result = XD_OK;
    for (int64_t i = 0; i < c->info.file_count && result == XD_OK; i++)
        result = xdi_find_check_size(c, directory, i);
    if (result == XD_OK)
        *out = c;
    else
        xd_checkpoint_close(c);
    return result;
}

/* Whether a step is a checkpoint. Only what says nothing about it is an error: no memory. */
static xd_result xdi_find_is_valid(xd_ctx *ctx, const char *root, int64_t step, bool *valid) {
    char *path = xdi_checkpoint_path(ctx, root, step);
    xd_checkpoint *c = NULL;
    XD_REQUIRE(ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", root);
    const xd_result result = xdi_checkpoint_open_whole(ctx, path, &c);
    xd_release(ctx, path);
    *valid = result == XD_OK && xd_checkpoint_describe(c).step == step;
    xd_checkpoint_close(c);
    return result == XD_ERROR_MEMORY ? result : XD_OK;
}

static void xdi_find_sift(int64_t *steps, int64_t at, int64_t count) {
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && steps[child + 1] < steps[child]) child++;
        if (steps[at] <= steps[child]) return;
        const int64_t swap = steps[at];
        steps[at] = steps[child];
        steps[child] = swap;
    }
}

/* Highest first. */
static void xdi_find_sort(int64_t *steps, int64_t count) {
    for (int64_t i = count / 2; i-- > 0;) xdi_find_sift(steps, i, count);
    for (int64_t left = count; left-- > 1;) {
        const int64_t swap = steps[0];
        steps[0] = steps[left];
        steps[left] = swap;
        xdi_find_sift(steps, 0, left);
    }
}

/* The steps of which root has a directory, highest first, in new memory; also of one that a save has put aside, and that opens
 * under its own name. */
static xd_result xdi_find_steps(xd_ctx *ctx, const char *root, int64_t **steps, int64_t *count) {
    const char **names = NULL;
    int64_t name_count = 0, n = 0, kept = 0;
    XD_TRY(xd_file_list(ctx, root, &names, &name_count));
    int64_t *found = (int64_t *)xd_allocate(ctx, (size_t)name_count * sizeof *found);
    for (int64_t i = 0; i < name_count && found; i++)
        if (xdi_checkpoint_is_step(names[i], "", &found[n]) ||
            xdi_checkpoint_is_step(names[i], XDI_DIRECTORY_OLD, &found[n]))
            n++;
    xd_release(ctx, (void *)names);
    XD_REQUIRE(ctx, found, XD_ERROR_MEMORY, "%s: no room for %lld steps", root, (long long)name_count);
    xdi_find_sort(found, n);
    for (int64_t i = 0; i < n; i++)
        if (kept == 0 || found[kept - 1] != found[i]) found[kept++] = found[i];
    *steps = found;
    *count = kept;
    return XD_OK;
}

/* Whether a step has a manifest. */
static bool xdi_find_has_manifest(xd_ctx *ctx, const char *root, int64_t step) {
    char *directory = xdi_checkpoint_path(ctx, root, step);
    char *path = directory ? xdi_weights_path(ctx, directory, XDI_MANIFEST_FILE) : NULL;
    const bool has = path && xdi_file_probe(ctx, path) == 0;
    xd_release(ctx, path);
    xd_release(ctx, directory);
    return has;
}

XD_PRIVATE xd_result xdi_checkpoint_list_steps(xd_ctx *ctx, const char *root, char *text, size_t size) {
    enum { SHOWN = 5 };
    int64_t *steps = NULL, count = 0, found = 0;
    size_t used = 0;
    text[0] = '\0';
    if (!xd_ctx_settings(ctx)->files.list) return XD_OK;
    if (xdi_file_probe(ctx, root) == ENOENT) {
        snprintf(text, size, "; there is no directory \"%.120s\"", root);
        return XD_OK;
    }
    XD_TRY(xdi_find_steps(ctx, root, &steps, &count));
    for (int64_t i = 0; i < count && used < size; i++) {
        if (found > SHOWN || !xdi_find_has_manifest(ctx, root, steps[i])) continue;
        if (found++ == SHOWN)
            used += (size_t)snprintf(text + used, size - used, " and more");
        else
            used += (size_t)snprintf(text + used, size - used, "%s %lld",
                                     found > 1 ? "," : "; there are steps", (long long)steps[i]);
    }
    if (found == 0) snprintf(text, size, "; there is no other step");
    xd_release(ctx, steps);
    return XD_OK;
}

XD_API xd_result xd_checkpoint_find(xd_ctx *ctx, const char *root, int64_t *step) {
    XDI_GIVEN(ctx, ctx, root, step);
    int64_t *steps = NULL, count = 0, i = 0;
    bool valid = false;
    XD_REQUIRE(ctx, xdi_file_probe(ctx, root) != ENOENT, XD_ERROR_MISSING, "%s: there is no such directory",
               root);
    XD_TRY(xdi_find_steps(ctx, root, &steps, &count));
    xd_result result = XD_OK;
    for (; i < count && !valid && result == XD_OK; i++)
        result = xdi_find_is_valid(ctx, root, steps[i], &valid);
    if (result == XD_OK && !valid)
        result = XD_FAIL(ctx, XD_ERROR_MISSING, "%s: none of %lld directories of steps is a checkpoint", root,
                         (long long)count);
    if (result == XD_OK) *step = steps[i - 1];
    xd_release(ctx, steps);
    return result;
}

/* ---- which go ---- */

/* Removes a directory under another name, so that nobody takes the rest of it for a checkpoint. */
static xd_result xdi_find_delete(xd_ctx *ctx, const char *root, int64_t step) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    char *path = xdi_checkpoint_path(ctx, root, step),
         *gone = xdi_find_path(ctx, root, step, XDI_FIND_DELETED);
    int error = path && gone ? files->rename(files->user, path, gone) : ENOMEM;
    if (error == 0) error = xdi_directory_remove(ctx, gone);
    xd_release(ctx, path);
    xd_release(ctx, gone);
    XD_REQUIRE(ctx, error == 0, error == ENOMEM ? XD_ERROR_MEMORY : XD_ERROR_IO, "%s/%s%lld: remove: %s",
               root, XDI_FIND_PREFIX, (long long)step, strerror(error));
    return XD_OK;
}

/* What is no checkpoint is not counted and stays: whoever made it knows what it is for. */
XD_PRIVATE xd_result xdi_checkpoint_prune(xd_ctx *ctx, const char *root, int64_t saved, int keep) {
    int64_t *steps = NULL, count = 0;
    int kept = 1; /* the one just saved, which may have a lower step than others */
    xd_result result = XD_OK;
    if (keep == 0) return XD_OK;
    XD_TRY(xdi_find_steps(ctx, root, &steps, &count));
    for (int64_t i = 0; i < count && result == XD_OK; i++) {
        bool valid = false;
        if (steps[i] != saved) result = xdi_find_is_valid(ctx, root, steps[i], &valid);
        if (result == XD_OK && valid && kept++ >= keep) result = xdi_find_delete(ctx, root, steps[i]);
    }
    xd_release(ctx, steps);
    return result;
}

/* A writer of the directory begins by putting things in order; this one does nothing else. A directory that another program is
 * writing stays. */
static xd_result xdi_find_recover(xd_ctx *ctx, const char *root, int64_t step) {
    char *path = xdi_checkpoint_path(ctx, root, step),
         *gone = xdi_find_path(ctx, root, step, XDI_FIND_DELETED);
    xd_publish_directory *d = NULL;
    xd_result result = XD_OK;
    int error = path && gone ? xdi_directory_remove(ctx, gone) : 0;
    if (!path || !gone)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "%s: no room for a path", root);
    else if (error != 0)
        result = XD_FAIL(ctx, error == ENOMEM ? XD_ERROR_MEMORY : XD_ERROR_IO, "%s: remove: %s", gone,
                         strerror(error));
    else {
        const xd_publish_directory_desc directory = { path };
        result = xd_publish_directory_create(ctx, &directory, &d);
    }
    xd_publish_directory_abort(d);
    xd_release(ctx, path);
    xd_release(ctx, gone);
    return result == XD_ERROR_STATE ? XD_OK : result;
}

XD_PRIVATE xd_result xdi_checkpoint_sweep(xd_ctx *ctx, const char *root) {
    const char **names = NULL;
    int64_t count = 0, step, last = -1;
    if (!xd_ctx_settings(ctx)->files.list) return XD_OK;
    XD_TRY(xd_file_list(ctx, root, &names, &count));
    xd_result result = XD_OK;
    for (int64_t i = 0; i < count && result == XD_OK; i++) {
        if (!xdi_find_is_leftover(names[i], &step) || step == last) continue;
        result = xdi_find_recover(ctx, root, step);
        last = step;
    }
    xd_release(ctx, (void *)names);
    return result;
}
