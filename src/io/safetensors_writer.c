/* Writing safetensors files, at offsets known beforehand. */

#include "base/json.h"
#include "base/publish_internal.h"
#include "io/internal.h"

#include <string.h>

/* ---- the plan of a file ---- */

/* The header fits behind them in 63 bits. */
#define XDI_SAFETENSORS_DATA ((uint64_t)INT64_MAX - 8 - XDI_SAFETENSORS_LIMIT)

static xd_result xdi_safetensors_check_name(xd_ctx *ctx, const xd_weights_entry *e, int64_t index) {
    XD_REQUIRE(ctx, e->name && e->name[0], XD_ERROR_ARGUMENT, "tensor %lld has no name", (long long)index);
    XD_REQUIRE(ctx, strcmp(e->name, XDI_SAFETENSORS_METADATA) != 0, XD_ERROR_ARGUMENT,
               "tensor %lld is named %s, which is the name of something else", (long long)index,
               XDI_SAFETENSORS_METADATA);
    const size_t length = strlen(e->name), valid = xdi_json_valid_bytes(e->name, length);
    XD_REQUIRE(ctx, length <= XDI_SAFETENSORS_NAME, XD_ERROR_ARGUMENT,
               "the name of tensor %lld has %llu bytes, allowed are %d", (long long)index,
               (unsigned long long)length, (int)XDI_SAFETENSORS_NAME);
    XD_REQUIRE(ctx, valid == length, XD_ERROR_ARGUMENT,
               "the name of tensor %lld is not UTF-8 from byte %llu on", (long long)index,
               (unsigned long long)valid);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_safetensors_check_entry(xd_ctx *ctx, const xd_weights_entry *e, int64_t index,
                                                 uint64_t *bytes) {
    XD_TRY(xdi_safetensors_check_name(ctx, e, index));
    XD_REQUIRE(ctx, xd_dtype_size(e->dtype) > 0, XD_ERROR_ARGUMENT, "tensor \"%.80s\" has no dtype", e->name);
    XD_REQUIRE(ctx, e->ndim >= 0 && e->ndim <= XDI_SAFETENSORS_DIMS, XD_ERROR_ARGUMENT,
               "tensor \"%.80s\" has %d dimensions, allowed are %d", e->name, e->ndim,
               (int)XDI_SAFETENSORS_DIMS);
    XD_REQUIRE(ctx, e->ndim == 0 || e->shape, XD_ERROR_ARGUMENT,
               "tensor \"%.80s\" has %d dimensions but no shape", e->name, e->ndim);
    const int bad = xdi_safetensors_bytes(e->dtype, e->ndim, e->shape, bytes);
    XD_REQUIRE(ctx, bad < 0, XD_ERROR_ARGUMENT,
               "tensor \"%.80s\": size %lld of dimension %d is negative or brings it beyond 2^63 bytes",
               e->name, (long long)e->shape[bad], bad);
    return XD_OK;
}

static int xdi_safetensors_by_name(const void *a, const void *b) {
    return strcmp(((const xd_weights_entry *)a)->name, ((const xd_weights_entry *)b)->name);
}

XD_PRIVATE xd_result xdi_safetensors_check_repeats(xd_ctx *ctx, const xd_weights_entry *entries,
                                                   int64_t count, const void **order) {
    for (int64_t i = 0; i < count; i++) order[i] = &entries[i];
    xdi_sort(order, (size_t)count, xdi_safetensors_by_name);
    for (int64_t i = 1; i < count; i++) {
        const int64_t one = (const xd_weights_entry *)order[i - 1] - entries;
        const int64_t other = (const xd_weights_entry *)order[i] - entries;
        XD_REQUIRE(ctx, strcmp(entries[one].name, entries[other].name) != 0, XD_ERROR_ARGUMENT,
                   "tensors %lld and %lld are both named \"%.80s\"", (long long)(one < other ? one : other),
                   (long long)(one < other ? other : one), entries[one].name);
    }
    return XD_OK;
}

/* A file being planned. */
typedef struct xdi_safetensors_draft {
    const xd_weights_writer_desc *desc;
    const void **order;      /* [entry_count] entries, or pairs of the metadata */
    uint64_t *begin, *bytes; /* [entry_count], by the caller's index; begin in the data area */
    uint64_t data_bytes;
    xd_json_writer header;
} xdi_safetensors_draft;

static int xdi_safetensors_by_key(const void *a, const void *b) {
    return strcmp(((const xd_weights_pair *)a)->key, ((const xd_weights_pair *)b)->key);
}

static xd_result xdi_safetensors_check_pairs(xd_ctx *ctx, const xdi_safetensors_draft *p) {
    const xd_weights_writer_desc *d = p->desc;
    for (int64_t i = 0; i < d->metadata_count; i++) {
        const xd_weights_pair *pair = &d->metadata[i];
        XD_REQUIRE(ctx, pair->key && pair->value, XD_ERROR_ARGUMENT, "pair %lld of the metadata has no %s",
                   (long long)i, pair->key ? "value" : "key");
        XD_REQUIRE(ctx, strcmp(pair->key, "format") != 0, XD_ERROR_ARGUMENT,
                   "pair %lld of the metadata is \"format\", which every file has already", (long long)i);
        const bool key = xdi_json_valid_bytes(pair->key, strlen(pair->key)) == strlen(pair->key);
        XD_REQUIRE(ctx, key && xdi_json_valid_bytes(pair->value, strlen(pair->value)) == strlen(pair->value),
                   XD_ERROR_ARGUMENT, "the %s of pair %lld of the metadata is not UTF-8",
                   key ? "value" : "key", (long long)i);
        p->order[i] = pair;
    }
    xdi_sort(p->order, (size_t)d->metadata_count, xdi_safetensors_by_key);
    for (int64_t i = 1; i < d->metadata_count; i++)
        XD_REQUIRE(ctx, xdi_safetensors_by_key(p->order[i - 1], p->order[i]) != 0, XD_ERROR_ARGUMENT,
                   "the metadata has the key \"%.80s\" twice", ((const xd_weights_pair *)p->order[i])->key);
    return XD_OK;
}

static xd_result xdi_safetensors_check_plan(xd_ctx *ctx, xdi_safetensors_draft *p) {
    const xd_weights_writer_desc *d = p->desc;
    for (int64_t i = 0; i < d->entry_count; i++) {
        XD_TRY(xdi_safetensors_check_entry(ctx, &d->entries[i], i, &p->bytes[i]));
        XD_REQUIRE(ctx, p->bytes[i] <= XDI_SAFETENSORS_DATA - p->data_bytes, XD_ERROR_ARGUMENT,
                   "tensor \"%.80s\" has %llu bytes, the ones before it %llu: a file has less than 2^63",
                   d->entries[i].name, (unsigned long long)p->bytes[i], (unsigned long long)p->data_bytes);
        p->data_bytes += p->bytes[i];
    }
    XD_TRY(xdi_safetensors_check_repeats(ctx, d->entries, d->entry_count, p->order));
    return xdi_safetensors_check_pairs(ctx, p);
}

/* Wide elements first, so that every tensor is aligned to its own width; then by name. */
static int xdi_safetensors_by_rank(const void *a, const void *b) {
    const xd_weights_entry *x = (const xd_weights_entry *)a, *y = (const xd_weights_entry *)b;
    if (x->dtype != y->dtype) return x->dtype > y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

static void xdi_safetensors_write_entry(xd_json_writer *w, const xd_weights_entry *e, uint64_t begin,
                                        uint64_t end) {
    xd_json_write_key(w, e->name);
    xd_json_write_object(w);
    xd_json_write_key(w, "dtype");
    xd_json_write_string(w, xd_dtype_name(e->dtype));
    xd_json_write_key(w, "shape");
    xd_json_write_array(w);
    for (int i = 0; i < e->ndim; i++) xd_json_write_int64(w, e->shape[i]);
    xd_json_write_end(w);
    xd_json_write_key(w, "data_offsets");
    xd_json_write_array(w);
    xd_json_write_uint64(w, begin);
    xd_json_write_uint64(w, end);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

static void xdi_safetensors_write_metadata(xd_json_writer *w, const xd_weights_writer_desc *d) {
    xd_json_write_key(w, XDI_SAFETENSORS_METADATA);
    xd_json_write_object(w);
    xd_json_write_key(w, "format");
    xd_json_write_string(w, "pt");
    for (int64_t i = 0; i < d->metadata_count; i++) {
        xd_json_write_key(w, d->metadata[i].key);
        xd_json_write_string(w, d->metadata[i].value);
    }
    xd_json_write_end(w);
}

/* Assigns an offset to every tensor and builds the header's text. */
static void xdi_safetensors_place(xdi_safetensors_draft *p) {
    const xd_weights_writer_desc *d = p->desc;
    uint64_t end = 0;
    for (int64_t i = 0; i < d->entry_count; i++) p->order[i] = &d->entries[i];
    xdi_sort(p->order, (size_t)d->entry_count, xdi_safetensors_by_rank);
    xd_json_write_object(&p->header);
    xdi_safetensors_write_metadata(&p->header, d);
    for (int64_t i = 0; i < d->entry_count; i++) {
        const int64_t index = (const xd_weights_entry *)p->order[i] - d->entries;
        p->begin[index] = end;
        end += p->bytes[index];
        xdi_safetensors_write_entry(&p->header, &d->entries[index], p->begin[index], end);
    }
    xd_json_write_end(&p->header);
}

/* The result, in one block: the struct, the arrays, the header. */
static xd_result xdi_safetensors_pack(xd_ctx *ctx, xdi_safetensors_draft *p, xd_weights_layout **out) {
    const size_t alignment = p->desc->alignment ? p->desc->alignment : 8,
                 count = (size_t)p->desc->entry_count;
    const char *text;
    size_t bytes;
    XD_TRY(xd_json_writer_text(&p->header, &text, &bytes));
    const uint64_t padded = ((8 + bytes + alignment - 1) & ~(uint64_t)(alignment - 1)) - 8;
    XD_REQUIRE(ctx, padded <= XDI_SAFETENSORS_LIMIT, XD_ERROR_ARGUMENT,
               "a header of %llu bytes, allowed are %d", (unsigned long long)padded,
               (int)XDI_SAFETENSORS_LIMIT);
    const size_t header_bytes = 8 + (size_t)padded;
    xd_weights_layout *layout =
        (xd_weights_layout *)xd_allocate(ctx, sizeof *layout + 2 * count * sizeof(uint64_t) + header_bytes);
    XD_REQUIRE(ctx, layout, XD_ERROR_MEMORY, "no room for a header of %llu bytes",
               (unsigned long long)padded);
    uint64_t *begin = (uint64_t *)(layout + 1), *sizes = begin + count;
    unsigned char *header = (unsigned char *)(sizes + count);
    for (size_t i = 0; i < count; i++) begin[i] = header_bytes + p->begin[i];
    if (count) memcpy(sizes, p->bytes, count * sizeof *sizes);
    for (int i = 0; i < 8; i++) header[i] = (unsigned char)(padded >> (8 * i));
    memcpy(header + 8, text, bytes);
    memset(header + 8 + bytes, ' ', header_bytes - 8 - bytes);
    layout->header = header;
    layout->header_bytes = header_bytes;
    layout->file_bytes = header_bytes + p->data_bytes;
    layout->begin = begin;
    layout->bytes = sizes;
    *out = layout;
    return XD_OK;
}

static xd_result xdi_safetensors_check_counts(xd_ctx *ctx, const xd_weights_writer_desc *d) {
    const size_t alignment = d->alignment ? d->alignment : 8;
    XD_REQUIRE(ctx, d->entry_count >= 0 && d->entry_count <= XDI_SAFETENSORS_LIMIT / 32, XD_ERROR_ARGUMENT,
               "%lld tensors, allowed are %d", (long long)d->entry_count, (int)XDI_SAFETENSORS_LIMIT / 32);
    XDI_GIVEN_LIST(ctx, d->entries, d->entry_count);
    XDI_GIVEN_LIST(ctx, d->metadata, d->metadata_count);
    XD_REQUIRE(ctx, d->metadata_count >= 0 && d->metadata_count <= XDI_SAFETENSORS_LIMIT / 6,
               XD_ERROR_ARGUMENT, "%lld pairs of metadata, allowed are %d", (long long)d->metadata_count,
               (int)XDI_SAFETENSORS_LIMIT / 6);
    XD_REQUIRE(ctx, alignment >= 8 && (alignment & (alignment - 1)) == 0, XD_ERROR_ARGUMENT,
               "alignment %llu is no power of two from 8 on", (unsigned long long)alignment);
    return XD_OK;
}

XD_API xd_result xd_weights_plan(xd_ctx *ctx, const xd_weights_writer_desc *desc, xd_weights_layout **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    xdi_safetensors_draft p;
    XD_TRY(xdi_safetensors_check_counts(ctx, desc));
    const size_t count = (size_t)desc->entry_count, pairs = (size_t)desc->metadata_count;
    memset(&p, 0, sizeof p);
    p.desc = desc;
    p.order = (const void **)xd_allocate(ctx, (count > pairs ? count : pairs) * sizeof *p.order);
    p.begin = (uint64_t *)xd_allocate(ctx, 2 * count * sizeof *p.begin);
    p.header = xd_json_writer_create(ctx);
    xd_result result = XD_OK;
    if (!p.order || !p.begin)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room to plan %lld tensors", (long long)count);
    p.bytes = p.begin ? p.begin + count : NULL;
    if (result == XD_OK) result = xdi_safetensors_check_plan(ctx, &p);
    if (result == XD_OK) {
        xdi_safetensors_place(&p);
        result = xdi_safetensors_pack(ctx, &p, out);
    }
    xd_json_writer_destroy(&p.header);
    xd_release(ctx, p.begin);
    xd_release(ctx, p.order);
    return result;
}

/* ---- writing ---- */

struct xdi_safetensors_writer {
    xd_ctx *ctx;
    xdi_publish *file;
    xd_weights_layout *layout;
    const char **names; /* [count], copies */
    xdi_written written;
    int64_t count;
};

/* The names of the tensors, for messages: the desc is gone when one is needed. */
static xd_result xdi_safetensors_keep_names(xdi_safetensors_writer *writer,
                                            const xd_weights_writer_desc *desc) {
    size_t bytes = (size_t)writer->count * sizeof *writer->names;
    for (int64_t i = 0; i < writer->count; i++) bytes += strlen(desc->entries[i].name) + 1;
    writer->names = (const char **)xd_allocate(writer->ctx, bytes);
    XD_REQUIRE(writer->ctx, writer->names, XD_ERROR_MEMORY, "no room for the names of %lld tensors",
               (long long)writer->count);
    char *text = (char *)(writer->names + writer->count);
    for (int64_t i = 0; i < writer->count; i++) {
        const size_t length = strlen(desc->entries[i].name) + 1;
        memcpy(text, desc->entries[i].name, length);
        writer->names[i] = text;
        text += length;
    }
    return XD_OK;
}

/* Gives the file its final size and writes the header. */
static xd_result xdi_safetensors_start(xdi_safetensors_writer *writer, const char *path,
                                       const xd_weights_writer_desc *desc, bool locked) {
    XD_TRY(xd_weights_plan(writer->ctx, desc, &writer->layout));
    XD_TRY(xdi_safetensors_keep_names(writer, desc));
    XD_TRY(xdi_publish_start(writer->ctx, path, locked, &writer->file));
    XD_TRY(xdi_publish_resize(writer->file, writer->layout->file_bytes));
    return xdi_publish_write(writer->file, writer->layout->header, (size_t)writer->layout->header_bytes, 0);
}

XD_PRIVATE xd_result xdi_safetensors_writer_start(xd_ctx *ctx, const char *path,
                                                  const xd_weights_writer_desc *desc, bool locked,
                                                  xdi_safetensors_writer **out) {
    XD_TRY(xdi_safetensors_check_counts(ctx, desc));
    xdi_safetensors_writer *writer = (xdi_safetensors_writer *)xd_allocate(ctx, sizeof *writer);
    XD_REQUIRE(ctx, writer, XD_ERROR_MEMORY, "%s: no room for a writer", path);
    writer->ctx = ctx;
    writer->count = desc->entry_count;
    const xd_result result = xdi_safetensors_start(writer, path, desc, locked);
    if (result == XD_OK)
        *out = writer;
    else
        xdi_safetensors_writer_abort(writer);
    return result;
}

XD_PRIVATE xd_result xdi_safetensors_writer_create(xd_ctx *ctx, const char *path,
                                                   const xd_weights_writer_desc *desc,
                                                   xdi_safetensors_writer **out) {
    return xdi_safetensors_writer_start(ctx, path, desc, true, out);
}

XD_PRIVATE xd_result xdi_safetensors_writer_write(xdi_safetensors_writer *writer, int64_t index,
                                                  uint64_t first_byte, size_t bytes, const void *data) {
    XD_REQUIRE(writer->ctx, index >= 0 && index < writer->count, XD_ERROR_ARGUMENT, "tensor %lld of %lld",
               (long long)index, (long long)writer->count);
    const uint64_t length = writer->layout->bytes[index];
    if (bytes == XD_WEIGHTS_REST && first_byte <= length) bytes = (size_t)(length - first_byte);
    XDI_GIVEN_LIST(writer->ctx, data, bytes);
    XD_REQUIRE(writer->ctx, first_byte <= length && bytes <= length - first_byte, XD_ERROR_ARGUMENT,
               "%llu bytes from %llu of tensor %lld, which has %llu", (unsigned long long)bytes,
               (unsigned long long)first_byte, (long long)index, (unsigned long long)length);
    XD_TRY(xdi_written_reserve(writer->ctx, &writer->written));
    XD_TRY(xdi_publish_write(writer->file, data, bytes, writer->layout->begin[index] + first_byte));
    xdi_written_note(&writer->written, index, first_byte, first_byte + bytes);
    return XD_OK;
}

static xd_result xdi_safetensors_check_complete(const xdi_safetensors_writer *writer) {
    return xdi_written_check(writer->ctx, &writer->written, writer->count, writer->names,
                             writer->layout->bytes);
}

XD_PRIVATE xd_result xdi_safetensors_writer_close(xdi_safetensors_writer *writer) {
    XD_TRY(xdi_safetensors_check_complete(writer));
    return xdi_publish_close(writer->file);
}

XD_PRIVATE xd_result xdi_safetensors_writer_rename(xdi_safetensors_writer *writer) {
    return xdi_publish_rename(writer->file);
}

XD_PRIVATE xd_result xdi_safetensors_writer_commit(xdi_safetensors_writer *writer) {
    xd_result result = xdi_safetensors_check_complete(writer);
    if (result == XD_OK) {
        result = xdi_publish_commit(writer->file);
        writer->file = NULL;
    }
    xdi_safetensors_writer_abort(writer);
    return result;
}

XD_PRIVATE void xdi_safetensors_writer_abort(xdi_safetensors_writer *writer) {
    if (!writer) return;
    xdi_publish_abort(writer->file);
    xd_release(writer->ctx, writer->written.pieces);
    xd_release(writer->ctx, (void *)writer->names);
    xd_release(writer->ctx, writer->layout);
    xd_release(writer->ctx, writer);
}
