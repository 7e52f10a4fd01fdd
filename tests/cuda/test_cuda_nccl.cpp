/* The conformance suite on the emulated NCCL (xdistill_nccl.h), and what only NCCL has: ranks are threads, each with a GPU
 * of its own. test_cuda_nccl_gpus runs the suite on real GPUs too. */
#include "cuda_test.h"
#include "wrap_calls.h"

#if defined(XD_EMU)
#    include "exchange_suite.h"

#    include "cuda_nccl_suite.h"

/* ---- the suite ---- */

static void run_in_every_mode(xd_rank_function function) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        World world;
        world.reduction = (xd_reduction)mode;
        run_suite(&world, function);
    }
}

#    define CASE(name)                       \
        XD_TEST(name) {                      \
            run_in_every_mode(suite_##name); \
        }
COMM_SUITE(CASE)

static xd_result suite_data(xd_comm *comm, void *) {
#    define RUN(name) XD_TRY(suite_##name(comm, nullptr));
    COMM_SUITE_DATA(RUN)
    return XD_OK;
}

XD_TEST(arguments_of_a_world_that_are_null_are_refused_by_name) {
    xd_ctx *ctx = nullptr;
    xd_comm *world = nullptr;
    const xd_nccl_desc desc = {};
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_nccl(nullptr, &desc, &world), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_comm_nccl(ctx, nullptr, &world), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "desc is NULL") != nullptr);
    CHECK_EQ_INT(xd_comm_nccl(ctx, &desc, nullptr), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "out is NULL") != nullptr);
    CHECK_EQ_INT(xd_nccl_unique_id(ctx, nullptr), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "out is NULL") != nullptr);
    xd_ctx_destroy(ctx);
}

XD_TEST(sums_that_need_many_tiles_of_staging_are_the_same) {
    World world;
    world.desc.staging_bytes = 1000;
    run_suite(&world, suite_data);
}

/* A rank reads its own piece where it is: two elements of staging are enough for three ranks, and none for one. */
static void sum_tightly(Member *m) {
    for (xd_dtype dtype : { XD_DTYPE_F32, XD_DTYPE_BF16 }) {
        Buffer data(m, elements(dtype, 50, &m->random, false));
        Buffer sum(m, elements(dtype, 50, &m->random, false));
        CHECK(xd_all_reduce(m->comm, data.at(), sum.at(), 50, dtype, XD_AVG) == XD_OK);
        CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 50, dtype, XD_SUM) == XD_OK);
        data.keep();
        sum.keep();
    }
}

XD_TEST(a_rank_stages_no_piece_of_its_own) {
    World world, alone;
    world.desc.staging_bytes = (RANKS - 1) * sizeof(float);
    compare(&world, sum_tightly);
    alone.desc.size = 1;
    alone.desc.staging_bytes = 1;
    join_and_run(&alone, [](Member *m) {
        const std::vector<unsigned char> values = elements(XD_DTYPE_BF16, 500, &m->random, false);
        Buffer data(m, values), sum(m, std::vector<unsigned char>(1000));
        CHECK(xd_all_reduce(m->comm, data.at(), sum.at(), 500, XD_DTYPE_BF16, XD_SUM) == XD_OK);
        CHECK(xd_all_reduce(m->comm, sum.at(), sum.at(), 500, XD_DTYPE_BF16, XD_AVG) == XD_OK);
        sum.keep();
        CHECK_SAME(m->world->log[0], values);
    });
}

/* While kernels add a tile, the next one is on its way: they are on another stream, which waits once for each tile. */
static void sum_in_tiles(Member *m) {
    cudaStream_t adds = ((xdi_nccl *)world_transport)->world->adds;
    Buffer data(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    int before = waits[adds];
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), ELEMENTS, XD_DTYPE_F32, XD_SUM) == XD_OK);
    CHECK_EQ_INT(waits[adds] - before, 4); /* 1,000 elements in tiles of 256 */
    before = waits[adds];
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 3 * 256, XD_DTYPE_F32, XD_SUM) == XD_OK);
    CHECK_EQ_INT(waits[adds] - before, 0); /* one tile */
}

XD_TEST(the_next_tile_of_a_sum_comes_while_one_is_added) {
    World world;
    world.desc.compare = -1;
    world.desc.staging_bytes = 2 * (RANKS - 1) * 256 * sizeof(float);
    join_and_run(&world, sum_in_tiles);
}

