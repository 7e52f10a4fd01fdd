/* A layer of four experts over four ranks: each rank holds two of them, and a token goes to its expert wherever that is. The bits are
 * those of one rank that holds all four.
 *
 *     cc -std=c99 -O2 examples/23_experts.c -o experts -lm -lpthread
 *
 * Ranks 0 and 1 are a group of two members, ranks 2 and 3 another. The bias, which every rank has, is summed over four ranks, an
 * expert over the two that hold it. A rank computes its experts' backward once for each member's micro-batch, whose tokens an
 * all-to-all has brought: what they add belongs to that micro-batch, on whichever rank it is computed. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>

enum { EXPERTS = 4, WIDTH = 3, SIZE = WIDTH * WIDTH, TOKENS = 6, LEAVES = 8, STEPS = 150, MEMBERS = 2 };

typedef float token[WIDTH];
typedef struct run {
    int members; /* ranks that share the experts */
    double loss; /* of micro-batch 0 */
    float experts[EXPERTS][SIZE];
} run;
typedef struct rank {
    run *run;
    xd_comm *group; /* the members */
    xd_parallel *parallel;
    xd_block *root, *layer;
    int here; /* experts on this rank */
    int64_t sent[EXPERTS], came[EXPERTS]; /* tokens for each expert; from each member for each expert that is here */
} rank;

/* Tokens in the order of their experts to where these are, or back. */
static xd_result move(const rank *r, token *from, token *to, bool back) {
    int64_t out[MEMBERS] = { 0 }, in[MEMBERS] = { 0 };
    for (int i = 0; i < EXPERTS; i++) out[i / r->here] += r->sent[i] * WIDTH, in[i / r->here] += r->came[i] * WIDTH;
    return xd_all_to_all(r->group, from, back ? in : out, to, back ? out : in, XD_DTYPE_F32);
}

/* One member's tokens through their experts: y = w x. In a backward, y comes as d loss / d y and is added to d w as y x. */
static void compute(const rank *r, const xd_block_view *view, int member, token *x, token *y, bool backward) {
    const int64_t *counts = r->came + member * r->here;
    for (int i = 0; i < member * r->here; i++) x += r->came[i], y += r->came[i];
    for (int e = 0; e < r->here; e++)
        for (int64_t n = counts[e]; n > 0; n--, x++, y++)
            for (int i = 0; i < WIDTH; i++)
                for (int j = 0; j < WIDTH; j++)
                    if (backward)
                        ((float *)view->gradients[0])[e * SIZE + i * WIDTH + j] += (*y)[i] * (*x)[j];
                    else
                        (*y)[i] = (j ? (*y)[i] : 0.0f) + ((const float *)view->values[0])[e * SIZE + i * WIDTH + j] * (*x)[j];
}

