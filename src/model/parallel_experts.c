/* Experts: a wrapper of their own inside that of a model's other weights, over the data ranks that hold the same ones.
 *
 * Data rank r is member r % members of group r / members, and number r / members among those with its experts. What is
 * in rows stays in rows: the leaves of a group's members are a range of those of the step. So are, where leaves are
 * strided, those of one round. */

#include "base/internal.h"
#include "kernel/kernels.h"
#include "model/parallel_internal.h"

#include <string.h>

/* ---- a wrapper ---- */

static const xd_weight *xdi_experts_first(const xd_model *model) {
    for (int64_t i = 0; i < xdi_model_weight_count(model); i++)
        if (xdi_weight_is_expert(model->weights[i])) return model->weights[i];
    return NULL;
}

/* Blocks have weights of one kind: they are opened for other leaves. */
static xd_result xdi_experts_mark(xd_model *model) {
    for (xd_block *b = &model->root; b; b = xdi_block_after(b)) {
        b->expert = b->count > 0 && xdi_weight_is_expert(model->weights[b->first]);
        for (int64_t i = 1; i < b->count; i++) {
            const xd_weight *w = model->weights[b->first + i];
            XD_REQUIRE(model->ctx, xdi_weight_is_expert(w) == b->expert, XD_ERROR_UNSUPPORTED,
                       "block \"%.80s\" has \"%.80s\", which is %s, and \"%.80s\", which is %s: experts are "
                       "in blocks "
                       "of their own",
                       b->name, model->weights[b->first]->name, b->expert ? "an expert's" : "none", w->name,
                       b->expert ? "none" : "an expert's");
        }
    }
    return XD_OK;
}

/* A wrapper with the settings of the one around it, but for what belongs to its ranks; its place is to be set. */
static xd_result xdi_experts_make(xd_parallel *p, const xd_expert_ranks *e) {
    const xdi_place *around = &p->place;
    xd_parallel *q = xdi_parallel_at(around);
    XD_REQUIRE(around->ctx, q, XD_ERROR_MEMORY, "no room for a wrapper of experts");
    q->place.of_experts = true;
    q->place.data = q->place.replicas = NULL;
    q->place.settings.gathers = e->gathers;
    q->place.settings.reductions = e->reductions;
    if (!e->gathers) q->place.settings.prefetch = 0;
    q->place.settings.reshard_ranks = around->settings.reshard_ranks == 1 && around->ranks > 1;
    p->experts = q;
    return XD_OK;
}

