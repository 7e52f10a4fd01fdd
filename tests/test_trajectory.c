/* Whole training runs have the same bits however the gradient leaves are dealt over data ranks and however the
 * parameters are cut: 20 steps of leaf sums, clipping, AdamW and EMA over 24 leaves. A leaf's gradient is a formula of
 * step, leaf, element and the present weights, so that a difference in any step grows into all that follow. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "averages.h"

#include <stdlib.h>

enum { LEAVES = 24, STEPS = 20, ELEMENTS = 1003, MOST_RANKS = 8 };

typedef struct run {
    bool sharded;              /* reduce-scatter and a shard of the state, or all-reduce and all of it */
    int first[MOST_RANKS + 1]; /* leaves of rank r: [first[r], first[r + 1]) */
    float weights[ELEMENTS], average[ELEMENTS];
    double norms[STEPS];
} run;

static float leaf_gradient(int step, int leaf, int element, float weight) {
    const uint32_t h = (uint32_t)(step * 7919 + leaf * 104729 + element * 1299709) * 2654435761u;
    return ((float)(h >> 8) * 0x1p-24f - 0.5f) * (float)(1 + leaf % 5) + 0.25f * weight;
}

/* Elements [begin, end) that rank r of n owns: uneven on purpose, and empty for a middle rank of many. */
static int cut(int n, int r) {
    if (r >= n) return ELEMENTS;
    if (n > 4 && r == 3) r = 2;
    return ELEMENTS * r * r / (n * n);
}

typedef struct rank_state {
    float full[ELEMENTS], gradient[ELEMENTS], leaf[ELEMENTS];
    int64_t counts[MOST_RANKS];
    int begin, end;
    xd_param param;
    xd_optimizer *optimizer;
    xd_ema *ema;
    xd_leaf_stack *stack;
} rank_state;

static void set_up(xd_comm *world, const run *r, rank_state *s) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int n = xd_comm_size(world), me = xd_comm_rank(world);
    const xd_leaves leaves = { r->first[me], r->first[me + 1] - r->first[me], LEAVES };
    for (int i = 0; i < ELEMENTS; i++) s->full[i] = sinf(0.01f * (float)i);
    for (int k = 0; k < n; k++) s->counts[k] = cut(n, k + 1) - cut(n, k);
    s->begin = r->sharded ? cut(n, me) : 0;
    s->end = r->sharded ? cut(n, me + 1) : ELEMENTS;
    s->param.name = "w";
    s->param.value = s->full + s->begin;
    s->param.gradient = s->gradient;
    s->param.dtype = XD_DTYPE_F32;
    s->param.count = s->end - s->begin;
    s->param.replica = !r->sharded && me > 0;
    xd_optimizer_desc adamw = xd_adamw_defaults(&s->param, 1);
    const xd_ema_desc average = { .decay = 0.9 };
    adamw.learning_rate = 1e-2;
    CHECK(xd_leaf_stack_create(ctx, &(xd_leaf_stack_desc){ .leaves = leaves, .elements = ELEMENTS },
                               &s->stack) == XD_OK);
    CHECK(xd_optimizer_create(ctx, &adamw, &s->optimizer) == XD_OK);
    CHECK(average_create(ctx, &s->param, 1, &average, &s->ema) == XD_OK);
}

/* The sum of all leaves: this rank's shard of it, or all of it. */
static void reduce(xd_comm *world, const run *r, rank_state *s, int step) {
    const int me = xd_comm_rank(world);
    xd_collective c = { .send = NULL, .recv = s->gradient, .dtype = XD_DTYPE_F32, .op = XD_AVG };
    xd_leaf_stack_reset(s->stack);
    for (int leaf = r->first[me]; leaf < r->first[me + 1]; leaf++) {
        for (int i = 0; i < ELEMENTS; i++) s->leaf[i] = leaf_gradient(step, leaf, i, s->full[i]);
        CHECK(xd_leaf_stack_push(s->stack, s->leaf) == XD_OK);
    }
    c.kind = r->sharded ? XD_COLLECTIVE_REDUCE_SCATTER : XD_COLLECTIVE_ALL_REDUCE;
    c.send = xd_leaf_stack_forest(s->stack);
    c.count = r->sharded ? 0 : ELEMENTS;
    c.send_counts = r->sharded ? s->counts : NULL;
    c.leaves.first = r->first[me];
    c.leaves.count = r->first[me + 1] - r->first[me];
    c.leaves.total = LEAVES;
    CHECK(xd_collective_run(world, &c) == XD_OK);
}

