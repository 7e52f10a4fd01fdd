/* manifest.json: what the files of a checkpoint are and what lies in them. Read with distrust. */

#include "base/crc.h"
#include "base/json.h"
#include "base/publish.h"
#include "checkpoint/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The text ends with its own checksum, which is formed with eight zeros in its place. */
#define XDI_MANIFEST_KEY "\"self\":\""
#define XDI_MANIFEST_CLOSE "\"}\n"
enum { XDI_MANIFEST_FORMAT = 1, XDI_MANIFEST_DIGITS = 8, XDI_MANIFEST_NAME = 255 };

/* ---- writing ---- */

static void xdi_manifest_write_hex(xd_json_writer *w, const char *key, uint64_t value) {
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, value);
    xd_json_write_key(w, key);
    xd_json_write_string(w, text);
}

static void xdi_manifest_write_file(xd_json_writer *w, const xdi_manifest_file *f, size_t block_bytes) {
    const int64_t blocks = xdi_block_count(f->bytes, block_bytes);
    uint32_t whole = 0;
    for (int64_t i = 0; i < blocks; i++) {
        const uint64_t left = f->bytes - (uint64_t)i * block_bytes;
        whole = xdi_crc32c_combine(whole, (uint32_t)f->blocks[i], left < block_bytes ? left : block_bytes);
    }
    xd_json_write_object(w);
    xd_json_write_key(w, "name");
    xd_json_write_string(w, f->name);
    if (f->group) {
        xd_json_write_key(w, "group");
        xd_json_write_string(w, f->group);
    }
    xd_json_write_key(w, "bytes");
    xd_json_write_uint64(w, f->bytes);
    xd_json_write_key(w, "crc32c");
    xd_json_write_uint64(w, whole);
    xd_json_write_key(w, "blocks");
    xd_json_write_array(w);
    for (int64_t i = 0; i < blocks; i++) xd_json_write_uint64(w, f->blocks[i]);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

static void xdi_manifest_write_tensor(xd_json_writer *json, const xdi_writer *w, int64_t file,
                                      int64_t index) {
    const xdi_planned_file *f = &w->plan->files[file];
    const xdi_stored *t = &w->plan->content->tensors[index];
    const uint64_t begin = f->layout->begin[index - f->first], bytes = f->layout->bytes[index - f->first];
    xd_json_write_object(json);
    xd_json_write_key(json, "name");
    xd_json_write_string(json, t->name);
    xd_json_write_key(json, "file");
    xd_json_write_int64(json, file);
    xd_json_write_key(json, "dtype");
    xd_json_write_string(json, xd_dtype_name(t->dtype));
    xd_json_write_key(json, "shape");
    xd_json_write_array(json);
    for (int d = 0; !t->step && d < t->part->ndim; d++) xd_json_write_int64(json, t->part->shape[d]);
    xd_json_write_end(json);
    xd_json_write_key(json, "begin");
    xd_json_write_uint64(json, begin);
    xd_json_write_key(json, "end");
    xd_json_write_uint64(json, begin + bytes);
    xdi_manifest_write_hex(json, "fingerprint", w->fingerprints[index]);
    xd_json_write_end(json);
}

static void xdi_manifest_write_all(xd_json_writer *json, const xdi_writer *w, int64_t step,
                                   const xdi_manifest_file *others, int64_t other_count) {
    const xdi_plan *p = w->plan;
    xd_json_write_object(json);
    xd_json_write_key(json, "format");
    xd_json_write_int64(json, XDI_MANIFEST_FORMAT);
    xd_json_write_key(json, "step");
    xd_json_write_int64(json, step);
    xd_json_write_key(json, "block_bytes");
    xd_json_write_uint64(json, p->block_bytes);
    xd_json_write_key(json, "files");
    xd_json_write_array(json);
    for (int64_t i = 0; i < p->file_count; i++) {
        xdi_manifest_file f;
        f.name = p->files[i].name;
        f.group = p->content->groups[p->files[i].group].name;
        f.bytes = p->files[i].layout->file_bytes;
        f.blocks = w->blocks + p->files[i].first_block;
        xdi_manifest_write_file(json, &f, p->block_bytes);
    }
    for (int64_t i = 0; i < other_count; i++) xdi_manifest_write_file(json, &others[i], p->block_bytes);
    xd_json_write_end(json);
    xd_json_write_key(json, "tensors");
    xd_json_write_array(json);
    for (int64_t i = 0; i < p->file_count; i++)
        for (int64_t k = 0; k < p->files[i].count; k++)
            xdi_manifest_write_tensor(json, w, i, p->files[i].first + k);
    xd_json_write_end(json);
    xd_json_write_key(json, "self");
    xd_json_write_string(json, "00000000");
    xd_json_write_end(json);
}

XD_PRIVATE xd_result xdi_manifest_write(const xdi_writer *w, int64_t step, const xdi_manifest_file *others,
                                        int64_t other_count, char **text, size_t *bytes) {
    xd_ctx *ctx = w->plan->content->ctx;
    xd_json_writer json = xd_json_writer_create(ctx);
    const char *written = NULL;
    size_t length = 0;
    xdi_manifest_write_all(&json, w, step, others, other_count);
    xd_result result = xd_json_writer_text(&json, &written, &length);
    char *out = result == XD_OK ? (char *)xd_allocate(ctx, length + 2) : NULL;
    if (out) {
        char digits[XDI_MANIFEST_DIGITS + 1];
        memcpy(out, written, length);
        out[length++] = '\n';
        snprintf(digits, sizeof digits, "%08" PRIx32, xd_crc32c(0, out, length));
        memcpy(out + length - strlen(XDI_MANIFEST_CLOSE) - XDI_MANIFEST_DIGITS, digits, XDI_MANIFEST_DIGITS);
        *text = out;
        *bytes = length;
    } else if (result == XD_OK) {
        result =
            XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a manifest of %llu bytes", (unsigned long long)length);
    }
    xd_json_writer_destroy(&json);
    return result;
}

/* ---- reading ---- */

/* The checksum at the end of the text is that of the text. */
static xd_result xdi_manifest_check_self(xd_ctx *ctx, const char *text, size_t bytes) {
    static const char zeros[] = "00000000";
    const size_t close = strlen(XDI_MANIFEST_CLOSE), key = strlen(XDI_MANIFEST_KEY);
    const size_t tail = key + XDI_MANIFEST_DIGITS + close;
    char digits[XDI_MANIFEST_DIGITS + 1], expected[XDI_MANIFEST_DIGITS + 1];
    XD_REQUIRE(ctx,
               bytes >= tail && memcmp(text + bytes - tail, XDI_MANIFEST_KEY, key) == 0 &&
                   memcmp(text + bytes - close, XDI_MANIFEST_CLOSE, close) == 0,
               XD_ERROR_FORMAT, "a manifest of %llu bytes does not end with its checksum",
               (unsigned long long)bytes);
    const size_t at = bytes - close - XDI_MANIFEST_DIGITS;
    uint32_t crc = xd_crc32c(0, text, at);
    crc = xd_crc32c(xd_crc32c(crc, zeros, XDI_MANIFEST_DIGITS), text + bytes - close, close);
    memcpy(digits, text + at, XDI_MANIFEST_DIGITS);
    digits[XDI_MANIFEST_DIGITS] = '\0';
    snprintf(expected, sizeof expected, "%08" PRIx32, crc);
    XD_REQUIRE(ctx, strcmp(digits, expected) == 0, XD_ERROR_CORRUPT,
               "the manifest's checksum is %s, it says %.8s", expected, digits);
    return XD_OK;
}

static xd_result xdi_manifest_read_numbers(xd_checkpoint *c) {
    int64_t format = 0, block = 0;
    XD_REQUIRE(c->ctx,
               xd_json_int64(xd_json_find(c->root, "format"), &format) && format == XDI_MANIFEST_FORMAT,
               XD_ERROR_FORMAT, "a manifest of format %lld, known is %d", (long long)format,
               (int)XDI_MANIFEST_FORMAT);
    XD_REQUIRE(c->ctx, xd_json_int64(xd_json_find(c->root, "step"), &c->info.step) && c->info.step >= 0,
               XD_ERROR_FORMAT, "the manifest has no step from 0 on");
    XD_REQUIRE(c->ctx,
               xd_json_int64(xd_json_find(c->root, "block_bytes"), &block) && block >= XDI_BLOCK_LEAST &&
                   block <= XDI_BLOCK_MOST && (block & (block - 1)) == 0,
               XD_ERROR_FORMAT, "the manifest has blocks of %lld bytes", (long long)block);
    c->info.block_bytes = (size_t)block;
    return XD_OK;
}

static const xd_json *xdi_manifest_list(const xd_checkpoint *c, const char *key) {
    const xd_json *list = xd_json_find(c->root, key);
    return xd_json_kind_of(list) == XD_JSON_ARRAY ? list : NULL;
}

XD_PRIVATE bool xdi_manifest_is_name(const char *name) {
    if (!name || !name[0] || strlen(name) > XDI_MANIFEST_NAME || !xdi_weights_is_basename(name)) return false;
    for (const char *c = name; *c; c++)
        if ((unsigned char)*c < ' ' || *c == '\\' || *c == 127) return false;
    return name[0] != '.' && strcmp(name, XDI_MANIFEST_FILE) != 0;
}

static xd_result xdi_manifest_read_blocks(xd_checkpoint *c, const xd_json *list, int64_t file) {
    const xd_checkpoint_file_info *f = &c->files[file];
    const int64_t count = xdi_block_count(f->bytes, c->info.block_bytes);
    XD_REQUIRE(c->ctx, xd_json_kind_of(list) == XD_JSON_ARRAY && (int64_t)xd_json_count(list) == count,
               XD_ERROR_FORMAT, "file \"%.80s\" of %llu bytes has %llu blocks, not %lld", f->name,
               (unsigned long long)f->bytes, (unsigned long long)xd_json_count(list), (long long)count);
    uint32_t *to = c->blocks + c->first_block[file];
    for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item)) {
        uint64_t crc = 0;
        XD_REQUIRE(c->ctx, xd_json_uint64(item, &crc) && crc <= UINT32_MAX, XD_ERROR_FORMAT,
                   "file \"%.80s\": checksum %lld of a block is none", f->name,
                   (long long)(to - c->blocks - c->first_block[file]));
        *to++ = (uint32_t)crc;
    }
    c->first_block[file + 1] = c->first_block[file] + count;
    return XD_OK;
}

