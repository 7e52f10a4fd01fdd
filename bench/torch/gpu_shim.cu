/* What shim.c is for the CPU, on one GPU: the same C calls over xdistill_cuda.cu, on device memory that the caller
 * gives (PyTorch's) and on the default stream, so that its events time both. Built by `make bench-torch-gpu`:
 *
 *     nvcc -O3 -arch=native -shared -Xcompiler -fPIC -I. bench/torch/gpu_shim.cu xdistill_cuda.cu -o build/bench/gpu_shim.so
 *
 * GPU_CUBLAS in the environment is xd_cuda_desc.cublas: unset for cuBLASLt where it loads, its path, or none.
 */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One operation, with a context and a GPU of its own. */
struct shim {
    void (*run)(shim *s);
    xd_ctx *ctx;
    xd_cuda *gpu;
    xd_vocab *vocab;
    xd_loss_desc loss;
    xd_head_loss_desc head;
    xd_param param;
    xd_optimizer *optimizer;
    xd_ema *ema;
    bool together; /* optimizer and average in one pass */
    xd_status *status;
    xd_loss_values *values;
    xd_gradient_norm *norm;
    int64_t rows, k; /* of a selection */
    float *top;
    int64_t *ids;
    char *swept; /* what a probe sweeps: the operation's largest array of its own */
    int64_t swept_bytes;
    bool in_place;
};

static void shim_require(const shim *s, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(s->ctx)->message);
    exit(2);
}

static void shim_require_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    exit(2);
}

static void *shim_room(size_t bytes) {
    void *memory = NULL;
    shim_require_cuda(cudaMalloc(&memory, bytes));
    shim_require_cuda(cudaMemset(memory, 0, bytes));
    return memory;
}

static shim *shim_open(void (*run)(shim *s)) {
    shim *s = (shim *)calloc(1, sizeof *s);
    if (!s) exit(2);
    s->run = run;
    shim_require(s, xd_ctx_create(NULL, &s->ctx));
    xd_cuda_desc desc = {};
    desc.cublas = getenv("GPU_CUBLAS");
    shim_require(s, xd_cuda_create(s->ctx, &desc, &s->gpu));
    s->status = (xd_status *)shim_room(sizeof *s->status);
    s->values = (xd_loss_values *)shim_room(sizeof *s->values);
    s->norm = (xd_gradient_norm *)shim_room(sizeof *s->norm);
    return s;
}

/* The workspace of the call that the shim times. */
static size_t shim_planned(shim *s) {
    xd_planned planned;
    shim_require(s, xd_plan_begin(s->ctx, NULL));
    s->run(s);
    shim_require(s, xd_plan_end(s->ctx, &planned));
    return planned.workspace;
}

extern "C" void shim_run(shim *s) {
    s->run(s);
}

extern "C" void shim_close(shim *s) {
    xd_ema_destroy(s->ema);
    xd_optimizer_destroy(s->optimizer);
    xd_vocab_destroy(s->vocab);
    void *const all[] = { s->status, s->values, s->norm, s->loss.common.workspace, s->head.workspace, s->top, s->ids };
    for (void *memory : all) cudaFree(memory);
    xd_cuda_destroy(s->gpu);
    xd_ctx_destroy(s->ctx);
    free(s);
}

/* ---- losses ---- */

static void shim_run_loss(shim *s) {
    shim_require(s, xd_loss(s->ctx, &s->loss, s->values));
}

