/* Wrappers: what they refuse, on which ranks, in which words. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "wrap_weights.h"

/* A rank's scene: two layers of one size and a root, not wrapped yet. */
typedef struct scene {
    xd_ctx *ctx;
    xd_comm *world;
    int rank;
    xd_model *model;
    xd_block *root, *first, *second;
    xd_parallel *parallel;
} scene;

static void open_scene(scene *s, xd_comm *world) {
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    s->world = world;
    s->rank = xd_comm_rank(world);
    CHECK(xd_model_create(s->ctx, NULL, &s->model) == XD_OK);
    s->root = xd_model_root(s->model);
    wrap_weight(s->root, "head", 3, 4);
    s->first = wrap_child(s->root, "first", "layer");
    s->second = wrap_child(s->root, "second", "layer");
    wrap_weight(s->first, "w", 4, 4);
    wrap_weight(s->second, "w", 4, 4);
}

static void close_scene(scene *s) {
    xd_parallel_destroy(s->parallel);
    xd_model_destroy(s->model);
}

static xd_result wrap_fsdp(scene *s, int64_t leaves) {
    static const char *const types[] = { "layer" };
    const xd_fsdp_desc d = { .micro_batches = leaves, .unit_types = types, .unit_type_count = 1 };
    return wrap_over_fsdp(s->model, s->world, &d, &s->parallel);
}

static bool says(const scene *s, const char *text) {
    const char *message = xd_last_error(s->ctx)->message;
    if (strstr(message, text)) return true;
    printf("rank %d: \"%s\" lacks \"%s\"\n", s->rank, message, text);
    return false;
}

