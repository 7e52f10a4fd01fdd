/* Ranks over the emulated NCCL whose threads have another current device, or whose streams are in a capture. */
#include "cuda_test.h"

#if defined(XD_EMU)
#    include "exchange_suite.h"

#    include "cuda_nccl_test.h"

/* ---- the current device ---- */

/* While it is alive another device than the rank's is current, and calls leave it so. */
struct Elsewhere {
    int own = -1, other = -1;

    Elsewhere() {
        int devices = 0;
        CHECK(cudaGetDevice(&own) == cudaSuccess && cudaGetDeviceCount(&devices) == cudaSuccess && devices > 1);
        other = (own + 1) % devices;
        CHECK(cudaSetDevice(other) == cudaSuccess);
    }
    void check() const {
        int current = -1;
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK_EQ_INT(current, other);
    }
    ~Elsewhere() {
        check();
        CHECK(cudaSetDevice(own) == cudaSuccess);
    }
};

/* A call with another device current, and the one that is current after it. */
#    define ELSEWHERE(call, result)       \
        do {                              \
            const Elsewhere elsewhere;    \
            CHECK_EQ_INT((call), result); \
        } while (0)

/* A call in every mode: sums of INVARIANT are over leaves, one a rank. */
static xd_result run(xd_comm *comm, xd_collective c) {
    xd_leaves known[RANKS];
    const int n = xd_comm_size(comm);
    const bool sums = c.kind == XD_COLLECTIVE_ALL_REDUCE || c.kind == XD_COLLECTIVE_REDUCE_SCATTER;
    for (int r = 0; r < n; r++) known[r] = { r, 1, n };
    if (sums && xd_ctx_settings(xd_comm_ctx(comm))->reduction == XD_REDUCTION_INVARIANT) {
        c.leaves = known[xd_comm_rank(comm)];
        c.known_leaves = known;
    }
    return xd_collective_run(comm, &c);
}

static xd_result sum_of(xd_comm *comm, const void *send, void *recv, int64_t count) {
    xd_collective c = {};
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = send;
    c.recv = recv;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    return run(comm, c);
}

static xd_result sum(Member *m, Buffer *data, int64_t count) {
    return sum_of(m->comm, data->at(), data->at(), count);
}

/* A ring of one message each way. */
static xd_result pass_on(Member *m, Buffer *from, Buffer *to, int64_t count) {
    const int n = m->world->desc.size, right = (m->rank + 1) % n, left = (m->rank + n - 1) % n;
    const xd_collective c[] = { message_of(XD_COLLECTIVE_SEND, (float *)from->at(), count, right),
                                message_of(XD_COLLECTIVE_RECV, (float *)to->at(), count, left) };
    return xd_exchange(m->comm, c, 2);
}

