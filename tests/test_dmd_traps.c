/* What goes wrong in other programs, and the test that fails if it did so here.
 *
 *   behaviour elsewhere                                          fails here
 *   ---- schedules, times, conversions
 *   lists of times that rise, do not end in 0, are too long      test_noise_schedule.c lists_that_do_not_fit_are_refused_with_both_numbers
 *     or above the schedule                                        and below
 *   a table's inverse by sigma squared, without the root         test_noise_schedule.c
 *                                                                  the_inverse_of_a_table_finds_the_step_and_the_missing_root_does_not
 *   times not checked at all, or to the bit                      test_noise_schedule.c a_time_may_be_one_f32_beyond_the_ends_and_no_more
 *   bounds rounded outwards in f32                               test_times.c narrow_times_are_clamped_to_the_f32s_inside
 *   a list's index reaches the final 0                           test_times.c indices_choose_times_of_grids_lists_and_steps
 *   v under rectified flow: read as one quantity and trained     test_convert.c v_under_rectified_flow_is_refused_or_is_the_flow
 *     as another
 *   flow to x0 to flow, rounded at the hub                       test_convert.c no_way_through_x0_is_taken_unless_asked_for
 *   draws of integers from another generator, so that noise      below: noise_does_not_depend_on_how_times_are_drawn
 *     depends on how times are drawn
 *   ---- losses
 *   a normaliser over the batch                                  below: the_normaliser_is_of_one_sample_and_of_x_minus_t
 *   |F - T| instead of |x - T|; epsilon outside, or none         below: the_normaliser_..., epsilon_is_within_the_denominator
 *   two roundings in bf16, and x - (x - g)                       test_dmd_losses.c narrow_types_are_widened_and_gradients_rounded_once
 *   a weight that overflows in f16                               test_dmd_findings.c
 *                                                                  the_weight_overflows_in_f16_as_the_peers_do_and_not_in_the_exact_form
 *   NaN made 0 in silence, or none looked for                    test_dmd_findings.c what_is_not_finite_makes_its_sample_zero_and_no_bit_...
 *                                                                  and below: what_is_not_finite_in_any_array_...
 *   guidance that a call cannot switch off; 0 as off             test_dmd_guidance.c a_scale_of_zero_is_the_negative_prediction_and_not_none
 *   scale as w of conditional + w (difference)                   test_convert.c guidance_adds_the_scaled_difference
 *   features of the negative branch kept with the others         below: the_negative_branch_has_no_features_and_keeps_nothing
 *   the penalty's second input not noised                        below: the_penalty_perturbs_what_is_noised
 *   indices of heads dropped                                     test_dmd.c settings_that_do_not_fit_are_refused_with_their_numbers: a feature
 *                                                                  has a number and a size, and none is looked for by name
 *   weights of f-distill: a TypeError for the reverse one        test_dmd_gan.c the_reverse_divergence_weighs_every_sample_alike
 *   every copy of a sample counted in a bin                      test_dmd_split.c weights_of_split_samples_keep_the_bits
 *   one micro-batch's bins and means                             test_dmd_ratios.c
 *                                                                  weights_are_those_of_the_step_and_multiply_the_term_of_matching_alone
 *   bins lost, or never saved                                    test_dmd_record.c a_missing_part_is_an_error_that_names_it_...
 *   frequency 1, where the fake score never trains               test_dmd.c settings_that_do_not_fit_are_refused_with_their_numbers
 *   one step of the fake score a cycle                           test_dmd.c turns_are_those_of_the_three_references
 *   a student in training mode, or kept, in the others' turn     below: the_negative_branch_has_no_features_and_keeps_nothing
 *   ---- ranks
 *   the same noise on every data rank                            test_sampler.c a_sample_depends_on_its_number_and_seed_and_step_...
 *   other noise on ranks of one sample                           test_dmd_split.c split_samples_keep_the_bits_of_whole_ones
 *   another number of forwards on some rank                      test_sampler.c a_rank_without_samples_makes_the_same_calls
 *   a rung that one rank must tell the others                    test_dmd.c roll_outs_with_either_noise_keep_the_bits
 *   a discriminator that differs by rank                         test_dmd.c a_discriminator_with_its_penalty_keeps_the_bits
 *   a discriminator that steps in every micro-batch              test_dmd.c values_are_there_for_the_terms_of_a_step_and_not_for_others
 *   means of local means                                         test_dmd.c: 3 ranks have 3, 3 and 2 leaves, with the bits of one
 *   an optimizer over another network's weights, a network       below: roles_that_share_a_wrapper_or_step_another_are_refused
 *     in two roles that train
 *   a missing average or discriminator that begins anew          test_dmd_record.c a_checkpoint_without_an_average_or_the_discriminator_...
 *   ---- numbers and data that are refused
 *   fewer than 1 step; shift below 1; guidance without its       test_dmd.c settings_that_do_not_fit_..., batches_and_calls_that_do_not_fit_...
 *     condition; v without a meaning
 *   p_std of 0; times outside the schedule                       test_times.c samplers_that_make_no_sense_are_refused_with_their_numbers
 *   weights that are negative or NaN                             below, and test_dmd_findings.c the_students_term_refuses_what_it_cannot_read
 *   masks that leave a sample, or all, empty; no elements        test_dmd_findings.c where_nothing_counts_all_is_zero_and_the_status_says_so
 *                                                                  and below: a_sample_without_counted_elements_is_zero_and_changes_no_other
 *   x equal to T                                                 below: epsilon_is_within_the_denominator */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif

