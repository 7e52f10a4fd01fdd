/* test_nn_disc.c - the discriminator of examples/nn as a network: gradients, slots, batches, wrappers, first values. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "nn_alone.h"

#include <math.h>

#include "../examples/nn/nn_call.c"
#include "../examples/nn/nn_disc.c"
#include "../examples/nn/nn_disc_head.c"
#include "../examples/nn/nn_disc_pass.c"
#include "../examples/nn/nn_disc_penalty.c"
#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_group_norm.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/nn/nn_patch_attention.c"
#include "../examples/nn/nn_patch_layer.c"
#include "../examples/nn/nn_patch_pieces.c"
#include "../examples/nn/nn_patch_positions.c"
#include "../examples/nn/nn_patch_rows.c"
#include "../examples/nn/nn_small.c"

enum { SAMPLES = 5, HEADS = 3, WEIGHTS = HEADS * NN_HEAD_WEIGHTS, ALL = 301 + 4657 + 529 };

/* Odd and even sides, one group and several. */
static const nn_disc_config tiny = { HEADS, { { 6, 5, 3 }, { 24, 3, 4 }, { 8, 2, 7 } } };

/* ---- help ---- */

static int64_t elements(int head) {
    return (int64_t)tiny.features[head].channels * tiny.features[head].height * tiny.features[head].width;
}

static xd_result alone_start(alone *a, xd_comm *comm, int64_t samples, int slots) {
    nn_disc *passes;
    memset(a, 0, sizeof *a);
    a->ctx = xd_comm_ctx(comm);
    XD_TRY(nn_disc_describe(a->ctx, &tiny, 3, &a->model));
    XD_TRY(alone_wrap(a, comm));
    XD_TRY(nn_disc_create(a->ctx, &tiny, a->model, samples, slots, &passes));
    a->passes = passes;
    a->network = nn_disc_network(passes);
    CHECK(a->network.feature_count == HEADS && a->network.heads == HEADS);
    for (int k = 0; k < HEADS; k++) CHECK_EQ_INT(a->network.feature_elements[k], elements(k));
    return XD_OK;
}

static void alone_end(alone *a) {
    nn_disc_destroy((nn_disc *)a->passes);
    alone_unwrap(a);
}

/* A batch with everything that a call of the network needs. */
typedef struct batch {
    float *features[HEADS], *d_features[HEADS];
    float *logits, *slopes;
    int64_t samples;
    xd_network_call call;
} batch;

static float *floats(int64_t count) {
    return (float *)calloc((size_t)count + 1, sizeof(float));
}

static void batch_make(batch *b, uint64_t seed, int64_t samples) {
    memset(b, 0, sizeof *b);
    b->samples = samples;
    for (int k = 0; k < HEADS; k++) {
        b->features[k] = floats(samples * elements(k));
        b->d_features[k] = floats(samples * elements(k));
        noise(seed + 10 * (uint64_t)k, samples * elements(k), b->features[k]);
    }
    b->logits = floats(samples * HEADS);
    b->slopes = floats(samples * HEADS);
    noise(seed + 1, samples * HEADS, b->slopes);
    b->call.samples = samples;
    b->call.features = b->features;
    b->call.raw = b->logits;
    b->call.raw_gradient = b->slopes;
    b->call.input_gradients = b->d_features;
    b->call.keep = b->call.weights = true;
}

static void batch_free(batch *b) {
    for (int k = 0; k < HEADS; k++) free(b->features[k]), free(b->d_features[k]);
    free(b->logits);
    free(b->slopes);
}

static xd_result forward(const alone *a, const batch *b) {
    return a->network.forward(a->network.user, &b->call);
}

static xd_result backward(const alone *a, const batch *b) {
    return a->network.backward(a->network.user, &b->call);
}

static bool same_batches(const batch *a, const batch *b) {
    bool all = same(a->logits, b->logits, a->samples * HEADS);
    for (int k = 0; k < HEADS; k++)
        all = all && same(a->d_features[k], b->d_features[k], a->samples * elements(k));
    return all;
}

