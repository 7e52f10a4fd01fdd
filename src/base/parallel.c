/* Work split into pieces: a pool of threads that sleep until there is work, or the caller's own way to run pieces. */

#include "base/internal.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>

enum { XDI_POOL_LOOKS = 2000 };

/* A round of work. Every thread that is awake takes the next piece, so a slow thread takes fewer. */
typedef struct xdi_round {
    xdi_piece body;
    void *argument;
    int64_t pieces;
    int64_t next;    /* atomic: the first piece that no thread has taken */
    uint64_t floats; /* the floating-point state of the thread that asks for the round */
    int64_t stray; /* atomic: a piece that does not exist but that parallel_for asked for; INT64_MIN: none */
} xdi_round;

/* One thread of the pool. */
typedef struct xdi_pool_thread {
    struct xdi_pool *pool;
    pthread_t thread;
    int slot;
} xdi_pool_thread;

struct xdi_pool {
    int threads;                 /* the calling thread included */
    int64_t process;             /* that has the threads: one that is forked from it has none */
    const unsigned char *origin; /* of the context */
    bool busy;                   /* a round is running: a nested one runs on the thread that asks for it */
    xdi_round round;
    xd_parallel_for parallel_for;
    char *scratch; /* [threads - 1, XDI_POOL_SCRATCH] */

    /* The threads of parallel_for have no numbers, so a piece takes a free slot. Both arrays are atomic. */
    uint8_t taken[XDI_THREADS];
    int32_t runs[XDI_PIECES]; /* of each piece of this round */

    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t wake, done;
    int64_t number; /* of the round */
    bool open;      /* the round may have pieces to take */
    int active; /* threads in the round, without the caller's; atomic, since it is read without the lock too */
    int started; /* threads of the pool, whose list follows */
    bool leaving;
    xdi_pool_thread *thread; /* [threads - 1], after the pool in the same block */
};

static void xdi_round_work(xdi_round *round, int slot) {
    for (;;) {
        const int64_t piece = __atomic_fetch_add(&round->next, 1, __ATOMIC_RELAXED);
        if (piece >= round->pieces) return;
        round->body(round->argument, piece, slot);
    }
}

