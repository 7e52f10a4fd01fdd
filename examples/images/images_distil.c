/* images_distil.c - one student from the teacher: warm-up by regression, then matching of distributions. */
#include "images_run.h"

#include "../common/progress.h"

#include <stdio.h>
#include <string.h>

enum { DRAWN_CLASS = XD_STREAM_USER + 16, DRAWN_REAL };

/* ---- batches ---- */

/* Real pictures of the classes drawn, others in each step. */
static void images_draw_real(images_run *run, xd_dmd_batch *batch) {
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = run->options->seed;
    random.stream = DRAWN_REAL;
    random.step = (uint32_t)run->step;
    const int64_t own = run->pixels.end - run->pixels.begin;
    for (int64_t i = 0; i < batch->samples; i++) {
        random.sample = (uint32_t)(batch->first + i);
        const float *picture = real_pictures_draw(run->recipe->real, run->classes[i], &random);
        memcpy(run->real + i * own, picture + run->pixels.begin, (size_t)own * sizeof(float));
    }
    batch->real = run->real;
}

/* Pictures of drawn classes. The fake score learns from what the student drew in its last step, so the classes are that step's. */
static xd_result images_batch(void *user, int64_t micro_batch, xd_dmd_batch *batch) {
    images_run *run = (images_run *)user;
    run->micro_batch = micro_batch;
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = run->options->seed;
    random.stream = DRAWN_CLASS;
    random.micro = run->warming;
    random.step = (uint32_t)run->drawn_at;
    batch->samples =
        (run->warming ? run->recipe->batch / run->recipe->rungs : run->recipe->batch) / IMAGES_MICRO_BATCHES;
    batch->first = micro_batch * batch->samples;
    batch->condition = run->classes;
    for (int64_t i = 0; i < batch->samples; i++) {
        random.sample = (uint32_t)(batch->first + i);
        run->classes[i] = (int32_t)xd_draw_index(&random, 0, IMAGE_CLASSES);
    }
    if (run->recipe->real && !run->warming) images_draw_real(run, batch);
    return XD_OK;
}

static int images_turn(const images_recipe *recipe, int step) {
    const int after = step - recipe->lead;
    return after < 0 ? step : step - after % (recipe->critics + 1);
}

/* ---- settings ---- */

static xd_time_sampler images_times(double shift) {
    xd_time_sampler times = xd_times_defaults(XD_DMD_MODELOPT);
    times.kind = XD_TIME_SHIFTED;
    times.min_t = 0.02;
    times.max_t = 0.998;
    times.shift = shift;
    return times;
}

static void images_give(images_run *run, xd_dmd_role role) {
    images_role *of = &run->roles[role];
    xd_dmd_trainer *trainer = &run->desc.trainers[role];
    run->desc.networks[role] = of->network;
    trainer->parallel = of->parallel;
    trainer->optimizer = of->optimizer;
    trainer->averages = &of->average;
    trainer->average_count = of->average ? 1 : 0;
    trainer->norm = run->world;
}

/* Times lean towards noise, the more for the student: what is bright and what dark is decided there. */
static void images_fill_desc(images_run *run) {
    const images_recipe *recipe = run->recipe;
    xd_dmd_desc *d = &run->desc;
    *d = xd_dmd_defaults(XD_DMD_MODELOPT);
    images_give(run, XD_DMD_STUDENT);
    images_give(run, XD_DMD_FAKE_SCORE);
    images_give(run, XD_DMD_TEACHER);
    if (recipe->real) images_give(run, XD_DMD_DISCRIMINATOR);
    d->data = run->ranks.data;
    d->sizes.samples = recipe->batch / IMAGES_MICRO_BATCHES;
    d->sizes.step_samples = recipe->batch;
    d->sizes.elements = run->pixels.end - run->pixels.begin;
    d->sizes.whole_elements = IMAGE_PIXELS;
    d->sizes.first_element = run->pixels.begin;
    d->sizes.split = run->ranks.cp;
    d->student_times = images_times(4.0);
    d->fake_times = images_times(3.0);
    d->rungs.steps = recipe->rungs;
    d->rungs.list = recipe->list;
    d->rungs.roll_out = recipe->rungs > 1;
    d->rungs.deal = recipe->rungs > 1 ? XD_DMD_RUNGS_IN_TURN : XD_DMD_ONE_RUNG;
    d->regression.substeps = 4;
    d->regression.step_samples = recipe->batch / recipe->rungs;
    d->fake_loss.space = XD_PREDICT_FLOW;
    d->frequency = recipe->critics + 1;
    d->lead = recipe->lead;
    d->own_samples = true;
    d->gan.weight = recipe->gan;
    d->gan.same_noise = true;
    d->gan.r1_weight = recipe->gan_r1;
    d->gan.penalty = XD_DMD_PENALTY_SLOPE;
    d->seed = run->options->seed;
}

