/* Wrappers: DDP and FSDP, what they give optimizers and files, and the two ends of a step. */

#include "base/internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "model/build_internal.h"
#include "model/parallel_internal.h"

#include <string.h>

/* ---- micro-batches ---- */

static bool xdi_is_power_of_two(int64_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

/* How the micro-batches of a group fall to its ranks. */
static xd_result xdi_batches_deal(xdi_place *place, int64_t micro_batches, bool in_rows) {
    xdi_batches *batches = &place->batches;
    const int64_t n = place->ranks, all = n * place->members, groups = place->replica_count;
    batches->total = micro_batches ? micro_batches : n * groups;
    const int64_t group = batches->total / groups, first = group * place->rank / n;
    XD_REQUIRE(place->ctx, batches->total >= n * groups, XD_ERROR_ARGUMENT,
               "%lld micro-batches for %lld data ranks", (long long)micro_batches, (long long)(n * groups));
    XD_REQUIRE(place->ctx, group * groups == batches->total, XD_ERROR_ARGUMENT,
               "%lld micro-batches are not the same number for each of %lld groups",
               (long long)batches->total, (long long)groups);
    XD_REQUIRE(
        place->ctx, !place->invariant || groups == 1 || xdi_is_power_of_two(group), XD_ERROR_UNSUPPORTED,
        "INVARIANT mode with replicas: %lld micro-batches of a group are no power of two", (long long)group);
    batches->strided = place->settings.sharded && !in_rows && group % all == 0 &&
                       (!place->invariant || xdi_is_power_of_two(all));
    batches->own.first = first;
    batches->own.count = group * (place->rank + 1) / n - first;
    batches->own.total = group;
    batches->max = (group + all - 1) / all;
    return XD_OK;
}

/* What all ranks know of each other's micro-batches before any step: those of a sum over the data ranks, where each
 * strided micro-batch has a sum of its own, and those over the groups. */
static xd_result xdi_batches_list(xdi_place *place) {
    xdi_batches *batches = &place->batches;
    const int n = place->ranks, groups = place->replica_count;
    const int64_t group = batches->own.total;
    batches->known =
        (xd_leaves *)xd_allocate(place->ctx, ((size_t)n + (size_t)groups) * sizeof *batches->known);
    XD_REQUIRE(place->ctx, batches->known, XD_ERROR_MEMORY,
               "no room for the micro-batches of %d data ranks and %d groups", n, groups);
    for (int r = 0; r < n + groups; r++) {
        const bool in_rows = r < n && !batches->strided;
        xd_leaves *known = &batches->known[r];
        known->first = in_rows ? group * r / n : r < n ? r : r - n;
        known->count = in_rows ? group * (r + 1) / n - known->first : 1;
        known->total = in_rows ? group : r < n ? n : groups;
    }
    return XD_OK;
}

XD_API xd_parallel_micro_batch_count xd_parallel_micro_batches(const xd_parallel *p) {
    XD_ASSERT(p);
    const xdi_place *place = &p->place;
    xd_parallel_micro_batch_count out;
    out.own = place->batches.own.count;
    out.max = place->batches.max;
    out.total = place->batches.total;
    out.opened = xdi_batches_passes(place);
    return out;
}

XD_API int64_t xd_parallel_micro_batch(const xd_parallel *p, int64_t k) {
    XD_ASSERT(p);
    return xdi_batches_number(&p->place, k);
}

/* ---- life ---- */

/* Whether a rank before this one in the layout of the caller's cut holds the same part of a weight. */
XD_PRIVATE bool xdi_weight_is_copy(const xd_weight *w) {
    const xd_layout *layout = w->desc.layout;
    xd_region region;
    if (!layout) return false;
    for (int r = 0; r < w->model->desc.rank; r++)
        if (xd_layout_region(layout, r, &region) && xdi_region_equal(&region, &w->region)) return true;
    return false;
}

static void xdi_place_list_settings(const xdi_place *place, int expert_members, int64_t unit_count,
                                    xdi_facts *f) {
    const xdi_wrap_settings *s = &place->settings;
    xdi_fact_integer(f, "micro_batches", place->batches.total);
    xdi_fact_integer(f, "FSDP", s->sharded);
    xdi_fact_integer(f, "accumulate_whole", !place->batches.strided);
    xdi_fact_integer(f, "sharded_optimizer", s->split_optimizer);
    xdi_fact_integer(f, "reserve_frozen", s->reserve_frozen);
    xdi_fact_integer(f, "compare_steps", s->compare_steps);
    xdi_fact_integer(f, "replicas", place->replica_count);
    xdi_fact_dtype(f, "sent_dtype", s->sent_dtype);
    xdi_fact_dtype(f, "view_dtype", s->view_dtype);
    xdi_fact_integer(f, "reshard_ranks", s->reshard_ranks);
    xdi_fact_integer(f, "gathers", s->gathers != NULL);
    xdi_fact_integer(f, "reductions", s->reductions != NULL);
    xdi_fact_integer(f, "prefetch", s->prefetch);
    xdi_fact_integer(f, "host", place->on_host);
    xdi_fact_integer(f, "experts", expert_members);
    xdi_fact_integer(f, "members of a group of experts", place->members);
    xdi_fact_integer(f, "stage", s->stage);
    xdi_fact_integer(f, "chunk", s->chunk);
    xdi_fact_integer(f, "gathers_in_step", s->gathers_in_step);
    xdi_fact_integer(f, "wide_padding", s->wide_padding);
    xdi_fact_integer(f, "groups", s->has_groups);
    f->part = "groups";
    xdi_fact_integer(f, "tp", xdi_group_size(s->groups.tp));
    xdi_fact_integer(f, "pp", xdi_group_size(s->groups.pp));
    xdi_fact_integer(f, "embedding", xdi_group_size(s->groups.embedding));
    f->part = "divide";
    xdi_fact_number(f, "before (its inverse)", (double)place->batches.before);
    xdi_fact_number(f, "after (its inverse, with average)", (double)place->batches.after);
    f->part = NULL;
    xdi_fact_integer(f, "number of units", unit_count);
    xdi_fact_bytes(f, "ranges of micro-batches", place->batches.known,
                   ((size_t)place->ranks + (size_t)place->replica_count) * sizeof *place->batches.known);
}

/* What all ranks must have said alike: settings and where everything lies. */
static xd_result xdi_parallel_agree_settings(const xd_parallel *p, xd_comm *comm, const char *what) {
    uint64_t places = 0;
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_place_list_settings(&p->place, p->experts ? p->experts->place.members : 0, p->store.unit_count,
                            &facts);
    for (int64_t i = 0; i < p->store.flat_count; i++) {
        const uint64_t flat = xdi_bucket_plan_hash(p->store.flats[i].plan);
        places = xd_hash(places, &flat, sizeof flat);
    }
    xdi_fact_bytes(&facts, "order of weights in buckets (unit_types, bucket_size, bucket_count)", &places,
                   sizeof places);
    return xdi_agree_facts(comm, &facts, what);
}

/* A layout that spans data ranks makes all but one of them copies, which none would count: copies must be the same on all
 * ranks. */
static xd_result xdi_place_agree_copies(const xdi_place *place, xd_comm *comm) {
    uint64_t hash = 0;
    int64_t copies = 0;
    for (int64_t i = 0; i < place->model->weight_count; i++) {
        if (!xdi_place_has(place, place->model->weights[i])) continue;
        const int64_t copy = xdi_weight_is_copy(place->model->weights[i]);
        hash = xd_hash(hash, &copy, sizeof copy);
        copies += copy;
    }
    return xdi_agree_list(comm, copies, hash,
                          "the weights that this rank holds as copies (a layout is not over data ranks)");
}

static xd_result xdi_place_check_dtypes(const xdi_place *place) {
    const xd_dtype dtypes[] = { place->settings.sent_dtype, place->settings.view_dtype };
    for (int i = 0; i < 2; i++)
        XD_REQUIRE(place->ctx,
                   dtypes[i] == XD_DTYPE_NONE || dtypes[i] == XD_DTYPE_F32 || dtypes[i] == XD_DTYPE_BF16 ||
                       dtypes[i] == XD_DTYPE_F16,
                   XD_ERROR_DTYPE, "values are %s as %s: F32, BF16 and F16 are possible",
                   i ? "shown" : "sent", xd_dtype_name(dtypes[i]));
    return XD_OK;
}

static xd_result xdi_place_check_buckets(const xdi_place *place) {
    const xdi_wrap_settings *s = &place->settings;
    XD_REQUIRE(place->ctx, s->bucket_size >= 0 && s->bucket_parts >= 0, XD_ERROR_ARGUMENT,
               "buckets of %lld elements, and %lld of them", (long long)s->bucket_size,
               (long long)s->bucket_parts);
    XD_REQUIRE(place->ctx, !s->bucket_size || !s->bucket_parts, XD_ERROR_ARGUMENT,
               "bucket_size %lld and bucket_count %lld: one of them says where a bucket ends",
               (long long)s->bucket_size, (long long)s->bucket_parts);
    XD_REQUIRE(place->ctx, s->stage >= 0 && s->chunk >= 0, XD_ERROR_ARGUMENT, "stage %d, chunk %d", s->stage,
               s->chunk);
    XD_REQUIRE(
        place->ctx, !s->gathers_in_step || s->gathers, XD_ERROR_ARGUMENT,
        "gathers_in_step without a queue of gathers on %d data ranks: a gather beside the step needs one",
        place->ranks);
    XD_REQUIRE(
        place->ctx, !s->gathers_in_step || s->split_optimizer, XD_ERROR_ARGUMENT,
        "gathers_in_step without sharded_optimizer: each of %d data ranks steps all values, so there is "
        "nothing to gather",
        place->ranks);
    XD_REQUIRE(place->ctx, !s->wide_padding || s->sharded || s->split_optimizer, XD_ERROR_ARGUMENT,
               "wide_padding without sharded_optimizer: each of %d data ranks has the whole of a bucket",
               place->ranks);
    return XD_OK;
}

static xd_result xdi_place_check(const xdi_place *place, const xd_fsdp_desc *d) {
    const xdi_wrap_settings *s = &place->settings;
    XD_REQUIRE(place->ctx, d->micro_batches >= 0 && d->unit_type_count >= 0, XD_ERROR_ARGUMENT,
               "%lld micro-batches and %d types of units", (long long)d->micro_batches, d->unit_type_count);
    XD_REQUIRE(place->ctx, d->unit_types || d->unit_type_count == 0, XD_ERROR_ARGUMENT,
               "%d types of units, unit_types is NULL", d->unit_type_count);
    XD_REQUIRE(place->ctx, !d->unit_types || d->unit_type_count > 0, XD_ERROR_ARGUMENT,
               "a list of unit_types, and unit_type_count %d", d->unit_type_count);
    XD_REQUIRE(place->ctx, s->prefetch >= 0 && (s->prefetch == 0 || s->gathers), XD_ERROR_ARGUMENT,
               "%d units gathered ahead, and %s queue of gathers", s->prefetch, s->gathers ? "a" : "no");
    XD_TRY(xdi_place_check_buckets(place));
    XD_TRY(xdi_place_check_dtypes(place));
    XD_TRY(xdi_place_check_host(place));
    XD_REQUIRE(place->ctx, s->reshard_ranks > 0 && place->ranks % s->reshard_ranks == 0, XD_ERROR_ARGUMENT,
               "%d ranks that keep a unit do not divide %d data ranks", s->reshard_ranks, place->ranks);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_lay(xd_parallel *p, const xd_fsdp_desc *d) {
    XD_TRY(xdi_place_check(&p->place, d));
    XD_TRY(xdi_batches_deal(&p->place, d->micro_batches, d->accumulate_whole));
    XD_TRY(xdi_batches_list(&p->place));
    XD_TRY(xdi_batches_set_factors(&p->place, &d->divide));
    XD_TRY(xdi_spectral_retype(&p->place));
    XD_TRY(xdi_store_divide(&p->store, d));
    return xdi_store_plan(&p->store);
}

XD_PRIVATE xd_result xdi_experts_lay(xd_parallel *p, const xd_fsdp_desc *d) {
    xd_fsdp_desc settings = *d;
    settings.micro_batches = p->place.batches.total;
    if (!p->experts) return XD_OK;
    XD_TRY(xdi_parallel_lay(p->experts, &settings));
    xdi_gradient_align(&p, 1);
    return XD_OK;
}

static xd_result xdi_parallel_prepare(xd_parallel *p, const xd_fsdp_desc *d) {
    XD_TRY(xdi_parallel_lay(p, d));
    XD_TRY(xdi_experts_lay(p, d));
    XD_TRY(xdi_store_check_queues(&p->store));
    if (p->experts) XD_TRY(xdi_store_check_queues(&p->experts->store));
    XD_TRY(xdi_store_take_memory(&p->store));
    return p->experts ? xdi_store_take_memory(&p->experts->store) : XD_OK;
}

/* Whether the ranks of a group have wrapped alike. */
static xd_result xdi_parallel_agree_group(const xd_parallel *p, xd_comm *comm, const char *what) {
    XD_TRY(xdi_parallel_agree_settings(p, comm, what));
    return xdi_place_agree_copies(&p->place, comm);
}

/* The same of experts, which other data ranks have otherwise. */
static xd_result xdi_parallel_agree_experts(const xd_parallel *q) {
    static const char *const what = "settings of a wrapper for experts";
    const xdi_place *place = &q->place;
    XD_TRY(xdi_model_agree(place->model, place->data));
    XD_TRY(xdi_parallel_agree_group(q, place->data, what));
    return place->replicas ? xdi_parallel_agree_settings(q, place->replicas, what) : XD_OK;
}

static xd_result xdi_parallel_take_all_values(xd_parallel *p) {
    if (p->experts) XD_TRY(xdi_store_take_values(&p->experts->store));
    return xdi_store_take_values(&p->store);
}

/* The ranks fail alike, before and after any of them takes the model's values. */
static xd_result xdi_parallel_build(xd_parallel *p, const xd_fsdp_desc *d) {
    static const char *const what = "settings of a wrapper";
    xdi_place *place = &p->place;
    xd_comm *data = place->data;
    XD_TRY(xdi_model_agree_shared(place->model, data));
    XD_TRY(xd_agree(data, xdi_parallel_prepare(p, d)));
    XD_TRY(xdi_parallel_agree_group(p, data, what));
    if (p->experts) XD_TRY(xd_agree(data, xdi_parallel_agree_experts(p->experts)));
    if (xdi_place_reshards(place))
        XD_TRY(
            xd_comm_split(data, place->rank / place->settings.reshard_ranks, place->rank, &place->resharded));
    if (place->replicas) XD_TRY(xdi_model_agree(place->model, place->replicas));
    if (place->replicas) XD_TRY(xdi_parallel_agree_group(p, place->replicas, what));
    XD_TRY(xd_agree(data, xdi_parallel_take_all_values(p)));
    xdi_place_leave_storage(place);
    place->model->parallel = p;
    return XD_OK;
}

/* Settings of DDP as those of FSDP, and what only DDP has. */
static void xdi_place_set_ddp(xdi_wrap_settings *s, xd_fsdp_desc *settings, const xd_ddp_desc *ddp) {
    settings->micro_batches = ddp->micro_batches;
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
    s->bucket_size = ddp->bucket_size;
    s->bucket_parts = ddp->bucket_count;
    s->stage = ddp->stage;
    s->chunk = ddp->chunk;
    s->gathers_in_step = ddp->gathers_in_step;
    s->split_optimizer = ddp->sharded_optimizer;
}

XD_PRIVATE void xdi_place_set_kind(xdi_place *place, xd_fsdp_desc *settings, const xd_ddp_desc *ddp,
                                   const xd_fsdp_desc *fsdp) {
    xdi_wrap_settings *s = &place->settings;
    memset(place, 0, sizeof *place);
    memset(settings, 0, sizeof *settings);
    if (fsdp) *settings = *fsdp;
    if (ddp) xdi_place_set_ddp(s, settings, ddp);
    s->sharded = fsdp != NULL;
    s->sent_dtype = settings->sent_dtype;
    s->view_dtype = settings->view_dtype;
    s->reshard_ranks = settings->reshard_ranks;
    s->gathers = settings->gathers;
    s->reductions = settings->reductions;
    s->prefetch = settings->prefetch;
    s->reserve_frozen = settings->reserve_frozen;
    s->compare_steps = settings->compare_steps;
    s->wide_padding = settings->wide_padding;
    s->has_groups = settings->groups != NULL;
    if (settings->groups) s->groups = *settings->groups;
    place->parts_ctx = settings->host;
    place->on_host = settings->host != NULL;
}

/* An empty wrapper on every rank, or none on any. */
static xd_result xdi_parallel_open(const xdi_place *kind, const xd_fsdp_desc *d, xd_parallel **out) {
    xd_ctx *ctx = xd_comm_ctx(kind->data);
    xdi_place place = *kind;
    xd_parallel *p = NULL;
    xd_result result = XD_OK;
    xdi_place_set_rank(&place, xd_comm_rank(kind->data), xd_comm_size(kind->data),
                       kind->replicas ? xd_comm_rank(kind->replicas) : 0,
                       kind->replicas ? xd_comm_size(kind->replicas) : 1);
    if (kind->model->parallel)
        result = XD_FAIL(ctx, XD_ERROR_STATE, "the model of %lld weights is wrapped already",
                         (long long)kind->model->weight_count);
    else if ((p = xdi_parallel_at(&place)) == NULL)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a wrapper");
    if (result == XD_OK) result = xdi_experts_open(p, d);
    result = xd_agree(kind->data, result);
    if (result == XD_OK)
        *out = p;
    else
        xd_parallel_destroy(p);
    return result;
}

/* A type that no block has is legal, as on some stages of a pipeline; a misspelt name gathers the whole model at once. */
static void xdi_place_warn_of_types(const xdi_place *place, int64_t unit_count, const xd_fsdp_desc *d) {
    if (place->settings.sharded && unit_count == 1 && d->unit_type_count > 0 &&
        xdi_block_after(&place->model->root))
        xd_log(place->ctx, XD_LOG_WARN,
               "no block is of the %d types of units, of which \"%.80s\" is the first: the whole model is "
               "one unit",
               d->unit_type_count, d->unit_types[0]);
}

static xd_result xdi_parallel_create(xdi_place *kind, const xd_fsdp_desc *d, xd_parallel **out) {
    xd_parallel *p = NULL;
    if (d->replicas && xd_comm_size(d->replicas) > 1) kind->replicas = d->replicas;
    XD_TRY(xdi_parallel_open(kind, d, &p));
    const xd_result result = xdi_parallel_build(p, d);
    if (result == XD_OK) xdi_place_warn_of_types(&p->place, p->store.unit_count, d);
    if (result == XD_OK)
        *out = p;
    else
        xd_parallel_destroy(p);
    return result;
}

XD_API xd_result xd_ddp_create(xd_model *model, const xd_ddp_desc *desc, xd_parallel **out) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN(model ? model->ctx : NULL, desc);
    XDI_GIVEN_TO_ALL(model ? model->ctx : NULL, desc->data, model, desc->data, out);
    xdi_place kind;
    xd_fsdp_desc d;
    xdi_place_set_kind(&kind, &d, desc, NULL);
    kind.model = model;
    kind.data = desc->data;
    return xdi_parallel_create(&kind, &d, out);
}

XD_API xd_result xd_fsdp_create(xd_model *model, const xd_fsdp_desc *desc, xd_parallel **out) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN(model ? model->ctx : NULL, desc);
    XDI_GIVEN_TO_ALL(model ? model->ctx : NULL, desc->data, model, desc->data, out);
    xd_fsdp_desc d;
    xdi_place kind;
    xdi_place_set_kind(&kind, &d, NULL, desc);
    kind.model = model;
    kind.data = desc->data;
    return xdi_parallel_create(&kind, &d, out);
}

