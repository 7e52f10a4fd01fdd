/* Experts under a wrapper: what is refused, on which ranks, in which words. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "expert_scene.h"

static bool says(const expert_rank *r, const char *text) {
    const char *message = xd_last_error(r->ctx)->message;
    if (strstr(message, text)) return true;
    printf("rank %d: \"%s\" lacks \"%s\"\n", xd_comm_rank(r->world), message, text);
    return false;
}

static void run_ranks(int ranks, xd_rank_function function) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(ranks, &desc, function, NULL, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    CHECK(result == XD_OK);
}

/* A rank with its model and groups, not wrapped. */
static void open_rank(expert_rank *r, xd_comm *world, expert_run *run, int ep) {
    memset(run, 0, sizeof *run);
    run->ranks = xd_comm_size(world);
    run->ep = ep;
    run->experts = 4;
    run->reduction = XD_REDUCTION_INVARIANT;
    CHECK(expert_open(r, world, run) == XD_OK);
}

static xd_result wrap(expert_rank *r, xd_comm *experts) {
    const xd_fsdp_desc d = { .micro_batches = 4, .experts = { .data = experts } };
    return wrap_over_fsdp(r->model, r->world, &d, &r->parallel);
}

/* ---- groups ---- */

static xd_result refuse_groups(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    static expert_run runs[4];
    expert_rank r;
    xd_comm *three = NULL, *far = NULL;
    (void)argument;
    open_rank(&r, world, &runs[rank], 2);
    CHECK(xd_comm_split(world, rank < 3, rank, &three) == XD_OK);
    CHECK(xd_comm_split(world, rank / 2, rank, &far) == XD_OK);
    xd_result result = wrap(&r, three);
    CHECK(rank < 3 ? result == XD_ERROR_TOPOLOGY : result == XD_ERROR_PEER);
    CHECK(says(&r, "3 ranks with the same experts do not divide 4 data ranks"));
    result = wrap(&r, far);
    CHECK(rank == 1 || rank == 2 ? result == XD_ERROR_TOPOLOGY : result == XD_ERROR_PEER);
    CHECK(says(&r, rank == 2
                       ? "data rank 2 of 4 is number 0 of the 2 with its experts, not 1"
                       : "data rank 1 of 4 is number 1 of the 2 with its experts, not 0: the 2 members"));
    CHECK(wrap(&r, NULL) == XD_ERROR_UNSUPPORTED);
    CHECK(says(&r, "\"layers.0.experts.up\" is an expert's, which needs a data group of its own among 4"));
    result = wrap(&r, rank == 2 ? NULL : r.groups->expert_dp);
    CHECK(rank == 2 ? result == XD_ERROR_UNSUPPORTED : result == XD_ERROR_PEER);
    result = wrap(&r, rank == 3 ? world : r.groups->expert_dp); /* number 3 of 4, and of two */
    CHECK(result == XD_ERROR_MISMATCH && says(&r, "settings of a wrapper"));
    CHECK(!r.parallel && wrap(&r, r.groups->expert_dp) == XD_OK);
    xd_comm_destroy(three);
    xd_comm_destroy(far);
    expert_close(&r);
    return XD_OK;
}

XD_TEST(groups_of_experts_that_do_not_fit_the_data_ranks_are_refused) {
    run_ranks(4, refuse_groups);
}

/* ---- models ---- */

static xd_model *describe_plain(xd_ctx *ctx, bool expert, int64_t rows) {
    xd_model *model = NULL;
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    wrap_weight(xd_model_root(model), "head", 3, 0);
    xd_block *block = wrap_child(xd_model_root(model), "experts", NULL);
    xd_weight_desc d = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { rows } };
    d.traits.expert = expert;
    CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

/* Wraps a model and forgets it; what the last error says is kept. */
static xd_result try_model(expert_rank *r, bool expert, int64_t rows, xd_comm *experts) {
    xd_model *mine = r->model;
    r->model = describe_plain(r->ctx, expert, rows);
    const xd_result result = wrap(r, experts);
    xd_parallel_destroy(r->parallel);
    r->parallel = NULL;
    xd_model_destroy(r->model);
    r->model = mine;
    return result;
}

