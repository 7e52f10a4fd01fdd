/* Pipelines that run: the bits of one stage, messages and memory as the schedule says, and what happens when a call fails or a rank does
 * not come. Ranks are threads. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "xdistill.h"

#include "pipeline_scene.h"
#include "planned.h"

#include <sched.h>
#include <time.h>

/* ---- bits ---- */

static scene_run *one_stage(int64_t leaves) {
    scene_run *run = scene_new(SCENE_DDP, 1, 0, 1);
    run->leaves = leaves;
    CHECK(scene_execute(run, NULL) == XD_OK);
    CHECK(run->weights[0][0] != run->weights[0][1] && run->norms[0] > 0.0);
    CHECK(memcmp(run->weights[0], run->weights[SCENE_WEIGHTS - 1], sizeof run->weights[0]) == 0); /* copies */
    return run;
}

static void compare(scene_run *run, const scene_run *one) {
    const bool ok = scene_execute(run, NULL) == XD_OK && scene_equal(run, one);
    if (!ok)
        printf("wrap %d, %d ranks with %d virtual stages, %d data ranks\n", (int)run->wrap, run->pp,
               run->virtual_stages, run->dp);
    CHECK(ok);
    free(run);
}

XD_TEST(every_cut_into_stages_has_the_bits_of_one_stage) {
    scene_run *one = one_stage(SCENE_LEAVES);
    for (int p = 1; p <= 7; p++) compare(scene_new(SCENE_DDP, p, 0, 1), one);
    for (int p = 2; p <= 4; p++)
        for (int v = 2; v <= 3; v++) compare(scene_new(SCENE_DDP, p, v, 1), one);
    free(one);
}

XD_TEST(pipelines_beside_data_ranks_under_every_wrapper_have_the_bits_of_one_stage) {
    scene_run *one = one_stage(SCENE_LEAVES);
    for (int wrap = SCENE_DDP; wrap <= SCENE_FSDP; wrap++)
        for (int dp = 1; dp <= 4; dp *= 2) {
            compare(scene_new((scene_wrap)wrap, 2, 0, dp), one);
            compare(scene_new((scene_wrap)wrap, 2, 2, dp), one);
            compare(scene_new((scene_wrap)wrap, 3, 0, dp), one);
        }
    free(one);
}

XD_TEST(uneven_layers_groups_and_leaves_have_the_bits_of_one_stage) {
    static const int64_t layers[4] = { 0, 5, 0, 2 }, more[6] = { 1, 0, 3, 0, 1, 2 };
    scene_run *one = one_stage(7);
    for (int wrap = SCENE_DDP; wrap <= SCENE_FSDP; wrap++)
        for (int dp = 1; dp <= 3; dp++) { /* 7 leaves: 4 and 3; 3, 2 and 2 */
            scene_run *run = scene_new((scene_wrap)wrap, 2, 2, dp);
            run->leaves = 7;
            run->chunk_layers = layers;
            run->group = dp == 1 ? 5 : 0; /* then 2 are left */
            compare(run, one);
            run = scene_new((scene_wrap)wrap, 3, 2, dp);
            run->leaves = 7;
            run->chunk_layers = more;
            compare(run, one);
        }
    scene_run *run = scene_new(SCENE_SHARDED, 2, 2, 2);
    run->leaves = 7;
    run->queues = true;
    compare(run, one);
    free(one);
}

XD_TEST(messages_on_queues_have_the_bits_of_messages_between_calls) {
    static const int64_t layers[6] = { 1, 0, 3, 0, 1, 2 };
    scene_run *one = one_stage(SCENE_LEAVES);
    for (int form = XD_QUEUE_INLINE; form <= XD_QUEUE_WORKER; form++)
        for (int wrap = SCENE_DDP; wrap <= SCENE_FSDP; wrap++)
            for (int v = 0; v <= 2; v += 2)
                for (int p = 1 + (v > 0); p <= 3; p++) {
                    scene_run *run = scene_new((scene_wrap)wrap, p, v, wrap == SCENE_DDP ? 1 : 2);
                    run->sends = (xd_queue_form)form;
                    run->queues = wrap == SCENE_SHARDED;
                    if (p * v == 6) run->chunk_layers = layers;
                    compare(run, one);
                }
    free(one);
}

