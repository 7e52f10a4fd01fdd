/* The table's matrix product by NVIDIA's cuBLASLt, where that is loaded (matmul_library.cu).
 *
 * cuBLASLt knows matrices stored by columns, and out = a b stored by rows is out^T = b^T a^T stored by
 * columns. Both sides are treated alike: as matrices [rows, terms], a and the transposed b, in which the
 * terms of a row or the rows of a term are neighbours. Read by columns, the former is the transposed matrix
 * and the latter the matrix.
 *
 * Where products are requested in bf16, an operand in f32 is first rounded into memory of this unit, as many rows at a time as
 * fit; these are rows or columns of the result, so no sum is split. Products that do not fit this form, and those for which
 * cuBLASLt has no algorithm, are computed by the plain kernel. Sums are in f32, also of F32 factors: never in TF32. */

#if defined(XDI_CUDA_CUBLAS_IS_KNOWN)

/* ---- a side of a product ---- */

/* A matrix [rows, terms] as lines of neighbours, `stride` elements from one line to the next. */
struct xdi_cuda_lines {
    bool of_terms; /* a line is a row; else a term of all rows */
    int64_t count, length, stride;
};

/* The stride does not matter where there is one element or one line. False where neighbours in the matrix are not adjacent in
 * memory, and where lines overlap. */
static bool xdi_cuda_lines_are(int64_t count, int64_t stride, int64_t length, int64_t step) {
    return (step == 1 || length == 1) && (count == 1 || stride >= length);
}

static bool xdi_cuda_lines_of(const xd_matrix &x, xdi_cuda_lines *lines) {
    lines->of_terms = xdi_cuda_lines_are(x.rows, x.row_stride, x.cols, x.col_stride);
    if (!lines->of_terms && !xdi_cuda_lines_are(x.cols, x.col_stride, x.rows, x.row_stride)) return false;
    lines->count = lines->of_terms ? x.rows : x.cols;
    lines->length = lines->of_terms ? x.cols : x.rows;
    lines->stride = lines->of_terms ? x.row_stride : x.col_stride;
    if (lines->count == 1) lines->stride = lines->length;
    return true;
}

/* Rows [row, row + rows) of a matrix. */
static xd_matrix xdi_cuda_matrix_rows(const xd_matrix &x, int64_t row, int64_t rows) {
    xd_matrix part = x;
    part.data = (const char *)x.data + row * x.row_stride * (int64_t)xd_dtype_size(x.dtype);
    part.rows = rows;
    return part;
}

/* ---- rounding to bf16 ----
 *
 * A thread rounds 8 consecutive elements of a line: it reads 32 bytes, in two loads where all lines begin on 16 bytes, and
 * writes 16. Lines are written to the unit's memory at multiples of 16 bytes, padded with zeros.
 *   grid lines * pitch / 2048, block 256; the index needs a division, whose latency the memory accesses hide. */

enum { XDI_CUDA_ROUNDED = 8 };

