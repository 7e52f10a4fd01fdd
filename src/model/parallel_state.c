/* What gradients are worth: nothing before the ranks have summed them, and nothing where no block had a backward. */

#include "base/internal.h"
#include "comm/collective.h"
#include "model/step_internal.h"

static void xdi_state_set_all(const xd_model *model, xd_gradient_state state) {
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *w = model->weights[i];
        if (w->owner == w) w->state = xdi_weight_is_trained(w) ? state : XD_GRADIENT_READY;
    }
}

XD_PRIVATE bool xdi_block_trains(const xd_block *b) {
    for (int64_t i = 0; i < b->count; i++)
        if (xdi_weight_is_trained(b->model->weights[b->first + i]->owner)) return true;
    return false;
}

XD_PRIVATE void xdi_state_wait(const xd_model *model, xdi_step *step) {
    if (!step->waits) xdi_state_set_all(model, XD_GRADIENT_WAITS);
    step->waits = true;
}

XD_PRIVATE void xdi_state_use(const xd_block *block) {
    for (int64_t i = 0; i < block->count; i++) block->model->weights[block->first + i]->owner->used = true;
}

XD_PRIVATE void xdi_state_reset(const xd_model *model, xdi_step *step) {
    xdi_state_set_all(model, XD_GRADIENT_READY);
    for (int64_t i = 0; i < model->weight_count; i++) model->weights[i]->used = false;
    step->waits = false;
}

/* Whether a skip leaves a weight without a gradient. Ranks beyond the data ranks add to some, and experts are skipped
 * where no tokens come: their gradients are zero then. */
static bool xdi_state_may_lack(const xdi_place *place, const xd_weight *w) {
    const xd_weight_traits *t = &w->desc.traits;
    const bool added = t->pipeline_parallel || t->shared_embedding || t->sequence_parallel ||
                       t->averaged_over_tensor_parallel;
    return w->owner == w && xdi_place_has(place, w) && xdi_weight_is_trained(w) && !t->expert && !added;
}

XD_PRIVATE bool xdi_state_skips(const xdi_place *place) {
    bool skips = false;
    for (int64_t i = 0; i < place->model->weight_count; i++)
        skips =
            skips || (xdi_state_may_lack(place, place->model->weights[i]) && !place->model->weights[i]->used);
    return skips;
}

/* Whether any rank has used each weight. */
static xd_result xdi_state_gather(const xdi_place *place, int *used) {
    xd_weight *const *weights = place->model->weights;
    const int64_t n = place->model->weight_count;
    for (int64_t i = 0; i < n; i++) used[i] = weights[i]->used;
    XD_TRY(xd_all_reduce(place->data, used, used, n, XD_DTYPE_I32, XD_MAX));
    if (place->replicas) XD_TRY(xd_all_reduce(place->replicas, used, used, n, XD_DTYPE_I32, XD_MAX));
    for (int64_t i = 0; i < n; i++) weights[i]->used = used[i] > 0;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_state_sum(const xdi_store *store, bool skipped) {
    const xdi_place *place = store->place;
    if (skipped) XD_TRY(xdi_state_gather(place, store->scratch.used));
    for (int64_t i = 0; i < place->model->weight_count; i++) {
        xd_weight *w = place->model->weights[i];
        if (w->owner != w || !xdi_place_has(place, w)) continue;
        w->state = xdi_state_may_lack(place, w) && !w->used ? XD_GRADIENT_NONE : XD_GRADIENT_READY;
    }
    return XD_OK;
}
