/* The table's matrix product by NVIDIA's cuBLASLt, for contexts that ask for it (xd_cuda_desc.cublas). The
 * library is loaded when they do, so the unit is linked without it; its header gives the types.
 *
 * cuBLASLt knows matrices stored by columns, and out = a b stored by rows is out^T = b^T a^T stored by
 * columns. Both sides are treated alike: as matrices [rows, terms], a and the transposed b, in which the
 * terms of a row or the rows of a term are neighbours. Read by columns, the former is the transposed matrix
 * and the latter the matrix.
 *
 * Where products are requested in bf16, an operand in f32 is first rounded into memory of this unit, as many rows at a time as
 * fit; these are rows or columns of the result, so no sum is split. Products that do not fit this form, and those for which
 * cuBLASLt has no algorithm, are computed by the plain kernel. */

#if defined(__has_include)
#    if __has_include(<cublasLt.h>)
#        include <cublasLt.h>
#        include <dlfcn.h>
#        define XDI_CUDA_CUBLAS_IS_KNOWN
#    endif
#endif

#if defined(XDI_CUDA_CUBLAS_IS_KNOWN)

/* ---- the library ---- */

/* X(function of cublasLt.h): all functions that are used. */
#    define XDI_CUDA_CUBLAS_FUNCTIONS(X)        \
        X(cublasLtCreate)                       \
        X(cublasLtDestroy)                      \
        X(cublasLtGetProperty)                  \
        X(cublasLtGetVersion)                   \
        X(cublasLtGetStatusString)              \
        X(cublasLtMatmulDescCreate)             \
        X(cublasLtMatmulDescDestroy)            \
        X(cublasLtMatmulDescSetAttribute)       \
        X(cublasLtMatrixLayoutCreate)           \
        X(cublasLtMatrixLayoutDestroy)          \
        X(cublasLtMatmulPreferenceCreate)       \
        X(cublasLtMatmulPreferenceDestroy)      \
        X(cublasLtMatmulPreferenceSetAttribute) \
        X(cublasLtMatmulAlgoGetHeuristic)       \
        X(cublasLtMatmul)

#    define XDI_CUDA_CUBLAS_MEMBER(function) decltype(&::function) function;
struct xdi_cuda_cublas {
    void *library; /* from dlopen */
    cublasLtHandle_t handle;
    char *memory; /* of the device: cuBLASLt's workspace, then the room for rounded elements */
    XDI_CUDA_CUBLAS_FUNCTIONS(XDI_CUDA_CUBLAS_MEMBER)
};
#    undef XDI_CUDA_CUBLAS_MEMBER

/* NVIDIA recommends 32 MiB for Hopper; 96 MiB hold the gradient of 256 rows of 196608 logits. */
static const size_t xdi_cuda_cublas_workspace_bytes = (size_t)32 << 20;
static const size_t xdi_cuda_cublas_room_bytes = (size_t)96 << 20;

/* A status of cuBLASLt as an xd_result: the failed call as written in the source, and the library's text for the status. */
static xd_result xdi_cuda_cublas_result(xd_ctx *ctx, const xdi_cuda_cublas *cublas, cublasStatus_t status,
                                        const char *call, const char *file, int line, const char *function) {
    if (status == CUBLAS_STATUS_SUCCESS) return XD_OK;
    const xd_result result = status == CUBLAS_STATUS_ALLOC_FAILED ? XD_ERROR_MEMORY : XD_ERROR_DEVICE;
    return xd_fail(ctx, result, file, line, function, "%.160s: %s", call,
                   cublas->cublasLtGetStatusString(status));
}

/* XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtCreate(arguments...)); */
#    define XDI_CUDA_CUBLAS_TRY(ctx, cublas, call) \
        XD_TRY(xdi_cuda_cublas_result((ctx), (cublas), (cublas)->call, #call, __FILE__, __LINE__, __func__))

static xd_result xdi_cuda_cublas_find(xd_ctx *ctx, xdi_cuda_cublas *cublas, const char *name) {
    cublas->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    XD_REQUIRE(ctx, cublas->library, XD_ERROR_UNSUPPORTED, "cuBLASLt cannot be loaded: %s", dlerror());
#    define XDI_CUDA_CUBLAS_FIND(function)                                                             \
        cublas->function = reinterpret_cast<decltype(&::function)>(dlsym(cublas->library, #function)); \
        XD_REQUIRE(ctx, cublas->function, XD_ERROR_UNSUPPORTED, "%s has no function " #function, name);
    XDI_CUDA_CUBLAS_FUNCTIONS(XDI_CUDA_CUBLAS_FIND)
#    undef XDI_CUDA_CUBLAS_FIND
    return XD_OK;
}

/* What the header declares about functions and their arguments holds within a major version. */
static xd_result xdi_cuda_cublas_check_version(xd_ctx *ctx, const xdi_cuda_cublas *cublas, const char *name) {
    int major = 0;
    XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtGetProperty(MAJOR_VERSION, &major));
    XD_REQUIRE(ctx, major == CUBLAS_VER_MAJOR, XD_ERROR_UNSUPPORTED,
                "%s is version %zu of cuBLASLt, the unit was built for version %d", name,
                cublas->cublasLtGetVersion(), CUBLAS_VERSION);
    return XD_OK;
}

/* What was created before a failure is destroyed by xdi_cuda_cublas_close. */
static xd_result xdi_cuda_cublas_set_up(xd_ctx *ctx, const xd_cuda *cuda, const char *name) {
    xdi_cuda_cublas *cublas = cuda->cublas;
    const size_t bytes = xdi_cuda_cublas_workspace_bytes + xdi_cuda_cublas_room_bytes;
    XD_TRY(xdi_cuda_cublas_find(ctx, cublas, name));
    XD_TRY(xdi_cuda_cublas_check_version(ctx, cublas, name));
    XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtCreate(&cublas->handle));
    cublas->memory = (char *)cuda->allocator.allocate(cuda->allocator.user, bytes);
    XD_REQUIRE(ctx, cublas->memory, XD_ERROR_MEMORY, "no room for %zu bytes for products on device %d",
                bytes, cuda->device);
    return XD_OK;
}

/* The device is the current one; its work has ended. */
static void xdi_cuda_cublas_close(xd_cuda *cuda) {
    xdi_cuda_cublas *cublas = cuda->cublas;
    if (!cublas) return;
    if (cublas->memory) cuda->allocator.release(cuda->allocator.user, cublas->memory);
    if (cublas->handle) cublas->cublasLtDestroy(cublas->handle);
    if (cublas->library) dlclose(cublas->library);
    xd_release(cuda->ctx, cublas);
    cuda->cublas = NULL;
}

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

/* A product of two operands of one dtype in cuBLASLt's types; all of it is host memory. */
struct xdi_cuda_cublas_product {
    const xdi_cuda_cublas *cublas;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t first, second, out; /* b, a and out, each transposed */
    cublasLtMatmulPreference_t preference;

    explicit xdi_cuda_cublas_product(const xdi_cuda_cublas *library)
        : cublas(library), operation(NULL), first(NULL), second(NULL), out(NULL), preference(NULL) {}
    ~xdi_cuda_cublas_product() {
        if (preference) cublas->cublasLtMatmulPreferenceDestroy(preference);
        if (out) cublas->cublasLtMatrixLayoutDestroy(out);
        if (second) cublas->cublasLtMatrixLayoutDestroy(second);
        if (first) cublas->cublasLtMatrixLayoutDestroy(first);
        if (operation) cublas->cublasLtMatmulDescDestroy(operation);
    }
    xdi_cuda_cublas_product(const xdi_cuda_cublas_product &) = delete;
    xdi_cuda_cublas_product &operator=(const xdi_cuda_cublas_product &) = delete;

    xd_result describe_side(xd_ctx *ctx, const xd_matrix &x, bool is_first) {
        xdi_cuda_lines lines = {};
        xdi_cuda_lines_of(x, &lines);
        const cublasOperation_t turn = lines.of_terms == is_first ? CUBLAS_OP_T : CUBLAS_OP_N;
        const cudaDataType_t type = x.dtype == XD_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatrixLayoutCreate(is_first ? &first : &second, type,
                                                       (uint64_t)lines.length, (uint64_t)lines.count,
                                                       lines.stride));
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulDescSetAttribute(operation,
                                                           is_first ? CUBLASLT_MATMUL_DESC_TRANSA
                                                                    : CUBLASLT_MATMUL_DESC_TRANSB,
                                                           &turn, sizeof turn));
        return XD_OK;
    }

    /* Alignment beyond 16 bytes is not passed on: the bits would depend on it. */
    xd_result describe_alignment(xd_ctx *ctx, cublasLtMatmulPreferenceAttributes_t of, const void *address) {
        const uint32_t bytes = (uint32_t)xdi_cuda_move_unit_of((uint64_t)(uintptr_t)address, 16);
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulPreferenceSetAttribute(preference, of, &bytes, sizeof bytes));
        return XD_OK;
    }

    xd_result describe_preference(xd_ctx *ctx, const xd_matmul_args &args) {
        const uint64_t most = xdi_cuda_cublas_workspace_bytes;
        XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtMatmulPreferenceCreate(&preference));
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulPreferenceSetAttribute(
                                preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
        XD_TRY(describe_alignment(ctx, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, args.b.data));
        XD_TRY(describe_alignment(ctx, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, args.a.data));
        XD_TRY(describe_alignment(ctx, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, args.out));
        return describe_alignment(ctx, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, args.out);
    }

    xd_result describe(xd_ctx *ctx, const xd_matmul_args &args) {
        const int64_t m = args.a.rows, n = args.b.cols;
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        XD_TRY(describe_side(ctx, xd_matrix_transposed(args.b), true));
        XD_TRY(describe_side(ctx, args.a, false));
        XDI_CUDA_CUBLAS_TRY(ctx, cublas,
                            cublasLtMatrixLayoutCreate(&out, CUDA_R_32F, (uint64_t)n, (uint64_t)m,
                                                       m == 1 ? n : args.out_stride));
        return describe_preference(ctx, args);
    }
};

