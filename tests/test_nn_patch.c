/* test_nn_patch.c - the patch transformer of examples/nn as a network: gradients, slots, batches, wrappers. */
#include "xdistill.h"

#include "nn_alone.h"

#include <math.h>

#include "../examples/nn/nn_call.c"
#include "../examples/nn/nn_condition.c"
#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/nn/nn_network.c"
#include "../examples/nn/nn_patch.c"
#include "../examples/nn/nn_patch_attention.c"
#include "../examples/nn/nn_patch_describe.c"
#include "../examples/nn/nn_patch_layer.c"
#include "../examples/nn/nn_patch_pass.c"
#include "../examples/nn/nn_patch_pieces.c"
#include "../examples/nn/nn_patch_positions.c"
#include "../examples/nn/nn_patch_rows.c"
#include "../examples/nn/nn_patch_split.c"
#include "../examples/nn/nn_small.c"
#include "../examples/nn/nn_split.c"

enum {
    SIDE = 8,
    PIXELS = SIDE * SIDE,
    SAMPLES = 5,
    LABELS = 3,
    FEATURE = 16 * 16,
    FEATURES = 2, /* behind each layer */
    ALL_WEIGHTS = 6788
};

static const nn_patch_config tiny = { SIDE, 2, 16, 2, 2, 24, 8, LABELS, NULL, NULL };

/* ---- help ---- */

static xd_result alone_start_as(alone *a, xd_comm *comm, const nn_patch_config *config, int64_t samples,
                                int slots) {
    static const int both[FEATURES] = { 0, 1 };
    nn_patch *passes;
    memset(a, 0, sizeof *a);
    a->ctx = xd_comm_ctx(comm);
    XD_TRY(nn_patch_describe(a->ctx, config, 3, &a->model));
    XD_TRY(alone_wrap(a, comm));
    XD_TRY(nn_patch_create(a->ctx, config, a->model, samples, slots, &passes));
    XD_TRY(nn_patch_capture(passes, both, FEATURES));
    a->passes = passes;
    a->network = nn_patch_network(passes);
    CHECK_EQ_INT(a->network.feature_count, FEATURES);
    for (int k = 0; k < FEATURES; k++) CHECK_EQ_INT(a->network.feature_elements[k], 16 * config->width);
    return XD_OK;
}

static xd_result alone_start(alone *a, xd_comm *comm, int64_t samples, int slots) {
    return alone_start_as(a, comm, &tiny, samples, slots);
}

static void alone_end(alone *a) {
    nn_patch_destroy((nn_patch *)a->passes);
    alone_unwrap(a);
}

/* A batch with everything that a call of the network needs. */
typedef struct batch {
    float x[SAMPLES * PIXELS], raw[SAMPLES * PIXELS], d_raw[SAMPLES * PIXELS], d_x[SAMPLES * PIXELS];
    float feature[FEATURES][SAMPLES * FEATURE], d_feature[FEATURES][SAMPLES * FEATURE];
    float *features[FEATURES];
    const float *d_features[FEATURES];
    double times[SAMPLES];
    int32_t labels[SAMPLES];
    xd_network_call call;
} batch;

