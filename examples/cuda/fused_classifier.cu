/* A drop-in for trainers in the manner of llm.c: cross entropy and its gradient in place, one call a micro-batch.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/fused_classifier.cu xdistill_cuda.cu -o classifier
 *
 * fused_classifier has such trainers' arguments; classifier_create makes once what the library needs besides. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>

/* Such trainers clear the losses before the first micro-batch of a step, and each micro-batch adds its own. */
__global__ static void add_losses(const float *from, float *losses, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) losses[i] += from[i];
}

typedef struct classifier {
    xd_ctx *ctx;
    xd_cuda *gpu;
    xd_vocab *vocab;
    void *workspace; /* on the device: what a loss takes, then what follows */
    size_t workspace_bytes;
    xd_loss_report *report;
    float *row_loss; /* of one micro-batch */
} classifier;

static bool classifier_create(classifier *c, int rows, int vocabulary) {
    c->workspace_bytes = (size_t)rows * 2048 + 65536;
    const size_t all = c->workspace_bytes + sizeof *c->report + (size_t)rows * sizeof *c->row_loss;
    if (cudaMalloc((void **)&c->workspace, all) || cudaMemset(c->workspace, 0, all)) return false;
    c->report = (xd_loss_report *)((char *)c->workspace + c->workspace_bytes), c->row_loss = (float *)(c->report + 1);
    return xd_ctx_create(NULL, &c->ctx) == XD_OK && xd_cuda_create(c->ctx, NULL, &c->gpu) == XD_OK &&
           xd_vocab_create_even(c->ctx, NULL, vocabulary, &c->vocab) == XD_OK;
}

static void classifier_destroy(classifier *c) {
    xd_vocab_destroy(c->vocab), xd_cuda_destroy(c->gpu), xd_ctx_destroy(c->ctx), cudaFree(c->workspace);
}

/* logits [B * T, P], V of them true, become dloss times their gradient; each row's loss is added to losses [B * T]. Labels
 * and logits that are not fit to be used give a zero gradient and a finding in the report; -100 is a label that does not
 * count. */
static bool fused_classifier(classifier *c, void *logits, xd_dtype dtype, float *losses, float dloss, const int *targets,
                             int B, int T, int V, int P, bool write_dlogits, cudaStream_t stream) {
    xd_loss_desc desc = {};
    cudaLaunchConfig_t launch = {};
    xd_ctx_set_stream(c->ctx, stream);
    desc.student = { logits, dtype, (int64_t)B * T, V, P };
    if (write_dlogits) desc.common.gradient = { logits, dtype, (int64_t)B * T, P, P }; /* the padding becomes zero */
    desc.common.labels = { targets, XD_DTYPE_I32 };
    desc.vocab = c->vocab, desc.hard_weight = 1.0;
    desc.common.denominator_value = 1.0 / (double)dloss;
    desc.common.row_loss = c->row_loss, desc.common.status = &c->report->status;
    desc.common.workspace = c->workspace, desc.common.workspace_bytes = c->workspace_bytes;
    launch.gridDim = dim3((unsigned)(B * T + 255) / 256), launch.blockDim = dim3(256), launch.stream = stream;
    return xd_loss(c->ctx, &desc, &c->report->values) == XD_OK &&
           cudaLaunchKernelEx(&launch, add_losses, (const float *)c->row_loss, losses, B * T) == cudaSuccess;
}

enum { B = 4, T = 9, V = 301, P = 304, ROWS = B * T, MICRO_BATCHES = 2 };

typedef struct memory { float logits[ROWS * P], losses[ROWS]; int targets[ROWS]; } memory; /* logits become gradients */

/* The largest error of losses and gradients against double arithmetic. */
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
            worst = fmax(worst, fabs(after->logits[r * P + v] - dloss * (p - (v == target ? 1.0 : 0.0))));
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
    if (cudaMalloc((void **)&d, sizeof *d)) return printf("there is no GPU, or no room on it\n"), 0;
    cudaMemcpy(d, &before, sizeof before, cudaMemcpyHostToDevice);
    bool ok = classifier_create(&c, ROWS, V);
    for (int i = 1; i <= MICRO_BATCHES; i++) /* of the same logits, which the last of them turns into gradients */
        ok = ok && fused_classifier(&c, d->logits, XD_DTYPE_F32, d->losses, dloss, d->targets, B, T, V, P, i == MICRO_BATCHES, NULL);
    ok = ok && xd_read(c.ctx, &report, c.report, sizeof report) == XD_OK && xd_status_check(c.ctx, &report.status) == XD_OK;
    cudaMemcpy(&after, d, sizeof after, cudaMemcpyDeviceToHost);
    const double worst = ok ? worst_error(&before, &after, dloss) : HUGE_VAL;
    printf("largest error against a plain loop: %.2g\n", worst);
    if (!ok && c.ctx) printf("%s\n", xd_last_error(c.ctx)->message);
    classifier_destroy(&c), cudaFree(d);
    return worst < 1e-5 ? 0 : 1;
}
