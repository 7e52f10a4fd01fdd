/* This example runs ranks as processes of one machine. Each process reads its rank from the
 * environment, joins the others over shared memory, and takes part in all-reduces. With --leave 2,
 * rank 2 exits early. xdrun then names rank 2 and ends the others. Without xdrun, the others get an
 * error that names rank 2. Across machines, only the call that creates the world differs: use
 * xd_comm_mpi or xd_comm_nccl.
 *
 *     cc -std=c99 -O2 examples/21_launch.c -o launch -lm -lpthread
 *     make build/xdrun
 *     build/xdrun -n 4 ./launch
 *
 * The launchers `mpirun -n 4 ./launch`, `srun -n 4 ./launch` and torchrun also work. `./launch`
 * alone is one rank. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1000, STEPS = 5 };

/* Element i of rank r is r + i, so a formula gives each element of the sum over all ranks. */
static xd_result run_rank(xd_comm *world, int leaves) {
    const int rank = xd_comm_rank(world);
    const int size = xd_comm_size(world);
    float mine[COUNT], sum[COUNT];
    int64_t wrong = 0;

    for (int step = 0; step < STEPS; step++) {
        /* As in a crash, this rank does not inform the others. */
        if (rank == leaves && step == STEPS / 2)
            exit(3);

        for (int i = 0; i < COUNT; i++)
            mine[i] = (float)(rank + i);
        XD_TRY(xd_all_reduce(world, mine, sum, COUNT, XD_DTYPE_F32, XD_SUM));
        for (int i = 0; i < COUNT; i++)
            wrong += sum[i] != (float)(size * (size - 1) / 2 + size * i);
    }

    printf("rank %d of %d: %d sums of %d elements, %lld wrong\n", rank, size, STEPS, COUNT,
           (long long)wrong);
    return wrong ? XD_ERROR_DATA : XD_OK;
}

int main(int argc, char **argv) {
    const int leaves = argc == 3 && strcmp(argv[1], "--leave") == 0 ? atoi(argv[2]) : -1;
    xd_ctx *ctx;
    xd_comm *world = NULL;
    if (xd_ctx_create(NULL, &ctx) != XD_OK)
        return 1;

    xd_result result = xd_comm_launched(ctx, &world);
    if (result == XD_OK)
        result = run_rank(world, leaves);
    if (result != XD_OK) {
        const xd_error *error = xd_last_error(ctx);
        fprintf(stderr, "rank %d: %s\n", error->rank, error->message);
    }

    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    return result != XD_OK;
}
