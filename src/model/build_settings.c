/* Settings of a build: what is refused before anything is built, and what all ranks must say alike. */

#include "comm/internal.h"
#include "model/build_internal.h"

#include <string.h>

/* ---- one rank ---- */

static xd_result xdi_builder_check_groups(const xdi_builder *b) {
    const xd_groups *g = &b->groups;
    const int dp = xdi_group_size(g->dp), cp = xdi_group_size(g->cp), dp_cp = xdi_group_size(g->dp_cp);
    XD_REQUIRE(b->ctx, !g->dp_cp || (!g->dp && !g->cp) || (int64_t)dp * cp == dp_cp, XD_ERROR_TOPOLOGY,
               "groups dp of %d and cp of %d ranks, but dp_cp of %d", dp, cp, dp_cp);
    XD_REQUIRE(b->ctx, g->dp_cp || cp == 1, XD_ERROR_TOPOLOGY,
               "group cp has %d ranks, and there is no dp_cp, whose ranks have the same weights", cp);
    XD_REQUIRE(b->ctx, b->desc->pipeline.ranks == 0 || b->desc->pipeline.ranks == xdi_group_size(g->pp),
               XD_ERROR_TOPOLOGY, "a pipeline of %d ranks, but group pp of %d", b->desc->pipeline.ranks,
               xdi_group_size(g->pp));
    return XD_OK;
}

