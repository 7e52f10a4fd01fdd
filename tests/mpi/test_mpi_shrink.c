/* Processes of an MPI job whose world breaks go on in a smaller one, where the MPI library has recovery: up to three of four are
 * killed by SIGKILL, in calls and while the others make their next world; ranks that leave, and that live and do not come; and
 * what is refused. XD_TEST_KILLS programs (6), XD_TEST_SEED is the first seed. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "drawn_call.h"
#include "mpi_job.h"

#include <signal.h>
#include <time.h>

enum { RANKS = 4, STEPS = 10, COUNT = 30000, SECONDS = 20, LEAVES = 1000, DOES_NOT_COME };

/* ---- the inner job ---- */

static int looks_left = -1; /* of a victim at the clock, until it dies; -1 -> it lives */

static double fatal_clock(void *user) {
    (void)user;
    if (looks_left >= 0 && looks_left-- == 0) (void)raise(SIGKILL);
    return MPI_Wtime();
}

/* What a seed draws, the same on every rank: victims, each in a world made after those before it died, or while it is made. */
typedef struct program {
    uint64_t seed;
    int losses, victims[RANKS], steps[RANKS], looks[RANKS];
    int worlds[RANKS];     /* after so many, or more */
    bool shrinking[RANKS]; /* it dies while it makes the next one */
} program;

static program draw(uint64_t seed) {
    program p = { .seed = seed };
    uint64_t state = seed;
    int order[RANKS] = { 0, 1, 2, 3 };
    p.losses = 1 + drawn_number(&state, RANKS - 1);
    for (int i = 0; i < p.losses; i++) {
        const int k = i + drawn_number(&state, RANKS - i), victim = order[k];
        order[k] = order[i];
        order[i] = p.victims[i] = victim;
        p.steps[i] = drawn_number(&state, STEPS);
        p.looks[i] = drawn_number(&state, 8);
        p.shrinking[i] = i > 0 && drawn_number(&state, 2);
        if (i > 0) p.worlds[i] = p.worlds[i - 1] + !p.shrinking[i];
    }
    return p;
}

/* What a rank has of a world. */
typedef struct life {
    program p;
    xd_comm *world, *half;
    int worlds; /* made so far */
    int mine, ids[RANKS];
} life;

/* Which victim this rank is; -1: none. */
static int turn_of(const life *l) {
    int turn = l->p.losses - 1;
    while (turn >= 0 && l->p.victims[turn] != l->mine) turn--;
    return turn;
}

/* The sum over a group of numbers that say where they come from. */
static xd_result sum(const life *l, xd_comm *comm, int64_t count) {
    static int64_t send[COUNT], recv[COUNT];
    const int n = xd_comm_size(comm);
    int64_t ids = 0;
    long wrong = 0;
    for (int r = 0; r < n; r++) ids += l->ids[xd_comm_world_rank(comm, r)];
    for (int64_t i = 0; i < count; i++) send[i] = 1000000 * (int64_t)l->mine + i;
    XD_TRY(xd_all_reduce(comm, send, recv, count, XD_DTYPE_I64, XD_SUM));
    for (int64_t i = 0; i < count; i++) wrong += recv[i] != 1000000 * ids + n * i;
    CHECK_EQ_INT(wrong, 0);
    return XD_OK;
}

/* Who is in the world, and its groups. */
static xd_result settle(life *l) {
    const int n = xd_comm_size(l->world), rank = xd_comm_rank(l->world);
    int64_t counts[RANKS] = { 1, 1, 1, 1 };
    int32_t ids[RANKS] = { 0 };
    const int32_t mine = l->mine;
    XD_TRY(xd_all_gather(l->world, &mine, ids, counts, XD_DTYPE_I32));
    for (int r = 0; r < n; r++) {
        CHECK(r == 0 || ids[r] > ids[r - 1]); /* the old order */
        l->ids[r] = ids[r];
    }
    CHECK_EQ_INT(l->ids[rank], l->mine);
    return xd_comm_split(l->world, rank % 2, rank, &l->half);
}

