/* A step of distribution matching on a GPU, captured into a CUDA graph once and replayed: noise, the forward process, both losses and
 * the updates between the calls of networks. Nothing in it allocates or waits, or comes from the host.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/dmd_graph.cu xdistill_cuda.cu -o dmd_graph
 *
 * The networks are formulas with one vector each. Data are points around `data`; the student shifts noise by `student`; teacher and
 * fake score predict clean samples, exact ones for points around `data` and around `fake`. The student finds the data by these two alone. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>

enum { SAMPLES = 16, ELEMENTS = 32, ALL = SAMPLES * ELEMENTS, STEPS = 200 };

typedef struct state { /* on the device */
    float data[ELEMENTS], student[ELEMENTS], fake[ELEMENTS];
    float noise[ALL], x[ALL], epsilon[ALL], x_t[ALL]; /* pure noise; samples; their noise; the sum of both */
    float clean_teacher[ALL], clean_fake[ALL], by_x[ALL], by_clean[ALL];
    float times[SAMPLES]; /* fixed here; a graph reads whatever stands here when it runs, and in what follows */
    xd_mix forward[SAMPLES];
    xd_denoise_term terms[SAMPLES];
    int64_t step; /* numbers differ from replay to replay: the graph counts itself */
    xd_sample_values vsd, denoise;
    xd_status status;
} state;

/* The slope of a clean sample mean + k (x_t - (1 - t) mean) by the mean is 1 - k (1 - t). */
__device__ static float k_of(float t) { return (1.0f - t) / ((1.0f - t) * (1.0f - t) + t * t); }

__global__ static void generate(state *s) {
    const int at = (int)(blockIdx.x * ELEMENTS + threadIdx.x);
    s->x[at] = s->noise[at] + s->student[threadIdx.x];
}

__global__ static void predict(state *s) {
    const int b = (int)blockIdx.x, i = (int)threadIdx.x, at = b * ELEMENTS + i;
    const float a = 1.0f - s->times[b], k = k_of(s->times[b]);
    s->clean_teacher[at] = s->data[i] + k * (s->x_t[at] - a * s->data[i]);
    s->clean_fake[at] = s->fake[i] + k * (s->x_t[at] - a * s->fake[i]);
}

/* Both vectors against their gradients: the chain from samples and predictions to them. */
__global__ static void update(state *s) {
    const int i = (int)threadIdx.x;
    for (int b = 0; b < SAMPLES; b++) {
        s->student[i] -= 1.5f * s->by_x[b * ELEMENTS + i];
        s->fake[i] -= 4.0f * s->by_clean[b * ELEMENTS + i] * (1.0f - k_of(s->times[b]) * (1.0f - s->times[b]));
    }
    if (i == 0) s->step++;
}

static xd_result launch(xd_ctx *ctx, cudaStream_t stream, int blocks, void (*kernel)(state *), state *s) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks), config.blockDim = dim3(ELEMENTS), config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, s) == cudaSuccess ? XD_OK : XD_FAIL(ctx, XD_ERROR_DEVICE, "no launch");
}

static xd_rows rows(const float *x) { return xd_rows_of(x, XD_DTYPE_F32, SAMPLES, ELEMENTS); }

static xd_result draw(xd_ctx *ctx, state *s, uint8_t stream, float *out) {
    xd_draw_desc d = {};
    d.random.seed = 7, d.random.stream = stream, d.step = &s->step, d.out = rows(out);
    return xd_draw_rows(ctx, &d);
}

