/* The matrix product of the table in plain CUDA: for INVARIANT mode, for the emulation, and without cuBLASLt. A block
 * of 256 threads computes a tile of 64 x 64 sums, a thread 4 x 4 of them; shared memory holds 16 terms of both
 * operands at a time. An element's sum runs over k in blocks of 256
 * terms, each from the first to the last term by fused multiply-adds, so its bits depend on k alone. Strides
 * are free: the transposed matrix is the same memory.
 *   grid ceil(m / 64) * ceil(n / 64); reads m n k / 64 elements of each side, mostly from the L2 cache. */

enum { XDI_CUDA_TILE = 64, XDI_CUDA_DEPTH = 16, XDI_CUDA_TERMS = 256, XDI_CUDA_TILE_ROW = XDI_CUDA_TILE + 4 };

/* Copies rows [row, row + 64) x terms [k, k + 16) of a matrix [rows, terms] into shared memory, term by term; zeros where the
 * matrix ends. Neighbouring threads read adjacent memory. */
static __device__ inline void xdi_cuda_tile_load(const xd_matrix &x, int64_t row_stride, int64_t term_stride,
                                                 int64_t rows, int64_t terms, int64_t row, int64_t k,
                                                 float (*tile)[XDI_CUDA_TILE_ROW]) {
    const bool along_terms = term_stride == 1;
    for (int i = (int)threadIdx.x; i < XDI_CUDA_TILE * XDI_CUDA_DEPTH; i += XDI_CUDA_THREADS) {
        const int r = along_terms ? i / XDI_CUDA_DEPTH : i % XDI_CUDA_TILE;
        const int t = along_terms ? i % XDI_CUDA_DEPTH : i / XDI_CUDA_TILE;
        const bool inside = row + r < rows && k + t < terms;
        tile[t][r] =
            inside ? xdi_cuda_read_float(x.data, (int)x.dtype, (row + r) * row_stride + (k + t) * term_stride)
                   : 0.0f;
    }
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_matmul_kernel(const __grid_constant__ xd_matmul_args args, int64_t tiles_across) {
    XD_SHARED(float, left, [XDI_CUDA_DEPTH][XDI_CUDA_TILE_ROW]);
    XD_SHARED(float, right, [XDI_CUDA_DEPTH][XDI_CUDA_TILE_ROW]);
    const int64_t m = args.a.rows, n = args.b.cols, terms = args.a.cols;
    const int64_t row = blockIdx.x / tiles_across * XDI_CUDA_TILE,
                  column = blockIdx.x % tiles_across * XDI_CUDA_TILE;
    const int down = (int)threadIdx.x / 16 * 4, across = (int)threadIdx.x % 16 * 4;
    float total[4][4], sum[4][4];
    XD_UNROLL
    for (int e = 0; e < 16; e++) {
        const int64_t r = row + down + e / 4, c = column + across + e % 4;
        total[e / 4][e % 4] = args.accumulate && r < m && c < n ? args.out[r * args.out_stride + c] : 0.0f;
        sum[e / 4][e % 4] = 0.0f;
    }
    for (int64_t k = 0; k < terms; k += XDI_CUDA_DEPTH) {
        xdi_cuda_tile_load(args.a, args.a.row_stride, args.a.col_stride, m, terms, row, k, left);
        xdi_cuda_tile_load(args.b, args.b.col_stride, args.b.row_stride, n, terms, column, k, right);
        __syncthreads();
        XD_UNROLL
        for (int t = 0; t < XDI_CUDA_DEPTH; t++) {
            XD_UNROLL
            for (int e = 0; e < 16; e++)
                sum[e / 4][e % 4] =
                    __fmaf_rn(left[t][down + e / 4], right[t][across + e % 4], sum[e / 4][e % 4]);
        }
        __syncthreads();
        if ((k + XDI_CUDA_DEPTH) % XDI_CUDA_TERMS != 0 && k + XDI_CUDA_DEPTH < terms) continue;
        XD_UNROLL
        for (int e = 0; e < 16; e++) {
            total[e / 4][e % 4] = __fadd_rn(total[e / 4][e % 4], sum[e / 4][e % 4]);
            sum[e / 4][e % 4] = 0.0f;
        }
    }
    XD_UNROLL
    for (int e = 0; e < 16; e++) {
        const int64_t r = row + down + e / 4, c = column + across + e % 4;
        if (r >= m || c >= n) continue;
        if (args.out_dtype == XD_DTYPE_BF16)
            xdi_cuda_narrow(total[e / 4][e % 4],
                            reinterpret_cast<xdi_cuda_bf16 *>(args.out) + r * args.out_stride + c);
        else
            args.out[r * args.out_stride + c] = total[e / 4][e % 4];
    }
}

static xd_result xdi_cuda_matmul_plain(const xd_launch *launch, const xd_matmul_args *args) {
    const int64_t down = (args->a.rows + XDI_CUDA_TILE - 1) / XDI_CUDA_TILE;
    const int64_t across = (args->b.cols + XDI_CUDA_TILE - 1) / XDI_CUDA_TILE;
    if (down == 0 || across == 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(down * across, XDI_CUDA_THREADS), xdi_cuda_matmul_kernel,
                           *args, across);
}

static xd_result xdi_cuda_matmul_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_matmul_kernel);
}
