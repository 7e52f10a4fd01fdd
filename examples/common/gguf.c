/* gguf.c - the reader of gguf.h.
 *
 *     "GGUF", u32 version, u64 tensors, u64 pairs
 *     pairs times:    string key, u32 kind, value           string = u64 length, bytes
 *     tensors times:  string name, u32 dimensions, u64 sizes[], u32 type, u64 offset
 *     padding to general.alignment (32), then the tensors; offsets count from here
 *
 * An array is u32 kind of its elements, u64 count, elements. Keys and names are kept sorted, so a file with
 * many costs no more than sorting them. */
#include "gguf.h"
#include "gguf_blocks.h"

#include <stdlib.h>
#include <string.h>

enum { GGUF_FLOAT32 = 6, GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9, GGUF_FLOAT64 = 12, GGUF_KINDS = 13 };
enum { GGUF_MOST_DIMS = 4 };

/* Bytes of one value of each kind; 0 for those of no fixed size. */
static const uint8_t gguf_kind_bytes[GGUF_KINDS] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

/* One pair: `value` stands behind the kind, or behind the count of an array. */
typedef struct gguf_pair {
    xd_text key;
    uint32_t kind, element; /* element: of an array */
    int64_t count;          /* of an array */
    const uint8_t *value;
} gguf_pair;

struct gguf {
    xd_ctx *ctx;
    const uint8_t *data;
    size_t bytes, at; /* `at` moves while the file is parsed */
    bool mapped;
    gguf_pair *pairs;
    gguf_tensor *tensors;
    int64_t pair_count, tensor_count;
};

/* ---- little-endian numbers ---- */

static uint64_t gguf_load(const uint8_t *from, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) value |= (uint64_t)from[i] << (8 * i);
    return value;
}

static float gguf_load_f16(const uint8_t *from) {
    return xd_f32_from_f16((uint16_t)gguf_load(from, 2));
}

