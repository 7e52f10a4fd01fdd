/* The sums at the end of a pipeline's step when wrappers keep gradients on the host: those of gradients that are kept where the model is,
 * and arithmetic done here. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "xd_test.h"

#include <string.h>

enum { WEIGHTS = 5, WIDTH = 4, STAGES = 2 };

typedef struct scene {
    xd_ctx *ctx, *home;
    xd_grid *grid;
    xd_built *built;
    int pp, tp;
    bool offload, mixed;
} scene;

static xd_result describe_into(xd_model *model, const xd_stage_place *place) {
    const bool end = place->first || place->last;
    const struct {
        const char *name;
        xd_weight_traits traits;
    } weights[WEIGHTS] = { { "all", { .pipeline_parallel = true } },
                           { "summed", { .sequence_parallel = true } },
                           { "averaged", { .averaged_over_tensor_parallel = true } },
                           { "copy", { .shared_embedding = end, .shared = place->last } },
                           { "own", { 0 } } };
    for (int i = 0; i < WEIGHTS; i++) {
        const xd_weight_desc d = { .name = weights[i].name,
                                   .dtype = XD_DTYPE_F32,
                                   .ndim = 1,
                                   .shape = { WIDTH },
                                   .traits = weights[i].traits };
        XD_TRY(xd_weight_add(xd_model_root(model), &d, NULL));
    }
    return XD_OK;
}

static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    (void)user;
    XD_TRY(xd_model_create(ctx, NULL, out));
    return describe_into(*out, place);
}

/* Another second stage, which keeps its parts where the model is. */
static xd_result replace(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    const scene *s = (const scene *)user;
    xd_stage *second = &out->stages[1];
    if (!s->mixed) return XD_OK;
    *out = *in;
    XD_TRY(describe(NULL, ctx, &in->stages[1].place, &second->model));
    XD_TRY(xd_model_seal(second->model));
    return wrap_over_fsdp(second->model, xd_grid_groups(s->grid)->dp_cp, NULL, &second->parallel);
}

static void open_scene(scene *s, xd_comm *world) {
    const xd_ctx_desc host = { .reduction = XD_REDUCTION_INVARIANT };
    s->ctx = xd_comm_ctx(world);
    CHECK(xd_ctx_create(&host, &s->home) == XD_OK);
    CHECK(xd_grid_create(world, &(xd_expert_desc){ .tp = 2, .pp = 2 }, &s->grid) == XD_OK);
    s->pp = xd_comm_rank(xd_grid_groups(s->grid)->pp);
    s->tp = xd_comm_rank(xd_grid_groups(s->grid)->tp);
    const xd_fsdp_desc fsdp = { .host = s->offload ? s->home : NULL };
    const xd_stage_hooks after = { 1, { { replace, s } } };
    xd_build_desc d = { .groups = xd_grid_groups(s->grid), .provider = { describe, NULL }, .after = &after };
    d.pipeline = (xd_pipeline_desc){ .virtual_stages = STAGES };
    d.wrap.kind = XD_WRAP_FSDP;
    d.wrap.fsdp = &fsdp;
    CHECK(xd_build(world, &d, &s->built) == XD_OK);
}

static void close_scene(scene *s) {
    xd_built_destroy(s->built);
    xd_grid_destroy(s->grid);
    xd_ctx_destroy(s->home);
}

/* Eighths, so that every sum is exact. */
static float number_of(int chunk, int tp, int weight, int at) {
    return (float)(1 << weight) + (float)(chunk * 2 + tp) * 0.125f + (float)at;
}

static xd_result finish(const scene *s, xd_comm *world, bool per_token) {
    for (int i = 0; i < STAGES; i++) {
        xd_block *root = xd_model_root(xd_built_stage(s->built, i).model);
        xd_block_view view;
        XD_TRY(xd_block_begin(root, (xd_pass){ XD_PASS_BACKWARD, 0, false }, &view));
        for (int w = 0; w < WEIGHTS; w++)
            for (int j = 0; j < WIDTH; j++)
                ((float *)view.gradients[w])[j] = number_of(i * 2 + s->pp, s->tp, w, j);
        XD_TRY(xd_block_end(root));
    }
    const xd_pipeline_finish_desc d = { .groups = xd_grid_groups(s->grid),
                                        .built = s->built,
                                        .per_token = per_token,
                                        .tokens = s->pp ? 8 : 777 };
    return xd_pipeline_finish(world, &d);
}

/* Chunks 0 to 3; the copies are in the first and the last. */
static float expected(const scene *s, int chunk, int weight, int at) {
    float sum = 0.0f;
    if (weight == 0)
        for (int c = 0; c < 4; c++) sum += number_of(c, s->tp, 0, at);
    else if (weight < 3)
        sum =
            (number_of(chunk, 0, weight, at) + number_of(chunk, 1, weight, at)) * (weight == 2 ? 0.5f : 1.0f);
    else if (weight == 3 && chunk % 3 == 0)
        sum = number_of(0, s->tp, 3, at) + number_of(3, s->tp, 3, at);
    else
        sum = number_of(chunk, s->tp, weight, at);
    return sum;
}

static void check_gradients(const scene *s, float divisor) {
    for (int i = 0; i < STAGES; i++) {
        const xd_parallel *parallel = xd_built_stage(s->built, i).parallel;
        xd_param params[WEIGHTS];
        int64_t count = 0;
        CHECK(xd_parallel_params(parallel, WEIGHTS, params, &count) == XD_OK && count == WEIGHTS);
        CHECK((xd_parallel_memory(parallel).host > 0) == s->offload);
        for (int w = 0; w < WEIGHTS; w++)
            for (int j = 0; j < WIDTH; j++)
                CHECK(((const float *)params[w].gradient)[j] * divisor == expected(s, i * 2 + s->pp, w, j));
    }
}

static xd_result sums_rank(xd_comm *world, void *argument) {
    (void)argument;
    for (int offload = 0; offload < 2; offload++) {
        scene s = { .offload = offload != 0 };
        open_scene(&s, world);
        for (int per_token = 0; per_token < 2; per_token++) {
            CHECK_EQ_INT(finish(&s, world, per_token != 0), XD_OK);
            check_gradients(&s, per_token ? 8.0f : 1.0f);
            for (int i = 0; i < STAGES; i++)
                CHECK(xd_parallel_publish(xd_built_stage(s.built, i).parallel) == XD_OK);
        }
        close_scene(&s);
    }
    return XD_OK;
}

XD_TEST(gradients_on_the_host_get_the_sums_of_those_beside_the_model) {
    const xd_ctx_desc d = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(4, &d, sums_rank, NULL, NULL), XD_OK);
}

static xd_result mixed_rank(xd_comm *world, void *argument) {
    scene s = { .offload = true, .mixed = true };
    (void)argument;
    open_scene(&s, world);
    const xd_result got = finish(&s, world, false);
    CHECK(got == XD_ERROR_UNSUPPORTED || got == XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(s.ctx)->message,
                 "the gradients of the first of stages 0 and 1 are on the host: all or none") != NULL);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(stages_that_keep_gradients_apart_are_refused) {
    const xd_ctx_desc d = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(4, &d, mixed_rank, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
