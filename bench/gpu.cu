/* Every operation of bench/gpu_budget.txt on one GPU, and losses from the head: a line of at most 80 columns each. A line has the time
 * by events on the stream, the rate, and its share of the roof: for what memory bounds, a copy of as many bytes as the operation must
 * move, which is timed in turn with it; for products the tensor cores' rate. An operation is compared with the CPU before it is timed:
 * gradients row by row, a label's column apart. One that is wrong is not timed, and the program fails. The head's error is that of BF16
 * logits against f32 ones. `make bench-gpu` adds PyTorch's time over ours, where there is PyTorch.
 *
 *     nvcc -O3 -arch=sm_90 -c xdistill_cuda.cu -o build/xdistill_cuda.o
 *     nvcc -O3 -arch=sm_90 -I. bench/gpu.cu build/xdistill_cuda.o -o build/gpu          build/gpu [-J FILE]
 *
 * In the environment: GPU_ONLY=names, with commas between them: only these operations. GPU_PEERS=FILE: lines "name dtype ms" of another
 * library. GPU_TWO_SWEEPS=1: with xd_cuda_desc.two_sweeps. GPU_COLUMNS=1: instead losses with rows of three lengths and equally many
 * elements, which tell a row's serial part. GPU_ONCE=1: each operation once, unchecked and untimed, for a profiler. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#if defined(GPU_SMALL)
#    define BENCH_ROUNDS 1
#    define BENCH_WARMUP 0
#else
#    define BENCH_ROUNDS 4
#    define BENCH_WARMUP 2
#endif
#include "bench.h"
#include "gradient.h"

#include "gpu_side.h"

#include "gpu_loss.h"
#include "gpu_train.h"
#include "gpu_xtoken.h"

static bench_machine machine;
static double tensor_rate; /* operations a second of bf16 products, by the clock and the tensor cores */
static FILE *json;
static int wrong;

/* ---- the two arms ---- */

struct Clock {
    cudaEvent_t begin, end;
    std::function<void()> work;
};

static double measure(void *state) {
    Clock *c = (Clock *)state;
    float milliseconds = 0.0f;
    require_cuda(cudaEventRecord(c->begin, NULL));
    c->work();
    require_cuda(cudaEventRecord(c->end, NULL));
    require_cuda(cudaEventSynchronize(c->end));
    require_cuda(cudaEventElapsedTime(&milliseconds, c->begin, c->end));
    return 1e-3 * (double)milliseconds;
}

static Clock ours, copy;
static char *copy_from, *copy_to;
static size_t copy_room;

static void open_clock(Clock *c) {
    require_cuda(cudaEventCreate(&c->begin));
    require_cuda(cudaEventCreate(&c->end));
}

static void close_clock(Clock *c) {
    cudaEventDestroy(c->begin);
    cudaEventDestroy(c->end);
}

/* Reads and writes `bytes` in all; what is larger than the buffers goes round. */
static void copy_bytes(double bytes) {
    for (size_t left = (size_t)bytes / 2; left > 0;) {
        const size_t n = left < copy_room ? left : copy_room;
        require_cuda(cudaMemcpyAsync(copy_to, copy_from, n, cudaMemcpyDeviceToDevice, NULL));
        left -= n;
    }
}

/* ---- the check ---- */

/* Of the first rows that both sides have. */
static double output_error(const Output &gpu, const Output &cpu, int64_t checked) {
    const int64_t rows = checked < gpu.rows ? checked : gpu.rows;
    const size_t bytes = (size_t)(rows * gpu.columns) * xd_dtype_size(gpu.dtype);
    std::vector<unsigned char> found(bytes);
    require_cuda(cudaMemcpy(found.data(), gpu.data, bytes, cudaMemcpyDeviceToHost));
    if (memcmp(found.data(), cpu.data, bytes) == 0 && !bench_is_zero(cpu.data, cpu.dtype, rows * gpu.columns)) return 0.0;
    return bench_gradient_error(found.data(), cpu.data, gpu.dtype, rows, gpu.columns, cpu.k ? cpu.apart.data() : NULL, cpu.k);
}

static double error_of(const Case &c, const Operation &gpu) {
    double worst = 0.0;
    for (int i = 0; i < c.calls; i++) gpu.call();
    require_cuda(cudaDeviceSynchronize());
    if (gpu.error) return gpu.error();
    Side side(nullptr);
    Operation cpu;
    c.prepare(c, side, c.checked, &cpu);
    for (int i = 0; i < c.calls; i++) cpu.call();
    for (size_t i = 0; i < gpu.outputs.size(); i++)
        worst = bench_larger(output_error(gpu.outputs[i], cpu.outputs[i], c.checked), worst);
    return worst;
}

/* ---- the line ---- */

