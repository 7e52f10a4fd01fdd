/* Queues with a thread of their own, and messages, between processes of one machine. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "exchange_suite.h"
#include "node_world.h"
#include "queue_bytes.h"
#include "queue_program.h"
#include "queue_suite.h"

enum { LONG = 3000, RING = 200003 };

static void run(int ranks, xd_reduction mode, xd_rank_function function, void *argument) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 60, .init_timeout_seconds = 60 };
    const node_start start = { .ranks = ranks, .desc = &desc, .function = function, .argument = argument };
    char message[256];
    CHECK_EQ_INT(node_run(&start, message), XD_OK);
    CHECK_EQ_STR(message, "");
}

typedef struct scene {
    xd_rank_function function;
} scene;

static xd_result case_rank(xd_comm *world, void *argument) {
    return queued_case(world, XD_QUEUE_WORKER, ((const scene *)argument)->function);
}

static void run_on_workers(xd_rank_function function) {
    scene s = { function };
    run(4, XD_REDUCTION_DETERMINISTIC, case_rank, &s);
    run(3, XD_REDUCTION_INVARIANT, case_rank, &s);
}

#define CASE(name)                    \
    XD_TEST(name) {                   \
        run_on_workers(suite_##name); \
    }
COMM_SUITE(CASE)

static xd_result program_rank(xd_comm *world, void *argument) {
    static job jobs[2];
    const int rank = xd_comm_rank(world);
    (void)argument;
    for (int queues = 1; queues <= 4; queues += 3) {
        memset(jobs, 0, sizeof jobs);
        for (int f = 0; f < 2; f++) {
            jobs[f].seed = 11 + (uint64_t)queues;
            jobs[f].queues = queues;
            jobs[f].form = f ? XD_QUEUE_WORKER : XD_QUEUE_INLINE;
            CHECK_EQ_INT(run_program(world, &jobs[f]), XD_OK);
        }
        CHECK(jobs[0].hash[rank] == jobs[1].hash[rank]);
        CHECK(memcmp(jobs[0].traffic[rank], jobs[1].traffic[rank], sizeof jobs[0].traffic[rank]) == 0);
        CHECK(jobs[0].traffic[rank][0].calls > 0);
    }
    return XD_OK;
}

XD_TEST(a_queue_takes_what_its_bytes_say) {
    const xd_ctx_desc desc = { .timeout_seconds = 60,
                               .init_timeout_seconds = 60,
                               .allocator = { count_allocate, count_release, NULL } };
    const node_start start = { .ranks = 3, .desc = &desc, .function = queue_bytes_rank };
    char message[256];
    CHECK_EQ_INT(node_run(&start, message), XD_OK);
    CHECK_EQ_STR(message, "");
}

XD_TEST(a_random_program_on_workers_gives_the_bits_and_counters_of_the_same_inline) {
    run(4, XD_REDUCTION_DETERMINISTIC, program_rank, NULL);
    run(3, XD_REDUCTION_INVARIANT, program_rank, NULL);
}

static xd_result beside_rank(xd_comm *world, void *argument) {
    static float beside[LONG], data[8][LONG];
    const int size = xd_comm_size(world);
    xd_queue *queue = NULL;
    (void)argument;
    CHECK_EQ_INT(xd_queue_create(world, NULL, &queue), XD_OK);
    CHECK_EQ_INT(xd_queue_describe(queue).form, XD_QUEUE_WORKER);
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
    xd_queue_destroy(queue);
    return XD_OK;
}

XD_TEST(a_queue_of_processes_is_a_worker_and_runs_beside_calls_on_the_communicator) {
    run(3, XD_REDUCTION_DETERMINISTIC, beside_rank, NULL);
}

/* Groups and queues come and go: their shared memory is used again. */
static xd_result many_rank(xd_comm *world, void *argument) {
    (void)argument;
    for (int i = 0; i < 1500; i++) {
        xd_comm *half = NULL;
        XD_TRY(xd_comm_split(world, xd_comm_rank(world) % 2, 0, &half));
        if (half && i % 100 == 0) XD_TRY(xd_barrier(half));
        xd_comm_destroy(half);
    }
    return xd_barrier(world);
}

XD_TEST(groups_without_number_fit_into_one_job_when_they_are_destroyed) {
    run(3, XD_REDUCTION_DETERMINISTIC, many_rank, NULL);
}

/* ---- messages ---- */

XD_TEST(messages_make_progress_together_and_what_differs_is_told_to_both_ranks) {
    run(4, XD_REDUCTION_DETERMINISTIC, exchange_rounds, NULL);
    run(4, XD_REDUCTION_DETERMINISTIC, exchange_mismatch, NULL);
    run(4, XD_REDUCTION_DETERMINISTIC, exchange_refusals, NULL);
}

/* Longer than any lane, all round a ring at once. */
static xd_result ring_rank(xd_comm *world, void *argument) {
    static float out[RING], in[RING];
    const int me = xd_comm_rank(world), n = xd_comm_size(world), right = (me + 1) % n,
              left = (me + n - 1) % n;
    const xd_collective c[2] = { message_of(XD_COLLECTIVE_SEND, out, RING, right),
                                 message_of(XD_COLLECTIVE_RECV, in, RING, left) };
    long wrong = 0;
    (void)argument;
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < RING; i++) out[i] = (float)(me * 1000 + (i + round) % 977);
        CHECK_EQ_INT(xd_exchange(world, c, 2), XD_OK);
        for (int i = 0; i < RING; i++) wrong += in[i] != (float)(left * 1000 + (i + round) % 977);
    }
    CHECK_EQ_INT(wrong, 0);
    return XD_OK;
}

XD_TEST(long_messages_go_round_a_ring) {
    for (int ranks = 2; ranks <= 5; ranks++) run(ranks, XD_REDUCTION_DETERMINISTIC, ring_rank, NULL);
}

XD_TEST_MAIN()
