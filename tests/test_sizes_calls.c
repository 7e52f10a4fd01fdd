/* Counts, ranks and steps of worlds, meshes, plans and routes that do not exist are refused with both numbers; helpers/sizes.h
 * says what is asked. tests/build/check_sizes.py holds the list of numbers against docs/api.txt. Less than a tenth of a second of processor. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "xd_private.h"
#include "xd_test.h"
#include "xd_test_topology.h"
#include "sizes.h"
#include "averages.h"

enum { ELEMENTS = 6, SAMPLES = 2, LENGTH = 3, COLUMNS = 5 };

typedef struct memory {
    float in[ELEMENTS], out[4 * ELEMENTS];
} memory;

typedef struct stage {
    sizes_base base; /* first */
    xd_mesh *mesh;
    xd_topology topology;
    xd_layout *layout;
    xd_collective reduce, broadcast;
    xd_leaves leaves;
    xd_route_desc route;
    xd_route_span span;
    xd_ctx_desc desc;
    int count, rank, version;
    int64_t elements, iteration, student_id, teacher_id;
    xd_plan_desc plan_for;
} stage;
#define STAGE(data) stage *s = (stage *)(data)
#define CTX (s->base.ctx)
#define MEMORY ((memory *)s->base.memory)

static void open_stage(void *data) {
    STAGE(data);
    const xd_mesh_desc mesh = { .axes = { { "dp", 1 }, { "tp", s->base.ranks } },
                                .world_size = s->base.ranks };
    s->base.bytes = sizeof(memory);
    s->base.memory = calloc(1, sizeof(memory));
    CHECK_EQ_INT(xd_mesh_create(s->base.comm, &mesh, &s->mesh), XD_OK);
    s->topology = line_of("dp", 1);
    const xd_layout_desc layout = { .ndim = 1, .shape = { ELEMENTS }, .topology = &s->topology };
    CHECK_EQ_INT(xd_layout_create(CTX, &layout, &s->layout), XD_OK);
}

static void set_stage(void *data) {
    STAGE(data);
    memset(MEMORY, 0, sizeof(memory));
    memset(&s->reduce, 0, sizeof s->reduce);
    s->reduce.kind = XD_COLLECTIVE_ALL_REDUCE;
    s->reduce.dtype = XD_DTYPE_F32;
    s->reduce.count = 2;
    s->reduce.send = MEMORY->in;
    s->reduce.recv = MEMORY->out;
    s->broadcast = s->reduce;
    s->broadcast.kind = XD_COLLECTIVE_BROADCAST;
    s->broadcast.send = s->broadcast.recv;
    s->leaves = (xd_leaves){ 0, 2, 2 };
    s->span = (xd_route_span){ 0, LENGTH };
    memset(&s->route, 0, sizeof s->route);
    s->route.samples = SAMPLES;
    s->route.length = LENGTH;
    s->route.columns = COLUMNS;
    if (s->base.rank == s->base.ranks - 1) {
        s->route.teacher.sample_count = SAMPLES;
        s->route.teacher.positions = &s->span;
        s->route.teacher.span_count = 1;
    }
    if (s->base.rank == 0) s->route.student.sample_count = SAMPLES;
    s->desc = (xd_ctx_desc){ .log_level = XD_LOG_NONE, .threads = 1 };
    s->count = 2;
    s->rank = 0;
    s->plan_for = (xd_plan_desc){ .ranks = 4, .rank = 3 };
    s->version = XD_VERSION;
    s->elements = ELEMENTS;
    s->iteration = s->student_id = s->teacher_id = 1;
}

static void close_stage(void *data) {
    STAGE(data);
    xd_layout_destroy(s->layout);
    xd_mesh_destroy(s->mesh);
    free(s->base.memory);
}

/* ---- the calls ---- */

