/* A training step on several GPUs as one CUDA graph: both passes, the sum of the gradients over
 * NCCL, the optimizer and the new weights. Each GPU has a thread and a copy of the student.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/step_graph_nccl.cu xdistill_cuda.cu -lnccl -o step_graph
 *
 * Ranks cannot agree in a graph. So a step runs before the capture, and xd_parallel_publish after
 * the launches: it compares the copies, and returns TIMEOUT if a rank no longer launches. */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include "../../xdistill_nccl.h"
#include <stdio.h>

enum { VOCABULARY = 1000, STEPS = 300 };

typedef struct memory { /* on a GPU */
    double workspace[8192];
    float teacher[VOCABULARY];
    xd_loss_report report;
} memory;

typedef struct trainer {
    xd_comm *world;
    cudaStream_t stream;
    memory *gpu;
    xd_model *model;
    xd_param logits; /* the student's only weight */
    xd_parallel *parallel;
    xd_optimizer *optimizer;
    xd_vocab *vocab;
} trainer;

static xd_result make(xd_ctx *ctx, trainer *t) {
    const xd_model_desc model = {};
    const xd_init normal = { XD_INIT_NORMAL, 0.0f, 1.0f };
    const xd_weight_desc logits = { "logits", XD_DTYPE_F32, 1, { VOCABULARY }, 0, NULL, normal };
    const xd_vocab_desc whole = { VOCABULARY };
    const xd_ddp_desc ddp = { t->world };
    int64_t count;
    XD_TRY(xd_model_create(ctx, &model, &t->model));
    XD_TRY(xd_weight_add(xd_model_root(t->model), &logits, NULL));
    XD_TRY(xd_model_seal(t->model));
    XD_TRY(xd_ddp_create(t->model, &ddp, &t->parallel));
    XD_TRY(xd_parallel_params(t->parallel, 1, &t->logits, &count));
    xd_optimizer_desc adam = xd_adam_defaults(&t->logits, 1);
    adam.learning_rate = 0.05;
    XD_TRY(xd_optimizer_create(ctx, &adam, &t->optimizer));
    return xd_vocab_create(ctx, &whole, &t->vocab);
}

/* Minimizes KL(teacher || student). The teacher's tokens are equally likely. */
static xd_result train_step(xd_ctx *ctx, const trainer *t) {
    const xd_pass pass = { XD_PASS_BACKWARD };
    xd_block_view view;
    xd_loss_desc desc = {};
    XD_TRY(xd_block_begin(xd_model_root(t->model), pass, &view));
    desc.student = xd_rows_of(view.values[0], XD_DTYPE_F32, 1, VOCABULARY);
    desc.teacher = xd_rows_of(t->gpu->teacher, XD_DTYPE_F32, 1, VOCABULARY);
    desc.common.gradient = xd_rows_of(view.gradients[0], XD_DTYPE_F32, 1, VOCABULARY);
    desc.common.denominator_value = xd_comm_size(t->world);
    desc.common.comm = t->world;
    desc.common.workspace = t->gpu->workspace;
    desc.common.workspace_bytes = sizeof t->gpu->workspace;
    desc.vocab = t->vocab;
    desc.soft_weight = 1.0;
    desc.common.status = &t->gpu->report.status;
    XD_TRY(xd_loss(ctx, &desc, &t->gpu->report.values));
    XD_TRY(xd_block_end(xd_model_root(t->model)));
    XD_TRY(xd_parallel_reduce(t->parallel));
    XD_TRY(xd_optimizer_step(t->optimizer, NULL, NULL));
    return xd_parallel_publish(t->parallel);
}

static xd_result train(xd_ctx *ctx, const trainer *t, xd_loss_report *report) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    XD_TRY(train_step(ctx, t));
    cudaStreamBeginCapture(t->stream, cudaStreamCaptureModeThreadLocal);
    XD_TRY(train_step(ctx, t));
    bool ok = !cudaStreamEndCapture(t->stream, &graph) && !cudaGraphInstantiate(&replay, graph, 0);
    for (int i = 0; i < STEPS && ok; i++) ok = !cudaGraphLaunch(replay, t->stream);
    XD_TRY(xd_parallel_publish(t->parallel));
    ok = ok && !cudaGraphExecDestroy(replay) && !cudaGraphDestroy(graph);
    XD_REQUIRE(ctx, ok, XD_ERROR_DEVICE, "the graph was not captured or launched");
    XD_TRY(xd_read(ctx, report, &t->gpu->report, sizeof *report));
    return xd_status_check(ctx, &report->status);
}

static xd_result run_rank(xd_comm *threads, void *id) {
    xd_ctx *ctx = xd_comm_ctx(threads);
    xd_cuda *cuda = NULL;
    xd_loss_report report;
    trainer t = {};
    xd_nccl_desc desc = { xd_comm_rank(threads), xd_comm_size(threads), (ncclUniqueId *)id };
    desc.compare = 4; /* calls of the first step */
    const bool ready = !cudaSetDevice(desc.rank) && !cudaStreamCreate(&t.stream) &&
                       !cudaMalloc(&t.gpu, sizeof *t.gpu) && !cudaMemset(t.gpu, 0, sizeof *t.gpu);
    xd_ctx_set_stream(ctx, t.stream);
    XD_TRY(xd_agree(threads, ready ? xd_cuda_create(ctx, NULL, &cuda) : XD_ERROR_DEVICE));
    XD_TRY(xd_comm_nccl(ctx, &desc, &t.world));
    XD_TRY(make(ctx, &t));
    XD_TRY(train(ctx, &t, &report));
    if (desc.rank == 0) printf("%.1e nats after %d steps\n", report.values.loss, STEPS);
    xd_vocab_destroy(t.vocab);
    xd_optimizer_destroy(t.optimizer);
    xd_parallel_destroy(t.parallel);
    xd_model_destroy(t.model);
    xd_comm_destroy(t.world);
    xd_cuda_destroy(cuda);
    const bool freed = !cudaFree(t.gpu) && !cudaStreamDestroy(t.stream);
    return freed && report.values.loss < 1e-4 ? XD_OK : XD_ERROR_DATA;
}

int main(void) {
    ncclUniqueId id;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) || ncclGetUniqueId(&id)) return printf("there is no GPU\n"), 0;
    xd_error error;
    if (xd_run_threads(devices, NULL, run_rank, &id, &error) == XD_OK) return 0;
    return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
}
