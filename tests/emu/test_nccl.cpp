/* Tests of the emulated NCCL: every collective against a plain loop, and misuse, which has to be reported or to hang. */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <thread>
#include <vector>

#include "nccl.h"

namespace {

const int kRanks = 4;
const size_t kCount = 6;

struct Rank {
    int rank, ranks;
    ncclComm_t comm;
    cudaStream_t stream;
};

/* Device memory filled from the host. */
struct Buffer {
    char *device = nullptr;
    size_t bytes;
    explicit Buffer(size_t n) : bytes(n) {
        if (cudaMalloc(&device, n)) abort();
    }
    template <typename T> explicit Buffer(const std::vector<T> &host) : Buffer(host.size() * sizeof(T)) {
        cudaMemcpy(device, host.data(), bytes, cudaMemcpyHostToDevice);
    }
    Buffer(const Buffer &) = delete;
    ~Buffer() {
        cudaFree(device);
    }
    template <typename T> std::vector<T> read() const {
        std::vector<T> host(bytes / sizeof(T));
        cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost);
        return host;
    }
};

/* Runs body as rank r of n on device r, each in a thread; the number of bodies that returned a nonzero
 * value. */
int run_ranks(int n, const std::function<int(Rank &)> &body) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    std::vector<int> results((size_t)n, 1);
    std::vector<std::thread> threads;
    for (int r = 0; r < n; r++)
        threads.emplace_back([&, r] {
            Rank self = { r, n, nullptr, nullptr };
            cudaSetDevice(r);
            if (cudaStreamCreate(&self.stream) || ncclCommInitRank(&self.comm, n, id, r)) return;
            results[(size_t)r] = body(self);
            ncclCommDestroy(self.comm);
            cudaStreamDestroy(self.stream);
        });
    for (std::thread &thread : threads) thread.join();
    int failures = 0;
    for (const int result : results) failures += result != 0;
    return failures;
}

/* What rank r sends at index i. */
float sent(int r, size_t i) {
    return (float)(r * 100 + (int)i);
}

std::vector<float> sent_by(int r, size_t count) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; i++) values[i] = sent(r, i);
    return values;
}

float reduced(ncclRedOp_t op, int ranks, size_t i) {
    double value = sent(0, i);
    for (int r = 1; r < ranks; r++) {
        const double v = sent(r, i);
        value = op == ncclProd  ? value * v
                : op == ncclMax ? fmax(value, v)
                : op == ncclMin ? fmin(value, v)
                                : value + v;
    }
    return (float)(op == ncclAvg ? value / ranks : value);
}

template <typename Expected> int differences(const Buffer &buffer, Expected expected) {
    const std::vector<float> values = buffer.read<float>();
    int wrong = 0;
    for (size_t i = 0; i < values.size(); i++) wrong += values[i] != expected(i);
    return wrong;
}

int all_reduce(Rank &self, ncclRedOp_t op) {
    Buffer data(sent_by(self.rank, kCount));
    if (ncclAllReduce(data.device, data.device, kCount, ncclFloat32, op, self.comm, self.stream)) return 1;
    cudaStreamSynchronize(self.stream);
    return differences(data, [&](size_t i) { return reduced(op, self.ranks, i); });
}

int rooted(Rank &self) {
    const int root = 2;
    Buffer data(sent_by(self.rank, kCount)), sum(kCount * 4), all(kCount * 4 * (size_t)self.ranks);
    Buffer spread(sent_by(self.rank, kCount * (size_t)self.ranks)), piece(kCount * 4);
    cudaMemset(sum.device, 0, sum.bytes);
    int wrong =
        ncclReduce(data.device, sum.device, kCount, ncclFloat32, ncclSum, root, self.comm, self.stream) != 0;
    wrong += ncclGather(data.device, all.device, kCount, ncclFloat32, root, self.comm, self.stream) != 0;
    wrong += ncclScatter(spread.device, piece.device, kCount, ncclFloat32, root, self.comm, self.stream) != 0;
    wrong += ncclBcast(data.device, kCount, ncclFloat32, root, self.comm, self.stream) != 0;
    cudaStreamSynchronize(self.stream);
    const bool is_root = self.rank == root;
    wrong += differences(sum, [&](size_t i) { return is_root ? reduced(ncclSum, self.ranks, i) : 0.0f; });
    wrong += differences(data, [&](size_t i) { return sent(root, i); });
    wrong += differences(piece, [&](size_t i) { return sent(root, (size_t)self.rank * kCount + i); });
    if (is_root) wrong += differences(all, [](size_t i) { return sent((int)(i / kCount), i % kCount); });
    return wrong;
}