static void run_ranks(int ranks, xd_reduction reduction, xd_rank_function function) {
    const xd_ctx_desc desc = { .reduction = reduction, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(ranks, &desc, function, NULL, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    CHECK(result == XD_OK);
}

/* ---- wrapping ---- */

static xd_result refuse_wraps(xd_comm *world, void *argument) {
    scene s;
    (void)argument;
    open_scene(&s, world);
    CHECK(wrap_fsdp(&s, 0) == XD_ERROR_STATE && says(&s, "not sealed") && !s.parallel);
    CHECK(xd_model_seal(s.model) == XD_OK);
    CHECK(wrap_fsdp(&s, 1) == XD_ERROR_ARGUMENT && says(&s, "1 micro-batches for 2 data ranks"));
    CHECK(wrap_fsdp(&s, -3) == XD_ERROR_ARGUMENT && says(&s, "-3 micro-batches"));
    CHECK(wrap_fsdp(&s, s.rank ? 4 : 6) == XD_ERROR_MISMATCH &&
          says(&s, "settings of a wrapper: rank 1 passed micro_batches = 4, rank 0 passed 6"));
    xd_fsdp_desc d = { .micro_batches = 4, .reshard_ranks = 3 };
    CHECK(wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_ERROR_ARGUMENT &&
          says(&s, "3 ranks that keep a unit do not divide 2"));
    d = (xd_fsdp_desc){ .micro_batches = 4, .unit_type_count = 1 };
    CHECK(wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_ERROR_ARGUMENT &&
          says(&s, "1 types of units, unit_types is NULL"));
    static const char *const types[] = { "layer" };
    d = (xd_fsdp_desc){ .micro_batches = 4, .unit_types = types };
    CHECK(wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_ERROR_ARGUMENT &&
          says(&s, "a list of unit_types, and unit_type_count 0"));
    d = (xd_fsdp_desc){ .micro_batches = 4, .sent_dtype = XD_DTYPE_I32 };
    CHECK(wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_ERROR_DTYPE && says(&s, "sent as I32"));
    d = (xd_fsdp_desc){ .micro_batches = 4, .sent_dtype = s.rank ? XD_DTYPE_BF16 : XD_DTYPE_F16 };
    CHECK(wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_ERROR_MISMATCH &&
          says(&s, "rank 1 passed sent_dtype = BF16, rank 0 passed F16"));
    const xd_ddp_desc shown = { .micro_batches = 4, .view_dtype = XD_DTYPE_F64 };
    CHECK(wrap_over_ddp(s.model, world, &shown, &s.parallel) == XD_ERROR_DTYPE && says(&s, "shown as F64"));
    xd_queue *queue = NULL;
    const xd_queue_desc few = { .capacity = 1 };
    CHECK(xd_queue_create(world, &few, &queue) == XD_OK);
    d = (xd_fsdp_desc){ .micro_batches = 4, .prefetch = 1 };
    CHECK(wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_ERROR_ARGUMENT &&
          says(&s, "1 units gathered ahead, and no queue"));
    d.gathers = queue;
    CHECK(wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_ERROR_ARGUMENT &&
          says(&s, "room for 1 records, and 2 are under way"));
    xd_queue_destroy(queue);
    CHECK(!s.parallel);
    /* Nothing of these is left behind. */
    CHECK(wrap_fsdp(&s, 4) == XD_OK);
    xd_parallel *again = NULL;
    CHECK(wrap_over_ddp(s.model, world, NULL, &again) == XD_ERROR_STATE && says(&s, "wrapped already") &&
          !again);
    close_scene(&s);
    return XD_OK;
}

static xd_result refuse_lists(xd_comm *world, void *argument) {
    scene s;
    (void)argument;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_fsdp(&s, 4) == XD_OK);
    int64_t count = 77;
    xd_param params[2];
    xd_tensor_part parts[2];
    CHECK(xd_parallel_params(s.parallel, 2, params, &count) == XD_ERROR_ARGUMENT &&
          says(&s, "3 parameters, capacity is 2"));
    CHECK(xd_parallel_parts(s.parallel, 2, parts, &count) == XD_ERROR_ARGUMENT);
    CHECK(xd_parallel_params(s.parallel, 8, NULL, &count) == XD_ERROR_ARGUMENT &&
          says(&s, "a list of 8 at NULL"));
    CHECK(xd_parallel_parts(s.parallel, 8, NULL, &count) == XD_ERROR_ARGUMENT &&
          says(&s, "a list of 8 at NULL"));
    /* A name that finds nothing, on one rank. */
    const xd_result thawed =
        xd_parallel_thaw(s.parallel, xd_model_find_weight(s.model, s.rank ? "typo" : "head"));
    CHECK(thawed == (s.rank ? XD_ERROR_ARGUMENT : XD_ERROR_STATE) &&
          (!s.rank || says(&s, "no weight to thaw")));
    CHECK_EQ_INT(count, 77);
    CHECK(xd_model_allocate(s.model) == XD_ERROR_STATE && says(&s, "wrapped"));
    CHECK(xd_model_init_weights(s.model) == XD_ERROR_STATE && says(&s, "wrapped"));
    CHECK(xd_model_params(s.model, 2, params, &count) == XD_ERROR_STATE && says(&s, "wrapped"));
    close_scene(&s);
    return XD_OK;
}

XD_TEST(lists_without_room_and_names_that_find_nothing_are_refused) {
    run_ranks(2, XD_REDUCTION_INVARIANT, refuse_lists);
}

XD_TEST(a_wrap_that_is_refused_leaves_the_model_as_it_was) {
    run_ranks(2, XD_REDUCTION_INVARIANT, refuse_wraps);
}

/* Weights that a wrapper cannot take. */
static xd_result refuse_weights(xd_comm *world, void *argument) {
    static float value[6];
    for (int i = 0; i < 5; i++) {
        scene s;
        xd_weight_desc d = { .name = "odd", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 6 } };
        (void)argument;
        open_scene(&s, world);
        if (i == 0) d.dtype = XD_DTYPE_F64;
        if (i == 1) d.gradient_dtype = XD_DTYPE_BF16;
        if (i == 2) d.traits.expert = true;
        if (i == 3) d.value = value, d.room = 6;
        if (i == 4) d.tied_to = "head", d.ndim = 2, d.shape[0] = 3, d.shape[1] = 4;
        CHECK(xd_weight_add(s.second, &d, NULL) == XD_OK && xd_model_seal(s.model) == XD_OK);
        const xd_result result = wrap_fsdp(&s, 2);
        if (i < 2)
            CHECK(result == XD_ERROR_DTYPE && says(&s, "\"second.odd\"") && says(&s, i ? "BF16" : "F64"));
        if (i == 2)
            CHECK(result == XD_ERROR_UNSUPPORTED &&
                  says(&s, "\"second.w\", which is none, and \"second.odd\", which is an expert's"));
        if (i == 3)
            CHECK(result == XD_ERROR_STATE && says(&s, "\"second.odd\" has the caller's storage") &&
                  says(&s, "xd_model_allocate (xd_weight_set_ready)"));
        if (i == 4)
            CHECK(result == XD_ERROR_STATE &&
                  says(&s, "\"second.odd\" in unit \"second\" is tied to \"head\" in unit \"\""));
        close_scene(&s);
    }
    return XD_OK;
}

