#ifndef XD_TEST_PARALLEL_H
#define XD_TEST_PARALLEL_H

/* What the tests of calls on several threads share: numbers, a parallel_for of their own, contexts that use it. */
#include "xdistill.h"
#include "xd_test.h"

#include <pthread.h>

static inline float number(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 33) / 1073741824.0 - 1.0);
}

/* A parallel_for of the caller: three threads that take pieces from the last one on, and count them. */
typedef struct loop {
    void (*body)(void *argument, int64_t piece);
    void *argument;
    int64_t next, rounds; /* next: atomic */
    int64_t twice, never; /* a piece that is run so; -1: none */
    bool beyond;          /* one more than there are */
} loop;

static inline void *loop_thread(void *argument) {
    loop *l = (loop *)argument;
    for (;;) {
        const int64_t piece = __atomic_sub_fetch(&l->next, 1, __ATOMIC_RELAXED);
        if (piece < 0) return NULL;
        if (piece != l->never) l->body(l->argument, piece);
        if (piece == l->twice) l->body(l->argument, piece);
    }
}

static inline void loop_run(void *user, int64_t pieces, void (*body)(void *argument, int64_t piece),
                            void *argument) {
    loop *l = (loop *)user;
    pthread_t threads[3];
    l->body = body;
    l->argument = argument;
    l->rounds++;
    __atomic_store_n(&l->next, pieces + (l->beyond ? 1 : 0), __ATOMIC_RELAXED);
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(pthread_create(&threads[i], NULL, loop_thread, l), 0);
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(pthread_join(threads[i], NULL), 0);
}

static inline void loop_clear(loop *l) {
    memset(l, 0, sizeof *l);
    l->twice = l->never = -1;
}

static inline xd_ctx *open_ctx(int threads, loop *own, xd_reduction reduction, xd_cpu_level level) {
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    desc.reduction = reduction;
    desc.cpu = level;
    if (own) desc.parallel_for.run = loop_run;
    if (own) desc.parallel_for.user = own;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    return ctx;
}

#endif