static void call_elsewhere(Member *m) {
    xd_comm *group = nullptr, *twin = nullptr;
    xd_ctx *host = nullptr;
    xd_ctx_desc desc = {};
    desc.reduction = m->world->reduction;
    Buffer data(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    Buffer other(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    std::vector<float> memory(300, (float)m->rank);
    ELSEWHERE(sum(m, &data, ELEMENTS), XD_OK);
    ELSEWHERE(xd_broadcast(m->comm, other.at(), 100, XD_DTYPE_F32, 2), XD_OK);
    ELSEWHERE(sum_of(m->comm, memory.data(), memory.data(), 300), XD_OK);
    ELSEWHERE(pass_on(m, &data, &other, 700), XD_OK);
    ELSEWHERE(xd_barrier(m->comm), XD_OK);
    ELSEWHERE(xd_agree(m->comm, XD_OK), XD_OK);
    ELSEWHERE(xd_comm_split(m->comm, 0, -m->rank, &group), XD_OK);
    if (!group) return;
    ELSEWHERE(sum_of(group, data.at(), data.at(), ELEMENTS), XD_OK);
    CHECK(xd_ctx_create(&desc, &host) == XD_OK);
    ELSEWHERE(xd_comm_fork(m->comm, host, &twin), XD_OK);
    if (!twin) return;
    ELSEWHERE(sum_of(twin, memory.data(), memory.data(), 300), XD_OK);
    CHECK(memory[7] == (float)(RANKS * (RANKS - 1) / 2 * RANKS));
    ELSEWHERE((xd_comm_destroy(twin), XD_OK), XD_OK);
    xd_ctx_destroy(host);
    ELSEWHERE((xd_comm_destroy(group), XD_OK), XD_OK);
    /* What goes wrong. */
    if (m->world->desc.compare > 0) {
        ELSEWHERE(sum(m, &data, m->rank == 1 ? -1 : ELEMENTS), m->rank == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
        ELSEWHERE(sum(m, &data, m->rank == 1 ? 5 : ELEMENTS), XD_ERROR_MISMATCH);
    }
    data.keep();
    other.keep();
}

XD_TEST(calls_with_another_current_device_are_the_groups_and_leave_it_current) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        for (const int64_t compared : { INT64_MAX, (int64_t)-1 }) {
            World streams, legacy;
            streams.reduction = legacy.reduction = (xd_reduction)mode;
            streams.desc.compare = legacy.desc.compare = compared;
            legacy.own_streams = false;
            join_and_run(&streams, call_elsewhere);
            join_and_run(&legacy, call_elsewhere);
            for (int r = 0; r < RANKS; r++) CHECK_SAME(streams.log[r], legacy.log[r]);
        }
    }
}

XD_TEST(a_world_is_joined_and_left_with_another_current_device) {
    World world;
    world.own_streams = false;
    run_members(&world, [](Member *m) {
        Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
        ELSEWHERE(m->join(), XD_OK);
        CHECK(sum(m, &data, 200) == XD_OK);
        ELSEWHERE((xd_comm_destroy(m->comm), XD_OK), XD_OK);
        m->comm = nullptr;
    });
}

/* Errors that break the world leave the device too. */
static void run_lost(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    CHECK(sum(m, &data, 200) == XD_OK);
    m->world->meet();
    if (m->rank == 1) {
        ELSEWHERE((xd_comm_abort(m->comm), XD_OK), XD_OK);
        ELSEWHERE(xd_barrier(m->comm), XD_ERROR_PEER);
        m->world->pass();
    } else {
        ELSEWHERE(sum(m, &data, 200), XD_ERROR_TIMEOUT);
        ELSEWHERE(sum(m, &data, 200), XD_ERROR_PEER);
        m->world->finished++;
    }
    ELSEWHERE((xd_comm_destroy(m->comm), XD_OK), XD_OK);
    m->comm = nullptr;
}

XD_TEST(a_world_that_breaks_leaves_the_current_device) {
    World world;
    join_and_run(&world, run_lost);
    emu_take_reports(nullptr, 0);
}

/* The rank's calls come from a new thread, whose current device is the first one. */
static void sum_on_worker(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    std::thread([&] {
        int current = -1;
        CHECK(sum(m, &data, ELEMENTS) == XD_OK && xd_barrier(m->comm) == XD_OK);
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK_EQ_INT(current, 0);
    }).join();
    data.keep();
}

XD_TEST(a_thread_that_has_set_no_device_makes_the_calls_of_its_rank) {
    World world;
    world.own_streams = false;
    join_and_run(&world, sum_on_worker);
    for (int r = 1; r < RANKS; r++) CHECK_SAME(world.log[0], world.log[r]);
}

/* ---- graphs ---- */

/* A capture of the member's stream, and launches of what it has recorded. */
struct Recording {
    cudaStream_t stream;
    cudaGraphExec_t exec = nullptr;

    explicit Recording(cudaStream_t s, cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) : stream(s) {
        CHECK(cudaStreamBeginCapture(stream, mode) == cudaSuccess);
    }
    void end() {
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
        if (!graph) return;
        CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    }
    void launch() {
        CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
    }
    ~Recording() {
        if (exec) CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    }
    Recording(const Recording &) = delete;
};

/* The graph of a rank alone, as a world of one. */
XD_TEST(a_collective_in_a_capture_loses_nothing) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        World world;
        world.reduction = (xd_reduction)mode;
        world.desc.size = 1;
        world.desc.compare = -1;
        join_and_run(&world, [](Member *m) {
            const std::vector<unsigned char> values = elements(XD_DTYPE_F32, 500, &m->random, false);
            Buffer data(m, values);
            CHECK(sum(m, &data, 500) == XD_OK);
            Recording recording(m->stream);
            CHECK_EQ_INT(sum(m, &data, 500), XD_OK);
            recording.end();
            recording.launch();
            CHECK_EQ_INT(sum(m, &data, 500), XD_OK);
            data.keep();
            CHECK_SAME(m->world->log[0], values);
        });
    }
}