/* ---- the same network in double, loop by loop ---- */

typedef struct reference {
    double *weights[WEIGHTS], *features[HEADS]; /* [samples, elements] */
} reference;

static void reference_start(reference *r, const alone *a, const batch *b) {
    for (int64_t i = 0; i < a->count; i++) {
        r->weights[i] = (double *)calloc((size_t)a->params[i].count, sizeof(double));
        for (int64_t j = 0; j < a->params[i].count; j++)
            r->weights[i][j] = (double)((const float *)a->params[i].value)[j];
    }
    for (int k = 0; k < HEADS; k++) {
        r->features[k] = (double *)calloc((size_t)(b->samples * elements(k)), sizeof(double));
        for (int64_t i = 0; i < b->samples * elements(k); i++) r->features[k][i] = (double)b->features[k][i];
    }
}

static void reference_end(reference *r) {
    for (int i = 0; i < WEIGHTS; i++) free(r->weights[i]);
    for (int k = 0; k < HEADS; k++) free(r->features[k]);
}

/* Channel o at (y, x) of the convolution, from its definition. */
static double convolved(const nn_disc_feature *f, double *const *w, const double *feature, int o, int y,
                        int x) {
    double sum = w[1][o];
    for (int c = 0; c < f->channels; c++)
        for (int i = 0; i < 16; i++) {
            const int row = 2 * y - 1 + i / 4, column = 2 * x - 1 + i % 4;
            if (row < 0 || column < 0 || row >= f->height || column >= f->width) continue;
            sum += w[0][(o * f->channels + c) * 16 + i] * feature[(c * f->height + row) * f->width + column];
        }
    return sum;
}

static double reference_logit(const reference *r, int head, int64_t sample) {
    const nn_disc_feature *f = &tiny.features[head];
    double *const *w = r->weights + head * NN_HEAD_WEIGHTS;
    const double *feature = r->features[head] + sample * elements(head);
    const int inner = f->channels / 2, down = f->height / 2, across = f->width / 2, places = down * across;
    const int in_group = inner <= 7 ? inner : inner / (inner / 4);
    double maps[12][6], logit = w[5][0];
    for (int o = 0; o < inner; o++)
        for (int p = 0; p < places; p++) maps[o][p] = convolved(f, w, feature, o, p / across, p % across);
    for (int group = 0; group < inner; group += in_group) {
        double mean = 0.0, square = 0.0;
        for (int i = 0; i < in_group * places; i++) mean += maps[group + i / places][i % places];
        mean /= in_group * places;
        for (int i = 0; i < in_group * places; i++)
            square += pow(maps[group + i / places][i % places] - mean, 2.0) / (in_group * places);
        for (int i = 0; i < in_group * places; i++) {
            const int o = group + i / places;
            const double n = (maps[o][i % places] - mean) / sqrt(square + 1e-5) * w[2][o] + w[3][o];
            logit += w[4][o] * fmax(n, 0.2 * n) / places;
        }
    }
    return logit;
}

/* Logits of a head times their gradients, of the samples [from, to). */
static double reference_loss(const reference *r, const batch *b, int head, int64_t from, int64_t to) {
    double loss = 0.0;
    for (int64_t s = from; s < to; s++)
        loss += reference_logit(r, head, s) * (double)b->slopes[s * HEADS + head];
    return loss;
}

static double difference(const reference *r, const batch *b, int head, int64_t from, int64_t to,
                         double *place) {
    const double kept = *place, step = 1e-5;
    *place = kept + step;
    const double above = reference_loss(r, b, head, from, to);
    *place = kept - step;
    const double below = reference_loss(r, b, head, from, to);
    *place = kept;
    return (above - below) / (2.0 * step);
}

