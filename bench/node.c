/* Collectives between processes of one machine: xd_comm_node beside MPI's own collectives, in the same processes in turn. A row
 * is one operation of one size, f32, from 8 bytes to 64 MiB. Built with -DBENCH_MPI by mpicc; otherwise there is nothing to
 * compare with.
 *
 *     make bench-all  or      mpirun -n 2 build/bench/node_mpi [-J FILE]
 *
 * Ranks are pinned, one after another over the cores. With more ranks than cores the rows show what waiting costs when a rank
 * cannot run. */
#if defined(__linux__)
#    define _GNU_SOURCE /* sched_setaffinity */
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"

#include <sched.h>

#if defined(BENCH_MPI)

#    define OMPI_SKIP_MPICXX 1
#    include <mpi.h>

enum { RANKS_MAX = 64, CORES_MAX = 64 };

typedef enum node_operation { BARRIER, ALL_REDUCE, REDUCE_SCATTER, MESSAGE, OPERATIONS } node_operation;

/* What rank 0 has the others do: operation (-1: leave), elements, iterations, whether by MPI. */
enum { ORDER_OPERATION, ORDER_COUNT, ORDER_ITERATIONS, ORDER_MPI, ORDER_FIELDS };

typedef struct node_case {
    long order[ORDER_FIELDS];
    double error; /* the largest that a rank has seen */
} node_case;

static xd_comm *world;
static int rank, size;

static void pin(int core) {
#    if defined(__linux__)
    const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < cores && i < CORES_MAX; i++)
        if (core % cores == i) CPU_SET(i, &set);
    sched_setaffinity(0, sizeof set, &set);
#    else
    (void)core;
#    endif
}

/* Small whole numbers: every order of additions gives the same sum. */
static float contribution(int from, int64_t i) {
    return (float)((7 * i + from) % 13);
}

/* The arrays of one order on one rank. */
typedef struct arrays {
    float *send, *recv;
    int64_t counts[RANKS_MAX], begin, own;
    int mpi_counts[RANKS_MAX];
} arrays;

static arrays open_arrays(int64_t count) {
    arrays a;
    a.send = (float *)malloc((size_t)count * sizeof *a.send);
    a.recv = (float *)malloc((size_t)count * sizeof *a.recv);
    if (!a.send || !a.recv) exit(2);
    for (int64_t i = 0; i < count; i++) a.send[i] = contribution(rank, i);
    memset(a.recv, 0xff, (size_t)count * sizeof *a.recv); /* NaN */
    for (int r = 0; r < size; r++) {
        const xd_interval piece = xd_chunk(count, size, r);
        a.counts[r] = piece.end - piece.begin;
        a.mpi_counts[r] = (int)a.counts[r];
        if (r == rank) a.begin = piece.begin;
    }
    a.own = a.counts[rank];
    return a;
}