static xd_result step(xd_ctx *ctx, cudaStream_t stream, state *s, void *workspace, size_t bytes) {
    xd_mix_desc forward = {};
    xd_vsd_desc vsd = xd_vsd_defaults();
    xd_denoise_desc fake = xd_denoise_defaults();
    forward.p = rows(s->x), forward.q = rows(s->epsilon), forward.out = rows(s->x_t), forward.mix = s->forward;
    vsd.generated = rows(s->x), vsd.teacher = rows(s->clean_teacher), vsd.fake = rows(s->clean_fake), vsd.gradient = rows(s->by_x);
    fake.prediction = rows(s->clean_fake), fake.clean = rows(s->x), fake.noise = rows(s->epsilon), fake.gradient = rows(s->by_clean);
    fake.terms = s->terms;
    vsd.common.status = &s->status, vsd.common.workspace = workspace, vsd.common.workspace_bytes = bytes, fake.common = vsd.common;
    XD_TRY(draw(ctx, s, XD_STREAM_STUDENT_NOISE, s->noise));
    XD_TRY(launch(ctx, stream, SAMPLES, generate, s));
    XD_TRY(draw(ctx, s, XD_STREAM_EPSILON, s->epsilon));
    XD_TRY(xd_mix_rows(ctx, &forward));
    XD_TRY(launch(ctx, stream, SAMPLES, predict, s));
    XD_TRY(xd_vsd_loss(ctx, &vsd, &s->vsd));
    XD_TRY(xd_denoise_loss(ctx, &fake, &s->denoise));
    return launch(ctx, stream, 1, update, s);
}

/* What the host sets once: the data, times, and the factors and terms of each sample's time. */
static xd_result prepare(xd_ctx *ctx, state *s) {
    const xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    xd_denoise_form form = {};
    form.native = form.space = XD_PREDICT_X0;
    for (int i = 0; i < ELEMENTS; i++) s->data[i] = sinf(0.2f * (float)i);
    for (int b = 0; b < SAMPLES; b++) {
        s->times[b] = 0.1f + 0.8f * (float)b / SAMPLES;
        XD_TRY(xd_noise_mix(ctx, &schedule, s->times[b], &s->forward[b]));
        XD_TRY(xd_denoise_term_at(ctx, &schedule, &form, s->times[b], &s->terms[b]));
    }
    return XD_OK;
}

int main(void) {
    enum { WORKSPACE = 65536 };
    static state host, *s;
    void *workspace = NULL;
    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    xd_ctx_desc desc = {};
    cudaGraph_t graph = NULL;
    cudaGraphExec_t replay = NULL;
    float off = 0.0f;
    if (cudaMalloc((void **)&s, sizeof *s) || cudaMalloc(&workspace, WORKSPACE) || cudaStreamCreate((cudaStream_t *)&desc.stream))
        return printf("there is no GPU, or no room on it\n"), 0;
    cudaStream_t stream = (cudaStream_t)desc.stream;
    bool ok = xd_ctx_create(&desc, &ctx) == XD_OK && xd_cuda_create(ctx, NULL, &gpu) == XD_OK && prepare(ctx, &host) == XD_OK;
    cudaMemcpy(s, &host, sizeof host, cudaMemcpyHostToDevice);
    ok = ok && cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    ok = ok && step(ctx, stream, s, workspace, WORKSPACE) == XD_OK && cudaStreamEndCapture(stream, &graph) == cudaSuccess;
    ok = ok && cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess;
    for (int i = 0; i < STEPS && ok; i++) ok = cudaGraphLaunch(replay, stream) == cudaSuccess;
    ok = ok && xd_read(ctx, &host, s, sizeof host) == XD_OK && xd_status_check(ctx, &host.status) == XD_OK;
    if (!ok) return fprintf(stderr, "%s\n", ctx ? xd_last_error(ctx)->message : "no context"), 1;
    for (int i = 0; i < ELEMENTS; i++) off = fmaxf(off, fabsf(host.student[i] - host.data[i]));
    printf("%d steps: losses %.4f and %.4f, the student is off by %.3f at most\n", (int)host.step, host.vsd.loss, host.denoise.loss, off);
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
    xd_cuda_destroy(gpu), xd_ctx_destroy(ctx), cudaStreamDestroy(stream), cudaFree(workspace), cudaFree(s);
    return host.step == STEPS && off < 0.2f ? 0 : 1;
}
