/* stages.c - the transformer cut into the stages of a pipeline, under a wrapper each, and trained by xd_pipeline_run. */
#include "train.h"
#include "../helpers/vocab_calls.h"

#include "../../examples/nn/nn_blocks.h"

#include <stdlib.h>
#include <string.h>

enum { STAGES = 4, STAGE_WEIGHTS = 64, STAGE_VALUES = 2 };

/* One of this rank's stages. */
typedef struct stage_part {
    nn_model model;
    nn_description description;
    nn_blocks blocks;
    nn_source source;
} stage_part;

typedef struct stage_state {
    const train_config *config;
    train_result *out;
    xd_ctx *ctx;
    xd_comm *world;
    xd_grid *grid;
    xd_groups own; /* those of the grid; of ranks that share a sequence dp alone has leaves */
    const xd_groups *groups;
    xd_comm *cp,
        *model_ranks; /* where sequences are shared: that group; the ranks that have the model once */
    int cp_rank;
    nn_model whole;
    stage_part parts[STAGES];
    int part_count;
    xd_queue *gathers, *reductions, *sends;
    xd_built *built;
    xd_pipeline *pipeline;
    xd_vocab *vocab;
    int64_t micro_batches, slots;
    int64_t room; /* rows of a leaf; those behind its positions here count nothing */
    train_sequence sequence;
    float *workspace, *logits, *teacher; /* [slots] */
    int64_t workspace_floats;
    int step;
    xd_param params[STAGE_WEIGHTS];
    xd_tensor_part tensors[STAGE_WEIGHTS];
    int64_t count;
    xd_optimizer *optimizer;
    xd_ema *average;
} stage_state;

/* ---- stages ---- */

static xd_result stage_describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    stage_state *s = (stage_state *)user;
    const nn_config config = train_model(true);
    stage_part *part = &s->parts[s->part_count];
    nn_group tp;
    memset(&tp, 0, sizeof tp);
    tp.size = s->config->tp;
    tp.rank = xd_comm_rank(s->groups->tp);
    tp.user = s->groups->tp;
    tp.all_reduce_sum = train_sum;
    tp.invariant = s->config->reduction == XD_REDUCTION_INVARIANT;
    tp.sum_pieces = nn_blocks_sum_pieces;
    const nn_group cp = train_share_group(s->config, s->cp_rank, s->cp);
    const char *problem = nn_model_init(&config, &tp, &cp, &part->model);
    if (problem) return XD_FAIL(ctx, XD_ERROR_ARGUMENT, "model: %s", problem);
    s->part_count++;
    part->model.cut.is = true;
    part->model.cut.first = place->first;
    part->model.cut.last = place->last;
    part->model.cut.begin = (int)place->first_layer;
    part->model.cut.end = (int)(place->first_layer + place->layer_count);
    part->model.cut.copies = s->config->copies;
    XD_TRY(nn_describe(ctx, &part->model, 5, s->config->bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                       &part->description));
    part->blocks.model = part->description.model;
    part->blocks.cut = &part->model.cut;
    part->source = nn_blocks_source(&part->blocks);
    *out = part->description.model;
    return XD_OK;
}

/* Layers in chunks as equal as they get, the first ones longer; or none in the first and the last. */
static void stage_chunks(const train_config *c, int chunks, int64_t *layers) {
    const int64_t all = train_model(true).layers, inner = c->uneven ? chunks - 2 : chunks;
    for (int i = 0; i < chunks; i++) {
        const int64_t at = c->uneven ? i - 1 : i;
        layers[i] = at >= 0 && at < inner ? all / inner + (at < all % inner) : 0;
    }
}

static xd_result stage_queues(stage_state *s) {
    const xd_queue_desc d = { .form = XD_QUEUE_WORKER, .capacity = STAGE_WEIGHTS };
    if (!s->config->workers) return XD_OK;
    XD_TRY(xd_queue_create(s->groups->pp, &d, &s->sends));
    XD_TRY(xd_queue_create(s->groups->dp, &d, &s->gathers));
    return xd_queue_create(s->groups->dp, &d, &s->reductions);
}