/* Optimizers have changed: the settings are made again, and what they are settings of. */
static xd_result images_begin(images_run *run) {
    xd_dmd_destroy(run->dmd);
    run->dmd = NULL;
    images_fill_desc(run);
    if (!run->warming) images_watch(run);
    return xd_dmd_create(xd_comm_ctx(run->world), &run->desc, &run->dmd);
}

/* ---- what is told ---- */

static void images_show(images_run *run, const char *what, int done, int steps, const char *value) {
    char progress[96], left[64], time[32];
    const double now = images_seconds();
    const char *const parts[] = { progress, value, left };
    if (run->began < 0.0) run->began = now, run->began_at = done - 1;
    const double each = done > run->began_at + 1 ? (now - run->began) / (done - run->began_at - 1) : 0.0;
    snprintf(progress, sizeof progress, "%s: %s, step %d of %d", run->recipe->name, what, done, steps);
    snprintf(left, sizeof left, "%s left", progress_time(time, each * (steps - done)));
    progress_show(&run->line, now, parts, 3, done == steps);
}

static xd_result images_tell(images_run *run, int done, int steps, const xd_dmd_values *values) {
    char text[96];
    if (xd_comm_rank(run->world) != 0) return XD_OK;
    if (run->warming)
        snprintf(text, sizeof text, "squared error %.4f", values->regression);
    else
        images_keep_latest(run, done - 1, values), images_say_latest(&run->latest, text);
    images_show(run, run->warming ? "warm-up" : "matching", done, steps, text);
    return images_note(run, done, values);
}

/* ---- the two parts ---- */

static xd_result images_warm_up_step(images_run *run, int step) {
    const images_recipe *recipe = run->recipe;
    const double rate = images_rate_at(&recipe->warming.rate, step, recipe->warm_up);
    xd_dmd_values values;
    run->drawn_at = step;
    XD_TRY(xd_optimizer_set_learning_rate(run->roles[XD_DMD_STUDENT].optimizer, rate));
    XD_TRY(xd_dmd_warm_up_step(run->dmd, images_batch, run, &values));
    return images_agree_on(run, images_tell(run, step + 1, recipe->warm_up, &values));
}

static xd_result images_warm_up(images_run *run) {
    const images_recipe *recipe = run->recipe;
    images_role *student = &run->roles[XD_DMD_STUDENT];
    int step = 0;
    if (recipe->warm_up == 0) return XD_OK;
    run->warming = true;
    run->began = -1.0;
    XD_TRY(images_role_train(student, &recipe->warming));
    XD_TRY(images_begin(run));
    if (run->warms_on) XD_TRY(images_load(run, &step));
    while (step < recipe->warm_up) {
        XD_TRY(images_warm_up_step(run, step++));
        if (step % run->options->save_every == 0 && step < recipe->warm_up) XD_TRY(images_save(run, step));
    }
    run->warming = false;
    XD_TRY(images_role_take_average(student, student));
    return images_role_save(student, run->warm_directory);
}

static xd_result images_match_step(images_run *run, int step) {
    const images_recipe *recipe = run->recipe;
    const int student_step = (step - recipe->lead) / (recipe->critics + 1);
    const int total = recipe->lead + recipe->steps * (recipe->critics + 1);
    const double rate = images_rate_at(&recipe->student.rate, student_step, recipe->steps);
    xd_dmd_values values;
    run->step = step;
    run->drawn_at = images_turn(recipe, step);
    if (step >= recipe->lead)
        XD_TRY(xd_optimizer_set_learning_rate(run->roles[XD_DMD_STUDENT].optimizer, rate));
    images_watch_clear(run);
    XD_TRY(xd_dmd_step(run->dmd, images_batch, run, &values));
    if (xd_dmd_trains(&run->desc, XD_DMD_STUDENT, step)) XD_TRY(images_watch_read(run));
    return images_agree_on(run, images_tell(run, step + 1, total, &values));
}