static bool xdi_dtype_is_cast(xd_dtype dtype) {
    return dtype == XD_DTYPE_NONE || dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

static xd_result xdi_builder_check_precision(xd_ctx *ctx, const xd_precision *p) {
    XD_REQUIRE(ctx, !p->f16 || !p->bf16, XD_ERROR_ARGUMENT,
               "precision is both f16 and bf16: weights have one type");
    XD_REQUIRE(ctx, p->keep_count >= 0, XD_ERROR_ARGUMENT, "%d patterns of names to keep", p->keep_count);
    XD_REQUIRE(ctx, xdi_dtype_is_cast(p->input_dtype) && xdi_dtype_is_cast(p->output_dtype), XD_ERROR_DTYPE,
               "inputs as %s and outputs as %s: F32, BF16 and F16 are possible",
               xd_dtype_name(p->input_dtype), xd_dtype_name(p->output_dtype));
    XD_REQUIRE(ctx, p->keep_count == 0 || p->keep, XD_ERROR_ARGUMENT,
               "%d patterns of names to keep, but no list of them", p->keep_count);
    XD_REQUIRE(ctx, p->keep_count > 0 || !p->keep, XD_ERROR_ARGUMENT,
               "a list of names to keep, and keep_count %d", p->keep_count);
    for (int i = 0; i < p->keep_count; i++)
        XD_REQUIRE(ctx, p->keep[i], XD_ERROR_ARGUMENT, "pattern %d of %d to keep is NULL", i, p->keep_count);
    return XD_OK;
}

static xd_result xdi_builder_check_wrap(const xdi_builder *b) {
    const xd_wrap *w = &b->desc->wrap;
    XD_REQUIRE(b->ctx, (int)w->kind >= 0 && w->kind <= XD_WRAP_FSDP, XD_ERROR_ARGUMENT, "wrap %d is unknown",
               (int)w->kind);
    XD_REQUIRE(b->ctx, !w->ddp || !w->fsdp, XD_ERROR_ARGUMENT,
               "wrap has the settings of DDP and of FSDP: a model has one wrapper");
    XD_REQUIRE(b->ctx, w->kind != XD_WRAP_DDP || w->ddp, XD_ERROR_ARGUMENT,
               "wrap is DDP, without settings of DDP: ddp is NULL");
    XD_REQUIRE(b->ctx, w->kind != XD_WRAP_FSDP || w->fsdp, XD_ERROR_ARGUMENT,
               "wrap is FSDP, without settings of FSDP: fsdp is NULL");
    XD_REQUIRE(b->ctx, w->kind != XD_WRAP_NONE || (!w->ddp && !w->fsdp), XD_ERROR_ARGUMENT,
               "there are settings of %s, but wrap is NONE", w->ddp ? "DDP" : "FSDP");
    XD_REQUIRE(b->ctx, w->kind != XD_WRAP_NONE || !b->desc->wrap_settings.call, XD_ERROR_ARGUMENT,
               "there are settings of each stage, but wrap is NONE (%d)", (int)w->kind);
    const xd_comm *replicas = w->ddp ? w->ddp->replicas : w->fsdp ? w->fsdp->replicas : NULL;
    XD_REQUIRE(b->ctx, !replicas || b->groups.intra_dp_cp, XD_ERROR_ARGUMENT,
               "%s with replicas of %d groups shards over intra_dp_cp, which is NULL",
               w->ddp ? "DDP" : "FSDP", xdi_group_size(replicas));
    return XD_OK;
}

XD_PRIVATE const xd_stage_hooks *xdi_builder_hooks(const xd_build_desc *d, bool after) {
    if (after) return d->after_override ? d->after_override : d->after;
    return d->before_override ? d->before_override : d->before;
}

static xd_result xdi_builder_check_hooks(xd_ctx *ctx, const xd_stage_hooks *hooks, const char *when) {
    if (!hooks) return XD_OK;
    XD_REQUIRE(ctx, hooks->count >= 0 && hooks->count <= XD_STAGE_HOOKS_MAX, XD_ERROR_ARGUMENT,
               "%d hooks %s the wrap, at most %d are possible", hooks->count, when, (int)XD_STAGE_HOOKS_MAX);
    for (int i = 0; i < hooks->count; i++)
        XD_REQUIRE(ctx, hooks->hooks[i].call, XD_ERROR_ARGUMENT, "hook %d of %d %s the wrap has no function",
                   i, hooks->count, when);
    return XD_OK;
}

/* What the two ways of building take. */
static xd_result xdi_builder_check_source(const xdi_builder *b, const xd_stages *existing) {
    const xd_build_desc *d = b->desc;
    xd_pipeline_desc pipeline = d->pipeline;
    xd_stage_place place;
    if (existing) {
        XD_REQUIRE(b->ctx, !d->provider.describe && !d->before && !d->before_override, XD_ERROR_ARGUMENT,
                   "%d stages exist already: no provider and no hook before the wrap is called",
                   existing->count);
        return XD_OK;
    }
    XD_REQUIRE(b->ctx, d->provider.describe, XD_ERROR_ARGUMENT, "a build of %lld layers without a provider",
               (long long)d->pipeline.layer_count);
    pipeline.ranks = xdi_group_size(b->groups.pp);
    return xdi_pipeline_place(b->ctx, &pipeline, xdi_group_rank(b->groups.pp), 0, &place);
}

XD_PRIVATE xd_result xdi_builder_validate(const xdi_builder *b, const xd_stages *existing) {
    const xd_build_desc *d = b->desc;
    XD_TRY(xdi_builder_check_groups(b));
    XD_TRY(xdi_builder_check_source(b, existing));
    XD_TRY(xdi_builder_check_hooks(b->ctx, xdi_builder_hooks(d, false), "before"));
    XD_TRY(xdi_builder_check_hooks(b->ctx, xdi_builder_hooks(d, true), "after"));
    XD_REQUIRE(b->ctx, (int)d->storage >= 0 && d->storage <= XD_STORAGE_CALLER, XD_ERROR_ARGUMENT,
               "storage %d is unknown", (int)d->storage);
    XD_TRY(xdi_builder_check_precision(b->ctx, &d->precision));
    return xdi_builder_check_wrap(b);
}

/* ---- all ranks ---- */

static int64_t xdi_builder_hook_count(const xd_build_desc *d, bool after) {
    const xd_stage_hooks *hooks = xdi_builder_hooks(d, after);
    return hooks ? hooks->count : 0;
}

static void xdi_pipeline_list_settings(xdi_facts *f, const xd_pipeline_desc *d, int ranks) {
    const int stages = d->virtual_stages ? d->virtual_stages : 1;
    f->part = "pipeline";
    xdi_fact_integer(f, "virtual_stages", stages);
    xdi_fact_integer(f, "layer_count", d->layer_count);
    xdi_fact_bytes(f, "chunk_layers", d->chunk_layers,
                   d->chunk_layers ? (size_t)ranks * (size_t)stages * sizeof *d->chunk_layers : 0);
}

XD_PRIVATE xd_result xdi_builder_agree_settings(const xdi_builder *b, bool existing) {
    const xd_build_desc *d = b->desc;
    uint64_t keep = 0;
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "existing models", existing);
    xdi_fact_integer(&facts, "storage", d->storage);
    xdi_fact_integer(&facts, "precision.f16", d->precision.f16);
    xdi_fact_integer(&facts, "precision.bf16", d->precision.bf16);
    xdi_fact_integer(&facts, "precision.keep_count", d->precision.keep_count);
    xdi_fact_dtype(&facts, "precision.input_dtype", d->precision.input_dtype);
    xdi_fact_dtype(&facts, "precision.output_dtype", d->precision.output_dtype);
    xdi_fact_integer(&facts, "wrap.kind", d->wrap.kind);
    xdi_fact_integer(&facts, "wrap_settings", d->wrap_settings.call != NULL);
    xdi_fact_integer(&facts, "values.broadcast", d->values.broadcast);
    xdi_fact_integer(&facts, "values.without_buffers", d->values.without_buffers);
    xdi_fact_integer(&facts, "values.check", d->values.check);
    xdi_fact_integer(&facts, "number of hooks before the wrap", xdi_builder_hook_count(d, false));
    xdi_fact_integer(&facts, "number of hooks after it", xdi_builder_hook_count(d, true));
    for (int i = 0; i < d->precision.keep_count; i++)
        keep = xd_hash(keep, d->precision.keep[i], strlen(d->precision.keep[i]) + 1);
    xdi_fact_bytes(&facts, "precision.keep", &keep, sizeof keep);
    if (!existing) xdi_pipeline_list_settings(&facts, &d->pipeline, xdi_group_size(b->groups.pp));
    return xdi_agree_facts(b->world, &facts, "settings of a build");
}
