/* Processes whose world breaks go on in a smaller one: random programs whose processes are killed at random moments, also while the
 * others make their next world, and while they make the one after that; one that was stopped and wakes up; ranks that come late, leave
 * or have no memory; and what is refused. XD_TEST_KILLS programs (10), XD_TEST_SEED is the first seed. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "drawn_call.h"
#include "kills.h"
#include "node_world.h"
#include "xd_test.h"

#include <sys/resource.h>

enum { MOST = 8, COUNT = 9000, PROGRAMS = 10 };

/* ---- a program that goes on ---- */

/* What parent and children share. */
typedef struct scene {
    uint64_t seed;
    uint32_t joined;    /* ranks; atomic */
    uint32_t done;      /* nobody will be killed any more; atomic */
    uint32_t shrinking; /* ranks that are in xd_comm_shrink, or have been killed there; atomic */
    uint32_t worlds;    /* that survivors have made, counted by their rank 0; atomic */
    int sizes[MOST];    /* of the last world, by first rank; 0: it did not get there */
    double most;        /* seconds in xd_comm_shrink, of any rank */
} scene;

/* What a rank has of a world. */
typedef struct life {
    scene *s;
    int mine; /* the rank in the first world */
    xd_comm *world, *half;
    xd_queue *queue; /* NULL: none */
    int ids[MOST];   /* first ranks of this world's */
    uint64_t state;
} life;

/* Numbers that say where they come from. */
static int64_t number_of(int id, int64_t i) {
    return 1000000 * (int64_t)(id + 1) + i;
}

/* One call, checked when it returns. */
static xd_result checked_call(life *l) {
    static int64_t send[MOST * COUNT], recv[MOST * COUNT];
    static const int64_t counts_of[] = { 1, 50, COUNT };
    const bool whole = drawn_number(&l->state, 3) > 0;
    xd_comm *comm = whole ? l->world : l->half;
    const int n = xd_comm_size(comm), kind = drawn_number(&l->state, 5), me = xd_comm_rank(comm);
    const int64_t count = counts_of[drawn_number(&l->state, 3)];
    const int root = drawn_number(&l->state, whole ? n : 1);
    int64_t counts[MOST], sum = 0;
    long wrong = 0;
    for (int r = 0; r < n; r++) {
        counts[r] = count;
        sum += 1000000 * (int64_t)(l->ids[xd_comm_world_rank(comm, r)] + 1);
    }
    for (int64_t i = 0; i < n * count; i++) send[i] = number_of(l->mine, i);
    for (int64_t i = 0; kind == 1 && me == root && i < count; i++) recv[i] = number_of(l->mine, i);
    const xd_collective record = { .kind = XD_COLLECTIVE_ALL_REDUCE,
                                   .send = send,
                                   .recv = recv,
                                   .count = count,
                                   .dtype = XD_DTYPE_I64,
                                   .op = XD_SUM };
    if (kind == 0) return xd_agree(comm, XD_OK);
    if (kind == 1) XD_TRY(xd_broadcast(comm, recv, count, XD_DTYPE_I64, root));
    if (kind == 2 && l->queue && whole) {
        xd_ticket ticket;
        XD_TRY(xd_queue_start(l->queue, &record, &ticket));
        XD_TRY(xd_queue_wait(l->queue, ticket));
    } else if (kind == 2) {
        XD_TRY(xd_collective_run(comm, &record));
    }
    if (kind == 3) XD_TRY(xd_all_gather(comm, send, recv, counts, XD_DTYPE_I64));
    if (kind == 4) XD_TRY(xd_all_to_all(comm, send, counts, recv, counts, XD_DTYPE_I64));
    for (int r = 0; r < n; r++) {
        const int id = l->ids[xd_comm_world_rank(comm, r)];
        for (int64_t i = 0; i < count; i++) {
            if (kind >= 3) wrong += recv[r * count + i] != number_of(id, kind == 4 ? me * count + i : i);
            if (kind == 2) wrong += recv[i] != sum + n * i;
            if (kind == 1 && r == root) wrong += recv[i] != number_of(id, i);
        }
    }
    CHECK_EQ_INT(wrong, 0);
    return XD_OK;
}

