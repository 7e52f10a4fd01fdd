/* The MPI transport against the threads transport: the same program on both, the same bits. Every process
 * runs every test; rank 0 counts and prints. Needs three ranks or more. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "mpi_runner.h"

#include <stdlib.h>

enum { MAX_RANKS = 16, ODD = 2 };

/* ---- what both transports run ---- */

typedef struct script {
    int64_t count;
    xd_dtype dtype;
    size_t capacity;               /* bytes behind each log */
    size_t used[MAX_RANKS];        /* bytes of it that are written */
    unsigned char *log[MAX_RANKS]; /* every result of every call, by rank */
} script;

static void note(script *s, int rank, const void *data, size_t bytes) {
    CHECK(s->used[rank] + bytes <= s->capacity);
    if (s->used[rank] + bytes > s->capacity) return;
    memcpy(s->log[rank] + s->used[rank], data, bytes);
    s->used[rank] += bytes;
}

/* Fractions of both signs and many sizes, so that another order of the additions gives other bits. */
static void fill(void *data, xd_dtype dtype, int64_t count, int rank) {
    for (int64_t i = 0; i < count; i++)
        xd_store_f64(data, dtype, i,
                     floor(sin((double)(rank * 131 + i)) * 4096.0) * (double)(1 + i % 7 * 50) / 64.0);
}

static void play_sums(xd_comm *comm, script *s, void *send, void *recv) {
    const int n = xd_comm_size(comm), rank = xd_comm_rank(comm);
    const size_t size = xd_dtype_size(s->dtype), bytes = (size_t)s->count * size;
    int64_t counts[MAX_RANKS], begin = 0;
    for (int op = XD_SUM; op <= (s->dtype == XD_DTYPE_I64 ? XD_MIN : XD_AVG); op++) {
        CHECK(xd_all_reduce(comm, send, recv, s->count, s->dtype, (xd_reduce_op)op) == XD_OK);
        note(s, rank, recv, bytes);
        memcpy(recv, send, bytes);
        CHECK(xd_all_reduce(comm, recv, recv, s->count, s->dtype, (xd_reduce_op)op) == XD_OK);
        note(s, rank, recv, bytes);
    }
    for (int r = 0; r < n; r++) counts[r] = r == 0 ? 0 : s->count / n; /* the first gets nothing */
    counts[n - 1] = s->count - (n > 1 ? s->count / n * (n - 2) : 0);   /* the last what is left */
    for (int r = 0; r < rank; r++) begin += counts[r];
    CHECK(xd_reduce_scatter(comm, send, recv, counts, s->dtype, XD_SUM) == XD_OK);
    note(s, rank, recv, (size_t)counts[rank] * size);
    memcpy(recv, send, bytes);
    char *own = (char *)recv + (size_t)begin * size;
    CHECK(xd_reduce_scatter(comm, recv, own, counts, s->dtype, XD_SUM) == XD_OK);
    note(s, rank, own, (size_t)counts[rank] * size);
}

static void play_moves(xd_comm *comm, script *s, void *send, void *recv) {
    const int n = xd_comm_size(comm), rank = xd_comm_rank(comm), root = n - 1;
    const size_t size = xd_dtype_size(s->dtype), bytes = (size_t)s->count * size;
    int64_t counts[MAX_RANKS], begin = 0;
    for (int r = 0; r < n; r++) counts[r] = (r % 3) * s->count / (3 * n); /* uneven, some zero */
    for (int r = 0; r < rank; r++) begin += counts[r];
    memset(recv, 0, bytes);
    CHECK(xd_all_gather(comm, send, recv, counts, s->dtype) == XD_OK);
    note(s, rank, recv, bytes);
    char *own = (char *)recv + (size_t)begin * size;
    memset(recv, 0, bytes);
    memcpy(own, send, (size_t)counts[rank] * size);
    CHECK(xd_all_gather(comm, own, recv, counts, s->dtype) == XD_OK); /* in place */
    note(s, rank, recv, bytes);
    memset(recv, 0, bytes);
    CHECK(xd_gather(comm, send, recv, counts, s->dtype, root) == XD_OK);
    note(s, rank, recv, bytes);
    memset(recv, 0, bytes);
    CHECK(xd_scatter(comm, send, recv, counts, s->dtype, root) == XD_OK);
    note(s, rank, recv, bytes);
    CHECK(xd_broadcast(comm, recv, s->count, s->dtype, root) == XD_OK);
    note(s, rank, recv, bytes);
}

