/* A network in two stages of two parts each, on two ranks, beside two others that see other samples: the bits of one rank.
 *
 *     cc -std=c99 -O2 examples/20_pipeline.c -o pipeline -lm -lpthread
 *
 * Eight layers y = tanh(w x), element by element. The library sends what goes from stage to stage, by interleaved 1F1B. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { WIDTH = 5, LAYERS = 8, SAMPLES = 12, STEPS = 30, SLOTS = 16 };

typedef struct run { int stages, virtual_stages; float weights[LAYERS][WIDTH]; } run;
typedef float kept[LAYERS + 1][WIDTH]; /* inputs and outputs of a stage's layers, until its backward */

/* The layers that a stage has. */
static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    (void)user;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 1 }, out));
    for (int64_t i = 0; i < place->layer_count; i++) {
        const char name[] = { (char)('a' + place->first_layer + i), 0 };
        const xd_weight_desc w = { .name = name, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { WIDTH },
                                   .init = { XD_INIT_NORMAL, 1.0f, 0.2f } };
        XD_TRY(xd_weight_add(xd_model_root(*out), &w, NULL));
    }
    return XD_OK;
}

/* Forward, inference or backward of a sample. */
static xd_result sample_pass(void *user, const xd_pipeline_call *call) {
    const int layers = (int)call->stage.place.layer_count;
    const int64_t sample = xd_parallel_leaf(call->stage.parallel, call->micro_batch);
    const bool back = call->pass == XD_PASS_BACKWARD;
    float(*x)[WIDTH] = ((kept *)user)[call->slot];
    xd_block_view view;
    const xd_pass pass = { call->pass, .leaf = back ? call->micro_batch : 0 };
    XD_TRY(xd_block_begin(xd_model_root(call->stage.model), pass, &view));
    for (int j = 0; j < WIDTH && !back; j++) {
        x[0][j] = call->input ? ((const float *)call->input)[j] : sinf((float)(sample * WIDTH + j));
        for (int i = 0; i < layers; i++) x[i + 1][j] = tanhf(((const float *)view.values[i])[j] * x[i][j]);
        if (call->output) ((float *)call->output)[j] = x[layers][j];
        if (call->values) call->values[0] += pow(x[layers][j] - 0.25, 2.0) / 2.0 / SAMPLES; /* the loss, on the last stage */
    }
    for (int j = 0; j < WIDTH && back; j++) {
        float d = call->output_gradient ? ((const float *)call->output_gradient)[j] : (x[layers][j] - 0.25f) / SAMPLES;
        for (int i = layers - 1; i >= 0; i--) {
            d *= 1.0f - x[i + 1][j] * x[i + 1][j];
            ((float *)view.gradients[i])[j] += d * x[i][j];
            d *= ((const float *)view.values[i])[j];
        }
        if (call->input_gradient) ((float *)call->input_gradient)[j] = d;
    }
    return xd_block_end(xd_model_root(call->stage.model));
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    kept slots[SLOTS];
    xd_grid *grid;
    xd_built *built;
    xd_pipeline *pipeline;
    xd_optimizer *optimizer;
    xd_param params[LAYERS];
    int64_t count = 0, all = 0;
    XD_TRY(xd_grid_create(world, &(xd_expert_desc){ .pp = r->stages }, &grid));
    const xd_groups *groups = xd_grid_groups(grid);
    const xd_build_desc build = { .groups = groups, .provider = { describe, NULL },
                                  .wrap = { XD_WRAP_DDP, .ddp = &(xd_ddp_desc){ .leaves = SAMPLES } },
                                  .pipeline = { .layer_count = LAYERS, .virtual_stages = r->virtual_stages } };
    XD_TRY(xd_build(world, &build, &built));
    const int64_t own = xd_parallel_leaves(xd_built_stage(built, 0).parallel).own; /* samples */
    const xd_pipeline_run_desc desc = { .schedule = { .virtual_stages = r->virtual_stages, .micro_batches = own },
                                        .ndim = 1, .shape = { WIDTH }, .dtype = XD_DTYPE_F32, .value_count = 1,
                                        .built = built, .data = groups->dp, .world = world };
    XD_TRY(xd_pipeline_create(groups->pp, &desc, &pipeline));
    for (int i = 0; i < xd_built_stage_count(built); i++, all += count)
        XD_TRY(xd_parallel_params(xd_built_stage(built, i).parallel, LAYERS - all, params + all, &count));
    xd_optimizer_desc adamw = xd_adamw_defaults(params, all);
    adamw.learning_rate = 0.05;
    XD_TRY(xd_optimizer_create(xd_comm_ctx(world), &adamw, &optimizer));
    for (int step = 0; step < STEPS; step++) {
        double losses[SAMPLES]; /* of this rank's samples, on every stage */
        XD_TRY(xd_pipeline_run(pipeline, &(xd_pipeline_calls){ sample_pass, sample_pass, slots }, losses));
        XD_TRY(xd_pipeline_finish(world, &(xd_pipeline_finish_desc){ .groups = groups, .built = built }));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        for (int i = 0; i < xd_built_stage_count(built); i++) XD_TRY(xd_parallel_publish(xd_built_stage(built, i).parallel));
        if (xd_comm_rank(world) == 0 && step % (STEPS - 1) == 0)
            printf("%d stages, step %2d: loss of sample 0 %.6f\n", r->stages, step, losses[0]);
    }
    for (int64_t i = 0; i < all && xd_comm_rank(groups->dp) == 0; i++)
        memcpy(r->weights[params[i].name[0] - 'a'], params[i].value, sizeof r->weights[0]);
    xd_optimizer_destroy(optimizer), xd_pipeline_destroy(pipeline), xd_built_destroy(built), xd_grid_destroy(grid);
    return XD_OK;
}

int main(void) {
    static run one = { .stages = 1 }, four = { .stages = 2, .virtual_stages = 2 };
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) || xd_run_threads(4, &invariant, run_rank, &four, &error))
        return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
    const bool equal = memcmp(one.weights, four.weights, sizeof one.weights) == 0;
    printf("one stage, and two of two parts beside two others: %s\n", equal ? "the same bits" : "OTHER BITS");
    return !equal;
}