/* A whole world: all meet at its end. */
static xd_result play(life *l) {
    uint64_t state = l->p.seed * 64 + (uint64_t)l->worlds;
    const int turn = turn_of(l);
    XD_TRY(settle(l));
    for (int i = 0; i < STEPS; i++) {
        const bool dies =
            turn >= 0 && l->worlds >= l->p.worlds[turn] && !l->p.shrinking[turn] && i == l->p.steps[turn];
        const int64_t count = drawn_number(&state, 2) ? COUNT : 5;
        if (dies) looks_left = l->p.looks[turn];
        XD_TRY(drawn_number(&state, 3) ? sum(l, l->world, count) : sum(l, l->half, count));
        if (dies) (void)raise(SIGKILL);
    }
    return xd_barrier(l->world);
}

static xd_result go_on(life *l) {
    const int turn = turn_of(l);
    xd_comm *next = NULL;
    const bool dies = turn >= 0 && l->p.shrinking[turn] && l->worlds >= l->p.worlds[turn];
    if (dies) looks_left = l->p.looks[turn];
    const xd_result result = xd_comm_shrink(l->world, 0.0, &next);
    if (dies) (void)raise(SIGKILL);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("%s\n", xd_last_error(xd_comm_ctx(l->world))->message);
    CHECK_EQ_INT(xd_barrier(l->world), XD_ERROR_PEER); /* it stays broken */
    xd_comm_destroy(l->half);
    xd_comm_destroy(l->world);
    l->half = NULL;
    l->world = next;
    l->worlds++;
    return result;
}

static void survive(life *l) {
    const double begin = MPI_Wtime();
    xd_comm *none = NULL;
    CHECK_EQ_INT(xd_barrier(l->world), XD_OK);
    CHECK_EQ_INT(xd_comm_shrink(l->world, 0.0, &none), XD_ERROR_STATE);
    CHECK_EQ_STR(xd_last_error(xd_comm_ctx(l->world))->message, "nothing has broken this world of 4 ranks");
    xd_result result = play(l);
    while (result == XD_ERROR_PEER || result == XD_ERROR_TIMEOUT) {
        CHECK_EQ_INT(result, XD_ERROR_PEER); /* at once, not at the deadline */
        if (go_on(l) != XD_OK) break;
        result = play(l);
    }
    CHECK_EQ_INT(result, XD_OK);
    CHECK_EQ_INT(xd_comm_size(l->world), RANKS - l->p.losses);
    for (int i = 0; i < l->p.losses; i++)
        for (int r = 0; r < xd_comm_size(l->world); r++) CHECK(l->ids[r] != l->p.victims[i]);
    CHECK(MPI_Wtime() - begin < SECONDS);
}

static void rest(void) {
    const struct timespec second = { 1, 0 };
    (void)nanosleep(&second, NULL);
}

/* Rank 1 leaves and lives: the others do not wait for it. */
static void leave_one(life *l) {
    xd_comm *next = NULL;
    xd_ctx *ctx = xd_comm_ctx(l->world);
    if (l->mine == 1) {
        xd_comm_abort(l->world);
        CHECK_EQ_INT(xd_comm_shrink(l->world, 0.0, &next), XD_ERROR_STATE);
        CHECK_EQ_STR(xd_last_error(ctx)->message, "rank 1 has left this world of 4 ranks already");
        rest();
        return;
    }
    CHECK_EQ_INT(xd_barrier(l->world), XD_ERROR_PEER);
    CHECK_EQ_INT(xd_comm_shrink(l->world, 0.0, &next), XD_OK);
    CHECK_EQ_INT(xd_comm_size(next), 3);
    CHECK_EQ_INT(xd_comm_rank(next), l->mine > 0 ? l->mine - 1 : 0);
    CHECK_EQ_INT(xd_barrier(next), XD_OK);
    CHECK_EQ_INT(xd_comm_shrink(l->world, 0.0, &next), XD_ERROR_STATE);
    CHECK_EQ_STR(xd_last_error(ctx)->message,
                 l->mine == 0   ? "rank 0 has gone on from this world of 4 ranks already"
                 : l->mine == 2 ? "rank 2 has gone on from this world of 4 ranks already"
                                : "rank 3 has gone on from this world of 4 ranks already");
    rest();
}