/* all_to_all with gaps before every piece on both sides, then a message round the ring. */
static void play_pairs(xd_comm *comm, script *s, void *send, void *recv) {
    const int n = xd_comm_size(comm), rank = xd_comm_rank(comm);
    const int64_t unit = s->count / (4 * n);
    int64_t out[MAX_RANKS], in[MAX_RANKS], from[MAX_RANKS], to[MAX_RANKS];
    const size_t bytes = (size_t)s->count * xd_dtype_size(s->dtype);
    for (int r = 0; r < n; r++) {
        out[r] = ((rank + 2 * r) % 4) * unit;
        in[r] = ((r + 2 * rank) % 4) * unit;
        from[r] = (4 * (n - 1 - r)) * unit; /* back to front */
        to[r] = 4 * r * unit + unit / 2;
    }
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_TO_ALL;
    c.send = send;
    c.recv = recv;
    c.send_counts = out;
    c.recv_counts = in;
    c.send_displacements = from;
    c.recv_displacements = to;
    c.dtype = s->dtype;
    memset(recv, 0, bytes);
    CHECK(xd_collective_run(comm, &c) == XD_OK);
    note(s, rank, recv, bytes);
    const int next = (rank + 1) % n, last = (rank + n - 1) % n;
    if (rank == 0) CHECK(xd_send(comm, send, s->count, s->dtype, next) == XD_OK);
    CHECK(xd_recv(comm, recv, s->count, s->dtype, last) == XD_OK);
    if (rank != 0) CHECK(xd_send(comm, recv, s->count, s->dtype, next) == XD_OK);
    note(s, rank, recv, bytes);
}

static xd_result play(xd_comm *comm, void *argument) {
    script *s = (script *)argument;
    const size_t bytes = (size_t)(s->count + 64) * 8;
    void *send = calloc(1, bytes), *recv = calloc(1, bytes);
    CHECK(send && recv);
    if (!send || !recv) return XD_ERROR_MEMORY;
    fill(send, s->dtype, s->count, xd_comm_rank(comm));
    play_sums(comm, s, send, recv);
    play_moves(comm, s, send, recv);
    play_pairs(comm, s, send, recv);
    free(recv);
    free(send);
    return xd_barrier(comm);
}

/* Sums over the canonical tree: rank 0 has the leaves that a fair split leaves over. */
static xd_result play_leaves(xd_comm *comm, void *argument) {
    script *s = (script *)argument;
    const int n = xd_comm_size(comm), rank = xd_comm_rank(comm);
    const int64_t total = 4 * n + 3;
    const xd_leaves leaves = { rank ? 3 + 4 * rank : 0, rank ? 4 : 7, total };
    int64_t counts[MAX_RANKS];
    xd_leaf_stack *stack = NULL;
    float *leaf = (float *)malloc((size_t)s->count * sizeof *leaf),
          *sum = (float *)malloc((size_t)s->count * 4);
    CHECK(xd_leaf_stack_create(xd_comm_ctx(comm), leaves, s->count, &stack) == XD_OK);
    for (int64_t l = 0; l < leaves.count; l++) {
        fill(leaf, XD_DTYPE_F32, s->count, (int)(leaves.first + l));
        CHECK(xd_leaf_stack_push(stack, leaf) == XD_OK);
    }
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = xd_leaf_stack_forest(stack);
    c.recv = sum;
    c.count = s->count;
    c.dtype = XD_DTYPE_F32;
    c.leaves = leaves;
    CHECK(xd_collective_run(comm, &c) == XD_OK);
    note(s, rank, sum, (size_t)s->count * sizeof *sum);
    for (int r = 0; r < n; r++) counts[r] = s->count / n + (r < s->count % n);
    c.kind = XD_COLLECTIVE_REDUCE_SCATTER;
    c.send_counts = counts;
    c.count = 0;
    c.op = XD_AVG;
    CHECK(xd_collective_run(comm, &c) == XD_OK);
    note(s, rank, sum, (size_t)counts[rank] * sizeof *sum);
    xd_leaf_stack_destroy(stack);
    free(sum);
    free(leaf);
    return XD_OK;
}

/* ---- running it ---- */

