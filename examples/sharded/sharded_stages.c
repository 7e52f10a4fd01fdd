/* sharded_stages.c - the student in the stages of a pipeline: each wrapped by itself, all of them trained by xd_pipeline_run.
 *
 * The first stage has the embedding, the last one the head, the loss and the teacher; the layers are dealt over all of them. Every
 * sequence of a batch is a micro-batch. */
#include "sharded.h"

#include <string.h>

/* What the last stage reports of a micro-batch. */
enum { STAGES_LOSS, STAGES_HARD, STAGES_SOFT, STAGES_VALUES };

/* ---- building ---- */

/* Layers in chunks as equal as they get, the first ones longer: the last one has the head. */
static void stages_deal(int64_t layers, int chunks, int64_t *out) {
    for (int i = 0; i < chunks; i++) out[i] = layers / chunks + (i < layers % chunks);
}

/* The bytes of descriptions are no part of the plan. */
static xd_result stages_describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    sharded_student *s = (sharded_student *)user;
    sharded_stages *t = &s->stages;
    sharded_stage *stage = &t->stage[t->count];
    const int64_t before = sharded_counted();
    stage->model = s->rank->model; /* its table of weights too */
    stage->model.cut.is = true;
    stage->model.cut.first = place->first;
    stage->model.cut.last = place->last;
    stage->model.cut.begin = (int)place->first_layer;
    stage->model.cut.end = (int)(place->first_layer + place->layer_count);
    t->count++;
    XD_TRY(nn_describe(ctx, &stage->model, t->seed, XD_DTYPE_F32, &stage->description));
    stage->blocks.blocks.model = stage->description.model;
    stage->blocks.blocks.cut = &stage->model.cut;
    stage->blocks.student = s;
    stage->source = sharded_blocks_source(&stage->blocks);
    *out = stage->description.model;
    t->described += sharded_counted() - before;
    return XD_OK;
}

static bool stages_gather(const sharded_leg *leg) {
    return leg->wrap == SHARDED_FSDP || leg->wrap == SHARDED_HSDP;
}

static xd_result stages_build(sharded_student *s, const sharded_leg *leg) {
    static const char *const units[] = { NN_LAYER_TYPE };
    sharded_stages *t = &s->stages;
    const int chunks = leg->pp * leg->vpp;
    int64_t layers[SHARDED_MOST_CHUNKS];
    xd_fsdp_desc fsdp;
    xd_ddp_desc ddp;
    xd_build_desc d;
    memset(&fsdp, 0, sizeof fsdp);
    memset(&ddp, 0, sizeof ddp);
    memset(&d, 0, sizeof d);
    stages_deal(s->rank->model.config.layers, chunks, layers);
    ddp.micro_batches = fsdp.micro_batches = DEMO_BATCH;
    ddp.sharded_optimizer = leg->wrap == SHARDED_OPTIMIZER;
    fsdp.unit_types = units;
    fsdp.unit_type_count = 1;
    fsdp.replicas = s->replicas;
    d.groups = t->groups;
    d.provider.describe = stages_describe;
    d.provider.user = s;
    d.storage = XD_STORAGE_CALLER; /* the wrappers make it */
    d.pipeline.layer_count = s->rank->model.config.layers;
    d.pipeline.virtual_stages = leg->vpp;
    d.pipeline.chunk_layers = layers;
    d.wrap.kind = stages_gather(leg) ? XD_WRAP_FSDP : XD_WRAP_DDP;
    if (stages_gather(leg))
        d.wrap.fsdp = &fsdp;
    else
        d.wrap.ddp = &ddp;
    return xd_build(s->world, &d, &t->built);
}

/* Of stages that a rank has not there is nothing here, but every rank lists all weights. */
static xd_result stages_list(sharded_student *s) {
    const int64_t most = s->rank->model.param_count;
    for (int i = 0; i < s->stages.count; i++) {
        const xd_parallel_bytes bytes = xd_parallel_memory(xd_built_stage(s->stages.built, i).parallel);
        s->planned += bytes.values + bytes.gradients + bytes.gathered + bytes.whole_gradients;
    }
    XD_TRY(xd_built_params(s->stages.built, s->model, most, s->params, &s->count));
    return xd_built_parts(s->stages.built, s->model, most, s->parts, &s->count);
}

/* ---- the pipeline ---- */

