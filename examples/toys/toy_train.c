/* toy_train.c - on each rank: a teacher learns the flow of a toy, and two students learn from the teacher by xd_dmd_step. */
#include "toys.h"

#include <math.h>
#include <string.h>

enum { TOY_IN_MICRO_BATCH = TOY_BATCH / TOY_MICRO_BATCHES };

/* How a network trains. */
typedef struct toy_recipe {
    double learning_rate, beta1, beta2, decay; /* decay: of the average */
} toy_recipe;

static const toy_recipe toy_teacher_recipe = { 2e-3, 0.9, 0.99, 0.995 };
static const toy_recipe toy_student_recipe = { 0.0, 0.0, 0.99, 0.99 }; /* rates are the options' */
static const toy_recipe toy_critic_recipe = { 0.0, 0.0, 0.99, 0.0 };

/* A network with what trains it. */
typedef struct toy_actor {
    xd_model *model;
    toy_net *net;
    xd_parallel *parallel;
    xd_optimizer *optimizer;
    xd_ema *average; /* NULL -> none */
    xd_param params[TOY_WEIGHTS];
    int64_t count;
    double learning_rate;
} toy_actor;

/* Networks of a rank. */
typedef struct toy_cast {
    toy_actor teacher, critic, student;
} toy_cast;

/* ---- networks ---- */

static void toy_dismiss(toy_actor *a) {
    xd_ema_destroy(a->average);
    xd_optimizer_destroy(a->optimizer);
    xd_parallel_destroy(a->parallel);
    toy_net_destroy(a->net);
    xd_model_destroy(a->model);
    memset(a, 0, sizeof *a);
}

static xd_result toy_engage(xd_comm *world, uint64_t seed, const toy_recipe *recipe, toy_actor *a) {
    xd_ctx *ctx = xd_comm_ctx(world);
    XD_TRY(toy_net_describe(ctx, seed, &a->model));
    XD_TRY(toy_net_create(ctx, a->model, TOY_CHUNK, 1, &a->net));
    const xd_ddp_desc ddp = { .data = world, .micro_batches = TOY_MICRO_BATCHES };
    XD_TRY(xd_ddp_create(a->model, &ddp, &a->parallel));
    XD_TRY(xd_parallel_params(a->parallel, TOY_WEIGHTS, a->params, &a->count));
    xd_optimizer_desc adamw = xd_adamw_defaults(a->params, a->count);
    adamw.learning_rate = a->learning_rate = recipe->learning_rate;
    adamw.beta1 = recipe->beta1;
    adamw.beta2 = recipe->beta2;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &a->optimizer));
    if (recipe->decay == 0.0) return XD_OK;
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_RAMP);
    ema.decay = recipe->decay;
    ema.params = a->params;
    ema.param_count = a->count;
    return xd_ema_create(ctx, &ema, &a->average);
}

/* The weights of another network, before any step. */
static xd_result toy_take_after(toy_actor *a, const toy_actor *other) {
    for (int64_t i = 0; i < a->count; i++)
        memcpy(a->params[i].value, other->params[i].value, (size_t)a->params[i].count * sizeof(float));
    return xd_parallel_publish(a->parallel);
}

/* From now on the average is what the network has. */
static xd_result toy_settle(toy_actor *a) {
    XD_TRY(xd_ema_copy_to(a->average, a->params, a->count, false, NULL));
    return xd_parallel_publish(a->parallel);
}

/* A learning rate that falls along half a cosine to a twentieth. */
static xd_result toy_set_rate(toy_actor *a, int step, int steps) {
    const double way = 0.5 + 0.5 * cos(3.14159265358979323846 * step / steps);
    return xd_optimizer_set_learning_rate(a->optimizer, a->learning_rate * (0.05 + 0.95 * way));
}

/* ---- the teacher ---- */

/* A micro-batch of flow matching: the network is to say eps - x at (1 - t) x + t eps. */
typedef struct toy_lesson {
    float hidden[TOY_IN_MICRO_BATCH * TOY_ELEMENTS], target[TOY_IN_MICRO_BATCH * TOY_ELEMENTS];
    double times[TOY_IN_MICRO_BATCH];
} toy_lesson;

