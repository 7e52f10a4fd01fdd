/* Collectives between GPUs beside NCCL's own calls on the same buffers, in the manner of nccl-tests: 10 calls to warm up,
 * 50 timed by events, sizes from 1 KiB on, out of place. algbw = bytes / time; busbw = algbw times what the best
 * algorithm moves over the slowest link a byte, so that it can be compared with the link.
 *
 *     nvcc -O3 -arch=sm_90 -I. bench/nccl.cu xdistill_cuda.cu -lnccl -lpthread -o build/nccl
 *     build/nccl [-J FILE]                                   all GPUs of this machine, a thread each
 *     RANK=r WORLD_SIZE=n LOCAL_RANK=l MASTER_ADDR=host XDISTILL_SECRET=... build/nccl
 *                                                            a process each, on one machine or many
 *
 * FAST sums are NCCL's own. DETERMINISTIC ones are formed in rank order whatever NCCL does, and their row shows what
 * that costs. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "xdistill_nccl.h"

#include "bench.h"

/* A test compiles smaller ones. */
#if !defined(NCCL_BENCH_MOST)
#    define NCCL_BENCH_MOST ((int64_t)1 << 28)
#    define NCCL_BENCH_CALLS 50
#endif

enum { RANKS_MAX = 16, WARMUP = 10, ROUNDS = 5, LEAST = 1024, GROWTH = 8 };

typedef enum operation { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, OPERATIONS } operation;

static const char *const operation_names[OPERATIONS] = { "all_reduce", "reduce_scatter", "all_gather", "broadcast" };

/* What all ranks of a run share. */
typedef struct world {
    int size;
    ncclUniqueId id;  /* of ranks that are threads */
    const char *host; /* NULL for them */
    const char *port;
    int first_rank; /* of this process */
    xd_reduction reduction;
    const bench_machine *machine;
    FILE *json;
} world;

/* One rank. */
typedef struct member {
    const world *w;
    xd_ctx *ctx;
    xd_cuda *gpu;
    xd_comm *comm;
    ncclComm_t raw;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    char *send, *recv;
} member;

static xd_result from_cuda(cudaError_t error) {
    return error == cudaSuccess ? XD_OK : XD_ERROR_DEVICE;
}

static xd_result from_nccl(ncclResult_t result) {
    return result == ncclSuccess ? XD_OK : XD_ERROR_PEER;
}

/* ---- calls ---- */

/* `bytes` is the larger of the two sides of the call. */
static xd_result call_ours(member *m, operation op, int64_t bytes) {
    const int64_t count = bytes / (int64_t)sizeof(float);
    int64_t counts[RANKS_MAX];
    for (int r = 0; r < m->w->size; r++) counts[r] = count / m->w->size;
    switch (op) {
    case ALL_REDUCE: return xd_all_reduce(m->comm, m->send, m->recv, count, XD_DTYPE_F32, XD_SUM);
    case REDUCE_SCATTER: return xd_reduce_scatter(m->comm, m->send, m->recv, counts, XD_DTYPE_F32, XD_SUM);
    case ALL_GATHER: return xd_all_gather(m->comm, m->send, m->recv, counts, XD_DTYPE_F32);
    default: return xd_broadcast(m->comm, m->recv, count, XD_DTYPE_F32, 0);
    }
}

static xd_result call_raw(member *m, operation op, int64_t bytes) {
    const size_t count = (size_t)bytes / sizeof(float), part = count / (size_t)m->w->size;
    switch (op) {
    case ALL_REDUCE: return from_nccl(ncclAllReduce(m->send, m->recv, count, ncclFloat, ncclSum, m->raw, m->stream));
    case REDUCE_SCATTER:
        return from_nccl(ncclReduceScatter(m->send, m->recv, part, ncclFloat, ncclSum, m->raw, m->stream));
    case ALL_GATHER: return from_nccl(ncclAllGather(m->send, m->recv, part, ncclFloat, m->raw, m->stream));
    default: return from_nccl(ncclBroadcast(m->recv, m->recv, count, ncclFloat, 0, m->raw, m->stream));
    }
}

