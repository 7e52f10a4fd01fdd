/* images_teacher.c - v = noise - image, at times that lean to the middle, with the label left out of every tenth sample. */
#include "images_teacher.h"

#include <string.h>

enum { ELEMENTS = IMAGE_PIXELS, PER_MICRO_BATCH = IMAGES_TEACHER_BATCH / IMAGES_TEACHER_MICRO_BATCHES };

/* Streams of the numbers drawn here. */
enum { DRAWN_IMAGE = XD_STREAM_USER, DRAWN_LABEL, DRAWN_TIME, DRAWN_NOISE };

static const double label_left_out = 0.1, most_norm = 1.0;
static const images_trainer teacher_trainer = {
    { 1.5e-3, 20, 0.3, 0.0 }, 0.9, 0.99, 0.01, XD_EMA_RAMP, 0.999
};

/* What a micro-batch needs. */
typedef struct lesson_batch {
    float clean[PER_MICRO_BATCH * ELEMENTS], noise[PER_MICRO_BATCH * ELEMENTS],
        hidden[PER_MICRO_BATCH * ELEMENTS];
    float raw[PER_MICRO_BATCH * ELEMENTS], slope[PER_MICRO_BATCH * ELEMENTS];
    double times[PER_MICRO_BATCH];
    int32_t labels[PER_MICRO_BATCH];
    xd_mix mixes[PER_MICRO_BATCH];
    xd_denoise_term terms[PER_MICRO_BATCH];
} lesson_batch;

static xd_rows rows_of(void *data) {
    xd_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.data = data;
    rows.rows = PER_MICRO_BATCH;
    rows.cols = ELEMENTS;
    rows.dtype = XD_DTYPE_F32;
    return rows;
}

static xd_philox random_of(const images_lesson *lesson, int step, int stream, int64_t sample) {
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = lesson->seed;
    random.stream = (uint8_t)stream;
    random.step = (uint32_t)step;
    random.sample = (uint32_t)sample;
    return random;
}

static void draw_samples(const images_lesson *lesson, int step, int64_t first, lesson_batch *batch) {
    for (int64_t i = 0; i < PER_MICRO_BATCH; i++) {
        const xd_philox image = random_of(lesson, step, DRAWN_IMAGE, first + i);
        const xd_philox label = random_of(lesson, step, DRAWN_LABEL, first + i);
        const xd_philox noise = random_of(lesson, step, DRAWN_NOISE, first + i);
        const int64_t which = xd_draw_index(&image, 0, lesson->set->count);
        memcpy(batch->clean + i * ELEMENTS, lesson->set->images + which * ELEMENTS, ELEMENTS * sizeof(float));
        xd_philox_fill_normal(&noise, 0, ELEMENTS, batch->noise + i * ELEMENTS);
        batch->labels[i] = lesson->set->labels[which];
        if (xd_philox_uniform_f64(&label, 0) < label_left_out) batch->labels[i] = IMAGES_NO_CLASS;
    }
}

/* hidden = x_t, and the factors of its loss. */
static xd_result make_noisy(xd_ctx *ctx, const images_lesson *lesson, int step, int64_t first,
                            lesson_batch *batch) {
    const xd_noise_schedule flow = { .kind = XD_NOISE_FLOW, .min_t = 0.0, .max_t = 1.0 };
    const xd_philox random = random_of(lesson, step, DRAWN_TIME, first);
    xd_time_sampler times = xd_times_defaults(XD_DMD_MODELOPT);
    xd_denoise_form form;
    xd_mix_desc mix;
    memset(&form, 0, sizeof form);
    memset(&mix, 0, sizeof mix);
    form.native = form.space = XD_PREDICT_FLOW;
    times.kind = XD_TIME_LOGIT_NORMAL;
    times.mean = 0.2;
    times.deviation = 1.2;
    XD_TRY(xd_times_draw(ctx, &times, &random, PER_MICRO_BATCH, batch->times));
    for (int i = 0; i < PER_MICRO_BATCH; i++) {
        XD_TRY(xd_noise_mix(ctx, &flow, batch->times[i], &batch->mixes[i]));
        XD_TRY(xd_denoise_term_at(ctx, &flow, &form, batch->times[i], &batch->terms[i]));
    }
    mix.p = rows_of(batch->clean);
    mix.q = rows_of(batch->noise);
    mix.out = rows_of(batch->hidden);
    mix.mix = batch->mixes;
    return xd_mix_rows(ctx, &mix);
}

