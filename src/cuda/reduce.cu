/* Sums over ranks: xd_reduce_pieces and xd_reduce_leaves of kernel/cpu/reduce.c, with the same bits. Every input is read once
 * and the sum written once; a thread has read all of its elements before it writes, so the sum may overwrite an input. */

/* Maximum number of inputs and nodes of one sum: their addresses are launch parameters. */
enum { XDI_CUDA_PIECES = 448, XDI_CUDA_NODES = 416 };

struct xdi_cuda_pieces {
    const void *at[XDI_CUDA_PIECES];
    void *out;
    int64_t count;
    double scale; /* of XD_AVG, exact in the type of the sum */
    int ranks;
    xd_reduce_op op;
    bool wide;
};

/* How elements are added: narrow floats in f32, integers without signed overflow. */
static __device__ inline float xdi_cuda_sum_load(float x) {
    return x;
}
static __device__ inline double xdi_cuda_sum_load(double x) {
    return x;
}
static __device__ inline float xdi_cuda_sum_load(xdi_cuda_bf16 x) {
    return xdi_cuda_widen(x);
}
static __device__ inline float xdi_cuda_sum_load(xdi_cuda_f16 x) {
    return xdi_cuda_widen(x);
}
static __device__ inline uint32_t xdi_cuda_sum_load(int32_t x) {
    return (uint32_t)x;
}
static __device__ inline uint64_t xdi_cuda_sum_load(int64_t x) {
    return (uint64_t)x;
}
static __device__ inline uint8_t xdi_cuda_sum_load(uint8_t x) {
    return x;
}

static __device__ inline float xdi_cuda_sum_add(float a, float b) {
    return __fadd_rn(a, b);
}
static __device__ inline double xdi_cuda_sum_add(double a, double b) {
    return __dadd_rn(a, b);
}
template <typename T> static __device__ inline T xdi_cuda_sum_add(T a, T b) {
    return (T)(a + b);
}

static __device__ inline float xdi_cuda_sum_scale(float a, double scale) {
    return __fmul_rn(a, (float)scale);
}
static __device__ inline double xdi_cuda_sum_scale(double a, double scale) {
    return __dmul_rn(a, scale);
}
template <typename T> static __device__ inline T xdi_cuda_sum_scale(T a, double) {
    return a; /* integers have no average */
}

template <typename T, typename Sum> static __device__ inline void xdi_cuda_sum_store(Sum sum, T *out) {
    *out = (T)sum;
}
static __device__ inline void xdi_cuda_sum_store(float sum, xdi_cuda_bf16 *out) {
    xdi_cuda_narrow(sum, out);
}
static __device__ inline void xdi_cuda_sum_store(float sum, xdi_cuda_f16 *out) {
    xdi_cuda_narrow(sum, out);
}

/* The larger or the smaller one, compared as T; a NaN wins. */
template <typename T> static __device__ inline bool xdi_cuda_wins(T a, T b, xd_reduce_op op) {
    return (op == XD_MAX ? a > b : a < b) || a != a;
}
static __device__ inline bool xdi_cuda_wins(uint32_t a, uint32_t b, xd_reduce_op op) {
    return op == XD_MAX ? (int32_t)a > (int32_t)b : (int32_t)a < (int32_t)b;
}
static __device__ inline bool xdi_cuda_wins(uint64_t a, uint64_t b, xd_reduce_op op) {
    return op == XD_MAX ? (int64_t)a > (int64_t)b : (int64_t)a < (int64_t)b;
}

template <typename Sum> static __device__ inline Sum xdi_cuda_sum_merge(Sum sum, Sum next, xd_reduce_op op) {
    if (op == XD_MAX || op == XD_MIN) return xdi_cuda_wins(next, sum, op) ? next : sum;
    return xdi_cuda_sum_add(sum, next);
}