static void toy_prepare(const toy_run *run, int64_t first, int step, toy_lesson *lesson) {
    xd_philox random = { .seed = run->options->seed, .stream = TOY_STREAM_TRAIN, .step = (uint32_t)step };
    for (int64_t i = 0; i < TOY_IN_MICRO_BATCH; i++) {
        float x[TOY_ELEMENTS], noise[TOY_ELEMENTS];
        random.sample = (uint32_t)(first + i);
        toy_draw(run->kind, &random, x);
        xd_philox_fill_normal(&random, 8, TOY_ELEMENTS, noise); /* block 2 */
        const double t = lesson->times[i] = xd_philox_uniform_f64(&random, 3);
        for (int64_t j = 0; j < TOY_ELEMENTS; j++) {
            lesson->hidden[i * TOY_ELEMENTS + j] = (float)((1.0 - t) * (double)x[j] + t * (double)noise[j]);
            lesson->target[i * TOY_ELEMENTS + j] = noise[j] - x[j];
        }
    }
}

static xd_result toy_teach_leaf(const toy_run *run, toy_actor *teacher, int64_t k, int step) {
    const xd_network network = toy_net_network(teacher->net);
    float raw[TOY_IN_MICRO_BATCH * TOY_ELEMENTS], slope[TOY_IN_MICRO_BATCH * TOY_ELEMENTS];
    toy_lesson lesson;
    toy_prepare(run, xd_parallel_micro_batch(teacher->parallel, k) * TOY_IN_MICRO_BATCH, step, &lesson);
    xd_network_call call = {
        .samples = TOY_IN_MICRO_BATCH, .hidden = lesson.hidden, .times = lesson.times, .raw = raw
    };
    call.keep = true;
    XD_TRY(network.forward(network.user, &call));
    for (int i = 0; i < TOY_IN_MICRO_BATCH * TOY_ELEMENTS; i++)
        slope[i] = 2.0f / (TOY_BATCH * TOY_ELEMENTS) * (raw[i] - lesson.target[i]);
    call.raw_gradient = slope;
    call.weights = true;
    call.micro_batch = k;
    return network.backward(network.user, &call);
}

static xd_result toy_train_teacher(const toy_run *run, toy_actor *teacher) {
    const xd_optimizer_step_desc with_average = { .averages = &teacher->average, .average_count = 1 };
    for (int step = 0; step < run->options->teacher_steps; step++) {
        for (int64_t k = 0; k < xd_parallel_micro_batches(teacher->parallel).own; k++)
            XD_TRY(toy_teach_leaf(run, teacher, k, step));
        XD_TRY(toy_set_rate(teacher, step, run->options->teacher_steps));
        XD_TRY(xd_parallel_reduce(teacher->parallel));
        XD_TRY(xd_optimizer_step(teacher->optimizer, &with_average, NULL));
        XD_TRY(xd_parallel_publish(teacher->parallel));
    }
    return toy_settle(teacher);
}

/* ---- students ---- */

/* Everything is drawn: a batch is the number of its first sample. */
static xd_result toy_batch(void *user, int64_t micro_batch, xd_dmd_batch *batch) {
    (void)user;
    batch->samples = TOY_IN_MICRO_BATCH;
    batch->first = micro_batch * TOY_IN_MICRO_BATCH;
    return XD_OK;
}

static void toy_give_role(xd_dmd_desc *desc, xd_dmd_role role, toy_actor *a) {
    desc->networks[role] = toy_net_network(a->net);
    desc->trainers[role] = (xd_dmd_trainer){ .parallel = a->parallel, .optimizer = a->optimizer };
    desc->trainers[role].averages = &a->average;
    desc->trainers[role].average_count = a->average ? 1 : 0;
}

/* Without data and without a discriminator: matching of distributions along the student's own samples. */
static xd_dmd_desc toy_settings(xd_comm *world, toy_cast *cast, const double *rungs, int steps) {
    xd_dmd_desc desc = xd_dmd_defaults(XD_DMD_DATA_FREE);
    desc.rungs.steps = steps;
    desc.rungs.list = rungs;
    desc.rungs.roll_out = steps > 1;
    desc.sizes.samples = TOY_IN_MICRO_BATCH;
    desc.sizes.step_samples = TOY_BATCH;
    desc.sizes.elements = TOY_ELEMENTS;
    desc.data = world;
    toy_give_role(&desc, XD_DMD_TEACHER, &cast->teacher);
    toy_give_role(&desc, XD_DMD_STUDENT, &cast->student);
    toy_give_role(&desc, XD_DMD_FAKE_SCORE, &cast->critic);
    return desc;
}