static xd_result xdi_manifest_read_file(xd_checkpoint *c, const xd_json *entry, int64_t file) {
    xd_checkpoint_file_info *f = &c->files[file];
    const xd_json *group = xd_json_find(entry, "group");
    uint64_t crc = 0;
    f->name = xd_json_string(xd_json_find(entry, "name"), NULL);
    f->group = xd_json_string(group, NULL);
    XD_REQUIRE(c->ctx, xdi_manifest_is_name(f->name), XD_ERROR_FORMAT,
               "file %lld: \"%.80s\" does not lie in the directory", (long long)file, f->name ? f->name : "");
    XD_REQUIRE(c->ctx, !group || (f->group && f->group[0]), XD_ERROR_FORMAT,
               "file \"%.80s\": the group is no name", f->name);
    XD_REQUIRE(c->ctx,
               xd_json_uint64(xd_json_find(entry, "bytes"), &f->bytes) && f->bytes <= (uint64_t)INT64_MAX &&
                   xd_json_uint64(xd_json_find(entry, "crc32c"), &crc) && crc <= UINT32_MAX,
               XD_ERROR_FORMAT, "file \"%.80s\" has no length or no checksum", f->name);
    f->crc32c = (uint32_t)crc;
    return xdi_manifest_read_blocks(c, xd_json_find(entry, "blocks"), file);
}