static void batch_make(batch *b, uint64_t seed) {
    noise(seed, SAMPLES * PIXELS, b->x);
    noise(seed + 1, SAMPLES * PIXELS, b->d_raw);
    for (int k = 0; k < FEATURES; k++) {
        noise(seed + 2 + (uint64_t)k, SAMPLES * FEATURE, b->d_feature[k]);
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

/* ---- the same network in double, loop by loop ---- */

enum { TOKENS = 16, WIDTH = 16, HEADS = 2, EACH = WIDTH / HEADS, FFN = 24, PATCH = 2, WAVES = 8 };

typedef struct reference {
    const alone *a;
    double *weights[64]; /* by number in a->params */
} reference;

static int number_of(const alone *a, const char *block, const char *name) {
    char full[64];
    snprintf(full, sizeof full, "%s%s", block, name);
    for (int64_t i = 0; i < a->count; i++)
        if (strcmp(a->params[i].name, full) == 0) return (int)i;
    printf("there is no weight %s\n", full);
    CHECK(false);
    return 0;
}

static const double *weight(const reference *r, const char *block, const char *name) {
    return r->weights[number_of(r->a, block, name)];
}

static void reference_start(reference *r, const alone *a) {
    r->a = a;
    for (int64_t i = 0; i < a->count; i++) {
        r->weights[i] = (double *)calloc((size_t)a->params[i].count, sizeof(double));
        for (int64_t j = 0; j < a->params[i].count; j++)
            r->weights[i][j] = (double)((const float *)a->params[i].value)[j];
    }
}

static void reference_end(reference *r) {
    for (int64_t i = 0; i < r->a->count; i++) free(r->weights[i]);
}

static void linear(const double *w, const double *b, int out, int in, const double *x, double *y) {
    for (int o = 0; o < out; o++) {
        y[o] = b[o];
        for (int i = 0; i < in; i++) y[o] += w[o * in + i] * x[i];
    }
}

static double silu(double x) {
    return x / (1.0 + exp(-x));
}

/* Norm, scale and shift of one row. */
static void modulated(const double *x, const double *shift, const double *scale, double *y) {
    double mean = 0.0, variance = 0.0;
    for (int i = 0; i < WIDTH; i++) mean += x[i] / WIDTH;
    for (int i = 0; i < WIDTH; i++) variance += (x[i] - mean) * (x[i] - mean) / WIDTH;
    for (int i = 0; i < WIDTH; i++)
        y[i] = (x[i] - mean) / sqrt(variance + 1e-6) * (1.0 + scale[i]) + shift[i];
}

static void attend(double qkv[TOKENS][3 * WIDTH], int head, int query, double *out) {
    double p[TOKENS], sum = 0.0;
    const double *q = qkv[query] + head * EACH;
    for (int k = 0; k < TOKENS; k++) {
        p[k] = 0.0;
        for (int i = 0; i < EACH; i++) p[k] += q[i] * qkv[k][WIDTH + head * EACH + i];
        p[k] = exp(p[k] / sqrt((double)EACH));
        sum += p[k];
    }
    for (int i = 0; i < EACH; i++) {
        out[i] = 0.0;
        for (int k = 0; k < TOKENS; k++) out[i] += p[k] / sum * qkv[k][2 * WIDTH + head * EACH + i];
    }
}

static void reference_layer(const reference *r, const char *block, const double *common,
                            double x[TOKENS][WIDTH]) {
    double m[6 * WIDTH], h[WIDTH], qkv[TOKENS][3 * WIDTH], inner[FFN];
    for (int i = 0; i < 6 * WIDTH; i++) m[i] = common[i] + weight(r, block, "table")[i];
    for (int t = 0; t < TOKENS; t++) {
        modulated(x[t], m, m + WIDTH, h);
        linear(weight(r, block, "qkv.weight"), weight(r, block, "qkv.bias"), 3 * WIDTH, WIDTH, h, qkv[t]);
    }
    for (int t = 0; t < TOKENS; t++) {
        double mixed[WIDTH];
        for (int head = 0; head < HEADS; head++) attend(qkv, head, t, mixed + head * EACH);
        linear(weight(r, block, "attended.weight"), weight(r, block, "attended.bias"), WIDTH, WIDTH, mixed,
               h);
        for (int i = 0; i < WIDTH; i++) x[t][i] += m[2 * WIDTH + i] * h[i];
        modulated(x[t], m + 3 * WIDTH, m + 4 * WIDTH, h);
        linear(weight(r, block, "up.weight"), weight(r, block, "up.bias"), FFN, WIDTH, h, inner);
        for (int i = 0; i < FFN; i++) inner[i] = silu(inner[i]);
        linear(weight(r, block, "down.weight"), weight(r, block, "down.bias"), WIDTH, FFN, inner, h);
        for (int i = 0; i < WIDTH; i++) x[t][i] += m[5 * WIDTH + i] * h[i];
    }
}

static void reference_condition(const reference *r, double time, int32_t label, double *common,
                                double *last) {
    double waves[WAVES], e[WIDTH];
    for (int i = 0; i < WAVES / 2; i++) {
        const double frequency = exp(log(1000.0) * i / (WAVES / 2 - 1));
        waves[i] = sin(frequency * time), waves[WAVES / 2 + i] = cos(frequency * time);
    }
    linear(weight(r, "", "time.weight"), weight(r, "", "time.bias"), WIDTH, WAVES, waves, e);
    for (int i = 0; i < WIDTH; i++) e[i] = silu(e[i] + weight(r, "", "label")[label * WIDTH + i]);
    linear(weight(r, "", "common.weight"), weight(r, "", "common.bias"), 6 * WIDTH, WIDTH, e, common);
    linear(weight(r, "", "last.weight"), weight(r, "", "last.bias"), 2 * WIDTH, WIDTH, e, last);
    for (int i = 0; i < 2 * WIDTH; i++) last[i] += weight(r, "", "last.table")[i];
}

/* What a batch gives. */
typedef struct outcome {
    double raw[SAMPLES * PIXELS], feature[FEATURES][SAMPLES * FEATURE];
} outcome;

static void reference_sample(const reference *r, const batch *b, int s, const double *image, outcome *out) {
    enum { ACROSS = SIDE / PATCH };
    double x[TOKENS][WIDTH], patch[PATCH * PATCH], h[WIDTH], common[6 * WIDTH], last[2 * WIDTH];
    double *raw = out->raw + s * PIXELS;
    reference_condition(r, b->times[s], b->labels[s], common, last);
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < PATCH * PATCH; i++)
            patch[i] = image[(t / ACROSS * PATCH + i / PATCH) * SIDE + t % ACROSS * PATCH + i % PATCH];
        linear(weight(r, "", "embed.weight"), weight(r, "", "embed.bias"), WIDTH, PATCH * PATCH, patch, x[t]);
        for (int i = 0; i < WIDTH; i++) x[t][i] += weight(r, "", "position")[t * WIDTH + i];
    }
    for (int k = 0; k < FEATURES; k++) {
        reference_layer(r, k ? "blocks.1." : "blocks.0.", common, x);
        for (int i = 0; i < FEATURE; i++) out->feature[k][s * FEATURE + i] = x[i % TOKENS][i / TOKENS];
    }
    for (int t = 0; t < TOKENS; t++) {
        modulated(x[t], last, last + WIDTH, h);
        linear(weight(r, "", "out.weight"), weight(r, "", "out.bias"), PATCH * PATCH, WIDTH, h, patch);
        for (int i = 0; i < PATCH * PATCH; i++)
            raw[(t / ACROSS * PATCH + i / PATCH) * SIDE + t % ACROSS * PATCH + i % PATCH] = patch[i];
    }
}