XD_TEST(host_memory_goes_over_nccl) {
    World world;
    world.host_memory = true;
    run_suite(&world, suite_data);
}

XD_TEST(calls_that_are_not_compared_give_the_same) {
    World world;
    world.desc.compare = -1;
    run_suite(&world, suite_data);
    World few;
    few.desc.compare = 5;
    run_suite(&few, suite_data);
}

/* ---- the same ranks for a context without a GPU ---- */

/* The suite over forks of the worlds, in memory of the host. */
static void run_forked(World *world, xd_rank_function function) {
    static const int64_t sizes[] = { 0, 7, 700 };
    world->host_memory = true;
    suite = { suite_allocate, suite_release, suite_put_there, suite_get_there, sizes, 3 };
    run_members(world, [function, world](Member *member) {
        here = member;
        xd_ctx *host = nullptr;
        xd_comm *twin = nullptr;
        xd_ctx_desc desc = {};
        desc.reduction = world->reduction;
        desc.clock.now_seconds = clock_now;
        desc.clock.user = world;
        CHECK(member->join() == XD_OK);
        CHECK(xd_ctx_create(&desc, &host) == XD_OK);
        CHECK(xd_comm_fork(member->comm, host, &twin) == XD_OK);
        CHECK(xd_comm_ctx(twin) == host && xd_comm_rank(twin) == member->rank);
        CHECK(function(twin, nullptr) == XD_OK);
        CHECK(suite_data_arrives_in_rank_order_with_uneven_and_zero_counts(member->comm, nullptr) == XD_OK);
        CHECK(function(twin, nullptr) == XD_OK);
        xd_queue *queue = nullptr; /* both have one thread */
        const xd_queue_desc worker = { XD_QUEUE_WORKER, 2 };
        CHECK(xd_queue_create(twin, &worker, &queue) == XD_OK);
        CHECK_EQ_INT(xd_queue_describe(queue).form, XD_QUEUE_INLINE);
        xd_queue_destroy(queue);
        xd_comm_destroy(twin);
        CHECK(xd_barrier(member->comm) == XD_OK);
        xd_ctx_destroy(host);
    });
}

static xd_result suite_all(xd_comm *comm, void *) {
    COMM_SUITE(RUN)
    return XD_OK;
}

XD_TEST(a_fork_for_a_context_without_a_gpu_does_what_its_group_does) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        World world;
        world.reduction = (xd_reduction)mode;
        run_forked(&world, suite_all);
    }
    World small;
    small.desc.compare = -1;
    small.desc.staging_bytes = 1000;
    run_forked(&small, suite_data);
}

/* A fork of another mode, or of none, is refused by all ranks; one of a broken world is broken. */
static void fork_badly(Member *m) {
    xd_ctx *host = nullptr;
    xd_comm *twin = nullptr;
    xd_ctx_desc desc = {};
    CHECK(xd_ctx_create(&desc, &host) == XD_OK);
    CHECK(xd_comm_fork(m->comm, m->rank == 1 ? nullptr : host, &twin) ==
          (m->rank == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER));
    CHECK(m->says("is forked for no context"));
    CHECK(xd_comm_fork(m->comm, host, &twin) == XD_OK);
    m->world->meet();
    xd_comm_abort(m->comm);
    CHECK(xd_barrier(twin) == XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(host)->culprit, m->rank);
    xd_comm_destroy(twin);
    CHECK(xd_comm_fork(m->comm, host, &twin) == XD_ERROR_PEER);
    xd_ctx_destroy(host);
}

XD_TEST(a_fork_shares_the_fate_of_its_world) {
    World world;
    join_and_run(&world, fork_badly);
    emu_take_reports(nullptr, 0);
}

/* ---- messages ---- */

XD_TEST(messages_that_all_ranks_send_first_reach_each_other) {
    for (int64_t compare : { INT64_MAX, (int64_t)-1 }) {
        World world;
        world.host_memory = true;
        world.desc.compare = compare;
        run_suite(&world, exchange_rounds);
    }
}

XD_TEST(messages_that_differ_or_are_refused_stop_no_other) {
    World world;
    world.host_memory = true;
    run_suite(&world, exchange_mismatch);
    run_suite(&world, exchange_refusals);
}

