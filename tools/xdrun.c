/* xdrun.c - starts the ranks of a job as processes of this machine, and ends them together.
 *
 *   cc -std=c99 -O2 tools/xdrun.c -o build/xdrun
 *   build/xdrun -n 4 build/train --steps 100
 *   build/xdrun --help          all options
 *
 * Each rank finds in its environment what xd_launch_discover reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
 * (127.0.0.1), MASTER_PORT (a free one) and XDISTILL_JOB, a name drawn at random; besides XDRUN_RESTARTS, how often the job was
 * started before. It reads nothing (/dev/null), and what it writes
 * comes out line by line behind its number, "[2] step 7", never two lines in one: xdrun alone writes. Lines of more than
 * a megabyte are cut.
 *
 * The first rank that ends with another status than 0, or by a signal, is named and ends the job: the others get SIGTERM, and
 * SIGKILL some seconds later. The status of xdrun is that rank's, or 128 and its signal. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and
 * SIGUSR2 are passed on to all ranks. The first four end the job: who has not ended when the grace is over, deaf or stopped, is
 * killed, and so are all when a second one comes.
 *
 * With --keep-going a rank that a signal has ended is named, and the others go on (xd_comm_shrink): the status is 0 when all of these
 * end with 0, and there is one.
 *
 * With --restart N a job that has failed is started again, at most N times, with another name and port: for programs that go on from
 * what they have saved. One that a signal to xdrun has ended is not, nor one whose program cannot be run. The status is that of the
 * last time.
 *
 * A rank is a process group: what it has started ends with it, unless that has left the group. When xdrun is killed, another
 * process that it keeps for this kills the groups; where the system offers it, ranks are killed without that too. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* sched_setaffinity; the rest is POSIX */
#endif
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#    include <sched.h>
#    include <sys/prctl.h>
#endif

enum {
    MOST_RANKS = 1024,
    FIRST_LINE = 1024,
    LONGEST_LINE = 1 << 20,
    PIECE = 1 << 16,
    MOST_PIECES = 64,
    WARN_SECONDS = 10
};
enum {
    STATUS_FAILED = 1,
    STATUS_USAGE = 2,
    STATUS_NOT_RUN = 126,
    STATUS_NOT_FOUND = 127,
    STATUS_SIGNAL = 128
};

/* ---- the command line ---- */

typedef struct options {
    int ranks;
    bool bind, keep_going, help;
    int restarts; /* at most */
    double grace; /* seconds from a signal that ends the job to SIGKILL */
    double early; /* seconds that ranks may go on when one has ended with 0; 0 -> for ever */
    char **program;
} options;

static void print_help(void) {
    printf("xdrun: starts the ranks of a job on this machine, and ends them together.\n\n"
           "  build/xdrun -n N [options] [--] program arguments...\n\n"
           "  -n N             ranks, 1 to %d\n"
           "  --bind           each rank gets its own share of the cores, or one of them\n"
           "                   when there are fewer than ranks\n"
           "  --keep-going     a rank that a signal ends does not end the others\n"
           "  --restart N      a job that has failed is started again, at most so many\n"
           "                   times (0)\n"
           "  --grace SECONDS  from SIGTERM to SIGKILL, when a rank has failed or a signal\n"
           "                   ends the job (5)\n"
           "  --early SECONDS  that ranks may go on when one has ended with status 0 (for\n"
           "                   ever, with one warning)\n"
           "  --help           print this\n",
           MOST_RANKS);
}

static bool read_count(const char *text, int *out) {
    char *end;
    const long number = strtol(text, &end, 10);
    *out = (int)number;
    return text[0] >= '0' && text[0] <= '9' && !*end && number >= 1 && number <= MOST_RANKS;
}

static bool read_seconds(const char *text, double *out) {
    char *end;
    *out = strtod(text, &end);
    return text[0] >= '0' && text[0] <= '9' && !*end && *out >= 0.0 && *out <= 1e6;
}

