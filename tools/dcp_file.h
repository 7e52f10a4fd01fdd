/* dcp_file.h - what torch.save has written as one file: pytorch_model.bin, a checkpoint of a training script. It is a zip archive
 * (dcp_item.h) with the elements in data/KEY, or in the older form pickles one behind the other and then the elements. The value is a
 * dict of tensors, of such dicts and of other things; a tensor's name is the path of keys to it. Nothing of it is executed. */
#ifndef DCP_FILE_H
#define DCP_FILE_H

#include "dcp.h"

#define FILE_SINGLE "pytorch_model.bin"
#define FILE_INDEX "pytorch_model.bin.index.json"

enum {
    FILE_STEPS = 1 << 22,       /* values that are looked at on the paths to all tensors */
    FILE_TENSORS = 1 << 18,     /* in all files, and objects */
    FILE_LEGACY_MOST = 64 << 20 /* bytes of the pickles at the beginning of an older file */
};

/* A file that is open. */
typedef struct file_source {
    item_range range;
    unsigned char *bytes; /* of its pickle */
    pickle p;
    item_storage *storages; /* [storage_count] by key */
    int64_t storage_count;
    bool open;
} file_source;

/* A tensor, and where it was found; the tensors of c.d have the same numbers. */
typedef struct file_tensor {
    file_source *source;
    item_storage *storage;
    item_tensor t;
} file_tensor;

/* An object that is no tensor. */
typedef struct file_object {
    file_source *source;
    char *name;
    int32_t value;
} file_object;

typedef struct file_convert {
    dcp_convert c;
    file_source *sources;
    int64_t source_count;
    file_tensor
        *tensors; /* [FILE_TENSORS] as the next and those of c.d: what is not written costs no memory */
    file_object *objects; /* [FILE_TENSORS], of object_count */
    int64_t object_count, steps;
} file_convert;

/* ---- storages ---- */

static int file_by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* DIRECTORY/NAME in new memory; NULL when there is no room. */
static char *file_path(xd_ctx *ctx, const char *directory, const char *name) {
    const size_t bytes = strlen(directory) + strlen(name) + 2;
    char *path = (char *)xd_allocate(ctx, bytes);
    if (path) snprintf(path, bytes, "%s/%s", directory, name);
    return path;
}

/* A file that can be opened. */
static bool file_is_there(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    intptr_t file;
    const int error = files->open(files->user, path, XD_FILE_READ, &file);
    if (error == 0) files->close(files->user, file);
    return error == 0;
}

/* A copy in new memory; NULL when there is no room. */
static char *file_text(xd_ctx *ctx, const char *text) {
    const size_t bytes = strlen(text) + 1;
    char *copy = (char *)xd_allocate(ctx, bytes);
    return copy ? (char *)memcpy(copy, text, bytes) : NULL;
}

static int file_by_key(const void *a, const void *b) {
    return strcmp(((const item_storage *)a)->key, ((const item_storage *)b)->key);
}

static xd_result file_sort(file_source *s) {
    if (s->storage_count) qsort(s->storages, (size_t)s->storage_count, sizeof *s->storages, file_by_key);
    for (int64_t i = 1; i < s->storage_count; i++)
        XD_REQUIRE(s->range.ctx, strcmp(s->storages[i - 1].key, s->storages[i].key) != 0, XD_ERROR_FORMAT,
                   "%s: storage %s is there twice", s->range.label, s->storages[i].key);
    return XD_OK;
}

static xd_result file_copy_key(const file_source *s, int32_t value, char key[ITEM_KEY]) {
    const pickle *p = &s->p;
    const pickle_value *v = value >= 0 ? pickle_at(p, value) : NULL;
    PICKLE_REQUIRE_AT(p, v ? v->at : 0,
                      pickle_is(p, value, PICKLE_TEXT) && v->integer > 0 && v->integer < ITEM_KEY &&
                          !memchr(p->bytes + v->at, 0, (size_t)v->integer),
                      "the key of a storage is no text of 1 to %d bytes", ITEM_KEY - 1);
    memset(key, 0, ITEM_KEY);
    memcpy(key, p->bytes + v->at, (size_t)v->integer);
    return XD_OK;
}

