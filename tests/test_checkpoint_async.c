/* A save beside training is the save of the moment in which it was started: the same bytes whatever trains meanwhile, the
 * same errors on every rank, and the older checkpoint whole whatever fails. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, kill */
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "comm/internal.h"
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"
#include "planned.h"
#include "press_files.h"

#include <sys/wait.h>
#include <time.h>

enum { RANKS_MOST = 5, STEPS = 5, MORE = 3, STEP = 7 };

typedef enum form { FORM_DIRECT /* xd_checkpoint_save */, FORM_THREAD, FORM_POLL, FORMS } form;

typedef struct job {
    const char *root;
    form form;
    int cut;
    uint64_t shard_bytes;
    int64_t step;
    bool gone;    /* the network is destroyed before the wait, instead of trained */
    bool repeats; /* a second save by the same saver, of the step after */
    scene_whole *whole;
    int polls;
    xd_result made, started[RANKS_MOST], waited[RANKS_MOST];
    int culprit[RANKS_MOST];
    char message[RANKS_MOST][300];
} job;

static job new_job(const char *root, form how) {
    job j;
    memset(&j, 0, sizeof j);
    j.root = root;
    j.form = how;
    j.step = STEP;
    return j;
}

static xd_transport_ops without_fork;

/* From now on a group cannot be had for another thread. */
static void take_fork(xd_comm *comm) {
    xd_transport *t = xdi_comm_transport(comm);
    if (xd_comm_rank(comm) == 0) {
        without_fork = *t->ops;
        without_fork.fork = NULL;
    }
    CHECK_EQ_INT(xd_barrier(comm), XD_OK);
    t->ops = &without_fork;
}

static xd_checkpoint_save_desc save_desc(const job *j, const xd_checkpoint_network *network) {
    xd_checkpoint_save_desc d;
    memset(&d, 0, sizeof d);
    d.root = j->root;
    d.step = j->step;
    d.networks = network;
    d.network_count = 1;
    d.max_shard_bytes = j->shard_bytes;
    d.block_bytes = 4096;
    return d;
}

static void remember(job *j, const xd_comm *world, xd_result *results, xd_result result) {
    const int rank = xd_comm_rank(world);
    results[rank] = result;
    if (result == XD_OK) return;
    const xd_error *e = xd_last_error(xd_comm_ctx(world));
    j->culprit[rank] = e->culprit;
    snprintf(j->message[rank], sizeof j->message[rank], "%.299s", e->message);
}

/* Starts a save from memory that is overwritten when start has returned. */
static xd_result start(xd_checkpoint_saver *saver, xd_comm *world, const job *j, const scene *s) {
    char *state = (char *)malloc(64), *root = (char *)malloc(200), *data = (char *)malloc(2);
    xd_checkpoint_network *network = (xd_checkpoint_network *)malloc(sizeof *network);
    xd_tensor_part *parts = (xd_tensor_part *)malloc(SCENE_TENSORS * sizeof *parts);
    xd_region *regions = (xd_region *)malloc(SCENE_TENSORS * sizeof *regions);
    xd_checkpoint_file *file = (xd_checkpoint_file *)malloc(sizeof *file);
    *network = s->network;
    memcpy(parts, s->part, SCENE_TENSORS * sizeof *parts);
    memcpy(regions, s->region, SCENE_TENSORS * sizeof *regions);
    for (int i = 0; i < SCENE_TENSORS; i++)
        if (parts[i].region) parts[i].region = &regions[i];
    network->parts = parts;
    xd_checkpoint_save_desc d = save_desc(j, network);
    snprintf(state, 64, "{\"cursor\": 17}");
    snprintf(root, 200, "%s", j->root);
    memcpy(data, "{}", 2);
    file->name = "config.json";
    file->data = data;
    file->bytes = 2;
    d.root = root;
    d.state = s->rank == 0 ? state : NULL;
    d.files = s->rank == 0 ? file : NULL;
    d.file_count = s->rank == 0;
    const xd_result result = saver ? xd_checkpoint_save_start(saver, &d) : xd_checkpoint_save(world, &d);
    memset(parts, 0xa5, SCENE_TENSORS * sizeof *parts);
    memset(regions, 0xa5, SCENE_TENSORS * sizeof *regions);
    memset(network, 0xa5, sizeof *network);
    memset(state, 'x', 64);
    free(state);
    free(root);
    free(data);
    free(network);
    free(parts);
    free(regions);
    free(file);
    return result;
}