/* Grid: one block of 256 threads per chunk of 16384 elements. Bytes: (ranks + 1) * count * sizeof(T). */
template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_pieces_kernel(const __grid_constant__ xdi_cuda_pieces pieces) {
    enum { LANES = xdi_cuda_pack<T>::COUNT };
    const xdi_cuda_span span = xdi_cuda_span_of(blockIdx.x, pieces.count);
    const int64_t packs = pieces.wide ? (span.end - span.begin) / LANES : 0;
    for (int64_t k = threadIdx.x; k < packs; k += blockDim.x) {
        const int64_t i = span.begin + k * LANES;
        xdi_cuda_pack<T> pack = xdi_cuda_load16(static_cast<const T *>(pieces.at[0]) + i);
        decltype(xdi_cuda_sum_load(pack.at[0])) sums[LANES];
        XD_UNROLL
        for (int j = 0; j < LANES; j++) sums[j] = xdi_cuda_sum_load(pack.at[j]);
        for (int r = 1; r < pieces.ranks; r++) {
            pack = xdi_cuda_load16(static_cast<const T *>(pieces.at[r]) + i);
            XD_UNROLL
            for (int j = 0; j < LANES; j++)
                sums[j] = xdi_cuda_sum_merge(sums[j], xdi_cuda_sum_load(pack.at[j]), pieces.op);
        }
        XD_UNROLL
        for (int j = 0; j < LANES; j++) {
            if (pieces.op == XD_AVG) sums[j] = xdi_cuda_sum_scale(sums[j], pieces.scale);
            xdi_cuda_sum_store(sums[j], &pack.at[j]);
        }
        xdi_cuda_store16(static_cast<T *>(pieces.out) + i, pack);
    }
    for (int64_t i = span.begin + packs * LANES + threadIdx.x; i < span.end; i += blockDim.x) {
        auto sum = xdi_cuda_sum_load(static_cast<const T *>(pieces.at[0])[i]);
        for (int r = 1; r < pieces.ranks; r++)
            sum = xdi_cuda_sum_merge(sum, xdi_cuda_sum_load(static_cast<const T *>(pieces.at[r])[i]),
                                     pieces.op);
        if (pieces.op == XD_AVG) sum = xdi_cuda_sum_scale(sum, pieces.scale);
        xdi_cuda_sum_store(sum, static_cast<T *>(pieces.out) + i);
    }
}

static xd_result xdi_cuda_reduce_pieces(const xd_launch *launch, void *out, const void *const *from,
                                        int ranks, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    XD_REQUIRE(launch->ctx, xd_reduce_supports(dtype, op), XD_ERROR_DTYPE, "%s has no %s",
                xd_dtype_name(dtype), op == XD_AVG ? "average" : "arithmetic");
    XD_REQUIRE(launch->ctx, ranks <= XDI_CUDA_PIECES, XD_ERROR_UNSUPPORTED,
                "a sum over %d ranks on one GPU; %d is the most", ranks, (int)XDI_CUDA_PIECES);
    if (count <= 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xdi_cuda_pieces pieces;
    memset(&pieces, 0, sizeof pieces);
    pieces.out = out;
    pieces.count = count;
    pieces.ranks = ranks;
    pieces.op = op;
    pieces.scale = dtype == XD_DTYPE_F64 ? 1.0 / (double)ranks : (double)(1.0f / (float)ranks);
    pieces.wide = xdi_cuda_is_aligned16(out);
    for (int r = 0; r < ranks; r++) {
        pieces.at[r] = from[r];
        pieces.wide = pieces.wide && xdi_cuda_is_aligned16(from[r]);
    }
    const xdi_cuda_grid grid =
        xdi_cuda_grid_of((count + XDI_CUDA_CHUNK - 1) / XDI_CUDA_CHUNK, XDI_CUDA_THREADS);
    switch (dtype) {
    case XD_DTYPE_F32: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<float>, pieces);
    case XD_DTYPE_F64: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<double>, pieces);
    case XD_DTYPE_BF16: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<xdi_cuda_bf16>, pieces);
    case XD_DTYPE_F16: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<xdi_cuda_f16>, pieces);
    case XD_DTYPE_I32: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<int32_t>, pieces);
    case XD_DTYPE_I64: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<int64_t>, pieces);
    default: return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_pieces_kernel<uint8_t>, pieces);
    }
}

/* The canonical tree as a program: push each node in turn, then merge the top of the stack with the value below it as often as
 * `merges` says. Each thread's stack is a column of shared memory; the top stays in a register. */
struct xdi_cuda_nodes {
    const void *at[XDI_CUDA_NODES];
    uint8_t merges[XDI_CUDA_NODES];
    void *out;
    int64_t count;
    double scale;
    int nodes;
};

