/* Ranks train, one is lost, and the others take what they still have in memory over to another wrapper: the highest step of which
 * every element is left, whoever has it, bit for bit what all ranks together had after that step. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "wrap_train.h"
#include "xd_test.h"
#include "averages.h"

enum { RANKS = 4, STEPS = 3, LEAVES = 8 };

/* What a rank does, beyond the ranks before the loss. */
typedef struct scene {
    wrap_kind before, after;
    int lost;                /* this rank */
    unsigned ahead;          /* bit r: rank r has made one step more */
    int64_t found;           /* by xd_state_inherit; -1: no step is whole */
    wrap_run *then[2], *now; /* what all had after STEPS, and one more; and what those that are left have */
    xd_result expected;
} scene;

/* A model over some ranks, with all that a step changes. */
typedef struct holder {
    wrap_rank r;
    xd_param params[WRAP_WEIGHTS];
    xd_tensor_part parts[WRAP_WEIGHTS];
    int64_t count;
    xd_optimizer *optimizer;
    xd_ema *ema;
} holder;

static void hold(holder *h, xd_comm *world, wrap_run *run, bool groups) {
    memset(h, 0, sizeof *h);
    h->r.run = run;
    h->r.world = h->r.data = h->r.over = world;
    h->r.ctx = h->r.home = xd_comm_ctx(world);
    h->r.model = wrap_model(h->r.ctx, XD_DTYPE_F32);
    run->groups = groups ? 2 : 0;
    CHECK_EQ_INT(wrap_groups(&h->r), XD_OK);
    CHECK_EQ_INT(wrap_create(&h->r), XD_OK);
    CHECK_EQ_INT(xd_parallel_params(h->r.parallel, WRAP_WEIGHTS, h->params, &h->count), XD_OK);
    CHECK_EQ_INT(xd_parallel_parts(h->r.parallel, WRAP_WEIGHTS, h->parts, &h->count), XD_OK);
    const xd_optimizer_desc d = xd_adamw_defaults(h->params, h->count);
    xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
    average.decay = 0.9;
    average.init_from_current = true;
    CHECK_EQ_INT(xd_optimizer_create(h->r.ctx, &d, &h->optimizer), XD_OK);
    CHECK_EQ_INT(average_create(h->r.ctx, h->params, h->count, &average, &h->ema), XD_OK);
}

static void let_go(holder *h) {
    xd_ema_destroy(h->ema);
    xd_optimizer_destroy(h->optimizer);
    wrap_close(&h->r);
}

static xd_checkpoint_network network_of(const holder *h, xd_checkpoint_average *average) {
    *average = (xd_checkpoint_average){ .name = "slow", .ema = h->ema };
    return (xd_checkpoint_network){ .parts = h->parts,
                                    .part_count = h->count,
                                    .optimizer = h->optimizer,
                                    .averages = average,
                                    .average_count = 1 };
}

/* All but the step itself, which some may not come to. */
static void approach(holder *h, int step) {
    h->r.step = step;
    CHECK_EQ_INT(wrap_leaves(&h->r), XD_OK);
    CHECK_EQ_INT(xd_parallel_reduce(h->r.parallel), XD_OK);
}

static void make_step(holder *h, int step) {
    const xd_optimizer_step_desc d = { .averages = &h->ema, .average_count = 1 };
    CHECK_EQ_INT(xd_optimizer_set_learning_rate(h->optimizer, 0.01 * (step + 1)), XD_OK);
    CHECK_EQ_INT(xd_optimizer_step(h->optimizer, &d, NULL), XD_OK);
}

static void keep(holder *h, wrap_run *run) {
    wrap_run *own = h->r.run;
    h->r.run = run;
    wrap_keep(&h->r, h->parts, h->count, h->optimizer, h->ema);
    h->r.run = own;
}

static void inherit(xd_comm *left, scene *s, const holder *before, int64_t step) {
    xd_checkpoint_average averages[2];
    holder now;
    char *state = NULL, own[32];
    int64_t found = -1;
    snprintf(own, sizeof own, "{\"step\": %d}", (int)step);
    s->now->kind = s->after;
    hold(&now, left, s->now, false);
    const xd_checkpoint_network from = network_of(before, &averages[0]), to = network_of(&now, &averages[1]);
    const xd_state_inherit_desc d = {
        .from = &from, .networks = &to, .network_count = 1, .step = step, .state = own, .staging_bytes = 64
    };
    CHECK_EQ_INT(xd_state_inherit(left, &d, &found, &state), s->expected);
    if (s->expected == XD_OK) {
        CHECK_EQ_INT(found, s->found);
        snprintf(own, sizeof own, "{\"step\": %d}", (int)s->found);
        CHECK_EQ_STR(state, own);
        CHECK(xd_optimizer_settings(now.optimizer)->learning_rate == 0.01 * (double)s->found);
        CHECK_EQ_INT(xd_ema_describe(now.ema).record.iteration, s->found);
    } else {
        CHECK(found == -1 && !state);
        CHECK(strstr(xd_last_error(now.r.ctx)->message, "no step is whole on 3 ranks; of step 3: ") != NULL);
    }
    xd_release(now.r.ctx, state);
    keep(&now, s->now);
    CHECK_EQ_INT(xd_barrier(left), XD_OK);
    let_go(&now);
}

