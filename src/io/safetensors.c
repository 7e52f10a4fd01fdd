/* The safetensors format: reading, and writing at offsets known beforehand. */

#include "base/json.h"
#include "base/publish.h"
#include "io/internal.h"

#include <string.h>

enum {
    XDI_SAFETENSORS_LIMIT = 100000000, /* header bytes */
    XDI_SAFETENSORS_NAME = 65536,
    XDI_SAFETENSORS_DIMS = 64,
    XDI_SAFETENSORS_GAP = 256 * 1024, /* distance in bytes of two ranges from which a second read pays */
    XDI_SAFETENSORS_STAGE = 1024 * 1024
};

#define XDI_SAFETENSORS_METADATA "__metadata__"

struct xd_safetensors {
    xd_ctx *ctx;
    char *path; /* for messages */
    xd_json *header;
    xd_safetensors_info *infos; /* [count], by name */
    int64_t *shapes;            /* of all tensors */
    int64_t count;
    uint64_t size, data;        /* of the file; where the data area starts */
    const unsigned char *bytes; /* the whole file; NULL in stream mode */
    void *owned;                /* bytes, when they were read into memory of this object */
    bool mapped, open, skip_unknown;
    intptr_t file;
};

/* ---- the header ---- */

static uint64_t xdi_safetensors_load_u64(const unsigned char *p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | p[i];
    return value;
}

/* Bytes of a tensor. Returns the dimension whose size is negative or makes the product overflow, -1 when none does. */
static int xdi_safetensors_bytes(xd_dtype dtype, int ndim, const int64_t *shape, uint64_t *bytes) {
    uint64_t total = xd_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) {
        const uint64_t size = (uint64_t)shape[i];
        if (shape[i] < 0 || (size > 0 && total > (uint64_t)INT64_MAX / size)) return i;
        total *= size;
    }
    *bytes = total;
    return -1;
}

static xd_result xdi_safetensors_parse_shape(xd_safetensors *f, const xd_json *shape,
                                             xd_safetensors_info *info, int64_t *sizes) {
    const size_t ndim = xd_json_count(shape);
    XD_REQUIRE(f->ctx, xd_json_kind_of(shape) == XD_JSON_ARRAY, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" has no shape", f->path, info->name);
    XD_REQUIRE(f->ctx, ndim <= XDI_SAFETENSORS_DIMS, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" has %llu dimensions, allowed are %d", f->path, info->name,
               (unsigned long long)ndim, (int)XDI_SAFETENSORS_DIMS);
    info->ndim = (int)ndim;
    info->shape = sizes;
    for (size_t i = 0; i < ndim; i++)
        XD_REQUIRE(f->ctx, xd_json_int64(xd_json_at(shape, i), &sizes[i]) && sizes[i] >= 0, XD_ERROR_FORMAT,
                   "%s: tensor \"%.80s\": size %llu of its shape is no non-negative integer", f->path,
                   info->name, (unsigned long long)i);
    return XD_OK;
}

/* Fills one info from its entry. An unknown dtype gives XD_DTYPE_NONE when such tensors are skipped. */
static xd_result xdi_safetensors_parse_entry(xd_safetensors *f, const xd_json *entry,
                                             xd_safetensors_info *info, int64_t *sizes) {
    size_t name_bytes;
    info->name = xd_json_key(entry, &name_bytes);
    XD_REQUIRE(f->ctx, name_bytes <= XDI_SAFETENSORS_NAME, XD_ERROR_FORMAT,
               "%s: a name of %llu bytes, allowed are %d", f->path, (unsigned long long)name_bytes,
               (int)XDI_SAFETENSORS_NAME);
    const char *dtype = xd_json_string(xd_json_find(entry, "dtype"), NULL);
    XD_REQUIRE(f->ctx, dtype, XD_ERROR_FORMAT, "%s: tensor \"%.80s\" has no dtype", f->path, info->name);
    info->dtype = strcmp(dtype, "NONE") == 0 ? XD_DTYPE_NONE : xd_dtype_from_name(dtype);
    XD_REQUIRE(f->ctx, info->dtype != XD_DTYPE_NONE || f->skip_unknown, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" has the unknown dtype \"%.20s\"", f->path, info->name, dtype);
    XD_TRY(xdi_safetensors_parse_shape(f, xd_json_find(entry, "shape"), info, sizes));

    const xd_json *offsets = xd_json_find(entry, "data_offsets");
    XD_REQUIRE(f->ctx,
               xd_json_kind_of(offsets) == XD_JSON_ARRAY && xd_json_count(offsets) == 2 &&
                   xd_json_uint64(xd_json_at(offsets, 0), &info->begin) &&
                   xd_json_uint64(xd_json_at(offsets, 1), &info->end),
               XD_ERROR_FORMAT, "%s: tensor \"%.80s\": data_offsets are not two non-negative integers",
               f->path, info->name);
    XD_REQUIRE(f->ctx, info->begin <= info->end, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" begins at %llu but ends at %llu", f->path, info->name,
               (unsigned long long)info->begin, (unsigned long long)info->end);
    uint64_t bytes = 0;
    if (info->dtype == XD_DTYPE_NONE) return XD_OK;
    XD_REQUIRE(f->ctx, xdi_safetensors_bytes(info->dtype, info->ndim, info->shape, &bytes) < 0,
               XD_ERROR_FORMAT, "%s: the size of tensor \"%.80s\" overflows", f->path, info->name);
    XD_REQUIRE(f->ctx, bytes == info->end - info->begin, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" needs %llu bytes but its offsets span %llu", f->path, info->name,
               (unsigned long long)bytes, (unsigned long long)(info->end - info->begin));
    return XD_OK;
}

