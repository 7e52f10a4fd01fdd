/* The seven steps that build a model over several ranks. */

#include "comm/internal.h"
#include "comm/mesh.h"
#include "model/build_internal.h"
#include "model/parallel_internal.h"

#include <stdio.h>
#include <string.h>

struct xd_built {
    xd_ctx *ctx;
    xd_comm *self;         /* the data group of one rank that was given none; NULL where it is not needed */
    const xd_stages *lent; /* whose models are the caller's until all has succeeded; NULL -> none */
    xd_stages list;
};

/* ---- lists ---- */

XD_PRIVATE xd_result xdi_builder_called(xd_ctx *ctx, xd_result result, const char *what, int index) {
    if (result == XD_OK || xd_last_error(ctx)->result == result) return result;
    const bool known = (int)result > 0 && result < XD_RESULT_COUNT;
    return XD_FAIL(ctx, known ? result : XD_ERROR_ARGUMENT, "%s %d returned %d (%s)", what, index,
                   (int)result, xd_result_name(result));
}

/* Refuses what is no list of this build's stages; wrappers belong to their models. */
static xd_result xdi_stages_check(xd_ctx *ctx, const xd_stages *list, const char *what) {
    XD_REQUIRE(ctx, list->count >= 1 && list->count <= XD_STAGES_MAX, XD_ERROR_ARGUMENT,
               "%s: %d stages, from 1 to %d are possible", what, list->count, (int)XD_STAGES_MAX);
    for (int i = 0; i < list->count; i++) {
        const xd_stage *s = &list->stages[i];
        XD_REQUIRE(ctx, s->model, XD_ERROR_ARGUMENT, "%s: stage %d of %d is no model", what, i, list->count);
        XD_REQUIRE(ctx, s->model->ctx == ctx, XD_ERROR_ARGUMENT,
                   "%s: the model of stage %d of %d is another context's", what, i, list->count);
        XD_REQUIRE(ctx, s->model->parallel == s->parallel, XD_ERROR_ARGUMENT,
                   "%s: the model of stage %d of %d is wrapped by what is not the stage's wrapper", what, i,
                   list->count);
        for (int k = 0; k < i; k++)
            XD_REQUIRE(ctx, list->stages[k].model != s->model, XD_ERROR_ARGUMENT,
                       "%s: stages %d and %d of %d are the same model", what, k, i, list->count);
    }
    return XD_OK;
}

static bool xdi_stages_have(const xd_stages *list, const xd_model *model) {
    for (int i = 0; i < list->count; i++)
        if (list->stages[i].model == model) return true;
    return false;
}

static void xdi_stage_free(const xd_stage *stage) {
    xd_parallel_destroy(stage->parallel);
    xd_model_destroy(stage->model);
}

/* Frees the stages of one list that another has not. */
static void xdi_stages_free_others(const xd_stages *list, const xd_stages *kept) {
    for (int i = list->count - 1; i >= 0; i--)
        if (!xdi_stages_have(kept, list->stages[i].model)) xdi_stage_free(&list->stages[i]);
}

/* ---- 1: stages ---- */

static xd_result xdi_builder_describe_one(xdi_builder *b, int virtual_stage) {
    const xd_stage_provider *provider = &b->desc->provider;
    xd_pipeline_desc pipeline = b->desc->pipeline;
    xd_stage *stage = &b->list->stages[b->list->count];
    xd_model *model = NULL;
    pipeline.ranks = xdi_group_size(b->groups.pp);
    XD_TRY(xdi_pipeline_place(b->ctx, &pipeline, xdi_group_rank(b->groups.pp), virtual_stage, &stage->place));
    const xd_stage_place place = stage->place;
    xdi_clear_error(b->ctx);
    XD_TRY(xdi_builder_called(b->ctx, provider->describe(provider->user, b->ctx, &place, &model),
                              "the provider of virtual stage", virtual_stage));
    stage->model = model;
    b->list->count++;
    const xd_result result = xdi_stages_check(b->ctx, b->list, "the provider's stages");
    if (result != XD_OK) b->list->count--; /* what is refused stays the provider's */
    return result;
}

static xd_result xdi_builder_describe(xdi_builder *b) {
    const int stages = xdi_pipeline_stages(xdi_group_size(b->groups.pp), b->desc->pipeline.virtual_stages);
    for (int i = 0; i < stages; i++) XD_TRY(xdi_builder_describe_one(b, i));
    return XD_OK;
}

/* ---- 2: hooks ---- */

