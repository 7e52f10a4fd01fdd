/* A drop-in for trainers like llm.c: one call for each micro-batch computes the cross entropy, and
 * writes its gradient over the logits.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/fused_classifier.cu xdistill_cuda.cu -o classifier
 *
 * fused_classifier takes the arguments of such trainers. classifier_create allocates once what
 * the library needs in addition. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>

/* Such trainers set the losses to zero before a step, and each micro-batch adds its losses. */
__global__ static void add_losses(const float *from, float *losses, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) losses[i] += from[i];
}

/* One device allocation holds the workspace, the report and the losses of one micro-batch. */
typedef struct classifier {
    xd_ctx *ctx;
    xd_cuda *gpu;
    xd_vocab *vocab;
    void *workspace;
    size_t workspace_bytes;
    xd_loss_report *report;
    float *row_loss;
} classifier;

static bool classifier_create(classifier *c, int rows, int vocabulary) {
    c->workspace_bytes = (size_t)rows * 2048 + 65536;
    const size_t all = c->workspace_bytes + sizeof *c->report + (size_t)rows * sizeof *c->row_loss;
    if (cudaMalloc((void **)&c->workspace, all) || cudaMemset(c->workspace, 0, all)) return false;
    c->report = (xd_loss_report *)((char *)c->workspace + c->workspace_bytes);
    c->row_loss = (float *)(c->report + 1);
    const xd_vocab_desc split = { vocabulary };
    return xd_ctx_create(NULL, &c->ctx) == XD_OK &&
           xd_cuda_create(c->ctx, NULL, &c->gpu) == XD_OK &&
           xd_vocab_create(c->ctx, &split, &c->vocab) == XD_OK;
}

static void classifier_destroy(classifier *c) {
    xd_vocab_destroy(c->vocab);
    xd_cuda_destroy(c->gpu);
    xd_ctx_destroy(c->ctx);
    cudaFree(c->workspace);
}

/* Replaces logits [B * T, P] by dloss times their gradient, and adds the loss of each row to
 * losses [B * T]. V of the P columns are true; the gradient of the padding is zero. An
 * invalid label or logit gives a zero gradient and an entry in the report. The label -100 is
 * ignored. */
static bool fused_classifier(classifier *c, void *logits, xd_dtype dtype, float *losses,
                             float dloss, const int *targets, int B, int T, int V, int P,
                             bool write_dlogits, cudaStream_t stream) {
    xd_loss_desc desc = {};
    desc.student = { logits, dtype, (int64_t)B * T, V, P };
    desc.vocab = c->vocab;
    desc.hard_weight = 1.0;
    desc.common.labels = { targets, XD_DTYPE_I32 };
    if (write_dlogits) desc.common.gradient = { logits, dtype, (int64_t)B * T, P, P };
    desc.common.denominator_value = 1.0 / (double)dloss;
    desc.common.row_loss = c->row_loss;
    desc.common.status = &c->report->status;
    desc.common.workspace = c->workspace;
    desc.common.workspace_bytes = c->workspace_bytes;
    xd_ctx_set_stream(c->ctx, stream);
    if (xd_loss(c->ctx, &desc, &c->report->values) != XD_OK) return false;

    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)(B * T + 255) / 256);
    launch.blockDim = dim3(256);
    launch.stream = stream;
    const float *row_loss = c->row_loss;
    return cudaLaunchKernelEx(&launch, add_losses, row_loss, losses, B * T) == cudaSuccess;
}

enum { B = 4, T = 9, V = 301, P = 304, ROWS = B * T, MICRO_BATCHES = 2 };

typedef struct memory {
    float logits[ROWS * P], losses[ROWS];
    int targets[ROWS];
} memory;

/* The largest error of losses and gradients against double arithmetic. The gradients replaced
 * the logits in `after`. */
static double worst_error(const memory *before, const memory *after, float dloss) {
    double worst = 0.0;
    for (int r = 0; r < ROWS; r++) {
        const float *x = before->logits + r * P;
        const int target = before->targets[r];
        double sum = 0.0;
        for (int v = 0; v < V; v++) sum += exp((double)x[v]);
        worst = fmax(worst, fabs(after->losses[r] - MICRO_BATCHES * (log(sum) - x[target])));
        for (int v = 0; v < P; v++) {
            const double p = v < V ? exp((double)x[v]) / sum : 0.0;
            const double label = v == target ? 1.0 : 0.0;
            worst = fmax(worst, fabs(after->logits[r * P + v] - dloss * (p - label)));
        }
    }
    return worst;
}

int main(void) {
    static memory before, after, *d;
    classifier c = {};
    xd_loss_report report;
    const float dloss = 1.0f / ROWS;
    for (int i = 0; i < ROWS * P; i++) before.logits[i] = 5.0f * sinf(0.37f * (float)i);
    for (int r = 0; r < ROWS; r++) before.targets[r] = (7 * r) % V;
    if (cudaMalloc((void **)&d, sizeof *d)) {
        printf("there is no GPU, or no room on it\n");
        return 0;
    }
    cudaMemcpy(d, &before, sizeof before, cudaMemcpyHostToDevice);

    /* All micro-batches have the same logits, so only the last one may overwrite them. */
    bool ok = classifier_create(&c, ROWS, V);
    for (int i = 1; i <= MICRO_BATCHES; i++)
        ok = ok && fused_classifier(&c, d->logits, XD_DTYPE_F32, d->losses, dloss, d->targets,
                                    B, T, V, P, i == MICRO_BATCHES, NULL);
    ok = ok && xd_read(c.ctx, &report, c.report, sizeof report) == XD_OK;
    ok = ok && xd_status_check(c.ctx, &report.status) == XD_OK;
    cudaMemcpy(&after, d, sizeof after, cudaMemcpyDeviceToHost);

    const double worst = ok ? worst_error(&before, &after, dloss) : HUGE_VAL;
    printf("largest error against a plain loop: %.2g\n", worst);
    if (!ok && c.ctx) printf("%s\n", xd_last_error(c.ctx)->message);
    classifier_destroy(&c);
    cudaFree(d);
    return worst < 1e-5 ? 0 : 1;
}