#include "dmd_scene.h"

/* ---- the student's term ---- */

enum { ROWS = 3, COLUMNS = 5, CELLS = ROWS * COLUMNS };

typedef struct term {
    float x[CELLS], teacher[CELLS], fake[CELLS], gradient[CELLS];
    uint8_t mask[CELLS];
    double loss[ROWS];
} term;

static term term_of(uint64_t seed) {
    const xd_philox random = { .seed = seed };
    term t;
    memset(&t, 0, sizeof t);
    xd_philox_fill_normal(&random, 0, CELLS, t.x);
    xd_philox_fill_normal(&random, 100, CELLS, t.teacher);
    xd_philox_fill_normal(&random, 200, CELLS, t.fake);
    memset(t.mask, 1, sizeof t.mask);
    return t;
}

static void term_call(term *t, double n) {
    xd_vsd_desc d = xd_vsd_defaults();
    xd_sample_values values;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    d.generated = xd_rows_of(t->x, XD_DTYPE_F32, ROWS, COLUMNS);
    d.teacher = xd_rows_of(t->teacher, XD_DTYPE_F32, ROWS, COLUMNS);
    d.fake = xd_rows_of(t->fake, XD_DTYPE_F32, ROWS, COLUMNS);
    d.gradient = xd_rows_of(t->gradient, XD_DTYPE_F32, ROWS, COLUMNS);
    d.mask = t->mask;
    d.common.denominator_value = n;
    d.common.sample_loss = t->loss;
    CHECK_EQ_INT(xd_vsd_loss(ctx, &d, &values), XD_OK);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_normaliser_is_of_one_sample_and_of_x_minus_t) {
    term t = term_of(1), other = t;
    term_call(&t, CELLS);
    for (int b = 0; b < ROWS; b++) {
        double mean = 0.0;
        for (int i = b * COLUMNS; i < (b + 1) * COLUMNS; i++)
            mean += fabs((double)t.x[i] - (double)t.teacher[i]) / COLUMNS;
        for (int i = b * COLUMNS; i < (b + 1) * COLUMNS; i++) {
            const double g = ((double)t.fake[i] - (double)t.teacher[i]) / (mean + 1e-6) / CELLS;
            CHECK_NEAR(t.gradient[i], g, 1e-6 * fabs(g));
        }
    }
    for (int i = COLUMNS; i < CELLS; i++) other.x[i] *= 50.0f; /* all samples but the first */
    term_call(&other, CELLS);
    CHECK(memcmp(t.gradient, other.gradient, COLUMNS * sizeof(float)) == 0);
    CHECK(memcmp(t.loss, other.loss, sizeof *t.loss) == 0 && t.loss[1] != other.loss[1]);
}