int gathers_and_scatters(Rank &self) {
    const size_t n = (size_t)self.ranks, mine = (size_t)self.rank;
    Buffer data(sent_by(self.rank, kCount)), all(n * kCount * 4), spread(sent_by(self.rank, n * kCount)),
        piece(kCount * 4);
    Buffer exchanged(n * kCount * 4);
    int wrong = ncclAllGather(data.device, all.device, kCount, ncclFloat32, self.comm, self.stream) != 0;
    wrong += ncclReduceScatter(spread.device, piece.device, kCount, ncclFloat32, ncclSum, self.comm,
                               self.stream) != 0;
    wrong += ncclAlltoAll(spread.device, exchanged.device, kCount, ncclFloat32, self.comm, self.stream) != 0;
    cudaStreamSynchronize(self.stream);
    wrong += differences(all, [](size_t i) { return sent((int)(i / kCount), i % kCount); });
    wrong += differences(piece, [&](size_t i) { return reduced(ncclSum, self.ranks, mine * kCount + i); });
    wrong +=
        differences(exchanged, [&](size_t i) { return sent((int)(i / kCount), mine * kCount + i % kCount); });
    return wrong;
}

/* Every rank sends to its right neighbour; grouped, since send and receive wait for each other. */
int exchange(Rank &self, bool grouped) {
    const int right = (self.rank + 1) % self.ranks, left = (self.rank + self.ranks - 1) % self.ranks;
    Buffer data(sent_by(self.rank, kCount)), came(kCount * 4);
    if (grouped) ncclGroupStart();
    int wrong = ncclSend(data.device, kCount, ncclFloat32, right, self.comm, self.stream) != 0;
    wrong += ncclRecv(came.device, kCount, ncclFloat32, left, self.comm, self.stream) != 0;
    if (grouped) wrong += ncclGroupEnd() != 0;
    if (cudaStreamSynchronize(self.stream)) {
        ncclCommAbort(self.comm);
        self.comm = nullptr;
        return 1;
    }
    return wrong + differences(came, [&](size_t i) { return sent(left, i); });
}

/* Sums are rounded to the type of the memory after each addition, in the order of ranks. */
int bf16_order(Rank &self) {
    const unsigned short values[3] = { 0x4380, 0x3f80, 0xc380 }; /* 256, 1, -256: 256 + 1 rounds to 256 */
    Buffer data(std::vector<unsigned short>(1, values[self.rank]));
    if (ncclAllReduce(data.device, data.device, 1, ncclBfloat16, ncclSum, self.comm, self.stream)) return 1;
    cudaStreamSynchronize(self.stream);
    return data.read<unsigned short>()[0] != 0;
}

template <typename T> int type_sum(Rank &self, ncclDataType_t type, T value, T expected) {
    Buffer data(std::vector<T>(3, value));
    if (ncclAllReduce(data.device, data.device, 3, type, ncclSum, self.comm, self.stream)) return 1;
    cudaStreamSynchronize(self.stream);
    return data.read<T>()[2] != expected;
}

int all_types(Rank &self) {
    return type_sum<int8_t>(self, ncclInt8, -3, -12) + type_sum<uint8_t>(self, ncclUint8, 60, 240) +
           type_sum<int32_t>(self, ncclInt32, -7, -28) + type_sum<uint32_t>(self, ncclUint32, 7, 28) +
           type_sum<int64_t>(self, ncclInt64, 1ll << 53 | 1, 4 * (1ll << 53 | 1)) +
           type_sum<uint64_t>(self, ncclUint64, 1ull << 61, 1ull << 63) +
           type_sum<double>(self, ncclDouble, 0.5, 2.0) +
           type_sum<unsigned short>(self, ncclHalf, 0x3c00, 0x4400) +
           type_sum<unsigned short>(self, ncclBfloat16, 0x3f80, 0x4080);
}

int split_in_two(Rank &self) {
    ncclComm_t half;
    int count = 0, rank = -1;
    if (ncclCommSplit(self.comm, self.rank % 2, -self.rank, &half, nullptr)) return 1;
    ncclCommCount(half, &count);
    ncclCommUserRank(half, &rank);
    const int expected_rank = self.rank < 2 ? 1 : 0; /* keys fall with the rank */
    Buffer data(std::vector<float>(1, (float)self.rank));
    ncclAllReduce(data.device, data.device, 1, ncclFloat32, ncclSum, half, self.stream);
    cudaStreamSynchronize(self.stream);
    const int wrong =
        count != 2 || rank != expected_rank || data.read<float>()[0] != (self.rank % 2 ? 4.0f : 2.0f);
    ncclCommDestroy(half);
    ncclComm_t none;
    return wrong + (ncclCommSplit(self.comm, self.rank ? NCCL_SPLIT_NOCOLOR : 0, 0, &none, nullptr) != 0) +
           (self.rank ? none != nullptr : ncclCommDestroy(none) != 0);
}

