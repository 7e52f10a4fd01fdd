/* Experts: a wrapper of their own inside that of a model's other weights, over the data ranks that hold the same ones.
 *
 * Data rank r is member r % members of group r / members, and number r / members among those with its experts. What is
 * in rows stays in rows: the leaves of a group's members are a range of those of the step. So are, where leaves are dealt, those
 * of one round. */

#include "base/internal.h"
#include "kernel/kernels.h"
#include "model/internal.h"

#include <string.h>

/* ---- a wrapper ---- */

static const xd_weight *xdi_experts_first(const xd_model *model) {
    for (int64_t i = 0; i < xd_model_weight_count(model); i++)
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

/* A wrapper with the settings of the one around it, but for what belongs to its ranks. */
static xd_result xdi_experts_make(xd_parallel *p) {
    xd_parallel *q = (xd_parallel *)xd_allocate(p->ctx, sizeof *q);
    XD_REQUIRE(p->ctx, q, XD_ERROR_MEMORY, "no room for a wrapper of experts");
    *q = *p;
    q->of_experts = true;
    q->data = q->replicas = NULL;
    q->gathers = q->reductions = NULL;
    q->reshard_ranks = p->reshard_ranks == 1 && p->ranks > 1;
    p->experts = q;
    return XD_OK;
}

/* Whether the experts' ranks are a group of those of the other weights, each at its place. */
static xd_result xdi_experts_check_place(const xd_parallel *p) {
    const xd_parallel *q = p->experts;
    XD_REQUIRE(p->ctx, p->ranks % q->ranks == 0, XD_ERROR_TOPOLOGY,
               "%d ranks with the same experts do not divide %d data ranks", q->ranks, p->ranks);
    XD_REQUIRE(
        p->ctx, p->rank / q->members == q->rank, XD_ERROR_TOPOLOGY,
        "data rank %d of %d is number %d of the %d with its experts, not %d: the %d members of a group "
        "are neighbours",
        p->rank, p->ranks, q->rank, q->ranks, p->rank / q->members, q->members);
    XD_REQUIRE(p->ctx, q->replica == p->replica && q->replica_count == p->replica_count, XD_ERROR_TOPOLOGY,
               "experts are in group %d of %d, the other weights in %d of %d", q->replica, q->replica_count,
               p->replica, p->replica_count);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_experts_open(xd_parallel *p, const xd_fsdp_desc *d) {
    const xd_expert_ranks *e = &d->experts;
    const xd_weight *first = xdi_experts_first(p->model);
    XD_TRY(xdi_experts_mark(p->model));
    XD_REQUIRE(p->ctx, first || !e->data || !p->model->sealed, XD_ERROR_ARGUMENT,
               "a group of %d ranks with the same experts, and none of %lld weights is an expert's",
               xd_comm_size(e->data), (long long)p->model->weight_count);
    if (!first) return XD_OK;
    XD_REQUIRE(p->ctx, e->data || p->ranks * p->replica_count == 1, XD_ERROR_UNSUPPORTED,
               "weight \"%.80s\" is an expert's, which needs a data group of its own among %d ranks",
               first->name, p->ranks * p->replica_count);
    XD_TRY(xdi_experts_make(p));
    xd_parallel *q = p->experts;
    q->data = e->data ? e->data : p->data;
    q->replicas = e->replicas && xd_comm_size(e->replicas) > 1 ? e->replicas : NULL;
    q->gathers = e->gathers;
    q->reductions = e->reductions;
    if (!q->gathers) q->prefetch = 0;
    xdi_parallel_set_place(q, xd_comm_rank(q->data), xd_comm_size(q->data),
                           q->replicas ? xd_comm_rank(q->replicas) : 0,
                           q->replicas ? xd_comm_size(q->replicas) : 1);
    q->members = p->ranks / q->ranks > 0 ? p->ranks / q->ranks : 1;
    return xdi_experts_check_place(p);
}

XD_PRIVATE xd_result xdi_experts_place(xd_parallel *p, const xd_fsdp_desc *d, int ranks) {
    XD_TRY(xdi_experts_mark(p->model));
    if (!xdi_experts_first(p->model)) return XD_OK;
    XD_REQUIRE(p->ctx, ranks > 0 && p->ranks % ranks == 0, XD_ERROR_TOPOLOGY,
               "%d ranks with the same experts do not divide %d data ranks", ranks, p->ranks);
    XD_TRY(xdi_experts_make(p));
    xd_parallel *q = p->experts;
    const int members = p->ranks / ranks;
    q->gathers = d->experts.gathers;
    q->reductions = d->experts.reductions;
    if (!q->gathers) q->prefetch = 0;
    xdi_parallel_set_place(q, p->rank / members, ranks, p->replica, p->replica_count);
    q->members = members;
    return XD_OK;
}

/* ---- leaves that come in turn ---- */

XD_PRIVATE bool xdi_gradient_is_sent(const xd_parallel *p) {
    return p->dealt && (xdi_parallel_assembles(p) || p->members > 1);
}

XD_PRIVATE int64_t xdi_gradient_levels(const xd_parallel *p) {
    return p->invariant ? p->members : 1;
}

XD_PRIVATE bool xdi_bucket_is_forming(const xd_parallel *p, const xdi_bucket *b) {
    for (int i = 0; i < p->members; i++)
        if (b->places[i]) return true;
    return false;
}

XD_PRIVATE int xdi_gradient_member(const xd_parallel *p, int64_t leaf) {
    return p->invariant ? (int)(leaf % p->members) : 0;
}

XD_PRIVATE xd_result xdi_round_join(xd_parallel *p, const xdi_bucket *b) {
    const int64_t elements = b->buffer.end - b->buffer.begin;
    if (xdi_gradient_levels(p) == 1) return XD_OK;
    for (int i = 0; i < p->members; i++) {
        p->forests[i] = b->places[i];
        p->forest_leaves[i].first = i;
        p->forest_leaves[i].count = 1;
        p->forest_leaves[i].total = p->members;
    }
    return xd_reduce_leaves(p->ctx, b->places[0], p->forests, p->forest_leaves, p->members, elements,
                            elements, XD_DTYPE_F32, XD_SUM);
}

XD_PRIVATE bool xdi_parallel_has_lanes(const xd_parallel *p) {
    return p->members > 1 && p->invariant && !p->dealt;
}

/* What a lane has of the leaves [from, to): nodes of its own, since they are those of a node of all. */
static void xdi_lane_find(const xd_parallel *p, const xdi_bucket *b, int member, xd_interval of) {
    const int64_t elements = b->buffer.end - b->buffer.begin;
    const xd_interval row = xdi_parallel_row(p, member);
    const int64_t from = row.begin > of.begin ? row.begin : of.begin;
    const int64_t to = row.end < of.end ? row.end : of.end;
    xd_leaves *leaves = &p->forest_leaves[member];
    p->forests[member] = NULL;
    leaves->first = from;
    leaves->count = to > from ? to - from : 0;
    leaves->total = p->leaves.total;
    if (leaves->count > 0)
        p->forests[member] =
            xd_leaf_stack_forest(b->lanes[member]) + xd_leaves_nodes(row.begin, from - row.begin) * elements;
}

XD_PRIVATE xd_result xdi_lanes_join(xd_parallel *p, const xdi_bucket *b) {
    const int64_t elements = b->buffer.end - b->buffer.begin, end = p->leaves.first + p->leaves.count;
    float *node = b->joined;
    xd_interval of;
    for (of.begin = p->leaves.first; b->lanes && of.begin < end; of.begin = of.end, node += elements) {
        of.end = of.begin + xd_leaves_node_size(of.begin, end);
        for (int i = 0; i < p->members; i++) xdi_lane_find(p, b, i, of);
        XD_TRY(xd_reduce_leaves(p->ctx, node, p->forests, p->forest_leaves, p->members, elements, elements,
                                XD_DTYPE_F32, XD_SUM));
    }
    return XD_OK;
}
