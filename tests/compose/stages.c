/* stages.c - the network in stages: described by a provider, wrapped by a build, trained by a pipeline. */
#include "rank.h"

#include <string.h>

bool is_staged(const rank *r) {
    const compose_layout *l = r->job->layout;
    return l->pp > 1 || r->job->config->size.copies || (r->job->config->hooked && !l->late);
}

/* ---- set-up ---- */

static xd_result seal_filled(const rank *r, xd_model *model) {
    XD_TRY(xd_model_seal(model));
    return fill_model(r, model);
}

/* Step 6 of a build, where its weights have storage. */
static bool loads_in_init(const rank *r) {
    return r->job->config->hooked > 1 && !is_fsdp(r->job->layout);
}

static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    rank *r = (rank *)user;
    const toy_cut cut = { place->first, place->last, (int)place->first_layer,
                          (int)(place->first_layer + place->layer_count) };
    const compose_config *c = r->job->config;
    toy *t = &r->stages[r->stage_count], *source = &r->sources[r->stage_count];
    r->stage_count++;
    t->share = source->share = r->share;
    XD_TRY(toy_describe_stage(ctx, &c->size, &cut, t));
    *out = t->model;
    if (!c->filled || r->job->layout->late) return XD_OK;
    if (!c->hooked) return seal_filled(r, t->model);
    if (!loads_in_init(r)) return XD_OK;
    XD_TRY(toy_describe_stage(ctx, &c->size, &cut, source));
    return seal_filled(r, source->model);
}

/* The hook before the wrap; the list stays as it is. */
static xd_result fill_stages(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    (void)ctx;
    (void)out;
    for (int i = 0; i < in->count; i++) XD_TRY(seal_filled((const rank *)user, in->stages[i].model));
    return XD_OK;
}

/* The init callback: a block's values come from the source of its stage. */
static xd_result load_block(void *user, xd_model *model, xd_block *block) {
    const rank *r = (const rank *)user;
    int stage = 0;
    while (r->stages[stage].model != model) stage++;
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
        xd_weight *weight = xd_model_weight_at(model, i);
        const xd_weight_info to = xd_weight_describe(weight);
        const xd_weight_info from = xd_weight_describe(xd_model_weight_at(r->sources[stage].model, i));
        if (to.block != block || to.owner != weight) continue;
        XD_REQUIRE(r->ctx, to.value || to.count == 0, XD_ERROR_STATE, "\"%s\" has no storage to load into",
                   to.name);
        if (to.count > 0) memcpy(to.value, from.value, (size_t)to.count * xd_dtype_size(to.desc->dtype));
        XD_TRY(xd_weight_set_ready(weight));
    }
    return XD_OK;
}

/* As compose_layout.uneven says. */
static void deal_layers(int64_t layers, int chunks, int uneven, int64_t *out) {
    const int skip = uneven == 3 && chunks > 2, inner = chunks - 2 * skip;
    for (int i = 0; i < chunks; i++) {
        const int at = i - skip;
        out[i] = at >= 0 && at < inner ? layers / inner + (at < layers % inner) : 0;
        if (uneven == 1) out[i] = i == 0 ? layers : 0;
        if (uneven == 2) out[i] = i == chunks - 1 ? layers : 0;
    }
}

static xd_result make_built(rank *r) {
    const compose_layout *l = r->job->layout;
    const wrap_settings s = settings_of(r);
    int64_t layers[STAGES * STAGES];
    xd_build_desc d = { .groups = &r->groups, .provider = { describe, r } };
    xd_stage_hooks before = { 0, { { NULL, NULL } } };
    deal_layers(r->job->config->size.layers, l->pp * l->stages, l->uneven, layers);
    d.pipeline.layer_count = r->job->config->size.layers;
    d.pipeline.virtual_stages = l->stages;
    d.pipeline.chunk_layers = layers;
    d.wrap.kind = is_fsdp(l) ? XD_WRAP_FSDP : XD_WRAP_DDP;
    if (is_fsdp(l))
        d.wrap.fsdp = &s.fsdp;
    else
        d.wrap.ddp = &s.ddp;
    if (r->job->config->hooked && !l->late && !loads_in_init(r))
        before.hooks[before.count++] = (xd_stage_hook){ fill_stages, r };
    d.before = &before;
    if (loads_in_init(r) && !l->late) d.init = (xd_block_init){ load_block, r };
    if (r->job->config->hooked == 3) d.storage = XD_STORAGE_META;
    const xd_result result = xd_build(r->world, &d, &r->built);
    for (int i = 0; i < r->stage_count; i++) toy_destroy(&r->sources[i]);
    return result;
}

