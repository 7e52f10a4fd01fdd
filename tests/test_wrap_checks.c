/* Wrappers: gradients that are not finite or too large, their scale, and weights that are thawed during training. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "wrap_train.h"

#include <math.h>

static const char *const kinds[] = { "DDP", "DDP with a sharded optimizer", "FSDP",
                                     "FSDP with whole micro-batches", "HSDP" };

static wrap_run *run_like(const wrap_run *like, wrap_kind kind, int ranks) {
    wrap_run *run = wrap_new(kind, ranks, 8, XD_REDUCTION_INVARIANT), empty = *run;
    *run = *like;
    run->kind = kind;
    run->ranks = ranks;
    run->leaves = empty.leaves;
    run->reduction = empty.reduction;
    run->groups = kind == WRAP_HSDP ? 2 : like->groups;
    CHECK(wrap_execute(run) == XD_OK);
    return run;
}

/* ---- findings ---- */

enum { SPOILED_STEP = 1 };

/* The step is skipped on every rank, and nothing that a step changes has changed. */
static bool skips_a_step(const wrap_run *run, const wrap_run *without, const char *name) {
    bool ok = run->taken == without->taken && memcmp(run->values, without->values, sizeof run->values) == 0 &&
              memcmp(run->averages, without->averages, sizeof run->averages) == 0 &&
              memcmp(run->moments, without->moments, sizeof run->moments) == 0 &&
              memcmp(run->squares, without->squares, sizeof run->squares) == 0;
    for (int r = 0; r < run->ranks; r++)
        ok = ok && run->skipped[r] == 1 && strstr(run->findings[r], name) &&
             strcmp(run->findings[r], run->findings[0]) == 0;
    if (!ok)
        printf("%s, %d ranks: %d skipped, \"%s\"\n", kinds[run->kind], run->ranks, run->skipped[0],
               run->findings[0]);
    return ok;
}

/* In one step a leaf has a value in a gradient that the step must not take. */
static void check_spoiled(const wrap_run *like, const char *expected) {
    const wrap_run shorter = { .steps = WRAP_STEPS - 1 };
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int kind = WRAP_DDP; kind <= WRAP_HSDP; kind++) {
            if (kind == WRAP_HSDP && ranks % 2) continue;
            wrap_run *without = run_like(&shorter, (wrap_kind)kind, ranks);
            CHECK_EQ_INT(without->skipped[0], 0);
            CHECK(without->findings[0][0] == '\0');
            wrap_run *run = run_like(like, (wrap_kind)kind, ranks);
            CHECK(skips_a_step(run, without, expected));
            free(run);
            free(without);
        }
}

XD_TEST(a_gradient_that_is_not_finite_skips_the_step_on_every_rank_and_is_named) {
    wrap_run like = { .spoiled = "layers.1.mlp.up", .spoiled_step = SPOILED_STEP, .spoil = NAN };
    for (like.spoiled_leaf = 0; like.spoiled_leaf < 8; like.spoiled_leaf += 5) check_spoiled(&like, "1 of ");
    like.spoil = -INFINITY;
    like.spoiled_leaf = 7;
    check_spoiled(&like, "first in \"layers.1.mlp.up\" on rank ");
}

XD_TEST(a_norm_above_its_limit_skips_the_step_on_every_rank_and_its_largest_element_is_found) {
    wrap_run like = {
        .spoiled = "layers.0.attention", .spoiled_step = SPOILED_STEP, .spoiled_leaf = 6, .spoil = -4e6f
    };
    like.refuse_above = 1e5;
    check_spoiled(&like, "above 100000; the largest element is in \"layers.0.attention\" on rank ");
}

/* ---- the end of a step ---- */

