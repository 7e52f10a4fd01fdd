/* Collectives between ranks that are threads, beside the naive way: one shared sum behind a mutex.
 *
 *     make bench      or      build/bench/comm [-J FILE]
 *
 * With more ranks than cores the rows show what waiting costs when a rank cannot run. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"

#include <pthread.h>

enum { RANKS_MAX = 8 };

typedef enum team_operation { BARRIER, ALL_REDUCE, REDUCE_SCATTER } team_operation;

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
    bool naive;
    double seconds; /* of one operation */
} team_case;

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

static void naive_operation(team_case *c, int rank) {
    naive_team *t = &c->team;
    naive_barrier(c); /* everybody has read the sum of the time before */
    if (c->operation == BARRIER) return;
    pthread_mutex_lock(&t->mutex);
    if (t->added++ == 0) memset(t->sum, 0, (size_t)c->count * sizeof *t->sum);
    for (int64_t i = 0; i < c->count; i++) t->sum[i] += c->send[rank][i];
    pthread_mutex_unlock(&t->mutex);
    naive_barrier(c);
    const bool whole = c->operation == ALL_REDUCE;
    const int64_t begin = whole ? 0 : xd_chunk(c->count, c->ranks, rank).begin;
    memcpy(c->recv[rank], t->sum + begin, (size_t)(whole ? c->count : c->counts[rank]) * sizeof *t->sum);
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
    default: return xd_barrier(comm);
    }
}

static xd_result run_rank(xd_comm *comm, void *state) {
    team_case *c = (team_case *)state;
    xd_result result = run_operation(c, comm);
    if (result == XD_OK) result = xd_barrier(comm);
    const double begin = bench_now();
    for (int i = 0; i < c->iterations && result == XD_OK; i++) result = run_operation(c, comm);
    if (result == XD_OK) result = xd_barrier(comm);
    if (xd_comm_rank(comm) == 0) c->seconds = (bench_now() - begin) / c->iterations;
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
static double measure_naive(void *state) {
    return measure(state, true);
}

/* Small whole numbers: every order of additions gives the same sum. */
static float contribution(int rank, int64_t i) {
    return (float)((7 * i + rank) % 13);
}

/* The largest difference from the true sums, for either arm. */
static double check(team_case *c, bool naive) {
    double error = 0.0;
    for (int r = 0; r < c->ranks; r++) memset(c->recv[r], 0xff, (size_t)c->count * sizeof(float)); /* NaN */
    measure(c, naive);
    if (c->operation == BARRIER) return 0.0;
    for (int r = 0; r < c->ranks; r++) {
        const bool whole = c->operation == ALL_REDUCE;
        const int64_t begin = whole ? 0 : xd_chunk(c->count, c->ranks, r).begin;
        for (int64_t i = 0; i < (whole ? c->count : c->counts[r]); i++) {
            double expected = 0.0;
            for (int k = 0; k < c->ranks; k++) expected += (double)contribution(k, begin + i);
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
    c->iterations = count >= 1 << 20 ? 3 : count >= 1 << 16 ? 20 : 500;
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
static bool bench_team(FILE *json, const bench_machine *m, team_operation operation, int ranks,
                       int64_t count) {
    static const char *const names[] = { "barrier", "all_reduce", "reduce_scatter" };
    const double payload = operation == BARRIER ? 0.0 : (double)count * sizeof(float);
    const double bytes = payload * (operation == ALL_REDUCE ? 2 * ranks : ranks + 1);
    const double workers = ranks < m->cores ? ranks : (double)m->cores;
    char variant[64], shape[64];
    team_case c;
    open_team(&c, operation, ranks, count);
    const int length = snprintf(variant, sizeof variant, "%d ranks", ranks);
    if (operation != BARRIER)
        snprintf(variant + length, sizeof variant - (size_t)length, ", %lld KiB", (long long)payload >> 10);
    snprintf(shape, sizeof shape, "\"n\":%d,\"bytes\":%.0f", ranks, payload);
    const bench_row row = { names[operation],
                            variant,
                            shape,
                            operation == BARRIER ? "-" : "f32",
                            bytes,
                            m->copy * workers,
                            "copy of one thread x ranks that run",
                            fmax(check(&c, false), check(&c, true)),
                            0.0 };
    const bench_arm ours = { "xdistill", &c, NULL, measure_ours },
                    naive = { "naive", &c, NULL, measure_naive };
    const bool good = bench_run(json, m, &row, &ours, &naive);
    close_team(&c);
    return good;
}

int main(int argc, char **argv) {
    static const int64_t counts[] = { 1 << 10, 1 << 18, 1 << 22 };
    static const int ranks[] = { 2, 4, 8 };
    FILE *json = bench_open_json(argc, argv);
    const bench_machine machine = bench_measure_machine((size_t)128 << 20);
    int wrong = 0;
    bench_header(&machine, "collectives, ranks are threads");
    for (int i = 0; i < 3; i++) wrong += !bench_team(json, &machine, BARRIER, ranks[i], 1);
    for (int operation = ALL_REDUCE; operation <= REDUCE_SCATTER; operation++)
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 3; k++)
                wrong += !bench_team(json, &machine, (team_operation)operation, ranks[i], counts[k]);
    printf("# wrong results: %d\n", wrong);
    if (json) fclose(json);
    return wrong == 0 ? 0 : 1;
}
