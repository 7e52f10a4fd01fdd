/* A step with a part left out: no sum, a sum on one rank alone, blocks that no leaf has used. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "wrap_weights.h"

enum { WEIGHTS = 3, ROOM = 256 };

/* A rank's scene: a root and two layers, wrapped, with an optimizer whose weight decay is large. */
typedef struct scene {
    xd_ctx *ctx;
    xd_comm *world;
    int rank;
    bool ddp;
    xd_model *model;
    xd_block *root, *first, *second;
    xd_parallel *parallel;
    xd_param params[WEIGHTS];
    xd_optimizer *optimizer;
} scene;

static void open_scene(scene *s, xd_comm *world, bool ddp, int64_t leaves) {
    static const char *const types[] = { "layer" };
    const xd_fsdp_desc sharded = { .micro_batches = leaves, .unit_types = types, .unit_type_count = 1 };
    const xd_ddp_desc whole = { .micro_batches = leaves };
    int64_t count = 0;
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    s->world = world;
    s->rank = xd_comm_rank(world);
    s->ddp = ddp;
    CHECK(xd_model_create(s->ctx, NULL, &s->model) == XD_OK);
    s->root = xd_model_root(s->model);
    wrap_weight(s->root, "head", 3, 4);
    s->first = wrap_child(s->root, "first", "layer");
    s->second = wrap_child(s->root, "second", "layer");
    wrap_weight(s->first, "w", 10, 10);
    wrap_weight(s->second, "w", 10, 10);
    CHECK(xd_model_seal(s->model) == XD_OK);
    CHECK((ddp ? wrap_over_ddp(s->model, world, &whole, &s->parallel)
               : wrap_over_fsdp(s->model, world, &sharded, &s->parallel)) == XD_OK);
    CHECK(xd_parallel_params(s->parallel, WEIGHTS, s->params, &count) == XD_OK && count == WEIGHTS);
    xd_optimizer_desc d = xd_adamw_defaults(s->params, count);
    d.learning_rate = 0.1;
    d.weight_decay = 0.5;
    CHECK(xd_optimizer_create(s->ctx, &d, &s->optimizer) == XD_OK);
}

static void close_scene(scene *s) {
    xd_optimizer_destroy(s->optimizer);
    xd_parallel_destroy(s->parallel);
    xd_model_destroy(s->model);
}

static bool says(const scene *s, const char *text) {
    const char *message = xd_last_error(s->ctx)->message;
    if (strstr(message, text)) return true;
    printf("rank %d: \"%s\" lacks \"%s\"\n", s->rank, message, text);
    return false;
}

