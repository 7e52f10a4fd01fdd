/* Collectives between ranks that are threads, compared with a naive version: one shared sum behind a mutex. Built with
 * -DBENCH_MPI by mpicc and run by mpirun -n N: compared with MPI's collectives between N processes.
 *
 *     make bench-all  or      build/bench/comm [-J FILE]      mpirun -n 2 build/bench/comm_mpi [-J FILE]
 *
 * Ranks are pinned, one after another over the cores; "free" rows leave them to the system. With more ranks than
 * cores the rows show what waiting costs when a rank cannot run. */
#if defined(__linux__)
#    define _GNU_SOURCE /* sched_setaffinity */
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"

#include <pthread.h>
#include <sched.h>

#if defined(BENCH_MPI)
#    define OMPI_SKIP_MPICXX 1
#    include <mpi.h>
#endif

enum { RANKS_MAX = 8, CORES_MAX = 64 };

/* EXCHANGE is a step of a ring, as attention over split sequences makes it: to the next rank, from the one before. */
typedef enum team_operation { BARRIER, ALL_REDUCE, REDUCE_SCATTER, SCATTER, EXCHANGE } team_operation;

/* The naive meeting: the last to arrive wakes the others. */
typedef struct naive_team {
    pthread_mutex_t mutex;
    pthread_cond_t all_here;
    int arrived, generation;
    int added;  /* ranks whose numbers are in sum */
    float *sum; /* [count] */
} naive_team;

typedef struct team_case {
    team_operation operation;
    int ranks, iterations;
    int64_t count;             /* elements of the whole payload */
    int64_t counts[RANKS_MAX]; /* reduce_scatter: what each rank receives */
    float *send[RANKS_MAX], *recv[RANKS_MAX];
    naive_team team;
    bool naive, pinned;
    double seconds; /* of one operation */
} team_case;

/* The calling thread on one core; core < 0 -> on any. */
static void pin(int core) {
#if defined(__linux__)
    const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < cores && i < CORES_MAX; i++)
        if (core < 0 || core % cores == i) CPU_SET(i, &set);
    sched_setaffinity(0, sizeof set, &set);
#else
    (void)core;
#endif
}

static void naive_barrier(team_case *c) {
    naive_team *t = &c->team;
    pthread_mutex_lock(&t->mutex);
    const int generation = t->generation;
    if (++t->arrived == c->ranks) {
        t->arrived = t->added = 0;
        t->generation++;
        pthread_cond_broadcast(&t->all_here);
    }
    while (generation == t->generation) pthread_cond_wait(&t->all_here, &t->mutex);
    pthread_mutex_unlock(&t->mutex);
}

/* The rank that an element comes from when nothing is added. */
static int sender(const team_case *c, int rank) {
    return c->operation == SCATTER ? 0 : (rank + c->ranks - 1) % c->ranks;
}

static void naive_operation(team_case *c, int rank) {
    naive_team *t = &c->team;
    naive_barrier(c); /* all have read the previous sum */
    if (c->operation == BARRIER) return;
    if (c->operation >= SCATTER) {
        const bool block = c->operation == SCATTER;
        const int64_t from = block ? xd_chunk(c->count, c->ranks, rank).begin : 0;
        const int64_t count = block ? c->counts[rank] : c->count;
        memcpy(c->recv[rank], c->send[sender(c, rank)] + from, (size_t)count * sizeof(float));
        naive_barrier(c);
        return;
    }
    pthread_mutex_lock(&t->mutex);
    if (t->added++ == 0) memset(t->sum, 0, (size_t)c->count * sizeof *t->sum);
    for (int64_t i = 0; i < c->count; i++) t->sum[i] += c->send[rank][i];
    pthread_mutex_unlock(&t->mutex);
    naive_barrier(c);
    const bool whole = c->operation == ALL_REDUCE;
    const int64_t begin = whole ? 0 : xd_chunk(c->count, c->ranks, rank).begin;
    memcpy(c->recv[rank], t->sum + begin, (size_t)(whole ? c->count : c->counts[rank]) * sizeof *t->sum);
}

