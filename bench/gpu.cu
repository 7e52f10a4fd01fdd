/* Losses, head, optimizers, averages and norms on one GPU, timed by events on the stream. The other arm of every row is a
 * copy on the device that reads and writes as many bytes as the operation must, so "speedup" is the operation's score
 * against the memory it runs on, whatever state the card is in; "target" is what it should take there: the aim
 * of its kind, not a prediction (make cuda-cost has those). A result that is wrong is not timed. The head is timed with the unit's own products on an eighth of the rows and, where cuBLASLt
 * loads, with those: with a workspace and without. Its error is that of BF16 logits against f32 ones.
 *
 *     nvcc -O3 -arch=sm_90 -I. bench/gpu.cu xdistill_cuda.cu -o build/gpu      build/gpu [-J FILE]
 *
 * GPU_TWO_SWEEPS=1 in the environment: with xd_cuda_desc.two_sweeps, for the losses.
 */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"
#include "gradient.h"

#include <cuda_runtime.h>

/* A test compiles smaller ones. */
#if !defined(GPU_ROWS)
#    define GPU_ROWS 8192
#    define GPU_VOCABULARY 128256
#    define GPU_PARAMS (1 << 28)
#    define GPU_HEAD_ROWS 4096
#    define GPU_WIDTH 4096
#    define GPU_ARRAYS 1000
#    define GPU_ARRAY 4096 /* elements of each of many small arrays */
#endif

enum { CHECKED_ROWS = 2, CHECKED_PARAMS = 1 << 12, PATTERN = 1 << 22 };

static bench_machine machine;
static FILE *json;
static int wrong;
static bool two_sweeps;

static void require(xd_ctx *ctx, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    exit(2);
}

static void require_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    exit(2);
}

/* ---- memory ---- */

static void *device_room(size_t bytes) {
    void *memory = NULL;
    require_cuda(cudaMalloc(&memory, bytes));
    require_cuda(cudaMemset(memory, 0, bytes));
    return memory;
}

/* Numbers in [-size, size), the same on every run: a pattern whose length has no common factor with a row's. */
static void *device_noise(int64_t count, xd_dtype dtype, double size, uint64_t seed) {
    const size_t width = xd_dtype_size(dtype);
    const int64_t period = count < PATTERN - 1 ? count : PATTERN - 1;
    unsigned char *pattern = (unsigned char *)malloc((size_t)period * width);
    unsigned char *memory = (unsigned char *)device_room((size_t)count * width);
    if (!pattern) exit(2);
    for (int64_t i = 0; i < period; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        xd_store_f64(pattern, dtype, i, size * (double)(int64_t)seed / 9223372036854775808.0);
    }
    for (int64_t i = 0; i < count; i += period) {
        const int64_t n = count - i < period ? count - i : period;
        require_cuda(cudaMemcpy(memory + (size_t)i * width, pattern, (size_t)n * width, cudaMemcpyHostToDevice));
    }
    free(pattern);
    return memory;
}

static void *host_copy(const void *device, size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory) exit(2);
    require_cuda(cudaMemcpy(memory, device, bytes, cudaMemcpyDeviceToHost));
    return memory;
}

/* ---- the two arms ---- */

/* One operation on the GPU; `launch` starts it on the default stream. */
typedef struct gpu_case {
    void (*launch)(struct gpu_case *c);
    xd_ctx *ctx;
    xd_cuda *gpu;
    cudaEvent_t begin, end;
    xd_vocab *vocab;
    xd_loss_desc loss;
    xd_head_loss_desc head;
    xd_loss_values *values;
    xd_param *params;
    int64_t param_count;
    xd_optimizer *optimizer;
    xd_ema *ema;
    xd_gradient_norm *norm;
} gpu_case;

static double measure(void *state) {
    gpu_case *c = (gpu_case *)state;
    float milliseconds = 0.0f;
    require_cuda(cudaEventRecord(c->begin, NULL));
    c->launch(c);
    require_cuda(cudaEventRecord(c->end, NULL));
    require_cuda(cudaEventSynchronize(c->end));
    require_cuda(cudaEventElapsedTime(&milliseconds, c->begin, c->end));
    return 1e-3 * (double)milliseconds;
}

