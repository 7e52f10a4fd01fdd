/* A process that dies at a random moment of a random program of collectives: the others return at their deadline and name it.
 * XD_TEST_KILLS processes are killed (6), three seconds each. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "drawn_call.h"
#include "mpi_job.h"

enum { RANKS = DRAWN_RANKS, STEPS = 12, SECONDS = 2, GRACE = 8 /* seconds, on a busy machine */ };

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

static int looks_left = -1; /* of the victim, in its last call */

static double fatal_clock(void *user) {
    (void)user;
    if (looks_left >= 0 && looks_left-- == 0) _exit(0);
    return MPI_Wtime();
}

/* What needs nothing of the victim may still succeed; at the end all meet. */
static xd_result play(program *p, int rank, xd_comm *world, xd_comm *pair) {
    xd_result result = XD_OK;
    for (int i = 0; i < STEPS && result == XD_OK; i++) {
        if (rank == p->victim && i == p->step) looks_left = p->looks - 1;
        if (rank == p->victim && i == p->step && p->looks == 0) _exit(0);
        result = drawn_call(&p->state, world, pair);
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
    p.victim = drawn_number(&p.state, RANKS);
    p.step = drawn_number(&p.state, STEPS);
    p.looks = drawn_number(&p.state, 6);
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
    if (!job_keeps_others())
        SKIP("needs " JOB_LAUNCHER " of " JOB_NAME ", which can keep the other processes alive");
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