static xd_result stage_build(stage_state *s) {
    static const char *const units[] = { NN_LAYER_TYPE };
    const train_config *c = s->config;
    int64_t layers[STAGES * STAGES];
    stage_chunks(c, c->pp * (c->virtual_stages ? c->virtual_stages : 1), layers);
    XD_TRY(stage_queues(s));
    const xd_ddp_desc ddp = { .micro_batches = TRAIN_LEAVES,
                              .sharded_optimizer = c->wrap == TRAIN_SHARDED,
                              .view_dtype = XD_DTYPE_F32,
                              .gathers = s->gathers,
                              .reductions = s->reductions,
                              .bucket_size = 1000 };
    const xd_fsdp_desc fsdp = { .micro_batches = TRAIN_LEAVES,
                                .unit_types = units,
                                .unit_type_count = 1,
                                .accumulate_whole = c->whole,
                                .view_dtype = XD_DTYPE_F32,
                                .gathers = s->gathers,
                                .reductions = s->reductions,
                                .prefetch = c->workers };
    xd_build_desc d;
    memset(&d, 0, sizeof d);
    d.groups = s->groups;
    d.provider.describe = stage_describe;
    d.provider.user = s;
    d.pipeline.layer_count = train_model(true).layers;
    d.pipeline.virtual_stages = c->virtual_stages;
    d.pipeline.chunk_layers = layers;
    d.wrap.kind = c->wrap <= TRAIN_SHARDED ? XD_WRAP_DDP : XD_WRAP_FSDP;
    if (c->wrap <= TRAIN_SHARDED)
        d.wrap.ddp = &ddp;
    else
        d.wrap.fsdp = &fsdp;
    return xd_build(s->world, &d, &s->built);
}

static xd_result stage_pipeline(stage_state *s) {
    xd_pipeline_run_desc d;
    xd_pipeline_counts counts;
    memset(&d, 0, sizeof d);
    s->micro_batches = xd_parallel_micro_batches(xd_built_stage(s->built, 0).parallel).opened;
    d.schedule.ranks = s->config->pp;
    d.schedule.virtual_stages = s->config->virtual_stages;
    d.schedule.micro_batches = s->micro_batches;
    d.ndim = 2;
    d.shape[0] = s->room;
    d.shape[1] = train_model(true).hidden;
    d.dtype = XD_DTYPE_F32;
    d.value_count = STAGE_VALUES;
    d.built = s->built;
    d.data = s->groups->dp;
    d.gathers = s->config->wrap >= TRAIN_FSDP;
    d.world = s->world;
    d.sends = s->sends;
    XD_TRY(xd_pipeline_measure(s->ctx, &d.schedule, xd_comm_rank(s->groups->pp), &counts));
    s->slots = counts.forwards;
    return xd_pipeline_create(s->groups->pp, &d, &s->pipeline);
}

/* ---- weights ---- */

/* Where element `at` of a rank's share of a weight is among all weights. */
static int64_t stage_place(const stage_state *s, const char *name, int64_t at) {
    const nn_param *share = &s->parts[0].model.params[nn_param_find(&s->parts[0].model, name)];
    const nn_param *whole = &s->whole.params[nn_param_find(&s->whole, name)];
    const int64_t row = at / share->cols + share->row_begin, column = at % share->cols + share->col_begin;
    return whole->offset + row * whole->cols + column;
}

static bool stage_is_copy(const stage_state *s, const char *name) {
    return s->config->copies &&
           (strcmp(name, "lm_head.weight") == 0 || strcmp(name, "model.embed_tokens.weight") == 0);
}

/* Copies have the same first values: those of the place in the weight. */
static xd_result stage_fill_copies(stage_state *s) {
    for (int64_t i = 0; i < s->count && s->config->copies; i++) {
        const xd_tensor_part *part = &s->tensors[i];
        if (!stage_is_copy(s, part->name)) continue;
        const int64_t begin = s->whole.params[nn_param_find(&s->whole, part->name)].offset;
        for (int64_t at = part->range.begin; at < part->range.end; at++)
            ((float *)part->data)[at - part->range.begin] =
                0.01f * (float)((stage_place(s, part->name, at) - begin) * 7 % 11 - 5);
    }
    for (int i = 0; i < xd_built_stage_count(s->built); i++)
        XD_TRY(xd_parallel_publish(xd_built_stage(s->built, i).parallel));
    return XD_OK;
}