/* Training beside a save: steps, and a collective for each. */
static void train(scene *s, xd_comm *world, int from, int count) {
    for (int i = from; i < from + count; i++) {
        int64_t sum = i;
        scene_step(s, i);
        CHECK_EQ_INT(xd_all_reduce(world, &sum, &sum, 1, XD_DTYPE_I64, XD_SUM), XD_OK);
        CHECK_EQ_INT(sum, (int64_t)i * s->ranks);
    }
}

static scene *new_scene(xd_comm *world, int cut) {
    scene *s = (scene *)malloc(sizeof *s);
    scene_create(s, xd_comm_ctx(world), xd_comm_rank(world), xd_comm_size(world), cut);
    return s;
}

static void free_scene(scene *s) {
    scene_destroy(s);
    free(s);
}

static void wait_for(job *j, xd_comm *world, xd_checkpoint_saver *saver) {
    bool done = j->form == FORM_THREAD;
    while (!done) {
        done = xd_checkpoint_save_poll(saver);
        if (xd_comm_rank(world) == 0) j->polls++;
    }
    remember(j, world, j->waited, xd_checkpoint_save_wait(saver));
    CHECK(xd_checkpoint_save_poll(saver));
    CHECK_EQ_INT(xd_checkpoint_save_wait(saver), XD_OK); /* its result is told once */
}

static xd_result save_scene(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    scene *s = new_scene(world, j->cut);
    xd_checkpoint_saver *saver = NULL;
    if (j->form == FORM_POLL) take_fork(world);
    const xd_result made =
        j->form == FORM_DIRECT
            ? XD_OK
            : xd_checkpoint_saver_create(world, &(xd_checkpoint_saver_desc){ &s->network, 1 }, &saver);
    if (s->rank == 0) j->made = made;
    if (made != XD_OK) {
        free_scene(s);
        return XD_OK;
    }
    for (int i = 1; i <= STEPS; i++) scene_step(s, i);
    remember(j, world, j->started, start(saver, world, j, s));
    if (saver && j->started[s->rank] == XD_OK) {
        if (!j->gone) train(s, world, STEPS + 1, MORE);
        if (j->gone) free_scene(s);
        s = j->gone ? NULL : s;
        wait_for(j, world, saver);
    }
    if (s && j->repeats) {
        job next = new_job(j->root, j->form);
        next.step = j->step + 1;
        CHECK_EQ_INT(start(saver, world, &next, s), XD_OK);
        CHECK_EQ_INT(xd_checkpoint_save_wait(saver), XD_OK);
    }
    xd_checkpoint_saver_destroy(saver);
    if (s) free_scene(s);
    return XD_OK;
}

static xd_result run(int ranks, xd_rank_function function, job *j) {
    const xd_ctx_desc desc = scene_ctx_desc();
    return xd_run_threads(ranks, &desc, function, j, NULL);
}

/* ---- what is saved ---- */

XD_TEST(a_save_beside_training_has_the_bytes_of_a_direct_one_on_every_layout) {
    static const uint64_t shard_bytes[] = { 0, 300 };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const char *base = new_root(), *one = path_in(base, "one"), *other = path_in(base, "other");
    const char *step_one = path_in(one, "step-7"), *step_other = path_in(other, "step-7");
    for (int shards = 0; shards < 2; shards++) {
        job j = new_job(one, FORM_DIRECT);
        j.shard_bytes = shard_bytes[shards];
        CHECK_EQ_INT(run(1, save_scene, &j), XD_OK);
        CHECK_EQ_INT(j.started[0], XD_OK);
        for (int ranks = 1; ranks <= RANKS_MOST; ranks++)
            for (int cut = 0; cut < SCENE_CUTS; cut++) {
                job k = new_job(other, cut % 3 == 2 ? FORM_POLL : FORM_THREAD);
                k.shard_bytes = j.shard_bytes;
                k.cut = cut;
                k.gone = (ranks + cut) % 2 == 0;
                CHECK_EQ_INT(run(ranks, save_scene, &k), XD_OK);
                for (int r = 0; r < ranks; r++)
                    CHECK_EQ_INT(k.started[r] == XD_OK && k.waited[r] == XD_OK, 1);
                CHECK(k.form == FORM_POLL ? k.polls == 4 : k.polls == 0); /* agree, lay out, write, publish */
                CHECK(compare_directories(ctx, step_one, step_other) >= 7);
                remove_all(other);
            }
        remove_all(one);
    }
    remove_all(base);
    xd_ctx_destroy(ctx);
}