static xd_result gradients_rank(xd_comm *world, void *argument) {
    alone a;
    batch b;
    reference r;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 1));
    CHECK_EQ_INT(a.count, WEIGHTS);
    batch_make(&b, 5, SAMPLES);
    reference_start(&r, &a, &b);
    XD_TRY(forward(&a, &b));
    XD_TRY(backward(&a, &b));
    XD_TRY(xd_parallel_reduce(a.parallel));
    for (int k = 0; k < HEADS; k++) {
        for (int64_t s = 0; s < SAMPLES; s++) {
            CHECK_NEAR((double)b.logits[s * HEADS + k], reference_logit(&r, k, s), 5e-6);
            for (int64_t i = s * elements(k); i < (s + 1) * elements(k); i++)
                CHECK_NEAR((double)b.d_features[k][i], difference(&r, &b, k, s, s + 1, &r.features[k][i]),
                           5e-6);
        }
        for (int i = k * NN_HEAD_WEIGHTS; i < (k + 1) * NN_HEAD_WEIGHTS; i++)
            for (int64_t j = 0; j < a.params[i].count; j++)
                CHECK_NEAR((double)((const float *)a.params[i].gradient)[j],
                           difference(&r, &b, k, 0, SAMPLES, &r.weights[i][j]), 2e-5);
    }
    reference_end(&r);
    batch_free(&b);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(logits_and_every_gradient_agree_with_the_same_heads_in_double) {
    run_alone(gradients_rank);
}

/* ---- the penalty ---- */

/* The sum over samples of the derivative of a head's logit along the slopes that `along` holds. */
static double reference_derivative(reference *r, const batch *along, int head) {
    const double step = 1e-4;
    const int64_t count = SAMPLES * elements(head);
    double sum = 0.0;
    for (int side = 1; side >= -1; side -= 2) {
        for (int64_t i = 0; i < count; i++)
            r->features[head][i] += side * step * (double)along->features[head][i];
        for (int64_t s = 0; s < SAMPLES; s++) sum += side * reference_logit(r, head, s) / (2.0 * step);
        for (int64_t i = 0; i < count; i++)
            r->features[head][i] -= side * step * (double)along->features[head][i];
    }
    return sum;
}

/* By a weight, as a difference of differences. */
static double second_difference(reference *r, const batch *along, int head, double *place) {
    const double kept = *place, step = 1e-3;
    *place = kept + step;
    const double above = reference_derivative(r, along, head);
    *place = kept - step;
    const double below = reference_derivative(r, along, head);
    *place = kept;
    return (above - below) / (2.0 * step);
}

static xd_result penalty_rank(xd_comm *world, void *argument) {
    alone a;
    batch b, along;
    reference r;
    double most = 0.0;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 1));
    batch_make(&b, 5, SAMPLES);
    batch_make(&along, 60, SAMPLES);
    reference_start(&r, &a, &b);
    XD_TRY(forward(&a, &b));
    b.call.raw_gradient = NULL;
    b.call.input_gradients = NULL;
    b.call.directions = (const float *const *)along.features;
    XD_TRY(a.network.penalty(a.network.user, &b.call));
    XD_TRY(xd_parallel_reduce(a.parallel));
    for (int k = 0; k < HEADS; k++)
        for (int i = k * NN_HEAD_WEIGHTS; i < (k + 1) * NN_HEAD_WEIGHTS; i++)
            for (int64_t j = 0; j < a.params[i].count; j++) {
                const double claimed = (double)((const float *)a.params[i].gradient)[j];
                CHECK_NEAR(claimed, second_difference(&r, &along, k, &r.weights[i][j]), 2e-4);
                most = fmax(most, fabs(claimed));
            }
    CHECK(most > 1.0);
    reference_end(&r);
    batch_free(&b);
    batch_free(&along);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(the_penalty_agrees_with_differences_of_differences) {
    run_alone(penalty_rank);
}

