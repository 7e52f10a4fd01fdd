/* Ranks that are processes of one machine: each finds out which one it is, they meet, and add up what they have.
 *
 *     cc -std=c99 -O2 examples/21_launch.c -o launch -lm -lpthread
 *     make build/xdrun
 *     build/xdrun -n 4 ./launch                  or mpirun -n 4 ./launch, srun -n 4 ./launch, torchrun; ./launch is one rank
 *
 * What started them tells each of its place in the environment; the library reads that when it is asked to, and brings the
 * processes together over memory that they share. With --leave 2 rank 2 ends in the middle: xdrun names it and ends the
 * others, which else would return an error that names it. Across machines the world comes from xd_comm_mpi or xd_comm_nccl;
 * the rest stays. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1000, STEPS = 5 };

static xd_result join_world(xd_ctx *ctx, xd_comm **world) {
    xd_launch_info place;
    XD_TRY(xd_launch_discover(ctx, &place));
    if (place.world_size == 1) return xd_comm_self(ctx, world);
    XD_REQUIRE(ctx, place.local_world_size == 0 || place.local_world_size == place.world_size, XD_ERROR_UNSUPPORTED,
               "%d of %d ranks are on this machine: several machines take xd_comm_mpi or xd_comm_nccl",
               place.local_world_size, place.world_size);
    XD_REQUIRE(ctx, place.job[0], XD_ERROR_MISSING, "this launcher names no job: set XDISTILL_JOB to a name of this one");
    return xd_comm_node(ctx, &(xd_node_desc){ .name = place.job, .rank = place.rank, .size = place.world_size }, world);
}

/* Element i of rank r is r + i, so that of the sum over all ranks is known. */
static xd_result run_rank(xd_comm *world, int leaves) {
    const int rank = xd_comm_rank(world), size = xd_comm_size(world);
    float mine[COUNT], sum[COUNT];
    int64_t wrong = 0;
    for (int step = 0; step < STEPS; step++) {
        if (rank == leaves && step == STEPS / 2) exit(3); /* without a word to the others */
        for (int i = 0; i < COUNT; i++) mine[i] = (float)(rank + i);
        XD_TRY(xd_all_reduce(world, mine, sum, COUNT, XD_DTYPE_F32, XD_SUM));
        for (int i = 0; i < COUNT; i++) wrong += sum[i] != (float)(size * (size - 1) / 2 + size * i);
    }
    printf("rank %d of %d: %d sums of %d elements, %lld wrong\n", rank, size, STEPS, COUNT, (long long)wrong);
    return wrong ? XD_ERROR_DATA : XD_OK;
}

int main(int argc, char **argv) {
    const int leaves = argc == 3 && strcmp(argv[1], "--leave") == 0 ? atoi(argv[2]) : -1;
    xd_ctx *ctx;
    xd_comm *world = NULL;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    xd_result result = join_world(ctx, &world);
    if (result == XD_OK) result = run_rank(world, leaves);
    if (result != XD_OK) fprintf(stderr, "rank %d: %s\n", xd_last_error(ctx)->rank, xd_last_error(ctx)->message);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    return result != XD_OK;
}
