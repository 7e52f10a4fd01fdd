/* Blocks with spectral norm: the vectors of their power iteration are multiplied with weights as those are shown. */

#include "kernel/kernels.h"
#include "model/internal.h"

#include <string.h>

/* Whether a weight is called that, whatever its block is called. */
static bool xdi_weight_is_called(const xd_weight *w, const char *name) {
    const char *dot = strrchr(w->name, '.');
    return strcmp(dot ? dot + 1 : w->name, name) == 0;
}

static bool xdi_spectral_is_vector(const xd_parallel *p, const xd_weight *w) {
    return w->owner == w && w->desc.buffer && xdi_parallel_has(p, w) && xd_dtype_is_floating(w->desc.dtype) &&
           (xdi_weight_is_called(w, "weight_u") || xdi_weight_is_called(w, "weight_v"));
}

/* The type in which a block shows the first of its floating weights that is no buffer; NONE without one. */
static xd_dtype xdi_spectral_dtype(const xd_parallel *p, const xd_block *block) {
    for (int64_t i = block->first; i < block->first + block->count; i++) {
        const xd_weight *w = p->model->weights[i]->owner;
        if (!w->desc.buffer && xd_dtype_is_floating(w->desc.dtype)) return xdi_weight_view_dtype(p, w);
    }
    return XD_DTYPE_NONE;
}

static xd_result xdi_spectral_set(xd_weight *w, xd_dtype dtype) {
    if (dtype == XD_DTYPE_NONE || dtype == w->desc.dtype) return XD_OK;
    XD_REQUIRE(
        w->model->ctx, !w->desc.value, XD_ERROR_STATE,
        "buffer \"%.80s\" has the caller's storage of %s, and block \"%.80s\" with spectral norm shows "
        "its weights as %s: give the buffer as %s",
        w->name, xd_dtype_name(w->desc.dtype), w->block->name, xd_dtype_name(dtype), xd_dtype_name(dtype));
    w->declared = w->desc.dtype;
    w->desc.dtype = dtype;
    return XD_OK;
}

static void xdi_spectral_follow(const xd_model *model) {
    for (int64_t i = 0; i < model->weight_count; i++)
        model->weights[i]->desc.dtype = model->weights[i]->owner->desc.dtype; /* of ties */
}

XD_PRIVATE xd_result xdi_spectral_retype(const xd_parallel *p) {
    for (const xd_block *b = &p->model->root; b; b = xdi_block_after(b))
        for (int64_t i = b->first; i < b->first + b->count && b->desc.spectral_norm; i++)
            if (xdi_spectral_is_vector(p, p->model->weights[i]))
                XD_TRY(xdi_spectral_set(p->model->weights[i], xdi_spectral_dtype(p, b)));
    xdi_spectral_follow(p->model);
    return XD_OK;
}

/* Values that come home keep their type on the way. */
static xd_result xdi_spectral_bring_home(const xd_parallel *p, xd_weight *weight, void *place) {
    const size_t bytes = (size_t)weight->count * xd_dtype_size(weight->declared);
    void *passing = xd_allocate(p->home, bytes);
    XD_REQUIRE(p->ctx, passing || bytes == 0, XD_ERROR_MEMORY, "no room for %llu bytes of \"%.80s\"",
               (unsigned long long)bytes, weight->name);
    xd_result result = xdi_parallel_bring_home(p, passing, weight->own, bytes);
    if (result == XD_OK)
        result = xd_cast(p->home, place, weight->desc.dtype, passing, weight->declared, weight->count);
    xd_release(p->home, passing);
    return result;
}

XD_PRIVATE xd_result xdi_spectral_take(const xd_parallel *p, xd_weight *weight, void *place) {
    const xd_interval all = { 0, weight->count };
    weight->own = weight->value;
    weight->value = place;
    if (!weight->ready) return xdi_weight_fill(p->home, weight, all, place);
    if (p->offloaded) return xdi_spectral_bring_home(p, weight, place);
    return xd_cast(p->ctx, place, weight->desc.dtype, weight->own, weight->declared, weight->count);
}

/* Of a wrapper that was not finished the model's own values have not changed. */
XD_PRIVATE void xdi_spectral_give_back(const xd_parallel *p, xd_weight *weight, const void *place) {
    const xd_dtype dtype = weight->desc.dtype;
    if (weight->owner != weight) weight->desc.dtype = weight->owner->desc.dtype; /* which comes before it */
    if (weight->declared == XD_DTYPE_NONE) return;
    weight->desc.dtype = weight->declared;
    weight->declared = XD_DTYPE_NONE;
    if (!weight->own) return;
    weight->value = weight->own;
    weight->own = NULL;
    if (p->model->parallel == p)
        weight->ready =
            xd_cast(p->ctx, weight->value, weight->desc.dtype, place, dtype, weight->count) == XD_OK;
}
