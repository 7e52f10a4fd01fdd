/* images_teacher.c - v = noise - image, at times that lean to the middle, with the label left out of every tenth sample. */
#include "images_teacher.h"

#include <string.h>

enum { ELEMENTS = IMAGE_PIXELS, LEAF = IMAGES_TEACHER_BATCH / IMAGES_TEACHER_LEAVES };

/* Streams of the numbers drawn here. */
enum { DRAWN_IMAGE = XD_STREAM_USER, DRAWN_LABEL, DRAWN_TIME, DRAWN_NOISE };

static const double label_left_out = 0.1, most_norm = 1.0;
static const images_trainer teacher_trainer = {
    { 1.5e-3, 20, 0.3, 0.0 }, 0.9, 0.99, 0.01, XD_EMA_RAMP, 0.999
};

/* What a leaf needs. */
typedef struct lesson_leaf {
    float clean[LEAF * ELEMENTS], noise[LEAF * ELEMENTS], hidden[LEAF * ELEMENTS];
    float raw[LEAF * ELEMENTS], slope[LEAF * ELEMENTS];
    double times[LEAF];
    int32_t labels[LEAF];
    xd_mix mixes[LEAF];
    xd_denoise_term terms[LEAF];
} lesson_leaf;

static xd_rows rows_of(void *data) {
    xd_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.data = data;
    rows.rows = LEAF;
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

static void draw_samples(const images_lesson *lesson, int step, int64_t first, lesson_leaf *leaf) {
    for (int64_t i = 0; i < LEAF; i++) {
        const xd_philox image = random_of(lesson, step, DRAWN_IMAGE, first + i);
        const xd_philox label = random_of(lesson, step, DRAWN_LABEL, first + i);
        const xd_philox noise = random_of(lesson, step, DRAWN_NOISE, first + i);
        const int64_t which = xd_draw_index(&image, 0, lesson->set->count);
        memcpy(leaf->clean + i * ELEMENTS, lesson->set->images + which * ELEMENTS, ELEMENTS * sizeof(float));
        xd_philox_fill_normal(&noise, 0, ELEMENTS, leaf->noise + i * ELEMENTS);
        leaf->labels[i] = lesson->set->labels[which];
        if (xd_philox_uniform_f64(&label, 0) < label_left_out) leaf->labels[i] = IMAGES_NO_CLASS;
    }
}

/* hidden = x_t, and the factors of its loss. */
static xd_result make_noisy(xd_ctx *ctx, const images_lesson *lesson, int step, int64_t first,
                            lesson_leaf *leaf) {
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
    XD_TRY(xd_times_draw(ctx, &times, &random, LEAF, leaf->times));
    for (int i = 0; i < LEAF; i++) {
        XD_TRY(xd_noise_mix(ctx, &flow, leaf->times[i], &leaf->mixes[i]));
        XD_TRY(xd_denoise_term_at(ctx, &flow, &form, leaf->times[i], &leaf->terms[i]));
    }
    mix.p = rows_of(leaf->clean);
    mix.q = rows_of(leaf->noise);
    mix.out = rows_of(leaf->hidden);
    mix.mix = leaf->mixes;
    return xd_mix_rows(ctx, &mix);
}

static xd_result take_loss(xd_ctx *ctx, lesson_leaf *leaf, double *loss) {
    xd_denoise_desc desc = xd_denoise_defaults();
    xd_sample_values values;
    desc.prediction = rows_of(leaf->raw);
    desc.clean = rows_of(leaf->clean);
    desc.noise = rows_of(leaf->noise);
    desc.gradient = rows_of(leaf->slope);
    desc.terms = leaf->terms;
    desc.common.denominator_value = (double)IMAGES_TEACHER_BATCH * ELEMENTS;
    XD_TRY(xd_denoise_loss(ctx, &desc, &values));
    *loss = values.loss;
    return XD_OK;
}

static xd_result train_leaf(images_role *role, const images_lesson *lesson, int step, int64_t k,
                            lesson_leaf *leaf, double *loss) {
    xd_ctx *ctx = xd_comm_ctx(role->world);
    const int64_t number = xd_parallel_micro_batch(role->parallel, k);
    xd_network_call call;
    memset(&call, 0, sizeof call);
    call.samples = number < 0 ? 0 : LEAF; /* none: blocks are opened for the other ranks */
    call.hidden = leaf->hidden;
    call.times = leaf->times;
    call.condition = leaf->labels;
    call.keep = true;
    call.raw = leaf->raw;
    if (number >= 0) {
        draw_samples(lesson, step, number * LEAF, leaf);
        XD_TRY(make_noisy(ctx, lesson, step, number * LEAF, leaf));
    }
    XD_TRY(role->network.forward(role->network.user, &call));
    if (number >= 0) XD_TRY(take_loss(ctx, leaf, loss));
    call.raw_gradient = leaf->slope;
    call.weights = true;
    call.micro_batch = k;
    return role->network.backward(role->network.user, &call);
}

/* The leaves' losses in the order of their numbers. Each is one rank's, so a sum of bits with zeros hands it to all. */
static xd_result sum_losses(xd_comm *world, int64_t bits[IMAGES_TEACHER_LEAVES], double *sum) {
    *sum = 0.0;
    XD_TRY(xd_all_reduce(world, bits, bits, IMAGES_TEACHER_LEAVES, XD_DTYPE_I64, XD_SUM));
    for (int i = 0; i < IMAGES_TEACHER_LEAVES; i++) {
        double loss;
        memcpy(&loss, &bits[i], sizeof loss);
        *sum += loss;
    }
    return XD_OK;
}

static xd_result train_step(images_role *role, const images_lesson *lesson, int step, lesson_leaf *leaf,
                            double *loss) {
    const double rate = images_rate_at(&teacher_trainer.rate, step, lesson->steps);
    int64_t bits[IMAGES_TEACHER_LEAVES] = { 0 };
    XD_TRY(xd_optimizer_set_learning_rate(role->optimizer, rate));
    for (int64_t k = 0; k < xd_parallel_micro_batches(role->parallel).opened; k++) {
        const int64_t number = xd_parallel_micro_batch(role->parallel, k);
        double of = 0.0;
        XD_TRY(train_leaf(role, lesson, step, k, leaf, &of));
        if (number >= 0) memcpy(&bits[number], &of, sizeof of);
    }
    XD_TRY(images_role_step(role, most_norm, NULL));
    return sum_losses(role->world, bits, loss);
}

xd_result images_teacher_train(images_role *role, const images_lesson *lesson, images_told shown,
                               void *user) {
    xd_ctx *ctx = xd_comm_ctx(role->world);
    lesson_leaf *leaf = (lesson_leaf *)xd_allocate(ctx, sizeof *leaf);
    xd_result result = leaf ? images_role_train(role, &teacher_trainer)
                            : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a leaf of %d images", LEAF);
    for (int step = 0; step < lesson->steps && result == XD_OK; step++) {
        double loss = 0.0;
        result = train_step(role, lesson, step, leaf, &loss);
        if (result == XD_OK && shown && xd_comm_rank(role->world) == 0) shown(user, step + 1, loss);
    }
    if (result == XD_OK) result = images_role_take_average(role, role);
    if (leaf) xd_release(ctx, leaf);
    return result;
}