/* Calls of every kind, into memory that they do not read, so that they can be repeated. */
struct Kinds {
    Member *m;
    std::vector<Buffer> in, out;
    int64_t even[RANKS], uneven[RANKS];

    explicit Kinds(Member *member) : m(member) {
        in.reserve(3), out.reserve(10);
        for (int k = 0; k < 3; k++) in.emplace_back(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
        for (int k = 0; k < 10; k++) out.emplace_back(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
        for (int r = 0; r < RANKS; r++) even[r] = 300, uneven[r] = 100 + 200 * r;
    }
    xd_collective record(xd_collective_kind kind, int from, int to, const int64_t *counts) {
        xd_collective c = {};
        c.kind = kind;
        c.send = in[(size_t)from].at();
        c.recv = out[(size_t)to].at();
        c.dtype = XD_DTYPE_F32;
        c.root = 1;
        c.op = to % 2 ? XD_SUM : XD_AVG;
        const bool sends = kind == XD_COLLECTIVE_REDUCE_SCATTER || kind == XD_COLLECTIVE_SCATTER ||
                           kind == XD_COLLECTIVE_ALL_TO_ALL;
        const bool receives = kind == XD_COLLECTIVE_ALL_GATHER || kind == XD_COLLECTIVE_GATHER ||
                              kind == XD_COLLECTIVE_ALL_TO_ALL;
        if (sends) c.send_counts = counts;
        if (receives) c.recv_counts = counts;
        if (!counts) c.count = ELEMENTS;
        return c;
    }
    void call() {
        const xd_collective calls[] = { record(XD_COLLECTIVE_ALL_REDUCE, 0, 0, nullptr),
                                        record(XD_COLLECTIVE_ALL_REDUCE, 1, 1, nullptr),
                                        record(XD_COLLECTIVE_REDUCE_SCATTER, 2, 2, even),
                                        record(XD_COLLECTIVE_REDUCE_SCATTER, 0, 3, uneven),
                                        record(XD_COLLECTIVE_ALL_GATHER, 1, 4, even),
                                        record(XD_COLLECTIVE_ALL_GATHER, 2, 5, uneven),
                                        record(XD_COLLECTIVE_GATHER, 0, 6, uneven),
                                        record(XD_COLLECTIVE_SCATTER, 1, 7, even),
                                        record(XD_COLLECTIVE_ALL_TO_ALL, 2, 8, even) };
        for (const xd_collective &c : calls) {
            const xd_result result = run(m->comm, c);
            CHECK_EQ_STR(result == XD_OK ? "" : xd_last_error(xd_comm_ctx(m->comm))->message, "");
        }
        CHECK(pass_on(m, &in[0], &out[9], 400) == XD_OK);
    }
    void keep() {
        for (Buffer &buffer : out) buffer.keep();
    }
};

static bool is_recorded;
static cudaStreamCaptureMode recorded_mode;

static void call_each_kind(Member *m) {
    Kinds kinds(m);
    m->world->meet(); /* in Global mode no other thread may allocate meanwhile */
    if (!is_recorded || !m->world->on_device) {
        kinds.call();
        m->world->meet(), m->world->meet();
        kinds.keep();
        return;
    }
    {
        Recording recording(m->stream, recorded_mode);
        m->world->meet();
        kinds.call();
        recording.end();
        m->world->meet();
        for (int k = 0; k < 3; k++) recording.launch();
        kinds.keep();
    }
    CHECK(xd_barrier(m->comm) == XD_OK);
}

XD_TEST(a_graph_of_collectives_gives_what_the_calls_give) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        for (const size_t staging : { 0, 1000 }) {
            World called, replayed;
            called.reduction = replayed.reduction = (xd_reduction)mode;
            called.desc.compare = replayed.desc.compare = -1;
            called.desc.staging_bytes = replayed.desc.staging_bytes = staging;
            recorded_mode = staging ? cudaStreamCaptureModeGlobal : cudaStreamCaptureModeThreadLocal;
            is_recorded = false;
            join_and_run(&called, call_each_kind);
            is_recorded = true;
            join_and_run(&replayed, call_each_kind);
            for (int r = 0; r < RANKS; r++) {
                CHECK(!called.log[r].empty());
                CHECK_SAME(called.log[r], replayed.log[r]);
            }
        }
    }
}

