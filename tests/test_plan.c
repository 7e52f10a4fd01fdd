/* Plans of memory: for ranks that do not exist the same bytes as for those that do. */
#define XDISTILL_IMPLEMENTATION
#if defined(XD_TEST_LAYERS)
#    include "model/describe_internal.h"
#endif
#include "xdistill.h"

#include "averages.h"
#include "planned.h"
#include "wrap_scene.h"

#include <stdlib.h>

/* What a rank was told before its model was wrapped, and what everything took afterwards. */
static xd_result compare_with_what_is_taken(xd_comm *world, void *argument) {
    const wrap_run *run = (const wrap_run *)argument;
    const int ranks = xd_comm_size(world) / (run->groups ? run->groups : 1);
    static const char *const types[] = { "layer", "mlp" };
    wrap_rank r = { .run = (wrap_run *)argument, .world = world, .ctx = xd_comm_ctx(world) };
    CHECK(wrap_home(&r) == XD_OK);
    const xd_ddp_desc ddp = { .micro_batches = run->leaves,
                              .sharded_optimizer = run->kind == WRAP_SHARDED,
                              .view_dtype = run->view };
    const xd_fsdp_desc fsdp = { .micro_batches = run->leaves,
                                .unit_types = types,
                                .unit_type_count = run->nested ? 2 : 1,
                                .accumulate_whole = run->kind == WRAP_FSDP_WHOLE,
                                .sent_dtype = run->sent,
                                .view_dtype = run->view,
                                .reshard_ranks = run->reshard,
                                .host = run->offloaded ? r.home : NULL };
    const xd_optimizer_desc optimizer = xd_adamw_defaults(NULL, 0);
    const xd_ema_desc averages[] = { xd_ema_defaults(XD_EMA_CONSTANT), xd_ema_defaults(XD_EMA_POWER) };
    const xd_memory_plan_desc d = { .ddp = run->kind <= WRAP_SHARDED ? &ddp : NULL,
                                    .fsdp = run->kind > WRAP_SHARDED ? &fsdp : NULL,
                                    .ranks = ranks,
                                    .groups = run->groups,
                                    .optimizer = &optimizer,
                                    .averages = averages,
                                    .average_count = 2 };
    xd_memory_plan plan;
    xd_param params[WRAP_WEIGHTS];
    int64_t count = 0, elements = 0;
    r.model = wrap_model(r.ctx, run->kept ? run->kept : XD_DTYPE_F32);
    const uint64_t before = xdi_model_hash(r.model);
    CHECK(xd_plan_memory(r.model, &d, xd_comm_rank(world), &plan) == XD_OK);
    CHECK(xdi_model_hash(r.model) == before);
    CHECK(wrap_groups(&r) == XD_OK && wrap_create(&r) == XD_OK);
    const xd_parallel_bytes taken = xd_parallel_memory(r.parallel);
    CHECK(memcmp(&taken, &plan.wrapper, sizeof taken) == 0);
    CHECK(xd_parallel_params(r.parallel, WRAP_WEIGHTS, params, &count) == XD_OK);
    for (int64_t i = 0; i < count; i++) elements += params[i].count;
    CHECK_EQ_INT(elements, plan.elements);
    xd_optimizer_desc o = optimizer;
    xd_memory_bytes bytes = { 0, 0 }, more = { 0, 0 };
    xd_optimizer *none = NULL;
    xd_ema *nothing = NULL;
    o.params = params;
    o.param_count = count;
    CHECK(PLANNED_MEMORY(r.ctx, xd_optimizer_create(r.ctx, &o, &none), &bytes) == XD_OK);
    CHECK(memcmp(&bytes, &plan.optimizer, sizeof bytes) == 0);
    CHECK(PLANNED_MEMORY(r.ctx, average_create(r.ctx, params, count, &averages[0], &nothing), &bytes) ==
          XD_OK);
    CHECK(PLANNED_MEMORY(r.ctx, average_create(r.ctx, params, count, &averages[1], &nothing), &more) ==
          XD_OK);
    CHECK_EQ_INT(bytes.host + more.host, plan.averages.host);
    wrap_close(&r);
    return XD_OK;
}