XD_TEST(without_invariant_sums_another_number_of_data_ranks_is_only_close) {
    scene_run *one = scene_new(SCENE_DDP, 1, 0, 1), *other = scene_new(SCENE_DDP, 2, 0, 4);
    one->reduction = other->reduction = XD_REDUCTION_DETERMINISTIC;
    CHECK(scene_execute(one, NULL) == XD_OK && scene_execute(other, NULL) == XD_OK);
    CHECK(!scene_equal(one, other));
    for (int i = 0; i < SCENE_WEIGHTS; i++)
        for (int j = 0; j < SCENE_WIDTH; j++) CHECK_NEAR(one->weights[i][j], other->weights[i][j], 1e-3);
    free(one);
    free(other);
}

/* ---- messages and memory ---- */

typedef struct counting {
    int64_t bytes; /* that threads have taken */
    uint64_t calls;
} counting;
static counting counted;

static void *counting_take(void *user, size_t bytes) {
    size_t *memory = (size_t *)malloc(bytes + 2 * sizeof(long double));
    (void)user;
    if (!memory) return NULL;
    memory[0] = bytes;
    __atomic_add_fetch(&counted.bytes, (int64_t)bytes, __ATOMIC_RELAXED);
    __atomic_add_fetch(&counted.calls, 1u, __ATOMIC_RELAXED);
    return (unsigned char *)memory + 2 * sizeof(long double);
}

static void counting_give(void *user, void *memory) {
    size_t *block = (size_t *)(void *)((unsigned char *)memory - 2 * sizeof(long double));
    (void)user;
    __atomic_sub_fetch(&counted.bytes, (int64_t)block[0], __ATOMIC_RELAXED);
    free(block);
}

/* What a stage of plain numbers computes: its number and that of the micro-batch are in the output. */
static xd_result plain_forward(void *user, const xd_pipeline_call *call) {
    const xd_stage_place *p = &call->stage.place;
    const double stage = p->virtual_stage * p->pipeline_ranks + p->pipeline_rank;
    const double before = call->input ? *(const double *)call->input : (double)call->micro_batch * 1000.0;
    CHECK(!call->stage.model && !call->stage.parallel && user);
    CHECK_EQ_INT(before, (double)call->micro_batch * 1000.0 + stage);
    if (call->output) *(double *)call->output = before + 1.0;
    if (call->values) call->values[0] = before;
    return XD_OK;
}

static xd_result plain_backward(void *user, const xd_pipeline_call *call) {
    const xd_stage_place *p = &call->stage.place;
    const float before =
        call->output_gradient ? *(const float *)call->output_gradient : (float)call->micro_batch;
    if (call->input_gradient) *(float *)call->input_gradient = before + 100.0f;
    if (call->input)
        CHECK_EQ_INT(*(const double *)call->input - (double)call->micro_batch * 1000.0,
                     p->virtual_stage * p->pipeline_ranks + p->pipeline_rank);
    if (p->first) CHECK_EQ_INT(before, 100 * (p->pipeline_ranks * p->virtual_stages - 1) + call->micro_batch);
    CHECK(user != NULL);
    return XD_OK;
}

static xd_pipeline_run_desc plain_desc(int virtual_stages, int64_t micro_batches) {
    xd_pipeline_run_desc d = { .dtype = XD_DTYPE_F64, .gradient_dtype = XD_DTYPE_F32, .value_count = 1 };
    d.schedule.virtual_stages = virtual_stages;
    d.schedule.micro_batches = micro_batches;
    return d;
}

