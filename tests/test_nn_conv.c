/* test_nn_conv.c - the convolutional network of examples/nn as a network: gradients, slots, batches, wrappers, a distillation. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "nn_alone.h"

#include <math.h>

#include "../examples/nn/nn_call.c"
#include "../examples/nn/nn_condition.c"
#include "../examples/nn/nn_conv.c"
#include "../examples/nn/nn_conv_block.c"
#include "../examples/nn/nn_conv_describe.c"
#include "../examples/nn/nn_conv_map.c"
#include "../examples/nn/nn_conv_pass.c"
#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_group_norm.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/nn/nn_network.c"
#include "../examples/nn/nn_patch_attention.c"
#include "../examples/nn/nn_patch_layer.c"
#include "../examples/nn/nn_patch_pieces.c"
#include "../examples/nn/nn_patch_positions.c"
#include "../examples/nn/nn_patch_rows.c"
#include "../examples/nn/nn_small.c"
#include "../examples/nn/nn_split.c"

/* Room for any of the networks here. */
enum {
    SAMPLES = 5,
    LABELS = 3,
    FEATURES = 2,
    MOST = SAMPLES * 30,
    MOST_STREAM = SAMPLES * 96,
    ALL_WEIGHTS = 1716
};

/* Sides, channels and groups that do not divide each other; images of a pixel and of a line; a norm of single channels. */
static const nn_conv_config tiny = { 5, 3, 2, 6, 3, 2, 4, 5, LABELS, NULL };
static const nn_conv_config shapes[] = { { 5, 3, 2, 6, 3, 2, 4, 5, LABELS, NULL },
                                         { 1, 1, 3, 6, 2, 2, 2, 3, LABELS, NULL },
                                         { 1, 7, 1, 5, 1, 2, 6, 4, LABELS, NULL },
                                         { 4, 2, 1, 3, 3, 2, 4, 1, LABELS, NULL } };

static int64_t places_of(const nn_conv_config *c) {
    return (int64_t)c->height * c->width;
}

/* Elements of all images, and of a feature of them. */
static int64_t images_of(const nn_conv_config *c) {
    return SAMPLES * places_of(c) * c->channels;
}

static int64_t streams_of(const nn_conv_config *c) {
    return SAMPLES * places_of(c) * c->inner;
}

/* ---- help ---- */

static xd_result alone_start_as(alone *a, xd_comm *comm, const nn_conv_config *config, int64_t samples,
                                int slots) {
    static const int both[FEATURES] = { 0, 1 };
    nn_conv *passes;
    memset(a, 0, sizeof *a);
    a->ctx = xd_comm_ctx(comm);
    XD_TRY(nn_conv_describe(a->ctx, config, 3, &a->model));
    XD_TRY(alone_wrap(a, comm));
    XD_TRY(nn_conv_create(a->ctx, config, a->model, samples, slots, &passes));
    XD_TRY(nn_conv_capture(passes, both, FEATURES));
    a->passes = passes;
    a->network = nn_conv_network(passes);
    CHECK_EQ_INT(a->network.feature_count, FEATURES);
    for (int k = 0; k < FEATURES; k++)
        CHECK_EQ_INT(a->network.feature_elements[k], places_of(config) * config->inner);
    return XD_OK;
}

static xd_result alone_start(alone *a, xd_comm *comm, int64_t samples, int slots) {
    return alone_start_as(a, comm, &tiny, samples, slots);
}

static void alone_end(alone *a) {
    nn_conv_destroy((nn_conv *)a->passes);
    alone_unwrap(a);
}

/* A batch with everything that a call of the network needs. */
typedef struct batch {
    float x[MOST], raw[MOST], d_raw[MOST], d_x[MOST];
    float feature[FEATURES][MOST_STREAM], d_feature[FEATURES][MOST_STREAM];
    float *features[FEATURES];
    const float *d_features[FEATURES];
    double times[SAMPLES];
    int32_t labels[SAMPLES];
    xd_network_call call;
} batch;

static void batch_make(batch *b, uint64_t seed) {
    noise(seed, MOST, b->x);
    noise(seed + 1, MOST, b->d_raw);
    for (int k = 0; k < FEATURES; k++) {
        noise(seed + 2 + (uint64_t)k, MOST_STREAM, b->d_feature[k]);
        b->features[k] = b->feature[k];
        b->d_features[k] = b->d_feature[k];
    }
    for (int i = 0; i < SAMPLES; i++) {
        b->times[i] = fmod(0.37 * (double)(seed + (uint64_t)i), 1.0);
        b->labels[i] = (int32_t)((seed + (uint64_t)i) % LABELS);
    }
    memset(&b->call, 0, sizeof b->call);
    b->call.samples = SAMPLES;
    b->call.hidden = b->x;
    b->call.times = b->times;
    b->call.condition = b->labels;
    b->call.raw = b->raw;
    b->call.raw_gradient = b->d_raw;
    b->call.features = b->features;
    b->call.feature_gradients = b->d_features;
    b->call.hidden_gradient = b->d_x;
    b->call.keep = b->call.weights = true;
}

static xd_result forward(const alone *a, const batch *b) {
    return a->network.forward(a->network.user, &b->call);
}

static xd_result backward(const alone *a, const batch *b) {
    return a->network.backward(a->network.user, &b->call);
}

/* ---- the same network in double, loop by loop over [channels, height, width] ---- */

enum { MOST_IMAGE = 96, MOST_WAVES = 8 };

typedef struct reference {
    const alone *a;
    nn_conv_config c;
    double *weights[ALONE_WEIGHTS]; /* by number in a->params */
} reference;

static const double *weight(const reference *r, const char *block, const char *name) {
    char full[64];
    snprintf(full, sizeof full, "%s%s", block, name);
    for (int64_t i = 0; i < r->a->count; i++)
        if (strcmp(r->a->params[i].name, full) == 0) return r->weights[i];
    printf("there is no weight %s\n", full);
    CHECK(false);
    return r->weights[0];
}

