/* A layer of four experts over four ranks: each rank holds two of them, and a token goes to its expert wherever that is. The
 * gradients of a step have the bits of one rank that holds all four.
 *
 *     cc -std=c99 -O2 examples/23_experts.c -o experts -lm -lpthread
 *
 * Ranks 0 and 1 are a group of two members, ranks 2 and 3 another; all four sum the bias, two each expert. A rank runs its experts'
 * backward once for each member's micro-batch, whose tokens an all-to-all has brought: what they add belongs to that
 * micro-batch. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { EXPERTS = 4, WIDTH = 3, SIZE = WIDTH * WIDTH, TOKENS = 6, LEAVES = 8, MEMBERS = 2, ROOM = MEMBERS * TOKENS };
typedef float token[WIDTH];
typedef struct run { double norm; float bias[WIDTH], experts[EXPERTS][SIZE]; } run; /* gradients, and the norm of all */
typedef struct rank { int members, here; xd_comm *group; xd_parallel *parallel; xd_block *root, *layer; } rank;

static int expert_of(const float *x) { return 2 * (x[0] < 0) + (x[1] < 0); }

/* The k-th micro-batch of this rank, forward and backward: the layer's output w x + bias is to be |x|. */
static xd_result leaf(const rank *r, int64_t k) {
    static const int64_t all[MEMBERS] = { TOKENS * WIDTH, TOKENS * WIDTH }; /* zeros stand for tokens that go elsewhere */
    token x[TOKENS], sent[ROOM] = { 0 }, came[ROOM], out[ROOM] = { 0 }, y[ROOM];
    xd_block_view view;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < WIDTH; i++) x[t][i] = sinf((float)(xd_parallel_leaf(r->parallel, k) * 31 + t * 7 + i * 3));
        memcpy(sent[expert_of(x[t]) / r->here * TOKENS + t], x[t], sizeof x[t]);
    }
    XD_TRY(xd_all_to_all(r->group, sent, all, came, all, XD_DTYPE_F32));
    XD_TRY(xd_block_begin(r->layer, (xd_pass){ XD_PASS_FORWARD }, &view));
    const float *w = view.values[0];
    for (int n = 0; n < r->members * TOKENS; n++)
        for (int i = 0; i < SIZE; i++) out[n][i / WIDTH] += w[expert_of(came[n]) % r->here * SIZE + i] * came[n][i % WIDTH];
    XD_TRY(xd_block_end(r->layer));
    XD_TRY(xd_all_to_all(r->group, out, all, y, all, XD_DTYPE_F32));
    XD_TRY(xd_block_begin(r->root, (xd_pass){ XD_PASS_BACKWARD, .leaf = k }, &view));
    for (int i = 0; i < TOKENS * WIDTH; i++) { /* y becomes the gradient of half the squared distance */
        float *d = &y[expert_of(x[i / WIDTH]) / r->here * TOKENS + i / WIDTH][i % WIDTH];
        *d += ((const float *)view.values[0])[i % WIDTH] - fabsf(x[i / WIDTH][i % WIDTH]);
        ((float *)view.gradients[0])[i % WIDTH] += *d;
    }
    XD_TRY(xd_block_end(r->root));
    XD_TRY(xd_all_to_all(r->group, y, all, out, all, XD_DTYPE_F32));
    for (int m = 0; m < r->members; m++) { /* leaf k of member m */
        XD_TRY(xd_block_begin(r->layer, (xd_pass){ XD_PASS_BACKWARD, .leaf = k * r->members + m }, &view));
        float *d_w = view.gradients[0];
        for (int n = m * TOKENS; n < (m + 1) * TOKENS; n++)
            for (int i = 0; i < SIZE; i++)
                d_w[expert_of(came[n]) % r->here * SIZE + i] += out[n][i / WIDTH] * came[n][i % WIDTH];
        XD_TRY(xd_block_end(r->layer));
    }
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *of = argument;
    const int size = xd_comm_size(world) == 1 ? 1 : MEMBERS;
    rank r = { .members = size, .here = EXPERTS / size };
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_topology members = { .axis_count = 1, .size = { size }, .rank_count = size };
    xd_grid *grid;
    xd_layout *cut;
    xd_model *model;
    xd_param params[2];
    xd_gradient_norm norm;
    int64_t count;
    XD_TRY(xd_grid_create(world, &(xd_expert_desc){ .ep = size }, &grid));
    const xd_groups *groups = xd_grid_groups(grid);
    r.group = groups->ep;
    XD_TRY(xd_layout_create(ctx, &(xd_layout_desc){ .ndim = 2, .shape = { EXPERTS, SIZE }, .topology = &members,
                                                    .placement = { { XD_SHARD } } }, &cut));
    const xd_weight_desc bias = { .name = "bias", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { WIDTH } },
                         experts = { .name = "experts", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { EXPERTS, SIZE }, .layout = cut,
                                     .init = { XD_INIT_NORMAL, 0.0f, 0.3f }, .traits = { .expert = true } };
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 1, .rank = xd_comm_rank(r.group) }, &model));
    r.root = xd_model_root(model);
    XD_TRY(xd_weight_add(r.root, &bias, NULL));
    XD_TRY(xd_block_add(r.root, &(xd_block_desc){ .name = "layer" }, &r.layer));
    XD_TRY(xd_weight_add(r.layer, &experts, NULL));
    XD_TRY(xd_model_seal(model));
    const xd_ddp_desc ddp = { .leaves = LEAVES, .experts = { .data = groups->expert_dp } };
    XD_TRY(xd_ddp_create(model, groups->dp, &ddp, &r.parallel));
    for (int64_t k = 0; k < xd_parallel_leaves(r.parallel).most; k++) XD_TRY(leaf(&r, k));
    XD_TRY(xd_parallel_reduce(r.parallel));
    XD_TRY(xd_parallel_params(r.parallel, 2, params, &count)); /* for an optimizer */
    XD_TRY(xd_gradient_norm_compute(ctx, world, &(xd_gradient_norm_desc){ .params = params, .param_count = count }, &norm));
    float(*here)[SIZE] = of->experts + r.here * xd_comm_rank(r.group);
    if (!params[0].replica) of->norm = norm.norm, memcpy(of->bias, params[0].gradient, sizeof of->bias);
    if (!params[1].replica) memcpy(here, params[1].gradient, (size_t)r.here * sizeof *here);
    xd_parallel_destroy(r.parallel), xd_model_destroy(model), xd_layout_destroy(cut), xd_grid_destroy(grid);
    return XD_OK;
}

int main(void) {
    static run one, four;
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) || xd_run_threads(4, &invariant, run_rank, &four, &error))
        return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
    const bool equal = memcmp(&one, &four, sizeof one) == 0;
    printf("norm of the gradients: %.6f on one rank, %.6f on four; their bits are %s\n", one.norm, four.norm,
           equal ? "the same" : "OTHERS");
    return !equal || one.norm == 0.0;
}
