/* The conformance suite over MPI, and what only processes have. Every process runs every test; rank 0 counts and prints.
 * Needs three ranks or more. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

/* Messages of control rounds that this rank has sent: of every four tags of a group, the first; 0 is that of notices. */
static int control_messages;

static int send_noted(const void *data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm,
                      MPI_Request *request) {
    control_messages += tag > 0 && tag % 4 == 0;
    return MPI_Isend(data, count, type, rank, tag, comm, request);
}

#define MPI_Isend send_noted
#include "xdistill_mpi.h"
#undef MPI_Isend

#include "comm_suite.h"
#include "float_state.h"
#include "mpi_runner.h"
#include "mpi_world.h"

enum { MAX_RANKS = SUITE_RANKS, ODD = 2 };

/* A deadline that nobody would wait for: who is left alone hangs. */
static const xd_ctx_desc never = { .timeout_seconds = 1e9, .init_timeout_seconds = 1e9 };

static void run_in_every_mode(xd_rank_function function) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        const xd_ctx_desc desc = { .reduction = (xd_reduction)mode, .timeout_seconds = 60 };
        xd_comm *world = join(&desc);
        CHECK_EQ_INT(function(world, NULL), XD_OK);
        leave(world);
    }
}

#define CASE(name)                       \
    XD_TEST(name) {                      \
        run_in_every_mode(suite_##name); \
    }
COMM_SUITE(CASE)

static xd_comm *join_comparing(int64_t compare, xd_reduction mode) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 60 };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_comm_mpi(ctx, &(xd_mpi_desc){ .compare = compare }, &world), XD_OK);
    return world;
}

static xd_result suite_data(xd_comm *comm) {
#define RUN(name) XD_TRY(suite_##name(comm, NULL));
    COMM_SUITE_DATA(RUN)
    return XD_OK;
}

XD_TEST(arguments_that_are_null_are_refused_by_name) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_comm_mpi(NULL, NULL, &world), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_comm_mpi(ctx, NULL, NULL), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "out is NULL") != NULL);
    CHECK_EQ_INT(xd_comm_mpi(ctx, NULL, &world), XD_OK);
    leave(world);
}

XD_TEST(calls_that_are_not_compared_give_the_same) {
    static const int64_t compared[] = { -1, 5 };
    for (int k = 0; k < 2; k++)
        for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode += 2) {
            xd_comm *world = join_comparing(compared[k], (xd_reduction)mode);
            CHECK_EQ_INT(suite_data(world), XD_OK);
            leave(world);
        }
}

/* Messages of control rounds that this rank has sent in sums of a leaf a rank. */
static void count_rounds(int64_t compare, bool are_known, int expected) {
    xd_comm *world = join_comparing(compare, XD_REDUCTION_INVARIANT);
    const int n = xd_comm_size(world), before = control_messages;
    xd_leaves known[MAX_RANKS];
    float sum = 1.0f;
    for (int r = 0; r < n; r++) known[r] = (xd_leaves){ r, 1, n };
    for (int k = 0; k < 3; k++) {
        const xd_collective c = { .kind = XD_COLLECTIVE_ALL_REDUCE,
                                  .send = &sum,
                                  .recv = &sum,
                                  .count = 1,
                                  .dtype = XD_DTYPE_F32,
                                  .leaves = known[xd_comm_rank(world)],
                                  .known_leaves = are_known ? known : NULL };
        CHECK_EQ_INT(xd_collective_run(world, &c), XD_OK);
    }
    CHECK(sum == (float)n * (float)n * (float)n);
    CHECK_EQ_INT(control_messages - before, expected * (n - 1));
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    leave(world);
}

XD_TEST(sums_over_known_leaves_take_no_round_where_nothing_is_compared) {
    count_rounds(0, true, 3);
    count_rounds(-1, false, 3);
    count_rounds(2, true, 2);
    count_rounds(-1, true, 0);
}

