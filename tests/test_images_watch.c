/* test_images_watch.c - examples/images: what metrics.jsonl tells of the student's pictures and of the gradients of either term by them,
 * in a distillation of networks whose gradients are known. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "images_scene.h"

#include "../examples/images/images_watch.c"
#include "averages.h"

enum { IN_MICRO_BATCH = 2, BATCH = IN_MICRO_BATCH * IMAGES_MICRO_BATCHES };

static const double rungs[] = { 0.998, 0.0 };

/* A network that predicts `slope` times its input plus `offset`, and what follows from that for the clean samples of a leaf; as the
 * teacher, with x_t for its feature. */
typedef struct line {
    float slope, offset;
    double clean[IN_MICRO_BATCH * IMAGE_PIXELS];
    double weight_of_data; /* of the teacher: sum over the samples of a step of (1 - t)^2 */
} line;

static line lines[XD_DMD_ROLES];
static double matching; /* squares of the gradient of the term of matching, added up */

static xd_result line_forward(void *user, const xd_network_call *call) {
    line *l = (line *)user;
    const float *x = (const float *)call->hidden;
    for (int64_t i = 0; i < call->samples * IMAGE_PIXELS; i++) {
        const float flow = l->slope * x[i] + l->offset;
        ((float *)call->raw)[i] = flow;
        l->clean[i] = (double)x[i] - call->times[i / IMAGE_PIXELS] * (double)flow;
        if (call->features) call->features[0][i] = x[i];
    }
    return XD_OK;
}

/* The gradient of matching is (F - T) / m over the elements of a step, m the mean of |x - T| of a sample. The teacher is asked last. */
static xd_result teacher_forward(void *user, const xd_network_call *call) {
    const double *x = lines[XD_DMD_STUDENT].clean, *fake = lines[XD_DMD_FAKE_SCORE].clean,
                 *taught = ((line *)user)->clean;
    XD_TRY(line_forward(user, call));
    for (int64_t b = 0; b < call->samples; b++) {
        double m = 0.0, square = 0.0;
        for (int64_t i = b * IMAGE_PIXELS; i < (b + 1) * IMAGE_PIXELS; i++) {
            m += fabs(x[i] - taught[i]) / IMAGE_PIXELS;
            square += (fake[i] - taught[i]) * (fake[i] - taught[i]);
        }
        matching += square / (m * m) / ((double)BATCH * IMAGE_PIXELS * BATCH * IMAGE_PIXELS);
    }
    return XD_OK;
}

/* The feature is the input. */
static xd_result line_backward(void *user, const xd_network_call *call) {
    line *l = (line *)user;
    if (!call->hidden_gradient) return XD_OK;
    memcpy(call->hidden_gradient, call->feature_gradients[0],
           (size_t)(call->samples * IMAGE_PIXELS) * sizeof(float));
    for (int64_t b = 0; b < call->samples; b++)
        l->weight_of_data += (1.0 - call->times[b]) * (1.0 - call->times[b]);
    return XD_OK;
}

/* One head: the sum of i % 3 - 1 times pixel i. */
static float head_weight(int64_t i) {
    return (float)(i % 3 - 1);
}

static xd_result head_forward(void *user, const xd_network_call *call) {
    float *logits = (float *)call->raw;
    (void)user;
    for (int64_t b = 0; b < call->samples; b++) {
        logits[b] = 0.0f;
        for (int64_t i = 0; i < IMAGE_PIXELS; i++)
            logits[b] += head_weight(i) * call->features[0][b * IMAGE_PIXELS + i];
    }
    return XD_OK;
}

static xd_result head_backward(void *user, const xd_network_call *call) {
    (void)user;
    for (int64_t i = 0; call->input_gradients && i < call->samples * IMAGE_PIXELS; i++)
        call->input_gradients[0][i] = call->raw_gradient[i / IMAGE_PIXELS] * head_weight(i % IMAGE_PIXELS);
    return XD_OK;
}

