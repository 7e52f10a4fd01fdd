/* Teachers and what is expected of their fake scores: a small model with every kind of weight, whose elements follow from their
 * places, cut in drawn ways over drawn ranks. */
#ifndef FAKE_SCENE_H
#define FAKE_SCENE_H

#include "xdistill.h"

#include "regions.h"
#include "tensor_model.h"
#include "xd_test.h"
#include "xd_test_topology.h"

#include <stdlib.h>
#include <string.h>

enum { FAKE_ROOM = 64, FAKE_TENSORS = 11 };

typedef struct fake_tensor {
    const char *block, *name, *full;
    xd_dtype dtype;
    int ndim;
    int64_t shape[3], stored_rows;
    bool buffer, transient, frozen;
    const char *tied_to;
} fake_tensor;

static const fake_tensor fake_tensors[FAKE_TENSORS] = {
    { "", "embed.weight", "embed.weight", XD_DTYPE_F32, 2, { 7, 5 }, 0, false, false, false, NULL },
    { "blocks.0", "w", "blocks.0.w", XD_DTYPE_F32, 2, { 9, 4 }, 0, false, false, false, NULL },
    { "blocks.0", "b", "blocks.0.b", XD_DTYPE_F32, 1, { 4 }, 0, false, false, false, NULL },
    { "blocks.0", "cube", "blocks.0.cube", XD_DTYPE_F32, 3, { 3, 2, 5 }, 0, false, false, true, NULL },
    { "blocks.0", "scale", "blocks.0.scale", XD_DTYPE_F32, 0, { 0 }, 0, false, false, false, NULL },
    { "blocks.1", "w", "blocks.1.w", XD_DTYPE_BF16, 2, { 1, 6 }, 0, false, false, true, NULL },
    { "blocks.1", "none", "blocks.1.none", XD_DTYPE_F32, 2, { 0, 3 }, 0, false, false, false, NULL },
    { "blocks.1", "steps", "blocks.1.steps", XD_DTYPE_I64, 1, { 3 }, 0, true, false, false, NULL },
    { "blocks.1", "table", "blocks.1.table", XD_DTYPE_F32, 1, { 6 }, 0, true, true, false, NULL },
    { "blocks.1", "padded", "blocks.1.padded", XD_DTYPE_F32, 2, { 5, 2 }, 8, false, false, false, NULL },
    { "out", "head", "out.head", XD_DTYPE_F32, 2, { 7, 5 }, 0, false, false, false, "embed.weight" },
};

static inline int64_t fake_numel(const fake_tensor *t) {
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) numel *= t->shape[d];
    return numel;
}

static const fake_tensor *fake_find(const char *full) {
    for (int i = 0; i < FAKE_TENSORS; i++)
        if (strcmp(fake_tensors[i].full, full) == 0) return &fake_tensors[i];
    return NULL;
}

/* ---- elements ---- */

/* Of 20 bits, so that half types must round it. */
static float fake_number(const char *name, int64_t index) {
    uint64_t state = 12345 + (uint64_t)index;
    for (; *name; name++) state = state * 131 + (uint64_t)(unsigned char)*name;
    (void)model_draw(&state, 2);
    return (float)(model_draw(&state, 1 << 20) - (1 << 19)) * 0x1p-14f;
}

/* To nearest even, by arithmetic on bits of its own. */
static uint16_t fake_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t low = bits & 0xffffu, high = bits >> 16;
    return (uint16_t)(low > 0x8000u || (low == 0x8000u && (high & 1u)) ? high + 1 : high);
}

