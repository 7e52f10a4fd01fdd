/* Where a wrapper stands among its ranks, which leaves of a step are its, and which weights. */

#include "base/internal.h"
#include "model/internal.h"

#include <string.h>

/* ---- its place ---- */

XD_PRIVATE void xdi_parallel_set_place(xd_parallel *p, int rank, int ranks, int replica, int replica_count) {
    p->ctx = p->model->ctx;
    if (!p->offloaded) p->home = p->ctx;
    p->rank = rank;
    p->ranks = ranks;
    p->replica = replica;
    p->replica_count = replica_count;
    p->members = 1;
    p->alone = p->sharded && ranks == 1 && p->reshard_ranks == 0;
    if (p->reshard_ranks == 0) p->reshard_ranks = ranks;
    p->invariant = xd_ctx_settings(p->ctx)->reduction == XD_REDUCTION_INVARIANT;
}

/* ---- which is whose ---- */

XD_PRIVATE bool xdi_weight_is_expert(const xd_weight *w) {
    return w->owner->desc.traits.expert;
}

XD_PRIVATE const xd_parallel *xdi_parallel_of(const xd_parallel *p, const xd_weight *w) {
    return p->experts && xdi_weight_is_expert(w) ? p->experts : p;
}

XD_PRIVATE xd_parallel *xdi_block_parallel(const xd_block *block) {
    xd_parallel *p = block->model->parallel;
    return p && p->experts && block->expert ? p->experts : p;
}

XD_PRIVATE bool xdi_parallel_has(const xd_parallel *p, const xd_weight *w) {
    return xdi_weight_is_expert(w) == p->of_experts;
}

XD_PRIVATE struct xdi_unit *xdi_block_unit(const xd_block *block) {
    return block->units[block->expert];
}

/* ---- leaves ---- */

XD_PRIVATE xd_interval xdi_parallel_row(const xd_parallel *p, int member) {
    const int64_t ranks = (int64_t)p->ranks * p->members, rank = (int64_t)p->rank * p->members + member;
    xd_interval row;
    row.begin = p->leaves.total * rank / ranks;
    row.end = p->leaves.total * (rank + 1) / ranks;
    return row;
}

XD_PRIVATE int64_t xdi_parallel_passes(const xd_parallel *p) {
    if (p->of_experts) return p->most * p->members;
    return p->sharded ? p->most : p->leaves.count;
}

XD_PRIVATE int64_t xdi_parallel_number(const xd_parallel *p, int64_t leaf) {
    const int64_t round = leaf / p->members, member = leaf % p->members;
    const xd_interval row = xdi_parallel_row(p, (int)member);
    if (leaf < 0 || round >= row.end - row.begin) return -1;
    const int64_t dealt = (round * p->ranks + p->rank) * p->members + member;
    return p->replica * p->leaves.total + (p->dealt ? dealt : row.begin + round);
}

XD_API xd_parallel_leaf_count xd_parallel_expert_leaves(const xd_parallel *parallel) {
    XD_ASSERT(parallel);
    const xd_parallel *p = parallel->experts;
    xd_parallel_leaf_count out;
    memset(&out, 0, sizeof out);
    if (!p) return out;
    out.own = p->leaves.count;
    out.most = (p->leaves.total + p->ranks - 1) / p->ranks;
    out.total = p->total;
    out.opened = xdi_parallel_passes(p);
    return out;
}

XD_API int64_t xd_parallel_expert_leaf(const xd_parallel *parallel, int64_t k) {
    XD_ASSERT(parallel);
    return parallel->experts ? xdi_parallel_number(parallel->experts, k) : -1;
}
