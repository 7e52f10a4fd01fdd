/* f-distill within a distillation: weights of a whole step by hand, bins over steps, layouts, what is skipped and refused. */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/fdistill.h"
#    include "dmd/state.h"
#endif

#include "dmd_scene.h"
#include "planned.h"

enum { ROWS = DMD_LEAVES * DMD_IN_LEAF, BINS = 4 };

/* ---- a loop of one's own, watched ---- */

typedef struct watch {
    dmd_net nets[XD_DMD_ROLES];
    float logits[ROWS * DMD_HEADS], gradient[ROWS * DMD_ELEMENTS];
    double times[ROWS];
    int seen, pulled;
    bool look;
} watch;

static xd_result watch_teacher(void *user, const xd_network_call *call) {
    watch *w = (watch *)user;
    for (int64_t i = 0; i < call->samples && w->look; i++) w->times[w->seen + i] = call->times[i];
    return dmd_forward(&w->nets[XD_DMD_TEACHER], call);
}

static xd_result watch_teacher_backward(void *user, const xd_network_call *call) {
    return dmd_backward(&((watch *)user)->nets[XD_DMD_TEACHER], call);
}

static xd_result watch_judge(void *user, const xd_network_call *call) {
    watch *w = (watch *)user;
    XD_TRY(dmd_judge_forward(&w->nets[XD_DMD_DISCRIMINATOR], call));
    if (!w->look) return XD_OK;
    memcpy(w->logits + w->seen * DMD_HEADS, call->raw, (size_t)call->samples * DMD_HEADS * sizeof(float));
    w->seen += (int)call->samples;
    return XD_OK;
}

static xd_result watch_judge_backward(void *user, const xd_network_call *call) {
    return dmd_judge_backward(&((watch *)user)->nets[XD_DMD_DISCRIMINATOR], call);
}

static xd_result watch_student(void *user, const xd_network_call *call) {
    return dmd_forward(&((watch *)user)->nets[XD_DMD_STUDENT], call);
}

static xd_result watch_student_backward(void *user, const xd_network_call *call) {
    watch *w = (watch *)user;
    memcpy(w->gradient + w->pulled * DMD_ELEMENTS, call->raw_gradient,
           (size_t)call->samples * DMD_ELEMENTS * sizeof(float));
    w->pulled += (int)call->samples;
    return dmd_backward(&w->nets[XD_DMD_STUDENT], call);
}

static xd_result watch_make(watch *w, xd_comm *world, xd_dmd_desc *d) {
    const dmd_run run = { .gan = true };
    memset(w, 0, sizeof *w);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        XD_TRY(dmd_make_net(&w->nets[role], world, (xd_dmd_role)role, &run, NULL));
        d->networks[role] = dmd_network(&w->nets[role], (xd_dmd_role)role);
        d->trainers[role] = (xd_dmd_trainer){ .parallel = w->nets[role].parallel };
        if (role != XD_DMD_FAKE_SCORE) d->networks[role].user = w;
    }
    d->networks[XD_DMD_TEACHER].forward = watch_teacher;
    d->networks[XD_DMD_TEACHER].backward = watch_teacher_backward;
    d->networks[XD_DMD_DISCRIMINATOR].forward = watch_judge;
    d->networks[XD_DMD_DISCRIMINATOR].backward = watch_judge_backward;
    d->networks[XD_DMD_STUDENT].forward = watch_student;
    d->networks[XD_DMD_STUDENT].backward = watch_student_backward;
    return XD_OK;
}

static xd_dmd_desc watched_settings(int variant, bool on) {
    xd_dmd_desc d = dmd_settings(XD_DMD_MODELOPT, 1);
    d.gan.weight = 1e-30; /* what the student is given is the term of matching */
    xd_dmd_fdistill *f = &d.gan.fdistill;
    f->on = on;
    f->divergence = (xd_f_divergence)(variant % 7);
    f->bins = variant & 1 ? BINS : 0;
    f->rate = 0.25;
    f->lower = 0.5; /* ratios of such a small discriminator are near 1 */
    return d;
}

static xd_result watched_students(watch *w, xd_dmd *dmd, bool on, double *vsd) {
    xd_dmd_batch batch = { .samples = DMD_IN_LEAF };
    w->look = true;
    for (int64_t k = 0; k < DMD_LEAVES && on; k++) {
        batch.first = k * DMD_IN_LEAF;
        XD_TRY(xdi_dmd_collect_ratios(dmd, k, &batch));
    }
    w->look = false;
    if (on) XD_TRY(xdi_dmd_weigh(dmd));
    for (int64_t k = 0; k < DMD_LEAVES; k++) {
        xd_dmd_values values = { 0 };
        batch.first = k * DMD_IN_LEAF;
        XD_TRY(xd_dmd_student(dmd, k, &batch, &values));
        vsd[k] = values.vsd;
    }
    return XD_OK;
}