/* A role without a turn has the value 0. */
static void toy_note(const toy_run *run, int step, const xd_dmd_values *values) {
    const int turn = run->options->turn, at = step / turn;
    if (step % turn == 0)
        run->curve.distance[at] = values->distance;
    else
        run->curve.fake_score[at] += values->fake_score / (turn - 1);
}

static xd_result toy_steps(xd_comm *world, const toy_run *run, toy_cast *cast, xd_dmd *dmd, bool noted) {
    const int steps = run->options->steps, turn = run->options->turn;
    xd_dmd_values values;
    for (int step = 0; step < turn * steps; step++) {
        XD_TRY(toy_set_rate(&cast->student, step / turn, steps));
        XD_TRY(xd_dmd_step(dmd, toy_batch, NULL, &values));
        XD_REQUIRE(xd_comm_ctx(world), !values.skipped, XD_ERROR_DATA, "step %d of %s is not finite", step,
                   toy_names[run->kind]);
        if (noted) toy_note(run, step, &values);
    }
    return toy_settle(&cast->student);
}

static xd_result toy_distil(xd_comm *world, const toy_run *run, toy_cast *cast, int steps) {
    double rungs[8];
    xd_dmd *dmd;
    toy_recipe student = toy_student_recipe, critic = toy_critic_recipe;
    student.learning_rate = run->options->rate;
    critic.learning_rate = run->options->fake_rate;
    XD_TRY(toy_engage(world, 0, &student, &cast->student));
    XD_TRY(toy_engage(world, 0, &critic, &cast->critic));
    XD_TRY(toy_take_after(&cast->student, &cast->teacher));
    XD_TRY(toy_take_after(&cast->critic, &cast->teacher));
    xd_dmd_desc desc = toy_settings(world, cast, rungs, steps);
    desc.seed = run->options->seed;
    desc.frequency = run->options->turn;
    XD_TRY(xd_noise_steps(xd_comm_ctx(world), &desc.schedule, steps, rungs));
    XD_TRY(xd_dmd_create(xd_comm_ctx(world), &desc, &dmd));
    const bool noted = steps == TOY_RUNGS && xd_comm_rank(world) == 0;
    const xd_result result = toy_steps(world, run, cast, dmd, noted);
    xd_dmd_destroy(dmd);
    return result;
}

/* ---- the whole ---- */

static xd_result toy_student_row(xd_comm *world, const toy_run *run, toy_cast *cast, int steps,
                                 float *points) {
    const toy_sampler sampler = { .steps = steps, .few = true, .seed = run->options->seed };
    XD_TRY(toy_distil(world, run, cast, steps));
    const xd_network network = toy_net_network(cast->student.net);
    XD_TRY(toy_sample(world, &network, &sampler, points));
    toy_dismiss(&cast->student);
    toy_dismiss(&cast->critic);
    return XD_OK;
}

static xd_result toy_rows(xd_comm *world, toy_run *run, toy_cast *cast) {
    toy_sampler sampler = { .steps = 50, .seed = run->options->seed };
    XD_TRY(toy_engage(world, run->options->seed, &toy_teacher_recipe, &cast->teacher));
    XD_TRY(toy_train_teacher(run, &cast->teacher));
    const xd_network network = toy_net_network(cast->teacher.net);
    if (xd_comm_rank(world) == 0)
        XD_TRY(toy_find_level(&network, run->kind, run->options->seed, &run->curve.level));
    XD_TRY(toy_sample(world, &network, &sampler, run->points[TOY_TEACHER_50]));
    sampler.steps = 4;
    XD_TRY(toy_sample(world, &network, &sampler, run->points[TOY_TEACHER_4]));
    XD_TRY(toy_student_row(world, run, cast, TOY_RUNGS, run->points[TOY_STUDENT_4]));
    return toy_student_row(world, run, cast, 1, run->points[TOY_STUDENT_1]);
}

xd_result toy_run_rank(xd_comm *world, void *argument) {
    toy_cast cast;
    memset(&cast, 0, sizeof cast);
    const xd_result result = toy_rows(world, (toy_run *)argument, &cast);
    toy_dismiss(&cast.student);
    toy_dismiss(&cast.critic);
    toy_dismiss(&cast.teacher);
    return result;
}
