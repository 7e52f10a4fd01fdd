/* Distribution matching: kernel/cpu/dmd.c is the reference, kernel/dmd.h has the formulas. */

/* ---- mix: grid (rows x pieces of a row), block 256; one read of p and of q, one write. A thread has elements a block's
 * width apart, so that a warp's are neighbours; which row it is costs one division a block. With the CPU's bits. ---- */

enum { XDI_CUDA_MIX_EACH = 4, XDI_CUDA_MIX_PIECE = XDI_CUDA_MIX_EACH * XDI_CUDA_TEAM_BLOCK };

static __global__ void XDI_CUDA_KERNEL xdi_cuda_mix_kernel(const __grid_constant__ xd_mix_desc d,
                                                           int64_t pieces) {
    const int64_t r = (int64_t)blockIdx.x / pieces, piece = (int64_t)blockIdx.x - r * pieces;
    const xd_mix mix = d.mix[r];
    const bool both = d.q.data && mix.c1 != 0.0;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MIX_EACH; i++) {
        const int64_t c = piece * XDI_CUDA_MIX_PIECE + i * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x;
        if (c >= d.out.cols) break;
        const double p = xd_element_load(d.p.data, d.p.dtype, r * d.p.stride + c);
        const double q = both ? xd_element_load(d.q.data, d.q.dtype, r * d.q.stride + c) : 0.0;
        xd_store_once(d.out.data, d.out.dtype, r * d.out.stride + c, xd_mix_of(mix, both, p, q));
    }
}

static xd_result xdi_cuda_mix(const xd_launch *launch, const xd_mix_desc *d) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t pieces = (d->out.cols + XDI_CUDA_MIX_PIECE - 1) / XDI_CUDA_MIX_PIECE;
    if (d->out.rows * pieces == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(d->out.rows * pieces, XDI_CUDA_TEAM_BLOCK), xdi_cuda_mix_kernel, *d,
                           pieces);
}

/* ---- draw: a thread for each block of four numbers, block 256; writes every element once, 16 bytes at a time where four F32
 * elements of a block lie there. Ten rounds of two products and two logarithms and sines for four elements, so stores set the
 * pace: with the CPU's bits. ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_draw_kernel(const __grid_constant__ xd_draw_desc d, int64_t blocks) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, r = i / blocks;
    if (r >= d.out.rows) return;
    const int64_t block = d.first / 4 + (i - r * blocks), column = 4 * block - d.first;
    const xd_philox random = xd_draw_of(&d, r);
    xdi_cuda_pack<float> lanes;
    xd_philox_lanes(&random, block, !d.uniform, lanes.at);
    if (d.out.dtype == XD_DTYPE_F32 && column >= 0 && column + 4 <= d.out.cols) {
        float *out = (float *)d.out.data + (r * d.out.stride + column);
        if (xdi_cuda_is_aligned16(out)) {
            xdi_cuda_store16(out, lanes);
            return;
        }
    }
    XD_UNROLL
    for (int k = 0; k < 4; k++)
        if (column + k >= 0 && column + k < d.out.cols)
            xd_element_store(d.out.data, d.out.dtype, r * d.out.stride + column + k, (double)lanes.at[k]);
}

static xd_result xdi_cuda_draw(const xd_launch *launch, const xd_draw_desc *d) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t blocks = xd_draw_blocks(d), all = d->out.rows * blocks;
    if (all == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch,
                           xdi_cuda_grid_of((all + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_draw_kernel, *d, blocks);
}

static xd_result xdi_cuda_dmd_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_draw_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_mix_kernel);
}

static xd_dmd_kernels xdi_cuda_dmd_table() {
    xd_dmd_kernels kernels = {};
    kernels.mix = xdi_cuda_mix;
    kernels.draw = xdi_cuda_draw;
    return kernels;
}
