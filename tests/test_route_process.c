/* Routes between processes of one node: rings in memory that all of them see, and what becomes of it when some rank
 * cannot see it, dies or leaves. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "process_world.h"
#include "route_scene.h"
#include "xtoken_rows.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

static void play(const scene *wanted, int64_t views) {
    char message[256];
    scene *s = (scene *)process_memory(sizeof *s);
    *s = *wanted;
    s->ranks = ranks_of(s);
    s->steps = STEPS;
    CHECK(process_run(s->ranks, -1, NULL, route_body, s, message) == XD_OK);
    CHECK_EQ_STR(message, "");
    if (views >= 0) CHECK_EQ_INT(s->views, views);
    munmap(s, sizeof *s);
}

XD_TEST(every_split_gives_every_split_the_same_bits) {
    for (int i = 0; i < 12; i++) {
        scene s = draw_scene();
        play(&s, -1);
        s.messages = true;
        play(&s, 0);
    }
}

XD_TEST(a_window_in_one_slot_is_a_pointer_into_it) {
    scene s = plain_scene();
    s.student.first = 1;
    s.student.tp = 2;
    play(&s, 2 * 4 * STEPS);
    s = plain_scene(); /* one rank is both, and so alone; then two that both are */
    s.payload = XD_ROUTE_COLUMNS;
    play(&s, 4 * STEPS);
    s.teacher.tp = s.student.tp = 2;
    play(&s, 2 * 4 * STEPS);
}

/* ---- the ring ---- */

/* The teacher is two micro-batches ahead while the student holds the first, and only then is let on. */
static xd_result ahead_body(xd_comm *world, void *argument) {
    xd_route_desc d = pair_desc(xd_comm_rank(world));
    xd_route *route = NULL;
    (void)argument;
    d.slots = 3;
    XD_TRY(xd_route_create(world, &d, &route));
    CHECK(xd_route_describe(route).shared);
    if (xd_comm_rank(world) == 0) {
        xd_rows slot;
        for (int i = 0; i < 3; i++) {
            XD_TRY(xd_route_slot(route, &slot, NULL));
            fill_slot(slot, (float)i);
            XD_TRY(xd_route_post(route));
        }
        XD_TRY(xd_barrier(world));
        XD_TRY(xd_route_slot(route, &slot, NULL)); /* waits for the student's release */
        fill_slot(slot, 3.0f);
        XD_TRY(xd_route_post(route));
    } else {
        xd_route_window w;
        XD_TRY(xd_route_take(route, &w));
        CHECK(w.is_view);
        const float *first = (const float *)w.rows.data;
        XD_TRY(xd_barrier(world)); /* three are posted */
        CHECK(first[0] == 0.0f && first[5] == 0.0f);
        for (int i = 1; i < 4; i++) {
            XD_TRY(xd_route_release(route));
            XD_TRY(xd_route_take(route, &w));
            CHECK(((const float *)w.rows.data)[0] == (float)i);
            CHECK((w.rows.data == first) == (i == 3)); /* the first slot again */
        }
        XD_TRY(xd_route_release(route));
    }
    xd_route_destroy(route); /* nobody waits for the other */
    return XD_OK;
}

XD_TEST(a_teacher_is_two_micro_batches_ahead_of_a_student_that_reads) {
    char message[256];
    CHECK(process_run(2, -1, NULL, ahead_body, NULL, message) == XD_OK);
    CHECK_EQ_STR(message, "");
}

/* ---- one rank cannot ---- */

static int poor; /* rank */

/* The poor rank is refused files: to make one, or to open any. */
static xd_result poor_body(xd_comm *world, void *argument) {
    struct rlimit files = { 0, 0 }, none = { 0, 0 };
    const int kind = xd_comm_rank(world) == 0 ? RLIMIT_FSIZE : RLIMIT_NOFILE;
    if (xd_comm_rank(world) != poor) return route_body(world, argument);
    signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(kind, &files) == 0);
    none.rlim_max = files.rlim_max;
    CHECK(setrlimit(kind, &none) == 0);
    const xd_result result = route_body(world, argument);
    CHECK(setrlimit(kind, &files) == 0);
    return result;
}

