/* Files run in processes of their own: whatever one of them does to memory, and if it kills or stops its process, the
 * others still run. On a device a process runs many files, since opening one takes long; after a death the next
 * process goes on behind the file that was the cause. */
#include "runner.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(GOLDEN_CUDA)
enum { WORKER_FILES = 1 << 20 };
#else
enum { WORKER_FILES = 1 };
#endif

enum { WORKER_SECONDS = 300 }; /* for a file, then the worker is killed */

static int worker_pipe = -1; /* in a worker: where its outcomes go */

void golden_worker_tell(const golden_outcome *outcome) {
    fflush(stdout);
    if (write(worker_pipe, outcome, sizeof *outcome) != (ssize_t)sizeof *outcome) _exit(3);
    alarm(WORKER_SECONDS);
}

/* Never returns. */
static void worker_start(golden_worker worker, const xd_ctx_desc *desc, const char *const *paths, int count,
                         const int ends[2]) {
    close(ends[0]);
    worker_pipe = ends[1];
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* what was found before a death is not lost */
    alarm(WORKER_SECONDS);
    worker(desc, paths, count);
    exit(0);
}

/* Reads outcomes until the worker closes its end; returns how many. */
static int worker_listen(int from, golden_outcome *outcomes, int room) {
    size_t held = 0;
    ssize_t more = 1;
    while (more > 0 && held < (size_t)room * sizeof *outcomes) {
        more = read(from, (char *)outcomes + held, (size_t)room * sizeof *outcomes - held);
        if (more > 0) held += (size_t)more;
    }
    return (int)(held / sizeof *outcomes);
}

static void worker_failed(const char *path, int status, golden_outcome *outcome) {
    memset(outcome, 0, sizeof *outcome);
    outcome->verdict = GOLDEN_FAILED;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        printf("FAILED %s: took more than %d seconds\n", path, (int)WORKER_SECONDS);
    else if (WIFSIGNALED(status))
        printf("FAILED %s: its process was killed by signal %d\n", path, WTERMSIG(status));
    else
        printf("FAILED %s: its process ended with status %d\n", path, WEXITSTATUS(status));
}

/* One worker over the next files; returns how many are done, the failed one included, 0 when there is no process. */
static int worker_run(golden_worker worker, const xd_ctx_desc *desc, const char *const *paths, int count,
                      golden_outcome *outcomes) {
    int ends[2], status = 0;
    fflush(stdout);
    fflush(stderr);
    if (pipe(ends) != 0) return 0;
    const pid_t process = fork();
    if (process == 0) worker_start(worker, desc, paths, count, ends);
    close(ends[1]);
    int done = process > 0 ? worker_listen(ends[0], outcomes, count) : 0;
    close(ends[0]);
    if (process < 0 || waitpid(process, &status, 0) != process) return 0;
    if (done > 0 && outcomes[done - 1].verdict == GOLDEN_STOP) return done;
    if (status == 0 && done == count) return done;
    if (done == count) done--; /* it died of what its last file left behind */
    worker_failed(paths[done], status, &outcomes[done]);
    return done + 1;
}

bool golden_workers_run(golden_worker worker, const xd_ctx_desc *desc, const char *const *paths, int count,
                        golden_outcome *outcomes) {
    for (int next = 0; next < count;) {
        const int files = count - next < (int)WORKER_FILES ? count - next : (int)WORKER_FILES;
        const int done = worker_run(worker, desc, paths + next, files, outcomes + next);
        if (done == 0) {
            fprintf(stderr, "golden: no process for %s\n", paths[next]);
            return false;
        }
        next += done;
        if (outcomes[next - 1].verdict == GOLDEN_STOP) return false;
    }
    return true;
}
