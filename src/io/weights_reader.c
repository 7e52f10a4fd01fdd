/* Whole tensors of a model's directory, whose pieces may be in many files. */

#include "io/weights.h"

#include "base/json.h"
#include "base/publish.h"
#include "comm/topology.h"
#include "io/internal.h"

#include <string.h>

#define XDI_PIECES_KEY "DCP_SHARDING_INFO"
#define XDI_PIECES_OFFSETS "saved_offsets"

enum {
    XDI_PIECE_DIMS = 64, /* of a tensor in a file */
    XDI_PIECE_BYTES = 8  /* of an element of the widest type that cannot be read */
};

/* A tensor of a file: a box of a whole one. */
typedef struct xdi_weights_piece {
    const xdi_safetensors_info *info; /* its sizes */
    xdi_safetensors *file;
    int64_t index;
    int64_t number; /* of the file */
    int64_t *begin; /* [ndim] */
    int64_t key;    /* its place in one dimension, to sort by */
} xdi_weights_piece;

struct xd_weights {
    xd_ctx *ctx;
    const char *directory;     /* the caller's; valid while opening */
    bool lenient;              /* its index may differ from its files */
    bool alone;                /* a file or bytes in memory: pieces are tensors of their own */
    xdi_weights_files *model;  /* of a directory: one file or an index, or NULL: */
    xdi_safetensors **files;   /* [file_count] */
    int64_t file_count;        /* of either */
    xd_weights_file *infos;    /* [file_count] */
    xd_weights_pair *metadata; /* of all files */
    xdi_weights_piece *pieces; /* [piece_count] */
    const void **order;        /* [piece_count] by name */
    int64_t piece_count;
    xd_weights_tensor *tensors; /* [tensor_count] by name */
    int64_t *first;             /* [tensor_count] of order */
    int64_t tensor_count;
    int64_t *numbers; /* beginnings and shapes */
};

/* ---- files ---- */

static bool xdi_whole_is_weights(const char *name) {
    static const char end[] = ".safetensors";
    const size_t length = strlen(name), suffix = sizeof end - 1;
    return length > suffix && name[0] != '.' && strcmp(name + length - suffix, end) == 0;
}

static int xdi_whole_probe(const xd_weights *r, const char *name) {
    char *path = xdi_weights_path(r->ctx, r->directory, name);
    const int error = path ? xdi_file_probe(r->ctx, path) : 0;
    xd_release(r->ctx, path);
    return error;
}

