/* Reading safetensors files. */

#include "base/json.h"
#include "io/internal.h"

#include <string.h>

enum {
    XDI_SAFETENSORS_GAP = 256 * 1024, /* distance in bytes of two ranges from which a second read pays */
    XDI_SAFETENSORS_STAGE = 1024 * 1024
};

struct xdi_safetensors {
    xd_ctx *ctx;
    char *path; /* for messages */
    xd_json *header;
    xdi_safetensors_info *infos; /* [count], by name */
    int64_t *shapes;             /* of all tensors */
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

XD_PRIVATE int xdi_safetensors_bytes(xd_dtype dtype, int ndim, const int64_t *shape, uint64_t *bytes) {
    uint64_t total = xd_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) {
        const uint64_t size = (uint64_t)shape[i];
        if (shape[i] < 0 || (size > 0 && total > (uint64_t)INT64_MAX / size)) return i;
        total *= size;
    }
    *bytes = total;
    return -1;
}

/* Types of the format that nothing here computes with or moves; some are smaller than a byte. */
typedef struct xdi_safetensors_type {
    const char *name;
    unsigned bits;
} xdi_safetensors_type;

static const xdi_safetensors_type xdi_safetensors_types[] = { { "F4", 4 },          { "F6_E2M3", 6 },
                                                              { "F6_E3M2", 6 },     { "F8_E8M0", 8 },
                                                              { "F8_E4M3FNUZ", 8 }, { "F8_E5M2FNUZ", 8 },
                                                              { "C64", 64 } };

static const xdi_safetensors_type *xdi_safetensors_find_type(const char *name) {
    const size_t count = sizeof xdi_safetensors_types / sizeof *xdi_safetensors_types;
    for (size_t i = 0; i < count; i++)
        if (strcmp(xdi_safetensors_types[i].name, name) == 0) return &xdi_safetensors_types[i];
    return NULL;
}

/* The type of a tensor; both outputs are empty for one that the format does not have. */
static void xdi_safetensors_set_type(xdi_safetensors_info *info, const char *name) {
    const xdi_safetensors_type *type = xdi_safetensors_find_type(name);
    info->dtype = strcmp(name, "NONE") == 0 ? XD_DTYPE_NONE : xdi_dtype_from_name(name);
    info->type = type ? type->name : info->dtype != XD_DTYPE_NONE ? xd_dtype_name(info->dtype) : NULL;
}

/* Bytes of a tensor, from its bits where its type has no bytes of its own. */
static xd_result xdi_safetensors_measure(const xdi_safetensors *f, const xdi_safetensors_info *info,
                                         uint64_t *bytes) {
    const xdi_safetensors_type *type = xdi_safetensors_find_type(info->type);
    const xd_dtype dtype = type ? XD_DTYPE_U8 : info->dtype;
    const bool fits = xdi_safetensors_bytes(dtype, info->ndim, info->shape, bytes) < 0 &&
                      (!type || *bytes <= (uint64_t)INT64_MAX / type->bits);
    XD_REQUIRE(f->ctx, fits, XD_ERROR_FORMAT, "%s: the size of tensor \"%.80s\" overflows", f->path,
               info->name);
    if (!type) return XD_OK;
    const uint64_t bits = *bytes * type->bits;
    XD_REQUIRE(f->ctx, bits % 8 == 0, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" of type %s has %llu bits, which are no whole bytes", f->path, info->name,
               type->name, (unsigned long long)bits);
    *bytes = bits / 8;
    return XD_OK;
}