/* The groups of a world, and who is in it. */
static xd_result settle(life *l) {
    const int n = xd_comm_size(l->world), rank = xd_comm_rank(l->world);
    int64_t counts[MOST] = { 0 };
    int32_t ids[MOST] = { 0 };
    for (int r = 0; r < n; r++) counts[r] = 1;
    ids[rank] = l->mine;
    XD_TRY(xd_all_gather(l->world, &ids[rank], ids, counts, XD_DTYPE_I32));
    for (int r = 0; r < n; r++) {
        CHECK(r == 0 || ids[r] > ids[r - 1]); /* the old order */
        l->ids[r] = ids[r];
    }
    CHECK_EQ_INT(l->ids[rank], l->mine);
    l->state = l->s->seed * 64 + (uint64_t)n;
    XD_TRY(xd_comm_split(l->world, rank % 2, rank, &l->half));
    return l->s->seed % 2 ? XD_OK : xd_queue_create(l->world, NULL, &l->queue);
}

static void forget(life *l) {
    xd_queue_destroy(l->queue);
    xd_comm_destroy(l->half);
}

/* Calls until the parent says that it is enough, which all hear in one call. */
static xd_result play(life *l) {
    XD_TRY(settle(l));
    __atomic_add_fetch(&l->s->joined, 1, __ATOMIC_RELEASE);
    for (int32_t enough = 0; !enough;) {
        enough = (int32_t)__atomic_load_n(&l->s->done, __ATOMIC_ACQUIRE);
        XD_TRY(xd_all_reduce(l->world, &enough, &enough, 1, XD_DTYPE_I32, XD_MAX));
        if (!enough) XD_TRY(checked_call(l));
    }
    return xd_barrier(l->world); /* one that has died since it took part in the last call is missed here */
}

/* The next world; the old groups go before or after it is made. */
static xd_result go_on(life *l, xd_comm *first) {
    scene *s = l->s;
    life old = *l;
    const bool before = drawn_number(&l->state, 2) == 0;
    const double begin = now();
    l->world = l->half = NULL;
    l->queue = NULL;
    if (before) forget(&old);
    __atomic_add_fetch(&s->shrinking, 1, __ATOMIC_RELEASE);
    XD_TRY(xd_comm_shrink(old.world, 0.0, &l->world));
    __atomic_sub_fetch(&s->shrinking, 1, __ATOMIC_RELEASE);
    if (now() - begin > s->most) s->most = now() - begin;
    CHECK(xd_comm_size(l->world) < xd_comm_size(old.world));
    CHECK_EQ_INT(xd_barrier(old.world), XD_ERROR_PEER);
    if (!before && old.half) CHECK_EQ_INT(xd_barrier(old.half), XD_ERROR_PEER);
    if (!before) forget(&old);
    if (old.world != first) xd_comm_destroy(old.world);
    if (xd_comm_rank(l->world) == 0) __atomic_add_fetch(&s->worlds, 1, __ATOMIC_RELAXED);
    return XD_OK;
}

static xd_result survive(xd_comm *world, void *argument) {
    life l;
    memset(&l, 0, sizeof l);
    l.s = (scene *)argument;
    l.world = world;
    l.mine = xd_comm_rank(world);
    xd_result result;
    while ((result = play(&l)) != XD_OK) {
        CHECK(result == XD_ERROR_PEER);
        XD_TRY(go_on(&l, world));
    }
    l.s->sizes[l.mine] = xd_comm_size(l.world);
    forget(&l);
    if (l.world != world) xd_comm_destroy(l.world);
    return XD_OK;
}

/* Waits for the moment of a kill: any, while others make a world, or right after another. */
static void wait_for(scene *s, uint64_t *state) {
    const int how = drawn_number(state, 3);
    for (int i = 0; how == 0 && i < 300 && !__atomic_load_n(&s->shrinking, __ATOMIC_ACQUIRE); i++) nap(100);
    if (how == 1) nap(drawn_number(state, 30000));
    if (how < 2) nap(drawn_number(state, 2000));
}