static void plain_check(xd_comm *world, xd_pipeline *p, const xd_pipeline_run_desc *d, bool trains) {
    const int ranks = xd_comm_size(world), stages = ranks * d->schedule.virtual_stages;
    const bool last = xd_comm_rank(world) == ranks - 1;
    xd_pipeline_schedule schedule = d->schedule;
    xd_pipeline_counts c;
    double values[64];
    int user = 0;
    schedule.ranks = ranks;
    schedule.forward_only = !trains;
    CHECK(xd_pipeline_measure(xd_comm_ctx(world), &schedule, xd_comm_rank(world), &c) == XD_OK);
    const uint64_t sent = xd_comm_traffic(world).bytes_sent;
    CHECK(xd_pipeline_run(p, &(xd_pipeline_calls){ plain_forward, trains ? plain_backward : NULL, &user },
                          values) == XD_OK);
    /* Forwards send 8 bytes and backwards 4; then the last rank sends everybody the values. */
    const uint64_t forwards = (uint64_t)(d->schedule.micro_batches * (d->schedule.virtual_stages - last));
    const uint64_t reported = last ? (uint64_t)(d->schedule.micro_batches * 8 * (ranks - 1)) : 0;
    CHECK_EQ_INT(xd_comm_traffic(world).bytes_sent - sent,
                 forwards * 8 + ((uint64_t)c.sends - forwards) * 4 + reported);
    for (int64_t i = 0; i < d->schedule.micro_batches; i++)
        CHECK(values[i] == (double)i * 1000.0 + stages - 1);
}

/* With a queue there is one activation more, of 8 bytes, and one gradient, each in lines of XD_ARENA_ALIGNMENT. */
static void plain_queue(xd_comm *world, const xd_pipeline_run_desc *planned) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_queue_desc queue = { .form = XD_QUEUE_INLINE };
    const size_t more = planned->schedule.ranks > 1 ? 2 * XD_ARENA_ALIGNMENT : 0;
    xd_pipeline_run_desc d = *planned;
    xd_memory_bytes without = { 0, 0 }, with = { 0, 0 };
    xd_pipeline *p = NULL;
    CHECK(xd_queue_create(world, &queue, &d.sends) == XD_OK);
    CHECK(PLANNED_MEMORY(ctx, xd_pipeline_create(world, planned, &p), &without) == XD_OK);
    CHECK(PLANNED_MEMORY(ctx, xd_pipeline_create(world, &d, &p), &with) == XD_OK);
    CHECK_EQ_INT(with.host - without.host, more);
    CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
    plain_check(world, p, &d, true);
    plain_check(world, p, &d, false);
    xd_pipeline_destroy(p);
    xd_queue_destroy(d.sends);
}