/* Zero-centred: the derivative along the slope itself is its square, which the penalty makes smaller. */
static double squared_slopes(const alone *a, batch *b) {
    double sum = 0.0;
    b->call.weights = false;
    CHECK_EQ_INT(forward(a, b), XD_OK);
    CHECK_EQ_INT(backward(a, b), XD_OK);
    b->call.weights = true;
    for (int k = 0; k < HEADS; k++)
        for (int64_t i = 0; i < SAMPLES * elements(k); i++)
            sum += (double)b->d_features[k][i] * (double)b->d_features[k][i];
    return sum;
}

static xd_result descent_rank(xd_comm *world, void *argument) {
    alone a;
    batch b;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 1));
    batch_make(&b, 5, SAMPLES);
    for (int i = 0; i < SAMPLES * HEADS; i++) b.slopes[i] = 1.0f;
    const double before = squared_slopes(&a, &b);
    b.call.directions = (const float *const *)b.d_features;
    XD_TRY(a.network.penalty(a.network.user, &b.call));
    XD_TRY(xd_parallel_reduce(a.parallel));
    double expected = 0.0;
    for (int64_t i = 0; i < a.count; i++)
        for (int64_t j = 0; j < a.params[i].count; j++) {
            const float g = ((const float *)a.params[i].gradient)[j];
            ((float *)a.params[i].value)[j] -= 1e-4f * g;
            expected += 2e-4 * (double)g * (double)g;
        }
    XD_TRY(xd_parallel_publish(a.parallel));
    const double after = squared_slopes(&a, &b);
    CHECK_NEAR(before - after, expected, 0.05 * expected);
    CHECK(expected > 1e-4 * before);
    batch_free(&b);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(a_step_down_the_penalty_makes_slopes_smaller) {
    run_alone(descent_rank);
}

/* ---- slots, batches, passes of one rank ---- */

static xd_result slots_rank(xd_comm *world, void *argument) {
    static float each[ALL], mixed[ALL];
    batch one[2], other[2];
    alone a;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 2));
    for (int i = 0; i < 2; i++) {
        batch_make(&one[i], 20 + (uint64_t)i, SAMPLES);
        batch_make(&other[i], 20 + (uint64_t)i, SAMPLES);
        other[i].call.slot = i;
        one[i].call.more = other[i].call.more = i == 0;
    }
    for (int i = 0; i < 2; i++) {
        XD_TRY(forward(&a, &one[i]));
        XD_TRY(backward(&a, &one[i]));
    }
    XD_TRY(take_gradients(&a, each));
    for (int i = 0; i < 2; i++) XD_TRY(forward(&a, &other[i]));
    for (int i = 0; i < 2; i++) { /* a gradient by features alone and an inference do not count */
        batch bare = other[i];
        bare.call.weights = false;
        XD_TRY(backward(&a, &bare));
        bare.call.keep = false;
        XD_TRY(forward(&a, &bare));
    }
    for (int i = 0; i < 2; i++) XD_TRY(backward(&a, &other[i]));
    XD_TRY(take_gradients(&a, mixed));
    CHECK(same(each, mixed, ALL));
    CHECK(same_batches(&one[0], &other[0]) && same_batches(&one[1], &other[1]));
    CHECK(!same(one[0].logits, one[1].logits, SAMPLES * HEADS));
    for (int i = 0; i < 2; i++) batch_free(&one[i]), batch_free(&other[i]);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(forwards_that_are_open_at_once_do_not_meet) {
    run_alone(slots_rank);
}