XD_TEST(epsilon_is_within_the_denominator) {
    static const float apart[] = { 0.0f, 1e-6f, 3e-6f };
    for (int k = 0; k < 3; k++) {
        term t = term_of(2);
        for (int i = 0; i < CELLS; i++) t.teacher[i] = 0.0f, t.x[i] = i < COLUMNS ? apart[k] : t.x[i];
        term_call(&t, CELLS);
        for (int i = 0; i < COLUMNS; i++) {
            const double g = (double)t.fake[i] / ((double)apart[k] + 1e-6) / CELLS;
            CHECK_NEAR(t.gradient[i], g, 1e-6 * fabs(g));
        }
    }
}

XD_TEST(a_sample_without_counted_elements_is_zero_and_changes_no_other) {
    term all = term_of(3), some = all;
    memset(some.mask + COLUMNS, 0, COLUMNS);
    for (int i = COLUMNS; i < 2 * COLUMNS; i++) some.x[i] = NAN; /* is not read */
    term_call(&all, 10.0);
    term_call(&some, 10.0);
    CHECK(some.loss[1] == 0.0 && some.loss[0] == all.loss[0] && some.loss[2] == all.loss[2]);
    for (int i = 0; i < CELLS; i++) CHECK(some.gradient[i] == (i / COLUMNS == 1 ? 0.0f : all.gradient[i]));
}

/* ---- what networks are asked ---- */

enum { CALLS = 32, SMALL = 4 };

typedef struct spy_call {
    int role, slot;
    bool backward, keep, features, weights, negative;
    float hidden[SMALL];
} spy_call;

static spy_call spied[CALLS];
static int spied_count, normals_count;
static xd_philox normals_asked[CALLS];
static const int roles[XD_DMD_ROLES] = { 0, 1, 2, 3 };
static const char yes[] = "yes", no[] = "no";

static void spy(const int *role, const xd_network_call *call, bool backward) {
    spy_call *s = &spied[spied_count < CALLS ? spied_count++ : CALLS - 1];
    memset(s, 0, sizeof *s);
    s->role = *role;
    s->slot = call->slot;
    s->backward = backward;
    s->keep = call->keep;
    s->features = call->features != NULL;
    s->weights = call->weights;
    s->negative = call->condition == (const void *)no;
    if (call->hidden) memcpy(s->hidden, call->hidden, sizeof s->hidden);
}

static xd_result spy_forward(void *user, const xd_network_call *call) {
    const bool judge = *(const int *)user == XD_DMD_DISCRIMINATOR;
    spy((const int *)user, call, false);
    for (int i = 0; i < (judge ? 1 : SMALL) && call->samples > 0; i++)
        ((float *)call->raw)[i] = 0.1f * (float)(i + 1);
    if (call->features && !judge) call->features[0][0] = 0.5f;
    return XD_OK;
}

static xd_result spy_backward(void *user, const xd_network_call *call) {
    spy((const int *)user, call, true);
    if (call->hidden_gradient) memset(call->hidden_gradient, 0, SMALL * sizeof(float));
    if (call->input_gradients) call->input_gradients[0][0] = 0.0f;
    return XD_OK;
}

static xd_result ask_normals(void *user, const xd_dmd_draw *draw, float *out) {
    (void)user;
    normals_asked[normals_count < CALLS ? normals_count++ : CALLS - 1] = draw->random;
    for (int64_t i = 0; i < draw->rows * draw->columns; i++)
        out[i] = draw->random.stream == XD_STREAM_R1 ? 1.0f : 0.25f;
    return XD_OK;
}

static const xd_dmd_draws asked = { NULL, ask_normals, NULL, NULL };