static xd_result load_scene(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene *s = new_scene(world, j->cut);
    char *state = NULL;
    xd_checkpoint_load_desc d;
    scene_fill(s, 99);
    memset(&d, 0, sizeof d);
    d.root = j->root;
    d.step = j->step;
    d.networks = &s->network;
    d.network_count = 1;
    CHECK_EQ_INT(xd_checkpoint_load(world, &d, NULL, &state), XD_OK);
    CHECK_EQ_STR(state, "{\"cursor\": 17}");
    if (j->step == STEP) train(s, world, STEPS + 1, MORE);
    for (int r = 0; r < s->ranks; r++) { /* one after the other: they write the same memory */
        if (r == s->rank) scene_collect(s, j->whole);
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
    }
    xd_release(s->ctx, state);
    free_scene(s);
    return XD_OK;
}

XD_TEST(training_goes_on_from_a_save_beside_it_to_the_bits_of_training_without_one) {
    scene_whole *expected = (scene_whole *)malloc(2 * sizeof *expected);
    const char *root = new_root();
    scene_expected(STEPS + MORE, expected);
    for (int f = FORM_THREAD; f < FORMS; f++) {
        job j = new_job(root, (form)f);
        j.repeats = true;
        CHECK_EQ_INT(run(3, save_scene, &j), XD_OK);
        for (int64_t step = STEP; step <= STEP + 1;
             step++) { /* the second: what came of training beside the first */
            memset(&expected[1], 0, sizeof *expected);
            j.step = step;
            j.cut = 2;
            j.whole = &expected[1];
            CHECK_EQ_INT(run(2, load_scene, &j), XD_OK);
            compare_wholes(&expected[0], &expected[1]);
        }
        remove_all(root);
    }
    free(expected);
}

/* ---- files that wait ---- */

typedef struct gate {
    xd_files real;
    int open, waiting; /* writes that have come to it */
} gate;

static void rest(double seconds) {
    const struct timespec t = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
    nanosleep(&t, NULL);
}

static int gate_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    gate *g = (gate *)user;
    __atomic_add_fetch(&g->waiting, 1, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&g->open, __ATOMIC_ACQUIRE)) rest(1e-3);
    return g->real.write(NULL, file, buffer, bytes, offset);
}

static xd_ctx_desc gate_desc(gate *g) {
    xd_ctx *plain = NULL;
    xd_ctx_desc desc = scene_ctx_desc();
    memset(g, 0, sizeof *g);
    CHECK_EQ_INT(xd_ctx_create(NULL, &plain), XD_OK);
    g->real = xd_ctx_settings(plain)->files;
    xd_ctx_destroy(plain);
    desc.files.write = gate_write;
    desc.files.user = g;
    return desc;
}

static xd_result train_at_a_closed_gate(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    gate *g = (gate *)xd_ctx_settings(xd_comm_ctx(world))->files.user;
    scene *s = new_scene(world, j->cut);
    xd_checkpoint_saver *saver = NULL;
    job other = new_job(j->root, j->form);
    CHECK_EQ_INT(xd_checkpoint_saver_create(world, &(xd_checkpoint_saver_desc){ &s->network, 1 }, &saver),
                 XD_OK);
    CHECK_EQ_INT(start(saver, world, j, s), XD_OK);
    while (s->rank == 0 && __atomic_load_n(&g->waiting, __ATOMIC_RELAXED) == 0) rest(1e-3);
    train(s, world, 1, 50);
    CHECK(!xd_checkpoint_save_poll(saver)); /* it has not written anything yet */
    other.step = STEP + 1;
    CHECK_EQ_INT(start(saver, world, &other, s), XD_ERROR_STATE);
    const char *text = xd_last_error(s->ctx)->message;
    CHECK(strstr(text, "step 8: the save of step 7 was started and has not been waited for"));
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    __atomic_store_n(&g->open, 1, __ATOMIC_RELEASE);
    CHECK_EQ_INT(xd_checkpoint_save_wait(saver), XD_OK);
    CHECK_EQ_INT(start(saver, world, &other, s), XD_OK);
    xd_checkpoint_saver_destroy(saver); /* completes it */
    free_scene(s);
    return XD_OK;
}

