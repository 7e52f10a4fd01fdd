/* One process uses all of its GPUs, with a thread for each. The vocabulary of a cross entropy is
 * sharded over the GPUs.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/gpus_of_one_process.cu xdistill_cuda.cu -o gpus -lpthread
 *
 * Ranks are threads and may share a GPU, so one GPU has two ranks. No rank holds a whole row of
 * logits. The program compares the loss with one computed from whole rows. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { POSITIONS = 8, VOCABULARY = 1001 };

static float logit(int64_t position, int64_t id) {
    return 4.0f * cosf((float)(position + 7 * id));
}

/* The label of position t is id 100 t. */
static double expected_loss(void) {
    double loss = 0.0;
    for (int64_t t = 0; t < POSITIONS; t++) {
        double sum = 0.0;
        for (int64_t v = 0; v < VOCABULARY; v++) sum += exp((double)logit(t, v));
        loss += (log(sum) - (double)logit(t, 100 * t)) / POSITIONS;
    }
    return loss;
}

/* Memory on a rank's GPU. `logits` has room for all columns; a rank uses those of its shard. */
typedef struct memory {
    float logits[POSITIONS * VOCABULARY];
    int64_t label[POSITIONS];
    xd_loss_report report;
} memory;

/* Sets *loss to the mean over all positions, the same on every rank. */
static xd_result compute(xd_comm *world, xd_vocab *vocab, memory *on_device, double *loss) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t columns = info.end - info.begin;
    memory *start = (memory *)calloc(1, sizeof *start);
    xd_loss_desc desc = {};
    xd_loss_report report;
    /* If one rank has no memory, all ranks return the error. */
    XD_TRY(xd_agree(world, start ? XD_OK : XD_ERROR_MEMORY));
    for (int64_t t = 0; t < POSITIONS; t++) {
        start->label[t] = 100 * t;
        for (int64_t c = 0; c < columns; c++)
            start->logits[t * columns + c] = logit(t, info.begin + c);
    }
    const cudaError_t copied = cudaMemcpy(on_device, start, sizeof *start, cudaMemcpyHostToDevice);
    free(start);
    XD_TRY(xd_agree(world, copied == cudaSuccess ? XD_OK : XD_ERROR_DEVICE));

    desc.student = { on_device->logits, XD_DTYPE_F32, POSITIONS, columns, 0 };
    desc.common.labels.data = on_device->label;
    desc.vocab = vocab;
    desc.hard_weight = 1.0;
    desc.common.status = &on_device->report.status;
    XD_TRY(xd_loss(ctx, &desc, &on_device->report.values));
    XD_TRY(xd_read(ctx, &report, &on_device->report, sizeof report));
    XD_TRY(xd_status_check(ctx, &report.status));
    *loss = report.values.loss;
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *losses) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_cuda *gpu = NULL;
    xd_vocab *vocab = NULL;
    const xd_vocab_desc split = { VOCABULARY, world };
    memory *on_device = NULL;
    int devices = 0;
    bool ready = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    ready = ready && cudaSetDevice(xd_comm_rank(world) % devices) == cudaSuccess &&
            cudaMalloc((void **)&on_device, sizeof *on_device) == cudaSuccess;
    xd_result result = ready ? xd_cuda_create(ctx, NULL, &gpu) : XD_ERROR_DEVICE;
    result = xd_agree(world, result);
    if (result == XD_OK) result = xd_vocab_create(ctx, &split, &vocab);
    double *loss = (double *)losses + xd_comm_rank(world);
    if (result == XD_OK) result = compute(world, vocab, on_device, loss);

    xd_vocab_destroy(vocab);
    xd_cuda_destroy(gpu);
    cudaFree(on_device);
    return result;
}

int main(void) {
    enum { MOST = 16 };
    double losses[MOST] = { 0 };
    xd_error error;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("there is no GPU\n");
        return 0;
    }
    const int ranks = devices < 2 ? 2 : devices < MOST ? devices : MOST;
    if (xd_run_threads(ranks, NULL, run_rank, losses, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }
    printf("%d ranks on %d GPU%s: cross entropy %.7f, expected %.7f\n", ranks, devices,
           devices == 1 ? "" : "s", losses[0], expected_loss());
    for (int r = 0; r < ranks; r++)
        if (losses[r] != losses[0]) return 1;
    return fabs(losses[0] - expected_loss()) < 1e-6 ? 0 : 1;
}