static xd_comm *join(const xd_ctx_desc *desc) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    CHECK(xd_ctx_create(desc, &ctx) == XD_OK);
    CHECK(xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = MPI_COMM_WORLD }, &world) == XD_OK);
    return world;
}

static void leave(xd_comm *world) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

static void compare(xd_reduction mode, xd_rank_function function, int64_t count, xd_dtype dtype) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 30 };
    script here, there;
    xd_comm *world = join(&desc);
    const int n = xd_comm_size(world), rank = xd_comm_rank(world);
    memset(&here, 0, sizeof here);
    here.count = count;
    here.dtype = dtype;
    here.capacity = (size_t)(count + 1) * 20 * 8;
    there = here;
    here.log[rank] = (unsigned char *)malloc(here.capacity);
    for (int r = 0; r < n; r++) there.log[r] = (unsigned char *)malloc(there.capacity);
    CHECK_EQ_INT(function(world, &here), XD_OK);
    CHECK_EQ_INT(xd_run_threads(n, &desc, function, &there, NULL), XD_OK);
    CHECK_EQ_INT(here.used[rank], there.used[rank]);
    CHECK(memcmp(here.log[rank], there.log[rank], here.used[rank]) == 0);
    for (int r = 0; r < n; r++) free(there.log[r]);
    free(here.log[rank]);
    leave(world);
}

XD_TEST(every_collective_gives_the_bits_of_the_threads_transport) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_I64 };
    static const int64_t counts[] = { 0, 1, 7, 600, 5003, 700001 /* many tiles */ };
    for (int d = 0; d < 3; d++)
        for (int c = 0; c < 6; c++) compare(XD_REDUCTION_DETERMINISTIC, play, counts[c], dtypes[d]);
}

XD_TEST(fast_mode_gives_them_too) {
    compare(XD_REDUCTION_FAST, play, 5003, XD_DTYPE_F32);
}

XD_TEST(leaf_sums_give_the_bits_of_the_threads_transport) {
    compare(XD_REDUCTION_INVARIANT, play_leaves, 5, XD_DTYPE_F32);
    compare(XD_REDUCTION_INVARIANT, play_leaves, 90001, XD_DTYPE_F32);
}

XD_TEST(groups_split_by_color_and_key_and_split_again) {
    xd_comm *world = join(NULL);
    const int rank = xd_comm_rank(world), n = xd_comm_size(world);
    for (int round = 0; round < 3; round++) {
        xd_comm *row = NULL, *pair = NULL, *none = NULL;
        int32_t sum = 0, want = 0;
        CHECK(xd_comm_split(world, rank % 2, -rank, &row) == XD_OK); /* keys turn the order round */
        CHECK_EQ_INT(xd_comm_size(row), (n + 1 - rank % 2) / 2);
        CHECK_EQ_INT(xd_comm_world_rank(row, xd_comm_rank(row)), rank);
        CHECK(xd_all_reduce(row, &rank, &sum, 1, XD_DTYPE_I32, XD_SUM) == XD_OK);
        for (int r = rank % 2; r < n; r += 2) want += r;
        CHECK_EQ_INT(sum, want);
        CHECK(xd_comm_split(row, xd_comm_rank(row) / 2, 0, &pair) == XD_OK);
        CHECK(xd_barrier(pair) == XD_OK);
        CHECK(xd_comm_split(world, rank == 0 ? 0 : -1, 0, &none) == XD_OK);
        CHECK((none != NULL) == (rank == 0));
        xd_comm_destroy(none);
        xd_comm_destroy(pair);
        xd_comm_destroy(row);
    }
    leave(world);
}

XD_TEST(processes_take_the_lowest_cpu_level_among_them) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const xd_ctx_desc desc = { .cpu = rank == ODD ? XD_CPU_PLAIN : XD_CPU_BEST };
    xd_comm *world = join(&desc);
    CHECK_EQ_INT(xd_ctx_settings(xd_comm_ctx(world))->cpu, XD_CPU_PLAIN);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    leave(world);
}