/* Calls one hook; its list becomes the build's when no rank has failed. */
static xd_result xdi_builder_hook(xdi_builder *b, const xd_stage_hook *hook, int index, xd_stages *out) {
    memset(out, 0, sizeof *out);
    xdi_clear_error(b->ctx);
    xd_result result =
        xdi_builder_called(b->ctx, hook->call(hook->user, b->ctx, b->list, out), "hook", index);
    if (result == XD_OK && out->count != 0) result = xdi_stages_check(b->ctx, out, "a hook's list");
    if (result != XD_OK) out->count = 0;
    result = xd_agree(b->world, result);
    if (out->count == 0) return result;
    if (result != XD_OK) {
        xdi_stages_free_others(out, b->list);
        return result;
    }
    xdi_stages_free_others(b->list, out);
    *b->list = *out;
    return XD_OK;
}

static xd_result xdi_builder_call_hooks(xdi_builder *b, bool after) {
    const xd_stage_hooks *hooks = xdi_builder_hooks(b->desc, after);
    xd_stages *out = (xd_stages *)xd_allocate(b->ctx, sizeof *out);
    xd_result result =
        xd_agree(b->world,
                 out ? XD_OK : XD_FAIL(b->ctx, XD_ERROR_MEMORY, "no room for %d stages", (int)XD_STAGES_MAX));
    for (int i = 0; hooks && i < hooks->count && result == XD_OK; i++)
        result = xdi_builder_hook(b, &hooks->hooks[i], i, out);
    xd_release(b->ctx, out);
    return result;
}

static xd_result xdi_builder_seal(const xdi_builder *b) {
    for (int i = 0; i < b->list->count; i++)
        if (!b->list->stages[i].model->sealed) XD_TRY(xd_model_seal(b->list->stages[i].model));
    return XD_OK;
}

static xd_result xdi_builder_before(xdi_builder *b) {
    XD_TRY(xdi_builder_call_hooks(b, false));
    return xdi_builder_seal(b);
}

/* ---- 3: attributes ---- */

/* What a cut over an axis "tp" says of a weight, where the provider left it out. */
static void xdi_weight_default_traits(xd_weight *w) {
    xd_weight_traits *t = &w->desc.traits;
    const xd_layout_desc *cut = w->desc.layout ? xd_layout_settings(w->desc.layout) : NULL;
    const int axis = cut ? xdi_topology_axis(cut->topology, "tp") : -1;
    if (axis < 0 || cut->placement[axis].kind != XD_SHARD || t->tensor_parallel) return;
    const xd_placement *p = &cut->placement[axis];
    t->tensor_parallel = true;
    if (t->partition_dim == 0) t->partition_dim = p->dim < 0 ? p->dim + cut->ndim : p->dim;
    if (t->partition_stride <= 1 && p->sections > 1) t->partition_stride = p->sections;
    if (t->expert) t->expert_tensor_parallel = true;
}

static bool xdi_model_default_traits(xd_model *model) {
    bool experts = false;
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *w = model->weights[i];
        if (w->owner == w) xdi_weight_default_traits(w);
        w->desc.traits = w->owner->desc.traits; /* of an earlier weight */
        experts = experts || w->desc.traits.expert;
    }
    return experts;
}

/* Whether a group has the same number of stages, and the same models in them. */
static xd_result xdi_builder_compare_count(const xdi_builder *b, xd_comm *comm) {
    const int64_t count = b->list->count;
    int64_t max[2] = { count, -count };
    if (xdi_group_size(comm) == 1) return XD_OK;
    XD_TRY(xd_all_reduce(comm, max, max, 2, XD_DTYPE_I64, XD_MAX));
    XD_REQUIRE(b->ctx, max[0] == -max[1], XD_ERROR_MISMATCH,
               "ranks of one group have from %lld to %lld stages", (long long)-max[1], (long long)max[0]);
    return XD_OK;
}

static xd_result xdi_builder_compare_models(const xdi_builder *b, xd_comm *comm) {
    for (int i = 0; i < b->list->count && xdi_group_size(comm) > 1; i++)
        XD_TRY(xdi_model_agree(b->list->stages[i].model, comm));
    return XD_OK;
}