/* What xdi_fdistill_weights makes of the logits and times that went by. */
static xd_result by_hand(xd_ctx *ctx, const watch *w, const xd_dmd_desc *d, double *weights, double *bins) {
    xdi_fdistill_desc f = xdi_fdistill_defaults();
    f.logits = xd_rows_of(w->logits, XD_DTYPE_F32, ROWS, DMD_HEADS);
    f.divergence = d->gan.fdistill.divergence;
    f.lower = 0.5;
    f.rate = 0.25;
    f.bins = d->gan.fdistill.bins;
    f.min_t = d->student_times.min_t;
    f.max_t = d->student_times.max_t;
    f.times = w->times;
    f.bin_values = bins;
    return xdi_fdistill_weights(ctx, &f, weights);
}

static xd_result check_weights(xd_comm *world, void *argument) {
    static watch on, off;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int variant = *(const int *)argument;
    xd_dmd_desc d[2] = { watched_settings(variant, true), watched_settings(variant, false) };
    double vsd[2][DMD_LEAVES], weights[ROWS], bins[BINS] = { 1, 1, 1, 1 }, after[BINS];
    xd_dmd *dmd[2];
    XD_TRY(watch_make(&on, world, &d[0]));
    XD_TRY(watch_make(&off, world, &d[1]));
    for (int k = 0; k < 2; k++) XD_TRY(xd_dmd_create(ctx, &d[k], &dmd[k]));
    XD_TRY(watched_students(&on, dmd[0], true, vsd[0]));
    XD_TRY(watched_students(&off, dmd[1], false, vsd[1]));
    XD_TRY(by_hand(ctx, &on, &d[0], weights, bins));
    CHECK_EQ_INT(on.seen, ROWS);
    CHECK_EQ_INT(on.pulled, ROWS);
    double apart = 0.0, total = 0.0;
    for (int i = 0; i < ROWS * DMD_ELEMENTS; i++) {
        const double plain = (double)off.gradient[i], expected = weights[i / DMD_ELEMENTS] * plain;
        CHECK_NEAR(on.gradient[i], expected, 1e-6 * fabs(expected) + 1e-12);
        apart = fmax(apart, fabs(weights[i / DMD_ELEMENTS] - 1.0));
    }
    CHECK((apart > 1e-3) == (d[0].gan.fdistill.divergence != XD_F_RKL));
    for (int i = 0; i < ROWS; i++) total += weights[i] / ROWS;
    CHECK_NEAR(total, 1.0, 1e-5); /* over the step: not over a leaf */
    XD_TRY(xdi_dmd_bins(dmd[0], after));
    CHECK(memcmp(after, bins, (size_t)d[0].gan.fdistill.bins * sizeof *bins) == 0);
    const xd_dmd_batch batch = { .samples = DMD_IN_LEAF };
    CHECK_EQ_INT(xd_dmd_student(dmd[0], 0, &batch, NULL), XD_ERROR_STATE); /* its weights are used up */
    CHECK(strstr(xd_last_error(ctx)->message,
                 "micro-batch 0 of 8 has no weights of f-distill, which only xd_dmd_step computes"));
    for (int k = 0; k < 2; k++) xd_dmd_destroy(dmd[k]);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        dmd_free_net(&on.nets[role]);
        dmd_free_net(&off.nets[role]);
    }
    return XD_OK;
}

XD_TEST(weights_are_those_of_the_step_and_multiply_the_term_of_matching_alone) {
    for (int variant = 0; variant < 14; variant++) {
        const xd_ctx_desc desc = { .reduction =
                                       variant < 7 ? XD_REDUCTION_DETERMINISTIC : XD_REDUCTION_INVARIANT };
        xd_error error = { 0 };
        CHECK_EQ_INT(xd_run_threads(1, &desc, check_weights, &variant, &error), XD_OK);
        if (error.message[0]) printf("%s\n", error.message);
    }
}

/* ---- whole steps ---- */

