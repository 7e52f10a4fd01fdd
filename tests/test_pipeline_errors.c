/* Pipelines: what is refused, on which ranks, in which words; failing allocations; and the sums at the end of a step against
 * arithmetic done here. */
#include "xdistill.h"

#include "pipeline_scene.h"
#include "planned.h"

/* ---- creation ---- */

static xd_pipeline_run_desc good_desc(void) {
    xd_pipeline_run_desc d = { .ndim = 2, .shape = { 3, 4 }, .dtype = XD_DTYPE_F32, .value_count = 1 };
    d.schedule.micro_batches = 4;
    return d;
}

/* Refused on all ranks alike, with the numbers; `own` -> by rank 1 alone, and the others hear of it. */
static void refuse(xd_comm *world, xd_pipeline_run_desc d, xd_result expected, bool own, const char *text) {
    const xd_pipeline_run_desc good = good_desc();
    const bool mine = !own || xd_comm_rank(world) == 1;
    xd_pipeline *p = NULL;
    const xd_result got = xd_pipeline_create(world, mine ? &d : &good, &p);
    CHECK_EQ_INT(got, mine ? expected : expected == XD_ERROR_MISMATCH ? expected : XD_ERROR_PEER);
    const char *message = xd_last_error(xd_comm_ctx(world))->message;
    if (!strstr(message, text)) printf("\"%s\" lacks \"%s\"\n", message, text);
    CHECK(strstr(message, text) && !p);
}

static xd_result refuse_rank(xd_comm *world, void *argument) {
    const int64_t many = INT64_C(1) << 40;
    (void)argument;
    for (int own = 0; own < 2; own++) {
        xd_pipeline_run_desc d = good_desc();
        d.schedule.ranks = 4;
        refuse(world, d, XD_ERROR_ARGUMENT, own, "a schedule of 4 ranks over a group of 3");
        d = good_desc();
        d.schedule.micro_batches = 0;
        refuse(world, d, XD_ERROR_ARGUMENT, own, "and 0 micro-batches");
        d = good_desc();
        d.ndim = -1;
        refuse(world, d, XD_ERROR_ARGUMENT, own, "activations of -1 dimensions, from 0 to 8");
        d.ndim = XD_DIMS_MAX + 1;
        refuse(world, d, XD_ERROR_ARGUMENT, own, "activations of 9 dimensions, from 0 to 8");
        d = good_desc();
        d.shape[1] = -5;
        refuse(world, d, XD_ERROR_ARGUMENT, own, "dimension 1 of activations has -5 elements");
        d.shape[0] = d.shape[1] = many;
        refuse(world, d, XD_ERROR_SHAPE, own, "the first of 1099511627776, are more than can be counted");
        d = good_desc();
        d.value_count = -2;
        refuse(world, d, XD_ERROR_ARGUMENT, own, "-2 values of each micro-batch, from 0 to 1048576");
        d = good_desc();
        d.gathers = true;
        refuse(world, d, XD_ERROR_ARGUMENT, own,
               "calls of 4 micro-batches are collective over data, which is NULL");
        d = good_desc();
        d.dtype = XD_DTYPE_NONE;
        refuse(world, d, XD_ERROR_DTYPE, own,
               "activations of dtype NONE (0) with gradients of dtype NONE (0)");
        d = good_desc();
        d.gradient_dtype = (xd_dtype)77;
        refuse(world, d, XD_ERROR_DTYPE, own, "with gradients of dtype NONE (77)");
        d = good_desc();
        d.schedule.virtual_stages = 2;
        d.schedule.group = 2;
        refuse(world, d, XD_ERROR_ARGUMENT, own,
               "groups of 2 micro-batches: at least the 3 ranks, at most all 4");
    }
    return XD_OK;
}