/* One step of the student, with a discriminator of this weight; 0: without. */
static void watch_step(images_run *run, double weight) {
    static const int64_t pixels = IMAGE_PIXELS;
    static xd_param param = { .name = "w", .dtype = XD_DTYPE_F32, .count = 4 };
    static const real_pictures real;
    static images_recipe recipe;
    xd_ctx *ctx = new_ctx();
    float value[4] = { 1.0f, 2.0f, 3.0f, 4.0f };
    param.value = value;
    matching = 0.0;
    memset(run, 0, sizeof *run);
    CHECK_EQ_INT(xd_comm_self(ctx, &run->world), XD_OK);
    run->pixels.end = IMAGE_PIXELS;
    recipe.batch = BATCH;
    recipe.real = weight > 0.0 ? &real : NULL;
    run->recipe = &recipe;
    run->roles[XD_DMD_STUDENT].count = 1;
    run->roles[XD_DMD_STUDENT].params = &param;
    CHECK_EQ_INT(average_create(ctx, &param, 1, NULL, &run->roles[XD_DMD_STUDENT].average), XD_OK);
    run->desc = xd_dmd_defaults(XD_DMD_MODELOPT);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        if (role == XD_DMD_DISCRIMINATOR) continue;
        lines[role].slope = 0.3f * (float)(role + 1);
        lines[role].offset = 0.1f * (float)role;
        lines[role].weight_of_data = 0.0;
        run->roles[role].network =
            (xd_network){ .user = &lines[role],
                          .predicts = XD_PREDICT_FLOW,
                          .forward = role == XD_DMD_TEACHER ? teacher_forward : line_forward,
                          .backward = line_backward };
        run->desc.networks[role] = run->roles[role].network;
    }
    run->desc.networks[XD_DMD_TEACHER].feature_count = 1;
    run->desc.networks[XD_DMD_TEACHER].feature_elements = &pixels;
    if (weight > 0.0)
        run->desc.networks[XD_DMD_DISCRIMINATOR] =
            (xd_network){ .heads = 1, .forward = head_forward, .backward = head_backward };
    run->desc.gan.weight = weight;
    run->desc.gan.kind = XD_GAN_HINGE;
    run->desc.sizes.samples = IN_MICRO_BATCH;
    run->desc.sizes.step_samples = BATCH;
    run->desc.sizes.elements = IMAGE_PIXELS;
    run->desc.rungs.list = rungs;
    images_watch(run);
    CHECK_EQ_INT(xd_dmd_create(ctx, &run->desc, &run->dmd), XD_OK);
    images_watch_clear(run);
    for (run->micro_batch = 0; run->micro_batch < IMAGES_MICRO_BATCHES; run->micro_batch++) {
        const xd_dmd_batch batch = { .samples = IN_MICRO_BATCH, .first = run->micro_batch * IN_MICRO_BATCH };
        CHECK_EQ_INT(xd_dmd_student(run->dmd, 0, &batch, NULL), XD_OK);
    }
    CHECK_EQ_INT(images_watch_read(run), XD_OK);
    xd_dmd_destroy(run->dmd);
    xd_ema_destroy(run->roles[XD_DMD_STUDENT].average);
    xd_comm_destroy(run->world);
    xd_ctx_destroy(ctx);
}

/* The hinge's gradient by a logit is -weight / samples, whatever the logit is; by x_t it is the head's weights times that. */
XD_TEST(norms_of_gradients_are_told_apart_by_term) {
    static images_run plain, one, two;
    double square = 0.0;
    for (int64_t i = 0; i < IMAGE_PIXELS; i++) square += (double)(head_weight(i) * head_weight(i));
    watch_step(&plain, 0.0);
    CHECK_NEAR(plain.spread.vsd_norm, sqrt(matching), 1e-4 * sqrt(matching));
    watch_step(&one, 0.5);
    watch_step(&two, 1.0);
    const images_spread *s = &one.spread;
    CHECK(plain.spread.vsd_norm > 0.0 && plain.spread.generator_norm == 0.0);
    CHECK_NEAR(s->vsd_norm, plain.spread.vsd_norm, 1e-4 * plain.spread.vsd_norm);
    CHECK_NEAR(two.spread.vsd_norm, plain.spread.vsd_norm, 1e-4 * plain.spread.vsd_norm);
    const double expected = 0.5 / BATCH * sqrt(square * lines[XD_DMD_TEACHER].weight_of_data);
    CHECK_NEAR(s->generator_norm, expected, 1e-5 * expected);
    CHECK_NEAR(two.spread.generator_norm, 2.0 * expected, 2e-5 * expected);
    CHECK(s->mean == plain.spread.mean && s->deviation == plain.spread.deviation && s->deviation > 0.1);
}

/* A leaf without samples, beyond a rank's own, leaves the sums of its last one. */
XD_TEST(a_micro_batch_beyond_a_ranks_own_changes_nothing) {
    static images_run run;
    static line l;
    const xd_network_call none = { .keep = true };
    double before[IMAGES_MICRO_BATCHES][IMAGES_PIECES][IMAGES_SUMS];
    watch_step(&run, 0.5);
    memcpy(before, run.spread.sums, sizeof before);
    run.roles[XD_DMD_STUDENT].network.user = &l;
    run.micro_batch = IMAGES_MICRO_BATCHES - 1;
    CHECK_EQ_INT(images_watch_forward(&run, &none), XD_OK);
    CHECK_EQ_INT(images_watch_backward(&run, &none), XD_OK);
    CHECK(memcmp(before, run.spread.sums, sizeof before) == 0 &&
          before[IMAGES_MICRO_BATCHES - 1][0][IMAGES_SQUARES] > 0.0);
}

XD_TEST(a_role_without_a_turn_keeps_what_it_told_last) {
    static images_run run;
    const xd_dmd_values student = { .vsd = 0.5, .distance = 0.25 }, fake = { .fake_score = 1.5 };
    char text[96];
    memset(&run, 0, sizeof run);
    run.desc = xd_dmd_defaults(XD_DMD_MODELOPT); /* the student has steps 0, 5, ... */
    run.latest.distance = run.latest.fake_score = -1.0;
    images_keep_latest(&run, 0, &student);
    images_say_latest(&run.latest, text);
    CHECK_EQ_STR(text, "|x - T| 0.2500, fake score's error -");
    images_keep_latest(&run, 1, &fake);
    images_say_latest(&run.latest, text);
    CHECK_EQ_STR(text, "|x - T| 0.2500, fake score's error 1.5000");
    images_keep_latest(&run, 5, &student);
    images_say_latest(&run.latest, text);
    CHECK_EQ_STR(text, "|x - T| 0.2500, fake score's error 1.5000");
}

XD_TEST_MAIN()
