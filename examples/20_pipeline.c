/* This example trains a network with pipeline and data parallelism, on two pipelines of two ranks.
 * Each rank has two virtual stages. The library sends activations and gradients between stages by
 * interleaved 1F1B. The trained weights have the bits of a run on one rank. The network has eight
 * layers y = tanh(w x), element by element.
 *
 *     cc -std=c99 -O2 examples/20_pipeline.c -o pipeline -lm -lpthread */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { WIDTH = 5, LAYERS = 8, SAMPLES = 12, STEPS = 30, SLOTS = 16 };

typedef struct run {
    int stages, virtual_stages;
    float weights[LAYERS][WIDTH];
} run;

/* What a forward keeps for its backward: the input of a stage, and the output of each layer. */
typedef float kept[LAYERS + 1][WIDTH];

/* Describes the layers of one stage. */
static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    (void)user;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 1 }, out));
    for (int64_t i = 0; i < place->layer_count; i++) {
        const char name[] = { (char)('a' + place->first_layer + i), 0 };
        const xd_weight_desc w = { .name = name, .dtype = XD_DTYPE_F32, .ndim = 1,
                                   .shape = { WIDTH }, .init = { XD_INIT_NORMAL, 1.0f, 0.2f } };
        XD_TRY(xd_weight_add(xd_model_root(*out), &w, NULL));
    }
    return XD_OK;
}

/* Runs a forward or an inference of one sample. The last stage adds up the loss. */
static xd_result forward(void *user, const xd_pipeline_call *call) {
    const int layers = (int)call->stage.place.layer_count;
    const int64_t sample = xd_parallel_micro_batch(call->stage.parallel, call->micro_batch);
    const float *input = call->input;
    float(*x)[WIDTH] = ((kept *)user)[call->slot];
    xd_block *root = xd_model_root(call->stage.model);
    xd_block_view view;
    XD_TRY(xd_block_begin(root, (xd_pass){ .kind = call->pass }, &view));
    for (int j = 0; j < WIDTH; j++) {
        x[0][j] = input ? input[j] : sinf((float)(sample * WIDTH + j));
        for (int i = 0; i < layers; i++)
            x[i + 1][j] = tanhf(((const float *)view.values[i])[j] * x[i][j]);
        if (call->output) ((float *)call->output)[j] = x[layers][j];
        if (call->values) call->values[0] += pow(x[layers][j] - 0.25, 2.0) / 2.0 / SAMPLES;
    }
    return xd_block_end(root);
}

static xd_result backward(void *user, const xd_pipeline_call *call) {
    const int layers = (int)call->stage.place.layer_count;
    const float *d_output = call->output_gradient;
    float(*x)[WIDTH] = ((kept *)user)[call->slot];
    xd_block *root = xd_model_root(call->stage.model);
    xd_block_view view;
    XD_TRY(xd_block_begin(root, (xd_pass){ call->pass, call->micro_batch, false }, &view));
    for (int j = 0; j < WIDTH; j++) {
        float d = d_output ? d_output[j] : (x[layers][j] - 0.25f) / SAMPLES;
        for (int i = layers - 1; i >= 0; i--) {
            d *= 1.0f - x[i + 1][j] * x[i + 1][j];
            ((float *)view.gradients[i])[j] += d * x[i][j];
            d *= ((const float *)view.values[i])[j];
        }
        if (call->input_gradient) ((float *)call->input_gradient)[j] = d;
    }
    return xd_block_end(root);
}

static xd_result build(xd_comm *world, const run *r, const xd_groups *groups, xd_built **built,
                       xd_pipeline **pipeline) {
    const xd_build_desc network = {
        .groups = groups, .provider = { .describe = describe },
        .wrap = { XD_WRAP_DDP, .ddp = &(xd_ddp_desc){ .micro_batches = SAMPLES } },
        .pipeline = { .layer_count = LAYERS, .virtual_stages = r->virtual_stages },
    };
    XD_TRY(xd_build(world, &network, built));

    const int64_t samples = xd_parallel_micro_batches(xd_built_stage(*built, 0).parallel).own;
    const xd_pipeline_run_desc desc = {
        .schedule = { .virtual_stages = r->virtual_stages, .micro_batches = samples },
        .ndim = 1, .shape = { WIDTH }, .dtype = XD_DTYPE_F32,
        .value_count = 1, .built = *built, .data = groups->dp, .world = world,
    };
    return xd_pipeline_create(groups->pp, &desc, pipeline);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    kept slots[SLOTS];
    const xd_pipeline_calls calls = { forward, backward, slots };
    xd_grid *grid;
    xd_built *built;
    xd_pipeline *pipeline;
    xd_optimizer *optimizer;
    xd_param params[LAYERS];
    int64_t count = 0, all = 0;

    XD_TRY(xd_grid_create(world, &(xd_expert_desc){ .pp = r->stages }, &grid));
    const xd_groups *groups = xd_grid_groups(grid);
    XD_TRY(build(world, r, groups, &built, &pipeline));

    const int stages = xd_built_stage_count(built);
    for (int i = 0; i < stages; i++) {
        xd_stage stage = xd_built_stage(built, i);
        XD_TRY(xd_parallel_params(stage.parallel, LAYERS - all, params + all, &count));
        all += count;
    }
    xd_optimizer_desc adamw = xd_adamw_defaults(params, all);
    adamw.learning_rate = 0.05;
    XD_TRY(xd_optimizer_create(xd_comm_ctx(world), &adamw, &optimizer));

    const xd_pipeline_finish_desc finish = { .groups = groups, .built = built };
    double losses[SAMPLES]; /* of this rank's samples, on every stage */
    for (int step = 0; step < STEPS; step++) {
        XD_TRY(xd_pipeline_run(pipeline, &calls, losses));
        XD_TRY(xd_pipeline_finish(world, &finish));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        for (int i = 0; i < stages; i++)
            XD_TRY(xd_parallel_publish(xd_built_stage(built, i).parallel));
        if (xd_comm_rank(world) == 0 && step % (STEPS - 1) == 0)
            printf("%d stages, step %2d: loss of sample 0 %.6f\n", r->stages, step, losses[0]);
    }
    for (int64_t i = 0; i < all && xd_comm_rank(groups->dp) == 0; i++)
        memcpy(r->weights[params[i].name[0] - 'a'], params[i].value, sizeof r->weights[0]);
    xd_optimizer_destroy(optimizer);
    xd_pipeline_destroy(pipeline);
    xd_built_destroy(built);
    xd_grid_destroy(grid);
    return XD_OK;
}

int main(void) {
    static run one = { .stages = 1 };
    static run four = { .stages = 2, .virtual_stages = 2 };
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(4, &invariant, run_rank, &four, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }
    const bool equal = memcmp(one.weights, four.weights, sizeof one.weights) == 0;
    printf("one stage, and two of two parts beside two others: %s\n",
           equal ? "the same bits" : "OTHER BITS");
    return !equal;
}