XD_TEST(a_desc_left_at_zero_joins_all_processes_and_a_communicator_of_some_joins_those) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    MPI_Comm halves = MPI_COMM_NULL;
    int size = 0, rank = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int given = 0; given < 2; given++) {
        CHECK_EQ_INT(xd_comm_mpi(ctx, given ? &(xd_mpi_desc){ 0 } : NULL, &world), XD_OK);
        CHECK_EQ_INT(xd_comm_size(world), size);
        CHECK_EQ_INT(xd_comm_rank(world), rank);
        xd_comm_destroy(world);
    }
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &halves);
    CHECK_EQ_INT(xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = halves }, &world), XD_OK);
    CHECK_EQ_INT(xd_comm_size(world), (size + 1 - rank % 2) / 2);
    CHECK_EQ_INT(xd_comm_rank(world), xd_comm_size(world) - 1 - rank / 2);
    xd_comm_destroy(world);
    MPI_Comm_free(&halves);
    xd_ctx_destroy(ctx);
}

XD_TEST(sums_have_the_same_bits_whatever_the_staging) {
    enum { COUNT = 5000 };
    static double sums[2][COUNT];
    for (int small = 0; small < 2; small++) {
        xd_ctx *ctx = NULL;
        xd_comm *world = NULL;
        int size = 0;
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
        const xd_mpi_desc desc = { .staging_bytes = small ? 1024 * (size_t)size : 0 };
        CHECK_EQ_INT(xd_comm_mpi(ctx, &desc, &world), XD_OK);
        for (int i = 0; i < COUNT; i++) sums[small][i] = 1.0 / (1 + i + 7 * xd_comm_rank(world));
        CHECK_EQ_INT(xd_all_reduce(world, sums[small], sums[small], COUNT, XD_DTYPE_F64, XD_SUM), XD_OK);
        leave(world);
    }
    CHECK(memcmp(sums[0], sums[1], sizeof sums[0]) == 0);
}

/* Every rank is refused, with these words in the message. */
static void refused(const xd_mpi_desc *desc, xd_result expected, const char *words) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_comm_mpi(ctx, desc, &world), expected);
    CHECK(world == NULL);
    if (!strstr(xd_last_error(ctx)->message, words)) CHECK_EQ_STR(xd_last_error(ctx)->message, words);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_communicator_that_cannot_be_a_world_is_refused) {
    MPI_Comm half = MPI_COMM_NULL, between = MPI_COMM_NULL;
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    refused(&(xd_mpi_desc){ .mpi = MPI_COMM_NULL }, XD_ERROR_ARGUMENT, "the communicator is MPI_COMM_NULL");
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 0, &between);
    refused(&(xd_mpi_desc){ .mpi = between }, XD_ERROR_ARGUMENT, "joins two groups");
    MPI_Comm_free(&between);
    MPI_Comm_free(&half);
    refused(&(xd_mpi_desc){ .staging_bytes = 1000 }, XD_ERROR_ARGUMENT, "staging_bytes is 1000");
    refused(&(xd_mpi_desc){ .staging_bytes = (rank == ODD ? 1u << 20 : 1u << 21) }, XD_ERROR_MISMATCH,
            "between 1048576 and 2097152 on the ranks");
}

XD_TEST(a_group_may_outlive_the_handle_of_its_world) {
    xd_comm *world = join(NULL), *all = NULL;
    xd_ctx *ctx = xd_comm_ctx(world);
    CHECK(xd_comm_split(world, 0, 0, &all) == XD_OK);
    xd_comm_destroy(world);
    CHECK(xd_barrier(all) == XD_OK);
    xd_comm_destroy(all);
    xd_ctx_destroy(ctx);
}

/* ---- failures ---- */

static void check_error(xd_comm *world, int culprit) {
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    char name[16];
    snprintf(name, sizeof name, "rank %d", ODD);
    CHECK_EQ_INT(error->culprit, culprit);
    CHECK(strstr(error->message, name) != NULL);
}