static xd_result xdi_safetensors_check_metadata(xd_safetensors *f, const xd_json *metadata) {
    const xd_json_kind kind = xd_json_kind_of(metadata);
    XD_REQUIRE(f->ctx, kind == XD_JSON_NONE || kind == XD_JSON_NULL || kind == XD_JSON_OBJECT,
               XD_ERROR_FORMAT, "%s: __metadata__ is no object", f->path);
    for (const xd_json *pair = xd_json_first(metadata); pair; pair = xd_json_next(pair))
        XD_REQUIRE(f->ctx, xd_json_string(pair, NULL), XD_ERROR_FORMAT, "%s: metadata \"%.80s\" is no string",
                   f->path, xd_json_key(pair, NULL));
    return XD_OK;
}

/* Allocates the infos and the sizes of all shapes. */
static xd_result xdi_safetensors_reserve(xd_safetensors *f) {
    size_t tensors = 0, sizes = 0;
    for (const xd_json *entry = xd_json_first(f->header); entry; entry = xd_json_next(entry)) {
        tensors++;
        sizes += xd_json_count(xd_json_find(entry, "shape"));
    }
    f->infos = (xd_safetensors_info *)xd_allocate(f->ctx, tensors * sizeof *f->infos);
    f->shapes = (int64_t *)xd_allocate(f->ctx, sizes * sizeof *f->shapes);
    XD_REQUIRE(f->ctx, f->infos && f->shapes, XD_ERROR_MEMORY, "%s: no room for %llu tensors", f->path,
               (unsigned long long)tensors);
    return XD_OK;
}

