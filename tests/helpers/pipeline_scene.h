/* A toy that is trained through pipelines of any shape: every element goes through the layers by itself, so that the
 * arithmetic of a micro-batch is the same wherever the model is cut, and runs can be compared to the bit. */
#ifndef PIPELINE_SCENE_H
#define PIPELINE_SCENE_H

#include "xdistill.h"

#include "xd_test.h"

#include <stdlib.h>

enum {
    SCENE_WIDTH = 6,
    SCENE_LAYERS = 7,
    SCENE_WEIGHTS = SCENE_LAYERS + 2,
    SCENE_STEPS = 3,
    SCENE_LEAVES = 8
};
enum { SCENE_VALUES = 2, SCENE_SLOTS = 64, SCENE_RANKS = 16 };

typedef enum scene_wrap { SCENE_DDP, SCENE_SHARDED, SCENE_FSDP } scene_wrap;

/* One run, and what came out of it. */
typedef struct scene_run {
    scene_wrap wrap;
    int pp, dp, virtual_stages;
    int64_t leaves, group;
    const int64_t *chunk_layers; /* [pp * virtual_stages]; NULL -> layers 0 to SCENE_LAYERS - 2 and the rest
                                  * to the last */
    bool queues;                 /* sums of DDP begin within calls */
    xd_queue_form sends;         /* of activations; AUTO -> no queue */
    bool together;               /* all weights of a stage are one unit */
    xd_reduction reduction;
    /* The rank, micro-batch and direction of a call that fails in the first run. */
    int fails, fails_at;
    bool fails_backward;
    xd_result results[SCENE_RANKS]; /* of that run */
    int culprits[SCENE_RANKS];
    char messages[SCENE_RANKS][512];
    /* Written by the ranks that count. */
    float weights[SCENE_WEIGHTS][SCENE_WIDTH], first[SCENE_WEIGHTS][SCENE_WIDTH];
    double losses[SCENE_STEPS][SCENE_LEAVES], norms[SCENE_STEPS];
    int64_t calls[SCENE_RANKS];
} scene_run;

typedef struct scene_rank {
    scene_run *run;
    xd_comm *world;
    xd_ctx *ctx;
    xd_grid *grid;
    const xd_groups *groups;
    xd_queue *reductions, *sends;
    xd_built *built;
    xd_pipeline *pipeline;
    int64_t micro_batches;
    bool spoilt; /* the failure has been, or is not to be */
    float kept[SCENE_SLOTS][SCENE_LAYERS + 1][SCENE_WIDTH];
    int64_t owners[SCENE_SLOTS];
    xd_param params[SCENE_WEIGHTS];
    xd_tensor_part parts[SCENE_WEIGHTS];
    int64_t count;
    xd_optimizer *optimizer;
    int step;
} scene_rank;

/* ---- the model ---- */

static void scene_weight(const scene_run *run, xd_model *model, const char *name, bool copy, bool counted) {
    const xd_shard_unit unit = run->together ? XD_UNIT_NEVER : XD_UNIT_ALWAYS;
    xd_block *block = NULL;
    xd_weight_desc w = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { SCENE_WIDTH } };
    w.init = copy ? (xd_init){ XD_INIT_CONSTANT, 0.7f, 0.0f } : (xd_init){ XD_INIT_NORMAL, 1.0f, 0.1f };
    w.traits.shared_embedding = copy;
    w.traits.shared = !counted;
    CHECK(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = name, .unit = unit }, &block) ==
          XD_OK);
    CHECK(xd_weight_add(block, &w, NULL) == XD_OK);
}

static xd_result scene_describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    xd_model *model = NULL;
    const scene_run *run = ((const scene_rank *)user)->run;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 5 }, &model));
    if (place->first) scene_weight(run, model, "embed", true, true);
    for (int64_t i = 0; i < place->layer_count; i++) {
        char name[32];
        snprintf(name, sizeof name, "layers.%d", (int)(place->first_layer + i));
        scene_weight(run, model, name, false, true);
    }
    if (place->last) scene_weight(run, model, "head", true, false);
    *out = model;
    return XD_OK;
}

