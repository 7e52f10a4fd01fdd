/* dcp_join.h - one model of the pieces that ranks have written: what HuggingFaceStorageWriter of torch.distributed.checkpoint and
 * xd_weights_export with `pieces` leave, or any other model directory. */
#ifndef DCP_JOIN_H
#define DCP_JOIN_H

#include "dcp_file.h"

/* A tensor on its way: boxes of it that lie side by side and fit into the window. */
typedef struct join_tensor {
    const xd_weights_tensor *info;
    int64_t index, size[64]; /* of the reader; of a box */
    int64_t count;           /* elements of the tensor */
    int outer;               /* dimensions of which a box has one index, but for the last of them */
} join_tensor;

static join_tensor join_begin(const xd_weights *reader, int64_t index) {
    join_tensor t;
    int64_t room;
    memset(&t, 0, sizeof t);
    t.info = xd_weights_at(reader, index);
    t.index = index;
    t.count = 1;
    room = (int64_t)(DCP_WINDOW / xd_dtype_size(t.info->dtype));
    for (int d = 0; d < t.info->ndim; d++) t.count *= t.info->shape[d];
    for (int d = t.info->ndim - 1; d >= 0 && t.count > 0; d--) {
        t.size[d] = t.info->shape[d] < room ? t.info->shape[d] : room;
        if (t.size[d] < t.info->shape[d] && t.outer == 0) t.outer = d + 1;
        room = t.size[d] < t.info->shape[d] ? 1 : room / t.size[d];
    }
    return t;
}

static xd_result join_copy(dcp_convert *c, xd_weights *reader, const join_tensor *t, int64_t to) {
    const size_t size = xd_dtype_size(t->info->dtype);
    int64_t offset[64] = { 0 }, extent[64];
    for (int64_t done = 0; done < t->count;) {
        int64_t now = 1;
        memcpy(extent, t->size, sizeof extent);
        if (t->outer) {
            const int last = t->outer - 1;
            const int64_t left = t->info->shape[last] - offset[last];
            if (left < extent[last]) extent[last] = left;
        }
        for (int d = 0; d < t->info->ndim; d++) now *= extent[d];
        const xd_weights_read_desc box = { offset, extent, 0, 0 };
        XD_TRY(xd_weights_read(reader, t->index, &box, c->window));
        XD_TRY(xd_weights_writer_write(c->writer, to, (uint64_t)done * size, (size_t)now * size, c->window));
        done += now;
        for (int d = t->outer - 1; d >= 0; d--) {
            offset[d] += extent[d];
            if (offset[d] < t->info->shape[d]) break;
            offset[d] = 0;
        }
    }
    return XD_OK;
}

/* The tensors that are selected. */
static xd_result join_list(dcp_convert *c, const xd_weights *reader) {
    const int64_t count = xd_weights_describe(reader).tensor_count;
    size_t skipped;
    c->index = (int64_t *)xd_allocate(c->ctx, (size_t)count * sizeof *c->index);
    c->entries = (xd_weights_entry *)xd_allocate(c->ctx, (size_t)count * sizeof *c->entries);
    c->window = (unsigned char *)xd_allocate(c->ctx, DCP_WINDOW);
    XD_REQUIRE(c->ctx, c->index && c->entries && c->window, XD_ERROR_MEMORY,
               "no room for a list of %lld tensors", (long long)count);
    for (int64_t i = 0; i < count; i++) {
        const xd_weights_tensor *t = xd_weights_at(reader, i);
        xd_weights_entry *e = &c->entries[c->entry_count];
        const dcp_text name = { t->name, strlen(t->name) };
        if (!dcp_is_wanted(c->desc, t->name, name.bytes, &skipped)) continue;
        XD_TRY(dcp_check_type(c, t->dtype, t->type, &name));
        e->name = t->name + skipped;
        e->dtype = t->dtype;
        e->ndim = t->ndim;
        e->shape = t->shape;
        c->index[c->entry_count++] = i;
    }
    XD_REQUIRE(c->ctx, c->entry_count > 0 || !c->desc->select, XD_ERROR_MISSING,
               "no tensor of %s begins with \"%s\"", c->desc->source, c->desc->select);
    return XD_OK;
}

static xd_result join_write(dcp_convert *c, xd_weights *reader, const char *directory) {
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    desc.entries = c->entries;
    desc.entry_count = c->entry_count;
    desc.max_shard_bytes = c->desc->max_shard_bytes;
    XD_TRY(xd_weights_writer_create(c->ctx, &desc, &c->writer));
    for (int64_t i = 0; i < c->entry_count; i++) {
        const join_tensor t = join_begin(reader, c->index[i]);
        XD_TRY(join_copy(c, reader, &t, i));
    }
    xd_weights_writer *writer = c->writer;
    c->writer = NULL;
    return xd_weights_writer_commit(writer);
}

static xd_result join_publish(dcp_convert *c, xd_weights *reader) {
    xd_publish_directory *directory;
    XD_TRY(dcp_check_target(c));
    XD_TRY(join_list(c, reader));
    XD_TRY(xd_publish_directory_create(c->ctx, &(xd_publish_directory_desc){ c->desc->target }, &directory));
    const xd_result result = join_write(c, reader, xd_publish_directory_path(directory));
    xd_weights_writer_abort(c->writer);
    if (result == XD_OK) return xd_publish_directory_commit(directory);
    xd_publish_directory_abort(directory);
    return result;
}

/* Whether there is a .metadata, which must then be read. */
static bool join_is_pickled(xd_ctx *ctx, const char *source) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    char path[DCP_PATH];
    intptr_t file;
    const int length = snprintf(path, sizeof path, "%s/" DCP_METADATA, source);
    if (length < 0 || length >= (int)sizeof path) return true;
    const int error = files->open(files->user, path, XD_FILE_READ, &file);
    if (error == 0) files->close(files->user, file);
    return error != ENOENT;
}

static bool join_has(xd_ctx *ctx, const char *source, const char *name) {
    char path[DCP_PATH];
    const int length = snprintf(path, sizeof path, "%s/%s", source, name);
    return length > 0 && length < (int)sizeof path && file_is_there(ctx, path);
}

/* Whether there are files of torch.save, and nothing that is preferred to them. */
static bool join_is_saved(xd_ctx *ctx, const char *source) {
    return (join_has(ctx, source, FILE_SINGLE) || join_has(ctx, source, FILE_INDEX)) &&
           !join_has(ctx, source, "model.safetensors") &&
           !join_has(ctx, source, "model.safetensors.index.json");
}

/* Converts a directory of any form, or a file of torch.save. */
static xd_result join_directory(xd_ctx *ctx, const dcp_convert_desc *desc) {
    dcp_convert c;
    xd_weights_desc from;
    xd_weights *reader = NULL;
    if (file_is_there(ctx, desc->source)) return file_convert_all(ctx, desc, false);
    if (join_is_pickled(ctx, desc->source)) return dcp_convert_directory(ctx, desc);
    if (join_is_saved(ctx, desc->source)) return file_convert_all(ctx, desc, true);
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    c.desc = desc;
    memset(&from, 0, sizeof from);
    from.directory = desc->source;
    xd_result result = xd_weights_open(ctx, &from, &reader);
    if (result == XD_OK) result = join_publish(&c, reader);
    xd_weights_close(reader);
    xd_release(ctx, c.index);
    xd_release(ctx, c.entries);
    xd_release(ctx, c.window);
    return result;
}

#endif
