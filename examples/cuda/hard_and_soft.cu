/* The loss of a distillation step: 0.9 of the KL from the teacher, plus 0.1 of the cross entropy
 * against the text. The batch has the sizes of small models: 16 rows of 128 tokens, 2048 columns.
 * The program makes the same call on the CPU and on a GPU, and compares the results.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/hard_and_soft.cu xdistill_cuda.cu -o hard_and_soft
 *
 * The context determines the device; the rest of the call is the same. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 16 * 128, VOCABULARY = 2048, LOGITS = TOKENS * VOCABULARY };

/* A batch and the results of the loss. The gradient overwrites `student`. */
typedef struct batch {
    float student[LOGITS], teacher[LOGITS];
    int64_t label[TOKENS];
    xd_loss_report report;
} batch;

static void fill(batch *b) {
    for (int64_t i = 0; i < LOGITS; i++) {
        b->student[i] = 3.0f * sinf(0.013f * (float)(i % 90001));
        b->teacher[i] = 4.0f * sinf(0.013f * (float)(i % 90001) + 0.4f);
    }
    for (int64_t t = 0; t < TOKENS; t++)
        b->label[t] = t % 50 ? 37 * t % VOCABULARY : XD_IGNORE_INDEX;
}

/* The batch is in the memory of the context's device. */
static xd_result distill(xd_ctx *ctx, batch *b) {
    xd_vocab *vocab = NULL;
    xd_loss_desc desc = {};
    desc.student = { b->student, XD_DTYPE_F32, TOKENS, VOCABULARY, 0 };
    desc.teacher = { b->teacher, XD_DTYPE_F32, TOKENS, VOCABULARY, 0 };
    desc.common.gradient = desc.student;
    desc.common.labels.data = b->label;
    desc.soft_weight = 0.9;
    desc.hard_weight = 0.1;
    desc.common.status = &b->report.status;
    const xd_vocab_desc split = { VOCABULARY };
    xd_result result = xd_vocab_create(ctx, &split, &vocab);
    desc.vocab = vocab;
    if (result == XD_OK) result = xd_loss(ctx, &desc, &b->report.values);
    xd_vocab_destroy(vocab);
    return result;
}

static xd_result distill_on_gpu(xd_ctx *ctx, batch *b, batch *on_device) {
    xd_cuda *gpu = NULL;
    xd_result result = xd_cuda_create(ctx, NULL, &gpu);
    if (result == XD_OK && cudaMemcpy(on_device, b, sizeof *b, cudaMemcpyHostToDevice))
        result = XD_ERROR_DEVICE;
    if (result == XD_OK) result = distill(ctx, on_device);
    if (result == XD_OK) result = xd_read(ctx, b, on_device, sizeof *b);
    xd_cuda_destroy(gpu);
    return result;
}

/* The largest difference of two gradients, relative to the largest gradient. */
static double difference(const batch *a, const batch *b) {
    double worst = 0.0, largest = 0.0;
    for (int64_t i = 0; i < LOGITS; i++) {
        worst = fmax(worst, fabs((double)a->student[i] - (double)b->student[i]));
        largest = fmax(largest, fabs((double)a->student[i]));
    }
    return worst / largest;
}

int main(void) {
    batch *host = (batch *)calloc(2, sizeof *host), *on_device = NULL;
    xd_ctx *ctx = NULL;
    if (!host || xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    if (cudaMalloc((void **)&on_device, sizeof *on_device)) {
        printf("there is no GPU, or no room on it\n");
        return 0;
    }

    fill(&host[0]);
    fill(&host[1]);
    xd_result result = distill(ctx, &host[0]);
    if (result == XD_OK) result = distill_on_gpu(ctx, &host[1], on_device);
    if (result != XD_OK) {
        fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
        return 1;
    }

    const xd_loss_values *cpu = &host[0].report.values, *gpu = &host[1].report.values;
    const double off = difference(&host[0], &host[1]);
    printf("on the CPU %.7f = 0.9 * %.7f + 0.1 * %.7f; on the GPU %.7f; "
           "gradient off by %.1e of the largest\n",
           cpu->loss, cpu->soft, cpu->hard, gpu->loss, off);
    const bool equal = fabs(cpu->loss - gpu->loss) < 1e-6 * cpu->loss && off < 1e-5;
    xd_ctx_destroy(ctx);
    cudaFree(on_device);
    free(host);
    return equal ? 0 : 1;
}
