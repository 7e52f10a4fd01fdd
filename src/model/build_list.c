/* Lists of a whole model, of which this rank has some stages. */

#include "base/internal.h"
#include "model/build_internal.h"
#include "model/parallel_internal.h"

#include <inttypes.h>
#include <string.h>

/* A weight of the whole model as this rank has it; NULL where another one does. */
static const xd_weight *xdi_built_find(const xd_built *built, const char *name) {
    for (int i = 0; i < xd_built_stage_count(built); i++) {
        const xd_weight *w = xd_model_find_weight(xd_built_stage(built, i).model, name);
        if (w && xdi_weight_is_listed(w)) return w;
    }
    return NULL;
}

/* ---- what must fit ---- */

static bool xdi_built_is_alike(const xd_weight *a, const xd_weight *b) {
    const xd_weight_desc *x = &a->desc, *y = &b->desc;
    return x->dtype == y->dtype && x->ndim == y->ndim &&
           memcmp(x->shape, y->shape, (size_t)x->ndim * sizeof *x->shape) == 0;
}

static xd_result xdi_built_check_stage(xd_ctx *ctx, const xd_built *built, const xd_model *whole, int index) {
    const xd_stage stage = xd_built_stage(built, index);
    XD_REQUIRE(ctx, stage.parallel, XD_ERROR_STATE, "stage %d of %d has no wrapper", index,
               xd_built_stage_count(built));
    for (int64_t i = 0; i < stage.model->weight_count; i++) {
        const xd_weight *w = stage.model->weights[i];
        if (!xdi_weight_is_listed(w)) continue;
        const xd_weight *of = xd_model_find_weight(whole, w->name);
        XD_REQUIRE(ctx, of && xdi_weight_is_listed(of), XD_ERROR_MISMATCH,
                   "stage %d has weight \"%.80s\", and the whole model of %" PRId64 " weights does not",
                   index, w->name, whole->weight_count);
        XD_REQUIRE(ctx, xdi_built_is_alike(w, of), XD_ERROR_MISMATCH,
                   "weight \"%.80s\" has another shape or type in stage %d than in the whole model", w->name,
                   index);
        XD_REQUIRE(ctx, xdi_built_find(built, w->name) == w, XD_ERROR_MISMATCH,
                   "weight \"%.80s\" of stage %d is in one before it as well", w->name, index);
    }
    return XD_OK;
}

/* Also counts. */
static xd_result xdi_built_check_list(const xd_built *built, const xd_model *whole, int64_t capacity,
                                      int64_t *count) {
    xd_ctx *ctx = whole->ctx;
    int64_t n = 0;
    XD_REQUIRE(ctx, whole->sealed, XD_ERROR_STATE, "a whole model of %" PRId64 " weights that is not sealed",
               whole->weight_count);
    for (int i = 0; i < xd_built_stage_count(built); i++) XD_TRY(xdi_built_check_stage(ctx, built, whole, i));
    for (int64_t i = 0; i < whole->weight_count; i++) n += xdi_weight_is_listed(whole->weights[i]);
    XD_REQUIRE(ctx, capacity == 0 || capacity >= n, XD_ERROR_ARGUMENT,
               "%" PRId64 " weights of a whole model, capacity is %" PRId64, n, capacity);
    *count = n;
    return XD_OK;
}

/* ---- entries ---- */

/* Nothing of it is here. Its gradient is not NULL, so that steps count alike; nobody reads it. */
static xd_param xdi_built_no_param(xd_weight *w) {
    xd_param out = xdi_weight_param(w);
    out.value = NULL;
    out.gradient = w->desc.buffer ? NULL : w;
    out.count = out.first = 0;
    out.shape = NULL;
    out.dims = 0;
    return out;
}

static xd_tensor_part xdi_built_no_part(const xd_weight *w) {
    xd_tensor_part out;
    memset(&out, 0, sizeof out);
    out.name = w->name;
    out.dtype = w->desc.dtype;
    out.ndim = w->desc.ndim;
    memcpy(out.shape, w->desc.shape, sizeof out.shape);
    return out;
}

/* Names are those of the whole model. */
static xd_param xdi_built_param(const xd_built *built, xd_weight *of) {
    const xd_weight *here = xdi_built_find(built, of->name);
    if (!here) return xdi_built_no_param(of);
    xd_param out = xdi_weight_kept_param(here);
    out.name = of->name;
    return out;
}

static xd_tensor_part xdi_built_part(const xd_built *built, const xd_weight *of) {
    const xd_weight *here = xdi_built_find(built, of->name);
    if (!here) return xdi_built_no_part(of);
    xd_tensor_part out = xdi_weight_kept_part(here);
    out.name = of->name;
    if (here->desc.traits.shared_embedding) /* whoever has the other copy has it under another name */
        out.replica = xdi_weight_is_elsewhere(here);
    return out;
}

XD_API xd_result xd_built_params(const xd_built *built, const xd_model *whole, int64_t capacity,
                                 xd_param *params, int64_t *count) {
    XDI_LIVE(xd_built, built);
    XDI_LIVE(xd_model, whole);
    XDI_GIVEN(NULL, built);
    XDI_GIVEN(xdi_built_ctx(built), whole, count);
    int64_t at = 0;
    XD_TRY(xdi_built_check_list(built, whole, capacity, count));
    for (int64_t i = 0; i < whole->weight_count && capacity > 0; i++)
        if (xdi_weight_is_listed(whole->weights[i])) params[at++] = xdi_built_param(built, whole->weights[i]);
    return XD_OK;
}

XD_API xd_result xd_built_parts(const xd_built *built, const xd_model *whole, int64_t capacity,
                                xd_tensor_part *parts, int64_t *count) {
    XDI_LIVE(xd_built, built);
    XDI_LIVE(xd_model, whole);
    XDI_GIVEN(NULL, built);
    XDI_GIVEN(xdi_built_ctx(built), whole, count);
    int64_t at = 0;
    XD_TRY(xdi_built_check_list(built, whole, capacity, count));
    for (int64_t i = 0; i < whole->weight_count && capacity > 0; i++)
        if (xdi_weight_is_listed(whole->weights[i])) parts[at++] = xdi_built_part(built, whole->weights[i]);
    return XD_OK;
}