extern "C" shim *shim_loss(int, int dtype, int64_t rows, int64_t cols, void *student, void *teacher, const int64_t *labels,
                           void *gradient, double temperature, bool jsd) {
    shim *s = shim_open(shim_run_loss);
    xd_loss_desc *d = &s->loss;
    xd_rows matrix = { student, (xd_dtype)dtype, rows, cols, 0 };
    const xd_vocab_desc split = { cols };
    shim_require(s, xd_vocab_create(s->ctx, &split, &s->vocab));
    d->vocab = s->vocab;
    d->student = matrix;
    matrix.data = gradient;
    d->common.gradient = matrix;
    matrix.data = teacher;
    if (teacher) d->teacher = matrix;
    if (jsd) d->divergence = XD_JSD;
    d->beta = 0.5;
    d->hard_weight = labels ? 1.0 : 0.0;
    d->soft_weight = teacher ? 1.0 : 0.0;
    d->common.labels.data = labels;
    d->temperature = temperature;
    d->common.denominator_value = (double)rows;
    d->common.status = s->status;
    d->common.workspace_bytes = shim_planned(s);
    d->common.workspace = shim_room(d->common.workspace_bytes);
    s->swept = (char *)gradient;
    s->swept_bytes = rows * cols * (int64_t)xd_dtype_size((xd_dtype)dtype);
    return s;
}

static void shim_run_head(shim *s) {
    shim_require(s, xd_head_loss(s->ctx, &s->head, s->values));
}

extern "C" shim *shim_head(int, int64_t rows, int64_t cols, int64_t width, void *hidden, void *weight, const int64_t *labels,
                           float *hidden_gradient, float *weight_gradient) {
    shim *s = shim_open(shim_run_head);
    xd_head_loss_desc *d = &s->head;
    const xd_vocab_desc split = { cols };
    shim_require(s, xd_vocab_create(s->ctx, &split, &s->vocab));
    d->student.hidden = { hidden, XD_DTYPE_BF16, rows, width, 0 };
    d->student.weight = { weight, XD_DTYPE_BF16, cols, width, 0 };
    d->hidden_gradient = { hidden_gradient, XD_DTYPE_F32, rows, width, 0 };
    d->weight_gradient = weight_gradient;
    d->bf16 = true;
    d->loss.vocab = s->vocab;
    d->loss.common.labels.data = labels;
    d->loss.hard_weight = 1.0;
    d->loss.common.denominator_value = (double)rows;
    d->loss.common.status = s->status;
    d->workspace_bytes = shim_planned(s);
    d->workspace = shim_room(d->workspace_bytes);
    return s;
}

static void shim_run_select(shim *s) {
    shim_require(s, xd_vocab_topk(s->ctx, s->vocab, s->loss.student, s->k, s->top, s->ids));
}

extern "C" shim *shim_select(int, int dtype, int64_t rows, int64_t cols, void *data, int64_t k) {
    shim *s = shim_open(shim_run_select);
    const xd_vocab_desc split = { cols };
    shim_require(s, xd_vocab_create(s->ctx, &split, &s->vocab));
    s->loss.student = { data, (xd_dtype)dtype, rows, cols, 0 };
    s->rows = rows;
    s->k = k;
    s->top = (float *)shim_room((size_t)(rows * k) * sizeof *s->top);
    s->ids = (int64_t *)shim_room((size_t)(rows * k) * sizeof *s->ids);
    return s;
}

extern "C" void shim_ids(const shim *s, int64_t *ids) {
    const size_t bytes = (size_t)(s->rows * s->k) * sizeof *ids;
    shim_require_cuda(cudaMemcpy(ids, s->ids, bytes, cudaMemcpyDefault));
}

/* ---- parameters ---- */

static void shim_param(shim *s, int64_t count, int dtype, void *value, int gradient_dtype, void *gradient) {
    s->param.name = "weight";
    s->param.dtype = (xd_dtype)dtype;
    s->param.gradient_dtype = (xd_dtype)gradient_dtype;
    s->param.value = value;
    s->param.gradient = gradient;
    s->param.count = count;
}

static void shim_make_ema(shim *s, double decay) {
    xd_ema_desc desc = {};
    desc.decay = decay;
    desc.init_from_current = true;
    desc.params = &s->param;
    desc.param_count = 1;
    shim_require(s, xd_ema_create(s->ctx, &desc, &s->ema));
}

static void shim_run_ema(shim *s) {
    shim_require(s, xd_ema_update(s->ema, XD_EMA_NEXT, NULL));
}