static void reference_start(reference *r, const alone *a, const nn_conv_config *c) {
    r->a = a;
    r->c = *c;
    for (int64_t i = 0; i < a->count; i++) {
        r->weights[i] = (double *)calloc((size_t)a->params[i].count, sizeof(double));
        for (int64_t j = 0; j < a->params[i].count; j++)
            r->weights[i][j] = (double)((const float *)a->params[i].value)[j];
    }
}

static void reference_end(reference *r) {
    for (int64_t i = 0; i < r->a->count; i++) free(r->weights[i]);
}

static double silu(double x) {
    return x / (1.0 + exp(-x));
}

/* What is seen of a channel beyond its edges is 0. */
static double pixel(const reference *r, const double *channel, int y, int x) {
    return y < 0 || x < 0 || y >= r->c.height || x >= r->c.width ? 0.0 : channel[y * r->c.width + x];
}

static void convolve(const reference *r, const char *block, const char *name, const int channels[2],
                     const double *x, double *y) {
    char full[32];
    const int places = r->c.height * r->c.width;
    snprintf(full, sizeof full, "%s.weight", name);
    const double *w = weight(r, block, full);
    snprintf(full, sizeof full, "%s.bias", name);
    for (int o = 0; o < channels[1]; o++)
        for (int p = 0; p < places; p++) {
            double sum = weight(r, block, full)[o];
            for (int i = 0; i < channels[0]; i++)
                for (int k = 0; k < 9; k++)
                    sum += w[(o * channels[0] + i) * 9 + k] *
                           pixel(r, x + i * places, p / r->c.width + k / 3 - 1, p % r->c.width + k % 3 - 1);
            y[o * places + p] = sum;
        }
}

/* Norm over groups, scale, shift, silu. */
static void activate(const reference *r, const char *block, const char *name, const double *x, double *y) {
    char full[32];
    const int places = r->c.height * r->c.width, each = r->c.inner / r->c.groups * places;
    snprintf(full, sizeof full, "%s.weight", name);
    const double *scale = weight(r, block, full);
    snprintf(full, sizeof full, "%s.bias", name);
    for (int g = 0; g < r->c.groups; g++) {
        double mean = 0.0, variance = 0.0;
        for (int i = g * each; i < (g + 1) * each; i++) mean += x[i] / each;
        for (int i = g * each; i < (g + 1) * each; i++) variance += (x[i] - mean) * (x[i] - mean) / each;
        for (int i = g * each; i < (g + 1) * each; i++)
            y[i] = silu((x[i] - mean) / sqrt(variance + 1e-5) * scale[i / places] +
                        weight(r, block, full)[i / places]);
    }
}

static void reference_block(const reference *r, const char *block, const double *active, double *x) {
    double h[MOST_IMAGE], y[MOST_IMAGE];
    const int places = r->c.height * r->c.width, same_number[2] = { r->c.inner, r->c.inner };
    activate(r, block, "norm1", x, h);
    convolve(r, block, "conv1", same_number, h, y);
    for (int c = 0; c < r->c.inner; c++)
        for (int p = 0; p < places; p++) {
            y[c * places + p] += weight(r, block, "time.bias")[c];
            for (int i = 0; i < r->c.embedding; i++)
                y[c * places + p] += weight(r, block, "time.weight")[c * r->c.embedding + i] * active[i];
        }
    activate(r, block, "norm2", y, h);
    convolve(r, block, "conv2", same_number, h, y);
    for (int i = 0; i < r->c.inner * places; i++) x[i] += y[i];
}

static void reference_condition(const reference *r, double time, int32_t label, double *active) {
    const int half = r->c.frequencies / 2;
    double waves[MOST_WAVES];
    for (int i = 0; i < half; i++) {
        const double frequency = half == 1 ? 1.0 : exp(log(1000.0) * i / (half - 1));
        waves[i] = sin(frequency * time), waves[half + i] = cos(frequency * time);
    }
    for (int e = 0; e < r->c.embedding; e++) {
        active[e] = weight(r, "", "time.bias")[e] + weight(r, "", "label")[label * r->c.embedding + e];
        for (int i = 0; i < r->c.frequencies; i++)
            active[e] += weight(r, "", "time.weight")[e * r->c.frequencies + i] * waves[i];
        active[e] = silu(active[e]);
    }
}

/* What a batch gives. */
typedef struct outcome {
    double raw[MOST], feature[FEATURES][MOST_STREAM];
} outcome;

static void reference_sample(const reference *r, const batch *b, int s, const double *image, outcome *out) {
    double x[MOST_IMAGE], h[MOST_IMAGE], active[MOST_WAVES];
    const int pixels = r->c.height * r->c.width * r->c.channels,
              stream = r->c.height * r->c.width * r->c.inner;
    const int in[2] = { r->c.channels, r->c.inner }, back[2] = { r->c.inner, r->c.channels };
    reference_condition(r, b->times[s], b->labels[s], active);
    convolve(r, "", "in", in, image, x);
    for (int k = 0; k < FEATURES; k++) {
        reference_block(r, k ? "blocks.1." : "blocks.0.", active, x);
        memcpy(out->feature[k] + s * stream, x, (size_t)stream * sizeof *x);
    }
    activate(r, "", "norm", x, h);
    convolve(r, "", "out", back, h, out->raw + s * pixels);
}

/* Of a batch whose images are `x`: predictions and features times their gradients, summed. */
static double reference_loss(const reference *r, const batch *b, const double *x, outcome *out) {
    const int64_t pixels = images_of(&r->c) / SAMPLES;
    double loss = 0.0;
    for (int s = 0; s < SAMPLES; s++) reference_sample(r, b, s, x + s * pixels, out);
    for (int i = 0; i < images_of(&r->c); i++) loss += out->raw[i] * (double)b->d_raw[i];
    for (int k = 0; k < FEATURES; k++)
        for (int i = 0; i < streams_of(&r->c); i++) loss += out->feature[k][i] * (double)b->d_feature[k][i];
    return loss;
}

