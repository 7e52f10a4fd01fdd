/* map_scene.h - a small model whose weights are named, turned, joined and stacked otherwise in the files of others, cut in
 * every way over any number of ranks. Where each element belongs is said here once more, element by element. */
#ifndef MAP_SCENE_H
#define MAP_SCENE_H

#include "xdistill.h"
#include "xd_test.h"
#include "checkpoint_files.h"
#include "regions.h"
#include "weights_calls.h"

#include <stdlib.h>

enum { MAP_MOST = 128 /* elements of a tensor */, MAP_OURS = 25, MAP_THEIRS = 17, MAP_LAYERS = 2 };

/* ---- theirs ---- */

typedef struct map_tensor {
    const char *name;
    xd_dtype dtype;
    int ndim;
    int64_t shape[3];
} map_tensor;

static const map_tensor map_theirs[MAP_THEIRS] = {
    { "wte.weight", XD_DTYPE_F32, 2, { 11, 5 } },
    { "h.0.attn.c_attn.weight", XD_DTYPE_F32, 2, { 5, 10 } },
    { "h.1.attn.c_attn.weight", XD_DTYPE_F32, 2, { 5, 10 } },
    { "h.0.attn.c_attn.bias", XD_DTYPE_BF16, 1, { 10 } },
    { "h.1.attn.c_attn.bias", XD_DTYPE_BF16, 1, { 10 } },
    { "h.0.mlp.weight", XD_DTYPE_F16, 2, { 7, 5 } },
    { "h.1.mlp.weight", XD_DTYPE_F16, 2, { 7, 5 } },
    { "stack.norm", XD_DTYPE_F32, 2, { 2, 5 } },
    { "stack.fused", XD_DTYPE_F32, 3, { 2, 4, 6 } },
    { "h.0.scale", XD_DTYPE_F32, 1, { 3 } },
    { "h.1.scale", XD_DTYPE_F32, 1, { 3 } },
    { "gate", XD_DTYPE_F32, 2, { 2, 4 } },
    { "up", XD_DTYPE_F32, 2, { 3, 4 } },
    { "turned", XD_DTYPE_U8, 3, { 2, 3, 4 } },
    { "counts", XD_DTYPE_I64, 1, { 3 } },
    { "scalar", XD_DTYPE_F32, 0, { 0 } },
    { "empty", XD_DTYPE_F32, 2, { 4, 0 } },
};

static const xd_weight_map map_entries[] = {
    { "wte.weight", "embed.weight", false, 0, 0, 0, 0 },
    { "h.{}.attn.c_attn.weight", "blocks.{}.q.weight", true, 1, 0, 0, 6 },
    { "h.{}.attn.c_attn.weight", "blocks.{}.k.weight", true, 1, 6, 0, 2 },
    { "h.{}.attn.c_attn.weight", "blocks.{}.v.weight", true, 1, 8, 0, 2 },
    { "h.{}.attn.c_attn.bias", "blocks.{}.q.bias", false, 0, 0, 0, 6 },
    { "h.{}.attn.c_attn.bias", "blocks.{}.k.bias", false, 0, 6, 0, 2 },
    { "h.{}.attn.c_attn.bias", "blocks.{}.v.bias", false, 0, 8, 0, 2 },
    { "h.{}.mlp.weight", "blocks.{}.mlp.weight", true, 0, 0, 0, 0 },
    { "stack.norm", "blocks.{}.norm", false, 0, 0, 0, 0 },
    { "stack.fused", "blocks.{}.left", true, 2, 0, 0, 4 },
    { "stack.fused", "blocks.{}.right", true, 2, 4, 0, 2 },
    { "h.{}.scale", "scales", false, 0, 0, 0, 0 },
    { "gate", "gate_up", false, 0, 0, 0, 2 },
    { "up", "gate_up", false, 0, 0, 2, 3 },
    { "turned", "t", true, 0, 0, 0, 0 },
    { "empty", "nothing", true, 0, 0, 0, 0 },
};
enum { MAP_ENTRIES = sizeof map_entries / sizeof *map_entries };

/* ---- ours ---- */