static float fake_widen(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* Element `index` of a tensor as the teacher has it, and then in another type. */
static void fake_put(const fake_tensor *t, int64_t index, xd_dtype dtype, void *to) {
    const float x = fake_number(t->full, index);
    const float stored = t->dtype == XD_DTYPE_BF16 ? fake_widen(fake_bf16(x)) : x;
    const uint16_t half = fake_bf16(stored);
    const int64_t whole = (int64_t)(x * 0x1p14f);
    if (dtype == XD_DTYPE_I64) memcpy(to, &whole, 8);
    if (dtype == XD_DTYPE_F32) memcpy(to, &stored, 4);
    if (dtype == XD_DTYPE_BF16) memcpy(to, &half, 2);
}

/* All places of a region of a tensor, in the order of its storage: writes the teacher's elements, or counts those that differ.
 * Padding is 0. */
static int64_t fake_walk(const fake_tensor *t, const xd_region *region, xd_dtype dtype, void *data,
                         bool write) {
    const int64_t numel = region_numel(region), rows = t->stored_rows ? t->stored_rows : t->shape[0];
    const size_t size = xd_dtype_size(dtype);
    int64_t wrong = 0;
    for (int64_t i = 0; i < numel; i++) {
        int64_t at[3] = { 0 }, rest = i, index = 0;
        unsigned char want[8] = { 0 }, *have = (unsigned char *)data + (size_t)i * size;
        for (int d = t->ndim - 1; d >= 0; d--) {
            const int64_t extent = region_extent(region, d);
            const xd_interval *list = region->interval[d];
            int64_t p = rest % extent;
            rest /= extent;
            for (; p >= list->end - list->begin; list++) p -= list->end - list->begin;
            at[d] = list->begin + p;
        }
        for (int d = 0; d < t->ndim; d++) index = index * t->shape[d] + at[d];
        CHECK(t->ndim == 0 || at[0] < rows);
        if (t->ndim == 0 || at[0] < t->shape[0]) fake_put(t, index, dtype, want);
        if (write) memcpy(have, want, size);
        wrong += memcmp(have, want, size) != 0;
    }
    return wrong;
}

/* ---- cuts ---- */

/* Ranks [first, first + a b) as a mesh of two axes; drawn placements of every weight. a 0: no layouts. */
typedef struct fake_cut {
    int first, a, b;
    uint64_t seed;
} fake_cut;

/* A rank's layouts of all weights. */
typedef struct fake_layouts {
    xd_topology topology;
    int ranks[FAKE_ROOM];
    xd_layout *layout[FAKE_TENSORS];
} fake_layouts;

static inline void fake_draw_placement(uint64_t *state, const fake_tensor *t, int size, xd_placement *p,
                                       int64_t *offsets) {
    const int64_t extent = t->ndim > 0 ? (t->stored_rows ? t->stored_rows : t->shape[0]) : 0;
    memset(p, 0, sizeof *p);
    if (t->ndim == 0 || model_draw(state, 4) == 0) return;
    p->kind = XD_SHARD;
    p->dim = model_draw(state, t->ndim);
    if (p->dim > 0 || model_draw(state, 2)) return;
    for (int i = 1; i < size; i++) { /* any cut, also empty parts */
        const int64_t most = extent - offsets[i - 1];
        offsets[i] = offsets[i - 1] + (most > 0 ? model_draw(state, (int)most + 1) : 0);
    }
    offsets[size] = extent;
    p->offsets = offsets;
}

static inline void fake_cut_layouts(xd_ctx *ctx, const fake_cut *cut, fake_layouts *l) {
    const xd_axis axes[2] = { { "a", cut->a }, { "b", cut->b } };
    uint64_t state = cut->seed;
    memset(l, 0, sizeof *l);
    if (cut->a == 0) return;
    for (int i = 0; i < cut->a * cut->b; i++) l->ranks[i] = cut->first + i;
    l->topology = grid_of(axes, 2, l->ranks);
    for (int i = 0; i < FAKE_TENSORS; i++) {
        const fake_tensor *tensor = &fake_tensors[i];
        int64_t offsets[FAKE_ROOM] = { 0 }, unused[FAKE_ROOM] = { 0 };
        xd_layout_desc d = { .ndim = tensor->ndim, .topology = &l->topology };
        for (int k = 0; k < tensor->ndim; k++) d.shape[k] = tensor->shape[k];
        if (tensor->stored_rows) d.shape[0] = tensor->stored_rows;
        fake_draw_placement(&state, tensor, cut->a, &d.placement[0], offsets);
        fake_draw_placement(&state, tensor, cut->b, &d.placement[1], unused);
        if (d.placement[1].kind == XD_SHARD) d.placement[1].offsets = NULL; /* cuts what the first has left */
        CHECK(xd_layout_create(ctx, &d, &l->layout[i]) == XD_OK);
    }
}

static inline void fake_release_layouts(fake_layouts *l) {
    for (int i = 0; i < FAKE_TENSORS; i++) xd_layout_destroy(l->layout[i]);
}

/* ---- teachers ---- */

static bool fake_all_frozen; /* the teacher, as teachers are */

static xd_weight_desc fake_weight(const fake_tensor *t, const xd_layout *layout) {
    xd_weight_desc d = { .name = t->name, .dtype = t->dtype, .ndim = t->ndim, .layout = layout };
    for (int k = 0; k < t->ndim; k++) d.shape[k] = t->shape[k];
    d.stored_rows = t->stored_rows;
    d.buffer = t->buffer;
    d.transient = t->transient;
    d.traits.frozen = (t->frozen || fake_all_frozen) && !t->buffer;
    d.tied_to = t->tied_to;
    if (t->tied_to)
        d.layout = NULL;
    else if (t->dtype != XD_DTYPE_I64)
        d.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 1.0f };
    return d;
}