/* Kills some of the ranks, and sees what becomes of the others. */
static void strike(uint64_t seed, int *worlds, double *most) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    scene *s = (scene *)node_memory(sizeof *s);
    node_end *ends = (node_end *)node_memory(MOST * sizeof *ends);
    pid_t children[MOST];
    bool dead[MOST] = { false };
    char name[32];
    uint64_t state = s->seed = seed;
    const int ranks = 2 + drawn_number(&state, MOST - 1), kills = 1 + drawn_number(&state, ranks - 1);
    const node_start start = {
        .ranks = ranks, .slot_bytes = 64 << 10, .desc = &desc, .function = survive, .argument = s
    };
    node_name(name);
    node_fork(&start, name, children, ends);
    while (__atomic_load_n(&s->joined, __ATOMIC_ACQUIRE) < (uint32_t)ranks) nap(100);
    for (int k = 0; k < kills; k++) {
        int victim;
        do victim = drawn_number(&state, ranks);
        while (dead[victim]);
        wait_for(s, &state);
        CHECK(kill(children[victim], SIGKILL) == 0);
        dead[victim] = true;
    }
    for (int r = 0; r < ranks; r++)
        if (dead[r]) CHECK(waitpid(children[r], &ends[r].status, 0) == children[r]);
    __atomic_store_n(&s->done, 1u, __ATOMIC_RELEASE);
    for (int r = 0; r < ranks; r++) {
        if (dead[r]) continue;
        CHECK(waitpid(children[r], &ends[r].status, 0) == children[r]);
        CHECK_EQ_INT(ends[r].status, 0);
        CHECK_EQ_INT(ends[r].failures, 0);
        CHECK_EQ_STR(ends[r].message, "");
        CHECK_EQ_INT(s->sizes[r], ranks - kills);
    }
    CHECK_EQ_INT(node_left_behind(), 0);
    *worlds += (int)s->worlds;
    if (s->most > *most) *most = s->most;
    munmap(ends, MOST * sizeof *ends);
    munmap(s, sizeof *s);
}

XD_TEST(whoever_is_killed_whenever_the_others_go_on_in_a_world_of_their_own) {
    const int programs = given("XD_TEST_KILLS", PROGRAMS), first = given("XD_TEST_SEED", 1);
    int worlds = 0;
    double most = 0.0;
    for (int i = 0; i < programs; i++) {
        const long failures = xd_test_failures;
        strike((uint64_t)(first + i), &worlds, &most);
        if (xd_test_failures != failures) printf("seed %d\n", first + i);
    }
    if (getenv("XD_TEST_KILLS"))
        printf("%d programs: %d smaller worlds, made within %.3f s\n", programs, worlds, most);
    CHECK(worlds >= programs / 2);
}

/* ---- one that is stopped ---- */

typedef struct pause {
    pid_t process;   /* of rank 1 */
    uint32_t joined; /* atomic */
    uint32_t awake;  /* it has been told of its end; atomic */
} pause_scene;

