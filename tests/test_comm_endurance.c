/* Collectives by the tens of thousands: after the first thousand neither the contexts' allocator nor the process takes more
 * memory, and the sums are still right. Four ranks, which are threads.
 *
 *     test_comm_endurance                     3000 collectives: 0.1 seconds of processor
 *     test_comm_endurance --calls 100000      more of them */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>
#include <unistd.h>

enum { RANKS = 4, WARM = 1000, LARGE = 2500 /* elements: beyond what goes into a page */, KINDS = 12 };

static int64_t calls = 3000;

/* Blocks and bytes of the allocator of all contexts and of the world; atomic. Each block begins with its size. */
typedef struct store {
    int64_t blocks, bytes, requests;
} store;

enum { HEAD = 64 };

static void *store_allocate(void *user, size_t bytes) {
    store *s = (store *)user;
    char *block = (char *)malloc(bytes + HEAD);
    if (!block) return NULL;
    memcpy(block, &bytes, sizeof bytes);
    __atomic_add_fetch(&s->blocks, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&s->requests, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&s->bytes, (int64_t)bytes, __ATOMIC_RELAXED);
    return block + HEAD;
}

static void store_release(void *user, void *memory) {
    store *s = (store *)user;
    size_t bytes;
    memcpy(&bytes, (char *)memory - HEAD, sizeof bytes);
    __atomic_sub_fetch(&s->blocks, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&s->bytes, (int64_t)bytes, __ATOMIC_RELAXED);
    free((char *)memory - HEAD);
}

/* Resident memory of the process in KB, as Linux tells it; -1 elsewhere. */
static long resident(void) {
    char line[256];
    long kilobytes = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "VmRSS:", 6) == 0) kilobytes = atol(line + 6);
    if (file) fclose(file);
    return kilobytes;
}

typedef struct rank_memory {
    float send[RANKS * LARGE], recv[RANKS * LARGE];
} rank_memory;

/* One group after another of ranks, made and destroyed again. */
static xd_result regroup(xd_comm *world, int64_t i) {
    xd_comm *half = NULL;
    int64_t one = 1;
    XD_TRY(xd_comm_split(world, (int)((xd_comm_rank(world) + i) % 2), 0, &half));
    const xd_result result = xd_all_reduce(half, &one, &one, 1, XD_DTYPE_I64, XD_SUM);
    CHECK_EQ_INT(one, RANKS / 2);
    xd_comm_destroy(half);
    return result;
}

static xd_result pass_on(xd_comm *world, rank_memory *m, int64_t count) {
    const int rank = xd_comm_rank(world), next = (rank + 1) % RANKS, before = (rank + RANKS - 1) % RANKS;
    if (rank % 2 == 0) XD_TRY(xd_send(world, m->send, count, XD_DTYPE_F32, next));
    XD_TRY(xd_recv(world, m->recv, count, XD_DTYPE_F32, before));
    return rank % 2 ? xd_send(world, m->send, count, XD_DTYPE_F32, next) : XD_OK;
}

/* A call that all ranks refuse, because the last one passes another count. */
static xd_result disagree(xd_comm *world, rank_memory *m) {
    const int64_t count = xd_comm_rank(world) == RANKS - 1 ? 4 : 3;
    CHECK_EQ_INT(xd_all_reduce(world, m->send, m->recv, count, XD_DTYPE_F32, XD_SUM), XD_ERROR_MISMATCH);
    return XD_OK;
}

static xd_result sum_of_leaves(xd_comm *world, rank_memory *m, int64_t count) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = m->send;
    c.recv = m->recv;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.leaves.first = xd_comm_rank(world);
    c.leaves.count = 1;
    c.leaves.total = RANKS;
    return xd_collective_run(world, &c);
}

