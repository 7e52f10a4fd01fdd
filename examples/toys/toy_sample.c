/* toy_sample.c - points from noise: along a flow by Euler's method, or by a student's few steps. */
#include "toys.h"

#include <math.h>

enum { TOY_MOST_STEPS = 1000 };

/* Noise of a step that no training reaches. */
static xd_sampler_desc toy_sampler_settings(const xd_network *network, const toy_sampler *sampler,
                                            const double *list) {
    xd_sampler_desc desc = xd_sampler_defaults();
    desc.network = *network;
    desc.schedule = xd_noise_defaults(XD_NOISE_FLOW);
    desc.kind = sampler->few ? XD_SAMPLER_SDE : XD_SAMPLER_EULER;
    desc.steps = sampler->steps;
    desc.list = list;
    desc.samples = TOY_CHUNK;
    desc.elements = TOY_ELEMENTS;
    desc.seed = sampler->seed;
    desc.step = UINT32_MAX;
    return desc;
}

xd_result toy_sample(xd_comm *world, const xd_network *network, const toy_sampler *sampler, float *points) {
    xd_ctx *ctx = xd_comm_ctx(world);
    double list[TOY_MOST_STEPS + 1];
    const xd_sampler_desc desc = toy_sampler_settings(network, sampler, list);
    xd_sampler *from = NULL;
    xd_result result = XD_OK;
    XD_REQUIRE(ctx, sampler->steps <= TOY_MOST_STEPS, XD_ERROR_ARGUMENT, "%d steps, at most %d",
               sampler->steps, (int)TOY_MOST_STEPS);
    XD_TRY(xd_noise_steps(ctx, &desc.schedule, sampler->steps, list));
    XD_TRY(xd_sampler_create(ctx, &desc, &from));
    for (int64_t chunk = xd_comm_rank(world); chunk < TOY_POINTS / TOY_CHUNK && result == XD_OK;
         chunk += xd_comm_size(world)) {
        const xd_dmd_batch batch = { .samples = TOY_CHUNK, .first = chunk * TOY_CHUNK };
        result = xd_sampler_run(from, &batch, points + batch.first * TOY_ELEMENTS);
    }
    xd_sampler_destroy(from);
    return result;
}

/* ---- where students should come to ---- */

/* Data with noise, as a distillation asks its networks about a student's samples. */
typedef struct toy_question {
    float clean[TOY_CHUNK * TOY_ELEMENTS], noise[TOY_CHUNK * TOY_ELEMENTS], noised[TOY_CHUNK * TOY_ELEMENTS];
    double times[TOY_CHUNK];
} toy_question;

static void toy_ask(uint64_t seed, int64_t first, toy_question *q) {
    xd_philox random = { .seed = seed, .stream = TOY_STREAM_LEVEL };
    const xd_time_sampler times = xd_times_defaults(XD_DMD_DATA_FREE);
    for (int i = 0; i < TOY_CHUNK; i++) {
        random.sample = (uint32_t)(first + i);
        xd_philox_fill_normal(&random, 0, TOY_ELEMENTS, q->noise + i * TOY_ELEMENTS);
        const double t = q->times[i] =
            times.min_t + (times.max_t - times.min_t) * xd_philox_uniform_f64(&random, 1);
        for (int j = i * TOY_ELEMENTS; j < (i + 1) * TOY_ELEMENTS; j++)
            q->noised[j] = (float)((1.0 - t) * (double)q->clean[j] + t * (double)q->noise[j]);
    }
}

xd_result toy_find_level(const xd_network *teacher, toy_kind kind, uint64_t seed, toy_level *out) {
    enum { ROUNDS = 8 };
    float fresh[ROUNDS * TOY_CHUNK * TOY_ELEMENTS], flow[TOY_CHUNK * TOY_ELEMENTS];
    toy_question q;
    const xd_network_call call = { .samples = TOY_CHUNK, .hidden = q.noised, .times = q.times, .raw = flow };
    const double numbers = (double)ROUNDS * TOY_CHUNK * TOY_ELEMENTS;
    toy_fresh(kind, seed, ROUNDS * TOY_CHUNK, fresh);
    out->fake_score = out->distance = 0.0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int j = 0; j < TOY_CHUNK * TOY_ELEMENTS; j++)
            q.clean[j] = fresh[round * TOY_CHUNK * TOY_ELEMENTS + j];
        toy_ask(seed, (int64_t)round * TOY_CHUNK, &q);
        XD_TRY(teacher->forward(teacher->user, &call));
        for (int j = 0; j < TOY_CHUNK * TOY_ELEMENTS; j++) {
            const double off = (double)flow[j] - (double)(q.noise[j] - q.clean[j]); /* T is x_t - t flow */
            out->fake_score += off * off / numbers;
            out->distance += q.times[j / TOY_ELEMENTS] * fabs(off) / numbers;
        }
    }
    return XD_OK;
}