/* Described and sealed; `except`: a weight that is left out, or NULL. */
static xd_model *fake_describe(xd_comm *world, const fake_layouts *layouts, const char *except) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *model = NULL;
    xd_block *block = NULL;
    CHECK(xd_model_create(ctx, &(xd_model_desc){ .seed = 9, .rank = xd_comm_rank(world) }, &model) == XD_OK);
    for (int i = 0; i < FAKE_TENSORS; i++) {
        const fake_tensor *t = &fake_tensors[i];
        const xd_weight_desc d = fake_weight(t, layouts ? layouts->layout[i] : NULL);
        block = t->block[0] ? xd_model_find_block(model, t->block) : xd_model_root(model);
        if (!block)
            CHECK(xd_block_add(xd_model_root(model),
                               &(xd_block_desc){ .name = t->block,
                                                 .type = strcmp(t->block, "out") == 0 ? NULL : "block" },
                               &block) == XD_OK);
        if (!except || strcmp(except, t->full) != 0) CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
    }
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

/* Gives a described model the teacher's values. */
static void fake_fill(xd_model *model) {
    CHECK(xd_model_allocate(model) == XD_OK);
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(model, i));
        if (info.owner != xd_model_weight_at(model, i)) continue;
        if (info.count > 0)
            (void)fake_walk(fake_find(info.name), info.region, info.desc->dtype, info.value, true);
        CHECK(xd_weight_set_ready(info.owner) == XD_OK);
    }
}

/* Elements of a model that are not the teacher's. Without a wrapper this rank's, else all of them. Collective with a wrapper. */
static int64_t fake_wrong(const xd_model *model, const xd_parallel *parallel) {
    static const char *const names[] = { "", "blocks.0", "blocks.1", "out" };
    int64_t wrong = 0;
    for (int64_t i = 0; i < xd_model_describe(model).weight_count && !parallel; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(model, i));
        const fake_tensor *t =
            fake_find(info.owner == xd_model_weight_at(model, i) ? info.name : "embed.weight");
        if (info.count > 0) wrong += fake_walk(t, info.region, info.desc->dtype, info.value, false);
        wrong += info.count > 0 && !info.ready;
    }
    for (int b = 0; b < 4 && parallel; b++) {
        xd_block *block = b ? xd_model_find_block(model, names[b]) : xd_model_root(model);
        xd_block_view view;
        int k = 0;
        CHECK(xd_block_begin(block, (xd_pass){ .kind = XD_PASS_INFERENCE }, &view) == XD_OK);
        for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
            const xd_weight_info info = xd_weight_describe(xd_model_weight_at(model, i));
            const fake_tensor *t = fake_find(info.desc->tied_to ? "embed.weight" : info.name);
            if (info.block != block) continue;
            if (info.count > 0) wrong += fake_walk(t, info.region, info.desc->dtype, view.values[k], false);
            k++;
        }
        CHECK(xd_block_end(block) == XD_OK);
    }
    return wrong;
}