/* 300 samples are more than three chunks of 85, and more than one of 128. */
static xd_result batches_rank(xd_comm *world, void *argument) {
    enum { MANY = 300 };
    static float whole[ALL], roomy[ALL];
    const int64_t cuts[] = { 0, 1, 1, 3, 88, 89, 218, MANY };
    batch b, parts;
    alone a;
    (void)argument;
    batch_make(&b, 7, MANY);
    batch_make(&parts, 7, MANY);
    for (int64_t room = MANY; room <= MANY + 50; room += 50) {
        XD_TRY(alone_start(&a, world, room, 1));
        XD_TRY(forward(&a, &b));
        XD_TRY(backward(&a, &b));
        XD_TRY(take_gradients(&a, room == MANY ? whole : roomy));
        for (int cut = 0; cut < 7; cut++) {
            const int64_t from = cuts[cut];
            batch part = parts;
            for (int k = 0; k < HEADS; k++) {
                part.features[k] += from * elements(k);
                part.d_features[k] += from * elements(k);
            }
            part.call.samples = cuts[cut + 1] - from;
            part.call.features = part.features;
            part.call.input_gradients = part.d_features;
            part.call.raw = parts.logits + from * HEADS;
            part.call.raw_gradient = parts.slopes + from * HEADS;
            part.call.weights = false;
            XD_TRY(forward(&a, &part));
            XD_TRY(backward(&a, &part));
        }
        CHECK(same_batches(&b, &parts));
        alone_end(&a);
    }
    CHECK(same(whole, roomy, ALL));
    batch_free(&b);
    batch_free(&parts);
    return XD_OK;
}

XD_TEST(a_sample_has_the_same_bits_in_every_batch) {
    run_alone(batches_rank);
}

/* ---- several ranks ---- */

enum { IN_LEAF = 3 };

typedef struct training {
    bool fsdp, zero;         /* zero: a leaf without samples on every rank */
    uint64_t seed;           /* of the first values */
    uint64_t first[4], hash; /* of the first values on each rank; of all weights and moments afterwards */
} training;

static xd_result train_leaf(const trainer *t, int64_t k, int step) {
    const xd_network *n = &t->network;
    const int64_t leaf = xd_parallel_micro_batch(t->parallel, k);
    const bool own = k < xd_parallel_micro_batches(t->parallel).own && !(t->zero && leaf == 3);
    batch b;
    batch_make(&b, (uint64_t)(1000 + step * ALONE_LEAVES + leaf), IN_LEAF);
    b.call.samples = own ? IN_LEAF : 0;
    b.call.micro_batch = k;
    xd_result result = n->forward(n->user, &b.call);
    for (int i = 0; i < IN_LEAF * HEADS; i++) b.slopes[i] = 0.1f * b.logits[i] - 0.05f;
    if (result == XD_OK) result = n->backward(n->user, &b.call);
    batch_free(&b);
    return result;
}

static xd_result note_first(const xd_parallel *parallel, uint64_t *hash) {
    xd_param params[ALONE_WEIGHTS];
    int64_t count;
    XD_TRY(xd_parallel_params(parallel, ALONE_WEIGHTS, params, &count));
    for (int64_t i = 0; i < count; i++)
        *hash = xd_hash(*hash, params[i].value, (size_t)params[i].count * sizeof(float));
    return XD_OK;
}

static xd_result training_rank(xd_comm *world, void *argument) {
    training *t = (training *)argument;
    trainer how = { .rate = 0.01, .zero = t->zero, .leaf = train_leaf };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *model;
    nn_disc *passes;
    uint64_t hash = 0;
    XD_TRY(nn_disc_describe(ctx, &tiny, t->seed, &model));
    XD_TRY(wrap_in(world, model, "head", t->fsdp, &how.parallel));
    XD_TRY(nn_disc_create(ctx, &tiny, model, IN_LEAF, 1, &passes));
    how.network = nn_disc_network(passes);
    XD_TRY(note_first(how.parallel, &t->first[xd_comm_rank(world)]));
    XD_TRY(train(world, &how, &hash));
    if (xd_comm_rank(world) == 0) t->hash = hash;
    nn_disc_destroy(passes);
    xd_parallel_destroy(how.parallel);
    xd_model_destroy(model);
    return XD_OK;
}

static training trained(int ranks, bool fsdp, bool zero, uint64_t seed) {
    training t = { .fsdp = fsdp, .zero = zero, .seed = seed };
    xd_error error = { 0 };
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    const xd_result result = xd_run_threads(ranks, &desc, training_rank, &t, &error);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    return t;
}