static int64_t xdi_cuda_cublas_pitch(int64_t length) {
    return (length + XDI_CUDA_ROUNDED - 1) / XDI_CUDA_ROUNDED * XDI_CUDA_ROUNDED;
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_cublas_round_kernel(const float *from, xdi_cuda_lines lines, bool aligned, xdi_cuda_bf16 *to) {
    const int64_t packs = (lines.length + XDI_CUDA_ROUNDED - 1) / XDI_CUDA_ROUNDED;
    const int64_t i = (int64_t)blockIdx.x * XDI_CUDA_THREADS + threadIdx.x;
    if (i >= lines.count * packs) return;
    const int64_t line = i / packs, at = (i - line * packs) * XDI_CUDA_ROUNDED, left = lines.length - at;
    const float *source = from + line * lines.stride + at;
    xdi_cuda_pack<xdi_cuda_bf16> rounded;
    if (aligned && left >= XDI_CUDA_ROUNDED) {
        const xdi_cuda_pack<float> low = xdi_cuda_load16(source), high = xdi_cuda_load16(source + 4);
        XD_UNROLL
        for (int e = 0; e < 4; e++) {
            xdi_cuda_narrow(low.at[e], &rounded.at[e]);
            xdi_cuda_narrow(high.at[e], &rounded.at[4 + e]);
        }
    } else {
        XD_UNROLL
        for (int e = 0; e < XDI_CUDA_ROUNDED; e++)
            xdi_cuda_narrow(e < left ? source[e] : 0.0f, &rounded.at[e]);
    }
    xdi_cuda_store16(to + i * XDI_CUDA_ROUNDED, rounded);
}

/* One operand: the whole matrix, and how many of its rows are multiplied at a time. */
struct xdi_cuda_side {
    xd_matrix all;       /* [rows, terms] */
    xdi_cuda_bf16 *room; /* for `piece` rows in bf16; NULL: they are read in place */
    int64_t piece;
};

/* The operand with `bytes` at `room` for its rounded rows; false where not even one row fits. Blocks are multiples of 8 rows
 * where possible, so that those of the result begin on 16 bytes where the result does. */
static bool xdi_cuda_side_of(const xd_matrix &all, char *room, size_t bytes, xdi_cuda_side *side) {
    xdi_cuda_lines lines;
    if (!xdi_cuda_lines_of(all, &lines)) return false;
    side->all = all;
    side->room = reinterpret_cast<xdi_cuda_bf16 *>(room);
    side->piece = all.rows;
    if (!room) return true;
    const int64_t elements = (int64_t)(bytes / sizeof(xdi_cuda_bf16));
    const int64_t fit = lines.of_terms ? elements / xdi_cuda_cublas_pitch(all.cols)
                                       : elements / all.cols / XDI_CUDA_ROUNDED * XDI_CUDA_ROUNDED;
    if (fit < all.rows)
        side->piece = fit < XDI_CUDA_ROUNDED ? fit : fit / XDI_CUDA_ROUNDED * XDI_CUDA_ROUNDED;
    return side->piece > 0;
}

/* The rows of a block as they are multiplied: in place, or where their bf16 form is written. */
static xd_matrix xdi_cuda_side_rows(const xdi_cuda_side &side, int64_t row, int64_t rows) {
    xd_matrix part = xdi_cuda_matrix_rows(side.all, row, rows);
    xdi_cuda_lines lines;
    if (!side.room || !xdi_cuda_lines_of(part, &lines)) return part;
    const int64_t pitch = xdi_cuda_cublas_pitch(lines.length);
    part.data = side.room;
    part.dtype = XD_DTYPE_BF16;
    part.row_stride = lines.of_terms ? pitch : 1;
    part.col_stride = lines.of_terms ? 1 : pitch;
    return part;
}

static xd_result xdi_cuda_side_round(const xd_launch *launch, const xdi_cuda_side &side, int64_t row,
                                     int64_t rows) {
    const xd_matrix part = xdi_cuda_matrix_rows(side.all, row, rows);
    xdi_cuda_lines lines;
    if (!side.room || !xdi_cuda_lines_of(part, &lines)) return XD_OK;
    const int64_t threads = lines.count * (xdi_cuda_cublas_pitch(lines.length) / XDI_CUDA_ROUNDED);
    const bool aligned = xdi_cuda_is_aligned16(part.data) && lines.stride % 4 == 0;
    return XDI_CUDA_LAUNCH(
        launch, xdi_cuda_grid_of((threads + XDI_CUDA_THREADS - 1) / XDI_CUDA_THREADS, XDI_CUDA_THREADS),
        xdi_cuda_cublas_round_kernel, (const float *)part.data, lines, aligned, side.room);
}

/* ---- one product ---- */

static cudaDataType_t xdi_cuda_cublas_type(xd_dtype dtype) {
    return dtype == XD_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* One of the three matrices; alignment beyond 16 bytes is not passed on: the bits would depend on it. */
static void xdi_cuda_cublas_shape_set(xdi_cuda_cublas_shape *shape, int which, int64_t rows, int64_t columns,
                                      int64_t stride, xd_dtype dtype, const void *address) {
    shape->rows[which] = rows;
    shape->columns[which] = columns;
    shape->stride[which] = stride;
    shape->type[which] = xdi_cuda_cublas_type(dtype);
    shape->alignment[which] = (uint32_t)xdi_cuda_move_unit_of((uint64_t)(uintptr_t)address, 16);
}

static void xdi_cuda_cublas_shape_side(xdi_cuda_cublas_shape *shape, const xd_matrix &x, bool is_first) {
    xdi_cuda_lines lines = {};
    xdi_cuda_lines_of(x, &lines);
    xdi_cuda_cublas_shape_set(shape, is_first ? 0 : 1, lines.length, lines.count, lines.stride, x.dtype, x.data);
    shape->turn[is_first ? 0 : 1] = lines.of_terms == is_first ? CUBLAS_OP_T : CUBLAS_OP_N;
}

static void xdi_cuda_cublas_shape_of(const xd_matmul_args &args, xdi_cuda_cublas_shape *shape) {
    const int64_t m = args.a.rows, n = args.b.cols;
    memset(shape, 0, sizeof *shape);
    xdi_cuda_cublas_shape_side(shape, xd_matrix_transposed(args.b), true);
    xdi_cuda_cublas_shape_side(shape, args.a, false);
    xdi_cuda_cublas_shape_set(shape, 2, n, m, m == 1 ? n : args.out_stride, args.out_dtype, args.out);
}

/* A product of two operands of one dtype in cuBLASLt's types; all of it is host memory. */
struct xdi_cuda_cublas_product {
    const xdi_cuda_cublas *cublas;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulPreference_t preference;

    explicit xdi_cuda_cublas_product(const xdi_cuda_cublas *library)
        : cublas(library), operation(NULL), layout(), preference(NULL) {}
    ~xdi_cuda_cublas_product() {
        if (preference) cublas->cublasLtMatmulPreferenceDestroy(preference);
        for (cublasLtMatrixLayout_t one : layout)
            if (one) cublas->cublasLtMatrixLayoutDestroy(one);
        if (operation) cublas->cublasLtMatmulDescDestroy(operation);
    }
    xdi_cuda_cublas_product(const xdi_cuda_cublas_product &) = delete;
    xdi_cuda_cublas_product &operator=(const xdi_cuda_cublas_product &) = delete;

    xd_result describe(xd_ctx *ctx, const xdi_cuda_cublas_shape &shape) {
        static const cublasLtMatmulDescAttributes_t turns[2] = { CUBLASLT_MATMUL_DESC_TRANSA,
                                                                 CUBLASLT_MATMUL_DESC_TRANSB };
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        for (int i = 0; i < 2; i++)
            XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                                cublasLtMatmulDescSetAttribute(operation, turns[i], &shape.turn[i],
                                                               sizeof shape.turn[i]));
        for (int i = 0; i < 3; i++)
            XDI_CUDA_CUBLAS_TRY(
                ctx, cublas,
                cublasLtMatrixLayoutCreate(&layout[i], (cudaDataType_t)shape.type[i], (uint64_t)shape.rows[i],
                                           (uint64_t)shape.columns[i], shape.stride[i]));
        return XD_OK;
    }

    xd_result prefer(xd_ctx *ctx, const xdi_cuda_cublas_shape &shape) {
        static const cublasLtMatmulPreferenceAttributes_t of[4] = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
        };
        const uint64_t most = xdi_cuda_cublas_workspace_bytes;
        XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtMatmulPreferenceCreate(&preference));
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulPreferenceSetAttribute(
                                preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
        for (int i = 0; i < 4; i++)
            XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                                cublasLtMatmulPreferenceSetAttribute(preference, of[i],
                                                                     &shape.alignment[i < 2 ? i : 2],
                                                                     sizeof shape.alignment[0]));
        return XD_OK;
    }
};

