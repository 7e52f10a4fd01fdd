/* dcp_item.h - one item of a .distcp file: what torch.save has written of one tensor or of one object. It is a zip archive whose
 * entries are stored as they are: data.pkl says what the tensor is, data/0 has its elements. */
#ifndef DCP_ITEM_H
#define DCP_ITEM_H

#include "dcp_pickle.h"

enum {
    ITEM_DIMS = XD_DIMS_MAX,
    ITEM_DIRECTORY_MOST = 16 << 20, /* bytes of the list of entries */
    ITEM_PICKLE_MOST = 64 << 20     /* and of data.pkl */
};

/* A file that is open, a range of it, and how messages call that. */
typedef struct item_range {
    xd_ctx *ctx;
    const char *label;
    intptr_t file;
    uint64_t begin, length;
} item_range;

/* An entry of the archive: bytes of the range. */
typedef struct item_entry {
    uint64_t begin, length;
    uint32_t crc32;
    bool found;
} item_entry;

enum { ITEM_KEY = 32 };

/* The elements of one storage, by its key. */
typedef struct item_storage {
    char key[ITEM_KEY];
    item_entry entry;
    bool checked; /* against its checksum */
} item_storage;

/* What an archive has that is looked at. */
typedef struct item_archive {
    item_entry pickle, order, data; /* data.pkl, byteorder, data/0 */
    int64_t storages;               /* data/KEY */
    item_storage *list;             /* [storages] when there is room for all of them, else NULL */
} item_archive;

/* A tensor as its pickle says it. */
typedef struct item_tensor {
    xd_dtype dtype;   /* NONE for a type that cannot be read */
    const char *type; /* PyTorch's name of it */
    int ndim;
    int64_t shape[ITEM_DIMS], stride[ITEM_DIMS], offset; /* in elements of the storage */
    int64_t elements;                                    /* of the storage */
} item_tensor;

/* ---- bytes ---- */

static xd_result item_read(const item_range *r, uint64_t at, size_t bytes, void *to) {
    const xd_files *files = &xd_ctx_settings(r->ctx)->files;
    XD_REQUIRE(r->ctx, at <= r->length && bytes <= r->length - at, XD_ERROR_FORMAT,
               "%s: %llu bytes at %llu of an item of %llu", r->label, (unsigned long long)bytes,
               (unsigned long long)at, (unsigned long long)r->length);
    const int error = bytes ? files->read(files->user, r->file, to, bytes, r->begin + at) : 0;
    XD_REQUIRE(r->ctx, error == 0, XD_ERROR_IO, "%s: cannot read %llu bytes: %s", r->label,
               (unsigned long long)bytes, strerror(error));
    return XD_OK;
}

static xd_result item_load(const item_range *r, uint64_t at, uint64_t bytes, unsigned char **out) {
    unsigned char *data = (unsigned char *)xd_allocate(r->ctx, (size_t)bytes);
    XD_REQUIRE(r->ctx, data, XD_ERROR_MEMORY, "%s: no room for %llu bytes", r->label,
               (unsigned long long)bytes);
    const xd_result result = item_read(r, at, (size_t)bytes, data);
    if (result == XD_OK)
        *out = data;
    else
        xd_release(r->ctx, data);
    return result;
}

static uint64_t item_number(const unsigned char *data, int bytes) {
    uint64_t number = 0;
    for (int i = bytes; i-- > 0;) number = number << 8 | data[i];
    return number;
}

/* The checksum of zip archives; 0 at the beginning. */
static uint32_t item_crc32(uint32_t crc, const unsigned char *data, size_t bytes) {
    static uint32_t table[256];
    if (table[255] == 0)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? UINT32_C(0xedb88320) : 0);
            table[i] = value;
        }
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) crc = crc >> 8 ^ table[(crc ^ data[i]) & 255];
    return ~crc;
}

/* ---- the archive ---- */

/* Where the list of entries is, and how many there are. */
typedef struct item_directory {
    uint64_t begin, length, count;
} item_directory;