XD_TEST(weights_that_cannot_be_sharded_are_named) {
    run_ranks(1, XD_REDUCTION_INVARIANT, refuse_weights);
}

/* A cut over all ranks, where the data ranks are some of them. */
static xd_result refuse_layouts(xd_comm *world, void *argument) {
    scene s;
    xd_mesh *mesh = NULL, *columns = NULL;
    xd_comm *data = NULL;
    xd_layout *layout = NULL;
    const xd_mesh_desc grid = { .axes = { { "dp", 2 }, { "tp", 2 } } };
    xd_layout_desc cut = { .ndim = 1, .shape = { 6 } };
    xd_weight_desc d = { .name = "cut", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 6 } };
    CHECK(xd_mesh_create(world, &grid, &mesh) == XD_OK && xd_mesh_group(mesh, "dp", &data) == XD_OK);
    CHECK(xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = "tp" }, &columns) == XD_OK);
    for (int i = 0; i < 2; i++) {
        cut.topology = xd_mesh_topology(i ? columns : mesh);
        cut.placement[i ? 0 : 1] = (xd_placement){ .kind = XD_SHARD };
        if (i) cut.placement[1] = (xd_placement){ .kind = XD_REPLICATE };
        CHECK(xd_layout_create(xd_comm_ctx(world), &cut, &layout) == XD_OK);
        d.layout = layout;
        memset(&s, 0, sizeof s);
        s.ctx = xd_comm_ctx(world);
        s.rank = xd_comm_rank(world);
        CHECK(xd_model_create(s.ctx, &(xd_model_desc){ .rank = s.rank }, &s.model) == XD_OK);
        CHECK(xd_weight_add(xd_model_root(s.model), &d, NULL) == XD_OK && xd_model_seal(s.model) == XD_OK);
        const xd_result result = wrap_over_fsdp(s.model, data, NULL, &s.parallel);
        if (i)
            CHECK(result == XD_OK);
        else
            CHECK(result == XD_ERROR_MISMATCH && says(&s, "not over data ranks"));
        close_scene(&s);
        xd_layout_destroy(layout);
    }
    xd_mesh_destroy(columns);
    xd_mesh_destroy(mesh);
    (void)argument;
    return XD_OK;
}

XD_TEST(cuts_over_data_ranks_are_refused) {
    run_ranks(4, XD_REDUCTION_INVARIANT, refuse_layouts);
}

static xd_result refuse_groups(xd_comm *world, void *argument) {
    scene s;
    xd_comm *data = NULL, *replicas = NULL;
    (void)argument;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK);
    CHECK(xd_comm_split(world, s.rank / 2, 0, &data) == XD_OK &&
          xd_comm_split(world, s.rank % 2, 0, &replicas) == XD_OK);
    xd_fsdp_desc d = { .micro_batches = 12, .replicas = replicas };
    CHECK(wrap_over_fsdp(s.model, data, &d, &s.parallel) == XD_ERROR_UNSUPPORTED &&
          says(&s, "6 micro-batches of a group"));
    d.micro_batches = 9;
    CHECK(wrap_over_fsdp(s.model, data, &d, &s.parallel) == XD_ERROR_ARGUMENT &&
          says(&s, "9 micro-batches") && says(&s, "2 groups"));
    close_scene(&s);
    xd_comm_destroy(replicas);
    xd_comm_destroy(data);
    return XD_OK;
}

XD_TEST(groups_whose_leaves_are_no_node_of_the_tree_are_refused) {
    run_ranks(4, XD_REDUCTION_INVARIANT, refuse_groups);
}

/* ---- brackets ---- */

static const xd_pass forward = { XD_PASS_FORWARD, 0, false }, backward = { XD_PASS_BACKWARD, 0, false };