/* Ranks of two groups; those of the first leave out a layer, or open layers in another order. */
static xd_result end_a_step(xd_comm *world, void *argument) {
    const int wrong = *(const int *)argument, rank = xd_comm_rank(world);
    wrap_run run = { .kind = WRAP_HSDP, .groups = 2, .leaves = 4 };
    wrap_rank r = { .run = &run, .ctx = xd_comm_ctx(world), .world = world };
    r.model = wrap_model(r.ctx, XD_DTYPE_F32);
    CHECK(wrap_groups(&r) == XD_OK && wrap_create(&r) == XD_OK);
    for (int step = 0; step < 2; step++) {
        const bool first = step == 0 && rank < 2;
        CHECK(wrap_visit(&r, xd_model_root(r.model), 0, true) == XD_OK);
        CHECK(wrap_layer_pass(&r, first && wrong == 2 ? 0 : 1, 0, true) == XD_OK);
        CHECK(wrap_layer_pass(&r, first && wrong == 2 ? 1 : 0, 0, true) == XD_OK);
        if (!first || wrong != 1) CHECK(wrap_layer_pass(&r, 2, 0, true) == XD_OK);
        CHECK(xd_block_end(xd_model_root(r.model)) == XD_OK);
        const uint64_t calls = xd_comm_traffic(r.data).calls;
        const xd_result result = xd_parallel_reduce(r.parallel), alone = wrong == 1 ? XD_ERROR_STATE : XD_OK;
        const char *text = wrong == 1 ? "\"layers.2\" has had" : "the order in which blocks were opened";
        if (step == 0 && wrong) {
            CHECK(result == (wrong == 2 ? XD_ERROR_STATE : rank < 2 ? alone : XD_ERROR_PEER));
            CHECK(strstr(xd_last_error(r.ctx)->message, text));
        } else
            CHECK(result == XD_OK && xd_comm_traffic(r.data).calls == calls + 1);
        CHECK(xd_parallel_publish(r.parallel) == XD_OK);
    }
    wrap_close(&r);
    return XD_OK;
}

XD_TEST(groups_of_replicas_end_a_step_together_after_one_exchange_in_each) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    for (int wrong = 0; wrong < 3; wrong++)
        CHECK(xd_run_threads(4, &desc, end_a_step, &wrong, NULL) == XD_OK);
}

/* ---- divisors ---- */

/* Whether all wrappers on 1 to 4 ranks have the bits of `one`. */
static bool all_equal(const wrap_run *one, const wrap_run *like) {
    bool ok = true;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int kind = WRAP_DDP; kind <= WRAP_HSDP; kind++) {
            if (kind == WRAP_HSDP && ranks % 2) continue;
            wrap_run mixed = *like;
            mixed.queues = (ranks + kind) % 3;
            mixed.nested = kind >= WRAP_FSDP && ranks % 2 == 0;
            mixed.together = ranks == 3;
            wrap_run *run = run_like(&mixed, (wrap_kind)kind, ranks);
            const bool same = wrap_equal(one, run);
            if (!same) printf("%s, %d ranks differs\n", kinds[kind], ranks);
            ok = ok && same;
            free(run);
        }
    return ok;
}

XD_TEST(gradients_divided_by_anything_have_one_set_of_bits_on_every_layout) {
    static const xd_gradient_divisors divisors[] = { { true, 0.0, 0.0 },
                                                     { true, 3.0, 0.7 },
                                                     { false, 1e3, 1e-3 } };
    const wrap_run plain = { .steps = 0 };
    wrap_run *sum = run_like(&plain, WRAP_DDP, 1);
    for (int i = 0; i < 3; i++) {
        const wrap_run like = { .divide = divisors[i] };
        wrap_run *one = run_like(&like, WRAP_DDP, 1);
        CHECK(!wrap_equal(sum, one));
        CHECK(all_equal(one, &like));
        free(one);
    }
    free(sum);
}

XD_TEST(an_average_is_the_sum_divided_by_the_number_of_leaves) {
    const wrap_run plain = { .steps = 1 }, mean = { .steps = 1, .divide = { .average = true } };
    const wrap_run undone = { .steps = 1, .divide = { true, 1024.0, 1.0 / 8192.0 } };
    wrap_run *sum = run_like(&plain, WRAP_DDP, 1), *average = run_like(&mean, WRAP_FSDP, 2);
    CHECK(sum->norms[0] > 0.0 && average->norms[0] == sum->norms[0] / 8.0);
    CHECK(all_equal(sum, &undone)); /* powers of two are exact */
    free(average);
    free(sum);
}

