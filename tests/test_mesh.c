/* Topologies against the tables of the order strings, meshes and their groups over threads. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "comm/topology_internal.h"
#endif

#include "xd_test.h"

static xd_ctx *plain_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

/* The groups over named axes as text, groups and members in row-major order: "[0,1] [2,3]". */
static const char *groups(const xd_topology *t, const char *names) {
    static char text[256];
    bool inside[XD_MESH_AXES_MAX] = { false };
    int count[2] = { 1, 1 }; /* of groups, of members */
    size_t used = 0;
    while (names) {
        const char *name;
        const size_t length = xdi_topology_next(&names, &name);
        for (int i = 0; i < t->axis_count; i++)
            if (strlen(t->name[i]) == length && strncmp(t->name[i], name, length) == 0) inside[i] = true;
    }
    for (int i = 0; i < t->axis_count; i++) count[inside[i]] *= t->size[i];
    for (int k = 0; k < count[0] * count[1] && used + 8 < sizeof text; k++) {
        const int member = k % count[1];
        int coordinate[XD_MESH_AXES_MAX], rest[2] = { k / count[1], member };
        for (int i = t->axis_count - 1; i >= 0; i--) {
            coordinate[i] = rest[inside[i]] % t->size[i];
            rest[inside[i]] /= t->size[i];
        }
        const char *const before = member ? ","
                                   : k    ? " ["
                                          : "[",
                          *const after = member + 1 < count[1] ? "" : "]";
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%d%s", before,
                                 xdi_topology_rank(t, coordinate), after);
    }
    return text;
}

static xd_result ordered(xd_ctx *ctx, const char *order, const xd_axis *axes, int axis_count, int world_size,
                         xd_topology *out) {
    const xdi_topology_desc desc = {
        .axes = axes, .axis_count = axis_count, .order = order, .world_size = world_size
    };
    return xdi_topology_create(ctx, &desc, out);
}

XD_TEST(order_strings_give_the_groups_of_the_table) {
    const xd_axis axes[5] = { { "tp", 2 }, { "cp", 2 }, { "ep", 1 }, { "dp", 2 }, { "pp", 2 } };
    static const char *const table[][2] = {
        { "tp", "[0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]" },
        { "cp", "[0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]" },
        { "dp", "[0,4] [1,5] [2,6] [3,7] [8,12] [9,13] [10,14] [11,15]" },
        { "pp", "[0,8] [1,9] [2,10] [3,11] [4,12] [5,13] [6,14] [7,15]" },
        { "dp-cp", "[0,2,4,6] [1,3,5,7] [8,10,12,14] [9,11,13,15]" },
        { "cp-dp", "[0,2,4,6] [1,3,5,7] [8,10,12,14] [9,11,13,15]" },
        { "tp-cp", "[0,1,2,3] [4,5,6,7] [8,9,10,11] [12,13,14,15]" },
        { "tp-pp", "[0,1,8,9] [2,3,10,11] [4,5,12,13] [6,7,14,15]" },
        { "tp-dp", "[0,1,4,5] [2,3,6,7] [8,9,12,13] [10,11,14,15]" },
        { "tp-dp-cp", "[0,1,2,3,4,5,6,7] [8,9,10,11,12,13,14,15]" },
    };
    xd_ctx *ctx = plain_ctx();
    xd_topology t;
    CHECK(ordered(ctx, "tp-cp-ep-dp-pp", axes, 5, 16, &t) == XD_OK);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        CHECK_EQ_STR(groups(&t, table[i][0]), table[i][1]);
    const xd_axis three[3] = { { "tp", 2 }, { "pp", 4 }, { "dp", 2 } },
                  cube[3] = { { "tp", 2 }, { "pp", 2 }, { "dp", -1 } };
    CHECK(ordered(ctx, "tp-dp-pp", three, 3, 16, &t) == XD_OK);
    CHECK_EQ_STR(groups(&t, "dp"), "[0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]");
    CHECK_EQ_STR(groups(&t, "pp"), "[0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]");
    CHECK(ordered(ctx, "tp-pp-dp", cube, 3, 8, &t) == XD_OK);
    CHECK_EQ_STR(groups(&t, "pp"), "[0,2] [1,3] [4,6] [5,7]");
    CHECK_EQ_STR(groups(&t, "dp"), "[0,4] [1,5] [2,6] [3,7]");
    xd_ctx_destroy(ctx);
}