static int xdi_safetensors_by_offset(const void *a, const void *b) {
    const xd_safetensors_info *x = (const xd_safetensors_info *)a, *y = (const xd_safetensors_info *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The tensors must cover the data area: no gap, no overlap, no byte after the last one. */
static xd_result xdi_safetensors_check_tiles(xd_safetensors *f) {
    const size_t count = (size_t)f->count;
    const void **order = (const void **)xd_allocate(f->ctx, count * sizeof *order);
    XD_REQUIRE(f->ctx, order, XD_ERROR_MEMORY, "%s: no room to sort %llu tensors", f->path,
               (unsigned long long)count);
    for (size_t i = 0; i < count; i++) order[i] = &f->infos[i];
    xdi_sort(order, count, xdi_safetensors_by_offset);
    uint64_t end = 0;
    xd_result result = XD_OK;
    for (size_t i = 0; i < count && result == XD_OK; i++) {
        const xd_safetensors_info *info = (const xd_safetensors_info *)order[i];
        if (info->begin != end)
            result = XD_FAIL(f->ctx, XD_ERROR_FORMAT,
                             "%s: tensor \"%.80s\" begins at %llu, the one before ends at %llu", f->path,
                             info->name, (unsigned long long)info->begin, (unsigned long long)end);
        end = info->end;
    }
    xd_release(f->ctx, order);
    XD_TRY(result);
    XD_REQUIRE(f->ctx, end == f->size - f->data, XD_ERROR_FORMAT,
               "%s: the tensors end at %llu but there are %llu bytes", f->path, (unsigned long long)end,
               (unsigned long long)(f->size - f->data));
    return XD_OK;
}

/* Takes the tensors out of the parsed header, in the order of their names. */
static xd_result xdi_safetensors_collect(xd_safetensors *f) {
    XD_REQUIRE(f->ctx, xd_json_kind_of(f->header) == XD_JSON_OBJECT, XD_ERROR_FORMAT,
               "%s: the header is no object", f->path);
    XD_TRY(xdi_safetensors_check_metadata(f, xd_json_find(f->header, XDI_SAFETENSORS_METADATA)));
    XD_TRY(xdi_safetensors_reserve(f));
    int64_t *sizes = f->shapes;
    for (size_t i = 0; i < xd_json_count(f->header); i++) {
        const xd_json *entry = xd_json_by_key(f->header, i);
        if (strcmp(xd_json_key(entry, NULL), XDI_SAFETENSORS_METADATA) == 0) continue;
        xd_safetensors_info *info = &f->infos[f->count++];
        XD_TRY(xdi_safetensors_parse_entry(f, entry, info, sizes));
        sizes += info->ndim;
    }
    XD_TRY(xdi_safetensors_check_tiles(f));
    int64_t kept = 0; /* tensors that are skipped were needed for the check above only */
    for (int64_t i = 0; i < f->count; i++)
        if (f->infos[i].dtype != XD_DTYPE_NONE) f->infos[kept++] = f->infos[i];
    f->count = kept;
    return XD_OK;
}

static xd_result xdi_safetensors_parse(xd_safetensors *f, const char *header, size_t bytes) {
    xd_json_desc limits;
    memset(&limits, 0, sizeof limits);
    limits.max_bytes = bytes;
    limits.max_depth = 4;
    const xd_result result = xd_json_load_memory(f->ctx, &limits, header, bytes, &f->header);
    XD_REQUIRE(f->ctx, result == XD_OK, result, "%s: header: %s", f->path, xd_last_error(f->ctx)->message);
    return xdi_safetensors_collect(f);
}

/* ---- opening ---- */

static xd_result xdi_safetensors_read(xd_safetensors *f, void *to, size_t bytes, uint64_t offset) {
    if (f->bytes) {
        if (bytes) memcpy(to, f->bytes + offset, bytes);
        return XD_OK;
    }
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    const int error = bytes ? files->read(files->user, f->file, to, bytes, offset) : 0;
    XD_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: read of %llu bytes at %llu: %s", f->path,
               (unsigned long long)bytes, (unsigned long long)offset, strerror(error));
    return XD_OK;
}

/* The first checks, on numbers alone; then the header text, read or in place, goes to the parser. */
static xd_result xdi_safetensors_header(xd_safetensors *f, size_t max_header_bytes) {
    unsigned char prefix[8];
    XD_REQUIRE(f->ctx, f->size >= 8, XD_ERROR_FORMAT, "%s has %llu bytes, the shortest file has 8", f->path,
               (unsigned long long)f->size);
    XD_TRY(xdi_safetensors_read(f, prefix, sizeof prefix, 0));
    const uint64_t length = xdi_safetensors_load_u64(prefix);
    const uint64_t limit = max_header_bytes ? max_header_bytes : (uint64_t)XDI_SAFETENSORS_LIMIT;
    XD_REQUIRE(f->ctx, length <= limit, XD_ERROR_FORMAT, "%s: a header of %llu bytes, allowed are %llu",
               f->path, (unsigned long long)length, (unsigned long long)limit);
    XD_REQUIRE(f->ctx, length <= f->size - 8, XD_ERROR_FORMAT, "%s: a header of %llu bytes in a file of %llu",
               f->path, (unsigned long long)length, (unsigned long long)f->size);
    f->data = 8 + length;
    if (f->bytes) return xdi_safetensors_parse(f, (const char *)f->bytes + 8, (size_t)length);

    char *text = (char *)xd_allocate(f->ctx, (size_t)length);
    XD_REQUIRE(f->ctx, text, XD_ERROR_MEMORY, "%s: no room for a header of %llu bytes", f->path,
               (unsigned long long)length);
    xd_result result = xdi_safetensors_read(f, text, (size_t)length, 8);
    if (result == XD_OK) result = xdi_safetensors_parse(f, text, (size_t)length);
    xd_release(f->ctx, text);
    return result;
}

/* Map mode: the file in memory, mapped where that works. */
static xd_result xdi_safetensors_map(xd_safetensors *f) {
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    const void *address = NULL;
    if (f->size < 8)
        return XD_OK; /* the header check has the better message, and an empty file cannot be mapped */
    f->mapped = files->map && files->map(files->user, f->file, f->size, &address) == 0;
    if (f->mapped) {
        f->bytes = (const unsigned char *)address;
        return XD_OK;
    }
    void *memory = f->size < SIZE_MAX ? xd_allocate(f->ctx, (size_t)f->size) : NULL;
    XD_REQUIRE(f->ctx, memory, XD_ERROR_MEMORY, "%s: no room for %llu bytes", f->path,
               (unsigned long long)f->size);
    f->owned = memory;
    XD_TRY(xdi_safetensors_read(f, memory, (size_t)f->size, 0));
    f->bytes = (const unsigned char *)memory;
    return XD_OK;
}

static xd_result xdi_safetensors_open_file(xd_safetensors *f, const xd_safetensors_desc *d) {
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    int error = xdi_file_open_read(f->ctx, f->path, &f->file);
    XD_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: open: %s", f->path, xdi_open_error(error));
    f->open = true;
    error = files->size(files->user, f->file, &f->size);
    XD_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: size: %s", f->path, strerror(error));
    if (d->mode == XD_SAFETENSORS_MAP) XD_TRY(xdi_safetensors_map(f));
    return xdi_safetensors_header(f, d->max_header_bytes);
}

static xd_safetensors *xdi_safetensors_new(xd_ctx *ctx, const char *path, const xd_safetensors_desc *d) {
    const size_t length = strlen(path) + 1;
    xd_safetensors *f = (xd_safetensors *)xd_allocate(ctx, sizeof *f + length);
    if (!f) return NULL;
    f->ctx = ctx;
    f->path = (char *)(f + 1);
    f->skip_unknown = d->skip_unknown;
    memcpy(f->path, path, length);
    return f;
}

/* Returns the object in *out, or destroys it on failure. */
static xd_result xdi_safetensors_finish(xd_safetensors *f, xd_result result, xd_safetensors **out) {
    if (result == XD_OK)
        *out = f;
    else
        xd_safetensors_close(f);
    return result;
}

static xd_safetensors_desc xdi_safetensors_defaults(const xd_safetensors_desc *desc) {
    xd_safetensors_desc d;
    memset(&d, 0, sizeof d);
    return desc ? *desc : d;
}

XD_API xd_result xd_safetensors_open(xd_ctx *ctx, const char *path, const xd_safetensors_desc *desc,
                                     xd_safetensors **out) {
    const xd_safetensors_desc d = xdi_safetensors_defaults(desc);
    xd_safetensors *f = xdi_safetensors_new(ctx, path, &d);
    XD_REQUIRE(ctx, f, XD_ERROR_MEMORY, "%s: no room for a file object", path);
    return xdi_safetensors_finish(f, xdi_safetensors_open_file(f, &d), out);
}

XD_API xd_result xd_safetensors_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                            const xd_safetensors_desc *desc, xd_safetensors **out) {
    const xd_safetensors_desc d = xdi_safetensors_defaults(desc);
    xd_safetensors *f = xdi_safetensors_new(ctx, "memory", &d);
    XD_REQUIRE(ctx, f, XD_ERROR_MEMORY, "no room for a file object");
    f->bytes = (const unsigned char *)data;
    f->size = bytes;
    return xdi_safetensors_finish(f, xdi_safetensors_header(f, d.max_header_bytes), out);
}