static const map_tensor map_ours[MAP_OURS] = {
    { "embed.weight", XD_DTYPE_F32, 2, { 11, 5 } },     { "blocks.0.q.weight", XD_DTYPE_F32, 2, { 6, 5 } },
    { "blocks.0.k.weight", XD_DTYPE_F32, 2, { 2, 5 } }, { "blocks.0.v.weight", XD_DTYPE_F32, 2, { 2, 5 } },
    { "blocks.0.q.bias", XD_DTYPE_BF16, 1, { 6 } },     { "blocks.0.k.bias", XD_DTYPE_BF16, 1, { 2 } },
    { "blocks.0.v.bias", XD_DTYPE_BF16, 1, { 2 } },     { "blocks.0.mlp.weight", XD_DTYPE_F16, 2, { 5, 7 } },
    { "blocks.0.norm", XD_DTYPE_F32, 1, { 5 } },        { "blocks.0.left", XD_DTYPE_F32, 2, { 4, 4 } },
    { "blocks.0.right", XD_DTYPE_F32, 2, { 2, 4 } },    { "blocks.1.q.weight", XD_DTYPE_F32, 2, { 6, 5 } },
    { "blocks.1.k.weight", XD_DTYPE_F32, 2, { 2, 5 } }, { "blocks.1.v.weight", XD_DTYPE_F32, 2, { 2, 5 } },
    { "blocks.1.q.bias", XD_DTYPE_BF16, 1, { 6 } },     { "blocks.1.k.bias", XD_DTYPE_BF16, 1, { 2 } },
    { "blocks.1.v.bias", XD_DTYPE_BF16, 1, { 2 } },     { "blocks.1.mlp.weight", XD_DTYPE_F16, 2, { 5, 7 } },
    { "blocks.1.norm", XD_DTYPE_F32, 1, { 5 } },        { "blocks.1.left", XD_DTYPE_F32, 2, { 4, 4 } },
    { "blocks.1.right", XD_DTYPE_F32, 2, { 2, 4 } },    { "scales", XD_DTYPE_F32, 2, { 2, 3 } },
    { "gate_up", XD_DTYPE_F32, 2, { 5, 4 } },           { "t", XD_DTYPE_U8, 3, { 2, 4, 3 } },
    { "nothing", XD_DTYPE_F32, 2, { 0, 4 } },
};
/* "counts" and "scalar" have no entry: see map_own below. */
enum { MAP_OWN = 2, MAP_PARTS = MAP_OURS + MAP_OWN };

static inline const map_tensor *map_own(int i) {
    return i < MAP_OURS ? &map_ours[i] : &map_theirs[i == MAP_OURS ? 14 : 15];
}

static inline int64_t map_numel(const map_tensor *t) {
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) numel *= t->shape[d];
    return numel;
}

/* Where element (r, c) of our tensor i, or (a, r, c) of "t", is: the tensor of theirs, and the number of the element there. */
static inline int map_origin(int i, int64_t index, int64_t *there) {
    const int layer = i > 10 && i < 21;
    const int64_t columns = map_own(i)->ndim > 1 ? map_own(i)->shape[map_own(i)->ndim - 1] : 1;
    const int64_t r = index / columns, c = index % columns;
    *there = index;
    if (i == 0) return 0;
    if (i < 21) {
        static const int64_t heads[3] = { 0, 6, 8 };
        const int kind = (i - 1) % 10;
        if (kind < 3) return *there = c * 10 + heads[kind] + r, 1 + layer;
        if (kind < 6) return *there = heads[kind - 3] + index, 3 + layer;
        if (kind == 6) return *there = c * 5 + r, 5 + layer;
        if (kind == 7) return *there = layer * 5 + index, 7;
        return *there = layer * 24 + c * 6 + r + (kind == 9 ? 4 : 0), 8;
    }
    if (i == 21) return *there = c, 9 + (int)r;
    if (i == 22) return *there = (r < 2 ? r : r - 2) * 4 + c, r < 2 ? 11 : 12;
    if (i == 23) return *there = (r / 4) * 12 + c * 4 + r % 4, 13;
    return i == 24 ? 16 : i - MAP_OURS + 14;
}

/* The bits of an element of theirs. */
static inline void map_value(int their, int64_t index, int salt, void *to) {
    const uint64_t numbers[3] = { (uint64_t)their, (uint64_t)index, (uint64_t)salt };
    const uint64_t hash = xd_hash(0, numbers, sizeof numbers);
    const xd_dtype dtype = map_theirs[their].dtype;
    if (dtype == XD_DTYPE_I64 || dtype == XD_DTYPE_U8)
        memcpy(to, &hash, xd_dtype_size(dtype));
    else
        xd_store_f64(to, dtype, 0, (double)(hash % 2001) / 1000.0 - 1.0);
}

/* ---- what one rank has ---- */

typedef enum map_cut { MAP_FLAT, MAP_ROWS, MAP_COLUMNS, MAP_COPIES, MAP_LAST, MAP_FOLDED, MAP_CUTS } map_cut;

