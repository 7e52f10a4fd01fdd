/* How processes of one machine meet: what is refused, and in which words on which rank; who never comes, dies or has no memory; and
 * that no name is left in /dev/shm. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "node_world.h"
#include "xd_test.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

enum { MOST = 8 };

/* One process of a job whose ranks may pass different things. */
typedef struct guest {
    xd_node_desc desc;
    int fails_at;       /* allocation that is refused; 0: none */
    int64_t file_bytes; /* most that it may write into a file; 0: as many as it wants */
    int delay;          /* microseconds */
} guest;

typedef struct answer {
    xd_result result;
    int culprit, again; /* world: what a barrier says after joining */
    double seconds;
    char message[256];
} answer;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void nap(int microseconds) {
    const struct timespec t = { microseconds / 1000000, microseconds % 1000000 * 1000L };
    nanosleep(&t, NULL);
}

static int allocations, refused_allocation;

static void *scarce(void *user, size_t bytes) {
    (void)user;
    return ++allocations == refused_allocation ? NULL : malloc(bytes);
}

static void give_back(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void visit(const guest *g, answer *a) {
    const xd_ctx_desc desc = { .allocator = { scarce, give_back, NULL }, .timeout_seconds = 60 };
    const struct rlimit limit = { (rlim_t)g->file_bytes, (rlim_t)g->file_bytes };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    alarm(NODE_SECONDS);
    if (xd_ctx_create(&desc, &ctx) != XD_OK) return;
    signal(SIGXFSZ, SIG_IGN);
    if (g->file_bytes) setrlimit(RLIMIT_FSIZE, &limit);
    if (g->delay) nap(g->delay);
    allocations = 0;
    refused_allocation = g->fails_at;
    const double begin = now();
    a->result = xd_comm_node(ctx, &g->desc, &world);
    refused_allocation = 0;
    a->seconds = now() - begin;
    a->again = a->result == XD_OK ? (int)xd_barrier(world) : -1;
    if (a->result != XD_OK || a->again != XD_OK) {
        a->culprit = xd_last_error(ctx)->culprit;
        snprintf(a->message, sizeof a->message, "%.255s", xd_last_error(ctx)->message);
    }
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

/* Runs the guests at the same time; kills `victim` after so many microseconds when it is not negative. */
static answer *meet_and_kill(const guest *guests, int count, int victim, int microseconds) {
    answer *answers = (answer *)node_memory(MOST * sizeof *answers);
    pid_t children[MOST];
    fflush(stdout);
    for (int i = 0; i < count; i++) {
        children[i] = fork();
        if (children[i] != 0) continue;
        visit(&guests[i], &answers[i]);
        _exit(0);
    }
    if (victim >= 0) nap(microseconds);
    if (victim >= 0) kill(children[victim], SIGKILL);
    for (int i = 0; i < count; i++) {
        int status = -1;
        CHECK(waitpid(children[i], &status, 0) == children[i]);
        CHECK(status == 0 || i == victim);
    }
    return answers;
}

static answer *meet(const guest *guests, int count) {
    return meet_and_kill(guests, count, -1, 0);
}

/* `count` guests of one job, alike but for their ranks. */
static void invite(guest *guests, int count, const char *name) {
    memset(guests, 0, (size_t)count * sizeof *guests);
    for (int i = 0; i < count; i++) {
        guests[i].desc.name = name;
        guests[i].desc.rank = i;
        guests[i].desc.size = count;
        guests[i].desc.timeout_s = 20.0;
    }
}

static void forget(answer *answers) {
    munmap(answers, MOST * sizeof *answers);
}

/* All guests get this error with these words in it, long before the deadline. */
static void all_get(const answer *answers, int count, xd_result result, const char *words) {
    for (int i = 0; i < count; i++) {
        CHECK_EQ_INT(answers[i].result, result);
        if (!strstr(answers[i].message, words)) CHECK_EQ_STR(answers[i].message, words);
        CHECK(answers[i].seconds < 10.0);
    }
    CHECK_EQ_INT(node_left_behind(), 0);
}

/* ---- what one rank alone can find wrong ---- */

static void refused(xd_node_desc desc, xd_result result, const char *words) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_comm_node(ctx, &desc, &world), result);
    CHECK(world == NULL);
    if (!strstr(xd_last_error(ctx)->message, words)) CHECK_EQ_STR(xd_last_error(ctx)->message, words);
    xd_ctx_destroy(ctx);
}

