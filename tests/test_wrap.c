/* Wrappers: DDP and FSDP with all their settings train to the same bits as one rank alone, in INVARIANT mode. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "wrap_train.h"

#include <math.h>

static const char *const kinds[] = { "DDP", "DDP, sharded optimizer", "FSDP", "FSDP, whole gradients",
                                     "HSDP" };

static bool compare(const wrap_run *one, wrap_kind kind, int ranks, int groups, int flags) {
    wrap_run *run = wrap_new(kind, ranks, one->leaves, one->reduction);
    run->groups = groups;
    run->together = (flags & 1) != 0;
    run->nested = (flags & 2) != 0;
    const bool ok = wrap_execute(run) == XD_OK && wrap_equal(one, run);
    if (!ok)
        printf("%s, %d ranks in %d groups, %lld leaves, flags %d differ\n", kinds[kind], ranks, groups,
               (long long)one->leaves, flags);
    free(run);
    return ok;
}

XD_TEST(every_wrapper_on_any_ranks_trains_to_the_bits_of_one_rank) {
    static const int64_t leaves[] = { 8, 12, 13, 24 };
    for (int l = 0; l < 4; l++) {
        wrap_run *one = wrap_new(WRAP_DDP, 1, leaves[l], XD_REDUCTION_INVARIANT);
        CHECK(wrap_execute(one) == XD_OK);
        CHECK(one->count > 300 && one->norms[2] > 0.0);
        for (int ranks = 1; ranks <= 8; ranks += ranks == 5 ? 3 : 1)
            for (int kind = WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++)
                CHECK(compare(one, (wrap_kind)kind, ranks, 0, ranks + kind));
        free(one);
    }
}

XD_TEST(replicated_groups_of_shards_train_to_the_bits_of_one_rank) {
    wrap_run *one = wrap_new(WRAP_DDP, 1, 24, XD_REDUCTION_INVARIANT);
    CHECK(wrap_execute(one) == XD_OK);
    CHECK(compare(one, WRAP_HSDP, 6, 3, 0));
    CHECK(compare(one, WRAP_HSDP, 6, 3, 3));
    CHECK(compare(one, WRAP_HSDP, 3, 3, 1));
    free(one);
    one = wrap_new(WRAP_DDP, 1, 16, XD_REDUCTION_INVARIANT);
    CHECK(wrap_execute(one) == XD_OK);
    CHECK(compare(one, WRAP_HSDP, 8, 2, 2));
    CHECK(compare(one, WRAP_HSDP, 6, 2, 1));
    free(one);
}

/* ---- types, parts that stay, blocks without a part ---- */

static wrap_run *one_rank(wrap_kind kind, const wrap_run *like) {
    wrap_run *one = wrap_new(kind, 1, 8, XD_REDUCTION_INVARIANT);
    one->kept = like->kept;
    one->sent = like->sent;
    one->view = like->view;
    one->skips = like->skips;
    CHECK(wrap_execute(one) == XD_OK);
    return one;
}

/* Whether a run under these settings equals `one`. */
static bool equals(const wrap_run *one, wrap_kind kind, int ranks, const wrap_run *like) {
    wrap_run *run = wrap_new(kind, ranks, 8, XD_REDUCTION_INVARIANT);
    run->kept = like->kept;
    run->sent = like->sent;
    run->view = like->view;
    run->skips = like->skips;
    run->reshard = like->reshard;
    run->queues = like->queues;
    run->prefetch = like->prefetch;
    run->nested = ranks % 2 == 0;
    run->together = ranks % 3 == 0;
    const bool ok = wrap_execute(run) == XD_OK && wrap_equal(one, run);
    if (!ok) printf("%s, %d ranks, reshard %d differs\n", kinds[kind], ranks, like->reshard);
    free(run);
    return ok;
}

XD_TEST(half_weights_train_under_every_wrapper_and_are_shown_in_any_type) {
    const wrap_run half = { .kept = XD_DTYPE_BF16 }, wide = { .kept = XD_DTYPE_BF16, .view = XD_DTYPE_F32 };
    wrap_run *one = one_rank(WRAP_DDP, &half), *plain = one_rank(WRAP_DDP, &(wrap_run){ .skips = false });
    CHECK(!wrap_equal(one, plain));
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int kind = WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++) {
            CHECK(equals(one, (wrap_kind)kind, ranks, &half));
            CHECK(equals(one, (wrap_kind)kind, ranks, &wide));
        }
    free(plain);
    free(one);
}

