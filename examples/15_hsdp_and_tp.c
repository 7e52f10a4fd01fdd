/* This example trains one network on eight ranks with tensor parallelism and HSDP. Tensor
 * parallelism splits the hidden units over two ranks. FSDP shards each of these halves over two
 * ranks, and HSDP replicates the shards in two groups. The program gathers the full state on rank 0
 * and compares it with a run on one rank.
 *
 *     cc -std=c99 -O2 examples/15_hsdp_and_tp.c -o hsdp -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

/* The network is y = down relu(up x). Row j of its weight is row j of `up`, then element j of
 * `down`. WIDTH is odd, so every split is uneven. */
enum { IN = 6, WIDTH = 33, ROW = IN + 1, MICRO_BATCHES = 8, STEPS = 40 };

typedef struct run {
    int groups, shards, columns; /* of the mesh */
    float values[WIDTH * ROW];   /* the whole weight, from rank 0 */
} run;

/* Runs both passes of one sample over the `width` hidden units of this rank. The target is the
 * product of the sample's first two elements. */
static xd_result train_leaf(xd_block *block, xd_comm *tp, int64_t width, xd_pass pass,
                            int64_t micro_batch, int step) {
    float x[IN], hidden[WIDTH] = { 0 }, y = 0.0f;
    xd_block_view view;
    for (int i = 0; i < IN; i++)
        x[i] = sinf((float)(micro_batch * 13 + i * 7 + step));
    XD_TRY(xd_block_begin(block, pass, &view));
    const float(*w)[ROW] = view.values[0];
    float(*d_w)[ROW] = view.gradients[0];

    for (int64_t j = 0; j < width; j++) {
        for (int i = 0; i < IN; i++)
            hidden[j] += w[j][i] * x[i];
        y += w[j][IN] * fmaxf(hidden[j], 0.0f);
    }
    XD_TRY(xd_all_reduce(tp, &y, &y, 1, XD_DTYPE_F32, XD_SUM));

    const float d_y = (y - x[0] * x[1]) / MICRO_BATCHES;
    for (int64_t j = 0; j < width; j++) {
        d_w[j][IN] += d_y * fmaxf(hidden[j], 0.0f);
        for (int i = 0; i < IN && hidden[j] > 0.0f; i++)
            d_w[j][i] += d_y * w[j][IN] * x[i];
    }
    return xd_block_end(block);
}

static xd_result train(xd_comm *tp, xd_model *model, xd_parallel *parallel, xd_optimizer *adamw) {
    xd_block *root = xd_model_root(model);
    const int64_t width = xd_weight_describe(xd_model_find_weight(model, "w")).count / ROW;
    for (int step = 0; step < STEPS; step++) {
        for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).own; k++) {
            const xd_pass pass = { .kind = XD_PASS_BACKWARD, .micro_batch = k };
            XD_TRY(train_leaf(root, tp, width, pass, xd_parallel_micro_batch(parallel, k), step));
        }
        XD_TRY(xd_parallel_reduce(parallel));
        XD_TRY(xd_optimizer_step(adamw, NULL, NULL));
        XD_TRY(xd_parallel_publish(parallel));
    }
    return XD_OK;
}

/* Receives a range of the whole weight on rank 0. */
static xd_result keep(void *user, const xd_state_tensor *tensor, xd_interval range, const void *x) {
    run *r = user;
    (void)tensor;
    memcpy(r->values + range.begin, x, (size_t)(range.end - range.begin) * sizeof(float));
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_mesh *mesh, *columns;
    xd_comm *tp, *shard, *group;
    xd_model *model;
    xd_layout *rows;
    xd_parallel *parallel;
    xd_optimizer *adamw;
    xd_param param;
    xd_tensor_part part;
    int64_t count;

    const xd_mesh_desc grid = {
        .axes = { { "group", r->groups }, { "shard", r->shards }, { "tp", r->columns } },
    };
    XD_TRY(xd_mesh_create(world, &grid, &mesh));
    XD_TRY(xd_mesh_group(mesh, "tp", &tp));
    XD_TRY(xd_mesh_group(mesh, "shard", &shard));
    XD_TRY(xd_mesh_group(mesh, "group", &group));
    const xd_mesh_derive_desc one_axis = { .axes = "tp" };
    XD_TRY(xd_mesh_derive(mesh, &one_axis, &columns));

    /* The layout names ranks of the world: those that have the same shard of the same group. */
    const xd_model_desc seeded = { .seed = 1, .rank = xd_comm_rank(world) };
    XD_TRY(xd_model_create(ctx, &seeded, &model));
    const xd_layout_desc split = { .ndim = 2, .shape = { WIDTH, ROW },
                                   .topology = xd_mesh_topology(columns),
                                   .placement = { { XD_SHARD } } };
    XD_TRY(xd_layout_create(ctx, &split, &rows));
    const xd_weight_desc w = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2,
                               .shape = { WIDTH, ROW }, .layout = rows,
                               .init = { XD_INIT_NORMAL, .scale = 0.3f } };
    XD_TRY(xd_weight_add(xd_model_root(model), &w, NULL));
    XD_TRY(xd_model_seal(model));

    const xd_fsdp_desc hsdp = { .data = shard, .micro_batches = MICRO_BATCHES, .replicas = group };
    XD_TRY(xd_fsdp_create(model, &hsdp, &parallel));
    XD_TRY(xd_parallel_params(parallel, 1, &param, &count));
    XD_TRY(xd_parallel_parts(parallel, 1, &part, &count));
    xd_optimizer_desc d = xd_adamw_defaults(&param, count);
    d.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(ctx, &d, &adamw));
    XD_TRY(train(tp, model, parallel, adamw));

    const xd_checkpoint_network all = { .parts = &part, .part_count = count };
    const xd_state_gather_desc gather = { .networks = &all, .network_count = 1,
                                          .take = keep, .user = r };
    XD_TRY(xd_state_gather(world, &gather));

    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    xd_layout_destroy(rows);
    xd_mesh_destroy(columns);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

int main(void) {
    static run one = { .groups = 1, .shards = 1, .columns = 1 };
    static run many = { .groups = 2, .shards = 2, .columns = 2 };
    xd_error error = { 0 };
    double most = 0.0;

    if (xd_run_threads(1, NULL, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(8, NULL, run_rank, &many, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }
    for (int i = 0; i < WIDTH * ROW; i++)
        most = fmax(most, fabs((double)one.values[i] - many.values[i]));
    printf("up[0] is %.6f on one rank and %.6f on eight; weights are at most %.1e apart\n",
           one.values[0], many.values[0], most);
    return most > 1e-4 || one.values[0] == 0.0f;
}
