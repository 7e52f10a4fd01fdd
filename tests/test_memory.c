/* The n-th allocation fails, for every n: in one training step on two ranks, and in everything that makes meshes and
 * moves tensors. Each run ends with an error, never with a hang, and gives back everything it took. */
#define XDISTILL_IMPLEMENTATION
#if defined(XD_TEST_LAYERS)
#    include "model/describe_internal.h"
#    include "model/buckets_internal.h"
#endif
#include "xdistill.h"
#include "vocab_calls.h"
#include "planned.h"
#include "xd_test.h"
#include "averages.h"

#include <stdlib.h>
#include <unistd.h>

enum { RANKS = 2, ROWS = 3, COLUMNS = 5 };

typedef struct heap {
    int64_t calls, fails_at, live, bytes; /* atomic; fails_at 0 -> never; bytes: all that was handed out */
} heap;

static __thread int64_t fails_in; /* allocations of this thread until one fails; 0 -> never */

static void *heap_allocate(void *user, size_t bytes) {
    heap *h = (heap *)user;
    if (fails_in > 0 && --fails_in == 0) return NULL;
    if (__atomic_add_fetch(&h->calls, 1, __ATOMIC_RELAXED) == h->fails_at) return NULL;
    __atomic_add_fetch(&h->live, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&h->bytes, (int64_t)bytes, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void heap_release(void *user, void *memory) {
    heap *h = (heap *)user;
    __atomic_sub_fetch(&h->live, 1, __ATOMIC_RELAXED);
    free(memory);
}

typedef struct parts {
    xd_mesh *mesh;
    xd_vocab *vocab;
    xd_optimizer *optimizer;
    xd_ema *ema;
    xd_param param;
    float logits[ROWS * COLUMNS], gradient[ROWS * COLUMNS];
} parts;

static xd_result make(xd_comm *world, parts *p) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_mesh_desc mesh = { .axes = { { "tp", RANKS } } };
    xd_comm *tp = NULL;
    XD_TRY(xd_mesh_create(world, &mesh, &p->mesh));
    XD_TRY(xd_mesh_group(p->mesh, "tp", &tp));
    XD_TRY(vocab_even(ctx, tp, RANKS * COLUMNS, &p->vocab));
    p->param.name = "logits";
    p->param.value = p->logits;
    p->param.gradient = p->gradient;
    p->param.dtype = XD_DTYPE_F32;
    p->param.count = ROWS * COLUMNS;
    const xd_optimizer_desc adamw = xd_adamw_defaults(&p->param, 1);
    /* Both can fail on one rank alone: agree before anybody communicates. */
    xd_result mine = xd_optimizer_create(ctx, &adamw, &p->optimizer);
    if (mine == XD_OK) mine = average_create(ctx, &p->param, 1, NULL, &p->ema);
    return xd_agree(world, mine);
}

static xd_result step(xd_comm *world, parts *p) {
    static const int64_t labels[ROWS] = { 1, 7, 4 };
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_rows student = { p->logits, XD_DTYPE_F32, ROWS, COLUMNS, 0 };
    const xd_rows gradient = { p->gradient, XD_DTYPE_F32, ROWS, COLUMNS, 0 };
    const xd_loss_desc loss = { .student = student,
                                .common.labels.data = labels,
                                .vocab = p->vocab,
                                .hard_weight = 1.0,
                                .common.gradient = gradient };
    const xd_gradient_norm_desc clip = { .params = &p->param, .param_count = 1, .max_norm = 1.0 };
    xd_loss_values values;
    xd_gradient_norm norm;
    XD_TRY(xd_loss(ctx, &loss, &values));
    XD_TRY(xd_gradient_norm_compute(ctx, world, &clip, &norm));
    const xd_optimizer_step_desc how = { .gradient_scale = &norm.coefficient };
    XD_TRY(xd_optimizer_step(p->optimizer, &how, NULL));
    return xd_ema_update(p->ema, XD_EMA_NEXT, NULL);
}

static xd_result train_rank(xd_comm *world, void *argument) {
    parts p;
    (void)argument;
    memset(&p, 0, sizeof p);
    xd_result result = make(world, &p);
    if (result == XD_OK) result = step(world, &p);
    xd_ema_destroy(p.ema);
    xd_optimizer_destroy(p.optimizer);
    xd_vocab_destroy(p.vocab);
    xd_mesh_destroy(p.mesh);
    return result;
}

static xd_result train(heap *h) {
    const xd_ctx_desc desc = { .allocator = { heap_allocate, heap_release, h }, .timeout_seconds = 60 };
    return xd_run_threads(RANKS, &desc, train_rank, NULL, NULL);
}

XD_TEST(a_training_step_survives_a_failure_of_each_of_its_allocations) {
    heap whole = { 0 };
    CHECK_EQ_INT(train(&whole), XD_OK);
    CHECK_EQ_INT(whole.live, 0);
    CHECK(whole.calls > 20);
    for (int64_t n = 1; n <= whole.calls; n++) {
        heap h = { .fails_at = n };
        const xd_result result = train(&h);
        CHECK_EQ_INT(result, XD_ERROR_MEMORY);
        CHECK_EQ_INT(h.live, 0);
        if (result != XD_ERROR_MEMORY)
            printf("    at allocation %lld of %lld\n", (long long)n, (long long)whole.calls);
    }
}

/* ---- meshes and moves: every rank gets an error, and the same call again works ---- */

enum { MESH_RANKS = 4, MESH_STEPS = 8, EXTENT = 10 };

typedef struct grid {
    xd_comm *world, *half;
    xd_mesh *rows, *columns, *flat, *split;
    xd_layout *from, *to;
    float source[EXTENT * 3], target[EXTENT * 3], whole[EXTENT * 3];
} grid;

static xd_result make_layouts(grid *g) {
    xd_ctx *ctx = xd_comm_ctx(g->world);
    xd_layout_desc d;
    memset(&d, 0, sizeof d);
    d.ndim = 2;
    d.shape[0] = EXTENT;
    d.shape[1] = 3;
    d.topology = xd_mesh_topology(g->rows);
    d.placement[0].kind = d.placement[1].kind = XD_SHARD;
    d.placement[1].dim = 1;
    xd_result mine = xd_layout_create(ctx, &d, &g->from);
    d.topology = xd_mesh_topology(g->columns);
    memset(d.placement, 0, sizeof d.placement);
    d.placement[0].kind = XD_SHARD;
    if (mine == XD_OK) mine = xd_layout_create(ctx, &d, &g->to);
    mine = xd_agree(g->world, mine);
    if (mine != XD_OK) {
        xd_layout_destroy(g->from);
        g->from = NULL;
        xd_layout_destroy(g->to);
        g->to = NULL;
    }
    return mine;
}

/* Ranks 3, 2 and 1 as a line; rank 0 stands outside and calls too. */
static xd_result make_columns(grid *g) {
    static const int ranks[3] = { 3, 2, 1 };
    const xd_mesh_desc d = { .axes = { { "line", 3 } }, .ranks = ranks, .rank_count = 3, .share = g->rows };
    return xd_mesh_create(g->world, &d, &g->columns);
}

static xd_result mesh_step(grid *g, int step) {
    const xd_mesh_desc rows = { .axes = { { "dp", 2 }, { "tp", 2 } } };
    const xd_axis levels[2] = { { "outer", 2 }, { "inner", 1 } };
    const xd_mesh_derive_desc all = { .axes = "dp,tp", .flatten = true, .name = "all" },
                              two = { .axes = "tp", .parts = levels, .part_count = 2 };
    const int rank = xd_comm_rank(g->world);
    xd_tensor from, to;
    if (step >= 6) {
        from = xd_tensor_view(g->from, rank, g->source, XD_DTYPE_F32);
        to = xd_tensor_view(g->to, rank, g->target, XD_DTYPE_F32);
    }
    switch (step) {
    case 0: return xd_comm_split(g->world, rank % 2, 0, &g->half);
    case 1: return xd_mesh_create(g->world, &rows, &g->rows);
    case 2: return make_columns(g);
    case 3: return xd_mesh_derive(g->rows, &all, &g->flat);
    case 4: return xd_mesh_derive(g->rows, &two, &g->split);
    case 5: return make_layouts(g);
    case 6: return xd_redistribute(g->world, &from, &to);
    default: return xd_tensor_gather(g->world, &to, NULL, 2, g->whole);
    }
}

/* Calls the step with this rank's first, second, ... allocation failing when it is the victim, until none is left to
 * fail. Ranks that do not return alike wait for each other in the next call, and the deadline ends that. */
static int64_t exhaust(grid *g, int step, int victim) {
    xd_ctx *ctx = xd_comm_ctx(g->world);
    const bool me = xd_comm_rank(g->world) == victim;
    for (int64_t n = 1;; n++) {
        fails_in = me ? n : 0;
        const xd_result result = mesh_step(g, step);
        fails_in = 0;
        if (result == XD_OK) return n - 1;
        /* A new group that its first member has no memory for is MEMORY on all its members. */
        CHECK(result == XD_ERROR_MEMORY || (!me && result == XD_ERROR_PEER));
        if (result == XD_ERROR_PEER) CHECK(xd_last_error(ctx)->culprit >= 0);
        if (result != XD_ERROR_MEMORY && result != XD_ERROR_PEER) return 0; /* no end in sight */
    }
}

static xd_result mesh_rank(xd_comm *world, void *argument) {
    const int victim = *(const int *)argument, rank = xd_comm_rank(world);
    grid g;
    memset(&g, 0, sizeof g);
    g.world = world;
    for (int i = 0; i < EXTENT * 3; i++) g.source[i] = (float)(rank + 1);
    for (int step = 0; step < MESH_STEPS; step++) CHECK(exhaust(&g, step, victim) > 0);
    if (rank == 2) CHECK(g.whole[0] == 1.0f && g.whole[2] == 2.0f && g.whole[3 * EXTENT - 1] == 4.0f);
    xd_layout_destroy(g.to);
    xd_layout_destroy(g.from);
    xd_mesh_destroy(g.split);
    xd_mesh_destroy(g.flat);
    xd_mesh_destroy(g.columns);
    xd_mesh_destroy(g.rows);
    xd_comm_destroy(g.half);
    return XD_OK;
}

XD_TEST(meshes_and_moves_fail_on_all_ranks_or_none_and_work_the_next_time) {
    for (int victim = 0; victim < MESH_RANKS; victim++) {
        heap h = { 0 };
        const xd_ctx_desc desc = { .allocator = { heap_allocate, heap_release, &h } };
        CHECK_EQ_INT(xd_run_threads(MESH_RANKS, &desc, mesh_rank, &victim, NULL), XD_OK);
        CHECK_EQ_INT(h.live, 0);
    }
}

/* For other ranks; the model stays as it was. */
static void keep_quiet(void *user, const char *line) {
    (void)user;
    (void)line;
}

static xd_result plan_model(xd_model *model) {
    const xd_fsdp_desc fsdp = { .micro_batches = 3 };
    const xd_memory_plan_desc d = { .fsdp = &fsdp, .ranks = 3 };
    xd_memory_plan plan = { .elements = -5 };
    const xd_result result = xd_plan_memory(model, &d, 1, &plan);
    CHECK(result == XD_OK || plan.elements == -5);
    return result == XD_OK ? xd_plan_print(model, &d, (xd_build_report){ keep_quiet, NULL }) : result;
}

static xd_result build_model(xd_ctx *ctx) {
    xd_model *model = NULL;
    xd_block *block = NULL;
    xd_weight *weight = NULL;
    xd_param params[2];
    int64_t count;
    const xd_weight_desc w = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 3, 4 } };
    const xd_weight_desc table = {
        .name = "table", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 3 }, .buffer = true
    };
    xd_result result = xd_model_create(ctx, NULL, &model);
    if (result == XD_OK)
        result = xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = "a", .type = "t" }, &block);
    if (result == XD_OK) result = xd_weight_add(block, &w, &weight);
    if (result == XD_OK) result = xd_weight_add(block, &table, &weight);
    if (result == XD_OK) result = xd_model_seal(model);
    if (result == XD_OK) result = plan_model(model);
    if (result == XD_OK) result = xd_model_allocate(model);
    if (result == XD_OK) result = xd_weight_set_ready(weight);
    if (result == XD_OK) result = xd_model_init_weights(model);
    if (result == XD_OK) result = xd_model_params(model, 2, params, &count);
    xd_model_destroy(model);
    return result;
}