XD_TEST(leaves_are_divided_before_they_are_added) {
    wrap_run like = { .steps = 1, .spoiled = "embed", .spoiled_leaf = -1, .spoil = 3e38f };
    for (int kind = WRAP_DDP; kind <= WRAP_HSDP; kind++)
        for (int divides = 0; divides < 2; divides++) {
            like.divide.before = divides ? 16.0 : 0.0;
            wrap_run *run = run_like(&like, (wrap_kind)kind, 2);
            CHECK_EQ_INT(run->skipped[1], !divides);
            free(run);
        }
}

static xd_result refuse_divisors(xd_comm *world, void *argument) {
    static const double bad[] = { -2.0, NAN, INFINITY, 1e300, 1e-300 };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *model = wrap_model(ctx, XD_DTYPE_F32);
    xd_parallel *parallel = NULL;
    (void)argument;
    for (int i = 0; i < 5; i++) {
        xd_ddp_desc ddp = { .divide = { .before = bad[i] } };
        CHECK(wrap_over_ddp(model, world, &ddp, &parallel) == XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(ctx)->message, " of micro-batches: its inverse"));
        const xd_fsdp_desc fsdp = { .divide = { .average = true, .after = bad[i] } };
        CHECK(wrap_over_fsdp(model, world, &fsdp, &parallel) == XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(ctx)->message, " of the sum of all micro-batches: its inverse") &&
              !parallel);
    }
    xd_ddp_desc other = { .divide = { .average = xd_comm_rank(world) == 1 } };
    CHECK(wrap_over_ddp(model, world, &other, &parallel) == XD_ERROR_MISMATCH && !parallel);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(divisors_without_an_inverse_and_different_ones_are_refused) {
    CHECK(xd_run_threads(2, NULL, refuse_divisors, NULL, NULL) == XD_OK);
}

/* ---- thawed weights ---- */

XD_TEST(weights_thawed_during_training_have_the_bits_of_one_rank_under_every_wrapper) {
    const wrap_run likes[] = {
        { .thaws = { { "layers.1.attention", 1 } } },
        { .thaws = { { "head", 2 },
                     { "layers.0.mlp.up", 1 },
                     { "layers.2.mlp.bias", 2 },
                     { "layers.1.table", 0 } } },
        { .thaws = { { "embed", 1 }, { "layers.2.attention", 1 } }, .kept = XD_DTYPE_BF16 },
        { .thaws = { { "layers.0.norm", 1 }, { "layers.0.table", 2 } },
          .view = XD_DTYPE_BF16,
          .skips = true },
    };
    for (int i = 0; i < 4; i++) {
        const wrap_run never = { .kept = likes[i].kept, .view = likes[i].view, .skips = likes[i].skips };
        wrap_run *one = run_like(&likes[i], WRAP_DDP, 1), *plain = run_like(&never, WRAP_DDP, 1);
        CHECK(!wrap_equal(one, plain));
        CHECK(all_equal(one, &likes[i]));
        free(plain);
        free(one);
    }
}

XD_TEST(weights_thawed_before_the_first_step_train_as_if_they_had_never_been_frozen) {
    const wrap_run plain = { .steps = 0 };
    const wrap_run like = { .thaws = { { "head", 0 },
                                       { "layers.0.mlp.up", 0 },
                                       { "layers.2.mlp.bias", 0 },
                                       { "layers.1.norm", 0 } } };
    wrap_run *one = run_like(&plain, WRAP_DDP, 1);
    CHECK(all_equal(one, &like));
    free(one);
}