static float gguf_load_f32(const uint8_t *from) {
    const uint32_t bits = (uint32_t)gguf_load(from, 4);
    float value = 0.0f;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double gguf_load_f64(const uint8_t *from) {
    const uint64_t bits = gguf_load(from, 8);
    double value = 0.0;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- parsing ---- */

static xd_result gguf_take(gguf *g, uint64_t bytes, const uint8_t **out) {
    XD_REQUIRE(g->ctx, bytes <= g->bytes - g->at, XD_ERROR_FORMAT, "%llu bytes at byte %zu of a file of %zu",
               (unsigned long long)bytes, g->at, g->bytes);
    *out = g->data + g->at;
    g->at += (size_t)bytes;
    return XD_OK;
}

static xd_result gguf_take_number(gguf *g, size_t bytes, uint64_t *out) {
    const uint8_t *from = NULL;
    XD_TRY(gguf_take(g, bytes, &from));
    *out = gguf_load(from, bytes);
    return XD_OK;
}

static xd_result gguf_take_text(gguf *g, xd_text *out) {
    const uint8_t *from = NULL;
    uint64_t length = 0;
    XD_TRY(gguf_take_number(g, 8, &length));
    XD_TRY(gguf_take(g, length, &from));
    out->data = (const char *)from;
    out->size = (int64_t)length;
    return XD_OK;
}

/* Steps over `count` values of a kind that is not ARRAY. */
static xd_result gguf_skip(gguf *g, uint32_t kind, uint64_t count) {
    const uint8_t *from = NULL;
    xd_text text;
    XD_REQUIRE(g->ctx, kind < GGUF_KINDS, XD_ERROR_FORMAT, "a value of kind %u before byte %zu", kind, g->at);
    XD_REQUIRE(g->ctx, kind != GGUF_ARRAY, XD_ERROR_UNSUPPORTED, "an array of arrays before byte %zu", g->at);
    for (uint64_t i = 0; kind == GGUF_STRING && i < count; i++) XD_TRY(gguf_take_text(g, &text));
    if (kind == GGUF_STRING) return XD_OK;
    XD_REQUIRE(g->ctx, count <= g->bytes, XD_ERROR_FORMAT, "%llu values at byte %zu of a file of %zu",
               (unsigned long long)count, g->at, g->bytes);
    return gguf_take(g, count * gguf_kind_bytes[kind], &from);
}

static xd_result gguf_take_pair(gguf *g, gguf_pair *pair) {
    uint64_t kind = 0, element = 0, count = 1;
    XD_TRY(gguf_take_text(g, &pair->key));
    XD_TRY(gguf_take_number(g, 4, &kind));
    if (kind == GGUF_ARRAY) {
        XD_TRY(gguf_take_number(g, 4, &element));
        XD_TRY(gguf_take_number(g, 8, &count));
    }
    pair->kind = (uint32_t)kind;
    pair->element = (uint32_t)element;
    pair->value = g->data + g->at;
    XD_TRY(gguf_skip(g, kind == GGUF_ARRAY ? pair->element : pair->kind, count));
    pair->count = (int64_t)count; /* it was stepped over, so it is no more than the bytes of the file */
    return XD_OK;
}

/* Elements and bytes of a block of a type; false for types that are only known to exist. */
static bool gguf_block(uint32_t type, int64_t *elements, int64_t *bytes) {
    *elements = 1;
    *bytes = type == GGUF_F32 ? 4 : 2;
    if (type == GGUF_F32 || type == GGUF_F16 || type == GGUF_BF16) return true;
    *elements = GGUF_SMALL;
    switch (type) {
    case GGUF_Q4_0: *bytes = 2 + GGUF_SMALL / 2; return true;
    case GGUF_Q4_1: *bytes = 4 + GGUF_SMALL / 2; return true;
    case GGUF_Q8_0: *bytes = 2 + GGUF_SMALL; return true;
    default: break;
    }
    *elements = GGUF_LARGE;
    *bytes =
        type == GGUF_Q4_K ? 4 + 12 + GGUF_LARGE / 2 : GGUF_LARGE / 2 + GGUF_LARGE / 4 + GGUF_LARGE / 16 + 2;
    return type == GGUF_Q4_K || type == GGUF_Q6_K;
}

/* Sizes whose product could not lie in the file are refused, whatever an element takes: no type packs more
 * than 16 into a byte. */
static xd_result gguf_take_shape(gguf *g, gguf_tensor *t) {
    uint64_t dims = 0, size = 0;
    const uint64_t most = (uint64_t)g->bytes * 16;
    uint64_t all = 1;
    XD_TRY(gguf_take_number(g, 4, &dims));
    XD_REQUIRE(g->ctx, dims >= 1 && dims <= GGUF_MOST_DIMS, XD_ERROR_FORMAT,
               "a tensor of %llu dimensions before byte %zu", (unsigned long long)dims, g->at);
    for (uint64_t i = 0; i < dims; i++) {
        XD_TRY(gguf_take_number(g, 8, &size));
        XD_REQUIRE(g->ctx, size >= 1 && size <= most / all, XD_ERROR_FORMAT,
                   "a tensor of %llu times %llu elements before byte %zu of a file of %zu",
                   (unsigned long long)all, (unsigned long long)size, g->at, g->bytes);
        all *= size;
        if (i == 0) t->cols = (int64_t)size;
    }
    t->rows = (int64_t)all / t->cols;
    return XD_OK;
}

/* Where the tensors begin is not known yet, so the offset is only read. */
static xd_result gguf_take_tensor(gguf *g, gguf_tensor *t, uint64_t *offset) {
    uint64_t type = 0;
    XD_TRY(gguf_take_text(g, &t->name));
    XD_TRY(gguf_take_shape(g, t));
    XD_TRY(gguf_take_number(g, 4, &type));
    t->type = (uint32_t)type;
    return gguf_take_number(g, 8, offset);
}

/* Checks that a tensor lies between `start` and the end of the file. */
static xd_result gguf_place(gguf *g, size_t start, uint64_t alignment, uint64_t offset, gguf_tensor *t) {
    int64_t elements = 0, bytes = 0;
    const int shown = t->name.size < 64 ? (int)t->name.size : 64;
    XD_REQUIRE(g->ctx, offset % alignment == 0 && offset <= g->bytes - start, XD_ERROR_FORMAT,
               "tensor %.*s at byte %llu of %zu, alignment %llu", shown, t->name.data,
               (unsigned long long)offset, g->bytes - start, (unsigned long long)alignment);
    t->data = g->data + start + offset;
    if (!gguf_block(t->type, &elements, &bytes)) return XD_OK;
    XD_REQUIRE(g->ctx, t->cols % elements == 0, XD_ERROR_FORMAT,
               "tensor %.*s has rows of %lld elements in blocks of %lld", shown, t->name.data,
               (long long)t->cols, (long long)elements);
    const uint64_t needs = (uint64_t)(t->rows * (t->cols / elements)) * (uint64_t)bytes;
    XD_REQUIRE(g->ctx, needs <= g->bytes - start - offset, XD_ERROR_FORMAT,
               "tensor %.*s needs %llu bytes, the file has %llu for it", shown, t->name.data,
               (unsigned long long)needs, (unsigned long long)(g->bytes - start - offset));
    return XD_OK;
}

static int gguf_compare(xd_text a, xd_text b) {
    const int64_t shorter = a.size < b.size ? a.size : b.size;
    const int order = shorter ? memcmp(a.data, b.data, (size_t)shorter) : 0;
    return order ? order : (a.size > b.size) - (a.size < b.size);
}

static int gguf_compare_pairs(const void *a, const void *b) {
    return gguf_compare(((const gguf_pair *)a)->key, ((const gguf_pair *)b)->key);
}

static int gguf_compare_tensors(const void *a, const void *b) {
    return gguf_compare(((const gguf_tensor *)a)->name, ((const gguf_tensor *)b)->name);
}

/* `count` things of at least `least` bytes each in the file. */
static xd_result gguf_room(gguf *g, uint64_t count, size_t least, size_t size, void **out) {
    XD_REQUIRE(g->ctx, count <= g->bytes / least, XD_ERROR_FORMAT, "%llu entries in a file of %zu bytes",
               (unsigned long long)count, g->bytes);
    *out = xd_allocate(g->ctx, ((size_t)count + 1) * size);
    XD_REQUIRE(g->ctx, *out != NULL, XD_ERROR_MEMORY, "no room for %llu entries", (unsigned long long)count);
    return XD_OK;
}

static xd_result gguf_take_pairs(gguf *g, uint64_t count) {
    void *room = NULL;
    XD_TRY(gguf_room(g, count, 8 + 4 + 1, sizeof *g->pairs, &room));
    g->pairs = (gguf_pair *)room;
    for (uint64_t i = 0; i < count; i++) XD_TRY(gguf_take_pair(g, &g->pairs[i]));
    g->pair_count = (int64_t)count;
    qsort(g->pairs, (size_t)count, sizeof *g->pairs, gguf_compare_pairs);
    for (uint64_t i = 1; i < count; i++)
        XD_REQUIRE(g->ctx, gguf_compare_pairs(&g->pairs[i - 1], &g->pairs[i]) != 0, XD_ERROR_FORMAT,
                   "two values of key %.*s", g->pairs[i].key.size < 64 ? (int)g->pairs[i].key.size : 64,
                   g->pairs[i].key.data);
    return XD_OK;
}

static xd_result gguf_take_tensors(gguf *g, uint64_t count, uint64_t *offsets) {
    int64_t alignment = 32;
    for (uint64_t i = 0; i < count; i++) XD_TRY(gguf_take_tensor(g, &g->tensors[i], &offsets[i]));
    (void)gguf_int(g, "general.alignment", &alignment);
    XD_REQUIRE(g->ctx, alignment >= 1 && alignment <= 65536 && (alignment & (alignment - 1)) == 0,
               XD_ERROR_FORMAT, "an alignment of %lld bytes", (long long)alignment);
    const size_t step = (size_t)alignment, padding = (step - g->at % step) % step;
    /* A file without tensors may end before the padding does. */
    const size_t start = padding <= g->bytes - g->at ? g->at + padding : g->bytes;
    for (uint64_t i = 0; i < count; i++)
        XD_TRY(gguf_place(g, start, (uint64_t)alignment, offsets[i], &g->tensors[i]));
    qsort(g->tensors, (size_t)count, sizeof *g->tensors, gguf_compare_tensors);
    for (uint64_t i = 1; i < count; i++)
        XD_REQUIRE(g->ctx, gguf_compare_tensors(&g->tensors[i - 1], &g->tensors[i]) != 0, XD_ERROR_FORMAT,
                   "two tensors of name %.*s",
                   g->tensors[i].name.size < 64 ? (int)g->tensors[i].name.size : 64, g->tensors[i].name.data);
    g->tensor_count = (int64_t)count;
    return XD_OK;
}

static xd_result gguf_take_all(gguf *g) {
    static const char pointer[] = "version https://git-lfs.github.com/spec/";
    const uint8_t *magic = NULL;
    uint64_t version = 0, tensors = 0, pairs = 0;
    void *room = NULL, *offsets = NULL;
    XD_TRY(gguf_take(g, 4, &magic));
    XD_REQUIRE(g->ctx, g->bytes < sizeof pointer - 1 || memcmp(magic, pointer, sizeof pointer - 1) != 0,
               XD_ERROR_FORMAT,
               "a pointer of Git LFS, not the GGUF file itself, which `git lfs pull` fetches");
    XD_REQUIRE(g->ctx, memcmp(magic, "GGUF", 4) == 0, XD_ERROR_FORMAT, "no GGUF file");
    XD_TRY(gguf_take_number(g, 4, &version));
    XD_REQUIRE(g->ctx, version == 2 || version == 3, XD_ERROR_UNSUPPORTED,
               "GGUF of version %llu: 2 and 3 are known", (unsigned long long)version);
    XD_TRY(gguf_take_number(g, 8, &tensors));
    XD_TRY(gguf_take_number(g, 8, &pairs));
    XD_TRY(gguf_take_pairs(g, pairs));
    XD_TRY(gguf_room(g, tensors, 8 + 4 + 8 + 4 + 8, sizeof *g->tensors, &room));
    g->tensors = (gguf_tensor *)room;
    XD_TRY(gguf_room(g, tensors, 8 + 4 + 8 + 4 + 8, sizeof(uint64_t), &offsets));
    const xd_result result = gguf_take_tensors(g, tensors, (uint64_t *)offsets);
    xd_release(g->ctx, offsets);
    return result;
}

xd_result gguf_parse(xd_ctx *ctx, const void *data, size_t bytes, gguf **out) {
    gguf *g = (gguf *)xd_allocate(ctx, sizeof *g);
    XD_REQUIRE(ctx, g != NULL, XD_ERROR_MEMORY, "no room for a GGUF reader");
    g->ctx = ctx;
    g->data = (const uint8_t *)data;
    g->bytes = bytes;
    const xd_result result = gguf_take_all(g);
    if (result == XD_OK)
        *out = g;
    else
        gguf_close(g);
    return result;
}

xd_result gguf_open(xd_ctx *ctx, const char *path, gguf **out) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const void *data = NULL;
    intptr_t file = 0;
    uint64_t bytes = 0;
    int code = files->open(files->user, path, XD_FILE_READ, &file);
    XD_REQUIRE(ctx, code == 0, XD_ERROR_IO, "cannot open %s (errno %d)", path, code);
    code = files->size(files->user, file, &bytes);
    if (code == 0 && bytes > 0) code = files->map(files->user, file, bytes, &data);
    (void)files->close(files->user, file); /* the mapping stays */
    XD_REQUIRE(ctx, code == 0 && data, XD_ERROR_IO, "cannot map the %llu bytes of %s (errno %d)",
               (unsigned long long)bytes, path, code);
    const xd_result result = gguf_parse(ctx, data, (size_t)bytes, out);
    if (result == XD_OK)
        (*out)->mapped = true;
    else
        (void)files->unmap(files->user, data, bytes);
    return result;
}

void gguf_close(gguf *g) {
    if (!g) return;
    const xd_files *files = &xd_ctx_settings(g->ctx)->files;
    if (g->mapped) (void)files->unmap(files->user, g->data, g->bytes);
    xd_release(g->ctx, g->pairs);
    xd_release(g->ctx, g->tensors);
    xd_release(g->ctx, g);
}

/* ---- metadata ---- */

static const gguf_pair *gguf_find(const gguf *g, const char *key) {
    gguf_pair wanted;
    wanted.key.data = key;
    wanted.key.size = (int64_t)strlen(key);
    if (g->pair_count == 0) return NULL;
    return (const gguf_pair *)bsearch(&wanted, g->pairs, (size_t)g->pair_count, sizeof wanted,
                                      gguf_compare_pairs);
}

/* The integer kinds: u8 i8 u16 i16 u32 i32 are 0 to 5, u64 i64 are 10 and 11; the odd ones have a sign. */
static bool gguf_is_int(uint32_t kind) {
    return kind <= 5 || kind == 10 || kind == 11;
}

static bool gguf_load_int(uint32_t kind, const uint8_t *from, int64_t *out) {
    const size_t bytes = gguf_kind_bytes[kind];
    uint64_t value = gguf_load(from, bytes);
    const bool negative = kind % 2 == 1 && (value >> (8 * bytes - 1)) != 0;
    if (negative) {
        if (bytes < 8) value |= ~(uint64_t)0 << (8 * bytes);
        *out = -(int64_t)~value - 1;
        return true;
    }
    if (value > (uint64_t)INT64_MAX) return false;
    *out = (int64_t)value;
    return true;
}

bool gguf_int(const gguf *file, const char *key, int64_t *out) {
    const gguf_pair *pair = gguf_find(file, key);
    return pair && gguf_is_int(pair->kind) && gguf_load_int(pair->kind, pair->value, out);
}

bool gguf_double(const gguf *file, const char *key, double *out) {
    const gguf_pair *pair = gguf_find(file, key);
    if (!pair || (pair->kind != GGUF_FLOAT32 && pair->kind != GGUF_FLOAT64)) return false;
    *out = pair->kind == GGUF_FLOAT32 ? (double)gguf_load_f32(pair->value) : gguf_load_f64(pair->value);
    return true;
}

bool gguf_bool(const gguf *file, const char *key, bool *out) {
    const gguf_pair *pair = gguf_find(file, key);
    if (!pair || pair->kind != GGUF_BOOL) return false;
    *out = pair->value[0] != 0;
    return true;
}

static xd_text gguf_text_at(const uint8_t *from) {
    xd_text text;
    text.size = (int64_t)gguf_load(from, 8);
    text.data = (const char *)from + 8;
    return text;
}

bool gguf_string(const gguf *file, const char *key, xd_text *out) {
    const gguf_pair *pair = gguf_find(file, key);
    if (!pair || pair->kind != GGUF_STRING) return false;
    *out = gguf_text_at(pair->value);
    return true;
}

bool gguf_text_is(xd_text text, const char *word) {
    return text.size == (int64_t)strlen(word) && memcmp(text.data, word, (size_t)text.size) == 0;
}

int gguf_shown(xd_text text) {
    return text.size < 64 ? (int)text.size : 64;
}

static bool gguf_is_string(uint32_t kind) {
    return kind == GGUF_STRING;
}

static bool gguf_is_float(uint32_t kind) {
    return kind == GGUF_FLOAT32 || kind == GGUF_FLOAT64;
}

static bool gguf_list(const gguf *file, const char *key, bool (*fits)(uint32_t kind), gguf_array *out) {
    const gguf_pair *pair = gguf_find(file, key);
    if (!pair || pair->kind != GGUF_ARRAY || !fits(pair->element)) return false;
    out->kind = pair->element;
    out->left = pair->count;
    out->next = pair->value;
    return true;
}

bool gguf_strings(const gguf *file, const char *key, gguf_array *out) {
    return gguf_list(file, key, gguf_is_string, out);
}

bool gguf_ints(const gguf *file, const char *key, gguf_array *out) {
    return gguf_list(file, key, gguf_is_int, out);
}

bool gguf_doubles(const gguf *file, const char *key, gguf_array *out) {
    return gguf_list(file, key, gguf_is_float, out);
}

bool gguf_next_string(gguf_array *array, xd_text *out) {
    if (array->left == 0) return false;
    *out = gguf_text_at(array->next);
    array->next += 8 + out->size;
    array->left--;
    return true;
}

bool gguf_next_double(gguf_array *array, double *out) {
    if (array->left == 0) return false;
    *out = array->kind == GGUF_FLOAT32 ? (double)gguf_load_f32(array->next) : gguf_load_f64(array->next);
    array->next += gguf_kind_bytes[array->kind];
    array->left--;
    return true;
}

bool gguf_next_int(gguf_array *array, int64_t *out) {
    if (array->left == 0 || !gguf_load_int(array->kind, array->next, out)) return false;
    array->next += gguf_kind_bytes[array->kind];
    array->left--;
    return true;
}

/* ---- tensors ---- */

int64_t gguf_tensor_count(const gguf *file) {
    return file->tensor_count;
}

const gguf_tensor *gguf_tensor_at(const gguf *file, int64_t index) {
    return &file->tensors[index];
}

const gguf_tensor *gguf_tensor_find(const gguf *file, const char *name) {
    gguf_tensor wanted;
    wanted.name.data = name;
    wanted.name.size = (int64_t)strlen(name);
    if (file->tensor_count == 0) return NULL;
    return (const gguf_tensor *)bsearch(&wanted, file->tensors, (size_t)file->tensor_count, sizeof wanted,
                                        gguf_compare_tensors);
}

static float gguf_load_element(uint32_t type, const uint8_t *from) {
    if (type == GGUF_F32) return gguf_load_f32(from);
    if (type == GGUF_F16) return gguf_load_f16(from);
    return xd_f32_from_bf16((uint16_t)gguf_load(from, 2));
}

xd_result gguf_read(const gguf *file, const gguf_tensor *tensor, int64_t first, int64_t rows, float *out) {
    int64_t elements = 0, bytes = 0;
    XD_REQUIRE(file->ctx, first >= 0 && rows >= 0 && first <= tensor->rows && rows <= tensor->rows - first,
               XD_ERROR_ARGUMENT, "rows %lld to %lld of a tensor of %lld", (long long)first,
               (long long)(first + rows), (long long)tensor->rows);
    XD_REQUIRE(file->ctx, gguf_block(tensor->type, &elements, &bytes), XD_ERROR_UNSUPPORTED,
               "tensor %.*s has elements of type %u", tensor->name.size < 64 ? (int)tensor->name.size : 64,
               tensor->name.data, tensor->type);
    const int64_t blocks = tensor->cols / elements;
    const uint8_t *from = tensor->data + first * blocks * bytes;
    for (int64_t i = 0; i < rows * blocks; i++, from += bytes, out += elements) {
        if (elements == 1)
            *out = gguf_load_element(tensor->type, from);
        else
            gguf_unpack_block(tensor->type, from, out);
    }
    return XD_OK;
}