/* Seconds of one call, on the slowest rank. */
static xd_result time_calls(member *m, operation op, int64_t bytes, bool raw, double *seconds) {
    float milliseconds = 0.0f;
    XD_TRY(xd_barrier(m->comm));
    for (int i = -WARMUP; i < NCCL_BENCH_CALLS; i++) {
        if (i == 0) XD_TRY(from_cuda(cudaEventRecord(m->begin, m->stream)));
        XD_TRY(raw ? call_raw(m, op, bytes) : call_ours(m, op, bytes));
    }
    XD_TRY(from_cuda(cudaEventRecord(m->end, m->stream)));
    XD_TRY(xd_barrier(m->comm)); /* waits with a deadline; the event has happened then */
    XD_TRY(from_cuda(cudaEventSynchronize(m->end)));
    XD_TRY(from_cuda(cudaEventElapsedTime(&milliseconds, m->begin, m->end)));
    *seconds = 1e-3 * (double)milliseconds / NCCL_BENCH_CALLS;
    return xd_all_reduce(m->comm, seconds, seconds, 1, XD_DTYPE_F64, XD_MAX);
}

/* ---- rows ---- */

/* What the best algorithm sends over the slowest link, a byte of the payload. */
static double bus_factor(operation op, int ranks) {
    if (ranks == 1) return 1.0;
    const double others = (double)(ranks - 1) / ranks;
    return op == ALL_REDUCE ? 2.0 * others : op == BROADCAST ? 1.0 : others;
}

static void print_row(const member *m, operation op, int64_t bytes, const double *ours, const double *raw,
                      const double *ratio) {
    const bench_timing a = bench_summary(ours, 2 * ROUNDS), b = bench_summary(raw, 2 * ROUNDS);
    const bench_timing r = bench_summary(ratio, ROUNDS);
    const double factor = bus_factor(op, m->w->size) * 1e-9 * (double)bytes;
    const char *mode = m->w->reduction == XD_REDUCTION_FAST ? "fast" : "deterministic";
    printf("%12lld %-15s %-14s %10.2f %8.2f %8.2f %10.2f %8.2f %7.2f\n", (long long)bytes, operation_names[op], mode,
           a.median * 1e6, 1e-9 * (double)bytes / a.median, factor / a.median, b.median * 1e6, factor / b.median, r.median);
    if (!m->w->json) return;
    fprintf(m->w->json,
            "{\"schema\":\"xdistill-bench/1\",\"op\":\"%s\",\"variant\":\"%s\",\"shape\":{\"bytes\":%lld,\"n\":%d},"
            "\"dtype_in\":\"f32\",\"arm\":\"xdistill\",\"mode\":\"kernel\",\"ms\":{\"median\":%.6g,\"p10\":%.6g,"
            "\"p90\":%.6g,\"samples\":%d,\"rounds\":%d},\"ratio\":{\"vs\":\"nccl\",\"median\":%.4g,\"p10\":%.4g,"
            "\"p90\":%.4g},\"achieved\":{\"busbw_GBps\":%.4g},\"device\":{\"gpu\":\"%s\",\"commit\":\"%s\"}}\n",
            operation_names[op], mode, (long long)bytes, m->w->size, a.median * 1e3, a.low * 1e3, a.high * 1e3,
            2 * ROUNDS, ROUNDS, r.median, r.low, r.high, factor / a.median, m->w->machine->cpu, m->w->machine->commit);
    fflush(m->w->json);
}

