/* dcp_scene.h - a checkpoint as PyTorch's torch.distributed.checkpoint writes it, made here byte by byte: two files of two ranks,
 * each item a zip archive with a pickle and the elements, and .metadata. Whatever it says can be made a lie. */
#ifndef DCP_SCENE_H
#define DCP_SCENE_H

#include "xdistill.h"
#include "xd_test.h"
#include "checkpoint_files.h"

#include <stdlib.h>

/* ---- pickles ---- */

typedef struct dcp_bytes {
    unsigned char data[16384];
    size_t count;
} dcp_bytes;

static inline void put(dcp_bytes *b, const void *data, size_t bytes) {
    CHECK(b->count + bytes <= sizeof b->data);
    if (bytes) memcpy(b->data + b->count, data, bytes);
    b->count += bytes;
}

static inline void put_text(dcp_bytes *b, const char *text) {
    put(b, text, strlen(text));
}

static inline void put_number(dcp_bytes *b, uint64_t number, int bytes) {
    for (int i = 0; i < bytes; i++, number >>= 8) {
        const unsigned char byte = (unsigned char)(number & 255);
        put(b, &byte, 1);
    }
}

/* The instructions that write a text, an integer, a name. */
static inline void put_string(dcp_bytes *b, const char *text) {
    put_text(b, "X");
    put_number(b, strlen(text), 4);
    put_text(b, text);
}

static inline void put_integer(dcp_bytes *b, int64_t value) {
    put_text(b, "\x8a\x08");
    put_number(b, (uint64_t)value, 8);
}

static inline void put_class(dcp_bytes *b, const char *module, const char *name) {
    put_text(b, "c");
    put_text(b, module);
    put_text(b, "\n");
    put_text(b, name);
    put_text(b, "\n");
}

static inline void put_numbers(dcp_bytes *b, int count, const int64_t *numbers) {
    put_text(b, "(");
    for (int i = 0; i < count; i++) put_integer(b, numbers[i]);
    put_text(b, "t");
}

static inline void put_size(dcp_bytes *b, int count, const int64_t *numbers) {
    put_class(b, "torch", "Size");
    put_numbers(b, count, numbers);
    put_text(b, "\x85R");
}

/* An object whose state follows, up to "ub". */
static inline void put_object(dcp_bytes *b, const char *name) {
    put_class(b,
              strcmp(name, "_StorageInfo") == 0 ? "torch.distributed.checkpoint.filesystem"
                                                : "torch.distributed.checkpoint.metadata",
              name);
    put_text(b, ")\x81}(");
}

/* ---- what there is ---- */

enum { DCP_TENSORS = 5, DCP_CHUNKS = 7, DCP_MOST = 32 /* elements */ };

typedef struct dcp_made {
    const char *name, *dtype, *storage;
    xd_dtype type;
    int ndim;
    int64_t shape[3];
} dcp_made;

typedef struct dcp_piece {
    int tensor;
    int64_t begin[3], size[3], stride[3];
    const char *file;
    int64_t offset, length; /* in the file: set when it is written */
} dcp_piece;

typedef struct dcp_scene {
    dcp_made tensor[DCP_TENSORS];
    dcp_piece piece[DCP_CHUNKS];
    const char *object_file; /* of the object "step" */
    bool object_class;       /* it is of a class that is not in the list, else 12 */
    int64_t object_offset, object_length;
    bool wide;                                      /* archives with numbers of 64 bits */
    int skip_place;                                 /* a piece whose place is not said; -1: none */
    const char *more;                               /* in the state of every place */
    unsigned char value[DCP_TENSORS][DCP_MOST * 8]; /* the whole tensors */
    dcp_bytes file[2], metadata;
} dcp_scene;

static inline int64_t dcp_made_numel(const dcp_made *t) {
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) numel *= t->shape[d];
    return numel;
}