/* False when the command line is wrong, after having said so. */
static bool parse(char **argv, options *o) {
    char **at = argv + 1;
    o->grace = 5.0;
    for (; *at && (*at)[0] == '-'; at++) {
        const char *name = *at, *takes = NULL;
        if (strcmp(name, "--") == 0) {
            at++;
            break;
        }
        if (strcmp(name, "--help") == 0)
            o->help = true;
        else if (strcmp(name, "--bind") == 0)
            o->bind = true;
        else if (strcmp(name, "--keep-going") == 0)
            o->keep_going = true;
        else if (strcmp(name, "-n") == 0)
            takes = at[1] && read_count(*++at, &o->ranks) ? NULL : "a number from 1 to 1024";
        else if (strcmp(name, "--restart") == 0)
            takes = at[1] && read_count(*++at, &o->restarts) ? NULL : "a number from 1 to 1024";
        else if (strcmp(name, "--grace") == 0)
            takes = at[1] && read_seconds(*++at, &o->grace) ? NULL : "seconds";
        else if (strcmp(name, "--early") == 0)
            takes = at[1] && read_seconds(*++at, &o->early) ? NULL : "seconds";
        else {
            fprintf(stderr, "xdrun: no option %s; --help lists them\n", name);
            return false;
        }
        if (takes) {
            fprintf(stderr, "xdrun: %s takes %s, not \"%s\"\n", name, takes, *at == name ? "" : *at);
            return false;
        }
        if (o->help) return true;
    }
    o->program = at;
    if (!o->ranks)
        fprintf(stderr, "xdrun: -n N, the number of ranks, is missing; --help lists the options\n");
    else if (!*at)
        fprintf(stderr, "xdrun: there is no program behind the options\n");
    return o->ranks && *at;
}

/* ---- the job ---- */

/* What comes from a rank, with the rank's prefix at the beginning of the line. */
typedef struct stream {
    int from; /* -1: closed */
    int to;
    char *line;
    size_t used, room, prefix;
} stream;

typedef struct rank {
    pid_t process; /* 0: it does not run */
    stream streams[2];
} rank;

typedef struct job {
    const options *o;
    rank *ranks;
    struct rlimit files; /* as ranks have it */
    int count, running;  /* started, not ended */
    int keeper;          /* the pipe to the process that outlives this one */
    pid_t keeper_process;
    char name[64], port[16];
    int restarts;   /* times that it was started before */
    int status;     /* of xdrun */
    bool stopping;  /* a rank has failed, or something else has */
    double kill_at; /* seconds; 0 -> never */
    int passed_on;  /* the last signal */
    int signals;    /* that were passed on to end the job */
    int ending;     /* the first of them; 0 -> none */
    int lost;       /* 128 and the signal of the first rank that the others have gone on without; 0 -> none */
    bool well;      /* some rank has ended with 0 */
    int early;      /* the first that ended with 0 before others; -1 */
    double early_at;
    bool warned;
    bool deaf;  /* what ranks write has nowhere to go */
    bool ended; /* some rank may have, which is not reaped yet */
} job;

