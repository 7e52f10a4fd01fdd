/* dcp_metadata.h - what the .metadata of a PyTorch checkpoint says: tensors, the chunks that they were saved in, other objects, and
 * which bytes of which file each of them is. All of it is checked before a file with data is opened: every element of every tensor
 * must be in exactly one chunk, every chunk in one range of a file of the directory, and no two ranges may share bytes. */
#ifndef DCP_METADATA_H
#define DCP_METADATA_H

#include "dcp_item.h"

#include <stdlib.h>

enum {
    DCP_NAME_MOST = 4096,   /* bytes */
    DCP_COMPARED = 1 << 28, /* pairs of chunks that may be compared */
    DCP_CHUNK_LEAST = 8     /* bytes of a pickle that say a chunk */
};

/* A text within the pickle. */
typedef struct dcp_text {
    const char *data;
    size_t bytes;
} dcp_text;

typedef struct dcp_tensor {
    dcp_text name;
    xd_dtype dtype;   /* NONE for a type that cannot be read */
    const char *type; /* PyTorch's name of it */
    int ndim;
    int64_t shape[ITEM_DIMS];
    int64_t first, count; /* of the chunks */
} dcp_tensor;

typedef struct dcp_chunk {
    int64_t tensor;
    int64_t begin[ITEM_DIMS], size[ITEM_DIMS];
    int64_t entry; /* where it is; PICKLE_NOTHING for one of no elements */
} dcp_chunk;

/* A range of a file, and what it is: the chunk of a tensor that begins there, or an object. */
typedef struct dcp_entry {
    dcp_text name;
    int ndim; /* -1: an object */
    int64_t begin[ITEM_DIMS];
    dcp_text file;
    uint64_t offset, length;
    int64_t chunk; /* PICKLE_NOTHING: an object, or no elements */
    bool used;
} dcp_entry;

typedef struct dcp {
    xd_ctx *ctx;
    char *label; /* path of .metadata */
    char *bytes;
    pickle p;
    dcp_tensor *tensors;
    dcp_text *objects; /* by name */
    dcp_chunk *chunks;
    dcp_entry *entries; /* by name and begin, and then by file and offset */
    int64_t tensor_count, object_count, chunk_count, entry_count;
} dcp;