XD_TEST(values_are_sent_in_a_half_type_that_one_rank_rounds_to_as_well) {
    const wrap_run narrow = { .sent = XD_DTYPE_BF16, .view = XD_DTYPE_BF16 },
                   wide = { .sent = XD_DTYPE_BF16 };
    wrap_run *one = one_rank(WRAP_FSDP, &narrow), *plain = one_rank(WRAP_FSDP, &(wrap_run){ .skips = false });
    CHECK(!wrap_equal(one, plain));
    for (int ranks = 1; ranks <= 4; ranks++) {
        CHECK(equals(one, WRAP_FSDP, ranks, &narrow));
        CHECK(equals(one, WRAP_FSDP, ranks, &wide));
        CHECK(equals(one, WRAP_FSDP_WHOLE, ranks, &wide));
    }
    free(plain);
    free(one);
}

XD_TEST(units_that_a_few_ranks_keep_after_a_gather_change_no_bit) {
    static const int settings[][2] = { { 2, 1 }, { 2, 2 }, { 3, 1 }, { 4, 1 }, { 4, 2 }, { 6, 2 }, { 6, 3 } };
    const int count = (int)(sizeof settings / sizeof *settings);
    for (int half = 0; half < 2; half++) {
        wrap_run like = { .sent = half ? XD_DTYPE_BF16 : XD_DTYPE_NONE };
        wrap_run *one = one_rank(WRAP_FSDP, &like);
        for (int i = 0; i < count; i++) {
            like.reshard = settings[i][1];
            CHECK(equals(one, WRAP_FSDP, settings[i][0], &like));
        }
        free(one);
    }
}

XD_TEST(blocks_that_have_no_part_in_a_step_get_a_gradient_of_zero) {
    const wrap_run skips = { .skips = true };
    wrap_run *one = one_rank(WRAP_DDP, &skips);
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int kind = WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++)
            CHECK(equals(one, (wrap_kind)kind, ranks, &skips));
    free(one);
}

XD_TEST(queues_run_beside_the_passes_and_change_no_bit) {
    static const xd_dtype types[] = { XD_DTYPE_NONE, XD_DTYPE_BF16 };
    for (int t = 0; t < 2; t++) {
        wrap_run like = { .sent = types[t] };
        wrap_run *one = one_rank(t ? WRAP_FSDP : WRAP_DDP, &like);
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int kind = t ? WRAP_FSDP : WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++)
                for (like.queues = 1; like.queues <= 2; like.queues++) {
                    like.prefetch = kind >= WRAP_FSDP ? (ranks + kind) % 3 : 0;
                    like.reshard = kind >= WRAP_FSDP && ranks == 4 ? 2 : 0;
                    CHECK(equals(one, (wrap_kind)kind, ranks, &like));
                }
        free(one);
    }
}

/* Gathers of one step: forwardof two layers, backward in the other order. */
static xd_result count_gathers(xd_comm *world, void *argument) {
    static const int expected[] = { 4, 3, 4 }; /* the root, the first layer twice, the second once */
    static const char *const types[] = { "layer" };
    const int reshard = *(const int *)argument;
    const xd_fsdp_desc d = { .unit_types = types, .unit_type_count = 1, .reshard_ranks = reshard };
    xd_model *model = NULL;
    xd_block *blocks[3];
    xd_parallel *parallel = NULL;
    xd_block_view view;
    CHECK(xd_model_create(xd_comm_ctx(world), NULL, &model) == XD_OK);
    blocks[0] = xd_model_root(model);
    blocks[1] = wrap_child(blocks[0], "a", "layer");
    blocks[2] = wrap_child(blocks[0], "b", "layer");
    for (int i = 0; i < 3; i++) wrap_weight(blocks[i], "w", 5, 5);
    CHECK(xd_model_seal(model) == XD_OK && wrap_over_fsdp(model, world, &d, &parallel) == XD_OK);
    for (int step = 0; step < 2; step++) {
        static const int order[] = { 0, 1, 2, 2, 1, 0 };
        uint64_t calls = xd_comm_traffic(world).calls;
        for (int i = 0; i < 6; i++) {
            const xd_pass pass = { i < 3 ? XD_PASS_FORWARD : XD_PASS_BACKWARD, 0, false };
            CHECK(xd_block_begin(blocks[order[i]], pass, &view) == XD_OK);
            CHECK(xd_block_end(blocks[order[i]]) == XD_OK);
        }
        calls = xd_comm_traffic(world).calls - calls;
        /* Three reductions; what two of four ranks keep is gathered over another communicator. */
        CHECK_EQ_INT(calls, 3 + expected[reshard] - (reshard == 2));
        CHECK(xd_parallel_reduce(parallel) == XD_OK && xd_parallel_publish(parallel) == XD_OK);
    }
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(a_unit_is_gathered_once_for_a_forward_that_its_backward_follows) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    for (int reshard = 0; reshard < 3; reshard++)
        CHECK(xd_run_threads(4, &desc, count_gathers, &reshard, NULL) == XD_OK);
}