typedef struct map_scene {
    int rank, ranks;
    xd_region region[MAP_PARTS];
    xd_tensor_part part[MAP_PARTS];
    int64_t count[MAP_PARTS], index[MAP_PARTS][MAP_MOST]; /* of each element here in the whole tensor */
    unsigned char data[MAP_PARTS][MAP_MOST * 8];
} map_scene;

static inline void map_restrict(map_scene *s, int i, int dim, int64_t begin, int64_t end) {
    xd_region *r = &s->region[i];
    r->count[dim] = begin < end;
    r->interval[dim][0].begin = begin;
    r->interval[dim][0].end = end;
}

/* The first and the last row that are left, and so on: two intervals where the sizes allow it. */
static inline void map_fold(map_scene *s, int i, int dim, int64_t size) {
    const xd_interval low = xd_chunk(size, 2 * s->ranks, s->rank);
    const xd_interval high = xd_chunk(size, 2 * s->ranks, 2 * s->ranks - 1 - s->rank);
    xd_region *r = &s->region[i];
    r->count[dim] = 0;
    if (low.begin < low.end) r->interval[dim][r->count[dim]++] = low;
    if (high.begin < high.end) r->interval[dim][r->count[dim]++] = high;
}

static inline void map_cut_tensor(map_scene *s, int i, map_cut cut) {
    const map_tensor *t = map_own(i);
    const int last = t->ndim - 1;
    xd_tensor_part *p = &s->part[i];
    if (t->ndim == 0 && (cut == MAP_ROWS || cut == MAP_COLUMNS || cut == MAP_FOLDED)) cut = MAP_COPIES;
    s->region[i] = region_whole(t->ndim, t->shape);
    if (cut == MAP_ROWS || cut == MAP_COLUMNS) {
        const int dim = cut == MAP_ROWS ? 0 : last;
        const xd_interval mine = xd_chunk(t->shape[dim], s->ranks, s->rank);
        map_restrict(s, i, dim, mine.begin, mine.end);
    }
    if (cut == MAP_FOLDED) map_fold(s, i, last, t->shape[last]);
    const int64_t held = region_numel(&s->region[i]);
    p->region = cut == MAP_FLAT && i % 2 ? NULL : &s->region[i];
    p->range.end = held;
    if (cut == MAP_FLAT) {
        p->range.begin = held * s->rank / s->ranks;
        p->range.end = held * (s->rank + 1) / s->ranks;
    }
    if (cut == MAP_COPIES) p->replica = s->rank != i % s->ranks;
    if (cut == MAP_LAST && s->rank != s->ranks - 1) p->range.end = 0;
}

/* The elements of a part, found by going over the whole tensor. */
static inline void map_list_elements(map_scene *s, int i) {
    const map_tensor *t = map_own(i);
    int64_t position = 0;
    s->count[i] = 0;
    for (int64_t index = 0; index < map_numel(t); index++) {
        int64_t rest = index;
        bool inside = true;
        for (int d = t->ndim - 1; d >= 0; rest /= t->shape[d--]) {
            bool held = false;
            for (int k = 0; k < s->region[i].count[d]; k++)
                held = held || (s->region[i].interval[d][k].begin <= rest % t->shape[d] &&
                                rest % t->shape[d] < s->region[i].interval[d][k].end);
            inside = inside && held;
        }
        if (!inside) continue;
        if (s->part[i].range.begin <= position && position < s->part[i].range.end)
            s->index[i][s->count[i]++] = index;
        position++;
    }
    CHECK_EQ_INT(s->count[i], s->part[i].range.end - s->part[i].range.begin);
}

static inline map_scene *map_create(int rank, int ranks, int cut) {
    map_scene *s = (map_scene *)calloc(1, sizeof *s);
    s->rank = rank;
    s->ranks = ranks;
    for (int i = 0; i < MAP_PARTS; i++) {
        const map_tensor *t = map_own(i);
        xd_tensor_part *p = &s->part[i];
        p->name = t->name;
        p->dtype = t->dtype;
        p->ndim = t->ndim;
        for (int d = 0; d < t->ndim; d++) p->shape[d] = t->shape[d];
        map_cut_tensor(s, i, (map_cut)((cut + i) % MAP_CUTS));
        map_list_elements(s, i);
        p->data = s->count[i] ? s->data[i] : NULL;
    }
    memset(s->data, 0xA5, sizeof s->data);
    return s;
}

/* Elements that are not those of the files. */
static inline int64_t map_wrong(const map_scene *s, int salt) {
    int64_t wrong = 0;
    for (int i = 0; i < MAP_PARTS; i++) {
        const size_t size = xd_dtype_size(map_own(i)->dtype);
        for (int64_t k = 0; k < s->count[i]; k++) {
            unsigned char want[8];
            int64_t there;
            const int their = map_origin(i, s->index[i][k], &there);
            map_value(their, there, salt, want);
            wrong += memcmp(s->data[i] + (size_t)k * size, want, size) != 0;
        }
    }
    return wrong;
}

