/* A save of a model's directory: everything under other names first, then one rename or one removal that decides. */

#include "base/json.h"
#include "base/publish_internal.h"
#include "io/internal.h"
#include "io/weights.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XDI_WEIGHTS_LOCK "model.safetensors.lock"
#define XDI_WEIGHTS_SAVE \
    "xdistill.save" /* in the metadata of a single file: the last save of shards before it */

enum { XDI_WEIGHTS_NAME = 112 }; /* larger than any file name that is written here */

struct xd_weights_writer {
    xd_ctx *ctx;
    char *directory, *lock_path;      /* after the struct in the same block */
    xdi_lock lock;                    /* held from the beginning to the end: one save at a time */
    xdi_safetensors_writer *single;   /* one file; then there is nothing else below but ctx */
    xdi_safetensors_writer **writers; /* [shards] */
    int64_t *first;                   /* [shards + 1]: shard s holds entries first[s] .. first[s + 1] - 1 */
    int64_t shards;
    uint64_t total_bytes;
    uint64_t save; /* of shards: one more than the last; of a single file: the last */
    xd_json_writer index;
    xdi_publish *index_file;
    xd_json *older;                  /* the index that was there */
    bool over_single;                /* a model.safetensors was there */
    bool switched;                   /* readers see the new model */
    char leftover[XDI_WEIGHTS_NAME]; /* the first file of the older save that could not be removed */
    int leftover_error;
};

/* ---- names ---- */

static void xdi_weights_shard_name(char name[XDI_WEIGHTS_NAME], int64_t shard, int64_t shards,
                                   uint64_t save) {
    snprintf(name, XDI_WEIGHTS_NAME, "model-%05lld-of-%05lld-save-%llu.safetensors", (long long)shard + 1,
             (long long)shards, (unsigned long long)save);
}

/* Whether a name begins as the function above writes it; *end: the length of that. */
static bool xdi_weights_is_shard(const char *name, int64_t *shards, uint64_t *save, size_t *end) {
    char again[XDI_WEIGHTS_NAME];
    long long shard, count;
    unsigned long long number;
    if (sscanf(name, "model-%lld-of-%lld-save-%llu.", &shard, &count, &number) != 3) return false;
    xdi_weights_shard_name(again, shard - 1, count, number);
    *shards = count;
    *save = number;
    *end = strlen(again);
    return strncmp(name, again, *end) == 0;
}

static void xdi_weights_name(const xd_weights_writer *w, int64_t shard, char name[XDI_WEIGHTS_NAME]) {
    if (w->shards == 1)
        snprintf(name, XDI_WEIGHTS_NAME, "%s", XDI_WEIGHTS_SINGLE);
    else
        xdi_weights_shard_name(name, shard, w->shards, w->save);
}

static xd_result xdi_weights_join(const xd_weights_writer *w, const char *name, char **path) {
    *path = xdi_weights_path(w->ctx, w->directory, name);
    XD_REQUIRE(w->ctx, *path, XD_ERROR_MEMORY, "%s/%s: no room for the path", w->directory, name);
    return XD_OK;
}

static xd_result xdi_weights_probe(const xd_weights_writer *w, const char *name, int *error) {
    char *path;
    XD_TRY(xdi_weights_join(w, name, &path));
    *error = xdi_file_probe(w->ctx, path);
    xd_release(w->ctx, path);
    return XD_OK;
}

/* Removes a file of the directory: 0 also when there was none. */
static int xdi_weights_remove(xd_weights_writer *w, const char *name) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    char *path = xdi_weights_path(w->ctx, w->directory, name);
    int error = ENOMEM;
    if (path) error = files->remove ? files->remove(files->user, path) : ENOSYS;
    xd_release(w->ctx, path);
    return error == ENOENT ? 0 : error;
}

/* ---- what is there ---- */

/* The number of the last save of shards, from what readers of the directory may have seen. What cannot be read counts as
 * nothing: the save replaces it. */