static int signal_pipe[2]; /* handlers write the numbers of signals */

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A line of xdrun's own. */
static void say(const char *format, ...) {
    char line[512] = "xdrun: ";
    va_list arguments;
    va_start(arguments, format);
    int used = vsnprintf(line + 7, sizeof line - 8, format, arguments);
    va_end(arguments);
    size_t length = 7 + (size_t)(used < 0 ? 0 : used);
    if (length > sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    const ssize_t written = write(STDERR_FILENO, line, length);
    (void)written; /* there is nobody else to tell */
}

static bool make_pipe(int ends[2]) {
    if (pipe(ends) != 0) return false;
    for (int i = 0; i < 2; i++) (void)fcntl(ends[i], F_SETFD, FD_CLOEXEC);
    return true;
}

/* To all that run, and to what they have started. */
static void signal_ranks(const job *j, int number) {
    for (int r = 0; r < j->count; r++)
        if (j->ranks[r].process > 0) (void)kill(-j->ranks[r].process, number);
}

static void stop(job *j, int status) {
    if (!j->status) j->status = status;
    if (j->stopping) return;
    j->stopping = true;
    if (j->kill_at <= 0.0) j->kill_at = now() + j->o->grace;
    signal_ranks(j, SIGTERM);
}

/* ---- what ranks write ---- */

static void read_signals(job *j);
static bool kill_late_ranks(job *j);

/* Milliseconds until ranks are killed, for poll; -1 -> for ever. */
static int until_killed(const job *j) {
    const double left = j->kill_at > 0.0 ? j->kill_at - now() : -1.0;
    return j->kill_at <= 0.0 ? -1 : left <= 0.0 ? 0 : left > 1e3 ? 1000000 : (int)(left * 1e3) + 1;
}

/* Whether what ranks write can go there now. Signals are passed on meanwhile; the second one that ends the job ends the waiting, and
 * so does the end of the grace. */
static bool is_ready(job *j, int to) {
    struct pollfd waits[2];
    waits[0].fd = to;
    waits[0].events = POLLOUT;
    waits[1].fd = signal_pipe[0];
    waits[1].events = POLLIN;
    waits[0].revents = waits[1].revents = 0;
    if (poll(waits, 2, until_killed(j)) < 0 && errno != EINTR) return true;
    if (waits[1].revents) read_signals(j);
    if (!waits[0].revents && (kill_late_ranks(j) || j->signals > 1)) j->deaf = true;
    return waits[0].revents != 0;
}

static void write_line(job *j, const stream *s) {
    for (size_t done = 0; done < s->used && !j->deaf;) {
        if (!is_ready(j, s->to)) continue;
        const ssize_t n = write(s->to, s->line + done, s->used - done);
        if (n > 0) done += (size_t)n;
        if (n >= 0 || errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) continue;
        j->deaf = true;
        if (!j->stopping) say("what ranks write cannot be passed on: %s", strerror(errno));
        stop(j, STATUS_FAILED);
    }
}

static bool make_room(stream *s, size_t more) {
    if (s->used + more <= s->room) return true;
    size_t room = s->room ? s->room : FIRST_LINE;
    while (room < s->used + more) room *= 2;
    char *line = (char *)realloc(s->line, room);
    if (!line) return false;
    s->line = line;
    s->room = room;
    return true;
}

/* What a rank wrote, whole lines of which go out. */
static void take(job *j, stream *s, const char *piece, size_t bytes) {
    while (bytes > 0) {
        const char *end = (const char *)memchr(piece, '\n', bytes);
        size_t part = end ? (size_t)(end - piece) + 1 : bytes;
        const bool cut = s->used - s->prefix + part > LONGEST_LINE || !make_room(s, part + 1);
        if (!cut) {
            memcpy(s->line + s->used, piece, part);
            s->used += part;
            piece += part;
            bytes -= part;
        } else if (s->used == s->prefix) {
            return; /* no memory for a single piece */
        } else {
            s->line[s->used++] = '\n'; /* make_room has left a byte */
        }
        if (!end && !cut) return;
        write_line(j, s);
        s->used = s->prefix;
    }
}

/* A piece, or, when nobody of the rank is left who writes, all that is there, as much as a pipe holds. */
static void listen_to(job *j, stream *s, bool last) {
    char piece[PIECE];
    for (int pieces = 0; s->from >= 0 && pieces < MOST_PIECES; pieces++) {
        const ssize_t n = read(s->from, piece, sizeof piece);
        if (n > 0) take(j, s, piece, (size_t)n);
        if (n < 0 && errno == EINTR) continue;
        if (!last && (n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)))) return;
        if (n <= 0) break;
    }
    if (s->from < 0) return;
    (void)close(s->from);
    s->from = -1;
    if (s->used > s->prefix) take(j, s, "\n", 1); /* the last line lacks its end */
}

/* ---- starting ---- */

/* The cores that rank r may use, out of those that this process may. */
static bool bind_rank(int r, int ranks) {
#if defined(__linux__)
    cpu_set_t all, mine;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return false;
    const int cores = CPU_COUNT(&all), turn = r % cores;
    const int begin = cores >= ranks ? (int)((int64_t)r * cores / ranks) : turn;
    const int end = cores >= ranks ? (int)((int64_t)(r + 1) * cores / ranks) : turn + 1;
    CPU_ZERO(&mine);
    for (int core = 0, seen = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET((size_t)core, &all)) continue;
        if (seen >= begin && seen < end) CPU_SET((size_t)core, &mine);
        seen++;
    }
    return sched_setaffinity(0, sizeof mine, &mine) == 0;
