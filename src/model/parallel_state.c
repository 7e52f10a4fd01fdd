/* What gradients are worth: nothing before the ranks have summed them, and nothing where no block had a backward. */

#include "base/internal.h"
#include "comm/collective.h"
#include "model/internal.h"

static void xdi_state_set_all(const xd_parallel *p, xd_gradient_state state) {
    for (int64_t i = 0; i < p->model->weight_count; i++) {
        xd_weight *w = p->model->weights[i];
        if (w->owner == w) w->state = xdi_weight_is_trained(w) ? state : XD_GRADIENT_READY;
    }
}

XD_PRIVATE bool xdi_block_trains(const xd_block *b) {
    for (int64_t i = 0; i < b->count; i++)
        if (xdi_weight_is_trained(b->model->weights[b->first + i]->owner)) return true;
    return false;
}

XD_PRIVATE void xdi_state_wait(xd_parallel *p) {
    if (!p->waits) xdi_state_set_all(p, XD_GRADIENT_WAITS);
    p->waits = true;
}

XD_PRIVATE void xdi_state_use(const xd_block *block) {
    for (int64_t i = 0; i < block->count; i++) block->model->weights[block->first + i]->owner->used = true;
}

XD_PRIVATE void xdi_state_reset(xd_parallel *p) {
    xdi_state_set_all(p, XD_GRADIENT_READY);
    for (int64_t i = 0; i < p->model->weight_count; i++) p->model->weights[i]->used = false;
    p->waits = false;
}

/* Whether a skip leaves a weight without a gradient. Ranks beyond the data ranks add to some, and experts are skipped where no
 * tokens come: their gradients are zero then. */
static bool xdi_state_may_lack(const xd_parallel *p, const xd_weight *w) {
    const xd_weight_traits *t = &w->desc.traits;
    const bool added = t->pipeline_parallel || t->shared_embedding || t->sequence_parallel ||
                       t->averaged_over_tensor_parallel;
    return w->owner == w && xdi_parallel_has(p, w) && xdi_weight_is_trained(w) && !t->expert && !added;
}

XD_PRIVATE bool xdi_state_skips(const xd_parallel *p) {
    bool skips = false;
    for (int64_t i = 0; i < p->model->weight_count; i++)
        skips = skips || (xdi_state_may_lack(p, p->model->weights[i]) && !p->model->weights[i]->used);
    return skips;
}

/* Whether any rank has used each weight. */
static xd_result xdi_state_gather(xd_parallel *p) {
    const int64_t n = p->model->weight_count;
    for (int64_t i = 0; i < n; i++) p->used[i] = p->model->weights[i]->used;
    XD_TRY(xd_all_reduce(p->data, p->used, p->used, n, XD_DTYPE_I32, XD_MAX));
    if (p->replicas) XD_TRY(xd_all_reduce(p->replicas, p->used, p->used, n, XD_DTYPE_I32, XD_MAX));
    for (int64_t i = 0; i < n; i++) p->model->weights[i]->used = p->used[i] > 0;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_state_sum(xd_parallel *p, bool skipped) {
    if (skipped) XD_TRY(xdi_state_gather(p));
    for (int64_t i = 0; i < p->model->weight_count; i++) {
        xd_weight *w = p->model->weights[i];
        if (w->owner != w || !xdi_parallel_has(p, w)) continue;
        w->state = xdi_state_may_lack(p, w) && !w->used ? XD_GRADIENT_NONE : XD_GRADIENT_READY;
    }
    return XD_OK;
}