XD_TEST(training_steps_have_the_same_bits_on_every_layout) {
    for (int zero = 0; zero < 2; zero++) {
        const training one = trained(1, false, zero != 0, 3);
        CHECK(one.hash != 0);
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int fsdp = 0; fsdp < 2; fsdp++) {
                const training t = trained(ranks, fsdp != 0, zero != 0, 3);
                CHECK(t.hash == one.hash);
                if (t.hash != one.hash) printf("%d ranks, %s\n", ranks, fsdp ? "FSDP" : "DDP");
            }
    }
}

XD_TEST(replicas_begin_with_the_same_values_whatever_the_number_of_ranks) {
    const training one = trained(1, false, false, 3), four = trained(4, false, false, 3),
                   other = trained(1, false, false, 4);
    for (int rank = 0; rank < 4; rank++) CHECK(four.first[rank] == one.first[0] && one.first[0] != 0);
    CHECK(other.first[0] != one.first[0]);
}

/* ---- the description, memory, refusals ---- */

XD_TEST(norms_have_the_groups_of_the_references) {
    static const int channels[] = { 1, 3, 7, 8, 12, 16, 32, 34, 48, 96, 1536, 37 };
    static const int groups[] = { 1, 1, 1, 2, 3, 4, 8, 17, 24, 32, 32, 1 };
    for (int i = 0; i < 12; i++) CHECK_EQ_INT(nn_disc_groups(channels[i]), groups[i]);
}

XD_TEST(a_head_has_eight_channels_squared_and_two_channels_and_one_weights) {
    static const int channels[] = { 2, 6, 96, 3072 };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int i = 0; i < 4; i++) {
        const int64_t c = channels[i];
        const nn_disc_config config = { 1, { { channels[i], 4, 4 } } };
        xd_model *model = NULL;
        CHECK_EQ_INT(nn_disc_describe(ctx, &config, 1, &model), XD_OK);
        CHECK_EQ_INT(xd_model_describe(model).parameter_count, 8 * c * c + 2 * c + 1);
        if (c == 3072) CHECK_EQ_INT(xd_model_describe(model).parameter_count, 75503617);
        xd_model_destroy(model);
    }
    xd_ctx_destroy(ctx);
}