XD_TEST(descs_that_are_wrong_are_refused_before_anything_is_made) {
    char name[80];
    memset(name, 'a', sizeof name);
    name[65] = 0;
    refused((xd_node_desc){ NULL, 0, 2, 0, 0 }, XD_ERROR_ARGUMENT, "1 to 64 letters, digits");
    refused((xd_node_desc){ "", 0, 2, 0, 0 }, XD_ERROR_ARGUMENT, "not by \"\"");
    refused((xd_node_desc){ "a/../b", 0, 2, 0, 0 }, XD_ERROR_ARGUMENT, "not by \"a/../b\"");
    refused((xd_node_desc){ name, 0, 2, 0, 0 }, XD_ERROR_ARGUMENT, "1 to 64 letters");
    refused((xd_node_desc){ "a", 0, 0, 0, 0 }, XD_ERROR_ARGUMENT, "size 0 is outside [1, 64]");
    refused((xd_node_desc){ "a", 0, 65, 0, 0 }, XD_ERROR_ARGUMENT, "size 65 is outside [1, 64]");
    refused((xd_node_desc){ "a", 2, 2, 0, 0 }, XD_ERROR_ARGUMENT, "rank 2 is outside [0, 2)");
    refused((xd_node_desc){ "a", -1, 2, 0, 0 }, XD_ERROR_ARGUMENT, "rank -1 is outside [0, 2)");
    refused((xd_node_desc){ "a", 0, 2, -1.0, 0 }, XD_ERROR_ARGUMENT, "timeout_s is -1");
    refused((xd_node_desc){ "a", 0, 2, NAN, 0 }, XD_ERROR_ARGUMENT, "timeout_s is ");
    refused((xd_node_desc){ "a", 0, 2, 0, 16383 }, XD_ERROR_ARGUMENT,
            "slot_bytes is 16383, 2 ranks need 16384");
    refused((xd_node_desc){ "a", 0, 2, 0, SIZE_MAX }, XD_ERROR_ARGUMENT,
            "slot_bytes is 18446744073709551615");
}

/* ---- what ranks pass differently ---- */

XD_TEST(what_one_rank_passes_differently_ends_the_joining_of_all_at_once) {
    for (int odd = 0; odd < 4; odd++)
        for (int what = 0; what < 3; what++) {
            guest guests[4];
            char name[32];
            node_name(name);
            invite(guests, 4, name);
            if (what == 0) guests[odd].desc.size = 5;
            if (what == 1) guests[odd].desc.slot_bytes = 1 << 16;
            if (what == 2) guests[odd].desc.rank = (odd + 1) % 4;
            for (int i = 0; i < 4; i++) guests[i].delay = i == odd ? 20000 : 0;
            answer *a = meet(guests, 4);
            all_get(a, 4, what == 2 ? XD_ERROR_STATE : XD_ERROR_MISMATCH,
                    what == 0   ? " has 5 ranks, others say 4"
                    : what == 1 ? "slot_bytes is 65536 on rank "
                                : " twice: processes ");
            forget(a);
        }
}

XD_TEST(ranks_that_never_join_are_named_at_the_deadline) {
    guest guests[6];
    char name[32], words[96];
    node_name(name);
    invite(guests, 6, name);
    for (int i = 0; i < 6; i++) guests[i].desc.timeout_s = 0.25;
    guests[2] = guests[5];
    answer *a = meet(guests, 4); /* 0, 1, 5, 3 */
    snprintf(words, sizeof words, "ranks 2,4 of 6 did not join job %s before the deadline of 0.25 s", name);
    all_get(a, 4, XD_ERROR_TIMEOUT, words);
    for (int i = 0; i < 4; i++) CHECK(a[i].culprit == 2 && a[i].seconds > 0.15);
    forget(a);
}

