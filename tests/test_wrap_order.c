/* Wrappers: in which orders blocks that are summed together may have their backwards. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "wrap_weights.h"

enum { LEAVES = 8, ELEMENTS = 3, BLOCKS = 3, ROOT = 0, LEFT, RIGHT };

/* What a leaf adds to every element: in another order of additions, or with two of them swapped for one, the sum is another one. */
static float leaf_gradient(int64_t number) {
    static const float values[] = { 1e8f, 1.0f, -1e8f, 1.0f, 3.0f, -1e8f, 5.0f, 1e8f };
    return values[number];
}

typedef enum wrap_kind { DDP, DDP_QUEUE, ZERO1, FSDP, FSDP_WHOLE } wrap_kind;

/* A bracket, of a block and a leaf of this rank. */
typedef struct bracket {
    int block;
    int64_t leaf;
} bracket;

/* What the ranks are to do, and the sum that rank 0 has afterwards. */
typedef struct job {
    wrap_kind kind;
    const bracket *order; /* [BLOCKS * leaves of a rank]; NULL -> leaf after leaf */
    int refused; /* the number of the one that is refused, after which the ranks go leaf after leaf; -1: none */
    const char *text; /* and what it says */
    float sum[BLOCKS];
} job;

typedef struct scene {
    xd_ctx *ctx;
    xd_comm *world;
    xd_model *model;
    xd_block *blocks[BLOCKS];
    xd_queue *queue;
    xd_parallel *parallel;
} scene;

static xd_result wrap(scene *s, wrap_kind kind) {
    xd_ddp_desc d = { .micro_batches = LEAVES, .sharded_optimizer = kind == ZERO1 };
    const xd_queue_desc q = { .form = XD_QUEUE_INLINE };
    if (kind == DDP_QUEUE) {
        XD_TRY(xd_queue_create(s->world, &q, &s->queue));
        d.reductions = s->queue;
        d.bucket_size = 1;
    }
    const xd_fsdp_desc f = { .micro_batches = LEAVES, .accumulate_whole = kind == FSDP_WHOLE };
    return kind >= FSDP ? wrap_over_fsdp(s->model, s->world, &f, &s->parallel)
                        : wrap_over_ddp(s->model, s->world, &d, &s->parallel);
}

static void open_scene(scene *s, xd_comm *world) {
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    s->world = world;
    CHECK(xd_model_create(s->ctx, NULL, &s->model) == XD_OK);
    s->blocks[ROOT] = xd_model_root(s->model);
    s->blocks[LEFT] = wrap_child(s->blocks[ROOT], "left", NULL);
    s->blocks[RIGHT] = wrap_child(s->blocks[ROOT], "right", NULL);
    for (int i = 0; i < BLOCKS; i++) wrap_weight(s->blocks[i], "w", ELEMENTS, 0);
    CHECK(xd_model_seal(s->model) == XD_OK);
}

static void close_scene(scene *s) {
    xd_parallel_destroy(s->parallel);
    xd_queue_destroy(s->queue);
    xd_model_destroy(s->model);
}

static bool says(const scene *s, const char *text) {
    const char *message = xd_last_error(s->ctx)->message;
    if (strstr(message, text)) return true;
    printf("\"%s\" lacks \"%s\"\n", message, text);
    return false;
}

static xd_result begin(const scene *s, bracket b, xd_block_view *view) {
    return xd_block_begin(s->blocks[b.block], (xd_pass){ XD_PASS_BACKWARD, .micro_batch = b.leaf }, view);
}

static void add(const scene *s, int64_t leaf, const xd_block_view *view) {
    const int64_t number = xd_parallel_micro_batch(s->parallel, leaf);
    float *gradient = (float *)view->gradients[0];
    for (int i = 0; i < ELEMENTS && number >= 0; i++) gradient[i] += leaf_gradient(number);
}

static xd_result backward(const scene *s, bracket b) {
    xd_block_view view;
    XD_TRY(begin(s, b, &view));
    add(s, b.leaf, &view);
    return xd_block_end(s->blocks[b.block]);
}

static void leaf_after_leaf(const scene *s, int64_t done[BLOCKS]) {
    for (int64_t k = 0; k < xd_parallel_micro_batches(s->parallel).opened; k++)
        for (int i = BLOCKS; i-- > 0;)
            if (k >= done[i]) CHECK(backward(s, (bracket){ i, k }) == XD_OK);
}

static void read_sum(const scene *s, float sum[BLOCKS]) {
    xd_param params[BLOCKS];
    int64_t count = 0;
    CHECK(xd_parallel_params(s->parallel, BLOCKS, params, &count) == XD_OK);
    for (int i = 0; i < BLOCKS; i++) {
        const float *gradient = (const float *)params[i].gradient;
        for (int64_t e = 0; e < params[i].count; e++) sum[i] = gradient[e];
    }
}

