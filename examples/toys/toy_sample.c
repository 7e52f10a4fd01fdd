/* toy_sample.c - points from noise: along a flow by Euler's method, or by a student's few steps. */
#include "toys.h"

#include <string.h>

enum { TOY_MOST_STEPS = 1000 };

/* New noise for a chunk whose first sample has this number. */
static void toy_noise(const toy_sampler *sampler, int64_t first, int transition, float *out) {
    xd_philox random = { .seed = sampler->seed, .stream = TOY_STREAM_SAMPLE, .step = (uint32_t)transition };
    for (int64_t i = 0; i < TOY_CHUNK; i++) {
        random.sample = (uint32_t)(first + i);
        xd_philox_fill_normal(&random, 0, TOY_ELEMENTS, out + i * TOY_ELEMENTS);
    }
}

/* Points at time `from` become points at time `to`. */
static void toy_advance(const toy_sampler *sampler, double from, double to, const float *flow, float *x,
                        const float *noise) {
    for (int i = 0; i < TOY_CHUNK * TOY_ELEMENTS; i++) {
        const double clean = (double)x[i] - from * (double)flow[i];
        if (sampler->few)
            x[i] = (float)((1.0 - to) * clean + to * (double)noise[i]);
        else
            x[i] = (float)((double)x[i] + (to - from) * (double)flow[i]);
    }
}

static xd_result toy_sample_chunk(const xd_network *network, const toy_sampler *sampler, const double *list,
                                  int64_t first, float *x) {
    float flow[TOY_CHUNK * TOY_ELEMENTS], noise[TOY_CHUNK * TOY_ELEMENTS];
    double times[TOY_CHUNK];
    toy_noise(sampler, first, 0, x);
    for (int i = 0; i < TOY_CHUNK * TOY_ELEMENTS; i++) x[i] = (float)(list[0] * (double)x[i]);
    for (int j = 0; j < sampler->steps; j++) {
        for (int i = 0; i < TOY_CHUNK; i++) times[i] = list[j];
        const xd_network_call call = { .samples = TOY_CHUNK, .hidden = x, .times = times, .raw = flow };
        XD_TRY(network->forward(network->user, &call));
        if (sampler->few) toy_noise(sampler, first, j + 1, noise);
        toy_advance(sampler, list[j], list[j + 1], flow, x, noise);
    }
    return XD_OK;
}

xd_result toy_sample(xd_comm *world, const xd_network *network, const toy_sampler *sampler, float *points) {
    const xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    double list[TOY_MOST_STEPS + 1];
    XD_REQUIRE(xd_comm_ctx(world), sampler->steps <= TOY_MOST_STEPS, XD_ERROR_ARGUMENT,
               "%d steps, at most %d", sampler->steps, (int)TOY_MOST_STEPS);
    XD_TRY(xd_noise_steps(xd_comm_ctx(world), &schedule, sampler->steps, list));
    for (int64_t chunk = xd_comm_rank(world); chunk < TOY_POINTS / TOY_CHUNK; chunk += xd_comm_size(world))
        XD_TRY(toy_sample_chunk(network, sampler, list, chunk * TOY_CHUNK,
                                points + chunk * TOY_CHUNK * TOY_ELEMENTS));
    return XD_OK;
}