static int xdi_manifest_by_file_name(const void *a, const void *b) {
    return strcmp(((const xd_checkpoint_file_info *)a)->name, ((const xd_checkpoint_file_info *)b)->name);
}

static xd_result xdi_manifest_check_names(xd_checkpoint *c) {
    const void **order = (const void **)xd_allocate(c->ctx, (size_t)c->info.file_count * sizeof *order);
    xd_result result = XD_OK;
    XD_REQUIRE(c->ctx, order, XD_ERROR_MEMORY, "no room to sort %lld files", (long long)c->info.file_count);
    for (int64_t i = 0; i < c->info.file_count; i++) order[i] = &c->files[i];
    xdi_sort(order, (size_t)c->info.file_count, xdi_manifest_by_file_name);
    for (int64_t i = 1; i < c->info.file_count && result == XD_OK; i++)
        if (xdi_manifest_by_file_name(order[i - 1], order[i]) == 0)
            result = XD_FAIL(c->ctx, XD_ERROR_FORMAT, "two files are named \"%.80s\"",
                             ((const xd_checkpoint_file_info *)order[i])->name);
    xd_release(c->ctx, order);
    return result;
}

static xd_result xdi_manifest_read_files(xd_checkpoint *c) {
    const xd_json *list = xdi_manifest_list(c, "files");
    size_t blocks = 0;
    int64_t i = 0;
    XD_REQUIRE(c->ctx, list, XD_ERROR_FORMAT, "the manifest has no list of files");
    for (const xd_json *entry = xd_json_first(list); entry; entry = xd_json_next(entry))
        blocks += xd_json_count(xd_json_find(entry, "blocks"));
    const size_t count = xd_json_count(list);
    c->files = (xd_checkpoint_file_info *)xd_allocate(c->ctx, count * sizeof *c->files);
    c->first_block = (int64_t *)xd_allocate(c->ctx, (count + 1) * sizeof *c->first_block);
    c->blocks = (uint32_t *)xd_allocate(c->ctx, blocks * sizeof *c->blocks);
    XD_REQUIRE(c->ctx, c->files && c->first_block && c->blocks, XD_ERROR_MEMORY, "no room for %llu files",
               (unsigned long long)count);
    c->info.file_count = (int64_t)count;
    for (const xd_json *entry = xd_json_first(list); entry; entry = xd_json_next(entry), i++)
        XD_TRY(xdi_manifest_read_file(c, entry, i));
    return xdi_manifest_check_names(c);
}

