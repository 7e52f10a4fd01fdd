/* A toy model and the ways to wrap it. */
#ifndef WRAP_SCENE_H
#define WRAP_SCENE_H

#include "wrap_weights.h"
#include "wrap_calls.h"

#include <stdlib.h>

enum { WRAP_LAYERS = 3, WRAP_ROOM = 4096, WRAP_STEPS = 3, WRAP_WEIGHTS = 32 };

typedef enum wrap_kind { WRAP_DDP, WRAP_SHARDED, WRAP_FSDP, WRAP_FSDP_WHOLE, WRAP_HSDP } wrap_kind;

/* A weight that is frozen until a step. */
typedef struct wrap_thaw {
    const char *name;
    int step;
} wrap_thaw;

/* One run. */
typedef struct wrap_run {
    wrap_kind kind;
    int ranks;
    int groups; /* HSDP */
    int64_t leaves;
    xd_reduction reduction;
    bool together; /* all forwards before the first backward */
    bool nested;   /* units inside units */
    bool skips;    /* in each step a layer has no part */
    xd_dtype kept; /* of weights; 0 -> F32 */
    xd_dtype sent, view;
    int reshard;
    int queues; /* 1 inline, 2 workers, 0 none */
    int prefetch;
    bool offloaded; /* FSDP: parts, optimizer and averages in another context */
    xd_gradient_divisors divide;
    wrap_thaw thaws[4];
    int steps;           /* 0 -> WRAP_STEPS */
    const char *spoiled; /* in step `spoiled_step` leaf `spoiled_leaf`, -1 for all, has `spoil` in the
                          * gradient of this weight */
    int spoiled_step;
    int64_t spoiled_leaf;
    float spoil;
    double refuse_above; /* of norms */
    /* What came out, written by the ranks that count. */
    float values[WRAP_ROOM], averages[WRAP_ROOM], moments[WRAP_ROOM], squares[WRAP_ROOM];
    int64_t count;
    double norms[WRAP_STEPS];
    char findings[16][256]; /* of each rank: what the check of a norm said */
    int skipped[16];        /* steps */
    int64_t taken;          /* steps of the first weight */
} wrap_run;

/* ---- the model ---- */

static void wrap_layer(xd_block *root, int i, xd_dtype dtype) {
    char name[32];
    snprintf(name, sizeof name, "layers.%d", i);
    xd_block *layer = wrap_child(root, name, "layer"), *mlp = wrap_child(layer, "mlp", "mlp");
    wrap_weight_of(layer, "norm", dtype, 5, 0);
    wrap_weight_of(layer, "attention", dtype, 5, 7 + i);
    wrap_weight_of(mlp, "up", dtype, 11, 5);
    wrap_weight_of(mlp, "bias", dtype, 11, 0);
    wrap_weight_of(mlp, "nothing", dtype, 0, 5);
    xd_weight_desc table = { .name = "table", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 3 } };
    table.init = (xd_init){ XD_INIT_UNIFORM, 0.0f, 1.0f };
    table.traits.frozen = true;
    CHECK(xd_weight_add(layer, &table, NULL) == XD_OK);
    xd_weight_desc seen = {
        .name = "seen", .dtype = XD_DTYPE_I64, .ndim = 1, .shape = { 2 }, .buffer = true
    };
    CHECK(xd_weight_add(layer, &seen, NULL) == XD_OK);
}

static xd_model *wrap_describe(xd_ctx *ctx, xd_dtype dtype) {
    xd_model *model = NULL;
    CHECK(xd_model_create(ctx, &(xd_model_desc){ .seed = 3 }, &model) == XD_OK);
    xd_block *root = xd_model_root(model);
    wrap_weight_of(root, "embed", dtype, 7, 5);
    wrap_weight(root, "scale", 0, 0);
    for (int i = 0; i < WRAP_LAYERS; i++) wrap_layer(root, i, dtype);
    xd_weight_desc head = { .name = "head", .dtype = dtype, .ndim = 2, .shape = { 7, 5 } };
    head.tied_to = "embed";
    CHECK(xd_weight_add(root, &head, NULL) == XD_OK);
    return model;
}

