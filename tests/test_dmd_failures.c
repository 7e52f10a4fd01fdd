/* A distillation of which each request for memory fails in turn: while it is made, in each of its steps and in each of its terms. All
 * ranks are told, nobody waits, nothing leaks, and what failed can be done again, to the same bits.
 * test_dmd_record_failures.c has its text and its checkpoints. */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif

#include "dmd_failures.h"

/* The whole run, of which nothing fails. */
static xd_result run_whole(xd_comm *world, void *argument) {
    part p;
    open_part(&p, world, (job *)argument);
    CHECK_EQ_INT(xd_dmd_create(p.ctx, &p.desc, &p.dmd), XD_OK);
    for (int s = 0; s < ALL_STEPS; s++) CHECK_EQ_INT(make_step(&p, s), XD_OK);
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

static void run_job(job *j, xd_result (*ranks)(xd_comm *world, void *argument)) {
    const xd_ctx_desc desc = heap_desc(XD_REDUCTION_INVARIANT);
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, ranks, j, NULL), XD_OK);
    CHECK_EQ_INT(heap_live, 0);
}

static job *new_undisturbed(bool fsdp) {
    job *j = new_job(false, fsdp);
    run_job(j, run_whole);
    CHECK(j->run.hash != 0 && j->run.values[ALL_STEPS - 2].vsd > 0.0 && j->run.values[0].regression > 0.0);
    for (int k = 0; k < BINS; k++) CHECK(j->run.bins[k] > 0.0);
    return j;
}

/* ---- making ---- */

