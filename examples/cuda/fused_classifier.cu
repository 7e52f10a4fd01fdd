/* A drop-in for trainers in the manner of llm.c: cross entropy and its gradient in place, one call a micro-batch.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/fused_classifier.cu xdistill_cuda.cu -o classifier
 *
 * fused_classifier has the argument list that such trainers use; what the library needs in addition is created once,
 * by classifier_create. main compares it with a plain loop. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the function: 60 lines ---- */

/* Such trainers clear the losses before the first micro-batch of a step, and each micro-batch adds its own. */
__global__ static void add_losses(const float *from, float *losses, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) losses[i] += from[i];
}

typedef struct classifier {
    xd_ctx *ctx;
    xd_cuda *gpu;
    xd_vocab *vocab;
    void *workspace; /* on the device, like all below */
    size_t workspace_bytes;
    xd_loss_report *report;
    float *row_loss; /* of one micro-batch */
} classifier;

static bool classifier_create(classifier *c, int rows, int vocabulary) {
    memset(c, 0, sizeof *c);
    c->workspace_bytes = (size_t)rows * 2048 + 65536;
    return xd_ctx_create(NULL, &c->ctx) == XD_OK && xd_cuda_create(c->ctx, NULL, &c->gpu) == XD_OK &&
           xd_vocab_create_even(c->ctx, NULL, vocabulary, &c->vocab) == XD_OK &&
           cudaMalloc((void **)&c->workspace, c->workspace_bytes) == cudaSuccess &&
           cudaMalloc((void **)&c->report, sizeof *c->report) == cudaSuccess &&
           cudaMalloc((void **)&c->row_loss, (size_t)rows * sizeof *c->row_loss) == cudaSuccess &&
           cudaMemset(c->report, 0, sizeof *c->report) == cudaSuccess;
}

static void classifier_destroy(classifier *c) {
    cudaFree(c->row_loss), cudaFree(c->report), cudaFree(c->workspace);
    xd_vocab_destroy(c->vocab);
    xd_cuda_destroy(c->gpu);
    xd_ctx_destroy(c->ctx);
}

/* logits [B * T, P], V of them true, become dloss times their gradient; losses [B * T]: the loss of each row is added. What
 * such trainers do not have: labels and logits that are not fit to be used give a zero gradient and a finding in the
 * report, and -100 is a label that does not count. */
static bool fused_classifier(classifier *c, void *logits, xd_dtype dtype, float *losses, float dloss, const int *targets,
                             int B, int T, int V, int P, bool write_dlogits, cudaStream_t stream) {
    xd_loss_desc desc = {};
    cudaLaunchConfig_t launch = {};
    xd_ctx_set_stream(c->ctx, stream);
    desc.student = { logits, dtype, (int64_t)B * T, V, P };
    if (write_dlogits) desc.common.gradient = { logits, dtype, (int64_t)B * T, P, P }; /* the padding becomes zero */
    desc.common.labels = { targets, XD_DTYPE_I32 };
    desc.vocab = c->vocab;
    desc.hard_weight = 1.0;
    desc.common.row_loss = c->row_loss;
    desc.common.denominator_value = 1.0 / (double)dloss;
    desc.common.status = &c->report->status;
    desc.common.workspace = c->workspace;
    desc.common.workspace_bytes = c->workspace_bytes;
    launch.gridDim = dim3((unsigned)(B * T + 255) / 256), launch.blockDim = dim3(256), launch.stream = stream;
    return xd_loss(c->ctx, &desc, &c->report->values) == XD_OK &&
           cudaLaunchKernelEx(&launch, add_losses, (const float *)c->row_loss, losses, B * T) == cudaSuccess;
}

/* ---- the comparison ---- */

enum { B = 4, T = 9, V = 301, P = 304, ROWS = B * T, MICRO_BATCHES = 2 };

/* The largest error of losses and gradients against double arithmetic. */
static double worst_error(const float *before, const int *targets, float dloss, const float *losses, const float *after) {
    double worst = 0.0;
    for (int r = 0; r < ROWS; r++) {
        double max = -HUGE_VAL, sum = 0.0;
        for (int v = 0; v < V; v++) max = fmax(max, before[r * P + v]);
        for (int v = 0; v < V; v++) sum += exp(before[r * P + v] - max);
        worst = fmax(worst, fabs(losses[r] - MICRO_BATCHES * (log(sum) + max - before[r * P + targets[r]])));
        for (int v = 0; v < P; v++) {
            const double p = v < V ? exp(before[r * P + v] - max) / sum : 0.0;
            worst = fmax(worst, fabs(after[r * P + v] - dloss * (p - (v == targets[r] ? 1.0 : 0.0))));
        }
    }
    return worst;
}

int main(void) {
    static float before[ROWS * P], after[ROWS * P], losses[ROWS];
    int targets[ROWS], *d_targets = NULL;
    float *d_logits = NULL, *d_losses = NULL;
    classifier c;
    xd_loss_report report;
    const float dloss = 1.0f / ROWS;
    for (int i = 0; i < ROWS * P; i++) before[i] = 5.0f * sinf(0.37f * (float)i);
    for (int r = 0; r < ROWS; r++) targets[r] = (7 * r) % V;
    if (cudaMalloc((void **)&d_logits, sizeof before) || cudaMalloc((void **)&d_losses, sizeof losses) ||
        cudaMalloc((void **)&d_targets, sizeof targets))
        return printf("there is no GPU, or no room on it\n"), 0;
    cudaMemcpy(d_logits, before, sizeof before, cudaMemcpyHostToDevice);
    cudaMemcpy(d_targets, targets, sizeof targets, cudaMemcpyHostToDevice);
    cudaMemset(d_losses, 0, sizeof losses);
    bool ok = classifier_create(&c, ROWS, V);
    for (int i = 1; i <= MICRO_BATCHES; i++) /* of the same logits, which the last of them turns into gradients */
        ok = ok && fused_classifier(&c, d_logits, XD_DTYPE_F32, d_losses, dloss, d_targets, B, T, V, P,
                                    i == MICRO_BATCHES, NULL);
    ok = ok && xd_read(c.ctx, &report, c.report, sizeof report) == XD_OK && xd_status_check(c.ctx, &report.status) == XD_OK;
    cudaMemcpy(after, d_logits, sizeof after, cudaMemcpyDeviceToHost);
    cudaMemcpy(losses, d_losses, sizeof losses, cudaMemcpyDeviceToHost);
    const double worst = ok ? worst_error(before, targets, dloss, losses, after) : HUGE_VAL;
    printf("largest error against a plain loop: %.2g\n", worst);
    if (!ok && c.ctx) printf("%s\n", xd_last_error(c.ctx)->message);
    classifier_destroy(&c);
    cudaFree(d_targets), cudaFree(d_losses), cudaFree(d_logits);
    return worst < 1e-5 ? 0 : 1;
}