static void run_ranks(int ranks, xd_reduction reduction, xd_rank_function function, void *argument) {
    const xd_ctx_desc desc = { .reduction = reduction, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(ranks, &desc, function, argument, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    CHECK(result == XD_OK);
}

/* A leaf of every block, each element of a gradient being 1, or `amount` in the second layer. */
static void add_to(const xd_block_view *view, int64_t count, float amount) {
    float *gradient = (float *)view->gradients[0];
    for (int64_t i = 0; gradient && i < count; i++) gradient[i] += amount;
}

static void pass_back(xd_block *block, int64_t leaf, int64_t count, float amount) {
    const xd_pass pass = { XD_PASS_BACKWARD, leaf, false };
    xd_block_view view;
    CHECK(xd_block_begin(block, pass, &view) == XD_OK);
    add_to(&view, count, amount);
    CHECK(xd_block_end(block) == XD_OK);
}

static void pass_leaf(scene *s, int64_t leaf) {
    pass_back(s->second, leaf, 100, 1.0f);
    pass_back(s->first, leaf, 100, 1.0f);
    pass_back(s->root, leaf, 12, 1.0f);
}

static void pass_leaves(scene *s) {
    for (int64_t k = 0; k < xd_parallel_micro_batches(s->parallel).opened; k++) pass_leaf(s, k);
}

static xd_result norm_of(scene *s, xd_norm_type type) {
    const xd_gradient_norm_desc d = { .params = s->params, .param_count = WEIGHTS, .type = type };
    xd_gradient_norm norm;
    return xd_gradient_norm_compute(s->ctx, s->world, &d, &norm);
}

static void keep_values(const scene *s, float *values) {
    for (int i = 0, at = 0; i < WEIGHTS; i++)
        for (int64_t k = 0; k < s->params[i].count; k++) values[at++] = ((float *)s->params[i].value)[k];
}

/* ---- no sum ---- */

/* Nothing changes until the sum is there; then the step is the one of a loop that has forgotten nothing. */
static xd_result leave_out_reduce(xd_comm *world, void *ddp) {
    scene s, whole;
    float before[ROOM] = { 0 }, after[ROOM] = { 0 }, expected[ROOM] = { 0 };
    open_scene(&s, world, ddp != NULL, 4);
    open_scene(&whole, world, ddp != NULL, 4);
    keep_values(&s, before);
    pass_leaves(&s);
    CHECK(xd_optimizer_step(s.optimizer, NULL, NULL) == XD_ERROR_STATE &&
          says(&s, "xd_optimizer_step before xd_parallel_reduce: parameter 0 of 3, \"head\""));
    CHECK(norm_of(&s, XD_NORM_L2) == XD_ERROR_STATE &&
          says(&s, "a norm of gradients before xd_parallel_reduce"));
    CHECK(xd_clip_gradients(s.ctx, s.params, WEIGHTS, 0.5f) == XD_ERROR_STATE &&
          says(&s, "xd_clip_gradients before xd_parallel_reduce"));
    CHECK(xd_parallel_publish(s.parallel) == XD_ERROR_STATE &&
          says(&s, "xd_parallel_publish before xd_parallel_reduce"));
    keep_values(&s, after);
    CHECK(memcmp(before, after, sizeof before) == 0);
    pass_leaves(&whole);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && xd_parallel_reduce(whole.parallel) == XD_OK);
    CHECK(norm_of(&s, XD_NORM_L2) == XD_OK);
    CHECK(xd_optimizer_step(s.optimizer, NULL, NULL) == XD_OK);
    CHECK(xd_optimizer_step(whole.optimizer, NULL, NULL) == XD_OK);
    CHECK(xd_parallel_publish(s.parallel) == XD_OK && xd_parallel_publish(whole.parallel) == XD_OK);
    keep_values(&s, after);
    keep_values(&whole, expected);
    CHECK(memcmp(after, expected, sizeof after) == 0 && memcmp(after, before, sizeof after) != 0);
    close_scene(&whole);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(a_step_before_the_sum_over_ranks_is_refused_and_changes_nothing) {
    static int yes;
    for (int ranks = 1; ranks <= 2; ranks++) {
        run_ranks(ranks, XD_REDUCTION_INVARIANT, leave_out_reduce, NULL);
        run_ranks(ranks, XD_REDUCTION_FAST, leave_out_reduce, &yes);
    }
}

/* A step that is given up between two leaves needs no sum; nor does one whose blocks are all frozen. */
static xd_result give_up(xd_comm *world, void *ddp) {
    scene s;
    open_scene(&s, world, ddp != NULL, 4);
    pass_leaf(&s, 0);
    CHECK(xd_optimizer_step(s.optimizer, NULL, NULL) == XD_ERROR_STATE);
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    CHECK(norm_of(&s, XD_NORM_L2) == XD_OK);
    pass_leaves(&s);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && xd_optimizer_step(s.optimizer, NULL, NULL) == XD_OK);
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(a_step_that_is_given_up_between_two_leaves_needs_no_sum) {
    static int yes;
    run_ranks(2, XD_REDUCTION_INVARIANT, give_up, NULL);
    run_ranks(2, XD_REDUCTION_INVARIANT, give_up, &yes);
}

/* ---- a sum on one rank alone ---- */

typedef enum instead { A_NORM, A_LARGEST, A_PUBLISH } instead;

static xd_result forget_alone(xd_comm *world, void *argument) {
    const instead what = *(const instead *)argument;
    scene s;
    open_scene(&s, world, true, 4);
    pass_leaves(&s);
    if (s.rank == 0) {
        const bool told = what == A_PUBLISH;
        CHECK(xd_parallel_reduce(s.parallel) == (told ? XD_ERROR_PEER : XD_ERROR_MISMATCH) &&
              says(&s, told ? "rank 1 failed with ERROR_STATE: xd_parallel_publish before xd_parallel_reduce"
                            : "all ranks call xd_parallel_reduce after their backward passes"));
    } else if (what == A_PUBLISH) {
        CHECK(xd_parallel_publish(s.parallel) == XD_ERROR_STATE &&
              says(&s, "xd_parallel_publish before xd_parallel_reduce"));
    } else {
        CHECK(norm_of(&s, what == A_NORM ? XD_NORM_L2 : XD_NORM_MAX) == XD_ERROR_STATE &&
              says(&s, "a norm of gradients before xd_parallel_reduce"));
    }
    /* Nothing is lost: the call that was left out is made, and the step goes on. */
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && xd_optimizer_step(s.optimizer, NULL, NULL) == XD_OK);
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(a_rank_that_leaves_out_the_sum_is_told_the_call) {
    for (int mode = 0; mode < 2; mode++)
        for (int what = 0; what < 3; what++) {
            instead argument = (instead)what;
            run_ranks(2, mode ? XD_REDUCTION_FAST : XD_REDUCTION_INVARIANT, forget_alone, &argument);
        }
}

/* ---- blocks that no leaf has used ---- */

/* `used`: by how many leaves of rank 0 the first layer is used; what the others do with it is a skip. */
static void pass_some(scene *s, int64_t used, float amount) {
    for (int64_t k = 0; k < xd_parallel_micro_batches(s->parallel).opened; k++) {
        pass_back(s->second, k, 100, 1.0f);
        if (k < used && (s->rank == 0 || !s->ddp))
            pass_back(s->first, k, 100, amount);
        else
            CHECK(xd_block_skip(s->first, k) == XD_OK);
        pass_back(s->root, k, 12, 1.0f);
    }
    CHECK(xd_parallel_reduce(s->parallel) == XD_OK && norm_of(s, XD_NORM_L2) == XD_OK);
    CHECK(xd_optimizer_step(s->optimizer, NULL, NULL) == XD_OK);
    CHECK(xd_parallel_publish(s->parallel) == XD_OK);
}

/* Weights of layers: 1 and 2 in the list. AdamW moves a weight without momentum by its decay alone. */
static xd_result skip_everywhere(xd_comm *world, void *ddp) {
    float before[ROOM] = { 0 }, after[ROOM] = { 0 };
    scene s;
    open_scene(&s, world, ddp != NULL, 4);
    const int64_t own = s.params[1].count, at = s.params[0].count;
    const int64_t *steps = xd_optimizer_state_at(s.optimizer, 1).step;
    keep_values(&s, before);
    pass_some(&s, 0, 0.0f);
    keep_values(&s, after);
    CHECK(memcmp(before + at, after + at, (size_t)own * sizeof *before) == 0);
    CHECK_EQ_INT(*steps, 0);
    CHECK_EQ_INT(*xd_optimizer_state_at(s.optimizer, 2).step, 1);
    CHECK(*s.params[1].state == XD_GRADIENT_READY);
    /* One leaf of one rank has used it, with a gradient of zero: it decays, on every rank. */
    pass_some(&s, 1, 0.0f);
    keep_values(&s, after);
    for (int64_t i = 0; i < own; i++) CHECK(after[at + i] == before[at + i] * (float)(1.0 - 0.1 * 0.5));
    CHECK_EQ_INT(*steps, 1);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(a_weight_that_no_leaf_has_used_is_left_alone_and_one_with_a_zero_gradient_decays) {
    static int yes;
    for (int ranks = 1; ranks <= 2; ranks++) {
        run_ranks(ranks, XD_REDUCTION_INVARIANT, skip_everywhere, NULL);
        run_ranks(ranks, XD_REDUCTION_INVARIANT, skip_everywhere, &yes);
        run_ranks(ranks, XD_REDUCTION_FAST, skip_everywhere, &yes);
    }
}

/* ---- units beside each other ---- */

static xd_result open_beside(xd_comm *world, void *argument) {
    const xd_pass forward = { XD_PASS_FORWARD, 0, false };
    scene s;
    xd_block_view view;
    (void)argument;
    open_scene(&s, world, false, 4);
    CHECK(xd_block_begin(s.root, forward, &view) == XD_OK &&
          xd_block_begin(s.first, forward, &view) == XD_OK);
    CHECK(xd_block_begin(s.first, forward, &view) == XD_OK && xd_block_end(s.first) == XD_OK);
    CHECK(
        xd_block_begin(s.second, forward, &view) == XD_ERROR_STATE &&
        says(&s, "unit \"second\" is opened while \"first\" is open, which is not around it: 1 of a level"));
    CHECK(xd_block_end(s.first) == XD_OK);
    CHECK(xd_block_begin(s.second, forward, &view) == XD_OK && xd_block_end(s.second) == XD_OK);
    CHECK(xd_block_end(s.root) == XD_OK);
    pass_leaves(&s);
    CHECK(xd_parallel_reduce(s.parallel) == XD_OK && xd_parallel_publish(s.parallel) == XD_OK);
    close_scene(&s);
    return XD_OK;
}

XD_TEST(two_units_beside_each_other_are_refused_on_one_rank_as_on_several) {
    for (int ranks = 1; ranks <= 2; ranks++) run_ranks(ranks, XD_REDUCTION_INVARIANT, open_beside, NULL);
}

/* ---- replicas that differ ---- */

/* Values that one rank alone has written are found by the first step that compares; written on all, the same call goes on. */
static xd_result load_alone(xd_comm *world, void *argument) {
    const bool sharded = argument != NULL; /* groups of two hold parts; else all hold everything */
    const int rank = xd_comm_rank(world), last = xd_comm_size(world) - 1;
    xd_comm *data = world, *replicas = NULL;
    scene s;
    memset(&s, 0, sizeof s);
    s.ctx = xd_comm_ctx(world);
    s.rank = rank;
    CHECK(xd_model_create(s.ctx, NULL, &s.model) == XD_OK);
    wrap_weight(xd_model_root(s.model), "head", 30, 10);
    wrap_weight(xd_model_root(s.model), "tail", 30, 10);
    xd_weight_desc seen = {
        .name = "seen", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 2 }, .buffer = true
    };
    CHECK(xd_weight_add(xd_model_root(s.model), &seen, NULL) == XD_OK && xd_model_seal(s.model) == XD_OK);
    if (sharded) {
        CHECK(xd_comm_split(world, rank / 2, rank, &data) == XD_OK);
        CHECK(xd_comm_split(world, rank % 2, rank, &replicas) == XD_OK);
        const xd_fsdp_desc d = { .replicas = replicas, .compare_steps = 3 };
        CHECK(wrap_over_fsdp(s.model, data, &d, &s.parallel) == XD_OK);
    } else {
        const xd_ddp_desc d = { .compare_steps = 3 };
        CHECK(wrap_over_ddp(s.model, world, &d, &s.parallel) == XD_OK);
    }
    int64_t count = 0;
    CHECK(xd_parallel_params(s.parallel, WEIGHTS, s.params, &count) == XD_OK && count == 3);
    const int w = sharded && rank % 2 == 0; /* of which this rank has some: the last weight comes first */
    CHECK(s.params[w].count > 7);
    float *values = (float *)s.params[w].value, kept = values[5];
    ((float *)s.params[2].value)[1] = (float)rank; /* a buffer is each rank's own */
    if (rank == last) values[5] = 42.0f;
    const bool differs = !sharded || rank % 2 == last % 2;
    CHECK(xd_parallel_publish(s.parallel) == (differs ? XD_ERROR_MISMATCH : XD_ERROR_PEER) &&
          says(&s, sharded ? "weight \"head\" has other values on rank 3 than on rank 1"
                           : "weight \"head\" has other values on rank 2 than on rank 0"));
    values[5] = sharded ? kept : 42.0f;
    CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    /* The two publishes that follow do not compare; the third does. */
    if (rank == 0) values[7] = 7.0f;
    for (int i = 0; i < 2; i++) CHECK(xd_parallel_publish(s.parallel) == XD_OK);
    CHECK(xd_parallel_publish(s.parallel) == (sharded && rank % 2 ? XD_ERROR_PEER : XD_ERROR_MISMATCH));
    xd_parallel_destroy(s.parallel);
    xd_model_destroy(s.model);
    if (sharded) xd_comm_destroy(replicas);
    if (sharded) xd_comm_destroy(data);
    return XD_OK;
}

XD_TEST(replicas_that_differ_are_found_by_the_name_of_the_weight) {
    static int yes;
    run_ranks(3, XD_REDUCTION_INVARIANT, load_alone, NULL);
    run_ranks(4, XD_REDUCTION_INVARIANT, load_alone, &yes);
}

XD_TEST_MAIN()