/* Call i: kinds, sizes and paths in turn. */
static xd_result call(xd_comm *world, rank_memory *m, int64_t i) {
    const int64_t count = i / KINDS % 3 == 0 ? LARGE : i / KINDS % 3 == 1 ? 7 : 0;
    const int64_t counts[RANKS] = { count, 0, count / 2, count };
    const int64_t equal[RANKS] = { count, count, count, count };
    const int rank = xd_comm_rank(world), root = (int)(i % RANKS);
    for (int64_t k = 0; k < count; k++) m->send[k] = (float)(rank + 1);
    switch (i % KINDS) {
    case 0: return xd_barrier(world);
    case 1: return xd_broadcast(world, m->recv, count, XD_DTYPE_F32, root);
    case 2: return xd_all_reduce(world, m->send, m->recv, count, XD_DTYPE_F32, XD_SUM);
    case 3: return xd_reduce_scatter(world, m->send, m->recv, counts, XD_DTYPE_F32, XD_MAX);
    case 4: return xd_all_gather(world, m->send, m->recv, counts, XD_DTYPE_F32);
    case 5: return xd_all_to_all(world, m->send, equal, m->recv, equal, XD_DTYPE_F32);
    case 6: return xd_gather(world, m->send, m->recv, counts, XD_DTYPE_F32, root);
    case 7: return xd_scatter(world, m->send, m->recv, counts, XD_DTYPE_F32, root);
    case 8: return pass_on(world, m, count);
    case 9: return i % 5 ? sum_of_leaves(world, m, count) : xd_agree(world, XD_OK);
    case 10: return i % 3 ? regroup(world, i) : disagree(world, m);
    default: return xd_all_reduce(world, m->send, m->send, count, XD_DTYPE_BF16, XD_MIN);
    }
}

static void check_call(const rank_memory *m, int64_t i) {
    const int64_t kind = i % KINDS, large = i / KINDS % 3 == 0;
    if (!large || (kind != 2 && !(kind == 9 && i % 5))) return;
    long wrong = 0;
    for (int k = 0; k < LARGE; k += 13) wrong += m->recv[k] != 10.0f; /* 1 + 2 + 3 + 4 */
    CHECK_EQ_INT(wrong, 0);
}

typedef struct measures {
    store *memory;
    store warm, end;
    long warm_resident, end_resident;
} measures;

/* Rank 0 measures between two barriers, while nobody allocates. */
static xd_result measure(xd_comm *world, const store *from, store *to, long *pages) {
    XD_TRY(xd_barrier(world));
    if (xd_comm_rank(world) == 0) {
        *to = *from;
        *pages = resident();
    }
    return xd_barrier(world);
}

static xd_result endure(xd_comm *world, void *argument) {
    measures *all = (measures *)argument;
    rank_memory *m = (rank_memory *)calloc(1, sizeof *m);
    xd_result result = XD_OK;
    for (int64_t i = 0; i < calls && result == XD_OK; i++) {
        if (i == WARM) result = measure(world, all->memory, &all->warm, &all->warm_resident);
        if (result == XD_OK) result = call(world, m, i);
        check_call(m, i);
    }
    if (result == XD_OK) result = measure(world, all->memory, &all->end, &all->end_resident);
    free(m);
    return result;
}

static void play(xd_reduction mode) {
    store memory = { 0, 0, 0 };
    measures all;
    xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
    const xd_ctx_desc desc = { .allocator = { store_allocate, store_release, &memory }, .reduction = mode };
    memset(&all, 0, sizeof all);
    all.memory = &memory;
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, endure, &all, &error), XD_OK);
    CHECK_EQ_STR(error.message, "");
    CHECK_EQ_INT(all.warm.blocks, all.end.blocks);
    CHECK_EQ_INT(all.warm.bytes, all.end.bytes);
    CHECK_EQ_INT(memory.blocks, 0);
    CHECK_EQ_INT(memory.bytes, 0);
    /* The C library may keep some pages more; a block a call would be megabytes in 100,000 calls. Sanitizers keep what was
     * released. */
    CHECK(XD_TEST_SANITIZED || all.end_resident - all.warm_resident <= 512);
    printf(
        "%lld calls: %lld blocks of %lld bytes after %d, %lld of %lld at the end; %ld and %ld KB resident\n",
        (long long)calls, (long long)all.warm.blocks, (long long)all.warm.bytes, (int)WARM,
        (long long)all.end.blocks, (long long)all.end.bytes, all.warm_resident, all.end_resident);
}

XD_TEST(many_collectives_take_no_more_memory_than_some) {
    play(XD_REDUCTION_DETERMINISTIC);
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "--calls") == 0) {
        calls = atoll(argv[2]) > WARM ? atoll(argv[2]) : WARM + 1;
        argc = 1;
    }
    return xd_test_main(argc, argv);
}