/* Queues that do not fit. */
static xd_result queue_rank(xd_comm *world, void *argument) {
    const xd_queue_desc one = { .capacity = 1 }, two = { .capacity = 2 };
    xd_comm *turned = NULL;
    xd_queue *queue = NULL;
    xd_pipeline_run_desc d = good_desc();
    (void)argument;
    CHECK(xd_queue_create(world, &one, &d.sends) == XD_OK);
    refuse(world, d, XD_ERROR_ARGUMENT, false,
           "a queue of sends has room for 1 records, and 2 are under way at once");
    CHECK(xd_queue_create(world, &two, &queue) == XD_OK);
    xd_queue_destroy(d.sends);
    d.sends = queue;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed queues of sends 1, rank 0 passed 0");
    xd_queue_destroy(queue);
    CHECK(xd_comm_split(world, 0, (xd_comm_rank(world) + 1) % 3, &turned) == XD_OK);
    CHECK(xd_queue_create(turned, &two, &d.sends) == XD_OK);
    refuse(world, d, XD_ERROR_ARGUMENT, false, "a queue of sends on rank ");
    xd_queue_destroy(d.sends);
    xd_comm_destroy(turned);
    return XD_OK;
}

XD_TEST(queues_that_do_not_fit_are_refused_on_all_ranks) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(3, &d, queue_rank, NULL, NULL), XD_OK);
}

XD_TEST(what_is_no_pipeline_is_refused_on_all_ranks) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(3, &d, refuse_rank, NULL, NULL), XD_OK);
}

static xd_result mismatch_rank(xd_comm *world, void *argument) {
    xd_pipeline_run_desc d = good_desc();
    (void)argument;
    d.shape[0] = 5;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed elements of an activation 20, rank 0 passed 12");
    d.shape[0] = 4;
    d.shape[1] = 3;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed elements of a dimension 4, rank 0 passed 3");
    d = good_desc();
    d.schedule.micro_batches = 5;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed micro-batches 5, rank 0 passed 4");
    d = good_desc();
    d.schedule.virtual_stages = 2;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed virtual stages 2, rank 0 passed 1");
    d = good_desc();
    d.schedule.forward_only = true;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed forward_only 1, rank 0 passed 0");
    d = good_desc();
    d.dtype = XD_DTYPE_I32;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed dtype");
    d = good_desc();
    d.gradient_dtype = XD_DTYPE_BF16;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed gradient_dtype");
    d = good_desc();
    d.value_count = 3;
    refuse(world, d, XD_ERROR_MISMATCH, true, "rank 1 passed values 3, rank 0 passed 1");
    return XD_OK;
}

XD_TEST(ranks_that_declare_different_activations_or_schedules_are_named) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(3, &d, mismatch_rank, NULL, NULL), XD_OK);
}

XD_TEST(bytes_are_refused_as_a_pipeline_is) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    xd_pipeline *none = NULL;
    xd_planned planned = { { 7, 7 }, 7, 7, 7 };
    xd_pipeline_run_desc d = good_desc();
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    d.schedule.ranks = 3;
    CHECK_EQ_INT(PLANNED_FOR(ctx, 3, 4, xd_pipeline_create(self, &d, &none), &planned), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "a schedule of 3 ranks in a plan for 4") != NULL);
    d.shape[0] = INT64_MAX / 2;
    CHECK_EQ_INT(PLANNED_FOR(ctx, 0, 3, xd_pipeline_create(self, &d, &none), &planned), XD_ERROR_SHAPE);
    CHECK(planned.memory.host == 7 && planned.memory.device == 7 && none == NULL);
    xd_comm_destroy(self);
    xd_pipeline_destroy(NULL);
    xd_ctx_destroy(ctx);
}

/* ---- stages that were built for another pipeline ---- */