static inline void dcp_scene_create(dcp_scene *s) {
    static const dcp_made tensors[DCP_TENSORS] = {
        { "model.a", "float32", "FloatStorage", XD_DTYPE_F32, 2, { 5, 3, 0 } },
        { "model.b", "bfloat16", "BFloat16Storage", XD_DTYPE_BF16, 3, { 2, 4, 3 } },
        { "model.turned", "int64", "LongStorage", XD_DTYPE_I64, 2, { 3, 2, 0 } },
        { "scalar", "float32", "FloatStorage", XD_DTYPE_F32, 0, { 0, 0, 0 } },
        { "empty", "uint8", "ByteStorage", XD_DTYPE_U8, 2, { 0, 3, 0 } },
    };
    static const dcp_piece pieces[DCP_CHUNKS] = {
        { 0, { 0, 0, 0 }, { 3, 3, 0 }, { 3, 1, 0 }, "__0_0.distcp", 0, 0 },
        { 0, { 3, 0, 0 }, { 2, 3, 0 }, { 3, 1, 0 }, "__1_0.distcp", 0, 0 },
        { 1, { 0, 0, 0 }, { 2, 3, 3 }, { 9, 3, 1 }, "__0_0.distcp", 0, 0 },
        { 1, { 0, 3, 0 }, { 2, 1, 3 }, { 3, 3, 1 }, "__1_0.distcp", 0, 0 },
        { 2, { 0, 0, 0 }, { 3, 2, 0 }, { 1, 3, 0 }, "__1_0.distcp", 0, 0 },
        { 3, { 0, 0, 0 }, { 0, 0, 0 }, { 0, 0, 0 }, "__0_0.distcp", 0, 0 },
        { 4, { 0, 0, 0 }, { 0, 3, 0 }, { 3, 1, 0 }, "__0_0.distcp", 0, 0 },
    };
    memset(s, 0, sizeof *s);
    memcpy(s->tensor, tensors, sizeof tensors);
    memcpy(s->piece, pieces, sizeof pieces);
    s->object_file = "__1_0.distcp";
    s->skip_place = -1;
    s->more = "";
    for (int t = 0; t < DCP_TENSORS; t++)
        for (size_t i = 0; i < sizeof s->value[t]; i++) {
            const uint64_t numbers[2] = { (uint64_t)t, i };
            s->value[t][i] = (unsigned char)xd_hash(0, numbers, sizeof numbers);
        }
}

/* ---- items ---- */

static inline uint32_t dcp_crc(const unsigned char *data, size_t bytes) {
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ UINT32_C(0xedb88320) : crc >> 1;
    }
    return ~crc;
}

/* One entry: its own header and bytes into `out`, its line of the list into `list`. */
static inline void put_entry(dcp_bytes *out, size_t begin, dcp_bytes *list, const char *name,
                             const dcp_bytes *data, bool wide) {
    const size_t at = out->count - begin;
    const uint32_t crc = dcp_crc(data->data, data->count);
    put_text(out, "PK\x03\x04");
    put_number(out, 0, 10); /* version, flags, method, time, date */
    put_number(out, crc, 4);
    put_number(out, data->count, 4);
    put_number(out, data->count, 4);
    put_number(out, strlen(name), 2);
    put_number(out, 5, 2);
    put_text(out, name);
    put_text(out, "FB\x01");
    put_number(out, 0, 1);
    put_text(out, "Z");
    put(out, data->data, data->count);
    put_text(list, "PK\x01\x02");
    put_number(list, 0, 12);
    put_number(list, crc, 4);
    put_number(list, wide ? UINT32_MAX : data->count, 4);
    put_number(list, wide ? UINT32_MAX : data->count, 4);
    put_number(list, strlen(name), 2);
    put_number(list, wide ? 28 : 0, 2);
    put_number(list, 0, 10);
    put_number(list, wide ? UINT32_MAX : at, 4);
    put_text(list, name);
    if (!wide) return;
    put_number(list, 1, 2);
    put_number(list, 24, 2);
    put_number(list, data->count, 8);
    put_number(list, data->count, 8);
    put_number(list, at, 8);
}

