/* Buckets of wrappers: how many sums a step has on each chunk of a pipeline, what padding and counts do, settings of single
 * stages, and values that travel while the optimizer of the next chunk steps. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "xd_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, WIDTH = 128, CHUNKS = 2, STEPS = 3 };

/* What a run is, and what came of it. */
typedef struct bucket_run {
    xd_ddp_desc ddp;  /* without queues */
    bool fsdp, plain; /* plain: no queues */
    int pp, dp;
    xd_reduction reduction;
    xd_stage_settings each;
    uint64_t sums[8][CHUNKS]; /* on queues, of a rank's chunk in a step */
    size_t gradients[8][CHUNKS];
    float values[2][CHUNKS][LAYERS][WIDTH]; /* of a pipeline rank's chunk, in the end */
    bool travels[8];                        /* values of a chunk are under way when the next one steps */
    char message[512];
} bucket_run;

typedef struct rank {
    bucket_run *run;
    xd_param params[CHUNKS][LAYERS];
    xd_ctx *ctx;
    xd_comm *world;
    xd_grid *grid;
    const xd_groups *groups;
    xd_queue *gathers, *reductions;
    xd_built *built;
    xd_optimizer *optimizers[CHUNKS];
} rank;

static bool says(const char *message, const char *text) {
    if (strstr(message, text)) return true;
    printf("\"%s\" lacks \"%s\"\n", message, text);
    return false;
}

static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    xd_model *model = NULL;
    (void)user;
    XD_TRY(xd_model_create(ctx, NULL, &model));
    for (int i = 0; i < LAYERS; i++) {
        char name[32];
        xd_block *block = NULL;
        xd_weight_desc d = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { WIDTH } };
        d.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 1.0f };
        snprintf(name, sizeof name, "layer%d", (int)place->first_layer * LAYERS + i);
        XD_TRY(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = name }, &block));
        XD_TRY(xd_weight_add(block, &d, NULL));
    }
    *out = model;
    return XD_OK;
}

static xd_result build(rank *r, xd_ddp_desc ddp) {
    const xd_fsdp_desc fsdp = { .micro_batches = ddp.micro_batches, .wide_padding = ddp.wide_padding };
    xd_build_desc d = { .groups = r->groups, .provider = { describe, r } };
    d.pipeline.layer_count = r->run->pp * CHUNKS;
    d.pipeline.virtual_stages = CHUNKS;
    d.wrap.kind = r->run->fsdp ? XD_WRAP_FSDP : XD_WRAP_DDP;
    d.wrap_settings = r->run->each;
    if (r->run->fsdp)
        d.wrap.fsdp = &fsdp;
    else
        d.wrap.ddp = &ddp;
    return xd_build(r->world, &d, &r->built);
}

static void open_rank(rank *r, xd_comm *world, bucket_run *run) {
    const xd_queue_desc queue = { .form = XD_QUEUE_INLINE, .capacity = 64 };
    memset(r, 0, sizeof *r);
    r->run = run;
    r->ctx = xd_comm_ctx(world);
    r->world = world;
    CHECK(xd_grid_create(world, &(xd_expert_desc){ .pp = run->pp }, &r->grid) == XD_OK);
    r->groups = xd_grid_groups(r->grid);
    if (run->plain) return;
    CHECK(xd_queue_create(r->groups->dp_cp, &queue, &r->gathers) == XD_OK);
    CHECK(xd_queue_create(r->groups->dp_cp, &queue, &r->reductions) == XD_OK);
}

static void close_rank(rank *r) {
    for (int i = 0; i < CHUNKS; i++) xd_optimizer_destroy(r->optimizers[i]);
    xd_built_destroy(r->built);
    xd_queue_destroy(r->reductions);
    xd_queue_destroy(r->gathers);
    xd_grid_destroy(r->grid);
}

static xd_ddp_desc settings_of(const rank *r) {
    xd_ddp_desc d = r->run->ddp;
    d.gathers = r->gathers;
    d.reductions = r->reductions;
    return d;
}