/* A ring on the device, twice, with three messages each way, and without a wait where nothing is compared. */
static void send_round(Member *m) {
    const int right = (m->rank + 1) % RANKS, left = (m->rank + RANKS - 1) % RANKS;
    const bool sealed = m->world->desc.compare < 0;
    std::vector<Buffer> out, in;
    xd_collective c[12];
    int used = 0;
    out.reserve(6), in.reserve(6);
    for (int k = 0; k < 6; k++) {
        out.emplace_back(m, elements(XD_DTYPE_F32, 500 + k, &m->random, false));
        in.emplace_back(m, elements(XD_DTYPE_F32, 500 + k, &m->random, false));
    }
    for (int k = 0; k < 6; k++) {
        c[used] = message_of(XD_COLLECTIVE_SEND, (float *)out[(size_t)k].at(), 500 + k, k % 2 ? left : right);
        c[used + 1] = message_of(XD_COLLECTIVE_RECV, (float *)in[(size_t)k].at(), 500 + k, k % 2 ? right : left);
        used += 2;
    }
    m->world->meet();
    if (sealed && m->world->on_device && m->rank == 0) seal();
    m->world->meet();
    for (int turn = 0; turn < 2; turn++) CHECK(xd_exchange(m->comm, c, used) == XD_OK);
    m->world->meet();
    if (sealed && m->world->on_device && m->rank == 0) unseal();
    m->world->meet();
    for (Buffer &buffer : in) buffer.keep();
}

XD_TEST(a_ring_of_messages_is_that_of_threads_and_waits_only_where_it_is_compared) {
    for (int64_t compare_calls : { INT64_MAX, (int64_t)-1 }) {
        World world;
        world.desc.compare = compare_calls;
        compare(&world, send_round);
    }
}

/* Some of the memory is the host's. */
static void send_mixed(Member *m) {
    const int right = (m->rank + 1) % RANKS, left = (m->rank + RANKS - 1) % RANKS;
    Buffer out(m, elements(XD_DTYPE_F32, 300, &m->random, false));
    Buffer in(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    std::vector<unsigned char> sent = elements(XD_DTYPE_F32, 200, &m->random, false), received(1200);
    const xd_collective c[] = { message_of(XD_COLLECTIVE_SEND, (float *)out.at(), 300, right),
                                message_of(XD_COLLECTIVE_SEND, (float *)(void *)sent.data(), 200, left),
                                message_of(XD_COLLECTIVE_RECV, (float *)(void *)received.data(), 300, left),
                                message_of(XD_COLLECTIVE_RECV, (float *)in.at(), 200, right) };
    CHECK(xd_exchange(m->comm, c, 4) == XD_OK);
    in.keep();
    std::vector<unsigned char> &log = m->world->log[m->rank];
    log.insert(log.end(), received.begin(), received.end());
}

XD_TEST(messages_may_begin_on_the_host_and_end_on_the_device) {
    for (int64_t compare_calls : { INT64_MAX, (int64_t)-1 }) {
        World world;
        world.desc.compare = compare_calls;
        compare(&world, send_mixed);
    }
}

/* ---- streams and memory ---- */

/* Sums of two groups on two streams in turn, all by the same staging memory, and nobody waits in between. */
static void sum_on_streams(Member *m) {
    cudaStream_t other = nullptr;
    xd_comm *group = nullptr;
    std::vector<Buffer> sums;
    if (m->world->on_device) CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(xd_comm_split(m->comm, 0, 0, &group) == XD_OK);
    sums.reserve(6);
    for (int k = 0; k < 6; k++) sums.emplace_back(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    for (int k = 0; k < 6; k++) {
        xd_collective c = {};
        c.kind = XD_COLLECTIVE_ALL_REDUCE;
        c.send = c.recv = sums[(size_t)k].at();
        c.count = ELEMENTS;
        c.dtype = XD_DTYPE_F32;
        c.stream = k % 2 ? other : nullptr;
        CHECK(xd_collective_run(k % 3 ? group : m->comm, &c) == XD_OK);
    }
    if (other) {
        CHECK(cudaStreamSynchronize(other) == cudaSuccess);
        CHECK(cudaStreamDestroy(other) == cudaSuccess);
    }
    for (Buffer &sum : sums) sum.keep();
    xd_comm_destroy(group);
}

XD_TEST(calls_of_two_groups_on_two_streams_keep_their_order) {
    World world;
    world.desc.compare = -1;
    world.desc.staging_bytes = 4000;
    compare(&world, sum_on_streams);
}

/* The result on the host of what is sent from the device, and the other way round. */
static void mix_memory(Member *m) {
    Buffer sent(m, elements(XD_DTYPE_F32, 300, &m->random, false));
    Buffer received(m, elements(XD_DTYPE_F32, 300, &m->random, false));
    std::vector<float> host(300);
    if (m->world->on_device) /* work of the caller that is still to be done */
        CHECK(cudaMemcpyAsync(sent.at(), received.at(), 1200, cudaMemcpyDeviceToDevice, m->stream) ==
              cudaSuccess);
    else
        memcpy(sent.at(), received.at(), 1200);
    CHECK(xd_all_reduce(m->comm, sent.at(), host.data(), 300, XD_DTYPE_F32, XD_SUM) == XD_OK);
    CHECK(xd_all_reduce(m->comm, host.data(), received.at(), 300, XD_DTYPE_F32, XD_SUM) == XD_OK);
    received.keep();
}

XD_TEST(one_side_of_a_call_may_be_host_memory) {
    World world;
    compare(&world, mix_memory);
}

/* Without comparing, a call neither waits for the device nor copies to the host. */
static void run_sealed(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 5000, &m->random, false));
    m->world->meet();
    if (m->rank == 0) seal();
    m->world->meet();
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 5000, XD_DTYPE_F32, XD_SUM) == XD_OK);
    CHECK(xd_broadcast(m->comm, data.at(), 5000, XD_DTYPE_F32, 2) == XD_OK);
    m->world->meet();
    if (m->rank == 0) unseal();
    m->world->meet();
    data.keep();
}

