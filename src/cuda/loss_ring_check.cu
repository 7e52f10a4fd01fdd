/* xd_cuda_create compares each kernel of loss_ring.cu with the path that reads rows twice, on a few short rows: what a build, a
 * driver or a new GPU does to the ring shows before a user's first loss. */

enum { XDI_CUDA_TRIAL_ROWS = 3, XDI_CUDA_TRIAL_COLUMNS = 520, XDI_CUDA_TRIAL_STAGES = 2, XDI_CUDA_TRIAL_CHOICE = 1 };

/* In memory of the device. */
struct xdi_cuda_trial {
    alignas(16) float student[XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS];
    alignas(16) float teacher[XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS];
    alignas(16) float gradient[2][XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS]; /* by the ring, by two reads */
    xdi_cuda_ring_record record[XDI_CUDA_TRIAL_ROWS];
    xd_loss_row row[2][XDI_CUDA_TRIAL_ROWS];
    double row_scale[XDI_CUDA_TRIAL_ROWS];
    int64_t labels[XDI_CUDA_TRIAL_ROWS];
    int differs; /* a bit for each kind of each type */
};

/* Logits between -8 and 8 by a hash, rows whose first one does not count. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_trial_fill_kernel(xdi_cuda_trial *t, xd_dtype dtype) {
    const xd_rows x = { t->student, dtype, 1, XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS, 0 };
    const xd_rows y = { t->teacher, dtype, 1, XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS, 0 };
    for (int i = (int)threadIdx.x; i < XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS; i += XDI_CUDA_TEAM_BLOCK) {
        const uint32_t hash = (uint32_t)i * 2654435761u;
        xdi_cuda_set_element(x, 0, i, (float)(int)(hash >> 20) / 256.0f - 8.0f);
        xdi_cuda_set_element(y, 0, i, (float)(int)((hash ^ hash << 7) >> 20) / 256.0f - 8.0f);
    }
    if (threadIdx.x >= XDI_CUDA_TRIAL_ROWS) return;
    t->row_scale[threadIdx.x] = threadIdx.x == 0 ? 0.0 : 0.5 + (double)threadIdx.x;
    t->labels[threadIdx.x] = 100 + 150 * (int64_t)threadIdx.x;
}

static __device__ inline bool xdi_cuda_trial_near(double a, double b, double scale, double tolerance) {
    return fabs(a - b) <= tolerance * scale; /* false for NaN */
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_trial_compare_kernel(xdi_cuda_trial *t, xd_dtype dtype, int bit) {
    const int count = XDI_CUDA_TRIAL_ROWS * XDI_CUDA_TRIAL_COLUMNS;
    const xd_rows ring = { t->gradient[0], dtype, 1, count, 0 }, other = { t->gradient[1], dtype, 1, count, 0 };
    float largest = 0.0f;
    for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK)
        largest = fmaxf(largest, fabsf(xdi_cuda_element(other, 0, i)));
    largest = xdi_cuda_block_reduce(largest, 0.0f, xdi_cuda_larger());
    bool near = true;
    for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK)
        near = near && xdi_cuda_trial_near((double)xdi_cuda_element(ring, 0, i), (double)xdi_cuda_element(other, 0, i),
                                           (double)largest, dtype == XD_DTYPE_F32 ? 1e-5 : 0.01);
    for (int r = (int)threadIdx.x; r < XDI_CUDA_TRIAL_ROWS; r += XDI_CUDA_TEAM_BLOCK) {
        const xd_loss_row &a = t->row[0][r], &b = t->row[1][r];
        near = near && a.finding == b.finding && xdi_cuda_trial_near(a.hard, b.hard, 1.0 + fabs(b.hard), 1e-5) &&
               xdi_cuda_trial_near(a.soft, b.soft, 1.0 + fabs(b.soft), 1e-5);
    }
    if (__syncthreads_or(!near) && threadIdx.x == 0) t->differs |= 1 << bit;
}

/* The call of one kind, by the ring or by two reads. */
static xd_loss_args xdi_cuda_trial_args(xdi_cuda_trial *t, int kind, xd_dtype dtype, int path) {
    const xd_rows rows = { NULL, dtype, XDI_CUDA_TRIAL_ROWS, XDI_CUDA_TRIAL_COLUMNS, XDI_CUDA_TRIAL_COLUMNS };
    xd_loss_args a = {};
    a.student = a.teacher = a.gradient = rows;
    a.student.data = t->student;
    a.gradient.data = t->gradient[path];
    if (kind >= XDI_CUDA_RING_FORWARD) a.teacher.data = t->teacher;
    const bool hard = kind < XDI_CUDA_RING_FORWARD || kind >= XDI_CUDA_RING_BOTH;
    a.labels.data = t->labels;
    a.labels.dtype = XD_DTYPE_I64;
    a.row_scale = t->row_scale;
    a.vocab.end = a.vocab.size = XDI_CUDA_TRIAL_COLUMNS;
    a.vocab.shards = 1;
    a.temperature = kind == XDI_CUDA_RING_SHARED ? 1.0 : 1.5;
    a.divergence = kind == XDI_CUDA_RING_REVERSE ? XD_KL_REVERSE : kind == XDI_CUDA_RING_JSD ? XD_JSD : XD_KL_FORWARD;
    a.beta = 0.25;
    a.uniform_weight = kind == XDI_CUDA_RING_SMOOTH ? 0.25 / XDI_CUDA_TRIAL_COLUMNS : 0.0;
    a.target_weight = kind == XDI_CUDA_RING_SMOOTH ? 0.75 : 1.0;
    a.hard_weight = hard ? 0.5 : 0.0;
    a.soft_weight = a.teacher.data ? 0.75 : 0.0;
    a.references = reinterpret_cast<double *>(t->record);
    a.row = t->row[path];
    return a;
}

