/* Distribution matching: kernel/cpu/dmd.c is the reference, kernel/dmd.h has the formulas. */

/* ---- mix: one read of p and of q, one write, with the CPU's bits. Grid (rows x pieces of a row), block 256; which row it is costs
 * one division a block. Where p, q and out have one type and lie at multiples of 16 bytes, a thread has eight neighbours at a time,
 * all asked for before the first is used. Else it has elements a block's width apart. ---- */

enum { XDI_CUDA_MIX_EACH = 4, XDI_CUDA_MIX_PIECE = XDI_CUDA_MIX_EACH * XDI_CUDA_TEAM_BLOCK };
enum { XDI_CUDA_MIX_EIGHTS = XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK };

/* Packs of eight that a thread asks for: 32 bytes of each tensor. */
static int64_t xdi_cuda_mix_packs(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 ? 1 : 2;
}

static __device__ inline void xdi_cuda_mix_element(const xd_mix_desc &d, xd_mix mix, bool both, int64_t r, int64_t c) {
    const double p = xd_element_load(d.p.data, d.p.dtype, r * d.p.stride + c);
    const double q = both ? xd_element_load(d.q.data, d.q.dtype, r * d.q.stride + c) : 0.0;
    xd_store_once(d.out.data, d.out.dtype, r * d.out.stride + c, xd_mix_of(mix, both, p, q));
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_mix_kernel(const __grid_constant__ xd_mix_desc d, uint32_t pieces) {
    const uint32_t row = blockIdx.x / pieces, piece = blockIdx.x - row * pieces;
    const xd_mix mix = d.mix[row];
    const bool both = d.q.data && mix.c1 != 0.0;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MIX_EACH; i++) {
        const int64_t c = (int64_t)piece * XDI_CUDA_MIX_PIECE + i * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x;
        if (c >= d.out.cols) break;
        xdi_cuda_mix_element(d, mix, both, row, c);
    }
}

/* Eight at an address of out. False, and nothing written: not every one has its bits in this way. */
template <typename T> struct xdi_cuda_mix_eight {
    xd_mix mix;
    bool both;

    __device__ xdi_cuda_mix_eight(xd_mix pair, bool has) : mix(pair), both(has) {}
    __device__ bool write(const xdi_cuda_raw<T> &p, const xdi_cuda_raw<T> &q, T *out) const {
        const xdi_cuda_eight x = p.widened(), y = q.widened();
        xdi_cuda_pack<T> pack[XDI_CUDA_EIGHT / xdi_cuda_pack<T>::COUNT];
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const double value = xd_mix_of(mix, both, (double)x.at[j], (double)y.at[j]);
            xdi_cuda_narrow(sizeof(T) == 2 ? xd_float_to_odd(value) : (float)value,
                            &pack[j / xdi_cuda_pack<T>::COUNT].at[j % xdi_cuda_pack<T>::COUNT]);
        }
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_EIGHT / xdi_cuda_pack<T>::COUNT; k++)
            xdi_cuda_store16(out + k * xdi_cuda_pack<T>::COUNT, pack[k]);
        return true;
    }
};

/* Of BF16 in integers; with factors so that no product leaves the range of normal doubles. */
template <> struct xdi_cuda_mix_eight<xdi_cuda_bf16> {
    double c0, c1; /* for elements that are lowered */
    bool fits;

    static __device__ bool is_near_one(double factor) {
        return factor == 0.0 || (fabs(factor) > 1e-100 && fabs(factor) < 1e30);
    }
    __device__ xdi_cuda_mix_eight(xd_mix pair, bool both)
        : c0(xd_mul(pair.c0, XDI_CUDA_RAISE)), c1(xd_mul(both ? pair.c1 : xd_mul(pair.c0, 0.0), XDI_CUDA_RAISE)),
          fits(is_near_one(pair.c0) && (!both || is_near_one(pair.c1))) {}
    __device__ bool write(const xdi_cuda_raw<xdi_cuda_bf16> &p, const xdi_cuda_raw<xdi_cuda_bf16> &q, xdi_cuda_bf16 *out) const {
        xdi_cuda_bf16_range range;
        xdi_cuda_finite finite;
        xdi_cuda_pack<uint32_t> words;
        if (!fits) return false;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT / 2; j++) {
            const uint32_t x = p.pairs.at[j], y = q.pairs.at[j];
            finite.note(x);
            finite.note(y);
            const double low = xd_fma(c0, xdi_cuda_lower_half(x), xd_mul(c1, xdi_cuda_lower_half(y)));
            const double high = xd_fma(c0, xdi_cuda_upper_half(x), xd_mul(c1, xdi_cuda_upper_half(y)));
            words.at[j] = xdi_cuda_upper_halves(range.round(low), range.round(high));
        }
        if (!range.holds() || !finite.holds()) return false;
        xdi_cuda_store16(reinterpret_cast<uint32_t *>(out), words);
        return true;
    }
};

