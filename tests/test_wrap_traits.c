/* Sums that traits of weights ask for, made by xd_parallel_reduce: over tensor-parallel ranks and stages, once. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "xd_test.h"

#include <stdio.h>
#include <string.h>

enum { WEIGHTS = 3, COUNT = 5 };

/* A rank's model: a weight that is summed over tensor-parallel ranks, one that is averaged, and one of its own. */
typedef struct scene {
    xd_ctx *ctx;
    xd_comm *world;
    const xd_groups *groups;
    xd_grid *grid;
    xd_built *built;
    xd_model *model;
    xd_parallel *parallel;
    bool fewer;             /* tensor-parallel rank 1 has no weight that is averaged */
    xd_weight_traits extra; /* of the weight of its own */
} scene;

static bool says(const xd_ctx *ctx, const char *text) {
    const char *message = xd_last_error(ctx)->message;
    if (strstr(message, text)) return true;
    printf("\"%s\" lacks \"%s\"\n", message, text);
    return false;
}

static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    static const char *const names[] = { "summed", "averaged", "own" };
    const scene *s = (const scene *)user;
    const xd_weight_traits traits[] = { { .sequence_parallel = true },
                                        { .averaged_over_tensor_parallel = true },
                                        s->extra };
    xd_model *model = NULL;
    (void)place;
    XD_TRY(xd_model_create(ctx, NULL, &model));
    for (int i = 0; i < WEIGHTS; i++) {
        xd_weight_desc d = {
            .name = names[i], .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { COUNT }, .traits = traits[i]
        };
        d.init = (xd_init){ XD_INIT_CONSTANT, 1.0f, 0.0f };
        if (i == 1 && s->fewer && xd_comm_rank(s->groups->tp) == 1)
            d.traits.averaged_over_tensor_parallel = false;
        XD_TRY(xd_weight_add(xd_model_root(model), &d, NULL));
    }
    *out = model;
    return XD_OK;
}

/* Every element of every gradient is `number` in each leaf of this rank. */
static xd_result add(const scene *s, float number) {
    for (int64_t k = 0; k < xd_parallel_micro_batches(s->parallel).opened; k++) {
        xd_block_view view;
        XD_TRY(xd_block_begin(xd_model_root(s->model), (xd_pass){ XD_PASS_BACKWARD, k, false }, &view));
        for (int64_t w = 0; w < view.count && xd_parallel_micro_batch(s->parallel, k) >= 0; w++)
            for (int i = 0; i < COUNT; i++) ((float *)view.gradients[w])[i] += number;
        XD_TRY(xd_block_end(xd_model_root(s->model)));
    }
    return XD_OK;
}

/* Whether this rank's parts of a weight's gradient have this number. */
static bool gradient_is(const scene *s, const char *name, float number) {
    xd_param params[WEIGHTS];
    int64_t count = 0;
    bool same = true;
    CHECK(xd_parallel_params(s->parallel, WEIGHTS, params, &count) == XD_OK);
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < params[i].count && strcmp(params[i].name, name) == 0; k++) {
            const float found = ((const float *)params[i].gradient)[k];
            if (found != number) printf("%s has %g, not %g\n", name, (double)found, (double)number);
            same = same && found == number;
        }
    return same;
}

/* Whether all weights have the values of tensor-parallel rank 0, this rank's own left out. */
static bool replicas_agree(const scene *s) {
    bool same = true;
    xd_param params[WEIGHTS];
    int64_t count = 0;
    CHECK(xd_parallel_params(s->parallel, WEIGHTS, params, &count) == XD_OK);
    for (int i = 0; i < 2; i++) {
        float values[COUNT];
        if (params[i].count == 0) continue;
        memcpy(values, params[i].value, (size_t)params[i].count * sizeof *values);
        CHECK(xd_broadcast(s->groups->tp, values, params[i].count, XD_DTYPE_F32, 0) == XD_OK);
        same = same && memcmp(values, params[i].value, (size_t)params[i].count * sizeof *values) == 0;
        same = same && ((const float *)params[i].value)[0] != 1.0f;
    }
    return same;
}

static void step_optimizer(const scene *s) {
    xd_param params[WEIGHTS];
    xd_optimizer *optimizer = NULL;
    int64_t count = 0;
    CHECK(xd_parallel_params(s->parallel, WEIGHTS, params, &count) == XD_OK);
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.1;
    CHECK(xd_optimizer_create(s->ctx, &d, &optimizer) == XD_OK);
    CHECK(xd_optimizer_step(optimizer, NULL, NULL) == XD_OK);
    xd_optimizer_destroy(optimizer);
}

typedef struct settings {
    int tp, pp, virtual_stages;
    bool fsdp, alone; /* alone: wrapped by hand, with the groups in the settings */
} settings;

