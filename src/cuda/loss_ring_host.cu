/* Which rows take the path of loss_ring.cu, with how many blocks and stages, and whether the device has it. */

/* Runs the statements with KIND as a constant. */
#define XDI_CUDA_RING_CASES(kind, KIND, ...)                                                \
    switch (kind) {                                                                         \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_HARD, KIND, __VA_ARGS__)                           \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_SMOOTH, KIND, __VA_ARGS__)                         \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_FORWARD, KIND, __VA_ARGS__)                        \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_REVERSE, KIND, __VA_ARGS__)                        \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_JSD, KIND, __VA_ARGS__)                            \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_BOTH, KIND, __VA_ARGS__)                           \
        XDI_CUDA_RING_CASE(XDI_CUDA_RING_SHARED, KIND, __VA_ARGS__)                         \
    default: break;                                                                         \
    }
#define XDI_CUDA_RING_CASE(value, KIND, ...) \
    case value: {                            \
        enum { KIND = value };               \
        __VA_ARGS__                          \
    } break;

/* A call's kind; XDI_CUDA_RING_KINDS: none has what it asks for. */
static int xdi_cuda_ring_kind_of(const xd_loss_args *a) {
    const bool hard = a->labels.data && a->hard_weight != 0.0, soft = a->teacher.data && a->soft_weight != 0.0;
    const bool smooth = a->uniform_weight != 0.0;
    if (hard && !soft) return smooth ? XDI_CUDA_RING_SMOOTH : XDI_CUDA_RING_HARD;
    if (!soft || (hard && (smooth || a->divergence != XD_KL_FORWARD))) return XDI_CUDA_RING_KINDS;
    if (hard) return a->temperature == 1.0 ? XDI_CUDA_RING_SHARED : XDI_CUDA_RING_BOTH;
    return a->divergence == XD_KL_FORWARD   ? XDI_CUDA_RING_FORWARD
           : a->divergence == XD_KL_REVERSE ? XDI_CUDA_RING_REVERSE
           : a->divergence == XD_JSD        ? XDI_CUDA_RING_JSD
                                            : XDI_CUDA_RING_KINDS;
}

static bool xdi_cuda_ring_reads(const xd_rows &x) {
    return xdi_cuda_is_aligned16(x.data) && xdi_cuda_stride(x) * (int64_t)xd_dtype_size(x.dtype) % 16 == 0;
}

/* Whether a row lies as bulk copies need it: whole packs of eight columns, one type, every row on 16 bytes. */
static bool xdi_cuda_ring_takes(const xd_loss_args *a, int kind) {
    const int64_t columns = a->vocab.end - a->vocab.begin;
    const xd_dtype x = a->student.dtype;
    const bool soft = kind >= XDI_CUDA_RING_FORWARD, gradient = a->gradient.data != NULL;
    return a->vocab.shards == 1 && a->student.rows > 0 && a->student.rows < INT32_MAX / 2 && columns > XDI_CUDA_SHORT_ROW &&
           columns % XDI_CUDA_EIGHT == 0 && columns <= INT32_MAX && xdi_cuda_ring_reads(a->student) &&
           (!soft || (a->teacher.dtype == x && xdi_cuda_ring_reads(a->teacher))) &&
           (!gradient || (a->gradient.dtype == x && xdi_cuda_ring_reads(a->gradient)));
}

/* ---- how a row is cut ---- */

/* Stages that a block has room for where `residents` of them share a multiprocessor, each with 1 KiB of the system's. */
static int xdi_cuda_ring_stages(size_t processor_bytes, int residents) {
    const size_t fixed = sizeof(xdi_cuda_ring_memory) + 1024 + 128;
    const int64_t room = (int64_t)(processor_bytes / (size_t)residents) - (int64_t)fixed;
    const int64_t stages = room / XDI_CUDA_RING_STAGE;
    return stages < XDI_CUDA_RING_STAGES ? (int)stages : (int)XDI_CUDA_RING_STAGES;
}

/* A way to cut rows: the index of its number of blocks, 2^blocks, and of blocks on a multiprocessor. */
struct xdi_cuda_ring_choice {
    int blocks, residents;
};

/* In the order of preference: two blocks on a multiprocessor, so that one loads while the other waits for its cluster. */
static const xdi_cuda_ring_choice xdi_cuda_ring_choices[] = {
    { 0, 2 }, { 1, 2 }, { 2, 2 }, { 3, 2 }, { 4, 2 }, { 0, 1 }, { 1, 1 }, { 2, 1 }, { 3, 1 }, { 4, 1 },
};
static_assert(sizeof xdi_cuda_ring_choices / sizeof *xdi_cuda_ring_choices == XDI_CUDA_RING_CHOICES, "see xd_cuda");