static void train_step(xd_comm *world, run *r, rank_state *s, int step) {
    xd_status status;
    xd_gradient_norm norm;
    memset(&status, 0, sizeof status);
    reduce(world, r, s, step);
    const xd_gradient_norm_desc clip = {
        .params = &s->param, .param_count = 1, .max_norm = 1.0, .status = &status
    };
    CHECK(xd_gradient_norm_compute(xd_comm_ctx(world), world, &clip, &norm) == XD_OK);
    const xd_optimizer_step_desc how = { .gradient_scale = &norm.coefficient, .status = &status };
    CHECK(xd_optimizer_step(s->optimizer, &how, NULL) == XD_OK);
    CHECK(xd_ema_update(s->ema, XD_EMA_NEXT, &status) == XD_OK);
    if (xd_comm_rank(world) == 0) r->norms[step] = norm.norm;
    if (r->sharded)
        CHECK(xd_all_gather(world, s->full + s->begin, s->full, s->counts, XD_DTYPE_F32) == XD_OK);
}

static xd_result train_rank(xd_comm *world, void *argument) {
    run *r = (run *)argument;
    rank_state *s = (rank_state *)calloc(1, sizeof *s);
    set_up(world, r, s);
    for (int step = 0; step < STEPS; step++) train_step(world, r, s, step);
    if (xd_comm_rank(world) == 0) memcpy(r->weights, s->full, sizeof r->weights);
    const xd_param shadow = xd_ema_view(s->ema, 0).shadow;
    if (r->sharded || xd_comm_rank(world) == 0)
        memcpy(r->average + s->begin, shadow.value, (size_t)shadow.count * sizeof(float));
    xd_ema_destroy(s->ema);
    xd_optimizer_destroy(s->optimizer);
    xd_leaf_stack_destroy(s->stack);
    free(s);
    return XD_OK;
}

/* Leaves in uneven contiguous shares; `skew` moves them towards the first ranks, so that some have none. */
static void train(run *r, int ranks, bool sharded, int skew) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    memset(r, 0, sizeof *r);
    r->sharded = sharded;
    for (int k = 1; k <= ranks; k++) {
        const int at = LEAVES * k / ranks + (k < ranks ? skew * (k % 3 + 1) : 0);
        r->first[k] = at > LEAVES ? LEAVES : at;
        if (r->first[k] < r->first[k - 1]) r->first[k] = r->first[k - 1];
    }
    xd_error error;
    memset(&error, 0, sizeof error);
    CHECK_EQ_INT(xd_run_threads(ranks, &desc, train_rank, r, &error), XD_OK);
    CHECK_EQ_STR(error.message, "");
}

XD_TEST(twenty_steps_have_the_same_bits_on_every_mesh) {
    static const int worlds[] = { 1, 2, 3, 4, 6, 8 };
    static run one, other;
    train(&one, 1, false, 0);
    CHECK(one.weights[500] != sinf(5.0f)); /* it moved */
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (int sharded = 0; sharded < 2; sharded++)
            for (int skew = 0; skew < 4; skew++) {
                train(&other, worlds[w], sharded, skew);
                CHECK(memcmp(one.weights, other.weights, sizeof one.weights) == 0);
                CHECK(memcmp(one.average, other.average, sizeof one.average) == 0);
                CHECK(memcmp(one.norms, other.norms, sizeof one.norms) == 0);
            }
}

XD_TEST(a_plain_sum_without_leaves_is_refused_in_invariant_mode) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    float x = 1.0f, y = 0.0f;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(xd_comm_self(ctx, &self) == XD_OK);
    CHECK_EQ_INT(xd_all_reduce(self, &x, &y, 1, XD_DTYPE_F32, XD_SUM), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, "leaves") != NULL);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