/* A step of DDP over a model with a frozen weight: bytes of gradients that this rank has sent. */
static uint64_t step_bytes(wrap_rank *r) {
    const uint64_t before = xd_comm_traffic(r->world).bytes_sent;
    CHECK(wrap_leaves(r) == XD_OK && xd_parallel_reduce(r->parallel) == XD_OK &&
          xd_parallel_publish(r->parallel) == XD_OK);
    return xd_comm_traffic(r->world).bytes_sent - before;
}

static xd_result rest_and_wake(xd_comm *world, void *argument) {
    uint64_t bytes[3];
    (void)argument;
    for (int reserves = 0; reserves < 2; reserves++) {
        wrap_run run = { .leaves = 4 };
        wrap_rank r = { .run = &run, .ctx = xd_comm_ctx(world), .world = world, .data = world };
        if (reserves) run.thaws[0].name = "layers.1.table";
        r.model = wrap_model(r.ctx, XD_DTYPE_F32);
        const xd_ddp_desc ddp = { .micro_batches = 4, .reserve_frozen = reserves };
        const xd_memory_plan_desc d = { .ddp = &ddp, .ranks = 2 };
        xd_memory_plan plan;
        CHECK(xd_plan_memory(r.model, &d, xd_comm_rank(world), &plan) == XD_OK);
        CHECK(wrap_over_ddp(r.model, world, &ddp, &r.parallel) == XD_OK);
        const xd_parallel_bytes taken = xd_parallel_memory(r.parallel);
        CHECK(memcmp(&taken, &plan.wrapper, sizeof taken) == 0);
        bytes[reserves] = step_bytes(&r);
        if (reserves) {
            CHECK(xd_parallel_thaw(r.parallel, xd_model_find_weight(r.model, "layers.1.table")) == XD_OK);
            bytes[2] = step_bytes(&r);
        }
        wrap_close(&r);
    }
    CHECK(bytes[0] > 0 && bytes[1] == bytes[0] && bytes[2] > bytes[1]);
    return XD_OK;
}

XD_TEST(buckets_of_frozen_weights_rest_until_one_is_thawed) {
    CHECK(xd_run_threads(2, NULL, rest_and_wake, NULL, NULL) == XD_OK);
}

static bool says(const wrap_rank *r, const char *text) {
    const char *message = xd_last_error(r->ctx)->message;
    if (!strstr(message, text)) printf("\"%s\" lacks \"%s\"\n", message, text);
    return strstr(message, text) != NULL;
}

static xd_weight *weight_of(const wrap_rank *r, const char *name) {
    return xd_model_find_weight(r->model, name);
}

