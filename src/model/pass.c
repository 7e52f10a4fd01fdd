/* Brackets: blocks are opened before a pass and closed after it. */

#include "base/internal.h"
#include "model/parallel_internal.h"

#include <string.h>

/* ---- brackets ---- */

static xd_result xdi_block_check_backward(const xd_block *b, xd_pass pass) {
    const xd_parallel *p = xdi_block_parallel(b);
    xd_ctx *ctx = b->model->ctx;
    XD_REQUIRE(ctx, p, XD_ERROR_STATE, "a backward of block \"%.80s\", whose model has no wrapper", b->name);
    const int64_t micro_batches = xdi_batches_passes(&p->place);
    XD_REQUIRE(ctx, !p->step.reduced, XD_ERROR_STATE,
               "a backward of block \"%.80s\" after xd_parallel_reduce: xd_parallel_publish ends the step",
               b->name);
    XD_REQUIRE(ctx, pass.micro_batch >= 0 && pass.micro_batch < micro_batches, XD_ERROR_ARGUMENT,
               "micro-batch %lld of block \"%.80s\": this rank has %lld; .micro_batch of an xd_pass counts "
               "this rank's from 0, and xd_parallel_micro_batch has the number among all",
               (long long)pass.micro_batch, b->name, (long long)micro_batches);
    XD_REQUIRE(ctx, pass.micro_batch == b->micro_batch, XD_ERROR_STATE,
               "micro-batch %lld of block \"%.80s\", whose next one is %lld: .micro_batch of an xd_pass "
               "counts the backward passes of each block, from 0",
               (long long)pass.micro_batch, b->name, (long long)b->micro_batch);
    return xdi_gradient_check_micro_batch(&p->place, b, pass.micro_batch);
}

static xd_result xdi_block_check(const xd_block *b, xd_pass pass) {
    xd_ctx *ctx = b->model->ctx;
    XD_REQUIRE(ctx, (int)pass.kind >= 0 && pass.kind <= XD_PASS_INFERENCE, XD_ERROR_ARGUMENT,
               "pass %d of block \"%.80s\" does not exist", (int)pass.kind, b->name);
    XD_REQUIRE(ctx, b->model->sealed, XD_ERROR_STATE, "block \"%.80s\" of a model that is not sealed",
               b->name);
    XD_REQUIRE(ctx, b->open < XDI_BLOCK_OPEN_MAX, XD_ERROR_STATE, "block \"%.80s\" is open %d times already",
               b->name, b->open);
    if (pass.kind == XD_PASS_BACKWARD) XD_TRY(xdi_block_check_backward(b, pass));
    for (int64_t i = 0; i < b->count && !b->model->parallel; i++) {
        const xd_weight *owner = b->model->weights[b->first + i]->owner;
        XD_REQUIRE(ctx, owner->value || owner->count == 0, XD_ERROR_STATE, "weight \"%.80s\" has no storage",
                   owner->name);
    }
    return XD_OK;
}

/* A weight's entries in the model's lists. */
static xd_result xdi_weight_show(xd_parallel *p, const xd_weight *w, int64_t micro_batch, bool adds) {
    xd_model *model = w->model;
    xdi_bucket *bucket = p ? xdi_flat_bucket(w->owner) : NULL;
    if (bucket) XD_TRY(xdi_flight_land(p->place.settings.gathers, &bucket->spreading));
    model->values[w->index] = xdi_weight_shown(w->owner);
    model->value_dtypes[w->index] = p ? w->owner->flat->view_dtype : w->owner->desc.dtype;
    if (!adds) return XD_OK;
    XD_TRY(xdi_gradient_place(&p->store, w, micro_batch, &model->gradients[w->index]));
    model->gradient_dtypes[w->index] =
        model->gradients[w->index] ? w->owner->desc.gradient_dtype : XD_DTYPE_NONE;
    return XD_OK;
}