#else
    (void)r;
    (void)ranks;
    errno = ENOSYS;
    return false;
#endif
}

static bool tell_rank(const job *j, int r) {
    char number[16], size[16], restarts[16];
    snprintf(number, sizeof number, "%d", r);
    snprintf(size, sizeof size, "%d", j->o->ranks);
    snprintf(restarts, sizeof restarts, "%d", j->restarts);
    return setenv("RANK", number, 1) == 0 && setenv("WORLD_SIZE", size, 1) == 0 &&
           setenv("LOCAL_RANK", number, 1) == 0 && setenv("LOCAL_WORLD_SIZE", size, 1) == 0 &&
           setenv("MASTER_ADDR", "127.0.0.1", 1) == 0 && setenv("MASTER_PORT", j->port, 1) == 0 &&
           setenv("XDISTILL_JOB", j->name, 1) == 0 && setenv("XDRUN_RESTARTS", restarts, 1) == 0;
}

static const int passed[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 };
enum { PASSED = sizeof passed / sizeof passed[0], ENDING = 4 /* the first of them end a job */ };

static void note_signal(int number);

/* What nohup ignores stays so. */
static void be_plain(const sigset_t *mask) {
    struct sigaction action;
    for (int i = 0; i < PASSED; i++)
        if (sigaction(passed[i], NULL, &action) == 0 && action.sa_handler == note_signal)
            (void)signal(passed[i], SIG_DFL);
    (void)signal(SIGCHLD, SIG_DFL);
    (void)signal(SIGPIPE, SIG_DFL);
    (void)sigprocmask(SIG_SETMASK, mask, NULL);
}

/* In the process of rank r: it becomes the program, or tells why it does not. */
static void become(const job *j, int r, const int *outputs, int report) {
    const int nothing = open("/dev/null", O_RDONLY);
    bool well = nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(outputs[0], STDOUT_FILENO) >= 0 &&
                dup2(outputs[1], STDERR_FILENO) >= 0;
    well = well && tell_rank(j, r) && (!j->o->bind || bind_rank(r, j->o->ranks));
    (void)setrlimit(RLIMIT_NOFILE, &j->files);
    if (well) (void)execvp(j->o->program[0], j->o->program);
    const int cause = errno;
    const ssize_t written = write(report, &cause, sizeof cause);
    (void)written;
    _exit(STATUS_NOT_FOUND);
}

static void be_child(const job *j, int r, const int *outputs, int report, pid_t parent) {
    (void)setpgid(0, 0);
#if defined(PR_SET_PDEATHSIG)
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    if (getppid() != parent) _exit(STATUS_FAILED);
    become(j, r, outputs, report);
}

/* The reading ends become the rank's streams. */
static bool make_streams(job *j, int r, int outputs[2]) {
    char prefix[24];
    const int length = snprintf(prefix, sizeof prefix, "[%d] ", r);
    for (int i = 0; i < 2; i++) {
        stream *s = &j->ranks[r].streams[i];
        int ends[2];
        s->from = -1;
        s->to = i == 0 ? STDOUT_FILENO : STDERR_FILENO;
        if (!make_room(s, (size_t)length) || !make_pipe(ends)) return false;
        memcpy(s->line, prefix, (size_t)length);
        s->used = s->prefix = (size_t)length;
        s->from = ends[0];
        outputs[i] = ends[1];
        (void)fcntl(s->from, F_SETFL, O_NONBLOCK);
    }
    return true;
}