static xd_result xdi_weights_read_single(xd_weights_writer *w, const char *path) {
    xdi_safetensors_desc desc;
    xdi_safetensors *file = NULL;
    memset(&desc, 0, sizeof desc);
    desc.mode = XD_WEIGHTS_STREAM;
    desc.skip_unknown = true;
    const xd_result result = xdi_safetensors_open(w->ctx, path, &desc, &file);
    if (result != XD_OK) return result == XD_ERROR_FORMAT ? XD_OK : result;
    const char *save = xdi_safetensors_metadata(file, XDI_WEIGHTS_SAVE);
    const uint64_t number = save ? strtoull(save, NULL, 10) : 0;
    if (number > w->save) w->save = number;
    xdi_safetensors_close(file);
    return XD_OK;
}

static xd_result xdi_weights_read_index(xd_weights_writer *w, const char *path) {
    const xd_result result = xd_json_load(w->ctx, NULL, path, &w->older);
    if (result != XD_OK) return result == XD_ERROR_FORMAT ? XD_OK : result;
    const xd_json *map = xd_json_find(w->older, "weight_map");
    for (const xd_json *entry = xd_json_first(map); entry; entry = xd_json_next(entry)) {
        const char *name = xd_json_string(entry, NULL);
        int64_t shards;
        uint64_t save;
        size_t end;
        if (name && xdi_weights_is_shard(name, &shards, &save, &end) && save > w->save) w->save = save;
    }
    return XD_OK;
}

static xd_result xdi_weights_read_one(xd_weights_writer *w, const char *name, bool *there,
                                      xd_result (*read)(xd_weights_writer *w, const char *path)) {
    char *path;
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    XD_TRY(xdi_weights_join(w, name, &path));
    const int error = files->replaceable ? files->replaceable(files->user, path) : 0;
    xd_result result =
        error == 0 ? XD_OK : XD_FAIL(w->ctx, XD_ERROR_IO, "%s: replace: %s", path, xdi_open_error(error));
    *there = result == XD_OK && xdi_file_probe(w->ctx, path) != ENOENT;
    if (*there) result = read(w, path);
    xd_release(w->ctx, path);
    return result;
}

/* A directory that is written to replace another goes on with that one's numbers: a reader in between may open files of both. */
static void xdi_weights_read_replaced(xd_weights_writer *w) {
    char *end = strstr(w->directory, ".tmp-"), *single, *index;
    for (char *next = end; next; next = strstr(next + 1, ".tmp-")) end = next;
    if (!end || end[5] == '\0' || end[5 + strspn(end + 5, "0123456789")] != '\0') return;
    *end = '\0';
    single = xdi_weights_path(w->ctx, w->directory, XDI_WEIGHTS_SINGLE);
    index = xdi_weights_path(w->ctx, w->directory, XDI_WEIGHTS_INDEX);
    *end = '.';
    if (single && xdi_file_probe(w->ctx, single) == 0) (void)xdi_weights_read_single(w, single);
    if (index && xdi_file_probe(w->ctx, index) == 0) (void)xdi_weights_read_index(w, index);
    xd_json_destroy(w->ctx, w->older); /* these files are not this writer's to remove */
    w->older = NULL;
    xd_release(w->ctx, single);
    xd_release(w->ctx, index);
}

static xd_result xdi_weights_read_older(xd_weights_writer *w) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    bool has_index;
    xdi_weights_read_replaced(w);
    XD_TRY(xdi_weights_read_one(w, XDI_WEIGHTS_SINGLE, &w->over_single, xdi_weights_read_single));
    XD_TRY(xdi_weights_read_one(w, XDI_WEIGHTS_INDEX, &has_index, xdi_weights_read_index));
    XD_REQUIRE(w->ctx, w->shards == 1 || !w->over_single || files->remove, XD_ERROR_UNSUPPORTED,
               "%s/%s: the files of this context offer no remove", w->directory, XDI_WEIGHTS_SINGLE);
    if (w->shards > 1) w->save++;
    return XD_OK;
}

/* ---- what is left ---- */