XD_TEST(calls_that_are_not_compared_neither_wait_nor_allocate) {
    World world;
    world.desc.compare = -1;
    compare(&world, run_sealed);
}

/* Sums over two leaves a rank, whole and in parts; the forest is one node. */
static void sum_known(Member *m) {
    xd_leaves known[RANKS];
    int64_t counts[RANKS];
    Buffer forest(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    Buffer part(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    xd_collective c = {};
    c.send = forest.at();
    c.recv = part.at();
    c.send_counts = counts;
    c.dtype = XD_DTYPE_F32;
    c.known_leaves = known;
    for (int r = 0; r < RANKS; r++) {
        known[r] = { 2 * r, 2, 2 * RANKS };
        counts[r] = ELEMENTS / RANKS;
    }
    c.leaves = known[m->rank];
    m->world->meet();
    if (m->rank == 0) seal();
    m->world->meet();
    const int before = rounds;
    c.kind = XD_COLLECTIVE_REDUCE_SCATTER;
    CHECK(xd_collective_run(m->comm, &c) == XD_OK);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.count = ELEMENTS;
    c.recv = forest.at();
    CHECK(xd_collective_run(m->comm, &c) == XD_OK);
    CHECK_EQ_INT(rounds - before, 0);
    m->world->meet();
    if (m->rank == 0) unseal();
    m->world->meet();
    part.keep();
    forest.keep();
}

XD_TEST(sums_over_known_leaves_that_are_not_compared_neither_wait_nor_allocate) {
    World world;
    world.reduction = XD_REDUCTION_INVARIANT;
    world.desc.compare = -1;
    compare(&world, sum_known);
    World small;
    small.reduction = XD_REDUCTION_INVARIANT;
    small.desc.compare = -1;
    small.desc.staging_bytes = 4000;
    compare(&small, sum_known);
}

/* ---- wrapped models ---- */

enum { BLOCKS = 3, WEIGHT = 700, LEAVES = 6 };
static bool is_sharded, in_rows;

static xd_model *make_model(xd_ctx *ctx) {
    xd_model *model = nullptr;
    xd_model_desc desc = {};
    CHECK(xd_model_create(ctx, &desc, &model) == XD_OK);
    for (int i = 0; i < BLOCKS; i++) {
        xd_block *block = xd_model_root(model);
        const std::string name = "layer" + std::to_string(i);
        xd_block_desc layer = {};
        layer.name = name.c_str();
        layer.unit = XD_UNIT_ALWAYS;
        if (i > 0) CHECK(xd_block_add(block, &layer, &block) == XD_OK);
        xd_weight_desc d = {};
        d.name = "w";
        d.dtype = XD_DTYPE_F32;
        d.ndim = 1;
        d.shape[0] = WEIGHT;
        CHECK(xd_weight_add(block, &d, nullptr) == XD_OK);
    }
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

/* Gradients of one leaf, each layer inside of the root. */
static void back_through(Member *m, xd_model *model, xd_parallel *parallel, int64_t k) {
    xd_block *blocks[BLOCKS] = { xd_model_root(model), xd_model_find_block(model, "layer1"),
                                 xd_model_find_block(model, "layer2") };
    for (int i = 0; i < BLOCKS; i++) {
        xd_block_view view;
        const xd_pass pass = { XD_PASS_BACKWARD, k, false };
        CHECK(xd_block_begin(blocks[i], pass, &view) == XD_OK);
        Random random(1 + (uint64_t)(10 * xd_parallel_micro_batch(parallel, k) + i));
        const std::vector<unsigned char> bytes = elements(XD_DTYPE_F32, WEIGHT, &random, false);
        if (m->world->on_device) {
            CHECK(cudaMemcpyAsync(view.gradients[0], bytes.data(), bytes.size(), cudaMemcpyHostToDevice,
                                  m->stream) == cudaSuccess);
            CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess);
        } else {
            memcpy(view.gradients[0], bytes.data(), bytes.size());
        }
        if (i > 0) CHECK(xd_block_end(blocks[i]) == XD_OK);
    }
    CHECK(xd_block_end(blocks[0]) == XD_OK);
}

/* A step: what waits for all ranks' records is the end of it alone, however many leaves and buckets there are. */
static void step_wrapped(Member *m) {
    xd_model *model = make_model(m->ctx);
    xd_parallel *parallel = nullptr;
    xd_ddp_desc ddp = {};
    xd_fsdp_desc fsdp = {};
    ddp.micro_batches = fsdp.micro_batches = LEAVES;
    ddp.bucket_size = WEIGHT;
    fsdp.accumulate_whole = in_rows;
    CHECK((is_sharded ? wrap_over_fsdp(model, m->comm, &fsdp, &parallel)
                      : wrap_over_ddp(model, m->comm, &ddp, &parallel)) == XD_OK);
    for (int step = 0; step < 2; step++) {
        xd_param params[BLOCKS];
        int64_t count = 0;
        const int before = rounds;
        for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).opened; k++) back_through(m, model, parallel, k);
        CHECK(xd_parallel_reduce(parallel) == XD_OK);
        CHECK_EQ_INT(rounds - before, 0);
        CHECK(xd_parallel_params(parallel, BLOCKS, params, &count) == XD_OK && count == BLOCKS);
        for (int i = 0; i < BLOCKS; i++) {
            std::vector<unsigned char> sum((size_t)params[i].count * sizeof(float));
            CHECK(xd_read(m->ctx, sum.data(), params[i].gradient, sum.size()) == XD_OK);
            std::vector<unsigned char> &log = m->world->log[m->rank];
            log.insert(log.end(), sum.begin(), sum.end());
        }
        CHECK(xd_parallel_publish(parallel) == XD_OK);
        /* The first one compares what replicas hold, too. */
        CHECK_EQ_INT(rounds - before, !m->world->on_device ? 0 : step == 0 && !is_sharded ? 2 : 1);
    }
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
}