/* Reads and writes `bytes` in all; what is larger than the buffers goes round. */
typedef struct gpu_copy {
    cudaEvent_t begin, end;
    char *from, *to;
    size_t room, bytes;
} gpu_copy;

static double measure_copy(void *state) {
    gpu_copy *c = (gpu_copy *)state;
    float milliseconds = 0.0f;
    require_cuda(cudaEventRecord(c->begin, NULL));
    for (size_t left = c->bytes / 2; left > 0;) {
        const size_t n = left < c->room ? left : c->room;
        require_cuda(cudaMemcpyAsync(c->to, c->from, n, cudaMemcpyDeviceToDevice, NULL));
        left -= n;
    }
    require_cuda(cudaEventRecord(c->end, NULL));
    require_cuda(cudaEventSynchronize(c->end));
    require_cuda(cudaEventElapsedTime(&milliseconds, c->begin, c->end));
    return 1e-3 * (double)milliseconds;
}

static gpu_copy copy_arm;

static void open_copy(size_t room) {
    copy_arm.room = room;
    copy_arm.from = (char *)device_room(room);
    copy_arm.to = (char *)device_room(room);
    require_cuda(cudaEventCreate(&copy_arm.begin));
    require_cuda(cudaEventCreate(&copy_arm.end));
}

static void close_copy(void) {
    cudaEventDestroy(copy_arm.begin);
    cudaEventDestroy(copy_arm.end);
    cudaFree(copy_arm.from);
    cudaFree(copy_arm.to);
}

static void open_case(gpu_case *c, void (*launch)(gpu_case *c), const char *cublas = NULL) {
    xd_cuda_desc desc = {};
    desc.two_sweeps = two_sweeps;
    desc.cublas = cublas;
    memset(c, 0, sizeof *c);
    c->launch = launch;
    require(NULL, xd_ctx_create(NULL, &c->ctx));
    require(c->ctx, xd_cuda_create(c->ctx, &desc, &c->gpu));
    require_cuda(cudaEventCreate(&c->begin));
    require_cuda(cudaEventCreate(&c->end));
}

static void close_case(gpu_case *c) {
    xd_vocab_destroy(c->vocab);
    xd_ema_destroy(c->ema);
    xd_optimizer_destroy(c->optimizer);
    xd_cuda_destroy(c->gpu);
    xd_ctx_destroy(c->ctx);
    cudaEventDestroy(c->begin);
    cudaEventDestroy(c->end);
}

/* `target`: the part of the copy rate that the operation should reach. */
static void report(bench_row *row, gpu_case *c, double target) {
    const bench_arm ours = { "xdistill", c, NULL, measure };
    const bench_arm copy = { "copy of the same bytes", &copy_arm, NULL, measure_copy };
    row->ceiling = machine.copy;
    row->ceiling_name = "copy";
    copy_arm.bytes = (size_t)row->bytes;
    if (target > 0.0)
        printf("  %-22s target %.3f ms: %.0f %% of the copy rate\n", row->op,
               1e3 * row->bytes / (machine.copy * target), 100.0 * target);
    if (!bench_run(json, &machine, row, &ours, &copy)) wrong++;
}

/* ---- losses ---- */

/* The workspace of the loss that a case launches. */
static size_t planned_workspace(gpu_case *c, void (*launch)(gpu_case *c)) {
    xd_planned planned;
    require(c->ctx, xd_plan_begin(c->ctx, NULL));
    launch(c);
    require(c->ctx, xd_plan_end(c->ctx, &planned));
    return planned.workspace;
}

static void launch_loss(gpu_case *c) {
    require(c->ctx, xd_loss(c->ctx, &c->loss, c->values));
}