/* ---- the other modes ---- */

static double largest_difference(const float *a, const float *b, double *size) {
    double most = 0.0;
    *size = 0.0;
    for (int i = 0; i < WRAP_ROOM; i++) {
        const double difference = fabs((double)a[i] - (double)b[i]);
        if (difference > most) most = difference;
        if (fabs((double)a[i]) > *size) *size = fabs((double)a[i]);
    }
    return most;
}

XD_TEST(in_the_other_modes_a_layout_repeats_its_bits_and_all_layouts_agree_closely) {
    static const xd_reduction modes[] = { XD_REDUCTION_DETERMINISTIC, XD_REDUCTION_FAST };
    for (int m = 0; m < 2; m++) {
        wrap_run *one = wrap_new(WRAP_DDP, 1, 12, modes[m]);
        CHECK(wrap_execute(one) == XD_OK);
        for (int kind = WRAP_DDP; kind <= WRAP_HSDP; kind++) {
            wrap_run *first = wrap_new((wrap_kind)kind, kind == WRAP_HSDP ? 6 : 3, 12, modes[m]);
            wrap_run *again = wrap_new((wrap_kind)kind, first->ranks, 12, modes[m]);
            double size;
            first->groups = again->groups = kind == WRAP_HSDP ? 2 : 0;
            CHECK(wrap_execute(first) == XD_OK && wrap_execute(again) == XD_OK);
            CHECK(wrap_equal(first, again));
            CHECK(largest_difference(one->moments, first->moments, &size) <= 2e-5 * size);
            CHECK(largest_difference(one->values, first->values, &size) <= 1e-3 * size);
            free(first);
            free(again);
        }
        free(one);
    }
}

/* ---- gradients by hand ---- */

enum { LEAVES = 6, ROWS = 3, COLUMNS = 5 };

/* One weight, whose gradient of leaf i is known; the sum over the leaves follows the canonical tree. */
static float by_hand(int64_t leaf, int64_t at) {
    return wrap_number(leaf, 0, at) * 1e3f;
}

static float tree(int64_t begin, int64_t end, int64_t at) {
    int64_t half = 1;
    if (end - begin == 1) return by_hand(begin, at);
    while (2 * half < end - begin) half *= 2;
    return tree(begin, begin + half, at) + tree(begin + half, end, at);
}

static xd_model *one_weight(xd_ctx *ctx, void *value, void *gradient) {
    xd_model *model = NULL;
    xd_weight_desc d = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { ROWS, COLUMNS } };
    d.value = value;
    d.gradient = gradient;
    d.room = ROWS * COLUMNS;
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    CHECK(xd_weight_add(xd_model_root(model), &d, NULL) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

static void check_sum(xd_parallel *parallel) {
    xd_param param;
    xd_tensor_part part;
    int64_t count = 0;
    CHECK(xd_parallel_params(parallel, 1, &param, &count) == XD_OK && count == 1);
    CHECK(xd_parallel_parts(parallel, 1, &part, &count) == XD_OK && count == 1);
    CHECK_EQ_INT(part.range.end - part.range.begin, param.count);
    for (int64_t i = 0; i < param.count; i++)
        CHECK(((const float *)param.gradient)[i] == tree(0, LEAVES, part.range.begin + i));
}

static xd_result sum_by_brackets(xd_comm *world, void *argument) {
    const int kind = *(const int *)argument;
    const xd_ddp_desc ddp = { .micro_batches = LEAVES, .sharded_optimizer = kind == WRAP_SHARDED };
    const xd_fsdp_desc fsdp = { .micro_batches = LEAVES, .accumulate_whole = kind == WRAP_FSDP_WHOLE };
    xd_model *model = one_weight(xd_comm_ctx(world), NULL, NULL);
    xd_block *root = xd_model_root(model);
    xd_parallel *parallel = NULL;
    CHECK((kind <= WRAP_SHARDED ? wrap_over_ddp(model, world, &ddp, &parallel)
                                : wrap_over_fsdp(model, world, &fsdp, &parallel)) == XD_OK);
    for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).own; k++)
        for (int half = 0; half < 2; half++) { /* two brackets of one leaf */
            xd_block_view view;
            CHECK(xd_block_begin(root, (xd_pass){ XD_PASS_BACKWARD, k, half == 0 }, &view) == XD_OK);
            for (int64_t i = 0; i < ROWS * COLUMNS; i++)
                if (i % 2 == half)
                    ((float *)view.gradients[0])[i] += by_hand(xd_parallel_micro_batch(parallel, k), i);
            CHECK(xd_block_end(root) == XD_OK);
        }
    CHECK(xd_parallel_reduce(parallel) == XD_OK);
    check_sum(parallel);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

