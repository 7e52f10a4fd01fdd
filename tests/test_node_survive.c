/* A training whose processes are killed at any moment goes on with those that are left, from the last step that they have whole in
 * memory, or else from the last checkpoint, to the bits of one rank alone: weights, optimizer, averages, norms of gradients. Under DDP
 * there is no checkpoint at all. Rates are drawn at random for each step. XD_TEST_KILLS trainings (4), XD_TEST_SEED is the first
 * seed. */
#define _GNU_SOURCE /* mkdtemp */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "checkpoint_files.h"
#include "drawn_call.h"
#include "kills.h"
#include "node_world.h"
#include "wrap_train.h"
#include "xd_test.h"
#include "averages.h"

enum { MOST = 5, STEPS = 24, EVERY = 5, TRAININGS = 4, LEAVES = 8, SEED = 11 };

/* What parent and children share. */
typedef struct training {
    wrap_run run;
    char root[64]; /* of checkpoints; "": none */
    double norms[STEPS];
    uint32_t joined;  /* ranks; atomic */
    uint32_t made;    /* steps, by rank 0 of each world; atomic */
    uint32_t resumed; /* times that a smaller world made a step, counted by its rank 0; atomic */
    uint32_t redone;  /* steps that it made again; atomic */
    uint32_t read;    /* times that it had to read a checkpoint, or begin again; atomic */
    double killed;    /* when, the last time */
    double most;      /* seconds from there to the end of such a step */
} training;

/* What a rank has of a world. */
typedef struct member {
    training *t;
    wrap_rank r;
    int world; /* how many there were before */
    xd_param params[WRAP_WEIGHTS];
    xd_tensor_part parts[WRAP_WEIGHTS];
    int64_t count;
    xd_optimizer *optimizer;
    xd_ema *average;
    int64_t done; /* steps of its state */
} member;

/* ---- checkpoints ---- */

static xd_checkpoint_network network_of(const member *m, xd_checkpoint_average *average) {
    *average = (xd_checkpoint_average){ .name = "slow", .ema = m->average };
    return (xd_checkpoint_network){ .parts = m->parts,
                                    .part_count = m->count,
                                    .optimizer = m->optimizer,
                                    .averages = average,
                                    .average_count = 1 };
}

static xd_result save(const member *m, int step) {
    xd_checkpoint_average average;
    const xd_checkpoint_network network = network_of(m, &average);
    const xd_checkpoint_save_desc desc = {
        .root = m->t->root, .step = step, .networks = &network, .network_count = 1, .overwrite = true
    };
    return xd_checkpoint_save(m->r.world, &desc);
}

/* Without a checkpoint it begins again. */
static xd_result load(member *m) {
    xd_checkpoint_average average;
    xd_checkpoint_report report;
    const xd_checkpoint_network network = network_of(m, &average);
    const xd_checkpoint_load_desc desc = {
        .root = m->t->root, .step = XD_CHECKPOINT_NEWEST, .networks = &network, .network_count = 1
    };
    const xd_result result = xd_checkpoint_load(m->r.world, &desc, &report, NULL);
    int32_t missing = result == XD_ERROR_MISSING;
    if (xd_comm_rank(m->r.world) == 0) __atomic_add_fetch(&m->t->read, 1, __ATOMIC_RELAXED);
    if (result == XD_OK) m->done = report.step;
    if (result == XD_OK) return xd_parallel_publish(m->r.parallel);
    XD_TRY(xd_all_reduce(m->r.world, &missing, &missing, 1, XD_DTYPE_I32, XD_MAX));
    return missing ? XD_OK : result;
}

/* What this rank held in the world before, and the others in theirs. */
static xd_result inherit(member *m, const member *held) {
    xd_checkpoint_average averages[2];
    const xd_checkpoint_network network = network_of(m, &averages[0]),
                                before = held ? network_of(held, &averages[1]) : network;
    const xd_state_inherit_desc desc = {
        .from = held ? &before : NULL, .networks = &network, .network_count = 1, .step = held ? held->done : 0
    };
    const xd_result result = xd_state_inherit(m->r.world, &desc, &m->done, NULL);
    if (result == XD_ERROR_MISSING) return load(m);
    return result == XD_OK ? xd_parallel_publish(m->r.parallel) : result;
}

/* ---- a rank ---- */