/* ---- its tensors ---- */

static xd_result xdi_manifest_read_shape(xd_checkpoint *c, const xd_json *shape, xd_checkpoint_tensor_info *t,
                                         int64_t *sizes) {
    const size_t ndim = xd_json_count(shape);
    uint64_t bytes = xd_dtype_size(t->dtype);
    XD_REQUIRE(c->ctx, xd_json_kind_of(shape) == XD_JSON_ARRAY && ndim <= XD_DIMS_MAX, XD_ERROR_FORMAT,
               "tensor \"%.80s\" has %llu dimensions, allowed are %d", t->name, (unsigned long long)ndim,
               (int)XD_DIMS_MAX);
    t->ndim = (int)ndim;
    t->shape = sizes;
    for (size_t i = 0; i < ndim; i++) {
        XD_REQUIRE(c->ctx, xd_json_int64(xd_json_at(shape, i), &sizes[i]) && sizes[i] >= 0, XD_ERROR_FORMAT,
                   "tensor \"%.80s\": size %llu of its shape is none", t->name, (unsigned long long)i);
        const uint64_t size = (uint64_t)sizes[i];
        XD_REQUIRE(c->ctx, size == 0 || bytes <= (uint64_t)INT64_MAX / size, XD_ERROR_FORMAT,
                   "the size of tensor \"%.80s\" overflows", t->name);
        bytes *= size;
    }
    XD_REQUIRE(c->ctx, t->begin <= t->end && t->end - t->begin == bytes, XD_ERROR_FORMAT,
               "tensor \"%.80s\" needs %llu bytes, its place goes from %llu to %llu", t->name,
               (unsigned long long)bytes, (unsigned long long)t->begin, (unsigned long long)t->end);
    return XD_OK;
}

/* Sixteen digits, and nothing that strtoull would accept beside them. */
static bool xdi_manifest_read_hex(const xd_json *value, uint64_t *out) {
    const char *text = xd_json_string(value, NULL);
    if (!text || strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16) return false;
    *out = strtoull(text, NULL, 16);
    return true;
}

