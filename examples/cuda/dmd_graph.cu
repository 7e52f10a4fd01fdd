/* A step of distribution matching on a GPU, captured into a CUDA graph once and replayed: noise, the forward process, conversions,
 * both losses and the updates between the calls of networks. Nothing in it allocates or waits, or comes from the host.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/dmd_graph.cu xdistill_cuda.cu -o dmd_graph
 *
 * The networks are formulas with one vector each. Data are points around `data`; the student shifts noise by `student`; teacher and
 * fake score predict velocities, exact ones for points around `data` and around `fake`. The student finds the data by the other two alone. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 16, ELEMENTS = 32, ALL = SAMPLES * ELEMENTS, STEPS = 200 };

typedef struct state { /* on the device */
    float data[ELEMENTS], student[ELEMENTS], fake[ELEMENTS];
    float noise[ALL], x[ALL], epsilon[ALL], x_t[ALL]; /* pure noise; samples; their noise; the sum of both */
    float raw_teacher[ALL], raw_fake[ALL], clean_teacher[ALL], clean_fake[ALL], by_x[ALL], by_raw[ALL];
    float times[SAMPLES]; /* fixed here; a graph reads whatever stands here when it runs, and in what follows */
    xd_mix forward[SAMPLES], to_clean[SAMPLES];
    xd_denoise_term terms[SAMPLES];
    int64_t step; /* numbers differ from replay to replay: the graph counts itself */
    xd_sample_values vsd, denoise;
    xd_status status;
} state;

__global__ static void generate(state *s) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    s->x[i] = s->noise[i] + s->student[i % ELEMENTS];
}

/* The clean sample is mean + k (x_t - (1 - t) mean), and the velocity (x_t - clean) / t. */
__global__ static void predict(const state *s, const float *mean, float *raw) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const float t = s->times[i / ELEMENTS], a = 1.0f - t, k = a / (a * a + t * t), m = mean[i % ELEMENTS];
    raw[i] = (s->x_t[i] - m - k * (s->x_t[i] - a * m)) / t;
}

/* Both vectors against their gradients: the chain from samples and velocities to them. */
__global__ static void update(state *s) {
    const int i = (int)threadIdx.x;
    float student = 0.0f, fake = 0.0f;
    for (int b = 0; b < SAMPLES; b++) {
        const float t = s->times[b], a = 1.0f - t;
        student += s->by_x[b * ELEMENTS + i];
        fake += s->by_raw[b * ELEMENTS + i] * (a * a / (a * a + t * t) - 1.0f) / t;
    }
    s->student[i] -= 1.5f * student;
    s->fake[i] -= 4.0f * fake;
    if (i == 0) s->step++;
}

template <typename... Parameters, typename... Arguments>
static bool launch(cudaStream_t stream, int count, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(count / ELEMENTS)), config.blockDim = dim3(ELEMENTS), config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...) == cudaSuccess;
}