static xd_result plain_rank(xd_comm *world, void *argument) {
    const int v = *(const int *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_pipeline_run_desc d = plain_desc(v, 9);
    xd_pipeline_run_desc planned = d;
    xd_memory_bytes bytes = { 0, 0 };
    xd_pipeline *p = NULL;
    int64_t all;
    planned.schedule.ranks = xd_comm_size(world);
    for (int round = 0; round < 2; round++) { /* the second with scratch that is there */
        CHECK(PLANNED_MEMORY(ctx, xd_pipeline_create(world, &planned, &p), &bytes) == XD_OK);
        CHECK(bytes.host > 0 && bytes.device == 0);
        all = (int64_t)bytes.host;
        CHECK(xd_all_reduce(world, &all, &all, 1, XD_DTYPE_I64, XD_SUM) == XD_OK);
        const int64_t before = __atomic_load_n(&counted.bytes, __ATOMIC_RELAXED);
        CHECK(xd_barrier(world) == XD_OK);
        CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
        CHECK(xd_barrier(world) == XD_OK);
        if (round > 0) CHECK_EQ_INT(__atomic_load_n(&counted.bytes, __ATOMIC_RELAXED) - before, all);
        CHECK(xd_barrier(world) == XD_OK);
        plain_check(world, p, &d, true);
        CHECK(xd_barrier(world) == XD_OK);
        const uint64_t calls = __atomic_load_n(&counted.calls, __ATOMIC_RELAXED);
        CHECK(xd_barrier(world) == XD_OK);
        plain_check(world, p, &d, false);
        plain_check(world, p, &d, true);
        CHECK(xd_barrier(world) == XD_OK);
        CHECK_EQ_INT(__atomic_load_n(&counted.calls, __ATOMIC_RELAXED), calls); /* steps allocate nothing */
        CHECK(xd_barrier(world) == XD_OK);
        xd_pipeline_destroy(p);
        CHECK(xd_barrier(world) == XD_OK);
    }
    plain_queue(world, &planned);
    return XD_OK;
}

XD_TEST(messages_are_those_of_the_schedule_and_memory_is_that_of_the_plan) {
    const xd_ctx_desc d = { .allocator = { counting_take, counting_give, NULL }, .timeout_seconds = 60 };
    for (int p = 1; p <= 4; p++)
        for (int v = 1; v <= (p > 1 ? 3 : 1); v++)
            CHECK_EQ_INT(xd_run_threads(p, &d, plain_rank, &v, NULL), XD_OK);
    CHECK_EQ_INT(counted.bytes, 0);
}

/* Nothing to hand on: every stage still has its turns, with no arrays, and the values of the last one reach all ranks. */
static xd_result empty_pass(void *user, const xd_pipeline_call *call) {
    CHECK(!call->input && !call->output && !call->output_gradient && !call->input_gradient);
    ++*(int *)user;
    if (call->values) call->values[0] = (double)call->micro_batch + 0.5;
    return XD_OK;
}

static xd_result empty_rank(xd_comm *world, void *argument) {
    const int v = *(const int *)argument;
    xd_pipeline_run_desc d = plain_desc(v, 5);
    xd_pipeline *p = NULL;
    double values[5];
    int calls = 0;
    d.ndim = 1; /* of no element */
    XD_TRY(xd_pipeline_create(world, &d, &p));
    const xd_result result =
        xd_pipeline_run(p, &(xd_pipeline_calls){ empty_pass, empty_pass, &calls }, values);
    CHECK_EQ_INT(calls, 2 * v * 5);
    for (int i = 0; i < 5 && result == XD_OK; i++) CHECK(values[i] == i + 0.5);
    xd_pipeline_destroy(p);
    return result;
}

XD_TEST(activations_without_elements_go_through_all_stages) {
    for (int p = 1; p <= 3; p++)
        for (int v = 1; v <= (p > 1 ? 2 : 1); v++)
            CHECK_EQ_INT(xd_run_threads(p, NULL, empty_rank, &v, NULL), XD_OK);
}

/* ---- calls that fail ---- */

/* Every rank returns: the one that failed its own result, the others its name and its message. Then training goes on to the bits of a run
 * without failures. */
static void fail_once(scene_run *run, const scene_run *one) {
    CHECK(scene_execute(run, NULL) == XD_OK);
    for (int r = 0; r < run->pp * run->dp; r++) {
        const bool mine = r == run->fails;
        CHECK_EQ_INT(run->results[r], mine ? XD_ERROR_DATA : XD_ERROR_PEER);
        if (!mine) CHECK_EQ_INT(run->culprits[r], run->fails);
        if (!strstr(run->messages[r], "is spoilt")) printf("rank %d: %s\n", r, run->messages[r]);
        CHECK(strstr(run->messages[r], "is spoilt") != NULL);
    }
    const bool ok = scene_equal(run, one);
    if (!ok)
        printf("wrap %d, %d ranks with %d virtual stages, %d data ranks; rank %d failed at %d\n",
               (int)run->wrap, run->pp, run->virtual_stages, run->dp, run->fails, run->fails_at);
    CHECK(ok);
    free(run);
}

static void fail_everywhere_on(xd_queue_form sends, scene_wrap wrap, int pp, int virtual_stages, int dp) {
    scene_run *one = one_stage(SCENE_LEAVES);
    for (int rank = 0; rank < pp * dp; rank++)
        for (int at = 0; at < SCENE_LEAVES / dp; at++)
            for (int backward = 0; backward < 2; backward++) {
                scene_run *run = scene_new(wrap, pp, virtual_stages, dp);
                run->fails = rank;
                run->fails_at = at;
                run->fails_backward = backward != 0;
                run->sends = sends;
                fail_once(run, one);
            }
    free(one);
}

static void fail_everywhere(scene_wrap wrap, int pp, int virtual_stages, int dp) {
    fail_everywhere_on(XD_QUEUE_AUTO, wrap, pp, virtual_stages, dp);
}

XD_TEST(a_call_that_fails_on_any_rank_in_any_micro_batch_is_named_on_all) {
    fail_everywhere(SCENE_DDP, 3, 0, 1);
    fail_everywhere(SCENE_DDP, 2, 2, 1);
    fail_everywhere(SCENE_DDP, 1, 0, 2);
}

XD_TEST(so_it_is_beside_data_ranks_that_gather_in_their_calls_and_that_do_not) {
    fail_everywhere(SCENE_SHARDED, 2, 0, 2);
    fail_everywhere(SCENE_FSDP, 2, 0, 2);
    fail_everywhere(SCENE_FSDP, 2, 2, 2);
    fail_everywhere(SCENE_FSDP, 3, 0, 2);
}

XD_TEST(so_it_is_when_messages_are_on_queues) {
    fail_everywhere_on(XD_QUEUE_INLINE, SCENE_DDP, 3, 0, 1);
    fail_everywhere_on(XD_QUEUE_WORKER, SCENE_DDP, 3, 0, 1);
    fail_everywhere_on(XD_QUEUE_WORKER, SCENE_DDP, 2, 2, 1);
    fail_everywhere_on(XD_QUEUE_WORKER, SCENE_FSDP, 2, 2, 2);
}

/* ---- a rank that does not come ---- */

static uint32_t finished;

static xd_result missing_rank(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world), missing = *(const int *)argument, ranks = xd_comm_size(world);
    const xd_pipeline_run_desc d = plain_desc(1, 4);
    int user = 0;
    const xd_pipeline_calls calls = { plain_forward, plain_backward, &user };
    xd_pipeline *p = NULL;
    CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
    CHECK(xd_pipeline_run(p, &calls, NULL) == XD_OK);
    if (me == missing) {
        while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < (uint32_t)ranks - 1) sched_yield();
    } else {
        const xd_result got = xd_pipeline_run(p, &calls, NULL);
        CHECK(got == XD_ERROR_TIMEOUT || got == XD_ERROR_PEER);
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, missing);
        CHECK_EQ_INT(xd_pipeline_run(p, &calls, NULL), XD_ERROR_PEER);
        __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
    }
    xd_pipeline_destroy(p);
    return XD_OK;
}