/* A thread that wakes when all pieces have been taken finds no round and sleeps again: no thread waits for it. */
static void *xdi_pool_thread_run(void *argument) {
    const xdi_pool_thread *self = (const xdi_pool_thread *)argument;
    xdi_pool *pool = self->pool;
    int64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    while (!pool->leaving) {
        if (pool->number == seen || !pool->open) {
            pthread_cond_wait(&pool->wake, &pool->lock);
            continue;
        }
        seen = pool->number;
        __atomic_add_fetch(&pool->active, 1, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&pool->lock);
        if (xdi_float_word() != pool->round.floats) xdi_float_set(pool->round.floats);
        xdi_round_work(&pool->round, self->slot);
        pthread_mutex_lock(&pool->lock);
        if (__atomic_sub_fetch(&pool->active, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* ---- life ---- */

/* Threads of the library block all signals, which are for the program's threads, except those of faults. */
static void xdi_pool_quiet(sigset_t *before) {
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP };
    sigset_t quiet;
    sigfillset(&quiet);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&quiet, faults[i]);
    pthread_sigmask(SIG_SETMASK, &quiet, before);
}

XD_PRIVATE bool xdi_thread_create(void *thread, void *(*run)(void *argument), void *argument) {
    sigset_t before;
    xdi_pool_quiet(&before);
    const bool fine = pthread_create((pthread_t *)thread, NULL, run, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return fine;
}

static bool xdi_pool_start(xdi_pool *pool) {
    bool fine = true;
    for (int i = 0; fine && i < pool->threads - 1; i++) {
        xdi_pool_thread *t = &pool->thread[i];
        t->pool = pool;
        t->slot = i + 1;
        fine = xdi_thread_create(&t->thread, xdi_pool_thread_run, t);
        if (fine) pool->started++;
    }
    return fine;
}

XD_PRIVATE xdi_pool *xdi_pool_create(const xd_ctx_desc *settings, const unsigned char *origin) {
    const xd_allocator *allocator = &settings->allocator;
    const size_t others = (size_t)settings->threads - 1,
                 bytes = sizeof(xdi_pool) + others * sizeof(xdi_pool_thread);
    xdi_pool *pool = (xdi_pool *)allocator->allocate(allocator->user, bytes);
    if (!pool) return NULL;
    memset(pool, 0, bytes);
    pool->threads = settings->threads;
    pool->origin = origin;
    pool->process = xdi_process();
    pool->thread = (xdi_pool_thread *)(void *)(pool + 1);
    pool->parallel_for = settings->parallel_for;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->scratch = (char *)allocator->allocate(allocator->user, others * XDI_POOL_SCRATCH);
    if (pool->scratch && (pool->parallel_for.run || xdi_pool_start(pool))) return pool;
    xdi_pool_destroy(pool, allocator);
    return NULL;
}

static void xdi_pool_stop(xdi_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->leaving = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->thread[i].thread, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
}

XD_PRIVATE void xdi_pool_destroy(xdi_pool *pool, const xd_allocator *allocator) {
    if (!pool) return;
    if (!xdi_is_forked(pool->process)) xdi_pool_stop(pool);
    if (pool->scratch) allocator->release(allocator->user, pool->scratch);
    allocator->release(allocator->user, pool);
}

XD_PRIVATE void *xdi_pool_scratch(const xdi_pool *pool, int slot) {
    return pool->scratch + (size_t)(slot - 1) * XDI_POOL_SCRATCH;
}

/* ---- on the pool's threads ---- */

/* The calling thread polls for some microseconds before it sleeps: most rounds end within them. */
static bool xdi_pool_sees_the_end(const xdi_pool *pool) {
    for (int i = 0; i < XDI_POOL_LOOKS; i++) {
        if (__atomic_load_n(&pool->active, __ATOMIC_ACQUIRE) == 0) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    return false;
}

static void xdi_pool_run_own(xdi_pool *pool, const xdi_round *round) {
    const int64_t helpers = round->pieces - 1;
    pthread_mutex_lock(&pool->lock);
    pool->round = *round;
    pool->number++;
    pool->open = true;
    pthread_mutex_unlock(&pool->lock); /* before waking threads, which lock it first */
    if (helpers >= pool->started)
        pthread_cond_broadcast(&pool->wake);
    else
        for (int64_t i = 0; i < helpers; i++) pthread_cond_signal(&pool->wake);
    xdi_round_work(&pool->round, 0);
    pthread_mutex_lock(&pool->lock);
    pool->open = false;
    pthread_mutex_unlock(&pool->lock);
    if (xdi_pool_sees_the_end(pool)) return;
    pthread_mutex_lock(&pool->lock);
    while (__atomic_load_n(&pool->active, __ATOMIC_ACQUIRE) > 0) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

/* ---- on the caller's threads ---- */

static int xdi_pool_take_slot(xdi_pool *pool, int64_t piece) {
    for (int64_t i = piece % pool->threads;; i = (i + 1) % pool->threads) {
        if (!__atomic_exchange_n(&pool->taken[i], 1, __ATOMIC_ACQUIRE)) return (int)i;
        if (i == pool->threads - 1) sched_yield(); /* more threads than were announced */
    }
}

static void xdi_pool_one(void *argument, int64_t piece) {
    xdi_pool *pool = (xdi_pool *)argument;
    if (piece < 0 || piece >= pool->round.pieces) {
        __atomic_store_n(&pool->round.stray, piece, __ATOMIC_RELAXED);
        return;
    }
    if (__atomic_fetch_add(&pool->runs[piece], 1, __ATOMIC_RELAXED) > 0)
        return; /* pieces work in place: a second run would change the result */
    const int slot = xdi_pool_take_slot(pool, piece);
    const uint64_t before = xdi_float_word();
    if (before != pool->round.floats) xdi_float_set(pool->round.floats);
    pool->round.body(pool->round.argument, piece, slot);
    if (before != pool->round.floats) xdi_float_set(before);
    __atomic_store_n(&pool->taken[slot], 0, __ATOMIC_RELEASE);
}

/* The first piece of the round that was not run once. */
static bool xdi_pool_was_fair(const xdi_pool *pool, xdi_pool_fault *fault) {
    fault->piece = pool->round.stray;
    fault->pieces = pool->round.pieces;
    fault->runs = 1;
    if (pool->round.stray != INT64_MIN) return false;
    for (fault->piece = 0; fault->piece < pool->round.pieces; fault->piece++) {
        fault->runs = __atomic_load_n(&pool->runs[fault->piece], __ATOMIC_RELAXED);
        if (fault->runs != 1) return false;
    }
    return true;
}

static bool xdi_pool_run_callers(xdi_pool *pool, const xdi_round *round, xdi_pool_fault *fault) {
    pool->round = *round;
    memset(pool->runs, 0, (size_t)round->pieces * sizeof *pool->runs);
    pool->parallel_for.run(pool->parallel_for.user, round->pieces, xdi_pool_one, pool);
    if (xdi_pool_was_fair(pool, fault)) return true;
    for (int64_t i = 0; i < round->pieces; i++)
        if (__atomic_load_n(&pool->runs[i], __ATOMIC_RELAXED) == 0) xdi_pool_one(pool, i);
    return false;
}

XD_PRIVATE bool xdi_pool_run(xdi_pool *pool, int64_t pieces, xdi_piece body, void *argument,
                             xdi_pool_fault *fault) {
    const bool own = pool && !pool->parallel_for.run;
    if (!pool || pieces <= 1 || pool->busy || (own && xdi_origin_is_elsewhere(pool->origin, pool->process))) {
        for (int64_t i = 0; i < pieces; i++) body(argument, i, 0);
        return true;
    }
    const xdi_round round = { body, argument, pieces, 0, xdi_float_word(), INT64_MIN };
    bool fair = true;
    pool->busy = true;
    if (own)
        xdi_pool_run_own(pool, &round);
    else
        fair = xdi_pool_run_callers(pool, &round, fault);
    pool->busy = false;
    return fair;
}