/* Buckets, and leaves in memory of the context. */
static xd_result plan_buckets(xd_ctx *ctx) {
    const xdi_bucket_param params[] = { { .numel = 30 }, { .numel = 5 } };
    const xdi_bucket_plan_desc desc = { .params = params, .param_count = 2, .ranks = 2, .sharded = true };
    const xd_leaf_stack_desc leaves = { .leaves = { .first = 0, .count = 3, .total = 3 }, .elements = 4 };
    xdi_bucket_plan *plan = NULL;
    xd_leaf_stack *stack = NULL;
    float *place = NULL;
    xd_result result = xdi_bucket_plan_create(ctx, &desc, &plan);
    if (result == XD_OK) result = xd_leaf_stack_create(ctx, &leaves, &stack);
    if (result == XD_OK) result = xd_leaf_stack_next(stack, &place);
    xd_leaf_stack_destroy(stack);
    xdi_bucket_plan_destroy(plan);
    return result;
}

static xd_result plan_file(xd_ctx *ctx) {
    static const int64_t shape[] = { 3, 4 };
    const xd_weights_entry entry = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = shape };
    const xd_weights_writer_desc desc = { .entries = &entry, .entry_count = 1 };
    xd_weights_layout *layout = NULL;
    const xd_result result = xd_weights_plan(ctx, &desc, &layout);
    xd_release(ctx, layout);
    return result;
}