/* Every comparison ends on all ranks before the next one begins, so that none waits for one that has failed. */
static xd_result xdi_builder_compare(const xdi_builder *b) {
    xd_comm *models = b->experts ? b->groups.expert_dp : b->data;
    xd_comm *tensors = b->experts ? NULL : b->groups.tp;
    XD_TRY(xd_agree(b->world, xdi_builder_compare_count(b, b->data)));
    XD_TRY(xd_agree(b->world, xdi_builder_compare_count(b, models)));
    XD_TRY(xd_agree(b->world, xdi_builder_compare_count(b, tensors)));
    XD_TRY(xd_agree(b->world, xdi_builder_seeds(b)));
    XD_TRY(xd_agree(b->world, xdi_builder_compare_models(b, models)));
    return xd_agree(b->world, xdi_builder_compare_models(b, tensors));
}

static void xdi_builder_report_count(const xdi_builder *b) {
    const xd_groups *g = &b->groups;
    const xd_build_report *report = &b->desc->report;
    int64_t count = 0;
    char line[128];
    if (xdi_group_rank(g->dp) || xdi_group_rank(g->cp) || xdi_group_rank(g->dp_cp)) return;
    for (int i = 0; i < b->list->count; i++) count += xdi_model_elements(b->list->stages[i].model, false);
    snprintf(line, sizeof line,
             " > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %lld",
             xdi_group_rank(g->tp), xdi_group_rank(g->pp), (long long)count);
    if (report->write)
        report->write(report->user, line);
    else
        xd_log(b->ctx, XD_LOG_INFO, "%s", line);
}

static xd_result xdi_builder_attributes(xdi_builder *b) {
    int64_t experts = 0;
    for (int i = 0; i < b->list->count; i++)
        if (xdi_model_default_traits(b->list->stages[i].model)) experts = 1;
    XD_TRY(xd_all_reduce(b->world, &experts, &experts, 1, XD_DTYPE_I64, XD_MAX));
    b->experts = experts > 0;
    XD_TRY(xdi_builder_compare(b));
    xdi_builder_report_count(b);
    return XD_OK;
}

/* ---- 4, 5, 6: storage, types, values ---- */

static xd_result xdi_builder_take(const xdi_builder *b) {
    const xd_wrap_kind kind = b->desc->wrap.kind;
    const xdi_take what = kind == XD_WRAP_FSDP   ? XDI_TAKE_BUFFERS
                          : kind == XD_WRAP_NONE ? XDI_TAKE_ALL
                                                 : XDI_TAKE_VALUES;
    for (int i = 0; i < b->list->count; i++) XD_TRY(xdi_model_take(b->list->stages[i].model, what));
    return XD_OK;
}

static xd_result xdi_builder_storage(xdi_builder *b) {
    const bool moves = b->desc->storage == XD_STORAGE_DEVICE && b->desc->wrap.kind != XD_WRAP_FSDP;
    return moves ? xdi_builder_take(b) : XD_OK;
}

static void xdi_builder_set_casts(xdi_builder *b) {
    for (int i = 0; i < b->list->count; i++) xdi_stage_set_casts(b->desc, &b->list->stages[i]);
}

static xd_result xdi_builder_precision(xdi_builder *b) {
    for (int i = 0; i < b->list->count; i++)
        XD_TRY(xdi_model_lower(b->list->stages[i].model, &b->desc->precision));
    xdi_builder_set_casts(b);
    return XD_OK;
}

static xd_result xdi_builder_call_init(const xdi_builder *b, xd_model *model) {
    const xd_block_init *init = &b->desc->init;
    int index = 0;
    for (xd_block *block = &model->root; block && init->call; block = xdi_block_after(block)) {
        xdi_clear_error(b->ctx);
        XD_TRY(xdi_builder_called(b->ctx, init->call(init->user, model, block), "init of block", index++));
    }
    return XD_OK;
}

/* Under FSDP buffers alone have storage, which the wrapper keeps whole: it forms the parts of the others. */
static xd_result xdi_builder_first_values(xdi_builder *b) {
    const bool sharded = b->desc->wrap.kind == XD_WRAP_FSDP;
    if (b->desc->storage == XD_STORAGE_CALLER || (sharded && !b->desc->init.call)) return XD_OK;
    if (b->desc->storage == XD_STORAGE_META || sharded) XD_TRY(xdi_builder_take(b));
    for (int i = 0; i < b->list->count; i++) {
        xd_model *model = b->list->stages[i].model;
        XD_TRY(xdi_builder_call_init(b, model));
        if (!sharded) XD_TRY(xd_model_init_weights(model));
    }
    return XD_OK;
}