static xd_result call_reduce(void *data) {
    STAGE(data);
    return xd_collective_run(s->base.comm, &s->reduce);
}
static xd_result call_broadcast(void *data) {
    STAGE(data);
    return xd_collective_run(s->base.comm, &s->broadcast);
}
static xd_result call_leaves(void *data) {
    STAGE(data);
    xd_leaf_stack *stack = NULL;
    XD_TRY(xd_leaf_stack_create(CTX, &(xd_leaf_stack_desc){ .leaves = s->leaves, .elements = s->elements },
                                &stack));
    xd_leaf_stack_destroy(stack);
    return XD_OK;
}
static xd_result call_route(void *data) {
    STAGE(data);
    xd_route *route = NULL;
    XD_TRY(xd_route_create(s->base.comm, &s->route, &route));
    xd_route_destroy(route);
    return XD_OK;
}
static xd_result call_world(void *data) {
    STAGE(data);
    xd_thread_world *world = NULL;
    XD_TRY(xd_thread_world_create(CTX, &(xd_thread_world_desc){ s->count }, &world));
    xd_thread_world_destroy(world);
    return XD_OK;
}
static xd_result call_join(void *data) {
    STAGE(data);
    xd_thread_world *world = NULL;
    xd_ctx *ctx = NULL;
    xd_comm *comm = NULL;
    xd_result result = xd_ctx_create(&s->desc, &ctx);
    if (result == XD_OK) result = xd_thread_world_create(ctx, &(xd_thread_world_desc){ 1 }, &world);
    if (result == XD_OK) result = xd_thread_world_join(world, ctx, s->rank, &comm);
    if (result != XD_OK) (void)XD_FAIL(CTX, result, "%s", xd_last_error(ctx)->message);
    xd_comm_destroy(comm);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
    return result;
}
static xd_result rank_nothing(xd_comm *world, void *argument) {
    (void)world;
    (void)argument;
    return XD_OK;
}
static xd_result call_run(void *data) {
    STAGE(data);
    xd_error error;
    const xd_result result = xd_run_threads(s->count, &s->desc, rank_nothing, NULL, &error);
    return result == XD_OK ? XD_OK : XD_FAIL(CTX, result, "%s", error.message);
}
/* Its message goes to the logger: there is no context to ask. */
static xd_result call_ctx(void *data) {
    STAGE(data);
    xd_ctx *ctx = NULL;
    xd_result result = xd_ctx_create_versioned(s->version, &s->desc, &ctx);
    xd_ctx_destroy(ctx);
    return result == XD_OK ? XD_OK : XD_FAIL(CTX, result, "no context");
}
static xd_result call_update(void *data) {
    STAGE(data);
    const xd_ema_desc desc = xd_ema_defaults(XD_EMA_HALFLIFE);
    xd_ema *ema = NULL;
    XD_TRY(xd_ema_create(CTX, &desc, &ema));
    const xd_result result = xd_ema_update(ema, s->iteration, NULL);
    xd_ema_destroy(ema);
    return result;
}
static xd_result call_exact(void *data) {
    STAGE(data);
    xd_votes *votes = NULL;
    XD_TRY(votes_create(CTX, 3, 2, &votes));
    const xd_result result = xdi_votes_set_exact(votes, s->student_id, s->teacher_id);
    xd_votes_destroy(votes);
    return result;
}

static xd_result call_plan_for(void *data) {
    STAGE(data);
    XD_TRY(xd_plan_begin(CTX, &s->plan_for));
    return xd_plan_end(CTX, NULL);
}

#define AT(name, field, wrong, call, result, text, local) \
    { name, offsetof(stage, field), sizeof(((stage *)0)->field), wrong, call, result, text, local }