XD_TEST(training_does_not_wait_for_files_and_a_second_save_is_refused_meanwhile) {
    gate g;
    const xd_ctx_desc desc = gate_desc(&g);
    xd_ctx *ctx = NULL;
    const char *root = new_root();
    job j = new_job(root, FORM_THREAD);
    CHECK_EQ_INT(xd_run_threads(3, &desc, train_at_a_closed_gate, &j, NULL), XD_OK);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_STR(names_in(ctx, root), "latest step-7 step-8 ");
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, path_in(root, "step-7")), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, path_in(root, "step-8")), XD_OK);
    xd_ctx_destroy(ctx);
    remove_all(root);
}

/* ---- faults ---- */

static xd_result lose_rank_0(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    gate *g = (gate *)xd_ctx_settings(xd_comm_ctx(world))->files.user;
    scene *s = new_scene(world, j->cut);
    xd_checkpoint_saver *saver = NULL;
    int64_t one = 1;
    CHECK_EQ_INT(xd_checkpoint_saver_create(world, &(xd_checkpoint_saver_desc){ &s->network, 1 }, &saver),
                 XD_OK);
    CHECK_EQ_INT(start(saver, world, j, s), XD_OK);
    if (s->rank > 0) { /* rank 0's thread does not come back from its file in time */
        remember(j, world, j->waited, xd_checkpoint_save_wait(saver));
        CHECK_EQ_INT(xd_all_reduce(world, &one, &one, 1, XD_DTYPE_I64, XD_SUM), XD_ERROR_PEER);
        __atomic_add_fetch(&g->waiting, 1000, __ATOMIC_RELEASE);
    } else {
        while (__atomic_load_n(&g->waiting, __ATOMIC_ACQUIRE) < 2000) rest(1e-3);
        __atomic_store_n(&g->open, 1, __ATOMIC_RELEASE);
        remember(j, world, j->waited, xd_checkpoint_save_wait(saver));
        CHECK_EQ_INT(start(saver, world, j, s), XD_ERROR_PEER);
    }
    xd_checkpoint_saver_destroy(saver);
    free_scene(s);
    return XD_OK;
}

XD_TEST(a_rank_that_stays_away_from_a_save_is_named_and_the_older_checkpoint_stays) {
    gate g;
    xd_ctx_desc desc = gate_desc(&g);
    xd_ctx *ctx = NULL;
    const char *root = new_root();
    job j = new_job(root, FORM_DIRECT);
    CHECK_EQ_INT(run(2, save_scene, &j), XD_OK);
    desc.timeout_seconds = 0.2;
    j = new_job(root, FORM_THREAD);
    j.step = STEP + 1;
    CHECK_EQ_INT(xd_run_threads(3, &desc, lose_rank_0, &j, NULL), XD_OK);
    CHECK_EQ_INT(j.waited[0], XD_ERROR_PEER);
    for (int r = 1; r < 3; r++) {
        CHECK(j.waited[r] == XD_ERROR_TIMEOUT || j.waited[r] == XD_ERROR_PEER);
        CHECK_EQ_INT(j.culprit[r], 0);
    }
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_STR(names_in(ctx, root), "latest step-7 ");
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, path_in(root, "step-7")), XD_OK);
    xd_ctx_destroy(ctx);
    remove_all(root);
}

/* ---- what is refused ---- */