/* The end of an archive of more than 4 GiB says where the numbers of 64 bits are. */
static xd_result item_find_wide(const item_range *r, item_directory *d) {
    unsigned char locator[20], end[56];
    XD_REQUIRE(r->ctx, r->length >= 22 + sizeof locator, XD_ERROR_FORMAT, "%s: an archive without its end",
               r->label);
    const uint64_t at = r->length - 22 - sizeof locator;
    XD_TRY(item_read(r, at, sizeof locator, locator));
    XD_REQUIRE(r->ctx, item_number(locator, 4) == 0x07064b50, XD_ERROR_FORMAT,
               "%s: an archive without its wide end", r->label);
    XD_TRY(item_read(r, item_number(locator + 8, 8), sizeof end, end));
    XD_REQUIRE(r->ctx, item_number(end, 4) == 0x06064b50, XD_ERROR_FORMAT, "%s: no wide end at %llu",
               r->label, (unsigned long long)item_number(locator + 8, 8));
    d->count = item_number(end + 32, 8);
    d->length = item_number(end + 40, 8);
    d->begin = item_number(end + 48, 8);
    return XD_OK;
}

static xd_result item_find_directory(const item_range *r, item_directory *d) {
    unsigned char end[22];
    XD_REQUIRE(r->ctx, r->length >= sizeof end, XD_ERROR_FORMAT, "%s: %llu bytes are no archive", r->label,
               (unsigned long long)r->length);
    XD_TRY(item_read(r, r->length - sizeof end, sizeof end, end));
    XD_REQUIRE(r->ctx, item_number(end, 4) == 0x06054b50 && item_number(end + 20, 2) == 0, XD_ERROR_FORMAT,
               "%s: no end of an archive in its last 22 bytes", r->label);
    d->count = item_number(end + 10, 2);
    d->length = item_number(end + 12, 4);
    d->begin = item_number(end + 16, 4);
    if (d->count == 0xffff || d->length == UINT32_MAX || d->begin == UINT32_MAX) XD_TRY(item_find_wide(r, d));
    XD_REQUIRE(r->ctx,
               d->begin <= r->length && d->length <= r->length - d->begin && d->length <= ITEM_DIRECTORY_MOST,
               XD_ERROR_FORMAT, "%s: a list of %llu bytes of entries at %llu of an item of %llu", r->label,
               (unsigned long long)d->length, (unsigned long long)d->begin, (unsigned long long)r->length);
    return XD_OK;
}

/* One entry of the list, and the bytes of the list that it takes. */
typedef struct item_listed {
    const unsigned char *name;
    size_t name_bytes, bytes;
    uint64_t length, packed, header;
    uint32_t crc32;
} item_listed;

/* Numbers that did not fit into 32 bits follow in the order of the fields. */
static bool item_widen(const unsigned char *extra, size_t bytes, item_listed *e) {
    uint64_t *const fields[3] = { &e->length, &e->packed, &e->header };
    for (size_t at = 0; at + 4 <= bytes;) {
        const size_t size = (size_t)item_number(extra + at + 2, 2);
        if (size > bytes - at - 4) return false;
        if (item_number(extra + at, 2) == 1) {
            size_t used = 0;
            for (int i = 0; i < 3; i++) {
                if (*fields[i] != UINT32_MAX) continue;
                if (used + 8 > size) return false;
                *fields[i] = item_number(extra + at + 4 + used, 8);
                used += 8;
            }
            return true;
        }
        at += 4 + size;
    }
    return e->length != UINT32_MAX && e->packed != UINT32_MAX && e->header != UINT32_MAX;
}

static xd_result item_parse(const item_range *r, const unsigned char *list, size_t left, item_listed *e) {
    XD_REQUIRE(r->ctx, left >= 46 && item_number(list, 4) == 0x02014b50, XD_ERROR_FORMAT,
               "%s: the list of entries is damaged, %llu bytes before its end", r->label,
               (unsigned long long)left);
    const size_t extra = (size_t)item_number(list + 30, 2), comment = (size_t)item_number(list + 32, 2);
    e->name = list + 46;
    e->name_bytes = (size_t)item_number(list + 28, 2);
    e->bytes = 46 + e->name_bytes + extra + comment;
    XD_REQUIRE(r->ctx, e->bytes <= left, XD_ERROR_FORMAT,
               "%s: an entry of %llu bytes in a list that has %llu", r->label, (unsigned long long)e->bytes,
               (unsigned long long)left);
    e->crc32 = (uint32_t)item_number(list + 16, 4);
    e->packed = item_number(list + 20, 4);
    e->length = item_number(list + 24, 4);
    e->header = item_number(list + 42, 4);
    XD_REQUIRE(r->ctx, item_widen(e->name + e->name_bytes, extra, e), XD_ERROR_FORMAT,
               "%s: entry %s has no lengths", r->label, pickle_show(e->name, e->name_bytes));
    XD_REQUIRE(r->ctx, item_number(list + 10, 2) == 0 && (list[8] & 1) == 0 && e->packed == e->length,
               XD_ERROR_FORMAT, "%s: entry %s is packed: %llu bytes in %llu", r->label,
               pickle_show(e->name, e->name_bytes), (unsigned long long)e->length,
               (unsigned long long)e->packed);
    return XD_OK;
}

