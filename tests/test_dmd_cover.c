/* The leaves of a step have each of its samples once, over all ranks: a step_samples that is not their sum, and a `first` that
 * begins again in each leaf, are refused on every rank, and the same step with the right numbers is that of a run without them. */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h" /* xdi_dmd_bins, for the scene */
#endif

#include "dmd_failures.h"

typedef enum mistake { NO_MISTAKE, HALF_SAMPLES, FIRST_IS_ZERO, FIRST_IS_ZERO_ON_THE_LAST_RANK } mistake;

typedef struct source {
    part *p;
    mistake what;
} source;

static xd_result wrong_batch(void *user, int64_t leaf, xd_dmd_batch *batch) {
    const source *s = (const source *)user;
    XD_TRY(work_batch(s->p, leaf, batch));
    if (s->what == HALF_SAMPLES) batch->samples = 1;
    if (s->what == FIRST_IS_ZERO) batch->first = 0;
    if (s->what == FIRST_IS_ZERO_ON_THE_LAST_RANK && s->p->rank == RANKS - 1) batch->first = 0;
    return XD_OK;
}

static xd_result step_with(part *p, int s, mistake what) {
    source from = { p, what };
    xd_dmd_values values;
    p->batches.step = s;
    return s < WARM_UPS ? xd_dmd_warm_up_step(p->dmd, wrong_batch, &from, &values)
                        : xd_dmd_step(p->dmd, wrong_batch, &from, &values);
}

static xd_result run_mistakes(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    part p;
    char words[80];
    open_part(&p, world, j);
    const int64_t all = p.desc.sizes.step_samples, leaves = all / p.desc.sizes.samples;
    CHECK(p.desc.sizes.samples > 1 && leaves > 1);
    CHECK_EQ_INT(xd_dmd_create(p.ctx, &p.desc, &p.dmd), XD_OK);
    for (int s = 0; s < ALL_STEPS; s++) {
        if (s <= WARM_UPS) { /* later ones train on the samples that the student has generated: two a leaf */
            CHECK_EQ_INT(step_with(&p, s, HALF_SAMPLES), XD_ERROR_ARGUMENT);
            snprintf(words, sizeof words, "step_samples is %d, the micro-batches of all ranks have %d",
                     (int)all, (int)leaves);
            CHECK(strstr(xd_last_error(p.ctx)->message, words) != NULL);
        }
        for (int k = FIRST_IS_ZERO; k <= FIRST_IS_ZERO_ON_THE_LAST_RANK; k++) {
            CHECK_EQ_INT(step_with(&p, s, (mistake)k), XD_ERROR_ARGUMENT);
            CHECK(strstr(xd_last_error(p.ctx)->message, "begin at samples 0 and 0") != NULL);
        }
        CHECK_EQ_INT(make_step(&p, s), XD_OK);
    }
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

static xd_result run_right(xd_comm *world, void *argument) {
    part p;
    open_part(&p, world, (job *)argument);
    CHECK_EQ_INT(xd_dmd_create(p.ctx, &p.desc, &p.dmd), XD_OK);
    for (int s = 0; s < ALL_STEPS; s++) CHECK_EQ_INT(make_step(&p, s), XD_OK);
    note_end(&p);
    close_part(&p);
    return XD_OK;
}

XD_TEST(samples_that_are_not_those_of_the_step_are_refused_and_the_step_is_made_the_next_time) {
    const xd_ctx_desc desc = heap_desc(XD_REDUCTION_INVARIANT);
    job *right = new_job(false, false), *wrong = new_job(false, false);
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, run_right, right, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, run_mistakes, wrong, NULL), XD_OK);
    CHECK(right->run.hash != 0 && same_end(&right->run, &wrong->run));
    free(right);
    free(wrong);
}

XD_TEST_MAIN()