XD_TEST(all_ranks_name_the_one_that_passed_something_else) {
    xd_comm *world = join(NULL);
    const bool odd = xd_comm_rank(world) == ODD;
    float a[8] = { 0 }, b[8] = { 0 };
    CHECK_EQ_INT(xd_all_reduce(world, a, b, odd ? 5 : 8, XD_DTYPE_F32, XD_SUM), XD_ERROR_MISMATCH);
    check_error(world, ODD);
    CHECK_EQ_INT(xd_all_reduce(world, a, b, 8, odd ? XD_DTYPE_I32 : XD_DTYPE_F32, XD_SUM), XD_ERROR_MISMATCH);
    check_error(world, ODD);
    CHECK_EQ_INT(xd_all_reduce(world, a, b, 8, XD_DTYPE_F32, odd ? XD_MAX : XD_SUM), XD_ERROR_MISMATCH);
    check_error(world, ODD);
    CHECK_EQ_INT(odd ? xd_barrier(world) : xd_broadcast(world, a, 8, XD_DTYPE_F32, 0), XD_ERROR_MISMATCH);
    check_error(world, ODD);
    CHECK_EQ_INT(xd_broadcast(world, a, odd ? -1 : 8, XD_DTYPE_F32, 0),
                 odd ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    if (!odd) check_error(world, ODD);
    CHECK_EQ_INT(xd_barrier(world), XD_OK); /* the group goes on */
    leave(world);
}

XD_TEST(send_and_receive_of_different_counts_fail_on_both_ranks_with_both_numbers) {
    xd_comm *world = join(NULL);
    const int rank = xd_comm_rank(world);
    int32_t data[8] = { 0 };
    if (rank == 0) CHECK_EQ_INT(xd_send(world, data, 5, XD_DTYPE_I32, 1), XD_ERROR_MISMATCH);
    if (rank == 1) CHECK_EQ_INT(xd_recv(world, data, 8, XD_DTYPE_I32, 0), XD_ERROR_MISMATCH);
    const char *message = xd_last_error(xd_comm_ctx(world))->message;
    if (rank < 2) CHECK(strstr(message, "count 5") && strstr(message, "count 8"));
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    leave(world);
}

XD_TEST(send_and_receive_tell_the_other_rank_of_a_bad_argument) {
    xd_comm *world = join(NULL);
    const int rank = xd_comm_rank(world);
    int32_t data[8] = { 0 };
    if (rank == 1) {
        CHECK_EQ_INT(xd_send(world, data, 8, XD_DTYPE_I32, ODD), XD_ERROR_PEER);
        check_error(world, ODD);
        CHECK_EQ_INT(xd_recv(world, data, 8, XD_DTYPE_I32, ODD), XD_ERROR_PEER);
        check_error(world, ODD);
    }
    if (rank == ODD) {
        CHECK_EQ_INT(xd_recv(world, NULL, 8, XD_DTYPE_I32, 1), XD_ERROR_ARGUMENT);
        CHECK_EQ_INT(xd_send(world, data, -1, XD_DTYPE_I32, 1), XD_ERROR_ARGUMENT);
    }
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    leave(world);
}

XD_TEST(agree_gives_every_rank_the_message_of_the_one_that_failed) {
    xd_comm *world = join(NULL);
    xd_ctx *ctx = xd_comm_ctx(world);
    const bool odd = xd_comm_rank(world) == ODD;
    CHECK_EQ_INT(xd_agree(world, XD_OK), XD_OK);
    const xd_result mine = odd ? XD_FAIL(ctx, XD_ERROR_IO, "no disk under this rank") : XD_OK;
    CHECK_EQ_INT(xd_agree(world, mine), odd ? XD_ERROR_IO : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "no disk under this rank") != NULL);
    CHECK_EQ_INT(xd_agree(world, XD_OK), XD_OK);
    leave(world);
}

/* A clock that stands still until all ranks but ODD wait: however long the machine keeps a process from running,
 * no rank is late but the one that means to be. The first look of an armed rank is its call's deadline, the second
 * is a wait. Then it goes on with the time of day: what comes after the deadline may have one of its own. */
static MPI_Comm patient; /* the ranks but ODD */
static bool is_split;
static MPI_Request all_wait = MPI_REQUEST_NULL;
static int looks = -1, all_waited;

static double patient_clock(void *user) {
    (void)user;
    if (looks >= 0 && ++looks == 2) MPI_Ibarrier(patient, &all_wait);
    if (looks >= 2 && !all_waited) MPI_Test(&all_wait, &all_waited, MPI_STATUS_IGNORE);
    return all_waited ? 1e9 + MPI_Wtime() : 0.0;
}

static xd_comm *join_patient(void) {
    const xd_ctx_desc desc = { .clock = { patient_clock, NULL } };
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (!is_split) MPI_Comm_split(MPI_COMM_WORLD, rank == ODD ? MPI_UNDEFINED : 0, 0, &patient);
    is_split = true;
    looks = -1;
    all_waited = 0;
    return join(&desc);
}