static void pass_over(scene *s, xd_block *block, xd_pass pass) {
    xd_block_view view;
    CHECK(xd_block_begin(block, pass, &view) == XD_OK);
    CHECK(xd_block_end(block) == XD_OK);
    (void)s;
}

static xd_result refuse_brackets(xd_comm *world, void *argument) {
    scene s;
    xd_block_view view = { 42, NULL, NULL, NULL, NULL };
    xd_pass pass = backward;
    (void)argument;
    open_scene(&s, world);
    CHECK(xd_block_begin(s.first, forward, &view) == XD_ERROR_STATE && says(&s, "not sealed"));
    CHECK(xd_model_seal(s.model) == XD_OK);
    CHECK(xd_block_begin(s.first, forward, &view) == XD_ERROR_STATE &&
          says(&s, "\"first.w\" has no storage"));
    CHECK(xd_block_begin(s.first, backward, &view) == XD_ERROR_STATE && says(&s, "no wrapper"));
    CHECK(wrap_fsdp(&s, 4) == XD_OK);
    CHECK(xd_block_end(s.first) == XD_ERROR_STATE && says(&s, "\"first\" is not open"));
    pass.kind = (xd_pass_kind)9;
    CHECK(xd_block_begin(s.first, pass, &view) == XD_ERROR_ARGUMENT && says(&s, "pass 9"));
    pass.kind = XD_PASS_BACKWARD;
    pass.micro_batch = 2;
    CHECK(xd_block_begin(s.first, pass, &view) == XD_ERROR_ARGUMENT && says(&s, "micro-batch 2") &&
          says(&s, "has 2"));
    pass.micro_batch = 1;
    CHECK(xd_block_begin(s.first, pass, &view) == XD_ERROR_STATE && says(&s, "micro-batch 1") &&
          says(&s, "next one is 0"));
    CHECK(xd_block_skip(s.first, 1) == XD_ERROR_STATE && says(&s, "next one is 0"));
    CHECK(xd_block_skip(s.first, 2) == XD_ERROR_ARGUMENT && says(&s, "micro-batch 2"));
    CHECK_EQ_INT(view.count, 42);
    CHECK(xd_block_begin(s.first, forward, &view) == XD_OK);
    CHECK(xd_block_begin(s.second, forward, &view) == XD_ERROR_STATE && says(&s, "\"second\"") &&
          says(&s, "\"first\" is open"));
    CHECK(xd_parallel_publish(s.parallel) == XD_ERROR_STATE && says(&s, "\"first\" is open"));
    CHECK(xd_block_end(s.first) == XD_OK);
    CHECK(xd_parallel_push_micro_batch(s.parallel) == XD_ERROR_UNSUPPORTED);
    for (int i = 0; i < 8; i++) CHECK(xd_block_begin(s.first, forward, &view) == XD_OK);
    CHECK(xd_block_begin(s.first, forward, &view) == XD_ERROR_STATE && says(&s, "open 8 times"));
    close_scene(&s);
    return XD_OK;
}

XD_TEST(brackets_that_do_not_fit_together_are_refused) {
    run_ranks(2, XD_REDUCTION_INVARIANT, refuse_brackets);
}

/* ---- steps ---- */

static void whole_leaf(scene *s, int64_t leaf) {
    const xd_pass pass = { XD_PASS_BACKWARD, leaf, false };
    pass_over(s, s->root, pass);
    pass_over(s, s->second, pass);
    pass_over(s, s->first, pass);
}

static xd_result refuse_steps(xd_comm *world, void *argument) {
    scene s;
    xd_block_view view;
    (void)argument;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_fsdp(&s, 2) == XD_OK);
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE && says(&s, "0 micro-batches, not of 1"));
    pass_over(&s, s.root, backward);
    pass_over(&s, s.first, backward);
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE &&
          says(&s, "\"second\" has had backward passes of 0 micro-batches"));
    /* That step is gone; the next one is whole. */
    whole_leaf(&s, 0);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK);
    CHECK(xd_block_begin(s.first, backward, &view) == XD_ERROR_STATE &&
          says(&s, "xd_parallel_publish ends the step"));
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE && says(&s, "reduced already"));
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    whole_leaf(&s, 0);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && xd_parallel_publish(s.parallel) == XD_OK);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(steps_without_all_backwards_are_refused_and_dropped) {
    run_ranks(2, XD_REDUCTION_INVARIANT, refuse_steps);
}