static xd_dmd_desc spied_settings(bool judged) {
    static const int64_t feature = 1;
    static const double rungs[] = { 0.999, 0.0 };
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        if (role == XD_DMD_DISCRIMINATOR && !judged) continue;
        d.networks[role].user = (void *)&roles[role];
        d.networks[role].predicts = XD_PREDICT_FLOW;
        d.networks[role].forward = spy_forward;
        d.networks[role].backward = spy_backward;
    }
    d.networks[XD_DMD_TEACHER].feature_count = 1;
    d.networks[XD_DMD_TEACHER].feature_elements = &feature;
    d.networks[XD_DMD_DISCRIMINATOR].heads = 1;
    d.rungs.list = rungs;
    d.sizes.samples = d.sizes.step_samples = 1;
    d.sizes.elements = SMALL;
    d.draws = &asked;
    spied_count = normals_count = 0;
    return d;
}

typedef xd_result (*spied_term)(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch, xd_dmd_values *values);

static void ask(const xd_dmd_desc *d, spied_term one, spied_term another) {
    static const float real[SMALL] = { 2.0f, 2.0f, 2.0f, 2.0f };
    const xd_dmd_batch batch = { .samples = 1, .real = real, .condition = yes, .negative = no };
    xd_dmd *dmd = NULL;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_dmd_create(ctx, d, &dmd), XD_OK);
    CHECK_EQ_INT(one(dmd, 0, &batch, NULL), XD_OK);
    if (another) CHECK_EQ_INT(another(dmd, 0, &batch, NULL), XD_OK);
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_negative_branch_has_no_features_and_keeps_nothing) {
    xd_dmd_desc d = spied_settings(true);
    int negatives = 0;
    d.guided = true;
    d.guidance_scale = 3.0;
    ask(&d, xd_dmd_student, NULL);
    for (int i = 0; i < spied_count; i++) {
        const spy_call *s = &spied[i];
        if (s->negative) negatives++, CHECK(s->role == XD_DMD_TEACHER && !s->features && !s->keep);
        CHECK_EQ_INT(s->weights, s->role == XD_DMD_STUDENT && s->backward); /* nobody else is trained */
        if (s->role == XD_DMD_FAKE_SCORE) CHECK(!s->keep && !s->backward);
    }
    CHECK_EQ_INT(negatives, 1);
    d = spied_settings(true);
    ask(&d, xd_dmd_fake_score, xd_dmd_discriminator);
    for (int i = 0; i < spied_count; i++) {
        const spy_call *s = &spied[i];
        if (s->role == XD_DMD_STUDENT || s->role == XD_DMD_TEACHER) CHECK(!s->keep && !s->backward);
        CHECK_EQ_INT(s->weights, s->backward);
    }
}

/* The teacher's inputs in slots 1 and 2 are the noised real sample and its perturbation. */
XD_TEST(the_penalty_perturbs_what_is_noised) {
    for (int clean = 0; clean < 2; clean++) {
        xd_dmd_desc d = spied_settings(true);
        const spy_call *noised = NULL, *perturbed = NULL;
        d.gan.r1_weight = 1.0;
        d.gan.r1_alpha = 0.125;
        d.gan.r1_on_clean = clean != 0;
        ask(&d, xd_dmd_discriminator, NULL);
        for (int i = 0; i < spied_count; i++) {
            if (spied[i].role != XD_DMD_TEACHER || spied[i].backward) continue;
            if (spied[i].slot == 1) noised = &spied[i];
            if (spied[i].slot == 2) perturbed = &spied[i];
        }
        CHECK(noised && perturbed);
        if (!noised || !perturbed) continue;
        CHECK(noised->hidden[0] < 2.0f); /* (1 - t) 2 + t / 4 */
        CHECK_NEAR(perturbed->hidden[0] - (clean ? 2.0f : noised->hidden[0]), 0.125, 1e-6);
    }
}

XD_TEST(noise_does_not_depend_on_how_times_are_drawn) {
    static const double list[] = { 0.9, 0.5, 0.0 };
    static const xd_time_kind kinds[] = { XD_TIME_UNIFORM, XD_TIME_LOGIT_NORMAL, XD_TIME_LIST };
    xd_philox first[CALLS];
    int count = 0;
    for (int k = 0; k < 3; k++) {
        xd_dmd_desc d = spied_settings(true);
        d.student_times.kind = d.fake_times.kind = kinds[k];
        d.student_times.deviation = d.fake_times.deviation = 1.0;
        d.student_times.list = d.fake_times.list = list;
        d.student_times.list_count = d.fake_times.list_count = 3;
        ask(&d, xd_dmd_student, xd_dmd_discriminator);
        if (k == 0) memcpy(first, normals_asked, sizeof first), count = normals_count;
        CHECK(count > 3 && normals_count == count);
        for (int i = 0; i < count; i++) {
            CHECK(first[i].seed == normals_asked[i].seed && first[i].step == normals_asked[i].step);
            CHECK(first[i].stream == normals_asked[i].stream && first[i].micro == normals_asked[i].micro);
            CHECK(first[i].sample == normals_asked[i].sample);
        }
    }
}

