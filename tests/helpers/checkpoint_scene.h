/* checkpoint_scene.h - a small network of every kind of tensor, cut in every way over any number of ranks, that trains: what the
 * tests of checkpoints save, load and compare. */
#ifndef CHECKPOINT_SCENE_H
#define CHECKPOINT_SCENE_H

#include "xdistill.h"
#include "xd_test.h"
#include "averages.h"
#include "regions.h"

#include <stdlib.h>

enum { SCENE_TENSORS = 9, SCENE_MOST = 128 /* elements of a tensor */, SCENE_AVERAGES = 2 };

/* How a tensor lies on the ranks. Those of a scene begin with another one each, so each cut meets each tensor. */
typedef enum scene_cut {
    CUT_FLAT,    /* ranges that ignore rows */
    CUT_ROWS,    /* chunks of dimension 0 */
    CUT_COLUMNS, /* chunks of the last dimension */
    CUT_BOTH,    /* columns over pairs of ranks, then ranges of what a column has */
    CUT_COPIES,  /* all of it on every rank, for which one speaks */
    CUT_LAST,    /* all of it on the last rank */
    SCENE_CUTS
} scene_cut;

typedef struct scene_tensor {
    const char *name;
    xd_dtype dtype;
    int ndim;
    int64_t shape[3];
    bool buffer, frozen;
} scene_tensor;

static const scene_tensor scene_tensors[SCENE_TENSORS] = {
    { "embed.weight", XD_DTYPE_F32, 2, { 13, 8 }, false, false },
    { "layer.0.weight", XD_DTYPE_BF16, 2, { 6, 10 }, false, false },
    { "layer.0.bias", XD_DTYPE_F32, 1, { 7 }, false, false },
    { "scale", XD_DTYPE_F32, 0, { 0 }, false, false },
    { "empty", XD_DTYPE_F32, 2, { 0, 4 }, false, false },
    { "counts", XD_DTYPE_I64, 1, { 3 }, true, false },
    { "mask", XD_DTYPE_U8, 3, { 5, 2, 3 }, true, false },
    { "frozen", XD_DTYPE_F16, 1, { 9 }, false, true },
    { "half.weight", XD_DTYPE_F16, 3, { 2, 3, 4 }, false, false },
};

/* What one rank has. */
typedef struct scene {
    xd_ctx *ctx;
    int rank, ranks;
    xd_region region[SCENE_TENSORS];
    xd_tensor_part part[SCENE_TENSORS];
    xd_param param[SCENE_TENSORS];
    int64_t index[SCENE_TENSORS][SCENE_MOST]; /* of each element here in the whole tensor */
    void *value[SCENE_TENSORS];
    float *gradient[SCENE_TENSORS];
    xd_optimizer *optimizer;
    xd_ema *ema[SCENE_AVERAGES];
    xd_checkpoint_average averages[SCENE_AVERAGES];
    xd_checkpoint_network network;
} scene;

static inline int64_t scene_numel(int tensor) {
    int64_t numel = 1;
    for (int d = 0; d < scene_tensors[tensor].ndim; d++) numel *= scene_tensors[tensor].shape[d];
    return numel;
}

/* A number for an element, different for each. */
static inline double scene_number(int tensor, int64_t index, int salt) {
    const uint64_t numbers[3] = { (uint64_t)tensor, (uint64_t)index, (uint64_t)salt };
    return (double)(int64_t)(xd_hash(0, numbers, sizeof numbers) % 2001) / 1000.0 - 1.0;
}

static inline void scene_store(void *data, xd_dtype dtype, int64_t at, int tensor, int64_t index, int salt) {
    const double x = scene_number(tensor, index, salt);
    if (dtype == XD_DTYPE_I64)
        ((int64_t *)data)[at] = (int64_t)(1e15 * x);
    else if (dtype == XD_DTYPE_U8)
        ((uint8_t *)data)[at] = (uint8_t)(100.0 + 100.0 * x);
    else
        xd_store_f64(data, dtype, at, x);
}

static inline xd_interval scene_share(int64_t n, int parts, int part) {
    xd_interval share;
    share.begin = n * part / parts;
    share.end = n * (part + 1) / parts;
    return share;
}

static inline void scene_restrict(scene *s, int i, int dim, xd_interval to) {
    xd_region *r = &s->region[i];
    r->count[dim] = to.begin < to.end;
    r->interval[dim][0] = to;
    s->part[i].region = r;
}