XD_TEST(a_wrapped_step_waits_for_no_records_of_its_sums) {
    for (int kind = 0; kind < 3; kind++) {
        World world;
        is_sharded = kind > 0;
        in_rows = kind > 1;
        world.reduction = XD_REDUCTION_INVARIANT;
        world.desc.compare = -1;
        compare(&world, step_wrapped);
    }
}

/* ---- what goes wrong ---- */

/* Rank 1 leaves; the others wait for it until an hour has passed. */
static void run_leaver(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    xd_comm *pair = nullptr;
    CHECK(xd_comm_split(m->comm, m->rank == 1, 0, &pair) == XD_OK);
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 200, XD_DTYPE_F32, XD_SUM) == XD_OK);
    CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess);
    m->world->meet();
    if (m->rank == 1) {
        xd_comm_abort(m->comm);
        CHECK(xd_barrier(m->comm) == XD_ERROR_PEER);
        m->world->pass();
    } else {
        CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 200, XD_DTYPE_F32, XD_SUM) == XD_ERROR_TIMEOUT);
        CHECK(m->says("did not arrive before the deadline; this rank's last call in it is all_reduce 4 of 200 F32, "
                      "after all_reduce 3 of 200 F32"));
        CHECK(xd_barrier(m->comm) == XD_ERROR_PEER);
        CHECK(xd_barrier(pair) == XD_ERROR_PEER); /* the whole world is broken */
        CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess);
        m->world->finished++;
    }
    xd_comm_destroy(pair);
}