XD_TEST(all_ranks_use_messages_when_one_cannot_share) {
    for (poor = 0; poor < 3; poor++) {
        char message[256];
        scene *s = (scene *)process_memory(sizeof *s);
        *s = plain_scene();
        s->payload = XD_ROUTE_COLUMNS;
        s->student.first = 1;
        s->student.tp = 2;
        s->ranks = ranks_of(s);
        s->steps = STEPS;
        s->refused = true;
        CHECK(process_run(s->ranks, -1, NULL, poor_body, s, message) == XD_OK);
        CHECK_EQ_STR(message, "");
        CHECK_EQ_INT(s->views, 0);
        munmap(s, sizeof *s);
    }
}

/* ---- rank 0 dies while it makes the memory ---- */

static xd_comm *dying_world;

static void die(int number) {
    (void)number;
    xd_comm_abort(dying_world);
    _exit(3);
}

static xd_result dying_body(xd_comm *world, void *argument) {
    const xd_route_desc d = pair_desc(xd_comm_rank(world));
    const struct rlimit little = { 64, 64 }; /* bytes of a file */
    xd_route *route = NULL;
    dying_world = world;
    if (xd_comm_rank(world) == 0) {
        *(pid_t *)argument = getpid();
        signal(SIGXFSZ, die);
        CHECK(setrlimit(RLIMIT_FSIZE, &little) == 0);
    }
    return xd_route_create(world, &d, &route);
}

XD_TEST(a_rank_that_dies_while_it_makes_the_memory_leaves_no_name) {
    char message[256], name[64];
    pid_t *victim = (pid_t *)process_memory(sizeof *victim);
    CHECK(process_run(2, 0, NULL, dying_body, victim, message) == XD_ERROR_PEER);
    const int length = snprintf(name, sizeof name, "xdistill-%lld-", (long long)*victim);
    DIR *folder = opendir("/dev/shm");
    CHECK(folder && *victim > 0);
    for (const struct dirent *entry; folder && (entry = readdir(folder));)
        if (strncmp(entry->d_name, name, (size_t)length) == 0) CHECK_EQ_STR(entry->d_name, "");
    if (folder) closedir(folder);
    munmap(victim, sizeof *victim);
}

/* ---- ranks that go ---- */

enum { DIES, LEAVES, SLEEPS };

typedef struct ending {
    int how;
    bool teacher_goes;
    uint32_t seen; /* by the other side; atomic */
} ending;

/* One side goes in the middle of a step; the other has its name, and a route as broken as the world of threads. */
static xd_result ending_body(xd_comm *world, void *argument) {
    ending *e = (ending *)argument;
    const int rank = xd_comm_rank(world), goes = e->teacher_goes ? 0 : 1;
    const xd_route_desc d = pair_desc(rank);
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    xd_route *route = NULL;
    xd_route_window w;
    float data[6] = { 0 };
    xd_result result = XD_OK;
    XD_TRY(xd_route_create(world, &d, &route));
    CHECK(xd_route_describe(route).shared);
    for (int i = 0; i < 8 && result == XD_OK; i++) {
        if (i == 2 && rank == goes && e->how == DIES) _exit(3);
        if (i == 2 && rank == goes) break;
        result = rank == 0 ? xd_route_send(route, rows_of(data, 2, 3), NULL) : xd_route_take(route, &w);
        if (result == XD_OK && rank == 1) result = xd_route_release(route);
    }
    if (rank == goes) {
        while (e->how == SLEEPS && !__atomic_load_n(&e->seen, __ATOMIC_ACQUIRE)) sched_yield();
        if (e->how == SLEEPS && rank == 1) {
            while (result == XD_OK && (result = xd_route_take(route, &w)) == XD_OK)
                result = xd_route_release(route);
            CHECK_EQ_INT(result, XD_ERROR_PEER); /* it learns that nobody waits for it any more */
        }
    } else {
        CHECK_EQ_INT(result, e->how == SLEEPS ? XD_ERROR_TIMEOUT : XD_ERROR_PEER);
        CHECK(strstr(error->message, goes == 0 ? "rank 0" : "rank 1"));
        CHECK_EQ_INT(error->culprit, goes);
        __atomic_store_n(&e->seen, 1u, __ATOMIC_RELEASE);
    }
    xd_route_destroy(route);
    return XD_OK;
}

