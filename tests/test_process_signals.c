/* Processes of a route that are killed or stopped at a random moment: the others return, and name them; and signals a thousand
 * times a second, which interrupt whatever call of the system they meet, change nothing. XD_TEST_KILLS processes are killed
 * (6), and a fiftieth as many stopped, at least one: 0.7 seconds of processor, and 2 of waiting for each that is stopped. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "process_world.h"
#include "route_scene.h"

#include <dirent.h>
#include <sys/time.h>

enum { RANKS = 4, BATCHES = 1 << 20, EARLIEST = 200, LATEST = 30000 /* microseconds */ };

static int kills(void) {
    const char *wanted = getenv("XD_TEST_KILLS");
    return wanted && atoi(wanted) > 0 ? atoi(wanted) : 6;
}

/* ---- two teachers and two students ---- */

typedef struct ending {
    int victim;
    bool stops, from_the_start; /* stopped instead of killed; also while the route is made */
    uint32_t moment;            /* microseconds */
    pid_t processes[RANKS];
    uint32_t named_itself; /* atomic */
} ending;

static bool victim_stops;

static void strike(int number) {
    (void)number;
    kill(getpid(), victim_stops ? SIGSTOP : SIGKILL);
}

static void catch_signal(int number, void (*handler)(int)) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler; /* without SA_RESTART */
    CHECK(sigaction(number, &action, NULL) == 0);
}