/* ---- what is not finite ---- */

enum { SICK_STEPS = 6, SICK_RANKS = 3 };

/* One network says one number that is none, in one leaf of the last rank, in one step. */
typedef struct sickness {
    dmd_run run;
    float value;
    int role, step, ranks;
    bool skipped[SICK_RANKS][SICK_STEPS];
    xd_dmd_record records[SICK_RANKS];
    uint64_t hashes[SICK_STEPS]; /* of weights, moments and averages after each step */
    double bins[SICK_STEPS][DMD_BINS_MAX];
} sickness;

typedef struct sick_net {
    dmd_net net;
    int role;
    float *value; /* NULL: it is well */
} sick_net;

static xd_result sick_forward(void *user, const xd_network_call *call) {
    sick_net *n = (sick_net *)user;
    XD_TRY(n->role == XD_DMD_DISCRIMINATOR ? dmd_judge_forward(&n->net, call) : dmd_forward(&n->net, call));
    if (n->value && call->samples > 0) ((float *)call->raw)[1] = *n->value;
    return XD_OK;
}

static xd_result sick_backward(void *user, const xd_network_call *call) {
    sick_net *n = (sick_net *)user;
    return n->role == XD_DMD_DISCRIMINATOR ? dmd_judge_backward(&n->net, call) : dmd_backward(&n->net, call);
}

static xd_result sick_steps(xd_comm *world, sickness *s, sick_net *nets, xd_dmd *dmd) {
    const int me = xd_comm_rank(world);
    dmd_rank rank = { .run = &s->run };
    dmd_net copies[XD_DMD_ROLES];
    for (int role = 0; role < XD_DMD_ROLES; role++) copies[role] = nets[role].net;
    for (rank.step = 0; rank.step < SICK_STEPS; rank.step++) {
        xd_dmd_values values;
        dmd_run here = s->run;
        if (me == s->ranks - 1) nets[s->role].value = rank.step == s->step ? &s->value : NULL;
        XD_TRY(xd_dmd_step(dmd, dmd_batch, &rank, &values));
        s->skipped[me][rank.step] = values.skipped;
        XD_TRY(dmd_hash_all(world, copies, &here));
        if (me == 0) s->hashes[rank.step] = here.hash;
        if (me == 0 && s->run.desc.gan.fdistill.on) XD_TRY(xdi_dmd_bins(dmd, s->bins[rank.step]));
    }
    s->records[me] = xd_dmd_describe(dmd);
    return XD_OK;
}

static xd_result sick_rank(xd_comm *world, void *argument) {
    sickness *s = (sickness *)argument;
    sick_net nets[XD_DMD_ROLES];
    xd_dmd_desc desc = s->run.desc;
    xd_dmd *dmd = NULL;
    xd_result result = XD_OK;
    memset(nets, 0, sizeof nets);
    desc.data = world;
    for (int role = 0; role < XD_DMD_ROLES && result == XD_OK; role++) {
        dmd_net *net = &nets[role].net;
        nets[role].role = role;
        result = dmd_make_net(net, world, (xd_dmd_role)role, &s->run, NULL);
        desc.networks[role] = dmd_network(net, (xd_dmd_role)role);
        desc.networks[role].user = &nets[role];
        desc.networks[role].forward = sick_forward;
        desc.networks[role].backward = sick_backward;
        desc.trainers[role] = (xd_dmd_trainer){ net->parallel, net->optimizer, &net->average, 1, 1.0, NULL };
    }
    if (result == XD_OK) result = xd_dmd_create(xd_comm_ctx(world), &desc, &dmd);
    if (result == XD_OK) result = sick_steps(world, s, nets, dmd);
    xd_dmd_destroy(dmd);
    for (int role = 0; role < XD_DMD_ROLES; role++) dmd_free_net(&nets[role].net);
    return result;
}