static xd_result stage_list(stage_state *s) {
    for (int i = 0; i < xd_built_stage_count(s->built); i++) {
        const xd_parallel *p = xd_built_stage(s->built, i).parallel;
        int64_t count = 0;
        XD_TRY(xd_parallel_params(p, STAGE_WEIGHTS - s->count, s->params + s->count, &count));
        XD_TRY(xd_parallel_parts(p, STAGE_WEIGHTS - s->count, s->tensors + s->count, &count));
        s->count += count;
    }
    return stage_fill_copies(s);
}

static xd_result stage_make_state(stage_state *s) {
    xd_optimizer_desc adamw = xd_adamw_defaults(s->params, s->count);
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_CONSTANT);
    adamw.learning_rate = 0.01;
    ema.decay = 0.9;
    ema.init_from_current = true;
    XD_TRY(xd_optimizer_create(s->ctx, &adamw, &s->optimizer));
    ema.params = s->params;
    ema.param_count = s->count;
    return xd_ema_create(s->ctx, &ema, &s->average);
}

static void stage_make_buffers(stage_state *s) {
    for (int i = 0; i < s->part_count; i++)
        for (int leaf = 0; leaf < TRAIN_LEAVES; leaf++) {
            const nn_batch batch = train_sequence_of(s->config, s->cp_rank, leaf, &s->sequence);
            const int64_t floats = nn_workspace_floats(&s->parts[i].model, &batch, true);
            s->workspace_floats = floats > s->workspace_floats ? floats : s->workspace_floats;
        }
    s->workspace = (float *)calloc((size_t)(s->slots * s->workspace_floats) + 1, sizeof(float));
    s->logits = (float *)calloc((size_t)(s->slots * s->room) * TRAIN_VOCAB, sizeof(float));
    s->teacher = (float *)calloc((size_t)s->room * TRAIN_VOCAB, sizeof(float));
}

/* ---- calls ---- */

/* The leaf of a call, what it holds, and the stage it goes through. */
typedef struct stage_work {
    stage_part *part;
    int64_t leaf;
    int32_t ids[TRAIN_MOST_POSITIONS];
    int64_t labels[TRAIN_MOST_POSITIONS];
    nn_batch batch;
    float *logits;
} stage_work;

static void stage_open(stage_state *s, const xd_pipeline_call *call, stage_work *w) {
    memset(w, 0, sizeof *w);
    w->part = &s->parts[call->stage.place.virtual_stage];
    w->leaf = xd_parallel_micro_batch(call->stage.parallel, call->micro_batch);
    w->part->blocks.micro_batch = call->micro_batch;
    w->logits = s->logits + call->slot * s->room * TRAIN_VOCAB;
    w->batch = train_sequence_of(s->config, s->cp_rank, w->leaf, &s->sequence);
    w->batch.ids = w->ids;
    const nn_share *share = &w->part->model.share;
    const train_data data = { w->ids,
                              w->labels,
                              s->teacher,
                              share->vocab_begin,
                              share->vocab_count,
                              s->sequence.first,
                              w->batch.positions };
    for (int i = 0; i < TRAIN_MOST_POSITIONS; i++) w->labels[i] = XD_IGNORE_INDEX;
    if (w->leaf >= 0) train_read_leaf(s->step, w->leaf, &data);
}

static xd_result stage_loss(stage_state *s, stage_work *w, double *loss) {
    const int width = w->part->model.share.vocab_count;
    xd_loss_values values;
    xd_loss_desc d;
    memset(&d, 0, sizeof d);
    d.student = xd_rows_of(w->logits, XD_DTYPE_F32, s->room, width);
    d.teacher = xd_rows_of(s->teacher, XD_DTYPE_F32, s->room, width);
    d.vocab = s->vocab;
    d.common.labels = xd_ids_of(w->labels, XD_DTYPE_I64);
    d.common.gradient = d.student;
    d.common.comm = s->cp;
    d.common.denominator_value = TRAIN_LEAVES * TRAIN_POSITIONS;
    d.hard_weight = 1.0;
    d.soft_weight = 0.5;
    XD_TRY(xd_loss(s->ctx, &d, &values));
    *loss = values.loss;
    return XD_OK;
}