static xd_result refuse_thaws(xd_comm *world, void *argument) {
    wrap_run run = { .kind = WRAP_HSDP, .groups = 2, .leaves = 4, .thaws = { { "layers.1.table", 0 } } };
    wrap_rank r = { .run = &run, .ctx = xd_comm_ctx(world), .world = world };
    const int rank = xd_comm_rank(world);
    xd_weight_desc d = { .name = "wide", .dtype = XD_DTYPE_F64, .ndim = 1, .shape = { 3 } };
    d.traits.frozen = true;
    (void)argument;
    r.model = wrap_describe(r.ctx, XD_DTYPE_F32);
    CHECK(xd_weight_add(xd_model_root(r.model), &d, NULL) == XD_OK && xd_model_seal(r.model) == XD_OK);
    xd_model *other = wrap_model(r.ctx, XD_DTYPE_F32);
    CHECK(wrap_groups(&r) == XD_OK && wrap_create(&r) == XD_OK);
    xd_parallel *p = r.parallel;
    CHECK(xd_parallel_thaw(p, xd_model_find_weight(other, "layers.1.table")) == XD_ERROR_ARGUMENT &&
          says(&r, "\"layers.1.table\" is one of another model"));
    CHECK(xd_parallel_thaw(p, weight_of(&r, "head")) == XD_ERROR_STATE &&
          says(&r, "\"embed\" is trained already"));
    CHECK(xd_parallel_thaw(p, weight_of(&r, "wide")) == XD_ERROR_DTYPE && says(&r, "\"wide\" is F64"));
    CHECK(xd_parallel_thaw(p, weight_of(&r, "layers.0.seen")) == XD_ERROR_STATE &&
          says(&r, "buffer \"layers.0.seen\""));
    /* Another weight on one rank, then in one group. */
    for (int groups = 0; groups < 2; groups++) {
        const bool differs = groups ? rank >= 2 : rank == 3;
        CHECK(xd_parallel_thaw(p, weight_of(&r, differs ? "layers.0.table" : "layers.1.table")) != XD_OK);
        CHECK(says(&r, "the weight that is thawed"));
    }
    CHECK(wrap_leaves(&r) == XD_OK);
    CHECK(xd_parallel_thaw(p, weight_of(&r, "layers.1.table")) == XD_ERROR_STATE &&
          says(&r, "\"layers.1.table\" is thawed within a step of 4 micro-batches"));
    CHECK(xd_parallel_reduce(p) == XD_OK);
    CHECK(xd_parallel_thaw(p, weight_of(&r, "layers.1.table")) == XD_ERROR_STATE &&
          says(&r, "within a step"));
    CHECK(xd_parallel_publish(p) == XD_OK);
    /* One group has a reason of its own; all are told. */
    xd_block_view view;
    const xd_pass pass = { XD_PASS_FORWARD, 0, false };
    if (rank < 2) CHECK(xd_block_begin(xd_model_root(r.model), pass, &view) == XD_OK);
    CHECK(xd_parallel_thaw(p, weight_of(&r, "layers.1.table")) ==
          (rank < 2 ? XD_ERROR_STATE : XD_ERROR_PEER));
    CHECK(says(&r, "xd_parallel_thaw while block \"\" is open"));
    if (rank < 2) CHECK(xd_block_end(xd_model_root(r.model)) == XD_OK);
    CHECK(xd_parallel_thaw(p, weight_of(&r, "layers.1.table")) == XD_OK);
    CHECK(xd_parallel_thaw(p, weight_of(&r, "layers.1.table")) == XD_ERROR_STATE &&
          says(&r, "is trained already"));
    wrap_close(&r);
    xd_model_destroy(other);
    return XD_OK;
}

static xd_result refuse_without_room(xd_comm *world, void *argument) {
    xd_parallel *parallel = NULL;
    wrap_rank r = { .ctx = xd_comm_ctx(world), .model = wrap_model(xd_comm_ctx(world), XD_DTYPE_F32) };
    (void)argument;
    CHECK(wrap_over_fsdp(r.model, world, NULL, &parallel) == XD_OK);
    CHECK(xd_parallel_thaw(parallel, weight_of(&r, "layers.1.table")) == XD_ERROR_STATE &&
          says(&r, "\"layers.1.table\" cannot be thawed: the model was wrapped without reserve_frozen"));
    xd_parallel_destroy(parallel);
    const xd_ddp_desc d = { .reserve_frozen = xd_comm_rank(world) == 1 };
    CHECK(wrap_over_ddp(r.model, world, &d, &parallel) == XD_ERROR_MISMATCH);
    xd_model_destroy(r.model);
    return XD_OK;
}

XD_TEST(weights_that_cannot_be_thawed_are_named_on_all_ranks) {
    CHECK(xd_run_threads(4, NULL, refuse_thaws, NULL, NULL) == XD_OK);
    CHECK(xd_run_threads(2, NULL, refuse_without_room, NULL, NULL) == XD_OK);
}

/* ---- instances of the optimizer ---- */

XD_TEST(optimizers_of_several_instances_have_the_bits_of_one_rank) {
    static const int worlds[][2] = { { 2, 2 }, { 4, 2 }, { 4, 4 }, { 6, 2 }, { 8, 4 } };
    wrap_run like = { .thaws = { { "layers.1.attention", 1 } }, .divide = { .average = true } };
    wrap_run *one = run_like(&like, WRAP_DDP, 1);
    for (int i = 0; i < 5; i++)
        for (int kind = WRAP_DDP; kind <= WRAP_SHARDED; kind++)
            for (like.queues = 0; like.queues <= 2; like.queues++) {
                like.groups = worlds[i][1];
                wrap_run *run = run_like(&like, (wrap_kind)kind, worlds[i][0]);
                CHECK(wrap_equal(one, run));
                free(run);
            }
    free(one);
}

