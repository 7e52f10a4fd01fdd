/* sharded_job.c - a leg whose ranks are processes of this machine, started by xdrun, or by mpirun with -DSHARDED_MPI. */
#define _POSIX_C_SOURCE 200809L /* mkfifo, execvp, setenv */
#include "xdistill.h"
#if defined(SHARDED_MPI)
#    include "xdistill_mpi.h"
#endif

#include "sharded.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SHARDED_WORDS = 64, SHARDED_END_SECONDS = 3 };

/* The writing end goes to the launcher, so the pipe ends when that does. */
xd_result sharded_job_open_news(xd_ctx *ctx, const sharded_job *job, int ends[2]) {
    (void)remove(job->news_path); /* of an older run */
    XD_REQUIRE(ctx, mkfifo(job->news_path, 0600) == 0, XD_ERROR_IO, "%s: no pipe: %s", job->news_path,
               strerror(errno));
    ends[0] = open(job->news_path, O_RDONLY | O_NONBLOCK); /* or it would wait for a writer */
    ends[1] = open(job->news_path, O_WRONLY);
    if (ends[0] >= 0 && ends[1] >= 0 && fcntl(ends[0], F_SETFL, 0) == 0) return XD_OK;
    const int cause = errno;
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) (void)close(ends[i]);
    return XD_FAIL(ctx, XD_ERROR_IO, "%s: %s", job->news_path, strerror(cause));
}

bool sharded_job_recovers(void) {
#if defined(OMPI_HAVE_MPI_EXT_FTMPI)
    return true;
#else
    return false;
#endif
}

int sharded_job_launch(const sharded_job *job) {
    char ranks[16], leg[16], times[16];
    const char *words[SHARDED_WORDS] = { job->xdrun ? job->xdrun : "mpirun", "-n", ranks };
    int count = 3;
    if (job->argument_count > SHARDED_WORDS - 8) {
        fprintf(stderr, "demo-sharded: %d words on the command line; jobs take %d\n", job->argument_count,
                SHARDED_WORDS - 8);
        return 2;
    }
    snprintf(ranks, sizeof ranks, "%d", job->leg->ranks - job->leg->fewer * job->world);
    snprintf(leg, sizeof leg, "%d", job->number);
    if (!job->leg->again && job->leg->loss_count > 0) {
        words[count++] = job->xdrun ? "--keep-going" : "--with-ft";
        if (!job->xdrun) words[count++] = "ulfm";
    }
    if (job->leg->again && job->xdrun) {
        snprintf(times, sizeof times, "%d", job->leg->loss_count);
        words[count++] = "--restart";
        words[count++] = times;
    } else if (job->leg->again) {
        snprintf(times, sizeof times, "%d", job->world);
        (void)setenv("XDRUN_RESTARTS", times, 1);
    }
    for (int i = 0; i < job->argument_count; i++) words[count++] = job->arguments[i];
    words[count++] = "--leg";
    words[count++] = leg;
    (void)execvp(words[0], (char *const *)words);
    fprintf(stderr, "demo-sharded: %s: %s\n", words[0], strerror(errno));
    return 127;
}

/* The world of this process, whoever started it. */
static xd_result sharded_join(xd_ctx *ctx, const sharded_job *job, xd_comm **world) {
#if defined(SHARDED_MPI)
    const xd_mpi_desc mpi = { .mpi = MPI_COMM_WORLD };
    if (!job->xdrun) return xd_comm_mpi(ctx, &mpi, world);
#endif
    (void)job;
    return xd_comm_launched(ctx, world);
}

int sharded_job_live(xd_ctx *ctx, sharded_job *job) {
    xd_comm *world = NULL;
    job->news = open(job->news_path, O_WRONLY);
    xd_result result = sharded_join(ctx, job, &world);
    if (result == XD_OK)
        result = job->news < 0 ? XD_FAIL(ctx, XD_ERROR_IO, "%s: %s", job->news_path, strerror(errno)) : XD_OK;
    if (result == XD_OK)
        result = job->leg->loss_count > 0 ? sharded_survive(world, job) : sharded_run_rank(world, job);
    if (result != XD_OK)
        fprintf(stderr, "demo-sharded: %s: %s\n", job->leg->title, xd_last_error(ctx)->message);
    if (result != XD_OK && world) xd_comm_abort(world); /* peers must not wait */
    xd_comm_destroy(world);
    if (job->news >= 0) (void)close(job->news);
    return result != XD_OK;
}

#if defined(SHARDED_MPI)
static volatile sig_atomic_t sharded_status;

static void sharded_end_now(int number) {
    (void)number;
    _exit(sharded_status);
}
#endif

/* MPI_Finalize of Open MPI 5.0 sometimes waits for those that have died. */
void sharded_job_end(int status, bool may_wait) {
#if defined(SHARDED_MPI)
    sharded_status = status;
    fflush(NULL);
    if (may_wait && signal(SIGALRM, sharded_end_now) != SIG_ERR) (void)alarm(SHARDED_END_SECONDS);
    MPI_Finalize();
    (void)alarm(0);
#else
    (void)status;
    (void)may_wait;
#endif
}