/* Grid: one block of 256 threads per 256 elements. Bytes: (nodes + 1) * count * sizeof(T). Shared: depth * 256 * sizeof(T). */
template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_leaves_kernel(const __grid_constant__ xdi_cuda_nodes nodes) {
    XD_DYN_SHARED(T, stack);
    const int64_t i = (int64_t)blockIdx.x * XDI_CUDA_THREADS + threadIdx.x;
    if (i >= nodes.count) return;
    T top = (T)0;
    int below = 0;
    for (int k = 0; k < nodes.nodes; k++) {
        if (k > 0) stack[below++ * XDI_CUDA_THREADS + (int)threadIdx.x] = top;
        top = static_cast<const T *>(nodes.at[k])[i];
        for (int m = nodes.merges[k]; m > 0; m--)
            top = xdi_cuda_sum_add(stack[--below * XDI_CUDA_THREADS + (int)threadIdx.x], top);
    }
    static_cast<T *>(nodes.out)[i] = xdi_cuda_sum_scale(top, nodes.scale);
}

/* Writes the program, and the deepest stack to *depth; returns the number of nodes, also when there are too many. */
static int xdi_cuda_nodes_fill(xdi_cuda_nodes *nodes, const void *const *forests, const xd_leaves *leaves,
                               int ranks, int64_t stride_bytes, int *depth) {
    int64_t size[64];
    int top = -1, n = 0;
    *depth = 0;
    for (int r = 0; r < ranks; r++) {
        const int64_t end = leaves[r].first + leaves[r].count;
        const char *node = (const char *)forests[r];
        for (int64_t lo = leaves[r].first; lo < end;
             lo += xd_leaves_node_size(lo, end), node += stride_bytes, n++) {
            if (n >= XDI_CUDA_NODES) continue;
            size[++top] = xd_leaves_node_size(lo, end);
            *depth = top > *depth ? top : *depth;
            nodes->at[n] = node;
            for (; top > 0 && size[top - 1] == size[top]; size[--top] *= 2) nodes->merges[n]++;
        }
    }
    if (n > 0 && n <= XDI_CUDA_NODES) nodes->merges[n - 1] = (uint8_t)(nodes->merges[n - 1] + top);
    return n;
}

static xd_result xdi_cuda_reduce_leaves(const xd_launch *launch, void *out, const void *const *forests,
                                        const xd_leaves *leaves, int ranks, int64_t stride, int64_t count,
                                        xd_dtype dtype, xd_reduce_op op) {
    XD_REQUIRE(
        launch->ctx, dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_F64, XD_ERROR_DTYPE,
        "a sum over leaves is F32 or F64, not %s: rounding a node would make its bits depend on the ranks",
        xd_dtype_name(dtype));
    XD_REQUIRE(launch->ctx, op == XD_SUM || op == XD_AVG, XD_ERROR_ARGUMENT,
                "leaves go with SUM and AVG, not operation %d", (int)op);
    if (count <= 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xdi_cuda_nodes nodes;
    memset(&nodes, 0, sizeof nodes);
    int depth;
    const int64_t size = (int64_t)xd_dtype_size(dtype);
    nodes.nodes = xdi_cuda_nodes_fill(&nodes, forests, leaves, ranks, stride * size, &depth);
    XD_REQUIRE(launch->ctx, nodes.nodes <= XDI_CUDA_NODES && depth <= 24, XD_ERROR_UNSUPPORTED,
                "a tree of %d nodes, %d deep, on one GPU; %d and 24 are the most", nodes.nodes, depth,
                (int)XDI_CUDA_NODES);
    nodes.out = out;
    nodes.count = count;
    nodes.scale = 1.0;
    const double total = (double)leaves[0].total;
    if (op == XD_AVG)
        nodes.scale = dtype == XD_DTYPE_F64 ? 1.0 / total : (double)(1.0f / (float)leaves[0].total);
    const xdi_cuda_grid grid =
        xdi_cuda_grid_of((count + XDI_CUDA_THREADS - 1) / XDI_CUDA_THREADS, XDI_CUDA_THREADS,
                         (size_t)(depth * XDI_CUDA_THREADS) * (size_t)size);
    if (dtype == XD_DTYPE_F32) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_leaves_kernel<float>, nodes);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_leaves_kernel<double>, nodes);
}

static xd_result xdi_cuda_reduce_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<double>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<xdi_cuda_f16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<int32_t>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<int64_t>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_pieces_kernel<uint8_t>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_leaves_kernel<float>));
    return xdi_cuda_load(ctx, xdi_cuda_leaves_kernel<double>);
}