static bool draw(xd_ctx *ctx, state *s, uint8_t stream, float *out) {
    xd_draw_desc d = {};
    d.random.seed = 7, d.random.stream = stream;
    d.step = &s->step;
    d.out = xd_rows_of(out, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    return xd_draw_rows(ctx, &d) == XD_OK;
}

static bool mix(xd_ctx *ctx, const float *p, const float *q, const xd_mix *factors, float *out) {
    xd_mix_desc d = {};
    d.p = xd_rows_of(p, XD_DTYPE_F32, SAMPLES, ELEMENTS), d.q = xd_rows_of(q, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    d.out = xd_rows_of(out, XD_DTYPE_F32, SAMPLES, ELEMENTS), d.mix = factors;
    return xd_mix_rows(ctx, &d) == XD_OK;
}

static bool step(xd_ctx *ctx, cudaStream_t stream, state *s, const xd_vsd_desc *vsd, const xd_denoise_desc *denoise) {
    return draw(ctx, s, XD_STREAM_STUDENT_NOISE, s->noise) && launch(stream, ALL, generate, s) &&
           draw(ctx, s, XD_STREAM_EPSILON, s->epsilon) && mix(ctx, s->x, s->epsilon, s->forward, s->x_t) &&
           launch(stream, ALL, predict, (const state *)s, (const float *)s->data, &s->raw_teacher[0]) &&
           launch(stream, ALL, predict, (const state *)s, (const float *)s->fake, &s->raw_fake[0]) &&
           mix(ctx, s->raw_teacher, s->x_t, s->to_clean, s->clean_teacher) &&
           mix(ctx, s->raw_fake, s->x_t, s->to_clean, s->clean_fake) && xd_vsd_loss(ctx, vsd, &s->vsd) == XD_OK &&
           xd_denoise_loss(ctx, denoise, &s->denoise) == XD_OK && launch(stream, ELEMENTS, update, s);
}

/* What the host sets once: vectors, times, and the factors and terms of each sample's time. */
static bool prepare(xd_ctx *ctx, state *s) {
    const xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    xd_conversion to_clean = {};
    xd_denoise_form form = {};
    bool ok = true;
    to_clean.from = XD_PREDICT_FLOW, to_clean.to = XD_PREDICT_X0;
    form.native = form.space = XD_PREDICT_FLOW;
    for (int i = 0; i < ELEMENTS; i++) s->data[i] = sinf(0.2f * (float)i);
    for (int b = 0; b < SAMPLES; b++) {
        const double t = s->times[b] = 0.1f + 0.8f * (float)b / SAMPLES;
        ok = ok && xd_noise_mix(ctx, &schedule, t, &s->forward[b]) == XD_OK &&
             xd_prediction_mix(ctx, &schedule, &to_clean, t, &s->to_clean[b]) == XD_OK &&
             xd_denoise_term_at(ctx, &schedule, &form, t, &s->terms[b]) == XD_OK;
    }
    return ok;
}

int main(void) {
    static state host;
    state *s = NULL;
    void *workspace = NULL;
    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    xd_ctx_desc desc = {};
    cudaStream_t stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t replay = NULL;
    if (cudaMalloc((void **)&s, sizeof *s) || cudaMalloc(&workspace, 65536) || cudaStreamCreate(&stream))
        return printf("there is no GPU, or no room on it\n"), 0;
    desc.stream = stream;
    if (xd_ctx_create(&desc, &ctx) != XD_OK) return 1;
    bool ok = xd_cuda_create(ctx, NULL, &gpu) == XD_OK && prepare(ctx, &host);
    cudaMemcpy(s, &host, sizeof host, cudaMemcpyHostToDevice);

    xd_vsd_desc vsd = xd_vsd_defaults();
    vsd.generated = xd_rows_of(s->x, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    vsd.teacher = xd_rows_of(s->clean_teacher, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    vsd.fake = xd_rows_of(s->clean_fake, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    vsd.gradient = xd_rows_of(s->by_x, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    vsd.common.status = &s->status;
    vsd.common.workspace = workspace, vsd.common.workspace_bytes = 65536;
    xd_denoise_desc denoise = xd_denoise_defaults();
    denoise.prediction = xd_rows_of(s->raw_fake, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    denoise.clean = vsd.generated;
    denoise.noise = xd_rows_of(s->epsilon, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    denoise.gradient = xd_rows_of(s->by_raw, XD_DTYPE_F32, SAMPLES, ELEMENTS);
    denoise.terms = s->terms;
    denoise.common = vsd.common;

    ok = ok && cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    ok = ok && step(ctx, stream, s, &vsd, &denoise) && cudaStreamEndCapture(stream, &graph) == cudaSuccess;
    ok = ok && cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess;
    for (int i = 0; i < STEPS && ok; i++) ok = cudaGraphLaunch(replay, stream) == cudaSuccess;
    ok = ok && xd_read(ctx, &host, s, sizeof host) == XD_OK && xd_status_check(ctx, &host.status) == XD_OK;
    float off = 0.0f;
    for (int i = 0; i < ELEMENTS; i++) off = fmaxf(off, fabsf(host.student[i] - host.data[i]));
    if (ok)
        printf("%d steps: losses %.4f and %.4f, the student is off by %.3f at most\n", (int)host.step, host.vsd.loss,
               host.denoise.loss, off);
    if (!ok) printf("%s\n", xd_last_error(ctx)->message);
    if (replay) cudaGraphExecDestroy(replay);
    if (graph) cudaGraphDestroy(graph);
    xd_cuda_destroy(gpu);
    xd_ctx_destroy(ctx);
    cudaStreamDestroy(stream), cudaFree(workspace), cudaFree(s);
    return ok && host.step == STEPS && off < 0.2f ? 0 : 1;
}