static xd_result make_pipeline(rank *r) {
    const compose_layout *l = r->job->layout;
    xd_comm *pp = r->groups.pp;
    xd_pipeline_counts counts;
    const xd_pipeline_run_desc d = { .schedule = { .ranks = l->pp,
                                                   .virtual_stages = l->stages,
                                                   .micro_batches =
                                                       xd_parallel_micro_batches(stages_lead(r)).opened },
                                     .ndim = 2,
                                     .shape = { r->job->config->size.rows, TOY_HIDDEN },
                                     .dtype = XD_DTYPE_F32,
                                     .built = r->built,
                                     .data = r->data,
                                     .gathers = is_fsdp(l),
                                     .world = r->world,
                                     .sends = r->sends };
    XD_TRY(xd_pipeline_measure(r->ctx, &d.schedule, xd_comm_rank(pp), &counts));
    r->slots = counts.forwards;
    return xd_pipeline_create(pp, &d, &r->pipeline);
}

xd_result stages_make(rank *r) {
    XD_TRY(make_built(r));
    return make_pipeline(r);
}

void stages_close(rank *r) {
    xd_pipeline_destroy(r->pipeline);
    xd_built_destroy(r->built);
}

const xd_parallel *stages_lead(const rank *r) {
    return xd_built_stage(r->built, 0).parallel;
}

/* Copies have the same first values, which say their place alone. */
static xd_result fill_copies(rank *r) {
    for (int64_t i = 0; i < r->count && r->job->config->size.copies; i++) {
        const xd_tensor_part *p = &r->parts[i];
        if (!strstr(p->name, ".copy")) continue;
        for (int64_t at = p->range.begin; at < p->range.end; at++) {
            const float value = toy_number(7, share_whole_place(p, at), 3);
            unsigned char *to =
                (unsigned char *)p->data + (size_t)(at - p->range.begin) * xd_dtype_size(p->dtype);
            XD_TRY(xd_cast(r->home, to, p->dtype, &value, XD_DTYPE_F32, 1));
        }
    }
    return stages_publish(r);
}

xd_result stages_list(rank *r) {
    XD_TRY(xd_built_params(r->built, r->toy.model, PARTS, r->params, &r->count));
    XD_TRY(xd_built_parts(r->built, r->toy.model, PARTS, r->parts, &r->count));
    XD_TRY(fill_parts(r));
    return fill_copies(r);
}

/* ---- steps ---- */

static toy_pass pass_of(rank *r, const xd_pipeline_call *call) {
    toy_pass p;
    memset(&p, 0, sizeof p);
    p.kind = call->pass;
    p.step = r->step;
    p.leaf = xd_parallel_micro_batch(call->stage.parallel, call->micro_batch);
    p.k = call->micro_batch;
    p.recompute = r->job->config->recompute != 0;
    p.kept = &r->kept[call->slot];
    return p;
}

static float *logits_of(rank *r, const xd_pipeline_call *call) {
    return r->logits + call->slot * r->rows_here * r->columns;
}

static xd_result forward(void *user, const xd_pipeline_call *call) {
    rank *r = (rank *)user;
    toy_pass p = pass_of(r, call);
    p.input = (const float *)call->input;
    p.output = call->output ? (float *)call->output : logits_of(r, call);
    XD_TRY(toy_forward(&r->stages[call->stage.place.virtual_stage], &p));
    if (!call->stage.place.last || call->pass == XD_PASS_INFERENCE || p.leaf < 0) return XD_OK;
    return take_loss(r, call->micro_batch, 1, p.output, false);
}

static xd_result backward(void *user, const xd_pipeline_call *call) {
    rank *r = (rank *)user;
    toy_pass p = pass_of(r, call);
    p.input = call->output_gradient ? (const float *)call->output_gradient : logits_of(r, call);
    p.output = (float *)call->input_gradient;
    return toy_backward(&r->stages[call->stage.place.virtual_stage], &p);
}

xd_result stages_step(rank *r, int step) {
    const xd_pipeline_calls calls = { forward, backward, r };
    const xd_pipeline_finish_desc finish = { .groups = &r->groups, .built = r->built };
    r->step = step;
    XD_TRY(xd_pipeline_run(r->pipeline, &calls, NULL));
    return xd_pipeline_finish(r->world, &finish);
}

xd_result stages_infer(rank *r, int step) {
    const xd_pipeline_calls calls = { forward, NULL, r };
    r->step = step + 50;
    return xd_pipeline_run(r->pipeline, &calls, NULL);
}

xd_result stages_publish(rank *r) {
    for (int i = 0; i < xd_built_stage_count(r->built); i++)
        XD_TRY(xd_parallel_publish(xd_built_stage(r->built, i).parallel));
    return XD_OK;
}

xd_result stages_thaw(rank *r, const char *name) {
    for (int i = 0; i < xd_built_stage_count(r->built); i++) {
        const xd_stage stage = xd_built_stage(r->built, i);
        xd_weight *weight = xd_model_find_weight(stage.model, name);
        if (weight) XD_TRY(xd_parallel_thaw(stage.parallel, weight));
    }
    return XD_OK;
}