/* Where the bytes of an entry are: behind a header of its own, which must be the same. */
static xd_result item_place(const item_range *r, const item_directory *d, const item_listed *e,
                            item_entry *out) {
    unsigned char header[30];
    XD_REQUIRE(r->ctx, !out->found, XD_ERROR_FORMAT, "%s: entry %s is there twice", r->label,
               pickle_show(e->name, e->name_bytes));
    XD_TRY(item_read(r, e->header, sizeof header, header));
    XD_REQUIRE(r->ctx, item_number(header, 4) == 0x04034b50 && item_number(header + 26, 2) == e->name_bytes,
               XD_ERROR_FORMAT, "%s: entry %s is not at %llu", r->label, pickle_show(e->name, e->name_bytes),
               (unsigned long long)e->header);
    out->begin = e->header + sizeof header + e->name_bytes + item_number(header + 28, 2);
    out->length = e->length;
    out->crc32 = e->crc32;
    out->found = true;
    XD_REQUIRE(r->ctx, out->begin <= d->begin && out->length <= d->begin - out->begin, XD_ERROR_FORMAT,
               "%s: entry %s has %llu bytes at %llu, and the list of entries begins at %llu", r->label,
               pickle_show(e->name, e->name_bytes), (unsigned long long)out->length,
               (unsigned long long)out->begin, (unsigned long long)d->begin);
    return XD_OK;
}

/* Names are FOLDER/data.pkl, FOLDER/byteorder, FOLDER/data/KEY and others. */
static xd_result item_take(const item_range *r, const item_directory *d, const item_listed *e,
                           item_archive *out) {
    const unsigned char *slash = (const unsigned char *)memchr(e->name, '/', e->name_bytes);
    const size_t bytes = slash ? e->name_bytes - (size_t)(slash - e->name) - 1 : 0;
    if (!slash) return XD_OK;
    if (bytes == 8 && memcmp(slash + 1, "data.pkl", 8) == 0) return item_place(r, d, e, &out->pickle);
    if (bytes == 9 && memcmp(slash + 1, "byteorder", 9) == 0) return item_place(r, d, e, &out->order);
    if (bytes <= 5 || memcmp(slash + 1, "data/", 5) != 0) return XD_OK;
    out->storages++;
    if (out->list) {
        item_storage *s = &out->list[out->storages - 1];
        XD_REQUIRE(r->ctx, bytes - 5 < ITEM_KEY, XD_ERROR_FORMAT, "%s: entry %s has a key of %llu bytes",
                   r->label, pickle_show(e->name, e->name_bytes), (unsigned long long)bytes - 5);
        memcpy(s->key, slash + 6, bytes - 5);
        return item_place(r, d, e, &s->entry);
    }
    return bytes == 6 && slash[6] == '0' ? item_place(r, d, e, &out->data) : XD_OK;
}

static xd_result item_list(const item_range *r, const item_directory *d, const unsigned char *list,
                           item_archive *out) {
    uint64_t count = 0;
    size_t left = (size_t)d->length;
    while (left > 0) {
        item_listed e;
        XD_TRY(item_parse(r, list, left, &e));
        XD_TRY(item_take(r, d, &e, out));
        list += e.bytes;
        left -= e.bytes;
        count++;
    }
    XD_REQUIRE(r->ctx, count == d->count, XD_ERROR_FORMAT, "%s: %llu entries, and the archive says %llu",
               r->label, (unsigned long long)count, (unsigned long long)d->count);
    XD_REQUIRE(r->ctx, out->pickle.found && out->pickle.length <= ITEM_PICKLE_MOST, XD_ERROR_FORMAT,
               "%s: no data.pkl of at most %d bytes", r->label, ITEM_PICKLE_MOST);
    return XD_OK;
}