/* Sums on two streams in turn, every second one by a graph, all by the same staging memory; nobody waits in between. */
static void alternate(Member *m) {
    cudaStream_t other = nullptr;
    std::vector<Buffer> sums;
    sums.reserve(6);
    for (int k = 0; k < 6; k++) sums.emplace_back(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    xd_collective c = {};
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.count = ELEMENTS;
    c.dtype = XD_DTYPE_F32;
    if (!m->world->on_device) {
        for (Buffer &buffer : sums) {
            c.send = c.recv = buffer.at();
            CHECK(xd_collective_run(m->comm, &c) == XD_OK);
        }
    } else {
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
        Recording first(other), *graphs[] = { &first, nullptr, nullptr };
        std::vector<Recording *> made;
        for (int k = 0; k < 3; k++) {
            if (k > 0) graphs[k] = new Recording(other), made.push_back(graphs[k]);
            c.send = c.recv = sums[(size_t)(2 * k + 1)].at();
            c.stream = other;
            CHECK(xd_collective_run(m->comm, &c) == XD_OK);
            graphs[k]->end();
        }
        for (int k = 0; k < 3; k++) {
            c.send = c.recv = sums[(size_t)(2 * k)].at();
            c.stream = m->stream;
            CHECK(xd_collective_run(m->comm, &c) == XD_OK);
            graphs[k]->launch();
        }
        CHECK(xd_barrier(m->comm) == XD_OK); /* it waits for the last graph */
        for (Recording *recording : made) delete recording;
    }
    for (Buffer &sum : sums) sum.keep();
    if (other) CHECK(cudaStreamSynchronize(other) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
}

XD_TEST(graphs_and_calls_on_two_streams_keep_their_order) {
    World world;
    world.desc.compare = -1;
    world.desc.staging_bytes = 4000;
    compare(&world, alternate);
}

/* Two streams of one graph use the group, without an order that the caller makes. */
static void fork_in_graph(Member *m) {
    Buffer left(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    Buffer right(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    xd_collective c = {};
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = c.recv = left.at();
    c.count = ELEMENTS;
    c.dtype = XD_DTYPE_F32;
    if (!m->world->on_device) {
        CHECK(xd_collective_run(m->comm, &c) == XD_OK);
        c.send = c.recv = right.at();
        CHECK(xd_collective_run(m->comm, &c) == XD_OK);
    } else {
        cudaStream_t other = nullptr;
        cudaEvent_t forked = nullptr, joined = nullptr;
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
        CHECK(cudaEventCreate(&forked) == cudaSuccess && cudaEventCreate(&joined) == cudaSuccess);
        {
            Recording recording(m->stream);
            CHECK(cudaEventRecord(forked, m->stream) == cudaSuccess);
            CHECK(cudaStreamWaitEvent(other, forked, 0) == cudaSuccess);
            CHECK(xd_collective_run(m->comm, &c) == XD_OK);
            c.send = c.recv = right.at();
            c.stream = other;
            CHECK(xd_collective_run(m->comm, &c) == XD_OK);
            CHECK(cudaEventRecord(joined, other) == cudaSuccess);
            CHECK(cudaStreamWaitEvent(m->stream, joined, 0) == cudaSuccess);
            recording.end();
            recording.launch();
            CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess);
        }
        CHECK(!cudaEventDestroy(forked) && !cudaEventDestroy(joined) && !cudaStreamDestroy(other));
    }
    left.keep();
    right.keep();
}

XD_TEST(two_streams_of_a_graph_use_a_group_in_the_order_of_the_calls) {
    World world;
    world.desc.compare = -1;
    world.desc.staging_bytes = 4000;
    compare(&world, fork_in_graph);
}

/* A sum in tiles beside a capture that has recorded one: the stream that adds tiles is in the capture meanwhile. */
static void sum_beside_recording(Member *m) {
    cudaStream_t other = nullptr;
    Buffer recorded(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    Buffer called(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    xd_collective c = {};
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = c.recv = called.at();
    c.count = ELEMENTS;
    c.dtype = XD_DTYPE_F32;
    if (!m->world->on_device) {
        CHECK(xd_collective_run(m->comm, &c) == XD_OK && sum(m, &recorded, ELEMENTS) == XD_OK);
    } else {
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
        c.stream = other;
        Recording recording(m->stream);
        CHECK(sum(m, &recorded, ELEMENTS) == XD_OK);
        CHECK_EQ_INT(xd_collective_run(m->comm, &c), XD_OK);
        recording.end();
        recording.launch();
        CHECK(xd_barrier(m->comm) == XD_OK);
    }
    recorded.keep();
    called.keep();
    if (other) CHECK(cudaStreamSynchronize(other) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
}

XD_TEST(a_sum_beside_a_capture_that_has_recorded_one_is_no_part_of_it) {
    World world;
    world.desc.compare = -1;
    world.desc.staging_bytes = 4000;
    compare(&world, sum_beside_recording);
}

/* ---- what a graph cannot hold ---- */

#    define REFUSED(m, call, text)                      \
        do {                                            \
            CHECK_EQ_INT((call), XD_ERROR_UNSUPPORTED); \
            CHECK((m)->says(text));                     \
        } while (0)

static void refuse_in_capture(Member *m) {
    const bool compares = m->world->desc.compare > 0;
    Buffer data(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    Buffer other(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    std::vector<float> memory(300, 1.0f);
    xd_comm *group = nullptr;
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    CHECK(sum(m, &data, ELEMENTS) == XD_OK);
    const int before = rounds;
    {
        Recording recording(m->stream);
        REFUSED(m, xd_barrier(m->comm), "a captured stream cannot record this call: the host waits for its peers");
        REFUSED(m, xd_agree(m->comm, XD_OK), "the host waits");
        REFUSED(m, xd_comm_split(m->comm, 0, 0, &group), "the host waits");
        REFUSED(m, xd_comm_fork(m->comm, host, &group), "the host waits");
        if (compares) {
            REFUSED(m, sum(m, &data, ELEMENTS), "xd_nccl_desc.compare");
            REFUSED(m, pass_on(m, &data, &other, 300), "xd_nccl_desc.compare");
        } else {
            REFUSED(m, sum_of(m->comm, data.at(), memory.data(), 300), "its memory is the host's");
            REFUSED(m, sum_of(m->comm, memory.data(), data.at(), 300), "its memory is the host's");
            const int to = (m->rank + 1) % RANKS, from = (m->rank + RANKS - 1) % RANKS;
            const xd_collective c[] = { message_of(XD_COLLECTIVE_SEND, memory.data(), 300, to),
                                        message_of(XD_COLLECTIVE_RECV, (float *)other.at(), 300, from) };
            REFUSED(m, xd_exchange(m->comm, c, 2), "its memory is the host's");
            CHECK_EQ_INT(sum(m, &data, -1), XD_ERROR_ARGUMENT); /* as ever, and nothing is lost */
        }
        recording.end();
    }
    CHECK_EQ_INT(rounds - before, 0);
    CHECK(sum(m, &data, ELEMENTS) == XD_OK && xd_barrier(m->comm) == XD_OK);
    CHECK(xd_comm_split(m->comm, 0, 0, &group) == XD_OK && pass_on(m, &data, &other, 300) == XD_OK);
    data.keep();
    xd_comm_destroy(group);
    xd_ctx_destroy(host);
}

XD_TEST(a_call_that_a_graph_cannot_hold_is_refused_with_nothing_lost) {
    World all, none;
    none.desc.compare = -1;
    join_and_run(&all, refuse_in_capture);
    join_and_run(&none, refuse_in_capture);
    for (int r = 0; r < RANKS; r++) CHECK_SAME(all.log[r], none.log[r]);
}

/* A refused call does not count among those that are compared. */
static void count_to_two(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 100, &m->random, false));
    CHECK(sum(m, &data, 100) == XD_OK);
    for (const bool is_third : { false, true }) {
        Recording recording(m->stream);
        CHECK_EQ_INT(sum(m, &data, 100), is_third ? XD_OK : XD_ERROR_UNSUPPORTED);
        recording.end();
        const int before = rounds;
        CHECK(sum(m, &data, 100) == XD_OK);
        CHECK_EQ_INT(rounds - before, is_third ? 0 : 1);
    }
    CHECK(xd_barrier(m->comm) == XD_OK);
}

XD_TEST(calls_are_recorded_once_the_compared_ones_are_made) {
    World world;
    world.desc.compare = 2;
    join_and_run(&world, count_to_two);
}

/* The context's stream is the legacy one, which a blocking stream's capture excludes; and a capture that is already lost. */
static void refuse_legacy(Member *m) {
    cudaStream_t blocking = nullptr;
    Buffer data(m, elements(XD_DTYPE_F32, 100, &m->random, false));
    CHECK(cudaStreamCreate(&blocking) == cudaSuccess);
    {
        Recording recording(blocking);
        REFUSED(m, sum(m, &data, 100), "the legacy stream cannot be used while a blocking stream is captured");
        CHECK(xd_barrier(m->comm) == XD_OK); /* it has a stream of its own */
        recording.end();
    }
    CHECK(cudaStreamDestroy(blocking) == cudaSuccess);
    CHECK(sum(m, &data, 100) == XD_OK && xd_barrier(m->comm) == XD_OK);
}

static void refuse_invalid(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 100, &m->random, false));
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(cudaStreamQuery(m->stream) == cudaErrorStreamCaptureUnsupported);
    REFUSED(m, sum(m, &data, 100), "the capture of the stream was invalidated by an earlier call");
    CHECK(cudaStreamEndCapture(m->stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
    CHECK(sum(m, &data, 100) == XD_OK && xd_barrier(m->comm) == XD_OK);
}

XD_TEST(streams_that_a_capture_has_made_unusable_lose_no_world) {
    World legacy, invalid;
    legacy.own_streams = false;
    legacy.desc.compare = invalid.desc.compare = -1;
    join_and_run(&legacy, refuse_legacy);
    join_and_run(&invalid, refuse_invalid);
    CHECK(emu_take_reports(nullptr, 0) == RANKS);
}

/* Calls on other streams go on while a stream is in a capture of the strictest mode. */
static void call_beside_capture(Member *m) {
    cudaStream_t captured = nullptr;
    std::vector<float> memory(40000, 1.0f); /* more than the world has room for at first */
    Buffer data(m, elements(XD_DTYPE_F32, 100, &m->random, false));
    CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking) == cudaSuccess);
    m->world->meet();
    {
        Recording recording(captured, cudaStreamCaptureModeGlobal);
        CHECK(sum(m, &data, 100) == XD_OK && xd_barrier(m->comm) == XD_OK);
        CHECK(sum_of(m->comm, memory.data(), memory.data(), 40000) == XD_OK);
        m->world->meet();
        recording.end();
    }
    m->world->meet();
    CHECK(memory[39999] == (float)RANKS);
    CHECK(cudaStreamDestroy(captured) == cudaSuccess);
}

XD_TEST(calls_beside_a_capture_do_not_disturb_it) {
    World world;
    join_and_run(&world, call_beside_capture);
}

/* ---- a rank that stops ---- */

/* Rank 1 does not launch its graph a second time. The others see it by their own deadlines, and their streams are free again. */
static void stop_launching(Member *m) {
    Buffer data(m, elements(XD_DTYPE_F32, 200, &m->random, false));
    std::vector<unsigned char> out(800);
    m->world->meet();
    {
        Recording recording(m->stream);
        CHECK(sum(m, &data, 200) == XD_OK);
        recording.end();
        recording.launch();
        CHECK(xd_read(m->ctx, out.data(), data.at(), 800) == XD_OK && xd_barrier(m->comm) == XD_OK);
        m->world->meet();
        if (m->rank == 1) {
            m->world->pass();
        } else {
            recording.launch();
            CHECK_EQ_INT(xd_read(m->ctx, out.data(), data.at(), 800), XD_ERROR_TIMEOUT);
            CHECK_EQ_INT(xd_barrier(m->comm), XD_ERROR_TIMEOUT);
            CHECK(m->says("did not arrive before the deadline"));
            CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess);
            m->world->finished++;
        }
    }
}

XD_TEST(a_rank_that_stops_launching_its_graph_ends_in_timeouts_of_the_others) {
    World world;
    world.desc.compare = -1;
    join_and_run(&world, stop_launching);
    emu_take_reports(nullptr, 0);
}
#else
XD_TEST(ranks_over_nccl_record_graphs) {
    SKIP("NCCL wants a process and a GPU for every rank");
}
#endif

XD_CUDA_TEST_MAIN()