enum { COUNT = 3000, FIRST = XD_COLLECTIVE_BARRIER, LAST = XD_COLLECTIVE_SCATTER };

/* One call of each kind; a wrong one counts one element less. */
static xd_result call(xd_comm *comm, int kind, bool wrong) {
    static float send[MAX_RANKS * COUNT], recv[MAX_RANKS * COUNT];
    int64_t counts[MAX_RANKS], own[MAX_RANKS];
    const int64_t count = COUNT - wrong;
    for (int r = 0; r < MAX_RANKS; r++) counts[r] = own[r] = COUNT;
    counts[1] = count;
    switch (kind) {
    case XD_COLLECTIVE_BARRIER: return xd_barrier(comm);
    case XD_COLLECTIVE_BROADCAST: return xd_broadcast(comm, recv, count, XD_DTYPE_F32, 0);
    case XD_COLLECTIVE_ALL_REDUCE: return xd_all_reduce(comm, send, recv, count, XD_DTYPE_F32, XD_SUM);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xd_reduce_scatter(comm, send, recv, counts, XD_DTYPE_F32, XD_SUM);
    case XD_COLLECTIVE_ALL_GATHER: return xd_all_gather(comm, send, recv, counts, XD_DTYPE_F32);
    case XD_COLLECTIVE_ALL_TO_ALL: return xd_all_to_all(comm, send, counts, recv, own, XD_DTYPE_F32);
    case XD_COLLECTIVE_GATHER: return xd_gather(comm, send, recv, counts, XD_DTYPE_F32, 0);
    default: return xd_scatter(comm, send, recv, counts, XD_DTYPE_F32, 0);
    }
}

XD_TEST(a_wrong_count_of_any_collective_is_found_before_data_moves) {
    xd_comm *world = join(NULL);
    for (int kind = XD_COLLECTIVE_BROADCAST; kind <= LAST; kind++) {
        CHECK_EQ_INT(call(world, kind, xd_comm_rank(world) == ODD), XD_ERROR_MISMATCH);
        /* Two ranks disagree on a count of an all_to_all: both are named, and neither is the culprit. */
        check_error(world, kind == XD_COLLECTIVE_ALL_TO_ALL ? -1 : ODD);
        CHECK_EQ_INT(call(world, kind, false), XD_OK);
    }
    leave(world);
}

/* One rank stays away from a call of `group`; the others learn who it was, and so does it when it comes too
 * late. */
static void stay_away(xd_comm *world, xd_comm *group, int kind) {
    const bool odd = xd_comm_rank(world) == ODD;
    if (!odd) {
        looks = 0;
        CHECK_EQ_INT(call(group, kind, false), XD_ERROR_TIMEOUT);
        check_error(world, ODD);
        CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER); /* sticky */
        check_error(world, ODD);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (odd) {
        CHECK_EQ_INT(call(group, kind, false), XD_ERROR_PEER);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "came after the deadline") != NULL);
    }
}

XD_TEST(a_rank_that_stays_away_from_any_collective_is_named_at_the_deadline) {
    for (int kind = FIRST; kind <= LAST; kind++) {
        xd_comm *world = join_patient();
        CHECK_EQ_INT(xd_barrier(world), XD_OK); /* the first call has the longer deadline */
        stay_away(world, world, kind);
        leave(world);
    }
}

XD_TEST(a_rank_that_stays_away_from_a_sub_group_breaks_the_world) {
    xd_comm *world = join_patient(), *all = NULL;
    CHECK_EQ_INT(xd_comm_split(world, 0, 0, &all), XD_OK);
    stay_away(world, all, XD_COLLECTIVE_ALL_REDUCE);
    xd_comm_destroy(all);
    leave(world);
}

XD_TEST(a_rank_that_aborts_is_named_without_waiting_for_the_deadline) {
    const xd_ctx_desc never = { .timeout_seconds = 1e9, .init_timeout_seconds = 1e9 };
    xd_comm *world = join(&never);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    MPI_Barrier(MPI_COMM_WORLD); /* else the abort may overtake the last message of the barrier above */
    if (xd_comm_rank(world) == ODD)
        xd_comm_abort(world);
    else
        CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER), check_error(world, ODD);
    leave(world);
}

int main(int argc, char **argv) {
    return mpi_run_tests(argc, argv, ODD + 1, MAX_RANKS);
}
