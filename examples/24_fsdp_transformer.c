/* The transformer of examples/nn learns a text on four ranks under FSDP, each layer a unit: to the bits of one rank.
 *
 *     cc -std=c99 -O2 -I. examples/24_fsdp_transformer.c examples/nn/nn_*.c -o transformer -lm -lpthread
 *
 * Tokens are bytes. Weights are BF16 and are sent so, passes are in F32, and the optimizer has weights of its own in F32. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include "nn/nn_blocks.h"

#include <stdio.h>
#include <string.h>

enum { VOCAB = 128, LENGTH = 48, LEAVES = 8, STEPS = 60, ROOM = 64 };
static const char text[] = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and "
                           "darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters.";

typedef struct run {
    double losses[LEAVES], norm, kept; /* of the last step; megabytes of weights that rank 0 keeps */
} run;

typedef struct trainer {
    xd_ctx *ctx;
    xd_vocab *vocab;
    nn_model model;
    nn_blocks blocks;
    nn_source source;
    float *workspace, logits[LENGTH * VOCAB];
} trainer;

/* Both passes of a leaf, one sequence, whose text depends on step and number alone. */
static xd_result train_leaf(trainer *t, int64_t k, int64_t leaf, int step, double *losses) {
    const int64_t from = (step * LEAVES + leaf) * 29 % (int64_t)(sizeof text - LENGTH - 1);
    xd_loss_desc d = { .vocab = t->vocab, .hard_weight = 1.0, .common.denominator_value = LEAVES * LENGTH };
    xd_loss_values values;
    int32_t ids[LENGTH + 1];
    const nn_batch batch = { .sequences = 1, .positions = LENGTH, .ids = ids };
    for (int i = 0; i <= LENGTH; i++) ids[i] = text[from + i];
    d.student = d.common.gradient = xd_rows_of(t->logits, XD_DTYPE_F32, LENGTH, VOCAB);
    d.common.labels = xd_ids_of(ids + 1, XD_DTYPE_I32);
    t->blocks.leaf = k;
    XD_TRY((xd_result)nn_forward_from(&t->model, &t->source, &batch, true, t->workspace, t->logits));
    XD_TRY(xd_loss(t->ctx, &d, &values)); /* the gradient takes the place of the logits */
    losses[leaf] = values.loss;
    return (xd_result)nn_backward_from(&t->model, &t->source, &batch, t->workspace, t->logits);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    const nn_config config = { VOCAB, .hidden = 48, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 12, .ffn = 96,
                               .rope_theta = 1e4f, .norm_eps = 1e-5f, .tied = true };
    const xd_fsdp_desc fsdp = { .leaves = LEAVES, .unit_types = (const char *const[]){ NN_LAYER_TYPE }, .unit_type_count = 1,
                                .view_dtype = XD_DTYPE_F32 };
    trainer t = { .ctx = xd_comm_ctx(world) };
    run *r = argument;
    nn_description description;
    xd_parallel *parallel;
    xd_optimizer *adamw;
    xd_param params[ROOM];
    xd_gradient_norm norm = { 0 };
    int64_t count;
    if (nn_model_init(&config, NULL, NULL, &t.model)) return XD_ERROR_MEMORY;
    XD_TRY(nn_describe(t.ctx, &t.model, 1, XD_DTYPE_BF16, &description));
    XD_TRY(xd_fsdp_create(description.model, world, &fsdp, &parallel));
    XD_TRY(xd_parallel_params(parallel, ROOM, params, &count));
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.005;
    XD_TRY(xd_optimizer_create(t.ctx, &d, &adamw));
    XD_TRY(xd_vocab_create_even(t.ctx, NULL, VOCAB, &t.vocab));
    t.blocks.model = description.model, t.source = nn_blocks_source(&t.blocks);
    const int64_t floats = nn_workspace_floats(&t.model, &(nn_batch){ .sequences = 1, .positions = LENGTH }, true);
    t.workspace = xd_allocate(t.ctx, (size_t)floats * sizeof(float));
    if (!t.workspace) return XD_ERROR_MEMORY;
    for (int step = 0; step < STEPS; step++) {
        for (int64_t k = 0; k < LEAVES / xd_comm_size(world); k++) /* where that does not divide, some pass by: nn_pass_by */
            XD_TRY(train_leaf(&t, k, xd_parallel_leaf(parallel, k), step, r->losses));
        XD_TRY(xd_parallel_reduce(parallel));
        XD_TRY(xd_gradient_norm_compute(t.ctx, world, &(xd_gradient_norm_desc){ params, count, .max_norm = 1.0 }, &norm));
        XD_TRY(xd_optimizer_step(adamw, &(xd_optimizer_step_desc){ .gradient_scale = &norm.coefficient }, NULL));
        XD_TRY(xd_parallel_publish(parallel));
    }
    if (xd_comm_rank(world) == 0) r->norm = norm.norm, r->kept = 1e-6 * (double)xd_parallel_memory(parallel).values;
    xd_release(t.ctx, t.workspace);
    xd_vocab_destroy(t.vocab), xd_optimizer_destroy(adamw), xd_parallel_destroy(parallel);
    nn_description_free(&description), nn_model_free(&t.model);
    return XD_OK;
}

int main(void) {
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    static run runs[2];
    xd_error error;
    double loss = 0.0;
    for (int i = 0; i < 2; i++)
        if (xd_run_threads(i ? 4 : 1, &invariant, run_rank, &runs[i], &error) != XD_OK)
            return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
    const bool same = memcmp(runs[0].losses, runs[1].losses, sizeof runs[0].losses) == 0 && runs[0].norm == runs[1].norm;
    for (int i = 0; i < LEAVES; i++) loss += runs[1].losses[i];
    printf("%.3f MB of weights on one rank, %.3f MB on each of four\n", runs[0].kept, runs[1].kept);
    printf("loss %.15g, norm %.15g: %s of one rank\n", loss, runs[1].norm, same ? "the bits" : "not those");
    return !same || loss > 2.0;
}