/* The model shows nothing of the wrapper any more; of one that was not finished its own values have not changed. */
static void xdi_model_detach(xd_model *model, bool finished) {
    for (xd_block *b = &model->root; b; b = xdi_block_after(b)) {
        b->units[0] = b->units[1] = NULL;
        b->open = 0;
        b->micro_batch = 0;
    }
    for (int64_t i = 0; i < xdi_model_weight_count(model); i++) {
        xd_weight *w = model->weights[i];
        const unsigned char *value = (const unsigned char *)w->value;
        const unsigned char *kept = w->flat && w->flat->whole ? (const unsigned char *)w->flat->values : NULL;
        if (kept && value >= kept && value < kept + w->flat->kept_bytes) w->value = NULL;
        xdi_spectral_give_back(w, w->own && finished ? xdi_flat_place(w) : NULL);
        w->ready = w->ready && w->value;
        w->state = XD_GRADIENT_READY;
        w->flat = NULL;
    }
    if (finished) model->parallel = NULL;
}

static void xdi_store_free(xdi_store *store) {
    const xdi_place *place = store->place;
    xd_ctx *ctx = place->ctx, *parts = place->parts_ctx;
    const xdi_wrap_memory *memory = &store->memory;
    for (int64_t i = 0; i < store->bucket_count && store->buckets; i++)
        xd_leaf_stack_destroy(store->buckets[i].stack);
    for (int64_t i = 0; i < store->bucket_count * place->members && store->lanes; i++)
        xd_leaf_stack_destroy(store->lanes[i]);
    for (int64_t i = 0; i < store->flat_count; i++) xdi_bucket_plan_destroy(store->flats[i].plan);
    if (memory->device) xd_ctx_kernels(ctx)->memory.release(ctx, memory->device);
    xdi_locked_give(ctx, memory->locked);
    if (memory->host && !memory->locked) xd_ctx_kernels(parts)->memory.release(parts, memory->host);
    void *const tables[] = { store->units,
                             store->flats,
                             store->buckets,
                             (void *)store->weights,
                             store->slots,
                             store->sums,
                             (void *)store->lanes,
                             (void *)store->places,
                             store->scratch.counts,
                             store->scratch.used,
                             (void *)store->scratch.forests,
                             store->scratch.forest_leaves };
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) xd_release(ctx, tables[i]);
}

