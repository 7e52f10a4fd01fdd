/* xdistill_nccl.h on the emulated NCCL: ranks are threads, each with a GPU of its own. Every collective gives
 * the bits of the threads transport in host memory. NCCL itself wants a process and a GPU a rank, which
 * `run.sh gpu` has not. */
#include "cuda_test.h"

#if defined(XD_EMU)
#    include <nccl.h>
#    include <stdlib.h>

#    include <atomic>
#    include <chrono>
#    include <functional>
#    include <thread>

static thread_local ncclComm_t world_comm; /* the first that this rank has joined: an error is put into it */

static ncclResult_t join_noted(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    const ncclResult_t result = ncclCommInitRankConfig(comm, ranks, id, rank, config);
    if (!world_comm) world_comm = *comm;
    return result;
}

#    define ncclCommInitRankConfig join_noted
#    define XDISTILL_IMPLEMENTATION
#    include "../../xdistill_nccl.h"

enum { RANKS = 3, ELEMENTS = 3000 };

/* What all ranks of a test share. */
struct World {
    bool on_device = false;   /* NCCL on GPUs; else the threads transport in host memory */
    bool host_memory = false; /* NCCL, but the caller's memory is the host's */
    xd_reduction reduction = XD_REDUCTION_DETERMINISTIC;
    xd_nccl_desc desc = {};
    ncclUniqueId id;
    std::atomic<double> hours{ 0 }; /* on every rank's clock */
    std::atomic<int> arrived{ 0 }, finished{ 0 };
    std::vector<unsigned char> log[RANKS]; /* what each rank has received, in the order of its calls */

