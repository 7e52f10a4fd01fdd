/* Two ranks that carry out what rank 0 tells them: threads or, with -DBENCH_MPI and mpirun -n 2, processes. Between orders the
 * other rank sleeps, so that what rank 0 measures alone, or another program measures, has the machine to itself. Each rank has a
 * communicator of each reduction mode. Whatever fails ends the program: a benchmark has nothing to save. */
#ifndef XDISTILL_BENCH_TEAM_H
#define XDISTILL_BENCH_TEAM_H

#if defined(BENCH_MPI)
#    include "xdistill_mpi.h"
#else
#    include <pthread.h>
#endif

enum { TEAM_RANKS = 2, TEAM_LEAVE = -1 };
typedef enum team_mode { TEAM_DETERMINISTIC, TEAM_INVARIANT, TEAM_MODES } team_mode;

/* What to do, and with which of the program's things. */
typedef struct team_order {
    int what, which;
} team_order;

typedef struct team {
#if !defined(BENCH_MPI)
    xd_thread_world *world[TEAM_MODES];
    pthread_mutex_t mutex;
    pthread_cond_t told;
    team_order order; /* the last one */
    int number;       /* of orders so far */
    int taken;        /* of these, by the other rank: the next one waits for it */
#endif
    void (*work)(void *rank, void *argument);
    void *argument;
} team;

typedef struct team_rank {
    team *team;
    int rank;
    int heard; /* orders so far */
    xd_ctx *ctx[TEAM_MODES];
    xd_comm *comm[TEAM_MODES];
} team_rank;

static void team_require(xd_ctx *ctx, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), ctx ? xd_last_error(ctx)->message : "");
    exit(2);
}

/* Rank 0 to the other. */
static void team_tell(team_rank *me, team_order order) {
#if defined(BENCH_MPI)
    (void)me;
    MPI_Send(&order, 2, MPI_INT, 1, 0, MPI_COMM_WORLD);
#else
    pthread_mutex_lock(&me->team->mutex);
    while (me->team->taken != me->team->number) pthread_cond_wait(&me->team->told, &me->team->mutex);
    me->team->order = order;
    me->team->number++;
    pthread_cond_signal(&me->team->told);
    pthread_mutex_unlock(&me->team->mutex);
#endif
}

/* The other's next order. A blocking call of MPI would keep its core busy. */
static team_order team_listen(team_rank *me) {
    team_order order = { TEAM_LEAVE, 0 };
#if defined(BENCH_MPI)
    const struct timespec nap = { 0, 200000 };
    for (int there = 0; !there;) {
        MPI_Iprobe(0, 0, MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE);
        if (!there) nanosleep(&nap, NULL);
    }
    MPI_Recv(&order, 2, MPI_INT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    me->heard++;
#else
    team *t = me->team;
    pthread_mutex_lock(&t->mutex);
    while (me->heard == t->number) pthread_cond_wait(&t->told, &t->mutex);
    me->heard = t->taken = t->number;
    order = t->order;
    pthread_cond_signal(&t->told);
    pthread_mutex_unlock(&t->mutex);
#endif
    return order;
}

static void team_join(team_rank *me) {
    static const xd_reduction modes[] = { XD_REDUCTION_DETERMINISTIC, XD_REDUCTION_INVARIANT };
    for (int mode = 0; mode < TEAM_MODES; mode++) {
        xd_ctx_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.reduction = modes[mode];
        desc.timeout_seconds = 600.0; /* the other rank may measure alone meanwhile */
        team_require(NULL, xd_ctx_create(&desc, &me->ctx[mode]));
#if defined(BENCH_MPI)
        team_require(me->ctx[mode], xd_comm_mpi(me->ctx[mode], NULL, &me->comm[mode]));
#else
        team_require(me->ctx[mode],
                     xd_thread_world_join(me->team->world[mode], me->ctx[mode], me->rank, &me->comm[mode]));
#endif
    }
}

static void team_leave(team_rank *me) {
    for (int mode = 0; mode < TEAM_MODES; mode++) {
        xd_comm_destroy(me->comm[mode]);
        xd_ctx_destroy(me->ctx[mode]);
    }
}

#if defined(BENCH_MPI)

static const char team_transport[] = "mpi";

/* Runs `work` on both ranks, and waits for them. */
static void team_run(void (*work)(void *rank, void *argument), void *argument) {
    team t = { work, argument };
    team_rank me;
    int provided;
    memset(&me, 0, sizeof me);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &me.rank);
    me.team = &t;
    team_join(&me);
    work(&me, argument);
    team_leave(&me);
    MPI_Finalize();
}

#else

static const char team_transport[] = "threads";

static void *team_thread(void *rank) {
    team_rank *me = (team_rank *)rank;
    team_join(me);
    me->team->work(me, me->team->argument);
    team_leave(me);
    return NULL;
}

/* Runs `work` on both ranks, and waits for them. */
static void team_run(void (*work)(void *rank, void *argument), void *argument) {
    team t;
    team_rank ranks[TEAM_RANKS];
    pthread_t other;
    xd_ctx *ctx = NULL;
    memset(&t, 0, sizeof t);
    memset(ranks, 0, sizeof ranks);
    t.work = work;
    t.argument = argument;
    pthread_mutex_init(&t.mutex, NULL);
    pthread_cond_init(&t.told, NULL);
    team_require(NULL, xd_ctx_create(NULL, &ctx));
    for (int mode = 0; mode < TEAM_MODES; mode++)
        team_require(ctx, xd_thread_world_create(ctx, &(xd_thread_world_desc){ TEAM_RANKS }, &t.world[mode]));
    for (int r = 0; r < TEAM_RANKS; r++) {
        ranks[r].team = &t;
        ranks[r].rank = r;
    }
    if (pthread_create(&other, NULL, team_thread, &ranks[1]) != 0) exit(2);
    team_thread(&ranks[0]);
    pthread_join(other, NULL);
    for (int mode = 0; mode < TEAM_MODES; mode++) xd_thread_world_destroy(t.world[mode]);
    xd_ctx_destroy(ctx);
    pthread_cond_destroy(&t.told);
    pthread_mutex_destroy(&t.mutex);
}

#endif

#endif