static int dcp_compare_texts(const dcp_text *a, const dcp_text *b) {
    const size_t common = a->bytes < b->bytes ? a->bytes : b->bytes;
    const int order = memcmp(a->data, b->data, common);
    return order ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static const char *dcp_show(const dcp_text *text) {
    return pickle_show(text->data, text->bytes);
}

/* ---- tensors ---- */

static xd_result dcp_read_text(const dcp *d, int32_t value, const char *what, dcp_text *out) {
    const pickle *p = &d->p;
    const size_t at = value >= 0 ? pickle_at(p, value)->at : 0;
    PICKLE_REQUIRE_AT(p, at, pickle_is(p, value, PICKLE_TEXT), "%s is no text", what);
    out->data = (const char *)p->bytes + at;
    out->bytes = (size_t)pickle_at(p, value)->integer;
    PICKLE_REQUIRE_AT(
        p, at, out->bytes > 0 && out->bytes <= DCP_NAME_MOST && !memchr(out->data, 0, out->bytes),
        "%s has %llu bytes, of 1 to %d, or a NUL", what, (unsigned long long)out->bytes, DCP_NAME_MOST);
    return XD_OK;
}

/* The dtype of properties, whose state is a tuple, or a dict in older files. */
static xd_result dcp_read_type(const dcp *d, const dcp_text *name, int32_t properties,
                               const item_type **out) {
    const pickle *p = &d->p;
    PICKLE_REQUIRE_AT(p, 0, pickle_is_object(p, properties, "TensorProperties"),
                      "tensor \"%s\" has no properties", dcp_show(name));
    int32_t dtype = pickle_item_value(p, pickle_at(p, properties)->last, 0);
    if (dtype < 0) dtype = pickle_find(p, properties, "dtype");
    *out = item_find_type(p, dtype);
    PICKLE_REQUIRE_AT(p, pickle_at(p, properties)->at, *out, "tensor \"%s\" has no type", dcp_show(name));
    return XD_OK;
}

static xd_result dcp_check_chunk(const dcp *d, const dcp_tensor *t, const dcp_chunk *c, size_t at) {
    const pickle *p = &d->p;
    for (int i = 0; i < t->ndim; i++)
        PICKLE_REQUIRE_AT(p, at, c->begin[i] <= t->shape[i] && c->size[i] <= t->shape[i] - c->begin[i],
                          "tensor \"%s\": a chunk of %lld at %lld, and dimension %d has %lld",
                          dcp_show(&t->name), (long long)c->size[i], (long long)c->begin[i], i,
                          (long long)t->shape[i]);
    return XD_OK;
}

static xd_result dcp_read_chunks(dcp *d, const dcp_tensor *t, int64_t tensor, int32_t list) {
    const pickle *p = &d->p;
    for (int32_t i = pickle_first(p, list); i >= 0; i = pickle_next(p, i)) {
        const int32_t value = pickle_item_at(p, i)->value;
        const size_t at = pickle_at(p, value)->at;
        dcp_chunk *c = &d->chunks[d->chunk_count++];
        c->tensor = tensor;
        c->entry = PICKLE_NOTHING;
        PICKLE_REQUIRE_AT(p, at,
                          pickle_is_object(p, value, "ChunkStorageMetadata") &&
                              item_numbers(p, pickle_find(p, value, "offsets"), c->begin) == t->ndim &&
                              item_numbers(p, pickle_find(p, value, "sizes"), c->size) == t->ndim,
                          "tensor \"%s\": a chunk without offsets and sizes of %d dimensions",
                          dcp_show(&t->name), t->ndim);
        XD_TRY(dcp_check_chunk(d, t, c, at));
    }
    return XD_OK;
}

static xd_result dcp_read_tensor(dcp *d, const dcp_text *name, int32_t value) {
    const pickle *p = &d->p;
    const size_t at = pickle_at(p, value)->at;
    dcp_tensor *t = &d->tensors[d->tensor_count];
    const int32_t list = pickle_find(p, value, "chunks");
    const item_type *type;
    t->name = *name;
    XD_TRY(dcp_read_type(d, name, pickle_find(p, value, "properties"), &type));
    t->dtype = type->dtype;
    t->type = type->name;
    t->ndim = item_numbers(p, pickle_find(p, value, "size"), t->shape);
    PICKLE_REQUIRE_AT(p, at, t->ndim >= 0, "tensor \"%s\" has no size of at most %d dimensions",
                      dcp_show(name), ITEM_DIMS);
    const int64_t numel = item_numel(t->shape, t->ndim);
    PICKLE_REQUIRE_AT(p, at, numel >= 0 && numel <= (INT64_C(1) << 62) / type->bytes,
                      "tensor \"%s\" has more than 2^62 bytes", dcp_show(name));
    t->first = d->chunk_count;
    t->count = pickle_at(p, list)->integer;
    return dcp_read_chunks(d, t, d->tensor_count++, list);
}

/* How many tensors, objects and chunks there are. A list of chunks may be that of many tensors, so there is a bound. */
static xd_result dcp_count(dcp *d, int32_t names) {
    const pickle *p = &d->p;
    const int64_t most = (int64_t)(p->length / DCP_CHUNK_LEAST);
    for (int32_t i = pickle_first(p, names); i >= 0; i = pickle_next(p, pickle_next(p, i))) {
        const int32_t value = pickle_item_at(p, pickle_next(p, i))->value;
        const bool object = pickle_is_object(p, value, "BytesStorageMetadata");
        PICKLE_REQUIRE_AT(p, pickle_at(p, value)->at,
                          object || pickle_is_object(p, value, "TensorStorageMetadata"),
                          "an item of state_dict_metadata is neither a tensor nor an object");
        d->object_count += object;
        d->tensor_count += !object;
        if (object) continue;
        const int32_t list = pickle_find(p, value, "chunks");
        PICKLE_REQUIRE_AT(p, pickle_at(p, value)->at, pickle_is(p, list, PICKLE_LIST),
                          "a tensor without a list of chunks");
        d->chunk_count += pickle_at(p, list)->integer;
        PICKLE_REQUIRE_AT(p, pickle_at(p, value)->at, d->chunk_count <= most,
                          "more than %lld chunks in %llu bytes", (long long)most,
                          (unsigned long long)p->length);
    }
    return XD_OK;
}

static xd_result dcp_reserve(dcp *d) {
    d->tensors = (dcp_tensor *)xd_allocate(d->ctx, (size_t)d->tensor_count * sizeof *d->tensors);
    d->objects = (dcp_text *)xd_allocate(d->ctx, (size_t)d->object_count * sizeof *d->objects);
    d->chunks = (dcp_chunk *)xd_allocate(d->ctx, (size_t)d->chunk_count * sizeof *d->chunks);
    d->entries = (dcp_entry *)xd_allocate(d->ctx, (size_t)d->entry_count * sizeof *d->entries);
    XD_REQUIRE(d->ctx, d->tensors && d->objects && d->chunks && d->entries, XD_ERROR_MEMORY,
               "%s: no room for %lld tensors in %lld chunks", d->label, (long long)d->tensor_count,
               (long long)d->chunk_count);
    d->tensor_count = d->object_count = d->chunk_count = d->entry_count = 0;
    return XD_OK;
}

static int dcp_by_name(const void *a, const void *b) {
    return dcp_compare_texts((const dcp_text *)a, (const dcp_text *)b);
}

static xd_result dcp_read_names(dcp *d, int32_t names) {
    const pickle *p = &d->p;
    for (int32_t i = pickle_first(p, names); i >= 0; i = pickle_next(p, pickle_next(p, i))) {
        const int32_t value = pickle_item_at(p, pickle_next(p, i))->value;
        dcp_text name;
        XD_TRY(dcp_read_text(d, pickle_item_at(p, i)->value, "the name of a tensor", &name));
        if (pickle_is_object(p, value, "BytesStorageMetadata"))
            d->objects[d->object_count++] = name;
        else
            XD_TRY(dcp_read_tensor(d, &name, value));
    }
    if (d->object_count) qsort(d->objects, (size_t)d->object_count, sizeof *d->objects, dcp_by_name);
    for (int64_t i = 0; i < d->object_count; i++)
        PICKLE_REQUIRE_AT(p, 0, i == 0 || dcp_compare_texts(&d->objects[i - 1], &d->objects[i]) != 0,
                          "object \"%s\" is there twice", dcp_show(&d->objects[i]));
    for (int64_t i = 0; i < d->tensor_count && d->object_count; i++)
        PICKLE_REQUIRE_AT(p, 0,
                          !bsearch(&d->tensors[i].name, d->objects, (size_t)d->object_count,
                                   sizeof *d->objects, dcp_by_name),
                          "\"%s\" is a tensor and an object", dcp_show(&d->tensors[i].name));
    return XD_OK;
}

/* ---- whether each element is there once ---- */

static bool dcp_is_empty(const dcp_chunk *c, int ndim) {
    for (int i = 0; i < ndim; i++)
        if (c->size[i] == 0) return true;
    return false;
}

/* Chunks in the order of one of their dimensions. */
typedef struct dcp_order {
    const dcp_chunk *chunk;
    int64_t begin, end;
} dcp_order;

static int dcp_by_begin(const void *a, const void *b) {
    const int64_t one = ((const dcp_order *)a)->begin, other = ((const dcp_order *)b)->begin;
    return (one > other) - (one < other);
}

static int64_t dcp_sort_along(const dcp_tensor *t, const dcp_chunk *chunks, int dim, dcp_order *order) {
    int64_t distinct = 1, count = 0;
    for (int64_t i = 0; i < t->count; i++) {
        if (dcp_is_empty(&chunks[i], t->ndim)) continue;
        order[count].chunk = &chunks[i];
        order[count].begin = t->ndim ? chunks[i].begin[dim] : 0;
        order[count].end = t->ndim ? chunks[i].begin[dim] + chunks[i].size[dim] : 1;
        count++;
    }
    if (count) qsort(order, (size_t)count, sizeof *order, dcp_by_begin);
    for (int64_t i = 1; i < count; i++) distinct += order[i].begin != order[i - 1].begin;
    return distinct;
}

static bool dcp_overlap(const dcp_chunk *a, const dcp_chunk *b, int ndim) {
    for (int i = 0; i < ndim; i++)
        if (a->begin[i] >= b->begin[i] + b->size[i] || b->begin[i] >= a->begin[i] + a->size[i]) return false;
    return true;
}

/* `order` has `count` chunks, by their beginnings in one dimension. */
static xd_result dcp_check_order(const dcp *d, const dcp_tensor *t, const dcp_order *order, int64_t count,
                                 int64_t *compared) {
    const pickle *p = &d->p;
    int64_t held = 0;
    for (int64_t i = 0; i < count; i++) {
        held += item_numel(order[i].chunk->size,
                           t->ndim); /* cannot overflow: those before have nothing in common */
        for (int64_t k = i + 1; k < count && order[k].begin < order[i].end; k++) {
            PICKLE_REQUIRE_AT(p, 0, ++*compared <= DCP_COMPARED,
                              "tensor \"%s\": too many chunks side by side", dcp_show(&t->name));
            PICKLE_REQUIRE_AT(p, 0, !dcp_overlap(order[i].chunk, order[k].chunk, t->ndim),
                              "tensor \"%s\": two of its %lld chunks overlap", dcp_show(&t->name),
                              (long long)t->count);
        }
    }
    PICKLE_REQUIRE_AT(p, 0, held == item_numel(t->shape, t->ndim),
                      "tensor \"%s\" has %lld elements, and its chunks have %lld", dcp_show(&t->name),
                      (long long)item_numel(t->shape, t->ndim), (long long)held);
    return XD_OK;
}

static xd_result dcp_check_cover(const dcp *d, const dcp_tensor *t, int64_t *compared) {
    int64_t most = 0, count = 0;
    int dim = 0;
    dcp_order *order = (dcp_order *)xd_allocate(d->ctx, (size_t)t->count * sizeof *order);
    XD_REQUIRE(d->ctx, order, XD_ERROR_MEMORY, "%s: no room for %lld chunks", d->label, (long long)t->count);
    for (int64_t i = 0; i < t->count; i++) count += !dcp_is_empty(&d->chunks[t->first + i], t->ndim);
    for (int i = 0; i < t->ndim; i++) { /* the one that tells most of them apart */
        const int64_t distinct = dcp_sort_along(t, d->chunks + t->first, i, order);
        if (distinct > most) dim = i;
        if (distinct > most) most = distinct;
    }
    dcp_sort_along(t, d->chunks + t->first, dim, order);
    const xd_result result = dcp_check_order(d, t, order, count, compared);
    xd_release(d->ctx, order);
    return result;
}

/* ---- where they are ---- */

static xd_result dcp_read_integer(const dcp *d, int32_t object, const char *key, uint64_t *out) {
    const pickle *p = &d->p;
    const int32_t value = pickle_find(p, object, key);
    PICKLE_REQUIRE_AT(p, pickle_at(p, object)->at,
                      pickle_is(p, value, PICKLE_INTEGER) && pickle_at(p, value)->integer >= 0,
                      "a place without a number \"%s\" of 0 or more", key);
    *out = (uint64_t)pickle_at(p, value)->integer;
    return XD_OK;
}

/* A name of the directory itself. */
static bool dcp_is_plain(const dcp_text *name) {
    for (size_t i = 0; i < name->bytes; i++) {
        const unsigned char c = (unsigned char)name->data[i];
        if (c < 0x20 || c == 0x7f || c == '/' || c == '\\' || c == ':') return false;
    }
    return !(name->bytes == 1 && name->data[0] == '.') &&
           !(name->bytes == 2 && memcmp(name->data, "..", 2) == 0);
}

static xd_result dcp_read_entry(dcp *d, int32_t key, int32_t value) {
    const pickle *p = &d->p;
    dcp_entry *e = &d->entries[d->entry_count++];
    const size_t at = pickle_at(p, value)->at;
    e->chunk = PICKLE_NOTHING;
    PICKLE_REQUIRE_AT(p, at,
                      pickle_is_object(p, key, "MetadataIndex") && pickle_is_object(p, value, "_StorageInfo"),
                      "an item of storage_data that is no place of a chunk");
    XD_TRY(dcp_read_text(d, pickle_find(p, key, "fqn"), "the name of a place", &e->name));
    const int32_t begin = pickle_find(p, key, "offset"),
                  other = pickle_find(p, value, "transform_descriptors");
    e->ndim = begin < 0 || pickle_is(p, begin, PICKLE_NONE) ? -1 : item_numbers(p, begin, e->begin);
    PICKLE_REQUIRE_AT(p, at, begin < 0 || pickle_is(p, begin, PICKLE_NONE) || e->ndim >= 0,
                      "the place of a chunk of \"%s\" whose offset is none", dcp_show(&e->name));
    PICKLE_REQUIRE_AT(p, at, other < 0 || pickle_is(p, other, PICKLE_NONE),
                      "\"%s\" is transformed, which is not undone", dcp_show(&e->name));
    XD_TRY(dcp_read_text(d, pickle_find(p, value, "relative_path"), "the name of a file", &e->file));
    PICKLE_REQUIRE_AT(p, at, dcp_is_plain(&e->file), "\"%s\" is in \"%s\", which is no file of the directory",
                      dcp_show(&e->name), dcp_show(&e->file));
    XD_TRY(dcp_read_integer(d, value, "offset", &e->offset));
    return dcp_read_integer(d, value, "length", &e->length);
}

static int dcp_compare_entries(const dcp_entry *a, const dcp_entry *b) {
    const int names = dcp_compare_texts(&a->name, &b->name);
    if (names) return names;
    if (a->ndim != b->ndim) return a->ndim < b->ndim ? -1 : 1;
    for (int i = 0; i < a->ndim; i++)
        if (a->begin[i] != b->begin[i]) return a->begin[i] < b->begin[i] ? -1 : 1;
    return 0;
}

static int dcp_by_what(const void *a, const void *b) {
    return dcp_compare_entries((const dcp_entry *)a, (const dcp_entry *)b);
}

static int dcp_by_place(const void *a, const void *b) {
    const dcp_entry *one = (const dcp_entry *)a, *other = (const dcp_entry *)b;
    const int files = dcp_compare_texts(&one->file, &other->file);
    return files ? files : (one->offset > other->offset) - (one->offset < other->offset);
}

static dcp_entry *dcp_find_entry(const dcp *d, const dcp_text *name, int ndim, const int64_t *begin) {
    dcp_entry wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.name = *name;
    wanted.ndim = ndim;
    if (ndim > 0) memcpy(wanted.begin, begin, (size_t)ndim * sizeof *begin);
    return d->entry_count
               ? (dcp_entry *)bsearch(&wanted, d->entries, (size_t)d->entry_count, sizeof wanted, dcp_by_what)
               : NULL;
}

/* Chunks without elements may share a place, or have none. */
static xd_result dcp_find_chunks(dcp *d) {
    const pickle *p = &d->p;
    for (int64_t i = 0; i < d->chunk_count; i++) {
        const dcp_tensor *t = &d->tensors[d->chunks[i].tensor];
        const bool empty = dcp_is_empty(&d->chunks[i], t->ndim);
        dcp_entry *e = dcp_find_entry(d, &t->name, t->ndim, d->chunks[i].begin);
        PICKLE_REQUIRE_AT(p, 0, e || empty, "a chunk of \"%s\" is in no file", dcp_show(&t->name));
        if (!e) continue;
        PICKLE_REQUIRE_AT(p, 0, empty || e->chunk < 0, "\"%s\" has one place twice", dcp_show(&t->name));
        e->used = true;
        if (!empty) e->chunk = i;
    }
    for (int64_t i = 0; i < d->object_count; i++) {
        dcp_entry *e = dcp_find_entry(d, &d->objects[i], -1, NULL);
        PICKLE_REQUIRE_AT(p, 0, e, "object \"%s\" is in no file", dcp_show(&d->objects[i]));
        e->used = true;
    }
    return XD_OK;
}

/* Every range is that of something, and no byte is in two of them. Afterwards entries are in the order of the files. */
static xd_result dcp_check_entries(dcp *d) {
    const pickle *p = &d->p;
    for (int64_t i = 0; i < d->entry_count; i++)
        PICKLE_REQUIRE_AT(p, 0, d->entries[i].used, "a place in \"%s\" for \"%s\", of which that is no part",
                          dcp_show(&d->entries[i].file), dcp_show(&d->entries[i].name));
    if (d->entry_count) qsort(d->entries, (size_t)d->entry_count, sizeof *d->entries, dcp_by_place);
    for (int64_t i = 0; i < d->entry_count; i++) {
        const dcp_entry *e = &d->entries[i], *before = i ? &d->entries[i - 1] : NULL;
        PICKLE_REQUIRE_AT(p, 0,
                          !before || dcp_compare_texts(&before->file, &e->file) != 0 ||
                              before->length <= e->offset - before->offset,
                          "\"%s\" and \"%s\" share bytes of \"%s\"", dcp_show(&before->name),
                          dcp_show(&e->name), dcp_show(&e->file));
    }
    return XD_OK;
}

static xd_result dcp_read_entries(dcp *d, int32_t places) {
    const pickle *p = &d->p;
    for (int32_t i = pickle_first(p, places); i >= 0; i = pickle_next(p, pickle_next(p, i)))
        XD_TRY(dcp_read_entry(d, pickle_item_at(p, i)->value, pickle_item_at(p, pickle_next(p, i))->value));
    if (d->entry_count) qsort(d->entries, (size_t)d->entry_count, sizeof *d->entries, dcp_by_what);
    for (int64_t i = 1; i < d->entry_count; i++)
        PICKLE_REQUIRE_AT(p, 0, dcp_compare_entries(&d->entries[i - 1], &d->entries[i]) != 0,
                          "a chunk of \"%s\" has two places", dcp_show(&d->entries[i].name));
    XD_TRY(dcp_find_chunks(d));
    return dcp_check_entries(d);
}

/* ---- all of it ---- */

static xd_result dcp_read(dcp *d) {
    const pickle *p = &d->p;
    int64_t compared = 0;
    PICKLE_REQUIRE_AT(p, 0, pickle_is_object(p, p->root, "Metadata"), "the pickle is no Metadata");
    const int32_t names = pickle_find(p, p->root, "state_dict_metadata"),
                  places = pickle_find(p, p->root, "storage_data");
    PICKLE_REQUIRE_AT(p, 0, pickle_is(p, names, PICKLE_DICT) && pickle_is(p, places, PICKLE_DICT),
                      "no dicts state_dict_metadata and storage_data");
    XD_TRY(dcp_count(d, names));
    d->entry_count = pickle_at(p, places)->integer / 2;
    XD_TRY(dcp_reserve(d));
    XD_TRY(dcp_read_names(d, names));
    for (int64_t i = 0; i < d->tensor_count; i++) XD_TRY(dcp_check_cover(d, &d->tensors[i], &compared));
    return dcp_read_entries(d, places);
}

/* Reads the bytes of a .metadata, which with the label must outlive the object; it is to be closed whatever the result. */
static xd_result dcp_open_memory(dcp *d, xd_ctx *ctx, const char *label, const void *bytes, size_t length) {
    d->ctx = ctx;
    XD_TRY(pickle_open(&d->p, ctx, label, bytes, length, PICKLE_METADATA));
    return dcp_read(d);
}

static void dcp_close(dcp *d) {
    if (!d->ctx) return;
    pickle_close(&d->p);
    xd_release(d->ctx, d->tensors);
    xd_release(d->ctx, d->objects);
    xd_release(d->ctx, d->chunks);
    xd_release(d->ctx, d->entries);
    xd_release(d->ctx, d->bytes);
    xd_release(d->ctx, d->label);
}

#endif