int graph_of_collectives(Rank &self) {
    Buffer data(std::vector<float>(1, 1.0f));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal);
    ncclAllReduce(data.device, data.device, 1, ncclFloat32, ncclSum, self.comm, self.stream);
    cudaStreamEndCapture(self.stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int i = 0; i < 3; i++) cudaGraphLaunch(exec, self.stream);
    cudaStreamSynchronize(self.stream);
    const int wrong = data.read<float>()[0] != 64.0f;
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    return wrong;
}

/* ---- misuse ---- */

struct Misuse {
    const char *name, *phrase;
    std::function<int(Rank &)> body;
};

int synchronise(Rank &self) {
    const bool failed = cudaStreamSynchronize(self.stream) != cudaSuccess;
    if (failed) {
        ncclCommAbort(self.comm);
        self.comm = nullptr;
    }
    return failed;
}

const Misuse misuses[] = {
    { "counts differ", "ranks do not agree: ncclAllReduce of 4 elements",
      [](Rank &self) {
          Buffer data(64);
          ncclAllReduce(data.device, data.device, self.rank ? 5 : 4, ncclFloat32, ncclSum, self.comm,
                        self.stream);
          return synchronise(self);
      } },
    { "collectives differ", "ncclBroadcast of 4 elements, type 7, op 0, root 0 on rank 1",
      [](Rank &self) {
          Buffer data(64);
          if (self.rank == 1)
              ncclBroadcast(data.device, data.device, 4, ncclFloat32, 0, self.comm, self.stream);
          else
              ncclAllReduce(data.device, data.device, 4, ncclFloat32, ncclSum, self.comm, self.stream);
          return synchronise(self);
      } },
    { "an exchange outside a group", "hangs", [](Rank &self) { return exchange(self, false); } },
    { "a rank stays away", "hangs",
      [](Rank &self) {
          Buffer data(64);
          if (self.rank)
              ncclAllReduce(data.device, data.device, 4, ncclFloat32, ncclSum, self.comm, self.stream);
          return synchronise(self);
      } },
    { "a buffer is too short", "receive buffer is too short",
      [](Rank &self) {
          Buffer data(16), all(28);
          return (int)ncclAllGather(data.device, all.device, 4, ncclFloat32, self.comm, self.stream);
      } },
    { "a buffer is on the host", "is no device memory",
      [](Rank &self) {
          float data[4] = { 0 };
          return (int)ncclAllReduce(data, data, 4, ncclFloat32, ncclSum, self.comm, self.stream);
      } },
    { "a buffer is on another device", "is on device 0, the communicator on device",
      [](Rank &self) {
          if (self.rank == 0) return 0; /* its own buffer would be right */
          cudaSetDevice(0);
          Buffer data(16);
          return (int)ncclAllReduce(data.device, data.device, 4, ncclFloat32, ncclSum, self.comm,
                                    self.stream);
      } },
    { "two communicators in opposite order", "hangs",
      [](Rank &self) {
          Buffer data(64);
          ncclComm_t other;
          ncclCommSplit(self.comm, 0, self.rank, &other, nullptr);
          ncclComm_t order[2] = { self.rank ? other : self.comm, self.rank ? self.comm : other };
          for (ncclComm_t comm : order)
              ncclAllReduce(data.device, data.device, 4, ncclFloat32, ncclSum, comm, self.stream);
          const bool failed = cudaStreamSynchronize(self.stream) != cudaSuccess;
          ncclCommAbort(other);
          ncclCommAbort(self.comm);
          self.comm = nullptr;
          return (int)failed;
      } },
};

/* An asynchronous error: nothing finishes, the poll returns it, the abort frees the stream. */
int error_then_abort(Rank &self) {
    Buffer data(64);
    ncclResult_t error = ncclSuccess;
    if (self.rank == 0) emu_nccl_fail(self.comm, ncclRemoteError);
    ncclAllReduce(data.device, data.device, 4, ncclFloat32, ncclSum, self.comm, self.stream);
    int wrong = cudaStreamQuery(self.stream) != cudaErrorNotReady;
    if (self.rank == 0)
        wrong += ncclCommGetAsyncError(self.comm, &error) != ncclSuccess || error != ncclRemoteError;
    ncclCommAbort(self.comm);
    self.comm = nullptr;
    return wrong + (cudaStreamSynchronize(self.stream) != cudaSuccess);
}

int non_blocking(int rank, ncclUniqueId id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    ncclResult_t state;
    config.blocking = 0;
    cudaSetDevice(rank);
    const ncclResult_t begun = ncclCommInitRankConfig(&comm, 2, id, rank, &config);
    if (begun != ncclSuccess && begun != ncclInProgress) return 1;
    do {
        if (ncclCommGetAsyncError(comm, &state)) return 1;
        std::this_thread::yield();
    } while (state == ncclInProgress);
    return state != ncclSuccess || ncclCommFinalize(comm) || ncclCommDestroy(comm);
}