/* Nobody is told why, but nobody waits until the deadline. */
XD_TEST(a_rank_that_is_refused_where_nothing_is_compared_ends_the_world) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    float data[4] = { 1.0f, 2.0f, 3.0f, 4.0f };
    CHECK(xd_ctx_create(&never, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_comm_mpi(ctx, &(xd_mpi_desc){ .compare = -1 }, &world), XD_OK);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    MPI_Barrier(MPI_COMM_WORLD);
    const bool odd = xd_comm_rank(world) == ODD;
    CHECK_EQ_INT(xd_all_reduce(world, data, data, odd ? -1 : 4, XD_DTYPE_F32, XD_MAX),
                 odd ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(ctx)->culprit, odd ? -1 : ODD);
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER); /* sticky */
    leave(world);
}

XD_TEST(sums_and_pieces_of_many_tiles_equal_a_plain_loop) {
    xd_comm *world = join(NULL);
    suite_reduce(world, XD_DTYPE_F32, XD_SUM, 700001);
    suite_reduce(world, XD_DTYPE_BF16, XD_AVG, 300001);
    suite_sum_leaves(world, XD_DTYPE_F32, 90001);
    suite_gather(world, XD_DTYPE_I64, 200003);
    suite_exchange(world, XD_DTYPE_F32, 100003, true);
    leave(world);
}

/* This program has MPI_THREAD_SINGLE. */
XD_TEST(queues_are_inline_where_mpi_allows_one_thread) {
    for (int form = XD_QUEUE_AUTO; form <= XD_QUEUE_WORKER; form++) {
        xd_comm *world = join(NULL);
        xd_queue *queue = NULL;
        CHECK_EQ_INT(xd_queue_create(world, &(xd_queue_desc){ (xd_queue_form)form, 0 }, &queue), XD_OK);
        CHECK_EQ_INT(xd_queue_describe(queue).form, XD_QUEUE_INLINE);
        xd_queue_destroy(queue);
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
        leave(world);
    }
}

static xd_result of_a_device(const xd_launch *launch, void *out, const void *const *pieces, int ranks,
                             int64_t count, xd_dtype dtype, xd_reduce_op op) {
    (void)out, (void)pieces, (void)dtype, (void)op;
    return XD_FAIL(launch->ctx, XD_ERROR_DEVICE, "a device sums %lld elements of %d ranks", (long long)count,
                   ranks);
}

/* Staging is host memory: the kernels of a context for a device would not reach it. */
XD_TEST(a_context_with_kernels_of_a_device_sums_on_the_host) {
    xd_comm *plain = join(NULL);
    xd_kernels table = *xd_ctx_host_kernels(xd_comm_ctx(plain));
    table.reduce.pieces = of_a_device;
    const xd_ctx_desc desc = { .kernels = &table };
    xd_comm *world = join(&desc);
    float own = (float)(1 + xd_comm_rank(world)), sum = 0.0f;
    CHECK_EQ_INT(xd_all_reduce(world, &own, &sum, 1, XD_DTYPE_F32, XD_SUM), XD_OK);
    CHECK(sum == 0.5f * (float)(xd_comm_size(world) * (xd_comm_size(world) + 1)));
    leave(world);
    leave(plain);
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
    CHECK(xd_ctx_create(&never, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_comm_mpi(ctx, desc, &world), expected);
    CHECK(world == NULL);
    if (!strstr(xd_last_error(ctx)->message, words)) CHECK_EQ_STR(xd_last_error(ctx)->message, words);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_communicator_that_cannot_be_a_world_is_refused) {
    MPI_Comm half = MPI_COMM_NULL, between = MPI_COMM_NULL;
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    refused(&(xd_mpi_desc){ .mpi = MPI_COMM_NULL }, XD_ERROR_ARGUMENT, "the communicator is MPI_COMM_NULL");
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 0, &between);
    refused(&(xd_mpi_desc){ .mpi = between }, XD_ERROR_ARGUMENT, "joins two groups");
    MPI_Comm_free(&between);
    MPI_Comm_free(&half);
}

XD_TEST(a_process_in_another_floating_point_state_is_named_by_all) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    float_state_set(rank == ODD ? FLOAT_UP : FLOAT_DEFAULT);
    refused(&(xd_mpi_desc){ .compare = 0 }, XD_ERROR_MISMATCH,
            "rank 2 computes with rounding up, rank 0 with rounding to nearest");
    float_state_set(FLOAT_DEFAULT);
    leave(join(NULL));
}