static void xdi_parallel_free(xd_parallel *p) {
    const xdi_place *place = &p->place;
    xd_ctx *ctx = place->ctx;
    xdi_store_free(&p->store);
    xd_comm_destroy(place->resharded);
    xd_release(ctx, place->batches.known);
    xd_release(ctx, p);
}

XD_API void xd_parallel_destroy(xd_parallel *p) {
    if (!p || XDI_IS_GONE(xd_parallel, p)) return;
    xdi_store_land(&p->store);
    if (p->experts) xdi_store_land(&p->experts->store);
    xdi_model_detach(p->place.model, p->place.model->parallel == p);
    if (p->experts) xdi_parallel_free(p->experts);
    xdi_parallel_free(p);
}

static xd_wrap_kind xdi_model_wrapper(const xd_model *model) {
    if (!model->parallel) return XD_WRAP_NONE;
    return model->parallel->place.settings.sharded ? XD_WRAP_FSDP : XD_WRAP_DDP;
}

XD_API xd_model_info xd_model_describe(const xd_model *model) {
    XD_ASSERT(model);
    xd_model_info info;
    memset(&info, 0, sizeof info);
    info.weight_count = xdi_model_weight_count(model);
    info.parameter_count = xdi_model_elements(model, false);
    info.trained_count = xdi_model_elements(model, true);
    info.wrapper = xdi_model_wrapper(model);
    return info;
}

