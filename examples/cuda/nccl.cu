/* Several GPUs over NCCL, with one process for each. Each rank has a teacher, and one student
 * learns from all teachers.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/nccl.cu xdistill_cuda.cu -lnccl -o many
 *     (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >secret)
 *     XDISTILL_SECRET_FILE=secret build/xdrun -n 4 ./many
 *
 * torchrun, mpirun and srun start it too; ./many alone is one rank. A process joins only with the
 * secret, from a file that only its user may read. XDISTILL_SECRET holds it instead if the launcher
 * passes variables in private. The loss is the mean over ranks of KL(teacher_r || student), so the
 * best student is the mean of the teachers. All operations are ordered on the stream, and the host
 * waits only for the values it prints. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include "../../xdistill_nccl.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { VOCABULARY = 1000, STEPS = 400 };

/* Memory on a GPU. */
typedef struct memory {
    float logits[VOCABULARY], gradient[VOCABULARY], teacher[VOCABULARY];
    xd_loss_report report;
} memory;

/* A teacher's probabilities. They sum to 1, since the sine sums to 0 over its period. */
static double teacher(int rank, int id) {
    return (1.0 + 0.9 * sin(6.283185307179586 * (id + 37 * rank) / VOCABULARY)) / VOCABULARY;
}

/* The loss of the best student: the mean of KL(teacher || mean of the teachers). */
static double best_loss(int ranks) {
    double loss = 0.0;
    for (int v = 0; v < VOCABULARY; v++) {
        double mean = 0.0;
        for (int r = 0; r < ranks; r++) mean += teacher(r, v) / ranks;
        for (int r = 0; r < ranks; r++) loss += teacher(r, v) * log(teacher(r, v) / mean) / ranks;
    }
    return loss;
}

/* The first line of XDISTILL_SECRET_FILE, whose mode must be 600 or 400. Without a file name, the
 * value of XDISTILL_SECRET. NULL if there is no secret. */
static const char *read_secret(char line[128]) {
    const char *path = getenv("XDISTILL_SECRET_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    struct stat status;
    if (!file) return path ? NULL : getenv("XDISTILL_SECRET");
    const bool is_private = fstat(fileno(file), &status) == 0 && (status.st_mode & 077) == 0;
    if (!is_private) fprintf(stderr, "others may read %s: chmod 600\n", path);
    const char *read = is_private ? fgets(line, 128, file) : NULL;
    fclose(file);
    if (read) line[strcspn(line, "\r\n")] = 0;
    return read;
}

/* Fills the GPU's memory. The student's logits are zero, so its tokens are equally likely. */
static xd_result fill(xd_comm *world, memory *gpu) {
    static memory start;
    for (int v = 0; v < VOCABULARY; v++)
        start.teacher[v] = logf((float)teacher(xd_comm_rank(world), v));
    const cudaError_t copied = cudaMemcpy(gpu, &start, sizeof start, cudaMemcpyHostToDevice);
    return xd_agree(world, copied ? XD_ERROR_DEVICE : XD_OK);
}

static xd_result train(xd_comm *world, memory *gpu, double *loss) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab;
    xd_optimizer *optimizer;
    xd_loss_report report;
    xd_loss_desc desc = {};
    XD_TRY(fill(world, gpu));
    const xd_param param = {
        "logits", gpu->logits, gpu->gradient, XD_DTYPE_F32, XD_DTYPE_F32, VOCABULARY
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.learning_rate = 0.05;
    adamw.weight_decay = 0;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));

    /* Each rank has the whole vocabulary. */
    const xd_vocab_desc split = { VOCABULARY };
    XD_TRY(xd_vocab_create(ctx, &split, &vocab));
    desc.student = xd_rows_of(gpu->logits, XD_DTYPE_F32, 1, VOCABULARY);
    desc.teacher = xd_rows_of(gpu->teacher, XD_DTYPE_F32, 1, VOCABULARY);
    desc.common.gradient = xd_rows_of(gpu->gradient, XD_DTYPE_F32, 1, VOCABULARY);
    desc.vocab = vocab;
    desc.soft_weight = 1.0;
    desc.common.comm = world;
    desc.common.denominator_value = xd_comm_size(world);
    desc.common.status = &gpu->report.status;
    for (int step = 0; step < STEPS; step++) {
        XD_TRY(xd_loss(ctx, &desc, &gpu->report.values));
        XD_TRY(xd_all_reduce(world, gpu->gradient, gpu->gradient, VOCABULARY, XD_DTYPE_F32,
                             XD_SUM));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
    }

    XD_TRY(xd_read(ctx, &report, &gpu->report, sizeof report));
    *loss = report.values.loss;
    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    return xd_status_check(ctx, &report.status);
}

int main(void) {
    char line[128];
    xd_ctx *ctx = NULL;
    xd_cuda *cuda = NULL;
    xd_comm *world = NULL;
    memory *gpu = NULL;
    double loss = HUGE_VAL;
    xd_launch_info place = {};
    xd_nccl_desc desc = {};
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    xd_result result = xd_launch_discover(ctx, &place);
    if (cudaSetDevice(place.local_rank) || cudaMalloc((void **)&gpu, sizeof *gpu)) {
        printf("there is no GPU, or no room on it\n");
        return 0;
    }

    desc.rank = place.rank;
    desc.size = place.world_size;
    desc.secret = read_secret(line);
    desc.host = place.master_address[0] ? place.master_address : "127.0.0.1";
    /* torchrun itself listens on MASTER_PORT, so this program has its own port. */
    desc.port = getenv("XDISTILL_PORT");
    if (desc.port == NULL) desc.port = "29511";
    if (result == XD_OK) result = xd_cuda_create(ctx, NULL, &cuda);
    if (result == XD_OK) result = xd_comm_nccl(ctx, &desc, &world);
    if (result == XD_OK) result = train(world, gpu, &loss);
    if (result != XD_OK) fprintf(stderr, "rank %d: %s\n", place.rank, xd_last_error(ctx)->message);
    if (place.rank == 0)
        printf("%d GPUs: %.6f nats after %d steps, %.6f at best\n", desc.size, loss, STEPS,
               best_loss(desc.size));

    xd_comm_destroy(world);
    xd_cuda_destroy(cuda);
    xd_ctx_destroy(ctx);
    cudaFree(gpu);
    return result == XD_OK && loss - best_loss(desc.size) < 1e-3 ? 0 : 1;
}
