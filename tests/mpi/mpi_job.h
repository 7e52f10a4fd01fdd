/* A job of its own for tests in which a process dies: mpirun ends the whole job then, unless it is told not to. So the first
 * process of a test starts another job, with that option and without the variables of the job it is in, and counts the
 * survivors, each of which prints a line of say_survived. */
#ifndef MPI_JOB_H
#define MPI_JOB_H

#include "xd_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *job_program;                        /* argv[0] */
static const char *job_recovery = "--enable-recovery"; /* what tells mpirun to leave the others alive */

static bool job_is_open_mpi(void) {
    char line[256] = "";
    FILE *pipe = popen("mpirun --version 2>/dev/null", "r");
    if (!pipe) return false;
    if (!fgets(line, sizeof line, pipe)) line[0] = 0;
    while (fgetc(pipe) != EOF) continue;
    pclose(pipe);
    return strstr(line, "Open MPI") != NULL;
}

/* Runs `program inner <argument>` on so many ranks; returns how many survived without a failed check. */
static int job_count_survivors(int ranks, int argument) {
    char command[1024], line[512];
    int count = 0;
    snprintf(command, sizeof command,
             "env -i PATH=\"$PATH\" HOME=\"$HOME\" mpirun --allow-run-as-root --oversubscribe "
             "%s -n %d '%s' inner %d 2>/dev/null </dev/null",
             job_recovery, ranks, job_program, argument);
    FILE *pipe = popen(command, "r");
    if (!pipe) return -1;
    while (fgets(line, sizeof line, pipe)) {
        if (strstr(line, ": 0 failed checks"))
            count++;
        else
            printf("%s", line);
    }
    pclose(pipe);
    return count;
}

/* The end of a process of the inner job: MPI_Finalize would wait for the dead. */
static void job_survived(int rank) {
    printf("survivor %d: %ld failed checks\n", rank, xd_test_failures);
    fflush(stdout);
    _exit(0);
}

/* The inner job in its processes, and the tests in the first process of the outer one. */
static int job_main(int argc, char **argv, int (*inner)(int *argc, char ***argv)) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    job_program = argv[0];
    if (argc > 2 && strcmp(argv[1], "inner") == 0) return inner(&argc, &argv);
    return !rank || strcmp(rank, "0") == 0 ? xd_test_main(argc, argv) : 0;
}

#endif