XD_API xd_parallel_bytes xd_parallel_memory(const xd_parallel *parallel) {
    xd_parallel_bytes out = parallel->store.memory.bytes;
    if (!parallel->experts) return out;
    const xd_parallel_bytes *experts = &parallel->experts->store.memory.bytes;
    out.values += experts->values;
    out.gradients += experts->gradients;
    out.gathered += experts->gathered;
    out.whole_gradients += experts->whole_gradients;
    out.host += experts->host;
    return out;
}

/* ---- lists ---- */

XD_PRIVATE bool xdi_weight_is_listed(const xd_weight *w) {
    return w->owner == w && !(w->desc.buffer && w->desc.transient);
}

static xd_result xdi_model_list_room(const xd_model *model, const void *list, int64_t capacity,
                                     int64_t *count) {
    int64_t n = 0;
    XD_REQUIRE(model->ctx, list || capacity == 0, XD_ERROR_ARGUMENT,
               "a list of %lld at NULL: capacity 0 counts", (long long)capacity);
    for (int64_t i = 0; i < model->weight_count; i++) n += xdi_weight_is_listed(model->weights[i]);
    XD_REQUIRE(model->ctx, capacity == 0 || capacity >= n, XD_ERROR_ARGUMENT,
               "%lld parameters, capacity is %lld", (long long)n, (long long)capacity);
    *count = n;
    return XD_OK;
}

