/* A model's directory: one file or several with an index. */

#include "base/crc.h"
#include "base/extend.h"
#include "base/json.h"
#include "base/publish.h"
#include "io/internal.h"
#include "io/weights.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct xdi_weights_files {
    xd_ctx *ctx;
    const char *directory; /* the caller's; valid while opening */
    xd_json *index;        /* NULL for a single file */
    const char **names;    /* [count], of the files, ascending; in the index's memory */
    xdi_safetensors **files;
    int64_t count;
    bool single;   /* there was a model.safetensors */
    bool lenient;  /* the index may differ from the files */
    uint32_t seen; /* checksum of the index as it was read */
};

/* directory/name in new memory; NULL when there is no room, which the caller reports. */
XD_PRIVATE char *xdi_weights_path(xd_ctx *ctx, const char *directory, const char *name) {
    const size_t bytes = strlen(directory) + 1 + strlen(name) + 1;
    char *path = (char *)xd_allocate(ctx, bytes);
    if (path) snprintf(path, bytes, "%s/%s", directory, name);
    return path;
}

/* ---- reading ---- */

XD_PRIVATE bool xdi_weights_is_basename(const char *name) {
    return *name && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strpbrk(name, "/\\:");
}

static const xd_json *xdi_weights_map(const xdi_weights_files *m) {
    return xd_json_find(m->index, "weight_map");
}

static int xdi_weights_by_name(const void *a, const void *b) {
    return strcmp((const char *)a, (const char *)b);
}

/* The distinct file names of the index, sorted, in m->names; their number becomes the count. */
static xd_result xdi_weights_collect(xdi_weights_files *m) {
    const xd_json *map = xdi_weights_map(m);
    const size_t entries = xd_json_count(map);
    size_t used = 0;
    XD_REQUIRE(m->ctx, xd_json_kind_of(map) == XD_JSON_OBJECT, XD_ERROR_FORMAT, "%s/%s has no weight_map",
               m->directory, XDI_WEIGHTS_INDEX);
    m->names = (const char **)xd_allocate(m->ctx, entries * sizeof *m->names);
    XD_REQUIRE(m->ctx, m->names, XD_ERROR_MEMORY, "no room for %llu names", (unsigned long long)entries);
    for (const xd_json *entry = xd_json_first(map); entry; entry = xd_json_next(entry)) {
        const char *name = xd_json_string(entry, NULL);
        XD_REQUIRE(m->ctx, name && xdi_weights_is_basename(name), XD_ERROR_FORMAT,
                   "%s/%s: tensor \"%.80s\" does not lie in a file of the directory", m->directory,
                   XDI_WEIGHTS_INDEX, xd_json_key(entry, NULL));
        m->names[used++] = name;
    }
    xdi_sort((const void **)m->names, used, xdi_weights_by_name);
    for (size_t i = 0; i < used; i++)
        if (m->count == 0 || strcmp(m->names[m->count - 1], m->names[i]) != 0)
            m->names[m->count++] = m->names[i];
    return XD_OK;
}

static int xdi_weights_is_named(const void *name, const void *at) {
    return strcmp((const char *)name, *(const char *const *)at);
}

static xdi_safetensors *xdi_weights_file(const xdi_weights_files *m, const char *name) {
    const int64_t at = xdi_find(name, m->names, sizeof *m->names, m->count, xdi_weights_is_named);
    return at < 0 ? NULL : m->files[at];
}

