/* test_toys.c - the toys of examples/toys: the network's gradients, the bits of one rank on several, and the measures. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>

#define TOY_POINTS 500

#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/toys/toy_net.c"
#include "../examples/toys/toy_data.c"
#include "../examples/toys/toy_measure.c"
#include "../examples/toys/toy_sample.c"
#include "../examples/toys/toy_train.c"

/* ---- the network ---- */

enum { SAMPLES = 3, NUMBERS = SAMPLES * TOY_ELEMENTS };

typedef struct scene {
    toy_actor actor;
    xd_network network;
    float hidden[NUMBERS], raw[NUMBERS], slope[NUMBERS], below[NUMBERS];
    double times[SAMPLES];
} scene;

static xd_result scene_forward(scene *s, bool keep) {
    const xd_network_call call = {
        .samples = SAMPLES, .hidden = s->hidden, .times = s->times, .raw = s->raw, .keep = keep
    };
    return s->network.forward(s->network.user, &call);
}

static xd_result scene_backward(scene *s, bool weights) {
    const xd_network_call call = { .samples = SAMPLES,
                                   .hidden = s->hidden,
                                   .times = s->times,
                                   .raw_gradient = s->slope,
                                   .hidden_gradient = s->below,
                                   .weights = weights };
    return s->network.backward(s->network.user, &call);
}

/* The value whose gradient by raw is `slope`, with a number of the network or its input moved by `by`. */
static double scene_value(scene *s, float *number, float by) {
    const float before = *number;
    double sum = 0.0;
    *number = before + by;
    CHECK_EQ_INT(xd_parallel_publish(s->actor.parallel), XD_OK);
    CHECK_EQ_INT(scene_forward(s, false), XD_OK);
    for (int i = 0; i < NUMBERS; i++) sum += (double)s->slope[i] * (double)s->raw[i];
    *number = before;
    CHECK_EQ_INT(xd_parallel_publish(s->actor.parallel), XD_OK);
    return sum;
}

static void scene_check(scene *s, float *number, float gradient) {
    const double by = 4e-3;
    const double slope =
        (scene_value(s, number, (float)by) - scene_value(s, number, -(float)by)) / (2.0 * by);
    CHECK_NEAR(slope, (double)gradient, 2e-3 + 2e-3 * fabs(slope));
}

static void scene_fill(scene *s) {
    for (int i = 0; i < NUMBERS; i++) {
        s->hidden[i] = sinf(1.0f + 2.0f * (float)i);
        s->slope[i] = cosf(3.0f * (float)i);
    }
    for (int i = 0; i < SAMPLES; i++) s->times[i] = 0.1 + 0.4 * i;
    s->network = toy_net_network(s->actor.net);
}

static xd_result compare_gradients(xd_comm *world, void *argument) {
    const toy_recipe recipe = { .learning_rate = 1e-3 };
    float first[NUMBERS];
    scene s;
    (void)argument;
    memset(&s, 0, sizeof s);
    XD_TRY(toy_engage(world, 5, &recipe, &s.actor));
    scene_fill(&s);
    for (int64_t leaf = 0; leaf < TOY_MICRO_BATCHES; leaf++) { /* the first alone has a gradient */
        xd_network_call none = { .weights = true, .micro_batch = leaf };
        if (leaf == 0) {
            CHECK_EQ_INT(scene_forward(&s, true), XD_OK);
            CHECK_EQ_INT(scene_backward(&s, true), XD_OK);
        } else {
            CHECK_EQ_INT(s.network.backward(s.network.user, &none), XD_OK);
        }
    }
    memcpy(first, s.below, sizeof first);
    CHECK_EQ_INT(xd_parallel_reduce(s.actor.parallel), XD_OK);
    for (int64_t i = 0; i < s.actor.count; i++) {
        const xd_param *p = &s.actor.params[i];
        for (int64_t k = 0; k < p->count; k += p->count / 7 + 1)
            scene_check(&s, (float *)p->value + k, ((const float *)p->gradient)[k]);
    }
    for (int i = 0; i < NUMBERS; i++) scene_check(&s, &s.hidden[i], first[i]);
    CHECK_EQ_INT(scene_forward(&s, true), XD_OK);
    CHECK_EQ_INT(scene_backward(&s, false), XD_OK); /* by the input alone */
    CHECK(memcmp(first, s.below, sizeof first) == 0);
    toy_dismiss(&s.actor);
    return XD_OK;
}

XD_TEST(gradients_of_the_network_are_its_slopes) {
    CHECK_EQ_INT(xd_run_threads(1, NULL, compare_gradients, NULL, NULL), XD_OK);
}

static xd_result ask_for_too_much(xd_comm *world, void *argument) {
    const toy_recipe recipe = { .learning_rate = 1e-3 };
    toy_actor actor;
    (void)argument;
    memset(&actor, 0, sizeof actor);
    XD_TRY(toy_engage(world, 5, &recipe, &actor));
    const xd_network network = toy_net_network(actor.net);
    const xd_network_call call = { .samples = TOY_CHUNK + 1 };
    CHECK_EQ_INT(network.forward(network.user, &call), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message,
                 "251 samples in slot 0; there is room for 250 in 1"));
    toy_dismiss(&actor);
    return XD_OK;
}

XD_TEST(a_pass_of_more_samples_than_there_is_room_for_is_refused_with_both_numbers) {
    CHECK_EQ_INT(xd_run_threads(1, NULL, ask_for_too_much, NULL, NULL), XD_OK);
}

/* ---- runs ---- */

enum { ALL_NUMBERS = TOY_ROWS * TOY_POINTS * TOY_ELEMENTS };

enum { MOST_STEPS = 4 };

/* What the student of four steps told: of fake score and distance. */
static double told[2][MOST_STEPS];