static xd_result built_rank(xd_comm *world, void *argument) {
    scene_rank *r = (scene_rank *)calloc(1, sizeof *r);
    r->run = (scene_run *)argument;
    r->world = world;
    r->ctx = xd_comm_ctx(world);
    CHECK(scene_build(r) == XD_OK);
    xd_pipeline *p = NULL;
    xd_pipeline_run_desc d = good_desc();
    d.built = r->built; /* two virtual stages on each of two ranks */
    CHECK_EQ_INT(xd_pipeline_create(world, &d, &p), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(r->ctx)->message, "2 stages were built, the schedule has 1") && !p);
    xd_comm *turned = NULL;
    CHECK(xd_comm_split(world, 0, -xd_comm_rank(world), &turned) == XD_OK);
    d.schedule.virtual_stages = 2;
    CHECK_EQ_INT(xd_pipeline_create(turned, &d, &p), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(r->ctx)->message, "stage 0 was built for rank") && !p);
    xd_comm_destroy(turned);
    scene_close(r);
    free(r);
    return XD_OK;
}

XD_TEST(stages_that_were_built_for_other_places_are_refused) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    scene_run *run = scene_new(SCENE_DDP, 2, 2, 1);
    CHECK_EQ_INT(xd_run_threads(2, &d, built_rank, run, NULL), XD_OK);
    free(run);
}

/* ---- runs ---- */

static xd_result nothing(void *user, const xd_pipeline_call *call) {
    return user && call ? XD_OK : XD_ERROR_ARGUMENT;
}

static xd_result strange(void *user, const xd_pipeline_call *call) {
    return call->stage.place.pipeline_rank == 1 ? (xd_result)991 : nothing(user, call);
}

static xd_result runs_rank(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const bool odd = xd_comm_rank(world) == 1;
    xd_pipeline_run_desc d = good_desc();
    xd_pipeline *p = NULL, *forward_only = NULL;
    (void)argument;
    CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
    CHECK_EQ_INT(xd_pipeline_run(p, &(xd_pipeline_calls){ odd ? NULL : nothing, nothing, world }, NULL),
                 odd ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "a run of 4 micro-batches without forward") != NULL);
    CHECK_EQ_INT(xd_pipeline_run(p, &(xd_pipeline_calls){ nothing, odd ? NULL : nothing, world }, NULL),
                 XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 1 passed backwards 0, rank 0 passed 4") != NULL);
    CHECK_EQ_INT(xd_pipeline_run(p, &(xd_pipeline_calls){ strange, nothing, world }, NULL),
                 odd ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "forward of micro-batch 0 returned 991") != NULL);
    CHECK_EQ_INT(xd_pipeline_run(p, &(xd_pipeline_calls){ nothing, nothing, world }, NULL), XD_OK);
    d.schedule.forward_only = true;
    CHECK(xd_pipeline_create(world, &d, &forward_only) == XD_OK);
    CHECK_EQ_INT(xd_pipeline_run(forward_only, &(xd_pipeline_calls){ nothing, nothing, world }, NULL),
                 XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message,
                 "backwards of 4 micro-batches in a pipeline that is forward_only"));
    CHECK_EQ_INT(xd_pipeline_run(forward_only, &(xd_pipeline_calls){ nothing, NULL, world }, NULL), XD_OK);
    xd_pipeline_destroy(forward_only);
    xd_pipeline_destroy(p);
    return XD_OK;
}

XD_TEST(runs_that_cannot_be_are_refused_on_all_ranks_and_the_next_one_runs) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(3, &d, runs_rank, NULL, NULL), XD_OK);
}

/* ---- allocations ---- */

static __thread int64_t fails_in; /* allocations of this thread until one fails; 0 -> never */

static void *count_allocate(void *user, size_t bytes) {
    (void)user;
    if (fails_in > 0 && --fails_in == 0) return NULL;
    return malloc(bytes);
}

static void count_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

static xd_result short_rank(xd_comm *world, void *argument) {
    xd_pipeline_run_desc d = good_desc();
    xd_pipeline *p = NULL;
    int at = 1;
    (void)argument;
    d.schedule.virtual_stages = 2;
    for (;; at++) {
        if (xd_comm_rank(world) == 1) fails_in = at;
        const xd_result got = xd_pipeline_create(world, &d, &p);
        fails_in = 0;
        if (got == XD_OK) break;
        CHECK_EQ_INT(got, xd_comm_rank(world) == 1 ? XD_ERROR_MEMORY : XD_ERROR_PEER);
        CHECK(!p && at < 20);
        if (at > 20) return got;
    }
    CHECK(at > 2);
    if (xd_comm_rank(world) == 1) fails_in = 1;
    CHECK_EQ_INT(xd_pipeline_run(p, &(xd_pipeline_calls){ nothing, nothing, world }, NULL),
                 XD_OK); /* takes none */
    fails_in = 0;
    xd_pipeline_destroy(p);
    return XD_OK;
}