static void open_scene(scene *s, xd_comm *world, const settings *o) {
    const xd_fsdp_desc fsdp = { .micro_batches = 4 };
    const xd_ddp_desc ddp = { .micro_batches = 4, .sharded_optimizer = true };
    xd_fsdp_desc own_fsdp = fsdp;
    xd_ddp_desc own_ddp = ddp;
    s->ctx = xd_comm_ctx(world);
    s->world = world;
    CHECK(xd_grid_create(world, &(xd_expert_desc){ .tp = o->tp, .pp = o->pp }, &s->grid) == XD_OK);
    s->groups = own_fsdp.groups = own_ddp.groups = xd_grid_groups(s->grid);
    if (o->alone) {
        CHECK(describe(s, s->ctx, NULL, &s->model) == XD_OK);
        CHECK(xd_model_seal(s->model) == XD_OK);
        CHECK((o->fsdp ? wrap_over_fsdp(s->model, s->groups->dp, &own_fsdp, &s->parallel)
                       : wrap_over_ddp(s->model, s->groups->dp, &own_ddp, &s->parallel)) == XD_OK);
        return;
    }
    xd_build_desc d = { .groups = s->groups, .provider = { describe, s } };
    d.pipeline.virtual_stages = o->virtual_stages;
    d.pipeline.layer_count = 4;
    d.wrap.kind = o->fsdp ? XD_WRAP_FSDP : XD_WRAP_DDP;
    if (o->fsdp)
        d.wrap.fsdp = &fsdp;
    else
        d.wrap.ddp = &ddp;
    CHECK(xd_build(world, &d, &s->built) == XD_OK);
    s->model = xd_built_stage(s->built, 0).model;
    s->parallel = xd_built_stage(s->built, 0).parallel;
}

static void close_scene(scene *s) {
    if (!s->built) xd_parallel_destroy(s->parallel);
    if (!s->built) xd_model_destroy(s->model);
    xd_built_destroy(s->built);
    xd_grid_destroy(s->grid);
}

/* ---- over tensor-parallel ranks ---- */

static xd_result tensors_rank(xd_comm *world, void *argument) {
    scene s = { .ctx = NULL };
    open_scene(&s, world, (const settings *)argument);
    const float mine = (float)(1 + xd_comm_rank(s.groups->tp)) * 0.25f; /* of each of 4 leaves */
    for (int step = 0; step < 2; step++) {
        CHECK(add(&s, mine) == XD_OK);
        CHECK(xd_parallel_reduce(s.parallel) == XD_OK);
        CHECK(gradient_is(&s, "summed", 3.0f) && gradient_is(&s, "averaged", 1.5f));
        CHECK(gradient_is(&s, "own", 4.0f * mine));
        step_optimizer(&s);
        CHECK(xd_parallel_publish(s.parallel) == XD_OK);
        CHECK(replicas_agree(&s));
    }
    close_scene(&s);
    return XD_OK;
}

XD_TEST(tensor_parallel_replicas_step_with_the_sum_of_their_gradients) {
    xd_ctx_desc d = { .timeout_seconds = 60 };
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int kind = 0; kind < 4; kind++) {
            settings o = { .tp = 2, .pp = 1, .fsdp = kind % 2 != 0, .alone = kind >= 2 };
            d.reduction = kind == 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
            CHECK_EQ_INT(xd_run_threads(ranks, &d, tensors_rank, &o, NULL), XD_OK);
        }
}

/* ---- what follows ---- */

static xd_result once_rank(xd_comm *world, void *argument) {
    scene s = { .ctx = NULL };
    open_scene(&s, world, (const settings *)argument);
    const xd_pipeline_finish_desc d = {
        .groups = s.groups, .built = s.built, .per_token = true, .tokens = 2
    };
    CHECK(add(&s, (float)(1 + xd_comm_rank(s.groups->tp)) * 0.25f) == XD_OK);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK);
    CHECK(xd_pipeline_finish(world, &d) == XD_OK);
    CHECK(gradient_is(&s, "summed", 1.5f) && gradient_is(&s, "averaged", 0.75f)); /* of 2 tokens */
    CHECK(xd_pipeline_finish(world, &d) == XD_ERROR_STATE);
    CHECK(says(s.ctx, "the step of stage 0 of 1 was finished already: xd_parallel_publish ends it"));
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE && says(s.ctx, "was reduced already"));
    CHECK(gradient_is(&s, "summed", 1.5f));
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    CHECK(add(&s, 0.25f) == XD_OK);
    CHECK(xd_pipeline_finish(world, &d) == XD_OK);
    CHECK(gradient_is(&s, "summed", 1.0f));
    close_scene(&s);
    return XD_OK;
}

XD_TEST(xd_pipeline_finish_after_xd_parallel_reduce_sums_nothing_twice) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    settings o = { .tp = 2, .pp = 1 };
    CHECK_EQ_INT(xd_run_threads(2, &d, once_rank, &o, NULL), XD_OK);
}