static void check_sickness(const sickness *s) {
    const bool students = s->step % 2 == 0;
    for (int rank = 0; rank < s->ranks; rank++) {
        const xd_dmd_record *r = &s->records[rank];
        for (int step = 0; step < SICK_STEPS; step++) CHECK_EQ_INT(s->skipped[rank][step], step == s->step);
        CHECK_EQ_INT(r->step, SICK_STEPS);
        CHECK_EQ_INT(r->updates[XD_DMD_STUDENT], students ? 2 : 3);
        CHECK_EQ_INT(r->updates[XD_DMD_FAKE_SCORE], students ? 3 : 2);
        CHECK_EQ_INT(r->updates[XD_DMD_DISCRIMINATOR], students ? 3 : 2);
    }
    for (int step = 1; step < SICK_STEPS; step++) {
        const bool weighed = s->run.desc.gan.fdistill.on && step % 2 == 0 && step != s->step;
        CHECK((s->hashes[step] == s->hashes[step - 1]) == (step == s->step));
        CHECK((memcmp(s->bins[step], s->bins[step - 1], sizeof s->bins[step]) != 0) == weighed);
    }
}

/* x, T, F and logits in the student's step; x, the fake score's prediction and logits in the others'. */
XD_TEST(what_is_not_finite_in_any_array_skips_the_step_on_every_rank) {
    static const float values[] = { NAN, HUGE_VALF, -HUGE_VALF };
    sickness *s = (sickness *)malloc(sizeof *s);
    for (int variant = 0; variant < 2 * XD_DMD_ROLES * 3; variant++)
        for (int weighted = 0; weighted < 2; weighted++) {
            xd_error error = { 0 };
            memset(s, 0, sizeof *s);
            s->role = variant % XD_DMD_ROLES;
            s->step = 2 + variant / XD_DMD_ROLES % 2;
            s->value = values[variant / XD_DMD_ROLES / 2];
            s->ranks = 1 + variant % SICK_RANKS;
            s->run.desc = dmd_settings(XD_DMD_MODELOPT, 1);
            s->run.desc.gan.fdistill.on = weighted != 0;
            s->run.gan = true;
            s->run.poisoned = -1;
            if (s->role == XD_DMD_TEACHER && s->step == 3) continue; /* its features alone are used */
            CHECK_EQ_INT(xd_run_threads(s->ranks, NULL, sick_rank, s, &error), XD_OK);
            if (error.message[0]) printf("%s\n", error.message);
            check_sickness(s);
        }
    free(s);
}

/* ---- settings ---- */

static void refuse(const xd_dmd_desc *d, const char *text) {
    xd_dmd *dmd = NULL;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_dmd_create(ctx, d, &dmd), XD_ERROR_ARGUMENT);
    CHECK(dmd == NULL && strstr(xd_last_error(ctx)->message, text));
    if (!strstr(xd_last_error(ctx)->message, text)) printf("%s\n", xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
}