XD_TEST(a_rank_that_leaves_ends_in_timeouts_of_the_others) {
    World world;
    join_and_run(&world, run_leaver);
    emu_take_reports(nullptr, 0);
}

/* Calls that only rank 1 makes otherwise, after those that are compared: the next barrier or agreement finds them. */
enum { DEFAULT = 64 };
static int unlike;

static void run_unlike(Member *m) {
    const int64_t equal[RANKS] = { 2, 2, 2 }, more[RANKS] = { 2, 2, 3 };
    const bool other = m->rank == 1;
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    Buffer moved(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    const int before = rounds;
    for (int k = 0; k < DEFAULT; k++)
        CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 20 + k, XD_DTYPE_F32, XD_MAX) == XD_OK);
    CHECK_EQ_INT(rounds - before, DEFAULT);
    CHECK(xd_agree(m->comm, XD_OK) == XD_OK); /* nothing was left out so far */
    for (int k = 0; k < 3; k++) /* both kinds of pairs add up */
        CHECK(xd_all_to_all(m->comm, data.at(), equal, moved.at(), equal, XD_DTYPE_F32) == XD_OK);
    CHECK(xd_barrier(m->comm) == XD_OK);
    CHECK_EQ_INT(rounds - before, DEFAULT + 2);
    const xd_reduce_op op = other && unlike == 0 ? XD_MAX : XD_SUM;
    const xd_dtype dtype = other && unlike == 1 ? XD_DTYPE_I32 : XD_DTYPE_F32;
    if (unlike == 2) { /* rank 1 sends less to rank 2 than that expects */
        CHECK(xd_all_to_all(m->comm, data.at(), equal, moved.at(), other ? more : equal, XD_DTYPE_F32) == XD_OK);
    } else {
        CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 200, dtype, op) == XD_OK);
    }
    CHECK_EQ_INT(rounds - before, DEFAULT + 2);
    const xd_result result = unlike == 1 ? xd_agree(m->comm, XD_OK) : xd_barrier(m->comm);
    if (unlike == 3) {
        CHECK_EQ_INT(result, XD_OK);
        return;
    }
    CHECK_EQ_INT(result, XD_ERROR_MISMATCH);
    CHECK_EQ_INT(xd_last_error(m->ctx)->culprit, unlike == 2 ? -1 : 1);
    CHECK(m->says(unlike == 2 ? "counts of an all_to_all differ between two ranks, among 4 calls that were not compared"
                              : "rank 1 made other calls than rank 0, of which this one made 4 that were not compared"));
    CHECK(unlike == 2 || m->says(", after all_reduce 70 of 200 "));
    CHECK(xd_barrier(m->comm) == XD_ERROR_PEER); /* what has moved is not what the ranks wanted */
}

XD_TEST(calls_after_the_compared_ones_that_differ_are_found_by_the_next_barrier_or_agreement) {
    for (unlike = 0; unlike < 4; unlike++) {
        World world;
        world.desc.compare = 0;
        join_and_run(&world, run_unlike);
        CHECK((emu_take_reports(nullptr, 0) > 0) == (unlike == 2));
    }
}

/* A call that was only started waits for a peer for ever; the next barrier ends it. */
static void run_late(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    if (m->rank == 1) {
        xd_comm_abort(m->comm);
        m->world->meet();
        m->world->pass();
        return;
    }
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 200, XD_DTYPE_F32, XD_SUM) == XD_OK);
    m->world->meet();
    CHECK(xd_barrier(m->comm) == XD_ERROR_TIMEOUT);
    CHECK(m->says("this rank's last call in it is barrier 2, after all_reduce 1 of 200 F32"));
    CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess);
    m->world->finished++;
}

XD_TEST(work_that_waits_for_a_peer_ends_with_the_world) {
    World world;
    world.desc.compare = -1;
    join_and_run(&world, run_late);
    emu_take_reports(nullptr, 0);
}

/* An error that NCCL finds while rank 0 waits; the others learn of it by the clock. */
static void run_error(Member *m) {
    CHECK(xd_barrier(m->comm) == XD_OK);
    m->world->meet();
    if (m->rank > 0) {
        CHECK(xd_barrier(m->comm) == XD_ERROR_TIMEOUT);
        m->world->finished++;
        return;
    }
    emu_nccl_fail(world_comm, ncclRemoteError);
    CHECK(xd_barrier(m->comm) == XD_ERROR_PEER);
    CHECK(m->says("NCCL: remote process exited or there was a network error"));
    CHECK(xd_barrier(m->comm) == XD_ERROR_PEER);
    m->world->pass();
}