/* A step of a ring: both messages together, so that no order of the ranks can block. */
static xd_result run_ring(const team_case *c, xd_comm *comm, const float *send, float *recv) {
    const int rank = xd_comm_rank(comm);
    const xd_collective both[2] = {
        { .kind = XD_COLLECTIVE_SEND,
          .send = send,
          .count = c->count,
          .dtype = XD_DTYPE_F32,
          .root = (rank + 1) % c->ranks },
        { .kind = XD_COLLECTIVE_RECV,
          .recv = recv,
          .count = c->count,
          .dtype = XD_DTYPE_F32,
          .root = sender(c, rank) },
    };
    return xd_exchange(comm, both, 2);
}

static xd_result run_operation(team_case *c, xd_comm *comm) {
    const int rank = xd_comm_rank(comm);
    const float *send = c->send[rank];
    float *recv = c->recv[rank];
    if (c->naive) {
        naive_operation(c, rank);
        return XD_OK;
    }
    switch (c->operation) {
    case ALL_REDUCE: return xd_all_reduce(comm, send, recv, c->count, XD_DTYPE_F32, XD_SUM);
    case REDUCE_SCATTER: return xd_reduce_scatter(comm, send, recv, c->counts, XD_DTYPE_F32, XD_SUM);
    case SCATTER: return xd_scatter(comm, send, recv, c->counts, XD_DTYPE_F32, 0);
    case EXCHANGE: return run_ring(c, comm, send, recv);
    default: return xd_barrier(comm);
    }
}

static xd_result run_rank(xd_comm *comm, void *state) {
    team_case *c = (team_case *)state;
    xd_result result = XD_OK;
    if (c->pinned) pin(xd_comm_rank(comm));
    for (int i = 0; i <= c->iterations / 5 && result == XD_OK; i++) result = run_operation(c, comm);
    if (result == XD_OK) result = xd_barrier(comm);
    const double begin = bench_now();
    for (int i = 0; i < c->iterations && result == XD_OK; i++) result = run_operation(c, comm);
    if (result == XD_OK) result = xd_barrier(comm);
    if (xd_comm_rank(comm) == 0) c->seconds = (bench_now() - begin) / c->iterations;
    pin(-1);
    return result;
}

