/* dcp.h - turns a checkpoint of PyTorch's torch.distributed.checkpoint into a model directory: the tensors, whole, into safetensors
 * files, and what else there is (steps, learning rates) into objects.json. The directory appears when all of it is there. */
#ifndef DCP_H
#define DCP_H

#include "dcp_metadata.h"

#include <math.h>

#define DCP_METADATA ".metadata"
#define DCP_OBJECTS "objects.json"

enum {
    DCP_WINDOW = 4 << 20,      /* bytes of elements in memory; a tensor that is turned is there whole */
    DCP_OBJECT_DEPTH = 16,     /* of lists and dicts in an object */
    DCP_OBJECT_MOST = 1 << 20, /* values in all objects */
    DCP_PATH = 4096
};

typedef struct dcp_convert_desc {
    const char *source, *target;
    const char *select;  /* only tensors whose names begin so, without that; NULL -> all, and the objects */
    const char *without; /* what begins so is left out; NULL -> nothing */
    bool tensors_only;   /* objects are left out */
    uint64_t max_shard_bytes;
} dcp_convert_desc;

/* A conversion. */
typedef struct dcp_convert {
    xd_ctx *ctx;
    const dcp_convert_desc *desc;
    dcp d;
    int64_t *index; /* [tensor_count] of a tensor in the new files, -1 for those that are left out */
    xd_weights_entry *entries;
    int64_t entry_count;
    char *names;
    xd_weights_writer *writer;
    xd_json_writer json;
    int64_t values; /* written into json */
    unsigned char *window;
    intptr_t file; /* that is open */
    uint64_t file_bytes;
    const dcp_text *file_name; /* NULL: none is */
} dcp_convert;

/* Whether a tensor comes along; *skipped bytes of its name do not. */
static bool dcp_is_wanted(const dcp_convert_desc *desc, const char *name, size_t bytes, size_t *skipped) {
    const size_t select = desc->select ? strlen(desc->select) : 0,
                 without = desc->without ? strlen(desc->without) : 0;
    *skipped = select;
    if (without && bytes >= without && memcmp(name, desc->without, without) == 0) return false;
    return bytes > select && (select == 0 || memcmp(name, desc->select, select) == 0);
}

/* ---- elements ---- */

/* Elements of a chunk, which come in their order, on their way into the whole tensor. */
typedef struct dcp_flow {
    dcp_convert *c;
    const dcp_tensor *tensor;
    const dcp_chunk *chunk;
    int64_t index; /* in the new files */
    int64_t run;   /* elements that lie side by side in the tensor, */
    int dims;      /* and the dimensions that say which run it is */
    int64_t stride[ITEM_DIMS];
    int64_t position; /* elements that have arrived */
} dcp_flow;

static dcp_flow dcp_flow_begin(dcp_convert *c, const dcp_entry *e) {
    dcp_flow f;
    int64_t stride = 1;
    memset(&f, 0, sizeof f);
    f.c = c;
    f.chunk = &c->d.chunks[e->chunk];
    f.tensor = &c->d.tensors[f.chunk->tensor];
    f.index = c->index[f.chunk->tensor];
    f.run = 1;
    f.dims = f.tensor->ndim;
    for (int d = f.tensor->ndim - 1; d >= 0; stride *= f.tensor->shape[d--]) f.stride[d] = stride;
    for (bool whole = true; whole && f.dims > 0; f.dims--) {
        whole = f.chunk->size[f.dims - 1] == f.tensor->shape[f.dims - 1];
        f.run *= f.chunk->size[f.dims - 1];
    }
    return f;
}

/* Where run `number` begins in the tensor. */
static int64_t dcp_flow_place(const dcp_flow *f, int64_t number) {
    int64_t place = 0;
    for (int d = 0; d < f->tensor->ndim; d++) place += f->chunk->begin[d] * f->stride[d];
    for (int d = f->dims - 1; d >= 0; d--) {
        place += number % f->chunk->size[d] * f->stride[d];
        number /= f->chunk->size[d];
    }
    return place;
}

static xd_result dcp_flow_put(dcp_flow *f, const unsigned char *data, int64_t count) {
    const size_t size = xd_dtype_size(f->tensor->dtype);
    while (count > 0) {
        const int64_t within = f->position % f->run, left = f->run - within,
                      now = left < count ? left : count;
        const int64_t place = dcp_flow_place(f, f->position / f->run) + within;
        XD_TRY(xd_weights_writer_write(f->c->writer, f->index, (uint64_t)place * size, (size_t)now * size,
                                       data));
        data += (size_t)now * size;
        count -= now;
        f->position += now;
    }
    return XD_OK;
}

