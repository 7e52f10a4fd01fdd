/* A step of distribution matching on a GPU, captured into a CUDA graph once and replayed: noise, the forward process, both
 * losses and the updates between the calls of networks. Nothing in it allocates or waits, or comes from the host.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/dmd_graph.cu xdistill_cuda.cu -o dmd_graph
 *
 * The networks are formulas with one vector each. The student shifts noise by `student`; teacher and fake score take halfway
 * what x_t says of a clean sample, halfway their mean, `data` and `fake`. The student finds the data by these two alone. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>

enum { SAMPLES = 16, ELEMENTS = 32, ALL = SAMPLES * ELEMENTS, STEPS = 200 };
typedef struct state { /* on the device */
    double workspace[8192];
    float data[ELEMENTS], student[ELEMENTS], fake[ELEMENTS];
    float noise[ALL], x[ALL], epsilon[ALL], x_t[ALL]; /* pure noise; samples; their noise; the sum of both */
    float clean_teacher[ALL], clean_fake[ALL], by_x[ALL], by_clean[ALL];
    xd_mix forward[SAMPLES]; /* fixed here; a graph reads whatever stands here when it runs, and in what follows */
    xd_denoise_term terms[SAMPLES];
    int64_t step; /* numbers differ from replay to replay: the graph counts itself */
    xd_sample_values vsd, denoise;
    xd_status status;
} state;

__global__ static void generate(state *s) {
    const int at = (int)(blockIdx.x * ELEMENTS + threadIdx.x);
    s->x[at] = s->noise[at] + s->student[threadIdx.x];
}

__global__ static void predict(state *s) {
    const int i = (int)threadIdx.x, at = (int)blockIdx.x * ELEMENTS + i;
    const float half = 0.5f * s->x_t[at], rest = 1.0f - 0.5f * (float)s->forward[blockIdx.x].c0;
    s->clean_teacher[at] = half + rest * s->data[i];
    s->clean_fake[at] = half + rest * s->fake[i];
}

/* Both vectors against their gradients: the chain from samples and predictions to them. */
__global__ static void update(state *s) {
    const int i = (int)threadIdx.x;
    for (int b = 0; b < SAMPLES; b++) s->student[i] -= 1.5f * s->by_x[b * ELEMENTS + i];
    for (int b = 0; b < SAMPLES; b++) s->fake[i] -= 4.0f * s->by_clean[b * ELEMENTS + i] * (1.0f - 0.5f * (float)s->forward[b].c0);
    if (i == 0) s->step++;
}

static void launch(cudaStream_t stream, int blocks, void (*kernel)(state *), state *s) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks), config.blockDim = dim3(ELEMENTS), config.stream = stream;
    (void)cudaLaunchKernelEx(&config, kernel, s); /* an error is the capture's too */
}

static xd_rows rows(const float *x) { return xd_rows_of(x, XD_DTYPE_F32, SAMPLES, ELEMENTS); }

static xd_result step(xd_ctx *ctx, cudaStream_t stream, state *s) {
    xd_draw_desc noise = {}, epsilon = {};
    xd_mix_desc forward = {};
    xd_vsd_desc vsd = xd_vsd_defaults();
    xd_denoise_desc fake = xd_denoise_defaults();
    noise.random.stream = XD_STREAM_STUDENT_NOISE, noise.step = &s->step, noise.out = rows(s->noise);
    epsilon.random.stream = XD_STREAM_EPSILON, epsilon.step = &s->step, epsilon.out = rows(s->epsilon);
    forward.p = rows(s->x), forward.q = rows(s->epsilon), forward.out = rows(s->x_t), forward.mix = s->forward;
    vsd.generated = rows(s->x), vsd.teacher = rows(s->clean_teacher), vsd.fake = rows(s->clean_fake), vsd.gradient = rows(s->by_x);
    vsd.common.status = &s->status, vsd.common.workspace = s->workspace, vsd.common.workspace_bytes = sizeof s->workspace;
    fake.prediction = rows(s->clean_fake), fake.clean = rows(s->x), fake.noise = rows(s->epsilon), fake.gradient = rows(s->by_clean);
    fake.terms = s->terms, fake.common = vsd.common;
    XD_TRY(xd_draw_rows(ctx, &noise));
    launch(stream, SAMPLES, generate, s);
    XD_TRY(xd_draw_rows(ctx, &epsilon));
    XD_TRY(xd_mix_rows(ctx, &forward));
    launch(stream, SAMPLES, predict, s);
    XD_TRY(xd_vsd_loss(ctx, &vsd, &s->vsd));
    XD_TRY(xd_denoise_loss(ctx, &fake, &s->denoise));
    launch(stream, 1, update, s);
    return XD_OK;
}

static xd_result run(xd_ctx *ctx, cudaStream_t stream, state *host, state *s) {
    const xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    const xd_denoise_form clean = {}; /* predictions and the residual are x0 */
    cudaGraph_t graph = NULL;
    cudaGraphExec_t replay = NULL;
    for (int i = 0; i < ELEMENTS; i++) host->data[i] = sinf(0.2f * (float)i);
    for (int b = 0; b < SAMPLES; b++) XD_TRY(xd_noise_mix(ctx, &schedule, 0.1 + 0.8 * b / SAMPLES, &host->forward[b]));
    for (int b = 0; b < SAMPLES; b++) XD_TRY(xd_denoise_term_at(ctx, &schedule, &clean, 0.1 + 0.8 * b / SAMPLES, &host->terms[b]));
    cudaMemcpy(s, host, sizeof *host, cudaMemcpyHostToDevice);
    bool ok = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    XD_TRY(step(ctx, stream, s));
    ok = ok && cudaStreamEndCapture(stream, &graph) == cudaSuccess && cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess;
    for (int i = 0; i < STEPS && ok; i++) ok = cudaGraphLaunch(replay, stream) == cudaSuccess;
    XD_REQUIRE(ctx, ok, XD_ERROR_DEVICE, "the graph was not captured or launched");
    XD_TRY(xd_read(ctx, host, s, sizeof *host));
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
    return xd_status_check(ctx, &host->status);
}

int main(void) {
    static state host, *s;
    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    cudaStream_t stream = NULL;
    float off = 0.0f;
    if (cudaMalloc((void **)&s, sizeof *s) || cudaStreamCreate(&stream)) return printf("there is no GPU, or no room on it\n"), 0;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    xd_ctx_set_stream(ctx, stream);
    if (xd_cuda_create(ctx, NULL, &gpu) != XD_OK || run(ctx, stream, &host, s) != XD_OK)
        return fprintf(stderr, "%s\n", xd_last_error(ctx)->message), 1;
    for (int i = 0; i < ELEMENTS; i++) off = fmaxf(off, fabsf(host.student[i] - host.data[i]));
    printf("%d steps: losses %.4f and %.4f, the student is off by %.3f at most\n", (int)host.step, host.vsd.loss, host.denoise.loss, off);
    xd_cuda_destroy(gpu), xd_ctx_destroy(ctx), cudaStreamDestroy(stream), cudaFree(s);
    return host.step == STEPS && off < 0.2f ? 0 : 1;
}