/* Rank 1 opens another block, or closes one while the others open the next. */
static xd_result stray(xd_comm *world, void *argument) {
    scene s;
    xd_block_view view;
    (void)argument;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_fsdp(&s, 4) == XD_OK);
    CHECK(xd_block_begin(s.first, backward, NULL) == XD_ERROR_ARGUMENT &&
          says(&s, "\"first\" is opened without"));
    if (s.rank == 1) {
        CHECK(xd_block_begin(s.second, backward, &view) == XD_OK);
        CHECK(xd_block_end(s.second) == XD_ERROR_MISMATCH &&
              says(&s, "here is the end of the backward of block \"second\" (micro-batch 0)"));
    } else {
        CHECK(xd_block_begin(s.second, backward, &view) == XD_OK);
        CHECK(xd_block_begin(s.root, forward, &view) == XD_ERROR_MISMATCH &&
              says(&s, "rank 1 called reduce_scatter") &&
              says(&s, "here is the forward of block \"\", the root,"));
        CHECK_EQ_INT(xd_last_error(s.ctx)->culprit, 1);
    }
    close_scene(&s);
    return XD_OK;
}

XD_TEST(blocks_in_another_order_are_told_by_name) {
    run_ranks(2, XD_REDUCTION_INVARIANT, stray);
}

/* ---- leaves that nobody sums ---- */

static void keep_line(void *user, xd_log_level level, const char *line) {
    CHECK_EQ_INT(level, XD_LOG_WARN);
    snprintf((char *)user, 256, "%s", line);
}

/* `line`: what the logger has written, [256]. */
static xd_result forget_to_reduce(xd_comm *world, void *line) {
    scene s;
    open_scene(&s, world);
    static const char *const typo[] = { "layre" };
    const xd_fsdp_desc d = { .micro_batches = 2, .unit_types = typo, .unit_type_count = 1 };
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_over_fsdp(s.model, world, &d, &s.parallel) == XD_OK);
    CHECK(strstr((char *)line, "no block is of the 1 types of units, of which \"layre\" is the first") !=
          NULL);
    *(char *)line = 0;
    xd_parallel_destroy(s.parallel);
    CHECK(wrap_fsdp(&s, 2) == XD_OK && *(char *)line == 0);
    whole_leaf(&s, 0);
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    CHECK(strstr((char *)line, "drops 1 micro-batches: xd_parallel_reduce was not called") != NULL);
    *(char *)line = 0;
    for (int64_t leaf = 0; leaf < 2; leaf++)
        whole_leaf(&s, leaf); /* it was dropped: blocks begin at leaf 0 */
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && xd_parallel_publish(s.parallel) == XD_OK);
    CHECK(xd_parallel_publish(s.parallel) == XD_OK && *(char *)line == 0);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(leaves_that_are_not_reduced_and_types_that_are_not_there_are_warned_of) {
    char line[256] = "";
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.logger.write = keep_line;
    desc.logger.user = line;
    CHECK_EQ_INT(xd_run_threads(1, &desc, forget_to_reduce, line, NULL), XD_OK);
}

/* `argument`: DDP instead of FSDP. Each rank has two leaves. */
static xd_result end_late(xd_comm *world, void *argument) {
    const xd_ddp_desc d = { .micro_batches = 4 };
    scene s;
    xd_block_view view;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK);
    CHECK((argument ? wrap_over_ddp(s.model, world, &d, &s.parallel) : wrap_fsdp(&s, 4)) == XD_OK);
    CHECK(xd_block_begin(s.first, backward, &view) == XD_OK);
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE && says(&s, "\"first\" is open"));
    CHECK(xd_block_end(s.first) == XD_OK); /* of the step that is gone: leaf 0 of this one is still to come */
    CHECK(xd_block_begin(s.first, backward, &view) == XD_OK);
    CHECK(xd_block_begin(s.first, backward, &view) == XD_OK);
    CHECK(xd_block_end(s.first) == XD_OK);
    CHECK(xd_block_end(s.first) ==
          XD_ERROR_STATE); /* would be leaf 1, of which nobody has computed anything */
    CHECK(says(&s, "the backward of micro-batch 0 of block \"first\" has ended already"));
    CHECK(xd_parallel_reduce(s.parallel) == XD_ERROR_STATE);
    for (int leaf = 0; leaf < 2; leaf++) whole_leaf(&s, leaf);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && xd_parallel_publish(s.parallel) == XD_OK);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(a_backward_ends_its_own_leaf_and_that_once) {
    int ddp = 1;
    run_ranks(2, XD_REDUCTION_INVARIANT, end_late);
    CHECK_EQ_INT(xd_run_threads(2, NULL, end_late, &ddp, NULL), XD_OK);
}

