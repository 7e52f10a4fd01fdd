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
#include <time.h>
#include <unistd.h>

enum {
    NULLS_OUTPUTS = 8,
    NULLS_OUTPUT = 4096,
    NULLS_TRIES = 96,
    NULLS_LIST = 16, /* entries of a list that is copied to set a pointer in its first one */
    NULLS_HANDLES = 4096,
    NULLS_PROBES = 64,
    NULLS_POINTERS = 2048,
    NULLS_CALLS = 512,
    NULLS_RANKS = 64,
    NULLS_MEETINGS = 8,  /* of the ranks, for one call in one world */
    NULLS_WAIT_MS = 150, /* for the other ranks of the world to make the same call */
    NULLS_TRIES_OF_A_POINTER = 3
};

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
    bool on, in_unison, guessed, ask[NULLS_TRIES];
    int call_number, first;
    void *outputs[NULLS_OUTPUTS];
    unsigned char before[NULLS_OUTPUTS][NULLS_OUTPUT];
    size_t bytes[NULLS_OUTPUTS];
    int output_count, try_count, ranks, most_ranks;
    nulls_try tries[NULLS_TRIES];
    xd_result real;
} nulls_frame;

extern const int nulls_number;
extern unsigned char nulls_asked[];

typedef struct nulls_handle {
    const void *handle;
    xd_ctx *ctx;
    int ranks; /* of the group that it was made with; 0 unless known */
} nulls_handle;

/* A world of xd_run_threads, as one rank sees it. Its ranks ask the same pointer at the same time, or none does. */
typedef struct nulls_world {
    int ranks, generation;
    xd_rank_function function;
    void *argument;
    unsigned char known[NULLS_POINTERS]; /* asked before this world began */
} nulls_world;

/* What a rank knows of its world; all ranks that make the same calls know the same. */
typedef struct nulls_rank {
    const nulls_world *world;
    int calls[NULLS_CALLS], meetings[NULLS_CALLS];
    unsigned char times[NULLS_POINTERS];
} nulls_rank;

/* A rank that waits for the others to make its call. */
typedef struct nulls_waiter {
    enum { NULLS_WAITS, NULLS_MET, NULLS_ALONE } state;
    bool ask[NULLS_TRIES];
} nulls_waiter;

/* Where the ranks of a world meet before the turn-th call of a function. */
typedef struct nulls_place {
    int generation, turn, arrived;
    nulls_waiter *waiters[NULLS_RANKS];
} nulls_place;

static __thread sigjmp_buf nulls_back;
static __thread bool nulls_guarded, nulls_inside;
static __thread xd_ctx *nulls_last_ctx;
static __thread nulls_rank *nulls_self; /* NULL on threads that are no rank of xd_run_threads */
static int nulls_several; /* worlds of several ranks that others than xd_run_threads have made */
static int nulls_worlds;
static pthread_mutex_t nulls_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t nulls_place_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t nulls_place_changed = PTHREAD_COND_INITIALIZER;
static nulls_place nulls_places[NULLS_CALLS];
static nulls_handle nulls_handles[NULLS_HANDLES];

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

/* Where the table has an object, or has room for it. */
static nulls_handle *nulls_find(const void *handle) {
    const size_t begin = ((uintptr_t)handle >> 4) % NULLS_HANDLES;
    size_t at = begin;
    for (int i = 1; i < NULLS_PROBES && nulls_handles[at].handle && nulls_handles[at].handle != handle; i++)
        at = (begin + (size_t)i) % NULLS_HANDLES;
    return &nulls_handles[at];
}

/* What made an object: its context, and the ranks of its group. */
static nulls_handle nulls_origin(const void *handle) {
    nulls_handle found;
    pthread_mutex_lock(&nulls_mutex);
    found = *nulls_find(handle);
    pthread_mutex_unlock(&nulls_mutex);
    if (!handle || found.handle != handle) memset(&found, 0, sizeof found);
    return found;
}

/* The context of the object, by what made it; else the one that this thread has used last. */
static xd_ctx *nulls_ctx(const xd_comm *comm, const void *handle) {
    if (comm) return xd_comm_ctx((xd_comm *)comm);
    xd_ctx *ctx = nulls_origin(handle).ctx;
    return ctx ? ctx : nulls_last_ctx;
}