XD_PRIVATE bool xdi_weight_is_elsewhere(const xd_weight *w) {
    const xdi_place *place = w->flat->place;
    const bool everywhere = xdi_bucket_plan_settings(w->flat->plan)->ranks == 1;
    return place->replica > 0 || (everywhere && place->rank > 0) || xdi_weight_is_copy(w);
}

/* Whether another data rank, or one of the caller's cut, counts what is here. */
static bool xdi_weight_is_replica(const xd_weight *w) {
    return w->desc.traits.shared || xdi_weight_is_elsewhere(w);
}

XD_PRIVATE xd_param xdi_weight_describe_part(const xd_weight *w, xdi_bucket_piece *piece) {
    xd_param out = xdi_weight_param(w);
    memset(piece, 0, sizeof *piece);
    (void)xdi_flat_piece(w, piece);
    out.value = out.gradient = NULL;
    out.count = piece->param.end - piece->param.begin;
    out.first += piece->param.begin;
    out.replica = xdi_weight_is_replica(w);
    if (out.count != w->count) {
        out.shape = NULL;
        out.dims = 0;
    }
    return out;
}

XD_PRIVATE xd_param xdi_weight_kept_param(const xd_weight *w) {
    xdi_bucket_piece piece;
    const xdi_bucket *b = xdi_flat_bucket(w);
    xd_param out = xdi_weight_describe_part(w, &piece);
    if (out.count > 0) out.value = xdi_flat_value(w, &piece);
    out.state = &w->state;
    if (b) out.gradient = b->sum + piece.shard.begin; /* not NULL where nothing is: steps count alike */
    return out;
}

static int64_t xdi_at_most(int64_t value, int64_t bound) {
    return value < bound ? value : bound;
}

XD_PRIVATE xd_tensor_part xdi_weight_kept_part(const xd_weight *w) {
    xd_tensor_part out;
    xdi_bucket_piece piece;
    const int64_t max = xdi_weight_true_count(w);
    memset(&out, 0, sizeof out);
    memset(&piece, 0, sizeof piece);
    out.name = w->name;
    out.dtype = w->desc.dtype;
    out.ndim = w->desc.ndim;
    memcpy(out.shape, w->desc.shape, sizeof out.shape);
    out.region = w->saved ? w->saved : &w->region;
    if (xdi_flat_piece(w, &piece)) out.data = xdi_flat_value(w, &piece);
    out.range.begin = xdi_at_most(piece.param.begin, max);
    out.range.end = xdi_at_most(piece.param.end, max);
    out.replica = xdi_weight_is_replica(w);
    return out;
}

XD_API xd_result xd_parallel_params(const xd_parallel *p, int64_t capacity, xd_param *params,
                                    int64_t *count) {
    XDI_LIVE(xd_parallel, p);
    XDI_GIVEN_IN_PLAN(p ? p->place.model->ctx : NULL, p, count);
    const xd_model *model = p->place.model;
    int64_t at = 0;
    XD_TRY(xdi_model_list_room(model, params, capacity, count));
    for (int64_t i = 0; i < model->weight_count && capacity > 0; i++)
        if (xdi_weight_is_listed(model->weights[i])) params[at++] = xdi_weight_kept_param(model->weights[i]);
    return XD_OK;
}