static xd_result train_step(member *m, int step) {
    const xd_philox random = { .seed = SEED, .stream = XD_STREAM_USER, .step = (uint32_t)step };
    const xd_gradient_norm_desc clip = { .params = m->params, .param_count = m->count, .max_norm = 2.0 };
    xd_gradient_norm norm;
    bool skipped = false;
    m->r.step = step;
    XD_TRY(wrap_leaves(&m->r));
    XD_TRY(xd_parallel_reduce(m->r.parallel));
    XD_TRY(xd_gradient_norm_compute(m->r.ctx, m->r.world, &clip, &norm));
    const xd_optimizer_step_desc modifiers = { .gradient_scale = &norm.coefficient,
                                               .averages = &m->average,
                                               .average_count = 1 };
    XD_TRY(xd_optimizer_set_learning_rate(m->optimizer, 0.02 * xd_philox_uniform_f64(&random, 0)));
    m->t->norms[step] = norm.norm; /* on every rank: any of them may be the one that goes on */
    XD_TRY(xd_optimizer_step(m->optimizer, &modifiers, &skipped));
    m->done = step + 1;
    return xd_parallel_publish(m->r.parallel);
}

static void note_step(const member *m, int redone) {
    training *t = m->t;
    if (m->world == 0 || xd_comm_rank(m->r.world) > 0) return;
    if (now() - t->killed > t->most) t->most = now() - t->killed;
    __atomic_add_fetch(&t->resumed, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&t->redone, (uint32_t)redone, __ATOMIC_RELAXED);
}

static xd_result train(member *m) {
    const int begin = (int)m->done;
    __atomic_add_fetch(&m->t->joined, 1, __ATOMIC_RELEASE);
    for (int step = begin; step < STEPS; step++) {
        const bool before = m->t->norms[step] > 0.0;
        XD_TRY(train_step(m, step));
        if (xd_comm_rank(m->r.world) == 0) __atomic_add_fetch(&m->t->made, 1, __ATOMIC_RELAXED);
        if (step == begin) note_step(m, before);
        if (m->t->root[0] && (step + 1) % EVERY == 0) XD_TRY(save(m, step + 1));
    }
    wrap_keep(&m->r, m->parts, m->count, m->optimizer, m->average);
    return xd_barrier(m->r.world); /* all have written down what they count */
}

/* HSDP: neighbours are a group. */
static xd_result split(member *m) {
    const int rank = xd_comm_rank(m->r.world), each = xd_comm_size(m->r.world) / 2;
    if (m->t->run.kind != WRAP_HSDP || xd_comm_size(m->r.world) % 2 != 0) return XD_OK;
    XD_TRY(xd_comm_split(m->r.world, rank / each, rank, &m->r.data));
    return xd_comm_split(m->r.world, rank % each, rank, &m->r.replicas);
}

static xd_result make(member *m) {
    xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
    average.decay = 0.9;
    average.init_from_current = true;
    XD_TRY(split(m));
    XD_TRY(wrap_create(&m->r));
    XD_TRY(xd_parallel_params(m->r.parallel, WRAP_WEIGHTS, m->params, &m->count));
    XD_TRY(xd_parallel_parts(m->r.parallel, WRAP_WEIGHTS, m->parts, &m->count));
    const xd_optimizer_desc d = xd_adamw_defaults(m->params, m->count);
    XD_TRY(xd_optimizer_create(m->r.home, &d, &m->optimizer));
    return average_create(m->r.home, m->params, m->count, &average, &m->average);
}

static member *member_create(xd_comm *world, training *t, int worlds) {
    member *m = (member *)calloc(1, sizeof *m);
    m->t = t;
    m->world = worlds;
    m->r.run = &t->run;
    m->r.world = m->r.data = m->r.over = world;
    m->r.ctx = m->r.home = xd_comm_ctx(world);
    m->r.model = wrap_model(m->r.ctx, XD_DTYPE_F32);
    return m;
}

/* With its world, if that is not the first. */
static void member_destroy(member *m) {
    if (!m) return;
    xd_ema_destroy(m->average);
    xd_optimizer_destroy(m->optimizer);
    wrap_close(&m->r);
    if (m->world > 0) xd_comm_destroy(m->r.world);
    free(m);
}

/* In world after world, to the end. What a rank held is there until it has all of it again. */
static xd_result survive(xd_comm *world, void *argument) {
    member *held = NULL;
    xd_comm *at = world;
    for (int worlds = 0;; worlds++) {
        member *m = member_create(at, (training *)argument, worlds);
        xd_result result = make(m);
        if (result == XD_OK && worlds > 0) result = inherit(m, held);
        const bool whole = result == XD_OK;
        if (whole) member_destroy(held);
        if (whole) held = m;
        if (whole) result = train(m);
        const xd_result shrunk = result == XD_ERROR_PEER ? xd_comm_shrink(at, 0.0, &at) : result;
        if (!whole) member_destroy(m);
        if (result == XD_ERROR_PEER && shrunk == XD_OK) continue;
        member_destroy(held);
        return shrunk;
    }
}

/* ---- trials ---- */

static void fill_run(training *t, wrap_kind kind, int queues) {
    t->run.kind = kind;
    t->run.leaves = LEAVES;
    t->run.reduction = XD_REDUCTION_INVARIANT;
    t->run.queues = queues;
}

