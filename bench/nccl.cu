/* Collectives between GPUs in nccl-tests' columns, and how many times as fast they are as NCCL's own calls on the same buffers: 10
 * calls to warm up, some timed by events, sizes from 1 KiB on, of random f32 and bf16, out of place and in place. algbw = bytes / time;
 * busbw = algbw times what the best algorithm moves over the slowest link a byte, so that it can be compared with the link. #wrong
 * counts wrong elements of the result's beginning and end. Any makes the program fail. A broadcast has one buffer.
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

enum { RANKS_MAX = 16, WARMUP = 10, ROUNDS = 3, LEAST = 1024, GROWTH = 8, BLOCK = 1 << 10 /* elements that repeat */ };

typedef enum operation { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, OPERATIONS } operation;

static const char *const operation_names[OPERATIONS] = { "all_reduce", "reduce_scatter", "all_gather", "broadcast" };

/* One line of the table. */
typedef struct line {
    operation op;
    xd_dtype dtype;
    int64_t bytes; /* the larger side of the call */
} line;

/* Half of a line: out of place, or in place. */
typedef struct placed {
    bench_timing ours, raw, ratio;
    int64_t wrong;
} placed;

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
    int64_t wrong;
} member;

static xd_result from_cuda(cudaError_t error) {
    return error == cudaSuccess ? XD_OK : XD_ERROR_DEVICE;
}

static xd_result from_nccl(ncclResult_t result) {
    return result == ncclSuccess ? XD_OK : XD_ERROR_PEER;
}

/* ---- random numbers ---- */

/* In [0, 1), of a rank and a place in the block that repeats: zeros would spare the memory and the links some power. */
static double element(int rank, int64_t at, xd_dtype dtype) {
    uint32_t seed = (uint32_t)rank * 2654435761u + (uint32_t)(at % BLOCK) * 40503u + 12345u;
    unsigned char stored[4];
    for (int i = 0; i < 3; i++) seed = (seed ^ seed >> 15) * 2246822519u;
    xd_store_f64(stored, dtype, 0, (double)(seed >> 8) / (1 << 24));
    return xd_load_f64(stored, dtype, 0);
}

static xd_result fill(char *data, int rank, xd_dtype dtype) {
    unsigned char block[BLOCK * 4];
    const int64_t most = NCCL_BENCH_MOST, bytes = BLOCK * (int64_t)xd_dtype_size(dtype);
    for (int64_t i = 0; i < BLOCK; i++) xd_store_f64(block, dtype, i, element(rank, i, dtype));
    XD_TRY(from_cuda(cudaMemcpy(data, block, (size_t)(most < bytes ? most : bytes), cudaMemcpyHostToDevice)));
    for (int64_t at = bytes; at < most; at *= 2)
        XD_TRY(from_cuda(cudaMemcpy(data + at, data, (size_t)(most - at < at ? most - at : at), cudaMemcpyDeviceToDevice)));
    return XD_OK;
}

/* ---- calls ---- */

static int64_t count_of(const line *l) {
    return l->bytes / (int64_t)xd_dtype_size(l->dtype);
}

/* The buffers of a call. In place a part lies where it belongs in the whole. */
static void place(const member *m, const line *l, bool in_place, char **send, char **recv) {
    const int64_t part = l->bytes / m->w->size * xd_comm_rank(m->comm);
    *send = m->send;
    *recv = m->recv;
    if (!in_place) return;
    if (l->op == ALL_GATHER) *send = m->recv + part;
    if (l->op == REDUCE_SCATTER) *recv = m->send + part;
    if (l->op == ALL_REDUCE || l->op == BROADCAST) *recv = m->send;
}

static xd_result call_ours(member *m, const line *l, bool in_place) {
    int64_t counts[RANKS_MAX];
    char *send, *recv;
    place(m, l, in_place, &send, &recv);
    for (int r = 0; r < m->w->size; r++) counts[r] = count_of(l) / m->w->size;
    switch (l->op) {
    case ALL_REDUCE: return xd_all_reduce(m->comm, send, recv, count_of(l), l->dtype, XD_SUM);
    case REDUCE_SCATTER: return xd_reduce_scatter(m->comm, send, recv, counts, l->dtype, XD_SUM);
    case ALL_GATHER: return xd_all_gather(m->comm, send, recv, counts, l->dtype);
    default: return xd_broadcast(m->comm, recv, count_of(l), l->dtype, 0);
    }
}