/* ---- what is refused ---- */

static xd_result without_groups_rank(xd_comm *world, void *argument) {
    scene s = { .ctx = xd_comm_ctx(world), .world = world };
    const bool fsdp = *(const bool *)argument;
    CHECK(describe(&s, s.ctx, NULL, &s.model) == XD_OK);
    CHECK(xd_model_seal(s.model) == XD_OK);
    CHECK((fsdp ? wrap_over_fsdp(s.model, world, NULL, &s.parallel)
                : wrap_over_ddp(s.model, world, NULL, &s.parallel)) == XD_OK);
    CHECK(add(&s, 1.0f) == XD_OK);
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE);
    CHECK(
        says(s.ctx,
             "weight \"summed\" of 5 elements has the trait sequence_parallel, and its wrapper has no groups "
             "to sum over: set groups of xd_ddp_desc or xd_fsdp_desc"));
    CHECK(says(s.ctx, "call xd_pipeline_finish"));
    CHECK(xd_parallel_publish(s.parallel) == XD_ERROR_STATE); /* the step is not summed */
    xd_parallel_destroy(s.parallel);
    s.parallel = NULL;
    const xd_groups one = { .dp = world };
    CHECK(wrap_over_ddp(s.model, world, &(xd_ddp_desc){ .groups = &one }, &s.parallel) == XD_OK);
    CHECK(add(&s, 1.0f) == XD_OK);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK); /* one tensor-parallel rank: a sum of one */
    CHECK(gradient_is(&s, "summed", 2.0f) && gradient_is(&s, "averaged", 2.0f));
    close_scene(&s);
    return XD_OK;
}

XD_TEST(without_groups_the_call_refuses_the_weight_by_name) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    for (int i = 0; i < 2; i++) {
        bool fsdp = i == 1;
        CHECK_EQ_INT(xd_run_threads(2, &d, without_groups_rank, &fsdp, NULL), XD_OK);
    }
}

/* Two stages on each of two ranks: only the end of all of them can sum over all. */
static xd_result stages_rank(xd_comm *world, void *argument) {
    scene s = { .extra = { .pipeline_parallel = true } };
    open_scene(&s, world, (const settings *)argument);
    const xd_pipeline_finish_desc d = { .groups = s.groups, .built = s.built };
    CHECK_EQ_INT(xd_built_stage_count(s.built), 2);
    for (int i = 0; i < 2; i++) {
        s.model = xd_built_stage(s.built, i).model;
        s.parallel = xd_built_stage(s.built, i).parallel;
        CHECK(add(&s, 0.25f) == XD_OK);
        CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE);
        CHECK(says(
            s.ctx,
            "weight \"own\" has the trait pipeline_parallel, whose sum is over all 2 stages of this rank: "
            "call xd_pipeline_finish instead of xd_parallel_reduce"));
    }
    CHECK(xd_pipeline_finish(world, &d) == XD_OK); /* the leaves are still there */
    for (int i = 0; i < 2; i++) {
        s.parallel = xd_built_stage(s.built, i).parallel;
        CHECK(gradient_is(&s, "own", 4.0f) && gradient_is(&s, "summed", 1.0f));
    }
    close_scene(&s);
    return XD_OK;
}

XD_TEST(a_sum_over_several_stages_of_a_rank_is_left_to_xd_pipeline_finish) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    settings o = { .tp = 1, .pp = 2, .virtual_stages = 2 };
    CHECK_EQ_INT(xd_run_threads(2, &d, stages_rank, &o, NULL), XD_OK);
}

static xd_result fewer_rank(xd_comm *world, void *argument) {
    scene s = { .fewer = true };
    open_scene(&s, world, (const settings *)argument);
    CHECK(add(&s, 1.0f) == XD_OK);
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_MISMATCH);
    CHECK(says(s.ctx, "xd_parallel_reduce: rank 1 passed weights to sum 1, rank 0 passed 2"));
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(tensor_parallel_ranks_with_other_traits_are_told_both_numbers) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    settings o = { .tp = 2, .pp = 1, .alone = true };
    CHECK_EQ_INT(xd_run_threads(2, &d, fewer_rank, &o, NULL), XD_OK);
}

/* A single stage with its one copy of the embedding has nothing to add. */
static xd_result copy_rank(xd_comm *world, void *argument) {
    scene s = { .extra = { .shared_embedding = true } };
    open_scene(&s, world, (const settings *)argument);
    CHECK(add(&s, 0.25f) == XD_OK);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && gradient_is(&s, "own", 1.0f));
    close_scene(&s);
    return XD_OK;
}

XD_TEST(one_copy_of_an_embedding_in_one_stage_is_reduced_as_it_is) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    settings o = { .tp = 2, .pp = 1 };
    CHECK_EQ_INT(xd_run_threads(2, &d, copy_rank, &o, NULL), XD_OK);
}

XD_TEST_MAIN()
