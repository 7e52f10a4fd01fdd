/* The record of a distillation, its text and its checkpoint, of which anything fails: each request for memory, and each call of a file,
 * which may also be the last of its process. On disk is the older run or the newer one, whole, and the next save leaves nothing
 * but checkpoints. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, kill */
#endif

#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif

#include "checkpoint_files.h"
#include "dmd_failures.h"
#include "press_files.h"

#include <sys/wait.h>

/* ---- the text ---- */

/* A save and a load of the text, into one that stands at its beginning. */
static xd_result save_and_load(part *from, part *to) {
    char *text = NULL;
    XD_TRY(xd_dmd_state_save(from->dmd, &text));
    const xd_result result = xd_dmd_state_load(to->dmd, text, NULL);
    xd_release(from->ctx, text);
    return result;
}

static bool stands_alike(const part *a, const part *b) {
    const xd_dmd_record one = xd_dmd_describe(a->dmd), other = xd_dmd_describe(b->dmd);
    double bins[2][BINS];
    CHECK_EQ_INT(xdi_dmd_bins(a->dmd, bins[0]), XD_OK);
    CHECK_EQ_INT(xdi_dmd_bins(b->dmd, bins[1]), XD_OK);
    return memcmp(&one, &other, sizeof one) == 0 && memcmp(bins[0], bins[1], sizeof bins[0]) == 0;
}

static xd_result text_with_failures(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part from, to, fresh;
    part *const parts[] = { &from, &to, &fresh };
    for (int i = 0; i < 3; i++) {
        open_part(parts[i], world, j);
        CHECK_EQ_INT(xd_dmd_create(parts[i]->ctx, &parts[i]->desc, &parts[i]->dmd), XD_OK);
    }
    for (int s = 0; s < ALL_STEPS; s++) CHECK_EQ_INT(make_step(&from, s), XD_OK);
    for (int64_t n = 1; n < MOST; n++) {
        const int64_t live = heap_live;
        heap_fails_in = n;
        const xd_result result = save_and_load(&from, &to);
        heap_fails_in = 0;
        CHECK_EQ_INT(heap_live, live);
        if (result == XD_OK) break;
        CHECK_EQ_INT(result, XD_ERROR_MEMORY);
        CHECK(stands_alike(&to, &fresh));
        j->failures++;
    }
    CHECK(stands_alike(&to, &from) && !stands_alike(&to, &fresh));
    for (int i = 0; i < 3; i++) close_part(parts[i]);
    return XD_OK;
}

XD_TEST(a_state_whose_text_could_not_be_made_or_read_has_changed_nothing) {
    const xd_ctx_desc desc = heap_desc(XD_REDUCTION_INVARIANT);
    job *j = new_job(false, false);
    CHECK_EQ_INT(xd_run_threads(1, &desc, text_with_failures, j, NULL), XD_OK);
    CHECK_EQ_INT(heap_live, 0);
    CHECK(j->failures > 3);
    free(j);
}

/* ---- checkpoints: three networks, optimizers, averages, bins and counters ---- */

static xd_result save_part(part *p, const char *root, int64_t step) {
    xd_checkpoint_network networks[XD_DMD_TEACHER];
    xd_checkpoint_average averages[XD_DMD_TEACHER];
    xd_checkpoint_save_desc save = { .root = root, .step = step, .networks = networks };
    char *text = NULL;
    save.network_count = dmd_records(p->nets, networks, averages);
    xd_result result = xd_agree(p->world, xd_dmd_state_save(p->dmd, &text));
    save.state = text;
    if (result == XD_OK) result = xd_checkpoint_save(p->world, &save);
    xd_release(p->ctx, text);
    return result;
}

static xd_result load_part(part *p, const char *root) {
    xd_checkpoint_network networks[XD_DMD_TEACHER];
    xd_checkpoint_average averages[XD_DMD_TEACHER];
    xd_checkpoint_load_desc load = { .root = root, .step = XD_CHECKPOINT_NEWEST, .networks = networks };
    char *text = NULL;
    load.network_count = dmd_records(p->nets, networks, averages);
    XD_TRY(xd_checkpoint_load(p->world, &load, NULL, &text));
    const xd_result result = xd_agree(p->world, xd_dmd_state_load(p->dmd, text, NULL));
    xd_release(p->ctx, text);
    for (int role = 0; role < XD_DMD_TEACHER && result == XD_OK; role++)
        XD_TRY(xd_parallel_publish(p->nets[role].parallel));
    return result;
}