static const sizes_count counts[] = {
    AT("xd_collective.count", reduce.count, -1, call_reduce, XD_ERROR_ARGUMENT,
       "all_reduce: count -1 is negative or too large", false),
    AT("xd_collective.count", reduce.count, 3, call_reduce, XD_ERROR_MISMATCH, "3", false),
    AT("xd_collective.root", broadcast.root, 5, call_broadcast, XD_ERROR_ARGUMENT,
       "broadcast: rank 5 is outside [0, ", false),
    AT("xd_leaf_stack_desc.elements", elements, -1, call_leaves, XD_ERROR_ARGUMENT, "-1 elements in a leaf",
       true),
    AT("xd_leaf_stack_desc.elements", elements, INT64_MAX, call_leaves, XD_ERROR_MEMORY,
       "9223372036854775807 elements", true),
    AT("xd_route_span.begin", span.begin, -1, call_route, XD_ERROR_ARGUMENT,
       "positions [-1, 3) after 0, of 3", false),
    AT("xd_route_span.begin", span.begin, LENGTH + 1, call_route, XD_ERROR_ARGUMENT,
       "positions [4, 3) after 0, of 3", false),
    AT("xd_route_span.end", span.end, LENGTH + 1, call_route, XD_ERROR_ARGUMENT,
       "positions [0, 4) after 0, of 3", false),
    AT("xd_thread_world_desc.ranks", count, 0, call_world, XD_ERROR_ARGUMENT, "a world of 0 ranks", true),
    AT("xd_thread_world_join(rank)", rank, 1, call_join, XD_ERROR_ARGUMENT, "rank 1 is outside [0, 1)", true),
    AT("xd_run_threads(ranks)", count, -1, call_run, XD_ERROR_ARGUMENT, "a world of -1 ranks", true),
    AT("xd_ctx_desc.threads", desc.threads, -1, call_ctx, XD_ERROR_ARGUMENT, "", true),
    AT("xd_ctx_create_versioned(version)", version, XD_VERSION + 100, call_ctx, XD_ERROR_MISMATCH, "", true),
    AT("xd_ema_update(iteration)", iteration, -2, call_update, XD_ERROR_ARGUMENT, "iteration -2 is negative",
       true),
    AT("xd_plan_desc.ranks", plan_for.ranks, -1, call_plan_for, XD_ERROR_ARGUMENT, "a plan for rank 3 of -1",
       true),
    AT("xd_plan_desc.rank", plan_for.rank, -1, call_plan_for, XD_ERROR_ARGUMENT, "a plan for rank -1 of 4",
       true),
    AT("xd_plan_desc.rank", plan_for.rank, 4, call_plan_for, XD_ERROR_ARGUMENT, "a plan for rank 4 of 4",
       true),
    AT("xdi_votes_set_exact(student_id)", student_id, 3, call_exact, XD_ERROR_ARGUMENT,
       "student id 3 is outside a vocabulary of 3", true),
    AT("xdi_votes_set_exact(teacher_id)", teacher_id, 2, call_exact, XD_ERROR_ARGUMENT,
       "teacher id 2 is outside a vocabulary of 2", true),
};
#undef AT

static const sizes_table table = {
    sizeof(stage), open_stage, set_stage, close_stage, NULL, 0, counts, sizeof counts / sizeof *counts,
};

XD_TEST(counts_of_worlds_and_plans_that_disagree_are_refused_and_nothing_is_written) {
    for (int ranks = 1; ranks <= SIZES_RANKS; ranks++) CHECK(sizes_run_table(&table, ranks) > 4);
}

/* ---- pairs ---- */

/* What one rank says about one number. */
static void say(const char *name, bool right, const char *message) {
    if (!right) printf("    %s: \"%s\"\n", name, message);
    CHECK(right);
}
#define ASK(name, right) say(name, right, xd_last_error(ctx)->message)

