/* A job of its own for tests in which a process dies: the launcher ends the whole job then, unless it is told not to. So the
 * first process of a test starts another job, with that option and without the variables of the job it is in, and counts the
 * survivors, each of which prints a line of job_survived. The launcher is that of the MPI the test was compiled with, which
 * another MPI's mpirun would start as so many jobs of one process. */
#ifndef MPI_JOB_H
#define MPI_JOB_H

#include "xd_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *job_program; /* argv[0] */

#if defined(MPICH_VERSION)
#    define JOB_LAUNCHER "mpiexec.hydra"
#    define JOB_OPTIONS ""
#    define JOB_NAME "HYDRA"                               /* in the first line of its --version */
#    define JOB_RANK "PMI_RANK"                            /* where it tells a process its rank */
static const char *job_recovery = "-disable-auto-cleanup"; /* what tells it to leave the others alive */
#else
#    define JOB_LAUNCHER "mpirun"
#    define JOB_OPTIONS "--allow-run-as-root --oversubscribe"
#    define JOB_NAME "Open MPI"
#    define JOB_RANK "OMPI_COMM_WORLD_RANK"
static const char *job_recovery = "--enable-recovery";
#endif

static bool job_keeps_others(void) {
    char line[256] = "";
    FILE *pipe = popen(JOB_LAUNCHER " --version 2>/dev/null", "r");
    if (!pipe) return false;
    if (!fgets(line, sizeof line, pipe)) line[0] = 0;
    while (fgetc(pipe) != EOF) continue;
    pclose(pipe);
    return strstr(line, JOB_NAME) != NULL;
}

/* Runs `program inner <argument>` on so many ranks; returns how many survived without a failed check. */
static int job_count_survivors(int ranks, int argument) {
    char command[1024], line[512];
    int count = 0;
    snprintf(command, sizeof command,
             "env -i PATH=\"$PATH\" HOME=\"$HOME\" " JOB_LAUNCHER " " JOB_OPTIONS
             " %s -n %d '%s' inner %d 2>/dev/null </dev/null",
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
    const char *rank = getenv(JOB_RANK);
    job_program = argv[0];
    if (argc > 2 && strcmp(argv[1], "inner") == 0) return inner(&argc, &argv);
    return !rank || strcmp(rank, "0") == 0 ? xd_test_main(argc, argv) : 0;
}

#endif
