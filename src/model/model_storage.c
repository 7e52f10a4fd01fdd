/* Storage of a model's weights, and the list that optimizers take. */

#include "kernel/internal.h"
#include "model/describe_internal.h"

#include <string.h>

/* ---- the library's storage ---- */

/* Lays out what has no storage, in order; with memory behind the arena also gives it out. */
static bool xdi_model_lay_out(xd_model *model, xd_arena *arena, xdi_take what) {
    const bool give = arena->base != NULL;
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *weight = model->weights[i];
        size_t offset = 0;
        if (weight->owner != weight || (what == XDI_TAKE_BUFFERS && !weight->desc.buffer)) continue;
        if (!weight->value) {
            if (!xdi_arena_take(arena, (size_t)weight->count * xd_dtype_size(weight->desc.dtype), &offset))
                return false;
            if (give) weight->value = arena->base + offset;
        }
        if (what == XDI_TAKE_ALL && xdi_weight_is_trained(weight) && !weight->gradient) {
            if (!xdi_arena_take(arena, (size_t)weight->count * xd_dtype_size(weight->desc.gradient_dtype),
                                &offset))
                return false;
            if (give) weight->gradient = arena->base + offset;
        }
    }
    return true;
}

XD_PRIVATE xd_result xdi_model_take(xd_model *model, xdi_take what) {
    xd_ctx *ctx = model->ctx;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    xd_arena arena = xd_arena_over(NULL, 0);
    XD_REQUIRE(ctx, model->sealed, XD_ERROR_STATE, "xd_model_allocate comes before xd_model_seal");
    XD_REQUIRE(ctx, !model->parallel, XD_ERROR_STATE,
               "the model is wrapped: its %lld weights are the wrapper's", (long long)model->weight_count);
    if (model->storage) return XD_OK;
    XD_REQUIRE(ctx, xdi_model_lay_out(model, &arena, what), XD_ERROR_MEMORY,
               "the size of %lld weights overflows", (long long)model->weight_count);
    const size_t bytes = arena.peak;
    if (bytes == 0) return XD_OK;
    if (xdi_plan_is_open(ctx)) return xdi_plan_take(ctx, 0, bytes);
    void *storage = memory->allocate(ctx, bytes);
    XD_REQUIRE(ctx, storage, XD_ERROR_MEMORY, "no room for %llu bytes of weights and gradients",
               (unsigned long long)bytes);
    const xd_launch launch = xd_ctx_launch(ctx);
    const bool cleared = memory->allocate == xd_allocate;
    const xd_result result = cleared ? XD_OK : memory->fill(&launch, storage, 0, bytes);
    if (result != XD_OK) {
        memory->release(ctx, storage);
        return result;
    }
    arena = xd_arena_over(storage, bytes);
    (void)xdi_model_lay_out(model, &arena, what);
    model->storage = storage;
    model->buffers_alone = what == XDI_TAKE_BUFFERS;
    return XD_OK;
}

XD_API xd_result xd_model_allocate(xd_model *model) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN(NULL, model);
    return xdi_model_take(model, XDI_TAKE_ALL);
}

XD_PRIVATE void xdi_model_release(xd_model *model) {
    if (!model->storage) return;
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *weight = model->weights[i];
        weight->value = weight->desc.value;
        weight->gradient = weight->desc.gradient;
    }
    xd_ctx_kernels(model->ctx)->memory.release(model->ctx, model->storage);
    model->storage = NULL;
}

XD_API xd_result xd_weight_set_ready(xd_weight *weight) {
    XDI_LIVE(xd_weight, weight);
    XDI_GIVEN(NULL, weight);
    xd_weight *owner = weight->owner;
    XD_REQUIRE(weight->model->ctx, owner->value || owner->count == 0, XD_ERROR_STATE,
               "weight \"%.80s\" has no storage", owner->name);
    owner->ready = true;
    return XD_OK;
}

/* ---- sizes and lists ---- */

