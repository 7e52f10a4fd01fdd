/* Experts whose tensor-parallel size is not that of the other weights, under a wrapper: what the groups say, the wrapper takes, and the
 * bits are those of one rank. A token's scaled input goes to all ranks that share its expert, each of which has some rows of the matrix. */
#ifndef _XOPEN_SOURCE
#    define _XOPEN_SOURCE 700 /* mkdtemp */
#endif
#include "xdistill.h"
#include "wrap_calls.h"

#include "xd_test.h"
#include "xd_test_topology.h"

#include <math.h>
#include <stdlib.h>

enum { EXPERTS = 4, WIDTH = 4, TOKENS = 3, LEAVES = 8, STEPS = 3, GROUP = 4, WEIGHTS = 2 };

typedef enum tensor_kind { TENSOR_DDP, TENSOR_SHARDED, TENSOR_FSDP, TENSOR_FSDP_WHOLE } tensor_kind;
typedef float token_rows[TOKENS][WIDTH];

typedef struct tensor_run {
    tensor_kind kind;
    int ranks, tp, expert_tp, ep;
    int64_t leaves;
    int queues;
    const char *save, *load; /* a checkpoint before step 1 */
    float scale[WIDTH], matrices[EXPERTS][WIDTH][WIDTH];
    double losses[STEPS][LEAVES], norms[STEPS];
} tensor_run;

typedef struct tensor_rank {
    tensor_run *run;
    xd_ctx *ctx;
    xd_comm *world;
    const xd_groups *groups;
    int size, rank, members; /* of those that share the experts; leaves of theirs at once */
    xd_layout *layouts[WEIGHTS];
    xd_model *model;
    xd_block *experts;
    xd_queue *queues[4];
    xd_parallel *parallel;
    xd_interval here, rows; /* experts, and of each these rows */
    int step;
    int64_t k, leaf;
} tensor_rank;

/* ---- the model ---- */

static void describe(tensor_rank *r) {
    const int tp = r->run->tp, base = r->rank - r->rank % tp;
    const int ranks[2] = { base, base + 1 }, whole = r->run->expert_tp * r->run->ep == 1;
    const xd_axis dense = { "tp", tp }, shared[2] = { { "ep", r->run->ep }, { "tp", r->run->expert_tp } };
    const xd_topology topologies[WEIGHTS] = { grid_of(&dense, 1, ranks),
                                              grid_of(shared, 2, whole ? &r->rank : NULL) };
    const xd_layout_desc layouts[WEIGHTS] = {
        { .ndim = 1, .shape = { WIDTH }, .placement = { { XD_SHARD } } },
        { .ndim = 3,
          .shape = { EXPERTS, WIDTH, WIDTH },
          .placement = { { XD_SHARD }, { XD_SHARD, .dim = 1 } } }
    };
    CHECK(xd_model_create(r->ctx, &(xd_model_desc){ 3, r->rank }, &r->model) == XD_OK);
    const xd_block_desc block = { .name = "experts", .type = "experts" };
    CHECK(xd_block_add(xd_model_root(r->model), &block, &r->experts) == XD_OK);
    for (int i = 0; i < WEIGHTS; i++) {
        xd_layout_desc l = layouts[i];
        l.topology = &topologies[i];
        CHECK(xd_layout_create(r->ctx, &l, &r->layouts[i]) == XD_OK);
        xd_weight_desc d = { .name = i ? "matrix" : "scale",
                             .dtype = XD_DTYPE_F32,
                             .ndim = l.ndim,
                             .layout = r->layouts[i],
                             .init = { XD_INIT_NORMAL, 0.0f, 0.5f } };
        memcpy(d.shape, l.shape, sizeof d.shape);
        d.traits.expert = i == 1;
        CHECK(xd_weight_add(i ? r->experts : xd_model_root(r->model), &d, NULL) == XD_OK);
    }
    CHECK(xd_model_seal(r->model) == XD_OK);
}

/* ---- a round of leaves ---- */

static float number(int64_t a, int64_t b, int64_t c) {
    return sinf((float)(17 * a + 5 * b + 3 * c + 1));
}

static int expert_of(int64_t leaf, int token) {
    return (int)((leaf * 3 + token * 2 + leaf / 3) % EXPERTS);
}

/* Which of the ranks that share the experts has a row of one. */
static int holder_of(const tensor_rank *r, int expert, int row) {
    int member = 0, part = 0;
    while (expert >= xd_chunk(EXPERTS, r->run->ep, member).end) member++;
    while (row >= xd_chunk(WIDTH, r->run->expert_tp, part).end) part++;
    return member * r->run->expert_tp + part;
}