static void by_mpi(int operation, const arrays *a, int count) {
    switch (operation) {
    case ALL_REDUCE: MPI_Allreduce(a->send, a->recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case REDUCE_SCATTER:
        MPI_Reduce_scatter(a->send, a->recv, a->mpi_counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case MESSAGE:
        if (rank == 0) MPI_Send(a->send, count, MPI_FLOAT, 1, 1, MPI_COMM_WORLD);
        if (rank == 1) MPI_Recv(a->recv, count, MPI_FLOAT, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(a->send, count, MPI_FLOAT, 0, 1, MPI_COMM_WORLD);
        if (rank == 0) MPI_Recv(a->recv, count, MPI_FLOAT, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        break;
    default: MPI_Barrier(MPI_COMM_WORLD);
    }
}

static xd_result by_us(int operation, const arrays *a, int64_t count) {
    switch (operation) {
    case ALL_REDUCE: return xd_all_reduce(world, a->send, a->recv, count, XD_DTYPE_F32, XD_SUM);
    case REDUCE_SCATTER: return xd_reduce_scatter(world, a->send, a->recv, a->counts, XD_DTYPE_F32, XD_SUM);
    case MESSAGE:
        if (rank > 1) return XD_OK;
        if (rank == 0) XD_TRY(xd_send(world, a->send, count, XD_DTYPE_F32, 1));
        XD_TRY(xd_recv(world, a->recv, count, XD_DTYPE_F32, 1 - rank));
        return rank == 1 ? xd_send(world, a->send, count, XD_DTYPE_F32, 0) : XD_OK;
    default: return xd_barrier(world);
    }
}

/* 1 when an element is not what it has to be. */
static double check(int operation, const arrays *a, int64_t count) {
    const bool block = operation == REDUCE_SCATTER;
    const int64_t begin = block ? a->begin : 0, n = block ? a->own : count;
    if (operation == BARRIER || (operation == MESSAGE && rank > 1)) return 0.0;
    for (int64_t i = 0; i < n; i++) {
        float expected = operation == MESSAGE ? contribution(1 - rank, i) : 0.0f;
        for (int r = 0; r < size && operation != MESSAGE; r++) expected += contribution(r, begin + i);
        if (!(a->recv[i] == expected)) return 1.0;
    }
    return 0.0;
}

/* Seconds of one operation; all ranks call it with the same order. */
static double obey(const long *order, double *error) {
    const int operation = (int)order[ORDER_OPERATION], count = (int)order[ORDER_COUNT];
    const long iterations = order[ORDER_ITERATIONS];
    arrays a = open_arrays(count);
    double begin = 0.0, mine, worst = 0.0;
    for (long i = -iterations / 5 - 1; i < iterations; i++) {
        if (i == 0) MPI_Barrier(MPI_COMM_WORLD);
        if (i == 0) begin = bench_now();
        if (order[ORDER_MPI])
            by_mpi(operation, &a, count);
        else if (by_us(operation, &a, count) != XD_OK)
            exit(2);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    const double seconds = (bench_now() - begin) / (double)iterations;
    mine = check(operation, &a, count);
    MPI_Allreduce(&mine, &worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (error && worst > *error) *error = worst;
    free(a.recv);
    free(a.send);
    return seconds;
}

static double command(node_case *c, long by) {
    c->order[ORDER_MPI] = by;
    for (int r = 1; r < size; r++) MPI_Send(c->order, ORDER_FIELDS, MPI_LONG, r, 0, MPI_COMM_WORLD);
    return obey(c->order, &c->error);
}

static double measure_ours(void *state) {
    return command((node_case *)state, 0);
}

static double measure_mpi(void *state) {
    return command((node_case *)state, 1);
}

static void serve(void) {
    for (;;) {
        long order[ORDER_FIELDS];
        MPI_Recv(order, ORDER_FIELDS, MPI_LONG, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (order[ORDER_OPERATION] < 0) return;
        obey(order, NULL);
    }
}

/* Minimal bytes: every rank's payload read once, every result written once. */
static bool bench_operation(FILE *json, const bench_machine *m, node_operation operation, long bytes) {
    static const char *const names[] = { "barrier", "all_reduce", "reduce_scatter", "there_and_back" };
    const double payload = operation == BARRIER ? 0.0 : (double)bytes;
    const double moved = payload * (operation == ALL_REDUCE       ? 2 * size
                                    : operation == REDUCE_SCATTER ? size + 1
                                                                  : 4);
    const double workers = size < m->cores ? size : (double)m->cores;
    char variant[64], shape[64];
    node_case c;
    memset(&c, 0, sizeof c);
    c.order[ORDER_OPERATION] = (long)operation;
    c.order[ORDER_COUNT] = operation == BARRIER ? 1 : bytes / (long)sizeof(float);
    c.order[ORDER_ITERATIONS] = bytes >= 1 << 24 ? 3 : bytes >= 1 << 20 ? 20 : bytes >= 1 << 16 ? 100 : 2000;
    if (size > m->cores && bytes < 1 << 16) c.order[ORDER_ITERATIONS] = 300;
    snprintf(variant, sizeof variant, payload < 1024 ? "%d processes, %.0f B" : "%d processes, %.0f KiB",
             size, payload < 1024 ? payload : payload / 1024);
    snprintf(shape, sizeof shape, "\"n\":%d,\"bytes\":%.0f", size, payload);
    measure_ours(&c);
    const bench_row row = { names[operation],
                            variant,
                            shape,
                            operation == BARRIER ? "-" : "f32",
                            operation == BARRIER ? 0.0 : moved,
                            m->copy * workers,
                            "copy of one thread x ranks that run",
                            c.error,
                            0.0,
                            0.0,
                            0.0 };
    const bench_arm ours = { "xdistill", &c, NULL, measure_ours }, other = { "mpi", &c, NULL, measure_mpi };
    return bench_run(json, m, &row, &ours, &other);
}

static int bench_all(FILE *json, const bench_machine *m) {
    static const long sizes[] = {
        8, 256, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20
    };
    int wrong = !bench_operation(json, m, BARRIER, 0);
    for (int operation = ALL_REDUCE; operation < OPERATIONS; operation++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            wrong += !bench_operation(json, m, (node_operation)operation, sizes[i]);
    printf("# wrong results: %d\n", wrong);
    return wrong;
}

static xd_ctx *join(void) {
    char name[48];
    long process = (long)getpid();
    xd_ctx *ctx = NULL;
    MPI_Bcast(&process, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    snprintf(name, sizeof name, "bench-%ld", process);
    const xd_node_desc desc = { name, rank, size, 30.0, 0 };
    if (xd_ctx_create(NULL, &ctx) != XD_OK) exit(2);
    if (xd_comm_node(ctx, &desc, &world) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, xd_last_error(ctx)->message);
        exit(2);
    }
    return ctx;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    pin(rank);
    xd_ctx *ctx = join();
    int wrong = 0;
    if (rank > 0) {
        serve();
    } else {
        const long leave[ORDER_FIELDS] = { -1, 0, 0, 0 };
        FILE *json = bench_open_json(argc, argv);
        const bench_machine machine = bench_measure_machine((size_t)128 << 20);
        bench_header(&machine, "collectives, ranks are processes");
        wrong = bench_all(json, &machine);
        if (json) fclose(json);
        for (int r = 1; r < size; r++) MPI_Send(leave, ORDER_FIELDS, MPI_LONG, r, 0, MPI_COMM_WORLD);
    }
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    MPI_Finalize();
    return wrong == 0 ? 0 : 1;
}

#else

int main(void) {
    printf("skipped: built without MPI\n");
    return 0;
}

#endif