/* What was taken for buffers alone is given back where the wrap failed, so that the caller can allocate his models. */
static void xdi_builder_leave_buffers(const xdi_builder *b) {
    if (b->desc->wrap.kind != XD_WRAP_FSDP || !b->desc->init.call) return;
    for (int i = 0; i < b->list->count; i++) {
        xd_model *model = b->list->stages[i].model;
        if (!model->buffers_alone || model->parallel) continue;
        xdi_model_release(model);
        for (int64_t k = 0; k < model->weight_count; k++)
            model->weights[k]->ready = model->weights[k]->ready && model->weights[k]->value;
    }
}

/* ---- 7: wrap ---- */

/* Whether a rank of a group has experts in a model: all of them then have some in this stage, or the wrapper says who has not. */
static xd_result xdi_model_has_experts(const xd_model *model, xd_comm *data, bool *out) {
    int64_t some = 0;
    for (int64_t i = 0; i < model->weight_count; i++)
        if (model->weights[i]->desc.traits.expert) some = 1;
    XD_TRY(xd_all_reduce(data, &some, &some, 1, XD_DTYPE_I64, XD_MAX));
    *out = some > 0;
    return XD_OK;
}

/* What the caller's settings leave out: the ranks of the build's groups that hold the same experts. */
static xd_result xdi_builder_expert_ranks(const xdi_builder *b, const xd_model *model, xd_comm *data,
                                          bool replicas, xd_expert_ranks *out) {
    bool some = false;
    if (!b->experts || out->data) return XD_OK;
    XD_TRY(xdi_model_has_experts(model, data, &some));
    if (!some) return XD_OK;
    out->data = replicas ? b->groups.intra_expert_dp : b->groups.expert_dp;
    if (replicas) out->replicas = b->groups.inter_expert_instances;
    if (!out->data) out->data = b->built->self;
    return XD_OK;
}

/* The settings of one stage, of the wrapper's kind. */
typedef struct xdi_builder_settings {
    xd_ddp_desc ddp;
    xd_fsdp_desc fsdp;
    bool replicas;
} xdi_builder_settings;

/* What the build says of a stage, then the caller. */
static xd_result xdi_builder_settle(const xdi_builder *b, int index, xdi_builder_settings *out) {
    const xd_wrap *wrap = &b->desc->wrap;
    const xd_stage *stage = &b->list->stages[index];
    const bool ddp = wrap->kind == XD_WRAP_DDP;
    memset(out, 0, sizeof *out);
    if (ddp) out->ddp = *wrap->ddp;
    if (!ddp) out->fsdp = *wrap->fsdp;
    if (!out->ddp.groups) out->ddp.groups = &b->groups;
    if (!out->fsdp.groups) out->fsdp.groups = &b->groups;
    out->ddp.stage = stage->place.pipeline_rank;
    out->ddp.chunk = index;
    xdi_clear_error(b->ctx);
    if (b->desc->wrap_settings.call)
        XD_TRY(
            xdi_builder_called(b->ctx,
                               b->desc->wrap_settings.call(b->desc->wrap_settings.user, stage,
                                                           ddp ? &out->ddp : NULL, ddp ? NULL : &out->fsdp),
                               "the settings of stage", index));
    out->replicas = (ddp ? out->ddp.replicas : out->fsdp.replicas) != NULL;
    XD_REQUIRE(b->ctx, !out->replicas || b->groups.intra_dp_cp, XD_ERROR_ARGUMENT,
               "stage %d of %d with replicas shards over intra_dp_cp, which is NULL", index, b->list->count);
    return XD_OK;
}

static xd_result xdi_builder_wrap_one(const xdi_builder *b, xd_comm *data, int index) {
    xd_stage *stage = &b->list->stages[index];
    xdi_builder_settings s;
    XD_TRY(xd_agree(data, xdi_builder_settle(b, index, &s)));
    const bool ddp = b->desc->wrap.kind == XD_WRAP_DDP;
    if (s.replicas) data = b->groups.intra_dp_cp;
    XD_TRY(
        xdi_builder_expert_ranks(b, stage->model, data, s.replicas, ddp ? &s.ddp.experts : &s.fsdp.experts));
    stage->model->yields = s.ddp.sharded_optimizer && s.ddp.gathers;
    s.ddp.data = s.fsdp.data = data;
    XD_TRY(ddp ? xd_ddp_create(stage->model, &s.ddp, &stage->parallel)
               : xd_fsdp_create(stage->model, &s.fsdp, &stage->parallel));
    stage->parallel->place.settings.stages = b->list->count;
    return XD_OK;
}