static item_storage *file_find_storage(const file_source *s, const char key[ITEM_KEY]) {
    item_storage wanted;
    memset(&wanted, 0, sizeof wanted);
    memcpy(wanted.key, key, ITEM_KEY);
    return s->storage_count ? (item_storage *)bsearch(&wanted, s->storages, (size_t)s->storage_count,
                                                      sizeof wanted, file_by_key)
                            : NULL;
}

/* ---- the archive ---- */

static xd_result file_open_archive(file_source *s) {
    item_archive archive;
    const xd_result opened = item_open_archive(&s->range, true, &archive);
    s->storages = archive.list;
    XD_TRY(opened);
    s->storage_count = archive.storages;
    XD_TRY(item_load_pickle(&s->range, &archive, &s->bytes));
    XD_TRY(pickle_open(&s->p, s->range.ctx, s->range.label, s->bytes, (size_t)archive.pickle.length,
                       PICKLE_TENSOR | PICKLE_FILE));
    return file_sort(s);
}

/* ---- the older form ---- */

/* The number that such a file begins with, and the version of the form, as pickles. */
static const unsigned char file_magic[] =
    "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.";
enum { FILE_MAGIC = sizeof file_magic - 1 };

/* The storages that the pickle names; of each key the type and the number of elements. */
static xd_result file_list_storages(file_source *s) {
    const pickle *p = &s->p;
    int64_t count = 0, used = 0;
    for (int32_t i = 0; i < (int32_t)p->values.count; i++) count += pickle_at(p, i)->kind == PICKLE_STORAGE;
    s->storages = (item_storage *)xd_allocate(s->range.ctx, (size_t)count * sizeof *s->storages);
    XD_REQUIRE(s->range.ctx, s->storages, XD_ERROR_MEMORY, "%s: no room for %lld storages", s->range.label,
               (long long)count);
    for (int32_t i = 0; i < (int32_t)p->values.count; i++) {
        item_storage *t = &s->storages[used];
        const item_type *type;
        int64_t elements;
        int32_t key;
        if (pickle_at(p, i)->kind != PICKLE_STORAGE) continue;
        XD_TRY(item_read_storage(p, i, &key, &type, &elements));
        XD_TRY(file_copy_key(s, key, t->key));
        const int32_t view = pickle_item_value(p, pickle_at(p, i)->first, 5);
        PICKLE_REQUIRE_AT(p, pickle_at(p, i)->at, view < 0 || pickle_is(p, view, PICKLE_NONE),
                          "storage %s is a view of another, which is not undone", t->key);
        const int64_t size = type ? type->bytes : 1;
        PICKLE_REQUIRE_AT(p, pickle_at(p, i)->at, elements <= (INT64_C(1) << 62) / size,
                          "storage %s has %lld elements", t->key, (long long)elements);
        t->entry.length = (uint64_t)(elements * size);
        t->entry.crc32 = (uint32_t)size; /* bytes of an element: this form has no checksums, so */
        t->checked = true;
        used++;
    }
    if (used) qsort(s->storages, (size_t)used, sizeof *s->storages, file_by_key);
    for (int64_t i = 0; i < used; i++) { /* each tensor of a storage names it again */
        const item_storage *before = s->storage_count ? &s->storages[s->storage_count - 1] : NULL;
        if (!before || strcmp(before->key, s->storages[i].key) != 0) {
            s->storages[s->storage_count++] = s->storages[i];
            continue;
        }
        XD_REQUIRE(s->range.ctx,
                   before->entry.length == s->storages[i].entry.length &&
                       before->entry.crc32 == s->storages[i].entry.crc32,
                   XD_ERROR_FORMAT, "%s: storage %s has two sizes", s->range.label, before->key);
    }
    return XD_OK;
}

