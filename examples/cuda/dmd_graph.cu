/* Distribution matching on a GPU, captured once into a CUDA graph and replayed at each step.
 * The graph holds the noise, the forward process, both losses and the updates, between the calls
 * of the networks. It does not allocate, does not wait, and reads nothing from the host.
 * Each network is a formula with one vector. The student shifts noise by `student`. The teacher
 * and the fake score average their means, `data` and `fake`, with an estimate from x_t.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/dmd_graph.cu xdistill_cuda.cu -o dmd_graph */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>

enum { SAMPLES = 16, ELEMENTS = 32, ALL = SAMPLES * ELEMENTS, STEPS = 200 };

/* In device memory. `noise` is pure noise; x_t is the sum of samples x and their noise epsilon.
 * `forward` and `terms` are constant here; a graph reads their values when it runs. */
typedef struct state {
    double workspace[8192];
    float data[ELEMENTS], student[ELEMENTS], fake[ELEMENTS];
    float noise[ALL], x[ALL], epsilon[ALL], x_t[ALL];
    float clean_teacher[ALL], clean_fake[ALL], by_x[ALL], by_clean[ALL];
    xd_mix forward[SAMPLES];
    xd_denoise_term terms[SAMPLES];
    /* The graph counts steps itself, so that each replay draws other numbers. */
    int64_t step;
    xd_sample_values vsd, denoise;
    xd_status status;
} state;

__global__ static void generate(state *s) {
    const int at = (int)(blockIdx.x * ELEMENTS + threadIdx.x);
    s->x[at] = s->noise[at] + s->student[threadIdx.x];
}

__global__ static void predict(state *s) {
    const int i = (int)threadIdx.x, at = (int)blockIdx.x * ELEMENTS + i;
    const float rest = 1.0f - 0.5f * (float)s->forward[blockIdx.x].c0;
    s->clean_teacher[at] = 0.5f * s->x_t[at] + rest * s->data[i];
    s->clean_fake[at] = 0.5f * s->x_t[at] + rest * s->fake[i];
}

/* Gradient descent on both vectors, by the chain rule through samples and predictions. */
__global__ static void update(state *s) {
    const int i = (int)threadIdx.x;
    for (int b = 0; b < SAMPLES; b++) {
        const float d_clean = s->by_clean[b * ELEMENTS + i];
        s->student[i] -= 1.5f * s->by_x[b * ELEMENTS + i];
        s->fake[i] -= 4.0f * d_clean * (1.0f - 0.5f * (float)s->forward[b].c0);
    }
    if (i == 0) s->step++;
}

/* An error of a launch fails the capture too. */
static void launch(cudaStream_t stream, int blocks, void (*kernel)(state *), state *s) {
    const cudaLaunchConfig_t config = { dim3((unsigned)blocks), dim3(ELEMENTS), 0, stream };
    (void)cudaLaunchKernelEx(&config, kernel, s);
}

static xd_rows rows(const float *x) { return xd_rows_of(x, XD_DTYPE_F32, SAMPLES, ELEMENTS); }

/* Draws noise, generates samples, predicts them with noise, and learns from both losses. */
static xd_result train_step(xd_ctx *ctx, cudaStream_t stream, state *s) {
    xd_draw_desc draw = {};
    draw.step = &s->step;
    draw.random.stream = XD_STREAM_STUDENT_NOISE;
    draw.out = rows(s->noise);
    XD_TRY(xd_draw_rows(ctx, &draw));
    launch(stream, SAMPLES, generate, s);

    draw.random.stream = XD_STREAM_EPSILON;
    draw.out = rows(s->epsilon);
    XD_TRY(xd_draw_rows(ctx, &draw));

    const xd_mix_desc forward = { rows(s->x), rows(s->epsilon), rows(s->x_t), s->forward };
    XD_TRY(xd_mix_rows(ctx, &forward));
    launch(stream, SAMPLES, predict, s);

    xd_vsd_desc vsd = xd_vsd_defaults();
    vsd.generated = rows(s->x);
    vsd.teacher = rows(s->clean_teacher);
    vsd.fake = rows(s->clean_fake);
    vsd.gradient = rows(s->by_x);
    vsd.common.status = &s->status;
    vsd.common.workspace = s->workspace;
    vsd.common.workspace_bytes = sizeof s->workspace;
    XD_TRY(xd_vsd_loss(ctx, &vsd, &s->vsd));

    xd_denoise_desc fake = xd_denoise_defaults();
    fake.prediction = rows(s->clean_fake);
    fake.clean = rows(s->x);
    fake.noise = rows(s->epsilon);
    fake.gradient = rows(s->by_clean);
    fake.terms = s->terms;
    fake.common = vsd.common;
    XD_TRY(xd_denoise_loss(ctx, &fake, &s->denoise));
    launch(stream, 1, update, s);
    return XD_OK;
}

/* Fills the state, captures a step, and replays it. */
static xd_result run(xd_ctx *ctx, cudaStream_t stream, state *host, state *s) {
    const xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    const xd_denoise_form clean = {}; /* predictions and the residual are x0 */
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    for (int i = 0; i < ELEMENTS; i++) host->data[i] = sinf(0.2f * (float)i);
    for (int b = 0; b < SAMPLES; b++) {
        const double t = 0.1 + 0.8 * b / SAMPLES;
        XD_TRY(xd_noise_mix(ctx, &schedule, t, &host->forward[b]));
        XD_TRY(xd_denoise_term_at(ctx, &schedule, &clean, t, &host->terms[b]));
    }
    cudaMemcpy(s, host, sizeof *host, cudaMemcpyHostToDevice);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    XD_TRY(train_step(ctx, stream, s));
    bool ok = !cudaStreamEndCapture(stream, &graph) && !cudaGraphInstantiate(&replay, graph, 0);
    for (int i = 0; i < STEPS && ok; i++) ok = !cudaGraphLaunch(replay, stream);
    XD_REQUIRE(ctx, ok, XD_ERROR_DEVICE, "the graph was not captured or launched");
    XD_TRY(xd_read(ctx, host, s, sizeof *host));
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    return xd_status_check(ctx, &host->status);
}

int main(void) {
    static state host, *s;
    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    cudaStream_t stream = NULL;
    if (cudaMalloc((void **)&s, sizeof *s) || cudaStreamCreate(&stream)) {
        printf("there is no GPU, or no room on it\n");
        return 0;
    }
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    xd_ctx_set_stream(ctx, stream);
    if (xd_cuda_create(ctx, NULL, &gpu) != XD_OK || run(ctx, stream, &host, s) != XD_OK) {
        fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
        return 1;
    }

    float off = 0.0f;
    for (int i = 0; i < ELEMENTS; i++) off = fmaxf(off, fabsf(host.student[i] - host.data[i]));
    printf("%d steps: losses %.4f and %.4f, the student is off by %.3f at most\n", (int)host.step,
           host.vsd.loss, host.denoise.loss, off);
    xd_cuda_destroy(gpu);
    xd_ctx_destroy(ctx);
    cudaStreamDestroy(stream);
    cudaFree(s);
    return host.step == STEPS && off < 0.2f ? 0 : 1;
}