XD_API void xd_safetensors_close(xd_safetensors *f) {
    if (!f) return;
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    if (f->mapped) files->unmap(files->user, f->bytes, f->size);
    if (f->open) files->close(files->user, f->file);
    xd_release(f->ctx, f->owned);
    xd_release(f->ctx, f->infos);
    xd_release(f->ctx, f->shapes);
    xd_json_destroy(f->ctx, f->header);
    xd_release(f->ctx, f);
}

/* ---- queries ---- */

XD_API int64_t xd_safetensors_count(const xd_safetensors *f) {
    return f->count;
}

XD_API const xd_safetensors_info *xd_safetensors_at(const xd_safetensors *f, int64_t index) {
    return index >= 0 && index < f->count ? &f->infos[index] : NULL;
}

static int xdi_safetensors_is_named(const void *name, const void *info) {
    return strcmp((const char *)name, ((const xd_safetensors_info *)info)->name);
}

XD_API int64_t xd_safetensors_find(const xd_safetensors *f, const char *name) {
    return xdi_find(name, f->infos, sizeof *f->infos, f->count, xdi_safetensors_is_named);
}

XD_API const char *xd_safetensors_metadata(const xd_safetensors *f, const char *key) {
    return xd_json_string(xd_json_find(xd_json_find(f->header, XDI_SAFETENSORS_METADATA), key), NULL);
}