/* A context ends: its objects have none, and nobody knows the group of what is made at their places later. */
static void nulls_forget(const xd_ctx *ctx) {
    pthread_mutex_lock(&nulls_mutex);
    for (int i = 0; i < NULLS_HANDLES; i++)
        if (nulls_handles[i].ctx == ctx) nulls_handles[i].ctx = NULL, nulls_handles[i].ranks = 0;
    pthread_mutex_unlock(&nulls_mutex);
    if (nulls_last_ctx == ctx) nulls_last_ctx = NULL;
}

void __real_xd_ctx_destroy(xd_ctx *ctx);
void __wrap_xd_ctx_destroy(xd_ctx *ctx);
void __wrap_xd_ctx_destroy(xd_ctx *ctx) {
    nulls_forget(ctx);
    __real_xd_ctx_destroy(ctx);
}

/* xd_run_threads, whose ranks know their world. */
static xd_result nulls_rank_main(xd_comm *world, void *argument) {
    const nulls_world *w = (const nulls_world *)argument;
    nulls_rank *before = nulls_self, *self = (nulls_rank *)calloc(1, sizeof *self);
    if (!self) abort();
    self->world = w;
    nulls_self = self;
    const xd_result result = w->function(world, w->argument);
    nulls_forget(xd_comm_ctx(world)); /* xd_run_threads ends it by a call that is not wrapped */
    nulls_self = before;
    free(self);
    return result;
}

xd_result __real_xd_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                                xd_error *error);
static xd_result nulls_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function,
                                   void *argument, xd_error *error) {
    if (!function) return __real_xd_run_threads(ranks, desc, function, argument, error);
    nulls_world *world = (nulls_world *)calloc(1, sizeof *world);
    if (!world) abort();
    world->ranks = ranks;
    world->function = function;
    world->argument = argument;
    memcpy(world->known, nulls_asked, (size_t)nulls_number);
    pthread_mutex_lock(&nulls_place_mutex);
    world->generation = ++nulls_worlds;
    pthread_mutex_unlock(&nulls_place_mutex);
    const xd_result result = __real_xd_run_threads(ranks, desc, nulls_rank_main, world, error);
    free(world);
    return result;
}

/* Is one of the pointers from number `first` on still to be asked? All ranks of a world say the same. */
static bool nulls_open(int first, int count) {
    const unsigned char *asked = nulls_self ? nulls_self->world->known : nulls_asked;
    bool open = false;
    for (int i = 0; i < count && !open; i++) open = asked[first + i] == 0;
    return open && !nulls_inside;
}

/* Local calls, and calls in a group of one rank, are asked by each rank on its own. `collective`: 0 local, 1 of all ranks, 2 of a
 * pair, which is asked in a world of two. */
static void nulls_begin(nulls_frame *f, xd_ctx *ctx, const char *call, int call_number, int collective,
                        const xd_comm *comm, const void *handle) {
    f->ctx = ctx;
    f->call = call;
    f->call_number = call_number;
    f->output_count = f->try_count = 0;
    if (ctx) nulls_last_ctx = ctx;
    f->ranks = comm ? xd_comm_size(comm) : nulls_origin(handle).ranks;
    if (f->ranks == 0) f->ranks = nulls_self ? nulls_self->world->ranks : nulls_several ? 2 : 1;
    f->guessed = !comm && handle && handle != ctx && !nulls_origin(handle).ctx;
    f->on = !nulls_inside;
    f->in_unison = collective > 0 && f->ranks > 1;
    f->most_ranks = collective == 2 ? 2 : NULLS_RANKS;
}

/* All that wait go on: with what all of them ask, or alone. */
static void nulls_leave(nulls_place *place, const bool *ask) {
    for (int i = 0; i < place->arrived; i++) {
        if (ask) memcpy(place->waiters[i]->ask, ask, sizeof place->waiters[i]->ask);
        place->waiters[i]->state = ask ? NULLS_MET : NULLS_ALONE;
    }
    place->arrived = 0;
    pthread_cond_broadcast(&nulls_place_changed);
}

