/* Expert parallelism: a layer of four experts on four ranks. Each rank holds two experts, and an
 * all-to-all sends each token to its expert's rank. The gradients of a step have the bits of one
 * rank that holds all four experts.
 *
 *     cc -std=c99 -O2 examples/23_experts.c -o experts -lm -lpthread
 *
 * Ranks 0 and 1 form one expert-parallel group, and ranks 2 and 3 form the other. All four ranks
 * reduce the gradient of the bias; two ranks reduce the gradient of each expert. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { EXPERTS = 4, WIDTH = 3, SIZE = WIDTH * WIDTH, TOKENS = 6, LEAVES = 8 };
enum { MEMBERS = 2, ROOM = MEMBERS * TOKENS };
typedef float token[WIDTH];

/* The gradients, and their norm. */
typedef struct run {
    double norm;
    float bias[WIDTH], experts[EXPERTS][SIZE];
} run;

typedef struct rank {
    int members, here; /* ranks of the group; experts on this rank */
    xd_comm *group;
    xd_parallel *parallel;
    xd_block *root, *layer;
} rank;

/* The tokens of a micro-batch: before, between and after the exchanges. */
typedef struct tokens {
    token x[TOKENS], sent[ROOM], received[ROOM], out[ROOM], y[ROOM];
} tokens;

static int expert_of(const float *x) { return 2 * (x[0] < 0) + (x[1] < 0); }

/* Each pair of ranks exchanges a full micro-batch; zeros stand for tokens of other experts. */
static xd_result exchange(const rank *r, token *from, token *to) {
    static const int64_t all[MEMBERS] = { TOKENS * WIDTH, TOKENS * WIDTH };
    return xd_all_to_all(r->group, from, all, to, all, XD_DTYPE_F32);
}

/* out = w x, computed by the experts' ranks and sent back as y. */
static xd_result forward(const rank *r, int64_t k, tokens *b) {
    xd_block_view view;
    for (int t = 0; t < TOKENS; t++) {
        const int64_t seed = xd_parallel_micro_batch(r->parallel, k) * 31 + t * 7;
        for (int i = 0; i < WIDTH; i++) b->x[t][i] = sinf((float)(seed + i * 3));
        memcpy(b->sent[expert_of(b->x[t]) / r->here * TOKENS + t], b->x[t], sizeof b->x[t]);
    }
    XD_TRY(exchange(r, b->sent, b->received));

    XD_TRY(xd_block_begin(r->layer, (xd_pass){ XD_PASS_FORWARD }, &view));
    for (int n = 0; n < r->members * TOKENS; n++) {
        const float *x = b->received[n];
        const float *w = (const float *)view.values[0] + expert_of(x) % r->here * SIZE;
        for (int i = 0; i < SIZE; i++) b->out[n][i / WIDTH] += w[i] * x[i % WIDTH];
    }
    XD_TRY(xd_block_end(r->layer));
    return exchange(r, b->out, b->y);
}

/* The loss is half the squared distance of y + bias from |x|; y becomes its gradient. */
static xd_result backward_bias(const rank *r, int64_t k, tokens *b) {
    const xd_pass pass = { XD_PASS_BACKWARD, .micro_batch = k };
    xd_block_view view;
    XD_TRY(xd_block_begin(r->root, pass, &view));
    const float *bias = view.values[0];
    float *d_bias = view.gradients[0];
    for (int t = 0; t < TOKENS; t++) {
        float *y = b->y[expert_of(b->x[t]) / r->here * TOKENS + t];
        for (int i = 0; i < WIDTH; i++) {
            y[i] += bias[i] - fabsf(b->x[t][i]);
            d_bias[i] += y[i];
        }
    }
    return xd_block_end(r->root);
}

/* The gradient of this rank's experts from the micro-batch of one member of the group. */
static xd_result backward_experts(const rank *r, int64_t k, int member, const tokens *b) {
    const xd_pass pass = { XD_PASS_BACKWARD, .micro_batch = k * r->members + member };
    xd_block_view view;
    XD_TRY(xd_block_begin(r->layer, pass, &view));
    for (int n = member * TOKENS; n < (member + 1) * TOKENS; n++) {
        const float *x = b->received[n];
        float *d_w = (float *)view.gradients[0] + expert_of(x) % r->here * SIZE;
        for (int i = 0; i < SIZE; i++) d_w[i] += b->out[n][i / WIDTH] * x[i % WIDTH];
    }
    return xd_block_end(r->layer);
}