/* A B B A, so that a drift of the clocks falls on both. */
static xd_result bench_size(member *m, operation op, int64_t bytes) {
    double ours[2 * ROUNDS], raw[2 * ROUNDS], ratio[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        XD_TRY(time_calls(m, op, bytes, false, &ours[2 * i]));
        XD_TRY(time_calls(m, op, bytes, true, &raw[2 * i]));
        XD_TRY(time_calls(m, op, bytes, true, &raw[2 * i + 1]));
        XD_TRY(time_calls(m, op, bytes, false, &ours[2 * i + 1]));
        ratio[i] = (raw[2 * i] + raw[2 * i + 1]) / (ours[2 * i] + ours[2 * i + 1]);
    }
    if (xd_comm_rank(m->comm) == 0) print_row(m, op, bytes, ours, raw, ratio);
    return XD_OK;
}

/* Every rank sends its number: the sum is known. */
static xd_result check_sum(member *m) {
    float mine = (float)(xd_comm_rank(m->comm) + 1), sum = 0.0f;
    const int n = m->w->size;
    XD_TRY(xd_all_reduce(m->comm, &mine, &sum, 1, XD_DTYPE_F32, XD_SUM));
    if (sum == (float)(n * (n + 1) / 2)) return XD_OK;
    return XD_FAIL(m->ctx, XD_ERROR_DATA, "the sum of 1 to %d came out as %g", n, (double)sum);
}

static xd_result bench_all(member *m) {
    XD_TRY(check_sum(m));
    for (int op = 0; op < OPERATIONS; op++) {
        if (op >= ALL_GATHER && m->w->reduction != XD_REDUCTION_FAST) continue; /* nothing is summed */
        if (op == BROADCAST && m->w->size == 1) continue;                       /* nothing moves */
        for (int64_t bytes = LEAST; bytes <= NCCL_BENCH_MOST; bytes *= GROWTH)
            XD_TRY(bench_size(m, (operation)op, bytes));
    }
    return XD_OK;
}

/* ---- ranks ---- */

/* A communicator of NCCL's own; its id goes over ours. */
static xd_result join_raw(member *m) {
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (xd_comm_rank(m->comm) == 0) XD_TRY(from_nccl(ncclGetUniqueId(&id)));
    XD_TRY(xd_broadcast(m->comm, &id, (int64_t)sizeof id, XD_DTYPE_U8, 0));
    return from_nccl(ncclCommInitRank(&m->raw, m->w->size, id, xd_comm_rank(m->comm)));
}

/* Random floats in [0, 1): zeros would spare the memory and the links some power. */
static xd_result fill(char *data, unsigned seed) {
    enum { BLOCK = 1 << 10 };
    static const int64_t most = NCCL_BENCH_MOST;
    float block[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        seed = seed * 1664525u + 1013904223u;
        block[i] = (float)(seed >> 8) / (1 << 24);
    }
    XD_TRY(from_cuda(cudaMemcpy(data, block, (size_t)(most < (int64_t)sizeof block ? most : (int64_t)sizeof block), cudaMemcpyHostToDevice)));
    for (int64_t at = (int64_t)sizeof block; at < most; at *= 2)
        XD_TRY(from_cuda(cudaMemcpy(data + at, data, (size_t)(most - at < at ? most - at : at), cudaMemcpyDeviceToDevice)));
    return XD_OK;
}

static xd_result open_member(member *m, int rank, int device) {
    xd_ctx_desc settings = {};
    xd_nccl_desc desc = {};
    XD_TRY(from_cuda(cudaSetDevice(device)));
    XD_TRY(from_cuda(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking)));
    XD_TRY(from_cuda(cudaEventCreate(&m->begin)));
    XD_TRY(from_cuda(cudaEventCreate(&m->end)));
    XD_TRY(from_cuda(cudaMalloc((void **)&m->send, NCCL_BENCH_MOST)));
    XD_TRY(from_cuda(cudaMalloc((void **)&m->recv, NCCL_BENCH_MOST)));
    XD_TRY(fill(m->send, (unsigned)rank));
    XD_TRY(fill(m->recv, (unsigned)rank + 1000u));
    settings.reduction = m->w->reduction;
    settings.stream = m->stream;
    desc.rank = rank;
    desc.size = m->w->size;
    desc.id = m->w->host ? NULL : &m->w->id;
    desc.host = m->w->host;
    desc.port = m->w->port;
    desc.secret = getenv("XDISTILL_SECRET");
    desc.compare = -1; /* as a finished program runs: nothing waits for the host */
    XD_TRY(xd_ctx_create(&settings, &m->ctx));
    XD_TRY(xd_cuda_create(m->ctx, NULL, &m->gpu));
    XD_TRY(xd_comm_nccl(m->ctx, &desc, &m->comm));
    return join_raw(m);
}

