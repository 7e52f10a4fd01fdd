/* Whole steps of a distillation: turns, the same bits on every layout, findings, resumed runs. */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif

#include "dmd_scene.h"
#include "planned.h"

static dmd_run *new_run(xd_dmd_recipe recipe, int rungs, bool gan) {
    dmd_run *run = (dmd_run *)calloc(1, sizeof *run);
    run->desc = dmd_settings(recipe, rungs);
    run->gan = gan;
    run->steps = 6;
    run->poisoned = -1;
    if (gan) run->desc.gan.r1_weight = 2.0;
    return run;
}

static bool same(const dmd_run *a, const dmd_run *b) {
    return a->hash == b->hash && memcmp(a->values, b->values, sizeof a->values) == 0 &&
           memcmp(a->warm, b->warm, sizeof a->warm) == 0 &&
           memcmp(&a->record, &b->record, sizeof a->record) == 0;
}

static void check_layouts(const dmd_run *like) {
    dmd_run *one = (dmd_run *)calloc(1, sizeof *one), *other = (dmd_run *)calloc(1, sizeof *other);
    *one = *like;
    CHECK_EQ_INT(dmd_execute(one, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(one->hash != 0);
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int fsdp = 0; fsdp < 2; fsdp++) {
            *other = *like;
            other->fsdp = fsdp != 0;
            CHECK_EQ_INT(dmd_execute(other, ranks, XD_REDUCTION_INVARIANT), XD_OK);
            CHECK(same(one, other));
            if (!same(one, other)) printf("%d ranks, %s\n", ranks, fsdp ? "FSDP" : "DDP");
        }
    free(one);
    free(other);
}

XD_TEST(a_student_of_one_step_has_the_bits_of_one_rank_on_every_layout) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 1, false);
    check_layouts(run);
    free(run);
}

XD_TEST(a_discriminator_with_its_penalty_keeps_the_bits) {
    dmd_run *run = new_run(XD_DMD_FASTGEN, 3, true);
    check_layouts(run);
    run->desc.gan.same_noise = true;
    run->desc.gan.r1_on_clean = true;
    run->desc.gan.kind = XD_GAN_HINGE;
    check_layouts(run);
    free(run);
}

static dmd_run *new_slope_run(void) {
    dmd_run *run = new_run(XD_DMD_FASTGEN, 3, true);
    run->desc.gan.penalty = XD_DMD_PENALTY_SLOPE;
    run->desc.gan.r1_alpha = 0.0; /* of the other penalty */
    return run;
}