static xd_result xdi_weights_open_shard(xdi_weights_files *m, const xdi_safetensors_desc *desc, int64_t i) {
    char *path = xdi_weights_path(m->ctx, m->directory, m->names[i]);
    XD_REQUIRE(m->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", m->directory, m->names[i]);
    const xd_result result = xdi_safetensors_open(m->ctx, path, desc, &m->files[i]);
    xd_release(m->ctx, path);
    return result;
}

/* What the index and a file say differently about a tensor: an error, or with `lenient` the first of some. */
static xd_result xdi_weights_differ(const xdi_weights_files *m, int64_t *found, xd_result result,
                                    const char *text) {
    XD_REQUIRE(m->ctx, m->lenient, result, "%s", text);
    if (++*found == 1) xd_log(m->ctx, XD_LOG_WARN, "%s", text);
    return XD_OK;
}

static xd_result xdi_weights_check_entry(const xdi_weights_files *m, const xd_json *entry, int64_t *found) {
    char text[700];
    const char *name = xd_json_key(entry, NULL), *file = xd_json_string(entry, NULL);
    if (xdi_safetensors_find(xdi_weights_file(m, file), name) >= 0) return XD_OK;
    snprintf(text, sizeof text, "%.300s/%.100s holds no tensor \"%.80s\", where the index puts it",
             m->directory, file, name);
    return xdi_weights_differ(m, found, XD_ERROR_MISSING, text);
}

static xd_result xdi_weights_check_tensor(const xdi_weights_files *m, int64_t shard, const char *name,
                                          int64_t *found) {
    char text[700];
    const char *file = xd_json_string(xd_json_find(xdi_weights_map(m), name), NULL);
    if (file && strcmp(file, m->names[shard]) == 0) return XD_OK;
    snprintf(text, sizeof text, "%.300s/%.100s holds tensor \"%.80s\", which the index puts into %.80s",
             m->directory, m->names[shard], name, file ? file : "no file");
    return xdi_weights_differ(m, found, XD_ERROR_UNEXPECTED, text);
}

/* The index and the files must agree, in both directions. */
static xd_result xdi_weights_check(const xdi_weights_files *m) {
    int64_t found = 0;
    const xd_json *first = xd_json_first(xdi_weights_map(m));
    for (const xd_json *entry = first; entry; entry = xd_json_next(entry))
        XD_TRY(xdi_weights_check_entry(m, entry, &found));
    for (int64_t i = 0; i < m->count; i++)
        for (int64_t k = 0; k < xdi_safetensors_count(m->files[i]); k++)
            XD_TRY(xdi_weights_check_tensor(m, i, xdi_safetensors_at(m->files[i], k)->name, &found));
    if (found > 1)
        xd_log(m->ctx, XD_LOG_WARN, "%s: the index and the files differ about %lld tensors", m->directory,
               (long long)found);
    return XD_OK;
}

static xd_result xdi_weights_load_index(xdi_weights_files *m) {
    char *path = xdi_weights_path(m->ctx, m->directory, XDI_WEIGHTS_INDEX), *text = NULL;
    size_t bytes = 0;
    XD_REQUIRE(m->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", m->directory, XDI_WEIGHTS_INDEX);
    xd_result result = xd_file_load(m->ctx, path, 0, &text, &bytes);
    xd_release(m->ctx, path);
    XD_TRY(result);
    m->seen = xd_crc32c(0, text, bytes);
    result = xd_json_load_memory(m->ctx, NULL, text, bytes, &m->index);
    xd_release(m->ctx, text);
    XD_REQUIRE(m->ctx, result == XD_OK, result, "%s/%s: %s", m->directory, XDI_WEIGHTS_INDEX,
               xd_last_error(m->ctx)->message);
    return XD_OK;
}

static int xdi_weights_probe_in(const xdi_weights_files *m, const char *name) {
    char *path = xdi_weights_path(m->ctx, m->directory, name);
    const int error = path ? xdi_file_probe(m->ctx, path) : ENOMEM;
    xd_release(m->ctx, path);
    return error;
}

static xd_result xdi_weights_open_index(xdi_weights_files *m, const xdi_safetensors_desc *desc) {
    const xd_result result = xdi_weights_load_index(m);
    XD_REQUIRE(m->ctx, result != XD_ERROR_IO || xdi_weights_probe_in(m, XDI_WEIGHTS_INDEX) != ENOENT,
               XD_ERROR_IO, "%s has neither %s nor %s: %s", m->directory, XDI_WEIGHTS_SINGLE,
               XDI_WEIGHTS_INDEX, strerror(ENOENT));
    XD_TRY(result);
    XD_TRY(xdi_weights_collect(m));
    m->files = (xdi_safetensors **)xd_allocate(m->ctx, (size_t)m->count * sizeof *m->files);
    XD_REQUIRE(m->ctx, m->files, XD_ERROR_MEMORY, "no room for %lld files", (long long)m->count);
    for (int64_t i = 0; i < m->count; i++) XD_TRY(xdi_weights_open_shard(m, desc, i));
    return xdi_weights_check(m);
}

static xd_result xdi_weights_open_single(xdi_weights_files *m, const char *path,
                                         const xdi_safetensors_desc *desc) {
    m->files = (xdi_safetensors **)xd_allocate(m->ctx, sizeof *m->files);
    XD_REQUIRE(m->ctx, m->files, XD_ERROR_MEMORY, "%s: no room for a file list", path);
    m->count = 1;
    return xdi_safetensors_open(m->ctx, path, desc, m->files);
}

/* Looks again when there is neither: between the two looks a save may have replaced one by the other. */
static bool xdi_weights_is_single(const xdi_weights_files *m) {
    enum { LOOKS = 4 };
    for (int i = 0; i < LOOKS; i++) {
        if (xdi_weights_probe_in(m, XDI_WEIGHTS_SINGLE) != ENOENT) return true;
        if (xdi_weights_probe_in(m, XDI_WEIGHTS_INDEX) != ENOENT) return false;
    }
    return false;
}

static xd_result xdi_weights_open_once(xdi_weights_files *m, const xdi_safetensors_desc *desc) {
    m->single = xdi_weights_is_single(m);
    if (!m->single) return xdi_weights_open_index(m, desc);
    char *single = xdi_weights_path(m->ctx, m->directory, XDI_WEIGHTS_SINGLE);
    XD_REQUIRE(m->ctx, single, XD_ERROR_MEMORY, "%s: no room for a path", m->directory);
    const xd_result result = xdi_weights_open_single(m, single, desc);
    xd_release(m->ctx, single);
    return result;
}

/* Whether a save may have switched the directory to another model since this one was begun to be read. No two indices are
 * equal, because the names of shards are not; a single file may have gone and come again. */
static bool xdi_weights_has_moved(const xdi_weights_files *m, int tries) {
    enum { AGAIN = 3 };
    char *text = NULL;
    size_t bytes = 0;
    const int single = xdi_weights_probe_in(m, XDI_WEIGHTS_SINGLE);
    if (m->single) return single == ENOENT || (single == 0 && tries < AGAIN);
    if (single != ENOENT) return true;
    if (xdi_weights_probe_in(m, XDI_WEIGHTS_INDEX) == ENOENT) return m->seen != 0 || xdi_weights_is_single(m);
    char *index = xdi_weights_path(m->ctx, m->directory, XDI_WEIGHTS_INDEX);
    const bool read = index && xd_file_load(m->ctx, index, 0, &text, &bytes) == XD_OK;
    const bool moved = index && (!read || xd_crc32c(0, text, bytes) != m->seen);
    xd_release(m->ctx, text);
    xd_release(m->ctx, index);
    return moved;
}

static void xdi_weights_close_all(xdi_weights_files *m) {
    if (m->files)
        for (int64_t i = 0; i < m->count; i++) xdi_safetensors_close(m->files[i]);
    xd_release(m->ctx, m->files);
    xd_release(m->ctx, m->names);
    xd_json_destroy(m->ctx, m->index);
}

/* A save removes the older model's files: a reader that was just opening them begins again. */
XD_PRIVATE xd_result xdi_weights_files_start(xd_ctx *ctx, const char *directory,
                                             const xdi_safetensors_desc *desc, bool lenient,
                                             xdi_weights_files **out) {
    enum { TRIES = 100 };
    xdi_weights_files *m = (xdi_weights_files *)xd_allocate(ctx, sizeof *m);
    XD_REQUIRE(ctx, m, XD_ERROR_MEMORY, "%s: no room for a model", directory);
    xd_result result = XD_ERROR_IO;
    for (int i = 0; i < TRIES && result == XD_ERROR_IO; i++) {
        if (i > 0) xdi_weights_close_all(m);
        memset(m, 0, sizeof *m);
        m->ctx = ctx;
        m->directory = directory;
        m->lenient = lenient;
        result = xdi_weights_open_once(m, desc);
        if (result == XD_ERROR_IO && !xdi_weights_has_moved(m, i)) break;
    }
    if (result == XD_OK)
        *out = m;
    else
        xdi_weights_files_close(m);
    return result;
}

XD_PRIVATE void xdi_weights_files_close(xdi_weights_files *m) {
    if (!m) return;
    xdi_weights_close_all(m);
    xd_release(m->ctx, m);
}

XD_PRIVATE int64_t xdi_weights_files_count(const xdi_weights_files *m) {
    return m->count;
}

XD_PRIVATE xdi_safetensors *xdi_weights_files_at(const xdi_weights_files *m, int64_t file) {
    return file >= 0 && file < m->count ? m->files[file] : NULL;
}

XD_PRIVATE xdi_safetensors *xdi_weights_holder(const xdi_weights_files *m, const char *name) {
    const char *where = xd_json_string(xd_json_find(xdi_weights_map(m), name), NULL);
    xdi_safetensors *holder = where ? xdi_weights_file(m, where) : NULL;
    if (holder && xdi_safetensors_find(holder, name) >= 0) return holder;
    for (int64_t i = 0; i < m->count; i++)
        if (xdi_safetensors_find(m->files[i], name) >= 0) return m->files[i];
    return NULL;
}