static void close_member(member *m) {
    if (m->raw) ncclCommDestroy(m->raw);
    xd_comm_destroy(m->comm);
    xd_cuda_destroy(m->gpu);
    xd_ctx_destroy(m->ctx);
    cudaFree(m->send);
    cudaFree(m->recv);
    if (m->begin) cudaEventDestroy(m->begin);
    if (m->end) cudaEventDestroy(m->end);
    if (m->stream) cudaStreamDestroy(m->stream);
}

static int variable(const char *name, int otherwise) {
    return getenv(name) ? atoi(getenv(name)) : otherwise;
}

/* One rank of this process; `threads` is only what starts it. */
static xd_result run_rank(xd_comm *threads, void *shared) {
    const world *w = (const world *)shared;
    const int rank = w->first_rank + xd_comm_rank(threads);
    member m;
    memset(&m, 0, sizeof m);
    m.w = w;
    xd_result result = open_member(&m, rank, w->host ? variable("LOCAL_RANK", 0) : rank);
    if (result == XD_OK) result = bench_all(&m);
    if (result != XD_OK)
        fprintf(stderr, "rank %d: %s: %s\n", rank, xd_result_name(result), m.ctx ? xd_last_error(m.ctx)->message : "");
    close_member(&m);
    return result;
}

static void describe(bench_machine *machine) {
    cudaDeviceProp device;
    memset(machine, 0, sizeof *machine);
    bench_describe(machine);
    if (cudaGetDeviceProperties(&device, 0) == cudaSuccess) snprintf(machine->cpu, sizeof machine->cpu, "%.80s", device.name);
}

int main(int argc, char **argv) {
    static const xd_reduction modes[] = { XD_REDUCTION_FAST, XD_REDUCTION_DETERMINISTIC };
    bench_machine machine;
    world w;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return printf("there is no GPU\n"), 0;
    memset(&w, 0, sizeof w);
    describe(&machine);
    w.machine = &machine;
    w.json = bench_open_json(argc, argv);
    w.host = variable("WORLD_SIZE", 1) > 1 ? getenv("MASTER_ADDR") ? getenv("MASTER_ADDR") : "127.0.0.1" : NULL;
    w.port = getenv("XDISTILL_PORT") ? getenv("XDISTILL_PORT") : "29512";
    w.first_rank = w.host ? variable("RANK", 0) : 0;
    w.size = w.host ? variable("WORLD_SIZE", 1) : devices < RANKS_MAX ? devices : RANKS_MAX;
    if (w.size > RANKS_MAX) return fprintf(stderr, "%d ranks, at most %d\n", w.size, RANKS_MAX), 2;
    if (w.first_rank == 0)
        printf("# xdistill-bench  %d rank(s) over NCCL %d on %s  git=%s\n#%11s %-15s %-14s %10s %8s %8s %10s %8s %7s\n",
               w.size, NCCL_VERSION_CODE, machine.cpu, machine.commit, "bytes", "op", "mode", "time(us)", "algbw", "busbw",
               "nccl(us)", "busbw", "ratio");
    for (xd_reduction mode : modes) {
        w.reduction = mode;
        if (!w.host && ncclGetUniqueId(&w.id) != ncclSuccess) return fprintf(stderr, "no id from NCCL\n"), 1;
        if (xd_run_threads(w.host ? 1 : w.size, NULL, run_rank, &w, NULL) != XD_OK) return 1;
    }
    if (w.json) fclose(w.json);
    return 0;
}
