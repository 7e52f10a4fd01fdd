/* Fake scores: descriptions after a teacher, and copies on one rank. */

#include "dmd/fake_score.h"

#include "dmd/fake_score_internal.h"
#include "kernel/internal.h"
#include "tensor/interval_internal.h"

#include <string.h>

/* ---- names ---- */

XD_PRIVATE bool xdi_fake_fits(const char *const *patterns, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (xdi_name_fits(patterns[i], name)) return true;
    return false;
}

XD_PRIVATE xd_result xdi_fake_check_patterns(const xd_model *model, const char *const *patterns, int count,
                                             const char *what) {
    XD_REQUIRE(model->ctx, count >= 0 && (patterns || count == 0), XD_ERROR_ARGUMENT, "%d %s at %p", count,
               what, (const void *)patterns);
    XD_REQUIRE(model->ctx, !patterns || count > 0, XD_ERROR_ARGUMENT, "a list of %s, and a count of %d", what,
               count);
    for (int i = 0; i < count; i++) {
        bool found = false;
        for (int64_t k = 0; k < model->weight_count && !found; k++)
            found = xdi_name_fits(patterns[i], model->weights[k]->name);
        XD_REQUIRE(model->ctx, found, XD_ERROR_ARGUMENT,
                   "\"%.80s\", number %d of %s, fits none of %lld weights", patterns[i], i, what,
                   (long long)model->weight_count);
    }
    return XD_OK;
}

XD_PRIVATE uint64_t xdi_fake_hash_patterns(uint64_t hash, const char *const *patterns, int count) {
    hash = xd_hash(hash, &count, sizeof count);
    for (int i = 0; i < count; i++) hash = xd_hash(hash, patterns[i], strlen(patterns[i]) + 1);
    return hash;
}

/* ---- descriptions ---- */

static bool xdi_fake_trains(xd_dtype dtype) {
    return xd_dtype_is_floating(dtype) && xd_dtype_size(dtype) > 1;
}

/* The type of a weight of the fake score. */
static xd_dtype xdi_fake_dtype(const xd_fake_score_desc *d, const xd_weight *owner) {
    const xd_dtype dtype = owner->desc.dtype;
    if (d->dtype == XD_DTYPE_NONE || !xdi_fake_trains(dtype) || dtype == XD_DTYPE_F64) return dtype;
    return owner->desc.traits.keep_f32 && d->dtype != XD_DTYPE_F32 ? dtype : d->dtype;
}

/* What changes of a weight that is no tie. */
static xd_result xdi_fake_adapt(xd_ctx *ctx, const xd_fake_score_desc *d, const xd_weight *weight,
                                xd_weight_desc *made) {
    if (!made->buffer) made->traits.frozen = xdi_fake_fits(d->frozen, d->frozen_count, weight->name);
    if (!d->adapt) return XD_OK;
    xdi_clear_error(ctx);
    XD_TRY(xdi_builder_called(ctx, d->adapt(d->user, weight->name, made), "adapt of weight",
                              (int)weight->index));
    bool same = made->ndim == weight->desc.ndim && made->buffer == weight->desc.buffer && !made->tied_to &&
                made->name && strcmp(made->name, weight->desc.name) == 0;
    for (int i = 0; same && i < made->ndim; i++) same = made->shape[i] == weight->desc.shape[i];
    XD_REQUIRE(ctx, same, XD_ERROR_ARGUMENT, "adapt has changed name, shape or kind of \"%.80s\"",
               weight->name);
    return XD_OK;
}

static xd_result xdi_fake_add_weight(xd_block *block, const xd_fake_score_desc *d, const xd_weight *weight) {
    const xd_weight *owner = weight->owner;
    xd_ctx *ctx = weight->model->ctx;
    xd_weight_desc made = weight->desc;
    made.value = made.gradient = NULL;
    made.room = 0;
    made.dtype = xdi_fake_dtype(d, owner);
    if (weight != owner) {
        const xd_weight *tie = xd_model_find_weight(block->model, owner->name);
        made.dtype = tie->desc.dtype; /* as adapted */
        made.gradient_dtype = tie->desc.gradient_dtype;
        made.stored_rows = tie->desc.stored_rows;
        return xd_weight_add(block, &made, NULL);
    }
    XD_TRY(xdi_fake_adapt(ctx, d, weight, &made));
    XD_REQUIRE(ctx, made.buffer || made.traits.frozen || xdi_fake_trains(made.dtype), XD_ERROR_DTYPE,
               "weight \"%.80s\" of %s cannot train: name it in `frozen`", weight->name,
               xd_dtype_name(made.dtype));
    if (d->shared) {
        made.value = weight->value;
        made.room = weight->count;
    }
    return xd_weight_add(block, &made, NULL);
}

