/* The main of tests that every process of an MPI job runs together: a test has failed when it failed on one rank.
 * Rank 0 counts and prints; with fewer ranks than `least`, or more than `most`, tests are skipped. */
#ifndef MPI_RUNNER_H
#define MPI_RUNNER_H

#include "xd_test.h"

#include <mpi.h>

/* What a program asks of MPI_Init_thread. */
#if !defined(MPI_RUNNER_THREADS)
#    define MPI_RUNNER_THREADS MPI_THREAD_SINGLE
#endif

static int mpi_run_tests(int argc, char **argv, int least, int most) {
    int rank, size, given, count[3] = { 0, 0, 0 };
    MPI_Init_thread(&argc, &argv, MPI_RUNNER_THREADS, &given);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (const xd_test_case *test = xd_test_first; test; test = test->next) {
        if (argc > 1 && !strstr(test->name, argv[1])) continue;
        int mine = size >= least && size <= most ? xd_test_run_one(test) : 2, worst;
        MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
        if (mine == 2 && rank == 0)
            printf("skipped %s: %d to %d ranks are needed, there are %d\n", test->name, least, most, size);
        count[worst]++;
    }
    fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("%d passed, %d failed, %d skipped\n", count[0], count[1], count[2]);
    MPI_Finalize();
    return count[1] > 0;
}

#endif
