/* The end of a description: the order of the weights, and what can be checked only now. */

#include "model/describe_internal.h"

#include <stdlib.h>

XD_PRIVATE xd_block *xdi_block_after(const xd_block *block) {
    if (block->first_child) return block->first_child;
    while (block && !block->next) block = block->parent;
    return block ? block->next : NULL;
}

static xd_result xdi_model_order(xd_model *model) {
    int64_t n = 0;
    const size_t room = (size_t)model->weight_count + 1;
    model->weights = (xd_weight **)xd_allocate(
        model->ctx, room * (sizeof *model->weights + 3 * sizeof(void *) + 3 * sizeof(xd_dtype)));
    XD_REQUIRE(model->ctx, model->weights, XD_ERROR_MEMORY, "no room for a list of %lld weights",
               (long long)model->weight_count);
    model->values = (void **)(model->weights + room);
    model->gradients = model->values + room;
    model->nothing = model->gradients + room;
    model->value_dtypes = (xd_dtype *)(model->nothing + room);
    model->gradient_dtypes = model->value_dtypes + room;
    model->no_dtypes = model->gradient_dtypes + room;
    for (xd_block *block = &model->root; block; block = xdi_block_after(block)) {
        block->first = n;
        for (xd_weight *weight = block->first_weight; weight; weight = weight->next) {
            weight->index = n;
            model->weights[n++] = weight;
        }
        block->count = n - block->first;
    }
    for (int64_t i = 0; i < n; i++) {
        xd_weight *weight = model->weights[i];
        weight->desc.traits = weight->owner->desc.traits; /* set after the tie, perhaps */
        XD_REQUIRE(model->ctx, weight->owner->index <= i, XD_ERROR_ARGUMENT,
                   "\"%.80s\" is tied to \"%.80s\", which comes after it: tie the later one to the earlier",
                   weight->name, weight->owner->name);
    }
    return XD_OK;
}

/* ---- storage that weights share ---- */

/* Bytes that a weight has. */
typedef struct xdi_model_span {
    uintptr_t begin, end;
    const char *name;
} xdi_model_span;

static int xdi_model_by_begin(const void *a, const void *b) {
    const xdi_model_span *x = (const xdi_model_span *)a, *y = (const xdi_model_span *)b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static void xdi_model_add_span(xdi_model_span *spans, int64_t *n, const xd_weight *weight, const void *memory,
                               xd_dtype dtype) {
    if (!memory || weight->count == 0) return;
    spans[*n].begin = (uintptr_t)memory;
    spans[*n].end = (uintptr_t)memory + (size_t)weight->count * xd_dtype_size(dtype);
    spans[(*n)++].name = weight->name;
}

static xd_result xdi_model_check_storage(const xd_model *model) {
    const size_t room = 2 * (size_t)model->weight_count + 1;
    xdi_model_span *spans = (xdi_model_span *)xd_allocate(model->ctx, room * sizeof *spans);
    xd_result result = XD_OK;
    int64_t n = 0;
    XD_REQUIRE(model->ctx, spans, XD_ERROR_MEMORY, "no room for a list of %llu places",
               (unsigned long long)room);
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *weight = model->weights[i];
        xdi_model_add_span(spans, &n, weight, weight->desc.value, weight->desc.dtype);
        xdi_model_add_span(spans, &n, weight, weight->desc.gradient, weight->desc.gradient_dtype);
    }
    if (n > 1) qsort(spans, (size_t)n, sizeof *spans, xdi_model_by_begin);
    for (int64_t i = 1; i < n && result == XD_OK; i++)
        if (spans[i].begin < spans[i - 1].end)
            result = XD_FAIL(
                model->ctx, XD_ERROR_ARGUMENT,
                "\"%.80s\" and \"%.80s\" share %llu bytes of the caller's storage", spans[i - 1].name,
                spans[i].name,
                (unsigned long long)((spans[i].end < spans[i - 1].end ? spans[i].end : spans[i - 1].end) -
                                     spans[i].begin));
    xd_release(model->ctx, spans);
    return result;
}

/* ---- the end ---- */

XD_API xd_result xd_model_seal(xd_model *model) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN(model ? model->ctx : NULL, model);
    XD_REQUIRE(model->ctx, !model->sealed, XD_ERROR_STATE, "a model of %lld weights is sealed already",
               (long long)model->weight_count);
    xd_result result = xdi_model_order(model);
    if (result == XD_OK) result = xdi_model_check_storage(model);
    if (result != XD_OK) {
        xd_release(model->ctx, model->weights);
        model->weights = NULL;
        return result;
    }
    model->sealed = true;
    return XD_OK;
}