static xd_result xdi_whole_open_files(xd_weights *r, const xdi_safetensors_desc *desc,
                                      const char *const *names, int64_t count) {
    r->files = (xdi_safetensors **)xd_allocate(r->ctx, (size_t)count * sizeof *r->files);
    XD_REQUIRE(r->ctx, r->files, XD_ERROR_MEMORY, "%s: no room for %lld files", r->directory,
               (long long)count);
    for (int64_t i = 0; i < count; i++) {
        if (!xdi_whole_is_weights(names[i])) continue;
        char *path = xdi_weights_path(r->ctx, r->directory, names[i]);
        XD_REQUIRE(r->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", r->directory, names[i]);
        const xd_result result = xdi_safetensors_open(r->ctx, path, desc, &r->files[r->file_count]);
        xd_release(r->ctx, path);
        XD_TRY(result);
        r->file_count++;
    }
    return XD_OK;
}

/* Whether there is neither a model nor an index. Looks again: between two looks a save may have replaced one by the other. */
static bool xdi_whole_is_pieces(const xd_weights *r) {
    enum { LOOKS = 4 };
    for (int i = 0; i < LOOKS; i++)
        if (xdi_whole_probe(r, XDI_WEIGHTS_SINGLE) == 0 || xdi_whole_probe(r, XDI_WEIGHTS_INDEX) == 0)
            return false;
    return true;
}

static void xdi_whole_close_files(xd_weights *r) {
    for (int64_t i = 0; i < r->file_count && r->files; i++) xdi_safetensors_close(r->files[i]);
    xd_release(r->ctx, r->files);
    r->files = NULL;
    r->file_count = 0;
}

/* Files in pieces are read only where readers of models would find nothing, before and after. */
static xd_result xdi_whole_open_all(xd_weights *r, const xdi_safetensors_desc *desc) {
    const char **names = NULL;
    int64_t count = 0, weights = 0;
    if (xd_ctx_settings(r->ctx)->files.list && xdi_whole_is_pieces(r))
        XD_TRY(xd_file_list(r->ctx, r->directory, &names, &count));
    for (int64_t i = 0; i < count; i++) weights += xdi_whole_is_weights(names[i]);
    if (weights > 0) {
        const xd_result result = xdi_whole_open_files(r, desc, names, count);
        xd_release(r->ctx, (void *)names);
        if (result == XD_ERROR_MEMORY || xdi_whole_is_pieces(r)) return result;
        xdi_whole_close_files(r); /* a save has put a model there */
        names = NULL;
    }
    xd_release(r->ctx, (void *)names);
    XD_TRY(xdi_weights_files_start(r->ctx, r->directory, desc, r->lenient, &r->model));
    r->file_count = xdi_weights_files_count(r->model);
    return XD_OK;
}

static xdi_safetensors *xdi_whole_file(const xd_weights *r, int64_t file) {
    return r->model ? xdi_weights_files_at(r->model, file) : r->files[file];
}

static xd_result xdi_whole_open_alone(xd_weights *r, const xd_weights_desc *desc,
                                      const xdi_safetensors_desc *how) {
    r->alone = true;
    r->files = (xdi_safetensors **)xd_allocate(r->ctx, sizeof *r->files);
    XD_REQUIRE(r->ctx, r->files, XD_ERROR_MEMORY, "%s: no room for a file list", r->directory);
    XD_TRY(desc->file ? xdi_safetensors_open(r->ctx, desc->file, how, r->files)
                      : xdi_safetensors_open_memory(r->ctx, desc->data, desc->bytes, how, r->files));
    r->file_count = 1;
    return XD_OK;
}

/* Names, sizes and metadata of the files. */
static xd_result xdi_whole_describe_files(xd_weights *r) {
    size_t pairs = 0;
    const char *key, *value;
    for (int64_t f = 0; f < r->file_count; f++)
        for (int64_t i = 0; xdi_safetensors_metadata_at(xdi_whole_file(r, f), i, &key, &value); i++) pairs++;
    r->infos = (xd_weights_file *)xd_allocate(r->ctx, (size_t)r->file_count * sizeof *r->infos);
    r->metadata = (xd_weights_pair *)xd_allocate(r->ctx, pairs * sizeof *r->metadata);
    XD_REQUIRE(r->ctx, r->infos && r->metadata, XD_ERROR_MEMORY, "%s: no room for facts of %lld files",
               r->directory, (long long)r->file_count);
    xd_weights_pair *next = r->metadata;
    for (int64_t f = 0; f < r->file_count; f++) {
        const xdi_safetensors *file = xdi_whole_file(r, f);
        xd_weights_file *info = &r->infos[f];
        const char *path = xdi_safetensors_path(file), *slash = strrchr(path, '/');
        uint64_t data;
        info->name = slash ? slash + 1 : path;
        info->bytes = xdi_safetensors_size(file, &data);
        info->metadata = next;
        while (xdi_safetensors_metadata_at(file, info->metadata_count, &next->key, &next->value)) {
            info->metadata_count++;
            next++;
        }
    }
    return XD_OK;
}

/* ---- pieces ---- */

/* Where a piece begins: zeros in a file that says nothing of it. */
static xd_result xdi_whole_take_offsets(const xd_weights *r, const xd_json *info, xdi_weights_piece *p) {
    const xd_json *list = xd_json_find(xd_json_find(info, p->info->name), XDI_PIECES_OFFSETS);
    XD_REQUIRE(r->ctx,
               !info ||
                   (xd_json_kind_of(list) == XD_JSON_ARRAY && xd_json_count(list) == (size_t)p->info->ndim),
               XD_ERROR_FORMAT, "%s: " XDI_PIECES_KEY " has no %d offsets of tensor \"%.80s\"", r->directory,
               p->info->ndim, p->info->name);
    for (int d = 0; d < p->info->ndim; d++) {
        int64_t begin = 0;
        const bool number = !info || xd_json_int64(xd_json_at(list, (size_t)d), &begin);
        XD_REQUIRE(r->ctx, number && begin >= 0 && begin <= INT64_MAX - p->info->shape[d], XD_ERROR_FORMAT,
                   "%s: " XDI_PIECES_KEY
                   " of tensor \"%.80s\": offset %lld of dimension %d, where it has %lld",
                   r->directory, p->info->name, (long long)begin, d, (long long)p->info->shape[d]);
        p->begin[d] = begin;
    }
    return XD_OK;
}

static xd_result xdi_whole_take_file(xd_weights *r, int64_t f, const xd_json *info, int64_t **numbers) {
    xdi_safetensors *file = xdi_whole_file(r, f);
    const int64_t count = xdi_safetensors_count(file);
    XD_REQUIRE(r->ctx, !info || xd_json_count(info) == (size_t)count, XD_ERROR_FORMAT,
               "%s: " XDI_PIECES_KEY " of a file of %lld tensors is that of %llu", r->directory,
               (long long)count, (unsigned long long)xd_json_count(info));
    for (int64_t i = 0; i < count; i++) {
        xdi_weights_piece *p = &r->pieces[r->piece_count];
        p->info = xdi_safetensors_at(file, i);
        if (r->model && xdi_weights_holder(r->model, p->info->name) != file)
            continue; /* one that does not count */
        p->file = file;
        p->index = i;
        p->number = f;
        p->begin = *numbers;
        *numbers += p->info->ndim;
        r->order[r->piece_count++] = p;
        XD_TRY(xdi_whole_take_offsets(r, info, p));
    }
    return XD_OK;
}

static xd_result xdi_whole_take_all(xd_weights *r, int64_t *numbers) {
    for (int64_t f = 0; f < r->file_count; f++) {
        xdi_safetensors *file = xdi_whole_file(r, f);
        const char *text = r->alone ? NULL : xdi_safetensors_metadata(file, XDI_PIECES_KEY);
        xd_json *info = NULL;
        if (text) XD_TRY(xd_json_load_memory(r->ctx, NULL, text, strlen(text), &info));
        const xd_result result = xdi_whole_take_file(r, f, info, &numbers);
        xd_json_destroy(r->ctx, info);
        XD_TRY(result);
    }
    return XD_OK;
}

static int xdi_whole_by_name(const void *a, const void *b) {
    const xdi_weights_piece *one = (const xdi_weights_piece *)a, *other = (const xdi_weights_piece *)b;
    const int names = strcmp(one->info->name, other->info->name);
    return names ? names : (one > other) - (one < other);
}

static xd_result xdi_whole_list(xd_weights *r) {
    int64_t count = 0, numbers = 0;
    for (int64_t f = 0; f < r->file_count; f++) {
        const xdi_safetensors *file = xdi_whole_file(r, f);
        count += xdi_safetensors_count(file);
        for (int64_t i = 0; i < xdi_safetensors_count(file); i++)
            numbers += 2 * (int64_t)xdi_safetensors_at(file, i)->ndim;
    }
    r->pieces = (xdi_weights_piece *)xd_allocate(r->ctx, (size_t)count * sizeof *r->pieces);
    r->order = (const void **)xd_allocate(r->ctx, (size_t)count * sizeof *r->order);
    r->tensors = (xd_weights_tensor *)xd_allocate(r->ctx, (size_t)count * sizeof *r->tensors);
    r->first = (int64_t *)xd_allocate(r->ctx, (size_t)count * sizeof *r->first);
    r->numbers = (int64_t *)xd_allocate(r->ctx, (size_t)numbers * sizeof *r->numbers);
    XD_REQUIRE(r->ctx, r->pieces && r->order && r->tensors && r->first && r->numbers, XD_ERROR_MEMORY,
               "%s: no room for a list of %lld tensors", r->directory, (long long)count);
    XD_TRY(xdi_whole_take_all(r, r->numbers));
    xdi_sort(r->order, (size_t)r->piece_count, xdi_whole_by_name);
    return XD_OK;
}

/* ---- whole tensors ---- */

static int64_t xdi_whole_volume(const int64_t *size, int ndim) {
    int64_t volume = 1;
    for (int d = 0; d < ndim; d++) volume *= size[d];
    return volume;
}

static bool xdi_whole_overlap(const xdi_weights_piece *a, const xdi_weights_piece *b) {
    for (int d = 0; d < a->info->ndim; d++)
        if (a->begin[d] >= b->begin[d] + b->info->shape[d] || b->begin[d] >= a->begin[d] + a->info->shape[d])
            return false;
    return true;
}

static int xdi_whole_by_key(const void *a, const void *b) {
    const xdi_weights_piece *one = (const xdi_weights_piece *)a, *other = (const xdi_weights_piece *)b;
    return (one->key > other->key) - (one->key < other->key);
}

/* The first dimension in which pieces begin at different places: their order in it tells which can overlap. */
static int xdi_whole_dimension(const xdi_weights_piece *const *list, int64_t count) {
    for (int d = 0; d < list[0]->info->ndim; d++)
        for (int64_t i = 1; i < count; i++)
            if (list[i]->begin[d] != list[0]->begin[d]) return d;
    return 0;
}

/* Each element once: pieces `first` and so on, `count` of them, of a tensor. */
static xd_result xdi_whole_check_cover(const xd_weights *r, const xd_weights_tensor *t, int64_t first) {
    const xdi_weights_piece **list = (const xdi_weights_piece **)(void *)(r->order + first);
    const int64_t count = t->piece_count;
    const int dim = xdi_whole_dimension(list, count);
    int64_t held = 0;
    for (int64_t i = 0; i < count && t->ndim > 0; i++)
        ((xdi_weights_piece *)r->order[first + i])->key = list[i]->begin[dim];
    xdi_sort(r->order + first, (size_t)count, xdi_whole_by_key);
    for (int64_t i = 0; i < count; i++) {
        const int64_t volume = xdi_whole_volume(list[i]->info->shape, t->ndim);
        held += volume; /* cannot overflow: those before have nothing in common */
        for (int64_t k = i + 1; k < count && volume > 0; k++) {
            if (t->ndim > 0 && list[k]->key >= list[i]->key + list[i]->info->shape[dim]) break;
            XD_REQUIRE(r->ctx,
                       xdi_whole_volume(list[k]->info->shape, t->ndim) == 0 ||
                           !xdi_whole_overlap(list[i], list[k]),
                       XD_ERROR_FORMAT, "%s: two of the %lld pieces of tensor \"%.80s\" overlap",
                       r->directory, (long long)count, t->name);
        }
    }
    const int64_t numel = xdi_whole_volume(t->shape, t->ndim);
    XD_REQUIRE(r->ctx, held == numel, XD_ERROR_FORMAT,
               "%s: tensor \"%.80s\" has %lld elements, and its %lld pieces have %lld", r->directory, t->name,
               (long long)numel, (long long)count, (long long)held);
    return XD_OK;
}

/* The shape that pieces reach, whose bytes can be counted. */
static xd_result xdi_whole_measure(const xd_weights *r, const xd_weights_tensor *t, int64_t *shape) {
    int64_t left =
        INT64_MAX / (t->dtype != XD_DTYPE_NONE ? (int64_t)xd_dtype_size(t->dtype) : (int64_t)XDI_PIECE_BYTES);
    for (int d = 0; d < t->ndim; d++) {
        XD_REQUIRE(r->ctx, shape[d] == 0 || left / shape[d] > 0, XD_ERROR_FORMAT,
                   "%s: the pieces of tensor \"%.80s\" reach further than 2^63 bytes", r->directory, t->name);
        if (shape[d] > 0) left /= shape[d];
    }
    return XD_OK;
}

/* A tensor of the pieces from `first` on that have its name. */
static xd_result xdi_whole_join(xd_weights *r, int64_t first, int64_t end, int64_t *shape) {
    const xdi_weights_piece *one = (const xdi_weights_piece *)r->order[first];
    xd_weights_tensor *t = &r->tensors[r->tensor_count];
    uint64_t data;
    r->first[r->tensor_count++] = first;
    t->name = one->info->name;
    t->dtype = one->info->dtype;
    t->type = one->info->type;
    t->ndim = one->info->ndim;
    t->shape = shape;
    t->piece_count = end - first;
    t->file = one->number;
    (void)xdi_safetensors_size(one->file, &data);
    t->begin = data + one->info->begin;
    t->end = data + one->info->end;
    memset(shape, 0, (size_t)t->ndim * sizeof *shape);
    for (int64_t i = first; i < end; i++) {
        const xdi_weights_piece *p = (const xdi_weights_piece *)r->order[i];
        XD_REQUIRE(r->ctx, strcmp(p->info->type, t->type) == 0 && p->info->ndim == t->ndim, XD_ERROR_FORMAT,
                   "%s: pieces of tensor \"%.80s\" are %s in %d dimensions and %s in %d", r->directory,
                   t->name, t->type, t->ndim, p->info->type, p->info->ndim);
        for (int d = 0; d < t->ndim; d++) {
            const int64_t reach = p->begin[d] + p->info->shape[d];
            if (reach > shape[d]) shape[d] = reach;
        }
    }
    XD_TRY(xdi_whole_measure(r, t, shape));
    return xdi_whole_check_cover(r, t, first);
}

static xd_result xdi_whole_join_all(xd_weights *r) {
    int64_t *shape = r->numbers;
    for (int64_t i = 0; i < r->piece_count; i++) shape += r->pieces[i].info->ndim; /* behind the beginnings */
    for (int64_t first = 0, end; first < r->piece_count; first = end) {
        const xdi_safetensors_info *info = ((const xdi_weights_piece *)r->order[first])->info;
        for (end = first + 1; end < r->piece_count; end++)
            if (strcmp(info->name, ((const xdi_weights_piece *)r->order[end])->info->name) != 0) break;
        XD_TRY(xdi_whole_join(r, first, end, shape));
        shape += info->ndim;
    }
    return XD_OK;
}

static xd_result xdi_whole_open(xd_weights *r, const xd_weights_desc *desc) {
    xdi_safetensors_desc how;
    memset(&how, 0, sizeof how);
    how.mode = desc->mode;
    how.max_header_bytes = desc->max_header_bytes;
    how.skip_unknown = desc->skip_unknown;
    XD_TRY(desc->directory ? xdi_whole_open_all(r, &how) : xdi_whole_open_alone(r, desc, &how));
    XD_TRY(xdi_whole_describe_files(r));
    XD_TRY(xdi_whole_list(r));
    return xdi_whole_join_all(r);
}

XD_API xd_result xd_weights_open(xd_ctx *ctx, const xd_weights_desc *desc, xd_weights **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    const int sources = (desc->directory != NULL) + (desc->file != NULL) + (desc->data != NULL);
    XD_REQUIRE(ctx, sources == 1, XD_ERROR_ARGUMENT, "%d of directory, file and data are given, not one",
               sources);
    const char *name = desc->directory ? desc->directory : desc->file ? desc->file : "memory";
    xd_weights *r = XDI_OBJECT(xd_weights, ctx, sizeof *r);
    XD_REQUIRE(ctx, r, XD_ERROR_MEMORY, "%s: no room for a model", name);
    r->ctx = ctx;
    r->directory = name;
    r->lenient = desc->lenient;
    const xd_result result = xdi_whole_open(r, desc);
    if (result == XD_OK)
        *out = r;
    else
        xd_weights_close(r);
    return result;
}

XD_API void xd_weights_close(xd_weights *r) {
    if (!r || XDI_IS_GONE(xd_weights, r)) return;
    if (!r->model) xdi_whole_close_files(r);
    xdi_weights_files_close(r->model);
    xd_release(r->ctx, r->infos);
    xd_release(r->ctx, r->metadata);
    xd_release(r->ctx, r->pieces);
    xd_release(r->ctx, (void *)r->order);
    xd_release(r->ctx, r->tensors);
    xd_release(r->ctx, r->first);
    xd_release(r->ctx, r->numbers);
    xd_release(r->ctx, r);
}

/* ---- answers ---- */

XD_API xd_weights_info xd_weights_describe(const xd_weights *r) {
    XD_ASSERT(r);
    const xd_weights_info info = { r->tensor_count, r->file_count };
    return info;
}

XD_API const xd_weights_file *xd_weights_file_at(const xd_weights *r, int64_t index) {
    XD_ASSERT(r);
    return index >= 0 && index < r->file_count ? &r->infos[index] : NULL;
}

XD_API const char *xd_weights_metadata(const xd_weights *r, const char *key) {
    XD_ASSERT(r);
    const char *value = NULL;
    for (int64_t f = 0; f < r->file_count && !value; f++)
        value = xdi_safetensors_metadata(xdi_whole_file(r, f), key);
    return value;
}

XD_API const xd_weights_tensor *xd_weights_at(const xd_weights *r, int64_t index) {
    XD_ASSERT(r);
    return index >= 0 && index < r->tensor_count ? &r->tensors[index] : NULL;
}

static int xdi_weights_is_tensor(const void *name, const void *tensor) {
    return strcmp((const char *)name, ((const xd_weights_tensor *)tensor)->name);
}

XD_API int64_t xd_weights_find(const xd_weights *r, const char *name) {
    XD_ASSERT(r);
    return xdi_find(name, r->tensors, sizeof *r->tensors, r->tensor_count, xdi_weights_is_tensor);
}

XD_PRIVATE uint64_t xdi_weights_reader_hash(const xd_weights *r) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < r->piece_count; i++) {
        const xdi_weights_piece *p = (const xdi_weights_piece *)r->order[i];
        const size_t bytes = (size_t)p->info->ndim * sizeof *p->begin;
        const uint64_t numbers[3] = { (uint64_t)p->info->dtype, (uint64_t)p->info->ndim, p->info->begin };
        hash = xd_hash(hash, numbers, sizeof numbers);
        hash = xd_hash(hash, p->info->name, strlen(p->info->name) + 1);
        hash = xd_hash(hash, p->info->type, strlen(p->info->type) + 1);
        hash = xd_hash(hash, p->info->shape, bytes);
        hash = xd_hash(hash, p->begin, bytes);
    }
    return hash;
}

