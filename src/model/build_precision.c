/* Half types for the weights and buffers of a model. */

#include "kernel/kernels.h"
#include "model/build_internal.h"

#include <string.h>

/* After a '*', the shortest run that lets the rest fit is tried first. */
XD_PRIVATE bool xdi_name_fits(const char *pattern, const char *name) {
    const char *star = NULL, *from = NULL;
    while (*name) {
        if (*pattern == '*') {
            star = ++pattern;
            from = name;
        } else if (*pattern == *name) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star;
            name = ++from;
        } else
            return false;
    }
    while (*pattern == '*') pattern++;
    return !*pattern;
}

/* The type that a weight gets. Types of 8 bits are forms of storage with scales elsewhere. */
static xd_dtype xdi_precision_of(const xd_precision *p, const xd_weight *weight) {
    const xd_dtype dtype = weight->desc.dtype;
    if (!xd_dtype_is_floating(dtype) || xd_dtype_size(dtype) == 1 || weight->desc.traits.keep_f32)
        return dtype;
    for (int i = 0; i < p->keep_count; i++)
        if (xdi_name_fits(p->keep[i], weight->name)) return dtype;
    return p->f16 ? XD_DTYPE_F16 : XD_DTYPE_BF16;
}

static xd_result xdi_precision_check(const xd_model *model, const xd_precision *p) {
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *w = model->weights[i];
        if (w->owner != w || xdi_precision_of(p, w) == w->desc.dtype) continue;
        const char *from = xd_dtype_name(w->desc.dtype), *to = xd_dtype_name(xdi_precision_of(p, w));
        XD_REQUIRE(
            model->ctx, !w->desc.value, XD_ERROR_STATE,
            "weight \"%.80s\" has the caller's storage of %s, which cannot become %s: keep its type by "
            "keep_f32 or a pattern, or give it as %s",
            w->name, from, to, to);
    }
    return XD_OK;
}

/* What the weights were, so that a model whose values could not be converted is as it was. */
typedef struct xdi_precision_old {
    xd_dtype dtype;
    void *value, *gradient;
} xdi_precision_old;

static void xdi_precision_set(xd_model *model, const xd_precision *p) {
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *w = model->weights[i];
        w->desc.dtype = w->owner == w ? xdi_precision_of(p, w) : w->owner->desc.dtype;
    }
}

/* Values that weights held, from the old storage into the new. */
static xd_result xdi_precision_convert(const xd_model *model, const xdi_precision_old *old) {
    const xd_launch launch = xd_ctx_launch(model->ctx);
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *w = model->weights[i];
        const size_t bytes = (size_t)w->count * xd_dtype_size(w->desc.dtype);
        if (w->owner != w || !w->ready || w->count == 0 || w->value == old[i].value) continue;
        if (w->desc.dtype == old[i].dtype)
            XD_TRY(xd_ctx_kernels(model->ctx)
                       ->memory.copy(&launch, w->value, old[i].value, bytes, XD_COPY_ON_DEVICE));
        else
            XD_TRY(xd_cast(model->ctx, w->value, w->desc.dtype, old[i].value, old[i].dtype, w->count));
    }
    return XD_OK;
}

/* New storage for the types that are set, with the old values. */
static xd_result xdi_precision_move(xd_model *model, xdi_precision_old *old, const xd_precision *p) {
    void *const before = model->storage;
    bool gradients = false;
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *w = model->weights[i];
        old[i].dtype = w->desc.dtype;
        old[i].value = w->value;
        old[i].gradient = w->gradient;
        gradients = gradients || w->gradient != w->desc.gradient;
        w->value = w->desc.value;
        w->gradient = w->desc.gradient;
    }
    model->storage = NULL;
    xdi_precision_set(model, p);
    xd_result result = xdi_model_take(model, gradients ? XDI_TAKE_ALL : XDI_TAKE_VALUES);
    if (result == XD_OK) result = xdi_precision_convert(model, old);
    if (result == XD_OK) {
        xd_ctx_kernels(model->ctx)->memory.release(model->ctx, before);
        return XD_OK;
    }
    xdi_model_release(model);
    model->storage = before;
    for (int64_t i = 0; i < model->weight_count; i++) {
        model->weights[i]->desc.dtype = old[i].dtype;
        model->weights[i]->value = old[i].value;
        model->weights[i]->gradient = old[i].gradient;
    }
    return result;
}

XD_PRIVATE xd_result xdi_model_lower(xd_model *model, const xd_precision *precision) {
    if (!precision->f16 && !precision->bf16) return XD_OK;
    XD_TRY(xdi_precision_check(model, precision));
    if (!model->storage) {
        xdi_precision_set(model, precision);
        return XD_OK;
    }
    xdi_precision_old *old =
        (xdi_precision_old *)xd_allocate(model->ctx, (size_t)model->weight_count * sizeof *old);
    XD_REQUIRE(model->ctx, old, XD_ERROR_MEMORY, "no room to convert %lld weights",
               (long long)model->weight_count);
    const xd_result result = xdi_precision_move(model, old, precision);
    xd_release(model->ctx, old);
    return result;
}