XD_TEST(a_penalty_on_slopes_keeps_the_bits) {
    dmd_run *run = new_slope_run(), *resumed = new_slope_run();
    check_layouts(run);
    resumed->resume_at = 3;
    CHECK_EQ_INT(dmd_execute(run, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(resumed, 2, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(same(run, resumed));
    free(run);
    free(resumed);
}

/* Logits of the scene are linear: every sample's slope is the sum u of the heads' weights, the penalty |u|^2 / 2, its gradient
 * by each head's weights u. With a weight so large that nothing else counts, the gradient's norm is weight sqrt(heads) |u|. */
XD_TEST(a_penalty_on_slopes_is_that_of_the_formula) {
    for (int recipe = 0; recipe < 2; recipe++) {
        dmd_run *run = new_slope_run();
        double square = 0.0;
        run->steps = 1;
        run->desc.gan.r1_weight = 1e8;
        CHECK_EQ_INT(dmd_execute(run, 2, recipe ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC),
                     XD_OK);
        for (int i = 0; i < DMD_WIDTH; i++) {
            double u = 0.0;
            for (int head = 0; head < DMD_HEADS; head++) u += (double)run->judge_first[head * DMD_WIDTH + i];
            square += u * u;
        }
        CHECK(square > 0.01);
        CHECK_NEAR(run->values[0].r1, 0.5 * square, 1e-6 * square);
        CHECK_NEAR(run->values[0].norms[XD_DMD_DISCRIMINATOR], 1e8 * sqrt(DMD_HEADS * square),
                   1e8 * 1e-6 * sqrt(DMD_HEADS * square));
        CHECK_EQ_INT(run->judge_penalties, DMD_LEAVES / 2);
        free(run);
    }
}

XD_TEST(a_discriminator_is_asked_for_a_penalty_on_slopes_only) {
    dmd_run *slope = new_slope_run(), *none = new_slope_run(), *difference = new_run(XD_DMD_FASTGEN, 3, true);
    none->desc.gan.r1_weight = 0.0;
    CHECK_EQ_INT(dmd_execute(slope, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(none, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(difference, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(slope->judge_penalties, 3 * DMD_LEAVES);
    CHECK(none->judge_penalties == 0 && difference->judge_penalties == 0);
    CHECK(slope->hash != none->hash && slope->hash != difference->hash);
    CHECK(none->values[0].r1 == 0.0 && slope->values[0].r1 > 0.0);
    free(slope);
    free(none);
    free(difference);
}

/* In the references replicas begin apart, and stay apart. */
XD_TEST(replicas_of_a_discriminator_are_equal_from_the_first_step_to_the_last) {
    dmd_run *one = new_run(XD_DMD_FASTGEN, 1, true), *four = new_run(XD_DMD_FASTGEN, 1, true);
    CHECK_EQ_INT(dmd_execute(one, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(four, 4, XD_REDUCTION_INVARIANT), XD_OK);
    for (int last = 0; last < 2; last++)
        for (int rank = 0; rank < 4; rank++) CHECK(four->judges[last][rank] == one->judges[last][0]);
    CHECK(one->judges[0][0] != one->judges[1][0] && one->judges[0][0] != 0);
    CHECK_EQ_INT(dmd_execute(four, 3, XD_REDUCTION_DETERMINISTIC), XD_OK); /* leaves unevenly dealt */
    for (int rank = 0; rank < 3; rank++) {
        CHECK(four->judges[0][rank] == one->judges[0][0]);
        CHECK(four->judges[1][rank] == four->judges[1][0]);
    }
    free(one);
    free(four);
}

/* In the references it steps in every micro-batch, with a part of the loss. Eight of a step on one rank see one discriminator here. */
XD_TEST(a_discriminator_steps_once_after_all_micro_batches_of_a_step) {
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        dmd_run *run = new_run(XD_DMD_FASTGEN, 1, true);
        CHECK_EQ_INT(dmd_execute(run, ranks, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK_EQ_INT(run->record.updates[XD_DMD_DISCRIMINATOR], 3); /* of steps 0, 2 and 4 */
        CHECK_EQ_INT(run->judge_changes, 4);                        /* the first, and after each of them */
        CHECK_EQ_INT(run->judge_steps, 3);
        free(run);
    }
}

XD_TEST(roll_outs_with_either_noise_keep_the_bits) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, false);
    run->desc.rungs.roll_out = true;
    check_layouts(run);
    run->desc.rungs.fresh_noise = true;
    check_layouts(run);
    free(run);
}

XD_TEST(a_rung_for_each_sample_keeps_the_bits) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, false);
    run->desc.rungs.roll_out = true;
    run->desc.rungs.deal = XD_DMD_RUNGS_IN_TURN;
    check_layouts(run);
    run->desc.rungs.fresh_noise = true;
    check_layouts(run);
    free(run);
}

XD_TEST(a_rung_held_for_steps_keeps_the_bits) {
    dmd_run *run = new_run(XD_DMD_DATA_FREE, 3, false);
    CHECK_EQ_INT(run->desc.rungs.hold, 8);
    run->desc.rungs.hold = 1;
    run->desc.rungs.roll_out = true;
    check_layouts(run);
    run->desc.rungs.roll_out = false; /* every noised sample at the rung */
    check_layouts(run);
    free(run);
}

/* The rungs of turns by hand: all of a turn's steps have the student's. */
static xd_result hold_two(void *user, const xd_dmd_draw *draw, int64_t count, int64_t *out) {
    const xd_dmd_desc *d = (const xd_dmd_desc *)user;
    const int64_t step = draw->random.step, turn = step < d->lead ? 0 : (step - d->lead) / d->frequency;
    for (int64_t i = 0; i < draw->rows; i++) out[i] = turn / 2 % count;
    return XD_OK;
}

XD_TEST(a_rung_is_held_for_turns_of_the_student) {
    static const struct hold_case {
        xd_dmd_recipe recipe;
        int64_t lead, frequency;
        bool roll_out;
    } cases[] = { { XD_DMD_MODELOPT, 0, 2, true },
                  { XD_DMD_MODELOPT, 1, 2, true },
                  { XD_DMD_FASTGEN, 0, 2, true },
                  { XD_DMD_ORIGINAL, 0, 1, true },
                  { XD_DMD_FASTGEN, 2, 2, false } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dmd_run *held = new_run(cases[i].recipe, 3, false), *own, *drawn;
        xd_dmd_draws draws = { .rungs = hold_two };
        held->steps = DMD_STEPS_MAX;
        held->desc.lead = cases[i].lead;
        held->desc.frequency = cases[i].frequency;
        held->desc.rungs.roll_out = cases[i].roll_out;
        own = (dmd_run *)malloc(sizeof *own);
        drawn = (dmd_run *)malloc(sizeof *drawn);
        *own = *drawn = *held;
        held->desc.rungs.hold = 2;
        draws.user = &own->desc;
        own->desc.draws = &draws;
        CHECK_EQ_INT(dmd_execute(held, 2, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK_EQ_INT(dmd_execute(own, 2, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK_EQ_INT(dmd_execute(drawn, 2, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK(same(held, own) && !same(held, drawn));
        free(held);
        free(own);
        free(drawn);
    }
}

XD_TEST(critics_that_lead_and_then_take_the_students_samples_keep_the_bits) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, true);
    run->desc.rungs.roll_out = true;
    run->desc.rungs.deal = XD_DMD_RUNGS_IN_TURN;
    run->desc.own_samples = true;
    run->desc.lead = 2;
    check_layouts(run);
    run->desc.frequency = 3;
    check_layouts(run);
    free(run);
}

XD_TEST(warm_up_keeps_the_bits) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, false);
    run->warm_ups = 4;
    run->steps = 3;
    run->desc.regression.substeps = 2;
    check_layouts(run);
    run->desc.guided = true;
    run->desc.guidance_scale = 1.5;
    run->desc.networks[XD_DMD_STUDENT].predicts = XD_PREDICT_FLOW;
    check_layouts(run);
    free(run);
}

XD_TEST(warm_up_of_a_copy_of_the_teacher_has_nothing_to_learn_in_one_substep_but_in_several) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, false);
    run->like_teacher = true;
    run->warm_ups = 1;
    run->steps = 0;
    run->desc.regression.substeps = 1;
    CHECK_EQ_INT(dmd_execute(run, 2, XD_REDUCTION_DETERMINISTIC), XD_OK);
    CHECK(run->warm[0].regression < 1e-12);
    CHECK(run->warm[0].norms[XD_DMD_STUDENT] < 1e-6);
    run->desc.regression.substeps = 4;
    run->warm_ups = 16;
    CHECK_EQ_INT(dmd_execute(run, 2, XD_REDUCTION_DETERMINISTIC), XD_OK);
    CHECK(run->warm[0].regression > 1e-6);
    CHECK(run->warm[0].norms[XD_DMD_STUDENT] > 1e-6);
    CHECK_EQ_INT(run->record.warm_up, 16);
    CHECK_EQ_INT(run->record.step, 0);
    CHECK_EQ_INT(run->record.updates[XD_DMD_STUDENT], 0);
    free(run);
}

XD_TEST(warm_up_lowers_its_loss) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, false);
    run->warm_ups = 16;
    run->steps = 0;
    run->desc.regression.substeps = 2;
    CHECK_EQ_INT(dmd_execute(run, 2, XD_REDUCTION_DETERMINISTIC), XD_OK);
    CHECK(run->warm[15].regression < 0.8 * run->warm[0].regression);
    CHECK(run->warm[0].vsd == 0.0 && run->warm[0].distance == 0.0 && !run->warm[0].skipped);
    free(run);
}

XD_TEST(critics_on_the_students_own_samples_keep_the_bits) {
    dmd_run *run = new_run(XD_DMD_ORIGINAL, 1, true);
    check_layouts(run);
    free(run);
}

/* On 3 and 5 ranks some have fewer leaves than the sharded roles are opened for. */
XD_TEST(roles_under_different_wrappers_share_a_queue_and_keep_the_bits) {
    for (int recipe = 0; recipe < 3; recipe++) {
        dmd_run *run = new_run((xd_dmd_recipe)recipe, 3, true),
                *mixed = new_run((xd_dmd_recipe)recipe, 3, true);
        mixed->mixed = true;
        CHECK_EQ_INT(dmd_execute(run, 1, XD_REDUCTION_INVARIANT), XD_OK);
        for (int ranks = 1; ranks <= 5; ranks++) {
            CHECK_EQ_INT(dmd_execute(mixed, ranks, XD_REDUCTION_INVARIANT), XD_OK);
            CHECK(same(run, mixed));
            if (!same(run, mixed)) printf("%d ranks, recipe %d\n", ranks, recipe);
        }
        free(run);
        free(mixed);
    }
}

XD_TEST(turns_are_those_of_the_three_references) {
    static const char *const students[] = { "S..S..S", "..S..S.", "S..S..S" };
    static const char *const others[] = { ".FF.FF.", "FF.FF.F", "FFFFFFF" };
    for (int recipe = 0; recipe < 3; recipe++) {
        xd_dmd_desc d = dmd_settings((xd_dmd_recipe)recipe, 1);
        d.frequency = 3;
        for (int step = 0; step < 7; step++) {
            CHECK_EQ_INT(xd_dmd_trains(&d, XD_DMD_STUDENT, step), students[recipe][step] == 'S');
            CHECK_EQ_INT(xd_dmd_trains(&d, XD_DMD_FAKE_SCORE, step), others[recipe][step] == 'F');
            CHECK(!xd_dmd_trains(&d, XD_DMD_DISCRIMINATOR, step)); /* there is none */
            CHECK(!xd_dmd_trains(&d, XD_DMD_TEACHER, step));
        }
    }
}

XD_TEST(a_lead_moves_all_turns) {
    for (int recipe = 0; recipe < 3; recipe++) {
        xd_dmd_desc d = dmd_settings((xd_dmd_recipe)recipe, 1), late;
        d.frequency = 3;
        late = d;
        late.lead = 4;
        for (int step = 0; step < 4; step++) {
            CHECK(!xd_dmd_trains(&late, XD_DMD_STUDENT, step));
            CHECK(xd_dmd_trains(&late, XD_DMD_FAKE_SCORE, step));
        }
        for (int step = 0; step < 7; step++)
            for (int role = 0; role < XD_DMD_ROLES; role++)
                CHECK_EQ_INT(xd_dmd_trains(&late, (xd_dmd_role)role, step + 4),
                             xd_dmd_trains(&d, (xd_dmd_role)role, step));
        CHECK(!xd_dmd_trains(&late, XD_DMD_STUDENT, -1) && !xd_dmd_trains(&late, XD_DMD_FAKE_SCORE, -1));
    }
}

XD_TEST(a_step_allocates_nothing) {
    for (int recipe = 0; recipe < 4; recipe++) {
        dmd_run *run = recipe == 3 ? new_slope_run() : new_run((xd_dmd_recipe)recipe, 3, true);
        run->fsdp = true;
        run->warm_ups = 2;
        run->desc.regression.substeps = 2;
        run->desc.rungs.roll_out = true;
        run->desc.rungs.deal = XD_DMD_RUNGS_IN_TURN;
        CHECK_EQ_INT(dmd_execute(run, 1, XD_REDUCTION_INVARIANT), XD_OK);
        CHECK(run->allocated > 0);
        CHECK_EQ_INT(run->taken_by_steps, 0);
        free(run);
    }
}

XD_TEST(values_are_there_for_the_terms_of_a_step_and_not_for_others) {
    dmd_run *run = new_run(XD_DMD_FASTGEN, 3, true);
    CHECK_EQ_INT(dmd_execute(run, 2, XD_REDUCTION_DETERMINISTIC), XD_OK);
    for (int step = 0; step < run->steps; step++) {
        const xd_dmd_values *v = &run->values[step];
        const bool student = step % 2 == 1;
        CHECK(student ? v->vsd > 0.0 && v->generator > 0.0 : v->vsd == 0.0 && v->generator == 0.0);
        CHECK(student ? v->fake_score == 0.0 : v->fake_score > 0.0);
        CHECK(student ? v->discriminator == 0.0 && v->r1 == 0.0 : v->discriminator > 0.0 && v->r1 > 0.0);
        CHECK(student ? v->distance > 0.0 : v->distance == 0.0);
        CHECK((v->norms[XD_DMD_STUDENT] > 0.0) == student);
        CHECK((v->norms[XD_DMD_FAKE_SCORE] > 0.0) == !student);
        CHECK((v->norms[XD_DMD_DISCRIMINATOR] > 0.0) == !student);
        CHECK(v->norms[XD_DMD_TEACHER] == 0.0 && v->regression == 0.0);
        CHECK(!v->skipped);
    }
    CHECK_EQ_INT(run->record.step, 6);
    CHECK_EQ_INT(run->record.updates[XD_DMD_STUDENT], 3);
    CHECK_EQ_INT(run->record.updates[XD_DMD_DISCRIMINATOR], 3);
    free(run);
}

XD_TEST(a_run_goes_on_from_its_record_to_the_same_bits) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, true), *resumed = new_run(XD_DMD_MODELOPT, 3, true);
    resumed->resume_at = 3;
    CHECK_EQ_INT(dmd_execute(run, 3, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(resumed, 2, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(same(run, resumed));
    free(run);
    free(resumed);
}

XD_TEST(a_run_with_warm_up_and_lead_goes_on_from_its_records_to_the_same_bits) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, true), *resumed;
    run->desc.rungs.roll_out = true;
    run->desc.rungs.deal = XD_DMD_RUNGS_IN_TURN;
    run->desc.regression.substeps = 2;
    run->desc.own_samples = true;
    run->desc.lead = 3;
    run->warm_ups = 3;
    resumed = (dmd_run *)malloc(sizeof *resumed);
    *resumed = *run;
    resumed->resume_warm_at = 2;
    resumed->resume_at = 2; /* within the lead: nothing is kept of earlier samples */
    CHECK_EQ_INT(dmd_execute(run, 3, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(dmd_execute(resumed, 2, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(same(run, resumed));
    CHECK_EQ_INT(run->record.warm_up, 3);
    free(run);
    free(resumed);
}

/* A network that says 0, and counts. */
static xd_result say_nothing(void *user, const xd_network_call *call) {
    ++*(int *)user;
    memset(call->raw, 0, (size_t)call->samples * DMD_ELEMENTS * sizeof(float));
    return XD_OK;
}

static xd_result learn_nothing(void *user, const xd_network_call *call) {
    (void)user, (void)call;
    return XD_OK;
}

XD_TEST(who_goes_back_into_the_lead_trains_critics_on_samples_made_anew) {
    int forwards[XD_DMD_ROLES] = { 0 };
    xd_dmd_desc d = dmd_settings(XD_DMD_MODELOPT, 1);
    const xd_dmd_batch batch = { .samples = DMD_IN_LEAF };
    const xd_dmd_record begin = { .seed = 11 };
    xd_dmd *dmd;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int role = 0; role < XD_DMD_ROLES; role++)
        if (role != XD_DMD_DISCRIMINATOR)
            d.networks[role] = (xd_network){ .user = &forwards[role],
                                             .predicts = XD_PREDICT_FLOW,
                                             .forward = say_nothing,
                                             .backward = learn_nothing };
    d.own_samples = true;
    d.lead = 2;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, NULL), XD_OK);
    CHECK_EQ_INT(xd_dmd_fake_score(dmd, 0, &batch, NULL), XD_OK);
    CHECK_EQ_INT(forwards[XD_DMD_STUDENT], 1);
    CHECK_EQ_INT(xd_dmd_resume(dmd, &begin), XD_OK);
    CHECK_EQ_INT(xd_dmd_fake_score(dmd, 0, &batch, NULL), XD_OK);
    CHECK_EQ_INT(forwards[XD_DMD_STUDENT], 2);
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
}

/* A NaN in one sample of one rank: no role steps, everywhere, and the next step is as good as any. */
XD_TEST(what_is_not_finite_keeps_every_role_from_stepping_on_every_rank) {
    for (int ranks = 1; ranks <= 3; ranks++) {
        dmd_run *run = new_run(XD_DMD_ORIGINAL, 3, true);
        if (ranks == 3) run->desc.gan.penalty = XD_DMD_PENALTY_SLOPE;
        run->poisoned = 2;
        CHECK_EQ_INT(dmd_execute(run, ranks, XD_REDUCTION_INVARIANT), XD_OK);
        for (int step = 0; step < run->steps; step++) CHECK_EQ_INT(run->values[step].skipped, step == 2);
        CHECK_EQ_INT(run->record.step, 6);
        CHECK_EQ_INT(run->record.updates[XD_DMD_STUDENT], 2); /* of steps 0, 2, 4 */
        CHECK_EQ_INT(run->record.updates[XD_DMD_FAKE_SCORE], 5);
        CHECK(isfinite(run->values[5].fake_score));
        free(run);
    }
}

/* ---- what is refused ---- */

static xd_result refuse_one(xd_ctx *ctx, const xd_dmd_desc *desc, const char *text) {
    xd_dmd *dmd = NULL;
    xd_memory_bytes bytes = { 0, 0 };
    const xd_result result = xd_dmd_create(ctx, desc, &dmd);
    const xd_error *error = xd_last_error(ctx);
    if (!error || !strstr(error->message, text))
        printf("\"%s\" is not in: %s\n", text, error ? error->message : "nothing");
    CHECK(error && strstr(error->message, text));
    CHECK(dmd == NULL);
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_dmd_create(ctx, desc, &dmd), &bytes), result);
    return result;
}

static xd_dmd_desc whole_desc(dmd_net *nets) {
    xd_dmd_desc d = dmd_settings(XD_DMD_MODELOPT, 3);
    for (int role = 0; role < XD_DMD_ROLES; role++)
        d.networks[role] = dmd_network(&nets[role], (xd_dmd_role)role);
    return d;
}

#define REFUSES(code, change, text)                    \
    do {                                               \
        xd_dmd_desc d = whole_desc(nets);              \
        change;                                        \
        CHECK_EQ_INT(refuse_one(ctx, &d, text), code); \
    } while (0)

XD_TEST(settings_that_do_not_fit_are_refused_with_their_numbers) {
    static const double rising[] = { 0.5, 0.7, 0.3, 0.0 };
    static const int64_t huge = INT64_MAX, six = 6;
    dmd_net nets[XD_DMD_ROLES];
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    memset(nets, 0, sizeof nets);
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_STUDENT].forward = NULL, "the student has no forward");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_FAKE_SCORE].backward = NULL,
            "the fake score has no backward");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_TEACHER].backward = NULL, "the teacher has no backward");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_TEACHER].feature_count = 0, "a teacher with 0 features");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_DISCRIMINATOR].heads = 0, "a discriminator of 0 heads");
    REFUSES(XD_ERROR_STATE, d.networks[XD_DMD_FAKE_SCORE].user = d.networks[XD_DMD_TEACHER].user,
            "allow_shared");
    xd_dmd_desc shared = whole_desc(nets);
    xd_dmd *none = NULL;
    xd_memory_bytes bytes = { 0, 0 };
    shared.networks[XD_DMD_FAKE_SCORE].user = shared.networks[XD_DMD_TEACHER].user;
    shared.allow_shared = true;
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_dmd_create(ctx, &shared, &none), &bytes), XD_OK);
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_STUDENT].predicts = XD_PREDICT_V, "v");
    REFUSES(XD_ERROR_ARGUMENT, d.frequency = 1, "frequency 1, at least 2");
    REFUSES(XD_ERROR_ARGUMENT, d.frequency = 0, "frequency 0");
    REFUSES(XD_ERROR_ARGUMENT, d.rungs.steps = 0, "a student of 0 steps");
    REFUSES(XD_ERROR_ARGUMENT, d.rungs.list = NULL, "without a list");
    REFUSES(XD_ERROR_ARGUMENT, d.lead = -1, "-1 steps before the student's first");
    REFUSES(XD_ERROR_ARGUMENT, d.lead = INT64_MAX, "9223372036854775807 steps before");
    REFUSES(XD_ERROR_ARGUMENT, d.frequency = INT64_MAX, "every 9223372036854775807");
    REFUSES(XD_ERROR_ARGUMENT, d.regression.substeps = -1, "warm-up by -1 steps a rung");
    REFUSES(XD_ERROR_ARGUMENT, d.regression.step_samples = -1, "-1 noises");
    REFUSES(XD_ERROR_ARGUMENT, d.rungs.deal = (xd_dmd_deal)3, "dealt in manner 3");
    REFUSES(XD_ERROR_ARGUMENT, d.rungs.deal = XD_DMD_RUNGS_IN_TURN, "3 rungs in turn without roll-outs");
    REFUSES(XD_ERROR_ARGUMENT, d.rungs.hold = -1, "-1 steps at a rung");
    REFUSES(XD_ERROR_ARGUMENT,
            (d.rungs.hold = 8, d.rungs.roll_out = true, d.rungs.deal = XD_DMD_RUNGS_IN_TURN),
            "8 steps at a rung, and rungs in turn");
    const xd_dmd_draws own_rungs = { .rungs = hold_two };
    REFUSES(XD_ERROR_ARGUMENT, (d.rungs.hold = 8, d.draws = &own_rungs),
            "8 steps at a rung, and draws.rungs");
    REFUSES(XD_ERROR_ARGUMENT, d.alternation = XD_DMD_DATA_FREE, "alternation 3");
    REFUSES(XD_ERROR_ARGUMENT,
            (d.rungs.steps = 58, d.rungs.roll_out = true, d.rungs.fresh_noise = true,
             d.rungs.list = dmd_rungs_one),
            "new noise between 58 rungs; there are numbers for 57");
    REFUSES(XD_ERROR_ARGUMENT, d.rungs.list = rising, "0.7");
    REFUSES(XD_ERROR_ARGUMENT, (d.rungs.steps = 1, d.rungs.list = dmd_rungs_one, d.rungs.roll_out = true),
            "roll-outs of a student of 1 step");
    REFUSES(XD_ERROR_ARGUMENT, d.gan.weight = 0.0, "weight 0");
    REFUSES(XD_ERROR_ARGUMENT, d.gan.r1_weight = -1.0, "r1_weight -1");
    REFUSES(XD_ERROR_ARGUMENT, (d.gan.r1_weight = 2.0, d.gan.r1_alpha = 0.0), "r1_alpha 0");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_DISCRIMINATOR].feature_count = 2,
            "the discriminator reads 2 features, the teacher gives 1");
    REFUSES(XD_ERROR_ARGUMENT,
            (d.networks[XD_DMD_DISCRIMINATOR].feature_count = 1,
             d.networks[XD_DMD_DISCRIMINATOR].feature_elements = &six),
            "the discriminator reads 6 elements of feature 0, the teacher gives 5");
    REFUSES(XD_ERROR_ARGUMENT, d.gan.penalty = (xd_dmd_penalty)2, "penalty 2 is unknown");
    REFUSES(XD_ERROR_ARGUMENT,
            (d.gan.r1_weight = 2.0, d.gan.penalty = XD_DMD_PENALTY_SLOPE,
             d.networks[XD_DMD_DISCRIMINATOR].penalty = NULL),
            "r1_weight 2 of the slope, and a discriminator without a penalty");
    REFUSES(XD_ERROR_ARGUMENT, (d.networks[XD_DMD_DISCRIMINATOR].forward = NULL, d.gan.r1_weight = 2.0),
            "without a discriminator");
    REFUSES(XD_ERROR_ARGUMENT, (d.guided = true, d.guidance_scale = NAN), "guidance by nan");
    REFUSES(XD_ERROR_ARGUMENT, d.fake_times.chunk = 3, "times of chunks of 0 and 3 frames");
    REFUSES(XD_ERROR_ARGUMENT, d.sizes.samples = 0, "micro-batches of 0 samples");
    REFUSES(XD_ERROR_ARGUMENT, d.sizes.first_element = 3, "elements 3 to 8 of samples of 6");
    REFUSES(XD_ERROR_ARGUMENT, d.sizes.elements = d.sizes.whole_elements = 0, "sizes.elements is 0");
    REFUSES(XD_ERROR_ARGUMENT, d.sizes.elements = d.sizes.whole_elements = INT64_MAX,
            "samples of 9223372036854775807");
    REFUSES(XD_ERROR_ARGUMENT, d.sizes.samples = INT64_MAX, "micro-batches of 9223372036854775807 samples");
    REFUSES(XD_ERROR_ARGUMENT, d.sizes.step_samples = INT64_MAX, "steps of 9223372036854775807");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_DISCRIMINATOR].heads = INT64_MAX,
            "9223372036854775807 heads");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_TEACHER].feature_elements = &huge,
            "9223372036854775807 elements");
    REFUSES(XD_ERROR_ARGUMENT, d.networks[XD_DMD_TEACHER].feature_count = -1, "-1 features");
    REFUSES(XD_ERROR_ARGUMENT, d.frequency = INT64_MIN, "frequency -9223372036854775808");
    REFUSES(XD_ERROR_ARGUMENT, d.trainers[XD_DMD_STUDENT].average_count = -1, "-1 averages");
    REFUSES(XD_ERROR_DTYPE, d.sizes.dtype = XD_DTYPE_F64, "samples of");
    REFUSES(XD_ERROR_DTYPE, d.network_dtype = XD_DTYPE_I64, "times for networks");
    REFUSES(XD_ERROR_ARGUMENT, d.network_scale = -1.0, "-1");
    REFUSES(XD_ERROR_ARGUMENT, d.student_times.shift = 0.5, "0.5");
    REFUSES(XD_ERROR_ARGUMENT, d.trainers[XD_DMD_STUDENT].max_norm = -2.0, "-2");
    xd_ctx_destroy(ctx);
}