/* ---- ranks, their memory ---- */

/* Counts this thread's bytes, and hands out memory that is full of 0xA5. */
static __thread int64_t fake_bytes, fake_most, fake_fails_in;
enum { FAKE_LARGE = 10000 /* bytes of blocks that are listed */, FAKE_LISTED = 16 };
static __thread struct {
    unsigned char *memory;
    size_t bytes;
} fake_listed[FAKE_LISTED]; /* by the rank that takes them; those that another gives back stay */
static int64_t fake_live;

static void *fake_allocate(void *user, size_t bytes) {
    (void)user;
    if (fake_fails_in > 0 && --fake_fails_in == 0) return NULL;
    unsigned char *memory = (unsigned char *)malloc(bytes + 64);
    if (!memory) return NULL;
    memcpy(memory, &bytes, sizeof bytes);
    memset(memory + 64, 0xA5, bytes);
    fake_bytes += (int64_t)bytes;
    if (fake_bytes > fake_most) fake_most = fake_bytes;
    __atomic_add_fetch(&fake_live, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < FAKE_LISTED && bytes >= FAKE_LARGE; i++)
        if (!fake_listed[i].memory) {
            fake_listed[i].memory = memory + 64;
            fake_listed[i].bytes = bytes;
            break;
        }
    return memory + 64;
}

static void fake_free(void *user, void *memory) {
    size_t bytes;
    (void)user;
    memcpy(&bytes, (unsigned char *)memory - 64, sizeof bytes);
    fake_bytes -= (int64_t)bytes;
    __atomic_sub_fetch(&fake_live, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < FAKE_LISTED; i++)
        if (memory == fake_listed[i].memory) fake_listed[i].memory = NULL;
    free((unsigned char *)memory - 64);
}

/* Whether a block of that size, among those that are large, has nothing of what was left in it. */
static inline bool fake_is_written(size_t bytes) {
    int64_t blocks = 0, left = 0, row = 0;
    for (int b = 0; b < FAKE_LISTED; b++) {
        if (!fake_listed[b].memory || fake_listed[b].bytes != bytes) continue;
        blocks++;
        for (size_t i = 0; i < bytes; i++) {
            row = fake_listed[b].memory[i] == 0xA5 ? row + 1 : 0;
            left += row == 4;
        }
    }
    return blocks > 0 && left == 0;
}

static void fake_ranks(int ranks, xd_rank_function function, void *argument) {
    const xd_ctx_desc desc = { .allocator = { fake_allocate, fake_free, NULL }, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(ranks, &desc, function, argument, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    CHECK(result == XD_OK);
    CHECK_EQ_INT(__atomic_load_n(&fake_live, __ATOMIC_RELAXED), 0);
}

/* An error of this code on every rank with this text, or PEER with it where another rank is to blame. */
static bool fake_says(xd_ctx *ctx, xd_result result, xd_result want, const char *text) {
    const bool fits =
        (result == want || result == XD_ERROR_PEER) && strstr(xd_last_error(ctx)->message, text);
    if (!fits) printf("%s: \"%s\" lacks \"%s\"\n", xd_result_name(result), xd_last_error(ctx)->message, text);
    return fits;
}

#endif