/* A gradient against the difference of the loss along a direction, of weights or images at `place`. */
static void check_place(const reference *r, const batch *b, const double *x, double *place,
                        const float *gradient, int64_t count) {
    static double kept[ALONE_MOST];
    static outcome out;
    float direction[ALONE_MOST];
    double claimed = 0.0, length = 0.0, loss[2];
    noise(77, count, direction);
    memcpy(kept, place, (size_t)count * sizeof *kept);
    for (int64_t i = 0; i < count; i++) {
        claimed += (double)gradient[i] * (double)direction[i];
        length += (double)gradient[i] * (double)gradient[i];
    }
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < count; i++) place[i] = kept[i] + (side ? -1e-6 : 1e-6) * (double)direction[i];
        loss[side] = reference_loss(r, b, x, &out);
    }
    memcpy(place, kept, (size_t)count * sizeof *kept);
    CHECK(length > 0.0);
    CHECK_NEAR(claimed, (loss[0] - loss[1]) / 2e-6, 2e-5 * (1.0 + sqrt(length)));
}

static xd_result gradients_of(xd_comm *world, void *argument, bool in_pieces) {
    static double x[MOST];
    static outcome out;
    static batch b;
    nn_conv_config shape = *(const nn_conv_config *)argument;
    const nn_conv_config *c = &shape;
    alone a;
    reference r;
    if (in_pieces) XD_TRY(nn_split_create(world, NULL, &shape.split));
    XD_TRY(alone_start_as(&a, world, c, SAMPLES, 1));
    reference_start(&r, &a, c);
    batch_make(&b, 5);
    for (int i = 0; i < images_of(c); i++) x[i] = (double)b.x[i];
    XD_TRY(forward(&a, &b));
    XD_TRY(backward(&a, &b));
    XD_TRY(xd_parallel_reduce(a.parallel));
    (void)reference_loss(&r, &b, x, &out);
    for (int i = 0; i < images_of(c); i++)
        CHECK_NEAR((double)b.raw[i], out.raw[i], 2e-5 * (1.0 + fabs(out.raw[i])));
    for (int k = 0; k < FEATURES; k++)
        for (int i = 0; i < streams_of(c); i++)
            CHECK_NEAR((double)b.feature[k][i], out.feature[k][i], 2e-5 * (1.0 + fabs(out.feature[k][i])));
    for (int64_t i = 0; i < a.count; i++)
        check_place(&r, &b, x, r.weights[i], (const float *)a.params[i].gradient, a.params[i].count);
    check_place(&r, &b, x, x, b.d_x, images_of(c));
    reference_end(&r);
    alone_end(&a);
    nn_split_destroy(shape.split);
    return XD_OK;
}

static xd_result gradients_rank(xd_comm *world, void *argument) {
    return gradients_of(world, argument, false);
}

static xd_result pieces_rank(xd_comm *world, void *argument) {
    return gradients_of(world, argument, true);
}

XD_TEST(predictions_and_all_gradients_agree_with_the_same_network_in_double) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        nn_conv_config c = shapes[i];
        run_with(gradients_rank, &c);
    }
}

XD_TEST(and_so_they_do_with_sums_in_pieces) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        nn_conv_config c = shapes[i];
        run_with(pieces_rank, &c);
    }
}

/* ---- the norm ---- */

/* Around 4096 numbers have a step of 2^-11: their squares in f32 would have nothing left of a deviation of 0.01. */
XD_TEST(a_norm_far_from_zero_has_the_deviation_of_its_numbers) {
    enum { PLACES = 7, CHANNELS = 6, GROUPS = 2, EACH = CHANNELS / GROUPS };
    const nn_group_norm norm = { 2, PLACES, CHANNELS, GROUPS };
    float from[2 * PLACES * CHANNELS], x[2 * PLACES * CHANNELS], inverse[2 * GROUPS];
    noise(9, 2 * PLACES * CHANNELS, from);
    for (int i = 0; i < 2 * PLACES * CHANNELS; i++) x[i] = from[i] = 4096.0f + 0.01f * from[i];
    nn_group_norm_forward(&norm, x, inverse);
    for (int k = 0; k < 2 * GROUPS; k++) {
        double sum = 0.0, square = 0.0, normed = 0.0;
        for (int i = 0; i < PLACES * EACH; i++) {
            const int at = (k / GROUPS * PLACES + i / EACH) * CHANNELS + k % GROUPS * EACH + i % EACH;
            sum += (double)from[at] - 4096.0;
            square += ((double)from[at] - 4096.0) * ((double)from[at] - 4096.0);
            normed += (double)x[at];
        }
        const double mean = sum / (PLACES * EACH), variance = square / (PLACES * EACH) - mean * mean;
        CHECK_NEAR((double)inverse[k], 1.0 / sqrt(variance + 1e-5), 1e-5 * (double)inverse[k]);
        CHECK_NEAR(normed, 0.0, 1e-5);
        CHECK(variance > 2e-5);
    }
}

XD_TEST(a_norm_of_equal_numbers_gives_zeros_and_no_slope) {
    const nn_group_norm norm = { 1, 1, 2, 2 }; /* a pixel whose channels have groups of their own */
    float x[2] = { 3.5f, -1e30f }, d[2] = { 1.0f, -2.0f }, inverse[2];
    nn_group_norm_forward(&norm, x, inverse);
    CHECK(x[0] == 0.0f && x[1] == 0.0f);
    CHECK_NEAR((double)inverse[0], 1.0 / sqrt(1e-5), 1e-3);
    nn_group_norm_backward(&norm, x, inverse, d);
    CHECK(d[0] == 0.0f && d[1] == 0.0f);
}

/* ---- slots, batches, passes of one rank ---- */