XD_TEST(an_error_of_nccl_comes_with_its_own_text) {
    World world;
    join_and_run(&world, run_error);
    emu_take_reports(nullptr, 0);
}

static void check_blamed(Member *m, xd_comm *comm) {
    CHECK(xd_barrier(comm) == XD_ERROR_PEER);
    CHECK_EQ_INT(xd_last_error(m->ctx)->culprit, 2);
    CHECK(m->says("the world is broken since an earlier ERROR_TIMEOUT of this rank"));
}

/* Rank 0 has waited for rank 2 by other means, as a route does, and in vain: work that is under way ends, and every later call
 * of the world and of its groups names rank 2. The others learn of it by the clock. */
static void run_blame(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    xd_comm *all = nullptr;
    CHECK(xd_comm_split(m->comm, 0, 0, &all) == XD_OK);
    CHECK(xd_barrier(m->comm) == XD_OK);
    m->world->meet();
    if (m->rank > 0) {
        CHECK(xd_barrier(m->comm) == XD_ERROR_TIMEOUT);
        m->world->finished++;
    } else {
        CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 200, XD_DTYPE_F32, XD_SUM) == XD_OK);
        world_transport->ops->fail(world_transport, XD_ERROR_TIMEOUT, 2);
        world_transport->ops->fail(world_transport, XD_ERROR_PEER, 1); /* the first one counts */
        CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess);
        check_blamed(m, m->comm);
        check_blamed(m, all);
        CHECK(xd_barrier(m->comm) == XD_ERROR_PEER && xd_last_error(m->ctx)->culprit == 2);
        m->world->pass();
    }
    xd_comm_destroy(all);
}

XD_TEST(a_wait_that_has_failed_elsewhere_breaks_the_world_and_names_its_culprit) {
    World world;
    world.desc.compare = -1;
    join_and_run(&world, run_blame);
    emu_take_reports(nullptr, 0);
}

/* The n-th CUDA or NCCL call of rank 1 fails, in a sum or while it joins: it says so, nobody hangs, nothing
 * leaks. */
static std::atomic<long> failing_call, has_failed;

static void run_failing(Member *m) {
    const bool fails = m->rank == 1;
    Buffer data(m, elements(XD_DTYPE_F32, 2000, &m->random, false));
    m->world->meet();
    if (fails) emu_fail_call(failing_call);
    xd_result result = m->comm ? XD_OK : m->join();
    if (result == XD_OK) result = xd_all_reduce(m->comm, data.at(), data.at(), 2000, XD_DTYPE_F32, XD_SUM);
    if (fails) emu_fail_call(0);
    if (fails && result != XD_OK) {
        has_failed = 1;
        CHECK(result == XD_ERROR_DEVICE || result == XD_ERROR_MEMORY || result == XD_ERROR_PEER);
        m->world->pass();
        return;
    }
    if (result == XD_OK) result = xd_barrier(m->comm);
    CHECK(result == (has_failed ? XD_ERROR_TIMEOUT : XD_OK));
    if (!fails) m->world->finished++;
}

static void fail_each_call(void (*run)(World *, const std::function<void(Member *)> &)) {
    int failures = 0;
    for (failing_call = 1; failing_call <= 40; failing_call++) {
        World world;
        has_failed = 0;
        run(&world, run_failing);
        failures += has_failed != 0;
        emu_reset_errors();
    }
    CHECK(failures > 10); /* a question to CUDA about an address may fail in silence */
    emu_take_reports(nullptr, 0);
}

XD_TEST(a_call_that_fails_in_a_sum_ends_it_for_all) {
    fail_each_call([](World *world, const std::function<void(Member *)> &body) {
        run_members(world, [&body](Member *m) {
            CHECK(m->join() == XD_OK);
            body(m);
        });
    });
}

XD_TEST(a_call_that_fails_while_joining_ends_it_for_all) {
    fail_each_call([](World *world, const std::function<void(Member *)> &body) { run_members(world, body); });
}

/* Joining: a rank that never comes, arguments that are wrong on their own, settings that differ. */
static int absent = 2;

static void run_absent(Member *m) {
    if (m->rank == absent) {
        m->world->pass();
        return;
    }
    CHECK(m->join() == XD_ERROR_TIMEOUT);
    CHECK(m->comm == nullptr);
    m->world->finished++;
}