static xd_result call_raw(member *m, const line *l, bool in_place) {
    const size_t count = (size_t)count_of(l), part = count / (size_t)m->w->size;
    const ncclDataType_t type = l->dtype == XD_DTYPE_F32 ? ncclFloat : ncclBfloat16;
    char *send, *recv;
    place(m, l, in_place, &send, &recv);
    switch (l->op) {
    case ALL_REDUCE: return from_nccl(ncclAllReduce(send, recv, count, type, ncclSum, m->raw, m->stream));
    case REDUCE_SCATTER: return from_nccl(ncclReduceScatter(send, recv, part, type, ncclSum, m->raw, m->stream));
    case ALL_GATHER: return from_nccl(ncclAllGather(send, recv, part, type, m->raw, m->stream));
    default: return from_nccl(ncclBroadcast(recv, recv, count, type, 0, m->raw, m->stream));
    }
}

/* Seconds of one call, on the slowest rank. */
static xd_result time_calls(member *m, const line *l, bool in_place, bool raw, double *seconds) {
    float milliseconds = 0.0f;
    XD_TRY(xd_barrier(m->comm));
    for (int i = -WARMUP; i < NCCL_BENCH_CALLS; i++) {
        if (i == 0) XD_TRY(from_cuda(cudaEventRecord(m->begin, m->stream)));
        XD_TRY(raw ? call_raw(m, l, in_place) : call_ours(m, l, in_place));
    }
    XD_TRY(from_cuda(cudaEventRecord(m->end, m->stream)));
    XD_TRY(xd_barrier(m->comm)); /* waits with a deadline; the event has happened then */
    XD_TRY(from_cuda(cudaEventSynchronize(m->end)));
    XD_TRY(from_cuda(cudaEventElapsedTime(&milliseconds, m->begin, m->end)));
    *seconds = 1e-3 * (double)milliseconds / NCCL_BENCH_CALLS;
    return xd_all_reduce(m->comm, seconds, seconds, 1, XD_DTYPE_F64, XD_MAX);
}

/* ---- the check ---- */

/* What element `at` of this rank's result is. */
static double expected(const member *m, const line *l, int64_t at) {
    const int64_t part = count_of(l) / m->w->size;
    double sum = 0.0;
    if (l->op == ALL_GATHER) return element((int)(at / part), at % part, l->dtype);
    if (l->op == BROADCAST) return element(0, at, l->dtype);
    if (l->op == REDUCE_SCATTER) at += part * xd_comm_rank(m->comm);
    for (int r = 0; r < m->w->size; r++) sum += element(r, at, l->dtype);
    return sum;
}

/* A sum may be rounded once a rank, to its dtype. */
static bool is_wrong(const member *m, const line *l, double found, double right) {
    const double step = l->dtype == XD_DTYPE_F32 ? 1.2e-7 : 7.9e-3;
    const bool sum = l->op == ALL_REDUCE || l->op == REDUCE_SCATTER;
    return !(fabs(found - right) <= (sum ? step * (m->w->size - 1) * fabs(right) : 0.0));
}

/* One call on fresh numbers: wrong elements among the first and the last ones, on all ranks. In place each rank's own block of
 * what is gathered is filled as the others' are. */
