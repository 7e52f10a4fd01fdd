/* sharded_mpi.c - a leg whose ranks are the processes of an MPI job, on this machine. Without -DSHARDED_MPI there are none. */
#define _POSIX_C_SOURCE 200809L /* mkfifo, execvp */
#include "xdistill.h"
#if defined(SHARDED_MPI)
#    include "xdistill_mpi.h"
#endif

#include "sharded.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SHARDED_WORDS = 64 };

/* The writing end goes to the launcher, so the pipe ends when that does. */
xd_result sharded_mpi_open_news(xd_ctx *ctx, const sharded_job *job, int ends[2]) {
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

int sharded_mpi_launch(const sharded_job *job) {
    char ranks[16], leg[16];
    const char *words[SHARDED_WORDS] = { "mpirun", "-n", ranks };
    int count = 3;
    if (job->argument_count > SHARDED_WORDS - 6) {
        fprintf(stderr, "demo-sharded: %d words on the command line; --mpi takes %d\n", job->argument_count,
                SHARDED_WORDS - 6);
        return 2;
    }
    snprintf(ranks, sizeof ranks, "%d", job->leg->ranks);
    snprintf(leg, sizeof leg, "%d", job->number);
    for (int i = 0; i < job->argument_count; i++) words[count++] = job->arguments[i];
    words[count++] = "--leg";
    words[count++] = leg;
    (void)execvp(words[0], (char *const *)words);
    fprintf(stderr, "demo-sharded: %s: %s\n", words[0], strerror(errno));
    return 127;
}

#if defined(SHARDED_MPI)

int sharded_mpi_live(xd_ctx *ctx, sharded_job *job) {
    const xd_mpi_desc desc = { .mpi = MPI_COMM_WORLD };
    xd_comm *world = NULL;
    job->news = open(job->news_path, O_WRONLY);
    xd_result result = xd_comm_mpi(ctx, &desc, &world);
    if (result == XD_OK)
        result = job->news < 0 ? XD_FAIL(ctx, XD_ERROR_IO, "%s: %s", job->news_path, strerror(errno)) : XD_OK;
    if (result == XD_OK) result = sharded_run_rank(world, job);
    if (result != XD_OK)
        fprintf(stderr, "demo-sharded: %s: %s\n", job->leg->title, xd_last_error(ctx)->message);
    if (result != XD_OK && world) xd_comm_abort(world); /* peers must not wait */
    xd_comm_destroy(world);
    if (job->news >= 0) (void)close(job->news);
    return result != XD_OK;
}

#else

int sharded_mpi_live(xd_ctx *ctx, sharded_job *job) {
    (void)ctx;
    (void)job;
    return 2; /* sharded_parse has refused it */
}

#endif