/* ---- reading ---- */

/* A box of a tensor that is read, and what a piece has of it. */
typedef struct xdi_weights_cut {
    const int64_t *offset, *size;
    int64_t begin[XDI_PIECE_DIMS], extent[XDI_PIECE_DIMS];
} xdi_weights_cut;

static bool xdi_whole_cut(const xdi_weights_piece *p, xdi_weights_cut *c) {
    for (int d = 0; d < p->info->ndim; d++) {
        const int64_t low = c->offset[d] > p->begin[d] ? c->offset[d] : p->begin[d];
        const int64_t one = c->offset[d] + c->size[d], other = p->begin[d] + p->info->shape[d];
        const int64_t high = one < other ? one : other;
        if (low >= high) return false;
        c->begin[d] = low;
        c->extent[d] = high - low;
    }
    return true;
}

/* Dimensions that are gone through: what is left is side by side in the box. */
static int xdi_whole_outer(const xdi_weights_cut *c, int ndim) {
    int outer = ndim;
    while (outer > 0 && c->extent[outer - 1] == c->size[outer - 1]) outer--;
    return outer > 0 ? outer - 1 : 0;
}

static xd_result xdi_whole_read_cut(const xdi_weights_piece *p, const xdi_weights_cut *c, void *destination) {
    const int ndim = p->info->ndim, outer = xdi_whole_outer(c, ndim);
    const int64_t rows = xdi_whole_volume(c->extent, outer);
    int64_t first[XDI_PIECE_DIMS], size[XDI_PIECE_DIMS];
    for (int d = 0; d < ndim; d++) size[d] = d < outer ? 1 : c->extent[d];
    for (int64_t row = 0; row < rows; row++) {
        int64_t rest = row, place = 0, stride = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            int64_t at = c->begin[d];
            if (d < outer) {
                at += rest % c->extent[d];
                rest /= c->extent[d];
            }
            first[d] = at - p->begin[d];
            place += (at - c->offset[d]) * stride;
            stride *= c->size[d];
        }
        XD_TRY(xdi_safetensors_read_box(p->file, p->index, first, size,
                                        (char *)destination + (size_t)place * xd_dtype_size(p->info->dtype)));
    }
    return XD_OK;
}