static xd_result slots_rank(xd_comm *world, void *argument) {
    static batch one[2], other[2];
    static float each[ALL_WEIGHTS], mixed[ALL_WEIGHTS];
    alone a;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 2));
    CHECK_EQ_INT(xd_model_describe(a.model).parameter_count, ALL_WEIGHTS);
    for (int i = 1; i >= 0; i--) {
        batch_make(&one[i], 20 + (uint64_t)i);
        one[i].call.more = i == 1;
        XD_TRY(forward(&a, &one[i]));
        XD_TRY(backward(&a, &one[i]));
    }
    XD_TRY(take_gradients(&a, each));
    for (int i = 0; i < 2; i++) {
        batch_make(&other[i], 20 + (uint64_t)i);
        other[i].call.slot = i;
        other[i].call.more = i == 1;
        XD_TRY(forward(&a, &other[i]));
    }
    for (int i = 1; i >= 0; i--) XD_TRY(backward(&a, &other[i]));
    XD_TRY(take_gradients(&a, mixed));
    CHECK(same(each, mixed, ALL_WEIGHTS));
    for (int i = 0; i < 2; i++) {
        CHECK(same(one[i].raw, other[i].raw, images_of(&tiny)));
        CHECK(same(one[i].d_x, other[i].d_x, images_of(&tiny)));
    }
    CHECK(!same(one[0].raw, one[1].raw, images_of(&tiny)));
    alone_end(&a);
    return XD_OK;
}

XD_TEST(forwards_that_are_open_at_once_do_not_meet) {
    run_alone(slots_rank);
}

/* A backward for the input alone, and an inference, between the forward and the backward of a leaf. */
static xd_result between_rank(xd_comm *world, void *argument) {
    static batch b, with, bare;
    static float plain[ALL_WEIGHTS], disturbed[ALL_WEIGHTS];
    const int64_t images = images_of(&tiny);
    alone a;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 1));
    batch_make(&b, 3);
    XD_TRY(forward(&a, &b));
    XD_TRY(backward(&a, &b));
    XD_TRY(take_gradients(&a, plain));
    batch_make(&with, 3);
    batch_make(&bare, 3);
    XD_TRY(forward(&a, &with));
    with.call.weights = false;
    XD_TRY(backward(&a, &with));
    CHECK(same(with.d_x, b.d_x, images));
    bare.call.keep = false;
    XD_TRY(forward(&a, &bare));
    CHECK(same(bare.raw, b.raw, images));
    with.call.weights = true;
    with.call.hidden_gradient = NULL;
    XD_TRY(backward(&a, &with));
    XD_TRY(take_gradients(&a, disturbed));
    CHECK(same(plain, disturbed, ALL_WEIGHTS));
    with.call.raw_gradient = NULL;
    with.call.feature_gradients = NULL;
    with.call.hidden_gradient = with.d_x;
    with.call.weights = false;
    XD_TRY(backward(&a, &with));
    for (int i = 0; i < images; i++) CHECK(with.d_x[i] == 0.0f);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(input_gradients_and_inferences_leave_a_leaf_as_it_was) {
    run_alone(between_rank);
}

/* Gradients by one of the features alone, against those with zeros for all else. */
static xd_result captured_rank(xd_comm *world, void *argument) {
    static batch b, bare;
    alone a;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 1));
    for (int which = 0; which < FEATURES; which++) {
        batch_make(&b, 8);
        batch_make(&bare, 8);
        memset(b.d_raw, 0, sizeof b.d_raw);
        memset(b.d_feature[1 - which], 0, sizeof b.d_feature[0]);
        b.call.weights = bare.call.weights = false;
        XD_TRY(forward(&a, &b));
        XD_TRY(backward(&a, &b));
        XD_TRY(nn_conv_capture((nn_conv *)a.passes, &which, 1));
        a.network = nn_conv_network((nn_conv *)a.passes);
        CHECK_EQ_INT(a.network.feature_count, 1);
        bare.d_features[0] = bare.d_feature[which];
        bare.call.raw_gradient = NULL;
        XD_TRY(forward(&a, &bare));
        XD_TRY(backward(&a, &bare));
        CHECK(same(bare.feature[0], b.feature[which], streams_of(&tiny)));
        for (int i = 0; i < images_of(&tiny); i++) CHECK(bare.d_x[i] == b.d_x[i] && bare.d_x[i] != 0.0f);
        XD_TRY(nn_conv_capture((nn_conv *)a.passes, (const int[]){ 0, 1 }, FEATURES));
    }
    alone_end(&a);
    return XD_OK;
}

XD_TEST(a_feature_alone_goes_backward_as_one_of_several) {
    run_alone(captured_rank);
}

/* 70 samples of 15 places are more than two chunks of 34. */
static xd_result batches_rank(xd_comm *world, void *argument) {
    enum { MANY = 70, PIXELS = 30 };
    static float x[MANY * PIXELS], d_raw[MANY * PIXELS], raw[2][MANY * PIXELS], d_x[2][MANY * PIXELS];
    double times[MANY];
    int32_t labels[MANY];
    const int64_t cuts[] = { 0, 1, 3, 34, 35, 36, MANY };
    alone a;
    (void)argument;
    XD_TRY(alone_start(&a, world, MANY, 1));
    noise(1, MANY * PIXELS, x);
    noise(2, MANY * PIXELS, d_raw);
    for (int i = 0; i < MANY; i++) times[i] = (i + 0.5) / MANY, labels[i] = i % LABELS;
    for (int cut = 0; cut < 7; cut++) {
        const int64_t from = cut < 6 ? cuts[cut] : 0, to = cut < 6 ? cuts[cut + 1] : MANY;
        const xd_network_call call = { .samples = to - from,
                                       .hidden = x + from * PIXELS,
                                       .times = times + from,
                                       .condition = labels + from,
                                       .keep = true,
                                       .raw = raw[cut == 6] + from * PIXELS,
                                       .raw_gradient = d_raw + from * PIXELS,
                                       .hidden_gradient = d_x[cut == 6] + from * PIXELS };
        XD_TRY(a.network.forward(a.network.user, &call));
        XD_TRY(a.network.backward(a.network.user, &call));
    }
    CHECK(same(raw[0], raw[1], MANY * PIXELS));
    CHECK(same(d_x[0], d_x[1], MANY * PIXELS));
    alone_end(&a);
    return XD_OK;
}

XD_TEST(a_sample_has_the_same_bits_in_every_batch) {
    run_alone(batches_rank);
}

/* ---- training on several ranks ---- */

enum { IMAGE = 30 };

