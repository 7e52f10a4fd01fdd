/* Storage and first values of a model's weights, and the list that optimizers take. */

#include "base/half.h"
#include "base/philox.h"
#include "base/scalar.h"
#include "comm/topology.h"
#include "model/internal.h"
#include "tensor/interval.h"

#include <string.h>

/* ---- the library's storage ---- */

/* Lays out what has no storage, in order; with memory behind the arena also gives it out. */
static bool xdi_model_lay_out(xd_model *model, xd_arena *arena, bool give) {
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *weight = model->weights[i];
        size_t offset = 0;
        if (weight->owner != weight) continue;
        if (!weight->value) {
            if (!xd_arena_take(arena, (size_t)weight->count * xd_dtype_size(weight->desc.dtype), &offset))
                return false;
            if (give) weight->value = arena->base + offset;
        }
        if (xdi_weight_is_trained(weight) && !weight->gradient) {
            if (!xd_arena_take(arena, (size_t)weight->count * xd_dtype_size(weight->desc.gradient_dtype),
                               &offset))
                return false;
            if (give) weight->gradient = arena->base + offset;
        }
    }
    return true;
}

XD_API size_t xd_model_bytes(const xd_model *model) {
    xd_arena plan = xd_arena_over(NULL, 0);
    if (!model->sealed || model->storage) return 0;
    return xdi_model_lay_out((xd_model *)model, &plan, false) ? plan.peak : 0;
}

XD_API xd_result xd_model_allocate(xd_model *model) {
    xd_ctx *ctx = model->ctx;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    xd_arena arena = xd_arena_over(NULL, 0);
    XD_REQUIRE(ctx, model->sealed, XD_ERROR_STATE, "xd_model_allocate comes before xd_model_seal");
    if (model->storage) return XD_OK;
    XD_REQUIRE(ctx, xdi_model_lay_out(model, &arena, false), XD_ERROR_MEMORY,
               "the size of %lld weights overflows", (long long)model->weight_count);
    const size_t bytes = arena.peak;
    if (bytes == 0) return XD_OK;
    void *storage = memory->allocate(ctx, bytes);
    XD_REQUIRE(ctx, storage, XD_ERROR_MEMORY, "no room for %llu bytes of weights and gradients",
               (unsigned long long)bytes);
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_result result = memory->fill(&launch, storage, 0, bytes);
    if (result != XD_OK) {
        memory->release(ctx, storage);
        return result;
    }
    arena = xd_arena_over(storage, bytes);
    (void)xdi_model_lay_out(model, &arena, true);
    model->storage = storage;
    return XD_OK;
}

XD_API xd_result xd_weight_set_ready(xd_weight *weight) {
    xd_weight *owner = weight->owner;
    XD_REQUIRE(weight->model->ctx, owner->value || owner->count == 0, XD_ERROR_STATE,
               "weight \"%.80s\" has no storage", owner->name);
    owner->ready = true;
    return XD_OK;
}

/* ---- first values ---- */

enum { XDI_INIT_BLOCK = 4096 /* elements formed at a time */ };

/* A weight being filled: its values come in the order of its region and leave in blocks. */
typedef struct xdi_init_work {
    const xd_weight *weight;
    xd_philox random;
    int64_t at; /* elements of the region done */
    float values[XDI_INIT_BLOCK];
    uint64_t stored[XDI_INIT_BLOCK]; /* in the weight's type, which has at most 8 bytes */
} xdi_init_work;

/* Values of the elements from `first` on of the whole weight. */
static void xdi_init_values(xdi_init_work *w, int64_t first, int64_t n) {
    const xd_init init = w->weight->desc.init;
    if (init.kind == XD_INIT_NORMAL) xd_philox_fill_normal(&w->random, first, n, w->values);
    if (init.kind == XD_INIT_UNIFORM) xd_philox_fill_uniform(&w->random, first, n, w->values);
    for (int64_t i = 0; i < n; i++) {
        float x = w->values[i];
        if (init.kind == XD_INIT_UNIFORM) x = 2.0f * x - 1.0f; /* both exact */
        if (init.kind == XD_INIT_ZERO) x = 0.0f;
        if (init.kind == XD_INIT_CONSTANT) x = init.center;
        if (init.kind == XD_INIT_NORMAL || init.kind == XD_INIT_UNIFORM)
            x = xd_mulf(init.scale, x) + init.center;
        w->values[i] = x;
    }
}

/* The next n elements of the region to its storage. */
static xd_result xdi_init_put(xdi_init_work *w, int64_t n) {
    xd_ctx *ctx = w->weight->model->ctx;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_dtype dtype = w->weight->desc.dtype;
    const size_t size = xd_dtype_size(dtype);
    const xd_launch launch = xd_ctx_launch(ctx);
    for (int64_t i = 0; i < n; i++) xd_store_f64(w->stored, dtype, i, (double)w->values[i]);
    XD_TRY(memory->copy(&launch, (char *)w->weight->value + (size_t)w->at * size, w->stored, (size_t)n * size,
                        XD_COPY_TO_DEVICE));
    w->at += n;
    return memory->synchronize(&launch); /* `stored` is used again */
}

/* A run of elements that are adjacent in the whole weight. Rows beyond shape[0] are padding. */
static xd_result xdi_init_run(xdi_init_work *w, int64_t first, int64_t count) {
    const xd_weight_desc *d = &w->weight->desc;
    int64_t whole = 1;
    for (int i = 0; i < d->ndim; i++) whole *= d->shape[i];
    for (int64_t done = 0; done < count;) {
        const int64_t left = count - done, n = left < XDI_INIT_BLOCK ? left : (int64_t)XDI_INIT_BLOCK;
        const int64_t begin = first + done, inside = whole > begin ? whole - begin : 0;
        xdi_init_values(w, begin, n < inside ? n : inside);
        for (int64_t i = inside; i < n; i++) w->values[i] = 0.0f;
        XD_TRY(xdi_init_put(w, n));
        done += n;
    }
    return XD_OK;
}