/* The first rows' gradient against that of the CPU's plain level: row by row, and a label's column apart. */
static double loss_error(gpu_case *c) {
    const xd_loss_desc *gpu = &c->loss;
    const int64_t count = CHECKED_ROWS * gpu->student.cols;
    const size_t bytes = (size_t)count * xd_dtype_size(gpu->student.dtype);
    xd_ctx_desc settings = {};
    xd_loss_desc cpu = *gpu;
    xd_loss_values values;
    xd_vocab *vocab = NULL;
    xd_ctx *ctx = NULL;
    settings.cpu = XD_CPU_PLAIN;
    require(NULL, xd_ctx_create(&settings, &ctx));
    const xd_vocab_desc split = { gpu->student.cols };
    require(ctx, xd_vocab_create(ctx, &split, &vocab));
    cpu.vocab = vocab;
    cpu.student.rows = cpu.teacher.rows = cpu.common.gradient.rows = CHECKED_ROWS;
    cpu.student.data = host_copy(gpu->student.data, bytes);
    if (gpu->teacher.data) cpu.teacher.data = host_copy(gpu->teacher.data, bytes);
    if (gpu->common.labels.data) cpu.common.labels.data = host_copy(gpu->common.labels.data, CHECKED_ROWS * sizeof(int64_t));
    cpu.common.gradient.data = malloc(bytes);
    cpu.common.status = NULL;
    cpu.common.workspace = NULL;
    require(ctx, xd_loss(ctx, &cpu, &values));
    require(c->ctx, xd_loss(c->ctx, gpu, c->values));
    void *written = malloc(bytes);
    require(c->ctx, xd_read(c->ctx, written, gpu->common.gradient.data, bytes));
    const int64_t *labels = (const int64_t *)cpu.common.labels.data;
    const double error = bench_gradient_error(written, cpu.common.gradient.data, gpu->student.dtype, CHECKED_ROWS,
                                              gpu->student.cols, labels, labels ? 1 : 0);
    free(written), free(cpu.common.gradient.data), free(cpu.student.data), free(cpu.teacher.data), free((void *)cpu.common.labels.data);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    return error;
}

static int64_t *device_labels(int64_t rows, int64_t vocabulary) {
    int64_t *labels = (int64_t *)malloc((size_t)rows * sizeof *labels);
    int64_t *memory = (int64_t *)device_room((size_t)rows * sizeof *labels);
    if (!labels) exit(2);
    for (int64_t r = 0; r < rows; r++) labels[r] = r * 7919 % vocabulary;
    require_cuda(cudaMemcpy(memory, labels, (size_t)rows * sizeof *labels, cudaMemcpyHostToDevice));
    free(labels);
    return memory;
}

/* soft: a divergence from a teacher; else cross entropy. */
static void bench_loss(const char *op, xd_dtype dtype, bool soft, xd_divergence divergence, double target) {
    const int64_t rows = GPU_ROWS, columns = GPU_VOCABULARY, count = rows * columns;
    char shape[64];
    gpu_case c;
    bench_row row = {};
    open_case(&c, launch_loss);
    const xd_vocab_desc split = { columns };
    require(c.ctx, xd_vocab_create(c.ctx, &split, &c.vocab));
    c.loss.student = { device_noise(count, dtype, 8.0, 1), dtype, rows, columns, 0 };
    c.loss.hard_weight = soft ? 0.0 : 1.0;
    c.loss.soft_weight = soft ? 1.0 : 0.0;
    c.loss.beta = 0.5;
    if (soft)
        c.loss.teacher = { device_noise(count, dtype, 8.0, 2), dtype, rows, columns, 0 };
    else
        c.loss.common.labels.data = device_labels(rows, columns);
    c.loss.common.gradient = { device_room((size_t)count * xd_dtype_size(dtype)), dtype, rows, columns, 0 };
    c.loss.divergence = divergence;
    c.loss.temperature = soft ? 2.0 : 1.0;
    c.loss.vocab = c.vocab;
    c.loss.common.denominator_value = (double)rows;
    c.loss.common.status = (xd_status *)device_room(sizeof *c.loss.common.status);
    c.values = (xd_loss_values *)device_room(sizeof *c.values);
    c.loss.common.workspace_bytes = planned_workspace(&c, launch_loss);
    c.loss.common.workspace = device_room(c.loss.common.workspace_bytes);
    snprintf(shape, sizeof shape, "\"N\":%lld,\"V\":%lld", (long long)rows, (long long)columns);
    row.op = op;
    row.variant = soft ? two_sweeps ? "temperature 2, two sweeps" : "temperature 2" : two_sweeps ? "two sweeps" : "";
    row.shape = shape;
    row.dtype = dtype == XD_DTYPE_F32 ? "f32" : "bf16";
    row.bytes = (soft ? 3.0 : 2.0) * (double)count * (double)xd_dtype_size(dtype);
    row.error_limit = dtype == XD_DTYPE_F32 ? 1e-5 : 4e-3;
    row.error = loss_error(&c);
    report(&row, &c, target);
    void *const all[] = { c.loss.student.data, c.loss.teacher.data, (void *)c.loss.common.labels.data, c.loss.common.gradient.data,
                          c.loss.common.status, c.loss.common.workspace, c.values };
    for (void *memory : all) cudaFree(memory);
    close_case(&c);
}

