/* This example shows distribution-matching distillation (DMD) at its smallest. A student learns to
 * turn noise into points in one step, from a teacher that takes many steps. The teacher's samples
 * form four Gaussian spots around (+-1, +-1). Its flow is a formula, so it needs no weights.
 *
 *     cc -std=c99 -O2 examples/17_dmd_toy.c -o dmd_toy -lm -lpthread */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { WIDTH = 32, ROW = 6, BATCH = 64, STEPS = 16000, POINTS = 1000 };
static const double SPREAD = 0.25; /* standard deviation of a spot */

typedef struct net {
    xd_model *model; /* y = down tanh(up [x, t, 1]) */
    xd_parallel *parallel;
    xd_optimizer *adam;
    xd_param weight;
} net;

/* Computes the mean of eps - x0 over all x0 and eps that give x at time t, for each coordinate. */
static xd_result teacher(void *user, const xd_network_call *call) {
    (void)user;
    for (int64_t i = 0; i < 2 * call->samples; i++) {
        const double t = call->times[i / 2], x = ((const float *)call->hidden)[i];
        const double narrow = (1 - t) * SPREAD * SPREAD;
        const double v = (1 - t) * narrow + t * t;
        const double centre = tanh((1 - t) * x / v);
        ((float *)call->raw)[i] = (float)((t - narrow) / v * (x - (1 - t) * centre) - centre);
    }
    return XD_OK;
}

/* Runs a forward or a backward pass. The backward pass computes the hidden layer again. A row of
 * the weight has 4 elements of `up`, then 2 elements of `down`. */
static xd_result pass(void *user, const xd_network_call *call) {
    xd_block *const block = xd_model_root(((net *)user)->model);
    const float *x = call->hidden, *g = call->raw_gradient;
    const xd_pass_kind forward = call->keep ? XD_PASS_FORWARD : XD_PASS_INFERENCE;
    const xd_pass how = { g ? XD_PASS_BACKWARD : forward, call->micro_batch, call->more };
    xd_block_view view;
    XD_TRY(xd_block_begin(block, how, &view));

    for (int64_t b = 0; b < call->samples; b++) {
        const float in[4] = { x[2 * b], x[2 * b + 1], (float)call->times[b], 1 };
        for (int j = 0; j < WIDTH; j++) {
            const float *w = (const float *)view.values[0] + j * ROW;
            const float h = tanhf(w[0] * in[0] + w[1] * in[1] + w[2] * in[2] + w[3]);
            if (g) {
                float *d = (float *)view.gradients[0] + j * ROW;
                for (int i = 0; i < 2; i++) d[4 + i] += g[2 * b + i] * h;
                const float d_h = (g[2 * b] * w[4] + g[2 * b + 1] * w[5]) * (1 - h * h);
                for (int i = 0; i < 4; i++) d[i] += d_h * in[i];
            } else {
                float *y = (float *)call->raw + 2 * b;
                for (int i = 0; i < 2; i++) y[i] = (j > 0 ? y[i] : 0) + w[4 + i] * h;
            }
        }
    }
    return xd_block_end(block);
}

static xd_result make_net(xd_comm *world, double rate, net *n, xd_dmd_desc *d, xd_dmd_role role) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_weight_desc w = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2,
                               .shape = { WIDTH, ROW }, .init = { XD_INIT_NORMAL, .scale = 0.7f } };
    int64_t one;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = (uint64_t)role }, &n->model));
    XD_TRY(xd_weight_add(xd_model_root(n->model), &w, NULL));
    XD_TRY(xd_model_seal(n->model));
    XD_TRY(xd_ddp_create(n->model, &(xd_ddp_desc){ .data = world }, &n->parallel));
    XD_TRY(xd_parallel_params(n->parallel, 1, &n->weight, &one));

    xd_optimizer_desc adam = xd_adam_defaults(&n->weight, one);
    adam.learning_rate = rate;
    adam.beta1 = 0;
    adam.beta2 = 0.99;
    XD_TRY(xd_optimizer_create(ctx, &adam, &n->adam));
    d->networks[role] = (xd_network){ .user = n, .predicts = XD_PREDICT_FLOW,
                                      .forward = pass, .backward = pass };
    d->trainers[role] = (xd_dmd_trainer){ .parallel = n->parallel, .optimizer = n->adam };
    return XD_OK;
}

/* The library draws noise and times, because the batch has none. */
static xd_result batch(void *user, int64_t micro_batch, xd_dmd_batch *out) {
    (void)user;
    out->samples = BATCH;
    out->first = micro_batch * BATCH;
    return XD_OK;
}

static xd_result distill(xd_comm *world, net nets[2], xd_dmd_desc *d, xd_dmd **dmd) {
    static const double rungs[] = { 0.999, 0 };
    xd_dmd_values values;
    for (int k = 0; k < 2; k++) XD_TRY(make_net(world, k ? 8e-3 : 3e-3, &nets[k], d, k));
    d->networks[XD_DMD_TEACHER] = (xd_network){ .predicts = XD_PREDICT_FLOW, .forward = teacher };
    d->student_times.kind = XD_TIME_UNIFORM;
    d->fake_times.kind = XD_TIME_UNIFORM;
    d->fake_loss.space = XD_PREDICT_FLOW;
    d->rungs.list = rungs;
    d->own_samples = true;
    d->sizes.samples = BATCH;
    d->sizes.step_samples = BATCH;
    d->sizes.elements = 2;
    XD_TRY(xd_dmd_create(xd_comm_ctx(world), d, dmd));
    for (int step = 0; step < STEPS; step++) XD_TRY(xd_dmd_step(*dmd, batch, NULL, &values));
    return XD_OK;
}

static xd_result run(xd_comm *world, void *argument) {
    xd_dmd_desc desc = xd_dmd_defaults(XD_DMD_MODELOPT); /* the fake score takes 4 steps of 5 */
    net nets[2];                                         /* student and fake score */
    xd_dmd *dmd;
    xd_sampler *sampler;
    float x[2 * POINTS];
    double away = 0;
    int spots[4] = { 0 };
    (void)argument;
    XD_TRY(distill(world, nets, &desc, &dmd));

    xd_sampler_desc settings = xd_sampler_of_student(&desc);
    settings.samples = POINTS;
    settings.seed = 2;
    XD_TRY(xd_sampler_create(xd_comm_ctx(world), &settings, &sampler));
    XD_TRY(xd_sampler_run(sampler, &(xd_dmd_batch){ .samples = POINTS }, x));
    for (const float *p = x; p < x + 2 * POINTS; p += 2) {
        spots[2 * (p[0] > 0) + (p[1] > 0)]++;
        away += hypot(fabs(p[0]) - 1, fabs(p[1]) - 1) / POINTS;
    }
    printf("points at the four spots: %d, %d, %d, %d; mean distance %.3f, of noise 0.82\n",
           spots[0], spots[1], spots[2], spots[3], away);

    xd_sampler_destroy(sampler);
    xd_dmd_destroy(dmd);
    for (int k = 0; k < 2; k++) {
        xd_optimizer_destroy(nets[k].adam);
        xd_parallel_destroy(nets[k].parallel);
        xd_model_destroy(nets[k].model);
    }
    if (away < 0.5) return XD_OK;
    return XD_FAIL(xd_comm_ctx(world), XD_ERROR_DATA, "%.3f away: it has not learned", away);
}

int main(void) {
    xd_error error = { 0 };
    if (xd_run_threads(1, NULL, run, NULL, &error) == XD_OK) return 0;
    fprintf(stderr, "%s\n", error.message);
    return 1;
}