/* All runs of dimension `dim` on; `first` is the flat index of what comes before it. */
static xd_result xdi_init_dimension(xdi_init_work *w, int dim, int64_t first) {
    const xd_weight_desc *d = &w->weight->desc;
    const xd_region *region = &w->weight->region;
    int64_t stored[XD_DIMS_MAX];
    xdi_weight_stored_shape(d, stored);
    if (d->ndim == 0) return xdi_init_run(w, 0, 1);
    for (int i = 0; i < region->count[dim]; i++) {
        const xd_interval part = region->interval[dim][i];
        if (dim == d->ndim - 1) {
            XD_TRY(xdi_init_run(w, first * stored[dim] + part.begin, part.end - part.begin));
            continue;
        }
        for (int64_t j = part.begin; j < part.end; j++)
            XD_TRY(xdi_init_dimension(w, dim + 1, first * stored[dim] + j));
    }
    return XD_OK;
}

static xd_result xdi_init_weight(xdi_init_work *w, xd_weight *weight) {
    const uint64_t key = xd_hash(0, weight->name, strlen(weight->name));
    w->weight = weight;
    w->at = 0;
    memset(&w->random, 0, sizeof w->random);
    w->random.seed = weight->model->desc.seed;
    w->random.stream = XD_STREAM_INIT;
    w->random.sample = (uint32_t)(key & 0xffffffffu);
    w->random.step = (uint32_t)(key >> 32);
    if (weight->count > 0) XD_TRY(xdi_init_dimension(w, 0, 0));
    weight->ready = true;
    return XD_OK;
}

/* The first weight without storage; NULL when all have it. */
static const xd_weight *xdi_model_bare(const xd_model *model) {
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *weight = model->weights[i];
        if (weight->owner == weight && weight->count > 0 && !weight->value) return weight;
    }
    return NULL;
}

static xd_result xdi_model_require_storage(const xd_model *model) {
    XD_REQUIRE(model->ctx, model->sealed, XD_ERROR_STATE,
               "the model is not sealed: xd_model_seal comes first");
    const xd_weight *bare = xdi_model_bare(model);
    XD_REQUIRE(model->ctx, !bare, XD_ERROR_STATE, "weight \"%.80s\" has no storage", bare->name);
    return XD_OK;
}

XD_API xd_result xd_model_init_weights(xd_model *model) {
    XD_TRY(xdi_model_require_storage(model));
    xdi_init_work *work = (xdi_init_work *)xd_allocate(model->ctx, sizeof *work);
    xd_result result = XD_OK;
    XD_REQUIRE(model->ctx, work, XD_ERROR_MEMORY, "no room for %d values", (int)XDI_INIT_BLOCK);
    for (int64_t i = 0; i < model->weight_count && result == XD_OK; i++) {
        xd_weight *weight = model->weights[i];
        if (weight->owner == weight && !weight->ready) result = xdi_init_weight(work, weight);
    }
    xd_release(model->ctx, work);
    return result;
}

/* ---- sizes and lists ---- */

static int64_t xdi_model_elements(const xd_model *model, bool trained) {
    int64_t total = 0;
    for (const xd_weight *const *at = (const xd_weight *const *)model->weights, *const *end =
                                                                                    at +
                                                                                    xd_model_weight_count(
                                                                                        model);
         at < end; at++)
        if ((*at)->owner == *at && !(*at)->desc.buffer && (!trained || xdi_weight_is_trained(*at)))
            total += (*at)->count;
    return total;
}

XD_API int64_t xd_model_parameter_count(const xd_model *model) {
    return xdi_model_elements(model, false);
}

XD_API int64_t xd_model_trained_count(const xd_model *model) {
    return xdi_model_elements(model, true);
}

static bool xdi_weight_decays(const xd_weight *weight) {
    const xd_decay decay = weight->desc.traits.decay;
    return decay == XD_DECAY_BY_SHAPE ? weight->desc.ndim >= 2 : decay == XD_DECAY_ALWAYS;
}

static xd_param xdi_weight_param(const xd_weight *weight) {
    xd_param p;
    memset(&p, 0, sizeof p);
    p.name = weight->name;
    p.value = weight->value;
    p.gradient = weight->gradient;
    p.dtype = weight->desc.dtype;
    p.gradient_dtype = weight->desc.gradient_dtype;
    p.count = weight->count;
    p.shape = weight->shape;
    p.dims = weight->desc.ndim;
    p.group = weight->desc.group;
    p.frozen = weight->desc.traits.frozen;
    p.buffer = weight->desc.buffer;
    p.no_decay = !xdi_weight_decays(weight);
    p.replica = weight->desc.traits.shared;
    return p;
}

XD_API xd_result xd_model_params(const xd_model *model, int64_t capacity, xd_param *params, int64_t *count) {
    XD_TRY(xdi_model_require_storage(model));
    int64_t n = 0, at = 0;
    for (int64_t i = 0; i < model->weight_count; i++) n += model->weights[i]->owner == model->weights[i];
    XD_REQUIRE(model->ctx, capacity == 0 || capacity >= n, XD_ERROR_ARGUMENT,
               "%lld parameters, capacity is %lld", (long long)n, (long long)capacity);
    for (int64_t i = 0; i < model->weight_count && capacity > 0; i++)
        if (model->weights[i]->owner == model->weights[i]) params[at++] = xdi_weight_param(model->weights[i]);
    *count = n;
    return XD_OK;
}
