/* Where the parts of a model are that is built over several ranks: the groups of ranks, and the layers of each stage. */
#if defined(XD_TEST_LAYERS)
#    include "model/build_internal.h"
#endif
#include "xdistill.h"

#include "build_ranks.h"

/* ---- groups ---- */

static void check_group(const xd_comm *comm, int count, const int *ranks) {
    CHECK(comm != NULL);
    CHECK_EQ_INT(xd_comm_size(comm), count);
    for (int i = 0; i < count; i++) CHECK_EQ_INT(xd_comm_world_rank(comm, i), ranks[i]);
}

static xd_result make_groups(xd_comm *world, void *argument) {
    xd_grid *grid = NULL;
    (void)argument;
    CHECK(xd_grid_create(world, &(xd_expert_desc){ .tp = 2, .cp = 2, .pp = 2 }, &grid) == XD_OK);
    const xd_groups *g = xd_grid_groups(grid);
    const int rank = xd_comm_rank(world);
    if (rank == 5) { /* tp 1, cp 0, dp 1, pp 0 of Megatron's order */
        check_group(g->tp, 2, (const int[]){ 4, 5 });
        check_group(g->cp, 2, (const int[]){ 5, 7 });
        check_group(g->dp, 2, (const int[]){ 1, 5 });
        check_group(g->pp, 2, (const int[]){ 5, 13 });
        check_group(g->mp, 4, (const int[]){ 4, 5, 12, 13 });
        check_group(g->tp_cp, 4, (const int[]){ 4, 5, 6, 7 });
        check_group(g->dp_cp, 4, (const int[]){ 1, 3, 5, 7 });
        check_group(g->tp_dp_cp, 8, (const int[]){ 0, 1, 2, 3, 4, 5, 6, 7 });
        check_group(g->embedding, 2, (const int[]){ 5, 13 });
        check_group(g->position_embedding, 1, (const int[]){ 5 });
        check_group(g->expert_dp, 4, (const int[]){ 1, 3, 5, 7 });
        CHECK(g->intra_dp_cp == g->dp_cp && !g->inter_instances);
    }
    CHECK((g->position_embedding == NULL) == (rank >= 8));
    xd_grid_destroy(grid);
    return XD_OK;
}

XD_TEST(groups_are_those_of_megatrons_grid) {
    build_ranks(16, make_groups);
}

static xd_result make_expert_groups(xd_comm *world, void *argument) {
    xd_grid *grid = NULL;
    const xd_expert_desc sizes = { .tp = 1, .ep = 2, .pp = 3, .optimizer_instances = 2 };
    (void)argument;
    CHECK(xd_grid_create(world, &sizes, &grid) == XD_OK);
    const xd_groups *g = xd_grid_groups(grid);
    const int rank = xd_comm_rank(world), line = rank % 4, first = rank - line;
    check_group(g->dp_cp, 4, (const int[]){ first, first + 1, first + 2, first + 3 });
    check_group(g->ep, 2, (const int[]){ first + line / 2 * 2, first + line / 2 * 2 + 1 });
    check_group(g->expert_dp, 2, (const int[]){ first + line % 2, first + line % 2 + 2 });
    check_group(g->tp_ep, 2, (const int[]){ first + line / 2 * 2, first + line / 2 * 2 + 1 });
    CHECK_EQ_INT(xd_comm_size(g->tp_ep_pp), 6);
    check_group(g->intra_dp_cp, 2, (const int[]){ first + line / 2 * 2, first + line / 2 * 2 + 1 });
    check_group(g->inter_instances, 2, (const int[]){ first + line % 2, first + line % 2 + 2 });
    CHECK_EQ_INT(xd_comm_size(g->intra_expert_dp), 1);
    CHECK_EQ_INT(xd_comm_size(g->inter_expert_instances), 2);
    CHECK((g->embedding == NULL) == (rank >= 4 && rank < 8)); /* the stage in the middle */
    xd_grid_destroy(grid);
    return XD_OK;
}

XD_TEST(groups_of_experts_and_instances_cut_the_data_group) {
    build_ranks(12, make_expert_groups);
}

static xd_result refuse_groups(xd_comm *world, void *argument) {
    xd_grid *grid = NULL;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_expert_desc sizes = { .tp = 3 };
    (void)argument;
    CHECK(xd_grid_create(world, &sizes, &grid) == XD_ERROR_TOPOLOGY && !grid);
    sizes = (xd_expert_desc){ .world_size = 8 };
    CHECK(xd_grid_create(world, &sizes, &grid) == XD_ERROR_TOPOLOGY);
    CHECK(strstr(xd_last_error(ctx)->message, "world_size is 8, the world has 4 ranks"));
    sizes = (xd_expert_desc){ .ep = 4, .optimizer_instances = 2 };
    CHECK(xd_grid_create(world, &sizes, &grid) == XD_ERROR_TOPOLOGY);
    CHECK(strstr(xd_last_error(ctx)->message, "1 ranks, not a multiple of 2 optimizer instances"));
    sizes = (xd_expert_desc){ .tp = xd_comm_rank(world) == 2 ? 1 : 2 };
    CHECK(xd_grid_create(world, &sizes, &grid) == XD_ERROR_MISMATCH && !grid);
    xd_grid_destroy(NULL);
    return XD_OK;
}

XD_TEST(grids_that_do_not_fit_are_refused_on_all_ranks) {
    build_ranks(4, refuse_groups);
}

