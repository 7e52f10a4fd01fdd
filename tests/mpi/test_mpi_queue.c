/* Queues with a thread of their own over MPI, beside the program's own collectives. Four ranks or more. */
#define XDISTILL_IMPLEMENTATION
#define MPI_RUNNER_THREADS MPI_THREAD_MULTIPLE
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "exchange_suite.h"
#include "mpi_runner.h"
#include "mpi_world.h"
#include "queue_bytes.h"
#include "queue_program.h"
#include "queue_suite.h"

enum { ODD = 2, LONG = 3000 };

static bool allows_threads(void) {
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    return level == MPI_THREAD_MULTIPLE;
}

static void run_on_workers(xd_rank_function function) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode += 2) {
        xd_comm *world = join(&(xd_ctx_desc){ .reduction = (xd_reduction)mode, .timeout_seconds = 60 });
        CHECK_EQ_INT(queued_case(world, XD_QUEUE_WORKER, function), XD_OK);
        leave(world);
    }
}

#define CASE(name)                                                          \
    XD_TEST(name) {                                                         \
        if (!allows_threads()) SKIP("this MPI has no MPI_THREAD_MULTIPLE"); \
        run_on_workers(suite_##name);                                       \
    }
COMM_SUITE(CASE)

static void compare(xd_comm *group, int queues) {
    static job jobs[2];
    const int rank = xd_comm_rank(group);
    memset(jobs, 0, sizeof jobs);
    for (int f = 0; f < 2; f++) {
        jobs[f].seed = 11 + (uint64_t)queues;
        jobs[f].queues = queues;
        jobs[f].form = f ? XD_QUEUE_WORKER : XD_QUEUE_INLINE;
        CHECK_EQ_INT(run_program(group, &jobs[f]), XD_OK);
    }
    CHECK(jobs[0].hash[rank] == jobs[1].hash[rank]);
    CHECK(memcmp(jobs[0].traffic[rank], jobs[1].traffic[rank], sizeof jobs[0].traffic[rank]) == 0);
    CHECK(jobs[0].traffic[rank][0].calls > 0);
}

XD_TEST(a_queue_takes_what_its_bytes_say) {
    xd_comm *world = join(&(xd_ctx_desc){ .allocator = { count_allocate, count_release, NULL } });
    CHECK_EQ_INT(queue_bytes_rank(world, NULL), XD_OK);
    leave(world);
}

XD_TEST(a_random_program_on_workers_gives_the_bits_and_counters_of_the_same_inline) {
    if (!allows_threads()) SKIP("this MPI has no MPI_THREAD_MULTIPLE");
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode += 2) {
        xd_comm *world = join(&(xd_ctx_desc){ .reduction = (xd_reduction)mode }), *pair = NULL;
        compare(world, 1);
        compare(world, 4);
        CHECK_EQ_INT(xd_comm_split(world, xd_comm_rank(world) % 2, 0, &pair), XD_OK);
        compare(pair, 2);
        xd_comm_destroy(pair);
        leave(world);
    }
}

XD_TEST(a_queue_of_processes_is_a_worker_and_runs_beside_calls_on_the_communicator) {
    if (!allows_threads()) SKIP("this MPI has no MPI_THREAD_MULTIPLE");
    static float beside[LONG], data[8][LONG];
    xd_comm *world = join(NULL);
    const int size = xd_comm_size(world);
    xd_queue *queue = NULL;
    CHECK_EQ_INT(xd_queue_create(world, NULL, &queue), XD_OK);
    CHECK_EQ_INT(xd_queue_describe(queue).form, XD_QUEUE_WORKER);
    const uint64_t before = xd_comm_traffic(world).calls;
    for (int round = 0; round < 20; round++) {
        for (int k = 0; k < 8; k++) {
            for (int i = 0; i < LONG; i++) data[k][i] = (float)(k + 1);
            const xd_collective c = sum_of(data[k], data[k], LONG);
            CHECK_EQ_INT(xd_queue_start(queue, &c, NULL), XD_OK);
        }
        for (int i = 0; i < LONG; i++) beside[i] = 3.0f;
        CHECK_EQ_INT(xd_all_reduce(world, beside, beside, LONG, XD_DTYPE_F32, XD_SUM), XD_OK);
        CHECK(beside[LONG - 1] == (float)(3 * size));
        CHECK_EQ_INT(xd_queue_wait_all(queue), XD_OK);
        for (int k = 0; k < 8; k++) CHECK(data[k][round] == (float)((k + 1) * size));
    }
    CHECK_EQ_INT(xd_comm_traffic(world).calls - before, 20);
    CHECK_EQ_INT(xd_queue_describe(queue).traffic.calls, 160);
    xd_queue_destroy(queue);
    leave(world);
}