/* ms of another library, or 0. */
static double peer_of(const Case &c) {
    const char *path = getenv("GPU_PEERS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[200], name[64], dtype[16];
    double ms = 0.0, found = 0.0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %15s %lf", name, dtype, &ms) == 3 && strcmp(name, c.name) == 0 && strcmp(dtype, name_of(c.dtype)) == 0)
            found = ms;
    if (file) fclose(file);
    return found;
}

static void print_head() {
    printf("# commit %.60s\n", machine.commit);
    printf("# %s; copy %.0f GB/s, bf16 %.0f TFLOP/s\n", machine.cpu, 1e-9 * machine.copy, 1e-12 * tensor_rate);
    printf("%-14s %-4s %-16s %8s %6s %-7s %5s %5s %6s\n", "# operation", "", "size", "ms", "rate", "", "roof", "peer", "error");
}

static void print_line(const Case &c, const Operation &op, double seconds, double error) {
    const bool products = op.flops > 0.0;
    const double rate = (products ? op.flops : op.bytes) / seconds, roof = products ? tensor_rate : machine.copy;
    char peer[16] = "-";
    if (peer_of(c) > 0.0) snprintf(peer, sizeof peer, "%.2f", 1e-3 * peer_of(c) / seconds);
    printf("%-14s %-4s %-16s %8.3f %6.0f %-7s %5.2f %5s %6.0e\n", c.name, name_of(c.dtype), op.size.c_str(), 1e3 * seconds,
           rate * (products ? 1e-12 : 1e-9), products ? "TFLOP/s" : "GB/s", rate / roof, peer, error);
    fflush(stdout);
}

static void report(const Case &c, const Operation &op, double error) {
    bench_row row = {};
    const std::string shape = "\"size\":\"" + op.size + "\"";
    const bench_arm arm = { "xdistill", &ours, NULL, measure }, other = { "copy of the same bytes", &copy, NULL, measure };
    row.op = c.name;
    row.variant = c.variant;
    row.shape = shape.c_str();
    row.dtype = name_of(c.dtype);
    row.bytes = op.bytes;
    row.ceiling = machine.copy;
    row.ceiling_name = "copy";
    row.error = error;
    row.error_limit = c.limit;
    row.extra_bytes = (double)op.workspace;
    ours.work = op.call;
    copy.work = [&] { copy_bytes(op.bytes); };
    const bench_times times = bench_interleave(&arm, &other);
    print_line(c, op, times.ours.median, error);
    if (json) bench_write_json(json, &machine, &row, &times, other.name, op.bytes / machine.copy);
    ours.work = copy.work = nullptr;
}

static void run_case(const Case &c) {
    xd_cuda_desc desc = {};
    desc.two_sweeps = getenv("GPU_TWO_SWEEPS") != NULL;
    desc.cublas = c.cublas;
    Side side(&desc);
    Operation op;
    c.prepare(c, side, c.rows, &op);
    if (getenv("GPU_ONCE")) {
        op.call();
        require_cuda(cudaDeviceSynchronize());
        return;
    }
    const double error = error_of(c, op);
    if (error <= c.limit) return report(c, op, error);
    printf("%-14s %-4s %-16s wrong: error %.2g above %.2g\n", c.name, name_of(c.dtype), op.size.c_str(), error, c.limit);
    wrong++;
}

/* ---- the card ---- */

static void measure_device() {
    cudaDeviceProp device;
    int clock = 0;
    require_cuda(cudaGetDeviceProperties(&device, 0));
    require_cuda(cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0)); /* kHz */
    memset(&machine, 0, sizeof machine);
    bench_describe(&machine);
    snprintf(machine.cpu, sizeof machine.cpu, "%.20s, %d SMs", device.name, device.multiProcessorCount);
    machine.cores = device.multiProcessorCount;
    machine.cache_bytes = (long)device.l2CacheSize;
    /* Of a multiprocessor in a cycle, dense, by the data sheets of 8.0, 9.0 and 10.0. */
    tensor_rate = 1e3 * clock * device.multiProcessorCount * (device.major >= 10 ? 8192.0 : device.major == 9 ? 4096.0 : 2048.0);
    copy_room = (size_t)LOSS_ROWS * VOCABULARY;
    require_cuda(cudaMalloc((void **)&copy_from, copy_room));
    require_cuda(cudaMalloc((void **)&copy_to, copy_room));
    require_cuda(cudaMemset(copy_from, 1, copy_room));
    open_clock(&ours);
    open_clock(&copy);
    copy.work = [] { copy_bytes(2.0 * (double)copy_room); };
    for (int round = 0; round < 10; round++) machine.copy = fmax(machine.copy, 2.0 * (double)copy_room / measure(&copy));
    machine.read = machine.in_place = machine.copy;
}

/* Whether GPU_ONLY has the name, or is not set. */
static bool is_wanted(const char *name) {
    const char *only = getenv("GPU_ONLY");
    const std::string all = std::string(",") + (only ? only : "") + ",";
    return !only || all.find("," + std::string(name) + ",") != std::string::npos;
}

int main(int argc, char **argv) {
    std::vector<Case> cases;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return printf("there is no GPU\n"), 0;
    json = bench_open_json(argc, argv);
    measure_device();
    print_head();
    if (getenv("GPU_COLUMNS")) {
        for (const int64_t parts : { 48, 8, 1 }) add_losses(&cases, "rows of three lengths", LOSS_ROWS * parts, VOCABULARY / parts / 8 * 8, true);
    } else {
        add_losses(&cases, getenv("GPU_TWO_SWEEPS") ? "two sweeps" : "", LOSS_ROWS, VOCABULARY, false);
        add_selections(&cases);
        add_training(&cases);
        add_samples(&cases);
        add_copies(&cases);
        add_xtoken(&cases);
        add_heads(&cases);
    }
    for (const Case &c : cases)
        if (is_wanted(c.name)) run_case(c);
    printf("# wrong results: %d\n", wrong);
    close_clock(&ours);
    close_clock(&copy);
    cudaFree(copy_from);
    cudaFree(copy_to);
    if (json) fclose(json);
    return wrong == 0 ? 0 : 1;
}