static void set_timer(uint32_t first, uint32_t then) {
    struct itimerval timer;
    timer.it_value.tv_sec = timer.it_interval.tv_sec = 0;
    timer.it_value.tv_usec = (suseconds_t)first;
    timer.it_interval.tv_usec = (suseconds_t)then;
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

static void arm(const ending *e) {
    victim_stops = e->stops;
    catch_signal(SIGALRM, strike);
    set_timer(e->moment, 0);
}

/* Teachers 0 and 1 have two samples each, students 2 and 3 take all of them, the one two columns, the other the third. */
static xd_route_desc four_desc(int rank) {
    xd_route_desc d;
    memset(&d, 0, sizeof d);
    d.samples = 4;
    d.length = 2;
    d.columns = 3;
    d.slots = 2;
    if (rank < 2) {
        d.teacher.sample_count = 2;
        d.teacher.sample_begin = 2 * rank;
        d.teacher.micro_batch = 1;
    } else {
        d.student.sample_count = 4;
        d.student.micro_batch = 2;
        d.student.column_begin = rank == 2 ? 0 : 2;
        d.student.column_end = rank == 2 ? 2 : 3;
    }
    return d;
}

static xd_result teach(xd_route *route, int64_t batch) {
    float data[6];
    for (int i = 0; i < 6; i++) data[i] = (float)(batch % 4096);
    return xd_route_send(route, xd_rows_of(data, XD_DTYPE_F32, 2, 3), NULL);
}

/* A student takes two samples at a time, of the first teacher and then of the second: batches 2 k and 2 k + 1 of one. */
static xd_result learn(xd_route *route, int64_t batch) {
    const int64_t first = batch / 2 * 2;
    xd_route_window w;
    long wrong = 0;
    XD_TRY(xd_route_take(route, &w));
    for (int64_t r = 0; r < w.rows.rows; r++)
        for (int64_t c = 0; c < w.rows.cols; c++)
            wrong += ((const float *)w.rows.data)[r * w.rows.stride + c] != (float)((first + r / 2) % 4096);
    CHECK_EQ_INT(wrong, 0);
    return xd_route_release(route);
}

static xd_result go_on(xd_route *route, int rank, int64_t batch) {
    return rank < 2 ? teach(route, batch) : learn(route, batch);
}

/* `next`: the first batch that this rank has not done. What needs no other rank may still succeed: a free slot, a batch that is
 * there already. */
static void check_survivor(xd_comm *world, xd_route *route, const ending *e, xd_result got, int64_t next) {
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    char name[16];
    snprintf(name, sizeof name, "rank %d", e->victim);
    CHECK_EQ_INT(got, e->stops ? XD_ERROR_TIMEOUT : XD_ERROR_PEER);
    CHECK_EQ_INT(error->culprit, e->victim);
    CHECK(strstr(error->message, name) != NULL);
    if (!route) return;
    for (got = XD_OK; got == XD_OK && next < BATCHES; next++) got = go_on(route, xd_comm_rank(world), next);
    CHECK_EQ_INT(error->culprit, e->victim);
}

static xd_result ending_body(xd_comm *world, void *argument) {
    ending *e = (ending *)argument;
    const int rank = xd_comm_rank(world);
    const xd_route_desc d = four_desc(rank);
    xd_route *route = NULL;
    e->processes[rank] = getpid();
    if (rank == e->victim && e->from_the_start) arm(e);
    xd_result result = xd_route_create(world, &d, &route);
    if (result == XD_OK) result = xd_barrier(world);
    if (result == XD_OK) CHECK(xd_route_describe(route).shared);
    if (rank == e->victim && !e->from_the_start) arm(e);
    int64_t done = 0;
    while (done < BATCHES && result == XD_OK) {
        result = go_on(route, rank, done);
        if (result == XD_OK && ++done % 16 == 0 && !e->stops) result = xd_barrier(world);
    }
    if (rank != e->victim)
        check_survivor(world, route, e, result, done);
    else if (result == XD_ERROR_PEER)
        __atomic_store_n(&e->named_itself, 1u, __ATOMIC_RELEASE);
    xd_route_destroy(route);
    return XD_OK;
}

/* No file of these processes is left in memory that processes share. */
static void check_no_names(const ending *e) {
    DIR *folder = opendir("/dev/shm");
    CHECK(folder != NULL);
    for (const struct dirent *entry; folder && (entry = readdir(folder));)
        for (int r = 0; r < RANKS; r++) {
            char name[64];
            const int length = snprintf(name, sizeof name, "xdistill-%lld-", (long long)e->processes[r]);
            if (strncmp(entry->d_name, name, (size_t)length) == 0) CHECK_EQ_STR(entry->d_name, "");
        }
    if (folder) closedir(folder);
}

static void play_ending(int i, bool stops) {
    char message[256];
    xd_ctx_desc desc;
    ending *e = (ending *)process_memory(sizeof *e);
    e->victim = draw(RANKS);
    e->stops = stops;
    e->from_the_start = !stops && i % 3 == 0;
    e->moment = (uint32_t)(EARLIEST + draw(e->from_the_start ? LATEST / 10 : LATEST));
    memset(&desc, 0, sizeof desc);
    desc.timeout_seconds = stops ? 2.0 : 60.0; /* long beside what a busy machine delays */
    process_reports_kills = true;
    CHECK(process_run(RANKS, e->victim, &desc, ending_body, e, message) == XD_OK);
    process_reports_kills = false;
    CHECK_EQ_STR(message, "");
    CHECK_EQ_INT(e->named_itself, stops);
    if (xd_test_failures) printf("run %d: rank %d after %u microseconds\n", i, e->victim, e->moment);
    check_no_names(e);
    munmap(e, sizeof *e);
}

XD_TEST(who_is_killed_at_any_moment_is_named_by_the_others_and_leaves_nothing) {
    for (int i = 0; i < kills(); i++) play_ending(i, false);
}

XD_TEST(who_is_stopped_at_any_moment_is_named_at_the_deadline_and_then_by_itself) {
    for (int i = 0; i < 1 + kills() / 50; i++) play_ending(i, true);
}

/* ---- a storm ---- */

static uint32_t signals_seen;

static void see(int number) {
    (void)number;
    if (__atomic_add_fetch(&signals_seen, 1, __ATOMIC_RELAXED) > PROCESS_SECONDS * 1000)
        _exit(4); /* it hangs */
}

static void begin_storm(void) {
    catch_signal(SIGALRM, see);
    catch_signal(SIGINT, see);
    set_timer(1000, 1000);
}

static void end_storm(void) {
    set_timer(0, 0);
}

/* Every window is compared with what it must hold; now and then ranks interrupt each other. */
static xd_result storm_body(xd_comm *world, void *argument) {
    begin_storm();
    xd_result result = XD_OK;
    for (int i = 0; i < 4 && result == XD_OK; i++) {
        raise(SIGINT);
        result = route_body(world, argument);
    }
    end_storm();
    return result;
}

XD_TEST(signals_change_nothing_in_routes_between_processes) {
    for (int i = 0; i < 2 + kills() / 10; i++) {
        char message[256];
        scene *s = (scene *)process_memory(sizeof *s);
        *s = draw_scene();
        s->messages = i % 4 == 1;
        s->ranks = ranks_of(s);
        s->steps = STEPS;
        CHECK(process_run(s->ranks, -1, NULL, storm_body, s, message) == XD_OK);
        CHECK_EQ_STR(message, "");
        munmap(s, sizeof *s);
    }
}

enum { STORMED = 4, ELEMENTS = 3000, ROUNDS = 400 };

static xd_result sums_rank(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    float *x = (float *)malloc(ELEMENTS * sizeof *x);
    long wrong = 0;
    xd_result result = XD_OK;
    for (int i = 0; i < ROUNDS && result == XD_OK; i++) {
        for (int k = 0; k < ELEMENTS; k++) x[k] = (float)(rank + i + k);
        result = xd_all_reduce(world, x, x, i % 2 ? ELEMENTS : 9, XD_DTYPE_F32, XD_SUM);
        for (int k = 0; k < (i % 2 ? ELEMENTS : 9); k++) wrong += x[k] != (float)(6 + STORMED * (i + k));
    }
    free(x);
    CHECK_EQ_INT(wrong, 0);
    (void)argument;
    return result;
}

XD_TEST(signals_change_nothing_in_sums_of_threads) {
    signals_seen = 0;
    begin_storm();
    for (int i = 0; i < 200 && signals_seen < 30; i++)
        CHECK_EQ_INT(xd_run_threads(STORMED, NULL, sums_rank, NULL, NULL), XD_OK);
    end_storm();
    CHECK(signals_seen >= 30);
    signal(SIGALRM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
}

XD_TEST_MAIN()
