/* Ranks over the emulated NCCL: threads, each with a GPU of its own, and the same calls on the threads transport. */
#ifndef XD_CUDA_NCCL_TEST_H
#define XD_CUDA_NCCL_TEST_H

#include <nccl.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "cuda_test.h"

static thread_local ncclComm_t world_comm; /* the first that this rank has joined: an error is put into it */

static inline ncclResult_t join_noted(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    const ncclResult_t result = ncclCommInitRankConfig(comm, ranks, id, rank, config);
    if (!world_comm) world_comm = *comm;
    return result;
}

static thread_local xd_transport *world_transport; /* of the world that this rank has joined */

static inline xd_result create_noted(xd_ctx *ctx, xd_transport *transport, xd_comm **out) {
    world_transport = transport;
    return xd_comm_create(ctx, transport, out);
}

/* Rounds of control records of this rank: for each of them the host waits. */
static thread_local int rounds;

static inline ncclResult_t gather_noted(const void *send, void *recv, size_t count, ncclDataType_t type,
                                        ncclComm_t comm, cudaStream_t stream) {
    rounds += count == sizeof(xd_control) && type == ncclUint8;
    return ncclAllGather(send, recv, count, type, comm, stream);
}

/* Waits of one stream for another, of this rank. */
static thread_local std::map<cudaStream_t, int> waits;

static inline cudaError_t wait_noted(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    waits[stream]++;
    return cudaStreamWaitEvent(stream, event, flags);
}

#define ncclAllGather gather_noted
#define cudaStreamWaitEvent wait_noted
#define ncclCommInitRankConfig join_noted
#define xd_comm_create create_noted
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill_nccl.h"
#undef XDISTILL_IMPLEMENTATION
#undef cudaStreamWaitEvent

enum { RANKS = 3, ELEMENTS = 3000 };

/* What all ranks of a test share. */
struct World {
    bool on_device = false;   /* NCCL on GPUs; else the threads transport in host memory */
    bool host_memory = false; /* NCCL, but the caller's memory is the host's */
    bool own_streams = true;  /* else the context's stream is the legacy one */
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
        desc.compare = INT64_MAX; /* so that what differs is named, however many calls a test makes */
        desc.secret = "a secret of these ranks";
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
static inline double clock_now(void *user) {
    return 3600.0 * ((World *)user)->hours;
}

static thread_local std::string member_log; /* the last line that a rank has logged */

static inline void keep_line(void *, xd_log_level, const char *line) {
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
        if (w->own_streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
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
        if (stream) cudaStreamDestroy(stream);
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

static inline xd_result run_on_threads(xd_comm *comm, void *argument) {
    const Threads *threads = (const Threads *)argument;
    Member member(threads->world, xd_comm_rank(comm), comm);
    threads->body(&member);
    return XD_OK;
}

/* Every rank as a thread with a member that has not joined yet. */
static inline void run_members(World *world, const std::function<void(Member *)> &body) {
    std::vector<std::thread> threads;
    world->on_device = true;
    for (int r = 0; r < world->desc.size; r++)
        threads.emplace_back([world, &body, r] {
            Member member(world, r);
            body(&member);
        });
    for (std::thread &thread : threads) thread.join();
}

static inline void join_and_run(World *world, Body body) {
    run_members(world, [body](Member *member) {
        const xd_result joined = member->join();
        CHECK_EQ_STR(joined == XD_OK ? "" : member->message(), "");
        if (joined == XD_OK) body(member);
    });
}

/* The same calls on the threads transport and over NCCL. */
static inline void compare(World *nccl, Body body) {
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

#endif