/* The last rank's first call goes on when the first rank has begun its third, whose message before is on its way then. */
static uint32_t begun;

static xd_result beside_forward(void *user, const xd_pipeline_call *call) {
    const bool first = call->stage.place.first;
    (void)user;
    if (first && call->micro_batch == 2) __atomic_store_n(&begun, 1u, __ATOMIC_RELEASE);
    while (!first && call->micro_batch == 0 && !__atomic_load_n(&begun, __ATOMIC_ACQUIRE)) sched_yield();
    if (first) *(double *)call->output = (double)call->micro_batch;
    if (!first) call->values[0] = *(const double *)call->input;
    return XD_OK;
}

static xd_result beside_rank(xd_comm *world, void *argument) {
    const xd_queue_desc queue = { .form = XD_QUEUE_WORKER, .capacity = 2 };
    xd_pipeline_run_desc d = plain_desc(1, 5);
    xd_pipeline *p = NULL;
    double values[5];
    (void)argument;
    CHECK(xd_queue_create(world, &queue, &d.sends) == XD_OK);
    CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
    CHECK_EQ_INT(xd_pipeline_run(p, &(xd_pipeline_calls){ beside_forward, NULL, NULL }, values), XD_OK);
    for (int i = 0; i < 5; i++) CHECK(values[i] == (double)i);
    CHECK_EQ_INT(xd_queue_describe(d.sends).open, 0);
    xd_pipeline_destroy(p);
    xd_queue_destroy(d.sends);
    return XD_OK;
}

XD_TEST(a_call_runs_beside_the_messages_of_the_one_before) {
    const xd_ctx_desc d = { .timeout_seconds = 5 };
    begun = 0;
    CHECK_EQ_INT(xd_run_threads(2, &d, beside_rank, NULL, NULL), XD_OK);
}

static xd_result late_rank(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world), missing = *(const int *)argument, ranks = xd_comm_size(world);
    const xd_queue_desc queue = { .form = XD_QUEUE_WORKER };
    const xd_pipeline_calls calls = { plain_forward, plain_backward, &finished };
    xd_pipeline_run_desc d = plain_desc(1, 4);
    xd_pipeline *p = NULL;
    CHECK(xd_queue_create(world, &queue, &d.sends) == XD_OK);
    CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
    CHECK(xd_pipeline_run(p, &calls, NULL) == XD_OK);
    if (me == missing) {
        while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < (uint32_t)ranks - 1) sched_yield();
    } else {
        const xd_result got = xd_pipeline_run(p, &calls, NULL);
        CHECK(got == XD_ERROR_TIMEOUT || got == XD_ERROR_PEER);
        CHECK_EQ_INT(xd_last_error(xd_comm_ctx(world))->culprit, missing);
        __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
    }
    xd_pipeline_destroy(p);
    xd_queue_destroy(d.sends);
    return XD_OK;
}