static xd_result xdi_safetensors_parse_shape(xdi_safetensors *f, const xd_json *shape,
                                             xdi_safetensors_info *info, int64_t *sizes) {
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

/* Fills one info from its entry. A type that the format does not have gives NULL when such tensors are skipped. */
static xd_result xdi_safetensors_parse_entry(xdi_safetensors *f, const xd_json *entry,
                                             xdi_safetensors_info *info, int64_t *sizes) {
    size_t name_bytes;
    info->name = xd_json_key(entry, &name_bytes);
    XD_REQUIRE(f->ctx, name_bytes <= XDI_SAFETENSORS_NAME, XD_ERROR_FORMAT,
               "%s: a name of %llu bytes, allowed are %d", f->path, (unsigned long long)name_bytes,
               (int)XDI_SAFETENSORS_NAME);
    const char *dtype = xd_json_string(xd_json_find(entry, "dtype"), NULL);
    XD_REQUIRE(f->ctx, dtype, XD_ERROR_FORMAT, "%s: tensor \"%.80s\" has no dtype", f->path, info->name);
    xdi_safetensors_set_type(info, dtype);
    XD_REQUIRE(f->ctx, info->type || f->skip_unknown, XD_ERROR_FORMAT,
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
    if (!info->type) return XD_OK;
    XD_TRY(xdi_safetensors_measure(f, info, &bytes));
    XD_REQUIRE(f->ctx, bytes == info->end - info->begin, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" needs %llu bytes but its offsets span %llu", f->path, info->name,
               (unsigned long long)bytes, (unsigned long long)(info->end - info->begin));
    return XD_OK;
}

static xd_result xdi_safetensors_check_metadata(xdi_safetensors *f, const xd_json *metadata) {
    const xd_json_kind kind = xd_json_kind_of(metadata);
    XD_REQUIRE(f->ctx, kind == XD_JSON_NONE || kind == XD_JSON_NULL || kind == XD_JSON_OBJECT,
               XD_ERROR_FORMAT, "%s: __metadata__ is no object", f->path);
    for (const xd_json *pair = xd_json_first(metadata); pair; pair = xd_json_next(pair))
        XD_REQUIRE(f->ctx, xd_json_string(pair, NULL), XD_ERROR_FORMAT, "%s: metadata \"%.80s\" is no string",
                   f->path, xd_json_key(pair, NULL));
    return XD_OK;
}

/* Allocates the infos and the sizes of all shapes. */
static xd_result xdi_safetensors_reserve(xdi_safetensors *f) {
    size_t tensors = 0, sizes = 0;
    for (const xd_json *entry = xd_json_first(f->header); entry; entry = xd_json_next(entry)) {
        tensors++;
        sizes += xd_json_count(xd_json_find(entry, "shape"));
    }
    f->infos = (xdi_safetensors_info *)xd_allocate(f->ctx, tensors * sizeof *f->infos);
    f->shapes = (int64_t *)xd_allocate(f->ctx, sizes * sizeof *f->shapes);
    XD_REQUIRE(f->ctx, f->infos && f->shapes, XD_ERROR_MEMORY, "%s: no room for %llu tensors", f->path,
               (unsigned long long)tensors);
    return XD_OK;
}

static int xdi_safetensors_by_offset(const void *a, const void *b) {
    const xdi_safetensors_info *x = (const xdi_safetensors_info *)a, *y = (const xdi_safetensors_info *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The tensors must cover the data area: no gap, no overlap, no byte after the last one. */
static xd_result xdi_safetensors_check_tiles(xdi_safetensors *f) {
    const size_t count = (size_t)f->count;
    const void **order = (const void **)xd_allocate(f->ctx, count * sizeof *order);
    XD_REQUIRE(f->ctx, order, XD_ERROR_MEMORY, "%s: no room to sort %llu tensors", f->path,
               (unsigned long long)count);
    for (size_t i = 0; i < count; i++) order[i] = &f->infos[i];
    xdi_sort(order, count, xdi_safetensors_by_offset);
    uint64_t end = 0;
    xd_result result = XD_OK;
    for (size_t i = 0; i < count && result == XD_OK; i++) {
        const xdi_safetensors_info *info = (const xdi_safetensors_info *)order[i];
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
static xd_result xdi_safetensors_collect(xdi_safetensors *f) {
    XD_REQUIRE(f->ctx, xd_json_kind_of(f->header) == XD_JSON_OBJECT, XD_ERROR_FORMAT,
               "%s: the header is no object", f->path);
    XD_TRY(xdi_safetensors_check_metadata(f, xd_json_find(f->header, XDI_SAFETENSORS_METADATA)));
    XD_TRY(xdi_safetensors_reserve(f));
    int64_t *sizes = f->shapes;
    for (size_t i = 0; i < xd_json_count(f->header); i++) {
        const xd_json *entry = xdi_json_by_key(f->header, i);
        if (strcmp(xd_json_key(entry, NULL), XDI_SAFETENSORS_METADATA) == 0) continue;
        xdi_safetensors_info *info = &f->infos[f->count++];
        XD_TRY(xdi_safetensors_parse_entry(f, entry, info, sizes));
        sizes += info->ndim;
    }
    XD_TRY(xdi_safetensors_check_tiles(f));
    int64_t kept = 0; /* tensors that are skipped were needed for the check above only */
    for (int64_t i = 0; i < f->count; i++)
        if (f->infos[i].dtype != XD_DTYPE_NONE || !f->skip_unknown) f->infos[kept++] = f->infos[i];
    f->count = kept;
    return XD_OK;
}

static xd_result xdi_safetensors_parse(xdi_safetensors *f, const char *header, size_t bytes) {
    xd_json_desc limits;
    memset(&limits, 0, sizeof limits);
    limits.max_bytes = bytes;
    limits.max_depth = 4;
    const xd_result result = xd_json_load_memory(f->ctx, &limits, header, bytes, &f->header);
    XD_REQUIRE(f->ctx, result == XD_OK, result, "%s: header: %s", f->path, xd_last_error(f->ctx)->message);
    return xdi_safetensors_collect(f);
}

/* ---- opening ---- */

static xd_result xdi_safetensors_read(xdi_safetensors *f, void *to, size_t bytes, uint64_t offset) {
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

/* Its first eight bytes, taken as a length, would be a message that says nothing. */
static xd_result xdi_safetensors_check_pointer(xdi_safetensors *f) {
    char begin[64];
    const size_t bytes = f->size < sizeof begin ? (size_t)f->size : sizeof begin;
    XD_TRY(xdi_safetensors_read(f, begin, bytes, 0));
    return xdi_refuse_pointer(f->ctx, f->path, begin, bytes);
}

/* The first checks, on numbers alone; then the header text, read or in place, goes to the parser. */
static xd_result xdi_safetensors_header(xdi_safetensors *f, size_t max_header_bytes) {
    unsigned char prefix[8];
    XD_REQUIRE(f->ctx, f->size >= 8, XD_ERROR_FORMAT, "%s has %llu bytes, the shortest file has 8", f->path,
               (unsigned long long)f->size);
    XD_TRY(xdi_safetensors_check_pointer(f));
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
static xd_result xdi_safetensors_map(xdi_safetensors *f) {
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

static xd_result xdi_safetensors_open_file(xdi_safetensors *f, const xdi_safetensors_desc *d) {
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    int error = xdi_file_open_read(f->ctx, f->path, &f->file);
    XD_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: open: %s", f->path, xdi_open_error(error));
    f->open = true;
    error = files->size(files->user, f->file, &f->size);
    XD_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: size: %s", f->path, strerror(error));
    if (d->mode == XD_WEIGHTS_MAP) XD_TRY(xdi_safetensors_map(f));
    return xdi_safetensors_header(f, d->max_header_bytes);
}

static xdi_safetensors *xdi_safetensors_new(xd_ctx *ctx, const char *path, const xdi_safetensors_desc *d) {
    const size_t length = strlen(path) + 1;
    xdi_safetensors *f = (xdi_safetensors *)xd_allocate(ctx, sizeof *f + length);
    if (!f) return NULL;
    f->ctx = ctx;
    f->path = (char *)(f + 1);
    f->skip_unknown = d->skip_unknown;
    memcpy(f->path, path, length);
    return f;
}

/* Returns the object in *out, or destroys it on failure. */
static xd_result xdi_safetensors_finish(xdi_safetensors *f, xd_result result, xdi_safetensors **out) {
    if (result == XD_OK)
        *out = f;
    else
        xdi_safetensors_close(f);
    return result;
}

static xdi_safetensors_desc xdi_safetensors_defaults(const xdi_safetensors_desc *desc) {
    xdi_safetensors_desc d;
    memset(&d, 0, sizeof d);
    return desc ? *desc : d;
}

XD_PRIVATE xd_result xdi_safetensors_open(xd_ctx *ctx, const char *path, const xdi_safetensors_desc *desc,
                                          xdi_safetensors **out) {
    XDI_GIVEN(ctx, ctx, path, out);
    const xdi_safetensors_desc d = xdi_safetensors_defaults(desc);
    xdi_safetensors *f = xdi_safetensors_new(ctx, path, &d);
    XD_REQUIRE(ctx, f, XD_ERROR_MEMORY, "%s: no room for a file object", path);
    return xdi_safetensors_finish(f, xdi_safetensors_open_file(f, &d), out);
}

XD_PRIVATE xd_result xdi_safetensors_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                                 const xdi_safetensors_desc *desc, xdi_safetensors **out) {
    XDI_GIVEN(ctx, ctx, out);
    XDI_GIVEN_LIST(ctx, data, bytes);
    const xdi_safetensors_desc d = xdi_safetensors_defaults(desc);
    xdi_safetensors *f = xdi_safetensors_new(ctx, "memory", &d);
    XD_REQUIRE(ctx, f, XD_ERROR_MEMORY, "no room for a file object");
    f->bytes = (const unsigned char *)data;
    f->size = bytes;
    return xdi_safetensors_finish(f, xdi_safetensors_header(f, d.max_header_bytes), out);
}

XD_PRIVATE void xdi_safetensors_close(xdi_safetensors *f) {
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

XD_PRIVATE int64_t xdi_safetensors_count(const xdi_safetensors *f) {
    XD_ASSERT(f);
    return f->count;
}

XD_PRIVATE const xdi_safetensors_info *xdi_safetensors_at(const xdi_safetensors *f, int64_t index) {
    XD_ASSERT(f);
    return index >= 0 && index < f->count ? &f->infos[index] : NULL;
}

static int xdi_safetensors_is_named(const void *name, const void *info) {
    return strcmp((const char *)name, ((const xdi_safetensors_info *)info)->name);
}

XD_PRIVATE int64_t xdi_safetensors_find(const xdi_safetensors *f, const char *name) {
    XD_ASSERT(f);
    return xdi_find(name, f->infos, sizeof *f->infos, f->count, xdi_safetensors_is_named);
}

XD_PRIVATE const char *xdi_safetensors_metadata(const xdi_safetensors *f, const char *key) {
    XD_ASSERT(f);
    return xd_json_string(xd_json_find(xd_json_find(f->header, XDI_SAFETENSORS_METADATA), key), NULL);
}

XD_PRIVATE bool xdi_safetensors_metadata_at(const xdi_safetensors *f, int64_t index, const char **key,
                                            const char **value) {
    XD_ASSERT(f);
    if (index < 0) return false;
    const xd_json *pair = xdi_json_by_key(xd_json_find(f->header, XDI_SAFETENSORS_METADATA), (size_t)index);
    if (!pair) return false;
    *key = xd_json_key(pair, NULL);
    *value = xd_json_string(pair, NULL);
    return true;
}

XD_PRIVATE const char *xdi_safetensors_path(const xdi_safetensors *f) {
    return f->path;
}

XD_PRIVATE uint64_t xdi_safetensors_size(const xdi_safetensors *f, uint64_t *data) {
    *data = f->data;
    return f->size;
}

XD_PRIVATE const void *xdi_safetensors_data(const xdi_safetensors *f, int64_t index) {
    XD_ASSERT(f);
    const xdi_safetensors_info *info = xdi_safetensors_at(f, index);
    return info && info->dtype != XD_DTYPE_NONE && f->bytes ? f->bytes + f->data + info->begin : NULL;
}

/* ---- reading ---- */

/* The tensor of an index, when it can be read. */
static xd_result xdi_safetensors_take(const xdi_safetensors *f, int64_t index,
                                      const xdi_safetensors_info **out) {
    const xdi_safetensors_info *info = xdi_safetensors_at(f, index);
    XD_REQUIRE(f->ctx, info, XD_ERROR_ARGUMENT, "%s: tensor %lld of %lld", f->path, (long long)index,
               (long long)f->count);
    XD_REQUIRE(f->ctx, info->dtype != XD_DTYPE_NONE, XD_ERROR_UNSUPPORTED,
               "%s: tensor \"%.80s\" is of type %s, which cannot be read", f->path, info->name, info->type);
    *out = info;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_safetensors_read_range(xdi_safetensors *f, int64_t index, uint64_t first_byte,
                                                size_t bytes, void *destination) {
    XDI_GIVEN_LIST(f->ctx, destination, bytes);
    const xdi_safetensors_info *info;
    XD_TRY(xdi_safetensors_take(f, index, &info));
    const uint64_t length = info->end - info->begin;
    XD_REQUIRE(f->ctx, first_byte <= length && bytes <= length - first_byte, XD_ERROR_ARGUMENT,
               "%s: %llu bytes from %llu of tensor \"%.80s\", which has %llu", f->path,
               (unsigned long long)bytes, (unsigned long long)first_byte, info->name,
               (unsigned long long)length);
    return xdi_safetensors_read(f, destination, bytes, f->data + info->begin + first_byte);
}

/* A box as byte ranges ("pieces" below) of the file, all of the same length, in ascending order. */
typedef struct xdi_safetensors_box {
    const xdi_safetensors_info *info;
    const int64_t *offset, *size;
    int outer;      /* dimensions over which pieces are enumerated; the others lie inside one piece */
    uint64_t piece; /* bytes */
    uint64_t first; /* file offset of the first piece */
    int64_t pieces;
    uint64_t stride[64]; /* bytes between neighbours along a dimension */
} xdi_safetensors_box;

static xdi_safetensors_box xdi_safetensors_lay_box(const xdi_safetensors *f, const xdi_safetensors_info *info,
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

static xd_result xdi_safetensors_gather(xdi_safetensors *f, const xdi_safetensors_box *box, unsigned char *to,
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

static xd_result xdi_safetensors_check_box(xdi_safetensors *f, const xdi_safetensors_info *info,
                                           const int64_t *offset, const int64_t *size, bool *empty) {
    XDI_GIVEN_LIST(f->ctx, offset, info->ndim);
    XDI_GIVEN_LIST(f->ctx, size, info->ndim);
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

XD_PRIVATE xd_result xdi_safetensors_read_box(xdi_safetensors *f, int64_t index, const int64_t *offset,
                                              const int64_t *size, void *destination) {
    const xdi_safetensors_info *info;
    bool empty;
    XD_TRY(xdi_safetensors_take(f, index, &info));
    XD_TRY(xdi_safetensors_check_box(f, info, offset, size, &empty));
    if (empty) return XD_OK;
    XDI_GIVEN(f->ctx, destination);
    const xdi_safetensors_box box = xdi_safetensors_lay_box(f, info, offset, size);
    unsigned char *stage = NULL;
    if (!f->bytes && box.pieces > 1) {
        stage = (unsigned char *)xd_allocate(f->ctx, XDI_SAFETENSORS_STAGE);
        XD_REQUIRE(f->ctx, stage, XD_ERROR_MEMORY, "%s: no room for a staging buffer", f->path);
    }
    const xd_result result = xdi_safetensors_gather(f, &box, (unsigned char *)destination, stage);
    xd_release(f->ctx, stage);
    return result;
}