XD_TEST(numbers_that_train_nothing_are_refused_before_a_step) {
    static const double open[] = { 0.9, 0.5, 0.25 }, high[] = { 1.5, 0.5, 0.0 }, level[] = { 0.5, 0.5, 0.0 };
    static const double none[] = { 0.9, NAN, 0.0 };
    static const double *const lists[] = { open, high, level, none };
    static const char *const says[] = { "ends in 0.25", "begins at 1.5", "0.5 comes after 0.5", "nan comes" };
    const xd_dmd_desc good = spied_settings(true);
    xd_dmd_desc d;
    for (int k = 0; k < 4; k++) {
        d = good, d.rungs.steps = 2, d.rungs.list = lists[k];
        refuse(&d, says[k]);
    }
    d = good, d.rungs.steps = -3;
    refuse(&d, "a student of -3 steps");
    d = good, d.gan.weight = NAN;
    refuse(&d, "weight nan");
    d = good, d.gan.weight = -0.5;
    refuse(&d, "weight -0.5");
    d = good, d.gan.r1_weight = NAN;
    refuse(&d, "r1_weight nan");
    d = good, d.gan.r1_weight = 1.0, d.gan.r1_alpha = NAN;
    refuse(&d, "r1_alpha nan");
    d = good, d.student_times.shift = NAN;
    refuse(&d, "nan");
    d = good, d.fake_times.kind = XD_TIME_LOGIT_NORMAL, d.fake_times.deviation = 0.0;
    refuse(&d, "0");
    d = good, d.fake_times.kind = XD_TIME_LOGIT_NORMAL, d.fake_times.deviation = -1.0;
    refuse(&d, "-1");
    d = good, d.student_times.max_t = 1.5;
    refuse(&d, "1.5");
    d = good, d.student_times.min_t = -0.5;
    refuse(&d, "-0.5");
    d = good, d.sizes.elements = d.sizes.whole_elements = 0;
    refuse(&d, "samples of 0");
}

/* ---- roles that have something in common ---- */

static void refuse_roles(xd_comm *world, const xd_dmd_desc *desc, xd_result expected, const char *text) {
    const char *message = xd_last_error(xd_comm_ctx(world))->message;
    xd_dmd *dmd = NULL;
    const xd_result result = xd_dmd_create(xd_comm_ctx(world), desc, &dmd);
    CHECK(result == expected ||
          (result == XD_ERROR_PEER && xd_comm_rank(world) == 1)); /* with nothing of it */
    CHECK(!dmd);
    if (!strstr(message, text)) CHECK_EQ_STR(message, text);
}

static xd_result mixed_roles(xd_comm *world, void *argument) {
    dmd_run run = { .desc = dmd_settings(XD_DMD_MODELOPT, 1), .gan = true, .fsdp = true };
    dmd_net nets[XD_DMD_ROLES];
    xd_dmd_desc desc, d;
    xd_dmd *dmd = NULL;
    (void)argument;
    XD_TRY(dmd_make_all(world, &run, NULL, nets, &desc));
    d = desc, d.trainers[XD_DMD_FAKE_SCORE].parallel = nets[XD_DMD_STUDENT].parallel;
    refuse_roles(world, &d, XD_ERROR_STATE, "student and fake score have one wrapper");
    d = desc, d.trainers[XD_DMD_STUDENT].optimizer = nets[XD_DMD_FAKE_SCORE].optimizer;
    refuse_roles(world, &d, XD_ERROR_ARGUMENT,
                 "the student's optimizer has 2 parameters, none of its wrapper's, of which the first is "
                 "\"up.weight\"");
    CHECK_EQ_INT(xd_dmd_create(xd_comm_ctx(world), &desc, &dmd), XD_OK);
    xd_dmd_destroy(dmd);
    dmd_free_net(&nets[XD_DMD_DISCRIMINATOR]); /* its turn under DDP, where leaves lie otherwise */
    memset(&nets[XD_DMD_DISCRIMINATOR], 0, sizeof nets[0]);
    run.fsdp = false;
    XD_TRY(dmd_make_net(&nets[XD_DMD_DISCRIMINATOR], world, XD_DMD_DISCRIMINATOR, &run, NULL));
    desc.trainers[XD_DMD_DISCRIMINATOR].parallel = nets[XD_DMD_DISCRIMINATOR].parallel;
    desc.trainers[XD_DMD_DISCRIMINATOR].optimizer = nets[XD_DMD_DISCRIMINATOR].optimizer;
    refuse_roles(world, &desc, XD_ERROR_ARGUMENT,
                 "for the discriminator: FSDP deals them as DDP does with accumulate_whole");
    dmd_free_all(nets);
    return XD_OK;
}

XD_TEST(roles_that_share_a_wrapper_or_step_another_are_refused) {
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    CHECK_EQ_INT(xd_run_threads(2, &invariant, mixed_roles, NULL, &error), XD_OK);
    CHECK_EQ_STR(error.message, "");
}

XD_TEST_MAIN()