/* Behind the pickles: for each key of the list the number of elements, and the elements. */
static xd_result file_place_storages(file_source *s, const pickle *keys, uint64_t at) {
    PICKLE_REQUIRE_AT(keys, 0, pickle_is(keys, keys->root, PICKLE_LIST),
                      "no list of storages behind the value");
    file_source names = *s; /* whose texts are of that pickle */
    names.p = *keys;
    for (int32_t i = pickle_first(keys, keys->root); i >= 0; i = pickle_next(keys, i)) {
        char key[ITEM_KEY];
        unsigned char number[8];
        XD_TRY(file_copy_key(&names, pickle_item_at(keys, i)->value, key));
        item_storage *t = file_find_storage(s, key);
        XD_REQUIRE(s->range.ctx, t && !t->entry.found, XD_ERROR_FORMAT,
                   "%s: storage %s is listed, and no tensor has it, or it is listed twice", s->range.label,
                   key);
        XD_TRY(item_read(&s->range, at, sizeof number, number));
        const uint64_t elements = item_number(number, 8), left = s->range.length - at - 8;
        XD_REQUIRE(s->range.ctx,
                   elements <= (UINT64_C(1) << 62) / t->entry.crc32 &&
                       elements * t->entry.crc32 == t->entry.length,
                   XD_ERROR_FORMAT, "%s: storage %s has %llu elements, and its tensors say %llu bytes",
                   s->range.label, key, (unsigned long long)elements, (unsigned long long)t->entry.length);
        XD_REQUIRE(s->range.ctx, t->entry.length <= left, XD_ERROR_FORMAT,
                   "%s: storage %s has %llu bytes, and %llu are left", s->range.label, key,
                   (unsigned long long)t->entry.length, (unsigned long long)left);
        t->entry.begin = at + 8;
        t->entry.found = true;
        at = t->entry.begin + t->entry.length;
    }
    XD_REQUIRE(s->range.ctx, at == s->range.length, XD_ERROR_FORMAT, "%s: %llu bytes behind the last storage",
               s->range.label, (unsigned long long)(s->range.length - at));
    for (int64_t i = 0; i < s->storage_count; i++)
        XD_REQUIRE(s->range.ctx, s->storages[i].entry.found, XD_ERROR_FORMAT,
                   "%s: storage %s is not in the file", s->range.label, s->storages[i].key);
    return XD_OK;
}

static xd_result file_check_system(const pickle *p) {
    const int32_t little = pickle_find(p, p->root, "little_endian");
    PICKLE_REQUIRE_AT(p, 0, pickle_is(p, little, PICKLE_BOOL) && pickle_at(p, little)->integer == 1,
                      "the byte order is not \"little\"");
    return XD_OK;
}

static xd_result file_open_legacy(file_source *s) {
    const uint64_t most = s->range.length < FILE_LEGACY_MOST ? s->range.length : FILE_LEGACY_MOST;
    size_t at = FILE_MAGIC;
    pickle other;
    XD_TRY(item_load(&s->range, 0, most, &s->bytes));
    xd_result result = pickle_open_at(&other, s->range.ctx, s->range.label, s->bytes, (size_t)most, &at);
    if (result == XD_OK) result = file_check_system(&other);
    pickle_close(&other);
    XD_TRY(result);
    XD_TRY(pickle_open_at(&s->p, s->range.ctx, s->range.label, s->bytes, (size_t)most, &at));
    XD_TRY(file_list_storages(s));
    result = pickle_open_at(&other, s->range.ctx, s->range.label, s->bytes, (size_t)most, &at);
    if (result == XD_OK) result = file_place_storages(s, &other, at);
    pickle_close(&other);
    return result;
}

static xd_result file_open(xd_ctx *ctx, const char *path, file_source *s) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    static const char pointer[] = "version https://git-lfs.github.com/spec/";
    unsigned char begin[FILE_MAGIC + 64] = { 0 };
    s->range.ctx = ctx;
    s->range.label = path;
    int error = files->open(files->user, path, XD_FILE_READ, &s->range.file);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: cannot open: %s", path, strerror(error));
    s->open = true;
    error = files->size(files->user, s->range.file, &s->range.length);
    XD_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: no size: %s", path, strerror(error));
    const size_t bytes = s->range.length < sizeof begin ? (size_t)s->range.length : sizeof begin;
    XD_TRY(item_read(&s->range, 0, bytes, begin));
    XD_REQUIRE(ctx, bytes < sizeof pointer - 1 || memcmp(begin, pointer, sizeof pointer - 1) != 0,
               XD_ERROR_FORMAT,
               "%s is a pointer of Git LFS, not the file itself, which `git lfs pull` fetches", path);
    if (bytes >= 4 && item_number(begin, 4) == 0x04034b50) return file_open_archive(s);
    XD_REQUIRE(ctx, bytes >= FILE_MAGIC && memcmp(begin, file_magic, FILE_MAGIC) == 0, XD_ERROR_FORMAT,
               "%s: neither a zip archive nor the older form of torch.save", path);
    return file_open_legacy(s);
}