    World() {
        ncclGetUniqueId(&id);
        desc.id = &id;
        desc.size = RANKS;
    }
    /* All ranks meet here, whatever has become of their world. */
    void meet() {
        const int turn = arrived++ / RANKS;
        while (arrived < (turn + 1) * RANKS) std::this_thread::yield();
    }
    /* Lets hours pass until all other ranks have added themselves to `finished`. */
    void pass() {
        while (finished < RANKS - 1) {
            hours = hours + 1;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
};

/* A clock that stands still until a test lets hours pass. */
static double clock_now(void *user) {
    return 3600.0 * ((World *)user)->hours;
}

static thread_local std::string member_log; /* the last line that a rank has logged */

static void keep_line(void *, xd_log_level, const char *line) {
    member_log = line;
}

/* One rank with a context, and on a device with all that belongs to it. */
struct Member {
    World *world;
    int rank;
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    cudaStream_t stream = nullptr;
    xd_comm *comm = nullptr;
    Random random;

    Member(World *w, int r, xd_comm *threads = nullptr)
        : world(w), rank(r), comm(threads), random(100 + (uint64_t)r) {
        if (!w->on_device) {
            ctx = xd_comm_ctx(threads);
            return;
        }
        xd_ctx_desc desc = {};
        int devices = 1;
        desc.reduction = w->reduction;
        desc.clock.now_seconds = clock_now;
        desc.clock.user = w;
        desc.logger.write = keep_line;
        CHECK(cudaGetDeviceCount(&devices) == cudaSuccess);
        CHECK(cudaSetDevice(r % devices) == cudaSuccess);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        desc.stream = stream;
        CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
        CHECK(xd_cuda_create(ctx, nullptr, &cuda) == XD_OK);
    }
    xd_result join() {
        xd_nccl_desc d = world->desc;
        d.rank = rank;
        return xd_comm_nccl(ctx, &d, &comm);
    }
    ~Member() {
        if (!world->on_device) return;
        xd_comm_destroy(comm);
        xd_cuda_destroy(cuda);
        cudaStreamDestroy(stream);
        xd_ctx_destroy(ctx);
    }
    Member(const Member &) = delete;
    const char *message() const {
        return xd_last_error(ctx)->message;
    }
    bool says(const char *text) const {
        return strstr(message(), text) != nullptr;
    }
};

/* Memory of a member that begins with given bytes. */
struct Buffer {
    Member *member;
    std::vector<unsigned char> bytes;
    Device device;

    Buffer(Member *m, const std::vector<unsigned char> &from)
        : member(m), bytes(from), device(allocate(m, from)) {}
    static bool is_device(const Member *m) {
        return m->world->on_device && !m->world->host_memory;
    }
    static Device allocate(Member *m, const std::vector<unsigned char> &from) {
        return is_device(m) ? Device(from) : Device();
    }
    void *at(size_t skip = 0) {
        return is_device(member) ? (void *)(device.at<char>() + skip) : (void *)(bytes.data() + skip);
    }
    void keep() { /* appends what it holds to the log; reading orders itself behind the stream */
        std::vector<unsigned char> out(bytes);
        if (is_device(member)) CHECK(xd_read(member->ctx, out.data(), device.at(), out.size()) == XD_OK);
        std::vector<unsigned char> &log = member->world->log[member->rank];
        log.insert(log.end(), out.begin(), out.end());
    }
};

typedef void (*Body)(Member *);

struct Threads {
    World *world;
    Body body;
};

static xd_result run_on_threads(xd_comm *comm, void *argument) {
    const Threads *threads = (const Threads *)argument;
    Member member(threads->world, xd_comm_rank(comm), comm);
    threads->body(&member);
    return XD_OK;
}

/* Every rank as a thread with a member that has not joined yet. */
static void run_members(World *world, const std::function<void(Member *)> &body) {
    std::vector<std::thread> threads;
    world->on_device = true;
    for (int r = 0; r < world->desc.size; r++)
        threads.emplace_back([world, &body, r] {
            Member member(world, r);
            body(&member);
        });
    for (std::thread &thread : threads) thread.join();
}

static void join_and_run(World *world, Body body) {
    run_members(world, [body](Member *member) {
        const xd_result joined = member->join();
        CHECK_EQ_STR(joined == XD_OK ? "" : member->message(), "");
        if (joined == XD_OK) body(member);
    });
}

/* The same calls on the threads transport and over NCCL. */
static void compare(World *nccl, Body body) {
    World host;
    Threads threads = { &host, body };
    xd_ctx_desc desc = {};
    host.reduction = desc.reduction = nccl->reduction;
    desc.timeout_seconds = 300.0;
    CHECK(xd_run_threads(RANKS, &desc, run_on_threads, &threads, nullptr) == XD_OK);
    join_and_run(nccl, body);
    for (int r = 0; r < RANKS; r++) {
        CHECK(!host.log[r].empty());
        CHECK_SAME(host.log[r], nccl->log[r]);
    }
}

/* ---- the calls ---- */

static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64,
                                   XD_DTYPE_I32, XD_DTYPE_I64,  XD_DTYPE_U8 };

static bool is_allowed(const Member *m, xd_dtype dtype, xd_reduce_op op) {
    const bool rounds = xd_dtype_is_floating(dtype) && (op == XD_SUM || op == XD_AVG);
    return xd_reduce_supports(dtype, op) && !(rounds && m->world->reduction == XD_REDUCTION_INVARIANT);
}

static void reduce_all(Member *m) {
    for (int form = 0; form < 28; form++) {
        const xd_dtype dtype = dtypes[form % 7];
        const xd_reduce_op op = (xd_reduce_op)(form / 7);
        const int64_t n = form % 3 ? 1 + form : ELEMENTS;
        if (!is_allowed(m, dtype, op)) continue;
        Buffer in(m, elements(dtype, n, &m->random, false)), out(m, elements(dtype, n, &m->random, false));
        CHECK(xd_all_reduce(m->comm, in.at(), out.at(), n, dtype, op) == XD_OK);
        CHECK(xd_all_reduce(m->comm, out.at(), out.at(), n, dtype, op) == XD_OK);
        out.keep();
        const int64_t uneven[RANKS] = { n / 3, n - n / 3, 0 }, even[RANKS] = { n / 3, n / 3, n / 3 };
        Buffer part(m, elements(dtype, n, &m->random, false));
        CHECK(xd_reduce_scatter(m->comm, in.at(), part.at(), uneven, dtype, op) == XD_OK);
        CHECK(xd_all_gather(m->comm, part.at(), out.at(), uneven, dtype) == XD_OK);
        out.keep();
        CHECK(xd_reduce_scatter(m->comm, in.at(), part.at(), even, dtype, op) == XD_OK);
        CHECK(xd_all_gather(m->comm, part.at(), out.at(), even, dtype) == XD_OK);
        out.keep();
        const size_t own = (size_t)m->rank * (size_t)even[0] * xd_dtype_size(dtype); /* in place */
        CHECK(xd_reduce_scatter(m->comm, in.at(), in.at(own), even, dtype, op) == XD_OK);
        CHECK(xd_all_gather(m->comm, in.at(own), in.at(), even, dtype) == XD_OK);
        in.keep();
    }
}

static void move_all(Member *m) {
    const int me = m->rank, next = (me + 1) % RANKS, before = (me + RANKS - 1) % RANKS;
    const int64_t to[RANKS] = { 10 + me, 3, 700 }, own = me == 0 ? 10 : me == 1 ? 3 : 700;
    const int64_t from[RANKS] = { own, me == 0 ? 11 : own, me == 0 ? 12 : own };
    const int64_t pieces[RANKS] = { 5, 0, 900 }, places[RANKS] = { 1000, 0, 17 };
    for (const xd_dtype dtype : dtypes) {
        Buffer in(m, elements(dtype, ELEMENTS, &m->random, false));
        Buffer out(m, elements(dtype, ELEMENTS, &m->random, false));
        CHECK(xd_all_to_all(m->comm, in.at(), to, out.at(), from, dtype) == XD_OK);
        out.keep();
        CHECK(xd_broadcast(m->comm, out.at(), ELEMENTS, dtype, 1) == XD_OK);
        out.keep();
        CHECK(xd_gather(m->comm, in.at(), out.at(), pieces, dtype, 2) == XD_OK);
        out.keep();
        CHECK(xd_scatter(m->comm, in.at(), out.at(), pieces, dtype, 0) == XD_OK);
        out.keep();
        xd_collective c = {};
        c.kind = XD_COLLECTIVE_ALL_GATHER;
        c.send = in.at();
        c.recv = out.at();
        c.recv_counts = pieces;
        c.recv_displacements = places;
        c.dtype = dtype;
        CHECK(xd_collective_run(m->comm, &c) == XD_OK);
        out.keep();
        if (me % 2 == 0) {
            CHECK(xd_send(m->comm, in.at(), 50, dtype, next) == XD_OK);
            CHECK(xd_recv(m->comm, out.at(), 50, dtype, before) == XD_OK);
        } else {
            CHECK(xd_recv(m->comm, out.at(), 50, dtype, before) == XD_OK);
            CHECK(xd_send(m->comm, in.at(), 50, dtype, next) == XD_OK);
        }
        out.keep();
    }
    CHECK(xd_barrier(m->comm) == XD_OK);
}

/* Sums over leaves, three ranks with other numbers of them, in and out of place. */
static void sum_leaves(Member *m) {
    static const xd_leaves leaves[RANKS] = { { 0, 3, 8 }, { 3, 0, 8 }, { 3, 5, 8 } };
    const xd_leaves own = leaves[m->rank];
    const int64_t nodes = xd_leaves_nodes(own.first, own.count), pieces[RANKS] = { 100, 0, 500 };
    for (int form = 0; form < 4; form++) {
        const xd_dtype dtype = form % 2 ? XD_DTYPE_F64 : XD_DTYPE_F32;
        Buffer forest(m, elements(dtype, 600 * (nodes ? nodes : 1), &m->random, false));
        Buffer sum(m, elements(dtype, 600, &m->random, false));
        xd_collective c = {};
        c.kind = form < 2 ? XD_COLLECTIVE_ALL_REDUCE : XD_COLLECTIVE_REDUCE_SCATTER;
        c.send = forest.at();
        c.recv = form == 1 ? forest.at() : sum.at();
        c.count = form < 2 ? 600 : 0;
        c.send_counts = form < 2 ? nullptr : pieces;
        c.dtype = dtype;
        c.op = form % 2 ? XD_AVG : XD_SUM;
        c.leaves = own;
        CHECK(xd_collective_run(m->comm, &c) == XD_OK);
        forest.keep();
        sum.keep();
    }
}

static void split_groups(Member *m) {
    xd_comm *pair = nullptr, *alone = nullptr;
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    CHECK(xd_comm_split(m->comm, m->rank == 1 ? -1 : 0, -m->rank, &pair) == XD_OK);
    CHECK((pair == nullptr) == (m->rank == 1));
    if (pair) {
        CHECK_EQ_INT(xd_comm_rank(pair), m->rank == 2 ? 0 : 1);
        CHECK_EQ_INT(xd_comm_world_rank(pair, 0), 2);
        CHECK(m->world->reduction == XD_REDUCTION_INVARIANT ||
              xd_all_reduce(pair, data.at(), data.at(), 200, XD_DTYPE_F32, XD_SUM) == XD_OK);
    }
    data.keep();
    CHECK(xd_comm_split(m->comm, m->rank, 0, &alone) == XD_OK);
    CHECK(xd_all_reduce(alone, data.at(), data.at(), 200, XD_DTYPE_F32, XD_MAX) == XD_OK);
    xd_comm_destroy(alone);
    data.keep();
    int64_t count = m->rank + 1; /* the host's memory beside that of the device */
    CHECK(xd_all_reduce(m->comm, &count, &count, 1, XD_DTYPE_I64, XD_SUM) == XD_OK);
    CHECK_EQ_INT(count, 6);
    xd_comm_destroy(pair);
    CHECK(xd_barrier(m->comm) == XD_OK);
}

static void run_all(Member *m) {
    reduce_all(m);
    move_all(m);
    sum_leaves(m);
    split_groups(m);
}

XD_TEST(collectives_over_nccl_have_the_bits_of_the_threads_transport) {
    World world;
    compare(&world, run_all);
}

XD_TEST(invariant_collectives_over_nccl_have_the_bits_of_the_threads_transport) {
    World world;
    world.reduction = XD_REDUCTION_INVARIANT;
    compare(&world, run_all);
}

XD_TEST(sums_that_need_many_tiles_of_staging_have_the_same_bits) {
    World world;
    world.desc.staging_bytes = 1000;
    compare(&world, run_all);
}

XD_TEST(host_memory_goes_over_nccl_with_the_same_bits) {
    World world;
    world.host_memory = true;
    compare(&world, run_all);
}

XD_TEST(calls_that_are_not_compared_have_the_same_bits) {
    World world;
    world.desc.compare = -1;
    compare(&world, run_all);
    World few;
    few.desc.compare = 5;
    compare(&few, run_all);
}

/* Equal pieces that lie back to back on all ranks but one. */
static void gather_displaced(Member *m) {
    static const int64_t pieces[RANKS] = { 40, 40, 40 }, places[RANKS] = { 80, 0, 200 };
    Buffer in(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    Buffer out(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    xd_collective c = {};
    c.kind = XD_COLLECTIVE_ALL_GATHER;
    c.send = in.at();
    c.recv = out.at();
    c.recv_counts = pieces;
    c.recv_displacements = m->rank == 1 ? places : nullptr;
    c.dtype = XD_DTYPE_F32;
    CHECK(xd_collective_run(m->comm, &c) == XD_OK);
    out.keep();
}

XD_TEST(one_rank_alone_may_have_gaps_between_its_pieces) {
    World world, fast;
    compare(&world, gather_displaced);
    fast.reduction = XD_REDUCTION_FAST;
    compare(&fast, gather_displaced);
}

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

/* FAST sums agree to rounding; whatever does not round, to the bit. */
static void sum_fast(Member *m) {
    for (const xd_dtype dtype : dtypes) {
        Random same(7);
        std::vector<std::vector<unsigned char>> sent;
        for (int r = 0; r < RANKS; r++) sent.push_back(elements(dtype, 300, &same, false));
        Buffer in(m, sent[(size_t)m->rank]), out(m, sent[0]);
        CHECK(xd_all_reduce(m->comm, in.at(), out.at(), 300, dtype, XD_SUM) == XD_OK);
        std::vector<unsigned char> sums(sent[0]), want(sent[0]);
        const void *pieces[RANKS];
        for (int r = 0; r < RANKS; r++) pieces[r] = sent[(size_t)r].data();
        const xd_launch launch = xd_ctx_launch(m->ctx);
        CHECK(xd_reduce_kernels_cpu()->pieces(&launch, want.data(), pieces, RANKS, 300, dtype, XD_SUM) ==
              XD_OK);
        CHECK(xd_read(m->ctx, sums.data(), out.at(), sums.size()) == XD_OK);
        for (int64_t i = 0; i < 300; i++)
            CHECK_NEAR(xd_load_f64(sums.data(), dtype, i), xd_load_f64(want.data(), dtype, i),
                       dtype == XD_DTYPE_BF16  ? 0.05
                       : dtype == XD_DTYPE_F16 ? 0.005
                       : dtype == XD_DTYPE_F32 ? 1e-6
                                               : 1e-14);
    }
}

XD_TEST(fast_sums_are_those_of_nccl_and_agree_to_rounding) {
    World world;
    world.reduction = XD_REDUCTION_FAST;
    join_and_run(&world, sum_fast);
    world.log[0].clear();
    World again;
    again.reduction = XD_REDUCTION_FAST;
    join_and_run(&again, reduce_all);
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

/* ---- what goes wrong ---- */

static void run_mismatches(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    const int me = m->rank;
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), me == 2 ? 99 : 100, XD_DTYPE_F32, XD_SUM) ==
          XD_ERROR_MISMATCH);
    CHECK_EQ_STR(m->message(), "all_reduce: rank 2 passed count 99, rank 0 passed count 100");
    CHECK_EQ_INT(xd_last_error(m->ctx)->culprit, 2);
    const xd_result refused = xd_broadcast(m->comm, data.at(), me == 1 ? -5 : 5, XD_DTYPE_F32, 0);
    CHECK(refused == (me == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER));
    CHECK(m->says("count -5 is negative"));
    if (me == 0) CHECK(xd_send(m->comm, data.at(), 7, XD_DTYPE_F32, 1) == XD_ERROR_MISMATCH);
    if (me == 1) CHECK(xd_recv(m->comm, data.at(), 8, XD_DTYPE_F32, 0) == XD_ERROR_MISMATCH);
    if (me < 2) CHECK_EQ_STR(m->message(), "rank 0 sends count 7, rank 1 receives count 8");
    CHECK(xd_all_reduce(m->comm, data.at(), data.at(), 100, XD_DTYPE_F32, XD_SUM) == XD_OK);
}

XD_TEST(ranks_that_disagree_are_named_and_the_group_goes_on) {
    World world;
    join_and_run(&world, run_mismatches);
}

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
        CHECK(m->says("did not arrive before the deadline"));
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
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    char host[64], port[16] = "";
    const int door = xdi_nccl_open(nullptr, "0");
    CHECK(door >= 0);
    CHECK(getsockname(door, (struct sockaddr *)&address, &length) == 0);
    CHECK(getnameinfo((struct sockaddr *)&address, length, host, sizeof host, port, sizeof port,
                      NI_NUMERICHOST | NI_NUMERICSERV) == 0);
    close(door);
    return port;
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
XD_TEST(collectives_over_nccl_have_the_bits_of_the_threads_transport) {
    SKIP("NCCL wants a process and a GPU for every rank");
}
#endif

XD_CUDA_TEST_MAIN()