static xd_result refuse_models(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    static expert_run runs[4];
    expert_rank r;
    (void)argument;
    open_rank(&r, world, &runs[rank], 2);
    CHECK(try_model(&r, false, 4, r.groups->expert_dp) == XD_ERROR_ARGUMENT);
    CHECK(says(&r, "a group of 2 ranks with the same experts, and none of 2 weights is an expert's"));
    const xd_result none = try_model(&r, rank != 1, 4, rank == 1 ? NULL : r.groups->expert_dp);
    CHECK(none == XD_ERROR_MISMATCH &&
          says(&r, "the models differ first at weight 1: \"nothing\" on rank 0"));
    /* Ranks 0 and 2 have the same experts, so do 1 and 3; members of a group may have others. */
    CHECK(try_model(&r, true, rank % 2 ? 5 : 4, r.groups->expert_dp) == XD_OK);
    const xd_result other = try_model(&r, true, rank == 3 ? 5 : 4, r.groups->expert_dp);
    CHECK(rank % 2 ? other == XD_ERROR_MISMATCH : other == XD_ERROR_PEER);
    CHECK(says(&r, "the models differ first at weight 1: \"experts.w\" on rank 1, \"experts.w\" on rank 3"));
    expert_close(&r);
    return XD_OK;
}

XD_TEST(experts_on_some_ranks_alone_or_of_other_shapes_are_told) {
    run_ranks(4, refuse_models);
}

/* ---- steps ---- */

static xd_result misuse_steps(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    static expert_run runs[2];
    xd_block_view view;
    expert_rank r;
    (void)argument;
    open_rank(&r, world, &runs[rank], 2);
    const xd_ddp_desc d = { .micro_batches = 3, .experts = { .data = r.groups->expert_dp } };
    CHECK(wrap_over_ddp(r.model, world, &d, &r.parallel) == XD_OK);
    const xd_parallel_micro_batch_count leaves = xd_parallel_expert_micro_batches(r.parallel);
    CHECK(leaves.own == 3 && leaves.max == 3 && leaves.total == 3 && leaves.opened == 4);
    CHECK_EQ_INT(xd_parallel_micro_batches(r.parallel).own, 1 + rank);
    const int64_t numbers[] = { -1, 0, 1, -1, 2, -1 }; /* rank 0 has leaf 0; rank 1 leaves 1 and 2 */
    for (int64_t k = -1; k < 5; k++)
        CHECK_EQ_INT(xd_parallel_expert_micro_batch(r.parallel, k), numbers[k + 1]);
    xd_block *experts = r.layers[0].experts;
    CHECK(xd_block_begin(experts, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = 1 }, &view) == XD_ERROR_STATE &&
          says(&r, "micro-batch 1 of block \"layers.0.experts\", whose next one is 0: .micro_batch of an "
                   "xd_pass counts"));
    CHECK(xd_block_begin(experts, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = 4 }, &view) ==
              XD_ERROR_ARGUMENT &&
          says(&r, "micro-batch 4 of block \"layers.0.experts\": this rank has 4; .micro_batch of an xd_pass "
                   "counts"));
    CHECK(xd_parallel_push_micro_batch(r.parallel) == XD_ERROR_UNSUPPORTED &&
          says(&r, "micro-batches of experts, 3 in a step"));
    for (int64_t k = 0; k < 2; k++) CHECK(xd_block_skip(experts, k) == XD_OK);
    CHECK(xd_block_skip(experts, 2) == XD_ERROR_STATE &&
          says(&r, "micro-batch 2 of block \"layers.0.experts\" while micro-batch 0 of block "
                   "\"layers.1.experts\" is not"));
    for (int64_t k = 0; k < 4; k++)
        for (int i = k < 2; i < (rank && k == 3 ? 1 : 2); i++)
            CHECK(xd_block_skip(r.layers[i].experts, k) == XD_OK);
    CHECK(xd_parallel_reduce(r.parallel) == XD_ERROR_STATE); /* rank 0 lacks leaves of the other blocks */
    if (rank)
        CHECK(says(&r, "block \"layers.1.experts\" has had backward passes of 3 micro-batches, not of 4"));
    CHECK(xd_block_begin(experts, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = 0 }, &view) == XD_OK);
    CHECK(xd_parallel_publish(r.parallel) != XD_OK && says(&r, "while block \"layers.0.experts\" is open"));
    CHECK(xd_block_end(experts) == XD_OK);
    CHECK(xd_parallel_publish(r.parallel) == XD_OK);
    expert_close(&r);
    return XD_OK;
}

XD_TEST(leaves_of_experts_have_an_order_and_a_number) {
    run_ranks(2, misuse_steps);
}

XD_TEST(without_experts_there_are_no_micro_batches_of_theirs) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    xd_parallel *parallel = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_comm_self(ctx, &world) == XD_OK);
    xd_model *model = describe_plain(ctx, false, 4);
    CHECK(wrap_over_ddp(model, world, NULL, &parallel) == XD_OK);
    const xd_parallel_micro_batch_count leaves = xd_parallel_expert_micro_batches(parallel);
    CHECK(leaves.own == 0 && leaves.max == 0 && leaves.total == 0 && leaves.opened == 0);
    CHECK_EQ_INT(xd_parallel_expert_micro_batch(parallel, 0), -1);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
