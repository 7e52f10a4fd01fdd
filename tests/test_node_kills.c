/* Processes that die or stop at a random moment, of a program of collectives or while they join: the others name them at once, or
 * at the deadline, and nothing is left in /dev/shm. XD_TEST_KILLS processes are killed (40), some milliseconds each; XD_TEST_SEED is
 * the first seed. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "drawn_call.h"
#include "kills.h"
#include "node_world.h"
#include "xd_test.h"

enum {
    RANKS = DRAWN_RANKS,
    KILLS = 40,
    GRACE = 5 /* seconds, on a busy machine; one when the number is given */
};

/* What parent and children share. */
typedef struct scene {
    uint64_t seed;
    int victim;
    uint32_t joined;      /* ranks; atomic */
    double killed;        /* when; atomic enough: written before the survivors can know */
    double most;          /* seconds from there to a survivor's return, on any rank */
    uint32_t named;       /* survivors that named the victim; atomic */
    uint32_t late, peers; /* who of them got TIMEOUT, and PEER; atomic */
} scene;

/* What a survivor has got. */
static void judge(scene *s, const xd_error *error) {
    const double since = now() - s->killed;
    CHECK(error->result == XD_ERROR_PEER || error->result == XD_ERROR_TIMEOUT);
    CHECK_EQ_INT(error->culprit, s->victim);
    if (since > s->most) s->most = since;
    __atomic_add_fetch(error->result == XD_ERROR_PEER ? &s->peers : &s->late, 1, __ATOMIC_RELAXED);
    if (error->culprit == s->victim) __atomic_add_fetch(&s->named, 1, __ATOMIC_RELAXED);
}

/* Calls until the victim is missed. */
static xd_result play(xd_comm *world, void *argument) {
    scene *s = (scene *)argument;
    const int rank = xd_comm_rank(world);
    xd_comm *pair = NULL;
    uint64_t state = s->seed;
    CHECK_EQ_INT(xd_comm_split(world, rank / 2, rank, &pair), XD_OK);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    __atomic_add_fetch(&s->joined, 1, __ATOMIC_RELEASE);
    xd_result result = XD_OK;
    while (result == XD_OK) result = drawn_call(&state, world, pair);
    if (rank != s->victim) judge(s, xd_last_error(xd_comm_ctx(world)));
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, s->victim);
    xd_comm_destroy(pair);
    return XD_OK;
}

/* Waits for all; the victim, when it was stopped, goes on after the others. */
static void reap(const node_start *start, pid_t *children, node_end *ends, int signal_number) {
    const int victim = start->victim - 1;
    for (int k = 1; k <= start->ranks; k++) {
        const int r = (victim + k) % start->ranks;
        if (r == victim && signal_number == SIGSTOP) kill(children[r], SIGCONT);
        CHECK(waitpid(children[r], &ends[r].status, 0) == children[r]);
        if (r == victim && signal_number == SIGKILL) continue;
        CHECK_EQ_INT(ends[r].status, 0);
        CHECK_EQ_INT(ends[r].failures, 0);
    }
}

/* One trial: the victim gets the signal within `window` microseconds after all have joined. */
static double strike(uint64_t seed, int signal_number, int window, const xd_ctx_desc *desc) {
    scene *s = (scene *)node_memory(sizeof *s);
    node_end *ends = (node_end *)node_memory(RANKS * sizeof *ends);
    pid_t children[RANKS];
    char name[32];
    uint64_t state = s->seed = seed;
    s->victim = drawn_number(&state, RANKS);
    const node_start start = {
        .ranks = RANKS, .victim = s->victim + 1, .desc = desc, .function = play, .argument = s
    };
    node_name(name);
    node_fork(&start, name, children, ends);
    while (__atomic_load_n(&s->joined, __ATOMIC_ACQUIRE) < RANKS) nap(100);
    nap(drawn_number(&state, window));
    s->killed = now();
    kill(children[s->victim], signal_number);
    reap(&start, children, ends, signal_number);
    const double most = s->most;
    CHECK_EQ_INT(s->named, RANKS - 1);
    CHECK_EQ_INT(node_left_behind(), 0);
    munmap(ends, RANKS * sizeof *ends);
    munmap(s, sizeof *s);
    return most;
}

XD_TEST(a_process_that_is_killed_at_any_moment_of_any_program_is_named_at_once) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    const int kills = given("XD_TEST_KILLS", KILLS), first = given("XD_TEST_SEED", 1);
    double most = 0.0;
    for (int i = 0; i < kills; i++) {
        const long before = xd_test_failures;
        const double seconds = strike((uint64_t)(first + i), SIGKILL, 5000, &desc);
        if (seconds > most) most = seconds;
        if (xd_test_failures != before) printf("seed %d\n", first + i);
    }
    if (getenv("XD_TEST_KILLS")) printf("%d kills: named after at most %.3f s\n", kills, most);
    CHECK(most < (getenv("XD_TEST_KILLS") ? 1.0 : (double)GRACE));
}

XD_TEST(a_process_that_is_stopped_is_named_at_the_deadline_and_learns_of_it) {
    const xd_ctx_desc desc = { .timeout_seconds = 0.3 };
    for (int i = 0; i < 6; i++) CHECK(strike((uint64_t)(100 + i), SIGSTOP, 3000, &desc) >= 0.25);
}

XD_TEST_MAIN()