static void xdi_weights_discard(xd_weights_writer *w, const char *name) {
    const int error = xdi_weights_remove(w, name);
    if (error == 0 || w->leftover_error) return;
    w->leftover_error = error;
    snprintf(w->leftover, sizeof w->leftover, "%.100s", name);
}

static bool xdi_weights_ends(const char *name, const char *end) {
    const size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

/* Temporary files of dead saves, and after the switch all shards that are not of this save. This one's own temporary files
 * are gone by then, and before it there are none. */
static void xdi_weights_sweep_each(void *argument, const char *name) {
    xd_weights_writer *w = (xd_weights_writer *)argument;
    int64_t shards;
    uint64_t save;
    size_t end;
    if (!xdi_weights_is_shard(name, &shards, &save, &end)) return;
    if (name[end] == '\0') {
        if (w->switched && (w->shards == 1 || shards != w->shards || save != w->save))
            xdi_weights_discard(w, name);
    } else if (strncmp(name + end, ".tmp-", 5) == 0 && w->lock.taken) {
        char *path = xdi_weights_path(w->ctx, w->directory, name);
        if (path) (void)xdi_abandoned_remove(w->ctx, path);
        xd_release(w->ctx, path);
    }
}

static void xdi_weights_sweep(xd_weights_writer *w) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    if (files->list) (void)files->list(files->user, w->directory, xdi_weights_sweep_each, w);
}

/* After the switch: what the older save left, and the temporary files of dead saves of the other kind. */
static void xdi_weights_remove_older(xd_weights_writer *w) {
    const char *before = "";
    char *index = xdi_weights_path(w->ctx, w->directory, XDI_WEIGHTS_INDEX);
    char *single = xdi_weights_path(w->ctx, w->directory, XDI_WEIGHTS_SINGLE);
    if (w->shards == 1) xdi_weights_discard(w, XDI_WEIGHTS_INDEX);
    const xd_json *map = xd_json_find(w->older, "weight_map");
    for (const xd_json *entry = xd_json_first(map); entry; entry = xd_json_next(entry)) {
        const char *name = xd_json_string(entry, NULL);
        int64_t shards;
        uint64_t save;
        size_t end;
        if (!name || strcmp(name, before) == 0 || !xdi_weights_is_basename(name)) continue;
        if (!xdi_weights_ends(name, ".safetensors") || strcmp(name, XDI_WEIGHTS_SINGLE) == 0) continue;
        before = name;
        if (!xdi_weights_is_shard(name, &shards, &save, &end) || save != w->save || w->shards == 1)
            xdi_weights_discard(w, name);
    }
    xdi_weights_sweep(w);
    if (index) xdi_abandoned_sweep(w->ctx, index, ".tmp-");
    if (single) xdi_abandoned_sweep(w->ctx, single, ".tmp-");
    xd_release(w->ctx, index);
    xd_release(w->ctx, single);
}

/* ---- starting ---- */