static xd_result run_rank(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    int64_t done[BLOCKS] = { 0, 0, 0 };
    scene s;
    open_scene(&s, world);
    CHECK(wrap(&s, j->kind) == XD_OK);
    const int64_t brackets = BLOCKS * xd_parallel_micro_batches(s.parallel).opened;
    for (int i = 0; j->order && i < brackets; i++) {
        const bracket b = j->order[i];
        const xd_result result = backward(&s, b);
        CHECK_EQ_INT(result, i == j->refused ? XD_ERROR_STATE : XD_OK);
        if (i == j->refused) CHECK(says(&s, j->text));
        if (result != XD_OK) break;
        done[b.block]++;
    }
    if (!j->order || j->refused >= 0) leaf_after_leaf(&s, done);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK);
    /* Parts of the flat buffers lie on other ranks, in pieces of 64 elements; here all values are in the first one of each bucket. */
    float sum[BLOCKS] = { -7e9f, -7e9f, -7e9f };
    read_sum(&s, sum);
    CHECK(xd_all_reduce(world, sum, sum, BLOCKS, XD_DTYPE_F32, XD_MAX) == XD_OK);
    if (xd_comm_rank(world) == 0) memcpy(j->sum, sum, sizeof sum);
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    close_scene(&s);
    return XD_OK;
}

static void run(job *j, int ranks, xd_reduction mode) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(ranks, &desc, run_rank, j, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    CHECK(result == XD_OK);
}

/* ---- orders ---- */

/* Of four leaves a rank: one block is a leaf ahead of the others, or all of them. */
static const bracket ahead[] = { { RIGHT, 0 }, { LEFT, 0 },  { ROOT, 0 }, { RIGHT, 1 },
                                 { RIGHT, 2 }, { LEFT, 1 },  { ROOT, 1 }, { LEFT, 2 },
                                 { ROOT, 2 },  { RIGHT, 3 }, { LEFT, 3 }, { ROOT, 3 } };
static const bracket by_blocks[] = { { RIGHT, 0 }, { RIGHT, 1 }, { RIGHT, 2 }, { RIGHT, 3 },
                                     { LEFT, 0 },  { LEFT, 1 },  { LEFT, 2 },  { LEFT, 3 },
                                     { ROOT, 0 },  { ROOT, 1 },  { ROOT, 2 },  { ROOT, 3 } };

static float tree_sum(void) {
    float nodes[LEAVES];
    for (int i = 0; i < LEAVES; i++) nodes[i] = 0.0f + leaf_gradient(i);
    for (int n = LEAVES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++) nodes[i] = nodes[2 * i] + nodes[2 * i + 1];
    return nodes[0];
}

XD_TEST(leaves_that_are_kept_apart_are_not_mixed_by_blocks_that_are_ahead) {
    static const char *const text =
        "micro-batch 2 of block \"right\" while micro-batch 1 of block \"\" is not complete";
    static const wrap_kind kinds[] = { DDP, ZERO1, FSDP, FSDP_WHOLE };
    for (int i = 0; i < 4; i++)
        for (int blocks = 0; blocks < 2; blocks++) {
            job plain = { .kind = kinds[i], .refused = -1 };
            job mixed = { .kind = kinds[i], .order = ahead, .refused = 4, .text = text };
            if (blocks) mixed.order = by_blocks, mixed.refused = 1;
            if (blocks)
                mixed.text =
                    "micro-batch 1 of block \"right\" while micro-batch 0 of block \"\" is not complete";
            run(&plain, 2, XD_REDUCTION_INVARIANT);
            run(&mixed, 2, XD_REDUCTION_INVARIANT);
            for (int b = 0; b < BLOCKS; b++) {
                CHECK(plain.sum[b] == tree_sum());
                CHECK(mixed.sum[b] == tree_sum());
            }
        }
}