/* One rank alone, whom nobody disturbs. */
static training *train_alone(void) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    training *t = (training *)node_memory(sizeof *t);
    fill_run(t, WRAP_DDP, 0);
    CHECK_EQ_INT(xd_run_threads(1, &desc, survive, t, NULL), XD_OK);
    CHECK(t->run.count > 100 && t->norms[STEPS - 1] > 0.0 && t->resumed == 0);
    return t;
}

/* Until so many steps more are made, and some time of the next; or no more are. */
static void let_train(const training *t, uint64_t *state, int steps) {
    const uint32_t begin = __atomic_load_n(&t->made, __ATOMIC_RELAXED);
    const int target = drawn_number(state, steps);
    for (int i = 0; i < 20000 && __atomic_load_n(&t->made, __ATOMIC_RELAXED) - begin < (uint32_t)target; i++)
        nap(100);
    nap(drawn_number(state, 4000));
}

/* Kills ranks one after another while they run; returns how many it found alive. */
static int kill_some(training *t, const pid_t *children, node_end *ends, int ranks, uint64_t *state) {
    bool dead[MOST] = { false };
    const int kills = 1 + drawn_number(state, ranks - 1);
    int lost = 0;
    while (__atomic_load_n(&t->joined, __ATOMIC_ACQUIRE) < (uint32_t)ranks) nap(100);
    for (int k = 0; k < kills; k++) {
        int victim;
        do victim = drawn_number(state, ranks);
        while (dead[victim]);
        let_train(t, state, STEPS / kills);
        t->killed = now();
        CHECK(kill(children[victim], SIGKILL) == 0);
        CHECK(waitpid(children[victim], &ends[victim].status, 0) == children[victim]);
        dead[victim] = true;
        lost += ends[victim].status != 0;
    }
    for (int r = 0; r < ranks; r++) {
        if (dead[r]) continue;
        CHECK(waitpid(children[r], &ends[r].status, 0) == children[r]);
        CHECK_EQ_INT(ends[r].status, 0);
        CHECK_EQ_INT(ends[r].failures, 0);
        CHECK_EQ_STR(ends[r].message, "");
    }
    return lost;
}

static training *train_and_lose(uint64_t seed, int *lost) {
    static const wrap_kind kinds[] = { WRAP_FSDP, WRAP_DDP, WRAP_SHARDED, WRAP_HSDP };
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    training *t = (training *)node_memory(sizeof *t);
    node_end *ends = (node_end *)node_memory(MOST * sizeof *ends);
    pid_t children[MOST];
    char name[32];
    uint64_t state = seed;
    const int ranks = 2 + drawn_number(&state, MOST - 1);
    fill_run(t, kinds[seed % 4], drawn_number(&state, 2) * 2);
    if (t->run.kind != WRAP_DDP) memcpy(t->root, new_root(), sizeof t->root);
    const node_start start = { .ranks = ranks, .desc = &desc, .function = survive, .argument = t };
    node_name(name);
    node_fork(&start, name, children, ends);
    *lost = kill_some(t, children, ends, ranks, &state);
    CHECK_EQ_INT(node_left_behind(), 0);
    if (t->root[0]) remove_all(t->root);
    if (t->run.kind == WRAP_DDP) CHECK_EQ_INT(t->read, 0);
    munmap(ends, MOST * sizeof *ends);
    return t;
}

XD_TEST(a_training_that_loses_ranks_at_any_moment_ends_with_the_bits_of_one_rank) {
    const int trainings = given("XD_TEST_KILLS", TRAININGS), first = given("XD_TEST_SEED", 1);
    training *alone = train_alone();
    int lost = 0, equal = 0;
    unsigned resumed = 0, redone = 0, read = 0;
    double most = 0.0;
    for (int i = 0; i < trainings; i++) {
        const long failures = xd_test_failures;
        int now_lost;
        training *t = train_and_lose((uint64_t)(first + i), &now_lost);
        const bool same =
            wrap_equal(&t->run, &alone->run) && memcmp(t->norms, alone->norms, sizeof t->norms) == 0;
        CHECK(same);
        equal += same;
        lost += now_lost;
        resumed += t->resumed;
        redone += t->redone;
        read += t->read;
        if (t->most > most) most = t->most;
        if (xd_test_failures != failures) printf("seed %d\n", first + i);
        munmap(t, sizeof *t);
    }
    printf("%d of %d trainings have the bits of one rank: %d ranks lost, %u times others went on, %u of them "
           "from a "
           "file, %u within steps done before, after %.2f s at most\n",
           equal, trainings, lost, resumed, read, redone, most);
    CHECK(lost > 0 && resumed > 0 && most < 5.0);
    munmap(alone, sizeof *alone);
}

XD_TEST_MAIN()