XD_TEST(a_rank_that_does_not_join_ends_in_a_timeout) {
    World world;
    run_members(&world, run_absent);
    emu_take_reports(nullptr, 0);
}

static void run_settings(Member *m) {
    xd_nccl_desc d = m->world->desc;
    d.rank = m->rank;
    d.staging_bytes = m->rank == 2 ? 4096 : 8192;
    CHECK(xd_comm_nccl(m->ctx, &d, &m->comm) == XD_ERROR_MISMATCH);
    CHECK(m->says("rank 2 passed staging_bytes 4096"));
}

XD_TEST(settings_that_differ_are_named) {
    World world;
    run_members(&world, run_settings);
}

XD_TEST(arguments_that_are_wrong_on_their_own_are_refused) {
    Gpu gpu;
    World world;
    xd_comm *comm = nullptr;
    xd_nccl_desc d = world.desc;
    d.rank = RANKS;
    CHECK(xd_comm_nccl(gpu.ctx, &d, &comm) == XD_ERROR_ARGUMENT);
    d.rank = 0;
    d.id = nullptr;
    CHECK(xd_comm_nccl(gpu.ctx, &d, &comm) == XD_ERROR_ARGUMENT);
    d.host = "localhost"; /* without a port */
    CHECK(xd_comm_nccl(gpu.ctx, &d, &comm) == XD_ERROR_ARGUMENT);
    d.port = "1";
    d.secret = nullptr;
    CHECK(xd_comm_nccl(gpu.ctx, &d, &comm) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, "a secret of 0 bytes"));
    xd_ctx *plain = nullptr;
    CHECK(xd_ctx_create(nullptr, &plain) == XD_OK);
    CHECK(xd_comm_nccl(plain, &world.desc, &comm) == XD_ERROR_STATE);
    xd_ctx_destroy(plain);
    d.size = 1;
    CHECK(xd_comm_nccl(gpu.ctx, &d, &comm) == XD_OK); /* a world of one needs no id */
    CHECK(xd_barrier(comm) == XD_OK);
    xd_comm_destroy(comm);
}

/* ---- the id ---- */

static void run_short(Member *m) {
    Buffer data(m, elements(XD_DTYPE_I64, 20, &m->random, false));
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 20, XD_DTYPE_I64, XD_SUM) == XD_OK);
}

XD_TEST(the_id_goes_by_a_file_that_is_gone_afterwards) {
    World world;
    char path[] = "/tmp/xdistill-nccl-XXXXXX";
    const int made = mkstemp(path);
    CHECK(made >= 0);
    close(made);
    CHECK(unlink(path) == 0);
    world.desc.id = nullptr;
    world.desc.file = path;
    join_and_run(&world, run_short);
    CHECK(access(path, F_OK) != 0);
}

/* A port of this machine that nobody listens on. */
static std::string free_port() {
    struct sockaddr_in address = {};
    socklen_t length = sizeof address;
    const int door = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_family = AF_INET;
    CHECK(bind(door, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(getsockname(door, (struct sockaddr *)&address, &length) == 0);
    close(door);
    return std::to_string(ntohs(address.sin_port));
}

XD_TEST(the_id_goes_over_tcp) {
    World world;
    const std::string port = free_port();
    world.desc.id = nullptr;
    world.desc.host = "localhost";
    world.desc.port = port.c_str();
    join_and_run(&world, run_short);
}

XD_TEST(waiting_for_the_id_or_for_those_who_ask_for_it_has_a_deadline) {
    const std::string port = free_port();
    char path[] = "/tmp/xdistill-nccl-XXXXXX";
    const int made = mkstemp(path);
    CHECK(made >= 0);
    close(made);
    CHECK(unlink(path) == 0);
    for (int form = 0; form < 4; form++) {
        World world;
        absent = form % 2 ? 0 : 2;
        world.desc.id = nullptr;
        world.desc.file = form < 2 ? path : nullptr;
        world.desc.host = "localhost";
        world.desc.port = port.c_str();
        run_members(&world, run_absent);
        CHECK(access(path, F_OK) != 0);
    }
    emu_take_reports(nullptr, 0);
}
#else
XD_TEST(the_suite_of_transports_runs_over_nccl) {
    SKIP("test_cuda_nccl_gpus runs it on GPUs");
}
#endif

XD_CUDA_TEST_MAIN()