/* A teacher of a few steps and both students, in the mode of build/demo-toys. */
static float *run_toy(int ranks, toy_kind kind, int steps) {
    const toy_options options = {
        .steps = steps, .teacher_steps = 12, .rate = 3e-4, .fake_rate = 2e-3, .turn = 5, .seed = 4
    };
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    float *points = (float *)calloc(ALL_NUMBERS, sizeof *points);
    toy_run run = { .options = &options, .kind = kind };
    xd_error error = { 0 };
    memset(told, 0, sizeof told);
    run.curve.fake_score = told[0];
    run.curve.distance = told[1];
    for (int row = 0; row < TOY_ROWS; row++) run.points[row] = points + row * (ALL_NUMBERS / TOY_ROWS);
    const xd_result result = xd_run_threads(ranks, &invariant, toy_run_rank, &run, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    CHECK_EQ_INT(result, XD_OK);
    CHECK(run.curve.level.fake_score > 0.0 && run.curve.level.distance > 0.0);
    return points;
}

XD_TEST(any_number_of_ranks_gives_the_points_of_one) {
    float *one = run_toy(1, TOY_MOONS, 3);
    double told_to_one[2][MOST_STEPS];
    memcpy(told_to_one, told, sizeof told);
    for (int turn = 0; turn < MOST_STEPS; turn++) {
        CHECK((told[0][turn] > 0.0) == (turn < 3));
        CHECK((told[1][turn] > 0.0) == (turn < 3));
    }
    for (int ranks = 2; ranks <= 3; ranks++) {
        float *many = run_toy(ranks, TOY_MOONS, 3);
        CHECK(memcmp(one, many, ALL_NUMBERS * sizeof *one) == 0);
        CHECK(memcmp(told, told_to_one, sizeof told) == 0);
        free(many);
    }
    free(one);
}

XD_TEST(students_move_with_their_steps_and_the_teacher_does_not) {
    const int of_a_row = ALL_NUMBERS / TOY_ROWS;
    float *few = run_toy(2, TOY_GAUSSIANS, 1), *more = run_toy(2, TOY_GAUSSIANS, 2);
    for (int row = 0; row < TOY_ROWS; row++) {
        const bool same =
            memcmp(few + row * of_a_row, more + row * of_a_row, (size_t)of_a_row * sizeof *few) == 0;
        CHECK(same == (row == TOY_TEACHER_50 || row == TOY_TEACHER_4));
    }
    free(few);
    free(more);
}

/* ---- measures ---- */

/* Moved by d, every projection is moved by d times a cosine, whose mean square over directions is a half. */
XD_TEST(the_distance_of_moved_points_is_that_of_the_move) {
    float points[TOY_POINTS * TOY_ELEMENTS];
    toy_figures f;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int kind = 0; kind < TOY_KINDS; kind++) {
        toy_fresh((toy_kind)kind, 9, TOY_POINTS, points);
        CHECK_EQ_INT(toy_measure(ctx, (toy_kind)kind, 9, points, &f), XD_OK);
        CHECK_NEAR(f.distance, 0.0, 1e-12);
        for (int i = 0; i < TOY_POINTS; i++) points[i * TOY_ELEMENTS] += 0.5f;
        CHECK_EQ_INT(toy_measure(ctx, (toy_kind)kind, 9, points, &f), XD_OK);
        CHECK_NEAR(f.distance, 0.5 / sqrt(2.0), 1e-6);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(modes_have_the_mass_that_lies_nearest_to_them) {
    float points[TOY_POINTS * TOY_ELEMENTS];
    double centre[TOY_ELEMENTS];
    toy_figures f;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int i = 0; i < TOY_POINTS; i++) { /* every tenth point far outside, the last mode with 40 of 500 */
        toy_mode(i < 40 ? 7 : i % 7, centre);
        for (int j = 0; j < TOY_ELEMENTS; j++)
            points[i * TOY_ELEMENTS + j] = (float)(centre[j] * (i % 10 == 0 ? 1.5 : 1.0));
    }
    CHECK_EQ_INT(toy_measure(ctx, TOY_GAUSSIANS, 9, points, &f), XD_OK);
    CHECK_NEAR(f.least_mode, 0.08, 1e-12);
    CHECK_NEAR(f.within, 0.9, 1e-12);
    toy_fresh(TOY_GAUSSIANS, 3, TOY_POINTS, points);
    CHECK_EQ_INT(toy_measure(ctx, TOY_GAUSSIANS, 9, points, &f), XD_OK);
    CHECK(f.within > 0.97 && f.least_mode > 0.09); /* e^-4.5 of a Gaussian is outside, 1 % */
    xd_ctx_destroy(ctx);
}

/* A teacher that knows nothing of what it is asked. */
static xd_result say_no_flow(void *user, const xd_network_call *call) {
    (void)user;
    memset(call->raw, 0, (size_t)call->samples * TOY_ELEMENTS * sizeof(float));
    return XD_OK;
}

/* Then the flow, noise - x, is what is missed: squares of 1 and of the data, whose modes are 1.6 from the origin and .2 wide. */
XD_TEST(the_level_of_data_is_what_the_teacher_misses_of_it) {
    const xd_network silent = { .forward = say_no_flow };
    const double square = 1.0 + 0.5 * 1.6 * 1.6 + 0.2 * 0.2;
    toy_level level = { 0.0, 0.0 };
    CHECK_EQ_INT(toy_find_level(&silent, TOY_GAUSSIANS, 2, &level), XD_OK);
    CHECK_NEAR(level.fake_score, square, 0.1);
    CHECK_NEAR(level.distance, 0.5 * sqrt(square * 2.0 / 3.14159265), 0.05); /* times of .5 on average */
}

XD_TEST_MAIN()