/* ---- weights on several meshes ---- */

/* One model over all ranks and one over each half of them; one norm over both, and an optimizer for each. */
static xd_result clip_two_meshes(xd_comm *world, void *argument) {
    double *out = (double *)argument; /* the norm, and two sums of stepped values */
    wrap_run run = { .kind = WRAP_FSDP, .leaves = 8 };
    wrap_rank r[2];
    xd_param params[2 * WRAP_WEIGHTS];
    xd_optimizer *optimizers[2] = { NULL, NULL };
    int64_t count[2], first = 0;
    const int rank = xd_comm_rank(world), half = (xd_comm_size(world) + 1) / 2;
    for (int m = 0; m < 2; m++) {
        r[m] = (wrap_rank){ .run = &run, .ctx = xd_comm_ctx(world), .world = world, .data = world };
        if (m) CHECK(xd_comm_split(world, rank / half, rank, &r[m].data) == XD_OK);
        r[m].model = wrap_model(r[m].ctx, XD_DTYPE_F32);
        CHECK(wrap_create(&r[m]) == XD_OK && wrap_leaves(&r[m]) == XD_OK);
        CHECK(xd_parallel_reduce(r[m].parallel) == XD_OK);
        CHECK(xd_parallel_params(r[m].parallel, WRAP_WEIGHTS, params + first, &count[m]) == XD_OK);
        for (int64_t i = first; i < first + count[m]; i++) params[i].replica |= m && rank >= half;
        xd_optimizer_desc d = m ? (xd_optimizer_desc){ .params = params + first,
                                                       .param_count = count[m],
                                                       .kind = XD_OPTIMIZER_SGD,
                                                       .learning_rate = 1e-3 }
                                : xd_adamw_defaults(params, count[m]);
        d.learning_rate = 0.5;
        CHECK(xd_optimizer_create(r[m].ctx, &d, &optimizers[m]) == XD_OK);
        first += count[m];
    }
    const xd_gradient_norm_desc clip = { .params = params, .param_count = first, .max_norm = 1.0 };
    xd_gradient_norm norm;
    CHECK(xd_gradient_norm_compute(r[0].ctx, world, &clip, &norm) == XD_OK && norm.coefficient < 1.0f);
    const xd_optimizer_step_desc step = { .gradient_scale = &norm.coefficient };
    if (rank == 0) out[0] = norm.norm;
    for (int m = 0; m < 2; m++) {
        xd_block_view view;
        const xd_pass pass = { XD_PASS_INFERENCE, 0, false };
        CHECK(xd_optimizer_step(optimizers[m], &step, NULL) == XD_OK &&
              xd_parallel_publish(r[m].parallel) == XD_OK);
        CHECK(xd_block_begin(xd_model_root(r[m].model), pass, &view) == XD_OK);
        for (int i = 0; i < 35 && rank == 0; i++) out[1 + m] += ((const float *)view.values[0])[i];
        CHECK(xd_block_end(xd_model_root(r[m].model)) == XD_OK);
        xd_optimizer_destroy(optimizers[m]);
        wrap_close(&r[m]);
    }
    return XD_OK;
}

XD_TEST(one_norm_clips_weights_on_several_meshes_and_each_mesh_has_an_optimizer_of_its_own) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    double one[3] = { 0 };
    CHECK(xd_run_threads(1, &desc, clip_two_meshes, one, NULL) == XD_OK && one[1] != one[2]);
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        double many[3] = { 0 };
        CHECK(xd_run_threads(ranks, &desc, clip_two_meshes, many, NULL) == XD_OK);
        CHECK(memcmp(one, many, sizeof one) == 0);
    }
}

XD_TEST_MAIN()
