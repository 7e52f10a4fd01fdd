/* The transformer of examples/nn learns a text under FSDP on four ranks; each layer is a unit.
 * The losses and the gradient norm have the bits of one rank.
 *
 *     cc -std=c99 -O2 -I. examples/24_fsdp_transformer.c examples/nn/nn_*.c -o train -lm -lpthread
 *
 * Tokens are bytes. Ranks keep and send weights in BF16, and compute both passes in F32. The
 * optimizer has master weights in F32. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include "nn/nn_blocks.h"

#include <stdio.h>
#include <string.h>

enum { VOCAB = 128, LENGTH = 48, MICRO_BATCHES = 8, STEPS = 60, ROOM = 64 };

static const char text[] =
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters.";

/* Losses and gradient norm of the last step; megabytes of weights that rank 0 keeps. */
typedef struct run {
    double losses[MICRO_BATCHES], norm, kept;
} run;

typedef struct trainer {
    xd_ctx *ctx;
    xd_vocab *vocab;
    nn_model model;
    nn_description description;
    nn_blocks blocks;
    nn_source source;
    xd_parallel *parallel;
    xd_optimizer *adamw;
    xd_param params[ROOM];
    int64_t count;
    float *workspace, logits[LENGTH * VOCAB];
} trainer;

static xd_result create_model(trainer *t, xd_comm *world) {
    const nn_config config = {
        .vocab = VOCAB, .hidden = 48, .layers = 2,
        .heads = 4, .kv_heads = 2, .head_dim = 12, .ffn = 96,
        .rope_theta = 1e4f, .norm_eps = 1e-5f, .tied = true
    };
    const xd_fsdp_desc fsdp = {
        .data = world, .micro_batches = MICRO_BATCHES,
        .unit_types = (const char *const[]){ NN_LAYER_TYPE }, .unit_type_count = 1,
        .view_dtype = XD_DTYPE_F32
    };
    if (nn_model_init(&config, NULL, NULL, &t->model)) return XD_ERROR_MEMORY;
    XD_TRY(nn_describe(t->ctx, &t->model, 1, XD_DTYPE_BF16, &t->description));
    XD_TRY(xd_fsdp_create(t->description.model, &fsdp, &t->parallel));
    return xd_parallel_params(t->parallel, ROOM, t->params, &t->count);
}

static xd_result create_trainer(trainer *t, xd_comm *world) {
    const nn_batch batch = { .sequences = 1, .positions = LENGTH };
    XD_TRY(create_model(t, world));
    xd_optimizer_desc adamw = xd_adamw_defaults(t->params, t->count);
    adamw.learning_rate = 0.005;
    XD_TRY(xd_optimizer_create(t->ctx, &adamw, &t->adamw));
    XD_TRY(xd_vocab_create(t->ctx, &(xd_vocab_desc){ .size = VOCAB }, &t->vocab));

    t->blocks.model = t->description.model;
    t->source = nn_blocks_source(&t->blocks);
    const int64_t floats = nn_workspace_floats(&t->model, &batch, true);
    t->workspace = xd_allocate(t->ctx, (size_t)floats * sizeof(float));
    return t->workspace ? XD_OK : XD_ERROR_MEMORY;
}

/* Forward and backward of one sequence, the k-th of this rank. Its text depends only on the step
 * and on the micro-batch's number, so that all runs train on the same text. */
static xd_result train_leaf(trainer *t, int64_t k, int step, double *losses) {
    const int64_t micro_batch = xd_parallel_micro_batch(t->parallel, k);
    const int64_t from = (step * MICRO_BATCHES + micro_batch) * 29 % (int64_t)(sizeof text - LENGTH - 1);
    int32_t ids[LENGTH + 1];
    const nn_batch batch = { .sequences = 1, .positions = LENGTH, .ids = ids };
    for (int i = 0; i <= LENGTH; i++) ids[i] = text[from + i];
    t->blocks.micro_batch = k;
    XD_TRY((xd_result)nn_forward_from(&t->model, &t->source, &batch, true, t->workspace,
                                      t->logits));

    /* The gradient overwrites the logits. */
    const xd_rows logits = xd_rows_of(t->logits, XD_DTYPE_F32, LENGTH, VOCAB);
    xd_loss_desc d = { .student = logits, .vocab = t->vocab, .hard_weight = 1.0 };
    d.common.gradient = logits;
    d.common.labels = xd_ids_of(ids + 1, XD_DTYPE_I32);
    d.common.denominator_value = MICRO_BATCHES * LENGTH;
    xd_loss_values values;
    XD_TRY(xd_loss(t->ctx, &d, &values));
    losses[micro_batch] = values.loss;
    return (xd_result)nn_backward_from(&t->model, &t->source, &batch, t->workspace, t->logits);
}

static xd_result train_step(trainer *t, xd_comm *world, int step, run *r) {
    const xd_gradient_norm_desc clip = { t->params, t->count, .max_norm = 1.0 };
    xd_gradient_norm norm = { 0 };
    /* The micro-batches divide evenly here. Otherwise ranks without one call nn_pass_by. */
    for (int64_t k = 0; k < MICRO_BATCHES / xd_comm_size(world); k++)
        XD_TRY(train_leaf(t, k, step, r->losses));
    XD_TRY(xd_parallel_reduce(t->parallel));
    XD_TRY(xd_gradient_norm_compute(t->ctx, world, &clip, &norm));
    const xd_optimizer_step_desc scaled = { .gradient_scale = &norm.coefficient };
    XD_TRY(xd_optimizer_step(t->adamw, &scaled, NULL));
    XD_TRY(xd_parallel_publish(t->parallel));
    if (xd_comm_rank(world) == 0) r->norm = norm.norm;
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    trainer t = { .ctx = xd_comm_ctx(world) };
    run *r = argument;
    XD_TRY(create_trainer(&t, world));
    for (int step = 0; step < STEPS; step++) XD_TRY(train_step(&t, world, step, r));
    if (xd_comm_rank(world) == 0) r->kept = 1e-6 * (double)xd_parallel_memory(t.parallel).values;

    xd_release(t.ctx, t.workspace);
    xd_vocab_destroy(t.vocab);
    xd_optimizer_destroy(t.adamw);
    xd_parallel_destroy(t.parallel);
    nn_description_free(&t.description);
    nn_model_free(&t.model);
    return XD_OK;
}

int main(void) {
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    static run one, four;
    xd_error error;
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(4, &invariant, run_rank, &four, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }

    const bool same = memcmp(one.losses, four.losses, sizeof one.losses) == 0 &&
                      one.norm == four.norm;
    double loss = 0.0;
    for (int i = 0; i < MICRO_BATCHES; i++) loss += four.losses[i];
    printf("%.3f MB of weights on one rank, %.3f MB on each of four\n", one.kept, four.kept);
    printf("loss %.15g, norm %.15g: %s of one rank\n", loss, four.norm,
           same ? "the bits" : "not those");
    return !same || loss > 2.0;
}