/* ---- the head ---- */

static void launch_head(gpu_case *c) {
    require(c->ctx, xd_head_loss(c->ctx, &c->head, c->values));
}

/* ||a - b|| / ||b|| of floats on the device. */
static double head_distance(const float *a, const float *b, int64_t count) {
    float *x = (float *)host_copy(a, (size_t)count * sizeof *x), *y = (float *)host_copy(b, (size_t)count * sizeof *y);
    double difference = 0.0, size = 0.0;
    for (int64_t i = 0; i < count; i++) {
        difference += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        size += (double)y[i] * y[i];
    }
    free(x);
    free(y);
    return sqrt(difference / size);
}

/* What BF16 logits change: a bias of zeros makes them f32. Over a block of rows and the first columns of the gradient. */
static double head_error(gpu_case *c) {
    const int64_t given = c->head.student.hidden.rows, rows = given < 256 ? given : 256, width = GPU_WIDTH;
    const int64_t sizes[2] = { rows * width, (GPU_VOCABULARY < 1024 ? GPU_VOCABULARY : 1024) * width };
    float *results[2][2];
    const xd_head_loss_desc whole = c->head;
    c->head.student.hidden.rows = rows;
    c->head.workspace = NULL;
    c->head.loss.common.denominator_value = (double)rows;
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 2; k++) results[i][k] = (float *)device_room((size_t)sizes[k] * sizeof(float));
        if (i) c->head.student.bias = (float *)device_room(GPU_VOCABULARY * sizeof(float));
        c->head.hidden_gradient = { results[i][0], XD_DTYPE_F32, rows, width, 0 };
        require_cuda(cudaMemset(c->head.weight_gradient, 0, (size_t)GPU_VOCABULARY * width * sizeof(float)));
        launch_head(c);
        require_cuda(cudaMemcpy(results[i][1], c->head.weight_gradient, (size_t)sizes[1] * sizeof(float), cudaMemcpyDeviceToDevice));
    }
    const double hidden = head_distance(results[0][0], results[1][0], sizes[0]), weight = head_distance(results[0][1], results[1][1], sizes[1]);
    cudaFree((void *)c->head.student.bias);
    for (float *const *row : { results[0], results[1] })
        for (int k = 0; k < 2; k++) cudaFree(row[k]);
    c->head = whole;
    return hidden > weight ? hidden : weight;
}