/* Three leaves on two ranks of FSDP: the rank that has one opens no block for the other's second, whose gather finds it in the
 * reduction. The error that is told is its own, which says what is missing. */
static xd_result open_for_own_leaves(xd_comm *world, void *argument) {
    scene s;
    (void)argument;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_fsdp(&s, 3) == XD_OK);
    xd_result result = XD_OK;
    for (int64_t k = 0; k < xd_parallel_micro_batches(s.parallel).own && result == XD_OK; k++) {
        xd_block *const blocks[] = { s.root, s.first, s.second };
        for (int i = 0; i < 3 && result == XD_OK; i++) {
            const xd_pass pass = { .kind = XD_PASS_BACKWARD, .micro_batch = k };
            xd_block_view view;
            result = xd_block_begin(blocks[i], pass, &view);
            if (result == XD_OK) result = xd_block_end(blocks[i]);
        }
    }
    if (result == XD_OK) result = xd_parallel_reduce(s.parallel);
    close_scene(&s);
    return result;
}

XD_TEST(a_rank_that_opens_too_few_blocks_is_told_so) {
    for (int mode = 0; mode < 2; mode++) {
        const xd_ctx_desc desc = { .reduction = mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC,
                                   .timeout_seconds = 60 };
        xd_error error = { 0 };
        CHECK(xd_run_threads(2, &desc, open_for_own_leaves, NULL, &error) == XD_ERROR_STATE);
        CHECK(strstr(error.message,
                     "has had backward passes of 1 micro-batches, not of 2: this rank opens blocks for"));
    }
}

/* One rank leaves out a block that needs no communication: DDP. */
static xd_result forget_a_block(xd_comm *world, void *argument) {
    scene s;
    (void)argument;
    open_scene(&s, world);
    const xd_ddp_desc d = { .micro_batches = 3 };
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_over_ddp(s.model, world, &d, &s.parallel) == XD_OK);
    pass_over(&s, s.root, backward);
    pass_over(&s, s.second, backward);
    if (s.rank != 1) pass_over(&s, s.first, backward);
    const xd_result result = xd_parallel_reduce(s.parallel);
    CHECK(result == (s.rank == 1 ? XD_ERROR_STATE : XD_ERROR_PEER));
    CHECK(says(&s, "\"first\" has had backward passes of 0 micro-batches, not of 1"));
    close_scene(&s);
    return XD_OK;
}

XD_TEST(all_ranks_are_told_of_the_block_that_one_forgot) {
    run_ranks(3, XD_REDUCTION_DETERMINISTIC, forget_a_block);
}

/* Equal blocks in another order: no collective can tell, the step can. */
static xd_result swap_blocks(xd_comm *world, void *argument) {
    const int later =
        *(const int *)argument; /* brackets of the root after the layers; -1: one rank has one more */
    const bool swaps = later >= 0;
    char text[160];
    scene s;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_fsdp(&s, 3) == XD_OK);
    for (int step = 0; step < 2; step++) {
        const bool odd = s.rank == 2 && step == 0;
        pass_over(&s, s.root, backward);
        pass_over(&s, odd && swaps ? s.first : s.second, backward);
        pass_over(&s, odd && swaps ? s.second : s.first, backward);
        for (int i = 0; i < later || (i == 0 && odd && !swaps); i++) pass_over(&s, s.root, forward);
        CHECK(xd_parallel_reduce(s.parallel) == (step ? XD_OK : XD_ERROR_STATE));
        if (step == 0 && !swaps) CHECK(says(&s, "a rank has opened 3 in this step, another 4"));
        snprintf(text, sizeof text,
                 "rank 2 began a backward of \"first\", micro-batch 0, where rank 0 began a backward of "
                 "\"second\", "
                 "micro-batch 0");
        if (step == 0 && swaps) CHECK(says(&s, later < 63 ? text : "parted 64 or more brackets ago"));
        CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    }
    close_scene(&s);
    return XD_OK;
}