/* An archive of data.pkl and, with `elements`, data/0. */
static inline void put_archive(dcp_bytes *out, const dcp_bytes *pickle, const dcp_bytes *elements,
                               bool wide) {
    const size_t begin = out->count;
    const uint64_t entries = elements ? 3 : 2;
    static dcp_bytes list, order;
    list.count = order.count = 0;
    put_text(&order, "little");
    put_entry(out, begin, &list, "archive/data.pkl", pickle, wide);
    put_entry(out, begin, &list, "archive/byteorder", &order, wide);
    if (elements) put_entry(out, begin, &list, "archive/data/0", elements, wide);
    const size_t at = out->count - begin;
    put(out, list.data, list.count);
    if (wide) {
        const size_t end = out->count - begin;
        put_text(out, "PK\x06\x06");
        put_number(out, 44, 8);
        put_number(out, 0, 12);
        put_number(out, entries, 8);
        put_number(out, entries, 8);
        put_number(out, list.count, 8);
        put_number(out, at, 8);
        put_text(out, "PK\x06\x07");
        put_number(out, 0, 4);
        put_number(out, end, 8);
        put_number(out, 1, 4);
    }
    put_text(out, "PK\x05\x06");
    put_number(out, 0, 4);
    put_number(out, wide ? 0xffff : entries, 2);
    put_number(out, wide ? 0xffff : entries, 2);
    put_number(out, wide ? UINT32_MAX : list.count, 4);
    put_number(out, wide ? UINT32_MAX : at, 4);
    put_number(out, 0, 2);
}

/* data.pkl of a piece. */
static inline void put_tensor(dcp_bytes *b, const dcp_made *t, const dcp_piece *piece, int64_t elements) {
    put_text(b, "\x80\x02");
    put_class(b, "torch._utils", "_rebuild_tensor_v2");
    put_text(b, "((");
    put_string(b, "storage");
    put_class(b, "torch", t->storage);
    put_string(b, "0");
    put_string(b, "cpu");
    put_integer(b, elements);
    put_text(b, "tQ");
    put_integer(b, 0);
    put_numbers(b, t->ndim, piece->size);
    put_numbers(b, t->ndim, piece->stride);
    put_text(b, "\x89");
    put_class(b, "collections", "OrderedDict");
    put_text(b, ")RtR.");
}

static inline dcp_bytes *dcp_file(dcp_scene *s, const char *name) {
    return &s->file[strcmp(name, "__1_0.distcp") == 0];
}

/* Element (i, j, k) of a piece is that of the whole tensor. */
static inline void put_piece(dcp_scene *s, dcp_piece *piece) {
    const dcp_made *t = &s->tensor[piece->tensor];
    static dcp_bytes pickle, elements;
    const size_t size = xd_dtype_size(t->type);
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) numel *= piece->size[d];
    pickle.count = 0;
    elements.count = (size_t)numel * size;
    for (int64_t i = 0; i < numel; i++) {
        int64_t left = i, place = 0, whole = 0, stride = 1;
        for (int d = t->ndim - 1; d >= 0; d--) {
            const int64_t index = left % piece->size[d];
            left /= piece->size[d];
            place += index * piece->stride[d];
            whole += (piece->begin[d] + index) * stride;
            stride *= t->shape[d];
        }
        memcpy(elements.data + (size_t)place * size, s->value[piece->tensor] + (size_t)whole * size, size);
    }
    put_tensor(&pickle, t, piece, numel);
    dcp_bytes *file = dcp_file(s, piece->file);
    piece->offset = (int64_t)file->count;
    put_archive(file, &pickle, &elements, s->wide);
    piece->length = (int64_t)file->count - piece->offset;
}

static inline void dcp_scene_files(dcp_scene *s) {
    static dcp_bytes pickle;
    dcp_bytes *file = dcp_file(s, s->object_file);
    s->file[0].count = s->file[1].count = 0;
    for (int i = 0; i < DCP_CHUNKS; i++) put_piece(s, &s->piece[i]);
    pickle.count = 0;
    put_text(&pickle, s->object_class ? "\x80\x02"
                                        "cos\nsystem\n."
                                      : "\x80\x02K\x0c.");
    s->object_offset = (int64_t)file->count;
    put_archive(file, &pickle, NULL, s->wide);
    s->object_length = (int64_t)file->count - s->object_offset;
}