/* Bound by arithmetic, six products a weight and row: the row shows the rate it reached. */
static void bench_head(const char *name, const char *cublas, int64_t rows, bool workspace) {
    const int64_t columns = GPU_VOCABULARY, width = GPU_WIDTH;
    gpu_case c;
    open_case(&c, launch_head, cublas);
    const xd_vocab_desc split = { columns };
    require(c.ctx, xd_vocab_create(c.ctx, &split, &c.vocab));
    c.head.student.hidden = { device_noise(rows * width, XD_DTYPE_BF16, 0.1, 3), XD_DTYPE_BF16, rows, width, 0 };
    c.head.student.weight = { device_noise(columns * width, XD_DTYPE_BF16, 1.0, 4), XD_DTYPE_BF16, columns, width, 0 };
    c.head.hidden_gradient = { device_room((size_t)(rows * width) * 2), XD_DTYPE_BF16, rows, width, 0 };
    c.head.weight_gradient = (float *)device_room((size_t)(columns * width) * sizeof(float));
    c.head.bf16 = true;
    c.head.loss.common.labels.data = device_labels(rows, columns);
    c.head.loss.hard_weight = 1.0;
    c.head.loss.vocab = c.vocab;
    c.head.loss.common.denominator_value = (double)rows;
    c.head.loss.common.status = (xd_status *)device_room(sizeof *c.head.loss.common.status);
    c.values = (xd_loss_values *)device_room(sizeof *c.values);
    c.head.chunk_rows = workspace ? 2048 : 0;
    const size_t bytes = planned_workspace(&c, launch_head);
    c.head.chunk_rows = 0;
    if (workspace) c.head.workspace = device_room(c.head.workspace_bytes = bytes);
    const double error = head_error(&c);
    double best = HUGE_VAL;
    for (int round = 0; round < 5; round++) best = fmin(best, measure(&c));
    printf("  %-22s N=%lld V=%lld H=%lld bf16: %.3f ms at best of 5, %.1f TFLOP/s, %.1f MB of workspace%s, error %.1e against f32 logits\n",
           name, (long long)rows, (long long)columns, (long long)width, 1e3 * best,
           6.0 * (double)rows * (double)columns * (double)width / best * 1e-12, 1e-6 * (double)bytes, workspace ? "" : " of the call", error);
    wrong += !(error < 1e-2);
    void *const all[] = { c.head.student.hidden.data,  c.head.student.weight.data, c.head.hidden_gradient.data,
                          c.head.weight_gradient,      (void *)c.head.loss.common.labels.data, c.head.loss.common.status,
                          c.head.workspace,            c.values };
    for (void *memory : all) cudaFree(memory);
    close_case(&c);
}

/* Whether cuBLASLt loads under its usual name or beside the runtime. */
static bool has_cublas(void) {
    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    require(NULL, xd_ctx_create(NULL, &ctx));
    require(ctx, xd_cuda_create(ctx, NULL, &gpu));
    const bool loaded = xd_ctx_products(ctx) > 1;
    if (!loaded) printf("  %-22s not measured: it does not load\n", "head_ce, cuBLASLt");
    xd_cuda_destroy(gpu);
    xd_ctx_destroy(ctx);
    return loaded;
}

/* ---- parameters ---- */

static void launch_step(gpu_case *c) {
    xd_optimizer_step_desc desc = {};
    desc.averages = &c->ema;
    desc.average_count = c->ema != NULL;
    require(c->ctx, xd_optimizer_step(c->optimizer, &desc, NULL));
}

static void launch_ema(gpu_case *c) {
    require(c->ctx, xd_ema_update(c->ema, XD_EMA_NEXT, NULL));
}

static void launch_norm(gpu_case *c) {
    xd_gradient_norm_desc desc = {};
    desc.params = c->params;
    desc.param_count = c->param_count;
    require(c->ctx, xd_gradient_norm_compute(c->ctx, NULL, &desc, c->norm));
}

