/* A process that dies at a random moment of a random program of collectives: the others return at their deadline and name it.
 * XD_TEST_KILLS processes are killed (6), three seconds each. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "mpi_job.h"

enum { RANKS = 4, STEPS = 12, COUNT = 40000, SECONDS = 2, GRACE = 8 /* seconds, on a busy machine */ };

static int kills(void) {
    const char *wanted = getenv("XD_TEST_KILLS");
    return wanted && atoi(wanted) > 0 ? atoi(wanted) : 6;
}

/* ---- the inner job ---- */

/* What a seed draws, the same on every rank. */
typedef struct program {
    uint64_t state;
    int victim, step; /* who dies, in which call */
    int looks;        /* at the clock, in this call, until then; 0 -> before it */
} program;

static int draw(program *p, int below) {
    p->state = p->state * 6364136223846793005u + 1442695040888963407u;
    return (int)((p->state >> 33) % (uint64_t)below);
}

static int looks_left = -1; /* of the victim, in its last call */

static double fatal_clock(void *user) {
    (void)user;
    if (looks_left >= 0 && looks_left-- == 0) _exit(0);
    return MPI_Wtime();
}

/* A call that the ranks draw together, on the world or on one of its pairs. */
static xd_result call(program *p, xd_comm *world, xd_comm *pair) {
    static const int sizes[] = { 1, 60, 3000, COUNT };
    static float send[RANKS * COUNT], recv[RANKS * COUNT];
    xd_comm *comm = draw(p, 3) ? world : pair;
    const int kind = draw(p, 10), root = draw(p, xd_comm_size(comm));
    const int64_t n = sizes[draw(p, 4)], counts[RANKS] = { n, n, n, n };
    const int peer = 1 - xd_comm_rank(pair);
    switch (kind) {
    case 0: return xd_barrier(comm);
    case 1: return xd_broadcast(comm, recv, n, XD_DTYPE_F32, root);
    case 2: return xd_all_reduce(comm, send, recv, n, XD_DTYPE_F32, XD_SUM);
    case 3: return xd_reduce_scatter(comm, send, recv, counts, XD_DTYPE_F32, XD_SUM);
    case 4: return xd_all_gather(comm, send, recv, counts, XD_DTYPE_F32);
    case 5: return xd_all_to_all(comm, send, counts, recv, counts, XD_DTYPE_F32);
    case 6: return xd_gather(comm, send, recv, counts, XD_DTYPE_F32, root);
    case 7: return xd_scatter(comm, send, recv, counts, XD_DTYPE_F32, root);
    case 8: return xd_agree(comm, XD_OK);
    default:
        if (peer) return xd_send(pair, send, n, XD_DTYPE_F32, peer);
        return xd_recv(pair, recv, n, XD_DTYPE_F32, peer);
    }
}

/* What needs nothing of the victim may still succeed; at the end all meet. */
static xd_result play(program *p, int rank, xd_comm *world, xd_comm *pair) {
    xd_result result = XD_OK;
    for (int i = 0; i < STEPS && result == XD_OK; i++) {
        if (rank == p->victim && i == p->step) looks_left = p->looks - 1;
        if (rank == p->victim && i == p->step && p->looks == 0) _exit(0);
        result = call(p, world, pair);
        if (rank == p->victim && i == p->step) _exit(0);
    }
    return result == XD_OK ? xd_barrier(world) : result;
}

static void check_survivor(program *p, xd_comm *world, xd_result result, double seconds) {
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    CHECK(result == XD_ERROR_TIMEOUT || result == XD_ERROR_PEER);
    CHECK_EQ_INT(error->culprit, p->victim);
    CHECK(seconds < SECONDS + GRACE);
    /* "rank 3", or "ranks 2,3": rank 2 waits for the dead one elsewhere, and has not come either */
    if (!strchr(error->message, '0' + p->victim)) CHECK_EQ_STR(error->message, "");
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    CHECK_EQ_INT(error->culprit, p->victim);
}

static int run_rank(int *argc, char ***argv) {
    const xd_ctx_desc desc = { .clock = { fatal_clock, NULL }, .timeout_seconds = SECONDS };
    program p = { .state = (uint64_t)atoi((*argv)[2]) };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL, *pair = NULL;
    MPI_Init(argc, argv);
    if (xd_ctx_create(&desc, &ctx) != XD_OK || xd_comm_mpi(ctx, NULL, &world) != XD_OK) return 1;
    const int rank = xd_comm_rank(world);
    p.victim = draw(&p, RANKS);
    p.step = draw(&p, STEPS);
    p.looks = draw(&p, 6);
    CHECK_EQ_INT(xd_comm_split(world, rank / 2, rank, &pair), XD_OK);
    CHECK_EQ_INT(xd_barrier(pair), XD_OK); /* the first call has the longer deadline */
    const double begin = MPI_Wtime();
    const xd_result result = play(&p, rank, world, pair);
    check_survivor(&p, world, result, MPI_Wtime() - begin);
    job_survived(rank);
    return 0;
}

/* ---- the outer one ---- */

XD_TEST(a_process_that_dies_at_any_moment_of_any_program_is_named_by_the_survivors) {
    if (!job_is_open_mpi()) SKIP("mpirun is not Open MPI's, which can keep the other processes alive");
    const char *first = getenv("XD_TEST_SEED");
    for (int i = 0; i < kills(); i++) {
        const int seed = (first ? atoi(first) : 1) + i, count = job_count_survivors(RANKS, seed);
        CHECK_EQ_INT(count, RANKS - 1);
        if (count != RANKS - 1) printf("seed %d\n", seed);
    }
}

int main(int argc, char **argv) {
    return job_main(argc, argv, run_rank);
}