static void begin_part(part *p, xd_comm *world, job *j) {
    open_part(p, world, j);
    CHECK_EQ_INT(xd_dmd_create(p->ctx, &p->desc, &p->dmd), XD_OK);
}

static int64_t newest(xd_ctx *ctx, const char *root) {
    int64_t step = -1;
    return xd_checkpoint_find(ctx, root, &step) == XD_OK ? step : -1;
}

/* Checkpoint 1 is there; 2 is saved until no request is left to fail. */
static void save_with_failures(part *p, job *j) {
    bool over = false;
    for (int64_t n = 1; n < MOST && !over; n++) {
        fail_in(p, j, n);
        over = note_result(p, j, n, save_part(p, j->root, 2));
        if (p->rank == 0) {
            CHECK_EQ_INT(newest(p->ctx, j->root), over ? 2 : 1);
            CHECK_EQ_INT(xd_checkpoint_verify(p->ctx, path_in(j->root, over ? "step-2" : "step-1")), XD_OK);
            CHECK_EQ_STR(names_in(p->ctx, j->root), over ? "latest step-1 step-2 " : "latest step-1 ");
        }
    }
    CHECK(over);
}

/* Into one at its beginning. What the files hold is there whole or not at all; counters and bins, which a rank reads by itself, are
 * not there on the one that failed. */
static void load_with_failures(part *p, const part *fresh, job *j, const uint64_t *saved) {
    bool over = false;
    CHECK_EQ_INT(dmd_hash_all(p->world, p->nets, &j->run), XD_OK);
    const uint64_t before = p->rank == 0 ? j->run.hash : 0;
    for (int64_t n = 1; n < MOST && !over; n++) {
        fail_in(p, j, n);
        over = note_result(p, j, n, load_part(p, j->root));
        CHECK_EQ_INT(dmd_hash_all(p->world, p->nets, &j->run), XD_OK);
        if (p->rank == 0) CHECK(j->run.hash == *saved || (!over && j->run.hash == before));
        if (!over && p->rank == j->victim) CHECK(stands_alike(p, fresh));
    }
    CHECK(over);
}

static xd_result record_with_failures(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part from, to, fresh;
    begin_part(&from, world, j);
    begin_part(&to, world, j);
    begin_part(&fresh, world, j);
    CHECK_EQ_INT(save_part(&from, j->root, 1), XD_OK);
    for (int s = 0; s < ALL_STEPS; s++) CHECK_EQ_INT(make_step(&from, s), XD_OK);
    save_with_failures(&from, j);
    note_end(&from);
    const uint64_t saved = from.rank == 0 ? j->run.hash : 0;
    load_with_failures(&to, &fresh, j, &saved);
    CHECK(stands_alike(&to, &from) && !stands_alike(&to, &fresh));
    close_part(&from);
    close_part(&to);
    close_part(&fresh);
    return XD_OK;
}

XD_TEST(a_record_is_saved_and_loaded_whole_or_not_at_all_whatever_request_for_memory_fails) {
    const xd_ctx_desc desc = heap_desc(XD_REDUCTION_INVARIANT);
    const char *root = new_root();
    for (int victim = 0; victim < RANKS; victim++) {
        job *j = new_job(false, victim == 1);
        j->victim = victim;
        j->root = root;
        CHECK_EQ_INT(xd_run_threads(RANKS, &desc, record_with_failures, j, NULL), XD_OK);
        CHECK_EQ_INT(heap_live, 0);
        printf("%lld failures of rank %d\n", (long long)j->failures, victim);
        CHECK(j->failures > 40);
        remove_all(root);
        free(j);
    }
}

/* ---- files ---- */

/* What all ranks are to do with files of which one call fails, or is the last. */
typedef struct filing {
    job *job;
    press files;
    xd_ctx_desc desc;
    int64_t step; /* of the checkpoint that is saved; a distillation has two steps before each */
    long call;    /* -1: none */
    bool kills, met;
} filing;

static filing *new_filing(const char *root) {
    filing *f = (filing *)calloc(1, sizeof *f);
    f->desc = press_desc(&f->files);
    f->desc.allocator = heap_desc(XD_REDUCTION_INVARIANT).allocator;
    f->desc.reduction = XD_REDUCTION_INVARIANT;
    f->job = new_job(false, true);
    f->job->root = root;
    return f;
}

static void end_filing(filing *f) {
    free(f->job);
    free(f);
}