/* 0, or an errno value; *ran tells whether there was a process for it. */
static int start_rank(job *j, int r, bool *ran) {
    rank *k = &j->ranks[r];
    int outputs[2] = { -1, -1 }, report[2] = { -1, -1 }, cause = 0;
    sigset_t all, mask;
    const pid_t parent = getpid();
    *ran = false;
    j->count = r + 1;
    if (!make_streams(j, r, outputs) || !make_pipe(report)) return errno ? errno : ENOMEM;
    (void)sigfillset(&all);
    (void)sigprocmask(SIG_SETMASK, &all, &mask); /* or a handler could run in the child */
    const pid_t process = fork();
    if (process == 0) {
        be_plain(&mask);
        be_child(j, r, outputs, report[1], parent);
    }
    cause = process < 0 ? errno : 0;
    (void)sigprocmask(SIG_SETMASK, &mask, NULL);
    for (int i = 0; i < 2; i++) (void)close(outputs[i]);
    (void)close(report[1]);
    if (process > 0) {
        *ran = true;
        (void)setpgid(process, process);
        k->process = process;
        j->running++;
        const ssize_t told = write(j->keeper, &process, sizeof process);
        (void)told;
        ssize_t n;
        do n = read(report[0], &cause, sizeof cause);
        while (n < 0 && errno == EINTR);
        if (n != (ssize_t)sizeof cause) cause = 0; /* closed: the program runs */
    }
    (void)close(report[0]);
    return cause;
}

static void start_ranks(job *j) {
    for (int r = 0; r < j->o->ranks && !j->stopping; r++) {
        bool ran;
        const int cause = start_rank(j, r, &ran);
        if (!cause) continue;
        if (ran)
            say("%s: %s", j->o->program[0], strerror(cause));
        else
            say("rank %d of %d cannot be started: %s", r, j->o->ranks, strerror(cause));
        stop(j, !ran ? STATUS_FAILED : cause == ENOENT ? STATUS_NOT_FOUND : STATUS_NOT_RUN);
    }
}

/* ---- ends ---- */

/* "rank 2 (process 71) ended with status 3": into `text`. */
static void describe_end(char *text, size_t room, int r, pid_t process, int status) {
    if (WIFSIGNALED(status))
        snprintf(text, room, "rank %d (process %ld) was ended by signal %d (%s)", r, (long)process,
                 WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(text, room, "rank %d (process %ld) ended with status %d", r, (long)process,
                 WEXITSTATUS(status));
}

static void tell_failure(job *j, int r, pid_t process, int status) {
    char what[160], before[96] = "", others[64] = "";
    describe_end(what, sizeof what, r, process, status);
    if (WIFSIGNALED(status) && WTERMSIG(status) == j->passed_on)
        snprintf(before, sizeof before, ", which was passed on");
    else if (j->early >= 0)
        snprintf(before, sizeof before, "; rank %d had ended with status 0, %.1f s before", j->early,
                 now() - j->early_at);
    if (j->running > 0) snprintf(others, sizeof others, "; stopping the other %d", j->running);
    say("%s%s%s", what, before, others);
    stop(j, WIFSIGNALED(status) ? STATUS_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status));
}

/* Whether the others go on without a rank that has ended like this. */
static bool can_lose(const job *j, int status) {
    return j->o->keep_going && !j->stopping && WIFSIGNALED(status) && WTERMSIG(status) != j->passed_on;
}

static void tell_loss(job *j, int r, pid_t process, int status) {
    char what[160], others[64] = "nobody is left";
    describe_end(what, sizeof what, r, process, status);
    if (j->running > 0)
        snprintf(others, sizeof others, "the other %d go%s on", j->running, j->running > 1 ? "" : "es");
    say("%s; %s", what, others);
    if (!j->lost) j->lost = STATUS_SIGNAL + WTERMSIG(status);
}