/* First values: within 1 / sqrt(inputs) and nearly up to it, of mean 0; norms one and zero. */
XD_TEST(convolutions_begin_uniform_within_the_root_of_their_inputs) {
    const nn_disc_config config = { 1, { { 96, 4, 4 } } };
    const double bound = 1.0 / sqrt(96.0 * 16.0);
    double most = 0.0, sum = 0.0, square = 0.0;
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    xd_model *model = NULL;
    xd_parallel *parallel = NULL;
    xd_param w[NN_HEAD_WEIGHTS];
    int64_t count = 0;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    CHECK_EQ_INT(nn_disc_describe(ctx, &config, 1, &model), XD_OK);
    CHECK_EQ_INT(wrap_over_ddp(model, self, &(xd_ddp_desc){ .micro_batches = 1 }, &parallel), XD_OK);
    CHECK_EQ_INT(xd_parallel_params(parallel, NN_HEAD_WEIGHTS, w, &count), XD_OK);
    CHECK_EQ_INT(count, NN_HEAD_WEIGHTS);
    for (int64_t i = 0; i < w[NN_HEAD_CONV].count; i++) {
        const double x = (double)((const float *)w[NN_HEAD_CONV].value)[i];
        most = fmax(most, fabs(x));
        sum += x / (double)w[NN_HEAD_CONV].count;
        square += x * x / (double)w[NN_HEAD_CONV].count;
    }
    CHECK(most <= bound * (1.0 + 1e-6) && most > 0.999 * bound);
    CHECK_NEAR(sum, 0.0, 0.01 * bound);
    CHECK_NEAR(square, bound * bound / 3.0, 0.01 * bound * bound);
    for (int i = 0; i < 48; i++) {
        CHECK(((const float *)w[NN_HEAD_NORM].value)[i] == 1.0f);
        CHECK(((const float *)w[NN_HEAD_NORM_BIAS].value)[i] == 0.0f);
        CHECK(fabs((double)((const float *)w[NN_HEAD_CONV_BIAS].value)[i]) <= bound * (1.0 + 1e-6));
        CHECK(fabs((double)((const float *)w[NN_HEAD_LAST].value)[i]) <= 1.0 / sqrt(48.0) * (1.0 + 1e-6));
    }
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

static xd_result memory_rank(xd_comm *world, void *argument) {
    alone a;
    batch b;
    XD_TRY(alone_start(&a, world, SAMPLES, 1));
    batch_make(&b, 1, SAMPLES);
    XD_TRY(check_no_allocation(&a, &b.call, (const int *)argument));
    batch_free(&b);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(passes_allocate_nothing) {
    run_counted(memory_rank);
}

static void check_descriptions(xd_ctx *ctx) {
    nn_disc_config c = tiny;
    xd_model *model = NULL;
    c.heads = 17;
    check_refused(ctx, nn_disc_describe(ctx, &c, 1, &model), XD_ERROR_ARGUMENT,
                  "a discriminator of 17 heads; there are 1 to 16");
    c = tiny, c.features[1].channels = 7;
    check_refused(ctx, nn_disc_describe(ctx, &c, 1, &model), XD_ERROR_ARGUMENT,
                  "head 1 reads 7 channels, not an even number up to 4096");
    c = tiny, c.features[1].channels = 18;
    check_refused(ctx, nn_disc_describe(ctx, &c, 1, &model), XD_ERROR_ARGUMENT,
                  "head 1: 9 channels behind the convolution are not a multiple of 2 groups");
    c = tiny, c.features[2].height = 1;
    check_refused(ctx, nn_disc_describe(ctx, &c, 1, &model), XD_ERROR_ARGUMENT,
                  "head 2 reads features of 1 x 7; the sides are 2 to 4096");
    CHECK(model == NULL);
}

static xd_result refusals_rank(xd_comm *world, void *argument) {
    alone a;
    batch b;
    nn_disc_config c = tiny;
    nn_disc *more = NULL;
    (void)argument;
    check_descriptions(xd_comm_ctx(world));
    XD_TRY(alone_start(&a, world, SAMPLES, 2));
    batch_make(&b, 1, SAMPLES);
    c.heads = 4, c.features[3] = c.features[0];
    check_refused(a.ctx, nn_disc_create(a.ctx, &c, a.model, 1, 1, &more), XD_ERROR_ARGUMENT,
                  "the model has no block \"heads.3\" of 4 heads");
    check_refused(a.ctx, nn_disc_create(a.ctx, &tiny, a.model, -1, 1, &more), XD_ERROR_ARGUMENT,
                  "-1 samples of at most 1048576 in 1 slots");
    CHECK(more == NULL);
    b.call.slot = 2;
    check_refused(a.ctx, forward(&a, &b), XD_ERROR_ARGUMENT, "slot 2 of 2");
    b.call.slot = 1;
    check_refused(a.ctx, backward(&a, &b), XD_ERROR_STATE, "backward of 5 samples where slot 1 holds none");
    XD_TRY(forward(&a, &b));
    b.call.samples = 4;
    check_refused(a.ctx, backward(&a, &b), XD_ERROR_STATE, "backward of 4 samples where slot 1 holds 5");
    b.call.samples = 6;
    check_refused(a.ctx, forward(&a, &b), XD_ERROR_ARGUMENT, "6 samples where there is room for 5");
    batch_free(&b);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(calls_that_do_not_fit_are_refused_with_both_numbers) {
    run_alone(refusals_rank);
}

XD_TEST_MAIN()