static char checkpoints[64]; /* a directory that has one */

static void save_checkpoint(void) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    snprintf(checkpoints, sizeof checkpoints, "/tmp/xdistill-test-memory-%ld", (long)getpid());
    const xd_checkpoint_save_desc desc = { .root = checkpoints, .step = 3 };
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save(self, &desc), XD_OK);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

static void remove_checkpoints(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", checkpoints);
    CHECK_EQ_INT(system(command), 0);
}

static xd_result find_checkpoint(xd_ctx *ctx) {
    char path[100], *text = NULL;
    size_t bytes = 0;
    int64_t step = -1;
    xd_checkpoint *checkpoint = NULL, *again = NULL;
    xd_result result = xd_checkpoint_find(ctx, checkpoints, &step);
    snprintf(path, sizeof path, "%s/step-3", checkpoints);
    if (result == XD_OK)
        result = xd_checkpoint_open(ctx, &(xd_checkpoint_desc){ .directory = path }, &checkpoint);
    if (result == XD_OK) result = xd_checkpoint_verify(ctx, path);
    snprintf(path, sizeof path, "%s/step-3/manifest.json", checkpoints);
    if (result == XD_OK) result = xd_file_load(ctx, path, 0, &text, &bytes);
    if (result == XD_OK)
        result = xd_checkpoint_open(ctx, &(xd_checkpoint_desc){ .text = text, .bytes = bytes }, &again);
    xd_release(ctx, text);
    xd_checkpoint_close(again);
    xd_checkpoint_close(checkpoint);
    return result;
}

