/* Wrappers: gradients that are not finite or too large, their scale, and weights that are thawed during training. */
#include "xdistill.h"

#include "wrap_train.h"

#include <math.h>

static const char *const kinds[] = { "DDP", "DDP with a sharded optimizer", "FSDP", "FSDP with whole leaves",
                                     "HSDP" };

static wrap_run *run_like(const wrap_run *like, wrap_kind kind, int ranks) {
    wrap_run *run = wrap_new(kind, ranks, 8, XD_REDUCTION_INVARIANT), empty = *run;
    *run = *like;
    run->kind = kind;
    run->ranks = ranks;
    run->leaves = empty.leaves;
    run->reduction = empty.reduction;
    run->groups = kind == WRAP_HSDP ? 2 : 0;
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
            CHECK(result == (wrong == 2 ? XD_ERROR_MISMATCH : rank < 2 ? alone : XD_ERROR_PEER));
            CHECK(strstr(xd_last_error(r.ctx)->message, text));
        } else
            CHECK(result == XD_OK && xd_comm_traffic(r.data).calls == calls + 1);
        CHECK(xd_parallel_publish(r.parallel) == XD_OK);
    }
    wrap_close(&r);
    return XD_OK;
}

XD_TEST(groups_of_replicas_end_a_step_together_after_one_exchange_in_each) {
    const xd_ctx_desc desc = { .timeout_seconds = 20 };
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
        CHECK(xd_ddp_create(model, world, &ddp, &parallel) == XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(ctx)->message, " of leaves: its inverse"));
        const xd_fsdp_desc fsdp = { .divide = { .average = true, .after = bad[i] } };
        CHECK(xd_fsdp_create(model, world, &fsdp, &parallel) == XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(ctx)->message, " of the sum of all leaves: its inverse") && !parallel);
    }
    xd_ddp_desc other = { .divide = { .average = xd_comm_rank(world) == 1 } };
    CHECK(xd_ddp_create(model, world, &other, &parallel) == XD_ERROR_MISMATCH && !parallel);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(divisors_without_an_inverse_and_different_ones_are_refused) {
    CHECK(xd_run_threads(2, NULL, refuse_divisors, NULL, NULL) == XD_OK);
}

XD_TEST_MAIN()