template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_mix_eights_kernel(const __grid_constant__ xd_mix_desc d, uint32_t pieces) {
    enum { PACKS = 4 / (int)sizeof(T) };
    const uint32_t row = blockIdx.x / pieces, piece = blockIdx.x - row * pieces;
    const xd_mix mix = d.mix[row];
    const bool both = d.q.data && mix.c1 != 0.0;
    const xdi_cuda_mix_eight<T> eight(mix, both);
    const int64_t first = (int64_t)piece * (PACKS * XDI_CUDA_MIX_EIGHTS) + (int64_t)threadIdx.x * XDI_CUDA_EIGHT;
    const T *p = static_cast<const T *>(d.p.data) + (row * d.p.stride + first);
    const T *q = both ? static_cast<const T *>(d.q.data) + (row * d.q.stride + first) : p;
    T *out = static_cast<T *>(d.out.data) + (row * d.out.stride + first);
    xdi_cuda_raw<T> x[PACKS], y[PACKS];
    XD_UNROLL
    for (int k = 0; k < PACKS; k++) {
        const int step = k * XDI_CUDA_MIX_EIGHTS;
        if (first + step + XDI_CUDA_EIGHT > d.out.cols) continue;
        x[k].load(p + step);
        y[k].load(q + step);
    }
    XD_UNROLL
    for (int k = 0; k < PACKS; k++) {
        const int step = k * XDI_CUDA_MIX_EIGHTS;
        if (first + step + XDI_CUDA_EIGHT <= d.out.cols && eight.write(x[k], y[k], out + step)) continue;
        for (int64_t c = first + step; c < first + step + XDI_CUDA_EIGHT && c < d.out.cols; c++)
            xdi_cuda_mix_element(d, mix, both, row, c);
    }
}

static bool xdi_cuda_mix_is_even(const xd_rows &x, xd_dtype dtype) {
    return x.dtype == dtype && xdi_cuda_is_aligned16(x.data) && x.stride % XDI_CUDA_EIGHT == 0;
}

static xd_result xdi_cuda_mix(const xd_launch *launch, const xd_mix_desc *d) {
    const xd_dtype dtype = d->out.dtype;
    const bool even = xdi_cuda_mix_is_even(d->out, dtype) && xdi_cuda_mix_is_even(d->p, dtype) && dtype != XD_DTYPE_F64 &&
                      (!d->q.data || xdi_cuda_mix_is_even(d->q, dtype));
    const int64_t piece = even ? xdi_cuda_mix_packs(dtype) * XDI_CUDA_MIX_EIGHTS : (int64_t)XDI_CUDA_MIX_PIECE;
    const int64_t pieces = (d->out.cols + piece - 1) / piece;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (d->out.rows * pieces == 0) return XD_OK;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(d->out.rows * pieces, XDI_CUDA_TEAM_BLOCK);
    if (!even) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_mix_kernel, *d, (uint32_t)pieces);
    XDI_CUDA_FLOATS(dtype, T, return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_mix_eights_kernel<T>, *d, (uint32_t)pieces);)
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
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mix_eights_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mix_eights_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mix_eights_kernel<xdi_cuda_f16>));
    return xdi_cuda_load(ctx, xdi_cuda_mix_kernel);
}

static xd_dmd_kernels xdi_cuda_dmd_table() {
    xd_dmd_kernels kernels = {};
    kernels.mix = xdi_cuda_mix;
    kernels.draw = xdi_cuda_draw;
    return kernels;
}