/* *taken: false where cuBLASLt has no algorithm for the product; nothing has been launched then. */
static xd_result xdi_cuda_cublas_multiply(const xd_launch *launch, const xdi_cuda_cublas *cublas,
                                          const xd_matmul_args &args, bool *taken) {
    const float alpha = 1.0f, beta = args.accumulate ? 1.0f : 0.0f;
    xdi_cuda_cublas_product p(cublas);
    cublasLtMatmulHeuristicResult_t best = {};
    int found = 0;
    *taken = false;
    XD_TRY(p.describe(launch->ctx, args));
    const cublasStatus_t status = cublas->cublasLtMatmulAlgoGetHeuristic(
        cublas->handle, p.operation, p.first, p.second, p.out, p.out, p.preference, 1, &best, &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return XD_OK;
    XD_TRY(xdi_cuda_cublas_result(launch->ctx, cublas, status, "cublasLtMatmulAlgoGetHeuristic(...)",
                                   __FILE__, __LINE__, __func__));
    if (found == 0 || best.state != CUBLAS_STATUS_SUCCESS) return XD_OK;
    *taken = true;
    XDI_CUDA_CUBLAS_TRY(launch->ctx, cublas,
                        cublasLtMatmul(cublas->handle, p.operation, &alpha, args.b.data, p.first, args.a.data,
                                       p.second, &beta, args.out, p.out, args.out, p.out, &best.algo,
                                       cublas->memory, xdi_cuda_cublas_workspace_bytes,
                                       (cudaStream_t)launch->stream));
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
    piece.out = args.out + row * args.out_stride + column;
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
    if (args.a.rows > 1 && args.out_stride < args.b.cols) return false;
    const bool round_a = args.bf16 && left == XD_DTYPE_F32, round_b = args.bf16 && right == XD_DTYPE_F32;
    const size_t each = xdi_cuda_cublas_room_bytes / (round_a && round_b ? 2 : 1);
    char *room = cublas->memory + xdi_cuda_cublas_workspace_bytes;
    return xdi_cuda_side_of(args.a, round_a ? room : NULL, each, a) &&
           xdi_cuda_side_of(xd_matrix_transposed(args.b), round_b ? room + (round_a ? each : 0) : NULL, each,
                            b);
}

static xd_result xdi_cuda_matmul(const xd_launch *launch, const xd_matmul_args *args) {
    const xdi_cuda_cublas *cublas = xdi_cuda_of(launch->ctx)->cublas;
    const bool empty = args->a.rows <= 0 || args->a.cols <= 0 || args->b.cols <= 0;
    const bool invariant = xd_ctx_settings(launch->ctx)->reduction == XD_REDUCTION_INVARIANT;
    xdi_cuda_side a, b;
    if (!cublas || empty || invariant || !xdi_cuda_cublas_sides(cublas, *args, &a, &b))
        return xdi_cuda_matmul_plain(launch, args);
    return xdi_cuda_cublas_pieces(launch, *args, a, b);
}

/* name: as xd_cuda_desc.cublas. What was created before a failure is destroyed by xdi_cuda_cublas_close. */
static xd_result xdi_cuda_cublas_open(xd_ctx *ctx, xd_cuda *cuda, const char *name) {
    char of_this_toolkit[32];
    snprintf(of_this_toolkit, sizeof of_this_toolkit, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    cuda->cublas = (xdi_cuda_cublas *)xd_allocate(ctx, sizeof *cuda->cublas);
    XD_REQUIRE(ctx, cuda->cublas, XD_ERROR_MEMORY, "no room for the functions of cuBLASLt");
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_cublas_round_kernel));
    return xdi_cuda_cublas_set_up(ctx, cuda, name[0] ? name : of_this_toolkit);
}

#else

static xd_result xdi_cuda_matmul(const xd_launch *launch, const xd_matmul_args *args) {
    return xdi_cuda_matmul_plain(launch, args);
}

static xd_result xdi_cuda_cublas_open(xd_ctx *ctx, xd_cuda *, const char *) {
    return XD_FAIL(ctx, XD_ERROR_UNSUPPORTED, "the CUDA unit was built without cublasLt.h");
}

static void xdi_cuda_cublas_close(xd_cuda *) {}

#endif