static xd_result play(xd_comm *world, void *argument) {
    scene *s = (scene *)argument;
    const int rank = xd_comm_rank(world);
    const bool ahead = (s->ahead >> rank & 1) != 0;
    xd_comm *left = NULL;
    holder h, twin;
    s->then[0]->kind = s->then[1]->kind = s->before;
    hold(&h, world, s->then[0], s->before == WRAP_HSDP);
    hold(&twin, world, s->then[1], s->before == WRAP_HSDP); /* which all ranks take one step further */
    for (int step = 0; step <= STEPS; step++) {
        approach(&h, step);
        approach(&twin, step);
        make_step(&twin, step);
        if (step == STEPS) keep(&h, s->then[0]);
        if (step < STEPS || ahead) make_step(&h, step);
        CHECK_EQ_INT(xd_parallel_publish(twin.r.parallel), XD_OK);
        if (step < STEPS) CHECK_EQ_INT(xd_parallel_publish(h.r.parallel), XD_OK);
    }
    keep(&twin, s->then[1]);
    CHECK_EQ_INT(xd_comm_split(world, rank == s->lost ? -1 : 0, rank, &left), XD_OK);
    if (left) inherit(left, s, &h, STEPS + ahead);
    if (left) xd_comm_destroy(left);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    let_go(&twin);
    let_go(&h);
    return XD_OK;
}

static bool same_state(const wrap_run *a, const wrap_run *b) {
    return a->count == b->count && a->count > 100 && a->taken == b->taken &&
           memcmp(a->values, b->values, sizeof a->values) == 0 &&
           memcmp(a->averages, b->averages, sizeof a->averages) == 0 &&
           memcmp(a->moments, b->moments, sizeof a->moments) == 0 &&
           memcmp(a->squares, b->squares, sizeof a->squares) == 0;
}

static void check_scene(scene s) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    for (int i = 0; i < 2; i++) s.then[i] = wrap_new(s.before, RANKS, LEAVES, XD_REDUCTION_INVARIANT);
    s.now = wrap_new(s.after, RANKS - 1, LEAVES, XD_REDUCTION_INVARIANT);
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, play, &s, NULL), XD_OK);
    CHECK(!same_state(s.then[0], s.then[1])); /* so a step too many would be seen */
    CHECK_EQ_INT(same_state(s.now, s.then[0]), s.found == STEPS);
    CHECK_EQ_INT(same_state(s.now, s.then[1]), s.found == STEPS + 1);
    for (int i = 0; i < 2; i++) free(s.then[i]);
    free(s.now);
}

XD_TEST(those_that_are_left_take_the_highest_step_that_they_have_whole) {
    static const scene scenes[] = {
        { .before = WRAP_DDP, .after = WRAP_FSDP, .lost = 1, .found = STEPS },
        { .before = WRAP_DDP, .after = WRAP_DDP, .lost = 0, .ahead = 4, .found = STEPS + 1 },
        { .before = WRAP_DDP, .after = WRAP_SHARDED, .lost = 3, .ahead = 8, .found = STEPS },
        /* ranks 0 and 2 hold the same half of it, 1 and 3 the other */
        { .before = WRAP_HSDP, .after = WRAP_DDP, .lost = 0, .found = STEPS },
        { .before = WRAP_HSDP, .after = WRAP_FSDP, .lost = 3, .ahead = 1, .found = STEPS },
        { .before = WRAP_HSDP, .after = WRAP_FSDP, .lost = 1, .ahead = 1 + 8, .found = STEPS + 1 },
    };
    for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; i++) check_scene(scenes[i]);
}

XD_TEST(a_step_of_which_something_is_lost_is_missing_and_nothing_changes) {
    static const scene scenes[] = {
        { .before = WRAP_FSDP, .after = WRAP_FSDP, .lost = 2, .found = -1, .expected = XD_ERROR_MISSING },
        { .before = WRAP_SHARDED, .after = WRAP_DDP, .lost = 0, .found = -1, .expected = XD_ERROR_MISSING },
        { .before = WRAP_HSDP, .after = WRAP_DDP, .lost = 1, .ahead = 1 + 4, .found = STEPS },
    };
    for (size_t i = 0; i < 2; i++) check_scene(scenes[i]);
    scene torn = scenes[2]; /* one half is of one step, the other of another */
    torn.found = -1;
    torn.expected = XD_ERROR_MISSING;
    check_scene(torn);
}

/* ---- bad inputs ---- */