XD_TEST(each_allocation_of_a_pipeline_may_fail_on_one_rank) {
    const xd_ctx_desc d = { .allocator = { count_allocate, count_release, NULL }, .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(3, &d, short_rank, NULL, NULL), XD_OK);
}

XD_TEST(each_allocation_of_a_table_may_fail) {
    const xd_ctx_desc d = { .allocator = { count_allocate, count_release, NULL } };
    const xd_pipeline_schedule s = { .ranks = 2, .micro_batches = 3 };
    xd_pipeline_counts counts;
    int64_t ticks = 0;
    for (int call = 0; call < 2; call++) {
        xd_ctx *ctx = NULL;
        CHECK(xd_ctx_create(&d, &ctx) == XD_OK);
        fails_in = 1;
        CHECK_EQ_INT(call ? xd_pipeline_table(ctx, &s, 0, NULL, &ticks)
                          : xd_pipeline_measure(ctx, &s, 0, &counts),
                     XD_ERROR_MEMORY);
        fails_in = 0;
        CHECK(xd_pipeline_table(ctx, &s, 0, NULL, &ticks) == XD_OK && ticks == 8);
        xd_ctx_destroy(ctx);
    }
}

/* ---- the end of a step ---- */

enum { PARTS = 5 };

/* What stages of two pipeline and two tensor-parallel ranks have; the gradient of each is pushed by hand. */
typedef struct finish_scene {
    int rank, pp, tp;
    xd_grid *grid;
    xd_built *built;
    xd_weight *all, *summed, *averaged, *copy, *own;
    float values[PARTS][4], gradients[PARTS][4];
    bool no_copy, larger; /* the first stage has none; its weight of all stages has another size */
    xd_wrap_kind wrap;
} finish_scene;

static xd_weight *finish_weight(finish_scene *s, xd_model *model, const char *name, int i,
                                xd_weight_traits traits) {
    xd_weight *weight = NULL;
    const int64_t count = i == 0 && s->larger && s->pp == 0 ? 3 : 4;
    xd_weight_desc d = {
        .name = name, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { count }, .traits = traits
    };
    d.value = s->values[i];
    d.gradient = s->gradients[i];
    d.room = 4;
    CHECK(xd_weight_add(xd_model_root(model), &d, &weight) == XD_OK);
    return weight;
}

static xd_result finish_describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    finish_scene *s = (finish_scene *)user;
    xd_model *model = NULL;
    XD_TRY(xd_model_create(ctx, NULL, &model));
    s->all = finish_weight(s, model, "all", 0, (xd_weight_traits){ .pipeline_parallel = true });
    s->summed = finish_weight(s, model, "summed", 1, (xd_weight_traits){ .sequence_parallel = true });
    s->averaged =
        finish_weight(s, model, "averaged", 2, (xd_weight_traits){ .averaged_over_tensor_parallel = true });
    if (!s->no_copy || s->pp != 0)
        s->copy = finish_weight(s, model, "copy", 3,
                                (xd_weight_traits){ .shared_embedding = true, .shared = place->last });
    s->own = finish_weight(s, model, "own", 4, (xd_weight_traits){ 0 });
    *out = model;
    return XD_OK;
}

static void finish_open(finish_scene *s, xd_comm *world) {
    const xd_ddp_desc ddp = { .micro_batches = 1 };
    s->rank = xd_comm_rank(world);
    CHECK(xd_grid_create(world, &(xd_expert_desc){ .tp = 2, .pp = 2 }, &s->grid) == XD_OK);
    const xd_groups *g = xd_grid_groups(s->grid);
    s->pp = xd_comm_rank(g->pp);
    s->tp = xd_comm_rank(g->tp);
    xd_build_desc d = { .groups = g, .provider = { finish_describe, s }, .storage = XD_STORAGE_CALLER };
    d.wrap.kind = s->wrap;
    if (s->wrap == XD_WRAP_DDP) d.wrap.ddp = &ddp;
    CHECK(xd_build(world, &d, &s->built) == XD_OK);
}