static xd_result item_check_order(const item_range *r, const item_archive *a) {
    char order[8] = "";
    if (!a->order.found) return XD_OK; /* older files have none, and were little-endian */
    if (a->order.length < sizeof order) XD_TRY(item_read(r, a->order.begin, (size_t)a->order.length, order));
    XD_REQUIRE(r->ctx, strcmp(order, "little") == 0, XD_ERROR_FORMAT, "%s: its byte order is not \"little\"",
               r->label);
    return XD_OK;
}

/* Finds the entries of an item; `all` storages, in out->list, which is the caller's to release whatever the result. */
static xd_result item_open_archive(const item_range *r, bool all, item_archive *out) {
    item_directory d;
    unsigned char *list;
    memset(out, 0, sizeof *out);
    XD_TRY(item_find_directory(r, &d));
    if (all) {
        const uint64_t most = d.length / 46 + 1;
        XD_REQUIRE(r->ctx, d.count <= most, XD_ERROR_FORMAT, "%s: %llu entries in a list of %llu bytes",
                   r->label, (unsigned long long)d.count, (unsigned long long)d.length);
        out->list = (item_storage *)xd_allocate(r->ctx, (size_t)most * sizeof *out->list);
        XD_REQUIRE(r->ctx, out->list, XD_ERROR_MEMORY, "%s: no room for %llu entries", r->label,
                   (unsigned long long)most);
    }
    XD_TRY(item_load(r, d.begin, d.length, &list));
    const xd_result result = item_list(r, &d, list, out);
    xd_release(r->ctx, list);
    XD_TRY(result);
    return item_check_order(r, out);
}

static xd_result item_open(const item_range *r, item_archive *out) {
    return item_open_archive(r, false, out);
}

static xd_result item_check_sum(const item_range *r, const char *entry, const item_entry *e, uint32_t crc32) {
    XD_REQUIRE(r->ctx, crc32 == e->crc32, XD_ERROR_CORRUPT,
               "%s: entry %s has checksum %08x, and the archive says %08x", r->label, entry, (unsigned)crc32,
               (unsigned)e->crc32);
    return XD_OK;
}

/* Loads data.pkl, to be released with xd_release. */
static xd_result item_load_pickle(const item_range *r, const item_archive *a, unsigned char **out) {
    XD_TRY(item_load(r, a->pickle.begin, a->pickle.length, out));
    const xd_result result =
        item_check_sum(r, "data.pkl", &a->pickle, item_crc32(0, *out, (size_t)a->pickle.length));
    if (result != XD_OK) xd_release(r->ctx, *out);
    return result;
}

/* ---- the tensor ---- */

/* A type of PyTorch: of a dtype, and of a class of storages. */
typedef struct item_type {
    const char *name, *storage;
    xd_dtype dtype; /* NONE: it cannot be read */
    int bytes;
} item_type;

/* The type of a class of storages, or of a dtype; NULL for none. */
static const item_type *item_find_type(const pickle *p, int32_t value) {
    static const item_type types[] = {
        { "bool", "BoolStorage", XD_DTYPE_BOOL, 1 },
        { "uint8", "ByteStorage", XD_DTYPE_U8, 1 },
        { "int8", "CharStorage", XD_DTYPE_I8, 1 },
        { "int16", "ShortStorage", XD_DTYPE_I16, 2 },
        { "uint16", "", XD_DTYPE_U16, 2 },
        { "int32", "IntStorage", XD_DTYPE_I32, 4 },
        { "uint32", "", XD_DTYPE_U32, 4 },
        { "int64", "LongStorage", XD_DTYPE_I64, 8 },
        { "uint64", "", XD_DTYPE_U64, 8 },
        { "float16", "HalfStorage", XD_DTYPE_F16, 2 },
        { "bfloat16", "BFloat16Storage", XD_DTYPE_BF16, 2 },
        { "float32", "FloatStorage", XD_DTYPE_F32, 4 },
        { "float64", "DoubleStorage", XD_DTYPE_F64, 8 },
        { "float8_e4m3fn", "", XD_DTYPE_F8_E4M3, 1 },
        { "float8_e5m2", "", XD_DTYPE_F8_E5M2, 1 },
        { "float8_e4m3fnuz", "", XD_DTYPE_NONE, 1 },
        { "float8_e5m2fnuz", "", XD_DTYPE_NONE, 1 },
        { "float8_e8m0fnu", "", XD_DTYPE_NONE, 1 },
        { "float4_e2m1fn_x2", "", XD_DTYPE_NONE, 1 },
        { "complex32", "", XD_DTYPE_NONE, 4 },
        { "complex64", "ComplexFloatStorage", XD_DTYPE_NONE, 8 },
        { "complex128", "ComplexDoubleStorage", XD_DTYPE_NONE, 16 },
    };
    if (!pickle_is(p, value, PICKLE_CLASS)) return NULL;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (pickle_is_class(p, value, types[i].name) || pickle_is_class(p, value, types[i].storage))
            return &types[i];
    return NULL;
}