static xd_result gather(xd_comm *comm, const void *from, void *to, size_t bytes) {
    int64_t counts[GROUP];
    for (int i = 0; i < GROUP; i++) counts[i] = (int64_t)bytes;
    return xd_all_gather(comm, from, to, counts, XD_DTYPE_U8);
}

static float input_of(const tensor_rank *r, int token, int column) {
    return r->leaf < 0 ? 0.0f : number(r->leaf + 40 * r->step, token, column);
}

/* This rank's columns of scale * x, and those of the ranks that have the others. */
static xd_result scaled(tensor_rank *r, token_rows h) {
    const int tp = r->run->tp, columns = WIDTH / tp, at = r->rank % tp * columns;
    float part[TOKENS * WIDTH] = { 0 }, parts[2 * TOKENS * WIDTH];
    xd_block_view view;
    if (r->k < xd_parallel_micro_batches(r->parallel).opened) {
        XD_TRY(xd_block_begin(xd_model_root(r->model), (xd_pass){ XD_PASS_FORWARD }, &view));
        for (int t = 0; t < TOKENS; t++)
            for (int c = 0; c < columns; c++)
                part[t * columns + c] = ((const float *)view.values[0])[c] * input_of(r, t, at + c);
        XD_TRY(xd_block_end(xd_model_root(r->model)));
    }
    const size_t bytes = sizeof(float) * TOKENS * (size_t)columns;
    XD_TRY(gather(r->groups->tp, part, parts, bytes));
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < WIDTH; c++) h[t][c] = parts[(c / columns * TOKENS + t) * columns + c % columns];
    return XD_OK;
}

static bool is_mine(const tensor_rank *r, int64_t leaf, int token) {
    return leaf >= 0 && expert_of(leaf, token) >= r->here.begin && expert_of(leaf, token) < r->here.end;
}

/* y = matrix h of all tokens of the group, where their experts' rows are here. */
static xd_result forward(tensor_rank *r, const int64_t *leaves, token_rows *h, token_rows y) {
    token_rows mine[GROUP], all[GROUP][GROUP];
    const int64_t rows = r->rows.end - r->rows.begin;
    xd_block_view view;
    memset(mine, 0, sizeof mine);
    XD_TRY(xd_block_begin(r->experts, (xd_pass){ XD_PASS_FORWARD }, &view));
    for (int g = 0; g < r->size; g++)
        for (int t = 0; t < TOKENS; t++)
            for (int64_t i = 0; i < rows && is_mine(r, leaves[g], t); i++) {
                const int64_t e = expert_of(leaves[g], t) - r->here.begin;
                for (int c = 0; c < WIDTH; c++)
                    mine[g][t][r->rows.begin + i] +=
                        ((const float *)view.values[0])[(e * rows + i) * WIDTH + c] * h[g][t][c];
            }
    XD_TRY(xd_block_end(r->experts));
    /* Of each rank for each. */
    XD_TRY(gather(r->groups->tp_ep, mine, all, sizeof *mine * (size_t)r->size));
    const token_rows *from = (const token_rows *)all;
    for (int t = 0; t < TOKENS && r->leaf >= 0; t++)
        for (int i = 0; i < WIDTH; i++)
            y[t][i] = from[holder_of(r, expert_of(r->leaf, t), i) * r->size + r->rank][t][i];
    return XD_OK;
}

/* One member's tokens: adds to the gradients of the rows here; pieces: what comes of either half of the rows. */
static void member_backward(const tensor_rank *r, const xd_block_view *view, int64_t leaf, token_rows h,
                            token_rows d, token_rows *pieces) {
    const int64_t rows = r->rows.end - r->rows.begin;
    for (int t = 0; t < TOKENS; t++)
        for (int64_t i = 0; i < rows && is_mine(r, leaf, t); i++) {
            const int64_t row = r->rows.begin + i,
                          at = ((expert_of(leaf, t) - r->here.begin) * rows + i) * WIDTH;
            for (int c = 0; c < WIDTH; c++) {
                ((float *)view->gradients[0])[at + c] += d[t][row] * h[t][c];
                pieces[row >= WIDTH / 2][t][c] += d[t][row] * ((const float *)view->values[0])[at + c];
            }
        }
}