/* The index of a weight among all. */
static int scene_index(const char *name) {
    if (strncmp(name, "embed", 5) == 0) return 0;
    return strncmp(name, "head", 4) == 0 ? SCENE_WEIGHTS - 1 : 1 + atoi(name + strlen("layers."));
}

static xd_block *scene_block(const xd_pipeline_call *call, int index) {
    char name[32];
    snprintf(name, sizeof name, "layers.%d", index - 1);
    return xd_model_find_block(call->stage.model, index == 0                   ? "embed"
                                                  : index == SCENE_WEIGHTS - 1 ? "head"
                                                                               : name);
}

/* ---- passes ---- */

static float scene_number(int64_t leaf, int j) {
    return 0.25f + (float)((leaf * 37 + j * 11) % 16) / 16.0f;
}

static xd_result scene_open(const xd_pipeline_call *call, int index, const float **value, float **gradient) {
    xd_block_view view;
    XD_TRY(xd_block_begin(
        scene_block(call, index),
        (xd_pass){ call->pass, call->pass == XD_PASS_BACKWARD ? call->micro_batch : 0, false }, &view));
    *value = (const float *)view.values[0];
    *gradient = (float *)view.gradients[0];
    return XD_OK;
}

/* Through one weight, forward: x -> y; or backward: d_y -> d_x. A rank without a leaf only opens it. */
static xd_result scene_through(const xd_pipeline_call *call, int index, int64_t leaf, const float *kept,
                               float *x) {
    const float *w = NULL;
    float *d_w = NULL;
    XD_TRY(scene_open(call, index, &w, &d_w));
    for (int j = 0; j < SCENE_WIDTH && leaf >= 0; j++) {
        if (d_w) d_w[j] += x[j] * kept[j];
        x[j] = x[j] * w[j] + (d_w ? 0.0f : 0.125f);
    }
    return xd_block_end(scene_block(call, index));
}

static xd_result scene_spoil(scene_rank *r, const xd_pipeline_call *call) {
    const bool backward = call->pass == XD_PASS_BACKWARD;
    if (r->spoilt || r->run->fails != xd_comm_rank(r->world) || call->micro_batch != r->run->fails_at ||
        backward != r->run->fails_backward)
        return XD_OK;
    r->spoilt = true;
    return XD_FAIL(r->ctx, XD_ERROR_DATA, "micro-batch %d is spoilt", (int)call->micro_batch);
}

/* Slots are those of one forward until its backward. */
static void scene_check_call(scene_rank *r, const xd_pipeline_call *call) {
    const xd_stage_place *p = &call->stage.place;
    const int64_t me = call->micro_batch * 100 + p->virtual_stage;
    const bool backward = call->pass == XD_PASS_BACKWARD;
    CHECK(call->slot >= 0 && call->slot < SCENE_SLOTS);
    CHECK_EQ_INT(r->owners[call->slot], backward ? me : -1);
    r->owners[call->slot] = call->pass == XD_PASS_FORWARD ? me : -1;
    CHECK((call->input == NULL) == p->first);
    CHECK((call->output == NULL) == (p->last || backward));
    CHECK((call->output_gradient == NULL) == (p->last || !backward));
    CHECK((call->input_gradient == NULL) == (p->first || !backward));
    CHECK((call->values == NULL) == !p->last);
    r->run->calls[xd_comm_rank(r->world)]++;
}