static xd_result refuse(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    scene *s = new_scene(world, j->cut);
    xd_checkpoint_saver *saver = NULL;
    xd_checkpoint_network less = s->network;
    less.optimizer = NULL;
    xd_memory_bytes bytes = { 0, 0 }, fewer = { 0, 0 };
    xd_ctx *ctx = s->ctx;
    const xd_checkpoint_saver_desc whole = { &s->network, 1 }, part = { &less, 1 };
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_checkpoint_saver_create(world, &whole, &saver), &bytes), XD_OK);
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_checkpoint_saver_create(world, &part, &saver), &fewer), XD_OK);
    CHECK(fewer.host < bytes.host);
    CHECK_EQ_INT(xd_checkpoint_saver_create(world, &(xd_checkpoint_saver_desc){ &less, -1 }, &saver),
                 XD_ERROR_ARGUMENT);
    CHECK(saver == NULL);
    CHECK_EQ_INT(xd_checkpoint_saver_create(world, &(xd_checkpoint_saver_desc){ &less, 1 }, &saver), XD_OK);
    CHECK_EQ_INT(start(saver, world, j, s), XD_ERROR_STATE);
    unsigned long long needed = 0, room = 0;
    CHECK_EQ_INT(sscanf(xd_last_error(ctx)->message,
                        "step 7: %llu bytes are to be copied, the saver was created for %llu", &needed,
                        &room),
                 2);
    CHECK_EQ_INT(needed - room, bytes.host - fewer.host);
    xd_checkpoint_save_desc d = save_desc(j, &less);
    d.keep = s->rank == 1; /* one rank's own mistake */
    CHECK_EQ_INT(xd_checkpoint_save_start(saver, &d), s->rank == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "keep is 1"));
    CHECK(xd_checkpoint_save_poll(saver));
    d.keep = 0;
    d.step = STEP + s->rank; /* found out together */
    CHECK_EQ_INT(xd_checkpoint_save_start(saver, &d), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save_wait(saver), XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(ctx)->message, "settings of a save: rank 1 passed step = "));
    d.step = STEP;
    CHECK_EQ_INT(xd_checkpoint_save_start(saver, &d), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save_wait(saver), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save_start(saver, &d), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save_wait(saver), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "step-7 exists, and overwrite is false"));
    xd_checkpoint_saver_destroy(saver);
    free_scene(s);
    return XD_OK;
}

XD_TEST(what_a_save_refuses_is_told_by_start_or_wait_on_every_rank) {
    const char *root = new_root();
    job j = new_job(root, FORM_THREAD);
    CHECK_EQ_INT(run(2, refuse, &j), XD_OK);
    remove_all(root);
}

/* ---- each call in turn ---- */

static int64_t newest(xd_ctx *ctx, const char *root) {
    int64_t step = -1;
    return xd_checkpoint_find(ctx, root, &step) == XD_OK ? step : -1;
}

/* The save of a world in a process of its own that is killed at call n, and what its waits say when it is not. */
static int save_to_the_end(job *j, const xd_ctx_desc *desc) {
    const xd_result result = xd_run_threads(2, desc, save_scene, j, NULL);
    bool saved = result == XD_OK;
    for (int r = 0; r < 2; r++) {
        saved = saved && j->started[r] == XD_OK && j->waited[r] == XD_OK;
        if (!saved)
            printf("rank %d of a process: run %d, start %d, wait %d: %s\n", r, (int)result,
                   (int)j->started[r], (int)j->waited[r], j->message[r]);
    }
    fflush(stdout);
    return saved ? 0 : 1;
}

/* Whether call n came. */
static bool killed_at(press *p, job *j, const xd_ctx_desc *desc, long n) {
    int status = 0;
    p->calls = 0;
    p->kills = true;
    p->at = n;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) _exit(save_to_the_end(j, desc));
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    const bool killed = WIFSIGNALED(status);
    CHECK_EQ_INT(killed ? WTERMSIG(status) : WEXITSTATUS(status), killed ? SIGKILL : 0);
    p->at = -1;
    p->kills = false;
    return killed;
}