XD_TEST(a_plan_says_what_the_wrapper_and_all_that_train_it_take) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    for (int kind = WRAP_DDP; kind <= WRAP_HSDP; kind++)
        for (int variant = 0; variant < 4; variant++) {
            wrap_run *run = (wrap_run *)calloc(1, sizeof *run);
            run->kind = (wrap_kind)kind;
            run->ranks = kind == WRAP_HSDP ? 6 : 1 + variant;
            run->leaves = kind == WRAP_SHARDED && variant == 3 ? 16 : 24;
            run->reduction = desc.reduction;
            run->groups = kind == WRAP_HSDP ? 3 : kind == WRAP_SHARDED && variant == 3 ? 2 : 0;
            run->nested = variant % 2 == 1;
            run->view = variant == 1 ? XD_DTYPE_F32 : XD_DTYPE_NONE;
            run->kept = variant == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
            run->sent = variant == 2 ? XD_DTYPE_F16 : XD_DTYPE_NONE;
            run->reshard = variant == 3 ? kind == WRAP_HSDP ? 1 : 2 : 0;
            run->offloaded = kind >= WRAP_FSDP && variant % 2 == 1;
            CHECK(xd_run_threads(run->ranks, &desc, compare_with_what_is_taken, run, NULL) == XD_OK);
            free(run);
        }
}

/* A model that is a stage: what waits between stages is planned with it. */
XD_TEST(a_plan_of_a_stage_has_the_activations_of_its_pipeline) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    xd_model *model = wrap_model(ctx, XD_DTYPE_F32);
    const xd_fsdp_desc fsdp = { .micro_batches = 8 };
    const xd_pipeline_run_desc pipeline = {
        .schedule = { .ranks = 4, .virtual_stages = 2, .micro_batches = 8 },
        .ndim = 1,
        .shape = { 100 },
        .dtype = XD_DTYPE_F32
    };
    xd_memory_plan_desc d = { .fsdp = &fsdp, .ranks = 2 };
    xd_memory_plan without, plan;
    xd_planned planned;
    xd_pipeline *none = NULL;
    xd_comm *self = NULL;
    xd_pipeline_counts counts;
    CHECK(xd_comm_self(ctx, &self) == XD_OK);
    CHECK(xd_plan_memory(model, &d, 0, &without) == XD_OK && without.pipeline.host == 0);
    d.pipeline = &pipeline;
    for (d.pipeline_rank = 0; d.pipeline_rank < 4; d.pipeline_rank++) {
        CHECK(xd_plan_memory(model, &d, 1, &plan) == XD_OK);
        CHECK(PLANNED_FOR(ctx, d.pipeline_rank, 4, xd_pipeline_create(self, &pipeline, &none), &planned) ==
              XD_OK);
        CHECK(xd_pipeline_measure(ctx, &pipeline.schedule, d.pipeline_rank, &counts) == XD_OK);
        CHECK(plan.pipeline.host == planned.memory.host && plan.pipeline.device == 0);
        CHECK(planned.memory.host >
              (size_t)(counts.inputs + counts.gradients + 2) * 448); /* of 400 bytes, in lines of 64 */
    }
    const xd_memory_plan before = plan;
    CHECK_EQ_INT(xd_plan_memory(model, &d, 1, &plan), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 4 of a pipeline of 4 ranks") != NULL);
    CHECK(memcmp(&plan, &before, sizeof plan) == 0);
    xd_model_destroy(model);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- ranks that are not here ---- */

typedef struct lines {
    int count;
    char first[200], last[200];
} lines;

static void keep_line(void *user, const char *line) {
    lines *l = (lines *)user;
    snprintf(l->count++ ? l->last : l->first, sizeof l->last, "%s", line);
}

static xd_result plan_with_queues(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_queue_desc descs[] = { { XD_QUEUE_WORKER, 32 }, { XD_QUEUE_INLINE, 20 } };
    xd_queue *queues[2];
    xd_memory_bytes bytes[2];
    (void)argument;
    for (int i = 0; i < 2; i++) {
        XD_TRY(PLANNED_MEMORY(ctx, xd_queue_create(world, &descs[i], &queues[i]), &bytes[i]));
        XD_TRY(xd_queue_create(world, &descs[i], &queues[i]));
    }
    xd_model *model = wrap_model(ctx, XD_DTYPE_F32);
    xd_fsdp_desc fsdp = { .micro_batches = 8, .gathers = queues[0], .reductions = queues[1] };
    const xd_pipeline_run_desc pipeline = { .schedule = { .ranks = 4, .micro_batches = 8 },
                                            .ndim = 1,
                                            .shape = { 100 },
                                            .dtype = XD_DTYPE_F32,
                                            .sends = queues[1] };
    const xd_memory_plan_desc d = { .fsdp = &fsdp, .ranks = 3, .pipeline = &pipeline };
    xd_memory_plan plan;
    lines all = { 0 };
    CHECK(xd_plan_memory(model, &d, 0, &plan) == XD_OK);
    CHECK_EQ_INT(plan.queues.host, bytes[0].host + bytes[1].host);
    CHECK(plan.queues.device == 0 && bytes[0].host > bytes[1].host);
    fsdp.gathers = NULL;
    CHECK(xd_plan_memory(model, &d, 2, &plan) == XD_OK);
    CHECK_EQ_INT(plan.queues.host, bytes[1].host);
    CHECK(xd_plan_print(model, &d, (xd_build_report){ keep_line, &all }) == XD_OK);
    CHECK(strstr(all.first, "     pipeline       queues          all"));
    double columns[11];
    char *at = strstr(all.last, "sum") + 3;
    for (int i = 0; i < 11; i++) columns[i] = strtod(at, &at);
    CHECK(fabs(columns[9] - 3.0 * (double)bytes[1].host / 1024.0) < 0.06);
    xd_model_destroy(model);
    for (int i = 0; i < 2; i++) xd_queue_destroy(queues[i]);
    return XD_OK;
}

XD_TEST(a_plan_has_the_queues_that_its_descs_name_each_once) {
    CHECK(xd_run_threads(3, NULL, plan_with_queues, NULL, NULL) == XD_OK);
}

XD_TEST(all_ranks_of_a_large_group_are_planned_by_one) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    xd_model *model = wrap_model(ctx, XD_DTYPE_F32);
    static const char *const types[] = { "layer" };
    const xd_fsdp_desc fsdp = { .unit_types = types, .unit_type_count = 1 };
    const xd_optimizer_desc optimizer = xd_adamw_defaults(NULL, 0);
    const xd_memory_plan_desc d = { .fsdp = &fsdp, .ranks = 48, .groups = 2, .optimizer = &optimizer };
    xd_memory_plan plan;
    lines all = { 0 };
    int64_t elements = 0, whole = xd_model_describe(model).parameter_count;
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(model, i));
        if (info.desc->buffer) whole += 48 * info.count; /* whole on every rank */
    }
    for (int rank = 0; rank < 48; rank++) {
        CHECK(xd_plan_memory(model, &d, rank, &plan) == XD_OK);
        elements += plan.elements;
    }
    CHECK_EQ_INT(elements, whole);
    CHECK(xd_plan_print(model, &d, (xd_build_report){ keep_line, &all }) == XD_OK);
    CHECK_EQ_INT(all.count, 96 + 3);
    CHECK(strstr(all.first, "optimizer") && strstr(all.last, "sum"));
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