extern "C" shim *shim_ema(int, int64_t count, int dtype, void *value, double decay) {
    shim *s = shim_open(shim_run_ema);
    shim_param(s, count, dtype, value, XD_DTYPE_F32, NULL);
    shim_make_ema(s, decay);
    s->swept = (char *)xd_ema_view(s->ema, 0).shadow.value;
    s->swept_bytes = count * (int64_t)sizeof(float);
    return s;
}

static void shim_run_adamw(shim *s) {
    xd_optimizer_step_desc desc = {};
    desc.averages = &s->ema;
    desc.average_count = s->together;
    shim_require(s, xd_optimizer_step(s->optimizer, &desc, NULL));
}

extern "C" shim *shim_adamw(int, int64_t count, int dtype, void *value, int gradient_dtype, void *gradient, double decay) {
    shim *s = shim_open(shim_run_adamw);
    shim_param(s, count, dtype, value, gradient_dtype, gradient);
    const xd_optimizer_desc desc = xd_adamw_defaults(&s->param, 1);
    shim_require(s, xd_optimizer_create(s->ctx, &desc, &s->optimizer));
    s->together = decay > 0.0;
    if (s->together) shim_make_ema(s, decay);
    s->swept = (char *)value;
    s->swept_bytes = count * (int64_t)xd_dtype_size((xd_dtype)dtype);
    return s;
}

extern "C" void shim_average(const shim *s, float *out) {
    const xd_param shadow = xd_ema_view(s->ema, 0).shadow;
    const size_t bytes = (size_t)shadow.count * sizeof *out;
    shim_require_cuda(cudaMemcpy(out, shadow.value, bytes, cudaMemcpyDefault));
}

static void shim_run_norm(shim *s) {
    xd_gradient_norm_desc desc = {};
    desc.params = &s->param;
    desc.param_count = 1;
    shim_require(s, xd_gradient_norm_compute(s->ctx, NULL, &desc, s->norm));
}

extern "C" shim *shim_norm(int, int64_t count, int dtype, void *gradient) {
    shim *s = shim_open(shim_run_norm);
    shim_param(s, count, XD_DTYPE_F32, NULL, dtype, gradient);
    s->swept = (char *)gradient;
    s->swept_bytes = count * (int64_t)xd_dtype_size((xd_dtype)dtype);
    return s;
}

/* The loss, or the squared norm, of the last run; waits for it. */
extern "C" double shim_value(const shim *s) {
    xd_loss_values values;
    xd_gradient_norm norm;
    shim_require(s, xd_read(s->ctx, &values, s->values, sizeof values));
    shim_require(s, xd_read(s->ctx, &norm, s->norm, sizeof norm));
    return s->run == shim_run_norm ? norm.norm * norm.norm : values.loss;
}

extern "C" int64_t shim_extra_bytes(const shim *s) {
    return (int64_t)(s->loss.common.workspace_bytes + s->head.workspace_bytes);
}

/* ---- ceilings ---- */

/* As many bytes as a sweep over the array moves: half of it is read and half written. */
static void shim_run_copy(shim *s) {
    const size_t half = (size_t)s->swept_bytes / 32 * 16;
    shim_require_cuda(cudaMemcpyAsync(s->swept + half, s->swept, half, cudaMemcpyDefault, NULL));
}

extern "C" shim *shim_probe(int, const shim *of, bool in_place) {
    shim *s = shim_open(shim_run_copy);
    s->swept = of->swept;
    s->swept_bytes = of->swept_bytes;
    s->in_place = in_place;
    return s;
}

/* In place each byte counts twice, which the caller does. */
extern "C" int64_t shim_probed_bytes(const shim *s) {
    return s->swept_bytes / 32 * (s->in_place ? 16 : 32);
}

/* Powers, logarithms and products have no ceiling here: memory bounds the losses, and the head's rate is printed. */
extern "C" shim *shim_unit(int, bool) {
    return NULL;
}

extern "C" int64_t shim_unit_count(void) {
    return 1;
}

extern "C" shim *shim_dots(int) {
    return NULL;
}

extern "C" int64_t shim_dot_count(void) {
    return 1;
}

extern "C" int shim_dtype(bool narrow) {
    return narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32;
}

extern "C" const char *shim_level(void) {
    return "cuda";
}