XD_API xd_result xd_parallel_parts(const xd_parallel *p, int64_t capacity, xd_tensor_part *parts,
                                   int64_t *count) {
    XDI_LIVE(xd_parallel, p);
    XDI_GIVEN_IN_PLAN(p ? p->place.model->ctx : NULL, p, count);
    const xd_model *model = p->place.model;
    int64_t at = 0;
    XD_TRY(xdi_model_list_room(model, parts, capacity, count));
    for (int64_t i = 0; i < model->weight_count && capacity > 0; i++)
        if (xdi_weight_is_listed(model->weights[i])) parts[at++] = xdi_weight_kept_part(model->weights[i]);
    return XD_OK;
}

/* ---- the ends of a step ---- */

static bool xdi_parallel_has_open(const xd_parallel *p) {
    return p->step.open > 0 || (p->experts && p->experts->step.open > 0);
}

static xd_result xdi_parallel_check_closed(const xd_parallel *p, const char *call) {
    for (const xd_block *b = &p->place.model->root; b && xdi_parallel_has_open(p); b = xdi_block_after(b))
        if (b->open > 0)
            return XD_FAIL(p->place.ctx, XD_ERROR_STATE, "%s while block \"%.80s\" is open", call, b->name);
    return XD_OK;
}

static xd_result xdi_parallel_check_step(const xd_parallel *p) {
    const xdi_place *place = &p->place;
    const int64_t micro_batches = xdi_batches_passes(place);
    XD_REQUIRE(place->ctx, !p->step.reduced, XD_ERROR_STATE,
               "a step of %lld micro-batches was reduced already: xd_parallel_publish ends it",
               (long long)place->batches.total);
    XD_TRY(xdi_parallel_check_closed(p, "xd_parallel_reduce"));
    for (const xd_block *b = &place->model->root; b; b = xdi_block_after(b))
        XD_REQUIRE(
            place->ctx,
            b->micro_batch == micro_batches || !xdi_block_trains(b) || b->expert != place->of_experts,
            XD_ERROR_STATE, "block \"%.80s\"%s has had backward passes of %lld micro-batches, not of %lld%s",
            b->name, *b->name ? "" : " (the root)", (long long)b->micro_batch, (long long)micro_batches,
            micro_batches > place->batches.own.count
                ? ": this rank opens blocks for xd_parallel_micro_batches().opened, also beyond its own"
                : "");
    return XD_OK;
}

/* What ranks agree on in one exchange: that none has failed, and that all say the same. */
typedef struct xdi_agreement {
    xd_result mine;
    uint64_t hash;
    const char *what;     /* the hash is of; NULL: the order of brackets */
    const xdi_step *step; /* whose; and of which model */
    const xd_model *model;
    bool elsewhere; /* out: some rank was in another call, so that nothing was agreed */
    /* a rank of those so far has a weight whose blocks were skipped in all of its micro-batches */
    bool skips;
} xdi_agreement;

/* A rank that is elsewhere meets this one in another collective, whose name says nothing to the caller. */
static xd_result xdi_agreement_explain(xd_comm *comm, xd_result result) {
    const xd_error reported = *xd_last_error(xd_comm_ctx(comm));
    if (result != XD_ERROR_MISMATCH) return result;
    return XD_FAIL_CULPRIT(xd_comm_ctx(comm), result, reported.culprit,
                           "%.300s: all ranks call xd_parallel_reduce after their backward passes",
                           reported.message);
}

static xd_result xdi_agreement_reach(xdi_agreement *a, xd_comm *comm) {
    a->elsewhere = false;
    if (xdi_comm_is_recording(comm))
        return a->mine; /* the graph's steps are alike, and one before it was agreed on */
    const int64_t hash = (int64_t)a->hash;
    const xd_error own = *xd_last_error(xd_comm_ctx(comm));
    int64_t facts[] = { a->mine != XD_OK, hash, ~hash, a->skips }; /* the third is the minimum, upside down */
    const xd_result reported = xd_all_reduce(comm, facts, facts, 4, XD_DTYPE_I64, XD_MAX);
    const bool knows = reported == XD_ERROR_MISMATCH && a->mine != XD_OK && own.result == a->mine;
    a->elsewhere = !knows && (reported == XD_ERROR_MISMATCH || reported == XD_ERROR_PEER);
    /* The others are still in the blocks that this rank has left out: its own error says so, theirs that it came here. */
    if (knows) return xdi_ctx_adopt(xd_comm_ctx(comm), &own);
    if (reported != XD_OK) return a->what ? reported : xdi_agreement_explain(comm, reported);
    a->skips = facts[3] > 0;
    if (facts[0] > 0) return xd_agree(comm, a->mine);
    if (facts[1] == ~facts[2]) return XD_OK;
    return a->what ? xd_agree_same(comm, a->hash, a->what)
                   : xdi_order_explain(&a->step->order, a->model, comm);
}

/* Groups of replicas wait for each other later, so they fail together too. */
static xd_result xdi_place_agree(const xdi_place *place, xdi_agreement *agreement) {
    agreement->mine = xdi_agreement_reach(agreement, place->data);
    return place->replicas ? xdi_agreement_reach(agreement, place->replicas) : agreement->mine;
}