static inline xd_mapped_weights map_weights(const map_scene *s) {
    xd_mapped_weights w;
    w.parts = s->part;
    w.part_count = MAP_PARTS;
    w.maps = map_entries;
    w.map_count = MAP_ENTRIES;
    return w;
}

/* ---- their files ---- */

static int map_sync(void *user, intptr_t file) {
    (void)user;
    (void)file; /* the disk's speed is not what is tested */
    return 0;
}

static int map_sync_directory(void *user, const char *path) {
    (void)user;
    (void)path;
    return 0;
}

static inline xd_ctx_desc map_ctx_desc(void) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.files.sync = map_sync;
    desc.files.sync_directory = map_sync_directory;
    return desc;
}

/* Writes a directory with the first `count` of a list of tensors. */
static inline void map_write(const char *directory, const map_tensor *list, int count, int salt,
                             uint64_t max_shard_bytes) {
    xd_ctx *ctx = NULL;
    xd_weights_writer *writer = NULL;
    xd_weights_entry entries[MAP_THEIRS + 4];
    xd_weights_writer_desc d;
    unsigned char data[MAP_MOST * 8];
    memset(&d, 0, sizeof d);
    for (int i = 0; i < count; i++) {
        entries[i].name = list[i].name;
        entries[i].dtype = list[i].dtype;
        entries[i].ndim = list[i].ndim;
        entries[i].shape = list[i].shape;
    }
    d.entries = entries;
    d.entry_count = count;
    d.max_shard_bytes = max_shard_bytes;
    const xd_ctx_desc desc = map_ctx_desc();
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(weights_write_directory(ctx, directory, &d, &writer), XD_OK);
    for (int i = 0; i < count && writer; i++) {
        const size_t size = xd_dtype_size(list[i].dtype);
        memset(data, 0, sizeof data);
        for (int64_t k = 0; k < map_numel(&list[i]) && i < MAP_THEIRS; k++)
            map_value(i, k, salt, data + (size_t)k * size);
        CHECK_EQ_INT(xd_weights_writer_write(writer, i, 0, (size_t)map_numel(&list[i]) * size, data), XD_OK);
    }
    CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
    xd_ctx_destroy(ctx);
}

/* With which salt a directory was written, of 7 and 8. */
static inline int map_salt(const char *directory) {
    xd_ctx *ctx = NULL;
    xd_weights *files = NULL;
    unsigned char want[8];
    int salt = 7;
    map_value(14, 0, 8, want);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(weights_open_directory(ctx, directory, NULL, &files), XD_OK);
    const int64_t index = files ? xd_weights_find(files, map_theirs[14].name) : -1;
    if (index >= 0 && memcmp(xd_weights_data(files, index), want, sizeof want) == 0) salt = 8;
    xd_weights_close(files);
    xd_ctx_destroy(ctx);
    return salt;
}

/* Compares a directory with the tensors of theirs; returns its files, 0 for one that cannot be opened. */
static inline int64_t map_compare(const char *directory, int salt) {
    xd_ctx *ctx = NULL;
    xd_weights *files = NULL;
    xd_weights_info info = { 0, 0 };
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(weights_open_directory(ctx, directory, NULL, &files), XD_OK);
    for (int i = 0; i < MAP_THEIRS && files; i++) {
        const map_tensor *t = &map_theirs[i];
        const size_t size = xd_dtype_size(t->dtype);
        const int64_t index = xd_weights_find(files, t->name);
        int64_t wrong = 0;
        CHECK(index >= 0);
        if (index < 0) continue;
        const xd_weights_tensor *found = xd_weights_at(files, index);
        const unsigned char *data = (const unsigned char *)xd_weights_data(files, index);
        CHECK_EQ_INT(found->dtype, t->dtype);
        CHECK_EQ_INT(found->ndim, t->ndim);
        CHECK(memcmp(found->shape, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0);
        for (int64_t k = 0; k < map_numel(t); k++) {
            unsigned char want[8];
            map_value(i, k, salt, want);
            wrong += memcmp(data + (size_t)k * size, want, size) != 0;
        }
        CHECK_EQ_INT(wrong, 0);
    }
    if (files) info = xd_weights_describe(files);
    CHECK_EQ_INT(info.tensor_count, MAP_THEIRS);
    xd_weights_close(files);
    xd_ctx_destroy(ctx);
    return info.file_count;
}

#endif