static xd_result sum_by_pushes(xd_comm *world, void *argument) {
    float value[ROWS * COLUMNS], gradient[ROWS * COLUMNS];
    const xd_ddp_desc ddp = { .micro_batches = LEAVES,
                              .sharded_optimizer = *(const int *)argument == WRAP_SHARDED };
    xd_parallel *parallel = NULL;
    for (int i = 0; i < ROWS * COLUMNS; i++) value[i] = (float)i;
    xd_model *model = one_weight(xd_comm_ctx(world), value, gradient);
    CHECK(wrap_over_ddp(model, world, &ddp, &parallel) == XD_OK);
    for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).own; k++) {
        for (int64_t i = 0; i < ROWS * COLUMNS; i++)
            gradient[i] = by_hand(xd_parallel_micro_batch(parallel, k), i);
        CHECK(xd_parallel_push_micro_batch(parallel) == XD_OK);
    }
    CHECK(xd_parallel_push_micro_batch(parallel) == XD_ERROR_STATE);
    CHECK(xd_parallel_reduce(parallel) == XD_OK);
    check_sum(parallel);
    /* Each rank changes its part of the caller's values; all have all of them afterwards. */
    xd_param param;
    int64_t count = 0;
    CHECK(xd_parallel_params(parallel, 1, &param, &count) == XD_OK);
    for (int64_t i = 0; i < param.count; i++) ((float *)param.value)[i] += 100.0f;
    CHECK(xd_parallel_publish(parallel) == XD_OK);
    for (int i = 0; i < ROWS * COLUMNS; i++) CHECK(value[i] == (float)i + 100.0f);
    xd_parallel_destroy(parallel);
    for (int i = 0; i < ROWS * COLUMNS; i++) CHECK(value[i] == (float)i + 100.0f);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(gradients_are_the_sum_of_the_leaves_along_the_canonical_tree) {
    xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    for (int ranks = 1; ranks <= 6; ranks++)
        for (int kind = WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++) {
            if (kind >= WRAP_FSDP && LEAVES % ranks) continue; /* those are in the runs above */
            CHECK(xd_run_threads(ranks, &desc, sum_by_brackets, &kind, NULL) == XD_OK);
        }
}

XD_TEST(a_caller_with_buffers_of_his_own_needs_no_brackets) {
    xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    for (int ranks = 1; ranks <= 6; ranks++)
        for (int kind = WRAP_DDP; kind <= WRAP_SHARDED; kind++)
            CHECK(xd_run_threads(ranks, &desc, sum_by_pushes, &kind, NULL) == XD_OK);
}

/* ---- memory ---- */

typedef struct counted {
    size_t now, most;
    size_t blocks[512]; /* sizes of the first ones */
    int count;
} counted;

static void *counted_allocate(void *user, size_t bytes) {
    counted *c = (counted *)user;
    size_t *block = (size_t *)malloc(bytes + 64);
    if (!block) return NULL;
    block[0] = bytes;
    c->now += bytes;
    if (c->now > c->most) c->most = c->now;
    if (c->count < 512) c->blocks[c->count++] = bytes;
    return (char *)block + 64;
}