/* The first one whose ring holds a row and a stage more, and whose clusters the device runs; the index, -1: none. */
static int xdi_cuda_ring_choose(const xd_cuda *cuda, int kind, xd_dtype dtype, int64_t columns, xdi_cuda_ring_call *call) {
    const int tensors = kind >= XDI_CUDA_RING_FORWARD ? 2 : 1;
    const int64_t stage = XDI_CUDA_RING_STAGE / tensors / (int64_t)xd_dtype_size(dtype);
    for (int i = 0; i < XDI_CUDA_RING_CHOICES; i++) {
        const xdi_cuda_ring_choice c = xdi_cuda_ring_choices[i];
        const int64_t blocks = (int64_t)1 << c.blocks;
        call->slice = (columns + XDI_CUDA_EIGHT * blocks - 1) / (XDI_CUDA_EIGHT * blocks) * XDI_CUDA_EIGHT;
        call->stages = xdi_cuda_ring_stages(cuda->processor_shared_bytes, c.residents);
        if ((call->slice + stage - 1) / stage + 1 <= call->stages && cuda->ring_clusters[dtype == XD_DTYPE_BF16][kind][i] > 0)
            return i;
    }
    return -1;
}

template <typename X, int KIND>
static xd_result xdi_cuda_ring_launch(const xd_launch *launch, const xd_cuda *cuda, const xd_loss_args *a, int choice,
                                      const xdi_cuda_ring_call &call) {
    const int64_t most = cuda->ring_clusters[sizeof(X) == 2][KIND][choice];
    const int64_t blocks = (int64_t)1 << xdi_cuda_ring_choices[choice].blocks;
    const int64_t clusters = a->student.rows < most ? a->student.rows : most;
    xdi_cuda_grid grid = xdi_cuda_grid_of(clusters * blocks, XDI_CUDA_RING_THREADS, (size_t)(call.stages * XDI_CUDA_RING_STAGE));
    grid.cluster = (int)blocks;
    return XDI_CUDA_LAUNCH(launch, grid, (xdi_cuda_loss_ring_kernel<X, KIND>), *a, call);
}

/* Both kernels; of `call`, columns and stages are set. */
static xd_result xdi_cuda_ring_start(const xd_launch *launch, const xd_cuda *cuda, const xd_loss_args *a, int kind, int choice,
                                     xdi_cuda_ring_call call) {
    call.hard_factor = (float)XDI_CUDA_LOG2E;
    call.soft_factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a->temperature);
    call.per_tau = xdi_cuda_factor(1.0 / a->temperature);
    call.beta = (float)a->beta;
    call.uniform = (float)a->uniform_weight;
    call.hard_weight = a->hard_weight;
    call.soft_weight = a->soft_weight / a->temperature;
    XDI_CUDA_RING_CASES(kind, KIND, {
        XDI_CUDA_LOGITS(a->student.dtype, X, { XD_TRY((xdi_cuda_ring_launch<X, KIND>(launch, cuda, a, choice, call))); })
    })
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_ring_rows_kernel, *a);
}

/* The fused entry: rows in a ring where they can be, else the other path. */
static xd_result xdi_cuda_loss_ring(const xd_launch *launch, const xd_loss_args *a) {
    const int kind = xdi_cuda_ring_kind_of(a);
    const xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    xdi_cuda_ring_call call = {};
    const bool takes = kind != XDI_CUDA_RING_KINDS && xdi_cuda_ring_takes(a, kind);
    const int choice = !takes ? -1 : xdi_cuda_ring_choose(cuda, kind, a->student.dtype,
                                                          a->vocab.end - a->vocab.begin, &call);
    if (choice < 0) return xdi_cuda_loss_fused(launch, a);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_ring_start(launch, cuda, a, kind, choice, call);
}

/* ---- set-up ---- */

/* Lets a kernel use the shared memory of each choice, and notes how many of its clusters run at once; 0: none. */
template <typename X, int KIND> static xd_result xdi_cuda_ring_allow(xd_ctx *ctx, xd_cuda *cuda, size_t block_bytes) {
    void (*kernel)(xd_loss_args, xdi_cuda_ring_call) = xdi_cuda_loss_ring_kernel<X, KIND>;
    const int most = xdi_cuda_ring_stages(cuda->processor_shared_bytes, 1) * XDI_CUDA_RING_STAGE;
    XD_TRY(xdi_cuda_load(ctx, kernel));
    if ((size_t)most + sizeof(xdi_cuda_ring_memory) > block_bytes) return XD_OK;
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    for (int i = 0; i < XDI_CUDA_RING_CHOICES; i++) {
        const xdi_cuda_ring_choice c = xdi_cuda_ring_choices[i];
        int clusters = 0;
        cudaLaunchAttribute cluster = {};
        cudaLaunchConfig_t config = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = 1u << c.blocks;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        config.gridDim = dim3(1u << c.blocks, 1, 1);
        config.blockDim = dim3(XDI_CUDA_RING_THREADS, 1, 1);
        config.dynamicSmemBytes = (size_t)(xdi_cuda_ring_stages(cuda->processor_shared_bytes, c.residents) * XDI_CUDA_RING_STAGE);
        config.attrs = &cluster;
        config.numAttrs = 1;
        if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
            cudaGetLastError(); /* "too large" is no failure */
            clusters = 0;
        }
        cuda->ring_clusters[sizeof(X) == 2][KIND][i] = clusters;
    }
    return XD_OK;
}