XD_TEST(an_order_goes_over_a_list_of_ranks_too) {
    const xd_axis axes[2] = { { "tp", 2 }, { "dp", -1 } };
    const int ranks[4] = { 7, 5, 3, 1 };
    xd_ctx *ctx = plain_ctx();
    xd_topology t;
    CHECK(xdi_topology_create(ctx,
                              &(xdi_topology_desc){ .axes = axes,
                                                    .axis_count = 2,
                                                    .order = "tp-dp",
                                                    .ranks = ranks,
                                                    .rank_count = 4,
                                                    .world_size = 8 },
                              &t) == XD_OK);
    CHECK_EQ_STR(groups(&t, "tp"), "[7,5] [3,1]");
    CHECK_EQ_STR(groups(&t, "dp"), "[7,3] [5,1]");
    xd_ctx_destroy(ctx);
}

XD_TEST(bad_order_strings_are_refused) {
    const xd_axis axes[3] = { { "tp", 2 }, { "dp", 2 }, { "pp", 1 } }, both[2] = { { "cp", 2 }, { "ep", 2 } };
    const xd_axis inside[2] = { { "dp", 4 }, { "edp", 1 } };
    xd_ctx *ctx = plain_ctx();
    xd_topology t;
    CHECK(ordered(ctx, "tp-dp", axes, 3, 4, &t) == XD_OK);
    CHECK_EQ_INT(xdi_topology_axis(&t, "pp"), 0); /* left out at size 1: the slowest */
    CHECK(ordered(ctx, "tp-pp", axes, 3, 4, &t) == XD_ERROR_ARGUMENT);
    CHECK(ordered(ctx, "tp-dp-tp", axes, 3, 4, &t) == XD_ERROR_ARGUMENT);
    CHECK(ordered(ctx, "tp-dp-xx", axes, 3, 4, &t) == XD_ERROR_ARGUMENT);
    CHECK(ordered(ctx, "tp--dp", axes, 3, 4, &t) == XD_ERROR_ARGUMENT);
    CHECK(ordered(ctx, "cp-ep", both, 2, 4, &t) == XD_ERROR_ARGUMENT);
    CHECK(ordered(ctx, "edp", inside, 2, 4, &t) == XD_ERROR_ARGUMENT); /* "dp" is no part of "edp" */
    CHECK(ordered(ctx, "tp-dp-pp", axes, 3, 8, &t) == XD_ERROR_TOPOLOGY);
    CHECK(ordered(ctx, "tp-dp-pp", NULL, 3, 4, &t) == XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

XD_TEST(numbers_that_do_not_fit_are_in_the_message) {
    const xd_axis axes[2] = { { "dp", 1 }, { "tp", 2 } };
    const struct {
        xdi_topology_desc desc;
        xd_result expected;
        const char *message;
    } cases[] = {
        { { axes, 9, NULL, NULL, 0, 2 }, XD_ERROR_ARGUMENT, "9 axes given, 1 to 8 are possible" },
        { { NULL, 2, NULL, NULL, 0, 2 }, XD_ERROR_ARGUMENT, "2 axes given at NULL, 1 to 8 are possible" },
        { { axes, 2, NULL, NULL, -1, 2 }, XD_ERROR_ARGUMENT, "a list of -1 ranks" },
        { { axes, 2, NULL, NULL, 0, 0 }, XD_ERROR_ARGUMENT, "0 ranks given, at least 1 is needed" },
        { { axes, 2, NULL, NULL, 0, 5 },
          XD_ERROR_TOPOLOGY,
          "axis sizes multiply to 2 but the world has 5 ranks" },
    };
    xd_ctx *ctx = plain_ctx();
    xd_topology t;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_EQ_INT(xdi_topology_create(ctx, &cases[i].desc, &t), cases[i].expected);
        CHECK_EQ_STR(xd_last_error(ctx)->message, cases[i].message);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(an_axis_unflattens_into_levels_and_optimizer_instances) {
    const xd_axis line[1] = { { "cp", 16 } }, levels[3] = { { "h3", 4 }, { "h2", 2 }, { "h1", 2 } };
    const xd_axis wrong[2] = { { "a", 3 }, { "b", 5 } };
    xd_ctx *ctx = plain_ctx();
    xd_topology t, split;
    CHECK(xdi_topology_create(ctx, &(xdi_topology_desc){ .axes = line, .axis_count = 1, .world_size = 16 },
                              &t) == XD_OK);
    CHECK(xdi_topology_unflatten(ctx, &t, &(xdi_unflatten_desc){ "cp", levels, 3 }, &split) == XD_OK);
    CHECK_EQ_STR(groups(&split, "h1"), "[0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]");
    CHECK_EQ_STR(groups(&split, "h2"), "[0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]");
    CHECK_EQ_STR(groups(&split, "h3"), "[0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]");
    CHECK(xdi_topology_unflatten(ctx, &t, &(xdi_unflatten_desc){ "cp", wrong, 2 }, &split) ==
          XD_ERROR_TOPOLOGY);
    CHECK(xdi_topology_unflatten(ctx, &t, &(xdi_unflatten_desc){ "tp", levels, 3 }, &split) ==
          XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_two_expert_grids_share_their_pipelines) {
    xd_ctx *ctx = plain_ctx();
    xd_topology dense, expert;
    xd_expert_desc d;
    memset(&d, 0, sizeof d);
    d.world_size = 16;
    d.tp = d.pp = 2;
    d.ep = 4;
    d.expert_tp = 1;
    CHECK(xdi_topology_experts(ctx, &d, &dense, &expert) == XD_OK);
    CHECK_EQ_STR(groups(&dense, "pp"), "[0,8] [1,9] [2,10] [3,11] [4,12] [5,13] [6,14] [7,15]");
    CHECK_EQ_STR(groups(&expert, "ep"), "[0,1,2,3] [4,5,6,7] [8,9,10,11] [12,13,14,15]");
    d.order = "tp-cp-ep-pp-dp"; /* pipelines in the middle: dp would have to be equal */
    CHECK(xdi_topology_experts(ctx, &d, &dense, &expert) == XD_ERROR_TOPOLOGY);
    d.order = NULL;
    d.optimizer_instances = 3;
    CHECK(xdi_topology_experts(ctx, &d, &dense, &expert) == XD_ERROR_TOPOLOGY);
    d.optimizer_instances = 0;
    d.ep = 3;
    CHECK(xdi_topology_experts(ctx, &d, &dense, &expert) == XD_ERROR_TOPOLOGY);
    d.ep = d.pp = 1;
    d.virtual_pipeline = 2;
    CHECK(xdi_topology_experts(ctx, &d, &dense, &expert) == XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

XD_TEST(ranks_coordinates_and_groups_agree_about_every_member) {
    static const int order[12] = { 3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 7, 0 };
    const xd_axis axes[3] = { { "pp", 2 }, { "dp", 3 }, { "tp", 2 } };
    xd_ctx *ctx = plain_ctx();
    xd_topology t;
    int at = 0;
    CHECK(xdi_topology_create(ctx, &(xdi_topology_desc){ axes, 3, NULL, order, 12, 36 }, &t) == XD_OK);
    for (int p = 0; p < 2; p++)
        for (int d = 0; d < 3; d++)
            for (int k = 0; k < 2; k++, at++) {
                const int coordinate[3] = { p, d, k };
                int back[3] = { -1, -1, -1 };
                CHECK_EQ_INT(xdi_topology_rank(&t, coordinate), order[at]);
                CHECK(xdi_topology_coordinate(&t, order[at], back) &&
                      memcmp(back, coordinate, sizeof back) == 0);
            }
    CHECK_EQ_STR(groups(&t, "pp-tp"), "[3,1,6,5] [4,15,35,8] [9,2,7,0]");
    static const int absent[3] = { -1, 10, 36 };
    int nowhere[3];
    for (int i = 0; i < 3; i++) CHECK(!xdi_topology_coordinate(&t, absent[i], nowhere));
    xd_ctx_destroy(ctx);
}

XD_TEST(topologies_are_equal_and_hash_alike_by_axes_names_and_ranks) {
    static const int in_order[4] = { 0, 1, 2, 3 }, turned[4] = { 0, 2, 1, 3 };
    const xd_axis grid[2] = { { "dp", 2 }, { "tp", 2 } }, other[2] = { { "dp", 2 }, { "cp", 2 } };
    const xd_axis line[1] = { { "dp", 4 } };
    xd_ctx *ctx = plain_ctx();
    xd_topology t[5];
    CHECK(xdi_topology_create(ctx, &(xdi_topology_desc){ grid, 2, NULL, NULL, 0, 4 }, &t[0]) == XD_OK);
    CHECK(xdi_topology_create(ctx, &(xdi_topology_desc){ grid, 2, NULL, in_order, 4, 4 }, &t[1]) ==
          XD_OK); /* what NULL means */
    CHECK(xdi_topology_create(ctx, &(xdi_topology_desc){ grid, 2, NULL, turned, 4, 4 }, &t[2]) == XD_OK);
    CHECK(xdi_topology_create(ctx, &(xdi_topology_desc){ other, 2, NULL, NULL, 0, 4 }, &t[3]) == XD_OK);
    CHECK(xdi_topology_create(ctx, &(xdi_topology_desc){ line, 1, NULL, NULL, 0, 4 }, &t[4]) == XD_OK);
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++) {
            const bool same = i == j || (i < 2 && j < 2);
            CHECK_EQ_INT(xdi_topology_equal(&t[i], &t[j]), same);
            CHECK_EQ_INT(xdi_topology_hash(&t[i]) == xdi_topology_hash(&t[j]), same);
        }
    xd_ctx_destroy(ctx);
}

XD_TEST(the_hash_is_the_published_one_and_goes_on_from_a_seed) {
    CHECK(xd_hash(0, "", 0) == 0xcbf29ce484222325u); /* FNV-1a's test vectors */
    CHECK(xd_hash(0, "a", 1) == 0xaf63dc4c8601ec8cu);
    CHECK(xd_hash(0, "foobar", 6) == 0x85944171f73967e8u);
    CHECK(xd_hash(xd_hash(0, "foo", 3), "bar", 3) == xd_hash(0, "foobar", 6));
}

static xd_result agree_on_a_hash(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world);
    const char *message;
    (void)argument;
    CHECK_EQ_INT(xd_agree_same(world, 7, "the plan"), XD_OK);
    CHECK_EQ_INT(xd_agree_same(world, me == 2 ? 8 : 7, "the plan"), XD_ERROR_MISMATCH);
    message = xd_last_error(xd_comm_ctx(world))->message;
    CHECK(strstr(message, "the plan") && strstr(message, "2"));
    return xd_barrier(world); /* the group goes on */
}

XD_TEST(ranks_with_another_hash_are_named_together_with_the_thing) {
    CHECK(xd_run_threads(4, NULL, agree_on_a_hash, NULL, NULL) == XD_OK);
}

static xd_result refused_meshes(xd_comm *world, void *argument) {
    static const int twice[2] = { 1, 1 }, beyond[2] = { 0, 9 };
    static const struct {
        xd_mesh_desc desc;
        xd_result expected;
        const char *message;
    } cases[] = {
        { { { { "dp", 2 }, { "tp", 4 } }, NULL, 0, 6, NULL, NULL, NULL },
          XD_ERROR_ARGUMENT,
          "multiply to 8 but world_size is 6" },
        { { { { "dp", 2 }, { "tp", 4 } }, NULL, 0, 0, NULL, NULL, NULL },
          XD_ERROR_TOPOLOGY,
          "multiply to 8 but the world has 2" },
        { { { { "dp", 1 } }, NULL, 0, 0, NULL, NULL, NULL }, XD_ERROR_TOPOLOGY, "multiply to 1" },
        { { { { "dp", 1 }, { "dp", 2 } }, NULL, 0, 0, NULL, NULL, NULL },
          XD_ERROR_ARGUMENT,
          "both named \"dp\"" },
        { { { { "dp", 1 }, { NULL, 2 } }, NULL, 0, 0, NULL, NULL, NULL }, XD_ERROR_ARGUMENT, "name all" },
        { { { { "dp", -1 }, { "tp", -1 } }, NULL, 0, 0, NULL, NULL, NULL },
          XD_ERROR_ARGUMENT,
          "at most 1 can fill" },
        { { { { "dp", -1 }, { "tp", 3 } }, NULL, 0, 0, NULL, NULL, NULL },
          XD_ERROR_TOPOLOGY,
          "fill 2 ranks" },
        { { { { "dp", 0 }, { "tp", 2 } }, NULL, 0, 0, NULL, NULL, NULL }, XD_ERROR_ARGUMENT, "has size 0" },
        { { { { "d p", 2 } }, NULL, 0, 0, NULL, NULL, NULL }, XD_ERROR_ARGUMENT, "no name" },
        { { { { "dp", 2 } }, twice, 2, 0, NULL, NULL, NULL }, XD_ERROR_ARGUMENT, "both 1" },
        { { { { "dp", 2 } }, beyond, 2, 0, NULL, NULL, NULL }, XD_ERROR_ARGUMENT, "is 9" },
        { { { { NULL, 0 } }, NULL, 0, 0, NULL, NULL, NULL }, XD_ERROR_ARGUMENT, "0 axes" },
    };
    xd_ctx *ctx = xd_comm_ctx(world);
    (void)argument;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        xd_mesh *mesh = NULL;
        CHECK_EQ_INT(xd_mesh_create(world, &cases[i].desc, &mesh), cases[i].expected);
        CHECK(mesh == NULL);
        if (!strstr(xd_last_error(ctx)->message, cases[i].message))
            CHECK_EQ_STR(xd_last_error(ctx)->message, cases[i].message);
    }
    return XD_OK;
}

XD_TEST(meshes_that_do_not_fit_are_refused_with_both_numbers) {
    CHECK(xd_run_threads(2, NULL, refused_meshes, NULL, NULL) == XD_OK);
}

static void mesh_differs(xd_comm *world, const xd_mesh_desc *d, const char *text) {
    xd_mesh *mesh = NULL;
    CHECK_EQ_INT(xd_mesh_create(world, d, &mesh), XD_ERROR_MISMATCH);
    char expected[300];
    snprintf(expected, sizeof expected, "%s (in xd_mesh_create)", text);
    CHECK_EQ_STR(xd_last_error(xd_comm_ctx(world))->message, expected);
    CHECK(!mesh);
}

static xd_result disagreeing_meshes(xd_comm *world, void *argument) {
    static const int turned[4] = { 1, 0, 2, 3 };
    const int me = xd_comm_rank(world);
    xd_mesh_desc d;
    xd_mesh *mesh = NULL;
    (void)argument;
    memset(&d, 0, sizeof d);
    d.axes[0].name = me == 2 ? "tp" : "dp";
    d.axes[0].size = 4;
    mesh_differs(world, &d, "mesh: rank 2 passed axes[0].name = \"tp\", rank 0 passed \"dp\"");
    CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, 2);
    d.axes[0].name = me == 3 ? "sequences_a" : "sequences_b"; /* as one in the letters that are sent */
    mesh_differs(world, &d, "mesh: rank 3 passed another list of ranks, or of axes' long names than rank 0");
    d.axes[0].name = "dp";
    d.ranks = me == 1 ? turned : NULL;
    d.rank_count = me == 1 ? 4 : 0;
    mesh_differs(world, &d, "mesh: rank 1 passed another list of ranks, or of axes' long names than rank 0");
    d.ranks = NULL;
    d.rank_count = 0;
    d.axes[0].size = d.axes[1].size = 2;
    d.axes[1].name = "tp";
    if (me > 0) d.axes[0].size = 1, d.axes[1].size = 4;
    mesh_differs(world, &d, "mesh: rank 1 passed axes[0].size = 1, rank 0 passed 2");
    memset(&d, 0, sizeof d);
    d.axes[0].name = "dp";
    d.axes[0].size = me == 1 ? 0 : 4; /* one rank alone is wrong: all fail, the others name it */
    CHECK_EQ_INT(xd_mesh_create(world, &d, &mesh), me == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    if (me != 1) CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, 1);
    d.axes[0].size = 4;
    CHECK(xd_mesh_create(world, &d, &mesh) == XD_OK); /* and the world still works */
    xd_mesh_destroy(mesh);
    return XD_OK;
}

XD_TEST(ranks_that_disagree_about_a_mesh_are_named) {
    CHECK(xd_run_threads(4, NULL, disagreeing_meshes, NULL, NULL) == XD_OK);
}

static xd_result disagreeing_groups(xd_comm *world, void *argument) {
    const xd_mesh_desc d = { .axes = { { "dp", 2 }, { "cp", 2 }, { "tp", 3 } } };
    const int me = xd_comm_rank(world);
    const char *const message = xd_last_error(xd_comm_ctx(world))->message;
    xd_mesh *mesh = NULL;
    xd_comm *group = NULL;
    (void)argument;
    CHECK(xd_mesh_create(world, &d, &mesh) == XD_OK);
    CHECK_EQ_INT(xd_mesh_group(mesh, me == 5 ? "dp,tp" : "dp,cp", &group), XD_ERROR_MISMATCH);
    CHECK_EQ_STR(message,
                 "mesh groups: rank 5 passed ranks of a group = 6, rank 0 passed 4 (in xd_mesh_group)");
    CHECK_EQ_INT(xd_mesh_group(mesh, me == 7 ? "cp,tp" : "dp,tp", &group), XD_ERROR_MISMATCH);
    CHECK_EQ_STR(message, "mesh groups: rank 7 passed another list of ranks than rank 0 (in xd_mesh_group)");
    CHECK(xd_mesh_group(mesh, "dp,cp", &group) == XD_OK && xd_comm_size(group) == 4);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

XD_TEST(ranks_that_ask_for_other_groups_of_a_mesh_are_named) {
    CHECK(xd_run_threads(12, NULL, disagreeing_groups, NULL, NULL) == XD_OK);
}

/* A mesh of some axes of another, of several as one, or with one axis as several. */
static xd_result slice_of(xd_mesh *mesh, const char *axes, xd_mesh **out) {
    return xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = axes }, out);
}

static xd_result flat_of(xd_mesh *mesh, const char *axes, const char *name, xd_mesh **out) {
    return xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = axes, .flatten = true, .name = name }, out);
}

