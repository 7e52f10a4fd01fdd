/* The KL divergence between a teacher's and a student's next-token distributions on a GPU, with
 * its gradient.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/kl_from_logits.cu xdistill_cuda.cu -o kl
 *
 * The gradient replaces the student's logits, so the loss allocates no memory of their size.
 * The host does not wait for the GPU before xd_read. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { POSITIONS = 64, VOCABULARY = 4000 };

int main(void) {
    const size_t count = (size_t)POSITIONS * VOCABULARY, bytes = count * sizeof(float);
    float *logits = (float *)malloc(2 * bytes), *device = NULL;
    /* A report holds values and status, so that both need one allocation and one read. */
    xd_loss_report *report = NULL, out;
    for (size_t i = 0; i < 2 * count; i++)
        logits[i] = sinf(0.001f * (float)i) * (i < count ? 3.0f : 4.0f);
    if (cudaMalloc((void **)&device, 2 * bytes) || cudaMalloc((void **)&report, sizeof *report)) {
        printf("there is no GPU, or no room on it\n");
        return 0;
    }
    cudaMemcpy(device, logits, 2 * bytes, cudaMemcpyHostToDevice);
    cudaMemset(report, 0, sizeof *report);

    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    xd_vocab *vocab = NULL;
    xd_loss_desc desc = {};
    const xd_vocab_desc split = { VOCABULARY };
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    bool ok = xd_cuda_create(ctx, NULL, &gpu) == XD_OK;
    ok = ok && xd_vocab_create(ctx, &split, &vocab) == XD_OK;

    desc.student = { device, XD_DTYPE_F32, POSITIONS, VOCABULARY, 0 };
    desc.teacher = { device + count, XD_DTYPE_F32, POSITIONS, VOCABULARY, 0 };
    desc.common.gradient = desc.student;
    desc.soft_weight = 1.0;
    desc.temperature = 2.0;
    desc.vocab = vocab;
    desc.common.status = &report->status;
    ok = ok && xd_loss(ctx, &desc, &report->values) == XD_OK;
    ok = ok && xd_read(ctx, &out, report, sizeof out) == XD_OK;
    /* This call fails if a logit is NaN. */
    ok = ok && xd_status_check(ctx, &out.status) == XD_OK;

    if (ok) printf("KL over %d positions: %.6f nats\n", (int)POSITIONS, out.values.loss);
    if (!ok) printf("%s\n", xd_last_error(ctx)->message);
    xd_vocab_destroy(vocab);
    xd_cuda_destroy(gpu);
    xd_ctx_destroy(ctx);
    cudaFree(report);
    cudaFree(device);
    free(logits);
    return ok ? 0 : 1;
}