/* What a block's entries of the model's lists show. */
static xd_result xdi_block_show(xd_block *b, xd_pass pass, xd_block_view *view) {
    xd_model *model = b->model;
    xd_parallel *p = xdi_block_parallel(b);
    const bool adds = pass.kind == XD_PASS_BACKWARD && xdi_batches_owns(&p->place, pass.micro_batch);
    for (int64_t i = b->first; i < b->first + b->count; i++)
        XD_TRY(xdi_weight_show(p, model->weights[i], pass.micro_batch, adds));
    view->count = b->count;
    view->values = model->values + b->first;
    view->value_dtypes = model->value_dtypes + b->first;
    view->gradients = (adds ? model->gradients : model->nothing) + b->first;
    view->gradient_dtypes = (adds ? model->gradient_dtypes : model->no_dtypes) + b->first;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_block_show_values(xd_block *block, xd_block_view *view) {
    xd_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.kind = XD_PASS_RECOMPUTE;
    XD_TRY(xdi_block_check(block, pass));
    return xdi_block_show(block, pass, view);
}

/* Ranks that open other blocks meet in different collectives, whose names say nothing to the caller: his own place does. */
static xd_result xdi_block_explain(const xd_block *block, xd_pass pass, bool ends, xd_result result) {
    static const char *const kinds[] = { "the forward", "the backward", "the forward again", "an inference" };
    if (result != XD_ERROR_MISMATCH) return result;
    const xd_error reported = *xd_last_error(block->model->ctx);
    return XD_FAIL_CULPRIT(
        block->model->ctx, result, reported.culprit,
        "%.300s; here is %s of block \"%.80s\"%s (micro-batch %lld): ranks open the same blocks in the "
        "same order",
        reported.message, ends ? "the end of the backward" : kinds[pass.kind], block->name,
        *block->name ? "" : ", the root,", (long long)pass.micro_batch);
}

XD_API xd_result xd_block_begin(xd_block *block, xd_pass pass, xd_block_view *view) {
    XDI_LIVE(xd_block, block);
    XDI_GIVEN(block ? block->model->ctx : NULL, block);
    xd_parallel *p = xdi_block_parallel(block);
    xd_block_view shown;
    XD_REQUIRE(block->model->ctx, view, XD_ERROR_ARGUMENT,
               "block \"%.80s\" is opened without a view: it is NULL", block->name);
    XD_TRY(xdi_block_check(block, pass));
    if (p)
        XD_TRY(xdi_block_explain(
            block, pass, false,
            xdi_unit_open(&p->store, xdi_block_unit(block), pass.kind == XD_PASS_BACKWARD)));
    const xd_result result = xdi_block_show(block, pass, &shown);
    if (result != XD_OK) {
        if (p) xdi_block_unit(block)->open--;
        return result;
    }
    if (p) xdi_order_add(&p->step.order, block, pass, false);
    if (p && pass.kind == XD_PASS_BACKWARD) xdi_state_use(block);
    if (p) p->step.open++;
    block->passes[block->open++] = pass;
    *view = shown;
    return XD_OK;
}

XD_API xd_result xd_block_skip(xd_block *block, int64_t micro_batch) {
    XDI_LIVE(xd_block, block);
    XDI_GIVEN(block ? block->model->ctx : NULL, block);
    xd_parallel *p = xdi_block_parallel(block);
    xd_pass pass;
    pass.kind = XD_PASS_BACKWARD;
    pass.micro_batch = micro_batch;
    pass.more = false;
    XD_TRY(xdi_block_check(block, pass));
    for (int64_t i = 0; i < block->count && xdi_batches_owns(&p->place, micro_batch); i++) {
        void *place = NULL; /* zeros, where this is the first block of the micro-batch */
        XD_TRY(xdi_gradient_place(&p->store, block->model->weights[block->first + i], micro_batch, &place));
    }
    xdi_order_add(&p->step.order, block, pass, true);
    return xdi_gradient_finish(&p->store, &p->step, block);
}

XD_API xd_result xd_block_end(xd_block *block) {
    XDI_LIVE(xd_block, block);
    XDI_GIVEN(block ? block->model->ctx : NULL, block);
    xd_parallel *p = xdi_block_parallel(block);
    XD_REQUIRE(block->model->ctx, block->open > 0, XD_ERROR_STATE, "block \"%.80s\" is not open",
               block->name);
    const xd_pass pass = block->passes[--block->open];
    if (!p) return XD_OK;
    p->step.open--;
    xdi_block_unit(block)->open--;
    if (pass.kind == XD_PASS_INFERENCE && p->step.open == 0) xdi_store_drop_ahead(&p->store);
    if (pass.kind != XD_PASS_BACKWARD || pass.more) return XD_OK;
    XD_REQUIRE(p->place.ctx, pass.micro_batch == block->micro_batch, XD_ERROR_STATE,
               "the backward of micro-batch %lld of block \"%.80s\" has ended already",
               (long long)pass.micro_batch, block->name);
    return xdi_block_explain(block, pass, true, xdi_gradient_finish(&p->store, &p->step, block));
}