static xd_result xdi_builder_wrap_all(xdi_builder *b) {
    xd_result result = XD_OK;
    if (b->desc->wrap.kind == XD_WRAP_NONE) return XD_OK;
    if (!b->data || (b->experts && !b->groups.expert_dp)) result = xd_comm_self(b->ctx, &b->built->self);
    XD_TRY(xd_agree(b->world, result));
    for (int i = 0; i < b->list->count; i++)
        XD_TRY(xdi_builder_wrap_one(b, b->data ? b->data : b->built->self, i));
    return XD_OK;
}

static xd_result xdi_builder_wrap(xdi_builder *b) {
    XD_TRY(xdi_builder_equalise(b));
    XD_TRY(xd_agree(b->world, xdi_builder_wrap_all(b)));
    XD_TRY(xdi_builder_call_hooks(b, true));
    xdi_builder_set_casts(b); /* of stages that hooks have added, too */
    return XD_OK;
}

/* ---- all of it ---- */

static xd_result xdi_builder_run(xdi_builder *b, bool existing) {
    static xd_result (*const steps[])(xdi_builder *) = { xdi_builder_describe,   xdi_builder_before,
                                                         xdi_builder_attributes, xdi_builder_storage,
                                                         xdi_builder_precision,  xdi_builder_first_values,
                                                         xdi_builder_wrap };
    if (existing) XD_TRY(xd_agree(b->world, xdi_builder_seal(b)));
    for (size_t i = existing ? 2 : 0; i < sizeof steps / sizeof steps[0]; i++)
        XD_TRY(xd_agree(b->world, steps[i](b)));
    return XD_OK;
}

/* Agrees on the settings, and makes the empty result on all ranks or on none. */
static xd_result xdi_builder_open(xdi_builder *b, const xd_stages *existing) {
    xd_result result = xdi_builder_validate(b, existing);
    if (result == XD_OK && existing) result = xdi_stages_check(b->ctx, existing, "the list of stages");
    for (int i = 0; result == XD_OK && existing && i < existing->count; i++)
        if (existing->stages[i].parallel)
            result = XD_FAIL(b->ctx, XD_ERROR_STATE, "stage %d of %d is wrapped already", i, existing->count);
    XD_TRY(xd_agree(b->world, result));
    XD_TRY(xdi_builder_agree_settings(b, existing != NULL));
    b->built = XDI_OBJECT(xd_built, b->ctx, sizeof *b->built);
    result = xd_agree(
        b->world,
        b->built ? XD_OK : XD_FAIL(b->ctx, XD_ERROR_MEMORY, "no room for %d stages", (int)XD_STAGES_MAX));
    if (result != XD_OK) {
        xd_release(b->ctx, b->built);
        return result;
    }
    b->built->ctx = b->ctx;
    b->list = &b->built->list;
    b->built->lent = existing;
    if (existing) *b->list = *existing;
    return XD_OK;
}

XD_API xd_result xd_build(xd_comm *world, const xd_build_desc *desc, xd_built **out) {
    XDI_GIVEN_COMM(world, desc, out);
    const xd_stages *existing = desc->stages;
    xdi_builder b;
    memset(&b, 0, sizeof b);
    b.ctx = xd_comm_ctx(world);
    b.world = world;
    b.desc = desc;
    if (desc->groups) b.groups = *desc->groups;
    b.data = b.groups.dp_cp ? b.groups.dp_cp : b.groups.dp;
    XD_TRY(xdi_builder_open(&b, existing));
    const xd_result result = xdi_builder_run(&b, existing != NULL);
    if (result != XD_OK) {
        xdi_builder_leave_buffers(&b);
        xd_built_destroy(b.built);
        return result;
    }
    b.built->lent = NULL;
    *out = b.built;
    return XD_OK;
}

XD_API void xd_built_destroy(xd_built *built) {
    if (!built || XDI_IS_GONE(xd_built, built)) return;
    for (int i = built->list.count - 1; i >= 0; i--) {
        xd_stage *stage = &built->list.stages[i];
        xd_parallel_destroy(stage->parallel);
        if (!built->lent || !xdi_stages_have(built->lent, stage->model)) xd_model_destroy(stage->model);
    }
    xd_comm_destroy(built->self);
    xd_release(built->ctx, built);
}

XD_PRIVATE xd_ctx *xdi_built_ctx(const xd_built *built) {
    return built->ctx;
}

XD_API int xd_built_stage_count(const xd_built *built) {
    XD_ASSERT(built);
    return built->list.count;
}

XD_API xd_stage xd_built_stage(const xd_built *built, int index) {
    XD_ASSERT(built);
    xd_stage none;
    memset(&none, 0, sizeof none);
    return index >= 0 && index < built->list.count ? built->list.stages[index] : none;
}