typedef enum wrapper { UNDER_DDP, UNDER_FSDP, UNDER_HSDP } wrapper;

static const char *const wrapper_names[] = { "DDP", "FSDP", "HSDP" };

/* The groups of two of HSDP, and the ranks with the same part in others; whoever makes them destroys them. */
typedef struct pairs {
    xd_comm *group, *replicas;
} pairs;

static xd_result wrap_as(xd_comm *world, xd_model *model, wrapper kind, const pairs *two, xd_parallel **out) {
    const char *unit = "residual";
    const xd_fsdp_desc hybrid = {
        .micro_batches = ALONE_LEAVES, .unit_types = &unit, .unit_type_count = 1, .replicas = two->replicas
    };
    if (kind == UNDER_HSDP) return wrap_over_fsdp(model, two->group, &hybrid, out);
    return wrap_in(world, model, unit, kind == UNDER_FSDP, out);
}

static xd_result pairs_open(xd_comm *world, pairs *out) {
    const int me = xd_comm_rank(world);
    XD_TRY(xd_comm_split(world, me / 2, me, &out->group));
    return xd_comm_split(world, me % 2, me, &out->replicas);
}

static void pairs_close(pairs *two) {
    xd_comm_destroy(two->replicas);
    xd_comm_destroy(two->group);
}

typedef struct training {
    wrapper kind;
    uint64_t hash; /* of the weights afterwards */
} training;

static xd_result training_rank(xd_comm *world, void *argument) {
    training *t = (training *)argument;
    trainer how = { .rate = 0.05, .leaf = train_pictures, .pixels = IMAGE, .labels = LABELS };
    xd_ctx *ctx = xd_comm_ctx(world);
    pairs two;
    xd_model *model;
    nn_conv *passes;
    uint64_t hash = 0;
    XD_TRY(pairs_open(world, &two));
    XD_TRY(nn_conv_describe(ctx, &tiny, 3, &model));
    XD_TRY(wrap_as(world, model, t->kind, &two, &how.parallel));
    XD_TRY(nn_conv_create(ctx, &tiny, model, ALONE_IN_LEAF, 1, &passes));
    how.network = nn_conv_network(passes);
    XD_TRY(train(world, &how, &hash));
    if (xd_comm_rank(world) == 0) t->hash = hash;
    nn_conv_destroy(passes);
    xd_parallel_destroy(how.parallel);
    xd_model_destroy(model);
    pairs_close(&two);
    return XD_OK;
}

XD_TEST(training_steps_have_the_same_bits_on_every_layout) {
    uint64_t first = 0;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int kind = UNDER_DDP; kind <= UNDER_HSDP; kind++) {
            training t = { .kind = (wrapper)kind };
            if (kind == UNDER_HSDP && ranks != 4) continue;
            run_invariant(ranks, training_rank, &t);
            if (first == 0) first = t.hash;
            CHECK(t.hash == first && t.hash != 0);
            if (t.hash != first) printf("%d ranks, %s\n", ranks, wrapper_names[kind]);
        }
}

/* ---- channels that ranks share ---- */

/* Eight groups of two channels; 40 samples are a chunk of 34 and another. */
static const nn_conv_config wide = { 5, 3, 2, 16, 8, 2, 4, 5, LABELS, NULL };
enum { SHARED = 40, SHARED_IMAGES = SHARED * IMAGE, SHARED_STREAMS = SHARED * 15 * 16 };

/* What came of a pass on one rank. */
typedef struct shared_outcome {
    float raw[SHARED_IMAGES], inferred[SHARED_IMAGES], d_x[SHARED_IMAGES], feature[FEATURES][SHARED_STREAMS];
} shared_outcome;

typedef struct shared_run {
    bool split;
    bool features;       /* the gradient is by these alone, and none by weights */
    shared_outcome *out; /* [ranks] */
} shared_run;

static xd_result shared_pass(const alone *a, const shared_run *run, shared_outcome *out) {
    float x[SHARED_IMAGES], d_raw[SHARED_IMAGES], d_feature[FEATURES][SHARED_STREAMS];
    double times[SHARED];
    int32_t labels[SHARED];
    float *features[FEATURES] = { out->feature[0], out->feature[1] };
    const float *d_features[FEATURES] = { d_feature[0], d_feature[1] };
    xd_network_call call = {
        .samples = SHARED, .hidden = x, .times = times, .condition = labels, .raw = out->inferred
    };
    noise(1, SHARED_IMAGES, x);
    noise(2, SHARED_IMAGES, d_raw);
    for (int k = 0; k < FEATURES; k++) noise(3 + (uint64_t)k, SHARED_STREAMS, d_feature[k]);
    for (int i = 0; i < SHARED; i++) times[i] = (i + 0.5) / SHARED, labels[i] = i % LABELS;
    XD_TRY(a->network.forward(a->network.user, &call));
    call.keep = true;
    call.raw = out->raw;
    call.features = features;
    XD_TRY(a->network.forward(a->network.user, &call));
    call.raw_gradient = run->features ? NULL : d_raw;
    call.feature_gradients = d_features;
    call.hidden_gradient = out->d_x;
    call.weights = !run->features;
    return a->network.backward(a->network.user, &call);
}

static xd_result shared_rank(xd_comm *world, void *argument) {
    const shared_run *run = (const shared_run *)argument;
    nn_conv_config config = wide;
    xd_comm *self;
    alone a;
    XD_TRY(xd_comm_split(world, xd_comm_rank(world), 0, &self));
    if (run->split) XD_TRY(nn_split_create(world, NULL, &config.split));
    XD_TRY(alone_start_as(&a, self, &config, SHARED, 1));
    XD_TRY(shared_pass(&a, run, run->out + xd_comm_rank(world)));
    alone_end(&a);
    nn_split_destroy(config.split);
    xd_comm_destroy(self);
    return XD_OK;
}