/* Numbers of a tuple, a list or a torch.Size; returns how many, -1 for what is none, for more than ITEM_DIMS, and for a number
 * below 0. */
static int item_numbers(const pickle *p, int32_t value, int64_t *out) {
    int count = 0;
    if (pickle_is_object(p, value, "Size")) value = pickle_item_value(p, pickle_at(p, value)->first, 0);
    if (!pickle_is(p, value, PICKLE_TUPLE) && !pickle_is(p, value, PICKLE_LIST)) return -1;
    if (pickle_at(p, value)->integer > ITEM_DIMS) return -1;
    for (int32_t i = pickle_first(p, value); i >= 0; i = pickle_next(p, i)) {
        const int32_t number = pickle_item_at(p, i)->value;
        if (!pickle_is(p, number, PICKLE_INTEGER) || pickle_at(p, number)->integer < 0) return -1;
        out[count++] = pickle_at(p, number)->integer;
    }
    return count;
}

/* The product of a shape; -1 when it is beyond 2^62. */
static int64_t item_numel(const int64_t *shape, int ndim) {
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++)
        if (shape[d] == 0) return 0;
    for (int d = 0; d < ndim; d++) {
        if (numel > (INT64_C(1) << 62) / shape[d]) return -1;
        numel *= shape[d];
    }
    return numel;
}

/* ("storage", class, key, place, elements): its type, NULL for one of bytes. */
static xd_result item_read_storage(const pickle *p, int32_t storage, int32_t *key, const item_type **type,
                                   int64_t *count) {
    PICKLE_REQUIRE_AT(p, 0, pickle_is(p, storage, PICKLE_STORAGE), "a tensor without a storage");
    const int32_t what = pickle_at(p, storage)->first;
    const int32_t class = pickle_item_value(p, what, 1), elements = pickle_item_value(p, what, 4);
    const size_t at = pickle_at(p, storage)->at;
    *key = pickle_item_value(p, what, 2);
    PICKLE_REQUIRE_AT(p, at,
                      pickle_is_text(p, pickle_item_value(p, what, 0), "storage") &&
                          pickle_is(p, *key, PICKLE_TEXT) && pickle_is(p, class, PICKLE_CLASS),
                      "a storage without a class or a key");
    PICKLE_REQUIRE_AT(p, at, pickle_is(p, elements, PICKLE_INTEGER) && pickle_at(p, elements)->integer >= 0,
                      "a storage without a number of elements");
    *count = pickle_at(p, elements)->integer;
    *type = item_find_type(p, class);
    PICKLE_REQUIRE_AT(p, at, *type || pickle_is_class(p, class, "UntypedStorage"),
                      "a storage of \"%s\", which is no class of storages",
                      pickle_classes[pickle_at(p, class)->class].name);
    return XD_OK;
}