static bool dcp_is_dense(const item_tensor *t) {
    int64_t stride = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] != 1 && t->stride[d] != stride) return false;
        stride *= t->shape[d];
    }
    return true;
}

/* The storage is read in order, and those of its elements that are the tensor's are handed on. */
static xd_result dcp_copy_dense(dcp_flow *f, const item_range *r, const item_entry *data,
                                const item_tensor *t) {
    const uint64_t size = xd_dtype_size(t->dtype), numel = (uint64_t)item_numel(t->shape, t->ndim);
    const uint64_t begin = (uint64_t)t->offset * size, end = begin + numel * size;
    uint32_t crc32 = 0;
    for (uint64_t at = 0; at < data->length;) {
        const uint64_t left = data->length - at, now = left < DCP_WINDOW ? left : DCP_WINDOW;
        const uint64_t low = at > begin ? at : begin, high = at + now < end ? at + now : end;
        XD_TRY(item_read(r, data->begin + at, (size_t)now, f->c->window));
        crc32 = item_crc32(crc32, f->c->window, (size_t)now);
        if (low < high) XD_TRY(dcp_flow_put(f, f->c->window + (low - at), (int64_t)((high - low) / size)));
        at += now;
    }
    return item_check_sum(r, "data/0", data, crc32);
}

/* A tensor whose elements have another order in the storage. */
static xd_result dcp_gather(dcp_flow *f, const unsigned char *storage, const item_tensor *t) {
    const size_t size = xd_dtype_size(t->dtype), room = DCP_WINDOW / size;
    const int64_t numel = item_numel(t->shape, t->ndim);
    int64_t index[ITEM_DIMS] = { 0 }, place = t->offset;
    for (int64_t done = 0; done < numel;) {
        const int64_t now = numel - done < (int64_t)room ? numel - done : (int64_t)room;
        for (int64_t i = 0; i < now; i++) {
            memcpy(f->c->window + (size_t)i * size, storage + (size_t)place * size, size);
            for (int d = t->ndim - 1; d >= 0; d--) {
                place += t->stride[d];
                if (++index[d] < t->shape[d]) break;
                place -= index[d] * t->stride[d];
                index[d] = 0;
            }
        }
        XD_TRY(dcp_flow_put(f, f->c->window, now));
        done += now;
    }
    return XD_OK;
}

static xd_result dcp_copy_turned(dcp_flow *f, const item_range *r, const item_entry *data,
                                 const item_tensor *t) {
    unsigned char *storage;
    XD_TRY(item_load(r, data->begin, data->length, &storage));
    xd_result result = item_check_sum(r, "data/0", data, item_crc32(0, storage, (size_t)data->length));
    if (result == XD_OK) result = dcp_gather(f, storage, t);
    xd_release(r->ctx, storage);
    return result;
}

static xd_result dcp_copy_chunk(dcp_convert *c, const item_range *r, const dcp_entry *e) {
    dcp_flow flow = dcp_flow_begin(c, e);
    item_archive archive;
    item_tensor t;
    if (flow.index < 0) return XD_OK;
    XD_TRY(item_open_tensor(r, &archive, &t));
    XD_REQUIRE(c->ctx, t.dtype == flow.tensor->dtype, XD_ERROR_DTYPE, "%s: %s, and " DCP_METADATA " says %s",
               r->label, xd_dtype_name(t.dtype), xd_dtype_name(flow.tensor->dtype));
    const size_t bytes = (size_t)t.ndim * sizeof *t.shape;
    XD_REQUIRE(
        c->ctx, t.ndim == flow.tensor->ndim && memcmp(t.shape, flow.chunk->size, bytes) == 0, XD_ERROR_SHAPE,
        "%s: not the shape that " DCP_METADATA " says, of %lld elements: %lld elements in %d dimensions",
        r->label, (long long)item_numel(flow.chunk->size, flow.tensor->ndim),
        (long long)item_numel(t.shape, t.ndim), t.ndim);
    return dcp_is_dense(&t) ? dcp_copy_dense(&flow, r, &archive.data, &t)
                            : dcp_copy_turned(&flow, r, &archive.data, &t);
}

/* ---- objects ---- */

static xd_result dcp_write_value(dcp_convert *c, const pickle *p, int32_t value, int depth);