XD_TEST(another_order_on_one_rank_is_found_before_the_step_is_made_and_both_blocks_are_named) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    static const int later[] = { -1, 0, 62, 64 };
    for (int i = 0; i < 4; i++)
        CHECK(xd_run_threads(3, &desc, swap_blocks, (void *)&later[i], NULL) == XD_OK);
}

/* ---- the caller's buffers ---- */

static xd_result refuse_pushes(xd_comm *world, void *argument) {
    scene s;
    (void)argument;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK && wrap_over_ddp(s.model, world, NULL, &s.parallel) == XD_OK);
    CHECK(xd_parallel_push_micro_batch(s.parallel) == XD_ERROR_STATE &&
          says(&s, "\"head\" has no gradient of the caller's"));
    close_scene(&s);
    return XD_OK;
}

XD_TEST(leaves_without_brackets_need_gradients_of_the_callers) {
    run_ranks(1, XD_REDUCTION_INVARIANT, refuse_pushes);
}

/* ---- a rank that does not come ---- */

enum { ABSENT = 1 };

/* phase 0: gather; 1: reduction of a leaf; 2: the end of the step; 3: publish. On queues others notice later, in the step. */
typedef struct absence {
    int phase, queues;
} absence;

static xd_result open_queues(scene *s, const absence *a, xd_queue **gathers, xd_queue **reductions) {
    static const char *const types[] = { "layer" };
    const xd_queue_desc d = { .form = a->queues == 2 ? XD_QUEUE_WORKER : XD_QUEUE_INLINE };
    if (!a->queues) return wrap_fsdp(s, 3);
    XD_TRY(xd_queue_create(s->world, &d, gathers));
    XD_TRY(xd_queue_create(s->world, &d, reductions));
    const xd_fsdp_desc f = { .micro_batches = 3,
                             .unit_types = types,
                             .unit_type_count = 1,
                             .gathers = *gathers,
                             .reductions = *reductions,
                             .prefetch = 1 };
    return wrap_over_fsdp(s->model, s->world, &f, &s->parallel);
}

/* The step until the phase in which the absent rank leaves. */
static xd_result step_until(scene *s, int phase) {
    xd_block_view view;
    if (phase == 0) return XD_OK;
    XD_TRY(xd_block_begin(s->first, backward, &view));
    if (phase == 1) return XD_OK;
    XD_TRY(xd_block_end(s->first));
    XD_TRY(xd_block_begin(s->second, backward, &view));
    XD_TRY(xd_block_end(s->second));
    XD_TRY(xd_block_begin(s->root, backward, &view));
    XD_TRY(xd_block_end(s->root));
    if (phase == 2) return XD_OK;
    XD_TRY(xd_parallel_reduce(s->parallel));
    return phase == 3 ? XD_OK : xd_parallel_publish(s->parallel);
}

static xd_result leave_early(xd_comm *world, void *argument) {
    const absence *a = (const absence *)argument;
    scene s;
    xd_queue *gathers = NULL, *reductions = NULL;
    open_scene(&s, world);
    CHECK(xd_model_seal(s.model) == XD_OK && open_queues(&s, a, &gathers, &reductions) == XD_OK);
    const bool absent = s.rank == ABSENT;
    const xd_result result = step_until(&s, absent ? a->phase : 4);
    if (absent)
        xd_comm_abort(world);
    else
        CHECK(result == XD_ERROR_PEER && xd_last_error(s.ctx)->culprit == ABSENT);
    close_scene(&s);
    xd_queue_destroy(gathers);
    xd_queue_destroy(reductions);
    return XD_OK;
}

XD_TEST(a_rank_that_leaves_ends_every_phase_of_a_step_on_the_others) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    for (int queues = 0; queues < 3; queues++)
        for (int phase = 0; phase < 4; phase++) {
            absence a = { phase, queues };
            (void)xd_run_threads(3, &desc, leave_early, &a, NULL);
        }
}

XD_TEST_MAIN()