/* Rank 1 is stopped in a call; the others go on and write over all their memory while it wakes up. */
static xd_result doze(xd_comm *world, void *argument) {
    pause_scene *p = (pause_scene *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    scene s;
    life l;
    memset(&s, 0, sizeof s);
    memset(&l, 0, sizeof l);
    l.s = &s;
    s.seed = 5;
    l.world = world;
    l.mine = xd_comm_rank(world);
    if (l.mine == 1) p->process = getpid();
    XD_TRY(settle(&l));
    __atomic_add_fetch(&p->joined, 1, __ATOMIC_RELEASE);
    xd_result result = XD_OK;
    while (result == XD_OK) result = checked_call(&l);
    const bool late = l.mine == 1;
    CHECK_EQ_INT(result, late ? XD_ERROR_PEER : XD_ERROR_TIMEOUT);
    CHECK_EQ_INT(xd_last_error(ctx)->culprit, 1);
    xd_comm *half = l.half, *next = NULL;
    result = xd_comm_shrink(world, 0.2, &next);
    if (late) {
        CHECK_EQ_INT(result, XD_ERROR_PEER);
        CHECK_EQ_STR(xd_last_error(ctx)->message,
                     "rank 1 came after the deadline: 3 of 4 ranks go on without it (in xd_comm_shrink)");
        CHECK(next == NULL);
        CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
        CHECK_EQ_INT(xd_barrier(half), XD_ERROR_PEER);
        __atomic_store_n(&p->awake, 1u, __ATOMIC_RELEASE);
    } else {
        CHECK_EQ_INT(result, XD_OK);
        l.world = next;
        CHECK_EQ_INT(settle(&l), XD_OK);
        CHECK(l.ids[0] == 0 && l.ids[1] == 2 && l.ids[2] == 3);
        kill(p->process, SIGCONT);
        for (int32_t enough = 0; !enough;) {
            enough = (int32_t)__atomic_load_n(&p->awake, __ATOMIC_ACQUIRE);
            CHECK_EQ_INT(xd_all_reduce(next, &enough, &enough, 1, XD_DTYPE_I32, XD_MAX), XD_OK);
            CHECK_EQ_INT(checked_call(&l), XD_OK);
        }
        xd_comm_destroy(l.half);
        xd_comm_destroy(next);
    }
    xd_comm_destroy(half);
    return XD_OK;
}

XD_TEST(a_process_that_was_stopped_learns_that_the_others_have_gone_on_and_disturbs_nobody) {
    const xd_ctx_desc desc = { .timeout_seconds = 0.2, .init_timeout_seconds = 60 };
    for (int i = 0; i < 2; i++) {
        pause_scene *p = (pause_scene *)node_memory(sizeof *p);
        node_end *ends = (node_end *)node_memory(4 * sizeof *ends);
        pid_t children[4];
        char name[32];
        const node_start start = { .ranks = 4, .desc = &desc, .function = doze, .argument = p };
        node_name(name);
        node_fork(&start, name, children, ends);
        while (__atomic_load_n(&p->joined, __ATOMIC_ACQUIRE) < 4) nap(100);
        nap(1500 * i);
        kill(children[1], SIGSTOP);
        for (int r = 0; r < 4; r++) {
            CHECK(waitpid(children[r], &ends[r].status, 0) == children[r]);
            CHECK(ends[r].status == 0 && ends[r].failures == 0);
            CHECK_EQ_STR(ends[r].message, "");
        }
        CHECK_EQ_INT(node_left_behind(), 0);
        munmap(ends, 4 * sizeof *ends);
        munmap(p, sizeof *p);
    }
}

/* ---- who comes, and who does not ---- */

static void run(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument) {
    const node_start start = { .ranks = ranks, .desc = desc, .function = function, .argument = argument };
    char message[256];
    CHECK_EQ_INT(node_run(&start, message), XD_OK);
    CHECK_EQ_STR(message, "");
}

/* The sum of one of each rank is what the world is. */
static void is_whole(xd_comm *world, int size) {
    int32_t one = 1;
    CHECK_EQ_INT(xd_comm_size(world), size);
    CHECK_EQ_INT(xd_all_reduce(world, &one, &one, 1, XD_DTYPE_I32, XD_SUM), XD_OK);
    CHECK_EQ_INT(one, size);
}

static xd_result dawdle(xd_comm *world, void *argument) {
    xd_comm *next = NULL;
    (void)argument;
    XD_TRY(xd_barrier(world));
    if (xd_comm_rank(world) == 2) nap(400000);
    CHECK(xd_barrier(world) != XD_OK);
    CHECK_EQ_INT(xd_comm_shrink(world, 20.0, &next), XD_OK);
    if (next) is_whole(next, 3);
    xd_comm_destroy(next);
    return XD_OK;
}

XD_TEST(a_rank_that_was_late_and_comes_in_time_for_the_next_world_is_in_it) {
    const xd_ctx_desc desc = { .timeout_seconds = 0.2, .init_timeout_seconds = 60 };
    run(3, &desc, dawdle, NULL);
}

/* Rank 1 leaves and lives on, until the others have gone on. */
static xd_result leave(xd_comm *world, void *argument) {
    uint32_t *on = (uint32_t *)argument;
    xd_comm *next = NULL;
    XD_TRY(xd_barrier(world));
    if (xd_comm_rank(world) == 1) {
        xd_comm_abort(world);
        CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_STATE);
        CHECK_EQ_STR(xd_last_error(xd_comm_ctx(world))->message,
                     "rank 1 has left this world of 4 ranks already");
        while (__atomic_load_n(on, __ATOMIC_ACQUIRE) < 3) nap(1000);
        return XD_OK;
    }
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    const double begin = now();
    CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_OK);
    CHECK(now() - begin < 20.0); /* it does not wait for the deadline */
    is_whole(next, 3);
    CHECK_EQ_INT(xd_comm_rank(next), xd_comm_rank(world) - (xd_comm_rank(world) > 1));
    CHECK_EQ_INT(xd_comm_shrink(next, 0.0, &next), XD_ERROR_STATE);
    CHECK_EQ_STR(xd_last_error(xd_comm_ctx(world))->message, "nothing has broken this world of 3 ranks");
    CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_STATE);
    __atomic_add_fetch(on, 1, __ATOMIC_RELEASE);
    xd_comm_destroy(next);
    return XD_OK;
}

XD_TEST(a_rank_that_leaves_is_not_waited_for_and_a_world_is_left_once) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    uint32_t *on = (uint32_t *)node_memory(sizeof *on);
    run(4, &desc, leave, on);
    munmap(on, sizeof *on);
}

