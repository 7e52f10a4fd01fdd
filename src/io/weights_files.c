/* A model's directory: one file or several with an index. */

#include "base/json.h"
#include "base/publish.h"
#include "io/internal.h"
#include "io/weights_files.h"

#include <stdio.h>
#include <string.h>

#define XDI_WEIGHTS_SINGLE "model.safetensors"
#define XDI_WEIGHTS_INDEX "model.safetensors.index.json"

enum { XDI_WEIGHTS_NAME = 64 }; /* larger than any file name that is written here */

struct xd_weights_files {
    xd_ctx *ctx;
    const char *directory; /* the caller's; valid while opening */
    xd_json *index;        /* NULL for a single file */
    const char **names;    /* [count], of the files, ascending; in the index's memory */
    xd_safetensors **files;
    int64_t count;
};

/* directory/name in new memory; NULL when there is no room, which the caller reports. */
static char *xdi_weights_path(xd_ctx *ctx, const char *directory, const char *name) {
    const size_t bytes = strlen(directory) + 1 + strlen(name) + 1;
    char *path = (char *)xd_allocate(ctx, bytes);
    if (path) snprintf(path, bytes, "%s/%s", directory, name);
    return path;
}

/* ---- reading ---- */

static bool xdi_weights_exists(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    intptr_t file;
    if (files->open(files->user, path, XD_FILE_READ, &file) != 0) return false;
    files->close(files->user, file);
    return true;
}

static bool xdi_weights_is_basename(const char *name) {
    return *name && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strpbrk(name, "/\\:");
}

static const xd_json *xdi_weights_map(const xd_weights_files *m) {
    return xd_json_find(m->index, "weight_map");
}

static int xdi_weights_by_name(const void *a, const void *b) {
    return strcmp((const char *)a, (const char *)b);
}