/* `arrays` parameters of `count` elements each, bf16 with bf16 gradients. */
static void open_params(gpu_case *c, void (*launch)(gpu_case *), int64_t arrays, int64_t count, bool optimizer, bool ema) {
    static char name[GPU_ARRAYS][16];
    open_case(c, launch);
    char *values = (char *)device_noise(arrays * count, XD_DTYPE_BF16, 1.0, 5);
    char *gradients = (char *)device_noise(arrays * count, XD_DTYPE_BF16, 1.0, 6);
    c->params = (xd_param *)calloc((size_t)arrays, sizeof *c->params);
    if (!c->params) exit(2);
    c->param_count = arrays;
    for (int64_t i = 0; i < arrays; i++) {
        snprintf(name[i], sizeof name[i], "p%d", (int)i);
        c->params[i].name = name[i];
        c->params[i].value = values + 2 * i * count;
        c->params[i].gradient = gradients + 2 * i * count;
        c->params[i].dtype = c->params[i].gradient_dtype = XD_DTYPE_BF16;
        c->params[i].count = count;
    }
    c->norm = (xd_gradient_norm *)device_room(sizeof *c->norm);
    const xd_optimizer_desc step = xd_adamw_defaults(c->params, arrays);
    xd_ema_desc average = {};
    average.decay = 0.999;
    average.init_from_current = true;
    if (optimizer) require(c->ctx, xd_optimizer_create(c->ctx, &step, &c->optimizer));
    average.params = c->params;
    average.param_count = arrays;
    if (ema) require(c->ctx, xd_ema_create(c->ctx, &average, &c->ema));
}

static void close_params(gpu_case *c) {
    cudaFree(c->params[0].value);
    cudaFree(c->params[0].gradient);
    cudaFree(c->norm);
    free(c->params);
    c->params = NULL;
    close_case(c);
}

/* The first elements after three updates, against the CPU's; a norm against a plain sum. */
static double param_error(gpu_case *c) {
    const int64_t most = CHECKED_PARAMS, count = c->params[0].count < most ? c->params[0].count : most;
    const size_t bytes = (size_t)count * 2;
    xd_param param = c->params[0];
    xd_ctx *ctx = NULL;
    gpu_case cpu;
    memset(&cpu, 0, sizeof cpu);
    require(NULL, xd_ctx_create(NULL, &ctx));
    param.value = host_copy(param.value, bytes);
    param.gradient = host_copy(param.gradient, bytes);
    param.count = count;
    cpu.ctx = ctx;
    const xd_optimizer_desc step = xd_adamw_defaults(&param, 1);
    xd_ema_desc average = {};
    average.decay = 0.999;
    average.init_from_current = true;
    if (c->optimizer) require(ctx, xd_optimizer_create(ctx, &step, &cpu.optimizer));
    average.params = &param;
    average.param_count = 1;
    if (c->ema) require(ctx, xd_ema_create(ctx, &average, &cpu.ema));
    for (int i = 0; i < 3; i++) {
        c->launch(c);
        if (c->launch == launch_ema)
            launch_ema(&cpu);
        else
            launch_step(&cpu);
    }
    void *value = malloc(bytes), *shadow = malloc(2 * bytes);
    require(c->ctx, xd_read(c->ctx, value, c->params[0].value, bytes));
    double error = bench_distance(value, param.value, XD_DTYPE_BF16, count);
    if (c->ema) {
        require(c->ctx, xd_read(c->ctx, shadow, xd_ema_view(c->ema, 0).shadow.value, 2 * bytes));
        error = bench_larger(error, bench_distance(shadow, xd_ema_view(cpu.ema, 0).shadow.value, XD_DTYPE_F32, count));
    }
    free(value), free(shadow), free(param.value), free(param.gradient);
    xd_ema_destroy(cpu.ema);
    xd_optimizer_destroy(cpu.optimizer);
    xd_ctx_destroy(ctx);
    return error;
}

static double norm_error(gpu_case *c) {
    const int64_t count = c->param_count * c->params[0].count; /* one behind the other */
    uint16_t *gradient = (uint16_t *)host_copy(c->params[0].gradient, (size_t)count * 2);
    xd_gradient_norm norm;
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += pow((double)xd_f32_from_bf16(gradient[i]), 2.0);
    c->launch(c);
    require(c->ctx, xd_read(c->ctx, &norm, c->norm, sizeof norm));
    free(gradient);
    return fabs(norm.norm - sqrt(sum)) / sqrt(sum);
}