static inline void scene_cut_tensor(scene *s, int i, scene_cut cut) {
    const scene_tensor *t = &scene_tensors[i];
    xd_tensor_part *p = &s->part[i];
    const int last = t->ndim - 1, r = s->rank, n = s->ranks, pairs = (n + 1) / 2;
    p->name = t->name;
    p->dtype = t->dtype;
    p->ndim = t->ndim;
    for (int d = 0; d < t->ndim; d++) p->shape[d] = t->shape[d];
    s->region[i] = region_whole(t->ndim, t->shape);
    if (t->ndim == 0 && (cut == CUT_ROWS || cut == CUT_COLUMNS || cut == CUT_BOTH)) cut = CUT_COPIES;
    if (cut == CUT_ROWS) scene_restrict(s, i, 0, xd_chunk(t->shape[0], n, r));
    if (cut == CUT_COLUMNS) scene_restrict(s, i, last, scene_share(t->shape[last], n, r));
    if (cut == CUT_BOTH) scene_restrict(s, i, last, scene_share(t->shape[last], pairs, r / 2));
    const int64_t held = region_numel(&s->region[i]);
    p->range.end = held;
    if (cut == CUT_FLAT) p->range = scene_share(held, n, r);
    if (cut == CUT_BOTH) p->range = scene_share(held, r / 2 == pairs - 1 && n % 2 ? 1 : 2, r % 2);
    if (cut == CUT_COPIES) p->replica = r != i % n;
    if (cut == CUT_LAST && r != n - 1) p->range.end = 0;
}

/* The indices of the part, found by going over the whole tensor: nothing of the library's own ways. */
static inline void scene_list_indices(scene *s, int i) {
    const scene_tensor *t = &scene_tensors[i];
    int64_t position = 0, kept = 0;
    for (int64_t index = 0; index < scene_numel(i); index++) {
        bool inside = true;
        int64_t rest = index;
        for (int d = t->ndim - 1; d >= 0; d--) {
            const xd_region *r = &s->region[i];
            const int64_t at = rest % t->shape[d];
            rest /= t->shape[d];
            inside = inside && r->count[d] && r->interval[d][0].begin <= at && at < r->interval[d][0].end;
        }
        if (!inside) continue;
        if (s->part[i].range.begin <= position && position < s->part[i].range.end)
            s->index[i][kept++] = index;
        position++;
    }
    CHECK_EQ_INT(kept, s->part[i].range.end - s->part[i].range.begin);
}

static inline void scene_fill(scene *s, int salt) {
    for (int i = 0; i < SCENE_TENSORS; i++)
        for (int64_t k = 0; k < s->param[i].count; k++)
            scene_store(s->value[i], scene_tensors[i].dtype, k, i, s->index[i][k], salt);
}

/* An optimizer and averages of both kinds: one whose shadows are f32, and one in the types of the weights. */
static inline void scene_equip(scene *s) {
    xd_optimizer_desc optimizer = xd_adamw_defaults(s->param, SCENE_TENSORS);
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_RAMP);
    CHECK_EQ_INT(xd_optimizer_create(s->ctx, &optimizer, &s->optimizer), XD_OK);
    CHECK_EQ_INT(average_create(s->ctx, s->param, SCENE_TENSORS, &ema, &s->ema[0]), XD_OK);
    ema = xd_ema_defaults(XD_EMA_CONSTANT);
    ema.decay = 0.5;
    ema.live_dtype = true;
    ema.start_iteration = 2;
    CHECK_EQ_INT(average_create(s->ctx, s->param, SCENE_TENSORS, &ema, &s->ema[1]), XD_OK);
    s->averages[0].name = "slow";
    s->averages[0].ema = s->ema[0];
    s->averages[1].name = "fast_2";
    s->averages[1].ema = s->ema[1];
    s->network.parts = s->part;
    s->network.part_count = SCENE_TENSORS;
    s->network.optimizer = s->optimizer;
    s->network.averages = s->averages;
    s->network.average_count = SCENE_AVERAGES;
}

/* A network that has not trained, cut for this rank. */
static inline void scene_create(scene *s, xd_ctx *ctx, int rank, int ranks, int cut) {
    memset(s, 0, sizeof *s);
    s->ctx = ctx;
    s->rank = rank;
    s->ranks = ranks;
    for (int i = 0; i < SCENE_TENSORS; i++) {
        scene_cut_tensor(s, i, (scene_cut)((cut + i) % SCENE_CUTS));
        scene_list_indices(s, i);
        xd_param *p = &s->param[i];
        p->count = s->part[i].range.end - s->part[i].range.begin;
        s->value[i] = calloc((size_t)p->count + 1, 8);
        s->gradient[i] = (float *)calloc((size_t)p->count + 1, sizeof(float));
        p->name = scene_tensors[i].name;
        p->value = s->part[i].data = p->count ? s->value[i] : NULL;
        p->dtype = scene_tensors[i].dtype;
        p->buffer = scene_tensors[i].buffer;
        p->frozen = scene_tensors[i].frozen;
        p->replica = s->part[i].replica;
    }
    scene_fill(s, 0);
    scene_equip(s);
}

static inline void scene_destroy(scene *s) {
    for (int k = 0; k < SCENE_AVERAGES; k++) xd_ema_destroy(s->ema[k]);
    xd_optimizer_destroy(s->optimizer);
    for (int i = 0; i < SCENE_TENSORS; i++) {
        free(s->value[i]);
        free(s->gradient[i]);
    }
}