XD_API bool xd_safetensors_metadata_at(const xd_safetensors *f, int64_t index, const char **key,
                                       const char **value) {
    if (index < 0) return false;
    const xd_json *pair = xd_json_by_key(xd_json_find(f->header, XDI_SAFETENSORS_METADATA), (size_t)index);
    if (!pair) return false;
    *key = xd_json_key(pair, NULL);
    *value = xd_json_string(pair, NULL);
    return true;
}

XD_API const void *xd_safetensors_data(const xd_safetensors *f, int64_t index) {
    const xd_safetensors_info *info = xd_safetensors_at(f, index);
    return info && f->bytes ? f->bytes + f->data + info->begin : NULL;
}

/* ---- reading ---- */

XD_API xd_result xd_safetensors_read_range(xd_safetensors *f, int64_t index, uint64_t first_byte,
                                           size_t bytes, void *destination) {
    const xd_safetensors_info *info = xd_safetensors_at(f, index);
    XD_REQUIRE(f->ctx, info, XD_ERROR_ARGUMENT, "%s: tensor %lld of %lld", f->path, (long long)index,
               (long long)f->count);
    const uint64_t length = info->end - info->begin;
    XD_REQUIRE(f->ctx, first_byte <= length && bytes <= length - first_byte, XD_ERROR_ARGUMENT,
               "%s: %llu bytes from %llu of tensor \"%.80s\", which has %llu", f->path,
               (unsigned long long)bytes, (unsigned long long)first_byte, info->name,
               (unsigned long long)length);
    return xdi_safetensors_read(f, destination, bytes, f->data + info->begin + first_byte);
}

/* A box as byte ranges ("pieces" below) of the file, all of the same length, in ascending order. */
typedef struct xdi_safetensors_box {
    const xd_safetensors_info *info;
    const int64_t *offset, *size;
    int outer;      /* dimensions over which pieces are enumerated; the others lie inside one piece */
    uint64_t piece; /* bytes */
    uint64_t first; /* file offset of the first piece */
    int64_t pieces;
    uint64_t stride[64]; /* bytes between neighbours along a dimension */
} xdi_safetensors_box;

static xdi_safetensors_box xdi_safetensors_plan(const xd_safetensors *f, const xd_safetensors_info *info,
                                                const int64_t *offset, const int64_t *size) {
    xdi_safetensors_box box;
    uint64_t stride = xd_dtype_size(info->dtype);
    bool inside = true; /* everything from this dimension on is taken whole */
    memset(&box, 0, sizeof box);
    box.info = info;
    box.offset = offset;
    box.size = size;
    box.piece = stride;
    box.pieces = 1;
    box.first = f->data + info->begin;
    for (int i = info->ndim - 1; i >= 0; i--) {
        box.stride[i] = stride;
        box.first += stride * (uint64_t)offset[i];
        if (inside) {
            box.piece *= (uint64_t)size[i];
            box.outer = i;
        } else {
            box.pieces *= size[i];
        }
        inside = inside && size[i] == info->shape[i];
        stride *= (uint64_t)info->shape[i];
    }
    return box;
}

/* Where piece `number` starts in the file. */
static uint64_t xdi_safetensors_piece(const xdi_safetensors_box *box, int64_t number) {
    uint64_t at = box->first;
    for (int i = box->outer - 1; i >= 0; i--) {
        at += (uint64_t)(number % box->size[i]) * box->stride[i];
        number /= box->size[i];
    }
    return at;
}

/* The number of pieces from `first` on that one read into the staging buffer covers; *end: the end of that read. */
static int64_t xdi_safetensors_group(const xdi_safetensors_box *box, int64_t first, uint64_t *end) {
    const uint64_t begin = xdi_safetensors_piece(box, first);
    int64_t count = 1;
    *end = begin + box->piece;
    for (; first + count < box->pieces; count++) {
        const uint64_t at = xdi_safetensors_piece(box, first + count);
        if (at - *end >= XDI_SAFETENSORS_GAP || at + box->piece - begin > XDI_SAFETENSORS_STAGE) break;
        *end = at + box->piece;
    }
    return count;
}