static xd_model *wrap_model(xd_ctx *ctx, xd_dtype dtype) {
    xd_model *model = wrap_describe(ctx, dtype);
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

/* ---- a rank ---- */

typedef struct wrap_rank {
    wrap_run *run;
    xd_ctx *ctx;
    xd_comm *world, *data, *replicas;
    xd_ctx *home; /* of parts, and the world for it: the rank's own but where parts are offloaded */
    xd_comm *over;
    xd_model *model;
    xd_parallel *parallel;
    xd_queue *gathers, *reductions;
    int step;
    xd_status found;
    float activation[64]; /* of each leaf */
} wrap_rank;

static xd_result wrap_queues(wrap_rank *r) {
    const xd_queue_desc d = { .form = r->run->queues == 2 ? XD_QUEUE_WORKER : XD_QUEUE_INLINE,
                              .capacity = 32 };
    if (!r->run->queues) return XD_OK;
    XD_TRY(xd_queue_create(r->data, &d, &r->gathers));
    return xd_queue_create(r->data, &d, &r->reductions);
}

static xd_result wrap_create(wrap_rank *r) {
    static const char *const types[] = { "layer", "mlp" };
    const wrap_run *run = r->run;
    XD_TRY(wrap_queues(r));
    if (run->kind == WRAP_DDP || run->kind == WRAP_SHARDED) {
        const xd_ddp_desc d = { .micro_batches = run->leaves,
                                .sharded_optimizer = run->kind == WRAP_SHARDED,
                                .view_dtype = run->view,
                                .gathers = r->gathers,
                                .reductions = r->reductions,
                                .bucket_size = 64,
                                .reserve_frozen = run->thaws[0].name,
                                .replicas = r->replicas,
                                .divide = run->divide };
        return wrap_over_ddp(r->model, r->data, &d, &r->parallel);
    }
    const xd_fsdp_desc d = { .micro_batches = run->leaves,
                             .unit_types = types,
                             .unit_type_count = run->nested ? 2 : 1,
                             .replicas = r->replicas,
                             .accumulate_whole = run->kind == WRAP_FSDP_WHOLE,
                             .sent_dtype = run->sent,
                             .view_dtype = run->view,
                             .reshard_ranks = run->reshard,
                             .gathers = r->gathers,
                             .reductions = r->reductions,
                             .prefetch = run->prefetch,
                             .reserve_frozen = run->thaws[0].name,
                             .divide = run->divide,
                             .host = run->offloaded ? r->home : NULL };
    return wrap_over_fsdp(r->model, r->data, &d, &r->parallel);
}

static void wrap_close(wrap_rank *r) {
    xd_parallel_destroy(r->parallel);
    xd_queue_destroy(r->gathers);
    xd_queue_destroy(r->reductions);
    xd_model_destroy(r->model);
    if (r->replicas) xd_comm_destroy(r->replicas);
    if (r->data != r->world) xd_comm_destroy(r->data);
    if (r->over != r->world) xd_comm_destroy(r->over);
    if (r->home != r->ctx) xd_ctx_destroy(r->home);
}

static xd_result wrap_home(wrap_rank *r) {
    const xd_ctx_desc desc = { .reduction = r->run->reduction, .timeout_seconds = 60 };
    r->home = r->ctx;
    r->over = r->world;
    if (!r->run->offloaded) return XD_OK;
    XD_TRY(xd_ctx_create(&desc, &r->home));
    return xd_comm_fork(r->world, r->home, &r->over);
}

static xd_result wrap_groups(wrap_rank *r) {
    const int rank = xd_comm_rank(r->world),
              each = xd_comm_size(r->world) / (r->run->groups ? r->run->groups : 1);
    r->data = r->world;
    if (r->run->groups < 2) return XD_OK;
    XD_TRY(xd_comm_split(r->world, rank / each, rank, &r->data));
    return xd_comm_split(r->world, rank % each, rank, &r->replicas);
}

#endif