/* The distinct file names of the index, sorted, in m->names; their number becomes the count. */
static xd_result xdi_weights_collect(xd_weights_files *m) {
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

static xd_safetensors *xdi_weights_file(const xd_weights_files *m, const char *name) {
    int64_t low = 0, high = m->count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int order = strcmp(name, m->names[middle]);
        if (order == 0) return m->files[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static xd_result xdi_weights_open_shard(xd_weights_files *m, const xd_safetensors_desc *desc, int64_t i) {
    char *path = xdi_weights_path(m->ctx, m->directory, m->names[i]);
    XD_REQUIRE(m->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", m->directory, m->names[i]);
    const xd_result result = xd_safetensors_open(m->ctx, path, desc, &m->files[i]);
    xd_release(m->ctx, path);
    return result;
}

/* The index and the files must agree, in both directions. */
static xd_result xdi_weights_check(const xd_weights_files *m) {
    const xd_json *map = xdi_weights_map(m);
    for (const xd_json *entry = xd_json_first(map); entry; entry = xd_json_next(entry)) {
        const char *name = xd_json_key(entry, NULL), *file = xd_json_string(entry, NULL);
        XD_REQUIRE(m->ctx, xd_safetensors_find(xdi_weights_file(m, file), name) >= 0, XD_ERROR_MISSING,
                   "%s/%s holds no tensor \"%.80s\", where the index puts it", m->directory, file, name);
    }
    for (int64_t i = 0; i < m->count; i++)
        for (int64_t k = 0; k < xd_safetensors_count(m->files[i]); k++) {
            const char *name = xd_safetensors_at(m->files[i], k)->name;
            const char *file = xd_json_string(xd_json_find(map, name), NULL);
            XD_REQUIRE(m->ctx, file && strcmp(file, m->names[i]) == 0, XD_ERROR_UNEXPECTED,
                       "%s/%s holds tensor \"%.80s\", which the index puts into %s", m->directory,
                       m->names[i], name, file ? file : "no file");
        }
    return XD_OK;
}

static xd_result xdi_weights_open_index(xd_weights_files *m, const xd_safetensors_desc *desc) {
    char *path = xdi_weights_path(m->ctx, m->directory, XDI_WEIGHTS_INDEX);
    XD_REQUIRE(m->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", m->directory, XDI_WEIGHTS_INDEX);
    const xd_result result = xd_json_load(m->ctx, NULL, path, &m->index);
    xd_release(m->ctx, path);
    XD_TRY(result);
    XD_TRY(xdi_weights_collect(m));
    m->files = (xd_safetensors **)xd_allocate(m->ctx, (size_t)m->count * sizeof *m->files);
    XD_REQUIRE(m->ctx, m->files, XD_ERROR_MEMORY, "no room for %lld files", (long long)m->count);
    for (int64_t i = 0; i < m->count; i++) XD_TRY(xdi_weights_open_shard(m, desc, i));
    return xdi_weights_check(m);
}

static xd_result xdi_weights_open_single(xd_weights_files *m, const char *path,
                                         const xd_safetensors_desc *desc) {
    m->files = (xd_safetensors **)xd_allocate(m->ctx, sizeof *m->files);
    XD_REQUIRE(m->ctx, m->files, XD_ERROR_MEMORY, "%s: no room for a file list", path);
    m->count = 1;
    return xd_safetensors_open(m->ctx, path, desc, m->files);
}

XD_API xd_result xd_weights_files_open(xd_ctx *ctx, const char *directory, const xd_safetensors_desc *desc,
                                       xd_weights_files **out) {
    char *single = xdi_weights_path(ctx, directory, XDI_WEIGHTS_SINGLE);
    xd_weights_files *m = (xd_weights_files *)xd_allocate(ctx, sizeof *m);
    xd_result result;
    if (!single || !m) {
        xd_release(ctx, single);
        xd_release(ctx, m);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "%s: no room for a model", directory);
    }
    m->ctx = ctx;
    m->directory = directory;
    if (xdi_weights_exists(ctx, single))
        result = xdi_weights_open_single(m, single, desc);
    else
        result = xdi_weights_open_index(m, desc);
    xd_release(ctx, single);
    if (result == XD_OK)
        *out = m;
    else
        xd_weights_files_close(m);
    return result;
}

XD_API void xd_weights_files_close(xd_weights_files *m) {
    if (!m) return;
    if (m->files)
        for (int64_t i = 0; i < m->count; i++) xd_safetensors_close(m->files[i]);
    xd_release(m->ctx, m->files);
    xd_release(m->ctx, m->names);
    xd_json_destroy(m->ctx, m->index);
    xd_release(m->ctx, m);
}

XD_API int64_t xd_weights_files_count(const xd_weights_files *m) {
    return m->count;
}

XD_API xd_safetensors *xd_weights_files_at(const xd_weights_files *m, int64_t file) {
    return file >= 0 && file < m->count ? m->files[file] : NULL;
}

XD_API xd_result xd_weights_files_find(const xd_weights_files *m, const char *name, xd_safetensors **file,
                                       int64_t *index) {
    const char *where = xd_json_string(xd_json_find(xdi_weights_map(m), name), NULL);
    xd_safetensors *holder = m->index ? (where ? xdi_weights_file(m, where) : NULL) : m->files[0];
    const int64_t found = holder ? xd_safetensors_find(holder, name) : -1;
    XD_REQUIRE(m->ctx, found >= 0, XD_ERROR_MISSING, "the model has no tensor \"%.80s\"", name);
    *file = holder;
    *index = found;
    return XD_OK;
}

/* ---- writing ---- */

struct xd_weights_writer {
    xd_ctx *ctx;
    char *directory;                 /* after the struct in the same block */
    xd_safetensors_writer **writers; /* [shards] */
    int64_t *first;                  /* [shards + 1]: shard s holds entries first[s] .. first[s + 1] - 1 */
    int64_t shards;
    uint64_t total_bytes;
    xd_json_writer index; /* text of the index */
};

static void xdi_weights_shard_name(char name[XDI_WEIGHTS_NAME], int64_t shard, int64_t shards) {
    if (shards == 1)
        snprintf(name, XDI_WEIGHTS_NAME, "%s", XDI_WEIGHTS_SINGLE);
    else
        snprintf(name, XDI_WEIGHTS_NAME, "model-%05lld-of-%05lld.safetensors", (long long)shard + 1,
                 (long long)shards);
}

/* Fills files greedily in the order of the entries. */
static xd_result xdi_weights_split(xd_weights_writer *w, const xd_weights_writer_desc *d) {
    const uint64_t limit = d->max_shard_bytes ? d->max_shard_bytes : 5000000000u;
    uint64_t filled = 0;
    w->shards = 1;
    for (int64_t i = 0; i < d->entry_count; i++) {
        uint64_t bytes = 0;
        XD_TRY(xdi_safetensors_check_entry(w->ctx, &d->entries[i], &bytes));
        if (i > w->first[w->shards - 1] && (bytes > limit || filled > limit - bytes)) {
            w->first[w->shards++] = i;
            filled = 0;
        }
        filled += bytes;
        w->total_bytes += bytes;
    }
    w->first[w->shards] = d->entry_count;
    return XD_OK;
}

static void xdi_weights_write_index(xd_weights_writer *w, const xd_weights_writer_desc *d) {
    xd_json_writer *json = &w->index;
    json->indent = 2;
    xd_json_write_object(json);
    xd_json_write_key(json, "metadata");
    xd_json_write_object(json);
    xd_json_write_key(json, "total_size");
    xd_json_write_uint64(json, w->total_bytes);
    xd_json_write_end(json);
    xd_json_write_key(json, "weight_map");
    xd_json_write_object(json);
    for (int64_t s = 0; s < w->shards; s++) {
        char name[XDI_WEIGHTS_NAME];
        xdi_weights_shard_name(name, s, w->shards);
        for (int64_t i = w->first[s]; i < w->first[s + 1]; i++) {
            xd_json_write_key(json, d->entries[i].name);
            xd_json_write_string(json, name);
        }
    }
    xd_json_write_end(json);
    xd_json_write_end(json);
}

static xd_result xdi_weights_start_shard(xd_weights_writer *w, const xd_weights_writer_desc *d,
                                         int64_t shard) {
    char name[XDI_WEIGHTS_NAME];
    xd_safetensors_writer_desc file;
    memset(&file, 0, sizeof file);
    file.entries = d->entries + w->first[shard];
    file.entry_count = w->first[shard + 1] - w->first[shard];
    file.metadata = d->metadata;
    file.metadata_count = d->metadata_count;
    xdi_weights_shard_name(name, shard, w->shards);
    char *path = xdi_weights_path(w->ctx, w->directory, name);
    XD_REQUIRE(w->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", w->directory, name);
    const xd_result result = xd_safetensors_writer_create(w->ctx, path, &file, &w->writers[shard]);
    xd_release(w->ctx, path);
    return result;
}

static xd_result xdi_weights_start(xd_weights_writer *w, const xd_weights_writer_desc *d) {
    w->first = (int64_t *)xd_allocate(w->ctx, ((size_t)d->entry_count + 2) * sizeof *w->first);
    XD_REQUIRE(w->ctx, w->first, XD_ERROR_MEMORY, "no room to plan %lld tensors", (long long)d->entry_count);
    XD_TRY(xdi_weights_split(w, d));
    const char *text;
    size_t bytes;
    xdi_weights_write_index(w, d);
    XD_TRY(xd_json_writer_text(&w->index, &text, &bytes));
    XD_TRY(xdi_safetensors_check_header(w->ctx, text, bytes)); /* a name may be in two shards */
    w->writers = (xd_safetensors_writer **)xd_allocate(w->ctx, (size_t)w->shards * sizeof *w->writers);
    XD_REQUIRE(w->ctx, w->writers, XD_ERROR_MEMORY, "no room for %lld files", (long long)w->shards);
    for (int64_t s = 0; s < w->shards; s++) XD_TRY(xdi_weights_start_shard(w, d, s));
    return XD_OK;
}

XD_API xd_result xd_weights_writer_create(xd_ctx *ctx, const char *directory,
                                          const xd_weights_writer_desc *desc, xd_weights_writer **out) {
    XD_REQUIRE(ctx, desc->entry_count >= 0 && desc->entry_count <= INT32_MAX, XD_ERROR_ARGUMENT,
               "%lld tensors", (long long)desc->entry_count);
    const size_t length = strlen(directory) + 1;
    xd_weights_writer *w = (xd_weights_writer *)xd_allocate(ctx, sizeof *w + length);
    XD_REQUIRE(ctx, w, XD_ERROR_MEMORY, "%s: no room for a model writer", directory);
    w->ctx = ctx;
    w->directory = (char *)(w + 1);
    memcpy(w->directory, directory, length);
    w->index = xd_json_writer_create(ctx);
    const xd_result result = xdi_weights_start(w, desc);
    if (result == XD_OK)
        *out = w;
    else
        xd_weights_writer_abort(w);
    return result;
}

XD_API xd_result xd_weights_writer_write(xd_weights_writer *w, int64_t index, uint64_t first_byte,
                                         size_t bytes, const void *data) {
    XD_REQUIRE(w->ctx, index >= 0 && index < w->first[w->shards], XD_ERROR_ARGUMENT, "tensor %lld of %lld",
               (long long)index, (long long)w->first[w->shards]);
    int64_t low = 0, high = w->shards; /* the last shard that starts at or before index */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (w->first[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    return xd_safetensors_writer_write_range(w->writers[low], index - w->first[low], first_byte, bytes, data);
}

/* Removes a file of the directory. The save does not fail when the file does not exist, or without memory for its path. */
static void xdi_weights_remove(xd_weights_writer *w, const char *name) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    char *path = xdi_weights_path(w->ctx, w->directory, name);
    if (path && files->remove) files->remove(files->user, path);
    xd_release(w->ctx, path);
}

static xd_result xdi_weights_save_index(xd_weights_writer *w) {
    const char *text;
    size_t bytes;
    XD_TRY(xd_json_writer_text(&w->index, &text, &bytes));
    char *path = xdi_weights_path(w->ctx, w->directory, XDI_WEIGHTS_INDEX);
    XD_REQUIRE(w->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", w->directory, XDI_WEIGHTS_INDEX);
    const xd_result result = xd_file_save(w->ctx, path, text, bytes);
    xd_release(w->ctx, path);
    return result;
}

XD_API xd_result xd_weights_writer_commit(xd_weights_writer *w) {
    xd_result result = XD_OK;
    int64_t published = 0;
    while (published < w->shards && result == XD_OK) {
        result = xd_safetensors_writer_commit(w->writers[published]);
        w->writers[published] = NULL;
        if (result == XD_OK) published++;
    }
    if (result == XD_OK && w->shards > 1) result = xdi_weights_save_index(w);
    char name[XDI_WEIGHTS_NAME];
    for (int64_t s = 0; s < published && result != XD_OK; s++) {
        xdi_weights_shard_name(name, s, w->shards);
        xdi_weights_remove(w, name);
    }
    if (result == XD_OK) xdi_weights_remove(w, w->shards > 1 ? XDI_WEIGHTS_SINGLE : XDI_WEIGHTS_INDEX);
    xd_weights_writer_abort(w);
    return result;
}

XD_API void xd_weights_writer_abort(xd_weights_writer *w) {
    if (!w) return;
    if (w->writers)
        for (int64_t s = 0; s < w->shards; s++) xd_safetensors_writer_abort(w->writers[s]);
    xd_json_writer_destroy(&w->index);
    xd_release(w->ctx, w->writers);
    xd_release(w->ctx, w->first);
    xd_release(w->ctx, w);
}
