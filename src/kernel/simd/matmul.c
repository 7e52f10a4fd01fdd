/* The matrix product of a CPU level, or XD_SGEMM of the program. */

#include "kernel/simd/internal.h"

#if defined(XD_SGEMM)
#    include <limits.h>

enum { XDI_MATMUL_NO_TRANS = 111, XDI_MATMUL_TRANS = 112 }; /* the values of cblas.h */

/* True when the product could be given to XD_SGEMM: f32, one stride of each matrix is 1, sizes fit an int. */
static bool xdi_matmul_sgemm(const xd_launch *launch, const xd_matmul_args *p) {
    const bool a_plain = p->a.col_stride == 1, b_plain = p->b.col_stride == 1;
    const int64_t lda = a_plain ? p->a.row_stride : p->a.col_stride;
    const int64_t ldb = b_plain ? p->b.row_stride : p->b.col_stride;
    if (xd_ctx_settings(launch->ctx)->reduction == XD_REDUCTION_INVARIANT) return false;
    if (p->a.dtype != XD_DTYPE_F32 || p->b.dtype != XD_DTYPE_F32) return false;
    if ((!a_plain && p->a.row_stride != 1) || (!b_plain && p->b.row_stride != 1)) return false;
    if (p->a.rows == 0 || p->a.cols == 0 || p->b.cols == 0) return false;
    if (p->a.rows > INT_MAX || p->a.cols > INT_MAX || p->b.cols > INT_MAX || lda > INT_MAX || ldb > INT_MAX ||
        p->out_stride > INT_MAX)
        return false;
    XD_SGEMM(a_plain ? XDI_MATMUL_NO_TRANS : XDI_MATMUL_TRANS,
             b_plain ? XDI_MATMUL_NO_TRANS : XDI_MATMUL_TRANS, (int)p->a.rows, (int)p->b.cols, (int)p->a.cols,
             1.0f, (const float *)p->a.data, (int)lda, (const float *)p->b.data, (int)ldb,
             p->accumulate ? 1.0f : 0.0f, p->out, (int)p->out_stride);
    return true;
}
#else
static bool xdi_matmul_sgemm(const xd_launch *launch, const xd_matmul_args *args) {
    (void)launch;
    (void)args;
    return false;
}
#endif

XD_API void xd_matmul_cpu(xd_cpu_level level, const xd_matmul_args *args, void *workspace) {
    const xdi_matmul_kernel kernel = xdi_matmul_kernel_level(level, args->bf16);
    xdi_matmul_run(&kernel, args, workspace);
}

/* ---- on several threads ---- */

typedef char xdi_matmul_fits[XD_MATMUL_WORKSPACE_BYTES <= XDI_POOL_SCRATCH ? 1 : -1];

/* The result split into parts of rows and columns, each a separate product: the bits of an element do not depend on the
 * split. */
typedef struct xdi_matmul_cut {
    xdi_matmul_kernel kernel;
    const xd_matmul_args *args;
    int64_t rows, cols;  /* of a part */
    int64_t across, all; /* parts side by side, and in total */
} xdi_matmul_cut;

static int64_t xdi_matmul_parts(int64_t size, int64_t part) {
    return (size + part - 1) / part;
}

/* Whether another split is free: a part of the columns is still larger than what is packed at a time; or a part of the rows
 * is so large that packing the columns once more costs little. */
static bool xdi_matmul_is_free(const xdi_matmul_cut *cut, int64_t rows, int64_t cols) {
    return cols >= 2 * (int64_t)XDI_MATMUL_BLOCK_N * (cut->kernel.pairs ? 2 : 1) || rows >= 4096;
}

/* Parts are halved, the longer side first, because each packs its own rows and columns. Free splits continue until there
 * are a few parts per thread, so that a slow thread takes fewer; the others until every thread has work. */
static void xdi_matmul_plan(int64_t threads, xdi_matmul_cut *cut) {
    const xd_matmul_args *p = cut->args;
    const bool small = p->a.rows * p->b.cols / 64 * p->a.cols <= 1 << 15;
    int64_t down = 1, across = 1, rows = p->a.rows, cols = p->b.cols;
    while (threads > 1 && !small && down * across < 4 * threads) {
        const int64_t parts = down * across;
        const bool is_free = xdi_matmul_is_free(cut, rows, cols);
        if (!is_free && (parts >= 2 * threads || parts % threads == 0)) break;
        if (rows < 96 && cols < 128) break;
        if (is_free ? rows < 4096 || cols >= rows : cols >= rows)
            across *= 2;
        else
            down *= 2;
        rows = xdi_matmul_parts(p->a.rows, down);
        cols = xdi_matmul_parts(p->b.cols, across);
    }
    cut->rows = rows > 0 ? xdi_matmul_parts(rows, 48) * 48 : 1; /* whole tiles of every level */
    cut->cols = cols > 0 ? xdi_matmul_parts(cols, 32) * 32 : 1;
    cut->across = xdi_matmul_parts(p->b.cols, cut->cols);
    cut->all = cut->across * xdi_matmul_parts(p->a.rows, cut->rows);
}

static void xdi_matmul_part(const xd_launch *launch, const void *args, int64_t begin, int64_t end, int slot) {
    const xdi_matmul_cut *cut = (const xdi_matmul_cut *)args;
    void *workspace = slot > 0 ? xdi_parallel_scratch(launch->ctx, slot) : launch->workspace;
    for (int64_t i = begin; i < end; i++) {
        xd_matmul_args p = *cut->args;
        const int64_t row = i / cut->across * cut->rows, col = i % cut->across * cut->cols;
        p.a.data = (const char *)p.a.data + row * p.a.row_stride * xdi_matmul_size(p.a.dtype);
        p.b.data = (const char *)p.b.data + col * p.b.col_stride * xdi_matmul_size(p.b.dtype);
        p.a.rows = xdi_matmul_smaller(cut->rows, p.a.rows - row);
        p.b.cols = xdi_matmul_smaller(cut->cols, p.b.cols - col);
        p.out += row * p.out_stride + col;
        xdi_matmul_run(&cut->kernel, &p, workspace);
    }
}

XD_PRIVATE xd_result xdi_matmul_cpu(const xd_launch *launch, const xd_matmul_args *args) {
    const xd_ctx_desc *settings = xd_ctx_settings(launch->ctx);
    xdi_matmul_cut cut;
    cut.kernel = xdi_matmul_kernel_level(settings->cpu, args->bf16);
    cut.args = args;
    if (!cut.kernel.pairs && xdi_matmul_sgemm(launch, args)) return XD_OK;
    xdi_matmul_plan(settings->threads, &cut);
    return xdi_spread_items(launch, cut.all, 1, xdi_matmul_part, &cut);
}
