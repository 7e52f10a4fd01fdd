/* A process that dies without a word: the others return at their deadline and name it. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "mpi_job.h"

#include <signal.h>
#include <time.h>

enum { RANKS = 4, VICTIM = 2, COUNT = 100000, STOPS = 100 /* in place of a kind of collective */ };

#define SETTLE_SECONDS 0.5

/* ---- the inner job ---- */

/* A clock that stands still until all survivors wait: however long the machine keeps a process from running, only
 * the dead one is late. The first look of an armed rank is its call's deadline, the second is a wait. */
static MPI_Comm survivors;
static MPI_Request all_wait = MPI_REQUEST_NULL;
static int looks = -1, waits_from = 2, all_waited;
static double waits_since; /* of MPI's clock */
static bool has_begun;     /* all_wait */

static bool stops, resumed; /* this process, at its second look */

static double patient_clock(void *user) {
    (void)user;
    if (stops) {
        if (looks >= 0 && ++looks == 2) {
            raise(SIGSTOP);
            resumed = true;
        }
        /* It goes on, as messages may be left that nobody takes any more. */
        return resumed ? 1e9 + MPI_Wtime() : 0.0;
    }
    if (looks >= 0 && !has_begun && ++looks >= waits_from && MPI_Wtime() >= waits_since) {
        MPI_Ibarrier(survivors, &all_wait);
        has_begun = true;
    }
    if (has_begun && !all_waited) MPI_Test(&all_wait, &all_waited, MPI_STATUS_IGNORE);
    return all_waited ? 1e9 + MPI_Wtime() : 0.0;
}

static xd_result call(xd_comm *world, int kind) {
    static float send[RANKS * COUNT], recv[RANKS * COUNT];
    const int64_t counts[RANKS] = { COUNT, COUNT, COUNT, COUNT };
    switch (kind) {
    case XD_COLLECTIVE_BARRIER: return xd_barrier(world);
    case XD_COLLECTIVE_BROADCAST: return xd_broadcast(world, recv, COUNT, XD_DTYPE_F32, 0);
    case XD_COLLECTIVE_ALL_REDUCE: return xd_all_reduce(world, send, recv, COUNT, XD_DTYPE_F32, XD_SUM);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xd_reduce_scatter(world, send, recv, counts, XD_DTYPE_F32, XD_SUM);
    case XD_COLLECTIVE_ALL_GATHER: return xd_all_gather(world, send, recv, counts, XD_DTYPE_F32);
    case XD_COLLECTIVE_ALL_TO_ALL: return xd_all_to_all(world, send, counts, recv, counts, XD_DTYPE_F32);
    case XD_COLLECTIVE_GATHER: return xd_gather(world, send, recv, counts, XD_DTYPE_F32, 0);
    default: return xd_scatter(world, send, recv, counts, XD_DTYPE_F32, 0);
    }
}

static void survive(xd_comm *world, int kind) {
    xd_ctx *ctx = xd_comm_ctx(world);
    looks = 0;
    const xd_result result = call(world, kind);
    CHECK(result == XD_ERROR_TIMEOUT || result == XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(ctx)->culprit, VICTIM);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 2") != NULL);
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

/* The victim goes when it knows that nobody still waits for a message of the barrier: what a process has sent may
 * die with it. */
static void say_goodbye(int rank) {
    char word = 0;
    for (int r = 0; rank == VICTIM && r < RANKS; r++)
        if (r != VICTIM) MPI_Recv(&word, 1, MPI_CHAR, r, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank == VICTIM) _exit(0);
    MPI_Send(&word, 1, MPI_CHAR, VICTIM, 0, MPI_COMM_WORLD);
}

/* What ps shows: 'T' for one that is stopped, 'Z' for one that has ended and of which its parent has not heard; 0: there is none. */
static char state_of(int process) {
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%*d %*s %c", &state) != 1) state = 0;
    if (file) fclose(file);
    return state;
}

static bool has_ended(int process) {
    const char state = state_of(process);
    return state == 0 || state == 'Z';
}

/* The victim stops inside its call, beyond the others' deadline, and goes on when they are done: it names itself. They call MPI
 * until it has ended: their notices may have to wait where it has stopped taking messages (MPICH). */
static void stop_and_go(xd_comm *world, int rank) {
    int process = (int)getpid();
    const struct timespec nap = { 0, 10000000 };
    MPI_Bcast(&process, 1, MPI_INT, VICTIM, MPI_COMM_WORLD);
    if (rank == VICTIM) {
        stops = true;
        looks = 0;
        CHECK_EQ_INT(call(world, XD_COLLECTIVE_ALL_REDUCE), XD_ERROR_PEER);
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, VICTIM);
        return;
    }
    while (state_of(process) != 'T' && !has_ended(process)) nanosleep(&nap, NULL);
    /* Beyond what the records of the call take, which the victim has sent, and the survivors' own messages, which some
     * MPI moves in many pieces. */
    waits_from = 1000;
    waits_since = MPI_Wtime() + SETTLE_SECONDS;
    survive(world, XD_COLLECTIVE_ALL_REDUCE);
    MPI_Barrier(survivors);
    for (int i = 0, there; i < 2000 && !has_ended(process); i++) {
        if (rank == 0) (void)kill((pid_t)process, SIGCONT);
        MPI_Iprobe(MPI_ANY_SOURCE, 0, survivors, &there, MPI_STATUS_IGNORE);
        nanosleep(&nap, NULL);
    }
}

static int run_rank(int *argc, char ***argv) {
    const xd_ctx_desc desc = { .clock = { patient_clock, NULL } };
    const int kind = atoi((*argv)[2]);
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    int rank = 0;
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank == VICTIM ? MPI_UNDEFINED : 0, 0, &survivors);
    if (xd_ctx_create(&desc, &ctx) != XD_OK ||
        xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = MPI_COMM_WORLD }, &world) != XD_OK)
        return 1;
    CHECK_EQ_INT(xd_barrier(world), XD_OK); /* the first call has the longer deadline */
    if (kind == STOPS) {
        stop_and_go(world, rank);
    } else {
        say_goodbye(rank);
        survive(world, kind);
    }
    job_survived(rank);
    return 0;
}

/* ---- the outer one ---- */

XD_TEST(a_process_that_dies_is_named_by_the_survivors_of_any_collective) {
    if (!job_keeps_others())
        SKIP("needs " JOB_LAUNCHER " of " JOB_NAME ", which can keep the other processes alive");
    for (int kind = XD_COLLECTIVE_BARRIER; kind <= XD_COLLECTIVE_SCATTER; kind++)
        CHECK_EQ_INT(job_count_survivors(RANKS, kind), RANKS - 1);
}

XD_TEST(a_process_that_was_stopped_names_itself) {
    if (!job_keeps_others())
        SKIP("needs " JOB_LAUNCHER " of " JOB_NAME ", which can keep the other processes alive");
    CHECK_EQ_INT(job_count_survivors(RANKS, STOPS), RANKS);
}

int main(int argc, char **argv) {
    return job_main(argc, argv, run_rank);
}