static xd_result scene_forward(void *user, const xd_pipeline_call *call) {
    scene_rank *r = (scene_rank *)user;
    const xd_stage_place *p = &call->stage.place;
    const int64_t leaf = xd_parallel_micro_batch(call->stage.parallel, call->micro_batch);
    float x[SCENE_WIDTH];
    XD_TRY(scene_spoil(r, call));
    scene_check_call(r, call);
    float(*kept)[SCENE_WIDTH] = r->kept[call->slot];
    for (int j = 0; j < SCENE_WIDTH; j++)
        x[j] = p->first ? scene_number(leaf, j) : ((const float *)call->input)[j];
    if (p->first) XD_TRY(scene_through(call, 0, leaf, NULL, x));
    for (int i = 0; i < (int)p->layer_count; i++) {
        memcpy(kept[i], x, sizeof x);
        XD_TRY(scene_through(call, 1 + (int)p->first_layer + i, leaf, NULL, x));
    }
    if (!p->last) {
        memcpy(call->output, x, sizeof x);
        return XD_OK;
    }
    memcpy(kept[p->layer_count], x, sizeof x);
    XD_TRY(scene_through(call, SCENE_WEIGHTS - 1, leaf, NULL, x));
    for (int j = 0; j < SCENE_WIDTH && leaf >= 0; j++) call->values[0] += (double)x[j];
    call->values[1] = (double)leaf;
    return XD_OK;
}

static xd_result scene_backward(void *user, const xd_pipeline_call *call) {
    scene_rank *r = (scene_rank *)user;
    const xd_stage_place *p = &call->stage.place;
    const int64_t leaf = xd_parallel_micro_batch(call->stage.parallel, call->micro_batch);
    float x[SCENE_WIDTH], given[SCENE_WIDTH];
    XD_TRY(scene_spoil(r, call));
    scene_check_call(r, call);
    float(*kept)[SCENE_WIDTH] = r->kept[call->slot];
    for (int j = 0; j < SCENE_WIDTH; j++) given[j] = scene_number(leaf, j);
    for (int j = 0; j < SCENE_WIDTH; j++)
        x[j] = p->last ? scene_number(leaf, j + 9) : ((const float *)call->output_gradient)[j];
    if (call->input && p->layer_count > 0 && leaf >= 0) CHECK(memcmp(call->input, kept[0], sizeof x) == 0);
    if (p->last) XD_TRY(scene_through(call, SCENE_WEIGHTS - 1, leaf, kept[p->layer_count], x));
    for (int i = (int)p->layer_count - 1; i >= 0; i--)
        XD_TRY(scene_through(call, 1 + (int)p->first_layer + i, leaf, kept[i], x));
    if (p->first) return scene_through(call, 0, leaf, given, x);
    memcpy(call->input_gradient, x, sizeof x);
    return XD_OK;
}

/* ---- a rank ---- */

static xd_result scene_build(scene_rank *r) {
    const scene_run *run = r->run;
    int64_t layers[SCENE_RANKS] = { 0 };
    const int chunks = run->pp * (run->virtual_stages ? run->virtual_stages : 1);
    for (int i = 0; i < chunks; i++) layers[i] = SCENE_LAYERS / chunks;
    layers[chunks - 1] += SCENE_LAYERS % chunks;
    XD_TRY(xd_grid_create(r->world, &(xd_expert_desc){ .pp = run->pp }, &r->grid));
    r->groups = xd_grid_groups(r->grid);
    if (run->queues)
        XD_TRY(xd_queue_create(r->groups->dp_cp, &(xd_queue_desc){ .form = XD_QUEUE_INLINE, .capacity = 64 },
                               &r->reductions));
    const xd_ddp_desc ddp = { .micro_batches = run->leaves,
                              .sharded_optimizer = run->wrap == SCENE_SHARDED,
                              .reductions = r->reductions,
                              .bucket_size = 1 };
    const xd_fsdp_desc fsdp = { .micro_batches = run->leaves };
    xd_build_desc d = { .groups = r->groups, .provider = { scene_describe, r } };
    d.pipeline.layer_count = SCENE_LAYERS;
    d.pipeline.virtual_stages = run->virtual_stages;
    d.pipeline.chunk_layers = run->chunk_layers ? run->chunk_layers : layers;
    d.wrap.kind = run->wrap == SCENE_FSDP ? XD_WRAP_FSDP : XD_WRAP_DDP;
    if (run->wrap == SCENE_FSDP)
        d.wrap.fsdp = &fsdp;
    else
        d.wrap.ddp = &ddp;
    return xd_build(r->world, &d, &r->built);
}