/* The text of a value of the pickle, NUL-terminated. */
static xd_result dcp_write_text(dcp_convert *c, const pickle *p, int32_t value, bool key) {
    const pickle_value *v = pickle_at(p, value);
    const char *text = (const char *)p->bytes + v->at;
    if (!key) {
        xd_json_write_string_n(&c->json, text, (size_t)v->integer);
        return XD_OK;
    }
    char *copy = (char *)xd_allocate(c->ctx, (size_t)v->integer + 1);
    XD_REQUIRE(c->ctx, copy, XD_ERROR_MEMORY, "%s: no room for a key", p->label);
    memcpy(copy, text, (size_t)v->integer);
    xd_json_write_key(&c->json, copy);
    xd_release(c->ctx, copy);
    return XD_OK;
}

static xd_result dcp_write_container(dcp_convert *c, const pickle *p, int32_t value, int depth) {
    const pickle_value v = *pickle_at(p, value);
    PICKLE_REQUIRE_AT(p, v.at, depth < DCP_OBJECT_DEPTH, "more than %d levels", DCP_OBJECT_DEPTH);
    if (v.kind == PICKLE_DICT)
        xd_json_write_object(&c->json);
    else
        xd_json_write_array(&c->json);
    for (int32_t i = pickle_first(p, value); i >= 0; i = pickle_next(p, i)) {
        if (v.kind == PICKLE_DICT) {
            const int32_t key = pickle_item_at(p, i)->value;
            char number[24];
            PICKLE_REQUIRE_AT(p, v.at, pickle_is(p, key, PICKLE_TEXT) || pickle_is(p, key, PICKLE_INTEGER),
                              "a key that is neither a text nor an integer");
            snprintf(number, sizeof number, "%lld", (long long)pickle_at(p, key)->integer);
            if (pickle_is(p, key, PICKLE_TEXT))
                XD_TRY(dcp_write_text(c, p, key, true));
            else
                xd_json_write_key(&c->json, number);
            i = pickle_next(p, i);
        }
        XD_TRY(dcp_write_value(c, p, pickle_item_at(p, i)->value, depth + 1));
    }
    xd_json_write_end(&c->json);
    return XD_OK;
}

static xd_result dcp_write_value(dcp_convert *c, const pickle *p, int32_t value, int depth) {
    const pickle_value *v = pickle_at(p, value);
    PICKLE_REQUIRE_AT(p, v->at, ++c->values <= DCP_OBJECT_MOST, "more than %d values in objects",
                      DCP_OBJECT_MOST);
    switch (v->kind) {
    case PICKLE_NONE: xd_json_write_null(&c->json); return XD_OK;
    case PICKLE_BOOL: xd_json_write_bool(&c->json, v->integer != 0); return XD_OK;
    case PICKLE_INTEGER: xd_json_write_int64(&c->json, v->integer); return XD_OK;
    case PICKLE_TEXT: return dcp_write_text(c, p, value, false);
    case PICKLE_FLOAT:
        if (isfinite(v->real))
            xd_json_write_double(&c->json, v->real);
        else
            xd_json_write_string(&c->json, isnan(v->real) ? "nan" : v->real > 0 ? "inf" : "-inf");
        return XD_OK;
    case PICKLE_TUPLE:
    case PICKLE_LIST:
    case PICKLE_DICT: return dcp_write_container(c, p, value, depth);
    default: break;
    }
    PICKLE_REQUIRE_AT(
        p, v->at, false,
        "an object of more than numbers, texts, lists and dicts; --tensors-only leaves such out");
}

static xd_result dcp_copy_object(dcp_convert *c, const item_range *r, const dcp_entry *e) {
    item_archive archive;
    unsigned char *bytes;
    char name[DCP_NAME_MOST + 1];
    pickle p;
    size_t skipped;
    if (c->desc->tensors_only || c->desc->select) return XD_OK;
    if (!dcp_is_wanted(c->desc, e->name.data, e->name.bytes, &skipped)) return XD_OK;
    XD_TRY(item_open(r, &archive));
    XD_TRY(item_load_pickle(r, &archive, &bytes));
    xd_result result = pickle_open(&p, c->ctx, r->label, bytes, (size_t)archive.pickle.length, PICKLE_TENSOR);
    memcpy(name, e->name.data, e->name.bytes);
    name[e->name.bytes] = '\0';
    if (result == XD_OK)
        xd_json_write_key(&c->json, name);
    else if (result == XD_ERROR_FORMAT) /* of a class that is not in the list, for example */
        result =
            XD_FAIL(c->ctx, result, "%s; --tensors-only leaves objects out", xd_last_error(c->ctx)->message);
    if (result == XD_OK) result = dcp_write_value(c, &p, p.root, 0);
    pickle_close(&p);
    xd_release(c->ctx, bytes);
    return result;
}