/* Each time one is lost, up to the last. */
static xd_result dwindle(xd_comm *world, void *argument) {
    const int size = xd_comm_size(world);
    xd_comm *at = world;
    (void)argument;
    for (int left = size - 1; left > 0; left--) {
        xd_comm *next = NULL;
        CHECK_EQ_INT(xd_barrier(at), XD_OK);
        if (xd_comm_rank(at) == left / 2) break;
        CHECK_EQ_INT(xd_barrier(at), XD_ERROR_PEER);
        CHECK_EQ_INT(xd_comm_shrink(at, 0.0, &next), XD_OK);
        if (at != world) xd_comm_destroy(at);
        at = next;
        is_whole(at, left);
    }
    if (at != world) xd_comm_destroy(at);
    return XD_OK;
}

XD_TEST(ranks_leave_one_after_another_until_one_is_alone) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    run(8, &desc, dwindle, NULL);
}

/* ---- memory ---- */

static int allocations, refused_allocation;

static void *scarce(void *user, size_t bytes) {
    (void)user;
    return ++allocations == refused_allocation ? NULL : malloc(bytes);
}

static void give_back(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* Rank 3 leaves, and rank 1 cannot follow: then it is missed as well. */
static xd_result starve(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world), fails_at = *(const int *)argument;
    int *well = (int *)argument + 1;
    xd_comm *next = NULL, *last = NULL;
    XD_TRY(xd_barrier(world));
    if (rank == 3) return XD_OK;
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    allocations = 0;
    refused_allocation = rank == 1 ? fails_at : 0;
    const xd_result result = xd_comm_shrink(world, 0.0, &next);
    refused_allocation = 0;
    if (rank == 1) {
        CHECK(result == XD_OK || result == XD_ERROR_MEMORY);
        if (result == XD_OK) *well = 1;
        if (result != XD_OK) CHECK(next == NULL);
        if (result != XD_OK) return XD_OK;
    }
    CHECK_EQ_INT(result, XD_OK);
    const xd_result called = next ? xd_barrier(next) : result;
    if (called != XD_OK) {
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, 1);
        CHECK_EQ_INT(xd_comm_shrink(next, 0.0, &last), XD_OK);
        is_whole(last, 2);
    } else {
        is_whole(next, xd_comm_size(next));
    }
    xd_comm_destroy(last);
    xd_comm_destroy(next);
    return XD_OK;
}

XD_TEST(a_rank_without_memory_is_missed_by_the_others_and_nobody_waits) {
    const xd_ctx_desc desc = { .allocator = { scarce, give_back, NULL }, .timeout_seconds = 60 };
    int *scene_memory = (int *)node_memory(2 * sizeof *scene_memory);
    for (scene_memory[0] = 1; !scene_memory[1] && scene_memory[0] < 60; scene_memory[0]++)
        run(4, &desc, starve, scene_memory);
    CHECK(scene_memory[1] && scene_memory[0] > 10);
    munmap(scene_memory, 2 * sizeof *scene_memory);
}

static xd_result fill(xd_comm *world, void *argument) {
    const struct rlimit limit = { 1 << 12, 1 << 12 };
    xd_comm *next = NULL;
    (void)argument;
    XD_TRY(xd_barrier(world));
    if (xd_comm_rank(world) == 0) return XD_OK;
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_MEMORY);
    CHECK(next == NULL && strstr(xd_last_error(xd_comm_ctx(world))->message,
                                 "no room in /dev/shm for a world of what is left of 3 ranks"));
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    return XD_OK;
}

XD_TEST(memory_that_is_not_there_is_an_error_of_all_that_are_left) {
    run(3, NULL, fill, NULL);
}

/* ---- what is refused ---- */

static xd_result refuse(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm *half = NULL, *next = NULL;
    (void)argument;
    XD_TRY(xd_comm_split(world, 0, 0, &half));
    CHECK_EQ_INT(xd_comm_shrink(world, 0.0, &next), XD_ERROR_STATE);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "nothing has broken this world of 2 ranks");
    CHECK_EQ_INT(xd_comm_shrink(half, 0.0, &next), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "a group of 2 ranks is not a world"));
    CHECK_EQ_INT(xd_comm_shrink(world, -1.0, &next), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "timeout_s is -1");
    CHECK_EQ_INT(xd_comm_shrink(world, NAN, &next), XD_ERROR_ARGUMENT);
    CHECK(next == NULL);
    xd_comm_destroy(half);
    return xd_barrier(world);
}

XD_TEST(what_cannot_shrink_says_so) {
    run(2, NULL, refuse, NULL);
    xd_ctx *ctx = NULL;
    xd_comm *alone = NULL, *next = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &alone), XD_OK);
    CHECK_EQ_INT(xd_comm_shrink(alone, 0.0, &next), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, " cannot go on without one of its "));
    CHECK(next == NULL);
    xd_comm_destroy(alone);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