/* The k-th micro-batch of this rank, forward and backward: the layer's output w x + bias is to be |x|. */
static xd_result leaf(rank *r, int64_t k) {
    const int64_t number = xd_parallel_leaf(r->parallel, k), each[MEMBERS] = { r->here, r->here };
    token x[TOKENS], y[TOKENS], came[MEMBERS * TOKENS], out[MEMBERS * TOKENS];
    xd_block_view view;
    double loss = 0;
    memset(r->sent, 0, sizeof r->sent);
    for (int e = 0, n = 0; e < EXPERTS; e++) /* expert e is for tokens of some signs; those of 0 come first, then those of 1 ... */
        for (int t = 0; t < TOKENS && n < TOKENS; t++) {
            for (int i = 0; i < WIDTH; i++) x[n][i] = sinf((float)(number * 31 + t * 7 + i * 3));
            if (2 * (x[n][0] < 0) + (x[n][1] < 0) == e) r->sent[e]++, n++;
        }
    XD_TRY(xd_all_to_all(r->group, r->sent, each, r->came, each, XD_DTYPE_I64));
    XD_TRY(move(r, x, came, false));
    XD_TRY(xd_block_begin(r->layer, (xd_pass){ XD_PASS_FORWARD }, &view));
    for (int m = 0; m < r->run->members; m++) compute(r, &view, m, came, out, false);
    XD_TRY(xd_block_end(r->layer));
    XD_TRY(move(r, out, y, true));
    XD_TRY(xd_block_begin(r->root, (xd_pass){ XD_PASS_BACKWARD, .leaf = k }, &view));
    for (int i = 0; i < TOKENS * WIDTH; i++) {
        float *d = &y[i / WIDTH][i % WIDTH];
        *d += ((const float *)view.values[0])[i % WIDTH] - fabsf(x[i / WIDTH][i % WIDTH]);
        ((float *)view.gradients[0])[i % WIDTH] += *d;
        loss += 0.5 * (double)(*d * *d);
    }
    XD_TRY(xd_block_end(r->root));
    if (number == 0) r->run->loss = loss;
    XD_TRY(move(r, y, out, false));
    for (int m = 0; m < r->run->members; m++) {
        XD_TRY(xd_block_begin(r->layer, (xd_pass){ XD_PASS_BACKWARD, .leaf = k * r->run->members + m }, &view)); /* leaf k of member m */
        compute(r, &view, m, came, out, true);
        XD_TRY(xd_block_end(r->layer));
    }
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    rank r = { .run = argument };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_grid *grid;
    xd_topology topology;
    xd_layout *layout;
    xd_model *model;
    xd_optimizer *optimizer;
    xd_param params[2];
    xd_gradient_norm norm;
    int64_t count;
    XD_TRY(xd_grid_create(world, &(xd_expert_desc){ .ep = r.run->members }, &grid));
    const xd_groups *groups = xd_grid_groups(grid);
    const xd_axis members = { "ep", r.run->members };
    r.group = groups->ep;
    r.here = EXPERTS / r.run->members;
    XD_TRY(xd_topology_create(ctx, &(xd_topology_desc){ .axes = &members, .axis_count = 1, .world_size = r.run->members }, &topology));
    XD_TRY(xd_layout_create(ctx, &(xd_layout_desc){ .ndim = 2, .shape = { EXPERTS, SIZE }, .topology = &topology, .placement = { { XD_SHARD } } }, &layout));
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 1, .rank = xd_comm_rank(r.group) }, &model));
    const xd_weight_desc bias = { .name = "bias", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { WIDTH } },
                         experts = { .name = "experts", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { EXPERTS, SIZE }, .layout = layout,
                                     .init = { XD_INIT_NORMAL, 0.0f, 0.3f }, .traits = { .expert = true } };
    r.root = xd_model_root(model);
    XD_TRY(xd_weight_add(r.root, &bias, NULL));
    XD_TRY(xd_block_add(r.root, &(xd_block_desc){ .name = "layer" }, &r.layer));
    XD_TRY(xd_weight_add(r.layer, &experts, NULL));
    XD_TRY(xd_model_seal(model));
    XD_TRY(xd_ddp_create(model, groups->dp, &(xd_ddp_desc){ .leaves = LEAVES, .experts = { .data = groups->expert_dp } }, &r.parallel));
    XD_TRY(xd_parallel_params(r.parallel, 2, params, &count));
    xd_optimizer_desc adamw = xd_adamw_defaults(params, count);
    adamw.learning_rate = 0.03;
    const xd_gradient_norm_desc clip = { .params = params, .param_count = count, .max_norm = 5.0 };
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    for (int step = 0; step < STEPS; step++) {
        for (int64_t k = 0; k < xd_parallel_leaves(r.parallel).most; k++) XD_TRY(leaf(&r, k));
        XD_TRY(xd_parallel_reduce(r.parallel));
        XD_TRY(xd_gradient_norm_compute(ctx, world, &clip, &norm)); /* each weight counts once */
        XD_TRY(xd_optimizer_step(optimizer, &(xd_optimizer_step_desc){ .gradient_scale = &norm.coefficient }, NULL));
        XD_TRY(xd_parallel_publish(r.parallel));
        if (xd_comm_rank(world) == 0 && step % (STEPS - 1) == 0) printf("%d ranks, step %3d: loss %.6f, norm %.6f\n", xd_comm_size(world), step, r.run->loss, norm.norm);
    }
    if (!params[1].replica) memcpy(r.run->experts[r.here * xd_comm_rank(r.group)], params[1].value, (size_t)r.here * sizeof r.run->experts[0]);
    xd_optimizer_destroy(optimizer);
    xd_parallel_destroy(r.parallel);
    xd_model_destroy(model);
    xd_layout_destroy(layout);
    xd_grid_destroy(grid);
    return XD_OK;
}

int main(void) {
    static run one = { .members = 1 }, four = { .members = MEMBERS };
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) != XD_OK || xd_run_threads(4, &invariant, run_rank, &four, &error) != XD_OK)
        return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
    const bool equal = memcmp(one.experts, four.experts, sizeof one.experts) == 0;
    printf("one rank, and four with two experts each: %s\n", equal ? "the same bits" : "OTHER BITS");
    return !equal;
}