static xd_pipeline_run_desc scene_pipeline(const scene_rank *r) {
    xd_pipeline_run_desc d = { .ndim = 2, .shape = { 2, SCENE_WIDTH / 2 }, .dtype = XD_DTYPE_F32 };
    d.schedule.virtual_stages = r->run->virtual_stages;
    d.schedule.micro_batches = r->micro_batches;
    d.schedule.group = r->run->group;
    d.value_count = SCENE_VALUES;
    d.built = r->built;
    d.data = r->run->dp > 1 ? r->groups->dp_cp : NULL;
    d.gathers = r->run->wrap == SCENE_FSDP && d.data;
    d.world = r->world;
    d.sends = r->sends;
    return d;
}

static xd_result scene_make(scene_rank *r) {
    XD_TRY(scene_build(r));
    r->micro_batches = xd_parallel_micro_batches(xd_built_stage(r->built, 0).parallel).opened;
    for (int i = 0; i < xd_built_stage_count(r->built); i++) {
        const xd_parallel *p = xd_built_stage(r->built, i).parallel;
        int64_t count = 0;
        XD_TRY(xd_parallel_params(p, SCENE_WEIGHTS - r->count, r->params + r->count, &count));
        XD_TRY(xd_parallel_parts(p, SCENE_WEIGHTS - r->count, r->parts + r->count, &count));
        r->count += count;
    }
    xd_optimizer_desc d = xd_adamw_defaults(r->params, r->count);
    d.learning_rate = 0.01;
    XD_TRY(xd_optimizer_create(r->ctx, &d, &r->optimizer));
    const xd_queue_desc queue = { .form = r->run->sends, .capacity = 2 };
    if (queue.form) XD_TRY(xd_queue_create(r->groups->pp, &queue, &r->sends));
    if (queue.form) CHECK_EQ_INT(xd_queue_describe(r->sends).form, queue.form);
    const xd_pipeline_run_desc p = scene_pipeline(r);
    return xd_pipeline_create(r->groups->pp, &p, &r->pipeline);
}

static void scene_forget(scene_rank *r) {
    for (int i = 0; i < SCENE_SLOTS; i++) r->owners[i] = -1;
}

static xd_result scene_passes(scene_rank *r, double *values) {
    const xd_pipeline_calls calls = { scene_forward, scene_backward, r };
    scene_forget(r);
    return xd_pipeline_run(r->pipeline, &calls, values);
}

/* A run that fails, and the end of its step, which fails too. */
static void scene_fail(scene_rank *r) {
    scene_run *run = r->run;
    const int me = xd_comm_rank(r->world);
    double values[SCENE_LEAVES * SCENE_VALUES] = { -7.0 };
    run->results[me] = scene_passes(r, values);
    run->culprits[me] = xd_last_error(r->ctx)->culprit;
    snprintf(run->messages[me], sizeof run->messages[me], "%s", xd_last_error(r->ctx)->message);
    CHECK(values[0] == -7.0);
    CHECK(xd_pipeline_finish(r->world,
                             &(xd_pipeline_finish_desc){ .groups = r->groups, .built = r->built }) != XD_OK);
    r->spoilt = true;
}