static xd_result xdi_safetensors_gather(xd_safetensors *f, const xdi_safetensors_box *box, unsigned char *to,
                                        unsigned char *stage) {
    for (int64_t i = 0; i < box->pieces;) {
        const uint64_t begin = xdi_safetensors_piece(box, i);
        uint64_t end = begin + box->piece;
        const int64_t count = stage ? xdi_safetensors_group(box, i, &end) : 1;
        if (count == 1) {
            XD_TRY(xdi_safetensors_read(f, to, (size_t)box->piece, begin));
            to += box->piece;
        } else {
            XD_TRY(xdi_safetensors_read(f, stage, (size_t)(end - begin), begin));
            for (int64_t k = 0; k < count; k++, to += box->piece)
                memcpy(to, stage + (xdi_safetensors_piece(box, i + k) - begin), (size_t)box->piece);
        }
        i += count;
    }
    return XD_OK;
}

static xd_result xdi_safetensors_check_box(xd_safetensors *f, const xd_safetensors_info *info,
                                           const int64_t *offset, const int64_t *size, bool *empty) {
    *empty = info->begin == info->end;
    for (int i = 0; i < info->ndim; i++) {
        XD_REQUIRE(f->ctx,
                   offset[i] >= 0 && size[i] >= 0 && offset[i] <= info->shape[i] &&
                       size[i] <= info->shape[i] - offset[i],
                   XD_ERROR_ARGUMENT,
                   "%s: tensor \"%.80s\": %lld elements from %lld along dimension %d of size %lld", f->path,
                   info->name, (long long)size[i], (long long)offset[i], i, (long long)info->shape[i]);
        if (size[i] == 0) *empty = true;
    }
    return XD_OK;
}

XD_API xd_result xd_safetensors_read_box(xd_safetensors *f, int64_t index, const int64_t *offset,
                                         const int64_t *size, void *destination) {
    const xd_safetensors_info *info = xd_safetensors_at(f, index);
    bool empty;
    XD_REQUIRE(f->ctx, info, XD_ERROR_ARGUMENT, "%s: tensor %lld of %lld", f->path, (long long)index,
               (long long)f->count);
    XD_TRY(xdi_safetensors_check_box(f, info, offset, size, &empty));
    if (empty) return XD_OK;
    const xdi_safetensors_box box = xdi_safetensors_plan(f, info, offset, size);
    unsigned char *stage = NULL;
    if (!f->bytes && box.pieces > 1) {
        stage = (unsigned char *)xd_allocate(f->ctx, XDI_SAFETENSORS_STAGE);
        XD_REQUIRE(f->ctx, stage, XD_ERROR_MEMORY, "%s: no room for a staging buffer", f->path);
    }
    const xd_result result = xdi_safetensors_gather(f, &box, (unsigned char *)destination, stage);
    xd_release(f->ctx, stage);
    return result;
}

/* ---- the plan of a file ---- */

/* The header fits behind them in 63 bits. */
#define XDI_SAFETENSORS_DATA ((uint64_t)INT64_MAX - 8 - XDI_SAFETENSORS_LIMIT)