static void file_close(file_source *s) {
    if (!s->range.ctx) return;
    const xd_files *files = &xd_ctx_settings(s->range.ctx)->files;
    if (s->open) files->close(files->user, s->range.file);
    pickle_close(&s->p);
    xd_release(s->range.ctx, s->bytes);
    xd_release(s->range.ctx, s->storages);
    xd_release(s->range.ctx, (void *)s->range.label);
}

/* ---- the paths to tensors ---- */

/* The call that makes a tensor: a parameter is one of the tensor that it holds. */
static int32_t file_tensor_of(const pickle *p, int32_t value) {
    if (pickle_is_object(p, value, "_rebuild_parameter"))
        value = pickle_item_value(p, pickle_at(p, value)->first, 0);
    return pickle_is_object(p, value, "_rebuild_tensor_v2") ||
                   pickle_is_object(p, value, "_rebuild_tensor_v3")
               ? value
               : PICKLE_NOTHING;
}

static bool file_is_container(const pickle *p, int32_t value) {
    return pickle_is(p, value, PICKLE_DICT) || pickle_is(p, value, PICKLE_LIST) ||
           pickle_is(p, value, PICKLE_TUPLE);
}

/* Whether there is a tensor in a value; one that is too deep or in too much counts as none. */
static bool file_has_tensor(file_convert *f, const pickle *p, int32_t value, int depth) {
    if (file_tensor_of(p, value) >= 0) return true;
    if (!file_is_container(p, value) || depth > DCP_OBJECT_DEPTH) return false;
    for (int32_t i = pickle_first(p, value); i >= 0; i = pickle_next(p, i)) {
        if (++f->steps > FILE_STEPS) return false;
        if (file_has_tensor(f, p, pickle_item_at(p, i)->value, depth + 1)) return true;
    }
    return false;
}

/* PATH.KEY in new memory of the list of names. */
static xd_result file_join(file_convert *f, const char *path, const char *key, size_t bytes, char **out) {
    const size_t before = *path ? strlen(path) + 1 : 0;
    XD_REQUIRE(f->c.ctx, before + bytes <= DCP_NAME_MOST && !memchr(key, 0, bytes), XD_ERROR_FORMAT,
               "%s: a name of %llu bytes, of at most %d, or one with a NUL", f->c.desc->source,
               (unsigned long long)(before + bytes), DCP_NAME_MOST);
    *out = (char *)xd_allocate(f->c.ctx, before + bytes + 1);
    XD_REQUIRE(f->c.ctx, *out, XD_ERROR_MEMORY, "%s: no room for a name", f->c.desc->source);
    if (before) snprintf(*out, before + 1, "%s.", path);
    if (bytes) memcpy(*out + before, key, bytes);
    return XD_OK;
}

static xd_result file_add_tensor(file_convert *f, file_source *s, int32_t value, char *name) {
    const pickle *p = &s->p;
    const int64_t number = f->c.d.tensor_count;
    file_tensor *t = &f->tensors[number];
    char key[ITEM_KEY];
    int32_t text = PICKLE_NOTHING;
    XD_TRY(item_read_arguments(p, value, &t->t, &text));
    XD_TRY(file_copy_key(s, text, key));
    t->source = s;
    t->storage = file_find_storage(s, key);
    PICKLE_REQUIRE_AT(p, pickle_at(p, value)->at, t->storage, "storage %s is not in the file", key);
    if (t->t.dtype != XD_DTYPE_NONE)
        XD_TRY(item_check_tensor(p, pickle_at(p, value)->at, &t->storage->entry, key, &t->t));
    dcp_tensor *d = &f->c.d.tensors[number];
    dcp_chunk *chunk = &f->c.d.chunks[number];
    d->name.data = name;
    d->name.bytes = strlen(name);
    d->dtype = t->t.dtype;
    d->type = t->t.type;
    d->ndim = t->t.ndim;
    memcpy(d->shape, t->t.shape, sizeof d->shape);
    d->first = chunk->tensor = number;
    d->count = 1;
    memcpy(chunk->size, t->t.shape, sizeof chunk->size);
    f->c.d.tensor_count++;
    return XD_OK;
}