/* With eight groups three ranks have two, three and three. */
XD_TEST(ranks_that_share_channels_have_the_bits_of_one) {
    static const int ranks[] = { 2, 3, 4, 8 };
    shared_outcome *one = (shared_outcome *)calloc(2, sizeof *one), *whole = one + 1,
                   *all = (shared_outcome *)calloc(8, sizeof *all);
    for (int features = 0; features < 2; features++) {
        shared_run run = { .features = features == 1, .out = whole };
        double apart = 0.0;
        run_invariant(1, shared_rank, &run);
        run.split = true;
        run.out = one;
        run_invariant(1, shared_rank, &run);
        for (int i = 0; i < SHARED_IMAGES; i++)
            apart = fmax(apart, fabs((double)one->raw[i] - (double)whole->raw[i]));
        CHECK(apart > 0.0 && apart < 1e-4); /* other sums of the same numbers */
        CHECK(same(one->raw, one->inferred, SHARED_IMAGES) && !same(one->raw, one->d_x, SHARED_IMAGES));
        run.out = all;
        for (int k = 0; k < 4; k++) {
            run_invariant(ranks[k], shared_rank, &run);
            for (int r = 0; r < ranks[k]; r++) CHECK(memcmp(one, all + r, sizeof *one) == 0);
            memset((void *)all, 0, 8 * sizeof *all);
        }
    }
    free(one);
    free(all);
}

typedef struct shared_training {
    int tp;
    bool sharded;
    uint64_t hash; /* of the weights and moments afterwards */
} shared_training;

static xd_result shared_training_rank(xd_comm *world, void *argument) {
    shared_training *t = (shared_training *)argument;
    trainer how = { .rate = 0.05, .leaf = train_pictures, .pixels = IMAGE, .labels = LABELS };
    const int me = xd_comm_rank(world);
    nn_conv_config config = wide;
    xd_comm *tp, *data;
    xd_model *model;
    nn_conv *passes;
    uint64_t hash = 0;
    XD_TRY(xd_comm_split(world, me / t->tp, me, &tp));
    XD_TRY(xd_comm_split(world, me % t->tp, me, &data));
    XD_TRY(nn_split_create(tp, NULL, &config.split));
    XD_TRY(nn_conv_describe(xd_comm_ctx(world), &config, 3, &model));
    XD_TRY(wrap_in(data, model, "residual", t->sharded, &how.parallel));
    XD_TRY(nn_conv_create(xd_comm_ctx(world), &config, model, ALONE_IN_LEAF, 1, &passes));
    how.network = nn_conv_network(passes);
    XD_TRY(train(world, &how, &hash));
    if (me == 0) t->hash = hash;
    nn_conv_destroy(passes);
    xd_parallel_destroy(how.parallel);
    xd_model_destroy(model);
    nn_split_destroy(config.split);
    xd_comm_destroy(data);
    xd_comm_destroy(tp);
    return XD_OK;
}

XD_TEST(training_with_shared_channels_has_the_bits_of_one_rank_under_every_wrapper) {
    static const int meshes[][2] = { { 1, 1 }, { 1, 2 }, { 2, 1 }, { 2, 2 }, { 3, 1 }, { 4, 1 }, { 4, 2 } };
    uint64_t first = 0;
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++)
        for (int sharded = 0; sharded < 2; sharded++) {
            shared_training t = { .tp = meshes[m][0], .sharded = sharded == 1 };
            run_invariant(meshes[m][0] * meshes[m][1], shared_training_rank, &t);
            if (first == 0) first = t.hash;
            CHECK(t.hash == first && t.hash != 0);
            if (t.hash != first) printf("tp %d, dp %d, %s\n", t.tp, meshes[m][1], wrapper_names[sharded]);
        }
}

static xd_result many_rank(xd_comm *world, void *argument) {
    nn_conv_config config = tiny;
    xd_model *model = NULL;
    (void)argument;
    XD_TRY(nn_split_create(world, NULL, &config.split));
    check_refused(xd_comm_ctx(world), nn_conv_describe(xd_comm_ctx(world), &config, 1, &model),
                  XD_ERROR_ARGUMENT, "4 ranks share 3 groups of channels; at most 8 can");
    CHECK(model == NULL);
    nn_split_destroy(config.split);
    return XD_OK;
}

XD_TEST(more_ranks_than_groups_are_refused_on_every_rank) {
    CHECK_EQ_INT(xd_run_threads(4, NULL, many_rank, NULL, NULL), XD_OK);
}

/* ---- a distillation whose three networks are this one ---- */

enum { DMD_STEPS = 2, IN_DMD = 2 };

typedef struct distillation {
    wrapper kind;
    int tp;                      /* ranks that share the channels of all three; 0 -> there is no split */
    uint64_t hash[XD_DMD_ROLES]; /* of the weights of those that train, in the end */
    xd_dmd_values values[DMD_STEPS];
} distillation;

typedef struct conv_role {
    xd_model *model;
    xd_parallel *parallel;
    nn_conv *passes;
    xd_optimizer *optimizer;
    xd_param params[ALONE_WEIGHTS];
    xd_tensor_part parts[ALONE_WEIGHTS];
    int64_t count;
} conv_role;

/* The ranks of all roles. */
typedef struct dmd_ranks {
    xd_comm *tp, *data;
    nn_conv_config config;
    wrapper kind;
} dmd_ranks;

static xd_result dmd_ranks_open(xd_comm *world, const distillation *t, dmd_ranks *out) {
    const int me = xd_comm_rank(world), tp = t->tp ? t->tp : 1;
    out->config = tiny;
    out->kind = t->kind;
    XD_TRY(xd_comm_split(world, me / tp, me, &out->tp));
    XD_TRY(xd_comm_split(world, me % tp, me, &out->data));
    return t->tp ? nn_split_create(out->tp, NULL, &out->config.split) : XD_OK;
}

static void dmd_ranks_close(dmd_ranks *ranks) {
    nn_split_destroy(ranks->config.split);
    xd_comm_destroy(ranks->data);
    xd_comm_destroy(ranks->tp);
}

static bool role_is_there(int role) {
    return role != XD_DMD_DISCRIMINATOR;
}