/* Whether the experts' ranks are a group of those of the other weights, each at its place. */
static xd_result xdi_experts_check_place(const xdi_place *around, const xdi_place *place) {
    XD_REQUIRE(around->ctx, around->ranks % place->ranks == 0, XD_ERROR_TOPOLOGY,
               "%d ranks with the same experts do not divide %d data ranks", place->ranks, around->ranks);
    XD_REQUIRE(
        around->ctx, around->rank / place->members == place->rank, XD_ERROR_TOPOLOGY,
        "data rank %d of %d is number %d of the %d with its experts, not %d: the %d members of a group "
        "are neighbours",
        around->rank, around->ranks, place->rank, place->ranks, around->rank / place->members,
        place->members);
    XD_REQUIRE(around->ctx,
               place->replica == around->replica && place->replica_count == around->replica_count,
               XD_ERROR_TOPOLOGY, "experts are in group %d of %d, the other weights in %d of %d",
               place->replica, place->replica_count, around->replica, around->replica_count);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_experts_open(xd_parallel *p, const xd_fsdp_desc *d) {
    const xdi_place *around = &p->place;
    const xd_expert_ranks *e = &d->experts;
    const xd_weight *first = xdi_experts_first(around->model);
    XD_TRY(xdi_experts_mark(around->model));
    XD_REQUIRE(around->ctx, first || !e->data || !around->model->sealed, XD_ERROR_ARGUMENT,
               "a group of %d ranks with the same experts, and none of %lld weights is an expert's",
               xd_comm_size(e->data), (long long)around->model->weight_count);
    if (!first) return XD_OK;
    XD_REQUIRE(around->ctx, e->data || around->ranks * around->replica_count == 1, XD_ERROR_UNSUPPORTED,
               "weight \"%.80s\" is an expert's, which needs a data group of its own among %d ranks",
               first->name, around->ranks * around->replica_count);
    XD_TRY(xdi_experts_make(p, e));
    xdi_place *place = &p->experts->place;
    place->data = e->data ? e->data : around->data;
    place->replicas = e->replicas && xd_comm_size(e->replicas) > 1 ? e->replicas : NULL;
    xdi_place_set_rank(place, xd_comm_rank(place->data), xd_comm_size(place->data),
                       place->replicas ? xd_comm_rank(place->replicas) : 0,
                       place->replicas ? xd_comm_size(place->replicas) : 1);
    place->members = around->ranks / place->ranks > 0 ? around->ranks / place->ranks : 1;
    return xdi_experts_check_place(around, place);
}

XD_PRIVATE xd_result xdi_experts_place(xd_parallel *p, const xd_fsdp_desc *d, int ranks) {
    const xdi_place *around = &p->place;
    XD_TRY(xdi_experts_mark(around->model));
    if (!xdi_experts_first(around->model)) return XD_OK;
    XD_REQUIRE(around->ctx, ranks > 0 && around->ranks % ranks == 0, XD_ERROR_TOPOLOGY,
               "%d ranks with the same experts do not divide %d data ranks", ranks, around->ranks);
    XD_TRY(xdi_experts_make(p, &d->experts));
    const int members = around->ranks / ranks;
    xdi_place_set_rank(&p->experts->place, around->rank / members, ranks, around->replica,
                       around->replica_count);
    p->experts->place.members = members;
    return XD_OK;
}

/* ---- leaves that come in turn ---- */

XD_PRIVATE bool xdi_gradient_is_sent(const xdi_place *place) {
    return place->batches.strided && (xdi_place_assembles(place) || place->members > 1);
}

XD_PRIVATE int64_t xdi_gradient_levels(const xdi_place *place) {
    return place->invariant ? place->members : 1;
}

XD_PRIVATE bool xdi_bucket_is_forming(const xdi_bucket *b) {
    for (int i = 0; i < b->flat->place->members; i++)
        if (b->places[i]) return true;
    return false;
}

XD_PRIVATE int xdi_gradient_member(const xdi_place *place, int64_t micro_batch) {
    return place->invariant ? (int)(micro_batch % place->members) : 0;
}

XD_PRIVATE xd_result xdi_round_join(const xdi_store *store, const xdi_bucket *b) {
    const xdi_place *place = store->place;
    const xdi_store_scratch *scratch = &store->scratch;
    const int64_t elements = b->buffer.end - b->buffer.begin;
    if (xdi_gradient_levels(place) == 1) return XD_OK;
    for (int i = 0; i < place->members; i++) {
        scratch->forests[i] = b->places[i];
        scratch->forest_leaves[i].first = i;
        scratch->forest_leaves[i].count = 1;
        scratch->forest_leaves[i].total = place->members;
    }
    return xd_reduce_leaves(place->ctx, b->places[0], scratch->forests, scratch->forest_leaves,
                            place->members, elements, elements, XD_DTYPE_F32, XD_SUM);
}

XD_PRIVATE bool xdi_place_has_lanes(const xdi_place *place) {
    return place->members > 1 && place->invariant && !place->batches.strided;
}

/* What a lane has of the leaves [from, to): nodes of its own, since they are those of a node of all. */
static void xdi_lane_find(const xdi_store *store, const xdi_bucket *b, int member, xd_interval of) {
    const int64_t elements = b->buffer.end - b->buffer.begin;
    const xd_interval row = xdi_batches_row(store->place, member);
    const int64_t from = row.begin > of.begin ? row.begin : of.begin;
    const int64_t to = row.end < of.end ? row.end : of.end;
    const void **forest = &store->scratch.forests[member];
    xd_leaves *leaves = &store->scratch.forest_leaves[member];
    *forest = NULL;
    leaves->first = from;
    leaves->count = to > from ? to - from : 0;
    leaves->total = store->place->batches.own.total;
    if (leaves->count > 0)
        *forest =
            xd_leaf_stack_forest(b->lanes[member]) + xd_leaves_nodes(row.begin, from - row.begin) * elements;
}

XD_PRIVATE xd_result xdi_lanes_join(const xdi_store *store, const xdi_bucket *b) {
    const xdi_place *place = store->place;
    const xd_leaves *own = &place->batches.own;
    const int64_t elements = b->buffer.end - b->buffer.begin, end = own->first + own->count;
    float *node = b->joined;
    xd_interval of;
    for (of.begin = own->first; b->lanes && of.begin < end; of.begin = of.end, node += elements) {
        of.end = of.begin + xd_leaves_node_size(of.begin, end);
        for (int i = 0; i < place->members; i++) xdi_lane_find(store, b, i, of);
        XD_TRY(xd_reduce_leaves(place->ctx, node, store->scratch.forests, store->scratch.forest_leaves,
                                place->members, elements, elements, XD_DTYPE_F32, XD_SUM));
    }
    return XD_OK;
}