XD_TEST(a_rank_that_does_not_come_is_named_with_queues_as_well) {
    const xd_ctx_desc d = { .timeout_seconds = 0.3, .init_timeout_seconds = 60 };
    for (int missing = 0; missing < 3; missing++) {
        finished = 0;
        CHECK_EQ_INT(xd_run_threads(3, &d, late_rank, &missing, NULL), XD_OK);
    }
}

XD_TEST(a_rank_that_does_not_come_is_named_at_the_deadline) {
    const xd_ctx_desc d = { .timeout_seconds = 0.3, .init_timeout_seconds = 60 };
    for (int missing = 0; missing < 3; missing++) {
        finished = 0;
        CHECK_EQ_INT(xd_run_threads(3, &d, missing_rank, &missing, NULL), XD_OK);
    }
}

/* It comes, and stops in the middle of a call. Calls take a while, so that who waits for it is the first whose time is up. */
typedef struct stuck {
    xd_ctx *ctx;
    int rank;
} stuck;

static xd_result stuck_forward(void *user, const xd_pipeline_call *call) {
    const stuck *s = (const stuck *)user;
    const struct timespec pause = { 0, 40000000 };
    nanosleep(&pause, NULL);
    if (call->micro_batch == 2 && call->stage.place.pipeline_rank == s->rank)
        while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < 2) sched_yield();
    return XD_OK;
}

static xd_result stuck_rank(xd_comm *world, void *argument) {
    const xd_pipeline_run_desc d = plain_desc(1, 4);
    stuck s = { xd_comm_ctx(world), *(const int *)argument };
    xd_pipeline *p = NULL;
    CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
    const xd_result got = xd_pipeline_run(p, &(xd_pipeline_calls){ stuck_forward, NULL, &s }, NULL);
    CHECK(got == XD_ERROR_TIMEOUT || got == XD_ERROR_PEER);
    if (xd_comm_rank(world) != s.rank) CHECK_EQ_INT(xd_last_error(s.ctx)->culprit, s.rank);
    __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
    xd_pipeline_destroy(p);
    return XD_OK;
}

XD_TEST(so_is_one_that_stops_in_a_call) {
    const xd_ctx_desc d = { .timeout_seconds = 0.3, .init_timeout_seconds = 60 };
    for (int rank = 0; rank < 3; rank++) {
        finished = 0;
        CHECK_EQ_INT(xd_run_threads(3, &d, stuck_rank, &rank, NULL), XD_OK);
    }
}

/* Calls of 60 milliseconds, and a time limit that is shorter than the seven of them for which the last rank waits at the beginning,
 * and the first one, or the last, at the end. */
static xd_result slow_call(void *user, const xd_pipeline_call *call) {
    const struct timespec pause = { 0, 60000000 };
    (void)user;
    nanosleep(&pause, NULL);
    return call->micro_batch < 0 ? XD_ERROR_DATA : XD_OK;
}

static xd_result slow_rank(xd_comm *world, void *argument) {
    const xd_pipeline_run_desc d = plain_desc(1, 2);
    const xd_pipeline_calls calls = { slow_call, argument ? slow_call : NULL, NULL };
    xd_pipeline *p = NULL;
    CHECK(xd_pipeline_create(world, &d, &p) == XD_OK);
    CHECK_EQ_INT(xd_pipeline_run(p, &calls, NULL), XD_OK);
    xd_pipeline_destroy(p);
    return XD_OK;
}

XD_TEST(ranks_that_idle_for_longer_than_the_time_limit_are_not_late) {
    const xd_ctx_desc d = { .timeout_seconds = 0.35, .init_timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(8, &d, slow_rank, NULL, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(8, &d, slow_rank, (void *)&finished, NULL), XD_OK);
}

XD_TEST_MAIN()