/* The first weight without storage; NULL when all have it. */
static const xd_weight *xdi_model_bare(const xd_model *model) {
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *weight = model->weights[i];
        if (weight->owner == weight && weight->count > 0 && !weight->value) return weight;
    }
    return NULL;
}

XD_PRIVATE xd_result xdi_model_require_storage(const xd_model *model) {
    XD_REQUIRE(model->ctx, model->sealed, XD_ERROR_STATE,
               "the model is not sealed: xd_model_seal comes first");
    XD_REQUIRE(model->ctx, !model->parallel, XD_ERROR_STATE,
               "the model is wrapped: its %lld weights are the wrapper's", (long long)model->weight_count);
    const xd_weight *bare = xdi_model_bare(model);
    XD_REQUIRE(model->ctx, !bare, XD_ERROR_STATE, "weight \"%.80s\" has no storage", bare->name);
    return XD_OK;
}

XD_PRIVATE int64_t xdi_model_elements(const xd_model *model, bool trained) {
    int64_t total = 0;
    for (int64_t i = 0; i < xdi_model_weight_count(model); i++) {
        const xd_weight *w = model->weights[i];
        if (w->owner == w && !w->desc.buffer && (!trained || xdi_weight_is_trained(w))) total += w->count;
    }
    return total;
}

static bool xdi_weight_decays(const xd_weight *weight) {
    const xd_decay decay = weight->desc.traits.decay;
    return decay == XD_DECAY_BY_SHAPE ? weight->desc.ndim >= 2 : decay == XD_DECAY_ALWAYS;
}

XD_PRIVATE int64_t xdi_weight_true_count(const xd_weight *w) {
    const xd_weight_desc *d = &w->desc;
    int64_t rows = 0, stored = 0;
    if (d->ndim == 0 || d->stored_rows == d->shape[0]) return w->count;
    for (int i = 0; i < w->region.count[0]; i++) {
        const xd_interval part = w->region.interval[0][i];
        stored += part.end - part.begin;
        if (part.begin < d->shape[0]) rows += (part.end < d->shape[0] ? part.end : d->shape[0]) - part.begin;
    }
    return stored ? w->count / stored * rows : 0;
}

/* Index of the first element of a weight's region in the whole. */
static int64_t xdi_weight_first(const xd_weight *weight) {
    int64_t stored[XD_DIMS_MAX], first = 0;
    xdi_weight_stored_shape(&weight->desc, stored);
    for (int d = 0; d < weight->desc.ndim && weight->count > 0; d++)
        first = first * stored[d] + weight->region.interval[d][0].begin;
    return first;
}

XD_PRIVATE xd_param xdi_weight_param(const xd_weight *weight) {
    xd_param p;
    memset(&p, 0, sizeof p);
    p.name = weight->name;
    p.value = weight->value;
    p.gradient = weight->gradient;
    p.dtype = weight->desc.dtype;
    p.gradient_dtype = weight->desc.gradient_dtype;
    p.count = weight->count;
    p.first = xdi_weight_first(weight);
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
    XDI_LIVE(xd_model, model);
    XDI_GIVEN_IN_PLAN(model ? model->ctx : NULL, model, count);
    XD_TRY(xdi_model_require_storage(model));
    int64_t n = 0, at = 0;
    for (int64_t i = 0; i < model->weight_count; i++) n += model->weights[i]->owner == model->weights[i];
    XD_REQUIRE(model->ctx, params || capacity == 0, XD_ERROR_ARGUMENT,
               "a list of %lld at NULL: capacity 0 counts", (long long)capacity);
    XD_REQUIRE(model->ctx, capacity == 0 || capacity >= n, XD_ERROR_ARGUMENT,
               "%lld parameters, capacity is %lld", (long long)n, (long long)capacity);
    for (int64_t i = 0; i < model->weight_count && capacity > 0; i++)
        if (model->weights[i]->owner == model->weights[i]) params[at++] = xdi_weight_param(model->weights[i]);
    *count = n;
    return XD_OK;
}
