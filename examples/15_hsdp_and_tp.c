/* Eight ranks hold one network in three ways at once: two cut its columns (tensor parallelism), two share each cut (FSDP), and
 * there are two groups of these (HSDP). Compared with one rank, through the full state on rank 0.
 *
 *     cc -std=c99 -O2 examples/15_hsdp_and_tp.c -o hsdp -lm -lpthread
 *
 * The network is y = down relu(up x). A row of its weight is a row of `up`, then a number of `down`; a rank sums y over its
 * rows. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { IN = 6, WIDTH = 33, ROW = IN + 1, LEAVES = 8, STEPS = 40 }; /* 33 divides by nothing */

typedef struct run { int groups, shards, columns; float values[WIDTH * ROW]; } run; /* the mesh; the weight, on rank 0 */

/* Both passes of one sample over the `width` columns that are here: it learns the product of two of its numbers. */
static xd_result train_leaf(xd_block *block, xd_comm *tp, int64_t width, xd_pass pass, int64_t leaf, int step) {
    float x[IN], hidden[WIDTH] = { 0 }, y = 0.0f;
    xd_block_view view;
    for (int i = 0; i < IN; i++) x[i] = sinf((float)(leaf * 13 + i * 7 + step));
    XD_TRY(xd_block_begin(block, pass, &view));
    const float(*w)[ROW] = view.values[0];
    float(*d_w)[ROW] = view.gradients[0];
    for (int64_t j = 0; j < width; j++) {
        for (int i = 0; i < IN; i++) hidden[j] += w[j][i] * x[i];
        y += w[j][IN] * fmaxf(hidden[j], 0.0f);
    }
    XD_TRY(xd_all_reduce(tp, &y, &y, 1, XD_DTYPE_F32, XD_SUM));
    const float d_y = (y - x[0] * x[1]) / LEAVES;
    for (int64_t j = 0; j < width; j++) {
        d_w[j][IN] += d_y * fmaxf(hidden[j], 0.0f);
        for (int i = 0; i < IN && hidden[j] > 0.0f; i++) d_w[j][i] += d_y * w[j][IN] * x[i];
    }
    return xd_block_end(block);
}

static xd_result keep(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    (void)tensor;
    memcpy(((run *)user)->values + elements.begin, data, (size_t)(elements.end - elements.begin) * sizeof(float));
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    const xd_topology columns = { .axis_count = 1, .size = { r->columns }, .rank_count = r->columns };
    const xd_mesh_desc grid = { .axes = { { "group", r->groups }, { "shard", r->shards }, { "tp", r->columns } } };
    xd_mesh *mesh;
    xd_comm *tp, *shard, *group;
    xd_model *model;
    xd_layout *rows;
    xd_parallel *parallel;
    xd_optimizer *adamw;
    xd_param param;
    xd_tensor_part part;
    int64_t count;
    XD_TRY(xd_mesh_create(world, &grid, &mesh));
    XD_TRY(xd_mesh_group(mesh, "tp", &tp));
    XD_TRY(xd_mesh_group(mesh, "shard", &shard));
    XD_TRY(xd_mesh_group(mesh, "group", &group));
    XD_TRY(xd_model_create(xd_comm_ctx(world), &(xd_model_desc){ .seed = 1, .rank = xd_comm_rank(tp) }, &model));
    const xd_layout_desc cut = { .ndim = 2, .shape = { WIDTH, ROW }, .topology = &columns, .placement = { { XD_SHARD } } };
    XD_TRY(xd_layout_create(xd_comm_ctx(world), &cut, &rows));
    const xd_weight_desc w = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { WIDTH, ROW }, .layout = rows,
                               .init = { XD_INIT_NORMAL, .scale = 0.3f } };
    XD_TRY(xd_weight_add(xd_model_root(model), &w, NULL));
    XD_TRY(xd_model_seal(model));
    XD_TRY(xd_fsdp_create(model, shard, &(xd_fsdp_desc){ .leaves = LEAVES, .replicas = group }, &parallel));
    XD_TRY(xd_parallel_params(parallel, 1, &param, &count));
    XD_TRY(xd_parallel_parts(parallel, 1, &part, &count));
    xd_optimizer_desc d = xd_adamw_defaults(&param, count);
    d.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(xd_comm_ctx(world), &d, &adamw));
    const int64_t width = xd_weight_describe(xd_model_find_weight(model, "w")).count / ROW;
    for (int step = 0; step < STEPS; step++) {
        for (int64_t k = 0; k < xd_parallel_leaves(parallel).own; k++)
            XD_TRY(train_leaf(xd_model_root(model), tp, width, (xd_pass){ XD_PASS_BACKWARD, k, false },
                              xd_parallel_leaf(parallel, k), step));
        XD_TRY(xd_parallel_reduce(parallel));
        XD_TRY(xd_optimizer_step(adamw, NULL, NULL));
        XD_TRY(xd_parallel_publish(parallel));
    }
    const xd_checkpoint_network all = { .parts = &part, .part_count = count };
    XD_TRY(xd_state_gather(world, &(xd_state_gather_desc){ .networks = &all, .network_count = 1, .take = keep, .user = r }));
    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    xd_layout_destroy(rows);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

int main(void) {
    static run one = { .groups = 1, .shards = 1, .columns = 1 }, many = { .groups = 2, .shards = 2, .columns = 2 };
    xd_error error = { 0 };
    double most = 0.0;
    if (xd_run_threads(1, NULL, run_rank, &one, &error) != XD_OK || xd_run_threads(8, NULL, run_rank, &many, &error) != XD_OK)
        return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
    for (int i = 0; i < WIDTH * ROW; i++) most = fmax(most, fabs((double)one.values[i] - many.values[i]));
    printf("up[0] is %.6f on one rank and %.6f on eight; weights are at most %.1e apart\n", one.values[0], many.values[0], most);
    return most > 1e-4 || one.values[0] == 0.0f;
}