static xd_result file_walk(file_convert *f, file_source *s, int32_t value, char *name, int depth);

/* The members of a container; of the root, which is none of them, `name` is empty. */
static xd_result file_walk_members(file_convert *f, file_source *s, int32_t value, const char *name,
                                   int depth) {
    const pickle *p = &s->p;
    int64_t number = 0;
    for (int32_t i = pickle_first(p, value); i >= 0; i = pickle_next(p, i)) {
        char digits[24], *path = NULL;
        snprintf(digits, sizeof digits, "%lld", (long long)number++);
        const char *key = digits;
        size_t bytes = strlen(digits);
        if (pickle_is(p, value, PICKLE_DICT)) {
            const pickle_value *k = pickle_at(p, pickle_item_at(p, i)->value);
            PICKLE_REQUIRE_AT(p, k->at, k->kind == PICKLE_TEXT || k->kind == PICKLE_INTEGER,
                              "a key that is neither a text nor an integer");
            snprintf(digits, sizeof digits, "%lld", (long long)k->integer);
            bytes = k->kind == PICKLE_TEXT ? (size_t)k->integer : strlen(digits);
            key = k->kind == PICKLE_TEXT ? (const char *)p->bytes + k->at : digits;
            i = pickle_next(p, i);
        }
        XD_TRY(file_join(f, name, key, bytes, &path));
        XD_TRY(file_walk(f, s, pickle_item_at(p, i)->value, path, depth + 1));
    }
    return XD_OK;
}

/* Takes `name`, which stays as long as the conversion. */
static xd_result file_walk(file_convert *f, file_source *s, int32_t value, char *name, int depth) {
    const pickle *p = &s->p;
    const int32_t tensor = file_tensor_of(p, value);
    f->objects[f->object_count].name = name; /* the list owns all names */
    f->objects[f->object_count].value = PICKLE_NOTHING;
    XD_REQUIRE(p->ctx, ++f->object_count < FILE_TENSORS && f->steps <= FILE_STEPS, XD_ERROR_FORMAT,
               "%s: more than %d names, or paths to tensors through more than %d values", p->label,
               FILE_TENSORS, FILE_STEPS);
    if (tensor >= 0) return file_add_tensor(f, s, tensor, name);
    if (file_has_tensor(f, p, value, depth)) {
        XD_REQUIRE(p->ctx, depth < DCP_OBJECT_DEPTH, XD_ERROR_FORMAT, "%s: more than %d levels", p->label,
                   DCP_OBJECT_DEPTH);
        return file_walk_members(f, s, value, name, depth);
    }
    f->objects[f->object_count - 1].source = s;
    f->objects[f->object_count - 1].value = value;
    return XD_OK;
}

static xd_result file_read(file_convert *f, file_source *s) {
    const pickle *p = &s->p;
    PICKLE_REQUIRE_AT(p, 0, file_is_container(p, p->root) && file_tensor_of(p, p->root) < 0,
                      "the value of the file is no dict of tensors");
    return file_walk_members(f, s, p->root, "", 0);
}

/* ---- elements ---- */

/* Reads a storage once against the checksum that an archive has of it. */
static xd_result file_check_storage(file_convert *f, const file_tensor *t) {
    const item_entry *e = &t->storage->entry;
    uint32_t crc32 = 0;
    if (t->storage->checked) return XD_OK;
    for (uint64_t at = 0; at < e->length;) {
        const uint64_t left = e->length - at, now = left < DCP_WINDOW ? left : DCP_WINDOW;
        XD_TRY(item_read(&t->source->range, e->begin + at, (size_t)now, f->c.window));
        crc32 = item_crc32(crc32, f->c.window, (size_t)now);
        at += now;
    }
    t->storage->checked = true;
    return item_check_sum(&t->source->range, t->storage->key, e, crc32);
}