static xd_result check_call(member *m, const line *l, bool in_place, int64_t *wrong) {
    const int64_t width = (int64_t)xd_dtype_size(l->dtype), part = count_of(l) / m->w->size;
    const int64_t count = l->op == REDUCE_SCATTER ? part : count_of(l), n = count < BLOCK ? count : (int64_t)BLOCK;
    unsigned char found[BLOCK * 4];
    char *send, *recv;
    const int rank = xd_comm_rank(m->comm);
    place(m, l, in_place, &send, &recv);
    XD_TRY(fill(m->send, rank, l->dtype));
    XD_TRY(fill(m->recv, l->op == BROADCAST ? rank : rank + 100, l->dtype));
    if (l->op == ALL_GATHER && in_place)
        XD_TRY(from_cuda(cudaMemcpy(send, m->send, (size_t)(part * width), cudaMemcpyDeviceToDevice)));
    XD_TRY(from_cuda(cudaDeviceSynchronize()));
    XD_TRY(call_ours(m, l, in_place));
    *wrong = 0;
    for (const int64_t first : { (int64_t)0, count - n }) {
        XD_TRY(xd_read(m->ctx, found, recv + first * width, (size_t)(n * width)));
        for (int64_t i = 0; i < n; i++) *wrong += is_wrong(m, l, xd_load_f64(found, l->dtype, i), expected(m, l, first + i));
    }
    return xd_all_reduce(m->comm, wrong, wrong, 1, XD_DTYPE_I64, XD_SUM);
}

/* ---- rows ---- */

/* What the best algorithm sends over the slowest link, a byte of the payload. */
static double bus_factor(operation op, int ranks) {
    if (ranks == 1) return 1.0;
    const double others = (double)(ranks - 1) / ranks;
    return op == ALL_REDUCE ? 2.0 * others : op == BROADCAST ? 1.0 : others;
}

static const char *dtype_name(const line *l) {
    return l->dtype == XD_DTYPE_F32 ? "float" : "bfloat16";
}

static void print_placed(const member *m, const line *l, const placed *h) {
    const double rate = 1e-9 * (double)l->bytes / h->ours.median;
    printf(" %8.2f %7.2f %7.2f %6lld", h->ours.median * 1e6, rate, rate * bus_factor(l->op, m->w->size), (long long)h->wrong);
}

static void write_placed(const member *m, const line *l, bool in_place, const placed *h) {
    const double rate = 1e-9 * (double)l->bytes / h->ours.median;
    const char *mode = m->w->reduction == XD_REDUCTION_FAST ? "fast" : "deterministic";
    fprintf(m->w->json,
            "{\"schema\":\"xdistill-bench/1\",\"op\":\"%s\",\"variant\":\"%s%s\",\"shape\":{\"bytes\":%lld,\"n\":%d},"
            "\"dtype_in\":\"%s\",\"arm\":\"xdistill\",\"mode\":\"kernel\",\"ms\":{\"median\":%.6g,\"p10\":%.6g,"
            "\"p90\":%.6g,\"samples\":%d,\"rounds\":%d},\"ratio\":{\"vs\":\"nccl\",\"median\":%.4g,\"p10\":%.4g,"
            "\"p90\":%.4g},\"achieved\":{\"busbw_GBps\":%.4g},\"device\":{\"gpu\":\"%s\",\"commit\":\"%s\"}}\n",
            operation_names[l->op], mode, in_place ? ", in place" : "", (long long)l->bytes, m->w->size,
            l->dtype == XD_DTYPE_F32 ? "f32" : "bf16", h->ours.median * 1e3, h->ours.low * 1e3, h->ours.high * 1e3, 2 * ROUNDS, ROUNDS,
            h->ratio.median, h->ratio.low, h->ratio.high, rate * bus_factor(l->op, m->w->size), m->w->machine->cpu,
            m->w->machine->commit);
    fflush(m->w->json);
}

static void print_line(const member *m, const line *l, const placed *out, const placed *in) {
    const bool sum = l->op == ALL_REDUCE || l->op == REDUCE_SCATTER;
    printf("%12lld %13lld %9s %7s %6d", (long long)l->bytes, (long long)count_of(l), dtype_name(l), sum ? "sum" : "none",
           l->op == BROADCAST ? 0 : -1);
    if (out)
        print_placed(m, l, out);
    else
        printf(" %8s %7s %7s %6s", "-", "-", "-", "-");
    print_placed(m, l, in);
    printf("  %6.2f\n", (out ? out : in)->ratio.median);
    fflush(stdout);
    if (!m->w->json) return;
    if (out) write_placed(m, l, false, out);
    write_placed(m, l, true, in);
}