void one_thread_many_devices() {
    ncclComm_t comms[3];
    cudaStream_t streams[3];
    std::vector<Buffer *> data;
    CHECK(ncclCommInitAll(comms, 3, nullptr) == ncclSuccess);
    for (int d = 0; d < 3; d++) {
        cudaSetDevice(d);
        cudaStreamCreate(&streams[d]);
        data.push_back(new Buffer(std::vector<float>(1, (float)(d + 1))));
    }
    ncclGroupStart();
    for (int d = 0; d < 3; d++)
        CHECK(!ncclAllReduce(data[(size_t)d]->device, data[(size_t)d]->device, 1, ncclFloat32, ncclSum,
                             comms[d], streams[d]));
    CHECK(ncclGroupEnd() == ncclSuccess);
    for (int d = 0; d < 3; d++) {
        cudaSetDevice(d);
        CHECK(cudaStreamSynchronize(streams[d]) == cudaSuccess);
        CHECK(data[(size_t)d]->read<float>()[0] == 6.0f);
        ncclCommDestroy(comms[d]);
        cudaStreamDestroy(streams[d]);
        delete data[(size_t)d];
    }
    cudaSetDevice(0);
}

Outcome run_misuse(const Misuse &misuse) {
    return run_apart([&] {
        if (!strcmp(misuse.phrase, "hangs")) emu_set_hang_seconds(0.3);
        return run_ranks(2, misuse.body);
    });
}

} // namespace

void nccl_table() {
    for (const Misuse &misuse : misuses) {
        const Outcome outcome = run_misuse(misuse);
        const bool named = outcome.text.find(misuse.phrase) != std::string::npos;
        printf("%-42s %s%s\n", misuse.name, sign_of(outcome),
               !named                            ? ", not as meant"
               : !strcmp(misuse.phrase, "hangs") ? " of a hang"
                                                 : "");
    }
}

void nccl_tests() {
    for (const emu_streams mode : { EMU_EAGER, EMU_LAZY, EMU_LAZY_REVERSE }) {
        emu_set_streams(mode);
        const std::string suffix = mode == EMU_EAGER  ? ""
                                   : mode == EMU_LAZY ? ", lazy"
                                                      : ", lazy and reversed";
        test(("reductions" + suffix).c_str(), [] {
            for (int op = 0; op < ncclNumOps; op++)
                CHECK(run_ranks(kRanks, [op](Rank &self) { return all_reduce(self, (ncclRedOp_t)op); }) == 0);
        });
        test(("collectives with a root" + suffix).c_str(), [] { CHECK(run_ranks(kRanks, rooted) == 0); });
        test(("gathers, scatters and all-to-all" + suffix).c_str(), [] {
            for (const int ranks : { 1, 2, 3, 4 }) CHECK(run_ranks(ranks, gathers_and_scatters) == 0);
        });
        test(("a grouped exchange" + suffix).c_str(),
             [] { CHECK(run_ranks(kRanks, [](Rank &self) { return exchange(self, true); }) == 0); });
        test(("collectives in a graph" + suffix).c_str(),
             [] { CHECK(run_ranks(kRanks, graph_of_collectives) == 0); });
    }
    emu_set_streams(EMU_EAGER);
    test("sums round at each hop", [] { CHECK(run_ranks(3, bf16_order) == 0); });
    test("all types are summed", [] { CHECK(run_ranks(4, all_types) == 0); });
    test("communicators split", [] { CHECK(run_ranks(4, split_in_two) == 0); });
    test("one thread drives many devices", one_thread_many_devices);
    test("an async error, then an abort", [] { CHECK(run_ranks(2, error_then_abort) == 0); });
    test("initialisation can be polled", [] {
        ncclUniqueId id;
        ncclGetUniqueId(&id);
        int second = 1;
        std::thread other([&] { second = non_blocking(1, id); });
        CHECK(non_blocking(0, id) == 0);
        other.join();
        CHECK(second == 0);
        cudaSetDevice(0);
    });
    for (const Misuse &misuse : misuses)
        test(misuse.name, [&] {
            const Outcome outcome = run_misuse(misuse);
            CHECK_WITH(!outcome.clean, "was not seen");
            CHECK_WITH(outcome.text.find(misuse.phrase) != std::string::npos, outcome.text);
        });
    test("nothing of NCCL is left over", [] {
        char text[200] = "";
        CHECK_WITH(emu_live_handles(text, sizeof text) == 0, text);
        CHECK_WITH(emu_report_count() == 0, std::to_string(emu_report_count()));
    });
}