static xd_result file_copy_dense(dcp_flow *flow, const file_tensor *t) {
    const uint64_t size = xd_dtype_size(t->t.dtype), numel = (uint64_t)item_numel(t->t.shape, t->t.ndim);
    const uint64_t begin = t->storage->entry.begin + (uint64_t)t->t.offset * size, bytes = numel * size;
    for (uint64_t at = 0; at < bytes;) {
        const uint64_t left = bytes - at, now = left < DCP_WINDOW ? left : DCP_WINDOW;
        XD_TRY(item_read(&t->source->range, begin + at, (size_t)now, flow->c->window));
        XD_TRY(dcp_flow_put(flow, flow->c->window, (int64_t)(now / size)));
        at += now;
    }
    return XD_OK;
}

static xd_result file_copy_turned(dcp_flow *flow, const file_tensor *t) {
    unsigned char *storage;
    XD_TRY(item_load(&t->source->range, t->storage->entry.begin, t->storage->entry.length, &storage));
    const xd_result result = dcp_gather(flow, storage, &t->t);
    xd_release(t->source->range.ctx, storage);
    return result;
}

static xd_result file_copy_tensor(file_convert *f, int64_t number) {
    const file_tensor *t = &f->tensors[number];
    dcp_entry entry;
    if (f->c.index[number] < 0) return XD_OK;
    memset(&entry, 0, sizeof entry);
    entry.chunk = number;
    dcp_flow flow = dcp_flow_begin(&f->c, &entry);
    XD_TRY(file_check_storage(f, t));
    if (item_numel(t->t.shape, t->t.ndim) == 0) return XD_OK;
    return dcp_is_dense(&t->t) ? file_copy_dense(&flow, t) : file_copy_turned(&flow, t);
}

/* ---- the new directory ---- */

static xd_result file_write_objects(file_convert *f) {
    size_t skipped;
    for (int64_t i = 0; i < f->object_count; i++) {
        const file_object *o = &f->objects[i];
        if (o->value < 0 || f->c.desc->tensors_only || f->c.desc->select) continue;
        if (!dcp_is_wanted(f->c.desc, o->name, strlen(o->name), &skipped)) continue;
        f->c.d.object_count++;
        xd_json_write_key(&f->c.json, o->name);
        XD_TRY(dcp_write_value(&f->c, &o->source->p, o->value, 0));
    }
    return XD_OK;
}

static xd_result file_write_directory(file_convert *f, const char *directory) {
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    desc.entries = f->c.entries;
    desc.entry_count = f->c.entry_count;
    desc.max_shard_bytes = f->c.desc->max_shard_bytes;
    XD_TRY(file_write_objects(f)); /* before the tensors, which may be large: it may be refused */
    XD_TRY(xd_weights_writer_create(f->c.ctx, &desc, &f->c.writer));
    for (int64_t i = 0; i < f->c.d.tensor_count; i++) XD_TRY(file_copy_tensor(f, i));
    xd_weights_writer *writer = f->c.writer;
    f->c.writer = NULL;
    XD_TRY(xd_weights_writer_commit(writer));
    return dcp_write_objects(&f->c, directory);
}

static xd_result file_publish(file_convert *f) {
    xd_publish_directory *directory;
    const xd_publish_directory_desc whole = { f->c.desc->target };
    XD_TRY(dcp_check_target(&f->c));
    XD_TRY(dcp_list_tensors(&f->c));
    XD_TRY(xd_publish_directory_create(f->c.ctx, &whole, &directory));
    f->c.json = xd_json_writer_create(f->c.ctx);
    f->c.json.indent = 2;
    xd_json_write_object(&f->c.json);
    const xd_result result = file_write_directory(f, xd_publish_directory_path(directory));
    xd_weights_writer_abort(f->c.writer);
    xd_json_writer_destroy(&f->c.json);
    if (result == XD_OK) return xd_publish_directory_commit(directory);
    xd_publish_directory_abort(directory);
    return result;
}

/* ---- the files ---- */