static dmd_run *new_run(bool guided) {
    dmd_run *run = (dmd_run *)calloc(1, sizeof *run);
    run->desc = dmd_settings(XD_DMD_MODELOPT, 3);
    run->gan = true;
    run->steps = 8;
    run->poisoned = -1;
    run->desc.guided = guided;
    run->desc.guidance_scale = 1.5;
    run->desc.gan.weight = 0.5;
    run->desc.gan.fdistill.on = true;
    run->desc.gan.fdistill.bins = BINS;
    run->desc.gan.fdistill.rate = 0.75;
    run->desc.gan.fdistill.divergence = XD_F_KL;
    return run;
}

static bool same(const dmd_run *a, const dmd_run *b) {
    return a->hash == b->hash && memcmp(a->values, b->values, sizeof a->values) == 0 &&
           memcmp(a->bins, b->bins, sizeof a->bins) == 0;
}

XD_TEST(weighted_steps_have_the_bits_of_one_rank_on_every_layout) {
    for (int guided = 0; guided < 2; guided++) {
        dmd_run *one = new_run(guided != 0), *other = (dmd_run *)malloc(sizeof *other);
        const dmd_run like = *one;
        one->desc.rungs.roll_out = guided != 0;
        CHECK_EQ_INT(dmd_execute(one, 1, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK(one->bins[0] != 1.0 && one->bins[BINS - 1] != 1.0);
        CHECK_EQ_INT(one->taken_by_steps, 0);
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int fsdp = 0; fsdp < 2; fsdp++) {
                *other = like;
                other->desc.rungs.roll_out = guided != 0;
                other->fsdp = fsdp != 0;
                CHECK_EQ_INT(dmd_execute(other, ranks, XD_REDUCTION_INVARIANT), XD_OK);
                CHECK(same(one, other));
            }
        *other = like;
        other->desc.rungs.roll_out = guided != 0;
        other->desc.gan.fdistill.on = false;
        CHECK_EQ_INT(dmd_execute(other, 1, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK(other->hash != one->hash);
        free(one);
        free(other);
    }
}

/* Bins after a step that was skipped are those before it: without it they would be of another run. */
XD_TEST(a_skipped_step_leaves_the_bins_as_they_were) {
    for (int ranks = 1; ranks <= 3; ranks++) {
        dmd_run *run = new_run(false), *shorter = new_run(false);
        run->steps = 3; /* the student's turns are 0 and 2 */
        run->poisoned = 2;
        shorter->steps = 2;
        CHECK_EQ_INT(dmd_execute(run, ranks, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK_EQ_INT(dmd_execute(shorter, ranks, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK(run->values[2].skipped && !run->values[0].skipped);
        CHECK(memcmp(run->bins, shorter->bins, sizeof run->bins) == 0);
        CHECK(run->bins[0] != 1.0);
        free(run);
        free(shorter);
    }
    dmd_run *run = new_run(false), *shorter = new_run(false);
    run->steps = 2;
    run->poisoned = 1; /* the critics' step does not undo the student's bins */
    shorter->steps = 1;
    CHECK_EQ_INT(dmd_execute(run, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(shorter, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(run->values[1].skipped);
    CHECK(memcmp(run->bins, shorter->bins, sizeof run->bins) == 0);
    free(run);
    free(shorter);
}

XD_TEST(a_weighted_run_goes_on_to_the_same_bits_with_its_bins_only) {
    dmd_run *run = new_run(true), *resumed = new_run(true), *without = new_run(true);
    resumed->resume_at = without->resume_at = 3;
    without->forget_bins = true;
    CHECK_EQ_INT(dmd_execute(run, 3, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(resumed, 2, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(without, 2, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(same(run, resumed));
    CHECK(!same(run, without));
    free(run);
    free(resumed);
    free(without);
}

/* ---- what is refused ---- */

static void refuse(const xd_dmd_desc *desc, const char *text) {
    dmd_net nets[XD_DMD_ROLES];
    xd_dmd_desc d = *desc;
    xd_memory_bytes bytes = { 0, 0 };
    xd_dmd *dmd = NULL;
    xd_ctx *ctx;
    memset(nets, 0, sizeof nets);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int role = 0; role < XD_DMD_ROLES; role++)
        if (role != XD_DMD_DISCRIMINATOR || d.networks[role].heads >= 0)
            d.networks[role] = dmd_network(&nets[role], (xd_dmd_role)role);
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, text));
    if (!strstr(xd_last_error(ctx)->message, text)) printf("%s\n", xd_last_error(ctx)->message);
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_dmd_create(ctx, &d, &dmd), &bytes), XD_ERROR_ARGUMENT);
    CHECK(dmd == NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(settings_of_weights_that_do_not_fit_are_refused_with_their_numbers) {
    const xd_dmd_desc good = watched_settings(1, true);
    xd_dmd_desc d = good;
    d.networks[XD_DMD_DISCRIMINATOR].heads = -1; /* left out */
    refuse(&d, "f-distill with 4 bins without a discriminator");
    d = good, d.gan.fdistill.divergence = (xd_f_divergence)7;
    refuse(&d, "divergence 7");
    d = good, d.gan.fdistill.lower = 0.0;
    refuse(&d, "ratios in [0, 20]");
    d = good, d.gan.fdistill.lower = 30.0;
    refuse(&d, "ratios in [30, 20]");
    d = good, d.gan.fdistill.upper = HUGE_VAL;
    refuse(&d, "ratios in [0.5, inf]");
    d = good, d.gan.fdistill.bins = -1;
    refuse(&d, "-1 bins; 0 to 4096");
    d = good, d.gan.fdistill.bins = 4097;
    refuse(&d, "4097 bins; 0 to 4096");
    d = good, d.gan.fdistill.rate = NAN;
    refuse(&d, "rate nan");
    d = good, d.gan.fdistill.rate = 1.5;
    refuse(&d, "rate 1.5");
    d = good, d.gan.fdistill.min_t = 0.9, d.gan.fdistill.max_t = 0.1;
    refuse(&d, "times in [0.9, 0.1]");
}

static xd_result refuse_calls(xd_comm *world, void *argument) {
    static watch w;
    xd_ctx *ctx = xd_comm_ctx(world);
    const double values[BINS] = { 1, 2, 3, 4 }, bad[BINS] = { 1, 0, 3, 4 }, worse[BINS] = { 1, 2, NAN, 4 };
    xd_dmd_desc d = watched_settings(1, true), plain;
    xd_dmd_batch batch = { .samples = DMD_IN_LEAF };
    double got[BINS];
    xd_dmd *dmd, *other;
    (void)argument;
    XD_TRY(watch_make(&w, world, &d));
    plain = d;
    plain.gan.fdistill.on = false;
    XD_TRY(xd_dmd_create(ctx, &d, &dmd));
    XD_TRY(xd_dmd_create(ctx, &plain, &other));
    CHECK_EQ_INT(xdi_dmd_collect_ratios(other, 0, &batch), XD_ERROR_STATE);
    CHECK_EQ_INT(xdi_dmd_weigh(other), XD_ERROR_STATE);
    CHECK_EQ_INT(xdi_dmd_bins(other, got), XD_ERROR_STATE);
    CHECK_EQ_INT(xdi_dmd_set_bins(other, values, BINS), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "without f-distill"));
    CHECK_EQ_INT(xdi_dmd_set_bins(dmd, values, 3), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "3 values for the 4 bins"));
    CHECK_EQ_INT(xdi_dmd_set_bins(dmd, bad, BINS), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "bin 1 of 4 of f-distill is 0"));
    CHECK_EQ_INT(xdi_dmd_set_bins(dmd, worse, BINS), XD_ERROR_ARGUMENT);
    XD_TRY(xdi_dmd_bins(dmd, got));
    for (int k = 0; k < BINS; k++) CHECK_NEAR(got[k], 1.0, 0.0);
    XD_TRY(xdi_dmd_set_bins(dmd, values, BINS));
    XD_TRY(xdi_dmd_bins(dmd, got));
    CHECK(memcmp(got, values, sizeof got) == 0);
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, NULL), XD_ERROR_STATE);
    CHECK_EQ_INT(xdi_dmd_collect_ratios(dmd, DMD_LEAVES, &batch), XD_ERROR_ARGUMENT);
    XD_TRY(xdi_dmd_collect_ratios(dmd, 0, &batch));
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, NULL), XD_ERROR_STATE); /* not weighed */
    XD_TRY(xdi_dmd_weigh(dmd));
    batch.samples = 1;
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, NULL), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "weights of 2 samples, and now has 1"));
    CHECK_EQ_INT(w.pulled, 0);
    xd_dmd_destroy(dmd);
    xd_dmd_destroy(other);
    for (int role = 0; role < XD_DMD_ROLES; role++) dmd_free_net(&w.nets[role]);
    return XD_OK;
}

XD_TEST(calls_for_weights_that_do_not_fit_are_refused) {
    CHECK_EQ_INT(xd_run_threads(1, NULL, refuse_calls, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