XD_TEST(plans_that_make_no_sense_are_refused) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    xd_model *model = wrap_model(ctx, XD_DTYPE_F32), *open = NULL;
    const xd_ddp_desc ddp = { .micro_batches = 2 };
    const xd_fsdp_desc fsdp = { .reshard_ranks = 3 };
    xd_memory_plan plan;
    memset(&plan, 7, sizeof plan);
    const xd_memory_plan untouched = plan;
    xd_memory_plan_desc d = { .ddp = &ddp, .fsdp = &fsdp, .ranks = 4 };
    CHECK(xd_plan_memory(model, &d, 0, &plan) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "2 kinds"));
    d.fsdp = NULL;
    CHECK(xd_plan_memory(model, &d, 4, &plan) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 4 of 4"));
    CHECK(xd_plan_memory(model, &d, 0, &plan) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "2 micro-batches for 4 data ranks"));
    d.groups = 2;
    CHECK(xd_plan_memory(model, &d, 0, &plan) == XD_ERROR_ARGUMENT);
    d = (xd_memory_plan_desc){ .fsdp = &fsdp, .ranks = 4 };
    CHECK(xd_plan_memory(model, &d, 0, &plan) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "3 ranks that keep a unit do not divide 4"));
    CHECK(xd_model_create(ctx, NULL, &open) == XD_OK);
    CHECK(xd_plan_memory(open, &d, 0, &plan) == XD_ERROR_STATE);
    CHECK(memcmp(&plan, &untouched, sizeof plan) == 0);
    xd_model_destroy(open);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