/* ---- files ---- */

static void dcp_close_file(dcp_convert *c) {
    const xd_files *files = &xd_ctx_settings(c->ctx)->files;
    if (c->file_name) files->close(files->user, c->file);
    c->file_name = NULL;
}

static xd_result dcp_open_file(dcp_convert *c, const dcp_text *name) {
    const xd_files *files = &xd_ctx_settings(c->ctx)->files;
    char path[DCP_PATH];
    if (c->file_name && dcp_compare_texts(c->file_name, name) == 0) return XD_OK;
    dcp_close_file(c);
    const int length = snprintf(path, sizeof path, "%s/%.*s", c->desc->source, (int)name->bytes, name->data);
    XD_REQUIRE(c->ctx, length > 0 && length < (int)sizeof path, XD_ERROR_ARGUMENT,
               "%s/%s: the path is too long", c->desc->source, dcp_show(name));
    int error = files->open(files->user, path, XD_FILE_READ, &c->file);
    XD_REQUIRE(c->ctx, error == 0, error == ENOENT ? XD_ERROR_MISSING : XD_ERROR_IO, "%s/%s: cannot open: %s",
               c->desc->source, dcp_show(name), strerror(error));
    c->file_name = name;
    error = files->size(files->user, c->file, &c->file_bytes);
    XD_REQUIRE(c->ctx, error == 0, XD_ERROR_IO, "%s/%s: no size: %s", c->desc->source, dcp_show(name),
               strerror(error));
    return XD_OK;
}

static xd_result dcp_copy_entry(dcp_convert *c, const dcp_entry *e) {
    char label[300];
    item_range r;
    if (!e->used || (e->ndim >= 0 && e->chunk < 0)) return XD_OK;
    XD_TRY(dcp_open_file(c, &e->file));
    snprintf(label, sizeof label, "%s at %llu, \"%s\"", dcp_show(&e->file), (unsigned long long)e->offset,
             dcp_show(&e->name));
    r.ctx = c->ctx;
    r.label = label;
    r.file = c->file;
    r.begin = e->offset;
    r.length = e->length;
    XD_REQUIRE(c->ctx, r.begin <= c->file_bytes && r.length <= c->file_bytes - r.begin, XD_ERROR_FORMAT,
               "%s: %llu bytes there, and the file has %llu", label, (unsigned long long)r.length,
               (unsigned long long)c->file_bytes);
    return e->ndim >= 0 ? dcp_copy_chunk(c, &r, e) : dcp_copy_object(c, &r, e);
}

/* ---- the new directory ---- */

/* A type is a property of its tensor: without that the others can be converted. */
static xd_result dcp_check_type(const dcp_convert *c, xd_dtype dtype, const char *type,
                                const dcp_text *name) {
    XD_REQUIRE(c->ctx, dtype != XD_DTYPE_NONE, XD_ERROR_UNSUPPORTED,
               "%s: tensor \"%s\" is of type %s, which cannot be converted; --without %s leaves it out",
               c->desc->source, dcp_show(name), type, dcp_show(name));
    return XD_OK;
}

static xd_result dcp_list_tensors(dcp_convert *c) {
    size_t bytes = 1, skipped;
    for (int64_t i = 0; i < c->d.tensor_count; i++) bytes += c->d.tensors[i].name.bytes + 1;
    c->index = (int64_t *)xd_allocate(c->ctx, (size_t)c->d.tensor_count * sizeof *c->index);
    c->entries = (xd_weights_entry *)xd_allocate(c->ctx, (size_t)c->d.tensor_count * sizeof *c->entries);
    c->names = (char *)xd_allocate(c->ctx, bytes);
    c->window = (unsigned char *)xd_allocate(c->ctx, DCP_WINDOW);
    XD_REQUIRE(c->ctx, c->index && c->entries && c->names && c->window, XD_ERROR_MEMORY,
               "no room for a list of %lld tensors", (long long)c->d.tensor_count);
    char *name = c->names;
    for (int64_t i = 0; i < c->d.tensor_count; i++) {
        const dcp_tensor *t = &c->d.tensors[i];
        xd_weights_entry *e = &c->entries[c->entry_count];
        c->index[i] = PICKLE_NOTHING;
        if (!dcp_is_wanted(c->desc, t->name.data, t->name.bytes, &skipped)) continue;
        XD_TRY(dcp_check_type(c, t->dtype, t->type, &t->name));
        memcpy(name, t->name.data + skipped, t->name.bytes - skipped);
        e->name = name;
        name += t->name.bytes - skipped + 1; /* the memory was zero */
        e->dtype = t->dtype;
        e->ndim = t->ndim;
        e->shape = t->shape;
        c->index[i] = c->entry_count++;
    }
    XD_REQUIRE(c->ctx, c->entry_count > 0 || !c->desc->select, XD_ERROR_MISSING,
               "no tensor of %s begins with \"%s\"", c->desc->source, c->desc->select);
    return XD_OK;
}