/* The backwards of one chunk: gradients that differ from element to element and from leaf to leaf. */
static xd_result backward(const xd_stage *stage, int step) {
    for (int64_t k = 0; k < xd_parallel_micro_batches(stage->parallel).opened; k++)
        for (int i = LAYERS - 1; i >= 0; i--) {
            xd_block_view view;
            char name[32];
            const int64_t leaf = xd_parallel_micro_batch(stage->parallel, k);
            snprintf(name, sizeof name, "layer%d", (int)stage->place.first_layer * LAYERS + i);
            xd_block *block = xd_model_find_block(stage->model, name);
            XD_TRY(xd_block_begin(block, (xd_pass){ XD_PASS_BACKWARD, k, false }, &view));
            for (int j = 0; j < WIDTH && leaf >= 0; j++)
                ((float *)view.gradients[0])[j] +=
                    ((const float *)view.values[0])[j] * 0.1f * (float)(step + 1) +
                    (float)((leaf * 7 + j) % 11);
            XD_TRY(xd_block_end(block));
        }
    return XD_OK;
}

static xd_result make_optimizers(rank *r) {
    for (int i = 0; i < CHUNKS; i++) {
        int64_t count = 0;
        XD_TRY(xd_parallel_params(xd_built_stage(r->built, i).parallel, LAYERS, r->params[i], &count));
        xd_optimizer_desc d = xd_adamw_defaults(r->params[i], count);
        d.learning_rate = 0.01;
        XD_TRY(xd_optimizer_create(r->ctx, &d, &r->optimizers[i]));
    }
    return XD_OK;
}

static uint64_t sums_of(const rank *r) {
    return r->reductions ? xd_queue_describe(r->reductions).traffic.calls : 0;
}

/* Each chunk is stepped and published before the next one steps. */
static xd_result train_step(rank *r, int step) {
    const int me = xd_comm_rank(r->world);
    for (int i = CHUNKS - 1; i >= 0; i--) {
        const xd_stage stage = xd_built_stage(r->built, i);
        const uint64_t before = sums_of(r);
        XD_TRY(backward(&stage, step));
        XD_TRY(xd_parallel_reduce(stage.parallel));
        r->run->sums[me][i] = sums_of(r) - before;
        r->run->gradients[me][i] = xd_parallel_memory(stage.parallel).gradients;
    }
    for (int i = 0; i < CHUNKS; i++) {
        if (i > 0 && r->gathers) r->run->travels[me] = xd_queue_describe(r->gathers).open == 1;
        XD_TRY(xd_optimizer_step(r->optimizers[i], NULL, NULL));
        XD_TRY(xd_parallel_publish(xd_built_stage(r->built, i).parallel));
    }
    return XD_OK;
}

static xd_result keep_values(const rank *r) {
    for (int i = 0; i < CHUNKS; i++) {
        const xd_stage stage = xd_built_stage(r->built, i);
        for (int k = 0; k < LAYERS; k++) {
            xd_block_view view;
            char name[32];
            snprintf(name, sizeof name, "layer%d", (int)stage.place.first_layer * LAYERS + k);
            xd_block *block = xd_model_find_block(stage.model, name);
            XD_TRY(xd_block_begin(block, (xd_pass){ XD_PASS_INFERENCE, 0, false }, &view));
            if (xd_comm_rank(r->groups->dp_cp) == 0)
                memcpy(r->run->values[stage.place.pipeline_rank][i][k], view.values[0],
                       WIDTH * sizeof(float));
            XD_TRY(xd_block_end(block));
        }
    }
    return XD_OK;
}

static xd_result train_rank(xd_comm *world, void *argument) {
    rank r;
    open_rank(&r, world, (bucket_run *)argument);
    xd_result result = build(&r, settings_of(&r));
    if (result != XD_OK && xd_comm_rank(world) == 0)
        snprintf(r.run->message, sizeof r.run->message, "%s", xd_last_error(r.ctx)->message);
    if (result == XD_OK) result = make_optimizers(&r);
    for (int step = 0; step < STEPS && result == XD_OK; step++) result = train_step(&r, step);
    if (result == XD_OK) result = keep_values(&r);
    close_rank(&r);
    return result;
}