/* Weights that begin as zeros get numbers; the fake score begins as a copy of the teacher. */
static xd_result role_open(const dmd_ranks *ranks, int role, conv_role *r) {
    xd_ctx *ctx = xd_comm_ctx(ranks->data);
    const xd_init normal = { XD_INIT_NORMAL, 0.0f, 0.3f };
    const pairs none = { NULL, NULL };
    const uint64_t seed = role == XD_DMD_STUDENT ? 1 : 2;
    XD_TRY(nn_conv_describe(ctx, &ranks->config, seed, &r->model));
    XD_TRY(wrap_as(ranks->data, r->model, ranks->kind, &none, &r->parallel));
    XD_TRY(xd_parallel_params(r->parallel, ALONE_WEIGHTS, r->params, &r->count));
    XD_TRY(xd_parallel_parts(r->parallel, ALONE_WEIGHTS, r->parts, &r->count));
    for (int64_t i = 0; i < r->count; i++) {
        const xd_philox random = { .seed = seed, .stream = XD_STREAM_USER, .sample = (uint32_t)i };
        XD_TRY(xd_tensor_part_fill(ctx, &r->parts[i], &normal, &random));
    }
    XD_TRY(xd_parallel_publish(r->parallel));
    XD_TRY(nn_conv_create(ctx, &ranks->config, r->model, IN_DMD, 2, &r->passes));
    if (role == XD_DMD_TEACHER) return XD_OK;
    xd_optimizer_desc adamw = xd_adamw_defaults(r->params, r->count);
    adamw.learning_rate = 0.02;
    return xd_optimizer_create(ctx, &adamw, &r->optimizer);
}

static void role_close(conv_role *r) {
    xd_optimizer_destroy(r->optimizer);
    nn_conv_destroy(r->passes);
    xd_parallel_destroy(r->parallel);
    xd_model_destroy(r->model);
}

static xd_result dmd_batch(void *user, int64_t leaf, xd_dmd_batch *out) {
    static const int32_t labels[2] = { 0, 1 }, none[2] = { LABELS - 1, LABELS - 1 };
    (void)user;
    out->samples = IN_DMD;
    out->first = leaf * IN_DMD;
    out->condition = labels;
    out->negative = none;
    return XD_OK;
}

static xd_result dmd_run_steps(xd_comm *world, const xd_dmd_desc *desc, distillation *t) {
    xd_dmd *dmd;
    xd_dmd_values values;
    XD_TRY(xd_dmd_create(xd_comm_ctx(world), desc, &dmd));
    for (int step = 0; step < DMD_STEPS; step++) {
        XD_TRY(xd_dmd_step(dmd, dmd_batch, NULL, &values));
        if (xd_comm_rank(world) == 0) t->values[step] = values;
    }
    xd_dmd_destroy(dmd);
    return XD_OK;
}

static xd_result dmd_hash_role(xd_comm *world, const conv_role *r, uint64_t *out) {
    uint64_t hash = 0;
    const xd_checkpoint_network all = { .parts = r->parts, .part_count = r->count };
    xd_state_gather_desc gather = { .networks = &all, .network_count = 1, .user = &hash };
    if (xd_comm_rank(world) == 0) gather.take = hash_part;
    XD_TRY(xd_state_gather(world, &gather));
    if (xd_comm_rank(world) == 0) *out = hash;
    return XD_OK;
}

static xd_result dmd_rank(xd_comm *world, void *argument) {
    static const double rungs[] = { 0.999, 0.5, 0.0 };
    distillation *t = (distillation *)argument;
    conv_role roles[XD_DMD_ROLES];
    dmd_ranks ranks;
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    memset(roles, 0, sizeof roles);
    XD_TRY(dmd_ranks_open(world, t, &ranks));
    d.data = ranks.data;
    d.frequency = 2; /* the student, then the fake score */
    d.rungs.steps = 2;
    d.rungs.list = rungs;
    d.rungs.roll_out = true;
    d.guided = true;
    d.guidance_scale = 1.5;
    d.sizes.samples = IN_DMD;
    d.sizes.step_samples = IN_DMD * ALONE_LEAVES;
    d.sizes.elements = IMAGE;
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        if (!role_is_there(role)) continue;
        XD_TRY(role_open(&ranks, role, &roles[role]));
        d.networks[role] = nn_conv_network(roles[role].passes);
        d.trainers[role] = (xd_dmd_trainer){ .parallel = roles[role].parallel,
                                             .optimizer = roles[role].optimizer,
                                             .norm = world };
    }
    XD_TRY(dmd_run_steps(world, &d, t));
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        if (role_is_there(role)) XD_TRY(dmd_hash_role(world, &roles[role], &t->hash[role]));
        role_close(&roles[role]);
    }
    dmd_ranks_close(&ranks);
    return XD_OK;
}

XD_TEST(a_distillation_of_it_has_the_bits_of_one_rank_on_two) {
    distillation one = { .kind = UNDER_DDP };
    run_invariant(1, dmd_rank, &one);
    CHECK(one.hash[XD_DMD_FAKE_SCORE] != one.hash[XD_DMD_TEACHER] && one.hash[XD_DMD_STUDENT] != 0);
    CHECK(one.values[0].vsd > 0.0 && one.values[0].fake_score == 0.0 && one.values[0].distance > 0.0);
    CHECK(one.values[1].vsd == 0.0 && one.values[1].fake_score > 0.0 && !one.values[1].skipped);
    for (int kind = UNDER_DDP; kind <= UNDER_FSDP; kind++) {
        distillation two = { .kind = (wrapper)kind };
        run_invariant(2, dmd_rank, &two);
        CHECK(memcmp(one.hash, two.hash, sizeof one.hash) == 0);
        CHECK(memcmp(one.values, two.values, sizeof one.values) == 0);
    }
}

