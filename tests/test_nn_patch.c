/* test_nn_patch.c - the patch transformer of examples/nn as a network: gradients, slots, batches, wrappers. */
#include "xdistill.h"

#include "xd_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/nn/nn_patch.c"
#include "../examples/nn/nn_patch_layer.c"
#include "../examples/nn/nn_patch_pass.c"
#include "../examples/nn/nn_patch_rows.c"
#include "../examples/nn/nn_small.c"

enum { SIDE = 8, PIXELS = SIDE * SIDE, SAMPLES = 5, LABELS = 3 };

static const nn_patch_config tiny = { SIDE, 2, 16, 2, 2, 24, 8, LABELS };

/* ---- help ---- */

/* Repeatable numbers of mean 0 and variance 1. */
static void noise(uint64_t stream, int64_t count, float *out) {
    const xd_philox random = { .seed = stream, .stream = XD_STREAM_USER };
    xd_philox_fill_normal(&random, 0, count, out);
}

/* One rank's model under DDP, of one leaf, its weights away from their first values: gates and output are not zero. */
typedef struct alone {
    xd_ctx *ctx;
    xd_model *model;
    xd_parallel *parallel;
    xd_param params[64];
    int64_t count;
    nn_patch *passes;
    xd_network network;
} alone;

static xd_result alone_start(alone *a, xd_comm *comm, int64_t samples, int slots) {
    float more[4096];
    memset(a, 0, sizeof *a);
    a->ctx = xd_comm_ctx(comm);
    XD_TRY(nn_patch_describe(a->ctx, &tiny, 3, &a->model));
    XD_TRY(xd_ddp_create(a->model, comm, &(xd_ddp_desc){ .leaves = 1 }, &a->parallel));
    XD_TRY(xd_parallel_params(a->parallel, 64, a->params, &a->count));
    for (int64_t i = 0; i < a->count; i++) {
        float *w = (float *)a->params[i].value;
        noise(100 + (uint64_t)i, a->params[i].count, more);
        for (int64_t j = 0; j < a->params[i].count; j++) w[j] += 0.2f * more[j];
    }
    XD_TRY(xd_parallel_publish(a->parallel));
    XD_TRY(nn_patch_create(a->ctx, &tiny, a->model, samples, slots, &a->passes));
    a->network = nn_patch_network(a->passes);
    return XD_OK;
}

static void alone_end(alone *a) {
    nn_patch_destroy(a->passes);
    xd_parallel_destroy(a->parallel);
    xd_model_destroy(a->model);
}

/* A batch with everything that a call of the network needs. */
typedef struct batch {
    float x[SAMPLES * PIXELS], raw[SAMPLES * PIXELS], d_raw[SAMPLES * PIXELS], d_x[SAMPLES * PIXELS];
    double times[SAMPLES];
    int32_t labels[SAMPLES];
    xd_network_call call;
} batch;

static void batch_make(batch *b, uint64_t seed) {
    noise(seed, SAMPLES * PIXELS, b->x);
    noise(seed + 1, SAMPLES * PIXELS, b->d_raw);
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
    b->call.hidden_gradient = b->d_x;
    b->call.keep = b->call.weights = true;
}

/* ---- gradients against differences ---- */

static double moved_loss(alone *a, batch *b, float *place, const float *direction, int64_t count,
                         double step) {
    float kept[4096];
    double loss = 0.0;
    memcpy(kept, place, (size_t)count * sizeof *kept);
    for (int64_t i = 0; i < count; i++) place[i] += (float)(step * (double)direction[i]);
    b->call.keep = false;
    const xd_result result = a->network.forward(a->network.user, &b->call);
    CHECK_EQ_INT(result, XD_OK);
    for (int i = 0; i < SAMPLES * PIXELS; i++) loss += (double)b->raw[i] * (double)b->d_raw[i];
    memcpy(place, kept, (size_t)count * sizeof *kept);
    return loss;
}

static void check_place(alone *a, batch *b, float *place, const float *gradient, int64_t count) {
    float direction[4096];
    double claimed = 0.0, seen, h = 4e-3, length = 0.0;
    noise(77, count, direction);
    for (int64_t i = 0; i < count; i++) {
        claimed += (double)gradient[i] * (double)direction[i];
        length += (double)gradient[i] * (double)gradient[i];
    }
    seen = (8.0 * (moved_loss(a, b, place, direction, count, h) -
                   moved_loss(a, b, place, direction, count, -h)) -
            moved_loss(a, b, place, direction, count, 2 * h) +
            moved_loss(a, b, place, direction, count, -2 * h)) /
           (12.0 * h);
    CHECK_NEAR(claimed, seen, 2e-3 * (1.0 + sqrt(length)));
}

static xd_result gradients_rank(xd_comm *world, void *argument) {
    alone a;
    static batch b;
    (void)argument;
    XD_TRY(alone_start(&a, world, SAMPLES, 2));
    batch_make(&b, 5);
    XD_TRY(a.network.forward(a.network.user, &b.call));
    XD_TRY(a.network.backward(a.network.user, &b.call));
    XD_TRY(xd_parallel_reduce(a.parallel));
    for (int64_t i = 0; i < a.count; i++)
        check_place(&a, &b, (float *)a.params[i].value, (const float *)a.params[i].gradient,
                    a.params[i].count);
    check_place(&a, &b, b.x, b.d_x, SAMPLES * PIXELS);
    alone_end(&a);
    return XD_OK;
}

XD_TEST(gradients_of_every_weight_and_of_the_input_agree_with_differences) {
    xd_error error = { 0 };
    CHECK_EQ_INT(xd_run_threads(1, NULL, gradients_rank, NULL, &error), XD_OK);
    if (error.result) printf("%s\n", error.message);
}

XD_TEST_MAIN()