static xd_result execute(bucket_run *of) {
    const xd_ctx_desc d = { .reduction = of->reduction, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(of->pp * of->dp, &d, train_rank, of, &error);
    if (result != XD_OK && !of->message[0]) printf("%s\n", error.message);
    return result;
}

static bucket_run *new_run(xd_ddp_desc ddp) {
    bucket_run *out = (bucket_run *)calloc(1, sizeof *out);
    CHECK(out != NULL);
    out->ddp = ddp;
    out->ddp.micro_batches = 4;
    out->pp = out->dp = 2;
    out->reduction = XD_REDUCTION_INVARIANT;
    return out;
}

/* ---- the rule ---- */

/* Ranks 0 and 1 are the first stage. */
static void check_sums(const bucket_run *of, uint64_t first, uint64_t others) {
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < CHUNKS; i++) CHECK_EQ_INT(of->sums[r][i], r < 2 && i == 0 ? first : others);
}

XD_TEST(only_the_first_chunk_of_the_first_stage_has_several_buckets) {
    bucket_run *of = new_run((xd_ddp_desc){ .bucket_size = 1 });
    CHECK(execute(of) == XD_OK);
    check_sums(of, 3, 1);
    of->ddp = (xd_ddp_desc){ .micro_batches = 4, .bucket_count = 3, .sharded_optimizer = true };
    CHECK(execute(of) == XD_OK);
    check_sums(of, 3, 1);
    of->ddp.bucket_count = 2; /* of 192 elements, which two weights have */
    CHECK(execute(of) == XD_OK);
    check_sums(of, 2, 1);
    of->ddp.bucket_count = 0; /* the default is large */
    CHECK(execute(of) == XD_OK);
    check_sums(of, 1, 1);
    free(of);
}

XD_TEST(gathers_in_step_gives_every_chunk_one_bucket) {
    bucket_run *of =
        new_run((xd_ddp_desc){ .bucket_count = 3, .sharded_optimizer = true, .gathers_in_step = true });
    CHECK(execute(of) == XD_OK);
    check_sums(of, 1, 1); /* no chunk has several */
    free(of);
}

static bool same_values(const bucket_run *a, const bucket_run *b) {
    return memcmp(a->values, b->values, sizeof a->values) == 0;
}

/* ---- values that travel while the next chunk steps ---- */

XD_TEST(values_of_a_chunk_travel_while_the_next_one_steps) {
    bucket_run *of = new_run((xd_ddp_desc){ .sharded_optimizer = true, .gathers_in_step = true }),
               *plain = new_run((xd_ddp_desc){ .sharded_optimizer = true });
    plain->plain = true;
    CHECK(execute(of) == XD_OK && execute(plain) == XD_OK);
    for (int r = 0; r < 4; r++) CHECK(of->travels[r]);
    CHECK(same_values(of, plain));
    free(plain);
    free(of);
}

/* ---- padding ---- */

XD_TEST(wide_padding_ends_buckets_at_multiples_for_large_groups_and_changes_no_bit) {
    for (int fsdp = 0; fsdp < 2; fsdp++) {
        bucket_run *narrow = new_run((xd_ddp_desc){ .sharded_optimizer = true }),
                   *wide = new_run((xd_ddp_desc){ .sharded_optimizer = true, .wide_padding = true });
        narrow->fsdp = wide->fsdp = fsdp == 1;
        narrow->plain = wide->plain = fsdp == 1;
        CHECK(execute(narrow) == XD_OK && execute(wide) == XD_OK);
        CHECK(same_values(narrow, wide));
        for (int r = 0; r < 4; r++)
            CHECK(wide->gradients[r][0] >= 65536 / 2 * sizeof(float) &&
                  narrow->gradients[r][0] < 65536 / 2 * sizeof(float));
        free(narrow);
        free(wide);
    }
}