static bool images_saves_after(const images_run *run, int done) {
    const images_recipe *recipe = run->recipe;
    const int each = (recipe->critics + 1) * run->options->save_every, after = done - recipe->lead;
    return after > 0 && (after % each == 0 || after == recipe->steps * (recipe->critics + 1));
}

static xd_result images_match(images_run *run) {
    const images_recipe *recipe = run->recipe;
    const int total = recipe->lead + recipe->steps * (recipe->critics + 1);
    int step = 0;
    run->began = run->latest.distance = run->latest.fake_score = -1.0;
    XD_TRY(images_role_train(&run->roles[XD_DMD_STUDENT], &recipe->student));
    XD_TRY(images_role_train(&run->roles[XD_DMD_FAKE_SCORE], &recipe->fake));
    if (recipe->real) XD_TRY(images_role_train(&run->roles[XD_DMD_DISCRIMINATOR], &recipe->judge));
    XD_TRY(images_begin(run));
    if (run->resumes) XD_TRY(images_load(run, &step));
    while (step < total) {
        XD_TRY(images_match_step(run, step++));
        if (images_saves_after(run, step)) XD_TRY(images_save(run, step));
    }
    return XD_OK;
}

/* ---- all of it ---- */

/* Teacher, student and fake score begin as the same weights. The teacher goes backward for a discriminator, which has real and
 * generated pictures open at once. */
static xd_result images_open(images_run *run) {
    images_shape shape;
    char teacher[480];
    memset(&shape, 0, sizeof shape);
    XD_TRY(images_ranks_open(run->world, &run->options->mesh, &run->ranks));
    run->pixels = images_pixels(&run->ranks);
    shape.ranks = &run->ranks;
    shape.micro_batches = IMAGES_MICRO_BATCHES;
    shape.samples = run->recipe->batch / IMAGES_MICRO_BATCHES;
    snprintf(teacher, sizeof teacher, "%s/teacher", run->options->data);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        if (role == XD_DMD_DISCRIMINATOR) continue;
        shape.slots = role == XD_DMD_TEACHER && !run->recipe->real ? 0 : 1;
        XD_TRY(images_role_open(&shape, run->options->seed, &run->roles[role]));
        XD_TRY(images_role_load(&run->roles[role], teacher));
    }
    shape.slots = 2;
    return run->recipe->real
               ? images_role_open_judge(&shape, run->options->seed, &run->roles[XD_DMD_DISCRIMINATOR])
               : XD_OK;
}

static xd_result images_make(images_run *run) {
    images_role *student = &run->roles[XD_DMD_STUDENT];
    char directory[480];
    XD_TRY(images_open(run));
    XD_TRY(images_prepare(run));
    if (run->warmed)
        XD_TRY(images_role_load(student, run->warm_directory));
    else
        XD_TRY(images_warm_up(run));
    XD_TRY(images_match(run));
    snprintf(directory, sizeof directory, "%s/student", run->directory);
    XD_TRY(images_role_save(student, directory));
    XD_TRY(images_role_take_average(student, student));
    snprintf(directory, sizeof directory, "%s/student-ema", run->directory);
    return images_role_save(student, directory);
}

xd_result images_distil(xd_comm *world, const images_options *options, const images_recipe *recipe) {
    xd_ctx *ctx = xd_comm_ctx(world);
    images_run *run = (images_run *)xd_allocate(ctx, sizeof *run);
    XD_REQUIRE(ctx, run, XD_ERROR_MEMORY, "no room for a run");
    memset(run, 0, sizeof *run);
    run->world = world;
    run->options = options;
    run->recipe = recipe;
    run->line = progress_begin();
    const xd_result result = images_make(run);
    xd_dmd_destroy(run->dmd);
    for (int role = 0; role < XD_DMD_ROLES; role++) images_role_close(&run->roles[role]);
    images_ranks_close(&run->ranks);
    xd_release(ctx, run);
    return result;
}