/* Both ranks return an error whatever the last one passes, and the group goes on; a peer that does not exist cannot be told. */
static xd_result pair_rank(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    float number[2] = { 1.0f, 2.0f };
    const bool sends = xd_comm_rank(world) == 1;
    xd_result result;
    (void)argument;
    for (int64_t count = -1; count <= 1; count += 2) {
        const xd_result own = count < 0 ? XD_ERROR_ARGUMENT : XD_ERROR_MISMATCH;
        const xd_result other = count < 0 ? XD_ERROR_PEER : XD_ERROR_MISMATCH;
        result = sends ? xd_send(world, number, count, XD_DTYPE_F32, 0)
                       : xd_recv(world, number, 2, XD_DTYPE_F32, 1);
        ASK("xd_send(count)", result == (sends ? own : other));
        result = sends ? xd_recv(world, number, count, XD_DTYPE_F32, 0)
                       : xd_send(world, number, 2, XD_DTYPE_F32, 1);
        ASK("xd_recv(count)", result == (sends ? own : other));
        CHECK(number[0] == 1.0f && number[1] == 2.0f);
    }
    for (int peer = -1; peer < 3 && sends; peer += 3) {
        result = xd_send(world, number, 2, XD_DTYPE_F32, peer);
        ASK("xd_send(to)", result == XD_ERROR_ARGUMENT && strstr(xd_last_error(ctx)->message, "[0, 2)"));
        result = xd_recv(world, number, 2, XD_DTYPE_F32, peer);
        ASK("xd_recv(from)", result == XD_ERROR_ARGUMENT && strstr(xd_last_error(ctx)->message, "[0, 2)"));
    }
    return xd_barrier(world);
}

XD_TEST(pairs_that_disagree_are_refused_on_both_ranks) {
    const xd_ctx_desc desc = { .timeout_seconds = 60, .log_level = XD_LOG_NONE };
    CHECK_EQ_INT(xd_run_threads(2, &desc, pair_rank, NULL, NULL), XD_OK);
}

/* ---- queries without a result ---- */

static void ask_layouts(xd_ctx *ctx, const stage *s, int rank) {
    xd_region region;
    float number;
    const xd_tensor view = xd_tensor_view(s->layout, rank, &number, XD_DTYPE_F32);
    ASK("xd_layout_region(rank)", !xd_layout_region(s->layout, rank, &region) && region.ndim == 1);
    ASK("xd_tensor_view(rank)", view.data == NULL && xd_tensor_numel(&view) == 0);
    ASK("xd_comm_world_rank(rank)", xd_comm_world_rank(s->base.comm, rank) == -1);
}

static void ask_training(xd_ctx *ctx, int64_t index) {
    float value[2] = { 0 }, gradient[2] = { 0 };
    const xd_param param = { "w", value, gradient, XD_DTYPE_F32, .count = 2 };
    const xd_optimizer_desc desc = xd_adamw_defaults(&param, 1);
    xd_ema_desc average = xd_ema_defaults(XD_EMA_HALFLIFE);
    average.compensated = true;
    xd_optimizer *optimizer = NULL;
    xd_ema *ema = NULL;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &desc, &optimizer), XD_OK);
    CHECK_EQ_INT(average_create(ctx, &param, 1, &average, &ema), XD_OK);
    ASK("xd_optimizer_state_at(index)", xd_optimizer_state_at(optimizer, 0).exp_avg != NULL);
    ASK("xd_optimizer_state_at(index)", xd_optimizer_state_at(optimizer, index).exp_avg == NULL);
    ASK("xd_ema_view(index)",
        xd_ema_view(ema, 0).shadow.value != NULL && xd_ema_view(ema, index).shadow.value == NULL);
    ASK("xd_ema_view(index)",
        xd_ema_view(ema, 0).compensation.value != NULL && xd_ema_view(ema, index).compensation.value == NULL);
    xd_ema_destroy(ema);
    xd_optimizer_destroy(optimizer);
}

static xd_result query_rank(xd_comm *world, void *argument) {
    stage s;
    (void)argument;
    memset(&s, 0, sizeof s);
    s.base.ctx = xd_comm_ctx(world);
    s.base.comm = world;
    s.base.ranks = 1;
    open_stage(&s);
    for (int number = -1; number < 2; number += 2) {
        ask_layouts(s.base.ctx, &s, number);
        ask_training(s.base.ctx, number);
    }
    close_stage(&s);
    return XD_OK;
}

XD_TEST(queries_of_what_does_not_exist_answer_nothing) {
    CHECK_EQ_INT(xd_run_threads(1, NULL, query_rank, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