/* The teacher's blocks in their order, a parent before its children. */
static xd_result xdi_fake_add_blocks(const xd_model *teacher, const xd_fake_score_desc *d, xd_model *model) {
    for (const xd_block *from = &teacher->root; from; from = xdi_block_after(from)) {
        xd_block *to = &model->root;
        if (from != &teacher->root) {
            xd_block *parent =
                from->parent == &teacher->root ? to : xd_model_find_block(model, from->parent->name);
            XD_TRY(xd_block_add(parent, &from->desc, &to));
        }
        for (int64_t i = 0; i < from->count; i++)
            XD_TRY(xdi_fake_add_weight(to, d, teacher->weights[from->first + i]));
    }
    return XD_OK;
}

static xd_result xdi_fake_check(const xd_model *teacher, const xd_fake_score_desc *d) {
    xd_ctx *ctx = teacher->ctx;
    XD_REQUIRE(ctx, teacher->sealed, XD_ERROR_STATE, "the teacher is not sealed: xd_model_seal comes first");
    XD_REQUIRE(ctx,
               d->dtype == XD_DTYPE_NONE || d->dtype == XD_DTYPE_F32 || d->dtype == XD_DTYPE_BF16 ||
                   d->dtype == XD_DTYPE_F16,
               XD_ERROR_ARGUMENT, "a fake score of %s: F32, BF16 and F16 are possible",
               xd_dtype_name(d->dtype));
    return xdi_fake_check_patterns(teacher, d->frozen, d->frozen_count, "`frozen`");
}

static xd_result xdi_fake_describe(const xd_model *teacher, const xd_fake_score_desc *d, xd_model **out) {
    xd_model *model = NULL;
    XD_TRY(xdi_fake_check(teacher, d));
    XD_TRY(xd_model_create(teacher->ctx, &teacher->desc, &model));
    const xd_result result = xdi_fake_add_blocks(teacher, d, model);
    if (result == XD_OK)
        *out = model;
    else
        xd_model_destroy(model);
    return result;
}

static xd_fake_score_desc xdi_fake_settings(const xd_fake_score_desc *desc) {
    xd_fake_score_desc d;
    memset(&d, 0, sizeof d);
    return desc ? *desc : d;
}

XD_API xd_result xd_fake_score_describe(const xd_model *teacher, const xd_fake_score_desc *desc,
                                        xd_model **out) {
    XDI_LIVE(xd_model, teacher);
    XDI_GIVEN_OF(teacher, out);
    xd_fake_score_desc d = xdi_fake_settings(desc);
    d.shared = false;
    return xdi_fake_describe(teacher, &d, out);
}

/* ---- copies ---- */

XD_PRIVATE xd_tensor_part xdi_fake_part(const xd_weight *w, bool whole) {
    xd_tensor_part part;
    if (w->flat) {
        part = xdi_weight_kept_part(w);
        if (!whole || !w->flat->whole) return part;
        part.replica = part.replica || w->model->parallel->place.rank > 0;
    } else {
        memset(&part, 0, sizeof part);
        part.name = w->name;
        part.dtype = w->desc.dtype;
        part.ndim = w->desc.ndim;
        memcpy(part.shape, w->desc.shape, sizeof part.shape);
        part.region = w->saved ? w->saved : &w->region;
        part.replica = xdi_weight_is_copy(w);
    }
    part.data = w->value;
    part.range.begin = 0;
    part.range.end =
        w->count > 0 ? xdi_region_numel(part.region) : 0; /* outside of its mesh a scalar has a region */
    return part;
}

/* Whether ranks have different parts of a weight: by what it says of itself, so that all of them name the same one. */
static bool xdi_fake_is_cut(const xd_weight *w) {
    const xd_layout_desc *cut = w->desc.layout ? xd_layout_settings(w->desc.layout) : NULL;
    for (int i = 0; cut && i < cut->topology->axis_count; i++)
        if (cut->placement[i].kind != XD_REPLICATE && cut->topology->size[i] > 1) return true;
    return w->flat && !w->flat->whole && xdi_place_assembles(&w->model->parallel->place);
}

