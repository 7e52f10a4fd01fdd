/* toy_sample.c - points from noise: along a flow by Euler's method, or by a student's few steps. */
#include "toys.h"

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