static xd_result make_with_failures(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part p;
    bool over = false;
    open_part(&p, world, j);
    CHECK_EQ_INT(dmd_hash_all(world, p.nets, &j->run), XD_OK);
    const uint64_t before = p.rank == 0 ? j->run.hash : 0;
    for (int64_t n = 1; n < MOST && !over; n++) {
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
        const int64_t live = heap_live;
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
        fail_in(&p, j, n);
        over = note_result(&p, j, n, xd_dmd_create(p.ctx, &p.desc, &p.dmd));
        CHECK(over == (p.dmd != NULL));
        if (!over) CHECK_EQ_INT(heap_live, live);
    }
    CHECK_EQ_INT(dmd_hash_all(world, p.nets, &j->run), XD_OK);
    if (p.rank == 0) CHECK(j->run.hash == before);
    for (int s = 0; s < ALL_STEPS; s++) CHECK_EQ_INT(make_step(&p, s), XD_OK);
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

XD_TEST(a_distillation_that_could_not_be_made_has_touched_nothing_and_is_made_the_next_time) {
    for (int fsdp = 0; fsdp < 2; fsdp++) {
        job *whole = new_undisturbed(fsdp != 0);
        for (int victim = 0; victim < RANKS; victim++) {
            job *j = new_job(false, fsdp != 0);
            j->victim = victim;
            run_job(j, make_with_failures);
            CHECK(j->failures >= 2);
            CHECK(same_end(&j->run, &whole->run));
            free(j);
        }
        free(whole);
    }
}

/* ---- steps ---- */

/* The first request of any step would fail: there is none. */
static xd_result step_without_memory(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part p;
    open_part(&p, world, j);
    CHECK_EQ_INT(xd_dmd_create(p.ctx, &p.desc, &p.dmd), XD_OK);
    const int64_t asked = heap_asked;
    for (int s = 0; s < ALL_STEPS; s++) {
        fail_in(&p, j, 1);
        CHECK_EQ_INT(make_step(&p, s), XD_OK);
        heap_fails_in = 0;
    }
    CHECK_EQ_INT(heap_asked, asked);
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

XD_TEST(steps_ask_for_no_memory_on_any_rank) {
    for (int fsdp = 0; fsdp < 2; fsdp++) {
        job *whole = new_undisturbed(fsdp != 0);
        for (int victim = 0; victim < RANKS; victim++) {
            job *j = new_job(false, fsdp != 0);
            j->victim = victim;
            run_job(j, step_without_memory);
            CHECK(same_end(&j->run, &whole->run));
            free(j);
        }
        free(whole);
    }
}

/* What this rank has of the weights and of their moments. */
static uint64_t hash_here(const part *p) {
    uint64_t hash = 0;
    for (int role = 0; role < XD_DMD_TEACHER; role++)
        for (int64_t i = 0; i < p->nets[role].count; i++) {
            const xd_param *param = &p->nets[role].params[i];
            const xd_optimizer_state state = xd_optimizer_state_at(p->nets[role].optimizer, i);
            const size_t bytes = (size_t)param->count * sizeof(float);
            hash = xd_hash(hash, param->value, bytes);
            hash = xd_hash(hash, state.exp_avg_sq, bytes);
            hash = xd_hash(hash, state.step, sizeof *state.step);
        }
    return hash;
}

/* One step, until it succeeds. After each failure all is as it was. */
static void step_with_failures(part *p, job *j, int s) {
    const xd_dmd_record record = xd_dmd_describe(p->dmd);
    double bins[BINS], now[BINS];
    bool over = false;
    CHECK_EQ_INT(xdi_dmd_bins(p->dmd, bins), XD_OK);
    const uint64_t before = hash_here(p);
    for (int64_t n = 1; n < MOST && !over; n++) {
        fail_in(p, j, n);
        over = note_result(p, j, n, make_step(p, s));
        if (over) break;
        const xd_dmd_record after = xd_dmd_describe(p->dmd);
        CHECK(memcmp(&record, &after, sizeof record) == 0);
        CHECK_EQ_INT(xdi_dmd_bins(p->dmd, now), XD_OK);
        CHECK(memcmp(bins, now, sizeof bins) == 0);
        CHECK(hash_here(p) == before);
    }
    CHECK(over);
}

static xd_result steps_with_failures(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part p;
    open_part(&p, world, j);
    CHECK_EQ_INT(xd_dmd_create(p.ctx, &p.desc, &p.dmd), XD_OK);
    for (int s = 0; s < ALL_STEPS; s++) step_with_failures(&p, j, s);
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

XD_TEST(a_step_whose_networks_or_batches_fail_has_changed_nothing_and_can_be_made_again_to_the_same_bits) {
    job *whole = new_undisturbed(false);
    for (int victim = 0; victim < RANKS; victim++) {
        job *j = new_job(true, false);
        j->victim = victim;
        run_job(j, steps_with_failures);
        printf("%lld failures of rank %d\n", (long long)j->failures, victim);
        CHECK(j->failures > 200);
        CHECK(same_end(&j->run, &whole->run));
        free(j);
    }
    free(whole);
}

/* Under FSDP the others may be in a gather: every rank has an error, and that is the end of their world. */
static xd_result steps_of_parts(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part p;
    xd_result result = XD_OK;
    open_part(&p, world, j);
    CHECK_EQ_INT(xd_dmd_create(p.ctx, &p.desc, &p.dmd), XD_OK);
    fail_in(&p, j, j->at);
    for (int s = 0; s < ALL_STEPS && result == XD_OK; s++) result = make_step(&p, s);
    heap_fails_in = 0;
    j->results[p.rank] = result;
    close_part(&p);
    return XD_OK;
}

XD_TEST(a_step_of_sharded_networks_that_fail_is_an_error_of_every_rank) {
    for (int victim = 0; victim < RANKS; victim++) {
        bool over = false;
        int64_t n = 1;
        for (; n < MOST && !over; n += 11) {
            job *j = new_job(true, true);
            j->victim = victim;
            j->at = n;
            run_job(j, steps_of_parts);
            over = j->results[victim] == XD_OK;
            CHECK_EQ_INT(j->results[victim], over ? XD_OK : XD_ERROR_MEMORY);
            CHECK_EQ_INT(j->results[1 - victim] == XD_OK, over);
            free(j);
        }
        CHECK(over && n > 200);
    }
}

/* ---- terms, for a loop of one's own ---- */

enum { TERMS = 5 };

static xd_result make_term(part *p, int term, int64_t leaf, xd_dmd_values *values) {
    xd_dmd_batch batch;
    memset(&batch, 0, sizeof batch);
    XD_TRY(work_batch(p, leaf, &batch));
    if (term == 0) return xdi_dmd_warm_up(p->dmd, leaf, &batch, values);
    if (term == 1) return xdi_dmd_collect_ratios(p->dmd, leaf, &batch);
    if (term == 2) return xd_dmd_student(p->dmd, leaf, &batch, values);
    if (term == 3) return xd_dmd_fake_score(p->dmd, leaf, &batch, values);
    return xd_dmd_discriminator(p->dmd, leaf, &batch, values);
}

/* All leaves of a term; the student's have their weights by then. */
static xd_result make_terms(part *p, int term, xd_dmd_values *values) {
    memset(values, 0, sizeof *values);
    for (int64_t leaf = 0; leaf < DMD_LEAVES; leaf++) XD_TRY(make_term(p, term, leaf, values));
    return term == 1 ? xdi_dmd_weigh(p->dmd) : XD_OK;
}

/* The caller's loop gives up what it has added up: a sum ends all leaves of a role or drops those of a part, and
 * xd_parallel_publish ends the step. */
static void drop_terms(part *p) {
    for (int role = 0; role < XD_DMD_TEACHER; role++) {
        const xd_result result = xd_parallel_reduce(p->nets[role].parallel);
        CHECK(result == XD_OK || result == XD_ERROR_STATE);
        CHECK_EQ_INT(xd_parallel_publish(p->nets[role].parallel), XD_OK);
    }
}

/* A term until it succeeds. A student's that failed needs new weights, as each is good for one call. */
static void term_with_failures(part *p, job *j, int term, xd_dmd_values *values) {
    bool over = false;
    for (int64_t n = 1; n < MOST && !over; n++) {
        double bins[BINS];
        xd_dmd_values unused;
        CHECK_EQ_INT(xdi_dmd_bins(p->dmd, bins), XD_OK);
        if (term == 2) CHECK_EQ_INT(make_terms(p, 1, &unused), XD_OK);
        heap_fails_in = n;
        const xd_result result = make_terms(p, term, values);
        heap_fails_in = 0;
        over = result == XD_OK;
        CHECK_EQ_INT(result, over ? XD_OK : XD_ERROR_MEMORY);
        j->failures += !over;
        drop_terms(p);
        if (term == 2 || (term == 1 && over)) CHECK_EQ_INT(xdi_dmd_set_bins(p->dmd, bins, BINS), XD_OK);
    }
    CHECK(over);
}

static xd_result terms_with_failures(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part p;
    xd_dmd_values unused, calm[TERMS], pressed[TERMS];
    open_part(&p, world, j);
    CHECK_EQ_INT(xd_dmd_create(p.ctx, &p.desc, &p.dmd), XD_OK);
    for (int term = 0; term < TERMS; term++) {
        double bins[BINS];
        CHECK_EQ_INT(xdi_dmd_bins(p.dmd, bins), XD_OK);
        if (term == 2) CHECK_EQ_INT(make_terms(&p, 1, &unused), XD_OK);
        CHECK_EQ_INT(make_terms(&p, term, &calm[term]), XD_OK);
        drop_terms(&p);
        CHECK_EQ_INT(xdi_dmd_set_bins(p.dmd, bins, BINS), XD_OK);
    }
    for (int term = 0; term < TERMS; term++) term_with_failures(&p, j, term, &pressed[term]);
    CHECK(memcmp(calm, pressed, sizeof calm) == 0);
    CHECK(calm[0].regression > 0.0 && calm[2].generator > 0.0 && calm[3].fake_score > 0.0 &&
          calm[4].r1 > 0.0);
    close_part(&p);
    return XD_OK;
}

XD_TEST(each_term_may_fail_at_each_request_and_has_its_value_the_next_time) {
    const xd_ctx_desc desc = heap_desc(XD_REDUCTION_INVARIANT);
    job *j = new_job(true, false);
    CHECK_EQ_INT(xd_run_threads(1, &desc, terms_with_failures, j, NULL), XD_OK);
    CHECK_EQ_INT(heap_live, 0);
    CHECK(j->failures > 200);
    free(j);
}

XD_TEST_MAIN()
