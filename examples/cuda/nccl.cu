/* Several GPUs over NCCL, one process each: a student learns from teachers of which every rank has one.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/nccl.cu xdistill_cuda.cu -lnccl -o many
 *     (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >secret)
 *     export XDISTILL_SECRET_FILE=secret
 *     for rank in 0 1 2 3; do RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=4 ./many & done; wait
 *     build/xdrun -n 4 ./many                                        the same, when make build/xdrun has made it
 *
 * The variables are those that launchers set; without them there is one rank. The secret, without which nobody joins, is in a
 * file that only its user may read, or in XDISTILL_SECRET where the launcher hands variables on in private. The loss is the mean over the ranks of
 * KL(teacher_r || student), so the best student is the mean of the teachers, which main computes for comparison. Losses,
 * sums of gradients and optimizer steps follow one another on the stream; the host waits only for values it prints. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include "../../xdistill_nccl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { VOCABULARY = 1000, STEPS = 400 };

static float teacher_logit(int rank, int id) {
    return 3.0f * sinf(0.01f * (float)id + (float)rank);
}

/* The loss of the best student: the mean over the teachers of KL(teacher || mean of the teachers). */
static double best_loss(int ranks) {
    double *sum = (double *)calloc((size_t)ranks + 1, sizeof *sum), loss = 0.0;
    if (!sum) return (double)NAN;
    for (int r = 0; r < ranks; r++)
        for (int v = 0; v < VOCABULARY; v++) sum[r] += exp((double)teacher_logit(r, v));
    for (int v = 0; v < VOCABULARY; v++) {
        double mean = 0.0;
        for (int r = 0; r < ranks; r++) mean += exp((double)teacher_logit(r, v)) / sum[r] / ranks;
        for (int r = 0; r < ranks; r++) {
            const double p = exp((double)teacher_logit(r, v)) / sum[r];
            loss += p * log(p / mean) / ranks;
        }
    }
    free(sum);
    return loss;
}

/* This rank's GPU memory. */
typedef struct memory {
    float logits[VOCABULARY], gradient[VOCABULARY], teacher[VOCABULARY];
    xd_loss_report report;
} memory;

static xd_result train(xd_comm *world, xd_vocab *vocab, xd_optimizer *optimizer, memory *on_device, double *loss) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_loss_desc desc = {};
    xd_loss_report report;
    desc.student = { on_device->logits, XD_DTYPE_F32, 1, VOCABULARY, 0 };
    desc.teacher = { on_device->teacher, XD_DTYPE_F32, 1, VOCABULARY, 0 };
    desc.common.gradient = { on_device->gradient, XD_DTYPE_F32, 1, VOCABULARY, 0 };
    desc.vocab = vocab;
    desc.soft_weight = 1.0;
    desc.common.comm = world;
    desc.common.denominator_value = xd_comm_size(world);
    desc.common.status = &on_device->report.status;
    for (int step = 0; step < STEPS; step++) {
        XD_TRY(xd_loss(ctx, &desc, &on_device->report.values));
        XD_TRY(xd_all_reduce(world, on_device->gradient, on_device->gradient, VOCABULARY, XD_DTYPE_F32, XD_SUM));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
    }
    XD_TRY(xd_read(ctx, &report, &on_device->report, sizeof report));
    XD_TRY(xd_status_check(ctx, &report.status));
    *loss = report.values.loss;
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, memory *on_device, double *loss) {
    static memory start; /* zeros: every token equally likely */
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab = NULL;
    xd_optimizer *optimizer = NULL;
    xd_param param = {};
    xd_optimizer_desc desc = {};
    for (int v = 0; v < VOCABULARY; v++) start.teacher[v] = teacher_logit(xd_comm_rank(world), v);
    const bool copied = cudaMemcpy(on_device, &start, sizeof start, cudaMemcpyHostToDevice) == cudaSuccess;
    XD_TRY(xd_agree(world, copied ? XD_OK : XD_ERROR_DEVICE));
    param.name = "logits";
    param.value = on_device->logits;
    param.gradient = on_device->gradient;
    param.dtype = XD_DTYPE_F32;
    param.count = VOCABULARY;
    desc = xd_adamw_defaults(&param, 1);
    desc.learning_rate = 0.05;
    desc.weight_decay = 0;
    xd_result result = xd_vocab_create_even(ctx, NULL, VOCABULARY, &vocab); /* each rank has all of it */
    if (result == XD_OK) result = xd_optimizer_create(ctx, &desc, &optimizer);
    if (result == XD_OK) result = train(world, vocab, optimizer, on_device, loss);
    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    return result;
}

static const char *variable(const char *name, const char *otherwise) {
    return getenv(name) ? getenv(name) : otherwise;
}

/* The secret of the ranks: the first line of a file with mode 600 or 400, or a variable; NULL when there is none. */
static const char *read_secret(char line[128]) {
    const char *path = getenv("XDISTILL_SECRET_FILE");
    struct stat status;
    if (!path) return getenv("XDISTILL_SECRET");
    FILE *file = fopen(path, "r");
    if (!file) return NULL;
    const bool is_private = fstat(fileno(file), &status) == 0 && (status.st_mode & 077) == 0;
    if (!is_private) fprintf(stderr, "others may read %s: chmod 600\n", path);
    const char *read = is_private ? fgets(line, 128, file) : NULL;
    fclose(file);
    if (read) line[strcspn(line, "\r\n")] = 0;
    return read;
}

int main(void) {
    char line[128];
    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    xd_comm *world = NULL;
    memory *on_device = NULL;
    double loss = (double)NAN;
    xd_nccl_desc desc = {};
    desc.rank = atoi(variable("RANK", "0"));
    desc.size = atoi(variable("WORLD_SIZE", "1"));
    desc.host = variable("MASTER_ADDR", "127.0.0.1");
    desc.port = variable("XDISTILL_PORT", "29511"); /* torchrun itself listens on MASTER_PORT */
    desc.secret = read_secret(line);
    if (cudaSetDevice(atoi(variable("LOCAL_RANK", "0"))) || cudaMalloc((void **)&on_device, sizeof *on_device))
        return printf("there is no GPU, or no room on it\n"), 0;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    xd_result result = xd_cuda_create(ctx, NULL, &gpu);
    if (result == XD_OK) result = xd_comm_nccl(ctx, &desc, &world);
    if (result == XD_OK) result = run_rank(world, on_device, &loss);
    if (result != XD_OK)
        fprintf(stderr, "rank %d: %s\n", desc.rank, xd_last_error(ctx)->message);
    else if (desc.rank == 0)
        printf("%d GPU%s: %.6f nats after %d steps, %.6f at best\n", desc.size, desc.size == 1 ? "" : "s", loss, STEPS,
               best_loss(desc.size));
    xd_comm_destroy(world);
    xd_cuda_destroy(gpu);
    xd_ctx_destroy(ctx);
    cudaFree(on_device);
    return result == XD_OK && loss - best_loss(desc.size) < 1e-3 ? 0 : 1;
}