XD_TEST(a_staging_size_that_one_rank_gets_wrong_is_refused_by_all_at_once) {
    char words[80];
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    snprintf(words, sizeof words, "staging_bytes is 1000 on rank 0, %d ranks need %d", size, 1024 * size);
    refused(&(xd_mpi_desc){ .staging_bytes = 1000 }, XD_ERROR_ARGUMENT, words);
    snprintf(words, sizeof words, "staging_bytes is 1000 on rank 2, %d ranks need %d", size, 1024 * size);
    refused(&(xd_mpi_desc){ .staging_bytes = rank == ODD ? 1000 : 0 }, XD_ERROR_ARGUMENT, words);
    snprintf(words, sizeof words, "staging_bytes is %zu on rank 2", SIZE_MAX);
    refused(&(xd_mpi_desc){ .staging_bytes = rank == ODD ? SIZE_MAX : 0 }, XD_ERROR_ARGUMENT, words);
    refused(&(xd_mpi_desc){ .staging_bytes = rank == ODD ? 1u << 20 : 1u << 21 }, XD_ERROR_MISMATCH,
            "staging_bytes is 1048576 on rank 2, and 2097152 on rank 0");
    refused(&(xd_mpi_desc){ .compare = rank == ODD ? -2 : 0 }, XD_ERROR_ARGUMENT,
            "compare is -2 on rank 2, and 0 on rank 0");
    refused(&(xd_mpi_desc){ .compare = rank == ODD ? -1 : 7 }, XD_ERROR_MISMATCH,
            "compare is -1 on rank 2, and 7 on rank 0");
}

/* The heap, but call `fails_at` is refused on rank ODD. */
static int allocations, fails_at;

static void *scarce(void *user, size_t bytes) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    (void)user;
    return rank == ODD && ++allocations == fails_at ? NULL : malloc(bytes);
}

static void give_back(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* Without memory on one rank. Returns whether all joined. */
static bool join_scarce(int fails) {
    xd_ctx_desc desc = never;
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    desc.allocator.allocate = scarce;
    desc.allocator.release = give_back;
    fails_at = 0;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    allocations = 0;
    fails_at = fails;
    const xd_result result = xd_comm_mpi(ctx, NULL, &world);
    if (result != XD_OK) {
        CHECK_EQ_INT(result, rank == ODD ? XD_ERROR_MEMORY : XD_ERROR_PEER);
        CHECK_EQ_INT(xd_last_error(ctx)->culprit, rank == ODD ? -1 : ODD);
        CHECK(rank == ODD || strstr(xd_last_error(ctx)->message, "rank 2 could not join: ERROR_MEMORY"));
        CHECK(world == NULL);
    }
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    return result == XD_OK;
}

/* The first allocation is that of what a rank tells the others with. */
XD_TEST(a_rank_without_memory_lets_nobody_wait) {
    int k = 2;
    while (!join_scarce(k)) k++;
    CHECK(k > 10);
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

/* A call of each kind. */
static xd_result call(xd_comm *comm, int kind) {
    enum { COUNT = 3000 };
    static float send[MAX_RANKS * COUNT], recv[MAX_RANKS * COUNT];
    return suite_call(comm, kind, SUITE_FAULTS, false, COUNT, send, recv);
}

/* One rank stays away from a call of `group`; the others learn who it was, and so does it when it comes too
 * late. */
static void stay_away(xd_comm *world, xd_comm *group, int kind) {
    const bool odd = xd_comm_rank(world) == ODD;
    if (!odd) {
        looks = 0;
        CHECK_EQ_INT(call(group, kind), XD_ERROR_TIMEOUT);
        check_error(world, ODD);
        CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER); /* sticky */
        check_error(world, ODD);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (odd) {
        CHECK_EQ_INT(call(group, kind), XD_ERROR_PEER);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "came after the deadline") != NULL);
    }
}

XD_TEST(a_rank_that_stays_away_from_any_collective_is_named_at_the_deadline) {
    for (int kind = XD_COLLECTIVE_BARRIER; kind <= XD_COLLECTIVE_SCATTER; kind++) {
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