static xd_result xdi_manifest_read_tensor(xd_checkpoint *c, const xd_json *entry,
                                          xd_checkpoint_tensor_info *t, int64_t *sizes) {
    const char *dtype = xd_json_string(xd_json_find(entry, "dtype"), NULL);
    t->name = xd_json_string(xd_json_find(entry, "name"), NULL);
    XD_REQUIRE(c->ctx, t->name && t->name[0], XD_ERROR_FORMAT, "a tensor has no name");
    XD_REQUIRE(c->ctx,
               xd_json_int64(xd_json_find(entry, "file"), &t->file) && t->file >= 0 &&
                   t->file < c->info.file_count && c->files[t->file].group,
               XD_ERROR_FORMAT, "tensor \"%.80s\" lies in no file of tensors", t->name);
    t->group = c->files[t->file].group;
    t->dtype = dtype && strcmp(dtype, "NONE") != 0 ? xdi_dtype_from_name(dtype) : XD_DTYPE_NONE;
    XD_REQUIRE(c->ctx, t->dtype != XD_DTYPE_NONE, XD_ERROR_FORMAT,
               "tensor \"%.80s\" has the unknown dtype \"%.20s\"", t->name, dtype ? dtype : "");
    XD_REQUIRE(c->ctx,
               xd_json_uint64(xd_json_find(entry, "begin"), &t->begin) &&
                   xd_json_uint64(xd_json_find(entry, "end"), &t->end) &&
                   xdi_manifest_read_hex(xd_json_find(entry, "fingerprint"), &t->fingerprint),
               XD_ERROR_FORMAT, "tensor \"%.80s\" has no place or no fingerprint", t->name);
    XD_REQUIRE(c->ctx, t->begin >= 8 && t->begin % xd_dtype_size(t->dtype) == 0, XD_ERROR_FORMAT,
               "tensor \"%.80s\" begins at %llu, elements have %llu bytes", t->name,
               (unsigned long long)t->begin, (unsigned long long)xd_dtype_size(t->dtype));
    return xdi_manifest_read_shape(c, xd_json_find(entry, "shape"), t, sizes);
}

static int xdi_manifest_by_name(const void *a, const void *b) {
    const xd_checkpoint_tensor_info *x = (const xd_checkpoint_tensor_info *)a,
                                    *y = (const xd_checkpoint_tensor_info *)b;
    const int order = strcmp(x->group, y->group);
    return order ? order : strcmp(x->name, y->name);
}