static xd_result xdi_cuda_trial_run(const xd_launch *launch, const xd_cuda *cuda, xdi_cuda_trial *t, int kind, xd_dtype dtype) {
    if (cuda->ring_clusters[dtype == XD_DTYPE_BF16][kind][XDI_CUDA_TRIAL_CHOICE] == 0) return XD_OK; /* never launched so */
    const xd_loss_args ring = xdi_cuda_trial_args(t, kind, dtype, 0), other = xdi_cuda_trial_args(t, kind, dtype, 1);
    xdi_cuda_ring_call call = {};
    call.slice = XDI_CUDA_TRIAL_COLUMNS / 2 + 4;
    call.stages = XDI_CUDA_TRIAL_STAGES;
    XD_TRY(xdi_cuda_ring_start(launch, cuda, &ring, kind, XDI_CUDA_TRIAL_CHOICE, call));
    XD_TRY(xdi_cuda_loss_fused_start(launch, &other));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_trial_compare_kernel, t, dtype,
                           2 * kind + (dtype == XD_DTYPE_BF16));
}

/* *differs: a bit for each kind of each type. */
static xd_result xdi_cuda_trial_all(xd_ctx *ctx, const xd_cuda *cuda, xdi_cuda_trial *t, int *differs) {
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16 };
    const xd_launch launch = xd_ctx_launch(ctx);
    XDI_CUDA_TRY(ctx, cudaMemsetAsync(t, 0, sizeof *t, (cudaStream_t)launch.stream));
    for (int i = 0; i < 2; i++) {
        XD_TRY(XDI_CUDA_LAUNCH(&launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_trial_fill_kernel, t, types[i]));
        for (int kind = 0; kind < XDI_CUDA_RING_KINDS; kind++) XD_TRY(xdi_cuda_trial_run(&launch, cuda, t, kind, types[i]));
    }
    XDI_CUDA_TRY(ctx, cudaMemcpyAsync(differs, &t->differs, sizeof *differs, cudaMemcpyDeviceToHost,
                                      (cudaStream_t)launch.stream));
    XDI_CUDA_TRY(ctx, cudaStreamSynchronize((cudaStream_t)launch.stream));
    return XD_OK;
}

enum { XDI_CUDA_TRIAL_DEVICES = 64 };

/* What a process has found, by device: 0 nothing yet, 1 they agree, 2 they differ. */
static std::atomic<int> xdi_cuda_trial_verdicts[XDI_CUDA_TRIAL_DEVICES];

/* A warning names the kernels that differ. */
static xd_result xdi_cuda_trial_judge(xd_ctx *ctx, const xd_cuda *cuda, int *verdict) {
    int differs = 0;
    xdi_cuda_trial *t = (xdi_cuda_trial *)cuda->allocator.allocate(cuda->allocator.user, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for %zu bytes on device %d, to compare the paths of losses", sizeof *t,
               cuda->device);
    const xd_result result = xdi_cuda_trial_all(ctx, cuda, t, &differs);
    cuda->allocator.release(cuda->allocator.user, t);
    XD_TRY(result);
    *verdict = differs ? 2 : 1;
    if (differs)
        xd_log(ctx, XD_LOG_WARN,
               "device %d: losses of rows on the chip differ from those of rows read twice (kernels %#x): rows are read twice",
               cuda->device, differs);
    return XD_OK;
}

/* Whether all kernels of the ring agree with the other path; a process asks each device once. */
static xd_result xdi_cuda_ring_agrees(xd_ctx *ctx, const xd_cuda *cuda, bool *agrees) {
    const bool keeps = cuda->device < XDI_CUDA_TRIAL_DEVICES;
    int verdict = keeps ? xdi_cuda_trial_verdicts[cuda->device].load() : 0;
    if (verdict == 0) XD_TRY(xdi_cuda_trial_judge(ctx, cuda, &verdict));
    if (keeps) xdi_cuda_trial_verdicts[cuda->device].store(verdict);
    *agrees = verdict == 1;
    return XD_OK;
}

/* Turns the path on where the device and the build have it; `architecture` is that of the build. */
static xd_result xdi_cuda_ring_set_up(xd_ctx *ctx, xd_cuda *cuda, int architecture) {
    int launches = 0, block_bytes = 0, processor_bytes = 0;
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_ring_rows_kernel));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&launches, cudaDevAttrClusterLaunch, cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&processor_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, cuda->device));
#if defined(XD_EMU)
    architecture = 900;
#endif
    if (cuda->capability < 90 || architecture < 900 || launches == 0) return XD_OK;
    cuda->processor_shared_bytes = (size_t)processor_bytes;
    for (int kind = 0; kind < XDI_CUDA_RING_KINDS; kind++) XDI_CUDA_RING_CASES(kind, KIND, {
            XD_TRY((xdi_cuda_ring_allow<float, KIND>(ctx, cuda, (size_t)block_bytes)));
            XD_TRY((xdi_cuda_ring_allow<xdi_cuda_bf16, KIND>(ctx, cuda, (size_t)block_bytes)));
        })
    bool agrees = true;
    XD_TRY(xdi_cuda_ring_agrees(ctx, cuda, &agrees));
    if (agrees) cuda->kernels.loss.fused = xdi_cuda_loss_ring;
    return XD_OK;
}