static xd_result scene_step(scene_rank *r, int step) {
    double values[SCENE_LEAVES * SCENE_VALUES];
    xd_gradient_norm_desc clip = { .params = r->params, .param_count = r->count, .max_norm = 0.5 };
    xd_gradient_norm norm;
    XD_TRY(scene_passes(r, values));
    for (int64_t i = 0; i < r->micro_batches && xd_comm_rank(r->groups->pp) == 0; i++)
        if (values[i * SCENE_VALUES + 1] >= 0.0)
            r->run->losses[step][(int)values[i * SCENE_VALUES + 1]] = values[i * SCENE_VALUES];
    XD_TRY(
        xd_pipeline_finish(r->world, &(xd_pipeline_finish_desc){ .groups = r->groups, .built = r->built }));
    XD_TRY(xd_gradient_norm_compute(r->ctx, r->world, &clip, &norm));
    if (xd_comm_rank(r->world) == 0) r->run->norms[step] = norm.norm;
    XD_TRY(xd_optimizer_step(r->optimizer, &(xd_optimizer_step_desc){ .gradient_scale = &norm.coefficient },
                             NULL));
    for (int i = 0; i < xd_built_stage_count(r->built); i++)
        XD_TRY(xd_parallel_publish(xd_built_stage(r->built, i).parallel));
    return XD_OK;
}

/* The head is a replica everywhere, because the embedding is counted. */
static void scene_keep(const scene_rank *r) {
    const bool whole = r->run->wrap == SCENE_DDP;
    for (int64_t i = 0; i < r->count; i++) {
        const xd_tensor_part *part = &r->parts[i];
        const int index = scene_index(part->name);
        if (whole && xd_comm_rank(r->groups->dp_cp) > 0) continue;
        for (int64_t j = part->range.begin; j < part->range.end; j++) {
            const int64_t here = j - part->range.begin;
            r->run->weights[index][j] = ((const float *)part->data)[here];
            r->run->first[index][j] = xd_optimizer_state_at(r->optimizer, i).exp_avg[here];
        }
    }
}

static void scene_close(scene_rank *r) {
    xd_pipeline_destroy(r->pipeline);
    xd_optimizer_destroy(r->optimizer);
    xd_built_destroy(r->built);
    xd_queue_destroy(r->sends);
    xd_queue_destroy(r->reductions);
    xd_grid_destroy(r->grid);
}

static xd_result scene_run_rank(xd_comm *world, void *argument) {
    scene_rank *r = (scene_rank *)calloc(1, sizeof *r);
    r->run = (scene_run *)argument;
    r->world = world;
    r->ctx = xd_comm_ctx(world);
    r->spoilt = r->run->fails < 0;
    xd_result result = scene_make(r);
    if (result == XD_OK && r->run->fails >= 0) scene_fail(r);
    for (int step = 0; step < SCENE_STEPS && result == XD_OK; step++) result = scene_step(r, step);
    if (result == XD_OK) scene_keep(r);
    scene_close(r);
    free(r);
    return result;
}

static inline xd_result scene_execute(scene_run *run, xd_error *error) {
    const xd_ctx_desc desc = { .reduction = run->reduction, .timeout_seconds = 60 };
    xd_error mine;
    const xd_result result =
        xd_run_threads(run->pp * run->dp, &desc, scene_run_rank, run, error ? error : &mine);
    if (result != XD_OK && !error) printf("%s\n", mine.message);
    return result;
}

static scene_run *scene_new(scene_wrap wrap, int pp, int virtual_stages, int dp) {
    scene_run *run = (scene_run *)calloc(1, sizeof *run);
    run->wrap = wrap;
    run->pp = pp;
    run->virtual_stages = virtual_stages;
    run->dp = dp;
    run->leaves = SCENE_LEAVES;
    run->reduction = XD_REDUCTION_INVARIANT;
    run->fails = -1;
    return run;
}

static inline bool scene_equal(const scene_run *a, const scene_run *b) {
    return memcmp(a->weights, b->weights, sizeof a->weights) == 0 &&
           memcmp(a->first, b->first, sizeof a->first) == 0 &&
           memcmp(a->losses, b->losses, sizeof a->losses) == 0 &&
           memcmp(a->norms, b->norms, sizeof a->norms) == 0;
}

#endif