/* Asks for the algorithm of a product that has been described. */
static xd_result xdi_cuda_cublas_ask(xd_ctx *ctx, xdi_cuda_cublas_product *p, xdi_cuda_cublas_kept *kept) {
    cublasLtMatmulHeuristicResult_t best = {};
    int count = 0;
    XD_TRY(p->prefer(ctx, kept->shape));
    const cublasStatus_t status = p->cublas->cublasLtMatmulAlgoGetHeuristic(
        p->cublas->handle, p->operation, p->layout[0], p->layout[1], p->layout[2], p->layout[2],
        p->preference, 1, &best, &count);
    kept->found = status == CUBLAS_STATUS_SUCCESS && count > 0 && best.state == CUBLAS_STATUS_SUCCESS;
    kept->algorithm = best.algo;
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return XD_OK;
    return xdi_cuda_cublas_result(ctx, p->cublas, status, "cublasLtMatmulAlgoGetHeuristic(...)", __FILE__,
                                  __LINE__, __func__);
}

/* The entry of a shape that has been met; NULL. */
static const xdi_cuda_cublas_kept *xdi_cuda_cublas_met(const xdi_cuda_cublas *cublas,
                                                       const xdi_cuda_cublas_shape &shape) {
    for (int64_t i = 0; i < cublas->found && i < XDI_CUDA_CUBLAS_KEPT; i++)
        if (memcmp(&cublas->kept[i].shape, &shape, sizeof shape) == 0) return &cublas->kept[i];
    return NULL;
}