/* ---- .metadata ---- */

static inline void put_properties(dcp_bytes *b, const char *dtype) {
    put_class(b, "torch.distributed.checkpoint.metadata", "TensorProperties");
    put_text(b, ")\x81(");
    put_class(b, "torch", dtype);
    put_class(b, "torch.serialization", "_get_layout");
    put_string(b, "torch.strided");
    put_text(b, "\x85R\x89");
    put_class(b, "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING");
    put_text(b, "K");
    put_number(b, 0, 1);
    put_text(b, "\x85R\x89Ntb");
}

static inline void put_place(dcp_bytes *b, const dcp_scene *s, const char *name, const dcp_piece *piece) {
    const int ndim = piece ? s->tensor[piece->tensor].ndim : 0;
    put_object(b, "MetadataIndex");
    put_string(b, "fqn");
    put_string(b, name);
    if (piece) put_string(b, "offset");
    if (piece) put_size(b, ndim, piece->begin);
    put_text(b, "ub");
    put_object(b, "_StorageInfo");
    put_string(b, "relative_path");
    put_string(b, piece ? piece->file : s->object_file);
    put_string(b, "offset");
    put_integer(b, piece ? piece->offset : s->object_offset);
    put_string(b, "length");
    put_integer(b, piece ? piece->length : s->object_length);
    put_text(b, s->more);
    put_text(b, "ub");
}

static inline void put_names(dcp_bytes *b, const dcp_scene *s) {
    put_string(b, "state_dict_metadata");
    put_text(b, "}(");
    for (int t = 0; t < DCP_TENSORS; t++) {
        put_string(b, s->tensor[t].name);
        put_object(b, "TensorStorageMetadata");
        put_string(b, "properties");
        put_properties(b, s->tensor[t].dtype);
        put_string(b, "size");
        put_size(b, s->tensor[t].ndim, s->tensor[t].shape);
        put_string(b, "chunks");
        put_text(b, "](");
        for (int i = 0; i < DCP_CHUNKS; i++) {
            if (s->piece[i].tensor != t) continue;
            put_object(b, "ChunkStorageMetadata");
            put_string(b, "offsets");
            put_size(b, s->tensor[t].ndim, s->piece[i].begin);
            put_string(b, "sizes");
            put_size(b, s->tensor[t].ndim, s->piece[i].size);
            put_text(b, "ub");
        }
        put_text(b, "eub");
    }
    put_string(b, "step");
    put_class(b, "torch.distributed.checkpoint.metadata", "BytesStorageMetadata");
    put_text(b, ")\x81u");
}

static inline void dcp_scene_metadata(dcp_scene *s) {
    dcp_bytes *b = &s->metadata;
    b->count = 0;
    put_text(b, "\x80\x04");
    put_object(b, "Metadata");
    put_names(b, s);
    put_string(b, "storage_data");
    put_text(b, "}(");
    for (int i = 0; i < DCP_CHUNKS; i++)
        if (i != s->skip_place) put_place(b, s, s->tensor[s->piece[i].tensor].name, &s->piece[i]);
    put_place(b, s, "step", NULL);
    put_text(b, "uub.");
}

/* All files, into an empty directory. */
static inline void dcp_scene_save(const dcp_scene *s, xd_ctx *ctx, const char *directory) {
    CHECK_EQ_INT(xd_file_save(ctx, path_in(directory, "__0_0.distcp"), s->file[0].data, s->file[0].count),
                 XD_OK);
    CHECK_EQ_INT(xd_file_save(ctx, path_in(directory, "__1_0.distcp"), s->file[1].data, s->file[1].count),
                 XD_OK);
    CHECK_EQ_INT(xd_file_save(ctx, path_in(directory, ".metadata"), s->metadata.data, s->metadata.count),
                 XD_OK);
}

#endif