/* Opens one more file; takes `path`. */
static xd_result file_add_source(file_convert *f, char *path) {
    XD_REQUIRE(f->c.ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", f->c.desc->source);
    file_source *s = &f->sources[f->source_count++];
    XD_TRY(file_open(f->c.ctx, path, s));
    return file_read(f, s);
}

static xd_result file_reserve(file_convert *f, int64_t sources) {
    xd_ctx *ctx = f->c.ctx;
    f->sources = (file_source *)xd_allocate(ctx, (size_t)sources * sizeof *f->sources);
    f->tensors = (file_tensor *)xd_allocate(ctx, FILE_TENSORS * sizeof *f->tensors);
    f->objects = (file_object *)xd_allocate(ctx, FILE_TENSORS * sizeof *f->objects);
    f->c.d.tensors = (dcp_tensor *)xd_allocate(ctx, FILE_TENSORS * sizeof *f->c.d.tensors);
    f->c.d.chunks = (dcp_chunk *)xd_allocate(ctx, FILE_TENSORS * sizeof *f->c.d.chunks);
    XD_REQUIRE(ctx, f->sources && f->tensors && f->objects && f->c.d.tensors && f->c.d.chunks,
               XD_ERROR_MEMORY, "%s: no room for a list of tensors", f->c.desc->source);
    return XD_OK;
}

/* The files of an index, each once. */
static xd_result file_open_index(file_convert *f, const xd_json *index, const char *path) {
    const xd_json *map = xd_json_find(index, "weight_map");
    const char *last = "";
    const void **names = (const void **)xd_allocate(f->c.ctx, xd_json_count(map) * sizeof *names);
    xd_result result = names ? file_reserve(f, (int64_t)xd_json_count(map))
                             : XD_FAIL(f->c.ctx, XD_ERROR_MEMORY, "%s: no room for names", path);
    size_t count = 0;
    for (const xd_json *e = xd_json_first(map); e && result == XD_OK; e = xd_json_next(e)) {
        const char *name = xd_json_string(e, NULL);
        names[count++] = name;
        const dcp_text text = { name, name ? strlen(name) : 0 };
        if (!name || !*name || !dcp_is_plain(&text))
            result = XD_FAIL(f->c.ctx, XD_ERROR_FORMAT,
                             "%s: a tensor does not lie in a file of the directory", path);
    }
    if (result == XD_OK && count) qsort(names, count, sizeof *names, file_by_text);
    for (size_t i = 0; i < count && result == XD_OK; i++) {
        if (strcmp(last, (const char *)names[i]) == 0) continue;
        last = (const char *)names[i];
        result = file_add_source(f, file_path(f->c.ctx, f->c.desc->source, last));
    }
    xd_release(f->c.ctx, (void *)names);
    return result;
}

/* The source: a file, or a directory with pytorch_model.bin or its index. */
static xd_result file_open_all(file_convert *f, bool directory) {
    xd_ctx *ctx = f->c.ctx;
    const char *source = f->c.desc->source;
    char *index = file_path(ctx, source, FILE_INDEX);
    XD_REQUIRE(ctx, index, XD_ERROR_MEMORY, "%s: no room for a path", source);
    xd_json *root = NULL;
    xd_result result = XD_OK;
    if (directory && file_is_there(ctx, index)) {
        result = xd_json_load(ctx, NULL, index, &root);
        if (result == XD_OK) result = file_open_index(f, root, index);
    } else {
        result = file_reserve(f, 1);
        if (result == XD_OK)
            result =
                file_add_source(f, directory ? file_path(ctx, source, FILE_SINGLE) : file_text(ctx, source));
    }
    xd_json_destroy(ctx, root);
    xd_release(ctx, index);
    return result;
}

/* Converts what torch.save has written. */
static xd_result file_convert_all(xd_ctx *ctx, const dcp_convert_desc *desc, bool directory) {
    file_convert f;
    memset(&f, 0, sizeof f);
    f.c.ctx = ctx;
    f.c.desc = desc;
    xd_result result = file_open_all(&f, directory);
    if (result == XD_OK) result = file_publish(&f);
    for (int64_t i = 0; i < f.source_count; i++) file_close(&f.sources[i]);
    for (int64_t i = 0; i < f.object_count; i++) xd_release(ctx, f.objects[i].name);
    xd_release(ctx, f.sources);
    xd_release(ctx, f.tensors);
    xd_release(ctx, f.objects);
    xd_release(ctx, f.c.d.tensors);
    xd_release(ctx, f.c.d.chunks);
    xd_release(ctx, f.c.index);
    xd_release(ctx, f.c.entries);
    xd_release(ctx, f.c.names);
    xd_release(ctx, f.c.window);
    return result;
}

#endif