static xd_result refuse(xd_comm *world, void *argument) {
    const bool first = xd_comm_rank(world) == 0;
    const char *message = xd_last_error(xd_comm_ctx(world))->message;
    xd_checkpoint_average averages[2];
    wrap_run *run = (wrap_run *)argument;
    holder h, now;
    int64_t step = -1;
    hold(&h, world, run, false);
    hold(&now, world, run, false);
    xd_checkpoint_network from = network_of(&h, &averages[0]), to = network_of(&now, &averages[1]);
    const xd_state_inherit_desc good = { .from = &from, .networks = &to, .network_count = 1 };

    xd_state_inherit_desc d = good;
    d.from = NULL;
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), XD_ERROR_MISSING);
    CHECK_EQ_STR(message, "none of 2 ranks has a state");
    if (first) d = good;
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), XD_OK); /* one has all */
    CHECK_EQ_INT(step, 0);

    step = -1;
    d = good;
    if (first) d.step = -3;
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), first ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(message, "step -3 is negative") != NULL);
    d = good;
    if (first) d.state = "[1]";
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), first ? XD_ERROR_FORMAT : XD_ERROR_PEER);
    CHECK(strstr(message, "the state is no JSON object") != NULL);
    d = good;
    if (first) d.network_count = -1;
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), first ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(message, "-1 networks at") != NULL);
    d = good;
    d.staging_bytes = first ? 64 : 128;
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), XD_ERROR_MISMATCH);
    CHECK(strstr(message, "passed staging_bytes = 128, rank 0 passed 64") != NULL);
    d = good;
    from.average_count = 0;
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), XD_ERROR_MISMATCH);
    CHECK(strstr(message, "tensors go where there are") != NULL);
    from = network_of(&h, &averages[0]);
    averages[0].name = "other";
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), XD_ERROR_MISMATCH);
    CHECK(strstr(message, "of another name, type, shape or file") != NULL);
    averages[0].name = "slow";
    if (first) to.average_count = from.average_count = 0;
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), XD_ERROR_MISMATCH);
    CHECK(strstr(message, "the lists differ first at tensor") != NULL);
    CHECK_EQ_INT(step, -1);
    let_go(&now);
    let_go(&h);
    return XD_OK;
}

XD_TEST(states_that_do_not_fit_are_refused) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    wrap_run *run = wrap_new(WRAP_DDP, 2, LEAVES, XD_REDUCTION_INVARIANT);
    CHECK_EQ_INT(xd_run_threads(2, &desc, refuse, run, NULL), XD_OK);
    free(run);
}

/* ---- copies ---- */

/* Two ranks have rows 2 and 3 of "rows", one as a range of all and the other as a region, and both have the whole "rest", one without
 * and one with a region. */
static xd_result share_rows(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    const xd_region rows = { .ndim = 2, .count = { 1, 1 }, .interval = { { { 2, 4 } }, { { 0, 3 } } } };
    float had[2][15], now[2][15] = { { 0 }, { 0 } };
    xd_tensor_part from[2], to[2];
    int64_t step = -1;
    (void)argument;
    for (int i = 0; i < 2; i++) {
        xd_tensor_part *p = &from[i];
        memset(p, 0, sizeof *p);
        p->name = i ? "rest" : "rows";
        p->dtype = XD_DTYPE_F32;
        p->ndim = 2;
        p->shape[0] = i ? 5 : 4;
        p->shape[1] = 3;
        to[i] = *p;
        to[i].range.end = p->range.end = 3 * p->shape[0];
        to[i].data = now[i];
        p->data = had[i];
        for (int k = 0; k < 15; k++) had[i][k] = (float)k;
    }
    const xd_region all = { .ndim = 2, .count = { 1, 1 }, .interval = { { { 0, 5 } }, { { 0, 3 } } } };
    if (rank == 1) from[1].region = &all;
    if (rank < 2) { /* "rows": 0 and 1 on rank 2 alone */
        from[0].range = rank ? (xd_interval){ 0, 6 } : (xd_interval){ 6, 12 };
        from[0].region = rank ? &rows : NULL;
        for (int k = 0; k < 6; k++) had[0][k] = (float)(6 + k);
    } else {
        from[0].range.end = 6;
        from[1].range.end = 0;
    }
    const xd_checkpoint_network before = { .parts = from, .part_count = 2 },
                                after = { .parts = to, .part_count = 2 };
    const xd_state_inherit_desc d = { .from = &before, .networks = &after, .network_count = 1, .step = 4 };
    CHECK_EQ_INT(xd_state_inherit(world, &d, &step, NULL), XD_OK);
    CHECK_EQ_INT(step, 4);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < (i ? 15 : 12); k++) CHECK(now[i][k] == (float)k);
    return XD_OK;
}

XD_TEST(copies_are_the_same_elements_however_parts_describe_them) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(3, &desc, share_rows, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
