/* A network trained under FSDP on four ranks, saved, and continued under DDP on three ranks.
 *
 * The final weights equal those of one rank in every bit. The network is y = down relu(up x), and
 * this program computes its passes. A pass opens a block first, because an open block gives access
 * to its weights and gradients. The wrapper distributes the eight micro-batches of a step, here samples.
 *
 *     cc -std=c99 -O2 examples/12_wrap.c -o wrap -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>

/* No number of ranks divides 33. */
enum { IN = 6, WIDTH = 33, MICRO_BATCHES = 8, HALF = 20, STEPS = 40 };

typedef struct run {
    bool fsdp;
    int first, last; /* steps */
    const char *root;
    uint64_t hash; /* of the final weights, where one rank has all of them */
} run;

static xd_result add_layer(xd_block *parent, const char *name, int64_t rows, int64_t columns,
                           xd_block **out) {
    const xd_block_desc block = { .name = name, .unit = XD_UNIT_ALWAYS };
    const xd_weight_desc weight = {
        .name = "weight",
        .dtype = XD_DTYPE_F32,
        .ndim = 2,
        .shape = { rows, columns },
        .init = { .kind = XD_INIT_NORMAL, .scale = 0.3f },
    };
    XD_TRY(xd_block_add(parent, &block, out));
    return xd_weight_add(*out, &weight, NULL);
}

/* Both passes of one sample. The network learns the product of two inputs. */
static void compute(const xd_block_view view[2], int64_t micro_batch, int step) {
    const float *up = view[0].values[0], *down = view[1].values[0];
    float *d_up = view[0].gradients[0], *d_down = view[1].gradients[0];
    float x[IN], hidden[WIDTH] = { 0 }, y = 0.0f;
    for (int i = 0; i < IN; i++) x[i] = sinf((float)(micro_batch * 13 + i * 7 + step));
    for (int j = 0; j < WIDTH; j++)
        for (int i = 0; i < IN; i++) hidden[j] += up[j * IN + i] * x[i];
    for (int j = 0; j < WIDTH; j++) y += down[j] * fmaxf(hidden[j], 0.0f);

    const float d_y = (y - x[0] * x[1]) / MICRO_BATCHES;
    for (int j = 0; j < WIDTH; j++) {
        d_down[j] += d_y * fmaxf(hidden[j], 0.0f);
        for (int i = 0; i < IN && hidden[j] > 0.0f; i++) d_up[j * IN + i] += d_y * down[j] * x[i];
    }
}

static xd_result train_micro_batch(xd_block *const layer[2], int64_t k, int64_t micro_batch, int step) {
    const xd_pass pass = { .kind = XD_PASS_BACKWARD, .micro_batch = k };
    xd_block_view view[2];
    for (int i = 0; i < 2; i++) XD_TRY(xd_block_begin(layer[i], pass, &view[i]));
    /* Under FSDP, other ranks may have one more micro-batch. Then this rank only joins their gathers. */
    if (micro_batch >= 0) compute(view, micro_batch, step);
    XD_TRY(xd_block_end(layer[1]));
    return xd_block_end(layer[0]);
}

static xd_result train(const run *r, xd_parallel *parallel, xd_block *const layer[2],
                       xd_optimizer *optimizer) {
    for (int step = r->first; step < r->last; step++) {
        for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).opened; k++)
            XD_TRY(train_micro_batch(layer, k, xd_parallel_micro_batch(parallel, k), step));
        /* Sums the gradients of all micro-batches over all ranks. */
        XD_TRY(xd_parallel_reduce(parallel));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        /* From here on, the blocks hold the new weights. */
        XD_TRY(xd_parallel_publish(parallel));
    }
    return XD_OK;
}

static xd_result wrap(xd_comm *world, xd_model *model, bool fsdp, xd_parallel **out) {
    const xd_fsdp_desc sharded = { .data = world, .micro_batches = MICRO_BATCHES };
    const xd_ddp_desc whole = { .data = world, .micro_batches = MICRO_BATCHES };
    return fsdp ? xd_fsdp_create(model, &sharded, out) : xd_ddp_create(model, &whole, out);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *model;
    xd_block *layer[2];
    xd_parallel *parallel;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 1 }, &model));
    XD_TRY(add_layer(xd_model_root(model), "up", WIDTH, IN, &layer[0]));
    XD_TRY(add_layer(layer[0], "down", 1, WIDTH, &layer[1]));
    XD_TRY(xd_model_seal(model));
    XD_TRY(wrap(world, model, r->fsdp, &parallel));

    xd_param params[2];
    xd_tensor_part parts[2];
    int64_t count;
    xd_optimizer *adamw;
    XD_TRY(xd_parallel_params(parallel, 2, params, &count));
    XD_TRY(xd_parallel_parts(parallel, 2, parts, &count));
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(ctx, &d, &adamw));

    const xd_checkpoint_network all = { .parts = parts, .part_count = count, .optimizer = adamw };
    const xd_checkpoint_load_desc load = {
        .root = r->root, .step = r->first,
        .networks = &all, .network_count = 1,
    };
    const xd_checkpoint_save_desc save = {
        .root = r->root, .step = r->last, .overwrite = true,
        .networks = &all, .network_count = 1,
    };
    if (r->first > 0) XD_TRY(xd_checkpoint_load(world, &load, NULL, NULL));
    /* From here on, the blocks hold the loaded weights. */
    XD_TRY(xd_parallel_publish(parallel));
    XD_TRY(train(r, parallel, layer, adamw));
    XD_TRY(xd_checkpoint_save(world, &save));

    for (int i = 0; i < 2 && xd_comm_rank(world) == 0; i++)
        r->hash = xd_hash(r->hash, params[i].value, (size_t)params[i].count * sizeof(float));
    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

int main(void) {
    static const int ranks[] = { 1, 4, 3 };
    run runs[] = {
        { .fsdp = false, .first = 0, .last = STEPS, .root = "build/wrap-one" },
        { .fsdp = true, .first = 0, .last = HALF, .root = "build/wrap" },
        { .fsdp = false, .first = HALF, .last = STEPS, .root = "build/wrap" },
    };
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    for (int i = 0; i < 3; i++)
        if (xd_run_threads(ranks[i], &invariant, run_rank, &runs[i], &error) != XD_OK) {
            fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
            return 1;
        }
    const unsigned long long alone = runs[0].hash, other = runs[2].hash;
    printf("one rank: %016llx; FSDP on 4, then DDP on 3: %016llx\n", alone, other);
    return alone == 0 || alone != other;
}