/* ---- settings of single stages ---- */

/* The second chunk of the first stage is bucketed as the first one is; every chunk of the second stage has an optimizer that
 * steps all. */
static xd_result adjust(void *user, const xd_stage *stage, xd_ddp_desc *ddp, xd_fsdp_desc *fsdp) {
    CHECK(!user && stage->model && !stage->parallel && !fsdp && ddp->groups);
    CHECK_EQ_INT(ddp->stage, stage->place.pipeline_rank);
    CHECK_EQ_INT(ddp->chunk, stage->place.virtual_stage);
    if (ddp->stage == 0) ddp->chunk = 0;
    if (ddp->stage == 1) ddp->sharded_optimizer = false;
    return XD_OK;
}

XD_TEST(a_stage_may_have_settings_of_its_own) {
    bucket_run *of = new_run((xd_ddp_desc){ .bucket_size = 1, .sharded_optimizer = true }),
               *same = new_run(of->ddp);
    of->each = (xd_stage_settings){ adjust, NULL };
    CHECK(execute(of) == XD_OK && execute(same) == XD_OK);
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < CHUNKS; i++) CHECK_EQ_INT(of->sums[r][i], r < 2 ? 3 : 1);
    CHECK(same_values(of, same));
    free(same);
    free(of);
}

static xd_result fail(void *user, const xd_stage *stage, xd_ddp_desc *ddp, xd_fsdp_desc *fsdp) {
    (void)user;
    (void)ddp;
    (void)fsdp;
    return stage->place.pipeline_rank == 1 && stage->place.virtual_stage == 1 ? XD_ERROR_DATA : XD_OK;
}

static xd_result fail_rank(xd_comm *world, void *argument) {
    rank r;
    open_rank(&r, world, (bucket_run *)argument);
    CHECK(build(&r, settings_of(&r)) == (xd_comm_rank(r.groups->pp) == 1 ? XD_ERROR_DATA : XD_ERROR_PEER));
    CHECK(says(xd_last_error(r.ctx)->message, "the settings of stage 1 returned"));
    bucket_run fine = *r.run;
    fine.each.call = NULL;
    r.run = &fine;
    CHECK(build(&r, settings_of(&r)) == XD_OK);
    close_rank(&r);
    return XD_OK;
}

XD_TEST(settings_of_a_stage_that_fail_end_the_build_on_all_ranks) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    bucket_run *of = new_run((xd_ddp_desc){ .micro_batches = 0 });
    of->each = (xd_stage_settings){ fail, NULL };
    CHECK_EQ_INT(xd_run_threads(4, &d, fail_rank, of, NULL), XD_OK);
    free(of);
}

/* ---- what is refused ---- */

static void refuse(bucket_run *of, xd_ddp_desc ddp, const char *text) {
    ddp.micro_batches = 4;
    of->ddp = ddp;
    of->message[0] = 0;
    CHECK(execute(of) == XD_ERROR_ARGUMENT);
    CHECK(says(of->message, text));
}

XD_TEST(buckets_that_contradict_are_refused_with_the_numbers) {
    bucket_run *of = new_run((xd_ddp_desc){ .micro_batches = 0 });
    refuse(of, (xd_ddp_desc){ .bucket_size = 7, .bucket_count = 3 },
           "bucket_size 7 and bucket_count 3: one of them says where a bucket ends");
    refuse(of, (xd_ddp_desc){ .bucket_count = -3 }, "buckets of 0 elements, and -3 of them");
    refuse(of, (xd_ddp_desc){ .bucket_count = 385 }, "385 buckets of 384 elements");
    refuse(of, (xd_ddp_desc){ .gathers_in_step = true }, "gathers_in_step without sharded_optimizer");
    refuse(of, (xd_ddp_desc){ .wide_padding = true }, "wide_padding without sharded_optimizer");
    of->plain = true;
    refuse(of, (xd_ddp_desc){ .sharded_optimizer = true, .gathers_in_step = true },
           "gathers_in_step without a queue of gathers");
    of->plain = false;
    of->message[0] = 0;
    of->ddp = (xd_ddp_desc){ .micro_batches = 4, .bucket_count = 384 };
    CHECK(execute(of) == XD_OK);
    check_sums(of, 3, 1);
    free(of);
}

