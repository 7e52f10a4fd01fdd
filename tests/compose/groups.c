/* groups.c - who is in which group: data ranks, replicas, ranks that share leaves or experts, stages. */
#include "rank.h"

/* Data ranks are those that have other leaves: where sequences are shared, dp alone; likewise those of experts. */
static xd_result cut_data(rank *r) {
    const compose_layout *l = r->job->layout;
    xd_groups *g = &r->groups;
    const int me = xd_comm_rank(g->dp), each = xd_comm_size(g->dp) / l->groups;
    g->cp = NULL;
    g->dp_cp = g->dp;
    r->cut = true;
    XD_TRY(xd_comm_split(g->dp, me / each, me, &r->data));
    g->intra_dp_cp = r->data;
    if (l->groups > 1) XD_TRY(xd_comm_split(g->dp, me % each, me, &r->replicas));
    g->inter_instances = r->replicas;
    if (!r->job->config->size.experts) return XD_OK;
    r->experts.replicas = r->replicas;
    XD_TRY(xd_comm_split(g->dp, me / l->ep, me, &r->members));
    return xd_comm_split(r->data, me % l->ep, me, &r->experts.data);
}

/* The groups of a pipeline, of ranks that share experts, or of those that share leaves. */
static xd_result make_grid(rank *r, bool several) {
    const compose_layout *l = r->job->layout;
    const bool cut = l->cp > 1;
    const xd_expert_desc d = { .tp = l->tp,
                               .cp = l->cp,
                               .ep = cut ? 1 : l->ep,
                               .pp = l->pp,
                               .optimizer_instances = several && !cut ? l->groups : 0 };
    XD_TRY(xd_grid_create(r->world, &d, &r->grid));
    const xd_groups *g = xd_grid_groups(r->grid);
    r->groups = *g;
    if (l->tp > 1) r->tp = g->tp;
    if (l->cp > 1) r->cp = g->cp;
    r->rows = g->dp_cp;
    if (cut) return cut_data(r);
    r->data = several ? g->intra_dp_cp : g->dp_cp;
    r->replicas = several ? g->inter_instances : NULL;
    if (!r->job->config->size.experts) return XD_OK;
    r->members = g->ep;
    r->experts.data = several ? g->intra_expert_dp : g->expert_dp;
    r->experts.replicas = several ? g->inter_expert_instances : NULL;
    return XD_OK;
}

xd_result groups_make(rank *r) {
    const compose_layout *l = r->job->layout;
    const int groups = l->wrap == WRAP_HSDP || l->wrap == WRAP_SHARDED ? l->groups : 1;
    const int me = xd_comm_rank(r->world), each = xd_comm_size(r->world) / groups;
    r->data = r->rows = r->world;
    if (is_staged(r) || r->job->config->size.experts || l->tp * l->cp > 1) return make_grid(r, groups > 1);
    if (groups == 1) return XD_OK;
    XD_TRY(xd_comm_split(r->world, me / each, me, &r->data));
    return xd_comm_split(r->world, me % each, me, &r->replicas);
}

void groups_close(rank *r) {
    const bool own = !r->grid || r->cut;
    if (r->replicas && own) xd_comm_destroy(r->replicas);
    if (r->data != r->world && own) xd_comm_destroy(r->data);
    if (r->members && r->cut) xd_comm_destroy(r->members);
    if (r->experts.data && r->cut) xd_comm_destroy(r->experts.data);
    xd_grid_destroy(r->grid);
}