/* *taken: false where cuBLASLt has no algorithm for the product; nothing has been launched then. */
static xd_result xdi_cuda_cublas_multiply(const xd_launch *launch, xdi_cuda_cublas *cublas,
                                          const xd_matmul_args &args, bool *taken) {
    const float alpha = 1.0f, beta = args.accumulate ? 1.0f : 0.0f;
    xdi_cuda_cublas_kept fresh = {};
    xdi_cuda_cublas_product p(cublas);
    xdi_cuda_cublas_shape_of(args, &fresh.shape);
    const xdi_cuda_cublas_kept *kept = xdi_cuda_cublas_met(cublas, fresh.shape);
    *taken = kept && kept->found;
    if (kept && !kept->found) return XD_OK;
    XD_TRY(p.describe(launch->ctx, fresh.shape));
    if (!kept) {
        XD_TRY(xdi_cuda_cublas_ask(launch->ctx, &p, &fresh));
        xdi_cuda_cublas_kept *place = &cublas->kept[cublas->found++ % XDI_CUDA_CUBLAS_KEPT];
        *place = fresh;
        kept = place;
        *taken = kept->found;
        if (!kept->found) return XD_OK;
    }
    XDI_CUDA_CUBLAS_TRY(launch->ctx, cublas,
                        cublasLtMatmul(cublas->handle, p.operation, &alpha, args.b.data, p.layout[0],
                                       args.a.data, p.layout[1], &beta, args.out, p.layout[2], args.out,
                                       p.layout[2], &kept->algorithm, cublas->memory,
                                       xdi_cuda_cublas_workspace_bytes, (cudaStream_t)launch->stream));
    return XD_OK;
}

/* Rows of a times columns of b; both are rounded already. */
static xd_result xdi_cuda_cublas_piece(const xd_launch *launch, const xd_matmul_args &args,
                                       const xdi_cuda_side &a, int64_t row, int64_t rows,
                                       const xdi_cuda_side &b, int64_t column, int64_t columns) {
    bool taken = false;
    xd_matmul_args piece = args;
    piece.a = xdi_cuda_side_rows(a, row, rows);
    piece.b = xd_matrix_transposed(xdi_cuda_side_rows(b, column, columns));
    piece.out = reinterpret_cast<float *>(reinterpret_cast<char *>(args.out) +
                                          (row * args.out_stride + column) *
                                              (int64_t)xd_dtype_size(args.out_dtype));
    XD_TRY(xdi_cuda_cublas_multiply(launch, xdi_cuda_of(launch->ctx)->cublas, piece, &taken));
    if (taken) return XD_OK;
    piece.a = xdi_cuda_matrix_rows(a.all, row, rows);
    piece.b = xd_matrix_transposed(xdi_cuda_matrix_rows(b.all, column, columns));
    return xdi_cuda_matmul_plain(launch, &piece);
}