/* Rank 3 dies, and rank 1 comes when the time of the others is over: they fail, and it is alone. */
static void come_late(life *l) {
    xd_comm *next = NULL;
    xd_ctx *ctx = xd_comm_ctx(l->world);
    if (l->mine == 3) (void)raise(SIGKILL);
    CHECK_EQ_INT(xd_barrier(l->world), XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(ctx)->culprit, 3);
    if (l->mine != 1) {
        const double begin = MPI_Wtime();
        CHECK_EQ_INT(xd_comm_shrink(l->world, 0.5, &next), XD_ERROR_TIMEOUT);
        CHECK(MPI_Wtime() - begin > 0.4 && MPI_Wtime() - begin < SECONDS);
        CHECK_EQ_INT(xd_last_error(ctx)->culprit, 1);
        CHECK_EQ_STR(
            xd_last_error(ctx)->message,
            "rank 1 of 4 lives, and did not go on with the others before the deadline (in xd_comm_shrink)");
        CHECK_EQ_INT(xd_comm_shrink(l->world, 0.5, &next), XD_ERROR_STATE);
        rest();
        rest();
        return;
    }
    rest();
    CHECK_EQ_INT(xd_comm_shrink(l->world, 0.0, &next), XD_OK);
    CHECK_EQ_INT(xd_comm_size(next), 1);
    CHECK_EQ_INT(xd_barrier(next), XD_OK);
}

static int run_rank(int *argc, char ***argv) {
    const xd_ctx_desc desc = { .clock = { fatal_clock, NULL }, .timeout_seconds = SECONDS };
    const int what = atoi((*argv)[2]);
    life l = { .p = draw((uint64_t)what) };
    xd_ctx *ctx = NULL;
    (void)alarm(4 * SECONDS);
    MPI_Init(argc, argv);
    if (xd_ctx_create(&desc, &ctx) != XD_OK || xd_comm_mpi(ctx, NULL, &l.world) != XD_OK) return 1;
    l.mine = xd_comm_rank(l.world);
    CHECK_EQ_INT(xd_barrier(l.world), XD_OK);
    if (what == LEAVES)
        leave_one(&l);
    else if (what == DOES_NOT_COME)
        come_late(&l);
    else
        survive(&l);
    if (what < LEAVES)
        rest(); /* the end of one would be a loss to others that are still in their last call */
    job_survived(l.mine);
    return 0;
}

/* ---- the outer one ---- */

static bool recovers(void) {
#if defined(OMPI_HAVE_MPI_EXT_FTMPI)
    job_recovery = "--with-ft ulfm";
    return job_keeps_others();
#else
    (void)job_keeps_others;
    return false;
#endif
}

XD_TEST(processes_that_are_left_of_a_world_make_a_smaller_one_whoever_is_killed_and_when) {
    if (!recovers()) SKIP("this MPI has no recovery: Open MPI 5 has, with mpirun --with-ft ulfm");
    const char *first = getenv("XD_TEST_SEED"), *wanted = getenv("XD_TEST_KILLS");
    const int programs = wanted && atoi(wanted) > 0 ? atoi(wanted) : 6;
    for (int i = 0; i < programs; i++) {
        const int seed = (first ? atoi(first) : 1) + i, count = job_count_survivors(RANKS, seed);
        CHECK_EQ_INT(count, RANKS - draw((uint64_t)seed).losses);
        if (count != RANKS - draw((uint64_t)seed).losses) printf("seed %d\n", seed);
    }
}

XD_TEST(a_rank_that_has_left_is_not_waited_for) {
    if (!recovers()) SKIP("this MPI has no recovery: Open MPI 5 has, with mpirun --with-ft ulfm");
    CHECK_EQ_INT(job_count_survivors(RANKS, LEAVES), RANKS);
}

XD_TEST(a_rank_that_lives_and_does_not_come_ends_the_attempt_at_the_deadline) {
    if (!recovers()) SKIP("this MPI has no recovery: Open MPI 5 has, with mpirun --with-ft ulfm");
    CHECK_EQ_INT(job_count_survivors(RANKS, DOES_NOT_COME), RANKS - 1);
}

int main(int argc, char **argv) {
    return job_main(argc, argv, run_rank);
}
