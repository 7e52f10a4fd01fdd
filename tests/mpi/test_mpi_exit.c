/* A process that dies without a word: the others return at their deadline and name it.
 *
 * mpirun ends the whole job when one process dies, unless it is told not to. So the first process starts
 * a job of its own, with that option and without the variables of the job it is in, and counts the
 * survivors. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "xd_test.h"

#include <stdlib.h>
#include <unistd.h>

enum { RANKS = 4, VICTIM = 2, COUNT = 100000 };

static const char *program;

/* ---- the inner job ---- */

static void survive(xd_comm *world) {
    static float data[COUNT];
    xd_ctx *ctx = xd_comm_ctx(world);
    const double begin = xd_now(ctx);
    const xd_result result = xd_all_reduce(world, data, data, COUNT, XD_DTYPE_F32, XD_SUM);
    CHECK(result == XD_ERROR_TIMEOUT || result == XD_ERROR_PEER);
    CHECK(xd_now(ctx) - begin < 20.0);
    CHECK_EQ_INT(xd_last_error(ctx)->culprit, VICTIM);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 2") != NULL);
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

static int run_rank(int *argc, char ***argv) {
    const xd_ctx_desc desc = { .timeout_seconds = 2 };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    MPI_Init(argc, argv);
    if (xd_ctx_create(&desc, &ctx) != XD_OK || xd_comm_mpi(ctx, MPI_COMM_WORLD, &world) != XD_OK) return 1;
    CHECK_EQ_INT(xd_barrier(world), XD_OK); /* the first call has the longer deadline */
    const int rank = xd_comm_rank(world);
    if (rank == VICTIM) _exit(0);
    survive(world);
    printf("survivor %d: %ld failed checks\n", rank, xd_test_failures);
    fflush(stdout);
    _exit(0); /* MPI_Finalize would wait for the dead */
}

/* ---- the outer one ---- */

static bool is_open_mpi(void) {
    char line[256] = "";
    FILE *pipe = popen("mpirun --version 2>/dev/null", "r");
    if (!pipe) return false;
    if (!fgets(line, sizeof line, pipe)) line[0] = 0;
    while (fgetc(pipe) != EOF) continue;
    pclose(pipe);
    return strstr(line, "Open MPI") != NULL;
}

XD_TEST(a_process_that_dies_is_named_by_the_survivors) {
    char command[1024], line[512];
    int survivors = 0;
    if (!is_open_mpi()) SKIP("mpirun is not Open MPI's, which can keep the other processes alive");
    snprintf(command, sizeof command,
             "env -i PATH=\"$PATH\" HOME=\"$HOME\" mpirun --allow-run-as-root --oversubscribe "
             "--enable-recovery -n %d '%s' inner 2>/dev/null </dev/null",
             RANKS, program);
    FILE *pipe = popen(command, "r");
    CHECK(pipe != NULL);
    if (!pipe) return;
    while (fgets(line, sizeof line, pipe)) {
        if (strstr(line, ": 0 failed checks"))
            survivors++;
        else
            printf("%s", line);
    }
    pclose(pipe);
    CHECK_EQ_INT(survivors, RANKS - 1);
}

int main(int argc, char **argv) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    program = argv[0];
    if (argc > 1 && strcmp(argv[1], "inner") == 0) return run_rank(&argc, &argv);
    return !rank || strcmp(rank, "0") == 0 ? xd_test_main(argc, argv) : 0;
}