static xd_result never(void *user, int64_t leaf, xd_dmd_batch *batch) {
    (void)user, (void)leaf, (void)batch;
    CHECK(!"no batch was to be asked for");
    return XD_OK;
}

static xd_result without_a_word(void *user, const xd_network_call *call) {
    (void)user, (void)call;
    return XD_ERROR_IO;
}

XD_TEST(a_network_that_fails_without_a_message_is_named) {
    dmd_net nets[XD_DMD_ROLES];
    xd_dmd *dmd;
    xd_ctx *ctx;
    float real[DMD_IN_LEAF * DMD_ELEMENTS] = { 0 };
    memset(nets, 0, sizeof nets);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_dmd_desc d = whole_desc(nets);
    d.networks[XD_DMD_STUDENT].forward = without_a_word;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    const xd_dmd_batch batch = { .samples = DMD_IN_LEAF, .real = real };
    CHECK_EQ_INT(xd_dmd_fake_score(dmd, 0, &batch, NULL), XD_ERROR_IO);
    CHECK_EQ_STR(xd_last_error(ctx)->message,
                 "the forward of the student returned ERROR_IO without a message");
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
}

XD_TEST(batches_and_calls_that_do_not_fit_are_refused) {
    dmd_net nets[XD_DMD_ROLES];
    xd_dmd_values values = { .vsd = 7.0 };
    xd_dmd *dmd;
    xd_ctx *ctx;
    float real[DMD_IN_LEAF * DMD_ELEMENTS] = { 0 };
    memset(nets, 0, sizeof nets);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_dmd_desc d = whole_desc(nets);
    d.guided = true;
    d.own_samples = true;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    xd_dmd_batch batch = { .samples = DMD_IN_LEAF + 1, .real = real };
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "3 samples in a batch; there is room for 2"));
    batch.samples = DMD_IN_LEAF;
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "no negative condition"));
    batch.first = 15;
    CHECK_EQ_INT(xd_dmd_fake_score(dmd, 0, &batch, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "samples 15 to 16 of a step of 16"));
    batch.first = 0;
    CHECK_EQ_INT(xd_dmd_fake_score(dmd, 1, &batch, &values), XD_ERROR_ARGUMENT);
    batch.real = NULL;
    CHECK_EQ_INT(xd_dmd_discriminator(dmd, 0, &batch, &values), XD_ERROR_ARGUMENT);
    batch.negative = real;
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "needs real samples"));
    CHECK_EQ_INT(xd_dmd_step(dmd, never, NULL, &values), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "the student has no wrapper"));
    batch.first = 0;
    CHECK_EQ_INT(xdi_dmd_warm_up(dmd, 0, &batch, &values), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "warm-up by 0 steps a rung"));
    CHECK_EQ_INT(xd_dmd_warm_up_step(dmd, never, NULL, &values), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "the student has no wrapper"));
    const xd_dmd_record cold = { .warm_up = -1, .seed = 11 };
    CHECK_EQ_INT(xd_dmd_resume(dmd, &cold), XD_ERROR_ARGUMENT);
    const xd_dmd_record other = { .seed = 12 }, negative = { .step = -1, .seed = 11 },
                        between = { .step = 3, .seed = 11 };
    CHECK_EQ_INT(xd_dmd_resume(dmd, &other), XD_ERROR_MISMATCH);
    CHECK_EQ_INT(xd_dmd_resume(dmd, &negative), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_dmd_resume(dmd, &between), XD_ERROR_STATE);
    CHECK(values.vsd == 7.0);
    for (int role = 0; role < XD_DMD_ROLES; role++) CHECK_EQ_INT(nets[role].forwards, 0);
    xd_dmd_destroy(dmd);
    xd_dmd_destroy(NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