/* Where each leaf is sent by itself it is gone with the bracket that closes it, also for a parent that is still open. */
static xd_result open_parent(xd_comm *world, void *argument) {
    static const bracket parent = { ROOT, 0 };
    job *j = (job *)argument;
    int64_t done[BLOCKS] = { 1, 1, 1 };
    xd_block_view view, child;
    scene s;
    open_scene(&s, world);
    CHECK(wrap(&s, FSDP) == XD_OK);
    CHECK(begin(&s, parent, &view) == XD_OK);
    CHECK(backward(&s, (bracket){ LEFT, 0 }) == XD_OK && backward(&s, (bracket){ RIGHT, 0 }) == XD_OK);
    CHECK(begin(&s, (bracket){ LEFT, 1 }, &child) == XD_ERROR_STATE);
    CHECK(says(&s, "micro-batch 1 of block \"left\" while micro-batch 0 of block \"\" is not complete"));
    CHECK(xd_block_skip(s.blocks[RIGHT], 1) == XD_ERROR_STATE);
    CHECK(says(&s, "micro-batch 1 of block \"right\" while micro-batch 0 of block \"\" is not complete"));
    add(&s, 0, &view);
    CHECK(xd_block_end(s.blocks[ROOT]) == XD_OK);
    leaf_after_leaf(&s, done);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK);
    float sum[BLOCKS] = { -7e9f, -7e9f, -7e9f };
    read_sum(&s, sum);
    CHECK(xd_all_reduce(world, sum, sum, BLOCKS, XD_DTYPE_F32, XD_MAX) == XD_OK);
    if (xd_comm_rank(world) == 0) memcpy(j->sum, sum, sizeof sum);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(a_leaf_is_not_sent_while_a_block_of_it_is_open) {
    for (int mode = 0; mode < 2; mode++) {
        const xd_ctx_desc desc = { .reduction = mode ? XD_REDUCTION_DETERMINISTIC : XD_REDUCTION_INVARIANT,
                                   .timeout_seconds = 60 };
        job plain = { .kind = FSDP, .refused = -1 }, open = { .kind = FSDP };
        run(&plain, 2, desc.reduction);
        CHECK(xd_run_threads(2, &desc, open_parent, &open, NULL) == XD_OK);
        for (int b = 0; b < BLOCKS; b++) CHECK(open.sum[b] == plain.sum[b]);
    }
}

XD_TEST(blocks_of_different_buckets_are_at_different_leaves) {
    job blocks = { .kind = DDP_QUEUE, .order = by_blocks, .refused = -1 };
    run(&blocks, 2, XD_REDUCTION_INVARIANT);
    for (int b = 0; b < BLOCKS; b++) CHECK(blocks.sum[b] == tree_sum());
}

XD_TEST(leaves_that_a_rank_adds_up_itself_come_in_any_order_of_blocks) {
    static const wrap_kind kinds[] = { DDP, DDP_QUEUE, ZERO1, FSDP_WHOLE };
    static const bracket *const orders[] = { ahead, by_blocks };
    float rows[2] = { 0.0f, 0.0f };
    for (int i = 0; i < LEAVES; i++) rows[i / 4] += leaf_gradient(i);
    for (int i = 0; i < 8; i++) {
        job mixed = { .kind = kinds[i / 2], .order = orders[i % 2], .refused = -1 };
        run(&mixed, 2, XD_REDUCTION_DETERMINISTIC);
        for (int b = 0; b < BLOCKS; b++) CHECK(mixed.sum[b] == rows[0] + rows[1]);
    }
    job dealt = { .kind = FSDP, .order = by_blocks, .refused = 1, .text = "is not complete" };
    run(&dealt, 2, XD_REDUCTION_DETERMINISTIC);
}

/* ---- the caller's own gradients ---- */

XD_TEST(a_leaf_of_all_blocks_does_not_follow_that_of_one) {
    for (int mode = 0; mode < 2; mode++) {
        const xd_ctx_desc desc = { .reduction = mode ? XD_REDUCTION_DETERMINISTIC : XD_REDUCTION_INVARIANT };
        const xd_ddp_desc leaves = { .micro_batches = 2 };
        xd_ctx *ctx = NULL;
        xd_comm *world = NULL;
        scene s;
        CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && xd_comm_self(ctx, &world) == XD_OK);
        open_scene(&s, world);
        CHECK(xd_model_allocate(s.model) == XD_OK && xd_model_init_weights(s.model) == XD_OK);
        CHECK(wrap_over_ddp(s.model, world, &leaves, &s.parallel) == XD_OK);
        CHECK(xd_block_skip(s.blocks[LEFT], 0) == XD_OK);
        CHECK_EQ_INT(xd_parallel_push_micro_batch(s.parallel), mode ? XD_OK : XD_ERROR_STATE);
        if (mode == 0)
            CHECK(says(&s,
                       "micro-batch 1 of block \"left\" while micro-batch 0 of block \"\" is not complete"));
        for (int i = 0; i < BLOCKS && mode == 0; i++)
            if (i != LEFT) CHECK(xd_block_skip(s.blocks[i], 0) == XD_OK);
        if (mode == 0)
            CHECK(xd_parallel_push_micro_batch(s.parallel) == XD_OK &&
                  xd_parallel_reduce(s.parallel) == XD_OK);
        close_scene(&s);
        xd_comm_destroy(world);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST_MAIN()