static xd_result split_of(xd_mesh *mesh, const char *axis, const xd_axis *parts, int count, xd_mesh **out) {
    return xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = axis, .parts = parts, .part_count = count },
                          out);
}

/* The world ranks of a communicator as text. */
static const char *members(const xd_comm *comm, char *text) {
    text[0] = 0;
    for (int i = 0; i < xd_comm_size(comm); i++)
        sprintf(text + strlen(text), i ? ",%d" : "%d", xd_comm_world_rank(comm, i));
    return text;
}

static xd_result derived_meshes(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world);
    const xd_axis parts[2] = { { "replicate", 2 }, { "shard", 1 } };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_mesh_desc d;
    xd_mesh *mesh = NULL, *again = NULL, *slice = NULL, *flat = NULL, *split = NULL, *joined = NULL,
            *bad = NULL;
    xd_comm *a = NULL, *b = NULL;
    char text[64], expected[64];
    int c = -1;
    (void)argument;
    memset(&d, 0, sizeof d);
    d.axes[0].name = "dp", d.axes[0].size = 2;
    d.axes[1].name = "cp", d.axes[1].size = -1;
    d.axes[2].name = "tp", d.axes[2].size = 2;
    CHECK(xd_mesh_create(world, &d, &mesh) == XD_OK);
    if (!mesh) return XD_ERROR_STATE;
    CHECK(xd_mesh_coordinate(mesh, "cp", &c) == XD_OK);
    CHECK_EQ_INT(c, me / 2 % 2);
    CHECK(xd_mesh_group(mesh, "cp", &a) == XD_OK);
    sprintf(expected, "%d,%d", me & ~2, me | 2);
    CHECK_EQ_STR(members(a, text), expected);
    CHECK_EQ_INT(xd_comm_rank(a), c);
    CHECK(xd_mesh_group(mesh, "tp,dp", &a) == XD_OK && xd_mesh_group(mesh, "dp,tp", &b) == XD_OK);
    CHECK(a == b);
    sprintf(expected, "%d,%d,%d,%d", me & 2, (me & 2) + 1, (me & 2) + 4, (me & 2) + 5);
    CHECK_EQ_STR(members(a, text), expected);
    CHECK(xd_mesh_group(mesh, "dp,cp,tp", &a) == XD_OK && a == world);
    CHECK(xd_mesh_group(mesh, NULL, &a) == XD_ERROR_ARGUMENT);
    CHECK(xd_mesh_group(mesh, "dp,pp", &a) == XD_ERROR_ARGUMENT);
    /* slices share the communicators and resolve against the root */
    CHECK(slice_of(mesh, "dp,tp", &slice) == XD_OK && xd_mesh_topology(slice)->rank_count == 4);
    CHECK_EQ_INT(xd_mesh_topology(slice)->ranks[3], (me & 2) + 5);
    CHECK(xd_mesh_group(mesh, "cp", &a) == XD_OK && xd_mesh_group(slice, "cp", &b) == XD_OK && a == b);
    CHECK(slice_of(mesh, "tp,dp", &bad) == XD_ERROR_ARGUMENT &&
          slice_of(mesh, "dp,dp", &bad) == XD_ERROR_ARGUMENT);
    /* flatten */
    CHECK(flat_of(mesh, "dp,cp", NULL, &flat) == XD_OK);
    CHECK(xd_mesh_group(flat, NULL, &a) == XD_OK && xd_mesh_group(mesh, "dp_cp", &b) == XD_OK && a == b);
    sprintf(expected, "%d,%d,%d,%d", me & 1, (me & 1) + 2, (me & 1) + 4, (me & 1) + 6);
    CHECK_EQ_STR(members(a, text), expected);
    CHECK(flat_of(mesh, "cp,tp", "dp_cp", &bad) == XD_ERROR_ARGUMENT);
    CHECK(flat_of(mesh, "cp,tp", "dp", &bad) == XD_ERROR_ARGUMENT);
    xd_mesh_destroy(slice);
    CHECK(slice_of(flat, "dp_cp,tp", &slice) == XD_OK && xd_mesh_topology(slice)->axis_count == 2);
    /* a slice of a derived mesh: axes of the root and flattened names together, none twice, in the root's order */
    CHECK(slice_of(slice, "dp_cp,dp", &bad) == XD_ERROR_ARGUMENT);
    CHECK(slice_of(slice, "tp,dp_cp", &bad) == XD_ERROR_ARGUMENT);
    CHECK(slice_of(slice, "dp_cp,tp", &joined) == XD_OK && xd_mesh_topology(joined)->rank_count == 8);
    /* an axis is split or flattened, not both, and one alone is split */
    CHECK_EQ_INT(xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ "dp", true, NULL, parts, 2 }, &bad),
                 XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "flatten and 2 parts: derive two meshes");
    CHECK_EQ_INT(split_of(mesh, "dp,cp", parts, 2, &bad), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "there is no axis \"dp,cp\" to split");
    CHECK_EQ_INT(xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .flatten = true }, &bad), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "desc->axes is NULL");
    /* unflatten: the same partition keeps its communicator */
    CHECK(split_of(mesh, "dp", parts, 2, &split) == XD_OK);
    CHECK(xd_mesh_group(split, "replicate", &b) == XD_OK && xd_mesh_group(mesh, "dp", &a) == XD_OK && a == b);
    /* a second mesh that shares */
    d.share = mesh;
    d.axes[0].name = "x", d.axes[1].name = "y", d.axes[2].name = "z";
    CHECK(xd_mesh_create(world, &d, &again) == XD_OK);
    CHECK(xd_mesh_group(again, "z", &b) == XD_OK && xd_mesh_group(mesh, "tp", &a) == XD_OK && a == b);
    CHECK(bad == NULL);
    xd_mesh_destroy(mesh); /* the derived ones go on */
    CHECK(xd_barrier(b) == XD_OK);
    xd_mesh_destroy(again);
    xd_mesh_destroy(joined);
    xd_mesh_destroy(split);
    xd_mesh_destroy(flat);
    xd_mesh_destroy(slice);
    xd_mesh_destroy(NULL);
    return XD_OK;
}

