/* killed.c - a run in a process of its own, which ends as a machine ends one, and another that goes on. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, kill, nanosleep */
#endif

#include "run.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void killed_remove(const char *path) {
    char name[900];
    DIR *d = opendir(path);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        snprintf(name, sizeof name, "%.600s/%.250s", path, e->d_name);
        if (remove(name) != 0) killed_remove(name);
    }
    if (d) closedir(d);
    rmdir(path);
}

/* In the process that is killed. */
static int killed_live(const run_job *job) {
    char message[512];
    if (run_on_threads(job, message)) return 0;
    fprintf(stderr, "the process to be killed: %s\n", message);
    return 1;
}

/* Kills the process a drawn time after it has told of a drawn step: while it computes the next ones, or saves. */
static void killed_wait(int from, pid_t process, uint64_t draw) {
    const struct timespec delay = { 0, (long)(draw / 7 % 12) * 1000000 };
    const int at = 2 + (int)(draw % 6);
    unsigned char made;
    while (read(from, &made, 1) == 1)
        if (made == at) {
            (void)nanosleep(&delay, NULL);
            (void)kill(process, SIGKILL);
        }
}

static bool killed_first(run_job *job, uint64_t draw, char message[512]) {
    int ends[2], status = 0;
    if (pipe(ends) != 0) return snprintf(message, 512, "no pipe"), false;
    fflush(NULL);
    const pid_t process = fork();
    if (process == 0) {
        (void)close(ends[0]);
        job->news = ends[1];
        _exit(killed_live(job));
    }
    (void)close(ends[1]);
    if (process > 0) killed_wait(ends[0], process, draw);
    (void)close(ends[0]);
    if (process > 0 && waitpid(process, &status, 0) == process && WIFSIGNALED(status) &&
        WTERMSIG(status) == SIGKILL)
        return true;
    snprintf(message, 512, "the process was not killed: status %d", status);
    return false;
}

bool run_killed(const run_config *first, const run_config *second, uint64_t draw, run_result *out,
                char message[512]) {
    char root[] = "/tmp/xdistill-equivalence-XXXXXX";
    run_job job;
    memset(&job, 0, sizeof job);
    if (!mkdtemp(root)) return snprintf(message, 512, "no directory"), false;
    job.config = first;
    job.out = out;
    job.root = root;
    job.news = -1;
    bool ok = killed_first(&job, draw, message);
    job.config = second;
    job.resumes = true;
    ok = ok && run_on_threads(&job, message);
    killed_remove(root);
    if (!ok || (out->begun >= 2 && out->begun < RUN_STEPS)) return ok;
    snprintf(message, 512, "goes on from step %d", out->begun);
    return false;
}