/* Under DDP each rank opens blocks in an order of its own. What the ranks of some experts have found is reported to all. */
static xd_result xdi_parallel_agree_step(xd_parallel *p) {
    xdi_agreement step;
    step.mine = p->experts ? xdi_parallel_agree_step(p->experts) : XD_OK;
    if (step.mine == XD_OK) step.mine = xdi_parallel_check_step(p);
    step.skips = xdi_state_skips(&p->place);
    step.hash = p->place.settings.sharded ? p->step.order.signature : 0;
    step.what = NULL;
    step.step = &p->step;
    step.model = p->place.model;
    const xd_result result = xdi_place_agree(&p->place, &step);
    p->step.elsewhere = step.elsewhere;
    return result == XD_OK ? xdi_state_sum(&p->store, step.skips) : result;
}

static xd_result xdi_parallel_reduce_own(xd_parallel *p) {
    xdi_store_drop_ahead(&p->store);
    XD_TRY(xdi_store_land_values(&p->store));
    return xdi_gradient_reduce(&p->store);
}

XD_PRIVATE xd_result xdi_parallel_reduce_data(xd_parallel *p) {
    XD_TRY(xdi_parallel_agree_step(p));
    if (p->experts) XD_TRY(xdi_parallel_reduce_own(p->experts));
    return xdi_parallel_reduce_own(p);
}

static void xdi_parallel_reset(xd_parallel *p) {
    if (p->experts) xdi_gradient_reset(&p->experts->store, &p->experts->step);
    xdi_gradient_reset(&p->store, &p->step);
    xdi_state_reset(p->place.model, &p->step);
}

XD_PRIVATE xd_result xdi_parallel_end_reduce(xd_parallel *p, xd_result result) {
    if (result != XD_OK && !p->step.reduced && !p->step.elsewhere) xdi_parallel_reset(p);
    p->step.reduced = p->step.reduced || result == XD_OK;
    p->step.waits = p->step.waits && result != XD_OK;
    if (p->experts) p->experts->step.reduced = p->step.reduced;
    return result;
}

/* Whether a queue has a sum of this step, which other ranks may not have begun: dropped here it would stay there. */
static bool xdi_parallel_has_sent(const xd_parallel *p) {
    bool sent = p->step.launched > 0;
    for (int64_t i = 0; i < p->store.bucket_count; i++) sent = sent || p->store.buckets[i].sending.open;
    return (sent && p->place.settings.reductions) || (p->experts && xdi_parallel_has_sent(p->experts));
}

XD_PRIVATE void xdi_parallel_drop_micro_batches(xd_parallel *p) {
    if (!xdi_parallel_has_open(p) && !xdi_parallel_has_sent(p)) xdi_parallel_reset(p);
}

/* Whether all micro-batches of a step are there and only their sum is missing: a step that is given up ends earlier, or by
 * that call. */
static bool xdi_parallel_is_complete(const xd_parallel *p) {
    bool complete = p->step.waits;
    for (const xd_block *b = &p->place.model->root; b && complete; b = xdi_block_after(b)) {
        const xd_parallel *of = b->expert ? p->experts : p;
        complete = !xdi_block_trains(b) || b->micro_batch == xdi_batches_passes(&of->place);
    }
    return complete;
}

static xd_result xdi_parallel_check_publish(const xd_parallel *p) {
    XD_TRY(xdi_parallel_check_closed(p, "xd_parallel_publish"));
    XD_REQUIRE(p->place.ctx, !xdi_parallel_is_complete(p), XD_ERROR_STATE,
               "xd_parallel_publish before xd_parallel_reduce: the backward passes of all %lld micro-batches "
               "of this rank have ended and are not summed; sum them also for a step that you give up",
               (long long)xdi_batches_passes(&p->place));
    return XD_OK;
}

/* The other ranks may be in xd_parallel_reduce, which this one has left out: its own error names the call. */
static xd_result xdi_parallel_agree_publish(const xd_parallel *p) {
    const xdi_place *place = &p->place;
    const xd_result mine = xdi_parallel_check_publish(p);
    const xd_error own = *xd_last_error(place->ctx);
    const xd_result reported = xdi_comm_agree_or_record(place->data, mine, 0);
    return reported == XD_ERROR_MISMATCH && mine != XD_OK ? xdi_ctx_adopt(place->ctx, &own) : reported;
}

/* A step that was given up between two micro-batches has some that nobody needs. */
static void xdi_step_warn_dropped(const xdi_place *place, const xdi_step *step) {
    int64_t micro_batches = 0;
    if (step->reduced) return;
    for (const xd_block *b = &place->model->root; b; b = xdi_block_after(b))
        micro_batches = b->micro_batch > micro_batches ? b->micro_batch : micro_batches;
    if (micro_batches > 0)
        xd_log(place->ctx, XD_LOG_WARN,
               "xd_parallel_publish drops %lld micro-batches: xd_parallel_reduce was not called after their "
               "backward passes",
               (long long)micro_batches);
}

XD_API xd_result xd_parallel_publish(xd_parallel *p) {
    XDI_LIVE(xd_parallel, p);
    XDI_GIVEN(p ? p->place.ctx : NULL, p);
    XD_TRY(xdi_parallel_agree_publish(p));
    XD_TRY(xdi_replicas_check(p));
    xdi_step_warn_dropped(&p->place, &p->step);
    if (p->experts) XD_TRY(xdi_store_renew_values(&p->experts->store));
    XD_TRY(xdi_store_renew_values(&p->store));
    xdi_parallel_reset(p);
    return XD_OK;
}

XD_PRIVATE void xdi_parallel_drop_step(xd_parallel *p) {
    if (p->experts) xdi_parallel_drop_step(p->experts);
    for (xd_block *b = &p->place.model->root; b; b = xdi_block_after(b)) b->open = 0;
    for (int64_t i = 0; i < p->store.unit_count; i++) p->store.units[i].open = 0;
    p->step.open = 0;
    xdi_store_forget_values(&p->store);
    xdi_gradient_reset(&p->store, &p->step);
    xdi_state_reset(p->place.model, &p->step);
}