/* d_h = the sum of both pieces, wherever they are. */
static xd_result backward(tensor_rank *r, const int64_t *leaves, token_rows *h, token_rows *d,
                          token_rows d_h) {
    token_rows mine[GROUP][2], all[GROUP][GROUP][2];
    const int tp = r->run->tp, base = r->rank - r->rank % tp;
    memset(mine, 0, sizeof mine);
    for (int m = 0; m < r->members; m++) {
        const int64_t k = r->k * r->members + m;
        const int g = m * tp;
        xd_block_view view;
        CHECK(xd_parallel_expert_micro_batch(r->parallel, k) == leaves[g]);
        XD_TRY(xd_block_begin(r->experts, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = k }, &view));
        member_backward(r, &view, leaves[g], h[g], d[g], mine[g]);
        XD_TRY(xd_block_end(r->experts));
    }
    XD_TRY(gather(r->groups->tp_ep, mine, all, sizeof *mine * (size_t)r->size));
    const token_rows(*from)[2] = (const token_rows(*)[2])all;
    for (int t = 0; t < TOKENS && r->leaf >= 0; t++)
        for (int c = 0; c < WIDTH; c++) {
            const int e = expert_of(r->leaf, t);
            d_h[t][c] = from[holder_of(r, e, 0) * r->size + base][0][t][c] +
                        from[holder_of(r, e, WIDTH - 1) * r->size + base][1][t][c];
        }
    return XD_OK;
}

static xd_result scale_backward(tensor_rank *r, token_rows d_h) {
    const int tp = r->run->tp, columns = WIDTH / tp, at = r->rank % tp * columns;
    xd_block_view view;
    if (r->k >= xd_parallel_micro_batches(r->parallel).opened) return XD_OK;
    XD_TRY(
        xd_block_begin(xd_model_root(r->model), (xd_pass){ XD_PASS_BACKWARD, .micro_batch = r->k }, &view));
    for (int t = 0; t < TOKENS && r->leaf >= 0; t++)
        for (int c = 0; c < columns; c++)
            ((float *)view.gradients[0])[c] += d_h[t][at + c] * input_of(r, t, at + c);
    return xd_block_end(xd_model_root(r->model));
}

static xd_result round_of(tensor_rank *r, int64_t k) {
    token_rows h = { { 0 } }, y = { { 0 } }, all_h[GROUP], all_d[GROUP], d_h = { { 0 } };
    int64_t leaves[GROUP];
    double loss = 0.0;
    r->k = k;
    r->leaf = xd_parallel_micro_batch(r->parallel, k);
    XD_TRY(scaled(r, h));
    XD_TRY(gather(r->groups->tp_ep, h, all_h, sizeof h));
    XD_TRY(gather(r->groups->tp_ep, &r->leaf, leaves, sizeof r->leaf));
    XD_TRY(forward(r, leaves, all_h, y));
    for (int t = 0; t < TOKENS && r->leaf >= 0; t++)
        for (int i = 0; i < WIDTH; i++) {
            y[t][i] -= number(r->leaf, t, 9 + i);
            loss += 0.5 * (double)y[t][i] * (double)y[t][i];
        }
    if (r->leaf >= 0 && r->rank % r->run->tp == 0) r->run->losses[r->step][r->leaf] = loss;
    XD_TRY(gather(r->groups->tp_ep, y, all_d, sizeof y));
    XD_TRY(backward(r, leaves, all_h, all_d, d_h));
    return scale_backward(r, d_h);
}

/* ---- a run ---- */

static xd_result wrap(tensor_rank *r) {
    static const char *const types[] = { "experts" };
    const tensor_run *run = r->run;
    const xd_queue_desc queue = { .capacity = 16 };
    xd_expert_ranks experts = { .data = r->groups->expert_dp };
    for (int i = 0; i < 4 && run->queues; i++)
        XD_TRY(xd_queue_create(i < 2 ? r->groups->dp_cp : r->groups->expert_dp, &queue, &r->queues[i]));
    experts.gathers = r->queues[2];
    experts.reductions = r->queues[3];
    const xd_ddp_desc ddp = { .micro_batches = run->leaves,
                              .sharded_optimizer = run->kind == TENSOR_SHARDED,
                              .gathers = r->queues[0],
                              .reductions = r->queues[1],
                              .experts = experts };
    const xd_fsdp_desc fsdp = { .micro_batches = run->leaves,
                                .unit_types = types,
                                .unit_type_count = 1,
                                .accumulate_whole = run->kind == TENSOR_FSDP_WHOLE,
                                .gathers = r->queues[0],
                                .reductions = r->queues[1],
                                .experts = experts };
    return run->kind <= TENSOR_SHARDED ? wrap_over_ddp(r->model, r->groups->dp_cp, &ddp, &r->parallel)
                                       : wrap_over_fsdp(r->model, r->groups->dp_cp, &fsdp, &r->parallel);
}