/* ---- places ---- */

static xd_ctx *plain_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

XD_TEST(even_layers_go_round_by_round_to_the_ranks) {
    xd_ctx *ctx = plain_ctx();
    const xd_pipeline_desc d = { .ranks = 4, .virtual_stages = 2, .layer_count = 16 };
    for (int rank = 0; rank < 4; rank++)
        for (int stage = 0; stage < 2; stage++) {
            xd_stage_place place;
            CHECK(xdi_pipeline_place(ctx, &d, rank, stage, &place) == XD_OK);
            CHECK_EQ_INT(place.first_layer, 8 * stage + 2 * rank);
            CHECK_EQ_INT(place.layer_count, 2);
            CHECK(place.first == (rank == 0 && stage == 0) && place.last == (rank == 3 && stage == 1));
            CHECK(place.pipeline_rank == rank && place.pipeline_ranks == 4);
            CHECK(place.virtual_stage == stage && place.virtual_stages == 2);
        }
    xd_ctx_destroy(ctx);
}

XD_TEST(explicit_layers_of_chunks_follow_each_other) {
    xd_ctx *ctx = plain_ctx();
    const int64_t layers[] = { 1, 4, 0, 2 };
    const xd_pipeline_desc d = { .ranks = 2, .virtual_stages = 2, .layer_count = 7, .chunk_layers = layers };
    const int64_t first[] = { 0, 1, 5, 5 };
    for (int chunk = 0; chunk < 4; chunk++) {
        xd_stage_place place;
        CHECK(xdi_pipeline_place(ctx, &d, chunk % 2, chunk / 2, &place) == XD_OK);
        CHECK_EQ_INT(place.first_layer, first[chunk]);
        CHECK_EQ_INT(place.layer_count, layers[chunk]);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(pipelines_that_do_not_add_up_are_refused) {
    static const int64_t few[] = { 1, 2 }, many[] = { 3, 9 }, negative[] = { 5, -1 };
    const struct {
        xd_pipeline_desc desc;
        int rank, stage;
        xd_result result;
        const char *text;
    } cases[] = {
        { { 2, 3, 13, NULL }, 0, 0, XD_ERROR_TOPOLOGY, "13 layers do not divide into 2 ranks x 3" },
        { { 2, 1, 4, few }, 0, 0, XD_ERROR_ARGUMENT, "add up to 3, not to 4" },
        { { 2, 1, 4, many }, 0, 0, XD_ERROR_ARGUMENT, "first 2 chunks have more than all 4" },
        { { 2, 1, 4, negative }, 0, 0, XD_ERROR_ARGUMENT, "first 1 chunks have more than all 4" },
        { { 2, 1, 9, negative }, 0, 0, XD_ERROR_ARGUMENT, "chunk 1 of 2 has -1 layers" },
        { { 1, 2, 4, NULL }, 0, 1, XD_ERROR_ARGUMENT, "virtual stage 1 of 1" },
        { { 1, 2, 4, few }, 0, 0, XD_ERROR_ARGUMENT, "add up to 3, not to 4" },
        { { 0, 129, 4, NULL }, 0, 0, XD_ERROR_ARGUMENT, "129 virtual stages, at most 128" },
        { { 2, 129, 258, NULL }, 0, 0, XD_ERROR_ARGUMENT, "129 virtual stages, at most 128" },
        { { 2, -1, 4, NULL }, 0, 0, XD_ERROR_ARGUMENT, "-1 virtual stages" },
        { { -2, 1, 4, NULL }, 0, 0, XD_ERROR_ARGUMENT, "-2 ranks" },
        { { 2, 1, -4, NULL }, 0, 0, XD_ERROR_ARGUMENT, "-4 layers" },
        { { 2, 1, 4, NULL }, 2, 0, XD_ERROR_ARGUMENT, "rank 2 of 2" },
        { { 2, 0, 4, NULL }, 0, 1, XD_ERROR_ARGUMENT, "virtual stage 1 of 1" },
    };
    xd_ctx *ctx = plain_ctx();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        xd_stage_place place = { .layer_count = 77 };
        const xd_result got = xdi_pipeline_place(ctx, &cases[i].desc, cases[i].rank, cases[i].stage, &place);
        CHECK_EQ_INT(got, cases[i].result);
        const bool said = strstr(xd_last_error(ctx)->message, cases[i].text) != NULL;
        if (!said) printf("%zu: %s\n", i, xd_last_error(ctx)->message);
        CHECK(said && place.layer_count == 77);
    }
    xd_ctx_destroy(ctx);
}

/* One rank has the whole model, however it would be cut for several. */
XD_TEST(virtual_stages_of_one_rank_are_one_stage) {
    xd_ctx *ctx = plain_ctx();
    const int64_t layers[] = { 1, 4, 2 };
    for (int i = 0; i < 4; i++) {
        const xd_pipeline_desc d = {
            .ranks = i % 2, .virtual_stages = 3, .layer_count = 7, .chunk_layers = i < 2 ? NULL : layers
        };
        xd_stage_place place;
        CHECK(xdi_pipeline_place(ctx, &d, 0, 0, &place) == XD_OK);
        CHECK(place.first && place.last && place.first_layer == 0 && place.layer_count == 7);
        CHECK(place.virtual_stages == 1 && place.pipeline_ranks == 1);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
