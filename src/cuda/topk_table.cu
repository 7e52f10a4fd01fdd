/* The k largest of every row, by k, and the table of the top-k losses. */

static xd_result xdi_cuda_select(const xd_launch *launch, const xd_select_args *a) {
    const int64_t n = a->k < a->columns ? a->k : a->columns;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->logits.dtype, T, {
        if (n <= XDI_CUDA_SELECT_FEW)
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK), xdi_cuda_select_few_kernel<T>, *a);
        if (n <= XDI_CUDA_SELECT_MANY)
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_SELECT_TEAM, XDI_CUDA_SELECT_BYTES),
                                   xdi_cuda_select_many_kernel<T>, *a);
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK), xdi_cuda_select_kernel<T>, *a);
    })
}

/* ---- select_merge: one warp per row ---- */

/* How many of a shard's n candidates, descending, are larger than value; with `equal` also those that equal it. */
static __device__ inline int64_t xdi_cuda_select_before(const int64_t *words, int64_t n, double value,
                                                        bool equal) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const double other = __longlong_as_double(words[middle]);
        if (other > value || (equal && other == value))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Number of valid candidates of a row and shard: from there on ids are -1 (padding). */
static __device__ inline int64_t xdi_cuda_select_given(const int64_t *ids, int64_t k) {
    int64_t low = 0, high = k;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (ids[middle] >= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Every candidate finds its rank among all; among equals the earlier shard comes first, because its columns are lower. */
static __device__ inline void xdi_cuda_select_place(const xd_select_args &a, int64_t r, int shard,
                                                    int64_t j) {
    const int64_t candidates = a.logits.rows * a.k, *mine = a.all + shard * a.all_stride + r * a.k;
    const int64_t id = mine[candidates + j];
    const double value = __longlong_as_double(mine[j]);
    int64_t rank = j;
    if (id < 0) return;
    for (int i = 0; i < a.shards; i++) {
        const int64_t *other = a.all + i * a.all_stride + r * a.k;
        if (i != shard)
            rank += xdi_cuda_select_before(other, xdi_cuda_select_given(other + candidates, a.k), value,
                                           i < shard);
    }
    if (rank >= a.k) return;
    a.values[r * a.k + rank] = value;
    a.ids[r * a.k + rank] = id;
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_select_merge_kernel(const __grid_constant__ xd_select_args a) {
    const int64_t r = xdi_cuda_team_row<XDI_CUDA_WARP>();
    if (r >= a.logits.rows) return;
    for (int shard = 0; shard < a.shards; shard++)
        for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < a.k; j += XDI_CUDA_WARP)
            xdi_cuda_select_place(a, r, shard, j);
}

static xd_result xdi_cuda_select_merge(const xd_launch *launch, const xd_select_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_WARP),
                           xdi_cuda_select_merge_kernel, *a);
}

/* ---- table of the losses ---- */

template <typename T> static xd_result xdi_cuda_select_load_type(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_kernel<T>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_few_kernel<T>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_many_kernel<T>));
    return XDI_CUDA_CHECK(ctx, cudaFuncSetAttribute(xdi_cuda_select_many_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    (int)XDI_CUDA_SELECT_BYTES));
}

static xd_result xdi_cuda_select_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_select_load_type<float>(ctx));
    XD_TRY(xdi_cuda_select_load_type<xdi_cuda_bf16>(ctx));
    return xdi_cuda_load(ctx, xdi_cuda_select_merge_kernel);
}

static xd_topk_kernels xdi_cuda_topk_table() {
    xd_topk_kernels kernels = {};
    kernels.maxima = xdi_cuda_topk_maxima;
    kernels.stats = xdi_cuda_topk_stats;
    kernels.merge = xdi_cuda_topk_merge;
    kernels.divergence = xdi_cuda_topk_divergence;
    kernels.grad = xdi_cuda_topk_grad;
    kernels.entries = xdi_cuda_topk_entries_run;
    kernels.select = xdi_cuda_select;
    kernels.select_merge = xdi_cuda_select_merge;
    kernels.select_narrow = true;
    return kernels;
}