static xd_result files(tensor_rank *r, const xd_tensor_part *parts, xd_optimizer *optimizer) {
    const xd_checkpoint_network network = { .parts = parts, .part_count = WEIGHTS, .optimizer = optimizer };
    const xd_checkpoint_save_desc save = {
        .root = r->run->save, .step = 1, .networks = &network, .network_count = 1
    };
    const xd_checkpoint_load_desc load = {
        .root = r->run->load, .step = 1, .networks = &network, .network_count = 1
    };
    if (r->run->save) XD_TRY(xd_checkpoint_save(r->world, &save));
    if (!r->run->load) return XD_OK;
    XD_TRY(xd_checkpoint_load(r->world, &load, NULL, NULL));
    return xd_parallel_publish(r->parallel);
}

static xd_result train_step(tensor_rank *r, const xd_param *params, xd_optimizer *optimizer) {
    const xd_gradient_norm_desc clip = { .params = params, .param_count = WEIGHTS, .max_norm = 0.5 };
    xd_gradient_norm norm;
    for (int64_t k = 0; k < xd_parallel_micro_batches(r->parallel).max; k++) XD_TRY(round_of(r, k));
    XD_TRY(xd_parallel_reduce(r->parallel));
    XD_TRY(xd_gradient_norm_compute(r->ctx, r->world, &clip, &norm));
    if (xd_comm_rank(r->world) == 0) r->run->norms[r->step] = norm.norm;
    XD_TRY(
        xd_optimizer_step(optimizer, &(xd_optimizer_step_desc){ .gradient_scale = &norm.coefficient }, NULL));
    return xd_parallel_publish(r->parallel);
}

static void keep(const tensor_rank *r, const xd_tensor_part *parts) {
    const int64_t rows = r->rows.end - r->rows.begin, first = parts[0].region->interval[0][0].begin;
    for (int64_t i = parts[0].range.begin; i < parts[0].range.end && !parts[0].replica; i++)
        r->run->scale[first + i] = ((const float *)parts[0].data)[i - parts[0].range.begin];
    for (int64_t i = parts[1].range.begin; i < parts[1].range.end && !parts[1].replica; i++)
        r->run->matrices[r->here.begin + i / (rows * WIDTH)][r->rows.begin + i / WIDTH % rows][i % WIDTH] =
            ((const float *)parts[1].data)[i - parts[1].range.begin];
}

static xd_result train(tensor_rank *r) {
    xd_param params[WEIGHTS];
    xd_tensor_part parts[WEIGHTS];
    xd_optimizer *optimizer = NULL;
    int64_t count = 0;
    XD_TRY(xd_parallel_params(r->parallel, WEIGHTS, params, &count));
    XD_TRY(xd_parallel_parts(r->parallel, WEIGHTS, parts, &count));
    CHECK(count == WEIGHTS);
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(r->ctx, &d, &optimizer));
    xd_result result = XD_OK;
    for (r->step = 0; r->step < STEPS && result == XD_OK; r->step++) {
        if (r->step == 1) result = files(r, parts, optimizer);
        if (result == XD_OK && (r->step > 0 || !r->run->load)) result = train_step(r, params, optimizer);
    }
    if (result == XD_OK) keep(r, parts);
    xd_optimizer_destroy(optimizer);
    return result;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    tensor_rank r;
    xd_grid *grid = NULL;
    memset(&r, 0, sizeof r);
    r.run = (tensor_run *)argument;
    r.world = world;
    r.ctx = xd_comm_ctx(world);
    const xd_expert_desc sizes = { .tp = r.run->tp, .expert_tp = r.run->expert_tp, .ep = r.run->ep };
    XD_TRY(xd_grid_create(world, &sizes, &grid));
    r.groups = xd_grid_groups(grid);
    r.size = r.run->expert_tp * r.run->ep > r.run->tp ? r.run->expert_tp * r.run->ep : r.run->tp;
    r.rank = xd_comm_rank(world) % r.size;
    r.members = r.size / r.run->tp;
    r.here = xd_chunk(EXPERTS, r.run->ep, r.rank / r.run->expert_tp % r.run->ep);
    r.rows = xd_chunk(WIDTH, r.run->expert_tp, r.rank % r.run->expert_tp);
    describe(&r);
    xd_result result = wrap(&r);
    if (result == XD_OK) result = train(&r);
    xd_parallel_destroy(r.parallel);
    for (int i = 0; i < 4; i++) xd_queue_destroy(r.queues[i]);
    xd_model_destroy(r.model);
    for (int i = 0; i < WEIGHTS; i++) xd_layout_destroy(r.layouts[i]);
    xd_grid_destroy(grid);
    return result;
}