XD_TEST(a_process_that_is_killed_at_any_call_of_a_save_leaves_a_whole_checkpoint) {
    press p;
    press_start(&p);
    const xd_ctx_desc desc = *xd_ctx_settings(p.ctx);
    const char *root = new_root();
    int seen[2] = { 0, 0 };
    bool met = true;
    for (long n = 0; met && n < 3000; n += n < 110 ? 7 : 1) {
        job j = new_job(root, FORM_DIRECT);
        CHECK_EQ_INT(xd_run_threads(2, &desc, save_scene, &j, NULL), XD_OK);
        j = new_job(root, FORM_THREAD);
        j.step = STEP + 1;
        met = killed_at(&p, &j, &desc, n);
        const int64_t found = newest(p.ctx, root);
        if (!met || found != STEP) CHECK_EQ_INT(found, STEP + 1);
        seen[found == STEP + 1]++;
        CHECK_EQ_INT(xd_checkpoint_verify(p.ctx, path_in(root, "step-7")), XD_OK);
        if (found == STEP + 1) CHECK_EQ_INT(xd_checkpoint_verify(p.ctx, path_in(root, "step-8")), XD_OK);
        remove_all(root);
    }
    CHECK(seen[0] > 10);
    CHECK(seen[1] > 3);
    xd_ctx_destroy(p.ctx);
}

XD_TEST(when_a_call_of_a_save_fails_every_rank_is_told_by_the_wait_and_nothing_is_left) {
    press p;
    press_start(&p);
    const xd_ctx_desc desc = *xd_ctx_settings(p.ctx);
    const char *root = new_root();
    int failed = 0;
    bool met = true;
    for (long n = 0; met && n < 3000; n += 5) {
        job j = new_job(root, FORM_DIRECT);
        CHECK_EQ_INT(xd_run_threads(3, &desc, save_scene, &j, NULL), XD_OK);
        p.calls = 0;
        p.failed = CALL_NONE;
        p.at = n;
        j = new_job(root, FORM_THREAD);
        j.step = STEP + 1;
        CHECK_EQ_INT(xd_run_threads(3, &desc, save_scene, &j, NULL), XD_OK);
        p.at = -1;
        met = p.calls > n;
        for (int r = 0; r < 3; r++) {
            CHECK_EQ_INT(j.started[r], XD_OK);
            CHECK_EQ_INT(j.waited[r] == XD_OK, j.waited[0] == XD_OK);
        }
        const int64_t found = newest(p.ctx, root);
        CHECK(found == STEP + 1 || (found == STEP && j.waited[0] != XD_OK));
        if (found == STEP && p.failed != CALL_REMOVE) CHECK_EQ_STR(names_in(p.ctx, root), "latest step-7 ");
        failed += j.waited[0] != XD_OK;
        remove_all(root);
    }
    CHECK(failed > 20);
    xd_ctx_destroy(p.ctx);
}

/* ---- memory ---- */

typedef struct heap {
    long calls, at; /* the call of all ranks that gets nothing; -1: none */
    int64_t blocks; /* handed out and not returned */
} heap;