/* Who makes the sums: xd_pipeline_finish, xd_parallel_reduce before it, or, where nothing is divided, that alone. */
typedef enum finish_way { FINISH, REDUCE_AND_FINISH, REDUCE } finish_way;

static xd_result finish_by(finish_scene *s, xd_comm *world, bool per_token, finish_way way) {
    xd_parallel *p = xd_built_stage(s->built, 0).parallel;
    for (int i = 0; i < PARTS; i++)
        for (int j = 0; j < 4; j++)
            s->gradients[i][j] = (float)(1 << (i * 2)) + (float)(s->pp * 2 + s->tp) * 0.125f;
    if (p) CHECK(xd_parallel_push_micro_batch(p) == XD_OK);
    if (way != FINISH) XD_TRY(xd_parallel_reduce(p));
    if (way == REDUCE) return XD_OK;
    const xd_pipeline_finish_desc d = { .groups = xd_grid_groups(s->grid),
                                        .built = s->built,
                                        .per_token = per_token,
                                        .tokens = s->pp == 1 ? 8 : 777 };
    return xd_pipeline_finish(world, &d);
}

static xd_result finish_run(finish_scene *s, xd_comm *world, bool per_token) {
    return finish_by(s, world, per_token, FINISH);
}

static void finish_close(finish_scene *s) {
    xd_built_destroy(s->built);
    xd_grid_destroy(s->grid);
}

static float gradient_of(const finish_scene *s, const char *name) {
    xd_param params[PARTS];
    int64_t count = 0;
    CHECK(xd_parallel_params(xd_built_stage(s->built, 0).parallel, PARTS, params, &count) == XD_OK);
    for (int64_t i = 0; i < count; i++)
        if (strcmp(params[i].name, name) == 0) {
            CHECK(strcmp(name, "copy") != 0 || params[i].replica == (s->pp == 1));
            return ((const float *)params[i].gradient)[params[i].count - 1];
        }
    return NAN;
}

/* Ranks differ by eighths, so that every sum is exact. */
static xd_result sums_rank(xd_comm *world, void *argument) {
    finish_scene s = { .wrap = XD_WRAP_DDP };
    (void)argument;
    finish_open(&s, world);
    for (int i = 0; i < 5; i++) {
        const bool per_token = i % 2 != 0;
        const float scale = per_token ? 1.0f / 8.0f : 1.0f;
        const float e = 0.125f, pp = (float)s.pp, tp = (float)s.tp;
        CHECK_EQ_INT(finish_by(&s, world, per_token, (finish_way)(i / 2)), XD_OK);
        CHECK(gradient_of(&s, "all") == scale * (2.0f * 1.0f + e * (2.0f + 2.0f * tp)));
        CHECK(gradient_of(&s, "summed") == scale * (2.0f * 4.0f + e * (4.0f * pp + 1.0f)));
        CHECK(gradient_of(&s, "averaged") == scale * (2.0f * 16.0f + e * (4.0f * pp + 1.0f)) / 2.0f);
        CHECK(gradient_of(&s, "copy") == scale * (2.0f * 64.0f + e * (2.0f + 2.0f * tp)));
        CHECK(gradient_of(&s, "own") == scale * (256.0f + e * (2.0f * pp + tp)));
        CHECK(xd_parallel_publish(xd_built_stage(s.built, 0).parallel) == XD_OK);
    }
    finish_close(&s);
    return XD_OK;
}

XD_TEST(the_end_of_a_step_sums_and_averages_what_stages_and_tensors_share) {
    xd_ctx_desc d = { .timeout_seconds = 60 };
    for (int mode = 0; mode < 3; mode++) {
        d.reduction = (xd_reduction)mode;
        CHECK_EQ_INT(xd_run_threads(4, &d, sums_rank, NULL, NULL), XD_OK);
    }
}