/* ---- by hand ---- */

static xd_result hand_rank(xd_comm *world, void *argument) {
    xd_queue *reductions = NULL;
    (void)argument;
    CHECK(xd_queue_create(world, &(xd_queue_desc){ .form = XD_QUEUE_INLINE }, &reductions) == XD_OK);
    for (int i = 0; i < 4; i++) {
        const xd_stage_place place = { .first_layer = 0 };
        xd_stage stage = { .place = place };
        const xd_ddp_desc d = {
            .reductions = reductions, .bucket_size = 1, .stage = i == 1, .chunk = i == 2 ? 5 : 0
        };
        const xd_ddp_desc wrong = { .stage = -1 };
        CHECK(describe(NULL, xd_comm_ctx(world), &place, &stage.model) == XD_OK);
        CHECK(xd_model_seal(stage.model) == XD_OK);
        CHECK(wrap_over_ddp(stage.model, world, &wrong, &stage.parallel) == XD_ERROR_ARGUMENT);
        CHECK(says(xd_last_error(xd_comm_ctx(world))->message, "stage -1, chunk 0"));
        CHECK(wrap_over_ddp(stage.model, world, &d, &stage.parallel) == XD_OK);
        const uint64_t before = xd_queue_describe(reductions).traffic.calls;
        CHECK(backward(&stage, 0) == XD_OK && xd_parallel_reduce(stage.parallel) == XD_OK);
        CHECK_EQ_INT(xd_queue_describe(reductions).traffic.calls - before, i == 1 || i == 2 ? 1 : 3);
        xd_parallel_destroy(stage.parallel);
        xd_model_destroy(stage.model);
    }
    xd_queue_destroy(reductions);
    return XD_OK;
}

XD_TEST(stage_and_chunk_are_read_by_a_wrapper_alone) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(2, &d, hand_rank, NULL, NULL), XD_OK);
}

/* Above 40 data ranks the default grows with them: of two weights of 45,000,065 elements there are two buckets on 40 ranks, which
 * both end at a multiple of 128, and one on 64. */
static xd_result plan_rank(xd_comm *world, void *argument) {
    xd_model *model = NULL;
    xd_queue *queue = NULL;
    xd_memory_plan plans[2];
    (void)argument;
    CHECK(xd_queue_create(world, NULL, &queue) == XD_OK);
    const xd_ddp_desc ddp = { .reductions = queue, .micro_batches = 64 };
    CHECK(xd_model_create(xd_comm_ctx(world), NULL, &model) == XD_OK);
    for (int i = 0; i < 2; i++) {
        const xd_weight_desc w = {
            .name = i ? "b" : "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 45000065 }
        };
        CHECK(xd_weight_add(xd_model_root(model), &w, NULL) == XD_OK);
    }
    CHECK(xd_model_seal(model) == XD_OK);
    for (int i = 0; i < 2; i++) {
        const xd_memory_plan_desc d = { .ddp = &ddp, .ranks = i ? 64 : 32, .groups = 1 };
        CHECK(xd_plan_memory(model, &d, 0, &plans[i]) == XD_OK);
    }
    CHECK_EQ_INT(plans[0].wrapper.values - plans[1].wrapper.values, 128 * sizeof(float));
    xd_model_destroy(model);
    xd_queue_destroy(queue);
    return XD_OK;
}

XD_TEST(the_default_size_grows_with_the_data_ranks) {
    CHECK_EQ_INT(xd_run_threads(1, NULL, plan_rank, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