/* Of a batch whose images are `x`: predictions and features times their gradients, summed. */
static double reference_loss(const reference *r, const batch *b, const double *x, outcome *out) {
    double loss = 0.0;
    for (int s = 0; s < SAMPLES; s++) reference_sample(r, b, s, x + s * PIXELS, out);
    for (int i = 0; i < SAMPLES * PIXELS; i++) loss += out->raw[i] * (double)b->d_raw[i];
    for (int k = 0; k < FEATURES; k++)
        for (int i = 0; i < SAMPLES * FEATURE; i++) loss += out->feature[k][i] * (double)b->d_feature[k][i];
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
        for (int64_t i = 0; i < count; i++) place[i] = kept[i] + (side ? -1e-5 : 1e-5) * (double)direction[i];
        loss[side] = reference_loss(r, b, x, &out);
    }
    memcpy(place, kept, (size_t)count * sizeof *kept);
    CHECK(length > 0.0);
    CHECK_NEAR(claimed, (loss[0] - loss[1]) / 2e-5, 2e-5 * (1.0 + sqrt(length)));
}

static xd_result gradients_rank(xd_comm *world, void *argument) {
    static double x[SAMPLES * PIXELS];
    static outcome out;
    static batch b;
    nn_patch_config config = tiny;
    alone a;
    reference r;
    if (argument) XD_TRY(nn_split_create(world, NULL, &config.split));
    XD_TRY(alone_start_as(&a, world, &config, SAMPLES, 1));
    reference_start(&r, &a);
    batch_make(&b, 5);
    for (int i = 0; i < SAMPLES * PIXELS; i++) x[i] = (double)b.x[i];
    XD_TRY(forward(&a, &b));
    XD_TRY(backward(&a, &b));
    XD_TRY(xd_parallel_reduce(a.parallel));
    (void)reference_loss(&r, &b, x, &out);
    for (int i = 0; i < SAMPLES * PIXELS; i++)
        CHECK_NEAR((double)b.raw[i], out.raw[i], 2e-5 * (1.0 + fabs(out.raw[i])));
    for (int k = 0; k < FEATURES; k++)
        for (int i = 0; i < SAMPLES * FEATURE; i++)
            CHECK_NEAR((double)b.feature[k][i], out.feature[k][i], 2e-5 * (1.0 + fabs(out.feature[k][i])));
    for (int64_t i = 0; i < a.count; i++)
        check_place(&r, &b, x, r.weights[i], (const float *)a.params[i].gradient, a.params[i].count);
    check_place(&r, &b, x, x, b.d_x, SAMPLES * PIXELS);
    reference_end(&r);
    alone_end(&a);
    nn_split_destroy(config.split);
    return XD_OK;
}