/* From here on, or up to here, a call of a file may fail. */
static void press_now(const part *p, filing *f, bool on) {
    CHECK_EQ_INT(xd_barrier(p->world), XD_OK);
    if (p->rank == 0 && on) f->files.calls = 0;
    if (p->rank == 0 && on) f->files.kills = f->kills;
    if (p->rank == 0 && !on) f->met = f->call >= 0 && f->files.calls > f->call;
    if (p->rank == 0) f->files.at = on ? f->call : -1;
    CHECK_EQ_INT(xd_barrier(p->world), XD_OK);
}

/* ---- a process that ends ---- */

static xd_result go_on_and_save(xd_comm *world, void *argument) {
    filing *f = (filing *)argument;
    part p;
    begin_part(&p, world, f->job);
    if (f->step > 1) CHECK_EQ_INT(load_part(&p, f->job->root), XD_OK);
    while (xd_dmd_describe(p.dmd).step < 2 * f->step)
        CHECK_EQ_INT(make_step(&p, WARM_UPS + (int)xd_dmd_describe(p.dmd).step), XD_OK);
    press_now(&p, f, true);
    CHECK_EQ_INT(save_part(&p, f->job->root, f->step), XD_OK);
    press_now(&p, f, false);
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

static xd_result look(xd_comm *world, void *argument) {
    filing *f = (filing *)argument;
    part p;
    begin_part(&p, world, f->job);
    CHECK_EQ_INT(load_part(&p, f->job->root), XD_OK);
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

/* All ranks' job; the hash of what they had in the end. */
static uint64_t run_filing(filing *f, xd_result (*ranks)(xd_comm *world, void *argument), int64_t step,
                           long n) {
    f->step = step;
    f->call = n;
    CHECK_EQ_INT(xd_run_threads(RANKS, &f->desc, ranks, f, NULL), XD_OK);
    CHECK_EQ_INT(heap_live, 0);
    return f->job->run.hash;
}

/* The save of step 2 as a process that is killed at its call n; whether that call came. */
static bool run_killed(filing *f, long n) {
    int status = 0;
    f->kills = true;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        run_filing(f, go_on_and_save, 2, n);
        _exit(xd_test_failures != 0);
    }
    f->kills = false;
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) || status == 0);
    return WIFSIGNALED(status);
}

/* Step 1 is there, and a save of 2 is killed; which of them there is afterwards. */
static int64_t check_killed(filing *f, xd_ctx *ctx, long n, const uint64_t *hashes, bool *met) {
    CHECK(run_filing(f, go_on_and_save, 1, -1) == hashes[1]);
    *met = run_killed(f, n);
    const int64_t found = newest(ctx, f->job->root);
    CHECK(found == 2 || (found == 1 && *met));
    if (found != 1 && found != 2) return 0;
    CHECK(run_filing(f, look, 0, -1) == hashes[found]);
    CHECK_EQ_INT(f->job->run.record.step, 2 * found);
    CHECK(run_filing(f, go_on_and_save, 3, -1) == hashes[3]); /* from either */
    CHECK_EQ_STR(names_in(ctx, f->job->root),
                 found == 1 ? "latest step-1 step-3 " : "latest step-1 step-2 step-3 ");
    remove_all(f->job->root);
    return found;
}

XD_TEST(a_run_that_is_killed_at_any_call_of_a_save_goes_on_from_the_older_or_the_newer_one_to_the_same_bits) {
    const char *root = new_root();
    filing *f = new_filing(root);
    xd_ctx *ctx = NULL;
    uint64_t hashes[4] = { 0 };
    int seen[3] = { 0, 0, 0 };
    bool met = true;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int64_t step = 1; step <= 3; step++) hashes[step] = run_filing(f, go_on_and_save, step, -1);
    CHECK(hashes[1] != hashes[2] && hashes[2] != hashes[3]);
    remove_all(root);
    for (long n = 0; met && n < MOST; n += n < 140 ? 9 : 4) seen[check_killed(f, ctx, n, hashes, &met)]++;
    printf("killed %d times: %d times the older one, %d times the newer one\n", seen[1] + seen[2], seen[1],
           seen[2]);
    CHECK(seen[0] == 0 && seen[1] > 10 && seen[2] > 2);
    xd_ctx_destroy(ctx);
    end_filing(f);
}

/* ---- calls that fail ---- */

