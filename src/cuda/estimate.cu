/* Estimates of KL from log-probabilities, and sums with a flag: as many blocks as there is room for partial sums, then one block
 * over these. */

struct xdi_cuda_flagged_join {
    __device__ xd_flagged_sum operator()(xd_flagged_sum a, const xd_flagged_sum &b) const {
        a.value = __dadd_rn(a.value, b.value);
        if (a.bad < 0 || (b.bad >= 0 && b.bad < a.bad)) a.bad = b.bad;
        return a;
    }
};

static __device__ inline void xdi_cuda_flagged_put(xd_flagged_sum *out, xd_flagged_sum mine) {
    const xd_flagged_sum none = { 0.0, -1 };
    mine = xdi_cuda_block_reduce(mine, none, xdi_cuda_flagged_join());
    if (threadIdx.x == 0) *out = mine;
}

static int64_t xdi_cuda_flagged_blocks(int64_t count) {
    const int64_t blocks = (count + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK;
    return blocks < 1 ? 1 : blocks < XD_FLAGGED_SUMS - 1 ? blocks : (int64_t)(XD_FLAGGED_SUMS - 1);
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_flagged_kernel(xd_flagged_sum *out, int64_t blocks) {
    static_assert((int)XD_FLAGGED_SUMS - 1 <= (int)XDI_CUDA_TEAM_BLOCK, "a thread for each sum");
    xd_flagged_sum mine = { 0.0, -1 };
    if ((int64_t)threadIdx.x < blocks) mine = out[1 + threadIdx.x];
    xdi_cuda_flagged_put(out, mine);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_estimate_kernel(const __grid_constant__ xd_estimate_args a) {
    xd_flagged_sum mine = { 0.0, -1 };
    for (int64_t i = xdi_cuda_flat_index(); i < a.count; i += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK)
        xd_estimate_one(&a, i, &mine);
    xdi_cuda_flagged_put(a.out + 1 + blockIdx.x, mine);
}

static xd_result xdi_cuda_estimate(const xd_launch *launch, const xd_estimate_args *a) {
    const int64_t blocks = xdi_cuda_flagged_blocks(a->count);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(
        XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK), xdi_cuda_estimate_kernel, *a));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_flagged_kernel, a->out,
                           blocks);
}

static xd_result xdi_cuda_estimate_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_flagged_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_estimate_kernel);
}