/* The k-th micro-batch of this rank. Each member's micro-batch is a leaf of its own, so the
 * experts run one backward for each member. */
static xd_result train_leaf(const rank *r, int64_t k) {
    tokens b = { 0 };
    XD_TRY(forward(r, k, &b));
    XD_TRY(backward_bias(r, k, &b));
    XD_TRY(exchange(r, b.y, b.out));
    for (int m = 0; m < r->members; m++) XD_TRY(backward_experts(r, k, m, &b));
    return XD_OK;
}

/* The model: the bias in its root, and this rank's experts in a block below. */
static xd_result create_model(rank *r, xd_ctx *ctx, const xd_layout *sharded, xd_model **out) {
    const xd_weight_desc bias = { .name = "bias", .dtype = XD_DTYPE_F32,
                                  .ndim = 1, .shape = { WIDTH } };
    const xd_weight_desc experts = { .name = "experts", .dtype = XD_DTYPE_F32,
                                     .ndim = 2, .shape = { EXPERTS, SIZE }, .layout = sharded,
                                     .init = { XD_INIT_NORMAL, 0.0f, 0.3f },
                                     .traits = { .expert = true } };
    const xd_model_desc desc = { .seed = 1, .rank = xd_comm_rank(r->group) };
    XD_TRY(xd_model_create(ctx, &desc, out));
    r->root = xd_model_root(*out);
    XD_TRY(xd_weight_add(r->root, &bias, NULL));
    XD_TRY(xd_block_add(r->root, &(xd_block_desc){ .name = "layer" }, &r->layer));
    XD_TRY(xd_weight_add(r->layer, &experts, NULL));
    return xd_model_seal(*out);
}

/* An optimizer would take the params; this program keeps their gradients. */
static xd_result keep_gradients(const rank *r, xd_comm *world, run *out) {
    xd_param params[2];
    int64_t count;
    xd_gradient_norm norm;
    XD_TRY(xd_parallel_params(r->parallel, 2, params, &count));
    const xd_gradient_norm_desc desc = { .params = params, .param_count = count };
    XD_TRY(xd_gradient_norm_compute(xd_comm_ctx(world), world, &desc, &norm));
    if (!params[0].replica) {
        out->norm = norm.norm;
        memcpy(out->bias, params[0].gradient, sizeof out->bias);
    }
    float (*here)[SIZE] = out->experts + r->here * xd_comm_rank(r->group);
    if (!params[1].replica) memcpy(here, params[1].gradient, (size_t)r->here * sizeof *here);
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    const int size = xd_comm_size(world) == 1 ? 1 : MEMBERS;
    const xd_topology members = { .axis_count = 1, .size = { size }, .rank_count = size };
    const xd_layout_desc by_expert = { .ndim = 2, .shape = { EXPERTS, SIZE },
                                       .topology = &members, .placement = { { XD_SHARD } } };
    rank r = { .members = size, .here = EXPERTS / size };
    xd_grid *grid;
    xd_layout *sharded;
    xd_model *model;
    XD_TRY(xd_grid_create(world, &(xd_expert_desc){ .ep = size }, &grid));
    const xd_groups *groups = xd_grid_groups(grid);
    r.group = groups->ep;
    XD_TRY(xd_layout_create(xd_comm_ctx(world), &by_expert, &sharded));
    XD_TRY(create_model(&r, xd_comm_ctx(world), sharded, &model));
    const xd_ddp_desc ddp = { .micro_batches = LEAVES, .experts = { .data = groups->expert_dp } };
    XD_TRY(xd_ddp_create(model, groups->dp, &ddp, &r.parallel));

    for (int64_t k = 0; k < xd_parallel_micro_batches(r.parallel).most; k++)
        XD_TRY(train_leaf(&r, k));
    XD_TRY(xd_parallel_reduce(r.parallel));
    XD_TRY(keep_gradients(&r, world, argument));

    xd_parallel_destroy(r.parallel);
    xd_model_destroy(model);
    xd_layout_destroy(sharded);
    xd_grid_destroy(grid);
    return XD_OK;
}

int main(void) {
    static run one, four;
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) ||
        xd_run_threads(4, &invariant, run_rank, &four, &error)) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }
    const bool equal = memcmp(&one, &four, sizeof one) == 0;
    printf("norm of the gradients: %.6f on one rank, %.6f on four; their bits are %s\n", one.norm,
           four.norm, equal ? "the same" : "OTHERS");
    return !equal || one.norm == 0.0;
}
