/* Blocks with spectral norm: the vectors of their power iteration are multiplied with weights as those are shown. */

#include "kernel/kernels.h"
#include "model/place_internal.h"

#include <string.h>

/* Whether a weight is called that, whatever its block is called. */
static bool xdi_weight_is_called(const xd_weight *w, const char *name) {
    const char *dot = strrchr(w->name, '.');
    return strcmp(dot ? dot + 1 : w->name, name) == 0;
}

static bool xdi_spectral_is_vector(const xdi_place *place, const xd_weight *w) {
    return w->owner == w && w->desc.buffer && xdi_place_has(place, w) &&
           xd_dtype_is_floating(w->desc.dtype) &&
           (xdi_weight_is_called(w, "weight_u") || xdi_weight_is_called(w, "weight_v"));
}

/* The type in which a block shows the first of its floating weights that is no buffer; NONE without one. */
static xd_dtype xdi_spectral_dtype(const xdi_place *place, const xd_block *block) {
    for (int64_t i = block->first; i < block->first + block->count; i++) {
        const xd_weight *w = place->model->weights[i]->owner;
        if (!w->desc.buffer && xd_dtype_is_floating(w->desc.dtype))
            return xdi_weight_view_dtype(&place->settings, w);
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

XD_PRIVATE xd_result xdi_spectral_retype(const xdi_place *place) {
    for (const xd_block *b = &place->model->root; b; b = xdi_block_after(b))
        for (int64_t i = b->first; i < b->first + b->count && b->desc.spectral_norm; i++)
            if (xdi_spectral_is_vector(place, place->model->weights[i]))
                XD_TRY(xdi_spectral_set(place->model->weights[i], xdi_spectral_dtype(place, b)));
    xdi_spectral_follow(place->model);
    return XD_OK;
}

/* Values keep their type on the way to the host. */
static xd_result xdi_spectral_write(const xdi_place *place, const xd_weight *weight, void *kept) {
    xd_ctx *parts = place->parts_ctx;
    const size_t bytes = (size_t)weight->count * xd_dtype_size(weight->declared);
    void *passing = xd_allocate(parts, bytes);
    XD_REQUIRE(place->ctx, passing || bytes == 0, XD_ERROR_MEMORY, "no room for %llu bytes of \"%.80s\"",
               (unsigned long long)bytes, weight->name);
    xd_result result = xdi_parts_write(place, passing, weight->own, bytes);
    if (result == XD_OK)
        result = xd_cast(parts, kept, weight->desc.dtype, passing, weight->declared, weight->count);
    xd_release(parts, passing);
    return result;
}

XD_PRIVATE xd_result xdi_spectral_take(const xdi_place *place, xd_weight *weight, void *kept) {
    const xd_interval all = { 0, weight->count };
    weight->own = weight->value;
    weight->value = kept;
    if (!weight->ready) return xdi_weight_fill(place->parts_ctx, weight, all, kept);
    if (place->on_host) return xdi_spectral_write(place, weight, kept);
    return xd_cast(place->ctx, kept, weight->desc.dtype, weight->own, weight->declared, weight->count);
}

XD_PRIVATE void xdi_spectral_give_back(xd_weight *weight, const void *kept) {
    const xd_dtype dtype = weight->desc.dtype;
    if (weight->owner != weight) weight->desc.dtype = weight->owner->desc.dtype; /* which comes before it */
    if (weight->declared == XD_DTYPE_NONE) return;
    weight->desc.dtype = weight->declared;
    weight->declared = XD_DTYPE_NONE;
    if (!weight->own) return;
    weight->value = weight->own;
    weight->own = NULL;
    if (kept)
        weight->ready = xd_cast(weight->model->ctx, weight->value, weight->desc.dtype, kept, dtype,
                                weight->count) == XD_OK;
}