XD_TEST(predictions_and_all_gradients_agree_with_the_same_network_in_double) {
    run_alone(gradients_rank);
}

XD_TEST(and_so_they_do_with_sums_in_pieces) {
    bool split = true;
    run_with(gradients_rank, &split);
}

/* ---- slots, batches, passes of one rank ---- */

static xd_result slots_rank(xd_comm *world, void *argument) {
    static batch one[2], other[2];
    static float each[ALL_WEIGHTS], mixed[ALL_WEIGHTS];
    alone a;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 2));
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
        CHECK(same(one[i].raw, other[i].raw, SAMPLES * PIXELS));
        CHECK(same(one[i].d_x, other[i].d_x, SAMPLES * PIXELS));
    }
    CHECK(!same(one[0].raw, one[1].raw, SAMPLES * PIXELS));
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
    CHECK(same(with.d_x, b.d_x, SAMPLES * PIXELS));
    bare.call.keep = false;
    XD_TRY(forward(&a, &bare));
    CHECK(same(bare.raw, b.raw, SAMPLES * PIXELS));
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
    for (int i = 0; i < SAMPLES * PIXELS; i++) CHECK(with.d_x[i] == 0.0f);
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
        XD_TRY(nn_patch_capture((nn_patch *)a.passes, &which, 1));
        a.network = nn_patch_network((nn_patch *)a.passes);
        CHECK_EQ_INT(a.network.feature_count, 1);
        bare.d_features[0] = bare.d_feature[which];
        bare.call.raw_gradient = NULL;
        XD_TRY(forward(&a, &bare));
        XD_TRY(backward(&a, &bare));
        CHECK(same(bare.feature[0], b.feature[which], SAMPLES * FEATURE));
        for (int i = 0; i < SAMPLES * PIXELS; i++) CHECK(bare.d_x[i] == b.d_x[i] && bare.d_x[i] != 0.0f);
        XD_TRY(nn_patch_capture((nn_patch *)a.passes, (const int[]){ 0, 1 }, FEATURES));
    }
    alone_end(&a);
    return XD_OK;
}

XD_TEST(a_feature_alone_goes_backward_as_one_of_several) {
    run_alone(captured_rank);
}