static xd_result stage_forward(void *user, const xd_pipeline_call *call) {
    stage_state *s = (stage_state *)user;
    stage_work w;
    stage_open(s, call, &w);
    if (call->values) call->values[1] = (double)w.leaf;
    if (w.leaf < 0) return (xd_result)nn_pass_by(&w.part->model, &w.part->source, NN_FORWARD);
    const nn_ends ends = { s->workspace + call->slot * s->workspace_floats, (const float *)call->input,
                           call->output ? (float *)call->output : w.logits };
    const int code = nn_forward_stage(&w.part->model, &w.part->source, &w.batch, true, &ends);
    if (code || !call->values) return (xd_result)code;
    return stage_loss(s, &w, &call->values[0]);
}

static xd_result stage_backward(void *user, const xd_pipeline_call *call) {
    stage_state *s = (stage_state *)user;
    stage_work w;
    stage_open(s, call, &w);
    if (w.leaf < 0) return (xd_result)nn_pass_by(&w.part->model, &w.part->source, NN_BACKWARD);
    const nn_ends ends = { s->workspace + call->slot * s->workspace_floats,
                           call->output_gradient ? (const float *)call->output_gradient : w.logits,
                           (float *)call->input_gradient };
    return (xd_result)nn_backward_stage(&w.part->model, &w.part->source, &w.batch, &ends);
}

/* ---- steps ---- */

static xd_result stage_step(stage_state *s, int step) {
    const xd_pipeline_calls calls = { stage_forward, stage_backward, s };
    const xd_pipeline_finish_desc finish = { s->groups, s->built, false, 0 };
    double values[TRAIN_LEAVES * STAGE_VALUES];
    xd_gradient_norm_desc clip;
    xd_gradient_norm norm;
    xd_optimizer_step_desc d;
    memset(&clip, 0, sizeof clip);
    memset(&d, 0, sizeof d);
    s->step = step;
    XD_TRY(xd_pipeline_run(s->pipeline, &calls, values));
    for (int64_t i = 0; i < s->micro_batches; i++)
        if (values[i * STAGE_VALUES + 1] >= 0.0 && xd_comm_rank(s->groups->mp) == 0 && s->cp_rank == 0)
            s->out->leaf_losses[step][(int)values[i * STAGE_VALUES + 1]] = values[i * STAGE_VALUES];
    XD_TRY(xd_pipeline_finish(s->world, &finish));
    clip.params = s->params;
    clip.param_count = s->count;
    clip.max_norm = 0.05;
    XD_TRY(xd_gradient_norm_compute(s->ctx, s->model_ranks ? s->model_ranks : s->world, &clip, &norm));
    if (xd_comm_rank(s->world) == 0) s->out->norms[step] = norm.norm;
    d.gradient_scale = &norm.coefficient;
    d.averages = &s->average;
    d.average_count = 1;
    XD_TRY(xd_optimizer_step(s->optimizer, &d, NULL));
    for (int i = 0; i < xd_built_stage_count(s->built); i++)
        XD_TRY(xd_parallel_publish(xd_built_stage(s->built, i).parallel));
    return XD_OK;
}

/* The copy in the last stage is a replica on all ranks. */
static bool stage_counts(const stage_state *s, const xd_tensor_part *part) {
    const bool copy = stage_is_copy(s, part->name) && strcmp(part->name, "lm_head.weight") == 0;
    return !part->replica || (copy && (s->config->wrap != TRAIN_DDP || xd_comm_rank(s->groups->dp) == 0));
}