/* Waits until all ranks of the world make this call, and keeps what all of them may ask; false when they do not. */
static bool nulls_meet(nulls_frame *f, int turn) {
    const nulls_world *world = nulls_self->world;
    nulls_place *place = &nulls_places[f->call_number];
    nulls_waiter own;
    struct timespec until;
    own.state = NULLS_WAITS;
    memcpy(own.ask, f->ask, sizeof own.ask);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)NULLS_WAIT_MS * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&nulls_place_mutex);
    const bool later = world->generation > place->generation ||
                       (world->generation == place->generation && turn > place->turn);
    if (later) {
        nulls_leave(place, NULL);
        place->generation = world->generation;
        place->turn = turn;
    } else if (world->generation != place->generation || turn != place->turn || place->arrived == 0) {
        own.state = NULLS_ALONE;
    }
    if (own.state == NULLS_WAITS) {
        place->waiters[place->arrived++] = &own;
        if (place->arrived == world->ranks) {
            bool ask[NULLS_TRIES];
            memcpy(ask, own.ask, sizeof ask);
            for (int i = 0; i < place->arrived; i++)
                for (int j = 0; j < NULLS_TRIES; j++) ask[j] = ask[j] && place->waiters[i]->ask[j];
            nulls_leave(place, ask);
        }
    }
    while (own.state == NULLS_WAITS)
        if (pthread_cond_timedwait(&nulls_place_changed, &nulls_place_mutex, &until) != 0 &&
            own.state == NULLS_WAITS)
            nulls_leave(place, NULL);
    pthread_mutex_unlock(&nulls_place_mutex);
    memcpy(f->ask, own.ask, sizeof f->ask);
    return own.state == NULLS_MET;
}

/* Decides which of the pointers from number `first` on this call asks. `alone`: no other rank can learn of it. */
static void nulls_plan(nulls_frame *f, int first, int count, const bool *given, const bool *alone) {
    bool wanted = false, all[NULLS_TRIES];
    f->first = first;
    memset(f->ask, 0, sizeof f->ask);
    memset(all, 0, sizeof all);
    if (!f->on || count > NULLS_TRIES) return;
    for (int i = 0; i < count; i++)
        all[i] = given[i] && !nulls_asked[first + i] && (alone[i] || !f->in_unison);
    if (f->in_unison && nulls_self && nulls_self->world->ranks > 1 &&
        nulls_self->world->ranks <= f->most_ranks) {
        nulls_rank *self = nulls_self;
        const int turn = ++self->calls[f->call_number];
        for (int i = 0; i < count; i++) {
            const bool open = !alone[i] && !self->world->known[first + i] &&
                              self->times[first + i] < NULLS_TRIES_OF_A_POINTER;
            wanted = wanted || open;
            f->ask[i] = open && given[i];
        }
        if (!wanted || self->meetings[f->call_number] >= NULLS_MEETINGS) wanted = false;
        if (wanted) self->meetings[f->call_number]++;
        wanted = wanted && nulls_meet(f, turn);
        for (int i = 0; wanted && i < count; i++)
            if (f->ask[i]) self->times[first + i]++;
    }
    for (int i = 0; i < count; i++) f->ask[i] = all[i] || (wanted && f->ask[i]);
}

static void nulls_output(nulls_frame *f, void *output, size_t bytes) {
    if (!output || !f->on || bytes > NULLS_OUTPUT) return;
    const int i = f->output_count++;
    f->outputs[i] = output;
    f->bytes[i] = bytes;
    memcpy(f->before[i], output, bytes);
}

static bool nulls_wants(nulls_frame *f, int number, const char *path, bool named) {
    if (!f->on || !f->ask[number - f->first]) return false;
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
        nulls_handle *made = nulls_find(*created);
        made->handle = *created;
        made->ctx = f->ctx;
        made->ranks = f->ranks;
        pthread_mutex_unlock(&nulls_mutex);
    }
    FILE *file = f->try_count > 0 && log ? fopen(log, "a") : NULL;
    for (int i = 0; file && i < f->try_count; i++) {
        const nulls_try *t = &f->tries[i];
        const char *verdict = t->crashed                                   ? "crash"
                              : t->wrote                                   ? "wrote"
                              : t->result == XD_OK                         ? "OK"
                              : t->result == XD_ERROR_PEER && f->in_unison ? "refused"
                              : t->result != XD_ERROR_ARGUMENT             ? xd_result_name(t->result)
                              : !t->named && !t->anonymous                 ? "unnamed"
                                                                           : "refused";
        if (f->real != XD_OK && !t->crashed) continue;
        if (f->guessed && strcmp(verdict, "unnamed") == 0)
            continue; /* the message is in a context that is not known here */
        nulls_asked[t->number] = 1;
        fprintf(file, "%s\t%s\t%s\t%s\n", f->call, t->path, verdict, t->message);
    }
    if (file) fclose(file);
}

#endif