/* 70 samples are more than two chunks of 32. */
static xd_result batches_rank(xd_comm *world, void *argument) {
    enum { MANY = 70 };
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

/* ---- samples that ranks share ---- */

/* 35 samples are a chunk of 32 and another. */
enum { SHARED = 35, MOST_FEATURE = 2 * FEATURE };

/* What came of a pass, put together from the parts of all ranks; of each rank what all have. */
typedef struct shared_outcome {
    float raw[SHARED * PIXELS], d_x[SHARED * PIXELS], inferred[SHARED * PIXELS];
    float feature[8][FEATURES][SHARED * MOST_FEATURE], gradients[8][ALL_WEIGHTS];
} shared_outcome;

typedef struct shared_run {
    nn_patch_config config;
    bool features;  /* the gradient is by these alone, and none by weights */
    int tp;         /* ranks that share heads and inner width; 0 -> there is no split */
    int64_t pixels; /* of a sample */
    shared_outcome *out;
} shared_run;

/* This rank's pixels of every sample, out of whole samples or into them. */
static void share(xd_interval own, int64_t pixels, float *whole, float *part, bool into) {
    const int64_t count = own.end - own.begin;
    for (int64_t i = 0; i < SHARED; i++) {
        float *at = whole + i * pixels + own.begin;
        memcpy(into ? at : part + i * count, into ? part + i * count : at, (size_t)count * sizeof *at);
    }
}

static xd_result shared_pass(alone *a, const shared_run *run, int rank) {
    float whole[SHARED * PIXELS], x[SHARED * PIXELS], d_raw[SHARED * PIXELS], raw[SHARED * PIXELS],
        d_x[SHARED * PIXELS], d_feature[SHARED * MOST_FEATURE];
    double times[SHARED];
    int32_t labels[SHARED];
    const xd_interval own = nn_patch_pixels(&run->config);
    float *features[FEATURES] = { run->out->feature[rank][0], run->out->feature[rank][1] };
    const float *d_features[FEATURES] = { d_feature, d_feature };
    xd_network_call call = {
        .samples = SHARED, .hidden = x, .times = times, .condition = labels, .raw = raw
    };
    noise(1, SHARED * run->pixels, whole);
    share(own, run->pixels, whole, x, false);
    noise(2, SHARED * run->pixels, whole);
    share(own, run->pixels, whole, d_raw, false);
    noise(3, SHARED * MOST_FEATURE, d_feature);
    for (int i = 0; i < SHARED; i++) times[i] = (i + 0.5) / SHARED, labels[i] = i % LABELS;
    XD_TRY(a->network.forward(a->network.user, &call));
    share(own, run->pixels, run->out->inferred, raw, true);
    call.keep = true;
    call.features = features;
    XD_TRY(a->network.forward(a->network.user, &call));
    share(own, run->pixels, run->out->raw, raw, true);
    call.raw_gradient = run->features ? NULL : d_raw;
    call.feature_gradients = d_features;
    call.hidden_gradient = d_x;
    call.weights = !run->features;
    XD_TRY(a->network.backward(a->network.user, &call));
    share(own, run->pixels, run->out->d_x, d_x, true);
    return run->features || run->tp ? XD_OK : take_gradients(a, run->out->gradients[rank]);
}

static xd_result shared_rank(xd_comm *world, void *argument) {
    shared_run run = *(const shared_run *)argument;
    const int me = xd_comm_rank(world), tp = run.tp ? run.tp : 1;
    xd_comm *self, *side, *cp;
    alone a;
    XD_TRY(xd_comm_split(world, me, 0, &self));
    XD_TRY(xd_comm_split(world, me / tp, me, &side));
    XD_TRY(xd_comm_split(world, me % tp, me, &cp));
    run.config.cp = cp;
    if (run.tp) XD_TRY(nn_split_create(side, cp, &run.config.split));
    XD_TRY(alone_start_as(&a, self, &run.config, SHARED, 1));
    XD_TRY(shared_pass(&a, &run, me));
    alone_end(&a);
    nn_split_destroy(run.config.split);
    xd_comm_destroy(cp);
    xd_comm_destroy(side);
    xd_comm_destroy(self);
    return XD_OK;
}

static void shared_on(shared_run *run, int ranks, shared_outcome *out) {
    xd_error error = { 0 };
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    run->pixels = (int64_t)run->config.side * run->config.side;
    run->out = out;
    memset(out, 0, sizeof *out);
    const xd_result result = xd_run_threads(ranks, &desc, shared_rank, run, &error);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
}

/* Runs of tokens that begin with rows of patches, and, with patches of one pixel, any runs of eighths. */
XD_TEST(ranks_that_share_samples_have_the_bits_of_one) {
    static const nn_patch_config fine = { 4, 1, 16, 2, 2, 24, 8, LABELS, NULL, NULL };
    static const int ranks[2][4] = { { 1, 2, 4, 1 }, { 2, 3, 5, 8 } };
    shared_outcome *one = (shared_outcome *)malloc(sizeof *one), *all = (shared_outcome *)malloc(sizeof *all);
    for (int i = 0; i < 4; i++) {
        shared_run run = { .config = i / 2 ? fine : tiny, .features = i % 2 == 1 };
        shared_on(&run, 1, one);
        CHECK(!same(one->raw, one->d_x, SHARED * run.pixels));
        CHECK(same(one->raw, one->inferred, SHARED * run.pixels));
        for (int k = 0; k < 4; k++) {
            shared_on(&run, ranks[i / 2][k], all);
            CHECK(same(one->raw, all->raw, SHARED * run.pixels));
            CHECK(same(one->inferred, all->inferred, SHARED * run.pixels));
            CHECK(same(one->d_x, all->d_x, SHARED * run.pixels));
            for (int r = 0; r < ranks[i / 2][k]; r++) {
                CHECK(same(one->feature[0][0], all->feature[r][0], FEATURES * SHARED * MOST_FEATURE));
                CHECK(same(one->gradients[0], all->gradients[r], ALL_WEIGHTS));
            }
        }
    }
    free(one);
    free(all);
}

/* Seven pieces of five in a width of 34, the last of four. */
XD_TEST(ranks_that_share_heads_and_width_have_the_bits_of_one) {
    static const nn_patch_config wide = { 4, 1, 32, 2, 4, 34, 8, LABELS, NULL, NULL };
    static const int meshes[][2] = { { 1, 1 }, { 1, 2 }, { 1, 4 }, { 2, 2 }, { 3, 2 } };
    shared_outcome *one = (shared_outcome *)malloc(sizeof *one), *all = (shared_outcome *)malloc(sizeof *all),
                   *whole = (shared_outcome *)malloc(sizeof *whole);
    shared_run run = { .config = wide, .features = true };
    shared_on(&run, 1, whole);
    run.features = false;
    run.tp = 1;
    shared_on(&run, 1, one);
    double apart = 0.0;
    for (int i = 0; i < SHARED * run.pixels; i++)
        apart = fmax(apart, fabs((double)one->raw[i] - (double)whole->raw[i]));
    CHECK(apart > 0.0 && apart < 1e-4); /* other sums of the same numbers */
    for (int k = 0; k < 5; k++) {
        run.tp = meshes[k][1];
        shared_on(&run, meshes[k][0] * meshes[k][1], all);
        CHECK(same(one->raw, all->raw, SHARED * run.pixels));
        CHECK(same(one->inferred, all->inferred, SHARED * run.pixels));
        CHECK(same(one->d_x, all->d_x, SHARED * run.pixels));
        for (int r = 0; r < meshes[k][0] * meshes[k][1]; r++)
            CHECK(same(one->feature[0][0], all->feature[r][0], FEATURES * SHARED * MOST_FEATURE));
    }
    free(one);
    free(all);
    free(whole);
}

typedef struct misfit {
    int side, patch;
    char message[512];
} misfit;

static xd_result misfit_rank(xd_comm *world, void *argument) {
    misfit *m = (misfit *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    nn_patch_config config = tiny;
    xd_model *model;
    nn_patch *passes = NULL;
    config.side = m->side;
    config.patch = m->patch;
    config.cp = world;
    XD_TRY(nn_patch_describe(ctx, &config, 1, &model));
    CHECK_EQ_INT(nn_patch_create(ctx, &config, model, 1, 0, &passes), XD_ERROR_ARGUMENT);
    CHECK(passes == NULL);
    if (xd_comm_rank(world) == 0) snprintf(m->message, sizeof m->message, "%s", xd_last_error(ctx)->message);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(cuts_that_do_not_fit_are_refused_on_every_rank) {
    misfit m = { SIDE, 2, "" };
    CHECK_EQ_INT(xd_run_threads(3, NULL, misfit_rank, &m, NULL), XD_OK);
    CHECK_EQ_STR(m.message, "rank 2 of 3 begins with token 10, within a row of 4 patches");
    CHECK_EQ_INT(xd_run_threads(8, NULL, misfit_rank, &m, NULL), XD_OK);
    CHECK_EQ_STR(m.message, "rank 1 of 8 begins with token 2, within a row of 4 patches");
    m.patch = 1;
    CHECK_EQ_INT(xd_run_threads(9, NULL, misfit_rank, &m, NULL), XD_OK);
    CHECK_EQ_STR(m.message, "9 ranks share 8 blocks of tokens");
}

typedef struct uneven {
    int heads, ffn;
    char message[512];
} uneven;

static xd_result uneven_rank(xd_comm *world, void *argument) {
    uneven *u = (uneven *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    nn_patch_config config = tiny;
    xd_model *model = NULL;
    config.width = 32;
    config.heads = u->heads;
    config.ffn = u->ffn;
    XD_TRY(nn_split_create(world, NULL, &config.split));
    CHECK_EQ_INT(nn_patch_describe(ctx, &config, 1, &model), XD_ERROR_ARGUMENT);
    CHECK(model == NULL);
    if (xd_comm_rank(world) == 0) snprintf(u->message, sizeof u->message, "%s", xd_last_error(ctx)->message);
    nn_split_destroy(config.split);
    return XD_OK;
}

XD_TEST(heads_and_pieces_that_do_not_fit_their_ranks_are_refused) {
    uneven u = { 4, 24, "" };
    CHECK_EQ_INT(xd_run_threads(3, NULL, uneven_rank, &u, NULL), XD_OK);
    CHECK_EQ_STR(u.message, "4 heads are not a multiple of 3 ranks");
    u.ffn = 3;
    CHECK_EQ_INT(xd_run_threads(4, NULL, uneven_rank, &u, NULL), XD_OK);
    CHECK_EQ_STR(u.message, "4 ranks share 3 pieces of inner width 3");
}

/* ---- training on several ranks ---- */

typedef struct training {
    bool fsdp;
    uint64_t hash; /* of the weights afterwards */
} training;

static xd_result training_rank(xd_comm *world, void *argument) {
    training *t = (training *)argument;
    trainer how = { .rate = 0.05, .leaf = train_pictures, .pixels = PIXELS, .labels = LABELS };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *model;
    nn_patch *passes;
    uint64_t hash = 0;
    XD_TRY(nn_patch_describe(ctx, &tiny, 3, &model));
    XD_TRY(wrap_in(world, model, "layer", t->fsdp, &how.parallel));
    XD_TRY(nn_patch_create(ctx, &tiny, model, ALONE_IN_LEAF, 1, &passes));
    how.network = nn_patch_network(passes);
    XD_TRY(train(world, &how, &hash));
    if (xd_comm_rank(world) == 0) t->hash = hash;
    nn_patch_destroy(passes);
    xd_parallel_destroy(how.parallel);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(training_steps_have_the_same_bits_on_every_layout) {
    uint64_t first = 0;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int fsdp = 0; fsdp < 2; fsdp++) {
            training t = { .fsdp = fsdp != 0 };
            run_invariant(ranks, training_rank, &t);
            if (first == 0) first = t.hash;
            CHECK(t.hash == first && t.hash != 0);
            if (t.hash != first) printf("%d ranks, %s\n", ranks, fsdp ? "FSDP" : "DDP");
        }
}

/* ---- the description, memory, refusals ---- */

static xd_result plain_rank(xd_comm *world, void *argument) {
    enum { IMAGE = 256 };
    const nn_patch_config usual = nn_patch_defaults();
    xd_ctx *ctx = xd_comm_ctx(world);
    static float x[2 * IMAGE], raw[2 * IMAGE];
    const double times[2] = { 0.2, 0.9 };
    xd_model *model;
    nn_patch *passes;
    (void)argument;
    XD_TRY(nn_patch_describe(ctx, &usual, 1, &model));
    CHECK_EQ_INT(xd_model_describe(model).parameter_count, 423664);
    XD_TRY(xd_model_allocate(model));
    XD_TRY(xd_model_init_weights(model));
    XD_TRY(nn_patch_create(ctx, &usual, model, 2, 0, &passes));
    const xd_network n = nn_patch_network(passes);
    CHECK_EQ_INT(n.feature_count, 1);
    CHECK_EQ_INT(n.feature_elements[0], 96 * 16);
    noise(4, 2 * IMAGE, x);
    memset(raw, 0xff, sizeof raw);
    XD_TRY(n.forward(n.user, &(xd_network_call){ .samples = 2, .hidden = x, .times = times, .raw = raw }));
    for (int i = 0; i < 2 * IMAGE; i++) CHECK(raw[i] == 0.0f);
    nn_patch_destroy(passes);
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

static xd_result refusals_rank(xd_comm *world, void *argument) {
    static batch b;
    alone a;
    nn_patch_config c = tiny;
    xd_model *model = NULL;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 2));
    c.patch = 3;
    check_refused(a.ctx, nn_patch_describe(a.ctx, &c, 1, &model), XD_ERROR_ARGUMENT,
                  "images of side 8 are not cut into patches of side 3");
    c.patch = 4;
    check_refused(a.ctx, nn_patch_describe(a.ctx, &c, 1, &model), XD_ERROR_ARGUMENT,
                  "side 8 and patch 4 give 4 tokens, not a multiple of 8");
    check_refused(a.ctx, nn_patch_capture((nn_patch *)a.passes, (const int[]){ 0, 2 }, 2), XD_ERROR_ARGUMENT,
                  "a feature behind layer 2 of 2");
    check_refused(a.ctx, nn_patch_capture((nn_patch *)a.passes, (const int[]){ 1, 1 }, 2), XD_ERROR_ARGUMENT,
                  "a feature behind layer 1 after that behind layer 1");
    CHECK_EQ_INT(nn_patch_network((nn_patch *)a.passes).feature_count, FEATURES);
    c = tiny, c.heads = 4;
    check_refused(a.ctx, nn_patch_describe(a.ctx, &c, 1, &model), XD_ERROR_ARGUMENT,
                  "width 16 is not a multiple of 8 for each of 4 heads");
    CHECK(model == NULL);
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