typedef struct param_bench {
    const char *op;
    void (*launch)(gpu_case *c);
    bool optimizer, ema;
    double bytes, target; /* bytes a parameter */
} param_bench;

static void bench_params(const param_bench *b, int64_t arrays, int64_t count) {
    char shape[64];
    gpu_case c;
    bench_row row = {};
    open_params(&c, b->launch, arrays, count, b->optimizer, b->ema);
    snprintf(shape, sizeof shape, "\"P\":%lld,\"n\":%lld", (long long)(arrays * count), (long long)arrays);
    row.op = b->op;
    row.variant = arrays == 1 ? "one array" : "1000 arrays";
    row.shape = shape;
    row.dtype = "bf16";
    row.bytes = b->bytes * (double)(arrays * count);
    row.error_limit = b->launch == launch_norm ? 1e-6 : 1e-3; /* one element of a bf16 may round the other way */
    row.error = b->launch == launch_norm ? norm_error(&c) : param_error(&c);
    report(&row, &c, arrays == 1 ? b->target : 0.0);
    close_params(&c);
}

/* ---- the card ---- */

static void measure_device(void) {
    cudaDeviceProp device;
    require_cuda(cudaGetDeviceProperties(&device, 0));
    memset(&machine, 0, sizeof machine);
    bench_describe(&machine);
    snprintf(machine.cpu, sizeof machine.cpu, "%.60s, %d SMs", device.name, device.multiProcessorCount);
    machine.cores = device.multiProcessorCount;
    machine.cache_bytes = (long)device.l2CacheSize;
    copy_arm.bytes = 2 * copy_arm.room;
    for (int round = 0; round < 10; round++)
        machine.copy = fmax(machine.copy, (double)copy_arm.bytes / measure_copy(&copy_arm));
    machine.read = machine.in_place = machine.copy;
}

int main(int argc, char **argv) {
    static const param_bench params[] = {
        { "ema", launch_ema, false, true, 10.0, 0.92 },
        { "adamw", launch_step, true, false, 28.0, 0.92 },
        { "adamw+ema", launch_step, true, true, 36.0, 0.92 },
        { "grad_norm", launch_norm, false, false, 2.0, 0.93 },
    };
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return printf("there is no GPU\n"), 0;
    two_sweeps = getenv("GPU_TWO_SWEEPS") != NULL;
    json = bench_open_json(argc, argv);
    open_copy((size_t)GPU_ROWS * GPU_VOCABULARY);
    measure_device();
    bench_header(&machine, "one GPU; ref = a copy of the same bytes");
    bench_loss("ce_fwd_bwd", XD_DTYPE_BF16, false, XD_KL_FORWARD, 0.90);
    bench_loss("ce_fwd_bwd", XD_DTYPE_F32, false, XD_KL_FORWARD, 0.90);
    bench_loss("kl_fwd_bwd", XD_DTYPE_BF16, true, XD_KL_FORWARD, 0.88);
    bench_loss("kl_fwd_bwd", XD_DTYPE_F32, true, XD_KL_FORWARD, 0.88);
    bench_loss("rkl_fwd_bwd", XD_DTYPE_BF16, true, XD_KL_REVERSE, 0.88);
    bench_loss("jsd_fwd_bwd", XD_DTYPE_BF16, true, XD_JSD, 0.85);
    for (const param_bench &b : params) {
        bench_params(&b, 1, GPU_PARAMS);
        bench_params(&b, GPU_ARRAYS, GPU_ARRAY);
    }
    bench_head("head_ce, own", "none", GPU_HEAD_ROWS / 8, true);
    if (has_cublas()) {
        bench_head("head_ce, workspace", NULL, GPU_HEAD_ROWS, true);
        bench_head("head_ce, none", NULL, GPU_HEAD_ROWS, false);
    }
    close_copy();
    printf("# wrong results: %d\n", wrong);
    if (json) fclose(json);
    return wrong == 0 ? 0 : 1;
}