/* Its queue has a thread between processes that may have more than one. */
static xd_result stages_make_pipeline(sharded_student *s, const sharded_leg *leg) {
    sharded_stages *t = &s->stages;
    const int rank = xd_comm_rank(t->groups->pp);
    xd_pipeline_run_desc d;
    xd_pipeline_counts counts;
    xd_planned planned;
    memset(&d, 0, sizeof d);
    d.schedule.ranks = leg->pp;
    d.schedule.virtual_stages = leg->vpp;
    d.schedule.micro_batches = s->rank->most_passes;
    d.ndim = 2;
    d.shape[0] = DEMO_ROW;
    d.shape[1] = s->rank->model.config.hidden;
    d.dtype = XD_DTYPE_F32;
    d.value_count = STAGES_VALUES;
    d.built = t->built;
    d.data = s->data;
    d.gathers = stages_gather(leg);
    d.world = s->world;
    XD_TRY(xd_queue_create(t->groups->pp, NULL, &t->sends));
    const int64_t before = sharded_counted();
    d.sends = t->sends;
    XD_TRY(xd_pipeline_measure(s->rank->ctx, &d.schedule, rank, &counts));
    XD_TRY(xd_plan_begin(s->rank->ctx, NULL));
    XD_TRY(xd_pipeline_create(t->groups->pp, &d, &t->pipeline)); /* NULL: a plan makes nothing */
    XD_TRY(xd_plan_end(s->rank->ctx, &planned));
    XD_TRY(xd_pipeline_create(t->groups->pp, &d, &t->pipeline));
    t->slots = counts.forwards;
    s->planned += planned.memory.host;
    s->counted += (uint64_t)(sharded_counted() - before);
    return XD_OK;
}

/* What forwards keep until their backwards. */
static xd_result stages_make_slots(sharded_student *s) {
    sharded_stages *t = &s->stages;
    bool failed = false;
    nn_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.positions = DEMO_ROW;
    for (int i = 0; i < t->count; i++) {
        const int64_t floats = nn_workspace_floats(&t->stage[i].model, &batch, true);
        t->workspace_floats = floats > t->workspace_floats ? floats : t->workspace_floats;
    }
    t->logit_floats = DEMO_ROW * (int64_t)s->rank->model.share.vocab_count;
    t->workspace = demo_floats(s->rank, t->slots * t->workspace_floats, &failed);
    t->logits = demo_floats(s->rank, s->rank->asks_nobody ? 0 : t->slots * t->logit_floats, &failed);
    return failed ? XD_FAIL(s->rank->ctx, XD_ERROR_MEMORY, "no room for %lld forwards", (long long)t->slots)
                  : XD_OK;
}

xd_result sharded_stages_join(sharded_stages *t, xd_comm *world, const sharded_leg *leg) {
    xd_expert_desc sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.tp = leg->axes.tp;
    sizes.pp = leg->pp;
    if (leg->wrap == SHARDED_HSDP) sizes.optimizer_instances = SHARDED_GROUPS;
    XD_TRY(xd_grid_create(world, &sizes, &t->grid));
    t->groups = xd_grid_groups(t->grid);
    return XD_OK;
}

xd_result sharded_stages_open(sharded_student *s, const sharded_leg *leg, uint64_t seed) {
    sharded_stages *t = &s->stages;
    const int64_t before = sharded_counted();
    t->seed = seed;
    s->data = leg->wrap == SHARDED_HSDP ? t->groups->intra_dp_cp : t->groups->dp_cp;
    s->replicas = leg->wrap == SHARDED_HSDP ? t->groups->inter_instances : NULL;
    s->rank->staged = true;
    s->rank->asks_nobody = xd_comm_rank(t->groups->pp) < leg->pp - 1;
    XD_TRY(stages_build(s, leg));
    s->counted += (uint64_t)(sharded_counted() - before - t->described);
    sharded_take_leaves(s, xd_built_stage(t->built, 0).parallel);
    XD_TRY(stages_make_pipeline(s, leg));
    XD_TRY(xd_agree(s->world, stages_make_slots(s)));
    XD_TRY(xd_agree(s->world, sharded_make_lists(s)));
    return xd_agree(s->world, stages_list(s));
}

void sharded_stages_close(sharded_student *s) {
    sharded_stages *t = &s->stages;
    xd_release(s->rank->ctx, t->workspace);
    xd_release(s->rank->ctx, t->logits);
    xd_pipeline_destroy(t->pipeline);
    xd_queue_destroy(t->sends);
    xd_built_destroy(t->built);
    for (int i = 0; i < t->count; i++) {
        t->stage[i].description.model = NULL; /* the build's */
        if (t->stage[i].description.ctx) nn_description_free(&t->stage[i].description);
    }
}

