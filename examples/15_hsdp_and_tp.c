/* Eight ranks hold one network in three ways at once: two cut its columns (tensor parallelism), two share each cut (FSDP), and
 * there are two groups of these (HSDP). Compared with one rank, through the full state on rank 0.
 *
 *     cc -std=c99 -O2 examples/15_hsdp_and_tp.c -o hsdp -lm -lpthread
 *
 * The network is y = down relu(up x). A rank computes with its columns; y is the sum over the tensor-parallel group. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { IN = 6, WIDTH = 33, LEAVES = 8, STEPS = 40 }; /* 33 divides by nothing */

typedef struct run {
    int groups, shards, columns;    /* the mesh */
    float values[2][WIDTH * IN];    /* of up and down, on rank 0 */
} run;

/* A layer; `dim` of its weight is cut over the tensor-parallel ranks. */
static xd_result add_layer(xd_model *model, xd_mesh *columns, xd_weight_desc w, int dim, xd_layout **cut, xd_block **out) {
    const xd_layout_desc d = { .ndim = 2, .shape = { w.shape[0], w.shape[1] }, .topology = xd_mesh_topology(columns),
                               .placement = { { .kind = XD_SHARD, .dim = dim } } };
    XD_TRY(xd_layout_create(xd_comm_ctx(xd_mesh_world(columns)), &d, cut));
    w.layout = *cut;
    w.init = (xd_init){ XD_INIT_NORMAL, .scale = 0.3f };
    XD_TRY(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = dim ? "down" : "up", .unit = XD_UNIT_ALWAYS }, out));
    return xd_weight_add(*out, &w, NULL);
}

/* Both passes of one sample over the `width` columns that are here: it learns the product of two of its numbers. */
static xd_result train_leaf(xd_block *const layer[2], xd_comm *tp, int64_t width, xd_pass pass, int64_t leaf, int step) {
    float x[IN], hidden[WIDTH] = { 0 }, slope[WIDTH], y = 0.0f;
    xd_block_view view;
    for (int i = 0; i < IN; i++) x[i] = sinf((float)(leaf * 13 + i * 7 + step));
    XD_TRY(xd_block_begin(layer[0], (xd_pass){ XD_PASS_FORWARD, 0, false }, &view));
    for (int64_t j = 0; j < width; j++)
        for (int i = 0; i < IN; i++) hidden[j] += ((const float *)view.values[0])[j * IN + i] * x[i];
    XD_TRY(xd_block_end(layer[0]));
    XD_TRY(xd_block_begin(layer[1], pass, &view));
    const float *down = view.values[0];
    for (int64_t j = 0; j < width; j++) y += down[j] * fmaxf(hidden[j], 0.0f);
    XD_TRY(xd_all_reduce(tp, &y, &y, 1, XD_DTYPE_F32, XD_SUM));
    const float d_y = (y - x[0] * x[1]) / LEAVES;
    for (int64_t j = 0; j < width; j++) {
        slope[j] = hidden[j] > 0.0f ? d_y * down[j] : 0.0f;
        ((float *)view.gradients[0])[j] += d_y * fmaxf(hidden[j], 0.0f);
    }
    XD_TRY(xd_block_end(layer[1]));
    XD_TRY(xd_block_begin(layer[0], pass, &view));
    for (int64_t j = 0; j < width; j++)
        for (int i = 0; i < IN; i++) ((float *)view.gradients[0])[j * IN + i] += slope[j] * x[i];
    return xd_block_end(layer[0]);
}

static xd_result keep(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    float *to = ((run *)user)->values[strcmp(tensor->name, "up.weight") != 0];
    memcpy(to + elements.begin, data, (size_t)(elements.end - elements.begin) * sizeof(float));
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_mesh_desc grid = { .axes = { { "group", r->groups }, { "shard", r->shards }, { "tp", r->columns } } };
    const xd_weight_desc up = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { WIDTH, IN } },
                         down = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 1, WIDTH } };
    xd_mesh *mesh, *columns;
    xd_comm *tp, *shard, *group;
    xd_model *model;
    xd_layout *cuts[2];
    xd_block *layer[2];
    xd_parallel *parallel;
    xd_optimizer *adamw;
    xd_param params[2];
    xd_tensor_part parts[2];
    int64_t count;
    XD_TRY(xd_mesh_create(world, &grid, &mesh));
    XD_TRY(xd_mesh_slice(mesh, "tp", &columns));
    XD_TRY(xd_mesh_group(mesh, "tp", &tp));
    XD_TRY(xd_mesh_group(mesh, "shard", &shard));
    XD_TRY(xd_mesh_group(mesh, "group", &group));
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 1, .rank = xd_comm_rank(world) }, &model));
    XD_TRY(add_layer(model, columns, up, 0, &cuts[0], &layer[0]));
    XD_TRY(add_layer(model, columns, down, 1, &cuts[1], &layer[1]));
    XD_TRY(xd_model_seal(model));
    XD_TRY(xd_fsdp_create(model, shard, &(xd_fsdp_desc){ .leaves = LEAVES, .replicas = group }, &parallel));
    XD_TRY(xd_parallel_params(parallel, 2, params, &count));
    XD_TRY(xd_parallel_parts(parallel, 2, parts, &count));
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(ctx, &d, &adamw));
    const int64_t width = xd_weight_describe(xd_model_find_weight(model, "down.weight")).count;
    for (int step = 0; step < STEPS; step++) {
        for (int64_t k = 0; k < xd_parallel_leaves(parallel).own; k++)
            XD_TRY(train_leaf(layer, tp, width, (xd_pass){ XD_PASS_BACKWARD, k, false }, xd_parallel_leaf(parallel, k), step));
        XD_TRY(xd_parallel_reduce(parallel));
        XD_TRY(xd_optimizer_step(adamw, NULL, NULL));
        XD_TRY(xd_parallel_publish(parallel));
    }
    const xd_checkpoint_network all = { .parts = parts, .part_count = count };
    XD_TRY(xd_state_gather(world, &(xd_state_gather_desc){ .networks = &all, .network_count = 1, .take = keep, .user = r }));
    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    for (int i = 0; i < 2; i++) xd_layout_destroy(cuts[i]);
    xd_mesh_destroy(columns);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

int main(void) {
    static run one = { .groups = 1, .shards = 1, .columns = 1 }, many = { .groups = 2, .shards = 2, .columns = 2 };
    xd_error error = { 0 };
    double most = 0.0;
    if (xd_run_threads(1, NULL, run_rank, &one, &error) != XD_OK || xd_run_threads(8, NULL, run_rank, &many, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }
    for (int i = 0; i < 2 * WIDTH * IN; i++)
        most = fmax(most, fabs((double)one.values[i % 2][i / 2] - many.values[i % 2][i / 2]));
    printf("up[0] is %.6f on one rank and %.6f on eight; weights are at most %.1e apart\n", one.values[0][0], many.values[0][0], most);
    return most > 1e-4 || one.values[0][0] == 0.0f;
}
