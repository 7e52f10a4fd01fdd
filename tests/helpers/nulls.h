/* nulls.h - what the wrappers of tests/build/nulls.py share: a call made with one pointer set to NULL, under a guard against
 * signals, and what came of it, a line each in the file $NULLS_LOG. */
#ifndef NULLS_H
#define NULLS_H

#include "xdistill.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NULLS_OUTPUTS = 8, NULLS_OUTPUT = 4096, NULLS_TRIES = 96, NULLS_HANDLES = 4096 };

typedef struct nulls_try {
    const char *path;
    int number;
    bool anonymous; /* the object of the call, or its context: there is no place for a message */
    xd_result result;
    bool crashed, wrote, named;
    char message[160];
} nulls_try;

typedef struct nulls_frame {
    xd_ctx *ctx;
    const char *call;
    bool on;
    void *outputs[NULLS_OUTPUTS];
    unsigned char before[NULLS_OUTPUTS][NULLS_OUTPUT];
    size_t bytes[NULLS_OUTPUTS];
    int output_count, try_count;
    nulls_try tries[NULLS_TRIES];
    xd_result real;
} nulls_frame;

extern const int nulls_number;
extern unsigned char nulls_asked[];

static __thread sigjmp_buf nulls_back;
static __thread bool nulls_guarded, nulls_inside;
static __thread xd_ctx *nulls_last_ctx;
static int nulls_several; /* a world of several ranks was made */
static pthread_mutex_t nulls_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const void *handle;
    xd_ctx *ctx;
} nulls_handles[NULLS_HANDLES];

static void nulls_signal(int number) {
    if (nulls_guarded) siglongjmp(nulls_back, number);
    signal(number, SIG_DFL);
    raise(number);
}

static void nulls_guard(bool on) {
    static const int signals[] = { SIGSEGV, SIGBUS, SIGABRT, SIGFPE };
    for (size_t i = 0; on && i < sizeof signals / sizeof *signals; i++) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = nulls_signal;
        action.sa_flags = SA_NODEFER;
        sigaction(signals[i], &action, NULL);
    }
    nulls_guarded = on;
}

/* The context of the object, by what made it; else the one that this thread has used last. */
static xd_ctx *nulls_ctx(const xd_comm *comm, const void *handle) {
    xd_ctx *found = NULL;
    if (comm) return xd_comm_ctx((xd_comm *)comm);
    pthread_mutex_lock(&nulls_mutex);
    for (int i = 0; handle && i < NULLS_HANDLES; i++)
        if (nulls_handles[i].handle == handle) found = nulls_handles[i].ctx;
    pthread_mutex_unlock(&nulls_mutex);
    return found ? found : nulls_last_ctx;
}

/* Objects of a context that ends have none. */
void __real_xd_ctx_destroy(xd_ctx *ctx);
void __wrap_xd_ctx_destroy(xd_ctx *ctx);
void __wrap_xd_ctx_destroy(xd_ctx *ctx) {
    pthread_mutex_lock(&nulls_mutex);
    for (int i = 0; i < NULLS_HANDLES; i++)
        if (nulls_handles[i].ctx == ctx) nulls_handles[i].ctx = NULL;
    pthread_mutex_unlock(&nulls_mutex);
    if (nulls_last_ctx == ctx) nulls_last_ctx = NULL;
    __real_xd_ctx_destroy(ctx);
}

static void nulls_begin(nulls_frame *f, xd_ctx *ctx, const char *call, bool collective) {
    f->ctx = ctx;
    f->call = call;
    f->output_count = f->try_count = 0;
    if (ctx) nulls_last_ctx = ctx;
    if (strstr(call, "run_threads") || strstr(call, "thread_world") || strstr(call, "comm_node"))
        nulls_several++;
    f->on = !nulls_inside && !(collective && nulls_several);
}

static void nulls_output(nulls_frame *f, void *output, size_t bytes) {
    if (!output || !f->on || bytes > NULLS_OUTPUT) return;
    const int i = f->output_count++;
    f->outputs[i] = output;
    f->bytes[i] = bytes;
    memcpy(f->before[i], output, bytes);
}

static bool nulls_wants(nulls_frame *f, int number, const char *path, bool named, bool given) {
    if (!f->on || !given || f->try_count == NULLS_TRIES || nulls_asked[number] > 0) return false;
    memset(&f->tries[f->try_count], 0, sizeof f->tries[0]);
    f->tries[f->try_count].path = path;
    f->tries[f->try_count].number = number;
    f->tries[f->try_count].anonymous = !named;
    return true;
}

static void nulls_judge(nulls_frame *f, nulls_try *t) {
    const char *name = strrchr(t->path, '.') ? strrchr(t->path, '.') + 1 : t->path;
    for (int i = 0; i < f->output_count; i++)
        if (memcmp(f->outputs[i], f->before[i], f->bytes[i]) != 0) {
            t->wrote = true;
            memcpy(f->outputs[i], f->before[i], f->bytes[i]);
        }
    const char *message = f->ctx && t->result != XD_OK && !t->crashed ? xd_last_error(f->ctx)->message : "";
    snprintf(t->message, sizeof t->message, "%s", message);
    t->named = strstr(message, name) != NULL;
}

#define NULLS_TRY(frame, expression)                           \
    do {                                                       \
        nulls_try *t_ = &(frame)->tries[(frame)->try_count++]; \
        nulls_inside = true;                                   \
        nulls_guard(true);                                     \
        if (sigsetjmp(nulls_back, 1) == 0)                     \
            t_->result = (expression);                         \
        else                                                   \
            t_->crashed = true;                                \
        nulls_guard(false);                                    \
        nulls_inside = false;                                  \
        nulls_judge((frame), t_);                              \
    } while (0)

/* A handle that is NULL has no context, and no message. */
static void nulls_end(nulls_frame *f, void *const *created) {
    const char *log = getenv("NULLS_LOG");
    if (created && *created && f->ctx && f->real == XD_OK) {
        pthread_mutex_lock(&nulls_mutex);
        int at = 0;
        while (at < NULLS_HANDLES - 1 && nulls_handles[at].handle && nulls_handles[at].handle != *created)
            at++;
        nulls_handles[at].handle = *created;
        nulls_handles[at].ctx = f->ctx;
        pthread_mutex_unlock(&nulls_mutex);
    }
    FILE *file = f->try_count > 0 && log ? fopen(log, "a") : NULL;
    for (int i = 0; file && i < f->try_count; i++) {
        const nulls_try *t = &f->tries[i];
        const char *verdict = t->crashed                       ? "crash"
                              : t->wrote                       ? "wrote"
                              : t->result == XD_OK             ? "OK"
                              : t->result != XD_ERROR_ARGUMENT ? xd_result_name(t->result)
                              : !t->named && !t->anonymous     ? "unnamed"
                                                               : "refused";
        if (f->real != XD_OK && !t->crashed) continue;
        nulls_asked[t->number] = 1;
        fprintf(file, "%s\t%s\t%s\t%s\n", f->call, t->path, verdict, t->message);
    }
    if (file) fclose(file);
}

#endif