/* Fills files greedily in the order of the entries. */
static xd_result xdi_weights_split(xd_weights_writer *w, const xd_weights_writer_desc *d) {
    const uint64_t limit = d->max_shard_bytes ? d->max_shard_bytes : 5000000000u;
    uint64_t filled = 0;
    w->shards = 1;
    for (int64_t i = 0; i < d->entry_count; i++) {
        uint64_t bytes = 0;
        XD_TRY(xdi_safetensors_check_entry(w->ctx, &d->entries[i], i, &bytes));
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

/* A plan checks the names of one file; here a name may be in two. */
static xd_result xdi_weights_check_repeats(xd_weights_writer *w, const xd_weights_writer_desc *d) {
    const void **order = (const void **)xd_allocate(w->ctx, (size_t)d->entry_count * sizeof *order);
    XD_REQUIRE(w->ctx, order, XD_ERROR_MEMORY, "no room to sort %lld tensors", (long long)d->entry_count);
    const xd_result result = xdi_safetensors_check_repeats(w->ctx, d->entries, d->entry_count, order);
    xd_release(w->ctx, order);
    return result;
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
        xdi_weights_name(w, s, name);
        for (int64_t i = w->first[s]; i < w->first[s + 1]; i++) {
            xd_json_write_key(json, d->entries[i].name);
            xd_json_write_string(json, name);
        }
    }
    xd_json_write_end(json);
    xd_json_write_end(json);
}

static xd_result xdi_weights_start_shard(xd_weights_writer *w, const xd_weights_writer_desc *d,
                                         const xd_weights_pair *metadata, int64_t metadata_count,
                                         int64_t shard) {
    char name[XDI_WEIGHTS_NAME], *path;
    xd_weights_writer_desc file;
    memset(&file, 0, sizeof file);
    file.entries = d->entries ? d->entries + w->first[shard] : NULL; /* a directory without tensors */
    file.entry_count = w->first[shard + 1] - w->first[shard];
    file.metadata = metadata;
    file.metadata_count = metadata_count;
    file.alignment = d->alignment;
    xdi_weights_name(w, shard, name);
    XD_TRY(xdi_weights_join(w, name, &path));
    /* Shards are protected by the lock of the save: with one each, every shard would be open twice. */
    const bool locked = w->shards == 1 || !w->lock.taken;
    const xd_result result = xdi_safetensors_writer_start(w->ctx, path, &file, locked, &w->writers[shard]);
    xd_release(w->ctx, path);
    return result;
}

/* All files, under their temporary names. A single file carries the number of the last save of shards. */
static xd_result xdi_weights_start_files(xd_weights_writer *w, const xd_weights_writer_desc *d) {
    char save[24];
    int64_t count = 0;
    xd_result result = XD_OK;
    xd_weights_pair *metadata =
        (xd_weights_pair *)xd_allocate(w->ctx, ((size_t)d->metadata_count + 1) * sizeof *metadata);
    XD_REQUIRE(w->ctx, metadata, XD_ERROR_MEMORY, "no room for %lld pairs", (long long)d->metadata_count);
    for (int64_t i = 0; i < d->metadata_count; i++) /* a caller may hand on what a file that was read had */
        if (!d->metadata[i].key || strcmp(d->metadata[i].key, XDI_WEIGHTS_SAVE) != 0)
            metadata[count++] = d->metadata[i];
    if (w->shards == 1 && w->save > 0) {
        snprintf(save, sizeof save, "%llu", (unsigned long long)w->save);
        metadata[count].key = XDI_WEIGHTS_SAVE;
        metadata[count++].value = save;
    }
    for (int64_t s = 0; s < w->shards && result == XD_OK; s++)
        result = xdi_weights_start_shard(w, d, metadata, count, s);
    xd_release(w->ctx, metadata);
    return result;
}

static xd_result xdi_weights_start(xd_weights_writer *w, const xd_weights_writer_desc *d) {
    w->first = (int64_t *)xd_allocate(w->ctx, ((size_t)d->entry_count + 2) * sizeof *w->first);
    XD_REQUIRE(w->ctx, w->first, XD_ERROR_MEMORY, "no room to plan %lld tensors", (long long)d->entry_count);
    XD_TRY(xdi_weights_split(w, d));
    XD_TRY(xdi_weights_check_repeats(w, d));
    XD_TRY(xdi_lock_take(w->ctx, w->lock_path, &w->lock));
    XD_TRY(xdi_weights_read_older(w));
    xdi_weights_sweep(w);
    xdi_weights_write_index(w, d);
    w->writers = (xdi_safetensors_writer **)xd_allocate(w->ctx, (size_t)w->shards * sizeof *w->writers);
    XD_REQUIRE(w->ctx, w->writers, XD_ERROR_MEMORY, "no room for %lld files", (long long)w->shards);
    return xdi_weights_start_files(w, d);
}

static xd_result xdi_weights_writer_of_file(xd_ctx *ctx, const xd_weights_writer_desc *desc,
                                            xd_weights_writer **out) {
    xd_weights_writer *w = XDI_OBJECT(xd_weights_writer, ctx, sizeof *w);
    XD_REQUIRE(ctx, w, XD_ERROR_MEMORY, "%s: no room for a writer", desc->file);
    w->ctx = ctx;
    const xd_result result = xdi_safetensors_writer_create(ctx, desc->file, desc, &w->single);
    if (result == XD_OK)
        *out = w;
    else
        xd_release(ctx, w);
    return result;
}

static xd_result xdi_weights_writer_of_directory(xd_ctx *ctx, const xd_weights_writer_desc *desc,
                                                 xd_weights_writer **out) {
    const char *directory = desc->directory;
    XD_REQUIRE(ctx, desc->entry_count >= 0 && desc->entry_count <= INT32_MAX, XD_ERROR_ARGUMENT,
               "%lld tensors", (long long)desc->entry_count);
    XD_REQUIRE(ctx, desc->metadata_count >= 0 && (desc->metadata || desc->metadata_count == 0),
               XD_ERROR_ARGUMENT, "%lld pairs of metadata", (long long)desc->metadata_count);
    const size_t length = strlen(directory) + 1, lock = length + sizeof XDI_WEIGHTS_LOCK;
    xd_weights_writer *w = XDI_OBJECT(xd_weights_writer, ctx, sizeof *w + length + lock);
    XD_REQUIRE(ctx, w, XD_ERROR_MEMORY, "%s: no room for a model writer", directory);
    w->ctx = ctx;
    w->directory = (char *)(w + 1);
    w->lock_path = w->directory + length;
    memcpy(w->directory, directory, length);
    snprintf(w->lock_path, lock, "%s/%s", directory, XDI_WEIGHTS_LOCK);
    w->index = xd_json_writer_create(ctx);
    const xd_result result = xdi_weights_start(w, desc);
    if (result == XD_OK)
        *out = w;
    else
        xd_weights_writer_abort(w);
    return result;
}

XD_API xd_result xd_weights_writer_create(xd_ctx *ctx, const xd_weights_writer_desc *desc,
                                          xd_weights_writer **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN_LIST(ctx, desc->entries, desc->entry_count);
    XDI_GIVEN_LIST(ctx, desc->metadata, desc->metadata_count);
    XD_REQUIRE(ctx, !desc->directory != !desc->file, XD_ERROR_ARGUMENT,
               "%d of directory and file are given, not one", desc->file ? 2 : 0);
    return desc->file ? xdi_weights_writer_of_file(ctx, desc, out)
                      : xdi_weights_writer_of_directory(ctx, desc, out);
}

XD_API xd_result xd_weights_writer_write(xd_weights_writer *w, int64_t index, uint64_t first_byte,
                                         size_t bytes, const void *data) {
    XDI_LIVE(xd_weights_writer, w);
    XDI_GIVEN(w ? w->ctx : NULL, w);
    if (w->single) return xdi_safetensors_writer_write(w->single, index, first_byte, bytes, data);
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
    return xdi_safetensors_writer_write(w->writers[low], index - w->first[low], first_byte, bytes, data);
}

/* ---- the end ---- */

/* Syncs and closes everything under its temporary name. */
static xd_result xdi_weights_close_files(xd_weights_writer *w) {
    const char *text;
    char *path;
    size_t bytes;
    for (int64_t s = 0; s < w->shards; s++) XD_TRY(xdi_safetensors_writer_close(w->writers[s]));
    if (w->shards == 1) return XD_OK;
    XD_TRY(xd_json_writer_text(&w->index, &text, &bytes));
    XD_TRY(xdi_weights_join(w, XDI_WEIGHTS_INDEX, &path));
    const xd_result result = xdi_publish_create(w->ctx, path, &w->index_file);
    xd_release(w->ctx, path);
    XD_TRY(result);
    XD_TRY(xdi_publish_write(w->index_file, text, bytes, 0));
    return xdi_publish_close(w->index_file);
}

/* Over a single file, which readers prefer to an index, its removal is the switch. */
static xd_result xdi_weights_remove_single(xd_weights_writer *w) {
    const int error = xdi_weights_remove(w, XDI_WEIGHTS_SINGLE);
    int left = 0;
    if (error != 0) XD_TRY(xdi_weights_probe(w, XDI_WEIGHTS_SINGLE, &left));
    w->switched = error == 0 || left == ENOENT; /* a file server may fail after it has done it */
    XD_REQUIRE(w->ctx, w->switched, XD_ERROR_IO, "%s/%s: remove: %s", w->directory, XDI_WEIGHTS_SINGLE,
               strerror(error));
    return XD_OK;
}

/* Gives the files their names. Each step is on disk before the next: after a loss of power readers find the older model or
 * the new one. */
static xd_result xdi_weights_switch(xd_weights_writer *w) {
    for (int64_t s = 0; s < w->shards; s++) XD_TRY(xdi_safetensors_writer_rename(w->writers[s]));
    if (w->shards == 1) w->switched = true;
    XD_TRY(xdi_publish_sync_folder(w->ctx, w->lock_path));
    if (w->shards == 1) return XD_OK;
    XD_TRY(xdi_publish_rename(w->index_file));
    w->switched = !w->over_single;
    XD_TRY(xdi_publish_sync_folder(w->ctx, w->lock_path));
    if (!w->over_single) return XD_OK;
    XD_TRY(xdi_weights_remove_single(w));
    return xdi_publish_sync_folder(w->ctx, w->lock_path);
}

/* Before the switch: the older model stays, and what was renamed goes. An index under its final name goes first; one that has
 * lost its temporary name although the rename failed may be what readers see: then the shards stay for the next save. */
static void xdi_weights_undo(xd_weights_writer *w) {
    char name[XDI_WEIGHTS_NAME];
    if (w->shards == 1 || !w->index_file) return;
    if (!xdi_publish_is_waiting(w->index_file) &&
        (!w->over_single || xdi_weights_remove(w, XDI_WEIGHTS_INDEX) != 0))
        return;
    for (int64_t s = 0; s < w->shards; s++) {
        xdi_weights_shard_name(name, s, w->shards, w->save);
        (void)xdi_weights_remove(w, name);
    }
}

XD_API xd_result xd_weights_writer_commit(xd_weights_writer *w) {
    XDI_LIVE(xd_weights_writer, w);
    XDI_CALL(w ? w->ctx : NULL);
    const xd_result given = XDI_CHECK_GIVEN(w ? w->ctx : NULL, w);
    if (given != XD_OK) {
        xd_weights_writer_abort(w);
        return given;
    }
    if (w->single) {
        const xd_result written = xdi_safetensors_writer_commit(w->single);
        xd_release(w->ctx, w);
        return written;
    }
    xd_result result = xdi_weights_close_files(w);
    if (result == XD_OK) result = xdi_weights_switch(w);
    if (result != XD_OK && !w->switched) xdi_weights_undo(w);
    if (result == XD_OK) xdi_weights_remove_older(w);
    if (w->leftover_error)
        result =
            XD_FAIL(w->ctx, XD_ERROR_IO, "%s: the new model is complete, but %s of the older one stays: %s",
                    w->directory, w->leftover, strerror(w->leftover_error));
    xd_weights_writer_abort(w);
    return result;
}

XD_API void xd_weights_writer_abort(xd_weights_writer *w) {
    if (!w || XDI_IS_GONE(xd_weights_writer, w)) return;
    if (w->single) {
        xdi_safetensors_writer_abort(w->single);
        xd_release(w->ctx, w);
        return;
    }
    if (w->writers)
        for (int64_t s = 0; s < w->shards; s++) xdi_safetensors_writer_abort(w->writers[s]);
    xdi_publish_abort(w->index_file);
    xdi_lock_drop(w->ctx, w->lock_path, &w->lock);
    xd_json_writer_destroy(&w->index);
    xd_json_destroy(w->ctx, w->older);
    xd_release(w->ctx, w->writers);
    xd_release(w->ctx, w->first);
    xd_release(w->ctx, w);
}