/* What the arguments of a call that makes a tensor say; *key is the text that names its storage. */
static xd_result item_read_arguments(const pickle *p, int32_t object, item_tensor *t, int32_t *key) {
    const bool untyped = pickle_is_object(p, object, "_rebuild_tensor_v3");
    const size_t at = object >= 0 ? pickle_at(p, object)->at : 0;
    const item_type *type;
    PICKLE_REQUIRE_AT(p, at, untyped || pickle_is_object(p, object, "_rebuild_tensor_v2"),
                      "an item that is no tensor");
    const int32_t arguments = pickle_at(p, object)->first;
    const int32_t offset = pickle_item_value(p, arguments, 1);
    memset(t, 0, sizeof *t);
    XD_TRY(item_read_storage(p, pickle_item_value(p, arguments, 0), key, &type, &t->elements));
    if (untyped) type = item_find_type(p, pickle_item_value(p, arguments, 6));
    PICKLE_REQUIRE_AT(p, at, type, "a tensor without a type");
    t->dtype = type->dtype;
    t->type = type->name;
    if (untyped) t->elements /= type->bytes; /* were bytes */
    t->ndim = item_numbers(p, pickle_item_value(p, arguments, 2), t->shape);
    PICKLE_REQUIRE_AT(
        p, at, t->ndim >= 0 && t->ndim == item_numbers(p, pickle_item_value(p, arguments, 3), t->stride),
        "a tensor without a shape and strides of at most %d dimensions", ITEM_DIMS);
    PICKLE_REQUIRE_AT(p, at, pickle_is(p, offset, PICKLE_INTEGER) && pickle_at(p, offset)->integer >= 0,
                      "a tensor without an offset");
    t->offset = pickle_at(p, offset)->integer;
    return XD_OK;
}

/* Every element must lie in the storage, which messages call data/KEY. Its type can be read. */
static xd_result item_check_tensor(const pickle *p, size_t at, const item_entry *data, const char *key,
                                   const item_tensor *t) {
    const int64_t numel = item_numel(t->shape, t->ndim), size = (int64_t)xd_dtype_size(t->dtype);
    int64_t last = t->offset;
    PICKLE_REQUIRE_AT(p, at,
                      data->found && (uint64_t)t->elements <= data->length / (uint64_t)size &&
                          (uint64_t)t->elements * (uint64_t)size == data->length,
                      "a storage of %lld elements of %lld bytes, and data/%s has %llu bytes",
                      (long long)t->elements, (long long)size, key, (unsigned long long)data->length);
    PICKLE_REQUIRE_AT(p, at, numel >= 0 && numel <= t->elements,
                      "a tensor of %lld elements in a storage of %lld", (long long)numel,
                      (long long)t->elements);
    if (numel == 0) return XD_OK;
    for (int d = 0; d < t->ndim; d++) {
        const int64_t steps = t->shape[d] - 1;
        PICKLE_REQUIRE_AT(p, at,
                          last <= t->elements && (steps == 0 || t->stride[d] <= (t->elements - last) / steps),
                          "stride %lld of dimension %d leaves a storage of %lld elements",
                          (long long)t->stride[d], d, (long long)t->elements);
        last += steps * t->stride[d];
    }
    PICKLE_REQUIRE_AT(p, at, last < t->elements, "the last element is %lld of a storage of %lld",
                      (long long)last, (long long)t->elements);
    return XD_OK;
}

static xd_result item_read_tensor(const item_archive *a, const pickle *p, item_tensor *out) {
    int32_t key = PICKLE_NOTHING;
    XD_TRY(item_read_arguments(p, p->root, out, &key));
    const size_t at = pickle_at(p, p->root)->at;
    PICKLE_REQUIRE_AT(p, 0, a->storages == 1, "a tensor in an archive of %lld storages",
                      (long long)a->storages);
    PICKLE_REQUIRE_AT(p, at, pickle_is_text(p, key, "0"), "the storage of a tensor is not data/0");
    PICKLE_REQUIRE_AT(p, at, out->dtype != XD_DTYPE_NONE, "a tensor of type %s", out->type);
    return item_check_tensor(p, at, &a->data, "0", out);
}

/* Finds a tensor and its elements in an item. */
static xd_result item_open_tensor(const item_range *r, item_archive *archive, item_tensor *out) {
    pickle p;
    unsigned char *bytes;
    XD_TRY(item_open(r, archive));
    XD_TRY(item_load_pickle(r, archive, &bytes));
    xd_result result =
        pickle_open(&p, r->ctx, r->label, bytes, (size_t)archive->pickle.length, PICKLE_TENSOR);
    if (result == XD_OK) result = item_read_tensor(archive, &p, out);
    pickle_close(&p);
    xd_release(r->ctx, bytes);
    return result;
}

#endif