static void *heap_allocate(void *user, size_t bytes) {
    heap *h = (heap *)user;
    if (__atomic_fetch_add(&h->calls, 1, __ATOMIC_RELAXED) == h->at) return NULL;
    __atomic_add_fetch(&h->blocks, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void heap_release(void *user, void *memory) {
    __atomic_sub_fetch(&((heap *)user)->blocks, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* From here on one allocation fails. */
static xd_result save_without_memory(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    heap *h = (heap *)xd_ctx_settings(xd_comm_ctx(world))->allocator.user;
    scene *s = new_scene(world, j->cut);
    xd_checkpoint_saver *saver = NULL;
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (s->rank == 0) __atomic_store_n(&h->calls, 0, __ATOMIC_RELAXED);
    if (s->rank == 0) h->at = j->polls;
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    const xd_result made =
        xd_checkpoint_saver_create(world, &(xd_checkpoint_saver_desc){ &s->network, 1 }, &saver);
    remember(j, world, j->started, made == XD_OK ? start(saver, world, j, s) : made);
    if (j->started[s->rank] == XD_OK) remember(j, world, j->waited, xd_checkpoint_save_wait(saver));
    xd_checkpoint_saver_destroy(saver);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (s->rank == 0) j->made = h->calls > h->at ? XD_ERROR_MEMORY : XD_OK;
    if (s->rank == 0) h->at = -1;
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    free_scene(s);
    return XD_OK;
}

XD_TEST(an_allocation_that_fails_is_told_to_every_rank_and_nothing_leaks) {
    heap h;
    xd_ctx_desc desc = scene_ctx_desc();
    const char *root = new_root();
    int failed[2] = { 0, 0 };
    bool met = true;
    memset(&h, 0, sizeof h);
    h.at = -1;
    desc.allocator.allocate = heap_allocate;
    desc.allocator.release = heap_release;
    desc.allocator.user = &h;
    for (int n = 0; met && n < 2000; n++) {
        job j = new_job(root, FORM_THREAD);
        j.polls = n;
        CHECK_EQ_INT(xd_run_threads(2, &desc, save_without_memory, &j, NULL), XD_OK);
        met = j.made != XD_OK;
        CHECK_EQ_INT(j.started[0] == XD_OK, j.started[1] == XD_OK);
        CHECK_EQ_INT(j.waited[0] == XD_OK, j.waited[1] == XD_OK);
        failed[0] += j.started[0] != XD_OK;
        failed[1] += j.waited[0] != XD_OK;
        if (!met) CHECK(j.started[0] == XD_OK && j.waited[0] == XD_OK);
        CHECK_EQ_INT(h.blocks, 0);
        remove_all(root);
    }
    CHECK(!met && failed[0] > 20 && failed[1] > 20);
}

/* ---- weights that are thawed after the saver was made ---- */

/* Saves after the thaw with a saver made before it; the checkpoint has the states of both weights. */
static xd_result save_what_was_thawed(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    uint16_t value[2][40] = { { 0 } };
    float gradient[2][40] = { { 0 } };
    xd_param params[2];
    xd_tensor_part parts[2];
    xd_optimizer *optimizer = NULL;
    xd_checkpoint_saver *saver = NULL;
    xd_checkpoint *saved = NULL;
    memset(params, 0, sizeof params);
    memset(parts, 0, sizeof parts);
    for (int i = 0; i < 2; i++) {
        params[i].name = parts[i].name = i ? "late" : "early";
        params[i].dtype = parts[i].dtype = XD_DTYPE_BF16;
        params[i].count = parts[i].shape[0] = parts[i].range.end = 40;
        params[i].value = parts[i].data = value[i];
        params[i].gradient = gradient[i];
        params[i].replica = parts[i].replica = xd_comm_rank(world) > 0;
        params[i].frozen = i == 1;
        parts[i].ndim = 1;
    }
    xd_optimizer_desc adamw = xd_adamw_defaults(params, 2);
    adamw.reserve_frozen = true;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &adamw, &optimizer), XD_OK);
    xd_checkpoint_network network;
    memset(&network, 0, sizeof network);
    network.parts = parts;
    network.part_count = 2;
    network.optimizer = optimizer;
    const job j = new_job((const char *)argument, FORM_THREAD);
    const xd_checkpoint_save_desc d = save_desc(&j, &network);
    CHECK_EQ_INT(xd_checkpoint_saver_create(world, &(xd_checkpoint_saver_desc){ &network, 1 }, &saver),
                 XD_OK);
    params[1].frozen = false;
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save_start(saver, &d), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save_wait(saver), XD_OK);
    if (xd_comm_rank(world) == 0) { /* the memory of path_in is one for all threads */
        CHECK_EQ_INT(
            xd_checkpoint_open(ctx, &(xd_checkpoint_desc){ .directory = path_in(j.root, "step-7") }, &saved),
            XD_OK);
        CHECK(saved && xd_checkpoint_tensor_find(saved, "optim", "optim.master.late") >= 0);
        xd_checkpoint_close(saved);
    }
    xd_checkpoint_saver_destroy(saver);
    xd_optimizer_destroy(optimizer);
    return XD_OK;
}

XD_TEST(a_saver_has_room_for_the_states_of_weights_that_are_thawed_later) {
    const xd_ctx_desc desc = scene_ctx_desc();
    for (int ranks = 1; ranks <= 2; ranks++) {
        const char *root = new_root();
        CHECK_EQ_INT(xd_run_threads(ranks, &desc, save_what_was_thawed, (void *)(uintptr_t)root, NULL),
                     XD_OK);
        remove_all(root);
    }
}

XD_TEST_MAIN()