XD_TEST(who_dies_leaves_or_is_late_is_named_by_the_others) {
    ending *e = (ending *)process_memory(sizeof *e);
    for (int i = 0; i < 6; i++) {
        char message[256];
        xd_ctx_desc desc;
        memset(&desc, 0, sizeof desc);
        e->how = i % 3;
        e->teacher_goes = i / 3 == 0;
        e->seen = 0;
        desc.timeout_seconds = e->how == SLEEPS ? 1.5 : 60.0; /* long beside what a busy machine delays */
        CHECK(process_run(2, e->how == DIES ? (e->teacher_goes ? 0 : 1) : -1, &desc, ending_body, e,
                          message) == XD_OK);
        CHECK_EQ_STR(message, "");
    }
    munmap(e, sizeof *e);
}

/* ---- the first failure ---- */

/* Teachers are ranks 0 and 1, rank 2 takes from both. Rank 0 goes; rank 2 finds that out and leaves; rank 1 waits for rank 2,
 * before or afterwards. */
typedef struct chain {
    int how;                   /* of rank 0: DIES or SLEEPS */
    bool afterwards, by_world; /* when rank 1 waits; rank 2 fails in a collective instead of its route */
    uint32_t looks, left;      /* of rank 2 at its clock while it waits; ranks that have gone; atomic */
} chain;

static chain *links;
static int armed_rank = -1;

/* Stands still, but for rank 1 once rank 2 waits: its deadline is the first, also when it begins to wait after that. */
static double chain_clock(void *user) {
    static double now;
    (void)user;
    if (armed_rank == 2) __atomic_add_fetch(&links->looks, 1, __ATOMIC_ACQ_REL);
    if (armed_rank == 1 && __atomic_load_n(&links->looks, __ATOMIC_ACQUIRE) > 5) now += 1000.0;
    return now;
}

static xd_route_desc chain_desc(int rank) {
    xd_route_desc d = pair_desc(rank == 2 ? 1 : 0);
    d.slots = 2;
    if (rank < 2) d.teacher.sample_count = 2, d.teacher.sample_begin = 2 * rank;
    if (rank == 2) d.student.micro_batch = 2;
    return d;
}

static void check_first(xd_comm *world, xd_result result) {
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    CHECK_EQ_INT(result, links->how == DIES ? XD_ERROR_PEER : XD_ERROR_TIMEOUT);
    CHECK_EQ_INT(error->culprit, 0);
    CHECK(strstr(error->message, "rank 0") != NULL);
}

static void wait_gone(uint32_t count) {
    while (__atomic_load_n(&links->left, __ATOMIC_ACQUIRE) < count) sched_yield();
}

static xd_result chain_body(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    const xd_route_desc d = chain_desc(rank);
    float data[6] = { 0 };
    xd_route *route = NULL;
    xd_route_window w;
    xd_result result = XD_OK;
    (void)argument;
    XD_TRY(xd_route_create(world, &d, &route));
    CHECK(xd_route_describe(route).shared);
    if (rank == 0 && links->by_world) xd_comm_abort(world);
    if (rank == 0 && links->how == DIES) _exit(3);
    if (rank == 0) wait_gone(2);
    if (rank == 2 && links->by_world) CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    if (rank == 1 && links->afterwards) wait_gone(1);
    armed_rank = rank;
    while (rank == 1 && result == XD_OK) result = xd_route_send(route, rows_of(data, 2, 3), NULL);
    if (rank == 2 && !links->by_world) result = xd_route_take(route, &w);
    armed_rank = -1;
    if (rank > 0 && !(rank == 2 && links->by_world)) check_first(world, result);
    xd_route_destroy(route);
    __atomic_add_fetch(&links->left, 1, __ATOMIC_ACQ_REL);
    return XD_OK;
}

XD_TEST(the_first_failure_is_handed_on_to_those_who_wait_for_others) {
    links = (chain *)process_memory(sizeof *links);
    for (int i = 0; i < 4; i++) {
        char message[256];
        const xd_ctx_desc patient = { .clock = { chain_clock, NULL }, .timeout_seconds = 1e3 };
        memset(links, 0, sizeof *links);
        links->how = i < 3 ? DIES : SLEEPS;
        links->afterwards = i == 1 || i == 2;
        links->by_world = i == 2;
        CHECK(process_run(3, links->how == DIES ? 0 : -1, links->how == DIES ? NULL : &patient, chain_body,
                          NULL, message) == XD_OK);
        CHECK_EQ_STR(message, "");
    }
    munmap(links, sizeof *links);
}

XD_TEST_MAIN()