static void finish_refused(finish_scene *s, xd_comm *world, xd_result expected, const char *text) {
    finish_open(s, world);
    CHECK_EQ_INT(finish_run(s, world, false), expected);
    const char *message = xd_last_error(xd_comm_ctx(world))->message;
    if (!strstr(message, text)) printf("\"%s\" lacks \"%s\"\n", message, text);
    CHECK(strstr(message, text) != NULL);
    if (s->wrap) CHECK_EQ_INT(finish_run(s, world, false), expected); /* the step was dropped */
    finish_close(s);
}

static xd_result finish_errors_rank(xd_comm *world, void *argument) {
    finish_scene s = { .wrap = XD_WRAP_NONE };
    (void)argument;
    finish_refused(&s, world, XD_ERROR_STATE, "stage 0 of 1 has no wrapper");
    s = (finish_scene){ .wrap = XD_WRAP_DDP };
    finish_open(&s, world);
    CHECK_EQ_INT(xd_pipeline_finish(world, &(xd_pipeline_finish_desc){ .built = s.built }),
                 XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "the end of a step without groups"));
    CHECK_EQ_INT(xd_pipeline_finish(world, &(xd_pipeline_finish_desc){ .groups = xd_grid_groups(s.grid) }),
                 XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "the end of a step without built"));
    const xd_pipeline_finish_desc negative = {
        .groups = xd_grid_groups(s.grid), .built = s.built, .per_token = true, .tokens = s.rank == 2 ? -1 : 1
    };
    CHECK_EQ_INT(xd_pipeline_finish(world, &negative), s.rank == 2 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "-1 tokens"));
    CHECK_EQ_INT(finish_run(&s, world, false), XD_OK);
    finish_close(&s);
    return XD_OK;
}

XD_TEST(ends_of_steps_that_cannot_be_are_refused_on_all_ranks) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(4, &d, finish_errors_rank, NULL, NULL), XD_OK);
}

static void reduce_told(const xd_comm *world, const char *text) {
    const char *message = xd_last_error(xd_comm_ctx(world))->message;
    CHECK(strncmp(message, "xd_parallel_reduce: rank ", 25) == 0 && strstr(message, text));
}

static xd_result finish_mismatch_rank(xd_comm *world, void *argument) {
    finish_scene s = { .wrap = XD_WRAP_DDP, .no_copy = true };
    (void)argument;
    finish_open(&s, world);
    CHECK(finish_run(&s, world, false) == XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "passed weights with shared_embedding 1,") !=
          NULL);
    CHECK(finish_by(&s, world, false, REDUCE) == XD_ERROR_MISMATCH);
    reduce_told(world, "passed weights with shared_embedding 1,");
    finish_close(&s);
    s = (finish_scene){ .wrap = XD_WRAP_DDP, .larger = true };
    finish_refused(&s, world, XD_ERROR_MISMATCH, "passed elements to sum 4, rank");
    finish_open(&s, world);
    CHECK(finish_by(&s, world, false, REDUCE) == XD_ERROR_MISMATCH);
    reduce_told(world, "passed elements to sum 4, rank");
    finish_close(&s);
    return XD_OK;
}

XD_TEST(a_copy_without_its_other_is_named_with_both_numbers) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(4, &d, finish_mismatch_rank, NULL, NULL), XD_OK);
}

XD_TEST(copies_in_unequal_parts_are_refused_with_the_numbers) {
    xd_error error;
    scene_run *run = scene_new(SCENE_FSDP, 2, 0, 2);
    run->together = true;
    CHECK_EQ_INT(scene_execute(run, &error), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(error.message, "copies of an embedding in unequal parts, here") != NULL);
    run->wrap = SCENE_SHARDED; /* which sees to it */
    CHECK_EQ_INT(scene_execute(run, NULL), XD_OK);
    free(run);
}

XD_TEST_MAIN()