/* Step number `step`. Parameter 2 has a gradient in every second step only, so its count is another. */
static inline void scene_step(scene *s, int step) {
    xd_optimizer_step_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < SCENE_TENSORS; i++) {
        const bool given = !scene_tensors[i].buffer && !scene_tensors[i].frozen && (i != 2 || step % 2 == 0);
        for (int64_t k = 0; k < s->param[i].count; k++) {
            s->gradient[i][k] = (float)scene_number(i, s->index[i][k], step);
            if (scene_tensors[i].buffer)
                scene_store(s->value[i], scene_tensors[i].dtype, k, i, s->index[i][k], step);
        }
        s->param[i].gradient = given && s->param[i].count ? s->gradient[i] : NULL;
    }
    CHECK_EQ_INT(xd_optimizer_set_learning_rate(s->optimizer, 1e-2 / step), XD_OK);
    desc.averages = s->ema;
    desc.average_count = SCENE_AVERAGES;
    CHECK_EQ_INT(xd_optimizer_step(s->optimizer, &desc, NULL), XD_OK);
}

/* Everything that training depends on, of all ranks together: each puts what it holds into the places of its indices. Elements
 * that several ranks hold must be equal. */
enum { SCENE_SLOTS = 5 /* value, exp_avg, exp_avg_sq, master, and one for each average */ };

typedef struct scene_whole {
    unsigned char bytes[SCENE_SLOTS + SCENE_AVERAGES][SCENE_TENSORS][SCENE_MOST][8];
    int64_t steps[SCENE_TENSORS];
    int64_t iteration[SCENE_AVERAGES];
    bool initialized[SCENE_AVERAGES];
    double learning_rate;
} scene_whole;

static inline void scene_put(const scene *s, scene_whole *w, int slot, int i, const void *data, size_t size) {
    for (int64_t k = 0; data && k < s->param[i].count; k++)
        memcpy(w->bytes[slot][i][s->index[i][k]], (const char *)data + (size_t)k * size, size);
}

static inline void scene_collect(const scene *s, scene_whole *w) {
    for (int i = 0; i < SCENE_TENSORS; i++) {
        const xd_optimizer_state state = xd_optimizer_state_at(s->optimizer, i);
        scene_put(s, w, 0, i, s->value[i], xd_dtype_size(scene_tensors[i].dtype));
        scene_put(s, w, 1, i, state.exp_avg, sizeof(float));
        scene_put(s, w, 2, i, state.exp_avg_sq, sizeof(float));
        scene_put(s, w, 3, i, state.master, sizeof(float));
        if (s->param[i].count > 0) w->steps[i] = *state.step;
        for (int k = 0; k < SCENE_AVERAGES; k++) {
            const xd_param shadow = xd_ema_view(s->ema[k], i).shadow;
            CHECK_EQ_STR(shadow.name, scene_tensors[i].name);
            scene_put(s, w, 4 + k, i, shadow.value, xd_dtype_size(shadow.dtype));
        }
    }
    for (int k = 0; k < SCENE_AVERAGES; k++) {
        const xd_ema_record record = xd_ema_describe(s->ema[k]).record;
        w->iteration[k] = record.iteration;
        w->initialized[k] = record.initialized;
    }
    w->learning_rate = xd_optimizer_settings(s->optimizer)->learning_rate;
}

static inline void compare_wholes(const scene_whole *one, const scene_whole *other) {
    for (int slot = 0; slot < SCENE_SLOTS + SCENE_AVERAGES; slot++)
        for (int i = 0; i < SCENE_TENSORS; i++)
            CHECK(memcmp(one->bytes[slot][i], other->bytes[slot][i], sizeof one->bytes[slot][i]) == 0);
    for (int i = 0; i < SCENE_TENSORS; i++) CHECK_EQ_INT(one->steps[i], other->steps[i]);
    for (int k = 0; k < SCENE_AVERAGES; k++) {
        CHECK_EQ_INT(one->iteration[k], other->iteration[k]);
        CHECK_EQ_INT(one->initialized[k], other->initialized[k]);
    }
    CHECK_NEAR(one->learning_rate, other->learning_rate, 0);
}

/* Contexts whose files are not synced: the disk's speed is not what is tested. */
static int scene_sync(void *user, intptr_t file) {
    (void)user;
    (void)file;
    return 0;
}

static int scene_sync_directory(void *user, const char *path) {
    (void)user;
    (void)path;
    return 0;
}

static inline xd_ctx_desc scene_ctx_desc(void) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.files.sync = scene_sync;
    desc.files.sync_directory = scene_sync_directory;
    return desc;
}

/* What `steps` steps on one rank give. */
static inline void scene_expected(int steps, scene_whole *w) {
    xd_ctx *ctx = NULL;
    scene *s = (scene *)malloc(sizeof *s);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    scene_create(s, ctx, 0, 1, 0);
    for (int i = 1; i <= steps; i++) scene_step(s, i);
    memset(w, 0, sizeof *w);
    scene_collect(s, w);
    scene_destroy(s);
    free(s);
    xd_ctx_destroy(ctx);
}

#endif