static double measure(void *state, bool naive) {
    team_case *c = (team_case *)state;
    xd_error error;
    c->naive = naive;
    if (xd_run_threads(c->ranks, NULL, run_rank, c, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        exit(2);
    }
    return c->seconds;
}

static double measure_ours(void *state) {
    return measure(state, false);
}

/* ---- the other arm ---- */

#if defined(BENCH_MPI)

static const char other_name[] = "mpi";

/* Rank 0's command to the others: operation (-1: leave), elements, iterations. */
enum { ORDER_OPERATION, ORDER_COUNT, ORDER_ITERATIONS, ORDER_FIELDS };

static double run_mpi(const long *order) {
    int rank, size, counts[RANKS_MAX], places[RANKS_MAX];
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const int count = (int)order[ORDER_COUNT], iterations = (int)order[ORDER_ITERATIONS];
    for (int r = 0; r < size; r++) {
        const xd_interval piece = xd_chunk(count, size, r);
        counts[r] = (int)(piece.end - piece.begin);
        places[r] = (int)piece.begin;
    }
    float *send = (float *)calloc((size_t)count, sizeof *send),
          *recv = (float *)calloc((size_t)count, sizeof *recv);
    if (!send || !recv) exit(2);
    double begin = 0.0;
    pin(rank);
    for (int i = -iterations / 5 - 1; i < iterations; i++) {
        if (i == 0) MPI_Barrier(MPI_COMM_WORLD);
        if (i == 0) begin = bench_now();
        if (order[ORDER_OPERATION] == BARRIER)
            MPI_Barrier(MPI_COMM_WORLD);
        else if (order[ORDER_OPERATION] == ALL_REDUCE)
            MPI_Allreduce(send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        else if (order[ORDER_OPERATION] == SCATTER)
            MPI_Scatterv(send, counts, places, MPI_FLOAT, recv, counts[rank], MPI_FLOAT, 0, MPI_COMM_WORLD);
        else if (order[ORDER_OPERATION] == EXCHANGE)
            MPI_Sendrecv(send, count, MPI_FLOAT, (rank + 1) % size, 0, recv, count, MPI_FLOAT,
                         (rank + size - 1) % size, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Reduce_scatter(send, recv, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    const double seconds = (bench_now() - begin) / iterations;
    pin(-1);
    free(recv);
    free(send);
    return seconds;
}

static double measure_other(void *state) {
    const team_case *c = (const team_case *)state;
    long order[ORDER_FIELDS] = { c->operation, (long)c->count, c->iterations };
    for (int r = 1; r < c->ranks; r++) MPI_Send(order, ORDER_FIELDS, MPI_LONG, r, 0, MPI_COMM_WORLD);
    return run_mpi(order);
}

/* The other processes sleep while rank 0 measures threads: a blocking MPI call would keep their cores busy. */
static void serve(void) {
    for (;;) {
        const struct timespec nap = { 0, 200000 };
        long order[ORDER_FIELDS];
        int there = 0;
        MPI_Iprobe(0, 0, MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE);
        if (!there) {
            nanosleep(&nap, NULL);
            continue;
        }
        MPI_Recv(order, ORDER_FIELDS, MPI_LONG, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (order[ORDER_OPERATION] < 0) return;
        run_mpi(order);
    }
}

#else

static const char other_name[] = "naive";

static double measure_other(void *state) {
    return measure(state, true);
}

#endif

/* Small whole numbers: every order of additions gives the same sum. */
static float contribution(int rank, int64_t i) {
    return (float)((7 * i + rank) % 13);
}

/* The largest difference from the true results, ours or the naive ones. */
static double check(team_case *c, bool naive) {
    double error = 0.0;
    for (int r = 0; r < c->ranks; r++) memset(c->recv[r], 0xff, (size_t)c->count * sizeof(float)); /* NaN */
    measure(c, naive);
    if (c->operation == BARRIER) return 0.0;
    for (int r = 0; r < c->ranks; r++) {
        const bool whole = c->operation == ALL_REDUCE || c->operation == EXCHANGE,
                   sums = c->operation < SCATTER;
        const int64_t begin = whole ? 0 : xd_chunk(c->count, c->ranks, r).begin;
        for (int64_t i = 0; i < (whole ? c->count : c->counts[r]); i++) {
            double expected = 0.0;
            for (int k = 0; k < c->ranks; k++)
                if (sums || k == sender(c, r)) expected += (double)contribution(k, begin + i);
            if (!((double)c->recv[r][i] == expected)) error = fmax(error, 1.0);
        }
    }
    return error;
}

static void open_team(team_case *c, team_operation operation, int ranks, int64_t count) {
    memset(c, 0, sizeof *c);
    c->operation = operation;
    c->ranks = ranks;
    c->count = count;
    c->iterations = count >= 1 << 20 ? 3 : count >= 1 << 16 ? 20 : 1000;
    pthread_mutex_init(&c->team.mutex, NULL);
    pthread_cond_init(&c->team.all_here, NULL);
    c->team.sum = (float *)malloc((size_t)count * sizeof(float));
    for (int r = 0; r < ranks; r++) {
        c->counts[r] = xd_chunk(count, ranks, r).end - xd_chunk(count, ranks, r).begin;
        c->send[r] = (float *)malloc((size_t)count * sizeof(float));
        c->recv[r] = (float *)malloc((size_t)count * sizeof(float));
        if (!c->send[r] || !c->recv[r] || !c->team.sum) exit(2);
        for (int64_t i = 0; i < count; i++) c->send[r][i] = contribution(r, i);
    }
}

static void close_team(team_case *c) {
    for (int r = 0; r < c->ranks; r++) {
        free(c->send[r]);
        free(c->recv[r]);
    }
    free(c->team.sum);
    pthread_cond_destroy(&c->team.all_here);
    pthread_mutex_destroy(&c->team.mutex);
}

/* Minimal bytes: every rank's payload read once, every result written once. */
static bool bench_team(FILE *json, const bench_machine *m, team_operation operation, int ranks, int64_t count,
                       bool pinned) {
    static const char *const names[] = { "barrier", "all_reduce", "reduce_scatter", "scatter", "exchange" };
    const double payload = operation == BARRIER ? 0.0 : (double)count * sizeof(float);
    const double bytes = payload * (operation == REDUCE_SCATTER ? ranks + 1
                                    : operation == SCATTER      ? 2
                                                                : 2 * ranks);
    const double workers = ranks < m->cores ? ranks : (double)m->cores;
    char variant[64], shape[64];
    team_case c;
    open_team(&c, operation, ranks, count);
    c.pinned = pinned;
    const int length = snprintf(variant, sizeof variant, "%d ranks%s", ranks, pinned ? "" : ", free");
    if (operation != BARRIER)
        snprintf(variant + length, sizeof variant - (size_t)length,
                 payload < 1024 ? ", %.0f B" : ", %.0f KiB", payload < 1024 ? payload : payload / 1024);
    snprintf(shape, sizeof shape, "\"n\":%d,\"bytes\":%.0f,\"pinned\":%s", ranks, payload,
             pinned ? "true" : "false");
    const bench_row row = { names[operation],
                            variant,
                            shape,
                            operation == BARRIER ? "-" : "f32",
                            bytes,
                            m->copy * workers,
                            "copy of one thread x ranks that run",
                            fmax(check(&c, false), check(&c, true)),
                            0.0,
                            operation == BARRIER ? 0.0 : 0.85,
                            0.0 };
    const bench_arm ours = { "xdistill", &c, NULL, measure_ours },
                    other = { other_name, &c, NULL, measure_other };
    const bool good = bench_run(json, m, &row, &ours, &other);
    close_team(&c);
    return good;
}

static int bench_all(FILE *json, const bench_machine *m, const int *ranks, int rank_counts) {
    static const int64_t counts[] = { 64, 1 << 10, 1 << 18, 1 << 22 };
    int wrong = 0;
    for (int i = 0; i < rank_counts; i++) wrong += !bench_team(json, m, BARRIER, ranks[i], 1, true);
    for (int i = 0; i < rank_counts; i++) wrong += !bench_team(json, m, BARRIER, ranks[i], 1, false);
    for (int operation = ALL_REDUCE; operation <= EXCHANGE; operation++)
        for (int i = 0; i < rank_counts && ranks[i] < RANKS_MAX; i++)
            for (int k = 0; k < 4; k++)
                wrong += !bench_team(json, m, (team_operation)operation, ranks[i], counts[k], true);
    printf("# wrong results: %d\n", wrong);
    return wrong;
}

int main(int argc, char **argv) {
    int ranks[] = { 2, 4, RANKS_MAX }, rank_counts = 3;
#if defined(BENCH_MPI)
    int rank = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks[0]);
    rank_counts = ranks[0] <= RANKS_MAX;
    if (rank > 0) {
        serve();
        MPI_Finalize();
        return 0;
    }
#endif
    FILE *json = bench_open_json(argc, argv);
    const bench_machine machine = bench_measure_machine((size_t)128 << 20);
    bench_header(&machine, "collectives, ranks are threads");
    const int wrong = bench_all(json, &machine, ranks, rank_counts);
    if (json) fclose(json);
#if defined(BENCH_MPI)
    const long leave[ORDER_FIELDS] = { -1, 0, 0 };
    for (int r = 1; r < ranks[0]; r++) MPI_Send(leave, ORDER_FIELDS, MPI_LONG, r, 0, MPI_COMM_WORLD);
    MPI_Finalize();
#endif
    return wrong == 0 ? 0 : 1;
}