static xd_result xdi_safetensors_check_name(xd_ctx *ctx, const xd_safetensors_entry *e, int64_t index) {
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

XD_PRIVATE xd_result xdi_safetensors_check_entry(xd_ctx *ctx, const xd_safetensors_entry *e, int64_t index,
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
    return strcmp(((const xd_safetensors_entry *)a)->name, ((const xd_safetensors_entry *)b)->name);
}

XD_PRIVATE xd_result xdi_safetensors_check_repeats(xd_ctx *ctx, const xd_safetensors_entry *entries,
                                                   int64_t count, const void **order) {
    for (int64_t i = 0; i < count; i++) order[i] = &entries[i];
    xdi_sort(order, (size_t)count, xdi_safetensors_by_name);
    for (int64_t i = 1; i < count; i++) {
        const int64_t one = (const xd_safetensors_entry *)order[i - 1] - entries;
        const int64_t other = (const xd_safetensors_entry *)order[i] - entries;
        XD_REQUIRE(ctx, strcmp(entries[one].name, entries[other].name) != 0, XD_ERROR_ARGUMENT,
                   "tensors %lld and %lld are both named \"%.80s\"", (long long)(one < other ? one : other),
                   (long long)(one < other ? other : one), entries[one].name);
    }
    return XD_OK;
}

/* A file being planned. */
typedef struct xdi_safetensors_draft {
    const xd_safetensors_writer_desc *desc;
    const void **order;      /* [entry_count] entries, or pairs of the metadata */
    uint64_t *begin, *bytes; /* [entry_count], by the caller's index; begin in the data area */
    uint64_t data_bytes;
    xd_json_writer header;
} xdi_safetensors_draft;

static int xdi_safetensors_by_key(const void *a, const void *b) {
    return strcmp(((const xd_safetensors_pair *)a)->key, ((const xd_safetensors_pair *)b)->key);
}

static xd_result xdi_safetensors_check_pairs(xd_ctx *ctx, const xdi_safetensors_draft *p) {
    const xd_safetensors_writer_desc *d = p->desc;
    for (int64_t i = 0; i < d->metadata_count; i++) {
        const xd_safetensors_pair *pair = &d->metadata[i];
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
                   "the metadata has the key \"%.80s\" twice",
                   ((const xd_safetensors_pair *)p->order[i])->key);
    return XD_OK;
}

static xd_result xdi_safetensors_check_plan(xd_ctx *ctx, xdi_safetensors_draft *p) {
    const xd_safetensors_writer_desc *d = p->desc;
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
    const xd_safetensors_entry *x = (const xd_safetensors_entry *)a, *y = (const xd_safetensors_entry *)b;
    if (x->dtype != y->dtype) return x->dtype > y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

static void xdi_safetensors_write_entry(xd_json_writer *w, const xd_safetensors_entry *e, uint64_t begin,
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

static void xdi_safetensors_write_metadata(xd_json_writer *w, const xd_safetensors_writer_desc *d) {
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
    const xd_safetensors_writer_desc *d = p->desc;
    uint64_t end = 0;
    for (int64_t i = 0; i < d->entry_count; i++) p->order[i] = &d->entries[i];
    xdi_sort(p->order, (size_t)d->entry_count, xdi_safetensors_by_rank);
    xd_json_write_object(&p->header);
    xdi_safetensors_write_metadata(&p->header, d);
    for (int64_t i = 0; i < d->entry_count; i++) {
        const int64_t index = (const xd_safetensors_entry *)p->order[i] - d->entries;
        p->begin[index] = end;
        end += p->bytes[index];
        xdi_safetensors_write_entry(&p->header, &d->entries[index], p->begin[index], end);
    }
    xd_json_write_end(&p->header);
}

/* The result, in one block: the struct, the arrays, the header. */
static xd_result xdi_safetensors_pack(xd_ctx *ctx, xdi_safetensors_draft *p, xd_safetensors_layout **out) {
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
    xd_safetensors_layout *layout = (xd_safetensors_layout *)xd_allocate(
        ctx, sizeof *layout + 2 * count * sizeof(uint64_t) + header_bytes);
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

static xd_result xdi_safetensors_check_counts(xd_ctx *ctx, const xd_safetensors_writer_desc *d) {
    const size_t alignment = d->alignment ? d->alignment : 8;
    XD_REQUIRE(ctx, d->entry_count >= 0 && d->entry_count <= XDI_SAFETENSORS_LIMIT / 32, XD_ERROR_ARGUMENT,
               "%lld tensors, allowed are %d", (long long)d->entry_count, (int)XDI_SAFETENSORS_LIMIT / 32);
    XD_REQUIRE(ctx, d->metadata_count >= 0 && d->metadata_count <= XDI_SAFETENSORS_LIMIT / 6,
               XD_ERROR_ARGUMENT, "%lld pairs of metadata, allowed are %d", (long long)d->metadata_count,
               (int)XDI_SAFETENSORS_LIMIT / 6);
    XD_REQUIRE(ctx, alignment >= 8 && (alignment & (alignment - 1)) == 0, XD_ERROR_ARGUMENT,
               "alignment %llu is no power of two from 8 on", (unsigned long long)alignment);
    return XD_OK;
}

XD_API xd_result xd_safetensors_plan(xd_ctx *ctx, const xd_safetensors_writer_desc *desc,
                                     xd_safetensors_layout **out) {
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

struct xd_safetensors_writer {
    xd_ctx *ctx;
    xd_publish *file;
    xd_safetensors_layout *layout;
    uint64_t *written; /* [count] bytes so far, after the struct in the same allocation */
    int64_t count;
};

/* Gives the file its final size and writes the header. */
static xd_result xdi_safetensors_start(xd_safetensors_writer *writer, const char *path,
                                       const xd_safetensors_writer_desc *desc, bool locked) {
    XD_TRY(xd_safetensors_plan(writer->ctx, desc, &writer->layout));
    XD_TRY(xdi_publish_start(writer->ctx, path, locked, &writer->file));
    XD_TRY(xd_publish_resize(writer->file, writer->layout->file_bytes));
    return xd_publish_write(writer->file, writer->layout->header, (size_t)writer->layout->header_bytes, 0);
}

XD_PRIVATE xd_result xdi_safetensors_writer_start(xd_ctx *ctx, const char *path,
                                                  const xd_safetensors_writer_desc *desc, bool locked,
                                                  xd_safetensors_writer **out) {
    XD_TRY(xdi_safetensors_check_counts(ctx, desc));
    const size_t count = (size_t)desc->entry_count;
    xd_safetensors_writer *writer =
        (xd_safetensors_writer *)xd_allocate(ctx, sizeof *writer + count * sizeof *writer->written);
    XD_REQUIRE(ctx, writer, XD_ERROR_MEMORY, "%s: no room for a writer", path);
    writer->ctx = ctx;
    writer->count = desc->entry_count;
    writer->written = (uint64_t *)(writer + 1);
    const xd_result result = xdi_safetensors_start(writer, path, desc, locked);
    if (result == XD_OK)
        *out = writer;
    else
        xd_safetensors_writer_abort(writer);
    return result;
}

XD_API xd_result xd_safetensors_writer_create(xd_ctx *ctx, const char *path,
                                              const xd_safetensors_writer_desc *desc,
                                              xd_safetensors_writer **out) {
    return xdi_safetensors_writer_start(ctx, path, desc, true, out);
}

XD_API xd_result xd_safetensors_writer_write_range(xd_safetensors_writer *writer, int64_t index,
                                                   uint64_t first_byte, size_t bytes, const void *data) {
    XD_REQUIRE(writer->ctx, index >= 0 && index < writer->count, XD_ERROR_ARGUMENT, "tensor %lld of %lld",
               (long long)index, (long long)writer->count);
    const uint64_t length = writer->layout->bytes[index];
    XD_REQUIRE(writer->ctx, first_byte <= length && bytes <= length - first_byte, XD_ERROR_ARGUMENT,
               "%llu bytes from %llu of tensor %lld, which has %llu", (unsigned long long)bytes,
               (unsigned long long)first_byte, (long long)index, (unsigned long long)length);
    XD_TRY(xd_publish_write(writer->file, data, bytes, writer->layout->begin[index] + first_byte));
    writer->written[index] += bytes;
    return XD_OK;
}

XD_API xd_result xd_safetensors_writer_write(xd_safetensors_writer *writer, int64_t index, const void *data) {
    const bool known = index >= 0 && index < writer->count;
    const uint64_t bytes = known ? writer->layout->bytes[index] : 0;
    return xd_safetensors_writer_write_range(writer, index, 0, (size_t)bytes, data);
}

static xd_result xdi_safetensors_check_complete(const xd_safetensors_writer *writer) {
    for (int64_t i = 0; i < writer->count; i++)
        XD_REQUIRE(writer->ctx, writer->written[i] == writer->layout->bytes[i], XD_ERROR_STATE,
                   "%llu of the %llu bytes of tensor %lld are written",
                   (unsigned long long)writer->written[i], (unsigned long long)writer->layout->bytes[i],
                   (long long)i);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_safetensors_writer_close(xd_safetensors_writer *writer) {
    XD_TRY(xdi_safetensors_check_complete(writer));
    return xdi_publish_close(writer->file);
}

XD_PRIVATE xd_result xdi_safetensors_writer_rename(xd_safetensors_writer *writer) {
    return xdi_publish_rename(writer->file);
}

XD_API xd_result xd_safetensors_writer_commit(xd_safetensors_writer *writer) {
    xd_result result = xdi_safetensors_check_complete(writer);
    if (result == XD_OK) {
        result = xd_publish_commit(writer->file);
        writer->file = NULL;
    }
    xd_safetensors_writer_abort(writer);
    return result;
}

XD_API void xd_safetensors_writer_abort(xd_safetensors_writer *writer) {
    if (!writer) return;
    xd_publish_abort(writer->file);
    xd_release(writer->ctx, writer->layout);
    xd_release(writer->ctx, writer);
}