static void stage_keep(const stage_state *s) {
    train_result *out = s->out;
    for (int64_t i = 0; i < s->count && s->cp_rank == 0; i++) {
        const xd_tensor_part *part = &s->tensors[i];
        const xd_optimizer_state state = xd_optimizer_state_at(s->optimizer, i);
        const float *average = (const float *)xd_ema_view(s->average, i).shadow.value;
        for (int64_t at = part->range.begin; at < part->range.end && stage_counts(s, part); at++) {
            const int64_t to = stage_place(s, part->name, at), here = at - part->range.begin;
            out->values[to] = state.master ? state.master[here] : ((const float *)part->data)[here];
            out->first[to] = state.exp_avg[here];
            out->second[to] = state.exp_avg_sq[here];
            out->average[to] = average[here];
        }
    }
}

static xd_result stage_groups(stage_state *s) {
    s->own = *xd_grid_groups(s->grid);
    s->groups = &s->own;
    s->room = TRAIN_POSITIONS;
    if (!s->config->cp) return XD_OK;
    s->room = TRAIN_MOST_POSITIONS;
    s->cp = s->own.cp;
    s->cp_rank = xd_comm_rank(s->cp);
    s->own.cp = NULL;
    s->own.dp_cp = s->own.dp;
    return xd_comm_split(s->world, s->cp_rank, xd_comm_rank(s->world), &s->model_ranks);
}

static xd_result stage_run(stage_state *s) {
    const nn_config config = train_model(true);
    xd_expert_desc sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.tp = s->config->tp;
    sizes.pp = s->config->pp;
    sizes.cp = s->config->cp;
    XD_TRY(xd_grid_create(s->world, &sizes, &s->grid));
    XD_TRY(stage_groups(s));
    const char *problem = nn_model_init(&config, NULL, NULL, &s->whole);
    if (problem) return XD_FAIL(s->ctx, XD_ERROR_ARGUMENT, "model: %s", problem);
    XD_TRY(stage_build(s));
    const nn_share *share = &s->parts[0].model.share;
    const xd_interval columns = { share->vocab_begin, share->vocab_begin + share->vocab_count };
    XD_TRY(vocab_of(s->ctx, s->config->tp > 1 ? s->groups->tp : NULL, columns, TRAIN_VOCAB, &s->vocab));
    XD_TRY(stage_pipeline(s));
    stage_make_buffers(s);
    XD_TRY(xd_agree(s->world, stage_list(s)));
    XD_TRY(xd_agree(s->world, stage_make_state(s)));
    for (int step = 0; step < s->config->steps; step++) XD_TRY(stage_step(s, step));
    stage_keep(s);
    XD_TRY(xd_barrier(s->world)); /* all leaves are there */
    for (int step = 0; step < s->config->steps && xd_comm_rank(s->world) == 0; step++)
        for (int leaf = 0; leaf < TRAIN_LEAVES; leaf++)
            s->out->losses[step] += s->out->leaf_losses[step][leaf];
    return XD_OK;
}

static void stage_close(stage_state *s) {
    xd_ema_destroy(s->average);
    xd_optimizer_destroy(s->optimizer);
    xd_pipeline_destroy(s->pipeline);
    xd_vocab_destroy(s->vocab);
    xd_built_destroy(s->built);
    xd_queue_destroy(s->sends);
    xd_queue_destroy(s->gathers);
    xd_queue_destroy(s->reductions);
    for (int i = 0; i < s->part_count; i++) {
        s->parts[i].description.model = NULL; /* the build's */
        if (s->parts[i].description.ctx) nn_description_free(&s->parts[i].description);
        nn_model_free(&s->parts[i].model);
    }
    nn_model_free(&s->whole);
    if (s->model_ranks) xd_comm_destroy(s->model_ranks);
    xd_grid_destroy(s->grid);
    free(s->workspace);
    free(s->logits);
    free(s->teacher);
}

xd_result train_stages_rank(xd_comm *world, void *job) {
    stage_state *s = (stage_state *)calloc(1, sizeof *s);
    s->config = ((const train_job *)job)->config;
    s->out = ((const train_job *)job)->out;
    s->world = world;
    s->ctx = xd_comm_ctx(world);
    const xd_result result = stage_run(s);
    stage_close(s);
    free(s);
    return result;
}