/* Refuses teachers that one rank cannot copy, looking at every weight. */
static xd_result xdi_fake_check_whole(const xd_model *teacher, const xd_fake_score_desc *d) {
    xd_ctx *ctx = teacher->ctx;
    for (int64_t i = 0; i < teacher->weight_count; i++) {
        const xd_weight *w = teacher->weights[i];
        if (w->owner != w) continue;
        const xd_tensor_part part = xdi_fake_part(w, true);
        const xd_region whole = xdi_region_whole(part.ndim, part.shape);
        const int64_t here = part.range.end - part.range.begin, all = xdi_region_numel(&whole);
        XD_REQUIRE(ctx, d->shared || (here == all && !xdi_fake_is_cut(w)), XD_ERROR_UNSUPPORTED,
                   "the teacher is sharded: this rank has %lld of %lld elements of \"%.80s\"; "
                   "xd_fake_score_create_meta takes it in parts",
                   (long long)here, (long long)all, w->name);
        XD_REQUIRE(ctx, here == 0 || (part.data && w->ready), XD_ERROR_STATE,
                   "weight \"%.80s\" of the teacher holds no values", w->name);
    }
    return XD_OK;
}

static xd_result xdi_fake_copy_values(const xd_model *teacher, const xd_model *model) {
    for (int64_t i = 0; i < teacher->weight_count; i++) {
        const xd_weight *from = teacher->weights[i], *to = model->weights[i];
        if (from->owner != from) continue;
        const xd_tensor_part part = xdi_fake_part(from, true);
        const int64_t count = part.range.end - part.range.begin;
        if (count > 0 && from->desc.dtype == to->desc.dtype)
            XD_TRY(xdi_copy_fresh(teacher->ctx, to->value, part.data,
                                  (size_t)count * xd_dtype_size(part.dtype)));
        else if (count > 0)
            XD_TRY(xd_cast(teacher->ctx, to->value, to->desc.dtype, part.data, part.dtype, count));
    }
    return XD_OK;
}

static xd_result xdi_fake_fill(const xd_model *teacher, const xd_fake_score_desc *d, xd_model *model) {
    XD_TRY(xd_model_seal(model));
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *from = teacher->weights[i], *to = model->weights[i];
        XD_REQUIRE(model->ctx, to->owner != to || to->count == from->count, XD_ERROR_ARGUMENT,
                   "adapt has cut \"%.80s\": this rank would have %lld of %lld elements; "
                   "xd_fake_score_create_meta does that",
                   to->name, (long long)to->count, (long long)from->count);
    }
    XD_TRY(xd_model_allocate(model));
    if (!d->shared) XD_TRY(xdi_fake_copy_values(teacher, model));
    for (int64_t i = 0; i < model->weight_count; i++) model->weights[i]->owner->ready = true;
    return XD_OK;
}

XD_API xd_result xd_fake_score_create(const xd_model *teacher, const xd_fake_score_desc *desc,
                                      xd_model **out) {
    XDI_LIVE(xd_model, teacher);
    XDI_GIVEN_OF(teacher, out);
    const xd_fake_score_desc d = xdi_fake_settings(desc);
    xd_model *model = NULL;
    XD_TRY(xdi_fake_check(teacher, &d));
    XD_REQUIRE(
        teacher->ctx, !d.shared || (!d.adapt && d.dtype == XD_DTYPE_NONE), XD_ERROR_ARGUMENT,
        "a fake score that shares the teacher's values has its types and layouts: no dtype (%s) and no adapt",
        xd_dtype_name(d.dtype));
    XD_REQUIRE(teacher->ctx, !d.shared || !teacher->parallel, XD_ERROR_STATE,
               "the teacher is wrapped: its %lld weights are the wrapper's and cannot be shared",
               (long long)teacher->weight_count);
    XD_TRY(xdi_fake_check_whole(teacher, &d));
    XD_TRY(xdi_fake_describe(teacher, &d, &model));
    const xd_result result = xdi_fake_fill(teacher, &d, model);
    if (result == XD_OK)
        *out = model;
    else
        xd_model_destroy(model);
    return result;
}