static int xdi_manifest_by_place(const void *a, const void *b) {
    const xd_checkpoint_tensor_info *x = (const xd_checkpoint_tensor_info *)a,
                                    *y = (const xd_checkpoint_tensor_info *)b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Puts the tensors into the order of their names; `order` has room for all. */
static xd_result xdi_manifest_sort(xd_checkpoint *c, const xd_checkpoint_tensor_info *found,
                                   const void **order) {
    const size_t count = (size_t)c->info.tensor_count;
    for (size_t i = 0; i < count; i++) order[i] = &found[i];
    xdi_sort(order, count, xdi_manifest_by_name);
    for (size_t i = 0; i < count; i++) c->tensors[i] = *(const xd_checkpoint_tensor_info *)order[i];
    for (size_t i = 1; i < count; i++)
        XD_REQUIRE(c->ctx, xdi_manifest_by_name(&c->tensors[i - 1], &c->tensors[i]) != 0, XD_ERROR_FORMAT,
                   "two tensors of %.80s are named \"%.80s\"", c->tensors[i].group, c->tensors[i].name);
    for (size_t i = 0; i < count; i++) order[i] = &c->tensors[i];
    xdi_sort(order, count, xdi_manifest_by_place);
    return XD_OK;
}

/* The tensors of a file follow each other without gap and overlap, up to its end. */
static xd_result xdi_manifest_check_places(xd_checkpoint *c) {
    int64_t at = 0;
    for (int64_t file = 0; file < c->info.file_count; file++) {
        const xd_checkpoint_file_info *f = &c->files[file];
        c->first_tensor[file] = at;
        uint64_t end =
            at < c->info.tensor_count && c->by_place[at]->file == file ? c->by_place[at]->begin : f->bytes;
        for (; at < c->info.tensor_count && c->by_place[at]->file == file; at++) {
            const xd_checkpoint_tensor_info *t = c->by_place[at];
            XD_REQUIRE(c->ctx, t->begin == end, XD_ERROR_FORMAT,
                       "tensor \"%.80s\" begins at %llu of %s, the one before ends at %llu", t->name,
                       (unsigned long long)t->begin, f->name, (unsigned long long)end);
            end = t->end;
        }
        XD_REQUIRE(c->ctx, end == f->bytes, XD_ERROR_FORMAT,
                   "the tensors of %s end at %llu, the file at %llu", f->name, (unsigned long long)end,
                   (unsigned long long)f->bytes);
    }
    c->first_tensor[c->info.file_count] = at;
    return XD_OK;
}

static xd_result xdi_manifest_fill_tensors(xd_checkpoint *c, const xd_json *list,
                                           xd_checkpoint_tensor_info *found) {
    int64_t *sizes = c->shapes, i = 0;
    for (const xd_json *entry = xd_json_first(list); entry; entry = xd_json_next(entry), i++) {
        XD_TRY(xdi_manifest_read_tensor(c, entry, &found[i], sizes));
        sizes += found[i].ndim;
    }
    XD_TRY(xdi_manifest_sort(c, found, (const void **)c->by_place));
    return xdi_manifest_check_places(c);
}

static xd_result xdi_manifest_read_tensors(xd_checkpoint *c) {
    const xd_json *list = xdi_manifest_list(c, "tensors");
    size_t sizes = 0;
    XD_REQUIRE(c->ctx, list, XD_ERROR_FORMAT, "the manifest has no list of tensors");
    for (const xd_json *entry = xd_json_first(list); entry; entry = xd_json_next(entry))
        sizes += xd_json_count(xd_json_find(entry, "shape"));
    const size_t count = xd_json_count(list), files = (size_t)c->info.file_count;
    xd_checkpoint_tensor_info *found =
        (xd_checkpoint_tensor_info *)xd_allocate(c->ctx, count * sizeof *found);
    c->tensors = (xd_checkpoint_tensor_info *)xd_allocate(c->ctx, count * sizeof *c->tensors);
    c->by_place = (const xd_checkpoint_tensor_info **)xd_allocate(c->ctx, count * sizeof *c->by_place);
    c->shapes = (int64_t *)xd_allocate(c->ctx, sizes * sizeof *c->shapes);
    c->first_tensor = (int64_t *)xd_allocate(c->ctx, (files + 1) * sizeof *c->first_tensor);
    xd_result result = XD_OK;
    if (!found || !c->tensors || !c->by_place || !c->shapes || !c->first_tensor)
        result = XD_FAIL(c->ctx, XD_ERROR_MEMORY, "no room for %llu tensors", (unsigned long long)count);
    c->info.tensor_count = (int64_t)count;
    if (result == XD_OK) result = xdi_manifest_fill_tensors(c, list, found);
    xd_release(c->ctx, found);
    return result;
}

static xd_result xdi_manifest_read(xd_checkpoint *c, const char *text, size_t bytes) {
    XD_TRY(xdi_manifest_check_self(c->ctx, text, bytes));
    XD_TRY(xd_json_load_memory(c->ctx, NULL, text, bytes, &c->root));
    XD_TRY(xdi_manifest_read_numbers(c));
    XD_TRY(xdi_manifest_read_files(c));
    return xdi_manifest_read_tensors(c);
}

/* ---- public ---- */

XD_PRIVATE xd_result xdi_checkpoint_open_text(xd_ctx *ctx, const char *text, size_t bytes,
                                              xd_checkpoint **out) {
    xd_checkpoint *c = XDI_OBJECT(xd_checkpoint, ctx, sizeof *c);
    XD_REQUIRE(ctx, c, XD_ERROR_MEMORY, "no room for a checkpoint");
    c->ctx = ctx;
    const xd_result result = xdi_manifest_read(c, text, bytes);
    if (result == XD_OK)
        *out = c;
    else
        xd_checkpoint_close(c);
    return result;
}

XD_PRIVATE xd_result xdi_checkpoint_open_directory(xd_ctx *ctx, const char *directory, xd_checkpoint **out) {
    char *text = NULL, *path = xdi_weights_path(ctx, directory, XDI_MANIFEST_FILE);
    size_t bytes = 0;
    XD_REQUIRE(ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", directory);
    xd_result result = xd_file_load(ctx, path, 0, &text, &bytes);
    if (result == XD_OK) {
        result = xdi_checkpoint_open_text(ctx, text, bytes, out);
        if (result != XD_OK) result = XD_FAIL(ctx, result, "%s: %s", path, xd_last_error(ctx)->message);
    }
    xd_release(ctx, text);
    xd_release(ctx, path);
    return result;
}

XD_API xd_result xd_checkpoint_open(xd_ctx *ctx, const xd_checkpoint_desc *desc, xd_checkpoint **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XD_REQUIRE(ctx, !desc->directory != !desc->text, XD_ERROR_ARGUMENT,
               "%d of directory and text are given, not one", desc->text ? 2 : 0);
    return desc->text ? xdi_checkpoint_open_text(ctx, desc->text, desc->bytes, out)
                      : xdi_checkpoint_open_directory(ctx, desc->directory, out);
}

XD_API void xd_checkpoint_close(xd_checkpoint *c) {
    if (!c || XDI_IS_GONE(xd_checkpoint, c)) return;
    xd_release(c->ctx, c->files);
    xd_release(c->ctx, c->tensors);
    xd_release(c->ctx, c->shapes);
    xd_release(c->ctx, c->first_block);
    xd_release(c->ctx, c->blocks);
    xd_release(c->ctx, c->first_tensor);
    xd_release(c->ctx, (void *)c->by_place);
    xd_json_destroy(c->ctx, c->root);
    xd_release(c->ctx, c);
}

XD_API xd_checkpoint_info xd_checkpoint_describe(const xd_checkpoint *c) {
    XD_ASSERT(c);
    return c->info;
}

XD_API const xd_checkpoint_file_info *xd_checkpoint_file_at(const xd_checkpoint *c, int64_t index) {
    XD_ASSERT(c);
    return index >= 0 && index < c->info.file_count ? &c->files[index] : NULL;
}

XD_API const xd_checkpoint_tensor_info *xd_checkpoint_tensor_at(const xd_checkpoint *c, int64_t index) {
    XD_ASSERT(c);
    return index >= 0 && index < c->info.tensor_count ? &c->tensors[index] : NULL;
}

XD_API int64_t xd_checkpoint_tensor_find(const xd_checkpoint *c, const char *group, const char *name) {
    XD_ASSERT(c);
    xd_checkpoint_tensor_info key;
    memset(&key, 0, sizeof key);
    key.group = group;
    key.name = name;
    return xdi_find(&key, c->tensors, sizeof *c->tensors, c->info.tensor_count, xdi_manifest_by_name);
}

XD_PRIVATE int64_t xdi_manifest_find_file(const xd_checkpoint *c, const char *name) {
    for (int64_t i = 0; i < c->info.file_count; i++)
        if (strcmp(c->files[i].name, name) == 0) return i;
    return -1;
}

XD_PRIVATE size_t xdi_manifest_block(const xd_checkpoint *c, int64_t file, int64_t block, uint64_t *offset) {
    *offset = (uint64_t)block * c->info.block_bytes;
    const uint64_t left = c->files[file].bytes - *offset;
    return left < c->info.block_bytes ? (size_t)left : c->info.block_bytes;
}

XD_PRIVATE size_t xdi_manifest_room(const xd_checkpoint *c, size_t limit) {
    uint64_t most = sizeof(double);
    for (int64_t i = 0; i < c->info.file_count; i++)
        if (c->files[i].bytes > most) most = c->files[i].bytes;
    return most < limit ? (size_t)most : limit;
}

/* What lies in a block: the first tensors by name, and how many there are. */
static void xdi_manifest_tell(const xd_checkpoint *c, int64_t file, uint64_t begin, uint64_t end, char *text,
                              size_t room) {
    enum { SHOWN = 3 };
    int64_t count = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int64_t i = c->first_tensor[file]; i < c->first_tensor[file + 1]; i++) {
        const xd_checkpoint_tensor_info *t = c->by_place[i];
        if (t->end <= begin || t->begin >= end) continue;
        if (count++ < SHOWN && used < room)
            used += (size_t)snprintf(text + used, room - used, "%s\"%.60s\"", count > 1 ? ", " : "", t->name);
    }
    if (count > SHOWN && used < room)
        snprintf(text + used, room - used, " and %lld more tensors", (long long)count - SHOWN);
    if (count == 0) snprintf(text, room, "no tensor");
}

XD_PRIVATE xd_result xdi_manifest_damage(const xd_checkpoint *c, const char *directory, int64_t file,
                                         int64_t block, uint32_t found) {
    char tensors[240];
    uint64_t offset;
    const size_t bytes = xdi_manifest_block(c, file, block, &offset);
    xdi_manifest_tell(c, file, offset, offset + bytes, tensors, sizeof tensors);
    return XD_FAIL(c->ctx, XD_ERROR_CORRUPT,
                   "%.120s/%s: block %lld (%llu bytes at %llu) has checksum %08" PRIx32 ", not %08" PRIx32
                   ": %s",
                   directory, c->files[file].name, (long long)block, (unsigned long long)bytes,
                   (unsigned long long)offset, found, c->blocks[c->first_block[file] + block], tensors);
}