/* False while the rank runs. What it has started ends now, as long as its number cannot be another's. */
static bool reap(job *j, int r, int *status) {
    rank *k = &j->ranks[r];
    siginfo_t info;
    memset(&info, 0, sizeof info);
    if (waitid(P_PID, (id_t)k->process, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
        return false;
    const pid_t gone = -k->process;
    (void)kill(-k->process, SIGKILL);
    const ssize_t told = write(j->keeper, &gone, sizeof gone);
    (void)told;
    while (waitpid(k->process, status, 0) < 0 && errno == EINTR) {
    }
    k->process = 0;
    j->running--;
    for (int i = 0; i < 2; i++) listen_to(j, &k->streams[i], true);
    return true;
}

/* Of several that have ended since the last time, the one that a signal ended was first: the others may have failed for want of it. */
static void reap_all(job *j) {
    int first = -1, first_status = 0, well = -1;
    pid_t first_process = 0;
    for (int r = 0; r < j->count; r++) {
        const pid_t process = j->ranks[r].process;
        int status = 0;
        if (process <= 0 || !reap(j, r, &status)) continue;
        if (status == 0)
            well = r;
        else if (can_lose(j, status))
            tell_loss(j, r, process, status);
        else if (first < 0 || (WIFSIGNALED(status) && !WIFSIGNALED(first_status))) {
            first = r;
            first_status = status;
            first_process = process;
        }
    }
    j->well = j->well || well >= 0;
    if (well >= 0 && j->early < 0 && j->running > 0) {
        j->early = well;
        j->early_at = now();
    }
    if (first >= 0 && !j->stopping) tell_failure(j, first, first_process, first_status);
}

/* ---- signals and time ---- */

static void note_signal(int number) {
    const int cause = errno;
    const unsigned char byte = (unsigned char)number;
    const ssize_t written = write(signal_pipe[1], &byte, 1);
    (void)written; /* full: there is enough to wake up for */
    errno = cause;
}

static bool catch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    if (signal_pipe[0] > 0) return true; /* since the job was started the first time */
    if (!make_pipe(signal_pipe)) return false;
    for (int i = 0; i < 2; i++) (void)fcntl(signal_pipe[i], F_SETFL, O_NONBLOCK);
    action.sa_handler = note_signal;
    action.sa_flags = SA_NOCLDSTOP;
    (void)sigemptyset(&action.sa_mask);
    bool well = sigaction(SIGCHLD, &action, NULL) == 0 && signal(SIGPIPE, SIG_IGN) != SIG_ERR;
    for (int i = 0; i < PASSED; i++) {
        struct sigaction before;
        well = well && sigaction(passed[i], NULL, &before) == 0;
        if (passed[i] == SIGHUP && before.sa_handler == SIG_IGN) continue; /* nohup */
        well = well && sigaction(passed[i], &action, NULL) == 0;
    }
    return well;
}

static void kill_ranks(job *j, int status) {
    stop(j, status);
    j->kill_at = 0.0;
    signal_ranks(j, SIGKILL);
}

/* Whether the grace is over, and so those that still run have been killed. */
static bool kill_late_ranks(job *j) {
    if (j->kill_at <= 0.0 || now() < j->kill_at) return false;
    say("%d rank%s did not end within %g s: killed", j->running, j->running > 1 ? "s" : "", j->o->grace);
    kill_ranks(j, j->ending ? STATUS_SIGNAL + j->ending : STATUS_FAILED);
    return true;
}

static void pass_on(job *j, int number) {
    bool ends = false;
    for (int i = 0; i < ENDING; i++) ends = ends || passed[i] == number;
    j->passed_on = number;
    j->signals += ends;
    if (ends && j->signals == 1) {
        j->ending = number;
        if (j->kill_at <= 0.0) j->kill_at = now() + j->o->grace;
    }
    if (ends && j->signals == 2) {
        say("a second signal, %d (%s): killing %d ranks", number, strsignal(number), j->running);
        kill_ranks(j, STATUS_SIGNAL + number);
    } else {
        signal_ranks(j, number);
    }
}

/* Passes on those that have come; that ranks have ended is noted. */
static void read_signals(job *j) {
    unsigned char bytes[64];
    ssize_t n;
    while ((n = read(signal_pipe[0], bytes, sizeof bytes)) > 0)
        for (ssize_t i = 0; i < n; i++) {
            if (bytes[i] == SIGCHLD)
                j->ended = true;
            else
                pass_on(j, bytes[i]);
        }
}

static void hear_signals(job *j) {
    read_signals(j);
    while (j->ended) {
        j->ended = false;
        reap_all(j);
    }
}

/* The next moment at which something is due; 0 -> none. */
static double next_moment(const job *j) {
    if (j->kill_at > 0.0) return j->kill_at;
    if (j->stopping || j->early < 0) return 0.0;
    if (j->o->early > 0.0) return j->early_at + j->o->early;
    return j->warned ? 0.0 : j->early_at + WARN_SECONDS;
}

static void do_what_is_due(job *j) {
    const double moment = next_moment(j), time = now();
    if (kill_late_ranks(j) || moment <= 0.0 || time < moment) return;
    if (j->o->early > 0.0) {
        say("rank %d ended with status 0, and %d still run %g s later: stopping them", j->early, j->running,
            j->o->early);
        stop(j, STATUS_FAILED);
    } else {
        say("rank %d ended with status 0 %.0f s ago, and %d others go on", j->early, time - j->early_at,
            j->running);
        j->warned = true;
    }
}

/* Until no rank runs. */
static bool live(job *j) {
    struct pollfd *waits = (struct pollfd *)calloc(1 + 2 * (size_t)j->o->ranks, sizeof *waits);
    if (!waits) return false;
    while (j->running > 0) {
        const double moment = next_moment(j), left = moment > 0.0 ? moment - now() : -1.0;
        const int wait = moment <= 0.0 ? -1 : left <= 0.0 ? 0 : left > 1e3 ? 1000000 : (int)(left * 1e3) + 1;
        waits[0].fd = signal_pipe[0];
        waits[0].events = POLLIN;
        for (int i = 0; i < 2 * j->count; i++) {
            waits[1 + i].fd = j->ranks[i / 2].streams[i % 2].from; /* -1 is passed over */
            waits[1 + i].events = POLLIN;
        }
        if (poll(waits, (nfds_t)(1 + 2 * j->count), wait) < 0 && errno != EINTR) break;
        for (int i = 0; i < 2 * j->count; i++)
            if (waits[1 + i].fd >= 0 && waits[1 + i].revents)
                listen_to(j, &j->ranks[i / 2].streams[i % 2], false);
        hear_signals(j);
        do_what_is_due(j);
    }
    free(waits);
    return j->running == 0;
}

/* ---- the keeper ---- */

/* Hears of ranks that start (a number) and have ended (its negative), and kills those that are left when xdrun is no more. */
static void keep(int from) {
    pid_t groups[MOST_RANKS], told;
    int count = 0;
    ssize_t n;
    while ((n = read(from, &told, sizeof told)) != 0) {
        if (n < 0 && errno == EINTR) continue;
        if (n != (ssize_t)sizeof told) break;
        if (told > 0 && count < MOST_RANKS) groups[count++] = told;
        for (int i = 0; i < count && told < 0; i++)
            if (groups[i] == -told) groups[i--] = groups[--count];
    }
    for (int i = 0; i < count; i++) (void)kill(-groups[i], SIGKILL);
    _exit(0);
}

static bool start_keeper(job *j) {
    int ends[2];
    if (!make_pipe(ends)) return false;
    j->keeper_process = fork();
    if (j->keeper_process == 0) {
        const int nothing = open("/dev/null", O_RDWR);
        (void)setsid(); /* it gets no signals of a terminal */
        for (int i = 0; i <= STDERR_FILENO && nothing >= 0; i++)
            (void)dup2(nothing, i); /* whoever reads xdrun's is not kept */
        (void)close(ends[1]);
        keep(ends[0]);
    }
    (void)close(ends[0]);
    j->keeper = ends[1];
    return j->keeper_process > 0;
}

/* ---- set-up ---- */

/* Two pipes a rank, and some. Ranks keep the limit as it was. */
static bool allow_files(job *j) {
    const rlim_t needed = (rlim_t)(2 * j->o->ranks + 16);
    if (getrlimit(RLIMIT_NOFILE, &j->files) != 0) return true;
    struct rlimit more = j->files;
    if (more.rlim_cur == RLIM_INFINITY || more.rlim_cur >= needed) return true;
    more.rlim_cur = more.rlim_max == RLIM_INFINITY || more.rlim_max >= needed ? needed : more.rlim_max;
    if (more.rlim_cur >= needed && setrlimit(RLIMIT_NOFILE, &more) == 0) return true;
    say("%d ranks need %lld open files, the limit is %lld: fewer ranks, or ulimit -n", j->o->ranks,
        (long long)needed, (long long)j->files.rlim_max);
    return false;
}

static bool name_job(job *j) {
    uint64_t number = 0;
    const int file = open("/dev/urandom", O_RDONLY);
    const bool well = file >= 0 && read(file, &number, sizeof number) == (ssize_t)sizeof number;
    if (file >= 0) (void)close(file);
    snprintf(j->name, sizeof j->name, "xdrun-%016llx", (unsigned long long)number);
    if (!well) say("/dev/urandom cannot be read: %s", strerror(errno));
    return well;
}

/* A port that nobody uses now. */
static bool find_port(job *j) {
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    const int file = socket(AF_INET, SOCK_STREAM, 0);
    const bool well = file >= 0 && bind(file, (const struct sockaddr *)&address, sizeof address) == 0 &&
                      getsockname(file, (struct sockaddr *)&address, &length) == 0;
    if (!well) say("there is no free port: %s", strerror(errno));
    if (file >= 0) (void)close(file);
    snprintf(j->port, sizeof j->port, "%d", (int)ntohs(address.sin_port));
    return well;
}

/* Pipes must not become 0, 1 or 2. */
static bool open_standard(void) {
    int file;
    do file = open("/dev/null", O_RDWR);
    while (file >= 0 && file <= STDERR_FILENO);
    if (file >= 0) (void)close(file);
    return file >= 0;
}

static bool set_up(job *j) {
#if !defined(__linux__)
    if (j->o->bind) {
        say("--bind is offered on Linux only");
        return false;
    }
#endif
    if (!allow_files(j) || !name_job(j) || !find_port(j)) return false;
    j->ranks = (rank *)calloc((size_t)j->o->ranks, sizeof *j->ranks);
    if (j->ranks && start_keeper(j) && catch_signals()) return true;
    say("%d ranks cannot be prepared: %s", j->o->ranks, strerror(errno));
    return false;
}

/* Where ranks of xd_comm_node meet: one that was killed there alone has left it. */
static void remove_meeting(const job *j) {
    char path[128];
    if (!j->name[0]) return;
    snprintf(path, sizeof path, "/dev/shm/xdistill-job-%s", j->name);
    (void)unlink(path);
}

static void tear_down(job *j) {
    for (int i = 0; j->ranks && i < 2 * j->count; i++) {
        stream *s = &j->ranks[i / 2].streams[i % 2];
        if (s->from >= 0) (void)close(s->from);
        free(s->line);
    }
    free(j->ranks);
    if (j->files.rlim_cur > 0) (void)setrlimit(RLIMIT_NOFILE, &j->files);
    remove_meeting(j);
    if (j->keeper_process <= 0) return;
    (void)close(j->keeper);
    while (waitpid(j->keeper_process, NULL, 0) < 0 && errno == EINTR) {
    }
}

/* Starts the ranks and waits for them, once. */
static void run(job *j, const options *o, int restarts) {
    memset(j, 0, sizeof *j);
    j->o = o;
    j->restarts = restarts;
    j->early = -1;
    if (set_up(j)) {
        start_ranks(j);
        if (!live(j)) {
            say("waiting for %d ranks has failed: %s", j->running, strerror(errno));
            signal_ranks(j, SIGKILL);
            j->status = STATUS_FAILED;
        }
        if (!j->status && !j->well) j->status = j->lost;
    } else {
        j->status = STATUS_FAILED;
    }
    tear_down(j);
}

/* Whether another time may go better. */
static bool may_restart(const job *j) {
    return j->status && j->signals == 0 && !j->deaf && j->status != STATUS_NOT_FOUND &&
           j->status != STATUS_NOT_RUN;
}

int main(int argc, char **argv) {
    options o;
    job j;
    memset(&o, 0, sizeof o);
    if (argc < 1 || !open_standard()) return STATUS_FAILED;
    if (!parse(argv, &o)) return STATUS_USAGE;
    if (o.help) {
        print_help();
        return 0;
    }
    run(&j, &o, 0);
    for (int i = 1; i <= o.restarts && may_restart(&j); i++) {
        say("starting the job again, %d of %d times", i, o.restarts);
        run(&j, &o, i);
    }
    return j.status;
}