static void fail_each_allocation(xd_result (*build)(xd_ctx *ctx), int64_t least) {
    heap h = { 0 };
    const xd_ctx_desc settings = { .allocator = { heap_allocate, heap_release, &h } };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&settings, &ctx) == XD_OK);
    const int64_t live = h.live;
    int64_t failures = 0;
    for (;; failures++) {
        h.fails_at = h.calls + failures + 1;
        const xd_result result = build(ctx);
        CHECK_EQ_INT(h.live, live);
        if (result == XD_OK || failures > 100) break;
        CHECK(result == XD_ERROR_MEMORY);
    }
    CHECK(failures >= least);
    h.fails_at = 0;
    CHECK(build(ctx) == XD_OK);
    xd_ctx_destroy(ctx);
}

XD_TEST(models_and_plans_survive_a_failure_of_each_of_their_allocations) {
    fail_each_allocation(build_model, 8);
    fail_each_allocation(plan_buckets, 2);
    fail_each_allocation(plan_file, 3);
}

XD_TEST(checkpoints_are_found_and_opened_or_there_is_no_memory) {
    save_checkpoint();
    fail_each_allocation(find_checkpoint, 20);
    remove_checkpoints();
}

XD_TEST(optimizers_and_averages_take_what_is_planned) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    static const int64_t shape[] = { 5, 9 };
    static float values[4][64], gradients[4][64];
    heap h = { 0 };
    const xd_ctx_desc settings = { .allocator = { heap_allocate, heap_release, &h } };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&settings, &ctx) == XD_OK);
    const int64_t live = h.live;
    for (int count = 0; count <= 4; count++) {
        xd_param params[4] = { { 0 } };
        for (int i = 0; i < count; i++)
            params[i] = (xd_param){ .name = &"abcd"[i],
                                    .value = values[i],
                                    .gradient = gradients[i],
                                    .dtype = dtypes[i % 3],
                                    .count = i == 2 ? 0 : 45,
                                    .shape = i == 1 ? shape : NULL,
                                    .dims = i == 1 ? 2 : 0,
                                    .buffer = i == 3 };
        for (int kind = 0; kind <= (int)XD_OPTIMIZER_SGD; kind++) {
            xd_optimizer_desc desc = {
                .params = params, .param_count = count, .kind = XD_OPTIMIZER_SGD, .learning_rate = 1e-3
            };
            xd_optimizer *optimizer = NULL;
            xd_memory_bytes planned = { 0, 0 };
            desc.kind = (xd_optimizer_kind)kind;
            CHECK(PLANNED_MEMORY(ctx, xd_optimizer_create(ctx, &desc, &optimizer), &planned) == XD_OK);
            const int64_t before = h.bytes;
            CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
            CHECK_EQ_INT(h.bytes - before, planned.host);
            CHECK_EQ_INT(planned.device, 0);
            xd_optimizer_destroy(optimizer);
            desc.learning_rate = -1.0;
            CHECK(PLANNED_MEMORY(ctx, xd_optimizer_create(ctx, &desc, &optimizer), &planned) ==
                  XD_ERROR_ARGUMENT);
        }
        xd_ema *ema = NULL;
        xd_memory_bytes planned = { 0, 0 };
        CHECK(PLANNED_MEMORY(ctx, average_create(ctx, params, count, NULL, &ema), &planned) == XD_OK);
        const int64_t before = h.bytes;
        CHECK(average_create(ctx, params, count, NULL, &ema) == XD_OK);
        CHECK_EQ_INT(h.bytes - before, planned.host);
        xd_ema_destroy(ema);
    }
    CHECK_EQ_INT(h.live, live);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
