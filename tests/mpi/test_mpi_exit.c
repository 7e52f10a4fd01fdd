/* A process that dies without a word: the others return at their deadline and name it. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "xd_test.h"

enum { VICTIM = 2 };

static xd_comm *world;

XD_TEST(a_process_that_dies_is_named_by_the_survivors) {
    static float data[100000];
    xd_ctx *ctx = xd_comm_ctx(world);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (xd_comm_rank(world) == VICTIM) _exit(0);
    const double begin = xd_now(ctx);
    const xd_result result = xd_all_reduce(world, data, data, 100000, XD_DTYPE_F32, XD_SUM);
    CHECK(result == XD_ERROR_TIMEOUT || result == XD_ERROR_PEER);
    CHECK(xd_now(ctx) - begin < 10.0);
    CHECK_EQ_INT(xd_last_error(ctx)->culprit, VICTIM);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 2") != NULL);
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
}

int main(int argc, char **argv) {
    const xd_ctx_desc desc = { .timeout_seconds = 1 };
    xd_ctx *ctx = NULL;
    MPI_Init(&argc, &argv);
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(xd_comm_mpi(ctx, MPI_COMM_WORLD, &world) == XD_OK);
    const int failed = xd_test_run_one(xd_test_first);
    fprintf(stderr, "rank %d: %d: %s\n", xd_comm_rank(world), failed, xd_last_error(ctx)->message);
    if (xd_comm_rank(world) == 0) printf("%d passed, %d failed, 0 skipped\n", !failed, failed);
    fflush(stdout);
    _exit(failed); /* MPI_Finalize would wait for the dead */
}
