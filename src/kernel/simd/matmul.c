/* The matrix product of a CPU level, or the one that the program brings. */

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

XD_PRIVATE xd_result xdi_matmul_cpu(const xd_launch *launch, const xd_matmul_args *args) {
    const xdi_matmul_kernel kernel = xdi_matmul_kernel_level(xd_ctx_settings(launch->ctx)->cpu, args->bf16);
    if (kernel.pairs || !xdi_matmul_sgemm(launch, args)) xdi_matmul_run(&kernel, args, launch->workspace);
    return XD_OK;
}