/* Whether the newer one is there after a save; rank 0 alone looks, and takes it away for the next one. */
static void check_failed_save(const part *p, filing *f, xd_result result) {
    const bool told = strstr(xd_last_error(p->ctx)->message, "is complete") != NULL;
    const char *root = f->job->root;
    const int64_t found = newest(p->ctx, root);
    CHECK_EQ_INT(found, result == XD_OK || told ? 2 : 1);
    CHECK_EQ_INT(xd_checkpoint_verify(p->ctx, path_in(root, "step-1")), XD_OK);
    if (found == 2) CHECK_EQ_INT(xd_checkpoint_verify(p->ctx, path_in(root, "step-2")), XD_OK);
    if (f->files.failed != CALL_REMOVE) /* it has cleared up itself, and what an earlier one has left */
        CHECK_EQ_STR(names_in(p->ctx, root), found == 2 ? "latest step-1 step-2 " : "latest step-1 ");
    f->job->failures += result != XD_OK;
    if (found == 2) remove_all(path_in(root, "step-2"));
}

static xd_result save_at_each_call(xd_comm *world, void *argument) {
    filing *f = (filing *)argument;
    part p;
    begin_part(&p, world, f->job);
    CHECK_EQ_INT(save_part(&p, f->job->root, 1), XD_OK);
    for (int s = 0; s < ALL_STEPS; s++) CHECK_EQ_INT(make_step(&p, s), XD_OK);
    for (long n = 0; f->met && n < MOST; n++) {
        if (p.rank == 0) f->call = n;
        press_now(&p, f, true);
        const xd_result result = f->job->results[p.rank] = save_part(&p, f->job->root, 2);
        press_now(&p, f, false);
        if (p.rank == 0) check_failed_save(&p, f, result);
        CHECK_EQ_INT(f->job->results[1 - p.rank] == XD_OK, result == XD_OK);
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
    }
    CHECK(!f->met);
    close_part(&p);
    return XD_OK;
}

XD_TEST(a_save_of_which_any_call_fails_is_an_error_of_all_ranks_and_leaves_the_older_run_or_the_newer_one) {
    const char *root = new_root();
    filing *f = new_filing(root);
    f->met = true;
    CHECK_EQ_INT(xd_run_threads(RANKS, &f->desc, save_at_each_call, f, NULL), XD_OK);
    CHECK_EQ_INT(heap_live, 0);
    printf("%ld calls: %lld failures\n", f->call, (long long)f->job->failures);
    CHECK(f->job->failures > 100);
    remove_all(root);
    end_filing(f);
}

static xd_result load_at_each_call(xd_comm *world, void *argument) {
    filing *f = (filing *)argument;
    part from, to, fresh;
    begin_part(&from, world, f->job);
    begin_part(&to, world, f->job);
    begin_part(&fresh, world, f->job);
    for (int s = 0; s < ALL_STEPS; s++) CHECK_EQ_INT(make_step(&from, s), XD_OK);
    CHECK_EQ_INT(save_part(&from, f->job->root, 1), XD_OK);
    note_end(&from);
    const uint64_t saved = from.rank == 0 ? f->job->run.hash : 0;
    for (long n = 0; f->met && n < MOST; n++) {
        if (to.rank == 0) f->call = n;
        press_now(&to, f, true);
        const xd_result result = f->job->results[to.rank] = load_part(&to, f->job->root);
        press_now(&to, f, false);
        CHECK_EQ_INT(f->job->results[1 - to.rank] == XD_OK, result == XD_OK);
        if (result != XD_OK && f->job->failures == n) CHECK(stands_alike(&to, &fresh)); /* none succeeded */
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
        if (to.rank == 0) f->job->failures += result != XD_OK;
    }
    note_end(&to);
    if (to.rank == 0) CHECK(f->job->run.hash == saved);
    CHECK(stands_alike(&to, &from) && !stands_alike(&to, &fresh));
    close_part(&from);
    close_part(&to);
    close_part(&fresh);
    return XD_OK;
}

XD_TEST(a_load_of_which_any_call_fails_is_an_error_of_all_ranks_and_succeeds_the_next_time) {
    const char *root = new_root();
    filing *f = new_filing(root);
    f->met = true;
    CHECK_EQ_INT(xd_run_threads(RANKS, &f->desc, load_at_each_call, f, NULL), XD_OK);
    CHECK_EQ_INT(heap_live, 0);
    printf("%ld calls: %lld failures\n", f->call, (long long)f->job->failures);
    CHECK(!f->met && f->job->failures > 40);
    remove_all(root);
    end_filing(f);
}

XD_TEST_MAIN()
