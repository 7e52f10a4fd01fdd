/* Where a wrapper stands among its ranks, which micro-batches of a step are its, and which weights. */

#include "base/internal.h"
#include "model/parallel_internal.h"

#include <string.h>

/* ---- its place ---- */

XD_PRIVATE void xdi_place_set_rank(xdi_place *place, int rank, int ranks, int replica, int replica_count) {
    xdi_wrap_settings *settings = &place->settings;
    place->ctx = place->model->ctx;
    if (!place->on_host) place->parts_ctx = place->ctx;
    place->rank = rank;
    place->ranks = ranks;
    place->replica = replica;
    place->replica_count = replica_count;
    place->members = 1;
    place->alone = settings->sharded && ranks == 1 && settings->reshard_ranks == 0;
    if (settings->reshard_ranks == 0) settings->reshard_ranks = ranks;
    place->invariant = xd_ctx_settings(place->ctx)->reduction == XD_REDUCTION_INVARIANT;
}

XD_PRIVATE xd_parallel *xdi_parallel_at(const xdi_place *place) {
    xd_parallel *p = XDI_OBJECT(xd_parallel, place->ctx, sizeof *p);
    if (!p) return NULL;
    p->place = *place;
    p->store.place = &p->place;
    return p;
}

/* ---- which is whose ---- */

XD_PRIVATE bool xdi_weight_is_expert(const xd_weight *w) {
    return w->owner->desc.traits.expert;
}

XD_PRIVATE xd_parallel *xdi_block_parallel(const xd_block *block) {
    xd_parallel *p = block->model->parallel;
    return p && p->experts && block->expert ? p->experts : p;
}

XD_PRIVATE bool xdi_place_has(const xdi_place *place, const xd_weight *w) {
    return xdi_weight_is_expert(w) == place->of_experts;
}

XD_PRIVATE struct xdi_unit *xdi_block_unit(const xd_block *block) {
    return block->units[block->expert];
}

/* ---- micro-batches ---- */

XD_PRIVATE xd_interval xdi_batches_row(const xdi_place *place, int member) {
    const int64_t ranks = (int64_t)place->ranks * place->members,
                  rank = (int64_t)place->rank * place->members + member;
    xd_interval row;
    row.begin = place->batches.own.total * rank / ranks;
    row.end = place->batches.own.total * (rank + 1) / ranks;
    return row;
}

XD_PRIVATE int64_t xdi_batches_passes(const xdi_place *place) {
    if (place->of_experts) return place->batches.max * place->members;
    return place->settings.sharded ? place->batches.max : place->batches.own.count;
}

XD_PRIVATE int64_t xdi_batches_number(const xdi_place *place, int64_t micro_batch) {
    const xdi_batches *batches = &place->batches;
    const int64_t round = micro_batch / place->members, member = micro_batch % place->members;
    const xd_interval row = xdi_batches_row(place, (int)member);
    if (micro_batch < 0 || round >= row.end - row.begin) return -1;
    const int64_t strided = (round * place->ranks + place->rank) * place->members + member;
    return place->replica * batches->own.total + (batches->strided ? strided : row.begin + round);
}

XD_API xd_parallel_micro_batch_count xd_parallel_expert_micro_batches(const xd_parallel *parallel) {
    XD_ASSERT(parallel);
    const xd_parallel *p = parallel->experts;
    xd_parallel_micro_batch_count out;
    memset(&out, 0, sizeof out);
    if (!p) return out;
    out.own = p->place.batches.own.count;
    out.max = (p->place.batches.own.total + p->place.ranks - 1) / p->place.ranks;
    out.total = p->place.batches.total;
    out.opened = xdi_batches_passes(&p->place);
    return out;
}

XD_API int64_t xd_parallel_expert_micro_batch(const xd_parallel *parallel, int64_t k) {
    XD_ASSERT(parallel);
    return parallel->experts ? xdi_batches_number(&parallel->experts->place, k) : -1;
}
