/* Expert parallelism: a layer of four experts on four ranks. Each rank holds two experts, and an
 * all-to-all sends each token to its expert's rank. The gradients of a step have the bits of one
 * rank that holds all four experts. Ranks 0 and 1 form one expert-parallel group, and ranks 2
 * and 3 form the other. All four ranks reduce the gradient of the bias; two ranks reduce the
 * gradient of each expert.
 *
 *     cc -std=c99 -O2 examples/23_experts.c -o experts -lm -lpthread */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { EXPERTS = 4, MEMBERS = 2, WIDTH = 3, SIZE = WIDTH * WIDTH };
enum { TOKENS = 6, ROOM = MEMBERS * TOKENS };
typedef float token[WIDTH];
typedef struct gradients { double norm; float bias[WIDTH], experts[EXPERTS][SIZE]; } gradients;

typedef struct rank {
    int members, here; /* ranks of the group; experts on this rank */
    xd_grid *grid;
    xd_layout *by_expert;
    xd_model *model;
    xd_block *root, *layer;
    xd_parallel *parallel;
} rank;

/* The tokens of a micro-batch: before, between and after the exchanges. */
typedef struct tokens { token x[TOKENS], sent[ROOM], received[ROOM], out[ROOM], y[ROOM]; } tokens;

static int expert_of(const float *x) { return 2 * (x[0] < 0) + (x[1] < 0); }

/* Each pair of ranks exchanges a full micro-batch; zeros stand for tokens of other experts. */
static xd_result exchange(const rank *r, token *from, token *to) {
    static const int64_t all[MEMBERS] = { TOKENS * WIDTH, TOKENS * WIDTH };
    return xd_all_to_all(xd_grid_groups(r->grid)->ep, from, all, to, all, XD_DTYPE_F32);
}

/* out = w x, computed by the experts' ranks and sent back as y. */
static xd_result forward(const rank *r, int64_t k, tokens *b) {
    const int64_t micro_batch = xd_parallel_micro_batch(r->parallel, k);
    xd_block_view view;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < WIDTH; i++) b->x[t][i] = sinf((float)(micro_batch * 31 + t * 7 + i * 3));
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

/* The loss is half the squared distance of y + bias from |x|. Its gradient goes back as out. Each
 * member's micro-batch counts by itself, so the experts run one backward for each member. */
static xd_result backward(const rank *r, int64_t k, tokens *b) {
    xd_block_view view;
    XD_TRY(xd_block_begin(r->root, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = k }, &view));
    for (int i = 0; i < TOKENS * WIDTH; i++) {
        const float *x = b->x[i / WIDTH];
        float *y = &b->y[expert_of(x) / r->here * TOKENS + i / WIDTH][i % WIDTH];
        *y += ((const float *)view.values[0])[i % WIDTH] - fabsf(x[i % WIDTH]);
        ((float *)view.gradients[0])[i % WIDTH] += *y;
    }
    XD_TRY(xd_block_end(r->root));
    XD_TRY(exchange(r, b->y, b->out));
    for (int m = 0; m < r->members; m++) {
        const xd_pass pass = { XD_PASS_BACKWARD, .micro_batch = k * r->members + m };
        XD_TRY(xd_block_begin(r->layer, pass, &view));
        for (int n = m * TOKENS; n < (m + 1) * TOKENS; n++) {
            const float *x = b->received[n];
            float *d_w = (float *)view.gradients[0] + expert_of(x) % r->here * SIZE;
            for (int i = 0; i < SIZE; i++) d_w[i] += b->out[n][i / WIDTH] * x[i % WIDTH];
        }
        XD_TRY(xd_block_end(r->layer));
    }
    return XD_OK;
}

/* The model has the bias in its root, and this rank's experts in a block below. */
static xd_result create(rank *r, xd_comm *world) {
    XD_TRY(xd_grid_create(world, &(xd_expert_desc){ .ep = r->members }, &r->grid));
    const xd_groups *groups = xd_grid_groups(r->grid);
    const xd_topology mesh = { .axis_count = 1, .size = { r->members }, .rank_count = r->members };
    const xd_layout_desc dim_0 = { .ndim = 2, .shape = { EXPERTS, SIZE },
                                   .topology = &mesh, .placement = { { XD_SHARD } } };
    XD_TRY(xd_layout_create(xd_comm_ctx(world), &dim_0, &r->by_expert));
    const xd_weight_desc bias = { .name = "bias", .dtype = XD_DTYPE_F32,
                                  .ndim = 1, .shape = { WIDTH } };
    const xd_weight_desc experts = { .name = "experts", .ndim = 2, .shape = { EXPERTS, SIZE },
                                     .dtype = XD_DTYPE_F32, .init = { XD_INIT_NORMAL, 0.0f, 0.3f },
                                     .layout = r->by_expert, .traits = { .expert = true } };
    const xd_model_desc desc = { .seed = 1, .rank = xd_comm_rank(groups->ep) };
    XD_TRY(xd_model_create(xd_comm_ctx(world), &desc, &r->model));
    r->root = xd_model_root(r->model);
    XD_TRY(xd_weight_add(r->root, &bias, NULL));
    XD_TRY(xd_block_add(r->root, &(xd_block_desc){ .name = "layer" }, &r->layer));
    XD_TRY(xd_weight_add(r->layer, &experts, NULL));
    XD_TRY(xd_model_seal(r->model));
    const xd_ddp_desc ddp = { .data = groups->dp, .micro_batches = 8,
                              .experts = { groups->expert_dp } };
    return xd_ddp_create(r->model, &ddp, &r->parallel);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    gradients *out = argument;
    rank r = { .members = xd_comm_size(world) == 1 ? 1 : MEMBERS };
    r.here = EXPERTS / r.members;
    XD_TRY(create(&r, world));
    for (int64_t k = 0; k < xd_parallel_micro_batches(r.parallel).max; k++) {
        tokens b = { 0 };
        XD_TRY(forward(&r, k, &b));
        XD_TRY(backward(&r, k, &b));
    }
    XD_TRY(xd_parallel_reduce(r.parallel));

    /* An optimizer would take the params; this program keeps their gradients. */
    xd_param p[2];
    xd_gradient_norm_desc all = { .params = p };
    xd_gradient_norm norm;
    XD_TRY(xd_parallel_params(r.parallel, 2, p, &all.param_count));
    XD_TRY(xd_gradient_norm_compute(xd_comm_ctx(world), world, &all, &norm));
    if (xd_comm_rank(world) == 0) out->norm = norm.norm;
    float *to[] = { out->bias, out->experts[r.here * xd_comm_rank(xd_grid_groups(r.grid)->ep)] };
    for (int i = 0; i < 2; i++)
        if (!p[i].replica) memcpy(to[i], p[i].gradient, (size_t)p[i].count * sizeof(float));
    xd_parallel_destroy(r.parallel);
    xd_model_destroy(r.model);
    xd_layout_destroy(r.by_expert);
    xd_grid_destroy(r.grid);
    return XD_OK;
}

int main(void) {
    static gradients one, four;
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