static xd_result execute(tensor_run *run, xd_error *error) {
    const xd_ctx_desc d = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    const xd_result result = xd_run_threads(run->ranks, &d, run_rank, run, error);
    return result;
}

static void check(const tensor_run *one, const tensor_run *like) {
    tensor_run run = *like;
    xd_error error;
    memset(&error, 0, sizeof error);
    const bool ok = execute(&run, &error) == XD_OK && memcmp(run.scale, one->scale, sizeof run.scale) == 0 &&
                    memcmp(run.matrices, one->matrices, sizeof run.matrices) == 0 &&
                    (run.load || (memcmp(run.losses, one->losses, sizeof run.losses) == 0 &&
                                  memcmp(run.norms, one->norms, sizeof run.norms) == 0));
    if (!ok)
        printf("kind %d, %d ranks, tp %d, expert tp %d, ep %d, %lld leaves: %s\n", run.kind, run.ranks,
               run.tp, run.expert_tp, run.ep, (long long)run.leaves, error.message);
    CHECK(ok);
}

static tensor_run alone(int64_t leaves) {
    tensor_run one = { .ranks = 1, .tp = 1, .expert_tp = 1, .ep = 1, .leaves = leaves };
    xd_error error;
    CHECK(execute(&one, &error) == XD_OK);
    CHECK(one.norms[2] > 0.5 && one.losses[2][leaves - 1] > 0.0);
    return one;
}

/* ranks, tp, expert tp, ep: experts in as many parts, in fewer and in more. */
static const int meshes[][4] = { { 2, 1, 2, 1 }, { 4, 1, 2, 1 }, { 4, 1, 2, 2 }, { 8, 1, 2, 2 },
                                 { 4, 2, 1, 2 }, { 8, 2, 1, 4 }, { 4, 2, 2, 2 }, { 2, 2, 1, 2 } };
enum { MESHES = sizeof meshes / sizeof *meshes };

static tensor_run mesh(int i, tensor_kind kind, int64_t leaves) {
    tensor_run run = { .kind = kind,
                       .ranks = meshes[i][0],
                       .tp = meshes[i][1],
                       .expert_tp = meshes[i][2],
                       .ep = meshes[i][3],
                       .leaves = leaves };
    return run;
}

XD_TEST(experts_in_other_tensor_parallel_parts_train_to_the_bits_of_one_rank) {
    for (int64_t leaves = 8; leaves >= 7; leaves--) {
        const tensor_run one = alone(leaves);
        for (int i = 0; i < MESHES; i++)
            for (int kind = TENSOR_DDP; kind <= TENSOR_FSDP_WHOLE; kind++) {
                if (meshes[i][0] / meshes[i][1] > leaves) continue; /* fewer leaves than data ranks */
                tensor_run run = mesh(i, (tensor_kind)kind, leaves);
                run.queues = (i + kind) % 3 == 0;
                check(&one, &run);
            }
    }
}

XD_TEST(a_checkpoint_goes_on_in_other_tensor_parallel_parts) {
    char root[] = "/tmp/xd_experts_tensor_XXXXXX", command[80];
    const tensor_run one = alone(8);
    CHECK(mkdtemp(root) != NULL);
    for (int i = 1; i < MESHES; i += 2) {
        tensor_run run = mesh(i, (tensor_kind)(i % 4), 8);
        run.save = root;
        check(&one, &run);
        run = mesh((i + 3) % MESHES, (tensor_kind)((i + 1) % 4), 8);
        run.load = root;
        check(&one, &run);
        snprintf(command, sizeof command, "rm -rf '%s'/*", root);
        CHECK(system(command) == 0);
    }
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK(system(command) == 0);
}

XD_TEST(experts_whose_ranks_are_no_group_of_the_data_ranks_are_refused) {
    tensor_run run = { .ranks = 4, .tp = 2, .expert_tp = 1, .ep = 1, .leaves = 8 };
    xd_error error;
    CHECK(execute(&run, &error) == XD_ERROR_TOPOLOGY);
    CHECK(strstr(error.message, "4 ranks with the same experts do not divide 2 data ranks") != NULL);
    run.kind = TENSOR_FSDP;
    CHECK(execute(&run, &error) == XD_ERROR_TOPOLOGY);
}

XD_TEST_MAIN()