static xd_result dcp_write_objects(dcp_convert *c, const char *directory) {
    char path[DCP_PATH];
    const char *text;
    size_t bytes;
    xd_json_write_end(&c->json);
    if (c->d.object_count == 0 || c->desc->tensors_only || c->desc->select) return XD_OK;
    const int length = snprintf(path, sizeof path, "%s/" DCP_OBJECTS, directory);
    XD_REQUIRE(c->ctx, length > 0 && length < (int)sizeof path, XD_ERROR_ARGUMENT, "%s: the path is too long",
               directory);
    XD_TRY(xd_json_writer_text(&c->json, &text, &bytes));
    return xd_file_save(c->ctx, path, text, bytes);
}

static xd_result dcp_write_directory(dcp_convert *c, const char *directory) {
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    desc.entries = c->entries;
    desc.entry_count = c->entry_count;
    desc.max_shard_bytes = c->desc->max_shard_bytes;
    XD_TRY(xd_weights_writer_create(c->ctx, &desc, &c->writer));
    for (int64_t i = 0; i < c->d.entry_count; i++) XD_TRY(dcp_copy_entry(c, &c->d.entries[i]));
    xd_weights_writer *writer = c->writer;
    c->writer = NULL;
    XD_TRY(xd_weights_writer_commit(writer));
    return dcp_write_objects(c, directory);
}

static void dcp_count_name(void *count, const char *name) {
    (void)name;
    ++*(int *)count;
}

/* What is in a directory would be replaced as a whole, so it must be empty. */
static xd_result dcp_check_target(const dcp_convert *c) {
    const xd_files *files = &xd_ctx_settings(c->ctx)->files;
    int count = 0;
    const int error =
        files->list ? files->list(files->user, c->desc->target, dcp_count_name, &count) : ENOENT;
    XD_REQUIRE(c->ctx, error == ENOENT || (error == 0 && count == 0), XD_ERROR_STATE, "%s: %s",
               c->desc->target, error ? strerror(error) : "there are files in it");
    return XD_OK;
}

static xd_result dcp_publish(dcp_convert *c) {
    xd_publish_directory *directory;
    XD_TRY(dcp_check_target(c));
    XD_TRY(dcp_list_tensors(c));
    XD_TRY(xd_publish_directory_create(c->ctx, &(xd_publish_directory_desc){ c->desc->target }, &directory));
    c->json = xd_json_writer_create(c->ctx);
    c->json.indent = 2;
    xd_json_write_object(&c->json);
    const xd_result result = dcp_write_directory(c, xd_publish_directory_path(directory));
    xd_weights_writer_abort(c->writer);
    xd_json_writer_destroy(&c->json);
    dcp_close_file(c);
    if (result == XD_OK) return xd_publish_directory_commit(directory);
    xd_publish_directory_abort(directory);
    return result;
}

/* Reads .metadata of the source. */
static xd_result dcp_open(dcp *d, xd_ctx *ctx, const char *source) {
    size_t bytes = 0;
    const size_t room = strlen(source) + sizeof "/" DCP_METADATA;
    d->ctx = ctx;
    d->label = (char *)xd_allocate(ctx, room);
    XD_REQUIRE(ctx, d->label, XD_ERROR_MEMORY, "no room for a path");
    snprintf(d->label, room, "%s/" DCP_METADATA, source);
    XD_TRY(xd_file_load(ctx, d->label, 0, &d->bytes, &bytes));
    return dcp_open_memory(d, ctx, d->label, d->bytes, bytes);
}

static xd_result dcp_convert_directory(xd_ctx *ctx, const dcp_convert_desc *desc) {
    dcp_convert c;
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    c.desc = desc;
    xd_result result = dcp_open(&c.d, ctx, desc->source);
    if (result == XD_OK) result = dcp_publish(&c);
    dcp_close(&c.d);
    xd_release(ctx, c.index);
    xd_release(ctx, c.entries);
    xd_release(ctx, c.names);
    xd_release(ctx, c.window);
    return result;
}

#endif