static xd_result take_loss(xd_ctx *ctx, lesson_batch *batch, double *loss) {
    xd_denoise_desc desc = xd_denoise_defaults();
    xd_sample_values values;
    desc.prediction = rows_of(batch->raw);
    desc.clean = rows_of(batch->clean);
    desc.noise = rows_of(batch->noise);
    desc.gradient = rows_of(batch->slope);
    desc.terms = batch->terms;
    desc.common.denominator_value = (double)IMAGES_TEACHER_BATCH * ELEMENTS;
    XD_TRY(xd_denoise_loss(ctx, &desc, &values));
    *loss = values.loss;
    return XD_OK;
}

static xd_result train_micro_batch(images_role *role, const images_lesson *lesson, int step, int64_t k,
                                   lesson_batch *batch, double *loss) {
    xd_ctx *ctx = xd_comm_ctx(role->world);
    const int64_t number = xd_parallel_micro_batch(role->parallel, k);
    xd_network_call call;
    memset(&call, 0, sizeof call);
    call.samples = number < 0 ? 0 : PER_MICRO_BATCH; /* none: blocks are opened for the other ranks */
    call.hidden = batch->hidden;
    call.times = batch->times;
    call.condition = batch->labels;
    call.keep = true;
    call.raw = batch->raw;
    if (number >= 0) {
        draw_samples(lesson, step, number * PER_MICRO_BATCH, batch);
        XD_TRY(make_noisy(ctx, lesson, step, number * PER_MICRO_BATCH, batch));
    }
    XD_TRY(role->network.forward(role->network.user, &call));
    if (number >= 0) XD_TRY(take_loss(ctx, batch, loss));
    call.raw_gradient = batch->slope;
    call.weights = true;
    call.micro_batch = k;
    return role->network.backward(role->network.user, &call);
}

/* The micro-batches' losses in the order of their numbers. Each is one rank's, so a sum of bits with zeros hands it to all. */
static xd_result sum_losses(xd_comm *world, int64_t bits[IMAGES_TEACHER_MICRO_BATCHES], double *sum) {
    *sum = 0.0;
    XD_TRY(xd_all_reduce(world, bits, bits, IMAGES_TEACHER_MICRO_BATCHES, XD_DTYPE_I64, XD_SUM));
    for (int i = 0; i < IMAGES_TEACHER_MICRO_BATCHES; i++) {
        double loss;
        memcpy(&loss, &bits[i], sizeof loss);
        *sum += loss;
    }
    return XD_OK;
}

static xd_result train_step(images_role *role, const images_lesson *lesson, int step, lesson_batch *batch,
                            double *loss) {
    const double rate = images_rate_at(&teacher_trainer.rate, step, lesson->steps);
    int64_t bits[IMAGES_TEACHER_MICRO_BATCHES] = { 0 };
    XD_TRY(xd_optimizer_set_learning_rate(role->optimizer, rate));
    for (int64_t k = 0; k < xd_parallel_micro_batches(role->parallel).opened; k++) {
        const int64_t number = xd_parallel_micro_batch(role->parallel, k);
        double of = 0.0;
        XD_TRY(train_micro_batch(role, lesson, step, k, batch, &of));
        if (number >= 0) memcpy(&bits[number], &of, sizeof of);
    }
    XD_TRY(images_role_step(role, most_norm, NULL));
    return sum_losses(role->world, bits, loss);
}

xd_result images_teacher_train(images_role *role, const images_lesson *lesson, images_told shown,
                               void *user) {
    xd_ctx *ctx = xd_comm_ctx(role->world);
    lesson_batch *batch = (lesson_batch *)xd_allocate(ctx, sizeof *batch);
    xd_result result =
        batch ? images_role_train(role, &teacher_trainer)
              : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a micro-batch of %d images", PER_MICRO_BATCH);
    for (int step = 0; step < lesson->steps && result == XD_OK; step++) {
        double loss = 0.0;
        result = train_step(role, lesson, step, batch, &loss);
        if (result == XD_OK && shown && xd_comm_rank(role->world) == 0) shown(user, step + 1, loss);
    }
    if (result == XD_OK) result = images_role_take_average(role, role);
    if (batch) xd_release(ctx, batch);
    return result;
}