/* A B B A, so that a drift of the clocks falls on both. */
static xd_result bench_placed(member *m, const line *l, bool in_place, placed *h) {
    double ours[2 * ROUNDS], raw[2 * ROUNDS], ratio[ROUNDS];
    XD_TRY(check_call(m, l, in_place, &h->wrong));
    m->wrong += h->wrong;
    for (int i = 0; i < ROUNDS; i++) {
        XD_TRY(time_calls(m, l, in_place, false, &ours[2 * i]));
        XD_TRY(time_calls(m, l, in_place, true, &raw[2 * i]));
        XD_TRY(time_calls(m, l, in_place, true, &raw[2 * i + 1]));
        XD_TRY(time_calls(m, l, in_place, false, &ours[2 * i + 1]));
        ratio[i] = (raw[2 * i] + raw[2 * i + 1]) / (ours[2 * i] + ours[2 * i + 1]);
    }
    h->ours = bench_summary(ours, 2 * ROUNDS);
    h->raw = bench_summary(raw, 2 * ROUNDS);
    h->ratio = bench_summary(ratio, ROUNDS);
    return XD_OK;
}

static xd_result bench_line(member *m, const line *l) {
    placed out, in;
    if (l->op != BROADCAST) XD_TRY(bench_placed(m, l, false, &out));
    XD_TRY(bench_placed(m, l, true, &in));
    if (xd_comm_rank(m->comm) == 0) print_line(m, l, l->op == BROADCAST ? NULL : &out, &in);
    return XD_OK;
}

static void print_head(const member *m, operation op) {
    if (xd_comm_rank(m->comm) != 0) return;
    printf("# %s, %s\n", operation_names[op], m->w->reduction == XD_REDUCTION_FAST ? "fast" : "deterministic");
    printf("#%11s %13s %9s %7s %6s %31s %31s  %6s\n", "size", "count", "type", "redop", "root", "out-of-place", "in-place", "times");
    printf("#%11s %13s %9s %7s %6s", "(B)", "(elements)", "", "", "");
    for (int i = 0; i < 2; i++) printf(" %8s %7s %7s %6s", "time(us)", "algbw", "busbw", "#wrong");
    printf("  %6s\n", "NCCL's");
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
        print_head(m, (operation)op);
        for (const xd_dtype dtype : { XD_DTYPE_F32, XD_DTYPE_BF16 })
            for (int64_t bytes = LEAST; bytes <= NCCL_BENCH_MOST; bytes *= GROWTH) {
                const int64_t even = bytes / (m->w->size * 4) * (m->w->size * 4);
                const line l = { (operation)op, dtype, even };
                XD_TRY(bench_line(m, &l));
            }
    }
    return m->wrong == 0 ? XD_OK : XD_FAIL(m->ctx, XD_ERROR_DATA, "%lld elements came out wrong", (long long)m->wrong);
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

static xd_result open_member(member *m, int rank, int device) {
    xd_ctx_desc settings = {};
    xd_nccl_desc desc = {};
    XD_TRY(from_cuda(cudaSetDevice(device)));
    XD_TRY(from_cuda(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking)));
    XD_TRY(from_cuda(cudaEventCreate(&m->begin)));
    XD_TRY(from_cuda(cudaEventCreate(&m->end)));
    XD_TRY(from_cuda(cudaMalloc((void **)&m->send, NCCL_BENCH_MOST)));
    XD_TRY(from_cuda(cudaMalloc((void **)&m->recv, NCCL_BENCH_MOST)));
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
        printf("# xdistill-bench  %d rank(s) over NCCL %d on %s  git=%s\n", w.size, NCCL_VERSION_CODE, machine.cpu, machine.commit);
    for (xd_reduction mode : modes) {
        w.reduction = mode;
        if (!w.host && ncclGetUniqueId(&w.id) != ncclSuccess) return fprintf(stderr, "no id from NCCL\n"), 1;
        if (xd_run_threads(w.host ? 1 : w.size, NULL, run_rank, &w, NULL) != XD_OK) return 1;
    }
    if (w.json) fclose(w.json);
    return 0;
}