static xd_result xdi_cuda_cublas_pieces(const xd_launch *launch, const xd_matmul_args &args,
                                        const xdi_cuda_side &a, const xdi_cuda_side &b) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_relaxed relaxed;
    for (int64_t row = 0; row < a.all.rows; row += a.piece) {
        const int64_t rows = a.all.rows - row < a.piece ? a.all.rows - row : a.piece;
        XD_TRY(xdi_cuda_side_round(launch, a, row, rows));
        for (int64_t column = 0; column < b.all.rows; column += b.piece) {
            const int64_t columns = b.all.rows - column < b.piece ? b.all.rows - column : b.piece;
            /* A b that is one block is rounded once, for all blocks of a. */
            if (row == 0 || columns < b.all.rows) XD_TRY(xdi_cuda_side_round(launch, b, column, columns));
            XD_TRY(xdi_cuda_cublas_piece(launch, args, a, row, rows, b, column, columns));
        }
    }
    return XD_OK;
}

/* Both operands with their part of the room; false for a product that the plain kernel must compute. */
static bool xdi_cuda_cublas_sides(const xdi_cuda_cublas *cublas, const xd_matmul_args &args, xdi_cuda_side *a,
                                  xdi_cuda_side *b) {
    const xd_dtype left = args.a.dtype, right = args.b.dtype;
    const bool known =
        (left == XD_DTYPE_F32 || left == XD_DTYPE_BF16) && (right == XD_DTYPE_F32 || right == XD_DTYPE_BF16);
    if (!known || (left != right && !args.bf16)) return false;
    if (args.out_dtype == XD_DTYPE_BF16 && (left != XD_DTYPE_BF16 || right != XD_DTYPE_BF16)) return false;
    if (args.a.rows > 1 && args.out_stride < args.b.cols) return false;
    const bool round_a = args.bf16 && left == XD_DTYPE_F32, round_b = args.bf16 && right == XD_DTYPE_F32;
    const size_t each = xdi_cuda_cublas_room_bytes / (round_a && round_b ? 2 : 1);
    char *room = cublas->memory + xdi_cuda_cublas_workspace_bytes;
    return xdi_cuda_side_of(args.a, round_a ? room : NULL, each, a) &&
           xdi_cuda_side_of(xd_matrix_transposed(args.b), round_b ? room + (round_a ? each : 0) : NULL, each,
                            b);
}

static xd_result xdi_cuda_matmul(const xd_launch *launch, const xd_matmul_args *args) {
    xdi_cuda_cublas *cublas = xdi_cuda_cublas_of(launch);
    const bool empty = args->a.rows <= 0 || args->a.cols <= 0 || args->b.cols <= 0;
    xd_matmul_args whole = *args;
    xdi_cuda_side a, b;
    if (!whole.out_dtype) whole.out_dtype = XD_DTYPE_F32;
    if (cublas && !empty) XD_TRY(xdi_cuda_cublas_prepare(launch));
    if (!cublas || empty || !xdi_cuda_cublas_sides(cublas, whole, &a, &b))
        return xdi_cuda_matmul_plain(launch, &whole);
    return xdi_cuda_cublas_pieces(launch, whole, a, b);
}

static xd_result xdi_cuda_matmul_cublas_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_cublas_round_kernel);
}

#else

static xd_result xdi_cuda_matmul(const xd_launch *launch, const xd_matmul_args *args) {
    return xdi_cuda_matmul_plain(launch, args);
}

static xd_result xdi_cuda_matmul_cublas_load(xd_ctx *) {
    return XD_OK;
}

#endif