static xd_result ordered_mesh(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world);
    xd_mesh_desc d = { .axes = { { "tp", 2 }, { "pp", 2 }, { "dp", -1 } }, .order = "tp-dp-pp" };
    xd_mesh *mesh = NULL;
    xd_comm *group = NULL;
    char text[64], expected[64];
    (void)argument;
    CHECK(xd_mesh_create(world, &d, &mesh) == XD_OK);
    CHECK_EQ_STR(xd_mesh_topology(mesh)->name[0], "pp");
    CHECK(xd_mesh_group(mesh, "dp", &group) == XD_OK);
    sprintf(expected, "%d,%d", me & ~2, me | 2);
    CHECK_EQ_STR(members(group, text), expected);
    xd_mesh_destroy(mesh);
    mesh = NULL;
    d.order = "tp-pp";
    CHECK_EQ_INT(xd_mesh_create(world, &d, &mesh), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(xd_comm_ctx(world))->message,
                 "order \"tp-pp\" leaves out \"dp\", whose size is -1, not 1");
    return XD_OK;
}

XD_TEST(a_mesh_takes_its_axes_in_the_order_of_a_string) {
    CHECK(xd_run_threads(8, NULL, ordered_mesh, NULL, NULL) == XD_OK);
}

XD_TEST(derived_meshes_share_the_communicators_of_their_root) {
    CHECK(xd_run_threads(8, NULL, derived_meshes, NULL, NULL) == XD_OK);
}