XD_TEST(a_distillation_whose_ranks_share_channels_has_the_bits_of_one_rank) {
    distillation one = { .kind = UNDER_DDP, .tp = 1 };
    run_invariant(1, dmd_rank, &one);
    CHECK(one.hash[XD_DMD_FAKE_SCORE] != one.hash[XD_DMD_TEACHER] && one.hash[XD_DMD_STUDENT] != 0);
    for (int kind = UNDER_DDP; kind <= UNDER_FSDP; kind++) {
        distillation four = { .kind = (wrapper)kind, .tp = 2 };
        run_invariant(4, dmd_rank, &four);
        CHECK(memcmp(one.hash, four.hash, sizeof one.hash) == 0);
        CHECK(memcmp(one.values, four.values, sizeof one.values) == 0);
    }
}

/* ---- the description, memory, refusals ---- */

static xd_result plain_rank(xd_comm *world, void *argument) {
    enum { PIXELS = 256 };
    const nn_conv_config usual = nn_conv_defaults();
    xd_ctx *ctx = xd_comm_ctx(world);
    static float x[2 * PIXELS], raw[2 * PIXELS];
    const double times[2] = { 0.2, 0.9 };
    xd_model *model;
    nn_conv *passes;
    (void)argument;
    XD_TRY(nn_conv_describe(ctx, &usual, 1, &model));
    CHECK_EQ_INT(xd_model_describe(model).parameter_count, 88353);
    XD_TRY(xd_model_allocate(model));
    XD_TRY(xd_model_init_weights(model));
    XD_TRY(nn_conv_create(ctx, &usual, model, 2, 0, &passes));
    const xd_network n = nn_conv_network(passes);
    CHECK_EQ_INT(n.feature_count, 1);
    CHECK_EQ_INT(n.feature_elements[0], 32 * PIXELS);
    noise(4, 2 * PIXELS, x);
    memset(raw, 0xff, sizeof raw);
    XD_TRY(n.forward(n.user, &(xd_network_call){ .samples = 2, .hidden = x, .times = times, .raw = raw }));
    for (int i = 0; i < 2 * PIXELS; i++) CHECK(raw[i] == 0.0f);
    nn_conv_destroy(passes);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(the_usual_network_has_its_number_of_weights_and_begins_with_zero) {
    run_alone(plain_rank);
}

static xd_result memory_rank(xd_comm *world, void *argument) {
    static batch b;
    alone a;
    XD_TRY(alone_start(&a, world, SAMPLES, 1));
    batch_make(&b, 1);
    XD_TRY(check_no_allocation(&a, &b.call, (const int *)argument));
    alone_end(&a);
    return XD_OK;
}

XD_TEST(passes_allocate_nothing) {
    run_counted(memory_rank);
}

static void check_described(xd_ctx *ctx, nn_conv_config c, const char *message) {
    xd_model *model = NULL;
    check_refused(ctx, nn_conv_describe(ctx, &c, 1, &model), XD_ERROR_ARGUMENT, message);
    CHECK(model == NULL);
}

static xd_result sizes_rank(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    nn_conv_config c = tiny;
    xd_model *model;
    nn_conv *passes = NULL;
    (void)argument;
    c.groups = 4;
    check_described(ctx, c, "6 channels are not a multiple of 4 groups");
    c = tiny, c.groups = 0;
    check_described(ctx, c, "6 channels are not a multiple of 0 groups");
    c = tiny, c.width = 0;
    check_described(ctx, c, "images of 5 x 0; the sides are 1 to 1024");
    c = tiny, c.channels = 0;
    check_described(ctx, c, "0 channels of images and 6 of the stream; there are 1 to 4096");
    c = tiny, c.frequencies = 3;
    check_described(ctx, c, "3 sines and cosines are not an even number");
    c = tiny, c.blocks = 0;
    check_described(ctx, c, "0 blocks; there are 1 to 9999");
    c = tiny, c.labels = 0;
    check_described(ctx, c, "0 labels in an embedding of 5");
    XD_TRY(nn_conv_describe(ctx, &tiny, 1, &model));
    check_refused(ctx, nn_conv_create(ctx, &tiny, model, -1, 0, &passes), XD_ERROR_ARGUMENT,
                  "-1 samples of at most 1048576 in 0 slots");
    c = tiny, c.blocks = 3;
    check_refused(ctx, nn_conv_create(ctx, &c, model, 1, 0, &passes), XD_ERROR_ARGUMENT,
                  "the model has no block \"blocks.2\" of 3");
    CHECK(passes == NULL);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(sizes_that_do_not_fit_are_refused_with_both_numbers) {
    run_alone(sizes_rank);
}

static xd_result refusals_rank(xd_comm *world, void *argument) {
    static batch b;
    alone a;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 2));
    check_refused(a.ctx, nn_conv_capture((nn_conv *)a.passes, (const int[]){ 0, 2 }, 2), XD_ERROR_ARGUMENT,
                  "a feature behind block 2 of 2");
    check_refused(a.ctx, nn_conv_capture((nn_conv *)a.passes, (const int[]){ 1, 1 }, 2), XD_ERROR_ARGUMENT,
                  "a feature behind block 1 after that behind block 1");
    CHECK_EQ_INT(nn_conv_network((nn_conv *)a.passes).feature_count, FEATURES);
    batch_make(&b, 1);
    b.call.slot = 2;
    check_refused(a.ctx, forward(&a, &b), XD_ERROR_ARGUMENT, "slot 2 of 2");
    b.call.slot = 1;
    check_refused(a.ctx, backward(&a, &b), XD_ERROR_STATE, "backward of 5 samples where slot 1 holds none");
    b.labels[4] = LABELS;
    check_refused(a.ctx, forward(&a, &b), XD_ERROR_ARGUMENT, "sample 4 has label 3 of 3");
    b.labels[4] = 0;
    XD_TRY(forward(&a, &b));
    b.call.samples = 4;
    check_refused(a.ctx, backward(&a, &b), XD_ERROR_STATE, "backward of 4 samples where slot 1 holds 5");
    b.call.samples = 6;
    check_refused(a.ctx, forward(&a, &b), XD_ERROR_ARGUMENT, "6 samples where there is room for 5");
    alone_end(&a);
    return XD_OK;
}

XD_TEST(calls_that_do_not_fit_are_refused_with_both_numbers) {
    run_alone(refusals_rank);
}

XD_TEST_MAIN()
