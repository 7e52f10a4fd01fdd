/* Wrappers: DDP and FSDP, what they hand to optimizers and files, and the two ends of a step. */

#include "base/internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "model/internal.h"

#include <string.h>

/* ---- leaves ---- */

static bool xdi_parallel_is_power(int64_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

/* How the leaves of a group fall to its ranks. */
static xd_result xdi_parallel_deal(xd_parallel *p, int64_t leaves, bool in_rows) {
    const int64_t n = p->ranks, all = n * p->members, groups = p->replica_count;
    p->total = leaves ? leaves : n * groups;
    const int64_t group = p->total / groups, first = group * p->rank / n;
    XD_REQUIRE(p->ctx, p->total >= n * groups, XD_ERROR_ARGUMENT, "%lld leaves for %lld data ranks",
               (long long)leaves, (long long)(n * groups));
    XD_REQUIRE(p->ctx, group * groups == p->total, XD_ERROR_ARGUMENT,
               "%lld leaves are not the same number for each of %lld groups", (long long)p->total,
               (long long)groups);
    XD_REQUIRE(p->ctx, !p->invariant || groups == 1 || xdi_parallel_is_power(group), XD_ERROR_UNSUPPORTED,
               "INVARIANT mode with replicas: %lld leaves of a group are no power of two", (long long)group);
    p->dealt = p->sharded && !in_rows && group % all == 0 && (!p->invariant || xdi_parallel_is_power(all));
    p->leaves.first = first;
    p->leaves.count = group * (p->rank + 1) / n - first;
    p->leaves.total = group;
    p->most = (group + all - 1) / all;
    return XD_OK;
}

/* What all ranks know of each other's leaves before any step: those of a sum over the data ranks, where each dealt leaf has a sum
 * of its own, and those over the groups. */
static xd_result xdi_parallel_list_leaves(xd_parallel *p) {
    const int n = p->ranks, groups = p->replica_count;
    p->known = (xd_leaves *)xd_allocate(p->ctx, ((size_t)n + (size_t)groups) * sizeof *p->known);
    XD_REQUIRE(p->ctx, p->known, XD_ERROR_MEMORY, "no room for the leaves of %d data ranks and %d groups", n,
               groups);
    for (int r = 0; r < n + groups; r++) {
        const bool in_rows = r < n && !p->dealt;
        xd_leaves *known = &p->known[r];
        known->first = in_rows ? p->leaves.total * r / n : r < n ? r : r - n;
        known->count = in_rows ? p->leaves.total * (r + 1) / n - known->first : 1;
        known->total = in_rows ? p->leaves.total : r < n ? n : groups;
    }
    return XD_OK;
}

XD_API xd_parallel_leaf_count xd_parallel_leaves(const xd_parallel *p) {
    XD_ASSERT(p);
    xd_parallel_leaf_count out;
    out.own = p->leaves.count;
    out.most = p->most;
    out.total = p->total;
    out.opened = xdi_parallel_passes(p);
    return out;
}

XD_API int64_t xd_parallel_leaf(const xd_parallel *p, int64_t k) {
    XD_ASSERT(p);
    return xdi_parallel_number(p, k);
}

/* ---- life ---- */

/* Whether a rank before this one in the layout of the caller's cut holds the same part of a weight. */
XD_PRIVATE bool xdi_weight_is_copy(const xd_weight *w) {
    const xd_layout *layout = w->desc.layout;
    xd_region region;
    if (!layout) return false;
    for (int r = 0; r < w->model->desc.rank; r++)
        if (xd_layout_region(layout, r, &region) && xd_region_equal(&region, &w->region)) return true;
    return false;
}

static void xdi_parallel_list_settings(const xd_parallel *p, xdi_facts *f) {
    xdi_fact_integer(f, "leaves", p->total);
    xdi_fact_integer(f, "FSDP", p->sharded);
    xdi_fact_integer(f, "accumulate_whole", !p->dealt);
    xdi_fact_integer(f, "sharded_optimizer", p->split_optimizer);
    xdi_fact_integer(f, "reserve_frozen", p->reserve_frozen);
    xdi_fact_integer(f, "compare_steps", p->compare_steps);
    xdi_fact_integer(f, "replicas", p->replica_count);
    xdi_fact_dtype(f, "sent_dtype", p->sent_dtype);
    xdi_fact_dtype(f, "view_dtype", p->view_dtype);
    xdi_fact_integer(f, "reshard_ranks", p->reshard_ranks);
    xdi_fact_integer(f, "gathers", p->gathers != NULL);
    xdi_fact_integer(f, "reductions", p->reductions != NULL);
    xdi_fact_integer(f, "prefetch", p->prefetch);
    xdi_fact_integer(f, "host", p->offloaded);
    xdi_fact_integer(f, "experts", p->experts ? p->experts->members : 0);
    xdi_fact_integer(f, "members of a group of experts", p->members);
    xdi_fact_integer(f, "stage", p->stage);
    xdi_fact_integer(f, "chunk", p->chunk);
    xdi_fact_integer(f, "gathers_in_step", p->gathers_in_step);
    xdi_fact_integer(f, "wide_padding", p->wide_padding);
    xdi_fact_integer(f, "groups", p->has_groups);
    f->part = "groups";
    xdi_fact_integer(f, "tp", xdi_group_size(p->groups.tp));
    xdi_fact_integer(f, "pp", xdi_group_size(p->groups.pp));
    xdi_fact_integer(f, "embedding", xdi_group_size(p->groups.embedding));
    f->part = "divide";
    xdi_fact_number(f, "before (its inverse)", (double)p->before);
    xdi_fact_number(f, "after (its inverse, with average)", (double)p->after);
    f->part = NULL;
    xdi_fact_integer(f, "number of units", p->unit_count);
    xdi_fact_bytes(f, "ranges of leaves", p->known,
                   ((size_t)p->ranks + (size_t)p->replica_count) * sizeof *p->known);
}

/* What all ranks must have said alike: settings and where everything lies. */
static xd_result xdi_parallel_agree_settings(const xd_parallel *p, xd_comm *comm, const char *what) {
    uint64_t places = 0;
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_parallel_list_settings(p, &facts);
    for (int64_t i = 0; i < p->flat_count; i++) {
        const uint64_t flat = xd_bucket_plan_hash(p->flats[i].plan);
        places = xd_hash(places, &flat, sizeof flat);
    }
    xdi_fact_bytes(&facts, "order of weights in buckets (unit_types, bucket_size, bucket_count)", &places,
                   sizeof places);
    return xdi_agree_facts(comm, &facts, what);
}

/* A layout that spans data ranks makes all but one of them copies, which nobody would count: copies must be the same everywhere. */
static xd_result xdi_parallel_agree_copies(const xd_parallel *p, xd_comm *comm) {
    uint64_t hash = 0;
    int64_t copies = 0;
    for (int64_t i = 0; i < p->model->weight_count; i++) {
        if (!xdi_parallel_has(p, p->model->weights[i])) continue;
        const int64_t copy = xdi_weight_is_copy(p->model->weights[i]);
        hash = xd_hash(hash, &copy, sizeof copy);
        copies += copy;
    }
    return xdi_agree_list(comm, copies, hash,
                          "what layouts of weights count as copies (they are not over data ranks)");
}

static xd_result xdi_parallel_check_dtypes(const xd_parallel *p) {
    const xd_dtype dtypes[] = { p->sent_dtype, p->view_dtype };
    for (int i = 0; i < 2; i++)
        XD_REQUIRE(p->ctx,
                   dtypes[i] == XD_DTYPE_NONE || dtypes[i] == XD_DTYPE_F32 || dtypes[i] == XD_DTYPE_BF16 ||
                       dtypes[i] == XD_DTYPE_F16,
                   XD_ERROR_DTYPE, "values are %s as %s: F32, BF16 and F16 are possible",
                   i ? "shown" : "sent", xd_dtype_name(dtypes[i]));
    return XD_OK;
}

static xd_result xdi_parallel_check_buckets(const xd_parallel *p) {
    XD_REQUIRE(p->ctx, p->bucket_size >= 0 && p->bucket_parts >= 0, XD_ERROR_ARGUMENT,
               "buckets of %lld elements, and %lld of them", (long long)p->bucket_size,
               (long long)p->bucket_parts);
    XD_REQUIRE(p->ctx, !p->bucket_size || !p->bucket_parts, XD_ERROR_ARGUMENT,
               "bucket_size %lld and bucket_count %lld: one of them says where a bucket ends",
               (long long)p->bucket_size, (long long)p->bucket_parts);
    XD_REQUIRE(p->ctx, p->stage >= 0 && p->chunk >= 0, XD_ERROR_ARGUMENT, "stage %d, chunk %d", p->stage,
               p->chunk);
    XD_REQUIRE(
        p->ctx, !p->gathers_in_step || p->gathers, XD_ERROR_ARGUMENT,
        "gathers_in_step without a queue of gathers on %d data ranks: a gather beside the step needs one",
        p->ranks);
    XD_REQUIRE(
        p->ctx, !p->gathers_in_step || p->split_optimizer, XD_ERROR_ARGUMENT,
        "gathers_in_step without sharded_optimizer: each of %d data ranks steps all values, so there is "
        "nothing to gather",
        p->ranks);
    XD_REQUIRE(p->ctx, !p->wide_padding || p->sharded || p->split_optimizer, XD_ERROR_ARGUMENT,
               "wide_padding without sharded_optimizer: each of %d data ranks has the whole of a bucket",
               p->ranks);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_lay(xd_parallel *p, const xd_fsdp_desc *d) {
    XD_REQUIRE(p->ctx, d->leaves >= 0 && d->unit_type_count >= 0, XD_ERROR_ARGUMENT,
               "%lld leaves and %d types of units", (long long)d->leaves, d->unit_type_count);
    XD_REQUIRE(p->ctx, d->unit_types || d->unit_type_count == 0, XD_ERROR_ARGUMENT,
               "%d types of units, unit_types is NULL", d->unit_type_count);
    XD_REQUIRE(p->ctx, !d->unit_types || d->unit_type_count > 0, XD_ERROR_ARGUMENT,
               "a list of unit_types, and unit_type_count %d", d->unit_type_count);
    XD_REQUIRE(p->ctx, p->prefetch >= 0 && (p->prefetch == 0 || p->gathers), XD_ERROR_ARGUMENT,
               "%d units gathered ahead, and %s queue of gathers", p->prefetch, p->gathers ? "a" : "no");
    XD_TRY(xdi_parallel_check_buckets(p));
    XD_TRY(xdi_parallel_check_dtypes(p));
    XD_TRY(xdi_parallel_check_home(p));
    XD_REQUIRE(p->ctx, p->reshard_ranks > 0 && p->ranks % p->reshard_ranks == 0, XD_ERROR_ARGUMENT,
               "%d ranks that keep a unit do not divide %d data ranks", p->reshard_ranks, p->ranks);
    XD_TRY(xdi_parallel_deal(p, d->leaves, d->accumulate_whole));
    XD_TRY(xdi_parallel_list_leaves(p));
    XD_TRY(xdi_gradient_set_factors(p, &d->divide));
    XD_TRY(xdi_spectral_retype(p));
    XD_TRY(xdi_parallel_divide(p, d));
    return xdi_parallel_plan(p);
}

XD_PRIVATE xd_result xdi_experts_lay(xd_parallel *p, const xd_fsdp_desc *d) {
    xd_fsdp_desc settings = *d;
    settings.leaves = p->total;
    if (!p->experts) return XD_OK;
    XD_TRY(xdi_parallel_lay(p->experts, &settings));
    xdi_gradient_align(&p, 1);
    return XD_OK;
}

static xd_result xdi_parallel_prepare(xd_parallel *p, const xd_fsdp_desc *d) {
    XD_TRY(xdi_parallel_lay(p, d));
    XD_TRY(xdi_experts_lay(p, d));
    XD_TRY(xdi_parallel_check_queues(p));
    if (p->experts) XD_TRY(xdi_parallel_check_queues(p->experts));
    XD_TRY(xdi_parallel_take_memory(p));
    return p->experts ? xdi_parallel_take_memory(p->experts) : XD_OK;
}

/* The same of experts, which other data ranks have otherwise. */
static xd_result xdi_parallel_agree_experts(const xd_parallel *q) {
    XD_TRY(xd_model_agree(q->model, q->data));
    XD_TRY(xdi_parallel_agree_settings(q, q->data, "settings of a wrapper for experts"));
    XD_TRY(xdi_parallel_agree_copies(q, q->data));
    return q->replicas ? xdi_parallel_agree_settings(q, q->replicas, "settings of a wrapper for experts")
                       : XD_OK;
}

static xd_result xdi_parallel_take_all_values(xd_parallel *p) {
    if (p->experts) XD_TRY(xdi_parallel_take_values(p->experts));
    return xdi_parallel_take_values(p);
}

/* The ranks fail alike, before and after any of them takes the model's values. */
static xd_result xdi_parallel_build(xd_parallel *p, const xd_fsdp_desc *d) {
    XD_TRY(xdi_model_agree_shared(p->model, p->data));
    XD_TRY(xd_agree(p->data, xdi_parallel_prepare(p, d)));
    XD_TRY(xdi_parallel_agree_settings(p, p->data, "settings of a wrapper"));
    XD_TRY(xdi_parallel_agree_copies(p, p->data));
    if (p->experts) XD_TRY(xd_agree(p->data, xdi_parallel_agree_experts(p->experts)));
    if (xdi_parallel_has_near(p))
        XD_TRY(xd_comm_split(p->data, p->rank / p->reshard_ranks, p->rank, &p->near));
    if (p->replicas) XD_TRY(xd_model_agree(p->model, p->replicas));
    if (p->replicas) XD_TRY(xdi_parallel_agree_settings(p, p->replicas, "settings of a wrapper"));
    if (p->replicas) XD_TRY(xdi_parallel_agree_copies(p, p->replicas));
    XD_TRY(xd_agree(p->data, xdi_parallel_take_all_values(p)));
    xdi_parallel_leave_storage(p);
    p->model->parallel = p;
    return XD_OK;
}

XD_PRIVATE void xdi_parallel_set_kind(xd_parallel *p, xd_fsdp_desc *settings, const xd_ddp_desc *ddp,
                                      const xd_fsdp_desc *fsdp) {
    memset(p, 0, sizeof *p);
    memset(settings, 0, sizeof *settings);
    if (fsdp) *settings = *fsdp;
    if (ddp) {
        settings->leaves = ddp->leaves;
        settings->view_dtype = ddp->view_dtype;
        settings->gathers = ddp->gathers;
        settings->reductions = ddp->reductions;
        settings->divide = ddp->divide;
        settings->reserve_frozen = ddp->reserve_frozen;
        settings->compare_steps = ddp->compare_steps;
        settings->replicas = ddp->replicas;
        settings->experts = ddp->experts;
        settings->groups = ddp->groups;
        settings->wide_padding = ddp->wide_padding;
        p->bucket_size = ddp->bucket_size;
        p->bucket_parts = ddp->bucket_count;
        p->stage = ddp->stage;
        p->chunk = ddp->chunk;
        p->gathers_in_step = ddp->gathers_in_step;
        p->split_optimizer = ddp->sharded_optimizer;
    }
    p->sharded = fsdp != NULL;
    p->sent_dtype = settings->sent_dtype;
    p->view_dtype = settings->view_dtype;
    p->reshard_ranks = settings->reshard_ranks;
    p->gathers = settings->gathers;
    p->reductions = settings->reductions;
    p->prefetch = settings->prefetch;
    p->reserve_frozen = settings->reserve_frozen;
    p->compare_steps = settings->compare_steps;
    p->wide_padding = settings->wide_padding;
    p->home = settings->host;
    p->offloaded = settings->host != NULL;
    p->has_groups = settings->groups != NULL;
    if (settings->groups) p->groups = *settings->groups;
}

/* An empty wrapper on every rank, or none on any. */
static xd_result xdi_parallel_open(const xd_parallel *kind, const xd_fsdp_desc *d, xd_parallel **out) {
    xd_ctx *ctx = xd_comm_ctx(kind->data);
    xd_parallel *p = NULL;
    xd_result result = XD_OK;
    if (kind->model->parallel)
        result = XD_FAIL(ctx, XD_ERROR_STATE, "the model of %lld weights is wrapped already",
                         (long long)kind->model->weight_count);
    else if ((p = (xd_parallel *)xd_allocate(ctx, sizeof *p)) == NULL)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a wrapper");
    if (result == XD_OK) {
        *p = *kind;
        xdi_parallel_set_place(p, xd_comm_rank(p->data), xd_comm_size(p->data),
                               p->replicas ? xd_comm_rank(p->replicas) : 0,
                               p->replicas ? xd_comm_size(p->replicas) : 1);
        result = xdi_experts_open(p, d);
    }
    result = xd_agree(kind->data, result);
    if (result == XD_OK)
        *out = p;
    else
        xd_parallel_destroy(p);
    return result;
}

/* A type that no block has is legal, on some stages of a pipeline it is so; a name that is misspelt gathers the whole model at once. */
static void xdi_parallel_tell_types(const xd_parallel *p, const xd_fsdp_desc *d) {
    if (p->sharded && p->unit_count == 1 && d->unit_type_count > 0 && xdi_block_after(&p->model->root))
        xd_log(p->ctx, XD_LOG_WARN,
               "no block is of the %d types of units, of which \"%.80s\" is the first: the whole model is "
               "one unit",
               d->unit_type_count, d->unit_types[0]);
}

static xd_result xdi_parallel_create(const xd_parallel *kind, const xd_fsdp_desc *d, xd_parallel **out) {
    xd_parallel *p = NULL;
    XD_TRY(xdi_parallel_open(kind, d, &p));
    const xd_result result = xdi_parallel_build(p, d);
    if (result == XD_OK) xdi_parallel_tell_types(p, d);
    if (result == XD_OK)
        *out = p;
    else
        xd_parallel_destroy(p);
    return result;
}

XD_API xd_result xd_ddp_create(xd_model *model, xd_comm *data, const xd_ddp_desc *desc, xd_parallel **out) {
    XDI_GIVEN_TO_ALL(model ? model->ctx : NULL, data, model, data, out);
    xd_parallel kind;
    xd_fsdp_desc d;
    xdi_parallel_set_kind(&kind, &d, desc, NULL);
    kind.model = model;
    kind.data = data;
    if (d.replicas && xd_comm_size(d.replicas) > 1) kind.replicas = d.replicas;
    return xdi_parallel_create(&kind, &d, out);
}

XD_API xd_result xd_fsdp_create(xd_model *model, xd_comm *data, const xd_fsdp_desc *desc, xd_parallel **out) {
    XDI_GIVEN_TO_ALL(model ? model->ctx : NULL, data, model, data, out);
    xd_fsdp_desc defaults, d;
    xd_parallel kind;
    memset(&defaults, 0, sizeof defaults);
    xdi_parallel_set_kind(&kind, &d, NULL, desc ? desc : &defaults);
    kind.model = model;
    kind.data = data;
    if (d.replicas && xd_comm_size(d.replicas) > 1) kind.replicas = d.replicas;
    return xdi_parallel_create(&kind, &d, out);
}

/* The model shows nothing of the wrapper any more. */
static void xdi_parallel_detach(const xd_parallel *p) {
    for (xd_block *b = &p->model->root; b; b = xdi_block_after(b)) {
        b->units[0] = b->units[1] = NULL;
        b->open = 0;
        b->leaf = 0;
    }
    for (int64_t i = 0; i < xd_model_weight_count(p->model); i++) {
        xd_weight *w = p->model->weights[i];
        const unsigned char *value = (const unsigned char *)w->value;
        const unsigned char *kept = w->flat && w->flat->whole ? (const unsigned char *)w->flat->values : NULL;
        if (kept && value >= kept && value < kept + w->flat->kept_bytes) w->value = NULL;
        xdi_spectral_give_back(p, w, w->own && p->model->parallel == p ? xdi_flat_place(w) : NULL);
        w->ready = w->ready && w->value;
        w->state = XD_GRADIENT_READY;
        w->flat = NULL;
    }
    if (p->model->parallel == p) p->model->parallel = NULL;
}

static void xdi_parallel_free(xd_parallel *p) {
    for (int64_t i = 0; i < p->bucket_count && p->buckets; i++) xd_leaf_stack_destroy(p->buckets[i].stack);
    for (int64_t i = 0; i < p->bucket_count * p->members && p->lanes; i++) xd_leaf_stack_destroy(p->lanes[i]);
    for (int64_t i = 0; i < p->flat_count; i++) xd_bucket_plan_destroy(p->flats[i].plan);
    if (p->memory) xd_ctx_kernels(p->ctx)->memory.release(p->ctx, p->memory);
    xdi_locked_give(p->ctx, p->locked);
    if (p->home_memory && !p->locked) xd_ctx_kernels(p->home)->memory.release(p->home, p->home_memory);
    xd_comm_destroy(p->near);
    void *const tables[] = {
        p->units,         p->flats,  p->buckets,       (void *)p->weights, p->slots,
        p->sums,          p->counts, (void *)p->lanes, (void *)p->places,  (void *)p->forests,
        p->forest_leaves, p->known,  p->used
    };
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) xd_release(p->ctx, tables[i]);
    xd_release(p->ctx, p);
}

XD_API void xd_parallel_destroy(xd_parallel *p) {
    if (!p) return;
    xdi_parallel_land(p);
    if (p->experts) xdi_parallel_land(p->experts);
    xdi_parallel_detach(p);
    if (p->experts) xdi_parallel_free(p->experts);
    xdi_parallel_free(p);
}

XD_API xd_wrap_kind xd_model_wrapped(const xd_model *model) {
    if (!model->parallel) return XD_WRAP_NONE;
    return model->parallel->sharded ? XD_WRAP_FSDP : XD_WRAP_DDP;
}

XD_API xd_parallel_bytes xd_parallel_memory(const xd_parallel *parallel) {
    xd_parallel_bytes out = parallel->bytes;
    if (!parallel->experts) return out;
    const xd_parallel_bytes *experts = &parallel->experts->bytes;
    out.values += experts->values;
    out.gradients += experts->gradients;
    out.gathered += experts->gathered;
    out.whole_gradients += experts->whole_gradients;
    out.host += experts->host;
    return out;
}

/* ---- lists ---- */

XD_PRIVATE bool xdi_parallel_lists(const xd_weight *w) {
    return w->owner == w && !(w->desc.buffer && w->desc.transient);
}

static xd_result xdi_parallel_room(const xd_parallel *p, const void *list, int64_t capacity, int64_t *count) {
    int64_t n = 0;
    XD_REQUIRE(p->ctx, list || capacity == 0, XD_ERROR_ARGUMENT, "a list of %lld at NULL: capacity 0 counts",
               (long long)capacity);
    for (int64_t i = 0; i < p->model->weight_count; i++) n += xdi_parallel_lists(p->model->weights[i]);
    XD_REQUIRE(p->ctx, capacity == 0 || capacity >= n, XD_ERROR_ARGUMENT, "%lld parameters, capacity is %lld",
               (long long)n, (long long)capacity);
    *count = n;
    return XD_OK;
}

XD_PRIVATE bool xdi_parallel_is_elsewhere(const xd_parallel *of, const xd_weight *w) {
    const xd_parallel *p = xdi_parallel_of(of, w);
    const bool everywhere = xd_bucket_plan_settings(w->flat->plan)->ranks == 1;
    return p->replica > 0 || (everywhere && p->rank > 0) || xdi_weight_is_copy(w);
}

/* Whether another data rank, or one of the caller's cut, counts what is here. */
static bool xdi_parallel_is_replica(const xd_parallel *p, const xd_weight *w) {
    return w->desc.traits.shared || xdi_parallel_is_elsewhere(p, w);
}

XD_PRIVATE xd_param xdi_parallel_describe(const xd_parallel *of, const xd_weight *w, xd_bucket_piece *piece) {
    const xd_parallel *p = xdi_parallel_of(of, w);
    xd_param out = xdi_weight_param(w);
    memset(piece, 0, sizeof *piece);
    (void)xdi_flat_piece(p, w, piece);
    out.value = out.gradient = NULL;
    out.count = piece->param.end - piece->param.begin;
    out.first += piece->param.begin;
    out.replica = xdi_parallel_is_replica(p, w);
    if (out.count != w->count) {
        out.shape = NULL;
        out.dims = 0;
    }
    return out;
}

XD_PRIVATE xd_param xdi_parallel_param(const xd_parallel *p, const xd_weight *w) {
    xd_bucket_piece piece;
    const xdi_bucket *b = xdi_flat_bucket(w);
    xd_param out = xdi_parallel_describe(p, w, &piece);
    if (out.count > 0) out.value = xdi_flat_value(w, &piece);
    out.state = &w->state;
    if (b) out.gradient = b->sum + piece.shard.begin; /* not NULL where nothing is: steps count alike */
    return out;
}

static int64_t xdi_at_most(int64_t value, int64_t bound) {
    return value < bound ? value : bound;
}

XD_PRIVATE xd_tensor_part xdi_parallel_part(const xd_parallel *of, const xd_weight *w) {
    const xd_parallel *p = xdi_parallel_of(of, w);
    xd_tensor_part out;
    xd_bucket_piece piece;
    const int64_t most = xdi_weight_true_count(w);
    memset(&out, 0, sizeof out);
    memset(&piece, 0, sizeof piece);
    out.name = w->name;
    out.dtype = w->desc.dtype;
    out.ndim = w->desc.ndim;
    memcpy(out.shape, w->desc.shape, sizeof out.shape);
    out.region = w->saved ? w->saved : &w->region;
    if (xdi_flat_piece(p, w, &piece)) out.data = xdi_flat_value(w, &piece);
    out.range.begin = xdi_at_most(piece.param.begin, most);
    out.range.end = xdi_at_most(piece.param.end, most);
    out.replica = xdi_parallel_is_replica(p, w);
    return out;
}

XD_API xd_result xd_parallel_params(const xd_parallel *p, int64_t capacity, xd_param *params,
                                    int64_t *count) {
    XDI_GIVEN_IN_PLAN(p ? p->model->ctx : NULL, p, count);
    int64_t at = 0;
    XD_TRY(xdi_parallel_room(p, params, capacity, count));
    for (int64_t i = 0; i < p->model->weight_count && capacity > 0; i++)
        if (xdi_parallel_lists(p->model->weights[i]))
            params[at++] = xdi_parallel_param(p, p->model->weights[i]);
    return XD_OK;
}

XD_API xd_result xd_parallel_parts(const xd_parallel *p, int64_t capacity, xd_tensor_part *parts,
                                   int64_t *count) {
    XDI_GIVEN_IN_PLAN(p ? p->model->ctx : NULL, p, count);
    int64_t at = 0;
    XD_TRY(xdi_parallel_room(p, parts, capacity, count));
    for (int64_t i = 0; i < p->model->weight_count && capacity > 0; i++)
        if (xdi_parallel_lists(p->model->weights[i]))
            parts[at++] = xdi_parallel_part(p, p->model->weights[i]);
    return XD_OK;
}

/* ---- the ends of a step ---- */

static bool xdi_parallel_has_open(const xd_parallel *p) {
    return p->open > 0 || (p->experts && p->experts->open > 0);
}

static xd_result xdi_parallel_check_closed(const xd_parallel *p, const char *call) {
    for (const xd_block *b = &p->model->root; b && xdi_parallel_has_open(p); b = xdi_block_after(b))
        if (b->open > 0)
            return XD_FAIL(p->ctx, XD_ERROR_STATE, "%s while block \"%.80s\" is open", call, b->name);
    return XD_OK;
}

static xd_result xdi_parallel_check_step(const xd_parallel *p) {
    const int64_t leaves = xdi_parallel_passes(p);
    XD_REQUIRE(p->ctx, !p->reduced, XD_ERROR_STATE,
               "a step of %lld leaves was reduced already: xd_parallel_publish ends it", (long long)p->total);
    XD_TRY(xdi_parallel_check_closed(p, "xd_parallel_reduce"));
    for (const xd_block *b = &p->model->root; b; b = xdi_block_after(b))
        XD_REQUIRE(p->ctx, b->leaf == leaves || !xdi_block_trains(b) || b->expert != p->of_experts,
                   XD_ERROR_STATE, "block \"%.80s\"%s has had backward passes of %lld leaves, not of %lld%s",
                   b->name, *b->name ? "" : " (the root)", (long long)b->leaf, (long long)leaves,
                   leaves > p->leaves.count
                       ? ": this rank opens blocks for xd_parallel_leaves().opened, also beyond its own"
                       : "");
    return XD_OK;
}

/* What ranks agree on in one exchange: that none has failed, and that all say the same. */
typedef struct xdi_agreement {
    xd_result mine;
    uint64_t hash;
    const char *what;         /* the hash is of; NULL: the order of brackets */
    const xd_parallel *order; /* whose */
    bool elsewhere;           /* out: some rank was in another call, so that nothing was agreed */
    bool skips; /* a rank of those so far has a weight whose blocks were skipped in all of its leaves */
} xdi_agreement;

/* A rank that is elsewhere meets this one in another collective, whose name says nothing to the caller. */
static xd_result xdi_agreement_explain(xd_comm *comm, xd_result result) {
    const xd_error told = *xd_last_error(xd_comm_ctx(comm));
    if (result != XD_ERROR_MISMATCH) return result;
    return XD_FAIL_CULPRIT(
        xd_comm_ctx(comm), result, told.culprit,
        "%.300s; here is xd_parallel_reduce: a rank is in another call, and has not called it "
        "after its backward passes",
        told.message);
}

static xd_result xdi_agreement_reach(xdi_agreement *a, xd_comm *comm) {
    const int64_t hash = (int64_t)a->hash;
    const xd_error own = *xd_last_error(xd_comm_ctx(comm));
    int64_t facts[] = { a->mine != XD_OK, hash, ~hash, a->skips }; /* the third is the least, upside down */
    const xd_result told = xd_all_reduce(comm, facts, facts, 4, XD_DTYPE_I64, XD_MAX);
    const bool knows = told == XD_ERROR_MISMATCH && a->mine != XD_OK && own.result == a->mine;
    a->elsewhere = !knows && (told == XD_ERROR_MISMATCH || told == XD_ERROR_PEER);
    /* The others are still in the blocks that this rank has left out: its own error says so, theirs that it came here. */
    if (knows) return xdi_ctx_adopt(xd_comm_ctx(comm), &own);
    if (told != XD_OK) return a->what ? told : xdi_agreement_explain(comm, told);
    a->skips = facts[3] > 0;
    if (facts[0] > 0) return xd_agree(comm, a->mine);
    if (facts[1] == ~facts[2]) return XD_OK;
    return a->what ? xd_agree_same(comm, a->hash, a->what) : xdi_order_explain(a->order, comm);
}

/* Groups of replicas wait for each other later, so they fail together too. */
static xd_result xdi_parallel_agree(const xd_parallel *p, xdi_agreement *agreement) {
    agreement->mine = xdi_agreement_reach(agreement, p->data);
    return p->replicas ? xdi_agreement_reach(agreement, p->replicas) : agreement->mine;
}

/* Under DDP each rank opens blocks in an order of its own. What the ranks of some experts have found is told to all. */
static xd_result xdi_parallel_agree_step(xd_parallel *p) {
    xdi_agreement step;
    step.mine = p->experts ? xdi_parallel_agree_step(p->experts) : XD_OK;
    if (step.mine == XD_OK) step.mine = xdi_parallel_check_step(p);
    step.skips = xdi_state_skips(p);
    step.hash = p->sharded ? p->signature : 0;
    step.what = NULL;
    step.order = p;
    const xd_result result = xdi_parallel_agree(p, &step);
    p->elsewhere = step.elsewhere;
    return result == XD_OK ? xdi_state_sum(p, step.skips) : result;
}

static xd_result xdi_parallel_reduce_own(xd_parallel *p) {
    xdi_parallel_drop_ahead(p);
    XD_TRY(xdi_parallel_land_values(p));
    return xdi_gradient_reduce(p);
}

XD_PRIVATE xd_result xdi_parallel_reduce_data(xd_parallel *p) {
    XD_TRY(xdi_parallel_agree_step(p));
    if (p->experts) XD_TRY(xdi_parallel_reduce_own(p->experts));
    return xdi_parallel_reduce_own(p);
}

static void xdi_parallel_reset(xd_parallel *p) {
    if (p->experts) xdi_gradient_reset(p->experts);
    xdi_gradient_reset(p);
    xdi_state_reset(p);
}

XD_PRIVATE xd_result xdi_parallel_end_reduce(xd_parallel *p, xd_result result) {
    if (result != XD_OK && !p->reduced && !p->elsewhere) xdi_parallel_reset(p);
    p->reduced = p->reduced || result == XD_OK;
    p->waits = p->waits && result != XD_OK;
    if (p->experts) p->experts->reduced = p->reduced;
    return result;
}

/* Whether a queue has a sum of this step, which other ranks may not have begun: dropped here it would stay there. */
static bool xdi_parallel_has_sent(const xd_parallel *p) {
    bool sent = p->launched > 0;
    for (int64_t i = 0; i < p->bucket_count; i++) sent = sent || p->buckets[i].sending.open;
    return (sent && p->reductions) || (p->experts && xdi_parallel_has_sent(p->experts));
}

XD_PRIVATE void xdi_parallel_drop_leaves(xd_parallel *p) {
    if (!xdi_parallel_has_open(p) && !xdi_parallel_has_sent(p)) xdi_parallel_reset(p);
}

/* Whether all leaves of a step are there and only their sum is missing: a step that is given up ends earlier, or by that call. */
static bool xdi_parallel_is_complete(const xd_parallel *p) {
    bool complete = p->waits;
    for (const xd_block *b = &p->model->root; b && complete; b = xdi_block_after(b)) {
        const xd_parallel *of = b->expert ? p->experts : p;
        complete = !xdi_block_trains(b) || b->leaf == xdi_parallel_passes(of);
    }
    return complete;
}

static xd_result xdi_parallel_check_publish(const xd_parallel *p) {
    XD_TRY(xdi_parallel_check_closed(p, "xd_parallel_publish"));
    XD_REQUIRE(
        p->ctx, !xdi_parallel_is_complete(p), XD_ERROR_STATE,
        "xd_parallel_publish before xd_parallel_reduce: the backward passes of all %lld leaves of this "
        "rank have ended and are not summed; sum them also for a step that you give up",
        (long long)xdi_parallel_passes(p));
    return XD_OK;
}

/* The other ranks may be in xd_parallel_reduce, which this one has left out: its own error names the call. */
static xd_result xdi_parallel_agree_publish(const xd_parallel *p) {
    const xd_result mine = xdi_parallel_check_publish(p);
    const xd_error own = *xd_last_error(p->ctx);
    const xd_result told = xd_agree(p->data, mine);
    return told == XD_ERROR_MISMATCH && mine != XD_OK ? xdi_ctx_adopt(p->ctx, &own) : told;
}

/* A step that was given up between two leaves has some that nobody needs. */
static void xdi_parallel_tell_dropped(const xd_parallel *p) {
    int64_t leaves = 0;
    if (p->reduced) return;
    for (const xd_block *b = &p->model->root; b; b = xdi_block_after(b))
        leaves = b->leaf > leaves ? b->leaf : leaves;
    if (leaves > 0)
        xd_log(p->ctx, XD_LOG_WARN,
               "xd_parallel_publish drops %lld leaves: xd_parallel_reduce was not called after their "
               "backward passes",
               (long long)leaves);
}

XD_API xd_result xd_parallel_publish(xd_parallel *p) {
    XDI_GIVEN(p ? p->ctx : NULL, p);
    XD_TRY(xdi_parallel_agree_publish(p));
    XD_TRY(xdi_replicas_check(p));
    xdi_parallel_tell_dropped(p);
    if (p->experts) XD_TRY(xdi_parallel_renew_values(p->experts));
    XD_TRY(xdi_parallel_renew_values(p));
    xdi_parallel_reset(p);
    return XD_OK;
}

XD_PRIVATE void xdi_parallel_drop_step(xd_parallel *p) {
    if (p->experts) xdi_parallel_drop_step(p->experts);
    for (xd_block *b = &p->model->root; b; b = xdi_block_after(b)) b->open = 0;
    for (int64_t i = 0; i < p->unit_count; i++) p->units[i].open = 0;
    p->open = 0;
    xdi_parallel_forget_values(p);
    xdi_gradient_reset(p);
    xdi_state_reset(p);
}

/* ---- weights that are thawed ---- */

/* Whether some block has had a backward pass, and the step has not ended. */
static bool xdi_parallel_is_within(const xd_parallel *p) {
    bool within = p->reduced;
    for (const xd_block *b = &p->model->root; b; b = xdi_block_after(b)) within = within || b->leaf > 0;
    for (int64_t i = 0; i < p->bucket_count; i++) within = within || xdi_bucket_is_forming(p, &p->buckets[i]);
    return within;
}

static xd_result xdi_parallel_may_thaw(const xd_parallel *p, const xd_weight *w) {
    XD_REQUIRE(p->ctx, w, XD_ERROR_ARGUMENT,
               "no weight to thaw: none of the model's %lld has the name it was found by",
               (long long)p->model->weight_count);
    XD_REQUIRE(p->ctx, w->model == p->model, XD_ERROR_ARGUMENT, "weight \"%.80s\" is one of another model",
               w->name);
    const xd_weight *owner = w->owner;
    XD_REQUIRE(p->ctx, p->reserve_frozen, XD_ERROR_STATE,
               "weight \"%.80s\" cannot be thawed: the model was wrapped without reserve_frozen",
               owner->name);
    XD_REQUIRE(p->ctx, !owner->desc.buffer, XD_ERROR_STATE, "buffer \"%.80s\" cannot be thawed", owner->name);
    XD_REQUIRE(p->ctx, owner->desc.traits.frozen, XD_ERROR_STATE, "weight \"%.80s\" is trained already",
               owner->name);
    XD_REQUIRE(p->ctx, owner->flat->trained, XD_ERROR_DTYPE,
               "weight \"%.80s\" is %s with gradients of %s: F32, BF16 and F16 train, with F32", owner->name,
               xd_dtype_name(owner->desc.dtype), xd_dtype_name(owner->desc.gradient_dtype));
    XD_REQUIRE(p->ctx, !xdi_parallel_is_within(p), XD_ERROR_STATE,
               "weight \"%.80s\" is thawed within a step of %lld leaves", owner->name, (long long)p->total);
    return xdi_parallel_check_closed(p, "xd_parallel_thaw");
}

XD_API xd_result xd_parallel_thaw(xd_parallel *parallel, xd_weight *weight) {
    XDI_GIVEN(parallel ? parallel->ctx : NULL, parallel);
    xd_parallel *p = parallel->experts && weight && xdi_parallel_of(parallel, weight)->of_experts
                         ? parallel->experts
                         : parallel;
    xdi_agreement thaw;
    thaw.mine = xdi_parallel_may_thaw(p, weight);
    thaw.hash = weight ? xd_hash(0, weight->owner->name, strlen(weight->owner->name)) : 0;
    thaw.what = "the weight that is thawed";
    thaw.order = NULL;
    thaw.skips = false;
    XD_TRY(xdi_parallel_agree(p, &thaw));
    weight->owner->desc.traits.frozen = false;
    xdi_parallel_count_blocks(p);
    return XD_OK;
}

/* ---- the caller's own gradients ---- */

static xd_result xdi_parallel_check_push(const xd_parallel *p) {
    XD_REQUIRE(p->ctx, !p->sharded, XD_ERROR_UNSUPPORTED,
               "under FSDP the leaves of %lld units come from brackets", (long long)p->unit_count);
    XD_REQUIRE(p->ctx, !p->experts, XD_ERROR_UNSUPPORTED,
               "leaves of experts, %lld in a step on this rank, come from brackets",
               (long long)xd_parallel_expert_leaves(p).own);
    for (int64_t i = 0; i < p->model->weight_count; i++) {
        const xd_weight *w = p->model->weights[i];
        XD_REQUIRE(p->ctx, w->owner != w || !xdi_weight_is_trained(w) || w->gradient || w->count == 0,
                   XD_ERROR_STATE, "weight \"%.80s\" has no gradient of the caller's", w->name);
    }
    for (const xd_block *b = &p->model->root; b; b = xdi_block_after(b)) {
        XD_REQUIRE(p->ctx, b->leaf < p->leaves.count && !p->reduced, XD_ERROR_STATE,
                   "leaf %lld of block \"%.80s\": this rank has %lld, and xd_parallel_publish ends a step",
                   (long long)b->leaf, b->name, (long long)p->leaves.count);
        XD_TRY(xdi_gradient_check_leaf(p, b, b->leaf));
    }
    return XD_OK;
}

XD_API xd_result xd_parallel_push_leaf(xd_parallel *p) {
    XDI_GIVEN(p ? p->ctx : NULL, p);
    XD_TRY(xdi_parallel_check_push(p));
    for (int64_t i = 0; i < p->model->weight_count; i++) {
        const xd_weight *w = p->model->weights[i];
        void *place = NULL;
        if (w->owner != w || !xdi_weight_is_trained(w)) continue;
        XD_TRY(xdi_gradient_place(p, w, 0, &place));
        XD_TRY(xdi_gradient_add(p, w, place));
    }
    for (xd_block *b = &p->model->root; b; b = xdi_block_after(b)) {
        xdi_state_use(b);
        XD_TRY(xdi_gradient_finish(p, b));
    }
    return XD_OK;
}