/* The piece of a tensor in one piece, NULL of others. */
static const xdi_weights_piece *xdi_whole_single(const xd_weights *r, int64_t index) {
    return r->tensors[index].piece_count == 1 ? (const xdi_weights_piece *)r->order[r->first[index]] : NULL;
}

XD_API const void *xd_weights_data(const xd_weights *r, int64_t index) {
    XD_ASSERT(r);
    const bool known = index >= 0 && index < r->tensor_count;
    const xdi_weights_piece *p = known ? xdi_whole_single(r, index) : NULL;
    return p ? xdi_safetensors_data(p->file, p->index) : NULL;
}

/* Bytes of a tensor in one piece. */
static xd_result xdi_whole_read_bytes(xd_weights *r, int64_t index, uint64_t first_byte, size_t bytes,
                                      void *destination) {
    const xdi_weights_piece *p = xdi_whole_single(r, index);
    XD_REQUIRE(r->ctx, p, XD_ERROR_UNSUPPORTED,
               "tensor \"%.80s\": bytes of %lld pieces, which only boxes read", r->tensors[index].name,
               (long long)r->tensors[index].piece_count);
    return xdi_safetensors_read_range(p->file, p->index, first_byte, bytes, destination);
}

/* A box of a tensor, from all its pieces. */
static xd_result xdi_whole_read_box(xd_weights *r, int64_t index, const int64_t *offset, const int64_t *size,
                                    void *destination) {
    const xd_weights_tensor *t = &r->tensors[index];
    xdi_weights_cut cut;
    XDI_GIVEN_LIST(r->ctx, offset, t->ndim);
    for (int d = 0; d < t->ndim; d++) {
        const int64_t begin = offset[d], count = size[d], extent = t->shape[d];
        XD_REQUIRE(r->ctx, begin >= 0 && count >= 0 && begin <= extent && count <= extent - begin,
                   XD_ERROR_ARGUMENT,
                   "tensor \"%.80s\": %lld indices from %lld of dimension %d, which has %lld", t->name,
                   (long long)count, (long long)begin, d, (long long)extent);
    }
    cut.offset = offset;
    cut.size = size;
    for (int64_t i = 0; i < t->piece_count; i++) {
        const xdi_weights_piece *p = (const xdi_weights_piece *)r->order[r->first[index] + i];
        if (xdi_whole_cut(p, &cut)) XD_TRY(xdi_whole_read_cut(p, &cut, destination));
    }
    return XD_OK;
}