XD_TEST(a_process_is_one_rank_of_a_job) {
    char name[32];
    node_name(name);
    const pid_t child = fork();
    if (child == 0) {
        const xd_node_desc first = { name, 0, 2, 0.2, 0 }, second = { name, 1, 2, 0.2, 0 };
        xd_ctx *ctx = NULL;
        xd_comm *world = NULL;
        alarm(NODE_SECONDS);
        int wrong = xd_ctx_create(NULL, &ctx) != XD_OK;
        wrong += xd_comm_node(ctx, &first, &world) != XD_ERROR_TIMEOUT; /* nobody else comes */
        wrong += xd_comm_node(ctx, &second, &world) != XD_ERROR_TIMEOUT;
        xd_ctx_destroy(ctx);
        _exit(wrong);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ_INT(status, 0);
    CHECK_EQ_INT(node_left_behind(), 0);
}

/* ---- the name ---- */

XD_TEST(a_name_serves_one_job_after_another) {
    guest guests[3];
    char name[32];
    node_name(name);
    invite(guests, 3, name);
    for (int i = 0; i < 12; i++) {
        answer *a = meet(guests, 3);
        for (int r = 0; r < 3; r++) CHECK(a[r].result == XD_OK && a[r].again == XD_OK);
        CHECK_EQ_INT(node_left_behind(), 0);
        forget(a);
    }
}

XD_TEST(a_file_that_is_not_this_users_alone_is_refused) {
    char name[32], path[96];
    node_name(name);
    snprintf(path, sizeof path, "/dev/shm/xdistill-job-%s", name);
    int file = open(path, O_CREAT | O_EXCL | O_RDWR, 0644);
    CHECK(file >= 0 && fchmod(file, 0644) == 0);
    refused((xd_node_desc){ name, 0, 2, 0.2, 0 }, XD_ERROR_STATE, "with mode 644");
    if (geteuid() == 0) {
        CHECK(fchmod(file, 0600) == 0 && fchown(file, 12345, 12345) == 0);
        refused((xd_node_desc){ name, 0, 2, 0.2, 0 }, XD_ERROR_STATE, "is of user 12345");
    }
    close(file);
    CHECK(unlink(path) == 0 && symlink("/dev/shm/nothing", path) == 0);
    refused((xd_node_desc){ name, 0, 2, 0.2, 0 }, XD_ERROR_STATE, "needs a file of its own");
    unlink(path);
}

/* A process that dies alone leaves the name to the next job. */
XD_TEST(what_a_process_that_died_alone_left_is_cleared_by_the_next_job) {
    guest guests[2];
    char name[32];
    node_name(name);
    invite(guests, 2, name);
    for (int i = 0; i < 3; i++) {
        forget(meet_and_kill(guests, 1, 0, 20000));
        CHECK_EQ_INT(node_left_behind(), 1);
        answer *a = meet(guests, 2);
        for (int r = 0; r < 2; r++) CHECK(a[r].result == XD_OK && a[r].again == XD_OK);
        CHECK_EQ_INT(node_left_behind(), 0);
        forget(a);
    }
}

/* ---- dying and failing ---- */

XD_TEST(a_process_that_dies_while_it_joins_is_named_and_leaves_nothing) {
    const char *wanted = getenv("XD_TEST_KILLS");
    const int kills = wanted && atoi(wanted) > 0 ? atoi(wanted) : 24;
    int kinds[3] = { 0, 0, 0 }; /* named as late, as dead, after joining */
    for (int i = 0; i < kills; i++) {
        guest guests[4];
        char name[32];
        const int victim = i % 4;
        node_name(name);
        invite(guests, 4, name);
        for (int r = 0; r < 4; r++) {
            guests[r].desc.timeout_s = 0.2;
            guests[r].delay = r == (i + 1 + i / 4 % 3) % 4 ? 4000 : 0; /* somebody is always late */
        }
        answer *a = meet_and_kill(guests, 4, victim, i * 7919 % 5000);
        for (int r = 0; r < 4; r++) {
            if (r == victim || (a[r].result == XD_OK && a[r].again == XD_OK)) continue;
            const bool joined = a[r].result == XD_OK;
            CHECK(joined || a[r].result == XD_ERROR_PEER || a[r].result == XD_ERROR_TIMEOUT);
            /* Who comes when the others have given up finds nobody. */
            const char *named = strpbrk(a[r].message, "0123456789");
            CHECK(named && strchr(named, '0' + victim) != NULL);
            if (a[r].result != XD_ERROR_TIMEOUT) CHECK_EQ_INT(a[r].culprit, victim);
            kinds[joined ? 2 : a[r].result == XD_ERROR_PEER]++;
        }
        CHECK_EQ_INT(node_left_behind(), 0);
        forget(a);
    }
    if (wanted) printf("%d late, %d dead while joining, %d dead later\n", kinds[0], kinds[1], kinds[2]);
    CHECK(kinds[0] + kinds[1] > 0);
}

XD_TEST(a_rank_without_memory_lets_nobody_wait) {
    bool joined = false;
    int k = 1;
    for (; !joined && k < 100; k++) {
        guest guests[3];
        char name[32];
        node_name(name);
        invite(guests, 3, name);
        for (int r = 0; r < 3 && k == 1; r++)
            guests[r].desc.timeout_s = 0.2; /* it has nothing to say it through */
        guests[1].fails_at = k;
        answer *a = meet(guests, 3);
        joined = a[1].result == XD_OK;
        for (int r = 0; r < 3 && !joined; r++) {
            const xd_result others = k == 1 ? XD_ERROR_TIMEOUT : XD_ERROR_PEER;
            CHECK_EQ_INT(a[r].result, r == 1 ? XD_ERROR_MEMORY : others);
            CHECK(r == 1 || a[r].culprit == 1);
            CHECK(r == 1 || k == 1 || strstr(a[r].message, "rank 1 could not join: ERROR_MEMORY"));
            CHECK(a[r].seconds < 10.0);
        }
        CHECK_EQ_INT(node_left_behind(), 0);
        forget(a);
    }
    CHECK(joined && k > 10);
}

XD_TEST(memory_that_is_not_there_is_an_error_of_all) {
    guest guests[3];
    char name[32];
    node_name(name);
    invite(guests, 3, name);
    for (int r = 0; r < 3; r++) guests[r].file_bytes = 1 << 20;
    answer *a = meet(guests, 3);
    all_get(a, 3, XD_ERROR_MEMORY, "no room in /dev/shm for ");
    forget(a);
    for (int r = 0; r < 3; r++) guests[r].file_bytes = 1 << 10;
    a = meet(guests, 3);
    all_get(a, 3, XD_ERROR_MEMORY, "bytes in which 3 ranks meet");
    forget(a);
}

XD_TEST_MAIN()