/* Rank ODD stays away from a record, or from a call beside the queue, while the others wait. The deadline is one that the calls
 * before it keep on a busy machine too. */
static void stay_away(bool beside, bool aborts) {
    static float data[LONG];
    xd_comm *world = join(&(xd_ctx_desc){ .timeout_seconds = 4 });
    const bool odd = xd_comm_rank(world) == ODD;
    xd_queue *queue = NULL;
    const xd_collective c = sum_of(data, data, LONG);
    CHECK_EQ_INT(xd_queue_create(world, NULL, &queue), XD_OK);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (odd) {
        if (aborts) xd_comm_abort(world);
        MPI_Barrier(MPI_COMM_WORLD); /* a wait for something else */
    } else {
        xd_ticket ticket = { 0 };
        xd_result got = XD_OK;
        if (!beside) got = xd_queue_start(queue, &c, &ticket);
        CHECK_EQ_INT(got, XD_OK);
        got = beside ? xd_collective_run(world, &c) : xd_queue_wait(queue, ticket);
        CHECK_EQ_INT(got, aborts ? XD_ERROR_PEER : XD_ERROR_TIMEOUT);
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
        CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
        CHECK_EQ_INT(xd_queue_start(queue, &c, NULL), XD_ERROR_PEER);
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    xd_queue_destroy(queue);
    leave(world);
}

XD_TEST(a_rank_that_stays_away_or_aborts_is_named_in_the_queue_and_beside_it) {
    if (!allows_threads()) SKIP("this MPI has no MPI_THREAD_MULTIPLE");
    for (int i = 0; i < 4; i++) stay_away(i & 1, i & 2);
}

/* Records that differ fail at their wait on every rank, and the queue goes on. */
XD_TEST(a_record_that_differs_fails_at_its_wait_and_the_queue_goes_on) {
    if (!allows_threads()) SKIP("this MPI has no MPI_THREAD_MULTIPLE");
    static float data[LONG];
    xd_comm *world = join(NULL);
    const bool odd = xd_comm_rank(world) == ODD;
    xd_queue *queue = NULL;
    xd_ticket ticket[3];
    CHECK_EQ_INT(xd_queue_create(world, NULL, &queue), XD_OK);
    for (int k = 0; k < 3; k++) {
        const xd_collective c = sum_of(data, data, !odd || k == 2 ? 8 : k == 1 ? 7 : -1);
        CHECK_EQ_INT(xd_queue_start(queue, &c, &ticket[k]), XD_OK);
    }
    CHECK_EQ_INT(xd_queue_wait(queue, ticket[0]), odd ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK_EQ_INT(xd_queue_wait(queue, ticket[1]), XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "rank 2 passed count 7, rank 0 passed count 8"));
    CHECK_EQ_INT(xd_queue_wait(queue, ticket[2]), XD_OK);
    xd_queue_destroy(queue);
    leave(world);
}

/* ---- messages ---- */

XD_TEST(messages_make_progress_together_and_what_differs_is_told_to_both_ranks) {
    xd_comm *world = join(NULL);
    CHECK_EQ_INT(exchange_rounds(world, NULL), XD_OK);
    CHECK_EQ_INT(exchange_mismatch(world, NULL), XD_OK);
    CHECK_EQ_INT(exchange_refusals(world, NULL), XD_OK);
    leave(world);
}

/* A ring in which rank ODD does not take part. Others than its neighbours may have gone when it breaks. */
XD_TEST(a_rank_that_stays_away_from_an_exchange_is_named_by_its_neighbours) {
    static float out[LONG], in[LONG];
    xd_comm *world = join(&(xd_ctx_desc){ .timeout_seconds = 4 });
    const int me = xd_comm_rank(world), n = xd_comm_size(world), right = (me + 1) % n,
              left = (me + n - 1) % n;
    const xd_collective c[2] = { message_of(XD_COLLECTIVE_SEND, out, LONG, right),
                                 message_of(XD_COLLECTIVE_RECV, in, LONG, left) };
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    if (me != ODD) {
        const xd_result got = xd_exchange(world, c, 2);
        if (left == ODD || right == ODD) {
            CHECK_EQ_INT(got, XD_ERROR_TIMEOUT);
            CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    CHECK_EQ_INT(xd_exchange(world, c, 2), XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, ODD);
    leave(world);
}

int main(int argc, char **argv) {
    return mpi_run_tests(argc, argv, 4, MOST);
}