XD_API xd_result xd_weights_read(xd_weights *r, int64_t index, const xd_weights_read_desc *desc,
                                 void *destination) {
    XDI_LIVE(xd_weights, r);
    static const int64_t zeros[XDI_PIECE_DIMS] = { 0 };
    XDI_GIVEN(r ? r->ctx : NULL, r);
    XD_REQUIRE(r->ctx, index >= 0 && index < r->tensor_count, XD_ERROR_ARGUMENT, "tensor %lld of %lld",
               (long long)index, (long long)r->tensor_count);
    const xd_weights_tensor *t = &r->tensors[index];
    XD_REQUIRE(r->ctx, t->dtype != XD_DTYPE_NONE, XD_ERROR_UNSUPPORTED,
               "tensor \"%.80s\" is of type %s, which cannot be read", t->name, t->type);
    if (!desc) return xdi_whole_read_box(r, index, zeros, t->shape, destination);
    if (desc->size) return xdi_whole_read_box(r, index, desc->offset, desc->size, destination);
    XD_REQUIRE(r->ctx, !desc->offset, XD_ERROR_ARGUMENT,
               "tensor \"%.80s\": a box with offset, but size is NULL", t->name);
    return xdi_whole_read_bytes(r, index, desc->first_byte, desc->bytes, destination);
}
