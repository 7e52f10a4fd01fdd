/* A model split over four ranks, trained with AdamW and averaged: the average of a shard is the shard of the average.
 *
 *     cc -std=c99 -O2 examples/03_sharded_ema.c -o ema -lm -lpthread
 *
 * Every rank updates and averages its elements without communication; the four gathered shards have the same bits
 * as the same training on one rank. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ELEMENTS = 1001, STEPS = 100 }; /* 1001 does not divide by 4: the last shard is shorter */

/* Pulls element i towards sin(i): the gradient of (value - sin(i))^2 / 2. */
static void compute_gradient(const float *value, float *gradient, xd_interval mine) {
    for (int64_t i = mine.begin; i < mine.end; i++)
        gradient[i - mine.begin] = value[i - mine.begin] - sinf((float)i);
}

/* out: [2][ELEMENTS], rank 0's gathered values and averages. */
static xd_result run_rank(xd_comm *world, void *out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    const xd_interval mine = xd_chunk(ELEMENTS, ranks, rank);
    float value[ELEMENTS] = { 0 }, gradient[ELEMENTS], average[ELEMENTS];
    xd_optimizer *optimizer;
    xd_ema *ema;

    const xd_param param = { "weight", value, gradient, XD_DTYPE_F32, .count = mine.end - mine.begin };
    const xd_param published = { "weight", average, .dtype = XD_DTYPE_F32, .count = param.count };
    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    XD_TRY(xd_ema_create(ctx, &param, 1, &(xd_ema_desc){ .decay = 0.95 }, &ema));

    for (int step = 0; step < STEPS; step++) {
        compute_gradient(value, gradient, mine);
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        XD_TRY(xd_ema_update(ema, XD_EMA_NEXT, NULL));
    }
    XD_TRY(xd_ema_copy_to(ema, &published, 1, false, NULL));

    int64_t counts[4];
    for (int r = 0; r < ranks; r++) counts[r] = xd_chunk(ELEMENTS, ranks, r).end - xd_chunk(ELEMENTS, ranks, r).begin;
    XD_TRY(xd_gather(world, value, out, counts, XD_DTYPE_F32, 0));
    XD_TRY(xd_gather(world, average, (float *)out + ELEMENTS, counts, XD_DTYPE_F32, 0));

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
    printf("target %.6f   trained %.6f   averaged %.6f\n", (double)sinf(8.0f), (double)four[0][8], (double)four[1][8]);
    printf("four ranks and one rank: %s\n", equal ? "the same bits" : "different bits");
    return equal && fabs((double)four[1][8] - (double)sinf(8.0f)) < 0.05 ? 0 : 1;
}
