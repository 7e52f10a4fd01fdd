/* sharded_process.c - a leg is a process, so that it can be killed as a machine kills one: at any point, without a word. */
#define _POSIX_C_SOURCE 200112L /* fork, pipe, kill */
#include "sharded.h"

#include "../common/progress.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* In the process of the leg: its ranks are threads. Returns its exit status. */
static int sharded_live(sharded_job *job) {
    xd_error error;
    xd_ctx_desc desc;
    memset(&error, 0, sizeof error);
    memset(&desc, 0, sizeof desc);
    desc.reduction = job->demo.reduction;
    desc.allocator = sharded_counting_allocator();
    if (xd_run_threads(job->leg->ranks, &desc, sharded_run_rank, job, &error) == XD_OK) return 0;
    fprintf(stderr, "demo-sharded: %s: rank %d: %s\n", job->leg->title, error.rank, error.message);
    return 1;
}

static void sharded_show(progress *line, const sharded_job *job, const sharded_news *news) {
    char step[96], rate[48];
    const char *parts[2];
    snprintf(step, sizeof step, "%s: step %d/%d", job->leg->title, news->step, job->demo.steps);
    snprintf(rate, sizeof rate, "%.2f s a step", news->seconds / (news->steps > 0 ? news->steps : 1));
    parts[0] = step;
    parts[1] = rate;
    progress_show(line, news->seconds, parts, 2, news->step == job->demo.steps);
}

/* One whole piece of news; false at the end. A signal may come between two bytes. */
static bool sharded_hear(int from, sharded_news *news) {
    size_t got = 0;
    while (got < sizeof *news) {
        const ssize_t n = read(from, (char *)news + got, sizeof *news - got);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        got += (size_t)n;
    }
    return news->rank >= 0 && news->rank < SHARDED_MOST_RANKS;
}

/* Ranks of one process have one number, which is killed more than once then. */
static void sharded_kill(const sharded_leg *leg, sharded_outcome *out) {
    for (int i = 0; i < SHARDED_MOST_RANKS; i++)
        if (out->ranks[i].process > 0 && (leg->victim < 0 || leg->victim == i))
            (void)kill((pid_t)out->ranks[i].process, SIGKILL);
    out->killed = true;
}

/* The last of each rank. One that has measured only what it trained before keeps the numbers of its steps. */
static void sharded_note(sharded_outcome *out, const sharded_news *news) {
    sharded_news *last = &out->ranks[news->rank];
    if (news->steps > 0 || last->steps == 0 || news->world > last->world)
        *last = *news;
    else
        last->bits_per_byte = news->bits_per_byte;
}

/* Until all have ended; they, or one of them, are killed when rank 0 tells of the step. */
static void sharded_listen(const sharded_job *job, int from, sharded_outcome *out) {
    progress line = progress_begin();
    sharded_news news;
    while (sharded_hear(from, &news)) {
        sharded_note(out, &news);
        if (job->leg->loss_count > 0) sharded_watch(job->leg, &news, out);
        if (news.rank != 0) continue;
        if (news.bits_per_byte <= 0.0) sharded_show(&line, job, &news);
        if (job->leg->kill_at > 0 && news.step == job->leg->kill_at) sharded_kill(job->leg, out);
    }
}

/* A launcher tells by its status that ranks were killed. */
static xd_result sharded_judge(xd_ctx *ctx, const sharded_leg *leg, int status, const sharded_outcome *out) {
    const bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (leg->kill_at > 0 ? out->killed && !well : well) return XD_OK;
    if (WIFSIGNALED(status))
        return XD_FAIL(ctx, XD_ERROR_STATE, "%s: its process was ended by signal %d", leg->title,
                       WTERMSIG(status));
    return XD_FAIL(ctx, XD_ERROR_STATE, "%s: its process ended with status %d%s", leg->title,
                   WEXITSTATUS(status), leg->kill_at > 0 ? " before it was killed" : "");
}

static xd_result sharded_open_news(xd_ctx *ctx, const sharded_job *job, int ends[2]) {
    if (job->arguments) return sharded_job_open_news(ctx, job, ends);
    XD_REQUIRE(ctx, pipe(ends) == 0, XD_ERROR_IO, "no pipe: %s", strerror(errno));
    return XD_OK;
}

static xd_result sharded_run_once(xd_ctx *ctx, sharded_job *job, sharded_outcome *out, int *status) {
    int ends[2];
    XD_TRY(sharded_open_news(ctx, job, ends));
    fflush(NULL); /* or the child would write it again */
    const pid_t process = fork();
    if (process == 0) {
        (void)close(ends[0]);
        job->news = ends[1];
        const int code = job->arguments ? sharded_job_launch(job) : sharded_live(job);
        fflush(NULL);
        _exit(code);
    }
    (void)close(ends[1]);
    if (process > 0) sharded_listen(job, ends[0], out);
    (void)close(ends[0]);
    XD_REQUIRE(ctx, process > 0, XD_ERROR_MEMORY, "no process: %s", strerror(errno));
    while (waitpid(process, status, 0) < 0)
        XD_REQUIRE(ctx, errno == EINTR, XD_ERROR_IO, "lost process %ld: %s", (long)process, strerror(errno));
    return XD_OK;
}

/* xdrun starts a job again itself; one of MPI dies as a whole, mpirun with it. */
xd_result sharded_run_leg(xd_ctx *ctx, sharded_job *job, sharded_outcome *out) {
    const bool starts = job->arguments && !job->xdrun && job->leg->again;
    int status = 0;
    memset(out, 0, sizeof *out);
    do {
        job->world = out->lost;
        XD_TRY(sharded_run_once(ctx, job, out, &status));
    } while (starts && status != 0 && out->lost > job->world);
    job->world = 0;
    return sharded_judge(ctx, job->leg, status, out);
}