static void counted_release(void *user, void *memory) {
    size_t *block = (size_t *)(void *)((char *)memory - 64);
    ((counted *)user)->now -= block[0];
    free(block);
}

XD_TEST(a_step_allocates_nothing_and_the_wrapper_says_what_it_took) {
    counted c = { 0 };
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT,
                               .allocator = { counted_allocate, counted_release, &c } };
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    wrap_run run = { .kind = WRAP_FSDP };
    wrap_rank r = { .run = &run, .ctx = ctx, .world = self, .data = self };
    static const char *const types[] = { "layer" };
    r.model = wrap_model(ctx, XD_DTYPE_F32);
    const xd_fsdp_desc d = { .micro_batches = 3, .unit_types = types, .unit_type_count = 1 };
    CHECK(wrap_over_fsdp(r.model, self, &d, &r.parallel) == XD_OK);
    const xd_parallel_bytes bytes = xd_parallel_memory(r.parallel);
    CHECK(bytes.values > 300 * sizeof(float) && bytes.gradients > 0);
    int found = 0; /* all of it is one block */
    for (int i = 0; i < c.count; i++) found += c.blocks[i] == bytes.values + bytes.gradients;
    CHECK_EQ_INT(found, 1);
    CHECK_EQ_INT(bytes.gathered, 0); /* there is nobody to gather from */
    CHECK_EQ_INT(bytes.whole_gradients, 0);
    const size_t before = c.now;
    c.most = c.now;
    CHECK(wrap_leaves(&r) == XD_OK && xd_parallel_reduce(r.parallel) == XD_OK &&
          xd_parallel_publish(r.parallel) == XD_OK);
    CHECK_EQ_INT(c.now, before);
    CHECK_EQ_INT(c.most, before);
    xd_parallel_destroy(r.parallel);
    xd_model_destroy(r.model);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
    CHECK_EQ_INT(c.now, 0);
}

/* ---- models that have storage already ---- */

static xd_result publish_own_storage(xd_comm *world, void *argument) {
    const int kind = *(const int *)argument;
    const xd_ddp_desc ddp = { .sharded_optimizer = kind == WRAP_SHARDED };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *model = NULL;
    xd_parallel *parallel = NULL;
    xd_param params[2];
    int64_t count = 0;
    CHECK(xd_model_create(ctx, NULL, &model) == XD_OK);
    xd_weight_desc d = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 200 } };
    CHECK(xd_weight_add(xd_model_root(model), &d, NULL) == XD_OK);
    d = (xd_weight_desc){ .name = "table", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 3 }, .buffer = true };
    d.init = (xd_init){ XD_INIT_CONSTANT, 7.0f, 0.0f };
    CHECK(xd_weight_add(xd_model_root(model), &d, NULL) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK);
    CHECK(xd_model_init_weights(model) == XD_OK);
    CHECK((kind == WRAP_FSDP ? wrap_over_fsdp(model, world, NULL, &parallel)
                             : wrap_over_ddp(model, world, &ddp, &parallel)) == XD_OK);
    CHECK(xd_parallel_params(parallel, 2, params, &count) == XD_OK && count == 2);
    for (int64_t i = 0; i < params[0].count; i++)
        ((float *)params[0].value)[i] = kind == WRAP_DDP ? 5.0f : 5.0f + (float)xd_comm_rank(world);
    CHECK(params[1].value && ((const float *)params[1].value)[2] == 7.0f);
    CHECK(xd_parallel_publish(parallel) == XD_OK);
    xd_block_view view;
    CHECK(xd_block_begin(xd_model_root(model), (xd_pass){ .kind = XD_PASS_INFERENCE }, &view) == XD_OK);
    const float *w = (const float *)view.values[0], *table = (const float *)view.values[1];
    CHECK(w[0] == 5.0f && w[199] == (kind == WRAP_DDP ? 5.0f : 6.0f));
    CHECK(table && table[0] == 7.0f && table[2] == 7.0f);
    CHECK(xd_block_end(xd_model_root(model)) == XD_OK);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(a_model_that_had_storage_shows_what_was_published_and_keeps_its_buffers) {
    for (int kind = WRAP_DDP; kind <= WRAP_FSDP; kind++) {
        xd_error error;
        CHECK(xd_run_threads(2, NULL, publish_own_storage, &kind, &error) == XD_OK);
    }
}

XD_TEST_MAIN()