static xd_result two_meshes(xd_comm *world, void *argument) {
    static const int teacher_ranks[3] = { 4, 0, 2 };
    const int me = xd_comm_rank(world);
    const bool teaches = me % 2 == 0;
    xd_mesh_desc d;
    xd_mesh *teacher = NULL, *student = NULL;
    xd_comm *group = NULL;
    int c = -1;
    (void)argument;
    memset(&d, 0, sizeof d);
    d.axes[0].name = "tp", d.axes[0].size = -1;
    d.ranks = teacher_ranks;
    d.rank_count = 3;
    CHECK(xd_mesh_create(world, &d, &teacher) == XD_OK);
    memset(&d, 0, sizeof d);
    d.axes[0].name = "dp", d.axes[0].size = 5;
    CHECK(xd_mesh_create(world, &d, &student) == XD_OK);
    if (!teacher || !student) return XD_ERROR_STATE;
    CHECK_EQ_INT(xd_mesh_topology(teacher)->size[0], 3); /* known outside of it too */
    CHECK_EQ_INT(xd_mesh_topology(student)->size[0], 5);
    CHECK_EQ_INT(xd_mesh_coordinate(student, "tp", &c), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(c, -1);
    CHECK_EQ_INT(xd_mesh_coordinate(teacher, "tp", &c), teaches ? XD_OK : XD_ERROR_STATE);
    CHECK_EQ_INT(c, teaches ? (me + 2) % 6 / 2 : -1);
    CHECK_EQ_INT(xd_mesh_group(teacher, "tp", &group), teaches ? XD_OK : XD_ERROR_STATE);
    if (teaches && group) {
        CHECK_EQ_INT(xd_comm_size(group), 3);
        CHECK_EQ_INT(xd_comm_rank(group), c);
        CHECK(xd_barrier(group) == XD_OK);
    }
    CHECK(xd_mesh_group(student, NULL, &group) == XD_OK && group == world);
    xd_mesh_destroy(student);
    xd_mesh_destroy(teacher);
    return XD_OK;
}

XD_TEST(a_mesh_smaller_than_the_world_leaves_the_others_without_a_coordinate) {
    CHECK(xd_run_threads(5, NULL, two_meshes, NULL, NULL) == XD_OK);
}

XD_TEST_MAIN()
