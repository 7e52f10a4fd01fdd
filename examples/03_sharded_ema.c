/* AdamW and an EMA of a model that is sharded over four ranks.
 *
 * Every rank updates and averages its own elements without communication.
 * The four gathered shards have the same bits as the same training on one rank.
 *
 *     cc -std=c99 -O2 examples/03_sharded_ema.c -o ema -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* 4 does not divide 1001, so the last shard is shorter. */
enum { ELEMENTS = 1001, STEPS = 100 };

/* The gradient of (value - sin(i))^2 / 2, which moves element i towards sin(i). */
static void compute_gradient(const float *value, float *gradient, xd_interval mine) {
    for (int64_t i = mine.begin; i < mine.end; i++)
        gradient[i - mine.begin] = value[i - mine.begin] - sinf((float)i);
}

static xd_result train(float *value, float *gradient, xd_interval mine, xd_optimizer *optimizer,
                       xd_ema *ema) {
    for (int step = 0; step < STEPS; step++) {
        compute_gradient(value, gradient, mine);
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        XD_TRY(xd_ema_update(ema, XD_EMA_NEXT, NULL));
    }
    return XD_OK;
}

/* Gathers the values and the averages into `out` of rank 0, which has the shape [2][ELEMENTS]. */
static xd_result gather(xd_comm *world, const float *value, const float *average, float *out) {
    const int ranks = xd_comm_size(world);
    int64_t counts[4];
    for (int r = 0; r < ranks; r++) {
        const xd_interval shard = xd_chunk(ELEMENTS, ranks, r);
        counts[r] = shard.end - shard.begin;
    }
    XD_TRY(xd_gather(world, value, out, counts, XD_DTYPE_F32, 0));
    return xd_gather(world, average, out + ELEMENTS, counts, XD_DTYPE_F32, 0);
}

static xd_result run_rank(xd_comm *world, void *out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_interval mine = xd_chunk(ELEMENTS, xd_comm_size(world), xd_comm_rank(world));
    float value[ELEMENTS] = { 0 };
    float gradient[ELEMENTS];
    float average[ELEMENTS];
    xd_optimizer *optimizer;
    xd_ema *ema;

    const xd_param param = {
        .name = "weight",
        .value = value,
        .gradient = gradient,
        .dtype = XD_DTYPE_F32,
        .count = mine.end - mine.begin,
    };
    const xd_param published = {
        .name = "weight",
        .value = average,
        .dtype = XD_DTYPE_F32,
        .count = param.count,
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    const xd_ema_desc slow = { .params = &param, .param_count = 1, .decay = 0.95 };
    XD_TRY(xd_ema_create(ctx, &slow, &ema));

    XD_TRY(train(value, gradient, mine, optimizer, ema));
    XD_TRY(xd_ema_copy_to(ema, &published, 1, false, NULL));
    XD_TRY(gather(world, value, average, out));

    xd_ema_destroy(ema);
    xd_optimizer_destroy(optimizer);
    return XD_OK;
}

int main(void) {
    static float one[2][ELEMENTS], four[2][ELEMENTS];
    xd_error error;
    if (xd_run_threads(1, NULL, run_rank, one, &error) != XD_OK ||
        xd_run_threads(4, NULL, run_rank, four, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }

    const bool equal = memcmp(one, four, sizeof one) == 0;
    const double target = (double)sinf(8.0f);
    const double trained = (double)four[0][8];
    const double averaged = (double)four[1][8];
    printf("target %.6f   trained %.6f   averaged %.6f\n", target, trained, averaged);
    printf("four ranks and one rank: %s\n", equal ? "the same bits" : "different bits");
    return equal && fabs(averaged - target) < 0.05 ? 0 : 1;
}