/* ---- weights that are thawed ---- */

/* Whether some block has had a backward pass, and the step has not ended. */
static bool xdi_parallel_is_within(const xd_parallel *p) {
    bool within = p->step.reduced;
    for (const xd_block *b = &p->place.model->root; b; b = xdi_block_after(b))
        within = within || b->micro_batch > 0;
    for (int64_t i = 0; i < p->store.bucket_count; i++)
        within = within || xdi_bucket_is_forming(&p->store.buckets[i]);
    return within;
}

static xd_result xdi_parallel_may_thaw(const xd_parallel *p, const xd_weight *w) {
    const xdi_place *place = &p->place;
    XD_REQUIRE(place->ctx, w, XD_ERROR_ARGUMENT,
               "no weight to thaw: none of the model's %lld has the name it was found by",
               (long long)place->model->weight_count);
    XD_REQUIRE(place->ctx, w->model == place->model, XD_ERROR_ARGUMENT,
               "weight \"%.80s\" is one of another model", w->name);
    const xd_weight *owner = w->owner;
    XD_REQUIRE(place->ctx, place->settings.reserve_frozen, XD_ERROR_STATE,
               "weight \"%.80s\" cannot be thawed: the model was wrapped without reserve_frozen",
               owner->name);
    XD_REQUIRE(place->ctx, !owner->desc.buffer, XD_ERROR_STATE, "buffer \"%.80s\" cannot be thawed",
               owner->name);
    XD_REQUIRE(place->ctx, owner->desc.traits.frozen, XD_ERROR_STATE, "weight \"%.80s\" is trained already",
               owner->name);
    XD_REQUIRE(place->ctx, owner->flat->trained, XD_ERROR_DTYPE,
               "weight \"%.80s\" is %s with gradients of %s: F32, BF16 and F16 train, with F32", owner->name,
               xd_dtype_name(owner->desc.dtype), xd_dtype_name(owner->desc.gradient_dtype));
    XD_REQUIRE(place->ctx, !xdi_parallel_is_within(p), XD_ERROR_STATE,
               "weight \"%.80s\" is thawed within a step of %lld micro-batches", owner->name,
               (long long)place->batches.total);
    return xdi_parallel_check_closed(p, "xd_parallel_thaw");
}

XD_API xd_result xd_parallel_thaw(xd_parallel *parallel, xd_weight *weight) {
    XDI_LIVE(xd_parallel, parallel);
    XDI_LIVE(xd_weight, weight);
    XDI_GIVEN(parallel ? parallel->place.ctx : NULL, parallel);
    xd_parallel *p =
        parallel->experts && weight && xdi_weight_is_expert(weight) ? parallel->experts : parallel;
    xdi_agreement thaw;
    thaw.mine = xdi_parallel_may_thaw(p, weight);
    thaw.hash = weight ? xd_hash(0, weight->owner->name, strlen(weight->owner->name)) : 0;
    thaw.what = "the weight that is thawed";
    thaw.step = NULL;
    thaw.model = p->place.model;
    thaw.skips = false;
    XD_TRY(xdi_place_agree(&p->place, &thaw));
    weight->owner->desc.traits.frozen = false;
    xdi_store_count_blocks(&p->store);
    return XD_OK;
}

/* ---- the caller's own gradients ---- */

static xd_result xdi_parallel_check_push(const xd_parallel *p) {
    const xdi_place *place = &p->place;
    XD_REQUIRE(place->ctx, !place->settings.sharded, XD_ERROR_UNSUPPORTED,
               "under FSDP the micro-batches of %lld units come from brackets",
               (long long)p->store.unit_count);
    XD_REQUIRE(place->ctx, !p->experts, XD_ERROR_UNSUPPORTED,
               "micro-batches of experts, %lld in a step on this rank, come from brackets",
               (long long)xd_parallel_expert_micro_batches(p).own);
    for (int64_t i = 0; i < place->model->weight_count; i++) {
        const xd_weight *w = place->model->weights[i];
        XD_REQUIRE(place->ctx, w->owner != w || !xdi_weight_is_trained(w) || w->gradient || w->count == 0,
                   XD_ERROR_STATE, "weight \"%.80s\" has no gradient of the caller's", w->name);
    }
    for (const xd_block *b = &place->model->root; b; b = xdi_block_after(b)) {
        XD_REQUIRE(
            place->ctx, b->micro_batch < place->batches.own.count && !p->step.reduced, XD_ERROR_STATE,
            "micro-batch %lld of block \"%.80s\": this rank has %lld, and xd_parallel_publish ends a step",
            (long long)b->micro_batch, b->name, (long long)place->batches.own.count);
        XD_TRY(xdi_gradient_check_micro_batch(place, b, b->micro_batch));
    }
    return XD_OK;
}

XD_API xd_result xd_parallel_push_micro_batch(xd_parallel *p) {
    XDI_LIVE(xd_parallel, p);
    XDI_GIVEN(p ? p->place.ctx : NULL, p);
    XD_TRY(xdi_parallel_check_push(p));
    for (int64_t i = 0; i < p->place.model->weight_count; i++) {
        const xd_weight *w = p->place.model->weights[i];
        void *place = NULL;
        if (w->owner != w || !xdi_weight_is_trained(w)) continue;
        XD_TRY(xdi_gradient_place(&p->store, w, 0, &place));
        XD_TRY(xdi_gradient_add(w, place));
    }
    for (xd_block *b = &p->place.model->root; b; b = xdi_block_after(b)) {
        xdi_state_use(b);
        XD_TRY(xdi_gradient_finish(&p->store, &p->step, b));
    }
    return XD_OK;
}