/* ---- passes ---- */

/* A step that is going on. */
typedef struct stages_step {
    sharded_student *student;
    const demo_arm *arm;
    double chunks;
} stages_step;

static sharded_stage *stages_enter(const stages_step *step, const xd_pipeline_call *call, nn_batch *batch,
                                   nn_ends *ends) {
    sharded_student *s = step->student;
    sharded_stages *t = &s->stages;
    sharded_stage *stage = &t->stage[call->stage.place.virtual_stage];
    stage->blocks.blocks.micro_batch = call->micro_batch;
    *batch = s->rank->part;
    batch->ids = s->rank->ids + call->micro_batch * DEMO_ROW;
    ends->workspace = t->workspace + call->slot * t->workspace_floats;
    return stage;
}

static xd_result stages_forward(void *user, const xd_pipeline_call *call) {
    const stages_step *step = (const stages_step *)user;
    sharded_stages *t = &step->student->stages;
    demo_rank *r = step->student->rank;
    float *logits = t->logits + call->slot * t->logit_floats;
    demo_leaf_loss loss;
    nn_batch batch;
    nn_ends ends;
    const sharded_stage *stage = stages_enter(step, call, &batch, &ends);
    if (call->micro_batch >= r->passes)
        return (xd_result)nn_pass_by(&stage->model, &stage->source, NN_FORWARD);
    ends.input = (const float *)call->input;
    ends.output = call->output ? (float *)call->output : logits;
    XD_TRY((xd_result)nn_forward_stage(&stage->model, &stage->source, &batch, true, &ends));
    if (!call->values) return XD_OK;
    XD_TRY(demo_leaf_learn(r, step->arm, (int)call->micro_batch, step->chunks, logits, &loss));
    call->values[STAGES_LOSS] = loss.loss;
    call->values[STAGES_HARD] = loss.hard;
    call->values[STAGES_SOFT] = loss.soft;
    return XD_OK;
}

static xd_result stages_backward(void *user, const xd_pipeline_call *call) {
    const stages_step *step = (const stages_step *)user;
    sharded_stages *t = &step->student->stages;
    nn_batch batch;
    nn_ends ends;
    const sharded_stage *stage = stages_enter(step, call, &batch, &ends);
    if (call->micro_batch >= step->student->rank->passes)
        return (xd_result)nn_pass_by(&stage->model, &stage->source, NN_BACKWARD);
    ends.input = call->output_gradient ? (const float *)call->output_gradient
                                       : t->logits + call->slot * t->logit_floats;
    ends.output = (float *)call->input_gradient;
    return (xd_result)nn_backward_stage(&stage->model, &stage->source, &batch, &ends);
}

static void stages_read_values(const double *values, demo_leaf_loss *out) {
    out->loss = values[STAGES_LOSS];
    out->hard = values[STAGES_HARD];
    out->soft = values[STAGES_SOFT];
}

xd_result sharded_stages_learn(sharded_student *s, const demo_arm *arm, demo_step *out) {
    sharded_stages *t = &s->stages;
    stages_step step = { s, arm, 0.0 };
    const xd_pipeline_calls calls = { stages_forward, stages_backward, &step };
    xd_pipeline_finish_desc finish;
    double values[DEMO_BATCH * STAGES_VALUES];
    demo_leaf_loss own[DEMO_BATCH];
    memset(&finish, 0, sizeof finish);
    finish.groups = t->groups;
    finish.built = t->built;
    if (!s->rank->asks_nobody) XD_TRY(demo_count_chunks(s->rank, arm, &step.chunks));
    XD_TRY(xd_pipeline_run(t->pipeline, &calls, values));
    for (int k = 0; k < s->rank->passes; k++) stages_read_values(values + k * STAGES_VALUES, &own[k]);
    XD_TRY(demo_sum_leaves(s->rank, own, out));
    const double start = xd_now(s->rank->ctx);
    XD_TRY(xd_pipeline_finish(s->world, &finish));
    s->wrapper_seconds += xd_now(s->rank->ctx) - start;
    return XD_OK;
}

xd_result sharded_stages_publish(sharded_student *s) {
    for (int i = 0; i < s->stages.count; i++)
        XD_TRY(xd_parallel_publish(xd_built_stage(s->stages.built, i).parallel));
    return XD_OK;
}
